//! The limit of the read-ahead of a stream.

use crate::plan::schedule::Schedule;

/// The window, or the next tensor alone where that is larger.
///
/// The next tensor is the first one in hand-out order that the consumer has not taken. All extents up to its last one may
/// start, or the consumer would wait for ever. Any other extent has to fit into the window together with what is read
/// already. Extents are read whole: what else lies in those of the next tensor comes with it.
pub(super) struct Window {
    pub(super) bytes: u64,
    /// For each want one more than the number of the last extent that brings bytes of it; 0 for an empty tensor.
    pub(super) ends: Vec<u32>,
    taken: Vec<bool>,
    /// Position in `layout.order` of the first want that was not taken.
    next: usize,
}

impl Window {
    pub(super) fn new(bytes: u64, schedule: &Schedule, wants: usize) -> Window {
        let mut ends = vec![0; wants];
        for (i, e) in (1..).zip(&schedule.extents) {
            for p in schedule.pieces_of(e) {
                ends[p.want as usize] = i;
            }
        }
        Window { bytes, ends, taken: vec![false; wants], next: 0 }
    }

    /// The first want that was not taken.
    pub(super) fn next(&self, order: &[u32]) -> Option<u32> {
        order.get(self.next).copied()
    }

    /// Whether extent number `extent` may start while `ahead` bytes are read and not taken, `wanted` being its own.
    pub(super) fn admits(&self, order: &[u32], ahead: u64, (extent, wanted): (usize, u64)) -> bool {
        ahead.saturating_add(wanted) <= self.bytes
            || self.next(order).is_none_or(|next| extent < self.ends[next as usize] as usize)
    }

    /// The consumer took `want`; false if it had done so before.
    pub(super) fn take(&mut self, order: &[u32], want: u32) -> bool {
        let first = !std::mem::replace(&mut self.taken[want as usize], true);
        while self.next(order).is_some_and(|next| self.taken[next as usize]) {
            self.next += 1;
        }
        first
    }
}
