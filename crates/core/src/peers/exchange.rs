//! The thread that serves all connections of one rank: bytes in both directions, and who is alive.

use super::calls::{later, Spans};
use super::device::Sending;
use super::mesh::{Mesh, Pair};
use super::neighbours::{Introduction, Neighbours, News, Offered};
use super::pulse::{ALIVE, WORD};
use super::shared::{Outbound, Over, PeerTraffic, PeersShared, PeersState, Placed, STEPS};
use super::source::Receiving;
use super::watch::{Heard, PeerWatch};
use crate::device::{Copied, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, Ticket};
use crate::source::{Destination, Done, Progress, Read, Source};
use crate::staging::Borrowed;
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::{guarded, step};
use crate::wake::Wake;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the file that a rank wants of a parcel, in the order in which they travel: (offset, length).
pub(crate) type RowsToSend = Box<dyn Iterator<Item = (u64, u64)> + Send>;
/// A function from parcel and rank to the number of wanted bytes, and their rows.
pub(crate) type RowsOf = Box<dyn Fn(u32, u32) -> (u64, RowsToSend) + Send>;

/// Before the bytes of a parcel: its number, four bytes of zero, and how many bytes.
const HEADER: usize = 16;
/// The words of a rank besides [`ALIVE`].
const COMPLETE: u8 = 1;
const FAILED: u8 = 2;
/// How long a step took it: one byte for the step, eight for nanoseconds.
const TOOK: u8 = 3;
/// Its machine, and where it waits for neighbours; or why it shares no slabs ([`Introduction`]).
const INTRODUCES: u8 = 4;
/// No link to the rank that hears this is possible, and why: their parcels go through sockets.
const FAR: u8 = 5;
/// No rank says this.
const GARBLED: u8 = u8::MAX;
/// The longest text, in bytes. A longer one is cut off.
const TEXT: usize = 4096;
/// Parcels whose sending is prepared between two looks at the connections.
const PREPARED: usize = 4;
/// A connection gives way to the others after so many calls.
const CALLS: usize = 16;
/// The pause before a message is tried again. The kernel had no room for it, and `poll` does not say when it has.
const SHORTLY: Duration = Duration::from_millis(5);
/// How often a read that goes on, or whose rank is alive, is reported.
const REPORTED: Duration = Duration::from_secs(1);

/// The other ranks of a load.
pub(crate) struct Peers {
    rank: u32,
    /// How many other ranks there are.
    others: usize,
    shared: Arc<PeersShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Peers {
    /// Begins to serve the connections. `silence`: a rank that says nothing for so long is dead; `patience`: how long its first
    /// word may take. `sharing`: an error says why this rank shares no slabs with others of its machine (empty: by its options).
    pub(crate) fn start(
        mesh: Mesh,
        rows: RowsOf,
        (silence, patience): (Duration, Duration),
        sharing: Result<(), String>,
    ) -> Result<Peers> {
        let shared = Arc::new(PeersShared {
            state: Mutex::new(PeersState::default()),
            changed: Condvar::new(),
            orders: Wake::new()?,
            reads: Wake::new()?,
            copies: Wake::new()?,
        });
        let (rank, others) = (mesh.rank, mesh.members() - 1);
        let serving = Serving::new(mesh, rows, (silence, patience), sharing, shared.clone());
        let thread = Builder::new().name("penstock-peers".to_owned()).spawn(move || serving.run());
        let thread = thread.map_err(|e| Error::io("start a thread", &e))?;
        Ok(Peers { rank, others, shared, thread: Mutex::new(Some(thread)) })
    }

    /// A source of the bytes that other ranks read for this one. `parcels`: the parcel of each ticket.
    pub(crate) fn source(&self, parcels: Arc<[Option<u32>]>) -> Box<dyn Source> {
        Box::new(Receiving::new(self.shared.clone(), parcels))
    }

    /// The device, which now sends parcels to other ranks too. `sends`: for each ticket, the parcel, the offset in the file at
    /// which the slab begins, and who gets bytes of it.
    pub(crate) fn device(
        &self,
        inner: Box<dyn Device>,
        sends: HashMap<Ticket, (u32, u64, Vec<u32>)>,
    ) -> Result<Box<dyn Device>> {
        Ok(Box::new(Sending::new(self.shared.clone(), inner, sends)?))
    }

    /// The slab of a read that has ended in one of another rank.
    pub(crate) fn borrowed(&self, ticket: Ticket) -> Option<Borrowed> {
        lock(&self.shared.state).borrowed.remove(&ticket)
    }

    /// The bytes that other ranks have got so far.
    pub(crate) fn traffic(&self) -> PeerTraffic {
        lock(&self.shared.state).traffic
    }

    /// Tells the others that this rank's load has failed.
    pub(crate) fn fail(&self, error: &Error) {
        let culprit = error.peer().map_or(self.rank, |peer| peer.0);
        let text = if error.peer().is_some() { error.message().to_owned() } else { error.to_string() };
        let mut state = lock(&self.shared.state);
        // Also after this rank had everything: the others may not.
        if !matches!(state.over, Some(Over::Failed(..))) {
            state.over = Some(Over::Failed(culprit, text));
        }
        drop(state);
        self.shared.orders.notify();
    }

    /// Tells the others how long a step took this rank.
    pub(crate) fn say_took(&self, step: u8, nanoseconds: u64) {
        lock(&self.shared.state).took.push((step, nanoseconds));
        self.shared.orders.notify();
    }

    /// The longest time that a step took one of the other ranks, when all of them have said so. The source of what they read
    /// wakes its driver then.
    pub(crate) fn took(&self, step: u8) -> Option<u64> {
        let (said, longest) = *lock(&self.shared.state).others_took.get(usize::from(step))?;
        (said == self.others).then_some(longest)
    }

    /// Waits until all ranks have everything. Every wait ends, because ranks that fail, die or stop are noticed.
    ///
    /// # Errors
    /// `Peer`, and `Cancelled` if `go_on`, which is asked every 50 ms, says no.
    pub(crate) fn part(&self, mut go_on: impl FnMut() -> bool) -> Result<()> {
        let mut state = lock(&self.shared.state);
        state.over.get_or_insert(Over::Complete);
        self.shared.orders.notify();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.parted {
                return Ok(());
            }
            if state.ended {
                return Err(Error::new(ErrorKind::Internal, "the connections to other ranks were closed early"));
            }
            let waited = self.shared.changed.wait_timeout(state, Duration::from_millis(50));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !state.parted && state.failure.is_none() {
                drop(state);
                if !go_on() {
                    return Err(Error::new(ErrorKind::Cancelled, "the load was cancelled"));
                }
                state = lock(&self.shared.state);
            }
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.fail(&Error::new(ErrorKind::Cancelled, "its load was given up"));
        if let Some(thread) = lock(&self.thread).take() {
            // A panic there was told to the load already.
            let _told = thread.join();
        }
    }
}

/// A rank, as the thread sees it.
struct Peer {
    rank: u32,
    link: Pair,
    /// Parcels to send, in order.
    out: VecDeque<Outgoing>,
    header: [u8; HEADER],
    have: usize,
    /// Words that came, and words that wait.
    heard: Vec<u8>,
    said: Vec<u8>,
}

/// A parcel on its way to one rank.
struct Outgoing {
    parcel: u32,
    /// The memory of its first place.
    _header: Box<[u8; HEADER]>,
    places: Spans,
    _keep: Arc<dyn Any + Send + Sync>,
}

/// A read whose bytes come from another rank.
struct Awaited {
    read: Read,
    /// Set when it has a place.
    places: Option<Spans>,
    /// Bytes still to come through the socket; `None` until the first of them.
    left: Option<u64>,
    arrived: bool,
}

/// An address in memory that its owner keeps.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: it is used only while the owner keeps the memory (`Read::keep`, `Batch::keep`).
unsafe impl Send for Address {}

impl Address {
    fn plus(self, bytes: u64) -> *mut u8 {
        self.0.wrapping_add(bytes as usize)
    }
}

struct Serving {
    peers: Vec<Peer>,
    /// The state of the peers, by the same numbers.
    watch: PeerWatch,
    rows: RowsOf,
    shared: Arc<PeersShared>,
    rank: u32,
    neighbours: Neighbours,
    /// Parcels whose sending has to be prepared.
    unsent: VecDeque<Outbound>,
    awaited: HashMap<u32, Awaited>,
    parcel_of: HashMap<Ticket, u32>,
    news: Vec<News>,
    events: Vec<Progress>,
    copied: Vec<Copied>,
    failure: Option<Error>,
    reported: Instant,
}

impl Serving {
    fn new(
        mesh: Mesh,
        rows: RowsOf,
        (silence, patience): (Duration, Duration),
        sharing: Result<(), String>,
        shared: Arc<PeersShared>,
    ) -> Serving {
        let now = Instant::now();
        let (mut peers, mut others) = (Vec::new(), Vec::new());
        for ((rank, link), host) in (0..).zip(mesh.links).zip(mesh.hosts.iter().cloned()) {
            let Some(link) = link else { continue };
            let (out, heard, said) = (VecDeque::new(), Vec::new(), Vec::new());
            peers.push(Peer { rank, link, out, header: [0; HEADER], have: 0, heard, said });
            others.push((rank, host));
        }
        let numbers = peers.iter().map(|peer| peer.rank).collect();
        let here = mesh.rank as usize;
        let near: Vec<bool> = others.iter().map(|(_, host)| *host == mesh.hosts[here]).collect();
        Serving {
            peers,
            rank: mesh.rank,
            neighbours: Neighbours::new(mesh.rank, numbers, &near, sharing),
            watch: PeerWatch::new(mesh.rank, others, (silence, patience), now),
            rows,
            shared,
            unsent: VecDeque::new(),
            awaited: HashMap::new(),
            parcel_of: HashMap::new(),
            news: Vec::new(),
            events: Vec::new(),
            copied: Vec::new(),
            failure: None,
            reported: now,
        }
    }

    fn run(mut self) {
        let shared = self.shared.clone();
        let outcome = guarded("penstock-peers", || {
            self.say_all(ALIVE, &[]);
            let introduction = self.neighbours.introduction().bytes();
            self.say_all(INTRODUCES, &introduction);
            while self.turn() {
                step("penstock-peers");
            }
        });
        if let Err(e) = outcome {
            self.set_failure(e);
            self.tell();
        }
        if self.failure.is_some() {
            self.neighbours.keep_nothing();
        }
        // Connections are closed and memory is let go before anybody is told.
        drop(self);
        lock(&shared.state).ended = true;
        shared.changed.notify_all();
    }

    /// Everything that can be done now, then a wait. False: this rank's load is over, and all that was to say is said.
    fn turn(&mut self) -> bool {
        let over = self.take_orders();
        if let Some(Over::Failed(culprit, text)) = over {
            self.give_up();
            self.tell();
            self.farewell(culprit, &text);
            return false;
        }
        if matches!(over, Some(Over::Complete)) && self.watch.complete() {
            self.say_all(COMPLETE, &[]);
        }
        // Before the wait: parcels that had come before the engine asked for them.
        self.tell();
        let planned = self.wait();
        if self.failure.is_none() {
            self.neighbours.serve(&mut self.news);
        }
        for at in 0..self.peers.len() {
            self.hear(at);
            if self.failure.is_none() && !self.watch.is_broken(at) {
                self.receive(at);
                self.send(at);
            }
        }
        self.take_news();
        self.look(planned);
        let parted = self.watch.all_complete() && self.peers.iter().all(|peer| peer.said.is_empty());
        self.tell();
        if parted && self.failure.is_none() {
            lock(&self.shared.state).parted = true;
            self.shared.changed.notify_all();
            self.hear_out(None);
            return false;
        }
        true
    }

    fn take_orders(&mut self) -> Option<Over> {
        self.shared.orders.clear();
        let shared = self.shared.clone();
        let mut state = lock(&shared.state);
        let (reads, landed) = (std::mem::take(&mut state.reads), std::mem::take(&mut state.landed));
        let (sends, cancelled) = (std::mem::take(&mut state.sends), std::mem::take(&mut state.cancelled));
        let (took, returned) = (std::mem::take(&mut state.took), std::mem::take(&mut state.returned));
        let over = state.over.clone();
        drop(state);
        for (step, nanoseconds) in took {
            let mut said = vec![step];
            said.extend(nanoseconds.to_le_bytes());
            self.say_all(TOOK, &said);
        }
        for (parcel, again) in returned {
            self.neighbours.returns(parcel, again, &mut self.news);
        }
        for (parcel, mut read) in reads {
            let places = places(std::mem::replace(&mut read.into, Destination::OnArrival), read.len);
            self.parcel_of.insert(read.ticket, parcel);
            let lent = read.lane == Lane::NEIGHBOUR;
            self.awaited.insert(parcel, Awaited { read, places, left: None, arrived: false });
            if let Some(offered) = self.neighbours.awaits(parcel).filter(|_| lent) {
                self.borrow(parcel, offered);
            }
        }
        for Placed { ticket, into, keep } in landed {
            let Some(&parcel) = self.parcel_of.get(&ticket) else { continue };
            let Some(awaited) = self.awaited.get_mut(&parcel) else { continue };
            awaited.read.keep = keep;
            awaited.places = match (into, awaited.read.lane == Lane::NEIGHBOUR) {
                // Its rows lie in the slab as in the file.
                (Destination::Memory(at), true) => {
                    let (begins, rows) = (awaited.read.offset, (self.rows)(parcel, self.rank).1);
                    let at = Address(at);
                    Some(Spans::new(rows.map(move |(from, len)| (at.plus(from - begins), len as usize))))
                }
                (into, _) => places(into, awaited.read.len),
            };
        }
        self.unsent.extend(sends);
        // A few at a time: nobody may wait for a word meanwhile.
        for _ in 0..PREPARED {
            let Some(send) = self.unsent.pop_front() else { break };
            self.queue(send);
        }
        self.take_news();
        if cancelled {
            self.give_up();
        }
        over
    }

    fn queue(&mut self, send: Outbound) {
        if let Some(failure) = &self.failure {
            self.copied.push(Copied { ticket: send.ticket, result: Err(failure.clone()), begun: Vec::new() });
            return;
        }
        let mut to = Vec::new();
        for at in send.to.iter().filter_map(|rank| self.watch.number_of(*rank)) {
            if self.wanted(send.parcel, at) > 0 {
                to.push(at);
            }
        }
        match to[..] {
            [] => self.copied.push(Copied { ticket: send.ticket, result: Ok(()), begun: Vec::new() }),
            _ => self.neighbours.lend(send, &to, &mut self.news),
        }
    }

    /// The bytes that another rank wants of a parcel.
    fn wanted(&self, parcel: u32, at: usize) -> u64 {
        (self.rows)(parcel, self.peers[at].rank).0
    }

    /// Has a parcel sent to a rank through its socket.
    fn post(&mut self, parcel: u32, at: usize) {
        let Some(Outbound { at: slab, offset, keep, .. }) = self.neighbours.lent(parcel) else { return };
        let (slab, offset, keep) = (Address(*slab), *offset, keep.clone());
        let (nbytes, rows) = (self.rows)(parcel, self.peers[at].rank);
        let mut header = Box::new([0; HEADER]);
        header[..4].copy_from_slice(&parcel.to_le_bytes());
        header[8..].copy_from_slice(&nbytes.to_le_bytes());
        let first = (header.as_mut_ptr(), HEADER);
        let rows = rows.map(move |(at, len)| (slab.plus(at - offset), len as usize));
        let places = Spans::new(std::iter::once(first).chain(rows));
        self.peers[at].out.push_back(Outgoing { parcel, _header: header, places, _keep: keep });
    }

    /// Does what has come up between neighbours.
    fn take_news(&mut self) {
        if self.news.is_empty() {
            return;
        }
        let mut traffic = PeerTraffic::default();
        for news in std::mem::take(&mut self.news) {
            match news {
                News::Free(ticket) => self.copied.push(Copied { ticket, result: Ok(()), begun: Vec::new() }),
                _ if self.failure.is_some() => {}
                News::Comes { from, parcel, offered } => {
                    self.on(from, Heard::Parcel);
                    self.borrow(parcel, offered);
                }
                News::Send { to, parcel } => {
                    traffic.sent += self.wanted(parcel, to);
                    self.post(parcel, to);
                }
                News::Taken { by, parcel } => traffic.lent += self.wanted(parcel, by),
                News::Far { to, why } => self.say(to, FAR, why.as_bytes()),
                News::Broken { from, why } => self.on(from, Heard::Broken(why)),
                News::Breach { from, breach } => {
                    let text = format!("rank {}: {breach}; please report this", self.peers[from].rank);
                    self.set_failure(Error::new(ErrorKind::Internal, text));
                }
            }
        }
        let mut state = lock(&self.shared.state);
        state.traffic.sent += traffic.sent;
        state.traffic.lent += traffic.lent;
    }

    /// A parcel has come in another rank's slab.
    fn borrow(&mut self, parcel: u32, Offered { slab, begins }: Offered) {
        let Some(Awaited { read, .. }) = self.awaited.remove(&parcel) else { return };
        let ends = begins.saturating_add(slab.len() as u64);
        if read.offset < begins || read.offset.saturating_add(read.len) > ends {
            let text = format!("parcel {parcel} is not in the slab that its reader lends; please report this");
            self.awaited.insert(parcel, Awaited { read, places: None, left: None, arrived: false });
            return self.set_failure(Error::new(ErrorKind::Internal, text));
        }
        self.parcel_of.remove(&read.ticket);
        let shared = Arc::downgrade(&self.shared);
        let borrowed = Borrowed::new(slab, (read.offset - begins) as usize, move |slab| {
            // After the load nobody waits for it: its lender has given the slab up.
            if let Some(shared) = shared.upgrade() {
                lock(&shared.state).returned.push((parcel, !slab.is_refused()));
                shared.orders.notify();
            }
        });
        lock(&self.shared.state).borrowed.insert(read.ticket, borrowed);
        let done = Done { ticket: read.ticket, result: Ok(read.len), lane: read.lane, written: read.len };
        self.events.push(Progress::Done(done));
    }

    /// Waits until there is something to do. Returns when it was to end at the latest.
    fn wait(&mut self) -> Instant {
        let now = Instant::now();
        let mut pause = self.watch.until(now).min(REPORTED);
        if !self.unsent.is_empty() {
            pause = Duration::ZERO;
        } else if self.neighbours.waits() {
            pause = pause.min(SHORTLY);
        }
        let quiet = self.failure.is_some();
        let mut polled = vec![libc::pollfd { fd: self.shared.orders.fd(), events: libc::POLLIN, revents: 0 }];
        for (at, peer) in self.peers.iter().enumerate() {
            let say = if peer.said.is_empty() { 0 } else { libc::POLLOUT };
            let hear = if self.watch.is_gone(at) { 0 } else { libc::POLLIN };
            polled.push(libc::pollfd { fd: peer.link.control.as_raw_fd(), events: hear | say, revents: 0 });
            let quiet = quiet || self.watch.is_broken(at);
            let send = if peer.out.is_empty() || quiet { 0 } else { libc::POLLOUT };
            let receive = if quiet || self.is_blocked(peer) { 0 } else { libc::POLLIN };
            if send | receive != 0 {
                polled.push(libc::pollfd { fd: peer.link.data.as_raw_fd(), events: send | receive, revents: 0 });
            }
        }
        if !quiet {
            polled.extend(self.neighbours.polled().map(|(fd, events)| libc::pollfd { fd, events, revents: 0 }));
        }
        polled.retain(|fd| fd.events != 0);
        let milliseconds = pause.as_micros().div_ceil(1000) as i32;
        // SAFETY: as many entries as the count says.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
        now + pause
    }

    /// Whether nothing can be received: the parcel that is next has no place yet, or nothing more comes.
    fn is_blocked(&self, peer: &Peer) -> bool {
        if peer.have < HEADER {
            // Nothing is awaited from anybody: what comes is for later.
            return self.awaited.is_empty();
        }
        self.awaited.get(&parcel_in(&peer.header)).is_none_or(|awaited| awaited.places.is_none())
    }

    /// Takes what a rank says.
    fn hear(&mut self, at: usize) {
        if self.watch.is_gone(at) {
            return self.speak(at);
        }
        let peer = &mut self.peers[at];
        let (mut bytes, mut spoke) = ([0; 1024], false);
        let gone = loop {
            match peer.link.control.read(&mut bytes) {
                Ok(0) => break Some("it has closed its connection".to_owned()),
                Ok(n) => {
                    spoke = true;
                    peer.heard.extend(&bytes[..n]);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if later(&e) => break None,
                Err(e) => break Some(e.to_string()),
            }
        };
        let mut heard = Vec::new();
        if spoke {
            heard.push(Heard::Speech);
        }
        let (mut garbled, mut took) = (false, Vec::new());
        let neighbours = &mut self.neighbours;
        while let Some((kind, text)) = word(&mut peer.heard) {
            match kind {
                ALIVE => {}
                COMPLETE => heard.push(Heard::Complete),
                FAILED => {
                    let culprit = text.first_chunk().copied().map(u32::from_le_bytes);
                    let why = String::from_utf8_lossy(text.get(4..).unwrap_or_default()).into_owned();
                    heard.push(Heard::Failed(culprit, why));
                }
                TOOK => match <[u8; 9]>::try_from(text) {
                    Ok([step, nanoseconds @ ..]) if usize::from(step) < STEPS => {
                        took.push((step, u64::from_le_bytes(nanoseconds)));
                    }
                    _ => garbled = true,
                },
                INTRODUCES => match Introduction::parse(&text) {
                    Some(theirs) => neighbours.introduced(at, theirs, &mut self.news),
                    None => garbled = true,
                },
                FAR => {
                    let why = String::from_utf8_lossy(&text);
                    let why = format!("rank {} shares no slabs with this one: {why}", peer.rank);
                    neighbours.is_far(at, why, &mut self.news);
                }
                _ => garbled = true,
            }
        }
        let gone = gone.or_else(|| garbled.then(|| "it sent an unknown message".to_owned()));
        if !took.is_empty() {
            let mut state = lock(&self.shared.state);
            for (step, nanoseconds) in took {
                let (said, longest) = &mut state.others_took[usize::from(step)];
                (*said, *longest) = (*said + 1, nanoseconds.max(*longest));
            }
            drop(state);
            self.shared.reads.notify();
        }
        heard.extend(gone.map(Heard::Gone));
        for heard in heard {
            self.on(at, heard);
        }
        self.speak(at);
    }

    /// Something was heard of a rank.
    fn on(&mut self, at: usize, heard: Heard) {
        if let Some(error) = self.watch.on(Instant::now(), at, heard) {
            self.set_failure(error);
        }
    }

    /// Says to a rank what waits to be said.
    fn speak(&mut self, at: usize) {
        let peer = &mut self.peers[at];
        while !peer.said.is_empty() {
            match peer.link.control.write(&peer.said) {
                Ok(n) => drop(peer.said.drain(..n)),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if later(&e) => return,
                // If it is gone, that is heard.
                Err(_) => peer.said.clear(),
            }
        }
    }

    fn say_all(&mut self, kind: u8, text: &[u8]) {
        (0..self.peers.len()).for_each(|at| self.say(at, kind, text));
    }

    fn say(&mut self, at: usize, kind: u8, text: &[u8]) {
        let text = &text[..text.len().min(TEXT)];
        let peer = &mut self.peers[at];
        peer.said.push(kind);
        peer.said.extend((text.len() as u32).to_le_bytes());
        peer.said.extend(text);
        self.watch.said(Instant::now(), at);
        self.speak(at);
    }

    fn receive(&mut self, at: usize) {
        for _ in 0..CALLS {
            let peer = &mut self.peers[at];
            let fd = peer.link.data.as_raw_fd();
            let got = if peer.have < HEADER {
                let mut rest = Spans::new(std::iter::once((peer.header[peer.have..].as_mut_ptr(), HEADER - peer.have)));
                // SAFETY: the rest of the header.
                unsafe { rest.receive(fd) }.inspect(|n| peer.have += n)
            } else {
                let parcel = parcel_in(&peer.header);
                let Some(awaited) = self.awaited.get_mut(&parcel) else { return };
                let nbytes = nbytes_in(&peer.header);
                if awaited.left.is_none() {
                    let wanted = match awaited.read.lane == Lane::NEIGHBOUR {
                        true => (self.rows)(parcel, self.rank).0,
                        false => awaited.read.len,
                    };
                    if nbytes != wanted {
                        let rank = peer.rank;
                        let text = format!(
                            "rank {rank} sends {nbytes} bytes of parcel {parcel}, and {wanted} are wanted; please report this"
                        );
                        return self.set_failure(Error::new(ErrorKind::Internal, text));
                    }
                    awaited.left = Some(wanted);
                }
                let Some(places) = &mut awaited.places else {
                    if !std::mem::replace(&mut awaited.arrived, true) {
                        self.events.push(Progress::Arrived(awaited.read.ticket));
                    }
                    return;
                };
                // SAFETY: the read's memory, which it keeps.
                unsafe { places.receive(fd) }.inspect(|&n| {
                    awaited.left = awaited.left.map(|left| left - n as u64);
                    awaited.read.written += n as u64;
                })
            };
            match got {
                Ok(0) => return self.on(at, Heard::Broken("it has closed its connection".to_owned())),
                Ok(_) => self.finish_parcel(at),
                Err(e) if later(&e) => return,
                Err(e) => return self.on(at, Heard::Broken(e.to_string())),
            }
        }
    }

    /// If all bytes of the parcel that comes are there, it is done.
    fn finish_parcel(&mut self, at: usize) {
        let peer = &mut self.peers[at];
        let parcel = parcel_in(&peer.header);
        if peer.have < HEADER || self.awaited.get(&parcel).is_none_or(|awaited| awaited.left != Some(0)) {
            return;
        }
        peer.have = 0;
        self.on(at, Heard::Parcel);
        if let Some(Awaited { read, .. }) = self.awaited.remove(&parcel) {
            self.parcel_of.remove(&read.ticket);
            self.neighbours.received(parcel);
            let done = Done { ticket: read.ticket, result: Ok(read.len), lane: Lane::RANK, written: read.len };
            self.events.push(Progress::Done(done));
        }
    }

    fn send(&mut self, at: usize) {
        for _ in 0..CALLS {
            let peer = &mut self.peers[at];
            let Some(first) = peer.out.front_mut() else { return };
            // SAFETY: the slab, which `_keep` keeps, and the header.
            match unsafe { first.places.send(peer.link.data.as_raw_fd()) } {
                Ok(0) => {
                    let parcel = first.parcel;
                    peer.out.pop_front();
                    self.neighbours.sent(parcel, &mut self.news);
                }
                Ok(_) => {}
                Err(e) if later(&e) => return,
                Err(e) => return self.on(at, Heard::Broken(e.to_string())),
            }
        }
    }

    /// Says that this rank is alive, and looks whether the others are. `planned`: when this turn was to begin at
    /// the latest.
    fn look(&mut self, planned: Instant) {
        let now = Instant::now();
        if self.watch.wakes(now, planned) {
            self.say_all(ALIVE, &[]);
        }
        if let Some(error) = self.watch.look(now) {
            self.set_failure(error);
        }
        if now - self.reported >= REPORTED && self.failure.is_none() {
            self.reported = now;
            // As long as their ranks are alive, these reads go on.
            if let Some(awaited) = self.awaited.values().next() {
                self.events.push(Progress::Received(awaited.read.ticket));
            }
        }
    }

    fn set_failure(&mut self, error: Error) {
        if self.failure.is_some() {
            return;
        }
        lock(&self.shared.state).failure = Some(error.clone());
        self.send_nothing(&error);
        self.failure = Some(error);
        self.shared.reads.notify();
        self.shared.changed.notify_all();
    }

    /// Nothing more is received.
    fn give_up(&mut self) {
        if self.failure.is_none() {
            self.failure = Some(Error::new(ErrorKind::Cancelled, "the load was cancelled before this was exchanged"));
        }
        for (_, Awaited { read, .. }) in self.awaited.drain() {
            let error = Error::new(ErrorKind::Cancelled, "the load was cancelled before this was received");
            let Read { ticket, lane, written, .. } = read;
            self.events.push(Progress::Done(Done { ticket, result: Err(error), lane, written }));
        }
        self.parcel_of.clear();
        if let Some(failure) = self.failure.clone() {
            self.send_nothing(&failure);
        }
    }

    /// Gives up all parcels that were to be sent.
    fn send_nothing(&mut self, error: &Error) {
        self.peers.iter_mut().for_each(|peer| peer.out.clear());
        let lent = self.neighbours.give_up();
        let tickets = lent.into_iter().chain(self.unsent.drain(..).map(|send| send.ticket));
        self.copied.extend(tickets.map(|ticket| Copied { ticket, result: Err(error.clone()), begun: Vec::new() }));
    }

    /// Tells the engine thread what has happened.
    fn tell(&mut self) {
        let fallbacks = self.neighbours.take_fallbacks();
        if self.events.is_empty() && self.copied.is_empty() && fallbacks.is_empty() {
            return;
        }
        let mut state = lock(&self.shared.state);
        state.fallbacks.extend(fallbacks);
        let (reads, copies) = (!self.events.is_empty(), !self.copied.is_empty());
        state.events.append(&mut self.events);
        state.copied.append(&mut self.copied);
        drop(state);
        if reads {
            self.shared.reads.notify();
        }
        if copies {
            self.shared.copies.notify();
        }
    }

    /// Tells the others that the load has failed, as far as they listen.
    fn farewell(&mut self, culprit: u32, text: &str) {
        let mut said = culprit.to_le_bytes().to_vec();
        said.extend(text.as_bytes());
        self.say_all(FAILED, &said);
        self.hear_out(Some(culprit));
    }

    /// Says that nothing more comes, and waits for a moment until the others say so: what is still in a connection when it is
    /// closed resets it, and the last word may be lost. A rank that has failed (`culprit`) may not answer.
    fn hear_out(&mut self, culprit: Option<u32>) {
        self.watch.leave(Instant::now(), culprit);
        loop {
            for (at, peer) in self.peers.iter_mut().enumerate() {
                let mut bytes = [0; 1024];
                if peer.said.is_empty() && !self.watch.is_gone(at) {
                    let _it_may_be_closed = peer.link.control.shutdown(Shutdown::Write);
                    let gone = loop {
                        match peer.link.control.read(&mut bytes) {
                            Ok(0) => break true,
                            Ok(_) => {}
                            Err(e) => break !later(&e),
                        }
                    };
                    if gone {
                        self.watch.answered(at);
                    }
                }
            }
            if self.watch.has_left(Instant::now()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
            (0..self.peers.len()).for_each(|at| self.speak(at));
        }
    }
}

fn parcel_in(header: &[u8; HEADER]) -> u32 {
    u32::from_le_bytes([header[0], header[1], header[2], header[3]])
}

fn nbytes_in(header: &[u8; HEADER]) -> u64 {
    header.last_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// The first word of what was heard, if it is complete.
fn word(heard: &mut Vec<u8>) -> Option<(u8, Vec<u8>)> {
    let length = u32::from_le_bytes([*heard.get(1)?, *heard.get(2)?, *heard.get(3)?, *heard.get(4)?]) as usize;
    if length > TEXT {
        heard.clear();
        return Some((GARBLED, Vec::new()));
    }
    if heard.len() < WORD + length {
        return None;
    }
    let rest = heard.split_off(WORD + length);
    let mut word = std::mem::replace(heard, rest);
    let text = word.split_off(WORD);
    Some((word[0], text))
}

fn places(into: Destination, len: u64) -> Option<Spans> {
    match into {
        Destination::Memory(at) => Some(Spans::new(std::iter::once((at, len as usize)))),
        Destination::Scatter(places) => Some(Spans::new(places.into_iter())),
        Destination::OnArrival | Destination::Mapping { .. } | Destination::Rows { .. } => None,
    }
}
