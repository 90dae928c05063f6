//! Short rows out of the page cache: each by a system call of its own, or several with the gaps between them.
//!
//! A row that is far from the next one is read straight to its place. Where gaps are short, a system call costs more than
//! copying the gap. Then a stretch of rows is read into a buffer that stays in the processor's cache, and copied from there.
//! A file that was cut short meanwhile gives a short read. Out of a mapping the same rows would be SIGBUS.
//!
//! `process_vm_readv` out of a mapping, with 1,024 rows a call, was measured and is not used: it takes as long for a row as a
//! system call does (0.55 us), because it looks up and pins the pages of each, and mapping small pages takes 90 ms/GiB.

use crate::rows::{self, RowPlaces};
use crate::store::read_fully;
use std::io;
use std::os::fd::RawFd;

/// Bytes of the buffer: with the places of its rows it stays in a processor's second-level cache.
const WINDOW: u64 = 512 << 10;

/// Rows to be read, their places, and what that needs.
pub(super) struct RowReads<'a> {
    pub(super) rows: &'a [RowPlaces],
    /// Gaps of at most so many bytes are read.
    pub(super) gap: u64,
    pub(super) scratch: &'a mut Vec<u8>,
}

/// The reason for missing rows.
#[derive(Debug)]
pub(super) enum Why {
    /// The file ends.
    Ended,
    /// A call failed that was to bring so many bytes.
    Failed(io::Error, u64),
}

/// How far reading came.
#[derive(Debug, Default)]
pub(super) struct Filled {
    /// Bytes that were read.
    pub(super) bytes: u64,
    /// System calls.
    pub(super) calls: u64,
    /// Offset in the read behind the last byte that is at its place, or may be.
    pub(super) reached: u64,
    /// Offset in the read behind the first byte of the last strip that is at its place: the next one may begin there too.
    pub(super) begun: u64,
    /// Set if it did not come to the end.
    pub(super) stopped: Option<Why>,
}

impl RowReads<'_> {
    /// Reads all rows. `offset` is where the read begins in the file, `cap` the most bytes of one call.
    ///
    /// # Safety
    /// The places of all rows are writable.
    pub(super) unsafe fn fill(self, fd: RawFd, offset: u64, cap: u64) -> Filled {
        let mut filled = Filled::default();
        // One past the first byte of the strip before.
        let mut before = None;
        for strip in self.rows {
            let RowPlaces { from, to, len, rows, from_stride, to_stride } = *strip;
            filled.begun = before.replace(from + 1).unwrap_or(0);
            let hole = from_stride.saturating_sub(len);
            let is_one = rows <= 1 || (hole == 0 && to_stride == len);
            let (each, count) = if is_one { (len * rows, 1) } else { (len, rows) };
            if is_one || hole > self.gap || 2 * from_stride > WINDOW {
                for row in 0..count {
                    let at = from + row * from_stride;
                    // SAFETY: within the places of the strip.
                    let place = unsafe { to.add((row * to_stride) as usize) };
                    // SAFETY: the caller vouches for the place.
                    if !unsafe { filled.read(fd, (offset, at), place, each, cap) } {
                        return filled;
                    }
                }
                continue;
            }
            self.scratch.resize(WINDOW as usize, 0);
            let per = WINDOW / from_stride;
            for first in (0..rows).step_by(per as usize) {
                let these = per.min(rows - first);
                let at = from + first * from_stride;
                let window = self.scratch.as_mut_ptr();
                // SAFETY: the rows with their gaps are no longer than the window.
                if !unsafe { filled.read(fd, (offset, at), window, (these - 1) * from_stride + len, cap) } {
                    return filled;
                }
                // SAFETY: within the places of the strip, which the caller vouches for. The window is nobody else's.
                unsafe {
                    let to = to.add((first * to_stride) as usize);
                    let (from, to) = ((window.cast_const(), from_stride as usize), (to, to_stride as usize));
                    rows::copy(from, to, len as usize, these as usize);
                }
            }
        }
        filled
    }
}

impl Filled {
    /// Reads `len` bytes at `at` of the read. False: they are not there.
    ///
    /// # Safety
    /// `len` bytes from `to` on are writable.
    unsafe fn read(&mut self, fd: RawFd, (offset, at): (u64, u64), to: *mut u8, len: u64, cap: u64) -> bool {
        self.calls += 1;
        let mut place = [libc::iovec { iov_base: to.cast(), iov_len: len as usize }];
        // SAFETY: the caller vouches for the place.
        let (got, why) = match unsafe { read_fully(fd, offset + at, &mut place, 0, cap) } {
            Ok(got) => (got, (got < len).then_some(Why::Ended)),
            Err(stopped) => (stopped.got, Some(Why::Failed(stopped.cause, stopped.asked))),
        };
        self.bytes += got;
        // Of rows that did not arrive, those behind this one have not begun.
        self.reached = if why.is_some() { at + got } else { self.reached.max(at + got) };
        self.stopped = why;
        self.stopped.is_none()
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    const GAP: u64 = 8 << 10;

    fn bytes(len: u64) -> Vec<u8> {
        (0..len).map(|i| (i / 3 + i / 251) as u8).collect()
    }

    /// A file, and the rows of it that go to new memory, densely.
    struct Case {
        file: tempfile::NamedTempFile,
        of: Vec<u8>,
        memory: Vec<u8>,
        strips: Vec<(u64, u64, u64, u64)>,
    }

    impl Case {
        /// `strips`: offset of the first row, bytes of each, how many, bytes from row to row.
        fn new(nbytes: u64, strips: &[(u64, u64, u64, u64)]) -> Case {
            let file = tempfile::NamedTempFile::new().unwrap();
            let of = bytes(nbytes);
            std::fs::write(file.path(), &of).unwrap();
            let wanted: u64 = strips.iter().map(|(_, len, rows, _)| len * rows).sum();
            Case { file, of, memory: vec![0; wanted as usize], strips: strips.to_vec() }
        }

        fn fill(&mut self, gap: u64, cap: u64) -> Filled {
            let mut at = 0;
            let mut rows = Vec::new();
            for &(from, len, count, from_stride) in &self.strips {
                let to = self.memory.as_mut_ptr().wrapping_add(at);
                at += (len * count) as usize;
                rows.push(RowPlaces { from, to, len, rows: count, from_stride, to_stride: len });
            }
            let places = RowReads { rows: &rows, gap, scratch: &mut Vec::new() };
            // SAFETY: the memory has as many bytes as the rows.
            unsafe { places.fill(self.file.as_file().as_raw_fd(), 0, cap) }
        }

        fn expected(&self) -> Vec<u8> {
            let row = |&(from, len, count, stride): &(u64, u64, u64, u64)| {
                (0..count).flat_map(move |i| {
                    self.of[(from + i * stride) as usize..(from + i * stride + len) as usize].to_vec()
                })
            };
            self.strips.iter().flat_map(row).collect()
        }
    }

    #[test]
    fn rows_that_are_far_apart_are_one_call_each_and_nothing_else_is_read() {
        let mut case = Case::new(4 << 20, &[(528, 7168, 100, 28672)]);
        let filled = case.fill(GAP, u64::MAX);
        assert!(filled.stopped.is_none());
        assert_eq!((filled.calls, filled.bytes), (100, 100 * 7168));
        assert!(case.memory == case.expected());
    }

    #[test]
    fn rows_that_are_near_are_read_together_with_the_gaps_between_them() {
        let mut case = Case::new(4 << 20, &[(7, 384, 2500, 1536)]);
        let filled = case.fill(GAP, u64::MAX);
        assert!(filled.stopped.is_none());
        let (read, per) = (2499 * 1536 + 384, WINDOW / 1536);
        assert_eq!(filled.calls, 2500u64.div_ceil(per));
        // What lies between two windows is not read.
        assert_eq!(filled.bytes, read - (filled.calls - 1) * (1536 - 384));
        assert!(case.memory == case.expected());
    }

    #[test]
    fn every_kind_of_rows_is_read_with_every_gap() {
        let strips = [(3, 1, 900, 2), (5000, 2, 70, 6), (6000, 4, 9, 400), (11_000, 8, 1, 8), (12_000, 100, 30, 100)];
        let more = [(20_000, 300_000, 2, 400_001), (900_000, 511, 200, 9000)];
        let mut case = Case::new(3 << 20, &[&strips[..], &more[..]].concat());
        for gap in [0, 1, 100, GAP, 1 << 20] {
            for cap in [u64::MAX, 4096] {
                case.memory.fill(0);
                let filled = case.fill(gap, cap);
                assert!(filled.stopped.is_none());
                assert!(case.memory == case.expected(), "{gap} {cap}");
            }
        }
    }

    #[test]
    fn a_file_that_was_cut_short_ends_where_it_ends_and_is_no_signal() {
        for (strip, gap) in [((0, 7168, 100, 28672), GAP), ((0, 384, 2500, 1536), GAP)] {
            let mut case = Case::new(4 << 20, &[strip]);
            case.file.as_file().set_len(1_000_000).unwrap();
            let filled = case.fill(gap, u64::MAX);
            assert!(matches!(filled.stopped, Some(Why::Ended)), "{filled:?}");
            assert!((970_000..1_004_000).contains(&filled.reached), "{filled:?}");
        }
    }

    #[test]
    fn of_two_strips_that_begin_together_the_first_is_known_to_be_at_its_place() {
        let case = Case::new(1 << 20, &[(100, 4096, 1, 4096)]);
        let mut memory = vec![0u8; 4096];
        let at = |to: *mut u8| RowPlaces { from: 100, to, len: 4096, rows: 1, from_stride: 0, to_stride: 0 };
        let rows = [at(memory.as_mut_ptr()), at(std::ptr::without_provenance_mut(64))];
        let places = RowReads { rows: &rows, gap: GAP, scratch: &mut Vec::new() };
        // SAFETY: the first place is ours. The kernel refuses to write to the second one.
        let filled = unsafe { places.fill(case.file.as_file().as_raw_fd(), 0, u64::MAX) };
        assert_eq!((filled.reached, filled.begun), (100, 101));
        assert!(memory == case.of[100..4196]);
    }

    #[test]
    fn a_call_that_fails_says_how_far_it_came() {
        let case = Case::new(1 << 20, &[(0, 4096, 10, 65536)]);
        let mut memory = vec![0u8; 4096];
        let at = |to: *mut u8, from| RowPlaces { from, to, len: 4096, rows: 1, from_stride: 0, to_stride: 0 };
        let nowhere = std::ptr::without_provenance_mut(64);
        let rows = [at(memory.as_mut_ptr(), 0), at(nowhere, 8192)];
        let places = RowReads { rows: &rows, gap: GAP, scratch: &mut Vec::new() };
        // SAFETY: the first place is ours. The kernel refuses to write to the second one.
        let filled = unsafe { places.fill(case.file.as_file().as_raw_fd(), 0, u64::MAX) };
        assert_eq!(filled.reached, 8192);
        assert!(matches!(&filled.stopped, Some(Why::Failed(e, 4096)) if e.raw_os_error() == Some(libc::EFAULT)));
        assert!(memory == case.of[..4096]);
    }
}
