//! The source of files of this machine: it has all their lanes. Each read goes by its lane. If the kernel refuses one way,
//! the router finds another during the load.
//!
//! | lane | goes | if that is refused |
//! |---|---|---|
//! | mapped, buffered | pool of threads | |
//! | buffered, if `io` asks for io_uring | io_uring without O_DIRECT | pool of threads |
//! | buffered, if nothing may stay in the page cache | pool of threads (RWF_DONTCACHE) | the page cache |
//! | direct | io_uring | pool of threads |
//! | direct, on a network file system | pool of threads: opening and submitting can hang there | |
//! | direct, if the file refuses O_DIRECT | pool of threads through the page cache (RWF_DONTCACHE if the load bypasses it) | |
//!
//! Each fallback is kept once for each cause and file system, for the log and the report.

use super::perform::How;
use super::threads::ReadAhead;
use super::{epoll, watch, Destination, Done, Outcome, Progress, Read, Source, Threads, Touches, Uring};
use crate::error::{Error, Result};
use crate::extent::Lane;
use crate::fallback::Fallback;
use crate::options::Io;
use crate::store::{Files, FsKind};
use crate::timeline::Timeline;
use crate::way::{Cold, Routing, Through};
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Reads that the pool of threads takes: enough that every thread has reads waiting, which a cancel can still give up.
const QUEUE: usize = 256;

/// Sends each read its way.
#[derive(Debug)]
pub struct Router {
    routing: Arc<Routing>,
    files: Arc<Files>,
    threads: Threads,
    /// io_uring for direct reads. `None`: the pool of threads does them, also before the first one comes.
    direct: Option<Box<Uring>>,
    begun: bool,
    /// io_uring, for those reads through the page cache that go this way.
    buffered: BufferedBy,
    io: Io,
    /// Files on a network go to io_uring too: the caller named it.
    insists: bool,
    /// For each file, whether it refused O_DIRECT.
    refused: Vec<bool>,
    /// Refused by a lane, and waiting because the next one is full.
    back: Vec<Read>,
    /// Outcomes that need no source.
    over: Vec<Done>,
    fallbacks: Vec<Fallback>,
    /// Fallbacks reported already: from, file system, errno.
    told: HashSet<(&'static str, u64, Option<i32>)>,
    /// Reads that come back refused are given up.
    cancelled: bool,
    wake: OwnedFd,
}

#[derive(Debug)]
enum BufferedBy {
    /// Not wanted, or refused.
    None,
    /// Set up when the first read comes.
    Later,
    There(Box<Uring>),
    /// Refused while reads are in flight: it takes no more.
    Leaving(Box<Uring>),
}

impl BufferedBy {
    fn uring(&mut self) -> Option<&mut Uring> {
        match self {
            BufferedBy::There(uring) | BufferedBy::Leaving(uring) => Some(uring),
            BufferedBy::None | BufferedBy::Later => None,
        }
    }
}

/// The way of a read.
enum By {
    Pool(How),
    /// The interface for direct reads.
    Direct,
    /// io_uring through the page cache.
    Uring,
}

impl Router {
    /// A router for one load of `files`, which obeys `routing`. `io` names the interface for direct reads, and for reads
    /// through the page cache.
    pub fn new(files: Arc<Files>, io: Io, routing: &Arc<Routing>) -> Result<Router> {
        Self::recorded(files, io, routing, None)
    }

    /// The same. The reads of the pool of threads are recorded in the timeline, if there is one.
    pub(crate) fn recorded(
        files: Arc<Files>,
        io: Io,
        routing: &Arc<Routing>,
        timeline: Option<&Arc<Timeline>>,
    ) -> Result<Router> {
        let router = Router {
            threads: Threads::obeying(files.clone(), routing, QUEUE.max(routing.depth), timeline)?,
            direct: None,
            begun: false,
            buffered: if io == Io::UringBuffered { BufferedBy::Later } else { BufferedBy::None },
            io,
            insists: io == Io::Uring,
            refused: vec![false; files.len()],
            back: Vec::new(),
            over: Vec::new(),
            fallbacks: Vec::new(),
            told: HashSet::new(),
            cancelled: false,
            wake: epoll()?,
            routing: routing.clone(),
            files,
        };
        watch(&router.wake, router.threads.wake())?;
        Ok(router)
    }

    /// The way that direct reads take now: "io_uring" or "threads" (also before the first of them).
    #[cfg(any(test, feature = "testing"))]
    pub fn direct_by(&self) -> &'static str {
        self.direct.as_ref().map_or("threads", |_| "io_uring")
    }

    /// Late reads: ranges of the files, into the page cache when all is done.
    pub(crate) fn late(&self) -> ReadAhead {
        self.threads.late()
    }

    /// Threads started so far.
    #[cfg(any(test, feature = "testing"))]
    pub fn threads_started(&self) -> usize {
        self.threads.started()
    }

    /// Sets up the best interface for direct reads, when the first of them comes: many loads have none.
    fn begin(&mut self) {
        self.begun = true;
        if !matches!(self.io, Io::Auto | Io::Direct | Io::Uring) {
            return;
        }
        let uring = Uring::new(self.files.clone(), self.routing.depth);
        match uring.and_then(|u| watch(&self.wake, u.wake()).map(|()| u)) {
            Ok(uring) => self.direct = Some(Box::new(uring)),
            Err(e) => self.tell_instead_of_uring(&e),
        }
    }

    fn begin_buffered(&mut self) {
        let uring = Uring::buffered(self.files.clone(), self.routing.buffered_depth);
        match uring.and_then(|u| watch(&self.wake, u.wake()).map(|()| u)) {
            Ok(mut uring) => {
                let exact: Vec<_> = self.routing.ways.iter().map(|way| way.through == Through::Exact).collect();
                uring.read_exactly(&exact);
                self.buffered = BufferedBy::There(Box::new(uring));
            }
            Err(e) => {
                self.buffered = BufferedBy::None;
                self.tell_instead_of_uring(&e);
            }
        }
    }

    fn tell_instead_of_uring(&mut self, cause: &Error) {
        self.tell("io_uring", "threads", 0, cause.errno(), cause.message().to_owned());
    }

    fn tell(&mut self, from: &'static str, to: &'static str, storage: u64, errno: Option<i32>, reason: String) {
        if self.told.insert((from, storage, errno)) {
            self.fallbacks.push(Fallback { from, to, reason });
        }
    }

    fn by(&self, read: &Read) -> By {
        match read.lane {
            Lane::MAPPED => By::Pool(How::Mapped),
            // The pages are there.
            Lane::BUFFERED if matches!(read.into, Destination::Rows { .. }) => By::Pool(How::Buffered),
            Lane::BUFFERED if self.routing.way(read.file).through == Through::Nothing => By::Pool(How::Uncached),
            Lane::DIRECT if self.refused.get(read.file as usize) == Some(&true) => match self.routing.cold {
                Cold::Bypass => By::Pool(How::Uncached),
                _ => By::Pool(How::Buffered),
            },
            Lane::DIRECT if self.direct.is_none() => By::Pool(How::Direct),
            Lane::DIRECT if !self.insists && self.is_network(read.file) => By::Pool(How::Direct),
            Lane::DIRECT => By::Direct,
            _ => self.through(),
        }
    }

    /// The way of reads through the page cache.
    fn through(&self) -> By {
        match self.buffered {
            BufferedBy::None | BufferedBy::Leaving(_) => By::Pool(How::Buffered),
            BufferedBy::Later | BufferedBy::There(_) => By::Uring,
        }
    }

    fn is_network(&self, file: u32) -> bool {
        self.files.facts(file).is_ok_and(|f| f.kind == FsKind::Network)
    }

    /// Sends a read by its current way; gives it back if that way is full.
    fn send(&mut self, mut read: Read) -> Result<(), Read> {
        if matches!((self.by(&read), &self.buffered), (By::Uring, BufferedBy::Later)) {
            self.begin_buffered();
        }
        let lane = read.lane;
        let by = self.by(&read);
        if matches!(by, By::Uring | By::Pool(How::Buffered | How::Uncached)) {
            read.lane = Lane::BUFFERED;
        }
        let sent = match (by, &mut self.direct, &mut self.buffered) {
            (By::Pool(how), ..) => self.threads.submit_as(read, how),
            (By::Uring, _, BufferedBy::There(uring)) => uring.submit(read),
            (By::Uring, ..) => self.threads.submit_as(read, How::Buffered),
            (By::Direct, Some(uring), _) => uring.submit(read),
            (By::Direct, None, _) => self.threads.submit_as(read, How::Direct),
        };
        sent.map_err(|read| Read { lane, ..read })
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
        let Some(uring) = &mut self.direct else { return out };
        uring.drain(&mut out);
        self.fallbacks.append(&mut uring.take_fallbacks());
        if !uring.is_lost() {
            return out;
        }
        let (left, refused) = self.take_refused(out);
        let why = refused.unwrap_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS));
        self.direct = None;
        self.tell_instead_of_uring(&Error::io("enter io_uring", &why));
        left
    }

    /// Takes the outcomes of io_uring through the page cache. After a refused read, the pool of threads does the rest.
    fn drain_buffered(&mut self) -> Vec<Outcome> {
        let Some(uring) = self.buffered.uring() else { return Vec::new() };
        let mut out = Vec::new();
        uring.drain(&mut out);
        let mut fallbacks = uring.take_fallbacks();
        let idle = uring.in_flight() == 0;
        self.fallbacks.append(&mut fallbacks);
        let (left, refused) = self.take_refused(out);
        self.buffered = match (std::mem::replace(&mut self.buffered, BufferedBy::None), refused) {
            (BufferedBy::There(uring), Some(cause)) => {
                self.tell_instead_of_uring(&Error::io("read with io_uring", &cause));
                if idle {
                    BufferedBy::None
                } else {
                    BufferedBy::Leaving(uring)
                }
            }
            (BufferedBy::Leaving(_), _) if idle => BufferedBy::None,
            (ring, _) => ring,
        };
        left
    }

    /// Takes the refused reads out of these outcomes, to be sent again, and says why the last one was refused.
    fn take_refused(&mut self, out: Vec<Outcome>) -> (Vec<Outcome>, Option<io::Error>) {
        let (mut left, mut why) = (Vec::new(), None);
        for outcome in out {
            match outcome {
                Outcome::Refused { read, cause } => {
                    why = Some(cause);
                    self.back.push(read);
                }
                done => left.push(done),
            }
        }
        (left, why)
    }

    /// Sends again what came back refused: each read exactly once, because it came back exactly once.
    fn send_back(&mut self) {
        if self.back.is_empty() {
            return;
        }
        if self.cancelled {
            return self.give_up_back();
        }
        for read in std::mem::take(&mut self.back) {
            if let Err(read) = self.send(read) {
                self.back.push(read);
            }
        }
        self.start();
    }

    /// Gives up what came back refused. `poll` reports it.
    fn give_up_back(&mut self) {
        let back = std::mem::take(&mut self.back);
        self.over.extend(back.into_iter().map(|read| read.cancelled(&self.files)));
    }

    fn start(&mut self) {
        for uring in self.rings() {
            // It cannot fail: errors come back with their reads.
            let _infallible = uring.flush();
        }
    }

    fn rings(&mut self) -> impl Iterator<Item = &mut Uring> {
        self.direct.as_deref_mut().into_iter().chain(self.buffered.uring())
    }
}

impl Source for Router {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if read.lane == Lane::DIRECT && !self.begun && (self.insists || !self.is_network(read.file)) {
            self.begin();
        }
        self.send(read)
    }

    fn flush(&mut self) -> Result<()> {
        self.start();
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let mut out = self.drain_direct();
        out.append(&mut self.drain_buffered());
        self.threads.drain(&mut out);
        for outcome in out {
            match outcome {
                Outcome::Done(done) => events.push(Progress::Done(done)),
                Outcome::Refused { read, cause } => self.refuse_direct(read, &cause),
            }
        }
        self.send_back();
        events.extend(self.over.drain(..).map(Progress::Done));
        Ok(())
    }

    fn cancel(&mut self) {
        // If a read waits here, some thread is at work, so a wake-up is still to come.
        self.cancelled = true;
        self.give_up_back();
        self.threads.cancel();
        self.rings().for_each(Uring::cancel);
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        let direct = self.direct.as_ref().map_or(0, |uring| uring.in_flight());
        let ring = match &self.buffered {
            BufferedBy::There(uring) | BufferedBy::Leaving(uring) => uring.in_flight(),
            BufferedBy::None | BufferedBy::Later => 0,
        };
        direct + ring + self.threads.in_flight() + self.back.len() + self.over.len()
    }

    fn take_touches(&mut self) -> Touches {
        self.threads.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        let mut all = std::mem::take(&mut self.fallbacks);
        all.extend(self.threads.take_fallbacks());
        all
    }
}
