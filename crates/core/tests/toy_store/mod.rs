//! A store of one file: objects in memory, behind a latency and with faults. It shows what a new kind of storage takes:
//! this file, and a line that registers it.
#![allow(dead_code)]

use penstock::error::{Error, ErrorKind, Result};
use penstock::extent::{Declared, FileLanes, Lane, TakesSlab, Ticket};
use penstock::source::{Destination, Done, LaneSource, Progress, Read, Source, SourceRequest};
use penstock::store::{Facts, FsKind, Head, Location, Object, Objects, Store, Version};
use penstock::wake::Wake;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The lane of this store: no code of the library knows its name.
pub(crate) const TOY: Lane = Lane::new(&Declared { staging: TakesSlab::AtArrival, ..Declared::named("toy") });
/// The same, where memory is taken before a read is sent.
pub(crate) const PROMPT: Lane = Lane::new(&Declared::named("toy"));

/// What goes wrong with a read, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// This read and all later ones never come back.
    Hang(u64),
    /// This read fails.
    Fail(u64),
    /// This read brings a byte less than it should.
    Short(u64),
    /// Reads fail at this byte of a file. What comes before it has been written.
    Torn(u64),
}

type Fetch = Box<dyn Fn(&str) -> Option<(Arc<Vec<u8>>, String)> + Send + Sync>;

/// The server: what it holds, and how it behaves.
pub(crate) struct Server {
    /// The bytes and the validator of an address.
    fetch: Fetch,
    names: Vec<String>,
    pub(crate) latency: Duration,
    pub(crate) staging: TakesSlab,
    pub(crate) fault: Fault,
    /// How long the body of a read takes, and whether the source says that bytes come.
    pub(crate) body_takes: Option<(Duration, bool)>,
    /// `verify` takes this long from the first read on.
    pub(crate) verify_takes: Duration,
    /// Whether the store says that its reads are pinned to the version (they are).
    pub(crate) pins_reads: bool,
    /// What the store declares of its reads.
    pub(crate) extent: Option<u64>,
    pub(crate) gap: Option<u64>,
    /// Calls of `verify`.
    pub(crate) verified: AtomicU64,
    /// Bytes of bodies that were sent for loads, and reads.
    pub(crate) served: AtomicU64,
    pub(crate) reads: AtomicU64,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Objects that can be replaced while a load runs.
pub(crate) type Contents = Arc<Mutex<BTreeMap<String, (Arc<Vec<u8>>, String)>>>;

impl Server {
    /// A server of these objects.
    pub(crate) fn of(contents: &Contents) -> Server {
        let names = contents.lock().unwrap().keys().cloned().collect();
        let contents = contents.clone();
        Self::by(Box::new(move |name| contents.lock().unwrap().get(name).cloned()), names)
    }

    /// A server that answers with what a function gives.
    pub(crate) fn by(fetch: Fetch, names: Vec<String>) -> Server {
        Server {
            fetch,
            names,
            latency: Duration::from_micros(300),
            staging: TakesSlab::AtArrival,
            fault: Fault::None,
            body_takes: None,
            verify_takes: Duration::ZERO,
            pins_reads: false,
            extent: None,
            gap: None,
            verified: AtomicU64::new(0),
            served: AtomicU64::new(0),
            reads: AtomicU64::new(0),
        }
    }

    fn get(&self, name: &str) -> Result<(Arc<Vec<u8>>, String)> {
        let none = || Error::new(ErrorKind::NotFound, "there is no such object").at(name);
        (self.fetch)(name).ok_or_else(none)
    }

    /// The bytes of that very version.
    fn pinned(&self, object: &Object) -> Result<Arc<Vec<u8>>> {
        let changed = || Error::new(ErrorKind::Changed, "the object changed after it was opened");
        let name = object.location.to_string();
        let (bytes, tag) = self.get(&name).map_err(|_| changed().at(&name))?;
        if object.version != Version::Strong(tag) {
            return Err(changed().at(&name));
        }
        Ok(bytes)
    }
}

/// The store: the server behind the trait.
#[derive(Debug, Clone)]
pub(crate) struct Toy(pub(crate) Arc<Server>);

impl Store for Toy {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        let address = at.to_string();
        let folder = format!("{}/", address.trim_end_matches('/'));
        let found = self.0.names.iter().filter(|name| **name == address || name.starts_with(&folder));
        let found: Vec<_> = found.map(|name| Location::Url(name.clone())).collect();
        if found.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "there is nothing at this address").at(at.as_path()));
        }
        Ok(found)
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        std::thread::sleep(self.0.latency);
        let (bytes, tag) = self.0.get(&at.to_string())?;
        let size = bytes.len() as u64;
        Ok(Head { bytes: bytes[..size.min(first) as usize].to_vec(), size, version: Version::Strong(tag) })
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        std::thread::sleep(self.0.latency);
        Ok(self.0.pinned(object)?[range.start as usize..range.end as usize].to_vec())
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        Ok(Arc::new(ToyObjects { server: self.0.clone(), objects }))
    }
}

#[derive(Debug)]
pub(crate) struct ToyObjects {
    pub(crate) server: Arc<Server>,
    pub(crate) objects: Vec<Option<Object>>,
}

impl ToyObjects {
    fn object(&self, file: u32) -> &Object {
        self.objects[file as usize].as_ref().expect("a file of this store")
    }
}

impl Objects for ToyObjects {
    fn path(&self, file: u32) -> &Path {
        self.object(file).location.as_path()
    }

    fn facts(&self, _file: u32) -> Result<Facts> {
        Ok(Facts {
            kind: FsKind::Remote,
            fs: "toy",
            storage: 7,
            lanes: FileLanes::only(if self.server.staging == TakesSlab::AtArrival { TOY } else { PROMPT }),
            parallelism: Some(8),
            extent: self.server.extent,
            gap: self.server.gap,
            cut: None,
        })
    }

    fn pins_reads(&self, _file: u32) -> bool {
        self.server.pins_reads
    }

    fn verify(&self, file: u32) -> Result<()> {
        self.server.verified.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.server.verify_takes);
        self.server.pinned(self.object(file)).map(drop)
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let depth = match self.server.staging {
            TakesSlab::AtRequest => request.routing.depth,
            TakesSlab::AtArrival => request.routing.requests,
        };
        Ok(vec![LaneSource::of_all(ToySource::new(self, depth)?)])
    }
}

/// A thread that answers reads after the latency.
pub(crate) struct ToySource {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    depth: usize,
    in_flight: usize,
}

struct Shared {
    objects: Arc<ToyObjects>,
    state: Mutex<State>,
    changed: Condvar,
    wake: Wake,
}

#[derive(Default)]
struct State {
    /// Reads and when they are answered, in order.
    asked: Vec<(Instant, u64, Read)>,
    /// Reads of which the first byte is here, and which have no place yet.
    arrived: Vec<(u64, Read)>,
    /// Reads that have been given a place.
    landed: Vec<(u64, Read)>,
    events: Vec<Progress>,
    closing: bool,
}

impl ToySource {
    pub(crate) fn new(objects: Arc<ToyObjects>, depth: usize) -> Result<ToySource> {
        let (state, changed, wake) = (Mutex::default(), Condvar::new(), Wake::new()?);
        let shared = Arc::new(Shared { objects, state, changed, wake });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("toy".into()).spawn(move || theirs.serve());
        let thread = thread.map_err(|e| Error::io("start a thread", &e))?;
        Ok(ToySource { shared, thread: Some(thread), depth, in_flight: 0 })
    }
}

impl Shared {
    fn serve(&self) {
        let mut state = self.state.lock().unwrap();
        while !state.closing {
            if let Some((number, read)) = state.landed.pop() {
                drop(state);
                self.finish(number, read);
                state = self.state.lock().unwrap();
                continue;
            }
            let now = Instant::now();
            let next = state.asked.first().map(|(due, ..)| *due);
            state = match next {
                Some(due) if due <= now => {
                    let (_, number, read) = state.asked.remove(0);
                    if matches!(read.into, Destination::OnArrival) {
                        state.events.push(Progress::Arrived(read.ticket));
                        state.arrived.push((number, read));
                        self.wake.notify();
                        state
                    } else {
                        drop(state);
                        self.finish(number, read);
                        self.state.lock().unwrap()
                    }
                }
                Some(due) => self.changed.wait_timeout(state, due - now).unwrap().0,
                None => self.changed.wait(state).unwrap(),
            };
        }
    }

    /// Receives the bytes of a read into its place, and tells.
    fn finish(&self, number: u64, read: Read) {
        if let Some((time, told)) = self.objects.server.body_takes {
            for _ in 0..10 {
                std::thread::sleep(time / 10);
                if told {
                    self.state.lock().unwrap().events.push(Progress::Received(read.ticket));
                    self.wake.notify();
                }
            }
        }
        let (result, written) = self.receive(number, &read);
        let (ticket, lane) = (read.ticket, read.lane);
        // Nobody may learn that it is done while its memory is held.
        drop(read);
        let mut state = self.state.lock().unwrap();
        state.events.push(Progress::Done(Done { ticket, result, lane, written }));
        self.wake.notify();
    }

    /// The outcome of a read, and how many bytes it has written.
    fn receive(&self, number: u64, read: &Read) -> (Result<u64>, u64) {
        let body = match self.body(number, read) {
            Ok(body) => body,
            Err(e) => return (Err(e), 0),
        };
        let mut left = &body[..];
        if let Fault::Torn(at) = self.objects.server.fault {
            left = &left[..at.saturating_sub(read.offset).min(left.len() as u64) as usize];
        }
        let written = left.len() as u64;
        let mut put = |to: *mut u8, len: usize| {
            let (part, rest) = left.split_at(len.min(left.len()));
            if !to.is_null() {
                // SAFETY: the read's `keep` keeps `len` bytes there for us.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            }
            left = rest;
        };
        match &read.into {
            Destination::Memory(to) => put(*to, read.len as usize),
            Destination::Scatter(places) => places.iter().for_each(|(to, len)| put(*to, *len)),
            Destination::Mapping { .. } | Destination::Rows { .. } | Destination::OnArrival => {
                unreachable!("there is nothing to map, and no page cache")
            }
        }
        match body.len() as u64 {
            all if all == written => (Ok(written), written),
            _ => (Err(Error::new(ErrorKind::Io, "the connection broke")), written),
        }
    }

    fn body(&self, number: u64, read: &Read) -> Result<Vec<u8>> {
        let object = self.objects.object(read.file);
        let range = read.offset..read.offset + read.need;
        let located = |e: Error| e.at(object.location.as_path()).range(range.clone());
        let server = &self.objects.server;
        if server.fault == Fault::Fail(number) {
            return Err(located(Error::new(ErrorKind::Io, "the server does not feel well")));
        }
        let bytes = server.pinned(object).map_err(located)?;
        let cut = u64::from(server.fault == Fault::Short(number));
        let end = (read.offset + read.len).min(bytes.len() as u64) - cut;
        let body = &bytes[read.offset as usize..end as usize];
        server.served.fetch_add(body.len() as u64, Ordering::Relaxed);
        if (body.len() as u64) < read.need {
            return Err(located(Error::new(ErrorKind::Truncated, "the body ends too early")));
        }
        Ok(body.to_vec())
    }
}

impl Source for ToySource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if self.in_flight >= self.depth {
            return Err(read);
        }
        self.in_flight += 1;
        let server = &self.shared.objects.server;
        let number = server.reads.fetch_add(1, Ordering::Relaxed);
        let hangs = matches!(server.fault, Fault::Hang(first) if number >= first);
        let due = Instant::now() + if hangs { Duration::from_secs(3600) } else { server.latency };
        self.shared.state.lock().unwrap().asked.push((due, number, read));
        self.shared.changed.notify_one();
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.shared.wake.clear();
        let mut state = self.shared.state.lock().unwrap();
        self.in_flight -= state.events.iter().filter(|event| matches!(event, Progress::Done(_))).count();
        events.append(&mut state.events);
        Ok(())
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        let mut state = self.shared.state.lock().unwrap();
        let none = || Error::new(ErrorKind::Internal, "no such read has arrived");
        let given_up = |event: &Progress| matches!(event, Progress::Done(done) if done.ticket == ticket);
        if state.events.iter().any(given_up) {
            return Ok(());
        }
        let at = state.arrived.iter().position(|(_, read)| read.ticket == ticket).ok_or_else(none)?;
        let (number, read) = state.arrived.remove(at);
        state.landed.push((number, Read { into, keep, ..read }));
        self.shared.changed.notify_one();
        Ok(())
    }

    fn cancel(&mut self) {
        let mut state = self.shared.state.lock().unwrap();
        let mut given_up: Vec<Read> = std::mem::take(&mut state.asked).into_iter().map(|asked| asked.2).collect();
        given_up.extend(std::mem::take(&mut state.arrived).into_iter().map(|arrived| arrived.1));
        for read in given_up {
            let (ticket, lane) = (read.ticket, read.lane);
            drop(read);
            let result = Err(Error::new(ErrorKind::Cancelled, "it was given up"));
            state.events.push(Progress::Done(Done { ticket, result, lane, written: 0 }));
        }
        self.shared.wake.notify();
    }

    fn wake(&self) -> RawFd {
        self.shared.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for ToySource {
    fn drop(&mut self) {
        let reads = {
            let mut state = self.shared.state.lock().unwrap();
            state.closing = true;
            (std::mem::take(&mut state.asked), std::mem::take(&mut state.arrived), std::mem::take(&mut state.landed))
        };
        self.shared.changed.notify_one();
        let _ = self.thread.take().map(JoinHandle::join);
        drop(reads);
    }
}
