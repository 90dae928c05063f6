//! `penstock.CacheFill`: the filling of the page cache after a load that went past it.

use crate::guard::{answer, guarded, perform, Answer, Held};
use crate::waiting::{patiently, time_of};
use penstock::store;
use penstock::store::FillState;
use pyo3::prelude::*;

/// The fill of the page cache after a load, in the background: a report's `cache_fill`.
///
/// It follows a load with `cache="auto"` whose bytes went past the page cache, all of them or those that told which way is
/// faster. One thread reads the same bytes into the page cache, at idle I/O priority, so that the next start is warm, and
/// touches them where a first touch is slow. At the end of a fill that has finished no page is missing. It pauses
/// while this process wants the disk (another load with cold bytes, a save). It ends early if the memory left no longer
/// holds the rest, if the file changes, at a fork, when the process ends, and by `stop`. What was filled until then
/// stays.
///
/// - state: "running" (also while it pauses), "finished" or "stopped".
/// - reason: why it was stopped; otherwise empty.
/// - nbytes, total: bytes that the page cache holds now, and bytes that it will hold.
/// - seconds: from the end of the load to the end of the fill, pauses included.
/// - wait(timeout=None): waits until it has ended, with or without an error; False if `timeout` seconds passed first.
///   Ctrl-C raises.
/// - stop(): ends it, within a step of 2 MiB.
#[pyclass(frozen, module = "penstock")]
pub(crate) struct CacheFill(Held<store::CacheFill>);

impl CacheFill {
    pub(crate) fn new(fill: store::CacheFill) -> Self {
        Self(Held::new(fill))
    }

    fn state_name(&self) -> &'static str {
        match self.0.status().state {
            FillState::Running => "running",
            FillState::Finished => "finished",
            FillState::Stopped => "stopped",
        }
    }
}

#[pymethods]
impl CacheFill {
    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> Answer<'py, &'static str> {
        answer(py, || Ok(self.state_name()))
    }

    #[getter]
    fn reason<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || Ok(self.0.status().reason))
    }

    #[getter]
    fn nbytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.status().nbytes))
    }

    #[getter]
    fn total<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.status().total))
    }

    #[getter]
    fn seconds<'py>(&self, py: Python<'py>) -> Answer<'py, f64> {
        answer(py, || Ok(self.0.status().seconds))
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || patiently(py, timeout, false, |left| Ok(self.0.wait(left))))
    }

    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || py.detach(|| self.0.stop()))
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || {
            let (now, state) = (self.0.status(), self.state_name());
            let why = if now.reason.is_empty() { String::new() } else { format!(": {}", now.reason) };
            Ok(format!("<CacheFill {state}, {} of {} bytes in {:.3} s{why}>", now.nbytes, now.total, now.seconds))
        })
    }
}

/// Ends every fill of this process and waits until their thread has ended, at most `patience` seconds.
#[pyfunction]
#[pyo3(signature = (reason = "it was told to stop", patience = 1.0))]
pub(crate) fn stop_fills(py: Python<'_>, reason: &str, patience: f64) -> PyResult<()> {
    perform(py, || py.detach(|| store::stop_fills(reason, time_of(patience))))
}
