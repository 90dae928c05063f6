//! Copies of whole objects: what lies at addresses goes into the disk cache, or into files of a folder.
//!
//! The bytes come from the sources of a load, in blocks, so in the same way and with the same limits: connections, bandwidth,
//! retries, versions. What the disk cache has comes from there, compared with its checksums. A [`Pull`] is as slow as the disk:
//! no block is dropped.
//!
//! A file has no name, or one that no reader looks for, until it is complete and on the disk (`save/output.rs`). Its blocks are
//! written in their order.

use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, TakesSlab, Ticket};
use crate::format::heads;
use crate::memory::Anonymous;
use crate::options::{Io, Options, MIB};
use crate::save::Output;
use crate::source::{wait_readable, Destination, Progress, Read, Source, SourceRequest};
use crate::store::{Head, Object, Storage, Store, Stores, Version};
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::guarded;
use crate::wake::Wake;
use crate::way::Routing;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of one read. A block of the disk cache has as many.
const BLOCK: u64 = MIB;
/// Reads in flight at most. Those that go to a file have a buffer each.
const MOST_READS: usize = 256;
/// Bytes of the longest object that a server may give only as a whole.
const WHOLE: u64 = 64 * MIB;
/// From one look at the caller's wish, and at a disk that is behind, to the next.
const LOOK: Duration = Duration::from_millis(50);

/// One object that is wanted.
#[derive(Debug, Clone)]
pub struct PullFile {
    /// Its address.
    pub from: OsString,
    /// The file that it goes to, in a folder that is there. `None`: it only goes into the disk cache.
    pub into: Option<PathBuf>,
    /// The file that is there. If the object has its version still, it stays.
    pub known: Option<KnownFile>,
}

/// A file that was written before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownFile {
    /// Its strong version.
    pub version: String,
    /// Its size.
    pub size: u64,
    /// The CRC32C of what was written, which is compared with the file's. `None`: the file is known to be as it was.
    pub crc: Option<u32>,
}

/// The state of one object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PulledFile {
    /// Its bytes.
    pub size: u64,
    /// Its version, if that tells all versions apart.
    pub version: Option<String>,
    /// It was there before.
    pub was_there: bool,
    /// It is there.
    pub complete: bool,
    /// The CRC32C of a file that was written.
    pub crc: Option<u32>,
}

/// The state of a [`Pull`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullStatus {
    /// Bytes of all objects; 0 until they are known.
    pub nbytes: u64,
    /// Bytes of these that are there, or came.
    pub done: u64,
    /// Bytes that servers sent.
    pub received: u64,
    /// The objects, in their order; empty until they are known.
    pub files: Vec<PulledFile>,
    /// The reason for which the disk cache lacks something that files have; empty without one.
    pub uncached: String,
}

#[derive(Debug, Default)]
struct PullState {
    status: PullStatus,
    outcome: Option<Result<()>>,
}

#[derive(Debug)]
struct SharedPull {
    state: Mutex<PullState>,
    ended: Condvar,
    cancelled: AtomicBool,
    wake: Wake,
}

/// Copies that are made by a thread of their own. To drop it ends them.
#[derive(Debug)]
pub struct Pull {
    shared: Arc<SharedPull>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl Pull {
    /// Starts to copy these objects.
    ///
    /// # Errors
    /// `Limit`: no thread can be started.
    pub fn start(files: Vec<PullFile>, stores: &Stores, options: &Options) -> Result<Pull> {
        let (state, ended, cancelled) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        let shared = Arc::new(SharedPull { state, ended, cancelled, wake: Wake::new()? });
        let (own, stores, options) = (shared.clone(), stores.for_copies(), options.clone());
        let work = move || {
            let outcome = guarded("penstock-pull", || own.run(&files, &stores, &options)).and_then(|done| done);
            lock(&own.state).outcome = Some(outcome);
            own.ended.notify_all();
        };
        let thread = Builder::new().name("penstock-pull".into()).spawn(work);
        let thread =
            thread.map_err(|e| Error::new(ErrorKind::Limit, format!("cannot start the thread that copies: {e}")))?;
        Ok(Pull { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// The state now.
    pub fn status(&self) -> PullStatus {
        lock(&self.shared.state).status.clone()
    }

    /// Waits for the end, at most for `timeout`; false if that passed first.
    ///
    /// # Errors
    /// The first error. What was complete by then stays.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let until = Instant::now() + timeout;
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone().map(|()| true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            state = self.shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends it, and waits for its thread. Files that are not complete are gone.
    pub fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.shared.cancelled.store(true, Ordering::Relaxed);
        self.shared.wake.notify();
        if let Some(thread) = lock(&self.thread).take() {
            let _ended = thread.join();
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.close();
    }
}

/// An object, and what becomes of it.
struct PullObject {
    /// Its number among all.
    number: usize,
    object: Object,
    into: Option<PathBuf>,
}

impl SharedPull {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn count(&self, count: impl FnOnce(&mut PullStatus)) {
        count(&mut lock(&self.state).status);
    }

    fn check_wanted(&self) -> Result<()> {
        match self.is_cancelled() {
            true => Err(Error::new(ErrorKind::Cancelled, "it was told to stop")),
            false => Ok(()),
        }
    }

    fn run(&self, files: &[PullFile], stores: &Stores, options: &Options) -> Result<()> {
        let addresses: Vec<&OsString> = files.iter().map(|file| &file.from).collect();
        let found = heads(&addresses, WHOLE, stores, options.stall_timeout, || !self.is_cancelled())?;
        let states = found.iter().zip(files).map(|((_, head), file)| self.pulled(head, file));
        let states = states.collect::<Result<Vec<_>>>()?;
        self.count(|status| {
            status.nbytes = found.iter().map(|(_, head)| head.size).sum();
            status.files = states;
            status.done = status.files.iter().filter(|file| file.complete).map(|file| file.size).sum();
        });
        let is_there = lock(&self.state).status.files.iter().map(|file| file.complete).collect::<Vec<_>>();
        // One store after the other.
        let mut of_stores: Vec<(Arc<dyn Store>, Vec<PullObject>)> = Vec::new();
        for (number, ((origin, head), file)) in found.into_iter().zip(files).enumerate() {
            if is_there[number] {
                continue;
            }
            let Head { mut bytes, size, version } = head;
            if let Some(into) = file.into.as_deref().filter(|_| bytes.len() as u64 == size) {
                let (mut output, _) = Output::new(into, size, false)?;
                let crc = Some(crc32c::crc32c(&bytes));
                output.write_next(&mut bytes, 0)?;
                output.seal(true)?;
                output.publish(true)?;
                self.count(|status| {
                    status.done += size;
                    (status.files[number].complete, status.files[number].crc) = (true, crc);
                });
                continue;
            }
            let object = Object { location: origin.location().absolute(), size, version };
            let wanted = PullObject { number, object, into: file.into.clone() };
            match of_stores.iter_mut().find(|(store, _)| Arc::ptr_eq(store, origin.store())) {
                Some((_, all)) => all.push(wanted),
                None => of_stores.push((origin.store().clone(), vec![wanted])),
            }
        }
        of_stores.iter().try_for_each(|(store, wanted)| Copying::new(self, store, wanted, options)?.run())
    }

    /// The state of an object that was found.
    fn pulled(&self, head: &Head, file: &PullFile) -> Result<PulledFile> {
        let version = match &head.version {
            Version::Strong(version) => Some(version.clone()),
            _ => None,
        };
        let is_same = |known: &&KnownFile| version.as_ref() == Some(&known.version) && head.size == known.size;
        let was_there = match (&file.into, file.known.as_ref().filter(is_same)) {
            (Some(into), Some(KnownFile { crc: Some(crc), .. })) => self.crc_of(into)? == Some(*crc),
            (Some(_), known) => known.is_some(),
            // The disk cache has no empty objects.
            (None, _) => head.size == 0,
        };
        Ok(PulledFile { size: head.size, version, was_there, complete: was_there, crc: None })
    }

    /// The CRC32C of a file; `None`: it cannot be read.
    fn crc_of(&self, path: &Path) -> Result<Option<u32>> {
        let Ok(mut file) = File::open(path) else { return Ok(None) };
        let (mut bytes, mut crc) = (vec![0; BLOCK as usize], 0);
        loop {
            self.check_wanted()?;
            match file.read(&mut bytes) {
                Ok(0) => return Ok(Some(crc)),
                Ok(got) => crc = crc32c::crc32c_append(crc, &bytes[..got]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Ok(None),
            }
        }
    }
}

/// Refuses objects that only go into the disk cache and that it does not take, before a byte of them is asked for.
fn check_taken(storage: &Storage, wanted: &[PullObject]) -> Result<()> {
    for (file, one) in (0..).zip(wanted).filter(|(_, one)| one.into.is_none()) {
        let Some(cache) = storage.disk_cache() else {
            return Err(Error::invalid("there is no disk cache that it could go to").at(&one.object.location));
        };
        if let Some(why) = cache.refusal(file) {
            let text = format!("the disk cache takes nothing of it: {why}");
            return Err(Error::new(ErrorKind::Limit, text).at(&one.object.location));
        }
    }
    Ok(())
}

/// A file that is being written.
struct PulledTo {
    output: Output,
    /// The CRC32C of what is written.
    crc: u32,
    /// The block that is written next.
    next: u64,
    /// Blocks that came before it.
    early: BTreeMap<u64, Arc<Anonymous>>,
}

/// Objects of one store on their way.
struct Copying<'p> {
    pull: &'p SharedPull,
    wanted: &'p [PullObject],
    storage: Storage,
    source: Box<dyn Source>,
    lanes: Vec<Lane>,
    stall: Duration,
    /// (file, block), in the order in which they are asked for.
    queue: VecDeque<(u32, u64)>,
    in_flight: HashMap<Ticket, (u32, u64, Option<Arc<Anonymous>>)>,
    free: Vec<Arc<Anonymous>>,
    targets: HashMap<u32, PulledTo>,
    tickets: u64,
    /// Bytes that servers had sent for other stores.
    received: u64,
}

impl<'p> Copying<'p> {
    fn new(
        pull: &'p SharedPull,
        store: &'p Arc<dyn Store>,
        wanted: &'p [PullObject],
        options: &Options,
    ) -> Result<Copying<'p>> {
        let storage = Storage::new(wanted.iter().map(|one| (one.object.clone(), store)))?;
        let lanes = (0..wanted.len() as u32).map(|file| storage.facts(file).map(|facts| facts.lanes.any));
        let lanes = lanes.collect::<Result<Vec<_>>>()?;
        check_taken(&storage, wanted)?;
        let routing = Routing { stall: options.stall_timeout, ..Routing::default() };
        let request = SourceRequest { staging: options.staging, ..SourceRequest::new(Io::Auto, Arc::new(routing)) };
        let source = Box::new(storage.source(&request)?);
        let mut queue = VecDeque::new();
        for (file, one) in (0..).zip(wanted) {
            let size = one.object.size;
            let there = match one.into {
                // Of a file all bytes are written, wherever they come from.
                Some(_) => Vec::new(),
                None => storage.resident_within(file, 0..size)?.ranges,
            };
            let is_there = |start: u64| there.iter().any(|range| range.contains(&start));
            queue.extend((0..size.div_ceil(BLOCK)).filter(|block| !is_there(block * BLOCK)).map(|block| (file, block)));
            let found: u64 = there.iter().map(|range| range.end - range.start).sum();
            pull.count(|status| {
                status.done += found;
                status.files[one.number].was_there = found == size;
            });
        }
        let received = lock(&pull.state).status.received;
        let (in_flight, free, targets) = (HashMap::new(), Vec::new(), HashMap::new());
        let stall = options.stall_timeout;
        Ok(Copying {
            pull,
            wanted,
            storage,
            source,
            lanes,
            stall,
            queue,
            in_flight,
            free,
            targets,
            tickets: 0,
            received,
        })
    }

    fn len(&self, file: u32, block: u64) -> u64 {
        (self.wanted[file as usize].object.size - block * BLOCK).min(BLOCK)
    }

    fn run(mut self) -> Result<()> {
        let (mut events, mut moved) = (Vec::new(), Instant::now());
        let mut progress = self.cached_bytes();
        while !(self.queue.is_empty() && self.in_flight.is_empty()) {
            self.pull.check_wanted()?;
            self.submit()?;
            self.source.flush()?;
            self.source.poll(&mut events)?;
            let has_moved = !events.is_empty();
            for event in events.drain(..) {
                match event {
                    Progress::Done(done) => {
                        let Some((file, block, buffer)) = self.in_flight.remove(&done.ticket) else { continue };
                        done.result?;
                        self.came(file, block, buffer)?;
                    }
                    Progress::Refused { cause, .. } => return Err(cause),
                    Progress::Arrived(_) | Progress::Received(_) => {}
                }
            }
            self.count_received();
            // Writing what came may take longer than the next bytes.
            if has_moved {
                moved = Instant::now();
            }
            if self.is_dropped() {
                return self.check_cached();
            }
            let now = self.cached_bytes();
            if now != progress {
                (progress, moved) = (now, Instant::now());
            }
            if moved.elapsed() > self.stall {
                return Err(self.stalled());
            }
            self.pull.wake.clear();
            wait_readable([self.source.wake(), self.pull.wake.fd()], Some(LOOK));
        }
        self.check_cached()
    }

    /// Blocks that came before the ones that are written next. The reads of these are in flight.
    fn early(&self) -> usize {
        self.targets.values().map(|target| target.early.len()).sum()
    }

    /// Asks for as many blocks as there is room for.
    fn submit(&mut self) -> Result<()> {
        while let Some(&(file, block)) = self.queue.front().filter(|_| self.in_flight.len() + self.early() < MOST_READS)
        {
            let (len, lane) = (self.len(file, block), self.lanes[file as usize]);
            let buffer = match self.wanted[file as usize].into {
                Some(_) => Some(self.free.pop().map_or_else(|| Anonymous::new(BLOCK).map(Arc::new), Ok)?),
                None => None,
            };
            let into = match &buffer {
                Some(buffer) => Destination::Memory(buffer.at()),
                None if lane.staging == TakesSlab::AtArrival => {
                    Destination::Scatter(vec![(std::ptr::null_mut(), len as usize)])
                }
                None => return Err(Error::invalid("only what is on a server goes into the disk cache")),
            };
            let ticket = Ticket(self.tickets);
            let (offset, keep) = (block * BLOCK, Arc::new(buffer.clone()));
            let read = Read { ticket, file, offset, len, need: len, lane, into, fresh: false, written: 0, keep };
            if self.source.submit(read).is_err() {
                self.free.extend(buffer);
                break;
            }
            self.queue.pop_front();
            self.tickets += 1;
            self.in_flight.insert(ticket, (file, block, buffer));
        }
        Ok(())
    }

    /// A block is in memory, or in the disk cache's hands.
    fn came(&mut self, file: u32, block: u64, buffer: Option<Arc<Anonymous>>) -> Result<()> {
        let len = self.len(file, block);
        self.pull.count(|status| status.done += len);
        let Some(buffer) = buffer else { return Ok(()) };
        let size = self.wanted[file as usize].object.size;
        self.target(file)?.early.insert(block, buffer);
        while let Some(target) = self.targets.get_mut(&file) {
            let Some(buffer) = target.early.remove(&target.next) else { break };
            let at = target.next * BLOCK;
            // SAFETY: its read has ended, and nobody else has the memory, which has a block.
            let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.at(), (size - at).min(BLOCK) as usize) };
            target.crc = crc32c::crc32c_append(target.crc, bytes);
            target.output.write_next(bytes, at)?;
            target.next += 1;
            let is_last = target.next * BLOCK >= size;
            self.free.push(buffer);
            if is_last {
                self.finish(file)?;
            }
        }
        Ok(())
    }

    /// The file that an object goes to, made when its first block is there.
    fn target(&mut self, file: u32) -> Result<&mut PulledTo> {
        let PullObject { object, into, .. } = &self.wanted[file as usize];
        if let Entry::Vacant(free) = self.targets.entry(file) {
            let none = || Error::new(ErrorKind::Internal, "an object without a file; please report this");
            let (output, _) = Output::new(into.as_deref().ok_or_else(none)?, object.size, false)?;
            free.insert(PulledTo { output, crc: 0, next: 0, early: BTreeMap::new() });
        }
        self.targets.get_mut(&file).ok_or_else(|| Error::new(ErrorKind::Internal, "a file is gone; please report this"))
    }

    /// Gives a file that is complete its name.
    fn finish(&mut self, file: u32) -> Result<()> {
        let Some(mut target) = self.targets.remove(&file) else { return Ok(()) };
        target.output.seal(true)?;
        self.storage.verify(file)?;
        target.output.publish(true)?;
        self.pull.count(|status| {
            let state = &mut status.files[self.wanted[file as usize].number];
            (state.complete, state.crc) = (true, Some(target.crc));
        });
        Ok(())
    }

    /// Bytes that the disk cache has taken, or not: a number that changes while it works.
    fn cached_bytes(&self) -> u64 {
        self.storage.disk_cache().map_or(0, |cache| {
            let status = cache.status();
            status.written + status.dropped + status.cached
        })
    }

    /// True if the disk cache has dropped something, for good, that only goes there: it waits for its disk otherwise.
    fn is_dropped(&self) -> bool {
        let is_only_cached = self.wanted.iter().any(|one| one.into.is_none());
        is_only_cached && self.storage.disk_cache().is_some_and(|cache| cache.status().dropped > 0)
    }

    fn count_received(&self) {
        let received = self.received + self.storage.traffic().map_or(0, |traffic| traffic.received);
        self.pull.count(|status| status.received = received);
    }

    fn stalled(&self) -> Error {
        let text = format!("nothing came for {:.1} s (stall_timeout raises the limit)", self.stall.as_secs_f64());
        let waiting = self.in_flight.values().map(|(file, ..)| *file).min().unwrap_or_default();
        Error::new(ErrorKind::Timeout, text).at(self.storage.path(waiting))
    }

    /// Waits until the disk cache has written and synced all, and checks that it has all.
    fn check_cached(self) -> Result<()> {
        self.count_received();
        let Copying { pull, wanted, storage, source, .. } = self;
        // The cache's work ends with its source.
        drop(source);
        let Some(cache) = storage.disk_cache() else { return Ok(()) };
        while !cache.wait(LOOK) {
            pull.check_wanted()?;
        }
        let reason = cache.status().reason;
        for (file, one) in (0..).zip(wanted) {
            let there = storage.resident_within(file, 0..one.object.size)?.ranges;
            let lacking = one.object.size - there.iter().map(|range| range.end - range.start).sum::<u64>();
            if lacking == 0 {
                pull.count(|status| status.files[one.number].complete = true);
            } else if one.into.is_none() {
                let why = if reason.is_empty() { "it was not written".to_owned() } else { reason };
                let text = format!("{lacking} bytes of it are not in the disk cache: {why}");
                return Err(Error::new(ErrorKind::Limit, text).at(&one.object.location));
            } else {
                pull.count(|status| status.uncached.clone_from(&reason));
            }
        }
        Ok(())
    }
}
