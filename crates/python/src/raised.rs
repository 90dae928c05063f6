//! Exceptions that led to errors of the core.

use pyo3::prelude::*;
use std::fmt;

/// An exception of Python, as the cause of an error.
pub(crate) struct Raised {
    pub(crate) exception: Py<PyAny>,
    /// The words for it in the text of the error.
    pub(crate) text: String,
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Raised {}
