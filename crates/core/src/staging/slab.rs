//! One staging buffer.

use super::memory_file::{self, MemoryFileId};
use crate::error::{Error, Result};
use crate::machine::page_size;
use crate::memory::Anonymous;
use crate::options::HUGE_PAGE;
use crate::sync::{lock, Mutex};
use std::any::Any;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::PoisonError;
use std::{mem, ptr};

/// One staging buffer, not inherited by a forked child. It is private anonymous memory, a file in memory that other
/// processes can map, or such a file of another process. From the size of a huge page on it consists of huge pages, where the
/// kernel has them.
pub struct Slab {
    /// Always there until it is dropped.
    memory: Option<Anonymous>,
    /// The file of a shared slab of this process.
    file: Option<memory_file::Counted>,
    /// The file of a shared slab, of this process or another.
    identity: Option<MemoryFileId>,
    /// Called when another process' slab is registered.
    keep: Option<KeepSlab>,
    /// A driver has refused to register it.
    refused: AtomicBool,
    pid: u32,
    /// By number of the driver. Dropped, hence undone, before the memory is unmapped.
    registrations: Mutex<Vec<(u64, Box<dyn Any + Send>)>>,
    /// Number of the driver that registered it last; 0: none.
    registered: AtomicU64,
}

/// A call that keeps a slab from now on.
pub(super) type KeepSlab = Box<dyn Fn(&Slab) + Send + Sync>;

impl Slab {
    /// One that belongs to no ring and counts nowhere: for a scratch buffer of a few MiB.
    pub(crate) fn new(nbytes: u64) -> Result<Self> {
        Self::map(nbytes.next_multiple_of(HUGE_PAGE), false)
    }

    /// One of the ring, private or `shared`. It is private too where the system has no shared memory, or where such slabs would
    /// take more than a part of the descriptors.
    pub(super) fn map(len: u64, shared: bool) -> Result<Self> {
        let made = if shared && memory_file::may_make_another() { Self::map_shared(len).ok() } else { None };
        made.map_or_else(|| Ok(Self::over(Anonymous::new(len)?)), Ok)
    }

    fn map_shared(len: u64) -> Result<Self> {
        let len = len.next_multiple_of(page_size());
        let file = File::from(memory_file::create(len)?);
        let facts = file.metadata().map_err(|cause| Error::io("look at shared memory (fstat)", &cause))?;
        let memory = Anonymous::shared(&file, len)?;
        memory_file::take_memory(&file, &memory)?;
        let mut slab = Self::over(memory);
        (slab.file, slab.identity) = (Some(memory_file::Counted::new(file)), Some(memory_file::identity(&facts)));
        Ok(slab)
    }

    /// Another process' slab. Its descriptor may be closed then.
    pub(super) fn of_neighbour(file: &File, identity: MemoryFileId, len: u64, keep: KeepSlab) -> Result<Self> {
        let mut slab = Self::over(Anonymous::shared(file, len)?);
        (slab.identity, slab.keep) = (Some(identity), Some(keep));
        Ok(slab)
    }

    fn over(memory: Anonymous) -> Self {
        memory.keep_from_children();
        let (pid, registered) = (std::process::id(), AtomicU64::new(0));
        let (memory, registrations) = (Some(memory), Mutex::default());
        let refused = AtomicBool::new(false);
        Self { memory, file: None, identity: None, keep: None, refused, pid, registrations, registered }
    }

    /// First byte; a multiple of [`HUGE_PAGE`] if the slab has that size, else of a page.
    pub fn address(&self) -> *mut u8 {
        self.memory.as_ref().map_or(ptr::null_mut(), Anonymous::at)
    }

    /// Size in bytes: whole huge pages, or whole pages if it is smaller.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.memory.as_ref().map_or(0, Anonymous::len)
    }

    /// The file of a shared slab of this process, for another process to map.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.0.as_fd())
    }

    /// Device and inode of the file, if it is over one. All processes see the same two.
    pub fn identity(&self) -> Option<(u64, u64)> {
        self.identity
    }

    /// True for a shared slab of this process.
    pub(super) fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    /// Makes sure that the slab is registered with a driver, for all its devices: `register` is called with address and
    /// length unless it has given a registration for this driver (a number above 0) before. The registration lives as
    /// long as the slab, ends when dropped, and must not need a particular thread for that.
    pub fn register(
        &self,
        driver: u64,
        register: impl FnOnce(*mut u8, usize) -> Result<Box<dyn Any + Send>>,
    ) -> Result<()> {
        let mut registrations = lock(&self.registrations);
        if !registrations.iter().any(|(known, _)| *known == driver) {
            registrations.push((driver, register(self.address(), self.len())?));
            self.registered.store(driver, Ordering::Release);
        }
        drop(registrations);
        if let Some(keep) = &self.keep {
            keep(self);
        }
        Ok(())
    }

    /// True for another process' slab.
    pub(crate) fn is_adopted(&self) -> bool {
        self.keep.is_some()
    }

    /// A driver has refused to register it, and is not asked again.
    pub(crate) fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
    }

    /// True if a driver has refused to register it.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// Makes its pages resident, so that a driver that registers it finds them there. Advice: a refused page comes at its first touch.
    pub(crate) fn populate(&self) {
        // SAFETY: the range is this slab's mapping, whose bytes stay as they are.
        unsafe { libc::madvise(self.address().cast(), self.len(), libc::MADV_POPULATE_WRITE) };
    }

    /// Whether it is registered with a driver. Never waits for a registration that is being made.
    pub fn is_registered(&self, driver: u64) -> bool {
        driver != 0 && self.registered.load(Ordering::Acquire) == driver
    }

    pub(super) fn is_plain(&self) -> bool {
        self.registered.load(Ordering::Acquire) == 0
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let registrations = mem::take(self.registrations.get_mut().unwrap_or_else(PoisonError::into_inner));
        if self.pid != std::process::id() {
            // Nothing is mapped here in a child, or something else by now; the number of the descriptor may be that of another
            // file; and the driver's state is the parent's.
            mem::forget((registrations, self.memory.take(), self.file.take()));
            return;
        }
        // Registrations first: the driver must let go of the pages before they are unmapped.
        drop(registrations);
    }
}
