//! How the ranks of a load find out whether to exchange what several of them want: first both ways, then the quicker one.
//!
//! What is tried alone is loaded by each rank for itself, and a rank that has its part says how long it took. When all have said
//! so, they load what is tried together, and say how long that took. The longest times count, and are the same on all ranks. So
//! is what they decide.

use crate::engine::{Engine, Nanos};
use crate::peers::Peers;
use crate::plan::schedule::Sections;
use crate::stats::Unwanted;
use std::ops::Range;

/// See the module's documentation.
pub(super) struct Choosing {
    sections: Sections,
    /// Bytes of what is tried alone, and of what is tried together.
    nbytes: [u64; 2],
    /// What is read in vain if nothing is exchanged.
    pub(super) unexchanged: Unwanted,
    /// The step, when it began, and how long it took this rank, if it is through.
    step: u8,
    began: Nanos,
    mine: Option<Nanos>,
    pace: [f64; 2],
}

/// What was found.
pub(super) struct Settled {
    /// Seconds for a megabyte, alone and together.
    pub(super) pace: [f64; 2],
    /// The extents that are left out.
    pub(super) skip: Range<usize>,
}

impl Choosing {
    pub(super) fn new(sections: Sections, nbytes: [u64; 2], unexchanged: Unwanted) -> Choosing {
        Choosing { sections, nbytes, unexchanged, step: 0, began: 0, mine: None, pace: [0.0; 2] }
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
        let Sections { together, exchanged, .. } = self.sections;
        if step == 0 {
            (self.step, self.began, self.mine) = (1, now, None);
            engine.set_gate(together);
            // There may be nothing in this step for this rank.
            return self.go_on(now, engine, peers);
        }
        let all = engine.extents();
        let skip = if self.pace[1] <= self.pace[0] { exchanged..all } else { together..exchanged };
        engine.skip(skip.clone());
        engine.open_gate();
        Some(Settled { pace: self.pace, skip })
    }
}
