//! The connections of one load, on one thread: requests are sent, bodies received, and what fails is asked for again.

use super::address::Server;
use super::answer::Verdict;
use super::connection::Connection;
use super::link::{Advance, Link, LinkState};
use super::names::Names;
use super::range_read::{BodyPlaces, RangeRead};
use super::settings::WebSettings;
use super::tls::Tls;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Route, Ticket};
use crate::source::epoll;
use crate::store::version::Version;
use crate::wake::Wake;
use rustls::pki_types::ServerName;
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest pause before a request is sent again, unless the server asks for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// A request that brings so many bytes before it fails was no failure: a slow server may need many.
const MUCH: u64 = 64 << 10;
/// Requests for an object whose server has never answered: it is probably not there.
const TRIES_UNANSWERED: u32 = 3;
const MOST_REDIRECTS: u32 = 5;
const DISCARD: usize = 64 << 10;
const WAKE: u64 = u64::MAX;

/// What all connections to web servers share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) settings: WebSettings,
    pub(super) names: Arc<Names>,
    pub(super) tls: Tls,
}

/// What happened to a read.
pub(super) enum Told {
    Arrived(Ticket),
    Received(Ticket),
    /// It has ended, and nothing holds its memory. Of an object that was seen: its size and version.
    Done {
        ticket: Ticket,
        route: Route,
        result: Result<u64>,
        object: Option<(u64, Version)>,
        /// Bytes that were received into its place, from the first on.
        written: u64,
    },
}

/// The connections.
pub(super) struct Net {
    common: Arc<Common>,
    epoll: OwnedFd,
    /// Notified when there is something new to do. Without one, name servers are waited for.
    wake: Option<Arc<Wake>>,
    links: Vec<Option<Link>>,
    /// Reads that have no connection: those that were sent back first.
    waiting: VecDeque<RangeRead>,
    /// Connections that were made; each goes to the next address of its server.
    made: usize,
    discard: Vec<u8>,
}

impl Net {
    pub(super) fn new(common: Arc<Common>, wake: Option<Arc<Wake>>) -> Result<Net> {
        let epoll = epoll()?;
        if let Some(wake) = &wake {
            control(&epoll, libc::EPOLL_CTL_ADD, wake.fd(), libc::EPOLLIN as u32, WAKE)?;
        }
        let (links, waiting) = (Vec::new(), VecDeque::new());
        Ok(Net { common, epoll, wake, links, waiting, made: 0, discard: vec![0; DISCARD] })
    }

    pub(super) fn add(&mut self, download: RangeRead) {
        self.waiting.push_back(download);
    }

    /// Gives a read its place. One that has ended has none any more.
    pub(super) fn land(
        &mut self,
        ticket: Ticket,
        places: BodyPlaces,
        keep: Arc<dyn Any + Send + Sync>,
        told: &mut Vec<Told>,
    ) {
        let has = |job: &RangeRead| job.ticket == ticket;
        if let Some(job) = self.waiting.iter_mut().find(|job| has(job)) {
            (job.places, job.keep) = (Some(places), keep);
            return;
        }
        let found = self.links.iter().position(|link| link.as_ref().is_some_and(|l| l.job.as_ref().is_some_and(has)));
        let Some(number) = found else { return };
        let Some(mut link) = self.links[number].take() else { return };
        if let Some(job) = &mut link.job {
            (job.places, job.keep) = (Some(places), keep);
        }
        let now = Instant::now();
        if link.state == LinkState::Parked {
            link.unpark(now);
        }
        self.advance(number, link, now, told);
    }

    /// Gives up every read: connections on which one was asked for are closed.
    pub(super) fn cancel(&mut self, told: &mut Vec<Told>) {
        self.give_up(&Error::new(ErrorKind::Cancelled, "the load was cancelled before this was read"), told);
    }

    /// Ends every read with this error.
    pub(super) fn give_up(&mut self, e: &Error, told: &mut Vec<Told>) {
        let mut jobs: Vec<RangeRead> = self.waiting.drain(..).collect();
        for slot in &mut self.links {
            if let Some(link) = slot.take_if(|link| link.state != LinkState::Idle) {
                jobs.extend(link.job);
            }
        }
        jobs.into_iter().for_each(|job| fail(job, e.clone(), told));
    }

    /// Waits until something happens, and does what follows from it.
    pub(super) fn turn(&mut self, told: &mut Vec<Told>) -> Result<()> {
        let now = Instant::now();
        self.dispatch(now, told);
        if !told.is_empty() {
            return Ok(());
        }
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let (fd, most) = (self.epoll.as_raw_fd(), events.len() as i32);
        // SAFETY: `events` has room for as many as are asked for.
        let found = unsafe { libc::epoll_wait(fd, events.as_mut_ptr(), most, self.patience(now)) };
        if found < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::Interrupted {
                Ok(())
            } else {
                Err(Error::io("wait for servers", &e))
            };
        }
        let now = Instant::now();
        for event in &events[..found as usize] {
            let number = event.u64 as usize;
            if event.u64 == WAKE {
                self.wake.iter().for_each(|wake| wake.clear());
            } else if let Some(link) = self.links.get_mut(number).and_then(Option::take) {
                self.advance(number, link, now, told);
            }
        }
        self.drop_stalled(now, told);
        Ok(())
    }

    /// How long to wait for events, in milliseconds.
    fn patience(&self, now: Instant) -> i32 {
        let pauses = self.waiting.iter().map(|job| job.not_before).filter(|due| *due > now);
        let links = self.links.iter().flatten().filter(|link| matches!(link.state, LinkState::Asked | LinkState::Body));
        let stalls = links.map(|link| link.last + self.common.settings.stall);
        match pauses.chain(stalls).min() {
            Some(due) => due.saturating_duration_since(now).as_millis().min(60_000) as i32 + 1,
            None => -1,
        }
    }

    /// Closes connections that bring nothing, and asks for the rest of their reads again.
    fn drop_stalled(&mut self, now: Instant, told: &mut Vec<Told>) {
        let stall = self.common.settings.stall;
        for number in 0..self.links.len() {
            let stalled = |link: &mut Link| {
                matches!(link.state, LinkState::Asked | LinkState::Body) && now.duration_since(link.last) >= stall
            };
            if let Some(job) = self.links[number].take_if(stalled).and_then(|link| link.job) {
                let text = format!("the server has sent nothing for {:.1} s", stall.as_secs_f64());
                self.again(job, Error::new(ErrorKind::Timeout, text), None, told);
            }
        }
    }

    /// Sends what waits, as far as there are connections for it.
    fn dispatch(&mut self, now: Instant, told: &mut Vec<Told>) {
        let mut at = 0;
        while at < self.waiting.len() {
            let job = &self.waiting[at];
            if job.not_before > now {
                at += 1;
                continue;
            }
            let request = match job.site.request(self.wake.as_ref()) {
                None => {
                    at += 1;
                    continue;
                }
                Some(Ok(request)) => request,
                Some(Err(e)) => {
                    self.waiting.remove(at).into_iter().for_each(|job| fail(job, e.clone(), told));
                    continue;
                }
            };
            let server = &request.address.server;
            let found = match self.take_idle(server) {
                Some(found) => Ok(Some(found)),
                None if !self.has_room() => return,
                None => self.open(server, now),
            };
            let Some(found) = found.transpose() else {
                at += 1;
                continue;
            };
            let Some(mut job) = self.waiting.remove(at) else { return };
            match found {
                Ok((number, mut link)) => {
                    job.asked = Some(request.clone());
                    link.ask(job, &request, now);
                    self.advance(number, link, now, told);
                    // The connection may be lost, and its read be the first in the queue again.
                    at = 0;
                }
                Err(e) if matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::Invalid | ErrorKind::Limit) => {
                    fail(job, e, told);
                }
                Err(e) => self.again(job, e, None, told),
            }
        }
    }

    /// A connection to that server on which nothing is asked for.
    fn take_idle(&mut self, server: &Server) -> Option<(usize, Link)> {
        let idle = |link: &Link| link.state == LinkState::Idle && link.server == *server;
        let number = self.links.iter().position(|link| link.as_ref().is_some_and(idle))?;
        self.links[number].take().map(|link| (number, link))
    }

    /// Whether one more connection may be made, perhaps in the place of an idle one to another server.
    fn has_room(&mut self) -> bool {
        if self.links.iter().flatten().count() < self.common.settings.connections {
            return true;
        }
        let idle = |slot: &&mut Option<Link>| slot.as_ref().is_some_and(|link| link.state == LinkState::Idle);
        self.links.iter_mut().find(idle).and_then(Option::take).is_some()
    }

    /// A new connection to that server, and its number; `None` if the addresses of the server are not known yet.
    fn open(&mut self, server: &Server, now: Instant) -> Result<Option<(usize, Link)>> {
        let Some(addresses) = self.common.names.addresses(server, self.wake.as_ref()) else { return Ok(None) };
        let addresses = addresses?;
        self.made += 1;
        let tls = if server.tls { Some(self.tls(&server.host)?) } else { None };
        let connection = Connection::connect(&addresses[self.made % addresses.len()], tls);
        let link = Link::new(connection.map_err(|e| Error::io("connect", &e))?, server.clone(), now);
        Ok(Some((self.room(), link)))
    }

    /// A number for one more connection.
    fn room(&mut self) -> usize {
        self.links.iter().position(Option::is_none).unwrap_or_else(|| {
            self.links.push(None);
            self.links.len() - 1
        })
    }

    fn tls(&self, host: &str) -> Result<(Arc<rustls::ClientConfig>, ServerName<'static>)> {
        let config = self.common.tls.config(self.common.settings.authorities.as_deref())?;
        let name = ServerName::try_from(host.to_owned());
        Ok((config, name.map_err(|e| Error::new(ErrorKind::Invalid, format!("the host has no valid name: {e}")))?))
    }

    /// Does what can be done on a connection, which has no other owner meanwhile.
    fn advance(&mut self, number: usize, mut link: Link, now: Instant, told: &mut Vec<Told>) {
        let mut received = false;
        let next = link.advance(now, &mut self.discard, &mut received);
        if let (true, Some(job)) = (received, &link.job) {
            told.push(Told::Received(job.ticket));
        }
        match next {
            Advance::Wait => self.keep(number, link, told),
            Advance::Park => {
                if let Some(job) = link.job.as_mut().filter(|job| !job.arrived) {
                    job.arrived = true;
                    told.push(Told::Arrived(job.ticket));
                }
                self.keep(number, link, told);
            }
            Advance::Done => {
                if let Some(job) = link.job.take() {
                    let got = job.got();
                    end(job, Ok(got), told);
                }
                if link.keeps {
                    (link.state, link.reused) = (LinkState::Idle, true);
                    self.keep(number, link, told);
                }
            }
            Advance::Close => {}
            Advance::Told(verdict) => {
                if let Some(job) = link.job {
                    self.judged(job, verdict, told);
                }
            }
            Advance::Failed(e) => {
                // On a connection that was used before, it may be the rest of an earlier answer.
                let again = link.reused;
                if let Some(job) = link.job {
                    if again {
                        self.again(job, e, None, told)
                    } else {
                        fail(job, e, told)
                    }
                }
            }
            Advance::Lost(e) => {
                let expired = link.reused && link.is_unanswered();
                let Some(job) = link.job else { return };
                if expired {
                    // The server has closed a connection that it had kept: no request has failed.
                    self.waiting.push_front(job);
                } else if let Some(cause) = refused_by_tls(&e) {
                    fail(job, cause, told);
                } else {
                    let text = format!("the connection to {} is lost", link.server.authority());
                    self.again(job, Error::new(ErrorKind::Io, text).caused_by(e), None, told);
                }
            }
        }
    }

    /// Takes a connection back, watched for what it waits for.
    fn keep(&mut self, number: usize, mut link: Link, told: &mut Vec<Told>) {
        let wanted = match link.state {
            // A connection that has been closed would be reported again and again.
            LinkState::Parked => 0,
            _ if link.stream.has_to_send() => (libc::EPOLLIN | libc::EPOLLOUT) as u32,
            _ => libc::EPOLLIN as u32,
        };
        if wanted != link.watched {
            let how = match (link.watched, wanted) {
                (0, _) => libc::EPOLL_CTL_ADD,
                (_, 0) => libc::EPOLL_CTL_DEL,
                _ => libc::EPOLL_CTL_MOD,
            };
            if let Err(e) = control(&self.epoll, how, link.stream.fd(), wanted, number as u64) {
                link.job.into_iter().for_each(|job| fail(job, e.clone(), told));
                return;
            }
            link.watched = wanted;
        }
        self.links[number] = Some(link);
    }

    /// The server says something else than the bytes.
    fn judged(&mut self, mut job: RangeRead, verdict: Verdict, told: &mut Vec<Told>) {
        match verdict {
            Verdict::Body { .. } => {}
            Verdict::Moved(to) => {
                job.redirects += 1;
                if job.redirects > MOST_REDIRECTS {
                    let text = format!("the server redirects more than {MOST_REDIRECTS} times");
                    return fail(job, Error::new(ErrorKind::Io, text), told);
                }
                match job.asked.as_ref().map(|asked| asked.address.redirected(&to)).transpose() {
                    Ok(next) => {
                        next.into_iter().for_each(|next| job.site.moved(next));
                        self.waiting.push_front(job);
                    }
                    Err(e) => fail(job, e.of_kind(ErrorKind::Io), told),
                }
            }
            Verdict::Again(e, pause) => self.again(job, e, pause, told),
            Verdict::Refused(refusal) => {
                // Once: a second refusal is meant.
                if !job.renewed && job.asked.as_ref().is_some_and(|asked| job.site.renew(asked, &refusal)) {
                    job.renewed = true;
                    self.waiting.push_front(job);
                } else {
                    let e = job.site.requests.explained(refusal.error);
                    fail(job, e, told);
                }
            }
            Verdict::Failed(e) => fail(job, e, told),
        }
    }

    /// Asks for the rest of a read again, after a pause, or gives it up.
    fn again(&mut self, mut job: RangeRead, e: Error, pause: Option<Duration>, told: &mut Vec<Told>) {
        if job.got() - job.got_then >= MUCH {
            (job.tries, job.got_then) = (0, job.got());
        }
        job.tries += 1;
        let most = self.common.settings.tries;
        let most = if job.answered || job.object().is_some() { most } else { most.min(TRIES_UNANSWERED) };
        if job.tries >= most {
            let e = e.reworded(|why| format!("{why}; it was asked for {most} times"));
            return fail(job, e, told);
        }
        let usual = self.common.settings.pause.saturating_mul(1 << (job.tries - 1).min(10)).min(LONGEST_PAUSE);
        // Reads that fail together do not come back together.
        let spread = usual / 4 * (job.ticket.0 % 4) as u32 / 4;
        job.not_before = Instant::now() + usual.max(pause.unwrap_or_default()) + spread;
        self.waiting.push_back(job);
    }
}

/// A read ends: nobody learns of it while its memory is held.
fn end(job: RangeRead, result: Result<u64>, told: &mut Vec<Told>) {
    let (ticket, route, object, written) = (job.ticket, job.route, job.object().cloned(), job.got());
    drop(job);
    told.push(Told::Done { ticket, route, result, object, written });
}

fn fail(job: RangeRead, e: Error, told: &mut Vec<Told>) {
    let e = job.located(e);
    end(job, Err(e), told);
}

/// The error if it is TLS that does not trust the server: no further attempt changes that.
fn refused_by_tls(e: &io::Error) -> Option<Error> {
    let cause = e.get_ref()?.downcast_ref::<rustls::Error>()?;
    let text = match cause {
        rustls::Error::InvalidCertificate(_) => {
            "the server's certificate is not trusted; if an authority of your own has signed it, name the file with its \
             certificate in SSL_CERT_FILE"
        }
        _ => "TLS with the server failed",
    };
    Some(Error::new(ErrorKind::Io, text).caused_by(cause.clone()))
}

fn control(epoll: &OwnedFd, how: i32, fd: RawFd, events: u32, number: u64) -> Result<()> {
    let mut event = libc::epoll_event { events, u64: number };
    // SAFETY: one event is read.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), how, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(Error::io("watch a connection", &io::Error::last_os_error())),
    }
}
