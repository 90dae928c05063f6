//! The engine with seeded mistakes, for the simulators to catch. `simulator/mutants.txt` lists them.
#![allow(dead_code, unused_parens, clippy::all)]

use super::*;

mutants::seed!(Mutant, "src/engine/mod.rs", "src/engine/simulator/mutants.txt");

impl Mutant {
    /// Mistakes that show only if ranks load together: `load/simulator` catches them, `engine/simulator` the others.
    pub(crate) const OF_RANKS: &[Mutant] = &[
        Mutant::IgnoreSentBound,
        Mutant::ForgetSentSlab,
        Mutant::SentArrivalsBlockOthers,
        Mutant::CountWholeParcels,
        Mutant::PeersExcuseOwnStall,
        Mutant::PeersDoNotMove,
        Mutant::DropBroughtSlab,
        Mutant::BroughtIsNoRead,
        Mutant::LeakBroughtAfterFailure,
        Mutant::BroughtStaysInFlight,
        Mutant::KeepBroughtSlab,
        Mutant::BroughtCountsAsSent,
    ];
}
