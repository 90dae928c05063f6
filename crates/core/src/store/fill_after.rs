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
//! What was filled until then stays. The thread exists only while it has something to do.

use super::files::Files;
use super::pread::read_fully;
use super::residency::cached_pages;
use crate::error::{Error, ErrorKind, Result};
use crate::machine::{self, block_signals, page_size};
use crate::memory::Mapping;
use crate::options::{HUGE_PAGE, MIB};
use crate::sync::{lock, Builder, Condvar, Mutex};
use crate::threads::guarded;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of one step: 1 ms of a fast disk. It is a huge page, so that the page cache holds it as one folio. Later
/// starts copy and map a folio faster than small pages.
const STEP: u64 = HUGE_PAGE;
/// Bytes of one read where huge pages cannot be populated. The buffer stays in the processor's cache.
const SCRATCH: u64 = 256 << 10;
/// The memory left is asked for once per so many bytes: asking takes about twenty system calls.
const LOOK_EVERY: u64 = 64 * MIB;
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
    /// The page cache holds all of it, or held it when it was read.
    Finished,
    /// It ended early; `reason` says why.
    Stopped,
}

/// The status of a fill.
#[derive(Debug, Clone, PartialEq)]
pub struct FillStatus {
    /// Its state.
    pub state: FillState,
    /// Why it was stopped; empty where it was not.
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
        f.debug_struct("CacheFill").field("total", &self.0.total).finish_non_exhaustive()
    }
}

struct FillJob {
    pid: u32,
    files: Files,
    /// The bytes that are filled; sorted by file and offset.
    ranges: Vec<(u32, Range<u64>)>,
    /// For each file: whether it is wanted whole, or nearly. Of other files the kernel reads nothing ahead.
    whole: Vec<bool>,
    total: u64,
    /// Bytes of the ranges, in their order, that are done.
    nbytes: AtomicU64,
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
    pub(crate) fn new(files: Files, mut ranges: Vec<(u32, Range<u64>)>, whole: &[bool]) -> Option<CacheFill> {
        ranges.sort_unstable_by_key(|r| (r.0, r.1.start));
        let mut merged: Vec<(u32, Range<u64>)> = Vec::new();
        for (file, range) in ranges {
            match merged.last_mut() {
                Some((last, found)) if *last == file && range.start <= found.end => {
                    found.end = found.end.max(range.end)
                }
                _ => merged.push((file, range)),
            }
        }
        for (file, range) in &mut merged {
            // A direct read may go past the end of its file.
            range.end = range.end.min(files.size(*file));
        }
        merged.retain(|(_, range)| range.start < range.end);
        let total = merged.iter().map(|(_, range)| range.end - range.start).sum();
        (total > 0).then(|| {
            CacheFill(Arc::new(FillJob {
                pid: std::process::id(),
                files,
                ranges: merged,
                whole: whole.to_vec(),
                total,
                nbytes: AtomicU64::new(0),
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
        let (nbytes, total) = (self.0.nbytes.load(Ordering::Relaxed), self.0.total);
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

    /// Ends it between two steps and waits for that, 1 s at most. What was filled stays.
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
    let found: Vec<_> = lock(&Fills::process().state).queue.iter().filter(|f| f.files.share(files)).cloned().collect();
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
        let mut scratch = vec![0u8; SCRATCH as usize];
        let mut state = lock(&self.state);
        loop {
            state.current = None;
            self.changed.notify_all();
            let next = state.queue.front().filter(|_| state.users == 0).cloned();
            let Some(fill) = next else { break };
            state.current = Some(fill.clone());
            drop(state);
            let filled = guarded("penstock-fill", || fill.run(&self.pause, &mut scratch)).and_then(|filled| filled);
            fill.files.close_idle();
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
        self.files.close_idle();
        self.changed.notify_all();
    }

    /// Fills from where it stopped last. False if it was stopped before all bytes were there.
    fn run(&self, pause: &AtomicBool, scratch: &mut [u8]) -> Result<bool> {
        let mut skip = self.nbytes.load(Ordering::Relaxed);
        let mut look = 0;
        for (file, range) in &self.ranges {
            let len = range.end - range.start;
            if skip >= len {
                skip -= len;
                continue;
            }
            let fd = self.files.open(*file, false)?;
            let whole = self.whole.get(*file as usize) == Some(&true);
            let how = if whole { libc::POSIX_FADV_SEQUENTIAL } else { libc::POSIX_FADV_RANDOM };
            // SAFETY: a plain system call on a descriptor we hold. It is advice.
            unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, how) };
            // Of a file that is wanted in part, some pages may not be wanted. So its bytes are read, not populated.
            let mapping = if whole { Mapping::new(&*fd, self.files.size(*file)).ok() } else { None };
            let mut at = range.start + std::mem::take(&mut skip);
            while at < range.end {
                if pause.load(Ordering::Relaxed) || self.over.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                // A step ends at a multiple of its size: the kernel reads ahead in whole pieces.
                let end = (at / STEP * STEP + STEP).min(range.end);
                let left = self.total - self.nbytes.load(Ordering::Relaxed);
                if look == 0 {
                    let room = machine::memory_available();
                    if left > room {
                        let text = format!("the other {left} bytes do not fit into the memory left ({room})");
                        return Err(Error::new(ErrorKind::OutOfMemory, text));
                    }
                    look = LOOK_EVERY;
                }
                look = look.saturating_sub(end - at);
                self.files.verify_file(*file)?;
                let step = at..end;
                if !is_there(fd.as_raw_fd(), &step) && !mapping.as_ref().is_some_and(|m| populate(m, &step)) {
                    self.read(*file, fd.as_raw_fd(), step, scratch)?;
                }
                self.nbytes.fetch_add(end - at, Ordering::Relaxed);
                at = end;
            }
        }
        Ok(true)
    }

    /// Reads bytes of a file, which brings them into the page cache.
    fn read(&self, file: u32, fd: RawFd, step: Range<u64>, scratch: &mut [u8]) -> Result<()> {
        let mut at = step.start;
        while at < step.end {
            let len = (step.end - at).min(scratch.len() as u64);
            let mut to = [libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: len as usize }];
            // SAFETY: one place, within `scratch`.
            let got = unsafe { read_fully(fd, at, &mut to, 0, self.files.most_per_call()) };
            let got = got.map_err(|e| Error::io("read", &e.cause).at(self.files.path(file)).range(at..at + len))?;
            if got < len {
                // The file is shorter than it was.
                return self.files.verify_file(file);
            }
            at += len;
        }
        Ok(())
    }
}

/// Whether the page cache holds all of these bytes of a file.
fn is_there(fd: RawFd, step: &Range<u64>) -> bool {
    let pages = step.end.div_ceil(page_size()) - step.start / page_size();
    cached_pages(fd, step).is_ok_and(|cached| cached >= pages)
}

/// Brings pages of a mapped file into the page cache, and removes them from the mapping again. False if the kernel or
/// the file refuses; reading the bytes then tells why.
fn populate(mapping: &Mapping, step: &Range<u64>) -> bool {
    let start = step.start / page_size() * page_size();
    let len = (step.end.next_multiple_of(page_size()) - start) as usize;
    // SAFETY: the range lies in the mapping, which is as long as the file was. Populating changes no memory, and pages that
    // the file has lost since are an error. Nobody has written to the mapping, so nothing is lost when its pages are dropped.
    unsafe {
        let at = mapping.at().add(start as usize).cast();
        let populated = libc::madvise(at, len, libc::MADV_POPULATE_READ) == 0;
        libc::madvise(at, len, libc::MADV_DONTNEED);
        populated
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
