//! The blocks of files that have been read, or are to be read, before they are asked for: within a limit of bytes.

use super::sequence::{Sequence, Toward};
use crate::error::Error;
use crate::memory::Buffer;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a block: what the kernel reads at once at most, unless it was set up otherwise, where it is told that reads are
/// long. So it is one request to most servers.
pub(super) const BLOCK: u64 = 256 << 10;

/// A block: file and number.
pub(super) type BlockId = (u32, u64);

pub(super) struct HeldBlock {
    pub(super) stage: BlockStage,
    /// Callers that wait for it. Only others are dropped.
    waiting: u32,
    /// Bytes of it that were handed out.
    given: u64,
    /// When it was made, or handed out from.
    used: u64,
}

pub(super) enum BlockStage {
    Queued,
    Reading,
    Here(Arc<Buffer>),
    Failed(Error),
}

/// The state of one file.
#[derive(Default)]
pub(super) struct FileState {
    pub(super) order: Sequence,
    /// A bit for each block of which every byte was handed out: it is not read ahead again.
    done: Vec<u64>,
}

/// The blocks of all files of a handle.
pub(super) struct Blocks {
    blocks: HashMap<BlockId, HeldBlock>,
    known: HashMap<u32, FileState>,
    /// Most bytes of blocks.
    pub(super) most: u64,
    clock: u64,
}

impl Blocks {
    pub(super) fn new(most: u64) -> Blocks {
        Blocks { blocks: HashMap::new(), known: HashMap::new(), most, clock: 0 }
    }

    /// Bytes of blocks that there are, or are being read, or are about to be.
    pub(super) fn held(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK
    }

    pub(super) fn get(&mut self, place: BlockId) -> Option<&mut HeldBlock> {
        self.blocks.get_mut(&place)
    }

    /// Whether the bytes of the block are there, or on their way.
    pub(super) fn has(&self, place: BlockId) -> bool {
        self.blocks.get(&place).is_some_and(|block| !matches!(block.stage, BlockStage::Failed(_)))
    }

    /// A caller waits for this block. Whether it must be read first, before all others; `None`: there is no room for it.
    pub(super) fn want(&mut self, place: BlockId) -> Option<bool> {
        if !self.has(place) {
            if !self.blocks.contains_key(&place) && !self.make_room(true) {
                return None;
            }
            self.put(place);
        }
        let block = self.blocks.get_mut(&place)?;
        block.waiting += 1;
        Some(matches!(block.stage, BlockStage::Queued))
    }

    /// The caller waits no longer.
    pub(super) fn unwant(&mut self, place: BlockId) {
        if let Some(block) = self.blocks.get_mut(&place) {
            block.waiting = block.waiting.saturating_sub(1);
            // Nobody reads it: its job may never have been queued.
            if block.waiting == 0 && matches!(block.stage, BlockStage::Queued) {
                self.blocks.remove(&place);
            }
        }
    }

    /// A block that is to be read. One that has failed is read again, for those too that wait for it already.
    fn put(&mut self, place: BlockId) {
        self.clock += 1;
        let waiting = self.blocks.get(&place).map_or(0, |failed| failed.waiting);
        self.blocks.insert(place, HeldBlock { stage: BlockStage::Queued, waiting, given: 0, used: self.clock });
    }

    /// `nbytes` bytes of a block, which is `len` long, are handed out. After the last one the block goes.
    pub(super) fn give(&mut self, place: BlockId, nbytes: u64, len: u64) {
        self.clock += 1;
        let Some(block) = self.blocks.get_mut(&place) else { return };
        block.given += nbytes;
        block.used = self.clock;
        if block.given < len {
            return;
        }
        if block.waiting == 0 {
            self.blocks.remove(&place);
        }
        let (word, bit) = ((place.1 / 64) as usize, 1u64 << (place.1 % 64));
        let done = &mut self.known.entry(place.0).or_default().done;
        if done.len() <= word {
            done.resize(word + 1, 0);
        }
        done[word] |= bit;
    }

    /// Whether every byte of the block was handed out.
    fn is_done(&self, place: BlockId) -> bool {
        let word = self.known.get(&place.0).and_then(|known| known.done.get((place.1 / 64) as usize));
        word.is_some_and(|word| word & (1 << (place.1 % 64)) != 0)
    }

    /// `wanted` is asked for: the blocks that are to be read ahead now, nearest first. `whole` is where the tensors of the
    /// file are.
    pub(super) fn ahead(&mut self, file: u32, wanted: Range<u64>, whole: Range<u64>) -> Vec<BlockId> {
        let first = wanted.start / BLOCK;
        if self.is_done((file, first)) && !self.has((file, first)) {
            // A caller that begins anew.
            self.known.entry(file).or_default().done.clear();
        }
        let most = (self.most / 2).min(MOST_AHEAD);
        let order = &mut self.known.entry(file).or_default().order;
        let Some((direction, range)) = order.asked(wanted, whole.start, most) else { return Vec::new() };
        let range = range.start.max(whole.start)..range.end.min(whole.end);
        if range.is_empty() {
            return Vec::new();
        }
        let numbers = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let missing = |number: &u64| !self.has((file, *number)) && !self.is_done((file, *number));
        let numbers: Vec<u64> = match direction {
            Toward::Up => numbers.filter(missing).collect(),
            Toward::Down => numbers.rev().filter(missing).collect(),
        };
        let mut found = Vec::new();
        for number in numbers {
            if !self.make_room(false) {
                break;
            }
            self.put((file, number));
            found.push((file, number));
        }
        found
    }

    /// Drops blocks that were not used for longest until one more is within the limit. Whether it is. One that a caller
    /// waits for goes before those that no thread has begun to read yet.
    fn make_room(&mut self, is_wanted: bool) -> bool {
        while self.held() + BLOCK > self.most {
            let idle = |block: &HeldBlock| match block.stage {
                BlockStage::Here(_) | BlockStage::Failed(_) => block.waiting == 0,
                BlockStage::Queued => block.waiting == 0 && is_wanted,
                BlockStage::Reading => false,
            };
            // Those that nobody has asked for yet are the last to go.
            let oldest = self.blocks.iter().filter(|(_, block)| idle(block));
            match oldest.min_by_key(|(_, block)| (block.given == 0, block.used)).map(|(place, _)| *place) {
                Some(place) => self.blocks.remove(&place),
                None => return false,
            };
        }
        true
    }

    /// Drops all blocks of a file (`None`: of all files) that nobody waits for and nothing writes to, and what is known of
    /// the order.
    pub(super) fn clear(&mut self, file: Option<u32>) {
        let of = |other: u32| file.is_none_or(|file| file == other);
        self.blocks
            .retain(|place, block| !of(place.0) || block.waiting > 0 || matches!(block.stage, BlockStage::Reading));
        self.known.retain(|other, _| !of(*other));
    }
}

/// Bytes that are read ahead of a caller at most.
const MOST_AHEAD: u64 = 32 << 20;
