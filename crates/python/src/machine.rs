//! Facts of the machine, a file and the GPUs: for the command line.

use crate::errors::{detached, interruptibly};
use crate::guard::{answer, Answer, Listed};
use crate::options::stall_timeout_of;
use penstock::device::api::{Api, Attribute};
use penstock::device::gpu;
use penstock::{source, store};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;

/// (resident bytes, size in bytes, number of probes) of one file in the page cache.
#[pyfunction]
#[pyo3(signature = (path, stall_timeout = None))]
pub(crate) fn residency(py: Python<'_>, path: PathBuf, stall_timeout: Option<f64>) -> Answer<'_, (u64, u64, u32)> {
    answer(py, || {
        let stall = stall_timeout_of(stall_timeout)?;
        let (found, size) = interruptibly(py, |go_on| store::residency_while(&path, stall, go_on))?;
        Ok((found.bytes(), size, found.calls + found.samples))
    })
}

/// Drops the file's clean pages from the page cache; returns the bytes that are still resident.
#[pyfunction]
pub(crate) fn evict(py: Python<'_>, path: PathBuf) -> Answer<'_, u64> {
    answer(py, || interruptibly(py, |go_on| store::evict_while(&path, go_on)))
}

/// Reads the file into the page cache; returns the bytes that are then resident.
#[pyfunction]
#[pyo3(signature = (path, threads = 0, stall_timeout = None))]
pub(crate) fn warm(py: Python<'_>, path: PathBuf, threads: usize, stall_timeout: Option<f64>) -> Answer<'_, u64> {
    answer(py, || {
        let stall = stall_timeout_of(stall_timeout)?;
        interruptibly(py, |go_on| store::warm_while(&path, threads, stall, go_on))
    })
}

/// Facts of the machine and of the file system of `path`: for `penstock doctor`.
#[pyfunction]
pub(crate) fn probe(py: Python<'_>, path: PathBuf) -> Answer<'_, Bound<'_, PyDict>> {
    answer(py, || {
        let facts = detached(py, || store::facts_at(&path))?;
        // A ring is really set up: only that shows whether a sandbox refuses it.
        let ring = detached(py, || Ok(source::Uring::new(Arc::new(store::Files::new([])), 4).map(drop)))?;
        let d = PyDict::new(py);
        d.set_item("fs", facts.fs)?;
        d.set_item("kind", format!("{:?}", facts.kind).to_lowercase())?;
        d.set_item("storage", facts.storage)?;
        d.set_item("direct_align", facts.lanes.unit)?;
        d.set_item("mappable", facts.lanes.mapping.is_some())?;
        d.set_item("cores", penstock::machine::cores())?;
        d.set_item("memory_available", penstock::machine::memory_available())?;
        d.set_item("cgroup_memory_limit", penstock::machine::cgroup_memory_limit())?;
        d.set_item("io_uring", ring.err().map(|e| e.to_string()))?;
        Ok(d)
    })
}

/// The address ranges (first byte, past the last) that cannot be written to, by number, and the reasons.
#[pyfunction]
pub(crate) fn unwritable(py: Python<'_>, spans: Listed<(u64, u64)>) -> Answer<'_, Vec<(usize, String)>> {
    answer(py, || {
        let spans: Vec<_> = spans.0.into_iter().map(|(start, end)| start..end).collect();
        let found = py.detach(|| penstock::mappings::unwritable(&spans));
        Ok(found.into_iter().map(|(span, why)| (span, why.to_string())).collect::<Vec<_>>())
    })
}

/// Gives idle staging memory back to the system, together with its registrations and the contexts of these.
#[pyfunction]
pub(crate) fn release_staging(py: Python<'_>) -> Answer<'_, u64> {
    answer(py, || Ok(py.detach(gpu::release_staging)))
}

/// The drivers and GPUs found, or why there are none.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> Answer<'_, Bound<'_, PyDict>> {
    answer(py, || {
        let d = PyDict::new(py);
        let mut found = Vec::new();
        let mut reason = None;
        match py.detach(Api::load) {
            Err(e) => {
                d.set_item("library", py.None())?;
                reason = Some(e);
            }
            Ok(api) => {
                d.set_item("library", api.library())?;
                d.set_item("vendor", format!("{:?}", api.vendor()).to_lowercase())?;
                match py.detach(|| list(&api)) {
                    Err(e) => reason = Some(e),
                    Ok((version, gpus)) => {
                        d.set_item("driver_version", version)?;
                        found = gpus;
                    }
                }
            }
        }
        d.set_item("gpus", found)?;
        d.set_item("reason", reason.map(|e| e.to_string()))?;
        Ok(d)
    })
}

/// As a dictionary in Python.
#[derive(IntoPyObject)]
struct Gpu {
    name: String,
    pci: String,
    integrated: bool,
    copy_engines: i32,
}

/// Driver version and GPUs; creates no context.
fn list(api: &Api) -> penstock::Result<(i32, Vec<Gpu>)> {
    gpu::start_driver(api)?;
    let gpus = (0..api.device_count()?).map(|n| {
        Ok(Gpu {
            name: api.device_name(n)?,
            pci: api.pci_bus_id(n)?,
            integrated: api.attribute(n, Attribute::Integrated)? != 0,
            copy_engines: api.attribute(n, Attribute::CopyEngines)?,
        })
    });
    Ok((api.driver_version()?, gpus.collect::<penstock::Result<_>>()?))
}
