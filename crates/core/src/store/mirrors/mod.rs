//! Mirrors: other nodes that serve what their disk caches have. An object comes from a mirror that has it in that very version,
//! block by block, and from its own server where no mirror does.
//!
//! A mirror names an object by the text that names it for everybody, its version and its size: the name of its entry in a disk
//! cache. So a mirror cannot give bytes of another version without lying, and it needs no credentials of the server. For each
//! object it also has a board: a bit for each block that is there. Nodes that load at the same time begin at different blocks,
//! and look at each other's boards while they go on.

mod choice;
mod meter;
mod names;
mod resting;
#[cfg(test)]
mod simulator;
mod source;

use self::choice::Mirrored;
pub use self::names::{board_etag, board_size, mirrored_etag, BOARD, MIRRORED};
use self::resting::{is_not_there, Resting};
use self::source::{MirrorLink, MirrorSource};
use super::disk_cache::{node_of, CacheKey, BLOCK};
use super::facts::Facts;
use super::location::Location;
use super::look::Look;
use super::object::{Head, Object, Objects, Store, Traffic};
use super::read_cost::Sample;
use super::residency::Residency;
use super::upload::Uploads;
use super::version::Version;
use crate::error::{Error, ErrorKind, Result};
use crate::source::{LaneSource, SourceRequest};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store whose objects mirrors may have.
#[derive(Debug)]
pub(crate) struct MirroredStore {
    inner: Arc<dyn Store>,
    /// The mirrors, or why one of them cannot be asked.
    mirrors: Result<Vec<Mirror>>,
    /// The mirrors that single reads do not ask.
    resting: Arc<Resting>,
    /// The folder of this node's disk cache.
    cache: Option<PathBuf>,
    /// Most bytes that a load receives in a second, from the server and from mirrors.
    bandwidth: Option<u64>,
}

/// A mirror: its address, without a slash at its end, and the store that asks it.
pub(crate) type Mirror = (String, Arc<dyn Store>);

impl MirroredStore {
    pub(crate) fn new(
        inner: Arc<dyn Store>,
        mirrors: Result<Vec<Mirror>>,
        cache: Option<PathBuf>,
        bandwidth: Option<u64>,
    ) -> MirroredStore {
        let resting = Arc::new(Resting::of(mirrors.as_ref().map_or(0, Vec::len)));
        MirroredStore { inner, mirrors, resting, cache, bandwidth }
    }

    /// The name of an object on mirrors; `None`: it has none.
    fn id(&self, object: &Object) -> Option<String> {
        let Version::Strong(version) = &object.version else { return None };
        // Code comes from its own server alone.
        if object.location.ending().is_some_and(|ending| ending.eq_ignore_ascii_case("py")) {
            return None;
        }
        let name = self.inner.identity(&object.location)?;
        (object.size > 0).then(|| CacheKey::new(&name, "").object_id(version, object.size))
    }

    /// The objects on a mirror: those of the load, then their boards.
    fn on_mirror(&self, address: &str, ids: &[Option<(String, u64)>]) -> Vec<Option<Object>> {
        let at = |name: &str, end: &str| Location::Url(format!("{address}/{MIRRORED}/{name}{end}"));
        let data = |(id, size): &(String, u64)| {
            let version = Version::Strong(mirrored_etag(id));
            Object { location: at(id, ""), size: *size, version }
        };
        let board = |(id, size): &(String, u64)| {
            let version = Version::Weak(board_etag(id));
            Object { location: at(id, BOARD), size: board_size(*size), version }
        };
        let data = ids.iter().map(|id| id.as_ref().map(data));
        data.chain(ids.iter().map(|id| id.as_ref().map(board))).collect()
    }
}

impl Store for MirroredStore {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        self.inner.list(at)
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        // What is wrong with a mirror's address shows before anything is loaded.
        self.mirrors.as_ref().map_err(Error::clone)?;
        self.inner.head(at, first)
    }

    /// Long parts come from a mirror, if one has them: blocks that the disk did not take in time are asked for again so.
    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        let long = range.end - range.start >= BLOCK;
        if let Some(id) = self.id(object).filter(|_| long) {
            for (number, (address, store)) in self.mirrors.iter().flatten().enumerate() {
                let on_mirror = self.on_mirror(address, &[Some((id.clone(), object.size))]);
                let Some(Some(there)) = on_mirror.first().filter(|_| !self.resting.rests(number)) else { continue };
                match store.read(there, range.clone()) {
                    Ok(bytes) if bytes.len() as u64 == range.end - range.start => return Ok(bytes),
                    // It may have it later, and others may be there.
                    Err(e) if is_not_there(&e) => {}
                    _ => self.resting.begin(number),
                }
            }
        }
        self.inner.read(object, range)
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        let id = |object: &Option<Object>| object.as_ref().and_then(|object| Some((self.id(object)?, object.size)));
        let ids: Vec<Option<(String, u64)>> = objects.iter().map(id).collect();
        let mirror = |(address, store): &Mirror| Ok((address.clone(), store.objects(self.on_mirror(address, &ids))?));
        let mirrors = self.mirrors.clone()?.iter().map(mirror).collect::<Result<_>>()?;
        let mirrored = |(id, size): (String, u64)| Mirrored { name: number_of(&id), size };
        let mirrored = ids.into_iter().map(|id| id.map(mirrored)).collect();
        let node = match self.cache.as_deref().map_or(0, node_of) {
            // Nobody takes anything from a node without a cache.
            0 => RandomState::new().hash_one(0),
            node => node,
        };
        let (inner, resting) = (self.inner.objects(objects)?, self.resting.clone());
        let bandwidth = self.bandwidth;
        Ok(Arc::new(MirroredObjects { inner, mirrors, mirrored, node, bandwidth, resting }))
    }

    fn identity(&self, at: &Location) -> Option<String> {
        self.inner.identity(at)
    }

    fn uploads(&self) -> Result<Arc<dyn Uploads>> {
        self.inner.uploads()
    }

    fn look(&self, at: &Location, times: usize) -> Result<Look> {
        self.inner.look(at, times)
    }
}

/// A number made of a name: FNV-1a (Fowler, Noll, Vo 1991), which is the same on all machines.
fn number_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, text)
}

/// The objects of a load.
#[derive(Debug)]
struct MirroredObjects {
    inner: Arc<dyn Objects>,
    mirrors: Vec<(String, Arc<dyn Objects>)>,
    /// The objects that mirrors may have.
    mirrored: Vec<Option<Mirrored>>,
    /// The number of this node.
    node: u64,
    bandwidth: Option<u64>,
    resting: Arc<Resting>,
}

impl Objects for MirroredObjects {
    fn path(&self, file: u32) -> &Path {
        self.inner.path(file)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        let facts = self.inner.facts(file)?;
        let is_mirrored = self.mirrored.get(file as usize).is_some_and(Option::is_some);
        Ok(Facts { cut: if is_mirrored { Some(BLOCK) } else { facts.cut }, ..facts })
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

    fn traffic(&self) -> Option<Traffic> {
        self.inner.traffic()
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let mut own = self.inner.clone().sources(request)?;
        let lanes = own.first().map(|one| one.lanes.clone()).unwrap_or_default();
        let (Some(inner), true) = (own.pop(), own.is_empty()) else {
            return Err(internal("a mirrored store has one source; please report this"));
        };
        let link = |(address, objects): &(String, Arc<dyn Objects>)| -> Result<MirrorLink> {
            let (objects, request) = (objects.clone(), request.clone());
            let make = move || {
                let mut sources = objects.clone().sources(&request)?;
                let none = || internal("a mirror has no source; please report this");
                Ok(sources.pop().ok_or_else(none)?.source)
            };
            MirrorLink::new(Box::new(make), address.clone())
        };
        let links = self.mirrors.iter().map(link).collect::<Result<Vec<_>>>()?;
        let source = MirrorSource::new(
            inner.source,
            links,
            self.mirrored.clone(),
            self.node,
            self.bandwidth,
            self.resting.clone(),
        )?;
        Ok(vec![LaneSource { lanes, source: Box::new(source) }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A server: its bytes, or the status of its error.
    #[derive(Debug)]
    struct Answers(std::result::Result<u8, u16>, Arc<AtomicUsize>);

    impl Store for Answers {
        fn list(&self, _: &Location) -> Result<Vec<Location>> {
            Err(internal("not asked for"))
        }

        fn head(&self, _: &Location, _: u64) -> Result<Head> {
            Err(internal("not asked for"))
        }

        fn read(&self, _: &Object, range: Range<u64>) -> Result<Vec<u8>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            let failed = |status| Error::new(ErrorKind::Io, "it fails").answered(status, None);
            self.0.map(|byte| vec![byte; (range.end - range.start) as usize]).map_err(failed)
        }

        fn objects(&self, _: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
            Err(internal("not asked for"))
        }

        fn identity(&self, at: &Location) -> Option<String> {
            Some(at.to_string())
        }
    }

    fn object(name: &str) -> Object {
        let location = Location::Url(format!("http://bucket/{name}"));
        Object { location, size: 4 * BLOCK, version: Version::Strong("\"v\"".to_owned()) }
    }

    #[test]
    fn a_mirror_that_fails_is_asked_once_by_reads_that_wait() {
        let counts: [Arc<AtomicUsize>; 4] = Default::default();
        let answers = |number: usize, answer| Arc::new(Answers(answer, counts[number].clone()));
        let outcomes = [Err(503), Err(404), Ok(1)];
        let mirror =
            |(number, answer)| Ok((format!("http://mirror-{number}"), answers(number, answer) as Arc<dyn Store>));
        let mirrors = outcomes.into_iter().enumerate().map(mirror).collect();
        let store = MirroredStore::new(answers(3, Ok(9)), mirrors, None, None);
        for _ in 0..5 {
            assert_eq!(store.read(&object("a"), 0..BLOCK).unwrap(), vec![1; BLOCK as usize]);
        }
        // What is short, and code, comes from the server.
        assert_eq!(store.read(&object("a"), 0..9).unwrap(), [9; 9]);
        assert_eq!(store.read(&object("a.py"), 0..BLOCK).unwrap(), vec![9; BLOCK as usize]);
        let asked: Vec<usize> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        assert_eq!(asked, [1, 5, 5, 2]);
    }
}
