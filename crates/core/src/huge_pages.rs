//! Huge pages at the first touch of memory: where they are slow, small ones; and huge ones for memory of somebody else.
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
        // SAFETY: populating changes no byte, whatever is mapped there. What is not mapped, or of a device, is refused.
        if unsafe { libc::madvise(at.cast(), len, libc::MADV_POPULATE_WRITE) } != 0 {
            // Before Linux 5.14, or no memory. Whoever writes there finds out.
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
/// Small pages are most of the processor time of such a copy (88,000 faults for 360 MB took 0.13 s of 0.2 s). The system may be
/// set to give huge ones to who asks. Nothing but advice is given, and no byte changes.
pub struct FirstTouch {
    places: Vec<Range<usize>>,
    times: PageTimes,
    /// The next huge page to look at: its place, and its address.
    next: (usize, usize),
    /// Bytes that were said to be written, less those of the pages that were looked at.
    due: i64,
}

impl FirstTouch {
    /// Asks for huge pages in these places (address, bytes), whose memory is mapped now, where they hold whole ones.
    /// `page_timing` is that of the options. `None`: asking is of no use.
    pub fn ask(places: &[(usize, usize)], page_timing: Option<bool>) -> Option<Self> {
        is_asked_for().then(|| {
            let places: Vec<_> = places.iter().filter_map(|&(at, len)| whole_pages(at, len)).collect();
            let len = places.iter().map(|place| place.len() as u64).sum();
            let next = (0, places.first().map_or(0, |place| place.start));
            let found = Self { places, times: PageTimes::new(len, page_timing), next, due: 0 };
            found.advise(libc::MADV_HUGEPAGE);
            found
        })
    }

    /// Bytes that get huge pages, as long as these are fast.
    pub fn nbytes(&self) -> u64 {
        if self.times.are_slow() {
            return 0;
        }
        self.places.iter().map(|place| place.len() as u64).sum()
    }

    /// The next `nbytes` bytes of the places are about to be written: times some of their huge pages. If these are slow, what is
    /// not touched yet comes in small ones.
    pub fn ahead(&mut self, nbytes: u64) {
        self.due = self.due.saturating_add_unsigned(nbytes);
        while self.due > 0 {
            let Some(place) = self.places.get(self.next.0) else { return };
            let at = self.next.1;
            self.due -= HUGE_PAGE as i64;
            self.next.1 += HUGE_PAGE as usize;
            if self.next.1 >= place.end {
                self.next.0 += 1;
                self.next.1 = self.places.get(self.next.0).map_or(0, |place| place.start);
            }
            if self.times.turn_slow(at as *mut u8, HUGE_PAGE as usize) {
                self.advise(libc::MADV_NOHUGEPAGE);
                return;
            }
        }
    }

    fn advise(&self, how: i32) {
        for place in &self.places {
            // SAFETY: advice changes no byte, whatever is mapped there. What is no longer mapped is refused.
            unsafe { libc::madvise(place.start as *mut libc::c_void, place.len(), how) };
        }
    }
}

/// The whole huge pages of a place.
fn whole_pages(at: usize, len: usize) -> Option<Range<usize>> {
    let huge = HUGE_PAGE as usize;
    let (start, end) = (at.checked_next_multiple_of(huge)?, at.checked_add(len)? / huge * huge);
    (start < end).then_some(start..end)
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

    fn asked(memory: &Anonymous, times: PageTimes) -> FirstTouch {
        let at = memory.at() as usize;
        // A place that begins and ends within huge pages, and one that has none
        let places: Vec<_> =
            [(at + 100, 20 * HUGE), (at, 100)].iter().filter_map(|&(at, len)| whole_pages(at, len)).collect();
        let next = (0, places[0].start);
        let touch = FirstTouch { places, times, next, due: 0 };
        touch.advise(libc::MADV_HUGEPAGE);
        touch
    }

    #[test]
    fn only_whole_huge_pages_of_a_place_are_asked_for() {
        assert_eq!(whole_pages(HUGE + 1, 3 * HUGE), Some(2 * HUGE..4 * HUGE));
        assert_eq!(whole_pages(HUGE, HUGE), Some(HUGE..2 * HUGE));
        assert_eq!((whole_pages(1, 2 * HUGE - 2), whole_pages(0, HUGE - 1)), (None, None));
        assert_eq!((whole_pages(usize::MAX - 1, 1), whole_pages(HUGE, usize::MAX)), (None, None));
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
        for _ in 0..60 {
            touch.ahead(HUGE_PAGE / 2);
        }
        // 19 whole pages: the first, the ninth and the seventeenth
        assert_eq!(resident_bytes(memory.at(), memory.len()), 3 * HUGE);
        assert_eq!(touch.nbytes(), 19 * HUGE_PAGE);
    }

    #[test]
    fn after_slow_huge_pages_the_rest_comes_in_small_ones() {
        let memory = plain(24);
        let mut touch = asked(&memory, PageTimes::slow_from(Duration::ZERO));
        touch.ahead(20 * HUGE_PAGE);
        let at = memory.at() as usize;
        assert_eq!(resident_bytes(memory.at(), memory.len()), 2 * HUGE);
        assert!(has(at + HUGE, "nh") && has(at + 19 * HUGE, "nh"));
        assert_eq!(touch.nbytes(), 0);
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
