//! Places of a checkpoint's bytes: the interface of a [`Store`], and the store of this machine's files:
//! what their file systems allow, what the page cache holds of them, and whether they are still what they were.

mod ahead;
mod cache;
#[cfg_attr(not(feature = "remote"), allow(dead_code, unused_imports))]
mod disk_cache;
mod facts;
mod file_objects;
mod files;
mod fill_after;
mod fill_steps;
mod kept;
mod known_disks;
mod lease;
mod local;
mod location;
mod look;
#[cfg(feature = "remote")]
pub mod mirrors;
mod mounts;
mod object;
mod origin;
mod patience;
mod per_process;
mod pread;
mod questions;
mod read_cost;
#[cfg(feature = "remote")]
mod remote;
mod residency;
mod sampled;
mod stat;
mod steady;
mod storage;
mod stores;
pub mod upload;
mod version;
mod watch;

pub use ahead::stop_reading_ahead;
pub(crate) use ahead::{Ahead, FileRange};
pub use cache::{evict, evict_while, residency_while, warm, warm_while};
pub(crate) use disk_cache::stop_cache_work;
pub use disk_cache::{
    is_disk_cache, leave_to_parent, CacheFolder, CacheProgress, CacheRoom, CacheStatus, DiskCacheSettings, EntryInfo,
    GivenObject, HubFile, HubLayout, Prune, Pruned,
};
pub(crate) use facts::file_system;
pub use facts::{Facts, FsKind};
pub(crate) use file_objects::local_files;
pub(crate) use files::descriptor_limit;
pub use files::{facts_at, Files};
pub(crate) use fill_after::DiskUse;
pub use fill_after::{stop_fills, CacheFill, FillState, FillStatus};
pub use kept::close_kept;
pub(crate) use kept::Kept;
pub(crate) use lease::{Breaks, Inherited, Leases};
pub use local::local;
pub use location::Location;
pub use look::{Asked, Look};
pub(crate) use mounts::mount_of;
pub use object::{CheckSize, CopyChecked, Head, Object, Objects, OpenObject, ReadOn, Store, Traffic};
pub(crate) use origin::Origin;
pub(crate) use patience::patiently;
pub(crate) use pread::{read_fully, Stopped};
pub use questions::{Asking, Questions};
pub use read_cost::Sample;
pub(crate) use read_cost::{LONG, LONG_BYTES, SHORT};
#[cfg(feature = "remote")]
pub use remote::{
    unchecked_hosts, Addressing, AzureSettings, Bearer, CacheSettings, CredentialSource, GcsSettings, GivenCredentials,
    GivesCredentials, NodeSettings, ProfileSource, Proxies, S3Settings, Secret, StorageSetting, StorageSettings, Web,
    WebSettings, STORAGE_SETTINGS,
};
pub(crate) use residency::cached_pages;
pub use residency::Residency;
pub(crate) use sampled::{identity, samples};
pub use stat::identity_of;
pub use steady::SteadyFile;
pub(crate) use storage::Storage;
pub use stores::{forget_stores, register, schemes, Stores};
pub use version::{Identity, Version};
pub(crate) use watch::Waiting;
pub use watch::{still_wanted, Watch};
