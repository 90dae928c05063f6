//! A pool of threads that read: the buffered and the mapped lane, and O_DIRECT where io_uring is not used.
//!
//! Threads start as reads queue up and end with the load. A thread that hangs in the kernel (a network mount whose
//! server is gone cannot be interrupted) is left behind with its read. The read keeps the memory to which the kernel
//! may still write.

use super::fill::fetch;
use super::perform::{Failure, How, Performer, Tools};
use super::{Outcome, Progress, Read, Source, Touches, GRACE, QUARANTINED};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Lane;
use crate::fallback::Fallback;
use crate::machine::block_signals;
use crate::store::Files;
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::guarded;
use crate::timeline::{Span, Timeline, Track};
use crate::wake::Wake;
use crate::way::Routing;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Even after reads were given up long ago, the threads get this long to end.
const LEAST_GRACE: Duration = Duration::from_millis(100);
/// Threads here need little stack, and a network file system gets many of them.
const STACK: usize = 128 << 10;

/// Reads by a pool of threads.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<PoolShared>,
    handles: Vec<JoinHandle<()>>,
    most_threads: usize,
    depth: usize,
    in_flight: usize,
    process: u32,
    /// When the reads were given up: what hangs has had that long to end already when the pool is dropped.
    cancelled: Option<Instant>,
    /// The submitting thread does the reads, before `submit` returns: for resident pages, that takes less time than handing
    /// the work to another thread and waiting for it.
    here: bool,
}

#[derive(Debug)]
struct PoolShared {
    performer: Performer,
    state: Mutex<PoolState>,
    /// A read was queued, or the pool closes.
    work: Condvar,
    /// A read has finished or a thread has ended.
    finished: Condvar,
    wake: Wake,
    /// Where reads are recorded, if they are.
    timeline: Option<Arc<Timeline>>,
}

#[derive(Default)]
struct PoolState {
    queue: VecDeque<(Read, How)>,
    /// Ranges to read into the page cache at the end.
    last: Vec<(u32, Range<u64>)>,
    done: Vec<Outcome>,
    /// `wake` was raised and not lowered since: one write for however many completions.
    raised: bool,
    /// Threads alive, waiting for work, reading.
    threads: usize,
    idle: usize,
    reading: usize,
    /// Threads that wait for `finished`: to notify is a system call even if none waits.
    awaited: usize,
    /// Reads finished so far.
    finished: u64,
    closing: bool,
    abandoned: bool,
}

impl std::fmt::Debug for PoolState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolState")
            .field("queued", &self.queue.len())
            .field("reading", &self.reading)
            .finish_non_exhaustive()
    }
}

impl Threads {
    /// A pool of at most `threads` threads that takes at most `depth` reads at a time.
    pub fn new(files: Arc<Files>, threads: usize, depth: usize) -> Result<Threads> {
        let routing = Routing { threads, ..Routing::default() };
        Self::obeying(files, &Arc::new(routing), depth, None)
    }

    /// A pool that reads as `routing` says and takes at most `depth` reads at a time. Every read is recorded in the timeline, if there is one.
    pub(super) fn obeying(
        files: Arc<Files>,
        routing: &Arc<Routing>,
        depth: usize,
        timeline: Option<&Arc<Timeline>>,
    ) -> Result<Threads> {
        let shared = PoolShared {
            state: Mutex::default(),
            work: Condvar::new(),
            finished: Condvar::new(),
            wake: Wake::new()?,
            timeline: timeline.cloned(),
            performer: Performer::new(files, routing),
        };
        Ok(Threads {
            shared: Arc::new(shared),
            handles: Vec::new(),
            most_threads: routing.threads.max(1),
            depth: depth.max(1),
            in_flight: 0,
            process: std::process::id(),
            cancelled: None,
            here: routing.here,
        })
    }

    /// Late reads: ranges, into the page cache when all is done.
    pub(super) fn late(&self) -> ReadAhead {
        ReadAhead(self.shared.clone())
    }

    /// Threads started so far.
    #[cfg(any(test, feature = "testing"))]
    pub fn started(&self) -> usize {
        self.handles.len()
    }

    pub(super) fn submit_as(&mut self, read: Read, way: How) -> Result<(), Read> {
        if self.in_flight >= self.depth {
            return Err(read);
        }
        self.in_flight += 1;
        if self.here {
            let mut tools = Tools::default();
            let result = self.shared.recorded(&read, 0, || self.shared.performer.perform(&read, way, &mut tools));
            let outcome = self.shared.performer.outcome(read, result, tools.written);
            let mut state = lock(&self.shared.state);
            self.shared.finish(&mut state, outcome);
            return Ok(());
        }
        let mut state = lock(&self.shared.state);
        state.queue.push_back((read, way));
        if state.idle >= state.queue.len() {
            drop(state);
            self.shared.work.notify_one();
            return Ok(());
        }
        if state.threads < self.most_threads {
            let (shared, number) = (self.shared.clone(), self.handles.len() as u32);
            let thread = Builder::new().name("penstock-read".into()).stack_size(STACK);
            match thread.spawn(move || shared.work(number)) {
                Ok(handle) => {
                    state.threads += 1;
                    self.handles.push(handle);
                }
                // Fewer threads than wished for do the work too; none cannot.
                Err(_) if state.threads > 0 => self.most_threads = state.threads,
                Err(cause) => {
                    if let Some((read, _)) = state.queue.pop_back() {
                        let e = Error::new(ErrorKind::Limit, format!("cannot start a read thread: {cause}"));
                        let done = read.done(self.shared.performer.files(), Err(e));
                        self.shared.finish(&mut state, Outcome::Done(done));
                    }
                }
            }
        }
        let idle = state.idle;
        // Who is woken needs the lock first of all.
        drop(state);
        if idle > 0 {
            self.shared.work.notify_one();
        }
        Ok(())
    }

    pub(super) fn drain(&mut self, out: &mut Vec<Outcome>) {
        let mut state = lock(&self.shared.state);
        if std::mem::take(&mut state.raised) {
            self.shared.wake.clear();
        }
        self.in_flight -= state.done.len();
        out.append(&mut state.done);
    }
}

/// Has ranges of files read into the page cache when all reads of a pool are done, without waiting for them.
#[derive(Debug)]
pub(crate) struct ReadAhead(Arc<PoolShared>);

impl ReadAhead {
    pub(super) fn fetch(&self, ranges: impl IntoIterator<Item = (u32, Range<u64>)>) {
        lock(&self.0.state).last.extend(ranges);
    }
}

impl Source for Threads {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let way = match read.lane {
            Lane::MAPPED => How::Mapped,
            Lane::DIRECT => How::Direct,
            _ => How::Buffered,
        };
        self.submit_as(read, way)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let mut out = Vec::new();
        self.drain(&mut out);
        events.extend(out.into_iter().map(|o| Progress::Done(o.into_done(self.shared.performer.files()))));
        Ok(())
    }

    fn cancel(&mut self) {
        self.cancelled.get_or_insert_with(Instant::now);
        let mut state = lock(&self.shared.state);
        state.last.clear();
        while let Some((read, _)) = state.queue.pop_front() {
            let done = read.cancelled(self.shared.performer.files());
            self.shared.finish(&mut state, Outcome::Done(done));
        }
    }

    fn wake(&self) -> RawFd {
        self.shared.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn take_touches(&mut self) -> Touches {
        self.shared.performer.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        self.shared.performer.take_fallbacks()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A forked child: the threads do not exist here, and one of them may have held the lock when it forked.
            std::mem::take(&mut self.handles).into_iter().for_each(std::mem::forget);
            std::mem::forget(self.shared.clone());
            return;
        }
        let mut state = lock(&self.shared.state);
        state.closing = true;
        state.queue.clear();
        self.shared.work.notify_all();
        self.shared.finished.notify_all();
        let until = (self.cancelled.unwrap_or_else(Instant::now) + GRACE).max(Instant::now() + LEAST_GRACE);
        while state.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state.awaited += 1;
            state = self.shared.finished.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.awaited -= 1;
        }
        let hung = state.threads;
        state.abandoned = hung > 0;
        QUARANTINED.fetch_add(hung, Ordering::Relaxed);
        drop(state);
        // With none hung all have left their loop and joining is a matter of microseconds. Else they are detached: a hung one
        // owns its read, and so the memory that the kernel may still write to.
        if hung == 0 {
            for handle in self.handles.drain(..) {
                let _panicked = handle.join();
            }
        }
    }
}

impl PoolShared {
    fn finish(&self, state: &mut PoolState, outcome: Outcome) {
        state.done.push(outcome);
        if !std::mem::replace(&mut state.raised, true) {
            self.wake.notify();
        }
    }

    /// Does a read, which goes down in the record, if there is one, as done by thread `number`.
    fn recorded<T>(&self, read: &Read, number: u32, perform: impl FnOnce() -> T) -> T {
        let Some(timeline) = &self.timeline else { return perform() };
        let begun = Instant::now();
        let result = perform();
        let span = Span::new(Track::Reader(number), "read", begun, Instant::now());
        timeline.add(span.of_read(read.ticket, read.lane, (read.file, read.offset), read.len));
        result
    }

    /// The loop of thread `number`.
    fn work(&self, number: u32) {
        block_signals();
        let mut tools = Tools::default();
        let mut state = lock(&self.state);
        loop {
            let Some((read, way)) = state.queue.pop_front() else {
                if state.closing {
                    let last = std::mem::take(&mut state.last);
                    if last.is_empty() {
                        break;
                    }
                    drop(state);
                    // Nobody waits for it.
                    let _unheard = guarded("penstock-read", || self.fetch(last));
                    state = lock(&self.state);
                    continue;
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            state.reading += 1;
            let finished = state.finished;
            drop(state);
            let perform = || guarded("penstock-read", || self.performer.perform(&read, way, &mut tools));
            let result = self.recorded(&read, number, perform);
            let result = result.unwrap_or_else(|e| {
                tools.written = read.len;
                Err(Failure::Error(e))
            });
            if matches!(&result, Err(Failure::Error(e)) if e.kind() == ErrorKind::Limit) {
                // No descriptor left: those that other threads are using become free when they finish.
                state = lock(&self.state);
                let freed = state.finished != finished;
                if (state.reading > 1 || freed) && !state.closing {
                    state.queue.push_front((read, way));
                    state.reading -= 1;
                    if !freed {
                        state.awaited += 1;
                        state = self.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
                        state.awaited -= 1;
                    }
                    continue;
                }
                drop(state);
            }
            // The read lets go of its memory before anybody learns that it is done.
            let outcome = self.performer.outcome(read, result, tools.written);
            state = lock(&self.state);
            state.reading -= 1;
            state.finished += 1;
            if state.closing {
                continue;
            }
            self.finish(&mut state, outcome);
            if state.awaited > 0 {
                self.finished.notify_all();
            }
        }
        state.threads -= 1;
        if state.abandoned {
            QUARANTINED.fetch_sub(1, Ordering::Relaxed);
        }
        self.finished.notify_all();
    }

    /// Has the kernel read these ranges into the page cache, without waiting for them. A range left out costs the next
    /// load time, no more.
    fn fetch(&self, ranges: Vec<(u32, Range<u64>)>) {
        for (file, range) in ranges {
            let Ok(fd) = self.performer.files().open(file, false) else { return };
            fetch(fd.as_raw_fd(), range);
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::extent::Ticket;
    use crate::source::Destination;

    fn read(ticket: u64, into: &'static mut [u8; 8]) -> Read {
        let into = Destination::Memory(into.as_mut_ptr());
        let lane = Lane::BUFFERED;
        Read {
            ticket: Ticket(ticket),
            file: 0,
            offset: 8 * ticket,
            len: 8,
            need: 8,
            lane,
            into,
            fresh: false,
            written: 0,
            keep: Arc::new(()),
        }
    }

    fn pool(threads: usize, reads: u64, then: impl Fn(Threads) + Sync + Send + 'static) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"penstockpenstock").unwrap();
        let path = file.path().to_owned();
        loom::model(move || {
            let files = Arc::new(Files::from_paths(&[&path]).unwrap());
            let mut pool = Threads::new(files, threads, 8).unwrap();
            for ticket in 0..reads {
                // Leaked, 8 bytes a run: what a model leaves behind must not be freed under a thread.
                pool.submit(read(ticket, Box::leak(Box::new([0; 8])))).unwrap();
            }
            then(pool);
        });
    }

    fn await_all(pool: &mut Threads, reads: u64) {
        let mut done = Vec::new();
        while done.len() < reads as usize {
            pool.poll(&mut done).unwrap();
            if done.len() < reads as usize {
                pool.shared.wake.wait(-1);
            }
        }
        let ticket = |event: &Progress| match event {
            Progress::Arrived(ticket) | Progress::Received(ticket) => ticket.0,
            Progress::Refused { read, .. } => read.ticket.0,
            Progress::Done(done) => done.ticket.0,
        };
        let mut tickets: Vec<u64> = done.iter().map(ticket).collect();
        tickets.sort_unstable();
        assert_eq!(tickets, (0..reads).collect::<Vec<_>>(), "every ticket once");
        assert_eq!(pool.in_flight(), 0);
    }

    #[test]
    fn whoever_waits_for_two_reads_hears_of_both() {
        pool(2, 2, |mut pool| await_all(&mut pool, 2));
    }

    #[test]
    fn a_cancelled_queue_comes_back_whole() {
        pool(1, 2, |mut pool| {
            pool.cancel();
            await_all(&mut pool, 2);
        });
    }

    #[test]
    fn a_pool_that_is_dropped_at_work_ends_its_threads() {
        pool(2, 2, drop);
    }
}
