//! The layout of huggingface_hub's cache, and the way of a whole object into it: either program then finds what the other one
//! fetched.
//!
//! ```text
//! CACHE/models--ORG--NAME/blobs/DIGEST              the bytes: a hard link to the data file, or a copy on another file system
//! CACHE/models--ORG--NAME/snapshots/COMMIT/PATH     a link to ../../blobs/DIGEST; without symbolic links the file itself
//! CACHE/models--ORG--NAME/refs/REVISION             the commit
//! CACHE/.locks/models--ORG--NAME/DIGEST.lock        the lock of huggingface_hub for the blob (flock)
//! ```
//!
//! The name of a blob is the SHA-256 of its bytes for LFS files, and git's SHA-1 for others. Bytes with another digest get no
//! name there. Each file has a name of Penstock's first, which huggingface_hub takes for a download that has not ended. Then
//! it is renamed. Nothing is removed, except names of Penstock's own. `.no_exist` and `trees`, answers of the Hub that
//! huggingface_hub keeps, stay as they are.

use super::entry::read_up_to;
use super::lock::retried;
use super::map::{hex, random, BLOCK};
use super::CacheEntry;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Anonymous;
use crate::options::PAGE;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{symlink, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The part of a name that says that it is Penstock's, before a number.
const OURS: &str = ".penstock-";
/// The end of names of downloads that have not ended, for huggingface_hub.
const INCOMPLETE: &str = ".incomplete";
/// Files of that kind that nobody has locked are left over when they are so old.
const LEFT_OVER: Duration = Duration::from_secs(60);
/// The most bytes of another file system that stay free.
const FREE: u64 = 20 << 30;
/// Others may write.
const OTHERS: u32 = 0o002;
/// Group or others may write.
const SHARED: u32 = 0o022;

/// The place of a commit of a repository in huggingface_hub's cache.
#[derive(Debug, Clone)]
pub struct HubLayout {
    /// The folder with all repositories.
    pub cache: PathBuf,
    /// The repository: `org/name`, or `name`.
    pub repository: String,
    /// The commit: 40 hexadecimal digits.
    pub commit: String,
    /// The branch or tag that was this commit; `None`: the commit itself was asked for.
    pub revision: Option<String>,
    /// When the Hub said so.
    pub asked: SystemTime,
    /// The files of the commit, by their address.
    pub files: BTreeMap<String, HubFile>,
    /// Snapshots may have symbolic links.
    pub symlinks: bool,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    /// Its path in the repository.
    pub path: String,
    /// SHA-256, or git's SHA-1, in hexadecimal digits.
    pub digest: String,
}

/// Two of the same commit are equal: the time is not compared.
impl PartialEq for HubLayout {
    fn eq(&self, other: &Self) -> bool {
        let HubLayout { cache, repository, commit, revision, files, symlinks, .. } = self;
        (cache, repository, commit, revision, symlinks)
            == (&other.cache, &other.repository, &other.commit, &other.revision, &other.symlinks)
            && files == &other.files
    }
}

impl HubLayout {
    /// The place of the object at this address; `None`: it has none.
    pub(super) fn place(self: &Arc<Self>, address: &str) -> Option<HubPlace> {
        let file = self.files.get(address).filter(|file| file.is_sound())?.clone();
        Some(HubPlace { layout: self.clone(), file, damaged: None })
    }

    fn folder(&self) -> String {
        format!("models--{}", self.repository.replace('/', "--"))
    }

    fn root(&self) -> PathBuf {
        self.cache.join(self.folder())
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.root().join("snapshots").join(commit)
    }
}

impl HubFile {
    /// True if it stays in its folder, and its digest is one.
    fn is_sound(&self) -> bool {
        let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
        self.path.split('/').all(is_part)
            && matches!(self.digest.len(), 40 | 64)
            && self.digest.bytes().all(|letter| matches!(letter, b'0'..=b'9' | b'a'..=b'f'))
    }
}

/// The place of one file in huggingface_hub's cache.
#[derive(Debug)]
pub(super) struct HubPlace {
    layout: Arc<HubLayout>,
    file: HubFile,
    /// The device and the number of a damaged file, which is as if it was not there.
    damaged: Option<(u64, u64)>,
}

/// Goes on, or is an error. It may wait.
pub(super) type GoOn<'g> = &'g dyn Fn() -> Result<()>;

impl HubPlace {
    /// The same place, with the data file to be replaced there: this entry's, which had a bad block.
    pub(super) fn in_place_of(&self, entry: &CacheEntry) -> HubPlace {
        let (layout, file, damaged) = (self.layout.clone(), self.file.clone(), Some(entry.data_identity()));
        HubPlace { layout, file, damaged }
    }

    /// True if a file is there, and not the damaged one.
    fn is_there(&self, path: &Path) -> bool {
        stat_at(path).is_ok_and(|found| Some((found.dev(), found.ino())) != self.damaged)
    }

    fn blobs(&self) -> PathBuf {
        self.layout.root().join("blobs")
    }

    fn blob(&self) -> PathBuf {
        self.blobs().join(&self.file.digest)
    }

    /// The name that huggingface_hub opens.
    fn pointer(&self) -> PathBuf {
        self.layout.snapshot(&self.layout.commit).join(&self.file.path)
    }

    /// A name of Penstock's own, beside the blobs.
    fn new_name(&self) -> PathBuf {
        self.blobs().join(format!("{}{OURS}{:08x}{INCOMPLETE}", self.file.digest, random()))
    }

    /// Brings the object of a whole entry there, if it is not there.
    ///
    /// # Errors
    /// The reason for which it is not there. `Mismatch`: it has another digest. `Unsupported`, `Permission`: the folder
    /// is not taken, or cannot be written. `NoSpace`. `Timeout`: huggingface_hub is fetching it. Errors of `go_on`.
    pub(super) fn lay(&self, entry: &CacheEntry, is_private: bool, go_on: GoOn<'_>) -> Result<()> {
        if !self.is_there(&self.pointer()) {
            self.prepare()?;
            self.remove_leftovers();
            match self.layout.symlinks && self.is_there(&self.blob()) {
                true => self.locked(|| self.point_to(None))?,
                false => self.bring(entry, is_private, go_on)?,
            }
        }
        self.note_revision()
    }

    /// Makes the folders of the repository. The snapshot has none yet: an empty one would seem to be whole.
    fn prepare(&self) -> Result<()> {
        let (cache, root) = (&self.layout.cache, self.layout.root());
        fs::create_dir_all(cache).map_err(|e| not_made(&e, cache))?;
        check(cache)?;
        for folder in [&root, &root.join("snapshots"), &self.blobs()] {
            match fs::create_dir(folder) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(not_made(&e, folder)),
                _ => check(folder)?,
            }
        }
        Ok(())
    }

    /// Removes names that killed processes have left.
    fn remove_leftovers(&self) {
        let Ok(found) = fs::read_dir(self.blobs()) else { return };
        for path in found.filter_map(|one| Some(one.ok()?.path())) {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if name.contains(OURS) && name.ends_with(INCOMPLETE) && is_left_over(&path, LEFT_OVER) {
                let _gone_already = fs::remove_file(&path);
            }
        }
    }

    fn bring(&self, entry: &CacheEntry, is_private: bool, go_on: GoOn<'_>) -> Result<()> {
        // A loss of power must not leave a name without bytes.
        entry.sync()?;
        let (own, new) = (stat(&*entry.file()?, entry.data_path())?, self.new_name());
        let linked = || fs::hard_link(entry.data_path(), &new);
        let failed = |e: io::Error| Error::write("make a hard link", &e).at(&new);
        let tried = linked();
        remove(&new);
        match tried {
            Err(e) if e.raw_os_error() == Some(libc::EXDEV) => return self.copy(entry, go_on),
            tried => tried.map_err(failed)?,
        }
        may_share(&own, is_private).map_err(|why| Error::new(ErrorKind::Unsupported, why).at(self.blobs()))?;
        self.check_digest(entry, None, go_on)?;
        let placed = linked().map_err(failed).and_then(|()| {
            let now = stat_at(&new)?;
            if (now.dev(), now.ino()) != (own.dev(), own.ino()) {
                return Err(Error::new(ErrorKind::Changed, "the data file was replaced").at(entry.data_path()));
            }
            self.give_mode(entry)?;
            self.locked(|| self.point_to(Some(&new)))
        });
        // Another process may have brought the file meanwhile: then the name was not needed.
        remove(&new);
        placed
    }

    /// Gives the data file the mode that files get here, except that nobody else may write it: it is the cache's too.
    fn give_mode(&self, entry: &CacheEntry) -> Result<()> {
        let probe = self.new_name();
        let found = new_file(&probe).and_then(|file| file.metadata());
        remove(&probe);
        let found = found.map_err(|e| Error::write("make a file", &e).at(&probe))?;
        let mode = fs::Permissions::from_mode(found.mode() & 0o777 & !SHARED);
        entry.file()?.set_permissions(mode).map_err(|e| Error::write("set the mode", &e).at(entry.data_path()))
    }

    /// The same by a copy, where names cannot be shared.
    fn copy(&self, entry: &CacheEntry, go_on: GoOn<'_>) -> Result<()> {
        check_room(&self.blobs(), entry.size())?;
        let new = self.new_name();
        let failed = |e: &io::Error| Error::write("write a copy", e).at(&new);
        let made = new_file(&new).map_err(|e| failed(&e))?;
        let copied = || {
            // It says that somebody is writing. A file system without such locks has only the age to tell.
            let _unlocked = flock(&made);
            self.check_digest(entry, Some(&made), go_on).map_err(|e| e.at(&new))?;
            made.sync_all().map_err(|e| failed(&e))?;
            // SAFETY: a plain system call on a descriptor that is held here. Nobody asked for these pages.
            let _kept = unsafe { libc::posix_fadvise(made.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            self.locked(|| self.point_to(Some(&new)))
        };
        let copied = copied();
        remove(&new);
        copied
    }

    /// Reads the object, and writes it to `into`. An error if it has another digest: then the cache does not have it any more.
    fn check_digest(&self, entry: &CacheEntry, into: Option<&File>, go_on: GoOn<'_>) -> Result<()> {
        let found = digest_of(entry, self.file.digest.len(), into, go_on)?;
        if !entry.is_complete()? {
            return Err(Error::new(ErrorKind::Changed, "a block of it was removed meanwhile").at(entry.data_path()));
        }
        if found == self.file.digest {
            return Ok(());
        }
        let kept = match entry.forget_all() {
            Ok(()) => "forgets them",
            Err(_) => "can only be read, and keeps them",
        };
        let digest = &self.file.digest;
        let text = format!("the server sent other bytes than the Hub names: their digest is {found}, not {digest}");
        let text = format!("{text}. The disk cache {kept}");
        Err(Error::new(ErrorKind::Mismatch, text).with_values(self.file.digest.clone(), found))
    }

    /// Has the pointer lead to the blob. `new` becomes that blob, or, without symbolic links, the pointer itself.
    fn point_to(&self, new: Option<&Path>) -> Result<()> {
        let (blob, pointer, link) = (self.blob(), self.pointer(), self.new_name());
        let folder = pointer.parent().unwrap_or(&pointer);
        fs::create_dir_all(folder).map_err(|e| not_made(&e, folder))?;
        let up = "../".repeat(1 + self.file.path.split('/').count());
        let made = match self.layout.symlinks {
            true => symlink(format!("{up}blobs/{}", self.file.digest), &link).map(|()| true),
            false => Ok(false),
        };
        let has_links = match made {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS)) => false,
            made => made.map_err(|e| Error::write("make a symbolic link", &e).at(&link))?,
        };
        let moved = |from: &Path, to: &Path| fs::rename(from, to).map_err(|e| Error::write("rename", &e).at(to));
        let placed = match new {
            Some(new) if has_links => moved(new, &blob).and_then(|()| moved(&link, &pointer)),
            Some(new) => moved(new, &pointer),
            None if has_links => moved(&link, &pointer),
            None => Err(Error::new(ErrorKind::Unsupported, "its file system has no symbolic links").at(&pointer)),
        };
        // The rename of one name of a file to another one of it leaves both.
        new.into_iter().for_each(remove);
        placed.inspect_err(|_| remove(&link))
    }

    /// Does something under huggingface_hub's lock for the blob, unless the file is there by then.
    fn locked(&self, place: impl FnOnce() -> Result<()>) -> Result<()> {
        let folder = self.layout.cache.join(".locks").join(self.layout.folder());
        fs::create_dir_all(&folder).map_err(|e| not_made(&e, &folder))?;
        let path = folder.join(format!("{}.lock", self.file.digest));
        let failed = |e: io::Error| Error::write("lock", &e).at(&path);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o664).custom_flags(libc::O_NOFOLLOW);
        let lock = options.open(&path).map_err(failed)?;
        let taken = retried(|| flock(&lock).map(|taken| taken.then_some(())));
        match taken {
            _ if self.is_there(&self.pointer()) => Ok(()),
            Ok(None) => {
                let why = "huggingface_hub holds its lock: it is fetching the file itself";
                Err(Error::new(ErrorKind::Timeout, why).at(&path))
            }
            // Without locks the renames still leave whole files only.
            _ => place(),
        }
    }

    /// Writes the commit of the revision, if the cache names none or an older one. An older snapshot that has files which the
    /// new one lacks stays the one that programs find offline.
    fn note_revision(&self) -> Result<()> {
        let HubLayout { revision: Some(revision), commit, asked, .. } = &*self.layout else { return Ok(()) };
        let path = self.layout.root().join("refs").join(revision);
        if let Ok(now) = fs::read_to_string(&path) {
            let is_newer = fs::metadata(&path).and_then(|found| found.modified()).is_ok_and(|time| time > *asked);
            if now == *commit || is_newer || !self.replaces(&now) {
                return Ok(());
            }
        }
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(|e| not_made(&e, folder))?;
        let new = self.new_name();
        let written = || {
            let mut file = new_file(&new)?;
            file.write_all(commit.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        written().map_err(|e| {
            remove(&new);
            Error::write("write the commit", &e).at(&path)
        })
    }

    /// True if the snapshot has all files of the snapshot of an older commit, those excepted that this commit lacks.
    fn replaces(&self, old: &str) -> bool {
        let (before, now) = (self.layout.snapshot(old), self.layout.snapshot(&self.layout.commit));
        let of_commit = |path: &str| self.layout.files.values().any(|file| file.path == path);
        let mut folders = vec![String::new()];
        while let Some(within) = folders.pop() {
            for one in fs::read_dir(before.join(&within)).into_iter().flatten().flatten() {
                let path = format!("{within}{}", one.file_name().to_string_lossy());
                if one.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(format!("{path}/"));
                } else if of_commit(&path) && !now.join(&path).exists() {
                    return false;
                }
            }
        }
        true
    }
}

/// The digest of an entry's bytes on the disk, SHA-256 or git's SHA-1 by its length in digits. They are written to `into`.
fn digest_of(entry: &CacheEntry, digits: usize, mut into: Option<&File>, go_on: GoOn<'_>) -> Result<String> {
    let mut context = match digits {
        64 => Context::new(&SHA256),
        _ => Context::new(&SHA1_FOR_LEGACY_USE_ONLY),
    };
    if digits != 64 {
        context.update(format!("blob {}\0", entry.size()).as_bytes());
    }
    let (memory, direct) = (Anonymous::new(BLOCK)?, entry.open_direct(false));
    for block in 0..entry.blocks() {
        go_on()?;
        let range = entry.range(block);
        let len = (range.end - range.start) as usize;
        // SAFETY: the memory is this function's own, and has a block.
        let all = unsafe { std::slice::from_raw_parts_mut(memory.at(), memory.len()) };
        // A direct read ends at a page, or at the end of the file.
        let pages = len.next_multiple_of(PAGE as usize);
        let read = direct.as_ref().map(|direct| read_up_to(direct, &mut all[..pages], range.start));
        if !matches!(read, Some(Ok(got)) if got >= len) {
            entry.read(range, &mut all[..len])?;
        }
        context.update(&all[..len]);
        if let Some(into) = &mut into {
            into.write_all(&all[..len]).map_err(|e| Error::write("write a copy", &e))?;
        }
    }
    Ok(hex(context.finish().as_ref()))
}

/// Refuses a folder that somebody else owns, or may write.
fn check(folder: &Path) -> Result<()> {
    let found = stat_at(folder)?;
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    let refused = |why: String| Err(Error::permission(format!("Penstock writes nothing there: {why}")).at(folder));
    match found.is_dir() {
        false => refused("it is not a folder".to_owned()),
        true if found.uid() != user && found.uid() != 0 => {
            refused(format!("it belongs to another user ({})", found.uid()))
        }
        true if found.mode() & OTHERS != 0 => {
            refused(format!("others may write to it (mode {:04o})", found.mode() & 0o7777))
        }
        true => Ok(()),
    }
}

/// The reason for which a data file gets no name there: somebody else could change it.
fn may_share(data: &Metadata, is_private: bool) -> Result<(), String> {
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    if data.uid() != user {
        return Err(format!("no hard link to a file of another user ({})", data.uid()));
    }
    if !is_private || data.mode() & SHARED != 0 {
        return Err("no hard link to a file that others may write: several users share the disk cache".to_owned());
    }
    Ok(())
}

/// Refuses a copy that would leave little room.
fn check_room(folder: &Path, bytes: u64) -> Result<()> {
    let file = File::open(folder).map_err(|e| Error::io("open the folder", &e).at(folder))?;
    // SAFETY: all zeros are a valid `statvfs`.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: one structure is written.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut found) } != 0 {
        return Err(Error::io("ask for free room", &io::Error::last_os_error()).at(folder));
    }
    let keep = (found.f_blocks.saturating_mul(found.f_frsize) / 10).min(FREE);
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free >= keep.saturating_add(bytes) {
        return Ok(());
    }
    let why = "it is on another file system than the disk cache, and a copy would leave less than 10% of that, or 20 GiB, free";
    Err(Error::new(ErrorKind::NoSpace, why).with_values(keep.saturating_add(bytes), free).at(folder))
}

/// True if the process that made this file has ended, at least so long ago.
pub(super) fn is_left_over(path: &Path, long: Duration) -> bool {
    let Ok(found) = fs::symlink_metadata(path) else { return false };
    let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(found.ctime().max(0).unsigned_abs());
    let is_old = SystemTime::now().duration_since(changed).is_ok_and(|age| age >= long);
    let is_free = || {
        let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
        file.is_ok_and(|file| flock(&file).unwrap_or(true))
    };
    is_old && (found.is_symlink() || is_free())
}

/// Locks an open file as huggingface_hub does; false: another open file holds the lock.
fn flock(file: &File) -> io::Result<bool> {
    // SAFETY: a plain system call on a descriptor that is held here.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        e if matches!(e.raw_os_error(), Some(libc::EWOULDBLOCK | libc::EACCES)) => Ok(false),
        e => Err(e),
    }
}

/// A file of this name, which is new, with the mode that the process gives its files.
fn new_file(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o666).open(path)
}

fn remove(path: &Path) {
    let _gone_already = fs::remove_file(path);
}

fn stat(file: &File, path: &Path) -> Result<Metadata> {
    file.metadata().map_err(|e| Error::io("stat", &e).at(path))
}

fn stat_at(path: &Path) -> Result<Metadata> {
    fs::metadata(path).map_err(|e| Error::io("stat", &e).at(path))
}

fn not_made(cause: &io::Error, folder: &Path) -> Error {
    Error::write("make the folder", cause).at(folder)
}
