//! The request for a load.

use super::layout::Layout;
use super::strides::Foreign;
use super::want::Want;
use crate::device::Fence;
use crate::format::Checkpoint;
use crate::memory::Keep;
use crate::options::Options;
use std::sync::Arc;

/// Where the tensors go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In the memory of this machine.
    Cpu,
    /// In the memory of GPU number `0`.
    Gpu(u32),
}

/// The memory that the tensors go to.
pub enum Memory {
    /// Allocated here.
    Ours,
    /// Granted block by block by the caller (GPU only): see [`Load::wanted_blocks`](crate::Load::wanted_blocks) and [`Load::grant`](crate::Load::grant).
    Granted,
    /// The caller's tensors, one per want. Several wants may be parts of one tensor, or the same part. No two of the
    /// caller's tensors may share a byte.
    Into {
        /// The memory of each want's destination. It may be strided, and in CPU memory of another floating-point dtype.
        tensors: Vec<Foreign>,
        /// Keeps the tensors alive; held until nothing can write to them any more.
        keep: Keep,
        /// The work that is still queued on the tensors' stream.
        fence: Option<Fence>,
    },
}

/// A request to load tensors.
pub struct Request {
    /// The checkpoint.
    pub checkpoint: Arc<Checkpoint>,
    /// The tensors and slices that are wanted.
    pub wants: Vec<Want>,
    /// A layout of these wants that was made elsewhere; `None`: the load makes its own. It brings the order of hand-out.
    pub layout: Option<Arc<Layout>>,
    /// Where the tensors go.
    pub device: Where,
    /// The memory that they go to.
    pub memory: Memory,
    /// The options of the load.
    pub options: Options,
    /// Whether the consumer takes tensors one by one (`next`, `take`), with read-ahead bounded by `options.window`.
    pub stream: bool,
}
