//! The choice among a server's addresses (RFC 8305): the next one is tried when one does not answer soon, and the ones
//! that answered are remembered.

use super::socket;
use crate::sync::{lock, Mutex};
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The next address is tried after so long (RFC 8305, 5: the Connection Attempt Delay).
pub(super) const DELAY: Duration = Duration::from_millis(250);
/// An address that did not answer is left alone for so long, if there are others.
const REMEMBERED: Duration = Duration::from_secs(300);
/// Addresses that are remembered.
const MOST: usize = 4096;

/// Addresses that answered or failed.
#[derive(Debug, Default)]
pub(in crate::store::remote) struct Health(Mutex<HashMap<SocketAddr, (Instant, bool)>>);

impl Health {
    /// A connection to it is there.
    pub(in crate::store::remote) fn answered(&self, to: &SocketAddr) {
        self.remember(to, true);
    }

    /// It has not answered in time.
    pub(in crate::store::remote) fn silent(&self, to: &SocketAddr) {
        self.remember(to, false);
    }

    /// A connection to it has failed: perhaps because it refuses, or cannot be reached. One that has answered before
    /// may only be overloaded. A failure of this machine, such as a lack of descriptors or rights, says nothing of it.
    pub(in crate::store::remote) fn failed(&self, to: &SocketAddr, why: &io::Error) {
        const OF_ADDRESS: [i32; 5] =
            [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EADDRNOTAVAIL, libc::ECONNREFUSED, libc::ETIMEDOUT];
        if !why.raw_os_error().is_some_and(|code| OF_ADDRESS.contains(&code)) {
            return;
        }
        let mut known = lock(&self.0);
        if known.remove(to).is_none_or(|(_, answers)| !answers) {
            known.insert(*to, (Instant::now(), false));
        }
    }

    fn remember(&self, to: &SocketAddr, answers: bool) {
        let mut known = lock(&self.0);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(*to, (Instant::now(), answers));
    }

    /// The addresses of these that may answer; all of them, if none may.
    pub(super) fn hopeful<'a>(&self, of: &'a [SocketAddr]) -> Vec<&'a SocketAddr> {
        let known = lock(&self.0);
        let may =
            |to: &&SocketAddr| known.get(*to).is_none_or(|(since, answers)| *answers || since.elapsed() > REMEMBERED);
        let found: Vec<_> = of.iter().filter(may).collect();
        if found.is_empty() {
            of.iter().collect()
        } else {
            found
        }
    }

    /// Whether one of these addresses, other than `than`, may answer.
    fn has_other(&self, of: &[SocketAddr], than: &SocketAddr) -> bool {
        let hopeful = self.hopeful(of);
        hopeful.len() < of.len() && hopeful.iter().any(|to| *to != than)
    }
}

/// One of a server's addresses, while it is connected to.
pub(super) struct Attempt {
    pub(in crate::store::remote) health: Arc<Health>,
    /// All addresses of the server.
    pub(in crate::store::remote) of: Arc<Vec<SocketAddr>>,
    pub(in crate::store::remote) to: SocketAddr,
    pub(in crate::store::remote) begun: Instant,
}

impl Attempt {
    /// Whether it takes so long that another address should be tried, and there is one.
    pub(in crate::store::remote) fn is_late(&self, now: Instant) -> bool {
        if self.of.len() < 2 || now.saturating_duration_since(self.begun) < DELAY {
            return false;
        }
        self.health.silent(&self.to);
        self.has_other()
    }

    /// Whether another address may answer, after this one did not.
    pub(in crate::store::remote) fn has_other(&self) -> bool {
        self.health.has_other(&self.of, &self.to)
    }
}

/// The same addresses, those of IPv6 and of IPv4 in turn (RFC 8305, 4). The first stays the first.
pub(super) fn in_turn(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_first_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (one, other): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|to| to.is_ipv6() == is_first_v6);
    let (mut one, mut other) = (one.into_iter(), other.into_iter());
    let mut found = Vec::new();
    loop {
        let had = found.len();
        found.extend(one.next());
        found.extend(other.next());
        if found.len() == had {
            return found;
        }
    }
}

/// A connection to the first of these addresses that answers. Blocks.
pub(in crate::store::remote) fn connect(
    health: &Health,
    addresses: &[SocketAddr],
    until: Instant,
) -> io::Result<TcpStream> {
    let mut waiting = health.hopeful(addresses);
    waiting.extend(addresses.iter().filter(|to| !waiting.contains(to)).collect::<Vec<_>>());
    let mut waiting = waiting.into_iter();
    let mut tried: Vec<(TcpStream, &SocketAddr, Instant)> = Vec::new();
    let mut next = Instant::now();
    let mut failed = io::Error::new(io::ErrorKind::InvalidData, "the host has no address");
    loop {
        let now = Instant::now();
        if tried.is_empty() || now >= next {
            match waiting.next() {
                Some(to) => match socket::connect(to, None) {
                    Ok(socket) => {
                        tried.push((socket, to, now));
                        next = now + DELAY;
                    }
                    Err(e) => {
                        health.failed(to, &e);
                        failed = e;
                        continue;
                    }
                },
                None if tried.is_empty() => return Err(failed),
                None => next = until,
            }
        }
        if now >= until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "connection timed out"));
        }
        let left = next.min(until).saturating_duration_since(now).as_micros().div_ceil(1000) as i32;
        let polled = |(socket, ..): &(TcpStream, _, _)| libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        let mut polled: Vec<libc::pollfd> = tried.iter().map(polled).collect();
        // SAFETY: as many pollfds as are named. A signal is as good as an event: each socket is asked.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, left) };
        let mut at = 0;
        while let Some((socket, to, _)) = tried.get(at) {
            match socket::is_connected(socket) {
                Ok(false) => at += 1,
                Ok(true) => {
                    health.answered(to);
                    let late = tried.iter().filter(|(_, other, begun)| other != to && begun.elapsed() >= DELAY);
                    late.for_each(|(_, other, _)| health.silent(other));
                    let (socket, ..) = tried.swap_remove(at);
                    socket.set_nonblocking(false)?;
                    return Ok(socket);
                }
                Err(e) => {
                    health.failed(to, &e);
                    tried.remove(at);
                    (failed, next) = (e, Instant::now());
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};
    use std::os::fd::OwnedFd;

    fn at(last: u8, port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), port))
    }

    /// A socket that lets one connection wait, and takes none.
    fn deaf(at: &SocketAddr) -> io::Result<OwnedFd> {
        let listener = std::net::TcpListener::bind(at)?;
        // SAFETY: a plain system call.
        unsafe { libc::listen(listener.as_raw_fd(), 0) };
        Ok(listener.into())
    }

    /// An address that takes no more connections, and says nothing: its queue is full.
    fn dead(port: u16) -> (SocketAddr, (OwnedFd, Vec<TcpStream>)) {
        let to = at(2, port);
        let (listener, mut held) = (deaf(&to).unwrap(), Vec::new());
        loop {
            let socket = socket::connect(&to, None).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            let is_there = socket::is_connected(&socket).unwrap();
            held.push(socket);
            if !is_there {
                return (to, (listener, held));
            }
        }
    }

    #[test]
    fn an_address_that_says_nothing_costs_a_quarter_of_a_second_once() {
        let live = TcpListener::bind(at(1, 0)).unwrap();
        let port = live.local_addr().unwrap().port();
        let (silent, _held) = dead(port);
        let (health, addresses) = (Health::default(), [silent, at(1, port)]);
        for least in [DELAY, Duration::ZERO] {
            let begun = Instant::now();
            let found = connect(&health, &addresses, begun + Duration::from_secs(30)).unwrap();
            assert_eq!(found.peer_addr().unwrap(), addresses[1]);
            assert!(begun.elapsed() >= least && begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
            assert_eq!(health.hopeful(&addresses), [&addresses[1]]);
        }
        // Nobody answers: that takes no longer than it may.
        let begun = Instant::now();
        let e = connect(&health, &[silent], begun + DELAY).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= DELAY);
    }

    #[test]
    fn an_address_that_refuses_costs_nothing() {
        let live = TcpListener::bind(at(1, 0)).unwrap();
        let port = live.local_addr().unwrap().port();
        let (health, addresses) = (Health::default(), [at(3, port), at(4, port), at(1, port)]);
        let found = connect(&health, &addresses, Instant::now() + Duration::from_secs(30)).unwrap();
        assert_eq!(found.peer_addr().unwrap(), addresses[2]);
        assert_eq!(health.hopeful(&addresses), [&addresses[2]]);
        let e = connect(&health, &addresses[..2], Instant::now() + Duration::from_secs(30)).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(connect(&health, &[], Instant::now()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_answered_once_is_not_given_up_for_one_refusal() {
        let (health, addresses) = (Health::default(), [at(1, 1), at(2, 1)]);
        health.answered(&addresses[0]);
        let refusal = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        health.failed(&addresses[0], &refusal);
        assert_eq!(health.hopeful(&addresses).len(), 2);
        health.failed(&addresses[0], &refusal);
        assert_eq!(health.hopeful(&addresses), [&addresses[1]]);
        health.silent(&addresses[1]);
        assert_eq!(health.hopeful(&addresses).len(), 2, "if none answers, all are tried");
    }

    #[test]
    fn only_what_an_address_does_is_held_against_it() {
        for (code, is_bad) in [
            (libc::ENETUNREACH, true),
            (libc::EHOSTUNREACH, true),
            (libc::EADDRNOTAVAIL, true),
            (libc::ECONNREFUSED, true),
            (libc::ETIMEDOUT, true),
            (libc::EMFILE, false),
            (libc::ENFILE, false),
            (libc::ENOBUFS, false),
            (libc::ENOMEM, false),
            (libc::EPERM, false),
            (libc::ENODEV, false),
        ] {
            let (health, addresses) = (Health::default(), [at(1, 1), at(2, 1)]);
            health.failed(&addresses[0], &io::Error::from_raw_os_error(code));
            assert_eq!(health.hopeful(&addresses).len(), if is_bad { 1 } else { 2 }, "{code}");
        }
        // An interface that there is not.
        let (health, addresses) = (Health::default(), [at(1, 1), at(2, 1)]);
        let e = socket::connect(&addresses[0], Some("no-such-one")).map(|_| ()).unwrap_err();
        health.failed(&addresses[0], &e);
        assert_eq!(health.hopeful(&addresses).len(), 2, "{e}");
    }

    #[test]
    fn families_take_turns() {
        let v6 = |last: u16| SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, last], 1));
        let of = in_turn(vec![v6(1), v6(2), v6(3), at(1, 1), at(2, 1)]);
        assert_eq!(of, [v6(1), at(1, 1), v6(2), at(2, 1), v6(3)]);
        assert_eq!(in_turn(vec![at(1, 1), v6(1)]), [at(1, 1), v6(1)]);
        assert!(in_turn(Vec::new()).is_empty());
    }
}
