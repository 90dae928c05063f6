//! Accelerator memory: copies by the driver, in the device's primary context.
//!
//! Nothing here blocks the caller. A *device thread* makes every driver call that starts a copy: it retains the
//! context, joins copies, submits them to its own stream, and records one event per batch. A *waiter thread* sleeps in
//! the driver on each event in turn and hands the batch's ticket back. One *pinning thread* or several register slabs until
//! the [pool](crate::staging) is as large as the load can use. They may outlive the load by some milliseconds. Pinning memory
//! takes 0.1 to 0.6 s per GiB; copies out of slabs that are registered already go on meanwhile. If a slab is not
//! registered when it is copied (the pool could not grow), the device thread registers it.
//!
//! Frameworks use the primary context too. All devices of this module on the same accelerator share it. It lives as
//! long as one of them, a [`GpuMemory`], or a slab registered in it.
//!
//! # When it goes wrong
//! After the first error of the driver every batch comes back with that error at once. If the submission of a batch
//! failed half-way, the batch comes back when its submitted part has run. A device that is dropped waits for copies in
//! flight. If they do not end ([`PATIENCE`]), its threads and the slabs and blocks they hold are left behind for good,
//! because the accelerator may still touch them.

mod context;
mod memory;
mod pinning;
mod queue;
mod shared;
mod waiter;

pub use context::{start_driver, SharedContext};
pub use memory::GpuMemory;
pub(super) use pinning::register_in;
pub use pinning::{release_staging, stop_pinning};
pub(super) use queue::Many;

use super::api::Api;
use super::{Batch, Copied, Device, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::staging::{Ring, Share};
use crate::wake::Wake;
use context::refuse_a_forked_child;
use shared::{Command, GpuShared};
use std::os::fd::RawFd;
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a dropped device waits for copies in flight. A ring of 256 MiB takes 10 ms on PCIe 5, and a second if the
/// driver copies pageable memory on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// The same if the load has already waited for them in vain.
const IMPATIENCE: Duration = Duration::from_millis(500);

/// Copies to the memory of one accelerator.
pub struct GpuDevice {
    shared: Arc<GpuShared>,
    api: Arc<Api>,
    pinning_threads: usize,
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    in_flight: usize,
    patience: Duration,
    pid: u32,
}

impl GpuDevice {
    /// A device for copies to accelerator `ordinal` of `api`'s driver. Returns at once: what goes wrong with the driver
    /// comes back with the batches.
    ///
    /// # Errors
    /// `Forked` in the child of a process that has used a driver; `Limit` where there is no descriptor or thread left.
    pub fn new(api: &Arc<Api>, ordinal: u32) -> Result<Self> {
        refuse_a_forked_child()?;
        let shared = Arc::new(GpuShared { wake: Wake::new()?, state: Mutex::default(), ended: Condvar::new() });
        let (commands, inbox) = channel();
        let (theirs, their_api) = (shared.clone(), api.clone());
        let thread = std::thread::Builder::new()
            .name("penstock-gpu".to_owned())
            .spawn(move || queue::run(&theirs, &their_api, ordinal, &inbox))
            .map_err(|cause| Error::new(ErrorKind::Limit, format!("cannot start the GPU's copy thread: {cause}")))?;
        let (api, commands, thread, pid) = (api.clone(), Some(commands), Some(thread), std::process::id());
        Ok(Self { shared, api, pinning_threads: 1, commands, thread, in_flight: 0, patience: PATIENCE, pid })
    }

    /// The same with so many threads, at least one, that register staging memory.
    #[must_use]
    pub fn pinning_with(mut self, threads: u32) -> Self {
        self.pinning_threads = threads.max(1) as usize;
        self
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this load belongs to the parent process, and GPU drivers do not work in a forked child; load in the parent, \
             or start the child with the \"spawn\" method",
        ))
    }

    fn send(&self, command: Command) -> Result<()> {
        let gone = || Error::new(ErrorKind::Internal, "the GPU's thread ended early");
        self.commands.as_ref().ok_or_else(gone)?.send(command).map_err(|_| gone())
    }
}

impl Device for GpuDevice {
    fn fallbacks(&self) -> Vec<Fallback> {
        match self.same_process() {
            Ok(()) => self.shared.lock().fallbacks.clone(),
            Err(_) => Vec::new(),
        }
    }

    fn stage(&mut self, share: &mut Share, nbytes: u64) {
        if nbytes > 0 {
            // If the thread has ended, the growth is dropped, and the load continues until it sees the error.
            let _ = self.send(Command::Grow(share.pin(self.api.driver_number(), nbytes), self.pinning_threads));
        }
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.same_process()?;
        self.send(Command::Wait(fence))
    }

    fn copy(&mut self, batch: Batch) -> Result<()> {
        self.same_process()?;
        if batch.strided.converts() {
            return Err(Error::new(ErrorKind::Internal, "elements are converted on the way to a GPU"));
        }
        let ticket = batch.ticket;
        self.shared.lock().waiting.insert(ticket);
        self.send(Command::Copy(batch)).inspect_err(|_| _ = self.shared.lock().waiting.remove(&ticket))?;
        self.in_flight += 1;
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> Result<()> {
        self.same_process()?;
        self.shared.wake.clear();
        let mut state = self.shared.lock();
        self.in_flight -= state.done.len();
        done.append(&mut state.done);
        Ok(())
    }

    fn wake(&self) -> RawFd {
        self.shared.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn abandon(&mut self) -> Vec<Ticket> {
        self.patience = self.patience.min(IMPATIENCE);
        if self.same_process().is_err() {
            return Vec::new();
        }
        let mut state = self.shared.lock();
        state.closed = true;
        self.in_flight -= state.waiting.len();
        state.waiting.drain().collect()
    }
}

impl Drop for GpuDevice {
    fn drop(&mut self) {
        if self.same_process().is_err() {
            // Threads and locks are the parent's.
            std::mem::forget((self.commands.take(), self.thread.take()));
            return;
        }
        self.shared.lock().closed = true;
        self.commands = None;
        let waited = self.shared.ended.wait_timeout_while(self.shared.lock(), self.patience, |state| !state.ended);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if !state.ended {
            let hung: Vec<usize> = state.running.values().copied().collect();
            state.given_up = true;
            drop(state);
            hung.iter().for_each(|slab| Ring::process().quarantine(*slab as *const u8));
            // The thread keeps what it holds. It cleans up if the driver ever returns.
            self.thread = None;
            return;
        }
        drop(state);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to report.
            let _ = thread.join();
        }
    }
}
