//! `_core.HubLayout`: the place of whole files of the disk cache in huggingface_hub's cache.

use crate::guard::{guarded, Held, Listed};
use penstock::store::{HubFile, HubLayout as Core};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// The place of a commit of a repository in huggingface_hub's cache.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct HubLayout(Held<Arc<Core>>);

impl HubLayout {
    pub(crate) fn core(&self) -> Arc<Core> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl HubLayout {
    #[new]
    #[pyo3(signature = (cache, repository, commit, *, revision, asked, symlinks, files))]
    #[allow(clippy::too_many_arguments)] // The signature is Python's: keywords most of them.
    fn new(
        py: Python<'_>,
        cache: PathBuf,
        repository: String,
        commit: String,
        revision: Option<String>,
        asked: f64,
        symlinks: bool,
        files: Listed<(String, String, String)>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let since = Duration::try_from_secs_f64(asked).unwrap_or_default();
            let asked = UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH);
            let files =
                files.0.into_iter().map(|(address, path, digest)| (address, HubFile { path, digest })).collect();
            Ok(Self(Held::new(Arc::new(Core { cache, repository, commit, revision, asked, files, symlinks }))))
        })
    }
}
