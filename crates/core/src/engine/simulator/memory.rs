//! The simulator's memory: blocks and slabs with guard bytes around them, the ring, the bytes of files, random numbers.

use super::super::Slabs;
use crate::error::{Error, ErrorKind};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// SplitMix64 (Steele, Lea, Flood 2014): small, seedable, and good enough to shuffle completions.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Memory that nothing was written to.
pub(super) const POISON: u8 = 0xee;
const GUARD_BYTE: u8 = 0xf5;
const GUARD: usize = 64;

pub(super) fn byte_of_file(file: u32, at: u64) -> u8 {
    // Never the poison value or a guard's, so that these in a block are always a fault.
    ((at.wrapping_add(u64::from(file) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 0xe0) as u8
}

/// Real memory with guard bytes before and behind it.
pub(super) struct Memory {
    all: *mut [u8],
    len: usize,
}

impl Memory {
    pub(super) fn new(len: usize) -> Memory {
        let mut all = vec![GUARD_BYTE; len + 2 * GUARD];
        all[GUARD..GUARD + len].fill(POISON);
        Memory { all: Box::into_raw(all.into_boxed_slice()), len }
    }

    /// First byte behind the guard.
    pub(super) fn at(&self) -> *mut u8 {
        self.all.cast::<u8>().wrapping_add(GUARD)
    }

    /// The offset of `len` bytes at `address`, if they lie in it, guards included: there is something to write to.
    pub(super) fn offset(&self, address: u64, len: usize) -> Option<i64> {
        let offset = address as i64 - self.at() as i64;
        let (first, past) = (-(GUARD as i64), (self.len + GUARD) as i64);
        (offset >= first && offset + len as i64 <= past).then_some(offset)
    }

    pub(super) fn write(&mut self, offset: i64, bytes: &[u8]) {
        let at = (offset + GUARD as i64) as usize;
        assert!(at + bytes.len() <= self.len + 2 * GUARD);
        // SAFETY: inside the allocation, and the simulator has one thread.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.all.cast::<u8>().add(at), bytes.len()) };
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation lives as long as `self`, and nothing is written while the slice is held.
        unsafe { std::slice::from_raw_parts(self.at(), self.len) }
    }

    pub(super) fn fill(&mut self, byte: u8) {
        self.write(0, &vec![byte; self.len]);
    }

    pub(super) fn guards_are_intact(&self) -> bool {
        // SAFETY: as in `bytes`.
        let all = unsafe { &*self.all };
        all[..GUARD].iter().chain(&all[GUARD + self.len..]).all(|&b| b == GUARD_BYTE)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` and freed once.
        drop(unsafe { Box::from_raw(self.all) });
    }
}

/// Bytes of a slab.
pub(super) const SLAB: u64 = 64;

/// The simulated ring: the slabs, which of them are free, and what went wrong.
pub(super) struct Pool {
    pub(super) slabs: Vec<Memory>,
    pub(super) free: Vec<usize>,
    /// Other loads hold all that are free.
    pub(super) withheld: bool,
    pub(super) in_use: HashMap<usize, u32>,
    /// The ring has no memory for the next slab that is asked for.
    pub(super) fails: bool,
    pub(super) fault: Option<String>,
}

impl Pool {
    pub(super) fn new(slabs: usize) -> Pool {
        Pool {
            slabs: (0..slabs).map(|_| Memory::new(SLAB as usize)).collect(),
            free: (0..slabs).collect(),
            withheld: false,
            in_use: HashMap::new(),
            fails: false,
            fault: None,
        }
    }

    /// Whether a load would get a slab now.
    pub(super) fn has_some(&self) -> bool {
        !self.free.is_empty() && !self.withheld
    }
}

/// A lease on a slab.
pub(super) struct Slab {
    pub(super) id: usize,
    pool: Rc<RefCell<Pool>>,
}

impl Slab {
    pub(super) fn at(&self) -> *mut u8 {
        self.pool.borrow().slabs[self.id].at()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let mut pool = self.pool.borrow_mut();
        if let Some(extent) = pool.in_use.get(&self.id).copied() {
            pool.fault.get_or_insert(format!("slab {} released while extent {extent} is in flight in it", self.id));
        }
        if pool.free.contains(&self.id) {
            pool.fault.get_or_insert(format!("slab {} released twice", self.id));
        }
        pool.slabs[self.id].fill(POISON);
        pool.free.push(self.id);
    }
}

pub(super) struct Ring(pub(super) Rc<RefCell<Pool>>);

impl Slabs for Ring {
    type Slab = Slab;
    fn acquire(&mut self) -> Result<Option<Slab>, Error> {
        let mut pool = self.0.borrow_mut();
        if pool.has_some() && std::mem::take(&mut pool.fails) {
            return Err(Error::new(ErrorKind::OutOfMemory, "simulated"));
        }
        let id = if pool.has_some() { pool.free.pop() } else { None };
        Ok(id.map(|id| Slab { id, pool: self.0.clone() }))
    }
}
