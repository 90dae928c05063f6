//! Reads of an open: names, first bytes and whole contents, on this machine or in a store that a scheme names.

use super::heads::{is_gone, is_link, local_content, local_names, LocalHead};
use super::known_disks::leads_to_known_disk;
use super::location::Location;
use super::object::{Head, Object, Store, NO_OBJECT};
use super::stores::Stores;
use super::version::Version;
use super::watch::Watch;
use crate::error::{Error, ErrorKind, Result};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

/// Bytes of one request to a store. Each answered request for a long header is progress, even if the store is slow.
const MOST_PER_REQUEST: u64 = 8 << 20;

/// Something that can be opened: where it is, and the store that has it.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    location: Location,
    /// `None`: it is on this machine.
    store: Option<Arc<dyn Store>>,
}

impl PartialEq for Origin {
    fn eq(&self, other: &Origin) -> bool {
        self.location == other.location
    }
}

impl Origin {
    /// The origin that a caller names: an address if it begins with a scheme of these stores, otherwise a path.
    pub(crate) fn of(source: &OsStr, stores: &Stores) -> Origin {
        match Location::address(Path::new(source), |scheme| stores.of(scheme)) {
            Some((location, store)) => Origin { location, store: Some(store) },
            None => Origin { location: Location::Path(source.into()), store: None },
        }
    }

    pub(crate) fn location(&self) -> &Location {
        &self.location
    }

    /// The store that has it; `None`: it is on this machine.
    pub(crate) fn store(&self) -> Option<&Arc<dyn Store>> {
        self.store.as_ref()
    }

    /// The origin of this name in this folder.
    pub(crate) fn within(&self, name: &OsStr) -> Origin {
        Origin { location: self.location.within(name), store: self.store.clone() }
    }

    /// The origin of this name in the folder of this file.
    pub(crate) fn beside(&self, name: &str) -> Origin {
        Origin { location: self.location.sibling(name), store: self.store.clone() }
    }

    /// The folder of this file.
    pub(crate) fn folder(&self) -> Origin {
        let found = self.location.sibling("");
        let here = found == Location::file(OsStr::new(""));
        Origin { location: if here { Location::file(OsStr::new(".")) } else { found }, store: self.store.clone() }
    }

    /// Whether it is on a disk of this machine that this process has loaded from, so that no question hangs.
    pub(crate) fn leads_to_known_disk(&self) -> bool {
        self.store.is_none() && leads_to_known_disk(self.location.as_path())
    }

    /// The names in the folder that this is; `None` if it is a file.
    pub(crate) fn names(&self, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        let Some(mut names) = self.entries(watch)? else { return Ok(None) };
        let had_some = !names.is_empty();
        names.retain(|name| !name.as_encoded_bytes().ends_with(b"/"));
        if had_some && names.is_empty() && self.store.is_some() {
            return Err(Error::new(ErrorKind::NotFound, NO_OBJECT).at(&self.location));
        }
        Ok(Some(names))
    }

    /// The same. A store's names of folders in it are among them, and end with a slash.
    pub(crate) fn entries(&self, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        let Some(store) = &self.store else { return local_names(self.location.as_path(), watch) };
        let _asking = watch.ask(self.location.as_path());
        let listed = store.list(&self.location).map_err(|e| e.at(&self.location))?;
        if listed == [self.location.clone()] {
            return Ok(None);
        }
        // As in a folder, what lies deeper is another checkpoint.
        let text = self.location.to_string();
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
                Err(Error::new(ErrorKind::NotFound, text).at(&self.location))
            }
            _ => Ok(Some(names)),
        }
    }

    /// Its first `first` bytes, or all of a shorter one.
    pub(crate) fn head<'w>(&'w self, first: u64, watch: &'w Watch) -> Result<OpenHead<'w>> {
        let Some(store) = &self.store else {
            return LocalHead::open(self.location.as_path(), first, watch).map(OpenHead::Local);
        };
        let asking = watch.ask(self.location.as_path());
        let Head { bytes, size, version } = store.head(&self.location, first)?;
        asking.answered();
        if (bytes.len() as u64) < size.min(first) {
            let text = format!("the store gave {} of the first {} bytes", bytes.len(), size.min(first));
            return Err(Error::new(ErrorKind::Truncated, text));
        }
        let object = Object { location: self.location.clone(), size, version };
        Ok(OpenHead::Stored { store: &**store, object, bytes, watch })
    }

    /// All its bytes, at most one more than `most`. `check` may refuse its size before more than `first` bytes are read, or
    /// the bytes of one request.
    pub(crate) fn content(
        &self,
        first: u64,
        most: u64,
        watch: &Watch,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Vec<u8>> {
        if self.store.is_none() {
            return local_content(self.location.as_path(), most, watch, check);
        }
        // What is wanted whole is asked for in one request.
        let mut head = match self.head(first.max(MOST_PER_REQUEST), watch) {
            // The server sends all or nothing.
            Err(e) if e.status() == Some(200) && most > MOST_PER_REQUEST => self.head(most, watch)?,
            head => head?,
        };
        let size = head.size();
        check(size)?;
        head.read_until(size.min(most))?;
        Ok(head.close().1)
    }

    /// Whether there is nothing: no file, or a link to nothing.
    pub(crate) fn is_gone(&self, watch: &Watch) -> bool {
        let Some(store) = &self.store else { return is_gone(self.location.as_path(), watch) };
        let _asking = watch.ask(self.location.as_path());
        store.head(&self.location, 1).is_err_and(|e| e.kind() == ErrorKind::NotFound)
    }

    /// Whether it is a link.
    pub(crate) fn is_link(&self) -> bool {
        self.store.is_none() && is_link(self.location.as_path())
    }
}

/// The first bytes of something that is open: more of the same version can be read.
pub(crate) enum OpenHead<'w> {
    Local(LocalHead<'w>),
    Stored { store: &'w dyn Store, object: Object, bytes: Vec<u8>, watch: &'w Watch },
}

impl OpenHead<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            OpenHead::Local(head) => &head.bytes,
            OpenHead::Stored { bytes, .. } => bytes,
        }
    }

    /// Size of the whole.
    pub(crate) fn size(&self) -> u64 {
        match self {
            OpenHead::Local(head) => head.identity.size,
            OpenHead::Stored { object, .. } => object.size,
        }
    }

    /// Reads on until there are `until` bytes.
    pub(crate) fn read_until(&mut self, until: u64) -> Result<()> {
        match self {
            OpenHead::Local(head) => head.read_until(until),
            OpenHead::Stored { store, object, bytes, watch } => {
                let asking = watch.ask(object.location.as_path());
                while (bytes.len() as u64) < until {
                    if watch.is_given_up() {
                        return Err(Error::new(ErrorKind::Cancelled, "nobody waits for it any more"));
                    }
                    let at = bytes.len() as u64;
                    let part = store.read(object, at..until.min(at + MOST_PER_REQUEST))?;
                    if part.is_empty() {
                        let text = format!("the store gives no bytes from {at} on, of {until}");
                        return Err(Error::new(ErrorKind::Truncated, text).range(at..until));
                    }
                    bytes.extend(part);
                    asking.answered();
                }
                Ok(())
            }
        }
    }

    /// Closes it; what is known of it is left.
    pub(crate) fn close(self) -> (Version, Vec<u8>) {
        match self {
            OpenHead::Local(head) => {
                let (identity, bytes) = head.close();
                (Version::Inode(identity), bytes)
            }
            OpenHead::Stored { object, bytes, .. } => (object.version, bytes),
        }
    }
}
