//! The source over a server's and those of its mirrors. [`MirrorChoice`] says who is asked for a read.
//!
//! A mirror that fails, or brings nothing, is left for a while. Its reads are asked of others. Bytes that it had brought of them are
//! brought again. When it comes back it has new connections. One that gives other bytes than it says, or refuses, is left for good.

use super::choice::{Giver, MirrorChoice, Mirrored, ReadKey, ReadSize};
use super::names::board_size;
use super::resting::{is_not_there, Resting};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use crate::source::{epoll, watch, Destination, Done, Progress, Read, Source, Touches};
use crate::store::disk_cache::BLOCK;
use crate::timer::Timer;
use std::any::Any;
use std::cell::UnsafeCell;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time passes so often for the choice.
const TICK: Duration = Duration::from_millis(50);
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

/// Makes a source of a mirror.
pub(super) type MakeLink = Box<dyn Fn() -> Result<Box<dyn Source>> + Send>;

/// A mirror of a load.
pub(super) struct MirrorLink {
    source: Box<dyn Source>,
    make: MakeLink,
    address: String,
    /// Looks that are under way: where each puts its bits.
    coming: HashMap<u32, Arc<BoardMemory>>,
    /// A look failed, and this was told.
    is_told: bool,
    /// It was left, and this was told.
    is_left_told: bool,
}

impl MirrorLink {
    pub(super) fn new(make: MakeLink, address: String) -> Result<MirrorLink> {
        let coming = HashMap::new();
        Ok(MirrorLink { source: make()?, make, address, coming, is_told: false, is_left_told: false })
    }

    /// Begins a look at the board of a file. False: there was no room for it.
    fn look(&mut self, file: u32, first_board: u32, size: u64) -> bool {
        let len = board_size(size);
        let memory = BoardMemory::new(len as usize);
        // SAFETY: nobody else has it.
        let into = Destination::Memory(unsafe { (*memory.0.get()).as_mut_ptr() });
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
        let is_sent = self.source.submit(read).is_ok();
        if is_sent {
            self.coming.insert(file, memory);
        }
        is_sent
    }
}

/// Where a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AskedOf {
    Giver(Giver),
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

/// The source.
pub(super) struct MirrorSource {
    server: Box<dyn Source>,
    mirrors: Vec<MirrorLink>,
    choice: MirrorChoice,
    resting: Arc<Resting>,
    /// The objects that mirrors may have; their boards have the numbers behind them.
    objects: Vec<Option<Mirrored>>,
    /// Reads that nobody was asked for yet.
    waiting: HashMap<Ticket, Read>,
    sent: HashMap<Ticket, SentRead>,
    /// Reads that have been told to have arrived.
    arrived: HashSet<Ticket>,
    began: Instant,
    timer: Timer,
    wake: OwnedFd,
    told: Vec<Progress>,
    fallbacks: Vec<Fallback>,
    cancelled: bool,
}

// SAFETY: destinations are handed on to sources only, and `keep` keeps them valid.
unsafe impl Send for MirrorSource {}

impl MirrorSource {
    pub(super) fn new(
        server: Box<dyn Source>,
        mirrors: Vec<MirrorLink>,
        objects: Vec<Option<Mirrored>>,
        node: u64,
        bandwidth: Option<u64>,
        resting: Arc<Resting>,
    ) -> Result<MirrorSource> {
        let (timer, wake) = (Timer::new()?, epoll()?);
        watch(&wake, server.wake())?;
        watch(&wake, timer.fd())?;
        for mirror in &mirrors {
            watch(&wake, mirror.source.wake())?;
        }
        Ok(MirrorSource {
            choice: MirrorChoice::new(mirrors.len(), objects.clone(), node, bandwidth),
            server,
            mirrors,
            resting,
            objects,
            waiting: HashMap::new(),
            sent: HashMap::new(),
            arrived: HashSet::new(),
            began: Instant::now(),
            timer,
            wake,
            told: Vec::new(),
            fallbacks: Vec::new(),
            cancelled: false,
        })
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Asks mirrors and the server for reads that wait.
    fn go_on(&mut self) {
        if self.cancelled {
            return;
        }
        let now = self.now();
        for number in self.choice.late(now) {
            self.leave_for_now(number, "it brought nothing for 3 s");
        }
        for number in self.choice.returning(now) {
            self.bring_back(number, now);
        }
        for (number, file) in self.choice.looks(now) {
            let (files, object) = (self.objects.len() as u32, self.objects[file as usize]);
            let size = object.map_or(0, |object| object.size);
            if !self.mirrors[number].look(file, files, size) {
                self.choice.looked(number, file, None, now);
            }
        }
        for (key, wanted, giver) in self.choice.asks(now) {
            self.send(key, wanted, giver, now);
        }
        self.timer.set(self.choice.waits_for_time().then_some(TICK));
    }

    /// A read waits until somebody is asked for it.
    fn wait(&mut self, read: Read) {
        let Read { ticket, file, offset, len, need, .. } = read;
        self.waiting.insert(ticket, read);
        self.choice.wants((file, offset, ticket), ReadSize { len, need });
    }

    /// Asks for a read. If there is no room for it, it waits on.
    fn send(&mut self, key: ReadKey, wanted: ReadSize, giver: Giver, now: Duration) {
        let Some(read) = self.waiting.remove(&key.2) else { return };
        let Read { ticket, file, offset, len, need, lane, written, .. } = read;
        let (into, keep) = (again(&read.into), read.keep.clone());
        let source = match giver {
            Giver::Mirror(number) => &mut self.mirrors[number].source,
            Giver::Server => &mut self.server,
        };
        if let Err(read) = source.submit(read) {
            self.waiting.insert(ticket, read);
            return self.choice.is_back(key, wanted, giver, now);
        }
        let of = AskedOf::Giver(giver);
        self.sent.insert(ticket, SentRead { of, file, offset, len, need, lane, into, keep, written });
    }

    /// Leaves a mirror for the rest of the load. Its reads come back from its source, and are asked of others.
    fn leave(&mut self, number: usize, why: &str) {
        if self.choice.leave(number) {
            self.ends(number, why);
        }
    }

    /// The same for a while.
    fn leave_for_now(&mut self, number: usize, why: &str) {
        let now = self.now();
        if self.choice.leave_for_now(number, now) {
            self.ends(number, why);
        }
    }

    fn ends(&mut self, number: usize, why: &str) {
        self.mirrors[number].source.cancel();
        self.resting.begin(number);
        if !std::mem::replace(&mut self.mirrors[number].is_left_told, true) {
            self.tell(number, why);
        }
    }

    /// Gives a mirror that was left new connections, and asks it again. What it was asked for before has ended.
    fn bring_back(&mut self, number: usize, now: Duration) {
        let link = &mut self.mirrors[number];
        if link.source.in_flight() > 0 {
            return;
        }
        let made = (link.make)().and_then(|source| watch(&self.wake, source.wake()).map(|()| source));
        self.choice.comes_back(number, now);
        match made {
            Ok(source) => {
                link.source = source;
                link.coming.clear();
            }
            Err(e) => self.leave_for_now(number, &e.to_string()),
        }
    }

    /// Tells why a mirror does not bring what it might have.
    fn tell(&mut self, number: usize, why: &str) {
        let reason = format!("mirror {}: {why}", self.mirrors[number].address);
        self.fallbacks.push(Fallback { from: "mirror", to: "server", reason });
    }

    /// True if the bytes of a read have the checksum that its mirror's board says; also if it is not one whole block in one
    /// place.
    fn is_right(&self, mirror: usize, sent: &SentRead) -> bool {
        let (Some(Some(object)), Destination::Memory(at)) = (self.objects.get(sent.file as usize), &sent.into) else {
            return true;
        };
        if sent.offset % BLOCK != 0 || sent.len != BLOCK.min(object.size - sent.offset) {
            return true;
        }
        let Some(sum) = self.choice.checksum(mirror, sent.file, sent.offset / BLOCK) else { return true };
        // SAFETY: the read has ended, and `keep` keeps its memory.
        let bytes = unsafe { std::slice::from_raw_parts(*at, sent.len as usize) };
        crc32c::crc32c(bytes).to_le_bytes() == sum
    }

    /// A look at a board has ended.
    fn looked(&mut self, number: usize, file: u32, result: Result<u64>) {
        let (now, memory) = (self.now(), self.mirrors[number].coming.remove(&file));
        match (result, memory) {
            (Ok(_), Some(memory)) => {
                // SAFETY: the look has ended, so the source has let go of it.
                self.choice.looked(number, file, Some(unsafe { &*memory.0.get() }), now);
                if self.choice.is_own(number) && self.choice.leave(number) {
                    // The node itself: all nodes of a fleet may have one list.
                    self.mirrors[number].source.cancel();
                }
            }
            (Err(e), _) => {
                self.choice.looked(number, file, None, now);
                self.cannot_look(number, &e);
            }
            (Ok(_), None) => {}
        }
    }

    /// A board was not to be had. A mirror that does not have the object may get it yet.
    fn cannot_look(&mut self, number: usize, e: &Error) {
        match e.kind() {
            _ if self.cancelled || self.choice.is_left(number) => {}
            _ if is_not_there(e) => {}
            ErrorKind::Permission => self.leave(number, &e.to_string()),
            _ => {
                self.resting.begin(number);
                if !std::mem::replace(&mut self.mirrors[number].is_told, true) {
                    self.tell(number, &e.to_string());
                }
            }
        }
    }

    /// A source has told something; `of`: which one.
    fn hear(&mut self, event: Progress, of: Giver) {
        match event {
            Progress::Done(done) => self.done(done, of),
            Progress::Refused { read, cause } => {
                let done = read.failed(cause);
                self.done(done, of);
            }
            Progress::Arrived(ticket) => {
                if let Giver::Mirror(number) = of {
                    // Now it waits for its place, and no longer for the mirror.
                    self.choice.arrived(ticket, number, false, self.now());
                }
                // A read that is asked for again has its place.
                if self.sent.contains_key(&ticket) && self.arrived.insert(ticket) {
                    self.told.push(Progress::Arrived(ticket));
                }
            }
            Progress::Received(ticket) => self.told.push(Progress::Received(ticket)),
        }
    }

    fn done(&mut self, done: Done, of: Giver) {
        if done.ticket.0 & OF_BOARD != 0 {
            if let Giver::Mirror(number) = of {
                self.looked(number, (done.ticket.0 & !OF_BOARD) as u32, done.result);
            }
            return;
        }
        let Some(mut sent) = self.sent.remove(&done.ticket) else { return };
        sent.written = sent.written.max(done.written);
        let done = Done { written: sent.written, ..done };
        let brought = done.result.as_ref().map_or(0, |_| sent.len);
        self.choice.ended(done.ticket, of, brought, self.now());
        match of {
            Giver::Mirror(number) if !self.cancelled => {
                match &done.result {
                    Ok(_) if self.is_right(number, &sent) => {
                        return self.has_ended(Done { lane: Lane::MIRROR, ..done });
                    }
                    Ok(_) => self.leave(number, "a block does not have the checksum that it said"),
                    Err(e) => self.leave_for_now(number, &e.to_string()),
                }
                self.ask_others(done.ticket, sent);
            }
            _ => self.has_ended(done),
        }
    }

    fn has_ended(&mut self, done: Done) {
        self.arrived.remove(&done.ticket);
        self.told.push(Progress::Done(done));
    }

    /// A read that a mirror did not bring.
    fn ask_others(&mut self, ticket: Ticket, sent: SentRead) {
        if self.arrived.contains(&ticket) && matches!(sent.into, Destination::OnArrival) {
            // Its place is on its way.
            self.sent.insert(ticket, SentRead { of: AskedOf::Nobody, ..sent });
            return;
        }
        self.wait(sent.read(ticket));
    }
}

impl Source for MirrorSource {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        self.wait(read);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.go_on();
        // A mirror that cannot even start a read fails by its reads.
        for (number, mirror) in self.mirrors.iter_mut().enumerate() {
            if !self.choice.is_left(number) {
                _ = mirror.source.flush();
            }
        }
        self.server.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.timer.clear();
        let mut heard = Vec::new();
        let outcome = self.server.poll(&mut heard);
        heard.drain(..).for_each(|event| self.hear(event, Giver::Server));
        for number in 0..self.mirrors.len() {
            if let Err(e) = self.mirrors[number].source.poll(&mut heard) {
                self.leave_for_now(number, &e.to_string());
            }
            heard.drain(..).for_each(|event| self.hear(event, Giver::Mirror(number)));
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
            AskedOf::Giver(Giver::Server) => self.server.land(ticket, into, keep),
            AskedOf::Giver(Giver::Mirror(number)) => {
                self.choice.arrived(ticket, number, true, self.began.elapsed());
                self.mirrors[number].source.land(ticket, into, keep)
            }
            AskedOf::Nobody => {
                if let Some(sent) = self.sent.remove(&ticket) {
                    self.wait(sent.read(ticket));
                    self.timer.set(Some(Duration::from_millis(1)));
                }
                Ok(())
            }
        }
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        let waiting = std::mem::take(&mut self.waiting);
        self.choice.forget();
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
