//! Headers, index files and dtypes, parsed into one [`Checkpoint`]. It is validated as a whole before a byte is moved.
//!
//! The layout of a shard file is: eight bytes of little-endian header length N, N bytes of JSON, then the data section,
//! in which tensors follow each other without gaps or overlaps (safetensors format specification).

mod authority;
mod checkpoint;
mod choose;
mod discover;
mod dtype;
mod header;
mod index;
mod join;
mod natural;
mod open;
mod ranges;
mod shard;
mod small_files;

pub(crate) use checkpoint::layer;
pub use checkpoint::{Checkpoint, ShardFile, TensorInfo};
pub use choose::FolderRequest;
pub(crate) use choose::{is_tag, UNFINISHED};
pub use discover::to_open;
pub use dtype::DType;
pub(crate) use header::quoted;
pub use header::{MAX_HEADER, MAX_RANK};
#[cfg(any(test, feature = "testing"))]
pub use index::index_files;
pub(crate) use open::open_detached;
pub(crate) use small_files::heads;
pub use small_files::{contents, names_in};
