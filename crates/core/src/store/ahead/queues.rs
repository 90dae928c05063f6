//! State of callers and reading threads: jobs to do, blocks that are there, and when a file was looked at.

use super::blocks::{BlockId, Blocks};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::store::kept::Kept;
use crate::store::per_process::PerProcess;
use crate::sync::{lock, Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Reads at once.
pub(super) const MOST_THREADS: usize = 32;
/// A look at a file is good for so long, for bytes that are there.
pub(super) const FRESH_BYTES: Duration = Duration::from_millis(100);

/// A part of a file that is wanted, ascending: `offset`, `len`, and where it goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) to: u64,
}

pub(super) struct Crew {
    pub(super) kept: Arc<Kept>,
    pub(super) stall: Duration,
    pub(super) most_threads: usize,
    pub(super) state: Mutex<Queues>,
    pub(super) work: Condvar,
    pub(super) done: Condvar,
    /// No look at a file is answered while a test holds it.
    #[cfg(test)]
    pub(super) looks: Mutex<()>,
}

impl Crew {
    /// Compares a file with its identity.
    pub(super) fn look_at(&self, file: u32) -> Result<()> {
        #[cfg(test)]
        drop(lock(&self.looks));
        self.kept.files().verify_file(file)
    }
}

pub(super) struct Queues {
    pub(super) window: Blocks,
    /// Jobs that callers wait for, and jobs that read ahead.
    pub(super) wanted: VecDeque<Job>,
    pub(super) ahead: VecDeque<Job>,
    pub(super) threads: usize,
    pub(super) idle: usize,
    /// Jobs that are done: what changes while the storage answers.
    pub(super) answers: u64,
    pub(super) looked: HashMap<u32, LastLook>,
    /// Nothing is kept any more: descriptors are closed.
    pub(super) released: bool,
    /// Callers that end the threads, each before a fork.
    pub(super) stopping: u32,
    /// Requests that have not ended: their files stay open.
    pub(super) callers: u32,
}

impl Queues {
    /// Whether nothing is read ahead, and threads end when there is nothing to do.
    pub(super) fn is_ending(&self) -> bool {
        self.released || self.stopping > 0
    }
}

/// The last comparison of a file with its identity, and the bytes that were read since.
pub(super) struct LastLook {
    pub(super) at: Instant,
    pub(super) bytes: u64,
    /// The file had changed. Bytes read meanwhile are not handed out before another look.
    pub(super) changed: bool,
}

impl LastLook {
    pub(super) fn now(changed: bool) -> LastLook {
        LastLook { at: Instant::now(), bytes: 0, changed }
    }
}

pub(super) struct Job {
    pub(super) what: Task,
    pub(super) since: Instant,
}

pub(super) enum Task {
    Block(BlockId),
    Direct(Arc<Receipt>, FileRange, u32),
    Look(Arc<Receipt>, u32),
}

/// Jobs of one request that its caller waits for, and the memory that they write to.
pub(super) struct Receipt {
    pub(super) memory: Option<Arc<Buffer>>,
    pub(super) given_up: AtomicBool,
    jobs: Mutex<JobCounts>,
}

struct JobCounts {
    begun: usize,
    done: usize,
    left: usize,
    failed: Option<Error>,
}

/// The progress of a request, for its caller: it moves as long as these change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Headway {
    /// Jobs that a thread has begun with.
    pub(super) begun: usize,
    pub(super) done: usize,
    pub(super) left: usize,
}

impl Headway {
    pub(super) fn plus(self, other: Headway) -> Headway {
        Headway { begun: self.begun + other.begun, done: self.done + other.done, left: self.left + other.left }
    }
}

impl Receipt {
    pub(super) fn new(memory: Option<Arc<Buffer>>, left: usize) -> Arc<Receipt> {
        let jobs = Mutex::new(JobCounts { begun: 0, done: 0, left, failed: None });
        Arc::new(Receipt { memory, given_up: false.into(), jobs })
    }

    pub(super) fn begin(&self) {
        lock(&self.jobs).begun += 1;
    }

    /// One of the jobs is over. Its failure and the count change together: who sees the last one sees each failure.
    pub(super) fn end(&self, done: Result<()>) {
        let mut jobs = lock(&self.jobs);
        jobs.left -= 1;
        jobs.done += 1;
        if let Err(e) = done {
            jobs.failed.get_or_insert(e);
        }
    }

    /// How far the jobs are, if none of them has failed.
    pub(super) fn progress(&self) -> Result<Headway> {
        let jobs = lock(&self.jobs);
        match &jobs.failed {
            Some(e) => Err(e.clone()),
            None => Ok(Headway { begun: jobs.begun, done: jobs.done, left: jobs.left }),
        }
    }
}

/// The handles of the process whose threads may have to end before a fork.
pub(super) static RUNNING: PerProcess<Mutex<Vec<Weak<Crew>>>> = PerProcess::new();
