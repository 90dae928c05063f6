//! CPU memory: copies by a few worker threads.
//!
//! One worker copies a batch; several workers copy several batches at once. One core copies 5 to 7 GB/s out of a slab
//! in its cache. A slab is small (4 MiB), so dividing a batch would cost more wake-ups than it saves time.

use super::{Batch, Copied, Copy, Device, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Ticket;
use crate::rows;
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex, MutexGuard};
use crate::threads::guarded;
use crate::timeline::{Span, Timeline, Track};
use crate::wake::Wake;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Instant;

/// A batch of at most this many bytes in at most [`INLINE_COPIES`] rows is copied at once by the caller. 64 KiB take
/// about 10 us, no more than handing the batch to a sleeping thread and being woken by it.
const INLINE_BYTES: u64 = 64 << 10;
/// See [`INLINE_BYTES`].
const INLINE_COPIES: u64 = 64;

/// Copies to CPU memory. Worker threads start when there is work for them and end when the device is dropped. Batches
/// that no worker has begun by then are forgotten.
pub struct CpuDevice {
    shared: Arc<CpuShared>,
    workers: Vec<JoinHandle<()>>,
    limit: usize,
    in_flight: usize,
    pid: u32,
}

struct CpuShared {
    queue: Mutex<CpuQueue>,
    work: Condvar,
    wake: Wake,
    /// Where copies are recorded, if anywhere.
    timeline: OnceLock<Arc<Timeline>>,
}

#[derive(Default)]
struct CpuQueue {
    waiting: VecDeque<Batch>,
    done: Vec<Copied>,
    /// Sleeping workers. One of them is on its way to each batch in `waiting`, as long as there are enough of them.
    idle: usize,
    closed: bool,
}

impl CpuShared {
    fn lock(&self) -> MutexGuard<'_, CpuQueue> {
        lock(&self.queue)
    }

    /// Copies a batch, and records it (if there is a record) as copied by `worker` (0: the caller).
    fn run(&self, batch: Batch, worker: u32) -> Copied {
        let Some(timeline) = self.timeline.get() else { return run(batch) };
        let (begun, extent) = (Instant::now(), Some(batch.ticket.0));
        let bytes = bytes_and_rows(&batch).0;
        let copied = run(batch);
        let span = Span::new(Track::Copier(worker), "copy", begun, Instant::now());
        timeline.add(Span { kind: "copy", extent, bytes, ..span });
        copied
    }

    /// Notifies before anybody can see it: when nothing is in flight any more, nobody is going to notify.
    fn finish(&self, copied: Copied) {
        let mut queue = self.lock();
        if queue.done.is_empty() {
            self.wake.notify();
        }
        queue.done.push(copied);
    }
}

impl CpuDevice {
    /// A device with at most `workers` threads (at least one).
    pub fn new(workers: usize) -> Result<Self> {
        Ok(Self {
            shared: Arc::new(CpuShared {
                queue: Mutex::default(),
                work: Condvar::new(),
                wake: Wake::new()?,
                timeline: OnceLock::new(),
            }),
            workers: Vec::new(),
            limit: workers.max(1),
            in_flight: 0,
            pid: std::process::id(),
        })
    }

    /// From now on every copy is recorded there.
    pub(crate) fn record(&mut self, timeline: &Arc<Timeline>) {
        let _recorded_already = self.shared.timeline.set(timeline.clone());
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this load belongs to the parent process, whose copy threads did not survive the fork; start a new load in \
             the child",
        ))
    }

    /// Starts one more worker. Without any, the caller copies the batches, which is slower but correct.
    fn hire(&mut self) {
        let shared = self.shared.clone();
        let number = self.workers.len() as u32;
        let name = format!("penstock-copy{number}");
        if let Ok(worker) = Builder::new().name(name).spawn(move || serve(&shared, number + 1)) {
            self.workers.push(worker);
        }
    }
}

impl Device for CpuDevice {
    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        Err(Error::new(ErrorKind::Internal, format!("event {:#x} was given to copies into CPU memory", fence.0)))
    }

    fn copy(&mut self, batch: Batch) -> Result<()> {
        self.same_process()?;
        self.in_flight += 1;
        let (bytes, rows) = bytes_and_rows(&batch);
        if bytes <= INLINE_BYTES && rows <= INLINE_COPIES {
            self.shared.finish(self.shared.run(batch, 0));
            return Ok(());
        }
        let more = {
            let queue = self.shared.lock();
            queue.waiting.len() >= queue.idle
        };
        if more && self.workers.len() < self.limit {
            self.hire();
        }
        if self.workers.is_empty() {
            self.shared.finish(self.shared.run(batch, 0));
            return Ok(());
        }
        self.shared.lock().waiting.push_back(batch);
        self.shared.work.notify_one();
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> Result<()> {
        // An engine asks at each of its turns. Without a copy in flight that costs no system call.
        if self.in_flight == 0 {
            return Ok(());
        }
        self.same_process()?;
        let mut queue = self.shared.lock();
        self.shared.wake.clear();
        self.in_flight -= queue.done.len();
        done.append(&mut queue.done);
        Ok(())
    }

    fn wake(&self) -> RawFd {
        self.shared.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn abandon(&mut self) -> Vec<Ticket> {
        let forgotten = std::mem::take(&mut self.shared.lock().waiting);
        self.in_flight -= forgotten.len();
        forgotten.iter().map(|batch| batch.ticket).collect()
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        if self.same_process().is_err() {
            // The threads belong to the parent, and one of them may have held the lock when the process forked.
            self.workers.drain(..).for_each(std::mem::forget);
            return;
        }
        let forgotten = {
            let mut queue = self.shared.lock();
            queue.closed = true;
            std::mem::take(&mut queue.waiting)
        };
        self.shared.work.notify_all();
        drop(forgotten);
        for worker in self.workers.drain(..) {
            // A worker that panicked has nothing left to report.
            let _ = worker.join();
        }
    }
}

/// The body of a worker.
fn serve(shared: &CpuShared, number: u32) {
    let mut queue = shared.lock();
    loop {
        if queue.closed {
            return;
        }
        let Some(batch) = queue.waiting.pop_front() else {
            queue.idle += 1;
            queue = shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
            continue;
        };
        drop(queue);
        let (ticket, begun) = (batch.ticket, batch.blocks().collect());
        let copied = guarded("penstock-copy", || shared.run(batch, number));
        shared.finish(copied.unwrap_or_else(|e| Copied { ticket, result: Err(e), begun }));
        queue = shared.lock();
    }
}

/// The bytes and rows to copy.
fn bytes_and_rows(batch: &Batch) -> (u64, u64) {
    let (bytes, rows) = batch.strided.bytes_and_items();
    batch.copies.iter().fold((bytes, rows), |(bytes, rows), c| (bytes + c.len * c.rows, rows + c.rows))
}

/// Copies a batch and releases its memory before its ticket can be seen.
fn run(batch: Batch) -> Copied {
    for copy in &batch.copies {
        // SAFETY: the batch's maker vouches that both sides are valid for all rows and do not overlap while `keep` lives,
        // and that nobody else touches them until the ticket is back (invariants 2 and 4).
        unsafe { run_copy(copy) };
    }
    // SAFETY: the same holds of its strided copies.
    unsafe { batch.strided.run() };
    Copied { ticket: batch.ticket, result: Ok(()), begun: Vec::new() }
}

/// One copy, row by row.
///
/// # Safety
/// All rows of both sides are valid and do not overlap.
pub(super) unsafe fn run_copy(copy: &Copy) {
    let (from, to) =
        ((copy.from.cast_const(), copy.from_stride as usize), (copy.to as *mut u8, copy.to_stride as usize));
    // SAFETY: as the function's.
    unsafe { rows::copy(from, to, copy.len as usize, copy.rows as usize) }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::extent::Ticket;

    /// Too many rows to be copied inline, and no more bytes than that.
    const ROWS: u64 = INLINE_COPIES + 1;

    fn device(workers: usize, batches: u64, then: impl Fn(CpuDevice) + Sync + Send + 'static) {
        loom::model(move || {
            let mut device = CpuDevice::new(workers).unwrap();
            for ticket in 0..batches {
                // Leaked, 130 bytes a run: what a model leaves behind must not be freed under a thread.
                let memory = Box::leak(Box::new([0u8; 2 * ROWS as usize])).as_mut_ptr();
                let (from, to) = (memory, memory as u64 + ROWS);
                let copy = Copy { from, to, len: 1, rows: ROWS, from_stride: 1, to_stride: 1, block: 0, pad: 0 };
                let slab = (memory, ROWS as usize);
                let (copies, strided) = (vec![copy], Default::default());
                device.copy(Batch { ticket: Ticket(ticket), slab, copies, strided, keep: Arc::new(()) }).unwrap();
            }
            then(device);
        });
    }

    fn await_all(mut device: CpuDevice, batches: usize) {
        let mut done = Vec::new();
        loop {
            device.poll(&mut done).unwrap();
            if done.len() == batches {
                break;
            }
            device.shared.wake.wait(-1);
        }
        assert_eq!(device.in_flight(), 0);
        assert!(!device.shared.wake.wait(0), "nobody notifies later");
    }

    #[test]
    fn whoever_waits_for_two_copies_hears_of_both() {
        device(2, 2, |device| await_all(device, 2));
    }

    #[test]
    fn one_worker_takes_what_is_queued_while_it_copies() {
        device(1, 3, |device| await_all(device, 3));
    }

    #[test]
    fn a_device_that_is_dropped_at_work_ends_its_workers() {
        device(2, 2, drop);
    }
}
