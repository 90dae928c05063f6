//! Whether cold bytes that are read into private memory stay in the page cache. The pace of the storage decides.
//!
//! Reading through the page cache costs the processor two to four times as much as reading past it, and many disks are
//! slower that way, however fast the processor is. If a disk is not slower, keeping costs nothing, and the next start
//! need not read the storage. So the first reads of a load go past the page cache, the next ones through it, and both
//! are timed. The times decide for the rest. If the page cache is kept, what has gone past it is read into it at the
//! end. If not, the page cache is filled after the load (`fill_after`), so that this choice costs the next start
//! nothing either. The page cache may turn slow later, when its memory has to be found first. So reads through it go on being
//! timed, and where they become much slower, some go past it once more, and the choice is made anew.
//!
//! A process that reads past the page cache leaves nothing to another one that loads the same file at the same time, and
//! each takes its share of the disk for bytes that the other has read. So where pages turn up in the page cache that this
//! load has not brought in, it keeps to the page cache, whatever the pace.
//!
//! The constants are from one virtual machine with two cores. `benches/copied.py --ways "no option,keep,bypass"` on other
//! machines can remove this controller: if one way wins on all of them, it is the rule. `cache="keep"` and
//! `cache="bypass"` switch it off.
//!
//! The trial stands before a source of files, and changes the lane of reads that go through the page cache. The source
//! knows nothing of it.

use super::threads::ReadAhead;
use super::{Done, Progress, Read, Source, Touches};
use crate::error::Result;
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use crate::machine::page_size;
use crate::options::{GB, MIB};
use crate::store::{cached_pages, Files};
use crate::sync::lock;
use crate::way::{Choice, Chosen, Cold, WORTH_A_TRIAL};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of each of the two ways: some milliseconds, and as many reads as keep a disk busy.
const ENOUGH: u64 = WORTH_A_TRIAL / 3;
/// Bytes that are sent each way while it is timed: some are still in flight when the timing ends.
const AT_MOST: u64 = ENOUGH + ENOUGH / 2;
/// Bytes after which a choice for going past the page cache is reviewed, by the pace of these bytes: rented storage
/// gives the first bytes faster than the rest.
const AT_LAST: u64 = 64 * MIB;
/// The page cache is kept if the pace through it is at least this share of the pace past it.
const SHARE: f64 = 0.9;
/// Storage that gives fewer bytes per second than this past the page cache is slower than the processor on either way.
/// The two ways then differ by chance, and reading everything again afterwards would cost most. So a smaller share is
/// enough.
const SLOW: f64 = 0.25 * GB;
const SHARE_IF_SLOW: f64 = 0.5;
/// Reads through the page cache that is kept are doubtful below this part of the share that kept it.
const MUCH_SLOWER: f64 = 0.7;
/// Times that a load that keeps the page cache tries the other way once more: each costs reads of the same bytes again.
const REVIEWS: u32 = 2;
/// Pages of a read that somebody else must have brought in: what a load leaves at the ends of huge pages is less.
const MOSTLY: f64 = 0.75;
/// The same of the bytes that were read past the page cache. Another process may be further back.
const IN_PART: f64 = 0.25;

/// A source whose direct reads go past the page cache or through it, as the pace of the storage says.
pub(crate) struct Trial {
    inner: Box<dyn Source>,
    late: ReadAhead,
    files: Arc<Files>,
    pace: Pace,
    chosen: Chosen,
}

impl Trial {
    /// `late` reads into the page cache after the trial what has gone past it.
    pub(crate) fn new(late: ReadAhead, inner: impl Source + 'static, files: Arc<Files>, chosen: Chosen) -> Self {
        Trial { late, inner: Box::new(inner), files, pace: Pace::new(), chosen }
    }

    /// Bytes of a file that are in the page cache; none where nobody may know.
    fn cached(&self, file: u32, range: &Range<u64>) -> u64 {
        if self.files.may_hang() {
            return 0;
        }
        let asked = self.files.open(file, false).ok().and_then(|fd| cached_pages(fd.as_raw_fd(), range).ok());
        (asked.unwrap_or(0) * page_size()).min(range.end - range.start)
    }

    /// Whether others have read through the page cache what this load has read past it.
    fn is_read_by_others(&self) -> bool {
        let (mut cached, mut past) = (0, 0);
        for (file, range) in &self.pace.past {
            cached += self.cached(*file, range);
            past += range.end - range.start;
        }
        past > 0 && cached as f64 >= IN_PART * past as f64
    }
}

impl Source for Trial {
    fn submit(&mut self, mut read: Read) -> Result<(), Read> {
        if read.lane != Lane::DIRECT {
            return self.inner.submit(read);
        }
        // The submitting thread is woken when one of the reads in flight comes back.
        if self.pace.holds(read.len, Instant::now()) {
            return Err(read);
        }
        let (ticket, file, range) = (read.ticket, read.file, read.offset..read.offset + read.len);
        // It was cold when the load was planned, and nothing is there yet that this load's own reads may have brought.
        let first = self.pace.stage == Timing::Through && self.pace.back == 0;
        if first && self.cached(file, &range) as f64 >= MOSTLY * read.len as f64 {
            self.pace.share();
        }
        if self.pace.is_through() {
            read.lane = Lane::BUFFERED;
        }
        self.inner.submit(read).map_err(|read| Read { lane: Lane::DIRECT, ..read })?;
        self.pace.sent(ticket, file, range, Instant::now());
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let before = events.len();
        self.inner.poll(events)?;
        let done = events[before..].iter().filter_map(|event| match event {
            Progress::Done(done) => Some(done),
            Progress::Arrived(_) | Progress::Received(_) | Progress::Refused { .. } => None,
        });
        self.pace.back(done, Instant::now());
        if self.pace.news && !self.pace.keeps() && self.is_read_by_others() {
            self.pace.share();
        }
        if std::mem::take(&mut self.pace.news) {
            lock(&self.chosen).clone_from(&self.pace.choice);
        }
        self.late.fetch(self.pace.take_past());
        Ok(())
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn wake(&self) -> RawFd {
        self.inner.wake()
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.inner.wait_for(fence)
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn take_touches(&mut self) -> Touches {
        self.inner.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        self.inner.take_fallbacks()
    }
}

/// The two paces and what follows from them. The clock is an argument.
#[derive(Debug)]
struct Pace {
    stage: Timing,
    /// When the first read of this stage went out, and the bytes that went out and came back since.
    since: Option<Instant>,
    sent: u64,
    back: u64,
    /// Reads in flight: file, range, and whether they went past the page cache.
    out: HashMap<Ticket, (u32, Range<u64>, bool)>,
    /// Ranges read past the page cache.
    past: Vec<(u32, Range<u64>)>,
    /// Bytes per second, past the page cache and through it.
    paces: (f64, f64),
    /// Times that the other way may still be tried again.
    reviews: u32,
    choice: Option<Choice>,
    /// The choice has not been published yet.
    news: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Timing {
    /// Reads past the page cache are timed.
    Past,
    /// Reads through it are timed.
    Through,
    /// Past it was chosen, but reads that way are timed again.
    Doubtful,
    /// The page cache is kept, but reads through it are timed again.
    Kept,
    /// They have become slow: reads past it are timed once more.
    Again,
    Over,
}

impl Pace {
    fn new() -> Self {
        Pace {
            stage: Timing::Past,
            since: None,
            sent: 0,
            back: 0,
            out: HashMap::new(),
            past: Vec::new(),
            paces: (0.0, 0.0),
            reviews: REVIEWS,
            choice: None,
            news: false,
        }
    }

    fn keeps(&self) -> bool {
        self.choice.as_ref().is_some_and(|choice| choice.cold == Cold::Keep)
    }

    /// Whether reads go through the page cache now.
    fn is_through(&self) -> bool {
        match self.stage {
            Timing::Past | Timing::Again => false,
            Timing::Through => true,
            Timing::Doubtful | Timing::Kept | Timing::Over => self.keeps(),
        }
    }

    /// Whether a read of `len` bytes has to wait until it is known which way it goes.
    fn holds(&mut self, len: u64, now: Instant) -> bool {
        if !matches!(self.stage, Timing::Past | Timing::Through | Timing::Again) {
            return false;
        }
        // The two ways are never timed at the same time.
        let waits = match self.sent {
            0 => !self.out.is_empty(),
            sent => sent + len > AT_MOST,
        };
        if waits && self.out.is_empty() {
            // Nothing more will come back that could tell.
            self.next(now);
            return self.holds(len, now);
        }
        waits
    }

    /// A read was sent, the way that [`is_through`](Self::is_through) says.
    fn sent(&mut self, ticket: Ticket, file: u32, range: Range<u64>, now: Instant) {
        if self.stage == Timing::Over {
            return;
        }
        self.since.get_or_insert(now);
        self.sent += range.end - range.start;
        self.out.insert(ticket, (file, range, !self.is_through()));
    }

    /// These came back. Goes on to the next stage when that is enough.
    fn back<'d>(&mut self, done: impl IntoIterator<Item = &'d Done>, now: Instant) {
        for done in done {
            let Some((file, range, past)) = self.out.remove(&done.ticket) else { continue };
            match done.result {
                Ok(_) if past && done.lane != Lane::DIRECT => {
                    let reason = "O_DIRECT was refused".into();
                    (self.choice, self.news) = (Some(Choice { cold: Cold::Keep, reason }), true);
                    self.stage = Timing::Over;
                }
                Ok(_) => {
                    if past != self.is_through() {
                        self.back += range.end - range.start;
                    }
                    if past {
                        self.past.push((file, range));
                    }
                }
                // The load fails with it.
                Err(_) => {}
            }
        }
        let enough = match self.stage {
            Timing::Past | Timing::Through | Timing::Again => ENOUGH,
            Timing::Doubtful | Timing::Kept => AT_LAST,
            Timing::Over => u64::MAX,
        };
        if self.back >= enough {
            self.next(now);
        }
    }

    fn next(&mut self, now: Instant) {
        let seconds = self.since.take().map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
        let pace = self.back as f64 / seconds.max(1e-9);
        (self.sent, self.back) = (0, 0);
        match self.stage {
            Timing::Through | Timing::Kept => self.paces.1 = pace,
            _ => self.paces.0 = pace,
        }
        let (past, through) = self.paces;
        let share = if past < SLOW { SHARE_IF_SLOW } else { SHARE };
        match self.stage {
            Timing::Past => {
                self.stage = Timing::Through;
                return;
            }
            Timing::Kept => {
                if through < MUCH_SLOWER * share * past && self.reviews > 0 {
                    (self.stage, self.reviews) = (Timing::Again, self.reviews - 1);
                }
                return;
            }
            _ => {}
        }
        let keep = through >= share * past;
        let when = if self.stage == Timing::Again { ", tried again when that had become slower" } else { "" };
        self.stage = match (keep, self.stage) {
            (_, Timing::Doubtful) => Timing::Over,
            (true, _) => Timing::Kept,
            (false, _) => Timing::Doubtful,
        };
        let reason = format!(
            "the storage gives {:.2} GB/s past the page cache and {:.2} GB/s through it{when}",
            past / GB,
            through / GB
        );
        let cold = if keep { Cold::Keep } else { Cold::Bypass };
        (self.choice, self.news) = (Some(Choice { cold, reason }), true);
    }

    /// Somebody else reads the same bytes through the page cache.
    fn share(&mut self) {
        let reason = "others read the same bytes through the page cache".into();
        (self.choice, self.news) = (Some(Choice { cold: Cold::Keep, reason }), true);
        self.stage = Timing::Over;
    }

    /// Ranges read past the page cache, if it is kept after all.
    fn take_past(&mut self) -> Vec<(u32, Range<u64>)> {
        if self.keeps() {
            std::mem::take(&mut self.past)
        } else {
            Vec::new()
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};
    use std::time::Duration;

    const EACH: u64 = 4 * MIB;
    /// Reads that go out of each way, and that are enough.
    const SENT: u64 = AT_MOST / EACH;
    const TIMED: u64 = ENOUGH / EACH;
    /// Reads that time the page cache again.
    const WINDOW: u64 = AT_LAST / EACH;

    /// A pace with a clock of its own.
    struct Timed {
        pace: Pace,
        now: Instant,
    }

    fn done(n: u64, lane: Lane) -> Done {
        Done { ticket: Ticket(n), result: Ok(EACH), lane, written: EACH }
    }

    impl Timed {
        fn new() -> Self {
            Timed { pace: Pace::new(), now: Instant::now() }
        }

        fn after(&mut self, ms: u64) {
            self.now += Duration::from_millis(ms);
        }

        /// Sends reads from number `from` on until one is held back; how many went out.
        fn send(&mut self, from: u64, at_most: u64) -> u64 {
            for n in from..from + at_most {
                if self.pace.holds(EACH, self.now) {
                    return n - from;
                }
                self.pace.sent(Ticket(n), 0, n * EACH..(n + 1) * EACH, self.now);
            }
            at_most
        }

        /// These come back, the way that they went.
        fn back(&mut self, numbers: Range<u64>) {
            let done: Vec<_> = numbers
                .map(|n| {
                    let past = self.pace.out.get(&Ticket(n)).is_some_and(|out| out.2);
                    done(n, if past { Lane::DIRECT } else { Lane::BUFFERED })
                })
                .collect();
            self.pace.back(&done, self.now);
        }

        /// Reads both ways, each in so many milliseconds; the number of the next read.
        fn tried(&mut self, past: u64, through: u64) -> u64 {
            let mut n = 0;
            for ms in [past, through] {
                assert_eq!(self.send(n, 100), SENT);
                self.after(ms);
                self.back(n..n + TIMED);
                // The next way begins when all of this one are back.
                assert!(self.pace.choice.is_some() || self.pace.holds(EACH, self.now));
                self.back(n + TIMED..n + SENT);
                n += SENT;
            }
            n
        }

        /// Reads so many bytes through the page cache as are timed again, in so many milliseconds; the number of the next read.
        fn window(&mut self, from: u64, ms: u64) -> u64 {
            assert!(self.pace.is_through());
            assert_eq!(self.send(from, WINDOW), WINDOW);
            self.after(ms);
            self.back(from..from + WINDOW);
            from + WINDOW
        }

        fn cold(&self) -> Option<Cold> {
            self.pace.choice.as_ref().map(|choice| choice.cold)
        }
    }

    #[test]
    fn storage_that_is_slower_through_the_page_cache_is_read_past_it() {
        let mut timed = Timed::new();
        assert!(!timed.pace.is_through());
        let n = timed.tried(20, 60);
        assert_eq!(timed.cold(), Some(Cold::Bypass));
        assert!(timed.pace.choice.as_ref().unwrap().reason.contains("GB/s past the page cache and"));
        assert!(!timed.pace.is_through());
        // And goes on so: 64 MiB at the pace of the first ones or better.
        assert_eq!(timed.send(n, 100), 100);
        timed.after(20);
        timed.back(n..n + 100);
        assert_eq!(timed.pace.stage, Timing::Over);
        assert!(!timed.pace.is_through() && timed.pace.take_past().is_empty());
    }

    #[test]
    fn storage_that_is_as_fast_either_way_is_kept_and_what_went_past_is_told_once() {
        let mut timed = Timed::new();
        let n = timed.tried(60, 60);
        assert!(timed.pace.is_through() && timed.pace.stage == Timing::Kept, "{:?}", timed.pace.choice);
        assert_eq!(timed.pace.take_past(), (0..SENT).map(|n| (0, n * EACH..(n + 1) * EACH)).collect::<Vec<_>>());
        assert!(timed.pace.take_past().is_empty());
        // And goes on so, as long as it is not much slower.
        timed.pace.news = false;
        let last = (n..n + 10 * WINDOW).step_by(WINDOW as usize).fold(n, |_, n| timed.window(n, 240));
        assert!(timed.pace.is_through() && timed.pace.stage == Timing::Kept && !timed.pace.news);
        assert_eq!(timed.send(last, 100), 100);
    }

    #[test]
    fn a_page_cache_that_turns_slow_is_left() {
        let mut timed = Timed::new();
        let n = timed.tried(60, 60);
        timed.pace.take_past();
        let n = timed.window(n, 160);
        assert_eq!(timed.pace.stage, Timing::Kept);
        // Some are still on their way through it when it turns out to be slow: nothing goes past it until they are back.
        timed.send(n, WINDOW + 3);
        timed.after(500);
        timed.back(n..n + WINDOW);
        assert!(timed.pace.stage == Timing::Again && timed.pace.holds(EACH, timed.now));
        timed.back(n + WINDOW..n + WINDOW + 3);
        let n = n + WINDOW + 3;
        assert_eq!(timed.send(n, 100), SENT);
        assert!(!timed.pace.is_through());
        timed.after(60);
        timed.back(n..n + SENT);
        assert_eq!((timed.cold(), timed.pace.news), (Some(Cold::Bypass), true));
        assert!(timed.pace.choice.as_ref().unwrap().reason.contains("through it, tried again"));
        assert_eq!(timed.send(n + SENT, 100), 100);
        assert!(!timed.pace.is_through() && timed.pace.take_past().is_empty());
    }

    #[test]
    fn storage_that_turns_slow_both_ways_is_kept_and_not_tried_for_ever() {
        let mut timed = Timed::new();
        let mut n = timed.tried(60, 60);
        timed.pace.take_past();
        for review in 0..REVIEWS {
            n = timed.window(n, 500 * (1 + u64::from(review) * 3));
            assert_eq!(timed.send(n, 100), SENT, "{review}");
            timed.after(190 * (1 + u64::from(review) * 3));
            timed.back(n..n + SENT);
            n += SENT;
            assert!(timed.pace.is_through() && timed.pace.stage == Timing::Kept, "{:?}", timed.pace.choice);
            assert_eq!(timed.pace.take_past().len() as u64, SENT, "these are to be brought in too");
        }
        n = timed.window(n, 20_000);
        assert!(timed.pace.stage == Timing::Kept && timed.pace.reviews == 0);
        assert_eq!(timed.send(n, 100), 100);
    }

    #[test]
    fn slow_storage_is_kept_unless_it_is_much_slower_through_the_page_cache() {
        // 24 MiB in 300 ms are 0.08 GB/s.
        for (through, cold) in [(550, Cold::Keep), (650, Cold::Bypass)] {
            let mut timed = Timed::new();
            timed.tried(300, through);
            assert_eq!(timed.cold(), Some(cold), "{:?}", timed.pace.choice);
        }
    }

    #[test]
    fn storage_that_is_fast_only_at_first_is_kept_after_all() {
        let mut timed = Timed::new();
        let n = timed.tried(5, 40);
        assert!(!timed.pace.is_through());
        assert_eq!(timed.send(n, 20), 20);
        // Slower than the page cache was.
        timed.after(300);
        timed.back(n..n + 20);
        assert!(timed.pace.is_through() && timed.pace.stage == Timing::Over, "{:?}", timed.pace.choice);
        assert_eq!(timed.pace.take_past().len() as u64, SENT + 20);
    }

    #[test]
    fn a_read_is_never_held_where_nothing_is_awaited() {
        let mut timed = Timed::new();
        for n in 0..80 {
            // One at a time, as with a depth of one.
            assert_eq!(timed.send(n, 1), 1, "{n}");
            timed.after(1);
            timed.back(n..n + 1);
        }
        assert!(timed.pace.choice.is_some());
        // Reads larger than what is tried.
        let mut timed = Timed::new();
        for n in 0..4 {
            assert!(!timed.pace.holds(2 * AT_MOST, timed.now), "{n}");
            timed.pace.sent(Ticket(n), 0, 0..2 * AT_MOST, timed.now);
            timed.after(1);
            timed.back(n..n + 1);
        }
        assert!(timed.pace.choice.is_some());
    }

    #[test]
    fn a_choice_that_is_made_when_a_read_is_held_back_is_news_too() {
        let mut timed = Timed::new();
        // So large that one of them is not enough, and a second one too many.
        let len = 20 * MIB;
        for n in 0..2 {
            assert!(!timed.pace.holds(len, timed.now));
            timed.pace.sent(Ticket(n), 0, 0..len, timed.now);
            timed.after(10);
            timed.back(n..n + 1);
            assert!(!timed.pace.news, "{n}");
        }
        assert!(!timed.pace.holds(len, timed.now));
        assert!(timed.pace.news && timed.cold() == Some(Cold::Keep));
    }

    #[test]
    fn what_refuses_direct_reads_is_kept() {
        let mut timed = Timed::new();
        timed.send(0, 2);
        timed.pace.back(&[done(1, Lane::BUFFERED)], timed.now);
        assert!(timed.pace.news);
        assert!(timed.pace.is_through() && timed.pace.stage == Timing::Over);
        assert!(timed.pace.take_past().is_empty());
    }

    #[test]
    fn what_others_read_through_the_page_cache_is_kept_whatever_the_pace() {
        let mut timed = Timed::new();
        let n = timed.tried(20, 60);
        assert_eq!(timed.cold(), Some(Cold::Bypass));
        timed.pace.share();
        assert!(timed.pace.news && timed.pace.is_through() && timed.pace.stage == Timing::Over);
        assert_eq!(timed.pace.take_past().len() as u64, SENT);
        assert_eq!(timed.send(n, 100), 100);
    }

    #[test]
    fn a_read_that_failed_tells_nothing() {
        let mut timed = Timed::new();
        timed.send(0, 1);
        let result = Err(Error::new(ErrorKind::Io, "no"));
        timed.pace.back(&[Done { ticket: Ticket(0), result, lane: Lane::DIRECT, written: 0 }], timed.now);
        assert_eq!((timed.pace.back, timed.cold(), timed.pace.news), (0, None, false));
    }
}
