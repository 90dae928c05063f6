//! A bucket that a command asks about leftovers, and clears.

use super::address::SaveAddress;
use super::before::Asker;
use crate::error::Result;
use crate::format::open_detached;
use crate::store::upload::{Removal, UnfinishedUpload, UploadWatch, Uploads};
use crate::store::{Location, Stores};
use std::sync::Arc;
use std::time::Duration;

/// See the module's documentation. Each call ends with `Cancelled` when `go_on` says no, and with `Timeout` when the server is
/// silent for the stall timeout.
pub struct Bucket {
    address: Arc<SaveAddress>,
    uploads: Arc<dyn Uploads>,
    stall: Duration,
}

impl Bucket {
    /// The bucket of this address.
    ///
    /// # Errors
    /// `Unsupported` where nothing can be written.
    pub fn new(folder: &Location, stores: &Stores, stall: Duration) -> Result<Bucket> {
        let address = SaveAddress::new(folder, stores)?;
        let uploads = address.store.uploads().map_err(|e| e.at(folder))?;
        Ok(Bucket { address: Arc::new(address), uploads, stall })
    }

    /// The text that names the address for everybody: the service, and the address. Asks nobody.
    pub fn identity(&self) -> Option<String> {
        self.address.store.identity(&self.address.folder)
    }

    /// The version of an object; `None` if the object does not exist.
    ///
    /// # Errors
    /// The errors of the server.
    pub fn version(&self, at: Location, go_on: impl FnMut() -> bool) -> Result<Option<String>> {
        self.ask(at, |at, uploads, watch| uploads.version(at, watch), go_on)
    }

    /// The time since an object was written; `None` if the object does not exist.
    ///
    /// # Errors
    /// The errors of the server.
    pub fn age(&self, at: Location, go_on: impl FnMut() -> bool) -> Result<Option<Duration>> {
        self.ask(at, |at, uploads, watch| uploads.age(at, watch), go_on)
    }

    /// Removes an object. True if its bytes stay, as an old version.
    ///
    /// # Errors
    /// The errors of the server.
    pub fn remove(&self, at: Location, go_on: impl FnMut() -> bool) -> Result<bool> {
        let removed = self.ask(at, |at, uploads, watch| uploads.remove(at, watch), go_on)?;
        Ok(removed == Removal::Hidden)
    }

    /// Has the server forget an upload.
    ///
    /// # Errors
    /// The errors of the server.
    pub fn forget(&self, at: Location, name: String, go_on: impl FnMut() -> bool) -> Result<()> {
        self.ask(at, move |at, uploads, watch| uploads.forget(at, &name, watch), go_on)
    }

    /// The uploads below the address that have not ended; `None` where the service lists none.
    ///
    /// # Errors
    /// The errors of the server.
    pub fn unfinished(&self, go_on: impl FnMut() -> bool) -> Result<Option<Vec<UnfinishedUpload>>> {
        let folder = self.address.folder.clone();
        self.ask(folder, |at, uploads, watch| uploads.unfinished(at, watch), go_on)
    }

    fn ask<T: Send + 'static>(
        &self,
        at: Location,
        question: impl FnOnce(&Location, &dyn Uploads, &dyn UploadWatch) -> Result<T> + Send + 'static,
        go_on: impl FnMut() -> bool,
    ) -> Result<T> {
        let (address, uploads) = (self.address.clone(), self.uploads.clone());
        let work = move |watch: &crate::store::Watch| {
            let asker = Asker { store: &*address.store, uploads: &*uploads, watch };
            asker.ask(&at, |uploads, watch| question(&at, uploads, watch))
        };
        open_detached(work, self.stall, go_on)
    }
}
