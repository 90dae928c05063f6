//! The rows of wants, in the order of their offsets in a file.

use crate::plan::shares::Parcel;
use crate::plan::want::{Runs, Strips};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Evenly strided rows of one want that belong to the same span: one of its strips, or a part of one.
#[derive(Clone, Copy)]
pub(super) struct Atom {
    pub(super) want: u32,
    /// File offset of the first row.
    pub(super) start: u64,
    /// Bytes of each row.
    pub(super) len: u64,
    pub(super) rows: u64,
    /// Bytes from row to row in the file.
    pub(super) stride: u64,
    /// Dense offset of the first row within the want.
    pub(super) to: u64,
    /// Bytes from row to row within the want.
    pub(super) to_stride: u64,
}

impl Atom {
    fn row(want: u32, start: u64, len: u64, to: u64) -> Atom {
        Atom { want, start, len, rows: 1, stride: len, to, to_stride: len }
    }

    pub(super) fn end(&self) -> u64 {
        self.start + (self.rows - 1) * self.stride + self.len
    }

    /// The parts of it between `from` and `past` in the file: a cut row, whole rows, a cut row.
    pub(super) fn clip(&self, from: u64, past: u64, mut give: impl FnMut(Atom)) {
        let mut row = 0;
        if from > self.start {
            row = (from - self.start) / self.stride;
            let start = self.start + row * self.stride;
            if start + self.len > from && row < self.rows {
                let end = past.min(start + self.len);
                if start < from && from < end {
                    let (to, len) = (self.to + row * self.to_stride + (from - start), end - from);
                    give(Atom::row(self.want, from, len, to));
                    row += 1;
                }
            } else {
                row += 1;
            }
        }
        if row >= self.rows {
            return;
        }
        let start = self.start + row * self.stride;
        if start + self.len <= past {
            let rows = (self.rows - row).min((past - self.len - start) / self.stride + 1);
            give(Atom { start, rows, to: self.to + row * self.to_stride, ..*self });
            row += rows;
        }
        let start = self.start + row * self.stride;
        if row < self.rows && start < past {
            let (to, len) = (self.to + row * self.to_stride, past - start);
            give(Atom::row(self.want, start, len, to));
        }
    }
}

/// The atoms (strips) of wants that are sorted by file offset, in order of their offsets. Rows that are further apart
/// than `gap` come one by one, so that several wants can fill each other's gaps. At most one atom per want is held.
pub(super) struct Atoms<'a> {
    pub(super) runs: &'a [Runs],
    pub(super) wants: std::iter::Peekable<std::slice::Iter<'a, u32>>,
    pub(super) gap: u64,
    /// Strided wants in progress: file offset of the next atom, want, number of the next atom.
    pub(super) open: BinaryHeap<Reverse<(u64, u32, u64)>>,
}

impl Iterator for Atoms<'_> {
    type Item = Atom;

    fn next(&mut self) -> Option<Atom> {
        let runs = self.runs;
        while let Some(&&want) = self.wants.peek() {
            let r = &runs[want as usize];
            if self.open.peek().is_some_and(|o| o.0 .0 <= r.start) {
                break;
            }
            self.wants.next();
            if r.axes.is_empty() {
                return Some(Atom::row(want, r.start, r.len, 0));
            }
            self.open.push(Reverse((r.start, want, 0)));
        }
        let Reverse((start, want, number)) = self.open.pop()?;
        let r = &runs[want as usize];
        let strips = r.strips(self.gap);
        if number + 1 < strips.count {
            self.open.push(Reverse((r.offset(strips.first(number + 1)), want, number + 1)));
        }
        let Strips { runs: rows, stride, inner, .. } = strips;
        Some(Atom { want, start, len: r.len, rows, stride, to: strips.first(number) * r.len, to_stride: inner * r.len })
    }
}

/// The parts of an atom that lie in none of these parcels, which are in order.
pub(super) fn outside(parcels: &[Parcel], atom: Atom, mut give: impl FnMut(Atom)) {
    let (mut at, end) = (atom.start, atom.end());
    for parcel in &parcels[parcels.partition_point(|parcel| parcel.end <= at)..] {
        if parcel.start >= end {
            break;
        }
        if parcel.start > at {
            atom.clip(at, parcel.start, &mut give);
        }
        at = parcel.end;
    }
    if at < end {
        atom.clip(at, end, give);
    }
}

/// The parts of an atom that lie in one of these parcels, which are in order.
pub(super) fn inside(parcels: &[Parcel], atom: Atom, mut give: impl FnMut(Atom)) {
    let (start, end) = (atom.start, atom.end());
    for parcel in &parcels[parcels.partition_point(|parcel| parcel.end <= start)..] {
        if parcel.start >= end {
            break;
        }
        atom.clip(parcel.start.max(start), parcel.end.min(end), &mut give);
    }
}
