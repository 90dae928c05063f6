//! Sources: where bytes come from.
//!
//! A source is a submit/poll queue with tickets that never blocks, so that one thread can drive many of them and a seeded
//! simulator can stand in for any. A read is pushed in with its ticket, and some time later, in any order, its ticket
//! comes back with the outcome. Retrying short reads is the source's business; a read that is `Done` without error brought
//! at least `need` bytes.

use crate::error::{Error, Result};
use crate::schedule::Route;
use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Names one read (or copy) from its submission to its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

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
    /// How it is to travel.
    pub route: Route,
    /// Where its bytes arrive.
    pub into: Destination,
    /// Keeps the destination's memory alive until the read has completed, however late that is: a read that hangs in the
    /// kernel may still write after its load has failed.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// Where the bytes of a read arrive.
pub enum Destination {
    /// `len` bytes from this address on.
    Memory(*mut u8),
    /// Consecutive bytes of the file go to these places in turn; a null address discards.
    Scatter(Vec<(*mut u8, usize)>),
    /// The address at which byte `offset` of the file is mapped: populate `len` bytes from there.
    Mapping(*mut u8),
}

// SAFETY: the addresses are only dereferenced by the source while it holds the read, and `keep` keeps them valid
// (invariant 5: a quarantined read keeps its memory).
unsafe impl Send for Read {}

/// The outcome of a read.
#[derive(Debug)]
pub struct Done {
    /// The read's ticket.
    pub ticket: Ticket,
    /// Bytes that arrived, at least the read's `need`; or why not.
    pub result: Result<u64, Error>,
    /// The route it travelled in the end.
    pub route: Route,
}

/// A queue of reads.
pub trait Source: Send {
    /// Queues a read. Gives it back where the queue is full; it may be submitted again after a `poll`.
    fn submit(&mut self, read: Read) -> Result<(), Read>;

    /// Starts what was queued (one system call for many reads, where the interface allows).
    fn flush(&mut self) -> Result<()>;

    /// Moves finished reads into `done`, without waiting.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<()>;

    /// Asks that reads not yet started be given up; every ticket still comes back through `poll`, given-up ones with kind
    /// `Cancelled`.
    fn cancel(&mut self);

    /// Readable whenever `poll` may have something to give.
    fn wake(&self) -> RawFd;

    /// Reads submitted and not yet polled.
    fn in_flight(&self) -> usize;
}

/// A route that was refused, and what took its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// What was refused, such as "io_uring" or "O_DIRECT".
    pub from: &'static str,
    /// What is used instead.
    pub to: &'static str,
    /// Why: the file where one is concerned, the system call and its errno.
    pub reason: String,
}
