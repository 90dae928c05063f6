//! Memory of the caller that is strided or of another dtype: where in it the elements of a want go.
//!
//! The plan counts a want's bytes in dense (row-major) order, as the checkpoint has them. [`Strides`] says where each of them
//! lies.

use crate::device::cast::Cast;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{DType, TensorInfo};
use std::ops::Range;

/// The caller's memory for one want.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// Address of the first element: a host address or a device pointer.
    pub address: u64,
    /// Bytes from there to the end of the last element.
    pub nbytes: u64,
    /// How its elements lie: (count, bytes from one to the next) of each dimension, outermost first. The elements of the want
    /// fill them in row-major order. The dimensions need not be the want's: one of these may be divided into several, and
    /// several may be one. `None`: contiguous. For dtypes that are no whole bytes, the elements are bytes.
    pub dims: Option<Box<[(u64, u64)]>>,
    /// The dtype of its elements if it is not the tensor's: the load converts them. Among F16, BF16, F32 and F64, in CPU memory.
    pub cast: Option<DType>,
}

impl Foreign {
    /// Contiguous memory of the tensor's dtype.
    pub fn contiguous(address: u64, nbytes: u64) -> Self {
        Self { address, nbytes, dims: None, cast: None }
    }

    /// Where the elements go of a want that has `nbytes` bytes of the tensor `info`; `None` if its bytes are contiguous from
    /// `address` on. `cpu`: it is memory of the host.
    ///
    /// # Errors
    /// `Mismatch` if the memory does not have the size or the number of elements of the want. `Invalid` if elements lie behind
    /// the memory, or may share bytes: if a stride is shorter than what lies within it. `Unsupported` for a cast of other
    /// dtypes, of a tensor whose elements the file misaligns, or onto a GPU.
    pub(crate) fn strides(&self, info: &TensorInfo<'_>, nbytes: u64, cpu: bool) -> Result<Option<Strides>> {
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        let cast = self.cast.filter(|to| *to != info.dtype).map(|to| conversion(info, to, cpu)).transpose()?;
        let bits = info.dtype.bits();
        let (what, size) = if bits % 8 == 0 { ("elements", bits / 8) } else { ("bytes", 1) };
        let (wanted, item) = (nbytes / size, cast.map_or(size, Cast::to_bytes));
        let Some(dims) = &self.dims else {
            if wanted.checked_mul(item) != Some(self.nbytes) {
                let text = match cast {
                    None => format!("a destination of {} bytes for {nbytes} wanted bytes", self.nbytes),
                    Some(_) => format!("a destination of {} bytes for {wanted} elements of {item} bytes", self.nbytes),
                };
                let expected = wanted.saturating_mul(item);
                return Err(Error::new(ErrorKind::Mismatch, text).with_values(expected, self.nbytes));
            }
            return Ok(cast.filter(|_| wanted > 0).map(|cast| Strides::converted(&[(wanted, item)], cast)));
        };
        let count = if dims.iter().any(|d| d.0 == 0) { Some(0) } else { product(dims) };
        if count != Some(wanted) {
            let text = match count {
                Some(count) => format!("a destination of {count} {what} for {wanted} wanted {what}"),
                None => format!("a destination of more {what} than an address space has, for {wanted} wanted {what}"),
            };
            return Err(Error::new(ErrorKind::Mismatch, text).with_values(wanted, count.unwrap_or(u64::MAX)));
        }
        if wanted == 0 {
            return Ok(None);
        }
        let mut dims: Vec<(u64, u64)> = dims.iter().copied().filter(|d| d.0 > 1).collect();
        let mut ascending = dims.clone();
        ascending.sort_unstable_by_key(|d| d.1);
        let mut within = Some(item);
        for (count, stride) in ascending {
            let Some(inner) = within.filter(|n| *n <= self.nbytes) else { break };
            if stride < inner {
                return invalid(format!(
                    "the elements of a destination may share memory: {inner} bytes lie within a stride of {stride}"
                ));
            }
            within = (count - 1).checked_mul(stride).and_then(|n| n.checked_add(inner));
        }
        if within.is_none_or(|n| n > self.nbytes) || self.address.checked_add(self.nbytes).is_none() {
            return invalid(format!("elements of a destination lie behind its {} bytes", self.nbytes));
        }
        // The innermost dimensions that are contiguous are one run.
        let mut run = 1;
        while let Some(&(count, _)) = dims.last().filter(|d| d.1 == run * item) {
            run *= count;
            dims.pop();
        }
        if dims.is_empty() && cast.is_none() {
            return Ok(None);
        }
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(dims.len() + 1);
        for (count, stride) in dims {
            match merged.last_mut() {
                // A step of the outer dimension is as long as all steps of this one.
                Some(outer) if count.checked_mul(stride) == Some(outer.1) => *outer = (outer.0 * count, stride),
                _ => merged.push((count, stride)),
            }
        }
        Ok(Some(match cast {
            Some(cast) => {
                merged.push((run, item));
                Strides::converted(&merged, cast)
            }
            None => {
                merged.push((run * item, 1));
                Strides::new(&merged)
            }
        }))
    }
}

/// The product of the counts; `None` if it overflows.
fn product(dims: &[(u64, u64)]) -> Option<u64> {
    dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.0))
}

/// The conversion of a tensor's elements.
fn conversion(info: &TensorInfo<'_>, to: DType, cpu: bool) -> Result<Cast> {
    let unsupported = |why: String| Error::new(ErrorKind::Unsupported, why);
    let from = info.dtype;
    if !cpu {
        return Err(unsupported(format!("{from} is cast to {to} in CPU memory only, and its destination is on a GPU")));
    }
    let cast = Cast::new(from, to).ok_or_else(|| {
        unsupported(format!("{from} is not cast to {to} on the way: only F16, BF16, F32 and F64 are, to each other"))
    })?;
    // Reads are cut at pages. They divide no element whose distance from the start of the file is a multiple of its size.
    if info.begin % cast.from_bytes() != 0 {
        let text = format!(
            "{from} is not cast to {to} on the way: its elements are misaligned in the file, at {}",
            info.begin
        );
        return Err(unsupported(text));
    }
    Ok(cast)
}

/// Where the dense bytes of one want lie: evenly strided dimensions, and none of their elements share a byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strides {
    axes: Box<[Axis]>,
    /// If there is one, the innermost axis is one of elements, and otherwise of bytes.
    cast: Option<Cast>,
}

/// One dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Axis {
    pub(crate) count: u64,
    /// Bytes from one step to the next in dense order.
    pub(crate) dense: u64,
    /// Bytes from one step to the next in memory.
    pub(crate) memory: u64,
}

/// A box: `count` steps of one axis, and all axes within that one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Dense offset of its first byte.
    pub(crate) dense: u64,
    /// Offset of its first byte in memory.
    pub(crate) memory: u64,
    /// Number of its outermost axis; the number of axes if it is a single element.
    pub(crate) axis: usize,
    pub(crate) count: u64,
}

impl Strides {
    /// Strides from (count, stride) of each dimension, outermost first. The last dimension is the bytes of a run.
    pub(crate) fn new(dims: &[(u64, u64)]) -> Strides {
        Strides { axes: axes(dims, 1), cast: None }
    }

    /// The same for elements that are converted. The last dimension is that of the elements in a contiguous run.
    pub(crate) fn converted(dims: &[(u64, u64)], cast: Cast) -> Strides {
        Strides { axes: axes(dims, cast.from_bytes()), cast: Some(cast) }
    }

    /// The conversion of elements.
    pub(crate) fn cast(&self) -> Option<Cast> {
        self.cast
    }

    /// Bytes of the runs that are contiguous in memory. Each begins at a multiple of this in dense order. `None` if elements
    /// are converted: then no run of bytes is.
    pub fn run(&self) -> Option<u64> {
        self.cast.is_none().then(|| self.axes.last().map_or(1, |a| a.count))
    }

    /// Bytes of memory from the first one to the end of the last one.
    pub fn span(&self) -> u64 {
        let last = self.cast.map_or(1, Cast::to_bytes);
        self.axes.iter().map(|a| (a.count - 1) * a.memory).sum::<u64>() + last
    }

    /// Where the byte at this dense offset lies, from the first one. If elements are converted, only whole ones lie anywhere.
    pub fn memory(&self, mut dense: u64) -> u64 {
        let mut at = 0;
        for axis in &self.axes {
            at += dense / axis.dense * axis.memory;
            dense %= axis.dense;
        }
        at
    }

    /// The axes whose steps are at least `dense` bytes long, and those within such a step, if a step can be that long.
    /// Otherwise `None`.
    pub(crate) fn divided(&self, dense: u64) -> Option<(Vec<Axis>, Vec<Axis>)> {
        let (mut outer, mut inner) = (Vec::new(), Vec::new());
        for &axis in &self.axes {
            let Axis { count, dense: step, memory } = axis;
            if step >= dense {
                outer.push(axis);
            } else if step * count <= dense {
                inner.push(axis);
            } else {
                let steps = dense / step;
                if dense % step != 0 || count % steps != 0 {
                    return None;
                }
                outer.push(Axis { count: count / steps, dense, memory: memory * steps });
                inner.push(Axis { count: steps, ..axis });
            }
        }
        // A step of the innermost of the outer axes has to be exactly this long.
        outer.last().is_none_or(|a| a.dense == dense).then_some((outer, inner))
    }

    pub(crate) fn axes(&self) -> &[Axis] {
        &self.axes
    }
}

/// Axes of these (count, stride), outermost first; a step of the innermost one is `dense` bytes in dense order.
fn axes(dims: &[(u64, u64)], mut dense: u64) -> Box<[Axis]> {
    let mut axes: Vec<Axis> = dims.iter().map(|&(count, memory)| Axis { count, dense: 0, memory }).collect();
    for axis in axes.iter_mut().rev() {
        axis.dense = dense;
        dense *= axis.count;
    }
    axes.into()
}

impl Part {
    /// Its axes, outermost first; `axes` are those that it is a part of.
    pub(crate) fn axes(self, axes: &[Axis]) -> impl Iterator<Item = Axis> + '_ {
        let first = axes.get(self.axis).map(|axis| Axis { count: self.count, ..*axis });
        first.into_iter().chain(axes.iter().skip(self.axis + 1).copied())
    }
}

/// Appends the boxes that make up a dense range: those that are cut off at either end, and whole ones between them. Two for
/// each axis at most, and one more.
pub(crate) fn parts(axes: &[Axis], range: Range<u64>, found: &mut Vec<Part>) {
    divide(axes, Part { dense: 0, memory: 0, axis: 0, count: 1 }, range, found);
}

/// The same from axis `at.axis` on, for a range that is counted from `at.dense`.
fn divide(axes: &[Axis], at: Part, range: Range<u64>, found: &mut Vec<Part>) {
    let Some(axis) = axes.get(at.axis) else { return found.push(at) };
    let step = |n: u64| Part { dense: at.dense + n * axis.dense, memory: at.memory + n * axis.memory, ..at };
    let (mut first, begin) = (range.start / axis.dense, range.start % axis.dense);
    let (past, end) = (range.end / axis.dense, range.end % axis.dense);
    let mut within = |n: u64, range: Range<u64>| divide(axes, Part { axis: at.axis + 1, ..step(n) }, range, found);
    if first == past {
        return within(first, begin..end);
    }
    if begin > 0 {
        within(first, begin..axis.dense);
        first += 1;
    }
    if first < past {
        found.push(Part { count: past - first, ..step(first) });
    }
    if end > 0 {
        divide(axes, Part { axis: at.axis + 1, ..step(past) }, 0..end, found);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Counts of up to four dimensions, in strides of any order.
    fn strides() -> impl Strategy<Value = Strides> {
        let dims = prop::collection::vec((1u64..6, 0u64..3), 1..4);
        (dims.prop_flat_map(|dims| Just(dims).prop_shuffle()), 1u64..5, any::<u64>()).prop_map(|(dims, run, order)| {
            let (mut found, mut within) = (vec![(0, 0); dims.len()], run);
            let mut left: Vec<usize> = (0..dims.len()).collect();
            for (count, padding) in dims {
                let dimension = left.remove((order % 7) as usize % left.len());
                found[dimension] = (count, within + padding);
                within += (count - 1) * (within + padding);
            }
            found.push((run, 1));
            Strides::new(&found)
        })
    }

    /// The dense and memory offsets of all bytes of a part.
    fn bytes(part: Part, axes: &[Axis]) -> Vec<(u64, u64)> {
        let mut found = vec![(part.dense, part.memory)];
        for axis in part.axes(axes) {
            let step = |i: u64| move |&(dense, memory): &(u64, u64)| (dense + i * axis.dense, memory + i * axis.memory);
            found = found.iter().flat_map(|at| (0..axis.count).map(move |i| step(i)(at))).collect();
        }
        found
    }

    proptest! {
        #[test]
        fn the_parts_of_a_range_are_its_bytes_in_order(strides in strides(), a in any::<u64>(), b in any::<u64>()) {
            let all = strides.axes().iter().map(|axis| axis.count).product::<u64>();
            let (a, b) = (a % all, b % all);
            let range = a.min(b)..a.max(b) + 1;
            let mut found = Vec::new();
            parts(strides.axes(), range.clone(), &mut found);
            let found_bytes: Vec<_> = found.iter().flat_map(|part| bytes(*part, strides.axes())).collect();
            prop_assert_eq!(found_bytes, range.map(|dense| (dense, strides.memory(dense))).collect::<Vec<_>>());
            prop_assert!(found.len() <= 2 * strides.axes().len() + 1);
        }

        #[test]
        fn divided_axes_are_the_same_axes(strides in strides(), step in 1u64..40) {
            if let Some((outer, inner)) = strides.divided(step) {
                let both: Vec<Axis> = outer.iter().chain(&inner).copied().collect();
                let all = strides.axes().iter().map(|axis| axis.count).product::<u64>();
                let part = Part { dense: 0, memory: 0, axis: 0, count: both[0].count };
                let expected: Vec<_> = (0..all).map(|dense| (dense, strides.memory(dense))).collect();
                prop_assert_eq!(bytes(part, &both), expected);
                prop_assert!(outer.iter().all(|axis| axis.dense % step == 0));
                prop_assert!(inner.iter().map(|axis| axis.count).product::<u64>() == step.min(all));
            }
        }
    }
}
