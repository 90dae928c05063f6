//! How the ranks of a load find each other: every rank listens, and connects to those before it.

use super::pulse::{Pulse, Pulses};
use super::watch::peer_error;
use crate::error::{Error, ErrorKind, Result};
use std::io::{ErrorKind as Why, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// Bytes of a greeting: what it is, the load, the rank, and which connection it is.
const GREETING: usize = 8 + 16 + 4 + 4;
const MAGIC: &[u8; 8] = b"penstock";
/// What a rank waits for before it looks whether somebody still wants it to.
const LOOK: Duration = Duration::from_millis(50);
/// How long somebody may be connected without a greeting, and how many may be, beside two for each rank.
const GREETED: Duration = Duration::from_secs(5);
const STRANGERS: usize = 64;
/// Connections that the kernel keeps until they are accepted: those of all ranks may come at once.
const BACKLOG: i32 = 4096;

const CANCELLED: &str = "the load was cancelled while its ranks met";

/// A rank's own address, before it knows those of the others.
#[derive(Debug)]
pub struct Seat {
    listener: TcpListener,
    pulse: Pulse,
    /// Those of the other ranks.
    pulses: Option<Pulses>,
}

/// The connections of one rank to all others.
#[derive(Debug)]
pub struct Mesh {
    pub(super) rank: u32,
    /// By rank; `None` for this one, and for those that are no members.
    pub(super) links: Vec<Option<Pair>>,
    /// By rank.
    pub(super) hosts: Vec<String>,
    /// Says that this rank is alive, as long as nobody else does.
    _pulse: Pulse,
}

/// The connections to one rank.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) data: TcpStream,
    pub(super) control: TcpStream,
}

/// What is known of a rank while the mesh is made.
#[derive(Default)]
struct Meeting {
    data: Option<TcpStream>,
    control: Option<TcpStream>,
}

impl Meeting {
    fn slot(&mut self, kind: u32) -> Option<&mut Option<TcpStream>> {
        match kind {
            0 => Some(&mut self.data),
            1 => Some(&mut self.control),
            _ => None,
        }
    }
}

/// A connection whose greeting has not come yet.
struct Silent {
    stream: TcpStream,
    greeting: [u8; GREETING],
    have: usize,
    /// The rank and kind that must greet, of a connection that this rank has made.
    expected: Option<(u32, u32)>,
    since: Instant,
}

/// What a silent connection has said.
enum Said {
    Nothing,
    Greeting(u32, u32),
    /// It was closed, or says something else.
    Stranger(String),
}

impl Mesh {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The hosts of all ranks.
    pub(crate) fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// How many ranks it connects.
    pub(crate) fn members(&self) -> usize {
        1 + self.links.iter().flatten().count()
    }
}

impl Seat {
    /// Listens on a port of its own at this address.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(at: IpAddr) -> Result<Seat> {
        let failed = |e: std::io::Error| Error::io(&format!("listen at {at}"), &e);
        let listener = TcpListener::bind((at, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        // SAFETY: a plain system call on our own socket. It makes the queue longer.
        unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
        Ok(Seat { listener, pulse: Pulse::start(at)?, pulses: None })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::io("ask for the address of a socket", &e))
    }

    /// The address at which others ask whether this rank is there.
    pub fn pulse(&self) -> SocketAddr {
        self.pulse.address()
    }

    /// Watches the other ranks from now on: `pulses` are those of all. One that does not answer for `silence` was stopped.
    pub fn watch(&mut self, pulses: &[SocketAddr], silence: Duration) {
        self.pulses = Some(Pulses::new(pulses, silence));
    }

    /// Whether these ranks, which this one waits for, are there. To be asked every 50 ms or so; asks nobody unless ranks are
    /// watched.
    ///
    /// # Errors
    /// `Peer`: one of them is gone, or was stopped. One that has failed is gone too.
    pub fn look(&mut self, ranks: &[u32]) -> Result<()> {
        self.pulses.as_mut().map_or(Ok(()), |pulses| pulses.look(ranks))
    }

    /// Connects to all others: `addresses` are those of all ranks (`None`: it is no member, and nothing to this one), and `token`
    /// names this load. Ranks of another load are turned away. `go_on` is asked every 50 ms.
    ///
    /// # Errors
    /// `Peer` if a rank did not come within `patience`, or is not there any more: it names the first. `Cancelled` if `go_on`
    /// says no.
    pub fn join(
        mut self,
        rank: u32,
        addresses: &[Option<SocketAddr>],
        token: [u8; 16],
        patience: Duration,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<Mesh> {
        // A day is for ever.
        let patience = patience.min(Duration::from_secs(86_400));
        let until = Instant::now() + patience;
        let host = |address: &Option<SocketAddr>| address.map_or_else(String::new, |address| address.ip().to_string());
        let hosts: Vec<String> = addresses.iter().map(host).collect();
        let is_awaited = |found: &[Meeting], peer: u32| {
            let Meeting { data, control } = &found[peer as usize];
            peer != rank && addresses[peer as usize].is_some() && (data.is_none() || control.is_none())
        };
        let ranks = 0..addresses.len() as u32;
        let mut found: Vec<Meeting> = addresses.iter().map(|_| Meeting::default()).collect();
        let mut silent: Vec<Silent> = Vec::new();
        for (peer, address) in (0..rank).zip(addresses) {
            let Some(address) = *address else { continue };
            for kind in [0, 1] {
                let stream = connect(peer, address, until, &mut go_on)?;
                let expected = Some((peer, kind));
                greet(&stream, rank, kind, token).map_err(|e| gone(peer, &hosts, &e))?;
                silent.push(Silent { stream, greeting: [0; GREETING], have: 0, expected, since: Instant::now() });
            }
        }
        // A rank that is not there may have met everybody before: what it has said then is heard first.
        let mut lost: Option<(u32, Error)> = None;
        while let Some(first) = ranks.clone().find(|peer| is_awaited(&found, *peer)) {
            if !go_on() {
                return Err(Error::new(ErrorKind::Cancelled, CANCELLED));
            }
            if let Some((peer, error)) = lost.take() {
                if is_awaited(&found, peer) {
                    return Err(error);
                }
            }
            if Instant::now() >= until {
                let all = ranks.filter(|peer| is_awaited(&found, *peer)).map(|peer| peer.to_string());
                let all = all.collect::<Vec<String>>().join(", ");
                let text = format!("rank {rank} waited {:.1} s for rank {all}", patience.as_secs_f64());
                return Err(Error::new(ErrorKind::Peer, text).of_peer(first, hosts[first as usize].clone()));
            }
            self.pulse.check()?;
            wait(&self.listener, &silent);
            let awaited: Vec<u32> = ranks.clone().filter(|peer| is_awaited(&found, *peer)).collect();
            lost = self.look(&awaited).err().and_then(|error| Some((error.peer()?.0, error)));
            while let Ok((stream, _)) = self.listener.accept() {
                if ready(&stream).is_ok() {
                    let since = Instant::now();
                    silent.push(Silent { stream, greeting: [0; GREETING], have: 0, expected: None, since });
                }
            }
            // A rank greets at once. Others may be anybody, and are not to use up descriptors.
            let strangers = silent.iter().filter(|silent| silent.expected.is_none()).count();
            let mut too_many = strangers.saturating_sub(STRANGERS + 2 * addresses.len());
            silent.retain(|silent| {
                let stays = silent.expected.is_some() || (too_many == 0 && silent.since.elapsed() < GREETED);
                too_many -= usize::from(!stays && too_many > 0);
                stays
            });
            let mut at = 0;
            while at < silent.len() {
                match silent[at].hear(token) {
                    Said::Nothing => at += 1,
                    Said::Greeting(peer, kind) => {
                        let Silent { stream, expected, .. } = silent.swap_remove(at);
                        let known = expected.is_none_or(|expected| expected == (peer, kind));
                        let higher = expected.is_some() || peer > rank;
                        let higher = higher && addresses.get(peer as usize).is_some_and(Option::is_some);
                        let slot = found.get_mut(peer as usize).filter(|_| known && higher).and_then(|f| f.slot(kind));
                        if let Some(slot) = slot.filter(|slot| slot.is_none()) {
                            if expected.is_none() {
                                greet(&stream, rank, kind, token).map_err(|e| gone(peer, &hosts, &e))?;
                            }
                            *slot = Some(stream);
                        }
                    }
                    // Whoever comes may be anybody. Whom we have called must be a rank of this load.
                    Said::Stranger(why) => {
                        if let Some((peer, _)) = silent.swap_remove(at).expected {
                            if !go_on() {
                                return Err(Error::new(ErrorKind::Cancelled, CANCELLED));
                            }
                            let text = format!("rank {peer} did not join this load: {why}");
                            let error = Error::new(ErrorKind::Peer, text).of_peer(peer, hosts[peer as usize].clone());
                            return Err(error.because(format!("did not join this load: {why}")));
                        }
                    }
                }
            }
        }
        let links: Vec<Option<Pair>> =
            found.into_iter().map(|f| Some(Pair { data: f.data?, control: f.control? })).collect();
        self.pulse.speak(links.iter().flatten().map(|link| &link.control))?;
        Ok(Mesh { rank, links, hosts, _pulse: self.pulse })
    }
}

impl Silent {
    fn hear(&mut self, token: [u8; 16]) -> Said {
        while self.have < GREETING {
            match (&self.stream).read(&mut self.greeting[self.have..]) {
                Ok(0) => return Said::Stranger("it closed the connection".to_owned()),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == Why::WouldBlock => return Said::Nothing,
                Err(e) if e.kind() == Why::Interrupted => {}
                Err(e) => return Said::Stranger(e.to_string()),
            }
        }
        let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| self.greeting[at + i]));
        match self.greeting[..8] == *MAGIC && self.greeting[8..24] == token {
            true => Said::Greeting(number(24), number(28)),
            false => Said::Stranger("another load answers at its address".to_owned()),
        }
    }
}

fn gone(peer: u32, hosts: &[String], why: &std::io::Error) -> Error {
    let why = format!("is gone: {why}");
    peer_error(peer, &hosts[peer as usize], &why).because(why)
}

/// Connects to a rank that listens. It may have to be asked more than once: its queue may be full.
fn connect(peer: u32, address: SocketAddr, until: Instant, go_on: &mut impl FnMut() -> bool) -> Result<TcpStream> {
    loop {
        if !go_on() {
            return Err(Error::new(ErrorKind::Cancelled, CANCELLED));
        }
        let left = until.saturating_duration_since(Instant::now());
        let why = match TcpStream::connect_timeout(&address, left.clamp(LOOK, Duration::from_secs(1))) {
            Ok(stream) => return ready(&stream).map(|()| stream).map_err(|e| Error::io("prepare a connection", &e)),
            Err(why) => why,
        };
        let may_pass = matches!(why.kind(), Why::TimedOut | Why::HostUnreachable | Why::NetworkUnreachable);
        if left.is_zero() || !may_pass {
            // It may have said why.
            if !go_on() {
                return Err(Error::new(ErrorKind::Cancelled, CANCELLED));
            }
            let text = format!("rank {peer} does not answer at {address}: {why}");
            let error = Error::new(ErrorKind::Peer, text).of_peer(peer, address.ip().to_string());
            return Err(error.because(format!("does not answer at {address}: {why}")));
        }
        std::thread::sleep(LOOK);
    }
}

fn ready(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Says who speaks. A greeting always fits into an empty buffer of the kernel.
fn greet(stream: &TcpStream, rank: u32, kind: u32, token: [u8; 16]) -> std::io::Result<()> {
    let mut greeting = Vec::with_capacity(GREETING);
    greeting.extend(MAGIC);
    greeting.extend(token);
    greeting.extend(rank.to_le_bytes());
    greeting.extend(kind.to_le_bytes());
    let mut to = stream;
    to.write_all(&greeting)
}

/// Waits until somebody comes or speaks, 50 ms at most.
fn wait(listener: &TcpListener, silent: &[Silent]) {
    let fds = silent.iter().map(|silent| silent.stream.as_raw_fd()).chain([listener.as_raw_fd()]);
    let mut polled: Vec<libc::pollfd> =
        fds.map(|fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    // SAFETY: as many entries as the count says.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, LOOK.as_millis() as i32) };
}
