//! The objects of a save in a bucket: parts are sent as they are filled, and nothing is written to a disk.
//!
//! A reader of the prefix sees the old checkpoint or the new one. One request makes the new one visible: the PUT of the index,
//! or the end of the upload of a single file. Where the old file would hide it, the removal of that file does. Shards get names
//! that are not there yet, so no shard of the old checkpoint is replaced while a reader has it. What was visible before goes
//! afterwards, the index first.
//!
//! Two saves to one prefix: the visible object is written on the condition that it is still the one that was there at the
//! start. The later save fails.

use super::before::{has_done_nothing, is_refusal, Asker, Before, HIDES};
use super::chunks::{Chunk, ChunkPart, Supply};
use super::journal::PushJournal;
use super::names::new_tag;
use super::plan::{FilePlan, SavePlan};
use super::service::{ServiceReport, WriterGuard};
use super::shared::{leaving_earlier, SaveShared};
use super::side_by_side::each;
use super::target::{SaveTarget, Written};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::store::upload::{Patient, Precondition, Upload, UploadWatch, Uploaded, Uploads};
use crate::store::{Location, Store, Watch};
use crate::sync::{lock, Mutex};
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a failed save takes at most to have the server forget its parts.
const CLEARING: Duration = Duration::from_secs(10);
/// How long a save that was given up waits for an answer which tells what there is to be cleared.
const LINGERING: Duration = Duration::from_secs(5);
/// Shards that become objects at the same time.
const ENDING: usize = 8;

/// See the module's documentation.
pub(super) struct ObjectsTarget {
    uploads: Arc<dyn Uploads>,
    folder: Location,
    objects: Vec<ObjectUnderWay>,
    /// Objects that come after the shards, and before the checkpoint is visible.
    small: Vec<(Location, Vec<u8>)>,
    /// The names of those that are there.
    replaced: Mutex<Vec<String>>,
    /// Bytes of each part but the last.
    part: u64,
    in_order: bool,
    index: Option<(Location, String)>,
    /// The index, when it is there.
    index_there: Mutex<Option<Uploaded>>,
    /// True if other ranks send the other objects of the checkpoint.
    is_share: bool,
    before: Before,
    journal: Option<PushJournal>,
    /// The new checkpoint, as readers see it now.
    visible: Mutex<Visible>,
}

/// The state of a new checkpoint for readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Visible {
    No,
    Yes,
    /// The server was asked for that, and has not said what came of it.
    Unknown,
}

/// One object of a save.
struct ObjectUnderWay {
    at: Location,
    size: u64,
    /// True if no other save gives this name.
    is_own_name: bool,
    stage: Mutex<UploadStage>,
}

enum UploadStage {
    Away,
    Sending(Arc<dyn Upload>),
    /// It may be there: the server was told that all parts are.
    Finishing(Arc<dyn Upload>),
    /// It is there.
    There(Uploaded),
}

/// The save that waits for an upload.
struct SaveWatch<'s>(&'s SaveShared);

impl UploadWatch for SaveWatch<'_> {
    fn check(&self) -> Result<()> {
        match self.0.is_over() {
            true => Err(Error::new(ErrorKind::Cancelled, "the save was given up")),
            false => Ok(()),
        }
    }

    fn moved(&self) {
        lock(&self.0.state).moved = Instant::now();
    }

    fn again(&self, why: &Error) {
        let reason = why.message().to_owned();
        self.0.count_retry(Fallback { from: "upload", to: "sending it again", reason });
    }
}

/// A save that waits for an answer which it needs, also when it was given up: for a while.
struct Lingering<'s>(SaveWatch<'s>, Mutex<Option<Instant>>);

impl<'s> Lingering<'s> {
    fn of(shared: &'s SaveShared) -> Lingering<'s> {
        Lingering(SaveWatch(shared), Mutex::new(None))
    }
}

impl UploadWatch for Lingering<'_> {
    fn check(&self) -> Result<()> {
        let Err(e) = self.0.check() else { return Ok(()) };
        let since = *lock(&self.1).get_or_insert_with(Instant::now);
        if since.elapsed() < LINGERING {
            return Ok(());
        }
        Err(e)
    }

    fn moved(&self) {
        self.0.moved();
    }

    fn again(&self, why: &Error) {
        self.0.again(why);
    }
}

/// The wait for the name of an upload. A try without an answer may have begun one too.
struct Beginning<'s>(Lingering<'s>, Option<&'s PushJournal>);

impl Beginning<'_> {
    fn note(&self, e: &Error) {
        if let (None, Some(journal)) = (e.status(), self.1) {
            journal.lost();
        }
    }
}

impl UploadWatch for Beginning<'_> {
    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn moved(&self) {
        self.0.moved();
    }

    fn again(&self, why: &Error) {
        self.note(why);
        self.0.again(why);
    }
}

/// A wait for at most so long.
struct Until(Instant);

impl UploadWatch for Until {
    fn check(&self) -> Result<()> {
        match Instant::now() < self.0 {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Timeout, "the server did not answer in time")),
        }
    }

    fn moved(&self) {}
}

impl ObjectsTarget {
    /// Asks what is under the address, and names the objects of a plan. Nothing is written.
    ///
    /// # Errors
    /// `Unsupported` where nothing can be written; `Permission`, `NotFound`, `Io` of the server; `Invalid` for an object that
    /// is too large for it.
    pub(super) fn new(
        mut plan: SavePlan,
        folder: &Location,
        store: &Arc<dyn Store>,
        checkpoint: Option<&str>,
        extent: u64,
        journal: Option<PushJournal>,
        watch: &Watch,
    ) -> Result<(ObjectsTarget, SavePlan, Vec<Fallback>)> {
        let uploads = store.uploads().map_err(|e| e.at(folder))?;
        let limits = uploads.limits();
        let part = part_of(&plan, &*uploads, extent).map_err(|e| e.at(folder))?;
        let asker = Asker { store: &**store, uploads: &*uploads, watch };
        let name = plan.files.first().map(|file| file.name.clone()).unwrap_or_default();
        let mut before = match checkpoint {
            Some(name) => Before::find(&asker, folder, name)?,
            None if plan.is_share => Before::default(),
            None => Before::of_object(&asker, folder.within(&name))?,
        };
        let is_tagged = needs_tag(&plan, folder, &before, &asker)?;
        if is_tagged {
            plan.tag_shards(&journal.as_ref().map_or_else(new_tag, |journal| journal.tag().to_owned()))?;
        }
        if let Some((name, there)) = checkpoint
            .filter(|_| journal.is_some())
            .and_then(|name| before.preferred_to(name).map(|there| (name, there)))
        {
            let reason = format!("{there} is there already, and readers prefer it to {name}");
            before.fallbacks.push(Fallback { from: "the pushed checkpoint", to: "another one for readers", reason });
        }
        let object = |file: &FilePlan| ObjectUnderWay {
            at: folder.within(&file.name),
            size: file.size,
            is_own_name: is_tagged || plan.is_share,
            stage: Mutex::new(UploadStage::Away),
        };
        let objects = plan.files.iter().map(object).collect();
        let index = plan.index_name().map(|name| folder.within(OsStr::new(&name))).zip(plan.index.clone());
        let (in_order, is_share) = (limits.in_order, plan.is_share);
        let (visible, fallbacks) = (Mutex::new(Visible::No), std::mem::take(&mut before.fallbacks));
        let small = std::mem::take(&mut plan.small).into_iter().map(|(name, bytes)| (folder.within(&name), bytes));
        let (small, folder) = (small.collect(), folder.clone());
        let target = ObjectsTarget {
            uploads,
            folder,
            objects,
            small,
            replaced: Mutex::new(Vec::new()),
            part,
            in_order,
            index,
            index_there: Mutex::default(),
            is_share,
            before,
            journal,
            visible,
        };
        Ok((target, plan, fallbacks))
    }

    /// Bytes of each chunk.
    pub(super) fn part(&self) -> u64 {
        self.part
    }

    /// Most requests at the same time.
    pub(super) fn connections(&self) -> usize {
        self.uploads.sender().connections()
    }

    /// True if a checkpoint is visible as soon as this object is there.
    fn is_visible(&self, object: &ObjectUnderWay) -> bool {
        self.index.is_none() && !self.is_share && object.at == self.objects[0].at
    }

    /// The condition of the visible object: it is as it was at the start.
    fn condition(&self, at: &Location) -> Precondition {
        let known = [&self.before.single, &self.before.index].into_iter().flatten().find(|(known, _)| known == at);
        match known {
            Some((_, Some(version))) => Precondition::Version(version.clone()),
            Some((_, None)) => Precondition::Always,
            None if self.before.is_unlisted => Precondition::Always,
            None => Precondition::Absent,
        }
    }

    fn upload(&self, object: &ObjectUnderWay, shared: &SaveShared) -> Result<Arc<dyn Upload>> {
        let mut stage = lock(&object.stage);
        match &*stage {
            UploadStage::Sending(upload) => Ok(upload.clone()),
            UploadStage::Finishing(_) | UploadStage::There(_) => {
                Err(Error::new(ErrorKind::Internal, "a part of an object that is complete"))
            }
            UploadStage::Away => {
                let condition = match self.is_visible(object) {
                    true => self.condition(&object.at),
                    false => Precondition::Unused,
                };
                // Its answer has the number by which it can be given up.
                let watch = Beginning(Lingering::of(shared), self.journal.as_ref());
                watch.0 .0.check()?;
                self.note(|journal| journal.begun(&object.at))?;
                let begun = self.uploads.begin(&object.at, object.size, self.part, &condition, &watch);
                let upload = begun.inspect_err(|e| watch.note(e))?;
                let upload: Arc<dyn Upload> = upload.into();
                *stage = UploadStage::Sending(upload.clone());
                if let Some(name) = upload.name() {
                    self.note(|journal| journal.uploading(&object.at, name))?;
                }
                Ok(upload)
            }
        }
    }

    /// Writes to the journal, if there is one.
    fn note(&self, line: impl FnOnce(&PushJournal) -> Result<()>) -> Result<()> {
        self.journal.as_ref().map_or(Ok(()), line)
    }

    fn send(&self, shared: &SaveShared, chunk: &Chunk, bytes: &[&[u8]]) -> Result<Written> {
        let (object, watch) = (&self.objects[chunk.file], SaveWatch(shared));
        let range = chunk.offset..chunk.offset + chunk.len;
        let located = |e: Error| of_writing(e.at(&object.at).range(range.clone()));
        let upload = self.upload(object, shared).map_err(located)?;
        upload.part((chunk.offset / self.part) as u32, chunk.offset, bytes, &watch).map_err(located)?;
        Ok(Written { direct: 0, calls: 1 })
    }

    fn finish(&self, object: &ObjectUnderWay, watch: &dyn UploadWatch) -> Result<()> {
        let mut stage = lock(&object.stage);
        if let UploadStage::Sending(upload) = &*stage {
            let upload = upload.clone();
            *stage = UploadStage::Finishing(upload.clone());
            let there = upload.finish(watch).map_err(|e| {
                if after(&e) == Visible::No {
                    // The server has not made the object. One with its name is another's.
                    *stage = UploadStage::Sending(upload.clone());
                }
                e.at(&object.at)
            })?;
            let version = there.version.clone();
            *stage = UploadStage::There(there);
            self.note(|journal| journal.there(&object.at, version.as_deref()))?;
        }
        Ok(())
    }

    /// Lets go of an object of a save that failed.
    fn clear_one(&self, object: &ObjectUnderWay, watch: &dyn UploadWatch) -> Result<()> {
        // A single file that is there is the new checkpoint. A shard is of no use without the index.
        let is_shard = !self.is_visible(object);
        let remove = || if is_shard { self.uploads.remove(&object.at, watch).map(drop) } else { Ok(()) };
        match std::mem::replace(&mut *lock(&object.stage), UploadStage::Away) {
            UploadStage::Away => Ok(()),
            UploadStage::Sending(upload) => upload.abort(watch),
            UploadStage::Finishing(upload) if object.is_own_name => upload.abort(watch).and_then(|()| remove()),
            UploadStage::Finishing(upload) => {
                upload.abort(watch)?;
                match is_shard && self.uploads.version(&object.at, watch)?.is_some() {
                    true => Err(Error::new(ErrorKind::Io, "it may be another program's")),
                    false => Ok(()),
                }
            }
            UploadStage::There(there) if is_shard && !object.is_own_name => self.remove_ours(&object.at, &there, watch),
            UploadStage::There(_) => remove(),
        }
    }

    /// Removes a shard whose name another save may give too, if it is still ours.
    fn remove_ours(&self, at: &Location, there: &Uploaded, watch: &dyn UploadWatch) -> Result<()> {
        // Some services put an ETag into quotes in their fields, and not in their texts.
        let bare = |version: &str| version.trim_matches('"').to_owned();
        match (self.uploads.version(at, watch)?, &there.version) {
            (None, _) => Ok(()),
            (Some(now), Some(ours)) if bare(&now) == bare(ours) => self.uploads.remove(at, watch).map(drop),
            (Some(_), Some(_)) => Err(Error::new(ErrorKind::Io, "another program has written it meanwhile")),
            (Some(_), None) => Err(Error::new(ErrorKind::Io, "it may be another program's")),
        }
    }

    /// All parts are sent: the shards become objects.
    fn finish_shards(&self, watch: &dyn UploadWatch) -> Result<()> {
        let shards: Vec<_> = self.objects.iter().filter(|object| !self.is_visible(object)).collect();
        each(&shards, ENDING.min(self.connections()), |object| {
            watch.check()?;
            self.finish(object, watch)
        })?;
        if !self.small.is_empty() {
            self.check_still(watch)?;
        }
        for (at, bytes) in &self.small {
            watch.check()?;
            self.uploads.put(at, bytes, &Precondition::Always, watch).map_err(|e| e.at(at))?;
            lock(&self.replaced).push(at.file_name().to_string_lossy().into_owned());
        }
        Ok(())
    }

    /// Asks before anything is replaced if the visible object is what it was at the start.
    fn check_still(&self, watch: &dyn UploadWatch) -> Result<()> {
        let at = self.index.as_ref().map_or(&self.objects[0].at, |(at, _)| at);
        let wanted = match self.condition(at) {
            Precondition::Always => return Ok(()),
            Precondition::Absent | Precondition::Unused => None,
            Precondition::Version(version) => Some(version),
        };
        match self.uploads.version(at, watch) {
            Ok(now) if now == wanted => Ok(()),
            Ok(_) => {
                let text = "another program has written this object meanwhile; nothing was replaced";
                Err(Error::new(ErrorKind::Changed, text).at(at))
            }
            // Nobody may look at it: the condition of its own request tells.
            Err(e) if is_refusal(&e) => Ok(()),
            Err(e) => Err(e.at(at)),
        }
    }

    /// The error of a save whose small files are there and whose checkpoint is not.
    fn with_replaced(&self, e: Error) -> Error {
        let replaced = lock(&self.replaced);
        match replaced.is_empty() {
            true => e,
            false => {
                e.reworded(|why| format!("{why}; these small files are the new ones already: {}", replaced.join(", ")))
            }
        }
    }

    /// Makes the new checkpoint visible.
    fn publish(&self, shared: &SaveShared, watch: &dyn UploadWatch) -> Result<()> {
        if self.is_share && self.index.is_none() {
            // Another rank does.
            *lock(&self.visible) = Visible::Yes;
            return Ok(());
        }
        let (visible, hides) = match &self.index {
            Some((at, text)) => {
                let put = || self.uploads.put(at, text.as_bytes(), &self.condition(at), watch);
                *lock(&self.index_there) = Some(self.show(shared, put)?);
                (at, self.before.single.as_ref().filter(|(at, _)| at.file_name() == HIDES))
            }
            None => {
                let object = &self.objects[0];
                self.show(shared, || self.finish(object, watch))?;
                (&object.at, self.before.index.as_ref().filter(|_| object.at.file_name() != HIDES))
            }
        };
        let hidden_since = self.index.as_ref().and(self.before.appears.as_ref());
        if let Some((at, version)) = hides {
            self.unhide(shared, visible, at, version.as_deref(), watch)?;
        } else if let Some(at) = hidden_since.filter(|at| matches!(self.uploads.version(at, watch), Ok(Some(_)))) {
            let text = "another program has written this object meanwhile, which hides the new index";
            return Err(self.taken_back(visible, Error::new(ErrorKind::Changed, text).at(at)));
        }
        *lock(&self.visible) = Visible::Yes;
        Ok(())
    }

    /// Sends a request that may make the new checkpoint visible. Until its answer is there, nobody knows: an owner that gives
    /// the save up sees that, or we see that it has.
    fn show<T>(&self, shared: &SaveShared, send: impl FnOnce() -> Result<T>) -> Result<T> {
        *lock(&self.visible) = Visible::Unknown;
        SaveWatch(shared).check().map_err(given_up).inspect_err(|_| *lock(&self.visible) = Visible::No)?;
        send().inspect_err(|e| *lock(&self.visible) = after(e))
    }

    /// Removes what hides the new checkpoint, if it is still what it was.
    fn unhide(
        &self,
        shared: &SaveShared,
        new: &Location,
        at: &Location,
        version: Option<&str>,
        watch: &dyn UploadWatch,
    ) -> Result<()> {
        *lock(&self.visible) = Visible::No;
        let removed = match self.uploads.version(at, watch) {
            Ok(None) => return Ok(()),
            Ok(Some(now)) if version.is_some_and(|version| version != now) => {
                Err(Error::new(ErrorKind::Changed, "another program has written this object meanwhile"))
            }
            Ok(Some(_)) => self.show(shared, || self.uploads.remove(at, watch).map(drop)),
            Err(e) => Err(e),
        };
        let Err(e) = removed else { return Ok(()) };
        if *lock(&self.visible) != Visible::No {
            return Err(e.at(at));
        }
        let text = "as long as it is there, readers take it for the checkpoint, so the old checkpoint stays";
        Err(self.taken_back(new, e.at(at).reworded(|why| format!("cannot remove it: {why}; {text}"))))
    }

    /// Removes the index or file that was to be visible, also for a save that was given up. Returns the error, with what stays.
    fn taken_back(&self, new: &Location, e: Error) -> Error {
        let removed = self.uploads.remove(new, &Until(Instant::now() + CLEARING));
        *lock(&self.visible) = if removed.is_ok() { Visible::No } else { Visible::Unknown };
        let Err(_) = removed else { return e };
        e.reworded(|why| format!("{why}; {} stays", new.as_path().display()))
    }

    /// True if this is so of something that is there by now.
    fn shows(&self, what: impl Fn(&Uploaded) -> bool) -> bool {
        let is_so = |object: &ObjectUnderWay| matches!(&*lock(&object.stage), UploadStage::There(there) if what(there));
        self.objects.iter().any(is_so) || lock(&self.index_there).as_ref().is_some_and(&what)
    }

    /// The guard against a second writer. That of a share is its index', which another rank may write.
    fn guard(&self) -> WriterGuard<'_> {
        let visible = match &self.index {
            Some((at, _)) => Some(at),
            None => self.objects.first().filter(|object| self.is_visible(object)).map(|object| &object.at),
        };
        match visible {
            _ if self.shows(|there| there.is_unguarded) => WriterGuard::Dropped,
            Some(at) if self.condition(at) == Precondition::Always => WriterGuard::Unasked(at),
            _ => WriterGuard::Condition { in_parts: visible.is_some() && self.index.is_none() },
        }
    }

    /// Tells what the report's reader cannot know of this bucket.
    fn tell_of_service(&self, shared: &SaveShared, watch: &dyn UploadWatch) {
        let report = ServiceReport { uploads: &*self.uploads, shared, watch };
        report.tell_of_guard(&self.folder, &self.guard());
        let index = self.index.as_ref().map(|(at, _)| at);
        if let Some(new) = index.or(self.objects.first().map(|object| &object.at)) {
            report.tell_of_versions(new, self.shows(|there| there.is_versioned), &self.before);
        }
    }

    /// True if this is the index of the earlier checkpoint, and another one by now.
    fn is_another_by_now(&self, at: &Location) -> bool {
        let Some((_, Some(version))) = self.before.index.as_ref().filter(|(index, _)| index == at) else {
            return false;
        };
        matches!(self.uploads.version(at, &Patient), Ok(Some(now)) if now != *version)
    }

    /// Removes the objects of the earlier checkpoint. What may not be removed is told, and stays.
    fn remove_earlier(&self, shared: &SaveShared) -> Result<()> {
        let index = self.index.iter().map(|(at, _)| at);
        let new: Vec<&Location> = self.objects.iter().map(|object| &object.at).chain(index).collect();
        let (mut stay, mut failed) = (Vec::new(), None);
        for at in self.before.earlier.iter().filter(|at| !new.contains(at)) {
            if self.is_another_by_now(at) {
                let text = "another program has written the index meanwhile: its checkpoint stays beside this one";
                return Err(Error::new(ErrorKind::Changed, text).at(at));
            }
            match self.uploads.remove(at, &Patient) {
                Ok(_) => {}
                Err(e) if is_refusal(&e) => stay.push((at, e)),
                Err(e) => {
                    let doing = "cannot remove this object of an earlier save (the new save is complete)";
                    failed.get_or_insert(e.at(at).reworded(|why| format!("{doing}: {why}")));
                }
            }
        }
        if let Some((_, e)) = stay.first() {
            let names: Vec<_> = stay.iter().map(|(at, _)| at.file_name().to_string_lossy().into_owned()).collect();
            let reason = format!("{} stay: {}", names.join(", "), e.message());
            shared.add_fallback(Fallback { from: "removing the earlier checkpoint", to: "leaving it", reason });
        }
        failed.map_or(Ok(()), Err)
    }
}

impl SaveTarget for ObjectsTarget {
    fn is_in_order(&self, _file: usize) -> bool {
        self.in_order
    }

    fn write(&self, shared: &SaveShared, chunk: &Chunk, from: *mut u8) -> Result<Written> {
        // SAFETY: a slab has room for a chunk, and it is this thread's alone.
        let bytes = unsafe { std::slice::from_raw_parts(from, chunk.len as usize) };
        self.send(shared, chunk, &[bytes])
    }

    fn write_from_place(&self, shared: &SaveShared, chunk: &Chunk, pieces: &[ChunkPart]) -> Result<Written> {
        let piece = |piece: &ChunkPart| match piece.from {
            // SAFETY: the save keeps the tensor's memory alive. If its owner writes to it meanwhile, the checksum does not fit,
            // and the server refuses the part.
            Supply::Host(at) => Ok(unsafe { std::slice::from_raw_parts(at as *const u8, piece.len as usize) }),
            _ => Err(Error::new(ErrorKind::Internal, "memory of a GPU was to be sent from its place")),
        };
        let bytes = pieces.iter().filter(|one| one.len > 0).map(piece).collect::<Result<Vec<&[u8]>>>()?;
        self.send(shared, chunk, &bytes)
    }

    fn seal(&self, shared: &SaveShared) -> Result<()> {
        self.finish_shards(&Lingering::of(shared)).map_err(of_writing)
    }

    fn conclude(&self, shared: &SaveShared) -> Result<()> {
        if !self.is_share || self.index.is_some() {
            SaveWatch(shared).check().map_err(given_up)?;
        }
        let watch = Lingering::of(shared);
        let published = self.finish_shards(&watch).and_then(|()| self.publish(shared, &watch));
        published.map_err(|e| self.with_replaced(of_writing(e)))?;
        let is_checked =
            |object: &ObjectUnderWay| matches!(&*lock(&object.stage), UploadStage::There(there) if there.is_checked);
        if let Some(object) = self.objects.iter().find(|object| !is_checked(object)) {
            let reason = format!("{}: the server says no checksum", object.at.as_path().display());
            shared.add_fallback(Fallback { from: "checksum by the server", to: "none", reason });
        }
        let removed = match self.is_share && SaveWatch(shared).check().is_err() {
            true => {
                shared.add_fallback(leaving_earlier());
                Ok(())
            }
            false => self.remove_earlier(shared).map_err(of_writing),
        };
        self.tell_of_service(shared, &watch);
        removed
    }

    fn clear(&self, _shared: &SaveShared, is_complete: bool) -> Vec<String> {
        let left = self.cleared(is_complete);
        if let Some(journal) = &self.journal {
            journal.end(left.is_empty());
        }
        self.uploads.sender().rest();
        left
    }

    fn may_be_visible(&self) -> bool {
        *lock(&self.visible) != Visible::No
    }

    fn uses_disk(&self) -> bool {
        false
    }

    fn grace(&self) -> Duration {
        LINGERING + CLEARING + Duration::from_secs(1)
    }
}

impl ObjectsTarget {
    /// Lets go of the objects of a save that failed. Returns those that stay.
    fn cleared(&self, is_complete: bool) -> Vec<String> {
        let visible = *lock(&self.visible);
        if is_complete || visible == Visible::Yes {
            return Vec::new();
        }
        if visible == Visible::Unknown {
            let text = "all objects of the new checkpoint, because it may be visible now";
            return vec![text.to_owned()];
        }
        let watch = Until(Instant::now() + CLEARING);
        let (mut left, mut reason) = (Vec::new(), None);
        for object in &self.objects {
            if let Err(e) = self.clear_one(object, &watch) {
                left.push(object.at.as_path().display().to_string());
                reason.get_or_insert(e);
            }
        }
        if let (Some(last), Some(e)) = (left.last_mut(), reason) {
            *last += &format!(" ({})", e.message());
        }
        left
    }
}

impl std::fmt::Debug for ObjectsTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectsTarget").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// True if shards need names that no other save gives: one is there, or the service may refuse it because it was.
fn needs_tag(plan: &SavePlan, folder: &Location, before: &Before, asker: &Asker<'_>) -> Result<bool> {
    if plan.index.is_none() || plan.is_share {
        return Ok(false);
    }
    if plan.files.iter().any(|file| before.may_have(&file.name)) {
        return Ok(true);
    }
    let names: Vec<Location> = plan.files.iter().map(|file| folder.within(&file.name)).collect();
    match asker.ask(folder, |uploads, watch| uploads.remembers(&names, watch)) {
        Err(e) if e.kind() == ErrorKind::Cancelled => Err(e),
        // Without an answer they may be refused.
        asked => Ok(asked.unwrap_or(true)),
    }
}

/// Bytes of each part of the objects of a plan.
fn part_of(plan: &SavePlan, uploads: &dyn Uploads, extent: u64) -> Result<u64> {
    let limits = uploads.limits();
    let largest = plan.files.iter().map(|file| file.size).max().unwrap_or_default();
    limits.part(largest, extent).ok_or_else(|| {
        let most = limits.most.saturating_mul(limits.parts);
        Error::invalid(format!("an object of {largest} bytes is too large for this service, which takes {most}"))
    })
}

/// The state of the checkpoint after the request that makes it visible has failed with this error.
fn after(e: &Error) -> Visible {
    match has_done_nothing(e) {
        true => Visible::No,
        false => Visible::Unknown,
    }
}

/// The error of a save that was given up in time.
fn given_up(e: Error) -> Error {
    e.reworded(|_| "the save was cancelled before its objects were visible".to_owned())
}

/// The same error as one of writing.
fn of_writing(e: Error) -> Error {
    match e.kind() {
        ErrorKind::Io => e.of_kind(ErrorKind::Write),
        _ => e,
    }
}
