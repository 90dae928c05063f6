//! `penstock.DiskCache`: the work of the disk cache for one load.

use crate::guard::{answer, guarded, perform, Answer, Held};
use crate::waiting::patiently;
use penstock::store::{leave_to_parent, CacheProgress, CacheStatus};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// The work of the disk cache for a load: a report's `disk_cache`. It goes on after the load.
///
/// - state: "running" while something is left to be written, synced or fetched again, otherwise "finished".
/// - cached_bytes: bytes that came from the cache. Those that another process brought meanwhile are among them.
/// - network_bytes: bytes that came from servers, whole blocks of 1 MiB.
/// - written_bytes: bytes that were written to the cache.
/// - dropped_bytes: bytes that came faster than the disk took them, or that could not be written.
/// - fetched_again_bytes: bytes of these that came from servers again, after the load.
/// - cpu_seconds: seconds of a processor for writing, checksums included.
/// - seconds: from the beginning of the load to the end of this work, or until now.
/// - reason: why objects, or parts of them, are not cached; otherwise empty.
/// - wait(timeout=None): waits until nothing is left to do; False if `timeout` seconds passed first. Ctrl-C raises.
#[pyclass(frozen, module = "penstock")]
pub(crate) struct DiskCache(Held<Vec<Arc<CacheProgress>>>);

impl DiskCache {
    pub(crate) fn new(progress: Arc<CacheProgress>) -> Self {
        Self(Held::new(vec![progress]))
    }

    fn status(&self) -> CacheStatus {
        let mut sum = CacheStatus { finished: true, ..CacheStatus::default() };
        for one in self.0.iter().map(|progress| progress.status()) {
            let CacheStatus { cached, network, written, dropped, again, cpu_seconds, seconds, finished, reason } = one;
            sum.cached += cached;
            sum.network += network;
            sum.written += written;
            sum.dropped += dropped;
            sum.again += again;
            sum.cpu_seconds += cpu_seconds;
            sum.seconds = sum.seconds.max(seconds);
            sum.finished &= finished;
            if sum.reason.is_empty() {
                sum.reason = reason;
            }
        }
        sum
    }
}

/// In a forked child: the parent's part of the disk cache is the parent's alone.
#[pyfunction]
pub(crate) fn leave_cache_to_parent(py: Python<'_>) -> PyResult<()> {
    perform(py, leave_to_parent)
}

fn state_name(status: &CacheStatus) -> &'static str {
    if status.finished {
        "finished"
    } else {
        "running"
    }
}

#[pymethods]
impl DiskCache {
    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> Answer<'py, &'static str> {
        answer(py, || Ok(state_name(&self.status())))
    }

    #[getter]
    fn reason<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || Ok(self.status().reason))
    }

    #[getter]
    fn cached_bytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.status().cached))
    }

    #[getter]
    fn network_bytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.status().network))
    }

    #[getter]
    fn written_bytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.status().written))
    }

    #[getter]
    fn dropped_bytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.status().dropped))
    }

    #[getter]
    fn fetched_again_bytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.status().again))
    }

    #[getter]
    fn cpu_seconds<'py>(&self, py: Python<'py>) -> Answer<'py, f64> {
        answer(py, || Ok(self.status().cpu_seconds))
    }

    #[getter]
    fn seconds<'py>(&self, py: Python<'py>) -> Answer<'py, f64> {
        answer(py, || Ok(self.status().seconds))
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || {
            patiently(py, timeout, false, |left| {
                let begun = Instant::now();
                Ok(self.0.iter().all(|progress| progress.wait(left.saturating_sub(begun.elapsed()))))
            })
        })
    }

    /// The work of both.
    fn __add__<'py>(&self, py: Python<'py>, other: PyRef<'py, DiskCache>) -> Answer<'py, DiskCache> {
        answer(py, || {
            let both =
                self.0.iter().chain(other.0.iter().filter(|one| !self.0.iter().any(|own| Arc::ptr_eq(own, one))));
            Ok(DiskCache(Held::new(both.cloned().collect())))
        })
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || {
            let status = self.status();
            let (state, CacheStatus { cached, network, written, dropped, .. }) = (state_name(&status), &status);
            let why = if status.reason.is_empty() { String::new() } else { format!(": {}", status.reason) };
            Ok(format!(
                "<DiskCache {state}, {cached} bytes from the cache, {network} from servers, {written} written, {dropped} \
                 dropped{why}>"
            ))
        })
    }
}
