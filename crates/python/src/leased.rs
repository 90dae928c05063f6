//! `_core.Leased`.

use crate::errors::{detached, raise};
use crate::guard::{answer, guarded, perform, Answer, Held};
use penstock::load::Leased as Core;
use pyo3::prelude::*;
use std::time::Duration;

/// So long a wait hears no Ctrl-C.
const TURN: Duration = Duration::from_millis(50);

/// The leases on the files that a load has mapped.
#[pyclass(frozen, weakref, module = "penstock._core")]
pub(crate) struct Leased(Held<Core>);

impl Leased {
    pub(crate) fn new(leased: Core) -> Self {
        Self(Held::new(leased))
    }
}

#[pymethods]
impl Leased {
    fn hand<'py>(
        &self,
        py: Python<'py>,
        want: u32,
        make: &Bound<'py, PyAny>,
    ) -> Answer<'py, Option<Bound<'py, PyAny>>> {
        // A signal's handler may run in `make`, and nowhere else here: `handing` is dropped whatever it raises.
        answer(py, || match self.0.enter(want).map_err(|e| raise(py, &e))? {
            Some(handing) => {
                let made = make.call0();
                drop(handing);
                made.map(Some)
            }
            None => Ok(None),
        })
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || self.0.end())
    }

    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        guarded(py, || {
            while !detached(py, || self.0.settle(TURN))? {
                py.check_signals()?;
            }
            Ok(())
        })
    }

    #[staticmethod]
    fn abandon_all(py: Python<'_>) -> PyResult<()> {
        perform(py, Core::abandon_all)
    }

    #[getter]
    fn asked<'py>(&self, py: Python<'py>) -> Answer<'py, Option<u32>> {
        answer(py, || Ok(self.0.asked()))
    }

    #[getter]
    fn alive<'py>(&self, py: Python<'py>) -> Answer<'py, usize> {
        answer(py, || Ok(self.0.alive()))
    }

    #[getter]
    fn full(&self, py: Python<'_>) -> PyResult<bool> {
        guarded(py, || Ok(self.0.is_full()))
    }

    #[getter]
    fn over(&self, py: Python<'_>) -> PyResult<bool> {
        guarded(py, || Ok(self.0.is_over()))
    }
}
