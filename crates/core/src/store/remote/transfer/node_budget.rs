//! A budget of connections that all processes of a node share (`connections_per_node`).
//!
//! There is a file with a lock for each connection, one byte each, and another for those that load. A process locks a byte
//! before it connects, and no more bytes than its share: the budget divided by how many load. The locks are those of open
//! file descriptions (`F_OFD_SETLK`). The kernel frees them when the descriptor is closed, and so when the process is killed.

use crate::error::{Error, Result};
use crate::store::remote::http::jitter::Jitter;
use crate::store::remote::http::settings::NodeSettings;
use crate::sync::{lock, Mutex};
use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The byte of the first that loads, and how many there may be.
const MEMBERS: i64 = 1 << 20;
const MOST_MEMBERS: i64 = 1 << 12;
/// How often it is counted who loads.
const COUNTED: Duration = Duration::from_millis(250);
/// How long one waits that has found no free lock, at least and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(40));

/// The part of one thread of connections in the node's budget.
#[derive(Debug)]
pub(in crate::store::remote) struct NodeBudget {
    locks: Arc<Locks>,
    budget: usize,
    /// How many connections this one may have, and when that was counted.
    share: usize,
    /// Whether there are more that load than connections: then they take turns.
    crowded: bool,
    counted: Option<Instant>,
    /// When to look for a free lock again.
    retry: Option<Instant>,
    jitter: Jitter,
}

/// The file, and which of its bytes for connections are locked here.
#[derive(Debug)]
struct Locks {
    file: File,
    held: Mutex<HashSet<i64>>,
}

/// The right to one connection, which is given back when it is dropped.
#[derive(Debug)]
pub(in crate::store::remote) struct Permit {
    locks: Arc<Locks>,
    byte: i64,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = lock(&self.locks.held);
        let _it_is_freed_with_the_descriptor = self.locks.set(self.byte, false);
        held.remove(&self.byte);
    }
}

/// The folder of this node's locks, if none is given: memory of this machine, which a container has for itself.
pub(super) fn usual_folder() -> PathBuf {
    // SAFETY: a plain system call.
    let name = format!("penstock-{}", unsafe { libc::getuid() });
    let shared = Path::new("/dev/shm");
    if shared.is_dir() {
        shared.join(name)
    } else {
        Path::new("/tmp").join(name)
    }
}

/// A part of the node's budget that several threads share.
#[derive(Debug)]
pub(in crate::store::remote) struct SharedBudget(Mutex<NodeBudget>);

impl SharedBudget {
    /// A part of the budget of these settings.
    ///
    /// # Errors
    /// As for [`NodeBudget::join`].
    pub(in crate::store::remote) fn join(settings: &NodeSettings) -> Result<SharedBudget> {
        let folder = settings.folder.clone().unwrap_or_else(usual_folder);
        NodeBudget::join(&folder, settings.connections, Jitter::random()).map(|joined| SharedBudget(Mutex::new(joined)))
    }

    /// Takes a connection, if one is free.
    pub(in crate::store::remote) fn take(&self) -> Option<Permit> {
        let mut budget = lock(&self.0);
        let (now, held) = (Instant::now(), lock(&budget.locks.held).len());
        (held < budget.limit(now)).then(|| budget.take(now)).flatten()
    }

    /// True if others may want a connection that nothing is asked on.
    pub(in crate::store::remote) fn gives_way(&self) -> bool {
        lock(&self.0).gives_way(true)
    }
}

impl Locks {
    /// Locks or unlocks a byte. Whether that could be done.
    fn set(&self, byte: i64, on: bool) -> io::Result<bool> {
        let mut lock = whole(byte, 1, if on { libc::F_WRLCK } else { libc::F_UNLCK });
        // SAFETY: our own descriptor, and a lock that lives as long as the call.
        match unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } {
            0 => Ok(true),
            _ => match io::Error::last_os_error() {
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
                e => Err(e),
            },
        }
    }
}

impl NodeBudget {
    /// A part of a budget of so many connections, among all that use this folder.
    ///
    /// # Errors
    /// `Io`, `Permission`: the folder or the file in it cannot be made, or belongs to another user.
    pub(super) fn join(folder: &Path, budget: usize, jitter: Jitter) -> Result<NodeBudget> {
        let failed = |what: &str, e: &io::Error| {
            let e = Error::io(&format!("{what} for connections_per_node"), e);
            e.reworded(|why| format!("{why}; storage={{\"node_folder\": ...}} names another folder")).at(folder)
        };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|e| failed("make the folder", &e))?;
        // SAFETY: a plain system call.
        let own = unsafe { libc::getuid() };
        let owner = folder.metadata().map_err(|e| failed("look at the folder", &e))?.uid();
        if owner != own && own != 0 {
            let text = "the folder for connections_per_node belongs to another user: name one of your own in \
                        storage={\"node_folder\": ...}";
            return Err(Error::permission(text).at(folder));
        }
        let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
        let file = options.open(folder.join("connections")).map_err(|e| failed("open the file", &e))?;
        let made = NodeBudget {
            locks: Arc::new(Locks { file, held: Mutex::default() }),
            budget: budget.max(1),
            share: 1,
            crowded: false,
            counted: None,
            retry: None,
            jitter,
        };
        // Each that loads has a byte of its own. If all are taken, nobody knows of this one, and the budget holds anyway.
        for byte in MEMBERS..MEMBERS + MOST_MEMBERS {
            if made.locks.set(byte, true).map_err(|e| failed("lock the file", &e))? {
                break;
            }
        }
        Ok(made)
    }

    /// How many others load.
    fn others(&self) -> usize {
        let (mut found, mut ranges) = (0, vec![(MEMBERS, MEMBERS + MOST_MEMBERS)]);
        while let Some((from, until)) = ranges.pop() {
            if from >= until {
                continue;
            }
            let mut lock = whole(from, until - from, libc::F_WRLCK);
            // SAFETY: our own descriptor, and a lock that lives as long as the call. It gets one of the locks in the way: there
            // may be others on both sides of it.
            let asked = unsafe { libc::fcntl(self.locks.file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
            if asked != 0 || lock.l_type == libc::F_UNLCK as libc::c_short {
                continue;
            }
            let (first, past) = (lock.l_start.max(from), (lock.l_start + lock.l_len.max(1)).min(until));
            found += (past - first) as usize;
            ranges.extend([(from, first), (past, until)]);
        }
        found
    }

    /// How many connections this one may have now.
    pub(super) fn limit(&mut self, now: Instant) -> usize {
        if self.counted.is_none_or(|then| now.saturating_duration_since(then) >= COUNTED) {
            let members = self.others() + 1;
            self.counted = Some(now);
            self.crowded = members > self.budget;
            // Nobody has the remainder: with one more for each, the last would have none.
            self.share = (self.budget / members).max(1);
        }
        self.share
    }

    /// Whether a connection that has been used gives way: there are more that load than connections, or there are others, and
    /// this one has nothing to ask for.
    pub(super) fn gives_way(&self, idle: bool) -> bool {
        self.crowded || (idle && self.share < self.budget)
    }

    /// When to look again for a free lock.
    pub(super) fn due(&self) -> Option<Instant> {
        self.retry
    }

    /// A connection of this process is free. Where they take turns, another one finds it first.
    pub(super) fn look_again(&mut self, now: Instant) {
        self.retry = self.crowded.then(|| now + self.jitter.between(RETRY.1, RETRY.1 * 2));
    }

    /// Takes a connection of the budget, if one is free.
    pub(super) fn take(&mut self, now: Instant) -> Option<Permit> {
        if self.retry.is_some_and(|retry| now < retry) {
            return None;
        }
        self.retry = None;
        let first = (self.jitter.share() * self.budget as f64) as usize;
        let mut held = lock(&self.locks.held);
        for step in 0..self.budget {
            let byte = ((first + step) % self.budget) as i64;
            // A lock of our own would be had again.
            if !held.contains(&byte) && self.locks.set(byte, true).unwrap_or(false) {
                held.insert(byte);
                return Some(Permit { locks: self.locks.clone(), byte });
            }
        }
        self.retry = Some(now + self.jitter.between(RETRY.0, RETRY.1));
        None
    }
}

impl Drop for Locks {
    /// A forked child may have the descriptor too, and the locks would stay.
    fn drop(&mut self) {
        let mut all = whole(0, 0, libc::F_UNLCK);
        // SAFETY: our own descriptor, and a lock that lives as long as the call.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut all) };
    }
}

/// A lock of a range of bytes.
fn whole(start: i64, len: i64, kind: i32) -> libc::flock {
    // SAFETY: zeros are valid for all of its fields.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    (lock.l_start, lock.l_len) = (start, len);
    lock
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("penstock-budget-{name}-{}", std::process::id()))
    }

    #[test]
    fn all_together_have_no_more_than_the_budget_and_each_has_its_share() {
        let (folder, now) = (folder("shares"), Instant::now());
        let mut all: Vec<_> = (0..3).map(|n| NodeBudget::join(&folder, 8, Jitter::seeded(n)).unwrap()).collect();
        assert!(all.iter_mut().all(|one| one.limit(now) == 2));
        let mut taken: Vec<Vec<Permit>> = vec![Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..10 {
            all.iter_mut().zip(&mut taken).for_each(|(one, taken)| taken.extend(one.take(now)));
        }
        assert_eq!(taken.iter().map(Vec::len).sum::<usize>(), 8);
        // One that has ended gives back all that it had.
        let had = taken.pop().unwrap().len();
        drop(all.pop());
        let later = now + COUNTED + RETRY.1;
        assert_eq!(all[0].limit(later), 4);
        taken[0].extend((0..10).map_while(|_| all[0].take(later)).take(10));
        assert_eq!(taken.iter().map(Vec::len).sum::<usize>(), 8, "{had} were given back");
        // And what is closed.
        taken[0].clear();
        let closed = 8 - taken[1].len();
        assert_eq!((0..10).map_while(|_| all[1].take(later + RETRY.1)).collect::<Vec<_>>().len(), closed);
        drop((taken, all));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn shares_together_are_no_more_than_the_budget() {
        for (budget, members) in [(8, 5), (8, 3), (7, 4), (4, 4)] {
            let (folder, now) = (folder("sum"), Instant::now());
            let join = |n| NodeBudget::join(&folder, budget, Jitter::seeded(n)).unwrap();
            let mut all: Vec<_> = (0..members).map(join).collect();
            // Each takes its whole share before the next one does.
            let taken: Vec<Vec<Permit>> =
                all.iter_mut().map(|one| (0..one.limit(now)).map_while(|_| one.take(now)).collect()).collect();
            assert!(taken.iter().all(|taken| !taken.is_empty()), "{budget} for {members}");
            drop((taken, all));
            std::fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn members_are_counted_whatever_the_order_of_their_locks() {
        let (folder, now) = (folder("order"), Instant::now());
        let join = |n| NodeBudget::join(&folder, 60, Jitter::seeded(n)).unwrap();
        let mut all: Vec<_> = (0..6).map(join).collect();
        // Their bytes are free, and those that come have them: their locks are the last of the kernel's list.
        for n in [4, 2, 0] {
            drop(all.remove(n));
        }
        all.extend((6..9).map(join));
        for one in &mut all {
            assert_eq!((one.others(), one.limit(now)), (5, 10));
        }
        drop(all);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn more_that_load_than_connections_take_turns() {
        let (folder, now) = (folder("turns"), Instant::now());
        let mut all: Vec<_> = (0..5).map(|n| NodeBudget::join(&folder, 2, Jitter::seeded(n)).unwrap()).collect();
        for one in &mut all {
            assert_eq!(one.limit(now), 1);
            assert!(one.gives_way(false));
        }
        let mut taken: Vec<_> = all.iter_mut().filter_map(|one| one.take(now)).collect();
        assert_eq!(taken.len(), 2);
        // The first gives its connection back, and each of the others may have it before it does.
        taken.remove(0);
        all[0].look_again(now);
        let later = now + RETRY.1;
        assert!(all[0].take(later).is_none());
        taken.extend(all[4].take(later));
        assert_eq!(taken.len(), 2);
        drop((taken, all));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
