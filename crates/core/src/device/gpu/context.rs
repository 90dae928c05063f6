//! The primary contexts of accelerators, with the streams and events that are kept for the next load.

use crate::device::api::{Api, Context, Current, DriverEvent, Stream};
use crate::error::{Error, ErrorKind, Result};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The process that first used a driver through this module; 0 before.
static USED_BY: AtomicU32 = AtomicU32::new(0);

/// Contexts in use, by library and device.
static CONTEXTS: Mutex<Vec<Weak<SharedContext>>> = Mutex::new(Vec::new());

/// The primary context of an accelerator, as long as this process uses it.
pub struct SharedContext {
    /// Given back on drop, but not by a forked child.
    context: ManuallyDrop<Context>,
    /// For the next load: a driver takes some 10 us to make each.
    idle: Mutex<Idle>,
    pid: u32,
}

/// Streams and events that nobody uses and nothing waits for.
#[derive(Default)]
struct Idle {
    streams: Vec<Stream>,
    events: Vec<DriverEvent>,
}

/// Most idle streams of a context: so many loads at a time find one.
const IDLE_STREAMS: usize = 8;

/// Most idle events of a context: four times as many as a load with slabs of 4 MiB needs.
const IDLE_EVENTS: usize = 256;

impl SharedContext {
    /// The primary context of device `ordinal`, made if need be, which may take seconds. No other device is touched.
    ///
    /// # Errors
    /// `Forked` in the child of a process that has used a driver; `Unsupported`, `OutOfMemory`, `Device` from the driver.
    pub fn retain(api: &Arc<Api>, ordinal: u32) -> Result<Arc<Self>> {
        refuse_a_forked_child()?;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // Held while the context is made: other threads that want it have to wait for it anyway.
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        contexts.retain(|c| c.strong_count() > 0);
        let same = |c: &Arc<Self>| c.context.ordinal() == ordinal && Arc::ptr_eq(c.context.api(), api);
        if let Some(known) = contexts.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(known);
        }
        start_driver(api)?;
        let count = api.device_count()?;
        if ordinal >= count {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("there is no device {ordinal}: the {} driver shows {count} to this process", api.vendor()),
            ));
        }
        let context = ManuallyDrop::new(api.context(ordinal)?);
        let shared = Arc::new(Self { context, idle: Mutex::default(), pid: std::process::id() });
        contexts.push(Arc::downgrade(&shared));
        Ok(shared)
    }

    /// Free and total bytes of the accelerator's memory.
    ///
    /// # Errors
    /// `Forked`, `Device`.
    pub fn memory(&self) -> Result<(usize, usize)> {
        refuse_a_forked_child()?;
        self.context.enter()?.memory()
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(in crate::device) fn enter(&self) -> Result<Current<'_>> {
        self.context.enter()
    }

    /// The same, to undo what was made in it. `None` in a forked child, which did not make it, and if the context is lost:
    /// all of it is gone then.
    pub(in crate::device) fn enter_to_undo(&self) -> Option<Current<'_>> {
        (self.pid == std::process::id()).then(|| self.context.enter().ok()).flatten()
    }

    /// The driver's functions, whatever context is current.
    pub(super) fn api(&self) -> &Api {
        self.context.api()
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Destroys the streams and events that nobody uses.
    fn drop_idle(&self) {
        let Idle { streams, events } = std::mem::take(&mut *self.idle());
        if let Some(api) = self.enter_to_undo() {
            for event in events {
                // SAFETY: from `create_event`, and nobody waits for it.
                let _ = unsafe { api.destroy_event(event) };
            }
            for stream in streams {
                // SAFETY: from `create_stream`, and nobody uses it.
                let _ = unsafe { api.destroy_stream(stream) };
            }
        }
    }

    /// A stream on which nothing is queued, for one owner. `api` says that the context is current.
    ///
    /// # Errors
    /// `Device`, `OutOfMemory`.
    pub(in crate::device) fn take_stream(&self, api: &Current<'_>) -> Result<Stream> {
        let idle = self.idle().streams.pop();
        idle.map_or_else(|| api.create_stream(), Ok)
    }

    /// Takes a stream back from its owner. `quiet`: all its work has ended, without an error. Otherwise the driver destroys
    /// it after that work.
    pub(in crate::device) fn give_stream(&self, api: &Current<'_>, stream: Stream, quiet: bool) {
        let mut idle = self.idle();
        if quiet && idle.streams.len() < IDLE_STREAMS {
            return idle.streams.push(stream);
        }
        drop(idle);
        // SAFETY: from `take_stream`, and its owner has given it up. A failure means that the context is lost.
        let _ = unsafe { api.destroy_stream(stream) };
    }

    pub(super) fn take_event(&self, api: &Api) -> Result<DriverEvent> {
        let idle = self.idle().events.pop();
        idle.map_or_else(|| api.create_event(), Ok)
    }

    /// Takes back events that nothing waits for. `sound`: no call of the driver has failed on the way.
    pub(super) fn give_events(&self, api: &Api, events: impl IntoIterator<Item = DriverEvent>, sound: bool) {
        for event in events {
            let mut idle = self.idle();
            if sound && idle.events.len() < IDLE_EVENTS {
                idle.events.push(event);
                continue;
            }
            drop(idle);
            // SAFETY: from `take_event`, and nobody waits for it any more. A failure means that the context is lost.
            let _ = unsafe { api.destroy_event(event) };
        }
    }
}

impl Drop for SharedContext {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            self.drop_idle();
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.context) };
        }
    }
}

/// Destroys the streams and events that nobody uses, of all contexts.
pub(super) fn drop_idle() {
    // Contexts that something else keeps: what a hanging copy may touch, or a load
    if is_used_here() {
        let contexts: Vec<_> = {
            let contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
            contexts.iter().filter_map(Weak::upgrade).collect()
        };
        contexts.iter().for_each(|context| context.drop_idle());
    }
}

/// This process itself has used a driver. A forked child starts as one that has not.
pub(super) fn is_used_here() -> bool {
    USED_BY.load(Ordering::SeqCst) == std::process::id()
}

/// Starts a driver, which a child of this process then has to do without. May be called again.
///
/// # Errors
/// `Forked` in the child of a process that has used a driver; `Unsupported`, `Device` from the driver.
pub fn start_driver(api: &Api) -> Result<()> {
    refuse_a_forked_child()?;
    let _ = USED_BY.compare_exchange(0, std::process::id(), Ordering::SeqCst, Ordering::SeqCst);
    api.init()
}

/// Drivers do not survive a fork: a child's calls fail with odd codes or hang.
pub(super) fn refuse_a_forked_child() -> Result<()> {
    let used_by = USED_BY.load(Ordering::SeqCst);
    if used_by == 0 || used_by == std::process::id() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Forked,
        format!(
            "this process was forked from process {used_by} after that had used the GPU, and GPU drivers do not work in \
             such a child; start it with the \"spawn\" or \"forkserver\" method, or load in the parent only"
        ),
    ))
}
