//! How fast this machine moves bytes without a loader: the benchmark compares loaders with it.
//!
//! | measure | what is timed |
//! |---|---|
//! | [`Direct`](Measure::Direct) | O_DIRECT reads into a few reused buffers: one io_uring, or threads that pread |
//! | [`Place`](Measure::Place) | O_DIRECT preads into memory as large as the files, its pages in use: every byte kept |
//! | [`Populate`](Measure::Populate) | the page cache filled by way of mappings (`MADV_POPULATE_READ`) |
//! | [`Copy`](Measure::Copy) | warm files into one reused buffer per thread: the page-cache copy rate |
//! | [`Fresh`](Measure::Fresh) | warm files into fresh memory in huge pages: private copies at their fastest |
//! | [`HostToDevice`](Measure::HostToDevice) | registered host memory to a GPU, over and over |
//! | [`DeviceAlloc`](Measure::DeviceAlloc) | memory of a GPU, allocated in blocks |
//!
//! Some work is not timed: opening the files, making memory that is reused or whose pages are in use, registering it,
//! and making the context of a GPU. Making the memory of `Fresh` is timed. So are mapping and unmapping, if a measure
//! maps.
//!
//! Each figure belongs to one set of [`Settings`]. The ceiling is the best of several figures, and should be measured
//! in a separate process.

mod files;
mod gpu;
mod settings;

use crate::error::{Error, ErrorKind, Result};
use std::path::PathBuf;

pub use gpu::measure_on;
use settings::checked;
pub use settings::{Interface, Measure, Measured, Settings};

/// Moves the bytes of some files, or bytes to the GPU of the driver found, once.
///
/// # Errors
/// `Invalid` for settings that do not go together, for no files, or for a GPU that is not there; the errors of reading
/// and mapping; `Unsupported` if there is no GPU driver.
pub fn measure(settings: &Settings, paths: &[PathBuf]) -> Result<Measured> {
    let settings = checked(settings)?;
    if settings.measure.is_of_a_gpu() {
        return measure_on(&crate::device::api::Api::load()?, &settings);
    }
    if paths.is_empty() {
        return Err(Error::new(ErrorKind::Invalid, format!("{} needs files to read", settings.measure.name())));
    }
    files::measure(&settings, paths)
}
