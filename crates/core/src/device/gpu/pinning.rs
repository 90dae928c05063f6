//! Slabs that are registered with a driver, and the threads that register them.

use super::context::{drop_idle, is_used_here, SharedContext};
use super::shared::GpuShared;
use crate::device::api::Api;
use crate::device::join;
use crate::error::Result;
use crate::options::{HUGE_PAGE, MIB};
use crate::staging::{Growth, Ring, Slab};
use crate::threads::guarded;
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Half of the scratch buffer in which small copies are gathered and strided ones are packed: the largest such transfer.
/// 1 MiB takes 20 to 40 µs on the link, ten times what submitting it costs, so the other half is filled meanwhile.
pub(super) const HALF: u64 = MIB;
const _: () = assert!(2 * HALF <= HUGE_PAGE && HALF >= join::GATHER);

/// How long the end of growth waits for a registration in progress.
const LAST_PIN: Duration = Duration::from_secs(2);

/// Pinning threads at work.
static PINNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Ends the growth of the pool of registered slabs, in this process.
pub fn stop_pinning() {
    if !is_used_here() {
        return;
    }
    Ring::process().stop_growing();
    let (count, ended) = &PINNING;
    let count = count.lock().unwrap_or_else(PoisonError::into_inner);
    let _ended_or_late = ended.wait_timeout_while(count, LAST_PIN, |count| *count > 0);
}

/// Gives idle staging memory back to the system, with its registrations and the contexts they were made in. Tells how many
/// bytes that were.
pub fn release_staging() -> u64 {
    stop_pinning();
    let bytes = Ring::process().trim();
    drop_idle();
    bytes
}

/// Starts the first pinning thread, if the pool has to grow; that one starts the others. Where none can be started the load
/// goes on with plain slabs, which the device thread registers.
pub(super) fn grow(shared: &Arc<GpuShared>, context: &Arc<SharedContext>, growth: Growth, threads: usize) {
    if growth.is_wanted() {
        let (shared, context) = (Arc::downgrade(shared), context.clone());
        // The load waits for registered slabs until the last thread lets go of the growth.
        Pinning { growth: Arc::new(growth), refused: Arc::default(), shared, context }.start(threads);
    }
}

/// State that the pinning threads of one growth share.
#[derive(Clone)]
struct Pinning {
    // Dropped first: after that the load may get plain slabs, and by then the fallback is reported.
    growth: Arc<Growth>,
    /// The driver has refused one of them.
    refused: Arc<AtomicBool>,
    shared: Weak<GpuShared>,
    context: Arc<SharedContext>,
}

impl Pinning {
    /// Starts a thread, which makes the scratch buffer and then starts the other `threads - 1`: the load may begin with
    /// the first slab that is there, and then looks for the scratch buffer. 0: it does neither.
    fn start(self, threads: usize) {
        /// One of those that are counted in [`PINNING`].
        struct Counted;
        impl Drop for Counted {
            fn drop(&mut self) {
                *PINNING.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
                PINNING.1.notify_all();
            }
        }
        *PINNING.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let counted = Counted;
        let pinning = move || {
            if let Err(error) = guarded("penstock-gpupin", || self.pin(threads)).and_then(|pinned| pinned) {
                self.refused.store(true, Ordering::Relaxed);
                if let Some(shared) = self.shared.upgrade() {
                    shared.fall_back(error.to_string());
                }
            }
            drop(self);
            drop(counted);
        };
        let _not_started = std::thread::Builder::new().name("penstock-gpupin".to_owned()).spawn(pinning);
    }

    /// The body of a pinning thread.
    fn pin(&self, threads: usize) -> Result<()> {
        let Self { growth, refused, context, .. } = self;
        let (ring, api) = (Ring::process(), context.enter()?);
        if threads > 0 {
            let there = ring.take_scratch(growth.driver());
            let scratch = there.map_or_else(|| Slab::new(2 * HALF).inspect(Slab::populate), Ok)?;
            register_in(context, &api, &scratch)?;
            ring.give_scratch(scratch);
        }
        for _ in 1..threads {
            self.clone().start(0);
        }
        while !refused.load(Ordering::Relaxed) {
            let Some(slab) = growth.next()? else { break };
            slab.populate();
            let registered = register_in(context, &api, &slab);
            growth.add(slab);
            registered?;
        }
        Ok(())
    }
}

pub(in crate::device) fn register_in(context: &Arc<SharedContext>, api: &Api, slab: &Slab) -> Result<()> {
    slab.register(api.driver_number(), |address, len| {
        // SAFETY: the slab is mapped until it is dropped, and undoes its registrations before that.
        unsafe { api.register(address, len) }?;
        Ok(Box::new(Registered { context: context.clone(), address: address as usize }) as Box<dyn Any + Send>)
    })
}

/// A slab's registration, made in a context and good for all of them; unregistered on drop.
struct Registered {
    context: Arc<SharedContext>,
    address: usize,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(current) = self.context.enter_to_undo() {
            // SAFETY: registered when this was made; no lease on the slab is left, hence no copy.
            let _ = unsafe { current.unregister(self.address as *mut u8) };
        }
    }
}
