//! The disk that the processes share, and the buffers of each.

use super::super::flow::mutated::{CacheBlock, Claimed};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Memory that nothing was written to.
const POISON: u8 = 0xee;

/// The blocks and the claims of a folder.
#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) written: BTreeMap<CacheBlock, Vec<u8>>,
    /// The holders of claims.
    pub(super) claims: BTreeMap<CacheBlock, u32>,
    /// The processes that have taken blocks over from silent holders.
    pub(super) taken: BTreeMap<CacheBlock, u32>,
    /// How often each process has received something.
    pub(super) beats: BTreeMap<u32, u64>,
    pub(super) full: bool,
    /// How often each block was asked of the server, by all processes.
    pub(super) asked: BTreeMap<CacheBlock, u64>,
    /// Something has failed, was dropped or stopped: a block may be asked for twice.
    pub(super) disturbed: bool,
}

impl Disk {
    /// An answer to a look.
    pub(super) fn state(&self, block: CacheBlock) -> Claimed {
        match self.holder(block) {
            _ if self.written.contains_key(&block) => Claimed::There,
            Some(holder) => Claimed::Theirs(holder),
            None => Claimed::Missing,
        }
    }

    /// The process that brings a block.
    pub(super) fn holder(&self, block: CacheBlock) -> Option<u32> {
        self.taken.get(&block).or_else(|| self.claims.get(&block)).copied()
    }

    /// A process is gone.
    pub(super) fn loses(&mut self, process: u32) {
        self.claims.retain(|_, holder| *holder != process);
        self.taken.retain(|_, holder| *holder != process);
    }

    /// Ends a claim, if this process has it.
    pub(super) fn unclaim(&mut self, block: CacheBlock, holder: u32) -> bool {
        for claims in [&mut self.taken, &mut self.claims] {
            if claims.get(&block) == Some(&holder) {
                claims.remove(&block);
                return true;
            }
        }
        false
    }
}

/// The buffers of a process: those in use, with their blocks.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) free: usize,
    pub(super) used: BTreeMap<usize, Option<CacheBlock>>,
    next: usize,
}

impl Pool {
    pub(super) fn new(buffers: usize) -> Rc<RefCell<Pool>> {
        Rc::new(RefCell::new(Pool { free: buffers, used: BTreeMap::new(), next: 0 }))
    }

    /// A free buffer.
    pub(super) fn take(pool: &Rc<RefCell<Pool>>, nbytes: usize) -> Option<Rc<Memory>> {
        let mut it = pool.borrow_mut();
        it.free = it.free.checked_sub(1)?;
        let number = it.next;
        it.next += 1;
        it.used.insert(number, None);
        let bytes = RefCell::new(vec![POISON; nbytes]);
        Some(Rc::new(Memory { pool: pool.clone(), number, block: Cell::new(None), bytes }))
    }
}

/// A buffer in use.
#[derive(Debug)]
pub(super) struct Memory {
    pool: Rc<RefCell<Pool>>,
    number: usize,
    pub(super) block: Cell<Option<CacheBlock>>,
    pub(super) bytes: RefCell<Vec<u8>>,
}

impl Memory {
    /// Gives it a block. False: it has one.
    pub(super) fn is_for(&self, block: CacheBlock) -> bool {
        self.pool.borrow_mut().used.insert(self.number, Some(block));
        self.block.replace(Some(block)).is_none()
    }

    /// Puts a block's bytes into it, as far as this.
    pub(super) fn fill(&self, bytes: &[u8]) {
        self.bytes.borrow_mut()[..bytes.len()].copy_from_slice(bytes);
    }

    /// It has these bytes.
    pub(super) fn has(&self, bytes: &[u8]) -> bool {
        self.bytes.borrow()[..bytes.len()] == *bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut pool = self.pool.borrow_mut();
        pool.free += 1;
        pool.used.remove(&self.number);
    }
}
