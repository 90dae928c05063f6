//! The state of a save that its threads, its owner and the place of its files share.

use super::late::Late;
use crate::error::{Error, Result};
use crate::fallback::Fallback;
use crate::sync::{lock, Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
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

impl SaveShared {
    pub(super) fn new(began: Instant, crew: usize, late: Vec<Late>, report: SaveReport) -> SaveShared {
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
        SaveShared { cancelled: AtomicBool::new(false), began, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// True if nothing more needs to be written: the save was given up, or has failed.
    pub(super) fn is_over(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || lock(&self.state).failed.is_some()
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
