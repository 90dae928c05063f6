//! The neighbours' slabs that this process has mapped.

use super::memory_file::MemoryFileId;
use super::slab::Slab;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Slabs of other processes, by address. Each is mapped once. It lives as long as somebody holds it. Registering costs, so one
/// that is registered with a driver is kept here until its owner has no use for it.
#[derive(Default)]
pub(super) struct AdoptedSlabs(HashMap<usize, Adopted>);

pub(super) struct Adopted {
    pub(super) owner: [u8; 16],
    /// No other file has this identity as long as the slab is mapped.
    pub(super) file: MemoryFileId,
    slab: Weak<Slab>,
    nbytes: u64,
    /// The slab itself, if it is kept.
    kept: Option<Arc<Slab>>,
    /// Is not kept any more: it goes with its last holder.
    disowned: bool,
}

impl AdoptedSlabs {
    /// The slab over this file of this owner, which has been adopted again.
    pub(super) fn again(&mut self, owner: &[u8; 16], file: MemoryFileId) -> Option<Arc<Slab>> {
        let mut adopted = self.0.values_mut().filter(|a| a.owner == *owner && a.file == file);
        adopted.find_map(|a| {
            let slab = a.slab.upgrade()?;
            a.disowned = false;
            a.kept = (!slab.is_plain()).then(|| slab.clone());
            Some(slab)
        })
    }

    /// Another slab, over a file that none of these maps.
    pub(super) fn add(&mut self, owner: [u8; 16], file: MemoryFileId, slab: &Arc<Slab>) {
        self.0.retain(|_, a| a.slab.strong_count() > 0);
        let nbytes = slab.len() as u64;
        let adopted = Adopted { owner, file, slab: Arc::downgrade(slab), nbytes, kept: None, disowned: false };
        self.0.insert(slab.address() as usize, adopted);
    }

    /// The slab that begins at this address.
    pub(super) fn at(&self, address: usize) -> Option<Arc<Slab>> {
        self.0.get(&address)?.slab.upgrade()
    }

    /// Keeps the slab that begins at this address, unless it was disowned.
    pub(super) fn keep(&mut self, address: usize) {
        if let Some(adopted) = self.0.get_mut(&address).filter(|a| !a.disowned) {
            adopted.kept = adopted.slab.upgrade();
        }
    }

    /// Takes out the kept slabs that are `gone`. They, and those that are in use, are not kept again.
    pub(super) fn disown(&mut self, gone: impl Fn(&Adopted) -> bool) -> Vec<Arc<Slab>> {
        let gone = self.0.values_mut().filter(|a| gone(a));
        gone.filter_map(|a| {
            a.disowned = true;
            a.kept.take()
        })
        .collect()
    }

    /// Takes out the kept slabs that nobody else holds.
    pub(super) fn take_idle(&mut self) -> Vec<Arc<Slab>> {
        let idle = self.0.values_mut().filter(|a| a.kept.is_some() && a.slab.strong_count() == 1);
        idle.filter_map(|a| a.kept.take()).collect()
    }

    /// The bytes of all that are mapped.
    pub(super) fn nbytes(&self) -> u64 {
        // Without a reference: the last one unmaps the slab, and that takes no lock.
        self.0.values().filter(|a| a.slab.strong_count() > 0).map(|a| a.nbytes).sum()
    }
}
