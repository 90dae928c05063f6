//! A folder that may become a disk cache: `penstock serve` is often started before the first load of a node.

use crate::cache::Cache;
use crate::folder::Folder;
use crate::name::Name;
use crate::served::{Found, Served};
use penstock::store::is_disk_cache;
use penstock::Result;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A folder. As soon as a load has made a disk cache of it, its objects are served, and its files no longer.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    shared: bool,
    folder: Folder,
    cache: OnceLock<Cache>,
}

impl Place {
    /// Opens it. `shared`: the group of a disk cache may write to it.
    ///
    /// # Errors
    /// The errors of [`Folder::open`] and [`Cache::open`].
    pub fn open(path: &Path, shared: bool) -> Result<Place> {
        let folder = Folder::open(path)?;
        let place = Place { path: path.to_path_buf(), shared, folder, cache: OnceLock::new() };
        place.cache()?;
        Ok(place)
    }

    /// The cache, if the folder is one by now.
    fn cache(&self) -> Result<Option<&Cache>> {
        if self.cache.get().is_none() && is_disk_cache(&self.path) {
            let cache = Cache::open(&self.path, self.shared)?;
            return Ok(Some(self.cache.get_or_init(|| cache)));
        }
        Ok(self.cache.get())
    }
}

impl Served for Place {
    fn find(&self, name: &Name) -> io::Result<Found> {
        match self.cache().map_err(io::Error::other)? {
            Some(cache) => cache.find(name),
            None => self.folder.find(name),
        }
    }

    fn descriptors(&self) -> u64 {
        Cache::DESCRIPTORS
    }
}
