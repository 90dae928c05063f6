//! Locks on bytes of a file (fcntl(2), *Open file description locks*). The kernel releases them when the last descriptor of
//! the open file is closed, so also when its process is killed. Two opens of a file conflict, in one process too.
//!
//! A forked child has the parent's open files. As long as it lives, the locks of a killed parent stay. A parent that ends a
//! lock itself unlocks it, and does not rely on `close`. A child must not unlock: the lock is the parent's.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Longest wait for another process that makes or removes files. That takes milliseconds, unless the process is stopped.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
/// Fewest attempts in that time. A process that was stopped itself, or got no processor, has seen nothing of the other one.
const ATTEMPTS: u32 = 100;
/// Time from one attempt to the next.
const PAUSE: Duration = Duration::from_millis(1);

/// The kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LockKind {
    /// Several may hold it. The file is open for reading.
    Shared,
    /// One holds it. The file is open for writing.
    Exclusive,
}

fn record(kind: libc::c_int, bytes: &Range<u64>) -> libc::flock {
    // SAFETY: zeros are a valid `flock`; an open file description lock wants 0 as its process.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = kind as libc::c_short;
    record.l_whence = libc::SEEK_SET as libc::c_short;
    record.l_start = bytes.start as libc::off_t;
    record.l_len = (bytes.end - bytes.start) as libc::off_t;
    record
}

fn call(file: &File, command: libc::c_int, record: &mut libc::flock) -> io::Result<()> {
    loop {
        // SAFETY: one record that is read and written; the descriptor is held by the caller.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(record)) } == 0 {
            return Ok(());
        }
        let cause = io::Error::last_os_error();
        if cause.kind() != io::ErrorKind::Interrupted {
            return Err(cause);
        }
    }
}

/// Locks these bytes, which are at least one; false: another open file holds some of them.
pub(super) fn try_lock(file: &File, kind: LockKind, bytes: Range<u64>) -> io::Result<bool> {
    let kind = match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    };
    match call(file, libc::F_OFD_SETLK, &mut record(kind, &bytes)) {
        Ok(()) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Unlocks these bytes.
pub(super) fn unlock(file: &File, bytes: Range<u64>) {
    // It fails only where the kernel has no memory to split a lock. The lock then stays until the file is closed.
    let _stays = call(file, libc::F_OFD_SETLK, &mut record(libc::F_UNLCK, &bytes));
}

/// All bytes of a file, for `unlock`: a length of 0 is as long as a file can be (fcntl(2)).
pub(super) const ALL: Range<u64> = 0..0;

/// Unlocks all bytes of the file.
pub(super) fn unlock_all(file: &File) {
    unlock(file, ALL);
}

/// Some of these bytes that another open file holds, as far as one lock goes.
pub(super) fn held(file: &File, bytes: Range<u64>) -> io::Result<Option<Range<u64>>> {
    let mut found = record(libc::F_WRLCK, &bytes);
    call(file, libc::F_OFD_GETLK, &mut found)?;
    if found.l_type == libc::F_UNLCK as libc::c_short {
        return Ok(None);
    }
    let start = found.l_start as u64;
    let end = if found.l_len == 0 { u64::MAX } else { start.saturating_add(found.l_len as u64) };
    Ok(Some(start.max(bytes.start)..end.min(bytes.end)))
}

/// Tries until it succeeds, for [`PATIENCE`] and [`ATTEMPTS`]; `None`: it did not.
pub(super) fn retried<T, E>(attempt: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    retried_for(PATIENCE, attempt)
}

/// The same, for another time.
pub(super) fn retried_for<T, E>(
    patience: Duration,
    mut attempt: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let (began, mut attempts) = (Instant::now(), 0);
    loop {
        attempts += 1;
        match attempt()? {
            Some(done) => return Ok(Some(done)),
            None if attempts >= ATTEMPTS && began.elapsed() >= patience => return Ok(None),
            None => std::thread::sleep(PAUSE),
        }
    }
}

/// An exclusive lock on one byte of a file that was opened for it. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct ByteLock {
    file: File,
    process: u32,
}

impl ByteLock {
    /// Locks the byte; `None`: another open file holds it.
    pub(super) fn take(file: File, byte: u64) -> io::Result<Option<ByteLock>> {
        let taken = try_lock(&file, LockKind::Exclusive, byte..byte + 1)?;
        Ok(taken.then(|| ByteLock { file, process: std::process::id() }))
    }
}

impl Drop for ByteLock {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            unlock_all(&self.file);
        }
    }
}
