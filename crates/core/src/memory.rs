//! Destination memory: where tensors live after the load, and what keeps it alive.
//!
//! All private CPU memory of one load is one `Arena`: a single anonymous mapping, aligned to 2 MiB, that asks for huge
//! pages. Blocks are page-aligned parts of it. A tensor that is dropped gives back the huge pages in which no other
//! tensor of the arena lies. So a kept scalar pins 2 MiB and not the checkpoint, and a million tensors need one mapping
//! (the kernel allows 65,530 by default).

use crate::error::{Error, ErrorKind, Result};
use crate::machine::page_size;
use crate::options::HUGE_PAGE;
use std::any::Any;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;

/// An anonymous mapping. It is aligned to 2 MiB if it is at least that large.
pub(crate) struct Anonymous {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory; who may touch which bytes when is the engine's business (invariants 1, 2 and 4).
unsafe impl Send for Anonymous {}
// SAFETY: as above; the struct itself is immutable.
unsafe impl Sync for Anonymous {}

impl Anonymous {
    /// `len` bytes (rounded up to pages) of zeroed memory that is not yet resident. It asks for huge pages.
    pub(crate) fn new(len: u64) -> Result<Self> {
        let refused = |e: &io::Error| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("cannot map {len} bytes of memory: {e}; free memory or raise the limit"),
            )
        };
        let huge = HUGE_PAGE as usize;
        // Rounded to the kernel's own page size: an address that is not a multiple of it cannot be unmapped, and the
        // slack would stay.
        let page = page_size();
        let wanted = len.max(page).checked_next_multiple_of(page).and_then(|n| usize::try_from(n).ok());
        let wanted = wanted
            .filter(|n| n.checked_add(huge).is_some())
            .ok_or_else(|| Error::new(ErrorKind::OutOfMemory, format!("{len} bytes do not fit the address space")))?;
        let slack = if wanted >= huge { huge } else { 0 };
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                wanted + slack,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(refused(&io::Error::last_os_error()));
        }
        let start = at as usize;
        let aligned = if slack == 0 { start } else { start.next_multiple_of(huge) };
        // SAFETY: both ranges lie inside the mapping just made and outside the part that is kept.
        unsafe {
            if aligned > start {
                libc::munmap(at, aligned - start);
            }
            let tail = start + wanted + slack - (aligned + wanted);
            if tail > 0 {
                libc::munmap((aligned + wanted) as *mut libc::c_void, tail);
            }
            if slack > 0 {
                // Advice only: without huge pages the load is slower (first touch at 2.0 instead of 3.4 GB/s), not
                // wrong.
                libc::madvise(aligned as *mut libc::c_void, wanted, libc::MADV_HUGEPAGE);
            }
        }
        Ok(Self { at: aligned as *mut u8, len: wanted })
    }

    /// First byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Keeps a forked child from inheriting these pages: a device writes to them or reads from them, and copy-on-write
    /// would move them.
    pub(crate) fn keep_from_children(&self) {
        // SAFETY: the range is this mapping.
        unsafe { libc::madvise(self.at.cast(), self.len, libc::MADV_DONTFORK) };
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody holds it any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// A private, writable mapping of a whole file: copy-on-write, as safetensors maps.
pub(crate) struct Mapping {
    at: *mut u8,
    len: usize,
    no_further: AtomicBool,
}

// SAFETY: as for `Anonymous`.
unsafe impl Send for Mapping {}
// SAFETY: as for `Anonymous`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from its start.
    pub(crate) fn new(file: impl AsFd, len: u64) -> Result<Self> {
        let size = usize::try_from(len)
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, format!("{len} bytes do not fit the address space")))?
            .max(1);
        // SAFETY: a fresh private mapping; NORESERVE because copy-on-write pages are the exception (a 400 GB checkpoint
        // must map on a machine whose commit limit is lower).
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_NORESERVE,
                file.as_fd().as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            let cause = io::Error::last_os_error();
            return Err(match cause.raw_os_error() {
                // Out of addresses, not of memory: nothing is allocated yet.
                Some(libc::ENOMEM) => Error::io(
                    "map the file (has this process as many mappings as vm.max_map_count allows, or as many addresses as \
                     ulimit -v?)",
                    &cause,
                ),
                _ => Error::io("map the file", &cause),
            });
        }
        // SAFETY: the range is the mapping just made. Advice only: where the file system has large folios, pages that a
        // fault brings in come as 2 MiB folios and are mapped whole. Mapping 548 MB that way again took 0.5 ms where 4 KiB
        // pages took 20 to 30, and unmapping 0.2 ms instead of 25 (ext4, kernel 6.18).
        unsafe { libc::madvise(at, size, libc::MADV_HUGEPAGE) };
        Ok(Self { at: at.cast(), len: size, no_further: AtomicBool::new(false) })
    }

    /// Whether a fault brings in nothing behind its own (huge) page. Taken back when the load is over, because the
    /// kernel also evicts such pages first.
    pub(crate) fn read_no_further(&self, no_further: bool) {
        if self.no_further.swap(no_further, Ordering::Relaxed) != no_further {
            let advice = if no_further { libc::MADV_RANDOM } else { libc::MADV_NORMAL };
            // SAFETY: the range is this mapping. Advice only; MADV_NORMAL leaves what was said of huge pages.
            unsafe { libc::madvise(self.at.cast(), self.len, advice) };
        }
    }

    /// First byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody holds it any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// The private CPU memory of one load.
pub(crate) struct Arena {
    memory: Anonymous,
    /// Places not yet dropped, per huge page.
    tenants: Vec<AtomicU32>,
}

impl Arena {
    /// Memory of `len` bytes in which `places` (offset, bytes) will live; each is given back once, by [`Arena::vacate`].
    pub(crate) fn new(len: u64, places: impl Iterator<Item = (u64, u64)>) -> Result<Self> {
        let memory = Anonymous::new(len)?;
        let tenants: Vec<_> = (0..memory.len().div_ceil(HUGE_PAGE as usize)).map(|_| AtomicU32::new(0)).collect();
        for (offset, nbytes) in places {
            for page in Self::pages(offset, nbytes) {
                tenants[page].fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(Self { memory, tenants })
    }

    fn pages(offset: u64, nbytes: u64) -> std::ops::Range<usize> {
        let first = offset / HUGE_PAGE;
        let end = if nbytes == 0 { first } else { (offset + nbytes).div_ceil(HUGE_PAGE) };
        first as usize..end as usize
    }

    /// A place is no longer used: huge pages without places go back to the system.
    fn vacate(&self, offset: u64, nbytes: u64) {
        let huge = HUGE_PAGE as usize;
        let mut free = 0..0;
        let give_back = |pages: &std::ops::Range<usize>| {
            let (from, to) = (pages.start * huge, (pages.end * huge).min(self.memory.len()));
            if from < to {
                // SAFETY: inside our mapping, and no place with a tenant lies in these pages: the counters said so.
                unsafe { libc::madvise(self.memory.at().add(from).cast(), to - from, libc::MADV_DONTNEED) };
            }
        };
        for page in Self::pages(offset, nbytes) {
            // AcqRel: the thread that takes the count to zero must see all earlier writes to these pages as done.
            if self.tenants[page].fetch_sub(1, Ordering::AcqRel) == 1 {
                if free.end == page {
                    free.end = page + 1;
                } else {
                    give_back(&free);
                    free = page..page + 1;
                }
            }
        }
        give_back(&free);
    }
}

/// The memory of one block.
#[derive(Clone)]
pub(crate) struct Block {
    address: u64,
    owner: Owner,
}

#[derive(Clone)]
enum Owner {
    Mapping(Arc<Mapping>),
    /// Offset of the block in the arena.
    Arena(Arc<Arena>, u64),
    /// Memory of the caller, or a device allocation: alive as long as this is.
    Held(Arc<dyn Any + Send + Sync>),
}

impl Block {
    pub(crate) fn mapping(mapping: Arc<Mapping>) -> Self {
        Self { address: mapping.at as u64, owner: Owner::Mapping(mapping) }
    }

    pub(crate) fn arena(arena: &Arc<Arena>, offset: u64) -> Self {
        // SAFETY: the offset lies in the arena: the caller laid the arena out.
        let address = unsafe { arena.memory.at().add(offset as usize) } as u64;
        Self { address, owner: Owner::Arena(arena.clone(), offset) }
    }

    pub(crate) fn held(address: u64, by: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, owner: Owner::Held(by) }
    }

    /// Address of the block's first byte: a host address or a device pointer.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// All wanted bytes of the block have arrived.
    pub(crate) fn complete(&self) {
        if let Owner::Mapping(mapping) = &self.owner {
            mapping.read_no_further(false);
        }
    }

    /// Something that keeps the memory alive.
    pub(crate) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        match &self.owner {
            Owner::Mapping(m) => m.clone(),
            Owner::Arena(a, _) => a.clone(),
            Owner::Held(h) => h.clone(),
        }
    }

    /// A share of the block: the place at `offset`. At most once per place.
    pub(crate) fn view(&self, offset: u64, nbytes: u64) -> View {
        View { address: self.address + offset, nbytes, offset, block: self.clone() }
    }
}

/// The bytes of one want, with a share in the memory that holds them.
pub struct View {
    address: u64,
    nbytes: u64,
    offset: u64,
    block: Block,
}

impl View {
    /// Address of the first byte: a host address or a device pointer.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Whether another object keeps the memory alive. It is released with the last view.
    pub fn is_held(&self) -> bool {
        matches!(self.block.owner, Owner::Held(_))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Owner::Arena(arena, start) = &self.block.owner {
            arena.vacate(start + self.offset, self.nbytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_bytes(at: *mut u8, len: usize) -> usize {
        let page = page_size() as usize;
        let mut pages = vec![0u8; len.div_ceil(page)];
        // SAFETY: the range is mapped and the vector has one byte per page of it.
        assert_eq!(unsafe { libc::mincore(at.cast(), len, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|&&p| p & 1 == 1).count() * page
    }

    #[test]
    fn more_memory_than_there_are_addresses_is_an_error() {
        for len in [u64::MAX, u64::MAX - page_size(), u64::MAX - HUGE_PAGE] {
            assert_eq!(Anonymous::new(len).err().map(|e| e.kind()), Some(ErrorKind::OutOfMemory));
        }
    }

    #[test]
    fn a_kept_scalar_pins_one_huge_page_and_nothing_else() {
        let len = 8 * HUGE_PAGE;
        let places = [(0, 16), (16, 3 * HUGE_PAGE), (16 + 3 * HUGE_PAGE, 5 * HUGE_PAGE - 16)];
        let arena = Arc::new(Arena::new(len, places.iter().copied()).unwrap());
        let block = Block::arena(&arena, 0);
        // SAFETY: the arena has `len` bytes and nobody else knows it.
        unsafe { ptr::write_bytes(arena.memory.at(), 7, len as usize) };
        let views: Vec<_> = places.iter().map(|&(o, n)| block.view(o, n)).collect();
        let at = arena.memory.at();
        assert_eq!(resident_bytes(at, len as usize), len as usize);
        let mut views = views.into_iter();
        let scalar = views.next();
        drop(views);
        assert_eq!(resident_bytes(at, len as usize), HUGE_PAGE as usize);
        // SAFETY: the scalar's place has not been vacated.
        assert_eq!(unsafe { at.read() }, 7);
        drop(scalar);
        assert_eq!(resident_bytes(at, len as usize), 0);
    }
}
