//! The Python extension module: thin, and it releases the GIL around every wait.
use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    const __VERSION__: &str = env!("CARGO_PKG_VERSION");
}
