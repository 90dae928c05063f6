//! One request: neighbouring reads of one object, whose bytes one body brings.

use super::queue::ReadQueue;
use super::range_read::{RangeRead, MOST_PLACES};
use crate::store::remote::http::answer::Expected;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// A read is told to have arrived when so many bytes of the one before it are missing, so that its place is there in time.
const AHEAD: u64 = 256 << 10;
/// Reads that are looked at in search of neighbours.
const LOOKED_AT: usize = 512;

/// Reads of one object in the order of their bytes, at least one.
pub(in crate::store::remote) struct RangeRequest {
    pub(super) reads: VecDeque<RangeRead>,
    /// The bytes that were asked for. Later reads may have been taken away since.
    pub(super) asked: Range<u64>,
    /// The next byte of the body.
    pub(super) at: u64,
    /// Whether the request named the ETag.
    pub(super) pinned: bool,
}

/// The use of a body's next bytes.
pub(in crate::store::remote) enum NextBytes {
    /// Bytes that nobody wants.
    Gap(u64),
    /// Bytes of the first read.
    Read,
    /// There are no bytes that anybody wants.
    Nothing,
}

impl RangeRequest {
    /// Read number `first` of those that wait, with its neighbours up to `most` bytes, with at most `gap` between two.
    pub(super) fn take(waiting: &mut ReadQueue, first: usize, most: u64, gap: u64) -> Option<RangeRequest> {
        let mut read = waiting.take(first)?;
        read.begin();
        let asked = read.missing();
        let mut fetch = RangeRequest { at: asked.start, asked, reads: VecDeque::from([read]), pinned: false };
        let mut at = first;
        while at < first + LOOKED_AT && fetch.asked.end - fetch.asked.start < most {
            let Some(next) = waiting.get(at) else { break };
            if fetch.takes(next, most, gap) {
                fetch.asked.end = next.missing().end;
                fetch.reads.extend(waiting.take(at));
            } else {
                at += 1;
            }
        }
        Some(fetch)
    }

    /// Whether the body can bring this read too.
    fn takes(&self, next: &RangeRead, most: u64, gap: u64) -> bool {
        let Some(last) = self.reads.back() else { return false };
        let Range { start, end } = next.missing();
        let near = start >= self.asked.end && start - self.asked.end <= gap && end - self.asked.start <= most;
        // A read that holds a slab, or gets one, never comes behind one that waits for one: all slabs could be held so.
        let no_wait = !next.arrived || self.reads.iter().all(RangeRead::has_place);
        near && no_wait && next.object().is_some() && Arc::ptr_eq(&next.site, &last.site)
    }

    /// The answer that is expected.
    pub(super) fn expected(&self) -> Expected {
        let object = self.reads.front().and_then(RangeRead::object).cloned();
        Expected { object, range: self.asked.clone() }
    }

    /// The use of the next bytes. A read that is complete gets none.
    pub(super) fn next(&self) -> NextBytes {
        let Some(first) = self.reads.front() else { return NextBytes::Nothing };
        match first.missing() {
            missing if missing.start > self.at => NextBytes::Gap(missing.start - self.at),
            _ => NextBytes::Read,
        }
    }

    /// Where the next bytes go: what lies between reads to `discard`, and those of reads to their places, up to the first
    /// read without. Larger receives send fewer acknowledgements: in pieces of 1 MiB they cost a quarter more processor time.
    pub(super) fn places(&self, discard: &mut [u8], out: &mut Vec<libc::iovec>) {
        let mut at = self.at;
        for read in &self.reads {
            let missing = read.missing();
            let mut gap = missing.start.saturating_sub(at).min(self.asked.end - at) as usize;
            while gap > 0 && out.len() < MOST_PLACES {
                let iov_len = gap.min(discard.len());
                out.push(libc::iovec { iov_base: discard.as_mut_ptr().cast(), iov_len });
                gap -= iov_len;
            }
            // The body may end within the read.
            let end = missing.end.min(self.asked.end);
            match &read.places {
                Some(places) if gap == 0 && missing.start < end && places.next(end - missing.start, discard, out) => {
                    at = end
                }
                _ => return,
            }
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
    use super::*;
    use crate::extent::{Lane, Ticket};
    use crate::store::remote::http::answer::GAP;
    use crate::store::remote::http::request::WebRequests;
    use crate::store::version::Version;

    /// How many of two or three neighbours one request takes. For each neighbour: whether its arrival has been told,
    /// and whether it has a place.
    fn taken(reads: &[(bool, bool)]) -> usize {
        let site = Arc::new(Site::new("o".into(), "http://h/o".into(), Arc::new(WebRequests(None))));
        let mut waiting = ReadQueue::default();
        for (number, (arrived, placed)) in (0..).zip(reads) {
            let object = Some((100, Version::Strong("\"e\"".into())));
            let expected = Expected { object, range: number * 10..number * 10 + 10 };
            let places = placed.then(|| BodyPlaces::one(std::ptr::null_mut(), 10));
            let mut read = RangeRead::new(Ticket(number), Lane::NETWORK, site.clone(), expected, places);
            read.arrived = *arrived;
            waiting.add(read);
        }
        RangeRequest::take(&mut waiting, 0, 1000, GAP).unwrap().reads.len()
    }

    #[test]
    fn a_request_takes_what_is_no_further_than_the_gap() {
        let taken = |gap: u64| {
            let site = Arc::new(Site::new("o".into(), "http://h/o".into(), Arc::new(WebRequests(None))));
            let mut waiting = ReadQueue::default();
            for (number, start) in (0..).zip([0, 10, 30]) {
                let object = Some((100, Version::Strong("\"e\"".into())));
                let expected = Expected { object, range: start..start + 10 };
                let places = Some(BodyPlaces::one(std::ptr::null_mut(), 10));
                waiting.add(RangeRead::new(Ticket(number), Lane::NETWORK, site.clone(), expected, places));
            }
            let request = RangeRequest::take(&mut waiting, 0, 1000, gap).unwrap();
            (request.reads.len(), request.asked)
        };
        assert_eq!((taken(0), taken(9)), ((2, 0..20), (2, 0..20)));
        assert_eq!(taken(10), (3, 0..40));
    }

    #[test]
    fn one_receive_fills_the_places_of_several_reads() {
        let site = Arc::new(Site::new("o".into(), "http://h/o".into(), Arc::new(WebRequests(None))));
        let memory = [0u8; 100];
        let read = |from: u64, to: u64, into: Option<*mut u8>| {
            let object = Some((100, Version::Strong("\"e\"".into())));
            let places = into.map(|at| BodyPlaces::one(at, (to - from) as usize));
            let expected = Expected { object, range: from..to };
            RangeRead::new(Ticket(from), Lane::NETWORK, site.clone(), expected, places)
        };
        let at = |number: usize| Some(memory.as_ptr().wrapping_add(number).cast_mut());
        let reads =
            VecDeque::from([read(10, 20, at(0)), read(20, 30, at(50)), read(55, 60, at(10)), read(60, 70, None)]);
        let mut fetch = RangeRequest { at: 10, asked: 10..70, reads, pinned: false };
        let places = |fetch: &RangeRequest| {
            let (mut discard, mut out) = ([0; 10], Vec::new());
            fetch.places(&mut discard, &mut out);
            let discarded = discard.as_ptr() as usize;
            let offset = |base: usize| if base == discarded { -1 } else { (base - memory.as_ptr() as usize) as isize };
            out.iter().map(|place| (offset(place.iov_base as usize), place.iov_len)).collect::<Vec<_>>()
        };
        assert_eq!(places(&fetch), [(0, 10), (50, 10), (-1, 10), (-1, 10), (-1, 5), (10, 5)]);
        // The first read has three bytes.
        fetch.reads[0].received(3);
        fetch.at = 13;
        assert_eq!(places(&fetch)[..2], [(3, 7), (50, 10)]);
        // Its place has not come: nothing behind it can be received.
        fetch.reads[1].places = None;
        assert_eq!(places(&fetch), [(3, 7)]);
        // The end of a body may be a gap.
        fetch.reads = VecDeque::from([read(69, 70, at(0))]);
        (fetch.at, fetch.asked) = (60, 60..65);
        assert_eq!(places(&fetch)[0], (-1, 5));
    }

    #[test]
    fn what_holds_a_slab_comes_behind_nothing_that_waits_for_one() {
        let (new, waits, holds, memory) = ((false, false), (true, false), (true, true), (false, true));
        for first in [new, waits] {
            assert_eq!(taken(&[first, holds]), 1);
            assert_eq!(taken(&[first, waits]), 1, "it may get one first");
            assert_eq!(taken(&[first, memory, holds]), 2, "nor behind two of them");
            assert_eq!(taken(&[first, new]), 2);
        }
        for first in [holds, memory] {
            assert_eq!(taken(&[first, holds]), 2);
            assert_eq!(taken(&[first, waits]), 2);
            assert_eq!(taken(&[first, memory, holds]), 3);
            assert_eq!(taken(&[first, new, holds]), 2);
        }
    }
}
