//! Placement: what part of each tensor this process wants, as contiguous byte ranges ("runs").

use crate::error::Result;
use crate::format::{Checkpoint, TensorInfo};
use std::ops::Range;

/// One wanted tensor or part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Number of the tensor in the checkpoint.
    pub tensor: u32,
    /// The hyper-rectangle wanted, one range in elements per dimension; `None` wants the whole tensor.
    pub region: Option<Box<[Range<u64>]>>,
}

impl Want {
    /// The whole of tensor number `tensor`.
    pub fn whole(tensor: u32) -> Self {
        Self { tensor, region: None }
    }

    /// Every tensor of a checkpoint, whole, in file order.
    pub fn all(checkpoint: &Checkpoint) -> Vec<Self> {
        (0..checkpoint.len() as u32).map(Self::whole).collect()
    }

    /// Shape of the wanted part, in elements.
    pub fn shape(&self, info: &TensorInfo<'_>) -> Vec<u64> {
        match &self.region {
            None => info.shape.to_vec(),
            Some(r) => r.iter().map(|r| r.end - r.start).collect(),
        }
    }
}

/// The runs of one want: `count` runs of `len` bytes each, nested in up to rank-many strided axes, in ascending order of
/// both file offset and dense (row-major) destination offset. Never materialised: a column slice has millions of runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs {
    /// Offset of the first run, from the start of the file.
    pub start: u64,
    /// Bytes in each run; 0 only where nothing is wanted (then `axes` is empty).
    pub len: u64,
    /// (count, stride in bytes of the file), outermost first; every count is at least 2.
    pub axes: Vec<(u64, u64)>,
}

impl Runs {
    /// The runs of `want`. Errors with kind `Slice` if a range is out of bounds or does not fall on whole bytes
    /// (sub-byte dtypes).
    pub fn of(checkpoint: &Checkpoint, want: &Want) -> Result<Runs> {
        let _ = (checkpoint, want);
        unimplemented!()
    }

    /// How many runs there are.
    pub fn count(&self) -> u64 {
        self.axes.iter().map(|a| a.0).product()
    }

    /// Bytes of all runs together.
    pub fn nbytes(&self) -> u64 {
        self.count() * self.len
    }

    /// File offset of run number `i` (0-based, ascending); its dense offset is `i * len`.
    pub fn offset(&self, mut i: u64) -> u64 {
        let mut at = self.start;
        for &(count, stride) in self.axes.iter().rev() {
            at += i % count * stride;
            i /= count;
        }
        at
    }

    /// One past the last byte of the last run, from the start of the file.
    pub fn end(&self) -> u64 {
        self.axes.iter().map(|&(n, s)| (n - 1) * s).sum::<u64>() + self.start + self.len
    }
}
