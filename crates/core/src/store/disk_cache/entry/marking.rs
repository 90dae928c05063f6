//! The right to change the states of blocks that are there: one entry has it at a time, in whatever process. A sync that marks a
//! block as synced could otherwise undo that another process has just made it missing.

use super::super::lock::{retried, try_lock, unlock, LockKind};
use super::CacheEntry;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{lock, MutexGuard};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// The byte of the map whose lock is this right. It is behind those of the blocks.
pub(super) const MARKING: u64 = 1 << 42;

/// The right, until it is dropped.
pub(in super::super) struct Marking<'e> {
    map: Arc<File>,
    /// Threads that share the entry share its open file, and so its lock.
    _alone: MutexGuard<'e, ()>,
}

impl CacheEntry {
    /// Waits for the right.
    ///
    /// # Errors
    /// `Timeout`: another process has it for a second. The map cannot be opened or locked.
    pub(in super::super) fn marking(&self) -> Result<Marking<'_>> {
        let _alone = lock(&self.marking);
        let map = self.map_to_write()?;
        let attempt = || try_lock(&map, LockKind::Exclusive, MARKING..MARKING + 1).map(|taken| taken.then_some(()));
        match retried(attempt).map_err(|e: io::Error| self.failed("lock the map", &e))? {
            Some(()) => Ok(Marking { map, _alone }),
            None => {
                let stopped = "another process has been marking blocks for 1 s";
                Err(Error::new(ErrorKind::Timeout, stopped).at(&self.map_path))
            }
        }
    }
}

impl Drop for Marking<'_> {
    fn drop(&mut self) {
        unlock(&self.map, MARKING..MARKING + 1);
    }
}
