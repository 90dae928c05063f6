//! A load, as its owner sees it: it is granted memory, waited for, handed out, ended.

use super::shared::{Message, Shared, State};
use crate::device::Fence;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::memory::{Block, Keep, View};
use crate::plan::layout::{BlockKind, Layout};
use crate::plan::want::Want;
use crate::stats::Report;
use crate::store::Storage;
use crate::sync::{lock, JoinHandle, Mutex};
use crate::timeline::{Span, Timeline, Track};
use crate::way::Routing;
use std::borrow::Cow;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The answer of [`Load::next`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// This want is ready, the next in hand-out order.
    Ready(u32),
    /// The engine can go on when it is granted blocks: see [`Load::wanted_blocks`].
    Grant,
    /// Everything has been handed out.
    End,
    /// The timeout has passed.
    TimedOut,
}

/// A load in progress or ended. Dropping it cancels it and waits until nothing of it runs any more.
pub struct Load {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) wants: Vec<Want>,
    pub(super) layout: Arc<Layout>,
    pub(super) shared: Arc<Shared>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) nbytes: u64,
    pub(super) gaps: u64,
    /// The files of a stream that maps some of them, and which: for the check, at hand-out, that they are still as long as
    /// they were.
    pub(super) mapped: Option<(Arc<Storage>, Arc<Routing>)>,
    pub(super) timeline: Option<Arc<Timeline>>,
    pub(super) pid: u32,
}

impl Load {
    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// The wants, in the order of the request.
    pub fn wants(&self) -> &[Want] {
        &self.wants
    }

    /// The layout: where everything goes.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Blocks that the engine wants to have granted now, in order.
    pub fn wanted_blocks(&self) -> Result<Vec<u32>> {
        self.same_process()?;
        Ok(self.shared.lock().wanted.clone())
    }

    /// Grants the memory of a block. `address` is a device pointer to at least the block's size. `keep` keeps it alive
    /// as long as the engine or a tensor needs it. `fence` is the work still queued on the allocating stream.
    pub fn grant(&self, block: u32, address: u64, keep: Keep, fence: Option<Fence>) -> Result<()> {
        self.same_process()?;
        let mut state = self.shared.lock();
        match state.granted.get(block as usize) {
            Some(false) => {}
            Some(true) => return Err(Error::new(ErrorKind::Invalid, format!("block {block} was granted before"))),
            None => return Err(Error::new(ErrorKind::Invalid, format!("there is no block {block}"))),
        }
        let granted = Block::held(address, keep);
        state.give(block, granted.clone());
        state.wanted.retain(|&b| b != block);
        if state.outcome.is_none() {
            state.messages.push(Message::Grant(block, granted, fence));
        }
        drop(state);
        self.shared.inbox.notify();
        Ok(())
    }

    /// The next want in hand-out order. Waits at most `timeout`; `None` waits without a limit. Every wait ends, because
    /// the load ends.
    pub fn next(&self, timeout: Option<Duration>) -> Result<Next> {
        let next = self.wait_until(timeout, |state| {
            if let Some(want) = state.ready.pop_front() {
                state.handed.push(want);
                return Some(Ok(Next::Ready(want)));
            }
            // A consumer that waits for the next one has no more use for the room of those before.
            if !state.handed.is_empty() {
                let handed = std::mem::take(&mut state.handed);
                state.messages.extend(handed.into_iter().map(Message::Take));
                self.shared.inbox.notify();
            }
            match &state.outcome {
                Some(Ok(())) => return Some(Ok(Next::End)),
                Some(Err(e)) => return Some(Err(e.clone())),
                None => {}
            }
            (!state.wanted.is_empty()).then_some(Ok(Next::Grant))
        });
        match next {
            Some(Ok(Next::Ready(want))) => self.still_there(want).map(|()| Next::Ready(want)),
            other => other.unwrap_or(Ok(Next::TimedOut)),
        }
    }

    /// The engine compared the file when the want became ready, which may have been long before this call. Bytes that
    /// were read cannot change any more. But a mapping is the file: if the file was truncated, touching the mapping is
    /// SIGBUS.
    fn still_there(&self, want: u32) -> Result<()> {
        let block = self.layout.places[want as usize].block;
        let (Some((files, routing)), BlockKind::Mirror { file, .. }) =
            (&self.mapped, self.layout.blocks[block as usize].kind)
        else {
            return Ok(());
        };
        if !routing.way(file).is_mapped() {
            return Ok(());
        }
        // Checked again for each tensor, which takes 2 us: a truncation before this call is reported, however short
        // before. The file system is asked without the lock: if it hangs, the engine and other callers go on.
        files.verify(file).inspect_err(|e| {
            let mut state = self.shared.lock();
            // Nothing more is handed out by this load.
            state.ready.clear();
            if let Some(outcome) = &mut state.outcome {
                *outcome = Err(e.clone());
            }
            state.messages.push(Message::Cancel);
            drop(state);
            self.shared.inbox.notify();
        })
    }

    /// Tells the engine that the consumer has taken this want: its bytes no longer count against the window. Where the next one
    /// is asked for first and has not arrived, that says the same.
    pub fn take(&self, want: u32) -> Result<()> {
        self.same_process()?;
        self.shared.lock().handed.retain(|&handed| handed != want);
        self.shared.tell(Message::Take(want));
        Ok(())
    }

    /// Waits for the end of the load, at most `timeout`; `false` if that passed first. The error of an ended load is
    /// returned every time.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        self.wait_until(timeout, |state| state.outcome.clone()).map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// Waits until the load has ended or wants blocks granted: `Grant`, `End` or `TimedOut`.
    pub fn wait_or_grant(&self, timeout: Option<Duration>) -> Result<Next> {
        self.wait_until(timeout, |state| match &state.outcome {
            Some(outcome) => Some(outcome.clone().map(|()| Next::End)),
            None => (!state.wanted.is_empty()).then_some(Ok(Next::Grant)),
        })
        .unwrap_or(Ok(Next::TimedOut))
    }

    fn wait_until<T>(
        &self,
        timeout: Option<Duration>,
        found: impl FnMut(&mut State) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        match self.same_process() {
            Ok(()) => self.shared.wait_until(timeout, found),
            Err(e) => Some(Err(e)),
        }
    }

    /// Whether the load has ended, with or without an error.
    pub fn is_done(&self) -> bool {
        self.pid != std::process::id() || self.shared.lock().outcome.is_some()
    }

    /// Asks the load to end; it then fails with kind `Cancelled`, unless it was complete already. Returns at once.
    pub fn cancel(&self) {
        if self.pid == std::process::id() {
            self.shared.tell(Message::Cancel);
        }
    }

    /// Cancels the load if it still runs, and waits until nothing of it runs any more.
    pub fn close(&self) {
        if self.pid != std::process::id() {
            // A forked child has no such thread to wait for, and a lock that the thread held at the fork never becomes
            // free here.
            return;
        }
        // Held until the thread has ended, so that a second caller of `close` waits for that too.
        let mut running = lock(&self.thread);
        let Some(thread) = running.take() else { return };
        self.cancel();
        // The engine thread limits its own end (`engine/deadline.rs`), and a panic in it has been turned into an outcome.
        let _ = thread.join();
        drop(running);
        // A traceback may hold a failed load. It must not hold gigabytes.
        if matches!(self.shared.lock().outcome, Some(Err(_))) {
            self.release();
        }
    }

    /// Closes the load and lets go of everything that was not handed out: nothing can be taken from it any more. For an owner
    /// that gives up on a load which has ended well, and is kept alive itself, as by a traceback.
    pub fn let_go(&self) {
        if self.pid == std::process::id() {
            self.close();
            self.release();
        }
    }

    /// Drops everything that was not handed out.
    fn release(&self) {
        let mut state = self.shared.lock();
        let State { blocks, viewed, unviewed, .. } = &mut *state;
        let mut left = Vec::new();
        for (place, viewed) in self.layout.places.iter().zip(viewed) {
            if !std::mem::replace(viewed, true) {
                unviewed[place.block as usize] -= 1;
                // Places that were never handed out have no view, so no view gives their memory back.
                left.extend(blocks[place.block as usize].as_ref().map(|b| b.view(place.offset, place.nbytes)));
            }
        }
        let blocks: Vec<Option<Block>> = blocks.iter_mut().map(Option::take).collect();
        // Freeing calls into drivers and frameworks, so the lock is not held.
        drop(state);
        drop((left, blocks));
    }

    /// Wanted bytes that have arrived, and wanted bytes in all.
    pub fn progress(&self) -> (u64, u64) {
        (self.shared.lock().arrived, self.nbytes)
    }

    /// Wanted bytes, and bytes of gaps that the plan reads with them. 0 gaps if the load maps resident pages and reads nothing.
    pub fn planned(&self) -> (u64, u64) {
        (self.nbytes, self.gaps)
    }

    /// The report of the load; complete when it has ended.
    pub fn report(&self) -> Report {
        self.shared.lock().report.clone()
    }

    /// Adds what the owner of the load did to its trace, if there is one.
    pub fn mark(&self, name: impl Into<Cow<'static, str>>, begun: Instant, ended: Instant) {
        if let Some(timeline) = &self.timeline {
            timeline.add(Span::new(Track::Owner, name, begun, ended));
        }
    }

    /// Whether the load is traced.
    pub fn is_traced(&self) -> bool {
        self.timeline.is_some()
    }

    /// Writes the trace that `Options::trace` asked for, with `report` (JSON) in it, only once. A load that is dropped
    /// writes its trace too, with its own report, but reports no error if that fails.
    pub fn write_trace(&self, report: &serde_json::Value) -> Result<()> {
        self.same_process()?;
        self.timeline.as_ref().map_or(Ok(()), |timeline| timeline.write(|file| self.checkpoint.name_of(file), report))
    }

    /// Wants whose destination has an overwritten byte; known when the load has ended. Three cases are not known better,
    /// and count: what a read or a copy that hangs is to write, which it may do at any time; what a call was to write that
    /// failed in a driver; and what one was to write that failed in a file system that does not say what it had written
    /// (ZFS, some network file systems).
    pub fn touched(&self) -> Vec<u32> {
        self.shared.lock().touched.clone()
    }

    /// The bytes of a want, complete. Allowed once per want, after `next` gave it out or `wait` reported the end.
    pub fn view(&self, want: u32) -> Result<View> {
        self.view_in(&mut self.shared.lock(), want)
    }

    /// The bytes of several wants, as [`view`](Self::view) gives them, in one call.
    pub fn views(&self, wants: &[u32]) -> Result<Vec<View>> {
        let mut views = Vec::with_capacity(wants.len());
        let mut state = self.shared.lock();
        for &want in wants {
            match self.view_in(&mut state, want) {
                Ok(view) => views.push(view),
                Err(e) => {
                    // Freeing what was viewed calls into drivers and frameworks, so the lock is not held.
                    drop(state);
                    return Err(e);
                }
            }
        }
        Ok(views)
    }

    fn view_in(&self, state: &mut State, want: u32) -> Result<View> {
        let place = *self.layout.places.get(want as usize).ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("there is no want {want}: the load has {}", self.wants.len()))
        })?;
        if self.layout.strides_of(want).is_some() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("the bytes of want {want} are strided or of another dtype: no view shows them"),
            ));
        }
        if std::mem::replace(&mut state.viewed[want as usize], true) {
            return Err(Error::new(ErrorKind::Invalid, format!("want {want} was handed out before")));
        }
        let last = {
            let unviewed = &mut state.unviewed[place.block as usize];
            *unviewed -= 1;
            *unviewed == 0
        };
        let slot = &mut state.blocks[place.block as usize];
        match if last { slot.take() } else { slot.clone() } {
            Some(block) => Ok(block.view(place.offset, place.nbytes)),
            // An empty tensor is complete from the start, perhaps before its block has memory.
            None if place.nbytes == 0 => Ok(Block::held(0, Arc::new(())).view(0, 0)),
            None => Err(Error::new(ErrorKind::Internal, "a tensor was asked for before its block")),
        }
    }

    /// Address of a want's first byte, when its block has memory: a host address or a device pointer.
    pub fn address(&self, want: u32) -> Result<u64> {
        let place = self.layout.places.get(want as usize);
        let place = place.ok_or_else(|| Error::new(ErrorKind::Invalid, format!("there is no want {want}")))?;
        let state = self.shared.lock();
        let block = state.blocks[place.block as usize].as_ref();
        let block = block.ok_or_else(|| Error::new(ErrorKind::Invalid, "the tensor's block is not there yet"))?;
        Ok(block.address() + place.offset)
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forked,
            "this load belongs to the process that started it; start a new one after the fork",
        ))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(thread);
            return;
        }
        self.close();
        if self.timeline.is_some() {
            let Report { seconds, nbytes, tensors, bottleneck, .. } = self.report();
            let error = self.wait(Some(Duration::ZERO)).err().map(|e| e.to_string());
            let account = serde_json::json!({
                "seconds": seconds, "nbytes": nbytes, "tensors": tensors, "bottleneck": bottleneck, "error": error
            });
            let _nobody_to_tell = self.write_trace(&account);
        }
        self.release();
    }
}
