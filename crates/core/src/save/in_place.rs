//! A file that is written under its name, because the file system lets no other file take that name.
//!
//! Nothing may be lost by it: the name is free, or has an empty file. The first eight bytes, the length of the header, are
//! written last. Until then they are zero, and no reader takes the file for a checkpoint. Some file systems take bytes
//! in their order only. They show a file when it is closed.

use crate::error::{Error, Result};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Bytes that are written last.
const HELD_BACK: usize = 8;

/// A system call that the file system refused.
pub(super) struct RefusedCall {
    pub(super) call: &'static str,
    pub(super) cause: io::Error,
}

/// A file that is being written under its name.
#[derive(Debug)]
pub(super) struct InPlace {
    /// The save has made it: there was nothing under the name.
    made: bool,
    /// The file system takes its bytes in their order only.
    pub(super) sequential: bool,
    /// The beginning of the file.
    first: Vec<u8>,
}

impl InPlace {
    /// Puts zeros in the place of the first bytes of the file, which are written last.
    pub(super) fn hold_back(&mut self, head: &mut [u8]) {
        if !self.sequential {
            let held = head.len().min(HELD_BACK);
            self.first = head[..held].to_vec();
            head[..held].fill(0);
        }
    }

    /// Writes the first bytes.
    pub(super) fn complete(&mut self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.first, 0)
    }

    /// Takes the file away, or makes it empty as it was.
    pub(super) fn take_back(&self, file: File, path: &Path, size: u64) {
        if self.sequential {
            // Closing the file would show what there is of it. A byte out of order ends such an upload, and nothing is
            // shown.
            let _refused = file.write_all_at(&[0], size.saturating_add(1));
        }
        let _refused = file.set_len(0);
        // Some file systems remove no open file.
        drop(file);
        if self.made {
            let _left_behind = fs::remove_file(path);
        }
    }
}

/// Opens the file at `path` for writing under its name.
///
/// # Errors
/// If something could be lost: the error says which call was refused, and what to do.
pub(super) fn open(path: &Path, refused: &RefusedCall) -> Result<(File, InPlace)> {
    let made = match fs::symlink_metadata(path) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound && refused.call == "rename" => true,
        Ok(found) if found.is_file() && found.len() == 0 && is_refusal(&refused.cause) => false,
        found => return Err(not_beside(path, refused, found.is_ok())),
    };
    let open = |made: bool| OpenOptions::new().write(true).create_new(made).mode(0o666).open(path);
    let doing = if made { "make the file (open)" } else { "write to the file itself (open)" };
    let file = open(made).map_err(|e| Error::write(doing, &e).at(path))?;
    let written = InPlace { made, sequential: false, first: Vec::new() };
    // One byte behind those that are written last.
    if file.write_at(&[0], HELD_BACK as u64).is_ok() {
        return Ok((file, written));
    }
    drop(file);
    if made {
        let _perhaps_not_there = fs::remove_file(path);
    }
    let again = open(made).or_else(|_| OpenOptions::new().write(true).truncate(true).open(path));
    let file = again.map_err(|e| Error::write(doing, &e).at(path))?;
    Ok((file, InPlace { sequential: true, ..written }))
}

/// An error if a file at `path` could only be written by losing what it holds.
pub(super) fn check_free(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() || found.len() > 0 => {
            Err(not_renamed(path, &io::Error::from_raw_os_error(libc::EOPNOTSUPP)))
        }
        _ => Ok(()),
    }
}

/// Whether it is the folder or the file system that refuses, and not a lack of room, or of the folder itself.
fn is_refusal(cause: &io::Error) -> bool {
    let errno = cause.raw_os_error().unwrap_or(0);
    ![libc::ENOENT, libc::ENOTDIR, libc::ENOSPC, libc::EDQUOT, libc::EMFILE, libc::ENFILE, libc::EIO].contains(&errno)
}

fn not_beside(path: &Path, refused: &RefusedCall, is_there: bool) -> Error {
    if refused.call == "rename" {
        return not_renamed(path, &refused.cause);
    }
    let error = Error::write(&format!("make a file beside it ({})", refused.call), &refused.cause).at(path);
    if !is_refusal(&refused.cause) {
        return error;
    }
    let way_out = match is_there {
        true => {
            "the file itself is not written over, because a save that ends early would lose it: make its folder writable, \
             save to another folder, or empty the file first (truncate -s 0)"
        }
        false => "make its folder writable, or save to another folder",
    };
    error.reworded(|why| format!("{why}; {way_out}"))
}

/// The error for a file whose name could not be given to the new one.
pub(super) fn not_renamed(path: &Path, cause: &io::Error) -> Error {
    let way_out = match cause.raw_os_error() {
        Some(libc::EBUSY) => {
            "a file is mounted at this name, and is not written over, because a save that ends early would lose it: mount \
             its folder and not the file, save under another name, or empty the file first (truncate -s 0)"
        }
        Some(libc::EACCES | libc::EPERM | libc::EROFS) if path.exists() => {
            "the old file is as it was: make it and its folder writable, remove it first, or save under another name"
        }
        Some(libc::EISDIR | libc::ENOTDIR | libc::ENOENT) => "its folder has changed meanwhile",
        _ if path.exists() => {
            "the old file is as it was. This file system cannot replace it: remove it first, or save under another name"
        }
        _ => "this file system cannot rename: save to another folder, and copy the file from there",
    };
    Error::write("give the file its name (rename)", cause).at(path).reworded(|why| format!("{why}; {way_out}"))
}

/// Whether a file is mounted at this name.
pub(super) fn is_mount_point(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: all zeros are a valid `statx`.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: a string that ends with a zero, and one structure that is written.
    let rc = unsafe {
        libc::statx(libc::AT_FDCWD, name.as_ptr(), libc::AT_SYMLINK_NOFOLLOW, libc::STATX_TYPE, &raw mut found)
    };
    // Linux 5.8 says so. Earlier, the save finds out at its end.
    rc == 0 && found.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0
}
