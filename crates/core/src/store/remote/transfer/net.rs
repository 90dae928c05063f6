//! The connections of one load, on one thread: requests are sent, bodies received, and what fails is asked for again.

use super::fetch::RangeRequest;
use super::link::{Advance, Link, LinkState};
use super::links::Links;
use super::node_budget::{usual_folder, NodeBudget};
use super::pace::ConnectionPace;
use super::parting::Parting;
use super::queue::ReadQueue;
use super::range_read::{BodyPlaces, RangeRead};
use super::rate_limit::RateLimit;
use super::request_rate::RequestRate;
use super::told::{end, Told};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Ticket;
use crate::machine::cores;
use crate::store::object::Traffic;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::answer::{Verdict, GAP};
use crate::store::remote::http::common::{is_busy, Common, LOOK, MOST_REDIRECTS};
use crate::store::remote::http::refusal::refused;
use crate::store::remote::http::request::Get;
use crate::store::remote::http::settings::{NodeSettings, WebSettings};
use crate::store::remote::http::wires::{Watched, WireEnd, Wires};
use crate::sync::{lock, Mutex};
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest pause before a request is sent again, unless the server asks for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// The pause of a read whose server has too much to do: at most this after the first refusal, and this after further ones.
const BUSY_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// A request that brings so many bytes before it fails was no failure, if they stay: a slow server may need many.
pub(super) const MUCH: u64 = 64 << 10;
/// Requests for an object whose server has never answered: it is probably not there.
const TRIES_UNANSWERED: u32 = 3;
const MOST_RENEWALS: u32 = 3;
const DISCARD: usize = 64 << 10;
/// The least bytes of a request, where the bytes that can be asked for are divided among connections.
pub(super) const LEAST_ASKED: u64 = 2 << 20;
/// A request brings so many times what comes in the time to a first byte, also at the end of a load.
const FIRST_BYTES: f64 = 8.0;

/// Threads that share the connections of one load, at most, and the fewest connections for each.
const MOST_THREADS: usize = 8;
const LEAST_CONNECTIONS: usize = 8;
/// How long the end of a load waits for servers to notice that its connections are closed, if a budget counts them.
const FAREWELL: Duration = Duration::from_millis(250);
/// How often it is told that a server is there which has asked for patience.
const THERE: Duration = Duration::from_millis(300);

impl Common {
    /// How many threads share the connections of a load, and the same with the part of each.
    pub(in crate::store::remote) fn divided(self: &Arc<Common>) -> (usize, Arc<Common>) {
        let WebSettings { connections, first_connections, threads, bandwidth, .. } = self.settings;
        let threads = match threads {
            // One thread receives some GB/s, and the load needs others.
            0 => (cores() / 4).clamp(1, MOST_THREADS),
            threads => threads,
        };
        let threads = threads.min(connections / LEAST_CONNECTIONS).max(1);
        if threads == 1 {
            return (1, self.clone());
        }
        let mut part = Common::clone(self);
        part.settings.connections = connections / threads;
        part.settings.bandwidth = bandwidth.map(|bytes| bytes / threads as u64);
        part.settings.first_connections = first_connections.div_ceil(threads);
        (threads, Arc::new(part))
    }
}

/// The connections.
pub(in crate::store::remote) struct Net<W: Wires> {
    pub(in crate::store::remote) wires: W,
    pub(in crate::store::remote) common: Arc<Common>,
    pub(super) links: Links<W::Stream>,
    pub(in crate::store::remote) waiting: ReadQueue,
    pub(super) pace: ConnectionPace,
    pub(super) rate_limit: RateLimit,
    pub(super) request_rate: RequestRate,
    /// The budget of this node, and what of it may be used here.
    pub(in crate::store::remote) node: Option<NodeBudget>,
    /// Connections of that budget that were left.
    pub(super) parting: Parting<W::Stream>,
    share_of_node: usize,
    /// When it is told next that a server is there, which has asked for patience.
    there_at: Instant,
    /// When connections are looked at next, for those that bring nothing or little.
    look_at: Instant,
    pub(in crate::store::remote) counts: Arc<Mutex<Traffic>>,
    /// Bytes between two reads of one request, at most.
    pub(in crate::store::remote) gap: u64,
    /// Requests that were sent here.
    pub(in crate::store::remote) asked: u64,
    /// Requests that were moved because their connection was slow or silent.
    pub(super) stragglers: u64,
    /// When bytes last came, on any connection.
    pub(in crate::store::remote) last: Instant,
    /// A turn waits no longer than this.
    pub(in crate::store::remote) longest_wait: Option<Duration>,
    discard: Vec<u8>,
    numbers: Vec<usize>,
}

impl<W: Wires> Net<W> {
    pub(in crate::store::remote) fn new(wires: W, common: Arc<Common>, counts: Arc<Mutex<Traffic>>) -> Net<W> {
        let now = wires.now();
        let settings = &common.settings;
        Net {
            links: Links::default(),
            waiting: ReadQueue::default(),
            pace: ConnectionPace::new(settings.first_connections, settings.connections, now),
            rate_limit: RateLimit::new(settings.bandwidth, now),
            request_rate: RequestRate::new(wires.jitter(), now),
            wires,
            common,
            node: None,
            parting: Parting::default(),
            share_of_node: usize::MAX,
            there_at: now,
            look_at: now,
            counts,
            gap: GAP,
            asked: 0,
            stragglers: 0,
            last: now,
            longest_wait: None,
            discard: vec![0; DISCARD],
            numbers: Vec::new(),
        }
    }

    /// Has its connections count in the budget of this node, if there is one.
    pub(in crate::store::remote) fn join_node(&mut self) -> Result<()> {
        if let Some(NodeSettings { connections, folder }) = &self.common.settings.node {
            let folder = folder.clone().unwrap_or_else(usual_folder);
            self.node = Some(NodeBudget::join(&folder, *connections, self.wires.jitter())?);
        }
        Ok(())
    }

    /// Most connections now.
    pub(super) fn limit(&self) -> usize {
        self.pace.limit().min(self.share_of_node)
    }

    pub(in crate::store::remote) fn add(&mut self, read: RangeRead) {
        self.waiting.add(read);
    }

    /// Gives a read its place. One that has ended has none any more.
    pub(in crate::store::remote) fn land(
        &mut self,
        ticket: Ticket,
        places: BodyPlaces,
        keep: Arc<dyn Any + Send + Sync>,
        told: &mut Vec<Told>,
    ) {
        let has = |read: &&mut RangeRead| read.ticket == ticket;
        // The reads that have arrived are mostly the first two of a request.
        let among = |link: &Link<_>, most| {
            link.fetch.iter().flat_map(|fetch| fetch.reads.iter().take(most)).any(|read| read.ticket == ticket)
        };
        let near = self.links.iter().find(|(_, link)| among(link, 2));
        let number = near.or_else(|| self.links.iter().find(|(_, link)| among(link, usize::MAX))).map(|found| found.0);
        let of_link = number.and_then(|number| {
            let (_, link) = self.links.iter_mut().find(|(other, _)| *other == number)?;
            let read = link.fetch.iter_mut().flat_map(|fetch| &mut fetch.reads).find(has)?;
            Some((Some(number), read))
        });
        let found = of_link.or_else(|| self.waiting.iter_mut().find(has).map(|read| (None, read)));
        let Some((number, read)) = found else { return };
        (read.places, read.keep) = (Some(places), keep);
        let Some(number) = number else { return };
        let now = self.wires.now();
        if let Some(mut link) = self.links.take(number) {
            link.unpark(now);
            self.advance(number, link, now, told);
        }
    }

    /// Gives up every read: connections on which one was asked for are closed.
    pub(in crate::store::remote) fn cancel(&mut self, told: &mut Vec<Told>) {
        self.give_up(&Error::new(ErrorKind::Cancelled, "the load was cancelled before this was read"), told);
    }

    /// Ends every read with this error.
    pub(in crate::store::remote) fn give_up(&mut self, e: &Error, told: &mut Vec<Told>) {
        let mut reads: Vec<RangeRead> = self.waiting.drain().collect();
        let now = self.wires.now();
        while let Some((_, link)) = self.links.take_where(|link| link.fetch.is_some()) {
            reads.extend(self.leave(link, now).into_iter().flat_map(|fetch| fetch.reads));
        }
        reads.into_iter().for_each(|read| fail(read, e.clone(), told));
    }

    /// Waits until something happens, and does what follows from it.
    pub(in crate::store::remote) fn turn(&mut self, told: &mut Vec<Told>) -> Result<()> {
        let before = self.wires.now();
        self.share_of_node = self.node.as_mut().map_or(usize::MAX, |node| node.limit(before));
        // The places that are free now are for the first that looks.
        if self.parting.expire(before) {
            self.node.iter_mut().for_each(|node| node.look_again(before));
        }
        if self.waiting.len() == 0 {
            self.parting.drop_spare();
        }
        self.waiting.resume(before);
        self.release(before, told);
        // A connection may be there at once, and lost at once.
        while self.ask_next(before, told) || self.connect_more(before, told) {}
        if let Some(ticket) = self.waiting.put_off().filter(|_| before >= self.there_at) {
            // The server is there, so this is no stall.
            self.there_at = before + THERE;
            told.push(Told::Received(ticket));
        }
        if !told.is_empty() {
            return Ok(());
        }
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.clear();
        let all = self.wires.wait(self.patience(before), &mut numbers)?;
        let now = self.wires.now();
        let mut bytes = 0;
        for &number in &numbers {
            if let Some(is_free) = self.parting.advance(number, &mut self.discard) {
                self.node.iter_mut().filter(|_| is_free).for_each(|node| node.look_again(now));
            } else if let Some(link) = self.links.take(number) {
                bytes += self.advance(number, link, now, told);
            }
        }
        self.numbers = numbers;
        let busy = self.links.count(LinkState::Asked) + self.links.count(LinkState::Body);
        let is_limited = self.rate_limit.is_limit(now);
        self.pace.turned(now.duration_since(before), bytes, busy >= self.limit() && !is_limited);
        // What has come and was not looked at yet is no silence.
        if all && now >= self.look_at {
            self.look_at = now + LOOK.min(self.common.settings.stall / 4);
            self.drop_stalled(now, told);
            if !is_limited {
                self.mend_stragglers(now);
            }
            self.pace.judge(now);
            self.leave_queued(now);
        }
        Ok(())
    }

    /// How long to wait for events; `None`: until there are some.
    pub(in crate::store::remote) fn patience(&self, now: Instant) -> Option<Duration> {
        let idle = self.links.count(LinkState::Idle) + self.links.count(LinkState::Parked);
        let look = (self.links.len() > idle).then_some(self.look_at);
        let asks = self.waiting.len() > 0;
        // What was due was tried in this turn: it waits for something else.
        let is_later = |due: &Instant| asks && *due > now;
        let sends = self.request_rate.due().filter(|due| is_later(due) && self.links.count(LinkState::Idle) > 0);
        let connects = self.node.as_ref().and_then(NodeBudget::due).filter(is_later);
        let there = self.waiting.put_off().map(|_| self.there_at);
        let own = [look, self.rate_limit.due(), sends, connects, there, self.parting.due()].into_iter().flatten();
        let due = self.waiting.next_due().into_iter().chain(own).min();
        let due = due.map(|due| due.saturating_duration_since(now));
        due.into_iter().chain(self.longest_wait).min()
    }

    /// Closes connections that bring nothing, and asks for the rest of their reads again.
    fn drop_stalled(&mut self, now: Instant, told: &mut Vec<Told>) {
        let stall = self.common.settings.stall;
        let is_stalled = |link: &Link<_>| {
            let waits = link.is_busy() || link.state == LinkState::Connecting;
            waits && !link.is_held && now.duration_since(link.last) >= stall
        };
        while let Some((_, link)) = self.links.take_where(is_stalled) {
            let silent = self.common.named(&link.server);
            let (server, got, has_other) = (link.server.clone(), link.got, link.stream.has_other());
            let text = format!("the server has sent nothing for {:.1} s ({silent})", stall.as_secs_f64());
            let e = Error::new(ErrorKind::Timeout, text);
            match self.leave(link, now) {
                Some(fetch) => self.again(fetch, got, e, None, told),
                // Another address is tried, or was.
                None if has_other => {}
                None => self.not_connected(&server, e, false, now, told),
            }
        }
    }

    /// Sends one request on an idle connection, if there is one for something that waits.
    fn ask_next(&mut self, now: Instant, told: &mut Vec<Told>) -> bool {
        let mut passed = None;
        for at in 0..self.waiting.len() {
            if self.links.count(LinkState::Idle) == 0 || !self.request_rate.may_send(now) {
                return false;
            }
            let Some(read) = self.waiting.get(at) else { return false };
            let site: *const () = Arc::as_ptr(&read.site).cast();
            if passed == Some(site) {
                continue;
            }
            let request = match read.site.request(self.wires.wake()) {
                // Its credentials come.
                None => {
                    passed = Some(site);
                    continue;
                }
                Some(Ok(request)) => request,
                Some(Err(e)) => {
                    self.waiting.take(at).into_iter().for_each(|read| fail(read, e.clone(), told));
                    return true;
                }
            };
            let server = &request.address.server;
            // One read finds out where such a server redirects to, and the others go there at once.
            if self.redirects(server) && self.is_asked(read, &request.address) {
                passed = Some(site);
                continue;
            }
            let is_free = |link: &Link<_>| link.state == LinkState::Idle && link.server == *server;
            let Some((number, mut link)) = self.links.take_where(is_free) else {
                passed = Some(site);
                continue;
            };
            let share = self.share();
            if let Some(mut fetch) = RangeRequest::take(&mut self.waiting, at, share, self.gap) {
                fetch.reads.iter_mut().for_each(|read| read.asked = Some(request.clone()));
                lock(&self.counts).requests += 1;
                self.asked += 1;
                self.request_rate.sent(now);
                link.ask(fetch, &request, now);
            }
            self.advance(number, link, now, told);
            return true;
        }
        false
    }

    /// Bytes to ask for in the next request.
    fn share(&self) -> u64 {
        if self.request_rate.is_bound() {
            // Few requests, each for much.
            return self.common.settings.request_bytes;
        }
        let (waiting, limit) = (self.waiting.bytes(), self.limit());
        // Less and less towards the end, so that all connections end together.
        let part = waiting / limit as u64;
        // Where a first byte comes late, small requests cost more than that, unless connections would have nothing to do.
        let free = self.links.count(LinkState::Idle) + limit.saturating_sub(self.links.len());
        let worth = self.pace.rate() * self.pace.first_byte().as_secs_f64() * FIRST_BYTES;
        let worth = (worth as u64).min(waiting / free.max(1) as u64);
        part.max(worth).max(LEAST_ASKED).min(self.common.settings.request_bytes)
    }

    /// Whether a read of the same object has asked there, and has no answer yet.
    fn is_asked(&self, read: &RangeRead, at: &Address) -> bool {
        let asks = |other: &RangeRead| {
            Arc::ptr_eq(&other.site, &read.site) && other.asked.as_ref().is_some_and(|asked| asked.address == *at)
        };
        let first = |link: &Link<_>| link.fetch.as_ref().and_then(|fetch| fetch.reads.front()).is_some_and(asks);
        self.links.iter().any(|(_, link)| link.state == LinkState::Asked && first(link))
    }

    /// The reads of a request that has ended wait again, before the others.
    pub(in crate::store::remote) fn back(&mut self, fetch: Option<RangeRequest>) {
        self.waiting.put_back(fetch.into_iter().flat_map(|fetch| fetch.reads));
    }

    /// Does what can be done on a connection, which has no other owner meanwhile. How many bytes of a body came.
    pub(super) fn advance(
        &mut self,
        number: usize,
        mut link: Link<W::Stream>,
        now: Instant,
        told: &mut Vec<Told>,
    ) -> u64 {
        let (had, had_gaps, had_answer) = (link.got, link.gaps, link.answered_at);
        let most = self.rate_limit.allowed(now);
        let mut allowed = most;
        let next = link.advance(now, &mut allowed, &mut self.discard, told);
        self.rate_limit.took(most - allowed);
        // A request that was sent just now counts from 0.
        let (all, got) = (link.got, link.got.saturating_sub(had));
        if got > 0 {
            self.last = now;
            let mut counts = lock(&self.counts);
            counts.received += got;
            counts.gaps += link.gaps.saturating_sub(had_gaps);
        }
        if let (None, Some(answered)) = (had_answer, link.answered_at) {
            self.pace.answered(answered.duration_since(link.asked_at));
            if !matches!(next, Advance::Told(_)) {
                self.request_rate.taken(now);
            }
        }
        match next {
            Advance::Wait => self.keep(number, link, told),
            Advance::Held => {
                self.rate_limit.hold(number);
                self.keep(number, link, told);
            }
            Advance::Ready => {
                let served = link.answered_at.take();
                if let Some(answered) = served {
                    self.pace.served(all, now.duration_since(answered));
                }
                // There may be fewer by now, or other processes wait for it.
                let gives_way = self.node.as_ref().is_some_and(|node| node.gives_way(self.waiting.len() == 0));
                match self.links.len() < self.limit() && !(gives_way && served.is_some()) {
                    true => self.keep(number, link, told),
                    false => drop(self.leave(link, now)),
                }
            }
            Advance::Close => drop(self.leave(link, now)),
            Advance::Told(verdict) => {
                let fetch = link.fetch.take();
                self.leave(link, now);
                if let Some(fetch) = fetch {
                    self.judged(fetch, verdict, now, told);
                }
            }
            Advance::Failed(e) => {
                // On a connection that was used before, it may be the rest of an earlier answer.
                let reused = link.reused;
                match self.leave(link, now) {
                    Some(fetch) if reused => self.again(fetch, 0, e, None, told),
                    fetch => fail_all(fetch, &e, told),
                }
            }
            Advance::Lost(e) => self.lost(link, e, now, told),
        }
        got
    }

    /// A connection is lost.
    fn lost(&mut self, link: Link<W::Stream>, e: io::Error, now: Instant, told: &mut Vec<Told>) {
        let (refused, is_expired) = (refused(&e), link.reused && link.is_unanswered());
        let server = self.common.named(&link.server);
        match (link.fetch, refused) {
            (None, None) if link.state == LinkState::Connecting && link.stream.has_other() => {}
            (None, refused) if link.state == LinkState::Connecting => {
                let is_final = refused.is_some();
                let no = || Error::new(ErrorKind::Io, format!("there is no connection to {server}")).caused_by(e);
                self.not_connected(&link.server, refused.unwrap_or_else(no), is_final, now, told);
            }
            (None, _) => {}
            // The server has closed a connection that it had kept: no request has failed.
            (fetch, _) if is_expired => self.back(fetch),
            (fetch, Some(cause)) => fail_all(fetch, &cause, told),
            (Some(fetch), None) => {
                let e = Error::new(ErrorKind::Io, format!("the connection to {server} is lost")).caused_by(e);
                self.again(fetch, link.got, e, None, told);
            }
        }
    }

    /// Closes a connection, and gives back what was asked on it. In a budget of the node its place becomes free when the server
    /// has closed it too.
    pub(in crate::store::remote) fn leave(&mut self, link: Link<W::Stream>, now: Instant) -> Option<RangeRequest> {
        self.parting.leave(link, now, false, &mut self.wires)
    }

    /// Takes a connection back, watched for what it waits for.
    fn keep(&mut self, number: usize, mut link: Link<W::Stream>, told: &mut Vec<Told>) {
        let wanted = match link.state {
            LinkState::Parked => Watched::Nothing,
            _ if link.is_held => Watched::Nothing,
            _ if link.stream.has_to_send() => Watched::Both,
            _ => Watched::Bytes,
        };
        match self.wires.watch(&link.stream, number, link.watched, wanted) {
            Ok(()) => {
                link.watched = wanted;
                self.links.put(number, link);
            }
            Err(e) => fail_all(link.fetch, &e, told),
        }
    }

    /// The server says something else than the bytes.
    pub(in crate::store::remote) fn judged(
        &mut self,
        mut fetch: RangeRequest,
        verdict: Verdict,
        now: Instant,
        told: &mut Vec<Told>,
    ) {
        let verdict = self.of_proxy(&fetch, verdict);
        match verdict {
            Verdict::Body { .. } | Verdict::Whole { .. } => {}
            Verdict::Rest => self.back(Some(fetch)),
            Verdict::Less(end) => {
                fetch.reads.iter_mut().for_each(|read| read.less(end));
                self.back(Some(fetch));
            }
            Verdict::Moved { to, region } => {
                fetch.reads.iter_mut().for_each(|read| read.redirects += 1);
                let Some(first) = fetch.reads.front() else { return };
                if first.redirects > MOST_REDIRECTS {
                    let text = format!("the server redirects more than {MOST_REDIRECTS} times");
                    return fail_all(Some(fetch), &Error::new(ErrorKind::Io, text), told);
                }
                let asked = first.asked.as_ref().map(|asked| &asked.address);
                lock(&self.common.redirecting).extend(asked.map(|address| address.server.clone()));
                match asked.map(|address| address.moved(&to)).transpose() {
                    Ok(next) => {
                        next.into_iter().for_each(|next| first.site.moved(next, region.as_deref()));
                        self.back(Some(fetch));
                    }
                    Err(e) => fail_all(Some(fetch), &e.of_kind(ErrorKind::Io), told),
                }
            }
            Verdict::Again(e, pause) => {
                let mut pause = pause;
                if is_busy(&e) {
                    self.pace.slow_down(now);
                    let tries = fetch.reads.front().map_or(0, |read| read.tries);
                    // The pauses of tests are shorter.
                    let (least, longest) = BUSY_PAUSE;
                    let least = least.min(self.common.settings.pause * 5);
                    let random = self.request_rate.refused(now, tries, (least, longest));
                    pause = Some(pause.unwrap_or_default() + random);
                }
                self.again(fetch, 0, e, pause, told);
            }
            Verdict::Refused(refusal) => {
                // A new location may expire before it is used, but not always.
                let Some(first) = fetch.reads.front() else { return };
                // With another credential it is asked for once.
                let most = if first.asked.as_ref().is_some_and(|asked| asked.is_moved) { MOST_RENEWALS } else { 1 };
                let renews = |asked: &Get| first.renewed < most && first.site.renew(asked, &refusal);
                if first.asked.as_ref().is_some_and(renews) {
                    for read in &mut fetch.reads {
                        (read.renewed, read.redirects) = (read.renewed + 1, 0);
                    }
                    self.back(Some(fetch));
                } else {
                    let e = first.site.requests.explained(refusal);
                    fail_all(Some(fetch), &e, told);
                }
            }
            // A server that redirects may compare the ETag with one of its own. Every answer is compared here as well.
            Verdict::OtherEtag(_) if fetch.pinned => {
                fetch.reads.iter().for_each(|read| read.site.unpin());
                self.back(Some(fetch));
            }
            Verdict::OtherEtag(e) | Verdict::Failed(e) => fail_all(Some(fetch), &e, told),
        }
    }

    /// Asks for the rest of a request that has brought `got` bytes again, after a pause, or gives it up.
    fn again(&mut self, fetch: RangeRequest, got: u64, e: Error, pause: Option<Duration>, told: &mut Vec<Told>) {
        let mut counts = lock(&self.counts);
        counts.retries += 1;
        counts.busy += u64::from(is_busy(&e));
        drop(counts);
        fetch.reads.into_iter().for_each(|read| self.tried(read, got, &e, pause, told));
    }

    /// A read after a request that failed: it waits for a while, or ends.
    pub(in crate::store::remote) fn tried(
        &mut self,
        mut read: RangeRead,
        got: u64,
        e: &Error,
        pause: Option<Duration>,
        told: &mut Vec<Told>,
    ) {
        // What begins again has brought nothing that stays.
        if got >= MUCH && !read.begins_again() {
            (read.tries, read.failing) = (0, None);
        }
        let now = self.wires.now();
        read.tries += 1;
        let failing = now.saturating_duration_since(*read.failing.get_or_insert(now));
        let settings = &self.common.settings;
        let most = settings.tries;
        let most = if read.answered || read.object().is_some() { most } else { most.min(TRIES_UNANSWERED) };
        let busy = if is_busy(e) { settings.busy } else { Duration::ZERO };
        if read.tries >= most && failing >= settings.patience.unwrap_or_default().max(busy) {
            let (tries, seconds) = (read.tries, failing.as_secs_f64());
            let e = e.clone().reworded(|why| format!("{why}; it was asked for {tries} times in {seconds:.1} s"));
            return fail(read, e, told);
        }
        read.put_off = e.status().is_some();
        let due = match pause.filter(|_| is_busy(e)) {
            Some(pause) => now + pause,
            None => {
                let usual = settings.pause.saturating_mul(1 << (read.tries - 1).min(10)).min(LONGEST_PAUSE);
                let random = self.request_rate.spread(usual);
                now + random.max(pause.unwrap_or_default() + random / 2)
            }
        };
        self.waiting.pause(read, due);
    }
}

impl<W: Wires> Drop for Net<W> {
    fn drop(&mut self) {
        let mut now = self.wires.now();
        let until = now + FAREWELL;
        while let Some((_, link)) = self.links.take_where(|link| link.permit.is_some()) {
            self.leave(link, now);
        }
        let mut numbers = Vec::new();
        while self.parting.awaits_ends() && now < until {
            if self.wires.wait(Some(until.saturating_duration_since(now)), &mut numbers).is_err() {
                return;
            }
            for number in numbers.drain(..) {
                self.parting.advance(number, &mut self.discard);
            }
            now = self.wires.now();
        }
    }
}

pub(super) fn fail(read: RangeRead, e: Error, told: &mut Vec<Told>) {
    let e = read.located(e);
    end(read, Err(e), told);
}

fn fail_all(fetch: Option<RangeRequest>, e: &Error, told: &mut Vec<Told>) {
    fetch.into_iter().flat_map(|fetch| fetch.reads).for_each(|read| fail(read, e.clone(), told));
}
