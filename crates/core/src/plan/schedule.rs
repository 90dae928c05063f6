//! Schedule: the extents to read, in order, cut and coalesced, each with its lane and its pieces.
//!
//! File by file, the runs of all wants are merged in order of their offsets and coalesced into spans. A span is divided
//! where its lane or landing changes, and each part is cut into extents. Every division falls on a page of the file
//! (or on the larger unit of O_DIRECT), and runs that touch the same page are in the same span. So no page is read
//! twice, and the extra bytes of a read in place never belong to another want. There are two exceptions. Of a file that is
//! both mapped and read the mapped bytes are populated separately. Short rows that the page cache holds have extents of
//! their own, which are read row by row: their gaps need no bound, because long ones are skipped.

use super::layout::{BlockKind, Layout};
use super::shares::{BothWays, Parcel, Shares};
use super::strides::Strides;
use super::want::{Runs, Strips, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{ByLane, ByRows, Extent, InCommon, Landing, Lane, Piece};
use crate::format::{quoted, Checkpoint};
use crate::options::{GPU_ALIGN, HUGE_PAGE, KIB, MIB, PAGE};
use crate::rows;
use crate::way::{Through, Way};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// What the schedule needs to know of a file, apart from the checkpoint.
#[derive(Debug, Clone, Default)]
pub struct FileTraits {
    /// Number of the storage device; extents of different devices interleave.
    pub storage: u32,
    /// Bytes that offsets and lengths of reads in whole units must be multiples of; `None` if it has no such reads.
    pub unit: Option<u64>,
    /// Sorted, disjoint byte ranges whose pages are resident.
    pub resident: Vec<Range<u64>>,
    /// The way that was decided for it.
    pub way: Way,
    /// Most bytes of one extent of it, at most [`Limits::extent`], which holds where this is `None`.
    pub extent: Option<u64>,
    /// The gap of this file; [`Limits::gap`] holds where this is `None`.
    pub gap: Option<u64>,
    /// Set if short rows of it are read row by row: the page cache of this machine holds all that is wanted. Gaps of at most
    /// so many bytes between them are read.
    pub rows: Option<u64>,
}

impl FileTraits {
    fn extent(&self, limits: &Limits) -> u64 {
        self.extent.unwrap_or(limits.extent)
    }

    fn gap(&self, limits: &Limits) -> u64 {
        self.gap.unwrap_or(limits.gap)
    }
}

/// Limits of a schedule, from the options and the machine.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most bytes of one extent (a multiple of the page size).
    pub extent: u64,
    /// Extra bytes between two runs are read, not skipped, up to this many.
    pub gap: u64,
    /// Buffered extents into CPU memory scatter to their places if rows (and the gaps between them) average at least
    /// this many wanted bytes. Smaller rows go through a slab, because an iovec costs more than a copy. `None`:
    /// everything that does not land in place goes through a slab.
    pub scatter: Option<u64>,
    /// O_DIRECT may land in blocks. Else it goes through slabs, which no forked child inherits.
    pub direct_in_place: bool,
    /// Most bytes read ahead of the consumer of a stream; `None` where nobody takes anything before the end.
    pub window: Option<u64>,
}

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
    /// Set if the load finds out what several ranks of it exchange.
    pub(crate) sections: Option<Sections>,
}

/// The extents of a load that finds out whether to exchange what several ranks want ([`BothWays`](super::shares::BothWays)):
/// what comes before a time counts, what is tried together, what is tried alone, then each stretch of the rest twice, with
/// exchange and without. One of the two is left out. The stretches end where the ranks look again, and at the end of the load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sections {
    /// One past the last extent of what comes before a time counts.
    pub(crate) first: usize,
    /// One past the last one of what is tried together.
    pub(crate) together: usize,
    /// One past the last one of what is tried alone.
    pub(crate) alone: usize,
    /// Of each stretch of the rest.
    pub(crate) rest: Vec<TwoWays>,
}

/// The extents of a stretch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TwoWays {
    pub(crate) exchanged: Range<usize>,
    pub(crate) alone: Range<usize>,
}

/// What several ranks want of a checkpoint, and which of them plans.
#[derive(Clone, Copy)]
pub struct OneOfRanks<'a> {
    /// Who reads what.
    pub shares: &'a Shares,
    /// The rank whose schedule it is.
    pub rank: u32,
}

/// Most pieces of one extent. This bounds the work of one read.
const PIECES: usize = 16 * 1024;
/// Most entries of one scattering read, gaps included: half of what one preadv takes (IOV_MAX is 1024).
const SCATTER_ENTRIES: u64 = 512;
/// If fewer in-place bytes than this lie beside bytes that go through a slab, they go through the slab too: copying
/// them costs less than a separate read.
const IN_PLACE: u64 = 64 * KIB;
/// Resident stretches shorter than this are read with the cold bytes around them: two more reads cost more than they
/// save.
const RESIDENT: u64 = 64 * KIB;
/// Mapping resident pages moves no byte and touches no page. With extents this large, the cost of handing them out (20
/// us each) does not matter.
const RESIDENT_MAPPED: u64 = 1024 * MIB;
/// Rows of resident bytes are read one by one if they are shorter. An extent for each costs a few us, as much as copying
/// some 10 KiB.
const SHORT_ROW: u64 = 256 * KIB;
/// If the order jumps by more than this many extents' bytes, neighbours in the file are not read together: that would
/// bring bytes long before their turn. In a stream a quarter of the window is enough for that.
const JUMP: u64 = 16;
/// Storage devices interleave within this many extents if the order is not that of the files.
const WINDOW: u64 = 64;

/// Most strips of one want: each is a separate copy, and takes 64 bytes of memory during the load.
const MOST_STRIPS: u64 = 1 << 24;

impl Schedule {
    /// Refuses slices with more strips than a schedule can list (kind `Limit`). So many strips, further apart than the
    /// default `gap`, need a file of at least 256 GiB. Strips that are nearer need dimensions, and steps, that no model has.
    pub fn check(
        checkpoint: &Checkpoint,
        wants: &[Want],
        layout: &Layout,
        files: &[FileTraits],
        limits: &Limits,
    ) -> Result<()> {
        for (want, runs) in wants.iter().zip(&layout.runs).filter(|(_, runs)| !runs.axes.is_empty()) {
            let info = checkpoint.tensor(want.tensor);
            let strips = runs.strips(files[info.file as usize].gap(limits)).count;
            if strips > MOST_STRIPS {
                let text = format!(
                    "a slice of tensor {} has {strips} pieces in its file, and one load takes at most {MOST_STRIPS}: load it in parts, \
                     load a part without gaps and slice that in memory, or raise `gap`, so that neighbours are read together",
                    quoted(info.name)
                );
                let path = &checkpoint.files()[info.file as usize].spelled;
                return Err(Error::new(ErrorKind::Limit, text).at(path).of_tensor(info.name));
            }
        }
        Ok(())
    }

    /// Cuts, coalesces, routes and orders the runs of `layout`. `files` has one entry per file of the checkpoint.
    ///
    /// Extents are cut from the start of each coalesced stretch, at multiples of the page size in the file, as long as
    /// `limits.extent` allows. The last two share the rest evenly, so that no short tail costs a read. An extent that
    /// goes through a slab leaves room there: neighbours of a block can be moved apart to the distance that they have
    /// in the block. The sum of those moves, each less than [`GPU_ALIGN`], plus `len` is at most `limits.extent`. A
    /// single page is the exception.
    pub fn new(checkpoint: &Checkpoint, layout: &Layout, files: &[FileTraits], limits: &Limits) -> Schedule {
        Self::make(checkpoint, layout, files, limits, None)
    }

    /// The same for one rank of several. What several want are parcels, which are extents of their own, in slabs: those that this
    /// rank reads stand in the order with the rest. Those that others read come first (of a section, where the ranks find out
    /// whether to exchange), in the lane of ranks.
    pub fn together(
        checkpoint: &Checkpoint,
        layout: &Layout,
        files: &[FileTraits],
        limits: &Limits,
        ranks: &OneOfRanks<'_>,
    ) -> Schedule {
        Self::make(checkpoint, layout, files, limits, Some(ranks))
    }

    fn make(
        checkpoint: &Checkpoint,
        layout: &Layout,
        files: &[FileTraits],
        limits: &Limits,
        ranks: Option<&OneOfRanks<'_>>,
    ) -> Schedule {
        let count = layout.runs.len();
        let by_file = layout.by_file();
        let in_file_order = layout.order == by_file;
        let mut plan = Making {
            layout,
            by_file,
            in_file_order,
            schedule: Schedule {
                extents_of_want: vec![0; count],
                stretches: stretches(layout, files, limits),
                ..Schedule::default()
            },
            last_extent: vec![u32::MAX; count],
            turn: if in_file_order { Vec::new() } else { turns(layout) },
            atoms: Vec::new(),
            breaks: Vec::new(),
            next: 0,
            carry: Vec::new(),
            scratch: Vec::new(),
            ranks,
            alone: Alone::All,
            made: 0,
            into_memory: limits.scatter.is_some(),
        };
        let all = ranks.map_or(0, |ranks| ranks.shares.parcels().len() as u32);
        let Some(both) = ranks.and_then(|ranks| ranks.shares.both_ways()).cloned() else {
            plan.section(checkpoint, files, limits, (Alone::Outside(0..all), 0..all));
            return plan.schedule;
        };
        let past = both.end();
        let BothWays { first, together, alone, looks, .. } = both;
        let end = |plan: &Making<'_>| plan.schedule.extents.len();
        plan.section(checkpoint, files, limits, (Alone::Inside(first), 0..0));
        let mut sections = Sections { first: end(&plan), ..Sections::default() };
        plan.section(checkpoint, files, limits, (Alone::Inside(0..0), together));
        sections.together = end(&plan);
        plan.section(checkpoint, files, limits, (Alone::Inside(alone), 0..0));
        sections.alone = end(&plan);
        let looks =
            looks.into_iter().map(|(look, _)| [(Alone::Inside(0..0), look.clone()), (Alone::Inside(look), 0..0)]);
        let last = [(Alone::Outside(0..all), past..all), (Alone::Outside(0..past), 0..0)];
        for [exchanged, alone] in looks.chain([last]) {
            let start = end(&plan);
            plan.section(checkpoint, files, limits, exchanged);
            let middle = end(&plan);
            plan.section(checkpoint, files, limits, alone);
            sections.rest.push(TwoWays { exchanged: start..middle, alone: middle..end(&plan) });
        }
        plan.schedule.sections = Some(sections);
        plan.schedule
    }
    /// Orders the extents by the first want that needs them, and interleaves storage devices.
    ///
    /// In a stream they interleave within half a window. What another device brings before its turn waits for the consumer,
    /// and the next tensor must still find room. So nothing of another device comes between the extents of a tensor that
    /// began in an earlier stretch: such a tensor may fill the window alone.
    fn sort(&mut self, layout: &Layout, files: &[FileTraits], in_file_order: bool, limits: &Limits) {
        let mut rank = vec![0u32; layout.order.len()];
        for (at, &want) in (0..).zip(&layout.order) {
            rank[want as usize] = at;
        }
        let pieces = &self.pieces;
        let first = |e: &Extent| {
            pieces[e.pieces.start as usize..e.pieces.end as usize].iter().map(|p| rank[p.want as usize]).min()
        };
        let mut keyed: Vec<_> = std::mem::take(&mut self.extents).into_iter().map(|e| (first(&e), e)).collect();
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

/// What a schedule reads, in sum.
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

/// Whether rows of the file are wanted that are short, and not contiguous.
fn has_short_rows(runs: &Runs) -> bool {
    !runs.axes.is_empty() && runs.len < SHORT_ROW
}

/// See [`Schedule::stretches`].
fn stretches(layout: &Layout, files: &[FileTraits], limits: &Limits) -> Vec<u32> {
    let mut first: Vec<u32> = (0..layout.blocks.len() as u32).collect();
    let mut mirrors: Vec<(u32, u64, u64, u32)> = Vec::new();
    for (number, block) in (0..).zip(&layout.blocks) {
        if let BlockKind::Mirror { file, start } = block.kind {
            mirrors.push((file, start, start + block.nbytes, number));
        }
    }
    mirrors.sort_unstable();
    for pair in mirrors.windows(2) {
        let ((file, _, end, before), (other, start, _, block)) = (pair[0], pair[1]);
        let traits = &files[file as usize];
        if file == other && (traits.way.is_mapped() || start.saturating_sub(end) <= traits.gap(limits)) {
            first[block as usize] = first[before as usize];
        }
    }
    first
}

/// For each want: how many bytes come before it in the order.
fn turns(layout: &Layout) -> Vec<u64> {
    let mut turns = vec![0; layout.order.len()];
    let mut at = 0;
    for &want in &layout.order {
        turns[want as usize] = at;
        at += layout.runs[want as usize].nbytes();
    }
    turns
}

/// Rules for all extents of one file that are read alike.
struct Rules {
    file: u32,
    /// Divisions are at multiples of this in the file, and whole multiples are read where that is allowed.
    unit: u64,
    /// Cuts are at multiples of this if an extent is long enough; a multiple of `unit`.
    step: u64,
    /// Most bytes of an extent, a multiple of `unit`.
    extent: u64,
    gap: u64,
    direct_in_place: bool,
    window: Option<u64>,
    cold: Lane,
    warm: Lane,
    /// Lane of what those two cannot bring.
    parts: Lane,
    /// Sorted, disjoint, on whole units, none of them shorter than [`RESIDENT`].
    resident: Vec<Range<u64>>,
    /// Whether the page cache holds all that is wanted (mapped files only).
    all_resident: bool,
    scatter: Option<u64>,
    /// Whether mirror blocks are read in place. Their padding is only one page.
    in_place: bool,
    /// Set if rows are read one by one: the longest gap that is read.
    rows: Option<u64>,
}

impl Rules {
    fn mapped(file: u32, lane: Lane, traits: &FileTraits, limits: &Limits, span: Range<u64>) -> Rules {
        let all_resident = traits.resident.iter().any(|r| r.start <= span.start && r.end >= span.end);
        let extent = traits.extent(limits);
        let extent = if all_resident { extent.max(RESIDENT_MAPPED) } else { extent };
        Rules {
            file,
            unit: PAGE,
            step: if extent >= HUGE_PAGE { HUGE_PAGE } else { PAGE },
            extent: (extent / PAGE * PAGE).max(PAGE),
            gap: traits.gap(limits),
            direct_in_place: limits.direct_in_place,
            window: limits.window,
            cold: lane,
            warm: lane,
            parts: lane,
            resident: Vec::new(),
            all_resident,
            scatter: None,
            in_place: true,
            rows: None,
        }
    }

    fn read(file: u32, traits: &FileTraits, limits: &Limits, size: u64) -> Rules {
        let most = traits.extent(limits);
        let units = match traits.unit {
            Some(align) if align != 0 && PAGE % align == 0 => Some(PAGE),
            Some(align) if align % PAGE == 0 && align != 0 && align <= most => Some(align),
            _ => None,
        };
        // A file without a unit that suits is read in parts of any length.
        let usable = |lane: Lane| if lane.whole_units && units.is_none() { traits.way.parts } else { lane };
        let (cold, warm) = (usable(traits.way.cold), usable(traits.way.warm));
        let unit = units.filter(|_| cold.whole_units || warm.whole_units).unwrap_or(PAGE);
        let mut resident: Vec<Range<u64>> = Vec::new();
        if cold != warm {
            for r in &traits.resident {
                // A partly resident unit counts as cold. The exception is the end of the file.
                let end = if r.end >= size { r.end.next_multiple_of(unit) } else { r.end / unit * unit };
                let start = r.start.next_multiple_of(unit);
                match resident.last_mut() {
                    Some(last) if start <= last.end => last.end = last.end.max(end),
                    _ if start < end => resident.push(start..end),
                    _ => {}
                }
            }
            resident.retain(|r| r.end - r.start >= RESIDENT);
        }
        let extent = (most / unit * unit).max(unit);
        let gap = traits.gap(limits);
        let scatter = limits.scatter.or(cold.lands_on_device().then_some(PAGE));
        let all_resident = false;
        Rules {
            file,
            unit,
            step: if traits.way.through == Through::HugePages && unit == PAGE && extent >= HUGE_PAGE {
                HUGE_PAGE
            } else {
                unit
            },
            extent,
            gap,
            direct_in_place: limits.direct_in_place,
            window: limits.window,
            cold,
            warm,
            parts: traits.way.parts,
            resident,
            all_resident,
            scatter,
            in_place: unit == PAGE,
            rows: None,
        }
    }

    /// For short rows that are read one by one. Gaps need no bound: long ones are skipped.
    fn rows(file: u32, traits: &FileTraits, limits: &Limits, size: u64, gap: u64) -> Rules {
        let extent = (traits.extent(limits) / PAGE * PAGE).max(PAGE);
        let read = Rules::read(file, traits, limits, size);
        Rules {
            unit: PAGE,
            step: PAGE,
            extent,
            gap: u64::MAX,
            cold: traits.way.parts,
            warm: traits.way.parts,
            resident: Vec::new(),
            scatter: None,
            in_place: false,
            rows: Some(gap),
            ..read
        }
    }

    /// The lane of a read that lands in a slab.
    fn by_slab(&self, lane: Lane) -> Lane {
        if lane.lands_on_device() {
            self.parts
        } else {
            lane
        }
    }

    fn down(&self, at: u64) -> u64 {
        at / self.unit * self.unit
    }

    fn up(&self, at: u64) -> u64 {
        at.next_multiple_of(self.unit)
    }
}

/// Evenly strided rows of one want that belong to the same span: one of its strips, or a part of one.
#[derive(Clone, Copy)]
struct Atom {
    want: u32,
    /// File offset of the first row.
    start: u64,
    /// Bytes of each row.
    len: u64,
    rows: u64,
    /// Bytes from row to row in the file.
    stride: u64,
    /// Dense offset of the first row within the want.
    to: u64,
    /// Bytes from row to row within the want.
    to_stride: u64,
}

impl Atom {
    fn end(&self) -> u64 {
        self.start + (self.rows - 1) * self.stride + self.len
    }

    /// The parts of it between `from` and `past` in the file: a cut row, whole rows, a cut row.
    fn clip(&self, from: u64, past: u64, mut give: impl FnMut(Atom)) {
        let mut row = 0;
        if from > self.start {
            row = (from - self.start) / self.stride;
            let start = self.start + row * self.stride;
            if start + self.len > from && row < self.rows {
                let end = past.min(start + self.len);
                if start < from && from < end {
                    let (to, len) = (self.to + row * self.to_stride + (from - start), end - from);
                    give(Atom { start: from, len, rows: 1, stride: len, to, to_stride: len, ..*self });
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
            give(Atom { start, len, rows: 1, stride: len, to, to_stride: len, ..*self });
        }
    }
}

/// The atoms (strips) of wants that are sorted by file offset, in order of their offsets. Rows that are further apart
/// than `gap` come one by one, so that several wants can fill each other's gaps. At most one atom per want is held.
struct Atoms<'a> {
    runs: &'a [Runs],
    wants: std::iter::Peekable<std::slice::Iter<'a, u32>>,
    gap: u64,
    /// Strided wants in progress: file offset of the next atom, want, number of the next atom.
    open: BinaryHeap<Reverse<(u64, u32, u64)>>,
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
                return Some(Atom {
                    want,
                    start: r.start,
                    len: r.len,
                    rows: 1,
                    stride: r.len,
                    to: 0,
                    to_stride: r.len,
                });
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
fn outside(parcels: &[Parcel], atom: Atom, mut give: impl FnMut(Atom)) {
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
fn inside(parcels: &[Parcel], atom: Atom, mut give: impl FnMut(Atom)) {
    let (start, end) = (atom.start, atom.end());
    for parcel in &parcels[parcels.partition_point(|parcel| parcel.end <= start)..] {
        if parcel.start >= end {
            break;
        }
        atom.clip(parcel.start.max(start), parcel.end.min(end), &mut give);
    }
}

/// What a rank reads for itself alone, by the numbers of parcels.
enum Alone {
    All,
    /// What lies in none of these.
    Outside(Range<u32>),
    /// What lies in one of these.
    Inside(Range<u32>),
}

/// A schedule that is being made.
struct Making<'a> {
    layout: &'a Layout,
    /// The wants in order of files and offsets, and whether they are handed out in this order.
    by_file: Vec<u32>,
    in_file_order: bool,
    schedule: Schedule,
    /// The last extent that brought bytes of each want.
    last_extent: Vec<u32>,
    /// Bytes before each want in the order; empty where the order is that of the files.
    turn: Vec<u64>,
    /// The span being built, sorted by start, and file offsets at which it must be cut.
    atoms: Vec<Atom>,
    breaks: Vec<u64>,
    /// From here, the atoms of the span lie completely ahead. Of those before, the ones in `carry` are not done.
    next: usize,
    carry: Vec<usize>,
    /// Pieces of the extent that is being built; `from` is counted from the start of the file.
    scratch: Vec<Piece>,
    ranks: Option<&'a OneOfRanks<'a>>,
    /// What this rank reads for itself alone.
    alone: Alone,
    /// Extents that were made.
    made: u32,
    /// Whether bytes that arrive can be written to their places: memory of the host.
    into_memory: bool,
}

impl Making<'_> {
    /// Whether what `gather` has collected goes to memory that is contiguous, and of the same dtype.
    fn is_dense(&self) -> bool {
        self.scratch.iter().all(|piece| self.layout.strides_of(piece.want).is_none())
    }

    fn kind(&self, want: u32) -> BlockKind {
        self.layout.blocks[self.layout.places[want as usize].block as usize].kind
    }

    /// The stretch in which the bytes of `want` keep the file's offset within a page, if there is one.
    fn home(&self, rules: &Rules, want: u32) -> Option<u32> {
        match self.kind(want) {
            BlockKind::Mirror { .. } if rules.in_place => {
                Some(self.schedule.stretches[self.layout.places[want as usize].block as usize])
            }
            _ => None,
        }
    }

    /// Appends extents: for what this rank reads for itself alone, and for the parcels with these numbers.
    fn section(
        &mut self,
        checkpoint: &Checkpoint,
        files: &[FileTraits],
        limits: &Limits,
        (alone, exchanged): (Alone, Range<u32>),
    ) {
        let layout = self.layout;
        let before = std::mem::take(&mut self.schedule.extents);
        self.alone = alone;
        let (mut mapped, mut read, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let by_file = std::mem::take(&mut self.by_file);
        for wants in by_file.chunk_by(|a, b| layout.files[*a as usize] == layout.files[*b as usize]) {
            let file = layout.files[wants[0] as usize];
            // There are many sections, and most lie in few files.
            let among = match (&self.alone, self.ranks) {
                (Alone::Inside(numbers), Some(ranks)) => match ranks.shares.parcels_of(file, numbers) {
                    [] => continue,
                    [only] => only.start..only.end,
                    [first, .., last] => first.start..last.end,
                },
                _ => 0..u64::MAX,
            };
            let wanted = |want: u32| {
                let runs = &layout.runs[want as usize];
                runs.len > 0 && runs.start < among.end && runs.end() > among.start
            };
            mapped.clear();
            read.clear();
            rows.clear();
            let traits = &files[file as usize];
            for &want in wants.iter().filter(|&&want| wanted(want)) {
                match self.kind(want) {
                    BlockKind::Mirror { .. } if traits.way.is_mapped() => mapped.push(want),
                    BlockKind::Mirror { .. } => read.push(want),
                    _ if traits.rows.is_some() && has_short_rows(&layout.runs[want as usize]) => rows.push(want),
                    _ => read.push(want),
                }
            }
            let size = checkpoint.files()[file as usize].size;
            let start = mapped.first().map_or(0, |&w| layout.runs[w as usize].start);
            let end = mapped.iter().map(|&w| layout.runs[w as usize].end()).max().unwrap_or(0);
            if let Some(lane) = traits.way.mapping {
                self.file(&Rules::mapped(file, lane, traits, limits, start..end), &mapped);
            }
            self.file(&Rules::read(file, traits, limits, size), &read);
            if let Some(gap) = traits.rows {
                self.file(&Rules::rows(file, traits, limits, size, gap), &rows);
            }
        }
        self.by_file = by_file;
        if let Some(ranks) = self.ranks {
            self.parcels(checkpoint, files, limits, ranks, exchanged.clone(), true);
        }
        self.schedule.sort(layout, files, self.in_file_order, limits);
        let own = std::mem::replace(&mut self.schedule.extents, before);
        if let Some(ranks) = self.ranks {
            // What comes from others is asked for first.
            self.parcels(checkpoint, files, limits, ranks, exchanged, false);
        }
        self.schedule.extents.extend(own);
    }

    fn file(&mut self, rules: &Rules, wants: &[u32]) {
        let layout = self.layout;
        let atoms =
            Atoms { runs: &layout.runs, wants: wants.iter().peekable(), gap: rules.gap, open: BinaryHeap::new() };
        let Some(ranks) = self.ranks else { return self.spans(rules, atoms) };
        let mut alone = Vec::new();
        match &self.alone {
            Alone::All => alone.extend(atoms),
            Alone::Outside(numbers) => {
                let parcels = ranks.shares.parcels_of(rules.file, numbers);
                atoms.for_each(|atom| outside(parcels, atom, |part| alone.push(part)));
            }
            Alone::Inside(numbers) => {
                let parcels = ranks.shares.parcels_of(rules.file, numbers);
                atoms.for_each(|atom| inside(parcels, atom, |part| alone.push(part)));
            }
        }
        alone.sort_by_key(|atom| atom.start);
        self.spans(rules, alone.into_iter());
    }

    fn spans(&mut self, rules: &Rules, atoms: impl Iterator<Item = Atom>) {
        let layout = self.layout;
        let jump = rules.window.map_or(u64::MAX, |window| window / 4).min(rules.extent.saturating_mul(JUMP));
        let (mut end, mut before) = (0u64, 0..0);
        for atom in atoms {
            if !self.atoms.is_empty()
                && atom.start > end.saturating_add(rules.gap)
                && rules.down(atom.start) >= rules.up(end)
            {
                self.span(rules, end);
                end = 0;
            }
            if let Some(&from) = self.turn.get(atom.want as usize) {
                let turn = from..from + layout.runs[atom.want as usize].nbytes();
                let away = turn.start.saturating_sub(before.end).max(before.start.saturating_sub(turn.end));
                if !self.atoms.is_empty() && away > jump {
                    self.breaks.push(rules.up(end));
                }
                before = turn;
            }
            end = end.max(atom.end());
            self.atoms.push(atom);
        }
        if !self.atoms.is_empty() {
            self.span(rules, end);
        }
    }

    /// Divides the span by landing, lane and breaks, and empties it.
    fn span(&mut self, rules: &Rules, end: u64) {
        self.next = 0;
        self.carry.clear();
        let breaks = std::mem::take(&mut self.breaks);
        let mut breaks_left = breaks.iter().copied().peekable();
        for (part, home) in self.landings(rules, end) {
            let mut at = part.start;
            while at < part.end {
                let resident = &rules.resident[rules.resident.partition_point(|r| r.end <= at)..];
                let (lane, mut past) = match resident.first() {
                    Some(r) if r.start <= at => (rules.warm, r.end),
                    Some(r) => (rules.cold, r.start),
                    None => (rules.cold, u64::MAX),
                };
                while breaks_left.next_if(|b| *b <= at).is_some() {}
                past = past.min(part.end).min(breaks_left.peek().map_or(u64::MAX, |b| *b));
                self.cut(rules, at..past, home, lane);
                at = past;
            }
        }
        self.atoms.clear();
        self.breaks = breaks;
        self.breaks.clear();
    }

    /// Divides the span into parts that land in one block in place and parts that do not. If both meet within a unit,
    /// the unit does not land in place.
    fn landings(&self, rules: &Rules, end: u64) -> Vec<(Range<u64>, Option<u32>)> {
        let start = self.atoms[0].start;
        let mut homes: Vec<(Range<u64>, u32)> = Vec::new();
        let mut others: Vec<Range<u64>> = Vec::new();
        for atom in &self.atoms {
            match self.home(rules, atom.want) {
                Some(block) => match homes.last_mut() {
                    Some(last) if last.1 == block => last.0.end = last.0.end.max(atom.end()),
                    _ => homes.push((atom.start..atom.end(), block)),
                },
                None => {
                    let range = rules.down(atom.start)..rules.up(atom.end());
                    match others.last_mut() {
                        Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                        _ => others.push(range),
                    }
                }
            }
        }
        let mut parts = Vec::new();
        let mut at = start;
        let mut keep = |from: u64, past: u64, block: u32| {
            if past > from && (past - from >= IN_PLACE || others.is_empty()) {
                if from > at {
                    parts.push((at..from, None));
                }
                parts.push((from..past, Some(block)));
                at = past;
            }
        };
        let mut other = others.iter().peekable();
        for (range, block) in homes {
            let mut from = range.start;
            while other.next_if(|o| o.end <= from).is_some() {}
            while let Some(o) = other.peek().filter(|o| o.start < range.end) {
                keep(from, o.start, block);
                from = o.end;
                if o.end >= range.end {
                    break;
                }
                other.next();
            }
            keep(from, range.end, block);
        }
        if at < end {
            parts.push((at..end, None));
        }
        parts
    }

    /// Cuts a part of the span, alike in landing and lane, into extents.
    fn cut(&mut self, rules: &Rules, part: Range<u64>, home: Option<u32>, lane: Lane) {
        let home = home.filter(|_| !lane.whole_units || lane.is_mapping() || rules.direct_in_place);
        let whole_units = lane.whole_units;
        let (mut at, end) =
            if whole_units { (rules.down(part.start), rules.up(part.end)) } else { (part.start, part.end) };
        while at < end {
            let left = end - at;
            let step = rules.step;
            let furthest = (at + rules.extent) / step * step;
            let mut past = match left {
                _ if left <= rules.extent => end,
                _ if left < 2 * rules.extent => (at + left / 2).next_multiple_of(step).min(furthest),
                _ => furthest,
            };
            let scatters = lane.scatters && (self.into_memory || lane.lands_on_device());
            let mut scatter = rules.scatter.filter(|_| scatters && home.is_none());
            let entries = loop {
                match self.gather(rules, at, past.min(part.end), home, scatter) {
                    Gathered::All(entries) => break entries,
                    Gathered::CutAt(cut) => past = cut,
                    Gathered::NoScatter => scatter = None,
                }
            };
            let landing = match (home, entries) {
                _ if rules.rows.is_some() && self.into_memory && self.is_dense() => Landing::Scatter,
                (Some(block), _) if lane.is_mapping() => Landing::Mapping { block, resident: rules.all_resident },
                (Some(block), ..) => Landing::Block { block },
                (None, Some(_)) => Landing::Scatter,
                (None, None) => Landing::Slab,
            };
            self.emit(rules, lane, landing);
            let (atoms, next, done) = (&self.atoms, self.next, past.min(part.end));
            self.carry.retain(|&i| atoms[i].end() > done);
            let started = next + atoms[next..].iter().take_while(|a| a.start < done).count();
            self.carry.extend((next..started).filter(|&i| atoms[i].end() > done));
            self.next = started;
            at = past;
        }
    }

    /// Collects the pieces between `from` and `past` of the file, in order of their offsets, into `scratch`.
    fn gather(&mut self, rules: &Rules, from: u64, past: u64, home: Option<u32>, scatter: Option<u64>) -> Gathered {
        let Making { layout, atoms, next, carry, scratch, .. } = self;
        scratch.clear();
        let mut sums = Sums { base: from, ..Sums::default() };
        let ahead = (*next..atoms.len()).take_while(|&i| atoms[i].start < past);
        for i in carry.iter().copied().chain(ahead) {
            let mut stop = None;
            atoms[i].clip(from, past, |part| {
                let place = layout.places[part.want as usize];
                let piece = Piece {
                    want: part.want,
                    block: place.block,
                    from: part.start,
                    to: place.offset + part.to,
                    len: part.len,
                    rows: part.rows,
                    from_stride: part.stride,
                    to_stride: part.to_stride,
                };
                let before = sums.clone();
                let strides = layout.strides_of(part.want);
                sums.add(&piece, scratch.last(), strides.and_then(Strides::run));
                if scatter.is_some() && strides.is_some_and(|s| s.cast().is_some()) {
                    // Elements are converted out of a slab.
                    stop = Some(Stop::NoScatter);
                }
                if stop.is_none() {
                    stop = sums.excess(rules, &before, &piece, scratch.len() + 1, home, scatter);
                }
                push(scratch, piece);
            });
            match stop {
                Some(Stop::NoScatter) => return Gathered::NoScatter,
                Some(Stop::At(offset)) if rules.down(offset) > from => return Gathered::CutAt(rules.down(offset)),
                // There is no cutting within one unit. But scattering can be given up.
                Some(Stop::At(_)) if scatter.is_some() => return Gathered::NoScatter,
                _ => {}
            }
        }
        if !scratch.is_sorted_by_key(|p| p.from) {
            scratch.sort_by_key(|p| p.from);
        }
        if home.is_some() {
            return Gathered::All(None);
        }
        match scatter {
            Some(least) => {
                let apart = scratch.windows(2).all(|p| end(&p[0]) <= p[1].from);
                if apart && sums.bytes >= sums.entries.saturating_mul(least) && sums.entries <= SCATTER_ENTRIES {
                    Gathered::All(Some(sums.entries))
                } else {
                    Gathered::NoScatter
                }
            }
            None => {
                let fits = rules.down((from + rules.extent).saturating_sub(sums.moved));
                if sums.end > fits && fits > from && fits < past {
                    Gathered::CutAt(fits)
                } else {
                    Gathered::All(None)
                }
            }
        }
    }

    /// Of the parcels with these numbers those that this rank reads (`own`), or those that come from others.
    fn parcels(
        &mut self,
        checkpoint: &Checkpoint,
        files: &[FileTraits],
        limits: &Limits,
        ranks: &OneOfRanks<'_>,
        numbers: Range<u32>,
        own: bool,
    ) {
        let (shares, rank) = (ranks.shares, ranks.rank);
        for number in numbers {
            let parcel = &shares.parcels()[number as usize];
            if (parcel.reader == rank) != own || !shares.audience(parcel).contains(&rank) {
                continue;
            }
            self.scratch.clear();
            let mut packed = 0;
            for part in shares.parts(checkpoint, rank, parcel) {
                let place = self.layout.places[part.want as usize];
                let (to, len) = (place.offset + part.dense.start, part.dense.end - part.dense.start);
                let (want, block) = (part.want, place.block);
                if !own {
                    let piece = Piece { want, block, from: packed, to, len, rows: 1, from_stride: len, to_stride: len };
                    self.scratch.push(piece);
                    packed += len;
                    continue;
                }
                for (from, dense) in self.layout.runs[want as usize].rows(part.dense.clone()) {
                    let (to, len) = (place.offset + dense.start, dense.end - dense.start);
                    let piece = Piece { want, block, from, to, len, rows: 1, from_stride: len, to_stride: len };
                    push(&mut self.scratch, piece);
                }
            }
            let traits = files.get(parcel.file as usize);
            match (own, traits) {
                (true, Some(traits)) => {
                    let size = checkpoint.files()[parcel.file as usize].size;
                    let rules = Rules::read(parcel.file, traits, limits, size);
                    self.emit_parcel(&rules, number, parcel);
                }
                _ if packed > 0 => self.emit_received(parcel, number, packed),
                _ => {}
            }
        }
    }

    /// Makes an extent of a parcel that this rank reads.
    fn emit_parcel(&mut self, rules: &Rules, number: u32, parcel: &Parcel) {
        let resident = &rules.resident[rules.resident.partition_point(|r| r.end <= parcel.start)..];
        let warm = resident.first().is_some_and(|r| r.start <= parcel.start && r.end >= parcel.end);
        let lane = rules.by_slab(if warm { rules.warm } else { rules.cold });
        let (offset, past) = match lane.whole_units {
            false => (parcel.start, parcel.end),
            true => (rules.down(parcel.start), rules.up(parcel.end)),
        };
        let pieces = self.keep(offset);
        let (len, need) = (past - offset, parcel.end - offset);
        self.schedule.extents.push(Extent {
            file: rules.file,
            offset,
            len,
            need,
            lane,
            landing: Landing::Slab,
            staging: lane.staging,
            pieces,
            wanted: parcel.end - parcel.start,
            slack: len - (parcel.end - parcel.start),
            shared: Some(InCommon::Sent(number)),
            rows: None,
        });
    }

    /// Makes an extent of what comes of a parcel from its reader.
    fn emit_received(&mut self, parcel: &Parcel, number: u32, len: u64) {
        let strided = self.scratch.iter().any(|piece| self.layout.strides_of(piece.want).is_some());
        let pieces = self.keep(0);
        self.schedule.extents.push(Extent {
            file: parcel.file,
            offset: 0,
            len,
            need: len,
            lane: Lane::RANK,
            landing: if strided || !self.into_memory { Landing::Slab } else { Landing::Scatter },
            staging: Lane::RANK.staging,
            pieces,
            wanted: len,
            slack: 0,
            shared: Some(InCommon::Received { parcel: number, reader: parcel.reader }),
            rows: None,
        });
    }

    /// Keeps the pieces of `scratch` for an extent that begins at `offset`.
    fn keep(&mut self, offset: u64) -> Range<u32> {
        let start = self.schedule.pieces.len() as u32;
        let number = self.made;
        self.made += 1;
        for piece in &self.scratch {
            let want = piece.want as usize;
            if std::mem::replace(&mut self.last_extent[want], number) != number {
                self.schedule.extents_of_want[want] += 1;
            }
            self.schedule.pieces.push(Piece { from: piece.from - offset, ..*piece });
        }
        start..start + self.scratch.len() as u32
    }

    /// Makes an extent of what `gather` has collected.
    fn emit(&mut self, rules: &Rules, lane: Lane, landing: Landing) {
        let Some(first) = self.scratch.first().map(|p| p.from) else { return };
        let lane = if landing == Landing::Slab { rules.by_slab(lane) } else { lane };
        let last = self.scratch.iter().map(end).max().unwrap_or(first);
        let (offset, past) = if lane.whole_units { (rules.down(first), rules.up(last)) } else { (first, last) };
        // In a slab they lie one behind the other. Those that several wants take lie there several times, and may need more
        // room than the extent. Then it is read whole, which is less.
        let packed: u64 = self.scratch.iter().map(Piece::nbytes).sum();
        let by_rows = rules.rows.filter(|_| landing == Landing::Scatter || packed <= past - offset);
        let rows = by_rows.map(|gap| {
            let read = |p: &Piece| rows::bytes_read(p.len, p.rows, p.from_stride, gap);
            let skipped = (last - first).saturating_sub(self.scratch.iter().map(read).sum());
            ByRows { gap, skipped }
        });
        let pieces = self.keep(offset);
        self.schedule.extents.push(Extent {
            file: rules.file,
            offset,
            len: past - offset,
            need: last - offset,
            lane,
            landing,
            staging: lane.staging,
            pieces,
            wanted: distinct(&self.scratch),
            slack: (first - offset) + (past - last),
            shared: None,
            rows,
        });
    }
}

/// One past the last byte of a piece.
fn end(piece: &Piece) -> u64 {
    piece.from + (piece.rows - 1) * piece.from_stride + piece.len
}

/// Appends a piece. If it continues the last piece, it becomes a part of it.
fn push(pieces: &mut Vec<Piece>, piece: Piece) {
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
fn distinct(pieces: &[Piece]) -> u64 {
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
struct Sums {
    /// Where the extent starts.
    base: u64,
    /// One past the last byte so far.
    end: u64,
    /// Wanted bytes.
    bytes: u64,
    /// Scatter entries, gaps included.
    entries: u64,
    /// How far neighbours move apart in a slab.
    moved: u64,
    /// Bytes that are contiguous at the destination of the last piece, if it is strided.
    run: Option<u64>,
}

/// Why an extent cannot take a piece.
enum Stop {
    /// It must end here at the latest.
    At(u64),
    NoScatter,
}

impl Sums {
    /// `run`: bytes that are contiguous at the destination of the piece, if it is strided.
    fn add(&mut self, piece: &Piece, last: Option<&Piece>, run: Option<u64>) {
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

    /// Whether `piece` makes the extent too full. `before` is the state without the piece.
    fn excess(
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
enum Gathered {
    /// All are there; the number of scatter entries if they scatter.
    All(Option<u64>),
    /// There are too many: cut here, within the range.
    CutAt(u64),
    /// They are too small, too many or too interleaved to scatter.
    NoScatter,
}
