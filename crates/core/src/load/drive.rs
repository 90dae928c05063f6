//! The engine thread: carries out the engine's actions, tells the load's owner, and sleeps in between.

use super::addresses::Addresses;
use super::exchange_trial::ExchangeTrial;
use super::shared::{internal, somewhere, Message, Shared};
use crate::device::api::Api;
use crate::device::gpu::{GpuMemory, SharedContext};
use crate::device::{Batch, Copied, Device, Fence};
use crate::engine::{nanos, Action, Engine, Event, Nanos, Ready, Slabs};
use crate::error::{Error, Result};
use crate::extent::{Extent, InCommon, Landing, Ticket};
use crate::format::Checkpoint;
use crate::machine::{thread_cpu, time_of};
use crate::memory::{Block, Keep};
use crate::peers::Peers;
use crate::plan::layout::Layout;
use crate::plan::schedule::Schedule;
use crate::source::{self, wait_readable, Done, Read, Source};
use crate::staging::{Lease, Share};
use crate::stats::{Report, Tally};
use crate::store::{patiently, CacheFill, DiskUse, Storage};
use crate::sync::lock;
use crate::threads::{guarded, of_panic, step};
use crate::timeline::{Span, Timeline, Track};
use crate::way::{Chosen, Cold, Routing, Through};
use std::collections::HashMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// GPU blocks that the engine thread allocates between two polls of source and device: an allocation takes 30 ms/GiB.
const ALLOCATIONS_PER_ROUND: usize = 4;

/// Everything one load's engine thread works with.
pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) files: Arc<Storage>,
    /// Whether asking about the files may hang.
    pub(super) may_hang: bool,
    pub(super) schedule: Arc<Schedule>,
    pub(super) layout: Arc<Layout>,
    pub(super) engine: Engine<Arc<Lease>>,
    pub(super) source: Box<dyn Source>,
    pub(super) device: Option<Box<dyn Device>>,
    pub(super) ring: Share,
    pub(super) blocks: Vec<Option<Block>>,
    /// Set if the engine thread allocates the GPU blocks itself.
    pub(super) gpu: Option<GpuBlocks>,
    pub(super) stream: bool,
    pub(super) stall: Duration,
    /// The read that the engine holds back, because the source had no room for it.
    pub(super) held_back: Option<Read>,
    pub(super) report: Report,
    pub(super) tally: Tally,
    pub(super) began: Began,
    pub(super) fence: Option<Fence>,
    /// Pauses fills of the page cache during this load, if the load wants the disk.
    pub(super) _disk: Option<DiskUse>,
    pub(super) routing: Arc<Routing>,
    /// The decision by the pace of the storage, if there is a trial. After the load, bytes that went past the page cache are
    /// filled into it, unless they were kept.
    pub(super) trial: Option<Chosen>,
    pub(super) record: Option<Record>,
    /// How many bytes other ranks get of each extent that is sent.
    pub(super) sends: HashMap<Ticket, u64>,
    /// The trial with the other ranks, if there is one.
    pub(super) exchange_trial: Option<ExchangeTrial>,
    /// The owner has said that the load is to end.
    pub(super) cancelled: bool,
    /// The other ranks of the load. The last to go: they are told how it ended.
    pub(super) peers: Option<Peers>,
}

/// The record of a load, as the engine thread writes it.
pub(super) struct Record {
    timeline: Arc<Timeline>,
    /// When the read of each extent was started, then when its copies were.
    started: Vec<Instant>,
    ready: u64,
}

impl Record {
    pub(super) fn new(timeline: Arc<Timeline>, extents: usize) -> Self {
        let now = Instant::now();
        timeline.add(Span::new(Track::Plan, "plan", timeline.begun(), now));
        Record { timeline, started: vec![now; extents], ready: 0 }
    }

    fn start(&mut self, extent: u64) {
        if let Some(started) = self.started.get_mut(extent as usize) {
            *started = Instant::now();
        }
    }

    fn span(&self, track: Track, name: &'static str, extent: u64) -> Span {
        let begun = self.started.get(extent as usize).copied();
        Span { extent: Some(extent), ..Span::new(track, name, begun.unwrap_or_else(Instant::now), Instant::now()) }
    }
}

impl Slabs for Share {
    type Slab = Arc<Lease>;
    fn acquire(&mut self) -> Result<Option<Arc<Lease>>> {
        // Clear first, then look: a slab that becomes free after the look notifies again.
        self.clear();
        Ok(self.try_acquire()?.map(Arc::new))
    }
}

/// GPU blocks that the engine thread allocates itself. It retains the context when the first block is wanted: creating
/// a context takes 0.1 s and more, and the first reads go on meanwhile.
pub(super) struct GpuBlocks {
    api: Arc<Api>,
    ordinal: u32,
    context: Option<Arc<SharedContext>>,
}

impl GpuBlocks {
    pub(super) fn new(ordinal: u32) -> Result<Self> {
        Ok(Self { api: Api::load()?, ordinal, context: None })
    }

    fn allocate(&mut self, nbytes: u64) -> Result<Block> {
        let context = match &mut self.context {
            Some(context) => context,
            none => none.insert(SharedContext::retain(&self.api, self.ordinal)?),
        };
        let memory = GpuMemory::new(context, nbytes)?;
        Ok(Block::held(memory.address(), Arc::new(memory)))
    }
}

/// When a load began, by the wall clock and in CPU time of this process.
#[derive(Clone, Copy)]
pub(super) struct Began {
    wall: Instant,
    cpu: Duration,
}

impl Began {
    pub(super) fn now() -> Self {
        Self { wall: Instant::now(), cpu: time_of(libc::CLOCK_PROCESS_CPUTIME_ID) }
    }

    /// Since then, by the wall clock.
    pub(super) fn seconds(&self) -> f64 {
        self.wall.elapsed().as_secs_f64()
    }

    /// CPU time of the whole process since then.
    fn cpu_seconds(&self) -> f64 {
        time_of(libc::CLOCK_PROCESS_CPUTIME_ID).saturating_sub(self.cpu).as_secs_f64()
    }
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
    /// Runs the load to its end and publishes the outcome, whatever happens.
    pub(super) fn run(mut self) {
        let cpu = thread_cpu();
        let (shared, began) = (self.shared.clone(), self.began);
        let outcome = guarded("penstock-engine", || {
            let outcome = self.drive();
            self.finish(outcome, cpu)
        })
        .and_then(|outcome| outcome);
        if let (Some(peers), Err(error)) = (&self.peers, &outcome) {
            peers.fail(error);
        }
        shared.lock().touched = self.touched();
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

    /// Wants whose destination has been overwritten. A load that went well reports them too: if one of several loads
    /// fails, the destinations of the others have been overwritten as well.
    fn touched(&self) -> Vec<u32> {
        (0..).zip(self.engine.touched()).filter(|t| t.1).map(|t| t.0).collect()
    }

    fn finish(&mut self, outcome: Result<()>, cpu_at_start: Duration) -> Result<()> {
        // Before the files are compared, because this touches some of the pages that were left.
        let touches = self.source.take_touches();
        // A file that changed while it was read gives a mixture of old and new bytes. None of its tensors can be
        // trusted.
        let outcome = outcome.and_then(|()| self.unchanged(None));
        let outcome = outcome.map_err(|e| somewhere(e, &self.checkpoint));
        let report = &mut self.report;
        let engine = thread_cpu().saturating_sub(cpu_at_start);
        report.engine_cpu_seconds = engine.as_secs_f64();
        if let Some(trial) = &self.exchange_trial {
            trial.tell(report);
        }
        report.peak_staging = self.ring.peak();
        report.waits = self.tally.waits();
        report.first_touch_bytes = touches.left;
        report.first_touch_seconds = touches.left_seconds;
        report.touched_pages = touches.pages;
        report.touch_calls = touches.calls;
        if let Some(choice) = self.trial.as_ref().and_then(|trial| lock(trial).clone()) {
            report.cache = choice.cold.name();
            report.cache_reason = choice.reason;
            if let (Ok(()), Ok(files)) = (&outcome, self.checkpoint.local_files()) {
                // What went through the page cache too: the trial's bytes are still on their way there, nobody has touched
                // them, and the kernel may have taken others back.
                let read = (0..).zip(&self.schedule.extents);
                let read = read.filter(|(number, e)| self.engine.has_brought(*number) && !e.is_received());
                let ranges = read.map(|(_, e)| (e.file, e.offset..e.offset + e.len)).collect();
                let whole: Vec<_> = self.routing.ways.iter().map(|w| w.through == Through::HugePages).collect();
                report.cache_fill = CacheFill::new(files, ranges, &whole);
                if choice.cold == Cold::Bypass && report.cache_fill.is_some() {
                    report.cache = "fill";
                }
            }
        }
        report.fallbacks.extend(self.source.take_fallbacks());
        report.network = self.files.traffic();
        if let Some(device) = &self.device {
            report.fallbacks.extend(device.fallbacks());
        }
        if self.routing.here {
            // The caller's own thread mapped the pages, so the load waited for nothing else.
            report.waits.source = engine;
            report.find_bottleneck(Duration::ZERO);
        } else {
            report.find_bottleneck(engine);
        }
        let mut state = self.shared.lock();
        state.report = report.clone();
        state.arrived = self.engine.bytes_arrived();
        outcome
    }

    fn drive(&mut self) -> Result<()> {
        let clock = Clock(Instant::now());
        if let Some(Err(e)) = self.fence.map(|fence| wait_for(fence, &mut *self.source, self.device.as_mut())) {
            self.engine.on(clock.now(), Event::Failed(e));
        }
        let (mut events, mut copied) = (Vec::new(), Vec::new());
        let mut told = u64::MAX;
        loop {
            step("penstock-engine");
            self.engine.turn(clock.now());
            self.read_inbox(clock);
            let more = self.allocate_blocks(clock);
            self.listen(clock, &mut events, &mut copied);
            if let (Some(trial), Some(peers)) = (&mut self.exchange_trial, &self.peers) {
                trial.go_on(clock.now(), &mut self.engine, peers);
            }
            let cancelled = self.act(clock);
            let revoked = self.publish(clock, &mut told);
            match self.engine.outcome() {
                Some(Err(e)) => return Err(self.stalled_at(e)),
                Some(Ok(())) => return self.part(),
                // Else the source may have something at once, or the engine does.
                _ if more || cancelled || revoked => {}
                _ => self.sleep(clock),
            }
        }
    }

    /// Whether the owner wants the load to end.
    fn is_cancelled(&self) -> bool {
        self.cancelled || self.shared.lock().messages.iter().any(|m| matches!(m, Message::Cancel))
    }

    /// Waits until the other ranks have everything too: what one of them lacks may be this rank's.
    fn part(&self) -> Result<()> {
        let Some(peers) = &self.peers else { return Ok(()) };
        // Before the others hear that all is well.
        self.unchanged(None)?;
        peers.part(|| !self.is_cancelled())
    }

    /// Tells the engine what source and device have done.
    fn listen(&mut self, clock: Clock, events: &mut Vec<source::Progress>, copied: &mut Vec<Copied>) {
        if let Err(e) = self.source.poll(events) {
            self.engine.on(clock.now(), Event::Failed(e));
        }
        if let Some(device) = &mut self.device {
            if let Err(e) = device.poll(copied) {
                self.engine.on(clock.now(), Event::Failed(e));
            }
        }
        if events.is_empty() && copied.is_empty() {
            return;
        }
        let now = clock.now();
        for event in events.drain(..) {
            let Done { ticket, result, lane, written } = match event {
                source::Progress::Done(done) => done,
                source::Progress::Arrived(ticket) => {
                    self.engine.on(now, Event::Arrived(ticket));
                    continue;
                }
                // The dispatcher has sent it again. If none did, it has failed.
                source::Progress::Refused { read, cause } => {
                    Done { ticket: read.ticket, result: Err(cause), lane: read.lane, written: read.written }
                }
                source::Progress::Received(ticket) => {
                    self.engine.on(now, Event::Received(ticket));
                    continue;
                }
            };
            let e = self.schedule.extents.get(ticket.0 as usize);
            if let Ok(bytes) = &result {
                if e.is_some_and(Extent::is_received) {
                    self.report.exchange.get_or_insert_default().received += bytes;
                }
                let skipped = e.and_then(|e| e.rows).map_or(0, |rows| rows.skipped);
                self.report.routes.count(lane, bytes.saturating_sub(skipped));
                self.report.rerouted_extents += u64::from(e.map(|e| e.lane) != Some(lane));
            }
            if let (Some(record), Some(e)) = (&self.record, self.schedule.extents.get(ticket.0 as usize)) {
                let span =
                    record.span(Track::Reading, "read", ticket.0).of_read(ticket, lane, (e.file, e.offset), e.len);
                record.timeline.add(Span { at: span.at.filter(|_| !e.is_received()), ..span });
            }
            let result = result.map_err(|e| self.located(e, ticket));
            self.engine.on(now, Event::ReadDone(ticket, result, written));
        }
        for Copied { ticket, result, begun } in copied.drain(..) {
            if let (Some(record), Some(e)) = (&self.record, self.schedule.extents.get(ticket.0 as usize)) {
                let span = record.span(Track::Copying, "transfer", ticket.0);
                record.timeline.add(Span { kind: "device", bytes: e.need, ..span });
            }
            if let (Ok(()), Some(bytes), Some(exchange)) = (&result, self.sends.get(&ticket), &mut self.report.exchange)
            {
                exchange.sent += bytes;
            }
            let result = result.map_err(|e| self.located(e, ticket));
            self.engine.on(now, Event::CopyDone(ticket, result, begun));
        }
    }

    /// An error of kind `Changed` if one of these files (`None`: of all files that were opened) has changed.
    fn unchanged(&self, which: Option<Vec<u32>>) -> Result<()> {
        let ask = match &which {
            Some(which) => which.iter().any(|&file| !self.files.is_pinned(file)),
            None => !self.files.all_pinned(),
        };
        if !ask {
            return Ok(());
        }
        let files = self.files.clone();
        let look = move || match which {
            Some(which) => which.iter().try_for_each(|&file| files.verify(file)),
            None => files.verify_all(),
        };
        if !self.may_hang {
            return look();
        }
        let go_on = || !self.shared.lock().messages.iter().any(|m| matches!(m, Message::Cancel));
        patiently(&self.files, look, self.stall, go_on)
    }

    /// Hands out no mixture: after the last of their bytes was read, the files of `wants` must be unchanged. If they are
    /// not, nothing is handed out, and the load fails.
    fn hand_out(&mut self, clock: Clock, wants: Vec<u32>) -> Vec<u32> {
        let mut which: Vec<u32> = Vec::new();
        for &want in &wants {
            let file = self.layout.files[want as usize];
            if which.last() != Some(&file) {
                which.push(file);
            }
        }
        if which.is_empty() {
            return wants;
        }
        match self.unchanged(Some(which)) {
            Ok(()) => wants,
            Err(e) => {
                self.engine.on(clock.now(), Event::Revoked(e));
                Vec::new()
            }
        }
    }

    fn read_inbox(&mut self, clock: Clock) {
        let mut state = self.shared.with_news();
        for message in std::mem::take(&mut state.messages) {
            let event = match message {
                Message::Grant(block, memory, fence) => {
                    self.blocks[block as usize] = Some(memory);
                    let told = fence.map_or(Ok(()), |fence| wait_for(fence, &mut *self.source, self.device.as_mut()));
                    told.map_or_else(Event::Failed, |()| Event::Granted(block))
                }
                Message::Take(want) => Event::Taken(want),
                Message::Cancel => {
                    self.cancelled = true;
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
            let nbytes = self.layout.blocks[block as usize].nbytes;
            match gpu.allocate(nbytes) {
                Ok(granted) => {
                    if let Some(record) = &self.record {
                        let span = Span::new(Track::Allocate, "allocate", begun, Instant::now());
                        record.timeline.add(Span { bytes: nbytes, ..span });
                    }
                    self.shared.lock().give(block, granted.clone());
                    self.blocks[block as usize] = Some(granted);
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
            while let Some(action) = self.engine.next(now, &mut self.ring) {
                match action {
                    Action::Read { extent } => self.send_read(now, extent),
                    Action::Land { extent } => {
                        if let Err(e) = self.land(extent) {
                            self.engine.on(now, Event::Failed(e));
                        }
                    }
                    Action::Copy { extent } => {
                        if let Err(e) = self.send_copy(extent) {
                            // The device has not taken it.
                            self.engine.on(now, Event::CopyDone(ticket(extent), Err(e), Vec::new()));
                        }
                    }
                    Action::Withdraw { .. } => self.held_back = None,
                    Action::Cancel => {
                        if let (Some(peers), Some(error)) = (&self.peers, self.engine.failure()) {
                            peers.fail(error);
                        }
                        self.source.cancel();
                        cancelled = true;
                    }
                    Action::Abandon => {
                        // The slabs stay with the reads and copies that hang: each holds a lease. Other loads must not
                        // wait for these slabs.
                        self.engine.take_quarantined().iter().for_each(|slab| slab.set_apart());
                        let never = self.device.as_mut().map(|device| device.abandon());
                        self.engine.never_begun(&never.unwrap_or_default());
                    }
                }
            }
            let Err(e) = self.source.flush() else { return cancelled };
            let failed = self.engine.failed();
            self.engine.on(now, Event::Failed(e));
            if failed || !self.engine.failed() {
                return cancelled;
            }
        }
    }

    /// Starts a read, or gives the source the one that was held back.
    fn send_read(&mut self, now: Nanos, extent: u32) {
        let read = match self.held_back.take() {
            Some(read) => read,
            None => match self.read(extent) {
                Ok(read) => {
                    self.record.iter_mut().for_each(|r| r.start(u64::from(extent)));
                    read
                }
                Err(e) => return self.engine.on(now, Event::ReadDone(ticket(extent), Err(e), 0)),
            },
        };
        self.held_back = self.source.submit(read).err();
        if self.held_back.is_some() {
            self.engine.on(now, Event::NoRoom(ticket(extent)));
        }
    }

    fn land(&mut self, extent: u32) -> Result<()> {
        let slab = self.slab(extent)?.clone();
        if self.schedule.extents[extent as usize].len > slab.len() as u64 {
            return Err(internal("an extent that is longer than its slab"));
        }
        let into = self.addresses(extent).destination(Some(slab.address()))?;
        self.source.land(ticket(extent), into, slab)
    }

    fn send_copy(&mut self, extent: u32) -> Result<()> {
        let batch = self.batch(extent)?;
        self.record.iter_mut().for_each(|r| r.start(u64::from(extent)));
        self.device.as_mut().ok_or_else(|| internal("a slab landing without a device"))?.copy(batch)
    }

    fn addresses(&self, extent: u32) -> Addresses<'_, impl Fn(u32) -> Option<u64> + '_> {
        let base = |block: u32| self.blocks[block as usize].as_ref().map(Block::address);
        Addresses::new(&self.schedule, &self.layout, extent, base)
    }

    fn block(&self, block: u32) -> Result<&Block> {
        self.blocks[block as usize].as_ref().ok_or_else(|| internal("a block was used before it was granted"))
    }

    fn slab(&self, extent: u32) -> Result<&Arc<Lease>> {
        self.engine.slab(extent).ok_or_else(|| internal("an extent without its slab"))
    }

    fn read(&self, extent: u32) -> Result<Read> {
        let e = &self.schedule.extents[extent as usize];
        let slab = self.engine.slab(extent);
        if slab.is_some_and(|slab| e.len > slab.len() as u64) {
            return Err(internal("an extent that is longer than its slab"));
        }
        let into = self.addresses(extent).destination(slab.map(|slab| slab.address()))?;
        let keep: Keep = match (e.landing, slab) {
            (Landing::Slab, Some(slab)) => slab.clone(),
            // It has no memory yet.
            (Landing::Slab, None) => Arc::new(()),
            _ => {
                self.prepare(extent)?;
                self.keep_blocks(extent, None)?
            }
        };
        Ok(Read {
            ticket: ticket(extent),
            file: e.file,
            offset: e.offset,
            len: e.len,
            need: e.need,
            lane: e.lane,
            into,
            fresh: matches!(e.landing, Landing::Block { .. }),
            written: 0,
            keep,
        })
    }

    fn batch(&self, extent: u32) -> Result<Batch> {
        let slab = self.slab(extent)?;
        let copies = self.addresses(extent).copies(slab.address())?;
        let strided = self.addresses(extent).strided(slab.address())?;
        self.prepare(extent)?;
        let keep = self.keep_blocks(extent, Some(slab.clone()))?;
        Ok(Batch { ticket: ticket(extent), slab: (slab.address(), slab.len()), copies, strided, keep })
    }

    /// The last step of this extent is about to write to its blocks.
    fn prepare(&self, extent: u32) -> Result<()> {
        let addresses = self.addresses(extent);
        let mut written = addresses.written();
        written.try_for_each(|(block, offset, nbytes)| {
            self.block(block)?.prepare(offset, nbytes);
            Ok(())
        })
    }

    /// Keeps the memory of all blocks that the extent fills, and the slab.
    fn keep_blocks(&self, extent: u32, slab: Option<Arc<Lease>>) -> Result<Keep> {
        let addresses = self.addresses(extent);
        let mut keeps = addresses.blocks().map(|b| Ok(self.block(b)?.keep())).collect::<Result<Vec<Keep>>>()?;
        if let Some(slab) = slab {
            keeps.push(slab);
        }
        Ok(match (keeps.len(), keeps.pop()) {
            (1, Some(only)) => only,
            (_, last) => {
                keeps.extend(last);
                Arc::new(keeps)
            }
        })
    }

    /// Tells the owner the news: wants ready, blocks wanted, bytes arrived. True if the load has failed by that.
    fn publish(&mut self, clock: Clock, told: &mut u64) -> bool {
        let failed = self.engine.failed();
        let mut ready = Vec::new();
        let begun = Instant::now();
        while let Some(Ready { want, completes }) = self.engine.ready() {
            self.record.iter_mut().for_each(|r| r.ready += 1);
            self.report.first_tensor_seconds.get_or_insert_with(|| self.began.seconds());
            if self.stream {
                ready.push(want);
            }
            if let Some(block) = completes.and_then(|block| self.blocks[block as usize].take()) {
                block.complete();
            }
        }
        let ready = self.hand_out(clock, ready);
        if let Some(record) = &mut self.record {
            let tensors = std::mem::take(&mut record.ready);
            if tensors > 0 {
                let span = Span::new(Track::HandOut, "ready", begun, Instant::now());
                record.timeline.add(Span { tensors, ..span });
            }
        }
        let mut wanted = Vec::new();
        if self.gpu.is_none() {
            self.engine.wanted_blocks(&mut wanted);
        }
        let arrived = self.engine.bytes_arrived();
        if !ready.is_empty() || arrived != *told || !wanted.is_empty() {
            *told = arrived;
            let mut state = self.shared.lock();
            // A grant may have come in since the engine looked.
            wanted.retain(|&b| !state.is_granted(b));
            let news = !ready.is_empty() || (!wanted.is_empty() && wanted != state.wanted);
            state.ready.extend(ready);
            state.wanted = wanted;
            state.arrived = arrived;
            if news {
                self.shared.changed.notify_all();
            }
        }
        self.engine.failed() != failed
    }

    /// Sleeps until something happens, or the engine's deadline passes.
    fn sleep(&mut self, clock: Clock) {
        let waits_for = self.engine.waits_for();
        // The ring's descriptor is cleared when a slab is requested. So it may stay readable while no slab is wanted (a
        // slab came back after the window closed, or while a failed load drains). It must not wake the thread then.
        let slabs = if self.engine.wants_slab() { self.ring.fd() } else { -1 };
        let fds = [self.shared.inbox.fd(), self.source.wake(), self.device.as_ref().map_or(-1, |d| d.wake()), slabs];
        let before = Instant::now();
        let left = self.engine.deadline().map(|d| Duration::from_nanos(d.saturating_sub(clock.at(before))));
        wait_readable(fds, left);
        let now = Instant::now();
        self.tally.add(waits_for, self.engine.reads_in_flight(), self.engine.copies_in_flight(), now - before);
        if let (Some(record), Some(name)) = (&self.record, waits_for.name()) {
            let span = Span::new(Track::Engine, format!("wait: {name}"), before, now);
            record.timeline.add(Span { kind: "wait", ..span });
        }
    }

    /// The error of the load. If it stalled, the error names the file and range of the oldest read in flight.
    fn stalled_at(&self, error: Error) -> Error {
        match self.engine.stalled() {
            Some(extent) => self.located(error, ticket(extent)),
            None => error,
        }
    }

    /// The error, with the file and range of the extent that failed.
    fn located(&self, error: Error, ticket: Ticket) -> Error {
        match self.schedule.extents.get(ticket.0 as usize) {
            Some(Extent { shared: Some(InCommon::Received { reader, .. }), .. }) => error.at(self.files.rank(*reader)),
            Some(e) => match self.checkpoint.files().get(e.file as usize) {
                Some(file) => error.at(&file.spelled).range(e.offset..e.offset + e.need),
                None => error,
            },
            None => error,
        }
    }
}

/// Has all that writes to the caller's memory wait for this fence.
fn wait_for(fence: Fence, source: &mut dyn Source, device: Option<&mut Box<dyn Device>>) -> Result<()> {
    source.wait_for(fence)?;
    device.map_or(Ok(()), |device| device.wait_for(fence))
}

/// The ticket of an extent is its number.
fn ticket(extent: u32) -> Ticket {
    Ticket(u64::from(extent))
}
