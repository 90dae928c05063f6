//! The files of a save in a folder of this machine.

use super::chunks::{Chunk, ChunkPart, Supply};
use super::folder::{self, Folder};
use super::in_place;
use super::output::{check_room, Output};
use super::plan::SavePlan;
use super::publication::PublicationLock;
use super::shared::{leaving_earlier, SaveReport, SaveShared};
use super::target::{SaveTarget, Written};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::format::UNFINISHED;
use crate::options::PAGE;
use crate::sync::{lock, Mutex};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pieces of one call (IOV_MAX).
const MOST_PIECES: usize = 1024;

/// See the module's documentation.
pub(super) struct FilesTarget {
    outputs: Mutex<Vec<Output>>,
    sinks: Vec<Sink>,
    index: Option<(PathBuf, String)>,
    checkpoint: Option<Folder>,
    /// Names of the files, the index last.
    names: Vec<OsString>,
    sync: bool,
    /// How long other saves are waited for that give their files their names.
    patience: Duration,
    /// Files of this rank that have their names, and stay only if those of all ranks do.
    named: Mutex<Vec<PathBuf>>,
    is_share: bool,
    /// The index has its name.
    is_visible: AtomicBool,
}

/// How a file is written to. The descriptors belong to its output, which lives as long as a thread writes.
struct Sink {
    path: PathBuf,
    cached: RawFd,
    direct: Option<RawFd>,
    /// O_DIRECT was refused later.
    refused: AtomicBool,
    in_order: bool,
}

impl Sink {
    fn of(output: &Output) -> Sink {
        let (cached, direct) = output.descriptors();
        let (path, refused) = (output.path.clone(), AtomicBool::new(false));
        Sink { path, cached, direct, refused, in_order: output.in_order }
    }

    /// The descriptor to write to, and whether it is one for O_DIRECT.
    fn descriptor(&self) -> (RawFd, bool) {
        match self.direct {
            Some(fd) if !self.refused.load(Ordering::Relaxed) => (fd, true),
            _ => (self.cached, false),
        }
    }
}

impl FilesTarget {
    /// Makes the files of a plan in `folder`, which is that of the checkpoint of this name if there is one.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `NoSpace`, `Write` of the files.
    pub(super) fn new(
        plan: &mut SavePlan,
        folder: &Path,
        checkpoint: Option<&str>,
        sync: bool,
        patience: Duration,
        report: &mut SaveReport,
    ) -> Result<FilesTarget> {
        let checkpoint = checkpoint.map(|name| Folder::new(folder, name)).transpose()?;
        if let Some(file) = plan.files.first().filter(|_| !sync) {
            check_room(&folder.join(&file.name), plan.files.iter().map(|f| f.size).sum())?;
        }
        let mut outputs = Vec::with_capacity(plan.files.len());
        for file in &mut plan.files {
            let (mut output, refused) = Output::new(&folder.join(&file.name), file.size, sync)?;
            output.hold_back(&mut file.head);
            outputs.push(output);
            if let Some(refused) = refused.filter(|_| report.fallbacks.is_empty()) {
                report.fallbacks.push(refused);
            }
        }
        let sinks: Vec<Sink> = outputs.iter().map(Sink::of).collect();
        let index = plan.index_name().map(|name| folder.join(name)).zip(plan.index.clone());
        if let Some((path, _)) = index.as_ref().filter(|_| outputs.iter().any(Output::is_in_place)) {
            // It cannot be replaced either. Found out at the end, the save would be in vain.
            in_place::check_free(path)?;
        }
        let (names, is_share) = (plan.names(), plan.is_share);
        let (named, is_visible) = (Mutex::default(), AtomicBool::new(false));
        let outputs = Mutex::new(outputs);
        Ok(FilesTarget { outputs, sinks, index, checkpoint, names, sync, patience, named, is_share, is_visible })
    }

    /// True if a file is written past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.sinks.iter().any(|sink| sink.direct.is_some())
    }

    /// The turn of this save: no other one gives its files their names in this folder until the lock is dropped, and none has
    /// done so since this save began. The later of two saves fails, as in a bucket.
    fn take_turn(&self, shared: &SaveShared, outputs: &[Output]) -> Result<Option<PublicationLock>> {
        let Some(folder) = &self.checkpoint else { return Ok(None) };
        let in_place: Vec<&Path> = outputs.iter().filter(|output| output.is_in_place()).map(|o| &*o.path).collect();
        // Files that are written under their names belong to one save from its begin: a second one finds the names taken.
        let mut turn = None;
        if in_place.is_empty() {
            match PublicationLock::take(&folder.path, self.patience, || given_up(shared))? {
                Ok(lock) => turn = Some(lock),
                Err(refused) => shared.add_fallback(refused),
            }
        }
        folder.check_unchanged(&in_place)?;
        Ok(turn)
    }

    /// Makes every file whole, the index too. None has its name yet.
    fn complete(&self, shared: &SaveShared, outputs: &mut Vec<Output>) -> Result<()> {
        let begun = Instant::now();
        let mut refused = outputs.iter().map(|output| output.seal(self.sync)).collect::<Result<Vec<_>>>()?;
        if let Some((path, text)) = &self.index {
            let (output, _) = Output::new(path, text.len() as u64, false)?;
            output.write(text.as_bytes())?;
            refused.push(output.seal(self.sync)?);
            outputs.push(output);
        }
        if let Some(refused) = refused.into_iter().flatten().next() {
            shared.add_fallback(refused);
        }
        if self.sync {
            lock(&shared.state).report.sync_seconds += begun.elapsed().as_secs_f64();
        }
        Ok(())
    }

    /// Gives the files their names, the index last.
    fn publish(&self, shared: &SaveShared, outputs: &mut [Output]) -> Result<()> {
        let index = outputs.last().filter(|last| self.index.is_some() && !last.is_in_place()).map(|last| &last.path);
        let mut mark = None;
        if let Some(path) = index.filter(|_| !self.is_share) {
            given_up(shared)?;
            // Shards of an earlier save are replaced one by one. While some of them are still there, its index must not call
            // them one checkpoint, and no reader may take them for one.
            let made = mark.insert(UnfinishedMark::make(path)?);
            if let Err(cause) = std::fs::remove_file(path) {
                if cause.kind() != io::ErrorKind::NotFound {
                    made.remove();
                    return Err(Error::write("remove the earlier index", &cause).at(path));
                }
            }
        }
        // From now on it may be visible: an owner that gives the save up sees that, or we see that it has.
        self.is_visible.store(true, Ordering::SeqCst);
        let mut have_names = 0;
        let named = given_up(shared).and_then(|()| {
            outputs.iter_mut().try_for_each(|output| output.publish(self.sync).inspect(|()| have_names += 1))
        });
        if let Some(mark) = mark.filter(|_| named.is_ok() || have_names == 0) {
            mark.remove();
        }
        named.inspect_err(|_| self.is_visible.store(false, Ordering::SeqCst))?;
        if self.sync {
            let mut folders: BTreeSet<&Path> = outputs.iter().map(Output::folder).collect();
            folders.extend(self.checkpoint.iter().flat_map(|folder| &folder.with_new_names).map(PathBuf::as_path));
            folders.into_iter().try_for_each(|folder| settle(shared, folder))?;
        }
        Ok(())
    }

    fn failed(&self, chunk: &Chunk, cause: &io::Error) -> Error {
        let range = chunk.offset..chunk.offset + chunk.len;
        Error::write("write", cause).at(&self.sinks[chunk.file].path).range(range)
    }
}

impl SaveTarget for FilesTarget {
    fn is_in_order(&self, file: usize) -> bool {
        self.sinks[file].in_order
    }

    fn write(&self, shared: &SaveShared, chunk: &Chunk, from: *mut u8) -> Result<Written> {
        let sink = &self.sinks[chunk.file];
        let padded = chunk.len.next_multiple_of(PAGE);
        // SAFETY: a slab is as long as the longest chunk, which is whole pages; it is this thread's alone.
        unsafe { from.add(chunk.len as usize).write_bytes(0, (padded - chunk.len) as usize) };
        let (mut done, mut past, mut calls) = (0, 0, 0);
        while done < chunk.len {
            let (fd, direct) = sink.descriptor();
            let len = if direct { padded } else { chunk.len } - done;
            // SAFETY: within the slab.
            let at = unsafe { from.add(done as usize) };
            // SAFETY: `len` bytes from there on are in the slab.
            let wrote = unsafe { libc::pwrite(fd, at.cast(), len as usize, (chunk.offset + done) as i64) };
            calls += 1;
            if wrote > 0 {
                done += wrote as u64;
                past += if direct { wrote as u64 } else { 0 };
                continue;
            }
            let cause = failure(wrote);
            match cause.raw_os_error() {
                Some(libc::EINTR) => {}
                // The file system refused O_DIRECT, or stopped at an odd byte.
                Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTSUP) if direct => refuse_direct(shared, sink, &cause),
                _ => return Err(self.failed(chunk, &cause)),
            }
        }
        Ok(Written { direct: past.min(chunk.len), calls })
    }

    fn write_from_place(&self, _shared: &SaveShared, chunk: &Chunk, pieces: &[ChunkPart]) -> Result<Written> {
        let (fd, _) = self.sinks[chunk.file].descriptor();
        let (mut done, mut calls) = (0, 0);
        // The piece that is being written, and how much of it is written.
        let (mut first, mut within) = (0, 0u64);
        let mut places: Vec<libc::iovec> = Vec::with_capacity(pieces.len().min(MOST_PIECES));
        while done < chunk.len {
            places.clear();
            let mut skip = within;
            for piece in pieces[first..].iter().take(MOST_PIECES) {
                let Supply::Host(at) = piece.from else {
                    return Err(Error::new(ErrorKind::Internal, "memory of a GPU was to be written from its place"));
                };
                places.push(libc::iovec { iov_base: (at + skip) as *mut _, iov_len: (piece.len - skip) as usize });
                skip = 0;
            }
            // SAFETY: every place is memory that `_keep` keeps alive, or a late tensor that is let go only afterwards.
            let wrote =
                unsafe { libc::pwritev(fd, places.as_ptr(), places.len() as i32, (chunk.offset + done) as i64) };
            calls += 1;
            if wrote <= 0 {
                let cause = failure(wrote);
                if cause.raw_os_error() == Some(libc::EINTR) {
                    continue;
                }
                return Err(self.failed(chunk, &cause));
            }
            done += wrote as u64;
            within += wrote as u64;
            while first < pieces.len() && within >= pieces[first].len {
                within -= pieces[first].len;
                first += 1;
            }
        }
        Ok(Written { direct: 0, calls })
    }

    fn seal(&self, shared: &SaveShared) -> Result<()> {
        let begun = Instant::now();
        let mut outputs = lock(&self.outputs);
        let refused = outputs.iter().map(|output| output.seal(self.sync)).collect::<Result<Vec<_>>>()?;
        if let Some(refused) = refused.into_iter().flatten().next() {
            shared.add_fallback(refused);
        }
        let mut folders: BTreeSet<PathBuf> = BTreeSet::new();
        for mut output in outputs.drain(..) {
            folders.insert(output.folder().to_path_buf());
            lock(&self.named).push(output.path.clone());
            output.publish(self.sync)?;
        }
        if self.sync {
            folders.iter().try_for_each(|folder| settle(shared, folder))?;
            lock(&shared.state).report.sync_seconds = begun.elapsed().as_secs_f64();
        }
        Ok(())
    }

    fn conclude(&self, shared: &SaveShared) -> Result<()> {
        if self.is_share && self.index.is_none() {
            self.is_visible.store(true, Ordering::SeqCst);
            return Ok(());
        }
        given_up(shared)?;
        let mut outputs = lock(&self.outputs);
        self.complete(shared, &mut outputs)?;
        let turn = self.take_turn(shared, &outputs)?;
        self.publish(shared, &mut outputs)?;
        if self.is_share && shared.cancelled.load(Ordering::SeqCst) {
            shared.add_fallback(leaving_earlier());
        } else if let Some(folder) = &self.checkpoint {
            if folder.remove_earlier(&self.names)? && self.sync {
                settle(shared, &folder.path)?;
            }
        }
        drop(turn);
        Ok(())
    }

    fn clear(&self, _shared: &SaveShared, _is_complete: bool) -> Vec<String> {
        // A file that did not get its name goes with its output.
        lock(&self.outputs).clear();
        let named = std::mem::take(&mut *lock(&self.named));
        if self.may_be_visible() {
            return Vec::new();
        }
        let stays = |path: &PathBuf| std::fs::remove_file(path).is_err_and(|e| e.kind() != io::ErrorKind::NotFound);
        named.into_iter().filter(stays).map(|path| path.display().to_string()).collect()
    }

    fn may_be_visible(&self) -> bool {
        self.is_visible.load(Ordering::SeqCst)
    }

    fn uses_disk(&self) -> bool {
        true
    }
}

/// The file in a folder that says that its shards have no index yet. It stays if the save ends in between.
struct UnfinishedMark(PathBuf);

impl UnfinishedMark {
    fn make(index: &Path) -> Result<UnfinishedMark> {
        let path = index.with_file_name(UNFINISHED);
        let mut options = std::fs::OpenOptions::new();
        let made = options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW).open(&path);
        made.map_err(|cause| Error::write("make the mark of an unfinished save", &cause).at(&path))?;
        Ok(UnfinishedMark(path))
    }

    /// Where the index is there, a mark that stays means nothing.
    fn remove(&self) {
        let _left_behind = std::fs::remove_file(&self.0);
    }
}

/// # Errors
/// `Cancelled` if the save was given up.
fn given_up(shared: &SaveShared) -> Result<()> {
    match shared.cancelled.load(Ordering::SeqCst) {
        true => Err(Error::new(ErrorKind::Cancelled, "the save was cancelled before its files had their names")),
        false => Ok(()),
    }
}

fn refuse_direct(shared: &SaveShared, sink: &Sink, cause: &io::Error) {
    if !sink.refused.swap(true, Ordering::Relaxed) {
        let reason = format!("{}: {cause}", sink.path.display());
        let mut state = lock(&shared.state);
        if state.report.fallbacks.is_empty() {
            state.report.fallbacks.push(Fallback { from: "O_DIRECT", to: "page cache", reason });
        }
    }
}

/// Writes the names in a directory to the disk.
fn settle(shared: &SaveShared, folder: &Path) -> Result<()> {
    folder::sync(folder)?.into_iter().for_each(|refused| shared.add_fallback(refused));
    Ok(())
}

/// The error of a call that wrote nothing.
fn failure(wrote: isize) -> io::Error {
    if wrote == 0 {
        io::Error::from_raw_os_error(libc::EIO)
    } else {
        io::Error::last_os_error()
    }
}
