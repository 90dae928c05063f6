//! The locks that say which entries are open, so that nobody removes them: one byte of the marker for each, and one descriptor
//! for all of a process.

use super::key::lock_byte;
use super::lock::{held, try_lock, unlock, LockKind, ALL};
use crate::store::per_process::PerProcess;
use crate::sync::{lock, Mutex};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, PoisonError};

/// The byte of the marker whose holder evicts. The bytes of making are smaller, the bytes of open entries are larger.
pub(super) const EVICTING: u64 = 1 << 62;

/// The first byte of the marker that the process has locked which asks for the first bytes of a location. It locks as many as the
/// number of the process says, and one: so others know it. They are behind the bytes of open entries.
pub(super) fn asking_byte(key: &str) -> u64 {
    EVICTING + 1 + (1 << 61) + (lock_byte(key) >> 18) * MOST_ASKING
}

/// The most bytes that one locks for that.
pub(super) const MOST_ASKING: u64 = 1 << 16;

/// The byte of an entry that is open. Two entries with the same byte are open together.
pub(super) fn open_byte(id: &str) -> u64 {
    EVICTING + 1 + lock_byte(id) / 2
}

/// The descriptors of a process that have locks, for its forked children. Each child has a list of its own: its parent may have
/// held the lock of the list when it forked. Not loom's lock: no model has a cache.
static LOCKED: PerProcess<std::sync::Mutex<Vec<RawFd>>> = PerProcess::new();

fn locked() -> std::sync::MutexGuard<'static, Vec<RawFd>> {
    LOCKED.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// An open file with locks.
#[derive(Debug)]
pub(super) struct LockedFile {
    file: Arc<File>,
    /// The bytes whose locks end with this. Other threads may have the open file too, with locks on other bytes.
    bytes: Range<u64>,
    process: u32,
}

impl LockedFile {
    pub(super) fn new(file: Arc<File>, bytes: Range<u64>) -> LockedFile {
        locked().push(file.as_raw_fd());
        LockedFile { file, bytes, process: std::process::id() }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // A forked child may have the open file for long. In the child, the locks are the parent's.
        if self.process == std::process::id() {
            unlock(&self.file, self.bytes.clone());
            let mut all = locked();
            if let Some(at) = all.iter().position(|fd| *fd == self.file.as_raw_fd()) {
                all.swap_remove(at);
            }
        }
    }
}

/// In a forked child: closes the files with locks of the parent, so that the locks end with the parent. Nothing else uses them
/// here. A child of a thread that forks while another one opens or drops an entry keeps them.
pub fn leave_to_parent() {
    let Some(Ok(mut all)) = LOCKED.of_parent().map(std::sync::Mutex::try_lock) else { return };
    let Ok(nothing) = File::open("/dev/null") else { return };
    for fd in all.drain(..) {
        // The number stays taken: the child's copy of the file closes it.
        // SAFETY: both are descriptors of this process; what uses the file checks the process before.
        unsafe { libc::dup3(nothing.as_raw_fd(), fd, libc::O_CLOEXEC) };
    }
}

/// The open entries of a folder in this process.
#[derive(Debug)]
pub(super) struct OpenLocks {
    marker: LockedFile,
    /// How many have each byte.
    held: Mutex<HashMap<u64, usize>>,
}

impl OpenLocks {
    pub(super) fn new(marker: File) -> Arc<OpenLocks> {
        Arc::new(OpenLocks { marker: LockedFile::new(Arc::new(marker), ALL), held: Mutex::default() })
    }

    /// True if this process may use it. A forked child needs its own.
    pub(super) fn is_own(&self) -> bool {
        self.marker.process == std::process::id()
    }

    /// Keeps an entry from being removed; `None`: somebody removes it now.
    pub(super) fn hold(self: &Arc<Self>, id: &str) -> io::Result<Option<OpenLock>> {
        let byte = open_byte(id);
        let mut held = lock(&self.held);
        if !held.contains_key(&byte) && !try_lock(self.marker.file(), LockKind::Shared, byte..byte + 1)? {
            return Ok(None);
        }
        *held.entry(byte).or_default() += 1;
        Ok(Some(OpenLock { of: self.clone(), byte }))
    }
}

/// An entry that is open.
#[derive(Debug)]
pub(super) struct OpenLock {
    of: Arc<OpenLocks>,
    byte: u64,
}

impl OpenLock {
    /// True if another entry with this byte is open, in whatever process. Where nobody can say so, one may be.
    pub(super) fn is_shared(&self) -> bool {
        let OpenLock { of, byte } = self;
        let here = lock(&of.held).get(byte).copied().unwrap_or_default();
        here > 1 || held(of.marker.file(), *byte..*byte + 1).map_or(true, |found| found.is_some())
    }
}

impl OpenLock {
    /// Does something while no other entry with this byte is open, in whatever process; `None`: one is. Others wait until it
    /// has ended.
    pub(super) fn alone<T>(&self, work: impl FnOnce() -> T) -> io::Result<Option<T>> {
        let OpenLock { of, byte } = self;
        let held = lock(&of.held);
        let bytes = *byte..*byte + 1;
        if held.get(byte) != Some(&1) || !try_lock(of.marker.file(), LockKind::Exclusive, bytes.clone())? {
            return Ok(None);
        }
        let done = work();
        // The open file has the lock: nobody can refuse the weaker one.
        try_lock(of.marker.file(), LockKind::Shared, bytes)?;
        Ok(Some(done))
    }
}

impl Drop for OpenLock {
    fn drop(&mut self) {
        let OpenLock { of, byte } = self;
        if !of.is_own() {
            return;
        }
        let mut held = lock(&of.held);
        let left = held.get(byte).copied().unwrap_or_default().saturating_sub(1);
        if left > 0 {
            held.insert(*byte, left);
        } else {
            held.remove(byte);
            unlock(of.marker.file(), *byte..*byte + 1);
        }
    }
}

/// Does something while this thread holds the lock of the descriptors that have locks.
#[cfg(test)]
pub(super) fn while_listed<T>(work: impl FnOnce() -> T) -> T {
    let _all = locked();
    work()
}
