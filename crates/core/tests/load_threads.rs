//! Which threads a load starts. If it only has to map resident pages, it starts none, except the thread that asks the
//! file system.
//!
//! A thread may live for less time than it takes to look for it. So this program hears of each thread when the thread
//! sets its name.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "checkpoints/mod.rs"]
mod checkpoints;

use penstock::error::ErrorKind;
use penstock::extent::Lane;
use penstock::format::Checkpoint;
use penstock::load::{Load, Next};
use penstock::options::Options;
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::want::Want;
use penstock::store::{evict, Files};
use std::ffi::{c_char, c_int, CStr};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const MIB: u64 = 1 << 20;
const TENSORS: usize = 5;
const NBYTES: u64 = 3 * MIB + 7;

/// Names of the threads that penstock has started.
static STARTED: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the place of the C library's in this program; a new thread calls it with its name before it does anything else.
///
/// # Safety
/// As of the C library's: `name` is a C string.
#[no_mangle]
pub unsafe extern "C" fn pthread_setname_np(_thread: libc::pthread_t, name: *const c_char) -> c_int {
    // SAFETY: the caller's promise; the standard library names the calling thread only.
    let name = unsafe {
        libc::prctl(libc::PR_SET_NAME, name);
        CStr::from_ptr(name)
    };
    let name = name.to_string_lossy();
    if name.starts_with("penstock-") {
        unpoisoned(&STARTED).push(name.into_owned());
    }
    0
}

/// One test at a time: the names are those of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    unpoisoned(&ALONE)
}

/// Those of the file, made once: unoptimised that takes half a second.
fn bytes() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let names: Vec<String> = (0..TENSORS).map(|i| format!("layers.{i}.weight")).collect();
        let (json, data) = checkpoints::header(&names.iter().map(|n| (n.as_str(), NBYTES)).collect::<Vec<_>>());
        checkpoints::shard(json.as_bytes(), data)
    })
}

struct Sample {
    path: PathBuf,
    checkpoint: Arc<Checkpoint>,
    _folder: tempfile::TempDir,
}

impl Sample {
    /// A file that was written just now, and so is in the page cache.
    fn within(folder: impl AsRef<Path>) -> Sample {
        let folder = tempfile::tempdir_in(folder).unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, bytes()).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(std::slice::from_ref(&path)).unwrap());
        Sample { path, checkpoint, _folder: folder }
    }

    /// Next to the build: that is a disk where /tmp may be a tmpfs.
    fn on_disk() -> Sample {
        Self::within(env!("CARGO_TARGET_TMPDIR"))
    }

    fn request(&self, stream: bool) -> Request {
        Request {
            checkpoint: self.checkpoint.clone(),
            wants: Want::all(&self.checkpoint),
            layout: None,
            device: Where::Cpu,
            memory: Memory::Ours,
            options: Options { extent: MIB, ..Options::default() },
            stream,
        }
    }

    fn resident(&self) -> u64 {
        Files::from_paths(&[&self.path]).unwrap().resident_ranges(0).unwrap().bytes()
    }

    fn shrink(&self, to: u64) {
        fs::File::options().write(true).open(&self.path).unwrap().set_len(to).unwrap();
    }

    fn check(&self, load: &Load) {
        let bytes = bytes();
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

/// What `body` gives, and the names of the threads that it started.
fn started<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    unpoisoned(&STARTED).clear();
    let result = body();
    (result, std::mem::take(&mut unpoisoned(&STARTED)))
}

/// Of a load that runs on its caller's thread, where the file system may hang for all that is known.
const ASKING: [&str; 1] = ["penstock-ask"];

/// Asks about the disk that the build is on, which this process may not have done yet.
fn get_to_know_the_disk() {
    Load::start(Sample::on_disk().request(false)).unwrap();
}

#[test]
fn a_warm_load_that_only_maps_runs_on_its_callers_thread() {
    let _alone = alone();
    get_to_know_the_disk();
    // Device numbers of memory file systems are those of another one some day.
    for (sample, named) in [(Sample::on_disk(), &[][..]), (Sample::within("/dev/shm"), &ASKING)] {
        let (load, threads) = started(|| Load::start(sample.request(false)).unwrap());
        assert_eq!(threads, named);
        assert!(load.is_done(), "it was to be done before `start` returned");
        assert!(load.wait(None).unwrap());
        sample.check(&load);
        let report = load.report();
        let mapped = report.routes.of(Lane::MAPPED);
        assert!(mapped.extents > 0 && mapped == report.routes.sum(), "{report:?}");
        assert_eq!(report.first_touch_bytes, mapped.bytes, "{report:?}");
    }
}

#[test]
fn other_loads_have_threads_of_their_own() {
    let _alone = alone();
    let to_the_end = |request: Request| {
        let (load, threads) = started(|| {
            let load = Load::start(request).unwrap();
            while let Next::Ready(want) = load.next(None).unwrap() {
                load.take(want).unwrap();
            }
            load
        });
        assert!(["penstock-engine", "penstock-read"].iter().all(|n| threads.iter().any(|t| t == n)), "{threads:?}");
        load
    };
    let sample = Sample::on_disk();
    for stream in [false, true] {
        let mut private = sample.request(stream);
        private.options.copy = Some(true);
        sample.check(&to_the_end(private));
    }

    evict(&sample.path, None).unwrap();
    if sample.resident() > 0 {
        eprintln!("skipped: the page cache keeps the file");
        return;
    }
    let cold = to_the_end(sample.request(false));
    assert!(cold.report().routes.of(Lane::MAPPED).extents > 0, "{:?}", cold.report());
    sample.check(&cold);
}

#[test]
fn a_stream_that_only_maps_runs_on_its_callers_thread_too() {
    let _alone = alone();
    get_to_know_the_disk();
    let sample = Sample::on_disk();
    let mut request = sample.request(true);
    // Whatever its size: a mapping takes no memory before it is touched.
    request.options.window = 1;
    let (load, threads) = started(|| Load::start(request).unwrap());
    assert_eq!(threads, [""; 0]);
    assert!(load.is_done(), "it was to be done before `start` returned");
    let mut taken = 0;
    while let Next::Ready(want) = load.next(None).unwrap() {
        load.take(want).unwrap();
        taken += 1;
    }
    assert_eq!(taken, load.wants().len());
    sample.check(&load);

    // The file is checked for each tensor, so that no mapping of lost bytes is handed out.
    let load = Load::start(sample.request(true)).unwrap();
    assert_eq!(load.next(None).unwrap(), Next::Ready(0));
    sample.shrink(6 * MIB);
    for _ in 0..2 {
        let error = load.next(None).map(|_| ()).unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::Changed, Some(&*sample.path)), "{error}");
    }
}

/// Here SIGBUS would kill the caller.
#[test]
fn a_file_that_shrinks_under_a_load_on_its_callers_thread_is_an_error() {
    let _alone = alone();
    get_to_know_the_disk();
    for (folder, named) in [(env!("CARGO_TARGET_TMPDIR"), &[][..]), ("/dev/shm", &ASKING)] {
        let sample = Sample::within(folder);
        sample.shrink(6 * MIB);
        let error = Load::start(sample.request(false)).map(|_| ()).unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::Changed, Some(&*sample.path)), "{error}");

        for size in [0, 100, 5 * MIB + 1, 15 * MIB] {
            let sample = Sample::within(folder);
            // When everything has been looked at and mapped, and nothing populated.
            let (load, threads) = started(|| {
                Load::start_through(sample.request(false), |source, _| {
                    sample.shrink(size);
                    Ok(source)
                })
                .unwrap()
            });
            assert_eq!(threads, named);
            assert!(load.is_done());
            let error = load.wait(None).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Changed | ErrorKind::Truncated), "{size}: {error}");
            assert_eq!(error.path(), Some(&*sample.path), "{error}");
        }
    }
}
