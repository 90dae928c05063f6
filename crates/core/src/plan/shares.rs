//! Shares: which rank reads what, when several load one checkpoint together.
//!
//! It is pure: the checkpoint and what every rank wants are all that goes in, so every rank finds the same shares before a
//! byte moves. Where a file lies, what a page cache holds and how fast anything is are no input.
//!
//! What one rank alone wants it reads itself, straight to its place. The rest is cut into [`Parcel`]s. Each has one reader,
//! and goes from there to the other ranks that want bytes of it. Columns whose runs are too short for storage are read as
//! rows, by turns, so that several ranks with columns of one tensor read each row once.

use super::want::{Runs, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{quoted, Checkpoint};
use crate::options::{KIB, LEAST_GAP, MIB, PAGE};
use hashbrown::HashMap;
use std::ops::Range;

/// Most bytes of a parcel: it is read by one I/O into one slab.
pub(crate) const PARCEL: u64 = MIB;
/// Most bytes that one rank reads in a row before it is another one's turn: the longest request that stores are sent.
const TURN: u64 = 16 * MIB;
/// Fewest bytes of a turn. Less is not divided: shorter reads cost every store more than they bring.
const LEAST_TURN: u64 = 256 * KIB;
/// Runs of at least this many bytes are read where they lie: the pages at both ends are then less than a hundredth.
const LONG_RUN: u64 = 512 * KIB;
/// Ranges that one tensor may be cut into.
const MOST_RANGES: u64 = 1 << 20;

/// What all ranks want: ranks that want the same share one list.
#[derive(Debug, Clone, Copy)]
pub struct Party<'a> {
    /// The lists of wants.
    pub lists: &'a [Vec<Want>],
    /// For each rank, the number of its list.
    pub of_rank: &'a [u32],
}

/// A range of a file that one rank reads for itself and others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parcel {
    /// The file.
    pub file: u32,
    /// First byte in the file.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// The rank that reads it.
    pub reader: u32,
    /// Who wants bytes of it, as a number for [`Shares::audience`]. The reader is among them.
    audience: u32,
}

impl Parcel {
    /// The number of its audience: equal for parcels that the same ranks want.
    pub(crate) fn audience_number(&self) -> u32 {
        self.audience
    }
}

/// DensePart of a want that lies in a range of the file: dense bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DensePart {
    /// Number of the want in its list.
    pub want: u32,
    /// The want's bytes in dense (row-major) order.
    pub dense: Range<u64>,
}

/// Who reads what. See the module's documentation.
#[derive(Debug, Clone)]
pub struct Shares {
    /// In order of file and offset, apart from each other.
    parcels: Vec<Parcel>,
    audiences: Vec<Box<[u32]>>,
    lists: Vec<List>,
    of_rank: Vec<u32>,
}

/// A list of wants, to be looked up by tensor.
#[derive(Debug, Clone)]
struct List {
    /// (tensor, want), ascending.
    by_tensor: Vec<(u32, u32)>,
    /// In order of the wants.
    runs: Vec<Runs>,
    /// The ranks that have this list, ascending.
    ranks: Box<[u32]>,
}

impl List {
    fn new(checkpoint: &Checkpoint, wants: &[Want], ranks: Box<[u32]>) -> Result<List> {
        let mut by_tensor: Vec<(u32, u32)> = wants.iter().map(|want| want.tensor).zip(0..).collect();
        by_tensor.sort_unstable();
        let runs = wants.iter().map(|want| Runs::of(checkpoint, want)).collect::<Result<_>>()?;
        Ok(List { by_tensor, runs, ranks })
    }

    /// The wants of these tensors: (tensor, want).
    fn of(&self, tensors: Range<u32>) -> &[(u32, u32)] {
        let from = self.by_tensor.partition_point(|w| w.0 < tensors.start);
        let past = self.by_tensor.partition_point(|w| w.0 < tensors.end);
        &self.by_tensor[from..past]
    }
}

/// Bytes of a file that the same ranks want, or rows in which they want columns.
struct Cell {
    file: u32,
    range: Range<u64>,
    audience: u32,
}

impl Shares {
    /// Divides what the ranks want.
    ///
    /// # Errors
    /// Those of [`Runs::of`]. `Limit` for slices that leave so many holes in one tensor that they would be 2^20 ranges.
    /// `Invalid` if a rank's list does not exist.
    pub fn new(checkpoint: &Checkpoint, party: Party<'_>) -> Result<Shares> {
        if let Some(list) = party.of_rank.iter().find(|list| **list as usize >= party.lists.len()) {
            let text = format!("a rank has list {list} of {}", party.lists.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let ranks_of = |list: usize| (0..).zip(party.of_rank).filter(move |r| *r.1 as usize == list).map(|r| r.0);
        let lists = party.lists.iter().enumerate();
        let lists = lists.map(|(number, wants)| List::new(checkpoint, wants, ranks_of(number).collect()));
        let lists = lists.collect::<Result<Vec<List>>>()?;
        let alone = vec![0; party.of_rank.len()];
        let mut dividing = Dividing {
            lists: &lists,
            audiences: Vec::new(),
            numbers: HashMap::new(),
            cells: Vec::new(),
            alone,
            apart: 0,
        };
        dividing.all_tensors(checkpoint)?;
        let Dividing { audiences, cells, alone, .. } = dividing;
        let mut shares = Shares { parcels: Vec::new(), audiences, lists, of_rank: party.of_rank.to_vec() };
        shares.cut(&cells, alone);
        Ok(shares)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.of_rank.len()
    }

    /// What is read by one rank for itself and others, in order of file and offset.
    pub fn parcels(&self) -> &[Parcel] {
        &self.parcels
    }

    /// Those of one file.
    pub(crate) fn parcels_of(&self, file: u32) -> &[Parcel] {
        let from = self.parcels.partition_point(|parcel| parcel.file < file);
        let past = self.parcels.partition_point(|parcel| parcel.file <= file);
        &self.parcels[from..past]
    }

    /// The ranks that want bytes of a parcel, ascending.
    pub fn audience(&self, parcel: &Parcel) -> &[u32] {
        &self.audiences[parcel.audience as usize]
    }

    /// An audience, by its number.
    pub(crate) fn audience_of(&self, number: u32) -> &[u32] {
        &self.audiences[number as usize]
    }

    /// What a rank wants of a parcel: in the order in which it travels, which is that of the tensors, then of the wants.
    pub fn parts<'a>(
        &'a self,
        checkpoint: &Checkpoint,
        rank: u32,
        parcel: &Parcel,
    ) -> impl Iterator<Item = DensePart> + 'a {
        let (list, Parcel { start, end, .. }) = (&self.lists[self.of_rank[rank as usize] as usize], *parcel);
        let tensors = checkpoint.tensors_within(parcel.file, start..end);
        list.of(tensors).iter().filter_map(move |&(_, want)| {
            let runs = &list.runs[want as usize];
            let dense = runs.before(start)..runs.before(end);
            (!dense.is_empty()).then_some(DensePart { want, dense })
        })
    }

    /// The runs of one of a rank's wants.
    pub fn runs(&self, rank: u32, want: u32) -> &Runs {
        &self.lists[self.of_rank[rank as usize] as usize].runs[want as usize]
    }

    /// Cuts the cells into parcels, and gives each a reader: the rank that has the fewest bytes to read so far. `to_read`: what
    /// each reads alone.
    fn cut(&mut self, cells: &[Cell], mut to_read: Vec<u64>) {
        for cell in cells {
            let audience = &self.audiences[cell.audience as usize];
            let len = cell.range.end - cell.range.start;
            // As many turns for each: of 1,024 turns for 1,000 ranks 24 ranks would have two, and send twice as much as the others.
            let ranks = audience.len() as u64;
            let rounds = len.div_ceil(ranks * TURN).max(1);
            let turn = len.div_ceil(ranks * rounds).next_multiple_of(PAGE).clamp(LEAST_TURN, TURN);
            let mut at = cell.range.start;
            while at < cell.range.end {
                let end = (at / PAGE * PAGE + turn).min(cell.range.end);
                let reader = audience.iter().copied().min_by_key(|&rank| (to_read[rank as usize], rank)).unwrap_or(0);
                to_read[reader as usize] += end - at;
                while at < end {
                    let past = (at / PAGE * PAGE + PARCEL).min(end);
                    let Cell { file, audience, .. } = *cell;
                    self.parcels.push(Parcel { file, start: at, end: past, reader, audience });
                    at = past;
                }
            }
        }
    }
}

/// The tensors, being divided into what one rank wants and what several want.
struct Dividing<'a> {
    lists: &'a [List],
    audiences: Vec<Box<[u32]>>,
    /// Of each audience.
    numbers: HashMap<Box<[u32]>, u32>,
    /// What several want, in order.
    cells: Vec<Cell>,
    /// Bytes that each rank alone wants.
    alone: Vec<u64>,
    /// The last cell ends before bytes that one rank alone wants, if it was the last one when there were so many.
    apart: usize,
}

/// A want of a tensor: the number of its list, and its runs.
type WantedBy<'a> = (u32, &'a Runs);

impl Dividing<'_> {
    fn all_tensors(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let lists = self.lists;
        let mut all: Vec<(u32, u32, u32)> = Vec::new();
        for (number, list) in (0..).zip(lists).filter(|(_, list)| !list.ranks.is_empty()) {
            all.extend(list.by_tensor.iter().map(|&(tensor, want)| (tensor, number, want)));
        }
        all.sort_unstable();
        let mut wanted: Vec<WantedBy<'_>> = Vec::new();
        for chunk in all.chunk_by(|a, b| a.0 == b.0) {
            wanted.clear();
            let runs = chunk.iter().map(|&(_, list, want)| (list, &lists[list as usize].runs[want as usize]));
            wanted.extend(runs.filter(|(_, runs)| runs.len > 0));
            if !wanted.is_empty() {
                self.tensor(checkpoint, chunk[0].0, &wanted)?;
            }
        }
        Ok(())
    }

    fn tensor(&mut self, checkpoint: &Checkpoint, tensor: u32, wanted: &[WantedBy<'_>]) -> Result<()> {
        let info = checkpoint.tensor(tensor);
        let first = &self.lists[wanted[0].0 as usize].ranks;
        if first.len() == 1 && wanted.iter().all(|w| w.0 == wanted[0].0) {
            let rank = first[0];
            wanted.iter().for_each(|(_, runs)| self.alone[rank as usize] += runs.nbytes());
            self.apart = self.cells.len();
            return Ok(());
        }
        let too_many = || {
            let text = format!(
                "the slices of tensor {} leave more than {MOST_RANGES} holes that nobody wants: load it in parts, or load what \
                 lies between and slice that in memory",
                quoted(info.name)
            );
            let path = &checkpoint.files()[info.file as usize].spelled;
            Error::new(ErrorKind::Limit, text).at(path).of_tensor(info.name)
        };
        let strided = |runs: &Runs| !runs.axes.is_empty();
        if wanted.iter().any(|(_, runs)| strided(runs) && runs.len < LONG_RUN) {
            for range in together(wanted).ok_or_else(too_many)? {
                let there = |runs: &Runs| runs.before(range.end) > runs.before(range.start);
                let lists: Vec<u32> = wanted.iter().filter(|(_, runs)| there(runs)).map(|w| w.0).collect();
                self.give(info.file, range, &lists);
            }
            return Ok(());
        }
        // Each run on its own: what begins and ends where.
        let mut edges: Vec<(u64, bool, u32)> = Vec::new();
        for &(list, runs) in wanted {
            for number in 0..runs.count() {
                let start = runs.offset(number);
                edges.extend([(start, true, list), (start + runs.len, false, list)]);
            }
        }
        edges.sort_unstable();
        let (mut open, mut at): (Vec<u32>, u64) = (Vec::new(), 0);
        for (offset, begins, list) in edges {
            if offset > at && !open.is_empty() {
                self.give(info.file, at..offset, &open);
            }
            at = offset;
            if begins {
                open.push(list);
            } else if let Some(i) = open.iter().position(|&one| one == list) {
                open.swap_remove(i);
            }
        }
        Ok(())
    }

    /// These lists have wants in a range.
    fn give(&mut self, file: u32, range: Range<u64>, lists: &[u32]) {
        let mut ranks: Vec<u32> =
            lists.iter().flat_map(|&list| self.lists[list as usize].ranks.iter().copied()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        if let [rank] = ranks[..] {
            self.alone[rank as usize] += range.end - range.start;
            self.apart = self.cells.len();
            return;
        }
        let audience = match self.numbers.get(&ranks[..]) {
            Some(number) => *number,
            None => {
                let (number, ranks) = (self.audiences.len() as u32, ranks.into_boxed_slice());
                self.audiences.push(ranks.clone());
                self.numbers.insert(ranks, number);
                number
            }
        };
        let together = self.apart < self.cells.len();
        match self.cells.last_mut() {
            Some(last)
                if together
                    && (last.file, last.audience) == (file, audience)
                    && range.start.saturating_sub(last.range.end) <= LEAST_GAP =>
            {
                last.range.end = last.range.end.max(range.end);
            }
            _ => self.cells.push(Cell { file, range, audience }),
        }
    }
}

/// The ranges of one tensor that hold all runs of these wants, without the holes that are worth skipping; `None` if there are
/// too many.
fn together(wanted: &[WantedBy<'_>]) -> Option<Vec<Range<u64>>> {
    if let Some(range) = columns(wanted) {
        return Some(vec![range]);
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut left = MOST_RANGES;
    for (_, runs) in wanted {
        // Axes whose steps are near enough are one range.
        let (mut span, mut outer) = (runs.len, runs.axes.len());
        while let Some(&(count, stride)) = runs.axes[..outer].last().filter(|axis| axis.1 - span <= LEAST_GAP) {
            span += (count - 1) * stride;
            outer -= 1;
        }
        let starts = Runs { start: runs.start, len: span, axes: runs.axes[..outer].to_vec() };
        left = left.checked_sub(starts.count())?;
        ranges.extend((0..starts.count()).map(|number| starts.offset(number)).map(|start| start..start + span));
    }
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start.saturating_sub(last.end) <= LEAST_GAP => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    Some(merged)
}

/// One range, if the wants are columns of the same rows that leave no hole worth skipping.
fn columns(wanted: &[WantedBy<'_>]) -> Option<Range<u64>> {
    let &[rows] = &wanted[0].1.axes[..] else { return None };
    if wanted.iter().any(|(_, runs)| runs.axes[..] != [rows]) {
        return None;
    }
    let (count, stride) = rows;
    let mut columns: Vec<Range<u64>> = wanted.iter().map(|(_, runs)| runs.start..runs.start + runs.len).collect();
    columns.sort_unstable_by_key(|range| range.start);
    let (start, mut end) = (columns[0].start, columns[0].start);
    for range in &columns {
        if range.start.saturating_sub(end) > LEAST_GAP {
            return None;
        }
        end = end.max(range.end);
    }
    ((start + stride).saturating_sub(end) <= LEAST_GAP).then_some(start..end + (count - 1) * stride)
}
