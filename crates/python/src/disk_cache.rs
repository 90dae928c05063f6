//! `penstock.DiskCache`: the work of the disk cache for one load. `_core.CacheFolder`: its folder, for commands.

use crate::errors::{detached, invalid};
use crate::guard::{answer, guarded, perform, set_fields, Answer, Held};
use crate::storage::stores_of;
use crate::waiting::{patiently, time_of};
use penstock::store::leave_to_parent;
use penstock::store::{CacheFolder as Core, CacheProgress, CacheStatus, DiskCacheSettings, EntryInfo, Prune};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Instant, UNIX_EPOCH};

/// How many bytes of an entry were compared, and the ranges of its bad blocks.
type Compared = (u64, Vec<(u64, u64)>);

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
/// - reason: why objects, or parts of them, are not cached, or are not in the Hub's cache; otherwise empty.
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

/// The settings of the disk cache that these settings name.
fn settings_of(py: Python<'_>, storage: Option<&Bound<'_, PyAny>>) -> PyResult<DiskCacheSettings> {
    stores_of(py, storage, None)?.disk_cache().ok_or_else(|| invalid("no folder of a disk cache is named"))
}

/// The folder of a disk cache, for commands.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct CacheFolder(Held<Arc<Core>>);

fn described<'py>(py: Python<'py>, entry: &EntryInfo) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    set_fields!(d, entry, id, address, version, size, there, disk, linked, open);
    let used = entry.used.duration_since(UNIX_EPOCH).unwrap_or_default();
    d.set_item("used", used.as_secs_f64())?;
    d.set_item("path", entry.path.as_os_str())?;
    Ok(d)
}

fn all_described<'py>(py: Python<'py>, entries: &[EntryInfo]) -> PyResult<Vec<Bound<'py, PyDict>>> {
    entries.iter().map(|entry| described(py, entry)).collect()
}

#[pymethods]
impl CacheFolder {
    #[new]
    #[pyo3(signature = (storage = None))]
    fn new(py: Python<'_>, storage: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        guarded(py, || {
            let settings = settings_of(py, storage)?;
            Ok(Self(Held::new(detached(py, || Core::open(&settings))?)))
        })
    }

    /// True if this process may write to it, and whether this user and root alone may.
    fn access<'py>(&self, py: Python<'py>) -> Answer<'py, (bool, bool)> {
        answer(py, || Ok((self.0.is_writable(), self.0.is_private())))
    }

    fn path<'a, 'py>(&'a self, py: Python<'py>) -> Answer<'py, &'a OsStr> {
        answer(py, || Ok(self.0.path().as_os_str()))
    }

    /// The entries, least recently used first.
    fn entries<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<Bound<'py, PyDict>>> {
        answer(py, || all_described(py, &detached(py, || self.0.entries())?))
    }

    /// Bytes of the file system, those that are free, those that stay free, and most bytes of the cache or None.
    fn room<'py>(&self, py: Python<'py>) -> Answer<'py, (u64, u64, u64, Option<u64>)> {
        answer(py, || {
            let room = detached(py, || self.0.room())?;
            Ok((room.total, room.free, room.keep, room.most))
        })
    }

    /// Removes the entries that were not used for `older_than` seconds, that are too many for `to_size` bytes, or whose address
    /// begins with `prefix`; without one of these all. Returns those that went, that stay because they are open, and others.
    #[pyo3(signature = (*, to_size = None, older_than = None, prefix = None, dry_run = false))]
    fn prune<'py>(
        &self,
        py: Python<'py>,
        to_size: Option<u64>,
        older_than: Option<f64>,
        prefix: Option<String>,
        dry_run: bool,
    ) -> Answer<'py, Vec<Vec<Bound<'py, PyDict>>>> {
        answer(py, || {
            let how = match (to_size, older_than, prefix) {
                (None, None, None) => Prune::All,
                (Some(size), None, None) => Prune::ToSize(size),
                (None, Some(seconds), None) => Prune::OlderThan(time_of(seconds)),
                (None, None, Some(prefix)) => Prune::Prefix(prefix),
                _ => return Err(invalid("give one of to_size, older_than and prefix")),
            };
            let pruned = detached(py, || self.0.prune(&how, dry_run))?;
            [&pruned.gone, &pruned.open, &pruned.kept]
                .into_iter()
                .map(|part| all_described(py, part))
                .collect::<PyResult<Vec<_>>>()
        })
    }

    /// Compares the blocks from `first` to `past` of an entry with their CRC32C. Returns how many bytes it compared, and the
    /// ranges of bad blocks; None if the entry is gone. With `forget` these blocks are missing from now on.
    fn verify<'py>(
        &self,
        py: Python<'py>,
        id: &str,
        first: u32,
        past: u32,
        forget: bool,
    ) -> Answer<'py, Option<Compared>> {
        answer(py, || {
            let found = detached(py, || self.0.verify(id, first..past, forget))?;
            Ok(found.map(|(bytes, bad)| (bytes, bad.iter().map(|range| (range.start, range.end)).collect::<Vec<_>>())))
        })
    }
}
