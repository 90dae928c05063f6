//! A pool of threads that read: the buffered and the mapped route, and O_DIRECT where io_uring is not used.
//!
//! Threads start as reads queue up and end with the load. A thread that hangs in the kernel (a network mount whose
//! server is gone cannot be interrupted) is left behind with its read. The read keeps the memory to which the kernel
//! may still write.

use super::fill::{fetch, Fill};
use super::rows::{RowReads, Why};
use super::touch::{Left, Touch, Touches, Untouched};
use super::{no_place, no_rows, Destination, Outcome, Progress, Read, Source, GRACE, QUARANTINED};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Lane;
use crate::fallback::Fallback;
use crate::machine::{block_signals, page_size};
use crate::rows::RowPlaces;
use crate::store::{read_fully, Files, FsKind, Stopped};
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::guarded;
use crate::timeline::{Span, Timeline, Track};
use crate::wake::Wake;
use crate::way::Routing;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Where bytes go that are not wanted. It stays in the processor's cache. A longer gap takes it several times.
const SCRATCH: usize = 64 << 10;
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
    files: Arc<Files>,
    state: Mutex<PoolState>,
    /// A read was queued, or the pool closes.
    work: Condvar,
    /// A read has finished or a thread has ended.
    finished: Condvar,
    wake: Wake,
    /// RWF_DONTCACHE was refused once.
    no_uncached: AtomicBool,
    /// MADV_POPULATE_READ was refused once.
    no_populate: AtomicBool,
    /// Touches the pages that were populated.
    touch: Touch,
    /// What brings cold bytes into the page cache before they are read through it.
    fill: Fill,
    /// Where reads are recorded, if they are.
    timeline: Option<Arc<Timeline>>,
}

#[derive(Default)]
struct PoolState {
    queue: VecDeque<(Read, How)>,
    /// What is to be read into the page cache at the end.
    last: Vec<(u32, Range<u64>)>,
    done: Vec<Outcome>,
    fallbacks: Vec<Fallback>,
    /// Resident pages that are left to their first touch.
    left: Vec<Left>,
    /// `wake` was raised and not lowered since: one write for however many completions.
    raised: bool,
    /// Threads alive, waiting for work, reading.
    threads: usize,
    idle: usize,
    reading: usize,
    /// Who waits for `finished`. To notify is a system call, whether anybody waits or not.
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

/// How a thread performs a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Buffered,
    /// Through the page cache, leaving nothing behind in it (RWF_DONTCACHE, 6.14): for O_DIRECT refused.
    Uncached,
    Mapped,
    Direct,
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
            no_uncached: AtomicBool::new(false),
            no_populate: AtomicBool::new(false),
            touch: Touch::new(),
            fill: Fill::new(routing.clone()),
            timeline: timeline.cloned(),
            files,
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

    /// What reads ranges into the page cache when all is done.
    pub(super) fn late(&self) -> ReadAhead {
        ReadAhead(self.shared.clone())
    }

    /// Threads started so far.
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
            let result = self.shared.recorded(&read, 0, || self.shared.perform(&read, way, &mut tools));
            let outcome = self.shared.outcome(read, result, tools.written);
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
                        let done = read.done(&self.shared.files, Err(e));
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
pub(super) struct ReadAhead(Arc<PoolShared>);

impl ReadAhead {
    pub(super) fn fetch(&self, ranges: impl IntoIterator<Item = (u32, Range<u64>)>) {
        lock(&self.0.state).last.extend(ranges);
    }
}

impl Source for Threads {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let way = match read.route {
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
        events.extend(out.into_iter().map(|o| Progress::Done(o.into_done(&self.shared.files))));
        Ok(())
    }

    fn cancel(&mut self) {
        self.cancelled.get_or_insert_with(Instant::now);
        let mut state = lock(&self.shared.state);
        state.last.clear();
        while let Some((read, _)) = state.queue.pop_front() {
            let done = read.cancelled(&self.shared.files);
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
        let left = std::mem::take(&mut lock(&self.shared.state).left);
        self.shared.touch.take(&left)
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        std::mem::take(&mut lock(&self.shared.state).fallbacks)
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

    fn fell_back(&self, fallback: Fallback) {
        lock(&self.state).fallbacks.push(fallback);
    }

    /// Does a read, which goes down in the record, if there is one, as done by thread `number`.
    fn recorded<T>(&self, read: &Read, number: u32, perform: impl FnOnce() -> T) -> T {
        let Some(timeline) = &self.timeline else { return perform() };
        let begun = Instant::now();
        let result = perform();
        let span = Span::new(Track::Reader(number), "read", begun, Instant::now());
        timeline.add(span.of_read(read.ticket, read.route, (read.file, read.offset), read.len));
        result
    }

    /// What thread `number` does.
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
            let perform = || guarded("penstock-read", || self.perform(&read, way, &mut tools));
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
            let outcome = self.outcome(read, result, tools.written);
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

    /// Has the kernel read these ranges into the page cache, without waiting for them. What is not taken is lost time in
    /// the next load, no more.
    fn fetch(&self, ranges: Vec<(u32, Range<u64>)>) {
        for (file, range) in ranges {
            let Ok(fd) = self.files.open(file, false) else { return };
            fetch(fd.as_raw_fd(), range);
        }
    }

    /// The outcome of a read that may have written so many bytes.
    fn outcome(&self, mut read: Read, result: Result<u64, Failure>, written: u64) -> Outcome {
        read.written = read.written.max(written);
        match result {
            Ok(got) => Outcome::Done(read.done(&self.files, Ok(got))),
            Err(Failure::Error(e)) => Outcome::Done(read.done(&self.files, Err(e))),
            Err(Failure::Refused(cause)) => Outcome::Refused { read, cause },
        }
    }

    fn perform(&self, read: &Read, way: How, tools: &mut Tools) -> Result<u64, Failure> {
        tools.written = 0;
        match (way, &read.into) {
            (How::Mapped, Destination::Mapping { at, resident }) => self.map(read, *at, *resident, tools),
            (How::Buffered, Destination::Rows { gap, rows }) => self.read_rows(read, rows, *gap, tools),
            (How::Buffered, _) => {
                if let Some(fallback) = self.fill.before(&self.files, read) {
                    self.fell_back(fallback);
                }
                self.read(read, 0, tools)
            }
            (How::Uncached, _) => self.read_uncached(read, tools),
            (How::Direct, Destination::Memory(at)) => {
                // The disk may write before a part of such a read fails.
                tools.written = read.len;
                self.read_direct(read, *at)
            }
            _ => Err(Error::new(ErrorKind::Internal, "a read's route and destination do not go together").into()),
        }
    }

    fn read(&self, read: &Read, flags: i32, tools: &mut Tools) -> Result<u64, Failure> {
        let fd = tools.descriptor(&self.files, read.file)?;
        if flags != 0 {
            // What the kernel reads ahead for one thread another may have read and dropped already: of 6 MiB read by eight
            // threads up to 2 stayed. Reads as long as extents need none.
            advise(&fd, libc::POSIX_FADV_RANDOM);
        }
        tools.aim(read)?;
        // SAFETY: the read's places are valid while `keep` is held (invariant 5), and scratch is this thread's own.
        let got =
            unsafe { read_fully(fd.as_raw_fd(), read.offset, &mut tools.places, flags, self.files.most_per_call()) };
        let written = match &got {
            Ok(got) => *got,
            Err(stopped) if self.files.errors_write_nothing(read.file) => stopped.got,
            Err(stopped) => stopped.got + stopped.asked,
        };
        tools.written = tools.written.max(written);
        match got {
            Ok(got) => Ok(read.ended(got)?),
            Err(stopped) if flags != 0 => {
                advise(&fd, libc::POSIX_FADV_NORMAL);
                Err(Failure::Refused(stopped.cause))
            }
            Err(stopped) => Err(Error::io("read", &stopped.cause).into()),
        }
    }

    fn read_rows(&self, read: &Read, rows: &[RowPlaces], gap: u64, tools: &mut Tools) -> Result<u64, Failure> {
        let fd = tools.descriptor(&self.files, read.file)?;
        let places = RowReads { rows, gap, scratch: &mut tools.window };
        // SAFETY: the rows' places are valid while `keep` is held (invariant 5).
        let outcome = unsafe { places.fill(fd.as_raw_fd(), read.offset, self.files.most_per_call()) };
        tools.written = outcome.reached.max(outcome.begun);
        match outcome.stopped {
            None => Ok(outcome.reached),
            // The last row is wanted too, so this is an error. The file may end before the row that is missing begins.
            Some(Why::Ended) => {
                let size = fd.try_clone().and_then(|fd| std::fs::File::from(fd).metadata());
                let there = size.map_or(outcome.reached, |size| size.len().saturating_sub(read.offset));
                Ok(read.ended(there.min(outcome.reached))?)
            }
            Some(Why::Failed(cause, asked)) => {
                tools.written += if self.files.errors_write_nothing(read.file) { 0 } else { asked };
                Err(Error::io("read", &cause).into())
            }
        }
    }

    fn read_uncached(&self, read: &Read, tools: &mut Tools) -> Result<u64, Failure> {
        if !self.no_uncached.load(Ordering::Relaxed) {
            match self.read(read, libc::RWF_DONTCACHE, tools) {
                Err(Failure::Refused(e)) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
                    if !self.no_uncached.swap(true, Ordering::Relaxed) {
                        let reason = format!("{}: preadv2: {e}", self.files.path(read.file).display());
                        self.fell_back(Fallback { from: "RWF_DONTCACHE", to: "page cache", reason });
                    }
                }
                Err(Failure::Refused(e)) => return Err(Error::io("read", &e).into()),
                other => return other,
            }
        }
        self.read(read, 0, tools)
    }

    fn read_direct(&self, read: &Read, at: *mut u8) -> Result<u64, Failure> {
        let fd = match self.files.open(read.file, true) {
            Err(e) if refuses_direct(e.errno()) => {
                return Err(Failure::Refused(io::Error::from_raw_os_error(e.errno().unwrap_or(libc::EINVAL))))
            }
            fd => fd?,
        };
        let mut to = [libc::iovec { iov_base: at.cast(), iov_len: read.len as usize }];
        // SAFETY: `len` bytes from `at` on are valid while `keep` is held (invariant 5).
        let got = unsafe { read_fully(fd.as_raw_fd(), read.offset, &mut to, 0, self.files.most_per_call()) };
        match got {
            Ok(got) => Ok(read.ended(got)?),
            Err(Stopped { cause, .. }) if refuses_direct(cause.raw_os_error()) => {
                self.finish_tail(read, at, &to[0], cause)
            }
            Err(Stopped { cause, .. }) => Err(Error::io("read", &cause).into()),
        }
    }

    /// A read that stops at an odd byte (the end of the file, nearly always) cannot go on with O_DIRECT.
    fn finish_tail(&self, read: &Read, at: *mut u8, left: &libc::iovec, refused: io::Error) -> Result<u64, Failure> {
        let got = left.iov_base as u64 - at as u64;
        if got == 0 {
            return Err(Failure::Refused(refused));
        }
        if got >= read.need {
            return Ok(got);
        }
        let fd = self.files.open(read.file, false)?;
        let mut to = [*left];
        // SAFETY: what is left of the read's memory.
        let more = unsafe { read_fully(fd.as_raw_fd(), read.offset + got, &mut to, 0, self.files.most_per_call()) };
        Ok(read.ended(got + more.map_err(|e| Error::io("read", &e.cause))?)?)
    }

    /// Brings the pages under `len` bytes at `at` into the mapping, and reports what would be SIGBUS on first touch.
    ///
    /// Resident pages are left to their first touch. It costs as much as populating them (1 ms/GiB in huge pages, 100 in
    /// small ones), and pages that are never touched cost nothing.
    fn map(&self, read: &Read, at: *mut u8, resident: bool, tools: &mut Tools) -> Result<u64, Failure> {
        // Pages wholly past the end cannot be populated; what is wanted must not need them.
        let got = read.len.min(self.files.size(read.file).saturating_sub(read.offset));
        read.ended(got)?;
        if resident {
            let mapping = Arc::downgrade(&read.keep);
            lock(&self.state).left.push(Left { at: at as usize, len: got as usize, mapping });
        } else if got > 0 {
            let page = page_size() as usize;
            let pages = at as usize / page * page..(at as usize + got as usize).next_multiple_of(page);
            // On a network file system the kernel's own read-ahead may be what makes a server fast.
            let is_local = self.files.facts(read.file)?.kind == FsKind::Local;
            let populates = !self.no_populate.load(Ordering::Relaxed);
            let small = is_local && populates && self.touch.wants_small_pages(got);
            if small {
                let fd = self.files.open(read.file, false)?;
                fetch(fd.as_raw_fd(), read.offset..read.offset + got);
            } else {
                self.fill.fetch_ends(&self.files, read, got);
            }
            if self.populate(read, pages.clone(), tools)? {
                self.touch(read, pages, !small, tools)?;
            }
        }
        Ok(got)
    }

    /// Touches pages that were populated: see `touch`.
    fn touch(&self, read: &Read, pages: Range<usize>, huge: bool, tools: &mut Tools) -> Result<(), Failure> {
        match self.touch.populated(pages, huge, &mut tools.places) {
            Ok(()) => Ok(()),
            Err(Untouched::Refused(e)) => {
                let reason = format!("process_vm_readv: {e}");
                self.fell_back(Fallback { from: "touching populated pages", to: "first use", reason });
                Ok(())
            }
            Err(Untouched::Lost(e)) => Err(self.lost(read, &e, tools)),
        }
    }

    /// A page of a mapping could not be had: the file shrank, or the disk failed. Reading tells which.
    fn lost(&self, read: &Read, cause: &io::Error, tools: &mut Tools) -> Failure {
        let looked = self.files.verify_file(read.file).map_err(Failure::from);
        match looked.and_then(|()| self.read_through(read, tools)) {
            Err(failure) => failure,
            Ok(_) => Error::io("populate the mapping of the file", cause).into(),
        }
    }

    /// Populates pages of the mapping of `read`. Where this kernel cannot, all of the read is in the page cache afterwards,
    /// and the answer is false.
    fn populate(&self, read: &Read, pages: Range<usize>, tools: &mut Tools) -> Result<bool, Failure> {
        while !self.no_populate.load(Ordering::Relaxed) {
            // SAFETY: populating neither moves nor changes memory; the caller says that the range is mapped, and a
            // range that is not is ENOMEM.
            if unsafe { libc::madvise(pages.start as *mut libc::c_void, pages.len(), libc::MADV_POPULATE_READ) } == 0 {
                return Ok(true);
            }
            let e = io::Error::last_os_error();
            match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Before 5.14; or a sandbox that knows no such advice.
                Some(libc::EINVAL | libc::EPERM | libc::ENOSYS) => {
                    if !self.no_populate.swap(true, Ordering::Relaxed) {
                        let reason = format!("madvise: {e}");
                        self.fell_back(Fallback { from: "MADV_POPULATE_READ", to: "pread", reason });
                    }
                }
                Some(libc::EFAULT) => return Err(self.lost(read, &e, tools)),
                _ => return Err(Error::io("populate the mapping of the file", &e).into()),
            }
        }
        // The page cache holds the bytes then and a first touch is a minor fault; touching the pages here instead could
        // kill the process (SIGBUS).
        self.read_through(read, tools)?;
        Ok(false)
    }

    fn read_through(&self, read: &Read, tools: &mut Tools) -> Result<u64, Failure> {
        let len = read.len.min(self.files.size(read.file).saturating_sub(read.offset));
        let fd = self.files.open(read.file, false)?;
        tools.places.clear();
        tools.discard(len as usize);
        // SAFETY: every place is this thread's scratch.
        let got = unsafe { read_fully(fd.as_raw_fd(), read.offset, &mut tools.places, 0, self.files.most_per_call()) };
        Ok(read.ended(got.map_err(|e| Error::io("read", &e.cause))?)?)
    }
}

/// Tells the kernel how a file is going to be read. That is advice, and nothing is lost where it is not taken.
fn advise(fd: &OwnedFd, how: i32) {
    // SAFETY: a plain system call on a descriptor we hold.
    let _ignored = unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, how) };
}

enum Failure {
    Error(Error),
    Refused(io::Error),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::Error(e)
    }
}

/// What a thread keeps from read to read.
#[derive(Default)]
struct Tools {
    places: Vec<libc::iovec>,
    scratch: Vec<u8>,
    /// Where short rows arrive with the gaps between them.
    window: Vec<u8>,
    /// Bytes from the first on that the read in hand may have written to its place.
    written: u64,
    /// The descriptor of a file that this thread alone reads through, where one for all is not enough.
    own: Option<(u32, Arc<OwnedFd>)>,
}

impl Tools {
    /// The descriptor to read file number `file` through.
    fn descriptor(&mut self, files: &Files, file: u32) -> Result<Arc<OwnedFd>> {
        if !files.reads_ahead_by_descriptor(file) {
            return files.open(file, false);
        }
        if let Some((_, own)) = self.own.as_ref().filter(|(of, _)| *of == file) {
            return Ok(own.clone());
        }
        self.own = None;
        match files.open_own(file) {
            // Of a few descriptors, one for all is better than none.
            Err(e) if e.kind() == ErrorKind::Limit => files.open(file, false),
            own => Ok(self.own.insert((file, own?)).1.clone()),
        }
    }

    /// Makes `places` what `read` wants filled.
    fn aim(&mut self, read: &Read) -> Result<()> {
        self.places.clear();
        match &read.into {
            Destination::Memory(at) => {
                self.places.push(libc::iovec { iov_base: at.cast(), iov_len: read.len as usize });
            }
            Destination::Scatter(to) => {
                for &(at, len) in to {
                    if at.is_null() {
                        self.discard(len);
                    } else {
                        self.places.push(libc::iovec { iov_base: at.cast(), iov_len: len });
                    }
                }
            }
            Destination::Mapping { .. } => {
                return Err(Error::new(ErrorKind::Internal, "a mapping is populated, not read into"))
            }
            Destination::Rows { .. } => return Err(no_rows()),
            Destination::OnArrival => return Err(no_place()),
        }
        Ok(())
    }

    fn discard(&mut self, mut len: usize) {
        self.scratch.resize(SCRATCH, 0);
        while len > 0 {
            let step = len.min(SCRATCH);
            self.places.push(libc::iovec { iov_base: self.scratch.as_mut_ptr().cast(), iov_len: step });
            len -= step;
        }
    }
}

/// Errors by which a file system says that it does not do O_DIRECT, or not so.
pub(super) fn refuses_direct(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTTY))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::extent::Ticket;
    use crate::memory::Mapping;

    /// Populated, then cut short, then touched: by itself that is a race that nobody wins twice.
    #[test]
    fn a_file_that_shrinks_between_populating_and_touching_is_changed_and_no_signal() {
        const LEN: u64 = 64 * 4096;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEN).unwrap();
        let files = Arc::new(Files::from_paths(&[file.path()]).unwrap());
        let pool = Threads::new(files, 1, 1).unwrap();
        let mapping = Arc::new(Mapping::new(file.as_file(), LEN).unwrap());
        let at = mapping.at();
        let into = Destination::Mapping { at, resident: false };
        let (ticket, route) = (Ticket(0), Lane::MAPPED);
        let read = Read {
            ticket,
            file: 0,
            offset: 0,
            len: LEN,
            need: LEN,
            route,
            into,
            fresh: false,
            written: 0,
            keep: mapping,
        };
        let pages = at as usize..at as usize + LEN as usize;
        let mut tools = Tools::default();
        let populated = pool.shared.populate(&read, pages.clone(), &mut tools);
        if !matches!(populated, Ok(true)) {
            return; // before Linux 5.14
        }
        assert!(pool.shared.touch(&read, pages.clone(), true, &mut tools).is_ok());
        // The first pages are touched always.
        file.as_file().set_len(LEN / 16).unwrap();
        match pool.shared.touch(&read, pages, true, &mut tools) {
            Err(Failure::Error(e)) => assert_eq!(e.kind(), ErrorKind::Changed),
            Err(Failure::Refused(e)) => panic!("refused: {e}"),
            Ok(()) => panic!("pages that are gone were touched"),
        }
    }

    /// Every touch counts as slow here. The first reads come in huge pages and the others in small ones.
    #[test]
    fn after_slow_touches_reads_request_small_pages_and_bring_the_right_bytes() {
        const EACH: u64 = 4 << 20;
        let bytes: Vec<u8> = (0..12 * EACH as usize + 5000).map(|i| (i / 4096 % 251) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        file.as_file().sync_all().unwrap();
        // SAFETY: a plain system call on a descriptor that is open.
        let evicted = unsafe { libc::posix_fadvise(file.as_file().as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        assert_eq!(evicted, 0);
        let files = Arc::new(Files::from_paths(&[file.path()]).unwrap());
        let mut pool = Threads::new(files, 1, 1).unwrap();
        Arc::get_mut(&mut pool.shared).unwrap().touch = Touch::worth(Duration::ZERO);
        let mapping = Arc::new(Mapping::new(file.as_file(), bytes.len() as u64).unwrap());
        let mut tools = Tools::default();
        for offset in (0..bytes.len() as u64).step_by(EACH as usize) {
            // SAFETY: the mapping is as long as the file.
            let at = unsafe { mapping.at().add(offset as usize) };
            let (len, into) = (EACH.min(bytes.len() as u64 - offset), Destination::Mapping { at, resident: false });
            let (ticket, route, keep) = (Ticket(offset), Lane::MAPPED, mapping.clone());
            let read = Read { ticket, file: 0, offset, len, need: len, route, into, fresh: false, written: 0, keep };
            assert!(matches!(pool.shared.map(&read, at, false, &mut tools), Ok(got) if got == len));
        }
        // SAFETY: as above, and nobody writes to the file.
        assert!(unsafe { std::slice::from_raw_parts(mapping.at(), bytes.len()) } == bytes);
        if !pool.shared.no_populate.load(Ordering::Relaxed) {
            assert!(pool.shared.touch.wants_small_pages(EACH));
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::extent::Ticket;

    fn read(ticket: u64, into: &'static mut [u8; 8]) -> Read {
        let into = Destination::Memory(into.as_mut_ptr());
        let route = Lane::BUFFERED;
        Read {
            ticket: Ticket(ticket),
            file: 0,
            offset: 8 * ticket,
            len: 8,
            need: 8,
            route,
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
