//! Descriptors that stay open between reads: at most 64 in the process.

use super::facts::FsKind;
use super::files::Files;
use super::per_process::PerProcess;
use crate::detached::detached;
use crate::error::{ErrorKind, Result};
use crate::sync::{lock, Mutex};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Descriptors that this process keeps. One more closes the one that was used least recently.
pub(crate) const MOST_KEPT: usize = 64;

/// A server may have to answer when a file is closed. Nobody waits longer for it.
const CLOSING: Duration = Duration::from_millis(20);

/// Files of which descriptors stay open between reads.
#[derive(Debug)]
pub(crate) struct Kept {
    files: Arc<Files>,
    uses: Vec<Arc<LastUse>>,
}

/// When a file was read from.
#[derive(Debug, Default)]
struct LastUse {
    /// It is in the list of the process.
    listed: AtomicBool,
    /// The kernel knows that it is read in long stretches.
    advised: AtomicBool,
    last: AtomicU64,
}

#[derive(Debug)]
struct KeptFile {
    files: Weak<Files>,
    file: u32,
    used: Arc<LastUse>,
}

static KEPT: PerProcess<Mutex<Vec<KeptFile>>> = PerProcess::new();
static CLOCK: AtomicU64 = AtomicU64::new(0);

impl Kept {
    pub(crate) fn new(files: Files) -> Kept {
        let uses = (0..files.len()).map(|_| Arc::default()).collect();
        Kept { files: Arc::new(files), uses }
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// The descriptor of file number `file`, which stays open. Opening compares the file with its identity.
    ///
    /// # Errors
    /// The errors of [`Files::open`].
    pub(crate) fn open(&self, file: u32) -> Result<Arc<OwnedFd>> {
        self.opened(file, false)
    }

    /// The same for reads of long stretches: what the kernel reads at once is twice as long.
    pub(crate) fn open_for_stretches(&self, file: u32) -> Result<Arc<OwnedFd>> {
        self.opened(file, true)
    }

    fn opened(&self, file: u32, stretches: bool) -> Result<Arc<OwnedFd>> {
        let used = &self.uses[file as usize];
        used.last.store(CLOCK.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        let fd = match self.files.open(file, false) {
            Err(e) if e.kind() == ErrorKind::Limit => {
                let one = take_least_recent(&mut lock(KEPT.get())).ok_or(e)?;
                close(std::iter::once(one));
                self.files.open(file, false)?
            }
            opened => opened?,
        };
        if !used.listed.swap(true, Ordering::Relaxed) {
            used.advised.store(false, Ordering::Relaxed);
            let mut kept = lock(KEPT.get());
            kept.retain(|one| one.files.strong_count() > 0 && one.used.listed.load(Ordering::Relaxed));
            kept.push(KeptFile { files: Arc::downgrade(&self.files), file, used: used.clone() });
            let more = kept.len().saturating_sub(MOST_KEPT);
            let taken: Vec<_> = (0..more).filter_map(|_| take_least_recent(&mut kept)).collect();
            drop(kept);
            close(taken.into_iter());
        }
        if stretches && !used.advised.swap(true, Ordering::Relaxed) {
            // SAFETY: advice about a descriptor that is held here.
            unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, libc::POSIX_FADV_SEQUENTIAL) };
        }
        Ok(fd)
    }

    /// Copies `count` ranges of `len` bytes each, `apart` bytes between two of them, out of the page cache to `to`, which has
    /// room for them and which nobody else uses: one read and one look at the file. Whether all of them are there.
    ///
    /// # Errors
    /// The errors of opening; `Changed`.
    pub(crate) fn copy(
        &self,
        file: u32,
        start: u64,
        (count, len, apart): (u64, u64, u64),
        to: *mut u8,
    ) -> Result<bool> {
        let fd = self.open(file)?;
        let mut between = vec![0u8; if count > 1 { apart as usize } else { 0 }];
        let mut places = Vec::with_capacity(2 * count as usize);
        for number in 0..count {
            // SAFETY: the caller vouches for the place.
            let at = unsafe { to.add((number * len) as usize) };
            places.push(libc::iovec { iov_base: at.cast(), iov_len: len as usize });
            if apart > 0 && number + 1 < count {
                places.push(libc::iovec { iov_base: between.as_mut_ptr().cast(), iov_len: between.len() });
            }
        }
        // A file system without disk has nothing to wait for, and some of them refuse the question.
        let flags = if self.files.facts(file)?.kind == FsKind::Memory { 0 } else { libc::RWF_NOWAIT };
        let span = count * len + (count - 1) * apart;
        // SAFETY: the places are those of the caller, and `between`.
        let got = unsafe { libc::preadv2(fd.as_raw_fd(), places.as_ptr(), places.len() as i32, start as i64, flags) };
        if got < 0 || got as u64 != span {
            return Ok(false);
        }
        self.files.verify_file(file)?;
        Ok(true)
    }

    /// Closes file number `file`. Reads that are under way go on.
    pub(crate) fn close(&self, file: u32) {
        self.close_these(std::iter::once(file));
    }

    /// Closes all files.
    pub(crate) fn close_all(&self) {
        self.close_these(0..self.uses.len() as u32);
    }

    fn close_these(&self, files: impl Iterator<Item = u32>) {
        close(files.map(|file| {
            self.uses[file as usize].listed.store(false, Ordering::Relaxed);
            (self.files.clone(), file)
        }));
    }
}

/// Closes all files of this process that stay open between reads. Reads that are under way go on, and the next read of a file
/// opens it.
pub fn close_kept() {
    let taken: Vec<_> = {
        let mut kept = lock(KEPT.get());
        std::iter::from_fn(|| take_least_recent(&mut kept)).collect()
    };
    close(taken.into_iter());
}

/// Takes the file that was used least recently out of the list.
fn take_least_recent(kept: &mut Vec<KeptFile>) -> Option<(Arc<Files>, u32)> {
    loop {
        let last = |at: &usize| kept[*at].used.last.load(Ordering::Relaxed);
        let one = kept.swap_remove((0..kept.len()).min_by_key(last)?);
        one.used.listed.store(false, Ordering::Relaxed);
        if let Some(files) = one.files.upgrade() {
            return Some((files, one.file));
        }
    }
}

/// Closes these files, without any lock. A server may be slow to answer, or not answer at all: that is for another thread.
fn close(files: impl Iterator<Item = (Arc<Files>, u32)>) {
    let mut slow = Vec::new();
    for (files, file) in files {
        let open = files.take_open(file);
        if !files.closes_at_once(file) {
            slow.push((open, files));
        }
    }
    if slow.iter().any(|(open, _)| !open.is_empty()) {
        let close = move || {
            drop(slow);
            Ok(())
        };
        let _goes_on = detached(close, Some(CLOSING), || 0, || true);
    }
}
