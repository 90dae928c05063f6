//! Core errors to Python exceptions.

use crate::raised::Raised;
use penstock::error::{Error, ErrorKind, Value};
use pyo3::prelude::*;
use pyo3::IntoPyObjectExt;

/// The exception that `penstock._errors` makes from a core error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let values = error.values().map(|(expected, found)| (spelled(py, expected), spelled(py, found)));
    let made = py.import("penstock._errors").and_then(|m| {
        m.call_method1(
            "from_core",
            (
                format!("{:?}", error.kind()),
                error.full_message(),
                error.path().map(|p| p.as_os_str()),
                error.byte_range().map(|r| (r.start, r.end)),
                error.errno(),
                error.tensor(),
                values,
                error.status(),
                error.request_id(),
                error.peer().map(|(rank, host)| (rank, host, error.why(), error.silence().map(|s| s.as_secs_f64()))),
            ),
        )
    });
    match made {
        Ok(exception) => {
            let exception = PyErr::from_value(exception);
            if let Some(cause) = cause_of(py, error) {
                exception.set_cause(py, Some(cause));
            }
            exception
        }
        Err(e) => e,
    }
}

/// The exception that led to it, if one did.
fn cause_of(py: Python<'_>, error: &Error) -> Option<PyErr> {
    let mut cause = std::error::Error::source(error);
    while let Some(e) = cause {
        if let Some(raised) = e.downcast_ref::<Raised>() {
            return Some(PyErr::from_value(raised.exception.bind(py).clone()));
        }
        cause = e.source();
    }
    None
}

/// An `InvalidError`, which is a `ValueError`.
pub(crate) fn invalid(text: impl Into<String>) -> PyErr {
    Python::attach(|py| raise(py, &Error::new(ErrorKind::Invalid, text)))
}

/// A number as an `int`, a text as a `str`.
fn spelled(py: Python<'_>, value: &Value) -> Py<PyAny> {
    match value {
        Value::Number(number) => number.into_py_any(py),
        Value::Text(text) => text.into_py_any(py),
    }
    .unwrap_or_else(|_| py.None())
}

/// Runs `f` without the GIL. `f` can ask, now and then, whether to continue: the answer is no after Ctrl-C.
pub(crate) fn interruptibly<T: Send>(
    py: Python<'_>,
    f: impl FnOnce(&mut (dyn FnMut() -> bool + Send)) -> penstock::Result<T> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let mut go_on = || {
        // When the interpreter ends, no caller is left.
        let Some(heard) = Python::try_attach(|py| py.check_signals()) else { return false };
        raised = heard.err();
        raised.is_none()
    };
    let result = py.detach(|| f(&mut go_on));
    match raised {
        Some(e) => Err(e),
        None => result.map_err(|e| raise(py, &e)),
    }
}

/// Runs `f` without the GIL and turns its error into an exception.
pub(crate) fn detached<T: Send>(py: Python<'_>, f: impl FnOnce() -> penstock::Result<T> + Send) -> PyResult<T> {
    py.detach(f).map_err(|e| raise(py, &e))
}
