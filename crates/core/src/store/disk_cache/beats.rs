//! Beats: a counter for each process, which grows while the process receives bytes of blocks that it has claimed. Others see by it
//! that the holder of a claim is slow, and not stopped, long before a block of it is there.
//!
//! The file has a place for each number that a process can have in claims. Two processes with one number are as one here.

use super::directory::Directory;
use super::entry::process_of;
use super::map::random;
use crate::error::Result;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

/// The file.
pub(super) const BEATS: &str = "beats";
/// Bytes of a counter.
const COUNTER: u64 = 4;
/// Numbers of processes.
const PROCESSES: u64 = 1 << 16;

/// The file, open.
#[derive(Debug)]
pub(super) struct Beats {
    file: File,
    writable: bool,
    /// This process' own counter. It begins anywhere: the process that had the number before may have left any other.
    own: AtomicU32,
}

impl Beats {
    /// Opens the file; `None`: it is not there.
    pub(super) fn open(root: &Directory, write: bool) -> Result<Option<Beats>> {
        let opened = root.open(BEATS, write)?.filter(|(_, found, _)| found.len() == PROCESSES * COUNTER);
        Ok(opened.map(|(file, _, writable)| Beats { file, writable, own: AtomicU32::new(random()) }))
    }

    /// Makes the file. The caller holds a lock, so that nobody else does.
    pub(super) fn make(root: &Directory) -> Result<()> {
        // All of it is on the disk, so that a full disk takes counters.
        root.replace(BEATS, &vec![0; (PROCESSES * COUNTER) as usize])
    }

    /// The process of this entry, which is this one, has received something.
    pub(super) fn beat(&self, number: u32) {
        if self.writable {
            let count = self.own.fetch_add(1, Ordering::Relaxed).to_le_bytes();
            // Without it, others see only the blocks that it brings.
            let _not_seen = self.file.write_at(&count, place(number));
        }
    }

    /// The counter of the process of this entry; `None`: it cannot be read.
    pub(super) fn count(&self, number: u32) -> Option<u32> {
        let mut count = [0; COUNTER as usize];
        self.file.read_exact_at(&mut count, place(number)).ok()?;
        Some(u32::from_le_bytes(count))
    }
}

fn place(number: u32) -> u64 {
    u64::from(process_of(number)) * COUNTER
}
