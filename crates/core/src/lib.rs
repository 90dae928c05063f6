//! Loads safetensors checkpoints into CPU and GPU memory at the speed of the hardware.

pub mod error;
pub mod format;
pub mod placement;

pub use error::{Error, ErrorKind, Result};
