//! Random plans: wants of a few bytes in one file or two, in blocks of every kind, cut into extents anywhere. What every
//! byte of every block has to be in the end is worked out from the wants alone, without pieces or addresses.

use super::memory::{byte_of_file, Rng, SLAB};
use crate::extent::{Extent, Landing, Lane, Piece, TakesSlab};
use crate::options::{CPU_ALIGN, GPU_ALIGN};
use crate::plan::layout::{BlockKind, BlockSpec, Layout, Place};
use crate::plan::schedule::Schedule;
use crate::plan::strides::Strides;
use std::ops::Range;

pub(super) struct Case {
    pub(super) schedule: Schedule,
    pub(super) layout: Layout,
    /// Copies go to a device, which may write to what follows a tensor.
    pub(super) gpu: bool,
    /// Bytes of each file.
    pub(super) sizes: Vec<u64>,
    /// The expected value of each byte of each block; `None` if it is no byte of a tensor.
    pub(super) expected: Vec<Vec<Option<u8>>>,
    /// For each block, the piece of memory in which it lies, and where. Mirror blocks that are read together lie in one
    /// piece, as in the file.
    pub(super) homes: Vec<(usize, u64)>,
    /// Bytes of each piece of memory.
    pub(super) arenas: Vec<u64>,
    /// Where in its block each byte of each want lies.
    pub(super) at: Vec<Vec<usize>>,
}

/// A want: rows of bytes in a file.
#[derive(Clone, Copy)]
struct Rows {
    file: u32,
    start: u64,
    len: u64,
    rows: u64,
    stride: u64,
}

impl Rows {
    fn row(&self, row: u64) -> Range<u64> {
        let start = self.start + row * self.stride;
        start..start + self.len
    }
}

/// A stretch of a file that is read alike: into one or several blocks in place, or to any places.
struct Stretch {
    file: u32,
    bytes: Range<u64>,
    /// The first block that is read in place.
    in_place: Option<u32>,
    /// The blocks lie in the file's mapping.
    mapped: bool,
}

impl Case {
    pub(super) fn new(rng: &mut Rng) -> Case {
        let gpu = rng.one_in(3);
        let files = 1 + rng.below(2);
        let staging: Vec<TakesSlab> =
            (0..files).map(|_| if rng.one_in(3) { TakesSlab::AtArrival } else { TakesSlab::AtRequest }).collect();
        let mut ends: Vec<u64> = (0..files).map(|_| rng.below(9)).collect();
        let mut layout = Layout::default();
        let mut wants: Vec<Rows> = Vec::new();
        let mut at: Vec<Vec<usize>> = Vec::new();
        let mut stretches: Vec<Stretch> = Vec::new();
        for block in 0..1 + rng.below(4) as u32 {
            let file = block % files as u32;
            block_of_wants(rng, gpu, (block, file), &mut ends[file as usize], &mut layout, &mut wants, &mut stretches);
            for want in at.len()..layout.places.len() {
                let place = layout.places[want];
                let dense = place.offset as usize..(place.offset + place.nbytes) as usize;
                let foreign = matches!(layout.blocks[block as usize].kind, BlockKind::Foreign { .. });
                let strided = if foreign && rng.one_in(2) { strided(rng, place.nbytes) } else { None };
                at.push(strided.map_or(dense.collect(), |(strides, places)| {
                    layout.blocks[block as usize].nbytes = strides.span();
                    layout.strides.resize(want + 1, None);
                    layout.strides[want] = Some(strides);
                    places
                }));
            }
        }
        layout.order = (0..wants.len() as u32).collect();
        let sizes: Vec<u64> = (0..files as u32)
            .map(|file| {
                let ends_of = wants.iter().filter(|w| w.file == file).map(|w| w.row(w.rows - 1).end);
                let last = ends_of.max().unwrap_or(0);
                last.max(ends[file as usize].saturating_sub(rng.below(3)))
            })
            .collect();
        let mut expected: Vec<Vec<Option<u8>>> = layout.blocks.iter().map(|b| vec![None; b.nbytes as usize]).collect();
        for ((want, place), to) in wants.iter().zip(&layout.places).zip(&at) {
            let bytes = (0..want.rows).flat_map(|row| want.row(row));
            for (byte, &to) in bytes.zip(to) {
                expected[place.block as usize][to] = Some(byte_of_file(want.file, byte));
            }
        }
        let (homes, arenas) = homes(&layout, &stretches);
        let mut schedule = Schedule::default();
        for stretch in &stretches {
            cut(rng, gpu, stretch, staging[stretch.file as usize], &layout, &wants, &mut schedule);
        }
        // Interleaved storage: neighbours swap places.
        for i in 1..schedule.extents.len() {
            if rng.one_in(5) {
                schedule.extents.swap(i - 1, i);
            }
        }
        Case { schedule, layout, gpu, sizes, expected, homes, arenas, at }
    }
}

/// Where the blocks lie.
fn homes(layout: &Layout, stretches: &[Stretch]) -> (Vec<(usize, u64)>, Vec<u64>) {
    let (mut homes, mut arenas, mut of_stretch) = (Vec::new(), Vec::new(), vec![None; stretches.len()]);
    for block in &layout.blocks {
        let together = match block.kind {
            BlockKind::Mirror { file, start } => stretches
                .iter()
                .position(|s| s.in_place.is_some() && s.file == file && s.bytes.contains(&start))
                .map(|stretch| (stretch, start - stretches[stretch].bytes.start)),
            _ => None,
        };
        homes.push(match together {
            Some((stretch, offset)) => {
                let bytes = &stretches[stretch].bytes;
                let arena = *of_stretch[stretch].get_or_insert_with(|| {
                    arenas.push(bytes.end - bytes.start);
                    arenas.len() - 1
                });
                (arena, offset)
            }
            None => {
                arenas.push(block.nbytes);
                (arenas.len() - 1, 0)
            }
        });
    }
    (homes, arenas)
}

/// Strides for so many bytes, and where each of them lies. None if there are too few.
fn strided(rng: &mut Rng, nbytes: u64) -> Option<(Strides, Vec<usize>)> {
    if nbytes < 2 {
        return None;
    }
    let mut divisor = |n: u64| {
        let all: Vec<u64> = (1..=n).filter(|d| n % d == 0).collect();
        all[rng.below(all.len() as u64) as usize]
    };
    let run = divisor(nbytes);
    let inner = divisor(nbytes / run);
    let counts = [nbytes / run / inner, inner];
    let mut strides = [0; 2];
    let (first, mut within) = (rng.below(2) as usize, run);
    for dimension in [first, 1 - first] {
        strides[dimension] = within + rng.below(3);
        within += (counts[dimension] - 1) * strides[dimension];
    }
    let mut at = Vec::new();
    for i in 0..counts[0] {
        for j in 0..counts[1] {
            let start = (i * strides[0] + j * strides[1]) as usize;
            at.extend(start..start + run as usize);
        }
    }
    Some((Strides::new(&[(counts[0], strides[0]), (counts[1], strides[1]), (run, 1)]), at))
}

/// Adds a block of a random kind with its wants, and the stretch of the file that brings them.
fn block_of_wants(
    rng: &mut Rng,
    gpu: bool,
    (block, file): (u32, u32),
    end: &mut u64,
    layout: &mut Layout,
    wants: &mut Vec<Rows>,
    stretches: &mut Vec<Stretch>,
) {
    let begin = *end;
    let first = wants.len() as u32;
    let kind = match rng.below(6) {
        0 => BlockKind::Foreign { want: first },
        1..=3 if !gpu => BlockKind::Mirror { file, start: begin },
        _ => BlockKind::Dense,
    };
    let in_place = matches!(kind, BlockKind::Mirror { .. });
    let mapped = in_place && rng.one_in(3);
    if in_place {
        *end += rng.below(5);
    }
    let count = if matches!(kind, BlockKind::Foreign { .. }) { 1 } else { 1 + rng.below(4) };
    let align = if gpu { GPU_ALIGN } else { CPU_ALIGN };
    let mut nbytes = 0u64;
    // The gaps between the rows of the last want, for another want to lie in.
    let mut gaps: Option<Rows> = None;
    for _ in 0..count {
        let rows = match gaps.take() {
            Some(before) => {
                let len = 1 + rng.below(before.stride - before.len);
                Rows { start: before.start + before.len, len, ..before }
            }
            None if !in_place && rng.one_in(3) => {
                let len = 1 + rng.below(10);
                let stride = len + 1 + rng.below(6);
                Rows { file, start: *end, len, rows: 2 + rng.below(3), stride }
            }
            None => {
                let len = if rng.one_in(6) { 0 } else { 1 + rng.below(40) };
                Rows { file, start: *end, len, rows: 1, stride: len }
            }
        };
        if rows.rows > 1 && rows.start == *end && rng.one_in(2) {
            gaps = Some(rows);
        }
        *end = (*end).max(rows.row(rows.rows - 1).end);
        if gaps.is_none() && rng.one_in(3) {
            *end += rng.below(7);
        }
        let offset = match kind {
            BlockKind::Mirror { start, .. } => rows.start - start,
            _ => nbytes.next_multiple_of(align),
        };
        nbytes = offset + rows.len * rows.rows;
        layout.places.push(Place { block, offset, nbytes: rows.len * rows.rows });
        wants.push(rows);
    }
    if in_place {
        *end += rng.below(5);
        nbytes = *end - begin;
    } else if kind == BlockKind::Dense {
        nbytes += rng.below(3);
    }
    layout.blocks.push(BlockSpec { kind, nbytes });
    match stretches.iter_mut().rev().find(|s| s.file == file) {
        Some(last) if !in_place && last.in_place.is_none() => last.bytes.end = *end,
        Some(last) if in_place && last.in_place.is_some() && rng.one_in(2) => last.bytes.end = *end,
        _ => stretches.push(Stretch { file, bytes: begin..*end, in_place: in_place.then_some(block), mapped }),
    }
}

/// Cuts a stretch into extents.
fn cut(
    rng: &mut Rng,
    gpu: bool,
    stretch: &Stretch,
    staging: TakesSlab,
    layout: &Layout,
    wants: &[Rows],
    schedule: &mut Schedule,
) {
    let mut from = stretch.bytes.start;
    while from < stretch.bytes.end {
        let len = (1 + rng.below(SLAB.min(40))).min(stretch.bytes.end - from);
        let first = schedule.pieces.len();
        for (number, want) in (0..).zip(wants).filter(|w| w.1.file == stretch.file) {
            pieces(number, want, layout.places[number as usize], from..from + len, &mut schedule.pieces);
        }
        let pieces = &mut schedule.pieces[first..];
        let Some(block) = pieces.first().map(|p| p.block as usize) else {
            from += len;
            continue;
        };
        let landing = match stretch.in_place {
            Some(block) if stretch.mapped => Landing::Mapping { block, resident: false },
            Some(block) if !rng.one_in(4) => Landing::Block { block },
            _ if !gpu && rng.one_in(3) => Landing::Scatter,
            _ => Landing::Slab,
        };
        // A read in place begins in the block of its first byte.
        let left_out = match (landing, layout.blocks[block].kind) {
            (Landing::Mapping { .. } | Landing::Block { .. }, BlockKind::Mirror { start, .. }) => {
                start.saturating_sub(from)
            }
            _ => 0,
        };
        pieces.iter_mut().for_each(|p| p.from -= left_out);
        schedule.extents.push(Extent {
            file: stretch.file,
            offset: from + left_out,
            len: len - left_out,
            need: pieces.iter().map(|p| p.from + (p.rows - 1) * p.from_stride + p.len).max().unwrap_or(0),
            lane: Lane::DIRECT,
            landing,
            staging,
            pieces: first as u32..first as u32 + pieces.len() as u32,
            wanted: pieces.iter().map(Piece::nbytes).sum(),
            slack: 0,
            shared: None,
            rows: None,
        });
        from += len;
    }
}

/// Appends the parts of `want` that lie in `bytes` of its file.
fn pieces(number: u32, want: &Rows, place: Place, bytes: Range<u64>, pieces: &mut Vec<Piece>) {
    let mut whole = false;
    for row in 0..want.rows {
        let all = want.row(row);
        let part = all.start.max(bytes.start)..all.end.min(bytes.end);
        if part.start >= part.end {
            continue;
        }
        // Whole rows one after the other are one piece.
        if let (true, true, Some(last)) = (whole, part == all, pieces.last_mut()) {
            last.rows += 1;
            continue;
        }
        whole = part == all;
        pieces.push(Piece {
            want: number,
            block: place.block,
            from: part.start - bytes.start,
            to: place.offset + row * want.len + (part.start - all.start),
            len: part.end - part.start,
            rows: 1,
            from_stride: want.stride,
            to_stride: want.len,
        });
    }
}
