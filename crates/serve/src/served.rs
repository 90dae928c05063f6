//! The traits between HTTP and the things that are served.

use crate::name::Name;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// A set of objects with names. Its calls may block: each is made on one of many threads.
pub trait Served: Send + Sync {
    /// The object or folder of this name.
    ///
    /// # Errors
    /// `NotFound` if nothing has this name, `PermissionDenied` if this process may not read it.
    fn find(&self, name: &Name) -> io::Result<Found>;

    /// Descriptors of an object that is being sent, at most.
    fn descriptors(&self) -> u64 {
        1
    }
}

/// The answer to a name.
pub enum Found {
    /// An object.
    Object(Box<dyn Object>),
    /// A folder, with its entries if the name ends with a `/`.
    Folder(Contents),
}

/// An object of one version. Byte `n` of it is byte `n` of its descriptor.
pub trait Object: Send {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// The version, as an ETag with its quotes: two objects with the same strong one have the same bytes. A weak one (`W/`)
    /// never matches a condition.
    fn etag(&self) -> &str;

    /// Last modification, seconds since the epoch.
    fn modified(&self) -> Option<i64>;

    /// The descriptor that its bytes are read from.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// The end of the bytes that are there from the start of `range` on, at most its end. Of an object that is still
    /// being received, some bytes are not.
    fn there(&self, range: &Range<u64>) -> u64 {
        range.end
    }

    /// True if bytes read until now are of the version that [`etag`](Self::etag) names.
    fn is_unchanged(&self) -> bool;
}

/// The entries of a folder.
#[derive(Debug, Default)]
pub struct Contents {
    /// Its entries, by name.
    pub entries: Vec<Entry>,
    /// True if there are more of them.
    pub is_cut: bool,
}

/// An entry of a folder.
#[derive(Debug)]
pub struct Entry {
    /// Its name in the folder.
    pub name: Vec<u8>,
    /// Size and ETag of a file; `None` of a folder.
    pub file: Option<(u64, String)>,
}
