//! Memory to receive into.

use std::io;
use std::ptr;

const HUGE_PAGE: usize = 2 << 20;

/// Anonymous memory, as large as all that is received.
pub(crate) struct Memory {
    at: *mut u8,
    mapped: *mut libc::c_void,
    size: usize,
}

// SAFETY: memory belongs to no thread.
unsafe impl Sync for Memory {}

impl Memory {
    /// `fresh`: pages come as the kernel likes, when they are first written. `huge`: 2 MiB pages if it has any.
    /// `touched`: huge pages that are all there already.
    pub(crate) fn new(bytes: usize, kind: &str) -> Result<Memory, String> {
        if kind == "huge" || kind == "fresh" {
            // A virtual machine gives memory that is free for long back to its host, and waits for it when it is used
            // again. What has just been used is there.
            Memory::new(bytes, "touched")?;
        }
        let size = bytes.max(1) + HUGE_PAGE;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), size, access, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(format!("no memory: {}", io::Error::last_os_error()));
        }
        let memory = Memory { at: mapped.wrapping_byte_add(mapped.align_offset(HUGE_PAGE)).cast(), mapped, size };
        if kind != "fresh" {
            // SAFETY: the range is this mapping; advice only.
            unsafe { libc::madvise(mapped, size, libc::MADV_HUGEPAGE) };
        }
        match kind {
            "fresh" | "huge" => {}
            // SAFETY: the range is this mapping.
            "touched" => unsafe { ptr::write_bytes(memory.at, 1, bytes) },
            other => return Err(format!("--memory: {other:?} is none of fresh, huge, touched")),
        }
        Ok(memory)
    }

    /// Where a byte is.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.at.wrapping_add(offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody receives any more.
        unsafe { libc::munmap(self.mapped, self.size) };
    }
}
