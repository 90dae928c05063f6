//! Huge pages at the first touch of memory, ours and an engine's. Where they are slow, memory comes in small pages.
//!
//! In a virtual machine whose host takes back free memory, huge pages can cost 25 times as much as usual, and small ones do not
//! (see `source/touch.rs`, which does the same for mapped files). So some are populated and timed. If these are slow, the rest
//! comes in small pages.
//!
//! The timing of huge pages has constants of one virtual machine with two cores. `benches/copied.py` on virtual machines of
//! other hosts can remove it: if huge pages take less than 1.5 ms there, only that host needs it. `page_timing=False`
//! switches it off: memory stays in huge pages.

use crate::machine::{is_virtual_machine, thread_cpu, time_of};
use crate::options::HUGE_PAGE;
use std::fs;
use std::ops::Range;
use std::time::Duration;

/// One of this many huge pages is timed, as long as these are fast.
pub(crate) const SAMPLED: u32 = 8;
/// Memory gets small pages when this many of the timed huge pages more were slow than fast.
const SLOW_SAMPLES: u32 = 2;
/// In less memory nothing is timed.
pub(crate) const LEAST_SAMPLED: u64 = 16 * HUGE_PAGE;
/// A huge page is slow if getting it takes so long. Zeroing it takes 0.2 ms. It takes 5 ms if the host has to find the
/// memory first.
const SLOW: Duration = Duration::from_micros(1500);

/// The choice of the huge pages that are timed, and their times.
#[derive(Debug)]
pub(crate) struct PageTimes {
    /// A huge page is slow if getting it takes so long or longer.
    slow_from: Duration,
    /// Huge pages to come before the next one that is timed. `None`: no more are timed.
    skip: Option<u32>,
    /// Slow ones minus fast ones, 0 at least.
    slow: u32,
    /// They are slow: the rest of the memory gets small pages.
    small: bool,
}

impl PageTimes {
    /// The times of `len` bytes of memory. `page_timing` is that of the options.
    pub(crate) fn new(len: u64, page_timing: Option<bool>) -> Self {
        let timed = len >= LEAST_SAMPLED && page_timing.unwrap_or_else(is_virtual_machine);
        Self { slow_from: SLOW, skip: timed.then_some(0), slow: 0, small: false }
    }

    /// Times in which huge pages count as slow from so much time.
    #[cfg(test)]
    pub(crate) fn slow_from(slow_from: Duration) -> Self {
        Self { slow_from, skip: Some(0), slow: 0, small: false }
    }

    /// True if huge pages turned out to be slow.
    pub(crate) fn are_slow(&self) -> bool {
        self.small
    }

    /// Is called with each huge page (address, bytes) before it is written to for the first time. May populate it, which changes
    /// no byte. True if the rest of the memory is to get small pages: once.
    pub(crate) fn turn_slow(&mut self, at: *mut u8, len: usize) -> bool {
        match self.skip {
            None => return false,
            Some(0) => {}
            Some(skip) => {
                self.skip = Some(skip - 1);
                return false;
            }
        }
        // After a slow one processor time decides: by the clock it may be slow because another thread had the core.
        // That takes two system calls more.
        let time = if self.slow > 0 { thread_cpu } else { clock_time };
        let before = time();
        // SAFETY: populating changes no byte of memory. What is not mapped, or of a device, is refused.
        if unsafe { libc::madvise(at.cast(), len, libc::MADV_POPULATE_WRITE) } != 0 {
            // Linux before 5.14 refuses this call. So does one without memory: the write itself then meets that.
            self.skip = None;
            return false;
        }
        let slow = time().saturating_sub(before) >= self.slow_from;
        self.slow = if slow { self.slow + 1 } else { self.slow.saturating_sub(1) };
        self.skip = Some(if slow { 0 } else { SAMPLED - 1 });
        if self.slow == SLOW_SAMPLES {
            self.skip = None;
            self.small = true;
        }
        self.small
    }
}

fn clock_time() -> Duration {
    time_of(libc::CLOCK_MONOTONIC)
}

/// The first touch of memory that is not ours: an engine's parameters, before it copies into them.
///
/// Small pages take most of the processor time of such a copy (88,000 faults for 360 MB took 0.13 s of 0.2 s). Many systems give
/// huge pages only where a program asks for them. This asks, and changes no byte. The caller checks that a place still has the
/// same memory: populating pages of another mapping could take blocks of a disk.
pub struct FirstTouch {
    /// The whole huge pages of each place; empty if it has none.
    places: Vec<Range<usize>>,
    /// Bytes of each place that were looked at.
    done: Vec<usize>,
    times: PageTimes,
}

impl FirstTouch {
    /// Asks for huge pages in these places (address, bytes), where they hold whole ones. `page_timing` is that of the options.
    /// Where asking is of no use, nothing is asked for, and no place counts.
    pub fn ask(places: &[(usize, usize)], page_timing: Option<bool>) -> Self {
        let is_of_use = is_asked_for();
        let whole = |&(at, len): &(usize, usize)| if is_of_use { whole_pages(at, len) } else { 0..0 };
        let places: Vec<_> = places.iter().map(whole).collect();
        let len = places.iter().fold(0u64, |sum, place| sum.saturating_add(place.len() as u64));
        let found = Self { done: vec![0; places.len()], places, times: PageTimes::new(len, page_timing) };
        found.advise(0..found.places.len(), libc::MADV_HUGEPAGE);
        found
    }

    /// Bytes of whole huge pages that were asked for.
    pub fn nbytes(&self) -> u64 {
        self.places.iter().fold(0, |sum, place| sum.saturating_add(place.len() as u64))
    }

    /// True if huge pages turned out to be slow.
    pub fn are_slow(&self) -> bool {
        self.times.are_slow()
    }

    /// The next `nbytes` bytes of a place are about to be written: times some of their huge pages. Returns the bytes of the pages
    /// that were looked at, 0 if the place has no more. After slow ones the caller [gives small pages](Self::turn_small).
    pub fn ahead(&mut self, place: usize, nbytes: u64) -> u64 {
        let (Some(range), Some(done)) = (self.places.get(place), self.done.get_mut(place)) else { return 0 };
        let before = *done;
        while *done < range.len() && ((*done - before) as u64) < nbytes && !self.times.are_slow() {
            let _ = self.times.turn_slow((range.start + *done) as *mut u8, HUGE_PAGE as usize);
            *done += HUGE_PAGE as usize;
        }
        (*done - before) as u64
    }

    /// Has the pages of these places that nobody has touched come as small ones.
    pub fn turn_small(&self, places: impl IntoIterator<Item = usize>) {
        self.advise(places, libc::MADV_NOHUGEPAGE);
    }

    /// All is written. The kernel may make huge pages of the small ones of these places again.
    pub fn end(&self, places: impl IntoIterator<Item = usize>) {
        if self.are_slow() {
            self.advise(places, libc::MADV_HUGEPAGE);
        }
    }

    fn advise(&self, places: impl IntoIterator<Item = usize>, how: i32) {
        for place in places.into_iter().filter_map(|n| self.places.get(n)).filter(|place| !place.is_empty()) {
            // SAFETY: advice changes no byte, whatever is mapped there. What is not mapped is refused.
            unsafe { libc::madvise(place.start as *mut libc::c_void, place.len(), how) };
        }
    }
}

/// The whole huge pages of a place. Empty: there are none.
fn whole_pages(at: usize, len: usize) -> Range<usize> {
    let huge = HUGE_PAGE as usize;
    match (at.checked_next_multiple_of(huge), at.checked_add(len)) {
        (Some(start), Some(end)) if start < end / huge * huge => start..end / huge * huge,
        _ => 0..0,
    }
}

/// True if memory gets huge pages where they are asked for, and only there.
fn is_asked_for() -> bool {
    let setting = |file: &str| fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}"));
    is_by_advice(&setting("enabled").unwrap_or_default(), setting("hugepages-2048kB/enabled").ok().as_deref())
}

/// The meaning of the two settings. `large` is the one for pages of 2 MiB, from Linux 6.8 on; see
/// Documentation/admin-guide/mm/transhuge.rst.
fn is_by_advice(all: &str, large: Option<&str>) -> bool {
    match large {
        Some(large) if !large.contains("[inherit]") => large.contains("[madvise]"),
        _ => all.contains("[madvise]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::{flags, resident_bytes};
    use crate::memory::Anonymous;

    const HUGE: usize = HUGE_PAGE as usize;

    fn has(at: usize, flag: &str) -> bool {
        flags(at as u64).iter().any(|f| f == flag)
    }

    /// Memory that asks for nothing, as a program has it, of so many huge pages.
    fn plain(pages: usize) -> Anonymous {
        let memory = Anonymous::new((pages * HUGE) as u64).unwrap();
        // SAFETY: advice for memory that is ours. Undoes that of `Anonymous`.
        unsafe { libc::madvise(memory.at().cast(), memory.len(), libc::MADV_NOHUGEPAGE) };
        memory
    }

    /// Two places: one begins and ends within huge pages, the other has none.
    fn asked(memory: &Anonymous, times: PageTimes) -> FirstTouch {
        let at = memory.at() as usize;
        let places = vec![whole_pages(at + 100, 20 * HUGE), whole_pages(at, 100)];
        let touch = FirstTouch { places, done: vec![0; 2], times };
        touch.advise(0..2, libc::MADV_HUGEPAGE);
        touch
    }

    #[test]
    fn only_whole_huge_pages_of_a_place_are_asked_for() {
        assert_eq!(whole_pages(HUGE + 1, 3 * HUGE), 2 * HUGE..4 * HUGE);
        assert_eq!(whole_pages(HUGE, HUGE), HUGE..2 * HUGE);
        for (at, len) in [(1, 2 * HUGE - 2), (0, HUGE - 1), (usize::MAX - 1, 1), (HUGE, usize::MAX)] {
            assert!(whole_pages(at, len).is_empty(), "{at} {len}");
        }
    }

    #[test]
    fn asking_is_of_use_where_the_system_is_set_to_it() {
        let (always, advice, never) = ("[always] madvise never", "always [madvise] never", "always madvise [never]");
        assert_eq!([always, advice, never, ""].map(|all| is_by_advice(all, None)), [false, true, false, false]);
        let inherits = "always [inherit] madvise never";
        assert!(is_by_advice(advice, Some(inherits)) && !is_by_advice(always, Some(inherits)));
        assert!(is_by_advice(always, Some("always inherit [madvise] never")));
        assert!(!is_by_advice(advice, Some("always inherit madvise [never]")));
    }

    #[test]
    fn fast_huge_pages_are_kept_and_one_of_so_many_is_timed() {
        let memory = plain(24);
        let mut touch = asked(&memory, PageTimes::slow_from(Duration::from_secs(1)));
        let at = memory.at() as usize;
        assert!(has(at + 2 * HUGE, "hg"), "{:?}", flags((at + 2 * HUGE) as u64));
        assert!(!has(at, "hg") && !has(at + 22 * HUGE, "hg"));
        let (mut looked, mut turns) = (0, 0);
        while let found @ 1.. = touch.ahead(0, HUGE_PAGE / 2) {
            (looked, turns) = (looked + found, turns + 1);
        }
        // 19 whole pages: the first, the ninth and the seventeenth
        assert_eq!(resident_bytes(memory.at(), memory.len()), 3 * HUGE);
        assert_eq!((looked, turns, touch.nbytes()), (19 * HUGE_PAGE, 19, 19 * HUGE_PAGE));
        assert_eq!((touch.ahead(1, 100), touch.ahead(2, 100)), (0, 0));
        touch.end(0..2);
        assert!(has(at + 2 * HUGE, "hg") && !touch.are_slow());
    }

    #[test]
    fn after_slow_huge_pages_the_rest_comes_in_small_ones_until_all_is_written() {
        let memory = plain(24);
        let mut touch = asked(&memory, PageTimes::slow_from(Duration::ZERO));
        assert_eq!((touch.ahead(0, 20 * HUGE_PAGE), touch.ahead(0, HUGE_PAGE)), (2 * HUGE_PAGE, 0));
        assert!(touch.are_slow());
        let at = memory.at() as usize;
        assert_eq!(resident_bytes(memory.at(), memory.len()), 2 * HUGE);
        touch.turn_small([1, 7]); // neither has a whole page
        assert!(has(at + HUGE, "hg"));
        touch.turn_small([0]);
        assert!(has(at + HUGE, "nh") && has(at + 19 * HUGE, "nh"));
        touch.end([0]);
        assert!(has(at + HUGE, "hg") && has(at + 19 * HUGE, "hg"));
    }

    #[test]
    fn little_memory_is_not_timed_nor_any_without_page_timing() {
        for (len, page_timing, timed) in [
            (LEAST_SAMPLED - 1, Some(true), false),
            (LEAST_SAMPLED, Some(false), false),
            (LEAST_SAMPLED, Some(true), true),
            (LEAST_SAMPLED, None, is_virtual_machine()),
        ] {
            assert_eq!(PageTimes::new(len, page_timing).skip.is_some(), timed, "{len} {page_timing:?}");
        }
    }
}
