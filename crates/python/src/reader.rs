//! `_core.Reader`.

use crate::checkpoint::Checkpoint;
use crate::dlpack::CPU;
use crate::errors::interruptibly;
use crate::guard::{answer, guarded, letting_go, perform, Answer, Held};
use crate::load::{tensor_of, Spec, View};
use crate::options::Options;
use crate::wants::{want_of, Region};
use penstock::load::Reader as Core;
use penstock::memory::View as CoreView;
use penstock::plan::want::Want;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use std::time::Duration;

/// Reads tensors of a checkpoint one at a time, to CPU memory.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Reader(Held<Core>);

impl Drop for Reader {
    fn drop(&mut self) {
        // Closing a file of a network mount may take a while. Other Python threads continue meanwhile.
        letting_go(|| {
            Python::try_attach(|py| py.detach(|| self.0.release()));
        });
    }
}

#[pymethods]
impl Reader {
    #[new]
    fn new(py: Python<'_>, checkpoint: &Checkpoint, options: &Options) -> PyResult<Self> {
        guarded(py, || Ok(Self(Held::new(Core::new(Arc::clone(&checkpoint.0), options.0.clone())))))
    }

    fn is_distant(&self, py: Python<'_>, file: u32) -> PyResult<bool> {
        guarded(py, || {
            if file as usize >= self.0.checkpoint().files().len() {
                return Err(PyIndexError::new_err(format!("no file {file}")));
            }
            interruptibly(py, |go_on| self.0.is_distant(file, go_on))
        })
    }

    #[pyo3(signature = (tensor, region = None))]
    fn view<'py>(&self, py: Python<'py>, tensor: u32, region: Region) -> Answer<'py, Option<View>> {
        answer(py, || {
            let want = want_of(self.0.checkpoint(), tensor, region)?;
            let view = self.read(py, &want)?;
            Ok(view.map(|view| View::new(view, (CPU, 0))))
        })
    }

    #[pyo3(signature = (tensor, region, dtypes, convert))]
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        tensor: u32,
        region: Region,
        dtypes: &Bound<'py, PyDict>,
        convert: &Bound<'py, PyAny>,
    ) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || {
            let checkpoint = self.0.checkpoint();
            let want = want_of(checkpoint, tensor, region)?;
            let Some(spec) = dtypes.get_item(checkpoint.tensor(tensor).dtype.name())? else {
                return Ok(py.None().into_bound(py));
            };
            let spec: Spec = spec.extract()?;
            let Some(view) = self.read(py, &want)? else { return Ok(py.None().into_bound(py)) };
            tensor_of(py, view, (checkpoint, &want), spec, (CPU, 0), convert)
        })
    }

    #[getter]
    fn held<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.held()))
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || py.detach(|| self.0.release()))
    }
}

impl Reader {
    fn read(&self, py: Python<'_>, want: &Want) -> PyResult<Option<CoreView>> {
        interruptibly(py, |go_on| self.0.read(want, go_on))
    }
}

/// Ends the threads that read ahead and waits for them, at most `patience` seconds.
#[pyfunction]
pub(crate) fn stop_reading_ahead(py: Python<'_>, patience: f64) -> PyResult<()> {
    perform(py, || {
        let patience = Duration::try_from_secs_f64(patience.clamp(0.0, 60.0)).unwrap_or_default();
        py.detach(|| penstock::store::stop_reading_ahead(patience));
    })
}
