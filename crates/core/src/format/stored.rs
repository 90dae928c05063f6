//! Opening a checkpoint in a store: which objects its address stands for, and their headers, several at a time.

use super::checkpoint::{Checkpoint, Seeded};
use super::discover::{self, ToOpen};
use super::index::{Index, MAX_INDEX};
use super::join::{indexed, merge, read_all};
use super::shard::{self, Shard, FIRST_READ};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Location, Object, Store, Watch};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// Where something is, and the store that has it; `None`: a file of this machine.
pub(super) type Stored = (Location, Option<Arc<dyn Store>>);

/// Opens what these places stand for: one address (of an object, an index, or all under it), or a list of objects and
/// files, in any stores.
pub(super) fn open(mut places: Vec<Stored>, watch: &Watch) -> Result<Checkpoint> {
    let hasher = Seeded::default();
    if let [(at, Some(store))] = &places[..] {
        let (files, index) = found(&**store, at, watch)?;
        let paths = |files: &[Location]| files.iter().map(as_path).collect::<Vec<_>>();
        let Some(at) = index else {
            let shards = read_all(&files, watch, |at| header(&**store, at, &hasher, watch))?;
            let warnings = if files.len() > 1 { discover::incomplete_sets(&paths(&files)) } else { Vec::new() };
            return merge(paths(&files).into_iter().zip(shards).collect(), hasher, warnings);
        };
        let index = located(&at, read_index(&**store, &at, &hasher, watch))?;
        let name = |&number: &u32| at.sibling(&index.files[number as usize].to_string_lossy());
        let files: Vec<Location> = index.in_natural_order().iter().map(name).collect();
        let shards = read_all(&files, watch, |at| header(&**store, at, &hasher, watch))?;
        return indexed(&as_path(&at), &index, paths(&files), shards, hasher);
    }
    let listed = discover::in_order(places.iter().map(|(at, _)| as_path(at)).collect())?;
    places.sort_by_key(|(at, _)| listed.iter().position(|path| path == at.as_path()));
    let shards = read_all(&places, watch, |(at, store)| match store {
        Some(store) => header(&**store, at, &hasher, watch),
        None => shard::open(at.as_path(), &hasher, watch),
    })?;
    let warnings = discover::incomplete_sets(&listed);
    merge(listed.into_iter().zip(shards).collect(), hasher, warnings)
}

/// The objects that an address stands for, or the index that names them.
fn found(store: &dyn Store, at: &Location, watch: &Watch) -> Result<(Vec<Location>, Option<Location>)> {
    if as_path(at).extension().is_some_and(|end| end == "json") {
        return Ok((Vec::new(), Some(at.clone())));
    }
    let asking = watch.ask(at.as_path());
    let listed = located(at, store.list(at))?;
    drop(asking);
    if listed == [at.clone()] {
        return Ok((listed, None));
    }
    // As in a folder, what lies deeper is another checkpoint.
    let address = at.to_string();
    let folder = format!("{}/", address.trim_end_matches('/'));
    let direct = |location: Location| {
        let text = location.to_string();
        let name = text.strip_prefix(&folder).filter(|name| !name.is_empty() && !name.contains('/'))?;
        Some((OsString::from(name), location))
    };
    let found: Vec<(OsString, Location)> = listed.into_iter().filter_map(direct).collect();
    let of = |name: &OsString| found.iter().find(|(known, _)| known == name).map(|(_, location)| location.clone());
    match discover::choose(at.as_path(), found.iter().map(|(name, _)| name.clone()).collect())? {
        ToOpen::Index(name) => Ok((Vec::new(), of(&name))),
        ToOpen::Files(names) => Ok((names.iter().filter_map(of).collect(), None)),
    }
}

fn read_index(store: &dyn Store, at: &Location, hasher: &Seeded, watch: &Watch) -> Result<Index> {
    let asking = watch.ask(at.as_path());
    let head = store.head(at, FIRST_READ)?;
    asking.answered();
    Index::check_size(head.size)?;
    let mut bytes = head.bytes;
    if (bytes.len() as u64) < head.size.min(MAX_INDEX) {
        let object = Object { location: at.clone(), size: head.size, version: head.version };
        bytes.extend(store.read(&object, bytes.len() as u64..head.size)?);
    }
    // From here on, only the parse takes time.
    drop(asking);
    Index::of(&bytes, hasher, watch)
}

fn header(store: &dyn Store, at: &Location, hasher: &Seeded, watch: &Watch) -> Result<Shard> {
    let read = || {
        let asking = watch.ask(at.as_path());
        let head = store.head(at, FIRST_READ)?;
        asking.answered();
        let (size, mut bytes) = (head.size, head.bytes);
        if (bytes.len() as u64) < size.min(FIRST_READ) {
            let text = format!("the store gave {} of the first {} bytes", bytes.len(), size.min(FIRST_READ));
            return Err(Error::new(ErrorKind::Truncated, text));
        }
        let data_start = shard::data_start(&bytes, size)?;
        let object = Object { location: at.clone(), size, version: head.version };
        if (bytes.len() as u64) < data_start {
            bytes.extend(store.read(&object, bytes.len() as u64..data_start)?);
        }
        drop(asking);
        let mut shard = shard::parse(&bytes, size, hasher)?;
        (shard.version, shard.header_read) = (object.version, bytes.len() as u64);
        shard.location = Some(object.location);
        Ok(shard)
    };
    located(at, read())
}

fn located<T>(at: &Location, result: Result<T>) -> Result<T> {
    result.map_err(|e| e.at(at.as_path()))
}

fn as_path(at: &Location) -> PathBuf {
    at.as_path().to_path_buf()
}
