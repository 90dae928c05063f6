//! The one error type of the crate.
//!
//! Every error says what happened, in which file and byte range, why, and (where it helps) what to do next. Callers
//! match on [`ErrorKind`]. People read the [`Display`](std::fmt::Display) text, which contains the file's name if a
//! file is concerned.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fmt, io};

/// What kind of failure an [`Error`] is: the part a caller can match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file, directory or index does not exist.
    NotFound,
    /// The operating system refused access.
    Permission,
    /// The path exists but cannot be a shard file: a directory, FIFO, device or socket, a Git LFS pointer, an
    /// unfinished download, a page of HTML.
    NotACheckpoint,
    /// A shard file's header is malformed: length, JSON, duplicate keys, dtype, shape, offsets, overlaps, holes.
    Header,
    /// The index file is malformed, or it disagrees with the shard files.
    Index,
    /// The file is shorter than its header says, or ended in the middle of a read.
    Truncated,
    /// The file changed between opening the checkpoint and the end of the load.
    Changed,
    /// A name that the checkpoint does not contain.
    UnknownTensor,
    /// A slice outside its tensor, or one that does not begin and end at whole bytes.
    Slice,
    /// Options or arguments that are invalid, alone or together.
    Invalid,
    /// This build, machine or framework cannot do that.
    Unsupported,
    /// Destinations do not match the checkpoint.
    Mismatch,
    /// The operating system reported an I/O error.
    Io,
    /// The operating system reported an I/O error while writing.
    Write,
    /// A file does not fit: the disk is full, or a quota or limit forbids more.
    NoSpace,
    /// Nothing moved for longer than the stall timeout.
    Timeout,
    /// The load was cancelled.
    Cancelled,
    /// The accelerator or its driver reported an error.
    Device,
    /// Host or device memory could not be allocated.
    OutOfMemory,
    /// A process limit (file descriptors, mappings, locked memory) was reached, and there was no way around it.
    Limit,
    /// The process forked: a job or handle of the parent was used in the child.
    Forked,
    /// A bug in penstock.
    Internal,
}

/// An error of this crate: kind, message, and if known the file, the byte range in it and the cause.
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    path: Option<PathBuf>,
    range: Option<Range<u64>>,
    errno: Option<i32>,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A new error of `kind`; `message` says what happened and why, without the file's name.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), path: None, range: None, errno: None }))
    }

    /// An error from the operating system, whose kind follows from its errno. `doing` reads like "open" or "read".
    pub fn io(doing: &str, cause: &io::Error) -> Self {
        let errno = cause.raw_os_error();
        let kind = match errno {
            Some(libc::ENOENT) => ErrorKind::NotFound,
            Some(libc::EACCES | libc::EPERM) => ErrorKind::Permission,
            Some(libc::ENOMEM) => ErrorKind::OutOfMemory,
            Some(libc::EMFILE | libc::ENFILE) => ErrorKind::Limit,
            _ => ErrorKind::Io,
        };
        let mut e = Self::new(kind, format!("cannot {doing}: {cause}"));
        e.0.errno = errno;
        e
    }

    /// An error from the operating system while a file is being written.
    pub fn write(doing: &str, cause: &io::Error) -> Self {
        let mut e = Self::io(doing, cause);
        e.0.kind = match cause.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => ErrorKind::NoSpace,
            Some(libc::EROFS) => ErrorKind::Permission,
            Some(libc::ENOTDIR) => ErrorKind::NotFound,
            _ if e.0.kind == ErrorKind::Io => ErrorKind::Write,
            _ => e.0.kind,
        };
        e
    }

    /// The same error with the file that it concerns; an earlier path is kept.
    #[must_use]
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        self.0.path.get_or_insert_with(|| path.as_ref().to_path_buf());
        self
    }

    /// The same error with the byte range of the file that it concerns; an earlier range is kept.
    #[must_use]
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.0.range.get_or_insert(range);
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The file concerned, if any.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The byte range within [`path`](Self::path), if known.
    pub fn byte_range(&self) -> Option<Range<u64>> {
        self.0.range.clone()
    }

    /// The operating system's error number, if that was the cause.
    pub fn errno(&self) -> Option<i32> {
        self.0.errno
    }

    /// What happened and why, without file and range.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl Clone for Error {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.0.path {
            write!(f, "{}: ", path.display())?;
        }
        if let Some(range) = &self.0.range {
            write!(f, "bytes {}..{}: ", range.start, range.end)?;
        }
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_os_error_keeps_its_errno_and_names_the_file_and_range() {
        let e = Error::io("read", &io::Error::from_raw_os_error(libc::EIO)).at("/a/b.safetensors").range(8..16);
        assert_eq!((e.kind(), e.errno()), (ErrorKind::Io, Some(libc::EIO)));
        let text = e.to_string();
        assert!(text.contains("/a/b.safetensors") && text.contains("8..16") && text.contains("cannot read"), "{text}");
    }

    #[test]
    fn the_first_path_wins() {
        assert_eq!(Error::new(ErrorKind::Header, "x").at("/inner").at("/outer").path(), Some(Path::new("/inner")));
    }
}
