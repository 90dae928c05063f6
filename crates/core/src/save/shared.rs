//! The state of a save that its threads, its owner and the place of its files share.

use super::late::Late;
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::sync::{lock, Condvar, Mutex};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::PoisonError;
use std::time::Instant;

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
    /// Requests that were sent again.
    pub retries: u64,
    /// Bytes written past the page cache.
    pub direct_bytes: u64,
    /// Threads that wrote.
    pub threads: usize,
    /// Staging memory.
    pub peak_staging: u64,
    /// The refusals, and their replacements.
    pub fallbacks: Vec<Fallback>,
}

/// See the module's documentation.
pub(super) struct SaveShared {
    pub(super) cancelled: AtomicBool,
    pub(super) began: Instant,
    pub(super) state: Mutex<SaveState>,
    pub(super) changed: Condvar,
}

pub(super) struct SaveState {
    pub(super) written: u64,
    pub(super) working: usize,
    /// Numbers of the chunks that threads of the crew have, and have not written.
    pub(super) under_way: BTreeSet<usize>,
    /// The crew does not read or write the tensors any more.
    pub(super) rested: bool,
    /// When a chunk was last written, or when a slab for one came after a wait.
    pub(super) moved: Instant,
    /// Slabs in use, and whether a thread of the crew waits for another.
    pub(super) slabs: usize,
    pub(super) starved: bool,
    /// The save waits for the disk, without a time limit.
    pub(super) syncing: bool,
    /// Chunks whose bytes have left the tensors, and whether all have: the owner may change the tensors then.
    pub(super) taken: usize,
    pub(super) copied: bool,
    /// Every file is whole, and waits for those of other ranks; the owner says that they are whole too.
    pub(super) sealed: bool,
    pub(super) approved: bool,
    /// A thread of the crew waits for a late tensor that nobody has begun to make.
    pub(super) hungry: bool,
    /// Bytes of late tensors in memory of their own.
    pub(super) held: u64,
    pub(super) late: Vec<Late>,
    /// Late tensors that are wanted, in the order of the requests.
    pub(super) wanted: VecDeque<usize>,
    pub(super) failed: Option<Error>,
    pub(super) outcome: Option<Result<()>>,
    pub(super) report: SaveReport,
}

impl SaveShared {
    /// The state of a save of so many chunks that has just begun. A rank may have none: nothing is read from its tensors.
    pub(super) fn new(began: Instant, crew: usize, chunks: usize, late: Vec<Late>, report: SaveReport) -> SaveShared {
        let state = SaveState {
            written: 0,
            working: crew,
            under_way: BTreeSet::new(),
            rested: false,
            moved: began,
            slabs: 0,
            starved: false,
            syncing: false,
            taken: 0,
            copied: chunks == 0,
            sealed: false,
            approved: false,
            hungry: false,
            held: 0,
            late,
            wanted: VecDeque::new(),
            failed: None,
            outcome: None,
            report,
        };
        SaveShared { cancelled: AtomicBool::new(false), began, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// True if nothing more needs to be written: the save was given up, or has failed.
    pub(super) fn is_over(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || lock(&self.state).failed.is_some()
    }

    /// The bytes of one of `all` chunks have left the tensors. True if they were the last.
    pub(super) fn take_one(&self, all: usize) -> bool {
        let mut state = lock(&self.state);
        state.taken += 1;
        state.moved = Instant::now();
        state.copied = state.taken >= all;
        let is_last = state.copied;
        drop(state);
        if is_last {
            self.changed.notify_all();
        }
        is_last
    }

    /// Every file of this rank is whole: waits until the owner knows the same of the other ranks.
    ///
    /// # Errors
    /// `Cancelled` if the save was given up.
    pub(super) fn hold(&self) -> Result<()> {
        let mut state = lock(&self.state);
        state.sealed = true;
        self.changed.notify_all();
        loop {
            if state.approved {
                return Ok(());
            }
            if self.cancelled.load(Ordering::Relaxed) {
                let text = "the save was given up before all ranks had their files";
                return Err(Error::new(ErrorKind::Cancelled, text));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Counts something that was sent again. The first reason is told.
    pub(super) fn count_retry(&self, fallback: Fallback) {
        let report = &mut lock(&self.state).report;
        report.retries += 1;
        if report.fallbacks.iter().all(|known| known.from != fallback.from) {
            report.fallbacks.push(fallback);
        }
    }

    /// Adds a refusal to the report, unless one of the same reason is there.
    pub(super) fn add_fallback(&self, fallback: Fallback) {
        let fallbacks = &mut lock(&self.state).report.fallbacks;
        if fallbacks.iter().all(|known| known.reason != fallback.reason) {
            fallbacks.push(fallback);
        }
    }
}

/// The fallback of a rank that was given up while it made the checkpoint visible: what the other ranks do is not known.
pub(super) fn leaving_earlier() -> Fallback {
    let reason = "the save was given up when the new checkpoint may have been visible".to_owned();
    Fallback { from: "removing the earlier checkpoint", to: "leaving it", reason }
}
