//! The source of objects that the disk cache has in part or not at all: it asks the server for whole blocks, hands them to the
//! reads and to the writer, and reads the blocks that are there.
//!
//! The decisions are in [`flow`](super::flow). A read that lies in two blocks (a parcel of ranks) is two reads there, whose bytes
//! are put together in memory of its own. Longer reads, and objects that are not cached, go to the server's source as they are.

use super::cached_file::CachedFile;
use super::crew::{BlockBuffer, BlockBytes, BufferPool, CacheCrew, CrewLoad, InWriter, Told};
use super::flow::{CacheBlock, CacheFlow, Carrier, Claimed};
use super::inbox::{CacheInbox, CacheNews, CachedFiles};
use super::look::Looker;
use super::progress::{CacheProgress, Pending};
use super::{BlockState, BLOCK};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use crate::source::{epoll, watch, Destination, Done, Progress, Read, Source, Touches};
use crate::store::object::Store;
use crate::sync::lock;
use crate::wake::Wake;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Blocks in memory at most: 64 MiB, or a quarter of the staging memory where that is less. They come on top of it.
const MOST_BUFFERS: usize = 64;
/// Blocks more that the writer may have while others have the object open: a block that is dropped comes from the server once
/// more for them, and slows down everybody.
const MOST_FOR_OTHERS: usize = 128;
/// How often other processes are told that this one receives bytes, at most.
const BEAT: Duration = Duration::from_millis(100);
/// How often blocks of other processes are looked after.
const LOOK: Duration = Duration::from_millis(10);
/// Tickets of blocks have this bit.
const OF_BLOCK: u64 = 1 << 63;
/// Tickets of the two parts of a read have this bit; that of the second part has the next one too.
const OF_PART: u64 = 1 << 61;
const SECOND: u64 = 1 << 60;

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

/// The treatment of blocks that come faster than the disk takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfDropped {
    /// There are none: blocks come as slowly as the disk takes them.
    Never,
    /// The server is asked for them again, when no load runs.
    AskedAgain,
    /// The next load asks for them.
    Forgotten,
}

/// A read that lies in two blocks.
struct InTwo {
    read: Read,
    /// Its bytes: the parts that have come.
    bytes: Vec<u8>,
    /// Parts that have not come.
    left: u8,
    lane: Lane,
}

/// The hands of the flow: they do what it says.
struct Hands {
    inner: Box<dyn Source>,
    files: Arc<CachedFiles>,
    /// The store of the server.
    store: Arc<dyn Store>,
    of_dropped: OfDropped,
    pool: Arc<BufferPool>,
    most_buffers: usize,
    /// Blocks that the writer has.
    writing: Arc<AtomicUsize>,
    inbox: Arc<CacheInbox>,
    reads: HashMap<Ticket, Read>,
    in_two: HashMap<Ticket, InTwo>,
    /// Reads in two blocks that are complete and have no place yet. They count as blocks in memory.
    unplaced: usize,
    /// Memory of blocks that the writer has, or had.
    in_writer: HashMap<CacheBlock, Weak<BlockBuffer>>,
    /// The lanes of blocks that came by another one than the server's.
    lanes: HashMap<CacheBlock, Lane>,
    /// Blocks to be asked of the server, for which its source had no room.
    unsent: VecDeque<CacheBlock>,
    dropped: Vec<CacheBlock>,
    /// Events for the next poll.
    done: Vec<Progress>,
    /// Reads that went to the server's source as they are, and have not ended.
    passed: usize,
    progress: Arc<CacheProgress>,
    cancelled: bool,
    /// When others were told last that bytes come.
    beat: Option<Instant>,
    _pending: Pending,
    _load: CrewLoad,
}

impl CacheSource {
    pub(super) fn new(
        inner: Box<dyn Source>,
        files: Arc<CachedFiles>,
        store: Arc<dyn Store>,
        of_dropped: OfDropped,
        staging: u64,
        progress: &Arc<CacheProgress>,
    ) -> Result<CacheSource> {
        let most_buffers = ((staging / 4 / BLOCK) as usize).clamp(4, MOST_BUFFERS);
        let inbox = Arc::new(CacheInbox::new(Arc::new(Wake::new()?)));
        let pool = BufferPool::new(inbox.wake.clone());
        let wake = epoll()?;
        for fd in [inner.wake(), inbox.wake.fd()] {
            watch(&wake, fd)?;
        }
        let looker = Looker::new(files.clone(), inbox.clone());
        files.iter().flatten().for_each(|file| file.load_begins());
        let hands = Hands {
            inner,
            files,
            store,
            of_dropped,
            pool,
            most_buffers,
            writing: Arc::default(),
            inbox,
            reads: HashMap::new(),
            in_two: HashMap::new(),
            unplaced: 0,
            in_writer: HashMap::new(),
            lanes: HashMap::new(),
            unsent: VecDeque::new(),
            dropped: Vec::new(),
            done: Vec::new(),
            passed: 0,
            progress: progress.clone(),
            cancelled: false,
            beat: None,
            _pending: progress.pending(),
            _load: CacheCrew::process().load_begins(),
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

    /// The first and the last block of a read that goes through the flow.
    fn blocks_of(&self, read: &Read) -> Option<(CacheBlock, CacheBlock)> {
        self.hands.files.get(read.file as usize)?.as_ref()?;
        let (first, last) = (read.offset / BLOCK, (read.offset + read.need.max(1) - 1) / BLOCK);
        let id = |block: u64| CacheBlock { file: read.file, block: block as u32 };
        (last - first < 2).then_some((id(first), id(last)))
    }

    /// Hears an event of the server's source.
    fn hear(&mut self, event: Progress) {
        let CacheSource { flow, hands, .. } = self;
        if !matches!(event, Progress::Refused { .. }) {
            hands.beat();
        }
        match event {
            Progress::Arrived(ticket) => match block_of(ticket) {
                Some(block) => flow.arrived(block, hands),
                None => hands.done.push(Progress::Arrived(ticket)),
            },
            Progress::Received(ticket) => match block_of(ticket) {
                Some(block) => {
                    let of = |read: Ticket| Progress::Received(Ticket(read.0 & !(OF_PART | SECOND)));
                    hands.done.extend(flow.reads_of(block).map(of));
                }
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

    /// Hears the news of other threads.
    fn hear_threads(&mut self) {
        let now = self.now();
        let CacheSource { flow, hands, heard, began, is_new, .. } = self;
        let mut all = lock(&hands.inbox.news);
        let news = std::mem::take(&mut *all);
        if let Some(at) = *lock(&hands.inbox.looked) {
            *heard = at.saturating_duration_since(*began);
        }
        drop(all);
        for one in news {
            match one {
                CacheNews::Fetched(block, is_read) => {
                    if let Some(file) = hands.file(block).filter(|_| is_read) {
                        hands.progress.has_cached(file.block_len(block.block) as u64);
                    }
                    flow.fetched(block, is_read, hands);
                }
                CacheNews::Seen(block, state) => {
                    flow.seen(now, block, state, hands);
                    *is_new |= state == Claimed::Missing;
                }
                CacheNews::Alive(holder) => flow.is_alive(now, holder),
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
        self.looker.look_at(self.flow.theirs(), self.flow.holders());
    }
}

fn block_of(ticket: Ticket) -> Option<CacheBlock> {
    let number = ticket.0 & !OF_BLOCK;
    (ticket.0 & OF_BLOCK != 0).then_some(CacheBlock { file: (number >> 32) as u32, block: number as u32 })
}

/// Copies bytes to their places.
fn put(bytes: &[u8], into: &Destination) {
    let mut left = bytes;
    let mut one = |to: *mut u8, len: usize| {
        let (part, rest) = left.split_at(len.min(left.len()));
        left = rest;
        if !to.is_null() {
            // SAFETY: the read's `keep` keeps its places, for as many bytes as they say.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
        }
    };
    match into {
        Destination::Memory(to) => one(*to, bytes.len()),
        Destination::Scatter(places) => places.iter().for_each(|(to, len)| one(*to, *len)),
        _ => {}
    }
}

impl Hands {
    fn file(&self, block: CacheBlock) -> Option<&Arc<CachedFile>> {
        self.files.get(block.file as usize)?.as_ref()
    }

    /// True if the writer has as many blocks as it may.
    fn is_behind(&self, file: &CachedFile) -> bool {
        let beyond = self.writing.load(Ordering::Relaxed).checked_sub(self.most_buffers / 2);
        beyond.is_some_and(|beyond| beyond >= MOST_FOR_OTHERS || !file.entry.is_open_elsewhere())
    }

    /// Tells other processes that this one receives bytes.
    fn beat(&mut self) {
        if self.beat.is_some_and(|last| last.elapsed() < BEAT) {
            return;
        }
        self.beat = Some(Instant::now());
        let file = self.files.iter().flatten().next();
        if let Some((file, beats)) = file.and_then(|file| Some((file, file.folder.beats.as_ref()?))) {
            beats.beat(file.entry.number());
        }
    }

    /// The memory of a block that the writer has.
    fn written(&self, block: CacheBlock) -> Option<Arc<BlockBuffer>> {
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

    /// The outcome of a claim.
    fn claimed(&self, file: &CachedFile, state: Result<BlockState>) -> Claimed {
        match state {
            Ok(BlockState::There) => Claimed::There,
            Ok(BlockState::Claimed(holder)) if holder == file.entry.number() && file.is_writable() => Claimed::Ours,
            Ok(BlockState::Claimed(holder)) => Claimed::Theirs(holder),
            Ok(BlockState::Missing) => Claimed::Unshared,
            Err(e) => {
                self.progress.has_failed(&e);
                Claimed::Unshared
            }
        }
    }

    /// The lane by which a block came that is in this memory.
    fn lane_of(&self, block: CacheBlock, buffer: &BlockBuffer) -> Lane {
        match buffer.is_from_disk() {
            true => Lane::DISK_CACHE,
            false => self.lanes.get(&block).copied().unwrap_or(Lane::NETWORK),
        }
    }

    /// Copies a part of a read in two blocks. With the second one it is complete.
    fn copy_part(&mut self, part: Ticket, buffer: &BlockBuffer) {
        let read = Ticket(part.0 & !(OF_PART | SECOND));
        let Some(InTwo { read: Read { file, offset, len, .. }, .. }) = self.in_two.get(&read) else { return };
        let at = (offset % BLOCK) as usize;
        let (first, len) = (BLOCK as usize - at, *len as usize);
        let (from, to) =
            if part.0 & SECOND == 0 { (at..BLOCK as usize, 0..first) } else { (0..len - first, first..len) };
        let block = CacheBlock { file: *file, block: (*offset / BLOCK) as u32 + u32::from(part.0 & SECOND != 0) };
        let lane = self.lane_of(block, buffer);
        let Some(in_two) = self.in_two.get_mut(&read) else { return };
        // SAFETY: the block is complete, and nobody writes to it.
        in_two.bytes[to].copy_from_slice(unsafe { &buffer.bytes(from.end)[from] });
        (in_two.left, in_two.lane) = (in_two.left - 1, lane);
        if in_two.left > 0 {
            return;
        }
        if matches!(in_two.read.into, Destination::OnArrival) {
            self.unplaced += 1;
            return self.done.push(Progress::Arrived(read));
        }
        self.place(read);
    }

    /// Copies a complete read to its place.
    fn place(&mut self, read: Ticket) {
        if let Some(InTwo { read: Read { into, need, .. }, bytes, lane, .. }) = self.in_two.remove(&read) {
            put(&bytes, &into);
            let got = (bytes.len() as u64).max(need);
            self.end(read, Ok(got), lane, got);
        }
    }

    fn fail_in_two(&mut self, read: Ticket, error: Error) {
        if let Some(in_two) = self.in_two.remove(&read) {
            self.end(read, Err(error), in_two.read.lane, 0);
        }
    }

    fn end(&mut self, read: Ticket, result: Result<u64>, lane: Lane, written: u64) {
        self.reads.remove(&read);
        self.done.push(Progress::Done(Done { ticket: read, result, lane, written }));
    }
}

impl Carrier for Hands {
    type Buffer = Arc<BlockBuffer>;

    fn claim(&mut self, block: CacheBlock) -> Claimed {
        if self.written(block).is_some() {
            return Claimed::There;
        }
        let Some(file) = self.file(block) else { return Claimed::Unshared };
        let state = if file.is_writable() { file.entry.claim(block.block) } else { file.entry.state(block.block) };
        self.claimed(file, state)
    }

    fn take_over(&mut self, block: CacheBlock) -> Claimed {
        let Some(file) = self.file(block) else { return Claimed::Unshared };
        if !file.is_writable() {
            return Claimed::Unshared;
        }
        self.claimed(file, file.entry.take_over(block.block))
    }

    fn release(&mut self, block: CacheBlock) {
        self.file(block).into_iter().for_each(|file| file.entry.release(block.block));
    }

    fn ask(&mut self, block: CacheBlock) {
        self.unsent.push_back(block);
    }

    fn land(&mut self, block: CacheBlock, buffer: &Self::Buffer) {
        let ticket = Ticket(OF_BLOCK | u64::from(block.file) << 32 | u64::from(block.block));
        let into = Destination::Memory(buffer.address());
        // A read that failed meanwhile says so itself.
        let _known = self.inner.land(ticket, into, buffer.clone());
    }

    fn buffer(&mut self) -> Option<Self::Buffer> {
        // The load has its half of the blocks, whatever the writer has for others.
        let for_others = match self.of_dropped {
            OfDropped::Never => 0,
            _ => self.writing.load(Ordering::Relaxed).saturating_sub(self.most_buffers / 2).min(MOST_FOR_OTHERS),
        };
        if self.pool.held() + self.unplaced >= self.most_buffers + for_others {
            return None;
        }
        BlockBuffer::of(&self.pool).inspect_err(|e| self.progress.has_failed(e)).ok()
    }

    fn fetch(&mut self, block: CacheBlock, buffer: Self::Buffer) {
        let inbox = self.inbox.clone();
        if let (Some(memory), Some(file)) = (self.written(block), self.file(block)) {
            let len = file.block_len(block.block);
            // SAFETY: the writer's block is complete, and nobody else has the buffer.
            unsafe { buffer.bytes_mut(len).copy_from_slice(memory.bytes(len)) };
            return inbox.tell([CacheNews::Fetched(block, true)]);
        }
        let told = Told::new(move |is_read| inbox.tell([CacheNews::Fetched(block, is_read)]));
        match self.file(block) {
            Some(file) => CacheCrew::process().fetch(file.clone(), block.block, buffer, told),
            None => drop(told),
        }
    }

    fn write(&mut self, block: CacheBlock, buffer: Self::Buffer) -> bool {
        let Some(file) = self.file(block).cloned() else { return false };
        let bytes = file.block_len(block.block) as u64;
        if !file.is_writable() {
            // A cache that is full drops them. One that is read-only takes none.
            self.progress.has_dropped(if file.folder.is_writable() { bytes } else { 0 });
            return false;
        }
        if self.is_behind(&file) && self.of_dropped != OfDropped::Never {
            self.progress.has_dropped(bytes);
            self.dropped.push(block);
            return false;
        }
        if self.in_writer.len() >= 2 * self.most_buffers {
            self.in_writer.retain(|_, memory| memory.strong_count() > 0);
        }
        self.in_writer.insert(block, Arc::downgrade(&buffer));
        let bytes = BlockBytes::Memory(buffer, InWriter::of(&self.writing));
        let again = (self.of_dropped == OfDropped::AskedAgain).then(|| self.store.clone());
        CacheCrew::process().write(&file, block.block, bytes, &self.progress, again);
        true
    }

    fn copy(&mut self, read: Ticket, buffer: &Self::Buffer) {
        if read.0 & OF_PART != 0 {
            return self.copy_part(read, buffer);
        }
        let Some(Read { file, offset, len, need, into, .. }) = self.reads.get(&read) else { return };
        let at = (offset % BLOCK) as usize;
        let len = (*len as usize).min(BLOCK as usize - at);
        // SAFETY: the block is complete, and nobody writes to it.
        let bytes = unsafe { &buffer.bytes(at + len)[at..] };
        put(bytes, into);
        let block = CacheBlock { file: *file, block: (*offset / BLOCK) as u32 };
        let lane = self.lane_of(block, buffer);
        let got = (len as u64).max(*need);
        self.end(read, Ok(got), lane, got);
    }

    fn arrive(&mut self, read: Ticket) {
        self.done.push(Progress::Arrived(read));
    }

    fn fail(&mut self, read: Ticket, error: Error) {
        if read.0 & OF_PART != 0 {
            let read = Ticket(read.0 & !(OF_PART | SECOND));
            // The other part may have failed before.
            return self.fail_in_two(read, error);
        }
        let Some(Read { lane, .. }) = self.reads.get(&read) else { return };
        let lane = *lane;
        self.end(read, Err(error), lane, 0);
    }
}

impl Source for CacheSource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let Some((block, last)) = self.blocks_of(&read) else {
            let read = Read { lane: Lane::NETWORK, ..read };
            self.hands.inner.submit(read)?;
            self.hands.passed += 1;
            return Ok(());
        };
        let (ticket, has_place) = (read.ticket, !matches!(read.into, Destination::OnArrival));
        self.is_new = true;
        let now = self.now();
        if block == last {
            self.hands.reads.insert(ticket, read);
            self.flow.submit(now, ticket, block, has_place, &mut self.hands);
            return Ok(());
        }
        let in_two = InTwo { bytes: vec![0; read.len as usize], read, left: 2, lane: Lane::NETWORK };
        self.hands.in_two.insert(ticket, in_two);
        for (part, block) in [(OF_PART, block), (OF_PART | SECOND, last)] {
            self.flow.submit(now, Ticket(ticket.0 | part), block, true, &mut self.hands);
        }
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
        if let Some(in_two) = self.hands.in_two.get_mut(&ticket) {
            (in_two.read.into, in_two.read.keep) = (into, keep);
            self.hands.unplaced -= 1;
            self.hands.place(ticket);
            self.flow.give_buffers(&mut self.hands);
            self.hands.inbox.wake.notify();
            return Ok(());
        }
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
        // Complete ones without a place are in no block any more.
        for ticket in self.hands.in_two.keys().copied().collect::<Vec<_>>() {
            let error = Error::new(ErrorKind::Cancelled, "the load was cancelled before this was read");
            self.hands.fail_in_two(ticket, error);
        }
        self.looker.look_at(std::iter::empty(), BTreeSet::new());
        self.hands.inner.cancel();
        self.hands.inbox.wake.notify();
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        let ended = self.hands.done.iter().filter(|event| matches!(event, Progress::Done(_))).count();
        self.hands.reads.len() + self.hands.in_two.len() + self.hands.passed + ended
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
        let asks_again = hands.of_dropped == OfDropped::AskedAgain && !was_cancelled;
        let mut of_file: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        hands.dropped.drain(..).for_each(|CacheBlock { file, block }| of_file.entry(file).or_default().push(block));
        for (number, mut blocks) in of_file {
            blocks.sort_unstable();
            if let Some(Some(file)) = hands.files.get(number as usize).filter(|_| asks_again) {
                CacheCrew::process().again(file.clone(), hands.store.clone(), blocks, &hands.progress);
            }
        }
        for file in hands.files.iter().flatten() {
            CacheCrew::process().load_ends(file, &hands.progress);
        }
    }
}
