//! The words between the engine and its driver, and the stages of an extent.

use super::Nanos;
use crate::error::Error;
use crate::extent::Ticket;

/// Where slabs come from: the process-wide ring, or the simulator's.
pub(crate) trait Slabs {
    /// A slab, or a lease on one.
    type Slab;
    /// A free slab, if this load may have one now; an error where memory for it cannot be had.
    fn acquire(&mut self) -> Result<Option<Self::Slab>, Error>;
}

/// Something that happened. Tickets are the numbers of extents.
#[derive(Debug)]
pub(crate) enum Event {
    /// Block memory is there: extents for this block may start.
    Granted(u32),
    /// The consumer took this want.
    Taken(u32),
    /// The owner wants the load to end early.
    Cancelled,
    /// The source had no room for the read that the last action started. Nothing of it was sent.
    NoRoom(Ticket),
    /// The first byte of a request that was sent without a slab is there.
    Arrived(Ticket),
    /// Some bytes of a read that has its place are there, and it goes on.
    Received(Ticket),
    /// A read ended: `Ok(bytes)` that arrived, or why not. And how many bytes from the first on were written to their place,
    /// or may have been.
    ReadDone(Ticket, Result<u64, Error>, u64),
    /// A copy ended. If it failed: the blocks that it has written to, or may have.
    CopyDone(Ticket, Result<(), Error>, Vec<u32>),
    /// Something else went wrong. It does not matter if everything has arrived.
    Failed(Error),
    /// Arrived bytes are not what they should be: the load fails even if everything has arrived.
    Revoked(Error),
}

/// The next step for the driver.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start the read of this extent, whose number is its ticket. If it was held back before
    /// ([`Event::NoRoom`]), give it to the source again.
    Read { extent: u32 },
    /// The request for this extent has arrived and holds a slab now: tell the source where it lands.
    Land { extent: u32 },
    /// Start the copy of this extent, out of the slab that it holds.
    Copy { extent: u32 },
    /// The load has failed, and the source never took this read: let go of it.
    Withdraw { extent: u32 },
    /// The load has failed: the source gives up what it has not started.
    Cancel,
    /// Reads or copies in flight hang. Their slabs are given up
    /// ([`Engine::take_quarantined`](super::Engine::take_quarantined)). Their tickets, should they come back, are ignored.
    Abandon,
}

/// A want that is ready.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// The want.
    pub(crate) want: u32,
    /// The block that is complete with it: nothing is written there any more.
    pub(crate) completes: Option<u32>,
}

/// The limits of a load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Most reads in flight that take their slab at request, or need none.
    pub(crate) depth: usize,
    /// Most requests in flight to stores that take slabs at arrival.
    pub(crate) requests: usize,
    /// Most wanted bytes started and not yet taken (see [`Window`](super::window::Window)); `None` for a load that hands everything out at its
    /// end.
    pub(crate) window: Option<u64>,
    /// Most slabs of parcels that this rank reads for others: the rest is for what others send, so that ranks which wait for
    /// each other go on. `None`: others send nothing that needs a slab.
    pub(crate) sent: Option<usize>,
    /// The load fails if nothing moves for so long.
    pub(crate) stall: Nanos,
}

/// The thing that an idle engine waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// Reads in flight.
    Source,
    /// Copies in flight.
    Device,
    /// A free slab, while nothing of this load moves.
    Slabs,
    /// The consumer, to take what is ready.
    Consumer,
    /// Block memory, to be granted by the caller.
    Allocation,
    /// Nothing: the load has ended.
    Nothing,
}

impl Wait {
    /// As reports and traces call the stage that is waited for.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Wait::Source => Some("source"),
            Wait::Device => Some("device"),
            Wait::Slabs => Some("staging"),
            Wait::Consumer => Some("consumer"),
            Wait::Allocation => Some("allocation"),
            Wait::Nothing => None,
        }
    }

    /// Whether it ends by something that can hang. Nobody owes the load an answer in the other waits.
    pub(super) fn may_stall(self) -> bool {
        matches!(self, Wait::Source | Wait::Device | Wait::Slabs)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    /// Sent without a slab; nothing of it has arrived.
    Requested,
    /// Its first byte has arrived. It waits for a slab.
    Answered,
    Reading,
    Landed,
    Copying,
    Arrived,
    /// Ended without arriving, after a failure.
    Dropped,
}

impl Stage {
    /// A source or a device has its ticket.
    pub(super) fn is_in_flight(self) -> bool {
        self.is_reading() || self == Stage::Copying
    }

    /// The source has its ticket.
    pub(super) fn is_reading(self) -> bool {
        matches!(self, Stage::Requested | Stage::Answered | Stage::Reading)
    }
}
