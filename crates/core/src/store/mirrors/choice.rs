//! The decisions of a load with mirrors: who is asked for which read, and when a board is looked at. It knows no socket and no
//! clock. `source` does what it says, and a simulator runs fleets of it.
//!
//! - A mirror is asked for what its board says that it has, and for as much as it brings in a quarter of a second.
//! - The server is asked for what no mirror has. All nodes agree who comes first for each stretch of 8 MiB: its rank is made of the stretch
//!   and of the numbers of the nodes, which stand on their boards. A node asks for stretches in which it is the first,
//!   then for those in which it is the second, and so on: others may be slow, or may not be there. Of the latter it
//!   asks for the last ones first, and for less at once the fewer are left.
//! - The server is also asked for what mirrors have, if it alone brings more than they do.

use super::meter::Meter;
use super::names::{board_bits, board_node, board_size};
use crate::extent::Ticket;
use crate::store::disk_cache::BLOCK;
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes that a mirror is asked for at once: the first time, and at most.
const OF_MIRROR: (u64, u64) = (2 << 20, 8 << 20);
/// Bytes that the server is asked for at once, beside what it brings in `AHEAD`: at the begin, and when boards were seen.
const OF_SERVER: (u64, u64) = (2 << 20, 8 << 20);
const AHEAD: Duration = Duration::from_millis(250);
/// The time in which boards are seen the first time.
const FIRST_LOOKS: Duration = Duration::from_millis(100);
/// Blocks of a stretch, at most. An object has at least so many stretches.
const STRETCH: u64 = 8;
const STRETCHES: u64 = 32;
/// A node asks the server at once for at most this part of its share of stretches in which others come first, and for the least.
const PART_OF_SHARE: u64 = 4;
const LEAST: u64 = 2 * BLOCK;
/// From one look at a board to the next. A mirror that has more than it is asked for is looked at four times less often.
const LOOK: Duration = Duration::from_millis(50);
/// The pause after looks that failed, at most. A node that starts is seen by then, and gets its stretches.
const LATEST_LOOK: Duration = Duration::from_millis(500);
/// Looks of a load in a second, at most.
const MOST_LOOKS: u32 = 160;
/// Files whose boards are looked at.
const FILES: usize = 4;
/// A mirror that was asked and brings nothing for so long is left.
const LATE: Duration = Duration::from_secs(3);
/// The same for one that has come back and has brought nothing since. It is asked for one block.
const LATE_AGAIN: Duration = Duration::from_secs(1);
/// A mirror that was left comes back after so long, and the next time after twice as long.
const AWAY: Duration = Duration::from_secs(2);

/// A read: its file, its offset, its ticket.
pub(super) type ReadKey = (u32, u64, Ticket);

/// The one that is asked for a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Giver {
    Server,
    /// The mirror of this number.
    Mirror(usize),
}

/// The size of a read, and the part of it that is needed.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadSize {
    pub(super) len: u64,
    pub(super) need: u64,
}

/// An object that mirrors may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mirrored {
    /// A number made of its name: all nodes make the same one.
    pub(super) name: u64,
    pub(super) size: u64,
}

impl Mirrored {
    /// Bytes of a stretch.
    fn stretch(&self) -> u64 {
        (self.size / BLOCK / STRETCHES).clamp(1, STRETCH) * BLOCK
    }
}

/// The blocks of an object that a mirror has.
#[derive(Debug)]
struct Board {
    /// A bit for each block, then checksums.
    bits: Vec<u8>,
    /// A look is under way.
    is_looking: bool,
    next_look: Duration,
    /// Looks in a row that failed.
    failed: u32,
    is_full: bool,
}

#[derive(Debug)]
struct MirrorState {
    /// By number of file.
    boards: Vec<Option<Board>>,
    /// Reads that it was asked for, and since when they wait for it; `None`: they wait for their place.
    asked: BTreeMap<Ticket, (Option<Duration>, u64)>,
    bytes: u64,
    meter: Meter,
    /// When something came from it last.
    heard: Duration,
    /// The number of its node, once it is known.
    node: Option<u64>,
    is_left: bool,
    /// When it comes back; `None`: it does not.
    returns: Option<Duration>,
    /// The time that it will be away when it is left next.
    away: Duration,
    /// It has come back, and has brought nothing since.
    is_tried: bool,
}

impl MirrorState {
    fn room(&self) -> u64 {
        let most = (OF_MIRROR.0 + self.meter.bytes_in(AHEAD)).min(OF_MIRROR.1);
        match () {
            () if self.is_left => 0,
            () if self.is_tried => BLOCK.saturating_sub(self.bytes),
            () => most.saturating_sub(self.bytes),
        }
    }

    /// True if it was asked, or is looked at after it has come back, and brings nothing.
    fn is_late(&self, now: Duration) -> bool {
        let since = self.asked.values().filter_map(|(since, _)| *since).min();
        let looked = self.boards.iter().flatten().any(|board| board.is_looking).then_some(self.heard);
        let (since, late) = if self.is_tried { (since.or(looked), LATE_AGAIN) } else { (since, LATE) };
        !self.is_left && since.is_some_and(|since| since.max(self.heard) + late < now)
    }

    fn comes_back(&mut self, now: Duration) {
        for board in self.boards.iter_mut().flatten() {
            board.bits.fill(0);
            (board.is_looking, board.next_look, board.failed, board.is_full) = (false, now, 0, false);
        }
        (self.is_left, self.returns, self.is_tried, self.heard) = (false, None, true, now);
        // Nobody leaves it a stretch before its board is seen.
        (self.node, self.meter) = (None, Meter::default());
    }

    fn has(&self, file: u32, offset: u64, need: u64) -> bool {
        let board = self.boards.get(file as usize).and_then(Option::as_ref);
        !self.is_left && board.is_some_and(|board| has_bits(&board.bits, offset, need))
    }
}

/// A number that says nothing of the one that it is made of (SplitMix64's last step: Steele, Lea, Flood 2014). All nodes make the
/// same one.
fn mix(of: u64) -> u64 {
    let z = of.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// True if all blocks of a read are there.
fn has_bits(bits: &[u8], offset: u64, need: u64) -> bool {
    let mut blocks = offset / BLOCK..=(offset + need.max(1) - 1) / BLOCK;
    blocks.all(|block| bits.get((block / 8) as usize).is_some_and(|byte| byte >> (block % 8) & 1 == 1))
}

/// The most bytes that a load receives in a second, from all that it asks.
#[derive(Debug)]
struct Allowance {
    rate: f64,
    there: f64,
    at: Duration,
}

impl Allowance {
    fn new(bandwidth: u64) -> Allowance {
        Allowance { rate: bandwidth.max(1) as f64, there: 0.0, at: Duration::ZERO }
    }

    fn pass(&mut self, now: Duration) {
        let more = now.saturating_sub(self.at).as_secs_f64() * self.rate;
        // Time passes in steps of 50 ms, and the next read is asked for whole.
        (self.there, self.at) = ((self.there + more).min(self.rate / 10.0), self.at.max(now));
    }
}

/// The decisions of a load.
#[derive(Debug)]
pub(super) struct MirrorChoice {
    objects: Vec<Option<Mirrored>>,
    mirrors: Vec<MirrorState>,
    /// The blocks of each file that any mirror has.
    there: Vec<Vec<u8>>,
    /// Reads that nobody was asked for yet: those that a mirror has, and those that none has.
    shared: BTreeMap<ReadKey, ReadSize>,
    /// The latter by the rank of this node.
    alone: BTreeMap<(u32, ReadKey), ReadSize>,
    /// The number of this node.
    node: u64,
    /// The read behind the one that the server was asked for last, of those in which this node is the first.
    cursor: ReadKey,
    /// Reads that the server was asked for.
    of_server: BTreeMap<Ticket, u64>,
    server_bytes: u64,
    server: Meter,
    mirrored: Meter,
    allowance: Option<Allowance>,
}

impl MirrorChoice {
    pub(super) fn new(
        mirrors: usize,
        objects: Vec<Option<Mirrored>>,
        node: u64,
        bandwidth: Option<u64>,
    ) -> MirrorChoice {
        let board = |object: Mirrored| Board {
            bits: vec![0; board_size(object.size) as usize],
            is_looking: false,
            next_look: Duration::ZERO,
            failed: 0,
            is_full: false,
        };
        let mirror = || MirrorState {
            boards: objects.iter().map(|object| object.map(board)).collect(),
            asked: BTreeMap::new(),
            bytes: 0,
            meter: Meter::default(),
            heard: Duration::ZERO,
            node: None,
            is_left: false,
            returns: None,
            away: AWAY,
            is_tried: false,
        };
        // As long as a node knows of no other, it begins somewhere.
        let file = mix(node) % (objects.len() as u64).max(1);
        let start = |object: &Mirrored| mix(node ^ 1) % object.size / object.stretch() * object.stretch();
        let start = objects.get(file as usize).and_then(Option::as_ref).map_or(0, start);
        let cursor = (file as u32, start, Ticket(0));
        MirrorChoice {
            mirrors: (0..mirrors).map(|_| mirror()).collect(),
            there: objects
                .iter()
                .map(|object| vec![0; object.map_or(0, |object| board_bits(object.size)) as usize])
                .collect(),
            objects,
            shared: BTreeMap::new(),
            alone: BTreeMap::new(),
            node,
            cursor,
            of_server: BTreeMap::new(),
            server_bytes: 0,
            server: Meter::default(),
            mirrored: Meter::default(),
            allowance: bandwidth.map(Allowance::new),
        }
    }

    /// True if a mirror may still bring something, now or when it has come back. Then the server is not asked for all at once.
    fn may_have_mirrors(&self) -> bool {
        self.mirrors.iter().any(|mirror| !mirror.is_left || mirror.returns.is_some())
    }

    pub(super) fn is_left(&self, mirror: usize) -> bool {
        self.mirrors[mirror].is_left
    }

    /// True if a mirror is this node itself.
    pub(super) fn is_own(&self, mirror: usize) -> bool {
        self.mirrors[mirror].node == Some(self.node)
    }

    /// True if reads wait, or somebody was asked for one.
    pub(super) fn is_busy(&self) -> bool {
        let waits = !self.shared.is_empty() || !self.alone.is_empty();
        waits || !self.of_server.is_empty() || self.mirrors.iter().any(|mirror| !mirror.asked.is_empty())
    }

    /// A read that somebody is to be asked for.
    pub(super) fn wants(&mut self, key: ReadKey, wanted: ReadSize) {
        let is_there = self.there.get(key.0 as usize).is_some_and(|bits| has_bits(bits, key.1, wanted.need));
        match is_there {
            true => self.shared.insert(key, wanted),
            false => self.alone.insert((self.rank(&key), key), wanted),
        };
    }

    /// The number of nodes that come before this one for a read.
    fn rank(&self, key: &ReadKey) -> u32 {
        let Some(Some(object)) = self.objects.get(key.0 as usize) else { return 0 };
        let stretch = mix(object.name ^ mix(key.1 / object.stretch()));
        let own = mix(stretch ^ self.node);
        let others = self.mirrors.iter().filter(|mirror| !mirror.is_left).filter_map(|mirror| mirror.node);
        others.filter(|other| mix(stretch ^ other) > own).count() as u32
    }

    /// The ranks have changed.
    fn rank_anew(&mut self) {
        let alone = std::mem::take(&mut self.alone);
        self.alone = alone.into_iter().map(|((_, key), wanted)| ((self.rank(&key), key), wanted)).collect();
    }

    /// No read waits any more.
    pub(super) fn forget(&mut self) {
        self.shared.clear();
        self.alone.clear();
    }

    /// The boards that are to be looked at now: of files of reads that wait.
    pub(super) fn looks(&mut self, now: Duration) -> Vec<(usize, u32)> {
        let files = self.files_waiting();
        let live = self.mirrors.iter().filter(|mirror| !mirror.is_left).count();
        let pause = LOOK.max(Duration::from_secs(1) * (live * files.len()) as u32 / MOST_LOOKS);
        let plenty: Vec<bool> = (0..self.mirrors.len()).map(|number| self.has_plenty(number)).collect();
        let mut looks = Vec::new();
        for (number, mirror) in self.mirrors.iter_mut().enumerate().filter(|(_, mirror)| !mirror.is_left) {
            for &file in &files {
                let Some(Some(board)) = mirror.boards.get_mut(file as usize) else { continue };
                if board.is_full || board.is_looking || now < board.next_look {
                    continue;
                }
                board.is_looking = true;
                // After a failure, ever later: it may not have this object yet, or not be there.
                let pause = match board.failed {
                    0 if plenty[number] => 4 * pause,
                    failed => (pause * (1 << failed.min(6))).min(LATEST_LOOK.max(pause)),
                };
                board.next_look = now + pause;
                looks.push((number, file));
            }
        }
        looks
    }

    /// The files of reads that wait, a few.
    fn files_waiting(&self) -> Vec<u32> {
        let mut files: Vec<u32> = Vec::new();
        let mut keys = self.alone.keys().map(|(_, key)| key.0).chain(self.shared.keys().map(|key| key.0));
        while let Some(file) = keys.find(|file| !files.contains(file)) {
            files.push(file);
            if files.len() == FILES {
                break;
            }
        }
        files
    }

    /// True if a mirror has more than it is asked for.
    fn has_plenty(&self, number: usize) -> bool {
        let mirror = &self.mirrors[number];
        mirror.room() == 0 && self.shared.iter().any(|(key, wanted)| mirror.has(key.0, key.1, wanted.need))
    }

    /// A look has ended: with the board, or without one.
    pub(super) fn looked(&mut self, mirror: usize, file: u32, bits: Option<&[u8]>, now: Duration) {
        let state = &mut self.mirrors[mirror];
        let Some(Some(board)) = state.boards.get_mut(file as usize) else { return };
        board.is_looking = false;
        let Some(bits) = bits.filter(|bits| bits.len() == board.bits.len()) else {
            board.failed += 1;
            return;
        };
        state.heard = now;
        board.failed = 0;
        let node = board_node(bits);
        let is_new = state.node.replace(node) != Some(node);
        let size = self.objects[file as usize].map_or(0, |object| object.size);
        let count = board_bits(size) as usize;
        let has_lost = board.bits[..count].iter().zip(bits).any(|(old, new)| old & !new != 0);
        board.bits.copy_from_slice(bits);
        board.is_full =
            bits[..count].iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>() >= size.div_ceil(BLOCK);
        if is_new {
            self.rank_anew();
        }
        if has_lost {
            // An entry was evicted, or a block was forgotten: reads that waited for it may wait for nobody now.
            self.count_anew();
        } else if !self.mirrors[mirror].is_left {
            self.there[file as usize].iter_mut().zip(&bits[..count]).for_each(|(all, byte)| *all |= byte);
            self.sort(file);
        }
    }

    /// Reads of a file that mirrors have now.
    fn sort(&mut self, file: u32) {
        let bits = &self.there[file as usize];
        let is_there = |(ranked, wanted): &(&(u32, ReadKey), &ReadSize)| {
            ranked.1 .0 == file && has_bits(bits, ranked.1 .1, wanted.need)
        };
        let found: Vec<_> = self.alone.iter().filter(is_there).map(|(ranked, _)| *ranked).collect();
        for ranked in found {
            if let Some(wanted) = self.alone.remove(&ranked) {
                self.shared.insert(ranked.1, wanted);
            }
        }
    }

    /// The checksum that a mirror has said for a block.
    pub(super) fn checksum(&self, mirror: usize, file: u32, block: u64) -> Option<[u8; 4]> {
        let board = self.mirrors[mirror].boards.get(file as usize)?.as_ref()?;
        let start = (board_bits(self.objects[file as usize]?.size) + 4 * block) as usize;
        board.bits.get(start..start + 4)?.try_into().ok()
    }

    /// The mirrors that bring nothing, although they were asked.
    pub(super) fn late(&self, now: Duration) -> Vec<usize> {
        let late = self.mirrors.iter().enumerate().filter(|(_, mirror)| mirror.is_late(now));
        late.map(|(number, _)| number).collect()
    }

    /// The mirrors that were left and may come back now. None if no read waits.
    pub(super) fn returning(&self, now: Duration) -> Vec<usize> {
        if self.shared.is_empty() && self.alone.is_empty() {
            return Vec::new();
        }
        let returns = |mirror: &MirrorState| mirror.returns.is_some_and(|at| at <= now) && mirror.asked.is_empty();
        let found = self.mirrors.iter().enumerate().filter(|(_, mirror)| returns(mirror));
        found.map(|(number, _)| number).collect()
    }

    /// A mirror that was left is asked again: first for its boards, then for one block.
    pub(super) fn comes_back(&mut self, mirror: usize, now: Duration) {
        self.mirrors[mirror].comes_back(now);
        self.count_anew();
        self.rank_anew();
    }

    /// A mirror is left for a while, which is twice as long each time. False: it was already.
    pub(super) fn leave_for_now(&mut self, mirror: usize, now: Duration) -> bool {
        if self.mirrors[mirror].is_left {
            return false;
        }
        self.leave(mirror);
        let state = &mut self.mirrors[mirror];
        (state.returns, state.away) = (Some(now + state.away), 2 * state.away);
        true
    }

    /// A mirror is left for good. False: it was left already. Its reads are wanted again when they have come back.
    pub(super) fn leave(&mut self, mirror: usize) -> bool {
        self.mirrors[mirror].returns = None;
        if std::mem::replace(&mut self.mirrors[mirror].is_left, true) {
            return false;
        }
        self.count_anew();
        self.rank_anew();
        true
    }

    /// Counts anew which blocks mirrors have, and sorts the reads by that.
    fn count_anew(&mut self) {
        for (file, all) in self.there.iter_mut().enumerate() {
            all.fill(0);
            for board in
                self.mirrors.iter().filter(|mirror| !mirror.is_left).filter_map(|one| one.boards[file].as_ref())
            {
                all.iter_mut().zip(&board.bits).for_each(|(all, byte)| *all |= byte);
            }
        }
        for (key, wanted) in std::mem::take(&mut self.shared) {
            self.wants(key, wanted);
        }
        (0..self.there.len() as u32).for_each(|file| self.sort(file));
    }

    /// The reads that somebody is to be asked for now, and who.
    pub(super) fn asks(&mut self, now: Duration) -> Vec<(ReadKey, ReadSize, Giver)> {
        self.mirrors.iter_mut().for_each(|mirror| mirror.meter.pass(now, mirror.bytes > 0));
        let mirrors_work = self.mirrors.iter().any(|mirror| mirror.bytes > 0);
        self.mirrored.pass(now, mirrors_work);
        self.server.pass(now, self.server_bytes > 0);
        self.allowance.iter_mut().for_each(|allowance| allowance.pass(now));
        let mut asks = Vec::new();
        self.ask_mirrors(now, &mut asks);
        self.ask_server(now, &mut asks);
        asks
    }

    fn ask_mirrors(&mut self, now: Duration, asks: &mut Vec<(ReadKey, ReadSize, Giver)>) {
        let mut room: Vec<u64> = self.mirrors.iter().map(MirrorState::room).collect();
        let mut chosen = Vec::new();
        for (key, wanted) in &self.shared {
            let bytes = chosen.iter().map(|(_, wanted, _): &(_, ReadSize, _)| wanted.len).sum();
            if room.iter().all(|room| *room == 0) || !self.is_allowed(bytes) {
                break;
            }
            let (file, offset, _) = *key;
            let has = |number: &usize| room[*number] > 0 && self.mirrors[*number].has(file, offset, wanted.need);
            if let Some(number) = (0..room.len()).filter(has).max_by_key(|number| room[*number]) {
                room[number] = room[number].saturating_sub(wanted.len);
                chosen.push((*key, *wanted, Giver::Mirror(number)));
            }
        }
        for one in chosen {
            self.take(one, now);
            asks.push(one);
        }
    }

    /// The server is asked for what no mirror has, and for what slow ones have.
    fn ask_server(&mut self, now: Duration, asks: &mut Vec<(ReadKey, ReadSize, Giver)>) {
        loop {
            // Of those that mirrors have the last one, because mirrors are asked from the first one on.
            let slow =
                || self.shared.last_key_value().filter(|_| self.are_slow()).map(|(key, wanted)| (0, *key, *wanted));
            let Some((rank, key, wanted)) = self.next_alone().or_else(slow) else { return };
            if self.server_bytes >= self.server_room(rank, now) || !self.is_allowed(0) {
                return;
            }
            let one = (key, wanted, Giver::Server);
            self.take(one, now);
            asks.push(one);
        }
    }

    /// Bytes that the server may be asked for at once.
    fn server_room(&self, rank: u32, now: Duration) -> u64 {
        if !self.may_have_mirrors() {
            return u64::MAX;
        }
        let is_seen = |mirror: &MirrorState| {
            let mut boards = mirror.boards.iter().flatten();
            mirror.is_left || mirror.node.is_some() || boards.any(|board| board.failed > 0)
        };
        let least = match now >= FIRST_LOOKS || self.mirrors.iter().all(is_seen) {
            true => OF_SERVER.1,
            false => OF_SERVER.0,
        };
        let most = least + self.server.bytes_in(AHEAD);
        if rank == 0 {
            return most;
        }
        let left: u64 = self.alone.values().map(|wanted| wanted.len).sum();
        let nodes = 1 + self.mirrors.iter().filter(|mirror| !mirror.is_left && mirror.node.is_some()).count() as u64;
        most.min((left / (PART_OF_SHARE * nodes)).max(LEAST))
    }

    /// True if time alone may change what is asked for: mirrors are looked at, or the allowance of the load grows.
    pub(super) fn waits_for_time(&self) -> bool {
        self.is_busy() && (self.may_have_mirrors() || self.allowance.is_some())
    }

    /// True if the load may receive more than these bytes now.
    fn is_allowed(&self, bytes: u64) -> bool {
        self.allowance.as_ref().is_none_or(|allowance| allowance.there > bytes as f64)
    }

    /// True if the server alone brings more than all mirrors do. As long as that is not known of the server, it is asked for a
    /// little.
    fn are_slow(&self) -> bool {
        let is_tried = self.server.is_known() || self.server_bytes >= LEAST;
        let is_faster = self.mirrored.bytes_in(AHEAD) < self.server.bytes_in(AHEAD);
        self.mirrored.is_known() && (!is_tried || (self.server.is_known() && is_faster))
    }

    /// The next read that no mirror has, with this node's rank.
    fn next_alone(&self) -> Option<(u32, ReadKey, ReadSize)> {
        let (&(least, first), _) = self.alone.first_key_value()?;
        let ranked = |key| (least, key)..=(least, (u32::MAX, u64::MAX, Ticket(u64::MAX)));
        let found = match least {
            0 => self.alone.range(ranked(self.cursor)).next().or_else(|| self.alone.range(ranked(first)).next()),
            _ => self.alone.range(ranked(first)).next_back(),
        };
        found.map(|((rank, key), wanted)| (*rank, *key, *wanted))
    }

    fn take(&mut self, (key, wanted, giver): (ReadKey, ReadSize, Giver), now: Duration) {
        let rank = if self.shared.remove(&key).is_none() { self.rank(&key) } else { u32::MAX };
        self.alone.remove(&(rank, key));
        self.allowance.iter_mut().for_each(|allowance| allowance.there -= wanted.len as f64);
        match giver {
            Giver::Server => {
                if rank == 0 {
                    self.cursor = key;
                }
                self.of_server.insert(key.2, wanted.len);
                self.server_bytes += wanted.len;
            }
            Giver::Mirror(number) => {
                let mirror = &mut self.mirrors[number];
                mirror.asked.insert(key.2, (Some(now), wanted.len));
                mirror.bytes += wanted.len;
            }
        }
    }

    /// There was no room for a read: it waits on.
    pub(super) fn is_back(&mut self, key: ReadKey, wanted: ReadSize, giver: Giver, now: Duration) {
        self.ended(key.2, giver, 0, now);
        self.wants(key, wanted);
    }

    /// The first byte of a read has come, or it has its place and waits for the others.
    pub(super) fn arrived(&mut self, ticket: Ticket, mirror: usize, has_place: bool, now: Duration) {
        let mirror = &mut self.mirrors[mirror];
        mirror.heard = now;
        mirror.asked.entry(ticket).and_modify(|asked| asked.0 = has_place.then_some(now));
    }

    /// A read has ended: with so many bytes of this giver.
    pub(super) fn ended(&mut self, ticket: Ticket, giver: Giver, bytes: u64, now: Duration) {
        match giver {
            Giver::Server => {
                let len = self.of_server.remove(&ticket).unwrap_or_default();
                self.server.pass(now, self.server_bytes > 0);
                self.server.add(bytes);
                self.server_bytes -= len;
            }
            Giver::Mirror(number) => {
                let work = self.mirrors.iter().any(|mirror| mirror.bytes > 0);
                self.mirrored.pass(now, work);
                self.mirrored.add(bytes);
                let mirror = &mut self.mirrors[number];
                mirror.meter.pass(now, mirror.bytes > 0);
                mirror.meter.add(bytes);
                mirror.heard = now;
                mirror.is_tried &= bytes == 0;
                mirror.bytes -= mirror.asked.remove(&ticket).map_or(0, |(_, len)| len);
            }
        }
    }
}
