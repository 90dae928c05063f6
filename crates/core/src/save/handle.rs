//! A save, as its owner has it.

use super::address::SaveAddress;
use super::chunks::{cut, At, Supply};
use super::crew::Work;
use super::files::FilesTarget;
use super::journal::PushJournal;
use super::late::Phase;
use super::objects::ObjectsTarget;
use super::plan::SavePlan;
use super::pushed::PushRequest;
use super::shared::{SaveReport, SaveShared, SaveState};
use super::snapshot::{check_memory, Snapshot};
use super::target::SaveTarget;
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::format::open_detached;
use crate::memory::Keep;
use crate::options::{Options, HUGE_PAGE, PAGE};
use crate::staging::Ring;
use crate::store::{Location, Stores, Watch};
use crate::sync::{lock, JoinHandle, Mutex};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Writers past the page cache: so many chunks keep a drive busy while others are being filled.
const DIRECT_WRITERS: usize = 8;
/// Writers into the page cache. A file system lets only one of them write to a file at a time.
const CACHE_WRITERS: usize = 4;
/// Requests that send parts at the same time. One brings some 100 MB/s to a bucket.
const SENDERS: usize = 16;
/// Bytes of a part, unless `extent` says more: each costs a round trip.
const PART: u64 = 16 << 20;
/// Slabs that the ring grants whatever the limit is.
const LEAST_SLABS: u64 = 2;

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
    /// The directory of the files, or the address that their names are added to.
    pub folder: Location,
    /// The stores of addresses.
    pub stores: Stores,
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
    /// True if everything is copied to memory of this process first.
    pub snapshot: bool,
    /// True if late tensors are made when the owner [wants](Save::want) it, ahead of the crew.
    pub ahead: bool,
    /// Sizes of chunks and staging, writers (`threads`), the stall timeout.
    pub options: Options,
}

/// A save in progress or ended. Dropping it gives it up, unless it has ended.
pub struct Save {
    work: Arc<Work>,
    folder: Location,
    names: Vec<OsString>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The number of a late tensor among them, by its number in the plan.
    late_numbers: HashMap<u32, usize>,
    stall: Duration,
    pid: u32,
}

/// The place of the files, and how it is written to.
struct SavePlace {
    target: Box<dyn SaveTarget>,
    /// Bytes of a chunk, at most.
    extent: u64,
    /// True if chunks are written out of slabs, wherever tensors are.
    is_direct: bool,
    /// Threads that write, and most of them.
    writers: usize,
    most: usize,
}

/// All that writing starts with.
struct Writing {
    plan: SavePlan,
    place: SavePlace,
    folder: Location,
    tensors: Vec<At>,
    keep: Keep,
    snapshot: Option<Snapshot>,
    ahead: bool,
    options: Options,
    report: SaveReport,
    began: Instant,
}

impl SavePlace {
    fn of_folder(
        plan: &mut SavePlan,
        folder: &Path,
        checkpoint: Option<&str>,
        sync: bool,
        options: &Options,
        report: &mut SaveReport,
    ) -> Result<SavePlace> {
        let target = FilesTarget::new(plan, folder, checkpoint, sync, options.stall_timeout, report)?;
        let (is_direct, writers) = (target.is_direct(), CACHE_WRITERS.min(plan.files.len()));
        let (extent, most) = (options.extent.next_multiple_of(PAGE), usize::MAX);
        Ok(SavePlace { target: Box::new(target), extent, is_direct, writers, most })
    }

    /// The same for an address. The questions about it are asked on a thread that can be left behind.
    fn of_address(
        plan: SavePlan,
        address: &SaveAddress,
        checkpoint: Option<String>,
        journal: Option<PushJournal>,
        options: &Options,
        go_on: impl FnMut() -> bool,
    ) -> Result<(SavePlan, SavePlace, Vec<Fallback>)> {
        let (folder, store) = (address.folder.clone(), address.store.clone());
        let extent = options.extent.next_multiple_of(PAGE).max(PART);
        let ask = move |watch: &Watch| {
            ObjectsTarget::new(plan, &folder, &store, checkpoint.as_deref(), extent, journal, watch)
        };
        let (target, plan, fallbacks) = open_detached(ask, options.stall_timeout, go_on)?;
        let (extent, most) = (target.part(), target.connections());
        let writers = SENDERS.min(most);
        Ok((plan, SavePlace { target: Box::new(target), extent, is_direct: false, writers, most }, fallbacks))
    }
}

impl Save {
    /// Makes the files and starts writing. Fails at once if a file cannot be made or has no room.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `NoSpace`, `Write` of the files; `Limit` if no thread can be started or no descriptor
    /// is left.
    pub fn start(request: SaveRequest) -> Result<Save> {
        Self::start_while(request, || true)
    }

    /// The same. The questions about an address end with `Cancelled` when `go_on` says no.
    ///
    /// # Errors
    /// As for [`start`](Self::start); the errors of the server.
    pub fn start_while(request: SaveRequest, go_on: impl FnMut() -> bool) -> Result<Save> {
        let began = Instant::now();
        let SaveRequest { mut plan, folder, stores, checkpoint, tensors, keep, sync, snapshot, ahead, options } =
            request;
        let mut report = SaveReport { nbytes: plan.nbytes, ..SaveReport::default() };
        // Before anything is made: without the memory nothing is.
        let snapshot = snapshot.then(|| Snapshot::new(&plan)).transpose()?;
        if ahead && snapshot.is_none() && !plan.is_share {
            check_memory(nbytes_late(&plan, &tensors), "packing tensors before they are written")?;
        }
        let place = match &folder {
            Location::Path(path) => {
                SavePlace::of_folder(&mut plan, path, checkpoint.as_deref(), sync, &options, &mut report)?
            }
            Location::Url(_) => {
                let address = SaveAddress::new(&folder, &stores)?;
                let (named, place, told) = SavePlace::of_address(plan, &address, checkpoint, None, &options, go_on)?;
                report.fallbacks.extend(told);
                plan = named;
                place
            }
        };
        Self::write(Writing { plan, place, folder, tensors, keep, snapshot, ahead, options, report, began })
    }

    /// Uploads files as they are.
    ///
    /// # Errors
    /// The errors of the files and of the server; `Write` of the journal; `Cancelled` when `go_on` says no.
    pub fn push_while(request: PushRequest, mut go_on: impl FnMut() -> bool) -> Result<Save> {
        let began = Instant::now();
        let PushRequest { files, index, small, folder, stores, checkpoint, journal, machine, options } = request;
        let address = SaveAddress::new(&folder, &stores)?;
        let planned = move |_: &Watch| SavePlan::of_files(files, index, small);
        let plan = open_detached(planned, options.stall_timeout, &mut go_on)?;
        let tensors: Vec<At> = (0..plan.files.len() as u32).map(At::File).collect();
        let mut report = SaveReport { nbytes: plan.nbytes, ..SaveReport::default() };
        let journal = PushJournal::begin(&journal, &address, plan.index_name().as_deref(), &machine)?;
        let (plan, place, told) =
            SavePlace::of_address(plan, &address, Some(checkpoint), Some(journal), &options, go_on)?;
        report.fallbacks.extend(told);
        let (keep, snapshot, ahead): (Keep, _, _) = (Arc::new(()), None, false);
        Self::write(Writing { plan, place, folder, tensors, keep, snapshot, ahead, options, report, began })
    }

    fn write(writing: Writing) -> Result<Save> {
        let Writing { plan, place, folder, tensors, keep, snapshot, ahead, options, mut report, began } = writing;
        let is_share = plan.is_share;
        report.file_bytes = plan.files.iter().map(|file| file.size).sum();
        report.files = plan.files.len() + usize::from(plan.index.is_some()) + plan.small.len();
        let names = plan.names();
        let SavePlace { target, extent, is_direct, writers, most: most_writers } = place;
        let (chunks, pieces, late) = cut(&plan, &tensors, extent)?;
        let staged = is_direct || pieces.iter().any(|p| matches!(p.from, Supply::Gpu(..) | Supply::File(..)));
        let most = match (options.threads, staged) {
            (0, true) => writers.max(DIRECT_WRITERS),
            (0, false) => writers,
            (n, _) => n as usize,
        };
        let mut crew = most.min(most_writers).clamp(1, chunks.len().max(1));
        let mut staging = None;
        if staged {
            let share = Ring::process().join(extent.next_multiple_of(HUGE_PAGE), options.staging)?;
            crew = crew.min((options.staging / share.slab_bytes()).max(LEAST_SLABS) as usize);
            staging = Some(Mutex::new(Some(share)));
        }
        report.threads = crew;
        let is_staged = if snapshot.is_some() { is_direct } else { staged };
        let late_numbers = late.iter().enumerate().map(|(number, late)| (late.tensor, number)).collect();
        let shared = SaveShared::new(began, crew, chunks.len(), late, report);
        let work = Arc::new(Work {
            target,
            shared,
            room: options.staging,
            chunks,
            pieces,
            written: plan.files.iter().map(|_| AtomicU64::new(0)).collect(),
            _heads: plan.files.into_iter().map(|f| f.head).collect(),
            keep: Mutex::new(Some(keep)),
            sources: plan.sources,
            staging,
            is_staged,
            snapshot,
            ahead,
            is_share,
            next: AtomicUsize::new(0),
        });
        let threads = work.start(crew)?;
        Ok(Save {
            work,
            folder,
            names,
            threads: Mutex::new(threads),
            late_numbers,
            stall: options.stall_timeout,
            pid: std::process::id(),
        })
    }

    /// Waits for the end of the save, at most `timeout`. `false` if that passed first or a late tensor is
    /// [wanted](Self::wanted). The error of an ended save is returned every time.
    ///
    /// # Errors
    /// The save's own error; `Timeout` when nothing has been written for the stall timeout, because the storage does
    /// not answer or because other loads hold all of the staging memory.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        self.wait_for(timeout, |state| (!state.wanted.is_empty()).then_some(false))
    }

    /// Waits until all bytes have left the tensors, at most `timeout`: their owner may change them then. `false` if that passed
    /// first.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait), unless the bytes had left the tensors before.
    pub fn copied(&self, timeout: Option<Duration>) -> Result<bool> {
        if self.pid == std::process::id() && lock(&self.work.shared.state).copied {
            return Ok(true);
        }
        self.wants_nothing()?;
        self.wait_for(timeout, |state| state.copied.then_some(true))
    }

    /// Waits until every file of this rank is whole, at most `timeout`. `false` if that passed first.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn sealed(&self, timeout: Option<Duration>) -> Result<bool> {
        self.wants_nothing()?;
        self.wait_for(timeout, |state| state.sealed.then_some(true))
    }

    /// Fails if the crew has asked for a late tensor: a wait for anything else would have no end.
    fn wants_nothing(&self) -> Result<()> {
        if self.pid != std::process::id() || self.work.ahead || lock(&self.work.shared.state).wanted.is_empty() {
            return Ok(());
        }
        Err(Error::invalid("the save wants a tensor, which must be supplied first"))
    }

    /// The files of all ranks are whole: those of this one stay, and the rank with the index makes the checkpoint visible.
    pub fn approve(&self) {
        if self.pid == std::process::id() {
            lock(&self.work.shared.state).approved = true;
            self.work.shared.changed.notify_all();
        }
    }

    /// True if readers may see the new checkpoint.
    pub fn may_be_visible(&self) -> bool {
        self.pid == std::process::id() && self.work.target.may_be_visible()
    }

    /// Waits for the end of the save, or until `ends` says what to return.
    fn wait_for(&self, timeout: Option<Duration>, ends: impl Fn(&SaveState) -> Option<bool>) -> Result<bool> {
        self.same_process()?;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut state = lock(&self.work.shared.state);
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone().map(|()| true);
            }
            if let Some(found) = ends(&state) {
                return Ok(found);
            }
            let now = Instant::now();
            // The storage waits for a tensor, which other ranks may have to bring.
            let lacks = state.hungry || !state.wanted.is_empty();
            if !state.syncing && !lacks && now.saturating_duration_since(state.moved) >= self.stall {
                let why = match state.starved && state.slabs == 0 {
                    true => "other loads hold all of the staging memory",
                    false => "the storage does not answer",
                };
                let text = format!("nothing was written for {:.0} s: {why}", self.stall.as_secs_f64());
                let e = Error::new(ErrorKind::Timeout, text).at(&self.folder);
                self.work.shared.cancelled.store(true, Ordering::Relaxed);
                state.outcome = Some(Err(e.clone()));
                return Err(e);
            }
            if deadline.is_some_and(|d| d <= now) {
                return Ok(false);
            }
            let next = deadline.map_or(self.stall, |d| d - now).min(self.stall);
            state = self.work.shared.changed.wait_timeout(state, next).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes a late tensor [wanted](Self::wanted) ahead of the crew, where late tensors have `room` bytes of memory for it
    /// (`None`: without limit) or the crew has nothing else to write. `false` if there was no room for `timeout`.
    ///
    /// # Errors
    /// The save's own error; `OutOfMemory`.
    pub fn want(&self, tensor: u32, room: Option<u64>, timeout: Duration) -> Result<bool> {
        self.same_process()?;
        let Some(&number) = self.late_numbers.get(&tensor) else { return Ok(true) };
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.work.shared.state);
        loop {
            if let Some(Err(e)) = &state.outcome {
                return Err(e.clone());
            }
            if !state.late[number].is_due() {
                return Ok(true);
            }
            let nbytes = state.late[number].nbytes;
            if !state.rested && (state.hungry || room.is_none_or(|room| state.held.saturating_add(nbytes) <= room)) {
                return self.work.begin_late(&mut state, number).map(|()| true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            state = self.work.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The late tensor that the thread which waits for the save must write to memory next. It stays the same until it
    /// is [there](Self::supplied).
    pub fn wanted(&self) -> Option<Wanted> {
        if self.pid != std::process::id() {
            return None;
        }
        let mut state = lock(&self.work.shared.state);
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
        let mut state = lock(&self.work.shared.state);
        if let Some(number) = state.wanted.pop_front() {
            let phase = &mut state.late[number].phase;
            if let Phase::Wanted(made) = std::mem::replace(phase, Phase::Away) {
                *phase = Phase::There(made);
            }
        }
        // The time was not spent by the storage.
        state.moved = Instant::now();
        state.hungry = false;
        drop(state);
        self.work.release();
        self.work.shared.changed.notify_all();
    }

    /// True if the save has ended, with success or with an error.
    pub fn is_done(&self) -> bool {
        self.pid == std::process::id() && lock(&self.work.shared.state).outcome.is_some()
    }

    /// Names of the files, the index last.
    pub fn names(&self) -> &[OsString] {
        &self.names
    }

    /// Bytes of the files written so far, and in all.
    pub fn progress(&self) -> (u64, u64) {
        if self.pid != std::process::id() {
            return (0, 0);
        }
        let state = lock(&self.work.shared.state);
        (state.written, state.report.file_bytes)
    }

    /// The report; complete when the save has ended.
    ///
    /// # Errors
    /// `Forked`.
    pub fn report(&self) -> Result<SaveReport> {
        self.same_process()?;
        Ok(lock(&self.work.shared.state).report.clone())
    }

    /// Gives up the save if it still runs, and waits until nothing of it runs. A call that hangs in the kernel is left
    /// behind with its memory. The old files are unchanged, unless everything had been written.
    pub fn close(&self) {
        if self.pid != std::process::id() {
            return;
        }
        self.end();
        // The owner packs nothing any more.
        lock(&self.work.shared.state).wanted.clear();
        self.work.release();
    }

    fn end(&self) {
        self.work.shared.cancelled.store(true, Ordering::SeqCst);
        let mut threads = lock(&self.threads);
        if threads.is_empty() {
            return; // closed before: what hangs has been waited for
        }
        let until = Instant::now() + self.work.target.grace();
        let mut state = lock(&self.work.shared.state);
        self.work.shared.changed.notify_all();
        while state.working > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                threads.clear();
                return;
            }
            state = self.work.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
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

/// Bytes of the tensors that are made late.
fn nbytes_late(plan: &SavePlan, tensors: &[At]) -> u64 {
    let places = plan.files.iter().flat_map(|file| &file.places);
    places.filter(|place| matches!(tensors.get(place.0 as usize), Some(At::Late))).map(|place| place.2).sum()
}
