//! How cold bytes get into the page cache when a load reads through it.
//!
//! The kernel's read-ahead is made for one reader that goes through a file. Many threads with extents of 4 MiB get in
//! each other's way: 1 GB/s on a disk that has 3. In a file that is wanted in part, read-ahead brings up to 8 MiB more
//! behind every piece.
//!
//! A file that is wanted whole is filled: the huge pages of an extent are populated in a separate mapping, which brings
//! in 2 MiB at once as one folio. Then they are read like resident bytes. The bytes are read with pread and not copied
//! out of the mapping: if the file shrinks meanwhile, pread gives a short read and not SIGBUS. For any other file,
//! exactly the requested bytes are read. This holds for a mapped file too: a fault brings in its whole huge page, so
//! the pages at both ends of an extent are requested before.

use super::Read;
use crate::fallback::Fallback;
use crate::machine::page_size;
use crate::memory::Mapping;
use crate::options::HUGE_PAGE;
use crate::store::{cached_pages, Files};
use crate::way::{Routing, Through, Way};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Most bytes of one request. The kernel cuts a longer one to the disk's read-ahead, which is this by default.
const FETCH: u64 = 128 << 10;

/// Asks the kernel to read a range into the page cache, and does not wait. This is advice: the kernel may leave a part out,
/// and a later read brings it.
pub(super) fn fetch(fd: RawFd, range: Range<u64>) {
    for start in range.clone().step_by(FETCH as usize) {
        let len = FETCH.min(range.end - start);
        // SAFETY: a plain system call on a descriptor that the caller holds.
        unsafe { libc::posix_fadvise(fd, start as i64, len as i64, libc::POSIX_FADV_WILLNEED) };
    }
}

/// Tells the kernel how a file is going to be read. That is advice, and nothing is lost where it is not taken.
pub(super) fn advise(fd: &OwnedFd, how: i32) {
    // SAFETY: a plain system call on a descriptor we hold.
    let _ignored = unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, how) };
}

/// How reads through the page cache bring cold bytes into it, as the way of each file says.
pub(super) struct Fill {
    routing: Arc<Routing>,
    /// For each file that is filled by huge pages, a mapping for that. It is made when the first of the file's reads comes.
    mappings: Vec<Option<OnceLock<Option<Mapping>>>>,
    /// This kernel does not populate.
    refused: AtomicBool,
}

impl std::fmt::Debug for Fill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fill").field("files", &self.mappings.len()).finish_non_exhaustive()
    }
}

impl Fill {
    pub(super) fn new(routing: Arc<Routing>) -> Self {
        let filled = |way: &Way| (way.through == Through::HugePages).then(OnceLock::new);
        let mappings = routing.ways.iter().map(filled).collect();
        Fill { routing, mappings, refused: AtomicBool::new(false) }
    }

    /// Requests the first `len` bytes of a mapped read, as far as they do not fill huge pages. This happens before the
    /// pages are populated: a fault there would bring in the rest of the huge page, which is not wanted. It does not
    /// wait. If the kernel ignores a request, the fault does its work.
    pub(super) fn fetch_ends(&self, files: &Files, read: &Read, len: u64) {
        if !self.routing.way(read.file).in_part {
            return;
        }
        let Ok(fd) = files.open(read.file, false) else { return };
        let (start, end) = (read.offset, read.offset + len);
        let whole = whole_pages(start, end);
        let ends = if whole.is_empty() { [start..end, end..end] } else { [start..whole.start, whole.end..end] };
        for part in ends {
            fetch(fd.as_raw_fd(), part);
        }
    }

    /// Prepares the page cache for a buffered read. An error of the file is not reported here: the read meets and
    /// reports it. A refusal is reported once, and the reads are only slower.
    pub(super) fn before(&self, files: &Files, read: &Read) -> Option<Fallback> {
        if !matches!(self.routing.way(read.file).through, Through::Exact | Through::HugePages) {
            return None;
        }
        let fd = files.open(read.file, false).ok()?;
        let Some(mapping) = self.mappings.get(read.file as usize).and_then(Option::as_ref) else {
            advise(&fd, libc::POSIX_FADV_RANDOM);
            return None;
        };
        let pages = whole_pages(read.offset, read.offset + read.len);
        if pages.is_empty() || self.refused.load(Ordering::Relaxed) {
            return None;
        }
        // Not if the pages are there already: mapping them takes 100 ms/GiB if they are small pages.
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

/// The huge pages of a file that lie completely within a range of its bytes. The bytes that other huge pages share with
/// their surroundings may not be wanted.
fn whole_pages(start: u64, end: u64) -> Range<u64> {
    start.next_multiple_of(HUGE_PAGE)..end / HUGE_PAGE * HUGE_PAGE
}
