//! The threads that fill slabs and write them. The last to finish gives the files their names.

use super::chunks::{Chunk, ChunkPart, Supply};
use super::late::{may_be_made, Made, Phase};
use super::shared::{SaveShared, SaveState};
use super::snapshot::Snapshot;
use super::target::{SaveTarget, Written};
use crate::device::api::Api;
use crate::device::fetch::{Fetch, Range};
use crate::error::{Error, ErrorKind, Result};
use crate::machine;
use crate::memory::Keep;
use crate::staging::{Lease, Share};
use crate::store::{DiskUse, SteadyFile};
use crate::sync::{lock, Builder, JoinHandle, Mutex};
use crate::threads::guarded;
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How often a thread that waits for a slab looks whether the save was given up.
const ASK_AGAIN: Duration = Duration::from_millis(50);

pub(super) struct Work {
    pub(super) target: Box<dyn SaveTarget>,
    pub(super) shared: SaveShared,
    /// Bytes that late tensors in memory may have, if no chunk needs more.
    pub(super) room: u64,
    pub(super) chunks: Vec<Chunk>,
    pub(super) pieces: Vec<ChunkPart>,
    /// Bytes of each file that are written, where its chunks are written one after the other.
    pub(super) written: Vec<AtomicU64>,
    /// The beginnings of the files; pieces point into them.
    pub(super) _heads: Vec<Vec<u8>>,
    /// Keeps the tensors' memory alive, until nothing reads it any more.
    pub(super) keep: Mutex<Option<Keep>>,
    /// The files that have the bytes of pieces.
    pub(super) sources: Vec<Arc<SteadyFile>>,
    /// Where chunks are filled in slabs.
    pub(super) staging: Option<RingPlace>,
    /// True if chunks are written out of slabs.
    pub(super) is_staged: bool,
    /// The memory that everything is copied to first.
    pub(super) snapshot: Option<Snapshot>,
    /// True if the owner makes late tensors in an order of its own, ahead of the crew.
    pub(super) ahead: bool,
    /// True if this rank has a part of the files.
    pub(super) is_share: bool,
    pub(super) next: AtomicUsize,
}

/// The save's place in the ring of slabs, until the crew has nothing more to write.
pub(super) type RingPlace = Mutex<Option<Share>>;

impl Work {
    /// Starts so many threads, or as many as it can.
    ///
    /// # Errors
    /// `Limit` if no thread can be started.
    pub(super) fn start(self: &Arc<Self>, crew: usize) -> Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::with_capacity(crew);
        // Held until the last thread of the crew has ended.
        let disk = Arc::new(self.target.uses_disk().then(DiskUse::begin));
        let here = if crew == 1 { machine::processor() } else { None };
        while threads.len() < crew {
            let (theirs, held) = (self.clone(), disk.clone());
            let body = move || {
                // The caller waits from now on, and memory that it has just used and freed is at hand on its core: one
                // writer takes a quarter less time there than on another core (docs/performance-notes.md).
                if let Some(core) = here {
                    machine::go_to(core);
                }
                theirs.serve();
                drop(held);
            };
            match Builder::new().name("penstock-save".into()).spawn(body) {
                Ok(thread) => threads.push(thread),
                // Fewer threads do the work too. Without any thread it cannot be done.
                Err(_) if !threads.is_empty() => {
                    self.leave(crew - threads.len());
                    break;
                }
                Err(cause) => {
                    let text = format!("cannot start a thread that writes: {cause}");
                    return Err(Error::new(ErrorKind::Limit, text));
                }
            }
        }
        Ok(threads)
    }

    /// The body of a thread of the crew.
    fn serve(&self) {
        let result = guarded("penstock-save", || self.write_chunks()).and_then(|written| written);
        if let Err(e) = result {
            lock(&self.shared.state).failed.get_or_insert(e);
            // Other threads may wait for a tensor.
            self.shared.changed.notify_all();
        }
        self.leave(1);
    }

    /// So many threads of the crew have no more to do. The last one ends the save.
    fn leave(&self, count: usize) {
        let mut state = lock(&self.shared.state);
        if state.working > count {
            state.working -= count;
            return;
        }
        let failed = state.failed.take();
        state.syncing = true;
        drop(state);
        if let Some(staging) = &self.staging {
            // The parts of other loads in the ring grow now, not when the save is closed.
            drop(lock(staging).take());
        }
        let outcome = match failed {
            Some(e) => Err(e),
            None => guarded("penstock-save", || self.conclude()).and_then(|done| done),
        };
        // A panic here would leave the owner waiting.
        let cleared = guarded("penstock-save", || self.target.clear(&self.shared, outcome.is_ok()));
        let left = cleared.unwrap_or_default();
        let outcome = outcome.map_err(|e| match left.is_empty() {
            true => e,
            false => e.reworded(|why| format!("{why}; these could not be cleared: {}", left.join(", "))),
        });
        lock(&self.shared.state).rested = true;
        // An ended save may stay with its owner for its report.
        let released = guarded("penstock-save", || self.release());
        let outcome = outcome.and(released);
        let mut state = lock(&self.shared.state);
        state.working = 0;
        state.report.seconds = self.shared.began.elapsed().as_secs_f64();
        state.outcome.get_or_insert(outcome);
        self.shared.changed.notify_all();
    }

    /// Lets go of the tensors, the snapshot and packed tensors, once the crew has ended. The memory of a tensor that the owner
    /// packs now stays until that is done or the save is closed.
    pub(super) fn release(&self) {
        let mut state = lock(&self.shared.state);
        if !state.rested || !state.wanted.is_empty() {
            return;
        }
        let packed: Vec<Phase> =
            state.late.iter_mut().map(|late| std::mem::replace(&mut late.phase, Phase::Away)).collect();
        state.held = 0;
        drop(state);
        drop(packed);
        if let Some(snapshot) = &self.snapshot {
            snapshot.release();
        }
        self.let_go_of_tensors();
    }

    /// The owner's tensors may need a lock of its own to be dropped: none of ours is held meanwhile.
    fn let_go_of_tensors(&self) {
        let keep = lock(&self.keep).take();
        drop(keep);
    }

    /// Everything is written, if it is of one version: gives the files their names. Those of one rank wait for those of the others.
    fn conclude(&self) -> Result<()> {
        self.sources.iter().try_for_each(|file| file.verify())?;
        if self.is_share {
            if self.shared.is_over() {
                return Err(Error::new(ErrorKind::Cancelled, "the save was given up before its files were whole"));
            }
            self.target.seal(&self.shared)?;
            self.shared.hold()?;
        }
        self.target.conclude(&self.shared)
    }

    fn write_chunks(&self) -> Result<()> {
        let mut devices: Vec<(u32, Fetch)> = Vec::new();
        if let Some(snapshot) = &self.snapshot {
            if !self.copy_chunks(snapshot, &mut devices)? {
                return Ok(());
            }
        }
        while let Some((number, chunk)) = self.take_chunk() {
            if self.shared.is_over() || !self.is_its_turn(chunk) || !self.write_chunk(number, chunk, &mut devices)? {
                return Ok(());
            }
            if self.snapshot.is_none() {
                self.let_go(&self.pieces[chunk.pieces.clone()]);
                self.shared.take_one(self.chunks.len());
            }
            self.has_written(number, chunk);
        }
        Ok(())
    }

    /// The next chunk to be written, with its number.
    fn take_chunk(&self) -> Option<(usize, &Chunk)> {
        let mut state = lock(&self.shared.state);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let chunk = self.chunks.get(number)?;
        state.under_way.insert(number);
        Some((number, chunk))
    }

    /// A chunk was written: others may wait for that.
    fn has_written(&self, number: usize, chunk: &Chunk) {
        let mut state = lock(&self.shared.state);
        state.under_way.remove(&number);
        let in_order = self.target.is_in_order(chunk.file);
        if in_order {
            self.written[chunk.file].store(chunk.offset + chunk.len, Ordering::Relaxed);
        }
        if in_order || !state.late.is_empty() {
            drop(state);
            self.shared.changed.notify_all();
        }
    }

    /// Writes a chunk, and counts it; `false` if the save was given up meanwhile.
    fn write_chunk(&self, number: usize, chunk: &Chunk, devices: &mut Vec<(u32, Fetch)>) -> Result<bool> {
        // Filling ends when late tensors are there, or when the slab has everything.
        let begun = Instant::now();
        let here = match &self.snapshot {
            Some(snapshot) => Cow::Owned(vec![snapshot.piece(chunk)]),
            None => match self.there(number, &self.pieces[chunk.pieces.clone()])? {
                Some(here) => here,
                None => return Ok(false),
            },
        };
        let (pieces, made) = (&here[..], Instant::now());
        let (filling, writing, Written { direct, calls }) = match self.staging.as_ref().filter(|_| self.is_staged) {
            Some(staging) => {
                let Some(slab) = self.slab(staging)? else { return Ok(false) };
                let waited = made.elapsed();
                fill(&slab.lease, pieces, &self.sources, devices)?;
                let filled = Instant::now();
                let written = self.target.write(&self.shared, chunk, slab.lease.address())?;
                (filled - begun - waited, filled.elapsed(), written)
            }
            None => {
                let written = self.target.write_from_place(&self.shared, chunk, pieces)?;
                (made - begun, made.elapsed(), written)
            }
        };
        let mut state = lock(&self.shared.state);
        state.written += chunk.len;
        state.moved = Instant::now();
        state.report.fill_seconds += filling.as_secs_f64();
        state.report.write_seconds += writing.as_secs_f64();
        state.report.writes += calls;
        state.report.direct_bytes += direct;
        Ok(true)
    }

    /// Copies all chunks to the snapshot, with the other threads of the crew; `false` if the save was given up meanwhile.
    fn copy_chunks(&self, snapshot: &Snapshot, devices: &mut Vec<(u32, Fetch)>) -> Result<bool> {
        while let Some(chunk) = self.chunks.get(snapshot.next.fetch_add(1, Ordering::Relaxed)) {
            if self.shared.is_over() || !self.copy_chunk(snapshot, chunk, devices)? {
                return Ok(false);
            }
            self.let_go(&self.pieces[chunk.pieces.clone()]);
            if self.shared.take_one(self.chunks.len()) {
                self.let_go_of_tensors();
                if let Some(staging) = self.staging.as_ref().filter(|_| !self.is_staged) {
                    drop(lock(staging).take());
                }
            }
        }
        let mut state = lock(&self.shared.state);
        while !state.copied {
            if self.shared.cancelled.load(Ordering::Relaxed) || state.failed.is_some() {
                return Ok(false);
            }
            state = self.shared.changed.wait_timeout(state, ASK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    fn copy_chunk(&self, snapshot: &Snapshot, chunk: &Chunk, devices: &mut Vec<(u32, Fetch)>) -> Result<bool> {
        let begun = Instant::now();
        let Some(here) = self.there(0, &self.pieces[chunk.pieces.clone()])? else { return Ok(false) };
        let (mut waited, is_on_gpu) = (Duration::ZERO, here.iter().any(|piece| matches!(piece.from, Supply::Gpu(..))));
        match self.staging.as_ref().filter(|_| is_on_gpu) {
            Some(staging) => {
                let waiting = Instant::now();
                let Some(slab) = self.slab(staging)? else { return Ok(false) };
                waited = waiting.elapsed();
                fill(&slab.lease, &here, &self.sources, devices)?;
                let filled = ChunkPart { from: Supply::Host(slab.lease.address() as u64), len: chunk.len };
                snapshot.take(chunk, &[filled])?;
            }
            None => snapshot.take(chunk, &here)?,
        }
        lock(&self.shared.state).report.fill_seconds += (begun.elapsed() - waited).as_secs_f64();
        Ok(true)
    }

    /// Waits until what is before the chunk is written, where that matters; `false` if the save was given up meanwhile.
    /// Chunks are taken in their order, and nothing is held meanwhile: the thread that has an earlier chunk goes on.
    fn is_its_turn(&self, chunk: &Chunk) -> bool {
        if !self.target.is_in_order(chunk.file) {
            return true;
        }
        let mut state = lock(&self.shared.state);
        while self.written[chunk.file].load(Ordering::Relaxed) != chunk.offset {
            if self.shared.cancelled.load(Ordering::Relaxed) || state.failed.is_some() {
                return false;
            }
            state = self.shared.changed.wait_timeout(state, ASK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// A slab for one chunk; `None` if the save was given up meanwhile. One thread of the crew waits for the ring,
    /// which notifies once per load. The others wait for that thread.
    fn slab<'a>(&'a self, staging: &RingPlace) -> Result<Option<ChunkSlab<'a>>> {
        let place = lock(staging);
        let Some(share) = &*place else { return Ok(None) };
        let mut waited = false;
        let found = loop {
            if self.shared.is_over() {
                break Ok(None);
            }
            share.clear();
            match share.try_acquire() {
                Ok(None) => {}
                found => break found,
            }
            lock(&self.shared.state).starved = true;
            waited = true;
            share.wait(ASK_AGAIN);
        };
        let mut state = lock(&self.shared.state);
        state.starved = false;
        let Some(lease) = found? else { return Ok(None) };
        state.slabs += 1;
        state.report.peak_staging = share.peak();
        if waited {
            // The time was not spent by the storage.
            state.moved = Instant::now();
        }
        Ok(Some(ChunkSlab { lease, work: self }))
    }

    /// The pieces of a chunk, with the addresses of the late tensors; `None` if the save was given up meanwhile.
    fn there<'a>(&self, number: usize, pieces: &'a [ChunkPart]) -> Result<Option<Cow<'a, [ChunkPart]>>> {
        if !pieces.iter().any(|p| matches!(p.from, Supply::Late(..))) {
            return Ok(Some(Cow::Borrowed(pieces)));
        }
        // An owner that works ahead, and a snapshot, have bounds of their own.
        if !self.ahead && self.snapshot.is_none() && !self.begin_all(number, pieces)? {
            return Ok(None);
        }
        let mut here = pieces.to_vec();
        for piece in &mut here {
            if let Supply::Late(number, skip) = piece.from {
                let Some(address) = self.ask(number)? else { return Ok(None) };
                piece.from = Supply::Host(address + skip);
            }
        }
        Ok(Some(Cow::Owned(here)))
    }

    /// Waits until the late tensors of a chunk may be made, and requests them; `false` if the save was given up meanwhile.
    fn begin_all(&self, chunk: usize, pieces: &[ChunkPart]) -> Result<bool> {
        let number = |piece: &ChunkPart| match piece.from {
            Supply::Late(number, _) => Some(number),
            _ => None,
        };
        let wanted: Vec<usize> = pieces.iter().filter_map(number).collect();
        let mut state = lock(&self.shared.state);
        loop {
            if self.shared.cancelled.load(Ordering::Relaxed) || state.failed.is_some() || state.outcome.is_some() {
                return Ok(false);
            }
            let is_first = state.under_way.first().is_none_or(|first| *first >= chunk);
            if may_be_made(&state.late, &wanted, state.held, self.room, is_first) {
                break;
            }
            state = self.shared.changed.wait_timeout(state, ASK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
        for number in wanted {
            if state.late[number].is_due() {
                self.begin_late(&mut state, number)?;
            }
        }
        Ok(true)
    }

    /// The address of a late tensor. It is requested from the thread that waits for the save.
    fn ask(&self, number: usize) -> Result<Option<u64>> {
        let mut state = lock(&self.shared.state);
        loop {
            if self.shared.cancelled.load(Ordering::Relaxed) || state.failed.is_some() || state.outcome.is_some() {
                return Ok(None);
            }
            let late = &mut state.late[number];
            match &mut late.phase {
                Phase::There(made) => return Ok(Some(made.at() as u64)),
                Phase::Wanted(_) => {}
                Phase::Away if self.ahead => {
                    if !std::mem::replace(&mut state.hungry, true) {
                        self.shared.changed.notify_all();
                    }
                }
                Phase::Away => self.begin_late(&mut state, number)?,
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A late tensor is wanted now.
    pub(super) fn begin_late(&self, state: &mut SaveState, number: usize) -> Result<()> {
        let late = &mut state.late[number];
        let made = match &self.snapshot {
            Some(snapshot) => Made::Placed(snapshot.place(late.place.0, late.place.1)),
            None => Made::new(late.nbytes)?,
        };
        let held = made.nbytes();
        late.phase = Phase::Wanted(made);
        state.held += held;
        state.wanted.push_back(number);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Pieces were written: late tensors of which nothing more is written are dropped.
    fn let_go(&self, pieces: &[ChunkPart]) {
        for piece in pieces {
            if let Supply::Late(number, _) = piece.from {
                let mut state = lock(&self.shared.state);
                let late = &mut state.late[number];
                late.left -= 1;
                if late.left == 0 {
                    let held = late.held();
                    let dropped = std::mem::replace(&mut late.phase, Phase::Away);
                    state.held -= held;
                    drop(state);
                    drop(dropped);
                    self.shared.changed.notify_all(); // there may be room for others
                }
            }
        }
    }
}

/// The lease of a slab for one chunk.
struct ChunkSlab<'a> {
    lease: Lease,
    work: &'a Work,
}

impl Drop for ChunkSlab<'_> {
    fn drop(&mut self) {
        lock(&self.work.shared.state).slabs -= 1;
    }
}

/// Fills a slab with pieces, one after the other.
fn fill(
    slab: &Lease,
    pieces: &[ChunkPart],
    sources: &[Arc<SteadyFile>],
    devices: &mut Vec<(u32, Fetch)>,
) -> Result<()> {
    let mut at = 0;
    let mut fetched: Vec<(u32, Range)> = Vec::new();
    for piece in pieces {
        let len = piece.len as usize;
        match piece.from {
            // SAFETY: `keep` keeps the source alive (a late tensor is let go only afterwards), the pieces of a chunk fit a
            // slab, and the slab is this thread's alone.
            Supply::Host(from) => unsafe { slab.address().add(at).copy_from_nonoverlapping(from as *const u8, len) },
            Supply::Gpu(ordinal, from) => fetched.push((ordinal, Range { from, to: at, len })),
            Supply::File(number, from) => {
                let none = || Error::new(ErrorKind::Internal, "a file of a save is not open; please report this");
                let file = sources.get(number).ok_or_else(none)?;
                // SAFETY: the pieces of a chunk fit a slab, and the slab is this thread's alone.
                unsafe { file.read(from, slab.address().add(at), len) }?;
            }
            Supply::Late(..) => return Err(Error::new(ErrorKind::Internal, "a late tensor was not made")),
        }
        at += len;
    }
    while let Some(&(ordinal, ..)) = fetched.first() {
        let device = match devices.iter().position(|d| d.0 == ordinal) {
            Some(known) => known,
            None => {
                devices.push((ordinal, Fetch::new(&Api::load()?, ordinal)?));
                devices.len() - 1
            }
        };
        let mine: Vec<Range> = fetched.iter().filter(|f| f.0 == ordinal).map(|f| f.1).collect();
        devices[device].1.fetch(slab, &mine)?;
        fetched.retain(|f| f.0 != ordinal);
    }
    Ok(())
}
