//! `_core.Load` and `_core.View`.

use crate::checkpoint::Checkpoint;
use crate::disk_cache::DiskCache;
use crate::dlpack::{capsule, Shape, CPU, CUDA, ROCM};
use crate::errors::{detached, interruptibly, raise};
use crate::fill::CacheFill;
use crate::guard::{answer, guarded, letting_go, perform, set_fields, Answer, Held, Listed};
use crate::leased::Leased;
use crate::options::{order_of, Options};
use crate::ranks::{Mesh, Shares};
use crate::waiting::patiently;
use crate::wants::{wants_of, Region};
use penstock::device::api::{Api, Vendor};
use penstock::device::Fence;
use penstock::fallback::Fallback;
use penstock::load::{Load as Core, Next};
use penstock::memory::View as CoreView;
use penstock::options::grants;
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::strides::Foreign;
use penstock::stats::{ExchangeReport, Report};
use penstock::{DType, Error, ErrorKind, Want};
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyList, PyString};
use std::os::raw::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The instant that Python's `time.perf_counter()` returned: both read CLOCK_MONOTONIC on Linux.
fn instant(seconds: f64) -> Instant {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one writable timespec; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    let (now, monotonic) = (Instant::now(), t.tv_sec as f64 + t.tv_nsec as f64 / 1e9);
    let ago = Duration::try_from_secs_f64(monotonic - seconds).unwrap_or_default();
    now.checked_sub(ago).unwrap_or(now)
}

/// Tensors whose views are taken from the load in one call.
const AT_ONCE: usize = 1024;

/// (count, bytes from one to the next) of each dimension of a destination.
type Dims = Listed<(u64, u64)>;

/// A Python object that keeps memory alive.
pub(crate) struct Kept(#[allow(dead_code)] pub(crate) Py<PyAny>);

/// One load. It runs in the background from the moment when it is made.
#[pyclass(frozen, weakref, module = "penstock._core")]
pub(crate) struct Load {
    core: Held<Core>,
    device: (c_int, c_int),
    /// It is one of so many ranks that exchange nothing, and why.
    apart: Option<(usize, String)>,
}

impl Drop for Load {
    fn drop(&mut self) {
        // Waiting for what is in flight may take seconds. Other Python threads continue meanwhile.
        letting_go(|| {
            Python::try_attach(|py| py.detach(|| self.core.close()));
        });
    }
}

#[pymethods]
impl Load {
    #[staticmethod]
    #[pyo3(signature = (checkpoint, options, *, wants = None, regions = None, device = "cpu", order = "file",
                        stream = false, caller_blocks = false, into = None, strides = None, casts = None, keep = None,
                        fence = 0, dlpack_device = None, misaligned = false, exchange = None, apart = None))]
    #[allow(clippy::too_many_arguments)] // The signature is Python's: keywords all.
    fn start(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        options: &Options,
        wants: Option<Listed<u32>>,
        regions: Option<Listed<Region>>,
        device: &str,
        order: &str,
        stream: bool,
        caller_blocks: bool,
        into: Option<Listed<(u64, u64)>>,
        strides: Option<Listed<(u32, Dims)>>,
        casts: Option<Listed<(u32, String)>>,
        keep: Option<Py<PyAny>>,
        fence: u64,
        dlpack_device: Option<(c_int, c_int)>,
        misaligned: bool,
        exchange: Option<(Bound<'_, Shares>, Bound<'_, Mesh>)>,
        apart: Option<(usize, String)>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let core = &checkpoint.0;
            let wants = wants_of(core, wants, regions)?;
            let (at, asked) = target(device)?;
            let mut options = options.0.clone();
            options.misaligned = misaligned;
            options.order = order_of(order, "must be \"file\", \"layer\" or \"asked\"")?;
            let memory = match into {
                Some(tensors) => Memory::Into {
                    tensors: foreign(tensors, strides, casts)?,
                    keep: Arc::new(keep.map(Kept)),
                    fence: (fence != 0).then_some(Fence(fence)),
                },
                None if caller_blocks => Memory::Granted,
                None => Memory::Ours,
            };
            let request =
                Request { checkpoint: Arc::clone(core), wants, layout: None, device: at, memory, options, stream };
            let exchange = exchange.map(|(shares, mesh)| Ok::<_, PyErr>((shares.get().0.clone(), mesh.get().take()?)));
            let exchange = exchange.transpose()?;
            let files = core.files();
            let (core, own) = interruptibly(py, |go_on| {
                check_driver(asked, device).map_err(|e| match files.first() {
                    Some(file) => e.at(&file.spelled),
                    None => e,
                })?;
                let core = match exchange {
                    Some(group) => Core::start_in_group(request, group, go_on)?,
                    None => Core::start_while(request, go_on)?,
                };
                let own = match at {
                    Where::Cpu => (CPU, 0),
                    Where::Gpu(number) => match Api::load()?.vendor() {
                        Vendor::Cuda => (CUDA, number as c_int),
                        Vendor::Hip => (ROCM, number as c_int),
                    },
                };
                Ok((core, own))
            })?;
            Ok(Self { core: Held::new(core), device: dlpack_device.unwrap_or(own), apart })
        })
    }

    fn blocks<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<u64>> {
        answer(py, || Ok(self.core.layout().blocks.iter().map(|b| b.nbytes).collect::<Vec<_>>()))
    }

    fn grants<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<(usize, usize)>> {
        answer(py, || {
            let sizes: Vec<u64> = self.core.layout().blocks.iter().map(|b| b.nbytes).collect();
            Ok(grants(&sizes).into_iter().map(|g| (g.start, g.end)).collect::<Vec<_>>())
        })
    }

    fn places<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<(u32, u64, u64)>> {
        answer(py, || Ok(self.core.layout().places.iter().map(|p| (p.block, p.offset, p.nbytes)).collect::<Vec<_>>()))
    }

    fn wanted_blocks<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<u32>> {
        answer(py, || self.core.wanted_blocks().map_err(|e| raise(py, &e)))
    }

    #[pyo3(signature = (block, address, keep, fence = 0))]
    fn grant(&self, py: Python<'_>, block: u32, address: u64, keep: Py<PyAny>, fence: u64) -> PyResult<()> {
        guarded(py, || {
            let fence = (fence != 0).then_some(Fence(fence));
            self.core.grant(block, address, Arc::new(Kept(keep)), fence).map_err(|e| raise(py, &e))
        })
    }

    #[pyo3(signature = (timeout = None))]
    fn next<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || {
            let found = patiently(py, timeout, Next::TimedOut, |t| self.core.next(Some(t)))?;
            Ok(match found {
                Next::Ready(want) => PyInt::new(py, want).into_any(),
                Next::Grant => PyBool::new(py, true).to_owned().into_any(),
                Next::TimedOut => PyBool::new(py, false).to_owned().into_any(),
                Next::End => py.None().into_bound(py),
            })
        })
    }

    fn take(&self, py: Python<'_>, want: u32) -> PyResult<()> {
        guarded(py, || self.core.take(want).map_err(|e| raise(py, &e)))
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        guarded(py, || Ok(patiently(py, timeout, Next::TimedOut, |t| self.core.wait_or_grant(Some(t)))? == Next::End))
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        guarded(py, || Ok(self.core.is_done()))
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || self.core.cancel())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || py.detach(|| self.core.close()))
    }

    fn let_go(&self, py: Python<'_>) -> PyResult<()> {
        perform(py, || py.detach(|| self.core.let_go()))
    }

    fn progress<'py>(&self, py: Python<'py>) -> Answer<'py, (u64, u64)> {
        answer(py, || Ok(self.core.progress()))
    }

    fn planned<'py>(&self, py: Python<'py>) -> Answer<'py, (u64, u64)> {
        answer(py, || Ok(self.core.planned()))
    }

    fn report<'py>(&self, py: Python<'py>) -> Answer<'py, Bound<'py, PyDict>> {
        answer(py, || {
            let mut found = self.core.report();
            if let Some((ranks, _)) = self.apart {
                found.exchange = Some(ExchangeReport { ranks, ..ExchangeReport::default() });
            }
            let given = self.apart.as_ref().map(|apart| apart.1.as_str());
            report(py, &found, given)
        })
    }

    #[getter]
    fn traced(&self, py: Python<'_>) -> PyResult<bool> {
        guarded(py, || Ok(self.core.is_traced()))
    }

    fn mark(&self, py: Python<'_>, name: String, begun: f64, ended: f64) -> PyResult<()> {
        perform(py, || self.core.mark(name, instant(begun), instant(ended)))
    }

    fn write_trace(&self, py: Python<'_>, report: &str) -> PyResult<()> {
        guarded(py, || {
            let report = serde_json::from_str(report).map_err(|e| PyValueError::new_err(e.to_string()))?;
            py.detach(|| self.core.write_trace(&report)).map_err(|e| raise(py, &e))
        })
    }

    fn touched<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<u32>> {
        answer(py, || Ok(self.core.touched()))
    }

    fn address<'py>(&self, py: Python<'py>, want: u32) -> Answer<'py, u64> {
        answer(py, || self.core.address(want).map_err(|e| raise(py, &e)))
    }

    fn capsule<'py>(
        &self,
        py: Python<'py>,
        want: u32,
        dtype: (u8, u8),
        shape: Listed<i64>,
    ) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || {
            let view = self.core.view(want).map_err(|e| raise(py, &e))?;
            fits(&view, dtype, &shape.0)?;
            capsule(py, view, self.device, dtype, shape.0.into_iter().collect())
        })
    }

    fn capsules<'py>(
        &self,
        py: Python<'py>,
        wants: Listed<u32>,
        dtypes: &Bound<'py, PyDict>,
        convert: &Bound<'py, PyAny>,
    ) -> Answer<'py, Bound<'py, PyList>> {
        answer(py, || self.converted(py, &wants.0, dtypes, convert))
    }

    fn lease<'py>(&self, py: Python<'py>, most_alive: u64) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || match detached(py, || self.core.lease(most_alive))? {
            Ok(leased) => Ok(Bound::new(py, Leased::new(leased))?.into_any()),
            Err(refused) => Ok(PyString::new(py, &refused).into_any()),
        })
    }

    fn views<'py>(&self, py: Python<'py>, wants: Listed<u32>) -> Answer<'py, Vec<View>> {
        answer(py, || {
            let views = self.core.views(&wants.0).map_err(|e| raise(py, &e))?;
            Ok(views.into_iter().map(|view| View::new(view, self.device)).collect::<Vec<_>>())
        })
    }
}

impl Load {
    /// `convert(capsule)` for each of these wants.
    fn converted<'py>(
        &self,
        py: Python<'py>,
        wants: &[u32],
        dtypes: &Bound<'py, PyDict>,
        convert: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        // Looked up once per dtype, not once per tensor: a checkpoint has few dtypes and up to 371,474 tensors.
        let mut known: Vec<(DType, Spec)> = Vec::new();
        let checkpoint = self.core.checkpoint();
        let mut made = Vec::with_capacity(wants.len());
        for wants in wants.chunks(AT_ONCE) {
            let views = self.core.views(wants).map_err(|e| raise(py, &e))?;
            for (&want, view) in wants.iter().zip(views) {
                let wanted = &self.core.wants()[want as usize];
                let info = checkpoint.tensor(wanted.tensor);
                let spec = match known.iter().find(|k| k.0 == info.dtype) {
                    Some(k) => k.1,
                    None => {
                        let spec = dtypes.get_item(info.dtype.name())?.ok_or_else(|| {
                            PyTypeError::new_err(format!("tensor {}: no type given for {}", info.name, info.dtype))
                        })?;
                        let spec: Spec = spec.extract()?;
                        known.push((info.dtype, spec));
                        spec
                    }
                };
                made.push(tensor_of(py, view, (checkpoint, wanted), spec, self.device, convert)?);
            }
        }
        PyList::new(py, made)
    }
}

/// A dtype in DLPack: its code, its bits, and how many elements of the tensor one of them holds.
pub(crate) type Spec = (u8, u8, i64);

/// `convert(capsule)` for the bytes of a want, which are on this device.
pub(crate) fn tensor_of<'py>(
    py: Python<'py>,
    view: CoreView,
    (checkpoint, want): (&penstock::Checkpoint, &Want),
    (code, bits, packed): Spec,
    device: (c_int, c_int),
    convert: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let info = checkpoint.tensor(want.tensor);
    let mut shape: Shape = match &want.region {
        None => info.shape.iter().map(|&n| n as i64).collect(),
        Some(region) => region.iter().map(|r| r.count() as i64).collect(),
    };
    if let (true, Some(last)) = (packed > 1, shape.last_mut()) {
        *last /= packed;
    }
    if let Some(why) = unfit(&view, (code, bits), &shape) {
        let e = Error::new(ErrorKind::Unsupported, format!("tensor {} {why}", info.name)).of_tensor(info.name);
        return Err(raise(py, &e.at(&checkpoint.files()[info.file as usize].spelled)));
    }
    convert.call1((capsule(py, view, device, (code, bits), shape)?,))
}

/// The caller's memory, one for each want: address and bytes, the dimensions of what is not contiguous, and the dtypes of
/// what has another one than the tensor.
fn foreign(
    into: Listed<(u64, u64)>,
    strides: Option<Listed<(u32, Dims)>>,
    casts: Option<Listed<(u32, String)>>,
) -> PyResult<Vec<Foreign>> {
    let mut tensors: Vec<Foreign> = into.0.into_iter().map(|(at, nbytes)| Foreign::contiguous(at, nbytes)).collect();
    let nowhere = |what: &str, want: u32| PyIndexError::new_err(format!("{what} of want {want}, which has no memory"));
    for (want, dims) in strides.into_iter().flat_map(|s| s.0) {
        let tensor = tensors.get_mut(want as usize).ok_or_else(|| nowhere("strides", want))?;
        tensor.dims = Some(dims.0.into());
    }
    for (want, name) in casts.into_iter().flat_map(|c| c.0) {
        let tensor = tensors.get_mut(want as usize).ok_or_else(|| nowhere("a cast", want))?;
        let dtype = DType::parse(&name);
        tensor.cast = Some(dtype.ok_or_else(|| PyValueError::new_err(format!("{name:?} is no dtype of the format")))?);
    }
    Ok(tensors)
}

/// The device that `text` names, and the vendor of its driver if `text` says it.
fn target(text: &str) -> PyResult<(Where, Option<Vendor>)> {
    let unknown = || {
        PyValueError::new_err(format!(
            "device={text:?}: must be \"cpu\", \"cuda:N\", \"rocm:N\" or \"gpu:N\" with N counted from 0"
        ))
    };
    if text == "cpu" {
        return Ok((Where::Cpu, None));
    }
    let (kind, number) = text.split_once(':').ok_or_else(unknown)?;
    let number: u32 = number.parse().map_err(|_| unknown())?;
    let asked = match kind {
        "cuda" => Some(Vendor::Cuda),
        "rocm" => Some(Vendor::Hip),
        "gpu" => None,
        _ => return Err(unknown()),
    };
    Ok((Where::Gpu(number), asked))
}

/// Refuses a GPU of one vendor if the driver is the other vendor's. If there is no GPU at all, the code that needs one
/// reports that.
fn check_driver(asked: Option<Vendor>, device: &str) -> penstock::Result<()> {
    // Only then: looking for a driver takes about 45 system calls, and loading one far more.
    let Some(asked) = asked else { return Ok(()) };
    let Ok(api) = Api::load() else { return Ok(()) };
    if asked == api.vendor() {
        return Ok(());
    }
    let name = match api.vendor() {
        Vendor::Cuda => "cuda",
        Vendor::Hip => "rocm",
    };
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "device={device:?} is a GPU of {asked}, but the driver found here is that of {} ({}); give {:?}",
            api.vendor(),
            api.library(),
            format!("{name}:{}", device.split_once(':').map_or("0", |d| d.1)),
        ),
    ))
}

/// The reason that a dtype and shape do not suit the view. They would read past the view, or the dimensions that
/// are not empty have more elements than an i64 can count in bits. Only an empty tensor can have such dimensions. torch
/// multiplies its strides until they overflow, and then frees the capsule twice (2.15).
fn unfit(view: &CoreView, (_, bits): (u8, u8), shape: &[i64]) -> Option<String> {
    let span = shape.iter().try_fold(i64::from(bits), |n, &d| if d < 0 { None } else { n.checked_mul(d.max(1)) });
    let held = span.map(|n| if shape.contains(&0) { 0 } else { n.unsigned_abs() });
    match (held, view.nbytes()) {
        (Some(held), nbytes) if Some(held) == nbytes.checked_mul(8) => None,
        (None, 0) => Some("is empty, but its other dimensions multiply to more than can be counted".into()),
        (_, nbytes) => Some(format!("has {nbytes} bytes, which do not make shape {shape:?}")),
    }
}

fn fits(view: &CoreView, dtype: (u8, u8), shape: &[i64]) -> PyResult<()> {
    unfit(view, dtype, shape).map_or(Ok(()), |why| Err(PyValueError::new_err(format!("the tensor {why}"))))
}

/// Fallbacks in the form of a report.
pub(crate) fn told<'py>(py: Python<'py>, fallbacks: &[Fallback]) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let one = |f: &Fallback| {
        let d = PyDict::new(py);
        set_fields!(d, f, from, to, reason);
        Ok(d)
    };
    fallbacks.iter().map(one).collect()
}

/// `reason`: why the rank exchanges nothing, if that was settled before.
fn report<'py>(py: Python<'py>, r: &Report, reason: Option<&str>) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    set_fields!(d, r, seconds, plan_seconds, first_tensor_seconds, cpu_seconds, engine_cpu_seconds, nbytes, tensors);
    d.set_item("gbps", if r.seconds > 0.0 { r.nbytes as f64 / 1e9 / r.seconds } else { 0.0 })?;
    let routes = PyDict::new(py);
    for (kind, totals) in r.routes.iter() {
        let lane = PyDict::new(py);
        set_fields!(lane, totals, bytes, extents);
        routes.set_item(kind.name, lane)?;
    }
    d.set_item("routes", routes)?;
    d.set_item("slack_bytes", r.unwanted.slack)?;
    d.set_item("gap_bytes", r.unwanted.gap)?;
    d.set_item("gaps", &r.unwanted.of_tensors)?;
    set_fields!(d, r, gap_limit, rerouted_extents, resident_bytes, residency_probes);
    set_fields!(d, r, first_touch_bytes, first_touch_seconds, touched_pages, touch_calls, peak_staging);
    d.set_item("fallbacks", told(py, &r.fallbacks)?)?;
    let waits = PyDict::new(py);
    for (name, time) in r.waits.by_name() {
        waits.set_item(name, time.as_secs_f64())?;
    }
    d.set_item("waits", waits)?;
    let network = r.network.map(|traffic| {
        let d = PyDict::new(py);
        set_fields!(d, traffic, requests, connections, retries, busy);
        d.set_item("moved_requests", traffic.moved)?;
        d.set_item("received_bytes", traffic.received)?;
        d.set_item("gap_bytes", traffic.gaps)?;
        Ok::<_, PyErr>(d)
    });
    d.set_item("network", network.transpose()?)?;
    let exchange = r.exchange.map(|exchange| {
        let d = PyDict::new(py);
        d.set_item("ranks", exchange.ranks)?;
        d.set_item("choice", if exchange.exchanged { "on" } else { "off" })?;
        d.set_item("reason", reason.map_or_else(|| exchange.why(), str::to_owned))?;
        d.set_item("sent_bytes", exchange.sent)?;
        d.set_item("lent_bytes", exchange.lent)?;
        d.set_item("shared_pages", exchange.shared_pages)?;
        d.set_item("received_bytes", exchange.received)?;
        Ok::<_, PyErr>(d)
    });
    d.set_item("exchange", exchange.transpose()?)?;
    set_fields!(d, r, bottleneck, cache, cache_reason);
    d.set_item("disk_cache", r.disk_cache.clone().map(DiskCache::new))?;
    d.set_item("cache_fill", r.cache_fill.clone().map(CacheFill::new))?;
    Ok(d)
}

/// The bytes of one ready want. It owns a share of its block and nothing else of the load.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct View {
    view: Held<Arc<CoreView>>,
    device: (c_int, c_int),
}

impl View {
    pub(crate) fn new(view: CoreView, device: (c_int, c_int)) -> Self {
        Self { view: Held::new(Arc::new(view)), device }
    }
}

#[pymethods]
impl View {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> Answer<'py, Bound<'py, PyDict>> {
        answer(py, || {
            if self.device.0 != CPU {
                return Err(pyo3::exceptions::PyAttributeError::new_err("the bytes are not in CPU memory"));
            }
            let d = PyDict::new(py);
            d.set_item("version", 3)?;
            d.set_item("typestr", "|u1")?;
            d.set_item("shape", (self.view.nbytes(),))?;
            d.set_item("data", (self.view.address(), false))?;
            Ok(d)
        })
    }

    fn capsule<'py>(&self, py: Python<'py>, dtype: (u8, u8), shape: Listed<i64>) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || {
            fits(&self.view, dtype, &shape.0)?;
            capsule(py, Arc::clone(&self.view), self.device, dtype, shape.0.into_iter().collect())
        })
    }

    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.view.address()))
    }

    #[getter]
    fn nbytes<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.view.nbytes()))
    }

    #[pyo3(signature = (*, stream = None, **kwargs))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || {
            // The bytes are complete on the host before they are handed out, so no stream needs to wait.
            let _ = (stream, kwargs);
            let shape = [self.view.nbytes() as i64].into_iter().collect();
            capsule(py, Arc::clone(&self.view), self.device, (1, 8), shape)
        })
    }

    fn __dlpack_device__<'py>(&self, py: Python<'py>) -> Answer<'py, (c_int, c_int)> {
        answer(py, || Ok(self.device))
    }
}
