//! One connection: requests in, answers out.

use crate::answer::{self, ObjectFacts};
use crate::log;
use crate::metrics::{add, Metrics};
use crate::request::{self, Refusal, Request, Target, LONGEST_HEAD};
use crate::served::{Found, Object, Served};
use crate::settings::Settings;
use crate::token::Token;
use crate::wire::Wire;
use crate::{listing, Name};
use std::io::{self, ErrorKind};
use std::mem;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that are copied at a time. An answer that has no more than that is copied too: one call sends its head and body.
const COPIED: u64 = 64 << 10;
/// Bytes of one call of `sendfile`. The file is compared after each.
const SENT: u64 = 1 << 20;
/// A client that takes fewer bytes in `stall_time` holds a place that others want: 1 KiB/s.
const TAKEN: u64 = COPIED;
/// Bytes that a connection sends before others have their turn.
const TURN: u64 = 4 << 20;
/// Answers that a connection gets before others have their turn.
const ANSWERS: u32 = 16;
/// The time in which a client can read the last answer, and the bytes that it may still send.
const LINGER: (Duration, u64) = (Duration::from_secs(2), 1 << 20);

/// The things that all connections of a server need.
pub(crate) struct Shared {
    pub(crate) served: Arc<dyn Served>,
    pub(crate) settings: Settings,
    pub(crate) token: Option<Token>,
    /// True if only clients that name this machine as it names itself are answered.
    pub(crate) only_this_machine: bool,
    pub(crate) metrics: Metrics,
}

/// The next step of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits until the socket can be read, or written to.
    Wait { reads: bool, writes: bool },
    /// Ends the connection.
    Close,
    /// Ends it with an error for the client.
    Reset,
}

pub(crate) struct Connection {
    wire: Wire,
    peer: SocketAddr,
    phase: Phase,
    input: Vec<u8>,
    /// Bytes of the input that are known to end no head.
    seen: usize,
    /// Bytes to send before the rest of the body, from `sent` on.
    output: Vec<u8>,
    sent: usize,
    body: Option<Body>,
    keeps: bool,
    request: Log,
    /// Bytes that were sent since the deadline was set.
    taken: u64,
    /// When the connection is closed if nothing moves.
    pub(crate) deadline: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reading,
    Answering,
    /// The last answer is sent. The client's further bytes are thrown away, so that it can read the answer.
    Lingering(u64),
}

/// The bytes of an object that are still to be sent.
struct Body {
    object: Box<dyn Object>,
    at: u64,
    end: u64,
    copies: bool,
}

/// The facts for a line of the access log.
#[derive(Default)]
struct Log {
    line: String,
    status: u16,
    bytes: u64,
    begun: Option<Instant>,
}

impl Connection {
    pub(crate) fn new(wire: Wire, peer: SocketAddr, settings: &Settings) -> Connection {
        let deadline = Instant::now() + settings.head_time;
        let (input, output, body, request) = Default::default();
        let (phase, seen, sent, keeps, taken) = (Phase::Reading, 0, 0, true, 0);
        Connection { wire, peer, phase, input, seen, output, sent, body, keeps, request, taken, deadline }
    }

    pub(crate) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Resets it.
    pub(crate) fn reset(self: Box<Self>) {
        self.wire.reset();
    }

    /// Does all that can be done now.
    pub(crate) fn turn(&mut self, shared: &Shared) -> Step {
        let (mut bytes, mut answers) = (0, 0);
        loop {
            let done = match self.phase {
                Phase::Reading => self.read(shared),
                Phase::Answering => self.answer(shared, &mut bytes),
                Phase::Lingering(left) => self.linger(left),
            };
            match done {
                Ok(None) => {
                    answers += u32::from(self.phase == Phase::Answering);
                    if bytes >= TURN || answers > ANSWERS {
                        return Step::Wait { reads: true, writes: true };
                    }
                }
                Ok(Some(step)) => return step,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let writes = self.phase == Phase::Answering;
                    return Step::Wait { reads: !writes, writes: writes || self.wire.wants_to_send() };
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Step::Close,
            }
        }
    }

    fn read(&mut self, shared: &Shared) -> io::Result<Option<Step>> {
        loop {
            if let Some((found, length)) = request::parse(&self.input, self.seen) {
                self.begin(found, length, shared);
                return Ok(None);
            }
            self.seen = self.input.len();
            let filled = self.input.len();
            self.input.resize(LONGEST_HEAD, 0);
            let received = self.wire.receive(&mut self.input[filled..]);
            self.input.truncate(filled + received.as_ref().map_or(0, |count| *count));
            if self.input.is_empty() {
                self.input = Vec::new(); // an idle connection keeps no buffer
            }
            match received? {
                0 => return Ok(Some(Step::Close)),
                _ if filled == 0 => self.deadline = Instant::now() + shared.settings.head_time,
                _ => {}
            }
        }
    }

    /// Begins the answer to a request.
    fn begin(&mut self, found: Result<Request, Refusal>, length: usize, shared: &Shared) {
        let line = self.input[..length].trim_ascii_start();
        let line = line.split(|b| matches!(b, b'\r' | b'\n')).next().unwrap_or_default();
        self.request = Log { begun: Some(Instant::now()), ..Log::default() };
        if shared.settings.access_log {
            // A query may be a credential
            let shown = line.split(|b| *b == b'?').next().unwrap_or_default();
            self.request.line = shown[..shown.len().min(1000)].escape_ascii().to_string();
        }
        self.input.drain(..length);
        (self.seen, self.phase) = (0, Phase::Answering);
        self.keeps = found.as_ref().is_ok_and(|request| request.keeps);
        let (status, text) = match found {
            Ok(request) => self.prepare(&request, shared),
            Err(refusal) => (refusal.0, answer::refused(refusal, false)),
        };
        shared.metrics.answered(status);
        self.request.status = status;
        (self.output, self.sent, self.taken) = (text.into_bytes(), 0, 0);
        self.deadline = Instant::now() + shared.settings.stall_time;
    }

    /// The status and the first bytes of the answer to a request; the object that follows is kept.
    fn prepare(&mut self, request: &Request, shared: &Shared) -> (u16, String) {
        match self.found(request, shared) {
            Ok(prepared) => prepared,
            Err(refusal) => {
                let text = answer::refused(refusal, request.keeps);
                let head = text.find("\r\n\r\n").map_or(text.len(), |at| at + 4);
                let is_head = request.method == request::Method::Head;
                (refusal.0, if is_head { text[..head].to_owned() } else { text })
            }
        }
    }

    fn found(&mut self, request: &Request, shared: &Shared) -> Result<(u16, String), Refusal> {
        if shared.only_this_machine && !request.names_this_machine {
            return Err(Refusal(421, "this server answers requests to localhost or to an address"));
        }
        let is_known = || request.token.as_ref().is_some_and(|shown| shared.token.as_ref().is_none_or(|t| t.is(shown)));
        if shared.token.is_some() && request.target != Target::Health && !is_known() {
            return Err(Refusal(401, "this server wants a token: Authorization: Bearer TOKEN"));
        }
        let made = |status, fields: &str, body: &str| {
            let text = answer::made(status, request.keeps, fields, body);
            let shown = if request.method == request::Method::Head { text.len() - body.len() } else { text.len() };
            (status, text[..shown].to_owned())
        };
        let name = match &request.target {
            Target::Health => return Ok(made(200, "Content-Type: application/json\r\n", "{\"status\":\"ok\"}\n")),
            Target::Metrics => {
                let kind = "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n";
                return Ok(made(200, kind, &shared.metrics.text()));
            }
            Target::Named(name) => name,
        };
        match self.find(name, shared)? {
            Found::Folder(_) if !name.is_folder() => {
                Ok(made(301, &format!("Location: {}\r\n", name.folder_path()), ""))
            }
            Found::Folder(contents) if request.takes_json => {
                Ok(made(200, "Content-Type: application/json\r\nVary: Accept\r\n", &listing::json(&contents)))
            }
            Found::Folder(contents) => {
                let kind = "Content-Type: text/html; charset=utf-8\r\nVary: Accept\r\n";
                Ok(made(200, kind, &listing::html(name, &contents)))
            }
            Found::Object(object) => {
                let facts = ObjectFacts { size: object.size(), etag: object.etag(), modified: object.modified() };
                let found = answer::of_object(request, facts, |range| object.there(range));
                let (at, end) = (found.body.start, found.body.end);
                let copies = !shared.settings.sends_files || !self.wire.is_plain() || end - at <= COPIED;
                self.body = (at < end).then_some(Body { object, at, end, copies });
                Ok((found.status, found.head))
            }
        }
    }

    fn find(&self, name: &Name, shared: &Shared) -> Result<Found, Refusal> {
        shared.served.find(name).map_err(|e| match e.kind() {
            ErrorKind::NotFound => Refusal(404, "nothing has this name"),
            ErrorKind::PermissionDenied => Refusal(403, "the server may not read this file"),
            _ => {
                log::line(format_args!("{}: {e}", name.joined().escape_ascii()));
                Refusal(500, "the server cannot read this file")
            }
        })
    }

    /// Sends some of the answer.
    fn answer(&mut self, shared: &Shared, bytes: &mut u64) -> io::Result<Option<Step>> {
        if self.sent == self.output.len() {
            (self.sent, _) = (0, self.output.clear());
        }
        // The first bytes go out together with the head
        if let Some(body) = self.body.as_mut().filter(|body| body.copies) {
            if self.sent == 0 && (self.output.len() as u64) < COPIED {
                if !body.copy(&mut self.output)? {
                    return Ok(Some(self.changed(shared)));
                }
                self.body = self.body.take().filter(|body| body.at < body.end);
            }
        }
        let sent = if self.sent < self.output.len() {
            let sent = self.wire.send(&self.output[self.sent..], self.body.is_some())?;
            self.sent += sent;
            sent
        } else if let Some(body) = &mut self.body {
            let count = (body.end - body.at).min(SENT) as usize;
            let sent = match self.wire.send_file(body.object.descriptor(), body.at, count) {
                // A file system that has no `sendfile`
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)) => {
                    body.copies = true;
                    return Ok(None);
                }
                sent => sent?,
            };
            body.at += sent as u64;
            if sent == 0 || !body.object.is_unchanged() {
                return Ok(Some(self.changed(shared)));
            }
            self.body = self.body.take().filter(|body| body.at < body.end);
            sent
        } else {
            self.wire.flush()?;
            return Ok(self.end(shared));
        };
        *bytes += sent as u64;
        self.request.bytes += sent as u64;
        add(&shared.metrics.sent_bytes, sent as u64);
        self.taken += sent as u64;
        if self.taken >= TAKEN {
            (self.taken, self.deadline) = (0, Instant::now() + shared.settings.stall_time);
        }
        Ok(None)
    }

    /// Ends an answer.
    fn end(&mut self, shared: &Shared) -> Option<Step> {
        self.write_log(shared, "");
        (self.output, self.sent) = (Vec::new(), 0);
        if self.keeps {
            let next = if self.input.is_empty() { shared.settings.idle_time } else { shared.settings.head_time };
            (self.phase, self.deadline) = (Phase::Reading, Instant::now() + next);
        } else {
            self.wire.finish();
            (self.phase, self.deadline) = (Phase::Lingering(LINGER.1), Instant::now() + LINGER.0);
        }
        None
    }

    fn linger(&mut self, left: u64) -> io::Result<Option<Step>> {
        let mut thrown = [0; 4096];
        let count = self.wire.receive(&mut thrown)? as u64;
        self.phase = Phase::Lingering(left.saturating_sub(count));
        Ok((count == 0 || left <= count).then_some(Step::Close))
    }

    /// The end of an answer whose file has changed.
    fn changed(&mut self, shared: &Shared) -> Step {
        add(&shared.metrics.changed, 1);
        log::line(format_args!("a file changed while {} received it: the connection is reset", self.peer));
        self.write_log(shared, " cut");
        Step::Reset
    }

    fn write_log(&mut self, shared: &Shared, cut: &str) {
        let Log { line, status, bytes, begun } = mem::take(&mut self.request);
        if shared.settings.access_log {
            let seconds = begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
            log::line(format_args!("{} \"{line}\" {status} {bytes} {seconds:.3}{cut}", self.peer));
        }
    }
}

impl Body {
    /// Puts the next bytes behind `output`. False if the object has changed.
    fn copy(&mut self, output: &mut Vec<u8>) -> io::Result<bool> {
        let (filled, count) = (output.len(), (self.end - self.at).min(COPIED) as usize);
        output.resize(filled + count, 0);
        let (into, at) = (&mut output[filled..], i64::try_from(self.at).map_err(|_| ErrorKind::InvalidInput)?);
        // SAFETY: the memory is borrowed for the call, and has `count` bytes.
        let read = unsafe { libc::pread64(self.object.descriptor().as_raw_fd(), into.as_mut_ptr().cast(), count, at) };
        let read = usize::try_from(read).map_err(|_| io::Error::last_os_error());
        output.truncate(filled + *read.as_ref().unwrap_or(&0));
        // Here these mean nothing about the client's socket.
        let never = |e: io::Error| match e.kind() {
            ErrorKind::Interrupted | ErrorKind::WouldBlock => io::Error::other(e),
            _ => e,
        };
        let read = read.map_err(never)?;
        self.at += read as u64;
        Ok(read > 0 && self.object.is_unchanged())
    }
}
