//! How the ranks of a load find out whether to exchange what several of them want: first both ways, then the quicker one.
//!
//! There are three steps. First each rank loads some bytes for itself, whose time does not count: threads and connections start,
//! and rented storage is faster at first than it goes on. Then the ranks load what is tried together, then each what is tried
//! alone. A rank that has its part of a step says how long it took, and the next step begins when all have said so. The longest
//! times count, and are the same on all ranks. So is what they decide.

use crate::engine::{Engine, Nanos};
use crate::peers::Peers;
use crate::plan::schedule::Sections;
use crate::stats::Unwanted;
use std::ops::Range;

/// See the module's documentation.
pub(super) struct Choosing {
    sections: Sections,
    /// Bytes of each step.
    nbytes: [u64; 3],
    /// What is read in vain if nothing is exchanged.
    pub(super) unexchanged: Unwanted,
    /// The step, when it began, and how long it took this rank, if it is through.
    step: u8,
    began: Nanos,
    mine: Option<Nanos>,
    /// Seconds for a megabyte in each step.
    pace: [f64; 3],
}

/// What was found.
pub(super) struct Settled {
    /// Seconds for a megabyte, alone and together.
    pub(super) pace: [f64; 2],
    /// The extents that are left out.
    pub(super) skip: Range<usize>,
}

impl Choosing {
    pub(super) fn new(sections: Sections, nbytes: [u64; 3], unexchanged: Unwanted) -> Choosing {
        Choosing { sections, nbytes, unexchanged, step: 0, began: 0, mine: None, pace: [0.0; 3] }
    }

    /// Takes the next step if it is time to. The choice, when it is made: the engine then goes on with it.
    pub(super) fn go_on<S>(&mut self, now: Nanos, engine: &mut Engine<S>, peers: &Peers) -> Option<Settled> {
        let mine = match self.mine {
            Some(mine) => mine,
            None if engine.is_at_gate() => {
                let mine = now - self.began;
                self.mine = Some(mine);
                peers.say_took(self.step, mine);
                mine
            }
            None => return None,
        };
        let longest = peers.took(self.step)?.max(mine);
        let step = usize::from(self.step);
        self.pace[step] = longest as f64 / 1e3 / self.nbytes[step].max(1) as f64;
        let Sections { together: first_gate, alone: second_gate, exchanged, .. } = self.sections;
        if step < 2 {
            (self.step, self.began, self.mine) = (self.step + 1, now, None);
            engine.set_gate(if step == 0 { first_gate } else { second_gate });
            // There may be nothing in this step for this rank.
            return self.go_on(now, engine, peers);
        }
        let all = engine.extents();
        let [_, together, alone] = self.pace;
        let skip = if together <= alone { exchanged..all } else { second_gate..exchanged };
        engine.skip(skip.clone());
        engine.open_gate();
        Some(Settled { pace: [alone, together], skip })
    }
}
