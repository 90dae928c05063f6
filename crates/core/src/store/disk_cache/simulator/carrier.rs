//! The hands of one process: they do what its flow says, and see whether it may say so.

use super::super::flow::mutated::{CacheBlock, Carrier, Claimed};
use super::super::flow::{FIRST_TAKEN_OVER, MOST_PATIENCE, MOST_TAKEN_OVER, PATIENCE};
use super::case::{Case, ProcessSpec, Time, Writing};
use super::disk::{Disk, Memory, Pool};
use crate::error::{Error, ErrorKind};
use crate::extent::Ticket;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// The call of the flow that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Call {
    Submit(CacheBlock),
    Arrived,
    /// A block has come, or has failed with this error.
    Came(CacheBlock, Option<String>),
    Fetched(CacheBlock, bool),
    Seen(CacheBlock),
    Alive,
    Tick,
    Landed,
    GiveBuffers,
    Cancel,
}

/// Where a block is, by the calls so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// It may be asked for.
    Claimed,
    Asked,
    Arrived,
    Landing,
    Theirs {
        holder: u32,
        since: Time,
    },
    There,
    Fetching,
    Here,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Awaited {
    pub(super) at: At,
    /// It was asked for in place of this holder.
    instead_of: Option<u32>,
    /// Its reads that have not ended.
    reads: usize,
}

impl Awaited {
    /// The server has been asked for it, and it has not come.
    fn is_asked(&self) -> bool {
        matches!(self.at, At::Asked | At::Arrived | At::Landing)
    }
}

/// Where a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadAt {
    Unsent,
    /// It has no place.
    Sent,
    /// It has no place, and its block is here.
    Told,
    HasPlace,
    Copied(Time),
    Failed(Time),
}

/// Work that a call leaves to the world.
#[derive(Debug)]
pub(super) enum Todo {
    Ask(CacheBlock),
    Land(CacheBlock, Rc<Memory>),
    Fetch(CacheBlock, Rc<Memory>),
    Arrive(Ticket),
    Write,
    Ended(Ticket),
}

pub(super) struct Hands {
    me: u32,
    case: Rc<Case>,
    pub(super) disk: Rc<RefCell<Disk>>,
    pub(super) pool: Rc<RefCell<Pool>>,
    pub(super) now: Time,
    call: Call,
    /// The answer to the claim of this call.
    answer: Option<Claimed>,
    /// The writer had no room in this call.
    refused: bool,
    pub(super) blocks: BTreeMap<CacheBlock, Awaited>,
    pub(super) reads: Vec<ReadAt>,
    /// Reads that were submitted and have not ended.
    pub(super) unended: BTreeSet<usize>,
    /// Blocks that the writer has.
    pub(super) writer: VecDeque<(CacheBlock, Rc<Memory>)>,
    /// Its disk is full, as it knows.
    pub(super) knows_full: bool,
    /// When each holder was seen to receive something last.
    progress: BTreeMap<u32, Time>,
    /// Holders that have received nothing for a second, and nothing since.
    silent: BTreeSet<u32>,
    /// How often each holder was silent and went on.
    slow: BTreeMap<u32, u32>,
    /// Blocks that may be asked for in place of silent holders at once.
    may_take_over: usize,
    pub(super) cancelled: bool,
    pub(super) todo: Vec<Todo>,
    pub(super) taken_over: u64,
    pub(super) fault: Option<String>,
}

impl Hands {
    pub(super) fn new(me: usize, case: Rc<Case>, disk: Rc<RefCell<Disk>>) -> Hands {
        let spec = &case.processes[me];
        Hands {
            me: me as u32,
            disk,
            pool: Pool::new(spec.buffers),
            now: 0,
            call: Call::Tick,
            answer: None,
            refused: false,
            blocks: BTreeMap::new(),
            reads: vec![ReadAt::Unsent; spec.reads.len()],
            unended: BTreeSet::new(),
            writer: VecDeque::new(),
            knows_full: false,
            progress: BTreeMap::new(),
            silent: BTreeSet::new(),
            slow: BTreeMap::new(),
            may_take_over: FIRST_TAKEN_OVER,
            cancelled: false,
            todo: Vec::new(),
            taken_over: 0,
            fault: None,
            case,
        }
    }

    pub(super) fn spec(&self) -> &ProcessSpec {
        &self.case.processes[self.me as usize]
    }

    /// The flow is called.
    pub(super) fn begins(&mut self, now: Time, call: Call) {
        (self.now, self.answer, self.refused) = (now, None, false);
        if let Call::Came(block, None) = &call {
            let holder = self.blocks.get(block).and_then(|awaited| awaited.instead_of);
            if holder.is_some_and(|holder| self.silent.contains(&holder)) {
                self.may_take_over = (self.may_take_over + 1).min(MOST_TAKEN_OVER);
            }
        }
        match &call {
            Call::Cancel => self.cancelled = true,
            Call::Came(block, None) | Call::Fetched(block, true) => self.moves(*block, At::Here),
            _ => {}
        }
        self.call = call;
    }

    /// A block is somewhere else now.
    pub(super) fn moves(&mut self, block: CacheBlock, at: At) {
        if let Some(awaited) = self.blocks.get_mut(&block) {
            awaited.at = at;
        }
    }

    fn at(&self, block: CacheBlock) -> Option<At> {
        self.blocks.get(&block).map(|awaited| awaited.at)
    }

    /// A read is about to be submitted.
    pub(super) fn submits(&mut self, read: Ticket) {
        let spec = self.spec().reads[read.0 as usize].clone();
        self.reads[read.0 as usize] = if spec.has_place { ReadAt::HasPlace } else { ReadAt::Sent };
        self.unended.insert(read.0 as usize);
        if let Some(awaited) = self.blocks.get_mut(&spec.block) {
            awaited.reads += 1;
        }
    }

    /// A look says this of a block, before the flow hears so.
    pub(super) fn sees(&mut self, now: Time, block: CacheBlock, state: Claimed) {
        let Some(awaited) = self.blocks.get_mut(&block) else { return };
        let At::Theirs { holder, .. } = awaited.at else { return };
        match state {
            Claimed::There => awaited.at = At::There,
            Claimed::Theirs(other) if other != holder => awaited.at = At::Theirs { holder: other, since: now },
            _ => {}
        }
    }

    /// A look says that this holder has received something, before the flow hears so.
    pub(super) fn sees_alive(&mut self, now: Time, holder: u32) {
        self.progress.insert(holder, now);
        if self.silent.remove(&holder) {
            *self.slow.entry(holder).or_default() += 1;
            self.may_take_over = FIRST_TAKEN_OVER;
        }
    }

    /// Its holder has received nothing for a second: longer, if that was only slow before.
    fn is_silent(&self, holder: u32, since: Time) -> bool {
        let last = self.progress.get(&holder).copied().unwrap_or_default().max(since);
        let slow = self.slow.get(&holder).copied().unwrap_or_default();
        let patience = PATIENCE.saturating_mul(1 << slow.min(8)).min(MOST_PATIENCE);
        self.silent.contains(&holder) || u128::from(self.now - last) >= patience.as_nanos()
    }

    fn asked_instead(&self) -> usize {
        self.blocks.values().filter(|awaited| awaited.instead_of.is_some() && awaited.is_asked()).count()
    }

    /// Blocks whose holders are silent, and these.
    pub(super) fn of_silent(&self) -> Vec<(CacheBlock, u32)> {
        let silent = |at| match at {
            At::Theirs { holder, since } if self.is_silent(holder, since) => Some(holder),
            _ => None,
        };
        self.blocks.iter().filter_map(|(block, awaited)| Some((*block, silent(awaited.at)?))).collect()
    }

    /// Blocks that a look has to see, and the holders.
    pub(super) fn looked_at(&self) -> (usize, BTreeSet<u32>) {
        let theirs = |it: &&Awaited| matches!(it.at, At::Theirs { .. });
        let holder = |it: &Awaited| match it.at {
            At::Theirs { holder, .. } => Some(holder),
            _ => it.instead_of.filter(|_| it.is_asked()),
        };
        (self.blocks.values().filter(theirs).count(), self.blocks.values().filter_map(holder).collect())
    }

    /// Checks after a tick. `silent`: blocks whose holders were silent before it.
    pub(super) fn after_tick(&mut self, silent: &[(CacheBlock, u32)]) {
        let is_left = |block: CacheBlock, before: u32| matches!(self.at(block), Some(At::Theirs { holder, .. }) if holder == before);
        let left = silent.iter().find(|(block, holder)| is_left(*block, *holder));
        let Some((left, _)) = left.copied() else { return };
        if self.asked_instead() < self.may_take_over {
            self.wrong(format!("waits for {left:?} of a holder that receives nothing"));
        }
    }

    pub(super) fn wrong(&mut self, text: String) {
        let me = self.me;
        self.fault.get_or_insert(format!("process {me}: {text}"));
    }

    fn not_cancelled(&mut self, does: &str, block: CacheBlock) {
        if self.cancelled {
            self.wrong(format!("{does} {block:?} after it was cancelled"));
        }
    }

    /// The answer to the claim of this call.
    pub(super) fn answers(&self) -> Option<Claimed> {
        self.answer
    }

    /// The writer has this block.
    pub(super) fn writes(&self, block: CacheBlock) -> Option<&Rc<Memory>> {
        self.writer.iter().find(|(it, _)| *it == block).map(|(_, buffer)| buffer)
    }

    /// Ends a read. False: it had ended.
    fn ends(&mut self, read: Ticket, end: ReadAt) -> bool {
        let at = &mut self.reads[read.0 as usize];
        if matches!(at, ReadAt::Unsent | ReadAt::Copied(_) | ReadAt::Failed(_)) {
            self.wrong(format!("{read:?} ends, which had ended or never began"));
            return false;
        }
        *at = end;
        self.unended.remove(&(read.0 as usize));
        self.todo.push(Todo::Ended(read));
        let block = self.spec().reads[read.0 as usize].block;
        if let Some(awaited) = self.blocks.get_mut(&block) {
            awaited.reads -= 1;
            if awaited.reads == 0 {
                self.blocks.remove(&block);
            }
        }
        true
    }

    /// Checks after each call.
    pub(super) fn after_call(&mut self) -> Result<(), String> {
        if self.fault.is_none() && !self.cancelled {
            self.nothing_idles();
        }
        self.fault.take().map_or(Ok(()), Err)
    }

    fn nothing_idles(&mut self) {
        for &number in &self.unended {
            let block = self.spec().reads[number].block;
            match (self.reads[number], self.at(block)) {
                (ReadAt::HasPlace, Some(At::Here)) => {
                    return self.wrong(format!("read {number} waits, and its block is here"));
                }
                (ReadAt::Sent, Some(At::Here)) => {
                    return self.wrong(format!("read {number} is not told that its block is here"));
                }
                _ => {}
            }
        }
        let free = self.pool.borrow().free;
        let waits = self.blocks.iter().find(|(_, awaited)| matches!(awaited.at, At::Arrived | At::There));
        if let (1.., Some((block, _))) = (free, waits) {
            return self.wrong(format!("{block:?} waits for a buffer, and {free} are free"));
        }
        let bare = self.blocks.iter().find(|(_, awaited)| awaited.at == At::Claimed);
        if let Some((block, _)) = bare {
            self.wrong(format!("{block:?} is claimed and not asked for"));
        }
    }

    /// The buffers in use have a reason. `held`: blocks whose buffers the server or the disk still fills.
    pub(super) fn buffers_come_back(&mut self, held: &[CacheBlock]) {
        let used: Vec<Option<CacheBlock>> = self.pool.borrow().used.values().copied().collect();
        for block in used {
            let is_needed = block.is_some_and(|block| {
                matches!(self.at(block), Some(At::Landing | At::Fetching | At::Here))
                    || self.writes(block).is_some()
                    || held.contains(&block)
            });
            if !is_needed {
                self.wrong(format!("a buffer of {block:?} is not free"));
            }
        }
        let needed = self.blocks.values().filter(|it| matches!(it.at, At::Landing | At::Fetching | At::Here)).count();
        if self.pool.borrow().used.len() > needed + self.writer.len() + held.len() {
            self.wrong("more buffers are in use than blocks need".to_owned());
        }
    }
}

impl Carrier for Hands {
    type Buffer = Rc<Memory>;

    fn claim(&mut self, block: CacheBlock) -> Claimed {
        self.not_cancelled("claims", block);
        let awaits = self.blocks.get(&block).copied();
        let reads = match (&self.call, awaits) {
            (Call::Submit(it), None) if *it == block => 1,
            (Call::Seen(it), Some(Awaited { at: At::Theirs { .. }, reads, .. })) if *it == block => reads,
            (call, _) => {
                self.wrong(format!("claims {block:?} at {call:?}, which is {awaits:?}"));
                1
            }
        };
        let unshared = self.spec().unshared;
        let is_there = self.writes(block).is_some() || self.disk.borrow().written.contains_key(&block);
        let holder = self.disk.borrow().holder(block);
        let (answer, at) = match holder {
            _ if is_there => (Claimed::There, At::There),
            Some(holder) if holder == self.me => {
                self.wrong(format!("claims {block:?} twice"));
                (Claimed::Ours, At::Claimed)
            }
            Some(holder) if !unshared || self.case.claims_are_seen => {
                (Claimed::Theirs(holder), At::Theirs { holder, since: self.now })
            }
            _ if unshared => {
                self.disk.borrow_mut().disturbed = true;
                (Claimed::Unshared, At::Claimed)
            }
            _ => {
                self.disk.borrow_mut().claims.insert(block, self.me);
                (Claimed::Ours, At::Claimed)
            }
        };
        self.answer = Some(answer);
        self.blocks.insert(block, Awaited { at, instead_of: None, reads });
        answer
    }

    fn take_over(&mut self, block: CacheBlock) -> Claimed {
        self.not_cancelled("takes over", block);
        let of = match self.at(block) {
            Some(At::Theirs { holder, since }) if self.call == Call::Tick && self.is_silent(holder, since) => holder,
            at => {
                self.wrong(format!("takes {block:?} over at {:?}, which is {at:?}", self.call));
                return Claimed::Unshared;
            }
        };
        self.silent.insert(of);
        let (mut disk, unshared) = (self.disk.borrow_mut(), self.spec().unshared);
        let is_there = disk.written.contains_key(&block);
        let (answer, at) = match disk.taken.get(&block).copied() {
            _ if is_there => (Claimed::There, At::There),
            _ if unshared => (Claimed::Unshared, At::Claimed),
            // It is silent too.
            Some(other) if other == of => (Claimed::Theirs(of), At::Claimed),
            Some(other) => (Claimed::Theirs(other), At::Theirs { holder: other, since: self.now }),
            None if disk.claims.contains_key(&block) => {
                disk.taken.insert(block, self.me);
                (Claimed::Ours, At::Claimed)
            }
            None => {
                disk.claims.insert(block, self.me);
                (Claimed::Ours, At::Claimed)
            }
        };
        drop(disk);
        self.answer = Some(answer);
        if let Some(awaited) = self.blocks.get_mut(&block) {
            awaited.at = at;
            awaited.instead_of = (at == At::Claimed).then_some(of);
        }
        answer
    }

    fn release(&mut self, block: CacheBlock) {
        let may = match &self.call {
            Call::Came(it, None) => *it == block && self.refused,
            Call::Came(it, Some(_)) => *it == block,
            call => *call == Call::Cancel,
        };
        let mut disk = self.disk.borrow_mut();
        disk.disturbed = true;
        let is_held = disk.unclaim(block, self.me);
        drop(disk);
        if !may || !is_held || self.writes(block).is_some() {
            self.wrong(format!("releases {block:?} at {:?}; claimed: {is_held}", self.call));
        }
    }

    fn ask(&mut self, block: CacheBlock) {
        self.not_cancelled("asks for", block);
        let may_ask = matches!(self.answer, Some(Claimed::Ours | Claimed::Unshared));
        let may = match (&self.call, self.at(block)) {
            (Call::Submit(it) | Call::Seen(it), Some(At::Claimed)) => *it == block && may_ask,
            (Call::Fetched(it, false), Some(At::Fetching)) => *it == block,
            (Call::Tick, Some(At::Claimed)) => true,
            _ => false,
        };
        if !may {
            self.wrong(format!("asks for {block:?} at {:?}, which is {:?}", self.call, self.at(block)));
        }
        let mut disk = self.disk.borrow_mut();
        *disk.asked.entry(block).or_default() += 1;
        if self.call == Call::Tick {
            disk.disturbed = true;
            self.taken_over += 1;
        }
        drop(disk);
        self.moves(block, At::Asked);
        if self.call == Call::Tick && self.asked_instead() > self.may_take_over {
            self.wrong("takes too many blocks over".to_owned());
        }
        self.todo.push(Todo::Ask(block));
    }

    fn land(&mut self, block: CacheBlock, buffer: &Rc<Memory>) {
        self.not_cancelled("lands", block);
        if self.at(block) != Some(At::Arrived) || !buffer.is_for(block) {
            self.wrong(format!("lands {block:?}, which is {:?}, in a buffer of {:?}", self.at(block), buffer.block));
        }
        self.moves(block, At::Landing);
        self.todo.push(Todo::Land(block, buffer.clone()));
    }

    fn buffer(&mut self) -> Option<Rc<Memory>> {
        Pool::take(&self.pool, super::case::BLOCK)
    }

    fn fetch(&mut self, block: CacheBlock, buffer: Rc<Memory>) {
        self.not_cancelled("fetches", block);
        // A block that the writer had may be lost, because the disk is full: then it cannot be read.
        let written = self.disk.borrow().written.contains_key(&block);
        let is_there = written || self.writes(block).is_some() || self.knows_full;
        if self.at(block) != Some(At::There) || !is_there || !buffer.is_for(block) {
            self.wrong(format!(
                "fetches {block:?}, which is {:?}, into a buffer of {:?}",
                self.at(block),
                buffer.block
            ));
        }
        self.moves(block, At::Fetching);
        self.todo.push(Todo::Fetch(block, buffer));
    }

    fn write(&mut self, block: CacheBlock, buffer: Rc<Memory>) -> bool {
        self.not_cancelled("writes", block);
        if self.call != Call::Came(block, None) || !buffer.has(&self.case.bytes(block)) {
            self.wrong(format!("writes {block:?} at {:?}", self.call));
        }
        let spec = self.spec();
        let is_full = self.writer.len() >= spec.buffers / 2;
        if spec.unshared || self.knows_full || is_full || spec.writing == Writing::Drops {
            self.refused = true;
            self.disk.borrow_mut().disturbed = true;
            return false;
        }
        self.writer.push_back((block, buffer));
        self.todo.push(Todo::Write);
        true
    }

    fn copy(&mut self, read: Ticket, buffer: &Rc<Memory>) {
        let spec = self.spec().reads[read.0 as usize].clone();
        self.not_cancelled("copies out of", spec.block);
        let is_here = self.at(spec.block) == Some(At::Here) && buffer.block.get() == Some(spec.block);
        if !is_here || self.reads[read.0 as usize] != ReadAt::HasPlace {
            let at = self.reads[read.0 as usize];
            self.wrong(format!("{read:?} ({at:?}) is copied; its block is {:?}", self.at(spec.block)));
        }
        let copied = buffer.bytes.borrow()[spec.bytes.clone()].to_vec();
        if copied != self.case.bytes(spec.block)[spec.bytes] {
            self.wrong(format!("{read:?} has wrong bytes: {copied:?}"));
        }
        self.ends(read, ReadAt::Copied(self.now));
    }

    fn arrive(&mut self, read: Ticket) {
        let block = self.spec().reads[read.0 as usize].block;
        self.not_cancelled("tells a read of", block);
        if self.reads[read.0 as usize] != ReadAt::Sent || self.at(block) != Some(At::Here) {
            let at = self.reads[read.0 as usize];
            self.wrong(format!("{read:?} ({at:?}) arrives; its block is {:?}", self.at(block)));
        }
        self.reads[read.0 as usize] = ReadAt::Told;
        self.todo.push(Todo::Arrive(read));
    }

    fn fail(&mut self, read: Ticket, error: Error) {
        let block = self.spec().reads[read.0 as usize].block;
        let expected = match &self.call {
            Call::Came(it, Some(text)) => *it == block && error.message() == text,
            Call::Cancel | Call::Submit(_) => self.cancelled && error.kind() == ErrorKind::Cancelled,
            _ => false,
        };
        if !expected {
            self.wrong(format!("{read:?} of {block:?} fails at {:?}: {error}", self.call));
        }
        self.ends(read, ReadAt::Failed(self.now));
    }
}
