//! `_core.Save`.

use crate::errors::{interruptibly, raise};
use crate::guard::{answer, guarded, letting_go, perform, set_fields, Answer, Held, Listed};
use crate::load::{told, Kept};
use crate::options::Options;
use crate::storage::stores_of;
use crate::waiting::patiently;
use penstock::format::DType;
use penstock::options::Order;
use penstock::save::{
    Arrangement, At, PushRequest, PushedIndex, RankShare, Save as Core, SavePlan, SaveRequest, Tensor,
};
use penstock::store::{Location, Stores};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};
use std::collections::BTreeMap;
use std::ffi::{c_int, OsString};
use std::path::PathBuf;
use std::sync::Arc;

/// (name, dtype, shape, GPU or None, address or None if it is made late)
type Described = (String, String, Listed<u64>, Option<u32>, Option<u64>);

/// One save. It runs in the background from the moment when it is made.
#[pyclass(frozen, weakref, module = "penstock._core")]
pub(crate) struct Save {
    core: Held<Core>,
}

impl Drop for Save {
    fn drop(&mut self) {
        letting_go(|| {
            Python::try_attach(|py| py.detach(|| self.core.close()));
        });
    }
}

fn arranged(layout: &str, order: &str) -> PyResult<(Arrangement, Order)> {
    let arrangement = match layout {
        "aligned" => Arrangement::Aligned,
        "compact" => Arrangement::Compact,
        _ => return Err(PyValueError::new_err(format!("layout={layout:?}: give \"aligned\" or \"compact\""))),
    };
    let order = match order {
        "file" => Order::File,
        "layer" => Order::Layer,
        _ => return Err(PyValueError::new_err(format!("order={order:?}: give \"file\" or \"layer\""))),
    };
    Ok((arrangement, order))
}

fn tensor(name: String, dtype: &str, shape: Vec<u64>) -> PyResult<Tensor> {
    let unknown = || PyValueError::new_err(format!("tensor {name}: the format has no dtype {dtype}"));
    let dtype = DType::parse(dtype).ok_or_else(unknown)?;
    Ok(Tensor { name, dtype, shape })
}

/// The beginning of a file with these (name, dtype, shape), and the order in which their bytes follow it.
#[pyfunction]
#[pyo3(signature = (tensors, metadata, *, layout, order))]
pub(crate) fn head<'py>(
    py: Python<'py>,
    tensors: Listed<(String, String, Listed<u64>)>,
    metadata: Option<BTreeMap<String, String>>,
    layout: &str,
    order: &str,
) -> Answer<'py, (Bound<'py, PyBytes>, Vec<u32>)> {
    answer(py, || {
        let (arrangement, order) = arranged(layout, order)?;
        let known = tensors.0.into_iter().map(|(n, d, s)| tensor(n, &d, s.0)).collect::<PyResult<Vec<_>>>()?;
        let metadata = metadata.as_ref();
        let plan = SavePlan::new(&known, metadata, "", arrangement, order, None).map_err(|e| raise(py, &e))?;
        let (head, places) = plan.files.first().map_or((&[][..], &[][..]), |f| (&f.head[..], &f.places[..]));
        Ok((PyBytes::new(py, head), places.iter().map(|p| p.0).collect::<Vec<_>>()))
    })
}

/// For each file of a save the numbers of its tensors, in the order in which they stand there. Files without a tensor are
/// left out.
#[pyfunction]
#[pyo3(signature = (tensors, metadata, *, layout, order, most))]
pub(crate) fn shards<'py>(
    py: Python<'py>,
    tensors: Listed<(String, String, Listed<u64>)>,
    metadata: Option<BTreeMap<String, String>>,
    layout: &str,
    order: &str,
    most: Option<u64>,
) -> Answer<'py, Vec<Vec<u32>>> {
    answer(py, || {
        let (arrangement, order) = arranged(layout, order)?;
        let known = tensors.0.into_iter().map(|(n, d, s)| tensor(n, &d, s.0)).collect::<PyResult<Vec<_>>>()?;
        let plan =
            SavePlan::new(&known, metadata.as_ref(), "m", arrangement, order, most).map_err(|e| raise(py, &e))?;
        let numbers = plan.files.iter().map(|file| file.places.iter().map(|place| place.0).collect::<Vec<_>>());
        Ok(numbers.filter(|numbers| !numbers.is_empty()).collect::<Vec<_>>())
    })
}

/// The place that a folder names: an address where there is a store for its scheme.
fn location(folder: PathBuf) -> Location {
    let known = |text: &str| {
        let scheme = text.split_once("://")?.0;
        penstock::store::schemes().iter().any(|known| known.eq_ignore_ascii_case(scheme)).then(|| text.to_owned())
    };
    folder.to_str().and_then(known).map_or_else(|| Location::Path(folder.clone()), Location::Url)
}

/// PyBUF_WRITE of the stable ABI (memoryobject.h).
const WRITABLE: c_int = 0x200;

#[pymethods]
impl Save {
    #[staticmethod]
    #[pyo3(signature = (folder, name, tensors, metadata, options, *, layout, order, most, sync, checkpoint, keep, storage = None,
                        snapshot = false, ahead = false, share = None))]
    #[allow(clippy::too_many_arguments)] // The signature is Python's: keywords all.
    fn start(
        py: Python<'_>,
        folder: PathBuf,
        name: OsString,
        tensors: Listed<Described>,
        metadata: Option<BTreeMap<String, String>>,
        options: &Options,
        layout: &str,
        order: &str,
        most: Option<u64>,
        sync: bool,
        checkpoint: bool,
        keep: Py<PyAny>,
        storage: Option<&Bound<'_, PyAny>>,
        snapshot: bool,
        ahead: bool,
        share: Option<(Vec<String>, Option<String>)>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let (arrangement, order) = arranged(layout, order)?;
            let mut known = Vec::with_capacity(tensors.0.len());
            let mut places = Vec::with_capacity(tensors.0.len());
            for (name, dtype, shape, gpu, address) in tensors.0 {
                known.push(tensor(name, &dtype, shape.0)?);
                places.push(match (gpu, address) {
                    (_, None) => At::Late,
                    (None, Some(address)) => At::Host(address),
                    (Some(gpu), Some(address)) => At::Gpu(gpu, address),
                });
            }
            let (options, keep) = (options.0.clone(), Arc::new(Kept(keep)));
            let folder = location(folder);
            let stores = match &folder {
                Location::Url(_) => stores_of(py, storage, None)?,
                Location::Path(_) => Stores::default(),
            };
            let core = interruptibly(py, |go_on| {
                let mut plan = SavePlan::new(&known, metadata.as_ref(), &name, arrangement, order, most)?;
                if let Some((names, index)) = share {
                    plan = plan.of_rank(&name, RankShare { names, index })?;
                }
                let checkpoint = checkpoint.then(|| name.to_string_lossy().into_owned());
                let tensors = places;
                let request =
                    SaveRequest { plan, folder, stores, checkpoint, tensors, keep, sync, snapshot, ahead, options };
                Core::start_while(request, go_on)
            })?;
            Ok(Self { core: Held::new(core) })
        })
    }

    #[staticmethod]
    #[pyo3(signature = (address, files, index, small, checkpoint, journal, machine, options, storage = None))]
    #[allow(clippy::too_many_arguments)] // The signature is Python's.
    fn push(
        py: Python<'_>,
        address: String,
        files: Listed<(OsString, PathBuf)>,
        index: Option<PushedIndex>,
        small: Listed<(OsString, PyBackedBytes, PathBuf)>,
        checkpoint: String,
        journal: PathBuf,
        machine: String,
        options: &Options,
        storage: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let (stores, options) = (stores_of(py, storage, None)?, options.0.clone());
            let (files, folder) = (files.0, Location::Url(address));
            let small = small.0.into_iter().map(|(name, bytes, path)| (name, bytes[..].to_vec(), path)).collect();
            let request = PushRequest { files, index, small, folder, stores, checkpoint, journal, machine, options };
            let core = interruptibly(py, |go_on| Core::push_while(request, go_on))?;
            Ok(Self { core: Held::new(core) })
        })
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || patiently(py, timeout, false, |t| Ok(self.core.wait(Some(t))? || self.core.wanted().is_some())))
    }

    #[pyo3(signature = (timeout = None))]
    fn copied(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || patiently(py, timeout, false, |t| self.core.copied(Some(t))))
    }

    #[pyo3(signature = (timeout = None))]
    fn sealed(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || patiently(py, timeout, false, |t| self.core.sealed(Some(t))))
    }

    fn approve(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || self.core.approve())
    }

    fn done<'py>(&self, py: Python<'py>) -> Answer<'py, bool> {
        answer(py, || Ok(self.core.is_done()))
    }

    fn may_be_visible<'py>(&self, py: Python<'py>) -> Answer<'py, bool> {
        answer(py, || Ok(self.core.may_be_visible()))
    }

    #[pyo3(signature = (tensor, room = None, timeout = None))]
    fn want(&self, py: Python<'_>, tensor: u32, room: Option<u64>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || patiently(py, timeout, false, |t| self.core.want(tensor, room, t)))
    }

    fn wanted<'py>(&self, py: Python<'py>) -> Answer<'py, Option<(u32, Bound<'py, PyAny>)>> {
        answer(py, || {
            let Some(wanted) = self.core.wanted() else { return Ok(None) };
            // SAFETY: so many bytes are there and may be written to, until this object is closed or told that they are
            // there.
            let view = unsafe {
                let view = ffi::PyMemoryView_FromMemory(wanted.at.cast(), wanted.nbytes as isize, WRITABLE);
                Bound::from_owned_ptr_or_err(py, view)?
            };
            Ok(Some((wanted.tensor, view)))
        })
    }

    fn supplied(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || self.core.supplied())
    }

    fn progress<'py>(&self, py: Python<'py>) -> Answer<'py, (u64, u64)> {
        answer(py, || Ok(self.core.progress()))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || py.detach(|| self.core.close()))
    }

    fn files<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<OsString>> {
        answer(py, || Ok(self.core.names().to_vec()))
    }

    fn report<'py>(&self, py: Python<'py>) -> Answer<'py, Bound<'py, PyDict>> {
        answer(py, || {
            let r = self.core.report().map_err(|e| raise(py, &e))?;
            let d = PyDict::new(py);
            set_fields!(d, r, seconds, sync_seconds, fill_seconds, write_seconds, nbytes, file_bytes);
            d.set_item("gbps", if r.seconds > 0.0 { r.nbytes as f64 / 1e9 / r.seconds } else { 0.0 })?;
            set_fields!(d, r, writes, retries, direct_bytes, threads, peak_staging);
            d.set_item("fallbacks", told(py, &r.fallbacks)?)?;
            Ok(d)
        })
    }
}
