//! `_core.Checkpoint`.

use crate::errors::{detached, interruptibly, raise};
use crate::fill::CacheFill;
use crate::options::stall_timeout_of;
use penstock::format::Checkpoint as Core;
use penstock::source::Files;
use pyo3::exceptions::{PyIndexError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

/// A validated checkpoint. Tensors are numbered in file order.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Checkpoint(pub(crate) Arc<Core>);

#[pymethods]
impl Checkpoint {
    #[staticmethod]
    #[pyo3(signature = (sources, stall_timeout = None))]
    fn open(py: Python<'_>, sources: Vec<PathBuf>, stall_timeout: Option<f64>) -> PyResult<Self> {
        let stall = stall_timeout_of(stall_timeout)?;
        interruptibly(py, |go_on| Core::open_cancellable(sources, stall, go_on)).map(|c| Self(Arc::new(c)))
    }

    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let core = Core::from_bytes(data, data.len() as u64).map_err(|e| raise(py, &e))?;
        Ok(Self(Arc::new(core)))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        name.extract::<&str>().is_ok_and(|name| self.0.find(name).is_some())
    }

    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.tensors().map(|t| PyString::new(py, t.name)))
    }

    fn index(&self, name: &str) -> PyResult<u32> {
        self.0.find(name).map(|t| t.index).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }

    fn info<'py>(&self, py: Python<'py>, index: u32) -> PyResult<Bound<'py, PyTuple>> {
        if index as usize >= self.0.len() {
            return Err(PyIndexError::new_err(format!("tensor {index} of {}", self.0.len())));
        }
        let t = self.0.tensor(index);
        (t.name, t.dtype.name(), PyTuple::new(py, t.shape)?, t.file, t.begin, t.end).into_pyobject(py)
    }

    fn matching(&self, py: Python<'_>, patterns: Vec<String>) -> PyResult<Vec<u32>> {
        penstock::placement::names_matching(&self.0, &patterns).map_err(|e| raise(py, &e))
    }

    #[pyo3(signature = (wants = None))]
    fn by_dtype<'py>(&self, py: Python<'py>, wants: Option<Vec<u32>>) -> PyResult<Bound<'py, PyDict>> {
        let mut groups: BTreeMap<&'static str, Vec<u32>> = BTreeMap::new();
        let mut add = |position: usize, index: u32| -> PyResult<()> {
            if index as usize >= self.0.len() {
                return Err(PyIndexError::new_err(format!("tensor {index} of {}", self.0.len())));
            }
            groups.entry(self.0.tensor(index).dtype.name()).or_default().push(position as u32);
            Ok(())
        };
        match wants {
            Some(wants) => wants.into_iter().enumerate().try_for_each(|(i, w)| add(i, w))?,
            None => (0..self.0.len()).try_for_each(|i| add(i, i as u32))?,
        }
        groups.into_pyobject(py)
    }

    /// Paths as `os.fsdecode` gives them: bytes that are not UTF-8 become surrogates, and the same file is found by them.
    fn files(&self) -> Vec<&OsStr> {
        self.0.files().iter().map(|f| f.path.as_os_str()).collect()
    }

    fn path(&self, file: usize) -> PyResult<&OsStr> {
        self.file(file).map(|f| f.path.as_os_str())
    }

    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        let any = self.0.files().iter().any(|f| f.metadata.is_some());
        any.then(|| self.0.metadata().clone())
    }

    fn file_metadata(&self, file: usize) -> PyResult<Option<BTreeMap<String, String>>> {
        self.file(file).map(|f| f.metadata.clone())
    }

    fn file_tensors(&self, file: usize) -> PyResult<(u32, u32)> {
        self.file(file).map(|f| (f.tensors.start, f.tensors.end))
    }

    fn data_start(&self, file: usize) -> PyResult<u64> {
        self.file(file).map(|f| f.data_start)
    }

    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    fn warnings(&self) -> Vec<String> {
        self.0.warnings().to_vec()
    }

    /// Fills the page cache with all of it in the background, as a load does that went past it.
    fn fill(&self) -> Option<CacheFill> {
        penstock::source::CacheFill::of(&self.0).map(CacheFill)
    }

    fn verify_unchanged(&self, py: Python<'_>) -> PyResult<()> {
        let files = Files::new(self.0.files());
        detached(py, || (0..files.len()).try_for_each(|f| files.verify_file(f as u32)))
    }
}

impl Checkpoint {
    fn file(&self, file: usize) -> PyResult<&penstock::format::ShardFile> {
        let files = self.0.files();
        files.get(file).ok_or_else(|| PyIndexError::new_err(format!("file {file} of {}", files.len())))
    }
}
