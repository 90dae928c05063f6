//! `penstock serve`: the server of a folder, on threads that never take the GIL.

use crate::errors::detached;
use crate::guard::{answer, guarded, perform, Answer, Held};
use crate::storage::stores_of;
use crate::waiting::time_of;
use penstock_serve::{Place, Settings};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// An HTTP server of a folder: it runs from `start` to `stop`, or until it is released.
#[pyclass(frozen, module = "penstock")]
pub(crate) struct Server(Held<Mutex<penstock_serve::Server>>);

#[pymethods]
impl Server {
    #[staticmethod]
    #[pyo3(signature = (folder, host, port, *, token, strangers, tls, access_log, sends_files, connections))]
    #[allow(clippy::too_many_arguments)]
    fn start(
        py: Python<'_>,
        folder: PathBuf,
        host: String,
        port: u16,
        token: Option<String>,
        strangers: bool,
        tls: Option<(PathBuf, PathBuf)>,
        access_log: bool,
        sends_files: bool,
        connections: usize,
    ) -> PyResult<Self> {
        guarded(py, || {
            let (allows_strangers, most_connections) = (strangers, connections);
            let settings = Settings {
                host,
                port,
                token,
                allows_strangers,
                tls,
                access_log,
                sends_files,
                most_connections,
                ..Settings::default()
            };
            let shared = stores_of(py, None, None)?.shares_disk_cache();
            let server = detached(py, || {
                let served = Arc::new(Place::open(&folder, shared)?);
                penstock_serve::Server::start(served, settings)
            })?;
            Ok(Self(Held::new(Mutex::new(server))))
        })
    }

    /// Host and port.
    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> Answer<'py, (String, u16)> {
        answer(py, || {
            let address = self.0.lock().unwrap_or_else(PoisonError::into_inner).address();
            Ok((address.ip().to_string(), address.port()))
        })
    }

    #[pyo3(signature = (patience = 0.5))]
    fn stop(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        perform(py, || py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).stop(time_of(patience))))
    }
}
