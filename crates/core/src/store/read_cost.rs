//! The cost of one more read, counted in bytes: a hole between two wanted runs that is shorter is read, not skipped.
//!
//! Some storage answers a short read in the time of a few kilobytes, some in that of a megabyte, and the page cache
//! adds the processor's time. So both are timed, on the file itself, with as many reads in flight as keep a disk busy.
//! All loads of the process share the result for one storage.
//!
//! The number of reads and their sizes are from one virtual machine with two cores. `benches/gap.py` on other
//! disks can remove this controller: if one gap is within a tenth of the best on all of them, it is the rule. `gap=` with a
//! number switches it off.

use super::pread::read_fully;
use crate::machine::block_signals;
use crate::memory::Anonymous;
use crate::options::{KIB, PAGE};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Reads in flight.
const IN_FLIGHT: usize = 16;
/// Short reads that are timed.
pub(crate) const SHORT: usize = 64;
/// Long reads that are timed, and their bytes.
pub(crate) const LONG: usize = 16;
pub(crate) const LONG_BYTES: u64 = 512 * KIB;

/// Each of the two measurements takes this long at most: storage that is so slow is not measured.
const PATIENCE: Duration = Duration::from_secs(1);

/// Storage that was measured, and the hole in pages, in one number: a place is read and written at once. No lock: a forked
/// child could find it taken. Zero is a free place.
static MEASURED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];
/// Bits of a place that hold the hole: 512 KiB have 128 pages.
const PAGES: u32 = 8;

/// The hole that costs as much as a read, in bytes.
///
/// # Arguments
/// `short` seconds for each short read, `long` for each of [`LONG_BYTES`]; both with others in flight.
fn hole(short: Duration, long: Duration) -> u64 {
    let share = short.as_secs_f64() / long.as_secs_f64().max(1e-9);
    ((share * LONG_BYTES as f64) as u64).saturating_sub(PAGE).min(LONG_BYTES)
}

/// The measured hole of this storage. Only block devices keep their number while the process lives.
pub(super) fn known(dev: u64, direct: bool) -> Option<u64> {
    let key = key(dev, direct)?;
    let found = MEASURED.iter().map(|place| place.load(Ordering::Relaxed)).find(|found| found >> PAGES == key)?;
    Some((found & ((1 << PAGES) - 1)) * PAGE)
}

fn remember(dev: u64, direct: bool, hole: u64) {
    let Some(key) = key(dev, direct) else { return };
    for place in &MEASURED {
        let found = key << PAGES | (hole / PAGE);
        match place.compare_exchange(0, found, Ordering::Relaxed, Ordering::Relaxed) {
            Err(other) if other >> PAGES != key => {}
            _ => return, // it is there now, or another thread was first
        }
    }
}

/// The kernel's device numbers have 12 and 20 bits.
fn key(dev: u64, direct: bool) -> Option<u64> {
    let (major, minor) = (u64::from(libc::major(dev)), u64::from(libc::minor(dev)));
    (major != 0).then_some(major << 33 | minor << 1 | u64::from(direct))
}

/// Offsets of a file, each a multiple of a page.
#[derive(Debug)]
pub struct Sample {
    /// Offsets of reads of a page.
    pub(crate) short: Vec<u64>,
    /// Offsets of reads of [`LONG_BYTES`].
    pub(crate) long: Vec<u64>,
}

/// Times reads at these offsets, and remembers what comes of it. See [`hole`].
///
/// `None` if the reads fail (the load will meet that too, and say where) or take too long, or if no thread can be had.
/// `answered` is called after each read.
pub(super) fn measure(fd: RawFd, dev: u64, direct: bool, sample: &Sample, answered: &(dyn Fn() + Sync)) -> Option<u64> {
    let memory = Anonymous::new(IN_FLIGHT as u64 * LONG_BYTES).ok()?;
    let short = timed(fd, &memory, &sample.short, PAGE, answered)?;
    let long = timed(fd, &memory, &sample.long, LONG_BYTES, answered)?;
    let found = hole(short, long);
    remember(dev, direct, found);
    Some(found)
}

/// The time that each of these reads takes while others are in flight.
fn timed(fd: RawFd, memory: &Anonymous, offsets: &[u64], len: u64, answered: &(dyn Fn() + Sync)) -> Option<Duration> {
    let (ready, next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(offsets.is_empty()));
    let (go, since, last) = (AtomicBool::new(false), Instant::now(), AtomicU64::new(0));
    let nanos = || since.elapsed().as_nanos() as u64;
    let read = |number: usize| {
        block_signals();
        let at = memory.at().wrapping_add(number * LONG_BYTES as usize);
        // SAFETY: each thread has LONG_BYTES of the memory for itself, which outlives the scope. Its pages are made now,
        // not while they are read into.
        unsafe { at.write_bytes(1, len as usize) };
        ready.fetch_add(1, Ordering::Release);
        while !go.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        while let Some(&offset) = offsets.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut to = [libc::iovec { iov_base: at.cast(), iov_len: len as usize }];
            // SAFETY: as above.
            let whole = matches!(unsafe { read_fully(fd, offset, &mut to, 0, len) }, Ok(got) if got == len);
            answered();
            if !whole || since.elapsed() > PATIENCE {
                failed.store(true, Ordering::Relaxed);
                break;
            }
        }
        last.fetch_max(nanos(), Ordering::Relaxed);
    };
    let read = &read;
    let begun = std::thread::scope(|scope| {
        let threads = (0..IN_FLIGHT.min(offsets.len()))
            .take_while(|&number| {
                Builder::new().name("penstock-read".into()).spawn_scoped(scope, move || read(number)).is_ok()
            })
            .count();
        failed.fetch_or(threads == 0, Ordering::Relaxed);
        while ready.load(Ordering::Acquire) < threads {
            std::thread::yield_now();
        }
        let begun = nanos();
        go.store(true, Ordering::Release);
        begun
    });
    let took = Duration::from_nanos(last.into_inner().saturating_sub(begun));
    (!failed.into_inner()).then(|| took / offsets.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_hole_costs_as_much_as_a_read_if_it_takes_as_long() {
        assert_eq!(hole(ms(1), ms(8)), LONG_BYTES / 8 - PAGE);
        assert_eq!(hole(ms(1), ms(1000)), 0, "reads cost nothing beside bytes");
        assert_eq!(hole(ms(8), ms(9)), LONG_BYTES * 8 / 9 - PAGE);
        assert_eq!(hole(ms(9), ms(1)), LONG_BYTES, "never longer than what was timed");
        assert_eq!(hole(ms(0), ms(0)), 0);
    }

    #[test]
    fn a_block_device_is_measured_once_for_each_way() {
        // Block devices that no test machine has.
        let (some, other) = (libc::makedev(4000, 3), libc::makedev(4000, 4));
        assert_eq!(known(some, false), None);
        remember(some, false, 70_000);
        remember(some, false, 5 * PAGE); // too late
        remember(other, false, 10);
        assert_eq!((known(some, false), known(some, true), known(other, false)), (Some(17 * PAGE), None, Some(0)));
        remember(libc::makedev(0, 7), true, 5);
        assert_eq!(known(libc::makedev(0, 7), true), None);
    }

    #[test]
    fn reads_of_a_file_are_timed_and_those_that_fail_give_nothing() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        let sample = |past: u64| Sample {
            short: (0..SHORT as u64).map(|i| i * PAGE).chain([past]).collect(),
            long: (0..8).map(|i| i * LONG_BYTES).collect(),
        };
        let dev = libc::makedev(0, 9);
        assert!(measure(file.as_raw_fd(), dev, false, &sample(0), &|| ()).is_some_and(|found| found <= LONG_BYTES));
        assert_eq!(measure(file.as_raw_fd(), dev, false, &sample(4 << 20), &|| ()), None, "past the end");
        assert_eq!(measure(-1, dev, false, &sample(0), &|| ()), None);
        assert_eq!(measure(file.as_raw_fd(), dev, false, &Sample { short: vec![], long: vec![] }, &|| ()), None);
    }
}
