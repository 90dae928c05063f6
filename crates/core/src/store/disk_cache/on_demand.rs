//! Files that are open while they are used, and longer as far as the limit of descriptors allows: a checkpoint of hundreds of
//! shards has two or three in the cache for each.

use crate::store::per_process::PerProcess;
use crate::sync::{lock, Mutex};
use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, Weak};

/// The share of the process's descriptors that stays open: an eighth.
const SHARE: u64 = 8;
/// Fewest and most of them.
const BOUNDS: (u64, u64) = (8, 512);

/// The use of a file that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileUse {
    Read,
    ReadAndWrite,
    /// Writes past the page cache.
    WriteDirect,
}

/// A file that was opened and checked. It is opened again by its path, and must be the same file then.
#[derive(Debug)]
pub(super) struct OnDemandFile {
    path: PathBuf,
    identity: (u64, u64),
    usage: FileUse,
    open: Mutex<Option<Arc<File>>>,
}

/// Files that are open, in the order of their opening. Not loom's lock: no model has a cache.
type OpenOnDemand = std::sync::Mutex<VecDeque<Weak<OnDemandFile>>>;

/// The files that this process has opened. A forked child has its own: its parent may have held the lock when it forked.
static OPEN: PerProcess<OpenOnDemand> = PerProcess::new();

impl OnDemandFile {
    /// This open file.
    pub(super) fn new(path: PathBuf, file: File, found: &Metadata, usage: FileUse) -> Arc<OnDemandFile> {
        let open = Mutex::new(Some(Arc::new(file)));
        let kept = Arc::new(OnDemandFile { path, identity: (found.dev(), found.ino()), usage, open });
        enlist(&kept);
        kept
    }

    /// Its device and its number.
    pub(super) fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// The file, opened again if it was closed. It stays open as long as the caller has it.
    pub(super) fn get(self: &Arc<Self>) -> io::Result<Arc<File>> {
        let mut open = lock(&self.open);
        if let Some(file) = &*open {
            return Ok(file.clone());
        }
        let (read, write, direct) = match self.usage {
            FileUse::Read => (true, false, 0),
            FileUse::ReadAndWrite => (true, true, 0),
            FileUse::WriteDirect => (false, true, libc::O_DIRECT),
        };
        let flags = direct | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = File::options().read(read).write(write).custom_flags(flags).open(&self.path)?;
        let found = file.metadata()?;
        if (found.dev(), found.ino()) != self.identity {
            return Err(io::Error::from_raw_os_error(libc::ESTALE));
        }
        let file = Arc::new(file);
        *open = Some(file.clone());
        drop(open);
        enlist(self);
        Ok(file)
    }
}

/// Counts an open file, and closes the oldest ones that nobody uses if there are too many.
fn enlist(kept: &Arc<OnDemandFile>) {
    let most = (crate::store::files::descriptor_limit() / SHARE).clamp(BOUNDS.0, BOUNDS.1) as usize;
    let mut all = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    all.push_back(Arc::downgrade(kept));
    for _ in 0..all.len().saturating_sub(1) {
        if all.len() <= most {
            return;
        }
        let Some(oldest) = all.pop_front() else { return };
        if oldest.upgrade().is_some_and(|oldest| !oldest.is_closed()) {
            all.push_back(oldest);
        }
    }
}

impl FileUse {
    pub(super) fn of(write: bool) -> FileUse {
        match write {
            true => FileUse::ReadAndWrite,
            false => FileUse::Read,
        }
    }
}

impl OnDemandFile {
    /// Closes it; false: somebody uses it.
    fn is_closed(&self) -> bool {
        let Ok(mut open) = self.open.try_lock() else { return false };
        if open.as_ref().is_some_and(|file| Arc::strong_count(file) > 1) {
            return false;
        }
        *open = None;
        true
    }
}

/// Does something while this thread holds the lock of the open files.
#[cfg(test)]
pub(super) fn while_locked<T>(work: impl FnOnce() -> T) -> T {
    let _all = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    work()
}
