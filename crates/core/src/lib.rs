//! Loads safetensors checkpoints into CPU and GPU memory at the speed of the hardware.

pub mod device;
mod drive;
mod engine;
pub mod error;
pub mod format;
pub mod layout;
pub mod load;
pub mod machine;
pub mod memory;
pub mod options;
pub mod placement;
mod policy;
pub mod schedule;
pub mod source;
pub mod staging;
pub mod stats;
pub mod wake;

pub use error::{Error, ErrorKind, Result};
