//! Whole loads onto the fake GPU with storage and device both held to a rate, in real time: the slower of the two is busy
//! from the first byte to the last, in no more staging memory than every load may have, and the report says which it was.
//!
//! The rates are kept by sleeping, and what the machine itself takes to move the bytes is hidden behind them as long as it
//! moves them faster. `engine/virtual_time.rs` does the same at rates at which it does not.
#![allow(clippy::unwrap_used)]

#[path = "checkpoints/mod.rs"]
mod checkpoints;

use penstock::device::api::{Api, LIBRARY_VARIABLE};
use penstock::device::gpu::{GpuMemory, SharedContext};
use penstock::format::Checkpoint;
use penstock::load::Load;
use penstock::options::{Io, Options};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::strides::Foreign;
use penstock::plan::want::Want;
use penstock::source::{Throttle, Throttling};
use penstock::stats::Report;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// The staging memory of a load that does not set it.
const STAGING: u64 = 256 * MIB;
/// GB/s.
const GB: f64 = 1e9;
/// Share of the slower side's rate that must be reached. The rest has these causes. The first extent passes one side
/// before the other has anything to do, and so does the last extent in the other direction: 4 MiB of 512, so 0.8 % of
/// the faster side's time; 1.6 % if four volumes of 0.25 GB/s begin side by side. Planning, starting threads, and the
/// first touch of staging memory take some milliseconds of 268 at 2 GB/s.
const SHARE: f64 = 0.95;
/// How long one case is tried. Two cores that other programs share may fail to move 2 GB/s out of the page cache, or
/// wake a thread 20 ms late in a load of 270 ms. Then the measurement is not about the pipeline. A pipeline that does
/// not overlap its two sides, or waits without need, fails every time.
const TRIED: Duration = Duration::from_secs(20);

/// A checkpoint of one or more files, and memory of a device for its tensors.
struct Bench {
    files: Vec<PathBuf>,
    checkpoint: Arc<Checkpoint>,
    memory: Vec<Arc<GpuMemory>>,
    _folder: tempfile::TempDir,
}

impl Bench {
    /// Files of these sizes in MiB, in tensors of 8 MiB and a few bytes: no page is like another.
    fn new(context: &Arc<SharedContext>, sizes: &[u64]) -> Bench {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut chunk: Vec<u8> = (0..MIB).map(|i| (i % 251) as u8).collect();
        let mut files = Vec::new();
        for (number, size) in sizes.iter().enumerate() {
            let path = folder.path().join(format!("{number}.safetensors"));
            let mut tensors = Vec::new();
            let names: Vec<_> = (0..size / 8).map(|i| format!("layers.{i}.file.{number}")).collect();
            for (i, name) in (0..).zip(&names) {
                // Odd sizes now and then, as norms and biases are.
                tensors.push((name.as_str(), 8 * MIB + i % 3));
            }
            let (json, data) = checkpoints::header(&tensors);
            let mut file = File::create(&path).unwrap();
            file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
            file.write_all(json.as_bytes()).unwrap();
            let mut left = data;
            while left > 0 {
                for (page, mark) in chunk.chunks_exact_mut(4096).enumerate() {
                    mark[..8].copy_from_slice(&((left + page) as u64 ^ ((number as u64) << 56)).to_le_bytes());
                }
                let n = left.min(chunk.len());
                file.write_all(&chunk[..n]).unwrap();
                left -= n;
            }
            files.push(path);
        }
        let checkpoint = Arc::new(Checkpoint::open(&files).unwrap());
        let memory = checkpoint.tensors().map(|t| Arc::new(GpuMemory::new(context, t.nbytes()).unwrap())).collect();
        Bench { files, checkpoint, memory, _folder: folder }
    }

    fn nbytes(&self) -> u64 {
        self.checkpoint.nbytes()
    }

    /// Loads into the memory that is there (a device's memory that has to be allocated first is the device's time, not the
    /// pipeline's), with these rates of the storage devices on which the files are, and gives the account.
    fn load(&self, rates: &[f64]) -> Report {
        let report = self.load_unchecked(rates);
        self.check();
        report
    }

    /// The same with a device that moves no bytes.
    fn load_unchecked(&self, rates: &[f64]) -> Report {
        self.forget();
        let tensors = self
            .memory
            .iter()
            .zip(self.checkpoint.tensors())
            .map(|(m, t)| Foreign::contiguous(m.address(), t.nbytes()));
        let request = Request {
            checkpoint: self.checkpoint.clone(),
            wants: Want::all(&self.checkpoint),
            layout: None,
            device: Where::Gpu(0),
            memory: Memory::Into { tensors: tensors.collect(), keep: Arc::new(self.memory.clone()), fence: None },
            options: Options { io: Io::Buffered, staging: STAGING, ..Options::default() },
            stream: false,
        };
        let rates = (0..).zip(rates).filter(|r| r.1.is_finite()).map(|(i, r)| (i, *r as u64)).collect();
        let how = Throttling { rates, ..Throttling::default() };
        let storage: Vec<u64> = (0..self.files.len() as u64).collect();
        let load = Load::start_on_volumes(request, &storage, |source, files| {
            Ok(Box::new(Throttle::new(source, files.clone(), how)?))
        });
        let load = load.unwrap();
        assert!(load.wait(None).unwrap());
        load.report()
    }

    /// The memory's bytes are no tensor's any more, and its pages are there.
    fn forget(&self) {
        for (memory, tensor) in self.memory.iter().zip(self.checkpoint.tensors()) {
            // SAFETY: the fake's device memory is host memory, this long, and nothing is copied to it now.
            unsafe { std::ptr::write_bytes(memory.address() as *mut u8, 0xa5, tensor.nbytes() as usize) };
        }
    }

    /// Every byte is the files'.
    fn check(&self) {
        let mut expected = Vec::new();
        let mut files: Vec<File> = self.files.iter().map(|f| File::open(f).unwrap()).collect();
        for (memory, tensor) in self.memory.iter().zip(self.checkpoint.tensors()) {
            expected.resize(tensor.nbytes() as usize, 0);
            let file = &mut files[tensor.file as usize];
            file.seek(SeekFrom::Start(tensor.begin)).unwrap();
            file.read_exact(&mut expected).unwrap();
            // SAFETY: as above; the load is over.
            let got = unsafe { std::slice::from_raw_parts(memory.address() as *const u8, expected.len()) };
            assert!(got == expected, "{}: wrong bytes", tensor.name);
        }
    }
}

/// Whether one of several loads reaches `expected` seconds; each names the right stage and keeps to the staging memory.
fn reaches(what: &str, expected: f64, bottleneck: Option<&str>, mut load: impl FnMut() -> Report) {
    let (mut seen, begun) = (Vec::new(), Instant::now());
    while seen.len() < 3 || begun.elapsed() < TRIED {
        let report = load();
        let share = expected / report.seconds;
        let waits = report.waits;
        let text = format!(
            "{what}: {share:.3} in {:.3} s, bound by {}, {} MiB of staging, {waits:?}",
            report.seconds,
            report.bottleneck,
            report.peak_staging / MIB
        );
        println!("{text}");
        // Faster than the throttle would be a throttle that is none.
        assert!(share < 1.01, "{text}");
        assert!(report.peak_staging <= STAGING, "{text}");
        let named = bottleneck.is_none_or(|b| b == report.bottleneck);
        if share >= SHARE && named {
            return;
        }
        seen.push(text);
    }
    panic!("{}", seen.join("\n"));
}

/// One test, since the driver and its settings are the process's, and so are the two cores.
#[test]
fn the_slower_side_is_busy_all_the_time() {
    let fake = fakegpu::Library::exclusive().unwrap();
    std::env::set_var(LIBRARY_VARIABLE, format!("cuda:{}", std::path::Path::new(fake.path()).display()));
    // Sums of every copy's source, twice, are the largest part of what a copy costs.
    fake.configure("checksum", "0");
    let api = Api::load().unwrap();
    let context = SharedContext::retain(&api, 0).unwrap();
    let device = |rate: f64| {
        fake.configure("h2d_bytes_per_s", &format!("{}", if rate.is_finite() { rate as u64 } else { 0 }));
    };
    let free = f64::INFINITY;

    let bench = Bench::new(&context, &[512]);
    let rates = |source: f64, onto: f64| {
        device(onto * GB);
        (format!("{source} GB/s into {onto} GB/s"), bench.nbytes() as f64 / GB / f64::min(source, onto))
    };
    for (source, onto, bottleneck) in
        [(0.5, 2.0, "source"), (2.0, 0.5, "device"), (0.8, 1.0, "source"), (1.0, 0.8, "device")]
    {
        let (what, expected) = rates(source, onto);
        reaches(&what, expected, Some(bottleneck), || bench.load(&[source * GB]));
    }
    // At 2 GB/s the fake's copies would be a core's work, which those of a real device are not.
    fake.configure("move_bytes", "0");
    for (source, onto, bottleneck) in [(2.0, 4.0, "source"), (free, 2.0, "device")] {
        let (what, expected) = rates(source, onto);
        reaches(&what, expected, Some(bottleneck), || bench.load_unchecked(&[source * GB]));
    }
    fake.configure("move_bytes", "1");
    // Either may be called the slower one.
    device(GB);
    reaches("1 GB/s into 1 GB/s", bench.nbytes() as f64 / GB, None, || bench.load(&[GB]));
    drop(bench);

    // Four volumes, and a device that could take more than all of them give.
    device(2.0 * GB);
    let bench = Bench::new(&context, &[128; 4]);
    let rates = [0.25 * GB; 4];
    let expected = bench.nbytes() as f64 / rates.iter().sum::<f64>();
    reaches("four volumes of 0.25 GB/s", expected, Some("source"), || bench.load(&rates));
    // And one that could not.
    device(0.5 * GB);
    let expected = bench.nbytes() as f64 / (0.5 * GB);
    reaches("four volumes of 0.25 GB/s into 0.5 GB/s", expected, Some("device"), || bench.load(&rates));
    // Files of one size on volumes of different rates: the slowest, which has as much to give as the others, is busy all
    // the time, although extents start in one order.
    device(2.0 * GB);
    let rates = [0.2 * GB, 0.4 * GB, 0.6 * GB, 0.8 * GB];
    let expected = bench.nbytes() as f64 / 4.0 / rates[0];
    reaches("four unlike volumes, files alike", expected, Some("source"), || bench.load(&rates));
    drop(bench);
    // Each with as much as suits its rate: all four are.
    let bench = Bench::new(&context, &[48, 96, 144, 192]);
    let rates = [0.1 * GB, 0.2 * GB, 0.3 * GB, 0.4 * GB];
    let expected = bench.nbytes() as f64 / rates.iter().sum::<f64>();
    reaches("four unlike volumes, files to suit", expected, Some("source"), || bench.load(&rates));
    drop(bench);

    drop(context);
    assert_eq!(fake.misuses(), Vec::<String>::new());
}
