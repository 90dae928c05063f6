//! The shard files of one load: descriptors, what their file systems allow, which of their pages are resident, and
//! whether they are still the files whose headers were read.

use super::facts::{errors_write_nothing, facts_of, Facts, FsKind};
use super::known_disks;
use super::pread::MOST_PER_CALL;
use super::questions::Questions;
use super::residency::{resident, Residency};
use super::stat::{identity_of, statx};
use super::version::Identity;
use crate::error::{Error, ErrorKind, Result};
use crate::options::PAGE;
use crate::sync::{lock, Mutex};
use std::ffi::CString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Descriptors kept open at once. A checkpoint with more shards reads each of them for a moment only.
const MOST_OPEN: u64 = 512;

/// The shard files of one load.
///
/// Descriptors are opened on demand and closed again, least recently used first, so that a checkpoint of thousands of
/// shards loads under a small `RLIMIT_NOFILE`. Every open compares the file with the identity it had when its header was
/// read.
#[derive(Debug)]
pub struct Files {
    files: Vec<File>,
    /// The same bytes may be written to them again, so their times do not count.
    rewritten: bool,
    open: Mutex<Vec<Open>>,
    most_open: usize,
    /// Questions to the file system. Each use of a file counts as an answer.
    pub(super) questions: Questions,
    opens: AtomicU64,
    most_per_call: AtomicU64,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    identity: Identity,
    facts: OnceLock<Facts>,
}

#[derive(Debug)]
struct Open {
    file: u32,
    direct: bool,
    used: u64,
    fd: Arc<OwnedFd>,
}

impl Files {
    /// Files by absolute path, each with the identity that it must still have; nothing is opened yet.
    pub fn new(files: impl IntoIterator<Item = (PathBuf, Identity)>) -> Files {
        let file = |(path, identity)| File { path, identity, facts: OnceLock::new() };
        let files: Vec<File> = files.into_iter().map(file).collect();
        // A quarter of the limit: the rest of the process needs descriptors too.
        let most_open = (descriptor_limit() / 4).clamp(8, MOST_OPEN) as usize;
        Files {
            questions: Questions::of(files.len()),
            files,
            rewritten: false,
            open: Mutex::default(),
            most_open,
            opens: AtomicU64::new(0),
            most_per_call: AtomicU64::new(MOST_PER_CALL),
        }
    }

    /// The same files, to which the same bytes may be written again.
    pub(super) fn rewritten(self) -> Files {
        Files { rewritten: true, ..self }
    }

    /// Files by path, as they are now: for tools whose files need not be shard files.
    pub fn from_paths<P: AsRef<Path>>(paths: &[P]) -> Result<Files> {
        let files = paths
            .iter()
            .map(|p| Ok((p.as_ref().to_path_buf(), identity_of(p.as_ref())?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self::new(files))
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether the list has no files.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Path of file number `file`.
    pub fn path(&self, file: u32) -> &Path {
        &self.files[file as usize].path
    }

    /// Size of file number `file` in bytes, as it was when its header was read.
    pub fn size(&self, file: u32) -> u64 {
        self.files[file as usize].identity.size
    }

    /// The identity of file number `file` when its header was read.
    pub fn identity(&self, file: u32) -> Identity {
        self.files[file as usize].identity
    }

    /// Whether the two sets have a file in common.
    pub(super) fn share(&self, other: &Files) -> bool {
        let same = |a: &File, b: &File| (a.identity.dev, a.identity.ino) == (b.identity.dev, b.identity.ino);
        self.files.iter().any(|a| other.files.iter().any(|b| same(a, b)))
    }

    /// Whether a file that was opened is on a network file system, so that asking about it may hang.
    pub(crate) fn may_hang(&self) -> bool {
        self.files.iter().any(|f| f.facts.get().is_some_and(|f| f.kind == FsKind::Network))
    }

    /// Whether all files are known to be on disks of this machine, because this process has asked about their devices
    /// before. Then no other thread is needed in case the file system hangs.
    pub(crate) fn are_known_local(&self) -> bool {
        self.files.iter().all(|f| known_disks::is_known(f.identity.dev))
    }

    /// Descriptors that this process may have.
    pub(crate) fn descriptors(&self) -> u64 {
        descriptor_limit()
    }

    /// Number of times a descriptor was opened.
    pub fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Caps the bytes of one system call; longer reads take several calls. The kernel has such a cap itself (2 GiB).
    /// With this, tests reach the code behind short reads without extents of 2 GiB.
    #[cfg(any(test, feature = "testing"))]
    pub fn cap_calls(&self, bytes: u64) {
        self.most_per_call.store(bytes.clamp(PAGE, MOST_PER_CALL), Ordering::Relaxed);
    }

    pub(crate) fn most_per_call(&self) -> u64 {
        self.most_per_call.load(Ordering::Relaxed)
    }

    /// A descriptor of file number `file` for reading, with or without O_DIRECT. It stays open at least as long as the
    /// `Arc` is held. Kind `Limit` if the process has no descriptor left and none of these is idle.
    pub fn open(&self, file: u32, direct: bool) -> Result<Arc<OwnedFd>> {
        let used = self.questions.answered();
        {
            let mut open = lock(&self.open);
            if let Some(o) = open.iter_mut().find(|o| o.file == file && o.direct == direct) {
                o.used = used;
                return Ok(o.fd.clone());
            }
            while open.len() >= self.most_open && close_idlest(&mut open) {}
        }
        // Opened without the lock: on a network file system this may take long, and other threads need not wait for it.
        let fd = self.open_new(file, direct)?;
        let mut open = lock(&self.open);
        // Another thread may have opened it meanwhile. One of the two descriptors is enough.
        if let Some(o) = open.iter().find(|o| o.file == file && o.direct == direct) {
            return Ok(o.fd.clone());
        }
        open.push(Open { file, direct, used, fd: fd.clone() });
        Ok(fd)
    }

    /// A descriptor that is the caller's own, for reading through the page cache: what the file system reads ahead for it
    /// follows the caller's reads alone.
    pub(crate) fn open_own(&self, file: u32) -> Result<Arc<OwnedFd>> {
        self.open_new(file, false)
    }

    /// Whether the file system reads ahead for each descriptor by itself: one of another process, which sees the reads of
    /// several threads on one descriptor as random.
    pub(crate) fn reads_ahead_by_descriptor(&self, file: u32) -> bool {
        self.facts(file).is_ok_and(|facts| facts.fs == "fuse")
    }

    fn open_new(&self, file: u32, direct: bool) -> Result<Arc<OwnedFd>> {
        let _asking = self.questions.ask(file);
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let fd = loop {
            match open_read_only(self.path(file), flags) {
                Ok(fd) => break fd,
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    if !close_idlest(&mut lock(&self.open)) {
                        let text = format!(
                            "cannot open: {e}; every descriptor of this load is in use. RLIMIT_NOFILE is {}: raise it \
                             (ulimit -n) or close files elsewhere in the process",
                            descriptor_limit()
                        );
                        return Err(Error::new(ErrorKind::Limit, text).at(self.path(file)));
                    }
                }
                // The file was there when its header was read.
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Err(self.gone(file)),
                Err(e) => {
                    return Err(Error::io(if direct { "open with O_DIRECT" } else { "open" }, &e).at(self.path(file)))
                }
            }
        };
        self.opens.fetch_add(1, Ordering::Relaxed);
        self.compare(file, &statx(Some(fd.as_raw_fd()), None, self.path(file))?.identity)?;
        Ok(Arc::new(fd))
    }

    /// Closes every descriptor that no read is using.
    pub fn close_idle(&self) {
        lock(&self.open).retain(|o| Arc::strong_count(&o.fd) > 1);
    }

    /// Keeps no descriptor of file number `file` any more. The caller closes these; reads that use one go on.
    pub(crate) fn take_open(&self, file: u32) -> Vec<Arc<OwnedFd>> {
        let mut open = lock(&self.open);
        let (taken, others) = std::mem::take(&mut *open).into_iter().partition::<Vec<_>, _>(|o| o.file == file);
        *open = others;
        taken.into_iter().map(|o| o.fd).collect()
    }

    /// Whether file number `file` is known to be on this machine, where nothing but the kernel closes it.
    pub(crate) fn closes_at_once(&self, file: u32) -> bool {
        let file = &self.files[file as usize];
        known_disks::is_known(file.identity.dev) || file.facts.get().is_some_and(|facts| facts.kind != FsKind::Network)
    }

    /// Facts about the file system of file number `file`.
    pub fn facts(&self, file: u32) -> Result<Facts> {
        let known = &self.files[file as usize];
        if let Some(facts) = known.facts.get() {
            return Ok(*facts);
        }
        let fd = self.open(file, false)?;
        let _asking = self.questions.ask(file);
        let facts = facts_of(&fd, self.path(file))?;
        Ok(*known.facts.get_or_init(|| facts))
    }

    /// Whether a read through the page cache that fails has written nothing.
    pub(crate) fn errors_write_nothing(&self, file: u32) -> bool {
        self.facts(file).is_ok_and(|facts| errors_write_nothing(facts.fs))
    }

    /// Treats file number `file` as if it were on storage device number `storage`, for tests of several drives on one
    /// machine.
    #[cfg(any(test, feature = "testing"))]
    pub fn pretend_storage(&self, file: u32, storage: u64) -> Result<()> {
        let fd = self.open(file, false)?;
        let facts = Facts { storage, ..facts_of(&fd, self.path(file))? };
        self.files[file as usize].facts.get_or_init(|| facts);
        Ok(())
    }

    /// The parts of file number `file` in the page cache.
    pub fn resident_ranges(&self, file: u32) -> Result<Residency> {
        self.resident_within(file, 0..self.size(file))
    }

    /// The parts of `range` of file number `file` in the page cache: whole pages, cut at the end of the file. A caller
    /// that wants one tensor of a large file need not ask about the rest.
    pub fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        let size = self.size(file);
        let range = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE).min(size);
        if range.is_empty() {
            return Ok(Residency::default());
        }
        if self.facts(file)?.kind == FsKind::Memory {
            return Ok(Residency { ranges: std::iter::once(range).collect(), calls: 0, samples: 0 });
        }
        let fd = self.open(file, false)?;
        resident(fd.as_raw_fd(), range).map_err(|e| e.at(self.path(file)))
    }

    /// An error of kind `Changed` if file number `file` is no longer what it was when its header was read.
    pub fn verify_file(&self, file: u32) -> Result<()> {
        let _asking = self.questions.ask(file);
        match statx(None, None, self.path(file)) {
            Ok(now) => self.compare(file, &now.identity),
            Err(e) if e.kind() == ErrorKind::NotFound => Err(self.gone(file)),
            Err(e) => Err(e),
        }
    }

    fn gone(&self, file: u32) -> Error {
        Error::new(ErrorKind::Changed, "the file is gone: it was removed or renamed after its header was read")
            .at(self.path(file))
    }

    fn compare(&self, file: u32, now: &Identity) -> Result<()> {
        let File { identity, path, .. } = &self.files[file as usize];
        let mtime_ns = if self.rewritten { identity.mtime_ns } else { now.mtime_ns };
        identity.check(&Identity { mtime_ns, ..*now }).map_err(|e| e.at(path))
    }
}

/// Closes the least recently used idle descriptor. Returns false if every descriptor is in use.
fn close_idlest(open: &mut Vec<Open>) -> bool {
    let idle = open.iter().enumerate().filter(|(_, o)| Arc::strong_count(&o.fd) == 1);
    match idle.min_by_key(|(_, o)| o.used).map(|(i, _)| i) {
        Some(i) => {
            open.swap_remove(i);
            true
        }
        None => false,
    }
}

/// Facts about the file system of a file, for diagnosis.
pub fn facts_at(path: &Path) -> Result<Facts> {
    Files::from_paths(&[path])?.facts(0)
}

/// Descriptors that this process may have.
pub(crate) fn descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one rlimit.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => limit.rlim_cur,
        _ => 1024,
    }
}

fn open_read_only(path: &Path, flags: i32) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    loop {
        // O_NONBLOCK: if a FIFO has replaced the file by now, opening it must not wait for a writer.
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY | flags;
        // SAFETY: `path` is a C string that outlives the call.
        let fd = unsafe { libc::open(path.as_ptr(), flags) };
        if fd >= 0 {
            // SAFETY: the descriptor is new and nobody else's.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_still_waits_is_seen_after_another_was_answered() {
        let paths: Vec<_> = (0..3).map(|_| tempfile::NamedTempFile::new().unwrap()).collect();
        let files = Files::from_paths(&paths).unwrap();
        assert_eq!(files.questions.asking(), None);
        let hangs = files.questions.ask(1);
        files.open(2, false).unwrap();
        files.open(1, false).unwrap();
        assert_eq!(files.questions.asking().map(|a| a.1), Some(1));
        drop(hangs);
        assert_eq!(files.questions.asking(), None);
    }
}
