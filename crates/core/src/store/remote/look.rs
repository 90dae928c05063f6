//! One connection at a time, with a clock beside it: what a request for a byte takes. Loads do not come this way.

use super::http::address::Server;
use super::http::answer::{no_ranges, Answer, Expected, Verdict};
use super::http::common::{Common, MOST_REDIRECTS};
use super::http::connection::Connection;
use super::http::names::Names;
use super::http::racing;
use super::http::refusal::{refused, refused_by_tls};
use super::http::request::Get;
use super::http::wires::WireEnd;
use super::transfer::range_read::Site;
use crate::error::{Error, ErrorKind, Result};
use crate::store::look::{Asked, Look};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that are received at once.
const PART: usize = 4096;

/// Asks for the first byte of an object `times` times. Nothing is tried again.
pub(super) fn look(common: &Common, site: &Site, times: usize) -> Look {
    let mut found = Look::default();
    if let Err(e) = first(common, site, times, &mut found) {
        found.error = Some(e.at(&site.path));
    }
    found
}

fn first(common: &Common, site: &Site, times: usize, found: &mut Look) -> Result<()> {
    let mut renewed = false;
    let unknown = || Error::new(ErrorKind::Internal, "there is no request; please report this");
    for _ in 0..=MOST_REDIRECTS {
        // Credentials are waited for.
        let request = site.request(None).ok_or_else(unknown)??;
        let server = &request.address.server;
        let mut asked = Asked { server: server.origin(), ..Asked::default() };
        let answer = connect(common, server, &mut asked).and_then(|mut link| {
            let (verdict, keeps) = exchange(common, &mut link, &request, &mut asked)?;
            Ok((verdict, keeps.then_some(link)))
        });
        found.round_trips = asked.first_byte.into_iter().collect();
        found.servers.push(asked);
        match answer? {
            (Verdict::Body { size, version, .. }, link) => {
                (found.object, found.connections) = (Some((size, version)), 1);
                return again(common, &request, times, link, found);
            }
            (Verdict::Moved { to, region }, _) => {
                let next = request.address.moved(&to).map_err(|e| e.of_kind(ErrorKind::Io))?;
                site.moved(next, region.as_deref());
            }
            (Verdict::Refused(refusal), _) => {
                if renewed || !site.renew(&request, &refusal) {
                    return Err(site.requests.explained(refusal));
                }
                renewed = true;
            }
            (Verdict::Again(e, _) | Verdict::OtherEtag(e) | Verdict::Failed(e), _) => return Err(e),
            (Verdict::Whole { .. } | Verdict::Less(_) | Verdict::Rest, _) => return Err(no_ranges()),
        }
    }
    Err(Error::new(ErrorKind::Io, format!("the server redirects more than {MOST_REDIRECTS} times")))
}

/// Asks the last server again, on the same connection where it keeps it.
fn again(common: &Common, request: &Get, times: usize, mut kept: Option<Connection>, found: &mut Look) -> Result<()> {
    for _ in 1..times {
        let mut asked = Asked::default();
        let (mut link, reused) = match kept.take() {
            Some(link) => (link, true),
            None => {
                found.connections += 1;
                (connect(common, &request.address.server, &mut asked)?, false)
            }
        };
        match exchange(common, &mut link, request, &mut asked) {
            Ok((Verdict::Body { .. }, keeps)) => {
                found.round_trips.extend(asked.first_byte);
                kept = keeps.then_some(link);
            }
            // The server has closed what it had kept.
            Err(_) if reused => {}
            // It is busy, or something happened to it: what is known is enough.
            _ => break,
        }
    }
    Ok(())
}

/// Connects to the first of a server's addresses that answers.
fn connect(common: &Common, server: &Server, asked: &mut Asked) -> Result<Connection> {
    let begun = Instant::now();
    // Nothing is known beforehand, so that the look-up takes its time.
    let proxy = common.proxy(server)?;
    let to = proxy.map_or(server, |proxy| &proxy.server);
    let resolved = Arc::new(Names::default()).addresses(to, None);
    let addresses = resolved.unwrap_or_else(|| Err(Error::new(ErrorKind::Internal, "nobody was asked")))?;
    asked.lookup = to.ip().is_none().then(|| begun.elapsed());
    asked.addresses = addresses.len();
    let mut addresses = (*addresses).clone();
    // Which one answers first is found out beforehand: what it takes is measured without the others.
    if addresses.len() > 1 {
        let found = racing::connect(&common.names.health, &addresses, begun + common.settings.stall);
        if let Ok(first) = found.and_then(|socket| socket.peer_addr()) {
            addresses.sort_by_key(|address| *address != first);
        }
    }
    let no = |e: io::Error| {
        let text = format!("there is no connection to {}", common.named(server));
        refused(&e).unwrap_or_else(|| Error::new(ErrorKind::Io, text).caused_by(e))
    };
    let interface = common.settings.interfaces.first().map(String::as_str);
    let mut last = None;
    for address in addresses.iter() {
        let tls = match server.tls {
            true => Some(common.tls.for_host(&common.settings, &server.host)?),
            false => None,
        };
        let begun = Instant::now();
        let until = begun + common.settings.stall;
        let shake = |asked: &mut Asked| {
            let mut link = Connection::connect(address, interface, proxy.map(|proxy| proxy.via(server)), tls)?;
            await_socket(&link, libc::POLLOUT, until)?;
            asked.connect = Some(begun.elapsed());
            let begun = Instant::now();
            while !link.is_ready()? {
                await_link(&link, until)?;
            }
            asked.tls = server.tls.then(|| begun.elapsed());
            Ok(link)
        };
        match shake(asked) {
            Ok(link) => return Ok(link),
            Err(e) => {
                asked.connect = asked.connect.filter(|_| refused_by_tls(&e).is_some());
                last = Some(no(e));
            }
        }
    }
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Io, format!("{} has no address", server.authority()))))
}

/// Sends a request for one byte and receives the whole answer: what follows from it, and whether the connection can be used
/// again.
fn exchange(common: &Common, link: &mut Connection, request: &Get, asked: &mut Asked) -> Result<(Verdict, bool)> {
    let expected = Expected { object: None, range: 0..1 };
    let lost = |e: io::Error| {
        let text = format!("the connection to {} is lost", common.named(&request.address.server));
        refused(&e).unwrap_or_else(|| Error::new(ErrorKind::Io, text).caused_by(e))
    };
    let begun = Instant::now();
    let until = begun + common.settings.stall;
    link.say(request.text(&expected.range, None));
    let mut received = Vec::new();
    let mut judged = None;
    loop {
        let part = receive(link, until).map_err(lost)?;
        asked.first_byte.get_or_insert_with(|| begun.elapsed());
        received.extend(part);
        while judged.is_none() {
            let Some((mut answer, head)) = Answer::parse(&received)? else { break };
            let is_last = !(100..200).contains(&answer.status);
            // What the body of an error says.
            if is_last && answer.learn(&received[head..], false) {
                break;
            }
            received.drain(..head);
            if is_last {
                asked.status = Some(answer.status);
                judged = Some((answer.judge(&expected), answer.keeps && answer.has_length()));
            }
        }
        let missing = match &judged {
            None => true,
            Some((Verdict::Body { length, .. }, _)) => (received.len() as u64) < *length,
            // What a server says besides the byte is not read.
            Some(_) => false,
        };
        if let Some(found) = judged.take_if(|_| !missing) {
            return Ok(found);
        }
    }
}

/// The next bytes of an answer, at least one.
fn receive(link: &mut Connection, until: Instant) -> io::Result<Vec<u8>> {
    let mut part = vec![0; PART];
    loop {
        link.send()?;
        let place = libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() };
        // SAFETY: the place is `part`.
        match unsafe { link.receive(&mut [place]) } {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed it before it answered"))
            }
            Ok(got) => {
                part.truncate(got);
                return Ok(part);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => await_link(link, until)?,
            Err(e) => return Err(e),
        }
    }
}

/// Waits for what a connection waits for, until then at most.
fn await_link(link: &Connection, until: Instant) -> io::Result<()> {
    let sends = if link.has_to_send() { libc::POLLOUT } else { 0 };
    await_socket(link, libc::POLLIN | sends, until)
}

/// Waits for one of `events`, until then at most.
fn await_socket(link: &Connection, events: i16, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut polled = libc::pollfd { fd: link.fd(), events, revents: 0 };
        // SAFETY: one pollfd.
        match unsafe { libc::poll(&raw mut polled, 1, left.as_micros().div_ceil(1000).min(60_000) as i32) } {
            1 => return Ok(()),
            0 if left > Duration::ZERO => {}
            0 => return Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer")),
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}
