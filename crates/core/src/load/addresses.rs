//! Where bytes go: from the plan of one extent to addresses.
//!
//! Pure: no I/O, no locks, no memory is touched. The engine thread uses these functions to start reads and copies, and
//! the engine's simulator runs them on real buffers.

use super::shared::internal;
use crate::device::Copy;
use crate::error::Result;
use crate::extent::{Extent, Landing, Piece};
use crate::options::GPU_ALIGN;
use crate::plan::layout::{BlockKind, Layout};
use crate::plan::schedule::Schedule;
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
    /// Of extent number `extent`. `base` gives the address of a block's first byte, when the block has memory: a host
    /// address or a device pointer.
    pub(crate) fn new(schedule: &'a Schedule, layout: &'a Layout, extent: u32, base: B) -> Self {
        let extent = &schedule.extents[extent as usize];
        let pieces = &schedule.pieces[extent.pieces.start as usize..extent.pieces.end as usize];
        Self { extent, pieces, layout, base }
    }

    /// Where its read lands. `slab` is the address of the slab that it holds, if it holds one.
    pub(crate) fn destination(&self, slab: Option<*mut u8>) -> Result<Destination> {
        let e = self.extent;
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

    /// The copies out of the slab at `slab`, one for each piece.
    pub(crate) fn copies(&self, slab: *mut u8) -> Result<Vec<Copy>> {
        let mut copies = Vec::with_capacity(self.pieces.len());
        for p in self.pieces {
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

    /// What its last leg writes, in order: block, offset in the block, bytes. Nothing of a mapping is written.
    pub(crate) fn written(&self) -> impl Iterator<Item = (u32, u64, u64)> + '_ {
        let (whole, pieces) = match self.extent.landing {
            Landing::Mapping { .. } => (None, &[][..]),
            Landing::Block { .. } => (self.mirror().ok().map(|(block, at)| (block, at, self.extent.len)), &[][..]),
            Landing::Scatter | Landing::Slab => (None, self.pieces),
        };
        whole.into_iter().chain(pieces.iter().map(|p| (p.block, p.to, (p.rows - 1) * p.to_stride + p.len)))
    }

    /// Blocks whose memory has to stay until the leg that fills them has ended. One comes again only if pieces alternate
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
            let base = self.block(p.block)? + p.to;
            for row in 0..p.rows {
                rows.push((p.from + row * p.from_stride, (base + row * p.to_stride) as *mut u8, p.len));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::extent::{Route, TakesSlab};
    use crate::plan::layout::{BlockSpec, Place};

    const MIRROR: BlockKind = BlockKind::Mirror { file: 0, start: 4096 };

    /// A plan of one extent, at byte 5000 of the file and 100 bytes long. The blocks begin at 1 << 20, 2 << 20 and so on.
    fn plan(landing: Landing, kinds: &[BlockKind], pieces: Vec<Piece>) -> (Schedule, Layout) {
        let extent = Extent {
            file: 0,
            offset: 5000,
            len: 100,
            need: 100,
            route: Route::Buffered,
            landing,
            staging: TakesSlab::AtRequest,
            pieces: 0..pieces.len() as u32,
            wanted: 100,
            slack: 0,
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
}
