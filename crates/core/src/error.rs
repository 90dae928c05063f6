//! The one error type of the crate.
//!
//! Every error says what happened, in which file and byte range, why, and (where it helps) what to do next. Callers
//! match on [`ErrorKind`]. People read the [`Display`](std::fmt::Display) text, which contains the file's name if a
//! file is concerned.

use std::error::Error as StdError;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

/// The kind of failure of an [`Error`]: the part a caller can match on.
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
    /// Another rank of the load has failed, died, or does not answer.
    Peer,
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

/// A value that was expected or found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A number: of bytes or of dimensions, as the message says.
    Number(u64),
    /// Anything else.
    Text(String),
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(number)
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}

/// An error of this crate: kind, message, and if known the file, the byte range in it, the tensor, what was expected and
/// found there, and the cause.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    path: Option<PathBuf>,
    range: Option<Range<u64>>,
    errno: Option<i32>,
    tensor: Option<String>,
    /// The expected value, and the found one.
    values: Option<(Value, Value)>,
    /// The status of a server's answer, and the server's name for the request.
    answer: Option<(u16, Option<String>)>,
    /// The rank that failed, and its host; what happened to it, and for how long nothing had been heard of it.
    peer: Option<(u32, String)>,
    why: Option<String>,
    silence: Option<Duration>,
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A new error of `kind`; `message` says what happened and why, without the file's name.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        let (path, range, errno, tensor, values, answer, peer, why, silence, cause) = Default::default();
        Self(Box::new(Inner { kind, message, path, range, errno, tensor, values, answer, peer, why, silence, cause }))
    }

    /// A new error of kind [`Invalid`](ErrorKind::Invalid).
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// A new error of kind [`Permission`](ErrorKind::Permission).
    pub(crate) fn permission(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Permission, message)
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

    /// The same error with the name of the tensor that it concerns; an earlier name is kept.
    #[must_use]
    pub fn of_tensor(mut self, name: impl Into<String>) -> Self {
        self.0.tensor.get_or_insert_with(|| name.into());
        self
    }

    /// The same error with what was expected and what was found, which the message says too; earlier ones are kept.
    #[must_use]
    pub fn with_values(mut self, expected: impl Into<Value>, found: impl Into<Value>) -> Self {
        self.0.values.get_or_insert_with(|| (expected.into(), found.into()));
        self
    }

    /// The same error with the status of the server's answer that led to it (HTTP), and with the server's name for the
    /// request, which its owner can look up; earlier ones are kept.
    #[must_use]
    pub fn answered(mut self, status: u16, request_id: Option<String>) -> Self {
        self.0.answer.get_or_insert((status, request_id));
        self
    }

    /// The same error with the rank whose failure it is, and that rank's host; an earlier one is kept.
    #[must_use]
    pub fn of_peer(mut self, rank: u32, host: impl Into<String>) -> Self {
        self.0.peer.get_or_insert_with(|| (rank, host.into()));
        self
    }

    /// The same error with what happened to the rank, without its number.
    #[must_use]
    pub(crate) fn because(mut self, why: impl Into<String>) -> Self {
        self.0.why.get_or_insert_with(|| why.into());
        self
    }

    /// The same error with how long ago the rank was heard of last.
    #[must_use]
    pub(crate) fn heard_ago(mut self, silence: Duration) -> Self {
        self.0.silence.get_or_insert(silence);
        self
    }

    /// The same error with the error that led to it, such as one of a network library. The message need not repeat its text;
    /// an earlier cause is kept.
    #[must_use]
    pub fn caused_by(mut self, cause: impl StdError + Send + Sync + 'static) -> Self {
        self.0.cause.get_or_insert_with(|| Arc::new(cause));
        self
    }

    /// The same error with another message.
    #[must_use]
    pub(crate) fn reworded(mut self, message: impl FnOnce(&str) -> String) -> Self {
        self.0.message = message(&self.0.message);
        self
    }

    /// The same error as one of another kind.
    #[must_use]
    pub(crate) fn of_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// The kind of this failure.
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

    /// The tensor concerned, if any.
    pub fn tensor(&self) -> Option<&str> {
        self.0.tensor.as_deref()
    }

    /// The expected and the found value, if a word can say them.
    pub fn values(&self) -> Option<(&Value, &Value)> {
        self.0.values.as_ref().map(|(expected, found)| (expected, found))
    }

    /// The status of the server's answer that led to it (HTTP), if that was the cause.
    pub fn status(&self) -> Option<u16> {
        self.0.answer.as_ref().map(|answer| answer.0)
    }

    /// The server's name for the request that failed, if it gave one.
    pub fn request_id(&self) -> Option<&str> {
        self.0.answer.as_ref().and_then(|answer| answer.1.as_deref())
    }

    /// The rank whose failure it is, and its host.
    pub fn peer(&self) -> Option<(u32, &str)> {
        self.0.peer.as_ref().map(|(rank, host)| (*rank, host.as_str()))
    }

    /// The failure of that rank, without its number, if it was given apart.
    pub fn why(&self) -> Option<&str> {
        self.0.why.as_deref()
    }

    /// How long ago that rank was heard of last when it was given up; `None` where somebody has said what happened.
    pub fn silence(&self) -> Option<Duration> {
        self.0.silence
    }

    /// The message: what happened and why, without file, range and cause.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The message, and the texts of what led to the error.
    pub fn full_message(&self) -> String {
        let mut text = self.0.message.clone();
        let mut cause = self.source();
        while let Some(e) = cause {
            text.push_str(": ");
            text.push_str(&e.to_string());
            cause = e.source();
        }
        text
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
        f.write_str(&self.full_message())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}

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
    fn what_led_to_an_error_is_its_source_and_survives_a_clone() {
        let cause = io::Error::new(io::ErrorKind::ConnectionReset, "the peer went away");
        let e = Error::new(ErrorKind::Io, "cannot read the object").caused_by(cause);
        let copy = e.clone();
        drop(e);
        assert_eq!(copy.source().map(ToString::to_string).as_deref(), Some("the peer went away"));
        assert_eq!(copy.message(), "cannot read the object");
        assert_eq!(copy.at("/o").to_string(), "/o: cannot read the object: the peer went away");
    }

    #[test]
    fn data_stay_with_an_error_that_is_worded_anew() {
        let e = Error::new(ErrorKind::Truncated, "too short").of_tensor("w").with_values(16u64, 8u64);
        let e = e.reworded(|old| format!("very {old}"));
        assert_eq!(e.message(), "very too short");
        assert_eq!(e.tensor(), Some("w"));
        assert_eq!(e.values(), Some((&Value::Number(16), &Value::Number(8))));
        assert_eq!(e.of_tensor("v").tensor(), Some("w"));
    }

    #[test]
    fn the_first_path_wins() {
        assert_eq!(Error::new(ErrorKind::Header, "x").at("/inner").at("/outer").path(), Some(Path::new("/inner")));
    }
}
