//! The reads that have no connection, in the order in which they are asked for.

use super::range_read::RangeRead;
use crate::extent::Ticket;
use std::collections::VecDeque;
use std::time::Instant;

/// See the module's documentation.
#[derive(Default)]
pub(in crate::store::remote) struct ReadQueue {
    reads: VecDeque<RangeRead>,
    /// Bytes that they miss.
    bytes: u64,
    /// Reads that wait for their time.
    paused: Vec<(Instant, RangeRead)>,
}

impl ReadQueue {
    pub(super) fn add(&mut self, read: RangeRead) {
        self.bytes += read.missing_bytes();
        self.reads.push_back(read);
    }

    /// These go before the others, in their order.
    pub(super) fn put_back(&mut self, reads: impl DoubleEndedIterator<Item = RangeRead>) {
        for read in reads.rev() {
            self.bytes += read.missing_bytes();
            self.reads.push_front(read);
        }
    }

    /// Moves reads that hold a slab before the others.
    pub(super) fn advance_holders(&mut self) {
        let (holders, others): (Vec<_>, Vec<_>) = self.reads.drain(..).partition(RangeRead::holds_slab);
        self.reads.extend(holders.into_iter().chain(others));
    }

    /// This one may not be asked for before `due`.
    pub(super) fn pause(&mut self, read: RangeRead, due: Instant) {
        self.paused.push((due, read));
    }

    /// Has those asked for again whose time has come.
    pub(super) fn resume(&mut self, now: Instant) {
        if self.paused.iter().any(|(due, _)| *due <= now) {
            let (due, later) = std::mem::take(&mut self.paused).into_iter().partition(|(due, _)| *due <= now);
            self.paused = later;
            let due: Vec<(Instant, RangeRead)> = due;
            self.put_back(due.into_iter().map(|(_, read)| read));
        }
    }

    /// A read that waits for its time because its server has asked for that.
    pub(super) fn put_off(&self) -> Option<Ticket> {
        self.paused.iter().find(|(_, read)| read.put_off).map(|(_, read)| read.ticket)
    }

    /// When the next one is due that waits for its time.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.paused.iter().map(|(due, _)| *due).min()
    }

    pub(super) fn take(&mut self, at: usize) -> Option<RangeRead> {
        let read = self.reads.remove(at)?;
        self.bytes -= read.missing_bytes();
        Some(read)
    }

    /// All of them.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = RangeRead> {
        self.bytes = 0;
        let paused = std::mem::take(&mut self.paused);
        std::mem::take(&mut self.reads).into_iter().chain(paused.into_iter().map(|(_, read)| read))
    }

    /// Takes out the reads that may be asked for.
    pub(super) fn take_due(&mut self) -> VecDeque<RangeRead> {
        self.bytes = 0;
        std::mem::take(&mut self.reads)
    }

    pub(super) fn get(&self, at: usize) -> Option<&RangeRead> {
        self.reads.get(at)
    }

    /// How many may be asked for.
    pub(super) fn len(&self) -> usize {
        self.reads.len()
    }

    /// Bytes that may be asked for.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &RangeRead> {
        self.reads.iter()
    }

    /// All of them, paused or not, to give them a place.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut RangeRead> {
        self.reads.iter_mut().chain(self.paused.iter_mut().map(|(_, read)| read))
    }
}
