//! The blocks that reads of a load wait for: asked of the server, brought by another process, or there already.
//!
//! It has no files, no sockets and no clock of its own, so a simulator can use it as it is. A [`Carrier`] does what it says.
//!
//! A read lies within one block. The block comes whole into a buffer; every read of it is copied from there. Five rules hold:
//!
//! - **Once.** A block that another process brings, or that the disk has, is not asked of the server. One that this process
//!   brings is claimed first, so that others wait for it.
//! - **No read waits for a write.** A block that came from the server is copied to its reads at once. The writer gets it too, if
//!   it has room. Otherwise the block is dropped: its claim ends, so that the process that needs it asks the server.
//! - **Patience.** A holder whose process receives nothing for a second is silent, and not waited for: a process that needs its
//!   blocks takes them over. It claims them, so that the others wait for it and not for the silent one. It begins with a few. For
//!   each one that comes it may take one more: else a server that is silent to everybody would be asked for all of them again.
//!   A holder that was silent and goes on was slow, and gets twice the patience from then on.
//! - **A bad disk costs time only.** A block that the disk does not give comes from the server.
//! - **Buffers come back.** A block has a buffer from its first byte to its last copy. Only the writer may hold it longer.

use crate::error::{Error, ErrorKind};
use crate::extent::Ticket;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

/// A holder that receives nothing for so long is not waited for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// The patience with a holder that was only slow before, at most.
pub(crate) const MOST_PATIENCE: Duration = Duration::from_secs(4);
/// Blocks of such holders that are asked of the server at once: at first, and at most.
pub(crate) const FIRST_TAKEN_OVER: usize = 4;
pub(crate) const MOST_TAKEN_OVER: usize = 32;

/// A block of a file of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CacheBlock {
    pub(crate) file: u32,
    pub(crate) block: u32,
}

/// The state of a block outside of this load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    /// It is this load's now: the load brings it.
    Ours,
    /// The disk has it, or this load's writer does: then a fetch copies it out of the writer's memory. Else a read that comes
    /// while its block is written would ask the server again, or wait for the write.
    There,
    /// The process with this number brings it.
    Theirs(u32),
    /// Nobody brings it. Only an answer to a look: a claim is never refused without a reason.
    Missing,
    /// It cannot be claimed: nothing is written here.
    Unshared,
}

/// Work that the flow leaves to somebody else. None of it blocks.
pub(crate) trait Carrier {
    /// Memory for a block. Its clones are the same memory, which is free when the last of them is gone.
    type Buffer: Clone;
    /// Claims a block that nobody has.
    fn claim(&mut self, block: CacheBlock) -> Claimed;
    /// Claims a block whose holder is silent, in its place: as if nobody had claimed it.
    fn take_over(&mut self, block: CacheBlock) -> Claimed;
    /// Ends a claim of this load. The block is not there.
    fn release(&mut self, block: CacheBlock);
    /// Asks the server for a block. Its first byte is told by [`CacheFlow::arrived`], its end by [`CacheFlow::came`].
    fn ask(&mut self, block: CacheBlock);
    /// The place of a block whose first byte is there.
    fn land(&mut self, block: CacheBlock, buffer: &Self::Buffer);
    /// A free buffer, if there is one.
    fn buffer(&mut self) -> Option<Self::Buffer>;
    /// Reads a block from the disk. Its end is told by [`CacheFlow::fetched`].
    fn fetch(&mut self, block: CacheBlock, buffer: Self::Buffer);
    /// Has a block written, which ends the claim. False: there is no room for it, and nothing has happened.
    fn write(&mut self, block: CacheBlock, buffer: Self::Buffer) -> bool;
    /// Copies a read out of its block to its place. The read is done.
    fn copy(&mut self, read: Ticket, buffer: &Self::Buffer);
    /// A read without a place has arrived.
    fn arrive(&mut self, read: Ticket);
    /// A read has failed.
    fn fail(&mut self, read: Ticket, error: Error);
}

/// How far a block has come.
#[derive(Debug)]
enum Bringing<B> {
    /// Asked of the server, under a claim of this load (`ours`) or without one.
    Asked { ours: bool },
    /// Its first byte is there, and it waits for a buffer.
    Arrived { ours: bool },
    /// It comes into this buffer.
    Landing { ours: bool, buffer: B },
    /// Another process brings it, which this load has known since then.
    Theirs { holder: u32, since: Duration },
    /// The disk has it, and it waits for a buffer.
    There,
    /// It is read from the disk.
    Fetching { buffer: B },
    /// All of it is in this buffer.
    Here { buffer: B },
}

/// A read that waits for a block.
#[derive(Debug)]
struct Waiter {
    read: Ticket,
    has_place: bool,
    /// It has been told that its block is here.
    told: bool,
}

#[derive(Debug)]
struct AwaitedBlock<B> {
    stage: Bringing<B>,
    /// The silent holder in whose place it has been asked for.
    instead_of: Option<u32>,
    reads: Vec<Waiter>,
}

/// The blocks that a load waits for.
#[derive(Debug)]
pub(crate) struct CacheFlow<C: Carrier> {
    blocks: BTreeMap<CacheBlock, AwaitedBlock<C::Buffer>>,
    /// The block of each read.
    of_read: HashMap<Ticket, CacheBlock>,
    /// Blocks that wait for a buffer.
    wait: VecDeque<CacheBlock>,
    /// When the process of each holder did something last.
    progress: HashMap<u32, Duration>,
    /// Holders that have done nothing for a second, and nothing since.
    silent: HashSet<u32>,
    /// The patience with each holder that was silent and went on.
    patience: HashMap<u32, Duration>,
    /// Blocks that are asked for in place of silent holders.
    taken_over: usize,
    /// As many may be.
    may_take_over: usize,
    cancelled: bool,
}

impl<C: Carrier> CacheFlow<C> {
    /// No blocks.
    pub(crate) fn new() -> Self {
        let (blocks, of_read, wait) = (BTreeMap::new(), HashMap::new(), VecDeque::new());
        let (progress, silent, patience) = (HashMap::new(), HashSet::new(), HashMap::new());
        let (taken_over, may_take_over, cancelled) = (0, FIRST_TAKEN_OVER, false);
        CacheFlow { blocks, of_read, wait, progress, silent, patience, taken_over, may_take_over, cancelled }
    }

    /// Reads that have not ended.
    #[allow(dead_code)] // the simulator asks
    pub(crate) fn reads(&self) -> usize {
        self.of_read.len()
    }

    /// The block of a read that has not ended.
    pub(crate) fn block_of(&self, read: Ticket) -> Option<CacheBlock> {
        self.of_read.get(&read).copied()
    }

    /// The reads that wait for a block.
    pub(crate) fn reads_of(&self, block: CacheBlock) -> impl Iterator<Item = Ticket> + '_ {
        self.blocks.get(&block).into_iter().flat_map(|known| known.reads.iter().map(|waiter| waiter.read))
    }

    /// The blocks that other processes bring, in order, and their holders as this load knows them.
    pub(crate) fn theirs(&self) -> impl Iterator<Item = (CacheBlock, u32)> + '_ {
        let holder = |known: &AwaitedBlock<_>| match known.stage {
            Bringing::Theirs { holder, .. } => Some(holder),
            _ => None,
        };
        self.blocks.iter().filter_map(move |(block, known)| Some((*block, holder(known)?)))
    }

    /// The holders of these blocks, and those in whose place this load brings blocks, so that it sees when they go on.
    pub(crate) fn holders(&self) -> BTreeSet<u32> {
        let holder = |known: &AwaitedBlock<_>| match known.stage {
            Bringing::Theirs { holder, .. } => Some(holder),
            _ => known.instead_of,
        };
        self.blocks.values().filter_map(holder).collect()
    }

    /// A read of a block.
    pub(crate) fn submit(&mut self, now: Duration, read: Ticket, block: CacheBlock, has_place: bool, carrier: &mut C) {
        if self.cancelled {
            return carrier.fail(read, given_up());
        }
        self.of_read.insert(read, block);
        if !self.blocks.contains_key(&block) {
            let stage = self.begin(now, block, carrier);
            self.blocks.insert(block, AwaitedBlock { stage, instead_of: None, reads: Vec::new() });
        }
        if let Some(known) = self.blocks.get_mut(&block) {
            known.reads.push(Waiter { read, has_place, told: false });
        }
        self.serve(block, carrier);
        self.give_buffers(carrier);
    }

    /// Claims a block, and asks for it if that is for this load to do.
    fn begin(&mut self, now: Duration, block: CacheBlock, carrier: &mut C) -> Bringing<C::Buffer> {
        match carrier.claim(block) {
            Claimed::There => {
                self.wait.push_back(block);
                Bringing::There
            }
            Claimed::Theirs(holder) => Bringing::Theirs { holder, since: now },
            claimed => {
                carrier.ask(block);
                Bringing::Asked { ours: claimed == Claimed::Ours }
            }
        }
    }

    /// The first byte of a block is there.
    pub(crate) fn arrived(&mut self, block: CacheBlock, carrier: &mut C) {
        let Some(known) = self.blocks.get_mut(&block) else { return };
        if let Bringing::Asked { ours } = known.stage {
            known.stage = Bringing::Arrived { ours };
            self.wait.push_back(block);
            self.give_buffers(carrier);
        }
    }

    /// A block has come from the server, or has failed.
    pub(crate) fn came(&mut self, block: CacheBlock, outcome: Result<(), Error>, carrier: &mut C) {
        let Some(mut known) = self.blocks.remove(&block) else { return };
        self.ends_instead(known.instead_of.take(), outcome.is_ok());
        let (ours, buffer) = match known.stage {
            Bringing::Landing { ours, buffer } => (ours, Some(buffer)),
            Bringing::Asked { ours } | Bringing::Arrived { ours } => (ours, None),
            _ => (false, None),
        };
        let error = match (outcome, buffer) {
            (Ok(()), Some(buffer)) => {
                if !carrier.write(block, buffer.clone()) && ours {
                    carrier.release(block);
                }
                self.blocks.insert(block, AwaitedBlock { stage: Bringing::Here { buffer }, ..known });
                self.serve(block, carrier);
                return self.give_buffers(carrier);
            }
            (Ok(()), None) => Error::new(ErrorKind::Internal, "a block came without a place; please report this"),
            (Err(error), _) => error,
        };
        if ours {
            carrier.release(block);
        }
        self.wait.retain(|waiting| *waiting != block);
        for Waiter { read, .. } in known.reads {
            self.of_read.remove(&read);
            carrier.fail(read, error.clone());
        }
        self.give_buffers(carrier);
    }

    /// A block has ended that was asked for in place of this holder, if of one.
    fn ends_instead(&mut self, holder: Option<u32>, has_come: bool) {
        let Some(holder) = holder else { return };
        self.taken_over -= 1;
        if has_come && self.silent.contains(&holder) {
            self.may_take_over = (self.may_take_over + 1).min(MOST_TAKEN_OVER);
        }
    }

    /// A block has been read from the disk, or could not be: then the server is asked.
    pub(crate) fn fetched(&mut self, block: CacheBlock, is_read: bool, carrier: &mut C) {
        let Some(known) = self.blocks.get_mut(&block) else { return };
        let Bringing::Fetching { buffer } = &known.stage else { return };
        if is_read {
            known.stage = Bringing::Here { buffer: buffer.clone() };
            self.serve(block, carrier);
        } else {
            known.stage = Bringing::Asked { ours: false };
            carrier.ask(block);
        }
        self.give_buffers(carrier);
    }

    /// The state of a block that another process brings, as it is now.
    pub(crate) fn seen(&mut self, now: Duration, block: CacheBlock, state: Claimed, carrier: &mut C) {
        let Some(known) = self.blocks.get_mut(&block) else { return };
        let Bringing::Theirs { holder, .. } = known.stage else { return };
        match state {
            Claimed::Theirs(other) if other == holder => {}
            Claimed::Theirs(other) => known.stage = Bringing::Theirs { holder: other, since: now },
            Claimed::There => {
                known.stage = Bringing::There;
                self.wait.push_back(block);
                self.give_buffers(carrier);
            }
            // Nobody can look at it any more.
            Claimed::Unshared => {
                known.stage = Bringing::Asked { ours: false };
                carrier.ask(block);
            }
            Claimed::Ours | Claimed::Missing => {
                // Its holder is gone, or has dropped it.
                let stage = self.begin(now, block, carrier);
                if let Some(known) = self.blocks.get_mut(&block) {
                    known.stage = stage;
                }
                self.give_buffers(carrier);
            }
        }
    }

    /// The process of this holder has received something, or claims other blocks: it is not silent. A block of it that is there
    /// shows nothing: another process may have taken it over.
    pub(crate) fn is_alive(&mut self, now: Duration, holder: u32) {
        self.progress.insert(holder, now);
        if self.silent.remove(&holder) {
            self.may_take_over = FIRST_TAKEN_OVER;
            let patience = self.patience.entry(holder).or_insert(PATIENCE);
            *patience = (*patience * 2).min(MOST_PATIENCE);
        }
    }

    /// Time has passed: the blocks of silent holders are taken over.
    pub(crate) fn tick(&mut self, now: Duration, carrier: &mut C) {
        for (&block, known) in &mut self.blocks {
            if self.taken_over >= self.may_take_over {
                break;
            }
            let Bringing::Theirs { holder, since } = known.stage else { continue };
            let last = self.progress.get(&holder).copied().unwrap_or_default().max(since);
            let patience = self.patience.get(&holder).copied().unwrap_or(PATIENCE);
            if self.silent.contains(&holder) || now.saturating_sub(last) >= patience {
                self.silent.insert(holder);
                known.stage = match carrier.take_over(block) {
                    Claimed::There => {
                        self.wait.push_back(block);
                        Bringing::There
                    }
                    Claimed::Theirs(other) if other != holder => Bringing::Theirs { holder: other, since: now },
                    // One that is silent has taken it over: then it is asked for without a claim.
                    claimed => {
                        known.instead_of = Some(holder);
                        self.taken_over += 1;
                        carrier.ask(block);
                        Bringing::Asked { ours: claimed == Claimed::Ours }
                    }
                };
            }
        }
        self.give_buffers(carrier);
    }

    /// A read that has arrived has its place now.
    pub(crate) fn landed(&mut self, read: Ticket, carrier: &mut C) {
        let Some(block) = self.block_of(read) else { return };
        let waiter = self.blocks.get_mut(&block).and_then(|known| known.reads.iter_mut().find(|one| one.read == read));
        if let Some(waiter) = waiter {
            waiter.has_place = true;
            self.copy(block, carrier);
            self.give_buffers(carrier);
        }
    }

    /// Gives buffers to blocks that wait for one.
    pub(crate) fn give_buffers(&mut self, carrier: &mut C) {
        while let Some(&block) = self.wait.front() {
            let Some(known) = self.blocks.get_mut(&block) else {
                self.wait.pop_front();
                continue;
            };
            let Some(buffer) = carrier.buffer() else { return };
            self.wait.pop_front();
            match known.stage {
                Bringing::Arrived { ours } => {
                    carrier.land(block, &buffer);
                    known.stage = Bringing::Landing { ours, buffer };
                }
                Bringing::There => {
                    known.stage = Bringing::Fetching { buffer: buffer.clone() };
                    carrier.fetch(block, buffer);
                }
                _ => {}
            }
        }
    }

    /// Tells the reads of a block that is here: those with a place have it, the others may ask for one.
    fn serve(&mut self, block: CacheBlock, carrier: &mut C) {
        let known = self.blocks.get_mut(&block);
        let Some(AwaitedBlock { stage: Bringing::Here { .. }, reads, .. }) = known else { return };
        for waiter in reads.iter_mut().filter(|waiter| !waiter.has_place && !waiter.told) {
            waiter.told = true;
            carrier.arrive(waiter.read);
        }
        self.copy(block, carrier);
    }

    /// Copies a block that is here to the reads that have their place.
    fn copy(&mut self, block: CacheBlock, carrier: &mut C) {
        let Some(known) = self.blocks.get_mut(&block) else { return };
        let Bringing::Here { buffer } = &known.stage else { return };
        known.reads.retain(|waiter| {
            if waiter.has_place {
                self.of_read.remove(&waiter.read);
                carrier.copy(waiter.read, buffer);
            }
            !waiter.has_place
        });
        if known.reads.is_empty() {
            self.blocks.remove(&block);
        }
    }

    /// Every read is given up. Claims end.
    pub(crate) fn cancel(&mut self, carrier: &mut C) {
        self.cancelled = true;
        for (block, known) in std::mem::take(&mut self.blocks) {
            let ours = match known.stage {
                Bringing::Asked { ours } | Bringing::Arrived { ours } | Bringing::Landing { ours, .. } => ours,
                _ => false,
            };
            if ours {
                carrier.release(block);
            }
            known.reads.into_iter().for_each(|waiter| carrier.fail(waiter.read, given_up()));
        }
        self.wait.clear();
        self.of_read.clear();
    }
}

fn given_up() -> Error {
    Error::new(ErrorKind::Cancelled, "the load was cancelled before this was read")
}

#[cfg(test)]
#[allow(dead_code, unused_parens, clippy::all)]
pub(crate) mod mutated {
    use super::*;

    mutants::seed!(CacheMistake, "src/store/disk_cache/flow.rs", "src/store/disk_cache/simulator/mistakes.txt");
}
