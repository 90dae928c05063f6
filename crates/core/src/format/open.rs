//! Opening a checkpoint: choose the thread, find the files, read their headers, join them.

use super::authority::Authority;
use super::checkpoint::{Checkpoint, Seeded};
use super::choose::FolderRequest;
use super::discover::{self, ChosenFolder, Found, What};
use super::index::Index;
use super::join::{indexed, listed, merge, read_all};
use super::shard::{self, Shard};
use crate::detached::{detached, here};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Location, Origin, Stores, Watch};
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

/// Files that the caller's thread opens at most. With more files the start of a thread is a small part, and Ctrl-C
/// should get through.
const MOST_HERE: usize = 16;

impl Checkpoint {
    /// Opens what `sources` name: one shard file, several, a directory, or an index file (`*.json`).
    ///
    /// Of a directory the files are chosen by their names: `docs/compatibility.md` has the order. With an index, files that
    /// it does not name are ignored. Of a tensor in several of its files the index says which one counts. Tensors in its
    /// files that it does not map are ignored too. Warnings say what was passed over.
    ///
    /// Every header is read and checked here, several at a time; no tensor is read. No descriptor stays open.
    ///
    /// # Errors
    /// `NotFound` (also for shard files that an index names: all of them in one error), `Permission`, `NotACheckpoint`,
    /// `Header`, `Truncated`, `Index`, and `Invalid` for a list that names a file twice.
    pub fn open<P: AsRef<OsStr>>(sources: &[P]) -> Result<Checkpoint> {
        Step::Named(origins(sources, &Stores::default()), FolderRequest::plain()).finish(&Watch::default())
    }

    /// The same for a caller that must not hang with a network mount whose server is gone, and must answer signals: a
    /// thread that can be left behind opens the files. The caller asks `go_on` every 50 ms. It stops waiting if `go_on`
    /// says no (kind `Cancelled`), or if the file system has not answered for `stall` (kind `Timeout`, with the path
    /// for which it waited). A long parse is not a stall.
    ///
    /// If the headers are small and in the page cache, the caller's own thread opens files on disks that this process
    /// has loaded from: that saves two turns at the scheduler. `go_on` is not asked then.
    ///
    /// Addresses are opened, and later loaded, from `stores`. `asked` says what is meant of a folder.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open), `Cancelled` and `Timeout`. `Invalid` for a variant where the place is no folder.
    pub fn open_cancellable<P: AsRef<OsStr>>(
        sources: &[P],
        asked: &FolderRequest,
        stores: &Stores,
        stall: Duration,
        go_on: impl FnMut() -> bool,
    ) -> Result<Checkpoint> {
        here(move || {
            let mut step = Step::Named(origins(sources, stores), asked.clone());
            let watch = Watch::here();
            match open_here(&mut step, &watch) {
                Err(_) if watch.was_too_much() => open_detached(move |watch| step.finish(watch), stall, go_on),
                result => result,
            }
        })
    }

    /// A checkpoint of one file from its first bytes in memory (at least the header) and its size. Nothing can be loaded
    /// from it.
    pub fn from_bytes(bytes: &[u8], size: u64) -> Result<Checkpoint> {
        let hasher = Seeded::default();
        let origin = Origin::of(OsStr::new("memory.safetensors"), &Stores::default());
        let shard = shard::parse(bytes, size, &hasher).map_err(|e| e.at(origin.location()))?;
        merge(std::iter::once((origin, shard)), hasher, Vec::new(), None)
    }
}

pub(super) fn origins<P: AsRef<OsStr>>(sources: &[P], stores: &Stores) -> Vec<Origin> {
    sources.iter().map(|source| Origin::of(source.as_ref(), stores)).collect()
}

/// How far an open has come.
enum Step {
    Named(Vec<Origin>, FolderRequest),
    Found(Found),
    Unread(Unread),
}

impl Step {
    fn finish(self, watch: &Watch) -> Result<Checkpoint> {
        let found = match self {
            Step::Named(sources, asked) => discover::discover(&sources, &asked, watch)?,
            Step::Found(found) => found,
            Step::Unread(unread) => return unread.read(watch),
        };
        Unread::new(found, watch)?.read(watch)
    }
}

/// On this thread, as long as everything is small, in memory, and known to be on disks. Otherwise the error is the
/// watch's [`too_much`](Watch::too_much), and `step` says how far this thread came.
fn open_here(step: &mut Step, watch: &Watch) -> Result<Checkpoint> {
    let known = |origins: &[Origin]| origins.len() <= MOST_HERE && origins.iter().all(Origin::leads_to_known_disk);
    let Step::Named(sources, asked) = step else { return Err(watch.too_much()) };
    let (sources, asked) = (std::mem::take(sources), std::mem::take(asked));
    if !known(&sources) {
        *step = Step::Named(sources, asked);
        return Err(watch.too_much());
    }
    let found = match discover::discover(&sources, &asked, watch) {
        Ok(found) => found,
        Err(e) => {
            *step = Step::Named(sources, asked);
            return Err(e);
        }
    };
    // Entries of a folder, or files that an index names, may be links to anywhere: hub caches are full of them.
    let unread = match &found.what {
        What::Index(index) if !index.leads_to_known_disk() => Err(watch.too_much()),
        _ => Unread::new(found.clone(), watch),
    };
    let unread = match unread {
        Ok(unread) => unread,
        Err(e) => {
            *step = Step::Found(found);
            return Err(e);
        }
    };
    if unread.files != sources && !known(&unread.files) {
        *step = Step::Unread(unread);
        return Err(watch.too_much());
    }
    match unread.headers(watch) {
        Err(e) if watch.was_too_much() => {
            *step = Step::Unread(unread);
            Err(e)
        }
        shards => {
            let joined = unread.joined(shards, watch);
            if watch.was_too_much() {
                *step = Step::Named(sources, asked);
            }
            joined
        }
    }
}

/// On a thread that is left behind if the file system hangs, or if the caller is told to stop.
pub(crate) fn open_detached<T: Send + 'static>(
    open: impl FnOnce(&Watch) -> Result<T> + Send + 'static,
    stall: Duration,
    go_on: impl FnMut() -> bool,
) -> Result<T> {
    let watch = Arc::new(Watch::patient(stall));
    let at_work = watch.clone();
    let mut busy = 0;
    // While no answer is waited for, a parse takes its time.
    let progress = || match watch.asking() {
        Some((answers, _)) => answers,
        None => {
            busy += 1;
            u64::MAX - busy
        }
    };
    detached(move || open(&at_work), Some(stall), progress, go_on).map_err(|e| {
        watch.give_up();
        match watch.asking() {
            Some((_, path)) if e.kind() == ErrorKind::Timeout => e.at(&path),
            _ => e,
        }
    })
}

/// The files of a checkpoint, in natural order, and its index, if it has one; no header has been read.
struct Unread {
    files: Vec<Origin>,
    index: Option<(Origin, Index)>,
    folder: Option<ChosenFolder>,
    hasher: Seeded,
}

impl Unread {
    /// Reads the index, where one was found. If none of its files is there, the folder may mean something else.
    fn new(mut found: Found, watch: &Watch) -> Result<Unread> {
        let hasher = Seeded::default();
        loop {
            let Found { what, folder } = found;
            let origin = match what {
                What::Files(files) => return Ok(Unread { files, index: None, folder, hasher }),
                What::Index(origin) => origin,
            };
            let index = Index::read(&origin, &hasher, watch)?;
            let files: Vec<Origin> =
                index.in_natural_order().iter().map(|&i| origin.beside(&index.files[i as usize])).collect();
            let other = folder.as_ref().map(|folder| folder.without(&origin, &files, watch)).transpose()?;
            match other.flatten() {
                Some(other) => found = other,
                None => return Ok(Unread { files, index: Some((origin, index)), folder, hasher }),
            }
        }
    }

    fn headers(&self, watch: &Watch) -> Result<Vec<Shard>> {
        read_all(&self.files, watch, |file| shard::open(file, &self.hasher, watch))
    }

    /// Reads the headers.
    fn read(self, watch: &Watch) -> Result<Checkpoint> {
        let shards = self.headers(watch);
        self.joined(shards, watch)
    }

    /// The checkpoint of these headers.
    fn joined(self, shards: Result<Vec<Shard>>, watch: &Watch) -> Result<Checkpoint> {
        let Unread { files, index, folder, hasher } = self;
        let chosen = folder.as_ref().map(|folder| folder.warnings(&files, index.as_ref().map(|(origin, _)| origin)));
        let mut warnings = chosen.unwrap_or_default();
        if let Some((origin, index)) = index {
            let shards = shards.map_err(|e| missing(origin.location(), &files, watch).unwrap_or(e))?;
            return indexed(origin.location(), &index, files, shards, hasher, warnings);
        }
        let shards = shards?;
        // A single file that was named was chosen on purpose, whatever its name says about others.
        if files.len() > 1 || folder.is_some() {
            warnings.extend(discover::incomplete_sets(&files));
        }
        let authority = Authority::new(&files, &hasher, watch);
        merge(files.into_iter().zip(shards), hasher, warnings, Some(authority))
    }
}

/// The error that lists every shard file of the index that is missing, if there is one.
fn missing(index: &Location, files: &[Origin], watch: &Watch) -> Option<Error> {
    let gone: Vec<&Origin> = files.iter().take_while(|_| !watch.is_given_up()).filter(|f| f.is_gone(watch)).collect();
    if gone.is_empty() {
        return None;
    }
    let names = listed(gone.iter().map(|f| f.location().file_name().to_string_lossy().into_owned()), gone.len());
    let links = gone.iter().filter(|f| f.is_link()).count();
    let links = if links > 0 { format!(" ({links} are links to nothing)") } else { String::new() };
    let text = format!(
        "{} of the {} shard files of this index are missing{links}: {names}. Fetch them into the same folder",
        gone.len(),
        files.len()
    );
    Some(Error::new(ErrorKind::NotFound, text).at(index))
}
