//! Where bytes go: from the plan of one extent to addresses.
//!
//! Pure: no I/O, no locks, no memory is touched. The engine thread uses these functions to start reads and copies, and
//! the engine's simulator runs them on real buffers.

use super::shared::internal;
use crate::device::cast::Cast;
use crate::device::strided::{self, Strided};
use crate::device::Copy;
use crate::error::Result;
use crate::extent::{Extent, Landing, Piece};
use crate::options::GPU_ALIGN;
use crate::plan::layout::{BlockKind, Layout};
use crate::plan::schedule::Schedule;
use crate::plan::strides::{parts, Axis, Strides};
use crate::rows::RowPlaces;
use crate::source::Destination;

/// One extent, and where the blocks are that it fills.
#[derive(Clone, Copy)]
pub(crate) struct Addresses<'a, B> {
    extent: &'a Extent,
    pieces: &'a [Piece],
    layout: &'a Layout,
    base: B,
}

impl<'a, B: Fn(u32) -> Option<u64>> Addresses<'a, B> {
    /// Addresses of extent number `extent`. `base` gives the address of a block's first byte, a host or device address.
    /// It gives `None` for a block without memory.
    pub(crate) fn new(schedule: &'a Schedule, layout: &'a Layout, extent: u32, base: B) -> Self {
        let extent = &schedule.extents[extent as usize];
        let pieces = &schedule.pieces[extent.pieces.start as usize..extent.pieces.end as usize];
        Self { extent, pieces, layout, base }
    }

    /// Where its read lands. `slab` is the address of the slab that it holds, if it holds one.
    pub(crate) fn destination(&self, slab: Option<*mut u8>) -> Result<Destination> {
        let e = self.extent;
        if let Some(by) = e.rows {
            return Ok(Destination::Rows { gap: by.gap, rows: self.rows(slab)? });
        }
        Ok(match e.landing {
            Landing::Mapping { resident, .. } => Destination::Mapping { at: self.in_place()?, resident },
            Landing::Block { .. } => Destination::Memory(self.in_place()?),
            Landing::Scatter => Destination::Scatter(self.scatter()?),
            Landing::Slab => match slab {
                Some(slab) => Destination::Memory(slab),
                None if e.lands_on_arrival() => Destination::OnArrival,
                None => return Err(internal("an extent without its slab")),
            },
        })
    }

    /// The copies out of the slab at `slab`, one for each piece. [`strided`](Self::strided) has those into strided
    /// memory.
    pub(crate) fn copies(&self, slab: *mut u8) -> Result<Vec<Copy>> {
        let mut copies = Vec::with_capacity(self.pieces.len());
        for p in &self.in_slab().filter(|p| self.layout.strides_of(p.want).is_none()).collect::<Vec<_>>() {
            copies.push(Copy {
                // The schedule keeps pieces within the extent and extents within a slab (its property tests).
                from: slab.wrapping_add(p.from as usize),
                to: self.block(p.block)? + p.to,
                block: p.block,
                pad: self.pad(p),
                len: p.len,
                rows: p.rows,
                from_stride: p.from_stride,
                to_stride: p.to_stride,
            });
        }
        Ok(copies)
    }

    /// The copies out of the slab at `slab` into strided memory, or memory of another dtype: a few boxes for each piece.
    pub(crate) fn strided(&self, slab: *mut u8) -> Result<Strided> {
        let mut copies = Strided::default();
        if self.layout.strides.is_empty() {
            return Ok(copies);
        }
        for p in self.in_slab() {
            if let Some(strides) = self.layout.strides_of(p.want) {
                spread(&p, strides, slab, self.block(p.block)?, &mut copies)?;
            }
        }
        Ok(copies)
    }

    /// Its pieces, by their places in a slab: rows that were read one by one lie there without gaps.
    fn in_slab(&self) -> impl Iterator<Item = Piece> + '_ {
        let mut packed = 0;
        self.pieces.iter().map(move |p| {
            if self.extent.rows.is_none() {
                return *p;
            }
            let from = packed;
            packed += p.nbytes();
            if p.to_stride == p.len {
                let len = p.nbytes();
                return Piece { from, len, rows: 1, from_stride: len, to_stride: len, ..*p };
            }
            Piece { from, from_stride: p.len, ..*p }
        })
    }

    /// The rows that are read one by one, and their places: those of the blocks, or a slab at this address.
    fn rows(&self, slab: Option<*mut u8>) -> Result<Vec<RowPlaces>> {
        let in_slab = self.extent.landing == Landing::Slab;
        let slab = match slab {
            None if in_slab => return Err(internal("an extent without its slab")),
            slab => slab,
        };
        let (mut packed, mut rows) = (0, Vec::with_capacity(self.pieces.len()));
        if in_slab && self.pieces.iter().map(Piece::nbytes).sum::<u64>() > self.extent.len {
            return Err(internal("rows that need more room than their extent"));
        }
        for p in self.pieces {
            let (to, to_stride) = match slab {
                // Whoever has the slab has seen that the extent is no longer.
                Some(slab) if in_slab => (slab.wrapping_add(packed), p.len),
                _ => ((self.block(p.block)? + p.to) as *mut u8, p.to_stride),
            };
            packed += p.nbytes() as usize;
            let Piece { from, len, from_stride, .. } = *p;
            rows.push(RowPlaces { from, to, len, rows: p.rows, from_stride, to_stride });
        }
        Ok(rows)
    }

    /// Ranges that the last step writes, in order: block, offset in the block, bytes. A mapping gives none. A piece of
    /// a strided tensor gives the whole span of the tensor.
    pub(crate) fn written(&self) -> impl Iterator<Item = (u32, u64, u64)> + '_ {
        let (whole, pieces) = match self.extent.landing {
            Landing::Mapping { .. } => (None, &[][..]),
            Landing::Block { .. } => (self.mirror().ok().map(|(block, at)| (block, at, self.extent.len)), &[][..]),
            Landing::Scatter | Landing::Slab => (None, self.pieces),
        };
        let place = |p: &Piece| match self.layout.strides_of(p.want) {
            Some(strides) => (p.block, 0, strides.span()),
            None => (p.block, p.to, (p.rows - 1) * p.to_stride + p.len),
        };
        whole.into_iter().chain(pieces.iter().map(place))
    }

    /// Blocks whose memory has to stay until the step that fills them has ended. One comes again only if pieces alternate
    /// between blocks.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        let (whole, pieces) = match self.extent.landing {
            // The blocks of a stretch lie in one piece of memory.
            Landing::Mapping { .. } | Landing::Block { .. } => (self.mirror().ok().map(|m| m.0), &[][..]),
            Landing::Scatter | Landing::Slab => (None, self.pieces),
        };
        let mut last = None;
        whole.into_iter().chain(pieces.iter().map(|p| p.block).filter(move |&b| last.replace(b) != Some(b)))
    }

    fn block(&self, block: u32) -> Result<u64> {
        (self.base)(block).ok_or_else(|| internal("a block was used before it was granted"))
    }

    /// Where a read in place begins.
    fn in_place(&self) -> Result<*mut u8> {
        let (block, offset) = self.mirror()?;
        Ok((self.block(block)? + offset) as *mut u8)
    }

    /// The block in which a read in place begins, and the offset of its first byte there. It may go on into the next blocks
    /// of the stretch. The first block of the stretch would not do: it may be complete, and then nothing holds it.
    fn mirror(&self) -> Result<(u32, u64)> {
        let first = self.pieces.first().ok_or_else(|| internal("a read that brings nothing"))?;
        match self.layout.blocks[first.block as usize].kind {
            // A block begins with the page of its first byte, and no read in place begins before that.
            BlockKind::Mirror { start, .. } => match self.extent.offset.checked_sub(start) {
                Some(offset) => Ok((first.block, offset)),
                None => Err(internal("a read in place begins before its block")),
            },
            _ => Err(internal("a read lands in a block that does not mirror the file")),
        }
    }

    /// The places of its pieces in file order. The gaps between them are discarded.
    fn scatter(&self) -> Result<Vec<(*mut u8, usize)>> {
        let mut rows = Vec::with_capacity(self.pieces.len());
        for p in self.pieces {
            let (base, strides) = (self.block(p.block)?, self.layout.strides_of(p.want));
            for row in 0..p.rows {
                let (from, to) = (p.from + row * p.from_stride, p.to + row * p.to_stride);
                let Some(strides) = strides else {
                    rows.push((from, (base + to) as *mut u8, p.len));
                    continue;
                };
                let run = strides.run().ok_or_else(|| internal("elements are converted, and land without a slab"))?;
                // Run by run: a row may begin and end within one.
                let mut done = 0;
                while done < p.len {
                    let len = (run - (to + done) % run).min(p.len - done);
                    rows.push((from + done, (base + strides.memory(to + done)) as *mut u8, len));
                    done += len;
                }
            }
        }
        rows.sort_unstable_by_key(|r| r.0);
        let mut places = Vec::with_capacity(2 * rows.len() + 1);
        let mut at = 0;
        for (from, to, len) in rows {
            if from < at {
                return Err(internal("two pieces of one scattered read overlap"));
            }
            if from > at {
                places.push((std::ptr::null_mut(), (from - at) as usize));
            }
            places.push((to, len as usize));
            at = from + len;
        }
        if at < self.extent.len {
            places.push((std::ptr::null_mut(), (self.extent.len - at) as usize));
        }
        Ok(places)
    }

    /// Bytes after a piece that may be overwritten. If the piece ends a tensor in a dense block on a GPU, these are the
    /// bytes up to the next possible tensor start.
    fn pad(&self, p: &Piece) -> u32 {
        let place = self.layout.places[p.want as usize];
        let block = self.layout.blocks[p.block as usize];
        let end = p.to + p.len;
        if block.kind != BlockKind::Dense || p.rows != 1 || end != place.offset + place.nbytes {
            return 0;
        }
        (end.next_multiple_of(GPU_ALIGN).min(block.nbytes) - end) as u32
    }
}

/// The copies of one piece into strided memory at `base`, or into memory of another dtype.
///
/// Rows lie evenly in dense order, and so do the steps of the destination's axes. Where a row's distance in dense order is a
/// step of them, all rows are together a few boxes. Otherwise each row is: only the first and the last row of an extent,
/// which may be cut off, come so.
fn spread(p: &Piece, strides: &Strides, slab: *mut u8, base: u64, copies: &mut Strided) -> Result<()> {
    let cast = strides.cast();
    if let Some(size) = cast.map(Cast::from_bytes) {
        if p.to % size != 0 || p.len % size != 0 || (p.rows > 1 && p.to_stride % size != 0) {
            return Err(internal("an element is converted that is divided between two extents"));
        }
    }
    let (mut rows, mut row) = (Vec::new(), Vec::new());
    let divided = if p.rows > 1 { strides.divided(p.to_stride) } else { None };
    let within = p.to % p.to_stride.max(1);
    match divided {
        Some((outer, inner)) if within + p.len <= p.to_stride => {
            let first = p.to - within;
            parts(&outer, first..first + p.rows * p.to_stride, &mut rows);
            parts(&inner, within..within + p.len, &mut row);
            for a in &rows {
                for b in &row {
                    let from = p.from + (a.dense - first) / p.to_stride * p.from_stride + b.dense - within;
                    let of_rows = a.axes(&outer).map(|axis| strided::GridAxis {
                        count: axis.count,
                        from: axis.dense / p.to_stride * p.from_stride,
                        to: axis.memory,
                    });
                    let axes = of_rows.chain(b.axes(&inner).map(dense));
                    copies.push(p.block, cast, slab.wrapping_add(from as usize), base + a.memory + b.memory, axes);
                }
            }
        }
        _ => {
            for i in 0..p.rows {
                let (from, to) = (p.from + i * p.from_stride, p.to + i * p.to_stride);
                row.clear();
                parts(strides.axes(), to..to + p.len, &mut row);
                for b in &row {
                    let from = slab.wrapping_add((from + b.dense - to) as usize);
                    copies.push(p.block, cast, from, base + b.memory, b.axes(strides.axes()).map(dense));
                }
            }
        }
    }
    Ok(())
}

/// An axis of a destination whose bytes lie in dense order in the slab.
fn dense(axis: Axis) -> strided::GridAxis {
    strided::GridAxis { count: axis.count, from: axis.dense, to: axis.memory }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::extent::{Lane, TakesSlab};
    use crate::format::DType;
    use crate::plan::layout::{BlockSpec, Place};

    const MIRROR: BlockKind = BlockKind::Mirror { file: 0, start: 4096 };

    /// A plan of one extent, at byte 5000 of the file and 100 bytes long. The blocks begin at 1 << 20, 2 << 20 and so on.
    fn plan(landing: Landing, kinds: &[BlockKind], pieces: Vec<Piece>) -> (Schedule, Layout) {
        let extent = Extent {
            file: 0,
            offset: 5000,
            len: 100,
            need: 100,
            lane: Lane::BUFFERED,
            landing,
            staging: TakesSlab::AtRequest,
            pieces: 0..pieces.len() as u32,
            wanted: 100,
            slack: 0,
            shared: None,
            rows: None,
        };
        let blocks = kinds.iter().map(|&kind| BlockSpec { kind, nbytes: 8192 }).collect();
        let places = vec![Place { block: 0, offset: 0, nbytes: 40 }; 4];
        let schedule = Schedule { extents: vec![extent], pieces, ..Schedule::default() };
        (schedule, Layout { blocks, places, ..Layout::default() })
    }

    fn piece(block: u32, from: u64, to: u64, len: u64) -> Piece {
        Piece { want: block, block, from, to, len, rows: 1, from_stride: 0, to_stride: 0 }
    }

    fn base(block: u32) -> Option<u64> {
        Some(u64::from(block + 1) << 20)
    }

    #[test]
    fn a_read_in_place_keeps_its_distance_from_the_start_of_the_block() {
        let (schedule, layout) = plan(Landing::Block { block: 0 }, &[MIRROR], vec![piece(0, 10, 914, 40)]);
        let at = Addresses::new(&schedule, &layout, 0, base);
        assert!(matches!(at.destination(None).unwrap(), Destination::Memory(to) if to as u64 == (1 << 20) + 904));
        assert_eq!(at.written().collect::<Vec<_>>(), [(0, 904, 100)], "slack is written too");

        let (schedule, layout) =
            plan(Landing::Mapping { block: 0, resident: true }, &[MIRROR], vec![piece(0, 10, 914, 40)]);
        let at = Addresses::new(&schedule, &layout, 0, base);
        let Destination::Mapping { at: to, resident: true } = at.destination(None).unwrap() else { panic!() };
        assert_eq!((to as u64, at.written().count()), ((1 << 20) + 904, 0));
        assert_eq!(at.blocks().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn scattered_rows_come_in_file_order_and_gaps_are_discarded() {
        let strided = Piece { rows: 3, from_stride: 20, to_stride: 8, ..piece(1, 12, 64, 8) };
        let pieces = vec![strided, piece(0, 0, 100, 10), piece(0, 20, 110, 10)];
        let (schedule, layout) = plan(Landing::Scatter, &[BlockKind::Dense, BlockKind::Dense], pieces);
        let at = Addresses::new(&schedule, &layout, 0, base);
        let Destination::Scatter(places) = at.destination(None).unwrap() else { panic!() };
        let found: Vec<_> = places.iter().map(|p| (p.0 as u64, p.1)).collect();
        let (a, b) = ((1 << 20) + 100, (2 << 20) + 64);
        let expected = [(a, 10), (0, 2), (b, 8), (a + 10, 10), (0, 2), (b + 8, 8), (0, 12), (b + 16, 8), (0, 40)];
        assert_eq!(found, expected);
        assert_eq!(at.blocks().collect::<Vec<_>>(), [1, 0]);
        assert_eq!(at.written().collect::<Vec<_>>(), [(1, 64, 24), (0, 100, 10), (0, 110, 10)]);
    }

    #[test]
    fn rows_that_overlap_and_blocks_without_memory_are_errors() {
        let pieces = vec![piece(0, 0, 0, 10), piece(1, 9, 0, 10)];
        let (schedule, layout) = plan(Landing::Scatter, &[BlockKind::Dense, BlockKind::Dense], pieces);
        let error = |at: Result<Destination>| at.err().map(|e| e.kind());
        assert_eq!(error(Addresses::new(&schedule, &layout, 0, base).destination(None)), Some(ErrorKind::Internal));
        let none = |_| None;
        let at = Addresses::new(&schedule, &layout, 0, none);
        assert_eq!(error(at.destination(None)), Some(ErrorKind::Internal));
        assert!(at.copies(std::ptr::null_mut()).is_err());
    }

    #[test]
    fn a_slab_is_where_it_lands_and_one_that_comes_later_is_said_so() {
        let (mut schedule, layout) = plan(Landing::Slab, &[BlockKind::Dense], vec![piece(0, 0, 0, 10)]);
        assert!(Addresses::new(&schedule, &layout, 0, base).destination(None).is_err());
        schedule.extents[0].staging = TakesSlab::AtArrival;
        let at = Addresses::new(&schedule, &layout, 0, base);
        assert!(matches!(at.destination(None), Ok(Destination::OnArrival)));
        let slab = 4096 as *mut u8;
        assert!(matches!(at.destination(Some(slab)), Ok(Destination::Memory(to)) if to == slab));
    }

    #[test]
    fn only_the_end_of_a_tensor_in_a_dense_block_may_be_padded() {
        let pieces = vec![piece(0, 10, 0, 40), piece(0, 50, 0, 30), piece(1, 10, 0, 40), piece(2, 60, 0, 40)];
        let kinds = [BlockKind::Dense, BlockKind::Foreign { want: 1 }, BlockKind::Dense];
        let (schedule, mut layout) = plan(Landing::Slab, &kinds, pieces);
        layout.blocks[2].nbytes = 48;
        let copies = Addresses::new(&schedule, &layout, 0, base).copies(4096 as *mut u8).unwrap();
        assert_eq!(copies.iter().map(|c| c.pad).collect::<Vec<_>>(), [256 - 40, 0, 0, 8]);
        assert_eq!((copies[0].from as u64, copies[0].to, copies[3].to), (4106, 1 << 20, 3 << 20));
    }

    /// Offset in the slab, offset in the block, bytes.
    type SpreadItem = (u64, u64, u64);

    /// The items that are copied into strided memory. And in how many boxes.
    fn spread_out(dims: &[(u64, u64)], piece: Piece) -> (Vec<SpreadItem>, usize) {
        spread_over(Strides::new(dims), piece).unwrap()
    }

    fn spread_over(strides: Strides, piece: Piece) -> Result<(Vec<SpreadItem>, usize)> {
        let (mut schedule, mut layout) = plan(Landing::Slab, &[BlockKind::Foreign { want: 0 }], vec![piece]);
        layout.strides = vec![Some(strides)];
        schedule.extents[0].staging = TakesSlab::AtRequest;
        let at = Addresses::new(&schedule, &layout, 0, base);
        let slab = 4096 as *mut u8;
        assert!(at.copies(slab).unwrap().is_empty());
        let copies = at.strided(slab)?;
        let mut items = Vec::new();
        copies.items(|from, to, len| items.push((from as u64 - 4096, to - (1 << 20), len)));
        Ok((items, copies.len()))
    }

    #[test]
    fn elements_that_are_converted_keep_their_number_and_not_their_distance() {
        let cast = Cast::new(DType::F32, DType::BF16).unwrap();
        // Elements 2 to 9 of a 3 x 4 matrix, into a transposed one and into a contiguous one.
        let turned = Strides::converted(&[(3, 2), (4, 6), (1, 2)], cast);
        let (items, boxes) = spread_over(turned, piece(0, 0, 8, 32)).unwrap();
        let expected = (2..10).map(|i| (4 * (i - 2), i / 4 * 2 + i % 4 * 6, 4));
        assert_eq!((items, boxes), (expected.collect(), 3));
        let straight = Strides::converted(&[(12, 2)], cast);
        assert_eq!(straight.span(), 24);
        assert_eq!(spread_over(straight, piece(0, 0, 8, 32)).unwrap(), (vec![(0, 4, 32)], 1));
        // Two rows of a slice, 40 bytes apart in the file.
        let rows = Piece { rows: 2, from_stride: 40, to_stride: 16, ..piece(0, 4, 16, 16) };
        let (items, _) = spread_over(Strides::converted(&[(12, 2)], cast), rows).unwrap();
        assert_eq!(items, [(4, 8, 16), (44, 16, 16)]);
    }

    #[test]
    fn an_element_that_is_converted_and_divided_is_an_error() {
        let cast = Cast::new(DType::F32, DType::BF16).unwrap();
        for (to, len) in [(2, 8), (0, 6)] {
            let found = spread_over(Strides::converted(&[(12, 2)], cast), piece(0, 0, to, len));
            assert_eq!(found.unwrap_err().kind(), ErrorKind::Internal);
        }
    }

    #[test]
    fn rows_of_a_slice_into_a_transposed_matrix_are_one_box() {
        // Three rows of four elements of two bytes, ten apart in the file, into columns.
        let dims = [(3, 2), (4, 6), (2, 1)];
        let rows = Piece { rows: 3, from_stride: 18, to_stride: 8, ..piece(0, 4, 0, 8) };
        let (items, boxes) = spread_out(&dims, rows);
        let expected = (0..3).flat_map(|i| (0..4).map(move |j| (4 + 18 * i + 2 * j, 2 * i + 6 * j, 2)));
        assert_eq!((items, boxes), (expected.collect(), 1));
    }

    #[test]
    fn runs_that_lie_between_those_of_another_strip_are_one_box() {
        // The second of two runs of each of six rows: rows 1 to 4 of them.
        let dims = [(6, 16), (2, 4), (2, 1)];
        let rows = Piece { rows: 4, from_stride: 10, to_stride: 4, ..piece(0, 3, 6, 2) };
        let (items, boxes) = spread_out(&dims, rows);
        let expected = (0..4).map(|i| (3 + 10 * i, 16 * (i + 1) + 4, 2));
        assert_eq!((items, boxes), (expected.collect(), 1));
    }

    #[test]
    fn an_extent_that_begins_and_ends_within_elements_is_three_boxes_for_each_axis() {
        // Bytes 3 to 20 of a transposed 3 x 4 matrix of two bytes each.
        let dims = [(3, 2), (4, 6), (2, 1)];
        let (items, boxes) = spread_out(&dims, piece(0, 0, 3, 18));
        let strides = Strides::new(&dims);
        let bytes: Vec<_> =
            items.iter().flat_map(|&(from, to, len)| (0..len).map(move |i| (from + i, to + i))).collect();
        assert_eq!(bytes, (0..18).map(|i| (i, strides.memory(3 + i))).collect::<Vec<_>>());
        assert_eq!(boxes, 5, "half an element, the row's rest, a row, two elements, half an element");
    }

    #[test]
    fn rows_that_are_no_step_of_the_destination_come_one_by_one() {
        let dims = [(3, 2), (4, 6), (2, 1)];
        let rows = Piece { rows: 3, from_stride: 9, to_stride: 3, ..piece(0, 0, 2, 3) };
        let (items, _) = spread_out(&dims, rows);
        let strides = Strides::new(&dims);
        let bytes: Vec<_> =
            items.iter().flat_map(|&(from, to, len)| (0..len).map(move |i| (from + i, to + i))).collect();
        let expected = (0..3).flat_map(|row| (0..3).map(move |i| (9 * row + i, 2 + 3 * row + i)));
        assert_eq!(bytes, expected.map(|(from, dense)| (from, strides.memory(dense))).collect::<Vec<_>>());
    }

    #[test]
    fn rows_that_scatter_into_strided_memory_are_cut_into_its_runs() {
        let (schedule, mut layout) =
            plan(Landing::Scatter, &[BlockKind::Foreign { want: 0 }], vec![piece(0, 10, 3, 20)]);
        layout.strides = vec![Some(Strides::new(&[(4, 16), (8, 1)]))];
        let at = Addresses::new(&schedule, &layout, 0, base);
        let Destination::Scatter(places) = at.destination(None).unwrap() else { panic!() };
        let found: Vec<_> = places.iter().map(|p| (p.0 as u64, p.1)).collect();
        let to = |offset: u64| (1 << 20) + offset;
        assert_eq!(found, [(0, 10), (to(3), 5), (to(16), 8), (to(32), 7), (0, 70)]);
        assert_eq!(at.written().collect::<Vec<_>>(), [(0, 0, 56)]);
    }
}
