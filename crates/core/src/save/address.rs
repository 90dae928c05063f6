//! Addresses that something is saved to.

use crate::error::{Error, ErrorKind, Result};
use crate::store::{Location, Store, Stores};
use std::sync::Arc;

/// An address that something is saved to, and its store.
pub(super) struct SaveAddress {
    pub(super) folder: Location,
    pub(super) store: Arc<dyn Store>,
}

impl SaveAddress {
    /// # Errors
    /// `Unsupported` if there is no store for it.
    pub(super) fn new(folder: &Location, stores: &Stores) -> Result<SaveAddress> {
        let scheme = folder.scheme().unwrap_or_default();
        let unknown = || Error::new(ErrorKind::Unsupported, format!("there is no store for {scheme}://")).at(folder);
        Ok(SaveAddress { folder: folder.clone(), store: stores.of(scheme).ok_or_else(unknown)? })
    }
}
