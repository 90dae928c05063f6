//! One request: neighbouring reads of one object, whose bytes one body brings.

use super::answer::Expected;
use super::queue::ReadQueue;
use super::range_read::RangeRead;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes between two reads that one body brings and nobody wants: they cost less than another request. A server sends
/// 85 MB/s on one connection, after 10 to 50 ms.
pub(super) const GAP: u64 = 1 << 20;
/// A read is told to have arrived when so many bytes of the one before it are missing, so that its place is there in time.
const AHEAD: u64 = 256 << 10;
/// Reads that are looked at in search of neighbours.
const LOOKED_AT: usize = 512;

/// Reads of one object in the order of their bytes, at least one.
pub(super) struct RangeRequest {
    pub(super) reads: VecDeque<RangeRead>,
    /// The bytes that were asked for. Later reads may have been taken away since.
    pub(super) asked: Range<u64>,
    /// The next byte of the body.
    pub(super) at: u64,
    /// Whether the request named the ETag.
    pub(super) pinned: bool,
}

/// What the next bytes of a body are.
pub(super) enum NextBytes {
    /// So many that nobody wants.
    Gap(u64),
    /// Those of the first read.
    Read,
    /// There are none that anybody wants.
    Nothing,
}

impl RangeRequest {
    /// Read number `first` of those that wait, with its neighbours up to `most` bytes.
    pub(super) fn take(waiting: &mut ReadQueue, first: usize, most: u64) -> Option<RangeRequest> {
        let read = waiting.take(first)?;
        let asked = read.missing();
        let mut fetch = RangeRequest { at: asked.start, asked, reads: VecDeque::from([read]), pinned: false };
        let mut at = first;
        while at < first + LOOKED_AT && fetch.asked.end - fetch.asked.start < most {
            let Some(next) = waiting.get(at) else { break };
            if fetch.takes(next, most) {
                fetch.asked.end = next.missing().end;
                fetch.reads.extend(waiting.take(at));
            } else {
                at += 1;
            }
        }
        Some(fetch)
    }

    /// Whether the body can bring this read too.
    fn takes(&self, next: &RangeRead, most: u64) -> bool {
        let Some(last) = self.reads.back() else { return false };
        let Range { start, end } = next.missing();
        let near = start >= self.asked.end && start - self.asked.end <= GAP && end - self.asked.start <= most;
        // A read that holds a slab never comes behind one that waits for one: all slabs could be held so.
        let no_wait = !next.holds_slab() || self.reads.iter().all(RangeRead::has_place);
        near && no_wait && next.object().is_some() && Arc::ptr_eq(&next.site, &last.site)
    }

    /// What is expected of the answer.
    pub(super) fn expected(&self) -> Expected {
        let object = self.reads.front().and_then(RangeRead::object).cloned();
        Expected { object, range: self.asked.clone() }
    }

    /// What comes next, and nothing of a read that is complete.
    pub(super) fn next(&self) -> NextBytes {
        let Some(first) = self.reads.front() else { return NextBytes::Nothing };
        match first.missing() {
            missing if missing.start > self.at => NextBytes::Gap(missing.start - self.at),
            _ => NextBytes::Read,
        }
    }

    /// The read whose arrival is to be told now: the one whose bytes come, or the next one if they come soon.
    pub(super) fn arriving(&mut self) -> Option<&mut RangeRead> {
        let told = |read: &RangeRead| read.arrived || read.has_place();
        let first = self.reads.front()?;
        let number = if told(first) { 1 } else { 0 };
        if number == 1 && (!first.has_place() || first.missing_bytes() > AHEAD) {
            return None;
        }
        self.reads.get_mut(number).filter(|read| !told(read))
    }

    /// Bytes of the body that are still to come, wanted or not.
    pub(super) fn left(&self) -> u64 {
        self.asked.end - self.at
    }

    /// Wanted bytes that are still to come.
    pub(super) fn wanted(&self) -> u64 {
        self.reads.iter().map(RangeRead::missing_bytes).sum()
    }

    /// Takes away the second half of the reads whose arrival was not told, if there are two or more reads.
    pub(super) fn split(&mut self) -> Option<RangeRequest> {
        let half = self.wanted() / 2;
        let mut kept = 0;
        let first = self.reads.iter().position(|read| {
            let is_first = kept == 0;
            let moves = kept >= half && !is_first && !read.arrived;
            kept += read.missing_bytes();
            moves
        })?;
        let reads = self.reads.split_off(first);
        let asked = reads.front()?.missing().start..reads.back()?.missing().end;
        Some(RangeRequest { at: asked.start, asked, reads, pinned: false })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::range_read::{BodyPlaces, Site};
    use super::super::request::Unsigned;
    use super::*;
    use crate::extent::{Route, Ticket};
    use crate::store::version::Version;

    /// How many of two or three neighbours one request takes. Of each: whether it has been told to have arrived, and whether it
    /// has a place.
    fn taken(reads: &[(bool, bool)]) -> usize {
        let site = Arc::new(Site::new("o".into(), "http://h/o".into(), Arc::new(Unsigned)));
        let mut waiting = ReadQueue::default();
        for (number, (arrived, placed)) in (0..).zip(reads) {
            let object = Some((100, Version::Strong("\"e\"".into())));
            let expected = Expected { object, range: number * 10..number * 10 + 10 };
            let places = placed.then(|| BodyPlaces::one(std::ptr::null_mut(), 10));
            let mut read = RangeRead::new(Ticket(number), Route::Buffered, site.clone(), expected, places);
            read.arrived = *arrived;
            waiting.add(read);
        }
        RangeRequest::take(&mut waiting, 0, 1000).unwrap().reads.len()
    }

    #[test]
    fn what_holds_a_slab_comes_behind_nothing_that_waits_for_one() {
        let (new, waits, holds, memory) = ((false, false), (true, false), (true, true), (false, true));
        for first in [new, waits] {
            assert_eq!(taken(&[first, holds]), 1);
            assert_eq!(taken(&[first, memory, holds]), 2, "nor behind two of them");
            assert_eq!(taken(&[first, new]), 2);
        }
        for first in [holds, memory] {
            assert_eq!(taken(&[first, holds]), 2);
            assert_eq!(taken(&[first, memory, holds]), 3);
            assert_eq!(taken(&[first, new, holds]), 2);
        }
    }
}
