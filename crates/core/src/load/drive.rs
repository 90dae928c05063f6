//! The engine thread: carries out the engine's actions, tells the load's owner, and sleeps in between.

use super::blocks::{ticket, BlockMemory, GpuBlocks};
use super::exchange_trial::ExchangeTrial;
use super::files::LoadFiles;
use super::journal::Journal;
use super::shared::{internal, somewhere, Message, OwnerLink};
use super::transport::Transport;
use crate::device::{Copied, Fence};
use crate::engine::{nanos, Action, Engine, Event, Nanos, Ready};
use crate::error::Result;
use crate::machine::thread_cpu;
use crate::peers::Peers;
use crate::source::{Done, Progress};
use crate::staging::{shared_memory_pages, Staged};
use crate::store::{CacheFill, DiskUse};
use crate::sync::lock;
use crate::threads::{guarded, of_panic, step};
use crate::way::{Chosen, Cold, Routing, Through};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// GPU blocks that the engine thread allocates between two polls of source and device: an allocation takes 30 ms/GiB.
const ALLOCATIONS_PER_ROUND: usize = 4;

/// The parts that one load's engine thread works with. They are dropped in this order.
pub(super) struct Driver {
    pub(super) owner: OwnerLink,
    pub(super) files: LoadFiles,
    pub(super) engine: Engine<Arc<Staged>>,
    pub(super) transport: Transport,
    pub(super) memory: BlockMemory,
    /// Set if the engine thread allocates the GPU blocks itself.
    pub(super) gpu: Option<GpuBlocks>,
    pub(super) journal: Journal,
    pub(super) cache: CacheUse,
    /// The other ranks of the load: they are told how it ended.
    pub(super) ranks: Option<Ranks>,
}

/// The effect of a load on the page cache.
pub(super) struct CacheUse {
    pub(super) routing: Arc<Routing>,
    /// The decision by the pace of the storage, if there is a trial. After the load, bytes that went past the page cache are
    /// filled into it, unless they were kept.
    pub(super) chosen: Option<Chosen>,
    /// Pauses fills of the page cache during this load, if the load wants the disk.
    pub(super) _disk: Option<DiskUse>,
}

/// The other ranks of a load.
pub(super) struct Ranks {
    /// The trial with them, if there is one.
    pub(super) trial: Option<ExchangeTrial>,
    pub(super) peers: Peers,
}

/// The engine's clock: the time since the engine thread began to work on the load.
#[derive(Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn now(self) -> Nanos {
        self.at(Instant::now())
    }

    fn at(self, instant: Instant) -> Nanos {
        nanos(instant.saturating_duration_since(self.0))
    }
}

impl Driver {
    /// Runs the load to its end and publishes the outcome, whatever happens. All that writes to the caller's memory waits
    /// for the fence.
    pub(super) fn run(mut self, fence: Option<Fence>) {
        let cpu = thread_cpu();
        let (shared, began) = (self.owner.shared.clone(), self.journal.began);
        let outcome = guarded("penstock-engine", || {
            let outcome = self.drive(fence);
            self.finish(outcome, cpu)
        })
        .and_then(|outcome| outcome);
        if let (Some(ranks), Err(error)) = (&self.ranks, &outcome) {
            ranks.peers.fail(error);
        }
        // A load that went well reports them too: if one of several loads fails, the destinations of the others have been
        // overwritten as well.
        shared.lock().touched = (0..).zip(self.engine.touched()).filter(|t| t.1).map(|t| t.0).collect();
        let fill = shared.lock().report.cache_fill.clone();
        // Drop the source and the device before publishing the outcome: a caller that has seen the outcome may count
        // threads and descriptors. Publish even if the drop panics, or the owner waits forever.
        let gone = catch_unwind(AssertUnwindSafe(move || drop(self)));
        let outcome = outcome.and(gone.map_err(|panic| of_panic("penstock-engine", &*panic)));
        if let (Some(fill), Ok(())) = (&fill, &outcome) {
            fill.start();
        }
        let mut state = shared.lock();
        if fill.is_some() && outcome.is_err() {
            // The load has failed after all: its report must not promise a fill that never starts.
            state.report.cache_fill = None;
            if state.report.cache == "fill" {
                state.report.cache = "bypass";
            }
        }
        // Ending streams and threads is a part of the load: it is over when the caller can go on.
        state.report.seconds = began.seconds();
        state.report.cpu_seconds = began.cpu_seconds();
        drop(state);
        shared.end(outcome);
    }

    /// Completes the report, and gives it to the owner.
    fn finish(&mut self, outcome: Result<()>, cpu_at_start: Duration) -> Result<()> {
        // Before the files are compared, because this touches some of the pages that were left.
        let touches = self.transport.source.take_touches();
        // A file that changed while it was read gives a mixture of old and new bytes. None of its tensors can be
        // trusted.
        let outcome = outcome.and_then(|()| self.unchanged(None));
        let outcome = outcome.map_err(|e| somewhere(e, &self.files.checkpoint));
        let engine = thread_cpu().saturating_sub(cpu_at_start);
        self.finish_cache(outcome.is_ok());
        let report = &mut self.journal.report;
        report.engine_cpu_seconds = engine.as_secs_f64();
        if let Some(ranks) = &self.ranks {
            ranks.trial.iter().for_each(|trial| trial.tell(report));
            let (exchange, traffic) = (report.exchange.get_or_insert_default(), ranks.peers.traffic());
            (exchange.sent, exchange.lent) = (traffic.sent + traffic.lent, traffic.lent);
            exchange.shared_pages = (traffic.lent > 0).then(shared_memory_pages);
        }
        report.waits = self.journal.tally.waits();
        report.first_touch_bytes = touches.left;
        report.first_touch_seconds = touches.left_seconds;
        report.touched_pages = touches.pages;
        report.touch_calls = touches.calls;
        report.network = self.files.storage.traffic();
        report.disk_cache = self.files.storage.disk_cache();
        if let Some(cache) = &report.disk_cache {
            let brought =
                (0..).zip(&self.memory.schedule.extents).filter(|(number, _)| self.engine.has_brought(*number));
            brought.for_each(|(_, e)| cache.has_loaded(e.file, e.bytes_read()));
        }
        self.transport.tell(report);
        let here = self.cache.routing.here;
        if here {
            // The caller's own thread mapped the pages, so the load waited for nothing else.
            report.waits.source = engine;
        }
        report.find_bottleneck(if here { Duration::ZERO } else { engine });
        let mut state = self.owner.shared.lock();
        state.report = report.clone();
        state.arrived = self.engine.bytes_arrived();
        outcome
    }

    /// Reports the choice by the pace of the storage, if there was a trial. Where bytes went past the page cache of a load
    /// that has not failed, the report gets a fill.
    fn finish_cache(&mut self, is_ok: bool) {
        let CacheUse { routing, chosen, .. } = &self.cache;
        let Some(choice) = chosen.as_ref().and_then(|chosen| lock(chosen).clone()) else { return };
        let report = &mut self.journal.report;
        report.cache = choice.cold.name();
        report.cache_reason = choice.reason;
        if let (true, Ok(files)) = (is_ok, self.files.checkpoint.local_files()) {
            // What went through the page cache too: the trial's bytes are still on their way there, nobody has touched
            // them, and the kernel may have taken others back.
            let read = (0..).zip(&self.memory.schedule.extents);
            let read = read.filter(|(number, e)| self.engine.has_brought(*number) && !e.is_received());
            let ranges = read.map(|(_, e)| (e.file, e.offset..e.offset + e.len)).collect();
            let whole: Vec<_> = routing.ways.iter().map(|w| w.through == Through::HugePages).collect();
            report.cache_fill = CacheFill::new(files, ranges, &whole);
            if choice.cold == Cold::Bypass && report.cache_fill.is_some() {
                report.cache = "fill";
            }
        }
    }

    fn drive(&mut self, fence: Option<Fence>) -> Result<()> {
        let clock = Clock(Instant::now());
        if let Some(Err(e)) = fence.map(|fence| self.transport.wait_for(fence)) {
            self.engine.on(clock.now(), Event::Failed(e));
        }
        let (mut events, mut copied) = (Vec::new(), Vec::new());
        loop {
            step("penstock-engine");
            self.engine.turn(clock.now());
            self.read_inbox(clock);
            let more = self.allocate_blocks(clock);
            self.listen(clock, &mut events, &mut copied);
            if let Some(Ranks { trial: Some(trial), peers, .. }) = &mut self.ranks {
                trial.go_on(clock.now(), &mut self.engine, peers);
            }
            let cancelled = self.act(clock);
            let revoked = self.publish(clock);
            match self.engine.outcome() {
                Some(Err(e)) => {
                    // If it stalled, the error names the file and range of the oldest read in flight.
                    let oldest = self.engine.stalled().and_then(|extent| self.memory.extent(ticket(extent)));
                    return Err(self.files.located(e, oldest));
                }
                Some(Ok(())) => return self.part(),
                // Else the source may have something at once, or the engine does.
                _ if more || cancelled || revoked => {}
                _ => self.sleep(clock),
            }
        }
    }

    /// Waits until the other ranks have everything too: what one of them lacks may be this rank's.
    fn part(&self) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        // Before the others hear that all is well.
        self.unchanged(None)?;
        ranks.peers.part(|| !self.owner.cancelled && !self.owner.cancels())
    }

    /// Tells the engine what source and device have done.
    fn listen(&mut self, clock: Clock, events: &mut Vec<Progress>, copied: &mut Vec<Copied>) {
        for e in self.transport.poll(events, copied).into_iter().filter_map(Result::err) {
            self.engine.on(clock.now(), Event::Failed(e));
        }
        let now = clock.now();
        for event in events.drain(..) {
            let event = match event {
                Progress::Done(done) => self.has_read(done),
                Progress::Arrived(ticket) => Event::Arrived(ticket),
                // The dispatcher has sent it again. If none did, it has failed.
                Progress::Refused { read, cause } => self.has_read(Done { result: Err(cause), ..read.given_up() }),
                Progress::Received(ticket) => Event::Received(ticket),
            };
            self.engine.on(now, event);
        }
        for done in copied.drain(..) {
            let event = self.has_copied(done);
            self.engine.on(now, event);
        }
    }

    fn has_read(&mut self, done: Done) -> Event {
        let e = self.memory.extent(done.ticket);
        e.into_iter().for_each(|e| self.journal.has_read(&done, e));
        if let Some(borrowed) = self.ranks.as_ref().and_then(|ranks| ranks.peers.borrowed(done.ticket)) {
            self.engine.brought(done.ticket, Arc::new(Staged::Borrowed(borrowed)));
        }
        let result = done.result.map_err(|error| self.files.located(error, e));
        Event::ReadDone(done.ticket, result, done.written)
    }

    fn has_copied(&mut self, Copied { ticket, result, begun }: Copied) -> Event {
        let e = self.memory.extent(ticket);
        e.into_iter().for_each(|e| self.journal.has_copied(ticket, e));
        Event::CopyDone(ticket, result.map_err(|error| self.files.located(error, e)), begun)
    }

    /// An error if one of these files (`None`: of all files that were opened) has changed.
    fn unchanged(&self, which: Option<Vec<u32>>) -> Result<()> {
        self.files.unchanged(which, || !self.owner.cancels())
    }

    fn read_inbox(&mut self, clock: Clock) {
        let mut state = self.owner.shared.with_news();
        for message in std::mem::take(&mut state.messages) {
            let event = match message {
                Message::Grant(block, memory, fence) => {
                    self.memory.blocks[block as usize] = Some(memory);
                    let told = fence.map_or(Ok(()), |fence| self.transport.wait_for(fence));
                    told.map_or_else(Event::Failed, |()| Event::Granted(block))
                }
                Message::Take(want) => Event::Taken(want),
                Message::Cancel => {
                    self.owner.cancelled = true;
                    Event::Cancelled
                }
            };
            self.engine.on(clock.now(), event);
        }
    }

    /// Allocates GPU blocks if the engine thread does that. True if more blocks can be allocated at once.
    fn allocate_blocks(&mut self, clock: Clock) -> bool {
        let Some(gpu) = &mut self.gpu else { return false };
        let mut wanted = Vec::new();
        self.engine.wanted_blocks(&mut wanted);
        for &block in wanted.iter().take(ALLOCATIONS_PER_ROUND) {
            let begun = Instant::now();
            let nbytes = self.memory.layout.blocks[block as usize].nbytes;
            match gpu.allocate(nbytes) {
                Ok(granted) => {
                    self.journal.has_allocated(begun, nbytes);
                    self.owner.shared.lock().give(block, granted.clone());
                    self.memory.blocks[block as usize] = Some(granted);
                    self.engine.on(clock.now(), Event::Granted(block));
                }
                Err(e) => {
                    self.engine.on(clock.now(), Event::Failed(e));
                    return false;
                }
            }
        }
        wanted.len() > ALLOCATIONS_PER_ROUND
    }

    /// Carries out the engine's actions until it has none. True if the source was told to give up.
    fn act(&mut self, clock: Clock) -> bool {
        let mut cancelled = false;
        loop {
            let now = clock.now();
            while let Some(action) = self.engine.next(now, &mut self.transport.ring) {
                match action {
                    Action::Read { extent } => self.send_read(now, extent),
                    Action::Land { extent } => {
                        self.land(extent).unwrap_or_else(|e| self.engine.on(now, Event::Failed(e)));
                    }
                    Action::Copy { extent } => {
                        // If this fails, the device has not taken it.
                        let failed = |e| Event::CopyDone(ticket(extent), Err(e), Vec::new());
                        self.send_copy(extent).unwrap_or_else(|e| self.engine.on(now, failed(e)));
                    }
                    Action::Withdraw { .. } => self.transport.held_back = None,
                    Action::Cancel => {
                        if let (Some(ranks), Some(error)) = (&self.ranks, self.engine.failure()) {
                            ranks.peers.fail(error);
                        }
                        self.transport.source.cancel();
                        cancelled = true;
                    }
                    Action::Abandon => {
                        // The slabs stay with the reads and copies that hang: each holds a lease. Other loads must not
                        // wait for these slabs.
                        self.engine.take_quarantined().iter().for_each(|slab| slab.set_apart());
                        let never = self.transport.device.as_mut().map(|device| device.abandon());
                        self.engine.never_begun(&never.unwrap_or_default());
                    }
                }
            }
            let Err(e) = self.transport.source.flush() else { return cancelled };
            let failed = self.engine.failed();
            self.engine.on(now, Event::Failed(e));
            if failed || !self.engine.failed() {
                return cancelled;
            }
        }
    }

    /// Starts a read, or gives the source the one that was held back.
    fn send_read(&mut self, now: Nanos, extent: u32) {
        let read = match self.transport.held_back.take() {
            Some(read) => read,
            None => match self.memory.read(extent, self.engine.slab(extent)) {
                Ok(read) => {
                    self.journal.starts(extent);
                    read
                }
                Err(e) => return self.engine.on(now, Event::ReadDone(ticket(extent), Err(e), 0)),
            },
        };
        self.transport.held_back = self.transport.source.submit(read).err();
        if self.transport.held_back.is_some() {
            self.engine.on(now, Event::NoRoom(ticket(extent)));
        }
    }

    fn land(&mut self, extent: u32) -> Result<()> {
        let slab = self.slab(extent)?.clone();
        let into = self.memory.destination(extent, Some(&slab))?;
        self.transport.source.land(ticket(extent), into, slab)
    }

    fn send_copy(&mut self, extent: u32) -> Result<()> {
        let batch = self.memory.batch(extent, self.slab(extent)?)?;
        self.journal.starts(extent);
        self.transport.device.as_mut().ok_or_else(|| internal("a slab landing without a device"))?.copy(batch)
    }

    fn slab(&self, extent: u32) -> Result<&Arc<Staged>> {
        self.engine.slab(extent).ok_or_else(|| internal("an extent without its slab"))
    }

    /// Tells the owner the news. True if the load has failed by that.
    fn publish(&mut self, clock: Clock) -> bool {
        let failed = self.engine.failed();
        let (mut ready, mut tensors, begun) = (Vec::new(), 0, Instant::now());
        while let Some(Ready { want, completes }) = self.engine.ready() {
            tensors += 1;
            self.journal.report.first_tensor_seconds.get_or_insert_with(|| self.journal.began.seconds());
            if self.owner.stream {
                ready.push(want);
            }
            if let Some(block) = completes.and_then(|block| self.memory.blocks[block as usize].take()) {
                block.complete();
            }
        }
        // No mixture is handed out: after the last of their bytes was read, the files of these wants must be unchanged. If
        // they are not, nothing is handed out, and the load fails.
        let mut which: Vec<u32> = ready.iter().map(|&want| self.memory.layout.files[want as usize]).collect();
        which.dedup();
        if let Err(e) = self.unchanged(Some(which)) {
            self.engine.on(clock.now(), Event::Revoked(e));
            ready.clear();
        }
        self.journal.hands_out(tensors, begun);
        let mut wanted = Vec::new();
        if self.gpu.is_none() {
            self.engine.wanted_blocks(&mut wanted);
        }
        self.owner.tell(ready, wanted, self.engine.bytes_arrived());
        self.engine.failed() != failed
    }

    /// Sleeps until something happens, or the engine's deadline passes.
    fn sleep(&mut self, clock: Clock) {
        let (waits_for, before) = (self.engine.waits_for(), Instant::now());
        let left = self.engine.deadline().map(|d| Duration::from_nanos(d.saturating_sub(clock.at(before))));
        self.transport.sleep(self.owner.shared.inbox.fd(), self.engine.wants_slab(), left);
        self.journal.has_waited(waits_for, before, self.engine.reads_in_flight(), self.engine.copies_in_flight());
    }
}
