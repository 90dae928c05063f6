//! The one state of the library, and the frame around every driver call.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::clocks::{AccessMap, Clock};
use crate::codes::{Vendor, CAPTURE_UNSUPPORTED, INVALID_CONTEXT, NOT_INITIALIZED, NO_DEVICE};
use crate::inject::Settings;
use crate::memory::{Allocation, Region};
use crate::misuse::{Kind, Log};
use crate::stream::{Event, Stream};

/// One device: its primary context and what is charged to it.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Outstanding `cuDevicePrimaryCtxRetain` calls.
    pub(crate) retains: u64,
    /// HIP makes the context itself on first use and never gives it back.
    pub(crate) touched_by_hip: bool,
    /// The legacy default stream, after its first use.
    pub(crate) default_stream: Option<usize>,
    /// Bytes allocated now.
    pub(crate) bytes: u64,
    /// When the link to the device is free again, if a bandwidth is set.
    pub(crate) link_free_at: Option<Instant>,
}

/// A registered host range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Registration {
    pub(crate) len: u64,
    /// The device whose context was current.
    pub(crate) device: usize,
    /// Registered for every context, not only for that one.
    pub(crate) portable: bool,
}

/// A stream that is being captured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capture {
    pub(crate) stream: usize,
    /// As `CUstreamCaptureMode`.
    pub(crate) mode: i32,
    pub(crate) thread: std::thread::ThreadId,
    pub(crate) broken: bool,
}

/// Numbers that tests read.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: BTreeMap<&'static str, u64>,
    pub(crate) bytes_h2d: u64,
    pub(crate) bytes_d2h: u64,
    pub(crate) device_bytes: u64,
    pub(crate) peak_device_bytes: u64,
    pub(crate) adopted_bytes: u64,
    pub(crate) registered_bytes: u64,
    pub(crate) peak_registered_bytes: u64,
    pub(crate) contexts_made: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) log: Log,
    pub(crate) counters: Counters,
    /// Grows at every reset, so that what threads remember from before is invalid.
    pub(crate) generation: u64,
    pub(crate) initialized: bool,
    pub(crate) devices: Vec<Device>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    /// Freed too early: kept mapped, so that the misuse is a line in the log and not a crash.
    pub(crate) condemned: Vec<Region>,
    /// Registered host ranges by their start.
    pub(crate) registrations: BTreeMap<u64, Registration>,
    /// Captures in progress.
    pub(crate) captures: Vec<Capture>,
    pub(crate) host_accesses: AccessMap,
    pub(crate) host_clock: Clock,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Event>,
    /// Handles that were destroyed; handles are never used again.
    pub(crate) dead: BTreeSet<usize>,
    pub(crate) handles: usize,
    pub(crate) stream_indices: usize,
    /// Copies submitted so far.
    pub(crate) copies: u64,
    /// Copies up to this number no longer hang.
    pub(crate) released: u64,
    /// The code that everything returns once the context is broken.
    pub(crate) sticky: Option<i32>,
}

static STATE: OnceLock<Mutex<State>> = OnceLock::new();

/// The process that first used the library; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Signalled at every change for which a thread may wait: work submitted, done, released, streams gone.
static CHANGED: Condvar = Condvar::new();

pub(crate) fn lock() -> MutexGuard<'static, State> {
    let state = STATE.get_or_init(|| {
        // SAFETY: the handler is a plain function of this library, and waits for the lock for a bounded time.
        unsafe { libc::atexit(report_at_exit) };
        OWNER.store(std::process::id(), Ordering::Relaxed);
        Mutex::new(State::new(0))
    });
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this is a child of the process that used the library. The streams' threads are not here, and one of them may
/// have held the lock when the child was made.
fn is_forked() -> bool {
    ![0, std::process::id()].contains(&OWNER.load(Ordering::Relaxed))
}

pub(crate) fn wait(guard: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn changed() {
    CHANGED.notify_all();
}

extern "C" fn report_at_exit() {
    if is_forked() {
        return;
    }
    let Some(state) = STATE.get() else { return };
    // Other threads may still be at work. A thread that is stopped while it holds the lock must not keep the process
    // from ending.
    let mut tries = (0..1000).map(|_| state.try_lock().inspect_err(|_| std::thread::sleep(Duration::from_millis(1))));
    let Some(Ok(state)) = tries.find(Result::is_ok) else {
        eprintln!("fakegpu: the state is locked: no report");
        return;
    };
    if let Some(path) = &state.settings.report {
        let text = format!("{}{}", state.log.text(), state.leaks());
        if let Err(cause) = std::fs::write(path, text) {
            eprintln!("fakegpu: cannot write the report {}: {cause}", path.display());
        }
    }
}

impl State {
    pub(crate) fn new(generation: u64) -> Self {
        let settings = Settings::from_environment();
        let devices = std::iter::repeat_with(Device::default).take(settings.devices).collect();
        Self {
            settings,
            log: Log::default(),
            counters: Counters::default(),
            generation,
            initialized: false,
            devices,
            allocations: BTreeMap::new(),
            condemned: Vec::new(),
            registrations: BTreeMap::new(),
            captures: Vec::new(),
            host_accesses: AccessMap::default(),
            host_clock: Clock::default(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            dead: BTreeSet::new(),
            handles: 0,
            stream_indices: 0,
            copies: 0,
            released: 0,
            sticky: None,
        }
    }

    pub(crate) fn misuse(&mut self, kind: Kind, detail: String) {
        self.log.add(self.settings.on_misuse, kind, detail);
    }

    /// A handle that was never used before in this generation. Handles look like addresses and point nowhere.
    pub(crate) fn new_handle(&mut self) -> usize {
        self.handles += 1;
        0x00fa_ce00_0000 + ((self.generation as usize & 0xfff) << 32) + self.handles * 0x40
    }

    /// Makes the device's context if it has none. Only the expected devices may have one.
    pub(crate) fn context_made(&mut self, device: usize) {
        self.counters.contexts_made += 1;
        if self.settings.expect_devices >> device & 1 == 0 {
            self.misuse(Kind::ForeignDevice, format!("a context was made on device {device}"));
        }
    }

    /// What the program still holds, one line for each thing.
    pub(crate) fn leaks(&self) -> String {
        let mut text = String::new();
        let mut line = |what: std::fmt::Arguments<'_>| {
            let _ = writeln!(text, "leak: {what}");
        };
        for a in self.allocations.values().filter(|a| a.region.is_some()) {
            line(format_args!("device allocation of {} bytes at {:#x} on device {}", a.len, a.start, a.device));
        }
        for (start, registration) in &self.registrations {
            line(format_args!("host registration of {} bytes at {start:#x}", registration.len));
        }
        for (handle, s) in self.streams.iter().filter(|(_, s)| s.counted && !s.destroyed) {
            line(format_args!("stream {handle:#x} (stream #{}) on device {}", s.index, s.device));
        }
        for (handle, event) in &self.events {
            line(format_args!("event {handle:#x} on device {}", event.device));
        }
        for (ordinal, device) in self.devices.iter().enumerate().filter(|(_, d)| d.retains > 0) {
            line(format_args!("primary context of device {ordinal} retained {} times", device.retains));
        }
        text
    }
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL` and `CU_STREAM_CAPTURE_MODE_RELAXED`; between them is THREAD_LOCAL.
pub(crate) const GLOBAL: i32 = 0;
pub(crate) const RELAXED: i32 = 2;

thread_local! {
    /// (generation, context handle) of this thread.
    static CONTEXT: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// (generation, current device) of this thread, for HIP.
    static HIP_DEVICE: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// The capture mode of this thread: `CUstreamCaptureMode`.
    pub(crate) static CAPTURE_MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// The handle of the primary context of `device`.
pub(crate) fn context_handle(device: usize) -> usize {
    0x00c0_de00_0000 + (device + 1) * 0x1000
}

/// A driver call in progress: the state, locked, and the name of the function.
pub(crate) struct Call {
    guard: Option<MutexGuard<'static, State>>,
    pub(crate) vendor: Vendor,
    pub(crate) name: &'static str,
    /// Bytes of the memory that the call registers, unregisters or allocates.
    pub(crate) bytes: u64,
}

impl Deref for Call {
    type Target = State;

    fn deref(&self) -> &State {
        self.guard.as_deref().expect("the lock is only away inside wait()")
    }
}

impl DerefMut for Call {
    fn deref_mut(&mut self) -> &mut State {
        self.guard.as_deref_mut().expect("the lock is only away inside wait()")
    }
}

/// Functions that still work when the context is broken.
const UNBREAKABLE: &[&str] =
    &["cuInit", "cuDriver", "cuDevice", "cuCtx", "cuGetError", "hipInit", "hipDriver", "hipDevice", "hipGet", "hipSet"];

/// Runs `body` as the driver function `name`: it is counted, fails or is ignored if that was requested, and is refused if the context
/// is broken. Functions that give something back do so even then, as the end of the context would.
pub(crate) fn call(vendor: Vendor, name: &'static str, body: impl FnOnce(&mut Call) -> Result<(), i32>) -> i32 {
    if is_forked() {
        // The real driver gives this answer too: it does not survive a fork.
        eprintln!("fakegpu: used-after-fork: {name}");
        return NOT_INITIALIZED;
    }
    let mut call = Call { guard: Some(lock()), vendor, name, bytes: 0 };
    *call.counters.calls.entry(name).or_default() += 1;
    if let Some(code) = call.settings.failure_of(name) {
        return code;
    }
    if call.settings.ignores(name) {
        return 0;
    }
    let breakable = !UNBREAKABLE.iter().any(|prefix| name.starts_with(prefix));
    let gives_back = ["Free", "Destroy", "Unregister"].iter().any(|verb| name.contains(verb));
    if let Some(code) = call.sticky.filter(|_| breakable && !gives_back) {
        return code;
    }
    let result = body(&mut call);
    let cost = call.settings.cost_of(name, call.bytes);
    if !cost.is_zero() {
        call.pause(cost);
    }
    if let Some(code) = call.sticky.filter(|_| breakable) {
        return code;
    }
    result.err().unwrap_or(0)
}

impl Call {
    /// Releases the state for other threads until something changes.
    pub(crate) fn wait(&mut self) {
        let guard = self.guard.take().map(wait);
        self.guard = guard;
    }

    /// Releases the state for other threads for so long.
    fn pause(&mut self, time: Duration) {
        self.guard = None;
        std::thread::sleep(time);
        self.guard = Some(lock());
    }

    /// Refuses a potentially unsafe call on a thread that must not disturb captures, and invalidates the captures it
    /// meets (cuda.h, cuThreadExchangeStreamCaptureMode).
    pub(crate) fn keeps_off_captures(&mut self) -> Result<(), i32> {
        let (mode, me) = (CAPTURE_MODE.get(), std::thread::current().id());
        if mode == RELAXED {
            return Ok(());
        }
        let meets = |c: &Capture| match c.thread == me {
            true => c.mode != RELAXED,
            false => mode == GLOBAL && c.mode == GLOBAL,
        };
        let mut met = false;
        for capture in self.captures.iter_mut().filter(|c| meets(c)) {
            capture.broken = true;
            met = true;
        }
        if !met {
            return Ok(());
        }
        Err(self.wrong(Kind::CaptureBroken, CAPTURE_UNSUPPORTED, "a stream is being captured".to_owned()))
    }

    /// Logs a misuse, with the function's name in front, and returns the code to return.
    pub(crate) fn wrong(&mut self, kind: Kind, code: i32, detail: String) -> i32 {
        let detail = format!("{}: {detail}", self.name);
        self.misuse(kind, detail);
        code
    }

    pub(crate) fn initialized(&mut self) -> Result<(), i32> {
        if self.initialized || self.vendor == Vendor::Hip {
            return Ok(());
        }
        Err(self.wrong(Kind::NoContext, NOT_INITIALIZED, "called before cuInit".to_owned()))
    }

    /// The current context's handle on this thread, 0 for none.
    pub(crate) fn context(&self) -> usize {
        let (generation, handle) = CONTEXT.get();
        if generation == self.generation {
            handle
        } else {
            0
        }
    }

    pub(crate) fn set_context(&mut self, handle: usize) {
        CONTEXT.set((self.generation, handle));
    }

    pub(crate) fn hip_device(&self) -> usize {
        let (generation, device) = HIP_DEVICE.get();
        if generation == self.generation {
            device
        } else {
            0
        }
    }

    pub(crate) fn set_hip_device(&mut self, device: usize) {
        HIP_DEVICE.set((self.generation, device));
    }

    /// The device whose context is current on this thread: what every call that touches memory or queues needs.
    pub(crate) fn current(&mut self) -> Result<usize, i32> {
        self.initialized()?;
        if self.vendor == Vendor::Hip {
            let device = self.hip_device();
            if device >= self.devices.len() {
                return Err(NO_DEVICE);
            }
            if !self.devices[device].touched_by_hip {
                self.devices[device].touched_by_hip = true;
                self.context_made(device);
            }
            return Ok(device);
        }
        let handle = self.context();
        let Some(device) = (0..self.devices.len()).find(|d| context_handle(*d) == handle) else {
            return Err(self.wrong(
                Kind::NoContext,
                INVALID_CONTEXT,
                "no context is current on this thread".to_owned(),
            ));
        };
        if self.devices[device].retains == 0 {
            let detail = format!("the context of device {device} is current but was released");
            return Err(self.wrong(Kind::NoContext, INVALID_CONTEXT, detail));
        }
        Ok(device)
    }
}
