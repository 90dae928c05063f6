//! No panic gets out of the extension.
//!
//! PyO3 turns a panic into a `PanicException`, which derives from `BaseException`. `except Exception` does not catch
//! it, and it ends threads and programs. A bug in this extension must be an `InternalError` like any other error. So
//! each entry point (each function and method that Python can call) runs in [`guarded`], [`perform`] or [`answer`] and
//! takes lists as [`Listed`], and each class keeps what it owns in a [`Held`]. `tests/test_entry_points.py` reads the
//! sources and looks for entry points that do not.

use crate::errors::raise;
use penstock::{Error, ErrorKind};
use pyo3::conversion::IntoPyObject;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyString};
use pyo3::BoundObject;
use std::any::Any;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// The return type of an entry point that answers with a `T`.
pub(crate) type Answer<'py, T> = PyResult<Bound<'py, <T as IntoPyObject<'py>>::Target>>;

/// Does the work of an entry point. A panic in it becomes an `InternalError`.
pub(crate) fn guarded<T>(py: Python<'_>, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(py, &*panic)))
}

/// Like [`guarded`], for work that cannot fail and answers nothing.
pub(crate) fn perform(py: Python<'_>, work: impl FnOnce()) -> PyResult<()> {
    guarded(py, || {
        work();
        Ok(())
    })
}

/// Like [`guarded`], but makes the Python object of the answer inside the guard: that can panic too if memory runs out.
pub(crate) fn answer<'py, T: IntoPyObject<'py>>(py: Python<'py>, work: impl FnOnce() -> PyResult<T>) -> Answer<'py, T> {
    guarded(py, || match work()?.into_pyobject(py) {
        Ok(made) => Ok(made.into_bound()),
        Err(e) => Err(e.into()),
    })
}

/// Puts fields of a value into a dictionary, each under its own name.
macro_rules! set_fields {
    ($dictionary:expr, $of:expr, $($field:ident),+ $(,)?) => {
        $($dictionary.set_item(stringify!($field), &$of.$field)?;)+
    };
}
pub(crate) use set_fields;

/// The exception for a panic with this payload.
fn panicked(py: Python<'_>, panic: &(dyn Any + Send)) -> PyErr {
    let said = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = format!("penstock panicked: {}; please report this", said.unwrap_or("no reason was given"));
    let made = catch_unwind(AssertUnwindSafe(|| raise(py, &Error::new(ErrorKind::Internal, text.as_str()))));
    // Made later, by Python itself.
    made.unwrap_or_else(|_| PyRuntimeError::new_err(text))
}

/// An argument that is a list. PyO3 allocates as many elements as an object says that it has. If there is not so much
/// memory, the process ends.
pub(crate) struct Listed<T>(pub(crate) Vec<T>);

impl<'py, T: FromPyObjectOwned<'py>> FromPyObject<'_, 'py> for Listed<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        guarded(object.py(), || {
            if object.is_instance_of::<PyString>() {
                return Err(PyTypeError::new_err("expected a list of values, not a str"));
            }
            let mut values = Vec::new();
            let count = object.cast::<PySequence>()?.len()?;
            if values.try_reserve_exact(count).is_err() {
                return Err(PyMemoryError::new_err(format!("there is no memory for {count} values")));
            }
            for value in object.try_iter()? {
                values.push(value?.extract().map_err(Into::into)?);
            }
            Ok(Self(values))
        })
    }
}

/// Runs the clean-up when Python releases an object. That can happen at any time, where no error can be raised. A panic
/// is then reported like an exception in `__del__`.
pub(crate) fn letting_go(work: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        Python::try_attach(|py| {
            let before = PyErr::take(py);
            panicked(py, &*panic).write_unraisable(py, None);
            if let Some(error) = before {
                error.restore(py);
            }
        });
    }
}

/// The Rust value that a Python object owns.
pub(crate) struct Held<T>(ManuallyDrop<T>);

impl<T> Held<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Deref for Held<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        // SAFETY: dropped once, here, and not used afterwards.
        letting_go(|| unsafe { ManuallyDrop::drop(&mut self.0) });
    }
}
