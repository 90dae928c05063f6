//! `penstock.Options`: the core's options as Python has them, with environment overrides.

use crate::errors::invalid;
use crate::guard::{answer, guarded, Answer, Listed};
use penstock::options::{row, Form, OptionRow, OptionValue, Options as Core, Order, Shown, TABLE};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBool, PyDict, PyString, PyTuple};
use pyo3::IntoPyObjectExt;
use std::path::PathBuf;
use std::time::Duration;

/// How a load travels. The defaults are right for nearly everybody.
///
/// An environment variable, `PENSTOCK_` and the name in capitals, sets another default for a whole process. An argument in
/// code wins over it. Sizes are bytes or strings such as "256MiB" (KiB, MiB, GiB are powers of 1024, KB, MB, GB powers of
/// 1000).
///
/// Everyday options:
///
/// {everyday}
///
/// Advanced options, for measurements, unusual storage and finding out what is wrong:
///
/// {advanced}
///
/// Raises ValueError for an unknown option or an impossible value, and lists the possible ones; TypeError for a value of
/// the wrong type.
#[pyclass(frozen, module = "penstock", eq, from_py_object)]
#[derive(Clone, PartialEq)]
pub(crate) struct Options(pub(crate) Core);

/// The methods, with a getter for each entry of the table.
macro_rules! methods {
    ($($group:ident { $($(#[$doc:meta])* $name:ident $entry:tt)* })*) => {
        #[pymethods]
        impl Options {
            #[new]
            #[pyo3(signature = (**values))]
            fn new(py: Python<'_>, values: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                guarded(py, || Self::of(values))
            }

            $($(#[getter]
            fn $name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                guarded(py, || python(py, self.0.$name.shown()))
            })*)*

            /// Bytes: `gap`, or where that is "auto" what it is before anything is known of the storage.
            #[getter]
            fn _least_gap<'py>(&self, py: Python<'py>) -> Answer<'py, u64> {
                answer(py, || Ok(self.0.least_gap()))
            }

            /// Names of all options, the everyday ones first.
            #[staticmethod]
            fn names(py: Python<'_>) -> Answer<'_, Vec<&'static str>> {
                answer(py, || Ok(TABLE.iter().map(|row| row.name).collect::<Vec<_>>()))
            }

            /// Names of the options by group: "everyday" and "advanced".
            #[staticmethod]
            fn groups(py: Python<'_>) -> Answer<'_, Bound<'_, PyDict>> {
                answer(py, || {
                    let groups = PyDict::new(py);
                    $(groups.set_item(stringify!($group), [$(stringify!($name)),*])?;)*
                    Ok(groups)
                })
            }

            /// The call that makes an equal object, for pickle and copy.
            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
                guarded(slf.py(), || {
                    let py = slf.py();
                    let values = PyDict::new(py);
                    for row in TABLE {
                        values.set_item(row.name, python(py, (row.get)(&slf.get().0))?)?;
                    }
                    let partial = py.import("functools")?.getattr("partial")?;
                    Ok((partial.call((slf.get_type(),), Some(&values))?, PyTuple::empty(py)))
                })
            }

            fn __repr__<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
                answer(py, || {
                    let values = TABLE.iter().map(|row| format!("{}={}", row.name, (row.get)(&self.0)));
                    Ok(format!("Options({})", values.collect::<Vec<_>>().join(", ")))
                })
            }
        }
    };
}
penstock::option_table!(methods);

impl Options {
    fn of(values: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut options = Core::default();
        for row in TABLE {
            take_variable(&mut options, row)?;
        }
        for (name, value) in values.into_iter().flatten() {
            let shown = name.repr()?.to_string();
            let name: String = name.extract().unwrap_or(shown);
            let Some(row) = row(&name) else {
                let of = |group| TABLE.iter().filter(|row| row.group == group).map(|row| row.name).collect::<Vec<_>>();
                return Err(invalid(format!(
                    "there is no option {name:?}; everyday options: {}; advanced options: {}",
                    of("everyday").join(", "),
                    of("advanced").join(", ")
                )));
            };
            if value.is_none() && row.form != Form::Undecided {
                continue;
            }
            let refuse = |why: &str| invalid(format!("{name}={}: {why}", repr(&value)));
            let wrong = |what: &str| PyTypeError::new_err(format!("{name} must be {what}, not {}", repr(&value)));
            let is_text = value.is_instance_of::<PyString>();
            let text = match text_of(row.form, &value) {
                Ok(_) if is_text && row.form == Form::Undecided => return Err(wrong("True, False or None")),
                Ok(_) if is_text && row.form == Form::Flag => return Err(wrong("True or False")),
                Ok(_) if is_text && row.form == Form::Seconds => return Err(wrong("a number of seconds")),
                Ok(text) => text,
                Err(_) if row.form == Form::File && value.extract::<PathBuf>().is_ok() => {
                    return Err(refuse("must be Unicode"))
                }
                Err(what) => return Err(wrong(what)),
            };
            let is_number = matches!(row.form, Form::Size | Form::SizeOrAuto | Form::Count) && !is_text;
            if is_number && text.starts_with('-') {
                return Err(refuse("must not be negative"));
            }
            row.set(&mut options, &text).map_err(|why| refuse(&why))?;
        }
        options.check().map_err(invalid)?;
        Ok(Self(options))
    }
}

/// Sets an option to what its environment variable says, where that is set.
fn take_variable(options: &mut Core, row: &OptionRow) -> PyResult<()> {
    let variable = row.variable();
    let Some(text) = value_of(&variable)? else { return Ok(()) };
    row.set(options, &text).map_err(|why| invalid(format!("{variable}={text:?}: {why}")))
}

/// The value as a text, as an environment variable would have it. Otherwise what it must be.
pub(crate) fn text_of(form: Form, value: &Bound<'_, PyAny>) -> Result<String, &'static str> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(text);
    }
    let number = |what| match value.extract::<i128>() {
        // For Python, True is 1.
        Ok(number) if !value.is_instance_of::<PyBool>() => Ok(number.to_string()),
        _ => Err(what),
    };
    match form {
        Form::Flag => value.extract::<bool>().map(|yes| yes.to_string()).map_err(|_| "True or False"),
        Form::Undecided if value.is_none() => Ok("none".into()),
        Form::Undecided => value.extract::<bool>().map(|yes| yes.to_string()).map_err(|_| "True, False or None"),
        Form::Size | Form::SizeOrAuto => number("a whole number or a size such as \"256MiB\""),
        Form::Count => number("a whole number"),
        Form::Seconds => match value.extract::<f64>() {
            Ok(seconds) if !value.is_instance_of::<PyBool>() => Ok(seconds.to_string()),
            _ => Err("a number of seconds"),
        },
        Form::Choice(_) | Form::Text | Form::Secret => Err("a string"),
        Form::Names => {
            value.extract::<Listed<String>>().map(|names| names.0.join(",")).map_err(|_| "a list of strings")
        }
        Form::Callable => Err("a callable without arguments that gives a mapping"),
        Form::File => {
            let path: PathBuf = value.extract().map_err(|_| "a path")?;
            path.into_os_string().into_string().map_err(|_| "a path in Unicode")
        }
    }
}

/// The value of an option as a Python object.
fn python<'py>(py: Python<'py>, value: Shown<'_>) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Shown::Flag(yes) => yes.into_bound_py_any(py),
        Shown::Whole(number) => number.into_bound_py_any(py),
        Shown::Seconds(seconds) => seconds.into_bound_py_any(py),
        Shown::Text(text) => text.into_bound_py_any(py),
    }
}

/// The class's docstring: its own text, with the descriptions of all options in it.
pub(crate) fn describe(class: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut text: String = class.getattr("__doc__")?.extract()?;
    for group in ["everyday", "advanced"] {
        let lines = TABLE.iter().filter(|row| row.group == group).map(described);
        text = text.replace(&format!("{{{group}}}"), &lines.collect::<Vec<_>>().join("\n"));
    }
    class.setattr("__doc__", text)
}

/// An option as the docstring lists it.
fn described(row: &OptionRow) -> String {
    let lines: Vec<_> = row.doc.iter().take_while(|line| !line.is_empty()).map(|line| line.trim()).collect();
    let texts = match row.form {
        Form::Choice(texts) => {
            format!("{}: ", texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(" | "))
        }
        _ => String::new(),
    };
    format!("- {}: {texts}{}", row.name, lines.join("\n  "))
}

/// The entries of all options, in their order: for the command line, `tools/option_docs.py` and tests.
#[pyfunction]
pub(crate) fn option_table(py: Python<'_>) -> Answer<'_, Vec<Bound<'_, PyDict>>> {
    answer(py, || {
        let entry = |row: &OptionRow| {
            let said = [("name", row.name), ("group", row.group), ("word", row.word), ("help", row.help)];
            let entry = entry_of(py, row.form, row.doc, &said)?;
            entry.set_item("means", row.means)?;
            entry.set_item("default", python(py, (row.get)(&Core::default()))?)?;
            Ok(entry)
        };
        TABLE.iter().map(entry).collect::<PyResult<Vec<_>>>()
    })
}

/// The entry of an option or a setting, as a dictionary.
pub(crate) fn entry_of<'py>(
    py: Python<'py>,
    form: Form,
    doc: &[&str],
    said: &[(&str, &str)],
) -> PyResult<Bound<'py, PyDict>> {
    let entry = said.into_py_dict(py)?;
    entry.set_item("doc", doc.join("\n"))?;
    entry.set_item("texts", if let Form::Choice(texts) = form { texts } else { &[] })?;
    entry.set_item("form", format!("{form:?}").split("(").next())?;
    Ok(entry)
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
    let mut options = Core::default();
    if let Some(value) = value {
        let wrong = |why| invalid(format!("stall_timeout={value}: {why}"));
        options.stall_timeout = Duration::parse(&value.to_string()).map_err(wrong)?;
    } else if let Some(row) = row("stall_timeout") {
        take_variable(&mut options, row)?;
    }
    Ok(options.stall_timeout)
}

/// The stall timeout, in seconds, of work that takes no `Options`.
#[pyfunction]
#[pyo3(signature = (value = None))]
pub(crate) fn stall_timeout(py: Python<'_>, value: Option<f64>) -> Answer<'_, f64> {
    answer(py, || stall_timeout_of(value).map(|timeout| timeout.as_secs_f64()))
}

/// The order of this name. `must`: what the error says of another one.
pub(crate) fn order_of(name: &str, must: &str) -> PyResult<Order> {
    match name {
        "file" => Ok(Order::File),
        "layer" => Ok(Order::Layer),
        "asked" => Ok(Order::Asked),
        _ => Err(PyValueError::new_err(format!("order={name:?}: {must}"))),
    }
}

pub(crate) fn repr(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "?".into(), |r| r.to_string())
}
