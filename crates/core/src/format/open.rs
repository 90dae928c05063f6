//! Opening a checkpoint: choose the thread, read headers in parallel, join them in one set of arenas, compare the
//! index.

use super::checkpoint::{Checkpoint, Entry, Seeded, ShardFile};
use super::discover::{self, Found};
use super::header::quoted;
use super::index::Index;
use super::shard::{self, Shard};
use super::watch::Watch;

use crate::aside::{aside, here};
use crate::error::{Error, ErrorKind, Result};
use crate::machine;
use crate::store::leads_to_known_disk;
use hashbrown::hash_table::Entry as Slot;
use hashbrown::HashTable;
use std::collections::btree_map::Entry as MetadataSlot;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Least number of headers that are read at once. On a cold disk or a network file system the wait for the first bytes
/// of each file is longer than the parse, so there are more threads than cores. Each holds one header in memory.
const IN_FLIGHT: usize = 8;

/// Names listed in one message.
const SHOWN: usize = 12;

/// Files that the caller's thread opens at most. With more files the start of a thread is a small part, and Ctrl-C
/// should get through.
const MOST_HERE: usize = 16;

impl Checkpoint {
    /// Opens what `sources` name: one shard file, several, a directory, or an index file (`*.json`).
    ///
    /// In a directory, `model.safetensors.index.json` is looked for, then any other `*.safetensors.index.json`, then
    /// every `*.safetensors`. With an index, files that it does not name are ignored. Tensors in its files that it does
    /// not map are ignored too, with a warning.
    ///
    /// Every header is read and checked here, several at a time; no tensor is read. No descriptor stays open.
    ///
    /// # Errors
    /// `NotFound` (also for shard files that an index names: all of them in one error), `Permission`, `NotACheckpoint`,
    /// `Header`, `Truncated`, `Index`, and `Invalid` for a list that names a file twice.
    pub fn open<P: AsRef<Path>>(sources: &[P]) -> Result<Checkpoint> {
        let watch = Watch::default();
        Unread::new(discover::discover(sources, &watch)?, &watch)?.read(&watch)
    }

    /// The same for a caller that must not hang with a network mount whose server is gone, and must answer signals: a
    /// thread that can be left behind opens the files. The caller asks `go_on` every 50 ms. It stops waiting if `go_on`
    /// says no (kind `Cancelled`), or if the file system has not answered for `stall` (kind `Timeout`, with the path
    /// for which it waited). A long parse is not a stall.
    ///
    /// If the headers are small and in the page cache, the caller's own thread opens files on disks that this process
    /// has loaded from: that saves two turns at the scheduler. `go_on` is not asked then.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), `Cancelled` and `Timeout`.
    pub fn open_cancellable(sources: Vec<PathBuf>, stall: Duration, go_on: impl FnMut() -> bool) -> Result<Checkpoint> {
        here(move || {
            let mut stage = Stage::Named(sources);
            let watch = Watch::here();
            match open_here(&mut stage, &watch) {
                Err(_) if watch.was_too_much() => open_aside(stage, stall, go_on),
                result => result,
            }
        })
    }

    /// A checkpoint of one file from its first bytes in memory (at least the header) and its size. Nothing can be loaded
    /// from it.
    pub fn from_bytes(bytes: &[u8], size: u64) -> Result<Checkpoint> {
        let hasher = Seeded::default();
        let path = Path::new("memory.safetensors");
        let shard = shard::parse(bytes, size, &hasher).map_err(|e| e.at(path))?;
        merge(vec![(path.to_path_buf(), shard)], hasher, Vec::new())
    }
}

/// The stage of an open.
enum Stage {
    Named(Vec<PathBuf>),
    Found(Found),
    Unread(Unread),
}

impl Stage {
    fn finish(self, watch: &Watch) -> Result<Checkpoint> {
        let found = match self {
            Stage::Named(sources) => discover::discover(&sources, watch)?,
            Stage::Found(found) => found,
            Stage::Unread(unread) => return unread.read(watch),
        };
        Unread::new(found, watch)?.read(watch)
    }
}

/// On this thread, as long as everything is small, in memory, and known to be on disks. Otherwise the error is the
/// watch's [`too_much`](Watch::too_much), and `stage` says how far this thread came.
fn open_here(stage: &mut Stage, watch: &Watch) -> Result<Checkpoint> {
    let known = |paths: &[PathBuf]| paths.len() <= MOST_HERE && paths.iter().all(|p| leads_to_known_disk(p));
    let Stage::Named(sources) = stage else { return Err(watch.too_much()) };
    let sources = std::mem::take(sources);
    if !known(&sources) {
        *stage = Stage::Named(sources);
        return Err(watch.too_much());
    }
    let found = match discover::discover(&sources, watch) {
        Ok(found) => found,
        Err(e) => {
            *stage = Stage::Named(sources);
            return Err(e);
        }
    };
    // Entries of a folder, or files that an index names, may be links to anywhere: hub caches are full of them.
    let unread = match &found {
        Found::Index(index) if !leads_to_known_disk(index) => Err(watch.too_much()),
        found => Unread::new(found.clone(), watch),
    };
    let unread = match unread {
        Ok(unread) => unread,
        Err(e) => {
            *stage = Stage::Found(found);
            return Err(e);
        }
    };
    if unread.files != sources && !known(&unread.files) {
        *stage = Stage::Unread(unread);
        return Err(watch.too_much());
    }
    match read_all(&unread.files, &unread.hasher, watch) {
        Err(e) if watch.was_too_much() => {
            *stage = Stage::Unread(unread);
            Err(e)
        }
        shards => unread.joined(shards, watch),
    }
}

/// On a thread that is left behind if the file system hangs, or if the caller is told to stop.
fn open_aside(stage: Stage, stall: Duration, go_on: impl FnMut() -> bool) -> Result<Checkpoint> {
    let watch = Arc::new(Watch::default());
    let at_work = watch.clone();
    let mut busy = 0;
    // While no answer is waited for, a parse takes its time.
    let progress = || {
        watch.asking().map_or_else(
            || {
                busy += 1;
                u64::MAX - busy
            },
            |(answers, _)| answers,
        )
    };
    aside(move || stage.finish(&at_work), Some(stall), progress, go_on).map_err(|e| {
        watch.give_up();
        match watch.asking() {
            Some((_, path)) if e.kind() == ErrorKind::Timeout => e.at(&path),
            _ => e,
        }
    })
}

/// The files of a checkpoint, in natural order, and its index, if it has one; no header has been read.
struct Unread {
    files: Vec<PathBuf>,
    index: Option<(PathBuf, Index)>,
    hasher: Seeded,
}

impl Unread {
    /// Reads the index, where one was found.
    fn new(found: Found, watch: &Watch) -> Result<Unread> {
        let hasher = Seeded::default();
        match found {
            Found::Files(files) => Ok(Unread { files, index: None, hasher }),
            Found::Index(path) => {
                let index = Index::read(&path, &hasher, watch)?;
                let folder = path.parent().unwrap_or(Path::new(""));
                let files = index.in_natural_order().iter().map(|&i| folder.join(&index.files[i as usize])).collect();
                Ok(Unread { files, index: Some((path, index)), hasher })
            }
        }
    }

    /// Reads the headers.
    fn read(self, watch: &Watch) -> Result<Checkpoint> {
        let shards = read_all(&self.files, &self.hasher, watch);
        self.joined(shards, watch)
    }

    /// The checkpoint of these headers.
    fn joined(self, shards: Result<Vec<Shard>>, watch: &Watch) -> Result<Checkpoint> {
        let Unread { files, index, hasher } = self;
        if let Some((path, index)) = index {
            let shards = shards.map_err(|e| missing(&path, &files, watch).unwrap_or(e))?;
            return indexed(&path, &index, files, shards, hasher);
        }
        let shards = shards?;
        // A single file was chosen on purpose, whatever its name says about others.
        let warnings = if files.len() > 1 { discover::incomplete_sets(&files) } else { Vec::new() };
        merge(files.into_iter().zip(shards).collect(), hasher, warnings)
    }
}

/// A checkpoint of the files of this index and of their headers.
fn indexed(
    path: &Path,
    index: &Index,
    files: Vec<PathBuf>,
    mut shards: Vec<Shard>,
    hasher: Seeded,
) -> Result<Checkpoint> {
    let order = index.in_natural_order();
    let mut warnings = Vec::new();
    let mut kept = 0;
    for ((shard, file), &number) in shards.iter_mut().zip(&files).zip(&order) {
        let h = &mut shard.header;
        let name = |e: &Entry| &h.names[e.name.0 as usize..(e.name.0 + e.name.1) as usize];
        let mapped: Vec<Option<u32>> =
            h.entries.iter().zip(&h.hashes).map(|(e, &h)| index.file_of(name(e), h)).collect();
        // This holds even if the other file has a tensor of that name: choosing one of the two would be a guess.
        if let Some((e, &Some(other))) = h.entries.iter().zip(&mapped).find(|(_, m)| m.is_some_and(|m| m != number)) {
            return Err(Error::new(
                ErrorKind::Index,
                format!(
                    "tensor {} is in {}, but the index maps it to {}",
                    quoted(name(e)),
                    file.display(),
                    index.files[other as usize].display()
                ),
            )
            .at(path));
        }
        let unmapped: Vec<&Entry> =
            h.entries.iter().zip(&mapped).filter(|(_, m)| m.is_none()).map(|(e, _)| e).collect();
        if !unmapped.is_empty() {
            let names = listed(unmapped.iter().map(|e| quoted(name(e))), unmapped.len());
            warnings.push(format!("{}: ignored, because the index does not map them: {names}", file.display()));
            let keep = |i: usize| mapped[i].is_some();
            h.hashes = h.hashes.iter().enumerate().filter(|h| keep(h.0)).map(|h| *h.1).collect();
            h.entries = h.entries.iter().enumerate().filter(|e| keep(e.0)).map(|e| *e.1).collect();
        }
        kept += h.entries.len();
    }
    let mapped = index.len();
    let named: Vec<(PathBuf, Shard)> = files.into_iter().zip(shards).collect();
    let mut checkpoint = merge(named, hasher, warnings)?;
    if kept < mapped {
        let absent: Vec<String> = index
            .entries()
            .filter(|&(name, ..)| checkpoint.find(name).is_none())
            .map(|(name, _, file)| format!("{} (in {})", quoted(name), index.files[file as usize].display()))
            .collect();
        let n = absent.len();
        return Err(Error::new(
            ErrorKind::Index,
            format!(
                "{n} tensors of the index are not in the files that it maps them to: {}",
                listed(absent.into_iter(), n)
            ),
        )
        .at(path));
    }
    if let Some(total) = index.total_size {
        let actual = checkpoint.nbytes();
        if total != actual as f64 {
            checkpoint
                .warnings
                .push(format!("{}: total_size is {total}, but the tensors take {actual} bytes", path.display()));
        }
    }
    Ok(checkpoint)
}

/// The error that lists every shard file of the index that is missing, if there is one.
fn missing(index: &Path, files: &[PathBuf], watch: &Watch) -> Option<Error> {
    let is_gone = |f: &&PathBuf| {
        let _asking = watch.ask(f);
        f.metadata().is_err_and(|e| not_there(&e))
    };
    let gone: Vec<&PathBuf> = files.iter().take_while(|_| !watch.is_given_up()).filter(is_gone).collect();
    if gone.is_empty() {
        return None;
    }
    let names =
        listed(gone.iter().map(|f| f.file_name().unwrap_or(f.as_os_str()).to_string_lossy().into_owned()), gone.len());
    let links = gone.iter().filter(|f| f.is_symlink()).count();
    let links = if links > 0 { format!(" ({links} are links to nothing)") } else { String::new() };
    Some(
        Error::new(
            ErrorKind::NotFound,
            format!(
                "{} of the {} shard files of this index are missing{links}: {names}. Fetch them into the same folder",
                gone.len(),
                files.len()
            ),
        )
        .at(index),
    )
}

fn not_there(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

fn listed(names: impl Iterator<Item = String>, count: usize) -> String {
    let mut out = names.take(SHOWN).collect::<Vec<_>>().join(", ");
    if count > SHOWN {
        let _ = write!(out, " and {} more", count - SHOWN);
    }
    out
}

/// Reads every header: on the caller's thread one after the other, otherwise several at a time. If reads fail, the
/// error is that of the first file (in order) that failed.
fn read_all(files: &[PathBuf], hasher: &Seeded, watch: &Watch) -> Result<Vec<Shard>> {
    if watch.is_here() || files.len() == 1 {
        return files.iter().map(|file| shard::open(file, hasher, watch)).collect();
    }
    let left = files.len();
    // Learning the number of cores takes twenty system calls.
    let threads = if left > IN_FLIGHT { left.min(machine::cores().max(IN_FLIGHT)) } else { left };
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let work = || {
        let mut done = Vec::new();
        while !stop.load(Ordering::Relaxed) && !watch.is_given_up() {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = files.get(i) else { break };
            let shard = shard::open(file, hasher, watch);
            if shard.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            done.push((i, shard));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        // If no thread can be started (a process limit), the calling thread does all of it.
        let others: Vec<_> =
            (1..threads).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mut done = work();
        for thread in others {
            match thread.join() {
                Ok(part) => done.extend(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    // Files are taken in ascending order, so the first one that fails has always been read.
    done.sort_unstable_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

/// Joins the headers into one checkpoint. Refuses a name that is in two files.
pub(super) fn merge(shards: Vec<(PathBuf, Shard)>, hasher: Seeded, warnings: Vec<String>) -> Result<Checkpoint> {
    let sum = |of: fn(&Shard) -> usize| shards.iter().map(|s| of(&s.1)).sum::<usize>();
    let count = sum(|s| s.header.entries.len());
    let (name_bytes, dims) = (sum(|s| s.header.names.len()), sum(|s| s.header.shapes.len()));
    if [count, name_bytes, dims].iter().any(|&n| u32::try_from(n).is_err()) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{count} tensors with {name_bytes} bytes of names: over 4 GiB of names or 2^32 tensors in one checkpoint"),
        ));
    }
    let mut checkpoint = Checkpoint {
        files: Vec::with_capacity(shards.len()),
        tensors: Vec::with_capacity(count),
        names: String::with_capacity(name_bytes),
        shapes: Vec::with_capacity(dims),
        by_name: HashTable::with_capacity(count),
        hasher,
        metadata: BTreeMap::new(),
        warnings,
    };
    let mut hashes: Vec<u64> = Vec::with_capacity(count);
    for (number, (path, shard)) in shards.into_iter().enumerate() {
        let h = shard.header;
        let (names, shapes) = (checkpoint.names.len() as u32, checkpoint.shapes.len() as u32);
        let first = checkpoint.tensors.len() as u32;
        checkpoint.names.push_str(&h.names);
        checkpoint.shapes.extend_from_slice(&h.shapes);
        hashes.extend_from_slice(&h.hashes);
        checkpoint.tensors.extend(h.entries.iter().map(|e| {
            let mut e = *e;
            e.name.0 += names;
            e.shape.0 += shapes;
            e.file = number as u32;
            e
        }));
        for (key, value) in h.metadata.iter().flatten() {
            if let MetadataSlot::Vacant(slot) = checkpoint.metadata.entry(key.clone()) {
                slot.insert(value.clone());
            }
        }
        checkpoint.files.push(ShardFile {
            // Without a current directory (it was removed), a relative path leads nowhere, now or later.
            location: std::path::absolute(&path).unwrap_or_else(|_| path.clone()),
            path,
            identity: shard.identity,
            data_start: shard.data_start,
            header_read: shard.header_read,
            metadata: h.metadata,
            tensors: first..checkpoint.tensors.len() as u32,
        });
    }
    let mut by_name = std::mem::take(&mut checkpoint.by_name);
    for (i, &hash) in hashes.iter().enumerate() {
        let name = checkpoint.name(i as u32);
        let same = |&j: &u32| hashes[j as usize] == hash && checkpoint.name(j) == name;
        match by_name.entry(hash, same, |&j| hashes[j as usize]) {
            Slot::Vacant(slot) => {
                slot.insert(i as u32);
            }
            Slot::Occupied(slot) => {
                let file = |i: u32| &checkpoint.files[checkpoint.tensors[i as usize].file as usize];
                let (a, b) = (file(*slot.get()), file(i as u32));
                let same_file = if (a.identity.dev, a.identity.ino) == (b.identity.dev, b.identity.ino) {
                    " (both names lead to one file)"
                } else {
                    ""
                };
                return Err(Error::new(
                    ErrorKind::Header,
                    format!(
                        "tensor {} is also in {}{same_file}: the files belong to several checkpoints, or to several \
                         variants of one; give only the files that you want to load",
                        quoted(name),
                        a.path.display()
                    ),
                )
                .at(&b.path));
            }
        }
    }
    checkpoint.by_name = by_name;
    Ok(checkpoint)
}
