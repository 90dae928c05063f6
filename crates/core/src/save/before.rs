//! The checkpoint that is under an address when a save begins: found out by questions that the caller may give up.

use super::names::{belongs, index_of, INDEX_SUFFIX, SUFFIX};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::store::upload::{UploadWatch, Uploads};
use crate::store::{Location, Store, Waiting, Watch};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};

/// The name of a single file that hides an index, for readers such as transformers. Of other names the index hides the file.
pub(super) const HIDES: &str = "model.safetensors";
/// The name of the index that readers look for.
const USUAL_INDEX: &str = "model.safetensors.index.json";
/// Bytes of an index, at most. The largest known checkpoints have 40 MB.
const LONGEST_INDEX: u64 = 400_000_000;

/// The checkpoint of this name that was there when the save began.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// Objects that the new checkpoint replaces, the index first.
    pub(super) earlier: Vec<Location>,
    /// The names of all objects of the folder.
    pub(super) names: HashSet<OsString>,
    /// The single file and its version.
    pub(super) single: Option<(Location, Option<String>)>,
    /// The index and its version.
    pub(super) index: Option<(Location, Option<String>)>,
    /// The name of a single file that would hide the index; `None`: that file was there at the start.
    pub(super) appears: Option<Location>,
    /// The lock that keeps the index or the single file from being deleted, in words.
    pub(super) lock: Option<String>,
    /// True if the server does not say which objects there are.
    pub(super) is_unlisted: bool,
    /// The refusals.
    pub(super) fallbacks: Vec<Fallback>,
}

/// The questions before a save.
pub(super) struct Asker<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) uploads: &'a dyn Uploads,
    pub(super) watch: &'a Watch,
}

/// A question whose caller may give up.
struct PlaceQuestion<'w>(&'w Watch, Waiting<'w>);

impl UploadWatch for PlaceQuestion<'_> {
    fn check(&self) -> Result<()> {
        match self.0.is_given_up() {
            true => Err(Error::new(ErrorKind::Cancelled, "nobody waits for it any more")),
            false => Ok(()),
        }
    }

    fn moved(&self) {
        self.1.answered();
    }
}

impl Asker<'_> {
    /// The answer of a service that takes objects.
    pub(super) fn ask<T>(
        &self,
        at: &Location,
        question: impl FnOnce(&dyn Uploads, &dyn UploadWatch) -> Result<T>,
    ) -> Result<T> {
        question(self.uploads, &PlaceQuestion(self.watch, self.watch.ask(at.as_path()))).map_err(|e| e.at(at))
    }

    /// The objects of a folder.
    pub(super) fn list(&self, folder: &Location) -> Result<Vec<Location>> {
        let _asking = self.watch.ask(folder.as_path());
        match self.store.list(&in_folder(folder)) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(|e| e.at(folder)),
        }
    }

    /// The shards that an index names, as it spells them.
    fn shards_of(&self, index: &Location) -> Result<HashSet<String>> {
        let check = |size: u64| match size <= LONGEST_INDEX {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Index, format!("an index of {size} bytes is over {LONGEST_INDEX}"))),
        };
        let text = self.store.content(index, LONGEST_INDEX, self.watch, &check).map_err(|e| e.at(index))?;
        let none = |why: String| Error::new(ErrorKind::Index, format!("it is no index: {why}")).at(index);
        let read: serde_json::Value = serde_json::from_slice(&text).map_err(|e| none(e.to_string()))?;
        let map = read["weight_map"].as_object().ok_or_else(|| none("it has no `weight_map`".to_owned()))?;
        Ok(map.values().filter_map(|name| name.as_str().map(str::to_owned)).collect())
    }

    /// The object at an address, with its version. `lock` becomes the lock on it, if it has one.
    fn object(&self, at: Location, lock: &mut Option<String>) -> Result<Option<(Location, Option<String>)>> {
        match self.ask(&at, |uploads, watch| uploads.state(&at, watch)) {
            Ok(None) => Ok(None),
            Ok(Some(state)) => {
                *lock = state.lock.or(lock.take());
                Ok(Some((at, Some(state.version))))
            }
            // Nobody may look at it: then there is no condition.
            Err(e) if is_refusal(&e) => Ok(Some((at, None))),
            Err(e) => Err(e),
        }
    }
}

impl Before {
    /// The object that a save of one file replaces.
    pub(super) fn of_object(asker: &Asker<'_>, at: Location) -> Result<Before> {
        let mut lock = None;
        let single = asker.object(at, &mut lock)?;
        Ok(Before { single, lock, ..Before::default() })
    }

    /// The checkpoint of this name in a folder.
    pub(super) fn find(asker: &Asker<'_>, folder: &Location, name: &str) -> Result<Before> {
        let (single, index) = visible(folder, name);
        let listed = match asker.list(folder) {
            Ok(listed) => listed,
            Err(e) if is_refusal(&e) => {
                let reason = e.message().to_owned();
                let told = Fallback { from: "listing the prefix", to: "leaving what is there", reason };
                let mut lock = None;
                let (single, index) = (asker.object(single, &mut lock)?, asker.object(index, &mut lock)?);
                let fallbacks = vec![told];
                return Ok(Before { single, index, lock, is_unlisted: true, fallbacks, ..Before::default() });
            }
            Err(e) => return Err(e),
        };
        let mut before = Before {
            names: listed.iter().map(|at| at.file_name().to_owned()).collect(),
            appears: (!listed.contains(&single) && name == HIDES).then(|| single.clone()),
            ..Before::default()
        };
        if listed.contains(&single) {
            before.single = asker.object(single, &mut before.lock)?;
        }
        if listed.contains(&index) {
            before.index = asker.object(index, &mut before.lock)?;
        }
        before.find_earlier(asker, listed, name);
        Ok(before)
    }

    /// True if a shard of this name may replace another object, or hide the index. A listing has no objects of folders below.
    pub(super) fn may_have(&self, shard: &OsStr) -> bool {
        self.is_unlisted || self.names.contains(shard) || shard == HIDES || shard.as_encoded_bytes().contains(&b'/')
    }

    /// The name of another checkpoint of the folder that readers take in place of one of this name.
    pub(super) fn preferred_to(&self, name: &str) -> Option<&'static str> {
        let usual = [HIDES, USUAL_INDEX];
        usual.into_iter().find(|there| name != HIDES && self.names.contains(OsStr::new(there)))
    }

    /// Finds the objects of the earlier checkpoint. Of shards these are what its index names: others may be those of a save
    /// that is under way.
    fn find_earlier(&mut self, asker: &Asker<'_>, listed: Vec<Location>, name: &str) {
        let shards = self.index.as_ref().map(|(at, _)| asker.shards_of(at)).transpose();
        let shards = shards.unwrap_or_else(|e| {
            let reason = e.to_string();
            self.fallbacks.push(Fallback { from: "reading the earlier index", to: "leaving its shards", reason });
            None
        });
        let shards = shards.unwrap_or_default();
        // Another checkpoint may have shards whose names say nothing about theirs.
        let is_index = |at: &&Location| at.as_path().to_str().is_some_and(|text| text.ends_with(INDEX_SUFFIX));
        let is_alone = listed.iter().filter(is_index).count() <= 1;
        let is_earlier = |at: &Location| {
            let Some(found) = at.file_name().to_str() else { return false };
            let is_shard = shards.contains(found) && found.ends_with(SUFFIX);
            (belongs(found, name) && (found == name || found.ends_with(INDEX_SUFFIX) || is_shard))
                || (is_shard && is_alone)
        };
        self.earlier = listed.into_iter().filter(is_earlier).collect();
        self.earlier.sort_by_key(|at| at.ending() != Some("json"));
    }
}

/// True if a server lets these credentials not do that.
pub(super) fn is_refusal(e: &Error) -> bool {
    e.kind() == ErrorKind::Permission && e.status().is_some()
}

/// True if the server has not carried out the request that failed with this error.
pub(super) fn has_done_nothing(e: &Error) -> bool {
    let is_refused = e.status().is_some_and(|status| (400..500).contains(&status) && status != 408);
    is_refused || matches!(e.kind(), ErrorKind::Changed | ErrorKind::Permission)
}

/// The single file and the index of a checkpoint of this name.
fn visible(folder: &Location, name: &str) -> (Location, Location) {
    (folder.within(OsStr::new(name)), folder.within(OsStr::new(&index_of(name))))
}

/// The address as a listing wants it: a folder.
fn in_folder(folder: &Location) -> Location {
    match folder {
        Location::Url(text) if !text.ends_with('/') => Location::Url(format!("{text}/")),
        other => other.clone(),
    }
}
