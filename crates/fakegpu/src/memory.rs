//! Device memory: anonymous host memory between guard pages, or the test's own memory that was adopted.

use std::io;

use crate::clocks::AccessMap;
use crate::state::State;

/// The value of fresh device memory, so that a byte that was never copied is seen.
pub(crate) const POISON: u8 = 0xa5;

const PAGE: u64 = 4096;

/// An anonymous mapping with an inaccessible page on each side, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Region {
    base: u64,
    total: u64,
}

impl Region {
    /// Maps `len` usable bytes, page aligned.
    pub(crate) fn map(len: u64) -> io::Result<Self> {
        let total = len.div_ceil(PAGE) * PAGE + 2 * PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping; nothing else is replaced.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), total as usize, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let region = Self { base: base as u64, total };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the inner pages of the mapping just made.
        if unsafe { libc::mprotect(region.start() as *mut _, (total - 2 * PAGE) as usize, access) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(region)
    }

    /// The first usable byte.
    pub(crate) fn start(&self) -> u64 {
        self.base + PAGE
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and the owner of the region waited for (or condemned) whatever still used it.
        unsafe { libc::munmap(self.base as *mut _, self.total as usize) };
    }
}

/// A piece of device memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) device: usize,
    /// `None`: adopted.
    pub(crate) region: Option<Region>,
    pub(crate) accesses: AccessMap,
}

impl Allocation {
    pub(crate) fn new(start: u64, len: u64, device: usize, region: Option<Region>) -> Self {
        Self { start, len, device, region, accesses: AccessMap::default() }
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Whether every page of the range is mapped in this process.
pub(crate) fn is_mapped(start: u64, len: u64) -> bool {
    let lo = start / PAGE * PAGE;
    let pages = (start + len).div_ceil(PAGE) - lo / PAGE;
    let mut residency = vec![0u8; pages as usize];
    // SAFETY: mincore reads no memory of the range and writes one byte per page into `residency`.
    unsafe { libc::mincore(lo as *mut _, (pages * PAGE) as usize, residency.as_mut_ptr()) == 0 }
}

impl State {
    /// The allocation that contains the whole of `lo..hi`.
    pub(crate) fn allocation_of(&self, lo: u64, hi: u64) -> Option<&Allocation> {
        let (_, allocation) = self.allocations.range(..=lo).next_back()?;
        (lo < allocation.end().max(lo + 1) && hi <= allocation.end()).then_some(allocation)
    }

    /// Whether any byte of `lo..hi` is device memory.
    pub(crate) fn touches_device(&self, lo: u64, hi: u64) -> bool {
        self.allocations.range(..hi).next_back().is_some_and(|(_, a)| a.end() > lo)
    }

    /// Whether `lo..hi` lies inside one registration that holds for `device`.
    pub(crate) fn is_registered(&self, lo: u64, hi: u64, device: usize) -> bool {
        let before = self.registrations.range(..=lo).next_back();
        before.is_some_and(|(start, r)| hi <= start + r.len && (r.portable || r.device == device))
    }
}
