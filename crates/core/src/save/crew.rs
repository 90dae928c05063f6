//! The threads that fill slabs and write them. The last to finish gives the files their names.

use super::chunks::{Chunk, ChunkPart, Supply};
use super::folder::{self, Folder};
use super::late::{Late, Made, Phase};
use super::output::Output;
use crate::device::api::Api;
use crate::device::fetch::{Fetch, Range};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::machine;
use crate::memory::Keep;
use crate::options::PAGE;
use crate::staging::{Lease, Share};
use crate::store::DiskUse;
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::guarded;
use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Pieces of one call (IOV_MAX).
const MOST_PIECES: usize = 1024;

/// How often a thread that waits for a slab looks whether the save was given up.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// The report of a save.
#[derive(Debug, Clone, Default)]
pub struct SaveReport {
    /// Bytes of tensors.
    pub nbytes: u64,
    /// Bytes of the files.
    pub file_bytes: u64,
    /// Files written, the index included.
    pub files: usize,
    /// From the start until all files have their names.
    pub seconds: f64,
    /// The part of it that was spent writing to the disk what the kernel still held.
    pub sync_seconds: f64,
    /// Seconds of filling slabs, summed over the crew.
    pub fill_seconds: f64,
    /// Seconds of writing, summed over the crew.
    pub write_seconds: f64,
    /// Write calls.
    pub writes: u64,
    /// Bytes written past the page cache.
    pub direct_bytes: u64,
    /// Threads that wrote.
    pub threads: usize,
    /// Staging memory.
    pub peak_staging: u64,
    /// The refusals, and their replacements.
    pub fallbacks: Vec<Fallback>,
}

pub(super) struct Work {
    pub(super) outputs: Mutex<Vec<Output>>,
    pub(super) sinks: Vec<Sink>,
    pub(super) index: Option<(PathBuf, String)>,
    pub(super) folder: PathBuf,
    pub(super) checkpoint: Option<Folder>,
    /// Names of the files, the index last.
    pub(super) names: Vec<OsString>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) pieces: Vec<ChunkPart>,
    /// The beginnings of the files; pieces point into them.
    pub(super) _heads: Vec<Vec<u8>>,
    pub(super) _keep: Keep,
    /// Where chunks are written out of slabs.
    pub(super) staging: Option<RingPlace>,
    pub(super) sync: bool,
    pub(super) next: AtomicUsize,
    pub(super) cancelled: AtomicBool,
    pub(super) began: Instant,
    pub(super) state: Mutex<SaveState>,
    pub(super) changed: Condvar,
}

/// How a file is written to. The descriptors belong to its output, which lives as long as a thread writes.
pub(super) struct Sink {
    path: PathBuf,
    cached: RawFd,
    pub(super) direct: Option<RawFd>,
    /// O_DIRECT was refused later.
    refused: AtomicBool,
    /// Chunks are written one after the other, and so many bytes are.
    in_order: bool,
    at: AtomicU64,
}

/// The save's place in the ring of slabs, until the crew has nothing more to write.
pub(super) type RingPlace = Mutex<Option<Share>>;

pub(super) struct SaveState {
    pub(super) written: u64,
    pub(super) working: usize,
    /// When a chunk was last written, or when a slab for one came after a wait.
    pub(super) moved: Instant,
    /// Slabs in use, and whether a thread of the crew waits for another.
    pub(super) slabs: usize,
    pub(super) starved: bool,
    /// The save waits for the disk, without a time limit.
    pub(super) syncing: bool,
    pub(super) late: Vec<Late>,
    /// Late tensors that are wanted, in the order of the requests.
    pub(super) wanted: VecDeque<usize>,
    pub(super) failed: Option<Error>,
    pub(super) outcome: Option<Result<()>>,
    pub(super) report: SaveReport,
}

impl Sink {
    pub(super) fn of(output: &Output) -> Sink {
        let (cached, direct) = output.descriptors();
        let (path, refused) = (output.path.clone(), AtomicBool::new(false));
        Sink { path, cached, direct, refused, in_order: output.in_order, at: AtomicU64::new(0) }
    }

    /// The descriptor to write to, and whether it is one for O_DIRECT.
    fn descriptor(&self) -> (RawFd, bool) {
        match self.direct {
            Some(fd) if !self.refused.load(Ordering::Relaxed) => (fd, true),
            _ => (self.cached, false),
        }
    }
}

impl Work {
    /// Starts so many threads, or as many as it can.
    ///
    /// # Errors
    /// `Limit` if no thread can be started.
    pub(super) fn start(self: &Arc<Self>, crew: usize) -> Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::with_capacity(crew);
        // Held until the last thread of the crew has ended.
        let disk = Arc::new(DiskUse::begin());
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
            lock(&self.state).failed.get_or_insert(e);
            // Other threads may wait for a tensor.
            self.changed.notify_all();
        }
        self.leave(1);
    }

    /// So many threads of the crew have no more to do. The last one ends the save.
    fn leave(&self, count: usize) {
        let mut state = lock(&self.state);
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
        // A file that did not get its name goes with its output.
        lock(&self.outputs).clear();
        let mut state = lock(&self.state);
        state.working = 0;
        state.report.seconds = self.began.elapsed().as_secs_f64();
        state.outcome.get_or_insert(outcome);
        self.changed.notify_all();
    }

    fn is_over(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || lock(&self.state).failed.is_some()
    }

    fn write_chunks(&self) -> Result<()> {
        let mut devices: Vec<(u32, Fetch)> = Vec::new();
        while let Some(chunk) = self.chunks.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.is_over() || !self.is_its_turn(chunk) {
                return Ok(());
            }
            // Filling ends when late tensors are there, or when the slab has everything.
            let begun = Instant::now();
            let Some(here) = self.there(&self.pieces[chunk.pieces.clone()])? else { return Ok(()) };
            let (pieces, made) = (&here[..], Instant::now());
            let (filling, writing, direct, calls) = match &self.staging {
                Some(staging) => {
                    let Some(slab) = self.slab(staging)? else { return Ok(()) };
                    let waited = made.elapsed();
                    fill(&slab.lease, pieces, &mut devices)?;
                    let filled = Instant::now();
                    let (direct, calls) = self.write(chunk, slab.lease.address())?;
                    (filled - begun - waited, filled.elapsed(), direct, calls)
                }
                None => {
                    let calls = self.write_from_place(chunk, pieces)?;
                    (made - begun, made.elapsed(), 0, calls)
                }
            };
            self.let_go(&self.pieces[chunk.pieces.clone()]);
            let mut state = lock(&self.state);
            state.written += chunk.len;
            state.moved = Instant::now();
            state.report.fill_seconds += filling.as_secs_f64();
            state.report.write_seconds += writing.as_secs_f64();
            state.report.writes += calls;
            state.report.direct_bytes += direct;
            drop(state);
            let sink = &self.sinks[chunk.file];
            if sink.in_order {
                sink.at.store(chunk.offset + chunk.len, Ordering::Relaxed);
                self.changed.notify_all();
            }
        }
        Ok(())
    }

    /// Waits until what is before the chunk is written, where that matters; `false` if the save was given up meanwhile.
    /// Chunks are taken in their order, and nothing is held meanwhile: the thread that has an earlier chunk goes on.
    fn is_its_turn(&self, chunk: &Chunk) -> bool {
        let sink = &self.sinks[chunk.file];
        if !sink.in_order {
            return true;
        }
        let mut state = lock(&self.state);
        while sink.at.load(Ordering::Relaxed) != chunk.offset {
            if self.cancelled.load(Ordering::Relaxed) || state.failed.is_some() {
                return false;
            }
            state = self.changed.wait_timeout(state, ASK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
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
            if self.is_over() {
                break Ok(None);
            }
            share.clear();
            match share.try_acquire() {
                Ok(None) => {}
                found => break found,
            }
            lock(&self.state).starved = true;
            waited = true;
            share.wait(ASK_AGAIN);
        };
        let mut state = lock(&self.state);
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

    /// The pieces, with the addresses of the late tensors; `None` if the save was given up meanwhile.
    fn there<'a>(&self, pieces: &'a [ChunkPart]) -> Result<Option<Cow<'a, [ChunkPart]>>> {
        if !pieces.iter().any(|p| matches!(p.from, Supply::Late(..))) {
            return Ok(Some(Cow::Borrowed(pieces)));
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

    /// The address of a late tensor. It is requested from the thread that waits for the save.
    fn ask(&self, number: usize) -> Result<Option<u64>> {
        let mut state = lock(&self.state);
        loop {
            if self.cancelled.load(Ordering::Relaxed) || state.failed.is_some() || state.outcome.is_some() {
                return Ok(None);
            }
            let late = &mut state.late[number];
            match &mut late.phase {
                Phase::There(made) => return Ok(Some(made.at() as u64)),
                Phase::Wanted(_) => {}
                Phase::Away => {
                    late.phase = Phase::Wanted(Made::new(late.nbytes)?);
                    state.wanted.push_back(number);
                    self.changed.notify_all();
                }
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Pieces were written: late tensors of which nothing more is written are dropped.
    fn let_go(&self, pieces: &[ChunkPart]) {
        for piece in pieces {
            if let Supply::Late(number, _) = piece.from {
                let mut state = lock(&self.state);
                let late = &mut state.late[number];
                late.left -= 1;
                if late.left == 0 {
                    let dropped = std::mem::replace(&mut late.phase, Phase::Away);
                    drop(state);
                    drop(dropped);
                }
            }
        }
    }

    /// Writes a chunk out of a slab. Returns the bytes that went past the page cache, and the number of calls.
    fn write(&self, chunk: &Chunk, from: *mut u8) -> Result<(u64, u64)> {
        let sink = &self.sinks[chunk.file];
        let padded = chunk.len.next_multiple_of(PAGE);
        // SAFETY: a slab is as long as the longest chunk, which is whole pages; it is this thread's alone.
        unsafe { from.add(chunk.len as usize).write_bytes(0, (padded - chunk.len) as usize) };
        let (mut done, mut past, mut calls) = (0, 0, 0);
        while done < chunk.len {
            let (fd, direct) = sink.descriptor();
            let len = if direct { padded } else { chunk.len } - done;
            // SAFETY: within the slab.
            let at = unsafe { from.add(done as usize) };
            // SAFETY: `len` bytes from there on are in the slab.
            let wrote = unsafe { libc::pwrite(fd, at.cast(), len as usize, (chunk.offset + done) as i64) };
            calls += 1;
            if wrote > 0 {
                done += wrote as u64;
                past += if direct { wrote as u64 } else { 0 };
                continue;
            }
            let cause = failure(wrote);
            match cause.raw_os_error() {
                Some(libc::EINTR) => {}
                // The file system refused O_DIRECT, or stopped at an odd byte.
                Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTSUP) if direct => self.refuse_direct(sink, &cause),
                _ => return Err(self.failed(chunk, &cause)),
            }
        }
        Ok((past.min(chunk.len), calls))
    }

    fn refuse_direct(&self, sink: &Sink, cause: &io::Error) {
        if !sink.refused.swap(true, Ordering::Relaxed) {
            let reason = format!("{}: {cause}", sink.path.display());
            let mut state = lock(&self.state);
            if state.report.fallbacks.is_empty() {
                state.report.fallbacks.push(Fallback { from: "O_DIRECT", to: "page cache", reason });
            }
        }
    }

    /// Writes a chunk from where its bytes are. Returns the number of calls.
    fn write_from_place(&self, chunk: &Chunk, pieces: &[ChunkPart]) -> Result<u64> {
        let (fd, _) = self.sinks[chunk.file].descriptor();
        let (mut done, mut calls) = (0, 0);
        // The piece that is being written, and how much of it is written.
        let (mut first, mut within) = (0, 0u64);
        let mut places: Vec<libc::iovec> = Vec::with_capacity(pieces.len().min(MOST_PIECES));
        while done < chunk.len {
            places.clear();
            let mut skip = within;
            for piece in pieces[first..].iter().take(MOST_PIECES) {
                let Supply::Host(at) = piece.from else {
                    return Err(Error::new(ErrorKind::Internal, "memory of a GPU was to be written from its place"));
                };
                places.push(libc::iovec { iov_base: (at + skip) as *mut _, iov_len: (piece.len - skip) as usize });
                skip = 0;
            }
            // SAFETY: every place is memory that `_keep` keeps alive, or a late tensor that is let go only afterwards.
            let wrote =
                unsafe { libc::pwritev(fd, places.as_ptr(), places.len() as i32, (chunk.offset + done) as i64) };
            calls += 1;
            if wrote <= 0 {
                let cause = failure(wrote);
                if cause.raw_os_error() == Some(libc::EINTR) {
                    continue;
                }
                return Err(self.failed(chunk, &cause));
            }
            done += wrote as u64;
            within += wrote as u64;
            while first < pieces.len() && within >= pieces[first].len {
                within -= pieces[first].len;
                first += 1;
            }
        }
        Ok(calls)
    }

    fn failed(&self, chunk: &Chunk, cause: &io::Error) -> Error {
        let range = chunk.offset..chunk.offset + chunk.len;
        Error::write("write", cause).at(&self.sinks[chunk.file].path).range(range)
    }

    /// Everything is written. Writes it to the disk if that was asked for, then gives the files their names, the index
    /// last.
    fn conclude(&self) -> Result<()> {
        let given_up = || match self.cancelled.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Cancelled, "the save was cancelled before its files had their names")),
            false => Ok(()),
        };
        given_up()?;
        let begun = Instant::now();
        let mut outputs = lock(&self.outputs);
        let mut refused = outputs.iter().map(|output| output.seal(self.sync)).collect::<Result<Vec<_>>>()?;
        if let Some((path, text)) = &self.index {
            let (output, _) = Output::new(path, text.len() as u64, false)?;
            output.write(text.as_bytes())?;
            refused.push(output.seal(self.sync)?);
            outputs.push(output);
        }
        if let Some(refused) = refused.into_iter().flatten().next() {
            lock(&self.state).report.fallbacks.push(refused);
        }
        let index = outputs.last().filter(|last| self.index.is_some() && !last.is_in_place()).map(|last| &last.path);
        lock(&self.state).report.sync_seconds = if self.sync { begun.elapsed().as_secs_f64() } else { 0.0 };
        given_up()?;
        if let Some(path) = index {
            // Shards of an earlier save are replaced one by one. While some of them are still there, its index must not
            // call them one checkpoint.
            if let Err(cause) = std::fs::remove_file(path) {
                if cause.kind() != io::ErrorKind::NotFound {
                    return Err(Error::write("remove the earlier index", &cause).at(path));
                }
            }
        }
        outputs.iter_mut().try_for_each(|output| output.publish(self.sync))?;
        if self.sync {
            let mut folders: BTreeSet<&Path> = outputs.iter().map(Output::folder).collect();
            folders.extend(self.checkpoint.iter().flat_map(|folder| &folder.with_new_names).map(PathBuf::as_path));
            folders.into_iter().try_for_each(|folder| self.settle(folder))?;
        }
        if let Some(folder) = &self.checkpoint {
            if folder.remove_earlier(&self.names)? && self.sync {
                self.settle(&folder.path)?;
            }
        }
        Ok(())
    }

    /// Writes the names in a directory to the disk.
    fn settle(&self, folder: &Path) -> Result<()> {
        if let Some(refused) = folder::sync(folder)? {
            let fallbacks = &mut lock(&self.state).report.fallbacks;
            if fallbacks.iter().all(|known| known.reason != refused.reason) {
                fallbacks.push(refused);
            }
        }
        Ok(())
    }
}

/// The lease of a slab for one chunk.
struct ChunkSlab<'a> {
    lease: Lease,
    work: &'a Work,
}

impl Drop for ChunkSlab<'_> {
    fn drop(&mut self) {
        lock(&self.work.state).slabs -= 1;
    }
}

/// The error of a call that wrote nothing.
fn failure(wrote: isize) -> io::Error {
    if wrote == 0 {
        io::Error::from_raw_os_error(libc::EIO)
    } else {
        io::Error::last_os_error()
    }
}

/// Fills a slab with pieces, one after the other.
fn fill(slab: &Lease, pieces: &[ChunkPart], devices: &mut Vec<(u32, Fetch)>) -> Result<()> {
    let mut at = 0;
    let mut fetched: Vec<(u32, Range)> = Vec::new();
    for piece in pieces {
        let len = piece.len as usize;
        match piece.from {
            // SAFETY: `_keep` keeps the source alive (a late tensor is let go only afterwards), the pieces of a chunk fit a
            // slab, and the slab is this thread's alone.
            Supply::Host(from) => unsafe { slab.address().add(at).copy_from_nonoverlapping(from as *const u8, len) },
            Supply::Gpu(ordinal, from) => fetched.push((ordinal, Range { from, to: at, len })),
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
