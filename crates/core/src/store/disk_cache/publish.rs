//! The thread that brings whole objects of the disk cache into huggingface_hub's cache. It has the lowest priority, and waits
//! while a load of this process goes through the disk cache. It lives as long as there is something to do.

use super::hub::{GoOn, HubPlace};
use super::progress::{CacheProgress, Pending};
use super::{CacheFolder, CacheKey};
use crate::error::{Error, ErrorKind, Result};
use crate::machine::{block_signals, give_way};
use crate::store::per_process::PerProcess;
use crate::sync::{lock, Builder, Condvar, Mutex};
use crate::threads::guarded;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

const STACK: usize = 256 << 10;
const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 86_400);

/// A whole object that is to be brought there. It is opened for that: what waits holds no descriptor.
pub(super) struct PublishJob {
    pub(super) place: Arc<HubPlace>,
    pub(super) folder: Arc<CacheFolder>,
    pub(super) key: CacheKey,
    pub(super) version: String,
    pub(super) size: u64,
    pub(super) progress: Arc<CacheProgress>,
    pub(super) _pending: Pending,
}

#[derive(Default)]
struct PublishQueue {
    jobs: VecDeque<PublishJob>,
    /// There is a thread.
    running: bool,
    /// Loads through the cache that run.
    loads: usize,
    /// How often all work was ended.
    stops: u64,
}

/// The thread of this process, and its jobs.
#[derive(Default)]
pub(super) struct Publisher {
    queue: Mutex<PublishQueue>,
    changed: Condvar,
}

static PROCESS: PerProcess<Publisher> = PerProcess::new();

impl Publisher {
    /// The publisher of this process. A forked child has its own.
    pub(super) fn process() -> &'static Publisher {
        PROCESS.get()
    }

    /// Brings an object there when no load runs.
    pub(super) fn add(&'static self, job: PublishJob) {
        let mut queue = lock(&self.queue);
        queue.jobs.push_back(job);
        if queue.running {
            return;
        }
        queue.running = true;
        drop(queue);
        let thread = Builder::new().name("penstock-hub".into()).stack_size(STACK);
        if let Err(e) = thread.spawn(move || self.work()) {
            let mut queue = lock(&self.queue);
            queue.running = false;
            let jobs = std::mem::take(&mut queue.jobs);
            drop(queue);
            let e = Error::new(ErrorKind::Limit, format!("cannot start the thread that brings it there: {e}"));
            jobs.iter().for_each(|job| job.failed(&e));
        }
    }

    /// A load through the cache begins.
    pub(super) fn load_begins(&self) {
        lock(&self.queue).loads += 1;
    }

    /// It has ended.
    pub(super) fn load_ends(&self) {
        lock(&self.queue).loads -= 1;
        self.changed.notify_all();
    }

    /// The body of the thread.
    fn work(&'static self) {
        block_signals();
        give_way();
        loop {
            let (job, stops) = {
                let mut queue = lock(&self.queue);
                match queue.jobs.pop_front() {
                    Some(job) => (job, queue.stops),
                    None => {
                        queue.running = false;
                        self.changed.notify_all();
                        return;
                    }
                }
            };
            let done = guarded("penstock-hub", || job.perform(&|| self.wait_for_loads(stops)));
            done.and_then(|done| done).err().into_iter().for_each(|e| job.failed(&e));
        }
    }

    /// Waits until no load runs. An error if all work was ended since the job began.
    fn wait_for_loads(&self, stops: u64) -> Result<()> {
        let mut queue = lock(&self.queue);
        while queue.loads > 0 && queue.stops == stops {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        match queue.stops == stops {
            true => Ok(()),
            false => Err(stopped()),
        }
    }

    /// Ends all work, and waits at most so long for the thread.
    pub(super) fn stop(&self, patience: Duration) {
        let until = Instant::now() + patience.min(LONGEST_WAIT);
        let mut queue = lock(&self.queue);
        queue.stops += 1;
        let jobs = std::mem::take(&mut queue.jobs);
        self.changed.notify_all();
        while queue.running {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        jobs.iter().for_each(|job| job.failed(&stopped()));
    }
}

fn stopped() -> Error {
    Error::new(ErrorKind::Cancelled, "it was told to stop")
}

impl PublishJob {
    fn perform(&self, go_on: GoOn<'_>) -> Result<()> {
        let PublishJob { place, folder, key, version, size, .. } = self;
        match folder.find(key, version, *size)? {
            Some(entry) if entry.is_complete()? => place.lay(&entry, folder.is_private(), go_on),
            // It was removed meanwhile.
            _ => Ok(()),
        }
    }

    fn failed(&self, e: &Error) {
        self.progress.has_stopped(&format!("{}: it is not in the Hub's cache: {e}", self.key.shown));
    }
}
