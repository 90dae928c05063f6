//! From request to running load: plan, memory, source, device, the state that owner and engine share, thread.

use super::blocks::{allocate, arena, check_room, our_blocks, BlockMemory, GpuBlocks};
use super::drive::{CacheUse, Driver, Ranks};
use super::exchange::{RankExchange, Received};
use super::exchange_trial::{sections, untried, ExchangeTrial};
use super::files::LoadFiles;
use super::handle::Load;
use super::journal::{Began, Journal};
use super::room;
use super::shared::{somewhere, OwnerLink, Shared};
use super::transport::Transport;
use crate::detached::here;
use crate::device::api::Api;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::GpuDevice;
use crate::device::{Device, Fence};
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
use crate::plan::schedule::{RankShares, Schedule};
use crate::plan::shares::Shares;
use crate::plan::Planned;
use crate::source::{Dispatcher, LaneSource, Source, SourceRequest};
use crate::staging::{Ring, Share};
use crate::stats::ExchangeReport;
use crate::store::{patiently, DiskUse, Objects, Storage};
use crate::sync::{Builder, JoinHandle, Mutex};
use crate::timeline::Timeline;
use crate::way::{Cold, Routing};
use serde_json::json;
use std::sync::Arc;

/// Copy workers by default: more do not use the memory bus any better.
const MOST_WORKERS: usize = 16;

/// The reads of all ranks, and one rank's connections to the others.
type LoadGroup = (Arc<Shares>, Mesh);
/// Wraps a source.
type Decorate<'a> = Box<dyn FnOnce(Box<dyn Source>, &Arc<dyn Objects>) -> Result<Box<dyn Source>> + 'a>;

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
        decorate: impl FnOnce(Box<dyn Source>, &Arc<dyn Objects>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        start(request, StandIns { decorate: Some(Box::new(decorate)), ..StandIns::default() }, || true)
    }

    /// One rank of several, with its source decorated, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_in_group_through(
        request: Request,
        group: LoadGroup,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<dyn Objects>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let (group, decorate): (_, Option<Decorate<'_>>) = (Some(group), Some(Box::new(decorate)));
        start(request, StandIns { group, decorate, ..StandIns::default() }, || true)
    }

    /// The same with a source that answers late, for tests: slabs are taken when the first byte of a read has arrived.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_late(
        request: Request,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<dyn Objects>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let stand_ins = StandIns { decorate: Some(Box::new(decorate)), late: true, ..StandIns::default() };
        start(request, stand_ins, || true)
    }

    /// The same, with a given storage device number for each file.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_on_volumes(
        request: Request,
        storage: &[u64],
        decorate: impl FnOnce(Box<dyn Source>, &Arc<dyn Objects>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let stand_ins = StandIns { decorate: Some(Box::new(decorate)), storage, ..StandIns::default() };
        start(request, stand_ins, || true)
    }
}

/// Starts the load; see [`Load::start`]. Other ranks and the trace hear of an error.
fn start(request: Request, mut stand_ins: StandIns<'_>, go_on: impl FnMut() -> bool) -> Result<Load> {
    let checkpoint = request.checkpoint.clone();
    let timeline = match &*request.options.trace {
        "" => None,
        pattern => Some(Arc::new(Timeline::new(pattern)?)),
    };
    let began = Began::now();
    let exchange = stand_ins.group.take().map(|group| RankExchange::new(group, &request)).transpose();
    let outcome = exchange.and_then(|mut exchange| {
        let outcome = assemble(request, stand_ins, timeline.clone(), go_on, began, &mut exchange);
        if let (Err(error), Some(exchange)) = (&outcome, &exchange) {
            // It could not even begin: the others hear why.
            exchange.peers.fail(error);
        }
        outcome
    });
    outcome.map_err(|e| {
        let e = somewhere(e, &checkpoint);
        if let Some(timeline) = timeline {
            // The load's error matters more than an error in writing its trace.
            let _nobody_to_tell = timeline.write(|file| checkpoint.name_of(file), &json!({ "error": e.to_string() }));
        }
        e
    })
}

/// Plans the load, puts its parts together, and lets it run.
fn assemble(
    request: Request,
    stand_ins: StandIns<'_>,
    timeline: Option<Arc<Timeline>>,
    go_on: impl FnMut() -> bool,
    began: Began,
    exchange: &mut Option<RankExchange>,
) -> Result<Load> {
    let (request, files, mut plan, ours) = planned_and_mapped(request, &stand_ins, exchange.as_ref(), go_on)?;
    // From here until the load has ended it wants the disk.
    let disk = plan.uses_disk.then(DiskUse::begin);
    let gpu = GpuBlocks::wanted(&request)?;
    let staging = staging(&request, &mut plan, exchange.as_ref());
    let Request { checkpoint, wants, device: at, memory, options, stream, .. } = request;
    let (nbytes, layout, schedule) = (plan.report.nbytes, Arc::new(plan.layout), Arc::new(plan.schedule));
    let (blocks, fence) = allocate(&layout, ours, memory, at)?;
    let routing = Arc::new(plan.routing);
    let gaps = if routing.here { 0 } else { plan.report.unwanted.gap };
    let asked = SourceRequest::new(options.io, routing.clone());
    let asked = SourceRequest { timeline: timeline.clone(), staging, ..asked };
    let (source, received) = source(&files, &asked, stand_ins.decorate, exchange.as_ref(), &schedule)?;
    let ours = || device(at, &schedule, &options, timeline.as_ref());
    let device = stand_ins.device.map_or_else(ours, |device| Ok(Some(device)))?;
    let bounds = bounds(&routing, &options, stream, received, pool_bytes(staging, plan.slab) / plan.slab);
    let mut engine = Engine::new(schedule.clone(), layout.clone(), bounds);
    (0..).zip(&blocks).filter(|b| b.1.is_some()).for_each(|(block, _)| engine.on(0, Event::Granted(block)));
    plan.report.plan_seconds = began.seconds();

    let (mut device, mut trial) = (device, None);
    if let Some(exchange) = exchange {
        if let Some(inner) = device.take() {
            device = Some(exchange.device(inner, &schedule)?);
        }
        let (ranks, reason) = (exchange.members, untried(options.exchange));
        plan.report.exchange = Some(ExchangeReport { ranks, exchanged: true, reason, ..ExchangeReport::default() });
        trial = ExchangeTrial::begin(&exchange.shares, &schedule, plan.unwanted, &mut engine);
    }
    let lends = exchange.as_ref().is_some_and(|exchange| exchange.lends(&schedule));
    let (ring, private) = ring(device.as_mut(), &schedule, plan.slab, staging, lends)?;
    plan.report.fallbacks.extend(private);
    let shared = Arc::new(Shared::new(&layout, blocks.clone())?);
    let (may_hang, stall, extents) = (files.may_hang(), options.stall_timeout, schedule.extents.len());
    let chosen = (routing.cold == Cold::Try).then_some(asked.chosen);
    let driver = Driver {
        owner: OwnerLink { shared: shared.clone(), stream, cancelled: false, told: u64::MAX },
        files: LoadFiles { checkpoint: checkpoint.clone(), storage: files, may_hang, stall },
        engine,
        transport: Transport { source: Box::new(source), device, ring, held_back: None },
        memory: BlockMemory { schedule, layout: layout.clone(), blocks },
        gpu,
        journal: Journal::new(plan.report, began, timeline.clone(), extents),
        cache: CacheUse { routing: routing.clone(), chosen, _disk: disk },
        ranks: exchange.take().map(|exchange| Ranks { trial, peers: exchange.peers }),
    };
    // Its own, which holds no descriptor after the load has ended.
    let is_mapped = stream && routing.ways.iter().any(|way| way.is_mapped());
    let mapped = is_mapped.then(|| checkpoint.storage()).transpose()?.map(|files| (Arc::new(files), routing));
    let (thread, pid) = (Mutex::new(run(driver, fence)?), std::process::id());
    Ok(Load { mapped, checkpoint, wants, layout, shared, thread, nbytes, gaps, timeline, pid })
}

/// The most staging memory that the load takes. The report says so if that is less than the options allow.
fn staging(request: &Request, plan: &mut Planned, exchange: Option<&RankExchange>) -> u64 {
    let besides = || match (&request.memory, request.device) {
        (Memory::Into { tensors, .. }, Where::Cpu) => room::without_pages(tensors),
        (Memory::Ours, Where::Cpu) => {
            let all = arena(&plan.layout, &plan.schedule.stretches, &plan.routing).0;
            all.min(if request.stream { request.options.window } else { u64::MAX })
        }
        _ => 0,
    };
    let slabs = room::SlabDemand {
        limit: request.options.staging,
        wanted: room::wanted(&plan.schedule.extents),
        there: Ring::process().staging().mapped,
        half: matches!(request.device, Where::Gpu(_)),
        ranks: exchange.map_or(1, RankExchange::on_this_machine),
    };
    let (staging, less) = room::limit(&slabs, besides, machine::memory_before_a_kill);
    plan.report.fallbacks.extend(less);
    staging
}

/// The source of all files and of what other ranks send, and how much these send.
fn source(
    files: &Storage,
    asked: &SourceRequest,
    decorate: Option<Decorate<'_>>,
    exchange: Option<&RankExchange>,
    schedule: &Schedule,
) -> Result<(Dispatcher, Option<Received>)> {
    let mut source = files.source(asked)?;
    if let Some(decorate) = decorate {
        let decorated = decorate(Box::new(source), files.first())?;
        source = Dispatcher::new(Vec::new());
        source.add(Some(0), LaneSource { lanes: Vec::new(), source: decorated })?;
    }
    let (ranks, received) = exchange.map(|exchange| exchange.source(schedule)).unzip();
    ranks.map_or(Ok(()), |ranks| source.add(None, ranks))?;
    let lanes = schedule.extents.iter().map(|e| (e.file, e.lane));
    source.check(lanes).map_err(|(file, e)| e.at(files.path(file)))?;
    Ok((source, received))
}

/// The bounds of the engine, where so many slabs are registered in a load to a GPU.
fn bounds(routing: &Routing, options: &Options, stream: bool, received: Option<Received>, slabs: u64) -> Bounds {
    // Mapped bytes take no memory that a window could limit, and nothing takes them before the load has ended.
    let window = (stream && !routing.here).then_some(options.window);
    let sent = received.and_then(|received| received.most_sent(slabs));
    let requests = routing.requests.saturating_add(received.map_or(0, |received| received.parcels));
    Bounds { depth: routing.depth, requests, window, sent, stall: nanos(options.stall_timeout) }
}

/// The load's place in the ring of slabs. The device may register some of them. Slabs that are lent are shared memory.
fn ring(
    device: Option<&mut Box<dyn Device>>,
    schedule: &Schedule,
    slab: u64,
    staging: u64,
    lends: bool,
) -> Result<(Share, Option<Fallback>)> {
    let mut ring = Ring::process().join(slab, staging)?;
    // They stay private then, and other ranks get their parcels through sockets.
    let refused = if lends { ring.share_slabs().err() } else { None };
    let private = refused.map(|e| Fallback { from: "shared slabs", to: "sockets", reason: e.to_string() });
    if let Some(device) = device {
        // A parcel holds its slab until other ranks have taken it.
        let bytes = |e: &Extent| if e.shared.is_some() { slab } else { e.len };
        device.stage(&mut ring, schedule.extents.iter().filter(|e| e.landing == Landing::Slab).map(bytes).sum());
    }
    Ok((ring, private))
}

/// Plans the load: on the caller's thread if all files are known to be on local disks, otherwise as a detached call.
/// Opening files of a mount that hangs, or asking for their state, cannot be interrupted.
fn plan(
    request: Request,
    files: &Arc<Storage>,
    exchange: Option<&RankExchange>,
    go_on: impl FnMut() -> bool,
) -> Result<(Request, Planned)> {
    let ranks = exchange.map(|exchange| (exchange.shares.clone(), exchange.rank, exchange.near.clone()));
    let planned = move |request: Request, files: &Storage| {
        let ranks = ranks.as_ref().map(|(shares, rank, near)| RankShares {
            shares,
            rank: *rank,
            near,
            sections: sections(shares),
        });
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

/// The same, with the files, and the blocks in memory of this process, if there are such. Tests may change both. A file that
/// the kernel refuses to map is planned anew, as one that is read: under `ulimit -v` or without overcommit a large file may
/// have no room among the addresses, and some file systems map nothing.
fn planned_and_mapped(
    mut request: Request,
    _stand_ins: &StandIns<'_>,
    exchange: Option<&RankExchange>,
    mut go_on: impl FnMut() -> bool,
) -> Result<(Request, Arc<Storage>, Planned, Vec<Block>)> {
    let hosts = exchange.map_or(&[][..], |exchange| &exchange.hosts);
    let files = Arc::new(request.checkpoint.storage()?.with_ranks(hosts));
    #[cfg(any(test, feature = "testing"))]
    (0..).zip(_stand_ins.storage).try_for_each(|(file, storage)| files.first().pretend_storage(file, *storage))?;
    let mut fallbacks = Vec::new();
    loop {
        let (asked, mut plan) = plan(request, &files, exchange, &mut go_on)?;
        let (layout, stretches, routing) = (&plan.layout, &plan.schedule.stretches[..], &plan.routing);
        let ours = matches!((asked.device, &asked.memory), (Where::Cpu, Memory::Ours));
        if ours && !asked.stream {
            check_room(layout, stretches, routing)?;
        }
        match if ours { our_blocks(layout, stretches, &files, routing)? } else { Ok(Vec::new()) } {
            Ok(blocks) => {
                plan.report.fallbacks.append(&mut fallbacks);
                #[cfg(any(test, feature = "testing"))]
                if _stand_ins.late {
                    plan.schedule.extents.iter_mut().for_each(|e| e.staging = TakesSlab::AtArrival);
                }
                // A rank that wants nothing waits for the others: not on the caller's thread.
                plan.routing.here &= exchange.is_none();
                return Ok((asked, files, plan, blocks));
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
    schedule: &Schedule,
    options: &Options,
    timeline: Option<&Arc<Timeline>>,
) -> Result<Option<Box<dyn Device>>> {
    Ok(match at {
        Where::Cpu if schedule.extents.iter().any(|e| e.landing == Landing::Slab) => {
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
            Some(Box::new(GpuDevice::new(&Api::load()?, ordinal)?.pinning_with(options.pinning_threads)))
        }
    })
}

/// Runs the load: here if it only maps resident pages, otherwise on a thread of its own.
fn run(driver: Driver, fence: Option<Fence>) -> Result<Option<JoinHandle<()>>> {
    if driver.cache.routing.here {
        driver.run(fence);
        return Ok(None);
    }
    // EAGAIN alone says little: the cause is RLIMIT_NPROC or the pids limit of the cgroup.
    let refused = |e| Error::new(ErrorKind::Limit, format!("cannot start the engine thread: {e}"));
    Builder::new().name("penstock-engine".into()).spawn(move || driver.run(fence)).map(Some).map_err(refused)
}
