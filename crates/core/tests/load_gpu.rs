//! Whole loads to the fake GPU, with every fence on the way taken out in turn: each is missed.
//!
//! The same small load runs each time: more bytes than the ring holds, large and small tensors, memory whose last use is
//! still queued when it is granted, a consumer whose kernels read each tensor as soon as it is handed out. Left alone it
//! leaves no line in the driver's log.
#![allow(clippy::unwrap_used)]

mod checkpoints;
mod device;

use device::{Gpu, Kind, NOTHING, PATIENCE, REGISTRATIONS, WAITS_FOR_COPIES, WAITS_FOR_FENCES, WAITS_FOR_SCRATCH};
use penstock::device::api::{Context, DriverEvent, Stream, Vendor, LIBRARY_VARIABLE};
use penstock::device::gpu::{release_staging, GpuDevice, GpuMemory};
use penstock::device::{Batch, Copied, Device, Fence};
use penstock::extent::Ticket;
use penstock::format::Checkpoint;
use penstock::load::{Load, Next};
use penstock::options::Options;
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::want::Want;
use penstock::staging::Share;
use penstock::ErrorKind;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A checkpoint and its file's bytes.
struct Model {
    checkpoint: Arc<Checkpoint>,
    bytes: Vec<u8>,
    _dir: tempfile::TempDir,
}

impl Model {
    fn content(&self, want: u32) -> &[u8] {
        let tensor = self.checkpoint.tensor(want);
        &self.bytes[tensor.begin as usize..tensor.end as usize]
    }
}

/// Large tensors and small ones that are gathered, more than fits the ring, and no two slabs alike.
fn model() -> Model {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    let names: Vec<(String, u64)> = (0..9)
        .flat_map(|layer| {
            let small = (0..1500).map(move |i| (format!("layers.{layer}.small.{i}"), 700 + i % 60));
            small.chain([(format!("layers.{layer}.large"), 2 * MIB + 12)])
        })
        .collect();
    let list: Vec<(&str, u64)> = names.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    let (json, data) = checkpoints::header(&list);
    let mut bytes = checkpoints::shard(json.as_bytes(), 0);
    let start = bytes.len();
    (0..).take_while(|seed| (seed << 20) < data as u64).for_each(|seed| bytes.extend(device::noise(seed)));
    bytes.truncate(start + data);
    std::fs::write(&file, &bytes).unwrap();
    Model { checkpoint: Arc::new(Checkpoint::open(&[&file]).unwrap()), bytes, _dir: dir }
}

fn options() -> Options {
    Options { staging: 32 * MIB, extent: MIB, stall_timeout: Duration::from_secs(60), ..Options::default() }
}

fn request(checkpoint: &Arc<Checkpoint>, memory: Memory, stream: bool) -> Request {
    let wants = Want::all(checkpoint);
    Request {
        checkpoint: checkpoint.clone(),
        wants,
        layout: None,
        device: Where::Gpu(0),
        memory,
        options: options(),
        stream,
    }
}

fn cuda() -> Gpu {
    let gpu = Gpu::new(Vendor::Cuda);
    // Memory of our own is allocated through the driver that loads find for themselves.
    std::env::set_var(LIBRARY_VARIABLE, gpu.fake.path());
    gpu
}

/// A framework's side: a stream whose memory is handed out while work on it is queued, and events recorded on it.
struct Framework<'a> {
    gpu: &'a Gpu,
    context: Context,
    stream: usize,
    consumer: usize,
    events: Vec<DriverEvent>,
}

impl<'a> Framework<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        gpu.api.init().unwrap();
        let context = gpu.api.context(0).unwrap();
        let (stream, consumer) = (gpu.fake.stream_create(0, 1), gpu.fake.stream_create(0, 1));
        Self { gpu, context, stream, consumer, events: Vec::new() }
    }

    /// Memory with a write to it queued, and the event behind that.
    fn memory(&mut self, nbytes: u64) -> (Arc<GpuMemory>, Fence) {
        let memory = Arc::new(GpuMemory::new(&self.gpu.context(), nbytes).unwrap());
        assert_eq!(self.gpu.fake.launch_write(self.stream, memory.address(), nbytes.max(1), 0x55, 20_000), 0);
        let current = self.context.enter().unwrap();
        let event = current.create_event().unwrap();
        // SAFETY: live handles.
        unsafe { current.record(event, Stream(self.stream)) }.unwrap();
        self.events.push(event);
        (memory, Fence(event.0 as u64))
    }

    /// A kernel that reads, behind nothing but what the host has waited for.
    fn consume(&self, address: u64, expected: &[u8]) {
        let hash = fakegpu::Library::fnv(expected);
        assert_eq!(self.gpu.fake.launch_check(self.consumer, address, expected.len() as u64, hash, 0), 0);
    }

    fn end(self) {
        let fake = &self.gpu.fake;
        fake.drain();
        fake.stream_synchronize(self.stream, 0);
        fake.stream_synchronize(self.consumer, 0);
        let current = self.context.enter().unwrap();
        for event in &self.events {
            // SAFETY: nobody waits for it any more.
            unsafe { current.destroy_event(*event) }.unwrap();
        }
        drop(current);
        fake.stream_destroy(self.stream);
        fake.stream_destroy(self.consumer);
    }
}

/// Streams the checkpoint with blocks granted as they are wanted, while the driver ignores these calls; gives the driver's log.
fn streamed(ignored: &str, wrap: impl FnOnce(GpuDevice) -> Box<dyn Device>) -> String {
    let model = model();
    let checkpoint = &model.checkpoint;
    let gpu = cuda();
    gpu.fake.configure("ignore", ignored);
    // Long enough that a caller that does not wait is early, however busy the machine is.
    gpu.fake.configure("copy_delay_us", "4000");
    let mut framework = Framework::new(&gpu);
    let load = Load::start_on(request(checkpoint, Memory::Granted, true), Some(wrap(gpu.gpu()))).unwrap();
    let mut handed_out = Vec::new();
    loop {
        match load.next(Some(PATIENCE)).unwrap() {
            Next::Ready(want) => {
                let view = load.view(want).unwrap();
                if checkpoint.tensor(want).nbytes() > 1000 || want % 100 == 0 {
                    framework.consume(view.address(), model.content(want));
                }
                handed_out.push(view);
                load.take(want).unwrap();
            }
            Next::Grant => {
                for block in load.wanted_blocks().unwrap() {
                    let (memory, fence) = framework.memory(load.layout().blocks[block as usize].nbytes);
                    load.grant(block, memory.address(), memory.clone(), Some(fence)).unwrap();
                }
            }
            Next::End => break,
            Next::TimedOut => panic!("nothing came for {PATIENCE:?}"),
        }
    }
    assert_eq!(handed_out.len(), checkpoint.len());
    load.close();
    framework.end();
    drop((handed_out, load));
    release_staging();
    let mut log = gpu.fake.misuses();
    log.extend(gpu.fake.leaks());
    log.join("\n")
}

fn untouched(device: GpuDevice) -> Box<dyn Device> {
    Box::new(device)
}

#[cfg(debug_assertions)]
#[test]
fn a_panic_on_the_device_thread_is_the_loads_error_and_no_hang() {
    // Slabs that the driver may be reading are lost to the process.
    device::alone("a_panic_on_the_device_thread_is_the_loads_error_and_no_hang", || {
        let model = model();
        let gpu = cuda();
        penstock::threads::trip("penstock-gpu batch");
        for _ in 0..2 {
            let load =
                Load::start_on(request(&model.checkpoint, Memory::Ours, false), Some(untouched(gpu.gpu()))).unwrap();
            let error = match load.wait(Some(PATIENCE)) {
                Ok(ended) => panic!("no error, ended: {ended}"),
                Err(error) => error,
            };
            assert_eq!(error.kind(), penstock::ErrorKind::Internal, "{error}");
            assert!(error.to_string().contains("on purpose"), "{error}");
        }
    });
}

#[test]
fn a_load_with_all_its_fences_misuses_nothing() {
    assert_eq!(streamed(NOTHING, untouched), "");
}

#[test]
fn without_the_wait_for_the_allocating_stream_the_driver_notices() {
    let log = streamed(WAITS_FOR_FENCES, untouched);
    assert!(log.contains("unordered-access"), "{log}");
}

#[test]
fn without_the_wait_for_the_copies_the_driver_notices() {
    let log = streamed(WAITS_FOR_COPIES, untouched);
    assert!(log.contains("source-modified"), "a slab that was read into too early: {log}");
    assert!(log.contains("kernel that reads"), "a tensor that was handed out too early: {log}");
}

#[test]
fn without_the_wait_for_the_scratch_buffer_the_driver_notices() {
    let log = streamed(WAITS_FOR_SCRATCH, untouched);
    assert!(log.contains("source-modified"), "{log}");
}

#[test]
fn without_registration_the_driver_notices() {
    let log = streamed(REGISTRATIONS, untouched);
    assert!(log.contains("unregistered-memory"), "{log}");
}

/// Reports batches before they are done: the engine then reuses their slabs and hands out their tensors.
struct Hasty {
    device: GpuDevice,
    early: Vec<Copied>,
    late: Vec<Copied>,
}

impl Device for Hasty {
    fn stage(&mut self, share: &mut Share, nbytes: u64) {
        self.device.stage(share, nbytes);
    }

    fn wait_for(&mut self, fence: Fence) -> penstock::Result<()> {
        self.device.wait_for(fence)
    }

    fn copy(&mut self, batch: Batch) -> penstock::Result<()> {
        self.early.push(Copied { ticket: batch.ticket, result: Ok(()), begun: Vec::new() });
        self.device.copy(batch)
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> penstock::Result<()> {
        done.append(&mut self.early);
        self.device.poll(&mut self.late)
    }

    fn wake(&self) -> RawFd {
        self.device.wake()
    }

    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
}

#[test]
fn a_device_that_reports_before_the_event_is_noticed() {
    let log = streamed(NOTHING, |device| Box::new(Hasty { device, early: Vec::new(), late: Vec::new() }));
    assert!(log.contains("unordered-access"), "{log}");
}

/// Lets go of memory before the copies into it are done.
struct Careless(GpuDevice);

impl Device for Careless {
    fn stage(&mut self, share: &mut Share, nbytes: u64) {
        self.0.stage(share, nbytes);
    }

    fn wait_for(&mut self, fence: Fence) -> penstock::Result<()> {
        self.0.wait_for(fence)
    }

    fn copy(&mut self, batch: Batch) -> penstock::Result<()> {
        self.0.copy(Batch { keep: Arc::new(()), ..batch })
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> penstock::Result<()> {
        self.0.poll(done)
    }

    fn wake(&self) -> RawFd {
        self.0.wake()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn abandon(&mut self) -> Vec<Ticket> {
        self.0.abandon()
    }
}

/// Hangs a copy until the load has given up and let go of everything; gives the driver's log.
fn given_up(wrap: impl FnOnce(GpuDevice) -> Box<dyn Device>) -> String {
    let model = model();
    let checkpoint = &model.checkpoint;
    let gpu = cuda();
    gpu.fake.configure("hang_copy", "3");
    let options = Options { stall_timeout: Duration::from_millis(300), ..options() };
    let mut framework = Framework::new(&gpu);
    let request = Request { options, ..request(checkpoint, Memory::Granted, false) };
    let load = Load::start_on(request, Some(wrap(gpu.gpu()))).unwrap();
    for (block, spec) in (0..).zip(&load.layout().blocks) {
        let (memory, fence) = framework.memory(spec.nbytes);
        load.grant(block, memory.address(), memory, Some(fence)).unwrap();
    }
    let start = Instant::now();
    let error = load.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    load.close();
    drop(load);
    gpu.fake.release_hang();
    gpu.fake.drain();
    let start = Instant::now();
    while gpu.fake.counter("streams") > 0 {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    framework.end();
    gpu.fake.misuses().join("\n")
}

#[test]
fn memory_of_a_load_that_gave_up_stays_until_the_copies_have_run() {
    // Alone, since a slab and its registration stay for the life of the process.
    device::alone("memory_of_a_load_that_gave_up_stays_until_the_copies_have_run", || {
        assert_eq!(given_up(untouched), "");
    });
}

#[test]
fn without_keeping_the_memory_of_copies_under_way_the_driver_notices() {
    device::alone("without_keeping_the_memory_of_copies_under_way_the_driver_notices", || {
        let log = given_up(|device| Box::new(Careless(device)));
        assert!(log.contains("free-with-work-pending"), "{log}");
    });
}

#[test]
fn blocks_of_a_stream_are_let_go_as_they_are_handed_out() {
    let model = model();
    let checkpoint = &model.checkpoint;
    let gpu = cuda();
    let load = Load::start_on(request(checkpoint, Memory::Ours, true), Some(Box::new(gpu.gpu()))).unwrap();
    let (mut held, mut most) = (0, 0);
    loop {
        match load.next(Some(PATIENCE)).unwrap() {
            Next::Ready(want) => {
                let view = load.view(want).unwrap();
                held += view.nbytes();
                load.take(want).unwrap();
                drop(view);
                most = most.max(gpu.fake.counter("device_bytes"));
            }
            Next::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(held > 20 * MIB && most > 0);
    // The load itself still exists, and holds nothing of the tensors that were handed out.
    assert_eq!(gpu.fake.counter("device_bytes"), 0);
    assert!(load.view(0).is_err());
    drop(load);
    gpu.check();
}

#[test]
fn a_failed_load_that_somebody_holds_on_to_holds_no_memory() {
    let model = model();
    let checkpoint = &model.checkpoint;
    let gpu = cuda();
    gpu.fake.configure("fail", "cuMemcpyHtoDAsync_v2:5:999");
    let load = Load::start_on(request(checkpoint, Memory::Ours, false), Some(Box::new(gpu.gpu()))).unwrap();
    let error = load.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    load.close();
    assert_eq!(gpu.fake.counter("device_bytes"), 0);
    assert_eq!(load.wait(None).unwrap_err().to_string(), error.to_string());
    drop(load);
    gpu.check();
}

#[test]
fn a_ticket_of_nobody_is_an_error_and_no_panic() {
    struct Echo(Careless, bool);
    impl Device for Echo {
        fn stage(&mut self, share: &mut Share, nbytes: u64) {
            self.0.stage(share, nbytes);
        }
        fn wait_for(&mut self, fence: Fence) -> penstock::Result<()> {
            self.0.wait_for(fence)
        }
        fn copy(&mut self, batch: Batch) -> penstock::Result<()> {
            self.0 .0.copy(batch)
        }
        fn poll(&mut self, done: &mut Vec<Copied>) -> penstock::Result<()> {
            self.0.poll(done)?;
            if !done.is_empty() && !std::mem::replace(&mut self.1, true) {
                done.push(Copied { ticket: Ticket(u64::MAX >> 1), result: Ok(()), begun: Vec::new() });
            }
            Ok(())
        }
        fn wake(&self) -> RawFd {
            self.0.wake()
        }
        fn in_flight(&self) -> usize {
            self.0.in_flight()
        }
    }
    let model = model();
    let checkpoint = &model.checkpoint;
    let gpu = cuda();
    let device = Box::new(Echo(Careless(gpu.gpu()), false));
    let load = Load::start_on(request(checkpoint, Memory::Ours, false), Some(device)).unwrap();
    assert_eq!(load.wait(Some(PATIENCE)).unwrap_err().kind(), ErrorKind::Internal);
    drop(load);
    gpu.check();
}
