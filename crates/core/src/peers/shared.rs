//! State that the engine thread of a rank and the thread of its connections share.

use crate::device::Copied;
use crate::error::Error;
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::source::{Destination, Progress, Read};
use crate::staging::Borrowed;
use crate::sync::{Condvar, Mutex};
use crate::wake::Wake;
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

/// The state that both threads share.
pub(super) struct PeersShared {
    pub(super) state: Mutex<PeersState>,
    pub(super) changed: Condvar,
    /// Wakes the thread of the connections; the engine thread, for reads and for copies.
    pub(super) orders: Wake,
    pub(super) reads: Wake,
    pub(super) copies: Wake,
}

/// Most steps of a load whose times ranks tell each other.
pub(crate) const STEPS: usize = 8;

#[derive(Default)]
pub(super) struct PeersState {
    /// Orders: reads (with the number of the parcel), their places, parcels to be sent.
    pub(super) reads: Vec<(u32, Read)>,
    pub(super) landed: Vec<Placed>,
    pub(super) sends: Vec<Outbound>,
    pub(super) cancelled: bool,
    /// Parcels whose copies out of another rank's slab have ended; false: the device could not register that slab.
    pub(super) returned: Vec<(u32, bool)>,
    /// How long this rank took for steps, to be said to the others: (step, nanoseconds).
    pub(super) took: Vec<(u8, u64)>,
    /// The load of this rank is over.
    pub(super) over: Option<Over>,
    /// News.
    pub(super) events: Vec<Progress>,
    pub(super) copied: Vec<Copied>,
    /// The slabs of reads that have ended in one of another rank.
    pub(super) borrowed: HashMap<Ticket, Borrowed>,
    pub(super) fallbacks: Vec<Fallback>,
    pub(super) traffic: PeerTraffic,
    /// For each step: how many others have said how long it took them, and the longest time.
    pub(super) others_took: [(usize, u64); STEPS],
    /// The error that ends the load.
    pub(super) failure: Option<Error>,
    /// Every rank has everything, and knows it.
    pub(super) parted: bool,
    /// The thread has ended.
    pub(super) ended: bool,
}

/// Bytes that other ranks get of what this one reads: those that two of them want count twice.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PeerTraffic {
    /// Bytes that went through sockets.
    pub(crate) sent: u64,
    /// Bytes that they took out of this rank's slabs.
    pub(crate) lent: u64,
}

/// How the load of this rank ended.
#[derive(Clone)]
pub(super) enum Over {
    Complete,
    /// The rank whose failure it is, and what happened.
    Failed(u32, String),
}

/// The place of a read that has arrived.
pub(super) struct Placed {
    pub(super) ticket: Ticket,
    pub(super) into: Destination,
    pub(super) keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the address is used only while `keep` is held.
unsafe impl Send for Placed {}

/// A parcel that this rank has read, in memory.
pub(super) struct Outbound {
    pub(super) ticket: Ticket,
    pub(super) parcel: u32,
    pub(super) to: Vec<u32>,
    /// Where byte `offset` of the file is.
    pub(super) at: *mut u8,
    pub(super) offset: u64,
    pub(super) keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the address is used only while `keep` is held.
unsafe impl Send for Outbound {}
