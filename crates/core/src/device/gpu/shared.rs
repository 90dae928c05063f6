//! Commands to a device's threads, and the state they share.

use crate::device::{Batch, Copied, Fence};
use crate::error::{Error, Result};
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::staging::Growth;
use crate::wake::Wake;
use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(super) enum Command {
    Wait(Fence),
    /// By so many threads.
    Grow(Growth, usize),
    Copy(Batch),
}

/// State that caller, device thread and waiter thread share.
pub(super) struct GpuShared {
    pub(super) wake: Wake,
    pub(super) state: Mutex<GpuState>,
    /// The device thread has nothing of the driver's left.
    pub(super) ended: Condvar,
}

#[derive(Default)]
pub(super) struct GpuState {
    pub(super) done: Vec<Copied>,
    /// Batches that the driver was given nothing of yet.
    pub(super) waiting: HashSet<Ticket>,
    /// Addresses of the slabs that the driver may be reading.
    pub(super) running: HashMap<Ticket, usize>,
    pub(super) failed: Option<Error>,
    /// Registration was refused: copies are made from plain memory.
    pub(super) pageable: bool,
    pub(super) fallbacks: Vec<Fallback>,
    pub(super) closed: bool,
    /// Its owner has waited in vain, and left it behind.
    pub(super) given_up: bool,
    pub(super) ended: bool,
}

impl GpuShared {
    pub(super) fn lock(&self) -> MutexGuard<'_, GpuState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fail(&self, error: &Error) {
        self.lock().failed.get_or_insert_with(|| error.clone());
    }

    /// From now on nothing more is registered for this device.
    pub(super) fn fall_back(&self, reason: String) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.pageable, true) {
            let (from, to) = ("registered staging memory", "plain staging memory");
            state.fallbacks.push(Fallback { from, to, reason });
        }
    }

    /// Another rank's slab cannot be registered.
    pub(super) fn note_refused_slab(&self, reason: String) {
        let mut state = self.lock();
        let (from, to) = ("shared slabs", "sockets");
        if !state.fallbacks.iter().any(|known| known.from == from) {
            state.fallbacks.push(Fallback { from, to, reason });
        }
    }

    /// Lets go of the batch, then hands its ticket back. If it failed: copies to these blocks had begun.
    pub(super) fn finish(&self, batch: Batch, result: Result<()>, begun: Vec<u32>) {
        let ticket = batch.ticket;
        self.lock().running.remove(&ticket);
        drop(batch);
        self.hand_back(Copied { ticket, result, begun });
    }

    pub(super) fn hand_back(&self, copied: Copied) {
        let mut state = self.lock();
        let first = state.done.is_empty();
        state.done.push(copied);
        drop(state);
        // If it was not empty, the thread that filled it has notified or is about to, and the poll is still to come.
        if first {
            self.wake.notify();
        }
    }
}
