//! The files of one load, wherever they are: one set over the stores of a checkpoint.

use super::facts::Facts;
use super::files::{Asking, Files};
use super::location::Location;
use super::object::{Object, Objects, Store, Traffic};
use super::read_cost::Sample;
use super::residency::Residency;
use super::version::Version;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Mapping;
use crate::source::{Dispatcher, SourceRequest};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// Location, size and version of a file, and the store that has it; `None`: it is on this machine.
pub(crate) type StoredFile<'a> = (&'a Location, u64, &'a Version, Option<&'a Arc<dyn Store>>);

/// The files of one load. Files of this machine are one store.
#[derive(Debug)]
pub(crate) struct Storage {
    local: Arc<Files>,
    others: Vec<Arc<dyn Objects>>,
    /// The files on other stores, by number. Empty if every file is local.
    elsewhere: Vec<Option<Elsewhere>>,
    /// Questions to stores that a scheme names, and answers.
    answers: AtomicU64,
    /// The names of the ranks that load these files together.
    ranks: Vec<PathBuf>,
}

#[derive(Debug)]
struct Elsewhere {
    /// Its store, as a number in `others`.
    store: usize,
    location: Location,
    size: u64,
    asked: AtomicBool,
    /// Threads that wait for its store to answer.
    asking: AtomicU32,
}

impl Storage {
    /// The files of a checkpoint, in order: location, size and version of each, and the store that has it, if it is not on
    /// this machine. Nothing is opened yet.
    ///
    /// # Errors
    /// What a store says.
    pub(crate) fn new<'a>(files: impl Iterator<Item = StoredFile<'a>> + Clone) -> Result<Storage> {
        let mut stores: Vec<&Arc<dyn Store>> = Vec::new();
        let mut elsewhere = Vec::new();
        if files.clone().any(|(.., store)| store.is_some()) {
            for (location, size, _, store) in files.clone() {
                elsewhere.push(store.map(|store| {
                    let store = stores.iter().position(|known| Arc::ptr_eq(known, store)).unwrap_or_else(|| {
                        stores.push(store);
                        stores.len() - 1
                    });
                    Elsewhere {
                        store,
                        location: location.clone(),
                        size,
                        asked: AtomicBool::new(false),
                        asking: AtomicU32::new(0),
                    }
                }));
            }
        }
        let mut others = Vec::with_capacity(stores.len());
        for (number, store) in stores.iter().enumerate() {
            let theirs = files.clone().zip(&elsewhere).map(|((location, size, version, _), found)| {
                let object = || Object { location: location.clone(), size, version: version.clone() };
                found.as_ref().filter(|found| found.store == number).map(|_| object())
            });
            others.push(store.objects(theirs.collect())?);
        }
        // Files of other stores keep their numbers here, and are never asked about.
        let local = Files::new(files.map(|(location, _, version, _)| match version {
            Version::Inode(identity) => (location.as_path().to_path_buf(), *identity),
            _ => (location.as_path().to_path_buf(), Default::default()),
        }));
        Ok(Storage { local: Arc::new(local), others, elsewhere, answers: AtomicU64::new(0), ranks: Vec::new() })
    }

    /// The same files for one of several ranks: what comes from a rank is named by its host.
    #[must_use]
    pub(crate) fn with_ranks(mut self, hosts: &[String]) -> Storage {
        self.ranks = (0..).zip(hosts).map(|(rank, host)| format!("rank {rank} ({host})").into()).collect();
        self
    }

    /// Files of this machine.
    pub(crate) fn local(&self) -> &Arc<Files> {
        &self.local
    }

    /// Number of files.
    pub(crate) fn len(&self) -> usize {
        self.local.len()
    }

    /// Where file number `file` is, for messages.
    pub(crate) fn path(&self, file: u32) -> &Path {
        self.elsewhere(file).map_or_else(|| self.local.path(file), |found| found.location.as_path())
    }

    /// The name of a rank of this load, for messages.
    pub(crate) fn rank(&self, rank: u32) -> &Path {
        self.ranks.get(rank as usize).map_or(Path::new("another rank"), PathBuf::as_path)
    }

    /// Size of file number `file` in bytes, as it was when its header was read.
    pub(crate) fn size(&self, file: u32) -> u64 {
        self.elsewhere(file).map_or_else(|| self.local.size(file), |found| found.size)
    }

    fn elsewhere(&self, file: u32) -> Option<&Elsewhere> {
        self.elsewhere.get(file as usize)?.as_ref()
    }

    fn of(&self, file: u32) -> &dyn Objects {
        self.elsewhere(file).map_or(&*self.local, |found| &*self.others[found.store])
    }

    /// Asks the store of a file. Files of this machine count their questions themselves.
    fn ask<T>(&self, file: u32, question: impl FnOnce(&dyn Objects) -> Result<T>) -> Result<T> {
        let Some(found) = self.elsewhere(file) else { return question(&*self.local) };
        self.answers.fetch_add(1, Ordering::Relaxed);
        let _asking = Asking::new(&found.asking);
        question(&*self.others[found.store])
    }

    pub(crate) fn facts(&self, file: u32) -> Result<Facts> {
        if let Some(found) = self.elsewhere(file) {
            found.asked.store(true, Ordering::Relaxed);
        }
        self.ask(file, |objects| objects.facts(file))
    }

    /// The hole that costs as much as a read: see [`Files::hole`]. Stores that a scheme names declare it.
    pub(crate) fn hole(&self, file: u32, direct: bool, sample: &Sample) -> Result<Option<u64>> {
        match self.elsewhere(file) {
            Some(_) => Ok(None),
            None => self.local.hole(file, direct, sample),
        }
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
        files.filter(|file| self.elsewhere(*file).is_none()).for_each(|file| self.local.refuse_mapping(file));
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
        self.local.verify_unchanged()?;
        for (file, found) in (0..).zip(&self.elsewhere) {
            if found.as_ref().is_some_and(|found| found.asked.load(Ordering::Relaxed)) {
                self.verify(file)?;
            }
        }
        Ok(())
    }

    /// The traffic with servers so far; `None` if no file is on one.
    pub(crate) fn traffic(&self) -> Option<Traffic> {
        self.others.iter().filter_map(|objects| objects.traffic()).reduce(|mut all, more| {
            all += more;
            all
        })
    }

    pub(crate) fn may_hang(&self) -> bool {
        self.local.may_hang() || self.others.iter().any(|objects| objects.may_hang())
    }

    /// Whether all files are known to be on disks of this machine: see [`Files::are_known_local`].
    pub(crate) fn are_known_local(&self) -> bool {
        self.others.is_empty() && self.local.are_known_local()
    }

    /// The file whose answer a thread waits for, and a number that changes with each answer.
    pub(crate) fn asking(&self) -> Option<(u64, u32)> {
        let waits = |found: &Option<Elsewhere>| found.as_ref().is_some_and(|f| f.asking.load(Ordering::Relaxed) > 0);
        let file = || self.elsewhere.iter().position(waits);
        self.local.asking().or_else(|| Some((self.answers.load(Ordering::Relaxed), file()? as u32)))
    }

    /// The source of all files: the sources of their stores, as one.
    pub(crate) fn source(&self, request: &SourceRequest) -> Result<Dispatcher> {
        let local = self.others.len();
        let of_file = self.elsewhere.iter().map(|found| found.as_ref().map_or(local, |found| found.store));
        let of_file: Vec<usize> = of_file.collect();
        let has_local = of_file.is_empty() || of_file.contains(&local);
        let mut dispatcher = Dispatcher::new(of_file);
        let stores = self.others.iter().cloned().chain(has_local.then(|| self.local.clone() as Arc<dyn Objects>));
        for (store, objects) in stores.enumerate() {
            objects.sources(request)?.into_iter().try_for_each(|source| dispatcher.add(Some(store), source))?;
        }
        Ok(dispatcher)
    }
}
