//! The commands `warm` and `evict`, for one file. Its file system may hang: so there are forms on a thread that can be
//! left behind.

use super::files::Files;
use super::fill_after::{stop_fills_of, DiskUse};
use super::pread::{read_fully, MOST_PER_CALL};
use super::residency::Residency;
use crate::detached::detached;
use crate::error::{Error, Result};
use crate::machine::cores;
use crate::options::MIB;
use crate::sync::{lock, Mutex};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Threads that `warm` takes by itself: they wait for the disk, so few cores are no reason for few of them.
const LEAST_READERS: usize = 4;
const MOST_READERS: usize = 16;

/// Drops the pages of `range` (`None`: of the whole file) from the page cache, and writes dirty ones back first.
/// Returns the bytes of the file that are still resident: pages that a process maps stay. Needs no privilege.
pub fn evict(path: &Path, range: Option<Range<u64>>) -> Result<u64> {
    let files = Files::from_paths(&[path])?;
    stop_fills_of(&files);
    let fd = files.open(0, false)?;
    // For the kernel, a length of 0 means "to the end".
    let range = range.unwrap_or(0..0);
    let (offset, len) = (range.start as i64, (range.end - range.start) as i64);
    let write_back = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: plain system calls on a descriptor we hold. What sync_file_range cannot do (ESPIPE, EINVAL on odd file
    // systems) only means that dirty pages stay, which the count returned below shows.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), offset, len, write_back) };
    // SAFETY: as above.
    let rc = unsafe { libc::posix_fadvise(fd.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED) };
    if rc != 0 {
        return Err(Error::io("drop from the page cache", &io::Error::from_raw_os_error(rc)).at(path));
    }
    Ok(files.resident_ranges(0)?.bytes())
}

/// Reads the file into the page cache, with `threads` threads; 0: as many as are of use. Returns its size in bytes.
pub fn warm(path: &Path, threads: usize) -> Result<u64> {
    warm_telling(path, threads, &Warming::default())
}

/// How far a [`warm`] has come, and whether it is to go on.
#[derive(Default)]
struct Warming {
    read: AtomicU64,
    stopped: AtomicBool,
}

impl Warming {
    /// Bytes read.
    fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// Threads that read a file of `size` bytes; `threads`: as many as are asked for, 0: as many as are of use here.
fn readers(threads: usize, size: u64) -> usize {
    let threads = if threads == 0 { cores().clamp(LEAST_READERS, MOST_READERS) } else { threads };
    threads.min(usize::try_from(size.div_ceil(MIB)).unwrap_or(usize::MAX))
}

fn warm_telling(path: &Path, threads: usize, state: &Warming) -> Result<u64> {
    let _disk = DiskUse::begin();
    let files = Files::from_paths(&[path])?;
    let fd = files.open(0, false)?;
    let size = files.size(0);
    let next = AtomicU64::new(0);
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let work = || {
        let mut scratch = vec![0u8; MIB as usize];
        loop {
            let at = next.fetch_add(MIB, Ordering::Relaxed);
            if at >= size || state.stopped.load(Ordering::Relaxed) || lock(&failed).is_some() {
                return;
            }
            let mut to = [libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: scratch.len() }];
            // SAFETY: `scratch` is MIB bytes long and ours.
            if let Err(e) = unsafe { read_fully(fd.as_raw_fd(), at, &mut to, 0, MOST_PER_CALL) } {
                *lock(&failed) = Some(Error::io("read", &e.cause).at(path).range(at..(at + MIB).min(size)));
            }
            state.read.fetch_add(MIB, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..readers(threads, size) {
            // If no more threads can be started (a process limit), fewer do the work. This thread works in any case.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(size),
    }
}

/// [`warm`](warm), given up where `go_on`, asked every 50 ms, says so (kind `Cancelled`), and where nothing is read
/// for `stall` (kind `Timeout`).
pub fn warm_while(path: &Path, threads: usize, stall: Duration, go_on: impl FnMut() -> bool) -> Result<u64> {
    let state = Arc::new(Warming::default());
    let (file, shared) = (path.to_path_buf(), Arc::clone(&state));
    let found = detached(move || warm_telling(&file, threads, &shared), Some(stall), || state.read(), go_on);
    // Where it was given up, its threads end with the reads that they are in.
    state.stop();
    found.map_err(|e| e.at(path))
}

/// [`evict`], given up where `go_on`, asked every 50 ms, says so (kind `Cancelled`). Writing back what is dirty may take
/// any time, without an answer of the file system in between.
pub fn evict_while(path: &Path, go_on: impl FnMut() -> bool) -> Result<u64> {
    let file = path.to_path_buf();
    detached(move || evict(&file, None), None, || 0, go_on).map_err(|e| e.at(path))
}

/// The residency of a file, and its size in bytes; given up as [`warm_while`] is.
pub fn residency_while(path: &Path, stall: Duration, go_on: impl FnMut() -> bool) -> Result<(Residency, u64)> {
    let file: PathBuf = path.to_path_buf();
    let work = move || {
        let files = Files::from_paths(&[&file])?;
        Ok((files.resident_ranges(0)?, files.size(0)))
    };
    detached(work, Some(stall), || 0, go_on).map_err(|e| e.at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_warmed_by_the_threads_that_are_asked_for_or_by_several() {
        let many = 1000 * MIB;
        assert!((LEAST_READERS..=MOST_READERS).contains(&readers(0, many)));
        assert_eq!((readers(1, many), readers(3, many), readers(40, many)), (1, 3, 40));
        assert_eq!(
            (readers(0, MIB), readers(40, 2 * MIB + 1), readers(40, 0)),
            (1, 3, 0),
            "no more than there is to read"
        );
    }
}
