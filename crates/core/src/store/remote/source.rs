//! The source of a load from web servers: a thread that has the connections, or several that share them.

use super::http::answer::{Expected, GAP};
use super::http::common::Common;
use super::http::settings::WebSettings;
use super::http::sockets::Sockets;
use super::transfer::net::Net;
use super::transfer::range_read::{BodyPlaces, RangeRead, Site};
use super::transfer::told::Told;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, Ticket};
use crate::machine::block_signals;
use crate::source::{Destination, Done, Progress, Read, Source};
use crate::store::object::Traffic;
use crate::store::version::Version;
use crate::sync::{lock, Builder, JoinHandle, Mutex};
use crate::threads::{guarded, step};
use crate::wake::Wake;
use crate::way::Routing;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::mem;
use std::os::fd::RawFd;
use std::sync::Arc;

/// An object of a load.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) site: Arc<Site>,
    pub(super) size: u64,
    pub(super) version: Version,
}

pub(super) struct WebSource {
    lanes: Vec<NetLane>,
    /// The objects by the number of their file.
    objects: Arc<Vec<Option<Remote>>>,
    depth: usize,
    /// Reads that were submitted and did not come back: their lane, and their bytes.
    in_flight: HashMap<Ticket, (usize, u64)>,
    /// The lane of the last read, the end of that read, and the bytes that its lane got in a row.
    last: (usize, (u32, u64), u64),
    /// Bytes of neighbouring reads that go to one lane: those of a request.
    row: u64,
    /// Bytes between two neighbours, at most.
    gap: u64,
    /// Notified when a lane has news.
    to_owner: Arc<Wake>,
    /// Reads whose arrival was reported, and which have no place yet.
    arrived: HashSet<Ticket>,
    /// Arrived reads that were given up.
    given_up: HashSet<Ticket>,
}

/// A thread that has a part of the connections.
struct NetLane {
    shared: Arc<NetShared>,
    thread: Option<JoinHandle<()>>,
    /// Bytes of its reads that did not come back.
    bytes: u64,
}

struct NetShared {
    state: Mutex<NetState>,
    /// Wakes the thread.
    to_thread: Arc<Wake>,
    to_owner: Arc<Wake>,
}

#[derive(Default)]
struct NetState {
    commands: Vec<ToNet>,
    events: Vec<Progress>,
    /// Reads that have ended and hold no memory, and whose ends are about to be told.
    ended: HashSet<Ticket>,
    /// Every read has been given up: only their ends are of interest until the thread has heard of it.
    cancelled: bool,
    closing: bool,
    /// The thread has panicked, and holds nothing any more.
    dead: Option<Error>,
}

enum ToNet {
    Ask(Box<RangeRead>),
    Land(Ticket, BodyPlaces, Arc<dyn Any + Send + Sync>),
    Cancel,
}

// SAFETY: the addresses are only written to while the read is in flight, and what it keeps keeps them valid (invariant 5).
unsafe impl Send for ToNet {}

impl NetLane {
    fn new(common: Arc<Common>, counts: Arc<Mutex<Traffic>>, to_owner: Arc<Wake>, gap: u64) -> Result<NetLane> {
        let (state, to_thread) = (Mutex::new(NetState::default()), Arc::new(Wake::new()?));
        let mut net = Net::new(Sockets::new(common.clone(), Some(to_thread.clone()))?, common, counts);
        net.gap = gap;
        net.join_node()?;
        let shared = Arc::new(NetShared { state, to_thread, to_owner });
        let theirs = shared.clone();
        let thread = Builder::new().name("penstock-net".into()).spawn(move || {
            block_signals();
            let ran = guarded("penstock-net", || theirs.run(&mut net));
            // Connections and reads go before anybody is told.
            let gone = guarded("penstock-net", move || drop(net));
            if let Err(e) = ran.and(gone) {
                theirs.die(e);
            }
        });
        let thread = Some(thread.map_err(|e| Error::io("start a thread", &e))?);
        Ok(NetLane { shared, thread, bytes: 0 })
    }
}

impl WebSource {
    pub(super) fn new(
        common: Arc<Common>,
        objects: Arc<Vec<Option<Remote>>>,
        counts: Arc<Mutex<Traffic>>,
        routing: &Routing,
    ) -> Result<WebSource> {
        let (depth, gap) = (routing.depth.max(routing.requests), routing.gap.unwrap_or(GAP).min(GAP));
        let to_owner = Arc::new(Wake::new()?);
        let common = Arc::new(Common {
            settings: WebSettings { busy: routing.stall, ..common.settings.clone() },
            ..Common::clone(&common)
        });
        let (lanes, each) = common.divided();
        let lane = |_| NetLane::new(each.clone(), counts.clone(), to_owner.clone(), gap);
        // Those that run already end if one cannot start.
        let mut source = WebSource {
            lanes: Vec::new(),
            objects,
            depth,
            in_flight: HashMap::new(),
            last: (0, (0, 0), 0),
            row: common.settings.request_bytes,
            gap,
            to_owner: to_owner.clone(),
            arrived: HashSet::new(),
            given_up: HashSet::new(),
        };
        for number in 0..lanes {
            source.lanes.push(lane(number)?);
        }
        Ok(source)
    }

    /// The lane for a read: that of its neighbour before it, so that both are one request, or the one with the least to do.
    fn lane_for(&mut self, read: &Read) -> usize {
        let (lane, end, row) = self.last;
        let start = (read.file, read.offset);
        let near = start.0 == end.0 && start.1 >= end.1 && start.1 - end.1 <= self.gap;
        let (lane, row) = match near && row + read.len <= self.row {
            true => (lane, row + read.len),
            false => {
                let idlest = (0..self.lanes.len()).min_by_key(|&number| self.lanes[number].bytes);
                (idlest.unwrap_or_default(), read.len)
            }
        };
        self.last = (lane, (read.file, read.offset + read.len), row);
        lane
    }

    fn download(&self, read: Read) -> Result<RangeRead, (Read, Error)> {
        let Some(Remote { site, size, version }) = self.objects.get(read.file as usize).and_then(Option::as_ref) else {
            let text = "this file is no object of a web server; please report this";
            return Err((read, Error::new(ErrorKind::Internal, text)));
        };
        let end = (read.offset + read.len).min(*size);
        let needed = read.offset + read.need;
        if end < needed || end <= read.offset {
            let text = format!("the object ends at byte {size}, but its header promises more");
            let e = Error::new(ErrorKind::Truncated, text).with_values(needed, *size);
            let range = read.offset..needed;
            return Err((read, e.at(&site.path).range(range)));
        }
        let expected = Expected { object: Some((*size, version.clone())), range: read.offset..end };
        match BodyPlaces::of(read.into, read.len) {
            Ok(places) => {
                let mut download = RangeRead::new(read.ticket, read.lane, site.clone(), expected, places);
                download.keep = read.keep;
                Ok(download)
            }
            Err(e) => Err((Read { into: Destination::OnArrival, ..read }, e)),
        }
    }
}

impl NetShared {
    fn run(&self, net: &mut Net<Sockets>) {
        let mut told = Vec::new();
        loop {
            let commands = {
                let mut state = lock(&self.state);
                if state.closing {
                    return;
                }
                mem::take(&mut state.commands)
            };
            for command in commands {
                match command {
                    ToNet::Ask(download) => net.add(*download),
                    ToNet::Land(ticket, places, keep) => net.land(ticket, places, keep, &mut told),
                    ToNet::Cancel => {
                        net.cancel(&mut told);
                        told.retain(|event| matches!(event, Told::Done { .. }));
                        lock(&self.state).cancelled = false;
                    }
                }
            }
            if let Err(e) = net.turn(&mut told) {
                // No connection can be waited for: every read has failed.
                net.give_up(&e, &mut told);
            }
            self.tell(&mut told);
            step("penstock-net");
        }
    }

    /// The thread ends before its time: what it was asked for and what waits is let go, and its owner hears why.
    fn die(&self, e: Error) {
        let left = {
            let mut state = lock(&self.state);
            state.dead = Some(e);
            mem::take(&mut state.commands)
        };
        drop(left);
        self.to_owner.notify();
    }

    fn tell(&self, told: &mut Vec<Told>) {
        if told.is_empty() {
            return;
        }
        // Nobody learns of an end while a place that came too late is held. It is let go outside of the lock.
        let late: Vec<ToNet> = {
            let mut state = lock(&self.state);
            let done = told.iter().filter_map(|event| match event {
                Told::Done { done, .. } => Some(done.ticket),
                _ => None,
            });
            state.ended.extend(done);
            let NetState { commands, ended, .. } = &mut *state;
            let is_late = |command: &ToNet| matches!(command, ToNet::Land(ticket, ..) if ended.contains(ticket));
            let (late, others) = mem::take(commands).into_iter().partition(is_late);
            *commands = others;
            late
        };
        drop(late);
        let mut state = lock(&self.state);
        state.ended.clear();
        let cancelled = state.cancelled;
        let events = told.drain(..).filter_map(|event| match event {
            Told::Done { done, .. } => Some(Progress::Done(done)),
            _ if cancelled => None,
            Told::Arrived(ticket) => Some(Progress::Arrived(ticket)),
            Told::Received(ticket) => Some(Progress::Received(ticket)),
        });
        state.events.extend(events);
        self.to_owner.notify();
    }
}

impl Source for WebSource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if self.in_flight.len() >= self.depth {
            return Err(read);
        }
        let lane = self.lane_for(&read);
        self.in_flight.insert(read.ticket, (lane, read.len));
        self.lanes[lane].bytes += read.len;
        let download = self.download(read);
        let shared = &self.lanes[lane].shared;
        match download {
            Ok(download) => lock(&shared.state).commands.push(ToNet::Ask(Box::new(download))),
            Err((read, e)) => {
                let (ticket, lane) = (read.ticket, read.lane);
                drop(read);
                let done = Done { ticket, result: Err(e), lane, written: 0 };
                lock(&shared.state).events.push(Progress::Done(done));
                self.to_owner.notify();
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        for NetLane { shared, .. } in &self.lanes {
            if !lock(&shared.state).commands.is_empty() {
                shared.to_thread.notify();
            }
        }
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.to_owner.clear();
        let from = events.len();
        for (lane, NetLane { shared, .. }) in self.lanes.iter().enumerate() {
            let (dead, commands) = {
                let mut state = lock(&shared.state);
                events.append(&mut state.events);
                (state.dead.clone(), state.dead.is_some().then(|| mem::take(&mut state.commands)))
            };
            drop(commands);
            let Some(e) = dead else { continue };
            let ended = |ticket: &Ticket, events: &[Progress]| {
                events.iter().any(|event| matches!(event, Progress::Done(done) if done.ticket == *ticket))
            };
            for (&ticket, _) in self.in_flight.iter().filter(|(_, read)| read.0 == lane) {
                if !ended(&ticket, &events[from..]) {
                    // How much was received is not known.
                    let (lane, written) = (Lane::NETWORK, u64::MAX);
                    events.push(Progress::Done(Done { ticket, result: Err(e.clone()), lane, written }));
                }
            }
        }
        for event in &events[from..] {
            match event {
                Progress::Arrived(ticket) => drop(self.arrived.insert(*ticket)),
                Progress::Received(_) | Progress::Refused { .. } => {}
                Progress::Done(done) => {
                    self.arrived.remove(&done.ticket);
                    self.given_up.remove(&done.ticket);
                    if let Some((lane, bytes)) = self.in_flight.remove(&done.ticket) {
                        self.lanes[lane].bytes -= bytes;
                    }
                }
            }
        }
        Ok(())
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        if self.given_up.remove(&ticket) {
            return Ok(());
        }
        let lane = self.in_flight.get(&ticket).map(|(lane, _)| *lane).filter(|_| self.arrived.remove(&ticket));
        let Some(lane) = lane else {
            let text = format!("ticket {} was given a place, and has not arrived; please report this", ticket.0);
            return Err(Error::new(ErrorKind::Internal, text));
        };
        let none = || Error::new(ErrorKind::Internal, "a read was given no place; please report this");
        let places = BodyPlaces::of(into, u64::MAX)?.ok_or_else(none)?;
        let shared = &self.lanes[lane].shared;
        let mut state = lock(&shared.state);
        let ended = |event: &Progress| matches!(event, Progress::Done(done) if done.ticket == ticket);
        if !state.ended.contains(&ticket) && !state.events.iter().any(ended) {
            state.commands.push(ToNet::Land(ticket, places, keep));
            shared.to_thread.notify();
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.given_up.extend(self.arrived.drain());
        for NetLane { shared, .. } in &self.lanes {
            let mut state = lock(&shared.state);
            state.events.retain(|event| matches!(event, Progress::Done(_)));
            state.cancelled = true;
            state.commands.push(ToNet::Cancel);
            shared.to_thread.notify();
        }
    }

    fn wake(&self) -> RawFd {
        self.to_owner.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}

impl Drop for WebSource {
    fn drop(&mut self) {
        for NetLane { shared, .. } in &self.lanes {
            lock(&shared.state).closing = true;
            shared.to_thread.notify();
        }
        for NetLane { shared, thread, .. } in &mut self.lanes {
            // The thread never blocks on a server. It closes the connections, and then nothing writes to any memory.
            let _ended = thread.take().map(JoinHandle::join);
            let commands = mem::take(&mut lock(&shared.state).commands);
            drop(commands);
        }
    }
}
