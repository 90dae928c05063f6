//! The files of the disk cache: objects of servers, in blocks, in a folder of a local disk that all processes of a node share
//! without a server.
//!
//! ```text
//! FOLDER/penstock-disk-cache      the marker: the version of this format; its bytes carry the locks of making, removing and opening
//! FOLDER/objects/xx/ID.data       a sparse file of the object's size, with the blocks that came at their offsets
//! FOLDER/objects/xx/ID.map        the object's header, and the state and CRC32C of each block; its bytes carry the claims
//! FOLDER/names/xx/KEY             the version that a location had last
//! FOLDER/lists/KEY                the last listing of a location
//! FOLDER/beats                    a counter for each process: it grows while that process receives blocks
//! ```
//!
//! A block is there or not. A process writes its bytes first and its state afterwards. So a process that is killed leaves no
//! block that is there in part. [`CacheEntry::sync`] marks blocks as synced after an `fdatasync` of their bytes. Other blocks
//! count only until the next boot. So a loss of power leaves none either.

mod access;
mod asking;
mod beats;
mod cached_file;
mod crew;
mod directory;
mod entry;
mod flow;
mod folder;
mod given;
mod hub;
mod inbox;
mod key;
mod lock;
mod look;
mod map;
mod offline;
mod on_demand;
mod open_locks;
mod progress;
mod publish;
mod renew;
mod room;
mod source;
mod store;

pub(crate) use crew::stop_cache_work;
pub(crate) use entry::{BlockState, CacheEntry};
pub use folder::{CacheFolder, DiskCacheSettings};
pub(crate) use given::node_of;
pub use given::{is_disk_cache, GivenObject};
pub use hub::{HubFile, HubLayout};
pub(crate) use key::CacheKey;
pub(crate) use map::BLOCK;
pub use open_locks::leave_to_parent;
pub use progress::{CacheProgress, CacheStatus};
pub use room::{CacheRoom, EntryInfo, Prune, Pruned};
pub(crate) use store::CachedStore;

#[cfg(not(loom))]
#[cfg(test)]
mod tests;

#[cfg(not(loom))]
#[cfg(test)]
mod simulator;
