//! The shard files of one load: descriptors, what their file systems allow, which of their pages are resident, and
//! whether they are still the files whose headers were read.

use super::disks;
use super::fill_after::{stop_fills_of, DiskUse};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Identity, ShardFile};
use crate::machine::page_size;
use crate::options::PAGE;
use std::ffi::CString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The kernel never moves more than this in one read (`MAX_RW_COUNT`): longer reads come back short.
const MOST_PER_CALL: u64 = 0x7fff_f000;
/// Descriptors kept open at once. A checkpoint with more shards reads each of them for a moment only.
const MOST_OPEN: u64 = 512;
/// The finest granularity of residency, in bytes: for less, reading through the page cache is as fast as asking.
const FINEST: u64 = 128 << 10;
/// Most `RWF_NOWAIT` samples for one file: each miss costs 5 us and starts a little read-ahead.
const MOST_SAMPLES: u64 = 1024;
const MIB: u64 = 1 << 20;

/// What kind of storage a file system is on. This decides which routes make sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FsKind {
    /// The page cache is the storage (tmpfs, ramfs, hugetlbfs).
    Memory,
    /// A disk of this machine (overlay counts as local: its layers nearly always are).
    Local,
    /// Remote storage, another process (FUSE), or unknown: may stall, and is never mapped.
    Network,
}

/// What the file system of a shard file allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The kind of storage that the file system is on.
    pub kind: FsKind,
    /// Its name, such as "ext4"; "unknown" if its magic number is unknown.
    pub fs: &'static str,
    /// Device number of the storage: files with different numbers can be read side by side.
    pub storage: u64,
    /// Bytes that addresses, offsets and lengths of O_DIRECT reads must be multiples of. `None`: not supported. If the
    /// kernel does not say (before 6.1, and most network file systems), 4096 is assumed; a read may then still be
    /// refused.
    pub direct_align: Option<u64>,
    /// Whether mapping it is safe. If a remote machine truncates or loses a mapped file, its reader is killed.
    pub mappable: bool,
}

/// Which pages of a file are in the page cache, and how many calls it took to find out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Residency {
    /// Sorted, disjoint byte ranges, cut at the end of the file.
    pub ranges: Vec<Range<u64>>,
    /// Calls of `cachestat`.
    pub calls: u32,
    /// One-byte `RWF_NOWAIT` reads (if `cachestat` is refused). Those that miss start a little read-ahead.
    pub samples: u32,
}

impl Residency {
    /// Bytes in the ranges.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }
}

/// The shard files of one load.
///
/// Descriptors are opened on demand and closed again, least recently used first, so that a checkpoint of thousands of
/// shards loads under a small `RLIMIT_NOFILE`. Every open compares the file with the identity it had when its header was
/// read.
#[derive(Debug)]
pub struct Files {
    files: Vec<File>,
    open: Mutex<Vec<Open>>,
    most_open: usize,
    clock: AtomicU64,
    opens: AtomicU64,
    most_per_call: AtomicU64,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    identity: Identity,
    facts: OnceLock<Facts>,
    touched: AtomicBool,
    /// Threads that are asking the file system about it.
    asking: AtomicU32,
}

#[derive(Debug)]
struct Open {
    file: u32,
    direct: bool,
    used: u64,
    fd: Arc<OwnedFd>,
}

impl Files {
    /// The files of a checkpoint; nothing is opened yet.
    pub fn new(files: &[ShardFile]) -> Files {
        Self::with_identities(files.iter().map(|f| (f.location.clone(), f.identity)))
    }

    /// Files by path, as they are now: for tools whose files need not be shard files.
    pub fn from_paths<P: AsRef<Path>>(paths: &[P]) -> Result<Files> {
        let files = paths
            .iter()
            .map(|p| Ok((p.as_ref().to_path_buf(), identity_of(p.as_ref())?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self::with_identities(files))
    }

    fn with_identities(files: impl IntoIterator<Item = (PathBuf, Identity)>) -> Files {
        let files = files
            .into_iter()
            .map(|(path, identity)| File {
                path,
                identity,
                facts: OnceLock::new(),
                touched: AtomicBool::new(false),
                asking: AtomicU32::new(0),
            })
            .collect();
        // A quarter of the limit: the rest of the process needs descriptors too.
        let most_open = (descriptor_limit() / 4).clamp(8, MOST_OPEN) as usize;
        Files {
            files,
            open: Mutex::default(),
            most_open,
            clock: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            most_per_call: AtomicU64::new(MOST_PER_CALL),
        }
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there is none.
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

    /// Whether the two sets have a file in common.
    pub(super) fn share(&self, other: &Files) -> bool {
        let same = |a: &File, b: &File| (a.identity.dev, a.identity.ino) == (b.identity.dev, b.identity.ino);
        self.files.iter().any(|a| other.files.iter().any(|b| same(a, b)))
    }

    /// The file whose answer a thread waits for, and the number of answers so far, which changes as answers come;
    /// `None` if no thread waits.
    pub(crate) fn asking(&self) -> Option<(u64, u32)> {
        // Counted per file and not in one place: an answer for one file must not end the wait for another that hangs.
        let file = self.files.iter().position(|f| f.asking.load(Ordering::Relaxed) > 0)?;
        Some((self.clock.load(Ordering::Relaxed), file as u32))
    }

    /// Whether a file that was opened is on a network file system, so that asking about it may hang.
    pub(crate) fn may_hang(&self) -> bool {
        self.files.iter().any(|f| f.facts.get().is_some_and(|f| f.kind == FsKind::Network))
    }

    /// Whether all files are known to be on disks of this machine, because this process has asked about their devices
    /// before. Then no other thread is needed in case the file system hangs.
    pub(crate) fn are_known_local(&self) -> bool {
        self.files.iter().all(|f| disks::is_known(f.identity.dev))
    }

    fn ask(&self, file: u32) -> Asking<'_> {
        self.clock.fetch_add(1, Ordering::Relaxed);
        let asking = &self.files[file as usize].asking;
        asking.fetch_add(1, Ordering::Relaxed);
        Asking(asking)
    }

    /// Number of times a descriptor was opened.
    pub fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Caps the bytes of one system call; longer reads take several calls. The kernel has such a cap itself (2 GiB).
    /// With this, tests reach the code behind short reads without extents of 2 GiB.
    pub fn cap_calls(&self, bytes: u64) {
        self.most_per_call.store(bytes.clamp(PAGE, MOST_PER_CALL), Ordering::Relaxed);
    }

    pub(super) fn most_per_call(&self) -> u64 {
        self.most_per_call.load(Ordering::Relaxed)
    }

    /// A descriptor of file number `file` for reading, with or without O_DIRECT. It stays open at least as long as the
    /// `Arc` is held. Kind `Limit` if the process has no descriptor left and none of these is idle.
    pub fn open(&self, file: u32, direct: bool) -> Result<Arc<OwnedFd>> {
        let used = self.clock.fetch_add(1, Ordering::Relaxed);
        {
            let mut open = lock(&self.open);
            if let Some(o) = open.iter_mut().find(|o| o.file == file && o.direct == direct) {
                o.used = used;
                return Ok(o.fd.clone());
            }
            while open.len() >= self.most_open && close_idlest(&mut open) {}
        }
        // Opened without the lock: on a network file system this may take long, and other threads need not wait for it.
        let _asking = self.ask(file);
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
        self.files[file as usize].touched.store(true, Ordering::Relaxed);
        let fd = Arc::new(fd);
        let mut open = lock(&self.open);
        // Another thread may have opened it meanwhile. One of the two descriptors is enough.
        if let Some(o) = open.iter().find(|o| o.file == file && o.direct == direct) {
            return Ok(o.fd.clone());
        }
        open.push(Open { file, direct, used, fd: fd.clone() });
        Ok(fd)
    }

    /// Closes every descriptor that no read is using.
    pub fn close_idle(&self) {
        lock(&self.open).retain(|o| Arc::strong_count(&o.fd) > 1);
    }

    /// What the file system of file number `file` allows.
    pub fn facts(&self, file: u32) -> Result<Facts> {
        if let Some(facts) = self.files[file as usize].facts.get() {
            return Ok(*facts);
        }
        let fd = self.open(file, false)?;
        let _asking = self.ask(file);
        let facts = facts_of(&fd, self.path(file))?;
        Ok(*self.files[file as usize].facts.get_or_init(|| facts))
    }

    /// [`facts`](Self::facts), if they are known already. Does not ask the file system.
    pub(super) fn known_facts(&self, file: u32) -> Option<Facts> {
        self.files[file as usize].facts.get().copied()
    }

    /// Treats file number `file` as if it were on storage device number `storage`, for tests of several drives on one
    /// machine.
    #[doc(hidden)]
    pub fn pretend_storage(&self, file: u32, storage: u64) -> Result<()> {
        let fd = self.open(file, false)?;
        let facts = Facts { storage, ..facts_of(&fd, self.path(file))? };
        self.files[file as usize].facts.get_or_init(|| facts);
        Ok(())
    }

    /// Which parts of file number `file` are in the page cache.
    pub fn resident_ranges(&self, file: u32) -> Result<Residency> {
        self.resident_within(file, 0..self.size(file))
    }

    /// Which parts of `range` of file number `file` are in the page cache: whole pages, cut at the end of the file. A
    /// caller that wants one tensor of a large file need not ask about the rest.
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

    /// An error of kind `Changed` if a file that was opened is no longer what it was when its header was read.
    pub fn verify_unchanged(&self) -> Result<()> {
        for (number, file) in self.files.iter().enumerate() {
            if !file.touched.load(Ordering::Relaxed) {
                continue;
            }
            self.verify_file(number as u32)?;
        }
        Ok(())
    }

    /// The same for one file, whether it was opened or not.
    pub fn verify_file(&self, file: u32) -> Result<()> {
        let _asking = self.ask(file);
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
        let known = &self.files[file as usize];
        known.identity.check(now).map_err(|e| e.at(&known.path))
    }
}

/// A thread asks the file system about a file, until this is dropped.
struct Asking<'f>(&'f AtomicU32);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Closes the least recently used descriptor that nothing holds; false if there is none.
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

/// Drops the pages of `range` (`None`: of the whole file) from the page cache, and writes dirty ones back first.
/// Returns the bytes of the file that are still resident: pages that a process maps stay. Needs no privilege.
pub fn evict(path: &Path, range: Option<Range<u64>>) -> Result<u64> {
    let files = Files::from_paths(&[path])?;
    stop_fills_of(&files);
    let fd = files.open(0, false)?;
    // For the kernel, a length of 0 means "to the end".
    let range = range.unwrap_or(0..0);
    let (offset, len) = (range.start as i64, (range.end - range.start) as i64);
    let write_back = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: plain system calls on a descriptor we hold. What sync_file_range cannot do (ESPIPE, EINVAL on odd file
    // systems) only means that dirty pages stay, which the count returned below shows.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), offset, len, write_back) };
    // SAFETY: as above.
    let rc = unsafe { libc::posix_fadvise(fd.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED) };
    if rc != 0 {
        return Err(Error::io("drop from the page cache", &io::Error::from_raw_os_error(rc)).at(path));
    }
    Ok(files.resident_ranges(0)?.bytes())
}

/// Reads the file into the page cache, with `threads` threads (at least one). Returns its size in bytes.
pub fn warm(path: &Path, threads: usize) -> Result<u64> {
    warm_telling(path, threads, &Warming::default())
}

/// How far a [`warm`] has come, and whether it is to go on.
#[derive(Default)]
pub(super) struct Warming {
    read: AtomicU64,
    stopped: AtomicBool,
}

impl Warming {
    /// Bytes read.
    pub(super) fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

pub(super) fn warm_telling(path: &Path, threads: usize, state: &Warming) -> Result<u64> {
    let _disk = DiskUse::begin();
    let files = Files::from_paths(&[path])?;
    let fd = files.open(0, false)?;
    let size = files.size(0);
    let next = AtomicU64::new(0);
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let work = || {
        let mut scratch = vec![0u8; MIB as usize];
        loop {
            let at = next.fetch_add(MIB, Ordering::Relaxed);
            if at >= size || state.stopped.load(Ordering::Relaxed) || lock(&failed).is_some() {
                return;
            }
            let mut to = [libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: scratch.len() }];
            // SAFETY: `scratch` is MIB bytes long and ours.
            if let Err(e) = unsafe { read_fully(fd.as_raw_fd(), at, &mut to, 0, MOST_PER_CALL) } {
                *lock(&failed) = Some(Error::io("read", &e).at(path).range(at..(at + MIB).min(size)));
            }
            state.read.fetch_add(MIB, Ordering::Relaxed);
        }
    };
    let useful = usize::try_from(size.div_ceil(MIB)).unwrap_or(usize::MAX);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(useful) {
            // If no more threads can be started (a process limit), fewer do the work. This thread works in any case.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(size),
    }
}

/// The identity of the file at `path`, now.
pub fn identity_of(path: &Path) -> Result<Identity> {
    Ok(statx(None, None, path)?.identity)
}

/// What the file system under `path` (a file) allows: for diagnosis.
pub fn facts_at(path: &Path) -> Result<Facts> {
    Files::from_paths(&[path])?.facts(0)
}

/// Reads from `offset` into `to`, up to the end of the file. Returns the bytes that arrived. `to` is used up. `flags`
/// are those of preadv2; `cap` is the most bytes of one call.
///
/// # Safety
/// Every place in `to` is writable for its length.
pub(super) unsafe fn read_fully(
    fd: RawFd,
    offset: u64,
    mut to: &mut [libc::iovec],
    flags: i32,
    cap: u64,
) -> io::Result<u64> {
    /// The kernel takes no more places than this in one call.
    const IOV_MAX: usize = 1024;
    let mut got = 0u64;
    loop {
        while to.first().is_some_and(|v| v.iov_len == 0) {
            to = &mut to[1..];
        }
        if to.is_empty() {
            return Ok(got);
        }
        let (mut count, mut bytes) = (0, 0u64);
        while count < to.len().min(IOV_MAX) && bytes + to[count].iov_len as u64 <= cap {
            bytes += to[count].iov_len as u64;
            count += 1;
        }
        let at = (offset + got) as i64;
        let n = match (count, flags) {
            // SAFETY: the caller vouches for the places.
            (0, 0) => unsafe { libc::pread(fd, to[0].iov_base, cap as usize, at) },
            (0, _) => {
                let first = libc::iovec { iov_base: to[0].iov_base, iov_len: cap as usize };
                // SAFETY: as above.
                unsafe { libc::preadv2(fd, &raw const first, 1, at, flags) }
            }
            // SAFETY: as above.
            (1, 0) => unsafe { libc::pread(fd, to[0].iov_base, to[0].iov_len, at) },
            // SAFETY: as above.
            (_, 0) => unsafe { libc::preadv(fd, to.as_ptr(), count as i32, at) },
            // SAFETY: as above.
            _ => unsafe { libc::preadv2(fd, to.as_ptr(), count as i32, at, flags) },
        };
        match n {
            0 => return Ok(got),
            1.. => {
                got += n as u64;
                let mut left = n as usize;
                for v in to.iter_mut() {
                    let step = left.min(v.iov_len);
                    // SAFETY: stays within, or one past, the place.
                    v.iov_base = unsafe { v.iov_base.cast::<u8>().add(step) }.cast();
                    v.iov_len -= step;
                    left -= step;
                    if left == 0 {
                        break;
                    }
                }
            }
            _ => {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere must not become a second one here. Every critical section leaves its data consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn descriptor_limit() -> u64 {
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

struct Stat {
    identity: Identity,
    direct: Option<(u32, u32)>,
}

/// `STATX_DIOALIGN` (6.1), and where its two fields are in the 256-byte record (include/uapi/linux/stat.h).
const STATX_DIOALIGN: u32 = 0x2000;
const DIO_FIELDS: usize = 0x98;

fn statx(fd: Option<RawFd>, mask: Option<u32>, path: &Path) -> Result<Stat> {
    let failed = |e: io::Error| Error::io("stat", &e).at(path);
    let name = match fd {
        Some(_) => CString::default(),
        None => {
            CString::new(path.as_os_str().as_bytes()).map_err(|_| failed(io::Error::from_raw_os_error(libc::EINVAL)))?
        }
    };
    let flags = if fd.is_some() { libc::AT_EMPTY_PATH } else { 0 };
    let mut record = [0u64; 32];
    const { assert!(std::mem::size_of::<libc::statx>() == 256) };
    let mask = libc::STATX_BASIC_STATS | mask.unwrap_or(0);
    loop {
        // SAFETY: the record is the kernel's fixed 256 bytes, aligned to 8, and `name` outlives the call.
        let rc = unsafe {
            libc::statx(fd.unwrap_or(libc::AT_FDCWD), name.as_ptr(), flags, mask, record.as_mut_ptr().cast())
        };
        if rc == 0 {
            break;
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(failed(e));
        }
    }
    // SAFETY: plain data of the same size, filled by the kernel (zero where it had nothing to say).
    let s: libc::statx = unsafe { std::mem::transmute_copy(&record) };
    let ns = |t: libc::statx_timestamp| i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec);
    let dev = libc::makedev(s.stx_dev_major, s.stx_dev_minor);
    let identity =
        Identity { dev, ino: s.stx_ino, size: s.stx_size, mtime_ns: ns(s.stx_mtime), ctime_ns: ns(s.stx_ctime) };
    let fields = record[DIO_FIELDS / 8].to_ne_bytes();
    let field = |i: usize| u32::from_ne_bytes([fields[i], fields[i + 1], fields[i + 2], fields[i + 3]]);
    let direct = (s.stx_mask & STATX_DIOALIGN != 0).then(|| (field(0), field(4)));
    Ok(Stat { identity, direct })
}

fn facts_of(fd: &OwnedFd, path: &Path) -> Result<Facts> {
    // SAFETY: an all-zero statfs is a valid value, and fstatfs writes only into it.
    let mut s: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as above; the descriptor is held by the caller.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut s) } != 0 {
        return Err(Error::io("statfs", &io::Error::last_os_error()).at(path));
    }
    // The type's width and sign differ between architectures; magic numbers are 32 bits.
    let (kind, fs) = file_system(s.f_type as u32);
    let stat = statx(Some(fd.as_raw_fd()), Some(STATX_DIOALIGN), path)?;
    let direct_align = match (kind, stat.direct) {
        (FsKind::Memory, _) => None,
        (_, Some((0, _) | (_, 0))) => None,
        (_, Some((memory, offset))) => Some(u64::from(memory.max(offset))),
        (_, None) => Some(PAGE),
    };
    // hugetlbfs maps only whole huge pages at offsets that are multiples of a huge page. Data in a file never begins at
    // one.
    let mappable = kind != FsKind::Network && fs != "hugetlbfs";
    if kind == FsKind::Local {
        disks::remember(stat.identity.dev);
    }
    Ok(Facts { kind, fs, storage: stat.identity.dev, direct_align, mappable })
}

/// File systems by magic number (include/uapi/linux/magic.h and their own headers). virtiofs answers like FUSE.
pub(crate) fn file_system(magic: u32) -> (FsKind, &'static str) {
    use FsKind::{Local, Memory, Network};
    match magic {
        0x0102_1994 => (Memory, "tmpfs"),
        0x8584_58f6 => (Memory, "ramfs"),
        0x9584_58f6 => (Memory, "hugetlbfs"),
        0xef53 => (Local, "ext4"),
        0x5846_5342 => (Local, "xfs"),
        0x9123_683e => (Local, "btrfs"),
        0x2fc1_2fc1 => (Local, "zfs"),
        0x794c_7630 => (Local, "overlay"),
        0xf2f5_2010 => (Local, "f2fs"),
        0xca45_1a4e => (Local, "bcachefs"),
        0xe0f5_e1e2 => (Local, "erofs"),
        0x7371_7368 => (Local, "squashfs"),
        0x7366_746e | 0x5346_544e => (Local, "ntfs"),
        0x2011_bab0 => (Local, "exfat"),
        0x4d44 => (Local, "vfat"),
        0x9660 => (Local, "iso9660"),
        0x3153_464a => (Local, "jfs"),
        0x6969 => (Network, "nfs"),
        0xff53_4d42 | 0x517b => (Network, "cifs"),
        0xfe53_4d42 => (Network, "smb2"),
        0x0bd0_0bd0 => (Network, "lustre"),
        0x4750_4653 => (Network, "gpfs"),
        0x00c3_6400 => (Network, "ceph"),
        0x6573_5546 => (Network, "fuse"),
        0x0102_1997 => (Network, "9p"),
        0x5346_414f | 0x6b41_4653 => (Network, "afs"),
        0x0116_1970 => (Network, "gfs2"),
        0x7461_636f => (Network, "ocfs2"),
        0x1983_0326 => (Network, "beegfs"),
        0x2003_0528 => (Network, "orangefs"),
        0xaad7_aaea => (Network, "panfs"),
        0x786f_4256 => (Network, "vboxsf"),
        _ => (Network, "unknown"),
    }
}

/// `cachestat` has this number on every architecture that matters here (since Linux 6.5).
const SYS_CACHESTAT: libc::c_long = 451;

/// Pages of `range` that are in the page cache. EPERM if the process may not write the file and does not own it.
pub(super) fn cached_pages(fd: RawFd, range: &Range<u64>) -> io::Result<u64> {
    let asked = [range.start, range.end - range.start];
    let mut told = [0u64; 5];
    // SAFETY: the two structures are two and five u64 (include/uapi/linux/mman.h).
    match unsafe { libc::syscall(SYS_CACHESTAT, fd, asked.as_ptr(), told.as_mut_ptr(), 0) } {
        0 => Ok(told[0]),
        _ => Err(io::Error::last_os_error()),
    }
}

fn resident(fd: RawFd, range: Range<u64>) -> Result<Residency> {
    let mut found = Residency::default();
    match count_resident(fd, range.clone(), &mut found) {
        Ok(()) => Ok(found),
        // Refused (not the owner), not there (before 6.5, or a seccomp filter), or not for this file system. mincore
        // cannot replace it: to a process that may not know, it says that every page is resident.
        Err(_) => {
            found.ranges.clear();
            sample_resident(fd, range, &mut found)?;
            Ok(found)
        }
    }
}

/// One call tells whether all or nothing of a range is resident (measured: 3 to 22 us for 512 MiB). Any other range is
/// divided.
fn count_resident(fd: RawFd, range: Range<u64>, found: &mut Residency) -> io::Result<()> {
    found.calls += 1;
    let pages = cached_pages(fd, &range)?;
    if pages == 0 {
        return Ok(());
    }
    let len = range.end - range.start;
    if pages >= range.end.div_ceil(page_size()) - range.start / page_size() {
        push(&mut found.ranges, range);
        return Ok(());
    }
    let step = match len {
        _ if len <= FINEST => return Ok(()),
        _ if len <= MIB => FINEST,
        _ if len <= 64 * MIB => MIB,
        _ => 64 * MIB,
    };
    let mut start = range.start;
    while start < range.end {
        let end = (start + step).min(range.end);
        count_resident(fd, start..end, found)?;
        start = end;
    }
    Ok(())
}

/// If a read that must not wait returns a page, the page is resident. Unlike mincore, this is true for every process.
fn sample_resident(fd: RawFd, range: Range<u64>, found: &mut Residency) -> Result<()> {
    let step = MIB.max((range.end - range.start).div_ceil(MOST_SAMPLES).next_multiple_of(PAGE));
    let mut start = range.start;
    while start < range.end {
        let end = (start + step).min(range.end);
        let mut byte = 0u8;
        let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        found.samples += 1;
        // In the middle: the read-ahead that a miss starts stays within the chunk, so samples do not influence each
        // other.
        let at = (start + (end - start) / 2) as i64;
        // SAFETY: one byte is read into `byte`.
        match unsafe { libc::preadv2(fd, &raw const to, 1, at, libc::RWF_NOWAIT) } {
            0.. => push(&mut found.ranges, start..end),
            _ => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EAGAIN) || e.kind() == io::ErrorKind::Interrupted => {}
                // This file system cannot answer. Nothing is known, so nothing counts as resident.
                e if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) => {
                    found.ranges.clear();
                    return Ok(());
                }
                e => return Err(Error::io("read", &e).range(start..end)),
            },
        }
        start = end;
    }
    Ok(())
}

fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_still_asks_is_seen_after_another_was_told() {
        let paths: Vec<_> = (0..3).map(|_| tempfile::NamedTempFile::new().unwrap()).collect();
        let files = Files::from_paths(&paths).unwrap();
        assert_eq!(files.asking(), None);
        let hangs = files.ask(1);
        files.open(2, false).unwrap();
        files.open(1, false).unwrap();
        assert_eq!(files.asking().map(|a| a.1), Some(1));
        drop(hangs);
        assert_eq!(files.asking(), None);
    }
}
