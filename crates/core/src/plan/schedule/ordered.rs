//! The extents of a load, in the order in which they are read.

use super::limits::{FileTraits, Limits};
use crate::extent::{ByLane, Extent, Piece};
use crate::plan::layout::Layout;
use std::ops::Range;

/// Storage devices interleave within this many extents if the order is not that of the files.
const WINDOW: u64 = 64;

/// The extents to read, in order.
#[derive(Debug, Clone, Default)]
pub struct Schedule {
    /// In order of submission.
    pub extents: Vec<Extent>,
    /// Pieces of all extents.
    pub pieces: Vec<Piece>,
    /// For each want, the number of extents that bring bytes of it (0 for an empty tensor).
    pub extents_of_want: Vec<u32>,
    /// For each block, the first block of its stretch. The mirror blocks of a stretch lie in memory as they lie in the file,
    /// so that one read can land in several of them: all of a mapped file, and in private memory those whose distance is
    /// within the gap that is read.
    pub stretches: Vec<u32>,
    /// The extents of each section, in order ([`Section`](super::Section)).
    pub(crate) sections: Vec<Range<usize>>,
}

impl Schedule {
    /// The pieces of an extent.
    pub fn pieces_of(&self, extent: &Extent) -> &[Piece] {
        &self.pieces[extent.pieces.start as usize..extent.pieces.end as usize]
    }

    /// Orders the extents by the first want that needs them, and interleaves storage devices.
    ///
    /// In a stream they interleave within half a window. What another device brings before its turn waits for the consumer,
    /// and the next tensor must still find room. So nothing of another device comes between the extents of a tensor that
    /// began in an earlier stretch: such a tensor may fill the window alone.
    pub(super) fn sort(&mut self, layout: &Layout, files: &[FileTraits], in_file_order: bool, limits: &Limits) {
        if self.extents.len() < 2 {
            return;
        }
        let mut rank = vec![0u32; layout.order.len()];
        for (at, &want) in (0..).zip(&layout.order) {
            rank[want as usize] = at;
        }
        let extents = std::mem::take(&mut self.extents);
        let first = |e: &Extent| self.pieces_of(e).iter().map(|p| rank[p.want as usize]).min();
        let mut keyed: Vec<_> = extents.into_iter().map(|e| (first(&e), e)).collect();
        if !keyed.is_sorted_by_key(|k| k.0) {
            keyed.sort_by_key(|k| k.0);
        }

        let storage = |e: &Extent| files[e.file as usize].storage;
        if keyed.windows(2).all(|e| storage(&e[0].1) == storage(&e[1].1)) {
            self.extents = keyed.into_iter().map(|k| k.1).collect();
            return;
        }
        let most = if in_file_order { u64::MAX } else { limits.extent.saturating_mul(WINDOW) };
        let most = limits.window.map_or(most, |window| most.min(window / 2));
        let mut rest = keyed.into_iter().peekable();
        // The first want of the last extent of the stretch before.
        let mut before = None;
        while let Some(&(begun, _)) = rest.peek() {
            let continued = limits.window.is_some() && before == Some(begun);
            let mut bytes = 0u64;
            let mut queues: Vec<(u32, Vec<Extent>)> = Vec::new();
            let within = |bytes: u64, e: &(Option<u32>, Extent)| {
                bytes == 0 || (bytes.saturating_add(e.1.len) <= most && (!continued || e.0 == begun))
            };
            while let Some((first, e)) = rest.next_if(|e| within(bytes, e)) {
                before = Some(first);
                bytes += e.len;
                let device = storage(&e);
                match queues.iter_mut().find(|q| q.0 == device) {
                    Some(queue) => queue.1.push(e),
                    None => queues.push((device, vec![e])),
                }
            }
            self.interleave(queues);
        }
    }

    /// Appends the queues' extents so that at every moment each queue has given about the same share of its bytes.
    fn interleave(&mut self, queues: Vec<(u32, Vec<Extent>)>) {
        let mut queues: Vec<_> = queues
            .into_iter()
            .map(|(_, q)| (0u64, q.iter().map(|e| e.len).sum::<u64>(), q.into_iter().peekable()))
            .collect();
        loop {
            let mut behind: Option<(usize, u128, u128)> = None;
            for (i, (given, total, queue)) in queues.iter_mut().enumerate() {
                if queue.peek().is_none() {
                    continue;
                }
                let (given, total) = (u128::from(*given), u128::from(*total));
                behind = match behind {
                    Some((j, g, t)) if g * total <= given * t => Some((j, g, t)),
                    _ => Some((i, given, total)),
                };
            }
            let Some((i, ..)) = behind else { return };
            let (given, _, queue) = &mut queues[i];
            if let Some(e) = queue.next() {
                *given += e.len;
                self.extents.push(e);
            }
        }
    }

    /// Sums over all extents.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for e in &self.extents {
            totals.lanes.count(e.lane, e.bytes_read());
            totals.wanted += e.wanted;
            totals.slack += e.slack;
            totals.gap += e.bytes_read().saturating_sub(e.wanted + e.slack);
        }
        totals
    }
}

/// The reads of a schedule, in sum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes and extents by lane.
    pub lanes: ByLane,
    /// Distinct wanted bytes.
    pub wanted: u64,
    /// Alignment slack in bytes, part of it past the end of the files.
    pub slack: u64,
    /// Extra bytes between wanted ones that are read, not skipped.
    pub gap: u64,
}
