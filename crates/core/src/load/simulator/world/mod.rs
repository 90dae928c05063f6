//! The ranks, their storage and their network, in virtual time. Plan, engine and watch are those of every load. The two threads
//! of a rank are one here, which is never late: it does at once what can be done.

use super::case::Case;
use super::random::{Pipe, Rng};
use crate::engine::mutated::{Engine, Mutant};
use crate::engine::{Action, Bounds, Event, Slabs};
use crate::error::{Error, ErrorKind};
use crate::extent::{InCommon, Landing, Ticket};
use crate::load::exchange::rows;
use crate::peers::watch::mutated::{Lapse, PeerWatch};
use crate::peers::watch::Heard;
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

mod bytes;
mod turns;
mod words;

/// Nanoseconds.
pub(super) type Time = u64;
pub(super) const MS: Time = 1_000_000;
pub(super) const SECOND: Time = 1000 * MS;

/// As `Options` has them.
pub(super) const PEER_TIMEOUT: Time = 5 * SECOND;
const JOIN_TIMEOUT: Time = 300 * SECOND;
const STALL: Time = 120 * SECOND;
/// As `peers/exchange.rs` has it.
const REPORTED: Time = SECOND;
/// Bytes of a connection that the kernels of both sides hold.
const KERNEL: u64 = 4 << 20;
/// Ranks up to which words have delays of their own.
const FEW: usize = 64;

/// Rates in bytes per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machines {
    /// The storage, for all nodes together.
    pub(super) storage: f64,
    /// One node's way to the storage.
    pub(super) node: f64,
    /// A node's network card, in each direction.
    pub(super) network: f64,
    /// All connections within a node together.
    pub(super) local: f64,
    /// The device of a rank.
    pub(super) device: f64,
    /// The delay from one node to another.
    pub(super) latency: Time,
    /// The delay of the first byte of a read.
    pub(super) first_byte: Time,
    /// The delay of a lost word. One word in a hundred is lost; in half of such worlds, all words of one rank.
    pub(super) lost: Time,
}

/// A disturbance of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Incident {
    /// A process ends.
    Killed(u32),
    /// A process is stopped, and goes on after so long.
    Stopped(u32, Option<Time>),
    /// A node loses its power.
    NodeLost(u32),
    /// The next read of a rank fails.
    ReadFails(u32),
    /// The storage answers a rank no more.
    StorageHangs(u32),
    /// It answers nobody any more.
    AllStorageHangs,
    /// Every machine sleeps for so long.
    AllSleep(Time),
}

/// How a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Runs,
    /// Steps for it wait.
    Stopped,
    /// It has ended, and its connections were closed.
    Dead,
    /// It has ended, and nobody was told.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Loads,
    /// It has everything, and waits for the others.
    Waits,
    /// It tells the others, and closes.
    Leaves,
    Over,
}

/// A word of one rank to another.
#[derive(Debug, Clone)]
enum Said {
    Alive,
    Complete,
    Failed(u32, String),
    /// It says nothing more.
    Closed,
}

#[derive(Debug, Clone)]
enum Step {
    Wakes(u32),
    ReadEnds(u32, u32),
    Arrives(u32, u32),
    CopyEnds(u32, u32),
    /// All bytes of a parcel have left a rank, for another one.
    Left {
        from: u32,
        to: u32,
        extent: u32,
    },
    /// They have come.
    Comes {
        from: u32,
        to: u32,
        parcel: u32,
        nbytes: u64,
    },
    Says {
        from: u32,
        to: u32,
        said: Said,
    },
    /// The same words for all others.
    SaysToAll {
        from: u32,
        said: Said,
    },
    /// The connection for bytes is closed.
    Breaks {
        from: u32,
        to: u32,
    },
    Happens(Incident),
    Resumes(u32),
}

/// The ring of one process.
struct Slots {
    most: usize,
    out: Rc<Cell<usize>>,
}

struct Slab(Rc<Cell<usize>>);

impl Drop for Slab {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Slabs for Slots {
    type Slab = Slab;
    fn acquire(&mut self) -> Result<Option<Slab>, Error> {
        if self.out.get() == self.most {
            return Ok(None);
        }
        self.out.set(self.out.get() + 1);
        Ok(Some(Slab(self.out.clone())))
    }
}

/// A parcel that is awaited from its reader.
struct Awaiting {
    extent: u32,
    has_place: bool,
    told: bool,
}

/// A parcel that is sent and copied.
#[derive(Default)]
struct Sending {
    left: usize,
    copied: bool,
}

struct Rank {
    engine: Engine<Slab>,
    ring: Slots,
    watch: PeerWatch,
    life: Life,
    phase: Phase,
    node: u32,
    /// Steps that wait until it goes on.
    deferred: Vec<Step>,
    /// By rank: (extent, parcel, bytes) to be sent, bytes in kernels, and (parcel, bytes) that have come.
    out: Vec<VecDeque<(u32, u32, u64)>>,
    on_the_way: Vec<u64>,
    come: Vec<VecDeque<(u32, u64)>>,
    awaited: BTreeMap<u32, Awaiting>,
    sending: HashMap<u32, Sending>,
    /// Reads of its own.
    reading: HashSet<u32>,
    hangs: bool,
    fails: bool,
    failure: Option<Error>,
    told: bool,
    planned: Time,
    wakes_at: Time,
    reported: Time,
    /// When words to each other rank have come.
    last_word: Vec<Time>,
    sent_most: Option<usize>,
    held: HashSet<u32>,
    outcome: Option<(Time, Result<(), Error>)>,
}

pub(super) struct World<'a> {
    pub(super) case: &'a Case<'a>,
    pub(super) machines: Machines,
    pub(super) rng: Rng,
    begun: Instant,
    pub(super) now: Time,
    seq: u64,
    steps: BinaryHeap<(Reverse<(Time, u64)>, usize)>,
    kept: Vec<Option<Step>>,
    free: Vec<usize>,
    ranks: Vec<Rank>,
    storage: Pipe,
    nodes: Vec<[Pipe; 4]>,
    devices: Vec<Pipe>,
    /// How often each parcel was read, and by whom it was received.
    pub(super) parcels_read: HashMap<u32, Vec<u32>>,
    pub(super) received: HashSet<(u32, u32)>,
    pub(super) bytes_read: Vec<u64>,
    fault: Option<String>,
    /// All words of this rank come late.
    late_words: Option<u32>,
    /// By rank: whether it had everything when something happened.
    pub(super) complete_before: Vec<bool>,
    /// Incidents and resumptions to come; and whether a rank may have ended since the last look.
    awaits: usize,
    changed: bool,
}

/// How a rank's load ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) at: Time,
    pub(super) error: Option<Error>,
    pub(super) arrived: u64,
}

/// Machines, limits and mistakes of a world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    pub(super) machines: Machines,
    pub(super) nodes: u32,
    pub(super) gpu: bool,
    pub(super) slabs: usize,
    pub(super) depth: usize,
    pub(super) mutant: Option<Mutant>,
    pub(super) lapse: Option<Lapse>,
}

impl<'a> World<'a> {
    pub(super) fn new(case: &'a Case<'a>, setting: Setting, seed: u64) -> World<'a> {
        let Setting { machines, nodes, slabs, depth, mutant, lapse, .. } = setting;
        Mutant::commit(mutant);
        Lapse::commit(lapse);
        let count = case.schedules.len();
        let begun = Instant::now();
        let mut ranks = Vec::new();
        for (rank, schedule) in (0..count as u32).zip(&case.schedules) {
            let received = schedule.extents.iter().filter(|e| matches!(e.shared, Some(InCommon::Received { .. })));
            let received: Vec<_> = received.collect();
            let in_slabs = received.iter().any(|e| e.landing == Landing::Slab);
            // As `load/start.rs` has it.
            let sent = in_slabs.then_some((slabs / 2).max(1));
            let bounds = Bounds { depth, requests: depth + received.len(), window: None, sent, stall: STALL };
            let layout = case.layout(rank).clone();
            let mut engine = Engine::new(schedule.clone(), layout.clone(), bounds);
            (0..layout.blocks.len() as u32).for_each(|block| engine.on(0, Event::Granted(block)));
            ranks.push(Rank {
                engine,
                ring: Slots { most: slabs, out: Rc::default() },
                watch: watch(rank, count, begun),
                life: Life::Runs,
                phase: Phase::Loads,
                node: rank * nodes / count as u32,
                deferred: Vec::new(),
                out: vec![VecDeque::new(); count],
                on_the_way: vec![0; count],
                come: vec![VecDeque::new(); count],
                awaited: BTreeMap::new(),
                sending: HashMap::new(),
                reading: HashSet::new(),
                hangs: false,
                fails: false,
                failure: None,
                told: false,
                planned: 0,
                wakes_at: Time::MAX,
                reported: 0,
                last_word: vec![0; count],
                sent_most: sent,
                held: HashSet::new(),
                outcome: None,
            });
        }
        let Machines { storage, node, network, local, device, .. } = machines;
        let mut rng = Rng(seed);
        let late_words = rng.one_in(2).then(|| rng.below(count as u64) as u32);
        let of_node = [Pipe::new(node), Pipe::new(network), Pipe::new(network), Pipe::new(local)];
        World {
            case,
            machines,
            rng,
            begun,
            now: 0,
            seq: 0,
            steps: BinaryHeap::new(),
            kept: Vec::new(),
            free: Vec::new(),
            ranks,
            storage: Pipe::new(storage),
            nodes: vec![of_node; nodes as usize],
            devices: vec![Pipe::new(device); count],
            parcels_read: HashMap::new(),
            received: HashSet::new(),
            bytes_read: vec![0; count],
            fault: None,
            late_words,
            complete_before: Vec::new(),
            awaits: 0,
            changed: true,
        }
    }

    pub(super) fn node_of(&self, rank: u32) -> u32 {
        self.ranks[rank as usize].node
    }

    /// A rank that has ended and has not given back all its slabs.
    pub(super) fn keeps_slabs(&self) -> Option<usize> {
        self.ranks.iter().position(|rank| rank.phase == Phase::Over && rank.ring.out.get() > 0)
    }

    /// This happens then.
    pub(super) fn let_happen(&mut self, at: Time, incident: Incident) {
        self.push(at, Step::Happens(incident));
    }

    /// This rank begins so late.
    pub(super) fn begins_late(&mut self, rank: u32, at: Time) {
        self.ranks[rank as usize].life = Life::Stopped;
        self.push(at, Step::Resumes(rank));
    }

    /// Runs until every rank has ended that can. Then it gives how they ended; none for one that is dead, or stopped for good.
    pub(super) fn run(&mut self, until: Time) -> Result<Vec<Option<Ended>>, String> {
        for rank in 0..self.ranks.len() as u32 {
            if self.ranks[rank as usize].life == Life::Runs {
                self.begins(rank);
            }
        }
        let goes_on = |rank: &Rank| match rank.life {
            Life::Runs => rank.phase != Phase::Over,
            Life::Stopped => false,
            Life::Dead | Life::Lost => false,
        };
        while let Some((Reverse((at, _)), number)) = self.steps.pop() {
            self.now = at;
            self.free.push(number);
            if let Some(step) = self.kept[number].take() {
                self.step(step);
            }
            if let Some(fault) = &self.fault {
                return Err(fault.clone());
            }
            if std::mem::take(&mut self.changed) && self.awaits == 0 && !self.ranks.iter().any(goes_on) {
                break;
            }
            if self.now > until {
                let waiting = self.ranks.iter().filter(|rank| goes_on(rank)).count();
                return Err(format!("{waiting} ranks hang after {} s", until / SECOND));
            }
        }
        let ended = |rank: &mut Rank| {
            let arrived = rank.engine.bytes_arrived();
            rank.outcome.take().map(|(at, outcome)| Ended { at, error: outcome.err(), arrived })
        };
        Ok(self.ranks.iter_mut().map(ended).collect())
    }

    fn push(&mut self, at: Time, step: Step) {
        self.seq += 1;
        self.awaits += usize::from(matches!(step, Step::Resumes(_) | Step::Happens(_)));
        let number = match self.free.pop() {
            Some(number) => {
                self.kept[number] = Some(step);
                number
            }
            None => {
                self.kept.push(Some(step));
                self.kept.len() - 1
            }
        };
        self.steps.push((Reverse((at, self.seq)), number));
    }

    fn begins(&mut self, rank: u32) {
        let r = &mut self.ranks[rank as usize];
        r.planned = self.now;
        self.say(rank, &Said::Alive);
        self.turn(rank);
    }

    /// The rank at which a step happens.
    fn of_rank(step: &Step) -> Option<u32> {
        match step {
            Step::Wakes(rank) | Step::ReadEnds(rank, _) | Step::Arrives(rank, _) | Step::CopyEnds(rank, _) => {
                Some(*rank)
            }
            Step::Left { from, .. } => Some(*from),
            Step::Comes { to, .. } | Step::Says { to, .. } | Step::Breaks { to, .. } => Some(*to),
            Step::SaysToAll { .. } | Step::Happens(_) | Step::Resumes(_) => None,
        }
    }

    fn step(&mut self, step: Step) {
        if let Some(rank) = Self::of_rank(&step) {
            let r = &mut self.ranks[rank as usize];
            match r.life {
                Life::Runs => {}
                Life::Stopped => return r.deferred.push(step),
                Life::Dead | Life::Lost => return,
            }
            if r.phase == Phase::Over {
                return;
            }
        }
        match step {
            Step::Wakes(rank) => {
                if self.ranks[rank as usize].wakes_at > self.now {
                    return;
                }
                self.ranks[rank as usize].wakes_at = Time::MAX;
                self.turn(rank);
            }
            Step::ReadEnds(rank, extent) => self.read_ends(rank, extent),
            Step::Arrives(rank, extent) => {
                let r = &self.ranks[rank as usize];
                if r.reading.contains(&extent) && !r.hangs {
                    self.ranks[rank as usize].engine.on(self.now, Event::Arrived(ticket(extent)));
                    self.turn(rank);
                }
            }
            Step::CopyEnds(rank, extent) => {
                let r = &mut self.ranks[rank as usize];
                match r.sending.get_mut(&extent) {
                    Some(sending) => sending.copied = true,
                    None if matches!(
                        self.case.schedules[rank as usize].extents[extent as usize].shared,
                        Some(InCommon::Sent(_))
                    ) =>
                    {
                        // Its sending has failed.
                        return;
                    }
                    None => r.engine.on(self.now, Event::CopyDone(ticket(extent), Ok(()), Vec::new())),
                }
                self.batch_ends(rank, extent);
                self.turn(rank);
            }
            Step::Left { from, to, extent } => {
                let r = &mut self.ranks[from as usize];
                if let Some(sending) = r.sending.get_mut(&extent) {
                    sending.left -= 1;
                }
                self.batch_ends(from, extent);
                self.pump(from, to);
                self.turn(from);
            }
            Step::Comes { from, to, parcel, nbytes } => {
                self.ranks[to as usize].come[from as usize].push_back((parcel, nbytes));
                self.receive(to, from);
                self.turn(to);
            }
            Step::Says { from, to, said } => {
                self.hear(from, to, said);
                self.turn(to);
            }
            Step::SaysToAll { from, said } => {
                let instant = self.instant();
                for to in (0..self.ranks.len() as u32).filter(|to| *to != from) {
                    let r = &mut self.ranks[to as usize];
                    match r.life {
                        // Most of all words. It is the same as below, with less to do.
                        Life::Runs if matches!((&said, r.phase), (Said::Alive, Phase::Loads | Phase::Waits)) => {
                            let at = from - u32::from(from > to);
                            let _it_is_no_failure = r.watch.on(instant, at as usize, Heard::Speech);
                        }
                        Life::Runs if r.phase != Phase::Over => {
                            let word = !matches!(said, Said::Alive) && r.phase != Phase::Leaves;
                            self.hear(from, to, said.clone());
                            if word {
                                self.turn(to);
                            }
                        }
                        Life::Stopped => r.deferred.push(Step::Says { from, to, said: said.clone() }),
                        _ => {}
                    }
                }
            }
            Step::Breaks { from, to } => {
                self.on(to, from, Heard::Broken("reset".to_owned()));
                self.turn(to);
            }
            Step::Happens(incident) => {
                (self.awaits, self.changed) = (self.awaits - 1, true);
                self.happens(incident);
            }
            Step::Resumes(rank) => {
                (self.awaits, self.changed) = (self.awaits - 1, true);
                self.resumes(rank);
            }
        }
    }

    fn happens(&mut self, incident: Incident) {
        let complete = |rank: &Rank| rank.phase != Phase::Loads;
        self.complete_before = self.ranks.iter().map(complete).collect();
        match incident {
            Incident::Killed(rank) => self.dies(rank, Life::Dead),
            Incident::NodeLost(node) => {
                let there: Vec<u32> = (0..self.ranks.len() as u32).filter(|rank| self.node_of(*rank) == node).collect();
                there.into_iter().for_each(|rank| self.dies(rank, Life::Lost));
            }
            Incident::Stopped(rank, pause) => {
                let r = &mut self.ranks[rank as usize];
                if r.life == Life::Runs && r.phase != Phase::Over {
                    r.life = Life::Stopped;
                    if let Some(pause) = pause {
                        self.push(self.now + pause, Step::Resumes(rank));
                    }
                }
            }
            Incident::AllSleep(pause) => {
                for rank in 0..self.ranks.len() as u32 {
                    let jitter = self.rng.below(SECOND);
                    self.happens(Incident::Stopped(rank, Some(pause + jitter)));
                }
            }
            Incident::AllStorageHangs => self.ranks.iter_mut().for_each(|rank| rank.hangs = true),
            Incident::ReadFails(rank) => self.ranks[rank as usize].fails = true,
            Incident::StorageHangs(rank) => self.ranks[rank as usize].hangs = true,
        }
    }

    fn dies(&mut self, rank: u32, how: Life) {
        let r = &mut self.ranks[rank as usize];
        if !matches!(r.life, Life::Runs | Life::Stopped) || r.phase == Phase::Over {
            return;
        }
        r.life = how;
        if how == Life::Dead {
            self.close(rank, true);
        }
    }

    fn resumes(&mut self, rank: u32) {
        let r = &mut self.ranks[rank as usize];
        if r.life != Life::Stopped {
            return;
        }
        r.life = Life::Runs;
        let begins = r.planned == 0;
        let deferred = std::mem::take(&mut r.deferred);
        if begins {
            r.watch = watch(rank, self.case.schedules.len(), self.begun + Duration::from_nanos(self.now));
            self.begins(rank);
        }
        for step in deferred {
            self.step(step);
        }
        for to in 0..self.ranks.len() as u32 {
            self.pump(rank, to);
        }
        self.turn(rank);
    }
}

fn watch(rank: u32, count: usize, now: Instant) -> PeerWatch {
    let others = (0..count as u32).filter(|other| *other != rank).map(|other| (other, format!("host-{other}")));
    let limits = (Duration::from_nanos(PEER_TIMEOUT), Duration::from_nanos(JOIN_TIMEOUT));
    PeerWatch::new(rank, others, limits, now)
}

fn ticket(extent: u32) -> Ticket {
    Ticket(extent.into())
}
