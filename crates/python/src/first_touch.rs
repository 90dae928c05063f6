//! `_core.FirstTouch`.

use crate::guard::{answer, perform, Answer, Held, Listed};
use penstock::huge_pages::FirstTouch as Core;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// The first touch of memory that is not ours.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct FirstTouch(Held<Mutex<Core>>);

impl FirstTouch {
    fn with<T>(&self, work: impl FnOnce(&mut Core) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl FirstTouch {
    #[staticmethod]
    #[pyo3(signature = (places, page_timing = None))]
    fn ask<'py>(py: Python<'py>, places: Listed<(usize, usize)>, page_timing: Option<bool>) -> Answer<'py, Self> {
        answer(py, || Ok(Self(Held::new(Mutex::new(py.detach(|| Core::ask(&places.0, page_timing)))))))
    }

    fn ahead<'py>(&self, py: Python<'py>, place: usize, nbytes: u64) -> Answer<'py, u64> {
        answer(py, || Ok(py.detach(|| self.with(|core| core.ahead(place, nbytes)))))
    }

    fn turn_small(&self, py: Python<'_>, places: Listed<usize>) -> PyResult<()> {
        perform(py, || py.detach(|| self.with(|core| core.turn_small(places.0))))
    }

    fn end(&self, py: Python<'_>, places: Listed<usize>) -> PyResult<()> {
        perform(py, || py.detach(|| self.with(|core| core.end(places.0))))
    }

    #[getter]
    fn nbytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.with(|core| core.nbytes())))
    }

    #[getter]
    fn are_slow<'py>(&self, py: Python<'py>) -> Answer<'py, bool> {
        answer(py, || Ok(self.with(|core| core.are_slow())))
    }
}
