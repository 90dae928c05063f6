//! Rates of the machine without a loader: for the benchmark.

use crate::errors::{detached, raise};
use crate::guard::{guarded, set_fields, Listed};
use penstock::ceiling::{Interface, Measure, Settings};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// Moves the bytes of files, or bytes to a GPU, once, without a loader.
#[pyfunction(name = "ceiling")]
#[pyo3(signature = (
    measure, paths = None, *, engine = "threads", threads = 2, depth = 8, block = 4_194_304, device = 0,
    nbytes = 1_073_741_824
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn ceiling<'py>(
    py: Python<'py>,
    measure: &str,
    paths: Option<Listed<PathBuf>>,
    engine: &str,
    threads: usize,
    depth: usize,
    block: usize,
    device: u32,
    nbytes: u64,
) -> PyResult<Bound<'py, PyDict>> {
    guarded(py, || {
        let named = |e: penstock::Error| raise(py, &e);
        let (measure, engine) = (Measure::named(measure).map_err(named)?, Interface::named(engine).map_err(named)?);
        let settings = Settings { measure, engine, threads, depth, block, device, nbytes };
        let found =
            detached(py, || penstock::ceiling::measure(&settings, &paths.map_or_else(Vec::new, |paths| paths.0)))?;
        let d = PyDict::new(py);
        d.set_item("measure", measure.name())?;
        d.set_item("engine", engine.name())?;
        set_fields!(d, settings, threads, depth, block);
        set_fields!(d, found, bytes, seconds);
        Ok(d)
    })
}
