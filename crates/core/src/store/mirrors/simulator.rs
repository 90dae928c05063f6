//! Fleets in virtual time: nodes that load the same objects, each with a `MirrorChoice`; links that share their rates fairly among
//! connections, as TCP does about; a bucket; nodes that start late, are killed, are slow, or were never there. Links have a delay, a
//! block is seen by others a while after it came, and boards are as old as a look takes.
//!
//! The bounds are those of the benchmark (`benches/nodes.py`): bytes of the bucket, and the time of the last node by that of
//! one alone.

use super::choice::{Giver, MirrorChoice, Mirrored, ReadKey, ReadSize};
use super::names::board_size;
use crate::extent::Ticket;
use crate::store::disk_cache::BLOCK;
use std::collections::VecDeque;
use std::time::Duration;

/// Seconds of virtual time after which a load hangs.
const MOST: f64 = 600.0;
/// The megabytes per second of 1 Gbit/s.
const GIGABIT: f64 = 117e6;

/// A node of a fleet.
#[derive(Debug, Clone)]
struct Spec {
    starts: f64,
    /// When it is killed.
    ends: f64,
    /// Bytes per second that it sends and receives.
    up: f64,
    down: f64,
    /// Nothing comes from it, not even an error.
    is_silent: bool,
    /// It does not load, and has everything.
    has_all: bool,
    /// It is not there from one time to the other: who asks it hears that at once.
    gone: (f64, f64),
    /// Its boards come, and its bytes do not: never, or it says so at once.
    brings: Brings,
}

/// The bytes of a mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brings {
    All,
    Nothing,
    Errors,
}

impl Spec {
    fn new(rate: f64) -> Spec {
        Spec {
            starts: 0.0,
            ends: f64::INFINITY,
            up: rate,
            down: rate,
            is_silent: false,
            has_all: false,
            gone: (0.0, 0.0),
            brings: Brings::All,
        }
    }
}

struct Case {
    seed: u64,
    /// Blocks of each file.
    files: Vec<u32>,
    nodes: Vec<Spec>,
    bucket: f64,
    /// Seconds from one moment to the next.
    step: f64,
    bandwidth: Option<u64>,
    delay: f64,
    /// From the end of a block to the moment in which others see it.
    written: f64,
}

impl Case {
    fn new(seed: u64, nodes: usize, rate: f64) -> Case {
        let nodes = (0..nodes).map(|_| Spec::new(rate)).collect();
        Case {
            seed,
            files: vec![250; 4],
            nodes,
            bucket: rate,
            step: (0.01 * GIGABIT / rate).clamp(0.002, 0.05),
            bandwidth: None,
            delay: 0.001,
            written: 0.02,
        }
    }

    fn size(&self) -> f64 {
        self.files.iter().map(|blocks| f64::from(*blocks)).sum::<f64>() * BLOCK as f64
    }
}

/// Reads that one is asked for by another.
#[derive(Default)]
struct AskedStream {
    queue: VecDeque<AskedPart>,
}

struct AskedPart {
    key: ReadKey,
    left: f64,
    /// When its first byte can come.
    ready: f64,
    told: bool,
}

struct BoardLook {
    mirror: usize,
    file: u32,
    ends: f64,
}

struct Node {
    spec: Spec,
    choice: MirrorChoice,
    /// When each block is seen by others.
    seen: Vec<Vec<f64>>,
    left: usize,
    /// From the others, by number, and from the bucket.
    streams: Vec<AskedStream>,
    looks: Vec<BoardLook>,
    ended: Option<f64>,
    begun: bool,
}

/// The outcome of a case.
#[derive(Debug)]
struct FleetOutcome {
    /// Seconds until the end of each load that was not killed.
    ends: Vec<f64>,
    bucket: f64,
    looks: usize,
    /// How often mirrors came back.
    returned: usize,
}

impl FleetOutcome {
    fn last(&self) -> f64 {
        self.ends.iter().copied().fold(0.0, f64::max)
    }
}

struct World {
    case: Case,
    nodes: Vec<Node>,
    now: f64,
    bucket: f64,
    looks: usize,
    returned: usize,
}

fn time(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.max(0.0))
}

impl World {
    fn new(case: Case) -> World {
        let object = |(name, blocks): (u64, &u32)| Some(Mirrored { name, size: u64::from(*blocks) * BLOCK });
        let objects: Vec<_> = (0..).zip(&case.files).map(object).collect();
        let count = case.nodes.len();
        let node = |(number, spec): (usize, &Spec)| Node {
            spec: spec.clone(),
            choice: MirrorChoice::new(count - 1, objects.clone(), World::id(&case, number), case.bandwidth),
            seen: case
                .files
                .iter()
                .map(|b| vec![if spec.has_all { 0.0 } else { f64::INFINITY }; *b as usize])
                .collect(),
            left: if spec.has_all { 0 } else { case.files.iter().sum::<u32>() as usize },
            streams: (0..=count).map(|_| AskedStream::default()).collect(),
            looks: Vec::new(),
            ended: None,
            begun: false,
        };
        let nodes = case.nodes.iter().enumerate().map(node).collect();
        World { nodes, case, now: 0.0, bucket: 0.0, looks: 0, returned: 0 }
    }

    fn run(mut self) -> Result<FleetOutcome, String> {
        while self.nodes.iter().any(|node| node.left > 0 && self.now < node.spec.ends) {
            if self.now > MOST {
                return Err(format!("blocks left: {:?}", self.nodes.iter().map(|node| node.left).collect::<Vec<_>>()));
            }
            (0..self.nodes.len()).for_each(|number| self.decide(number));
            self.flow();
            self.now += self.case.step;
        }
        let ends = self.nodes.iter().filter_map(|node| Some(node.ended? - node.spec.starts)).collect();
        Ok(FleetOutcome { ends, bucket: self.bucket, looks: self.looks, returned: self.returned })
    }

    /// The number of a node.
    fn id(case: &Case, number: usize) -> u64 {
        (case.seed * 1000 + number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// The node behind the mirror of a node.
    fn other(node: usize, mirror: usize) -> usize {
        mirror + usize::from(mirror >= node)
    }

    fn is_there(&self, node: usize) -> bool {
        let spec = &self.nodes[node].spec;
        !self.is_gone(node) && !spec.is_silent
    }

    /// It says so at once that it is not there.
    fn is_gone(&self, node: usize) -> bool {
        let spec = &self.nodes[node].spec;
        self.now >= spec.ends || (spec.gone.0..spec.gone.1).contains(&self.now)
    }

    fn decide(&mut self, number: usize) {
        let spec = &self.nodes[number].spec;
        if self.now < spec.starts || self.now >= spec.ends || self.nodes[number].left == 0 {
            return;
        }
        let now = time(self.now - spec.starts);
        if !std::mem::replace(&mut self.nodes[number].begun, true) {
            self.begin(number);
        }
        self.end_looks(number, now);
        self.leave_gone(number);
        let node = &mut self.nodes[number];
        for (mirror, file) in node.choice.looks(now) {
            let other = &node.streams[World::other(number, mirror)];
            // A look waits for a connection.
            let ends = self.now + 2.0 * self.case.delay + if other.queue.is_empty() { 0.0 } else { 0.02 };
            node.looks.push(BoardLook { mirror, file, ends });
            self.looks += 1;
        }
        for (key, wanted, giver) in node.choice.asks(now) {
            let stream = match giver {
                Giver::Server => self.case.nodes.len(),
                Giver::Mirror(mirror) => World::other(number, mirror),
            };
            let ready = self.now + 2.0 * self.case.delay;
            node.streams[stream].queue.push_back(AskedPart { key, left: wanted.len as f64, ready, told: false });
        }
    }

    fn begin(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        for (file, blocks) in self.case.files.iter().enumerate() {
            for block in 0..*blocks {
                let key = (file as u32, u64::from(block) * BLOCK, Ticket((file as u64) << 32 | u64::from(block)));
                node.choice.wants(key, ReadSize { len: BLOCK, need: BLOCK });
            }
        }
    }

    fn end_looks(&mut self, number: usize, now: Duration) {
        let mut looks = std::mem::take(&mut self.nodes[number].looks);
        looks.retain(|look| {
            let other = World::other(number, look.mirror);
            // One that is silent answers never, and the connection fails at last.
            let ends = look.ends + if self.nodes[other].spec.is_silent { 10.0 } else { 0.0 };
            if ends > self.now {
                return true;
            }
            let bits = self.is_there(other).then(|| self.board(other, look.file)).flatten();
            self.nodes[number].choice.looked(look.mirror, look.file, bits.as_deref(), now);
            false
        });
        self.nodes[number].looks.append(&mut looks);
    }

    fn board(&self, number: usize, file: u32) -> Option<Vec<u8>> {
        let node = &self.nodes[number];
        if !node.begun && !node.spec.has_all {
            return None;
        }
        let size = u64::from(self.case.files[file as usize]) * BLOCK;
        let mut bits = vec![0; board_size(size) as usize];
        for (block, seen) in node.seen[file as usize].iter().enumerate() {
            bits[block / 8] |= u8::from(*seen <= self.now) << (block % 8);
        }
        let end = bits.len() - 8;
        bits[end..].copy_from_slice(&World::id(&self.case, number).to_le_bytes());
        Some(bits)
    }

    /// Leaves mirrors that are late or gone: their reads are asked of others.
    fn leave_gone(&mut self, number: usize) {
        let now = time(self.now - self.nodes[number].spec.starts);
        let mut gone = self.nodes[number].choice.late(now);
        for mirror in 0..self.nodes.len() - 1 {
            let other = World::other(number, mirror);
            let fails = self.is_gone(other) || self.nodes[other].spec.brings == Brings::Errors;
            if fails && !self.nodes[number].streams[other].queue.is_empty() {
                gone.push(mirror);
            }
        }
        for mirror in gone {
            let node = &mut self.nodes[number];
            node.choice.leave_for_now(mirror, now);
            node.looks.retain(|look| look.mirror != mirror);
            let queue = std::mem::take(&mut node.streams[World::other(number, mirror)].queue);
            for part in queue {
                node.choice.ended(part.key.2, Giver::Mirror(mirror), 0, now);
                node.choice.wants(part.key, ReadSize { len: BLOCK, need: BLOCK });
            }
        }
        let node = &mut self.nodes[number];
        for mirror in node.choice.returning(now) {
            node.choice.comes_back(mirror, now);
            self.returned += 1;
        }
    }

    /// Bytes go over the links for one step.
    fn flow(&mut self) {
        let count = self.nodes.len();
        let mut flows = Vec::new();
        for (to, node) in self.nodes.iter().enumerate() {
            for (from, stream) in node.streams.iter().enumerate() {
                let ready: f64 = stream.queue.iter().filter(|part| part.ready <= self.now).map(|part| part.left).sum();
                let is_there = from == count || self.is_there(from) && self.nodes[from].spec.brings == Brings::All;
                if ready > 0.0 && is_there && self.now < node.spec.ends {
                    let most = if from == count { 32.0 } else { 4.0 };
                    flows.push((from, to, (ready / (2 * BLOCK) as f64).ceil().clamp(1.0, most)));
                }
            }
        }
        for ((from, to, _), rate) in flows.iter().zip(self.rates(&flows)) {
            self.bring(*from, *to, rate * self.case.step);
        }
    }

    /// The rate of each flow: a link that is full gives each connection as much.
    fn rates(&self, flows: &[(usize, usize, f64)]) -> Vec<f64> {
        let count = self.nodes.len();
        let mut caps: Vec<f64> = self.nodes.iter().map(|node| node.spec.up).collect();
        caps.push(self.case.bucket);
        caps.extend(self.nodes.iter().map(|node| node.spec.down));
        let links = |flow: &(usize, usize, f64)| [flow.0, count + 1 + flow.1];
        let mut rates = vec![None; flows.len()];
        loop {
            let open = |link: usize| {
                flows.iter().zip(&rates).filter(move |(flow, rate)| rate.is_none() && links(flow).contains(&link))
            };
            let share = |link: usize| caps[link] / open(link).map(|(flow, _)| flow.2).sum::<f64>();
            let used = (0..caps.len()).filter(|link| open(*link).next().is_some());
            let Some(tightest) = used.min_by(|a, b| share(*a).total_cmp(&share(*b))) else { break };
            let each = share(tightest).max(0.0);
            for (flow, rate) in flows.iter().zip(rates.iter_mut()) {
                if rate.is_none() && links(flow).contains(&tightest) {
                    *rate = Some(each * flow.2);
                    links(flow).into_iter().for_each(|link| caps[link] -= each * flow.2);
                }
            }
        }
        rates.into_iter().map(Option::unwrap_or_default).collect()
    }

    fn bring(&mut self, from: usize, to: usize, mut bytes: f64) {
        let (now, written) = (self.now, self.case.written);
        if from == self.nodes.len() {
            self.bucket += bytes;
        }
        let count = self.nodes.len();
        let node = &mut self.nodes[to];
        let at = time(now - node.spec.starts);
        let mirror = if from < to { from } else { from.saturating_sub(1) };
        let giver = if from == count { Giver::Server } else { Giver::Mirror(mirror) };
        while bytes > 0.0 {
            let Some(part) = node.streams[from].queue.front_mut() else { break };
            let taken = part.left.min(bytes);
            (part.left, bytes) = (part.left - taken, bytes - taken);
            if let Giver::Mirror(mirror) = giver {
                if !std::mem::replace(&mut part.told, true) {
                    node.choice.arrived(part.key.2, mirror, true, at);
                }
            }
            if part.left > 0.0 {
                break;
            }
            if let Some(part) = node.streams[from].queue.pop_front() {
                node.choice.ended(part.key.2, giver, BLOCK, at);
                node.seen[part.key.0 as usize][(part.key.1 / BLOCK) as usize] = now + written;
                node.left -= 1;
                if node.left == 0 {
                    node.ended = Some(now);
                }
            }
        }
        // Bytes that nobody asked for were not sent.
        if from == count {
            self.bucket -= bytes;
        }
    }
}

fn run(case: Case) -> FleetOutcome {
    let seed = case.seed;
    World::new(case).run().unwrap_or_else(|fault| panic!("seed {seed}: {fault}"))
}

/// The seconds of one node alone.
fn alone(rate: f64) -> f64 {
    Case::new(0, 1, rate).size() / rate
}

/// Bytes of the bucket by those of the checkpoint, and the time of the last node by that of one alone.
fn ratios(case: Case) -> (f64, f64) {
    let (size, rate, name) = (case.size(), case.bucket, format!("{} nodes, seed {}", case.nodes.len(), case.seed));
    let outcome = run(case);
    let found = (outcome.bucket / size, outcome.last() / alone(rate));
    println!("{name}: {:.3} checkpoints, {:.3} x one alone, {} looks", found.0, found.1, outcome.looks);
    found
}

#[test]
fn a_fleet_that_starts_at_once_reads_the_bucket_about_once() {
    for (rate, nodes) in [(0.1, 8), (1.0, 2), (1.0, 4), (1.0, 8), (10.0, 8)] {
        let (bytes, time) = ratios(Case::new(1, nodes, rate * GIGABIT));
        assert!(bytes <= 1.3 && time <= 1.6, "{rate} Gbit/s: {bytes} checkpoints, {time} x one alone");
    }
}

#[test]
fn a_bucket_that_is_slower_or_faster_than_the_nodes_changes_nothing() {
    for part in [0.25, 4.0] {
        let mut case = Case::new(1, 8, GIGABIT);
        case.bucket *= part;
        let (bytes, time) = ratios(case);
        assert!(bytes <= 1.3 && time <= 1.6 * f64::max(1.0, part), "{part}: {bytes} checkpoints, {time}");
    }
}

/// The others see them soon, and leave them their stretches.
#[test]
fn nodes_that_start_later_share_what_is_left() {
    let mut case = Case::new(1, 8, GIGABIT);
    case.nodes.iter_mut().skip(4).for_each(|node| node.starts = 5.0);
    let (bytes, time) = ratios(case);
    assert!(bytes <= 1.2 && time <= 1.3, "{bytes} checkpoints, {time} x one alone");
}

#[test]
fn a_node_that_is_killed_costs_the_others_little() {
    let mut case = Case::new(1, 8, GIGABIT);
    case.nodes[3].ends = 5.0;
    let (bytes, time) = ratios(case);
    assert!(bytes <= 1.3 && time <= 1.6, "{bytes} checkpoints, {time} x one alone");
}

/// A node beside mirrors that have all. Seven that together bring 0.7 times as much as the bucket spare it: the load takes longer.
#[test]
fn mirrors_that_are_slow_or_silent_cost_little() {
    for (up, is_silent) in [(0.001, false), (0.1, false), (0.5, false), (0.9, false), (1.0, true)] {
        for mirrors in [1, 7] {
            let mut case = Case::new(1, 1 + mirrors, GIGABIT);
            let mirror = Spec { has_all: true, up: up * GIGABIT, is_silent, ..Spec::new(GIGABIT) };
            case.nodes.iter_mut().skip(1).for_each(|node| *node = mirror.clone());
            let (_, time) = ratios(case);
            assert!(time <= 1.5, "{mirrors} of {up} Gbit/s: {time} x one alone");
        }
    }
}

/// The bucket is slow. The mirror is gone for two seconds, as when its server is started again.
#[test]
fn a_mirror_that_was_gone_for_a_while_is_asked_again() {
    for gone in [(1.0, 1.1), (1.0, 3.0), (1.0, 5.0)] {
        let mut case = Case::new(1, 2, GIGABIT);
        case.bucket *= 0.1;
        case.nodes[1] = Spec { has_all: true, gone, ..Spec::new(GIGABIT) };
        let (bytes, time) = ratios(case);
        // Of ten seconds at the mirror's rate; it may be away twice as long as it is gone, and a look longer.
        assert!(time <= 0.11 + 0.02 * (gone.1 - gone.0).max(2.0) && bytes <= 0.2, "{gone:?}: {bytes}, {time}");
    }
}

#[test]
fn mirrors_that_fail_always_cost_no_more_than_before() {
    for brings in [Brings::Nothing, Brings::Errors] {
        for mirrors in [1, 7] {
            for files in [vec![250; 4], vec![250; 16]] {
                let mut case = Case { files, ..Case::new(1, 1 + mirrors, GIGABIT) };
                let mirror = Spec { has_all: true, brings, ..Spec::new(GIGABIT) };
                case.nodes.iter_mut().skip(1).for_each(|node| *node = mirror.clone());
                let (size, rate) = (case.size(), case.bucket);
                let outcome = run(case);
                let time = outcome.last() / (size / rate);
                println!("{mirrors} that bring {brings:?}: {time:.3} x one alone, back {} times", outcome.returned);
                assert!(time <= 1.25, "{mirrors} that bring {brings:?}: {time} x one alone");
                // Twice as long each time: a load of 36 s sees each of them come back at most five times.
                assert!((1..=5 * mirrors).contains(&outcome.returned), "{outcome:?}");
            }
        }
    }
}

#[test]
fn a_mirror_that_has_all_is_asked_for_nearly_all() {
    let mut case = Case::new(1, 2, GIGABIT);
    case.nodes[1].has_all = true;
    let (bytes, time) = ratios(case);
    assert!(bytes <= 0.05 && time <= 1.05, "{bytes} checkpoints, {time} x one alone");
}

#[test]
fn a_limit_of_bandwidth_is_that_of_the_server_and_all_mirrors_together() {
    for mirrors in [1, 7] {
        let mut case = Case::new(1, 1 + mirrors, GIGABIT);
        case.bandwidth = Some((0.3 * GIGABIT) as u64);
        case.nodes.iter_mut().skip(1).for_each(|node| node.has_all = true);
        let (_, time) = ratios(case);
        assert!((0.95..1.1).contains(&(0.3 * time)), "{time} x one alone, at 0.3 of its rate");
    }
}
