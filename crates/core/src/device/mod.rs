//! Devices: where bytes end.
//!
//! Like a source, a device is a submit/poll queue with tickets, and never blocks. One submission copies the pieces of
//! one slab to their blocks. When its ticket comes back, the bytes are there for every reader (on a GPU: the host has
//! seen the event). Only then may the slab be rewritten.

pub mod api;
mod boxes;
pub mod cast;
pub mod cpu;
pub(crate) mod fetch;
pub mod gpu;
mod join;
pub mod strided;

use crate::error::{Error, Result};
pub use crate::extent::Fence;
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::staging::Share;
use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;
use strided::Strided;

/// One copy, with addresses resolved.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    /// First source byte, in the slab.
    pub from: *mut u8,
    /// First destination byte: a host address (CPU) or a device pointer.
    pub to: u64,
    /// Bytes of each row.
    pub len: u64,
    /// Rows, at least 1.
    pub rows: u64,
    /// Bytes from row to row in the slab.
    pub from_stride: u64,
    /// Bytes from row to row at the destination.
    pub to_stride: u64,
    /// Number of the destination block. Neighbours are joined into one transfer only within a block, because two blocks
    /// that happen to touch may be two allocations.
    pub block: u32,
    /// Bytes right after the last destination byte that the device may overwrite with any value. If this copy ends a
    /// tensor in a block that this crate allocated, these are the bytes up to the next possible tensor start; otherwise
    /// 0.
    pub pad: u32,
}

/// The copies out of one slab.
pub struct Batch {
    /// Comes back with the outcome.
    pub ticket: Ticket,
    /// First byte of the slab and its capacity. From the end of the read to the end of the copy nothing writes to the slab.
    /// The device only reads it, because others may read it at the same time: a connection, or another rank.
    pub slab: (*mut u8, usize),
    /// The copies.
    pub copies: Vec<Copy>,
    /// The copies into strided memory. On a GPU they convert nothing.
    pub strided: Strided,
    /// Keeps slab and destination memory alive until the copies have completed.
    pub keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: as for `source::Read`: addresses are used only while the batch is held and `keep` keeps them valid.
unsafe impl Send for Batch {}

impl Batch {
    /// The destination blocks of its copies. A block may come again.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.copies.iter().map(|copy| copy.block).chain(self.strided.blocks())
    }
}

/// The outcome of a batch.
#[derive(Debug)]
pub struct Copied {
    /// The batch's ticket.
    pub ticket: Ticket,
    /// Whether the bytes are there.
    pub result: Result<(), Error>,
    /// If they are not: the destination blocks of the copies that had begun. The bytes of such a copy may be there,
    /// wholly or in part.
    pub begun: Vec<u32>,
}

/// A queue of copies.
pub trait Device: Send {
    /// Called before the load begins: `share` gives the slabs that its copies come from, `nbytes` bytes in all. A
    /// device that needs registered slabs pins the share.
    fn stage(&mut self, share: &mut Share, nbytes: u64) {
        let _ = (share, nbytes);
    }

    /// Makes the device's copies wait for `fence`, for all copies from now on.
    fn wait_for(&mut self, fence: Fence) -> Result<()>;

    /// Queues a batch.
    fn copy(&mut self, batch: Batch) -> Result<()>;

    /// Moves finished batches into `done`, without waiting.
    fn poll(&mut self, done: &mut Vec<Copied>) -> Result<()>;

    /// Readable whenever `poll` may return something.
    fn wake(&self) -> RawFd;

    /// Batches queued and not yet polled.
    fn in_flight(&self) -> usize;

    /// Copies in flight may hang: a drop must wait hardly any longer for them. Gives the batches that have not begun,
    /// and never will.
    fn abandon(&mut self) -> Vec<Ticket> {
        Vec::new()
    }

    /// The refusals so far, and their replacements.
    fn fallbacks(&self) -> Vec<Fallback> {
        Vec::new()
    }
}
