//! Sources: where bytes come from.
//!
//! A source is a submit/poll queue with tickets. It never blocks, so that one thread can drive many sources and a
//! seeded simulator can replace any of them. The caller submits a read with its ticket. Later, in any order, the ticket
//! comes back with the outcome. The source retries short reads itself: a read that is `Done` without an error brought
//! at least `need` bytes.
//!
//! ```no_run
//! # fn main() -> penstock::Result<()> {
//! use penstock::extent::{Lane, Ticket};
//! use penstock::{options::Io, source::*, store::Files};
//! use std::sync::Arc;
//!
//! let files = Arc::new(Files::from_paths(&["model.safetensors"])?);
//! let mut source = Router::new(files.clone(), Io::Auto, &Arc::default())?;
//! let memory: &'static mut [u8] = Box::leak(Box::new([0; 8])); // so that there is nothing to keep alive
//! let (into, keep) = (Destination::Memory(memory.as_mut_ptr()), Arc::new(()));
//! let lane = Lane::BUFFERED;
//! let read = Read { ticket: Ticket(7), file: 0, offset: 0, len: 8, need: 8, lane, into, fresh: false, written: 0, keep };
//! source.submit(read).ok();
//! source.flush()?;
//! let mut events = Vec::new();
//! while events.is_empty() {
//!     // Here a real caller waits with poll(2) until `source.wake()` is readable, among other things.
//!     source.poll(&mut events)?;
//! }
//! files.verify_file(0)
//! # }
//! ```
//!
//! [`Router`] reads files of this machine; it composes [`Threads`] and [`Uring`] over one set of [`Files`](crate::store::Files).
//!
//! A source whose bytes come late is sent reads without a place to land ([`Destination::OnArrival`]). It reports
//! [`Progress::Arrived`] once, when the first byte of such a read is there, and receives no more of it before
//! [`Source::land`] has given it a place. A read that fails needs no arrival.
//!
//! Five rules hold for every source. The conformance suite checks each source for them:
//! - every ticket comes back exactly once, also after `cancel`, and when an interface is refused while reads are in
//!   flight;
//! - memory (`Read::keep`) is released only when the kernel can no longer write to it. Dropping a source waits for its
//!   reads, but not forever: what hangs is left behind with its memory and counted by [`quarantined`];
//! - `wake` is readable when there is something to poll. It may be readable now and then without anything to poll, but
//!   never steadily. After a `cancel` the caller polls without waiting for it;
//! - a read has let go of its memory before its `Done` can be polled;
//! - an error in `Done` has the path of the file and the byte range.

mod dispatcher;
mod fill;
mod flight;
mod perform;
mod router;
mod rows;
mod threads;
#[cfg(any(test, feature = "testing"))]
mod throttle;
mod touch;
mod trial;
mod uring;

pub(crate) use dispatcher::Dispatcher;
pub use dispatcher::LaneSource;
pub use router::Router;
pub use threads::Threads;
#[cfg(any(test, feature = "testing"))]
pub use throttle::{Release, Throttle, Throttling};
pub use touch::Touches;
pub(crate) use touch::{is_slow, SLOW_TOUCH, TOUCH_SAMPLE};
pub(crate) use trial::Trial;
pub use uring::{RingMode, Uring};

use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use crate::options::{Io, Options};
use crate::rows::RowPlaces;
use crate::store::Files;
use crate::timeline::Timeline;
use crate::way::{Chosen, Routing};
use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// The terms of a load for the sources of its stores.
#[derive(Debug, Clone)]
pub struct SourceRequest {
    /// The interface that the caller asked for.
    pub io: Io,
    /// Decisions before the load.
    pub routing: Arc<Routing>,
    /// Most bytes of slabs that the load may hold.
    pub staging: u64,
    /// Where reads are recorded, if they are.
    pub(crate) timeline: Option<Arc<Timeline>>,
    /// The choice by the pace of the storage, once there is one.
    pub(crate) chosen: Chosen,
}

impl SourceRequest {
    /// Reads by `io`, as `routing` says, with staging memory as the options have it by default.
    pub fn new(io: Io, routing: Arc<Routing>) -> SourceRequest {
        let staging = Options::default().staging;
        SourceRequest { io, routing, staging, timeline: None, chosen: Chosen::default() }
    }
}

/// One I/O.
pub struct Read {
    /// Comes back with the outcome.
    pub ticket: Ticket,
    /// Number of the file in the checkpoint.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes to read; may pass the end of the file by less than a page.
    pub len: u64,
    /// Bytes that must arrive; fewer is an error of kind `Truncated`.
    pub need: u64,
    /// The lane by which it should come.
    pub lane: Lane,
    /// Where its bytes arrive.
    pub into: Destination,
    /// Whether pages of that memory may not exist yet. The thread that submits a direct read then waits until the
    /// kernel has zeroed them: 0.1 to 0.5 s/GiB.
    pub fresh: bool,
    /// Bytes from the first on that may be at their place already: a read that is refused half-way is sent again. 0 in a new
    /// read.
    pub written: u64,
    /// Keeps the destination's memory alive until the read has completed, however late: a read that hangs in the kernel
    /// may still write after its load has failed.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// Where the bytes of a read arrive.
pub enum Destination {
    /// `len` bytes from this address.
    Memory(*mut u8),
    /// Consecutive bytes of the file go to these places in turn; a null address discards.
    Scatter(Vec<(*mut u8, usize)>),
    /// Rows of the file go to their places, one by one. Bytes between them are not wanted. Only sources of files in
    /// this machine's page cache are sent such reads.
    Rows {
        /// Gaps of at most so many bytes may be read. Longer ones are skipped.
        gap: u64,
        /// In the order of the file.
        rows: Vec<RowPlaces>,
    },
    /// Not known yet. [`Source::land`] gives it after the source has reported [`Progress::Arrived`].
    OnArrival,
    /// A mapping of the file.
    Mapping {
        /// The address at which byte `offset` of the file is mapped. `len` bytes from there are populated.
        at: *mut u8,
        /// The page cache holds all of it: the pages are left to their first touch.
        resident: bool,
    },
}

// SAFETY: the addresses are only dereferenced by the source while it holds the read, and `keep` keeps them valid
// (invariant 5: a quarantined read keeps its memory).
unsafe impl Send for Read {}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Read { ticket, file, offset, len, lane, .. } = self;
        write!(f, "Read({ticket:?}, file {file}, bytes {offset}+{len}, {lane:?})")
    }
}

/// The outcome of a read.
#[derive(Debug)]
pub struct Done {
    /// The read's ticket.
    pub ticket: Ticket,
    /// Bytes that arrived, at least the read's `need`; otherwise the error.
    pub result: Result<u64, Error>,
    /// The lane by which it came in the end.
    pub lane: Lane,
    /// Bytes from the first on that were written to their place, or may have been: of a read that failed, those that had
    /// arrived, and what a call of the kernel that failed may have written without saying so.
    pub written: u64,
}

/// A report of a source.
#[derive(Debug)]
pub enum Progress {
    /// The first byte of a read that was sent without a place to land is there. The source waits for [`Source::land`].
    /// Once for each ticket: after that the source may try again on its own, but not report it again.
    Arrived(Ticket),
    /// Some bytes of a read that has its place are there, and it goes on. A source whose reads can take seconds reports it
    /// about once a second while bytes come; otherwise the load takes the read for stalled.
    Received(Ticket),
    /// The source cannot bring this read in its lane, and has reported nothing of it. The load sends it again in the lane that
    /// [`Declared::refused`](crate::extent::Declared::refused) names.
    Refused {
        /// The read.
        read: Read,
        /// The reason, for the report.
        cause: Error,
    },
    /// A read has ended, well or not.
    Done(Done),
}

/// A queue of reads.
pub trait Source: Send {
    /// Queues a read. Gives it back if the queue is full; it may be submitted again after a `poll`.
    fn submit(&mut self, read: Read) -> Result<(), Read>;

    /// Starts what was queued (one system call for many reads, where the interface allows).
    fn flush(&mut self) -> Result<()>;

    /// Appends what happened since the last call to `events`, without waiting. Events appended before an error count.
    /// `Done` is the last event of a ticket.
    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()>;

    /// Gives a read that has arrived its place, and what keeps that memory alive. The source then receives the rest, and
    /// the ticket comes back through `poll`. A ticket counts as known until its `Done` was polled: a read that has failed
    /// meanwhile is given its place without an error, and its own error comes through `poll`.
    ///
    /// # Errors
    /// `Internal`: there is no such read, or it has not arrived.
    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        let _ = (into, keep);
        let text = format!("ticket {} was given a place, but this source waits for none; please report this", ticket.0);
        Err(Error::new(ErrorKind::Internal, text))
    }

    /// Gives up every read that can be given up: those that were not sent, requests that were sent and are not answered,
    /// those that have arrived and have no place yet, and bodies that can be cut off. A read that the kernel works on ends
    /// by itself. Every ticket still comes back through `poll`, the given-up ones with kind `Cancelled`. Nothing arrives
    /// afterwards.
    fn cancel(&mut self);

    /// Readable whenever `poll` may return something.
    fn wake(&self) -> RawFd;

    /// Reads submitted and not yet polled.
    fn in_flight(&self) -> usize;

    /// Memory of a device that reads will land in still has work in a queue: nothing is written to it before this fence. Only
    /// sources whose lanes land on a device are concerned.
    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        let _ = fence;
        Ok(())
    }

    /// Since the last call: pages of mappings that were touched, and those that are left to their first touch.
    fn take_touches(&mut self) -> Touches {
        Touches::default()
    }

    /// Fallbacks since the last call of this.
    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        Vec::new()
    }
}

/// How long dropping a source waits for reads on which the kernel still works. After that it leaves them behind with
/// their memory. A disk answers within milliseconds even when it is busy; what takes longer hangs.
const GRACE: Duration = Duration::from_secs(2);

static QUARANTINED: AtomicUsize = AtomicUsize::new(0);

/// Reads of this process that hang in the kernel and were left behind with their thread or ring, and their memory. The
/// number falls when such a thread comes back after all. It does not fall when a ring that was left behind finishes a
/// read.
pub fn quarantined() -> usize {
    QUARANTINED.load(Ordering::Relaxed)
}

/// A read's outcome, for the router: done, or refused in a way that another interface may not share.
enum Outcome {
    Done(Done),
    Refused { read: Read, cause: io::Error },
}

impl Outcome {
    /// For a source that is used alone: what is refused has failed.
    fn into_done(self, files: &Files) -> Done {
        match self {
            Outcome::Done(done) => done,
            Outcome::Refused { read, cause } => read.done(files, Err(Error::io("read", &cause))),
        }
    }
}

impl Read {
    /// The outcome of this read, which releases its memory. An error gets the file and the range.
    fn done(self, files: &Files, result: Result<u64>) -> Done {
        let range = self.offset..self.offset + self.need;
        let written = self.written.max(*result.as_ref().unwrap_or(&0));
        let result = result.map_err(|e| e.at(files.path(self.file)).range(range));
        Done { ticket: self.ticket, result, lane: self.lane, written }
    }

    /// The outcome of a read that nobody has performed. The error gets the range; the path is the caller's.
    pub fn failed(self, error: Error) -> Done {
        let error = error.range(self.offset..self.offset + self.need);
        Done { ticket: self.ticket, result: Err(error), lane: self.lane, written: self.written }
    }

    /// The outcome of a read that was given up.
    fn cancelled(self, files: &Files) -> Done {
        let path = files.path(self.file).to_path_buf();
        let done = self.given_up();
        Done { result: done.result.map_err(|e| e.at(path)), ..done }
    }

    /// The same, without the file's name.
    pub fn given_up(self) -> Done {
        self.failed(Error::new(ErrorKind::Cancelled, "the load was cancelled before this was read"))
    }

    /// `got` bytes arrived and then the file ended.
    pub fn ended(&self, got: u64) -> Result<u64> {
        if got >= self.need {
            return Ok(got);
        }
        let text = format!(
            "the file ends at byte {}{}, but its header promises more: it was cut short, perhaps by an interrupted \
             download or by a program that writes it again",
            self.offset + got,
            if got == 0 { " or before" } else { "" }
        );
        Err(Error::new(ErrorKind::Truncated, text).with_values(self.offset + self.need, self.offset + got))
    }
}

/// The error of a read that asks for rows one by one, from a source that reads no such.
fn no_rows() -> Error {
    Error::new(ErrorKind::Internal, "this source does not read rows one by one; please report this")
}

/// The error of a read that was sent without a place to land, from a source that reports no arrivals.
fn no_place() -> Error {
    Error::new(ErrorKind::Internal, "this source needs to know from the start where a read lands")
}

/// An empty epoll set: readable while any descriptor in it is.
pub(crate) fn epoll() -> Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd < 0 {
        return Err(Error::io("create an epoll set", &io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds a descriptor to an epoll set; it leaves when it is closed.
pub(crate) fn watch(epoll: &OwnedFd, fd: RawFd) -> Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: one event is read.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(Error::io("watch a descriptor", &io::Error::last_os_error())),
    }
}

/// Sleeps until one of `fds` is readable or hung up (negative ones are ignored), a signal comes, or `timeout` has passed. Says of
/// each whether it is.
pub(crate) fn wait_readable(fds: impl IntoIterator<Item = RawFd>, timeout: Option<Duration>) -> Vec<bool> {
    let polled = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polled: Vec<libc::pollfd> = fds.into_iter().map(polled).collect();
    // Rounded up: a wait of 0.4 ms must not become a spin of zero-length waits.
    let ms = timeout.map_or(-1, |t| i32::try_from(t.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
    // SAFETY: the vector has as many entries as the count says. EINTR and errors end the wait early: the caller loops.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, ms) };
    polled.iter().map(|one| one.revents != 0).collect()
}

/// Waits until `fd` is readable or hung up, at most for `time`; false if neither happened.
fn readable(fd: RawFd, time: Duration) -> bool {
    let until = std::time::Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        let n = unsafe { libc::poll(&raw mut poll, 1, left.as_millis() as i32 + i32::from(!left.is_zero())) };
        if n > 0 {
            return true;
        }
        if left.is_zero() {
            return false;
        }
    }
}
