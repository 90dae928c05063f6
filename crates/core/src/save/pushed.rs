//! Files of this machine that are uploaded as they are.

use super::plan::{FilePlan, SavePlan};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::store::{Location, SteadyFile, Stores};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// Name, text and file of an index. `None`: it was made, and is no file.
pub type PushedIndex = (String, String, Option<PathBuf>);
/// Name, content and file of an object that is sent at once.
pub type PushedContent = (OsString, Vec<u8>, PathBuf);

/// The request of a push.
pub struct PushRequest {
    /// Names and paths of the files with tensors.
    pub files: Vec<(OsString, PathBuf)>,
    /// The index; several files have one.
    pub index: Option<PushedIndex>,
    /// Further objects. They come before the checkpoint is visible.
    pub small: Vec<PushedContent>,
    /// The address that their names are added to.
    pub folder: Location,
    /// The stores of addresses.
    pub stores: Stores,
    /// Name of the checkpoint: that of the file, or that of the index without `.index.json`.
    pub checkpoint: String,
    /// Where the journal is written.
    pub journal: PathBuf,
    /// The text that names this machine in the journal.
    pub machine: String,
    /// Sizes of parts and staging, senders (`threads`), the stall timeout.
    pub options: Options,
}

impl SavePlan {
    /// The plan of files that exist. Opens them, those with known content too: all must stay as they are until the end.
    ///
    /// # Errors
    /// The errors of opening; `Changed` for one with another content; `Invalid` for several files without an index.
    pub(super) fn of_files(
        files: Vec<(OsString, PathBuf)>,
        index: Option<PushedIndex>,
        small: Vec<PushedContent>,
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
        let index_file = index.as_ref().and_then(|(_, text, path)| Some((text.as_bytes(), path.as_ref()?)));
        let known = small.iter().map(|(_, content, path)| (&content[..], path)).chain(index_file);
        for (content, path) in known {
            let source = SteadyFile::open(path)?;
            source.check_content(content)?;
            sources.push(Arc::new(source));
        }
        let (index_name, index) = index.map(|(name, text, _)| (name, text)).unzip();
        let small = small.into_iter().map(|(name, content, _)| (name, content)).collect();
        Ok(SavePlan { files: plans, index, index_name, nbytes, small, sources, is_share: false })
    }
}
