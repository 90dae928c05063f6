//! How ranks are connected with each other: each of them listens, and connects to those before it.
//!
//! Whoever comes may be anybody. It has a place among [`STRANGERS`] for [`GREETED`], and no failure of it ends anything. A rank
//! that was called must be a rank of this load: if something else answers there, that is the error.

use super::handshake::{Handshake, HandshakeStep, Purpose, Rejection};
use super::key::Pass;
use super::watch::peer_error;
use crate::error::{Error, ErrorKind, Result};
use crate::source::wait_readable;
use std::io::{ErrorKind as Why, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The longest wait before a rank asks whether to go on.
const LOOK: Duration = Duration::from_millis(50);
/// How long somebody may be connected before it has shown what it is, and how many may be, beside all connections of all ranks.
const GREETED: Duration = Duration::from_secs(5);
const STRANGERS: usize = 64;
/// How often a rank is called again that closes the connection before it has said a word: strangers may have been in the way.
const AGAIN: u32 = 8;
/// One try to connect, at most.
const TRY: Duration = Duration::from_secs(1);

const CANCELLED: &str = "the load was cancelled while its ranks met";

/// A meeting of ranks: the connections of each kind, to each of them.
pub(super) struct Meeting<'a> {
    pub(super) listener: &'a TcpListener,
    /// This rank; its token is that of rank 0.
    pub(super) me: &'a Pass,
    pub(super) kinds: &'a [Purpose],
    /// The addresses of all ranks. `None`: the rank is not a member.
    pub(super) addresses: &'a [Option<SocketAddr>],
    /// How long all of it may take.
    pub(super) patience: Duration,
    /// How long a rank's host may not answer.
    pub(super) silence: Duration,
}

/// By rank, and by kind as they were given.
type Connections = Vec<Vec<Option<TcpStream>>>;

/// A connection that nothing is known of yet.
struct PendingConnection {
    stream: TcpStream,
    handshake: Handshake,
    /// The rank and the kind that were called.
    called: Option<(u32, Purpose)>,
    since: Instant,
    /// How often it was called.
    calls: u32,
}

/// The state of a pending connection.
enum PendingState {
    Nothing,
    Met(u32, Purpose),
    /// It was closed, or something went wrong.
    Closed(String),
    Refused(Rejection),
}

impl Meeting<'_> {
    /// Connects all ranks. Calls `go_on` every 50 ms, and `look` with the ranks that are still missing: `look` fails if one of them
    /// is gone, and returns true if all of them have answered.
    ///
    /// # Errors
    /// `Peer` if a rank did not come in time, is not there any more, or is none of this load: it names the first. `Cancelled` if
    /// `go_on` says no.
    pub(super) fn connect(
        &self,
        mut go_on: impl FnMut() -> bool,
        mut look: impl FnMut(&[u32]) -> Result<bool>,
    ) -> Result<Vec<Vec<TcpStream>>> {
        // A day is for ever.
        let patience = self.patience.min(Duration::from_secs(86_400));
        let until = Instant::now() + patience;
        let mut found: Connections = self.addresses.iter().map(|_| self.kinds.iter().map(|_| None).collect()).collect();
        let mut pending: Vec<PendingConnection> = Vec::new();
        for (peer, address) in (0..self.me.rank).zip(self.addresses) {
            let Some(address) = *address else { continue };
            for &kind in self.kinds {
                let stream = self.call(peer, address, until, &mut go_on, &mut look)?;
                pending.push(self.greet(stream, peer, kind, 1)?);
            }
        }
        // A rank that is not there may have met everybody before: what it has said then is heard first.
        let mut lost: Option<(u32, Error)> = None;
        let mut odd: Option<String> = None;
        loop {
            let awaited = self.awaited(&found);
            let Some(first) = awaited.first().copied() else { break };
            asked(&mut go_on)?;
            if let Some((_, error)) = lost.take().filter(|(peer, _)| awaited.contains(peer)) {
                return Err(error);
            }
            if Instant::now() >= until {
                return Err(self.late(first, &awaited, patience, odd));
            }
            let fds = pending.iter().map(|one| one.stream.as_raw_fd()).chain([self.listener.as_raw_fd()]);
            wait_readable(fds, Some(LOOK));
            lost = match look(&awaited) {
                Ok(_) => None,
                Err(error) => Some((error.peer().map(|peer| peer.0).ok_or_else(|| error.clone())?, error)),
            };
            if let Some(why) = self.accept(&mut pending) {
                odd = Some(format!("no connection can be taken: {why}"));
                std::thread::sleep(LOOK);
            }
            let mut at = 0;
            while at < pending.len() {
                match pending[at].hear(self.me)? {
                    PendingState::Nothing => at += 1,
                    PendingState::Met(peer, kind) => {
                        let PendingConnection { stream, called, .. } = pending.swap_remove(at);
                        if called.is_some() || peer > self.me.rank {
                            self.keep(&mut found, peer, kind, stream);
                        }
                    }
                    came => {
                        let one = pending.swap_remove(at);
                        if let Some(again) = self.refused(one, came, until, &mut odd, &mut go_on, &mut look)? {
                            pending.push(again);
                        }
                    }
                }
            }
            // After all have been heard: a rank that has said everything counts itself as met.
            self.make_room(&mut pending);
        }
        Ok(found.into_iter().map(|streams| streams.into_iter().flatten().collect()).collect())
    }

    fn awaited(&self, found: &Connections) -> Vec<u32> {
        let is_awaited = |peer: &u32| {
            let at = *peer as usize;
            *peer != self.me.rank && self.addresses[at].is_some() && found[at].iter().any(Option::is_none)
        };
        (0..self.addresses.len() as u32).filter(is_awaited).collect()
    }

    /// Takes a connection, if it is the first one.
    fn keep(&self, found: &mut Connections, peer: u32, kind: Purpose, stream: TcpStream) {
        let is_member = self.addresses.get(peer as usize).is_some_and(Option::is_some);
        let number = self.kinds.iter().position(|known| *known == kind).filter(|_| is_member);
        if let Some(slot) = number.and_then(|number| found.get_mut(peer as usize)?.get_mut(number)) {
            slot.get_or_insert(stream);
        }
    }

    fn host(&self, peer: u32) -> String {
        self.addresses[peer as usize].map_or_else(String::new, |address| address.ip().to_string())
    }

    fn late(&self, first: u32, awaited: &[u32], patience: Duration, odd: Option<String>) -> Error {
        let all = awaited.iter().map(u32::to_string).collect::<Vec<String>>().join(", ");
        let odd = odd.map_or_else(String::new, |odd| format!("; {odd}"));
        let text = format!("rank {} waited {:.1} s for rank {all}{odd}", self.me.rank, patience.as_secs_f64());
        Error::new(ErrorKind::Peer, text).of_peer(first, self.host(first))
    }

    /// Takes connections that were made to this rank. Gives the reason if the kernel gives none (too few descriptors): they
    /// stay in its queue, and `poll` would return at once.
    fn accept(&self, pending: &mut Vec<PendingConnection>) -> Option<std::io::Error> {
        // Not all at once: they are not to use up descriptors.
        for _ in 0..self.most_strangers() {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if matches!(e.kind(), Why::Interrupted | Why::ConnectionAborted) => continue,
                Err(e) if e.kind() == Why::WouldBlock => break,
                Err(e) => return Some(e),
            };
            if ready(&stream).is_ok() {
                let (handshake, since) = (Handshake::answer(), Instant::now());
                pending.push(PendingConnection { stream, handshake, called: None, since, calls: 0 });
            }
        }
        None
    }

    fn most_strangers(&self) -> usize {
        STRANGERS + self.kinds.len() * self.addresses.len()
    }

    /// Closes connections that have not said everything in time, or are too many: first those that have said least.
    fn make_room(&self, pending: &mut Vec<PendingConnection>) {
        pending.retain(|one| one.called.is_some() || one.since.elapsed() < GREETED);
        let strangers = pending.iter().filter(|one| one.called.is_none()).count();
        let mut too_many = strangers.saturating_sub(self.most_strangers());
        for answered in [false, true] {
            pending.retain(|one| {
                let goes = too_many > 0 && one.called.is_none() && one.handshake.is_answered() == answered;
                too_many -= usize::from(goes);
                !goes
            });
        }
    }

    /// Handles a connection that has failed. Gives another one in its place, if there is to be one.
    fn refused(
        &self,
        one: PendingConnection,
        came: PendingState,
        until: Instant,
        odd: &mut Option<String>,
        go_on: &mut impl FnMut() -> bool,
        look: &mut impl FnMut(&[u32]) -> Result<bool>,
    ) -> Result<Option<PendingConnection>> {
        let Some((peer, kind)) = one.called else {
            if let (PendingState::Refused(why), Ok(from)) = (&came, one.stream.peer_addr()) {
                if why.is_of_key() {
                    *odd = Some(format!("a connection from {} was refused: {}", from.ip(), why.text()));
                }
            }
            return Ok(None);
        };
        asked(go_on)?; // it may have said why
        let why = match came {
            PendingState::Closed(_) if one.handshake.is_silent() && one.calls < AGAIN => {
                if let Some(address) = self.addresses[peer as usize] {
                    let stream = self.call(peer, address, until, go_on, look)?;
                    return self.greet(stream, peer, kind, one.calls + 1).map(Some);
                }
                "it closed the connection".to_owned()
            }
            PendingState::Closed(why) => why,
            PendingState::Refused(why) => why.text(),
            PendingState::Nothing | PendingState::Met(..) => return Ok(None),
        };
        let why = format!("did not join this load: {why}");
        Err(peer_error(peer, &self.host(peer), &why).because(why))
    }

    /// Says what this rank is, on a connection that it has made.
    fn greet(&self, stream: TcpStream, peer: u32, kind: Purpose, calls: u32) -> Result<PendingConnection> {
        let (handshake, hello) = Handshake::call(self.me, peer, kind)?;
        // It always fits into an empty buffer of the kernel. If the other end is gone, that is heard.
        let _heard_later = (&stream).write_all(&hello);
        Ok(PendingConnection { stream, handshake, called: Some((peer, kind)), since: Instant::now(), calls })
    }

    /// Connects to a rank that listens. One try may not be enough: the rank's accept queue may be full (128 connections, the default
    /// of net.core.somaxconn before Linux 5.4), and then the kernel is as silent as a firewall. If the rank has answered at its other
    /// port, this tries until time is up; otherwise it gives up after `silence`.
    fn call(
        &self,
        peer: u32,
        address: SocketAddr,
        until: Instant,
        go_on: &mut impl FnMut() -> bool,
        look: &mut impl FnMut(&[u32]) -> Result<bool>,
    ) -> Result<TcpStream> {
        let (begun, mut tries) = (Instant::now(), 0);
        loop {
            asked(go_on)?;
            let left = until.saturating_duration_since(Instant::now());
            // `look` has to be asked several times in a silence.
            let one_try = TRY.min(self.silence / 4).max(LOOK);
            let why = match TcpStream::connect_timeout(&address, left.clamp(LOOK, one_try)) {
                Ok(stream) => {
                    return ready(&stream).map(|()| stream).map_err(|e| Error::io("prepare a connection", &e))
                }
                Err(why) => why,
            };
            tries += 1;
            let may_pass = matches!(why.kind(), Why::TimedOut | Why::HostUnreachable | Why::NetworkUnreachable);
            let answers = may_pass && look(&[peer])?;
            // A process that was stopped itself has tried less often.
            let silent = !answers && tries >= 3 && begun.elapsed() >= self.silence;
            if left.is_zero() || !may_pass || silent {
                asked(go_on)?; // it may have said why
                let why = match may_pass {
                    true => format!(
                        "cannot be reached at {address}, tried for {:.1} s ({why}): its host or network is down, or a firewall \
                         is in the way (ports= names the ports that ranks listen at)",
                        begun.elapsed().as_secs_f64()
                    ),
                    false => format!("does not answer at {address}: {why}"),
                };
                return Err(peer_error(peer, &address.ip().to_string(), &why).because(why));
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl PendingConnection {
    fn hear(&mut self, me: &Pass) -> Result<PendingState> {
        let mut bytes = [0; 256];
        loop {
            let most = self.handshake.awaits(me).min(bytes.len());
            let heard = match (&self.stream).read(&mut bytes[..most]) {
                Ok(0) => return Ok(PendingState::Closed("it closed the connection".to_owned())),
                Ok(n) => self.handshake.hear(me, &bytes[..n])?,
                Err(e) if e.kind() == Why::WouldBlock => return Ok(PendingState::Nothing),
                Err(e) if e.kind() == Why::Interrupted => continue,
                Err(e) => return Ok(PendingState::Closed(e.to_string())),
            };
            let (said, came) = match heard {
                HandshakeStep::More => continue,
                HandshakeStep::Say(said) => (said, None),
                HandshakeStep::Met(peer, kind, said) => (said, Some(PendingState::Met(peer, kind))),
                HandshakeStep::Refused(why) => return Ok(PendingState::Refused(why)),
            };
            // Few bytes, which fit into an empty buffer of the kernel.
            if let Err(e) = (&self.stream).write_all(&said) {
                return Ok(PendingState::Closed(e.to_string()));
            }
            if let Some(came) = came {
                return Ok(came);
            }
            if let Some(why) = self.handshake.ended() {
                return Ok(PendingState::Refused(why));
            }
        }
    }
}

fn asked(go_on: &mut impl FnMut() -> bool) -> Result<()> {
    match go_on() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Cancelled, CANCELLED)),
    }
}

fn ready(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::peers::key::PeerKey;
    use crate::peers::place::{address_of, ListenAt};
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::atomic::{AtomicU32, Ordering};

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const KINDS: &[Purpose] = &[Purpose::Data, Purpose::Control];
    const OURS: Option<&str> = Some("the key of all ranks");
    const LONG: Duration = Duration::from_secs(60);

    fn rank(rank: u32, secret: Option<&str>) -> Pass {
        Pass { rank, token: [7; 16], key: secret.map(|secret| PeerKey::new(secret.as_bytes(), "a test").unwrap()) }
    }

    fn listeners(count: usize) -> (Vec<TcpListener>, Vec<Option<SocketAddr>>) {
        let all: Vec<TcpListener> = (0..count).map(|_| ListenAt::anywhere(HERE).listen().unwrap()).collect();
        let addresses = all.iter().map(|one| Some(address_of(one).unwrap())).collect();
        (all, addresses)
    }

    fn meeting<'a>(listener: &'a TcpListener, me: &'a Pass, addresses: &'a [Option<SocketAddr>]) -> Meeting<'a> {
        Meeting { listener, me, kinds: KINDS, addresses, patience: LONG, silence: Duration::from_millis(300) }
    }

    /// How many connections each rank has to each, or why it has none. `over` ends the waits of the others.
    fn met(passes: &[Pass]) -> Vec<Result<Vec<usize>>> {
        let (listeners, addresses) = listeners(passes.len());
        std::thread::scope(|scope| {
            let ranks = passes.iter().zip(&listeners).map(|(me, listener)| {
                let addresses = &addresses;
                scope.spawn(move || {
                    let found = meeting(listener, me, addresses).connect(|| true, |_| Ok(false))?;
                    Ok(found.iter().map(Vec::len).collect())
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_with_one_key_and_ranks_without_any_are_connected() {
        for secret in [OURS, None] {
            let passes: Vec<Pass> = (0..4).map(|number| rank(number, secret)).collect();
            for (number, found) in met(&passes).into_iter().enumerate() {
                let expected: Vec<usize> = (0..4).map(|other| if other == number { 0 } else { 2 }).collect();
                assert_eq!(found.unwrap(), expected);
            }
        }
    }

    #[test]
    fn strangers_neither_hold_ranks_up_nor_get_in() {
        let (listeners, addresses) = listeners(2);
        let passes = [rank(0, OURS), rank(1, OURS)];
        let zero = addresses[0].unwrap();
        // Silent, garbled, in the middle of the first message, and one that knows the load and has no key.
        let (_, hello) = Handshake::call(&rank(1, Some("the key of other ranks")), 0, Purpose::Data).unwrap();
        let said: [&[u8]; 4] = [b"", b"GET / HTTP/1.1\r\n\r\n", &hello[..20], &hello];
        let mut strangers: Vec<TcpStream> = Vec::new();
        for number in 0..200 {
            let mut stream = TcpStream::connect(zero).unwrap();
            let _it_may_be_closed = stream.write_all(said[number % 4]);
            strangers.push(stream);
        }
        std::thread::scope(|scope| {
            let [first, second] = [0, 1].map(|at| {
                let (listener, me, addresses) = (&listeners[at], &passes[at], &addresses);
                scope.spawn(move || meeting(listener, me, addresses).connect(|| true, |_| Ok(false)).map(|_| ()))
            });
            first.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_rank_with_another_key_is_named_at_once() {
        for (secret, says) in [(Some("the key of other ranks"), "another key"), (None, "has no key")] {
            let (listeners, addresses) = listeners(2);
            let (zero, one) = (rank(0, secret), rank(1, OURS));
            let over = std::sync::atomic::AtomicBool::new(false);
            let waits = || !over.load(std::sync::atomic::Ordering::Relaxed);
            let (called, calls) = std::thread::scope(|scope| {
                let zero = scope
                    .spawn(|| meeting(&listeners[0], &zero, &addresses).connect(&waits, |_| Ok(false)).map(|_| ()));
                let calls = meeting(&listeners[1], &one, &addresses).connect(|| true, |_| Ok(false)).map(|_| ());
                over.store(true, std::sync::atomic::Ordering::Relaxed);
                (zero.join().unwrap(), calls)
            });
            let error = calls.unwrap_err();
            assert_eq!((error.kind(), error.peer().map(|peer| peer.0)), (ErrorKind::Peer, Some(0)), "{error}");
            assert!(
                error.to_string().contains("PENSTOCK_PEER_KEY differs") && error.to_string().contains(says),
                "{error}"
            );
            assert_eq!(called.unwrap_err().kind(), ErrorKind::Cancelled, "it waits: whoever came may be anybody");
        }
    }

    #[test]
    fn a_rank_that_waits_in_vain_says_that_somebody_had_another_key() {
        let (listeners, addresses) = listeners(2);
        let zero = rank(0, OURS);
        let mut calls = TcpStream::connect(addresses[0].unwrap()).unwrap();
        calls.write_all(&Handshake::call(&rank(1, None), 0, Purpose::Data).unwrap().1).unwrap();
        let meeting = Meeting { patience: Duration::from_millis(300), ..meeting(&listeners[0], &zero, &addresses) };
        let error = meeting.connect(|| true, |_| Ok(false)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("waited 0.3 s for rank 1") && error.contains("PENSTOCK_PEER_KEY differs"), "{error}");
    }

    /// Its queue is full, so the kernel answers no further connection: as behind a firewall.
    fn full() -> (TcpListener, Vec<TcpStream>) {
        let full = TcpListener::bind((HERE, 0)).unwrap();
        let address = full.local_addr().unwrap();
        // SAFETY: a plain system call on our own descriptor.
        assert_eq!(unsafe { libc::listen(full.as_raw_fd(), 0) }, 0);
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok();
        let queued: Vec<TcpStream> = std::iter::from_fn(connect).take(16).collect();
        assert!(queued.len() < 16, "the queue is never full");
        (full, queued)
    }

    #[test]
    fn a_rank_that_answers_and_whose_queue_is_full_is_called_until_it_has_room() {
        let (full, queued) = full();
        full.set_nonblocking(true).unwrap();
        let (listeners, mut addresses) = listeners(2);
        addresses[0] = Some(full.local_addr().unwrap());
        let (zero, one, looked) = (rank(0, None), rank(1, None), AtomicU32::new(0));
        let (addresses, looked) = (&addresses, &looked);
        std::thread::scope(|scope| {
            let calls = scope.spawn(move || {
                let calls = meeting(&listeners[1], &one, addresses);
                let begun = Instant::now();
                calls.connect(
                    || true,
                    |_| {
                        // Longer than a rank that does not answer is called.
                        looked.fetch_add(u32::from(begun.elapsed() > calls.silence * 2), Ordering::Relaxed);
                        Ok(true)
                    },
                )
            });
            while looked.load(Ordering::Relaxed) < 3 && !calls.is_finished() {
                std::thread::sleep(LOOK);
            }
            assert!(!calls.is_finished(), "it was given up");
            drop(queued);
            meeting(&full, &zero, addresses).connect(|| true, |_| Ok(true)).unwrap();
            calls.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_rank_whose_host_does_not_answer_is_given_up_and_its_address_named() {
        let (full, _queued) = full();
        let address = full.local_addr().unwrap();
        let (listeners, mut addresses) = listeners(2);
        addresses[0] = Some(address);
        let one = rank(1, None);
        let begun = Instant::now();
        let error = meeting(&listeners[1], &one, &addresses).connect(|| true, |_| Ok(false)).map(|_| ()).unwrap_err();
        assert!(begun.elapsed() < LONG / 2);
        assert_eq!(error.peer().map(|peer| peer.0), Some(0));
        assert!(error.to_string().contains(&format!("cannot be reached at {address}")), "{error}");
        assert!(error.to_string().contains("ports="), "{error}");
    }

    #[test]
    fn a_rank_that_was_pushed_out_by_strangers_calls_again() {
        let (mut listeners, addresses) = listeners(2);
        let (one, zero) = (listeners.pop().unwrap(), listeners.pop().unwrap());
        let (me, other) = (rank(1, OURS), rank(0, OURS));
        let addresses = &addresses;
        std::thread::scope(|scope| {
            let calls = scope.spawn(move || meeting(&one, &me, addresses).connect(|| true, |_| Ok(false)).map(|_| ()));
            zero.set_nonblocking(false).unwrap();
            for _ in 0..3 {
                drop(zero.accept().unwrap());
            }
            zero.set_nonblocking(true).unwrap();
            meeting(&zero, &other, addresses).connect(|| true, |_| Ok(false)).unwrap();
            calls.join().unwrap().unwrap();
        });
    }
}
