//! The cache's folder: who may use it, and the way from a location to its entry.

use super::access::Access;
use super::beats::{Beats, BEATS};
use super::directory::{made_as, make_folder, refused, set_mode, Directory, PART};
use super::entry::{data_name, map_name, CacheEntry, OpenedEntry};
use super::key::{lock_byte, object_id, CacheKey};
use super::lock::{held, retried, retried_for, ByteLock, PATIENCE};
use super::map::{MapHeader, FORMAT};
use super::open_locks::{open_byte, OpenLocks, EVICTING};
use crate::error::{Error, ErrorKind, Result};
use crate::store::facts::{facts_of, FsKind};
use serde_json::{json, Value};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The file that says that a folder is a cache, and in which format.
pub(super) const MARKER: &str = "penstock-disk-cache";
/// Its first line, before the number of the format.
const MARKED: &str = "penstock disk cache, format ";
/// Longest wait for another process that makes the marker. Without it the load fails, and a busy disk may take seconds for it.
const MARKING: Duration = Duration::from_secs(10);
/// The byte of the marker whose holder makes the file of beats: the last one.
const MAKING_BEATS: u64 = (1 << 63) - 2;
/// The folder of entries.
pub(super) const OBJECTS: &str = "objects";
/// The folder of versions.
pub(super) const NAMES: &str = "names";
/// The folder of listings.
pub(super) const LISTS: &str = "lists";
/// Bytes of the longest version that is kept, with its address.
const MOST_NAME: u64 = 64 << 10;
/// Bytes of the longest listing that is kept.
const MOST_LIST: u64 = 16 << 20;

/// The settings of a disk cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskCacheSettings {
    /// The folder, which is made if its parent is there.
    pub folder: PathBuf,
    /// Most bytes of all data files. `None`: no limit.
    pub size: Option<u64>,
    /// Bytes of the file system that stay free. `None`: the smaller of 10% of it and 20 GiB.
    pub free: Option<u64>,
    /// The folder's group may write.
    pub shared: bool,
    /// Loads compare the blocks that they take with their CRC32C.
    pub verify: bool,
    /// Blocks that found no room to be written are received again afterwards.
    pub refetch: bool,
}

/// The folder of a disk cache, open.
#[derive(Debug)]
pub struct CacheFolder {
    pub(super) root: Directory,
    pub(super) settings: DiskCacheSettings,
    writable: bool,
    private: bool,
    /// The locks of the open entries of the process that opened the folder; `None`: there is no marker, and so no entry.
    locks: Option<Arc<OpenLocks>>,
    /// Beats of the processes that use it; `None`: it has no such file.
    pub(super) beats: Option<Beats>,
}

/// The end of a wait for the lock under which something is made.
enum MakingTurn<T> {
    /// Another process has made it, and may have the lock still.
    Found(T),
    /// This process is to make it.
    Ours(ByteLock),
}

impl CacheFolder {
    /// Opens the folder, and makes it if it is not there. A folder that this process cannot write is a read-only cache.
    ///
    /// # Errors
    /// `Permission`: others may write to it, or it is another user's. `Unsupported`: a network file system, or another format.
    /// `Invalid`: there are other files in it.
    pub fn open(settings: &DiskCacheSettings) -> Result<Arc<CacheFolder>> {
        let (path, file) = opened(&settings.folder, settings.shared).map_err(|e| e.at(&settings.folder))?;
        let failed = |e: Error| e.at(&path);
        let found = file.metadata().map_err(|e| failed(Error::io("stat", &e)))?;
        let access = match settings.shared {
            false => Access::own(),
            true => Access::shared(&found).map_err(|why| failed(refused(&why)))?,
        };
        // An overlay says only of a file where it is.
        check_file_system(&file, &path, false)?;
        let root = Directory::new(file, path.clone(), access)?;
        let marker = match marked(&root)? {
            Some(marker) => Some(marker),
            None if root.is_writable() => Some(mark(&root)?),
            None => None,
        };
        let (mut writable, mut locks) = (false, None);
        if let Some((marker, may_write)) = marker {
            check_file_system(&marker, &path.join(MARKER), true)?;
            let none = |e: io::Error| Error::io("use locks of open files (F_OFD_GETLK)", &e).at(path.join(MARKER));
            held(&marker, EVICTING..EVICTING + 1).map_err(none)?;
            writable = may_write && root.is_writable();
            locks = Some(OpenLocks::new(marker));
        }
        for name in [OBJECTS, NAMES, LISTS] {
            let folder = root.folder(name, writable)?;
            writable &= folder.is_some_and(|folder| folder.is_writable());
        }
        let private = access.is_private(&found);
        let mut folder = CacheFolder { root, settings: settings.clone(), writable, private, locks, beats: None };
        // Without it, processes see only the blocks that others bring.
        folder.beats = folder.opened_beats().unwrap_or_default();
        Ok(Arc::new(folder))
    }

    /// The absolute path.
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// True if this process may write to it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// True if this user and root alone may write to it.
    pub fn is_private(&self) -> bool {
        self.private
    }

    /// The file of beats, made if it is not there.
    fn opened_beats(&self) -> Result<Option<Beats>> {
        let found = Beats::open(&self.root, self.writable)?;
        if found.is_some() || !self.writable {
            return Ok(found);
        }
        let _making = match self.turn(MAKING_BEATS, || Beats::open(&self.root, true))? {
            Some(MakingTurn::Found(beats)) => return Ok(Some(beats)),
            Some(MakingTurn::Ours(lock)) => lock,
            None => return Ok(None),
        };
        if let Some(made) = Beats::open(&self.root, true)? {
            return Ok(Some(made));
        }
        Beats::make(&self.root)?;
        Beats::open(&self.root, true)
    }

    /// The version and the size that a location had last.
    pub(crate) fn known(&self, key: &CacheKey) -> Result<Option<(String, u64)>> {
        let name = key.name();
        match self.below(NAMES, &name, false)? {
            Some(folder) => version_in(&folder, &name),
            None => Ok(None),
        }
    }

    /// Records the version and the size of a location.
    pub(crate) fn note(&self, key: &CacheKey, version: &str, size: u64) -> Result<()> {
        if self.known(key)?.is_some_and(|known| known == (version.to_owned(), size)) {
            return Ok(());
        }
        let bytes = json!({"address": key.shown, "version": version, "size": size}).to_string();
        if bytes.len() as u64 > MOST_NAME {
            return Ok(());
        }
        let name = key.name();
        match self.below(NAMES, &name, self.writable)? {
            Some(folder) if self.writable => self.replace(&folder, &name, bytes.as_bytes()),
            _ => Ok(()),
        }
    }

    /// Records a listing.
    pub(crate) fn note_list(&self, key: &CacheKey, names: &[String]) -> Result<()> {
        let bytes = json!([key.shown, names]).to_string();
        let Some(folder) = self.root.folder(LISTS, false)?.filter(|_| self.writable) else { return Ok(()) };
        if bytes.len() as u64 > MOST_LIST
            || folder.read(&key.name(), MOST_LIST)?.is_some_and(|old| old == bytes.as_bytes())
        {
            return Ok(());
        }
        self.replace(&folder, &key.name(), bytes.as_bytes())
    }

    /// The last listing.
    pub(crate) fn list(&self, key: &CacheKey) -> Result<Option<Vec<String>>> {
        let Some(folder) = self.root.folder(LISTS, false)? else { return Ok(None) };
        let Some(bytes) = folder.read(&key.name(), MOST_LIST)? else { return Ok(None) };
        Ok(listed(&bytes))
    }

    /// The entry of an object, opened; `None`: it is not there. The use is recorded.
    pub(crate) fn find(&self, key: &CacheKey, version: &str, size: u64) -> Result<Option<Arc<CacheEntry>>> {
        let id = object_id(&key.hash, version, size);
        let Some(folder) = self.below(OBJECTS, &id, false)? else { return Ok(None) };
        match self.opened(&folder, &id, self.writable)? {
            OpenedEntry::Entry(entry) if is_of(&entry, key, version, size) => {
                entry.touch();
                Ok(Some(Arc::from(entry)))
            }
            _ => Ok(None),
        }
    }

    /// The entry of an object, opened, and made if it is not there.
    ///
    /// # Errors
    /// `Permission`: it is not there, and the cache is read-only. `NoSpace`. `Timeout`: another process is making it, and is
    /// stopped. `Unsupported`: the cache takes no such object.
    pub(crate) fn find_or_make(&self, key: &CacheKey, version: &str, size: u64) -> Result<Arc<CacheEntry>> {
        if let Some(entry) = self.find(key, version, size)? {
            return Ok(entry);
        }
        let id = object_id(&key.hash, version, size);
        let path = || self.root.path().join(OBJECTS).join(&id[..2]).join(map_name(&id));
        let folder = self.below(OBJECTS, &id, self.writable)?.filter(|_| self.writable);
        let folder = folder.ok_or_else(|| refused("the cache is read-only, and has no such object").at(path()))?;
        // An entry that is looked for is open for a moment, and its maker could not replace it.
        let find = || match folder.open(&map_name(&id), false)? {
            Some(_) => self.find(key, version, size),
            None => Ok(None),
        };
        let stopped = || format!("another process has been making it for {} s", PATIENCE.as_secs());
        match self.turn(lock_byte(&id), find)? {
            Some(MakingTurn::Found(entry)) => Ok(entry),
            Some(MakingTurn::Ours(_making)) => {
                let (address, version, made) = (key.shown.clone(), version.to_owned(), SystemTime::now());
                let header = MapHeader { key: key.hash, size, address, version, made };
                self.made(&folder, &id, &header).map_err(|e| e.at(path()))
            }
            None => Err(Error::new(ErrorKind::Timeout, stopped()).at(path())),
        }
    }

    /// The entry of this name and header, opened, and made if it is not there. The caller holds its lock of making.
    fn made(&self, folder: &Directory, id: &str, header: &MapHeader) -> Result<Arc<CacheEntry>> {
        let is_it =
            |found: &MapHeader| (found.key, &found.version, found.size) == (header.key, &header.version, header.size);
        let why = match self.opened(folder, id, true)? {
            OpenedEntry::Entry(entry) if is_it(entry.header()) => return Ok(Arc::from(entry)),
            OpenedEntry::Entry(_) => "it is of another object".to_owned(),
            OpenedEntry::Leftover(why) => why,
            OpenedEntry::Nothing => "it has no map".to_owned(),
        };
        // A process that looks for it has it open for a moment.
        if retried(|| Ok::<_, Error>(self.remove(folder, id)?.then_some(())))?.is_none() {
            return Err(refused(&format!("{why}, and another process has it open")));
        }
        CacheEntry::make(folder, id, header)?;
        // Eviction takes the lock of making too: it cannot have removed the entry.
        match self.opened(folder, id, true)? {
            OpenedEntry::Entry(entry) => Ok(Arc::from(entry)),
            other => Err(Error::new(ErrorKind::Internal, format!("a new entry of the disk cache is gone: {other:?}"))),
        }
    }

    /// The entry of this name, opened.
    pub(super) fn opened(&self, folder: &Directory, id: &str, write: bool) -> Result<OpenedEntry> {
        let Some(locks) = &self.locks else { return Ok(OpenedEntry::Nothing) };
        if locks.is_own() {
            return CacheEntry::open(locks, folder, id, write);
        }
        // A forked child: the locks of this file are the parent's
        let Some((marker, ..)) = self.root.open(MARKER, write)? else { return Ok(OpenedEntry::Nothing) };
        CacheEntry::open(&OpenLocks::new(marker), folder, id, write)
    }

    /// True if an entry is open anywhere.
    pub(super) fn is_open(&self, id: &str) -> Result<bool> {
        let Some((marker, ..)) = self.root.open(MARKER, false)? else { return Ok(false) };
        let byte = open_byte(id);
        let held = held(&marker, byte..byte + 1)
            .map_err(|e| Error::io("ask for locks", &e).at(self.root.path().join(MARKER)))?;
        Ok(held.is_some())
    }

    /// Removes the files of an entry, and their leftovers; false: somebody has it open. The caller holds its lock of making.
    pub(super) fn remove(&self, folder: &Directory, id: &str) -> Result<bool> {
        let (data, map) = (data_name(id), map_name(id));
        let failed = |e: io::Error| Error::write("remove", &e).at(folder.path().join(&map));
        let had_map = {
            let Some(_closed) = self.hold_byte(open_byte(id), false)? else { return Ok(false) };
            folder.remove(&map).map_err(failed)?
        };
        // Without a map nobody opens it. A process that looks for it now need not wait for the disk.
        if had_map {
            // btrfs and f2fs may keep a new data file through a loss of power and not the removal of the old map before it.
            // That map would call blocks synced that the new file does not have.
            folder.sync().map_err(failed)?;
        }
        for name in [&data, &format!("{map}{PART}"), &format!("{data}{PART}")] {
            folder.remove(name).map_err(failed)?;
        }
        Ok(true)
    }

    /// The folder of files with this name, below one of the cache's folders.
    pub(super) fn below(&self, folder: &str, name: &str, make: bool) -> Result<Option<Directory>> {
        match self.root.folder(folder, false)? {
            Some(folder) => folder.folder(&name[..2], make),
            None => Ok(None),
        }
    }

    /// The lock of making and removing the files of this hexadecimal name; `None`: another process holds it for long.
    pub(super) fn hold(&self, name: &str) -> Result<Option<ByteLock>> {
        self.hold_byte(lock_byte(name), true)
    }

    /// Waits for the lock under which something is made, or until another process has made it: that one may be slow to unlock
    /// it, and others want it too. `None`: another process holds the lock for long.
    fn turn<T>(&self, byte: u64, find: impl Fn() -> Result<Option<T>>) -> Result<Option<MakingTurn<T>>> {
        retried(|| match self.hold_byte(byte, false)? {
            Some(lock) => Ok(Some(MakingTurn::Ours(lock))),
            None => Ok(find()?.map(MakingTurn::Found)),
        })
    }

    /// A lock on a byte of the marker. With `wait` it is tried for as long as [`PATIENCE`].
    pub(super) fn hold_byte(&self, byte: u64, wait: bool) -> Result<Option<ByteLock>> {
        let failed = |e: io::Error| Error::io("lock", &e).at(self.root.path().join(MARKER));
        let attempt = || {
            // Two threads of this process must exclude each other too: each opens the file by itself.
            let Some((marker, _, true)) = self.root.open(MARKER, true)? else {
                return Err(refused("its marker is gone").at(self.root.path().join(MARKER)));
            };
            ByteLock::take(marker, byte).map_err(failed)
        };
        if wait {
            retried(attempt)
        } else {
            attempt()
        }
    }

    fn replace(&self, folder: &Directory, name: &str, bytes: &[u8]) -> Result<()> {
        match self.hold(name)? {
            Some(_writing) => folder.replace(name, bytes),
            // Another process writes the same at this moment.
            None => Ok(()),
        }
    }
}

fn is_of(entry: &CacheEntry, key: &CacheKey, version: &str, size: u64) -> bool {
    let header = entry.header();
    header.key == key.hash && header.version == version && header.size == size
}

/// The version and the size in the file of `names` with this name.
pub(super) fn version_in(folder: &Directory, name: &str) -> Result<Option<(String, u64)>> {
    Ok(folder.read(name, MOST_NAME)?.as_deref().and_then(named))
}

/// The version and the size in the bytes of such a file.
fn named(bytes: &[u8]) -> Option<(String, u64)> {
    let json: Value = serde_json::from_slice(bytes).ok()?;
    Some((json["version"].as_str()?.to_owned(), json["size"].as_u64()?))
}

/// The names in a file of `lists`: its address, and the names.
fn listed(bytes: &[u8]) -> Option<Vec<String>> {
    serde_json::from_slice(bytes).ok().map(|(_, names): (String, Vec<String>)| names)
}

/// The folder, made if it is not there, and its path without links.
fn opened(named: &Path, shared: bool) -> Result<(PathBuf, File)> {
    let failed = |e: io::Error| Error::write("make the folder", &e);
    if fs::symlink_metadata(named).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        let parent = named.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = named.file_name().unwrap_or_default().as_bytes();
        let mode = if shared { 0o2770 } else { 0o700 };
        let made = || {
            fs::create_dir_all(parent)?;
            let within = File::options().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(parent)?;
            make_folder(&within, name, |folder| set_mode(folder, mode))
        };
        made().map_err(failed)?;
    }
    let failed = |e: io::Error| Error::io("open the folder", &e);
    let path = fs::canonicalize(named).map_err(failed)?;
    let file = Directory::at(&path).map_err(failed)?;
    Ok((path, file))
}

/// Refuses a file system without locks that all users of the cache see. `whole`: an overlay too.
fn check_file_system(file: &File, path: &Path, whole: bool) -> Result<()> {
    let own = file.try_clone().map_err(|e| Error::io("duplicate a descriptor", &e).at(path))?;
    let facts = facts_of(&OwnedFd::from(own), path)?;
    if facts.kind != FsKind::Network || (facts.fs == "overlay" && !whole) {
        return Ok(());
    }
    let why = "is on the network, of another process or unknown: its locks may not hold everywhere";
    let why = format!("the disk cache refuses it: its file system ({}) {why}", facts.fs);
    Err(Error::new(ErrorKind::Unsupported, why).at(path))
}

/// The marker of a cache of this format, and whether it may be written; `None`: the folder is empty.
fn marked(root: &Directory) -> Result<Option<(File, bool)>> {
    let path = root.path().join(MARKER);
    let marker = root.open(MARKER, true)?;
    // A loss of power can leave it empty: then it is made again.
    let is_empty = marker.as_ref().is_some_and(|(_, found, _)| found.len() == 0);
    if let Some((marker, _, writable)) = marker.filter(|_| !is_empty) {
        let bytes = root.read(MARKER, 4096)?.unwrap_or_default();
        let format = std::str::from_utf8(&bytes).ok().and_then(|text| text.strip_prefix(MARKED)).map(str::trim_end);
        return match format {
            Some(format) if format == FORMAT.to_string() => Ok(Some((marker, writable))),
            Some(format) => {
                let next = "name another folder, or empty this one";
                let why = format!("the disk cache has format {format}, and this version of penstock {FORMAT}: {next}");
                Err(Error::new(ErrorKind::Unsupported, why).at(path))
            }
            None => Err(Error::invalid("the disk cache refuses it: it is no marker of a disk cache").at(path)),
        };
    }
    // A disk of its own has `lost+found`. Another process may be making the marker, or have made it since.
    let is_own = |name: &str| is_empty && [OBJECTS, NAMES, LISTS, BEATS].contains(&made_as(name));
    let is_other = |name: &String| name != "lost+found" && !is_own(name) && made_as(name) != MARKER;
    let names = root.names()?;
    if !is_empty && root.open(MARKER, false)?.is_some() {
        // It has been made since, and perhaps the folders too: a list that was read meanwhile may have these alone.
        return marked(root);
    }
    match names.into_iter().find(is_other) {
        None => Ok(None),
        Some(name) => {
            let why = format!("the folder is no disk cache and not empty: {name:?} is in it");
            Err(Error::invalid(format!("the disk cache refuses it: {why}")).at(root.path()))
        }
    }
}

/// Makes the marker. Processes that do so at once wait for each other, until one of them has made it.
fn mark(root: &Directory) -> Result<(File, bool)> {
    let path = root.path();
    let own = Directory::at(path).map_err(|e| Error::io("open the folder", &e).at(path))?;
    let attempt = || {
        // SAFETY: a plain system call on a descriptor that is held here.
        match unsafe { libc::flock(own.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
            0 => Ok(Some(None)),
            _ => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EWOULDBLOCK) => Ok(marked(root)?.map(Some)),
                e => Err(Error::io("lock the folder", &e).at(path)),
            },
        }
    };
    match retried_for(MARKING, attempt)? {
        Some(Some(made)) => return Ok(made),
        Some(None) => {}
        None => {
            let stopped = format!("another process has been making the disk cache for {} s", MARKING.as_secs());
            return Err(Error::new(ErrorKind::Timeout, stopped).at(path));
        }
    }
    if marked(root)?.is_none() {
        root.replace(MARKER, format!("{MARKED}{FORMAT}\n").as_bytes())?;
    }
    marked(root)?.ok_or_else(|| Error::new(ErrorKind::Internal, "the marker of the disk cache is gone").at(path))
}
