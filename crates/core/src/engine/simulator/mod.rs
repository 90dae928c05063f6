//! A seeded world for the engine: a clock that jumps; sources and devices that finish in random order, late, short, twice,
//! with an error, or never; a source without room; a ring without slabs; callers that grant late, take late, stop, and
//! cancel. Reads and copies go to real memory, by the addresses that a load uses (`load/addresses.rs`). After every turn the
//! world checks the invariants of the design, against what it knows itself. It also shows that it would notice mistakes:
//! every seeded [`Mutant`] must be caught.

use super::mutated::{Engine, Mutant};
use super::{Bounds, Event, Nanos, Wait};
use crate::device::Copy;
use crate::error::{Error, ErrorKind};
use crate::extent::Ticket;
use crate::plan::layout::Layout;
use crate::plan::schedule::Schedule;
use crate::source::Destination;
use memory::{Memory, Pool, Ring, Rng, Slab};
use plan::Case;
use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

macro_rules! hold {
    ($condition:expr, $($text:tt)*) => { if !$condition { return Err(format!($($text)*)); } };
}

mod checks;
mod memory;
mod plan;
mod steps;

const MS: Nanos = 1_000_000;
/// As `engine/deadline.rs` has it.
const DRAIN: Nanos = 2000 * MS;

/// The end of a read or a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Ends,
    /// Only after the load has failed.
    Late,
    /// Only after it was abandoned.
    Hangs,
}

/// Where a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// The source had no room for it.
    Held,
    /// On its way, without a place to land.
    Requested,
    /// Its first byte is there, and it has no place to land.
    Answered,
    /// It lands.
    Landing,
}

struct ReadInFlight {
    extent: u32,
    into: Option<Destination>,
    at: At,
    fate: Fate,
}

struct CopyInFlight {
    extent: u32,
    copies: Vec<Copy>,
    slab: usize,
    fate: Fate,
}

/// Something that can happen to the load.
#[derive(Debug, Clone, Copy)]
enum Happening {
    /// The position of a read in flight.
    ReadEnds(usize),
    Receives(usize),
    Arrives(usize),
    /// The position of a copy in flight.
    CopyEnds(usize),
    Grant(u32),
    Take(usize),
    GoOnHandingOut,
    GiveSlabsBack,
}

struct World {
    rng: Rng,
    schedule: Arc<Schedule>,
    layout: Arc<Layout>,
    case: Expectation,
    engine: Engine<Slab>,
    pool: Rc<RefCell<Pool>>,
    /// Slabs that must be free in the end.
    slabs: usize,
    /// The memory in which the blocks lie.
    arenas: Vec<Memory>,
    writes: Vec<Vec<u8>>,
    granted: Vec<bool>,
    started: Vec<bool>,
    done: Vec<bool>,
    reads: Vec<ReadInFlight>,
    copies: Vec<CopyInFlight>,
    /// Requests that have arrived and have no place, in order.
    answered: VecDeque<u32>,
    bounds: Bounds,
    ahead: u64,
    handed: Vec<u32>,
    to_take: Vec<u32>,
    taken: Vec<bool>,
    complete: Vec<bool>,
    /// Wants to whose places something that hangs may write.
    may_change: HashSet<u32>,
    hand_out_held: bool,
    /// The first error that came from outside. After that the load must fail with it.
    wronged: Option<(ErrorKind, Nanos)>,
    source_told: bool,
    now: Nanos,
    /// When something last moved, or there was nothing to wait for.
    moved: Nanos,
    /// Whether the load waited for something that may hang when it went to sleep.
    may_stall: bool,
    /// The stall timeout has passed, and this turn brought no progress.
    overdue: bool,
    turn: u64,
    /// The turn in which the source last had no room.
    refused: Option<u64>,
    cruelty: Cruelty,
    misplaced: Option<Misplaced>,
}

/// The promises of the plan.
struct Expectation {
    gpu: bool,
    sizes: Vec<u64>,
    expected: Vec<Vec<Option<u8>>>,
    homes: Vec<(usize, u64)>,
    at: Vec<Vec<usize>>,
}

/// The troubles that this world makes for its load.
struct Cruelty {
    /// Errors, short reads, double reports, cancellation.
    trouble: bool,
    /// Legs may hang.
    hangs: bool,
    /// The source often has no room.
    tight: bool,
    /// From this turn on, the source never has room again.
    full_from: u64,
    /// The consumer takes no more than so many wants.
    takes: usize,
}

/// Mistakes in addresses, for the memory to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Misplaced {
    Place,
    ScatteredPlaces,
    CopyFrom,
    CopyTo,
    FromStride,
    ToStride,
    Pad,
}

impl Misplaced {
    const ALL: [Misplaced; 7] = [
        Misplaced::Place,
        Misplaced::ScatteredPlaces,
        Misplaced::CopyFrom,
        Misplaced::CopyTo,
        Misplaced::FromStride,
        Misplaced::ToStride,
        Misplaced::Pad,
    ];
}

type Check = Result<(), String>;

fn simulated(kind: ErrorKind) -> Error {
    Error::new(kind, "simulated")
}

impl World {
    fn new(seed: u64, mutant: Option<Mutant>) -> World {
        let mut rng = Rng(seed);
        let Case { schedule, layout, gpu, sizes, expected, homes, arenas, at } = Case::new(&mut rng);
        let (schedule, layout) = (Arc::new(schedule), Arc::new(layout));
        let stream = rng.one_in(2);
        let bounds = Bounds {
            sent: None,
            depth: 1 + rng.below(5) as usize,
            requests: 1 + rng.below(6) as usize,
            window: stream.then(|| rng.below(80)),
            stall: (1 + rng.below(50)) * 200 * MS,
        };
        Mutant::commit(mutant);
        let engine = Engine::new(schedule.clone(), layout.clone(), bounds);
        let slabs = 1 + rng.below(4) as usize;
        let mut pool = Pool::new(slabs);
        pool.withheld = rng.one_in(10);
        let hangs = rng.one_in(6);
        let cruelty = Cruelty {
            trouble: rng.one_in(2),
            hangs,
            tight: rng.one_in(4),
            full_from: if hangs && rng.one_in(4) { rng.below(20) } else { u64::MAX },
            takes: if rng.one_in(12) { rng.below(4) as usize } else { usize::MAX },
        };
        World {
            engine,
            pool: Rc::new(RefCell::new(pool)),
            slabs,
            writes: arenas.iter().map(|&nbytes| vec![0; nbytes as usize]).collect(),
            arenas: arenas.into_iter().map(|nbytes| Memory::new(nbytes as usize)).collect(),
            granted: vec![false; layout.blocks.len()],
            started: vec![false; schedule.extents.len()],
            done: vec![false; schedule.extents.len()],
            reads: Vec::new(),
            copies: Vec::new(),
            answered: VecDeque::new(),
            bounds,
            ahead: 0,
            handed: Vec::new(),
            to_take: Vec::new(),
            taken: vec![false; layout.places.len()],
            complete: vec![false; layout.blocks.len()],
            may_change: HashSet::new(),
            hand_out_held: false,
            wronged: None,
            source_told: false,
            now: 0,
            moved: 0,
            may_stall: false,
            overdue: false,
            turn: 0,
            refused: None,
            cruelty,
            misplaced: None,
            case: Expectation { gpu, sizes, expected, homes, at },
            schedule,
            layout,
            rng,
        }
    }

    /// Runs the load to its end.
    fn run(&mut self) -> Check {
        let mut ring = Ring(self.pool.clone());
        let mut events = 0;
        for _ in 0..20_000 {
            self.wake(events)?;
            self.act(&mut ring)?;
            self.nothing_idles()?;
            self.hand_out()?;
            if self.wronged.is_some() && !self.engine.failed() {
                return Err(format!("did not fail after {:?}", self.wronged));
            }
            // What failed at hand-out has to be wound down at once.
            self.act(&mut ring)?;
            if let Some(fault) = self.pool.borrow().fault.clone() {
                return Err(fault);
            }
            if let Some(outcome) = self.engine.outcome() {
                return self.ended(outcome);
            }
            hold!(self.engine.waits_for() != Wait::Nothing, "waits for nothing, yet has not ended");
            events = self.sleep()?;
        }
        Err("the load does not end".into())
    }

    /// Sleeps until something happens, or the deadline passes. Gives how much happens.
    fn sleep(&mut self) -> Result<usize, String> {
        self.may_stall = self.waits_for_what_may_hang();
        let deadline = match self.wronged {
            Some((_, at)) => Some(at + DRAIN.min(self.bounds.stall)),
            None => self.may_stall.then_some(self.moved + self.bounds.stall),
        };
        let told = self.engine.deadline();
        hold!(told == deadline, "waits for {:?} until {told:?}, not {deadline:?}", self.engine.waits_for());
        let step = self.bounds.stall / 40;
        let possible = !self.happenings().is_empty();
        if !possible && deadline.is_none() {
            // Somebody gives up in the end: the consumer that has stopped, or the owner whose memory is not granted.
            hold!(!self.to_take.is_empty() && self.cruelty.takes == 0, "deadlock: nothing can happen, and no end");
            self.now += self.rng.below(5 * self.bounds.stall);
            return Ok(usize::MAX);
        }
        let jump = if !possible || self.rng.one_in(12) { 3 * self.bounds.stall } else { step };
        let until = self.now + 1 + self.rng.below(jump);
        self.now = match deadline {
            // Now and then the thread itself is late.
            Some(deadline) if until >= deadline => deadline.max(self.now) + self.rng.below(3) * self.rng.below(jump),
            _ => until,
        };
        Ok(match self.rng.below(8) {
            0 => 0,
            1 | 2 => 1 + self.rng.below(4) as usize,
            _ => 1,
        })
    }

    /// The driver wakes, and tells the engine of up to so many happenings.
    fn wake(&mut self, events: usize) -> Check {
        self.turn += 1;
        self.engine.turn(self.now);
        if !self.may_stall {
            self.moved = self.now;
        }
        let overdue = self.now >= self.moved + self.bounds.stall;
        let before = (self.moved, self.wronged);
        if events == usize::MAX {
            self.cancel();
            return Ok(());
        }
        for _ in 0..events {
            let happenings = self.happenings();
            if happenings.is_empty() {
                break;
            }
            let happening = happenings[self.rng.below(happenings.len() as u64) as usize];
            self.happens(happening)?;
        }
        if self.cruelty.trouble && self.rng.one_in(250) {
            self.cancel();
        }
        if self.cruelty.trouble && self.rng.one_in(400) {
            // Source, device or memory as a whole.
            self.wrong_unless_complete(ErrorKind::Io);
            self.engine.on(self.now, Event::Failed(simulated(ErrorKind::Io)));
        }
        if self.cruelty.trouble && self.rng.one_in(200) {
            self.source_is_confused();
        }
        hold!(self.engine.failed() == self.wronged.is_some(), "failed: {}, {:?}", self.engine.failed(), self.wronged);
        // It must fail now, unless it finds something to start.
        self.overdue =
            overdue && self.may_stall && before.1.is_none() && self.wronged.is_none() && self.moved == before.0;
        Ok(())
    }

    fn act(&mut self, ring: &mut Ring) -> Check {
        if self.rng.one_in(4) {
            self.now += self.rng.below(self.bounds.stall / 100);
        }
        if self.cruelty.trouble
            && self.wronged.is_none()
            && self.rng.one_in(if self.answered.is_empty() { 60 } else { 8 })
        {
            self.pool.borrow_mut().fails = true;
        }
        let asked = self.pool.borrow().fails;
        let mut oldest = None;
        loop {
            let tries_again = self.reads.iter().any(|f| f.at == At::Held) && self.refused != Some(self.turn);
            if self.overdue && !tries_again && !self.can_start() {
                let in_flight = self.reads.iter().map(|f| f.extent).chain(self.copies.iter().map(|s| s.extent));
                oldest = Some(in_flight.min());
                self.wrong(ErrorKind::Timeout);
            }
            let action = self.engine.next(self.now, ring);
            if asked && !self.pool.borrow().fails && self.wronged.is_none() {
                self.wrong(ErrorKind::OutOfMemory);
            }
            let Some(action) = action else { break };
            self.carry_out(action)?;
        }
        self.pool.borrow_mut().fails = false;
        if let Some(oldest) = oldest {
            hold!(self.engine.stalled() == oldest, "{:?} has stalled, told of {:?}", oldest, self.engine.stalled());
        }
        hold!(self.engine.failed() == self.wronged.is_some(), "failed: {}, {:?}", self.engine.failed(), self.wronged);
        let over = self.wronged.is_some_and(|(_, at)| self.now >= at + DRAIN.min(self.bounds.stall));
        hold!(!over || self.engine.outcome().is_some(), "the drain does not end");
        Ok(())
    }

    /// Events that may happen now.
    fn happenings(&mut self) -> Vec<Happening> {
        let mut can = Vec::new();
        let failed = self.wronged.is_some();
        let ends = |fate| fate == Fate::Ends || (fate == Fate::Late && failed);
        for (i, read) in self.reads.iter().enumerate().filter(|f| ends(f.1.fate)) {
            match read.at {
                At::Held => {}
                At::Requested if self.source_told => can.extend([Happening::ReadEnds(i), Happening::Arrives(i)]),
                At::Requested => can.push(Happening::Arrives(i)),
                At::Answered if self.source_told => can.push(Happening::ReadEnds(i)),
                At::Answered => {}
                At::Landing => can.extend([Happening::ReadEnds(i), Happening::ReadEnds(i), Happening::Receives(i)]),
            }
        }
        can.extend((0..self.copies.len()).filter(|&i| ends(self.copies[i].fate)).map(Happening::CopyEnds));
        let mut wanted = Vec::new();
        self.engine.wanted_blocks(&mut wanted);
        can.extend(wanted.into_iter().map(Happening::Grant));
        if self.cruelty.takes > 0 {
            can.extend((0..self.to_take.len()).map(Happening::Take));
        }
        if self.hand_out_held {
            can.push(Happening::GoOnHandingOut);
        }
        if self.pool.borrow().withheld && !self.cruelty.hangs {
            can.push(Happening::GiveSlabsBack);
        }
        if can.is_empty() && self.reads.iter().any(|f| f.at == At::Held) && self.turn < self.cruelty.full_from {
            // The source wakes the driver when it has room.
            can.push(Happening::GoOnHandingOut);
        }
        can
    }

    fn happens(&mut self, happening: Happening) -> Check {
        match happening {
            Happening::ReadEnds(number) => return self.read_ends(number),
            Happening::Receives(number) => {
                self.engine.on(self.now, Event::Received(ticket(self.reads[number].extent)));
                self.moved = self.now;
            }
            Happening::CopyEnds(number) => return self.copy_ends(number),
            Happening::Arrives(number) => {
                let extent = self.reads[number].extent;
                if self.wronged.is_some() {
                    // Nobody answers. It is given up like the others.
                    self.reads[number].at = At::Answered;
                    self.engine.on(self.now, Event::Arrived(ticket(extent)));
                    return Ok(());
                }
                if self.cruelty.trouble && self.rng.one_in(30) {
                    return self.request_ends_before_it_lands(number);
                }
                self.reads[number].at = At::Answered;
                self.answered.push_back(extent);
                self.engine.on(self.now, Event::Arrived(ticket(extent)));
                self.moved = self.now;
                if self.cruelty.trouble && self.rng.one_in(20) {
                    self.wrong(ErrorKind::Internal);
                    self.engine.on(self.now, Event::Arrived(ticket(extent)));
                }
            }
            Happening::Grant(block) => {
                hold!(!self.granted[block as usize], "block {block} is wanted again");
                self.granted[block as usize] = true;
                self.engine.on(self.now, Event::Granted(block));
            }
            Happening::Take(i) => {
                let want = self.to_take.swap_remove(i);
                self.cruelty.takes -= 1;
                self.ahead -= self.layout.places[want as usize].nbytes;
                self.taken[want as usize] = true;
                self.engine.on(self.now, Event::Taken(want));
                if self.rng.one_in(8) {
                    self.engine.on(self.now, Event::Taken(want)); // said twice it counts once
                }
            }
            Happening::GoOnHandingOut => self.hand_out_held = false,
            Happening::GiveSlabsBack => self.pool.borrow_mut().withheld = false,
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.wrong_unless_complete(ErrorKind::Cancelled);
        self.engine.on(self.now, Event::Cancelled);
    }

    /// The load has to fail from now on, with this kind unless it has failed before.
    fn wrong(&mut self, kind: ErrorKind) {
        self.wronged.get_or_insert((kind, self.now));
        self.overdue = false;
        self.answered.clear();
    }

    fn wrong_unless_complete(&mut self, kind: ErrorKind) {
        if !self.done.iter().all(|&done| done) {
            self.wrong(kind);
        }
    }
}

fn ticket(extent: u32) -> Ticket {
    Ticket(extent.into())
}

/// Seeds of a run that asks for no other number.
const SEEDS: u64 = if cfg!(miri) { 2 } else { 4000 };

/// `PENSTOCK_SEEDS` asks for more.
fn seeds() -> u64 {
    std::env::var("PENSTOCK_SEEDS").map_or(SEEDS, |n| n.parse().expect("PENSTOCK_SEEDS is a number"))
}

#[test]
fn every_load_ends_and_every_byte_arrives_once_whatever_happens() {
    let (seeds, mut ended_well, mut kinds) = (seeds(), 0, std::collections::BTreeMap::new());
    for seed in 0..seeds {
        let mut world = World::new(seed, None);
        if let Err(fault) = world.run() {
            panic!("seed {seed}: {fault}");
        }
        match world.wronged {
            None => ended_well += 1,
            Some((kind, _)) => *kinds.entry(format!("{kind:?}")).or_insert(0u64) += 1,
        }
    }
    println!("{seeds} seeds: {ended_well} loads ended well, {kinds:?}");
    // If the world were too kind or too cruel, the test would mean nothing.
    let mixed = ended_well > seeds / 4 && ended_well < seeds * 3 / 4;
    assert!(mixed || cfg!(miri), "{ended_well} of {seeds} loads ended well");
}

#[test]
fn the_simulator_catches_every_mutant() {
    let mut missed = Vec::new();
    for &mutant in Mutant::ALL.iter().filter(|mutant| !Mutant::OF_RANKS.contains(mutant)) {
        let caught = (0..SEEDS).find_map(|seed| Some((seed, World::new(seed, Some(mutant)).run().err()?)));
        match caught {
            Some((seed, fault)) => println!("{mutant:?}: seed {seed}: {fault}"),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not caught in {SEEDS} seeds: {missed:?}");
    assert!(Mutant::ALL.len() >= 35);
}

#[test]
fn bytes_in_a_wrong_place_are_seen() {
    for misplaced in Misplaced::ALL {
        let seen = (0..SEEDS).find_map(|seed| {
            let mut world = World::new(seed, None);
            world.misplaced = Some(misplaced);
            Some((seed, world.run().err()?))
        });
        println!("{misplaced:?}: {seen:?}");
        assert!(seen.is_some() || cfg!(miri), "{misplaced:?} was not seen in {SEEDS} seeds");
    }
}
