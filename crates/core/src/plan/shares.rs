//! Shares: which rank reads what, when several load one checkpoint together.
//!
//! It is pure: the checkpoint and what every rank wants are all that goes in, so every rank finds the same shares before a
//! byte moves. Where a file lies, what a page cache holds and how fast anything is are no input.
//!
//! What one rank alone wants it reads itself, straight to its place. The rest is cut into [`Parcel`]s. Each has one reader,
//! and goes from there to the other ranks that want bytes of it. Columns whose runs are too short for storage are read as
//! rows, by turns, so that several ranks with columns of one tensor read each row once.

use super::lists::{List, ListOfWants, Patterns, Reading};
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

/// The wants of all ranks. Equal ones are one list.
#[derive(Debug)]
pub struct RankWants<'a, L = Vec<Want>> {
    /// The lists of wants: each is one, or its bytes.
    pub lists: &'a [L],
    /// For each rank, the number of its list.
    pub of_rank: &'a [u32],
}

// Derived, they would ask the same of the lists.
impl<L> Clone for RankWants<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L> Copy for RankWants<'_, L> {}

impl<L> RankWants<'_, L> {
    /// # Errors
    /// `Invalid` if a rank's list does not exist.
    pub(super) fn check(&self) -> Result<()> {
        match self.of_rank.iter().find(|list| **list as usize >= self.lists.len()) {
            Some(list) => {
                let text = format!("a rank has list {list} of {}", self.lists.len());
                Err(Error::new(ErrorKind::Invalid, text))
            }
            None => Ok(()),
        }
    }
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
    /// The ranks that want bytes of it, as a number for [`Shares::audience`]. The reader is among them.
    audience: u32,
}

impl Parcel {
    /// The number of its audience: equal for parcels that the same ranks want.
    pub(crate) fn audience_number(&self) -> u32 {
        self.audience
    }
}

/// The part of a want that lies in one range of a file, as a range of the want's dense bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DensePart {
    /// Number of the want in its list.
    pub want: u32,
    /// The want's bytes in dense (row-major) order.
    pub dense: Range<u64>,
}

/// The reader of each shared byte. See the module's documentation.
#[derive(Debug, Clone)]
pub struct Shares {
    /// In order of file and offset, apart from each other.
    parcels: Vec<Parcel>,
    steps: Vec<Range<u32>>,
    audiences: Vec<Box<[u32]>>,
    patterns: Patterns,
    lists: Vec<List>,
    of_rank: Vec<u32>,
}

/// Bytes of a file that the same ranks want, or rows in which they want columns.
#[derive(Clone)]
pub(crate) struct Cell {
    pub(crate) file: u32,
    pub(crate) range: Range<u64>,
    pub(crate) audience: u32,
    /// How many ranks its audience has.
    pub(crate) ranks: u64,
}

impl Shares {
    /// Divides what the ranks want.
    ///
    /// # Errors
    /// The errors of [`Runs::of`]. `Limit` for slices that leave so many holes in one tensor that they would be 2^20 ranges.
    /// `Invalid` if a rank's list does not exist.
    pub fn new<L: ListOfWants>(checkpoint: &Checkpoint, wants: RankWants<'_, L>) -> Result<Shares> {
        Self::in_steps(checkpoint, wants, |cells| vec![cells])
    }

    /// The same in steps, which the ranks take one after the other: `divide` cuts what several of them want. Every rank has its
    /// part in each step. In the last one a rank reads less for others if it reads more for itself alone.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub(crate) fn in_steps<L: ListOfWants>(
        checkpoint: &Checkpoint,
        wants: RankWants<'_, L>,
        divide: impl FnOnce(Vec<Cell>) -> Vec<Vec<Cell>>,
    ) -> Result<Shares> {
        wants.check()?;
        let ranks_of = |list: usize| (0..).zip(wants.of_rank).filter(move |r| *r.1 as usize == list).map(|r| r.0);
        let mut reading = Reading::new(checkpoint);
        let lists = wants.lists.iter().enumerate();
        let lists = lists.map(|(number, list)| reading.list(&list.packed(), ranks_of(number).collect()));
        let lists = lists.collect::<Result<Vec<List>>>()?;
        let patterns = reading.patterns();
        let alone = vec![0; wants.of_rank.len()];
        let mut dividing = Dividing {
            patterns: &patterns,
            lists: &lists,
            known: HashMap::new(),
            audiences: Vec::new(),
            numbers: HashMap::new(),
            cells: Vec::new(),
            alone,
            apart: 0,
        };
        dividing.all_tensors(checkpoint)?;
        let Dividing { audiences, cells, alone, .. } = dividing;
        let of_rank = wants.of_rank.to_vec();
        let mut shares = Shares { parcels: Vec::new(), steps: Vec::new(), audiences, patterns, lists, of_rank };
        let (mut steps, nothing) = (divide(cells), vec![0; alone.len()]);
        let last = steps.pop().unwrap_or_default();
        steps.iter().for_each(|cells| shares.cut(cells, nothing.clone()));
        shares.cut(&last, alone);
        Ok(shares)
    }

    /// The numbers of the parcels of each step, in order. There is one step, except where the ranks try something.
    pub fn steps(&self) -> &[Range<u32>] {
        &self.steps
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.of_rank.len()
    }

    /// The ranges that one rank reads for itself and others, in order of file and offset.
    pub fn parcels(&self) -> &[Parcel] {
        &self.parcels
    }

    /// The parcels with these numbers in one file.
    pub(crate) fn parcels_of(&self, file: u32, numbers: &Range<u32>) -> &[Parcel] {
        let parcels = &self.parcels[numbers.start as usize..numbers.end as usize];
        let from = parcels.partition_point(|parcel| parcel.file < file);
        let past = parcels.partition_point(|parcel| parcel.file <= file);
        &parcels[from..past]
    }

    /// The ranks that want bytes of a parcel, ascending.
    pub fn audience(&self, parcel: &Parcel) -> &[u32] {
        &self.audiences[parcel.audience as usize]
    }

    /// An audience, by its number.
    pub(crate) fn audience_of(&self, number: u32) -> &[u32] {
        &self.audiences[number as usize]
    }

    /// The parts of a parcel that a rank wants, in the order in which they travel: by tensor, then by want.
    pub fn parts<'a>(
        &'a self,
        checkpoint: &Checkpoint,
        rank: u32,
        parcel: &Parcel,
    ) -> impl Iterator<Item = DensePart> + 'a {
        let (list, Parcel { start, end, .. }) = (&self.lists[self.of_rank[rank as usize] as usize], *parcel);
        let tensors = checkpoint.tensors_within(parcel.file, start..end);
        list.of(tensors).filter_map(move |want| {
            let (tensor, pattern) = list.want(want);
            let (runs, begin) = (self.patterns.runs(pattern), self.patterns.begin(tensor));
            let dense = runs.before(start.saturating_sub(begin))..runs.before(end.saturating_sub(begin));
            (!dense.is_empty()).then_some(DensePart { want, dense })
        })
    }

    /// Bytes of a parcel that some rank wants. Equal parts of several ranks count once. Where parts overlap and differ, each
    /// counts, so it may be too much.
    pub(crate) fn wanted(&self, checkpoint: &Checkpoint, parcel: &Parcel) -> u64 {
        let (mut lists, mut parts, mut sum) = (Vec::new(), Vec::new(), 0);
        for &rank in self.audience(parcel) {
            let list = self.of_rank[rank as usize];
            if lists.contains(&list) {
                continue;
            }
            lists.push(list);
            for part in self.parts(checkpoint, rank, parcel) {
                let want = self.lists[list as usize].want(part.want);
                if !parts.contains(&want) {
                    parts.push(want);
                    sum += part.dense.end - part.dense.start;
                }
            }
        }
        sum.min(parcel.end - parcel.start)
    }

    /// The runs of one of a rank's wants.
    pub fn runs(&self, rank: u32, want: u32) -> Runs {
        let (tensor, pattern) = self.lists[self.of_rank[rank as usize] as usize].want(want);
        let mut runs = self.patterns.runs(pattern).clone();
        runs.start += self.patterns.begin(tensor);
        runs
    }

    /// Cuts the cells of a step into parcels, and gives each a reader: the rank that has the fewest bytes to read so far.
    /// `to_read`: what each reads alone.
    fn cut(&mut self, cells: &[Cell], mut to_read: Vec<u64>) {
        let first = self.parcels.len() as u32;
        for cell in cells {
            let audience = &self.audiences[cell.audience as usize];
            let len = cell.range.end - cell.range.start;
            // As many turns for each: of 1,024 turns for 1,000 ranks 24 ranks would have two, and send twice as much as the others.
            let rounds = len.div_ceil(cell.ranks * TURN).max(1);
            let turn = len.div_ceil(cell.ranks * rounds).next_multiple_of(PAGE).clamp(LEAST_TURN, TURN);
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
        self.steps.push(first..self.parcels.len() as u32);
    }
}

/// The tensors, being divided into what one rank wants and what several want.
struct Dividing<'a> {
    patterns: &'a Patterns,
    lists: &'a [List],
    /// How tensors are divided that are wanted in the same way.
    known: HashMap<Box<[WantedBy]>, Box<[Portion]>>,
    audiences: Vec<Box<[u32]>>,
    /// The number of each audience.
    numbers: HashMap<Box<[u32]>, u32>,
    /// The ranges that several ranks want, in order.
    cells: Vec<Cell>,
    /// Bytes that each rank alone wants.
    alone: Vec<u64>,
    /// The last cell ends before bytes that one rank alone wants, if it was the last one when there were so many.
    apart: usize,
}

/// A want of a tensor: the number of its list, and its pattern.
type WantedBy = (u32, u32);

/// A part of a tensor: for one rank, or shared.
#[derive(Clone)]
enum Portion {
    /// A rank wants so many bytes, which nobody else wants.
    Alone(u32, u64),
    /// An audience wants a range, which is counted from the first byte of the tensor.
    Shared(u32, Range<u64>),
}

/// The division of a tensor into more parts than this is not kept for the next one that is like it.
const KEPT: usize = 64;

impl Dividing<'_> {
    fn all_tensors(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        // The lists, each at its next want in order of the tensors.
        let (lists, patterns) = (self.lists, self.patterns);
        let mut at: Vec<usize> = vec![0; lists.len()];
        let of_somebody: Vec<usize> = (0..at.len()).filter(|list| !lists[*list].ranks.is_empty()).collect();
        let mut wanted: Vec<WantedBy> = Vec::new();
        let tensor_at = |list: usize, place: usize| {
            let list = &lists[list];
            (place < list.len()).then(|| list.want(list.in_order(place)))
        };
        let mut next: Vec<Option<(u32, u32)>> = (0..at.len()).map(|list| tensor_at(list, 0)).collect();
        while let Some(tensor) = of_somebody.iter().filter_map(|list| Some(next[*list]?.0)).min() {
            wanted.clear();
            for &list in &of_somebody {
                while let Some((_, pattern)) = next[list].filter(|next| next.0 == tensor) {
                    if patterns.runs(pattern).len > 0 {
                        wanted.push((list as u32, pattern));
                    }
                    at[list] += 1;
                    next[list] = tensor_at(list, at[list]);
                }
            }
            if wanted.is_empty() {
                continue;
            }
            let file = checkpoint.tensor(tensor).file;
            if let Some(given) = self.known.get(&wanted[..]) {
                let given = given.clone();
                given.iter().for_each(|given| self.give(file, tensor, given.clone()));
                continue;
            }
            let given = self.tensor(checkpoint, tensor, &wanted)?;
            if given.len() <= KEPT {
                self.known.insert(wanted.as_slice().into(), given.as_slice().into());
            }
            given.into_iter().for_each(|given| self.give(file, tensor, given));
        }
        Ok(())
    }

    /// Divides a tensor.
    fn tensor(&mut self, checkpoint: &Checkpoint, tensor: u32, wanted: &[WantedBy]) -> Result<Vec<Portion>> {
        let (lists, patterns) = (self.lists, self.patterns);
        let first = &lists[wanted[0].0 as usize].ranks;
        let of = |wanted: &WantedBy| patterns.runs(wanted.1);
        if first.len() == 1 && wanted.iter().all(|w| w.0 == wanted[0].0) {
            return Ok(vec![Portion::Alone(first[0], wanted.iter().map(|w| of(w).nbytes()).sum())]);
        }
        let too_many = || {
            let info = checkpoint.tensor(tensor);
            let text = format!(
                "the slices of tensor {} leave more than {MOST_RANGES} holes that nobody wants: load it in parts, or load what \
                 lies between and slice that in memory",
                quoted(info.name)
            );
            let path = &checkpoint.files()[info.file as usize].spelled;
            Error::new(ErrorKind::Limit, text).at(path).of_tensor(info.name)
        };
        let mut found = Vec::new();
        let strided = |runs: &Runs| !runs.axes.is_empty();
        if wanted.iter().map(of).any(|runs| strided(runs) && runs.len < LONG_RUN) {
            let all: Vec<&Runs> = wanted.iter().map(of).collect();
            for range in together(&all).ok_or_else(too_many)? {
                let there = |runs: &Runs| runs.before(range.end) > runs.before(range.start);
                let lists: Vec<u32> = wanted.iter().filter(|w| there(of(w))).map(|w| w.0).collect();
                found.push(self.given(range, &lists));
            }
            return Ok(found);
        }
        // Each run on its own: what begins and ends where.
        let mut edges: Vec<(u64, bool, u32)> = Vec::new();
        for w in wanted {
            let runs = of(w);
            for number in 0..runs.count() {
                let start = runs.offset(number);
                edges.extend([(start, true, w.0), (start + runs.len, false, w.0)]);
            }
        }
        edges.sort_unstable();
        let (mut open, mut at): (Vec<u32>, u64) = (Vec::new(), 0);
        for (offset, begins, list) in edges {
            if offset > at && !open.is_empty() {
                found.push(self.given(at..offset, &open));
            }
            at = offset;
            if begins {
                open.push(list);
            } else if let Some(i) = open.iter().position(|&one| one == list) {
                open.swap_remove(i);
            }
        }
        Ok(found)
    }

    /// These lists have wants in a range.
    fn given(&mut self, range: Range<u64>, lists: &[u32]) -> Portion {
        let mut ranks: Vec<u32> =
            lists.iter().flat_map(|&list| self.lists[list as usize].ranks.iter().copied()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        if let [rank] = ranks[..] {
            return Portion::Alone(rank, range.end - range.start);
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
        Portion::Shared(audience, range)
    }

    /// Gives a part of a tensor.
    fn give(&mut self, file: u32, tensor: u32, given: Portion) {
        let (audience, range) = match given {
            Portion::Alone(rank, nbytes) => {
                self.alone[rank as usize] += nbytes;
                self.apart = self.cells.len();
                return;
            }
            Portion::Shared(audience, Range { start, end }) => {
                let begin = self.patterns.begin(tensor);
                (audience, begin + start..begin + end)
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
            _ => {
                let ranks = self.audiences[audience as usize].len() as u64;
                self.cells.push(Cell { file, range, audience, ranks });
            }
        }
    }
}

/// The ranges of one tensor that hold all runs of these wants, without the holes that are worth skipping; `None` if there are
/// too many.
fn together(wanted: &[&Runs]) -> Option<Vec<Range<u64>>> {
    if let Some(range) = columns(wanted) {
        return Some(vec![range]);
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut left = MOST_RANGES;
    for runs in wanted {
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
fn columns(wanted: &[&Runs]) -> Option<Range<u64>> {
    let &[rows] = &wanted[0].axes[..] else { return None };
    if wanted.iter().any(|runs| runs.axes[..] != [rows]) {
        return None;
    }
    let (count, stride) = rows;
    let mut columns: Vec<Range<u64>> = wanted.iter().map(|runs| runs.start..runs.start + runs.len).collect();
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
