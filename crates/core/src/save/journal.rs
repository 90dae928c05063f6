//! The journal of a push: a file of this machine that says what was begun. A process that is killed leaves it, and a later push
//! clears what it names.
//!
//! It is made before the first request, and removed when nothing is left to be cleared. Its owner holds a lock on it, which
//! the kernel releases when the owner is gone: a journal that another process can lock is that of a dead push. Each line is
//! a JSON object. The first is the head: `folder`, `identity` (the service and the bucket), `index`, `tag` (in the names of
//! shards that this push has renamed) and `machine`. The others have `object`, and `upload` when the server has named the
//! upload, or `version` when the object is there. No line has credentials, or an address that allows to write.

use super::address::SaveAddress;
use super::names::new_tag;
use crate::error::{Error, Result};
use crate::store::Location;
use crate::sync::{lock, Mutex};
use serde_json::{json, Value};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct PushJournal {
    path: PathBuf,
    tag: String,
    state: Mutex<PushJournalState>,
}

#[derive(Debug)]
struct PushJournalState {
    /// Its lock goes when it is closed.
    file: Option<File>,
    /// True if an object was begun.
    says_something: bool,
    /// True if the server may have begun an upload whose name did not come.
    has_lost: bool,
}

impl PushJournal {
    /// Makes the file, in a folder that only this user may enter, and locks it. `machine` names this machine.
    ///
    /// # Errors
    /// `Write` and its kin.
    pub(super) fn begin(path: &Path, address: &SaveAddress, index: Option<&str>, machine: &str) -> Result<PushJournal> {
        let failed = |e: io::Error| Error::write("write the journal of the push (PENSTOCK_STATE_FOLDER)", &e).at(path);
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        }
        // It gets its name when it is locked: others take one without a lock for that of a dead push.
        let unlocked = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.append(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&unlocked).map_err(failed)?;
        // SAFETY: a plain system call on a descriptor of our own.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        let (folder, identity, tag) = (address.folder.to_string(), address.store.identity(&address.folder), new_tag());
        let head = json!({
            "format": 1, "folder": folder, "identity": identity, "index": index, "tag": tag, "machine": machine,
        });
        // A journal that has its name has a head.
        file.write_all(format!("{head}\n").as_bytes()).map_err(failed)?;
        std::fs::rename(&unlocked, path).map_err(failed)?;
        let state = Mutex::new(PushJournalState { file: Some(file), says_something: false, has_lost: false });
        Ok(PushJournal { path: path.to_path_buf(), tag, state })
    }

    /// The tag for names of shards of this push, and of no other.
    pub(super) fn tag(&self) -> &str {
        &self.tag
    }

    /// Notes that the server may have begun an upload, and its name did not come.
    pub(super) fn lost(&self) {
        lock(&self.state).has_lost = true;
    }

    /// Notes an object that is begun.
    ///
    /// # Errors
    /// `Write` and its kin.
    pub(super) fn begun(&self, at: &Location) -> Result<()> {
        lock(&self.state).says_something = true;
        self.write(&json!({ "object": at.to_string() }))
    }

    /// Notes the server's name of an upload.
    ///
    /// # Errors
    /// `Write` and its kin.
    pub(super) fn uploading(&self, at: &Location, upload: &str) -> Result<()> {
        self.write(&json!({ "object": at.to_string(), "upload": upload }))
    }

    /// Notes an object that is there.
    ///
    /// # Errors
    /// `Write` and its kin.
    pub(super) fn there(&self, at: &Location, version: Option<&str>) -> Result<()> {
        self.write(&json!({ "object": at.to_string(), "version": version }))
    }

    fn write(&self, line: &Value) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(file) = &mut state.file else { return Ok(()) };
        let written = file.write_all(format!("{line}\n").as_bytes());
        written.map_err(|e| Error::write("write the journal of the push", &e).at(&self.path))
    }

    /// The push has ended. The file stays if something is left to be cleared.
    pub(super) fn end(&self, is_cleared: bool) {
        let mut state = lock(&self.state);
        if state.file.is_some() && ((is_cleared && !state.has_lost) || !state.says_something) {
            // If it cannot be removed, a later push finds nothing to clear, and tries again.
            let _it_stays = std::fs::remove_file(&self.path);
        }
        state.file = None;
    }
}

impl Drop for PushJournal {
    fn drop(&mut self) {
        self.end(false);
    }
}
