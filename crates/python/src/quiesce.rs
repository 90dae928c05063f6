//! Things that loads leave in the process: for `penstock.quiesce`.

use crate::errors::detached;
use crate::guard::{answer, Answer};
use crate::waiting::time_of;
use penstock::{load, source};
use pyo3::prelude::*;

/// Ends what loads have left in this process; waits `patience` seconds at most. The bytes of memory that were given back.
#[pyfunction]
pub(crate) fn quiesce<'py>(py: Python<'py>, reason: &str, patience: f64) -> Answer<'py, u64> {
    answer(py, || detached(py, || load::quiesce(reason, time_of(patience))))
}

/// Loads of this process that hand out of leased files now, and reads that hang in the kernel and were left behind.
#[pyfunction]
pub(crate) fn under_way(py: Python<'_>) -> Answer<'_, (usize, usize)> {
    answer(py, || Ok((py.detach(load::Leased::under_way), source::quarantined())))
}
