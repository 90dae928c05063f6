//! A store with the disk cache in front of it. Each open asks the server for the version of an object, with the caller's
//! credentials. What the cache has of that version comes from there.
//!
//! An object that the cache has whole is, for a load, a file of this machine: mapped, or read in any way that its disk
//! allows. One that it has in part has two lanes.

use super::asking::{comes, AskingTurn, OwnClaims};
use super::cached_file::CachedFile;
use super::crew::{BlockBytes, CacheCrew};
use super::entry::own_process;
use super::hub::{HubLayout, HubPlace};
use super::inbox::CachedFiles;
use super::offline::{not_there, Unasked};
use super::progress::CacheProgress;
use super::source::{CacheSource, OfDropped};
use super::{BlockState, CacheEntry, CacheFolder, CacheKey, DiskCacheSettings, BLOCK};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{FileLanes, Lane};
use crate::source::{LaneSource, SourceRequest};
use crate::store::facts::Facts;
use crate::store::files::Files;
use crate::store::location::Location;
use crate::store::look::Look;
use crate::store::object::{content_of, CheckSize, CopyChecked, Head, Object, Objects, Store, Traffic};
use crate::store::read_cost::Sample;
use crate::store::residency::Residency;
use crate::store::stat::identity_of_open;
use crate::store::upload::Uploads;
use crate::store::version::{Identity, Version};
use crate::store::watch::{hearing, Watch};
use crate::sync::{lock, Mutex};
use crate::way::Routing;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// The store of a server, behind the cache.
#[derive(Debug)]
pub(crate) struct CachedStore {
    inner: Arc<dyn Store>,
    settings: DiskCacheSettings,
    offline: bool,
    /// Loads wait for the disk.
    waits: bool,
    /// Open as long as something uses it: a store that is kept for later holds no file of the disk.
    folder: Mutex<Weak<CacheFolder>>,
    /// Objects that were looked up lately: what they lack is written as it comes.
    small: Arc<CacheProgress>,
    /// The place of whole objects in huggingface_hub's cache.
    hub: Option<Arc<HubLayout>>,
    /// Small files that were asked for whole. Others go there when a load has ended, whose report tells of it.
    offered: Mutex<BTreeSet<String>>,
}

impl CachedStore {
    pub(crate) fn new(
        inner: Arc<dyn Store>,
        settings: DiskCacheSettings,
        offline: bool,
        waits: bool,
        hub: Option<Arc<HubLayout>>,
    ) -> CachedStore {
        let (folder, offered) = (Mutex::default(), Mutex::default());
        CachedStore { inner, settings, offline, waits, folder, small: CacheProgress::new(None), hub, offered }
    }

    fn folder(&self) -> Result<Arc<CacheFolder>> {
        if let Some(folder) = lock(&self.folder).upgrade() {
            return Ok(folder);
        }
        let folder = CacheFolder::open(&self.settings)?;
        *lock(&self.folder) = Arc::downgrade(&folder);
        Ok(folder)
    }

    /// The name of an object in the cache; or why it is not cached.
    fn key(&self, at: &Location) -> Result<Result<(Arc<CacheFolder>, CacheKey), String>> {
        let Some(name) = self.inner.identity(at) else { return Ok(Err("this store is not cached".to_owned())) };
        let folder = match self.folder() {
            Err(e) if e.kind() == ErrorKind::NoSpace => return Ok(Err(e.to_string())),
            folder => folder?,
        };
        if at.ending().is_some_and(|ending| ending.eq_ignore_ascii_case("py")) && !folder.is_private() {
            return Ok(Err("code is taken only from a folder that this user alone may write".to_owned()));
        }
        let key = CacheKey::new(&name, &at.to_string());
        Ok(Ok((folder, key)))
    }

    /// The place of an object in huggingface_hub's cache, if it was asked for whole.
    fn place_of_small(&self, at: &Location) -> Option<HubPlace> {
        let (hub, address) = (self.hub.as_ref()?, at.to_string());
        lock(&self.offered).contains(&address).then(|| hub.place(&address)).flatten()
    }

    /// An object of a strong version, with its entry; or why it is not cached.
    fn cached(&self, object: &Object, place: Option<HubPlace>) -> Result<Result<Arc<CachedFile>, String>> {
        let Version::Strong(version) = &object.version else {
            let why = "the server gives no strong ETag, so nobody can know that bytes are of the same version";
            return Ok(Err(why.to_owned()));
        };
        if object.size == 0 {
            return Ok(Err("it is empty".to_owned()));
        }
        let (folder, key) = match self.key(&object.location)? {
            Ok(found) => found,
            Err(why) => return Ok(Err(why)),
        };
        let entry = match folder.is_writable() && !self.offline {
            true => folder.find_or_make(&key, version, object.size).map(Some),
            false => folder.find(&key, version, object.size),
        };
        Ok(match entry {
            Ok(Some(entry)) => Ok(Arc::new(CachedFile::new(folder, entry, object.clone(), place))),
            Ok(None) => Err("the folder can only be read, and does not have it".to_owned()),
            // A disk that is full, or a file that is refused, costs the cache, not the load.
            Err(e) => Err(e.to_string()),
        })
    }

    /// The first bytes of an object that the cache has in its last version.
    fn head_of(&self, at: &Location, (version, size): (String, u64), first: u64) -> Result<Head> {
        let object = Object { location: at.clone(), size, version: Version::Strong(version) };
        let bytes = self.read(&object, 0..first.min(size))?;
        Ok(Head { bytes, size, version: object.version })
    }

    /// Keeps the whole blocks in `bytes`, which begin at `start`. Returns those that the writer has now.
    fn keep(&self, file: &Arc<CachedFile>, start: u64, bytes: &[u8]) -> Vec<u32> {
        let mut kept = Vec::new();
        if !file.is_writable() {
            return kept;
        }
        let entry = &file.entry;
        for block in whole_blocks(entry, &(start..start + bytes.len() as u64)) {
            let (own, range) = (entry.number(), entry.range(block));
            if matches!(entry.claim(block), Ok(BlockState::Claimed(holder)) if holder == own) {
                let part = bytes[(range.start - start) as usize..(range.end - start) as usize].to_vec();
                let again = self.settings.refetch.then(|| self.inner.clone());
                CacheCrew::process().write(file, block, BlockBytes::Own(part), &self.small, again);
                kept.push(block);
            }
        }
        kept
    }

    /// Asks the server for a part of an object.
    fn ask(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        match self.offline {
            true => Err(not_there(&range).at(&object.location)),
            false => self.inner.read(object, range),
        }
    }

    /// The same, in blocks that this process has claimed or nobody can claim.
    fn bring(&self, file: &Arc<CachedFile>, part: Range<u64>, claims: &mut OwnClaims<'_>) -> Result<Vec<u8>> {
        let came = file.heard(|| self.ask(&file.object, part.clone()))?;
        claims.are_written(&self.keep(file, part.start, &came));
        Ok(came)
    }

    /// The blocks of a part that others have, or bring at this moment.
    fn taken(&self, file: &Arc<CachedFile>, part: Range<u64>, claims: &mut OwnClaims<'_>) -> Result<Vec<u8>> {
        let entry = &file.entry;
        let blocks = entry.blocks_of(part.clone());
        let mut bytes = Vec::with_capacity((part.end - part.start) as usize);
        for block in blocks.clone() {
            let range = entry.range(block);
            let range = range.start.max(part.start)..range.end.min(part.end);
            let is_there = matches!(entry.state(block), Ok(BlockState::There));
            let is_there = is_there || comes(file, block, blocks.end - 1, claims)?;
            match is_there.then(|| self.read_kept(entry, range.clone())).flatten() {
                Some(kept) => bytes.extend(kept),
                None => {
                    let came = self.bring(file, range.clone(), claims)?;
                    let is_short = (came.len() as u64) < range.end - range.start;
                    bytes.extend(came);
                    if is_short {
                        break;
                    }
                }
            }
        }
        Ok(bytes)
    }

    /// Reads a part of an object that is cached: what this process is to bring first, so that others see it early.
    fn read_through(&self, file: &Arc<CachedFile>, range: &Range<u64>) -> Result<Vec<u8>> {
        let entry = &*file.entry;
        let wanted = entry.blocks_of(range.clone());
        let may_claim = file.is_writable() && entry.is_writable() && !self.offline;
        let run = if may_claim { whole_blocks(entry, range) } else { 0..0 };
        let Ok((mut claims, states)) = OwnClaims::of(entry, &wanted, run.clone()) else {
            return self.ask(&file.object, range.clone());
        };
        let own = entry.number();
        let is_others = |(block, state): &(u32, BlockState)| match state {
            BlockState::There => true,
            BlockState::Claimed(holder) => *holder != own && run.contains(block),
            BlockState::Missing => false,
        };
        let states: Vec<(u32, BlockState)> = wanted.clone().zip(states).collect();
        let mut parts: Vec<(Range<u64>, bool, Vec<u8>)> = Vec::new();
        for run in states.chunk_by(|one, next| is_others(one) == is_others(next)) {
            let (first, last) = (entry.range(run[0].0), entry.range(run[run.len() - 1].0));
            let part = range.start.max(first.start)..range.end.min(last.end);
            parts.push((part, is_others(&run[0]), Vec::new()));
        }
        for (part, _, bytes) in parts.iter_mut().filter(|(_, others, _)| !others) {
            *bytes = self.bring(file, part.clone(), &mut claims)?;
        }
        let mut all = Vec::with_capacity((range.end - range.start) as usize);
        for (part, others, bytes) in parts {
            let came = if others { self.taken(file, part.clone(), &mut claims)? } else { bytes };
            let is_short = (came.len() as u64) < part.end - part.start;
            all.extend(came);
            if is_short {
                break;
            }
        }
        Ok(all)
    }

    /// Has a small file that the cache has whole brought to its place in huggingface_hub's cache.
    fn offer(&self, at: &Location) -> Result<()> {
        let Some(place) = self.place_of_small(at) else { return Ok(()) };
        let Ok((folder, key)) = self.key(at)? else { return Ok(()) };
        let Some((version, size)) = folder.known(&key)? else { return Ok(()) };
        let object = Object { location: at.clone(), size, version: Version::Strong(version) };
        if let Ok(file) = self.cached(&object, Some(place))? {
            file.offer(&self.small);
        }
        Ok(())
    }

    /// Reads a part that the cache has; `None`: the disk does not give it, or not what was written.
    fn read_kept(&self, entry: &CacheEntry, range: Range<u64>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        entry.read(range.clone(), &mut bytes).ok()?;
        if self.settings.verify {
            for block in entry.blocks_of(range) {
                if !entry.verify(block).ok()? {
                    let _fetched_again = entry.forget(block);
                    return None;
                }
            }
        }
        Some(bytes)
    }
}

impl Store for CachedStore {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        let key = self.key(at)?.ok();
        if self.offline {
            let Some((folder, key)) = key else { return Err(not_there(&(0..0)).at(at)) };
            if folder.known(&key)?.is_some() {
                return Ok(vec![at.clone()]);
            }
            let names = folder.list(&key)?.ok_or_else(|| {
                let text = "the disk cache knows nothing of it, and offline=True asks no server";
                Error::new(ErrorKind::NotFound, text).at(at)
            })?;
            return Ok(names.into_iter().map(Location::Url).collect());
        }
        let listed = self.inner.list(at)?;
        if let Some((folder, key)) = key.filter(|(folder, _)| folder.is_writable() && listed != [at.clone()]) {
            let names: Vec<String> = listed.iter().map(Location::to_string).collect();
            // It serves only those who ask no server.
            let _not_kept = folder.note_list(&key, &names);
        }
        Ok(listed)
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        let Ok((folder, key)) = self.key(at)? else {
            return match self.offline {
                true => Err(not_there(&(0..first)).at(at)),
                false => self.inner.head(at, first),
            };
        };
        let known = folder.known(&key).ok().flatten();
        if self.offline {
            return self.head_of(at, known.ok_or_else(|| not_there(&(0..first)).at(at))?, first);
        }
        let has = |(version, size): &(String, u64)| {
            let Ok(Some(entry)) = folder.find(&key, version, *size) else { return false };
            let states = entry.states(entry.blocks_of(0..first.min(*size).max(1)));
            // What others bring is waited for.
            states.is_ok_and(|states| states.iter().all(|state| *state != BlockState::Missing))
        };
        let is_had = |known: &Option<(String, u64)>| known.as_ref().is_some_and(|known| known.1 > 0 && has(known));
        let asking = match !is_had(&known) && first >= BLOCK && folder.is_writable() {
            // Where nobody can claim it, each asks for itself.
            true => AskingTurn::begin(&folder, &key).ok(),
            false => None,
        };
        // The one that asked before may have ended since.
        let known = if asking.is_some() { folder.known(&key).ok().flatten() } else { known };
        let is_had = is_had(&known);
        let others = asking.as_ref().filter(|asking| !asking.is_ours());
        // One byte tells the version.
        let ask = if is_had || others.is_some() { 1 } else { first };
        let asked = |first: u64| {
            let folder = folder.clone();
            let heard = move || folder.beats.iter().for_each(|beats| beats.beat(own_process() << 16));
            hearing(heard, || self.inner.head(at, first))
        };
        let head = match asked(ask) {
            // Some servers send small objects only as a whole.
            Err(e) if ask < first && e.status() == Some(200) => asked(first)?,
            head => head?,
        };
        let Version::Strong(version) = &head.version else {
            // It had a strong version before.
            return if head.bytes.len() as u64 == first.min(head.size) { Ok(head) } else { self.inner.head(at, first) };
        };
        let found = (version.clone(), head.size);
        if folder.is_writable() && known.as_ref() != Some(&found) {
            // Without it, the next open asks for the first bytes again.
            let _not_noted = folder.note(&key, version, head.size);
        }
        if head.bytes.len() as u64 != first.min(head.size) {
            others.map_or(Ok(()), AskingTurn::wait)?;
            return self.head_of(at, found, first);
        }
        if head.bytes.len() as u64 >= BLOCK.min(head.size) && head.size > 0 {
            let object = Object { location: at.clone(), size: head.size, version: head.version.clone() };
            if let Ok(file) = self.cached(&object, self.place_of_small(at))? {
                self.keep(&file, 0, &head.bytes);
            }
        }
        Ok(head)
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        match self.cached(object, self.place_of_small(&object.location))? {
            Ok(file) => self.read_through(&file, &range),
            Err(_) => self.ask(object, range),
        }
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        let progress = CacheProgress::new(self.hub.is_some().then(|| self.small.clone()));
        let mut files: CachedFiles = Vec::new();
        let mut copies: Vec<(PathBuf, Identity)> = Vec::new();
        let place = |at: &Location| self.hub.as_ref().and_then(|hub| hub.place(&at.to_string()));
        for (number, object) in (0..).zip(&objects) {
            let file = match object {
                Some(object) => self.cached(object, place(&object.location))?.map_err(|why| {
                    progress.has_stopped(&format!("{}: {why}", object.location));
                    progress.takes_nothing(number, why);
                }),
                None => Err(()),
            };
            let file = file.ok();
            let is_whole = match &file {
                Some(file) => !self.settings.verify && file.entry.is_complete().unwrap_or_default(),
                None => false,
            };
            // The path of one that is not whole is never asked about.
            let copy = file.as_ref().filter(|_| is_whole).map(|file| copy_of(&file.entry)).transpose();
            copies.push(copy.inspect_err(|e| progress.has_failed(e)).ok().flatten().unwrap_or_default());
            files.push(file);
        }
        for (file, (copy, _)) in files.iter().zip(&copies) {
            file.iter().filter(|_| !copy.as_os_str().is_empty()).for_each(|file| file.offer(&progress));
        }
        if self.waits {
            say_what_has_no_room(&files, &progress);
        }
        let whole: Vec<bool> = copies.iter().map(|(path, _)| !path.as_os_str().is_empty()).collect();
        progress.has_copies(whole.clone());
        let inner = self.inner.objects(objects)?;
        // A process that was stopped may write a block that another one has written in its place.
        let (files, copies) = (Arc::new(files), Arc::new(Files::new(copies).rewritten()));
        let store = self.inner.clone();
        let dropped = match () {
            () if self.waits => OfDropped::Never,
            () if self.settings.refetch && !self.offline => OfDropped::AskedAgain,
            () => OfDropped::Forgotten,
        };
        Ok(Arc::new(CachedObjects { inner, store, dropped, offline: self.offline, files, copies, whole, progress }))
    }

    fn content(&self, at: &Location, most: u64, watch: &Watch, check: CheckSize<'_>) -> Result<Vec<u8>> {
        if self.hub.is_some() {
            lock(&self.offered).insert(at.to_string());
        }
        let bytes = content_of(self, at, most, watch, check)?;
        // Blocks that came now are offered when they are written.
        let _not_offered = self.offer(at);
        Ok(bytes)
    }

    fn identity(&self, at: &Location) -> Option<String> {
        self.inner.identity(at)
    }

    fn uploads(&self) -> Result<Arc<dyn Uploads>> {
        self.inner.uploads()
    }

    fn check_copy(&self, object: &Object, blocks: Range<u32>) -> Result<CopyChecked> {
        let (Version::Strong(version), Ok((folder, key))) = (&object.version, self.key(&object.location)?) else {
            return Ok(CopyChecked::default());
        };
        let Some(entry) = folder.find(&key, version, object.size)? else { return Ok(CopyChecked::default()) };
        let (_, bad) = entry.verify_run(blocks, entry.is_writable())?;
        Ok(CopyChecked { bad, stay: !entry.is_writable() })
    }

    fn look(&self, at: &Location, times: usize) -> Result<Look> {
        self.inner.look(at, times)
    }
}

/// The data file of a whole entry: the one that is open here, whatever file its name leads to by now.
fn copy_of(entry: &CacheEntry) -> Result<(PathBuf, Identity)> {
    let path = entry.data_path();
    Ok((path.to_path_buf(), identity_of_open(&*entry.file()?, path)?))
}

/// The blocks of an object that lie in this part of it.
fn whole_blocks(entry: &CacheEntry, part: &Range<u64>) -> Range<u32> {
    let first = part.start.div_ceil(BLOCK) as u32;
    let past = if part.end >= entry.size() { entry.blocks() } else { (part.end / BLOCK) as u32 };
    first..past.max(first)
}

/// Says of objects that lack something why the cache cannot take it: it is read-only, or smaller than all of them.
fn say_what_has_no_room(files: &CachedFiles, progress: &CacheProgress) {
    let wanted: u64 = files.iter().flatten().map(|file| file.entry.size()).sum();
    for (number, file) in (0..).zip(files).filter_map(|(number, file)| Some((number, file.as_ref()?))) {
        if file.entry.is_complete().unwrap_or_default() {
            continue;
        }
        if !file.is_writable() || !file.entry.is_writable() {
            progress.takes_nothing(number, "the folder can only be read".to_owned());
            continue;
        }
        let Ok(room) = file.folder.room() else { continue };
        let most = room.most.unwrap_or(u64::MAX).min(room.total.saturating_sub(room.keep));
        if wanted > most {
            let why =
                format!("disk_cache_size and disk_cache_free leave it {most} bytes, and all objects have {wanted}");
            progress.takes_nothing(number, why);
        }
    }
}

/// The objects of a load.
#[derive(Debug)]
struct CachedObjects {
    inner: Arc<dyn Objects>,
    store: Arc<dyn Store>,
    dropped: OfDropped,
    offline: bool,
    files: Arc<CachedFiles>,
    /// The files of those that the cache has whole.
    copies: Arc<Files>,
    /// True if it has them whole.
    whole: Vec<bool>,
    progress: Arc<CacheProgress>,
}

impl CachedObjects {
    fn is_whole(&self, file: u32) -> bool {
        self.whole.get(file as usize).copied().unwrap_or_default()
    }

    /// The objects that have a file.
    fn of(&self, file: u32) -> &dyn Objects {
        match self.is_whole(file) {
            true => &*self.copies,
            false => &*self.inner,
        }
    }

    fn cached(&self, file: u32) -> Option<&CachedFile> {
        self.files.get(file as usize)?.as_deref()
    }

    fn all_whole(&self) -> bool {
        self.files.iter().zip(&self.whole).all(|(file, whole)| *whole || file.is_none()) && self.whole.contains(&true)
    }
}

impl Objects for CachedObjects {
    fn path(&self, file: u32) -> &Path {
        self.inner.path(file)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        let facts = self.of(file).facts(file)?;
        match self.cached(file) {
            Some(_) if !self.is_whole(file) => {
                let lanes = FileLanes { near: Lane::DISK_CACHE, ..facts.lanes };
                Ok(Facts { lanes, cut: Some(BLOCK), ..facts })
            }
            _ => Ok(facts),
        }
    }

    fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        let Some(cached) = self.cached(file).filter(|_| !self.is_whole(file)) else {
            return self.of(file).resident_within(file, range);
        };
        let within = |there: Range<u64>| there.start.max(range.start)..there.end.min(range.end);
        let ranges = cached
            .entry
            .there()
            .unwrap_or_default()
            .into_iter()
            .map(within)
            .filter(|part| part.start < part.end)
            .collect();
        Ok(Residency { ranges, ..Residency::default() })
    }

    fn hole(&self, file: u32, direct: bool, sample: &Sample) -> Result<Option<u64>> {
        self.of(file).hole(file, direct, sample)
    }

    fn to_map(&self, file: u32) -> Result<Option<Arc<OwnedFd>>> {
        self.of(file).to_map(file)
    }

    fn verify(&self, file: u32) -> Result<()> {
        self.of(file).verify(file)
    }

    fn pins_reads(&self, file: u32) -> bool {
        self.of(file).pins_reads(file)
    }

    fn may_hang(&self) -> bool {
        !self.all_whole() && self.inner.may_hang()
    }

    fn traffic(&self) -> Option<Traffic> {
        self.inner.traffic()
    }

    fn disk_cache(&self) -> Option<Arc<CacheProgress>> {
        Some(self.progress.clone())
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let mut sources = Vec::new();
        if self.whole.contains(&true) {
            let lanes = vec![Lane::MAPPED, Lane::BUFFERED, Lane::DIRECT];
            let copies = self.copies.clone().sources(request)?;
            sources.extend(copies.into_iter().map(|copy| LaneSource { lanes: lanes.clone(), ..copy }));
        }
        if self.all_whole() {
            return Ok(sources);
        }
        // A block between two others that are asked for is there, or another process brings it.
        let routing = Arc::new(Routing { gap: Some(0), ..Routing::clone(&request.routing) });
        let inner: Vec<LaneSource> = match self.offline {
            true => vec![LaneSource::of_all(Unasked::new()?)],
            false => self.inner.clone().sources(&SourceRequest { routing, ..request.clone() })?,
        };
        for LaneSource { lanes, source } in inner {
            let (files, store) = (self.files.clone(), self.store.clone());
            let source = CacheSource::new(source, files, store, self.dropped, request.staging, &self.progress)?;
            let lanes = if lanes.is_empty() { vec![Lane::NETWORK, Lane::DISK_CACHE] } else { lanes };
            sources.push(LaneSource { lanes, source: Box::new(source) });
        }
        Ok(sources)
    }
}
