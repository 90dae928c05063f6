//! What the machine, a file and the GPUs offer: for the command line.

use crate::errors::detached;
use penstock::source::file;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// (resident bytes, size in bytes, number of probes) of one file in the page cache.
#[pyfunction]
pub(crate) fn residency(py: Python<'_>, path: PathBuf) -> PyResult<(u64, u64, u32)> {
    detached(py, || {
        let files = file::Files::from_paths(&[&path])?;
        let found = files.resident_ranges(0)?;
        Ok((found.bytes(), files.size(0), found.calls + found.samples))
    })
}

/// Drops the file's clean pages from the page cache; bytes still resident afterwards.
#[pyfunction]
pub(crate) fn evict(py: Python<'_>, path: PathBuf) -> PyResult<u64> {
    detached(py, || file::evict(&path, None))
}

/// Reads the file into the page cache; bytes resident afterwards.
#[pyfunction]
#[pyo3(signature = (path, threads = 0))]
pub(crate) fn warm(py: Python<'_>, path: PathBuf, threads: usize) -> PyResult<u64> {
    detached(py, || file::warm(&path, threads))
}

/// What the machine and the file system of `path` offer: for `penstock doctor`.
#[pyfunction]
pub(crate) fn probe(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let facts = detached(py, || file::facts_at(&path))?;
    let d = PyDict::new(py);
    d.set_item("fs", facts.fs)?;
    d.set_item("kind", format!("{:?}", facts.kind).to_lowercase())?;
    d.set_item("storage", facts.storage)?;
    d.set_item("direct_align", facts.direct_align)?;
    d.set_item("mappable", facts.mappable)?;
    d.set_item("cores", penstock::machine::cores())?;
    d.set_item("memory_available", penstock::machine::memory_available())?;
    d.set_item("cgroup_memory_limit", penstock::machine::cgroup_memory_limit())?;
    let refusal = |r: penstock::Result<()>| r.err().map(|e| e.to_string());
    d.set_item("io_uring", refusal(py.detach(penstock::source::uring::probe)))?;
    d.set_item("libaio", refusal(py.detach(penstock::source::aio::probe)))?;
    Ok(d)
}

/// Drivers and GPUs found, or why not.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let d = PyDict::new(py);
    match py.detach(penstock::device::gpu::list) {
        Ok((library, version, found)) => {
            d.set_item("library", library)?;
            d.set_item("driver_version", version)?;
            d.set_item("gpus", found)?;
            d.set_item("reason", py.None())?;
        }
        Err(e) => {
            d.set_item("library", py.None())?;
            d.set_item("gpus", Vec::<String>::new())?;
            d.set_item("reason", e.to_string())?;
        }
    }
    Ok(d)
}
