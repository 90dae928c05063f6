//! `_core.Pull`: whole objects for the disk cache, or for a folder.

use crate::errors::detached;
use crate::guard::{answer, guarded, letting_go, perform, Answer, Held, Listed};
use crate::hub::HubLayout;
use crate::options::Options;
use crate::storage::stores_of_hub;
use crate::waiting::patiently;
use penstock::pull::{KnownFile, Pull as Core, PullFile};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;

/// (size, strong version, it was there before, it is there now, CRC32C if it was written)
type PulledFile = (u64, Option<String>, bool, bool, Option<u32>);

/// (version, size, CRC32C to compare) of a file that is there
type Known = (String, u64, Option<u32>);

/// (address, path of the file that it goes to, the file that is there)
type Asked = (OsString, Option<PathBuf>, Option<Known>);

/// Copies that a thread makes.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Pull(Held<Core>);

impl Drop for Pull {
    fn drop(&mut self) {
        letting_go(|| {
            Python::try_attach(|py| py.detach(|| self.0.close()));
        });
    }
}

#[pymethods]
impl Pull {
    #[staticmethod]
    #[pyo3(signature = (files, options, storage = None, bearer = None, hub = None))]
    fn start(
        py: Python<'_>,
        files: Listed<Asked>,
        options: &Options,
        storage: Option<&Bound<'_, PyAny>>,
        bearer: Option<(String, String)>,
        hub: Option<&HubLayout>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let stores = stores_of_hub(py, storage, bearer, hub)?;
            let known = |(version, size, crc)| KnownFile { version, size, crc };
            let file = |(from, into, there): Asked| PullFile { from, into, known: there.map(known) };
            let files = files.0.into_iter().map(file).collect();
            let options = options.0.clone();
            Ok(Self(Held::new(detached(py, || Core::start(files, &stores, &options))?)))
        })
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || patiently(py, timeout, false, |left| self.0.wait(left)))
    }

    /// Bytes that are there, bytes in all, bytes that servers sent.
    fn progress<'py>(&self, py: Python<'py>) -> Answer<'py, (u64, u64, u64)> {
        answer(py, || {
            let status = self.0.status();
            Ok((status.done, status.nbytes, status.received))
        })
    }

    /// For each file: size, strong version or None, whether it was there before, whether it is there, CRC32C if it was written.
    fn files<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<PulledFile>> {
        answer(py, || {
            let files = self.0.status().files.into_iter();
            let told = files.map(|file| (file.size, file.version, file.was_there, file.complete, file.crc));
            Ok(told.collect::<Vec<_>>())
        })
    }

    /// The reason for which the disk cache lacks something that files have; otherwise empty.
    fn uncached<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || Ok(self.0.status().uncached))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || py.detach(|| self.0.close()))
    }
}
