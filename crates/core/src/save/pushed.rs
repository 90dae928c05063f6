//! Files of this machine that are uploaded as they are.

use super::plan::{FilePlan, SavePlan};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::store::{Location, SteadyFile, Stores};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// The request of a push.
pub struct PushRequest {
    /// Names and paths of the files with tensors.
    pub files: Vec<(OsString, PathBuf)>,
    /// Name and text of the index; several files have one.
    pub index: Option<(String, String)>,
    /// Names and contents of further objects. They come before the checkpoint is visible.
    pub small: Vec<(OsString, Vec<u8>)>,
    /// The address that their names are added to.
    pub folder: Location,
    /// The stores of addresses.
    pub stores: Stores,
    /// Name of the checkpoint: that of the file, or that of the index without `.index.json`.
    pub checkpoint: String,
    /// Where the journal is written.
    pub journal: PathBuf,
    /// Sizes of parts and staging, senders (`threads`), the stall timeout.
    pub options: Options,
}

impl SavePlan {
    /// The plan of files that exist. Opens them.
    ///
    /// # Errors
    /// The errors of opening; `Invalid` for several files without an index.
    pub(super) fn of_files(
        files: Vec<(OsString, PathBuf)>,
        index: Option<(String, String)>,
        small: Vec<(OsString, Vec<u8>)>,
    ) -> Result<SavePlan> {
        if files.is_empty() || (files.len() > 1 && index.is_none()) {
            return Err(Error::invalid("give one file, or several and their index"));
        }
        let (mut plans, mut sources) = (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
        for (number, (name, path)) in files.into_iter().enumerate() {
            let source = SteadyFile::open(&path)?;
            let size = source.size();
            plans.push(FilePlan { name, head: Vec::new(), places: vec![(number as u32, 0, size)], size });
            sources.push(Arc::new(source));
        }
        let nbytes = plans.iter().map(|file| file.size).sum();
        let (index_name, index) = index.unzip();
        Ok(SavePlan { files: plans, index, index_name, nbytes, small, sources, is_share: false })
    }
}
