//! `_core.Checkpoint`.

use crate::errors::{detached, interruptibly, raise};
use crate::fill::CacheFill;
use crate::guard::{answer, guarded, Answer, Held, Listed};
use crate::hub::HubLayout;
use crate::look::told;
use crate::options::{order_of, stall_timeout_of};
use crate::storage::stores_of_hub;
use penstock::format::{Checkpoint as Core, FolderRequest};
use penstock::plan::layout::tensors_in_order;
use pyo3::exceptions::{PyIndexError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

/// A validated checkpoint. Tensors are numbered in file order.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Checkpoint(pub(crate) Held<Arc<Core>>);

#[pymethods]
impl Checkpoint {
    #[staticmethod]
    #[allow(clippy::too_many_arguments)] // The signature is Python's: keywords all.
    #[pyo3(signature = (sources, stall_timeout = None, storage = None, bearer = None, hub = None, variant = None,
                        leftover = true, names = None))]
    fn open(
        py: Python<'_>,
        sources: Listed<PathBuf>,
        stall_timeout: Option<f64>,
        storage: Option<&Bound<'_, PyAny>>,
        bearer: Option<(String, String)>,
        hub: Option<&HubLayout>,
        variant: Option<String>,
        leftover: bool,
        names: Option<Listed<String>>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let stall = stall_timeout_of(stall_timeout)?;
            let stores = stores_of_hub(py, storage, bearer, hub)?;
            let names = names.map(|names| names.0.iter().map(OsString::from).collect());
            let asked = FolderRequest { variant, leftover, names };
            interruptibly(py, |go_on| Core::open_cancellable(&sources.0, &asked, &stores, stall, go_on)).map(Self::of)
        })
    }

    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        guarded(py, || Core::from_bytes(data, data.len() as u64).map(Self::of).map_err(|e| raise(py, &e)))
    }

    /// The checkpoint of byte ranges of any files: a tensor of U8 for each, called by its number.
    #[staticmethod]
    #[pyo3(signature = (files, stall_timeout = None, storage = None))]
    fn of_ranges(
        py: Python<'_>,
        files: Listed<(PathBuf, Listed<(u64, u64)>)>,
        stall_timeout: Option<f64>,
        storage: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let stall = stall_timeout_of(stall_timeout)?;
            let stores = stores_of_hub(py, storage, None, None)?;
            let ranges = |of: Listed<(u64, u64)>| of.0.into_iter().map(|(begin, end)| begin..end).collect();
            let files = files.0.into_iter().map(|(path, of)| (path, ranges(of))).collect();
            interruptibly(py, |go_on| Core::of_ranges(files, &stores, stall, go_on)).map(Self::of)
        })
    }

    /// The numbers of those of these names, of what lies in one place, that `open` would choose: one index, or shard files.
    #[staticmethod]
    #[pyo3(signature = (place, names, variant = None))]
    fn to_open<'py>(
        py: Python<'py>,
        place: &str,
        names: Listed<String>,
        variant: Option<String>,
    ) -> Answer<'py, Vec<u32>> {
        answer(py, || {
            let all: Vec<OsString> = names.0.iter().map(OsString::from).collect();
            let asked = FolderRequest { variant, ..FolderRequest::plain() };
            let found = penstock::format::to_open(place, &all, &asked).map_err(|e| raise(py, &e))?;
            let number = |name: OsString| names.0.iter().position(|other| name == *other.as_str());
            Ok(found.into_iter().filter_map(number).map(|number| number as u32).collect::<Vec<_>>())
        })
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        guarded(py, || Ok(self.0.len()))
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        guarded(name.py(), || Ok(name.extract::<&str>().is_ok_and(|name| self.0.find(name).is_some())))
    }

    fn keys<'py>(&self, py: Python<'py>) -> Answer<'py, Bound<'py, PyList>> {
        answer(py, || PyList::new(py, self.0.tensors().map(|t| PyString::new(py, t.name))))
    }

    fn index<'py>(&self, py: Python<'py>, name: &str) -> Answer<'py, u32> {
        answer(py, || self.0.find(name).map(|t| t.index).ok_or_else(|| PyKeyError::new_err(name.to_owned())))
    }

    fn info<'py>(&self, py: Python<'py>, index: u32) -> Answer<'py, Bound<'py, PyTuple>> {
        answer(py, || {
            self.tensor(index)?;
            let t = self.0.tensor(index);
            (t.name, t.dtype.name(), PyTuple::new(py, t.shape)?, t.file, t.begin, t.end).into_pyobject(py)
        })
    }

    fn matching<'py>(&self, py: Python<'py>, patterns: Listed<String>) -> Answer<'py, Vec<u32>> {
        answer(py, || penstock::plan::want::names_matching(&self.0, &patterns.0).map_err(|e| raise(py, &e)))
    }

    #[pyo3(signature = (wants = None))]
    fn by_dtype<'py>(&self, py: Python<'py>, wants: Option<Listed<u32>>) -> Answer<'py, Bound<'py, PyDict>> {
        answer(py, || {
            let mut groups: BTreeMap<&'static str, Vec<u32>> = BTreeMap::new();
            let mut add = |position: usize, index: u32| -> PyResult<()> {
                self.tensor(index)?;
                groups.entry(self.0.tensor(index).dtype.name()).or_default().push(position as u32);
                Ok(())
            };
            match wants {
                Some(wants) => wants.0.into_iter().enumerate().try_for_each(|(i, w)| add(i, w))?,
                None => (0..self.0.len()).try_for_each(|i| add(i, i as u32))?,
            }
            groups.into_pyobject(py)
        })
    }

    /// Numbers of all tensors in the order in which a load of all of them reads.
    fn in_order<'py>(&self, py: Python<'py>, order: &str) -> Answer<'py, Vec<u32>> {
        answer(py, || Ok(tensors_in_order(&self.0, order_of(order, "give \"file\" or \"layer\"")?)))
    }

    /// Paths in the form of `os.fsdecode`: bytes that are not UTF-8 become surrogates, which lead to the same file.
    fn files<'a, 'py>(&'a self, py: Python<'py>) -> Answer<'py, Vec<&'a OsStr>> {
        answer(py, || Ok(self.0.files().iter().map(|f| f.spelled.as_os_str()).collect::<Vec<_>>()))
    }

    fn path<'a, 'py>(&'a self, py: Python<'py>, file: usize) -> Answer<'py, &'a OsStr> {
        answer(py, || self.file(file).map(|f| f.spelled.as_os_str()))
    }

    fn metadata<'py>(&self, py: Python<'py>) -> Answer<'py, Option<BTreeMap<String, String>>> {
        answer(py, || {
            let any = self.0.files().iter().any(|f| f.metadata.is_some());
            Ok(any.then(|| self.0.metadata().clone()))
        })
    }

    fn file_metadata<'py>(&self, py: Python<'py>, file: usize) -> Answer<'py, Option<BTreeMap<String, String>>> {
        answer(py, || self.file(file).map(|f| f.metadata.clone()))
    }

    fn file_tensors<'py>(&self, py: Python<'py>, file: usize) -> Answer<'py, (u32, u32)> {
        answer(py, || self.file(file).map(|f| (f.tensors.start, f.tensors.end)))
    }

    fn data_start<'py>(&self, py: Python<'py>, file: usize) -> Answer<'py, u64> {
        answer(py, || self.file(file).map(|f| f.data_start))
    }

    /// A number that tells the versions of the files apart, and whether it does so on every machine.
    fn identity<'py>(&self, py: Python<'py>) -> Answer<'py, (u64, bool)> {
        answer(py, || Ok(self.0.identity()))
    }

    /// For each file a text that tells its versions apart.
    fn versions<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<String>> {
        answer(py, || Ok(self.0.versions()))
    }

    /// For each file a number of what some of its pages hold. Blocks.
    fn samples<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<u64>> {
        answer(py, || detached(py, || self.0.samples()))
    }

    /// Tells checkpoints apart: tensors, their places, and the sizes of the files.
    fn fingerprint<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.fingerprint()))
    }

    fn nbytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.nbytes()))
    }

    fn warnings<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<String>> {
        answer(py, || Ok(self.0.warnings().to_vec()))
    }

    /// Fills the page cache with all of it in the background, in the same way as after a load that went past it.
    fn fill<'py>(&self, py: Python<'py>) -> Answer<'py, Option<CacheFill>> {
        answer(py, || {
            let files = self.0.local_files().map_err(|e| raise(py, &e))?;
            Ok(penstock::store::CacheFill::of(files).map(CacheFill::new))
        })
    }

    /// The steps and times of a request to the server of a file.
    #[pyo3(signature = (file, times = 1))]
    fn look<'py>(&self, py: Python<'py>, file: usize, times: usize) -> Answer<'py, Bound<'py, PyDict>> {
        answer(py, || {
            let file = self.file(file)?;
            detached(py, || file.look(times)).and_then(|look| told(py, &look))
        })
    }

    /// The header of a file on a server once more: all bytes before its tensors.
    fn header_bytes<'py>(&self, py: Python<'py>, file: usize) -> Answer<'py, Bound<'py, PyBytes>> {
        answer(py, || {
            let file = self.file(file)?;
            Ok(PyBytes::new(py, &detached(py, || file.header_bytes())?))
        })
    }

    /// Compares blocks, from `first` to `past`, of a copy of a file in the disk cache with their checksums. Returns the ranges of
    /// those that are bad, and whether they stay so, because the cache can only be read.
    fn check_copy<'py>(
        &self,
        py: Python<'py>,
        file: usize,
        first: u32,
        past: u32,
    ) -> Answer<'py, (Vec<(u64, u64)>, bool)> {
        answer(py, || {
            let file = self.file(file)?;
            let found = detached(py, || file.check_copy(first..past))?;
            Ok((found.bad.iter().map(|range| (range.start, range.end)).collect::<Vec<_>>(), found.stay))
        })
    }

    fn verify_unchanged(&self, py: Python<'_>) -> PyResult<()> {
        guarded(py, || {
            let files = self.0.local_files().map_err(|e| raise(py, &e))?;
            detached(py, || (0..files.len()).try_for_each(|f| files.verify_file(f as u32)))
        })
    }
}

impl Checkpoint {
    fn of(core: Core) -> Self {
        Self(Held::new(Arc::new(core)))
    }

    /// Refuses a tensor number that does not exist.
    fn tensor(&self, index: u32) -> PyResult<()> {
        if index as usize >= self.0.len() {
            return Err(PyIndexError::new_err(format!("tensor {index} of {}", self.0.len())));
        }
        Ok(())
    }

    fn file(&self, file: usize) -> PyResult<&penstock::format::ShardFile> {
        let files = self.0.files();
        files.get(file).ok_or_else(|| PyIndexError::new_err(format!("file {file} of {}", files.len())))
    }
}
