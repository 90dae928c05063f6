//! The threads that write blocks to the disk cache and read them from there. They live as long as there is something to do, and
//! longer than the load that asked for it.
//!
//! A block that a load waits for is read before others are written. What was written is synced, 64 MiB at a time and at the
//! end. Blocks that were dropped are asked of the server again when no load runs, if the settings say so.

use super::asking::OwnClaims;
use super::cached_file::{lacks_descriptors, CachedFile};
use super::progress::{CacheProgress, Pending};
use super::publish::Publisher;
use super::BLOCK;
use crate::error::Result;
use crate::machine::{block_signals, thread_cpu};
use crate::memory::Anonymous;
use crate::store::object::Store;
use crate::sync::{lock, Builder, Condvar, Mutex};
use crate::threads::guarded;
use crate::wake::Wake;
use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Threads at once. They wait for the disk.
const MOST_THREADS: usize = 4;
/// Bytes that are written before they are synced.
const SYNCED: u64 = 64 << 20;
/// Threads that ask for dropped blocks at once: while one writes, the others receive.
const MOST_ASKING: usize = 3;
/// Bytes that one of them asks for at once.
const AGAIN: u64 = 8 * BLOCK;
const STACK: usize = 256 << 10;
const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Memory of one block.
pub(super) struct BlockBuffer {
    /// Always there; taken by `drop`.
    memory: Option<Anonymous>,
    pool: Arc<BufferPool>,
    /// Its block was read from the disk.
    from_disk: AtomicBool,
}

/// Counts a block that the writer has.
pub(super) struct InWriter(Arc<AtomicUsize>);

impl InWriter {
    pub(super) fn of(count: &Arc<AtomicUsize>) -> InWriter {
        count.fetch_add(1, Ordering::Relaxed);
        InWriter(count.clone())
    }
}

impl Drop for InWriter {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BlockBuffer {
    /// Memory out of the pool, or new memory.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn of(pool: &Arc<BufferPool>) -> Result<Arc<BlockBuffer>> {
        let free = lock(&pool.free).pop();
        let memory = Some(free.map_or_else(|| Anonymous::new(BLOCK), Ok)?);
        pool.held.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(BlockBuffer { memory, pool: pool.clone(), from_disk: AtomicBool::new(false) }))
    }

    /// Its block comes from the disk, not from the server.
    pub(super) fn is_from_disk(&self) -> bool {
        self.from_disk.load(Ordering::Relaxed)
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.memory.as_ref().map_or(ptr::null_mut(), Anonymous::at)
    }

    /// Its first `len` bytes.
    ///
    /// # Safety
    /// Nobody writes to it meanwhile.
    pub(super) unsafe fn bytes(&self, len: usize) -> &[u8] {
        // SAFETY: the memory has a block, and the caller promises the rest.
        unsafe { std::slice::from_raw_parts(self.address(), len.min(BLOCK as usize)) }
    }

    /// The same, to be filled.
    ///
    /// # Safety
    /// Nobody else has it.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn bytes_mut(&self, len: usize) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.address(), len.min(BLOCK as usize)) }
    }
}

impl Drop for BlockBuffer {
    fn drop(&mut self) {
        lock(&self.pool.free).extend(self.memory.take());
        self.pool.held.fetch_sub(1, Ordering::Relaxed);
        self.pool.wake.notify();
    }
}

/// The memory of the blocks of a load. It is the cache's own: slabs that wait for the engine could keep it from the slabs that
/// these blocks wait for.
pub(super) struct BufferPool {
    free: Mutex<Vec<Anonymous>>,
    held: AtomicUsize,
    /// Notified when memory is free.
    wake: Arc<Wake>,
}

impl BufferPool {
    pub(super) fn new(wake: Arc<Wake>) -> Arc<BufferPool> {
        Arc::new(BufferPool { free: Mutex::default(), held: AtomicUsize::new(0), wake })
    }

    /// Blocks in memory.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

/// A block to be written or read.
struct BlockJob {
    file: Arc<CachedFile>,
    block: u32,
    memory: Arc<BlockBuffer>,
}

/// The bytes of a block that is to be written.
pub(super) enum BlockBytes {
    /// A block of a load.
    Memory(Arc<BlockBuffer>, #[allow(dead_code)] InWriter), // counted until it is dropped
    /// Bytes of an object that was read whole.
    Own(Vec<u8>),
}

struct WriteJob {
    file: Arc<CachedFile>,
    block: u32,
    bytes: BlockBytes,
    again: Option<Arc<dyn Store>>,
}

/// Blocks to be asked of the server again.
struct AgainJob {
    file: Arc<CachedFile>,
    store: Arc<dyn Store>,
    blocks: VecDeque<u32>,
    progress: Arc<CacheProgress>,
    // Dropped before the next one, so that the work is not finished before the last sync.
    _writes: OfLoad,
    _pending: Pending,
}

/// A part of the writes of a load: the last one that ends has them synced.
struct OfLoad(&'static CacheCrew, Arc<CachedFile>, Arc<CacheProgress>);

impl Drop for OfLoad {
    fn drop(&mut self) {
        let OfLoad(crew, file, progress) = self;
        crew.load_ends(file, progress);
    }
}

/// Hears once whether a block was read: also if the thread that reads it panics.
pub(super) struct Told(Option<Box<dyn FnOnce(bool) + Send>>);

impl Told {
    pub(super) fn new(tell: impl FnOnce(bool) + Send + 'static) -> Told {
        Told(Some(Box::new(tell)))
    }

    fn tell(mut self, is_read: bool) {
        self.0.take().into_iter().for_each(|tell| tell(is_read));
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|tell| tell(false));
    }
}

enum CacheJob {
    /// Reads a block, and tells whether that went well.
    Fetch(BlockJob, Told),
    Write(WriteJob, Arc<CacheProgress>, Pending),
    Sync(Arc<CachedFile>, Arc<CacheProgress>, Pending),
    Again(AgainJob),
}

#[derive(Default)]
struct Jobs {
    fetches: VecDeque<CacheJob>,
    others: VecDeque<CacheJob>,
    /// Blocks that were dropped: when no load runs.
    again: VecDeque<CacheJob>,
    /// Threads that ask for such blocks.
    asking_again: usize,
    threads: usize,
    /// Threads whose job is no fetch: one is left for these, which loads wait for.
    others_run: usize,
    /// Loads through the cache that run.
    loads: usize,
}

/// The threads of this process.
pub(super) struct CacheCrew {
    pid: u32,
    jobs: Mutex<Jobs>,
    /// A thread has ended a job, or itself.
    changed: Condvar,
    /// Blocks are not asked for again now: a load runs.
    pause: AtomicBool,
    stop: AtomicBool,
}

static PROCESS: AtomicPtr<CacheCrew> = AtomicPtr::new(ptr::null_mut());

impl CacheCrew {
    /// The threads of this process. A forked child has its own.
    pub(super) fn process() -> &'static CacheCrew {
        // No lock: another thread of the parent might have held it when the process forked.
        loop {
            let current = PROCESS.load(Ordering::Acquire);
            // SAFETY: null, or leaked below and never freed.
            if let Some(crew) = unsafe { current.as_ref() }.filter(|crew| crew.pid == std::process::id()) {
                return crew;
            }
            let fresh = Box::into_raw(Box::new(CacheCrew {
                pid: std::process::id(),
                jobs: Mutex::default(),
                changed: Condvar::new(),
                pause: AtomicBool::new(false),
                stop: AtomicBool::new(false),
            }));
            if PROCESS.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above and published to nobody.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    /// Reads a block into its memory. `told` hears whether that went well.
    pub(super) fn fetch(&'static self, file: Arc<CachedFile>, block: u32, memory: Arc<BlockBuffer>, told: Told) {
        memory.from_disk.store(true, Ordering::Relaxed);
        let job = CacheJob::Fetch(BlockJob { file, block, memory }, told);
        lock(&self.jobs).fetches.push_back(job);
        self.go_on();
    }

    /// Writes a block of memory, or these bytes of one. One that no descriptor is free for is asked of `again` when no load runs.
    pub(super) fn write(
        &'static self,
        file: &Arc<CachedFile>,
        block: u32,
        bytes: BlockBytes,
        progress: &Arc<CacheProgress>,
        again: Option<Arc<dyn Store>>,
    ) {
        file.writes.fetch_add(1, Ordering::Relaxed);
        let job = WriteJob { file: file.clone(), block, bytes, again };
        let job = CacheJob::Write(job, progress.clone(), progress.pending());
        lock(&self.jobs).others.push_back(job);
        self.go_on();
    }

    /// A source of the load ends: what was written and not synced is synced, now or after the last write.
    pub(super) fn load_ends(&'static self, file: &Arc<CachedFile>, progress: &Arc<CacheProgress>) {
        let last = progress.is_own() && file.sources.fetch_sub(1, Ordering::SeqCst) == 1;
        // What was told to stop is not synced: the next load does that, or a boot forgets it.
        if last && file.unsynced.load(Ordering::SeqCst) > 0 && !self.stop.load(Ordering::Relaxed) {
            let job = CacheJob::Sync(file.clone(), progress.clone(), progress.pending());
            lock(&self.jobs).others.push_back(job);
            self.go_on();
        } else if last {
            file.offer(progress);
        }
    }

    /// Asks for blocks again when no load runs.
    pub(super) fn again(
        &'static self,
        file: Arc<CachedFile>,
        store: Arc<dyn Store>,
        blocks: Vec<u32>,
        progress: &Arc<CacheProgress>,
    ) {
        for part in blocks.chunks((AGAIN / BLOCK) as usize) {
            file.load_begins();
            let (blocks, store) = (part.iter().copied().collect(), store.clone());
            let (writes, pending) = (OfLoad(self, file.clone(), progress.clone()), progress.pending());
            let job = AgainJob {
                file: file.clone(),
                store,
                blocks,
                progress: progress.clone(),
                _writes: writes,
                _pending: pending,
            };
            lock(&self.jobs).again.push_back(CacheJob::Again(job));
        }
        self.go_on();
    }

    /// A load through the cache begins.
    pub(super) fn load_begins(&'static self) -> CrewLoad {
        lock(&self.jobs).loads += 1;
        self.pause.store(true, Ordering::Relaxed);
        Publisher::process().load_begins();
        CrewLoad(self.pid)
    }

    /// Starts a thread if there is a job for it.
    fn go_on(&'static self) {
        let mut jobs = lock(&self.jobs);
        let is_waiting =
            !jobs.fetches.is_empty() || jobs.may_do_others() && (!jobs.others.is_empty() || jobs.may_ask());
        if !is_waiting || jobs.threads >= MOST_THREADS || self.stop.load(Ordering::Relaxed) {
            return;
        }
        jobs.threads += 1;
        drop(jobs);
        let thread = Builder::new().name("penstock-cache".into()).stack_size(STACK);
        if thread.spawn(move || self.work()).is_err() {
            let mut jobs = lock(&self.jobs);
            jobs.threads -= 1;
            // With no thread at all, nothing is written, and what was to be read comes from the server.
            if jobs.threads == 0 {
                let left = jobs.take_all();
                drop(jobs);
                left.into_iter().for_each(CacheJob::give_up);
            }
        }
    }

    /// The body of a thread.
    fn work(&'static self) {
        block_signals();
        loop {
            let job = {
                let mut jobs = lock(&self.jobs);
                match jobs.next(self.stop.load(Ordering::Relaxed)) {
                    Some(job) => job,
                    None => {
                        jobs.threads -= 1;
                        self.changed.notify_all();
                        return;
                    }
                }
            };
            let (again, other) = (matches!(job, CacheJob::Again(_)), !matches!(job, CacheJob::Fetch(..)));
            if again {
                self.go_on(); // beside others
            }
            // A panic costs this job. Its block is not there, and a load that waits for it hears of the failure by its memory.
            let left = guarded("penstock-cache", || self.perform(job)).unwrap_or_default();
            let mut jobs = lock(&self.jobs);
            if again {
                jobs.asking_again -= 1;
            }
            jobs.others_run -= usize::from(other);
            match left {
                Some(job @ CacheJob::Again(_)) => jobs.again.push_front(job),
                Some(job) => jobs.others.push_back(job),
                None => {}
            }
            drop(jobs);
            self.changed.notify_all();
        }
    }

    /// Does a job. Gives what is left of it.
    fn perform(&self, job: CacheJob) -> Option<CacheJob> {
        match job {
            CacheJob::Fetch(BlockJob { file, block, memory }, told) => {
                // SAFETY: only this thread has the memory until it tells.
                let into = unsafe { memory.bytes_mut(file.block_len(block)) };
                let read = file.read(block, into);
                drop(memory);
                told.tell(read.is_ok());
                None
            }
            CacheJob::Write(WriteJob { file, block, bytes, again }, progress, pending) => {
                let (cpu, len) = (thread_cpu(), file.block_len(block));
                let written = file.write(
                    block,
                    match &bytes {
                        // SAFETY: the block is complete. Its reads are copied out of it, and nobody writes to it.
                        BlockBytes::Memory(memory, _) => unsafe { memory.bytes(len) },
                        BlockBytes::Own(bytes) => bytes,
                    },
                );
                progress.has_written(len as u64, written.as_ref().err(), thread_cpu().saturating_sub(cpu));
                drop(bytes);
                if let Some(store) = again.filter(|_| written.as_ref().is_err_and(lacks_descriptors)) {
                    CacheCrew::process().again(file.clone(), store, vec![block], &progress);
                }
                let unsynced = file.unsynced.fetch_add(bytes_of(&written, &file, block), Ordering::SeqCst);
                let last = file.writes.fetch_sub(1, Ordering::Relaxed) == 1;
                // While the load brings blocks, the queue is empty after nearly each of them.
                let is_end = last && file.sources.load(Ordering::SeqCst) == 0;
                (is_end || unsynced >= SYNCED).then_some(CacheJob::Sync(file, progress, pending))
            }
            CacheJob::Sync(file, progress, _pending) => {
                if file.unsynced.swap(0, Ordering::Relaxed) > 0 {
                    let cpu = thread_cpu();
                    let synced = file.written().sync();
                    progress.has_synced(synced.err().as_ref(), thread_cpu().saturating_sub(cpu));
                }
                file.offer(&progress);
                None
            }
            CacheJob::Again(job) => self.ask_again(job),
        }
    }

    /// Asks for the next blocks that were dropped.
    fn ask_again(&self, mut job: AgainJob) -> Option<CacheJob> {
        while let Some(first) = job.blocks.pop_front() {
            if self.stop.load(Ordering::Relaxed) || !job.file.is_writable() {
                return None;
            }
            if self.pause.load(Ordering::Relaxed) {
                job.blocks.push_front(first);
                return Some(CacheJob::Again(job));
            }
            let mut past = first + 1;
            while job.blocks.front() == Some(&past) && u64::from(past + 1 - first) * BLOCK <= AGAIN {
                job.blocks.pop_front();
                past += 1;
            }
            if let Err(e) = ask(&job, first, past) {
                job.progress.has_failed(&e);
                return None;
            }
        }
        let is_much = job.file.unsynced.load(Ordering::SeqCst) >= SYNCED;
        is_much.then(|| CacheJob::Sync(job.file.clone(), job.progress.clone(), job.progress.pending()))
    }

    /// Ends all work, and waits at most so long for the threads. Blocks that were to be written are dropped.
    pub(super) fn stop(&'static self, patience: Duration) {
        self.stop.store(true, Ordering::Relaxed);
        let left = lock(&self.jobs).take_all();
        left.into_iter().for_each(CacheJob::give_up);
        let until = Instant::now() + patience.min(LONGEST_WAIT);
        let mut jobs = lock(&self.jobs);
        while jobs.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            jobs = self.changed.wait_timeout(jobs, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(jobs);
        self.stop.store(false, Ordering::Relaxed);
        // Jobs of loads that have begun meanwhile.
        (0..MOST_THREADS).for_each(|_| self.go_on());
    }
}

/// Asks the server for blocks and writes them. Those that another process brings meanwhile are left to it.
fn ask(job: &AgainJob, first: u32, past: u32) -> Result<()> {
    let AgainJob { file, store, progress, .. } = job;
    let entry = &file.entry;
    let (mut claims, _) = OwnClaims::of(entry, &(first..past), first..past)?;
    let wanted = claims.blocks();
    let (Some(&from), Some(&to)) = (wanted.first(), wanted.last()) else { return Ok(()) };
    let range = entry.range(from).start..entry.range(to).end;
    let bytes = file.heard(|| store.read(&file.object, range.clone()));
    let cpu = thread_cpu();
    for &block in &wanted {
        let within = entry.range(block);
        let part = bytes
            .as_ref()
            .ok()
            .and_then(|all| all.get((within.start - range.start) as usize..(within.end - range.start) as usize));
        // The claims of other blocks end with `claims`.
        if let Some(part) = part {
            let written = file.write(block, part);
            claims.are_written(&[block]);
            progress.has_fetched_again(part.len() as u64);
            progress.has_written(part.len() as u64, written.as_ref().err(), Duration::ZERO);
            file.unsynced.fetch_add(bytes_of(&written, file, block), Ordering::Relaxed);
        }
    }
    progress.has_synced(None, thread_cpu().saturating_sub(cpu));
    bytes.map(drop)
}

fn bytes_of(written: &Result<()>, file: &CachedFile, block: u32) -> u64 {
    if written.is_ok() {
        file.block_len(block) as u64
    } else {
        0
    }
}

impl CacheJob {
    /// It is not done.
    fn give_up(self) {
        match self {
            CacheJob::Fetch(_, told) => told.tell(false),
            CacheJob::Write(WriteJob { file, block, .. }, progress, _pending) => {
                file.writes.fetch_sub(1, Ordering::Relaxed);
                file.entry.release(block);
                progress.has_dropped(file.block_len(block) as u64);
            }
            CacheJob::Sync(..) => {}
            CacheJob::Again(job) => job.progress.has_stopped("it was told to stop"),
        }
    }
}

impl Jobs {
    /// The next job of a thread.
    fn next(&mut self, stop: bool) -> Option<CacheJob> {
        let fetch = self.fetches.pop_front();
        if fetch.is_some() || !self.may_do_others() {
            return fetch;
        }
        let mut next = self.others.pop_front();
        if next.is_none() && !stop && self.may_ask() {
            self.asking_again += 1;
            next = self.again.pop_front();
        }
        self.others_run += usize::from(next.is_some());
        next
    }

    /// True if a thread more may do something else than fetch.
    fn may_do_others(&self) -> bool {
        self.others_run < MOST_THREADS - 1
    }

    /// True if a thread more may ask for dropped blocks.
    fn may_ask(&self) -> bool {
        !self.again.is_empty() && self.loads == 0 && self.asking_again < MOST_ASKING
    }

    fn take_all(&mut self) -> Vec<CacheJob> {
        let Jobs { fetches, others, again, .. } = self;
        fetches.drain(..).chain(others.drain(..)).chain(again.drain(..)).collect()
    }
}

/// Ends what the disk cache does after loads, and waits at most so long for its threads.
pub(crate) fn stop_cache_work(patience: Duration) {
    let until = Instant::now() + patience.min(LONGEST_WAIT);
    CacheCrew::process().stop(patience);
    Publisher::process().stop(until.saturating_duration_since(Instant::now()));
}

/// A load through the cache that runs.
#[derive(Debug)]
pub(super) struct CrewLoad(u32);

impl Drop for CrewLoad {
    fn drop(&mut self) {
        let crew = CacheCrew::process();
        if crew.pid != self.0 {
            return; // counted in the process that this one was forked from
        }
        Publisher::process().load_ends();
        let mut jobs = lock(&crew.jobs);
        jobs.loads -= 1;
        if jobs.loads > 0 {
            return;
        }
        crew.pause.store(false, Ordering::Relaxed);
        drop(jobs);
        crew.go_on();
    }
}
