//! Reading what opening a checkpoint needs of the files of this machine: their first bytes, whole indexes, the names in a
//! folder. Every call may hang, and says in a [`Watch`] what it waits for.

use super::version::{stat, Identity};
use super::watch::{Waiting, Watch};
use crate::error::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Bytes of one read. Each read of a long header or index is progress, even if the server is slow.
pub(super) const MOST_PER_READ: usize = 1 << 20;

/// Entries of a directory that the caller's thread lists and sorts at most: about 1 ms.
const MOST_ENTRIES_HERE: usize = 2048;

/// The first bytes of an open file.
pub(crate) struct LocalHead<'w> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) identity: Identity,
    file: File,
    watch: &'w Watch,
    asking: Waiting<'w>,
}

impl<'w> LocalHead<'w> {
    /// Opens the regular file at `path` and reads its first `first` bytes, or all of a shorter one.
    pub(crate) fn open(path: &Path, first: u64, watch: &'w Watch) -> Result<LocalHead<'w>> {
        let asking = watch.ask(path);
        // The type is checked before the file is opened, because opening some devices has effects, and once more
        // afterwards, because the name may stand for another file by then.
        let found = fs::metadata(path).map_err(|e| os_error("open", &e))?;
        asking.answered();
        let kind = found.file_type();
        if !kind.is_file() {
            return Err(not_a_file(if kind.is_dir() {
                libc::S_IFDIR
            } else if kind.is_fifo() {
                libc::S_IFIFO
            } else if kind.is_socket() {
                libc::S_IFSOCK
            } else {
                libc::S_IFCHR
            }));
        }
        let file = open_without_waiting(path)?;
        asking.answered();
        let stat = stat(&file).map_err(|e| Error::io("stat", &e))?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(not_a_file(stat.st_mode & libc::S_IFMT));
        }
        let identity = Identity::from_stat(&stat);
        if identity.size == 0 {
            return Err(Error::new(
                ErrorKind::NotACheckpoint,
                "the file is empty: an unfinished download? Fetch it again",
            ));
        }
        // Without this, a read at the start of a cold file also brings in the read-ahead window (128 KiB and more) behind
        // it. A load that must leave no page cache behind must not do that. Advice only: a failure changes nothing.
        // SAFETY: plain call on an open descriptor.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
        let mut head = LocalHead { bytes: Vec::new(), identity, file, watch, asking };
        head.read_until(identity.size.min(first))?;
        Ok(head)
    }

    /// Reads on until there are `until` bytes.
    pub(crate) fn read_until(&mut self, until: u64) -> Result<()> {
        let LocalHead { bytes, file, watch, asking, .. } = self;
        let (mut at, until) = (bytes.len(), until as usize);
        if at >= until {
            return Ok(());
        }
        bytes.resize(until, 0);
        while at < until {
            let step = until.min(at + MOST_PER_READ);
            let into = &mut bytes[at..step];
            match if watch.is_here() { read_at_once(file, into, at as u64) } else { file.read_at(into, at as u64) } {
                Ok(0) => {
                    return Err(Error::new(ErrorKind::Truncated, "the file became shorter while its header was read")
                        .range(at as u64..until as u64));
                }
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // If bytes are not in the page cache, the read that waits for them also reports their errors.
                Err(_) if watch.is_here() => return Err(watch.too_much()),
                Err(e) => return Err(Error::io("read the header", &e).range(at as u64..until as u64)),
            }
            asking.answered();
        }
        Ok(())
    }

    /// Closes the file.
    pub(crate) fn close(self) -> (Identity, Vec<u8>) {
        (self.identity, self.bytes)
    }
}

fn open_without_waiting(path: &Path) -> Result<File> {
    // O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| os_error("open", &e))
}

/// All bytes of the file at `path`, at most one more than `most`. `check` may refuse its size before it is read.
pub(crate) fn local_content(
    path: &Path,
    most: u64,
    watch: &Watch,
    check: impl FnOnce(u64) -> Result<()>,
) -> Result<Vec<u8>> {
    let asking = watch.ask(path);
    let file = open_without_waiting(path)?;
    asking.answered();
    let found = file.metadata().map_err(|e| Error::io("stat", &e))?;
    if !found.is_file() {
        return Err(Error::new(ErrorKind::NotACheckpoint, "an index was expected, but this is not a regular file"));
    }
    let expected = found.len();
    check(expected)?;
    watch.afford(expected)?;
    let mut bytes = Vec::with_capacity(expected as usize + 1);
    // One byte more than the limit, so that a file that grows meanwhile cannot fill the memory.
    while bytes.len() as u64 <= most {
        let at = bytes.len();
        // One byte more than expected, to see the end.
        let step = (expected as usize + 1).saturating_sub(at).clamp(1, MOST_PER_READ);
        bytes.resize(at + step, 0);
        let into = &mut bytes[at..];
        let read = if watch.is_here() { read_at_once(&file, into, at as u64) } else { file.read_at(into, at as u64) };
        bytes.truncate(at + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => break,
            // One byte more was requested than there is: this is the end.
            Ok(n) if n < step && bytes.len() as u64 == expected => break,
            Ok(_) => asking.answered(),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if watch.is_here() => return Err(watch.too_much()),
            Err(e) => return Err(Error::io("read the index", &e)),
        }
    }
    Ok(bytes)
}

/// The names in the directory at `path`. `None` if `path` is not a directory.
pub(crate) fn local_names(path: &Path, watch: &Watch) -> Result<Option<Vec<OsString>>> {
    let asking = watch.ask(path);
    let found = fs::metadata(path).map_err(|e| os_error("open", &e).at(path))?;
    asking.answered();
    if !found.is_dir() {
        return Ok(None);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| os_error("list", &e).at(path))? {
        names.push(entry.map_err(|e| os_error("list", &e).at(path))?.file_name());
        asking.answered();
        if watch.is_here() && names.len() > MOST_ENTRIES_HERE {
            return Err(watch.too_much());
        }
    }
    Ok(Some(names))
}

/// Whether there is nothing at `path`: no file, or a link to nothing.
pub(crate) fn is_gone(path: &Path, watch: &Watch) -> bool {
    let _asking = watch.ask(path);
    fs::metadata(path).is_err_and(|e| matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)))
}

/// Whether `path` is a link.
pub(crate) fn is_link(path: &Path) -> bool {
    path.is_symlink()
}

/// Reads what is in the page cache, and does not wait.
fn read_at_once(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: `to` is `into`, which is borrowed for the call.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const to, 1, at as i64, libc::RWF_NOWAIT) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// An error of the operating system. For the person who typed the path, ENOTDIR and a broken link are "not found".
fn os_error(doing: &str, e: &io::Error) -> Error {
    match e.raw_os_error() {
        Some(libc::ENOTDIR) => Error::new(ErrorKind::NotFound, format!("cannot {doing}: {e}")),
        None => Error::new(ErrorKind::Invalid, format!("cannot {doing}: {e}")),
        Some(_) => Error::io(doing, e),
    }
}

fn not_a_file(mode: libc::mode_t) -> Error {
    let text = match mode {
        libc::S_IFDIR => {
            "a directory where a safetensors file was expected; a directory is opened on its own, not in a list"
        }
        libc::S_IFIFO => "a FIFO: a checkpoint is read at many places at once, so save it to a file first",
        libc::S_IFSOCK => "a socket, not a safetensors file",
        _ => "a device, not a safetensors file",
    };
    Error::new(ErrorKind::NotACheckpoint, text)
}
