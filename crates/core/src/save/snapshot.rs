//! A copy of everything that a save writes, in memory of this process: the owner may change its tensors when it is made.
//!
//! It is an image of the files, one behind the other. The crew copies the chunks first, each to its place, and then writes
//! them from there. Bytes of a GPU go through a slab, as in every save.

use super::chunks::{Chunk, ChunkPart, Supply};
use super::plan::SavePlan;
use crate::error::{Error, ErrorKind, Result};
use crate::machine::memory_available;
use crate::memory::Anonymous;
use crate::options::PAGE;
use crate::sync::{lock, Mutex};
use std::sync::atomic::AtomicUsize;

/// See the module's documentation.
pub(super) struct Snapshot {
    memory: Mutex<Option<Anonymous>>,
    /// Its address.
    at: u64,
    /// Where each file begins.
    begins: Vec<u64>,
    /// The next chunk to be copied.
    pub(super) next: AtomicUsize,
}

impl Snapshot {
    /// Memory for the files of a plan. Nothing is copied yet.
    ///
    /// # Errors
    /// `OutOfMemory` if the system and the control groups of this process do not leave so much.
    pub(super) fn new(plan: &SavePlan) -> Result<Snapshot> {
        let mut total = 0u64;
        let mut begins = Vec::with_capacity(plan.files.len());
        for file in &plan.files {
            begins.push(total);
            total = total.saturating_add(file.size).next_multiple_of(PAGE);
        }
        check_memory(total, "a snapshot")?;
        let memory = Anonymous::new(total)?;
        let at = memory.at() as u64;
        Ok(Snapshot { memory: Mutex::new(Some(memory)), at, begins, next: AtomicUsize::new(0) })
    }

    /// Gives the memory back. Nothing may read or write it from now on.
    pub(super) fn release(&self) {
        let memory = lock(&self.memory).take();
        drop(memory);
    }

    /// The address of a byte of a file.
    pub(super) fn place(&self, file: usize, offset: u64) -> u64 {
        self.at + self.begins[file] + offset
    }

    /// A chunk as it is written: out of the snapshot.
    pub(super) fn piece(&self, chunk: &Chunk) -> ChunkPart {
        ChunkPart { from: Supply::Host(self.place(chunk.file, chunk.offset)), len: chunk.len }
    }

    /// Copies the pieces of a chunk to their place, which all are in memory of this process.
    ///
    /// # Errors
    /// `Internal` for a piece that is not.
    pub(super) fn take(&self, chunk: &Chunk, pieces: &[ChunkPart]) -> Result<()> {
        let mut to = self.place(chunk.file, chunk.offset);
        for piece in pieces {
            let Supply::Host(from) = piece.from else {
                return Err(Error::new(ErrorKind::Internal, "a piece of a snapshot is not in memory of this process"));
            };
            // A late tensor was made where it belongs.
            if from != to {
                // SAFETY: the save keeps the source alive until everything is copied. The place is memory of the snapshot, and
                // chunks do not overlap.
                unsafe { (to as *mut u8).copy_from_nonoverlapping(from as *const u8, piece.len as usize) };
            }
            to += piece.len;
        }
        Ok(())
    }
}

/// Fails if this process cannot have so many bytes.
pub(super) fn check_memory(nbytes: u64, what: &str) -> Result<()> {
    let available = memory_available();
    if nbytes <= available {
        return Ok(());
    }
    let text = format!("{what} takes {nbytes} bytes of memory, and {available} are available; nothing was written");
    Err(Error::new(ErrorKind::OutOfMemory, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::DType;
    use crate::options::Order;
    use crate::save::{Arrangement, Tensor};

    #[test]
    fn files_have_places_of_their_own() {
        let tensors: Vec<Tensor> =
            (0..3).map(|i| Tensor { name: format!("t{i}"), dtype: DType::U8, shape: vec![5000 + i] }).collect();
        let arranged = (Arrangement::Aligned, Order::File);
        let plan = SavePlan::new(&tensors, None, "m", arranged.0, arranged.1, Some(6000)).unwrap();
        let snapshot = Snapshot::new(&plan).unwrap();
        for (number, file) in plan.files.iter().enumerate().skip(1) {
            let before = snapshot.place(number - 1, plan.files[number - 1].size);
            assert!(snapshot.place(number, 0) >= before && file.size > 0);
        }
        let bytes = [7u8; 300];
        let chunk = Chunk { file: 1, offset: 100, len: 300, pieces: 0..1 };
        snapshot.take(&chunk, &[ChunkPart { from: Supply::Host(bytes.as_ptr() as u64), len: 300 }]).unwrap();
        let Supply::Host(at) = snapshot.piece(&chunk).from else { panic!("it is in memory") };
        // SAFETY: 300 bytes of the snapshot, which were just written.
        assert_eq!(unsafe { std::slice::from_raw_parts(at as *const u8, 300) }, bytes);
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let refused = check_memory(u64::MAX, "a snapshot").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory);
        assert!(refused.message().contains("nothing was written"), "{refused}");
    }
}
