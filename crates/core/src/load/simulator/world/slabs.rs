//! The slabs of all ranks, and their readers: no slab is rewritten while a process that has not ended may read it.

use super::*;

/// The memory of a slab, from the moment it is acquired until it is freed. When it is acquired again, it has another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SlabName {
    pub(super) owner: u32,
    slot: usize,
    number: u32,
}

/// The reason why a rank reads a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlabUse {
    /// A copy by its device.
    Copies,
    /// A socket takes it for this rank.
    Sends(u32),
    /// It was offered to the rank.
    Offered,
    /// The rank has it on loan.
    Borrows,
}

/// The slabs of one rank.
#[derive(Default)]
struct Owned {
    out: usize,
    /// Slots that can be acquired, and the number of each slot's slab.
    free: Vec<usize>,
    numbers: Vec<u32>,
}

/// All slabs and their readers.
#[derive(Default)]
pub(super) struct SlabBook {
    of_rank: Vec<Owned>,
    readers: BTreeMap<SlabName, Vec<(u32, SlabUse)>>,
    retired: HashSet<SlabName>,
    /// By rank: parcels of other ranks whose slabs it has let go of.
    returned: Vec<Vec<u32>>,
    fault: Option<String>,
}

impl SlabBook {
    pub(super) fn new(ranks: usize) -> SlabBook {
        let of_rank = (0..ranks).map(|_| Owned::default()).collect();
        SlabBook { of_rank, returned: vec![Vec::new(); ranks], ..SlabBook::default() }
    }

    pub(super) fn take_fault(&mut self) -> Option<String> {
        self.fault.take()
    }

    fn is_wrong(&mut self, fault: String) {
        self.fault.get_or_insert(fault);
    }

    fn acquire(&mut self, owner: u32, most: usize) -> Option<SlabName> {
        let owned = &mut self.of_rank[owner as usize];
        if owned.out == most {
            return None;
        }
        owned.out += 1;
        let slot = owned.free.pop().unwrap_or_else(|| {
            owned.numbers.push(0);
            owned.numbers.len() - 1
        });
        Some(SlabName { owner, slot, number: owned.numbers[slot] })
    }

    /// It may be acquired again, and rewritten, at once. A retired slab never is: its memory goes with its last reader.
    fn free(&mut self, slab: SlabName) {
        let owned = &mut self.of_rank[slab.owner as usize];
        owned.out -= 1;
        if self.retired.contains(&slab) {
            return;
        }
        owned.numbers[slab.slot] += 1;
        owned.free.push(slab.slot);
        if let Some(readers) = self.readers.get(&slab) {
            self.is_wrong(format!("{slab:?} is free, and {readers:?} may read it"));
        }
    }

    pub(super) fn retire(&mut self, slab: SlabName) {
        self.retired.insert(slab);
    }

    /// Slabs of a rank that are in use.
    pub(super) fn out(&self, owner: u32) -> usize {
        self.of_rank[owner as usize].out
    }

    pub(super) fn begins(&mut self, slab: SlabName, rank: u32, by: SlabUse) {
        self.readers.entry(slab).or_default().push((rank, by));
    }

    pub(super) fn ends(&mut self, slab: SlabName, rank: u32, by: SlabUse) {
        if !self.is_rewritten(slab) && !self.removes(slab, |reader| *reader == (rank, by)) {
            self.is_wrong(format!("rank {rank} no longer {by:?} {slab:?}, and never did"));
        }
    }

    fn is_rewritten(&mut self, slab: SlabName) -> bool {
        let rewritten = self.of_rank[slab.owner as usize].numbers[slab.slot] != slab.number;
        if rewritten {
            self.is_wrong(format!("{slab:?} was rewritten while it was read"));
        }
        rewritten
    }

    fn removes(&mut self, slab: SlabName, which: impl Fn(&(u32, SlabUse)) -> bool) -> bool {
        let Some(readers) = self.readers.get_mut(&slab) else { return false };
        let before = readers.len();
        readers.retain(|reader| !which(reader));
        let removed = readers.len() < before;
        if readers.is_empty() {
            self.readers.remove(&slab);
        }
        removed
    }

    /// A process has ended: it reads nothing.
    pub(super) fn dies(&mut self, rank: u32) {
        let read: Vec<SlabName> = self.readers.keys().copied().collect();
        for slab in read {
            self.removes(slab, |reader| reader.0 == rank);
        }
    }

    /// Nothing of a slab is sent any more.
    pub(super) fn sends_nothing(&mut self, slab: SlabName) {
        self.removes(slab, |reader| matches!(reader.1, SlabUse::Sends(_)));
    }

    /// A rank has let go of a slab that it had on loan.
    fn gives_back(&mut self, slab: SlabName, by: u32, parcel: u32) {
        self.ends(slab, by, SlabUse::Borrows);
        if self.readers.get(&slab).is_some_and(|readers| readers.contains(&(by, SlabUse::Copies))) {
            self.is_wrong(format!("rank {by} returns {slab:?} and copies out of it"));
        }
        self.returned[by as usize].push(parcel);
    }

    /// Parcels whose slabs a rank has let go of since the last call.
    pub(super) fn take_returned(&mut self, by: u32) -> Vec<u32> {
        std::mem::take(&mut self.returned[by as usize])
    }

    /// True if this rank still holds a slab of another rank.
    pub(super) fn borrows(&self, rank: u32) -> bool {
        self.readers.values().flatten().any(|reader| *reader == (rank, SlabUse::Borrows))
    }

    /// Nobody reads a slab, and none is retired.
    pub(super) fn is_at_rest(&self) -> bool {
        self.readers.is_empty() && self.retired.is_empty()
    }
}

/// The ring of one process.
pub(super) struct RankSlabs {
    pub(super) owner: u32,
    pub(super) most: usize,
    pub(super) book: Rc<RefCell<SlabBook>>,
}

impl Slabs for RankSlabs {
    type Slab = Held;
    fn acquire(&mut self) -> Result<Option<Held>, Error> {
        let slab = self.book.borrow_mut().acquire(self.owner, self.most);
        Ok(slab.map(|slab| Held { slab, loan: None, is_apart: false, book: self.book.clone() }))
    }
}

/// A slab that an extent holds: one of its rank, or one of another rank.
pub(super) struct Held {
    pub(super) slab: SlabName,
    /// The rank that borrows it, and the parcel.
    pub(super) loan: Option<(u32, u32)>,
    /// Its read or copy hangs: it is neither free nor in use.
    pub(super) is_apart: bool,
    pub(super) book: Rc<RefCell<SlabBook>>,
}

impl Held {
    pub(super) fn set_apart(&mut self) {
        self.is_apart = true;
        let mut book = self.book.borrow_mut();
        match self.loan {
            Some((by, _)) => book.ends(self.slab, by, SlabUse::Borrows),
            None => book.of_rank[self.slab.owner as usize].out -= 1,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_apart {
            return;
        }
        let mut book = self.book.borrow_mut();
        match self.loan {
            Some((by, parcel)) => book.gives_back(self.slab, by, parcel),
            None => book.free(self.slab),
        }
    }
}
