//! A save, as its owner has it.

use super::chunks::{cut, At, Supply};
use super::crew::{SaveReport, SaveState, Sink, Work};
use super::folder::Folder;
use super::in_place;
use super::late::Phase;
use super::output::{check_room, Output};
use super::plan::SavePlan;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Keep;
use crate::options::{Options, HUGE_PAGE, PAGE};
use crate::staging::Ring;
use crate::sync::{lock, Condvar, JoinHandle, Mutex};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Writers past the page cache: so many chunks keep a drive busy while others are being filled.
const DIRECT_WRITERS: usize = 8;
/// Writers into the page cache. A file system lets only one of them write to a file at a time.
const CACHE_WRITERS: usize = 4;
/// Slabs that the ring grants whatever the limit is.
const LEAST_SLABS: u64 = 2;
/// How long dropping a save waits for writes in progress.
const GRACE: Duration = Duration::from_secs(2);

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

/// A save in progress or ended. Dropping it gives it up, unless it has ended.
pub struct Save {
    work: Arc<Work>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stall: Duration,
    pid: u32,
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
            staging = Some(Mutex::new(Some(share)));
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
        let threads = work.start(crew)?;
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

    /// Gives up the save if it still runs, and waits until nothing of it runs. A call that hangs in the kernel is left
    /// behind with its memory. The old files are unchanged, unless everything had been written.
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
