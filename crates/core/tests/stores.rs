//! Whole loads from a store that this crate knows nothing of: `toy_store`, registered for a scheme.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

mod toy_device;
mod toy_lanes;
mod toy_store;
mod toy_wrapper;

use penstock::device::Fence;
use penstock::error::ErrorKind;
use penstock::extent::{ByLane, Lane, TakesSlab};
use penstock::format::{contents, names_in};
use penstock::options::{Cache, Io, Options};
use penstock::store::{facts_at, local, register, Location, Store, Stores};
use penstock::{Checkpoint, Load, Memory, Next, Request, Want, Where};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use toy_device::{pointer, ToyDevice};
use toy_lanes::{Adds, Seen, Wrapped, COPY, LANDS};
use toy_store::{Contents, Fault, Server, Toy, TOY};
use toy_wrapper::Counted;

const KIB: u64 = 1 << 10;

/// A shard file of these U8 tensors, whose bytes follow from their place.
fn shard(tensors: &[(&str, u64)], padding: usize) -> Vec<u8> {
    let (mut json, mut at) = (String::from("{"), 0);
    for (name, size) in tensors {
        let comma = if json.len() > 1 { "," } else { "" };
        let past = at + size;
        write!(json, r#"{comma}"{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{at},{past}]}}"#).unwrap();
        at = past;
    }
    json.push('}');
    json.push_str(&" ".repeat(padding));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    let start = bytes.len() as u64;
    bytes.extend((start..start + at).map(|i| (i ^ i >> 8 ^ i >> 16) as u8));
    bytes
}

/// A checkpoint of two shards and an index, in a store of its own, and the same files in a folder.
struct Model {
    scheme: String,
    contents: Contents,
    server: Arc<Server>,
    folder: tempfile::TempDir,
}

impl Model {
    fn new(change: impl FnOnce(&mut Server)) -> Model {
        Model::of(change, |toy, _| toy)
    }

    /// The same with a lane more.
    fn wrapped(adds: impl FnOnce(PathBuf) -> Adds) -> (Model, Arc<Mutex<Seen>>) {
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let theirs = seen.clone();
        let wrap = |inner, folder| Arc::new(Wrapped { inner, adds: adds(folder), seen: theirs }) as Arc<dyn Store>;
        // A copy takes slabs as the lane does that replaces it.
        (Model::of(|server| server.staging = TakesSlab::AtRequest, wrap), seen)
    }

    fn of(change: impl FnOnce(&mut Server), wrap: impl FnOnce(Arc<dyn Store>, PathBuf) -> Arc<dyn Store>) -> Model {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let scheme = format!("toy{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let names: Vec<String> = (0..9).map(|i| format!("a.{i}")).collect();
        let first: Vec<(&str, u64)> = names.iter().zip(1..).map(|(n, i)| (n.as_str(), i * 37 * KIB + i)).collect();
        let second = [("b", 3000 * KIB + 5), ("none", 0), ("c", 7)];
        let mut index = String::from(r#"{"metadata":{},"weight_map":{"#);
        for (number, (name, _)) in first.iter().chain(&second).enumerate() {
            let file = if number < first.len() { "model-1.safetensors" } else { "model-2.safetensors" };
            write!(index, r#"{}"{name}":"{file}""#, if number > 0 { "," } else { "" }).unwrap();
        }
        index.push_str("}}");
        let folder = tempfile::tempdir().unwrap();
        let contents: Contents = Arc::new(Mutex::default());
        for (name, bytes) in [
            ("model-1.safetensors", shard(&first, 3)),
            ("model-2.safetensors", shard(&second, 70_000)),
            ("model.safetensors.index.json", index.into_bytes()),
            ("README.md", b"# A model".to_vec()),
        ] {
            std::fs::write(folder.path().join(name), &bytes).unwrap();
            let address = format!("{scheme}://bucket/model/{name}");
            contents.lock().unwrap().insert(address, (Arc::new(bytes), "one".into()));
        }
        let mut server = Server::of(&contents);
        change(&mut server);
        let server = Arc::new(server);
        register(&scheme, wrap(Arc::new(Toy(server.clone())), folder.path().to_owned())).unwrap();
        Model { scheme, contents, server, folder }
    }

    fn address(&self, name: &str) -> String {
        format!("{}://bucket/model{name}", self.scheme)
    }

    fn open(&self) -> Arc<Checkpoint> {
        Arc::new(Checkpoint::open(&[self.address("")]).unwrap())
    }

    fn request(&self, wants: Vec<Want>, stream: bool) -> Request {
        Request {
            checkpoint: self.open(),
            wants,
            device: Where::Cpu,
            memory: Memory::Ours,
            layout: None,
            options: Options {
                extent: 128 * KIB,
                staging: 512 * KIB,
                stall_timeout: Duration::from_secs(20),
                ..Options::default()
            },
            stream,
        }
    }

    /// The bytes of a tensor, from the files.
    fn expected(&self, checkpoint: &Checkpoint, want: &Want) -> Vec<u8> {
        let info = checkpoint.tensor(want.tensor);
        let name = checkpoint.files()[info.file as usize].spelled.as_path().file_name().unwrap().to_owned();
        let bytes = std::fs::read(self.folder.path().join(name)).unwrap();
        let all = &bytes[info.begin as usize..info.end as usize];
        match &want.region {
            None => all.to_vec(),
            Some(region) => all[region[0].start as usize..region[0].end as usize].to_vec(),
        }
    }

    fn check(&self, load: &Load) {
        for (number, want) in (0..).zip(load.wants()) {
            let view = load.view(number).unwrap();
            // SAFETY: complete bytes of CPU memory, which the view keeps.
            let found = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
            assert!(found == self.expected(load.checkpoint(), want), "want {number}: {want:?}");
        }
    }
}

#[test]
fn a_checkpoint_of_a_registered_store_opens_and_loads_like_one_of_files() {
    for staging in [TakesSlab::AtArrival, TakesSlab::AtRequest] {
        let model = Model::new(|server| server.staging = staging);
        let checkpoint = model.open();
        let local = Arc::new(Checkpoint::open(&[model.folder.path()]).unwrap());
        let names = |c: &Checkpoint| c.tensors().map(|t| (t.name.to_owned(), t.begin, t.end)).collect::<Vec<_>>();
        assert_eq!(names(&checkpoint), names(&local));
        assert_eq!(checkpoint.files()[0].spelled.as_path().to_str(), Some(&*model.address("/model-1.safetensors")));
        assert!(checkpoint.warnings().is_empty());

        let load = Load::start(model.request(Want::all(&checkpoint), false)).unwrap();
        load.wait(None).unwrap();
        model.check(&load);
        let report = load.report();
        assert!(report.fallbacks.is_empty(), "{:?}", report.fallbacks);
        assert_eq!(model.server.served.load(Ordering::Relaxed), report.nbytes + report.unwanted.gap);
        assert!(report.peak_staging <= 512 * KIB);
        // Its lane is in the report by its name, after those that this crate knows.
        let lanes = |routes: &ByLane| routes.iter().filter(|(_, one)| one.bytes > 0).collect::<Vec<_>>();
        let [(lane, totals)] = lanes(&report.routes)[..] else { panic!("{:?}", report.routes) };
        assert_eq!(
            (lane.name, totals.bytes, report.rerouted_extents),
            (TOY.name, report.nbytes + report.unwanted.gap, 0)
        );

        // One layout, wherever the bytes are and whatever becomes of the page cache.
        for cache in [Cache::Auto, Cache::Keep, Cache::Bypass] {
            let options = Options { cache, ..model.request(Vec::new(), false).options };
            let request = Request { checkpoint: local.clone(), options, ..model.request(Want::all(&local), false) };
            let beside = Load::start(request).unwrap();
            assert_eq!(beside.layout(), load.layout(), "{cache:?}");
            beside.wait(None).unwrap();
        }
    }
}

#[test]
fn slices_and_streams_fetch_what_they_want_and_no_more() {
    let model = Model::new(|_| ());
    let checkpoint = model.open();
    let b = checkpoint.find("b").unwrap().index;
    let wants = vec![Want::part(b, [100..200_000]), Want::whole(0), Want::part(b, [2_000_000..2_000_100])];
    let nbytes = 199_900 + 100 + checkpoint.tensor(0).nbytes();
    let load = Load::start(model.request(wants.clone(), true)).unwrap();
    let mut seen = Vec::new();
    loop {
        match load.next(Some(Duration::from_secs(30))).unwrap() {
            Next::Ready(want) => {
                let view = load.view(want).unwrap();
                // SAFETY: complete bytes of CPU memory, which the view keeps.
                let found = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
                assert!(found == model.expected(&checkpoint, &wants[want as usize]));
                load.take(want).unwrap();
                seen.push(want);
            }
            Next::End => break,
            other => panic!("{other:?}"),
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2]);
    assert_eq!(model.server.served.load(Ordering::Relaxed), nbytes + load.report().unwanted.gap);
}

#[test]
fn a_store_declares_how_long_its_reads_are_and_which_gaps_they_bridge() {
    let reads_of = |declared: Option<u64>, wants: &dyn Fn(u32) -> Vec<Want>| {
        let model = Model::new(|server| (server.extent, server.gap) = (declared, declared.map(|_| 1 << 40)));
        let checkpoint = model.open();
        let mut request = model.request(wants(checkpoint.find("b").unwrap().index), false);
        (request.options.extent, request.options.staging) = (1024 * KIB, 4096 * KIB);
        let load = Load::start(request).unwrap();
        load.wait(None).unwrap();
        model.check(&load);
        (model.server.reads.load(Ordering::Relaxed), load.report().unwanted.gap)
    };
    // 40 KiB apart: more than the gap of the options, less than that of the store.
    let apart = |b| vec![Want::part(b, [0..100 * KIB]), Want::part(b, [140 * KIB..200 * KIB])];
    assert_eq!(reads_of(Some(256 * KIB), &apart), (1, 40 * KIB));
    assert_eq!(reads_of(None, &apart), (2, 0));
    // A gap is never longer than a read.
    let far = |b| vec![Want::part(b, [0..100 * KIB]), Want::part(b, [500 * KIB..600 * KIB])];
    assert_eq!(reads_of(Some(256 * KIB), &far), (2, 0));
    // 3,000 KiB and five bytes, cut at pages.
    let whole = |b| vec![Want::whole(b)];
    assert!((12..=13).contains(&reads_of(Some(256 * KIB), &whole).0));
    assert!((3..=4).contains(&reads_of(None, &whole).0));
    // The options are the most, and 256 KiB the least.
    assert!((3..=4).contains(&reads_of(Some(64 * 1024 * KIB), &whole).0));
    assert!((12..=13).contains(&reads_of(Some(1), &whole).0));
}

#[test]
fn a_store_whose_reads_are_pinned_is_not_asked_afterwards() {
    for pins_reads in [false, true] {
        let model = Model::new(|server| server.pins_reads = pins_reads);
        let request = model.request(Want::all(&model.open()), false);
        let load = Load::start(request).unwrap();
        load.wait(None).unwrap();
        model.check(&load);
        assert_eq!(model.server.verified.load(Ordering::Relaxed) == 0, pins_reads);
    }
    // Its reads notice what the question would have.
    let model = Model::new(|server| server.pins_reads = true);
    let request = model.request(Want::all(&model.open()), false);
    let name = model.address("/model-1.safetensors");
    model.contents.lock().unwrap().get_mut(&name).unwrap().1 = "two".into();
    let e = Load::start(request).and_then(|load| load.wait(None)).unwrap_err();
    assert_eq!((e.kind(), e.path().and_then(|p| p.to_str())), (ErrorKind::Changed, Some(&*name)), "{e}");
}

#[test]
fn an_object_that_changes_is_an_error_and_no_mixture() {
    let model = Model::new(|_| ());
    let request = model.request(Want::all(&model.open()), false);
    let name = model.address("/model-2.safetensors");
    model.contents.lock().unwrap().get_mut(&name).unwrap().1 = "two".into();
    let e = Load::start(request).and_then(|load| load.wait(None)).unwrap_err();
    assert_eq!((e.kind(), e.path().and_then(|p| p.to_str())), (ErrorKind::Changed, Some(&*name)), "{e}");
}

#[test]
fn faults_of_the_store_are_typed_errors_with_address_and_range() {
    for (fault, kind) in
        [(Fault::Fail(5), ErrorKind::Io), (Fault::Short(5), ErrorKind::Truncated), (Fault::Hang(5), ErrorKind::Timeout)]
    {
        for staging in [TakesSlab::AtArrival, TakesSlab::AtRequest] {
            let model = Model::new(|server| (server.fault, server.staging) = (fault, staging));
            let mut request = model.request(Want::all(&model.open()), false);
            // Only what hangs waits for it. On a busy machine other threads may be put aside for most of a second.
            request.options.stall_timeout = Duration::from_secs(if kind == ErrorKind::Timeout { 3 } else { 30 });
            let begun = Instant::now();
            let e = Load::start(request).and_then(|load| load.wait(None)).unwrap_err();
            assert_eq!(e.kind(), kind, "{e}");
            assert!(e.path().unwrap().to_str().unwrap().starts_with(&model.address("/")), "{e}");
            assert!(e.byte_range().is_some(), "{e}");
            assert!(begun.elapsed() < Duration::from_secs(25), "{fault:?}: {:?}", begun.elapsed());
        }
    }
}

#[test]
fn a_body_that_comes_slowly_is_a_stall_only_if_no_byte_is_told_of() {
    let load = |told| {
        let model = Model::new(|server| server.body_takes = Some((Duration::from_secs(6), told)));
        let checkpoint = model.open();
        let one = Want::whole(checkpoint.find("a.0").unwrap().index);
        let mut request = model.request(vec![one], false);
        request.options.stall_timeout = Duration::from_secs(3);
        let load = Load::start(request).unwrap();
        load.wait(None).map(|_| model.check(&load)).map_err(|e| e.kind())
    };
    let both = std::thread::scope(|s| [true, false].map(|told| s.spawn(move || load(told))).map(|s| s.join().unwrap()));
    assert_eq!(both, [Ok(()), Err(ErrorKind::Timeout)]);
}

#[test]
fn a_store_that_does_not_answer_a_question_ends_the_load() {
    let model = Model::new(|server| server.verify_takes = Duration::from_secs(60));
    let mut request = model.request(Want::all(&model.open()), false);
    request.options.stall_timeout = Duration::from_millis(300);
    let begun = Instant::now();
    let e = Load::start(request).and_then(|load| load.wait(None)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
    assert!(e.path().unwrap().to_str().unwrap().starts_with(&model.address("/")), "{e}");
}

#[test]
fn what_lies_deeper_than_an_address_is_another_checkpoint() {
    let model = Model::new(|_| ());
    let scheme = format!("{}deep", model.scheme);
    let mut all = std::collections::BTreeMap::new();
    for (name, object) in model.contents.lock().unwrap().iter() {
        let name = name.replacen(&model.scheme, &scheme, 1);
        // The same names in a folder that comes first, with other bytes.
        all.insert(name.replace("/model/", "/model/1bit/"), (Arc::new(b"nothing".to_vec()), "one".to_owned()));
        all.insert(name, object.clone());
    }
    register(&scheme, Arc::new(Toy(Arc::new(Server::of(&Arc::new(Mutex::new(all))))))).unwrap();
    for address in ["bucket/model", "bucket/model/"] {
        let checkpoint = Checkpoint::open(&[format!("{scheme}://{address}")]).unwrap();
        assert!(checkpoint.find("a.3").is_some());
    }
    let e = Checkpoint::open(&[format!("{scheme}://bucket")]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
    assert!(e.to_string().contains(&format!("the store lists {scheme}://bucket/model/")), "{e}");
}

#[test]
fn schemes_are_schemes_in_small_or_capital_letters() {
    let model = Model::new(|_| ());
    let store = || Arc::new(Toy(model.server.clone()));
    for wrong in ["my_store", "", "1toy", "a/b"] {
        let e = register(wrong, store()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid, "{wrong:?}: {e}");
    }
    assert_eq!(register(&model.scheme.to_uppercase(), store()).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(penstock::store::schemes().contains(&model.scheme));
}

#[test]
fn what_is_not_there_is_refused_and_every_form_of_an_address_opens() {
    let model = Model::new(|_| ());
    let kind = |sources: &[String]| Checkpoint::open(sources).map(drop).unwrap_err().kind();
    assert_eq!(kind(&[model.address("/nothing")]), ErrorKind::NotFound);
    assert_eq!(kind(&[model.address("/README.md")]), ErrorKind::Header);
    let twice = [model.address("/model-1.safetensors"), model.address("/model-1.safetensors")];
    assert_eq!(kind(&twice), ErrorKind::Invalid);
    let index = [model.address("/model-1.safetensors"), model.address("/model.safetensors.index.json")];
    assert_eq!(kind(&index), ErrorKind::Invalid);
    // Shards that an index names and the store has not: all of them in one error.
    let lacks = Model::new(|_| ());
    lacks.contents.lock().unwrap().retain(|name, _| !name.contains("/model-"));
    let e = Checkpoint::open(&[lacks.address("")]).unwrap_err();
    let named = ["model-1.safetensors", "model-2.safetensors"].map(|name| e.to_string().contains(name));
    assert_eq!((e.kind(), named), (ErrorKind::NotFound, [true, true]), "{e}");
    // A scheme without a store is a path, and not there.
    assert_eq!(kind(&["nostore://a/b".into()]), ErrorKind::NotFound);
    // One object, several, and an index by its name.
    for sources in [
        vec![model.address("/model-1.safetensors")],
        vec![model.address("/model-2.safetensors"), model.address("/model-1.safetensors")],
        vec![model.address("/model.safetensors.index.json")],
    ] {
        let found = Checkpoint::open(&sources).unwrap();
        assert!(found.find("a.3").is_some(), "{sources:?}");
    }
    // An open can be given up, and a store that hangs ends it.
    let slow = Model::new(|server| server.latency = Duration::from_secs(60));
    let sources = || [slow.address("")];
    let begun = Instant::now();
    let e = Checkpoint::open_cancellable(
        &sources(),
        &penstock::format::FolderRequest::plain(),
        &Stores::default(),
        Duration::from_millis(200),
        || true,
    )
    .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
    let e = Checkpoint::open_cancellable(
        &sources(),
        &penstock::format::FolderRequest::plain(),
        &Stores::default(),
        Duration::from_secs(60),
        || false,
    )
    .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}");
    assert!(begun.elapsed() < Duration::from_secs(40));
    assert_eq!(register(&slow.scheme, Arc::new(Toy(slow.server.clone()))).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn small_files_of_a_registered_store_are_read_whole() {
    let model = Model::new(|_| {});
    let (stores, stall) = (Stores::default(), Duration::from_secs(20));
    let names = names_in(model.address("").as_ref(), &stores, false, stall, || true).unwrap();
    assert_eq!(names, ["README.md", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]);
    let files = [model.address("/README.md"), model.address("/model.safetensors.index.json")];
    let found = contents(&files, 64 * KIB, &stores, stall, || true).unwrap();
    let expected =
        ["README.md", "model.safetensors.index.json"].map(|name| std::fs::read(model.folder.path().join(name)));
    assert_eq!(found, expected.map(Result::unwrap));
    let error = contents(&files, 9, &stores, stall, || true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.path(), Some(std::path::Path::new(&files[1])));
    let error = names_in(files[0].as_ref(), &stores, false, stall, || true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn from_a_store_to_a_device_that_both_are_one_file() {
    let model = Model::new(|_| ());
    let checkpoint = model.open();
    let request =
        Request { device: Where::Gpu(0), memory: Memory::Granted, ..model.request(Want::all(&checkpoint), false) };
    let load = Load::start_on(request, Some(Box::new(ToyDevice::new().unwrap()))).unwrap();
    let mut blocks: Vec<Option<Arc<Vec<u8>>>> = vec![None; load.layout().blocks.len()];
    while load.wait_or_grant(Some(Duration::from_secs(30))).unwrap() == Next::Grant {
        for number in load.wanted_blocks().unwrap() {
            let memory = Arc::new(vec![0u8; load.layout().blocks[number as usize].nbytes as usize + 1]);
            load.grant(number, pointer(memory.as_ptr() as u64), memory.clone(), None).unwrap();
            blocks[number as usize] = Some(memory);
        }
    }
    for (number, want) in (0..).zip(load.wants()) {
        let view = load.view(number).unwrap();
        // SAFETY: complete bytes of memory that `blocks` keeps; the device has written them.
        let found = unsafe { std::slice::from_raw_parts(pointer(view.address()) as *const u8, view.nbytes() as usize) };
        assert!(view.nbytes() == 0 || found == model.expected(&checkpoint, want), "want {number}");
    }
    assert_eq!(load.report().nbytes, model.server.served.load(Ordering::Relaxed) - load.report().unwanted.gap);
}

/// Bytes that a load brought by a lane.
fn bytes_by(load: &Load, lane: Lane) -> u64 {
    load.report().routes.of(lane).bytes
}

#[test]
fn half_of_each_file_comes_from_a_copy_and_half_from_its_server() {
    const STRETCH: u64 = 192 * KIB;
    let (model, seen) = Model::wrapped(|folder| Adds::Copies(folder, STRETCH));
    let checkpoint = model.open();
    let wants = Want::all(&checkpoint);
    for stream in [false, true] {
        let before = (model.server.served.load(Ordering::Relaxed), seen.lock().unwrap().bytes);
        let load = Load::start(model.request(wants.clone(), stream)).unwrap();
        load.wait(None).unwrap();
        model.check(&load);
        let served = model.server.served.load(Ordering::Relaxed) - before.0;
        let copied = seen.lock().unwrap().bytes - before.1;
        assert_eq!((bytes_by(&load, TOY), bytes_by(&load, COPY)), (served, copied), "each lane by its name");
        let report = load.report();
        assert_eq!(served + copied, report.nbytes + report.unwanted.gap, "no byte comes twice");
        assert_eq!((report.rerouted_extents, report.fallbacks.len(), report.resident_bytes), (0, 0, 0));
        let all: u64 = checkpoint.files().iter().map(|file| file.size).sum();
        let copies: u64 = checkpoint
            .files()
            .iter()
            .map(|file| {
                let stretches = (0..file.size.div_ceil(STRETCH)).step_by(2);
                stretches.map(|number| file.size.min((number + 1) * STRETCH) - number * STRETCH).sum::<u64>()
            })
            .sum();
        assert!(copies > all / 3 && copied > copies - 80 * KIB && copied <= copies, "{copied} of {copies} of {all}");
    }

    // Copies that are gone: the server brings all, and the report says so.
    for name in ["model-1.safetensors", "model-2.safetensors"] {
        std::fs::rename(model.folder.path().join(name), model.folder.path().join(format!("gone-{name}"))).unwrap();
    }
    let load = Load::start(model.request(wants, false)).unwrap();
    load.wait(None).unwrap();
    for name in ["model-1.safetensors", "model-2.safetensors"] {
        std::fs::rename(model.folder.path().join(format!("gone-{name}")), model.folder.path().join(name)).unwrap();
    }
    model.check(&load);
    let report = load.report();
    assert_eq!((bytes_by(&load, COPY), bytes_by(&load, TOY)), (0, report.nbytes + report.unwanted.gap));
    assert!(report.rerouted_extents > 4, "{}", report.rerouted_extents);
    let told: Vec<_> = report.fallbacks.iter().map(|f| (f.from, f.to, f.reason.contains("model-"))).collect();
    assert_eq!(told, [("toy copy", "toy", true); 2], "once for each file: {:?}", report.fallbacks);
}

#[test]
fn a_lane_lands_on_the_device_after_the_fences_of_its_memory() {
    let (model, seen) = Model::wrapped(|_| Adds::Landing);
    let checkpoint = model.open();
    let small = checkpoint.find("c").unwrap().index;
    let run = |wants: Vec<Want>| {
        let request = Request { device: Where::Gpu(0), memory: Memory::Granted, ..model.request(wants, false) };
        let load = Load::start_on(request, Some(Box::new(ToyDevice::new().unwrap()))).unwrap();
        let mut blocks = Vec::new();
        let mut granted = Vec::new();
        while load.wait_or_grant(Some(Duration::from_secs(30))).unwrap() == Next::Grant {
            for number in load.wanted_blocks().unwrap() {
                let memory = Arc::new(vec![0u8; load.layout().blocks[number as usize].nbytes as usize + 1]);
                let fence = Fence(100 + u64::from(number));
                load.grant(number, pointer(memory.as_ptr() as u64), memory.clone(), Some(fence)).unwrap();
                granted.push(fence);
                blocks.push(memory);
            }
        }
        for (number, want) in (0..).zip(load.wants()) {
            let view = load.view(number).unwrap();
            let at = pointer(view.address()) as *const u8;
            // SAFETY: complete bytes of memory that `blocks` keeps.
            let found = unsafe { std::slice::from_raw_parts(at, view.nbytes() as usize) };
            assert!(view.nbytes() == 0 || found == model.expected(&checkpoint, want), "want {number}");
        }
        let told = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!((told.fences, told.early), (granted, 0), "each fence is told, before a byte lands");
        assert_eq!(bytes_by(&load, LANDS), told.bytes);
        (bytes_by(&load, LANDS), bytes_by(&load, TOY), load.report().peak_staging)
    };
    let (landed, by_slab, staging) = run(Want::all(&checkpoint));
    assert!(landed > 4000 * KIB && by_slab == 0 && staging == 0, "{landed}, {by_slab}, {staging}");
    // So few bytes are not worth a place of their own: they come by a slab, in the lane for that.
    assert_eq!(run(vec![Want::whole(small)]).0, 0);
    // A load to the CPU has no use for this lane.
    let load = Load::start(model.request(Want::all(&checkpoint), false)).unwrap();
    load.wait(None).unwrap();
    model.check(&load);
    assert_eq!((bytes_by(&load, LANDS), seen.lock().unwrap().bytes), (0, 0));
}

#[test]
fn one_load_reads_from_several_stores_and_from_files() {
    let (one, two) = (Model::new(|_| ()), Model::new(|server| server.staging = TakesSlab::AtRequest));
    let file = |model: &Model, name: &str| model.folder.path().join(name).to_str().unwrap().to_owned();
    for sources in [
        [one.address("/model-1.safetensors"), two.address("/model-2.safetensors")],
        [one.address("/model-2.safetensors"), file(&one, "model-1.safetensors")],
        [file(&two, "model-2.safetensors"), two.address("/model-1.safetensors")],
    ] {
        let checkpoint = Arc::new(Checkpoint::open(&sources).unwrap());
        for stream in [false, true] {
            let request = Request { checkpoint: checkpoint.clone(), ..one.request(Want::all(&checkpoint), stream) };
            let load = Load::start(request).unwrap();
            load.wait(None).unwrap();
            one.check(&load);
        }
    }
    // What goes wrong in one of them ends the load, and names it.
    let bad = Model::new(|server| server.fault = Fault::Fail(3));
    let sources = [file(&one, "model-1.safetensors"), bad.address("/model-2.safetensors")];
    let checkpoint = Arc::new(Checkpoint::open(&sources).unwrap());
    let request = Request { checkpoint: checkpoint.clone(), ..one.request(Want::all(&checkpoint), false) };
    let e = Load::start(request).and_then(|load| load.wait(None)).unwrap_err();
    assert_eq!((e.kind(), e.path().and_then(|p| p.to_str())), (ErrorKind::Io, Some(&*sources[1])), "{e}");
}

#[test]
fn one_wrapper_serves_files_of_this_machine_and_a_server() {
    let model = Model::new(|_| ());
    // On a disk, which has O_DIRECT; /tmp may be memory.
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for file in std::fs::read_dir(model.folder.path()).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), disk.path().join(file.file_name())).unwrap();
    }
    let (files, server) = (format!("{}files", model.scheme), format!("{}server", model.scheme));
    let folder = disk.path().file_name().unwrap().to_str().unwrap();
    let (on_disk, on_server) = (format!("{files}://{folder}"), format!("{server}://model"));
    let of_files = Counted::register(&files, local(), Location::Path(disk.path().parent().unwrap().into()));
    let bucket = Location::Url(format!("{}://bucket", model.scheme));
    let of_server = Counted::register(&server, Arc::new(Toy(model.server.clone())), bucket);
    let load = |sources: &[String], io| {
        let checkpoint = Arc::new(Checkpoint::open(sources).unwrap());
        let request = Request { checkpoint: checkpoint.clone(), ..model.request(Want::all(&checkpoint), false) };
        let load = Load::start(Request { options: Options { io, ..request.options.clone() }, ..request }).unwrap();
        load.wait(None).unwrap();
        model.check(&load);
        assert_eq!(load.report().fallbacks.len(), 0, "{:?}", load.report().fallbacks);
        load
    };

    // A folder with an index and two files is listed, read and opened once: the second header is long, so it is read on.
    drop(Checkpoint::open(&[&on_disk]).unwrap());
    let opened =
        |counts: &toy_wrapper::Counts| std::mem::take(&mut *counts.lock().unwrap()).into_iter().collect::<Vec<_>>();
    let expected = [("content", 1), ("entries", 1), ("open", 2), ("read on", 2)];
    assert_eq!(opened(&of_files), expected);
    drop(Checkpoint::open(&[&on_server]).unwrap());
    assert_eq!(opened(&of_server), expected);

    // Each lane of files of this machine, and the server's.
    let direct = facts_at(&disk.path().join("model-2.safetensors")).unwrap().lanes.past_cache;
    for (io, lane) in [(Io::Mapped, Some(Lane::MAPPED)), (Io::Buffered, Some(Lane::BUFFERED)), (Io::Direct, direct)] {
        let Some(lane) = lane else { continue };
        let load = load(std::slice::from_ref(&on_disk), io);
        let report = load.report();
        assert!(bytes_by(&load, lane) >= report.nbytes, "{io:?}: {:?}", report.routes);
        assert_eq!(of_files.lock().unwrap()[lane.name], report.routes.of(lane).extents, "{io:?}");
        // Its own, without a wrapper, does the same.
        let plain = Load::start(Request {
            checkpoint: Arc::new(Checkpoint::open(&[disk.path()]).unwrap()),
            options: Options { io, ..model.request(Vec::new(), false).options },
            ..model.request(load.wants().to_vec(), false)
        });
        let plain = plain.unwrap();
        plain.wait(None).unwrap();
        assert_eq!((plain.layout(), plain.report().routes), (load.layout(), report.routes), "{io:?}");
    }
    let served = load(std::slice::from_ref(&on_server), Io::Auto);
    assert_eq!(bytes_by(&served, TOY), served.report().nbytes + served.report().unwanted.gap);
    assert_eq!(of_server.lock().unwrap()[TOY.name], model.server.reads.load(Ordering::Relaxed));

    // Both, and a file without a wrapper, in one load.
    let without = disk.path().join("model-2.safetensors").to_str().unwrap().to_owned();
    for second in [format!("{on_server}/model-2.safetensors"), without] {
        load(&[format!("{on_disk}/model-1.safetensors"), second], Io::Auto);
    }

    // The file is the same by any name, and so is what becomes of it.
    let by_both = |name: &str| {
        [format!("{on_disk}/{name}"), disk.path().join(name).to_str().unwrap().to_owned()]
            .map(|source| Checkpoint::open(&[source]))
    };
    let [wrapped, plain] = by_both("model-1.safetensors").map(Result::unwrap);
    assert_eq!((wrapped.identity(), wrapped.samples().unwrap()), (plain.identity(), plain.samples().unwrap()));
    assert_eq!(wrapped.files()[0].header_bytes().unwrap(), plain.files()[0].header_bytes().unwrap());
    for name in ["model-3.safetensors", "", "README.md"] {
        let [wrapped, plain] = by_both(name).map(|opened| opened.map(drop).map_err(|e| e.kind()));
        assert_eq!(wrapped, plain, "{name:?}");
    }
    let request = Request { checkpoint: Arc::new(wrapped), ..model.request(Vec::new(), false) };
    let wants = Want::all(&request.checkpoint);
    let changed = disk.path().join("model-1.safetensors");
    std::fs::OpenOptions::new().append(true).open(&changed).unwrap().set_len(8 << 20).unwrap();
    assert_eq!(plain.files()[0].header_bytes().unwrap_err().kind(), ErrorKind::Changed);
    let e = Load::start(Request { wants, ..request }).and_then(|load| load.wait(None)).unwrap_err();
    assert_eq!((e.kind(), e.path()), (ErrorKind::Changed, Some(&*changed)), "{e}");
}
