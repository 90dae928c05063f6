//! The files of one load, wherever they are: one set over the stores of a checkpoint.

use super::disk_cache::CacheProgress;
use super::facts::Facts;
use super::object::{Object, Objects, Store, Traffic};
use super::questions::Questions;
use super::read_cost::Sample;
use super::residency::Residency;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::FileLanes;
use crate::memory::Mapping;
use crate::source::{Dispatcher, SourceRequest};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// The files of one load.
#[derive(Debug)]
pub(crate) struct Storage {
    /// The objects of each store.
    stores: Vec<Arc<dyn Objects>>,
    files: Vec<StoredFile>,
    /// Questions to stores that do not count them.
    questions: Questions,
    /// The names of the ranks that load these files together.
    ranks: Vec<PathBuf>,
}

#[derive(Debug)]
struct StoredFile {
    /// Number of its store.
    store: usize,
    size: u64,
    asked: AtomicBool,
    /// The kernel has refused to map it.
    unmappable: AtomicBool,
}

impl Storage {
    /// The files of a checkpoint, in order: each object, and the store that has it. Nothing is opened yet.
    ///
    /// # Errors
    /// Errors of a store.
    pub(crate) fn new<'a>(objects: impl Iterator<Item = (Object, &'a Arc<dyn Store>)>) -> Result<Storage> {
        let mut stores: Vec<&Arc<dyn Store>> = Vec::new();
        let number = |(object, store): (Object, &'a Arc<dyn Store>)| {
            let known = stores.iter().position(|known| Arc::ptr_eq(known, store));
            (object, known.unwrap_or_else(|| (stores.len(), stores.push(store)).0))
        };
        let files: Vec<(Object, usize)> = objects.map(number).collect();
        let of = |(number, store): (usize, &Arc<dyn Store>)| {
            store.objects(files.iter().map(|(object, of)| (*of == number).then(|| object.clone())).collect())
        };
        let stores = stores.into_iter().enumerate().map(of).collect::<Result<_>>()?;
        let file = |(object, store): (Object, usize)| {
            let (asked, unmappable) = (AtomicBool::new(false), AtomicBool::new(false));
            StoredFile { store, size: object.size, asked, unmappable }
        };
        let questions = Questions::of(files.len());
        Ok(Storage { stores, files: files.into_iter().map(file).collect(), questions, ranks: Vec::new() })
    }

    /// The same files for one of several ranks: what comes from a rank is named by its host.
    #[must_use]
    pub(crate) fn with_ranks(mut self, hosts: &[String]) -> Storage {
        self.ranks = (0..).zip(hosts).map(|(rank, host)| format!("rank {rank} ({host})").into()).collect();
        self
    }

    /// The objects of the store that has the first file.
    pub(crate) fn first(&self) -> &Arc<dyn Objects> {
        &self.stores[0]
    }

    /// Number of files.
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }

    /// Where file number `file` is, for messages.
    pub(crate) fn path(&self, file: u32) -> &Path {
        self.of(file).path(file)
    }

    /// The name of a rank of this load, for messages.
    pub(crate) fn rank(&self, rank: u32) -> &Path {
        self.ranks.get(rank as usize).map_or(Path::new("another rank"), PathBuf::as_path)
    }

    /// Size of file number `file` in bytes, as it was when its header was read.
    pub(crate) fn size(&self, file: u32) -> u64 {
        self.file(file).size
    }

    fn file(&self, file: u32) -> &StoredFile {
        &self.files[file as usize]
    }

    fn of(&self, file: u32) -> &dyn Objects {
        &*self.stores[self.file(file).store]
    }

    /// Asks the store of a file.
    fn ask<T>(&self, file: u32, question: impl FnOnce(&dyn Objects) -> Result<T>) -> Result<T> {
        let objects = self.of(file);
        let _asking = objects.questions().is_none().then(|| self.questions.ask(file));
        question(objects)
    }

    pub(crate) fn facts(&self, file: u32) -> Result<Facts> {
        let known = self.file(file);
        known.asked.store(true, Ordering::Relaxed);
        let facts = self.ask(file, |objects| objects.facts(file))?;
        let mapping = facts.lanes.mapping.filter(|_| !known.unmappable.load(Ordering::Relaxed));
        Ok(Facts { lanes: FileLanes { mapping, ..facts.lanes }, ..facts })
    }

    /// The hole that costs as much as a read: see [`Objects::hole`].
    pub(crate) fn hole(&self, file: u32, direct: bool, sample: &Sample) -> Result<Option<u64>> {
        self.ask(file, |objects| objects.hole(file, direct, sample))
    }

    pub(crate) fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        self.ask(file, |objects| objects.resident_within(file, range))
    }

    /// A mapping of a file whose facts say that it can be mapped; or why the kernel refuses it.
    pub(crate) fn map(&self, file: u32) -> Result<Result<Mapping>> {
        let none = || Error::new(ErrorKind::Internal, "a store that says it can be mapped gives nothing to map");
        let fd = self.of(file).to_map(file)?.ok_or_else(none)?;
        Ok(Mapping::new(&*fd, self.size(file)).map_err(|e| e.at(self.path(file))))
    }

    /// From now on the facts say of these files that they cannot be mapped: the kernel has refused it.
    pub(crate) fn refuse_mappings(&self, files: impl Iterator<Item = u32>) {
        files.for_each(|file| self.file(file).unmappable.store(true, Ordering::Relaxed));
    }

    /// An error of kind `Changed` if the file is no longer what it was when its header was read. Stores whose reads say so
    /// themselves are not asked.
    pub(crate) fn verify(&self, file: u32) -> Result<()> {
        if self.is_pinned(file) {
            return Ok(());
        }
        self.ask(file, |objects| objects.verify(file))
    }

    /// Whether the reads of a file say themselves if it has changed.
    pub(crate) fn is_pinned(&self, file: u32) -> bool {
        self.of(file).pins_reads(file)
    }

    /// Whether nothing has to be asked about any file after its reads.
    pub(crate) fn all_pinned(&self) -> bool {
        (0..self.len() as u32).all(|file| self.is_pinned(file))
    }

    /// An error of kind `Changed` if a file that was read is no longer what it was when its header was read.
    pub(crate) fn verify_all(&self) -> Result<()> {
        let mut asked = (0..).zip(&self.files).filter(|(_, known)| known.asked.load(Ordering::Relaxed));
        asked.try_for_each(|(file, _)| self.verify(file))
    }

    /// The traffic with servers so far; `None` if no file is on one.
    pub(crate) fn traffic(&self) -> Option<Traffic> {
        self.stores.iter().filter_map(|objects| objects.traffic()).reduce(|mut all, more| {
            all += more;
            all
        })
    }

    /// The work of the disk cache; `None` where no store has one.
    pub(crate) fn disk_cache(&self) -> Option<Arc<CacheProgress>> {
        self.stores.iter().find_map(|objects| objects.disk_cache())
    }

    pub(crate) fn may_hang(&self) -> bool {
        self.stores.iter().any(|objects| objects.may_hang())
    }

    /// Whether all files are known to be on disks of this machine: see [`Objects::are_known_local`].
    pub(crate) fn are_known_local(&self) -> bool {
        self.stores.iter().all(|objects| objects.are_known_local())
    }

    /// A number that changes with each answer, and the file whose answer a thread waits for.
    pub(crate) fn asking(&self) -> Option<(u64, u32)> {
        let counted = self.stores.iter().filter_map(|objects| objects.questions());
        counted.chain([&self.questions]).find_map(Questions::asking)
    }

    /// The source of all files: the sources of their stores, as one.
    pub(crate) fn source(&self, request: &SourceRequest) -> Result<Dispatcher> {
        let mut dispatcher = Dispatcher::new(self.files.iter().map(|file| file.store).collect());
        for (store, objects) in self.stores.iter().enumerate() {
            objects.clone().sources(request)?.into_iter().try_for_each(|source| dispatcher.add(Some(store), source))?;
        }
        Ok(dispatcher)
    }
}
