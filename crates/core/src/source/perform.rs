//! How one read of a file is performed, on the thread that calls: through the page cache, past it, or into a mapping.

use super::fill::{advise, fetch, Fill};
use super::rows::{RowReads, Why};
use super::touch::{Left, Touch, Touches, Untouched};
use super::{no_place, no_rows, Destination, Outcome, Read};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::machine::page_size;
use crate::rows::RowPlaces;
use crate::store::{read_fully, Files, FsKind, Stopped};
use crate::sync::{lock, Mutex};
use crate::way::Routing;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Where bytes go that are not wanted. It stays in the processor's cache. A longer gap takes it several times.
const SCRATCH: usize = 64 << 10;

/// How a thread performs a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Buffered,
    /// Through the page cache, leaving nothing behind in it (RWF_DONTCACHE, 6.14): for O_DIRECT refused.
    Uncached,
    Mapped,
    Direct,
}

/// Performs reads, for several threads.
#[derive(Debug)]
pub(super) struct Performer {
    files: Arc<Files>,
    /// RWF_DONTCACHE was refused once.
    no_uncached: AtomicBool,
    /// MADV_POPULATE_READ was refused once.
    no_populate: AtomicBool,
    /// Touches the pages that were populated.
    touch: Touch,
    /// Brings cold bytes into the page cache before they are read through it.
    fill: Fill,
    fallbacks: Mutex<Vec<Fallback>>,
    /// Resident pages that are left to their first touch.
    left: Mutex<Vec<Left>>,
}

impl Performer {
    /// Reads of these files, as `routing` says.
    pub(super) fn new(files: Arc<Files>, routing: &Arc<Routing>) -> Performer {
        Performer {
            files,
            no_uncached: AtomicBool::new(false),
            no_populate: AtomicBool::new(false),
            touch: Touch::new(routing.page_timing),
            fill: Fill::new(routing.clone()),
            fallbacks: Mutex::default(),
            left: Mutex::default(),
        }
    }

    pub(super) fn files(&self) -> &Files {
        &self.files
    }

    /// See [`Source::take_touches`](super::Source::take_touches).
    pub(super) fn take_touches(&self) -> Touches {
        let left = std::mem::take(&mut *lock(&self.left));
        self.touch.take(&left)
    }

    /// See [`Source::take_fallbacks`](super::Source::take_fallbacks).
    pub(super) fn take_fallbacks(&self) -> Vec<Fallback> {
        std::mem::take(&mut *lock(&self.fallbacks))
    }

    fn fell_back(&self, fallback: Fallback) {
        lock(&self.fallbacks).push(fallback);
    }

    /// The outcome of a read that may have written so many bytes.
    pub(super) fn outcome(&self, mut read: Read, result: Result<u64, Failure>, written: u64) -> Outcome {
        read.written = read.written.max(written);
        match result {
            Ok(got) => Outcome::Done(read.done(&self.files, Ok(got))),
            Err(Failure::Error(e)) => Outcome::Done(read.done(&self.files, Err(e))),
            Err(Failure::Refused(cause)) => Outcome::Refused { read, cause },
        }
    }

    pub(super) fn perform(&self, read: &Read, way: How, tools: &mut Tools) -> Result<u64, Failure> {
        tools.written = 0;
        match (way, &read.into) {
            (How::Mapped, Destination::Mapping { at, resident }) => self.map(read, *at, *resident, tools),
            (How::Buffered, Destination::Rows { gap, rows }) => self.read_rows(read, rows, *gap, tools),
            (How::Buffered, _) => {
                if let Some(fallback) = self.fill.before(&self.files, read) {
                    self.fell_back(fallback);
                }
                self.read(read, 0, tools)
            }
            (How::Uncached, _) => self.read_uncached(read, tools),
            (How::Direct, Destination::Memory(at)) => {
                // The disk may write before a part of such a read fails.
                tools.written = read.len;
                self.read_direct(read, *at)
            }
            _ => Err(Error::new(ErrorKind::Internal, "a read's lane and destination do not go together").into()),
        }
    }

    fn read(&self, read: &Read, flags: i32, tools: &mut Tools) -> Result<u64, Failure> {
        let fd = tools.descriptor(&self.files, read.file)?;
        if flags != 0 {
            // What the kernel reads ahead for one thread another may have read and dropped already: of 6 MiB read by eight
            // threads up to 2 stayed. Reads as long as extents need none.
            advise(&fd, libc::POSIX_FADV_RANDOM);
        }
        tools.aim(read)?;
        // SAFETY: the read's places are valid while `keep` is held (invariant 5), and scratch is this thread's own.
        let got =
            unsafe { read_fully(fd.as_raw_fd(), read.offset, &mut tools.places, flags, self.files.most_per_call()) };
        let written = match &got {
            Ok(got) => *got,
            Err(stopped) if self.files.errors_write_nothing(read.file) => stopped.got,
            Err(stopped) => stopped.got + stopped.asked,
        };
        tools.written = tools.written.max(written);
        match got {
            Ok(got) => Ok(read.ended(got)?),
            Err(stopped) if flags != 0 => {
                advise(&fd, libc::POSIX_FADV_NORMAL);
                Err(Failure::Refused(stopped.cause))
            }
            Err(stopped) => Err(Error::io("read", &stopped.cause).into()),
        }
    }

    fn read_rows(&self, read: &Read, rows: &[RowPlaces], gap: u64, tools: &mut Tools) -> Result<u64, Failure> {
        let fd = tools.descriptor(&self.files, read.file)?;
        let places = RowReads { rows, gap, scratch: &mut tools.window };
        // SAFETY: the rows' places are valid while `keep` is held (invariant 5).
        let outcome = unsafe { places.fill(fd.as_raw_fd(), read.offset, self.files.most_per_call()) };
        tools.written = outcome.reached.max(outcome.begun);
        match outcome.stopped {
            None => Ok(outcome.reached),
            // The last row is wanted too, so this is an error. The file may end before the row that is missing begins.
            Some(Why::Ended) => {
                let size = fd.try_clone().and_then(|fd| std::fs::File::from(fd).metadata());
                let there = size.map_or(outcome.reached, |size| size.len().saturating_sub(read.offset));
                Ok(read.ended(there.min(outcome.reached))?)
            }
            Some(Why::Failed(cause, asked)) => {
                tools.written += if self.files.errors_write_nothing(read.file) { 0 } else { asked };
                Err(Error::io("read", &cause).into())
            }
        }
    }

    fn read_uncached(&self, read: &Read, tools: &mut Tools) -> Result<u64, Failure> {
        if !self.no_uncached.load(Ordering::Relaxed) {
            match self.read(read, libc::RWF_DONTCACHE, tools) {
                Err(Failure::Refused(e)) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
                    if !self.no_uncached.swap(true, Ordering::Relaxed) {
                        let reason = format!("{}: preadv2: {e}", self.files.path(read.file).display());
                        self.fell_back(Fallback { from: "RWF_DONTCACHE", to: "page cache", reason });
                    }
                }
                Err(Failure::Refused(e)) => return Err(Error::io("read", &e).into()),
                other => return other,
            }
        }
        self.read(read, 0, tools)
    }

    fn read_direct(&self, read: &Read, at: *mut u8) -> Result<u64, Failure> {
        let fd = match self.files.open(read.file, true) {
            Err(e) if refuses_direct(e.errno()) => {
                return Err(Failure::Refused(io::Error::from_raw_os_error(e.errno().unwrap_or(libc::EINVAL))))
            }
            fd => fd?,
        };
        let mut to = [libc::iovec { iov_base: at.cast(), iov_len: read.len as usize }];
        // SAFETY: `len` bytes from `at` on are valid while `keep` is held (invariant 5).
        let got = unsafe { read_fully(fd.as_raw_fd(), read.offset, &mut to, 0, self.files.most_per_call()) };
        match got {
            Ok(got) => Ok(read.ended(got)?),
            Err(Stopped { cause, .. }) if refuses_direct(cause.raw_os_error()) => {
                self.finish_tail(read, at, &to[0], cause)
            }
            Err(Stopped { cause, .. }) => Err(Error::io("read", &cause).into()),
        }
    }

    /// A read that stops at an odd byte (the end of the file, nearly always) cannot go on with O_DIRECT.
    fn finish_tail(&self, read: &Read, at: *mut u8, left: &libc::iovec, refused: io::Error) -> Result<u64, Failure> {
        let got = left.iov_base as u64 - at as u64;
        if got == 0 {
            return Err(Failure::Refused(refused));
        }
        if got >= read.need {
            return Ok(got);
        }
        let fd = self.files.open(read.file, false)?;
        let mut to = [*left];
        // SAFETY: what is left of the read's memory.
        let more = unsafe { read_fully(fd.as_raw_fd(), read.offset + got, &mut to, 0, self.files.most_per_call()) };
        Ok(read.ended(got + more.map_err(|e| Error::io("read", &e.cause))?)?)
    }

    /// Brings the pages under `len` bytes at `at` into the mapping, and reports what would be SIGBUS on first touch.
    ///
    /// Resident pages are left to their first touch. It costs as much as populating them (1 ms/GiB in huge pages, 100 in
    /// small ones), and pages that are never touched cost nothing.
    fn map(&self, read: &Read, at: *mut u8, resident: bool, tools: &mut Tools) -> Result<u64, Failure> {
        // Pages wholly past the end cannot be populated; what is wanted must not need them.
        let got = read.len.min(self.files.size(read.file).saturating_sub(read.offset));
        read.ended(got)?;
        if resident {
            let mapping = Arc::downgrade(&read.keep);
            lock(&self.left).push(Left { at: at as usize, len: got as usize, mapping });
        } else if got > 0 {
            let page = page_size() as usize;
            let pages = at as usize / page * page..(at as usize + got as usize).next_multiple_of(page);
            // On a network file system the kernel's own read-ahead may be what makes a server fast.
            let is_local = self.files.facts(read.file)?.kind == FsKind::Local;
            let populates = !self.no_populate.load(Ordering::Relaxed);
            let small = is_local && populates && self.touch.wants_small_pages(got);
            if small {
                let fd = self.files.open(read.file, false)?;
                fetch(fd.as_raw_fd(), read.offset..read.offset + got);
            } else {
                self.fill.fetch_ends(&self.files, read, got);
            }
            if self.populate(read, pages.clone(), tools)? {
                self.touch(read, pages, !small, tools)?;
            }
        }
        Ok(got)
    }

    /// Touches pages that were populated: see `touch`.
    fn touch(&self, read: &Read, pages: Range<usize>, huge: bool, tools: &mut Tools) -> Result<(), Failure> {
        match self.touch.populated(pages, huge, &mut tools.places) {
            Ok(()) => Ok(()),
            Err(Untouched::Refused(e)) => {
                let reason = format!("process_vm_readv: {e}");
                self.fell_back(Fallback { from: "touching populated pages", to: "first use", reason });
                Ok(())
            }
            Err(Untouched::Lost(e)) => Err(self.lost(read, &e, tools)),
        }
    }

    /// A page of a mapping could not be had: the file shrank, or the disk failed. Reading tells which.
    fn lost(&self, read: &Read, cause: &io::Error, tools: &mut Tools) -> Failure {
        let looked = self.files.verify_file(read.file).map_err(Failure::from);
        match looked.and_then(|()| self.read_through(read, tools)) {
            Err(failure) => failure,
            Ok(_) => Error::io("populate the mapping of the file", cause).into(),
        }
    }

    /// Populates pages of the mapping of `read`. Where this kernel cannot, all of the read is in the page cache afterwards,
    /// and the answer is false.
    fn populate(&self, read: &Read, pages: Range<usize>, tools: &mut Tools) -> Result<bool, Failure> {
        while !self.no_populate.load(Ordering::Relaxed) {
            // SAFETY: populating neither moves nor changes memory; the caller says that the range is mapped, and a
            // range that is not is ENOMEM.
            if unsafe { libc::madvise(pages.start as *mut libc::c_void, pages.len(), libc::MADV_POPULATE_READ) } == 0 {
                return Ok(true);
            }
            let e = io::Error::last_os_error();
            match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Before 5.14; or a sandbox that knows no such advice.
                Some(libc::EINVAL | libc::EPERM | libc::ENOSYS) => {
                    if !self.no_populate.swap(true, Ordering::Relaxed) {
                        let reason = format!("madvise: {e}");
                        self.fell_back(Fallback { from: "MADV_POPULATE_READ", to: "pread", reason });
                    }
                }
                Some(libc::EFAULT) => return Err(self.lost(read, &e, tools)),
                _ => return Err(Error::io("populate the mapping of the file", &e).into()),
            }
        }
        // The page cache holds the bytes then and a first touch is a minor fault; touching the pages here instead could
        // kill the process (SIGBUS).
        self.read_through(read, tools)?;
        Ok(false)
    }

    fn read_through(&self, read: &Read, tools: &mut Tools) -> Result<u64, Failure> {
        let len = read.len.min(self.files.size(read.file).saturating_sub(read.offset));
        let fd = self.files.open(read.file, false)?;
        tools.places.clear();
        tools.discard(len as usize);
        // SAFETY: every place is this thread's scratch.
        let got = unsafe { read_fully(fd.as_raw_fd(), read.offset, &mut tools.places, 0, self.files.most_per_call()) };
        Ok(read.ended(got.map_err(|e| Error::io("read", &e.cause))?)?)
    }
}

pub(super) enum Failure {
    Error(Error),
    Refused(io::Error),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::Error(e)
    }
}

/// Tools that a thread keeps between reads.
#[derive(Default)]
pub(super) struct Tools {
    places: Vec<libc::iovec>,
    scratch: Vec<u8>,
    /// Where short rows arrive with the gaps between them.
    window: Vec<u8>,
    /// Bytes from the first on that the read in hand may have written to its place.
    pub(super) written: u64,
    /// The descriptor of a file that this thread alone reads through, where one for all is not enough.
    own: Option<(u32, Arc<OwnedFd>)>,
}

impl Tools {
    /// The descriptor to read file number `file` through.
    fn descriptor(&mut self, files: &Files, file: u32) -> Result<Arc<OwnedFd>> {
        if !files.reads_ahead_by_descriptor(file) {
            return files.open(file, false);
        }
        if let Some((_, own)) = self.own.as_ref().filter(|(of, _)| *of == file) {
            return Ok(own.clone());
        }
        self.own = None;
        match files.open_own(file) {
            // Of a few descriptors, one for all is better than none.
            Err(e) if e.kind() == ErrorKind::Limit => files.open(file, false),
            own => Ok(self.own.insert((file, own?)).1.clone()),
        }
    }

    /// Makes `places` what `read` wants filled.
    fn aim(&mut self, read: &Read) -> Result<()> {
        self.places.clear();
        match &read.into {
            Destination::Memory(at) => {
                self.places.push(libc::iovec { iov_base: at.cast(), iov_len: read.len as usize });
            }
            Destination::Scatter(to) => {
                for &(at, len) in to {
                    if at.is_null() {
                        self.discard(len);
                    } else {
                        self.places.push(libc::iovec { iov_base: at.cast(), iov_len: len });
                    }
                }
            }
            Destination::Mapping { .. } => {
                return Err(Error::new(ErrorKind::Internal, "a mapping is populated, not read into"))
            }
            Destination::Rows { .. } => return Err(no_rows()),
            Destination::OnArrival => return Err(no_place()),
        }
        Ok(())
    }

    fn discard(&mut self, mut len: usize) {
        self.scratch.resize(SCRATCH, 0);
        while len > 0 {
            let step = len.min(SCRATCH);
            self.places.push(libc::iovec { iov_base: self.scratch.as_mut_ptr().cast(), iov_len: step });
            len -= step;
        }
    }
}

/// Errors by which a file system says that it does not do O_DIRECT, or not so.
pub(super) fn refuses_direct(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOTTY))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::extent::{Lane, Ticket};
    use crate::memory::Mapping;
    use std::time::Duration;

    /// Populated, then cut short, then touched: by itself that is a race that nobody wins twice.
    #[test]
    fn a_file_that_shrinks_between_populating_and_touching_is_changed_and_no_signal() {
        const LEN: u64 = 64 * 4096;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEN).unwrap();
        let files = Arc::new(Files::from_paths(&[file.path()]).unwrap());
        let performer = Performer::new(files, &Arc::default());
        let mapping = Arc::new(Mapping::new(file.as_file(), LEN).unwrap());
        let at = mapping.at();
        let into = Destination::Mapping { at, resident: false };
        let (ticket, lane) = (Ticket(0), Lane::MAPPED);
        let read = Read {
            ticket,
            file: 0,
            offset: 0,
            len: LEN,
            need: LEN,
            lane,
            into,
            fresh: false,
            written: 0,
            keep: mapping,
        };
        let pages = at as usize..at as usize + LEN as usize;
        let mut tools = Tools::default();
        let populated = performer.populate(&read, pages.clone(), &mut tools);
        if !matches!(populated, Ok(true)) {
            return; // before Linux 5.14
        }
        assert!(performer.touch(&read, pages.clone(), true, &mut tools).is_ok());
        // The first pages are touched always.
        file.as_file().set_len(LEN / 16).unwrap();
        match performer.touch(&read, pages, true, &mut tools) {
            Err(Failure::Error(e)) => assert_eq!(e.kind(), ErrorKind::Changed),
            Err(Failure::Refused(e)) => panic!("refused: {e}"),
            Ok(()) => panic!("pages that are gone were touched"),
        }
    }

    /// Every touch counts as slow here. The first reads come in huge pages and the others in small ones.
    #[test]
    fn after_slow_touches_reads_request_small_pages_and_bring_the_right_bytes() {
        const EACH: u64 = 4 << 20;
        let bytes: Vec<u8> = (0..12 * EACH as usize + 5000).map(|i| (i / 4096 % 251) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        file.as_file().sync_all().unwrap();
        // SAFETY: a plain system call on a descriptor that is open.
        let evicted = unsafe { libc::posix_fadvise(file.as_file().as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        assert_eq!(evicted, 0);
        let files = Arc::new(Files::from_paths(&[file.path()]).unwrap());
        let performer =
            Performer { touch: Touch::worth(Duration::ZERO, None), ..Performer::new(files, &Arc::default()) };
        let mapping = Arc::new(Mapping::new(file.as_file(), bytes.len() as u64).unwrap());
        let mut tools = Tools::default();
        for offset in (0..bytes.len() as u64).step_by(EACH as usize) {
            // SAFETY: the mapping is as long as the file.
            let at = unsafe { mapping.at().add(offset as usize) };
            let (len, into) = (EACH.min(bytes.len() as u64 - offset), Destination::Mapping { at, resident: false });
            let (ticket, lane, keep) = (Ticket(offset), Lane::MAPPED, mapping.clone());
            let read = Read { ticket, file: 0, offset, len, need: len, lane, into, fresh: false, written: 0, keep };
            assert!(matches!(performer.map(&read, at, false, &mut tools), Ok(got) if got == len));
        }
        // SAFETY: as above, and nobody writes to the file.
        assert!(unsafe { std::slice::from_raw_parts(mapping.at(), bytes.len()) } == bytes);
        if !performer.no_populate.load(Ordering::Relaxed) {
            assert!(performer.touch.wants_small_pages(EACH));
        }
    }
}
