//! A store that wraps any other one, files of this machine included: its addresses begin with another prefix, and it counts.
//! It shows what a store over others takes: each method hands on.
#![allow(dead_code)]

use penstock::error::Result;
use penstock::extent::{Fence, Ticket};
use penstock::fallback::Fallback;
use penstock::source::{Destination, LaneSource, Progress, Read, Source, SourceRequest, Touches};
use penstock::store::{
    register, CheckSize, Facts, Head, Location, Look, Object, Objects, OpenObject, Questions, Residency, Sample, Store,
    Traffic, Watch,
};
use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The calls of each method of the store, and the reads in each lane.
pub(crate) type Counts = Arc<Mutex<BTreeMap<&'static str, u64>>>;

/// A store over another one: `SCHEME://x` is `x` within a place of that store.
#[derive(Debug)]
pub(crate) struct Counted {
    inner: Arc<dyn Store>,
    scheme: String,
    place: Location,
    counts: Counts,
}

impl Counted {
    /// Registers one for this scheme.
    pub(crate) fn register(scheme: &str, inner: Arc<dyn Store>, place: Location) -> Counts {
        let counts = Counts::default();
        let store = Counted { inner, scheme: scheme.to_owned(), place, counts: counts.clone() };
        register(scheme, Arc::new(store)).unwrap();
        counts
    }

    /// The store below; a call of this method is counted.
    fn below(&self, method: &'static str) -> &dyn Store {
        *self.counts.lock().unwrap().entry(method).or_default() += 1;
        &*self.inner
    }

    fn inward(&self, at: &Location) -> Location {
        let (scheme, at) = (format!("{}://", self.scheme), at.to_string());
        let name = at.strip_prefix(&scheme).unwrap();
        match &self.place {
            Location::Path(folder) => Location::Path(folder.join(name)),
            Location::Url(address) => Location::Url(format!("{address}/{name}")),
        }
    }

    fn outward(&self, at: &Location) -> Location {
        let place = format!("{}/", self.place);
        Location::Url(format!("{}://{}", self.scheme, at.to_string().strip_prefix(&place).unwrap()))
    }

    fn object(&self, object: &Object) -> Object {
        Object { location: self.inward(&object.location), ..object.clone() }
    }
}

impl Store for Counted {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        let listed = self.below("list").list(&self.inward(at))?;
        Ok(listed.iter().map(|found| self.outward(found)).collect())
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        self.below("head").head(&self.inward(at), first)
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        self.below("read").read(&self.object(object), range)
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        let objects = objects.iter().map(|object| object.as_ref().map(|object| self.object(object))).collect();
        Ok(Arc::new(CountedObjects { inner: self.below("objects").objects(objects)?, counts: self.counts.clone() }))
    }

    fn read_parts(&self, object: &Object, ranges: &[Range<u64>]) -> Result<Vec<u8>> {
        self.below("read_parts").read_parts(&self.object(object), ranges)
    }

    fn open<'w>(&'w self, at: &Location, first: u64, watch: &'w Watch) -> Result<OpenObject<'w>> {
        let OpenObject { head, mut read_on } = self.below("open").open(&self.inward(at), first, watch)?;
        let counted = move |bytes: &mut Vec<u8>, until| {
            *self.counts.lock().unwrap().entry("read on").or_default() += 1;
            read_on(bytes, until)
        };
        Ok(OpenObject { head, read_on: Box::new(counted) })
    }

    fn content(&self, at: &Location, most: u64, watch: &Watch, check: CheckSize<'_>) -> Result<Vec<u8>> {
        self.below("content").content(&self.inward(at), most, watch, check)
    }

    fn entries(&self, at: &Location, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        self.below("entries").entries(&self.inward(at), watch)
    }

    fn is_gone(&self, at: &Location, watch: &Watch) -> bool {
        self.below("is_gone").is_gone(&self.inward(at), watch)
    }

    fn is_link(&self, at: &Location) -> bool {
        self.below("is_link").is_link(&self.inward(at))
    }

    fn leads_to_known_disk(&self, at: &Location) -> bool {
        self.inner.leads_to_known_disk(&self.inward(at))
    }

    fn is_distant(&self) -> bool {
        self.inner.is_distant()
    }

    fn look(&self, at: &Location, times: usize) -> Result<Look> {
        self.below("look").look(&self.inward(at), times)
    }
}

/// The objects of the store below. Their reads are counted.
#[derive(Debug)]
struct CountedObjects {
    inner: Arc<dyn Objects>,
    counts: Counts,
}

impl Objects for CountedObjects {
    fn path(&self, file: u32) -> &Path {
        self.inner.path(file)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        self.inner.facts(file)
    }

    fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        self.inner.resident_within(file, range)
    }

    fn hole(&self, file: u32, direct: bool, sample: &Sample) -> Result<Option<u64>> {
        self.inner.hole(file, direct, sample)
    }

    fn to_map(&self, file: u32) -> Result<Option<Arc<OwnedFd>>> {
        self.inner.to_map(file)
    }

    fn verify(&self, file: u32) -> Result<()> {
        self.inner.verify(file)
    }

    fn pins_reads(&self, file: u32) -> bool {
        self.inner.pins_reads(file)
    }

    fn may_hang(&self) -> bool {
        self.inner.may_hang()
    }

    fn are_known_local(&self) -> bool {
        self.inner.are_known_local()
    }

    fn questions(&self) -> Option<&Questions> {
        self.inner.questions()
    }

    fn traffic(&self) -> Option<Traffic> {
        self.inner.traffic()
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let sources = self.inner.clone().sources(request)?;
        let counted = |LaneSource { lanes, source: inner }| LaneSource {
            lanes,
            source: Box::new(CountedSource { inner, counts: self.counts.clone() }),
        };
        Ok(sources.into_iter().map(counted).collect())
    }
}

/// A source whose reads are counted.
struct CountedSource {
    inner: Box<dyn Source>,
    counts: Counts,
}

impl Source for CountedSource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let lane = read.lane.name;
        self.inner.submit(read)?;
        *self.counts.lock().unwrap().entry(lane).or_default() += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.inner.poll(events)
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        self.inner.land(ticket, into, keep)
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

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.inner.wait_for(fence)
    }

    fn take_touches(&mut self) -> Touches {
        self.inner.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        self.inner.take_fallbacks()
    }
}
