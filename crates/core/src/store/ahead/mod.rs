//! Reads of one tensor, or a part of one, at a time from file systems that answer late.
//!
//! A load that reads one tensor costs an open, some questions and a request, and waits for each. Here descriptors stay
//! open ([`Kept`]), and what a caller will ask for next is read before it does: in the order that it shows ([`order`]),
//! within a limit of bytes ([`window`]). Threads read blocks of 256 KiB, several at once. A caller waits for its own
//! blocks and copies out of them; long ranges are read to where they belong. So no thread but these waits in the kernel,
//! and every wait of a caller ends.
//!
//! A file is compared with its identity when it is opened, once for each window that was read, and before bytes are handed
//! out that were read more than a moment ago.

mod order;
mod window;

use self::window::{Place, Stage, Window, BLOCK};
use super::kept::Kept;
use super::per_process::PerProcess;
use super::pread::{read_fully, Stopped, MOST_PER_CALL};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Single;
use crate::options::MIB;
use crate::sync::{lock, Builder, Condvar, Mutex, MutexGuard};
use crate::threads::guarded;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Contiguous bytes from here on are read to where they belong; the blocks that are there already are used.
const LONG: u64 = 512 << 10;
/// The longest read of those.
const LONGEST: u64 = MIB;
/// Reads at once.
const MOST_THREADS: usize = 32;
/// An idle thread ends after this time.
const IDLE: Duration = Duration::from_millis(200);
/// A queue that waits so long gets one more thread.
const SLOW: Duration = Duration::from_micros(300);
/// The caller looks this often whether to go on.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes that are read between two looks at a file, at least; more where more is read ahead.
const LOOK_BYTES: u64 = MIB;
/// A look at a file is good for so long: for a read that a caller waits for, and for bytes that are there.
const FRESH_READ: Duration = Duration::from_millis(20);
const FRESH_BYTES: Duration = Duration::from_millis(100);
/// Parts of a file that one request may have: copying more of them is as slow as a load.
const MOST_PARTS: u64 = 1 << 18;
const STACK: usize = 256 << 10;

/// A part of a file that is wanted, ascending: `offset`, `len`, and where it goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) to: u64,
}

/// Reads of one handle. Threads may share it. It belongs to the process that made it.
pub(crate) struct Ahead(Arc<Shared>);

struct Shared {
    kept: Arc<Kept>,
    stall: Duration,
    most_threads: usize,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
}

struct State {
    window: Window,
    /// What callers wait for, and what is read ahead.
    wanted: VecDeque<Job>,
    ahead: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Jobs that are done: what changes while the storage answers.
    answers: u64,
    looked: HashMap<u32, Looked>,
    /// Nothing is kept any more: descriptors are closed and threads end when there is nothing to do.
    released: bool,
}

/// The last comparison of a file with its identity, and the bytes that were read since.
struct Looked {
    at: Instant,
    bytes: u64,
}

struct Job {
    what: What,
    since: Instant,
}

enum What {
    Block(Place),
    Direct(Arc<Ticket>, Part, u32),
    Look(Arc<Ticket>, u32),
}

/// Reads to memory of a caller, which waits for them.
struct Ticket {
    memory: Option<Arc<Single>>,
    left: AtomicUsize,
    given_up: AtomicBool,
    failed: Mutex<Option<Error>>,
}

impl Ticket {
    fn new(memory: Option<Arc<Single>>, left: usize) -> Arc<Ticket> {
        Arc::new(Ticket { memory, left: left.into(), given_up: false.into(), failed: Mutex::new(None) })
    }
}

/// The handles of the process whose threads may have to end before a fork.
static RUNNING: PerProcess<Mutex<Vec<Weak<Shared>>>> = PerProcess::new();

impl Ahead {
    /// Reads of these files. `most`: bytes of blocks. `threads`: reads at once; 0: as many as are of use. `stall`: how long
    /// no answer counts as a file system that hangs.
    pub(crate) fn new(kept: Arc<Kept>, most: u64, threads: u32, stall: Duration) -> Ahead {
        let state = State {
            window: Window::new(most),
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            threads: 0,
            idle: 0,
            answers: 0,
            looked: HashMap::new(),
            released: false,
        };
        let most_threads = if threads == 0 { MOST_THREADS } else { (threads as usize).min(MOST_THREADS) };
        let (work, done) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { kept, stall, most_threads, state: Mutex::new(state), work, done });
        let mut running = lock(RUNNING.get());
        running.retain(|one| one.strong_count() > 0);
        running.push(Arc::downgrade(&shared));
        Ahead(shared)
    }

    /// Bytes of blocks that were read ahead, or are about to be.
    pub(crate) fn held(&self) -> u64 {
        lock(&self.0.state).window.held()
    }

    /// Lets go of the blocks and of the descriptors. Later requests read nothing ahead.
    pub(crate) fn release(&self) {
        let mut state = lock(&self.0.state);
        state.released = true;
        state.ahead.clear();
        state.window.clear(None);
        drop(state);
        self.0.work.notify_all();
        self.0.kept.close_all();
    }

    /// The bytes of these parts of a file, one after the other, in memory of their own. `data`: where the tensors of the file
    /// are. `None`: they are too many for this.
    ///
    /// # Errors
    /// Those of opening and reading; `Changed`; `Timeout` if nothing is answered for long; `Cancelled` if `go_on` says no.
    pub(crate) fn fetch(
        &self,
        file: u32,
        parts: impl Iterator<Item = Part> + Clone,
        nbytes: u64,
        data: Range<u64>,
        go_on: &mut (dyn FnMut() -> bool + Send),
    ) -> Result<Option<Arc<Single>>> {
        let mut asked = Asked::new(&self.0, file, nbytes, data)?;
        if nbytes == 0 {
            return Ok(Some(asked.memory));
        }
        if !asked.plan(parts.clone())? {
            return Ok(None);
        }
        let waited = asked.wait(go_on);
        let state = lock(&self.0.state);
        let taken = asked.take(state, waited.is_ok());
        waited.and(taken)?;
        asked.copy(parts);
        let mut state = lock(&self.0.state);
        if state.released {
            state.window.clear(Some(file));
            drop(state);
            self.0.kept.close(file);
        }
        Ok(Some(asked.memory))
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.release();
    }
}

/// One request of a caller.
struct Asked<'s> {
    shared: &'s Arc<Shared>,
    file: u32,
    size: u64,
    nbytes: u64,
    data: Range<u64>,
    memory: Arc<Single>,
    /// The blocks that it copies from, ascending, with the bytes that it takes of each, and the memory of those that are
    /// there.
    blocks: Vec<(u64, u64, Option<Arc<Single>>)>,
    /// What is read to where it belongs, ascending.
    direct: Vec<Part>,
    ticket: Option<Arc<Ticket>>,
    look: Option<Arc<Ticket>>,
}

impl<'s> Asked<'s> {
    fn new(shared: &'s Arc<Shared>, file: u32, nbytes: u64, data: Range<u64>) -> Result<Asked<'s>> {
        let size = shared.kept.files().size(file);
        let memory = Arc::new(Single::new(nbytes)?);
        let (blocks, direct) = (Vec::new(), Vec::new());
        Ok(Asked { shared, file, size, nbytes, data, memory, blocks, direct, ticket: None, look: None })
    }

    /// Finds out what is there, and has the rest read. `false`: it is too much for the window.
    fn plan(&mut self, parts: impl Iterator<Item = Part>) -> Result<bool> {
        let file = self.file;
        let mut state = lock(&self.shared.state);
        let (mut span, mut count) = (u64::MAX..0, 0);
        for part in parts {
            count += 1;
            span = span.start.min(part.offset)..span.end.max(part.offset + part.len);
            let is_long = part.len >= LONG;
            for number in part.offset / BLOCK..(part.offset + part.len).div_ceil(BLOCK) {
                let whole = number * BLOCK..((number + 1) * BLOCK).min(self.size);
                let (from, until) = (whole.start.max(part.offset), whole.end.min(part.offset + part.len));
                if is_long && until - from == whole.end - whole.start && !state.window.has((file, number)) {
                    self.add_direct(Part { offset: from, len: until - from, to: part.to + from - part.offset });
                    continue;
                }
                match self.blocks.last_mut() {
                    Some(last) if last.0 == number => last.1 += until - from,
                    _ => self.blocks.push((number, until - from, None)),
                }
            }
            if count > MOST_PARTS || self.blocks.len() as u64 * BLOCK > state.window.most / 2 {
                return Ok(false);
            }
        }
        self.enqueue(&mut state);
        if !state.released {
            let ahead = state.window.ahead(file, span, self.data.clone());
            let since = Instant::now();
            state.ahead.extend(ahead.into_iter().map(|place| Job { what: What::Block(place), since }));
        }
        self.shared.start_threads(state)
    }

    fn add_direct(&mut self, part: Part) {
        match self.direct.last_mut() {
            Some(last) if last.offset + last.len == part.offset && last.to + last.len == part.to => {
                last.len += part.len;
            }
            _ => self.direct.push(part),
        }
    }

    fn enqueue(&mut self, state: &mut State) {
        let (file, since) = (self.file, Instant::now());
        let mut waits = false;
        for (number, nbytes, memory) in &mut self.blocks {
            let place = (file, *number);
            let len = BLOCK.min(self.size - *number * BLOCK);
            if let Some(Stage::Here(there)) = state.window.get(place).map(|block| &block.stage) {
                *memory = Some(there.clone());
                state.window.give(place, *nbytes, len);
                continue;
            }
            waits = true;
            if state.window.want(place) {
                state.wanted.push_back(Job { what: What::Block(place), since });
            }
        }
        // A request of 1 MiB is in four hands, one of 64 MiB in all.
        let total: u64 = self.direct.iter().map(|part| part.len).sum();
        let step = (total / MOST_THREADS as u64).next_multiple_of(BLOCK).clamp(BLOCK, LONGEST);
        let pieces: Vec<Part> = self.direct.iter().flat_map(|part| cut(*part, step)).collect();
        if !pieces.is_empty() {
            waits = true;
            let ticket = Ticket::new(Some(self.memory.clone()), pieces.len());
            let job = |part| Job { what: What::Direct(ticket.clone(), part, file), since };
            state.wanted.extend(pieces.into_iter().map(job));
            self.ticket = Some(ticket);
        }
        let looked = state.looked.entry(file).or_insert(Looked { at: since, bytes: 0 });
        if !waits && looked.at.elapsed() >= FRESH_BYTES {
            *looked = Looked { at: since, bytes: 0 };
            let ticket = Ticket::new(None, 1);
            state.wanted.push_back(Job { what: What::Look(ticket.clone(), file), since });
            self.look = Some(ticket);
        }
    }

    /// Waits for all that is read for this request.
    fn wait(&self, go_on: &mut (dyn FnMut() -> bool + Send)) -> Result<()> {
        let mut state = lock(&self.shared.state);
        let (mut answers, mut moved) = (state.answers, Instant::now());
        loop {
            let tickets = || self.ticket.iter().chain(&self.look);
            if let Some(e) = tickets().find_map(|ticket| lock(&ticket.failed).clone()) {
                return Err(e);
            }
            let mut ready = tickets().all(|ticket| ticket.left.load(Ordering::Acquire) == 0);
            for (number, _, memory) in &self.blocks {
                if memory.is_some() {
                    continue;
                }
                match state.window.get((self.file, *number)).map(|block| &block.stage) {
                    Some(Stage::Here(_)) => {}
                    Some(Stage::Failed(e)) => return Err(e.clone()),
                    _ => ready = false,
                }
            }
            if ready {
                return Ok(());
            }
            let (guard, waited) =
                self.shared.done.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if state.answers != answers {
                (answers, moved) = (state.answers, Instant::now());
            }
            if moved.elapsed() >= self.shared.stall {
                return Err(self.stalled());
            }
            if waited.timed_out() {
                drop(state);
                if !go_on() {
                    return Err(Error::new(ErrorKind::Cancelled, "the read was cancelled"));
                }
                state = lock(&self.shared.state);
            }
        }
    }

    fn stalled(&self) -> Error {
        let first = self.blocks.iter().find(|block| block.2.is_none()).map(|block| block.0 * BLOCK);
        let first = first.into_iter().chain(self.direct.first().map(|part| part.offset)).min().unwrap_or(0);
        let text = format!(
            "the storage has not answered for {:.1} s; is its server stuck? (stall_timeout raises the limit)",
            self.shared.stall.as_secs_f64()
        );
        let error = Error::new(ErrorKind::Timeout, text).at(self.shared.kept.files().path(self.file));
        error.range(first..(first + self.nbytes).min(self.size))
    }

    /// Takes the blocks that it has waited for. A request that has failed waits for them no longer.
    fn take(&mut self, mut state: MutexGuard<'_, State>, all: bool) -> Result<()> {
        let mut gone = Ok(());
        for (number, nbytes, memory) in self.blocks.iter_mut().filter(|block| block.2.is_none()) {
            let place = (self.file, *number);
            state.window.unwant(place);
            match state.window.get(place).map(|block| &block.stage) {
                Some(Stage::Here(there)) if all => {
                    *memory = Some(there.clone());
                    let len = BLOCK.min(self.size - *number * BLOCK);
                    state.window.give(place, *nbytes, len);
                }
                _ if all => gone = Err(Error::new(ErrorKind::Internal, "a block that was read is gone")),
                _ => {}
            }
        }
        if !all {
            if let Some(ticket) = &self.ticket {
                ticket.given_up.store(true, Ordering::Relaxed);
            }
        }
        gone
    }

    /// Copies out of the blocks; what was read to its place is there.
    fn copy(&self, parts: impl Iterator<Item = Part>) {
        let mut at = 0;
        for part in parts {
            // From a block that the part before may have ended in.
            while self.blocks.get(at).is_some_and(|block| (block.0 + 1) * BLOCK <= part.offset) {
                at += 1;
            }
            let mut one = at;
            while let Some((number, _, Some(memory))) = self.blocks.get(one) {
                let whole = number * BLOCK..((number + 1) * BLOCK).min(self.size);
                let (from, until) = (whole.start.max(part.offset), whole.end.min(part.offset + part.len));
                if from >= until {
                    break;
                }
                debug_assert!(part.to + until - part.offset <= self.nbytes);
                // SAFETY: the block has the bytes of `whole`, and nobody writes to it any more. The memory has room for all
                // parts, and nobody else knows it but reads to other places in it, which are done.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        memory.at().add((from - whole.start) as usize),
                        self.memory.at().add((part.to + from - part.offset) as usize),
                        (until - from) as usize,
                    );
                }
                one += 1;
            }
        }
    }
}

/// The part in pieces of at most `step` bytes.
fn cut(part: Part, step: u64) -> impl Iterator<Item = Part> {
    (0..part.len.div_ceil(step)).map(move |number| {
        let from = number * step;
        Part { offset: part.offset + from, len: step.min(part.len - from), to: part.to + from }
    })
}

impl Shared {
    /// Wakes threads for what is queued, and starts some where these are too few.
    fn start_threads(self: &Arc<Self>, mut state: MutexGuard<'_, State>) -> Result<bool> {
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
                let text = format!("cannot start a thread to read with: {cause}");
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

    fn start_thread(self: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        let shared = self.clone();
        Builder::new().name("penstock-ahead".into()).stack_size(STACK).spawn(move || shared.work())?;
        state.threads += 1;
        Ok(())
    }

    fn work(self: Arc<Self>) {
        let mut state = lock(&self.state);
        loop {
            let Some(job) = state.wanted.pop_front().or_else(|| state.ahead.pop_front()) else {
                if state.released {
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

    fn perform<'a>(&'a self, job: Job, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        match job.what {
            What::Block(place) => {
                match state.window.get(place) {
                    Some(block) if matches!(block.stage, Stage::Queued) => block.stage = Stage::Reading,
                    _ => return state, // another thread has it, or nobody wants it any more
                }
                drop(state);
                let read = guarded("penstock-ahead", || self.read_block(place)).and_then(|read| read);
                let read = self.looked(place.0, BLOCK, read);
                let mut state = lock(&self.state);
                if let Some(block) = state.window.get(place) {
                    block.stage = match read {
                        Ok(memory) => Stage::Here(Arc::new(memory)),
                        Err(e) => Stage::Failed(e),
                    };
                }
                if state.released {
                    state.window.clear(None);
                }
                state
            }
            What::Direct(ticket, part, file) => {
                drop(state);
                if !ticket.given_up.load(Ordering::Relaxed) {
                    let read = guarded("penstock-ahead", || self.read_direct(&ticket, part, file)).and_then(|read| read);
                    self.end(&ticket, self.looked(file, part.len, read));
                }
                lock(&self.state)
            }
            What::Look(ticket, file) => {
                drop(state);
                let looked = guarded("penstock-ahead", || self.kept.files().verify_file(file)).and_then(|looked| looked);
                self.end(&ticket, self.forget_if_changed(file, looked));
                lock(&self.state)
            }
        }
    }

    fn end(&self, ticket: &Ticket, done: Result<()>) {
        if let Err(e) = done {
            lock(&ticket.failed).get_or_insert(e);
        }
        // Release: the caller reads the memory after it has seen the last one.
        ticket.left.fetch_sub(1, Ordering::Release);
    }

    /// A read of a file is over: looks at the file if it is time to.
    fn looked<T>(&self, file: u32, nbytes: u64, read: Result<T>) -> Result<T> {
        let due = {
            let mut state = lock(&self.state);
            let window = state.window.held().max(LOOK_BYTES);
            let looked = state.looked.entry(file).or_insert(Looked { at: Instant::now(), bytes: 0 });
            looked.bytes += nbytes;
            let due = looked.bytes >= window || looked.at.elapsed() >= FRESH_READ || read.is_err();
            if due {
                *looked = Looked { at: Instant::now(), bytes: 0 };
            }
            due
        };
        if !due {
            return read;
        }
        // What has changed is why a read failed, more often than not.
        match self.forget_if_changed(file, self.kept.files().verify_file(file)) {
            Err(e) if read.is_ok() || e.kind() == ErrorKind::Changed => Err(e),
            _ => read,
        }
    }

    /// Nothing of a file that has changed is handed out any more. The next request opens it, and says so too.
    fn forget_if_changed(&self, file: u32, looked: Result<()>) -> Result<()> {
        if looked.is_err() {
            let mut state = lock(&self.state);
            state.ahead.retain(|job| !matches!(job.what, What::Block(place) if place.0 == file));
            state.window.clear(Some(file));
            drop(state);
            self.kept.close(file);
        }
        looked
    }

    fn read_block(&self, (file, number): Place) -> Result<Single> {
        let range = number * BLOCK..((number + 1) * BLOCK).min(self.kept.files().size(file));
        let memory = Single::new(BLOCK)?;
        self.read(file, range, memory.at())?;
        Ok(memory)
    }

    fn read_direct(&self, ticket: &Ticket, part: Part, file: u32) -> Result<()> {
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
    let running: Vec<Arc<Shared>> = lock(RUNNING.get()).iter().filter_map(Weak::upgrade).collect();
    let until = Instant::now() + patience;
    for shared in running {
        let mut state = lock(&shared.state);
        if state.threads == 0 {
            continue;
        }
        let released = std::mem::replace(&mut state.released, true);
        state.ahead.clear();
        state.window.clear(None);
        shared.work.notify_all();
        while state.threads > 0 && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            state = shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.released = released;
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
