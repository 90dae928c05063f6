//! The small files of a model, which lie beside its weights.

use crate::errors::interruptibly;
use crate::guard::{answer, Answer, Listed};
use crate::hub::HubLayout;
use crate::options::stall_timeout_of;
use crate::storage::{stores_of, stores_of_hub};
use penstock::format;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::ffi::OsString;

/// The names of what lies directly in a folder, or under an address; with `folders` those of folders too.
#[pyfunction]
#[pyo3(signature = (place, stall_timeout = None, storage = None, *, folders = false))]
pub(crate) fn names_in<'py>(
    py: Python<'py>,
    place: OsString,
    stall_timeout: Option<f64>,
    storage: Option<&Bound<'py, PyAny>>,
    folders: bool,
) -> Answer<'py, Vec<OsString>> {
    answer(py, || {
        let stall = stall_timeout_of(stall_timeout)?;
        let stores = stores_of(py, storage, None)?;
        interruptibly(py, |go_on| format::names_in(&place, &stores, folders, stall, go_on))
    })
}

/// All bytes of each of these files, of `most` bytes at most.
#[pyfunction]
#[pyo3(signature = (files, most, stall_timeout = None, storage = None, bearer = None, hub = None))]
pub(crate) fn contents<'py>(
    py: Python<'py>,
    files: Listed<OsString>,
    most: u64,
    stall_timeout: Option<f64>,
    storage: Option<&Bound<'py, PyAny>>,
    bearer: Option<(String, String)>,
    hub: Option<&HubLayout>,
) -> Answer<'py, Vec<Bound<'py, PyBytes>>> {
    answer(py, || {
        let stall = stall_timeout_of(stall_timeout)?;
        let stores = stores_of_hub(py, storage, bearer, hub)?;
        let found = interruptibly(py, |go_on| format::contents(&files.0, most, &stores, stall, go_on))?;
        Ok(found.iter().map(|bytes| PyBytes::new(py, bytes)).collect::<Vec<_>>())
    })
}
