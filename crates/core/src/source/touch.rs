//! The first touch of pages that a disk has filled.
//!
//! In a virtual machine whose host takes back free memory, the processor's first access to a page that the disk has filled
//! can cost 5 to 11 us. The host has the page then, and the tables by which the processor finds it do not. No fault counter
//! of the guest shows that. Populating a mapping does not touch its pages, so the caller would pay for each of them after
//! the load, on one core. The threads that populate therefore touch the pages at once. The disk works meanwhile, and the
//! cores have little else to do.
//!
//! `process_vm_readv` reads one byte of each page of the own process. A page that the file has lost is an error there
//! (EFAULT) and not SIGBUS. The call takes 0.4 us a page also where nothing is gained, so the first pages of each 2 MiB are
//! touched and timed, and the others only if these were slow. 548 MB, cold, where nothing is gained: 72 to 105 ms of
//! processor time for every page, 9 to 13 ms for the samples. One page of each 2 MiB is not enough where something is
//! gained: the host maps its memory in small pages.
//!
//! It also matters which free memory the disk fills. The kernel reports free blocks of 2 MiB and more to the host (free page
//! reporting), and the host takes them back. Huge pages are made of such blocks. Small pages come from smaller free blocks
//! first, and the host has left those in place. So if touches of huge pages are slow, the load requests small pages before
//! it populates. 2.95 GB, cold, to the last byte touched: 1.72 instead of 3.48 s, and 0.74 instead of 4.8 s of processor time
//! (medians of 4 in rotation, in an hour with slow touches). If first touches are fast, huge pages are better: 1.45 instead of
//! 1.87 s. In a virtual machine the first stretches of a load decide. The other reads do not wait for that: they request
//! small pages.
//!
//! The constants are from one virtual machine with two cores. `benches/mapped.py` on bare metal and on virtual machines of
//! other hosts can remove this controller: if first touches take less than 3 us there, only that host needs it.
//! `page_timing=False` switches it off: mapped files come in huge pages, and populated pages are not touched. A fill of
//! the page cache (`store/fill_steps.rs`) belongs to no load: it times its pages whatever the option says.
//!
//! All are touched in the order of their addresses. With the timed ones spread over the 2 MiB, 2.9 GB took 5.2 s of
//! processor time where every page in order took 1.6 s (medians in rotation, on a machine whose cores were busy).

use crate::machine::{is_virtual_machine, page_size, time_of};
use crate::options::HUGE_PAGE;
use crate::sync::{lock, Mutex};
use std::any::Any;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Weak;
use std::time::Duration;

/// Most places of one call: IOV_MAX.
const PLACES: usize = 1024;
/// Pages at the start of each 2 MiB that are touched to learn what touching costs there.
pub(crate) const TOUCH_SAMPLE: usize = 16;
/// From this much time on the first touch of a page is slow. A slow one takes 5 to 11 us. Others take 0.6 to 0.9 us in huge
/// pages and 1 to 3 us in small ones, because nothing of them is in the processor's caches.
pub(crate) const SLOW_TOUCH: Duration = Duration::from_micros(3);

/// Touches of a load's threads are measured by processor time, which takes two system calls to ask. By the wall clock one
/// sample of ten seemed slow because the thread had lost the processor (12 threads, two cores).
const PROCESSOR: libc::clockid_t = libc::CLOCK_THREAD_CPUTIME_ID;

/// In a virtual machine this many stretches of 2 MiB are populated in huge pages first. If half of them are slow, the rest of
/// the load comes in small pages.
const PROBES: u32 = 4;
/// A load in huge pages goes on in small ones when this many stretches more were slow than fast.
const SLOW_STRETCHES: u32 = 4;

/// Pages that one minor fault maps where the page cache has small pages (`fault_around_bytes`, 64 KiB by default).
const AROUND: usize = 16;
/// Stretches of 2 MiB that are looked at to estimate the cost of what is left: two groups of [`AROUND`] pages in each.
const LOOKS: u64 = 4;
/// Bytes that are left for each such stretch.
const BYTES_PER_LOOK: u64 = 64 << 20;

/// First touches of the pages of mappings.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Touches {
    /// Bytes of resident pages that are mapped but left to their first touch (a minor fault).
    pub left: u64,
    /// Seconds that the first touch of all of these will take one thread: an estimate. `None` where none could be made.
    pub left_seconds: Option<f64>,
    /// Pages that the source touched after the disk had filled them.
    pub pages: u64,
    /// System calls for that.
    pub calls: u64,
}

impl Touches {
    /// The touches of two sources together.
    pub(super) fn and(self, other: Touches) -> Touches {
        let left_seconds = match (self.left_seconds, other.left_seconds) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        let (left, pages, calls) = (self.left + other.left, self.pages + other.pages, self.calls + other.calls);
        Touches { left, left_seconds, pages, calls }
    }
}

/// Mapped memory that is left to its first touch.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) at: usize,
    pub(super) len: usize,
    /// The mapping, as long as anybody has it.
    pub(super) mapping: Weak<dyn Any + Send + Sync>,
}

/// Touches pages for the threads of one load.
#[derive(Debug)]
pub(super) struct Touch {
    worth: Duration,
    /// This process: asked once, since each question is a system call.
    process: libc::pid_t,
    /// `page_timing=False`: no page is timed.
    is_off: bool,
    /// By the kernel, or by `page_timing`: no page is touched any more.
    refused: AtomicBool,
    page_size: Mutex<PageSize>,
    pages: AtomicU64,
    calls: AtomicU64,
}

/// The size of the pages that the disk fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageSize {
    /// Not decided. `sent` stretches were requested in huge pages; `slow` and `fast` of them have been touched.
    Probing { sent: u32, slow: u32, fast: u32 },
    /// Huge pages. `slow` is the number of slow stretches minus the number of fast ones, 0 at least.
    Huge { slow: u32 },
    /// Small pages, to the end of the load.
    Small,
}

impl PageSize {
    fn at_first(virtual_machine: bool) -> PageSize {
        if virtual_machine {
            PageSize::Probing { sent: 0, slow: 0, fast: 0 }
        } else {
            PageSize::Huge { slow: 0 }
        }
    }

    /// Whether the next `stretches` are to come in small pages.
    fn next_is_small(&mut self, stretches: u32) -> bool {
        match self {
            PageSize::Probing { sent, .. } if *sent < PROBES => {
                *sent += stretches;
                false
            }
            PageSize::Huge { .. } => false,
            PageSize::Probing { .. } | PageSize::Small => true,
        }
    }

    /// Counts a stretch that came in huge pages and was touched.
    fn judge(&mut self, is_slow: bool) {
        match self {
            PageSize::Probing { slow, fast, .. } => {
                *(if is_slow { &mut *slow } else { &mut *fast }) += 1;
                if *slow >= PROBES / 2 {
                    *self = PageSize::Small;
                } else if *fast > PROBES / 2 {
                    *self = PageSize::Huge { slow: 0 };
                }
            }
            PageSize::Huge { slow } => {
                *slow = if is_slow { *slow + 1 } else { slow.saturating_sub(1) };
                if *slow >= SLOW_STRETCHES {
                    *self = PageSize::Small;
                }
            }
            PageSize::Small => {}
        }
    }
}

/// The reason for untouched pages.
#[derive(Debug)]
pub(super) enum Untouched {
    /// The call was refused for the first time.
    Refused(io::Error),
    /// A page could not be had.
    Lost(io::Error),
}

impl Touch {
    /// With this `page_timing` of the options.
    pub(super) fn new(page_timing: Option<bool>) -> Touch {
        Touch::worth(SLOW_TOUCH, page_timing)
    }

    /// Touches all pages of those 2 MiB where a first touch takes at least so long.
    pub(super) fn worth(worth: Duration, page_timing: Option<bool>) -> Touch {
        // SAFETY: it only asks.
        let process = unsafe { libc::getpid() };
        let is_off = page_timing == Some(false);
        let refused = AtomicBool::new(is_off);
        let page_size = Mutex::new(PageSize::at_first(page_timing.unwrap_or_else(is_virtual_machine)));
        Touch { worth, process, is_off, refused, page_size, pages: AtomicU64::new(0), calls: AtomicU64::new(0) }
    }

    /// Touches populated pages, from the address of the first to the end of the last, if that is worth it. `huge_pages`:
    /// they were populated in huge pages. `places` is the thread's own.
    pub(super) fn populated(
        &self,
        pages: Range<usize>,
        huge_pages: bool,
        places: &mut Vec<libc::iovec>,
    ) -> Result<(), Untouched> {
        if self.refused.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (page, huge) = (page_size() as usize, HUGE_PAGE as usize);
        for start in pages.clone().step_by(huge) {
            let count = (pages.end.min(start + huge) - start).div_ceil(page);
            let at = |i: usize| start + i * page;
            let sample = || (0..count.min(TOUCH_SAMPLE)).map(at);
            let result = timed(PROCESSOR, self.process, sample(), places).and_then(|(sampled, calls, time)| {
                self.count(sampled, calls);
                let another = || timed(PROCESSOR, self.process, sample(), places).map(|(_, _, time)| time);
                let gained = is_slow(self.worth, sampled, time, another)?;
                if huge_pages {
                    lock(&self.page_size).judge(gained);
                }
                if gained && count > TOUCH_SAMPLE {
                    let (touched, calls) = touch(self.process, (TOUCH_SAMPLE..count).map(at), places)?;
                    self.count(touched, calls);
                }
                Ok(())
            });
            match result {
                Ok(()) => {}
                // A kernel without the call, a sandbox, or no memory for it. The pages are there all the same.
                Err(e) if e.raw_os_error() != Some(libc::EFAULT) => {
                    let told = self.refused.swap(true, Ordering::Relaxed);
                    return if told { Ok(()) } else { Err(Untouched::Refused(e)) };
                }
                Err(e) => return Err(Untouched::Lost(e)),
            }
        }
        Ok(())
    }

    /// Whether the next read, of `nbytes` bytes, should request small pages before it populates.
    pub(super) fn wants_small_pages(&self, nbytes: u64) -> bool {
        let stretches = nbytes.div_ceil(HUGE_PAGE) as u32;
        !self.refused.load(Ordering::Relaxed) && lock(&self.page_size).next_is_small(stretches)
    }

    fn count(&self, pages: usize, calls: usize) {
        self.pages.fetch_add(pages as u64, Ordering::Relaxed);
        self.calls.fetch_add(calls as u64, Ordering::Relaxed);
    }

    /// Touches since the last call of this, and the cost of the first touch of the rest.
    pub(super) fn take(&self, left: &[Left]) -> Touches {
        let bytes = left.iter().map(|left| left.len as u64).sum();
        Touches {
            left: bytes,
            left_seconds: match bytes {
                0 => Some(0.0),
                _ if self.is_off => None,
                _ => cost(self.process, left, bytes),
            },
            pages: self.pages.swap(0, Ordering::Relaxed),
            calls: self.calls.swap(0, Ordering::Relaxed),
        }
    }
}

/// Whether the first touch of so many pages was slow: it took at least `worth` a page. If another touch of them takes as
/// long, the processor is slow and nothing is gained.
pub(crate) fn is_slow<E>(
    worth: Duration,
    pages: usize,
    first: Duration,
    another: impl FnOnce() -> Result<Duration, E>,
) -> Result<bool, E> {
    Ok(first >= worth * pages as u32 && (worth.is_zero() || another()? * 2 < first))
}

/// Seconds for the first touch of `bytes` that are left, by a look at a few pages of them.
///
/// In large folios the first page brings all of its 2 MiB into the mapping, in small pages each 16 bring themselves. So the
/// first group of pages of 2 MiB counts once, and the second one for all others.
fn cost(process: libc::pid_t, left: &[Left], bytes: u64) -> Option<f64> {
    let looks = (bytes / BYTES_PER_LOOK).clamp(1, LOOKS);
    let (page, huge) = (page_size() as usize, HUGE_PAGE as usize);
    let (mut seconds, mut seen) = (0.0, 0);
    let mut usual = None;
    let mut places = Vec::with_capacity(AROUND);
    // Seconds that the first touch of a group of pages takes longer than another one.
    let mut gained = |start: usize, end: usize| {
        let group = || (start..end).step_by(page).take(AROUND);
        let (touched, _, first) = timed(libc::CLOCK_MONOTONIC, process, group(), &mut places).ok()?;
        let again = match usual {
            Some(again) => again,
            None => *usual.insert(timed(libc::CLOCK_MONOTONIC, process, group(), &mut places).ok()?.2 / touched as u32),
        };
        Some(first.saturating_sub(again * touched as u32).as_secs_f64())
    };
    for look in 0..looks {
        let mut skip = bytes / looks * look;
        let here = left.iter().find(|left| {
            let found = skip < left.len as u64;
            skip -= if found { 0 } else { left.len as u64 };
            found
        })?;
        // The mapping of a stream is gone with its last tensor.
        let Some(_mapping) = here.mapping.upgrade() else { continue };
        let (first, end) = (here.at / page * page, here.at + here.len);
        let start = ((here.at + skip as usize) / huge * huge).max(first);
        let end = end.min(start + huge);
        let once = gained(start, end)?;
        let middle = start + (end - start) / 2 / (AROUND * page) * (AROUND * page);
        let groups = (end - start).div_ceil(AROUND * page);
        let others = if middle > start { gained(middle, end)? * (groups - 1) as f64 } else { 0.0 };
        seconds += once + others;
        seen += end - start;
    }
    (seen > 0).then(|| seconds * bytes as f64 / seen as f64)
}

/// Touches pages of this process; how many, by how many calls, and the time by `clock` that took.
fn timed(
    clock: libc::clockid_t,
    process: libc::pid_t,
    pages: impl Iterator<Item = usize>,
    places: &mut Vec<libc::iovec>,
) -> io::Result<(usize, usize, Duration)> {
    let begun = time_of(clock);
    let (touched, calls) = touch(process, pages, places)?;
    Ok((touched, calls, time_of(clock).saturating_sub(begun)))
}

/// Reads the byte at each of these addresses; how many, and by how many calls.
fn touch(
    process: libc::pid_t,
    mut pages: impl Iterator<Item = usize>,
    places: &mut Vec<libc::iovec>,
) -> io::Result<(usize, usize)> {
    let mut bytes = [0u8; PLACES];
    let (mut touched, mut calls) = (0, 0);
    loop {
        places.clear();
        let place = |at| libc::iovec { iov_base: at as *mut libc::c_void, iov_len: 1 };
        places.extend(pages.by_ref().take(PLACES).map(place));
        let mut from = 0;
        while from < places.len() {
            let to = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: places.len() - from };
            let of = &places[from..];
            calls += 1;
            // SAFETY: it writes to `bytes` alone, which is as long as there are places; what cannot be read is an error.
            let read =
                unsafe { libc::process_vm_readv(process, &raw const to, 1, of.as_ptr(), of.len() as libc::c_ulong, 0) };
            match usize::try_from(read) {
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                // After a part the next call tells what is wrong with the rest.
                Ok(read) => from += read,
                Err(_) => {
                    let e = io::Error::last_os_error();
                    if e.raw_os_error() != Some(libc::EINTR) {
                        return Err(e);
                    }
                }
            }
        }
        touched += places.len();
        if places.len() < PLACES {
            return Ok((touched, calls));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Anonymous;
    use std::sync::Arc;

    const PAGES: usize = 1200;

    /// Memory whose pages are in use, and its addresses.
    fn memory(pages: usize) -> (Anonymous, Range<usize>) {
        let memory = Anonymous::new(pages as u64 * page_size()).unwrap();
        // SAFETY: the memory is as long as that and nobody else knows it.
        unsafe { std::ptr::write_bytes(memory.at(), 1, memory.len()) };
        let start = memory.at() as usize;
        let end = start + memory.len();
        (memory, start..end)
    }

    fn touched(worth: Duration, pages: Range<usize>) -> Result<Touches, Untouched> {
        let touch = Touch::worth(worth, None);
        touch.populated(pages, true, &mut Vec::new()).map(|()| touch.take(&[]))
    }

    #[test]
    fn touches_of_small_pages_are_not_slow_and_those_of_a_slow_processor_gain_nothing() {
        let us = |each: u64| Ok::<_, ()>(Duration::from_micros(16 * each));
        assert_eq!(is_slow(SLOW_TOUCH, 16, us(2).unwrap(), || us(0)), Ok(false));
        assert_eq!(is_slow(SLOW_TOUCH, 16, us(5).unwrap(), || us(1)), Ok(true));
        assert_eq!(is_slow(SLOW_TOUCH, 16, us(5).unwrap(), || us(4)), Ok(false));
    }

    #[test]
    fn where_it_is_worth_it_every_page_is_touched_once_in_calls_of_up_to_1024() {
        let (_memory, pages) = memory(PAGES);
        let found = touched(Duration::ZERO, pages.clone()).unwrap();
        let chunks = pages.len().div_ceil(HUGE_PAGE as usize) as u64;
        assert_eq!((found.pages, found.calls), (PAGES as u64, 2 * chunks));
        let mut places = Vec::new();
        let all = touch(std::process::id() as i32, pages.step_by(page_size() as usize), &mut places).unwrap();
        assert_eq!(all, (PAGES, PAGES.div_ceil(PLACES)));
    }

    /// Spread over the 2 MiB, the timed ones would make the others cost more.
    #[test]
    fn pages_are_touched_in_the_order_of_their_addresses() {
        let page = page_size() as usize;
        for closed in [0, 1, TOUCH_SAMPLE - 1, TOUCH_SAMPLE, TOUCH_SAMPLE + 1, 300] {
            let (_memory, pages) = memory(HUGE_PAGE as usize / page);
            let _closed = Closed::new(pages.start + closed * page);
            let touch = Touch::worth(Duration::ZERO, None);
            assert!(matches!(touch.populated(pages, true, &mut Vec::new()), Err(Untouched::Lost(_))));
            // The call that meets the page that cannot be had is not counted, and all before it are of lower addresses.
            let before = if closed < TOUCH_SAMPLE { 0 } else { TOUCH_SAMPLE as u64 };
            assert_eq!(touch.take(&[]).pages, before, "page {closed}");
        }
    }

    #[test]
    fn a_virtual_machine_is_probed_with_huge_pages_and_the_rest_is_small_until_the_answer() {
        for (slow, answer) in [(PROBES / 2, PageSize::Small), (PROBES / 2 - 1, PageSize::Huge { slow: 0 })] {
            let mut size = PageSize::at_first(true);
            let sent: Vec<bool> = (0..PROBES).map(|_| size.next_is_small(2)).collect();
            assert_eq!(sent, (0..PROBES).map(|n| 2 * n >= PROBES).collect::<Vec<_>>());
            for n in 0..PROBES {
                size.judge(n % 2 == 0 && n / 2 < slow);
            }
            assert_eq!(size, answer);
            assert_eq!(size.next_is_small(2), answer == PageSize::Small);
        }
    }

    #[test]
    fn huge_pages_are_left_where_slow_stretches_outweigh_the_others_and_for_good() {
        let mut size = PageSize::at_first(false);
        for _ in 0..1000 {
            size.judge(true);
            size.judge(false);
            size.judge(false);
        }
        for _ in 1..SLOW_STRETCHES {
            size.judge(true);
        }
        size.judge(false);
        size.judge(true);
        assert!(!size.next_is_small(2));
        size.judge(true);
        assert!(size.next_is_small(2));
        size.judge(false);
        assert!(size.next_is_small(2));
    }

    #[test]
    fn where_it_is_not_worth_it_few_pages_are_touched() {
        let (_memory, pages) = memory(PAGES);
        let found = touched(Duration::from_secs(1), pages.clone()).unwrap();
        let chunks = pages.len().div_ceil(HUGE_PAGE as usize) as u64;
        assert!(found.pages <= chunks * 2 * TOUCH_SAMPLE as u64, "{found:?}");
        assert_eq!(found.calls, chunks);
    }

    #[test]
    fn without_page_timing_no_page_is_touched_and_all_are_huge() {
        let (memory, pages) = memory(PAGES);
        let touch = Touch::worth(Duration::ZERO, Some(false));
        touch.populated(pages.clone(), true, &mut Vec::new()).unwrap();
        assert!((0..2 * PROBES).all(|_| !touch.wants_small_pages(HUGE_PAGE)));
        let mapping: Arc<dyn Any + Send + Sync> = Arc::new(memory);
        let left = Left { at: pages.start, len: pages.len(), mapping: Arc::downgrade(&mapping) };
        assert_eq!(touch.take(&[left]), Touches { left: pages.len() as u64, ..Touches::default() });
        // With it, all machines are probed as virtual ones are.
        let touch = Touch::worth(Duration::ZERO, Some(true));
        let small: Vec<bool> = (0..=PROBES).map(|_| touch.wants_small_pages(HUGE_PAGE)).collect();
        assert_eq!(small, (0..=PROBES).map(|n| n == PROBES).collect::<Vec<_>>());
    }

    /// Takes the right to read one page away, and gives it back in the end.
    struct Closed(usize);

    impl Closed {
        fn new(at: usize) -> Closed {
            // SAFETY: the page is the test's own.
            assert_eq!(unsafe { libc::mprotect(at as *mut libc::c_void, page_size() as usize, libc::PROT_NONE) }, 0);
            Closed(at)
        }
    }

    impl Drop for Closed {
        fn drop(&mut self) {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: as above.
            unsafe { libc::mprotect(self.0 as *mut libc::c_void, page_size() as usize, rights) };
        }
    }

    #[test]
    fn no_page_is_forgotten_and_one_that_is_lost_is_an_error() {
        for count in [1, TOUCH_SAMPLE - 1, TOUCH_SAMPLE, TOUCH_SAMPLE + 1, 2 * TOUCH_SAMPLE + 3, 100] {
            let (_memory, pages) = memory(count);
            for page in pages.clone().step_by(page_size() as usize) {
                let _closed = Closed::new(page);
                let found = touched(Duration::ZERO, pages.clone());
                assert!(
                    matches!(&found, Err(Untouched::Lost(e)) if e.raw_os_error() == Some(libc::EFAULT)),
                    "{found:?}"
                );
            }
            assert_eq!(touched(Duration::ZERO, pages).unwrap().pages, count as u64);
        }
    }

    #[test]
    fn pages_past_the_end_of_a_file_are_an_error_and_no_signal() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 * page_size()).unwrap();
        let mapping = crate::memory::Mapping::new(file.as_file(), 64 * page_size()).unwrap();
        let start = mapping.at() as usize;
        file.as_file().set_len(40 * page_size()).unwrap();
        let found = touched(Duration::ZERO, start..start + 64 * page_size() as usize);
        assert!(matches!(found, Err(Untouched::Lost(_))), "{found:?}");
    }

    #[test]
    fn the_cost_of_what_is_left_is_that_of_a_few_pages_for_each_byte() {
        let (memory, pages) = memory(PAGES);
        let memory: Arc<dyn Any + Send + Sync> = Arc::new(memory);
        let left = |at: usize, len: usize| Left { at, len, mapping: Arc::downgrade(&memory) };
        let halves = [left(pages.start + 5, 300_000), left(pages.start + 300_005, pages.len() - 300_005)];
        let found = Touch::new(None).take(&halves);
        assert_eq!(found.left, pages.len() as u64 - 5);
        // All of these pages are in use: a second touch takes as long.
        assert!(found.left_seconds.unwrap() < 0.1, "{found:?}");
        assert_eq!(Touch::new(None).take(&[]).left_seconds, Some(0.0));
        drop(memory);
        assert_eq!(Touch::new(None).take(&halves).left_seconds, None, "the mapping is gone");
    }
}
