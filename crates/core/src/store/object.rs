//! The interface of a kind of storage: a store lists objects and reads their heads when a checkpoint is opened, and
//! gives a load what it needs of its objects.
//!
//! A store is one file: it implements [`Store`] and [`Objects`], brings a [`Source`](crate::source::Source), and is registered for a scheme.
//! Nothing else in the crate names it. `tests/toy_store` is an example.

use super::facts::Facts;
use super::location::Location;
use super::look::Look;
use super::residency::Residency;
use super::version::Version;
use crate::error::{Error, ErrorKind, Result};
#[cfg(any(test, feature = "testing"))]
use crate::options::Io;
#[cfg(any(test, feature = "testing"))]
use crate::source::{Dispatcher, Source};
use crate::source::{LaneSource, SourceRequest};
#[cfg(any(test, feature = "testing"))]
use crate::way::Routing;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The error of a listing without objects.
pub(super) const NO_OBJECT: &str = "the bucket or container has no object whose key begins with this";

/// The first bytes of an object, and what tells it apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The first bytes: as many as were asked for, or all of a shorter object.
    pub bytes: Vec<u8>,
    /// Size of the object in bytes.
    pub size: u64,
    /// The version that these bytes belong to.
    pub version: Version,
}

/// One object of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Where it is.
    pub location: Location,
    /// Its size in bytes when its header was read.
    pub size: u64,
    /// Its version when its header was read. Bytes of any other version are an error of kind `Changed`.
    pub version: Version,
}

/// The traffic of a load with servers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests that were sent, those that failed and those that were redirected included.
    pub requests: u64,
    /// Connections that were made.
    pub connections: u64,
    /// Requests that failed and were sent again for what was missing.
    pub retries: u64,
    /// Retries because the server had too much to do (429, 503).
    pub busy: u64,
    /// Requests whose last part was asked for on another connection, because theirs was slower than the others.
    pub moved: u64,
    /// Bytes of bodies that were received.
    pub received: u64,
    /// Received bytes between reads of one request, which nobody wanted.
    pub gaps: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        let Traffic { requests, connections, retries, busy, moved, received, gaps } = other;
        self.requests += requests;
        self.connections += connections;
        self.retries += retries;
        self.busy += busy;
        self.moved += moved;
        self.received += received;
        self.gaps += gaps;
    }
}

/// One kind of storage, registered by scheme. `list`, `head` and `read` may block: they are called on threads that can be
/// left behind. Where they wait for long, they ask [`still_wanted`](super::still_wanted). `objects` may not block.
pub trait Store: Send + Sync + Debug {
    /// The objects of a location: itself, or all objects under it. Their addresses begin with the given one, as it is spelled,
    /// and a slash. The caller leaves out those that are not directly under it. A name that ends with a slash is a folder.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io`.
    fn list(&self, at: &Location) -> Result<Vec<Location>>;

    /// The first `first` bytes of an object, its size and its version, in one request.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io`.
    fn head(&self, at: &Location, first: u64) -> Result<Head>;

    /// `range` of that very version of an object.
    ///
    /// # Errors
    /// Those of [`head`](Self::head), `Truncated`, and `Changed` for another version.
    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>>;

    /// Measures requests for an object, `times` at most: for `penstock doctor`.
    ///
    /// # Errors
    /// `Unsupported` if the store cannot measure. Errors of the requests are in the [`Look`].
    fn look(&self, at: &Location, times: usize) -> Result<Look> {
        let _ = times;
        Err(Error::new(ErrorKind::Unsupported, "this store cannot measure its requests").at(at))
    }

    /// The objects of one load, by the number of their file in the checkpoint. `None` stands for files of other stores.
    ///
    /// # Errors
    /// What keeps the store from being used at all; no object is looked at.
    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>>;
}

/// The objects of one load. Files are named by their number in the checkpoint. `facts`, `resident_within` and `verify` may
/// block; the others are called on threads that nobody leaves behind.
pub trait Objects: Send + Sync + Debug {
    /// Where a file is, for messages.
    fn path(&self, file: u32) -> &Path;

    /// Facts about a file before it is read, its lanes first. The ways of the load follow from them.
    fn facts(&self, file: u32) -> Result<Facts>;

    /// The parts of `range` that are near: in memory already, so that reads wait for no storage, or in a copy. They
    /// come in the lane that `facts` names for them.
    fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        let _ = (file, range);
        Ok(Residency::default())
    }

    /// A descriptor of the file to map, if `facts` says that it is mappable.
    fn to_map(&self, file: u32) -> Result<Option<Arc<OwnedFd>>> {
        let _ = file;
        Ok(None)
    }

    /// An error of kind `Changed` if the file is no longer what it was when its header was read.
    fn verify(&self, file: u32) -> Result<()>;

    /// Whether each read of a file makes sure by itself that it brings bytes of the object's version, or an error. Then
    /// nothing is compared afterwards: `verify` is not called. A mapping is no such read: a store that maps says no. An
    /// object without a strong validator may need it where its neighbours do not.
    fn pins_reads(&self, file: u32) -> bool {
        let _ = file;
        false
    }

    /// Whether asking about the files may take longer than a caller should wait without looking at signals.
    fn may_hang(&self) -> bool {
        true
    }

    /// The traffic with servers so far; `None` for a store that has none.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// The sources of the files. Each lane that `facts` names is served by one of them, and so is the lane in place of it
    /// ([`Declared::refused`](crate::extent::Declared::refused)).
    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>>;
}

#[cfg(any(test, feature = "testing"))]
impl dyn Objects {
    /// The source of all lanes of the files, for tests.
    pub fn source(self: Arc<Self>, io: Io, routing: &Arc<Routing>) -> Result<Box<dyn Source>> {
        let mut dispatcher = Dispatcher::new(Vec::new());
        let sources = self.sources(&SourceRequest::new(io, routing.clone()))?;
        sources.into_iter().try_for_each(|source| dispatcher.add(Some(0), source))?;
        Ok(Box::new(dispatcher))
    }
}
