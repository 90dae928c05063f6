//! Reads of an open: names, first bytes and whole contents, wherever they are.

use super::location::Location;
use super::object::{CheckSize, OpenObject, Store, NO_OBJECT};
use super::stores::Stores;
use super::watch::Watch;
use crate::error::{Error, ErrorKind, Result};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

/// Something that can be opened: where it is, and the store that has it.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    location: Location,
    store: Arc<dyn Store>,
}

impl PartialEq for Origin {
    fn eq(&self, other: &Origin) -> bool {
        self.location == other.location
    }
}

impl Origin {
    /// The origin that a caller names: an address if it begins with a scheme of these stores, otherwise a path.
    pub(crate) fn of(source: &OsStr, stores: &Stores) -> Origin {
        let address = Location::address(Path::new(source), |scheme| stores.of(scheme));
        let (location, store) = address.unwrap_or_else(|| (Location::Path(source.into()), stores.local.clone()));
        Origin { location, store }
    }

    fn at(&self, location: Location) -> Origin {
        Origin { location, store: self.store.clone() }
    }

    pub(crate) fn location(&self) -> &Location {
        &self.location
    }

    /// The store that has it.
    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The origin of this name in this folder.
    pub(crate) fn within(&self, name: &OsStr) -> Origin {
        self.at(self.location.within(name))
    }

    /// The origin of this name in the folder of this file.
    pub(crate) fn beside(&self, name: &str) -> Origin {
        self.at(self.location.sibling(name))
    }

    /// The folder of this file.
    pub(crate) fn folder(&self) -> Origin {
        let found = self.location.sibling("");
        let here = found == Location::file(OsStr::new(""));
        self.at(if here { Location::file(OsStr::new(".")) } else { found })
    }

    /// Whether it is on a disk of this machine that this process has loaded from, so that no question hangs.
    pub(crate) fn leads_to_known_disk(&self) -> bool {
        self.store.leads_to_known_disk(&self.location)
    }

    /// The names in the folder that this is; `None` if it is a file.
    pub(crate) fn names(&self, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        let Some(mut names) = self.entries(watch)? else { return Ok(None) };
        let had_some = !names.is_empty();
        names.retain(|name| !name.as_encoded_bytes().ends_with(b"/"));
        if had_some && names.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, NO_OBJECT).at(&self.location));
        }
        Ok(Some(names))
    }

    /// The same. A store's names of folders in it are among them, and end with a slash.
    pub(crate) fn entries(&self, watch: &Watch) -> Result<Option<Vec<OsString>>> {
        self.store.entries(&self.location, watch)
    }

    /// Its first `first` bytes, or all of a shorter one; more of the same version can be read.
    pub(crate) fn open<'w>(&'w self, first: u64, watch: &'w Watch) -> Result<OpenObject<'w>> {
        self.store.open(&self.location, first, watch)
    }

    /// All its bytes: see [`Store::content`].
    pub(crate) fn content(&self, most: u64, watch: &Watch, check: CheckSize<'_>) -> Result<Vec<u8>> {
        self.store.content(&self.location, most, watch, check)
    }

    /// Whether there is nothing: no file, or a link to nothing.
    pub(crate) fn is_gone(&self, watch: &Watch) -> bool {
        self.store.is_gone(&self.location, watch)
    }

    /// Whether it is a link.
    pub(crate) fn is_link(&self) -> bool {
        self.store.is_link(&self.location)
    }
}
