//! Fills the page cache after a load that went past it.
//!
//! If a disk gives more past the page cache than through it, `cache="auto"` reads copied bytes past it. The next start
//! would then find nothing in the page cache. So when such a load has ended, one thread of this process reads the same
//! bytes into the page cache, at idle I/O priority, in small steps. It stops between two steps
//!
//! - while the process itself wants the disk ([`DiskUse`]: a load with cold bytes, a save, `warm`). It continues
//!   afterwards;
//! - for good, if the memory left to the process no longer holds the rest, if the file has changed, if reading fails,
//!   if the process forks or ends, and when it is told to.
//!
//! What was filled until then stays. The thread exists only while it has something to do. The steps are in `fill_steps`.

use super::files::Files;
use super::fill_steps::FillSteps;
use crate::machine::block_signals;
use crate::sync::{lock, Builder, Condvar, Mutex};
use crate::threads::guarded;
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The thread needs little stack.
const STACK: usize = 128 << 10;
/// How long stopping the thread waits for the current step.
const STOP: Duration = Duration::from_secs(1);
/// Ten years. Longer waits are cut to this: a clock cannot count to `Duration::MAX`.
const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The state of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FillState {
    /// It runs, or waits until the process no longer wants the disk.
    Running,
    /// The page cache held all of it at the end. Where the kernel does not tell, it held each part when that was read.
    Finished,
    /// It ended early; `reason` says why.
    Stopped,
}

/// The status of a fill.
#[derive(Debug, Clone, PartialEq)]
pub struct FillStatus {
    /// Its state.
    pub state: FillState,
    /// The reason for a stop; empty without one.
    pub reason: String,
    /// Bytes of which it is known that the page cache holds them.
    pub nbytes: u64,
    /// Bytes that the page cache will hold at the end.
    pub total: u64,
    /// Seconds from the end of the load to the end of the fill, pauses included.
    pub seconds: f64,
}

/// The filling of the page cache after one load: to ask about it, wait for it and stop it.
#[derive(Clone)]
pub struct CacheFill(Arc<FillJob>);

impl std::fmt::Debug for CacheFill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CacheFill").field("total", &self.0.steps.total()).finish_non_exhaustive()
    }
}

struct FillJob {
    pid: u32,
    steps: FillSteps,
    over: AtomicBool,
    state: Mutex<FillProgress>,
    changed: Condvar,
}

struct FillProgress {
    begun: Instant,
    /// How it ended, and how long it took.
    end: Option<(FillState, String, Duration)>,
}

impl CacheFill {
    /// A fill of these ranges of the files; `whole` flags the files that are wanted whole. `None` if there is nothing
    /// to read. The fill begins with [`start`](Self::start).
    pub(crate) fn new(files: Files, ranges: Vec<(u32, Range<u64>)>, whole: &[bool]) -> Option<CacheFill> {
        let steps = FillSteps::new(files, ranges, whole);
        (steps.total() > 0).then(|| {
            CacheFill(Arc::new(FillJob {
                pid: std::process::id(),
                steps,
                over: AtomicBool::new(false),
                state: Mutex::new(FillProgress { begun: Instant::now(), end: None }),
                changed: Condvar::new(),
            }))
        })
    }

    /// Begins to fill the page cache with all of these files; `None` if they are empty.
    pub fn of(files: Files) -> Option<CacheFill> {
        let whole = vec![true; files.len()];
        let all = (0..files.len() as u32).map(|file| (file, 0..files.size(file))).collect();
        let fill = Self::new(files, all, &whole)?;
        fill.start();
        Some(fill)
    }

    /// Begins it, after the fills that were begun before.
    pub(crate) fn start(&self) {
        lock(&self.0.state).begun = Instant::now();
        let fills = Fills::process();
        lock(&fills.state).queue.push_back(self.0.clone());
        fills.go_on();
    }

    /// Its status.
    pub fn status(&self) -> FillStatus {
        let (nbytes, total) = (self.0.steps.nbytes(), self.0.steps.total());
        if self.0.pid != std::process::id() {
            // The thread is the parent's, and so is the lock.
            let reason = "it belongs to the parent process".to_owned();
            return FillStatus { state: FillState::Stopped, reason, nbytes, total, seconds: 0.0 };
        }
        let state = lock(&self.0.state);
        let (now, reason, took) = match &state.end {
            Some((end, reason, took)) => (*end, reason.clone(), *took),
            None => (FillState::Running, String::new(), state.begun.elapsed()),
        };
        FillStatus { state: now, reason, nbytes, total, seconds: took.as_secs_f64() }
    }

    /// Waits until it has ended, with or without an error, at most for `timeout`; false if that passed first.
    pub fn wait(&self, timeout: Duration) -> bool {
        if self.0.pid != std::process::id() {
            return true;
        }
        let until = Instant::now() + timeout.min(LONGEST_WAIT);
        let mut state = lock(&self.0.state);
        while state.end.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends it between two steps and waits for that, 1 s at most. Filled pages stay.
    pub fn stop(&self) {
        if self.0.pid != std::process::id() {
            return;
        }
        self.0.end(FillState::Stopped, "it was told to stop".into());
        let fills = Fills::process();
        lock(&fills.state).queue.retain(|fill| !Arc::ptr_eq(fill, &self.0));
        fills.wait_until(STOP, |state| !state.busy_with(&self.0));
    }
}

/// Ends all fills of this process, for the given reason, and waits at most `patience` until their thread has ended.
pub fn stop_fills(reason: &str, patience: Duration) {
    let fills = Fills::process();
    let ended = {
        let mut state = lock(&fills.state);
        std::mem::take(&mut state.queue)
    };
    for fill in &ended {
        fill.end(FillState::Stopped, reason.to_owned());
    }
    drop(ended);
    if !patience.is_zero() {
        fills.wait_until(patience, |state| !state.thread);
    }
}

/// Ends the fills that read one of these files: its pages are no longer wanted in the page cache.
pub(super) fn stop_fills_of(files: &Files) {
    let found: Vec<_> =
        lock(&Fills::process().state).queue.iter().filter(|f| f.steps.files().share(files)).cloned().collect();
    for fill in found {
        CacheFill(fill).stop();
    }
}

/// This process wants the disk for itself. No fill continues while one of these exists.
#[derive(Debug)]
pub(crate) struct DiskUse(u32);

impl DiskUse {
    pub(crate) fn begin() -> DiskUse {
        let fills = Fills::process();
        let mut state = lock(&fills.state);
        state.users += 1;
        fills.pause.store(true, Ordering::Relaxed);
        drop(state);
        DiskUse(fills.pid)
    }
}

impl Drop for DiskUse {
    fn drop(&mut self) {
        let fills = Fills::process();
        if fills.pid != self.0 {
            return; // counted in the process that this one was forked from
        }
        let mut state = lock(&fills.state);
        state.users -= 1;
        if state.users > 0 {
            return;
        }
        fills.pause.store(false, Ordering::Relaxed);
        drop(state);
        fills.go_on();
    }
}

/// The fills of this process and their thread.
struct Fills {
    pid: u32,
    state: Mutex<Queue>,
    /// The thread has finished a fill, or ended.
    changed: Condvar,
    /// The process wants the disk for something else.
    pause: AtomicBool,
}

#[derive(Default)]
struct Queue {
    /// The first one is being filled, if there is a thread.
    queue: VecDeque<Arc<FillJob>>,
    /// The fill that the thread works on.
    current: Option<Arc<FillJob>>,
    users: usize,
    thread: bool,
}

impl Queue {
    fn busy_with(&self, fill: &Arc<FillJob>) -> bool {
        self.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, fill))
    }
}

static PROCESS: AtomicPtr<Fills> = AtomicPtr::new(ptr::null_mut());

impl Fills {
    /// The fills of this process. A forked child has its own.
    fn process() -> &'static Fills {
        // No lock: another thread of the parent might have held it when the process forked.
        loop {
            let current = PROCESS.load(Ordering::Acquire);
            // SAFETY: null, or leaked below and never freed.
            if let Some(fills) = unsafe { current.as_ref() }.filter(|fills| fills.pid == std::process::id()) {
                return fills;
            }
            let fresh = Box::into_raw(Box::new(Fills {
                pid: std::process::id(),
                state: Mutex::default(),
                changed: Condvar::new(),
                pause: AtomicBool::new(false),
            }));
            if PROCESS.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above and published to nobody.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    /// Starts the thread if there is something to fill and nothing else wants the disk.
    fn go_on(&'static self) {
        let mut state = lock(&self.state);
        if state.thread || state.users > 0 || state.queue.is_empty() {
            return;
        }
        let thread = Builder::new().name("penstock-fill".into()).stack_size(STACK);
        match thread.spawn(move || self.work()) {
            Ok(_runs_by_itself) => state.thread = true,
            Err(cause) => {
                let left = std::mem::take(&mut state.queue);
                drop(state);
                for fill in left {
                    fill.end(FillState::Stopped, format!("no thread can be started: {cause}"));
                }
            }
        }
    }

    fn wait_until(&self, patience: Duration, mut reached: impl FnMut(&Queue) -> bool) {
        let until = Instant::now() + patience.min(LONGEST_WAIT);
        let mut state = lock(&self.state);
        while !reached(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The body of the thread.
    fn work(&self) {
        block_signals();
        be_idle();
        let mut scratch = FillSteps::scratch();
        let mut state = lock(&self.state);
        loop {
            state.current = None;
            self.changed.notify_all();
            let next = state.queue.front().filter(|_| state.users == 0).cloned();
            let Some(fill) = next else { break };
            state.current = Some(fill.clone());
            drop(state);
            let goes_on = || !self.pause.load(Ordering::Relaxed) && !fill.over.load(Ordering::Relaxed);
            let filled = guarded("penstock-fill", || fill.steps.run(&goes_on, &mut scratch)).and_then(|filled| filled);
            fill.steps.files().close_idle();
            match filled {
                Ok(true) => fill.end(FillState::Finished, String::new()),
                Ok(false) => {}
                Err(e) => fill.end(FillState::Stopped, e.to_string()),
            }
            state = lock(&self.state);
            if fill.over.load(Ordering::Relaxed) {
                state.queue.retain(|other| !Arc::ptr_eq(other, &fill));
            }
        }
        state.thread = false;
        self.changed.notify_all();
    }
}

impl FillJob {
    /// Records how it ended, unless that is recorded already.
    fn end(&self, how: FillState, reason: String) {
        self.over.store(true, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let took = state.begun.elapsed();
        state.end.get_or_insert((how, reason, took));
        drop(state);
        self.steps.files().close_idle();
        self.changed.notify_all();
    }
}

/// Lets all other programs have the disk and the processor first, if the kernel allows it. If it refuses, the fill
/// competes like any other reader. It still stops when this process wants the disk.
fn be_idle() {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    const IOPRIO_CLASS_IDLE: libc::c_int = 3 << 13;
    // SAFETY: plain system calls that concern the calling thread alone (0 is the caller, to Linux a thread).
    unsafe {
        libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_CLASS_IDLE);
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
    }
}
