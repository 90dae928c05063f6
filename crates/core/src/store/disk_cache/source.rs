//! The source of objects that the disk cache has in part or not at all: it asks the server for whole blocks, hands them to the
//! reads and to the writer, and reads the blocks that are there.
//!
//! The decisions are in [`flow`](super::flow). Reads that lie in no single block, and objects that are not cached, go to the
//! server's source as they are.

use super::crew::{BlockBytes, BlockMemory, CachedFile, Crew, CrewLoad, InWriter, Told};
use super::flow::{BlockId, CacheFlow, Carrier, Claimed};
use super::look::Looker;
use super::progress::{CacheProgress, Pending};
use super::{BlockState, BLOCK};
use crate::error::{Error, Result};
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use crate::source::{epoll, watch, Destination, Done, Progress, Read, Source, Touches};
use crate::staging::{Ring, Share};
use crate::store::object::Store;
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Blocks in memory at most: 64 MiB. A quarter of the staging memory, where that is less.
const MOST_BUFFERS: usize = 64;
/// How often blocks of other processes are looked after.
const LOOK: Duration = Duration::from_millis(10);
/// Tickets of blocks have this bit.
const OF_BLOCK: u64 = 1 << 63;

/// The objects of a load, by the number of their file; `None`: the object is not cached.
pub(super) type CachedFiles = Vec<Option<Arc<CachedFile>>>;

/// News for the source of a load from other threads.
#[derive(Debug)]
pub(super) enum News {
    /// A block was read from the disk, or could not be.
    Fetched(BlockId, bool),
    /// The state of a block that another process brings.
    Seen(BlockId, Claimed),
    /// The process of this holder has claimed or brought other blocks.
    Alive(u32),
}

/// Where other threads put them.
#[derive(Debug)]
pub(super) struct Inbox {
    news: Mutex<Vec<News>>,
    /// When the looker began to look last.
    looked: Mutex<Option<Instant>>,
    wake: Arc<Wake>,
}

impl Inbox {
    pub(super) fn tell(&self, news: impl IntoIterator<Item = News>) {
        lock(&self.news).extend(news);
        self.wake.notify();
    }

    /// The same, by a look that began then.
    pub(super) fn tell_of_look(&self, began: Instant, news: Vec<News>) {
        let mut all = lock(&self.news);
        all.extend(news);
        *lock(&self.looked) = Some(began);
        drop(all);
        self.wake.notify();
    }
}

/// The source.
pub(super) struct CacheSource {
    flow: CacheFlow<Hands>,
    hands: Hands,
    looker: Looker,
    began: Instant,
    /// When others' blocks were looked at last, and whether there may be new ones.
    looked: Duration,
    is_new: bool,
    /// When the last look began whose news have been heard.
    heard: Duration,
    wake: OwnedFd,
    events: Vec<Progress>,
}

/// What the flow needs done, done.
struct Hands {
    inner: Box<dyn Source>,
    files: Arc<CachedFiles>,
    /// The store of the server.
    store: Arc<dyn Store>,
    /// Blocks that were dropped are asked for again.
    asks_again: bool,
    share: Share,
    most_buffers: usize,
    held: Arc<AtomicUsize>,
    /// Blocks that the writer has.
    writing: Arc<AtomicUsize>,
    inbox: Arc<Inbox>,
    reads: HashMap<Ticket, Read>,
    /// Memory of blocks that the writer has, or had.
    in_writer: HashMap<BlockId, Weak<BlockMemory>>,
    /// The lanes of blocks that came by another one than the server's.
    lanes: HashMap<BlockId, Lane>,
    /// Blocks to be asked of the server, for which its source had no room.
    unsent: VecDeque<BlockId>,
    dropped: Vec<BlockId>,
    /// What is to be told at the next poll.
    done: Vec<Progress>,
    /// Reads that went to the server's source as they are, and have not ended.
    passed: usize,
    progress: Arc<CacheProgress>,
    cancelled: bool,
    _pending: Pending,
    _load: CrewLoad,
}

impl CacheSource {
    pub(super) fn new(
        inner: Box<dyn Source>,
        files: Arc<CachedFiles>,
        store: Arc<dyn Store>,
        asks_again: bool,
        staging: u64,
        progress: &Arc<CacheProgress>,
    ) -> Result<CacheSource> {
        let most_buffers = ((staging / 4 / BLOCK) as usize).clamp(4, MOST_BUFFERS);
        let inbox = Arc::new(Inbox { news: Mutex::default(), looked: Mutex::default(), wake: Arc::new(Wake::new()?) });
        let share = Ring::process().join(BLOCK, staging)?;
        let wake = epoll()?;
        for fd in [inner.wake(), inbox.wake.fd(), share.fd()] {
            watch(&wake, fd)?;
        }
        let looker = Looker::new(files.clone(), inbox.clone());
        files.iter().flatten().for_each(|file| file.load_begins());
        let hands = Hands {
            inner,
            files,
            store,
            asks_again,
            share,
            most_buffers,
            held: Arc::default(),
            writing: Arc::default(),
            inbox,
            reads: HashMap::new(),
            in_writer: HashMap::new(),
            lanes: HashMap::new(),
            unsent: VecDeque::new(),
            dropped: Vec::new(),
            done: Vec::new(),
            passed: 0,
            progress: progress.clone(),
            cancelled: false,
            _pending: progress.pending(),
            _load: Crew::process().load_begins(),
        };
        Ok(CacheSource {
            flow: CacheFlow::new(),
            hands,
            looker,
            began: Instant::now(),
            looked: Duration::ZERO,
            is_new: false,
            heard: Duration::ZERO,
            wake,
            events: Vec::new(),
        })
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The block of a read that goes through the flow.
    fn block_of(&self, read: &Read) -> Option<BlockId> {
        self.hands.files.get(read.file as usize)?.as_ref()?;
        let (first, last) = (read.offset / BLOCK, (read.offset + read.need.max(1) - 1) / BLOCK);
        (first == last).then_some(BlockId { file: read.file, block: first as u32 })
    }

    /// What the server's source has told.
    fn hear(&mut self, event: Progress) {
        let CacheSource { flow, hands, .. } = self;
        match event {
            Progress::Arrived(ticket) => match block_of(ticket) {
                Some(block) => flow.arrived(block, hands),
                None => hands.done.push(Progress::Arrived(ticket)),
            },
            Progress::Received(ticket) => match block_of(ticket) {
                Some(block) => hands.done.extend(flow.reads_of(block).map(Progress::Received)),
                None => hands.done.push(Progress::Received(ticket)),
            },
            Progress::Done(done) => match block_of(done.ticket) {
                Some(block) => {
                    if let Ok(bytes) = done.result {
                        hands.progress.has_received(bytes);
                        if done.lane != Lane::NETWORK {
                            hands.lanes.insert(block, done.lane);
                        }
                    }
                    flow.came(block, done.result.map(drop), hands);
                }
                None => {
                    hands.passed = hands.passed.saturating_sub(1);
                    hands.done.push(Progress::Done(done));
                }
            },
            Progress::Refused { read, cause } => match block_of(read.ticket) {
                Some(block) => flow.came(block, Err(cause), hands),
                None => {
                    hands.passed = hands.passed.saturating_sub(1);
                    hands.done.push(Progress::Refused { read, cause });
                }
            },
        }
    }

    /// What other threads have told.
    fn hear_threads(&mut self) {
        let now = self.now();
        let CacheSource { flow, hands, heard, began, .. } = self;
        let mut all = lock(&hands.inbox.news);
        let news = std::mem::take(&mut *all);
        if let Some(at) = *lock(&hands.inbox.looked) {
            *heard = at.saturating_duration_since(*began);
        }
        drop(all);
        for one in news {
            match one {
                News::Fetched(block, is_read) => {
                    if let Some(file) = hands.file(block).filter(|_| is_read) {
                        hands.progress.has_cached(file.block_len(block.block) as u64);
                    }
                    flow.fetched(block, is_read, hands);
                }
                News::Seen(block, state) => flow.seen(now, block, state, hands),
                News::Alive(holder) => flow.is_alive(now, holder),
            }
        }
    }

    /// Looks after the blocks that other processes bring.
    fn look(&mut self) {
        let now = self.now();
        if !self.is_new && now < self.looked + LOOK {
            return;
        }
        (self.looked, self.is_new) = (now, false);
        // A thread that gets no processor sees nothing either: only a look shows that a holder is silent.
        self.flow.tick(self.heard, &mut self.hands);
        self.looker.look_at(self.flow.theirs());
    }
}

fn block_of(ticket: Ticket) -> Option<BlockId> {
    let number = ticket.0 & !OF_BLOCK;
    (ticket.0 & OF_BLOCK != 0).then_some(BlockId { file: (number >> 32) as u32, block: number as u32 })
}

impl Hands {
    fn file(&self, block: BlockId) -> Option<&Arc<CachedFile>> {
        self.files.get(block.file as usize)?.as_ref()
    }

    /// The memory of a block that the writer has.
    fn written(&self, block: BlockId) -> Option<Arc<BlockMemory>> {
        self.in_writer.get(&block)?.upgrade()
    }

    /// Asks the server's source for blocks, as many as it takes.
    fn send(&mut self) {
        while let Some(block) = self.unsent.pop_front() {
            let Some(file) = self.file(block) else { continue };
            let range = file.entry.range(block.block);
            let len = range.end - range.start;
            let read = Read {
                ticket: Ticket(OF_BLOCK | u64::from(block.file) << 32 | u64::from(block.block)),
                file: block.file,
                offset: range.start,
                len,
                need: len,
                lane: Lane::NETWORK,
                into: Destination::OnArrival,
                fresh: false,
                written: 0,
                keep: Arc::new(()),
            };
            if self.inner.submit(read).is_err() {
                return self.unsent.push_front(block);
            }
        }
    }

    fn end(&mut self, read: Ticket, result: Result<u64>, lane: Lane, written: u64) {
        self.reads.remove(&read);
        self.done.push(Progress::Done(Done { ticket: read, result, lane, written }));
    }
}

impl Carrier for Hands {
    type Buffer = Arc<BlockMemory>;

    fn claim(&mut self, block: BlockId) -> Claimed {
        if self.written(block).is_some() {
            return Claimed::There;
        }
        let Some(file) = self.file(block) else { return Claimed::Unshared };
        let own = file.entry.number();
        let state = if file.is_writable() { file.entry.claim(block.block) } else { file.entry.state(block.block) };
        match state {
            Ok(BlockState::There) => Claimed::There,
            Ok(BlockState::Claimed(holder)) if holder == own && file.is_writable() => Claimed::Ours,
            Ok(BlockState::Claimed(holder)) => Claimed::Theirs(holder),
            Ok(BlockState::Missing) => Claimed::Unshared,
            Err(e) => {
                self.progress.has_failed(&e);
                Claimed::Unshared
            }
        }
    }

    fn release(&mut self, block: BlockId) {
        self.file(block).into_iter().for_each(|file| file.entry.release(block.block));
    }

    fn ask(&mut self, block: BlockId) {
        self.unsent.push_back(block);
    }

    fn land(&mut self, block: BlockId, buffer: &Self::Buffer) {
        let ticket = Ticket(OF_BLOCK | u64::from(block.file) << 32 | u64::from(block.block));
        let into = Destination::Memory(buffer.address());
        // A read that failed meanwhile says so itself.
        let _known = self.inner.land(ticket, into, buffer.clone());
    }

    fn buffer(&mut self) -> Option<Self::Buffer> {
        if self.held.load(Ordering::Relaxed) >= self.most_buffers {
            return None;
        }
        let lease = self.share.try_acquire().ok()??;
        Some(BlockMemory::new(lease, &self.held, &self.inbox.wake))
    }

    fn fetch(&mut self, block: BlockId, buffer: Self::Buffer) {
        let inbox = self.inbox.clone();
        if let (Some(memory), Some(file)) = (self.written(block), self.file(block)) {
            let len = file.block_len(block.block);
            // SAFETY: the writer's block is complete, and nobody else has the buffer.
            unsafe { buffer.bytes_mut(len).copy_from_slice(memory.bytes(len)) };
            return inbox.tell([News::Fetched(block, true)]);
        }
        let told = Told::new(move |is_read| inbox.tell([News::Fetched(block, is_read)]));
        match self.file(block) {
            Some(file) => Crew::process().fetch(file.clone(), block.block, buffer, told),
            None => drop(told),
        }
    }

    fn write(&mut self, block: BlockId, buffer: Self::Buffer) -> bool {
        let Some(file) = self.file(block).cloned() else { return false };
        let bytes = file.block_len(block.block) as u64;
        if !file.is_writable() {
            // A cache that is full drops them. One that is read-only takes none.
            self.progress.has_dropped(if file.folder.is_writable() { bytes } else { 0 });
            return false;
        }
        if self.writing.load(Ordering::Relaxed) >= self.most_buffers / 2 {
            self.progress.has_dropped(bytes);
            self.dropped.push(block);
            return false;
        }
        if self.in_writer.len() >= 2 * self.most_buffers {
            self.in_writer.retain(|_, memory| memory.strong_count() > 0);
        }
        self.in_writer.insert(block, Arc::downgrade(&buffer));
        let bytes = BlockBytes::Memory(buffer, InWriter::of(&self.writing));
        Crew::process().write(&file, block.block, bytes, &self.progress);
        true
    }

    fn copy(&mut self, read: Ticket, buffer: &Self::Buffer) {
        let Some(Read { file, offset, len, need, into, .. }) = self.reads.get(&read) else { return };
        let at = (offset % BLOCK) as usize;
        let len = (*len as usize).min(BLOCK as usize - at);
        // SAFETY: the block is complete, and nobody writes to it.
        let bytes = unsafe { &buffer.bytes(at + len)[at..] };
        let mut left = bytes;
        let mut put = |to: *mut u8, len: usize| {
            let (part, rest) = left.split_at(len.min(left.len()));
            left = rest;
            if !to.is_null() {
                // SAFETY: the read's `keep` keeps its places, for as many bytes as they say.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            }
        };
        match into {
            Destination::Memory(to) => put(*to, len),
            Destination::Scatter(places) => places.iter().for_each(|(to, len)| put(*to, *len)),
            _ => {}
        }
        let block = BlockId { file: *file, block: (*offset / BLOCK) as u32 };
        let came = || self.lanes.get(&block).copied().unwrap_or(Lane::NETWORK);
        let lane = if buffer.is_from_disk() { Lane::DISK_CACHE } else { came() };
        let got = (len as u64).max(*need);
        self.end(read, Ok(got), lane, got);
    }

    fn arrive(&mut self, read: Ticket) {
        self.done.push(Progress::Arrived(read));
    }

    fn fail(&mut self, read: Ticket, error: Error) {
        let Some(Read { lane, .. }) = self.reads.get(&read) else { return };
        let lane = *lane;
        self.end(read, Err(error), lane, 0);
    }
}

impl Source for CacheSource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let Some(block) = self.block_of(&read) else {
            let read = Read { lane: Lane::NETWORK, ..read };
            self.hands.inner.submit(read)?;
            self.hands.passed += 1;
            return Ok(());
        };
        let (ticket, has_place) = (read.ticket, !matches!(read.into, Destination::OnArrival));
        self.hands.reads.insert(ticket, read);
        self.is_new = true;
        let now = self.now();
        self.flow.submit(now, ticket, block, has_place, &mut self.hands);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.look();
        self.hands.send();
        if !self.hands.done.is_empty() {
            self.hands.inbox.wake.notify();
        }
        self.hands.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.hands.inbox.wake.clear();
        self.hands.share.clear();
        self.hear_threads();
        let mut told = std::mem::take(&mut self.events);
        let outcome = self.hands.inner.poll(&mut told);
        told.drain(..).for_each(|event| self.hear(event));
        self.events = told;
        self.flow.give_buffers(&mut self.hands);
        self.look();
        self.hands.send();
        let outcome = outcome.and(self.hands.inner.flush());
        events.append(&mut self.hands.done);
        outcome
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        if !self.hands.reads.contains_key(&ticket) {
            return self.hands.inner.land(ticket, into, keep);
        }
        if let Some(read) = self.hands.reads.get_mut(&ticket) {
            (read.into, read.keep) = (into, keep);
        }
        self.flow.landed(ticket, &mut self.hands);
        if !self.hands.done.is_empty() {
            self.hands.inbox.wake.notify();
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.hands.cancelled = true;
        self.hands.done.retain(|event| matches!(event, Progress::Done(_)));
        self.hands.unsent.clear();
        self.flow.cancel(&mut self.hands);
        self.looker.look_at(std::iter::empty());
        self.hands.inner.cancel();
        self.hands.inbox.wake.notify();
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        let ended = self.hands.done.iter().filter(|event| matches!(event, Progress::Done(_))).count();
        self.hands.reads.len() + self.hands.passed + ended
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.hands.inner.wait_for(fence)
    }

    fn take_touches(&mut self) -> Touches {
        self.hands.inner.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        self.hands.inner.take_fallbacks()
    }
}

impl Drop for CacheSource {
    fn drop(&mut self) {
        let CacheSource { flow, hands, looker, .. } = self;
        looker.stop();
        let was_cancelled = hands.cancelled;
        flow.cancel(hands);
        let asks_again = hands.asks_again && !was_cancelled;
        let mut of_file: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        hands.dropped.drain(..).for_each(|BlockId { file, block }| of_file.entry(file).or_default().push(block));
        for (number, mut blocks) in of_file {
            blocks.sort_unstable();
            if let Some(Some(file)) = hands.files.get(number as usize).filter(|_| asks_again) {
                Crew::process().again(file.clone(), hands.store.clone(), blocks, &hands.progress);
            }
        }
        for file in hands.files.iter().flatten() {
            Crew::process().load_ends(file, &hands.progress);
        }
    }
}
