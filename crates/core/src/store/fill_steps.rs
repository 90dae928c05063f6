//! The steps of one fill of the page cache (`fill_after`).
//!
//! A step populates a huge page in a mapping, or reads its bytes. That brings pages into the page cache, and no processor
//! touches what is populated, or what the kernel has read ahead. In a virtual machine the first touch of such a page can
//! cost 9 us, because the host has to make it real (`source/touch`). The next load would pay that: 3.33 s for 3.0 GB, where
//! the cold load took 2.64 s. So each step reads its first pages and measures the processor time. If that was slow, the step
//! reads all of its bytes, those that were there before too. Then the same load takes 1.06 s. In 251 steps of a file of GPT-2
//! the first 64 KiB told of all others: they missed 2 of 6,748 slow stretches of 64 KiB.
//!
//! The kernel may take pages back while the fill goes on. Some machines reclaim what no processor has used for a while, as
//! populated pages are. So the fill counts at the end what is missing, and brings that in too.

use super::files::Files;
use super::pread::read_fully;
use super::residency::cached_pages;
use crate::error::{Error, ErrorKind, Result};
use crate::machine::{self, page_size, thread_cpu};
use crate::memory::Mapping;
use crate::options::{HUGE_PAGE, MIB};
use crate::source::{is_slow, SLOW_TOUCH, TOUCH_SAMPLE};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of one step: 1 ms of a fast disk. It is a huge page, so that the page cache holds it as one folio. Later
/// starts copy and map a folio faster than small pages.
const STEP: u64 = HUGE_PAGE;
/// Bytes of one read. The buffer stays in the processor's cache.
const SCRATCH: u64 = 256 << 10;
/// The memory left is asked for once per so many bytes: asking takes about twenty system calls.
const LOOK_EVERY: u64 = 64 * MIB;
/// Passes over all bytes. A pass in which nearly everything is there takes 10 ms/GB.
const MOST_PASSES: u32 = 4;

/// A fill of the page cache, and its progress.
pub(super) struct FillSteps {
    files: Files,
    /// The bytes that are filled; sorted by file and offset.
    ranges: Vec<(u32, Range<u64>)>,
    /// For each file: whether it is wanted whole, or nearly. The kernel reads nothing ahead of other files.
    whole: Vec<bool>,
    total: u64,
    /// Passes that are over.
    passes: AtomicU32,
    /// Bytes of the ranges, in their order, that this pass has done.
    done: AtomicU64,
    /// Bytes that the page cache is known to hold.
    nbytes: AtomicU64,
    /// Bytes that a processor has read.
    read: AtomicU64,
    /// From how much time on the first touch of a page is slow.
    slow: Duration,
}

impl FillSteps {
    /// Steps for these ranges of the files; `whole` flags the files that are wanted whole.
    pub(super) fn new(files: Files, mut ranges: Vec<(u32, Range<u64>)>, whole: &[bool]) -> FillSteps {
        ranges.sort_unstable_by_key(|r| (r.0, r.1.start));
        let mut merged: Vec<(u32, Range<u64>)> = Vec::new();
        for (file, range) in ranges {
            match merged.last_mut() {
                Some((last, found)) if *last == file && range.start <= found.end => {
                    found.end = found.end.max(range.end)
                }
                _ => merged.push((file, range)),
            }
        }
        for (file, range) in &mut merged {
            // A direct read may go past the end of its file.
            range.end = range.end.min(files.size(*file));
        }
        merged.retain(|(_, range)| range.start < range.end);
        FillSteps {
            total: merged.iter().map(|(_, range)| range.end - range.start).sum(),
            files,
            ranges: merged,
            whole: whole.to_vec(),
            passes: AtomicU32::new(0),
            done: AtomicU64::new(0),
            nbytes: AtomicU64::new(0),
            read: AtomicU64::new(0),
            slow: SLOW_TOUCH,
        }
    }

    pub(super) fn files(&self) -> &Files {
        &self.files
    }

    /// Bytes that the page cache will hold.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that it is known to hold.
    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes.load(Ordering::Relaxed)
    }

    /// The buffer that [`run`](Self::run) reads into.
    pub(super) fn scratch() -> Vec<u8> {
        vec![0; SCRATCH as usize]
    }

    /// Fills, from where it stopped last, until all bytes are in the page cache. False if `goes_on`, asked before each step,
    /// said no before.
    pub(super) fn run(&self, goes_on: &dyn Fn() -> bool, scratch: &mut [u8]) -> Result<bool> {
        loop {
            if !self.pass(goes_on, scratch)? {
                return Ok(false);
            }
            let missing = self.missing()?;
            self.nbytes.store(self.total - missing, Ordering::Relaxed);
            if missing == 0 {
                return Ok(true);
            }
            let passes = self.passes.fetch_add(1, Ordering::Relaxed) + 1;
            if passes >= MOST_PASSES {
                let text = format!("the kernel takes pages back: after {passes} passes {missing} bytes are missing");
                return Err(Error::new(ErrorKind::OutOfMemory, text));
            }
            self.done.store(0, Ordering::Relaxed);
        }
    }

    /// Bytes that the page cache does not hold. Where the kernel does not tell, none.
    fn missing(&self) -> Result<u64> {
        let mut missing = 0;
        for (file, range) in &self.ranges {
            let fd = self.files.open(*file, false)?;
            let Ok(cached) = cached_pages(fd.as_raw_fd(), range) else { return Ok(0) };
            let lost = pages(range).saturating_sub(cached) * page_size();
            missing += lost.min(range.end - range.start);
        }
        Ok(missing)
    }

    /// Does the rest of the steps. False if it was stopped before the last one.
    fn pass(&self, goes_on: &dyn Fn() -> bool, scratch: &mut [u8]) -> Result<bool> {
        let is_first = self.passes.load(Ordering::Relaxed) == 0;
        let mut skip = self.done.load(Ordering::Relaxed);
        let mut look = 0;
        for (file, range) in &self.ranges {
            let len = range.end - range.start;
            if skip >= len {
                skip -= len;
                continue;
            }
            let fd = self.files.open(*file, false)?;
            let whole = self.whole.get(*file as usize) == Some(&true);
            let how = if whole { libc::POSIX_FADV_SEQUENTIAL } else { libc::POSIX_FADV_RANDOM };
            // SAFETY: a plain system call on a descriptor we hold. It is advice.
            unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, how) };
            // Of a file that is wanted in part, some pages may not be wanted. So its bytes are read, not populated.
            let mapping = if whole { Mapping::new(&*fd, self.files.size(*file)).ok() } else { None };
            let mut at = range.start + std::mem::take(&mut skip);
            while at < range.end {
                if !goes_on() {
                    return Ok(false);
                }
                // A step ends at a multiple of its size: the kernel reads ahead in whole pieces.
                let end = (at / STEP * STEP + STEP).min(range.end);
                let left = self.total - self.nbytes();
                if look == 0 {
                    let room = machine::memory_available();
                    if left > room {
                        let text = format!("the other {left} bytes do not fit into the memory left ({room})");
                        return Err(Error::new(ErrorKind::OutOfMemory, text));
                    }
                    look = LOOK_EVERY;
                }
                look = look.saturating_sub(end - at);
                self.files.verify_file(*file)?;
                let (fd, step) = (fd.as_raw_fd(), at..end);
                if is_there(fd, &step) || mapping.as_ref().is_some_and(|m| populate(m, &step)) {
                    self.touch(*file, fd, step, scratch)?;
                } else {
                    self.read(*file, fd, step, scratch)?;
                }
                self.done.fetch_add(end - at, Ordering::Relaxed);
                if is_first {
                    self.nbytes.fetch_add(end - at, Ordering::Relaxed);
                }
                at = end;
            }
        }
        Ok(true)
    }

    /// Reads the bytes of a step whose pages are there: the first ones, and all of them if that was slow.
    fn touch(&self, file: u32, fd: RawFd, step: Range<u64>, scratch: &mut [u8]) -> Result<()> {
        let sample = step.start..step.end.min(step.start + TOUCH_SAMPLE as u64 * page_size());
        // By processor time: waiting for the disk, or for a processor, is no touch.
        let mut timed = || {
            let before = thread_cpu();
            self.read(file, fd, sample.clone(), scratch)?;
            Ok::<_, Error>(thread_cpu().saturating_sub(before))
        };
        let first = timed()?;
        if is_slow(self.slow, pages(&sample) as usize, first, timed)? {
            self.read(file, fd, sample.end..step.end, scratch)?;
        }
        Ok(())
    }

    /// Reads bytes of a file, which brings them into the page cache and touches them.
    fn read(&self, file: u32, fd: RawFd, step: Range<u64>, scratch: &mut [u8]) -> Result<()> {
        let mut at = step.start;
        while at < step.end {
            let len = (step.end - at).min(scratch.len() as u64);
            let mut to = [libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: len as usize }];
            // SAFETY: one place, within `scratch`.
            let got = unsafe { read_fully(fd, at, &mut to, 0, self.files.most_per_call()) };
            let got = got.map_err(|e| Error::io("read", &e.cause).at(self.files.path(file)).range(at..at + len))?;
            self.read.fetch_add(got, Ordering::Relaxed);
            if got < len {
                // The file is shorter than it was.
                return self.files.verify_file(file);
            }
            at += len;
        }
        Ok(())
    }
}

/// Pages that a range of bytes touches.
fn pages(range: &Range<u64>) -> u64 {
    range.end.div_ceil(page_size()) - range.start / page_size()
}

/// Whether the page cache holds all of these bytes of a file.
fn is_there(fd: RawFd, step: &Range<u64>) -> bool {
    cached_pages(fd, step).is_ok_and(|cached| cached >= pages(step))
}

/// Brings pages of a mapped file into the page cache, and removes them from the mapping again. False if the kernel or
/// the file refuses; reading the bytes then tells why.
fn populate(mapping: &Mapping, step: &Range<u64>) -> bool {
    let start = step.start / page_size() * page_size();
    let len = (step.end.next_multiple_of(page_size()) - start) as usize;
    // SAFETY: the range lies in the mapping, which is as long as the file was. Populating changes no memory, and pages that
    // the file has lost since are an error. Nobody has written to the mapping, so nothing is lost when its pages are dropped.
    unsafe {
        let at = mapping.at().add(start as usize).cast();
        let populated = libc::madvise(at, len, libc::MADV_POPULATE_READ) == 0;
        libc::madvise(at, len, libc::MADV_DONTNEED);
        populated
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    const FILE: u64 = 5 * STEP + 12_345;

    /// A file on the disk of this checkout, without pages in the page cache.
    fn cold() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(file.path(), vec![7; FILE as usize]).unwrap();
        file.as_file().sync_all().unwrap();
        drop_pages(&file, 0..FILE);
        file
    }

    fn drop_pages(file: &tempfile::NamedTempFile, range: Range<u64>) {
        let (at, len) = (range.start as i64, (range.end - range.start) as i64);
        // SAFETY: a plain system call on a descriptor that is open.
        let dropped = unsafe { libc::posix_fadvise(file.as_file().as_raw_fd(), at, len, libc::POSIX_FADV_DONTNEED) };
        assert_eq!(dropped, 0);
    }

    fn steps(file: &tempfile::NamedTempFile, whole: bool, slow: Duration) -> FillSteps {
        let files = Files::from_paths(&[file.path()]).unwrap();
        let steps = FillSteps::new(files, vec![(0, 0..STEP), (0, STEP..FILE + 4096)], &[whole]);
        assert_eq!(steps.total(), FILE);
        FillSteps { slow, ..steps }
    }

    fn run(steps: &FillSteps) -> Result<bool> {
        steps.run(&|| true, &mut FillSteps::scratch())
    }

    fn read(steps: &FillSteps) -> u64 {
        steps.read.load(Ordering::Relaxed)
    }

    /// Bytes of the page cache that `file` lacks; `None` where the kernel does not tell.
    fn missing(file: &tempfile::NamedTempFile) -> Option<u64> {
        cached_pages(file.as_file().as_raw_fd(), &(0..FILE)).ok().map(|cached| pages(&(0..FILE)) - cached)
    }

    #[test]
    fn where_first_touches_are_slow_every_byte_is_read_those_that_were_there_too() {
        for whole in [true, false] {
            let file = cold();
            // What read-ahead has brought in: the first half.
            let filled = steps(&file, whole, Duration::from_secs(1));
            filled.run(&|| filled.nbytes() < FILE / 2, &mut FillSteps::scratch()).unwrap();
            let steps = steps(&file, whole, Duration::ZERO);
            assert!(run(&steps).unwrap());
            assert_eq!((read(&steps), steps.nbytes()), (FILE, FILE), "whole: {whole}");
            assert!(matches!(missing(&file), None | Some(0)));
        }
    }

    #[test]
    fn where_first_touches_are_not_slow_the_first_pages_of_each_step_are_read() {
        let file = cold();
        let steps = steps(&file, true, Duration::from_secs(1));
        assert!(run(&steps).unwrap());
        let sample = TOUCH_SAMPLE as u64 * page_size();
        // All of a step where huge pages cannot be populated.
        assert!([5 * sample + 12_345, FILE].contains(&read(&steps)), "{}", read(&steps));
        assert!(matches!(missing(&file), None | Some(0)));
    }

    #[test]
    fn pages_that_the_kernel_takes_back_meanwhile_are_filled_again() {
        let file = cold();
        let steps = steps(&file, true, SLOW_TOUCH);
        let asked = AtomicUsize::new(0);
        let goes_on = || {
            // Before the last step, and before a step of the second pass: that one is stopped, and continued below.
            match asked.fetch_add(1, Ordering::Relaxed) {
                5 => drop_pages(&file, 0..3 * STEP),
                7 => return false,
                _ => {}
            }
            true
        };
        let filled = steps.run(&goes_on, &mut FillSteps::scratch()).unwrap();
        if missing(&file).is_some() {
            assert!(!filled && steps.nbytes() == FILE - 3 * STEP, "{}", steps.nbytes());
        }
        assert!(run(&steps).unwrap());
        assert_eq!(steps.nbytes(), FILE);
        assert!(matches!(missing(&file), None | Some(0)));
    }

    #[test]
    fn a_kernel_that_takes_pages_back_without_end_is_an_error() {
        let file = cold();
        let steps = steps(&file, true, SLOW_TOUCH);
        let goes_on = || {
            drop_pages(&file, 0..FILE);
            true
        };
        let filled = steps.run(&goes_on, &mut FillSteps::scratch());
        if missing(&file).is_some() {
            let said = filled.unwrap_err().to_string();
            assert!(said.contains("the kernel takes pages back: after 4 passes"), "{said}");
            assert!(steps.nbytes() < FILE);
        }
    }
}
