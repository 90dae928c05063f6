//! Requests to servers, step by step: for `penstock doctor`.

use crate::errors::{detached, raise};
use crate::guard::{answer, set_fields, Answer};
use crate::storage::stores_of;
use penstock::store::{Look, Version};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

/// The steps and times of a request for the object at an address; None if no store has such addresses.
#[pyfunction]
#[pyo3(signature = (address, times = 1, storage = None))]
pub(crate) fn look<'py>(
    py: Python<'py>,
    address: &str,
    times: usize,
    storage: Option<&Bound<'py, PyAny>>,
) -> Answer<'py, Option<Bound<'py, PyDict>>> {
    answer(py, || {
        let stores = stores_of(py, storage, None)?;
        detached(py, || stores.look(address, times))?.map(|look| told(py, &look)).transpose()
    })
}

/// As a dictionary.
pub(crate) fn told<'py>(py: Python<'py>, look: &Look) -> PyResult<Bound<'py, PyDict>> {
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let mut servers = Vec::new();
    for asked in &look.servers {
        let one = PyDict::new(py);
        set_fields!(one, asked, server, addresses);
        one.set_item("lookup_seconds", seconds(asked.lookup))?;
        one.set_item("connect_seconds", seconds(asked.connect))?;
        one.set_item("tls_seconds", seconds(asked.tls))?;
        one.set_item("first_byte_seconds", seconds(asked.first_byte))?;
        one.set_item("status", asked.status)?;
        servers.push(one);
    }
    let (size, validator) = match &look.object {
        None => (None, None),
        Some((size, Version::Strong(_))) => (Some(*size), Some("strong ETag")),
        Some((size, Version::Weak(text))) if text.starts_with("W/") => (Some(*size), Some("weak ETag")),
        Some((size, Version::Weak(text))) if text.is_empty() => (Some(*size), Some("size")),
        Some((size, _)) => (Some(*size), Some("date")),
    };
    let d = PyDict::new(py);
    d.set_item("servers", servers)?;
    d.set_item("round_trips", look.round_trips.iter().map(Duration::as_secs_f64).collect::<Vec<_>>())?;
    d.set_item("connections", look.connections)?;
    d.set_item("size", size)?;
    d.set_item("validator", validator)?;
    d.set_item("error", look.error.as_ref().map(|e| raise(py, e).into_value(py)))?;
    Ok(d)
}
