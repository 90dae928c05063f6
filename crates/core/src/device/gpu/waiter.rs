//! The thread that waits for copies, and hands their batches back.

use super::context::SharedContext;
use super::shared::GpuShared;
use crate::device::api::DriverEvent;
use crate::device::{Batch, Copied};
use crate::error::Error;
use crate::staging::Ring;
use crate::threads::guarded;
use std::sync::mpsc::Receiver;

/// A batch that the driver works on, or did until it failed with the error.
pub(super) struct Submitted {
    pub(super) batch: Batch,
    pub(super) event: DriverEvent,
    /// The error, and the blocks of those copies that had been given to the driver.
    pub(super) failed: Option<(Error, Vec<u32>)>,
}

/// The body of the waiter thread.
pub(super) fn await_events(shared: &GpuShared, context: &SharedContext, submitted: &Receiver<Submitted>) {
    // cuda.h requires a current context for cuEventSynchronize. If it cannot be entered, the wait itself reports why.
    let _current = context.enter();
    for Submitted { batch, event, failed } in submitted {
        // SAFETY: a live event, recorded behind the batch's copies, and in nobody else's hands.
        let wait = || unsafe { context.api().synchronize_event(event) };
        let waited = guarded("penstock-gpuwait", || {
            let waited = wait();
            if let Err(error) = &waited {
                shared.fail(error);
                // A lost context fails again at once. If it is not lost, the copies may still run, and the batch must not come
                // back before they have ended.
                let _ = wait();
            }
            context.give_events(context.api(), [event], waited.is_ok());
            waited
        });
        let waited = match waited {
            Ok(waited) => waited,
            Err(error) => {
                // Its copies may be under way, and nothing tells when they end: its memory is never touched again.
                shared.fail(&error);
                let (ticket, begun) = (batch.ticket, batch.blocks().collect());
                if shared.lock().running.remove(&ticket).is_some() {
                    Ring::process().quarantine(batch.slab.0);
                    shared.hand_back(Copied { ticket, result: Err(error), begun });
                }
                std::mem::forget(batch);
                continue;
            }
        };
        let (result, begun) = match failed {
            Some((error, begun)) => (Err(error), begun),
            None if waited.is_ok() => (waited, Vec::new()),
            None => (waited, batch.blocks().collect()),
        };
        shared.finish(batch, result, begun);
    }
}
