//! From request to running load: plan, memory, source, device, the state that owner and engine share, thread.

use super::blocks::{allocate, arena, check_room, our_blocks};
use super::drive::{Began, Driver, GpuBlocks, Record};
use super::exchange::{RankExchange, Received};
use super::exchange_trial::{sections, untried, ExchangeTrial};
use super::handle::Load;
use super::room;
use super::shared::{somewhere, Shared};
use crate::detached::here;
use crate::device::api::Api;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::GpuDevice;
use crate::device::Device;
use crate::engine::{nanos, Bounds, Engine, Event};
use crate::error::{Error, ErrorKind, Result};
#[cfg(any(test, feature = "testing"))]
use crate::extent::TakesSlab;
use crate::extent::{Extent, Landing};
use crate::fallback::Fallback;
use crate::machine;
use crate::memory::Block;
use crate::options::{pool_bytes, Io, Options};
use crate::peers::Mesh;
use crate::plan::request::{Memory, Request, Where};
use crate::plan::schedule::RankShares;
use crate::plan::shares::Shares;
use crate::plan::Planned;
use crate::source::{Dispatcher, LaneSource, Source, SourceRequest};
use crate::staging::Ring;
use crate::stats::{ExchangeReport, Tally};
use crate::store::{patiently, DiskUse, Files, Storage};
use crate::sync::{Builder, JoinHandle, Mutex};
use crate::timeline::Timeline;
use crate::way::Cold;
use serde_json::json;
use std::collections::HashMap;
use std::sync::Arc;

/// Copy workers by default: more do not use the memory bus any better.
const MOST_WORKERS: usize = 16;

/// The reads of all ranks, and one rank's connections to the others.
type LoadGroup = (Arc<Shares>, Mesh);
/// Wraps a source.
type Decorate<'a> = Box<dyn FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>> + 'a>;

/// Replacements of tests for the request's own device and source.
#[derive(Default)]
struct StandIns<'a> {
    device: Option<Box<dyn Device>>,
    group: Option<LoadGroup>,
    decorate: Option<Decorate<'a>>,
    /// The storage device of each file; empty: the real ones.
    #[cfg(any(test, feature = "testing"))]
    storage: &'a [u64],
    /// The source answers late: slabs are taken at arrival.
    #[cfg(any(test, feature = "testing"))]
    late: bool,
}

impl Load {
    /// Plans the load and starts it. Fails at once if the request is invalid, a file has gone or changed, or there is
    /// no such device. [`wait`](Self::wait) and [`next`](Self::next) report later errors.
    pub fn start(request: Request) -> Result<Load> {
        Self::start_while(request, || true)
    }

    /// The same, but `go_on` is asked every 50 ms while the files are being opened. If it says no, the start fails with
    /// kind `Cancelled`. On a network mount whose server is gone, opening may take until the stall timeout.
    pub fn start_while(request: Request, go_on: impl FnMut() -> bool) -> Result<Load> {
        start(request, StandIns::default(), go_on)
    }

    /// The same for one rank of several that load together: what more than one of them wants is read by one, and sent to the
    /// others. The load ends when all of them have everything. `shares` are the same on every rank.
    ///
    /// # Errors
    /// Also `Peer`, if another rank fails, dies or stops; `Invalid` for a stream.
    pub fn start_in_group(request: Request, group: LoadGroup, go_on: impl FnMut() -> bool) -> Result<Load> {
        start(request, StandIns { group: Some(group), ..StandIns::default() }, go_on)
    }

    /// The same with another device than the request's own, for tests that remove a fence.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_on(request: Request, device: Option<Box<dyn Device>>) -> Result<Load> {
        start(request, StandIns { device, ..StandIns::default() }, || true)
    }

    /// The same with its source decorated, for tests: to make it slow, or fail.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_through(
        request: Request,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        start(request, StandIns { decorate: Some(Box::new(decorate)), ..StandIns::default() }, || true)
    }

    /// One rank of several, with its source decorated, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_in_group_through(
        request: Request,
        group: LoadGroup,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let (group, decorate): (_, Option<Decorate<'_>>) = (Some(group), Some(Box::new(decorate)));
        start(request, StandIns { group, decorate, ..StandIns::default() }, || true)
    }

    /// The same with a source that answers late, for tests: slabs are taken when the first byte of a read has arrived.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_late(
        request: Request,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let stand_ins = StandIns { decorate: Some(Box::new(decorate)), late: true, ..StandIns::default() };
        start(request, stand_ins, || true)
    }

    /// The same, with a given storage device number for each file.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_on_volumes(
        request: Request,
        storage: &[u64],
        decorate: impl FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let stand_ins = StandIns { decorate: Some(Box::new(decorate)), storage, ..StandIns::default() };
        start(request, stand_ins, || true)
    }
}

/// Plans the load and starts it; see [`Load::start`].
fn start(request: Request, stand_ins: StandIns<'_>, go_on: impl FnMut() -> bool) -> Result<Load> {
    let checkpoint = request.checkpoint.clone();
    let timeline = match &*request.options.trace {
        "" => None,
        pattern => Some(Arc::new(Timeline::new(pattern)?)),
    };
    begin(request, stand_ins, timeline.clone(), go_on).map_err(|e| {
        let e = somewhere(e, &checkpoint);
        if let Some(timeline) = timeline {
            // The load's error matters more than an error in writing its trace.
            let _nobody_to_tell = timeline.write(|file| checkpoint.name_of(file), &json!({ "error": e.to_string() }));
        }
        e
    })
}

fn begin(
    request: Request,
    mut stand_ins: StandIns<'_>,
    timeline: Option<Arc<Timeline>>,
    go_on: impl FnMut() -> bool,
) -> Result<Load> {
    let began = Began::now();
    let mut exchange = stand_ins.group.take().map(|group| RankExchange::new(group, &request)).transpose()?;
    let outcome = assemble(request, stand_ins, timeline, go_on, began, &mut exchange);
    if let (Err(error), Some(exchange)) = (&outcome, &exchange) {
        // It could not even begin: the others hear why.
        exchange.peers.fail(error);
    }
    outcome
}

fn assemble(
    request: Request,
    stand_ins: StandIns<'_>,
    timeline: Option<Arc<Timeline>>,
    go_on: impl FnMut() -> bool,
    began: Began,
    exchange: &mut Option<RankExchange>,
) -> Result<Load> {
    let files = request.checkpoint.storage()?;
    let files = Arc::new(match &exchange {
        Some(exchange) => files.with_ranks(&exchange.hosts),
        None => files,
    });
    #[cfg(any(test, feature = "testing"))]
    (0..).zip(stand_ins.storage).try_for_each(|(file, storage)| files.local().pretend_storage(file, *storage))?;
    let (request, mut plan, ours) = planned_and_mapped(request, &files, exchange.as_ref(), go_on)?;
    #[cfg(any(test, feature = "testing"))]
    if stand_ins.late {
        plan.schedule.extents.iter_mut().for_each(|e| e.staging = TakesSlab::AtArrival);
    }
    // A rank that wants nothing waits for the others: not on the caller's thread.
    plan.routing.here &= exchange.is_none();
    let here = plan.routing.here;
    // From here until the load has ended it wants the disk.
    let disk = plan.uses_disk.then(DiskUse::begin);
    let Request { checkpoint, wants, device: at, memory, options, stream, .. } = request;
    let (nbytes, layout, schedule) = (plan.report.nbytes, Arc::new(plan.layout), Arc::new(plan.schedule));

    let gpu = match (at, &memory) {
        (Where::Gpu(ordinal), Memory::Ours) => Some(GpuBlocks::new(ordinal)?),
        _ => None,
    };
    let besides = || match (&memory, at) {
        (Memory::Into { tensors, .. }, Where::Cpu) => room::without_pages(tensors),
        (Memory::Ours, Where::Cpu) => {
            let all = arena(&layout, &schedule.stretches, &plan.routing).0;
            if stream {
                all.min(options.window)
            } else {
                all
            }
        }
        _ => 0,
    };
    let slabs = room::SlabDemand {
        limit: options.staging,
        wanted: room::wanted(&schedule.extents),
        there: Ring::process().staging().mapped,
        half: matches!(at, Where::Gpu(_)),
        ranks: exchange.as_ref().map_or(1, RankExchange::on_this_machine),
    };
    let (staging, less) = room::limit(&slabs, besides, machine::memory_before_a_kill);
    plan.report.fallbacks.extend(less);
    let (blocks, fence) = allocate(&layout, ours, memory, at)?;
    let routing = Arc::new(plan.routing);
    let asked = SourceRequest { timeline: timeline.clone(), ..SourceRequest::new(options.io, routing.clone()) };
    let mut source = files.source(&asked)?;
    if let Some(decorate) = stand_ins.decorate {
        let decorated = decorate(Box::new(source), files.local())?;
        source = Dispatcher::new(Vec::new());
        source.add(Some(0), LaneSource { lanes: Vec::new(), source: decorated })?;
    }
    let received = match &exchange {
        Some(exchange) => {
            let (ranks, received) = exchange.source(&schedule);
            source.add(None, ranks)?;
            Some(received)
        }
        None => None,
    };
    let lanes = schedule.extents.iter().map(|e| (e.file, e.lane));
    source.check(lanes).map_err(|(file, e)| e.at(files.path(file)))?;
    let mut device = match stand_ins.device {
        Some(device) => Some(device),
        None => device(at, schedule.extents.iter().any(|e| e.landing == Landing::Slab), &options, timeline.as_ref())?,
    };
    // Mapped bytes take no memory that a window could limit, and nothing takes them before the load has ended.
    let window = (stream && !here).then_some(options.window);
    let (depth, requests) = (routing.depth, routing.requests);
    // Parcels to be sent hold at most half of the slabs that a load to a GPU registers, so received bytes find one.
    let most_sent = received.filter(|received: &Received| received.in_slabs);
    let most_sent = most_sent.map(|_| (pool_bytes(staging, plan.slab) / plan.slab / 2).max(1) as usize);
    let requests = requests.saturating_add(received.map_or(0, |received| received.parcels));
    let bounds = Bounds { depth, requests, window, sent: most_sent, stall: nanos(options.stall_timeout) };
    let mut engine = Engine::new(schedule.clone(), layout.clone(), bounds);
    (0..).zip(&blocks).filter(|b| b.1.is_some()).for_each(|(block, _)| engine.on(0, Event::Granted(block)));
    plan.report.plan_seconds = began.seconds();

    let mut sends = HashMap::new();
    if let (Some(exchange), Some(inner)) = (&exchange, device.take_if(|_| exchange.is_some())) {
        let (decorated, bytes) = exchange.device(inner, &schedule, &checkpoint, matches!(at, Where::Gpu(_)))?;
        sends = bytes;
        device = Some(decorated);
    }
    plan.report.exchange = exchange.as_ref().map(|exchange| ExchangeReport {
        ranks: exchange.members,
        exchanged: true,
        reason: untried(options.exchange),
        ..ExchangeReport::default()
    });
    let begin = |exchange: &RankExchange| ExchangeTrial::begin(&exchange.shares, &schedule, plan.unwanted, &mut engine);
    let exchange_trial = exchange.as_ref().and_then(begin);
    let mut ring = Ring::process().join(plan.slab, staging)?;
    if let Some(device) = &mut device {
        // A parcel holds its slab until other ranks have taken it.
        let bytes = |e: &Extent| if e.shared.is_some() { plan.slab } else { e.len };
        device.stage(&mut ring, schedule.extents.iter().filter(|e| e.landing == Landing::Slab).map(bytes).sum());
    }
    let shared = Arc::new(Shared::new(&layout, blocks.clone())?);
    let extents = schedule.extents.len();
    let driver = Driver {
        shared: shared.clone(),
        checkpoint: checkpoint.clone(),
        may_hang: files.may_hang(),
        files,
        schedule,
        layout: layout.clone(),
        engine,
        source: Box::new(source),
        device,
        ring,
        blocks,
        gpu,
        stream,
        stall: options.stall_timeout,
        held_back: None,
        report: plan.report,
        tally: Tally::default(),
        began,
        fence,
        _disk: disk,
        routing: routing.clone(),
        trial: (routing.cold == Cold::Try).then_some(asked.chosen),
        sends,
        exchange_trial,
        cancelled: false,
        record: timeline.clone().map(|timeline| Record::new(timeline, extents)),
        peers: exchange.take().map(|exchange| exchange.peers),
    };
    // Its own, which holds no descriptor after the load has ended.
    let mapped = match stream && routing.ways.iter().any(|way| way.is_mapped()) {
        true => Some((Arc::new(checkpoint.storage()?), routing)),
        false => None,
    };
    let thread = if here {
        driver.run();
        None
    } else {
        Some(spawn(driver)?)
    };
    Ok(Load {
        mapped,
        checkpoint,
        wants,
        layout,
        shared,
        thread: Mutex::new(thread),
        nbytes,
        timeline,
        pid: std::process::id(),
    })
}

/// Plans the load: on the caller's thread if all files are known to be on local disks, otherwise as a detached call.
/// Opening files of a mount that hangs, or asking for their state, cannot be interrupted.
fn plan(
    request: Request,
    files: &Arc<Storage>,
    exchange: Option<&RankExchange>,
    go_on: impl FnMut() -> bool,
) -> Result<(Request, Planned)> {
    let ranks = exchange.map(|exchange| (exchange.shares.clone(), exchange.rank));
    let planned = move |request: Request, files: &Storage| {
        let ranks = ranks.as_ref().map(|(shares, rank)| RankShares { shares, rank: *rank, sections: sections(shares) });
        Planned::new(&request, files, ranks.as_ref()).map(|plan| (request, plan))
    };
    if files.are_known_local() {
        return here(|| planned(request, files));
    }
    let stall = request.options.stall_timeout;
    let asked = files.clone();
    let work = move || planned(request, &asked);
    patiently(files, work, stall, go_on)
}

/// The same, with the blocks in memory of this process, if there are such. A file that the kernel refuses to map is planned
/// anew, as one that is read: under `ulimit -v` or without overcommit a large file may have no room among the addresses,
/// and some file systems map nothing.
fn planned_and_mapped(
    mut request: Request,
    files: &Arc<Storage>,
    exchange: Option<&RankExchange>,
    mut go_on: impl FnMut() -> bool,
) -> Result<(Request, Planned, Vec<Block>)> {
    let mut fallbacks = Vec::new();
    loop {
        let (asked, mut plan) = plan(request, files, exchange, &mut go_on)?;
        if !matches!((asked.device, &asked.memory), (Where::Cpu, Memory::Ours)) {
            return Ok((asked, plan, Vec::new()));
        }
        let (layout, stretches, routing) = (&plan.layout, &plan.schedule.stretches[..], &plan.routing);
        if !asked.stream {
            check_room(layout, stretches, routing)?;
        }
        match our_blocks(layout, stretches, files, routing)? {
            Ok(blocks) => {
                plan.report.fallbacks.append(&mut fallbacks);
                return Ok((asked, plan, blocks));
            }
            Err(refusal) if asked.options.io == Io::Mapped || !routing.ways.iter().any(|way| way.is_mapped()) => {
                return Err(refusal);
            }
            Err(refusal) => {
                // All of them: they share addresses, or a file system.
                let mapped = |file: &u32| routing.way(*file).is_mapped();
                files.refuse_mappings((0..files.len() as u32).filter(mapped));
                fallbacks.push(Fallback { from: "mmap", to: "read", reason: refusal.to_string() });
                request = asked;
            }
        }
    }
}

/// The device that copies slabs to their blocks; `None` if everything lands in place.
fn device(
    at: Where,
    needs_slabs: bool,
    options: &Options,
    timeline: Option<&Arc<Timeline>>,
) -> Result<Option<Box<dyn Device>>> {
    Ok(match at {
        Where::Cpu if needs_slabs => {
            let workers = match options.threads {
                0 => machine::cores().min(MOST_WORKERS),
                threads => threads as usize,
            };
            let mut device = CpuDevice::new(workers)?;
            if let Some(timeline) = timeline {
                device.record(timeline);
            }
            Some(Box::new(device))
        }
        Where::Cpu => None,
        Where::Gpu(ordinal) => {
            let device = GpuDevice::new(&Api::load()?, ordinal)?.pinning_with(options.pinning_threads);
            Some(Box::new(device))
        }
    })
}

fn spawn(driver: Driver) -> Result<JoinHandle<()>> {
    // EAGAIN alone says little: the cause is RLIMIT_NPROC or the pids limit of the cgroup.
    let refused = |e| Error::new(ErrorKind::Limit, format!("cannot start the engine thread: {e}"));
    Builder::new().name("penstock-engine".into()).spawn(move || driver.run()).map_err(refused)
}
