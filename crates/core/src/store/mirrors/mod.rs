//! Mirrors: other nodes that serve what their disk caches have. An object comes from a mirror that has it in that very version,
//! block by block, and from its own server where no mirror does.
//!
//! A mirror names an object by the text that names it for everybody, its version and its size: the name of its entry in a disk
//! cache. So a mirror cannot give bytes of another version without lying, and it needs no credentials of the server. For each
//! object it also has a board: a bit for each block that is there. Nodes that load at the same time begin at different blocks,
//! and look at each other's boards while they go on.

mod names;
mod source;

pub use self::names::{board_etag, board_size, mirrored_etag, BOARD, MIRRORED};
use self::source::{MirrorLink, MirrorSource};
use super::disk_cache::{CacheKey, BLOCK};
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
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// A store whose objects mirrors may have.
#[derive(Debug)]
pub(crate) struct MirroredStore {
    inner: Arc<dyn Store>,
    /// The mirrors, or why one of them cannot be asked.
    mirrors: Result<Vec<Mirror>>,
}

/// A mirror: its address, without a slash at its end, and the store that asks it.
pub(crate) type Mirror = (String, Arc<dyn Store>);

impl MirroredStore {
    pub(crate) fn new(inner: Arc<dyn Store>, mirrors: Result<Vec<Mirror>>) -> MirroredStore {
        MirroredStore { inner, mirrors }
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
        let object = |name: String, size: u64, etag: String| {
            let location = Location::Url(format!("{address}/{MIRRORED}/{name}"));
            Some(Object { location, size, version: Version::Strong(etag) })
        };
        let data = ids.iter().map(|id| id.as_ref().and_then(|(id, size)| object(id.clone(), *size, mirrored_etag(id))));
        let board = |(id, size): &(String, u64)| object(format!("{id}{BOARD}"), board_size(*size), board_etag(id));
        let boards = ids.iter().map(|id| id.as_ref().and_then(board));
        data.chain(boards).collect()
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
            for (address, store) in self.mirrors.iter().flatten() {
                let [Some(there), ..] = &self.on_mirror(address, &[Some((id.clone(), object.size))])[..] else {
                    continue;
                };
                match store.read(there, range.clone()) {
                    Ok(bytes) if bytes.len() as u64 == range.end - range.start => return Ok(bytes),
                    _ => {}
                }
            }
        }
        self.inner.read(object, range)
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        let id = |object: &Option<Object>| object.as_ref().and_then(|object| Some((self.id(object)?, object.size)));
        let ids: Vec<Option<(String, u64)>> = objects.iter().map(id).collect();
        let mirror = |(address, store): &Mirror| store.objects(self.on_mirror(address, &ids));
        let mirrors = self.mirrors.clone()?.iter().map(mirror).collect::<Result<_>>()?;
        let sizes = ids.into_iter().map(|id| id.map(|(_, size)| size)).collect();
        Ok(Arc::new(MirroredObjects { inner: self.inner.objects(objects)?, mirrors, sizes }))
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

fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, text)
}

/// The objects of a load.
#[derive(Debug)]
struct MirroredObjects {
    inner: Arc<dyn Objects>,
    mirrors: Vec<Arc<dyn Objects>>,
    /// The size of each object that mirrors may have.
    sizes: Vec<Option<u64>>,
}

impl Objects for MirroredObjects {
    fn path(&self, file: u32) -> &Path {
        self.inner.path(file)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        let facts = self.inner.facts(file)?;
        let is_mirrored = self.sizes.get(file as usize).is_some_and(Option::is_some);
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
        let link = |objects: &Arc<dyn Objects>| -> Result<MirrorLink> {
            let mut sources = objects.clone().sources(request)?;
            let none = || internal("a mirror has no source; please report this");
            Ok(MirrorLink::new(sources.pop().ok_or_else(none)?.source, &self.sizes))
        };
        let links = self.mirrors.iter().map(link).collect::<Result<Vec<_>>>()?;
        let source = MirrorSource::new(inner.source, links, self.sizes.len() as u32)?;
        Ok(vec![LaneSource { lanes, source: Box::new(source) }])
    }
}
