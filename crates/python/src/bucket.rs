//! `_core.Bucket`: leftovers in a bucket, for commands.

use crate::errors::{interruptibly, raise};
use crate::guard::{answer, guarded, Answer, Held};
use crate::options::stall_timeout_of;
use crate::storage::stores_of;
use penstock::save::Bucket as Core;
use penstock::store::Location;
use pyo3::prelude::*;

/// (address of the object, the server's name of the upload, seconds since it began)
type Unfinished = (String, String, f64);

/// The bucket of an address.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Bucket(Held<Core>);

#[pymethods]
impl Bucket {
    #[new]
    #[pyo3(signature = (address, storage = None))]
    fn new(py: Python<'_>, address: String, storage: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        guarded(py, || {
            let (stores, stall) = (stores_of(py, storage, None)?, stall_timeout_of(None)?);
            let made = py.detach(|| Core::new(&Location::Url(address), &stores, stall));
            made.map(|core| Self(Held::new(core))).map_err(|e| raise(py, &e))
        })
    }

    fn identity<'py>(&self, py: Python<'py>) -> Answer<'py, Option<String>> {
        answer(py, || Ok(self.0.identity()))
    }

    fn version<'py>(&self, py: Python<'py>, address: String) -> Answer<'py, Option<String>> {
        answer(py, || interruptibly(py, |go_on| self.0.version(Location::Url(address), go_on)))
    }

    fn age<'py>(&self, py: Python<'py>, address: String) -> Answer<'py, Option<f64>> {
        answer(py, || {
            let age = interruptibly(py, |go_on| self.0.age(Location::Url(address), go_on))?;
            Ok(age.map(|age| age.as_secs_f64()))
        })
    }

    fn remove<'py>(&self, py: Python<'py>, address: String) -> Answer<'py, bool> {
        answer(py, || interruptibly(py, |go_on| self.0.remove(Location::Url(address), go_on)))
    }

    fn forget(&self, py: Python<'_>, address: String, name: String) -> PyResult<()> {
        guarded(py, || interruptibly(py, |go_on| self.0.forget(Location::Url(address), name, go_on)))
    }

    fn unfinished<'py>(&self, py: Python<'py>) -> Answer<'py, Option<Vec<Unfinished>>> {
        answer(py, || {
            let found = interruptibly(py, |go_on| self.0.unfinished(go_on))?;
            let told = |upload: penstock::store::upload::UnfinishedUpload| {
                (upload.at.to_string(), upload.name, upload.age.as_secs_f64())
            };
            Ok(found.map(|uploads| uploads.into_iter().map(told).collect::<Vec<_>>()))
        })
    }
}
