//! The world's sources and devices: what they do with the engine's actions, on real memory.

use super::super::{Action, Event};
use super::memory::{byte_of_file, POISON};
use super::{simulated, ticket, At, Check, CopyInFlight, Fate, Misplaced, ReadInFlight, World, DRAIN};
use crate::device::Copy;
use crate::error::ErrorKind;
use crate::extent::Landing;
use crate::load::addresses::Addresses;
use crate::source::Destination;

impl World {
    pub(super) fn carry_out(&mut self, action: Action) -> Check {
        let failed = self.wronged.is_some();
        match action {
            Action::Read { extent } => {
                hold!(!failed, "{action:?} after the load had failed");
                if let Some(i) = self.reads.iter().position(|f| f.extent == extent && f.at == At::Held) {
                    hold!(
                        self.refused != Some(self.turn),
                        "extent {extent} tried again, and the source was not polled"
                    );
                    self.submit(i);
                    return Ok(());
                }
                self.start(extent)
            }
            Action::Land { extent } => {
                hold!(!failed, "{action:?} after the load had failed");
                hold!(self.answered.pop_front() == Some(extent), "extent {extent} lands before it is its turn to");
                let number = self.reads.iter().position(|f| f.extent == extent && f.at == At::Answered);
                let number = number.ok_or("a request lands that has not arrived")?;
                let slab = self.slab(extent)?;
                self.occupy(extent);
                self.reads[number].into = Some(self.destination(extent, Some(slab))?);
                self.moves();
                if self.cruelty.trouble && self.rng.one_in(60) {
                    // The source does not know it. It comes back when the source is told to give up.
                    self.wrong(ErrorKind::Internal);
                    self.engine.on(self.now, Event::Failed(simulated(ErrorKind::Internal)));
                    return Ok(());
                }
                self.reads[number].at = At::Landing;
                Ok(())
            }
            Action::Copy { extent } => {
                hold!(!failed, "{action:?} after the load had failed");
                hold!(!self.copies.iter().any(|s| s.extent == extent), "copy of extent {extent} twice at once");
                let at = self.slab(extent)?;
                self.occupy(extent);
                let slab = self.engine.slab(extent).map_or(0, |slab| slab.id);
                let copies = self.copies(extent, at)?;
                let fate = self.fate();
                self.moves();
                if self.cruelty.trouble && self.rng.one_in(100) {
                    // The device does not take it.
                    self.pool.borrow_mut().in_use.remove(&slab);
                    self.wrong(ErrorKind::Device);
                    self.engine
                        .on(self.now, Event::CopyDone(ticket(extent), Err(simulated(ErrorKind::Device)), vec![]));
                    return Ok(());
                }
                self.copies.push(CopyInFlight { extent, copies, slab, fate });
                Ok(())
            }
            Action::Withdraw { extent } => {
                let held = self.reads.iter().position(|f| f.extent == extent && f.at == At::Held);
                hold!(failed && held.is_some(), "{action:?} of a read that is not held back");
                self.leave(held.unwrap_or(0));
                Ok(())
            }
            Action::Cancel => {
                hold!(failed && !self.source_told, "the source was told to give up twice, or for nothing");
                self.source_told = true;
                Ok(())
            }
            Action::Abandon => self.abandoned(),
        }
    }

    /// A read or a copy starts.
    pub(super) fn moves(&mut self) {
        self.moved = self.now;
        self.overdue = false;
    }

    /// A new read.
    pub(super) fn start(&mut self, extent: u32) -> Check {
        let e = self.extent(extent);
        hold!(!self.started[extent as usize], "extent {extent} started twice");
        hold!(!self.reads.iter().any(|f| f.at == At::Held), "extent {extent} overtakes one that is held back");
        self.started[extent as usize] = true;
        hold!(self.is_granted(extent), "extent {extent} started before its blocks were granted");
        hold!(self.has_depth(e.staging), "extent {extent} passes the depth");
        self.ahead += e.wanted;
        let bound = self.bound();
        hold!(self.ahead <= bound, "extent {extent} passes the window: {} > {bound}", self.ahead);
        let slab = if e.lands_on_arrival() {
            hold!(self.engine.slab(extent).is_none(), "extent {extent} took its slab at request");
            None
        } else if e.landing == Landing::Slab {
            hold!(self.answered.is_empty(), "extent {extent} took a slab before those that have arrived");
            Some(self.slab(extent)?)
        } else {
            None
        };
        let into = self.destination(extent, slab)?;
        let requested = matches!(into, Destination::OnArrival);
        hold!(requested == e.lands_on_arrival(), "extent {extent} has no place, or has one too early");
        if self.cruelty.trouble && self.rng.one_in(150) {
            // There is no place for it, or it cannot be sent.
            self.moves();
            self.wrong(ErrorKind::Internal);
            self.engine.on(self.now, Event::ReadDone(ticket(extent), Err(simulated(ErrorKind::Internal)), 0));
            return Ok(());
        }
        let fate = self.fate();
        self.reads.push(ReadInFlight { extent, into: Some(into), at: At::Held, fate });
        self.submit(self.reads.len() - 1);
        Ok(())
    }

    /// Gives the source a read, for which it may have no room.
    pub(super) fn submit(&mut self, number: usize) {
        let full = self.turn >= self.cruelty.full_from || (self.cruelty.tight && self.rng.one_in(3));
        let extent = self.reads[number].extent;
        if full {
            self.refused = Some(self.turn);
            self.engine.on(self.now, Event::NoRoom(ticket(extent)));
        }
        self.reads[number].at = match self.reads[number].into {
            _ if full => At::Held,
            Some(Destination::OnArrival) => At::Requested,
            _ => At::Landing,
        };
        if !full {
            self.occupy(extent);
            self.moves();
        }
    }

    /// Where the slab is that an extent holds.
    pub(super) fn slab(&self, extent: u32) -> Result<*mut u8, String> {
        let slab = self.engine.slab(extent).ok_or(format!("extent {extent} without a slab"))?;
        let other = self.pool.borrow().in_use.get(&slab.id).copied();
        hold!(other.is_none(), "slab {} is in use twice", slab.id);
        Ok(slab.at())
    }

    /// From now on a source or a device uses the slab of this extent, if it holds one.
    pub(super) fn occupy(&self, extent: u32) {
        if let Some(slab) = self.engine.slab(extent) {
            self.pool.borrow_mut().in_use.insert(slab.id, extent);
        }
    }

    pub(super) fn addresses(&self, extent: u32) -> Addresses<'_, impl Fn(u32) -> Option<u64> + '_> {
        // As in a load, nothing holds a block that is complete.
        let base = |block: u32| {
            let (arena, offset) = self.case.homes[block as usize];
            let there = self.granted[block as usize] && !self.complete[block as usize];
            there.then(|| self.arenas[arena].at() as u64 + offset)
        };
        Addresses::new(&self.schedule, &self.layout, extent, base)
    }

    pub(super) fn destination(&self, extent: u32, slab: Option<*mut u8>) -> Result<Destination, String> {
        let mut into = self.addresses(extent).destination(slab).map_err(|e| e.to_string())?;
        match (&mut into, self.misplaced) {
            (Destination::Memory(at) | Destination::Mapping { at, .. }, Some(Misplaced::Place)) => {
                *at = at.wrapping_add(1)
            }
            (Destination::Scatter(places), Some(Misplaced::ScatteredPlaces)) => places.reverse(),
            _ => {}
        }
        Ok(into)
    }

    pub(super) fn copies(&self, extent: u32, slab: *mut u8) -> Result<Vec<Copy>, String> {
        let mut copies = self.addresses(extent).copies(slab).map_err(|e| e.to_string())?;
        self.addresses(extent).strided(slab).map_err(|e| e.to_string())?.items(|from, to, len| {
            let from = from.cast_mut();
            // A strided tensor has a piece of memory of its own.
            let arena = self.locate(to, len as usize).map(|at| at.0);
            let block = self.case.homes.iter().position(|home| Some(home.0) == arena).unwrap_or(0) as u32;
            copies.push(Copy { from, to, len, rows: 1, from_stride: len, to_stride: len, block, pad: 0 });
        });
        for copy in &mut copies {
            match self.misplaced {
                Some(Misplaced::CopyFrom) => copy.from = copy.from.wrapping_add(1),
                Some(Misplaced::CopyTo) => copy.to += 1,
                Some(Misplaced::FromStride) => copy.from_stride += 1,
                Some(Misplaced::ToStride) => copy.to_stride += 1,
                Some(Misplaced::Pad) => copy.pad += 1,
                _ => {}
            }
        }
        Ok(copies)
    }

    pub(super) fn fate(&mut self) -> Fate {
        match self.rng.below(16) {
            0 if self.cruelty.hangs => Fate::Hangs,
            1 if self.cruelty.hangs => Fate::Late,
            _ => Fate::Ends,
        }
    }

    /// Reads and copies in flight are given up. Then they come back after all, or not.
    pub(super) fn abandoned(&mut self) -> Check {
        let Some((_, failed)) = self.wronged else { return Err("abandoned, and has not failed".into()) };
        hold!(self.source_told, "what is in flight is given up, and the source was not told");
        hold!(self.now >= failed + DRAIN.min(self.bounds.stall), "abandoned before the drain has passed");
        let mut expected: Vec<usize> = self.copies.iter().map(|s| s.slab).collect();
        expected.extend(self.reads.iter().filter_map(|f| self.engine_slab(f)));
        let extents: Vec<u32> =
            self.reads.iter().map(|f| f.extent).chain(self.copies.iter().map(|s| s.extent)).collect();
        hold!(!extents.is_empty(), "abandoned with nothing in flight");
        let quarantined = self.engine.take_quarantined();
        let mut ids: Vec<usize> = quarantined.iter().map(|s| s.id).collect();
        // The driver's leases stay with the hung reads and copies: their slabs never go back to the ring.
        quarantined.into_iter().for_each(std::mem::forget);
        ids.sort_unstable();
        expected.sort_unstable();
        hold!(ids == expected, "quarantined slabs {ids:?}, in flight {expected:?}");
        hold!(extents.iter().all(|&e| self.engine.slab(e).is_none()), "a slab is set apart and kept");
        self.slabs -= ids.len();
        // Late echoes write to their own memory, and change nothing else.
        let arrived = self.engine.bytes_arrived();
        let never: Vec<_> = self.copies.iter().filter(|s| s.extent % 3 == 0).map(|s| ticket(s.extent)).collect();
        self.engine.never_begun(&never);
        for read in std::mem::take(&mut self.reads) {
            if self.extent(read.extent).landing != Landing::Slab {
                self.may_write(read.extent);
            }
            if self.rng.one_in(2) {
                self.land(read.extent, read.into.as_ref(), u64::MAX)?;
            }
            match read.at {
                At::Requested if self.rng.one_in(2) => self.engine.on(self.now, Event::Arrived(ticket(read.extent))),
                _ => self.engine.on(self.now, Event::ReadDone(ticket(read.extent), Ok(64), 64)),
            }
        }
        for copy in std::mem::take(&mut self.copies) {
            if !never.contains(&ticket(copy.extent)) {
                self.may_write(copy.extent);
            }
            self.engine.on(self.now, Event::CopyDone(ticket(copy.extent), Ok(()), vec![]));
        }
        hold!(self.engine.bytes_arrived() == arrived, "bytes of a load that was given up were counted");
        self.pool.borrow_mut().in_use.retain(|id, _| !ids.contains(id));
        Ok(())
    }

    /// Bytes of the last step of this extent may come at any time.
    pub(super) fn may_write(&mut self, extent: u32) {
        self.may_change.extend(
            self.schedule.extents[extent as usize].pieces.clone().map(|p| self.schedule.pieces[p as usize].want),
        );
    }

    /// The slab of a read in flight, by where it lands.
    pub(super) fn engine_slab(&self, read: &ReadInFlight) -> Option<usize> {
        let Some(Destination::Memory(at)) = read.into else { return None };
        let pool = self.pool.borrow();
        pool.slabs.iter().position(|slab| slab.at() == at)
    }

    /// A read is no longer in flight.
    pub(super) fn leave(&mut self, number: usize) -> ReadInFlight {
        let read = self.reads.swap_remove(number);
        self.answered.retain(|&extent| extent != read.extent);
        if let Some(slab) = self.engine_slab(&read) {
            self.pool.borrow_mut().in_use.remove(&slab);
        }
        read
    }

    /// A request fails on its way. Or a source says that it is done, which nobody can believe.
    pub(super) fn request_ends_before_it_lands(&mut self, number: usize) -> Check {
        let ReadInFlight { extent, .. } = self.leave(number);
        let result = match self.rng.below(3) {
            0 => {
                self.wrong(ErrorKind::Internal);
                Ok(self.extent(extent).len)
            }
            _ => {
                self.wrong(ErrorKind::Io);
                Err(simulated(ErrorKind::Io))
            }
        };
        self.engine.on(self.now, Event::ReadDone(ticket(extent), result, 0));
        self.moved = self.now;
        Ok(())
    }

    pub(super) fn read_ends(&mut self, number: usize) -> Check {
        if self.reads[number].at != At::Landing {
            // The source was told to give it up.
            let ReadInFlight { extent, .. } = self.leave(number);
            self.engine.on(self.now, Event::ReadDone(ticket(extent), Err(simulated(ErrorKind::Cancelled)), 0));
            return Ok(());
        }
        let ReadInFlight { extent, into, .. } = self.leave(number);
        let e = self.extent(extent);
        let there = e.len.min(self.case.sizes[e.file as usize] - e.offset);
        self.moved = self.now;
        if self.cruelty.trouble && self.rng.one_in(25) {
            let some = self.rng.below(there);
            self.land(extent, into.as_ref(), some)?;
            self.wrong(ErrorKind::Io);
            self.engine.on(self.now, Event::ReadDone(ticket(extent), Err(simulated(ErrorKind::Io)), some));
            return Ok(());
        }
        if self.cruelty.trouble && e.need > 0 && self.rng.one_in(40) {
            self.land(extent, into.as_ref(), e.need - 1)?;
            self.wrong(ErrorKind::Truncated);
            self.engine.on(self.now, Event::ReadDone(ticket(extent), Ok(e.need - 1), e.need - 1));
            return Ok(());
        }
        // All of it, or what is needed and a little more.
        let n = if self.rng.one_in(3) { e.need + self.rng.below(there - e.need + 1) } else { there };
        self.land(extent, into.as_ref(), n)?;
        self.done[extent as usize] |= e.landing != Landing::Slab && self.wronged.is_none();
        self.engine.on(self.now, Event::ReadDone(ticket(extent), Ok(n), n));
        if self.cruelty.trouble && self.rng.one_in(40) {
            // A source completes twice: the load must fail, and must not count or release anything twice.
            self.engine.on(self.now, Event::ReadDone(ticket(extent), Ok(n), n));
            self.wrong(ErrorKind::Internal);
        }
        Ok(())
    }

    pub(super) fn copy_ends(&mut self, number: usize) -> Check {
        let CopyInFlight { extent, copies, slab, .. } = self.copies.swap_remove(number);
        self.pool.borrow_mut().in_use.remove(&slab);
        self.moved = self.now;
        if self.cruelty.trouble && self.rng.one_in(25) {
            // Some blocks have all of their bytes, the others none.
            let all: Vec<u32> = self.addresses(extent).blocks().collect();
            let begun: Vec<u32> = all.into_iter().filter(|_| self.rng.one_in(2)).collect();
            for copy in copies.iter().filter(|copy| begun.contains(&copy.block)) {
                self.copy(extent, slab, copy)?;
            }
            self.wrong(ErrorKind::Device);
            self.engine.on(self.now, Event::CopyDone(ticket(extent), Err(simulated(ErrorKind::Device)), begun));
            return Ok(());
        }
        hold!(self.engine_holds(extent, slab), "the slab of a copy in flight is gone");
        for copy in copies {
            self.copy(extent, slab, &copy)?;
        }
        self.done[extent as usize] |= self.wronged.is_none();
        self.engine.on(self.now, Event::CopyDone(ticket(extent), Ok(()), vec![]));
        if self.cruelty.trouble && self.rng.one_in(40) {
            self.engine.on(self.now, Event::CopyDone(ticket(extent), Ok(()), vec![]));
            self.wrong(ErrorKind::Internal);
        }
        Ok(())
    }

    /// The source reports something of a ticket that it was never given, or the arrival of one that has its place.
    pub(super) fn source_is_confused(&mut self) {
        let landing = self.reads.iter().find(|f| f.at == At::Landing && f.fate == Fate::Ends).map(|f| f.extent);
        let waiting = self.started.iter().position(|started| !started);
        let event = match (landing, waiting) {
            (Some(extent), _) if self.rng.one_in(2) => Event::Arrived(ticket(extent)),
            (_, Some(extent)) if self.rng.one_in(3) => Event::Received(ticket(extent as u32)),
            (_, Some(extent)) => Event::ReadDone(ticket(extent as u32), Ok(64), 64),
            _ => return,
        };
        self.wrong(ErrorKind::Internal);
        self.engine.on(self.now, event);
    }

    pub(super) fn engine_holds(&self, extent: u32, slab: usize) -> bool {
        self.engine.slab(extent).is_some_and(|held| held.id == slab)
    }

    /// The source writes the first `n` bytes of an extent, as far as the file has them.
    pub(super) fn land(&mut self, extent: u32, into: Option<&Destination>, n: u64) -> Check {
        let e = self.extent(extent);
        let n = n.min(e.len).min(self.case.sizes[e.file as usize] - e.offset);
        let bytes: Vec<u8> = (0..n).map(|i| byte_of_file(e.file, e.offset + i)).collect();
        match into {
            None | Some(Destination::OnArrival) => {}
            Some(Destination::Memory(at) | Destination::Mapping { at, .. }) => {
                self.write(extent, *at as u64, &bytes)?
            }
            Some(Destination::Rows { .. }) => unreachable!("no plan of the simulator reads by rows"),
            Some(Destination::Scatter(places)) => {
                let mut left = &bytes[..];
                for &(at, len) in places {
                    let (now, later) = left.split_at(len.min(left.len()));
                    if !at.is_null() {
                        self.write(extent, at as u64, now)?;
                    }
                    left = later;
                }
                let all: usize = places.iter().map(|p| p.1).sum();
                hold!(all as u64 == e.len, "the places of extent {extent} take {all} of {} bytes", e.len);
            }
        }
        Ok(())
    }

    /// The device makes one copy. On a GPU it may write to the bytes behind it.
    pub(super) fn copy(&mut self, extent: u32, slab: usize, copy: &Copy) -> Check {
        for row in 0..copy.rows {
            let from = copy.from.wrapping_add((row * copy.from_stride) as usize);
            let bytes = {
                let pool = self.pool.borrow();
                let memory = &pool.slabs[slab];
                let at = memory.offset(from as u64, copy.len as usize).filter(|&at| at >= 0);
                let at = at.ok_or(format!("a copy of extent {extent} from outside its slab"))? as usize;
                hold!(at + copy.len as usize <= memory.bytes().len(), "a copy of extent {extent} from behind its slab");
                memory.bytes()[at..at + copy.len as usize].to_vec()
            };
            hold!(!bytes.contains(&POISON), "slab {slab} was released before extent {extent} was copied out of it");
            self.write(extent, copy.to + row * copy.to_stride, &bytes)?;
        }
        if self.case.gpu && copy.pad > 0 {
            let end = copy.to + (copy.rows - 1) * copy.to_stride + copy.len;
            let pad = vec![POISON; self.rng.below(u64::from(copy.pad) + 1) as usize];
            self.write_anywhere(end, &pad)?;
        }
        Ok(())
    }

    /// Writes to a slab, or to a part of the blocks that the extent is known to fill.
    pub(super) fn write(&mut self, extent: u32, address: u64, bytes: &[u8]) -> Check {
        let len = bytes.len() as i64;
        if let Some((arena, at)) = self.locate(address, bytes.len()) {
            let home = |block: u32| self.case.homes[block as usize];
            let addresses = self.addresses(extent);
            let mapped = matches!(self.extent(extent).landing, Landing::Mapping { .. });
            let within = |(block, from, n): (u32, u64, u64)| {
                let from = (home(block).1 + from) as i64;
                home(block).0 == arena && from <= at && at + len <= from + n as i64
            };
            hold!(mapped || addresses.written().any(within), "extent {extent} fills bytes that nobody expected it to");
            hold!(addresses.blocks().any(|b| home(b).0 == arena), "extent {extent} fills memory that nothing keeps");
            for (block, expected) in (0..).zip(&self.case.expected).filter(|b| self.complete[b.0 as usize]) {
                let bytes = (home(block).1 as i64..).zip(expected).filter(|b| home(block).0 == arena && b.1.is_some());
                let late = bytes.map(|b| b.0).find(|&b| (at..at + len).contains(&b));
                hold!(late.is_none(), "block {block} is written to after it was complete");
            }
        }
        self.write_anywhere(address, bytes)
    }

    /// The memory of blocks in which these bytes lie, or its guard bytes, and where.
    pub(super) fn locate(&self, address: u64, len: usize) -> Option<(usize, i64)> {
        self.arenas.iter().enumerate().find_map(|(arena, memory)| Some((arena, memory.offset(address, len)?)))
    }

    pub(super) fn write_anywhere(&mut self, address: u64, bytes: &[u8]) -> Check {
        if let Some((arena, at)) = self.locate(address, bytes.len()) {
            self.arenas[arena].write(at, bytes);
            for i in 0..bytes.len() as i64 {
                if let Some(writes) = usize::try_from(at + i).ok().and_then(|i| self.writes[arena].get_mut(i)) {
                    *writes += 1;
                }
            }
            return Ok(());
        }
        let mut pool = self.pool.borrow_mut();
        let place = pool.slabs.iter_mut().find_map(|slab| Some((slab.offset(address, bytes.len())?, slab)));
        let (at, slab) = place.ok_or("a write to memory that is neither a block nor a slab")?;
        slab.write(at, bytes);
        Ok(())
    }
}
