//! Whether cold bytes that are read into private memory are to stay in the page cache, decided by the storage's own pace.
//!
//! To read through the page cache costs the processor two to four times as much as to read past it. Where the storage is
//! slow that is hidden, and the next start is spared the storage. Where it is fast the load would wait for the processor,
//! and the next start has little to gain. So the first reads of a load go past the page cache, are timed, and decide for the
//! rest; if that is kept, what they have brought is read into the page cache at the end.

use super::{Outcome, Read, Ticket};
use crate::machine;
use crate::options::{GB, MIB};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// Bytes after which it is decided: a few milliseconds, and as many reads as keep a disk busy.
const ENOUGH: u64 = 32 * MIB;
/// Bytes after which going past the page cache is thought over, by those that came since: storage that is rented gives the
/// first ones faster than the rest.
const ENOUGH_AT_LAST: u64 = 96 * MIB;
/// Bytes that go out while it is not decided: some are under way when it is.
const AT_MOST: u64 = ENOUGH + ENOUGH / 2;
/// Loads with fewer cold bytes than this do not try: they keep.
pub(crate) const WORTH_A_TRIAL: u64 = 2 * ENOUGH;
/// Bytes per second that a core takes through the page cache with ease. Measured on a core of a Xeon in a virtual machine:
/// 0.3 to 0.9 s of processor time per GB, read and copied, so that this leaves it more than half of its time.
const PER_CORE: f64 = 0.5 * GB;

/// What becomes of the page cache, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Whether cold bytes stay in it.
    pub keep: bool,
    /// For the report.
    pub reason: String,
}

#[derive(Debug)]
pub(super) struct Trial {
    cores: usize,
    /// When the first read went out, or the last decision was taken, and the bytes that had come back by then.
    since: Option<(Instant, u64)>,
    /// Bytes that were sent out and that came back.
    sent: u64,
    back: u64,
    /// What is under way, and what went past the page cache: file and range.
    out: HashMap<Ticket, (u32, Range<u64>)>,
    past: Vec<(u32, Range<u64>)>,
    choice: Option<Choice>,
    /// The choice stands.
    over: bool,
}

impl Trial {
    pub(super) fn new() -> Self {
        Trial {
            cores: machine::cores(),
            since: None,
            sent: 0,
            back: 0,
            out: HashMap::new(),
            past: Vec::new(),
            choice: None,
            over: false,
        }
    }

    pub(super) fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    pub(super) fn keeps(&self) -> bool {
        self.choice.as_ref().is_some_and(|choice| choice.keep)
    }

    /// Whether `read` is to wait until it is decided which way it goes.
    pub(super) fn holds(&mut self, read: &Read) -> bool {
        if self.choice.is_some() || self.sent == 0 || self.sent + read.len <= AT_MOST {
            return false;
        }
        if self.out.is_empty() {
            // Nothing more will come that could tell.
            self.decide();
        }
        self.choice.is_none()
    }

    /// A read went out, past the page cache.
    pub(super) fn sent(&mut self, ticket: Ticket, file: u32, range: Range<u64>) {
        self.since.get_or_insert_with(|| (Instant::now(), 0));
        self.sent += range.end - range.start;
        if !self.over {
            self.out.insert(ticket, (file, range));
        }
    }

    /// These came back: decides once that is enough.
    pub(super) fn back(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let Some((file, range)) = self.out.remove(&outcome.ticket()) else { continue };
            match outcome {
                Outcome::Done(done) if done.result.is_ok() => {
                    self.back += range.end - range.start;
                    self.past.push((file, range));
                }
                // The load fails with it.
                Outcome::Done(_) => {}
                Outcome::Refused { .. } => {
                    self.choice = Some(Choice { keep: true, reason: "O_DIRECT was refused".into() });
                    self.over = true;
                }
            }
        }
        let enough = if self.choice.is_none() { ENOUGH } else { ENOUGH_AT_LAST };
        if !self.over && self.back >= enough {
            self.decide();
        }
    }

    fn decide(&mut self) {
        let now = Instant::now();
        let (since, back) = self.since.replace((now, self.back)).unwrap_or((now, 0));
        let choice = chosen((self.back - back) as f64 / (now - since).as_secs_f64().max(1e-9), self.cores);
        self.over = choice.keep || self.choice.is_some();
        self.choice = Some(choice);
    }

    /// What went past the page cache although it is kept.
    pub(super) fn take_past(&mut self) -> Vec<(u32, Range<u64>)> {
        if self.keeps() {
            std::mem::take(&mut self.past)
        } else {
            Vec::new()
        }
    }
}

fn chosen(rate: f64, cores: usize) -> Choice {
    let most = cores as f64 * PER_CORE;
    let keep = rate <= most;
    let than = if keep { "no more than" } else { "more than" };
    let reason = format!(
        "the storage gives {:.1} GB/s, {than} the {:.1} GB/s that {cores} cores take through the page cache with ease",
        rate / GB,
        most / GB
    );
    Choice { keep, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Route;
    use crate::source::{Destination, Done};
    use std::sync::Arc;
    use std::time::Duration;

    const EACH: u64 = 4 * MIB;

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

    fn with_cores(cores: usize) -> Trial {
        Trial { cores, ..Trial::new() }
    }

    #[test]
    fn fast_storage_is_read_past_the_page_cache_and_goes_on_so() {
        let mut trial = with_cores(1);
        assert_eq!(send(&mut trial, 0, 100), AT_MOST / EACH);
        trial.back(&[done(3), done(0), done(1), done(2)]);
        assert_eq!(trial.choice(), None);
        trial.back(&[done(4), done(5), done(6), done(7)]);
        // 32 MiB within microseconds.
        assert!(trial.choice().is_some_and(|c| !c.keep && c.reason.contains("more than the 0.5 GB/s that 1 cores")));
        assert_eq!(send(&mut trial, 12, 100), 100);
        trial.back(&(8..100).map(done).collect::<Vec<_>>());
        assert!(trial.over && !trial.keeps());
        assert!(trial.take_past().is_empty());
    }

    #[test]
    fn slow_storage_is_kept_and_what_went_past_is_told_once() {
        let mut trial = with_cores(2);
        assert_eq!(send(&mut trial, 0, 100), AT_MOST / EACH);
        // 8 x 4 MiB in 50 ms: 0.67 GB/s.
        std::thread::sleep(Duration::from_millis(50));
        trial.back(&(0..8).map(done).collect::<Vec<_>>());
        assert!(trial.keeps() && trial.over, "{:?}", trial.choice());
        assert_eq!(trial.take_past(), (0..8).map(|n| (0, n * EACH..(n + 1) * EACH)).collect::<Vec<_>>());
        // Those that were under way come later.
        trial.back(&[done(8), done(11), done(9), done(10)]);
        assert_eq!(trial.take_past().len(), 4);
        assert!(trial.take_past().is_empty());
    }

    #[test]
    fn storage_that_is_fast_only_at_first_is_kept_after_all() {
        let mut trial = with_cores(2);
        send(&mut trial, 0, 100);
        trial.back(&(0..8).map(done).collect::<Vec<_>>());
        assert!(trial.choice().is_some() && !trial.keeps());
        send(&mut trial, 12, 100);
        // 64 MiB in 100 ms: 0.67 GB/s.
        std::thread::sleep(Duration::from_millis(100));
        trial.back(&(8..24).map(done).collect::<Vec<_>>());
        assert!(trial.keeps() && trial.over, "{:?}", trial.choice());
        assert_eq!(trial.take_past().len(), 24);
    }

    #[test]
    fn a_read_is_never_held_where_nothing_is_awaited() {
        let mut trial = with_cores(2);
        for n in 0..40 {
            // One at a time, as with a depth of one.
            assert!(!trial.holds(&read(n)), "{n}");
            trial.sent(Ticket(n), 0, n * EACH..(n + 1) * EACH);
            trial.back(&[done(n)]);
        }
        assert!(trial.choice().is_some());
    }

    #[test]
    fn what_refuses_direct_reads_is_kept() {
        let mut trial = with_cores(2);
        send(&mut trial, 0, 2);
        let cause = std::io::Error::from_raw_os_error(libc::EINVAL);
        trial.back(&[Outcome::Refused { read: read(1), cause }]);
        assert!(trial.keeps() && trial.over);
        assert!(trial.take_past().is_empty());
    }
}
