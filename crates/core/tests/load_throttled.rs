//! Whole loads with one stage made slow, made to fail or made to hang: the report names the stage, the error the file, and
//! nothing is left running.
#![allow(clippy::unwrap_used)]

#[path = "checkpoints/mod.rs"]
mod checkpoints;

use penstock::device::api::{Api, LIBRARY_VARIABLE};
use penstock::device::gpu::{GpuMemory, SharedContext};
use penstock::error::{ErrorKind, Result};
use penstock::extent::Lane;
use penstock::format::Checkpoint;
use penstock::load::{Load, Next};
use penstock::options::{Io, Options};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::strides::Foreign;
use penstock::plan::want::Want;
use penstock::source::{Progress, Read, Release, Source, Throttle, Throttling};
use penstock::store::evict;
use std::fs;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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
            layout: None,
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
    let until = Instant::now() + Duration::from_secs(20);
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
    drain(&load, Duration::ZERO, 0);
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
    drain(&load, Duration::from_millis(100), TENSORS);
    let report = load.report();
    assert_eq!(report.bottleneck, "consumer", "{report:?}");
    assert!(report.waits.consumer.as_secs_f64() > 0.6 * report.seconds, "{report:?}");
}

/// A source that counts the bytes that were asked of it, and keeps the worst excess over a bound.
struct Counted {
    inner: Box<dyn Source>,
    asked: u64,
    bound: Arc<AtomicU64>,
    excess: Arc<AtomicU64>,
}

impl Source for Counted {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let need = read.need;
        self.inner.submit(read)?;
        self.asked += need;
        let excess = self.asked.saturating_sub(self.bound.load(Ordering::SeqCst));
        self.excess.fetch_max(excess, Ordering::SeqCst);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.inner.poll(events)
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn wake(&self) -> RawFd {
        self.inner.wake()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// Writes files of tensors of these sizes in MiB.
fn written(files: &[&[u64]]) -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..files.len()).map(|f| folder.path().join(format!("{f}.safetensors"))).collect();
    for (f, (path, sizes)) in paths.iter().zip(files).enumerate() {
        let names: Vec<String> = (0..sizes.len()).map(|i| format!("{f}.{i:03}")).collect();
        let tensors: Vec<(&str, u64)> = names.iter().zip(*sizes).map(|(n, s)| (n.as_str(), s * MIB)).collect();
        checkpoints::write(path, &tensors);
    }
    (folder, paths)
}

/// Streams the tensors of files, each on a storage device of its own, and pauses before it takes one. Gives the most bytes by
/// which the reads passed the window, or the next tensor alone where that is larger, and two reads besides: the first and
/// the last read of a tensor bring others too.
fn excess_over_the_window(files: &[PathBuf], window: u64, options: Options, takes: bool) -> u64 {
    let checkpoint = Arc::new(Checkpoint::open(files).unwrap());
    let sizes: Vec<u64> = checkpoint.tensors().map(|t| t.nbytes()).collect();
    let slack = 2 * options.extent;
    let request = Request {
        wants: Want::all(&checkpoint),
        checkpoint,
        layout: None,
        device: Where::Cpu,
        memory: Memory::Ours,
        options: Options { window, copy: Some(true), ..options },
        stream: true,
    };
    let (bound, excess) = (Arc::new(AtomicU64::new(window.max(sizes[0]) + slack)), Arc::new(AtomicU64::new(0)));
    let storage: Vec<u64> = (0..files.len() as u64).collect();
    let load = Load::start_on_volumes(request, &storage, |inner, _| {
        Ok(Box::new(Counted { inner, asked: 0, bound: bound.clone(), excess: excess.clone() }))
    });
    let load = load.unwrap();
    let mut taken = 0;
    loop {
        std::thread::sleep(Duration::from_millis(10));
        match load.next(Some(Duration::from_secs(30))).unwrap() {
            Next::Ready(want) => {
                assert_eq!(want as usize, taken);
                taken += 1;
                // What the engine may ask for next, before it hears of it.
                let next = sizes.get(taken).copied().unwrap_or(0);
                bound.store(sizes[..taken].iter().sum::<u64>() + window.max(next) + slack, Ordering::SeqCst);
                if takes {
                    load.take(want).unwrap();
                }
            }
            Next::End => break,
            other => panic!("{other:?} after {taken} of {}", sizes.len()),
        }
    }
    assert_eq!(taken, sizes.len());
    excess.load(Ordering::SeqCst)
}

/// Ways to read with extents of 256 KiB: in place, and by way of slabs of which only a few are there.
fn small_reads() -> Options {
    Options { io: Io::Buffered, extent: MIB / 4, staging: MIB, depth: 8, ..Options::default() }
}

/// Small tensors before and after one that is far larger than the window.
const UNEVEN: &[u64] = &[1, 1, 1, 1, 1, 1, 1, 1, 24, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1];

#[test]
fn a_stream_reads_ahead_its_window_or_the_next_tensor_alone() {
    let _alone = alone();
    let (_folder, files) = written(&[UNEVEN]);
    for window in [1, 2 * MIB, 5 * MIB] {
        assert_eq!(excess_over_the_window(&files, window, small_reads(), true), 0, "window {window}");
    }
    let direct = Options { io: Io::Direct, ..small_reads() };
    assert_eq!(excess_over_the_window(&files, 2 * MIB, direct, true), 0, "past the page cache");
}

/// Else the files that come later would be read whole while the first one is handed out.
#[test]
fn a_stream_of_files_on_several_devices_keeps_to_its_window_too() {
    let _alone = alone();
    let (_folder, files) = written(&[UNEVEN, &[1; 24]]);
    let turned: Vec<PathBuf> = files.iter().rev().cloned().collect();
    for window in [1, 2 * MIB, 5 * MIB] {
        for files in [&files, &turned] {
            assert_eq!(excess_over_the_window(files, window, small_reads(), true), 0, "window {window}");
        }
    }
}

/// To ask for the next one says the same.
#[test]
fn a_stream_goes_on_for_a_consumer_that_never_says_that_it_took_a_tensor() {
    let _alone = alone();
    let (_folder, files) = written(&[UNEVEN]);
    assert_eq!(excess_over_the_window(&files, 2 * MIB, small_reads(), false), 0);
}

/// Takes every want, and pauses after so many of them.
fn drain(load: &Load, pause: Duration, pauses: usize) {
    let mut taken = 0;
    loop {
        match load.next(None).unwrap() {
            Next::Ready(want) => {
                taken += 1;
                if taken <= pauses {
                    std::thread::sleep(pause);
                }
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
        let tensors = (0..TENSORS as u64).map(|i| Foreign::contiguous(start + i * (NBYTES + 2), NBYTES)).collect();
        request.memory = Memory::Into { tensors, keep: memory, fence: None };
        request.options.staging = 2 * MIB;
        request.options.io = Io::Threads;
        request
    };
    // Staging is to be held for longer than the reads take, and others may use the disk.
    let (first, _) = bench.start(slabs(), Throttling::default());
    assert!(first.wait(None).unwrap());
    let held = Duration::from_secs(2).max(Duration::from_secs_f64(3.0 * first.report().seconds));
    drop(first);
    let (hog, release) = bench.start(slabs(), Throttling { hang: Some(0), ..Throttling::default() });
    std::thread::sleep(Duration::from_millis(100));
    let (load, _) = bench.start(slabs(), Throttling::default());
    let done = load.wait(Some(held)).unwrap();
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
    request.options.stall_timeout = Duration::from_millis(1500);
    let (load, _) = bench.start(request, Throttling::default());
    drain(&load, Duration::from_secs(2), 2);
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

/// A source that does something before its first read.
struct First<F> {
    inner: Box<dyn Source>,
    first: Option<F>,
}

impl<F: FnOnce() + Send> Source for First<F> {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if let Some(first) = self.first.take() {
            first();
        }
        self.inner.submit(read)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.inner.poll(events)
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn wake(&self) -> RawFd {
        self.inner.wake()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

#[test]
fn what_others_bring_into_the_page_cache_meanwhile_is_not_read_past_it() {
    let _guard = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let names: Vec<String> = (0..16).map(|i| format!("layers.{i}.weight")).collect();
    checkpoints::write(&path, &names.iter().map(|n| (n.as_str(), 8 * MIB)).collect::<Vec<_>>());
    let checkpoint = Arc::new(Checkpoint::open(std::slice::from_ref(&path)).unwrap());
    let load = |others: bool| {
        let left = evict(&path, None).unwrap();
        let request = Request {
            checkpoint: checkpoint.clone(),
            wants: Want::all(&checkpoint),
            layout: None,
            device: Where::Cpu,
            memory: Memory::Ours,
            options: Options { copy: Some(true), ..Options::default() },
            stream: false,
        };
        let of_others = path.clone();
        let load = Load::start_through(request, |inner, _| {
            let first = others.then_some(move || drop(fs::read(of_others).unwrap()));
            Ok(Box::new(First { inner, first }))
        });
        let load = load.unwrap();
        load.wait(None).unwrap();
        (left, load.report())
    };
    let (left, report) = load(false);
    assert!(!report.cache_reason.starts_with("others read"), "{}", report.cache_reason);
    if left > 0 || report.cache_reason.contains("O_DIRECT") {
        println!("nothing is tried on this file system: {left} bytes stay, {}", report.cache_reason);
        return;
    }
    assert!(report.cache_reason.starts_with("the storage gives"), "{}", report.cache_reason);
    let (_, report) = load(true);
    assert_eq!((report.cache, &*report.cache_reason), ("keep", "others read the same bytes through the page cache"));
    // What is tried past it, and what is sent while the first of that comes back.
    let direct = report.routes.of(Lane::DIRECT).bytes;
    assert!(direct < 60 * MIB, "{report:?}");
}
