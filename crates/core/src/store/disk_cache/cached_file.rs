//! An object of a load, with its entry in the cache: its blocks are read and written here, its room is made, and it is offered to
//! huggingface_hub's cache.

use super::hub::HubPlace;
use super::progress::CacheProgress;
use super::publish::{PublishJob, Publisher};
use super::{BlockState, CacheEntry, CacheFolder, BLOCK};
use crate::error::{Error, ErrorKind, Result};
use crate::store::object::Object;
use crate::store::watch::hearing;
use crate::sync::{lock, Mutex};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

/// Bytes for which room is made at once.
const ROOM: u64 = 256 << 20;

/// An object of a load, with its entry in the cache.
#[derive(Debug)]
pub(super) struct CachedFile {
    pub(super) folder: Arc<CacheFolder>,
    pub(super) entry: Arc<CacheEntry>,
    pub(super) object: Object,
    /// Its place in the Hub's cache, if it has one.
    hub: Option<Arc<HubPlace>>,
    /// The entry with a new data file: see [`CacheFolder::renew`].
    renewed: Mutex<Option<Arc<CacheEntry>>>,
    /// Held by the thread that makes it.
    renewing: Mutex<()>,
    /// It is on its way there.
    offered: AtomicBool,
    /// Bytes for which room was made and which were not written yet.
    room: AtomicU64,
    /// There is no more room for it.
    full: AtomicBool,
    /// Another process has been evicting for longer than it was waited for.
    others_evict: AtomicBool,
    /// Written and not synced.
    pub(super) unsynced: AtomicU64,
    /// Writes in the queue.
    pub(super) writes: AtomicUsize,
    /// Sources of the load that run.
    pub(super) sources: AtomicUsize,
}

impl CachedFile {
    pub(super) fn new(
        folder: Arc<CacheFolder>,
        entry: Arc<CacheEntry>,
        object: Object,
        hub: Option<HubPlace>,
    ) -> CachedFile {
        CachedFile {
            folder,
            entry,
            object,
            hub: hub.map(Arc::new),
            renewed: Mutex::default(),
            renewing: Mutex::default(),
            offered: AtomicBool::new(false),
            room: AtomicU64::new(0),
            full: AtomicBool::new(false),
            others_evict: AtomicBool::new(false),
            unsynced: AtomicU64::new(0),
            writes: AtomicUsize::new(0),
            sources: AtomicUsize::new(0),
        }
    }

    /// Has it brought to its place in the Hub's cache, if it has one, and is whole.
    pub(super) fn offer(&self, progress: &Arc<CacheProgress>) {
        let Some(place) = self.hub.as_ref().filter(|_| !self.offered.load(Ordering::Relaxed)) else { return };
        let entry = self.written();
        if !entry.is_complete().unwrap_or_default() || self.offered.swap(true, Ordering::Relaxed) {
            return;
        }
        let place = match Arc::ptr_eq(&entry, &self.entry) {
            true => place.clone(),
            false => Arc::new(place.in_place_of(&self.entry)),
        };
        Publisher::process().add(PublishJob {
            place,
            folder: self.folder.clone(),
            key: self.entry.key(),
            version: self.entry.header().version.clone(),
            size: self.entry.size(),
            progress: progress.clone(),
            _pending: progress.pending(),
        });
    }

    /// A source of the load begins.
    pub(super) fn load_begins(&self) {
        self.sources.fetch_add(1, Ordering::SeqCst);
    }

    /// True if blocks of it can still be written.
    pub(super) fn is_writable(&self) -> bool {
        self.folder.is_writable() && !self.full.load(Ordering::Relaxed)
    }

    /// Bytes of a block.
    pub(super) fn block_len(&self, block: u32) -> usize {
        let range = self.entry.range(block);
        (range.end - range.start) as usize
    }

    /// Makes room for one block more.
    fn make_room(&self) -> Result<()> {
        let taken = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(BLOCK));
        if taken.is_ok() {
            return Ok(());
        }
        let all = self.entry.size().div_ceil(BLOCK) * BLOCK;
        let wait = !self.others_evict.load(Ordering::Relaxed);
        for bytes in [ROOM.min(all), BLOCK] {
            let made = self.folder.make_room_beside(bytes, wait);
            let others_evict = made.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout);
            // It is waited for once. Later blocks are dropped without a wait, until it has ended: it may be stopped.
            self.others_evict.store(others_evict, Ordering::Relaxed);
            if made? {
                self.room.fetch_add(bytes - BLOCK, Ordering::Relaxed);
                return Ok(());
            }
        }
        self.full.store(true, Ordering::Relaxed);
        Err(Error::new(
            ErrorKind::Limit,
            "the disk cache has no room left: disk_cache_size or disk_cache_free is reached",
        ))
    }

    /// Reads a block, and compares it with its checksum if the settings say so. One that is bad is missing from now on.
    pub(super) fn read(&self, block: u32, into: &mut [u8]) -> Result<()> {
        // A hole in the data file reads as zeros.
        let is_there = || Ok::<_, Error>(self.entry.state(block)? == BlockState::There);
        let gone = || Error::new(ErrorKind::NotFound, "a block of the disk cache is there no longer");
        if !is_there()? {
            return Err(gone());
        }
        self.entry.read(self.entry.range(block), into)?;
        if !is_there()? {
            return Err(gone());
        }
        if self.folder.settings.verify && !self.entry.verify_bytes(block, into)? {
            self.entry.forget(block)?;
            return Err(Error::new(ErrorKind::Io, "a block of the disk cache does not have its checksum"));
        }
        Ok(())
    }

    /// Writes a block, which ends its claim.
    pub(super) fn write(&self, block: u32, bytes: &[u8]) -> Result<()> {
        let room = self.make_room();
        let others_evict = room.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout);
        let written = room.and_then(|()| self.to_write()).and_then(|entry| entry.write(block, bytes));
        // A disk that is full, or fails, is not tried again for this object. At the next block descriptors may be free, or room.
        if written.as_ref().is_err_and(|e| !lacks_descriptors(e)) && !others_evict {
            self.full.store(true, Ordering::Relaxed);
        }
        self.entry.release(block);
        written
    }

    /// The entry that blocks are written to. It has a new data file if huggingface_hub's cache has the old one too.
    fn to_write(&self) -> Result<Arc<CacheEntry>> {
        let renewed = || lock(&self.renewed).clone();
        if let Some(entry) = renewed() {
            return Ok(entry);
        }
        if !self.entry.is_linked()? {
            return Ok(self.entry.clone());
        }
        // It takes long: no load waits for the lock of the result.
        let _renewing = lock(&self.renewing);
        if let Some(entry) = renewed() {
            return Ok(entry);
        }
        let entry = self.folder.renew(&self.entry)?;
        *lock(&self.renewed) = Some(entry.clone());
        Ok(entry)
    }

    /// The entry that has all blocks that were written.
    pub(super) fn written(&self) -> Arc<CacheEntry> {
        lock(&self.renewed).clone().unwrap_or_else(|| self.entry.clone())
    }

    /// Does work that asks the server for blocks of it. Other processes see when bytes come.
    pub(super) fn heard<T>(&self, work: impl FnOnce() -> T) -> T {
        let (folder, number) = (self.folder.clone(), self.entry.number());
        hearing(move || folder.beats.iter().for_each(|beats| beats.beat(number)), work)
    }
}

/// True if this process has as many files open as it may. What uses them closes them soon.
pub(super) fn lacks_descriptors(e: &Error) -> bool {
    matches!(e.errno(), Some(libc::EMFILE | libc::ENFILE))
}
