//! The store of files of this machine: what opening a checkpoint needs of them. Every call may hang, and says in a [`Watch`]
//! what it waits for. `file_objects` has them as the objects of a load.

use super::file_objects::{local_file, local_files};
use super::known_disks::leads_to_known_disk;
use super::location::Location;
use super::look::Look;
use super::object::{CheckSize, Head, Object, Objects, OpenObject, Store};
use super::version::{stat, Identity, Version};
use super::watch::{Waiting, Watch};
use crate::error::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// Bytes of one read. Each read of a long header or index is progress, even if the server is slow.
const MOST_PER_READ: usize = 1 << 20;

/// Entries of a directory that the caller's thread lists and sorts at most: about 1 ms.
const MOST_ENTRIES_HERE: usize = 2048;

/// The store of files of this machine: its locations are paths.
pub fn local() -> Arc<dyn Store> {
    Arc::new(Local)
}

/// See [`local`].
#[derive(Debug, Default)]
pub(super) struct Local;

impl Store for Local {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        let names = self.entries(at, &Watch::default())?;
        Ok(names.map_or_else(|| vec![at.clone()], |names| names.iter().map(|name| at.within(name)).collect()))
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        self.open(at, first, &Watch::default()).map(OpenObject::close).map_err(|e| e.at(at))
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        self.read_parts(object, &[range])
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        Ok(Arc::new(local_files(objects)?))
    }

    fn read_parts(&self, object: &Object, ranges: &[Range<u64>]) -> Result<Vec<u8>> {
        let (path, opened) = local_file(object)?;
        let read = || {
            let file = open_without_waiting(path)?;
            let mut bytes = Vec::new();
            let read = ranges.iter().try_for_each(|range| {
                let at = bytes.len();
                bytes.resize(at + (range.end - range.start) as usize, 0);
                file.read_exact_at(&mut bytes[at..], range.start)
            });
            // First: a file that is too short by now is another one.
            opened.check(&Identity::of(&file).map_err(|e| Error::io("stat", &e))?)?;
            read.map(|()| bytes).map_err(|e| Error::io("read", &e))
        };
        read().map_err(|e| e.at(path))
    }

    fn open<'w>(&'w self, at: &Location, first: u64, watch: &'w Watch) -> Result<OpenObject<'w>> {
        let path = at.as_path();
        let asking = watch.ask(path);
        // The type is checked before the file is opened, because opening some devices has effects, and once more
        // afterwards, because the name may stand for another file by then.
        let found = fs::metadata(path).map_err(|e| os_error("open", &e))?;
        asking.answered();
        regular(found.mode())?;
        let file = open_without_waiting(path)?;
        asking.answered();
        let stat = stat(&file).map_err(|e| Error::io("stat", &e))?;
        regular(stat.st_mode)?;
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
        // In this order: closing the file may have to wait too.
        let opened = (file, asking);
        let read_on = move |bytes: &mut Vec<u8>, until| read_until(&opened, watch, bytes, until);
        let mut bytes = Vec::new();
        read_on(&mut bytes, identity.size.min(first))?;
        let head = Head { bytes, size: identity.size, version: Version::Inode(identity) };
        Ok(OpenObject { head, read_on: Box::new(read_on) })
    }

    fn content(&self, at: &Location, most: u64, watch: &Watch, check: CheckSize<'_>) -> Result<Vec<u8>> {
        let path = at.as_path();
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
            let read =
                if watch.is_here() { read_at_once(&file, into, at as u64) } else { file.read_at(into, at as u64) };
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

    fn entries(&self, at: &Location, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        let path = at.as_path();
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

    fn is_gone(&self, at: &Location, watch: &Watch) -> bool {
        let _asking = watch.ask(at.as_path());
        fs::metadata(at).is_err_and(|e| matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)))
    }

    fn is_link(&self, at: &Location) -> bool {
        at.as_path().is_symlink()
    }

    fn leads_to_known_disk(&self, at: &Location) -> bool {
        leads_to_known_disk(at.as_path())
    }

    fn is_distant(&self) -> bool {
        false
    }

    fn look(&self, _at: &Location, _times: usize) -> Result<Look> {
        Err(Error::new(ErrorKind::Unsupported, "this is a file of this machine"))
    }
}

/// Reads on until there are `until` bytes.
fn read_until((file, asking): &(File, Waiting<'_>), watch: &Watch, bytes: &mut Vec<u8>, until: u64) -> Result<()> {
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

fn open_without_waiting(path: &Path) -> Result<File> {
    // O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| os_error("open", &e))
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

/// Refuses what is no regular file.
fn regular(mode: libc::mode_t) -> Result<()> {
    let text = match mode & libc::S_IFMT {
        libc::S_IFREG => return Ok(()),
        libc::S_IFDIR => {
            "a directory where a safetensors file was expected; a directory is opened on its own, not in a list"
        }
        libc::S_IFIFO => "a FIFO: a checkpoint is read at many places at once, so save it to a file first",
        libc::S_IFSOCK => "a socket, not a safetensors file",
        _ => "a device, not a safetensors file",
    };
    Err(Error::new(ErrorKind::NotACheckpoint, text))
}
