//! The connections at rates that none of our machines reaches, in virtual time. Servers, their network and the device are
//! models; what decides about connections, requests and stragglers is the code of every load. No real bytes move.

use super::net::Net;
use super::range_read::{BodyPlaces, RangeRead, Site};
use super::told::Told;
use crate::error::Result;
use crate::extent::{Lane, Ticket};
use crate::store::remote::http::answer::Expected;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::request::WebRequests;
use crate::store::remote::http::settings::WebSettings;
use crate::store::remote::http::wires::{Watched, WireEnd, Wires};
use crate::store::version::Version;
use crate::sync::lock;
use crate::wake::Wake;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Bytes of one read, and of one slab.
const READ: u64 = MIB;
/// Bytes that the model moves at once.
const PART: u64 = 256 << 10;
/// Bytes of a connection that the kernel keeps before the server has to stop.
const KERNEL: u64 = 4 * MIB;
/// The size of the object.
const SIZE: u64 = 1 << 50;

/// A server and its network.
#[derive(Debug, Clone, Copy)]
struct Model {
    /// Bytes per second of one connection.
    rate: f64,
    /// To the first byte of an answer.
    first_byte: Duration,
    /// Bytes per second of the network.
    network: f64,
    /// Connections that it takes.
    most: usize,
    /// Whether further ones are refused. Otherwise they wait until others are closed.
    refuses: bool,
    /// One of so many answers stops half-way for good; 0: none.
    stalls: u64,
}

#[derive(Default)]
struct Line {
    is_open: bool,
    /// Its watched events, and its number there.
    watched: Option<(Watched, usize)>,
    head: Vec<u8>,
    /// Bytes of the body that the server has not sent, those on their way, and those that are there.
    left: u64,
    on_the_way: u64,
    there: u64,
    /// It sends nothing more.
    stalled_at: u64,
    sends: bool,
    /// It is one of those that the server takes.
    is_taken: bool,
}

enum Step {
    Answers(usize),
    Sends(usize),
    Arrives(usize, u64),
    /// The device has copied a slab.
    Copied,
}

struct World {
    model: Model,
    begun: Instant,
    now: Duration,
    lines: Vec<Line>,
    steps: BinaryHeap<(Reverse<(Duration, u64)>, usize)>,
    stepped: Vec<Option<Step>>,
    free_at: Duration,
    answers: u64,
    refused: u64,
    /// Slabs that were copied, and are not used again yet.
    copied: usize,
    /// Connections on which something has changed.
    changed: Vec<usize>,
    /// Connections with a request that wait until the server takes them.
    queued: VecDeque<usize>,
}

impl World {
    fn at(&mut self, when: Duration, step: Step) {
        self.steps.push((Reverse((when, self.stepped.len() as u64)), self.stepped.len()));
        self.stepped.push(Some(step));
    }

    fn step(&mut self) -> bool {
        let Some((Reverse((when, _)), step)) = self.steps.pop() else { return false };
        self.now = self.now.max(when);
        match self.stepped[step].take() {
            Some(Step::Answers(line)) => {
                self.lines[line].sends = true;
                self.changed.push(line);
                self.send(line);
            }
            Some(Step::Sends(line)) => self.send(line),
            Some(Step::Arrives(line, bytes)) => {
                self.changed.push(line);
                let line = &mut self.lines[line];
                if line.is_open {
                    line.on_the_way -= bytes;
                    line.there += bytes;
                }
            }
            Some(Step::Copied) => self.copied += 1,
            None => {}
        }
        true
    }

    /// The server takes connections that wait, as many as it may.
    fn take_queued(&mut self) {
        while self.lines.iter().filter(|line| line.is_taken).count() < self.model.most {
            let Some(number) = self.queued.pop_front() else { return };
            if self.lines[number].is_open {
                self.lines[number].is_taken = true;
                let when = self.now + self.model.first_byte;
                self.at(when, Step::Answers(number));
            }
        }
    }

    /// The server sends the next part, if the client takes it.
    fn send(&mut self, number: usize) {
        let (now, model) = (self.now, self.model);
        let line = &mut self.lines[number];
        let part = line.left.min(PART);
        let full = line.there + line.on_the_way + part > KERNEL;
        if !line.is_open || part == 0 || full || line.left <= line.stalled_at {
            line.sends = false;
            return;
        }
        line.left -= part;
        line.on_the_way += part;
        // Through the connection, and then through the network that all share.
        let sent = now + Duration::from_secs_f64(part as f64 / model.rate);
        self.free_at = self.free_at.max(sent) + Duration::from_secs_f64(part as f64 / model.network);
        let (arrives, next) = (self.free_at, sent.max(self.free_at.saturating_sub(Duration::from_millis(1))));
        self.at(arrives, Step::Arrives(number, part));
        self.at(next, Step::Sends(number));
    }

    /// The numbers of connections on which something can be received.
    fn ready(&mut self, numbers: &mut Vec<usize>) {
        for line in std::mem::take(&mut self.changed) {
            let line = &self.lines[line];
            if line.is_open && (line.there > 0 || line.has_answer()) {
                numbers.extend(line.watched.filter(|watched| watched.0 != Watched::Nothing).map(|watched| watched.1));
            }
        }
    }
}

impl Line {
    /// Whether the head of an answer is there.
    fn has_answer(&self) -> bool {
        !self.head.is_empty() && (self.sends || self.on_the_way + self.there > 0)
    }
}

struct VirtualStream {
    world: Rc<RefCell<World>>,
    number: usize,
}

impl Drop for VirtualStream {
    fn drop(&mut self) {
        let mut world = self.world.borrow_mut();
        world.lines[self.number] = Line::default();
        world.take_queued();
    }
}

impl WireEnd for VirtualStream {
    fn is_ready(&mut self) -> io::Result<bool> {
        let mut world = self.world.borrow_mut();
        if world.model.refuses && world.lines.iter().filter(|line| line.is_open).count() > world.model.most {
            world.refused += 1;
            return Err(io::Error::from_raw_os_error(libc::ECONNREFUSED));
        }
        Ok(true)
    }

    fn say(&mut self, text: String) {
        let range = text.split("Range: bytes=").nth(1).and_then(|rest| rest.split('\r').next()).unwrap();
        let (first, last) = range.split_once('-').unwrap();
        let length = last.parse::<u64>().unwrap() + 1 - first.parse::<u64>().unwrap();
        let mut world = self.world.borrow_mut();
        world.answers += 1;
        let stops = world.model.stalls > 0 && world.answers % world.model.stalls == 0;
        let stalled_at = if stops { length / 2 } else { 0 };
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\nContent-Range: bytes {range}/{SIZE}\r\n\
             ETag: \"e\"\r\n\r\n"
        );
        let line = &mut world.lines[self.number];
        assert!(line.left + line.there + line.on_the_way == 0, "asked before the last answer has come");
        (line.head, line.left, line.stalled_at) = (head.into_bytes(), length, stalled_at);
        if line.is_taken {
            let when = world.now + world.model.first_byte;
            world.at(when, Step::Answers(self.number));
        } else {
            world.queued.push_back(self.number);
            world.take_queued();
        }
    }

    fn send(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn has_to_send(&self) -> bool {
        false
    }

    fn holds_bytes(&self) -> bool {
        false
    }

    unsafe fn receive(&mut self, places: &mut [libc::iovec]) -> io::Result<usize> {
        let mut world = self.world.borrow_mut();
        let line = &mut world.lines[self.number];
        if line.has_answer() {
            let head = std::mem::take(&mut line.head);
            // SAFETY: as the caller promises; the first place has room for a head.
            unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), places[0].iov_base.cast(), head.len()) };
            return Ok(head.len());
        }
        let room: usize = places.iter().map(|place| place.iov_len).sum();
        let bytes = line.there.min(room as u64);
        if bytes == 0 || !line.head.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        line.there -= bytes;
        if !line.sends && line.left > 0 {
            line.sends = true;
            let now = world.now;
            world.at(now, Step::Sends(self.number));
        }
        Ok(bytes as usize)
    }
}

struct VirtualWires(Rc<RefCell<World>>);

impl Wires for VirtualWires {
    type Stream = VirtualStream;

    fn now(&self) -> Instant {
        let world = self.0.borrow();
        world.begun + world.now
    }

    fn jitter(&self) -> crate::store::remote::http::jitter::Jitter {
        crate::store::remote::http::jitter::Jitter::seeded(1)
    }

    fn wake(&self) -> Option<&Arc<Wake>> {
        None
    }

    fn connect(&mut self, _server: &crate::store::remote::http::address::Server) -> Result<Option<VirtualStream>> {
        let mut world = self.0.borrow_mut();
        world.lines.push(Line { is_open: true, ..Line::default() });
        Ok(Some(VirtualStream { world: self.0.clone(), number: world.lines.len() - 1 }))
    }

    fn watch(&mut self, stream: &VirtualStream, number: usize, _: Watched, wanted: Watched) -> Result<()> {
        let mut world = self.0.borrow_mut();
        world.lines[stream.number].watched = Some((wanted, number));
        world.changed.push(stream.number);
        Ok(())
    }

    fn wait(&mut self, most: Option<Duration>, numbers: &mut Vec<usize>) -> Result<bool> {
        let mut world = self.0.borrow_mut();
        let until = most.map(|most| world.now + most);
        loop {
            world.ready(numbers);
            if !numbers.is_empty() || world.copied > 0 {
                return Ok(true);
            }
            let next = world.steps.peek().map(|step| step.0 .0 .0);
            match (next, until) {
                (Some(next), until) if until.is_none_or(|until| next <= until) => drop(world.step()),
                (_, Some(until)) => {
                    world.now = until;
                    return Ok(true);
                }
                _ => panic!("nothing happens any more"),
            }
        }
    }
}

/// The outcome of a load: it keeps reads in flight, gives each a slab when it arrives, and a device copies it.
struct Outcome {
    /// Bytes that arrived by the end of each tenth of a second.
    arrived: Vec<u64>,
    seconds: f64,
    /// Most slabs that were used.
    slabs: usize,
    connections: usize,
    refused: u64,
    /// Requests.
    asked: u64,
    moved: u64,
}

/// Loads `bytes` with `staging` slabs onto a device that copies 50 GB/s.
fn load(model: Model, bytes: u64, slabs: usize, connections: usize) -> Outcome {
    load_with(model, bytes, slabs, WebSettings { connections, ..WebSettings::default() })
}

fn load_with(model: Model, bytes: u64, slabs: usize, settings: WebSettings) -> Outcome {
    let connections = settings.connections;
    let world = Rc::new(RefCell::new(World {
        model,
        begun: Instant::now(),
        now: Duration::ZERO,
        lines: Vec::new(),
        steps: BinaryHeap::new(),
        stepped: Vec::new(),
        free_at: Duration::ZERO,
        answers: 0,
        refused: 0,
        copied: 0,
        changed: Vec::new(),
        queued: VecDeque::new(),
    }));
    let common = Common { settings, ..Common::default() };
    let mut net = Net::new(VirtualWires(world.clone()), Arc::new(common), Arc::default());
    let site = Arc::new(Site::new("http://10.0.0.1/o".into(), "http://10.0.0.1/o".into(), Arc::new(WebRequests(None))));
    let version = Version::Strong("\"e\"".into());
    let (reads, most) = (bytes / READ, (connections * crate::store::remote::READS) as u64);
    let mut memory = vec![0u8; READ as usize];
    let (mut next, mut done, mut free, mut used_most) = (0, 0, slabs, 0);
    let mut waiting: VecDeque<Ticket> = VecDeque::new();
    let (mut device, mut arrived, mut peak) = (Duration::ZERO, vec![0u64], 0);
    let mut told = Vec::new();
    while done < reads {
        while next < reads && next - done < most {
            let range = next * READ..(next + 1) * READ;
            let expected = Expected { object: Some((SIZE, version.clone())), range };
            net.add(RangeRead::new(Ticket(next), Lane::NETWORK, site.clone(), expected, None));
            next += 1;
        }
        net.turn(&mut told).unwrap();
        free += std::mem::take(&mut world.borrow_mut().copied);
        for event in std::mem::take(&mut told) {
            match event {
                Told::Arrived(ticket) => waiting.push_back(ticket),
                Told::Received(_) => {}
                Told::Done { done: read, .. } => {
                    read.result.unwrap();
                    done += 1;
                    let mut world = world.borrow_mut();
                    let tenth = (world.now.as_secs_f64() * 10.0) as usize;
                    arrived.resize(arrived.len().max(tenth + 1), 0);
                    arrived[tenth] += READ;
                    device = device.max(world.now) + Duration::from_secs_f64(READ as f64 / 50e9);
                    world.at(device, Step::Copied);
                }
            }
        }
        while free > 0 && !waiting.is_empty() {
            let ticket = waiting.pop_front().unwrap();
            free -= 1;
            net.land(ticket, BodyPlaces::one(memory.as_mut_ptr(), memory.len()), Arc::new(()), &mut told);
        }
        used_most = used_most.max(slabs - free);
        peak = peak.max(net.links.len());
    }
    let world = world.borrow();
    let seconds = world.now.as_secs_f64();
    let moved = lock(&net.counts).moved;
    Outcome {
        arrived,
        seconds,
        slabs: used_most,
        connections: peak,
        refused: world.refused,
        asked: world.answers,
        moved,
    }
}

/// Bytes per second between these two moments.
fn rate(outcome: &Outcome, from: f64, until: f64) -> f64 {
    let tenths = (from * 10.0) as usize..(until * 10.0) as usize;
    outcome.arrived[tenths].iter().sum::<u64>() as f64 / (until - from)
}

const GIGABIT: f64 = 1e9 / 8.0;
/// The part of a link for the bytes of bodies: Ethernet, IP and TCP take theirs.
const PAYLOAD: f64 = 0.94;

fn cloud(network: f64) -> Model {
    Model { rate: 85e6, first_byte: Duration::from_millis(40), network, most: usize::MAX, refuses: true, stalls: 0 }
}

/// 8 MB/s for each of at most 128 connections, 50 ms after a request.
fn slow() -> Model {
    Model { rate: 8e6, first_byte: Duration::from_millis(50), most: 128, ..cloud(1e12) }
}

#[test]
fn links_of_100_and_200_gigabit_are_full_within_256_and_512_mib_of_staging() {
    for (gigabits, mebibytes, connections) in [(100.0, 256, 256), (200.0, 512, 512)] {
        let network = gigabits * GIGABIT * PAYLOAD;
        let outcome = load(cloud(network), (network * 3.0) as u64, mebibytes, connections);
        let share = rate(&outcome, 2.0, 3.0) / network;
        let seen = format!(
            "{gigabits} Gbit/s: {share:.3} of it, {} slabs of 1 MiB, {} connections, {} requests, {:.2} s",
            outcome.slabs, outcome.connections, outcome.asked, outcome.seconds
        );
        println!("{seen}");
        assert!(share >= 0.95, "{seen}");
        assert!(outcome.slabs <= mebibytes, "{seen}");
    }
}

/// The result of the test above if connections did not grow, or slabs were too few.
#[test]
fn connections_or_slabs_that_are_too_few_would_be_seen() {
    let network = 100.0 * GIGABIT * PAYLOAD;
    for (slabs, connections, most) in [(256, 16, 0.15), (8, 256, 0.5)] {
        let outcome = load(cloud(network), 2000 * MIB, slabs, connections);
        let share = 2000.0 * MIB as f64 / outcome.seconds / network;
        assert!(share < most, "{slabs} slabs, {connections} connections: {share:.3}");
    }
}

#[test]
fn what_a_server_gives_all_connections_is_taken_after_two_seconds() {
    for refuses in [true, false] {
        let outcome = load(Model { refuses, ..slow() }, 10_000 * MIB, 256, 256);
        let sum = 128.0 * 8e6;
        let (share, whole) = (rate(&outcome, 2.0, 8.0) / sum, 10_000.0 * MIB as f64 / sum / outcome.seconds);
        let seen = format!(
            "{share:.3} of the sum, {whole:.3} in the whole load, {} connections, {} refused",
            outcome.connections, outcome.refused
        );
        println!("{seen}");
        assert!(share >= 0.9, "{seen}");
        assert!(whole >= 0.85, "{seen}");
    }
}

#[test]
fn a_hundredth_of_the_answers_that_stall_costs_less_than_a_quarter_of_the_time() {
    let model = slow();
    let (bytes, slabs) = (10_000 * MIB, 256);
    let well = load(model, bytes, slabs, 256);
    for stalls in [100, 37] {
        let outcome = load(Model { stalls, ..model }, bytes, slabs, 256);
        let ratio = outcome.seconds / well.seconds;
        let seen = format!("one of {stalls} stalls: {:.2} s beside {:.2} s, {ratio:.3}", outcome.seconds, well.seconds);
        println!("{seen}");
        assert!(ratio <= 1.25, "{seen}");
    }
}

/// Few slabs, many connections, and answers that stop: a read that holds a slab always gets a connection.
#[test]
fn no_load_hangs_for_want_of_slabs() {
    for slabs in 1..4 {
        for stalls in [2, 3, 7] {
            let model = Model { stalls, most: 20, ..cloud(1e12) };
            let outcome = load(model, 300 * MIB, slabs, 32);
            assert!(outcome.seconds < 3600.0 && outcome.slabs <= slabs, "{slabs} slabs: {:.1} s", outcome.seconds);
        }
    }
}

/// The limit holds on any network: no connections are added for it, and none is taken for a straggler.
#[test]
fn a_limit_on_the_rate_is_kept_and_used() {
    for (model, bandwidth, slabs) in [
        (cloud(1e12), 400_000_000, 256),
        (cloud(1e12), 65_536, 16),
        // Less than a connection brings, and few slabs.
        (cloud(1e12), 10_000_000, 2),
        // It stops for good now and then: that is seen, though nothing is read for a while.
        (Model { stalls: 20, ..cloud(1e12) }, 400_000_000, 256),
    ] {
        let bytes = (bandwidth * 8).max(4 * MIB) / MIB * MIB;
        let settings = WebSettings { bandwidth: Some(bandwidth), ..WebSettings::default() };
        let outcome = load_with(model, bytes, slabs, settings);
        let share = bytes as f64 / outcome.seconds / bandwidth as f64;
        let seen = format!(
            "{bandwidth} bytes/s: {share:.3} of it, {} connections, {} requests, {} moved",
            outcome.connections, outcome.asked, outcome.moved
        );
        println!("{seen}");
        // What comes at once in the beginning is the bucket.
        assert!((0.85..1.02).contains(&share), "{seen}");
        let most = outcome.arrived.iter().map(|bytes| *bytes as f64).fold(0.0, f64::max);
        assert!(most <= 0.1 * bandwidth as f64 + 16.0 * READ as f64, "{seen}: {most} bytes in a tenth of a second");
        assert!(outcome.connections <= WebSettings::default().first_connections, "{seen}");
        assert!(model.stalls > 0 || outcome.moved == 0, "{seen}");
    }
}
