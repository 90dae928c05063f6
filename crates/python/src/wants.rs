//! The wants of a load, as Python gives them.

use crate::guard::Listed;
use penstock::plan::want::{AxisSlice, Want};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

/// One (start, stop, step) per dimension, or None for the whole tensor.
pub(crate) type Region = Option<Listed<(u64, u64, u64)>>;

/// The wants: tensors by their numbers, whole or in part.
pub(crate) fn wants_of(
    core: &penstock::Checkpoint,
    wants: Option<Listed<u32>>,
    regions: Option<Listed<Region>>,
) -> PyResult<Vec<Want>> {
    let tensors = wants.map_or_else(|| (0..core.len() as u32).collect(), |wants| wants.0);
    let there_are_all = regions.as_ref().is_none_or(|regions| regions.0.len() == tensors.len());
    let regions = regions.into_iter().flat_map(|regions| regions.0).chain(std::iter::repeat_with(|| None));
    let wants = tensors.into_iter().zip(regions).map(|(tensor, region)| want_of(core, tensor, region));
    let wants = wants.collect::<PyResult<Vec<Want>>>()?;
    if !there_are_all {
        return Err(PyValueError::new_err("there must be one region (or None) per want"));
    }
    Ok(wants)
}

/// One want: a tensor by its number, whole or in part.
pub(crate) fn want_of(core: &penstock::Checkpoint, tensor: u32, region: Region) -> PyResult<Want> {
    if tensor as usize >= core.len() {
        return Err(PyIndexError::new_err(format!("tensor {tensor} of {}", core.len())));
    }
    Ok(match region {
        None => Want::whole(tensor),
        Some(region) => {
            Want::part(tensor, region.0.into_iter().map(|(start, end, step)| AxisSlice { start, end, step }))
        }
    })
}
