//! The build of this extension module, and its platform: for `penstock --version`.

use crate::guard::{answer, Answer};
use pyo3::prelude::*;

/// (commit, target, Cargo features, whether it is optimised). The commit is "unknown" where the build was not told it, and
/// ends with "-dirty" where the tree had changes.
#[pyfunction]
pub(crate) fn built(py: Python<'_>) -> Answer<'_, (&'static str, &'static str, Vec<&'static str>, bool)> {
    answer(py, || {
        let commit = env!("PENSTOCK_BUILD_COMMIT");
        let target = env!("PENSTOCK_BUILD_TARGET");
        Ok((commit, target, penstock::FEATURES.to_vec(), !cfg!(debug_assertions)))
    })
}
