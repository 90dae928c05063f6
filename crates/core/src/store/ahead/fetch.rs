//! One request of a caller: what it needs is read, waited for, and copied.

use super::blocks::{BlockStage, BLOCK};
use super::queues::{Crew, FileRange, Headway, Job, LastLook, Queues, Receipt, Task, FRESH_BYTES, MOST_THREADS};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Buffer;
use crate::options::MIB;
use crate::sync::lock;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Contiguous bytes from here on are read to where they belong; the blocks that are there already are used.
const LONG: u64 = 512 << 10;
/// The longest read of those.
const LONGEST: u64 = MIB;
/// The caller looks this often whether to go on.
const LOOK: Duration = Duration::from_millis(50);
/// Parts of a file that one request may have: copying more of them is as slow as a load.
const MOST_PARTS: u64 = 1 << 18;

/// One request of a caller.
pub(super) struct CallerRead<'s> {
    shared: &'s Arc<Crew>,
    file: u32,
    size: u64,
    nbytes: u64,
    data: Range<u64>,
    pub(super) memory: Arc<Buffer>,
    /// The blocks that it copies from, ascending, with the bytes that it takes of each, and the memory of those that are
    /// there.
    blocks: Vec<(u64, u64, Option<Arc<Buffer>>)>,
    /// Ranges that are read into their places, ascending.
    direct: Vec<FileRange>,
    ticket: Option<Arc<Receipt>>,
    look: Option<Arc<Receipt>>,
}

impl<'s> CallerRead<'s> {
    pub(super) fn new(shared: &'s Arc<Crew>, file: u32, nbytes: u64, data: Range<u64>) -> Result<CallerRead<'s>> {
        let size = shared.kept.files().size(file);
        let memory = Arc::new(Buffer::new(nbytes)?);
        let (blocks, direct) = (Vec::new(), Vec::new());
        Ok(CallerRead { shared, file, size, nbytes, data, memory, blocks, direct, ticket: None, look: None })
    }

    /// Finds out what is there, and has the rest read. `false`: it is too much for the window.
    pub(super) fn plan(&mut self, parts: impl Iterator<Item = FileRange>) -> Result<bool> {
        let file = self.file;
        let mut state = lock(&self.shared.state);
        let (mut first, mut end, mut count) = (u64::MAX, 0, 0);
        for part in parts {
            count += 1;
            (first, end) = (first.min(part.offset), end.max(part.offset + part.len));
            let is_long = part.len >= LONG;
            for number in part.offset / BLOCK..(part.offset + part.len).div_ceil(BLOCK) {
                let whole = number * BLOCK..((number + 1) * BLOCK).min(self.size);
                let (from, until) = (whole.start.max(part.offset), whole.end.min(part.offset + part.len));
                if is_long && until - from == whole.end - whole.start && !state.window.has((file, number)) {
                    self.add_direct(FileRange { offset: from, len: until - from, to: part.to + from - part.offset });
                    continue;
                }
                match self.blocks.last_mut() {
                    Some(last) if last.0 == number => last.1 += until - from,
                    _ => self.blocks.push((number, until - from, None)),
                }
            }
            if count > MOST_PARTS || self.blocks.len() as u64 * BLOCK > state.window.most / 2 {
                return Ok(false);
            }
        }
        if !self.enqueue(&mut state) {
            return Ok(false);
        }
        if !state.is_ending() {
            let ahead = state.window.ahead(file, first..end, self.data.clone());
            let since = Instant::now();
            state.ahead.extend(ahead.into_iter().map(|place| Job { what: Task::Block(place), since }));
        }
        let path = || self.shared.kept.files().path(file);
        self.shared.start_threads(state).map_err(|e| e.at(path()).range(first..end))
    }

    fn add_direct(&mut self, part: FileRange) {
        match self.direct.last_mut() {
            Some(last) if last.offset + last.len == part.offset && last.to + last.len == part.to => {
                last.len += part.len;
            }
            _ => self.direct.push(part),
        }
    }

    /// Queues what is not there. `false`: the window has no room for it now.
    fn enqueue(&mut self, state: &mut Queues) -> bool {
        let (file, since) = (self.file, Instant::now());
        let mut waits = false;
        for (at, (number, nbytes, memory)) in self.blocks.iter_mut().enumerate() {
            let place = (file, *number);
            let len = BLOCK.min(self.size - *number * BLOCK);
            if let Some(BlockStage::Here(there)) = state.window.get(place).map(|block| &block.stage) {
                *memory = Some(there.clone());
                state.window.give(place, *nbytes, len);
                continue;
            }
            waits = true;
            match state.window.want(place) {
                Some(true) => state.wanted.push_back(Job { what: Task::Block(place), since }),
                Some(false) => {}
                None => return self.undo(at, state),
            }
        }
        // A request of 1 MiB is in four hands, one of 64 MiB in all.
        let total: u64 = self.direct.iter().map(|part| part.len).sum();
        let step = (total / MOST_THREADS as u64).next_multiple_of(BLOCK).clamp(BLOCK, LONGEST);
        let pieces: Vec<FileRange> = self.direct.iter().flat_map(|part| cut(*part, step)).collect();
        if !pieces.is_empty() {
            waits = true;
            let ticket = Receipt::new(Some(self.memory.clone()), pieces.len());
            let job = |part| Job { what: Task::Direct(ticket.clone(), part, file), since };
            state.wanted.extend(pieces.into_iter().map(job));
            self.ticket = Some(ticket);
        }
        let looked = state.looked.entry(file).or_insert(LastLook::now(false));
        if !waits && (looked.changed || looked.at.elapsed() >= FRESH_BYTES) {
            let ticket = Receipt::new(None, 1);
            state.wanted.push_back(Job { what: Task::Look(ticket.clone(), file), since });
            self.look = Some(ticket);
        }
        true
    }

    /// Waits for none of the first `count` blocks any more.
    fn undo(&self, count: usize, state: &mut Queues) -> bool {
        for (number, ..) in self.blocks[..count].iter().filter(|block| block.2.is_none()) {
            state.window.unwant((self.file, *number));
        }
        false
    }

    /// Waits for all that is read for this request.
    pub(super) fn wait(&self, go_on: &mut (dyn FnMut() -> bool + Send)) -> Result<()> {
        let mut state = lock(&self.shared.state);
        let (mut before, mut answers) = (self.progress(&mut state)?, state.answers);
        let (mut moved, mut asked) = (Instant::now(), Instant::now());
        loop {
            let now = self.progress(&mut state)?;
            if now.left == 0 {
                return Ok(());
            }
            // Answers for others say nothing of a job that a thread has begun with. One that is queued waits for them.
            if now != before || (now.begun == now.done && state.answers != answers) {
                (before, answers, moved) = (now, state.answers, Instant::now());
            }
            if moved.elapsed() >= self.shared.stall {
                return Err(self.stalled());
            }
            if asked.elapsed() >= LOOK {
                drop(state);
                if !go_on() {
                    return Err(Error::new(ErrorKind::Cancelled, "the read was cancelled"));
                }
                (state, asked) = (lock(&self.shared.state), Instant::now());
                continue;
            }
            state = self.shared.done.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How far this request is.
    fn progress(&self, state: &mut Queues) -> Result<Headway> {
        let mut found = Headway::default();
        for ticket in self.ticket.iter().chain(&self.look) {
            found = found.plus(ticket.progress()?);
        }
        for (number, ..) in self.blocks.iter().filter(|block| block.2.is_none()) {
            let (begun, done) = match state.window.get((self.file, *number)).map(|block| &block.stage) {
                Some(BlockStage::Here(_)) => (1, 1),
                Some(BlockStage::Reading) => (1, 0),
                Some(BlockStage::Failed(e)) => return Err(e.clone()),
                Some(BlockStage::Queued) | None => (0, 0),
            };
            found = found.plus(Headway { begun, done, left: 1 - done });
        }
        Ok(found)
    }

    fn stalled(&self) -> Error {
        let first = self.blocks.iter().find(|block| block.2.is_none()).map(|block| block.0 * BLOCK);
        let first = first.into_iter().chain(self.direct.first().map(|part| part.offset)).min().unwrap_or(0);
        let text = format!(
            "the storage has not answered for {:.1} s; is its server stuck? (stall_timeout raises the limit)",
            self.shared.stall.as_secs_f64()
        );
        let error = Error::new(ErrorKind::Timeout, text).at(self.shared.kept.files().path(self.file));
        error.range(first..(first + self.nbytes).min(self.size))
    }

    /// Takes the blocks that it has waited for. A request that has failed waits for them no longer.
    pub(super) fn take(&mut self, all: bool) -> Result<()> {
        let mut state = lock(&self.shared.state);
        let mut gone = Ok(());
        for (number, nbytes, memory) in self.blocks.iter_mut().filter(|block| block.2.is_none()) {
            let place = (self.file, *number);
            state.window.unwant(place);
            match state.window.get(place).map(|block| &block.stage) {
                Some(BlockStage::Here(there)) if all => {
                    *memory = Some(there.clone());
                    let len = BLOCK.min(self.size - *number * BLOCK);
                    state.window.give(place, *nbytes, len);
                }
                _ if all => gone = Err(Error::new(ErrorKind::Internal, "a block that was read is gone")),
                _ => {}
            }
        }
        if !all {
            if let Some(ticket) = &self.ticket {
                ticket.given_up.store(true, Ordering::Relaxed);
            }
        }
        gone
    }

    /// Copies out of the blocks; what was read to its place is there.
    pub(super) fn copy(&self, parts: impl Iterator<Item = FileRange>) {
        let mut at = 0;
        for part in parts {
            // From a block that the part before may have ended in.
            while self.blocks.get(at).is_some_and(|block| (block.0 + 1) * BLOCK <= part.offset) {
                at += 1;
            }
            let mut one = at;
            while let Some((number, _, Some(memory))) = self.blocks.get(one) {
                let whole = number * BLOCK..((number + 1) * BLOCK).min(self.size);
                let (from, until) = (whole.start.max(part.offset), whole.end.min(part.offset + part.len));
                if from >= until {
                    break;
                }
                debug_assert!(part.to + until - part.offset <= self.nbytes);
                // SAFETY: the block has the bytes of `whole`, and nobody writes to it any more. The memory has room for all
                // parts, and nobody else knows it but reads to other places in it, which are done.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        memory.at().add((from - whole.start) as usize),
                        self.memory.at().add((part.to + from - part.offset) as usize),
                        (until - from) as usize,
                    );
                }
                one += 1;
            }
        }
    }
}

/// The part in pieces of at most `step` bytes.
fn cut(part: FileRange, step: u64) -> impl Iterator<Item = FileRange> {
    (0..part.len.div_ceil(step)).map(move |number| {
        let from = number * step;
        FileRange { offset: part.offset + from, len: step.min(part.len - from), to: part.to + from }
    })
}
