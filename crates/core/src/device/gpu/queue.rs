//! The thread that makes every driver call that starts a copy.

use super::context::SharedContext;
use super::pinning::{grow, register_in, HALF};
use super::shared::{Command, GpuShared};
use super::waiter::{await_events, Submitted};
use crate::device::api::{Api, DriverEvent, Rows, Stream};
use crate::device::boxes::{self, Crossing};
use crate::device::join::{self, Transfer};
use crate::device::strided::Strided;
use crate::device::{Batch, Copied, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::staging::{Ring, Slab};
use crate::threads::{guarded, of_panic, step};
use std::mem::ManuallyDrop;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;

/// Transfers of at most this many bytes go to the driver many at a time, if it has such a call. A larger transfer takes
/// the link longer (5 us at 55 GB/s) than its submission.
const BATCHED: u64 = 256 << 10;

/// The body of the device thread.
pub(super) fn run(shared: &Arc<GpuShared>, api: &Arc<Api>, ordinal: u32, inbox: &Receiver<Command>) {
    let served = caught(|| {
        serve(shared, api, ordinal, inbox);
        Ok(())
    });
    if let Err(error) = served {
        refuse_commands(shared, inbox, &error);
    }
    shared.lock().ended = true;
    shared.ended.notify_all();
}

/// Carries out commands until the device is dropped.
fn serve(shared: &Arc<GpuShared>, api: &Arc<Api>, ordinal: u32, inbox: &Receiver<Command>) {
    let opened = SharedContext::retain(api, ordinal);
    let result = opened.and_then(|context| GpuQueue::serve(shared, &context, inbox));
    if let Err(error) = &result {
        // It ended before it took commands.
        refuse_commands(shared, inbox, error);
    }
}

/// Answers every command with this error until the device is dropped.
fn refuse_commands(shared: &GpuShared, inbox: &Receiver<Command>, error: &Error) {
    shared.fail(error);
    take_commands(shared, inbox, |command| match command {
        Command::Copy(_) => Err(error.clone()),
        Command::Wait(_) | Command::Grow(..) => Ok(()),
    });
}

/// Does such work; a panic in it is an error, for the load to hear of.
fn caught(work: impl FnOnce() -> Result<()>) -> Result<()> {
    guarded("penstock-gpu", work).and_then(|done| done)
}

/// Takes commands until the device is dropped. After the first failure, and after the drop, none is carried out.
fn take_commands(shared: &GpuShared, inbox: &Receiver<Command>, mut carry_out: impl FnMut(Command) -> Result<()>) {
    for command in inbox {
        let (closed, failed) = {
            let mut state = shared.lock();
            if let (Command::Copy(batch), false) = (&command, state.closed) {
                state.waiting.remove(&batch.ticket);
            }
            (state.closed, state.failed.clone())
        };
        match (command, failed) {
            _ if closed => {}
            (Command::Copy(batch), Some(error)) => shared.finish(batch, Err(error), Vec::new()),
            // When the growth is dropped, the load continues until it sees the error.
            (Command::Wait(_) | Command::Grow(..), Some(_)) => {}
            (command, None) => {
                if let Err(error) = carry_out(command) {
                    shared.fail(&error);
                }
            }
        }
    }
}

/// Everything that a device has of the driver. It lives on the device thread, where its context is current.
struct GpuQueue<'a> {
    shared: &'a Arc<GpuShared>,
    context: &'a Arc<SharedContext>,
    api: &'a Api,
    stream: Stream,
    /// Nothing is queued on the stream behind the last event that the waiter thread awaits.
    quiet: bool,
    waiter: Sender<Submitted>,
    scratch: Option<Scratch>,
    /// The driver takes many copies at once, as far as is known.
    batches: bool,
    /// Destination blocks of the copies that the driver was given of the batch in hand.
    begun: Vec<u32>,
}

/// Where small copies are gathered: two halves in turn, so that one is filled while the other travels.
struct Scratch {
    slab: Slab,
    /// Recorded behind the last transfer out of each half.
    busy: [Option<DriverEvent>; 2],
    half: usize,
    used: u64,
}

impl<'a> GpuQueue<'a> {
    fn serve(shared: &'a Arc<GpuShared>, context: &'a Arc<SharedContext>, inbox: &Receiver<Command>) -> Result<()> {
        let api = context.enter()?;
        let stream = context.take_stream(&api)?;
        let (waiter, submitted) = channel();
        let (theirs, their_context) = (shared.clone(), context.clone());
        let thread = std::thread::Builder::new()
            .name("penstock-gpuwait".to_owned())
            .spawn(move || await_events(&theirs, &their_context, &submitted));
        let thread = match thread {
            Ok(thread) => thread,
            Err(cause) => {
                context.give_stream(&api, stream, true);
                return Err(Error::new(ErrorKind::Limit, format!("cannot start the GPU's waiter thread: {cause}")));
            }
        };
        let mut queue = GpuQueue {
            shared,
            context,
            api: &api,
            stream,
            quiet: true,
            waiter,
            scratch: None,
            batches: true,
            begun: Vec::new(),
        };
        take_commands(shared, inbox, |command| match command {
            Command::Wait(fence) => caught(|| queue.wait_for(fence)),
            Command::Grow(growth, threads) => caught(|| {
                grow(shared, context, growth, threads);
                Ok(())
            }),
            Command::Copy(batch) => queue.submit_caught(batch),
        });
        let GpuQueue { waiter, scratch, mut quiet, .. } = queue;
        drop(waiter);
        // A waiter that panicked has nothing left to report.
        let joined = thread.join().is_ok();
        let sound = {
            let state = shared.lock();
            joined && !state.given_up && state.failed.is_none()
        };
        if let Some(scratch) = scratch {
            // The waiter has seen the end of every batch, but of a failed one only where the driver still answered.
            // SAFETY: our stream.
            quiet = unsafe { api.synchronize_stream(stream) }.is_ok();
            context.give_events(&api, scratch.busy.into_iter().flatten(), sound && quiet);
            if quiet && scratch.slab.is_registered(api.driver_number()) {
                Ring::process().give_scratch(scratch.slab);
            }
        }
        context.give_stream(&api, stream, sound && quiet);
        Ok(())
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.quiet = false;
        // SAFETY: the event is live until the load has ended, as `Fence` says.
        unsafe { self.api.stream_wait(self.stream, DriverEvent(fence.0 as usize)) }
    }

    fn submit_caught(&mut self, batch: Batch) -> Result<()> {
        let (ticket, slab) = (batch.ticket, batch.slab.0);
        catch_unwind(AssertUnwindSafe(|| self.submit(batch))).unwrap_or_else(|panic| {
            let error = of_panic("penstock-gpu", &*panic);
            // Its copies may be under way, and no event tells when they end: its memory is never touched again. `submit`
            // has leaked what the batch keeps.
            if self.shared.lock().running.remove(&ticket).is_some() {
                Ring::process().quarantine(slab);
                let begun = std::mem::take(&mut self.begun);
                self.shared.hand_back(Copied { ticket, result: Err(error.clone()), begun });
            }
            Err(error)
        })
    }

    fn submit(&mut self, batch: Batch) -> Result<()> {
        self.shared.lock().running.insert(batch.ticket, batch.slab.0 as usize);
        // A panic leaks it. Nobody else has a reference that outlives the ticket: a ticket that is back has released its
        // memory.
        let batch = ManuallyDrop::new(batch);
        self.begun.clear();
        self.quiet = false;
        let pinned = self.register(&batch);
        let submitted = self.transfer(&batch, pinned);
        // Also after a failed submission: what was queued before the failure still reads the slab.
        let event = self.context.take_event(self.api).and_then(|event| {
            // SAFETY: live handles of our own.
            let recorded = unsafe { self.api.record(event, self.stream) };
            recorded.map(|()| event).inspect_err(|_| self.context.give_events(self.api, [event], false))
        });
        match event {
            Ok(event) => {
                self.quiet = true;
                let failed = submitted.as_ref().err().map(|error| (error.clone(), self.begun.clone()));
                let batch = ManuallyDrop::into_inner(batch);
                if let Err(gone) = self.waiter.send(Submitted { batch, event, failed }) {
                    let error = Error::new(ErrorKind::Internal, "the thread that waits for the GPU ended early");
                    // Its copies may be under way: its memory is never touched again, here or by the rank that lends it.
                    let ticket = gone.0.batch.ticket;
                    if self.shared.lock().running.remove(&ticket).is_some() {
                        Ring::process().quarantine(gone.0.batch.slab.0);
                        let begun = self.begun.clone();
                        self.shared.hand_back(Copied { ticket, result: Err(error.clone()), begun });
                    }
                    std::mem::forget(gone.0.batch);
                    return Err(error);
                }
                submitted
            }
            Err(error) => {
                let error = submitted.err().unwrap_or(error);
                // SAFETY: our stream. Where even this fails the context is lost, and nothing runs in it any more.
                let _ = unsafe { self.api.synchronize_stream(self.stream) };
                self.shared.finish(ManuallyDrop::into_inner(batch), Err(error.clone()), self.begun.clone());
                Err(error)
            }
        }
    }

    /// Registers the batch's slab if the pool has not done so. If the driver refuses, copies are made from plain
    /// memory: the driver copies it through its own buffers. On systems that refuse (GB10, Jetson: 801, 712, 1) that is
    /// no slower. Tells whether the slab is registered.
    fn register(&self, batch: &Batch) -> bool {
        let slab = Ring::process().slab_at(batch.slab.0);
        if slab.as_ref().is_some_and(|slab| slab.is_registered(self.api.driver_number())) {
            return true;
        }
        if !self.registers() || slab.as_ref().is_some_and(|slab| slab.is_refused()) {
            return false;
        }
        let refused = match slab {
            Some(slab) if slab.is_adopted() => {
                let refused = register_in(self.context, self.api, &slab).err();
                if let Some(error) = &refused {
                    // Its owner sends its bytes through a socket from now on. This load's own slabs are still registered.
                    slab.refuse();
                    self.shared.note_refused_slab(error.to_string());
                }
                return refused.is_none();
            }
            Some(slab) => register_in(self.context, self.api, &slab).err().map(|e| e.to_string()),
            None => Some("the memory is not of the slab ring".to_owned()),
        };
        let pinned = refused.is_none();
        if let Some(reason) = refused {
            self.shared.fall_back(reason);
        }
        pinned
    }

    fn registers(&self) -> bool {
        !self.shared.lock().pageable
    }

    /// Small copies are submitted together only if their memory is registered (`pinned`): what the driver does with a
    /// batch of copies from other memory is documented for few devices.
    fn transfer(&mut self, batch: &Batch, pinned: bool) -> Result<()> {
        step("penstock-gpu batch");
        let together = self.batches && pinned;
        let plan = join::plan(&batch.copies, HALF);
        let mut many = Many::default();
        for transfer in &plan.transfers {
            match transfer {
                Transfer::Straight { from, to, len, block } if *len <= BATCHED && together => {
                    many.add(*from as u64, *to, *len as usize);
                    many.blocks.push(*block);
                }
                // SAFETY: the batch's maker vouches for both sides, `keep` holds them until the event has passed, and
                // nobody writes the slab before the ticket is back (invariant 2).
                Transfer::Straight { from, to, len, block } => unsafe {
                    self.begins(*block);
                    self.api.copy_to_device(*to, *from, *len as usize, self.stream)?;
                },
                Transfer::Rows(copy) => {
                    let rows = Rows {
                        to: copy.to,
                        to_pitch: copy.to_stride,
                        from: copy.from as u64,
                        from_pitch: copy.from_stride,
                        width: copy.len,
                        rows: copy.rows,
                    };
                    self.begins(copy.block);
                    // SAFETY: as above.
                    unsafe { self.api.copy_rows_to_device(rows, self.stream) }?;
                }
                Transfer::Gathered { to, len, parts } => {
                    let room = self.scratch(*len)?;
                    self.begins(plan.parts[parts.start].block);
                    // SAFETY: `room` is `len` bytes that no transfer under way reads; the sources as above.
                    unsafe {
                        join::gather(&plan.parts[parts.clone()], *to, room);
                        self.api.copy_to_device(*to, room, *len as usize, self.stream)?;
                    }
                }
            }
        }
        self.spread(&batch.strided, together, &mut many)?;
        // SAFETY: as above; blocks do not overlap, nor do the copies into one.
        unsafe { self.copy_many(&many) }
    }

    /// The driver is about to be given a copy to this block.
    fn begins(&mut self, block: u32) {
        if self.begun.last() != Some(&block) {
            self.begun.push(block);
        }
    }

    /// Submits the copies into strided memory, except small ranges of the slab: the caller submits those, with `many`.
    fn spread(&mut self, strided: &Strided, together: bool, many: &mut Many) -> Result<()> {
        for (grid, axes) in strided.each() {
            boxes::plan(grid, axes, HALF, |crossing| match crossing {
                Crossing::Straight(rows) if rows.rows == 1 && rows.width <= BATCHED && together => {
                    many.add(rows.from, rows.to, rows.width as usize);
                    many.blocks.push(grid.block);
                    Ok(())
                }
                Crossing::Straight(rows) => {
                    self.begins(grid.block);
                    // SAFETY: as for every transfer: the batch's maker vouches for both sides.
                    unsafe { self.api.copy_rows_to_device(rows, self.stream) }
                }
                Crossing::Packed(packed) => {
                    let room = self.scratch(packed.nbytes())?;
                    // SAFETY: `room` is so many bytes that no transfer under way reads; the sources as above.
                    unsafe { packed.write(room) };
                    self.begins(grid.block);
                    // At once: the next box may take the other half, and then an event is recorded behind these.
                    // SAFETY: as above.
                    packed.rows(room as u64, |rows| unsafe { self.api.copy_rows_to_device(rows, self.stream) })
                }
            })?;
        }
        Ok(())
    }

    /// Submits many small transfers at once where the driver can, else one by one.
    ///
    /// # Safety
    /// As for [`Api::copy_batch_to_device`].
    unsafe fn copy_many(&mut self, many: &Many) -> Result<()> {
        let Many { blocks, to, from, bytes } = many;
        if self.batches && to.len() > 1 {
            // SAFETY: the caller's promise.
            match unsafe { self.api.copy_batch_to_device(to, from, bytes, self.stream) } {
                Ok(false) => self.batches = false,
                // The function exists, but it does not work for this device or stream.
                Err(error) if error.kind() == ErrorKind::Unsupported => self.batches = false,
                queued => {
                    blocks.iter().for_each(|block| self.begins(*block));
                    return queued.map(|_| ());
                }
            }
        }
        for (((to, from), bytes), block) in to.iter().zip(from).zip(bytes).zip(blocks) {
            self.begins(*block);
            // SAFETY: the caller's promise.
            unsafe { self.api.copy_to_device(*to, *from as *const u8, *bytes, self.stream) }?;
        }
        Ok(())
    }

    /// Memory of a scratch buffer, registered as long as the driver registers any.
    fn scratch_slab(&self) -> Result<Slab> {
        if !self.registers() {
            return Slab::new(2 * HALF);
        }
        if let Some(pooled) = Ring::process().take_scratch(self.api.driver_number()) {
            return Ok(pooled);
        }
        let slab = Slab::new(2 * HALF)?;
        if let Err(error) = register_in(self.context, self.api, &slab) {
            self.shared.fall_back(error.to_string());
        }
        Ok(slab)
    }

    /// `len` bytes of scratch memory, at most [`HALF`], that nothing reads. Waits, where it must, for the transfers out of
    /// the half that is used next.
    fn scratch(&mut self, len: u64) -> Result<*mut u8> {
        let scratch = match self.scratch.take() {
            Some(scratch) => scratch,
            None => Scratch { slab: self.scratch_slab()?, busy: [None; 2], half: 0, used: 0 },
        };
        let scratch = self.scratch.insert(scratch);
        if scratch.used + len > HALF {
            let event = match scratch.busy[scratch.half] {
                Some(event) => event,
                None => *scratch.busy[scratch.half].insert(self.context.take_event(self.api)?),
            };
            // SAFETY: live handles of our own.
            unsafe { self.api.record(event, self.stream) }?;
            scratch.half ^= 1;
            scratch.used = 0;
            if let Some(event) = scratch.busy[scratch.half] {
                // SAFETY: as above; it was recorded when this half was left.
                unsafe { self.api.synchronize_event(event) }?;
            }
        }
        let at = scratch.half as u64 * HALF + scratch.used;
        scratch.used += len;
        // SAFETY: `used` stays within a half and both halves within the slab.
        Ok(unsafe { scratch.slab.address().add(at as usize) })
    }
}

/// Small transfers that are submitted together.
#[derive(Default)]
pub(in crate::device) struct Many {
    /// The destination block of each, if anybody wants to know.
    pub(in crate::device) blocks: Vec<u32>,
    pub(in crate::device) to: Vec<u64>,
    pub(in crate::device) from: Vec<u64>,
    pub(in crate::device) bytes: Vec<usize>,
}

impl Many {
    pub(in crate::device) fn add(&mut self, from: u64, to: u64, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }
}
