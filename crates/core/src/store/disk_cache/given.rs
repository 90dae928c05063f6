//! Gifts of the cache to other nodes: objects by the names of their entries, and boards that say which blocks are there.

use super::directory::Directory;
use super::entry::{CacheEntry, OpenedEntry};
use super::folder::{CacheFolder, MARKER, OBJECTS};
use super::key::is_object_id;
use super::map::boot_tag;
use crate::error::Result;
use std::collections::hash_map::DefaultHasher;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// True if a folder is a disk cache: it has the marker.
pub fn is_disk_cache(folder: &Path) -> bool {
    folder.join(MARKER).is_file()
}

/// An object in the cache, to be read. Nobody removes it meanwhile.
#[derive(Debug)]
pub struct GivenObject {
    entry: Box<CacheEntry>,
    file: Arc<File>,
    node: u64,
}

/// The number of the node that a cache is on: of the machine, and of the folder. 0: there is no cache.
pub(crate) fn node_of(folder: &Path) -> u64 {
    let Ok(found) = folder.join(MARKER).metadata() else { return 0 };
    let mut hasher = DefaultHasher::new();
    (boot_tag(), found.dev(), found.ino(), found.mtime(), found.mtime_nsec()).hash(&mut hasher);
    hasher.finish().max(1)
}

impl CacheFolder {
    /// The object whose entry has this name, if it is there.
    ///
    /// # Errors
    /// `Io`, `Permission`: its files cannot be read.
    pub fn given(&self, id: &str) -> Result<Option<GivenObject>> {
        let folder: Option<Directory> = if is_object_id(id) { self.below(OBJECTS, id, false)? } else { None };
        let Some(folder) = folder else { return Ok(None) };
        match self.opened(&folder, id, self.is_writable())? {
            OpenedEntry::Entry(entry) => {
                entry.touch();
                Ok(Some(GivenObject { file: entry.file()?, entry, node: node_of(self.path()) }))
            }
            _ => Ok(None),
        }
    }
}

impl GivenObject {
    /// Bytes of the object.
    pub fn size(&self) -> u64 {
        self.entry.size()
    }

    /// The file with its bytes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The end of the bytes that are there from the start of `range` on, at most its end.
    pub fn there(&self, range: &Range<u64>) -> u64 {
        let there = self.entry.there().unwrap_or_default();
        let next = there.partition_point(|known| known.end <= range.start);
        match there.get(next) {
            Some(known) if known.start <= range.start => known.end.min(range.end),
            _ => range.start,
        }
    }

    /// A bit for each block, from the lowest one of the first byte on: the block is there. Then the CRC32C of each block, and
    /// the number of this node, little-endian.
    pub fn board(&self) -> Vec<u8> {
        let sums = self.entry.checksums().unwrap_or_default();
        let mut bits = vec![0; self.entry.blocks().div_ceil(8) as usize];
        for (block, _) in sums.iter().enumerate().filter(|(_, sum)| sum.is_some()) {
            bits[block / 8] |= 1 << (block % 8);
        }
        let sums =
            (0..self.entry.blocks() as usize).map(|block| sums.get(block).copied().flatten().unwrap_or_default());
        bits.extend(sums.flat_map(u32::to_le_bytes));
        bits.extend(self.node.to_le_bytes());
        bits
    }
}
