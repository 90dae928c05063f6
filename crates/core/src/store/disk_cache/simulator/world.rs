//! Virtual time: the server, the disk's threads, the engines, the lookers, and the faults.

use super::super::flow::mutated::{CacheBlock, CacheFlow, Claimed};
use super::carrier::{At, Call, Hands, ReadAt, Todo};
use super::case::{Case, Drawn, Fate, Incident, Time, Writing, MS};
use super::disk::{Disk, Memory};
use crate::error::{Error, ErrorKind};
use crate::extent::Ticket;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

/// Steps of a run that does not end.
const STEPS: u64 = 60_000;

/// Something that happens to a process.
#[derive(Debug)]
enum Event {
    /// Its engine submits reads.
    Turns,
    /// A read that has arrived gets its place.
    Lands(Ticket),
    FreesSlab,
    /// The server has the first byte of a block. The number is that of the request.
    Answers(CacheBlock, u64),
    /// A part of a block has come; so many are left.
    Brings(CacheBlock, u64, u64),
    /// A request ends.
    Comes(CacheBlock, u64),
    Fetched(CacheBlock, u64),
    Written,
    Looks,
    /// Answers to a look: the states of blocks, and the holders that have received something.
    Sees(Vec<(CacheBlock, Claimed)>, Vec<u32>),
    Resumes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Runs,
    /// It goes on, or it does not.
    Stopped(bool),
    Killed,
}

/// A request to the server.
struct Request {
    number: u64,
    fate: Fate,
    buffer: Option<Rc<Memory>>,
}

/// A read from the disk.
struct DiskRead {
    block: CacheBlock,
    number: u64,
    succeeds: bool,
    _buffer: Rc<Memory>,
}

struct Process {
    flow: CacheFlow<Hands>,
    hands: Hands,
    life: Life,
    /// Events while it was stopped.
    missed: Vec<Event>,
    /// The read that is submitted next.
    next: usize,
    turns: bool,
    looks: bool,
    /// The beats of holders at the last look.
    beats: BTreeMap<u32, u64>,
    slabs: usize,
    has_slab: Vec<bool>,
    wants_slab: VecDeque<Ticket>,
    requests: BTreeMap<CacheBlock, Request>,
    fetches: Vec<DiskRead>,
    /// The writer works.
    writes: bool,
    written: usize,
}

/// Counts of a run.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tally {
    pub(super) copied: u64,
    pub(super) failed: u64,
    /// Blocks that were asked for in place of silent holders.
    pub(super) taken_over: u64,
    pub(super) fetched: u64,
    pub(super) written: u64,
    /// Runs in which nothing failed, was dropped or stopped.
    pub(super) undisturbed: u64,
    pub(super) steps: u64,
    /// Blocks that were asked of the server, and its requests that were lost with their process.
    pub(super) asked: u64,
    pub(super) lost: u64,
    pub(super) ended: Time,
}

impl Tally {
    pub(super) fn add(&mut self, other: Tally) {
        self.copied += other.copied;
        self.failed += other.failed;
        self.taken_over += other.taken_over;
        self.fetched += other.fetched;
        self.written += other.written;
        self.undisturbed += other.undisturbed;
        self.steps = self.steps.max(other.steps);
    }
}

pub(super) struct World {
    case: Rc<Case>,
    disk: Rc<RefCell<Disk>>,
    now: Time,
    events: BTreeMap<(Time, u64), (usize, Event)>,
    pushed: u64,
    /// When the server is free again, for each process.
    free_at: Vec<Time>,
    processes: Vec<Process>,
    tally: Tally,
}

type Check = Result<(), String>;

impl World {
    pub(super) fn new(case: Case) -> World {
        let case = Rc::new(case);
        let written = case.there.iter().map(|block| (*block, case.bytes(*block))).collect();
        let disk = Rc::new(RefCell::new(Disk { written, ..Disk::default() }));
        let process = |me: usize| {
            let spec = &case.processes[me];
            Process {
                flow: CacheFlow::new(),
                hands: Hands::new(me, case.clone(), disk.clone()),
                life: Life::Runs,
                missed: Vec::new(),
                next: 0,
                turns: true,
                looks: false,
                beats: BTreeMap::new(),
                slabs: spec.slabs,
                has_slab: vec![false; spec.reads.len()],
                wants_slab: VecDeque::new(),
                requests: BTreeMap::new(),
                fetches: Vec::new(),
                writes: false,
                written: 0,
            }
        };
        let processes: Vec<Process> = (0..case.processes.len()).map(process).collect();
        let mut world = World {
            disk: disk.clone(),
            now: 0,
            events: BTreeMap::new(),
            pushed: 0,
            free_at: vec![0; processes.len()],
            processes,
            tally: Tally::default(),
            case: case.clone(),
        };
        for (me, spec) in case.processes.iter().enumerate() {
            world.after(me, spec.begins, Event::Turns);
        }
        world
    }

    fn after(&mut self, me: usize, pause: Time, event: Event) {
        self.pushed += 1;
        self.events.insert((self.now + pause, self.pushed), (me, event));
    }

    /// Runs all loads to their ends. Gives the time at which each read of the first process ended, too.
    pub(super) fn run(mut self) -> Result<(Tally, Vec<ReadAt>), String> {
        for step in 0..STEPS {
            for (_, me, incident) in self.case.clone().incidents.iter().filter(|(at, ..)| *at == step) {
                self.incident(*me, *incident)?;
            }
            self.disk.borrow_mut().full = step >= self.case.full_from;
            if self.processes.iter().all(Process::is_over) {
                self.tally.steps = step;
                return self.ended();
            }
            let Some(((at, _), (me, event))) = self.events.pop_first() else {
                return Err("nothing happens any more, and a load has not ended".to_owned());
            };
            self.now = at;
            match self.processes[me].life {
                Life::Killed => {}
                Life::Stopped(_) if !matches!(event, Event::Resumes) => self.processes[me].missed.push(event),
                _ => self.happens(me, event)?,
            }
        }
        Err("a load does not end".to_owned())
    }

    fn incident(&mut self, me: usize, incident: Incident) -> Check {
        let process = &mut self.processes[me];
        if process.life != Life::Runs {
            return Ok(());
        }
        self.disk.borrow_mut().disturbed = true;
        self.tally.lost += process.requests.len() as u64 + process.hands.writer.len() as u64;
        match incident {
            Incident::Killed => {
                process.life = Life::Killed;
                self.disk.borrow_mut().loses(me as u32);
            }
            Incident::Stopped(pause) => {
                process.life = Life::Stopped(pause.is_some());
                if let Some(pause) = pause {
                    self.after(me, pause, Event::Resumes);
                }
            }
            Incident::Cancelled => {
                self.call(me, Call::Cancel, |flow, hands, _| flow.cancel(hands))?;
                // Requests are given up. Some of them come nevertheless.
                let requests = self.processes[me].requests.iter();
                let given_up: Vec<_> = requests.map(|(block, request)| (*block, request.number)).collect();
                for (block, number) in given_up {
                    let pause = self.case.draw(Drawn::GivenUp, block, number).below(60 * MS);
                    self.after(me, pause, Event::Comes(block, number));
                }
                self.turns_soon(me, 0);
            }
        }
        Ok(())
    }

    fn happens(&mut self, me: usize, event: Event) -> Check {
        let process = &mut self.processes[me];
        match event {
            Event::Turns => return self.turns(me),
            Event::Lands(read) => {
                if process.hands.reads[read.0 as usize] == ReadAt::Told {
                    process.hands.reads[read.0 as usize] = ReadAt::HasPlace;
                    process.has_slab[read.0 as usize] = true;
                } else {
                    process.slabs += 1; // It was cancelled meanwhile.
                }
                return self.call(me, Call::Landed, |flow, hands, _| flow.landed(read, hands));
            }
            Event::FreesSlab => {
                process.slabs += 1;
                self.give_slabs(me);
            }
            Event::Answers(block, number) => return self.answers(me, block, number),
            Event::Brings(block, number, left) => return self.brings(me, block, number, left),
            Event::Comes(block, number) => return self.comes(me, block, number),
            Event::Fetched(block, number) => return self.fetched(me, block, number),
            Event::Written => return self.written(me),
            Event::Looks => {
                process.looks = false;
                let disk = self.disk.borrow();
                let seen = process.flow.theirs().map(|(block, holder)| (block, holder, disk.state(block)));
                let is_new = |(_, holder, now): &(CacheBlock, u32, Claimed)| *now != Claimed::Theirs(*holder);
                let seen = seen.filter(is_new).map(|(block, _, now)| (block, now)).collect();
                let beats =
                    process.flow.holders().into_iter().map(|it| (it, disk.beats.get(&it).copied().unwrap_or(0)));
                let has_beaten =
                    |(holder, now): &(u32, u64)| process.beats.insert(*holder, *now).is_some_and(|it| it != *now);
                let alive = beats.filter(has_beaten).map(|(holder, _)| holder).collect();
                drop(disk);
                let late = self.draw(me, Drawn::Look).below(self.case.look / 2);
                self.after(me, late, Event::Sees(seen, alive));
            }
            Event::Sees(seen, alive) => return self.sees(me, seen, alive),
            Event::Resumes => {
                process.life = Life::Runs;
                for event in std::mem::take(&mut process.missed) {
                    self.after(me, 0, event);
                }
            }
        }
        Ok(())
    }

    fn draw(&self, me: usize, what: Drawn) -> super::case::Rng {
        let process = &self.processes[me];
        let block = CacheBlock { file: me as u32, block: process.next as u32 };
        self.case.draw(what, block, process.hands.unended.len() as u64)
    }

    /// Calls a flow, and does the work that the call leaves.
    fn call(&mut self, me: usize, call: Call, with: impl FnOnce(&mut CacheFlow<Hands>, &mut Hands, Duration)) -> Check {
        let process = &mut self.processes[me];
        process.hands.begins(self.now, call.clone());
        with(&mut process.flow, &mut process.hands, Duration::from_nanos(self.now));
        for todo in std::mem::take(&mut process.hands.todo) {
            self.does(me, todo);
        }
        let process = &mut self.processes[me];
        let mut held: Vec<CacheBlock> = process.fetches.iter().map(|read| read.block).collect();
        held.extend(process.requests.iter().filter(|(_, request)| request.buffer.is_some()).map(|(block, _)| *block));
        process.hands.buffers_come_back(&held);
        process.hands.after_call().map_err(|fault| format!("{fault}; at {} ms, in {call:?}", self.now / MS))?;
        let (told, is) = (process.flow.reads(), process.hands.unended.len());
        if told != is {
            return Err(format!("process {me} waits for {told} reads, and {is} have not ended"));
        }
        let (told, is) = ((process.flow.theirs().count(), process.flow.holders()), process.hands.looked_at());
        if told != is {
            return Err(format!("process {me} looks at {told:?} blocks and holders, and others bring {is:?}"));
        }
        if !process.looks && !is.1.is_empty() {
            process.looks = true;
            let pause = self.case.look / 2 + self.draw(me, Drawn::Look).below(self.case.look);
            self.after(me, pause, Event::Looks);
        }
        Ok(())
    }

    fn does(&mut self, me: usize, todo: Todo) {
        match todo {
            Todo::Ask(block) => {
                self.pushed += 1;
                let number = self.pushed;
                let nth = self.disk.borrow().asked.get(&block).copied().unwrap_or_default();
                let (latency, fate) = self.case.request(block, me, nth);
                self.processes[me].requests.insert(block, Request { number, fate, buffer: None });
                let first = if fate == Fate::FailsAtOnce { Event::Comes } else { Event::Answers };
                self.after(me, latency, first(block, number));
            }
            Todo::Land(block, buffer) => {
                let Some(request) = self.processes[me].requests.get_mut(&block) else { return };
                let bytes = self.case.bytes(block);
                buffer.fill(&bytes[..bytes.len() / 2]);
                request.buffer = Some(buffer);
                let number = request.number;
                self.carries(me, block, number, self.case.parts);
            }
            Todo::Fetch(block, buffer) => {
                self.pushed += 1;
                let number = self.pushed;
                let process = &mut self.processes[me];
                let (pause, mut succeeds) = self.case.disk_read(block, number);
                if let Some(held) = process.hands.writes(block) {
                    let bytes = held.bytes.borrow().clone();
                    (*buffer.bytes.borrow_mut(), succeeds) = (bytes, true);
                } else if let (true, Some(bytes)) = (succeeds, self.disk.borrow().written.get(&block)) {
                    buffer.fill(bytes);
                } else {
                    succeeds = false;
                }
                process.fetches.push(DiskRead { block, number, succeeds, _buffer: buffer });
                self.after(me, pause, Event::Fetched(block, number));
            }
            Todo::Arrive(read) => {
                self.processes[me].wants_slab.push_back(read);
                self.give_slabs(me);
            }
            Todo::Write => self.write(me),
            Todo::Ended(read) => {
                let held = self.processes[me].hands.spec().held;
                let block = self.processes[me].hands.spec().reads[read.0 as usize].block;
                if std::mem::take(&mut self.processes[me].has_slab[read.0 as usize]) {
                    let pause = held / 2 + self.case.draw(Drawn::Hold, block, read.0).below(held);
                    self.after(me, pause, Event::FreesSlab);
                }
                let pause = self.case.draw(Drawn::Turn, block, read.0).below(MS);
                self.turns_soon(me, pause);
            }
        }
    }

    /// The link carries a part of a block; so many are left.
    fn carries(&mut self, me: usize, block: CacheBlock, number: u64, left: u64) {
        let free_at = &mut self.free_at[if self.case.alone { me } else { 0 }];
        *free_at = self.now.max(*free_at) + self.case.rate / self.case.parts;
        let pause = *free_at - self.now;
        let event = if left > 1 { Event::Brings(block, number, left - 1) } else { Event::Comes(block, number) };
        self.after(me, pause, event);
    }

    /// A process receives something.
    fn beats(&mut self, me: usize) {
        *self.disk.borrow_mut().beats.entry(me as u32).or_default() += 1;
    }

    fn brings(&mut self, me: usize, block: CacheBlock, number: u64, left: u64) -> Check {
        self.beats(me);
        if self.processes[me].requests.get(&block).is_some_and(|request| request.number == number) {
            self.carries(me, block, number, left);
        }
        Ok(())
    }

    fn turns_soon(&mut self, me: usize, pause: Time) {
        if !std::mem::replace(&mut self.processes[me].turns, true) {
            self.after(me, pause, Event::Turns);
        }
    }

    fn give_slabs(&mut self, me: usize) {
        while self.processes[me].slabs > 0 {
            let Some(read) = self.processes[me].wants_slab.pop_front() else { return };
            self.processes[me].slabs -= 1;
            let block = self.processes[me].hands.spec().reads[read.0 as usize].block;
            let pause = self.case.draw(Drawn::Place, block, read.0).below(MS / 10);
            self.after(me, pause, Event::Lands(read));
        }
    }

    /// The engine submits as many reads as may be in flight.
    fn turns(&mut self, me: usize) -> Check {
        self.processes[me].turns = false;
        let case = self.case.clone();
        let spec = &case.processes[me];
        loop {
            let process = &mut self.processes[me];
            let number = process.next;
            let Some(read) = spec.reads.get(number) else { return Ok(()) };
            let follows = spec.grouped && number > 0 && spec.reads[number - 1].block == read.block;
            if process.hands.unended.len() >= spec.depth && !follows {
                return Ok(());
            }
            process.next += 1;
            let ticket = Ticket(number as u64);
            process.hands.submits(ticket);
            self.call(me, Call::Submit(read.block), |flow, hands, now| {
                flow.submit(now, ticket, read.block, read.has_place, hands);
            })?;
        }
    }

    fn answers(&mut self, me: usize, block: CacheBlock, number: u64) -> Check {
        let process = &mut self.processes[me];
        let Some(request) = process.requests.get(&block).filter(|request| request.number == number) else {
            return Ok(());
        };
        let fate = request.fate;
        self.beats(me);
        if fate == Fate::FailsSoon {
            let pause = self.case.draw(Drawn::FirstByteToFailure, block, number).below(3 * MS);
            self.after(me, pause, Event::Comes(block, number));
        }
        self.processes[me].hands.moves(block, At::Arrived);
        self.call(me, Call::Arrived, |flow, hands, _| flow.arrived(block, hands))
    }

    fn comes(&mut self, me: usize, block: CacheBlock, number: u64) -> Check {
        let process = &mut self.processes[me];
        if process.requests.get(&block).is_none_or(|request| request.number != number) {
            return Ok(());
        }
        let Some(Request { fate, buffer, .. }) = process.requests.remove(&block) else { return Ok(()) };
        let came = fate == Fate::Comes && buffer.is_some();
        if came {
            self.beats(me);
            buffer.inspect(|buffer| buffer.fill(&self.case.bytes(block)));
            return self.call(me, Call::Came(block, None), |flow, hands, _| flow.came(block, Ok(()), hands));
        }
        drop(buffer);
        self.disk.borrow_mut().disturbed = true;
        let text = format!("simulated {number}");
        let error = Error::new(ErrorKind::Io, text.clone());
        self.call(me, Call::Came(block, Some(text)), |flow, hands, _| flow.came(block, Err(error), hands))
    }

    fn fetched(&mut self, me: usize, block: CacheBlock, number: u64) -> Check {
        let fetches = &mut self.processes[me].fetches;
        let Some(at) = fetches.iter().position(|read| read.number == number) else { return Ok(()) };
        let DiskRead { succeeds, .. } = fetches.swap_remove(at);
        self.tally.fetched += u64::from(succeeds);
        self.disk.borrow_mut().disturbed |= !succeeds;
        self.call(me, Call::Fetched(block, succeeds), |flow, hands, _| flow.fetched(block, succeeds, hands))
    }

    /// The writer begins with its next block.
    fn write(&mut self, me: usize) {
        let process = &mut self.processes[me];
        let Some((block, _)) = process.hands.writer.front() else { return };
        let (block, nth) = (*block, process.written as u64);
        let takes = match process.hands.spec().writing {
            Writing::Takes(takes) => takes,
            Writing::Sticks(after) if process.written < after => MS,
            _ => return,
        };
        if !std::mem::replace(&mut process.writes, true) {
            let pause = takes / 2 + self.case.draw(Drawn::Write, block, nth).below(takes);
            self.after(me, pause, Event::Written);
        }
    }

    fn written(&mut self, me: usize) -> Check {
        let process = &mut self.processes[me];
        process.writes = false;
        let Some((block, buffer)) = process.hands.writer.pop_front() else { return Ok(()) };
        process.written += 1;
        let mut disk = self.disk.borrow_mut();
        disk.unclaim(block, me as u32);
        if disk.full {
            disk.disturbed = true;
            process.hands.knows_full = true;
        } else {
            let bytes = self.case.bytes(block);
            if !buffer.has(&bytes) {
                return Err(format!("{block:?} is written with other bytes"));
            }
            disk.written.insert(block, bytes);
            self.tally.written += 1;
        }
        drop((disk, buffer));
        self.write(me);
        self.call(me, Call::GiveBuffers, |flow, hands, _| flow.give_buffers(hands))
    }

    fn sees(&mut self, me: usize, seen: Vec<(CacheBlock, Claimed)>, alive: Vec<u32>) -> Check {
        for holder in alive {
            self.processes[me].hands.sees_alive(self.now, holder);
            self.call(me, Call::Alive, |flow, _, now| flow.is_alive(now, holder))?;
        }
        for (block, state) in seen {
            let before = self.processes[me].hands.blocks.get(&block).map(|awaited| awaited.at);
            self.processes[me].hands.sees(self.now, block, state);
            self.call(me, Call::Seen(block), |flow, hands, now| flow.seen(now, block, state, hands))?;
            let is_left = matches!(before, Some(At::Theirs { .. })) && state == Claimed::Missing;
            if is_left && self.processes[me].hands.answers().is_none() {
                return Err(format!("process {me} waits for {block:?}, which nobody brings"));
            }
        }
        let hands = &mut self.processes[me].hands;
        hands.now = self.now;
        let silent = hands.of_silent();
        self.call(me, Call::Tick, |flow, hands, now| {
            flow.tick(now, hands);
            hands.after_tick(&silent);
        })
    }

    /// Checks of the end.
    fn ended(mut self) -> Result<(Tally, Vec<ReadAt>), String> {
        for (me, process) in self.processes.iter().enumerate().filter(|(_, process)| process.life == Life::Runs) {
            let (hands, flow) = (&process.hands, &process.flow);
            self.tally.taken_over += hands.taken_over;
            for at in &hands.reads {
                match at {
                    ReadAt::Copied(_) => self.tally.copied += 1,
                    ReadAt::Failed(_) => self.tally.failed += 1,
                    _ => return Err(format!("a read of process {me} has not ended")),
                }
            }
            if flow.reads() > 0 || flow.theirs().next().is_some() {
                return Err(format!("process {me} has ended and waits for blocks"));
            }
            let used = hands.pool.borrow().used.len();
            if used != hands.writer.len() {
                return Err(format!("process {me} has ended and uses {used} buffers"));
            }
            let disk = self.disk.borrow();
            let held = disk.claims.iter().filter(|(_, holder)| **holder == me as u32);
            let left = held.map(|(block, _)| *block).find(|block| hands.writes(*block).is_none());
            if let Some(block) = left {
                return Err(format!("process {me} has ended and claims {block:?}"));
            }
        }
        let disk = self.disk.borrow();
        (self.tally.asked, self.tally.ended) = (disk.asked.values().sum(), self.now);
        self.tally.undisturbed = u64::from(!disk.disturbed);
        let twice = disk.asked.iter().find(|(_, asked)| **asked > 1);
        if let (false, Some((block, asked))) = (disk.disturbed, twice) {
            return Err(format!("{block:?} was asked for {asked} times, and nothing had failed"));
        }
        Ok((self.tally, self.processes[0].hands.reads.clone()))
    }
}

impl Process {
    /// Nothing more happens to it.
    fn is_over(&self) -> bool {
        let spec = self.hands.spec();
        let sticks = matches!(spec.writing, Writing::Sticks(after) if self.written >= after);
        match self.life {
            Life::Runs => {
                let all = self.next == spec.reads.len() && self.hands.unended.is_empty();
                let idle = self.requests.is_empty() && self.fetches.is_empty();
                all && idle && (sticks || self.hands.writer.is_empty())
            }
            Life::Stopped(goes_on) => !goes_on,
            Life::Killed => true,
        }
    }
}
