//! The pages of a file in the page cache.

use crate::error::{Error, Result};
use crate::machine::page_size;
use crate::options::{MIB, PAGE};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

/// The finest granularity, in bytes: for less, reading through the page cache is as fast as asking.
const FINEST: u64 = 128 << 10;
/// Most `RWF_NOWAIT` samples for one file: each miss costs 5 us and starts a little read-ahead.
const MOST_SAMPLES: u64 = 1024;

/// The pages of a file in the page cache, and the number of calls it took to find them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Residency {
    /// Sorted, disjoint byte ranges, cut at the end of the file.
    pub ranges: Vec<Range<u64>>,
    /// Calls of `cachestat`.
    pub calls: u32,
    /// One-byte `RWF_NOWAIT` reads (if `cachestat` is refused). Each miss starts a little read-ahead.
    pub samples: u32,
}

impl Residency {
    /// Bytes in the ranges.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }
}

/// `cachestat` has this number on every architecture that matters here (since Linux 6.5).
const SYS_CACHESTAT: libc::c_long = 451;

/// Pages of `range` that are in the page cache. EPERM if the process may not write the file and does not own it.
pub(crate) fn cached_pages(fd: RawFd, range: &Range<u64>) -> io::Result<u64> {
    let asked = [range.start, range.end - range.start];
    let mut told = [0u64; 5];
    // SAFETY: the two structures are two and five u64 (include/uapi/linux/mman.h).
    match unsafe { libc::syscall(SYS_CACHESTAT, fd, asked.as_ptr(), told.as_mut_ptr(), 0) } {
        0 => Ok(told[0]),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn resident(fd: RawFd, range: Range<u64>) -> Result<Residency> {
    let mut found = Residency::default();
    match count_resident(fd, range.clone(), &mut found) {
        Ok(()) => Ok(found),
        // Refused (not the owner), not there (before 6.5, or a seccomp filter), or not for this file system. mincore
        // cannot replace it: to a process that may not know, it says that every page is resident.
        Err(_) => {
            found.ranges.clear();
            sample_resident(fd, range, &mut found)?;
            Ok(found)
        }
    }
}

/// One call tells whether all or nothing of a range is resident (measured: 3 to 22 us for 512 MiB). Any other range is
/// divided.
fn count_resident(fd: RawFd, range: Range<u64>, found: &mut Residency) -> io::Result<()> {
    found.calls += 1;
    let pages = cached_pages(fd, &range)?;
    if pages == 0 {
        return Ok(());
    }
    let len = range.end - range.start;
    if pages >= range.end.div_ceil(page_size()) - range.start / page_size() {
        push(&mut found.ranges, range);
        return Ok(());
    }
    let step = match len {
        _ if len <= FINEST => return Ok(()),
        _ if len <= MIB => FINEST,
        _ if len <= 64 * MIB => MIB,
        _ => 64 * MIB,
    };
    let mut start = range.start;
    while start < range.end {
        let end = (start + step).min(range.end);
        count_resident(fd, start..end, found)?;
        start = end;
    }
    Ok(())
}

/// If a read that must not wait returns a page, the page is resident. Unlike mincore, this is true for every process.
fn sample_resident(fd: RawFd, range: Range<u64>, found: &mut Residency) -> Result<()> {
    let step = MIB.max((range.end - range.start).div_ceil(MOST_SAMPLES).next_multiple_of(PAGE));
    let mut start = range.start;
    while start < range.end {
        let end = (start + step).min(range.end);
        let mut byte = 0u8;
        let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        found.samples += 1;
        // In the middle: the read-ahead that a miss starts stays within the chunk, so samples do not influence each
        // other.
        let at = (start + (end - start) / 2) as i64;
        // SAFETY: one byte is read into `byte`.
        match unsafe { libc::preadv2(fd, &raw const to, 1, at, libc::RWF_NOWAIT) } {
            0.. => push(&mut found.ranges, start..end),
            _ => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EAGAIN) || e.kind() == io::ErrorKind::Interrupted => {}
                // This file system cannot answer. Nothing is known, so nothing counts as resident.
                e if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) => {
                    found.ranges.clear();
                    return Ok(());
                }
                e => return Err(Error::io("read", &e).range(start..end)),
            },
        }
        start = end;
    }
    Ok(())
}

fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}
