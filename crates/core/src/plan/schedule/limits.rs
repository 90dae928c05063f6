//! Inputs of a schedule: traits of each file, and limits of the load.

use crate::way::Way;
use std::ops::Range;

/// Traits of a file for the schedule, beside the checkpoint's.
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
    /// Reads pass no multiple of this many bytes: see [`Facts::cut`](crate::store::Facts::cut).
    pub cut: Option<u64>,
    /// Set if short rows of it are read row by row: the page cache of this machine holds all that is wanted. Gaps of at most
    /// so many bytes between them are read.
    pub rows: Option<u64>,
}

impl FileTraits {
    pub(super) fn extent(&self, limits: &Limits) -> u64 {
        self.extent.unwrap_or(limits.extent)
    }

    pub(super) fn gap(&self, limits: &Limits) -> u64 {
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
