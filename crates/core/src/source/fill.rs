//! How cold bytes are brought into the page cache by those who read through it.
//!
//! The kernel's read-ahead is made for one reader who goes through a file. Many threads with extents of 4 MiB get in each
//! other's way: 1 GB/s where the disk has 3, and of a file that is wanted in part, up to 8 MiB more behind every piece.
//!
//! A file that is wanted whole is filled: the huge pages of an extent are populated in a mapping that is there for nothing
//! else, which brings 2 MiB at once into one folio, and then read like resident ones. Read and not copied out of the mapping,
//! because a file that shrinks meanwhile must not be SIGBUS. Of any other file exactly what is asked for is read: also of one
//! that is mapped, where a fault brings in its whole huge page, so that the pages at both ends are asked for before.

use super::file::{cached_pages, Files, FsKind};
use super::{Fallback, Read};
use crate::machine::page_size;
use crate::memory::Mapping;
use crate::options::HUGE_PAGE;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

/// Most bytes that are asked for at once: of more the kernel takes as much as the disk's read-ahead, which by default is this.
const FETCH: u64 = 128 << 10;

/// For each file a mapping to fill the page cache with, made when the first of its reads comes, if it is to be filled.
pub(super) struct Fill {
    mappings: Vec<Option<OnceLock<Option<Mapping>>>>,
    /// For each file, whether it is mapped, and nothing is to be brought in but what is asked for.
    in_part: Vec<bool>,
    /// This kernel does not populate.
    refused: AtomicBool,
}

impl std::fmt::Debug for Fill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fill").field("files", &self.mappings.len()).finish_non_exhaustive()
    }
}

impl Fill {
    /// For files of which those flagged are wanted whole, or nearly; and for mapped ones of which a part is.
    pub(super) fn new(whole: &[bool], in_part: &[bool]) -> Self {
        let mappings = whole.iter().map(|whole| whole.then(OnceLock::new)).collect();
        Fill { mappings, in_part: in_part.to_vec(), refused: AtomicBool::new(false) }
    }

    /// Has the first `len` bytes of a mapped read brought in as far as they do not fill huge pages, before these are populated:
    /// a fault there would bring in the rest of the huge page, which nobody has asked for. Without waiting, and what the kernel
    /// does not take up the fault does.
    pub(super) fn fetch_ends(&self, files: &Files, read: &Read, len: u64) {
        if self.in_part.get(read.file as usize) != Some(&true) {
            return;
        }
        let Ok(fd) = files.open(read.file, false) else { return };
        let (start, end) = (read.offset, read.offset + len);
        let whole = whole_pages(start, end);
        let ends = if whole.is_empty() { [start..end, end..end] } else { [start..whole.start, whole.end..end] };
        for at in ends.into_iter().flat_map(|part| part.clone().step_by(FETCH as usize).map(move |at| at..part.end)) {
            let len = FETCH.min(at.end - at.start);
            // SAFETY: a plain system call on a descriptor we hold. It is advice.
            unsafe {
                libc::posix_fadvise(fd.as_raw_fd(), at.start as i64, len as i64, libc::POSIX_FADV_WILLNEED);
            }
        }
    }

    /// Prepares the page cache for a buffered read. What is wrong with the file the read itself meets too, and says so; what
    /// is refused here is told once, and the reads are only slower.
    pub(super) fn before(&self, files: &Files, read: &Read) -> Option<Fallback> {
        let fd = files.open(read.file, false).ok()?;
        let Some(mapping) = self.mappings.get(read.file as usize).and_then(Option::as_ref) else {
            // Elsewhere than on a disk the read-ahead may be what makes a server fast.
            if files.facts(read.file).is_ok_and(|facts| facts.kind == FsKind::Local) {
                // SAFETY: a plain system call on a descriptor we hold. It is advice.
                unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
            }
            return None;
        };
        let pages = whole_pages(read.offset, read.offset + read.len);
        if pages.is_empty() || self.refused.load(Ordering::Relaxed) {
            return None;
        }
        // Not where they are there already: to map what lies there in small pages takes 100 ms/GiB.
        if cached_pages(fd.as_raw_fd(), &pages).is_ok_and(|cached| cached >= (pages.end - pages.start) / page_size()) {
            return None;
        }
        let mut refused = None;
        let mapping = mapping.get_or_init(|| {
            Mapping::new(&*fd, files.size(read.file)).map_err(|e| refused = Some(e.message().to_owned())).ok()
        });
        if let Some(reason) = refused {
            return Some(Fallback { from: "filling the page cache", to: "pread", reason });
        }
        let mapping = mapping.as_ref()?;
        // SAFETY: the range lies in the mapping, which is as long as the file was; populating changes no memory, and pages
        // that the file has lost since are an error.
        let rc = unsafe {
            let at = mapping.at().add(pages.start as usize);
            libc::madvise(at.cast(), (pages.end - pages.start) as usize, libc::MADV_POPULATE_READ)
        };
        if rc != 0 {
            let e = io::Error::last_os_error();
            let never = matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EPERM | libc::ENOSYS));
            if never && !self.refused.swap(true, Ordering::Relaxed) {
                return Some(Fallback { from: "MADV_POPULATE_READ", to: "pread", reason: format!("madvise: {e}") });
            }
        }
        None
    }
}

/// The huge pages of a file that lie wholly within a range of its bytes: what they share with others may not be wanted.
fn whole_pages(start: u64, end: u64) -> Range<u64> {
    start.next_multiple_of(HUGE_PAGE)..end / HUGE_PAGE * HUGE_PAGE
}
