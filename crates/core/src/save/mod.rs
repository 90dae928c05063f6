//! Saving: tensors of this process become safetensors files.
//!
//! A [`SavePlan`] says what stands where; a [`Save`] writes it. A crew of threads takes the files' chunks in turn. To
//! stable storage, each thread takes a slab of the ring for a chunk, fills it (on the CPU by copying, from a GPU by the
//! driver), writes it with O_DIRECT and gives it back. One thread fills while others write. To the page cache, tensors
//! in memory of this process are written from where they are. The last thread to finish gives the files their names.
//! Until then there is nothing that could be taken for a checkpoint, and the old files are untouched.
//!
//! Tensors that are not in memory as the file needs them ([`At::Late`]) are requested when their turn comes, from the
//! thread that waits for the save: no thread of the crew calls foreign code. A chunk takes its slab after its late
//! tensors are there. So nothing holds staging while a tensor is made. Making it may take long, and may itself load or
//! save.
//!
//! The slabs, one per thread of the crew, and the late tensors that are partly written bound the memory. The stall
//! timeout bounds how long a write may hang, or other loads may keep the staging.

mod folder;
mod in_place;
mod output;
mod plan;

pub use plan::{Arrangement, FilePlan, SavePlan, Tensor};

use crate::device::api::Api;
use crate::device::fetch::{Fetch, Range};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::machine;
use crate::memory::{Anonymous, Keep};
use crate::options::{Options, HUGE_PAGE, PAGE};
use crate::staging::{Lease, Ring, Share};
use crate::store::DiskUse;
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::guarded;
use folder::Folder;
use output::{check_room, Output};
use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Writers past the page cache: so many chunks keep a drive busy while others are being filled.
const DIRECT_WRITERS: usize = 8;
/// Writers into the page cache. A file system lets only one of them write to a file at a time.
const CACHE_WRITERS: usize = 4;
/// Files that are written side by side.
const SIDE_BY_SIDE: usize = 4;
/// Pieces of one call (IOV_MAX).
const MOST_PIECES: usize = 1024;
/// Slabs that the ring grants whatever the limit is.
const LEAST_SLABS: u64 = 2;
/// How often a thread that waits for a slab looks whether the save was given up.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// How long dropping a save waits for writes in progress.
const GRACE: Duration = Duration::from_secs(2);

/// Where a tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// In memory of this process.
    Host(u64),
    /// In memory of GPU number `.0`, at device pointer `.1`, with all work on it done.
    Gpu(u32, u64),
    /// Not in memory yet: [`Save::wanted`] asks for it when its turn comes.
    Late,
}

/// A tensor that is wanted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Its number in the plan.
    pub tensor: u32,
    /// Where to write all of its bytes. It is memory of the save. It stays until the save is closed or, after
    /// [`Save::supplied`], the tensor is written.
    pub at: *mut u8,
    /// Number of these bytes.
    pub nbytes: usize,
}

/// The request of a save.
pub struct SaveRequest {
    /// The place of each tensor.
    pub plan: SavePlan,
    /// The directory of the files.
    pub folder: PathBuf,
    /// Name of the checkpoint, if the directory is that of a checkpoint. The directory is made if it is missing. Files
    /// that an earlier save of the name has left are removed when the new files have their names.
    pub checkpoint: Option<String>,
    /// For each tensor of the plan: where its bytes are. They are contiguous.
    pub tensors: Vec<At>,
    /// Keeps the tensors' memory alive.
    pub keep: Keep,
    /// Whether to wait until everything is on stable storage. Otherwise the save ends when the page cache has
    /// everything.
    pub sync: bool,
    /// Sizes of chunks and staging, writers (`threads`), the stall timeout.
    pub options: Options,
}

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

/// A save in progress or ended. Dropping it gives it up, unless it has ended.
pub struct Save {
    work: Arc<Work>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stall: Duration,
    pid: u32,
}

/// A contiguous range of one file.
struct Chunk {
    file: usize,
    offset: u64,
    len: u64,
    pieces: std::ops::Range<usize>,
}

/// A part of a chunk, and its supply. Pieces are in order and without gaps.
#[derive(Clone, Copy)]
struct ChunkPart {
    from: Supply,
    len: u64,
}

#[derive(Clone, Copy)]
enum Supply {
    Host(u64),
    Gpu(u32, u64),
    /// From byte `.1` of late tensor number `.0` (counted among late tensors).
    Late(usize, u64),
}

/// The save's place in the ring of slabs, until the crew has nothing more to write.
struct RingPlace {
    share: Mutex<Option<Share>>,
}

/// A tensor that is in memory while chunks with parts of it are written.
struct Late {
    tensor: u32,
    nbytes: u64,
    /// Pieces of it that are not written yet.
    left: usize,
    phase: Phase,
}

enum Phase {
    /// Not wanted yet, or written.
    Away,
    Wanted(Made),
    There(Made),
}

enum Made {
    Small(Vec<u8>),
    /// Not from the allocator, which keeps freed memory for each thread.
    Large(Anonymous),
}

impl Made {
    fn new(nbytes: u64) -> Result<Made> {
        Ok(if nbytes < HUGE_PAGE {
            Made::Small(vec![0; nbytes as usize])
        } else {
            Made::Large(Anonymous::new(nbytes)?)
        })
    }

    fn at(&mut self) -> *mut u8 {
        match self {
            Made::Small(bytes) => bytes.as_mut_ptr(),
            Made::Large(memory) => memory.at(),
        }
    }
}

struct Work {
    outputs: Mutex<Vec<Output>>,
    sinks: Vec<Sink>,
    index: Option<(PathBuf, String)>,
    folder: PathBuf,
    checkpoint: Option<Folder>,
    /// Names of the files, the index last.
    names: Vec<OsString>,
    chunks: Vec<Chunk>,
    pieces: Vec<ChunkPart>,
    /// The beginnings of the files; pieces point into them.
    _heads: Vec<Vec<u8>>,
    _keep: Keep,
    /// Where chunks are written out of slabs.
    staging: Option<RingPlace>,
    sync: bool,
    next: AtomicUsize,
    cancelled: AtomicBool,
    began: Instant,
    state: Mutex<SaveState>,
    changed: Condvar,
}

/// How a file is written to. The descriptors belong to its output, which lives as long as a thread writes.
struct Sink {
    path: PathBuf,
    cached: RawFd,
    direct: Option<RawFd>,
    /// O_DIRECT was refused later.
    refused: AtomicBool,
    /// Chunks are written one after the other, and so many bytes are.
    in_order: bool,
    at: AtomicU64,
}

struct SaveState {
    written: u64,
    working: usize,
    /// When a chunk was last written, or when a slab for one came after a wait.
    moved: Instant,
    /// Slabs in use, and whether a thread of the crew waits for another.
    slabs: usize,
    starved: bool,
    /// The save waits for the disk, without a time limit.
    syncing: bool,
    late: Vec<Late>,
    /// Late tensors that are wanted, in the order of the requests.
    wanted: VecDeque<usize>,
    failed: Option<Error>,
    outcome: Option<Result<()>>,
    report: SaveReport,
}

impl Save {
    /// Makes the files and starts writing. Fails at once if a file cannot be made or has no room.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `NoSpace`, `Write` of the files; `Limit` if no thread can be started or no descriptor
    /// is left.
    pub fn start(request: SaveRequest) -> Result<Save> {
        let began = Instant::now();
        let SaveRequest { mut plan, folder, checkpoint, tensors, keep, sync, options } = request;
        let mut report = SaveReport { nbytes: plan.nbytes, ..SaveReport::default() };
        let checkpoint = checkpoint.map(|name| Folder::new(&folder, &name)).transpose()?;
        if let Some(file) = plan.files.first().filter(|_| !sync) {
            check_room(&folder.join(&file.name), plan.files.iter().map(|f| f.size).sum())?;
        }
        let mut outputs = Vec::with_capacity(plan.files.len());
        for file in &mut plan.files {
            let (mut output, refused) = Output::new(&folder.join(&file.name), file.size, sync)?;
            output.hold_back(&mut file.head);
            outputs.push(output);
            if let Some(refused) = refused.filter(|_| report.fallbacks.is_empty()) {
                report.fallbacks.push(refused);
            }
            report.file_bytes += file.size;
        }
        report.files = outputs.len() + usize::from(plan.index.is_some());
        let sinks: Vec<Sink> = outputs.iter().map(Sink::of).collect();
        let (chunks, pieces, late) = cut(&plan, &tensors, options.extent.next_multiple_of(PAGE))?;
        let index = plan.index_name().map(|name| folder.join(name)).zip(plan.index.clone());
        if let Some((path, _)) = index.as_ref().filter(|_| outputs.iter().any(Output::is_in_place)) {
            // It cannot be replaced either. Found out at the end, the save would be in vain.
            in_place::check_free(path)?;
        }
        let on_gpu = pieces.iter().any(|p| matches!(p.from, Supply::Gpu(..)));
        let staged = on_gpu || sinks.iter().any(|w| w.direct.is_some());
        let most = match (options.threads, staged) {
            (0, true) => DIRECT_WRITERS,
            (0, false) => CACHE_WRITERS.min(sinks.len()),
            (n, _) => n as usize,
        };
        let mut crew = most.clamp(1, chunks.len().max(1));
        let mut staging = None;
        if staged {
            let share = Ring::process().join(options.extent.next_multiple_of(HUGE_PAGE), options.staging)?;
            crew = crew.min((options.staging / share.slab_bytes()).max(LEAST_SLABS) as usize);
            staging = Some(RingPlace { share: Mutex::new(Some(share)) });
        }
        report.threads = crew;
        let state = SaveState {
            written: 0,
            working: crew,
            moved: began,
            slabs: 0,
            starved: false,
            syncing: false,
            late,
            wanted: VecDeque::new(),
            failed: None,
            outcome: None,
            report,
        };
        let work = Arc::new(Work {
            outputs: Mutex::new(outputs),
            sinks,
            index,
            folder,
            checkpoint,
            names: plan.names(),
            chunks,
            pieces,
            _heads: plan.files.into_iter().map(|f| f.head).collect(),
            _keep: keep,
            staging,
            sync,
            next: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
            began,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut threads = Vec::with_capacity(crew);
        // Held until the last thread of the crew has ended.
        let disk = Arc::new(DiskUse::begin());
        let here = if crew == 1 { machine::processor() } else { None };
        while threads.len() < crew {
            let (theirs, held) = (work.clone(), disk.clone());
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
                    work.leave(crew - threads.len());
                    break;
                }
                Err(cause) => {
                    let text = format!("cannot start a thread that writes: {cause}");
                    return Err(Error::new(ErrorKind::Limit, text));
                }
            }
        }
        Ok(Save { work, threads: Mutex::new(threads), stall: options.stall_timeout, pid: std::process::id() })
    }

    /// Waits for the end of the save, at most `timeout`. `false` if that passed first or a late tensor is
    /// [wanted](Self::wanted). The error of an ended save is returned every time.
    ///
    /// # Errors
    /// The save's own error; `Timeout` when nothing has been written for the stall timeout, because the storage does
    /// not answer or because other loads hold all of the staging memory.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        self.same_process()?;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut state = lock(&self.work.state);
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone().map(|()| true);
            }
            if !state.wanted.is_empty() {
                return Ok(false);
            }
            let now = Instant::now();
            if !state.syncing && now.saturating_duration_since(state.moved) >= self.stall {
                let why = match state.starved && state.slabs == 0 {
                    true => "other loads hold all of the staging memory",
                    false => "the storage does not answer",
                };
                let text = format!("nothing was written for {:.0} s: {why}", self.stall.as_secs_f64());
                let e = Error::new(ErrorKind::Timeout, text).at(&self.work.folder);
                self.work.cancelled.store(true, Ordering::Relaxed);
                state.outcome = Some(Err(e.clone()));
                return Err(e);
            }
            if deadline.is_some_and(|d| d <= now) {
                return Ok(false);
            }
            let next = deadline.map_or(self.stall, |d| d - now).min(self.stall);
            state = self.work.changed.wait_timeout(state, next).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The late tensor that the thread which waits for the save must write to memory next. It stays the same until it
    /// is [there](Self::supplied).
    pub fn wanted(&self) -> Option<Wanted> {
        if self.pid != std::process::id() {
            return None;
        }
        let mut state = lock(&self.work.state);
        let late = state.wanted.front().copied().map(|number| &mut state.late[number])?;
        let (tensor, nbytes) = (late.tensor, late.nbytes as usize);
        match &mut late.phase {
            Phase::Wanted(made) => Some(Wanted { tensor, at: made.at(), nbytes }),
            Phase::Away | Phase::There(_) => None,
        }
    }

    /// All bytes of the wanted tensor have been written to their memory.
    pub fn supplied(&self) {
        if self.pid != std::process::id() {
            return;
        }
        let mut state = lock(&self.work.state);
        if let Some(number) = state.wanted.pop_front() {
            let phase = &mut state.late[number].phase;
            if let Phase::Wanted(made) = std::mem::replace(phase, Phase::Away) {
                *phase = Phase::There(made);
            }
        }
        // The time was not spent by the storage.
        state.moved = Instant::now();
        drop(state);
        self.work.changed.notify_all();
    }

    /// Bytes of the files written so far, and in all.
    pub fn progress(&self) -> (u64, u64) {
        if self.pid != std::process::id() {
            return (0, 0);
        }
        let state = lock(&self.work.state);
        (state.written, state.report.file_bytes)
    }

    /// The report; complete when the save has ended.
    ///
    /// # Errors
    /// `Forked`.
    pub fn report(&self) -> Result<SaveReport> {
        self.same_process()?;
        Ok(lock(&self.work.state).report.clone())
    }

    /// Gives up the save if it still runs, and waits until nothing of it runs. What hangs in the kernel is left behind
    /// with its memory. The old files are unchanged, unless everything had been written.
    pub fn close(&self) {
        if self.pid != std::process::id() {
            return;
        }
        self.work.cancelled.store(true, Ordering::Relaxed);
        let mut threads = lock(&self.threads);
        if threads.is_empty() {
            return; // closed before: what hangs has been waited for
        }
        let until = Instant::now() + GRACE;
        let mut state = lock(&self.work.state);
        self.work.changed.notify_all();
        while state.working > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                threads.clear();
                return;
            }
            state = self.work.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        for thread in threads.drain(..) {
            let _panicked = thread.join();
        }
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this save belongs to the parent process, whose threads a child does not have",
        ))
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // Threads and locks belong to the parent.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget((self.work.clone(), std::mem::take(threads)));
            return;
        }
        self.close();
    }
}

impl Sink {
    fn of(output: &Output) -> Sink {
        let (cached, direct) = output.descriptors();
        let (path, in_order) = (output.path().to_path_buf(), output.is_in_order());
        Sink { path, cached, direct, refused: AtomicBool::new(false), in_order, at: AtomicU64::new(0) }
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
            drop(lock(&staging.share).take());
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
            let begun = Instant::now();
            let Some(here) = self.there(&self.pieces[chunk.pieces.clone()])? else { return Ok(()) };
            let (pieces, made) = (&here[..], Instant::now());
            let written = match &self.staging {
                Some(staging) => {
                    let Some(slab) = self.slab(staging)? else { return Ok(()) };
                    let waited = made.elapsed();
                    fill(&slab.lease, pieces, &mut devices)?;
                    let filled = Instant::now();
                    let (direct, calls) = self.write(chunk, slab.lease.address())?;
                    Written { filling: filled - begun - waited, writing: filled.elapsed(), direct, calls }
                }
                None => {
                    let calls = self.write_from_place(chunk, pieces)?;
                    Written { filling: made - begun, writing: made.elapsed(), direct: 0, calls }
                }
            };
            self.let_go(&self.pieces[chunk.pieces.clone()]);
            let mut state = lock(&self.state);
            state.written += chunk.len;
            state.moved = Instant::now();
            state.report.fill_seconds += written.filling.as_secs_f64();
            state.report.write_seconds += written.writing.as_secs_f64();
            state.report.writes += written.calls;
            state.report.direct_bytes += written.direct;
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
        let place = lock(&staging.share);
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
            let cause = if wrote == 0 { io::Error::from_raw_os_error(libc::EIO) } else { io::Error::last_os_error() };
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
                let cause =
                    if wrote == 0 { io::Error::from_raw_os_error(libc::EIO) } else { io::Error::last_os_error() };
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
        let index = outputs.last().filter(|last| self.index.is_some() && !last.is_in_place()).map(Output::path);
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
            folders.extend(self.checkpoint.iter().flat_map(Folder::above));
            folders.into_iter().try_for_each(|folder| self.settle(folder))?;
        }
        if let Some(folder) = &self.checkpoint {
            if folder.remove_earlier(&self.names)? && self.sync {
                self.settle(folder.path())?;
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

/// How a chunk was written.
struct Written {
    /// Time from the tensors to the slab, or until late tensors were there.
    filling: Duration,
    writing: Duration,
    /// Bytes past the page cache.
    direct: u64,
    calls: u64,
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

/// Cuts the files into chunks of at most `extent` bytes; a few files at a time take turns.
fn cut(plan: &SavePlan, tensors: &[At], extent: u64) -> Result<(Vec<Chunk>, Vec<ChunkPart>, Vec<Late>)> {
    let mut pieces: Vec<ChunkPart> = Vec::new();
    let mut late: Vec<Late> = Vec::new();
    let mut by_file: Vec<Vec<Chunk>> = Vec::with_capacity(plan.files.len());
    for (number, file) in plan.files.iter().enumerate() {
        let mut chunks: Vec<Chunk> = Vec::new();
        let mut add = |from: Supply, mut at: u64, mut len: u64| {
            let mut skip = 0;
            while len > 0 {
                let room = extent - at % extent;
                let part = len.min(room);
                if at % extent == 0 {
                    let from = pieces.len();
                    chunks.push(Chunk { file: number, offset: at, len: 0, pieces: from..from });
                }
                let from = match from {
                    Supply::Host(address) => Supply::Host(address + skip),
                    Supply::Gpu(ordinal, address) => Supply::Gpu(ordinal, address + skip),
                    Supply::Late(number, _) => Supply::Late(number, skip),
                };
                pieces.push(ChunkPart { from, len: part });
                if let Some(chunk) = chunks.last_mut() {
                    chunk.len += part;
                    chunk.pieces.end = pieces.len();
                }
                (at, len, skip) = (at + part, len - part, skip + part);
            }
        };
        add(Supply::Host(file.head.as_ptr() as u64), 0, file.head.len() as u64);
        for &(tensor, offset, nbytes) in &file.places {
            let none = || Error::new(ErrorKind::Invalid, format!("no address is given for tensor number {tensor}"));
            let from = match *tensors.get(tensor as usize).ok_or_else(none)? {
                At::Host(address) => Supply::Host(address),
                At::Gpu(ordinal, address) => Supply::Gpu(ordinal, address),
                At::Late => {
                    late.push(Late { tensor, nbytes, left: 0, phase: Phase::Away });
                    Supply::Late(late.len() - 1, 0)
                }
            };
            add(from, offset, nbytes);
        }
        by_file.push(chunks);
    }
    let mut all = Vec::with_capacity(by_file.iter().map(Vec::len).sum());
    let mut files = by_file.into_iter().map(IntoIterator::into_iter);
    loop {
        let mut side_by_side: Vec<_> = files.by_ref().take(SIDE_BY_SIDE).collect();
        if side_by_side.is_empty() {
            for piece in &pieces {
                if let Supply::Late(number, _) = piece.from {
                    late[number].left += 1;
                }
            }
            return Ok((all, pieces, late));
        }
        while !side_by_side.is_empty() {
            side_by_side.retain_mut(|chunks| chunks.next().map(|chunk| all.push(chunk)).is_some());
        }
    }
}
