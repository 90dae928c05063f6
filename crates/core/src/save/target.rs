//! The place where the files of a save go: a folder, or a bucket.

use super::chunks::{Chunk, ChunkPart};
use super::shared::SaveShared;
use crate::error::Result;
use std::time::Duration;

/// How a chunk was written.
#[derive(Debug, Default)]
pub(super) struct Written {
    /// Bytes that went past the page cache.
    pub(super) direct: u64,
    /// System calls, or requests.
    pub(super) calls: u64,
}

/// See the module's documentation.
pub(super) trait SaveTarget: Send + Sync {
    /// True if the chunks of this file are written one after the other.
    fn is_in_order(&self, file: usize) -> bool;

    /// Writes a chunk out of a slab, which has room for whole pages.
    ///
    /// # Errors
    /// The errors of writing; they name the file and the range.
    fn write(&self, shared: &SaveShared, chunk: &Chunk, from: *mut u8) -> Result<Written>;

    /// Writes a chunk from where its bytes are, in memory of this process.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    fn write_from_place(&self, shared: &SaveShared, chunk: &Chunk, pieces: &[ChunkPart]) -> Result<Written>;

    /// Everything is written, of this rank's part of a save of several: its files become whole, and readers that go by
    /// an index do not see them yet.
    ///
    /// # Errors
    /// As for [`conclude`](Self::conclude).
    fn seal(&self, shared: &SaveShared) -> Result<()>;

    /// Everything is written: gives the files their names, the index last.
    ///
    /// # Errors
    /// The errors of that; `Cancelled` if the save was given up before.
    fn conclude(&self, shared: &SaveShared) -> Result<()>;

    /// Lets go of the files that have not got their names; of all of them unless `is_complete`. Returns those that stay in spite
    /// of that, in words.
    fn clear(&self, shared: &SaveShared, is_complete: bool) -> Vec<String>;

    /// True if readers may see the new checkpoint.
    fn may_be_visible(&self) -> bool;

    /// True if a disk of this machine is busy with it.
    fn uses_disk(&self) -> bool;

    /// How long dropping a save waits for what is in progress.
    fn grace(&self) -> Duration {
        Duration::from_secs(2)
    }
}
