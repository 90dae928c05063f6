//! Facts that the world knows without asking the engine: what may start, what is waited for, which bytes are where.

use super::super::{Event, Ready};
use super::memory::{byte_of_file, Memory, POISON};
use super::{simulated, At, Check, World};
use crate::error::{Error, ErrorKind};
use crate::extent::{Extent, Landing, TakesSlab};
use crate::plan::layout::BlockKind;

impl World {
    /// Whether the load can start something now: a copy never waits, so only arrivals and the next extent can.
    pub(super) fn can_start(&self) -> bool {
        let slab = self.pool.borrow().has_some();
        if !self.answered.is_empty() && slab {
            return true;
        }
        if self.reads.iter().any(|f| f.at == At::Held) {
            return false;
        }
        let Some(next) = self.started.iter().position(|s| !s) else { return false };
        let e = &self.schedule.extents[next];
        let slab = e.landing != Landing::Slab || e.lands_on_arrival() || (slab && self.answered.is_empty());
        self.has_depth(e.staging) && self.is_granted(next as u32) && slab && self.fits(next)
    }

    /// When the engine has nothing to do, something really holds up the next extent: depth, window, grant or slab.
    pub(super) fn nothing_idles(&self) -> Check {
        if self.wronged.is_some() {
            let in_flight = self.reads.len() + self.copies.len();
            hold!(self.source_told || in_flight == 0, "the source was not told that the load has failed");
            let held = self.reads.iter().find(|f| f.at == At::Held);
            hold!(held.is_none(), "extent {:?} is held back by a load that has failed", held.map(|f| f.extent));
            return Ok(());
        }
        if let Some(held) = self.reads.iter().find(|f| f.at == At::Held) {
            hold!(self.refused == Some(self.turn), "extent {} is held back and not tried again", held.extent);
        }
        hold!(!self.can_start(), "the next extent or arrival could go on and does not");
        Ok(())
    }

    pub(super) fn extent(&self, extent: u32) -> Extent {
        self.schedule.extents[extent as usize].clone()
    }

    pub(super) fn wants_of(&self, extent: u32) -> impl Iterator<Item = u32> + '_ {
        let r = &self.schedule.extents[extent as usize].pieces;
        self.schedule.pieces[r.start as usize..r.end as usize].iter().map(|p| p.want)
    }

    pub(super) fn is_granted(&self, extent: u32) -> bool {
        let mut wants = self.wants_of(extent);
        wants.all(|want| self.granted[self.layout.places[want as usize].block as usize])
    }

    pub(super) fn has_depth(&self, staging: TakesSlab) -> bool {
        let in_flight =
            self.reads.iter().filter(|f| self.schedule.extents[f.extent as usize].staging == staging).count();
        in_flight < if staging == TakesSlab::AtRequest { self.bounds.depth } else { self.bounds.requests }
    }

    /// The want that the consumer takes next.
    pub(super) fn next_want(&self) -> Option<u32> {
        self.layout.order.iter().copied().find(|&want| !self.taken[want as usize])
    }

    pub(super) fn last_extent_of(&self, want: u32) -> Option<u32> {
        (0..self.schedule.extents.len() as u32).rfind(|&e| self.wants_of(e).any(|w| w == want))
    }

    /// Whether the window has room for the bytes of this extent, which has not started.
    pub(super) fn fits(&self, extent: usize) -> bool {
        let Some(window) = self.bounds.window else { return true };
        let Some(next) = self.next_want() else { return true };
        self.ahead + self.schedule.extents[extent].wanted <= window
            || self.last_extent_of(next).is_some_and(|last| extent <= last as usize)
    }

    /// Most bytes that may be requested and not taken: the window, or the next tensor alone where that is larger, with
    /// what else lies in the reads up to its last one.
    pub(super) fn bound(&self) -> u64 {
        let (Some(window), Some(next)) = (self.bounds.window, self.next_want()) else { return u64::MAX };
        let past = self.last_extent_of(next).map_or(0, |last| last + 1);
        let all = &self.schedule.pieces;
        let pieces = (0..past).flat_map(|e| {
            let r = &self.schedule.extents[e as usize].pieces;
            &all[r.start as usize..r.end as usize]
        });
        let others = pieces.filter(|p| p.want != next && !self.taken[p.want as usize]).map(|p| p.len * p.rows);
        window.max(self.layout.places[next as usize].nbytes + others.sum::<u64>())
    }

    /// Whether every byte of a want is there.
    pub(super) fn has_arrived(&self, want: u32) -> bool {
        (0..self.schedule.extents.len()).all(|e| self.done[e] || !self.wants_of(e as u32).any(|w| w == want))
    }

    /// Whether the load, with nothing to do now, waits for a source, a device or slabs.
    pub(super) fn waits_for_what_may_hang(&self) -> bool {
        let in_flight = self.reads.len() + self.copies.len();
        let Some(next) = self.started.iter().position(|s| !s) else { return true };
        let e = &self.schedule.extents[next];
        if !self.answered.is_empty() || !self.has_depth(e.staging) {
            return true;
        }
        if !self.fits(next) {
            // Room comes when the consumer takes what is there. If nothing is, it waits too.
            let next = self.next_want();
            return in_flight > 0 && next.is_some_and(|want| !self.has_arrived(want));
        }
        self.is_granted(next as u32) || in_flight > 0
    }

    pub(super) fn hand_out(&mut self) -> Check {
        if self.hand_out_held {
            return Ok(());
        }
        let mut ready = Vec::new();
        while let Some(Ready { want, completes }) = self.engine.ready() {
            hold!(self.wronged.is_none(), "want {want} handed out after the load had failed");
            let expected = self.layout.order.get(self.handed.len());
            hold!(Some(&want) == expected, "want {want} handed out, {expected:?} is next");
            self.handed.push(want);
            self.check_bytes(want)?;
            let block = self.layout.places[want as usize].block;
            let mut of_block = (0..).zip(&self.layout.places).filter(|p| p.1.block == block);
            let last = of_block.all(|(want, _)| self.handed.contains(&want));
            hold!(completes == last.then_some(block), "block {block}: complete is {last}, told {completes:?}");
            self.complete[block as usize] |= last;
            ready.push(want);
            if self.bounds.window.is_some() && self.rng.one_in(3) {
                self.hand_out_held = true;
                break;
            }
        }
        if self.cruelty.trouble && !ready.is_empty() && self.rng.one_in(50) {
            // The file has changed: nothing of this is handed out, although it may be the last.
            self.wrong(ErrorKind::Changed);
            self.engine.on(self.now, Event::Revoked(simulated(ErrorKind::Changed)));
            ready.clear();
        }
        if self.bounds.window.is_some() {
            self.to_take.extend(ready);
        }
        Ok(())
    }

    /// Invariants 1 and 4: every byte of a handed-out want is there, and was written once.
    pub(super) fn check_bytes(&self, want: u32) -> Check {
        let b = self.layout.places[want as usize].block as usize;
        let (arena, offset) = self.case.homes[b];
        for &at in &self.case.at[want as usize] {
            let found = self.arenas[arena].bytes()[offset as usize + at];
            hold!(Some(found) == self.case.expected[b][at], "byte {at} of block {b}, of want {want}, is wrong");
            let writes = self.writes[arena][offset as usize + at];
            hold!(writes == 1, "byte {at} of block {b} was written {writes} times");
        }
        Ok(())
    }

    /// Every byte of every block is a tensor's and right, or nobody's business; and nothing around it was touched.
    pub(super) fn check_blocks(&self) -> Check {
        for (b, spec) in self.layout.blocks.iter().enumerate() {
            let (arena, offset) = self.case.homes[b];
            let bytes = &self.arenas[arena].bytes()[offset as usize..];
            for (at, (&found, expected)) in bytes.iter().zip(&self.case.expected[b]).enumerate() {
                let right = match (*expected, spec.kind) {
                    (Some(expected), _) => found == expected,
                    // In place, a read brings what lies between.
                    (None, BlockKind::Mirror { file, start }) => {
                        found == POISON || found == byte_of_file(file, start + at as u64)
                    }
                    (None, _) => found == POISON,
                };
                hold!(right, "byte {at} of block {b} is {found}, expected {expected:?}");
            }
        }
        Ok(())
    }

    /// The engine names each want that has a written byte, and each that a hanging read or copy may still write to.
    pub(super) fn check_touched(&self) -> Check {
        for (want, touched) in (0..).zip(self.engine.touched()) {
            let (arena, offset) = self.case.homes[self.layout.places[want as usize].block as usize];
            let bytes = &self.arenas[arena].bytes()[offset as usize..];
            let changed = self.case.at[want as usize].iter().any(|&at| bytes[at] != POISON);
            let expected = changed || self.may_change.contains(&want);
            hold!(touched == expected, "want {want}: touched is {touched}, changed {changed}, may change {expected}");
        }
        Ok(())
    }

    pub(super) fn ended(&mut self, outcome: Result<(), Error>) -> Check {
        hold!(self.reads.is_empty() && self.copies.is_empty(), "ended with reads or copies in flight");
        match outcome {
            Ok(()) => {
                hold!(self.wronged.is_none(), "a load wronged by {:?} ended well", self.wronged);
                while self.handed.len() < self.layout.order.len() {
                    let before = self.handed.len();
                    self.hand_out_held = false;
                    self.cruelty.trouble = false;
                    self.hand_out()?;
                    let missing = self.layout.order.len() - before;
                    hold!(self.handed.len() > before, "ended without handing out {missing} wants");
                }
                for want in 0..self.layout.places.len() as u32 {
                    self.check_bytes(want)?;
                }
                self.check_blocks()?;
                hold!(self.complete.iter().all(|&c| c), "a block never became complete");
                let wanted: u64 = self.schedule.extents.iter().map(|e| e.wanted).sum();
                let arrived = self.engine.bytes_arrived();
                hold!(arrived == wanted, "{arrived} bytes counted, {wanted} wanted");
            }
            Err(error) => {
                let kind = self.wronged.map(|w| w.0);
                hold!(Some(error.kind()) == kind, "ended with {:?} where {kind:?} happened", error.kind());
                // What was handed out before stays as it was.
                for i in 0..self.handed.len() {
                    self.check_bytes(self.handed[i])?;
                }
            }
        }
        self.check_touched()?;
        let pool = self.pool.borrow();
        hold!(pool.free.len() == self.slabs, "{} slabs leaked", self.slabs - pool.free.len().min(self.slabs));
        let mut memory = self.arenas.iter().chain(&pool.slabs);
        hold!(memory.all(Memory::guards_are_intact), "bytes beside a block or a slab were written to");
        Ok(())
    }
}
