//! The Python extension module: thin, and it releases the GIL during every wait.
//!
//! `python/penstock/_core.pyi` is its contract. `penstock._errors.from_core(kind, message, path, range, errno)` makes
//! the exceptions for errors of the core. A panic is an `InternalError`: [`guard`].

#![warn(clippy::disallowed_methods)]

mod bucket;
mod built;
mod ceiling;
mod checkpoint;
mod credentials;
mod disk_cache;
mod dlpack;
mod errors;
mod fill;
mod first_touch;
mod guard;
mod hub;
mod leased;
mod load;
mod look;
mod machine;
mod options;
mod pull;
mod quiesce;
mod raised;
mod ranks;
mod reader;
mod save;
mod serve;
mod small_files;
mod storage;
mod waiting;
mod wants;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::bucket::Bucket;
    #[pymodule_export]
    use crate::built::built;
    #[pymodule_export]
    use crate::ceiling::ceiling;
    #[pymodule_export]
    use crate::checkpoint::Checkpoint;
    #[pymodule_export]
    use crate::disk_cache::{leave_cache_to_parent, CacheFolder, DiskCache};
    #[pymodule_export]
    use crate::fill::{stop_fills, CacheFill};
    #[pymodule_export]
    use crate::first_touch::FirstTouch;
    #[pymodule_export]
    use crate::hub::HubLayout;
    #[pymodule_export]
    use crate::leased::Leased;
    #[pymodule_export]
    use crate::load::{Load, View};
    #[pymodule_export]
    use crate::look::look;
    #[pymodule_export]
    use crate::machine::{evict, gpus, probe, release_staging, residency, unwritable, warm};
    #[pymodule_export]
    use crate::options::{option_table, stall_timeout, Options};
    #[pymodule_export]
    use crate::pull::Pull;
    #[pymodule_export]
    use crate::quiesce::{quiesce, under_way};
    #[pymodule_export]
    use crate::ranks::{bound, is_resident, missing_where_mappable, pack_wants, traffic};
    #[pymodule_export]
    use crate::ranks::{Lookout, Mesh, Pass, Seat, Shares, Standing};
    #[pymodule_export]
    use crate::reader::{stop_reading_ahead, Reader};
    #[pymodule_export]
    use crate::save::{head, shards, Save};
    #[pymodule_export]
    use crate::serve::Server;
    #[pymodule_export]
    use crate::small_files::{contents, names_in};
    #[pymodule_export]
    use crate::storage::{asks_for_versions, authorities, certificates, proxy, schemes};
    #[pymodule_export]
    use crate::storage::{storage_settings, storage_table, unchecked_hosts};
    #[pymodule_export]
    use crate::waiting::exiting;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::guard::guarded(m.py(), || {
            crate::options::describe(&m.getattr("Options")?)?;
            m.add("__version__", env!("CARGO_PKG_VERSION"))
        })
    }
}
