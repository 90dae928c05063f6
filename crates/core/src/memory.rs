//! Destination memory: where tensors live after the load, and what keeps it alive.
//!
//! All private CPU memory of one load is one `Arena`: a single anonymous mapping, aligned to 2 MiB, that asks for huge
//! pages (unless these turn out to be slow: `huge_pages`). Blocks are page-aligned parts of it. A tensor that is dropped gives back the huge pages in which no other
//! tensor of the arena lies. So a kept scalar pins 2 MiB and not the checkpoint, and a million tensors need one mapping
//! (the kernel allows 65,530 by default).

use crate::error::{Error, ErrorKind, Result};
use crate::huge_pages::PageTimes;
use crate::machine::page_size;
use crate::options::{CPU_ALIGN, HUGE_PAGE};
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use std::any::Any;
use std::collections::btree_map::{BTreeMap, Entry};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{io, ptr};

/// Keeps memory alive.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Whether the page with this address is in memory. If nothing is mapped at the address, the answer is yes.
pub(crate) fn is_resident(address: u64) -> bool {
    let page = page_size();
    let mut resident = 1u8;
    // SAFETY: mincore touches no memory but the one byte for the one page.
    unsafe { libc::mincore((address / page * page) as *mut libc::c_void, 1, &raw mut resident) };
    resident & 1 == 1
}

/// An anonymous mapping, or one of a file in memory. It is aligned to 2 MiB if it is at least that large.
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

    /// The first `len` bytes (rounded up to pages) of a file in memory, which all who map it see. It asks for huge pages.
    pub(crate) fn shared(file: impl AsFd, len: u64) -> Result<Self> {
        let reserved = ManuallyDrop::new(Self::new(len)?);
        // SAFETY: it takes the place of the mapping just made, which nobody knows.
        let at = unsafe {
            libc::mmap(
                reserved.at.cast(),
                reserved.len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
                file.as_fd().as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            // The addresses stay taken. The kernel may have freed them before it failed, and another thread may have them.
            return Err(Error::io("map shared memory", &io::Error::last_os_error()));
        }
        let memory = ManuallyDrop::into_inner(reserved);
        if memory.len as u64 >= HUGE_PAGE {
            memory.advise(libc::MADV_HUGEPAGE);
        }
        Ok(memory)
    }

    /// First byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Says how the memory is used. Advice only.
    fn advise(&self, how: i32) {
        // SAFETY: the range is this mapping, and none of the advices given here changes a byte of it.
        unsafe { libc::madvise(self.at.cast(), self.len, how) };
    }

    /// Puts huge pages in place of small ones and of none, whatever the system's settings are (madvise(2), from Linux 6.1 on).
    /// Tells whether all pages are huge then.
    pub(crate) fn collapse(&self) -> bool {
        // SAFETY: the range is this mapping, whose bytes stay as they are.
        unsafe { libc::madvise(self.at.cast(), self.len, libc::MADV_COLLAPSE) == 0 }
    }

    /// Keeps a forked child from inheriting these pages: a device writes to them or reads from them, and copy-on-write
    /// would move them.
    pub(crate) fn keep_from_children(&self) {
        self.advise(libc::MADV_DONTFORK);
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
    /// Blocks in which bytes are missing.
    incomplete: AtomicU32,
    /// Its views, if its file is leased.
    alive: OnceLock<Arc<Alive>>,
}

/// The views of leased files that somebody has, with the memory of several mappings.
pub(crate) struct Alive {
    /// By address: bytes, and how many views.
    views: Mutex<BTreeMap<u64, (u64, u32)>>,
    /// The bytes of all views together.
    nbytes: AtomicU64,
    /// Is notified when the last one is gone.
    none: Wake,
    /// A forked child may find the lock taken for ever.
    process: u32,
}

impl Alive {
    pub(crate) fn new() -> Result<Self> {
        let nbytes = AtomicU64::new(0);
        Ok(Self { views: Mutex::default(), nbytes, none: Wake::new()?, process: std::process::id() })
    }

    fn add(&self, address: u64, nbytes: u64) {
        if nbytes > 0 && self.process == std::process::id() {
            let mut views = lock(&self.views);
            let view = views.entry(address).or_insert((nbytes, 0));
            *view = (view.0.max(nbytes), view.1 + 1);
            self.nbytes.fetch_add(nbytes, Ordering::Relaxed);
        }
    }

    fn remove(&self, address: u64, nbytes: u64) {
        if nbytes == 0 || self.process != std::process::id() {
            return;
        }
        let mut views = lock(&self.views);
        // One that was made before the file was leased is not counted.
        let Entry::Occupied(mut view) = views.entry(address) else { return };
        view.get_mut().1 -= 1;
        self.nbytes.fetch_sub(nbytes, Ordering::Relaxed);
        if view.get().1 == 0 {
            view.remove();
            if views.is_empty() {
                drop(views);
                self.none.notify();
            }
        }
    }

    /// The addresses of all views, in ascending order.
    pub(crate) fn spans(&self) -> Vec<Range<u64>> {
        lock(&self.views).iter().map(|(&address, &(nbytes, _))| address..address + nbytes).collect()
    }

    /// How many views there are.
    pub(crate) fn count(&self) -> usize {
        lock(&self.views).len()
    }

    /// The bytes of all views together.
    pub(crate) fn nbytes(&self) -> u64 {
        self.nbytes.load(Ordering::Relaxed)
    }

    /// Wakes the thread that waits for the last view to go. Other news for that thread wakes it too.
    pub(crate) fn none(&self) -> &Wake {
        &self.none
    }
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
        let (no_further, incomplete) = (AtomicBool::new(false), AtomicU32::new(0));
        Ok(Self { at: at.cast(), len: size, no_further, incomplete, alive: OnceLock::new() })
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

    /// All wanted bytes of one block have arrived. With the last one the kernel may read ahead again.
    fn block_complete(&self) {
        if self.incomplete.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.read_no_further(false);
        }
    }

    /// First byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    /// The addresses that it has.
    pub(crate) fn span(&self) -> Range<u64> {
        self.at as u64..self.at as u64 + self.len as u64
    }

    /// From now on its views are counted there. False, and nothing has changed, if they are counted elsewhere.
    pub(crate) fn count_views(&self, alive: &Arc<Alive>) -> bool {
        Arc::ptr_eq(self.alive.get_or_init(|| alive.clone()), alive)
    }

    /// Puts private memory with the same bytes in place of the pages of these addresses, in steps that end at multiples
    /// of 2 MiB. Readers meanwhile find the one or the other: the kernel exchanges each step at once. `done` is called
    /// with the addresses of each step.
    ///
    /// A step may lose what a program writes to its pages meanwhile. Returns false if a program did write to the pages of a
    /// step, as far as this can tell.
    ///
    /// # Errors
    /// `OutOfMemory`: no addresses are left. `Io`: a page cannot be read (the file was truncated). Earlier steps stay done.
    pub(crate) fn make_private(&self, span: Range<u64>, mut done: impl FnMut(Range<u64>)) -> Result<bool> {
        /// Looks for what a program has written, at most, until one ends at once. On a busy machine another thread may take
        /// the processor during a look, and write.
        const LOOKS: usize = 8;
        const AT_ONCE: Duration = Duration::from_millis(4);
        let page = page_size();
        let span = span.start / page * page..span.end.next_multiple_of(page);
        let mut reserved = Reserved::new(&span)?;
        let pages = std::fs::File::open("/proc/self/pagemap").ok();
        let (mut undisturbed, mut again) = (true, Vec::new());
        let mut at = span.start;
        while at < span.end {
            let step = at..((at / HUGE_PAGE + 1) * HUGE_PAGE).min(span.end);
            let len = (step.end - step.start) as usize;
            copy_own(step.start, reserved.at(), len)?;
            for _ in 0..LOOKS {
                let begun = Instant::now();
                if may_be_written(pages.as_ref(), &step) {
                    again.resize(len, 0u8);
                    copy_own(step.start, again.as_mut_ptr(), len)?;
                    // SAFETY: `len` bytes of new memory that nobody else knows.
                    if unsafe { std::slice::from_raw_parts(reserved.at(), len) } != again {
                        undisturbed = false;
                        copy_own(step.start, reserved.at(), len)?;
                        break;
                    }
                }
                if begun.elapsed() < AT_ONCE {
                    break;
                }
            }
            reserved.exchange(&step)?;
            done(step.clone());
            at = step.end;
        }
        Ok(undisturbed)
    }
}

/// New memory that takes the place of mapped pages, step by step.
struct Reserved {
    /// The addresses that have not been moved yet.
    left: Range<usize>,
}

impl Reserved {
    /// Reserves as many bytes as the span has.
    fn new(span: &Range<u64>) -> Result<Self> {
        let len = (span.end - span.start) as usize;
        // As far from a multiple of 2 MiB as the span: the kernel moves huge pages whole then.
        let skip = if len as u64 >= HUGE_PAGE { (span.start % HUGE_PAGE) as usize } else { 0 };
        let whole = ManuallyDrop::new(Anonymous::new((skip + len) as u64)?);
        let start = whole.at() as usize;
        drop(Self { left: start..start + skip });
        Ok(Self { left: start + skip..start + whole.len() })
    }

    /// Where the bytes of the next step belong.
    fn at(&self) -> *mut u8 {
        self.left.start as *mut u8
    }

    /// Puts the next pages in place of these.
    fn exchange(&mut self, step: &Range<u64>) -> Result<()> {
        let len = (step.end - step.start) as usize;
        let (from, to) = (self.at().cast(), step.start as *mut libc::c_void);
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: whole pages of a mapping that is alive, and new memory of the same length that nobody else knows.
        if unsafe { libc::mremap(from, len, len, how, to) } == libc::MAP_FAILED {
            let e = io::Error::last_os_error();
            let mut resident = vec![0u8; len.div_ceil(page_size() as usize)];
            // The kernel may have unmapped the pages before it failed. Tensors are there: nothing can go on without them.
            // SAFETY: one byte for each page.
            if unsafe { libc::mincore(to, len, resident.as_mut_ptr()) } != 0 {
                eprintln!("penstock: the kernel has unmapped memory of a tensor and put none in its place: {e}");
                std::process::abort();
            }
            return Err(Error::io("move memory in place of a mapped file", &e));
        }
        self.left.start += len;
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !self.left.is_empty() {
            // SAFETY: new memory that has not been moved, and that nobody else knows. What was moved may be another's by now.
            unsafe { libc::munmap(self.left.start as *mut libc::c_void, self.left.len()) };
        }
    }
}

/// Copies bytes within this process. Bytes whose file was truncated are an error here; a plain read of them is SIGBUS.
fn copy_own(from: u64, to: *mut u8, len: usize) -> Result<()> {
    let mut done = 0;
    while done < len {
        let into = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done };
        let out_of = libc::iovec { iov_base: (from + done as u64) as *mut libc::c_void, iov_len: len - done };
        // SAFETY: gets no more than the second iovec says, into memory that the caller owns.
        match unsafe { libc::process_vm_readv(libc::getpid(), &raw const into, 1, &raw const out_of, 1, 0) } {
            copied @ 1.. => done += copied as usize,
            _ => {
                let e = io::Error::last_os_error();
                match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // A filter of system calls forbids it.
                    Some(libc::EPERM | libc::ENOSYS) => {
                        // SAFETY: both are this process's memory and as long, and they do not overlap.
                        unsafe { ptr::copy_nonoverlapping((from as *const u8).add(done), to.add(done), len - done) };
                        return Ok(());
                    }
                    _ => return Err(Error::io("copy out of a mapped file", &e)),
                }
            }
        }
    }
    Ok(())
}

/// Whether a program has written to a page of a private mapping: such a page no longer shows the file. Also true if the
/// kernel does not say.
fn may_be_written(pagemap: Option<&std::fs::File>, span: &Range<u64>) -> bool {
    use std::os::unix::fs::FileExt;
    /// Bits of an entry (Documentation/admin-guide/mm/pagemap.rst).
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    let (first, end) = (span.start / page_size(), span.end / page_size());
    let mut entries = vec![0u8; (end - first) as usize * 8];
    if pagemap.is_none_or(|file| file.read_exact_at(&mut entries, first * 8).is_err()) {
        return true;
    }
    let bits = entries.chunks_exact(8).map(|entry| entry.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)));
    bits.into_iter().any(|entry| entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & OF_FILE == 0))
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
    /// Blocks in which bytes are missing.
    incomplete: AtomicU32,
    times: Mutex<PageTimes>,
}

impl Arena {
    /// Memory of `len` bytes in which `places` (offset, bytes) will live; each is given back once, by [`Arena::vacate`].
    /// `page_timing` is that of the options.
    pub(crate) fn new(len: u64, places: impl Iterator<Item = (u64, u64)>, page_timing: Option<bool>) -> Result<Self> {
        let memory = Anonymous::new(len)?;
        let tenants: Vec<_> = (0..memory.len().div_ceil(HUGE_PAGE as usize)).map(|_| AtomicU32::new(0)).collect();
        for (offset, nbytes) in places {
            for page in Self::pages(offset, nbytes) {
                tenants[page].fetch_add(1, Ordering::Relaxed);
            }
        }
        let times = Mutex::new(PageTimes::new(memory.len() as u64, page_timing));
        Ok(Self { memory, tenants, incomplete: AtomicU32::new(0), times })
    }

    /// Is called before `nbytes` bytes at `offset` are written for the first time, and changes none of them. Some huge pages are
    /// timed ([`PageTimes`]). If these are slow, the rest of the arena comes in small pages.
    fn prepare(&self, offset: u64, nbytes: u64) {
        let mut times = lock(&self.times);
        for page in offset.div_ceil(HUGE_PAGE)..(offset + nbytes).div_ceil(HUGE_PAGE) {
            let from = (page * HUGE_PAGE) as usize;
            let Some(len) = self.memory.len().checked_sub(from).map(|left| left.min(HUGE_PAGE as usize)) else {
                return;
            };
            // SAFETY: inside our mapping.
            let at = unsafe { self.memory.at().add(from) };
            if times.turn_slow(at, len) {
                self.memory.advise(libc::MADV_NOHUGEPAGE);
            }
        }
    }

    /// All wanted bytes of one block have arrived. With the last one the kernel may make huge pages of small ones again.
    fn block_complete(&self) {
        if self.incomplete.fetch_sub(1, Ordering::Relaxed) == 1 && lock(&self.times).are_slow() {
            self.memory.advise(libc::MADV_HUGEPAGE);
        }
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

/// CPU memory of one view alone: of the heap, or a mapping where it is large.
pub(crate) struct Buffer {
    at: *mut u8,
    len: usize,
    mapped: Option<Anonymous>,
}

// SAFETY: as for `Anonymous`.
unsafe impl Send for Buffer {}
// SAFETY: as for `Anonymous`.
unsafe impl Sync for Buffer {}

/// Smaller memory is of the heap. A mapping costs two system calls, and a process may have 65,530.
const LEAST_MAPPED: u64 = HUGE_PAGE;

impl Buffer {
    /// Memory of `len` bytes, with nothing in it yet. Aligned to 64 bytes.
    pub(crate) fn new(len: u64) -> Result<Self> {
        if len >= LEAST_MAPPED {
            let mapped = Anonymous::new(len)?;
            return Ok(Self { at: mapped.at(), len: mapped.len(), mapped: Some(mapped) });
        }
        let layout = Self::layout(len as usize);
        // SAFETY: the layout has at least one byte.
        let at = unsafe { std::alloc::alloc(layout) };
        if at.is_null() {
            return Err(Error::new(ErrorKind::OutOfMemory, format!("there is no memory for {len} bytes; free memory")));
        }
        Ok(Self { at, len: len as usize, mapped: None })
    }

    fn layout(len: usize) -> std::alloc::Layout {
        let align = CPU_ALIGN as usize;
        // SAFETY: the alignment is a power of two, and `LEAST_MAPPED` is far from the largest size.
        unsafe { std::alloc::Layout::from_size_align_unchecked(len.max(1), align) }
    }

    /// First byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }

    /// The view of all of it: `nbytes` bytes.
    pub(crate) fn view(self: &Arc<Self>, nbytes: u64) -> View {
        debug_assert!(nbytes as usize <= self.len);
        let block = Block { address: self.at as u64, owner: Owner::Buffer(self.clone()) };
        block.view(0, nbytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.mapped.is_none() {
            // SAFETY: allocated in `new` with this layout, and nobody holds it any more.
            unsafe { std::alloc::dealloc(self.at, Self::layout(self.len)) };
        }
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
    /// Memory of one view alone.
    Buffer(Arc<Buffer>),
}

impl Block {
    /// The block that begins at byte `offset` of a mapped file.
    pub(crate) fn mapping(mapping: &Arc<Mapping>, offset: u64) -> Self {
        mapping.incomplete.fetch_add(1, Ordering::Relaxed);
        Self { address: mapping.at as u64 + offset, owner: Owner::Mapping(mapping.clone()) }
    }

    pub(crate) fn arena(arena: &Arc<Arena>, offset: u64) -> Self {
        arena.incomplete.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the offset lies in the arena: the caller laid the arena out.
        let address = unsafe { arena.memory.at().add(offset as usize) } as u64;
        Self { address, owner: Owner::Arena(arena.clone(), offset) }
    }

    pub(crate) fn held(address: u64, by: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, owner: Owner::Held(by) }
    }

    /// The mapped file that it is of, if it is.
    pub(crate) fn mapped(&self) -> Option<&Arc<Mapping>> {
        match &self.owner {
            Owner::Mapping(mapping) => Some(mapping),
            _ => None,
        }
    }

    /// Address of the block's first byte: a host address or a device pointer.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// All wanted bytes of the block have arrived.
    pub(crate) fn complete(&self) {
        match &self.owner {
            Owner::Mapping(mapping) => mapping.block_complete(),
            Owner::Arena(arena, _) => arena.block_complete(),
            Owner::Held(_) | Owner::Buffer(_) => {}
        }
    }

    /// `nbytes` bytes at `offset` are about to be written for the first time.
    pub(crate) fn prepare(&self, offset: u64, nbytes: u64) {
        if let Owner::Arena(arena, at) = &self.owner {
            arena.prepare(at + offset, nbytes);
        }
    }

    /// Something that keeps the memory alive.
    pub(crate) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        match &self.owner {
            Owner::Mapping(m) => m.clone(),
            Owner::Arena(a, _) => a.clone(),
            Owner::Held(h) => h.clone(),
            Owner::Buffer(s) => s.clone(),
        }
    }

    /// A share of the block: the place at `offset`. At most once per place.
    pub(crate) fn view(&self, offset: u64, nbytes: u64) -> View {
        if let Owner::Mapping(mapping) = &self.owner {
            if let Some(alive) = mapping.alive.get() {
                alive.add(self.address + offset, nbytes);
            }
        }
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
        match &self.block.owner {
            Owner::Arena(arena, start) => arena.vacate(start + self.offset, self.nbytes),
            Owner::Mapping(mapping) => {
                if let Some(alive) = mapping.alive.get() {
                    alive.remove(self.address, self.nbytes);
                }
            }
            Owner::Held(_) | Owner::Buffer(_) => {}
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Bytes of a range that are in memory.
    pub(crate) fn resident_bytes(at: *mut u8, len: usize) -> usize {
        let page = page_size() as usize;
        let mut pages = vec![0u8; len.div_ceil(page)];
        // SAFETY: the range is mapped and the vector has one byte per page of it.
        assert_eq!(unsafe { libc::mincore(at.cast(), len, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|&&p| p & 1 == 1).count() * page
    }

    /// The flags of the mapping at an address, as /proc/self/smaps gives them: `hg` and `nh` are the advice.
    pub(crate) fn flags(at: u64) -> Vec<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        for line in smaps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((start, end)) = range {
                let address = |text| u64::from_str_radix(text, 16).unwrap_or(0);
                is_here = (address(start)..address(end)).contains(&at);
            } else if let (true, Some(flags)) = (is_here, line.strip_prefix("VmFlags:")) {
                return flags.split_whitespace().map(String::from).collect();
            }
        }
        panic!("no mapping at {at:#x}");
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{flags, resident_bytes};
    use super::*;
    use crate::huge_pages::{LEAST_SAMPLED, SAMPLED};
    use crate::machine::is_virtual_machine;

    #[test]
    fn more_memory_than_there_are_addresses_is_an_error() {
        for len in [u64::MAX, u64::MAX - page_size(), u64::MAX - HUGE_PAGE] {
            assert_eq!(Anonymous::new(len).err().map(|e| e.kind()), Some(ErrorKind::OutOfMemory));
        }
    }

    /// An arena of `len` bytes in which huge pages are timed, and count as slow from so much processor time.
    fn timed(len: u64, slow_from: Duration) -> Arc<Arena> {
        let mut arena = Arena::new(len, std::iter::empty(), None).unwrap();
        arena.times = Mutex::new(PageTimes::slow_from(slow_from));
        Arc::new(arena)
    }

    fn has(block: &Block, flag: &str) -> bool {
        flags(block.address()).iter().any(|f| f == flag)
    }

    #[test]
    fn after_slow_huge_pages_an_arena_comes_in_small_ones_until_it_is_complete() {
        let arena = timed(32 * HUGE_PAGE, Duration::ZERO);
        let blocks = [Block::arena(&arena, 0), Block::arena(&arena, 5 * HUGE_PAGE / 2)];
        blocks[0].prepare(0, HUGE_PAGE);
        assert!(has(&blocks[0], "hg") && !has(&blocks[0], "nh"));
        blocks[0].prepare(HUGE_PAGE, HUGE_PAGE);
        assert!(has(&blocks[0], "nh") && has(&blocks[1], "nh"));
        let populated = resident_bytes(arena.memory.at(), arena.memory.len());
        assert_eq!(populated, 2 * HUGE_PAGE as usize);
        blocks[1].prepare(0, 8 * HUGE_PAGE);
        assert_eq!(resident_bytes(arena.memory.at(), arena.memory.len()), populated);
        blocks[1].complete();
        assert!(has(&blocks[0], "nh"));
        blocks[0].complete();
        assert!(has(&blocks[0], "hg") && !has(&blocks[0], "nh"));
    }

    #[test]
    fn one_of_so_many_fast_huge_pages_is_timed_and_no_byte_changes() {
        let pages = 4 * u64::from(SAMPLED);
        let arena = timed(pages * HUGE_PAGE + page_size(), Duration::from_secs(1));
        let block = Block::arena(&arena, 0);
        // SAFETY: the arena is longer than that and nobody else knows it.
        unsafe { arena.memory.at().add(100).write(7) };
        // In reads that begin and end within pages. The last one goes to the end of the arena.
        let (mut at, step) = (0, 3 * HUGE_PAGE + page_size());
        while at < arena.memory.len() as u64 {
            let len = step.min(arena.memory.len() as u64 - at);
            block.prepare(at, len);
            at += len;
        }
        let resident = resident_bytes(arena.memory.at(), arena.memory.len()) as u64;
        assert_eq!(resident, 4 * HUGE_PAGE + page_size());
        // SAFETY: as above.
        assert_eq!(unsafe { arena.memory.at().add(100).read() }, 7);
        block.complete();
        assert!(has(&block, "hg"));
    }

    #[test]
    fn a_small_arena_is_not_timed_nor_one_without_page_timing() {
        const SMALL: u64 = LEAST_SAMPLED - HUGE_PAGE;
        for (len, page_timing, is_timed) in
            [(SMALL, None, false), (SMALL, Some(true), false), (LEAST_SAMPLED, Some(false), false)]
                .into_iter()
                .chain([(LEAST_SAMPLED, Some(true), true), (LEAST_SAMPLED, None, is_virtual_machine())])
        {
            let arena = Arc::new(Arena::new(len, std::iter::empty(), page_timing).unwrap());
            let block = Block::arena(&arena, 0);
            block.prepare(0, len);
            let resident = resident_bytes(arena.memory.at(), arena.memory.len());
            assert_eq!(resident > 0, is_timed, "{len} {page_timing:?}");
            assert!(is_timed || has(&block, "hg"));
        }
    }

    #[test]
    fn a_kept_scalar_pins_one_huge_page_and_nothing_else() {
        let len = 8 * HUGE_PAGE;
        let places = [(0, 16), (16, 3 * HUGE_PAGE), (16 + 3 * HUGE_PAGE, 5 * HUGE_PAGE - 16)];
        let arena = Arc::new(Arena::new(len, places.iter().copied(), None).unwrap());
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
