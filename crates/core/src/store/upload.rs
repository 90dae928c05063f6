//! Objects that are written: the interface of the kinds of storage that take them.

use super::location::Location;
use crate::error::{Error, ErrorKind, Result};
use std::fmt::Debug;
use std::time::Duration;

/// The parts that a service takes an object in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartLimits {
    /// Bytes of a part, at least: the last one may have fewer.
    pub least: u64,
    /// Bytes of a part, at most.
    pub most: u64,
    /// Parts of an object, at most.
    pub parts: u64,
    /// Every part but the last has a multiple of so many bytes.
    pub step: u64,
    /// True if parts come one after the other.
    pub in_order: bool,
}

impl PartLimits {
    /// Bytes of each part but the last of an object of `size` bytes: `wanted` where the service takes that. `None`: the object
    /// is too large for it.
    pub fn part(&self, size: u64, wanted: u64) -> Option<u64> {
        let part = wanted.max(self.least).max(size.div_ceil(self.parts)).next_multiple_of(self.step);
        (part <= self.most || size <= self.most).then_some(part)
    }
}

/// The condition under which an object is replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Precondition {
    /// None.
    Always,
    /// No object has this name. Some services refuse this after a removal too. Then their list of versions is read, and if it
    /// shows the removal, the object is written without a condition ([`Uploaded::is_unguarded`]).
    Absent,
    /// No object has this name. This condition is never dropped: of two writers of one name the second gets an error.
    Unused,
    /// It has this version.
    Version(String),
}

/// The one who waits for an upload.
pub trait UploadWatch: Sync {
    /// Goes on while the upload is wanted.
    ///
    /// # Errors
    /// `Cancelled` if it is not.
    fn check(&self) -> Result<()>;

    /// Something went to the server, or came from it.
    fn moved(&self);

    /// A request is sent again, for this reason.
    fn again(&self, why: &Error) {
        let _ = why;
    }
}

/// The version of an object that was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Uploaded {
    /// Its ETag, or generation.
    pub version: Option<String>,
    /// True if the server has compared the bytes with a checksum, and said so.
    pub is_checked: bool,
    /// True if the answer shows that the bucket keeps old versions.
    pub is_versioned: bool,
    /// True if it was written without its condition, because the service refuses the condition after a removal too.
    pub is_unguarded: bool,
}

/// An object as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectState {
    /// Its ETag, or generation.
    pub version: String,
    /// The lock on this version, in words. `None`: the version has no lock, or these credentials may not see it.
    pub lock: Option<String>,
}

/// The outcome of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Readers do not find it. The answer says nothing of old versions.
    Done,
    /// Readers do not find it, and the bucket keeps its bytes as an old version.
    Hidden,
}

/// The outcome of a request on a condition that does not hold.
#[derive(Debug)]
pub struct ConditionTrial {
    /// True if the service has refused it. `Err`: nobody knows.
    pub heeds: Result<bool>,
    /// The failed abort of an upload in parts, which stays incomplete.
    pub incomplete: Option<Error>,
}

impl ConditionTrial {
    /// The outcome of a trial that leaves no upload.
    pub(crate) fn of(heeds: Result<bool>) -> ConditionTrial {
        ConditionTrial { heeds, incomplete: None }
    }
}

/// A service that takes objects. All of its calls block.
pub trait Uploads: Send + Sync + Debug {
    /// The parts that it takes.
    fn limits(&self) -> PartLimits;

    /// Begins an object of `size` bytes that comes in parts of `part` bytes. It is there when it is finished, and not before.
    ///
    /// # Errors
    /// `NotFound` (the bucket), `Permission`, `Io`, `Timeout`, `Cancelled`.
    fn begin(
        &self,
        at: &Location,
        size: u64,
        part: u64,
        condition: &Precondition,
        watch: &dyn UploadWatch,
    ) -> Result<Box<dyn Upload>>;

    /// Writes a small object at once.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin); `Changed` if the condition does not hold.
    fn put(&self, at: &Location, bytes: &[u8], condition: &Precondition, watch: &dyn UploadWatch) -> Result<Uploaded>;

    /// The version of an object; `None` if the object does not exist.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn version(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<String>>;

    /// The version of an object, and the lock on it; `None` if the object does not exist.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn state(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<ObjectState>> {
        Ok(self.version(at, watch)?.map(|version| ObjectState { version, lock: None }))
    }

    /// The lock on versions of this object, in words: its own, or the one that its bucket gives to each new object. `None`: neither has
    /// one, or these credentials may not see it.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin): nobody knows.
    fn lock(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<String>> {
        let _ = (at, watch);
        Ok(None)
    }

    /// Removes an object. One that is not there is no error.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn remove(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Removal>;

    /// The time since an object was written, by the server's clock; `None` if the object does not exist.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn age(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<Duration>>;

    /// The uploads below an address that have begun and not ended. `None`: the service forgets them by itself, and lists none.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn unfinished(&self, folder: &Location, watch: &dyn UploadWatch) -> Result<Option<Vec<UnfinishedUpload>>> {
        let _ = (folder, watch);
        Ok(None)
    }

    /// Has the server forget an upload with this name ([`Upload::name`]). One that it does not know is no error.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin); `Unsupported` where uploads have no names.
    fn forget(&self, at: &Location, name: &str, watch: &dyn UploadWatch) -> Result<()> {
        let _ = (name, watch);
        Err(Error::new(ErrorKind::Unsupported, "uploads to this service have no names").at(at))
    }

    /// True if the service may refuse [`Precondition::Unused`] for one of these names, although no object has it now: an object had it
    /// before, and the service keeps versions.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin): nobody knows.
    fn remembers(&self, names: &[Location], watch: &dyn UploadWatch) -> Result<bool> {
        let _ = (names, watch);
        Ok(false)
    }

    /// Asks an unknown service to replace `probe`, an object that does not exist: at once or by an upload in parts. A service that keeps
    /// to conditions refuses this. One that ignores them makes the object, of one byte at most; the caller removes it.
    fn heeds_conditions(&self, probe: &Location, in_parts: bool, watch: &dyn UploadWatch) -> ConditionTrial {
        let _ = (probe, in_parts, watch);
        ConditionTrial::of(Ok(true))
    }

    /// True if a version of an object is kept that was replaced. Only where [`Uploaded`] does not show it.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin): nobody knows.
    fn keeps_version(&self, at: &Location, version: &str, watch: &dyn UploadWatch) -> Result<bool> {
        let _ = (at, version, watch);
        Ok(false)
    }

    /// The connections that requests are sent on.
    fn sender(&self) -> &dyn Sender;
}

/// The connections of a service that takes objects.
pub trait Sender {
    /// Most requests at the same time.
    fn connections(&self) -> usize;

    /// Nothing more is asked for now: connections that are idle are closed.
    fn rest(&self);
}

/// An upload that has begun and not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedUpload {
    /// Where its object would be.
    pub at: Location,
    /// The server's name of it.
    pub name: String,
    /// The time since it began, by the server's clock.
    pub age: Duration,
}

/// An object whose parts are being sent.
pub trait Upload: Send + Sync {
    /// The server's name of this upload. With it another process can abort the upload. `None` if the service gives no name, or if the
    /// name alone is a right to write.
    fn name(&self) -> Option<&str> {
        None
    }

    /// Sends part `number`, counted from 0, which begins at byte `offset`. It may be sent again.
    ///
    /// # Errors
    /// `Permission`, `Io`, `Timeout`, `Cancelled`.
    fn part(&self, number: u32, offset: u64, bytes: &[&[u8]], watch: &dyn UploadWatch) -> Result<()>;

    /// All parts are there: the object is.
    ///
    /// # Errors
    /// As for [`part`](Self::part); `Changed` if the condition does not hold.
    fn finish(&self, watch: &dyn UploadWatch) -> Result<Uploaded>;

    /// Has the server forget the parts.
    ///
    /// # Errors
    /// As for [`part`](Self::part).
    fn abort(&self, watch: &dyn UploadWatch) -> Result<()>;
}

/// A wait that nobody gives up.
pub struct Patient;

impl UploadWatch for Patient {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn moved(&self) {}
}
