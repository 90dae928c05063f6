//! The source of a load. Each read goes by its route. If the kernel refuses one way, the router finds another during
//! the load.
//!
//! | route | goes | if that is refused |
//! |---|---|---|
//! | mapped, buffered | pool of threads | |
//! | buffered, if `io` asks for io_uring | io_uring without O_DIRECT | pool of threads |
//! | direct, if the trial of the storage's pace goes through the page cache (`trial`) | pool of threads, through it | |
//! | buffered, if nothing may stay in the page cache | pool of threads (RWF_DONTCACHE) | the page cache |
//! | direct | io_uring | Linux AIO, then the pool of threads |
//! | direct, on a network file system | pool of threads: opening and submitting can hang there | |
//! | direct, if the file refuses O_DIRECT | pool of threads through the page cache (RWF_DONTCACHE if there is) | |
//!
//! Each fallback is kept once for each cause and file system, for the log and the report.

use super::threads::Way;
use super::trial::Trial;
use super::{epoll, watch, Aio, Choice, Done, Event, Outcome, Read, Source, Threads, Touches, Uring};
use crate::error::{Error, Result};
use crate::extent::Route;
use crate::fallback::Fallback;
use crate::options::{Io, Options};
use crate::store::{Files, FsKind};
use crate::timeline::Timeline;
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Direct reads in flight: 256 MiB with extents of 4 MiB, more than any one device needs.
const DEPTH: usize = 64;
/// Reads through the page cache by io_uring in flight. With 4 MiB each, 8 gave 2.4 GB/s, 16 gave 1.8 and 32 gave 1.25:
/// each read is a thread of the kernel that reads ahead, and these get in each other's way.
const BUFFERED_DEPTH: usize = 8;
/// Reads that the pool of threads takes: enough that every thread has reads waiting, which a cancel can still give up.
const QUEUE: usize = 256;
/// Threads: enough to fill a local disk through the page cache even with few cores. They wait, they do not compute: on
/// two cores 4, 8 and 16 threads populated at 0.84, 0.88 and 0.89 of the raw O_DIRECT rate beside them.
const LEAST_THREADS: usize = 12;
/// More threads than this copy no faster from the page cache (memory bandwidth).
const MOST_THREADS: usize = 16;
/// The speed of a network file system depends on how many reads are in flight.
const NETWORK_THREADS: usize = 32;

/// Sends each read its way.
#[derive(Debug)]
pub struct Router {
    workers: usize,
    files: Arc<Files>,
    threads: Threads,
    direct: Direct,
    begun: bool,
    /// io_uring, for those reads through the page cache that go this way.
    ring: Ring,
    io: Io,
    /// Files on a network go to the asynchronous interface too: the caller named it.
    insists: bool,
    depth: usize,
    ring_depth: usize,
    /// For each file: whether io_uring reads nothing ahead in it; empty: for no file.
    exact: Vec<bool>,
    /// What is read through the page cache must not stay there.
    leaves_nothing: bool,
    /// For each file, whether it refused O_DIRECT.
    refused: Vec<bool>,
    /// Refused by a route, and waiting because the next one is full.
    back: Vec<Read>,
    /// Decides whether direct reads stay direct.
    trial: Option<Trial>,
    /// Outcomes that need no source.
    over: Vec<Done>,
    fallbacks: Vec<Fallback>,
    /// What has been reported already: from, file system, errno.
    told: HashSet<(&'static str, u64, Option<i32>)>,
    wake: OwnedFd,
}

#[derive(Debug)]
enum Direct {
    Uring(Box<Uring>),
    Aio(Aio),
    Threads,
}

#[derive(Debug)]
enum Ring {
    /// Not wanted, or refused.
    None,
    /// Set up when the first read comes.
    Later,
    There(Box<Uring>),
    /// Refused while reads are in flight: it takes no more.
    Leaving(Box<Uring>),
}

impl Ring {
    fn uring(&mut self) -> Option<&mut Uring> {
        match self {
            Ring::There(uring) | Ring::Leaving(uring) => Some(uring),
            Ring::None | Ring::Later => None,
        }
    }
}

/// What performs a read.
enum By {
    Pool(Way),
    /// The interface for direct reads.
    Direct,
    /// io_uring through the page cache.
    Ring,
}

impl Router {
    /// A router for one load of `files`.
    pub fn new(files: Arc<Files>, options: &Options) -> Result<Router> {
        let threads = match options.threads {
            0 => {
                // A load has looked at the files that it reads. Do not open the others.
                let all = 0..files.len() as u32;
                let asked = all.clone().any(|f| files.known_facts(f).is_some());
                let facts = |f| if asked { files.known_facts(f) } else { files.facts(f).ok() };
                let network = all.into_iter().any(|f| facts(f).is_some_and(|f| f.kind == FsKind::Network));
                let cores = std::thread::available_parallelism().map_or(LEAST_THREADS, usize::from);
                if network {
                    NETWORK_THREADS
                } else {
                    cores.clamp(LEAST_THREADS, MOST_THREADS)
                }
            }
            n => n as usize,
        };
        let depth = if options.depth == 0 { DEPTH } else { options.depth as usize };
        let router = Router {
            workers: threads,
            threads: Threads::new(files.clone(), threads, QUEUE.max(depth))?,
            direct: Direct::Threads,
            begun: false,
            ring: if options.io == Io::UringBuffered { Ring::Later } else { Ring::None },
            io: options.io,
            insists: matches!(options.io, Io::Uring | Io::Aio),
            depth,
            ring_depth: if options.depth == 0 { BUFFERED_DEPTH } else { depth },
            exact: Vec::new(),
            leaves_nothing: false,
            refused: vec![false; files.len()],
            back: Vec::new(),
            trial: None,
            over: Vec::new(),
            fallbacks: Vec::new(),
            told: HashSet::new(),
            wake: epoll()?,
            files,
        };
        watch(&router.wake, router.threads.wake())?;
        Ok(router)
    }

    /// The way that direct reads take now: "io_uring", "Linux AIO" or "threads" (also before the first of them).
    pub fn direct_by(&self) -> &'static str {
        match self.direct {
            Direct::Uring(_) => "io_uring",
            Direct::Aio(_) => "Linux AIO",
            Direct::Threads => "threads",
        }
    }

    /// From now on files that are read through the page cache because they have no O_DIRECT leave nothing new in it, if
    /// the kernel can do that.
    pub(crate) fn leave_nothing(&mut self) {
        self.leaves_nothing = true;
    }

    /// From now on cold bytes that stay in the page cache are brought there as `Fill` says. `whole` flags the files
    /// that are wanted whole and can be mapped; `in_part` flags mapped files that allow no extra bytes.
    pub(crate) fn fill_first(&mut self, whole: &[bool], in_part: &[bool]) {
        self.threads.fill_first(whole, in_part);
        // Only files that the load reads have known facts. Do not open the others.
        let local = |file| self.files.known_facts(file).is_some_and(|facts| facts.kind == FsKind::Local);
        self.exact = (0..).zip(whole).map(|(file, whole)| !whole && local(file)).collect();
    }

    /// The pace of the first direct reads decides whether the others go through the page cache: see `Trial`.
    pub(crate) fn try_first(&mut self) {
        self.trial = Some(Trial::new());
    }

    /// From now on the submitting thread does the reads through the page cache: see `Threads`.
    pub(crate) fn read_here(&mut self) {
        self.threads.read_here();
    }

    /// From now on the reads of the pool of threads are recorded there.
    pub(crate) fn record(&mut self, timeline: &Arc<Timeline>) {
        self.threads.record(timeline);
    }

    /// Most threads that the buffered and mapped routes use.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Threads started so far.
    pub fn threads_started(&self) -> usize {
        self.threads.started()
    }

    /// Sets up the best interface for direct reads, when the first of them comes: many loads have none.
    fn begin(&mut self) {
        self.begun = true;
        match self.io {
            Io::Auto | Io::Direct | Io::Uring => self.begin_uring(),
            Io::Aio => self.begin_aio(),
            Io::Mapped | Io::Buffered | Io::UringBuffered | Io::Threads => {}
        }
    }

    fn begin_uring(&mut self) {
        let uring = Uring::new(self.files.clone(), self.depth);
        match uring.and_then(|u| watch(&self.wake, u.wake()).map(|()| u)) {
            Ok(uring) => self.direct = Direct::Uring(Box::new(uring)),
            Err(e) => self.instead_of_uring(&e),
        }
    }

    fn begin_ring(&mut self) {
        let uring = Uring::buffered(self.files.clone(), self.ring_depth);
        match uring.and_then(|u| watch(&self.wake, u.wake()).map(|()| u)) {
            Ok(mut uring) => {
                uring.read_exactly(&self.exact);
                self.ring = Ring::There(Box::new(uring));
            }
            Err(e) => self.instead_of_ring(&e),
        }
    }

    fn instead_of_ring(&mut self, cause: &Error) {
        self.ring = Ring::None;
        self.tell("io_uring", "threads", 0, cause.errno(), cause.message().to_owned());
    }

    fn begin_aio(&mut self) {
        let aio = Aio::new(self.files.clone(), self.depth);
        match aio.and_then(|a| watch(&self.wake, a.wake()).map(|()| a)) {
            Ok(aio) => self.direct = Direct::Aio(aio),
            Err(e) => self.instead_of_aio(&e),
        }
    }

    fn instead_of_uring(&mut self, cause: &Error) {
        let told = self.fallbacks.len();
        self.begin_aio();
        self.tell("io_uring", self.direct_by(), 0, cause.errno(), cause.message().to_owned());
        // In the order in which they happened: first the best interface.
        self.fallbacks[told..].reverse();
    }

    fn instead_of_aio(&mut self, cause: &Error) {
        self.direct = Direct::Threads;
        self.tell("Linux AIO", "threads", 0, cause.errno(), cause.message().to_owned());
    }

    fn tell(&mut self, from: &'static str, to: &'static str, storage: u64, errno: Option<i32>, reason: String) {
        if self.told.insert((from, storage, errno)) {
            self.fallbacks.push(Fallback { from, to, reason });
        }
    }

    fn by(&self, read: &Read) -> By {
        match read.route {
            Route::Mapped => By::Pool(Way::Mapped),
            Route::Buffered if self.leaves_nothing && !self.has_direct(read.file) => By::Pool(Way::Uncached),
            Route::Buffered => self.through(),
            // The pool fills files that are wanted whole by huge pages (`fill`); io_uring does not.
            Route::Direct if self.trial.as_ref().is_some_and(Trial::is_through) => By::Pool(Way::Buffered),
            Route::Direct if self.refused.get(read.file as usize) == Some(&true) => By::Pool(Way::Uncached),
            Route::Direct if matches!(self.direct, Direct::Threads) => By::Pool(Way::Direct),
            Route::Direct if !self.insists && self.is_network(read.file) => By::Pool(Way::Direct),
            Route::Direct => By::Direct,
        }
    }

    /// What reads through the page cache.
    fn through(&self) -> By {
        match self.ring {
            Ring::None | Ring::Leaving(_) => By::Pool(Way::Buffered),
            Ring::Later | Ring::There(_) => By::Ring,
        }
    }

    /// Whether the file's cold bytes would have gone past the page cache by O_DIRECT.
    fn has_direct(&self, file: u32) -> bool {
        self.files.facts(file).is_ok_and(|f| f.kind == FsKind::Local && f.direct_align.is_some())
    }

    fn is_network(&self, file: u32) -> bool {
        self.files.facts(file).is_ok_and(|f| f.kind == FsKind::Network)
    }

    /// Sends a read by its current way; gives it back if that way is full.
    fn send(&mut self, mut read: Read) -> Result<(), Read> {
        if matches!((self.by(&read), &self.ring), (By::Ring, Ring::Later)) {
            self.begin_ring();
        }
        let route = read.route;
        let by = self.by(&read);
        if matches!(by, By::Ring | By::Pool(Way::Buffered | Way::Uncached)) {
            read.route = Route::Buffered;
        }
        let sent = match (by, &mut self.direct, &mut self.ring) {
            (By::Pool(way), ..) => self.threads.submit_as(read, way),
            (By::Ring, _, Ring::There(uring)) => uring.submit(read),
            (By::Ring, ..) => self.threads.submit_as(read, Way::Buffered),
            (By::Direct, Direct::Uring(uring), _) => uring.submit(read),
            (By::Direct, Direct::Aio(aio), _) => aio.submit(read),
            (By::Direct, Direct::Threads, _) => self.threads.submit_as(read, Way::Direct),
        };
        sent.map_err(|read| Read { route, ..read })
    }

    /// The interface works. So this file does not do O_DIRECT, or not with this read.
    fn refuse_direct(&mut self, read: Read, cause: &io::Error) {
        self.refused[read.file as usize] = true;
        let storage = self.files.facts(read.file).map_or(0, |f| f.storage);
        let reason = format!("{}: {cause}", self.files.path(read.file).display());
        self.tell("O_DIRECT", "buffered", storage, cause.raw_os_error(), reason);
        self.back.push(read);
    }

    /// Takes the outcomes of the direct interface, and replaces the interface if the kernel refuses it now.
    fn drain_direct(&mut self) -> Vec<Outcome> {
        let mut out = Vec::new();
        let (lost, doing) = match &mut self.direct {
            Direct::Uring(uring) => {
                uring.drain(&mut out);
                self.fallbacks.append(&mut uring.take_fallbacks());
                (uring.is_lost(), "enter io_uring")
            }
            Direct::Aio(aio) => {
                aio.drain(&mut out);
                (aio.is_lost(), "submit to Linux AIO")
            }
            Direct::Threads => return out,
        };
        if !lost {
            return out;
        }
        let mut why = io::Error::from_raw_os_error(libc::ENOSYS);
        let mut left = Vec::new();
        for outcome in out {
            match outcome {
                Outcome::Refused { read, cause } => {
                    why = cause;
                    self.back.push(read);
                }
                done => left.push(done),
            }
        }
        let why = Error::io(doing, &why);
        match std::mem::replace(&mut self.direct, Direct::Threads) {
            Direct::Uring(_) => self.instead_of_uring(&why),
            _ => self.instead_of_aio(&why),
        }
        left
    }

    /// Takes the outcomes of io_uring through the page cache. After a refused read, the pool of threads does the rest.
    fn drain_ring(&mut self) -> Vec<Outcome> {
        let Some(uring) = self.ring.uring() else { return Vec::new() };
        let mut out = Vec::new();
        uring.drain(&mut out);
        let mut fallbacks = uring.take_fallbacks();
        let idle = uring.in_flight() == 0;
        self.fallbacks.append(&mut fallbacks);
        let mut refused = None;
        let mut left = Vec::new();
        for outcome in out {
            match outcome {
                Outcome::Refused { read, cause } => {
                    refused = Some(cause);
                    self.back.push(read);
                }
                done => left.push(done),
            }
        }
        self.ring = match (std::mem::replace(&mut self.ring, Ring::None), refused) {
            (Ring::There(uring), Some(cause)) => {
                self.instead_of_ring(&Error::io("read with io_uring", &cause));
                if idle {
                    Ring::None
                } else {
                    Ring::Leaving(uring)
                }
            }
            (Ring::Leaving(_), _) if idle => Ring::None,
            (ring, _) => ring,
        };
        left
    }

    /// Sends again what came back refused: each read exactly once, because it came back exactly once.
    fn send_back(&mut self) {
        if self.back.is_empty() {
            return;
        }
        for read in std::mem::take(&mut self.back) {
            if let Err(read) = self.send(read) {
                self.back.push(read);
            }
        }
        self.start();
    }

    fn start(&mut self) {
        // Neither can fail: errors come back with their reads.
        let _infallible = match &mut self.direct {
            Direct::Uring(uring) => uring.flush(),
            Direct::Aio(aio) => aio.flush(),
            Direct::Threads => Ok(()),
        };
        if let Some(uring) = self.ring.uring() {
            let _infallible = uring.flush();
        }
    }
}

impl Source for Router {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        // The submitting thread is woken when one of the reads in flight comes back.
        if read.route == Route::Direct && self.trial.as_mut().is_some_and(|t| t.holds(&read)) {
            return Err(read);
        }
        let direct = read.route == Route::Direct;
        let (ticket, file, range) = (read.ticket, read.file, read.offset..read.offset + read.len);
        if read.route == Route::Direct && !self.begun && (self.insists || !self.is_network(read.file)) {
            self.begin();
        }
        self.send(read)?;
        if let Some(trial) = self.trial.as_mut().filter(|_| direct) {
            trial.sent(ticket, file, range);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.start();
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<()> {
        events.extend(self.over.drain(..).map(Event::Done));
        let mut out = self.drain_direct();
        out.append(&mut self.drain_ring());
        self.threads.drain(&mut out);
        if let Some(trial) = &mut self.trial {
            trial.back(&out);
            self.threads.fill_last(trial.take_past());
        }
        for outcome in out {
            match outcome {
                Outcome::Done(done) => events.push(Event::Done(done)),
                Outcome::Refused { read, cause } => self.refuse_direct(read, &cause),
            }
        }
        self.send_back();
        Ok(())
    }

    fn cancel(&mut self) {
        // If a read waits here, some thread is at work, so a wake-up is still to come.
        let back = std::mem::take(&mut self.back);
        self.over.extend(back.into_iter().map(|read| read.cancelled(&self.files)));
        self.threads.cancel();
        match &mut self.direct {
            Direct::Uring(uring) => uring.cancel(),
            Direct::Aio(aio) => aio.cancel(),
            Direct::Threads => {}
        }
        if let Some(uring) = self.ring.uring() {
            uring.cancel();
        }
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        let direct = match &self.direct {
            Direct::Uring(uring) => uring.in_flight(),
            Direct::Aio(aio) => aio.in_flight(),
            Direct::Threads => 0,
        };
        let ring = match &self.ring {
            Ring::There(uring) | Ring::Leaving(uring) => uring.in_flight(),
            Ring::None | Ring::Later => 0,
        };
        direct + ring + self.threads.in_flight() + self.back.len() + self.over.len()
    }

    fn take_touches(&mut self) -> Touches {
        self.threads.take_touches()
    }

    fn choice(&self) -> Option<Choice> {
        self.trial.as_ref().and_then(|t| t.choice().cloned())
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        let mut all = std::mem::take(&mut self.fallbacks);
        all.extend(self.threads.take_fallbacks());
        all
    }
}
