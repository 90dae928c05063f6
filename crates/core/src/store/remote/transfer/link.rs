//! One connection and what is asked on it: from the request to the last byte of the body.

use super::fetch::{NextBytes, RangeRequest};
use super::node_budget::Permit;
use super::range_read::RangeRead;
use super::told::{end, Told};
use crate::error::Error;
use crate::store::remote::http::address::Server;
use crate::store::remote::http::answer::{no_ranges, Answer, Verdict};
use crate::store::remote::http::chunks::Chunks;
use crate::store::remote::http::request::Get;
use crate::store::remote::http::wires::{Watched, WireEnd};
use crate::store::version::Version;
use std::io;
use std::time::{Duration, Instant};

/// Bytes that are received in search of the head of an answer. Bytes of the body among them are copied.
const HEAD: usize = 4096;
/// Bytes that are received in search of the next chunk. Bytes of the body among them are copied.
const CHUNK: usize = 64 << 10;
/// How often it is reported that bytes come.
const REPORT: Duration = Duration::from_millis(250);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store::remote) enum LinkState {
    /// It connects.
    Connecting,
    /// Nothing is asked on it.
    Idle,
    /// The answer is waited for.
    Asked,
    /// The body comes, and there is no place for it. Nothing is received.
    Parked,
    /// The body is received.
    Body,
}

impl LinkState {
    /// How many states there are.
    pub(super) const ALL: usize = 5;
}

/// The result of an `advance`.
pub(super) enum Advance {
    /// There is nothing more to do now.
    Wait,
    /// It can be asked on it.
    Ready,
    /// The server says something else.
    Told(Verdict),
    /// The connection is lost.
    Lost(io::Error),
    /// The server does not speak HTTP.
    Failed(Error),
    /// No more may be received now.
    Held,
    /// Nobody wants it any more.
    Close,
}

pub(in crate::store::remote) struct Link<S> {
    pub(super) stream: S,
    /// Its place in the node's budget. It goes after the connection.
    pub(super) permit: Option<Permit>,
    pub(super) server: Server,
    pub(super) fetch: Option<RangeRequest>,
    pub(super) state: LinkState,
    /// The head of the answer so far, and then what of the body came with it.
    head: Vec<u8>,
    /// How much of `head` has been used.
    used: usize,
    /// The progress of a body in chunks.
    chunks: Option<Chunks>,
    /// The version of an object that comes whole and ends where its body does, and the answer that said so.
    whole: Option<(Version, Box<Answer>)>,
    /// Whether it can be used for the next request.
    keeps: bool,
    /// Whether it has answered a request before.
    pub(super) reused: bool,
    /// When its last byte came, or the request was queued.
    pub(super) last: Instant,
    /// When the request was queued.
    pub(super) asked_at: Instant,
    /// When the first byte of the answer came.
    pub(super) answered_at: Option<Instant>,
    /// Bytes of the body that came, and those of them that lie between reads.
    pub(super) got: u64,
    pub(super) gaps: u64,
    /// When it was last reported that bytes come.
    told: Instant,
    pub(super) watched: Watched,
    /// It waits until more may be received.
    pub(super) is_held: bool,
}

impl<S: WireEnd> Link<S> {
    pub(super) fn new(stream: S, permit: Option<Permit>, server: Server, now: Instant) -> Link<S> {
        Link {
            stream,
            permit,
            server,
            fetch: None,
            state: LinkState::Connecting,
            head: Vec::new(),
            used: 0,
            chunks: None,
            whole: None,
            keeps: true,
            reused: false,
            last: now,
            asked_at: now,
            answered_at: None,
            got: 0,
            gaps: 0,
            told: now,
            watched: Watched::Nothing,
            is_held: false,
        }
    }

    /// Sends a request for what `fetch` misses.
    pub(super) fn ask(&mut self, mut fetch: RangeRequest, request: &Get, now: Instant) {
        let etag = fetch.reads.front().and_then(|read| read.etag());
        self.stream.say(request.text(&fetch.asked, etag));
        fetch.pinned = etag.is_some();
        self.head.clear();
        (self.fetch, self.state, self.keeps) = (Some(fetch), LinkState::Asked, false);
        (self.last, self.asked_at, self.answered_at, self.told) = (now, now, None, now);
        (self.used, self.got, self.gaps) = (0, 0, 0);
        (self.chunks, self.whole) = (None, None);
    }

    /// Whether the server has said nothing to this request.
    pub(super) fn is_unanswered(&self) -> bool {
        self.state == LinkState::Asked && self.head.is_empty()
    }

    /// Whether something is expected to come on it.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self.state, LinkState::Asked | LinkState::Body)
    }

    /// If it waits for a place, it looks for it again.
    pub(super) fn unpark(&mut self, now: Instant) {
        if self.state == LinkState::Parked {
            (self.state, self.last) = (LinkState::Body, now);
        }
    }

    /// Does what can be done without waiting, and without receiving more of a body than is `allowed`.
    pub(super) fn advance(
        &mut self,
        now: Instant,
        allowed: &mut u64,
        discard: &mut [u8],
        told: &mut Vec<Told>,
    ) -> Advance {
        loop {
            let sent = match self.state {
                LinkState::Connecting => Ok(()),
                _ => self.stream.send(),
            };
            let next = sent.and_then(|()| match self.state {
                LinkState::Connecting => self.connecting(),
                LinkState::Idle => self.idle(discard),
                LinkState::Parked => Ok(Some(Advance::Wait)),
                LinkState::Asked => self.answer(now),
                LinkState::Body => self.body(now, allowed, discard, told),
            });
            match next {
                Ok(None) => {}
                Ok(Some(next)) => return next,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Advance::Wait,
                Err(e) => return Advance::Lost(e),
            }
        }
    }

    fn connecting(&mut self) -> io::Result<Option<Advance>> {
        if !self.stream.is_ready()? {
            return Ok(Some(Advance::Wait));
        }
        self.state = LinkState::Idle;
        Ok(Some(Advance::Ready))
    }

    /// Data or an end on an idle connection: close it. The server says more than was asked for, or has closed. TLS
    /// records without data do not count.
    fn idle(&mut self, discard: &mut [u8]) -> io::Result<Option<Advance>> {
        let place = libc::iovec { iov_base: discard.as_mut_ptr().cast(), iov_len: discard.len() };
        // SAFETY: the place is `discard`.
        unsafe { self.stream.receive(&mut [place])? };
        Ok(Some(Advance::Close))
    }

    fn answer(&mut self, now: Instant) -> io::Result<Option<Advance>> {
        let ended = !self.fill(HEAD)?;
        self.last = now;
        self.answered_at.get_or_insert(now);
        let (mut answer, length) = loop {
            match Answer::parse(&self.head) {
                Err(e) => return Ok(Some(Advance::Failed(e))),
                Ok(None) if ended => {
                    return Err(ended_early("the server closed the connection before it answered"));
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
        let Some(fetch) = &mut self.fetch else { return Ok(Some(Advance::Close)) };
        fetch.reads.iter_mut().for_each(|read| read.answered = true);
        match answer.judge(&fetch.expected()) {
            Verdict::Body { from, length: bytes, size, version } => {
                for read in &mut fetch.reads {
                    read.seen(size, version.clone());
                    (read.redirects, read.renewed) = (0, 0);
                    read.by_close = answer.is_without_size();
                }
                (fetch.at, fetch.asked) = (from, from..from + bytes);
                let is_chunked = answer.is_chunked();
                self.keeps = answer.keeps && (answer.has_length() || is_chunked) && answer.status == 206;
                self.chunks = is_chunked.then(Chunks::default);
                (self.used, self.state) = (length, LinkState::Body);
                Ok(None)
            }
            Verdict::Whole { version } => {
                fetch.reads.iter_mut().for_each(RangeRead::opened);
                self.chunks = answer.is_chunked().then(Chunks::default);
                self.whole = Some((version, Box::new(answer)));
                (self.used, self.state) = (length, LinkState::Body);
                Ok(None)
            }
            other => Ok(Some(Advance::Told(other))),
        }
    }

    fn body(
        &mut self,
        now: Instant,
        allowed: &mut u64,
        discard: &mut [u8],
        told: &mut Vec<Told>,
    ) -> io::Result<Option<Advance>> {
        let Some(fetch) = &mut self.fetch else { return Ok(Some(Advance::Close)) };
        let next = fetch.next();
        if matches!(next, NextBytes::Read) && fetch.left() > 0 {
            if let Some(read) = fetch.arriving() {
                read.arrived = true;
                told.push(Told::Arrived(read.ticket));
            }
        }
        let mut places = Vec::new();
        fetch.places(discard, &mut places);
        if places.is_empty() {
            let Some(first) = fetch.reads.front() else { return Ok(Some(self.ended())) };
            if !first.missing().is_empty() && fetch.left() == 0 {
                return Ok(Some(Advance::Told(Verdict::Rest)));
            }
            if !first.missing().is_empty() {
                self.state = LinkState::Parked;
                return Ok(Some(Advance::Wait));
            }
            if let Some((_, answer)) = &self.whole {
                // It ends here, or it is longer than what was asked for.
                let too_long = answer.named_in(no_ranges());
                if self.left_of_chunk()? > 0 {
                    return Ok(Some(Advance::Told(Verdict::Failed(too_long))));
                }
                self.close(told);
            }
        } else {
            if *allowed == 0 {
                self.is_held = true;
                return Ok(Some(Advance::Held));
            }
            let most = match &self.chunks {
                Some(_) => (*allowed).min(self.left_of_chunk()?),
                None => *allowed,
            };
            let mut room = usize::try_from(most).unwrap_or(usize::MAX);
            for place in &mut places {
                place.iov_len = place.iov_len.min(room);
                room -= place.iov_len;
            }
            let got = if room_of(&places) == 0 { 0 } else { self.receive(&mut places)? };
            if got == 0 && self.whole.is_some() && self.chunks.as_ref().is_none_or(Chunks::is_over) {
                self.close(told);
                return Ok(None);
            }
            if got == 0 {
                let text = match &self.chunks {
                    Some(_) => "the server ended the body too early",
                    None => "the server closed the connection within the body",
                };
                return Err(ended_early(text));
            }
            self.last = now;
            self.chunks.iter_mut().for_each(|chunks| chunks.took(got as u64));
            *allowed -= got as u64;
            self.took(got, now, told);
            // The next connection's bytes have waited longer. Who goes on here takes what just came, in small pieces.
            let holds = self.used < self.head.len() || self.stream.holds_bytes();
            let goes_on =
                |fetch: &RangeRequest| fetch.left() > 0 && fetch.reads.front().is_some_and(RangeRead::has_place);
            if !holds && self.fetch.as_ref().is_some_and(goes_on) {
                return Ok(Some(Advance::Wait));
            }
        }
        self.end_complete(told);
        Ok(None)
    }

    /// Bytes of the body that come next without anything between them; 0 at its end.
    fn left_of_chunk(&mut self) -> io::Result<u64> {
        loop {
            let Some(chunks) = &mut self.chunks else {
                // The end of the connection is its end.
                return if self.used < self.head.len() || self.fill(1)? { Ok(1) } else { Ok(0) };
            };
            self.used += chunks.read(&self.head[self.used..])?;
            if chunks.left() > 0 || chunks.is_over() {
                return Ok(chunks.left());
            }
            if !self.fill(CHUNK)? {
                return Err(ended_early("the server closed the connection within the body"));
            }
        }
    }

    /// Receives at most so many bytes into `head`, behind those that were not used. Whether some came.
    fn fill(&mut self, most: usize) -> io::Result<bool> {
        self.head.drain(..self.used);
        self.used = 0;
        let had = self.head.len();
        self.head.resize(had + most, 0);
        let place = libc::iovec { iov_base: self.head[had..].as_mut_ptr().cast(), iov_len: most };
        // SAFETY: the place is the end of `head`.
        let got = unsafe { self.stream.receive(&mut [place]) };
        self.head.truncate(had + *got.as_ref().unwrap_or(&0));
        Ok(got? > 0)
    }

    /// The body of an object that came whole has ended.
    fn close(&mut self, told: &mut Vec<Told>) {
        let by_close = self.chunks.is_none();
        let (Some((version, _)), Some(fetch)) = (self.whole.take(), &mut self.fetch) else { return };
        fetch.reads.iter_mut().for_each(|read| read.closed(version.clone(), by_close));
        fetch.asked.end = fetch.at;
        self.end_complete(told);
    }

    /// Receives into these places what came with the head of the answer, and then what comes.
    fn receive(&mut self, places: &mut [libc::iovec]) -> io::Result<usize> {
        if self.used == self.head.len() {
            // SAFETY: the places are within the destination of a read that is in flight, or to be discarded.
            return unsafe { self.stream.receive(places) };
        }
        let mut got = 0;
        for place in places {
            let rest = &self.head[self.used..];
            let part = rest.len().min(place.iov_len);
            // SAFETY: as above; `head` is ours.
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), place.iov_base.cast(), part) };
            self.used += part;
            got += part;
        }
        Ok(got)
    }

    /// So many bytes of the body came.
    fn took(&mut self, mut bytes: usize, now: Instant, told: &mut Vec<Told>) {
        self.got += bytes as u64;
        while bytes > 0 {
            let Some(fetch) = &mut self.fetch else { return };
            let part = match fetch.next() {
                NextBytes::Gap(gap) => {
                    let part = gap.min(bytes as u64);
                    self.gaps += part;
                    part
                }
                NextBytes::Read => {
                    let Some(read) = fetch.reads.front_mut() else { return };
                    let part = read.missing_bytes().min(bytes as u64);
                    read.received(part as usize);
                    part
                }
                NextBytes::Nothing => return,
            };
            fetch.at += part;
            bytes -= part as usize;
            self.end_complete(told);
        }
        // Of a read without a place nobody has been told yet.
        let first = self.fetch.as_ref().and_then(|fetch| fetch.reads.front());
        if let Some(read) = first.filter(|read| now.duration_since(self.told) >= REPORT && read.has_place()) {
            told.push(Told::Received(read.ticket));
            self.told = now;
        }
    }

    /// Ends the reads whose bytes are all there.
    fn end_complete(&mut self, told: &mut Vec<Told>) {
        let Some(fetch) = self.fetch.as_mut().filter(|_| self.whole.is_none()) else { return };
        while fetch.reads.front().is_some_and(|read| read.missing().is_empty()) {
            if let Some(read) = fetch.reads.pop_front() {
                let got = read.got();
                end(read, Ok(got), told);
            }
        }
    }

    /// Every byte that is wanted is there.
    fn ended(&mut self) -> Advance {
        // A body that is longer than the server says, or than anybody wants: what follows is no answer to the next request.
        let all = self.fetch.take().is_none_or(|fetch| fetch.left() == 0);
        // What ends a body in chunks mostly comes with its last bytes.
        let is_over = self.chunks.is_none() || (self.keeps && self.left_of_chunk().is_ok_and(|left| left == 0));
        if !all || !is_over || !self.keeps || self.used < self.head.len() {
            return Advance::Close;
        }
        (self.state, self.reused) = (LinkState::Idle, true);
        Advance::Ready
    }
}

fn ended_early(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}

/// Bytes that these places have room for.
fn room_of(places: &[libc::iovec]) -> usize {
    places.iter().map(|place| place.iov_len).sum()
}
