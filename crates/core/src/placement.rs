//! Placement: what part of each tensor this process wants, as contiguous byte ranges ("runs").

use crate::error::{Error, ErrorKind, Result};
use crate::format::{quoted, Checkpoint, TensorInfo};
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
            Some(r) => r.iter().map(|r| r.end.saturating_sub(r.start)).collect(),
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
    /// The runs of `want`, as few and as long as they can be.
    ///
    /// # Errors
    /// `Slice` if the region has the wrong rank, leaves the tensor, or does not fall on whole bytes (sub-byte dtypes);
    /// `UnknownTensor` if the checkpoint has no tensor of that number.
    pub fn of(checkpoint: &Checkpoint, want: &Want) -> Result<Runs> {
        if want.tensor as usize >= checkpoint.len() {
            return Err(Error::new(
                ErrorKind::UnknownTensor,
                format!("no tensor number {}: the checkpoint has {}", want.tensor, checkpoint.len()),
            ));
        }
        let info = checkpoint.tensor(want.tensor);
        let Some(region) = &want.region else {
            return Ok(Runs { start: info.begin, len: info.nbytes(), axes: Vec::new() });
        };
        let fail = |why: String| {
            let path = &checkpoint.files()[info.file as usize].path;
            Err(Error::new(
                ErrorKind::Slice,
                format!("slice {region:?} of tensor {} ({} x {:?}): {why}", quoted(info.name), info.dtype, info.shape),
            )
            .at(path)
            .range(info.begin..info.end))
        };
        if region.len() != info.shape.len() {
            return fail(format!("it has {} dimensions, the tensor {}", region.len(), info.shape.len()));
        }
        for (axis, (r, &extent)) in region.iter().zip(info.shape).enumerate() {
            if r.start > r.end || r.end > extent {
                return fail(format!("{}..{} is not within 0..{extent} in dimension {axis}", r.start, r.end));
            }
        }
        if region.iter().any(|r| r.start == r.end) {
            return Ok(Runs { start: info.begin, len: 0, axes: Vec::new() });
        }
        // No product below overflows: opening the checkpoint has multiplied this shape out, and as nothing here is empty
        // every factor is at least 1.
        let bits = info.dtype.bits();
        let (mut start, mut len, mut stride) = (0, bits, bits);
        let mut whole = true;
        let mut axes: Vec<(u64, u64)> = Vec::new();
        for (r, &extent) in region.iter().zip(info.shape).rev() {
            let count = r.end - r.start;
            start += r.start * stride;
            if whole {
                // Everything further in is wanted in full, so this range is contiguous.
                len *= count;
                whole = count == extent;
            } else if count > 1 {
                match axes.last_mut() {
                    // The next axis out goes on where this one ends: one longer axis.
                    Some(inner) if inner.0 * inner.1 == stride => inner.0 *= count,
                    _ => axes.push((count, stride)),
                }
            }
            stride *= extent;
        }
        if start % 8 != 0 || len % 8 != 0 || axes.iter().any(|a| a.1 % 8 != 0) {
            return fail(format!("with {bits} bits to an element it does not fall on whole bytes"));
        }
        axes.reverse();
        axes.iter_mut().for_each(|a| a.1 /= 8);
        Ok(Runs { start: info.begin + start / 8, len: len / 8, axes })
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
