//! The pieces of one extent, and how many of them it can take.

use super::rules::Rules;
use crate::extent::Piece;
use crate::options::GPU_ALIGN;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Most pieces of one extent. This bounds the work of one read.
const PIECES: usize = 16 * 1024;
/// Most entries of one scattering read, gaps included: half of what one preadv takes (IOV_MAX is 1024).
pub(super) const SCATTER_ENTRIES: u64 = 512;

/// One past the last byte of a piece.
pub(super) fn end(piece: &Piece) -> u64 {
    piece.from + (piece.rows - 1) * piece.from_stride + piece.len
}

/// Appends a piece. If it continues the last piece, it becomes a part of it.
pub(super) fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    if let Some(last) = pieces.last_mut() {
        if last.want == piece.want && last.len == piece.len && piece.rows == 1 && piece.from >= end(last) {
            let (from, to) = (piece.from - last.from, piece.to.wrapping_sub(last.to));
            if last.rows == 1 && to == last.len {
                (last.rows, last.from_stride, last.to_stride) = (2, from, to);
                return;
            }
            if from == last.rows * last.from_stride && to == last.rows * last.to_stride {
                last.rows += 1;
                return;
            }
        }
    }
    pieces.push(piece);
}

/// Bytes that at least one of the pieces takes. The pieces are sorted by `from`.
pub(super) fn distinct(pieces: &[Piece]) -> u64 {
    // Strips of one want lie between each other and do not overlap.
    let one = pieces.windows(2).all(|p| p[0].want == p[1].want);
    if one || pieces.windows(2).all(|p| end(&p[0]) <= p[1].from) {
        return pieces.iter().map(Piece::nbytes).sum();
    }
    // Interleaved or overlapping: row by row, in order.
    let mut rows: BinaryHeap<_> = pieces.iter().zip(0..).map(|(p, i)| Reverse((p.from, i, 1))).collect();
    let (mut bytes, mut covered) = (0, 0);
    while let Some(Reverse((start, i, row))) = rows.pop() {
        let piece: &Piece = &pieces[i];
        let past = start + piece.len;
        bytes += past.saturating_sub(start.max(covered));
        covered = covered.max(past);
        if row < piece.rows {
            rows.push(Reverse((start + piece.from_stride, i, row + 1)));
        }
    }
    bytes
}

/// Running sums over the pieces of an extent.
#[derive(Clone, Default)]
pub(super) struct Sums {
    /// Where the extent starts.
    pub(super) base: u64,
    /// One past the last byte so far.
    pub(super) end: u64,
    /// Wanted bytes.
    pub(super) bytes: u64,
    /// Scatter entries, gaps included.
    pub(super) entries: u64,
    /// How far neighbours move apart in a slab.
    pub(super) moved: u64,
    /// Bytes that are contiguous at the destination of the last piece, if it is strided.
    pub(super) run: Option<u64>,
}

/// An extent's reason to refuse a piece.
pub(super) enum Stop {
    /// It must end here at the latest.
    At(u64),
    NoScatter,
}

impl Sums {
    /// `run`: bytes that are contiguous at the destination of the piece, if it is strided.
    pub(super) fn add(&mut self, piece: &Piece, last: Option<&Piece>, run: Option<u64>) {
        // Within one want, what follows in the file follows in the block.
        if let Some(last) = last.filter(|last| last.want != piece.want) {
            let last_to = last.to + (last.rows - 1) * last.to_stride + last.len;
            let apart = piece.to.checked_sub(last_to).filter(|d| *d < GPU_ALIGN && last.block == piece.block);
            self.moved += apart.map_or(GPU_ALIGN, |d| d.saturating_sub(piece.from.saturating_sub(end(last))));
        }
        let gap = u64::from(self.end != 0 && self.end != piece.from);
        let between = if piece.from_stride > piece.len { piece.rows - 1 } else { 0 };
        self.run = run;
        self.entries += piece.rows * self.per_row(piece) + between + gap;
        self.bytes += piece.nbytes();
        self.end = self.end.max(end(piece));
    }

    /// Entries of one row of the piece that was added last, at most.
    fn per_row(&self, piece: &Piece) -> u64 {
        match self.run {
            None => 1,
            Some(run) if piece.to % run == 0 && (piece.rows == 1 || piece.to_stride % run == 0) => {
                piece.len.div_ceil(run)
            }
            Some(run) => piece.len / run + 2,
        }
    }

    /// The reason to stop before `piece`, if it makes the extent too full. `before` is the state without the piece.
    pub(super) fn excess(
        &self,
        rules: &Rules,
        before: &Sums,
        piece: &Piece,
        pieces: usize,
        home: Option<u32>,
        scatter: Option<u64>,
    ) -> Option<Stop> {
        if pieces > PIECES {
            return Some(Stop::At(piece.from));
        }
        if home.is_some() {
            return None;
        }
        match scatter {
            None => (piece.from - self.base + self.moved > rules.extent).then_some(Stop::At(piece.from)),
            Some(_) if self.entries <= SCATTER_ENTRIES => None,
            Some(least) => {
                // As many rows as still fit, if they are then worth scattering.
                let spare = SCATTER_ENTRIES.saturating_sub(before.entries + 1);
                let per_row = self.per_row(piece);
                let gap = u64::from(piece.from_stride > piece.len);
                let rows = (spare / (per_row + gap)).min(piece.rows - 1);
                let entries = before.entries + (per_row + 1) * rows;
                // Or as many runs of the first row.
                let part = match self.run {
                    Some(run) if rows == 0 => (spare * run).saturating_sub(piece.to % run).min(piece.len),
                    _ => 0,
                };
                let entries = if part > 0 { entries + spare } else { entries };
                let worth = before.bytes + rows * piece.len + part >= entries.saturating_mul(least);
                Some(if worth { Stop::At(piece.from + rows * piece.from_stride + part) } else { Stop::NoScatter })
            }
        }
    }
}

/// Result of gathering the pieces of a range.
pub(super) enum Gathered {
    /// All are there; the number of scatter entries if they scatter.
    All(Option<u64>),
    /// There are too many: cut here, within the range.
    CutAt(u64),
    /// They are too small, too many or too interleaved to scatter.
    NoScatter,
}
