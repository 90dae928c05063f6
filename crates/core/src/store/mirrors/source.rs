//! The source over a server's and those of its mirrors: it decides who is asked for a read.
//!
//! - A mirror is asked for what its board says that it has, and for little at a time, so that a slow one gets little.
//! - The server is asked for what no mirror has. Nodes begin at different places, and ask for little at a time too: meanwhile
//!   others may get the rest. If all that is left is on mirrors, and these are slow, the server is asked for it as well.
//! - A mirror that fails, or takes too long, is left for the rest of the load. Its reads are asked of others. What it had brought
//!   of them is brought again.

use super::names::{board_bits, board_size};
use crate::error::Result;
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use crate::source::{epoll, watch, Destination, Done, Progress, Read, Source, Touches};
use crate::store::disk_cache::BLOCK;
use crate::timer::Timer;
use std::any::Any;
use std::cell::UnsafeCell;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::BuildHasher;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that a mirror is asked for at once.
const OF_MIRROR: u64 = 8 << 20;
/// Bytes that the server is asked for at once, besides what it brings in half a second.
const OF_SERVER: u64 = 8 << 20;
const HALF: Duration = Duration::from_millis(500);
/// Mirrors that bring less than this in half a second are slow: 16 MB/s.
const SLOW: u64 = 8 << 20;
/// From one look at a board to the next.
const LOOK: Duration = Duration::from_millis(50);
/// A mirror with a read that takes longer is left.
const LATE: Duration = Duration::from_secs(3);
/// Tickets of boards have this bit.
const OF_BOARD: u64 = 1 << 62;

/// The bits of a board. The mirror's source writes them while a look is under way, and nobody reads them then.
struct BoardMemory(UnsafeCell<Vec<u8>>);

// SAFETY: see above; the source hands them back with the end of the read.
unsafe impl Sync for BoardMemory {}

impl BoardMemory {
    fn new(bytes: usize) -> Arc<BoardMemory> {
        Arc::new(BoardMemory(UnsafeCell::new(vec![0; bytes])))
    }
}

/// The blocks of an object that a mirror has.
struct Board {
    size: u64,
    bits: Vec<u8>,
    /// Where the look under way puts its bits.
    coming: Option<Arc<BoardMemory>>,
    /// When it may be looked at next.
    next_look: Option<Instant>,
    /// Looks in a row that failed.
    failed: u32,
    is_full: bool,
}

/// A mirror of a load.
pub(super) struct MirrorLink {
    source: Box<dyn Source>,
    /// By number of file.
    boards: Vec<Option<Board>>,
    /// Reads that it was asked for: since when they wait for it, and their bytes.
    asked: HashMap<Ticket, (Option<Instant>, u64)>,
    is_left: bool,
}

impl MirrorLink {
    pub(super) fn new(source: Box<dyn Source>, sizes: &[Option<u64>]) -> MirrorLink {
        let board = |size: u64| {
            let bits = vec![0; board_size(size) as usize];
            Board { size, bits, coming: None, next_look: None, failed: 0, is_full: false }
        };
        let boards = sizes.iter().map(|size| size.map(board)).collect();
        MirrorLink { source, boards, asked: HashMap::new(), is_left: false }
    }

    /// True if it has all blocks of a read.
    fn has(&self, file: u32, offset: u64, need: u64) -> bool {
        let Some(Some(board)) = self.boards.get(file as usize) else { return false };
        let blocks = offset / BLOCK..=(offset + need.max(1) - 1) / BLOCK;
        let bit = |block: u64| board.bits.get((block / 8) as usize).is_some_and(|byte| byte >> (block % 8) & 1 == 1);
        !self.is_left && blocks.into_iter().all(bit)
    }

    /// True if the bytes of a read have the checksum that its board says; also if it is not one whole block in one place.
    fn is_right(&self, sent: &SentRead) -> bool {
        let (Some(Some(board)), Destination::Memory(at)) = (self.boards.get(sent.file as usize), &sent.into) else {
            return true;
        };
        let block = sent.offset / BLOCK;
        if sent.offset % BLOCK != 0 || sent.len != BLOCK.min(board.size - sent.offset) {
            return true;
        }
        let start = (board_bits(board.size) + 4 * block) as usize;
        let Some(sum) = board.bits.get(start..start + 4) else { return true };
        // SAFETY: the read has ended, and `keep` keeps its memory.
        let bytes = unsafe { std::slice::from_raw_parts(*at, sent.len as usize) };
        crc32c::crc32c(bytes).to_le_bytes() == *sum
    }

    fn bytes(&self) -> u64 {
        self.asked.values().map(|(_, bytes)| bytes).sum()
    }

    /// Looks at the boards of these files, where it is time.
    fn look(&mut self, files: &[u32], first_board: u32, now: Instant) {
        for &file in files.iter().filter(|_| !self.is_left) {
            let Some(Some(board)) = self.boards.get_mut(file as usize) else { continue };
            let is_due = board.next_look.is_none_or(|next| now >= next);
            if board.is_full || board.coming.is_some() || !is_due {
                continue;
            }
            let memory = BoardMemory::new(board.bits.len());
            // SAFETY: nobody else has it.
            let into = Destination::Memory(unsafe { (*memory.0.get()).as_mut_ptr() });
            let len = board.bits.len() as u64;
            let read = Read {
                ticket: Ticket(OF_BOARD | u64::from(file)),
                file: first_board + file,
                offset: 0,
                len,
                need: len,
                lane: Lane::NETWORK,
                into,
                fresh: false,
                written: 0,
                keep: memory.clone(),
            };
            if self.source.submit(read).is_ok() {
                // After a failure, ever later: it may not have this object, or not be there.
                let pause = LOOK * (1 << board.failed.min(7));
                (board.coming, board.next_look) = (Some(memory), Some(now + pause));
            }
        }
    }

    /// A look has ended.
    fn has_looked(&mut self, file: u32, is_read: bool) {
        let Some(Some(board)) = self.boards.get_mut(file as usize) else { return };
        board.failed = if is_read { 0 } else { board.failed + 1 };
        let Some(memory) = board.coming.take().filter(|_| is_read) else { return };
        // SAFETY: the look has ended, so the source has let go of it.
        board.bits.copy_from_slice(unsafe { &*memory.0.get() });
        let blocks = board.size.div_ceil(BLOCK);
        let bits = board_bits(board.size) as usize;
        board.is_full = board.bits[..bits].iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>() >= blocks;
    }
}

/// Where a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AskedOf {
    Server,
    Mirror(usize),
    /// It had arrived when its mirror failed. It is sent again when its place is known.
    Nobody,
}

/// A read that was sent: what it takes to send it again.
struct SentRead {
    of: AskedOf,
    file: u32,
    offset: u64,
    len: u64,
    need: u64,
    lane: Lane,
    into: Destination,
    keep: Arc<dyn Any + Send + Sync>,
    /// Bytes from the first on that somebody may have written to its place.
    written: u64,
}

impl SentRead {
    fn read(&self, ticket: Ticket) -> Read {
        let SentRead { file, offset, len, need, lane, written, .. } = *self;
        let (into, keep) = (again(&self.into), self.keep.clone());
        Read { ticket, file, offset, len, need, lane, into, fresh: false, written, keep }
    }
}

fn again(into: &Destination) -> Destination {
    match into {
        Destination::Memory(at) => Destination::Memory(*at),
        Destination::Scatter(places) => Destination::Scatter(places.clone()),
        _ => Destination::OnArrival,
    }
}

/// Bytes of the last half second.
#[derive(Default)]
struct Lately(VecDeque<(Instant, u64)>);

impl Lately {
    fn add(&mut self, bytes: u64) {
        self.0.push_back((Instant::now(), bytes));
    }

    fn bytes(&mut self, now: Instant) -> u64 {
        while self.0.front().is_some_and(|(when, _)| *when + HALF < now) {
            self.0.pop_front();
        }
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// The source.
pub(super) struct MirrorSource {
    server: Box<dyn Source>,
    mirrors: Vec<MirrorLink>,
    /// Number of files; boards have the numbers behind them.
    files: u32,
    /// Reads that nobody was asked for yet, in order.
    waiting: BTreeMap<(u32, u64, Ticket), Read>,
    sent: HashMap<Ticket, SentRead>,
    /// Reads that have been told to have arrived.
    arrived: HashSet<Ticket>,
    /// The server is asked for reads from here on; then for those before.
    cursor: Option<(u32, u64, Ticket)>,
    /// Bytes that the server is asked for, and bytes that it has brought lately.
    server_bytes: u64,
    brought: Lately,
    /// Bytes that mirrors have brought lately, and since when they are asked.
    mirrored: Lately,
    began: Instant,
    /// Boards or loads of mirrors have changed.
    is_new: bool,
    timer: Timer,
    wake: OwnedFd,
    told: Vec<Progress>,
    fallbacks: Vec<Fallback>,
    cancelled: bool,
}

// SAFETY: destinations are handed on to sources only, and `keep` keeps them valid.
unsafe impl Send for MirrorSource {}

impl MirrorSource {
    pub(super) fn new(server: Box<dyn Source>, mirrors: Vec<MirrorLink>, files: u32) -> Result<MirrorSource> {
        let (timer, wake) = (Timer::new()?, epoll()?);
        watch(&wake, server.wake())?;
        watch(&wake, timer.fd())?;
        for mirror in &mirrors {
            watch(&wake, mirror.source.wake())?;
        }
        Ok(MirrorSource {
            server,
            mirrors,
            files,
            waiting: BTreeMap::new(),
            sent: HashMap::new(),
            arrived: HashSet::new(),
            cursor: None,
            server_bytes: 0,
            brought: Lately::default(),
            mirrored: Lately::default(),
            began: Instant::now(),
            is_new: true,
            timer,
            wake,
            told: Vec::new(),
            fallbacks: Vec::new(),
            cancelled: false,
        })
    }

    fn has_mirrors(&self) -> bool {
        self.mirrors.iter().any(|mirror| !mirror.is_left)
    }

    /// The files of reads that wait, a few.
    fn files_waiting(&self) -> Vec<u32> {
        const MOST: usize = 4;
        let mut files: Vec<u32> = Vec::new();
        let mut at = 0;
        while let Some(((file, ..), _)) = self.waiting.range((at, 0, Ticket(0))..).next() {
            files.push(*file);
            if files.len() == MOST || *file == u32::MAX {
                break;
            }
            at = file + 1;
        }
        files
    }

    /// Asks mirrors and the server for reads that wait.
    fn go_on(&mut self) {
        if self.cancelled {
            return;
        }
        let now = Instant::now();
        if self.has_mirrors() {
            self.leave_late(now);
            let files = self.files_waiting();
            self.mirrors.iter_mut().for_each(|mirror| mirror.look(&files, self.files, now));
            if std::mem::take(&mut self.is_new) {
                self.ask_mirrors(now);
            }
        }
        self.ask_server(now);
        let goes_on = self.has_mirrors() && !(self.waiting.is_empty() && self.sent.is_empty());
        self.timer.set(goes_on.then_some(LOOK));
    }

    fn ask_mirrors(&mut self, now: Instant) {
        let mut room: Vec<u64> = self.mirrors.iter().map(|mirror| OF_MIRROR.saturating_sub(mirror.bytes())).collect();
        let mut chosen = Vec::new();
        for (key, read) in &self.waiting {
            if room.iter().all(|room| *room == 0) {
                break;
            }
            let has = |(_, mirror): &(usize, &MirrorLink)| mirror.has(read.file, read.offset, read.need);
            let with_room = self.mirrors.iter().enumerate().filter(has).filter(|(number, _)| room[*number] > 0);
            if let Some((number, _)) = with_room.max_by_key(|(number, _)| room[*number]) {
                room[number] = room[number].saturating_sub(read.len);
                chosen.push((*key, number));
            }
        }
        for (key, number) in chosen {
            let Some(read) = self.waiting.remove(&key) else { continue };
            self.send(read, AskedOf::Mirror(number), now);
        }
    }

    /// The server is asked for what no mirror has.
    fn ask_server(&mut self, now: Instant) {
        let most = match self.has_mirrors() {
            true => OF_SERVER + self.brought.bytes(now),
            false => u64::MAX,
        };
        if self.cursor.is_none() && self.has_mirrors() && !self.waiting.is_empty() {
            let at = RandomState::new().hash_one(0) as usize % self.waiting.len();
            self.cursor = self.waiting.keys().nth(at).copied();
        }
        let are_slow = now > self.began + HALF && self.mirrored.bytes(now) < SLOW;
        while self.server_bytes < most {
            let from = self.cursor.unwrap_or((0, 0, Ticket(0)));
            let is_mirrored = |read: &Read| self.mirrors.iter().any(|m| m.has(read.file, read.offset, read.need));
            let after = self.waiting.range(from..).chain(self.waiting.range(..from));
            let mut unmirrored = after.filter(|(_, read)| !is_mirrored(read)).map(|(key, _)| *key);
            // The last one, because mirrors are asked from the first one on.
            let last = || self.waiting.keys().next_back().copied().filter(|_| are_slow);
            let Some(key) = unmirrored.next().or_else(last) else { return };
            let Some(read) = self.waiting.remove(&key) else { return };
            self.cursor = Some(key);
            if !self.send(read, AskedOf::Server, now) {
                return;
            }
        }
    }

    /// Asks for a read. False: there was no room for it, and it waits on.
    fn send(&mut self, read: Read, of: AskedOf, now: Instant) -> bool {
        let Read { ticket, file, offset, len, need, lane, written, .. } = read;
        let (into, keep) = (again(&read.into), read.keep.clone());
        let taken = match of {
            AskedOf::Mirror(number) => {
                let mirror = &mut self.mirrors[number];
                mirror.source.submit(read).map(|()| _ = mirror.asked.insert(ticket, (Some(now), len)))
            }
            _ => self.server.submit(read).map(|()| self.server_bytes += len),
        };
        match taken {
            Ok(()) => {
                self.sent.insert(ticket, SentRead { of, file, offset, len, need, lane, into, keep, written });
                true
            }
            Err(read) => {
                self.waiting.insert((file, offset, ticket), read);
                false
            }
        }
    }

    /// Leaves mirrors that take too long for a read.
    fn leave_late(&mut self, now: Instant) {
        for number in 0..self.mirrors.len() {
            let late =
                self.mirrors[number].asked.values().any(|(since, _)| since.is_some_and(|since| since + LATE < now));
            if late && !self.mirrors[number].is_left {
                self.leave(number, "it took longer than 3 s for a read");
            }
        }
    }

    /// Leaves a mirror. Its reads come back from its source, and are asked of others.
    fn leave(&mut self, number: usize, why: &str) {
        let mirror = &mut self.mirrors[number];
        if std::mem::replace(&mut mirror.is_left, true) {
            return;
        }
        mirror.source.cancel();
        self.is_new = true;
        let reason = format!("mirror number {}: {why}", number + 1);
        self.fallbacks.push(Fallback { from: "mirror", to: "server", reason });
    }

    /// A source has told something; `of`: which one.
    fn hear(&mut self, event: Progress, of: AskedOf) {
        match event {
            Progress::Done(done) => self.done(done, of),
            Progress::Refused { read, cause } => {
                let done = read.failed(cause);
                self.done(done, of);
            }
            Progress::Arrived(ticket) => {
                // A read that is asked for again has its place.
                if let AskedOf::Mirror(number) = of {
                    // Now it waits for its place, and no longer for the mirror.
                    self.mirrors[number].asked.entry(ticket).and_modify(|asked| asked.0 = None);
                }
                if self.sent.contains_key(&ticket) && self.arrived.insert(ticket) {
                    self.told.push(Progress::Arrived(ticket));
                }
            }
            Progress::Received(ticket) => self.told.push(Progress::Received(ticket)),
        }
    }

    fn done(&mut self, done: Done, of: AskedOf) {
        if done.ticket.0 & OF_BOARD != 0 {
            if let AskedOf::Mirror(number) = of {
                self.mirrors[number].has_looked((done.ticket.0 & !OF_BOARD) as u32, done.result.is_ok());
                self.is_new = true;
            }
            return;
        }
        let Some(mut sent) = self.sent.remove(&done.ticket) else { return };
        sent.written = sent.written.max(done.written);
        let done = Done { written: sent.written, ..done };
        match of {
            AskedOf::Mirror(number) => {
                self.mirrors[number].asked.remove(&done.ticket);
                self.is_new = true;
                let is_right = done.result.is_err() || self.mirrors[number].is_right(&sent);
                match done.result {
                    Ok(_) if !is_right && !self.cancelled => {
                        self.leave(number, "a block does not have the checksum that it said");
                        self.ask_others(done.ticket, sent);
                    }
                    Err(_) if !self.cancelled => {
                        let why = done.result.err().map(|e| e.to_string()).unwrap_or_default();
                        self.leave(number, &why);
                        self.ask_others(done.ticket, sent);
                    }
                    result => {
                        self.arrived.remove(&done.ticket);
                        self.mirrored.add(*result.as_ref().unwrap_or(&0));
                        let lane = if result.is_ok() { Lane::MIRROR } else { done.lane };
                        self.told.push(Progress::Done(Done { result, lane, ..done }));
                    }
                }
            }
            _ => {
                self.arrived.remove(&done.ticket);
                self.server_bytes = self.server_bytes.saturating_sub(sent.len);
                self.brought.add(if done.result.is_ok() { sent.len } else { 0 });
                self.told.push(Progress::Done(done));
            }
        }
    }

    /// A read that a mirror did not bring.
    fn ask_others(&mut self, ticket: Ticket, sent: SentRead) {
        if self.arrived.contains(&ticket) && matches!(sent.into, Destination::OnArrival) {
            // Its place is on its way.
            self.sent.insert(ticket, SentRead { of: AskedOf::Nobody, ..sent });
            return;
        }
        let read = sent.read(ticket);
        self.waiting.insert((read.file, read.offset, ticket), read);
    }
}

impl Source for MirrorSource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        self.waiting.insert((read.file, read.offset, read.ticket), read);
        self.is_new = true;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.go_on();
        // A mirror that cannot even start a read fails by its reads.
        self.mirrors.iter_mut().filter(|mirror| !mirror.is_left).for_each(|mirror| _ = mirror.source.flush());
        self.server.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.timer.clear();
        let mut heard = Vec::new();
        let outcome = self.server.poll(&mut heard);
        heard.drain(..).for_each(|event| self.hear(event, AskedOf::Server));
        for number in 0..self.mirrors.len() {
            if let Err(e) = self.mirrors[number].source.poll(&mut heard) {
                self.leave(number, &e.to_string());
            }
            heard.drain(..).for_each(|event| self.hear(event, AskedOf::Mirror(number)));
        }
        let outcome = outcome.and(self.flush());
        events.append(&mut self.told);
        outcome
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        let Some(sent) = self.sent.get_mut(&ticket) else {
            return self.server.land(ticket, into, keep);
        };
        (sent.into, sent.keep) = (again(&into), keep.clone());
        match sent.of {
            AskedOf::Server => self.server.land(ticket, into, keep),
            AskedOf::Mirror(number) => {
                let mirror = &mut self.mirrors[number];
                mirror.asked.entry(ticket).and_modify(|asked| asked.0 = Some(Instant::now()));
                mirror.source.land(ticket, into, keep)
            }
            AskedOf::Nobody => {
                if let Some(sent) = self.sent.remove(&ticket) {
                    let read = sent.read(ticket);
                    self.waiting.insert((read.file, read.offset, ticket), read);
                    self.timer.set(Some(Duration::from_millis(1)));
                }
                Ok(())
            }
        }
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        let waiting = std::mem::take(&mut self.waiting);
        self.told.retain(|event| matches!(event, Progress::Done(_)));
        self.told.extend(waiting.into_values().map(|read| Progress::Done(read.given_up())));
        let nobody: Vec<Ticket> =
            self.sent.iter().filter(|(_, sent)| sent.of == AskedOf::Nobody).map(|(ticket, _)| *ticket).collect();
        for ticket in nobody {
            let sent = self.sent.remove(&ticket).map(|sent| sent.read(ticket).given_up());
            self.told.extend(sent.map(Progress::Done));
        }
        self.mirrors.iter_mut().for_each(|mirror| mirror.source.cancel());
        self.server.cancel();
        self.timer.set(Some(Duration::from_millis(1)));
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        let ended = self.told.iter().filter(|event| matches!(event, Progress::Done(_))).count();
        self.waiting.len() + self.sent.len() + ended
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.server.wait_for(fence)
    }

    fn take_touches(&mut self) -> Touches {
        self.server.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        let mut all = std::mem::take(&mut self.fallbacks);
        all.extend(self.server.take_fallbacks());
        all
    }
}
