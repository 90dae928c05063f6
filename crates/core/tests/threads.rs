//! A panic on a thread of the core: those who wait for the thread get it as an error, soon. `tests/test_threads.py` compares
//! the names here with the source.
#![cfg(all(target_os = "linux", debug_assertions))]
#![allow(clippy::unwrap_used)]

mod checkpoints;
mod device;
mod web_server;

use penstock::device::api::{Vendor, LIBRARY_VARIABLE};
use penstock::error::{Error, ErrorKind, Result};
use penstock::extent::{Lane, Ticket};
use penstock::format::{DType, FolderRequest};
use penstock::options::{Cache, Io, Options, Order};
use penstock::peers::{ListenAt, Lookout, Pass, Seat};
use penstock::plan::shares::{RankWants, Shares};
use penstock::pull::{Pull, PullFile};
use penstock::save::{Arrangement, At, Save, SavePlan, SaveRequest, Tensor};
use penstock::source::{Destination, Progress, Read};
use penstock::store::{
    evict, identity_of, CacheFill, CacheSettings, CredentialSource, Files, FillState, GivenCredentials,
    GivesCredentials, HubFile, HubLayout, Location, Object, Objects, Secret, StorageSettings, Store, Stores, Web,
    WebSettings,
};
use penstock::threads::{trip, untrip};
use penstock::{Checkpoint, Load, Memory, Request, Want, Where};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use web_server::{Contents, Fault, WebServer};

const SIZE: usize = 3_000_017;
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Tells a hang from work, on a machine that has much else to do.
const SOON: Duration = Duration::from_secs(30);
/// Sooner than the pauses of a request that is tried again, and than every timeout.
const PROMPTLY: Duration = Duration::from_secs(6);

/// One test at a time: a thread is tripped by its name.
static ONE: Mutex<()> = Mutex::new(());

/// The error of work whose thread panics.
fn tripped<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Error {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    trip(name);
    let begun = Instant::now();
    let error = work().err();
    untrip();
    assert!(begun.elapsed() < PROMPTLY, "{name}: after {:?}", begun.elapsed());
    let error = error.unwrap_or_else(|| panic!("{name}: all went well"));
    assert!(error.to_string().contains(name) && error.to_string().contains("on purpose"), "{name}: {error}");
    error
}

fn shard(folder: &Path) -> Arc<Checkpoint> {
    let path = folder.join("model.safetensors");
    checkpoints::write(&path, &[("a", 3_000_000), ("b", 3_000_000)]);
    Arc::new(Checkpoint::open(&[path]).unwrap())
}

fn request(checkpoint: &Arc<Checkpoint>, options: Options) -> Request {
    Request {
        checkpoint: checkpoint.clone(),
        wants: Want::all(checkpoint),
        layout: None,
        device: Where::Cpu,
        memory: Memory::Ours,
        options,
        stream: false,
    }
}

fn load(checkpoint: &Arc<Checkpoint>, options: Options) -> Result<()> {
    Load::start(request(checkpoint, options))?.wait(Some(SOON)).map(drop)
}

#[test]
fn threads_of_a_load() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = shard(folder.path());
    let options = || Options { cache: Cache::Keep, io: Io::Buffered, ..Options::default() };
    for name in ["penstock-engine", "penstock-read"] {
        assert_eq!(tripped(name, || load(&checkpoint, options())).kind(), ErrorKind::Internal, "{name}");
    }
    load(&checkpoint, options()).unwrap();
}

#[test]
fn the_thread_of_copies() {
    let folder = tempfile::tempdir().unwrap();
    let (from, into) = (folder.path().join("from"), folder.path().join("into"));
    let content: Vec<u8> = (0..SIZE).map(|at| (at % 251) as u8).collect();
    std::fs::write(&from, &content).unwrap();
    let copy = || {
        let file = PullFile { from: from.clone().into(), into: Some(into.clone()), known: None };
        Pull::start(vec![file], &Stores::default(), &Options::default())?.wait(SOON).map(drop)
    };
    tripped("penstock-pull", copy);
    assert!(!into.exists());
    copy().unwrap();
    assert_eq!(std::fs::read(&into).unwrap(), content);
}

#[test]
fn the_thread_of_leases() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = shard(folder.path());
    let lease = || {
        let load = Load::start(request(&checkpoint, Options::default()))?;
        load.wait(Some(SOON))?;
        load.lease(u64::MAX)
    };
    // Not while another test has tripped a thread that this load needs
    let untripped = || {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        lease().unwrap()
    };
    if let Err(refused) = untripped() {
        return println!("no leases here: {refused}");
    }
    tripped("penstock-lease", || lease().map(drop));
    untripped().unwrap();
}

#[test]
fn a_thread_that_copies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let json = br#"{"a":{"dtype":"U8","shape":[2000,2000],"data_offsets":[0,4000000]}}"#;
    std::fs::write(&path, checkpoints::shard(json, 4_000_000)).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(std::slice::from_ref(&path)).unwrap());
    if evict(&path, None).unwrap() > 0 {
        return println!("TMPDIR is in memory: rows are read to their places, and nothing copies them");
    }
    let columns = || {
        evict(&path, None)?;
        let request = Request {
            wants: vec![Want::part(0, [0..2000, 0..1000])],
            ..request(&checkpoint, Options { cache: Cache::Keep, io: Io::Buffered, ..Options::default() })
        };
        Load::start(request)?.wait(Some(SOON)).map(drop)
    };
    assert_eq!(tripped("penstock-copy", columns).kind(), ErrorKind::Internal);
    columns().unwrap();
}

#[test]
fn the_thread_that_fills_the_page_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, [1; 100_000]).unwrap();
    let fill = |expected| {
        let fill = CacheFill::of(Files::new([(path.clone(), identity_of(&path)?)])).unwrap();
        assert!(fill.wait(SOON), "it has not ended");
        let status = fill.status();
        match status.state == expected {
            true if expected == FillState::Finished => Ok(()),
            _ => Err(Error::new(ErrorKind::Internal, status.reason)),
        }
    };
    tripped("penstock-fill", || fill(FillState::Stopped));
    fill(FillState::Finished).unwrap();
}

#[test]
fn a_thread_that_opens() {
    let folder = tempfile::tempdir().unwrap();
    // Too long for the caller's own thread.
    let names: Vec<String> = (0..20_000).map(|number| format!("a tensor with a long name, {number}")).collect();
    let tensors: Vec<(&str, u64)> = names.iter().map(|name| (&**name, 1)).collect();
    checkpoints::write(folder.path().join("model.safetensors"), &tensors);
    tripped("penstock-ask", || {
        Checkpoint::open_cancellable(&[folder.path()], &FolderRequest::plain(), &Stores::default(), SOON, || true)
    });
}

#[test]
fn threads_of_a_save() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = vec![1u8; 1 << 20];
    let tensors = [Tensor { name: "w".into(), dtype: DType::U8, shape: vec![bytes.len() as u64] }];
    let plan = SavePlan::new(&tensors, None, "model.safetensors", Arrangement::Aligned, Order::File, None).unwrap();
    tripped("penstock-save", || {
        let (tensors, folder) = (vec![At::Host(bytes.as_ptr() as u64)], Location::Path(folder.path().into()));
        let (keep, options) = (Arc::new(()), Options::default());
        let request = SaveRequest {
            snapshot: false,
            ahead: false,
            plan,
            folder,
            stores: Stores::default(),
            checkpoint: None,
            tensors,
            keep,
            sync: false,
            options,
        };
        Save::start(request)?.wait(Some(SOON)).map(drop)
    });
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "half a file");
}

fn bytes() -> Vec<u8> {
    (0..SIZE).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect()
}

fn serving() -> WebServer {
    let contents = Contents::default();
    contents.lock().unwrap().insert("/o.safetensors".into(), (Arc::new(bytes()), "\"one\"".to_owned()));
    WebServer::of(&contents, |_| Fault::None)
}

fn objects(store: &Web, server: &WebServer) -> Arc<dyn Objects> {
    let at = Location::Url(server.url("/o.safetensors"));
    let head = store.head(&at, 8).unwrap();
    store.objects(vec![Some(Object { location: at, size: head.size, version: head.version })]).unwrap()
}

/// Reads everything, and gives the first error. Every read comes back.
fn read(objects: Arc<dyn Objects>) -> Result<Vec<u8>> {
    const PART: usize = 1_000_000;
    let mut memory = vec![0u8; SIZE];
    let mut source = objects.source(Io::Auto, &Arc::default()).unwrap();
    let parts = SIZE.div_ceil(PART);
    for number in 0..parts {
        let (offset, len) = ((number * PART) as u64, PART.min(SIZE - number * PART) as u64);
        // SAFETY: the part is within the memory, which lives until the source is gone.
        let into = Destination::Memory(unsafe { memory.as_mut_ptr().add(number * PART) });
        let (ticket, lane, keep) = (Ticket(number as u64), Lane::BUFFERED, Arc::new(()));
        source
            .submit(Read { ticket, file: 0, offset, len, need: len, lane, into, fresh: false, written: 0, keep })
            .ok()
            .unwrap();
    }
    source.flush().unwrap();
    let (mut done, mut outcome, until) = (0, Ok(()), Instant::now() + SOON);
    while done < parts {
        assert!(Instant::now() < until, "{done} of {parts} reads came back");
        std::thread::sleep(Duration::from_millis(2));
        let mut events = Vec::new();
        source.poll(&mut events).unwrap();
        for event in events {
            if let Progress::Done(read) = event {
                done += 1;
                outcome = outcome.and(read.result.map(drop));
            }
        }
    }
    assert_eq!(source.in_flight(), 0);
    drop(source);
    outcome.map(|()| memory)
}

#[test]
fn the_thread_of_the_connections_to_a_server() {
    let server = serving();
    let store = Web::new(WebSettings::default());
    let objects = objects(&store, &server);
    tripped("penstock-net", || read(objects.clone()));
    assert!(read(objects).unwrap() == bytes(), "the next load is not disturbed");
}

/// What they do is lost. The loads are not: the server has all of it.
#[test]
fn threads_of_the_disk_cache() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    drop(shard(folder.path()));
    let contents = Contents::default();
    let content = Arc::new(std::fs::read(folder.path().join("model.safetensors")).unwrap());
    contents.lock().unwrap().insert("/o.safetensors".into(), (content, "\"one\"".to_owned()));
    // Slowly, so that one of two loads waits for blocks that the other one brings.
    let server = WebServer::of(&contents, |_| Fault::Drip(256 << 10, Duration::from_millis(2)));
    for name in ["penstock-cache", "penstock-cache-look"] {
        let cache = CacheSettings { folder: Some(folder.path().join(name)), free: Some(0), ..CacheSettings::default() };
        let stores = Stores::with(StorageSettings { cache, ..StorageSettings::default() });
        let (url, asked) = (server.url("/o.safetensors"), FolderRequest::plain());
        let checkpoint = Arc::new(Checkpoint::open_cancellable(&[url], &asked, &stores, SOON, || true).unwrap());
        trip(name);
        let begun = Instant::now();
        let both = std::thread::scope(|scope| {
            [(); 2].map(|()| scope.spawn(|| load(&checkpoint, Options::default()))).map(|one| one.join().unwrap())
        });
        untrip();
        assert!(both.iter().all(Result::is_ok), "{name}: {both:?}");
        assert!(begun.elapsed() < PROMPTLY, "{name}: after {:?}", begun.elapsed());
        load(&checkpoint, Options::default()).unwrap();
    }
}

/// The load and the disk cache are as without it.
#[test]
fn the_thread_that_fills_the_cache_of_the_hub() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    drop(shard(folder.path()));
    let contents = Contents::default();
    let content = Arc::new(std::fs::read(folder.path().join("model.safetensors")).unwrap());
    contents.lock().unwrap().insert("/o.safetensors".into(), (content, "\"one\"".to_owned()));
    let server = WebServer::of(&contents, |_| Fault::None);
    let url = server.url("/o.safetensors");
    let file = HubFile { path: "o.safetensors".to_owned(), digest: "0".repeat(64) };
    let hub = HubLayout {
        cache: folder.path().join("hub"),
        repository: "org/name".to_owned(),
        commit: "0".repeat(40),
        revision: None,
        asked: SystemTime::now(),
        files: [(url.clone(), file)].into(),
        symlinks: true,
    };
    let cache = CacheSettings { folder: Some(folder.path().join("cache")), free: Some(0), ..CacheSettings::default() };
    let cache = CacheSettings { hub: Some(Arc::new(hub)), ..cache };
    let stores = Stores::with(StorageSettings { cache, ..StorageSettings::default() });
    let checkpoint = Checkpoint::open_cancellable(&[url], &FolderRequest::plain(), &stores, SOON, || true).unwrap();
    let checkpoint = Arc::new(checkpoint);
    let reason = || {
        let load = Load::start(request(&checkpoint, Options::default())).unwrap();
        assert!(load.wait(Some(SOON)).unwrap());
        let cache = load.report().disk_cache.unwrap();
        assert!(cache.wait(SOON));
        cache.status().reason
    };
    trip("penstock-hub");
    let said = reason();
    untrip();
    assert!(said.contains("penstock-hub") && said.contains("on purpose"), "{said}");
    // The next one finds that the digest is another one.
    let said = reason();
    assert!(said.contains("their digest is"), "{said}");
}

#[test]
fn a_thread_that_asks_for_addresses() {
    let server = serving();
    let at = Location::Url(server.url("/o.safetensors").replace("127.0.0.1", "localhost"));
    let opened = || {
        let head = Web::new(WebSettings::default()).head(&at, 8).unwrap();
        // Another store knows none of them yet.
        let object = Object { location: at.clone(), size: head.size, version: head.version };
        Web::new(WebSettings::default()).objects(vec![Some(object)]).unwrap()
    };
    let objects = opened();
    tripped("penstock-dns", || read(objects));
    assert!(read(opened()).unwrap() == bytes(), "the next load is not disturbed");
}

/// Gives a token that is valid for a moment, and panics when it is asked again.
struct Gives(AtomicUsize);

impl GivesCredentials for Gives {
    fn give(&self) -> Result<GivenCredentials> {
        assert!(self.0.fetch_add(1, Ordering::Relaxed) == 0, "penstock-keys panics on purpose");
        let expires = Some(SystemTime::now() + Duration::from_millis(1500));
        Ok(GivenCredentials { token: Some(Secret::new("token")), expires, ..GivenCredentials::default() })
    }

    fn number(&self) -> usize {
        77
    }
}

#[test]
fn the_thread_that_renews_credentials() {
    let server = serving();
    let credentials = Some(CredentialSource(Arc::new(Gives(AtomicUsize::new(0)))));
    let store = Web::new(WebSettings { credentials, ..WebSettings::default() });
    let objects = objects(&store, &server);
    std::thread::sleep(Duration::from_millis(1700));
    tripped("penstock-keys", || read(objects));
}

fn pass(rank: u32) -> Pass {
    Pass { rank, token: [rank as u8; 16], key: None }
}

fn seat(rank: u32) -> Result<Seat> {
    Seat::new(ListenAt::anywhere(HERE), pass(rank))
}

#[test]
fn threads_that_tell_ranks_who_is_there() {
    let silence = Duration::from_secs(20);
    tripped("penstock-pulse", || {
        let (first, other) = (seat(0)?, seat(1)?);
        let addresses = [Some(first.address()?), Some(other.address()?)];
        first.join(&addresses, [7; 16], SOON, || true)
    });
    tripped("penstock-lookout", || {
        let mut here = Lookout::new(ListenAt::anywhere(HERE), pass(0))?;
        let there = Lookout::new(ListenAt::anywhere(HERE), pass(1))?;
        here.watch(&[(here.address(), [0; 16]), (there.address(), [1; 16])], silence)?;
        let until = Instant::now() + SOON;
        while Instant::now() < until {
            here.lost().map_or(Ok(()), Err)?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    });
}

/// Two ranks that want everything, and what becomes of each.
fn together(checkpoint: &Arc<Checkpoint>) -> Vec<Result<()>> {
    let lists = [Want::all(checkpoint), Want::all(checkpoint)];
    let shares = Arc::new(Shares::new(checkpoint, RankWants { lists: &lists, of_rank: &[0, 1] }).unwrap());
    let seats = [seat(0).unwrap(), seat(1).unwrap()];
    let addresses: Vec<_> = seats.iter().map(|seat| Some(seat.address().unwrap())).collect();
    std::thread::scope(|scope| {
        let ranks = seats.into_iter().map(|seat| {
            let (shares, addresses) = (shares.clone(), &addresses);
            scope.spawn(move || {
                let mesh = seat.join(addresses, [7; 16], SOON, || true)?;
                let request = request(checkpoint, Options::default());
                Load::start_in_group(request, (shares, mesh), || true)?.wait(Some(SOON)).map(drop)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn the_thread_of_the_connections_to_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = shard(folder.path());
    tripped("penstock-peers", || together(&checkpoint).into_iter().find(Result::is_err).unwrap_or(Ok(())));
    together(&checkpoint).into_iter().for_each(Result::unwrap);
}

#[test]
fn threads_of_a_gpu() {
    // Slabs that the driver may be reading are lost to the process.
    device::alone("threads_of_a_gpu", || {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = shard(folder.path());
        let gpu = device::Gpu::new(Vendor::Cuda);
        std::env::set_var(LIBRARY_VARIABLE, gpu.fake.path());
        let load = || {
            let request = Request { device: Where::Gpu(0), ..request(&checkpoint, Options::default()) };
            let load = Load::start_on(request, Some(Box::new(gpu.gpu())))?;
            load.wait(Some(SOON))?;
            Ok(load.report())
        };
        // The load goes on with memory that is not pinned, and says so.
        let pinned = tripped("penstock-gpupin", || {
            let reason = load()?.fallbacks.into_iter().map(|fallback| fallback.reason).collect::<Vec<_>>().join("; ");
            Err::<(), _>(Error::new(ErrorKind::Internal, reason))
        });
        assert_eq!(pinned.kind(), ErrorKind::Internal);
        for name in ["penstock-gpu", "penstock-gpuwait"] {
            assert_eq!(tripped(name, load).kind(), ErrorKind::Internal, "{name}");
        }
        load().unwrap();
    });
}
