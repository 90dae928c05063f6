//! Room on the disk: eviction of the entries that were used least recently, the list of entries, and leftovers.

use super::directory::{Directory, PART};
use super::entry::{data_name, header_of, map_name, OpenedEntry};
use super::folder::{version_in, CacheFolder, LISTS, NAMES, OBJECTS};
use super::key::{is_object_id, lock_byte, object_id};
use super::map::{blocks, boot_tag, slots, MapHeader, BLOCK, SLOT};
use super::open_locks::EVICTING;
use crate::error::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Looks at the free bytes after an eviction, and the time between two.
const LOOKS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(5);
/// The most bytes that stay free without a setting.
const FREE: u64 = 20 << 30;

/// An entry of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryInfo {
    /// The name of its files.
    pub id: String,
    /// The address as people see it.
    pub address: String,
    /// The version of the object.
    pub version: String,
    /// Bytes of the object.
    pub size: u64,
    /// Bytes that are there.
    pub there: u64,
    /// Bytes on the disk that are free when it is removed.
    pub disk: u64,
    /// The data file has another name, in huggingface_hub's cache: its bytes stay as long as that.
    pub linked: bool,
    /// When it was last used.
    pub used: SystemTime,
    /// Somebody has it open.
    pub open: bool,
    /// The data file.
    pub path: PathBuf,
}

/// The entries that [`CacheFolder::prune`] removes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prune {
    /// All.
    All,
    /// The ones that were used least recently, until the others have at most so many bytes.
    ToSize(u64),
    /// The ones that were not used for so long.
    OlderThan(Duration),
    /// The ones whose address begins so.
    Prefix(String),
}

/// The result of [`CacheFolder::prune`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Entries that were removed.
    pub gone: Vec<EntryInfo>,
    /// Entries that stay because somebody has them open.
    pub open: Vec<EntryInfo>,
    /// Entries that were not to be removed.
    pub kept: Vec<EntryInfo>,
}

/// The room of a cache, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheRoom {
    /// Size of its file system.
    pub total: u64,
    /// Bytes of it that this user may still write.
    pub free: u64,
    /// Bytes of it that stay free.
    pub keep: u64,
    /// Most bytes of the cache; `None`: no limit.
    pub most: Option<u64>,
}

/// An entry as eviction sees it.
#[derive(Debug)]
struct Evictable {
    id: String,
    used: SystemTime,
    disk: u64,
    linked: bool,
}

impl CacheFolder {
    /// Evicts entries until so many bytes more fit; false: they do not.
    ///
    /// # Errors
    /// `Timeout`: they do not yet, and another process evicts. `Io`, `Write`.
    pub(crate) fn make_room(&self, bytes: u64) -> Result<bool> {
        self.make_room_beside(bytes, true)
    }

    /// The same. Another process that evicts is waited for only with `wait`.
    pub(super) fn make_room_beside(&self, bytes: u64, wait: bool) -> Result<bool> {
        if !self.is_writable() || self.settings.size.is_some_and(|most| bytes > most) {
            return Ok(false);
        }
        if self.lacking(bytes)? == 0 {
            return Ok(true);
        }
        // Two that evict at once would evict twice as much.
        let evicting = self.hold_byte(EVICTING, wait)?;
        let mut lacking = self.lacking(bytes)?;
        if lacking == 0 {
            return Ok(true);
        }
        if evicting.is_none() {
            let why = "another process is making room in the disk cache";
            return Err(Error::new(ErrorKind::Timeout, why).at(self.path()));
        }
        self.remove_leftovers()?;
        for one in self.evictable()?.into_iter().filter(|one| !one.linked) {
            if lacking == 0 {
                break;
            }
            let CacheRoom { free: before, keep, .. } = self.room()?;
            // The limit of the cache's size counts entries: what the file system has free, others change too.
            let is_tight = bytes.saturating_add(keep) > before;
            if self.evict(&one.id)? {
                // A file that a program has mapped keeps its bytes until that program ends. To evict more would not help.
                if is_tight && !self.is_freed(before.saturating_add(one.disk / 2))? {
                    return Ok(self.lacking(bytes)? == 0);
                }
                lacking = lacking.saturating_sub(one.disk);
            }
        }
        Ok(lacking == 0)
    }

    /// True if so many bytes of the file system are free: the ones of a removed file may be only a moment later.
    fn is_freed(&self, wanted: u64) -> Result<bool> {
        for _ in 0..LOOKS {
            if self.room()?.free >= wanted {
                return Ok(true);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(false)
    }

    /// Bytes that are to be evicted before so many more fit.
    fn lacking(&self, bytes: u64) -> Result<u64> {
        let CacheRoom { free, keep, most, .. } = self.room()?;
        let lacking = bytes.saturating_add(keep).saturating_sub(free);
        let Some(most) = most else { return Ok(lacking) };
        let used: u64 = self.evictable()?.iter().map(|one| one.disk).sum();
        Ok(lacking.max(used.saturating_add(bytes).saturating_sub(most)))
    }

    /// The entries, in the order of their last use.
    pub fn entries(&self) -> Result<Vec<EntryInfo>> {
        let mut found = Vec::new();
        self.each_folder(OBJECTS, |folder| {
            for id in ids(&folder.names()?) {
                found.extend(self.described(folder, &id)?);
            }
            Ok(())
        })?;
        found.sort_by(|one, other| (one.used, &one.id).cmp(&(other.used, &other.id)));
        Ok(found)
    }

    /// Removes entries that nobody has open, and leftovers. With `dry` it removes nothing, and says what would go.
    pub fn prune(&self, how: &Prune, dry: bool) -> Result<Pruned> {
        let mut pruned = Pruned::default();
        if !self.is_writable() && !dry {
            return Err(Error::permission("the disk cache is read-only").at(self.path()));
        }
        if !dry {
            self.remove_leftovers()?;
        }
        let entries = self.entries()?;
        let mut used: u64 = entries.iter().map(|entry| entry.disk).sum();
        let now = SystemTime::now();
        for entry in entries {
            let chosen = match how {
                Prune::All => true,
                Prune::ToSize(most) => used > *most && !entry.linked,
                Prune::OlderThan(age) => now.duration_since(entry.used).is_ok_and(|unused| unused >= *age),
                Prune::Prefix(start) => entry.address.starts_with(start),
            };
            let goes = chosen && if dry { !entry.open } else { self.evict(&entry.id)? };
            if goes {
                used -= entry.disk;
                pruned.gone.push(entry);
            } else if chosen {
                pruned.open.push(entry);
            } else {
                pruned.kept.push(entry);
            }
        }
        if !dry {
            self.forget_names(how)?;
        }
        Ok(pruned)
    }

    /// Compares the bytes of an entry's blocks on the disk with their CRC32C. No use is recorded. Returns how many bytes it
    /// compared, and the blocks that are bad; `None`: there is no such entry any more. With `forget` bad blocks are missing from
    /// now on.
    ///
    /// # Errors
    /// `Io`. `Permission`: a bad block of a read-only cache is to be forgotten.
    pub fn verify(&self, id: &str, blocks: Range<u32>, forget: bool) -> Result<Option<(u64, Vec<Range<u64>>)>> {
        let Some(folder) = is_object_id(id).then(|| self.below(OBJECTS, id, false)).transpose()?.flatten() else {
            return Ok(None);
        };
        match self.opened(&folder, id, self.is_writable())? {
            OpenedEntry::Entry(entry) => entry.verify_run(blocks, forget).map(Some),
            _ => Ok(None),
        }
    }

    /// Removes an entry; false: somebody has it open or makes it.
    fn evict(&self, id: &str) -> Result<bool> {
        let Some(_removing) = self.hold_byte(lock_byte(id), false)? else { return Ok(false) };
        match self.below(OBJECTS, id, false)? {
            Some(folder) => self.remove(&folder, id),
            None => Ok(false),
        }
    }

    /// The entries with a map and data, least recently used first.
    fn evictable(&self) -> Result<Vec<Evictable>> {
        let mut found = Vec::new();
        self.each_folder(OBJECTS, |folder| {
            for id in ids(&folder.names()?) {
                let Some((_, map, _)) = taken(folder.open(&map_name(&id), false))? else { continue };
                let Some((_, data, _)) = taken(folder.open(&data_name(&id), false))? else { continue };
                let used = map.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                found.push(Evictable { id, used, disk: freed(&data), linked: data.nlink() > 1 });
            }
            Ok(())
        })?;
        found.sort_by(|one, other| (one.used, &one.id).cmp(&(other.used, &other.id)));
        Ok(found)
    }

    /// Removes files that belong to no whole entry and that nobody is making.
    fn remove_leftovers(&self) -> Result<()> {
        self.each_folder(OBJECTS, |folder| {
            let names: BTreeSet<String> = folder.names()?.into_iter().collect();
            let of: BTreeSet<&str> = names.iter().filter_map(|name| Some(name.split_once('.')?.0)).collect();
            for id in of.into_iter().filter(|id| is_object_id(id)) {
                let parts = [map_name(id), data_name(id)].map(|name| format!("{name}{PART}"));
                let is_whole = || whole(folder, id).map(|found| found.is_some());
                if is_whole()? && !parts.iter().any(|part| names.contains(part)) {
                    continue;
                }
                let Some(_removing) = self.hold_byte(lock_byte(id), false)? else { continue };
                if !is_whole()? {
                    self.remove(folder, id)?;
                }
                for part in &parts {
                    folder.remove(part).map_err(|e| Error::write("remove", &e).at(folder.path().join(part)))?;
                }
            }
            Ok(())
        })
    }

    /// Removes versions whose entry is gone, and with [`Prune::All`] the listings.
    fn forget_names(&self, how: &Prune) -> Result<()> {
        self.each_folder(NAMES, |folder| {
            for name in folder.names()? {
                if !self.names_an_entry(folder, &name)? {
                    self.remove_small(folder, &name)?;
                }
            }
            Ok(())
        })?;
        if let Some(lists) = self.root.folder(LISTS, false)?.filter(|_| *how == Prune::All) {
            for name in lists.names()? {
                self.remove_small(&lists, &name)?;
            }
        }
        Ok(())
    }

    fn remove_small(&self, folder: &Directory, name: &str) -> Result<()> {
        let Some(_removing) = self.hold_byte(lock_byte(name), false)? else { return Ok(()) };
        folder.remove(name).map(drop).map_err(|e| Error::write("remove", &e).at(folder.path().join(name)))
    }

    fn names_an_entry(&self, folder: &Directory, name: &str) -> Result<bool> {
        let Some((version, size)) = taken(version_in(folder, name))? else { return Ok(false) };
        let mut key = [0; 32];
        for (at, byte) in key.iter_mut().enumerate() {
            match name.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
                Some(value) => *byte = value,
                None => return Ok(false),
            }
        }
        let id = object_id(&key, &version, size);
        match self.below(OBJECTS, &id, false)? {
            Some(folder) => Ok(taken(folder.open(&map_name(&id), false))?.is_some()),
            None => Ok(false),
        }
    }

    /// The entry of this name, with the bytes that are there; `None`: its files are not whole.
    fn described(&self, folder: &Directory, id: &str) -> Result<Option<EntryInfo>> {
        let Some(WholeEntry { map, map_found, data_found, header, first_slot }) = whole(folder, id)? else {
            return Ok(None);
        };
        let failed = |e: io::Error| Error::io("read the map", &e).at(folder.path().join(map_name(id)));
        let count = u64::from(blocks(header.size));
        let (mut bytes, mut there, mut at) = (vec![0; 64 << 10], 0, 0);
        while at < count {
            let part = (bytes.len() as u64 / SLOT).min(count - at);
            let read = &mut bytes[..(part * SLOT) as usize];
            map.read_exact_at(read, first_slot + at * SLOT).map_err(failed)?;
            let is_there = (at..).zip(slots(read, boot_tag())).filter(|(_, slot)| slot.crc().is_some());
            there += is_there.map(|(block, _)| BLOCK.min(header.size - block * BLOCK)).sum::<u64>();
            at += part;
        }
        Ok(Some(EntryInfo {
            id: id.to_owned(),
            address: header.address,
            version: header.version,
            size: header.size,
            there,
            disk: freed(&data_found),
            linked: data_found.nlink() > 1,
            used: map_found.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            open: self.is_open(id)?,
            path: folder.path().join(data_name(id)),
        }))
    }

    fn each_folder(&self, name: &str, mut each: impl FnMut(&Directory) -> Result<()>) -> Result<()> {
        let Some(folder) = self.root.folder(name, false)? else { return Ok(()) };
        for name in folder.names()?.into_iter().filter(|name| name.len() == 2) {
            if let Some(folder) = taken(folder.folder(&name, false))? {
                each(&folder)?;
            }
        }
        Ok(())
    }

    /// The room for the cache.
    pub fn room(&self) -> Result<CacheRoom> {
        // SAFETY: all zeros are a valid `statvfs`.
        let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: one structure is written.
        if unsafe { libc::fstatvfs(self.root.file().as_raw_fd(), &raw mut found) } != 0 {
            return Err(Error::io("ask for free room", &io::Error::last_os_error()).at(self.path()));
        }
        let total = found.f_blocks.saturating_mul(found.f_frsize);
        let keep = self.settings.free.unwrap_or((total / 10).min(FREE));
        Ok(CacheRoom { total, free: found.f_bavail.saturating_mul(found.f_frsize), keep, most: self.settings.size })
    }
}

/// Bytes that are free when a data file is removed: none as long as huggingface_hub's cache has it too.
fn freed(data: &Metadata) -> u64 {
    if data.nlink() > 1 {
        0
    } else {
        data.blocks() * 512
    }
}

/// A file or folder; one that the cache refuses is as one that is not there.
fn taken<T>(opened: Result<Option<T>>) -> Result<Option<T>> {
    match opened {
        Err(e) if e.kind() == ErrorKind::Permission => Ok(None),
        opened => opened,
    }
}

/// The names of entries that have a map.
fn ids(names: &[String]) -> Vec<String> {
    let id = |name: &String| name.strip_suffix(".map").filter(|id| is_object_id(id)).map(str::to_owned);
    names.iter().filter_map(id).collect()
}

/// An entry whose files are whole.
struct WholeEntry {
    map: File,
    map_found: Metadata,
    data_found: Metadata,
    header: MapHeader,
    first_slot: u64,
}

/// The entry of this name; `None`: its files are not whole.
fn whole(folder: &Directory, id: &str) -> Result<Option<WholeEntry>> {
    let Some((map, map_found, _)) = taken(folder.open(&map_name(id), false))? else { return Ok(None) };
    let Some((_, data_found, _)) = taken(folder.open(&data_name(id), false))? else { return Ok(None) };
    let failed = |e: io::Error| Error::io("read the map", &e).at(folder.path().join(map_name(id)));
    let Ok((header, first_slot)) = header_of(&map).map_err(failed)? else { return Ok(None) };
    let is_whole = map_found.len() == first_slot + u64::from(blocks(header.size)) * SLOT
        && data_found.len() == header.size
        && object_id(&header.key, &header.version, header.size) == id;
    Ok(is_whole.then_some(WholeEntry { map, map_found, data_found, header, first_slot }))
}
