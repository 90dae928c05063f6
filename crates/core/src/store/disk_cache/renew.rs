//! A new data file for an entry, in place of one that huggingface_hub's cache has too.
//!
//! A block of such a file that was found bad is fetched again. It is not written in place: programs that read the Hub's file, or
//! have it mapped, would see the write. To remove the Hub's name first would not help those, and other programs would lack the
//! file. So the entry gets a copy of the other blocks, and the old file is the Hub's alone. When the entry is whole again,
//! `publish` gives the Hub's name to the new file, in one step.

use super::directory::{Directory, PART};
use super::entry::{check_limit, data_name, map_name, reserve, CacheEntry, OpenedEntry};
use super::folder::{CacheFolder, OBJECTS};
use super::lock::retried;
use super::map::{boot_tag, Slot, SLOT};
use crate::error::{Error, ErrorKind, Result};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

impl CacheFolder {
    /// The entry with a new data file, which has all blocks of the old one that have their CRC32C. Nobody else has the entry
    /// open meanwhile. `entry` keeps the old files, whose names are gone.
    ///
    /// # Errors
    /// `Timeout`: somebody else has it open or makes it. `Limit`, `NoSpace`: there is no room for the copy.
    pub(super) fn renew(&self, entry: &CacheEntry) -> Result<Arc<CacheEntry>> {
        let id = entry.id();
        let at = |e: Error| e.at(entry.data_path());
        let in_use = || at(Error::new(ErrorKind::Timeout, "others have it open, and it has to be replaced"));
        // A process that only looks for it has it open for a moment.
        retried(|| Ok::<_, Error>((!entry.is_open_elsewhere()).then_some(())))?.ok_or_else(in_use)?;
        if !self.make_room(entry.size())? {
            let why = "the disk cache has no room for a copy of a file that huggingface_hub's cache has too";
            return Err(at(Error::new(ErrorKind::Limit, why)));
        }
        let gone = || at(Error::new(ErrorKind::NotFound, "the folder of the entry is gone"));
        let folder = self.below(OBJECTS, &id, false)?.ok_or_else(gone)?;
        let _making = self.hold(&id)?.ok_or_else(in_use)?;
        let parts = Parts { folder: &folder, data: data_name(&id), map: map_name(&id) };
        parts.remove().map_err(|e| at(Error::write("remove", &e)))?;
        let slots = parts.copy_blocks(entry)?;
        parts.make_map(entry, &slots)?;
        let named = retried(|| entry.alone(|| parts.name()))?.ok_or_else(in_use)?;
        named.map_err(|e| at(Error::write("rename", &e)))?;
        match self.opened(&folder, &id, true)? {
            OpenedEntry::Entry(entry) => Ok(Arc::from(entry)),
            _ => Err(gone()),
        }
    }
}

/// The new files, before they have their names. What is left of them is removed with it.
struct Parts<'f> {
    folder: &'f Directory,
    data: String,
    map: String,
}

impl Parts<'_> {
    fn part(name: &str) -> String {
        format!("{name}{PART}")
    }

    fn remove(&self) -> io::Result<()> {
        [&self.data, &self.map].into_iter().try_for_each(|name| self.folder.remove(&Self::part(name)).map(drop))
    }

    /// Copies the blocks of an entry that have their CRC32C. Returns the new slots; the bytes are on the disk.
    fn copy_blocks(&self, entry: &CacheEntry) -> Result<Vec<u8>> {
        let name = Self::part(&self.data);
        let path = self.folder.path().join(&name);
        let failed = |e: io::Error| Error::write("write a copy", &e).at(&path);
        check_limit(entry.size()).map_err(failed)?;
        let file = self.folder.make(&name).map_err(failed)?;
        file.set_len(entry.size()).map_err(failed)?;
        let mut slots = Vec::with_capacity((u64::from(entry.blocks()) * SLOT) as usize);
        for (block, sum) in (0..).zip(entry.checksums()?) {
            let range = entry.range(block);
            let mut bytes = vec![0; (range.end - range.start) as usize];
            // A block that the disk does not give is as bad as one with other bytes.
            let is_good =
                |bytes: &mut [u8], sum| entry.read(range.clone(), bytes).is_ok() && crc32c::crc32c(bytes) == sum;
            let sum = sum.filter(|sum| is_good(&mut bytes, *sum));
            if sum.is_some() {
                file.write_all_at(&bytes, range.start).map_err(failed)?;
            }
            slots.extend(sum.map_or(Slot::Missing, Slot::Synced).encode(boot_tag()));
        }
        file.sync_all().map_err(failed)?;
        Ok(slots)
    }

    fn make_map(&self, entry: &CacheEntry, slots: &[u8]) -> Result<()> {
        let name = Self::part(&self.map);
        let failed = |e: io::Error| Error::write("write a map", &e).at(self.folder.path().join(&name));
        let header = entry.header().encode().ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        let made = || {
            let file = self.folder.make(&name)?;
            let size = (header.len() + slots.len()) as u64;
            file.set_len(size)?;
            reserve(&file, size)?;
            file.write_all_at(&header, 0)?;
            file.write_all_at(slots, header.len() as u64)?;
            file.sync_all()
        };
        made().map_err(failed)
    }

    /// Gives them the names of the old files. A process that is killed, or a loss of power, leaves the old map, none, or the new
    /// one with its data, and never a map with other data.
    fn name(&self) -> io::Result<()> {
        let Parts { folder, data, map } = self;
        folder.remove(map)?;
        folder.sync()?;
        folder.rename(&Self::part(data), data)?;
        folder.sync()?;
        folder.rename(&Self::part(map), map)
    }
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        let _left_behind = self.remove();
    }
}
