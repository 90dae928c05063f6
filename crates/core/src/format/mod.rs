//! Headers, index files and dtypes, parsed into one [`Checkpoint`]. It is validated as a whole before a byte is moved.
//!
//! The layout of a shard file is: eight bytes of little-endian header length N, N bytes of JSON, then the data section,
//! in which tensors follow each other without gaps or overlaps (safetensors format specification).

mod discover;
mod dtype;
mod header;
mod identity;
mod index;
mod open;
mod shard;
mod watch;

pub use dtype::DType;
pub(crate) use header::quoted;
pub use header::{MAX_HEADER, MAX_RANK};
pub use identity::Identity;

use crate::error::Result;
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How names are hashed: with seeds that differ in each process, so that the writer of a header cannot know which names
/// collide. With SipHash, three hashes per name took a seventh of the time to open a checkpoint.
type Seeded = hashbrown::DefaultHashBuilder;

/// A validated checkpoint: one or more shard files and the tensors in them.
///
/// It holds no descriptor and no data: 48 bytes, the name and the shape for each tensor. Tensors are numbered in file
/// order (files in natural order of their names, tensors by offset within a file). Wants refer to that number.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<ShardFile>,
    tensors: Vec<Entry>,
    names: String,
    shapes: Vec<u64>,
    /// Open-addressed index from name to tensor number.
    by_name: hashbrown::HashTable<u32>,
    hasher: Seeded,
    metadata: BTreeMap<String, String>,
    warnings: Vec<String>,
}

/// One shard file of a checkpoint, as it was when its header was read.
#[derive(Debug, Clone)]
pub struct ShardFile {
    /// Path of the file, as the user or the index spelled it (links are not resolved).
    pub path: PathBuf,
    /// The same as an absolute path: a program may change its directory between opening and loading.
    pub location: PathBuf,
    /// The file's identity when it was opened. Every load compares it again.
    pub identity: Identity,
    /// Offset of the data section: 8 + header length, in bytes.
    pub data_start: u64,
    /// Bytes that opening the checkpoint read from this file: its header, or the whole first read if that is longer.
    pub header_read: u64,
    /// `__metadata__`, if present and not null.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Numbers of this file's tensors: a contiguous range, in offset order.
    pub tensors: Range<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    name: (u32, u32),
    begin: u64,
    end: u64,
    shape: (u32, u8),
    dtype: DType,
    file: u32,
}

/// What the checkpoint says about one tensor.
#[derive(Debug, Clone, Copy)]
pub struct TensorInfo<'a> {
    /// Its number in the checkpoint.
    pub index: u32,
    /// Its name, any Unicode.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Extent of each dimension in elements; empty for a scalar.
    pub shape: &'a [u64],
    /// Number of its shard file in [`Checkpoint::files`].
    pub file: u32,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// One past the last byte, counted from the start of the file.
    pub end: u64,
}

impl TensorInfo<'_> {
    /// Size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.end - self.begin
    }
}

impl Checkpoint {
    /// Opens what `sources` name: one shard file, several, a directory, or an index file (`*.json`).
    ///
    /// In a directory, `model.safetensors.index.json` is looked for, then any other `*.safetensors.index.json`, then
    /// every `*.safetensors`. With an index, files that it does not name are ignored. Tensors in its files that it does
    /// not map are ignored too, with a warning.
    ///
    /// Every header is read and checked here, several at a time; no tensor is read. No descriptor stays open.
    ///
    /// # Errors
    /// `NotFound` (also for shard files that an index names: all of them in one error), `Permission`, `NotACheckpoint`,
    /// `Header`, `Truncated`, `Index`, and `Invalid` for a list that names a file twice.
    pub fn open<P: AsRef<Path>>(sources: &[P]) -> Result<Checkpoint> {
        open::open(sources)
    }

    /// The same for a caller that must not hang with a network mount whose server is gone, and must answer signals: a
    /// thread that can be left behind opens the files. The caller asks `go_on` every 50 ms. It stops waiting if `go_on`
    /// says no (kind `Cancelled`), or if the file system has not answered for `stall` (kind `Timeout`, with the path
    /// for which it waited). A long parse is not a stall.
    ///
    /// If the headers are small and in the page cache, the caller's own thread opens files on disks that this process
    /// has loaded from: that saves two turns at the scheduler. `go_on` is not asked then.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), `Cancelled` and `Timeout`.
    pub fn open_cancellable(sources: Vec<PathBuf>, stall: Duration, go_on: impl FnMut() -> bool) -> Result<Checkpoint> {
        open::open_cancellable(sources, stall, go_on)
    }

    /// A checkpoint of one file from its first bytes in memory (at least the header) and its size: for tests and fuzzing.
    #[doc(hidden)]
    pub fn from_bytes(bytes: &[u8], size: u64) -> Result<Checkpoint> {
        let hasher = Seeded::default();
        let path = Path::new("memory.safetensors");
        let shard = shard::parse(bytes, size, &hasher).map_err(|e| e.at(path))?;
        open::merge(vec![(path.to_path_buf(), shard)], hasher, Vec::new())
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Tensor number `index`; panics if there is none.
    pub fn tensor(&self, index: u32) -> TensorInfo<'_> {
        let e = &self.tensors[index as usize];
        TensorInfo {
            index,
            name: self.name(index),
            dtype: e.dtype,
            shape: &self.shapes[e.shape.0 as usize..e.shape.0 as usize + usize::from(e.shape.1)],
            file: e.file,
            begin: e.begin,
            end: e.end,
        }
    }

    /// The tensor called `name`.
    pub fn find(&self, name: &str) -> Option<TensorInfo<'_>> {
        let hash = self.hasher.hash_one(name);
        self.by_name.find(hash, |&i| self.name(i) == name).map(|&i| self.tensor(i))
    }

    fn name(&self, index: u32) -> &str {
        let (start, len) = self.tensors[index as usize].name;
        &self.names[start as usize..(start + len) as usize]
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        (0..self.tensors.len() as u32).map(|i| self.tensor(i))
    }

    /// The shard files, in natural order of their names.
    pub fn files(&self) -> &[ShardFile] {
        &self.files
    }

    /// Bytes of all tensors together.
    pub fn nbytes(&self) -> u64 {
        self.tensors.iter().map(|e| e.end - e.begin).sum()
    }

    /// `__metadata__` of all files together. If files disagree on a key, the first file's value counts. Each file's own
    /// is in [`ShardFile::metadata`].
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes that opening the checkpoint read from its shard files.
    pub fn header_read(&self) -> u64 {
        self.files.iter().map(|f| f.header_read).sum()
    }

    /// Oddities that were tolerated, for the log, such as a wrong `total_size`.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// The shard files that an index with this text names: for fuzzing.
#[doc(hidden)]
pub fn index_files(text: &[u8]) -> Result<Vec<PathBuf>> {
    index::Index::parse(text, &Seeded::default(), &watch::Watch::default()).map(|index| index.files)
}
