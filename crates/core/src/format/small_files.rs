//! The small files beside the weights of a model, such as its configuration and its tokenizer: their names, and all bytes of
//! each. They come from the same stores as a checkpoint, in the same way.

use super::join::read_all;
use super::open::{open_detached, origins};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Head, Origin, Stores};
use std::ffi::{OsStr, OsString};
use std::time::Duration;

/// The names of what lies directly in the folder, or under the address, `place`. With `folders`, those of folders in a store
/// are among them, and end with a slash. `stall` and `go_on` as in
/// [`Checkpoint::open_cancellable`](super::Checkpoint::open_cancellable).
///
/// # Errors
/// `Invalid` for a file, and for an address on a server that lists nothing; `NotFound`, `Permission`, `Io`, `Cancelled`,
/// `Timeout`.
pub fn names_in(
    place: &OsStr,
    stores: &Stores,
    folders: bool,
    stall: Duration,
    go_on: impl FnMut() -> bool,
) -> Result<Vec<OsString>> {
    let origin = Origin::of(place, stores);
    let names = move |watch: &_| {
        let file = || Error::new(ErrorKind::Invalid, "this is a file, not a folder");
        let names = if folders { origin.entries(watch) } else { origin.names(watch) };
        names.and_then(|names| names.ok_or_else(file)).map_err(|e| e.at(origin.location()))
    };
    open_detached(names, stall, go_on)
}

/// Where each of these files is, with its size and its version; all bytes of those that a server gives only as a whole, if they
/// have `most` at most. `stall` and `go_on` as in
/// [`Checkpoint::open_cancellable`](super::Checkpoint::open_cancellable).
///
/// # Errors
/// `NotFound`, `Permission`, `Io`, `Cancelled`, `Timeout`.
pub(crate) fn heads<P: AsRef<OsStr>>(
    files: &[P],
    most: u64,
    stores: &Stores,
    stall: Duration,
    go_on: impl FnMut() -> bool,
) -> Result<Vec<(Origin, Head)>> {
    let files = origins(files, stores);
    let all = move |watch: &_| {
        let head = |file: &Origin| {
            let opened = match file.open(1, watch) {
                // The server sends all or nothing.
                Err(e) if e.status() == Some(200) => file.open(most, watch),
                opened => opened,
            };
            Ok(opened.map_err(|e| e.at(file.location()))?.close())
        };
        let heads = read_all(&files, watch, head)?;
        Ok(files.into_iter().zip(heads).collect())
    };
    open_detached(all, stall, go_on)
}

/// All bytes of each of these files, several at a time. A file has `most` bytes at most. `stall` and `go_on` as in
/// [`Checkpoint::open_cancellable`](super::Checkpoint::open_cancellable).
///
/// # Errors
/// `Unsupported` for a longer file, before more than the bytes of one request have been read; `NotFound`, `Permission`,
/// `Io`, `Truncated`, `Changed`, `Cancelled`, `Timeout`.
pub fn contents<P: AsRef<OsStr>>(
    files: &[P],
    most: u64,
    stores: &Stores,
    stall: Duration,
    go_on: impl FnMut() -> bool,
) -> Result<Vec<Vec<u8>>> {
    let files = origins(files, stores);
    let check = move |size| {
        if size <= most {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("it has {size} bytes, and {most} are read of such a file at most"),
        ))
    };
    let all = move |watch: &_| {
        let content = |file: &Origin| file.content(most, watch, &check).map_err(|e| e.at(file.location()));
        read_all(&files, watch, content)
    };
    open_detached(all, stall, go_on)
}
