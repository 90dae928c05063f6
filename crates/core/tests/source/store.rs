//! What every store must do: the suite takes any, through a shelf on which it puts objects.

use crate::sample::*;
use crate::toy_store::{Contents, Server, Toy};
use crate::web_server;
use penstock::error::ErrorKind;
use penstock::extent::{Lane, TakesSlab, Ticket};
use penstock::options::Io;
use penstock::source::{Destination, Progress, Read};
use penstock::store::{local, FsKind, Location, Object, Objects, Store, Web, WebSettings};
use penstock::way::Routing;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Somewhere to put objects, as the owner of the storage does.
trait Shelf {
    /// Puts an object there, or another one in the place of one that is there.
    fn put(&self, name: &str, bytes: &[u8]);
    fn remove(&self, name: &str);
    fn at(&self, name: &str) -> Location;
}

/// A shelf of a store.
trait Stored: Shelf {
    fn store(&self) -> Arc<dyn Store>;

    /// Objects as a load has them.
    fn objects(&self, names: &[&str]) -> Arc<dyn Objects> {
        let store = self.store();
        store.objects(names.iter().map(|name| Some(object(&*store, &self.at(name)))).collect()).unwrap()
    }
}

fn bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed | 1);
    (0..n).map(|_| random.next() as u8).collect()
}

fn object(store: &dyn Store, at: &Location) -> Object {
    let head = store.head(at, 8).unwrap();
    Object { location: at.clone(), size: head.size, version: head.version }
}

// --- Opening ---

fn a_location_is_an_object_or_what_lies_under_it(shelf: &dyn Stored) {
    for name in ["model/a.safetensors", "model/b.safetensors", "model/a.json", "model/deep/c.safetensors"] {
        shelf.put(name, b"12345678");
    }
    let (store, one) = (shelf.store(), shelf.at("model/a.safetensors"));
    assert_eq!(store.list(&one).unwrap(), std::slice::from_ref(&one));
    let direct = ["model/a.json", "model/a.safetensors", "model/b.safetensors"].map(|name| shelf.at(name));
    for folder in ["model", "model/"] {
        let found = store.list(&shelf.at(folder)).unwrap();
        assert!(direct.iter().all(|at| found.contains(at)), "{folder}: {found:?}");
        let asked = shelf.at(folder).to_string();
        assert!(found.iter().all(|at| at.to_string().starts_with(&asked)), "{folder}: {found:?}");
    }
    // The beginning of a name is no folder.
    for nothing in ["model/a", "mod", "nothing"] {
        assert_eq!(store.list(&shelf.at(nothing)).unwrap_err().kind(), ErrorKind::NotFound, "{nothing}");
    }
}

fn a_head_is_the_first_bytes_and_the_size(shelf: &dyn Stored) {
    let (store, at, content) = (shelf.store(), shelf.at("x.safetensors"), bytes(100_001, 3));
    shelf.put("x.safetensors", &content);
    for first in [0u64, 1, 65_536, 100_001, 1 << 20] {
        let head = store.head(&at, first).unwrap();
        assert_eq!((head.size, head.bytes.len() as u64), (100_001, first.min(100_001)));
        assert!(content.starts_with(&head.bytes));
    }
    assert_eq!(store.head(&shelf.at("y.safetensors"), 8).unwrap_err().kind(), ErrorKind::NotFound);
}

fn a_version_stays_and_another_object_has_another(shelf: &dyn Stored) {
    let (store, at) = (shelf.store(), shelf.at("x.safetensors"));
    shelf.put("x.safetensors", b"12345678");
    let first = object(&*store, &at);
    assert_eq!(object(&*store, &at), first);
    shelf.put("x.safetensors", b"87654321");
    assert_ne!(object(&*store, &at).version, first.version);
}

fn a_read_brings_its_range_of_that_version_or_an_error(shelf: &dyn Stored) {
    let (store, at, content) = (shelf.store(), shelf.at("x.safetensors"), bytes(10_000, 5));
    shelf.put("x.safetensors", &content);
    let object = object(&*store, &at);
    for range in [0..1u64, 4095..4097, 9_999..10_000, 0..10_000] {
        let wanted = &content[range.start as usize..range.end as usize];
        assert_eq!(store.read(&object, range).unwrap(), wanted);
    }
    shelf.put("x.safetensors", &bytes(10_000, 6));
    let e = store.read(&object, 0..10).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Changed, "{e}");
    shelf.remove("x.safetensors");
    let e = store.read(&object, 0..10).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Changed | ErrorKind::NotFound), "{e}");
}

// --- Loading ---

fn what_is_said_of_an_object_makes_sense(shelf: &dyn Stored) {
    shelf.put("x.safetensors", &bytes(100_001, 3));
    let objects = shelf.objects(&["x.safetensors"]);
    let facts = objects.facts(0).unwrap();
    assert!(facts.parallelism != Some(0) && facts.lanes.unit != Some(0), "{facts:?}");
    assert!(facts.kind == FsKind::Remote || facts.extent.is_none(), "{facts:?}");
    assert!(facts.lanes.mapping.is_none() || objects.to_map(0).unwrap().is_some(), "{facts:?}");
    assert!(facts.lanes.mapping.is_none() || !objects.pins_reads(0), "a mapping says nothing if the file changes");
    let resident = objects.resident_within(0, 5..70_000).unwrap();
    assert!(resident.ranges.iter().all(|range| range.start < range.end), "{resident:?}");
    assert!(objects.path(0).to_str().unwrap().ends_with("x.safetensors"));
}

/// Reads all of an object of `size` bytes, in parts.
fn read_all(objects: &Arc<dyn Objects>, file: u32, size: u64) -> penstock::Result<Vec<u8>> {
    let routing = Arc::new(Routing { depth: 8, requests: 8, ..Routing::default() });
    let late = objects.facts(file)?.lanes.any.staging == TakesSlab::AtArrival;
    let mut source = objects.clone().source(Io::Auto, &routing).unwrap();
    let memory = Memory::new(size);
    let place = |offset: u64| {
        // SAFETY: within the memory.
        Destination::Memory(unsafe { memory.at.add(offset as usize) })
    };
    const PART: u64 = 30_000;
    let (mut next, mut done, mut outcome) = (0, 0, Ok(()));
    let until = Instant::now() + Duration::from_secs(20);
    while done < size.div_ceil(PART) {
        while next * PART < size {
            let (offset, len) = (next * PART, PART.min(size - next * PART));
            let (into, kept) =
                if late { (Destination::OnArrival, Arc::new(()) as _) } else { (place(offset), keep(&memory)) };
            let (ticket, lane) = (Ticket(next), Lane::BUFFERED);
            let read = Read { ticket, file, offset, len, need: len, lane, into, fresh: true, written: 0, keep: kept };
            if source.submit(read).is_err() {
                break;
            }
            next += 1;
        }
        source.flush().unwrap();
        readable(source.wake(), 1000);
        assert!(Instant::now() < until, "it takes more than 20 s");
        let mut events = Vec::new();
        source.poll(&mut events).unwrap();
        for event in events {
            match event {
                Progress::Arrived(ticket) => source.land(ticket, place(ticket.0 * PART), keep(&memory)).unwrap(),
                Progress::Received(_) => {}
                Progress::Refused { .. } => unreachable!("no lane is refused here"),
                Progress::Done(read) => {
                    done += 1;
                    outcome = outcome.and(read.result.map(drop));
                }
            }
        }
    }
    assert_eq!(source.in_flight(), 0);
    outcome.map(|()| memory.bytes()[..size as usize].to_vec())
}

fn a_source_brings_the_bytes_of_each_object(shelf: &dyn Stored) {
    let contents = [bytes(100_001, 3), bytes(5, 4), bytes(60_000, 5)];
    let names = ["a.safetensors", "b.safetensors", "c.safetensors"];
    names.iter().zip(&contents).for_each(|(name, content)| shelf.put(name, content));
    let objects = shelf.objects(&names);
    for (file, content) in (0..).zip(&contents) {
        assert!(read_all(&objects, file, content.len() as u64).unwrap() == *content, "wrong bytes of {file}");
        objects.verify(file).unwrap();
    }
}

fn an_object_that_is_another_by_now_is_noticed(shelf: &dyn Stored) {
    for gone in [false, true] {
        shelf.put("x.safetensors", &bytes(60_000, 3));
        let objects = shelf.objects(&["x.safetensors"]);
        let change =
            || if gone { shelf.remove("x.safetensors") } else { shelf.put("x.safetensors", &bytes(60_000, 4)) };
        change();
        // Reads that are pinned say so themselves; after others the question does.
        match read_all(&objects, 0, 60_000) {
            Err(e) => assert_eq!(e.kind(), ErrorKind::Changed, "gone: {gone}: {e}"),
            Ok(_) => assert!(!objects.pins_reads(0), "gone: {gone}: a pinned read brought other bytes"),
        }
        let e = objects.verify(0).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Changed, "gone: {gone}: {e}");
        assert!(e.path().is_some_and(|path| path.ends_with("x.safetensors")), "{e:?}");
    }
}

macro_rules! suite {
    ($name:ident, $shelf:expr; $($test:ident)*) => {
        mod $name {
            use super::*;
            $(#[test] fn $test() { super::$test(&$shelf) })*
        }
    };
}

macro_rules! opening {
    ($name:ident, $shelf:expr) => {
        suite!($name, $shelf;
            a_location_is_an_object_or_what_lies_under_it
            a_head_is_the_first_bytes_and_the_size
            a_version_stays_and_another_object_has_another
            a_read_brings_its_range_of_that_version_or_an_error
        );
    };
}

macro_rules! loading {
    ($name:ident, $shelf:expr) => {
        suite!($name, $shelf;
            what_is_said_of_an_object_makes_sense
            a_source_brings_the_bytes_of_each_object
            an_object_that_is_another_by_now_is_noticed
        );
    };
}

// --- The stores ---

/// The store of `toy_store`.
struct Bucket {
    contents: Contents,
    change: fn(&mut Server),
}

impl Bucket {
    fn new(change: fn(&mut Server)) -> Bucket {
        Bucket { contents: Arc::new(Mutex::new(BTreeMap::new())), change }
    }
}

impl Shelf for Bucket {
    fn put(&self, name: &str, bytes: &[u8]) {
        static TAGS: Mutex<u64> = Mutex::new(0);
        let mut tag = TAGS.lock().unwrap();
        *tag += 1;
        self.contents
            .lock()
            .unwrap()
            .insert(self.at(name).to_string(), (Arc::new(bytes.to_vec()), format!("tag {tag}")));
    }
    fn remove(&self, name: &str) {
        self.contents.lock().unwrap().remove(&self.at(name).to_string());
    }
    fn at(&self, name: &str) -> Location {
        Location::Url(format!("toy://bucket/{name}"))
    }
}

impl Stored for Bucket {
    fn store(&self) -> Arc<dyn Store> {
        let mut server = Server::of(&self.contents);
        (self.change)(&mut server);
        Arc::new(Toy(Arc::new(server)))
    }
}

/// A folder of this machine.
struct Folder(tempfile::TempDir);

impl Folder {
    fn within(folder: &str) -> Folder {
        Folder(tempfile::tempdir_in(folder).unwrap())
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Shelf for Folder {
    fn put(&self, name: &str, bytes: &[u8]) {
        // Another file takes the name, as programs that save do.
        let new = self.path("new");
        std::fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        std::fs::write(&new, bytes).unwrap();
        std::fs::rename(new, self.path(name)).unwrap();
    }
    fn remove(&self, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
    }
    fn at(&self, name: &str) -> Location {
        Location::Path(self.path(name))
    }
}

impl Stored for Folder {
    fn store(&self) -> Arc<dyn Store> {
        local()
    }
}

fn pinned(server: &mut Server) {
    server.pins_reads = true;
}

fn at_request(server: &mut Server) {
    server.staging = TakesSlab::AtRequest;
}

/// A web server. It lists nothing: what that means is in `tests/web.rs`.
struct Site {
    contents: web_server::Contents,
    server: web_server::WebServer,
    number: AtomicU64,
}

impl Site {
    fn new(script: fn(&web_server::Asked) -> web_server::Fault) -> Site {
        let contents = web_server::Contents::default();
        let server = web_server::WebServer::of(&contents, script);
        Site { contents, server, number: AtomicU64::new(0) }
    }
}

impl Shelf for Site {
    fn put(&self, name: &str, bytes: &[u8]) {
        let tag = format!("\"tag {}\"", self.number.fetch_add(1, Ordering::SeqCst));
        self.contents.lock().unwrap().insert(format!("/{name}"), (Arc::new(bytes.to_vec()), tag));
    }
    fn remove(&self, name: &str) {
        self.contents.lock().unwrap().remove(&format!("/{name}"));
    }
    fn at(&self, name: &str) -> Location {
        Location::Url(self.server.url(&format!("/{name}")))
    }
}

impl Stored for Site {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(Web::new(WebSettings { pause: Duration::from_millis(1), ..WebSettings::default() }))
    }
}

/// The server gives a weak ETag, which changes with the object, and a date, which does not.
fn weak(_: &web_server::Asked) -> web_server::Fault {
    web_server::Fault::Weak("Wed, 25 Nov 2026 10:00:00 GMT")
}

suite!(a_web_server_is_opened, Site::new(|_| web_server::Fault::None);
    a_head_is_the_first_bytes_and_the_size
    a_version_stays_and_another_object_has_another
    a_read_brings_its_range_of_that_version_or_an_error
);
loading!(a_web_server_is_loaded_from, Site::new(|_| web_server::Fault::None));
loading!(a_web_server_without_strong_validators, Site::new(weak));
loading!(a_web_server_that_closes_connections, Site::new(|_| web_server::Fault::Close));
opening!(the_toy_is_opened, Bucket::new(|_| ()));
loading!(the_toy_is_loaded_from, Bucket::new(|_| ()));
loading!(the_toy_whose_reads_are_pinned, Bucket::new(pinned));
loading!(the_toy_with_staging_at_request, Bucket::new(at_request));
opening!(files_are_opened, Folder::within(env!("CARGO_TARGET_TMPDIR")));
loading!(files_on_a_disk, Folder::within(env!("CARGO_TARGET_TMPDIR")));
loading!(files_in_memory, Folder::within("/dev/shm"));
