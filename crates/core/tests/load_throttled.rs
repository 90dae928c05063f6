//! Whole loads with one stage made slow, made to fail or made to hang: the report names the stage, the error the file, and
//! nothing is left running.
#![allow(clippy::unwrap_used)]

#[path = "checkpoints/mod.rs"]
mod checkpoints;

use penstock::device::api::{Api, LIBRARY_VARIABLE};
use penstock::device::gpu::{GpuMemory, SharedContext};
use penstock::error::ErrorKind;
use penstock::format::Checkpoint;
use penstock::load::{Load, Memory, Next, Request, Where};
use penstock::options::{Io, Options};
use penstock::placement::Want;
use penstock::source::{Release, Throttle, Throttling};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const TENSORS: usize = 16;
const NBYTES: u64 = MIB + 1;
/// Bytes per second of a slow source: a checkpoint in 1.6 s. A virtual machine may be put aside for 0.2 s at any time, and that is not
/// to be the greater part of anything.
const SLOW: u64 = 10 * MIB;

/// A checkpoint of 16 tensors, and loads of it.
struct Bench {
    path: PathBuf,
    checkpoint: Arc<Checkpoint>,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let names: Vec<String> = (0..TENSORS).map(|i| format!("layers.{i}.weight")).collect();
        checkpoints::write(&path, &names.iter().map(|n| (n.as_str(), NBYTES)).collect::<Vec<_>>());
        let checkpoint = Arc::new(Checkpoint::open(std::slice::from_ref(&path)).unwrap());
        Bench { path, checkpoint, _folder: folder }
    }

    fn request(&self, stream: bool) -> Request {
        Request {
            checkpoint: self.checkpoint.clone(),
            wants: Want::all(&self.checkpoint),
            device: Where::Cpu,
            memory: Memory::Ours,
            options: Options { io: Io::Buffered, extent: MIB, staging: 8 * MIB, depth: 4, ..Options::default() },
            stream,
        }
    }

    /// Starts a load whose source is throttled.
    fn start(&self, request: Request, how: Throttling) -> (Load, Arc<Release>) {
        let release = Mutex::new(None);
        let load = Load::start_through(request, |source, files| {
            let throttle = Throttle::new(source, files.clone(), how)?;
            *release.lock().unwrap() = Some(throttle.release());
            Ok(Box::new(throttle))
        });
        (load.unwrap(), release.into_inner().unwrap().unwrap())
    }

    /// Asserts that these wants hold what the file does.
    fn check(&self, load: &Load) {
        let bytes = fs::read(&self.path).unwrap();
        let data = bytes.len() - TENSORS * NBYTES as usize;
        for want in 0..TENSORS {
            let view = load.view(want as u32).unwrap();
            // SAFETY: the want is ready, and the view keeps its bytes.
            let got = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
            let at = data + want * NBYTES as usize;
            assert!(got == &bytes[at..at + NBYTES as usize], "wrong bytes in want {want}");
        }
    }
}

/// Threads of this process whose name begins so.
fn threads(prefix: &str) -> usize {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .filter(|t| {
            let comm = fs::read_to_string(t.as_ref().unwrap().path().join("comm"));
            comm.is_ok_and(|c| c.starts_with(prefix))
        })
        .count()
}

/// Tests here count the threads of the process: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    let guard = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    none_left("penstock");
    guard
}

/// A thread that has been joined may be listed a moment longer, on a busy machine for seconds.
fn none_left(prefix: &str) {
    let until = Instant::now() + Duration::from_secs(10);
    while threads(prefix) > 0 {
        assert!(Instant::now() < until, "{} threads {prefix} still run", threads(prefix));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_slow_source_is_what_bounds_the_load() {
    let _alone = alone();
    let bench = Bench::new();
    let (load, _) = bench.start(bench.request(false), Throttling { rate: Some(SLOW), ..Throttling::default() });
    assert!(load.wait(None).unwrap());
    let report = load.report();
    assert_eq!(report.bottleneck, "source", "{report:?}");
    assert!(report.seconds >= 1.4 && report.waits.source.as_secs_f64() > 0.7 * report.seconds, "{report:?}");
    bench.check(&load);
}

#[test]
fn a_slow_source_of_a_stream_is_not_taken_for_a_slow_consumer() {
    let _alone = alone();
    let bench = Bench::new();
    let mut request = bench.request(true);
    request.options.window = 2 * MIB;
    let (load, _) = bench.start(request, Throttling { rate: Some(SLOW), ..Throttling::default() });
    drain(&load, Duration::ZERO);
    let report = load.report();
    assert_eq!(report.bottleneck, "source", "{report:?}");
    assert!(report.waits.source > 4 * report.waits.consumer, "{report:?}");
}

#[test]
fn a_slow_consumer_is_what_bounds_the_stream() {
    let _alone = alone();
    let bench = Bench::new();
    let mut request = bench.request(true);
    request.options.window = 2 * MIB;
    let (load, _) = bench.start(request, Throttling::default());
    drain(&load, Duration::from_millis(100));
    let report = load.report();
    assert_eq!(report.bottleneck, "consumer", "{report:?}");
    assert!(report.waits.consumer.as_secs_f64() > 0.6 * report.seconds, "{report:?}");
}

/// Takes every want, each after a while.
fn drain(load: &Load, pause: Duration) {
    let mut taken = 0;
    loop {
        match load.next(None).unwrap() {
            Next::Ready(want) => {
                taken += 1;
                std::thread::sleep(pause);
                drop(load.view(want).unwrap());
                load.take(want).unwrap();
            }
            Next::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(taken, TENSORS);
}

#[test]
fn the_other_stages_of_a_load_onto_a_gpu() {
    let _alone = alone();
    let fake = fakegpu::Library::exclusive().unwrap();
    // The one test of this process that loads a driver.
    std::env::set_var(LIBRARY_VARIABLE, format!("cuda:{}", Path::new(fake.path()).display()));
    let bench = Bench::new();
    let gpu = |memory| {
        let mut request = bench.request(false);
        (request.device, request.memory) = (Where::Gpu(0), memory);
        request.options.staging = 2 * MIB;
        request
    };

    // Copies to the device.
    fake.configure("h2d_bytes_per_s", "10000000");
    let (load, _) = bench.start(gpu(Memory::Ours), Throttling::default());
    assert!(load.wait(None).unwrap());
    let report = load.report();
    assert_eq!(report.bottleneck, "device", "{report:?}");
    drop(load);
    fake.configure("h2d_bytes_per_s", "0");

    // Blocks that the caller grants late.
    let api = Api::load().unwrap();
    let context = SharedContext::retain(&api, 0).unwrap();
    let (load, _) = bench.start(gpu(Memory::Granted), Throttling::default());
    loop {
        match load.wait_or_grant(None).unwrap() {
            Next::Grant => {
                std::thread::sleep(Duration::from_millis(300));
                let block = load.wanted_blocks().unwrap()[0];
                let memory = GpuMemory::new(&context, load.layout().blocks[block as usize].nbytes).unwrap();
                load.grant(block, memory.address(), Arc::new(memory), None).unwrap();
            }
            Next::End => break,
            other => panic!("{other:?}"),
        }
    }
    let report = load.report();
    assert_eq!(report.bottleneck, "allocation", "{report:?}");
    drop(load);

    // And the source, all the same.
    let (load, _) = bench.start(gpu(Memory::Ours), Throttling { rate: Some(SLOW), ..Throttling::default() });
    assert!(load.wait(None).unwrap());
    assert_eq!(load.report().bottleneck, "source", "{:?}", load.report());
    drop(load);
    drop(context);
    assert_eq!(fake.misuses(), Vec::<String>::new());
}

#[test]
fn staging_that_a_load_holds_whose_reads_hang_is_what_bounds_another() {
    let _alone = alone();
    let bench = Bench::new();
    // O_DIRECT cannot read to odd addresses: everything goes by slabs. The first load hangs with all of them.
    let slabs = || {
        let mut request = bench.request(false);
        let memory = Arc::new(vec![0u8; TENSORS * (NBYTES as usize + 2) + 1]);
        let start = memory.as_ptr() as u64 | 1;
        let tensors = (0..TENSORS as u64).map(|i| (start + i * (NBYTES + 2), NBYTES)).collect();
        request.memory = Memory::Into { tensors, keep: memory, fence: None };
        request.options.staging = 2 * MIB;
        request.options.io = Io::Threads;
        request
    };
    let (hog, release) = bench.start(slabs(), Throttling { hang: Some(0), ..Throttling::default() });
    std::thread::sleep(Duration::from_millis(100));
    let (load, _) = bench.start(slabs(), Throttling::default());
    let done = load.wait(Some(Duration::from_secs(2))).unwrap();
    assert!(!done && !hog.is_done());
    release.release();
    assert!(hog.wait(None).unwrap() && load.wait(None).unwrap());
    let report = load.report();
    assert!(report.peak_staging > 0 && report.peak_staging <= 4 * MIB, "{report:?}");
    assert_eq!(report.bottleneck, "staging", "{report:?}");
}

#[test]
fn an_error_of_any_read_ends_the_load_and_names_file_bytes_and_cause() {
    let _alone = alone();
    let bench = Bench::new();
    for (nth, stream) in [(0, false), (3, true), (15, false), (16, true)] {
        let how = Throttling { fail: Some((nth, libc::EIO)), ..Throttling::default() };
        let (load, _) = bench.start(bench.request(stream), how);
        let e = loop {
            match load.next(None) {
                Ok(Next::Ready(want)) => load.take(want).unwrap(),
                Ok(other) => panic!("{other:?}"),
                Err(e) => break e,
            }
        };
        assert_eq!((e.kind(), e.errno()), (ErrorKind::Io, Some(libc::EIO)));
        assert_eq!(e.path(), Some(bench.path.as_path()));
        assert!(e.byte_range().is_some_and(|r| r.end > r.start), "{e}");
        // Told every time, and the same.
        assert_eq!(load.wait(None).map_err(|e| e.to_string()), Err(e.to_string()));
        // After the outcome is published nothing reads or copies any more, and after the load is dropped nothing of it
        // runs.
        none_left("penstock-read");
        drop(load);
        none_left("penstock");
    }
}

#[test]
fn reads_that_hang_end_in_a_timeout_that_names_the_file_and_leave_what_hangs_behind() {
    let _alone = alone();
    let bench = Bench::new();
    for stream in [false, true] {
        let mut request = bench.request(stream);
        request.options.stall_timeout = Duration::from_millis(300);
        let (load, release) = bench.start(request, Throttling { hang: Some(5), ..Throttling::default() });
        let began = Instant::now();
        let e = load.wait(None).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        assert!(e.path().is_some() && e.byte_range().is_some(), "{e}");
        assert!(began.elapsed() < Duration::from_secs(5));
        release.release();
    }
    let (load, _) = bench.start(bench.request(false), Throttling::default());
    assert!(load.wait(None).unwrap());
    bench.check(&load);
}

#[test]
fn a_source_slower_than_the_stall_timeout_as_a_whole_is_not_stalled() {
    let _alone = alone();
    let bench = Bench::new();
    let mut request = bench.request(false);
    // A busy machine may put threads aside for most of a second.
    request.options.stall_timeout = Duration::from_millis(1500);
    let (load, _) = bench.start(request, Throttling { rate: Some(8 * MIB), ..Throttling::default() });
    assert!(load.wait(None).unwrap(), "two seconds in all, but something moved every 125 ms");
}

#[test]
fn a_consumer_slower_than_the_stall_timeout_is_not_an_error() {
    let _alone = alone();
    let bench = Bench::new();
    let mut request = bench.request(true);
    request.options.window = MIB;
    request.options.stall_timeout = Duration::from_millis(300);
    let (load, _) = bench.start(request, Throttling::default());
    drain(&load, Duration::from_millis(720));
}

#[test]
fn cancelling_a_slow_load_ends_it_at_once() {
    let _alone = alone();
    let bench = Bench::new();
    for how in [
        Throttling { rate: Some(MIB), ..Throttling::default() },
        Throttling { latency: Duration::from_secs(20), ..Throttling::default() },
    ] {
        let (load, _) = bench.start(bench.request(false), how);
        std::thread::sleep(Duration::from_millis(50));
        let began = Instant::now();
        load.cancel();
        assert_eq!(load.wait(None).unwrap_err().kind(), ErrorKind::Cancelled);
        drop(load);
        // The reads that are left take twenty seconds and more.
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        none_left("penstock");
    }
}

#[test]
fn dropping_a_load_whose_reads_hang_takes_as_long_as_the_drain_and_no_longer() {
    let _alone = alone();
    let bench = Bench::new();
    let (load, release) = bench.start(bench.request(false), Throttling { hang: Some(0), ..Throttling::default() });
    std::thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    drop(load);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    release.release();
    none_left("penstock");
}

#[test]
fn a_file_rewritten_between_two_reads_of_one_tensor_is_never_handed_out() {
    let _alone = alone();
    let bench = Bench::new();
    let mut request = bench.request(true);
    request.options.window = MIB;
    let (load, _) = bench.start(request, Throttling { latency: Duration::from_millis(20), ..Throttling::default() });
    let before = fs::read(&bench.path).unwrap();
    let data = before.len() - TENSORS * NBYTES as usize;
    let mut taken = Vec::new();
    let e = loop {
        match load.next(None) {
            Ok(Next::Ready(want)) => {
                taken.push((want, load.view(want).unwrap()));
                load.take(want).unwrap();
                if taken.len() == 4 {
                    let mut other = before.clone();
                    other[data..].fill(0xee);
                    // In place: the same inode.
                    fs::write(&bench.path, other).unwrap();
                }
            }
            Ok(other) => panic!("{other:?}"),
            Err(e) => break e,
        }
    };
    assert_eq!(e.kind(), ErrorKind::Changed, "{e}");
    assert_eq!(e.path(), Some(bench.path.as_path()));
    assert!(taken.len() < TENSORS, "all of it came out of a file that was rewritten in the middle");
    for (want, view) in taken {
        // SAFETY: handed out, so complete; the view keeps its bytes.
        let got = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
        let at = data + want as usize * NBYTES as usize;
        assert!(got == &before[at..at + NBYTES as usize], "want {want} was not what it was when the load began");
    }
}
