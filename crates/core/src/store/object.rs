//! The interface of a kind of storage: a store lists objects and reads their heads when a checkpoint is opened, and
//! gives a load what it needs of its objects.
//!
//! A store is one file: it implements [`Store`] and [`Objects`], brings a [`Source`](crate::source::Source), and is registered for a scheme.
//! Nothing else in the crate names it. `tests/toy_store` is an example. `tests/toy_wrapper` wraps other stores.

use super::disk_cache::CacheProgress;
use super::facts::Facts;
use super::location::Location;
use super::look::Look;
use super::questions::Questions;
use super::read_cost::Sample;
use super::residency::Residency;
use super::upload::Uploads;
use super::version::Version;
use super::watch::Watch;
use crate::error::{Error, ErrorKind, Result};
#[cfg(any(test, feature = "testing"))]
use crate::options::Io;
#[cfg(any(test, feature = "testing"))]
use crate::source::{Dispatcher, Source};
use crate::source::{LaneSource, SourceRequest};
#[cfg(any(test, feature = "testing"))]
use crate::way::Routing;
use std::ffi::OsString;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The error of a listing without objects.
pub(super) const NO_OBJECT: &str = "the bucket or container has no object whose key begins with this";

/// Bytes of one request to a store. Each answered request for a long header is progress, even if the store is slow.
const MOST_PER_REQUEST: u64 = 8 << 20;

/// Refuses an object of this size, or does not.
pub type CheckSize<'c> = &'c dyn Fn(u64) -> Result<()>;

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

/// The result of [`Store::check_copy`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyChecked {
    /// The bytes of bad blocks.
    pub bad: Vec<Range<u64>>,
    /// They stay, because the copy can only be read.
    pub stay: bool,
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

/// Reads more bytes of an object, behind the given ones, until there are so many.
pub type ReadOn<'w> = Box<dyn FnMut(&mut Vec<u8>, u64) -> Result<()> + 'w>;

/// An object that is open: its first bytes, and more of the same version.
pub struct OpenObject<'w> {
    /// The first bytes, its size and its version.
    pub head: Head,
    /// Reads on. A file stays open as long as this.
    pub read_on: ReadOn<'w>,
}

impl OpenObject<'_> {
    /// Reads on until the head has `until` bytes.
    ///
    /// # Errors
    /// The errors of [`Store::read`].
    pub fn read_until(&mut self, until: u64) -> Result<()> {
        (self.read_on)(&mut self.head.bytes, until)
    }

    /// Closes it; its head is left.
    pub fn close(self) -> Head {
        self.head
    }
}

/// One kind of storage: the files of this machine ([`local`](super::local)), or one that is registered by scheme.
///
/// A store implements `list`, `head`, `read` and `objects`. The other methods are made of these, as for a store whose answers
/// take round trips. A store that wraps another one hands them on, so that it is as good as that one.
///
/// `objects`, `is_distant` and `leads_to_known_disk` may not block. The others may: they are called on threads that can be
/// left behind. Where they wait for long, they ask [`still_wanted`](super::still_wanted).
pub trait Store: Send + Sync + Debug {
    /// The objects of a location: itself, or all objects under it. Their addresses begin with the given one, as it is spelled,
    /// and a slash. The caller leaves out those that are not directly under it. A name that ends with a slash is a folder.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io`.
    fn list(&self, at: &Location) -> Result<Vec<Location>>;

    /// The service that takes objects.
    ///
    /// # Errors
    /// `Unsupported` where none does.
    fn uploads(&self) -> Result<Arc<dyn Uploads>> {
        Err(Error::new(ErrorKind::Unsupported, "addresses of this kind cannot be written to"))
    }

    /// The first `first` bytes of an object, its size and its version, in one request.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io`.
    fn head(&self, at: &Location, first: u64) -> Result<Head>;

    /// `range` of that very version of an object.
    ///
    /// # Errors
    /// The errors of [`head`](Self::head), `Truncated`, and `Changed` for another version.
    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>>;

    /// The objects of one load, by the number of their file in the checkpoint. `None` stands for files of other stores.
    ///
    /// # Errors
    /// Reasons for which the store cannot be used at all; no object is looked at.
    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>>;

    /// Several ranges of that version, one after the other.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    fn read_parts(&self, object: &Object, ranges: &[Range<u64>]) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        ranges.iter().try_for_each(|range| self.read(object, range.clone()).map(|part| all.extend(part)))?;
        Ok(all)
    }

    /// Opens an object, and reads its first `first` bytes, or all of a shorter one.
    ///
    /// # Errors
    /// The errors of [`head`](Self::head).
    fn open<'w>(&'w self, at: &Location, first: u64, watch: &'w Watch) -> Result<OpenObject<'w>> {
        let asking = watch.ask(at.as_path());
        let head = self.head(at, first)?;
        asking.answered();
        let (got, expected) = (head.bytes.len() as u64, head.size.min(first));
        if got < expected {
            let text = format!("the store gave {got} of the first {expected} bytes");
            return Err(Error::new(ErrorKind::Truncated, text));
        }
        let object = Object { location: at.clone(), size: head.size, version: head.version.clone() };
        let read_on = move |bytes: &mut Vec<u8>, until| {
            let asking = watch.ask(object.location.as_path());
            while (bytes.len() as u64) < until {
                if watch.is_given_up() {
                    return Err(Error::new(ErrorKind::Cancelled, "nobody waits for it any more"));
                }
                let at = bytes.len() as u64;
                let part = self.read(&object, at..until.min(at + MOST_PER_REQUEST))?;
                if part.is_empty() {
                    let text = format!("the store gives no bytes from {at} on, of {until}");
                    return Err(Error::new(ErrorKind::Truncated, text).range(at..until));
                }
                bytes.extend(part);
                asking.answered();
            }
            Ok(())
        };
        Ok(OpenObject { head, read_on: Box::new(read_on) })
    }

    /// All bytes of an object, at most one more than `most`. `check` may refuse its size before more than the bytes of one
    /// request are read.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read) and of `check`.
    fn content(&self, at: &Location, most: u64, watch: &Watch, check: CheckSize<'_>) -> Result<Vec<u8>> {
        content_of(self, at, most, watch, check)
    }

    /// The names of what lies directly in a folder, or under an address; `None` if there is an object. A name that ends with a
    /// slash is a folder.
    ///
    /// # Errors
    /// The errors of [`list`](Self::list).
    fn entries(&self, at: &Location, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        let _asking = watch.ask(at.as_path());
        let listed = self.list(at).map_err(|e| e.at(at))?;
        if listed == [at.clone()] {
            return Ok(None);
        }
        // As in a folder, what lies deeper is another checkpoint.
        let text = at.to_string();
        let folder = format!("{}/", text.strip_suffix('/').unwrap_or(&text));
        let name = |location: &Location| {
            let text = location.to_string();
            let name = text.strip_prefix(&folder)?;
            let bare = name.strip_suffix('/').unwrap_or(name);
            (!bare.is_empty() && !bare.contains('/')).then(|| OsString::from(name))
        };
        let names: Vec<OsString> = listed.iter().filter_map(name).collect();
        match listed.first() {
            Some(other) if names.is_empty() => {
                let text = format!("nothing lies directly under this address; the store lists {other}");
                Err(Error::new(ErrorKind::NotFound, text).at(at))
            }
            _ => Ok(Some(names)),
        }
    }

    /// True if nothing is there: no object, or a link to nothing.
    fn is_gone(&self, at: &Location, watch: &Watch) -> bool {
        let _asking = watch.ask(at.as_path());
        self.head(at, 1).is_err_and(|e| e.kind() == ErrorKind::NotFound)
    }

    /// True if the location is a link.
    fn is_link(&self, at: &Location) -> bool {
        let _ = at;
        false
    }

    /// True for an object on a disk of this machine that this process has loaded from: no question about it hangs. Then
    /// the caller's own thread asks, with a [`Watch`] that lets nothing wait: a wrapper hands this on if it also hands on
    /// `open`, `content` and `entries`.
    fn leads_to_known_disk(&self, at: &Location) -> bool {
        let _ = at;
        false
    }

    /// True if answers take round trips. Then many objects are asked about at once.
    fn is_distant(&self) -> bool {
        true
    }

    /// The text that names an object for everybody, whatever credentials they have: the disk cache keeps objects by it. `None`:
    /// this store has no such names, and nothing of it is cached. Asks nobody.
    fn identity(&self, at: &Location) -> Option<String> {
        let _ = at;
        None
    }

    /// Compares blocks, of 1 MiB, of a copy of the object that the store has on a disk with their checksums. Bad ones are asked of
    /// the server from now on, if the copy can be written.
    ///
    /// # Errors
    /// Errors of the copy's file system.
    fn check_copy(&self, object: &Object, blocks: Range<u32>) -> Result<CopyChecked> {
        let _ = (object, blocks);
        Ok(CopyChecked::default())
    }

    /// Measures requests for an object, `times` at most: for `penstock doctor`.
    ///
    /// # Errors
    /// `Unsupported` if the store cannot measure. Errors of the requests are in the [`Look`].
    fn look(&self, at: &Location, times: usize) -> Result<Look> {
        let _ = times;
        Err(Error::new(ErrorKind::Unsupported, "this store cannot measure its requests").at(at))
    }
}

/// All bytes of an object, in as few requests as its store needs: see [`Store::content`].
pub(super) fn content_of<S: Store + ?Sized>(
    store: &S,
    at: &Location,
    most: u64,
    watch: &Watch,
    check: CheckSize<'_>,
) -> Result<Vec<u8>> {
    // What is wanted whole is asked for in one request.
    let mut open = match store.open(at, MOST_PER_REQUEST, watch) {
        // The server sends all or nothing.
        Err(e) if e.status() == Some(200) && most > MOST_PER_REQUEST => store.open(at, most, watch)?,
        open => open?,
    };
    check(open.head.size)?;
    open.read_until(open.head.size.min(most))?;
    Ok(open.close().bytes)
}

/// The objects of one load. Files are named by their number in the checkpoint. `facts`, `resident_within`, `hole` and `verify`
/// may block; the others are called on threads that nobody leaves behind.
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

    /// The hole between two wanted runs that costs as much as one more read of a file, past the page cache or through it,
    /// measured with these reads. `None` if the store declares it, or if it cannot be measured.
    fn hole(&self, file: u32, direct: bool, sample: &Sample) -> Result<Option<u64>> {
        let _ = (file, direct, sample);
        Ok(None)
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

    /// Whether all files are known to be on disks of this machine: asking about them never hangs.
    fn are_known_local(&self) -> bool {
        false
    }

    /// The questions about the files that threads wait for, if the store counts them. Otherwise the load counts those that it
    /// asks.
    fn questions(&self) -> Option<&Questions> {
        None
    }

    /// The traffic with servers so far; `None` for a store that has none.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// The work of the disk cache for this load; `None` for a store without one.
    fn disk_cache(&self) -> Option<Arc<CacheProgress>> {
        None
    }

    /// The sources of the files. Each lane that `facts` names is served by one of them, and so is the lane in place of it
    /// ([`Declared::refused`](crate::extent::Declared::refused)).
    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>>;

    /// Treats a file as if it were on storage device number `storage`, for tests of several drives on one machine.
    #[cfg(any(test, feature = "testing"))]
    fn pretend_storage(&self, file: u32, storage: u64) -> Result<()> {
        let _ = (file, storage);
        Ok(())
    }
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
