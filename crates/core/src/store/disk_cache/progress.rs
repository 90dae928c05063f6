//! The work of the disk cache for one load: counted while the load runs, and after it.

use crate::error::Error;
use crate::sync::{lock, Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The work of the disk cache for a load, so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CacheStatus {
    /// Bytes that came from the cache: those that other processes brought meanwhile are among them.
    pub cached: u64,
    /// Bytes that came from the server and went through the cache's blocks.
    pub network: u64,
    /// Bytes that were written.
    pub written: u64,
    /// Bytes that were not written, because no memory was free for them.
    pub dropped: u64,
    /// Bytes of these that were asked of the server again, after the load.
    pub again: u64,
    /// Seconds of a processor for writing, checksums included.
    pub cpu_seconds: f64,
    /// Seconds from the beginning of the load to the end of this work, or until now.
    pub seconds: f64,
    /// Nothing is left to do.
    pub finished: bool,
    /// The reason for which objects, or parts of them, are not cached, or not in huggingface_hub's cache; empty without one.
    pub reason: String,
}

#[derive(Debug)]
struct ProgressState {
    status: CacheStatus,
    /// Number of jobs that are not done, and one for the load itself.
    pending: usize,
    ended: Option<Duration>,
}

/// The counts of one load.
#[derive(Debug)]
pub struct CacheProgress {
    pid: u32,
    began: Instant,
    state: Mutex<ProgressState>,
    changed: Condvar,
    /// By number of file: the cache has it whole.
    copies: Mutex<Vec<bool>>,
    /// By number of file: why the cache takes nothing of it.
    refusals: Mutex<BTreeMap<u32, String>>,
    /// The work for small files of the same store, which is waited for too.
    small: Option<Arc<CacheProgress>>,
}

impl CacheProgress {
    pub(super) fn new(small: Option<Arc<CacheProgress>>) -> Arc<CacheProgress> {
        let state = ProgressState { status: CacheStatus::default(), pending: 0, ended: None };
        let (pid, began) = (std::process::id(), Instant::now());
        Arc::new(CacheProgress {
            pid,
            began,
            state: Mutex::new(state),
            changed: Condvar::new(),
            copies: Mutex::default(),
            refusals: Mutex::default(),
            small,
        })
    }

    /// True if this process began the load. In a forked child its work, and its lock, are the parent's.
    pub(super) fn is_own(&self) -> bool {
        self.pid == std::process::id()
    }

    fn count(&self, count: impl FnOnce(&mut CacheStatus)) {
        if self.is_own() {
            count(&mut lock(&self.state).status);
        }
    }

    /// Something that is to be done, until this is dropped.
    pub(super) fn pending(self: &Arc<Self>) -> Pending {
        let mut state = lock(&self.state);
        state.pending += 1;
        state.ended = None;
        Pending(self.clone())
    }

    pub(super) fn has_copies(&self, copies: Vec<bool>) {
        *lock(&self.copies) = copies;
    }

    pub(super) fn takes_nothing(&self, file: u32, why: String) {
        lock(&self.refusals).insert(file, why);
    }

    /// The reason for which the cache takes nothing of a file, as far as that is known before the load; `None`: it takes it, or
    /// has it.
    pub(crate) fn refusal(&self, file: u32) -> Option<String> {
        lock(&self.refusals).get(&file).cloned()
    }

    /// Counts so many bytes of a file that were loaded, if the cache has it whole.
    pub(crate) fn has_loaded(&self, file: u32, bytes: u64) {
        if lock(&self.copies).get(file as usize) == Some(&true) {
            self.has_cached(bytes);
        }
    }

    pub(super) fn has_cached(&self, bytes: u64) {
        self.count(|status| status.cached += bytes);
    }

    pub(super) fn has_received(&self, bytes: u64) {
        self.count(|status| status.network += bytes);
    }

    pub(super) fn has_dropped(&self, bytes: u64) {
        self.count(|status| status.dropped += bytes);
    }

    pub(super) fn has_fetched_again(&self, bytes: u64) {
        self.count(|status| status.again += bytes);
    }

    pub(super) fn has_written(&self, bytes: u64, failed: Option<&Error>, cpu: Duration) {
        self.count(|status| {
            status.cpu_seconds += cpu.as_secs_f64();
            match failed {
                None => status.written += bytes,
                Some(_) => status.dropped += bytes,
            }
        });
        failed.into_iter().for_each(|e| self.has_failed(e));
    }

    pub(super) fn has_synced(&self, failed: Option<&Error>, cpu: Duration) {
        self.count(|status| status.cpu_seconds += cpu.as_secs_f64());
        failed.into_iter().for_each(|e| self.has_failed(e));
    }

    pub(super) fn has_failed(&self, e: &Error) {
        self.has_stopped(&e.to_string());
    }

    /// Something is not cached. The first reason is kept.
    pub(super) fn has_stopped(&self, reason: &str) {
        self.count(|status| {
            if status.reason.is_empty() {
                status.reason = reason.to_owned();
            }
        });
    }

    /// The status now.
    pub fn status(&self) -> CacheStatus {
        if self.pid != std::process::id() {
            // The work is the parent's, and so is the lock.
            let reason = "it belongs to the parent process".to_owned();
            return CacheStatus { reason, finished: true, ..CacheStatus::default() };
        }
        let is_small_done = self.small.as_ref().is_none_or(|small| lock(&small.state).pending == 0);
        let state = lock(&self.state);
        let seconds = state.ended.unwrap_or_else(|| self.began.elapsed()).as_secs_f64();
        CacheStatus { seconds, finished: state.pending == 0 && is_small_done, ..state.status.clone() }
    }

    /// Waits until nothing is left to do, at most for `timeout`; false if that passed first.
    pub fn wait(&self, timeout: Duration) -> bool {
        if self.pid != std::process::id() {
            return true;
        }
        let until = Instant::now() + timeout.min(LONGEST_WAIT);
        let mut state = lock(&self.state);
        while state.pending > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        self.small.as_ref().is_none_or(|small| small.wait(until.saturating_duration_since(Instant::now())))
    }
}

/// A part of the work.
#[derive(Debug)]
pub(super) struct Pending(Arc<CacheProgress>);

impl Drop for Pending {
    fn drop(&mut self) {
        let CacheProgress { pid, began, state, changed, .. } = &*self.0;
        if *pid != std::process::id() {
            return;
        }
        let mut state = lock(state);
        state.pending -= 1;
        if state.pending == 0 {
            state.ended = Some(began.elapsed());
            changed.notify_all();
        }
    }
}
