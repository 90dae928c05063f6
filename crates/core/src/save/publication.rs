//! Publications of one folder come one after the other: the lock that a save has while it gives its files their names.
//!
//! Two saves that rename shards of the same names at the same moment would leave some of each, below one index. The lock is
//! one on a file of the folder (flock), so the kernel releases it if the process ends. The folder itself is not locked:
//! programs may hold a lock on it for reasons of their own, such as `flock FOLDER COMMAND`. The save that has the lock
//! removes the file at its end. A killed one leaves it, and the next save removes it.

use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The name of the file. It is hidden, so no reader takes it for a part of the checkpoint.
const NAME: &str = ".penstock-publish.lock";
/// How often a save that waits for the lock asks for it. Most publications take some milliseconds.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// The lock of a folder, until it is dropped.
#[derive(Debug)]
pub(super) struct PublicationLock {
    file: File,
    path: PathBuf,
}

impl PublicationLock {
    /// Waits for the lock of a folder. The fallback says why there can be none: some file systems have no locks, and in some
    /// folders nobody may make a file.
    ///
    /// # Errors
    /// `Timeout` after `limit`; the error of `go_on`, which is asked again and again.
    pub(super) fn take(
        folder: &Path,
        limit: Duration,
        go_on: impl Fn() -> Result<()>,
    ) -> Result<Result<PublicationLock, Fallback>> {
        let (path, begun) = (folder.join(NAME), Instant::now());
        loop {
            go_on()?;
            match attempt(&path) {
                Ok(Some(file)) => return Ok(Ok(PublicationLock { file, path })),
                Ok(None) => {}
                Err(cause) => {
                    let reason = format!("{}: {cause}", path.display());
                    return Ok(Err(Fallback { from: "locking the folder", to: "comparing its files", reason }));
                }
            }
            if begun.elapsed() >= limit {
                let text = format!(
                    "another save has been giving its files their names here for {:.1} s; nothing of this save is visible",
                    limit.as_secs_f64()
                );
                return Err(Error::new(ErrorKind::Timeout, text).at(folder));
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }
}

impl Drop for PublicationLock {
    fn drop(&mut self) {
        // Before the lock goes: a save that has waited for it sees that the file is gone, and makes a new one.
        let _left_behind = fs::remove_file(&self.path);
        // Closing the file is not enough if the process has forked meanwhile: the child has the descriptor too.
        // SAFETY: a plain system call on a descriptor that is held here.
        unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_UN) };
    }
}

/// The locked file; `None` if another save has the lock.
fn attempt(path: &Path) -> io::Result<Option<File>> {
    let file = open(path)?;
    // SAFETY: a plain system call on a descriptor that is held here.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let cause = io::Error::last_os_error();
        if matches!(cause.raw_os_error(), Some(libc::EWOULDBLOCK | libc::EINTR)) {
            return Ok(None);
        }
        // Nobody can lock it.
        let _left_behind = fs::remove_file(path);
        return Err(cause);
    }
    // The save that had the lock may have removed the file since it was opened, and another one made a new file.
    let ours = file.metadata()?;
    let is_there = fs::symlink_metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()));
    Ok((ours.nlink() > 0 && is_there).then_some(file))
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    match options.clone().write(true).create(true).truncate(false).mode(0o666).open(path) {
        // The file of another user. Only NFS locks no file that cannot be written to.
        Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => options.open(path).map_err(|_| cause),
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn take(folder: &Path, limit: Duration) -> Result<Result<PublicationLock, Fallback>> {
        PublicationLock::take(folder, limit, || Ok(()))
    }

    #[test]
    fn one_save_at_a_time_has_the_lock() {
        let inside = tempfile::tempdir().unwrap();
        let (folder, having, most) = (inside.path(), AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let one = || {
                    for _ in 0..10 {
                        let held = take(folder, PATIENCE).unwrap().unwrap();
                        most.fetch_max(having.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(1));
                        having.fetch_sub(1, Ordering::SeqCst);
                        drop(held);
                    }
                };
                std::thread::Builder::new().spawn_scoped(scope, one).unwrap();
            }
        });
        assert_eq!(most.into_inner(), 1);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
    }

    #[test]
    fn a_save_waits_no_longer_than_its_limit_and_ends_when_it_is_given_up() {
        let inside = tempfile::tempdir().unwrap();
        let held = take(inside.path(), PATIENCE).unwrap().unwrap();
        let late = take(inside.path(), Duration::from_millis(20)).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout);
        assert!(late.message().contains("another save"), "{late}");
        let asked = AtomicU32::new(0);
        let go_on = || match asked.fetch_add(1, Ordering::SeqCst) {
            0..3 => Ok(()),
            _ => Err(Error::new(ErrorKind::Cancelled, "given up")),
        };
        let given_up = PublicationLock::take(inside.path(), PATIENCE, go_on).unwrap_err();
        assert_eq!(given_up.kind(), ErrorKind::Cancelled);
        drop(held);
        assert!(take(inside.path(), PATIENCE).unwrap().is_ok());
    }

    #[test]
    fn a_lock_that_a_child_has_too_ends_with_the_publication() {
        let inside = tempfile::tempdir().unwrap();
        let held = take(inside.path(), PATIENCE).unwrap().unwrap();
        let of_child = held.file.try_clone().unwrap();
        fs::hard_link(inside.path().join(NAME), inside.path().join("kept")).unwrap();
        drop(held);
        // The same file, which the child has open.
        fs::rename(inside.path().join("kept"), inside.path().join(NAME)).unwrap();
        assert!(take(inside.path(), Duration::ZERO).unwrap().is_ok());
        drop(of_child);
    }

    #[test]
    fn the_file_of_a_killed_save_is_taken_over_and_goes() {
        let inside = tempfile::tempdir().unwrap();
        File::create(inside.path().join(NAME)).unwrap();
        drop(take(inside.path(), Duration::ZERO).unwrap().unwrap());
        assert_eq!(fs::read_dir(inside.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_was_removed_is_locked_by_nobody() {
        let inside = tempfile::tempdir().unwrap();
        let (folder, first) = (inside.path(), take(inside.path(), PATIENCE).unwrap().unwrap());
        // A save that had opened the file before it went, and now has its lock.
        let opened = open(&folder.join(NAME)).unwrap();
        drop(first);
        let second = take(folder, Duration::ZERO).unwrap().unwrap();
        // SAFETY: a plain system call on a descriptor that is held here.
        assert_eq!(unsafe { libc::flock(opened.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }, 0);
        assert!(take(folder, Duration::ZERO).is_err(), "the lock on the removed file counts for nothing");
        drop(second);
    }

    #[test]
    fn a_folder_that_takes_no_lock_is_told() {
        let inside = tempfile::tempdir().unwrap();
        fs::create_dir(inside.path().join(NAME)).unwrap();
        for folder in [inside.path().to_path_buf(), inside.path().join("nowhere")] {
            let told = take(&folder, Duration::ZERO).unwrap().unwrap_err();
            assert!(told.reason.starts_with(&format!("{}/{NAME}: ", folder.display())), "{}", told.reason);
        }
        assert_eq!(fs::read_dir(inside.path()).unwrap().count(), 1);
    }
}
