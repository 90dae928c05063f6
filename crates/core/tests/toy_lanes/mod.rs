//! Two stores that wrap another one and add a lane to its files: copies on disk of parts of them, and reads that land on the
//! toy device. They show what a new lane takes: this file.
#![allow(dead_code)]

use crate::toy_device::pointer;
use penstock::error::{Error, ErrorKind, Result};
use penstock::extent::{Declared, Fence, FileLanes, Lands, Lane, Ticket};
use penstock::source::{Destination, Done, LaneSource, Progress, Read, Source, SourceRequest};
use penstock::store::{Facts, Head, Location, Object, Objects, Residency, Store};
use penstock::wake::Wake;
use std::fs::File;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Bytes of the copies on disk. What a copy lacks, or no longer has, comes from the server.
pub(crate) const COPY: Lane =
    Lane::new(&Declared { refused: Some(crate::toy_store::PROMPT), ..Declared::named("toy copy") });

/// Reads that land on the toy device.
pub(crate) const LANDS: Lane = Lane::new(&Declared { lands: Lands::Device, ..Declared::named("toy direct") });

/// The lane that a wrapping store adds.
#[derive(Debug, Clone)]
pub(crate) enum Adds {
    /// Copies in this folder, under the last names of their objects: of every second stretch of so many bytes.
    Copies(PathBuf, u64),
    /// Reads that land on the toy device.
    Landing,
}

/// What the source of the added lane has done.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) bytes: u64,
    pub(crate) fences: Vec<Fence>,
    /// Places that were written before any fence was told.
    pub(crate) early: usize,
}

/// A store with one lane more.
#[derive(Debug)]
pub(crate) struct Wrapped {
    pub(crate) inner: Arc<dyn Store>,
    pub(crate) adds: Adds,
    pub(crate) seen: Arc<Mutex<Seen>>,
}

impl Store for Wrapped {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        self.inner.list(at)
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        self.inner.head(at, first)
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        self.inner.read(object, range)
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        let (store, adds, seen) = (self.inner.clone(), self.adds.clone(), self.seen.clone());
        Ok(Arc::new(WrappedObjects { inner: store.objects(objects.clone())?, store, objects, adds, seen }))
    }
}

#[derive(Debug)]
struct WrappedObjects {
    inner: Arc<dyn Objects>,
    store: Arc<dyn Store>,
    objects: Vec<Option<Object>>,
    adds: Adds,
    seen: Arc<Mutex<Seen>>,
}

impl WrappedObjects {
    /// The bytes of a read in the added lane.
    fn bytes(&self, read: &Read) -> Result<Vec<u8>> {
        let range = read.offset..read.offset + read.len;
        match &self.adds {
            Adds::Landing => self.store.read(self.objects[read.file as usize].as_ref().unwrap(), range),
            Adds::Copies(folder, _) => {
                let path = folder.join(self.path(read.file).file_name().unwrap());
                let gone = |e: std::io::Error| Error::io("read", &e).at(&path);
                let mut bytes = vec![0; read.len as usize];
                File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, read.offset)).map_err(gone)?;
                Ok(bytes)
            }
        }
    }
}

impl Objects for WrappedObjects {
    fn path(&self, file: u32) -> &Path {
        self.inner.path(file)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        let facts = self.inner.facts(file)?;
        let lanes = match self.adds {
            Adds::Copies(..) => FileLanes { near: COPY, ..facts.lanes },
            Adds::Landing => FileLanes { device: Some(LANDS), ..facts.lanes },
        };
        Ok(Facts { lanes, ..facts })
    }

    fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        let Adds::Copies(_, each) = self.adds else { return self.inner.resident_within(file, range) };
        let copies = (0..range.end.div_ceil(each)).step_by(2).map(|number| number * each..(number + 1) * each);
        let within = copies.map(|copy| copy.start.max(range.start)..copy.end.min(range.end));
        let ranges = within.filter(|copy| copy.start < copy.end).collect();
        Ok(Residency { ranges, ..Residency::default() })
    }

    fn verify(&self, file: u32) -> Result<()> {
        self.inner.verify(file)
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let mut sources = self.inner.clone().sources(request)?;
        let lanes = vec![if matches!(self.adds, Adds::Landing) { LANDS } else { COPY }];
        let (queue, given_up, wake) = (Vec::new(), Vec::new(), Wake::new()?);
        sources.push(LaneSource { lanes, source: Box::new(Polled { objects: self, queue, given_up, wake }) });
        Ok(sources)
    }
}

/// The source of the added lane: reads when it is polled, one read at a time.
struct Polled {
    objects: Arc<WrappedObjects>,
    queue: Vec<Read>,
    given_up: Vec<Ticket>,
    wake: Wake,
}

impl Polled {
    fn perform(&self, read: Read) -> Progress {
        let bytes = match self.objects.bytes(&read) {
            Ok(bytes) => bytes,
            Err(cause) => return Progress::Refused { read, cause },
        };
        let mut seen = self.objects.seen.lock().unwrap();
        seen.bytes += read.len;
        let lands = matches!(self.objects.adds, Adds::Landing);
        seen.early += usize::from(lands && seen.fences.is_empty());
        let places = match &read.into {
            Destination::Memory(to) => vec![(*to, read.len as usize)],
            Destination::Scatter(places) => places.clone(),
            _ => unreachable!("nothing else is asked for here"),
        };
        let mut left = &bytes[..];
        for (to, len) in places {
            let (part, rest) = left.split_at(len);
            left = rest;
            if !to.is_null() {
                let to = if lands { pointer(to as u64) as *mut u8 } else { to };
                // SAFETY: the read's `keep` keeps `len` bytes there for us.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, len) };
            }
        }
        let (ticket, lane, written) = (read.ticket, read.lane, read.len);
        Progress::Done(Done { ticket, result: Ok(written), lane, written })
    }
}

impl Source for Polled {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if self.queue.len() == 4 {
            return Err(read);
        }
        self.queue.push(read);
        self.wake.notify();
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.wake.clear();
        for ticket in self.given_up.drain(..) {
            let error = Error::new(ErrorKind::Cancelled, "the load was cancelled before this was read");
            events.push(Progress::Done(Done { ticket, result: Err(error), lane: COPY, written: 0 }));
        }
        if !self.queue.is_empty() {
            let read = self.queue.remove(0);
            events.push(self.perform(read));
        }
        if !self.queue.is_empty() {
            self.wake.notify();
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.given_up.extend(self.queue.drain(..).map(|read| read.ticket));
        self.wake.notify();
    }

    fn wake(&self) -> RawFd {
        self.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.queue.len() + self.given_up.len()
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.objects.seen.lock().unwrap().fences.push(fence);
        Ok(())
    }
}
