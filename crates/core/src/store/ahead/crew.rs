//! The threads that read: the only ones that wait in the kernel.

use super::blocks::{BlockId, BlockStage, BLOCK};
use super::queues::{Crew, FileRange, Job, LastLook, Queues, Receipt, Task, RUNNING};
use crate::error::{Error, ErrorKind, Result};
use crate::machine::block_signals;
use crate::memory::Buffer;
use crate::options::MIB;
use crate::store::pread::{read_fully, Stopped, MOST_PER_CALL};
use crate::sync::{lock, Builder, MutexGuard};
use crate::threads::guarded;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

/// An idle thread ends after this time.
const IDLE: Duration = Duration::from_millis(200);
/// A queue that waits so long gets one more thread.
const SLOW: Duration = Duration::from_micros(300);
/// Bytes that are read between two looks at a file, at least; more where more is read ahead.
const LOOK_BYTES: u64 = MIB;
/// A look at a file is good for so long, for a read that a caller waits for.
pub(super) const FRESH_READ: Duration = Duration::from_millis(20);
const STACK: usize = 256 << 10;

impl Crew {
    /// Wakes threads for what is queued, and starts some where these are too few.
    pub(super) fn start_threads(self: &Arc<Self>, mut state: MutexGuard<'_, Queues>) -> Result<bool> {
        let queued = state.wanted.len() + usize::from(!state.ahead.is_empty());
        let missing = queued.saturating_sub(state.idle).min(self.most_threads.saturating_sub(state.threads));
        for _ in 0..missing {
            if let Err(cause) = self.start_thread(&mut state) {
                if state.threads > 0 {
                    break; // Fewer do the work too.
                }
                state.wanted.clear();
                state.ahead.clear();
                state.window.clear(None);
                let text = format!("cannot start a read thread: {cause}");
                return Err(Error::new(ErrorKind::Limit, text));
            }
        }
        let (idle, queued) = (state.idle, state.wanted.len() + state.ahead.len());
        drop(state);
        match idle.min(queued) {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
        Ok(true)
    }

    fn start_thread(self: &Arc<Self>, state: &mut Queues) -> std::io::Result<()> {
        let shared = self.clone();
        Builder::new().name("penstock-ahead".into()).stack_size(STACK).spawn(move || shared.work())?;
        state.threads += 1;
        Ok(())
    }

    fn work(self: Arc<Self>) {
        block_signals();
        let mut state = lock(&self.state);
        loop {
            let Some(job) = state.wanted.pop_front().or_else(|| state.ahead.pop_front()) else {
                if state.is_ending() {
                    break;
                }
                state.idle += 1;
                let (guard, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = guard;
                state.idle -= 1;
                if waited.timed_out() && state.wanted.is_empty() && state.ahead.is_empty() {
                    break;
                }
                continue;
            };
            // Storage that answers at once needs no more threads.
            let queued = !state.wanted.is_empty() || !state.ahead.is_empty();
            if queued && state.idle == 0 && state.threads < self.most_threads && job.since.elapsed() >= SLOW {
                let _fewer_do = self.start_thread(&mut state);
            }
            state = self.perform(job, state);
            state.answers += 1;
            self.done.notify_all();
        }
        state.threads -= 1;
        drop(state);
        self.done.notify_all();
    }

    fn perform<'a>(&'a self, job: Job, mut state: MutexGuard<'a, Queues>) -> MutexGuard<'a, Queues> {
        match job.what {
            Task::Block(place) => {
                match state.window.get(place) {
                    Some(block) if matches!(block.stage, BlockStage::Queued) => block.stage = BlockStage::Reading,
                    _ => return state, // another thread has it, or nobody wants it any more
                }
                drop(state);
                let read = || self.looked(place.0, BLOCK, self.read_block(place));
                let read = guarded("penstock-ahead", read).and_then(|read| read);
                let mut state = lock(&self.state);
                if let Some(block) = state.window.get(place) {
                    block.stage = match read {
                        Ok(memory) => BlockStage::Here(Arc::new(memory)),
                        Err(e) => BlockStage::Failed(e),
                    };
                }
                if state.is_ending() {
                    state.window.clear(None);
                }
                self.close_if_released(place.0, state)
            }
            Task::Direct(ticket, part, file) => {
                drop(state);
                if !ticket.given_up.load(Ordering::Relaxed) {
                    ticket.begin();
                    let read = || self.looked(file, part.len, self.read_direct(&ticket, part, file));
                    ticket.end(guarded("penstock-ahead", read).and_then(|read| read));
                }
                self.close_if_released(file, lock(&self.state))
            }
            Task::Look(ticket, file) => {
                drop(state);
                ticket.begin();
                ticket.end(guarded("penstock-ahead", || self.look(file)).and_then(|looked| looked));
                lock(&self.state)
            }
        }
    }

    /// Closes a file that was opened after the release, for a caller that waits no longer.
    fn close_if_released<'a>(&'a self, file: u32, state: MutexGuard<'a, Queues>) -> MutexGuard<'a, Queues> {
        if !state.released || state.callers > 0 {
            return state;
        }
        drop(state);
        self.kept.close(file);
        lock(&self.state)
    }

    /// A read of a file is over: looks at the file if it is time to.
    fn looked<T>(&self, file: u32, nbytes: u64, read: Result<T>) -> Result<T> {
        let due = {
            let mut state = lock(&self.state);
            let window = state.window.held().max(LOOK_BYTES);
            let looked = state.looked.entry(file).or_insert(LastLook::now(false));
            looked.bytes += nbytes;
            // Until a look is answered, others are due too: nobody knows yet what it finds.
            looked.changed || looked.bytes >= window || looked.at.elapsed() >= FRESH_READ || read.is_err()
        };
        if !due {
            return read;
        }
        // What has changed is why a read failed, more often than not.
        match self.look(file) {
            Err(e) if read.is_ok() || e.kind() == ErrorKind::Changed => Err(e),
            _ => read,
        }
    }

    /// Compares a file with its identity. Nothing of a file that has changed is handed out any more. The next request opens
    /// it, and says so too.
    fn look(&self, file: u32) -> Result<()> {
        let began = Instant::now();
        let looked = self.look_at(file);
        let mut state = lock(&self.state);
        let last = state.looked.entry(file).or_insert(LastLook::now(false));
        // A look that began before another one found a change says nothing of it.
        let is_late = looked.is_ok() && last.changed && began < last.at;
        if !is_late {
            *last = LastLook::now(looked.is_err());
        }
        if looked.is_err() {
            state.ahead.retain(|job| !matches!(job.what, Task::Block(place) if place.0 == file));
            state.window.clear(Some(file));
            drop(state);
            self.kept.close(file);
        }
        looked
    }

    fn read_block(&self, (file, number): BlockId) -> Result<Buffer> {
        let range = number * BLOCK..((number + 1) * BLOCK).min(self.kept.files().size(file));
        let memory = Buffer::new(BLOCK)?;
        self.read(file, range, memory.at())?;
        Ok(memory)
    }

    fn read_direct(&self, ticket: &Receipt, part: FileRange, file: u32) -> Result<()> {
        let Some(memory) = &ticket.memory else { return Ok(()) };
        // SAFETY: the part is within the memory.
        let to = unsafe { memory.at().add(part.to as usize) };
        self.read(file, part.offset..part.offset + part.len, to)
    }

    /// Reads a range of a file to `to`, which has room for it and which nobody else uses.
    fn read(&self, file: u32, range: Range<u64>, to: *mut u8) -> Result<()> {
        let path = self.kept.files().path(file);
        let fd = self.kept.open_for_stretches(file)?;
        let mut places = [libc::iovec { iov_base: to.cast(), iov_len: (range.end - range.start) as usize }];
        // SAFETY: the caller vouches for the place.
        match unsafe { read_fully(fd.as_raw_fd(), range.start, &mut places, 0, MOST_PER_CALL) } {
            Ok(got) if got == range.end - range.start => Ok(()),
            Ok(got) => {
                let text = format!("the file ends at byte {}, in the middle of a read", range.start + got);
                let error = Error::new(ErrorKind::Truncated, text).with_values(range.end, range.start + got);
                Err(error.at(path).range(range))
            }
            Err(Stopped { cause, .. }) => Err(Error::io("read", &cause).at(path).range(range)),
        }
    }
}

/// Ends the threads that read ahead and waits for them, at most `patience`: before a fork.
pub fn stop_reading_ahead(patience: Duration) {
    let running: Vec<Arc<Crew>> = lock(RUNNING.get()).iter().filter_map(Weak::upgrade).collect();
    let until = Instant::now() + patience;
    for shared in running {
        let mut state = lock(&shared.state);
        if state.threads == 0 {
            continue;
        }
        state.stopping += 1;
        state.ahead.clear();
        state.window.clear(None);
        shared.work.notify_all();
        while state.threads > 0 && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            state = shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.stopping -= 1;
    }
}
