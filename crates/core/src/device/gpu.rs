//! Accelerator memory: copies by the driver, in the device's primary context.
//!
//! Nothing here blocks the caller. A *device thread* makes every driver call that starts a copy: it retains the
//! context, joins copies, submits them to its own stream, and records one event per batch. A *waiter thread* sleeps in
//! the driver on each event in turn and hands the batch's ticket back. One *pinning thread* or several register slabs until
//! the [pool](crate::staging) is as large as the load can use. They may outlive the load by some milliseconds. Pinning memory
//! takes 0.1 to 0.6 s per GiB; copies out of slabs that are registered already go on meanwhile. If a slab is not
//! registered when it is copied (the pool could not grow), the device thread registers it.
//!
//! Frameworks use the primary context too. All devices of this module on the same accelerator share it. It lives as
//! long as one of them, a [`GpuMemory`], or a slab registered in it.
//!
//! # When it goes wrong
//! After the first error of the driver every batch comes back with that error at once. If the submission of a batch
//! failed half-way, the batch comes back when its submitted part has run. A device that is dropped waits for copies in
//! flight. If they do not end ([`PATIENCE`]), its threads and the slabs and blocks they hold are left behind for good,
//! because the accelerator may still touch them.

use super::api::{Api, Context, Current, DriverEvent, Rows, Stream};
use super::boxes::{self, Crossing};
use super::join::{self, Transfer};
use super::strided::Strided;
use super::{Batch, Copied, Device, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::options::{HUGE_PAGE, MIB};
use crate::staging::{Growth, Ring, Share, Slab};
use crate::threads::{guarded, of_panic};
use crate::wake::Wake;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a dropped device waits for copies in flight. A ring of 256 MiB takes 10 ms on PCIe 5, and a second if the
/// driver copies pageable memory on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The same if the load has already waited for them in vain.
const IMPATIENCE: Duration = Duration::from_millis(500);

/// Half of the scratch buffer in which small copies are gathered and strided ones are packed: the largest such transfer.
/// 1 MiB takes 20 to 40 µs on the link, ten times what submitting it costs, so the other half is filled meanwhile.
const HALF: u64 = MIB;
const _: () = assert!(2 * HALF <= HUGE_PAGE && HALF >= join::GATHER);

/// The process that first used a driver through this module; 0 before.
static USED_BY: AtomicU32 = AtomicU32::new(0);

/// Transfers of at most this many bytes go to the driver many at a time, if it has such a call. A larger transfer takes
/// the link longer (5 us at 55 GB/s) than its submission.
const BATCHED: u64 = 256 << 10;

/// How long the end of growth waits for a registration in progress.
const LAST_PIN: Duration = Duration::from_secs(2);

/// Pinning threads at work.
static PINNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Ends the growth of the pool of registered slabs, in this process.
pub fn stop_pinning() {
    if USED_BY.load(Ordering::SeqCst) != std::process::id() {
        return;
    }
    Ring::process().stop_growing();
    let (deadline, (count, ended)) = (Instant::now() + LAST_PIN, &PINNING);
    let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
    while *count > 0 {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        count = ended.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Gives idle staging memory back to the system, with its registrations and the contexts they were made in. Tells how many
/// bytes that were.
pub fn release_staging() -> u64 {
    stop_pinning();
    let bytes = Ring::process().trim();
    // Contexts that something else keeps: what a hanging copy may touch, or a load
    if USED_BY.load(Ordering::SeqCst) == std::process::id() {
        let contexts: Vec<_> = {
            let contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
            contexts.iter().filter_map(Weak::upgrade).collect()
        };
        contexts.iter().for_each(|context| context.drop_idle());
    }
    bytes
}

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

/// Most idle events of a context: those of a load with slabs of 4 MiB, four times.
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
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        self.context.enter()
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Destroys the streams and events that nobody uses.
    fn drop_idle(&self) {
        let Idle { streams, events } = std::mem::take(&mut *self.idle());
        // A failure means that the context is lost, and all of it with it.
        if let Ok(api) = self.context.enter() {
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
    pub(super) fn take_stream(&self, api: &Current<'_>) -> Result<Stream> {
        let idle = self.idle().streams.pop();
        idle.map_or_else(|| api.create_stream(), Ok)
    }

    /// Takes a stream back from its owner. `quiet`: all that was queued on it has ended, without an error. Otherwise the
    /// driver destroys it behind what is queued.
    pub(super) fn give_stream(&self, api: &Current<'_>, stream: Stream, quiet: bool) {
        let mut idle = self.idle();
        if quiet && idle.streams.len() < IDLE_STREAMS {
            return idle.streams.push(stream);
        }
        drop(idle);
        // SAFETY: from `take_stream`, and its owner has given it up. A failure means that the context is lost.
        let _ = unsafe { api.destroy_stream(stream) };
    }

    fn take_event(&self, api: &Api) -> Result<DriverEvent> {
        let idle = self.idle().events.pop();
        idle.map_or_else(|| api.create_event(), Ok)
    }

    /// Takes back events that nothing waits for. `sound`: no call of the driver has failed on the way.
    fn give_events(&self, api: &Api, events: impl IntoIterator<Item = DriverEvent>, sound: bool) {
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

    /// Whether this is the process that made it, and not a child of that.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.pid == std::process::id()
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
fn refuse_a_forked_child() -> Result<()> {
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

/// Accelerator memory of our own, for use without a framework.
pub struct GpuMemory {
    context: Arc<SharedContext>,
    address: u64,
    nbytes: u64,
}

impl GpuMemory {
    /// `nbytes` bytes (at least one) of fresh memory, at an address that is a multiple of 256.
    ///
    /// # Errors
    /// `OutOfMemory`, `Device`, `Forked`.
    pub fn new(context: &Arc<SharedContext>, nbytes: u64) -> Result<Self> {
        refuse_a_forked_child()?;
        let address = context.context.enter()?.alloc(nbytes.max(1) as usize)?;
        Ok(Self { context: context.clone(), address, nbytes })
    }

    /// The device pointer.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if self.context.pid != std::process::id() {
            return;
        }
        // A failure means that the context is lost, and its memory with it.
        if let Ok(current) = self.context.context.enter() {
            // SAFETY: from `alloc`, freed once. Batches keep their blocks until their copies have completed, and a
            // consumer that handed work on it to a stream waits before it lets go (invariant 4).
            let _ = unsafe { current.free(self.address) };
        }
    }
}

/// A slab's registration, made in a context and good for all of them; unregistered on drop.
struct Registered {
    context: Arc<SharedContext>,
    address: usize,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.context.pid != std::process::id() {
            return;
        }
        // A failure means that the context is lost, and its registrations with it.
        if let Ok(current) = self.context.context.enter() {
            // SAFETY: registered when this was made; no lease on the slab is left, hence no copy.
            let _ = unsafe { current.unregister(self.address as *mut u8) };
        }
    }
}

/// Removes safeguards, for tests that show that each is needed; and a shorter patience.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct Sabotage {
    pub skip_fences: bool,
    pub skip_event_wait: bool,
    pub skip_registration: bool,
    pub skip_scratch_wait: bool,
    pub panic_in_copy: bool,
    pub patience: Duration,
}

impl Default for Sabotage {
    fn default() -> Self {
        Self {
            skip_fences: false,
            skip_event_wait: false,
            skip_registration: false,
            skip_scratch_wait: false,
            panic_in_copy: false,
            patience: PATIENCE,
        }
    }
}

/// Copies to the memory of one accelerator.
pub struct GpuDevice {
    shared: Arc<GpuShared>,
    api: Arc<Api>,
    registers: bool,
    pinning_threads: usize,
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    in_flight: usize,
    patience: Duration,
    pid: u32,
}

enum Command {
    Wait(Fence),
    /// By so many threads.
    Grow(Growth, usize),
    Copy(Batch),
}

/// State that caller, device thread and waiter thread share.
struct GpuShared {
    wake: Wake,
    state: Mutex<GpuState>,
    /// The device thread has nothing of the driver's left.
    ended: Condvar,
}

#[derive(Default)]
struct GpuState {
    done: Vec<Copied>,
    /// Batches that the driver was given nothing of yet.
    waiting: HashSet<Ticket>,
    /// Addresses of the slabs that the driver may be reading.
    running: HashMap<Ticket, usize>,
    failed: Option<Error>,
    /// Registration was refused: copies are made from plain memory.
    pageable: bool,
    fallbacks: Vec<Fallback>,
    closed: bool,
    /// Its owner has waited in vain, and left it behind.
    given_up: bool,
    ended: bool,
}

impl GpuShared {
    fn lock(&self) -> MutexGuard<'_, GpuState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: &Error) {
        self.lock().failed.get_or_insert_with(|| error.clone());
    }

    /// From now on nothing more is registered for this device.
    fn fall_back(&self, reason: String) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.pageable, true) {
            let (from, to) = ("registered staging memory", "plain staging memory");
            state.fallbacks.push(Fallback { from, to, reason });
        }
    }

    /// Lets go of the batch, then hands its ticket back. If it failed: copies to these blocks had begun.
    fn finish(&self, batch: Batch, result: Result<()>, begun: Vec<u32>) {
        let ticket = batch.ticket;
        self.lock().running.remove(&ticket);
        drop(batch);
        self.hand_back(Copied { ticket, result, begun });
    }

    fn hand_back(&self, copied: Copied) {
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

impl GpuDevice {
    /// A device for copies to accelerator `ordinal` of `api`'s driver. Returns at once: what goes wrong with the driver
    /// comes back with the batches.
    ///
    /// # Errors
    /// `Forked` in the child of a process that has used a driver; `Limit` where there is no descriptor or thread left.
    pub fn new(api: &Arc<Api>, ordinal: u32) -> Result<Self> {
        Self::with(api, ordinal, Sabotage::default())
    }

    /// The same without some of its safeguards.
    #[cfg(any(test, feature = "testing"))]
    pub fn sabotaged(api: &Arc<Api>, ordinal: u32, sabotage: Sabotage) -> Result<Self> {
        Self::with(api, ordinal, sabotage)
    }

    fn with(api: &Arc<Api>, ordinal: u32, sabotage: Sabotage) -> Result<Self> {
        refuse_a_forked_child()?;
        let shared = Arc::new(GpuShared { wake: Wake::new()?, state: Mutex::default(), ended: Condvar::new() });
        let (commands, inbox) = channel();
        let (patience, registers) = (sabotage.patience, !sabotage.skip_registration);
        let (theirs, their_api) = (shared.clone(), api.clone());
        let thread = std::thread::Builder::new()
            .name("penstock-gpu".to_owned())
            .spawn(move || {
                let served = caught(|| {
                    serve(&theirs, &their_api, ordinal, &inbox, &sabotage);
                    Ok(())
                });
                if let Err(error) = served {
                    refuse_commands(&theirs, &inbox, &error);
                }
                theirs.lock().ended = true;
                theirs.ended.notify_all();
            })
            .map_err(|cause| Error::new(ErrorKind::Limit, format!("cannot start the GPU's copy thread: {cause}")))?;
        let (api, commands, thread, pid) = (api.clone(), Some(commands), Some(thread), std::process::id());
        Ok(Self { shared, api, registers, pinning_threads: 1, commands, thread, in_flight: 0, patience, pid })
    }

    /// The same with so many threads, at least one, that register staging memory.
    #[must_use]
    pub fn pinning_with(mut self, threads: u32) -> Self {
        self.pinning_threads = threads.max(1) as usize;
        self
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this load belongs to the parent process, and GPU drivers do not work in a forked child; load in the parent, \
             or start the child with the \"spawn\" method",
        ))
    }

    fn send(&self, command: Command) -> Result<()> {
        let gone = || Error::new(ErrorKind::Internal, "the GPU's thread ended early");
        self.commands.as_ref().ok_or_else(gone)?.send(command).map_err(|_| gone())
    }
}

impl Device for GpuDevice {
    fn fallbacks(&self) -> Vec<Fallback> {
        match self.same_process() {
            Ok(()) => self.shared.lock().fallbacks.clone(),
            Err(_) => Vec::new(),
        }
    }

    fn stage(&mut self, share: &mut Share, nbytes: u64) {
        if self.registers && nbytes > 0 {
            // If the thread has ended, the growth is dropped, and the load continues until it sees the error.
            let _ = self.send(Command::Grow(share.pin(self.api.driver_number(), nbytes), self.pinning_threads));
        }
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.same_process()?;
        self.send(Command::Wait(fence))
    }

    fn copy(&mut self, batch: Batch) -> Result<()> {
        self.same_process()?;
        if batch.strided.converts() {
            return Err(Error::new(ErrorKind::Internal, "elements are converted on the way to a GPU"));
        }
        let ticket = batch.ticket;
        self.shared.lock().waiting.insert(ticket);
        self.send(Command::Copy(batch)).inspect_err(|_| _ = self.shared.lock().waiting.remove(&ticket))?;
        self.in_flight += 1;
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> Result<()> {
        self.same_process()?;
        self.shared.wake.clear();
        let mut state = self.shared.lock();
        self.in_flight -= state.done.len();
        done.append(&mut state.done);
        Ok(())
    }

    fn wake(&self) -> RawFd {
        self.shared.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn abandon(&mut self) -> Vec<Ticket> {
        self.patience = self.patience.min(IMPATIENCE);
        if self.same_process().is_err() {
            return Vec::new();
        }
        let mut state = self.shared.lock();
        state.closed = true;
        self.in_flight -= state.waiting.len();
        state.waiting.drain().collect()
    }
}

impl Drop for GpuDevice {
    fn drop(&mut self) {
        if self.same_process().is_err() {
            // Threads and locks are the parent's.
            std::mem::forget((self.commands.take(), self.thread.take()));
            return;
        }
        self.shared.lock().closed = true;
        self.commands = None;
        let deadline = Instant::now() + self.patience;
        let mut state = self.shared.lock();
        while !state.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let hung: Vec<usize> = state.running.values().copied().collect();
                state.given_up = true;
                drop(state);
                hung.iter().for_each(|slab| Ring::process().quarantine(*slab as *const u8));
                // The thread keeps what it holds. It cleans up if the driver ever returns.
                self.thread = None;
                return;
            }
            state = self.shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to report.
            let _ = thread.join();
        }
    }
}

/// The body of the device thread.
fn serve(shared: &Arc<GpuShared>, api: &Arc<Api>, ordinal: u32, inbox: &Receiver<Command>, sabotage: &Sabotage) {
    let opened = SharedContext::retain(api, ordinal);
    let result = opened.and_then(|context| GpuQueue::serve(shared, &context, inbox, sabotage));
    if let Err(error) = &result {
        // It ended before it took commands.
        refuse_commands(shared, inbox, error);
    }
}

/// Answers every command with this error until the device is dropped.
fn refuse_commands(shared: &GpuShared, inbox: &Receiver<Command>, error: &Error) {
    shared.fail(error);
    take_commands(shared, inbox, |command| match command {
        Command::Copy(_) => Err(error.clone()),
        Command::Wait(_) | Command::Grow(..) => Ok(()),
    });
}

/// Does such work; a panic in it is an error, for the load to hear of.
fn caught(work: impl FnOnce() -> Result<()>) -> Result<()> {
    guarded("penstock-gpu", work).and_then(|done| done)
}

/// Takes commands until the device is dropped. After the first failure, and after the drop, none is carried out.
fn take_commands(shared: &GpuShared, inbox: &Receiver<Command>, mut carry_out: impl FnMut(Command) -> Result<()>) {
    for command in inbox {
        let (closed, failed) = {
            let mut state = shared.lock();
            if let (Command::Copy(batch), false) = (&command, state.closed) {
                state.waiting.remove(&batch.ticket);
            }
            (state.closed, state.failed.clone())
        };
        match (command, failed) {
            _ if closed => {}
            (Command::Copy(batch), Some(error)) => shared.finish(batch, Err(error), Vec::new()),
            // When the growth is dropped, the load continues until it sees the error.
            (Command::Wait(_) | Command::Grow(..), Some(_)) => {}
            (command, None) => {
                if let Err(error) = carry_out(command) {
                    shared.fail(&error);
                }
            }
        }
    }
}

/// A batch that the driver works on, or did until it failed with the error.
struct Submitted {
    batch: Batch,
    event: DriverEvent,
    /// The error, and the blocks of those copies that had been given to the driver.
    failed: Option<(Error, Vec<u32>)>,
}

/// Everything that a device has of the driver. It lives on the device thread, where its context is current.
struct GpuQueue<'a> {
    shared: &'a Arc<GpuShared>,
    context: &'a Arc<SharedContext>,
    api: &'a Api,
    stream: Stream,
    /// Nothing is queued on the stream behind the last event that the waiter thread awaits.
    quiet: bool,
    waiter: Sender<Submitted>,
    scratch: Option<Scratch>,
    /// The driver takes many copies at once, as far as is known.
    batches: bool,
    /// Destination blocks of the copies that the driver was given of the batch in hand.
    begun: Vec<u32>,
    sabotage: &'a Sabotage,
}

/// Where small copies are gathered: two halves in turn, so that one is filled while the other travels.
struct Scratch {
    slab: Slab,
    /// Recorded behind the last transfer out of each half.
    busy: [Option<DriverEvent>; 2],
    half: usize,
    used: u64,
}

impl<'a> GpuQueue<'a> {
    fn serve(
        shared: &'a Arc<GpuShared>,
        context: &'a Arc<SharedContext>,
        inbox: &Receiver<Command>,
        sabotage: &'a Sabotage,
    ) -> Result<()> {
        let api = context.context.enter()?;
        let stream = context.take_stream(&api)?;
        let (waiter, submitted) = channel();
        let (theirs, their_context) = (shared.clone(), context.clone());
        let skip = sabotage.skip_event_wait;
        let thread = std::thread::Builder::new()
            .name("penstock-gpuwait".to_owned())
            .spawn(move || await_events(&theirs, &their_context, &submitted, skip));
        let thread = match thread {
            Ok(thread) => thread,
            Err(cause) => {
                context.give_stream(&api, stream, true);
                return Err(Error::new(ErrorKind::Limit, format!("cannot start the GPU's waiter thread: {cause}")));
            }
        };
        let mut queue = GpuQueue {
            shared,
            context,
            api: &api,
            stream,
            quiet: true,
            waiter,
            scratch: None,
            batches: true,
            begun: Vec::new(),
            sabotage,
        };
        take_commands(shared, inbox, |command| match command {
            Command::Wait(fence) => caught(|| queue.wait_for(fence)),
            Command::Grow(growth, threads) => caught(|| {
                grow(shared, context, growth, threads);
                Ok(())
            }),
            Command::Copy(batch) => queue.submit_caught(batch),
        });
        let GpuQueue { waiter, scratch, mut quiet, .. } = queue;
        drop(waiter);
        // A waiter that panicked has nothing left to report.
        let joined = thread.join().is_ok();
        let sound = {
            let state = shared.lock();
            joined && !sabotage.skip_event_wait && !state.given_up && state.failed.is_none()
        };
        if let Some(scratch) = scratch {
            // The waiter has seen the end of every batch, but of a failed one only where the driver still answered.
            // SAFETY: our stream.
            quiet = unsafe { api.synchronize_stream(stream) }.is_ok();
            context.give_events(&api, scratch.busy.into_iter().flatten(), sound && quiet);
            if quiet && scratch.slab.is_registered(api.driver_number()) {
                Ring::process().give_scratch(scratch.slab);
            }
        }
        context.give_stream(&api, stream, sound && quiet);
        Ok(())
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        if self.sabotage.skip_fences {
            return Ok(());
        }
        self.quiet = false;
        // SAFETY: the event is live until the load has ended, as `Fence` says.
        unsafe { self.api.stream_wait(self.stream, DriverEvent(fence.0 as usize)) }
    }

    fn submit_caught(&mut self, batch: Batch) -> Result<()> {
        let (ticket, slab) = (batch.ticket, batch.slab.0);
        catch_unwind(AssertUnwindSafe(|| self.submit(batch))).unwrap_or_else(|panic| {
            let error = of_panic("penstock-gpu", &*panic);
            // Its copies may be under way, and no event tells when they end: its memory is never touched again. `submit`
            // has leaked what the batch keeps.
            if self.shared.lock().running.remove(&ticket).is_some() {
                Ring::process().quarantine(slab);
                let begun = std::mem::take(&mut self.begun);
                self.shared.hand_back(Copied { ticket, result: Err(error.clone()), begun });
            }
            Err(error)
        })
    }

    fn submit(&mut self, batch: Batch) -> Result<()> {
        self.shared.lock().running.insert(batch.ticket, batch.slab.0 as usize);
        // A panic leaks it. Nobody else has a reference that outlives the ticket: a ticket that is back has released its
        // memory.
        let batch = ManuallyDrop::new(batch);
        self.begun.clear();
        self.quiet = false;
        let pinned = self.register(&batch);
        let submitted = self.transfer(&batch, pinned);
        // Also after a failed submission: what was queued before the failure still reads the slab.
        let event = self.context.take_event(self.api).and_then(|event| {
            // SAFETY: live handles of our own.
            let recorded = unsafe { self.api.record(event, self.stream) };
            recorded.map(|()| event).inspect_err(|_| self.context.give_events(self.api, [event], false))
        });
        match event {
            Ok(event) => {
                self.quiet = true;
                let failed = submitted.as_ref().err().map(|error| (error.clone(), self.begun.clone()));
                let batch = ManuallyDrop::into_inner(batch);
                if let Err(gone) = self.waiter.send(Submitted { batch, event, failed }) {
                    let error = Error::new(ErrorKind::Internal, "the thread that waits for the GPU ended early");
                    // Its copies may be under way: its memory is never touched again.
                    Ring::process().quarantine(gone.0.batch.slab.0);
                    self.shared.finish(gone.0.batch, Err(error.clone()), self.begun.clone());
                    return Err(error);
                }
                submitted
            }
            Err(error) => {
                let error = submitted.err().unwrap_or(error);
                // SAFETY: our stream. Where even this fails the context is lost, and nothing runs in it any more.
                let _ = unsafe { self.api.synchronize_stream(self.stream) };
                self.shared.finish(ManuallyDrop::into_inner(batch), Err(error.clone()), self.begun.clone());
                Err(error)
            }
        }
    }

    /// Registers the batch's slab if the pool has not done so. If the driver refuses, copies are made from plain
    /// memory: the driver copies it through its own buffers. On systems that refuse (GB10, Jetson: 801, 712, 1) that is
    /// no slower. Tells whether the slab is registered.
    fn register(&self, batch: &Batch) -> bool {
        let slab = Ring::process().slab_at(batch.slab.0);
        if slab.as_ref().is_some_and(|slab| slab.is_registered(self.api.driver_number())) {
            return true;
        }
        if !self.registers() {
            return false;
        }
        let refused = match slab {
            Some(slab) => register_in(self.context, self.api, &slab).err().map(|e| e.to_string()),
            None => Some("the memory is not of the slab ring".to_owned()),
        };
        let pinned = refused.is_none();
        if let Some(reason) = refused {
            self.shared.fall_back(reason);
        }
        pinned
    }

    fn registers(&self) -> bool {
        !self.sabotage.skip_registration && !self.shared.lock().pageable
    }

    /// Small copies are submitted together only if their memory is registered (`pinned`): what the driver does with a
    /// batch of copies from other memory is documented for few devices.
    fn transfer(&mut self, batch: &Batch, pinned: bool) -> Result<()> {
        assert!(!self.sabotage.panic_in_copy, "on purpose");
        let together = self.batches && pinned;
        let plan = join::plan(&batch.copies, HALF);
        let mut many = Many::default();
        for transfer in &plan.transfers {
            match transfer {
                Transfer::Straight { from, to, len, block } if *len <= BATCHED && together => {
                    many.add(*from as u64, *to, *len as usize);
                    many.blocks.push(*block);
                }
                // SAFETY: the batch's maker vouches for both sides, `keep` holds them until the event has passed, and
                // nobody writes the slab before the ticket is back (invariant 2).
                Transfer::Straight { from, to, len, block } => unsafe {
                    self.begins(*block);
                    self.api.copy_to_device(*to, *from, *len as usize, self.stream)?;
                },
                Transfer::Rows(copy) => {
                    let rows = Rows {
                        to: copy.to,
                        to_pitch: copy.to_stride,
                        from: copy.from as u64,
                        from_pitch: copy.from_stride,
                        width: copy.len,
                        rows: copy.rows,
                    };
                    self.begins(copy.block);
                    // SAFETY: as above.
                    unsafe { self.api.copy_rows_to_device(rows, self.stream) }?;
                }
                Transfer::Gathered { to, len, parts } => {
                    let room = self.scratch(*len)?;
                    self.begins(plan.parts[parts.start].block);
                    // SAFETY: `room` is `len` bytes that no transfer under way reads; the sources as above.
                    unsafe {
                        join::gather(&plan.parts[parts.clone()], *to, room);
                        self.api.copy_to_device(*to, room, *len as usize, self.stream)?;
                    }
                }
            }
        }
        self.spread(&batch.strided, together, &mut many)?;
        // SAFETY: as above; blocks do not overlap, nor do the copies into one.
        unsafe { self.copy_many(&many) }
    }

    /// The driver is about to be given a copy to this block.
    fn begins(&mut self, block: u32) {
        if self.begun.last() != Some(&block) {
            self.begun.push(block);
        }
    }

    /// Submits the copies into strided memory. Those of `many` are for the caller to submit: small ranges of the slab.
    fn spread(&mut self, strided: &Strided, together: bool, many: &mut Many) -> Result<()> {
        for (grid, axes) in strided.each() {
            boxes::plan(grid, axes, HALF, |crossing| match crossing {
                Crossing::Straight(rows) if rows.rows == 1 && rows.width <= BATCHED && together => {
                    many.add(rows.from, rows.to, rows.width as usize);
                    many.blocks.push(grid.block);
                    Ok(())
                }
                Crossing::Straight(rows) => {
                    self.begins(grid.block);
                    // SAFETY: as for every transfer: the batch's maker vouches for both sides.
                    unsafe { self.api.copy_rows_to_device(rows, self.stream) }
                }
                Crossing::Packed(packed) => {
                    let room = self.scratch(packed.nbytes())?;
                    // SAFETY: `room` is so many bytes that no transfer under way reads; the sources as above.
                    unsafe { packed.write(room) };
                    self.begins(grid.block);
                    // At once: the next box may take the other half, and then an event is recorded behind these.
                    // SAFETY: as above.
                    packed.rows(room as u64, |rows| unsafe { self.api.copy_rows_to_device(rows, self.stream) })
                }
            })?;
        }
        Ok(())
    }

    /// Submits many small transfers at once where the driver can, else one by one.
    ///
    /// # Safety
    /// As for [`Api::copy_batch_to_device`].
    unsafe fn copy_many(&mut self, many: &Many) -> Result<()> {
        let Many { blocks, to, from, bytes } = many;
        if self.batches && to.len() > 1 {
            // SAFETY: the caller's promise.
            match unsafe { self.api.copy_batch_to_device(to, from, bytes, self.stream) } {
                Ok(false) => self.batches = false,
                // The function exists, but it does not work for this device or stream.
                Err(error) if error.kind() == ErrorKind::Unsupported => self.batches = false,
                queued => {
                    blocks.iter().for_each(|block| self.begins(*block));
                    return queued.map(|_| ());
                }
            }
        }
        for (((to, from), bytes), block) in to.iter().zip(from).zip(bytes).zip(blocks) {
            self.begins(*block);
            // SAFETY: the caller's promise.
            unsafe { self.api.copy_to_device(*to, *from as *const u8, *bytes, self.stream) }?;
        }
        Ok(())
    }

    /// `len` bytes of scratch memory, at most [`HALF`], that nothing reads. Waits, where it must, for the transfers out of
    /// the half that is used next.
    fn scratch(&mut self, len: u64) -> Result<*mut u8> {
        if self.scratch.is_none() {
            let pooled = if self.registers() { Ring::process().take_scratch(self.api.driver_number()) } else { None };
            let slab = match pooled {
                Some(slab) => slab,
                None => {
                    let slab = Slab::new(2 * HALF)?;
                    if self.registers() {
                        if let Err(error) = register_in(self.context, self.api, &slab) {
                            self.shared.fall_back(error.to_string());
                        }
                    }
                    slab
                }
            };
            self.scratch = Some(Scratch { slab, busy: [None; 2], half: 0, used: 0 });
        }
        let Some(scratch) = &mut self.scratch else {
            return Err(Error::new(ErrorKind::Internal, "no scratch buffer"));
        };
        if scratch.used + len > HALF {
            let event = match scratch.busy[scratch.half] {
                Some(event) => event,
                None => *scratch.busy[scratch.half].insert(self.context.take_event(self.api)?),
            };
            // SAFETY: live handles of our own.
            unsafe { self.api.record(event, self.stream) }?;
            scratch.half ^= 1;
            scratch.used = 0;
            if let Some(event) = scratch.busy[scratch.half].filter(|_| !self.sabotage.skip_scratch_wait) {
                // SAFETY: as above; it was recorded when this half was left.
                unsafe { self.api.synchronize_event(event) }?;
            }
        }
        let at = scratch.half as u64 * HALF + scratch.used;
        scratch.used += len;
        // SAFETY: `used` stays within a half and both halves within the slab.
        Ok(unsafe { scratch.slab.address().add(at as usize) })
    }
}

/// Small transfers that are submitted together.
#[derive(Default)]
pub(super) struct Many {
    /// The destination block of each, if anybody wants to know.
    pub(super) blocks: Vec<u32>,
    pub(super) to: Vec<u64>,
    pub(super) from: Vec<u64>,
    pub(super) bytes: Vec<usize>,
}

impl Many {
    pub(super) fn add(&mut self, from: u64, to: u64, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }
}

/// Starts the first pinning thread, if the pool has to grow; that one starts the others. Where none can be started the load
/// goes on with plain slabs, which the device thread registers.
fn grow(shared: &Arc<GpuShared>, context: &Arc<SharedContext>, growth: Growth, threads: usize) {
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
        let (ring, api) = (Ring::process(), context.context.enter()?);
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

pub(super) fn register_in(context: &Arc<SharedContext>, api: &Api, slab: &Slab) -> Result<()> {
    slab.register(api.driver_number(), |address, len| {
        // SAFETY: the slab is mapped until it is dropped, and undoes its registrations before that.
        unsafe { api.register(address, len) }?;
        Ok(Box::new(Registered { context: context.clone(), address: address as usize }) as Box<dyn Any + Send>)
    })
}

/// The body of the waiter thread.
fn await_events(shared: &GpuShared, context: &SharedContext, submitted: &Receiver<Submitted>, skip_wait: bool) {
    // cuda.h requires a current context for cuEventSynchronize. If it cannot be entered, the wait itself reports why.
    let _current = context.context.enter();
    for Submitted { batch, event, failed } in submitted {
        // SAFETY: a live event, recorded behind the batch's copies, and in nobody else's hands.
        let wait = || unsafe { context.context.api().synchronize_event(event) };
        let waited = guarded("penstock-gpuwait", || {
            let waited = if skip_wait { Ok(()) } else { wait() };
            if let Err(error) = &waited {
                shared.fail(error);
                // A lost context fails again at once. If it is not lost, the copies may still run, and the batch must not come
                // back before they have ended.
                let _ = wait();
            }
            context.give_events(context.context.api(), [event], waited.is_ok() && !skip_wait);
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
