//! What callers and the threads that read share: what is to be read, what is there, and when a file was looked at.

use super::blocks::{BlockId, Blocks};
use crate::error::Error;
use crate::memory::Buffer;
use crate::store::kept::Kept;
use crate::store::per_process::PerProcess;
use crate::sync::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize};
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
}

pub(super) struct Queues {
    pub(super) window: Blocks,
    /// What callers wait for, and what is read ahead.
    pub(super) wanted: VecDeque<Job>,
    pub(super) ahead: VecDeque<Job>,
    pub(super) threads: usize,
    pub(super) idle: usize,
    /// Jobs that are done: what changes while the storage answers.
    pub(super) answers: u64,
    pub(super) looked: HashMap<u32, LastLook>,
    /// Nothing is kept any more: descriptors are closed and threads end when there is nothing to do.
    pub(super) released: bool,
}

/// The last comparison of a file with its identity, and the bytes that were read since.
pub(super) struct LastLook {
    pub(super) at: Instant,
    pub(super) bytes: u64,
    /// The file had changed. What was read meanwhile is not handed out before another look.
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

/// Reads to memory of a caller, which waits for them.
pub(super) struct Receipt {
    pub(super) memory: Option<Arc<Buffer>>,
    pub(super) left: AtomicUsize,
    pub(super) given_up: AtomicBool,
    pub(super) failed: Mutex<Option<Error>>,
}

impl Receipt {
    pub(super) fn new(memory: Option<Arc<Buffer>>, left: usize) -> Arc<Receipt> {
        Arc::new(Receipt { memory, left: left.into(), given_up: false.into(), failed: Mutex::new(None) })
    }
}

/// The handles of the process whose threads may have to end before a fork.
pub(super) static RUNNING: PerProcess<Mutex<Vec<Weak<Crew>>>> = PerProcess::new();
