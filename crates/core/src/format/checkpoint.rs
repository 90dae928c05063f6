//! A checkpoint: shard files and the tensors in them.

use super::dtype::DType;
use crate::error::Result;
use crate::store::{
    identity, local_files, samples, CopyChecked, Files, Location, Look, Object, Storage, Store, Version,
};
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;

/// How names are hashed: with seeds that differ in each process, so that the writer of a header cannot know which names
/// collide. With SipHash, three hashes per name took a seventh of the time to open a checkpoint.
pub(super) type Seeded = hashbrown::DefaultHashBuilder;

/// A validated checkpoint: one or more shard files and the tensors in them.
///
/// It holds no descriptor and no data: 48 bytes, the name and the shape for each tensor. Tensors are numbered in file
/// order (files in natural order of their names, tensors by offset within a file). Wants refer to that number.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) files: Vec<ShardFile>,
    pub(super) tensors: Vec<Entry>,
    pub(super) names: String,
    pub(super) shapes: Vec<u64>,
    /// Open-addressed index from name to tensor number.
    pub(super) by_name: hashbrown::HashTable<u32>,
    pub(super) hasher: Seeded,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) warnings: Vec<String>,
}

/// One shard file of a checkpoint, as it was when its header was read.
#[derive(Debug, Clone)]
pub struct ShardFile {
    /// The file, as the user or the index spelled it (links are not resolved).
    pub spelled: Location,
    /// Where it is: an absolute path, because a program may change its directory between opening and loading, or an address.
    pub location: Location,
    /// The store that has it, as it was opened.
    pub(crate) store: Arc<dyn Store>,
    /// Its size in bytes.
    pub size: u64,
    /// Its version when it was opened. Every load compares it again.
    pub version: Version,
    /// Offset of the data section: 8 + header length, in bytes.
    pub data_start: u64,
    /// Bytes that opening the checkpoint read from this file: its header, or the whole first read if that is longer.
    pub header_read: u64,
    /// `__metadata__`, if present and not null.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Numbers of this file's tensors: a contiguous range, in offset order.
    pub tensors: Range<u32>,
}

impl ShardFile {
    fn object(&self) -> Object {
        Object { location: self.location.clone(), size: self.size, version: self.version.clone() }
    }

    /// The steps and times of a request to the store for it, `times` times at most. Blocks.
    ///
    /// # Errors
    /// The errors of [`Store::look`], and `Unsupported` for a file of this machine.
    pub fn look(&self, times: usize) -> Result<Look> {
        self.store.look(&self.location, times).map_err(|e| e.at(&self.spelled))
    }

    /// Compares blocks of a copy of it on a disk: see [`Store::check_copy`]. Blocks.
    ///
    /// # Errors
    /// The errors of [`Store::check_copy`].
    pub fn check_copy(&self, blocks: Range<u32>) -> Result<CopyChecked> {
        self.store.check_copy(&self.object(), blocks)
    }

    /// Its header once more: all bytes before its tensors, of the version that was opened. Blocks.
    ///
    /// # Errors
    /// The errors of [`Store::read`].
    pub fn header_bytes(&self) -> Result<Vec<u8>> {
        self.store.read(&self.object(), 0..self.data_start)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) name: (u32, u32),
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) shape: (u32, u8),
    pub(super) dtype: DType,
    pub(super) file: u32,
}

/// The checkpoint's entry of one tensor.
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
    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether the checkpoint has no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Tensor number `index`. Panics if `index` is out of range.
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

    pub(super) fn name(&self, index: u32) -> &str {
        let (start, len) = self.tensors[index as usize].name;
        &self.names[start as usize..(start + len) as usize]
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        (0..self.tensors.len() as u32).map(|i| self.tensor(i))
    }

    /// A number that tells checkpoints apart: names, dtypes, shapes and places of all tensors, and the sizes of the files. It is
    /// the same in every process and on every machine.
    pub fn fingerprint(&self) -> u64 {
        // FNV-1a, over words where that is possible.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |word: u64| hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
        self.files.iter().for_each(|file| [file.size, file.data_start].into_iter().for_each(&mut add));
        for e in &self.tensors {
            add(u64::from(e.file) << 32 | e.dtype.bits() << 8 | u64::from(e.shape.1));
            add(e.begin);
            add(e.end);
        }
        self.shapes.iter().copied().for_each(&mut add);
        self.tensors.iter().for_each(|e| add(u64::from(e.name.1)));
        for name in self.names.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..name.len()].copy_from_slice(name);
            add(u64::from_le_bytes(word));
        }
        self.tensors.iter().for_each(|e| e.dtype.name().bytes().for_each(|byte| add(u64::from(byte))));
        hash
    }

    /// A number that tells the versions of all files apart; and whether it does so on every machine: each has inodes of
    /// its own.
    pub fn identity(&self) -> (u64, bool) {
        identity(self.files.iter().map(|f| (f.size, &f.version)))
    }

    /// For each file a text that tells its versions apart: on every machine for objects of stores, on this one for files.
    pub fn versions(&self) -> Vec<String> {
        let of = |f: &ShardFile| identity(std::iter::once((f.size, &f.version))).0;
        self.files.iter().map(|file| format!("{:016x}", of(file))).collect()
    }

    /// For each file a number of what some of its pages hold, or of the validator that its store has: the same wherever the
    /// bytes are the same. Two training steps of one model differ in it. Blocks.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn samples(&self) -> Result<Vec<u64>> {
        samples(self.files.iter().map(|f| (&*f.store, f.object(), f.data_start)))
    }

    /// Numbers of the tensors that have bytes in `range` of a file.
    pub(crate) fn tensors_within(&self, file: u32, range: Range<u64>) -> Range<u32> {
        let Range { start, end } = self.files[file as usize].tensors.clone();
        let tensors = &self.tensors[start as usize..end as usize];
        let from = tensors.partition_point(|tensor| tensor.end <= range.start);
        let past = tensors.partition_point(|tensor| tensor.begin < range.end);
        start + from as u32..start + past.max(from) as u32
    }

    /// The shard files, in natural order of their names.
    pub fn files(&self) -> &[ShardFile] {
        &self.files
    }

    /// The shard files, to be read from; nothing is opened yet.
    pub(crate) fn storage(&self) -> Result<Storage> {
        Storage::new(self.files.iter().map(|f| (f.object(), &f.store)))
    }

    /// The files of this machine among them, for what works on files only. Their numbers are those of the checkpoint.
    ///
    /// # Errors
    /// `Unsupported` if a file is in a store of a scheme.
    pub fn local_files(&self) -> Result<Files> {
        local_files(self.files.iter().map(|f| Some(f.object())))
    }

    /// The path or address of file number `file`, as text for people.
    pub(crate) fn name_of(&self, file: u32) -> Option<String> {
        self.files.get(file as usize).map(|f| f.spelled.to_string())
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

/// The stack and number of the layer that a tensor belongs to, or the module that owns it where its name has no number.
pub(crate) fn layer(name: &str) -> (&str, Option<u64>) {
    let mut at = 0;
    for part in name.split('.') {
        if part.bytes().all(|b| b.is_ascii_digit()) {
            // It has only digits, so parsing fails only for an empty part or a number beyond 64 bits. No layer has such
            // a number.
            if let Ok(number) = part.parse() {
                return (&name[..at], Some(number));
            }
        }
        at += part.len() + 1;
    }
    // A name without a dot has no owner except itself.
    (name.rsplit_once('.').map_or(name, |(module, _)| module), None)
}
