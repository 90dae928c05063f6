//! From the rows of wants to extents: spans are gathered, divided by landing and lane, and cut.

use super::atoms::{inside, outside, Atom, Atoms};
use super::limits::{FileTraits, Limits};
use super::ordered::Schedule;
use super::pieces::{distinct, end, push, Gathered, Stop, Sums, SCATTER_ENTRIES};
use super::rules::Rules;
use crate::extent::{ByRows, Extent, Landing, Lane, Piece};
use crate::format::Checkpoint;
use crate::options::KIB;
use crate::plan::layout::{BlockKind, Layout};
use crate::plan::shares::Shares;
use crate::plan::strides::Strides;
use crate::plan::want::Runs;
use crate::rows;
use std::collections::BinaryHeap;
use std::ops::Range;

/// If fewer in-place bytes than this lie beside bytes that go through a slab, they go through the slab too: copying
/// them costs less than a separate read.
const IN_PLACE: u64 = 64 * KIB;
/// Rows of resident bytes are read one by one if they are shorter. An extent for each costs a few us, as much as copying
/// some 10 KiB.
const SHORT_ROW: u64 = 256 * KIB;
/// If the order jumps by more than this many extents' bytes, neighbours in the file are not read together: that would
/// bring bytes long before their turn. In a stream a quarter of the window is enough for that.
const JUMP: u64 = 16;

/// The shares as one of several ranks loads them.
pub struct RankShares<'a> {
    /// The reads of all ranks.
    pub shares: &'a Shares,
    /// The rank whose schedule it is.
    pub rank: u32,
    /// By rank: whether it shares slabs with this one. An empty list: none does.
    pub near: &'a [bool],
    /// The sections of its schedule.
    pub(crate) sections: Vec<Section>,
}

impl<'a> RankShares<'a> {
    /// A rank that exchanges everything that is shared.
    pub fn new(shares: &'a Shares, rank: u32) -> Self {
        let sections = vec![Section::whole(shares.parcels().len() as u32)];
        Self { shares, rank, near: &[], sections }
    }
}

/// The want has several rows, and they are short.
fn has_short_rows(runs: &Runs) -> bool {
    !runs.axes.is_empty() && runs.len < SHORT_ROW
}

/// A section of a schedule: it has an order of its own, and follows the sections before it.
pub(crate) struct Section {
    pub(crate) alone: Alone,
    /// The numbers of the parcels that their readers send.
    pub(crate) exchanged: Range<u32>,
}

/// The bytes that a rank reads for itself alone, by the numbers of parcels.
pub(crate) enum Alone {
    /// In none of these.
    Outside(Range<u32>),
    /// In one of these.
    Inside(Range<u32>),
}

impl Section {
    /// Everything, where ranks share so many parcels.
    pub(crate) fn whole(parcels: u32) -> Section {
        Section { alone: Alone::Outside(0..parcels), exchanged: 0..parcels }
    }
}

/// A schedule that is being made.
pub(super) struct Making<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) layout: &'a Layout,
    pub(super) files: &'a [FileTraits],
    pub(super) limits: &'a Limits,
    /// The wants in order of files and offsets, and whether they are handed out in this order.
    pub(super) by_file: Vec<u32>,
    pub(super) in_file_order: bool,
    pub(super) schedule: Schedule,
    /// The last extent that brought bytes of each want.
    pub(super) last_extent: Vec<u32>,
    /// Bytes before each want in the order; empty where the order is that of the files.
    pub(super) turn: Vec<u64>,
    /// The span being built, sorted by start, and file offsets at which it must be cut.
    pub(super) atoms: Vec<Atom>,
    pub(super) breaks: Vec<u64>,
    /// From here, the atoms of the span lie completely ahead. Earlier atoms that are not done are in `carry`.
    pub(super) next: usize,
    pub(super) carry: Vec<usize>,
    /// Pieces of the extent that is being built; `from` is counted from the start of the file.
    pub(super) scratch: Vec<Piece>,
    pub(super) ranks: Option<&'a RankShares<'a>>,
    /// Extents that were made.
    pub(super) made: u32,
    /// The destination is memory of the host, so a read can write to it.
    pub(super) into_memory: bool,
}

impl Making<'_> {
    /// All gathered pieces go to contiguous memory of the same dtype.
    pub(super) fn is_dense(&self) -> bool {
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

    /// Appends the extents of a section.
    pub(super) fn section(&mut self, Section { alone, exchanged }: &Section) {
        let Making { checkpoint, layout, files, limits, .. } = *self;
        let before = std::mem::take(&mut self.schedule.extents);
        let (mut mapped, mut read, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let by_file = std::mem::take(&mut self.by_file);
        for wants in by_file.chunk_by(|a, b| layout.files[*a as usize] == layout.files[*b as usize]) {
            let file = layout.files[wants[0] as usize];
            // There are many sections, and most lie in few files.
            let within = match (alone, self.ranks) {
                (Alone::Inside(numbers), Some(ranks)) => match ranks.shares.parcels_of(file, numbers) {
                    [] => continue,
                    [only] => only.start..only.end,
                    [first, .., last] => first.start..last.end,
                },
                _ => 0..u64::MAX,
            };
            let wanted = |want: u32| {
                let runs = &layout.runs[want as usize];
                runs.len > 0 && runs.start < within.end && runs.end() > within.start
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
                self.file(&Rules::mapped(file, lane, traits, limits, start..end), &mapped, alone);
            }
            self.file(&Rules::read(file, traits, limits, size), &read, alone);
            if let Some(gap) = traits.rows {
                self.file(&Rules::rows(file, traits, limits, size, gap), &rows, alone);
            }
        }
        self.by_file = by_file;
        self.parcels(exchanged.clone(), true);
        self.schedule.sort(layout, files, self.in_file_order, limits);
        let own = std::mem::replace(&mut self.schedule.extents, before);
        // What comes from others is asked for first.
        self.parcels(exchanged.clone(), false);
        self.schedule.extents.extend(own);
    }

    fn file(&mut self, rules: &Rules, wants: &[u32], alone: &Alone) {
        let layout = self.layout;
        let atoms =
            Atoms { runs: &layout.runs, wants: wants.iter().peekable(), gap: rules.gap, open: BinaryHeap::new() };
        let Some(ranks) = self.ranks else { return self.spans(rules, atoms) };
        let mut parts = Vec::new();
        let (Alone::Outside(numbers) | Alone::Inside(numbers)) = alone;
        let parcels = ranks.shares.parcels_of(rules.file, numbers);
        match alone {
            Alone::Outside(_) => atoms.for_each(|atom| outside(parcels, atom, |part| parts.push(part))),
            Alone::Inside(_) => atoms.for_each(|atom| inside(parcels, atom, |part| parts.push(part))),
        }
        parts.sort_by_key(|atom| atom.start);
        self.spans(rules, parts.into_iter());
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
            if let Some(cut) = rules.cut {
                past = past.min((at / cut + 1) * cut);
            }
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

    /// Keeps the pieces of `scratch` for an extent that begins at `offset`.
    pub(super) fn keep(&mut self, offset: u64) -> Range<u32> {
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
