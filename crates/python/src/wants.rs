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
    let mut wants: Vec<Want> = match wants {
        None => Want::all(core),
        Some(wants) => wants.0.into_iter().map(Want::whole).collect(),
    };
    if let Some(want) = wants.iter().find(|w| w.tensor as usize >= core.len()) {
        return Err(PyIndexError::new_err(format!("tensor {} of {}", want.tensor, core.len())));
    }
    if let Some(regions) = regions {
        if regions.0.len() != wants.len() {
            return Err(PyValueError::new_err("there must be one region (or None) per want"));
        }
        for (want, region) in wants.iter_mut().zip(regions.0) {
            want.region =
                region.map(|r| r.0.into_iter().map(|(start, end, step)| AxisSlice { start, end, step }).collect());
        }
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
