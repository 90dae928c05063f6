//! Whether cold bytes that are read into private memory stay in the page cache. The pace of the storage decides.
//!
//! Reading through the page cache costs the processor two to four times as much as reading past it, and many disks are
//! slower that way, however fast the processor is. If a disk is not slower, keeping costs nothing, and the next start
//! need not read the storage. So the first reads of a load go past the page cache, the next ones through it, and both
//! are timed. The times decide for the rest. If the page cache is kept, what has gone past it is read into it at the
//! end. If not, the page cache is filled after the load (`fill_after`), so that this choice costs the next start
//! nothing either.

use super::{Choice, Outcome, Read};
use crate::extent::Ticket;
use crate::options::{GB, MIB};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// Bytes of each of the two ways: some milliseconds, and as many reads as keep a disk busy.
const ENOUGH: u64 = 24 * MIB;
/// Bytes that are sent each way while it is timed: some are still in flight when the timing ends.
const AT_MOST: u64 = ENOUGH + ENOUGH / 2;
/// Bytes after which a choice for going past the page cache is reviewed, by the pace of these bytes: rented storage
/// gives the first bytes faster than the rest.
const AT_LAST: u64 = 64 * MIB;
/// Loads with fewer cold bytes than this do not try. They keep.
pub(crate) const WORTH_A_TRIAL: u64 = 3 * ENOUGH;
/// The page cache is kept if the pace through it is at least this share of the pace past it.
const SHARE: f64 = 0.9;
/// Storage that gives fewer bytes per second than this past the page cache is slower than the processor on either way.
/// The two ways then differ by chance, and reading everything again afterwards would cost most. So a smaller share is
/// enough.
const SLOW: f64 = 0.25 * GB;
const SHARE_IF_SLOW: f64 = 0.5;

#[derive(Debug)]
pub(super) struct Trial {
    stage: Stage,
    /// When the first read of this stage went out, and the bytes that went out and came back since.
    since: Option<Instant>,
    sent: u64,
    back: u64,
    /// Reads in flight: file, range, and whether they went past the page cache.
    out: HashMap<Ticket, (u32, Range<u64>, bool)>,
    /// What went past the page cache.
    past: Vec<(u32, Range<u64>)>,
    /// Bytes per second, past the page cache and through it.
    paces: (f64, f64),
    choice: Option<Choice>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Reads past the page cache are timed.
    Past,
    /// Reads through it are timed.
    Through,
    /// The choice is made, but reads past the page cache are timed again.
    Doubtful,
    Over,
}

impl Trial {
    pub(super) fn new() -> Self {
        Trial {
            stage: Stage::Past,
            since: None,
            sent: 0,
            back: 0,
            out: HashMap::new(),
            past: Vec::new(),
            paces: (0.0, 0.0),
            choice: None,
        }
    }

    pub(super) fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    fn keeps(&self) -> bool {
        self.choice.as_ref().is_some_and(|choice| choice.keep)
    }

    /// Whether reads go through the page cache now.
    pub(super) fn is_through(&self) -> bool {
        self.stage == Stage::Through || self.keeps()
    }

    /// Whether `read` has to wait until it is known which way it goes.
    pub(super) fn holds(&mut self, read: &Read) -> bool {
        if !matches!(self.stage, Stage::Past | Stage::Through) {
            return false;
        }
        // The two ways are never timed at the same time.
        let waits = match self.sent {
            0 => !self.out.is_empty(),
            sent => sent + read.len > AT_MOST,
        };
        if waits && self.out.is_empty() {
            // Nothing more will come back that could tell.
            self.next();
            return self.holds(read);
        }
        waits
    }

    /// A read was sent, the way that [`is_through`](Self::is_through) says.
    pub(super) fn sent(&mut self, ticket: Ticket, file: u32, range: Range<u64>) {
        if self.stage == Stage::Over {
            return;
        }
        self.since.get_or_insert_with(Instant::now);
        self.sent += range.end - range.start;
        self.out.insert(ticket, (file, range, self.stage != Stage::Through));
    }

    /// These came back. Goes on to the next stage when that is enough.
    pub(super) fn back(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let Some((file, range, past)) = self.out.remove(&outcome.ticket()) else { continue };
            match outcome {
                Outcome::Done(done) if done.result.is_ok() => {
                    if past == (self.stage != Stage::Through) {
                        self.back += range.end - range.start;
                    }
                    if past {
                        self.past.push((file, range));
                    }
                }
                // The load fails with it.
                Outcome::Done(_) => {}
                Outcome::Refused { .. } => {
                    self.choice = Some(Choice { keep: true, reason: "O_DIRECT was refused".into() });
                    self.stage = Stage::Over;
                }
            }
        }
        let enough = match self.stage {
            Stage::Past | Stage::Through => ENOUGH,
            Stage::Doubtful => AT_LAST,
            Stage::Over => return,
        };
        if self.back >= enough {
            self.next();
        }
    }

    fn next(&mut self) {
        let seconds = self.since.take().map_or(0.0, |since| since.elapsed().as_secs_f64());
        let pace = self.back as f64 / seconds.max(1e-9);
        (self.sent, self.back) = (0, 0);
        match self.stage {
            Stage::Through => self.paces.1 = pace,
            _ => self.paces.0 = pace,
        }
        if self.stage == Stage::Past {
            self.stage = Stage::Through;
            return;
        }
        let (past, through) = self.paces;
        let keep = through >= if past < SLOW { SHARE_IF_SLOW } else { SHARE } * past;
        self.stage = if keep || self.stage == Stage::Doubtful { Stage::Over } else { Stage::Doubtful };
        let reason = format!(
            "the storage gives {:.2} GB/s past the page cache and {:.2} GB/s through it",
            past / GB,
            through / GB
        );
        self.choice = Some(Choice { keep, reason });
    }

    /// What went past the page cache although the page cache is kept.
    pub(super) fn take_past(&mut self) -> Vec<(u32, Range<u64>)> {
        if self.keeps() {
            std::mem::take(&mut self.past)
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extent::Route;
    use crate::source::{Destination, Done};
    use std::sync::Arc;
    use std::time::Duration;

    const EACH: u64 = 4 * MIB;
    /// Reads that go out of each way, and that are enough.
    const SENT: u64 = AT_MOST / EACH;
    const TIMED: u64 = ENOUGH / EACH;

    fn read(n: u64) -> Read {
        let (into, keep) = (Destination::Memory(std::ptr::null_mut()), Arc::new(()));
        let (offset, len, route) = (n * EACH, EACH, Route::Direct);
        Read { ticket: Ticket(n), file: 0, offset, len, need: len, route, into, fresh: false, keep }
    }

    fn done(n: u64) -> Outcome {
        Outcome::Done(Done { ticket: Ticket(n), result: Ok(EACH), route: Route::Direct })
    }

    /// Sends reads from number `from` on until one is held back; how many went out.
    fn send(trial: &mut Trial, from: u64, at_most: u64) -> u64 {
        for n in from..from + at_most {
            if trial.holds(&read(n)) {
                return n - from;
            }
            trial.sent(Ticket(n), 0, n * EACH..(n + 1) * EACH);
        }
        at_most
    }

    /// Reads both ways, each in about so many milliseconds; the number of the next read.
    fn tried(trial: &mut Trial, past: u64, through: u64) -> u64 {
        let mut n = 0;
        for ms in [past, through] {
            assert_eq!(send(trial, n, 100), SENT);
            std::thread::sleep(Duration::from_millis(ms));
            trial.back(&(n..n + TIMED).map(done).collect::<Vec<_>>());
            // The next way begins when all of this one are back.
            assert!(trial.choice().is_some() || trial.holds(&read(n + SENT)));
            trial.back(&(n + TIMED..n + SENT).map(done).collect::<Vec<_>>());
            n += SENT;
        }
        n
    }

    #[test]
    fn storage_that_is_slower_through_the_page_cache_is_read_past_it() {
        let mut trial = Trial::new();
        assert!(!trial.is_through());
        let n = tried(&mut trial, 20, 60);
        assert!(trial.choice().is_some_and(|c| !c.keep && c.reason.contains("GB/s past the page cache and")));
        assert!(!trial.is_through());
        // And goes on so: 64 MiB at the pace of the first ones or better.
        assert_eq!(send(&mut trial, n, 100), 100);
        trial.back(&(n..n + 100).map(done).collect::<Vec<_>>());
        assert_eq!(trial.stage, Stage::Over);
        assert!(!trial.is_through() && trial.take_past().is_empty());
    }

    #[test]
    fn storage_that_is_as_fast_either_way_is_kept_and_what_went_past_is_told_once() {
        let mut trial = Trial::new();
        let n = tried(&mut trial, 60, 20);
        assert!(trial.is_through() && trial.stage == Stage::Over, "{:?}", trial.choice());
        assert_eq!(trial.take_past(), (0..SENT).map(|n| (0, n * EACH..(n + 1) * EACH)).collect::<Vec<_>>());
        assert!(trial.take_past().is_empty());
        assert_eq!(send(&mut trial, n, 100), 100);
    }

    #[test]
    fn slow_storage_is_kept_unless_it_is_much_slower_through_the_page_cache() {
        // 36 MiB in 300 ms are 0.13 GB/s.
        for (through, keep) in [(375, true), (900, false)] {
            let mut trial = Trial::new();
            tried(&mut trial, 300, through);
            assert_eq!(trial.choice().map(|c| c.keep), Some(keep), "{:?}", trial.choice());
        }
    }

    #[test]
    fn storage_that_is_fast_only_at_first_is_kept_after_all() {
        let mut trial = Trial::new();
        let n = tried(&mut trial, 5, 40);
        assert!(!trial.is_through());
        assert_eq!(send(&mut trial, n, 20), 20);
        // Slower than the page cache was.
        std::thread::sleep(Duration::from_millis(300));
        trial.back(&(n..n + 20).map(done).collect::<Vec<_>>());
        assert!(trial.is_through() && trial.stage == Stage::Over, "{:?}", trial.choice());
        assert_eq!(trial.take_past().len() as u64, SENT + 20);
    }

    #[test]
    fn a_read_is_never_held_where_nothing_is_awaited() {
        let mut trial = Trial::new();
        for n in 0..80 {
            // One at a time, as with a depth of one.
            assert!(!trial.holds(&read(n)), "{n}");
            trial.sent(Ticket(n), 0, n * EACH..(n + 1) * EACH);
            trial.back(&[done(n)]);
        }
        assert!(trial.choice().is_some());
        // Reads larger than what is tried.
        let mut trial = Trial::new();
        for n in 0..4 {
            let large = Read { len: 2 * AT_MOST, ..read(n) };
            assert!(!trial.holds(&large), "{n}");
            trial.sent(Ticket(n), 0, 0..2 * AT_MOST);
            trial.back(&[done(n)]);
        }
        assert!(trial.choice().is_some());
    }

    #[test]
    fn what_refuses_direct_reads_is_kept() {
        let mut trial = Trial::new();
        send(&mut trial, 0, 2);
        let cause = std::io::Error::from_raw_os_error(libc::EINVAL);
        trial.back(&[Outcome::Refused { read: read(1), cause }]);
        assert!(trial.is_through() && trial.stage == Stage::Over);
        assert!(trial.take_past().is_empty());
    }
}
