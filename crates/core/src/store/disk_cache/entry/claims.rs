//! The claims of an entry: the blocks that it brings, under locks that the kernel ends with it.

use super::super::lock::{held, try_lock, unlock, LockKind};
use super::super::map::{boot_tag, Slot};
use super::super::open_locks::LockedFile;
use super::marking::MARKING;
use super::{BlockState, CacheEntry, Claims};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The bytes from here on are the blocks' too: their locks are held by those that have taken blocks over from silent holders.
const TAKEN: u64 = 1 << 41;
/// Locks that [`CacheEntry::take`] asks for before it takes a block for claimed whose lock comes and goes.
const ATTEMPTS: u32 = 1000;
/// How often [`CacheEntry::take_over`] looks for the number of another one that took a block over in the same moment.
const YIELDS: u32 = 100;

impl CacheEntry {
    /// The blocks whose slots name a claim, each with the number of the claim. The locks are not looked at. Blocks that were
    /// given back are not among them: their holder may have stopped long ago.
    pub(in super::super) fn claimed(&self) -> Result<Vec<(u32, u32)>> {
        let mut found = Vec::new();
        self.each_slot(0..self.blocks(), |block, slot| {
            if let Slot::Claimed(number) = slot {
                found.push((block, number));
            }
            true
        })?;
        Ok(found)
    }

    /// True if another open file holds the lock of a block.
    pub(in super::super) fn is_locked(&self, block: u32) -> bool {
        let is_held =
            |map: Arc<File>| held(&map, u64::from(block)..u64::from(block) + 1).is_ok_and(|held| held.is_some());
        self.map().is_ok_and(is_held)
    }

    /// The state of a block. A claim without its lock does not count.
    pub(crate) fn state(&self, block: u32) -> Result<BlockState> {
        Ok(self.states(block..block + 1)?[0])
    }

    /// The states of blocks.
    pub(crate) fn states(&self, run: Range<u32>) -> Result<Vec<BlockState>> {
        self.check(&run)?;
        self.states_beside(&lock(&self.claims), run)
    }

    fn states_beside(&self, claims: &Claims, run: Range<u32>) -> Result<Vec<BlockState>> {
        let mut states = Vec::with_capacity(run.len());
        self.each_slot(run.clone(), |block, slot| {
            states.push(match slot {
                Slot::Written(_) | Slot::Synced(_) => BlockState::There,
                _ if claims.all.contains(&block) => BlockState::Claimed(self.number),
                Slot::Claimed(holder) | Slot::GivenBack(holder) if holder != self.number => BlockState::Claimed(holder),
                // It was released here.
                Slot::Claimed(_) | Slot::GivenBack(_) | Slot::Missing => BlockState::Missing,
            });
            true
        })?;
        // Claims of others count as far as their locks go.
        let mut at = run.start;
        while at < run.end {
            let is_foreign = |block: &u32| matches!(states[(*block - run.start) as usize], BlockState::Claimed(by) if by != self.number);
            let Some(start) = (at..run.end).find(is_foreign) else { break };
            let end = (start..run.end).find(|block| !is_foreign(block)).unwrap_or(run.end);
            let part = &mut states[(start - run.start) as usize..(end - run.start) as usize];
            let claimed = part.to_vec();
            part.fill(BlockState::Missing);
            for range in self.locked(start..end)? {
                let range = (range.start - start) as usize..(range.end - start) as usize;
                part[range.clone()].copy_from_slice(&claimed[range]);
            }
            at = end;
        }
        Ok(states)
    }

    /// The blocks among these whose locks others hold: those of claims, and those of blocks that were taken over.
    fn locked(&self, run: Range<u32>) -> Result<Vec<Range<u32>>> {
        let mut found = Vec::new();
        let mut rest = vec![run];
        while let Some(run) = rest.pop() {
            let Some(range) = self.held(0, &run)?.map_or_else(|| self.held(TAKEN, &run), |range| Ok(Some(range)))?
            else {
                continue;
            };
            rest.extend([run.start..range.start, range.end..run.end].into_iter().filter(|run| !run.is_empty()));
            found.push(range);
        }
        Ok(found)
    }

    /// Some of these blocks whose locks others hold, among those locks that begin with this byte.
    fn held(&self, first: u64, run: &Range<u32>) -> Result<Option<Range<u32>>> {
        let found = held(&*self.map()?, first + u64::from(run.start)..first + u64::from(run.end));
        let found = found.map_err(|e| self.failed("ask for locks", &e))?;
        Ok(found.map(|range| (range.start - first) as u32..(range.end - first) as u32))
    }

    /// Claims a block that is missing: then it returns `Claimed` with this entry's number. Other blocks stay as they are. In
    /// a read-only cache all do.
    pub(crate) fn claim(&self, block: u32) -> Result<BlockState> {
        Ok(self.claim_run(block..block + 1)?[0])
    }

    /// Claims the blocks of a run that are missing. Returns the states of all.
    pub(crate) fn claim_run(&self, run: Range<u32>) -> Result<Vec<BlockState>> {
        self.check(&run)?;
        let mut claims = lock(&self.claims);
        let mut states = self.states_beside(&claims, run.clone())?;
        if !self.writable {
            return Ok(states);
        }
        let is_missing =
            |states: &[BlockState], block: u32| states[(block - run.start) as usize] == BlockState::Missing;
        let mut at = run.start;
        while let Some(start) = (at..run.end).find(|block| is_missing(&states, *block)) {
            at = (start..run.end).find(|block| !is_missing(&states, *block)).unwrap_or(run.end);
            let place = (start - run.start) as usize..(at - run.start) as usize;
            self.take(&mut claims, start..at, &mut states[place])?;
        }
        Ok(states)
    }

    /// Claims these missing blocks, as far as nobody else has done so meanwhile.
    fn take(&self, claims: &mut Claims, run: Range<u32>, states: &mut [BlockState]) -> Result<()> {
        let map = self.map()?;
        let mut rest = vec![run.clone()];
        let mut attempts = 0;
        while let Some(part) = rest.pop() {
            attempts += 1;
            let bytes = u64::from(part.start)..u64::from(part.end);
            if try_lock(&map, LockKind::Exclusive, bytes.clone()).map_err(|e| self.failed("lock blocks", &e))? {
                // Some may have come since the slots were read.
                let mut is_there = Vec::with_capacity(part.len());
                let read = self.each_slot(part.clone(), |_, slot| {
                    is_there.push(slot.crc().is_some());
                    true
                });
                read.inspect_err(|_| unlock(&map, bytes.clone()))?;
                let mut free = Vec::with_capacity(part.len());
                for (block, is_there) in part.clone().zip(is_there) {
                    let state = &mut states[(block - run.start) as usize];
                    if is_there {
                        unlock(&map, u64::from(block)..u64::from(block) + 1);
                        *state = BlockState::There;
                    } else {
                        claims.add(block, &map);
                        *state = BlockState::Claimed(self.number);
                        free.push(block);
                    }
                }
                for run in free.chunk_by(|one, next| one + 1 == *next) {
                    let slots = Slot::Claimed(self.number).encode(boot_tag()).repeat(run.len());
                    if let Err(e) = map.write_all_at(&slots, self.slot_at(run[0])) {
                        free.iter().for_each(|block| self.end_claim(claims, *block));
                        return Err(Error::write("claim blocks", &e).at(&self.map_path));
                    }
                }
            } else if let Some(range) = held(&map, bytes).map_err(|e| self.failed("ask for locks", &e))? {
                let other = range.start as u32..range.end as u32;
                for (block, now) in other.clone().zip(self.states_beside(claims, other.clone())?) {
                    // The holder has the lock and has not written its number.
                    let now = if now == BlockState::Missing { BlockState::Claimed(0) } else { now };
                    states[(block - run.start) as usize] = now;
                }
                rest.extend([part.start..other.start, other.end..part.end].into_iter().filter(|run| !run.is_empty()));
            } else if attempts < ATTEMPTS {
                // The holder has unlocked it meanwhile.
                rest.push(part);
            } else {
                part.for_each(|block| states[(block - run.start) as usize] = BlockState::Claimed(0));
            }
        }
        Ok(())
    }

    /// Claims a block in place of another entry that has its lock: only one of those that try does. Returns `Claimed` with
    /// this entry's number, or the state that it has.
    pub(crate) fn take_over(&self, block: u32) -> Result<BlockState> {
        self.check(&(block..block + 1))?;
        let mut claims = lock(&self.claims);
        let mut state = self.states_beside(&claims, block..block + 1)?[0];
        if !self.writable {
            return Ok(state);
        }
        if state == BlockState::Missing {
            self.take(&mut claims, block..block + 1, std::slice::from_mut(&mut state))?;
        }
        let BlockState::Claimed(holder) = state else { return Ok(state) };
        if holder == self.number {
            return Ok(state);
        }
        let map = self.map()?;
        let byte = TAKEN + u64::from(block)..TAKEN + u64::from(block) + 1;
        let failed = |e: io::Error| self.failed("lock blocks", &e);
        if !try_lock(&map, LockKind::Exclusive, byte.clone()).map_err(failed)? {
            // Another one has, and its number is in the slot a moment later.
            for _ in 0..YIELDS {
                let now = self.states_beside(&claims, block..block + 1)?[0];
                if now != BlockState::Claimed(holder) {
                    return Ok(now);
                }
                std::thread::yield_now();
            }
            return Ok(BlockState::Claimed(holder));
        }
        // It may have come, or gone to another one, since its slot was read.
        let holder = match self.slot(block).inspect_err(|_| unlock(&map, byte.clone()))? {
            Slot::Claimed(holder) | Slot::GivenBack(holder) => holder,
            Slot::Missing => 0,
            Slot::Written(_) | Slot::Synced(_) => {
                unlock(&map, byte);
                return Ok(BlockState::There);
            }
        };
        claims.add(block, &map);
        claims.taken.insert(block, holder);
        self.set(block, Slot::Claimed(self.number)).inspect_err(|_| self.end_claim(&mut claims, block))?;
        Ok(BlockState::Claimed(self.number))
    }

    /// Ends the claim of a block, if it is this entry's: another one can claim it at once.
    pub(crate) fn release(&self, block: u32) {
        if self.process == std::process::id() {
            self.end_claim(&mut lock(&self.claims), block);
        }
    }

    /// Ends all claims.
    #[cfg(test)]
    pub(crate) fn release_all(&self) {
        if self.process == std::process::id() {
            let mut claims = lock(&self.claims);
            for block in claims.all.clone() {
                self.end_claim(&mut claims, block);
            }
        }
    }

    /// Ends the claims of blocks that were taken over.
    pub(super) fn end_taken(&self) {
        let mut claims = lock(&self.claims);
        for block in claims.taken.keys().copied().collect::<Vec<_>>() {
            self.end_claim(&mut claims, block);
        }
    }

    /// The slot stays: a claim without a lock does not count. To write the slot could undo the write of another process. That
    /// of a block that was taken over names its silent holder again, which has the lock: that holder writes nothing. It is
    /// given back, and not claimed: a new claim would show others that its holder works.
    pub(super) fn end_claim(&self, claims: &mut Claims, block: u32) {
        if !claims.all.remove(&block) {
            return;
        }
        let taken = claims.taken.remove(&block);
        let Some(map) = &claims.map else { return };
        let first = match taken {
            None => 0,
            Some(holder) => {
                if matches!(self.slot(block), Ok(Slot::Claimed(number)) if number == self.number) {
                    // Otherwise others wait for this entry, until it is silent.
                    let _names_this = self.set(block, Slot::GivenBack(holder));
                }
                TAKEN
            }
        };
        unlock(map.file(), first + u64::from(block)..first + u64::from(block) + 1);
        if claims.all.is_empty() {
            claims.map = None;
        }
    }
}

impl Claims {
    /// Adds a block. This open map has the lock of it.
    fn add(&mut self, block: u32, map: &Arc<File>) {
        self.all.insert(block);
        self.map.get_or_insert_with(|| LockedFile::new(map.clone(), 0..MARKING));
    }
}
