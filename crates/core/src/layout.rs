//! Layout: every want's place in every destination block. Pure: same input, same layout, on every rank.

use crate::error::Result;
use crate::format::Checkpoint;
use crate::placement::{Runs, Want};

/// What kind of memory the wants go to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// CPU memory. `mapped[f]` says whether file `f` is mapped; the rest is read into private memory.
    Cpu {
        /// One flag per file of the checkpoint.
        mapped: Vec<bool>,
    },
    /// Memory of one accelerator, dense blocks.
    Gpu,
    /// Memory of the caller: one block per want, in order of the wants; contiguous (row-major).
    Foreign,
}

/// One destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSpec {
    /// How its memory comes about.
    pub kind: BlockKind,
    /// Its size in bytes.
    pub nbytes: u64,
}

/// How a block's memory comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// File number `file` mapped whole: offset in the block = offset in the file.
    Mapped {
        /// The file.
        file: u32,
    },
    /// Private memory that mirrors bytes `start..start + nbytes` of file `file` (`start` is a multiple of the page size),
    /// so that reads land in it directly.
    Mirror {
        /// The file.
        file: u32,
        /// File offset of the block's first byte.
        start: u64,
    },
    /// Dense memory with tensor starts aligned to 64 B (CPU) or 256 B (GPU).
    Dense,
    /// The caller's tensor, number `want` of the wants.
    Foreign {
        /// The want whose tensor it is.
        want: u32,
    },
}

/// Where a want's bytes go: `Runs::nbytes` dense bytes from `offset` on in block number `block`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Number of the block in [`Layout::blocks`].
    pub block: u32,
    /// Offset in the block, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub nbytes: u64,
}

/// Every want's place.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// The destinations, in the order in which hand-out first touches them.
    pub blocks: Vec<BlockSpec>,
    /// One place per want, in order of the wants.
    pub places: Vec<Place>,
    /// One set of runs per want, in order of the wants.
    pub runs: Vec<Runs>,
    /// Want numbers in the order of reading and hand-out.
    pub order: Vec<u32>,
}

impl Layout {
    /// Lays `wants` out for `target` in the given order. `gap` is the coalescing limit in bytes, which decides what one
    /// mirror block spans.
    pub fn new(
        checkpoint: &Checkpoint,
        wants: &[Want],
        target: &Target,
        order: crate::options::Order,
        gap: u64,
    ) -> Result<Layout> {
        let _ = (checkpoint, wants, target, order, gap);
        unimplemented!()
    }
}
