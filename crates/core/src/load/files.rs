//! The files of a load, as the engine thread asks for them.

use crate::error::{Error, Result};
use crate::extent::{Extent, InCommon};
use crate::format::Checkpoint;
use crate::store::{patiently, Storage};
use std::sync::Arc;
use std::time::Duration;

/// The files of a load.
pub(super) struct LoadFiles {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) storage: Arc<Storage>,
    /// A question about the files may hang.
    pub(super) may_hang: bool,
    pub(super) stall: Duration,
}

impl LoadFiles {
    /// An error of kind `Changed` if one of these files (`None`: of all files that were opened) has changed.
    pub(super) fn unchanged(&self, which: Option<Vec<u32>>, go_on: impl FnMut() -> bool) -> Result<()> {
        let pinned = match &which {
            Some(which) => which.iter().all(|&file| self.storage.is_pinned(file)),
            None => self.storage.all_pinned(),
        };
        if pinned {
            return Ok(());
        }
        let storage = self.storage.clone();
        let look = move || match which {
            Some(which) => which.iter().try_for_each(|&file| storage.verify(file)),
            None => storage.verify_all(),
        };
        match self.may_hang {
            true => patiently(&self.storage, look, self.stall, go_on),
            false => look(),
        }
    }

    /// The error, with the file and range of the extent that failed.
    pub(super) fn located(&self, error: Error, e: Option<&Extent>) -> Error {
        let Some(e) = e else { return error };
        match e.shared {
            Some(InCommon::Received { reader, .. }) => error.at(self.storage.rank(reader)),
            _ => error.at(&self.checkpoint.files()[e.file as usize].spelled).range(e.offset..e.offset + e.need),
        }
    }
}
