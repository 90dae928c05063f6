//! How the ranks of a load find out whether to exchange what several of them want: first both ways, then the quicker one.
//!
//! The trial has three steps. First each rank loads some bytes for itself, whose time does not count: threads and connections
//! start, and rented storage is faster at first than it goes on. Then the ranks load what is tried together, then each what is
//! tried alone. A rank that has its part of a step says how long it took, and the next step begins when all have said so. The
//! longest times count, and are the same on all ranks. So is what they decide.
//!
//! Ranks that read for themselves take more from the storage than ranks that exchange. While storage is faster than it goes on,
//! that costs nothing, and a trial may be over before it shows. So such ranks look again, [`LOOKS`]
//! times at most, until they have read for long enough: if it has become slower than exchange was, they exchange the rest. The
//! other way round there is nothing to look for: what slows exchange down slows down reading more of the same storage, too.

use crate::engine::{Engine, Nanos};
use crate::peers::{Peers, STEPS};
use crate::plan::planned::InVain;
use crate::plan::schedule::{Sections, TwoWays};
use crate::plan::shares::{BothWays, LOOKS};
use crate::stats::Unwanted;
use std::ops::Range;

/// When ranks have read for themselves for so long, they look no more. Limits of rented storage are kept over tenths of a second.
const LONG: Nanos = 500_000_000;
/// A look that was shorter than this counts only if the next one says the same: one rank may have been put aside by its machine.
const SURE: Nanos = 150_000_000;

const _: () = assert!(3 + LOOKS <= STEPS, "ranks tell each other how long each step took");

/// See the module's documentation.
pub(super) struct Choosing {
    sections: Sections,
    /// Bytes of each step of the trial, and of each look.
    nbytes: Vec<u64>,
    in_vain: InVain,
    /// The step, when it began, and how long it took this rank, if it is through.
    step: usize,
    began: Nanos,
    mine: Option<Nanos>,
    /// Seconds for a megabyte in each step of the trial, and where ranks last looked again.
    pace: [f64; 3],
    later: Option<f64>,
    /// Whether reading for themselves was slower than exchange in the look before.
    slower: bool,
    /// How long the ranks have read for themselves, with the time counted.
    alone: Nanos,
    /// How many stretches of the rest have their way, the extents that are left out of them, and what is read in vain.
    settled: usize,
    skipped: Vec<Range<usize>>,
    unwanted: Unwanted,
}

/// What was found.
pub(super) struct Settled {
    pub(super) exchanged: bool,
    /// Seconds for a megabyte in the trial, alone and together.
    pub(super) tried: [f64; 2],
    /// The first of the two where the ranks last looked again.
    pub(super) later: Option<f64>,
    /// The extents that are left out.
    pub(super) skipped: Vec<Range<usize>>,
    /// What is read in vain.
    pub(super) unwanted: Unwanted,
}

impl Choosing {
    pub(super) fn new(sections: &Sections, both: &BothWays, mut in_vain: InVain) -> Choosing {
        let nbytes = both.nbytes.into_iter().chain(both.looks.iter().map(|look| look.1)).collect();
        let unwanted = std::mem::take(&mut in_vain.tried);
        Choosing {
            sections: sections.clone(),
            nbytes,
            in_vain,
            step: 0,
            began: 0,
            mine: None,
            pace: [0.0; 3],
            later: None,
            slower: false,
            alone: 0,
            settled: 0,
            skipped: Vec::new(),
            unwanted,
        }
    }

    /// Takes the next step if it is time to. The choice, when it is made: the engine then goes on with it.
    pub(super) fn go_on<S>(&mut self, now: Nanos, engine: &mut Engine<S>, peers: &Peers) -> Option<Settled> {
        let mine = match self.mine {
            Some(mine) => mine,
            None if engine.is_at_gate() => {
                let mine = now - self.began;
                self.mine = Some(mine);
                peers.say_took(self.step as u8, mine);
                mine
            }
            None => return None,
        };
        let longest = peers.took(self.step as u8)?.max(mine);
        let pace = longest as f64 / 1e3 / self.nbytes[self.step].max(1) as f64;
        match self.pace.get_mut(self.step) {
            Some(tried) => *tried = pace,
            None => self.later = Some(pace),
        }
        if self.step >= 2 {
            self.alone += longest;
        }
        (self.step, self.began, self.mine) = (self.step + 1, now, None);
        let gate = match self.step {
            1 => self.sections.together,
            2 => self.sections.alone,
            _ => {
                let [_, together, alone] = self.pace;
                let last = self.step == self.nbytes.len() || self.alone >= LONG;
                let slower = together <= self.later.unwrap_or(alone);
                let sure = self.later.is_none() || last || longest >= SURE || self.slower;
                self.slower = slower && self.later.is_some();
                if last || (slower && sure) {
                    return Some(self.settle(slower, engine));
                }
                self.go_this_way(false, engine)
            }
        };
        engine.set_gate(gate);
        // There may be nothing in this step for this rank.
        self.go_on(now, engine, peers)
    }

    /// Chooses for the next stretch of the rest. One past its last extent.
    fn go_this_way<S>(&mut self, exchanged: bool, engine: &mut Engine<S>) -> usize {
        let TwoWays { exchanged: with, alone } = self.sections.rest[self.settled].clone();
        let [unwanted_with, unwanted_alone] = std::mem::take(&mut self.in_vain.rest[self.settled]);
        self.settled += 1;
        let end = alone.end;
        let (skip, unwanted) = if exchanged { (alone, unwanted_with) } else { (with, unwanted_alone) };
        self.unwanted = std::mem::take(&mut self.unwanted).and(unwanted);
        engine.skip(skip.clone());
        self.skipped.push(skip);
        end
    }

    /// Chooses for all that is left.
    fn settle<S>(&mut self, exchanged: bool, engine: &mut Engine<S>) -> Settled {
        while self.settled < self.sections.rest.len() {
            self.go_this_way(exchanged, engine);
        }
        engine.open_gate();
        let [_, together, alone] = self.pace;
        Settled {
            exchanged,
            tried: [alone, together],
            later: self.later,
            skipped: std::mem::take(&mut self.skipped),
            unwanted: std::mem::take(&mut self.unwanted),
        }
    }
}
