//! The trial of `exchange="auto"`: ranks find out which of two ways is quicker for the bytes that several of them want. Either
//! one rank reads a byte and sends it to the others (*exchanged*), or each rank reads it for itself (*alone*).
//!
//! The load goes in steps, and each step loads the parcels that follow ([`Shares::with_trial`] divides them):
//!
//! | step | bytes, with [`TRIED`] | way | what its time says |
//! |---|---|---|---|
//! | 0 | 3 to 8 MiB | alone | nothing: threads and connections start, and rented storage is faster at first than it goes on |
//! | 1 | 42 MiB | exchanged | the pace of exchange |
//! | 2 | 8 to 16 MiB | alone | the pace of reading alone. If exchange was as quick, all the rest is exchanged |
//! | 3, 4, 5 | 64, 128, 256 MiB at most | alone | the same again: a *look* |
//! | the last | the rest | the way that was quicker | |
//!
//! **Why looks.** Ranks that read alone take more from the storage than ranks that exchange. While storage is faster than it
//! goes on, that costs nothing, and steps 0 to 2 may be over before it shows. So such ranks look again until they have read for
//! long enough ([`LONG`]): if it has become slower than exchange was, they exchange all that is left. Ranks that exchange
//! have nothing to look for: what slows exchange down slows down reading more of the same storage, too.
//!
//! **How.** The schedule of a rank has two sections for each step, one for each way ([`sections`]). [`ExchangeTrial`] has the
//! engine leave one of them out, and puts a gate behind the step. A rank that has arrived at the gate says how long that took.
//! When all ranks have said so, the longest time counts. It is the same on all ranks, so they decide alike ([`decided`]).

use crate::engine::{Engine, Nanos};
use crate::error::Result;
use crate::format::Checkpoint;
use crate::options::{Exchanging, MIB, PAGE};
use crate::peers::{Peers, STEPS};
use crate::plan::lists::ListOfWants;
use crate::plan::schedule::{Alone, Schedule, Section};
use crate::plan::shares::{Cell, RankWants, Shares};
use crate::stats::{ExchangeReport, Report, Unwanted};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the steps before the first look.
pub const TRIED: u64 = 64 * MIB;
/// The way of the first three steps: `true` is exchanged, `false` is alone. Later steps may go either way.
const WAYS: [bool; 3] = [false, true, false];
const TOGETHER: usize = 1;
const ALONE: usize = 2;
/// Most looks.
const LOOKS: usize = 3;
/// When ranks have read alone for so long, they look no more. Limits of rented storage are kept over tenths of a second.
const LONG: Nanos = 500_000_000;
/// A look that was shorter than this counts only if the next one says the same: one rank may have been put aside by its machine.
const SURE: Nanos = 150_000_000;

const _: () = assert!(WAYS.len() + LOOKS <= STEPS, "ranks tell each other how long each step took");

impl Shares {
    /// Shares of ranks that find out whether to exchange, with `tried` bytes before the first look. Where several ranks want no
    /// more than twice that, there is nothing to find out, and these are the shares of [`new`](Self::new).
    ///
    /// # Errors
    /// The same as for [`new`](Self::new).
    pub fn with_trial<L: ListOfWants>(checkpoint: &Checkpoint, wants: RankWants<'_, L>, tried: u64) -> Result<Shares> {
        Self::in_steps(checkpoint, wants, |cells| divided(cells, tried))
    }
}

/// The cells of each step.
fn divided(cells: Vec<Cell>, tried: u64) -> Vec<Vec<Cell>> {
    if tried == 0 || nbytes(&cells) <= 2 * tried {
        return vec![cells];
    }
    // If each rank reads alone, a byte is read once per rank that wants it. So the steps alone get fewer bytes, and each way
    // loads the storage about equally. The weight has a limit: a step of few bytes is too short to be timed.
    let weight = |cell: &Cell| cell.ranks.min(6);
    let (first, rest) = split(cells, tried / 4, weight, tried / 8);
    // Step 1 is long enough that storage has reached its lasting speed before step 2 begins.
    let (together, rest) = split(rest, tried / 32 * 21, |_| 1, u64::MAX);
    let (alone, mut rest) = split(rest, tried / 4 * 3, weight, tried - nbytes(&first) - nbytes(&together));
    let mut steps = vec![first, together, alone];
    // Each look is twice as long as the one before. Enough bytes remain after the last look to make a change worth it.
    for look in 0..LOOKS {
        let (next, others) = split(rest.clone(), tried << look, weight, tried << look);
        if next.is_empty() || nbytes(&others) < 2 * nbytes(&next) {
            break;
        }
        steps.push(next);
        rest = others;
    }
    steps.push(rest);
    steps
}

fn nbytes(cells: &[Cell]) -> u64 {
    cells.iter().map(|cell| cell.range.end - cell.range.start).sum()
}

/// Divides cells at a page: the first ones are together `bytes`, each byte counted as often as `weight` says, or `most`
/// bytes, whichever is less.
fn split(cells: Vec<Cell>, bytes: u64, weight: impl Fn(&Cell) -> u64, most: u64) -> (Vec<Cell>, Vec<Cell>) {
    let (mut first, mut rest, mut left, mut room) = (Vec::new(), Vec::new(), bytes, most);
    for cell in cells {
        let (len, each) = (cell.range.end - cell.range.start, weight(&cell));
        let taken = (left / each).min(room);
        if rest.is_empty() && len <= taken {
            left -= len * each;
            room -= len;
            first.push(cell);
            continue;
        }
        let at = cell.range.start + if rest.is_empty() { taken } else { 0 };
        let at = (at / PAGE * PAGE).max(cell.range.start);
        if at > cell.range.start {
            first.push(Cell { range: cell.range.start..at, ..cell });
        }
        left = 0;
        rest.push(Cell { range: at..cell.range.end, ..cell });
    }
    (first, rest)
}

/// The numbers of the parcels of the timed steps, and of the last one. `None` without a trial.
fn steps(shares: &Shares) -> Option<(&[Range<u32>], &Range<u32>)> {
    let (rest, timed) = shares.steps().split_last()?;
    (!timed.is_empty()).then_some((timed, rest))
}

/// The sections of the schedule of each rank: two for each step, exchanged and alone. One of them has no bytes where only one
/// way is tried. Without a trial there is one section.
pub(super) fn sections(shares: &Shares) -> Vec<Section> {
    let all = shares.parcels().len() as u32;
    let Some((timed, rest)) = steps(shares) else { return vec![Section::whole(all)] };
    let mut sections = Vec::new();
    for (step, parcels) in timed.iter().enumerate() {
        let of = |exchanged: bool| match WAYS.get(step) {
            Some(way) if *way != exchanged => 0..0,
            _ => parcels.clone(),
        };
        sections.push(Section { alone: Alone::Inside(0..0), exchanged: of(true) });
        sections.push(Section { alone: Alone::Inside(of(false)), exchanged: 0..0 });
    }
    // The last step also loads the bytes that this rank alone wants.
    sections.push(Section { alone: Alone::Outside(0..all), exchanged: rest.clone() });
    sections.push(Section { alone: Alone::Outside(0..rest.start), exchanged: 0..0 });
    sections
}

/// The number of a section.
fn section(step: usize, exchanged: bool) -> usize {
    2 * step + usize::from(!exchanged)
}

/// The trial of one rank while its load runs.
pub(super) struct ExchangeTrial {
    schedule: Arc<Schedule>,
    /// Bytes of each step except the last.
    nbytes: Vec<u64>,
    /// The unwanted bytes that each section reads.
    unwanted: Vec<Unwanted>,
    /// The way of each step that has begun: `true` is exchanged.
    ways: Vec<bool>,
    /// For each step that is over, the longest time of a rank.
    times: Vec<Nanos>,
    /// When the step under way began, and how long it took this rank, if it is through.
    began: Nanos,
    mine: Option<Nanos>,
    /// The decision: `true` exchanges the remaining bytes. `None`: not yet.
    decided: Option<bool>,
}

impl ExchangeTrial {
    /// Begins the trial, at time 0. `None` if these shares have none.
    pub(super) fn begin<S>(
        shares: &Shares,
        schedule: &Arc<Schedule>,
        unwanted: Vec<Unwanted>,
        engine: &mut Engine<S>,
    ) -> Option<ExchangeTrial> {
        let (timed, _) = steps(shares)?;
        let parcels = |step: &Range<u32>| &shares.parcels()[step.start as usize..step.end as usize];
        let nbytes = timed.iter().map(|step| parcels(step).iter().map(|parcel| parcel.end - parcel.start).sum());
        let mut trial = ExchangeTrial {
            schedule: schedule.clone(),
            nbytes: nbytes.collect(),
            unwanted,
            ways: Vec::new(),
            times: Vec::new(),
            began: 0,
            mine: None,
            decided: None,
        };
        trial.enter(WAYS[0], engine);
        Some(trial)
    }

    /// Goes on to the next step when all ranks are through with this one. After the decision it does nothing.
    pub(super) fn go_on<S>(&mut self, now: Nanos, engine: &mut Engine<S>, peers: &Peers) {
        // A step may have nothing for this rank: then it is through at once.
        while self.decided.is_none() {
            let Some(longest) = self.longest(now, engine, peers) else { return };
            self.times.push(longest);
            (self.began, self.mine) = (now, None);
            self.decided = decided(&self.times, &self.nbytes);
            let Some(exchanged) = self.decided else {
                // A look is read alone.
                self.enter(*WAYS.get(self.times.len()).unwrap_or(&false), engine);
                continue;
            };
            while self.ways.len() <= self.nbytes.len() {
                self.enter(exchanged, engine);
            }
            engine.open_gate();
        }
    }

    /// The longest time that this step took a rank, when all are through with it.
    fn longest<S>(&mut self, now: Nanos, engine: &Engine<S>, peers: &Peers) -> Option<Nanos> {
        let step = self.times.len() as u8;
        if self.mine.is_none() && engine.is_at_gate() {
            self.mine = Some(now - self.began);
            peers.say_took(step, now - self.began);
        }
        Some(self.mine?.max(peers.took(step)?))
    }

    /// Begins the next step, in this way.
    fn enter<S>(&mut self, exchanged: bool, engine: &mut Engine<S>) {
        let step = self.ways.len();
        engine.skip(self.schedule.sections[section(step, !exchanged)].clone());
        engine.set_gate(self.schedule.sections[section(step, false)].end);
        self.ways.push(exchanged);
    }

    /// Writes the result into the report. Before a decision, the report has the unwanted bytes of a load that exchanges all
    /// it can.
    pub(super) fn tell(&self, report: &mut Report) {
        let ways = if self.decided.is_some() { &self.ways[..] } else { &WAYS[..] };
        let read = (0..=self.nbytes.len()).map(|step| section(step, *ways.get(step).unwrap_or(&true)));
        report.unwanted = read.map(|number| self.unwanted[number].clone()).fold(Unwanted::default(), Unwanted::and);
        let exchange = report.exchange.get_or_insert_default();
        (exchange.exchanged, exchange.reason) = (false, "the load ended before both ways were tried");
        if let Some(exchanged) = self.decided {
            let pace = |step| pace(step, &self.times, &self.nbytes);
            exchange.exchanged = exchanged;
            exchange.tried = Some([pace(ALONE), pace(TOGETHER)]);
            exchange.later = (self.times.len() > WAYS.len()).then(|| pace(self.times.len() - 1));
        }
    }
}

/// The decision after steps of these times: `true` exchanges the remaining bytes. `None`: time another step first.
fn decided(times: &[Nanos], nbytes: &[u64]) -> Option<bool> {
    let last = times.len().checked_sub(1).filter(|last| *last >= ALONE)?;
    let is_slower = |step| pace(TOGETHER, times, nbytes) <= pace(step, times, nbytes);
    let is_look = |step| step > ALONE;
    let over = times.len() == nbytes.len() || times[ALONE..].iter().sum::<Nanos>() >= LONG;
    let sure = !is_look(last) || times[last] >= SURE || (is_look(last - 1) && is_slower(last - 1));
    (over || (is_slower(last) && sure)).then(|| is_slower(last))
}

/// Seconds for a megabyte (1e6 bytes) of a step.
fn pace(step: usize, times: &[Nanos], nbytes: &[u64]) -> f64 {
    times[step] as f64 / 1e3 / nbytes[step].max(1) as f64
}

/// The reason for which ranks exchange shared bytes without a trial.
pub(super) fn untried(asked: Exchanging) -> &'static str {
    match asked {
        Exchanging::Auto => "several ranks want too few bytes to try both ways",
        Exchanging::On | Exchanging::Off => "asked for",
    }
}

impl ExchangeReport {
    /// The reason for which ranks exchange shared bytes, or do not.
    pub fn why(&self) -> String {
        let Some([alone, together]) = self.tried else { return self.reason.to_owned() };
        let rate = |pace: f64| 1.0 / pace.max(1e-9);
        let later = self.later.map_or_else(String::new, |pace| format!(" (later {:.0})", rate(pace)));
        format!(
            "tried: {:.0} MB/s{later} where each rank reads what it wants, {:.0} MB/s where one reads it for all",
            rate(alone),
            rate(together)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds of the steps of a trial with three looks; each step has 1 MB.
    fn after(times: &[u64]) -> Option<bool> {
        let times: Vec<Nanos> = times.iter().map(|ms| ms * 1_000_000).collect();
        decided(&times, &[1_000_000; 6])
    }

    #[test]
    fn the_longest_times_of_all_ranks_decide() {
        for (times, exchanged, why) in [
            (&[][..], None, "nothing is timed"),
            (&[900, 100], None, "one way is timed"),
            (&[1, 100, 100], Some(true), "exchange was as quick"),
            (&[1, 100, 99], None, "alone was quicker: look again"),
            (&[1, 1000, 500], Some(false), "alone was quicker for long enough"),
            (&[1, 200, 100, 200], Some(true), "a long look: alone has become as slow"),
            (&[1, 100, 90, 149], None, "a short look: perhaps one rank was put aside"),
            (&[1, 100, 90, 120, 99], None, "it was"),
            (&[1, 100, 90, 120, 120], Some(true), "the next look says the same"),
            (&[1, 100, 90, 120, 99, 120], Some(true), "the last look, however short"),
            (&[1, 100, 90, 99, 99, 99], Some(false), "the last look"),
            (&[1, 300, 200, 299], None, "499 ms"),
            (&[1, 300, 200, 300], Some(true), "500 ms: this look counts"),
            (&[1, 400, 300, 200], Some(false), "500 ms: no more looks"),
        ] {
            assert_eq!(after(times), exchanged, "{times:?}: {why}");
        }
    }
}
