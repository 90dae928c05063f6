//! From request to running load: plan, memory, source, device, the state that owner and engine share, thread.

use super::drive::{Began, Driver, GpuBlocks, Record};
use super::handle::Load;
use super::shared::{somewhere, Shared};
use crate::aside::here;
use crate::device::api::Api;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::GpuDevice;
use crate::device::{Device, Fence};
use crate::engine::{nanos, Bounds, Engine, Event};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Landing, TakesSlab};
use crate::machine;
use crate::memory::{Arena, Block, Mapping};
use crate::options::{Options, PAGE};
use crate::plan::layout::{BlockKind, BlockSpec, Layout};
use crate::plan::request::{Memory, Request, Where};
use crate::plan::{Cold, Plan};
use crate::source::{Router, Source};
use crate::staging::Ring;
use crate::stats::Tally;
use crate::store::{patiently, DiskUse, Files};
use crate::sync::{Builder, JoinHandle, Mutex};
use crate::timeline::Timeline;
use serde_json::json;
use std::sync::Arc;

/// Copy workers by default: more do not use the memory bus any better.
const MOST_WORKERS: usize = 16;
/// From this much private memory on, the load asks first whether the process can have it: the kernel promises any
/// amount and kills a process that uses it. Reading the limits of control groups takes twenty system calls, which a
/// smaller load would notice.
const WORTH_ASKING: u64 = 1 << 30;

/// Wraps a source.
type Decorate<'a> = Box<dyn FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>> + 'a>;

/// What tests put in place of the request's own device and source.
#[derive(Default)]
struct StandIns<'a> {
    device: Option<Box<dyn Device>>,
    decorate: Option<Decorate<'a>>,
    /// The storage device of each file; empty: the real ones.
    storage: &'a [u64],
    /// The source answers late: slabs are taken at arrival.
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

    /// The same with another device than the request's own, for tests that remove a fence.
    #[doc(hidden)]
    pub fn start_on(request: Request, device: Option<Box<dyn Device>>) -> Result<Load> {
        start(request, StandIns { device, ..StandIns::default() }, || true)
    }

    /// The same with its source decorated, for tests: to make it slow, or fail.
    #[doc(hidden)]
    pub fn start_through(
        request: Request,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        start(request, StandIns { decorate: Some(Box::new(decorate)), ..StandIns::default() }, || true)
    }

    /// The same with a source that answers late, for tests: slabs are taken when the first byte of a read has arrived.
    #[doc(hidden)]
    pub fn start_late(
        request: Request,
        decorate: impl FnOnce(Box<dyn Source>, &Arc<Files>) -> Result<Box<dyn Source>>,
    ) -> Result<Load> {
        let stand_ins = StandIns { decorate: Some(Box::new(decorate)), late: true, ..StandIns::default() };
        start(request, stand_ins, || true)
    }

    /// The same, with a given storage device number for each file.
    #[doc(hidden)]
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
    let timeline = match request.options.trace.as_str() {
        "" => None,
        pattern => Some(Arc::new(Timeline::new(pattern)?)),
    };
    begin(request, stand_ins, timeline.clone(), go_on).map_err(|e| {
        let e = somewhere(e, &checkpoint);
        if let Some(timeline) = timeline {
            // The load's error matters more than an error in writing its trace.
            let _nobody_to_tell = timeline.write(&checkpoint, &json!({ "error": e.to_string() }));
        }
        e
    })
}

fn begin(
    request: Request,
    stand_ins: StandIns<'_>,
    timeline: Option<Arc<Timeline>>,
    go_on: impl FnMut() -> bool,
) -> Result<Load> {
    let began = Began::now();
    let files = Arc::new(request.checkpoint.local_files());
    (0..).zip(stand_ins.storage).try_for_each(|(file, storage)| files.pretend_storage(file, *storage))?;
    let (request, mut plan) = plan(request, &files, go_on)?;
    if stand_ins.late {
        plan.schedule.extents.iter_mut().for_each(|e| e.staging = TakesSlab::AtArrival);
    }
    let here = is_done_here(&plan, &files);
    // From here until the load has ended it wants the disk.
    let disk = (plan.cold != Cold::None).then(DiskUse::begin);
    let Request { checkpoint, wants, device: at, memory, options, stream } = request;
    let (nbytes, layout, schedule) = (plan.report.nbytes, Arc::new(plan.layout), Arc::new(plan.schedule));

    let gpu = match (at, &memory) {
        (Where::Gpu(ordinal), Memory::Ours) => Some(GpuBlocks::new(ordinal)?),
        _ => None,
    };
    if !stream && matches!((at, &memory), (Where::Cpu, Memory::Ours)) {
        check_room(&layout)?;
    }
    let (blocks, fence) = allocate(&layout, &files, &plan.in_part, memory, at)?;
    let (source, workers) =
        source(&files, &options, (plan.cold, &plan.filled, &plan.in_part), here, timeline.as_ref())?;
    let source = match stand_ins.decorate {
        Some(decorate) => decorate(source, &files)?,
        None => source,
    };
    let mut device = match stand_ins.device {
        Some(device) => Some(device),
        None => device(at, schedule.extents.iter().any(|e| e.landing == Landing::Slab), &options, timeline.as_ref())?,
    };
    // Mapped bytes take no memory that a window could limit, and nothing takes them before the load has ended.
    let window = (stream && !here).then_some(options.window);
    let depth = depth(&options, workers);
    // Requests to stores that answer late have a bound of their own, but no such store yet that could declare another.
    let bounds = Bounds { depth, requests: depth, window, stall: nanos(options.stall_timeout) };
    let mut engine = Engine::new(schedule.clone(), layout.clone(), bounds);
    (0..).zip(&blocks).filter(|b| b.1.is_some()).for_each(|(block, _)| engine.on(0, Event::Granted(block)));
    plan.report.plan_seconds = began.seconds();

    let mut ring = Ring::process().join(options.extent, options.staging)?;
    if let Some(device) = &mut device {
        device.stage(&mut ring, schedule.extents.iter().filter(|e| e.landing == Landing::Slab).map(|e| e.len).sum());
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
        source,
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
        fills: (plan.cold == Cold::Try).then_some(plan.filled),
        here,
        record: timeline.clone().map(|timeline| Record::new(timeline, extents)),
    };
    let thread = if here {
        driver.run();
        None
    } else {
        Some(spawn(driver)?)
    };
    let maps = stream && layout.blocks.iter().any(|b| matches!(b.kind, BlockKind::Mapped { .. }));
    Ok(Load {
        mapped: maps.then(|| checkpoint.local_files()),
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
fn plan(request: Request, files: &Arc<Files>, go_on: impl FnMut() -> bool) -> Result<(Request, Plan)> {
    if files.are_known_local() {
        return here(|| Plan::new(&request, files).map(|plan| (request, plan)));
    }
    let stall = request.options.stall_timeout;
    let asked = files.clone();
    let work = move || Plan::new(&request, &asked).map(|plan| (request, plan));
    patiently(files, work, stall, go_on)
}

/// Whether the caller's own thread does the load before `start` returns. A load that only maps resident pages takes 0.1
/// to 1 ms. Threads would add 0.3 ms and, on a busy machine, a turn at the scheduler each.
fn is_done_here(plan: &Plan, files: &Files) -> bool {
    plan.cold == Cold::None
        && !files.may_hang()
        && plan.schedule.extents.iter().all(|e| matches!(e.landing, Landing::Mapping { .. }))
}

/// The memory of all blocks that have it from the start, and the fence of the caller's memory.
fn allocate(
    layout: &Layout,
    files: &Files,
    in_part: &[bool],
    memory: Memory,
    at: Where,
) -> Result<(Vec<Option<Block>>, Option<Fence>)> {
    let (blocks, fence) = match (memory, at) {
        (Memory::Into { tensors, keep, fence }, _) => {
            check_destinations(layout, &tensors)?;
            let theirs = layout.blocks.iter().map(|block| match block.kind {
                BlockKind::Foreign { want } => Ok(Block::held(tensors[want as usize].0, keep.clone())),
                _ => Err(Error::new(ErrorKind::Internal, "a block of our own among foreign memory")),
            });
            (theirs.collect::<Result<Vec<_>>>()?, fence)
        }
        (Memory::Ours, Where::Cpu) => (our_blocks(layout, files, in_part)?, None),
        (Memory::Granted, Where::Cpu) => {
            return Err(Error::new(ErrorKind::Invalid, "blocks are granted for GPU targets only"));
        }
        // Granted as the engine wants them, by the caller or by the engine thread itself.
        (Memory::Ours | Memory::Granted, Where::Gpu(_)) => return Ok((vec![None; layout.blocks.len()], None)),
    };
    Ok((blocks.into_iter().map(Some).collect(), fence))
}

fn check_destinations(layout: &Layout, tensors: &[(u64, u64)]) -> Result<()> {
    if tensors.len() != layout.places.len() {
        return Err(Error::new(ErrorKind::Invalid, "there must be one destination per want"));
    }
    match layout.places.iter().zip(tensors).find(|(place, tensor)| place.nbytes != tensor.1) {
        Some((place, (_, nbytes))) => Err(Error::new(
            ErrorKind::Mismatch,
            format!("a destination of {nbytes} bytes for {} wanted bytes", place.nbytes),
        )),
        None => Ok(()),
    }
}

/// Refuses loads that can never fit. A stream is not checked: only its window is in memory at once.
fn check_room(layout: &Layout) -> Result<()> {
    let private = |b: &&BlockSpec| matches!(b.kind, BlockKind::Mirror { .. } | BlockKind::Dense);
    let wanted: u64 = layout.blocks.iter().filter(private).map(|b| b.nbytes).sum();
    if wanted < WORTH_ASKING {
        return Ok(());
    }
    let most = machine::memory_most();
    if wanted <= most {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::OutOfMemory,
        format!(
            "the load needs {wanted} bytes of private memory, but this process can have no more than {most} of memory and swap; \
             map files of a local disk instead of copying them, load fewer tensors at once, or stream them"
        ),
    ))
}

/// Blocks in memory of this process: mapped files, and one arena for the rest. Blocks in the arena start at pages.
fn our_blocks(layout: &Layout, files: &Files, in_part: &[bool]) -> Result<Vec<Block>> {
    let mut arena_len = 0u64;
    let mut starts = Vec::with_capacity(layout.blocks.len());
    for block in &layout.blocks {
        let in_arena = matches!(block.kind, BlockKind::Mirror { .. } | BlockKind::Dense);
        starts.push(in_arena.then_some(arena_len));
        if in_arena {
            // Cannot overflow: `Layout::new` has added them up.
            arena_len += block.nbytes.next_multiple_of(PAGE);
        }
    }
    let arena = match arena_len {
        0 => None,
        len => {
            let places = layout.places.iter().filter_map(|p| Some((starts[p.block as usize]? + p.offset, p.nbytes)));
            Some(Arc::new(Arena::new(len, places)?))
        }
    };
    let block = |(block, start): (&BlockSpec, Option<u64>)| match (block.kind, start, &arena) {
        (BlockKind::Mapped { file }, ..) => {
            let fd = files.open(file, false)?;
            let mapping = Mapping::new(&*fd, files.size(file)).map_err(|e| e.at(files.path(file)))?;
            if in_part.get(file as usize) == Some(&true) {
                mapping.read_no_further(true);
            }
            Ok(Block::mapping(Arc::new(mapping)))
        }
        (_, Some(start), Some(arena)) => Ok(Block::arena(arena, start)),
        // Only empty tensors: any non-null aligned address will do.
        (_, Some(_), None) => Ok(Block::held(PAGE, Arc::new(()))),
        (_, None, _) => Err(Error::new(ErrorKind::Internal, "a foreign block without foreign memory")),
    };
    layout.blocks.iter().zip(starts).map(block).collect()
}

/// The source of the load, and how many threads it may use.
fn source(
    files: &Arc<Files>,
    options: &Options,
    (cold, filled, in_part): (Cold, &[bool], &[bool]),
    here: bool,
    timeline: Option<&Arc<Timeline>>,
) -> Result<(Box<dyn Source>, usize)> {
    let mut options = options.clone();
    if here {
        // There is no other thread, so the number of cores does not matter. Asking for it takes twenty system calls.
        options.threads = 1;
    } else if options.threads == 0 && cold == Cold::None {
        // More copy workers than cores would only take turns.
        options.threads = machine::cores().min(MOST_WORKERS) as u32;
    }
    let mut source = Router::new(files.clone(), &options)?;
    match cold {
        Cold::None => {}
        Cold::Bypass => {
            source.leave_nothing();
            if in_part.contains(&true) {
                source.fill_first(filled, in_part);
            }
        }
        Cold::Keep => source.fill_first(filled, in_part),
        Cold::Try => {
            source.fill_first(filled, in_part);
            source.try_first();
        }
    }
    if here {
        source.read_here();
    }
    if let Some(timeline) = timeline {
        source.record(timeline);
    }
    let workers = source.workers();
    Ok((Box::new(source), workers))
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
        Where::Gpu(ordinal) => Some(Box::new(GpuDevice::new(&Api::load()?, ordinal)?)),
    })
}

/// Reads in flight. 16 of 4 MiB saturate what one ring reaches (published: 45 GiB/s for 32 of 1 MiB). Each worker
/// should find the next read waiting when it has done one.
fn depth(options: &Options, workers: usize) -> usize {
    match options.depth {
        0 => (2 * workers).max(16),
        depth => depth as usize,
    }
}

fn spawn(driver: Driver) -> Result<JoinHandle<()>> {
    // EAGAIN alone says little: the cause is RLIMIT_NPROC or the pids limit of the cgroup.
    let refused = |e| Error::new(ErrorKind::Limit, format!("cannot start the engine thread: {e}"));
    Builder::new().name("penstock-engine".into()).spawn(move || driver.run()).map_err(refused)
}
