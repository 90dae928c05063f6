//! `penstock.Options`: the core's options with Python's spellings, strict validation and environment overrides.

use crate::errors::invalid;
use crate::guard::{answer, guarded, Answer};
use penstock::options::{
    Bind, Cache, Exchanging, Io, Options as Core, Ports, Scope, MOST_EXTENT, MOST_PINNING_THREADS,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyTuple};
use std::time::Duration;

/// (spelling, value) of an option with a fixed set of values.
type Spellings<T> = &'static [(&'static str, T)];

const IO: Spellings<Io> = &[
    ("auto", Io::Auto),
    ("mapped", Io::Mapped),
    ("buffered", Io::Buffered),
    ("uring_buffered", Io::UringBuffered),
    ("direct", Io::Direct),
    ("uring", Io::Uring),
    ("threads", Io::Threads),
];
const CACHE: Spellings<Cache> = &[("auto", Cache::Auto), ("keep", Cache::Keep), ("bypass", Cache::Bypass)];

const EXCHANGE: Spellings<Exchanging> = &[("auto", Exchanging::Auto), ("on", Exchanging::On), ("off", Exchanging::Off)];

const SCOPE: Spellings<Scope> = &[("world", Scope::World), ("node", Scope::Node)];

/// Options that a user may well set; all names stand in this order wherever options are listed.
const EVERYDAY: [&str; 6] = ["cache", "copy", "window", "staging", "threads", "stall_timeout"];
/// Options for measurements, for unusual storage, and for finding out what is wrong.
const ADVANCED: [&str; 12] = [
    "io",
    "extent",
    "depth",
    "gap",
    "pinning_threads",
    "exchange",
    "scope",
    "peer_timeout",
    "join_timeout",
    "ports",
    "bind",
    "trace",
];

fn names() -> impl Iterator<Item = &'static str> {
    EVERYDAY.into_iter().chain(ADVANCED)
}

/// How a load travels. The defaults are right for nearly everybody.
///
/// An environment variable, `PENSTOCK_` and the name in capitals, sets another default for a whole process. An argument in
/// code wins over it. Sizes are bytes or strings such as "256MiB" (KiB, MiB, GiB are powers of 1024, KB, MB, GB powers of
/// 1000).
///
/// Everyday options:
///
/// - cache: "auto" | "keep" | "bypass": whether bytes that come from the disk stay in the page cache.
/// - copy: on the CPU. True gives private copies. False maps files wherever the file system allows it. None (the default)
///   maps local files (with cache="bypass" only those that are resident).
/// - window: the most bytes that a stream reads ahead of its consumer (default 1 GiB). A next tensor that is larger is
///   read alone.
/// - staging: the most bytes of staging memory of this process (default 256 MiB). A load takes less where less
///   memory is left.
/// - threads: the number of threads that read through the page cache and copy; 0 (the default) adapts.
/// - stall_timeout: seconds. If nothing moves for so long, reads count as hung, and the load fails (default 120).
///
/// Advanced options, for measurements, unusual storage and finding out what is wrong:
///
/// - io: "auto" | "mapped" | "buffered" | "uring_buffered" | "direct" | "uring" | "threads": the way of reading.
///   "buffered" reads through the page cache by a thread pool, "uring_buffered" by io_uring. "direct" reads past it with
///   O_DIRECT, by io_uring if this system grants it, else by a thread pool; "uring" and "threads" name one.
/// - extent: the most bytes of one read, a multiple of 4096 (default 4 MiB).
/// - depth: the most reads in flight; 0 (the default) adapts.
/// - gap: if at most so many unwanted bytes lie between two wanted ranges, they are read too. "auto" (the default): 16 KiB;
///   more where a load has thousands of longer holes and a read of this storage, timed, costs more.
/// - pinning_threads: the number of threads, 1 (the default) to 16, that register staging memory with a GPU's driver in the
///   first load to it. More than one has not been measured on hardware.
/// - exchange: "auto" | "on" | "off": of several ranks that load together, whether one reads what several of them want and
///   sends it to the others. "auto" (the default) tries both ways with the first 64 MiB of it, and goes on in the quicker one.
/// - scope: "world" | "node": which ranks do so. "world" (the default): all of them, so that each byte leaves the storage once.
///   "node": those of one machine, so that each machine reads what its ranks want, and nothing crosses the network.
/// - peer_timeout: seconds. Of several ranks that load together, one that says nothing for so long is dead, and the load fails
///   on the others (default 5).
/// - join_timeout: seconds that a rank waits for the others before a load (default 300).
/// - ports: the ports at which a rank listens for the others, such as "40000-40100". "" (the default): any. A rank takes two
///   in a load, and two more in a stream and within `joined`.
/// - bind: the address or the interface at which it listens, and which the others are told to reach. "" (the default): the
///   interface in GLOO_SOCKET_IFNAME, else the address from which the rendezvous store is reached.
/// - trace: a file. The load writes to it what happened when, for Chrome or Perfetto. "{pid}" and "{n}" in the name stand
///   for the process and the number of the traced load in it. "" (the default) writes none.
///
/// Raises ValueError for an unknown option or an impossible value, and lists the possible ones; TypeError for a value of
/// the wrong type.
#[pyclass(frozen, module = "penstock", eq, from_py_object)]
#[derive(Clone, PartialEq)]
pub(crate) struct Options(pub(crate) Core);

#[pymethods]
impl Options {
    #[new]
    #[pyo3(signature = (**values))]
    fn new(py: Python<'_>, values: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        guarded(py, || Self::of(values))
    }

    #[getter]
    fn io<'py>(&self, py: Python<'py>) -> Answer<'py, &'static str> {
        answer(py, || Ok(spelling(IO, self.0.io)))
    }

    #[getter]
    fn cache<'py>(&self, py: Python<'py>) -> Answer<'py, &'static str> {
        answer(py, || Ok(spelling(CACHE, self.0.cache)))
    }

    #[getter]
    fn staging<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.staging))
    }

    #[getter]
    fn extent<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.extent))
    }

    #[getter]
    fn depth<'py>(&self, py: Python<'py>) -> Answer<'py, u32> {
        answer(py, || Ok(self.0.depth))
    }

    #[getter]
    fn threads<'py>(&self, py: Python<'py>) -> Answer<'py, u32> {
        answer(py, || Ok(self.0.threads))
    }

    #[getter]
    fn pinning_threads<'py>(&self, py: Python<'py>) -> Answer<'py, u32> {
        answer(py, || Ok(self.0.pinning_threads))
    }

    #[getter]
    fn copy<'py>(&self, py: Python<'py>) -> Answer<'py, Option<bool>> {
        answer(py, || Ok(self.0.copy))
    }

    #[getter]
    fn gap<'py>(&self, py: Python<'py>) -> Answer<'py, Bound<'py, PyAny>> {
        answer(py, || match self.0.gap {
            None => Ok("auto".into_pyobject(py)?.into_any()),
            Some(bytes) => Ok(bytes.into_pyobject(py)?.into_any()),
        })
    }

    /// Bytes: `gap`, or where that is "auto" what it is before anything is known of the storage.
    #[getter]
    fn _least_gap<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.least_gap()))
    }

    #[getter]
    fn window<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
        answer(py, || Ok(self.0.window))
    }

    #[getter]
    fn stall_timeout<'py>(&self, py: Python<'py>) -> Answer<'py, f64> {
        answer(py, || Ok(self.0.stall_timeout.as_secs_f64()))
    }

    #[getter]
    fn exchange<'py>(&self, py: Python<'py>) -> Answer<'py, &'static str> {
        answer(py, || Ok(spelling(EXCHANGE, self.0.exchange)))
    }

    #[getter]
    fn scope<'py>(&self, py: Python<'py>) -> Answer<'py, &'static str> {
        answer(py, || Ok(spelling(SCOPE, self.0.scope)))
    }

    #[getter]
    fn peer_timeout<'py>(&self, py: Python<'py>) -> Answer<'py, f64> {
        answer(py, || Ok(self.0.peer_timeout.as_secs_f64()))
    }

    #[getter]
    fn join_timeout<'py>(&self, py: Python<'py>) -> Answer<'py, f64> {
        answer(py, || Ok(self.0.join_timeout.as_secs_f64()))
    }

    #[getter]
    fn ports<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || Ok(ports_spelled(&self.0)))
    }

    #[getter]
    fn bind<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || Ok(self.0.bind.to_string()))
    }

    #[getter]
    fn trace<'a, 'py>(&'a self, py: Python<'py>) -> Answer<'py, &'a str> {
        answer(py, || Ok(self.0.trace.as_str()))
    }

    /// Names of all options, the everyday ones first.
    #[staticmethod]
    fn names(py: Python<'_>) -> Answer<'_, Vec<&'static str>> {
        answer(py, || Ok(names().collect::<Vec<_>>()))
    }

    /// Names of the options by group: "everyday" and "advanced".
    #[staticmethod]
    fn groups(py: Python<'_>) -> Answer<'_, Bound<'_, PyDict>> {
        answer(py, || {
            let groups = PyDict::new(py);
            groups.set_item("everyday", EVERYDAY.to_vec())?;
            groups.set_item("advanced", ADVANCED.to_vec())?;
            Ok(groups)
        })
    }

    /// Support for `pickle` and `copy`.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        guarded(slf.py(), || {
            let py = slf.py();
            let values = PyDict::new(py);
            for name in names() {
                values.set_item(name, slf.getattr(name)?)?;
            }
            let partial = py.import("functools")?.getattr("partial")?;
            Ok((partial.call((slf.get_type(),), Some(&values))?, PyTuple::empty(py)))
        })
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || Ok(self.spelled()))
    }
}

impl Options {
    fn of(values: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut options = Core::default();
        for name in names() {
            let variable = format!("PENSTOCK_{}", name.to_uppercase());
            if let Some(text) = value_of(&variable)? {
                set_text(&mut options, name, &text).map_err(|why| invalid(format!("{variable}={text:?}: {why}")))?;
            }
        }
        for (name, value) in values.into_iter().flatten() {
            let shown = name.repr()?.to_string();
            let name: String = name.extract().unwrap_or(shown);
            if !names().any(|known| known == name) {
                return Err(invalid(format!(
                    "there is no option {name:?}; everyday options: {}; advanced options: {}",
                    EVERYDAY.join(", "),
                    ADVANCED.join(", ")
                )));
            }
            if !(value.is_none() && name != "copy") {
                set(&mut options, &name, &value)?;
            }
        }
        if options.extent < 4096 || options.extent % 4096 != 0 || options.extent > MOST_EXTENT {
            return Err(invalid(format!(
                "extent={}: must be a multiple of 4096 bytes, from 4096 to 1 GiB",
                options.extent
            )));
        }
        if options.staging < 2 * options.extent {
            return Err(invalid(format!(
                "staging={}: must hold at least two extents of {} bytes",
                options.staging, options.extent
            )));
        }
        if !(1..=MOST_PINNING_THREADS).contains(&options.pinning_threads) {
            return Err(invalid(format!(
                "pinning_threads={}: must be from 1 to {MOST_PINNING_THREADS}",
                options.pinning_threads
            )));
        }
        Ok(Self(options))
    }

    fn spelled(&self) -> String {
        let copy = match self.0.copy {
            None => "None",
            Some(true) => "True",
            Some(false) => "False",
        };
        let gap = self.0.gap.map_or_else(|| "\"auto\"".into(), |bytes| bytes.to_string());
        format!(
            "Options(cache={:?}, copy={copy}, window={}, staging={}, threads={}, stall_timeout={}, io={:?}, extent={}, \
             depth={}, gap={gap}, pinning_threads={}, exchange={:?}, scope={:?}, peer_timeout={}, join_timeout={}, \
             ports={:?}, bind={:?}, trace={:?})",
            spelling(CACHE, self.0.cache),
            self.0.window,
            self.0.staging,
            self.0.threads,
            self.0.stall_timeout.as_secs_f64(),
            spelling(IO, self.0.io),
            self.0.extent,
            self.0.depth,
            self.0.pinning_threads,
            spelling(EXCHANGE, self.0.exchange),
            spelling(SCOPE, self.0.scope),
            self.0.peer_timeout.as_secs_f64(),
            self.0.join_timeout.as_secs_f64(),
            ports_spelled(&self.0),
            self.0.bind.to_string(),
            self.0.trace,
        )
    }
}

fn ports_spelled(options: &Core) -> String {
    options.ports.map_or_else(String::new, |ports| ports.to_string())
}

fn spelling<T: PartialEq + Copy>(spellings: Spellings<T>, value: T) -> &'static str {
    spellings.iter().find(|s| s.1 == value).map_or("?", |s| s.0)
}

fn parse<T: Copy>(spellings: Spellings<T>, text: &str) -> Result<T, String> {
    spellings.iter().find(|s| s.0 == text).map(|s| s.1).ok_or_else(|| {
        let known: Vec<_> = spellings.iter().map(|s| format!("{:?}", s.0)).collect();
        format!("must be one of {}", known.join(", "))
    })
}

/// Bytes from "64MiB", "1.5 GB" or "4096".
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1048576.0,
        "gib" | "g" => 1073741824.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        _ => return Err("must be bytes, or a number with B, KB, MB, GB, KiB, MiB or GiB".into()),
    };
    let number: f64 = number.parse().map_err(|_| "must be bytes, or a size such as \"256MiB\"".to_owned())?;
    let bytes = number * factor;
    if bytes > 9e18 {
        return Err("is out of range".into());
    }
    Ok(bytes as u64)
}

fn seconds(value: f64) -> Result<Duration, String> {
    if value.is_finite() && value > 0.0 && value < 1e9 {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err("must be a positive number of seconds".into())
    }
}

/// The value of an environment variable, where it is set.
pub(crate) fn value_of(variable: &str) -> PyResult<Option<String>> {
    let Some(value) = std::env::var_os(variable) else { return Ok(None) };
    // That of a store may be a secret.
    let is_shown = !variable.starts_with("PENSTOCK_STORAGE_");
    let refuse = |value| match is_shown {
        true => invalid(format!("{variable}={value:?}: must be UTF-8")),
        false => invalid(format!("{variable}: must be UTF-8")),
    };
    value.into_string().map(Some).map_err(refuse)
}

/// The stall timeout if no options are given: `value`, otherwise the environment's, otherwise the default.
pub(crate) fn stall_timeout_of(value: Option<f64>) -> PyResult<Duration> {
    const VARIABLE: &str = "PENSTOCK_STALL_TIMEOUT";
    let mut options = Core::default();
    if let Some(value) = value {
        let wrong = |why| invalid(format!("stall_timeout={value}: {why}"));
        options.stall_timeout = seconds(value).map_err(wrong)?;
    } else if let Some(text) = value_of(VARIABLE)? {
        set_text(&mut options, "stall_timeout", &text).map_err(|why| invalid(format!("{VARIABLE}={text:?}: {why}")))?;
    }
    Ok(options.stall_timeout)
}

/// The stall timeout, in seconds, of work that takes no `Options`.
#[pyfunction]
#[pyo3(signature = (value = None))]
pub(crate) fn stall_timeout(py: Python<'_>, value: Option<f64>) -> Answer<'_, f64> {
    answer(py, || stall_timeout_of(value).map(|timeout| timeout.as_secs_f64()))
}

fn timeout<'a>(o: &'a mut Core, name: &str) -> &'a mut Duration {
    match name {
        "peer_timeout" => &mut o.peer_timeout,
        "join_timeout" => &mut o.join_timeout,
        _ => &mut o.stall_timeout,
    }
}

fn set_text(o: &mut Core, name: &str, text: &str) -> Result<(), String> {
    let whole = || text.trim().parse::<u32>().map_err(|_| "must be a whole number, 0 or more".to_owned());
    match name {
        "io" => o.io = parse(IO, text)?,
        "cache" => o.cache = parse(CACHE, text)?,
        "exchange" => o.exchange = parse(EXCHANGE, text)?,
        "scope" => o.scope = parse(SCOPE, text)?,
        "staging" => o.staging = size(text)?,
        "extent" => o.extent = size(text)?,
        "depth" => o.depth = whole()?,
        "threads" => o.threads = whole()?,
        "pinning_threads" => o.pinning_threads = whole()?,
        "gap" if text.trim() == "auto" => o.gap = None,
        "gap" => o.gap = Some(size(text).map_err(|why| format!("{why}, or \"auto\""))?),
        "window" => o.window = size(text)?,
        "ports" => o.ports = if text.is_empty() { None } else { Some(Ports::parse(text)?) },
        "bind" => o.bind = Bind::parse(text)?,
        "trace" => text.clone_into(&mut o.trace),
        "stall_timeout" | "peer_timeout" | "join_timeout" => {
            *timeout(o, name) = seconds(text.trim().parse().map_err(|_| "must be a number of seconds".to_owned())?)?;
        }
        "copy" => {
            o.copy = match text.trim().to_ascii_lowercase().as_str() {
                "1" | "true" | "yes" => Some(true),
                "0" | "false" | "no" => Some(false),
                "" | "none" | "auto" => None,
                _ => return Err("must be true, false or none".into()),
            }
        }
        _ => return Err("is not an option".into()),
    }
    Ok(())
}

fn set(o: &mut Core, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let refuse = |why: String| invalid(format!("{name}={}: {why}", repr(value)));
    let wrong = |what: &str| PyTypeError::new_err(format!("{name} must be {what}, not {}", repr(value)));
    match name {
        "copy" => o.copy = value.extract::<Option<bool>>().map_err(|_| wrong("True, False or None"))?,
        "io" | "cache" | "exchange" | "scope" | "ports" | "bind" => {
            let text: String = value.extract().map_err(|_| wrong("a string"))?;
            set_text(o, name, &text).map_err(refuse)?;
        }
        "stall_timeout" | "peer_timeout" | "join_timeout" => {
            let number: f64 = value.extract().map_err(|_| wrong("a number of seconds"))?;
            *timeout(o, name) = seconds(number).map_err(refuse)?;
        }
        "trace" => {
            let path: std::path::PathBuf = value.extract().map_err(|_| wrong("a path"))?;
            o.trace = path.into_os_string().into_string().map_err(|_| refuse("must be Unicode".into()))?;
        }
        // For Python, True is 1.
        _ if value.is_instance_of::<PyBool>() => return Err(wrong("a whole number or a size such as \"256MiB\"")),
        _ => {
            let text = match (value.extract::<i128>(), value.extract::<String>()) {
                (Ok(number), _) if number < 0 => return Err(refuse("must not be negative".into())),
                (Ok(number), _) => number.to_string(),
                (_, Ok(text)) => text,
                _ => return Err(wrong("a whole number or a size such as \"256MiB\"")),
            };
            set_text(o, name, &text).map_err(refuse)?;
        }
    }
    Ok(())
}

pub(crate) fn repr(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "?".into(), |r| r.to_string())
}
