//! Sends a request until the server has answered it.

use super::rate::SendRate;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::address::{Address, Server};
use crate::store::remote::http::answer::{Answer, Expected, Verdict};
use crate::store::remote::http::common::{is_busy, Common, LOOK, MOST_REDIRECTS};
use crate::store::remote::http::jitter::Jitter;
use crate::store::remote::http::line::{late, Line, LinePace, Parts};
use crate::store::remote::http::refusal::refused;
use crate::store::remote::http::request::Requests;
use crate::store::remote::transfer::node_budget::{Permit, SharedBudget};
use crate::store::upload::UploadWatch;
use crate::sync::{lock, Mutex};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a server may be silent that puts an object together.
const PUTTING_TOGETHER: Duration = Duration::from_secs(120);
/// The field with Google's number of a resumable upload: whoever knows it may write.
const SECRET: &str = "x-guploader-uploadid";

/// The longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// A request, worded for this moment: its signature may become invalid.
pub(in crate::store::remote) struct WriteOrder {
    pub(in crate::store::remote) method: &'static str,
    pub(in crate::store::remote) address: Address,
    /// Further fields, each ended by CR LF.
    pub(in crate::store::remote) fields: String,
    /// Requests with other credentials have a higher one. `None`: it carries no credentials that could be renewed.
    pub(in crate::store::remote) generation: Option<u64>,
    /// True if the server may work for long before it answers: it puts an object together.
    pub(in crate::store::remote) is_long: bool,
}

impl fmt::Debug for WriteOrder {
    /// Without its fields, which may hold a signature.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.method, self.address)
    }
}

/// The answer to a request.
#[derive(Debug)]
pub(in crate::store::remote) struct Reply {
    pub(in crate::store::remote) status: u16,
    fields: Vec<(String, Vec<u8>)>,
    pub(in crate::store::remote) body: Vec<u8>,
    /// True if the request was sent before, and the server may have carried it out then.
    pub(in crate::store::remote) is_repeated: bool,
    /// The server's words, for an error.
    pub(in crate::store::remote) shown: String,
}

impl Reply {
    /// The value of a field.
    pub(in crate::store::remote) fn field(&self, name: &str) -> Option<String> {
        let found = self.fields.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| String::from_utf8_lossy(value).trim().to_owned())
    }

    /// The error of an answer that says something else than was expected.
    pub(in crate::store::remote) fn unexpected(&self, what: &str) -> Error {
        let text = format!("{what}: the server answered {}", self.shown);
        Error::new(ErrorKind::Io, text).answered(self.status, None)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::store::remote) struct Courier {
    common: Arc<Common>,
    idle: Mutex<Vec<(Line, Option<Permit>)>>,
    rate: SendRate,
    node: Option<SharedBudget>,
}

/// How a thread waits for one request.
struct SendWait<'w> {
    watch: &'w dyn UploadWatch,
    rate: &'w SendRate,
    stall: Duration,
    last: Mutex<Instant>,
}

impl LinePace for SendWait<'_> {
    fn left(&self) -> io::Result<Duration> {
        self.watch.check().map_err(|_| io::Error::other(NobodyWaits))?;
        let left = self.stall.saturating_sub(lock(&self.last).elapsed());
        if left.is_zero() {
            return Err(late());
        }
        Ok(left)
    }

    fn may_send(&self, most: usize) -> io::Result<usize> {
        loop {
            match self.rate.take(most, Instant::now()) {
                Ok(bytes) => return Ok(bytes),
                Err(wait) => {
                    sleep(wait.min(LOOK));
                    // The limit is ours: the server is not silent.
                    self.moved(0);
                    self.left()?;
                }
            }
        }
    }

    fn moved(&self, _bytes: usize) {
        *lock(&self.last) = Instant::now();
        self.watch.moved();
    }
}

/// Nobody wants the answer any more.
#[derive(Debug)]
struct NobodyWaits;

impl std::fmt::Display for NobodyWaits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("given up")
    }
}

impl std::error::Error for NobodyWaits {}

/// The result of one try.
enum Tried {
    Answered(Reply),
    /// It may go better later, after so long.
    Again(Error, Duration),
    /// The next try goes elsewhere.
    Moved,
    /// The next try will have other credentials.
    Renewed,
}

impl Courier {
    pub(in crate::store::remote) fn new(common: Arc<Common>) -> Result<Courier> {
        let node = common.settings.node.as_ref().map(SharedBudget::join).transpose()?;
        let rate = SendRate::new(common.settings.bandwidth);
        Ok(Courier { common, idle: Mutex::default(), rate, node })
    }

    /// How long a request may bring nothing.
    pub(in crate::store::remote) fn stall(&self) -> Duration {
        self.common.settings.stall
    }

    /// Most requests at the same time.
    pub(in crate::store::remote) fn connections(&self) -> usize {
        self.common.settings.connections
    }

    /// Closes the connections that nothing is asked on.
    pub(in crate::store::remote) fn rest(&self) {
        lock(&self.idle).clear();
    }

    /// Sends the request that `word` words, until the server answers with one of `expected`, or with 2xx.
    ///
    /// # Errors
    /// `Permission`, `NotFound`, `Io`, `Timeout`, `Cancelled`.
    pub(in crate::store::remote) fn send(
        &self,
        requests: &dyn Requests,
        at: &str,
        word: &dyn Fn() -> Result<WriteOrder>,
        body: &[&[u8]],
        expected: &[u16],
        watch: &dyn UploadWatch,
    ) -> Result<Reply> {
        let settings = &self.common.settings;
        let (began, mut jitter) = (Instant::now(), Jitter::random());
        let (mut tries, mut moves, mut has_renewed) = (0, 0, false);
        let (mut pause, mut is_repeated) = (settings.pause, false);
        loop {
            watch.check()?;
            let order = word()?;
            let (sent, was_sent_twice) = self.sent(&order, body, watch)?;
            is_repeated |= was_sent_twice;
            let (e, longer) = match self.judged(requests, at, &order, sent, expected, (moves, has_renewed))? {
                Tried::Answered(reply) => return Ok(Reply { is_repeated, ..reply }),
                Tried::Moved => {
                    moves += 1;
                    continue;
                }
                Tried::Renewed => {
                    has_renewed = true;
                    continue;
                }
                Tried::Again(e, longer) => (e, longer),
            };
            is_repeated = true;
            tries += 1;
            watch.again(&e);
            let patience = settings.patience.unwrap_or_default();
            let patience = if is_busy(&e) { patience.max(settings.busy) } else { patience };
            if tries >= settings.tries && began.elapsed() >= patience {
                return Err(e.reworded(|why| format!("{why}; it was tried {tries} times")));
            }
            // Processes that are refused together must not come back together.
            let due = Instant::now() + longer + jitter.between(pause / 2, pause * 3 / 2);
            while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                watch.check()?;
                if is_busy(&e) {
                    // It has answered: a pause is no silence.
                    watch.moved();
                }
                sleep(left.min(LOOK));
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The answer to one try, or what went wrong on the connection, and whether it was sent on two of them.
    fn sent(&self, order: &WriteOrder, body: &[&[u8]], watch: &dyn UploadWatch) -> Result<(io::Result<Parts>, bool)> {
        let stall = if order.is_long { self.stall().max(PUTTING_TOGETHER) } else { self.stall() };
        let pace = SendWait { watch, rate: &self.rate, stall, last: Mutex::new(Instant::now()) };
        let (length, mut was_sent_twice) = (body.iter().map(|part| part.len()).sum(), false);
        loop {
            let (mut line, permit, is_used) = match self.line(&order.address.server, &pace, watch)? {
                Ok(found) => found,
                Err(e) => return Ok((Err(e), was_sent_twice)),
            };
            let outcome = line.ask(head(order, length), body, &pace);
            let is_gone = outcome.as_ref().is_err_and(|e| is_used && e.kind() != io::ErrorKind::TimedOut);
            // An answer counts, also to somebody who has given up.
            if outcome.is_err() {
                watch.check()?;
            }
            if is_gone {
                // The server has closed a connection that was kept: that is no failure. A new one will tell.
                lock(&self.idle).retain(|(line, _)| *line.server() != order.address.server);
                was_sent_twice = true;
                continue;
            }
            let gives_way = self.node.as_ref().is_some_and(SharedBudget::gives_way);
            if outcome.is_ok() && line.keeps() && !gives_way {
                lock(&self.idle).push((line, permit));
            }
            return Ok((outcome, was_sent_twice));
        }
    }

    /// A connection to a server, and whether it has been used.
    #[allow(clippy::type_complexity)]
    fn line(
        &self,
        server: &Server,
        pace: &dyn LinePace,
        watch: &dyn UploadWatch,
    ) -> Result<io::Result<(Line, Option<Permit>, bool)>> {
        let mut idle = lock(&self.idle);
        if let Some(known) = idle.iter().rposition(|(line, _)| line.server() == server) {
            let (line, permit) = idle.swap_remove(known);
            return Ok(Ok((line, permit, true)));
        }
        if self.node.is_some() {
            // Connections to other servers have the permits that this one needs.
            idle.clear();
        }
        drop(idle);
        let permit = match &self.node {
            None => None,
            Some(node) => loop {
                watch.check()?;
                if let Some(permit) = node.take() {
                    break Some(permit);
                }
                watch.moved();
                sleep(LOOK);
            },
        };
        Ok(Line::open(&self.common, server, false, self.stall(), pace).map(|line| (line, permit, false)))
    }

    /// The verdict on an answer.
    fn judged(
        &self,
        requests: &dyn Requests,
        at: &str,
        order: &WriteOrder,
        sent: io::Result<Parts>,
        expected: &[u16],
        (moves, has_renewed): (u32, bool),
    ) -> Result<Tried> {
        let server = &order.address.server;
        let (status, fields, body) = match sent {
            Ok((status, mut fields, body)) => {
                fields.retain(|(name, _)| !name.eq_ignore_ascii_case(SECRET));
                (status, fields, body)
            }
            Err(e) => {
                if let Some(refused) = refused(&e) {
                    return Err(refused);
                }
                let is_final = matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData);
                let kind = if e.kind() == io::ErrorKind::TimedOut { ErrorKind::Timeout } else { ErrorKind::Io };
                let e = Error::new(kind, format!("{}: {e}", self.common.named(server)));
                return if is_final { Err(e) } else { Ok(Tried::Again(e, Duration::ZERO)) };
            }
        };
        let answer = Answer::of(status, &fields, &body);
        let shown = answer.shown();
        if (200..300).contains(&status) || expected.contains(&status) {
            return Ok(Tried::Answered(Reply { status, fields, body, is_repeated: false, shown }));
        }
        let named = |e: Error| self.common.answered(server, e);
        match answer.judge(&Expected { object: None, range: 0..1 }) {
            Verdict::Again(e, longer) => Ok(Tried::Again(named(e), longer.unwrap_or_default())),
            Verdict::Moved { .. } if moves >= MOST_REDIRECTS => {
                Err(named(Error::new(ErrorKind::Io, format!("the server sends elsewhere again and again ({shown})"))))
            }
            Verdict::Moved { region: Some(region), .. } => {
                requests.learn_region(at, &region);
                Ok(Tried::Moved)
            }
            Verdict::Moved { .. } => {
                let text =
                    format!("the server redirects a request that writes ({shown}): give the address that it names");
                Err(named(Error::new(ErrorKind::Io, text)))
            }
            Verdict::Refused(refusal) => {
                let renews = |generation| !has_renewed && requests.renew(at, generation, &refusal);
                match order.generation.is_some_and(renews) {
                    true => Ok(Tried::Renewed),
                    false => Err(named(requests.explained(refusal))),
                }
            }
            Verdict::OtherEtag(e) | Verdict::Failed(e) => Err(named(e)),
            Verdict::Body { .. } | Verdict::Whole { .. } | Verdict::Less(_) | Verdict::Rest => {
                let text = format!("the server answers a request that writes with {shown}");
                Err(named(Error::new(ErrorKind::Io, text)))
            }
        }
    }
}

fn head(order: &WriteOrder, length: usize) -> Vec<u8> {
    let WriteOrder { method, address: Address { server, target }, fields, .. } = order;
    let (host, agent) = (server.authority(), concat!("penstock/", env!("CARGO_PKG_VERSION")));
    format!(
        "{method} {target} HTTP/1.1\r\nHost: {host}\r\n{fields}Content-Length: {length}\r\nAccept: */*\r\n\
         User-Agent: {agent}\r\n\r\n"
    )
    .into_bytes()
}
