//! Schedule: the extents to read, in order, cut and coalesced, each with its route and its pieces.

use crate::format::Checkpoint;
use crate::layout::Layout;
use std::ops::Range;

/// How an extent travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// Pages of the file are mapped and populated in place.
    Mapped,
    /// Read through the page cache by copy workers.
    Buffered,
    /// O_DIRECT.
    Direct,
}

/// Where an extent's bytes arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landing {
    /// In the file's own mapping: populated, not copied.
    Mapping {
        /// The mapped block.
        block: u32,
    },
    /// In place in a mirror block, at the extent's own phase (alignment slack included).
    Block {
        /// The mirror block.
        block: u32,
    },
    /// Scattered by the read itself to its pieces' places (buffered route into CPU memory).
    Scatter,
    /// In a slab; then a copy of its pieces to their places.
    Slab,
}

/// One contiguous byte range of one file, read by one I/O.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The file.
    pub file: u32,
    /// First byte read (page-aligned for direct, as is the end unless the file ends there).
    pub offset: u64,
    /// Bytes read.
    pub len: u64,
    /// Bytes from `offset` on that must arrive; the rest, past the last wanted byte, may be cut short by the end of file.
    pub need: u64,
    /// The route it starts with; a refused route may change while the load runs.
    pub route: Route,
    /// Where its bytes arrive.
    pub landing: Landing,
    /// Its pieces in [`Schedule::pieces`].
    pub pieces: Range<u32>,
    /// Distinct wanted bytes in it; `len` less this is slack and gap.
    pub wanted: u64,
    /// Bytes of alignment slack before the first and after the last wanted byte.
    pub slack: u64,
}

/// One copy from an extent to a block: `rows` rows of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The want whose bytes these are.
    pub want: u32,
    /// Number of the block.
    pub block: u32,
    /// Offset of the first row in the extent.
    pub from: u64,
    /// Offset of the first row in the block.
    pub to: u64,
    /// Bytes of each row.
    pub len: u64,
    /// Number of rows, at least 1.
    pub rows: u64,
    /// Bytes from one row to the next in the extent (anything where `rows` is 1).
    pub from_stride: u64,
    /// Bytes from one row to the next in the block.
    pub to_stride: u64,
}

impl Piece {
    /// Bytes it copies.
    pub fn nbytes(&self) -> u64 {
        self.len * self.rows
    }
}

/// What the schedule needs to know of a file besides the checkpoint.
#[derive(Debug, Clone, Default)]
pub struct FileTraits {
    /// Number of the storage device; extents of different devices interleave.
    pub storage: u32,
    /// Bytes that O_DIRECT offsets and lengths must be multiples of; `None` where O_DIRECT is not to be used.
    pub direct_align: Option<u64>,
    /// Sorted, disjoint byte ranges whose pages are resident.
    pub resident: Vec<Range<u64>>,
}

/// Limits of a schedule, from the options and the machine.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most bytes of one extent (a multiple of the page size).
    pub extent: u64,
    /// Unwanted bytes between two runs that are read rather than skipped, at most.
    pub gap: u64,
    /// Route of bytes that are not resident.
    pub cold: Route,
    /// Route of resident bytes; `Mapped` blocks are always populated, whatever this says.
    pub warm: Route,
    /// Buffered extents into CPU memory scatter to their places where rows are at least this long; below, they go
    /// through a slab (an iovec costs more than a copy). `None`: everything that is not in place goes through a slab.
    pub scatter: Option<u64>,
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
}

impl Schedule {
    /// Cuts, coalesces, routes and orders the runs of `layout`. `files` has one entry per file of the checkpoint.
    pub fn new(checkpoint: &Checkpoint, layout: &Layout, files: &[FileTraits], limits: &Limits) -> Schedule {
        let _ = (checkpoint, layout, files, limits);
        unimplemented!()
    }
}
