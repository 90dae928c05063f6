//! The ranks, their storage and their network, in virtual time. Plan, engine and watch are those of every load. The two threads
//! of a rank are one here, which is never late: it does at once what can be done.

use super::case::{Case, Nodes};
use super::random::{Pipe, Rng};
use crate::engine::mutated::{Engine, Mutant};
use crate::engine::{Action, Bounds, Event, Slabs};
use crate::error::{Error, ErrorKind};
use crate::extent::{InCommon, Landing, Ticket};
use crate::load::exchange::{rows, Received};
use crate::peers::loans::mutated::{BadLoan, Loans};
use crate::peers::watch::mutated::{Lapse, PeerWatch};
use crate::peers::watch::Heard;
use loans::LinkWord;
use slabs::{Held, RankSlabs, SlabBook, SlabName, SlabUse};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

mod bytes;
mod loans;
mod slabs;
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
/// Bytes of a connection that the kernels of both sides hold, as long as nobody sets less.
pub(super) const KERNEL: u64 = 4 << 20;
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
    /// True if this rank shares slabs.
    Introduces(bool),
    /// It has found no way to the slabs of the rank that hears this.
    Far,
    /// It says nothing more.
    Closed,
}

#[derive(Debug, Clone)]
enum Step {
    Wakes(u32),
    Granted(u32),
    ReadEnds(u32, u32),
    Arrives(u32, u32),
    CopyEnds(u32, u32),
    /// The engine hears that a parcel has come in another rank's slab.
    Brought(u32, u32),
    /// A word on the link of two neighbours.
    Links {
        from: u32,
        to: u32,
        word: LinkWord,
    },
    /// All bytes of a parcel have left a rank, for another one.
    Left {
        from: u32,
        to: u32,
        extent: u32,
        parcel: u32,
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

/// A parcel that is awaited from its reader.
struct Awaiting {
    extent: u32,
    has_place: bool,
    told: bool,
}

/// A parcel that is given to others and copied.
struct Sending {
    parcel: u32,
    /// Nobody else needs its slab, or its sending has failed.
    sent: Option<Result<(), Error>>,
    copied: bool,
}

struct Rank {
    engine: Engine<Held>,
    ring: RankSlabs,
    watch: PeerWatch,
    loans: Loans<SlabName>,
    /// When it has memory for all its blocks.
    granted: Time,
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
    sending: BTreeMap<u32, Sending>,
    /// Own copies in flight.
    copying: HashMap<u32, SlabName>,
    /// Slabs of other ranks that have come. The engine has not been told yet.
    brought: HashMap<u32, Held>,
    /// Parcels that were offered and neither returned nor refused, by whom; and ranks that have refused one.
    unreturned: HashSet<(u32, u32)>,
    refused_by: HashSet<u32>,
    /// Its engine has told the source that the load has failed.
    gave_up: bool,
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
    last_linked: Vec<Time>,
    sent_most: Option<usize>,
    held: HashSet<u32>,
    outcome: Option<(Time, Result<(), Error>)>,
    /// When its node lost its power: what had not left it by then is lost too.
    lost_at: Time,
}

impl Rank {
    /// Nothing more is sent or received.
    fn is_quiet(&self) -> bool {
        self.failure.is_some() || self.gave_up
    }
}

pub(super) struct World<'a> {
    pub(super) case: &'a Case<'a>,
    pub(super) machines: Machines,
    links: LinkTraits,
    kernel: u64,
    book: Rc<RefCell<SlabBook>>,
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
    pub(super) links: LinkTraits,
    /// Bytes of a connection that the kernels of both sides hold. A last parcel goes beyond them.
    pub(super) kernel: u64,
    pub(super) slabs: usize,
    pub(super) depth: usize,
    /// Some ranks have fewer slabs, fewer reads at a time and slower devices, and get their memory later.
    pub(super) uneven: bool,
    pub(super) mutant: Option<Mutant>,
    pub(super) lapse: Option<Lapse>,
    pub(super) bad_loan: Option<BadLoan>,
}

impl Setting {
    /// These machines, few slabs and no mistake.
    pub(super) fn of(machines: Machines) -> Setting {
        let links = LinkTraits { delay: 1, unreachable: None, unmapped: None, unregistered: None };
        Setting {
            machines,
            links,
            kernel: KERNEL,
            slabs: 4,
            depth: 4,
            uneven: false,
            mutant: None,
            lapse: None,
            bad_loan: None,
        }
    }
}

/// The links of neighbours.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinkTraits {
    /// The longest delay of a word on them, in addition to that of all words.
    pub(super) delay: Time,
    /// One pair in so many finds no way to each other.
    pub(super) unreachable: Option<u64>,
    /// A rank that cannot map one slab in so many.
    pub(super) unmapped: Option<(u32, u64)>,
    /// A rank whose device cannot register one slab in two.
    pub(super) unregistered: Option<u32>,
}

impl<'a> World<'a> {
    pub(super) fn new(case: &'a Case<'a>, setting: Setting, seed: u64) -> World<'a> {
        let Setting { machines, links, kernel, uneven, mutant, lapse, bad_loan, .. } = setting;
        Mutant::commit(mutant);
        Lapse::commit(lapse);
        BadLoan::commit(bad_loan);
        let count = case.schedules.len();
        let begun = Instant::now();
        let book = Rc::new(RefCell::new(SlabBook::new(count)));
        let (mut ranks, mut devices) = (Vec::new(), Vec::new());
        let mut rng = Rng(seed);
        for (rank, schedule) in (0..count as u32).zip(&case.schedules) {
            let mut received = Received::default();
            schedule.extents.iter().for_each(|e| received.count(e));
            let (mut slabs, mut depth, mut device, mut granted) = (setting.slabs, setting.depth, machines.device, 0);
            if uneven {
                slabs = 2 + rng.below(slabs as u64 - 1) as usize;
                depth = 1 + rng.below(depth as u64) as usize;
                device /= rng.between(1.0, 4.0);
                // What has come of a rank that is lost counts as its life when it is taken.
                granted = rng.between(1e4, 2e8) as Time;
            }
            devices.push(Pipe::new(device));
            let sent = received.most_sent(slabs as u64);
            let bounds = Bounds { depth, requests: depth + received.parcels, window: None, sent, stall: STALL };
            let layout = case.layout(rank).clone();
            ranks.push(Rank {
                engine: Engine::new(schedule.clone(), layout, bounds),
                granted,
                ring: RankSlabs { owner: rank, most: slabs, book: book.clone() },
                watch: watch(rank, count, begun),
                loans: World::loans(case.nodes, rank),
                life: Life::Runs,
                phase: Phase::Loads,
                node: case.nodes.node_of(rank),
                deferred: Vec::new(),
                out: vec![VecDeque::new(); count],
                on_the_way: vec![0; count],
                come: vec![VecDeque::new(); count],
                awaited: BTreeMap::new(),
                sending: BTreeMap::new(),
                copying: HashMap::new(),
                brought: HashMap::new(),
                unreturned: HashSet::new(),
                refused_by: HashSet::new(),
                gave_up: false,
                reading: HashSet::new(),
                hangs: false,
                fails: false,
                failure: None,
                told: false,
                planned: 0,
                wakes_at: Time::MAX,
                reported: 0,
                last_word: vec![0; count],
                last_linked: vec![0; count],
                sent_most: sent,
                held: HashSet::new(),
                outcome: None,
                lost_at: Time::MAX,
            });
        }
        let Machines { storage, node, network, local, .. } = machines;
        let late_words = rng.one_in(2).then(|| rng.below(count as u64) as u32);
        let of_node = [Pipe::new(node), Pipe::new(network), Pipe::new(network), Pipe::new(local)];
        World {
            case,
            machines,
            links,
            kernel,
            book,
            rng,
            begun,
            now: 0,
            seq: 0,
            steps: BinaryHeap::new(),
            kept: Vec::new(),
            free: Vec::new(),
            ranks,
            storage: Pipe::new(storage),
            nodes: vec![of_node; case.nodes.nodes as usize],
            devices,
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
        let keeps = |rank: &usize| self.ranks[*rank].phase == Phase::Over && self.book.borrow().out(*rank as u32) > 0;
        (0..self.ranks.len()).find(keeps)
    }

    /// A rank that has ended and has not let go of another rank's slab.
    pub(super) fn keeps_loans(&self) -> Option<usize> {
        let keeps = |rank: &usize| self.ranks[*rank].phase == Phase::Over && self.book.borrow().borrows(*rank as u32);
        (0..self.ranks.len()).find(keeps)
    }

    /// A slab is lent or retired.
    pub(super) fn lends(&self) -> bool {
        !self.book.borrow().is_at_rest()
    }

    /// This happens then.
    pub(super) fn let_happen(&mut self, at: Time, incident: Incident) {
        if let Incident::ReadFails(rank) | Incident::StorageHangs(rank) = incident {
            // So that a connection breaks before the reason is heard.
            self.late_words = self.late_words.map(|late| if rank % 2 == 0 { rank } else { late });
        }
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
            self.push(self.ranks[rank as usize].granted, Step::Granted(rank));
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
            if let Some(fault) = self.fault.take().or_else(|| self.book.borrow_mut().take_fault()) {
                return Err(fault);
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
        if self.ranks.len() <= FEW {
            self.say(rank, &Said::Introduces(self.case.nodes.shares(rank)));
        }
        self.turn(rank);
    }

    /// The rank at which a step happens.
    fn of_rank(step: &Step) -> Option<u32> {
        match step {
            Step::Wakes(rank) | Step::Granted(rank) => Some(*rank),
            Step::ReadEnds(rank, _) | Step::Arrives(rank, _) => Some(*rank),
            Step::CopyEnds(rank, _) | Step::Brought(rank, _) => Some(*rank),
            Step::Left { from, .. } => Some(*from),
            Step::Comes { to, .. } | Step::Says { to, .. } | Step::Breaks { to, .. } => Some(*to),
            Step::Links { to, .. } => Some(*to),
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
            Step::Granted(rank) => {
                let blocks = 0..self.case.layout(rank).blocks.len() as u32;
                blocks.for_each(|block| self.ranks[rank as usize].engine.on(self.now, Event::Granted(block)));
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
                if let Some(slab) = r.copying.remove(&extent) {
                    self.book.borrow_mut().ends(slab, rank, SlabUse::Copies);
                }
                match r.sending.get_mut(&extent) {
                    Some(sending) => sending.copied = true,
                    None => r.engine.on(self.now, Event::CopyDone(ticket(extent), Ok(()), Vec::new())),
                }
                self.batch_ends(rank, extent);
                self.turn(rank);
            }
            Step::Brought(rank, extent) => {
                self.brought(rank, extent);
                self.turn(rank);
            }
            Step::Links { from, to, word } => {
                self.hear_link(to, from, word);
                self.turn(to);
            }
            Step::Left { from, to, extent, parcel } => {
                self.sent(from, to, (extent, parcel));
                self.pump(from, to);
                self.turn(from);
            }
            Step::Comes { from, .. }
                if self.now > self.ranks[from as usize].lost_at.saturating_add(self.machines.latency) => {}
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
        let now = self.now;
        let r = &mut self.ranks[rank as usize];
        if !matches!(r.life, Life::Runs | Life::Stopped) || r.phase == Phase::Over {
            return;
        }
        r.life = how;
        self.book.borrow_mut().dies(rank);
        match how {
            Life::Dead => self.close(rank, true),
            _ => r.lost_at = now,
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
