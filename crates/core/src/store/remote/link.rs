//! One connection and what is asked on it: from the request to the last byte of the body.

use super::address::Server;
use super::answer::{Answer, Verdict};
use super::connection::Connection;
use super::range_read::RangeRead;
use super::request::Get;
use crate::error::Error;
use std::io;
use std::time::{Duration, Instant};

/// Bytes that are received in search of the head of an answer. What of the body comes with it is copied.
const HEAD: usize = 4096;
/// How often it is reported that bytes come.
const REPORT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkState {
    /// It connects, or the answer is waited for.
    Asked,
    /// The body comes, and there is no place for it. Nothing is received.
    Parked,
    /// The body is received.
    Body,
    /// It can be used again.
    Idle,
}

/// What came of it.
pub(super) enum Advance {
    /// There is nothing more to do now.
    Wait,
    /// The first byte is there; its place is waited for.
    Park,
    /// Every byte is there.
    Done,
    /// The server says something else.
    Told(Verdict),
    /// The connection is lost.
    Lost(io::Error),
    /// The server does not speak HTTP.
    Failed(Error),
    /// Nobody wants it any more.
    Close,
}

pub(super) struct Link {
    pub(super) stream: Connection,
    pub(super) server: Server,
    pub(super) job: Option<RangeRead>,
    pub(super) state: LinkState,
    /// The head of the answer so far, and then what of the body came with it.
    head: Vec<u8>,
    /// Bytes of the body that are still to come.
    left: u64,
    /// Whether it can be used for the next request.
    pub(super) keeps: bool,
    /// Whether it has answered a request before.
    pub(super) reused: bool,
    /// When its last byte came, or the request was queued.
    pub(super) last: Instant,
    /// Events that epoll reports; 0: it is not watched.
    pub(super) watched: u32,
}

impl Link {
    pub(super) fn new(stream: Connection, server: Server, now: Instant) -> Link {
        let (head, state) = (Vec::new(), LinkState::Idle);
        Link { stream, server, job: None, state, head, left: 0, keeps: true, reused: false, last: now, watched: 0 }
    }

    /// Sends a request for what `job` misses.
    pub(super) fn ask(&mut self, job: RangeRead, request: &Get, now: Instant) {
        self.stream.say(request.text(&job.expected().range, job.etag()));
        self.head.clear();
        (self.job, self.state, self.last, self.keeps) = (Some(job), LinkState::Asked, now, false);
    }

    /// Whether the server has said nothing to this request.
    pub(super) fn is_unanswered(&self) -> bool {
        self.state == LinkState::Asked && self.head.is_empty()
    }

    /// What waits for a place has one.
    pub(super) fn unpark(&mut self, now: Instant) {
        (self.state, self.last) = (LinkState::Body, now);
        self.take_rest();
    }

    /// Does what can be done without waiting. `received`: it is time to report that bytes come.
    pub(super) fn advance(&mut self, now: Instant, discard: &mut [u8], received: &mut bool) -> Advance {
        if let Err(e) = self.stream.send() {
            return Advance::Lost(e);
        }
        loop {
            let next = match self.state {
                LinkState::Idle => self.idle(discard),
                LinkState::Parked => return Advance::Wait,
                LinkState::Asked => self.answer(now),
                LinkState::Body => self.body(now, discard, received),
            };
            match next {
                Ok(None) => {}
                Ok(Some(next)) => return next,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Advance::Wait,
                Err(e) => return Advance::Lost(e),
            }
        }
    }

    /// An idle connection brings nothing good: it is closed, or the server says more than was asked for. What TLS itself
    /// sends is no byte here.
    fn idle(&mut self, discard: &mut [u8]) -> io::Result<Option<Advance>> {
        let place = libc::iovec { iov_base: discard.as_mut_ptr().cast(), iov_len: discard.len() };
        // SAFETY: the place is `discard`.
        unsafe { self.stream.receive(&mut [place])? };
        Ok(Some(Advance::Close))
    }

    fn answer(&mut self, now: Instant) -> io::Result<Option<Advance>> {
        let had = self.head.len();
        self.head.resize(had + HEAD, 0);
        let place = libc::iovec { iov_base: self.head[had..].as_mut_ptr().cast(), iov_len: HEAD };
        // SAFETY: the place is the end of `head`.
        let got = unsafe { self.stream.receive(&mut [place]) };
        self.head.truncate(had + *got.as_ref().unwrap_or(&0));
        let ended = got? == 0;
        self.last = now;
        let (mut answer, length) = loop {
            match Answer::parse(&self.head) {
                Err(e) => return Ok(Some(Advance::Failed(e))),
                Ok(None) if ended => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the server closed the connection before it answered",
                    ));
                }
                Ok(None) => return Ok(None),
                // "Continue" and the like: the answer comes behind it.
                Ok(Some((answer, length))) if (100..200).contains(&answer.status) => drop(self.head.drain(..length)),
                Ok(Some(found)) => break found,
            }
        };
        if answer.learn(&self.head[length..], ended) {
            return Ok(None);
        }
        let Some(job) = &mut self.job else { return Ok(Some(Advance::Close)) };
        job.answered = true;
        match answer.judge(&job.expected()) {
            Verdict::Body { length: bytes, size, version } => {
                job.seen(bytes, size, version);
                (job.redirects, job.renewed, job.told) = (0, false, now);
                self.left = bytes;
                self.keeps = answer.keeps && answer.has_length() && answer.status == 206;
                self.head.drain(..length);
                if job.places.is_none() && bytes > 0 {
                    self.state = LinkState::Parked;
                    return Ok(Some(Advance::Park));
                }
                self.state = LinkState::Body;
                self.take_rest();
                Ok(None)
            }
            other => Ok(Some(Advance::Told(other))),
        }
    }

    /// Copies what of the body came with the head.
    fn take_rest(&mut self) {
        let part = (self.head.len() as u64).min(self.left) as usize;
        if let Some(job) = &mut self.job {
            job.put(&self.head[..part]);
        }
        self.left -= part as u64;
        // A body that is longer than the server says: what follows is no answer to the next request.
        self.keeps &= part == self.head.len();
        self.head.clear();
    }

    fn body(&mut self, now: Instant, discard: &mut [u8], received: &mut bool) -> io::Result<Option<Advance>> {
        let Some(job) = &mut self.job else { return Ok(Some(Advance::Close)) };
        if self.left == 0 {
            return Ok(Some(Advance::Done));
        }
        let mut places = Vec::new();
        if let Some(next) = &job.places {
            next.next(self.left, discard, &mut places);
        }
        // SAFETY: the places are within the destination of a read that is in flight, or in `discard`.
        let got = unsafe { self.stream.receive(&mut places)? };
        if got == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the server closed the connection within the body",
            ));
        }
        job.received(got);
        self.left -= got as u64;
        self.last = now;
        if now.duration_since(job.told) >= REPORT {
            job.told = now;
            *received = true;
        }
        Ok(None)
    }
}
