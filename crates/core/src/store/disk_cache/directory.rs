//! An open folder of the cache. Its files are opened below its descriptor, links are not followed, and each file that is
//! opened has an owner and a mode that the cache takes.

use super::access::Access;
use super::map::random;
use crate::error::{Error, Result};
use std::ffi::{CStr, CString};
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The end of names of files that are being made.
pub(super) const PART: &str = ".part";

/// A folder.
#[derive(Debug)]
pub(super) struct Directory {
    file: File,
    path: PathBuf,
    access: Access,
}

impl Directory {
    /// The folder at this path, by whatever links it is reached; nothing is checked.
    pub(super) fn at(path: &Path) -> io::Result<File> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        open_at(libc::AT_FDCWD, &name, libc::O_RDONLY | libc::O_DIRECTORY, 0)
    }

    /// A folder that was opened, checked.
    pub(super) fn new(file: File, path: PathBuf, access: Access) -> Result<Directory> {
        let found = file.metadata().map_err(|e| Error::io("stat", &e).at(&path))?;
        access.check(&found).map_err(|why| refused(&why).at(&path))?;
        Ok(Directory { file, path, access })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// True if this process may make files in it.
    pub(super) fn is_writable(&self) -> bool {
        // SAFETY: a string that ends with a zero, and a descriptor that is held here.
        unsafe { libc::faccessat(self.file.as_raw_fd(), c".".as_ptr(), libc::W_OK | libc::X_OK, libc::AT_EACCESS) == 0 }
    }

    /// A folder in it; with `make` it is made if it is not there.
    pub(super) fn folder(&self, name: &str, make: bool) -> Result<Option<Directory>> {
        let path = self.path.join(name);
        let opened = || self.raw(name, libc::O_RDONLY | libc::O_DIRECTORY, 0);
        let file = match opened() {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !make => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => self
                .make_folder(name)
                .and_then(|()| opened())
                .map_err(|e| Error::write("make the folder", &e).at(&path))?,
            opened => opened.map_err(|e| not_opened(&e).at(&path))?,
        };
        Directory::new(file, path, self.access).map(Some)
    }

    fn make_folder(&self, name: &str) -> io::Result<()> {
        make_folder(&self.file, name.as_bytes(), |folder| self.give(folder, self.access.folder_mode()))
    }

    /// A file in it, checked, and whether it may be written; `None`: it is not there. With `write` it is opened for that if
    /// the process may.
    pub(super) fn open(&self, name: &str, write: bool) -> Result<Option<(File, Metadata, bool)>> {
        let path = self.path.join(name);
        let mut writable = write;
        let mut opened = match write {
            true => self.raw(name, libc::O_RDWR, 0),
            false => self.raw(name, libc::O_RDONLY, 0),
        };
        if matches!(&opened, Err(e) if write && matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)))
        {
            opened = self.raw(name, libc::O_RDONLY, 0);
            writable = false;
        }
        let file = match opened {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|e| not_opened(&e).at(&path))?,
        };
        let found = file.metadata().map_err(|e| Error::io("stat", &e).at(&path))?;
        if !found.is_file() {
            return Err(refused("it is not a file").at(&path));
        }
        self.access.check(&found).map_err(|why| refused(&why).at(&path))?;
        Ok(Some((file, found, writable)))
    }

    /// A new file. One that has the name is an error.
    pub(super) fn make(&self, name: &str) -> io::Result<File> {
        let mode = self.access.file_mode();
        let file = self.raw(name, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, mode)?;
        self.give(&file, mode).inspect_err(|_| {
            let _left_behind = self.remove(name);
        })?;
        Ok(file)
    }

    /// Gives a new file or folder the cache's group and its mode.
    fn give(&self, file: &File, mode: u32) -> io::Result<()> {
        if let Some(group) = self.access.group().filter(|group| file.metadata().is_ok_and(|own| own.gid() != *group)) {
            std::os::unix::fs::fchown(file, None, Some(group))?;
        }
        set_mode(file, mode)
    }

    fn raw(&self, name: &str, flags: i32, mode: u32) -> io::Result<File> {
        // A FIFO in place of a file must not wait for a writer.
        let flags = flags | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        open_at(self.file.as_raw_fd(), &CString::new(name)?, flags, mode)
    }

    /// Gives the file another name; a file that had it is gone.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to, fd) = (CString::new(from)?, CString::new(to)?, self.file.as_raw_fd());
        // SAFETY: two strings that end with a zero.
        match unsafe { libc::renameat(fd, from.as_ptr(), fd, to.as_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Removes a file; false: it was not there.
    pub(super) fn remove(&self, name: &str) -> io::Result<bool> {
        let name = CString::new(name)?;
        // SAFETY: a string that ends with a zero.
        if unsafe { libc::unlinkat(self.file.as_raw_fd(), name.as_ptr(), 0) } == 0 {
            return Ok(true);
        }
        match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::NotFound => Ok(false),
            e => Err(e),
        }
    }

    /// Waits until the names of its files are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// The bytes of a small file; `None`: it is not there, or has more than `most`.
    pub(super) fn read(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let Some((file, _, _)) = self.open(name, false)? else { return Ok(None) };
        let mut bytes = Vec::new();
        let path = self.path.join(name);
        file.take(most + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", &e).at(path))?;
        Ok((bytes.len() as u64 <= most).then_some(bytes))
    }

    /// Replaces a small file in one step. The caller holds a lock, so that nobody else writes it.
    pub(super) fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let part = format!("{name}{PART}");
        let written = || {
            self.remove(&part)?;
            self.make(&part)?.write_all(bytes)?;
            self.rename(&part, name)
        };
        written().map_err(|e| {
            let _left_behind = self.remove(&part);
            Error::write("write", &e).at(self.path.join(name))
        })
    }

    /// The names in it that are texts, in no order.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let failed = |e: io::Error| Error::io("list the folder", &e).at(&self.path);
        let again = open_at(self.file.as_raw_fd(), c".", libc::O_RDONLY | libc::O_DIRECTORY, 0).map_err(failed)?;
        list(again).map_err(failed)
    }
}

/// Makes a folder, unless it is there. `give` gives it its mode and its group before it has its name: others may open it
/// from then on, and refuse one that is not the cache's.
pub(super) fn make_folder(within: &File, name: &[u8], give: impl Fn(&File) -> io::Result<()>) -> io::Result<()> {
    let (fd, flags) = (within.as_raw_fd(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW);
    let part = CString::new([name, format!(".{:08x}{PART}", random()).as_bytes()].concat())?;
    let name = CString::new(name)?;
    // SAFETY: a string that ends with a zero.
    let make = |name: &CStr| checked(unsafe { libc::mkdirat(fd, name.as_ptr(), 0o700) });
    let give_to = |name: &CStr| give(&open_at(fd, name, flags, 0)?);
    make(&part)?;
    let named = give_to(&part).and_then(|()| {
        // SAFETY: two strings that end with a zero.
        checked(unsafe { libc::renameat2(fd, part.as_ptr(), fd, name.as_ptr(), libc::RENAME_NOREPLACE) })
    });
    if named.is_err() {
        // SAFETY: a string that ends with a zero.
        let _left_behind = unsafe { libc::unlinkat(fd, part.as_ptr(), libc::AT_REMOVEDIR) };
    }
    match named {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // Some file systems have no such rename: ZFS before 2.2.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => match make(&name) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.and_then(|()| give_to(&name)),
        },
        named => named,
    }
}

/// The error of a system call that failed.
fn checked(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The name of a file or folder that is being made under this one.
pub(super) fn made_as(name: &str) -> &str {
    name.strip_suffix(PART).map_or(name, |part| part.split('.').next().unwrap_or(part))
}

/// The error of a file or folder that the cache does not take.
pub(super) fn refused(why: &str) -> Error {
    Error::permission(format!("the disk cache refuses it: {why}"))
}

fn not_opened(cause: &io::Error) -> Error {
    match cause.raw_os_error() {
        Some(libc::ELOOP) => refused("it is a symbolic link").caused_by(io::Error::from_raw_os_error(libc::ELOOP)),
        Some(libc::ENOTDIR) => refused("it is not a folder"),
        Some(libc::EISDIR | libc::ENXIO) => refused("it is not a file"),
        _ => Error::io("open", cause),
    }
}

fn open_at(folder: i32, name: &CStr, flags: i32, mode: u32) -> io::Result<File> {
    loop {
        // SAFETY: a string that ends with a zero.
        let fd = unsafe { libc::openat(folder, name.as_ptr(), flags | libc::O_CLOEXEC, mode) };
        if fd >= 0 {
            // SAFETY: the descriptor is new and nobody else's.
            return Ok(unsafe { File::from_raw_fd(fd) });
        }
        let cause = io::Error::last_os_error();
        if cause.kind() != io::ErrorKind::Interrupted {
            return Err(cause);
        }
    }
}

/// Sets the mode whatever the umask is.
pub(super) fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    // SAFETY: a plain system call on a descriptor that is held.
    match unsafe { libc::fchmod(file.as_raw_fd(), mode) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn list(folder: File) -> io::Result<Vec<String>> {
    let fd = folder.into_raw_fd();
    // SAFETY: the descriptor is given away; on an error it is closed below.
    let stream = unsafe { libc::fdopendir(fd) };
    if stream.is_null() {
        let cause = io::Error::last_os_error();
        // SAFETY: the call did not take the descriptor.
        drop(unsafe { File::from_raw_fd(fd) });
        return Err(cause);
    }
    let mut names = Vec::new();
    let outcome = loop {
        // SAFETY: errno is this thread's. The stream is open, and its entry is valid until the next call.
        let name = unsafe {
            *libc::__errno_location() = 0;
            let entry = libc::readdir64(stream);
            if entry.is_null() {
                let cause = io::Error::last_os_error();
                break if cause.raw_os_error() == Some(0) { Ok(()) } else { Err(cause) };
            }
            CStr::from_ptr((*entry).d_name.as_ptr())
        };
        if let Ok(name) = name.to_str() {
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
    };
    // SAFETY: the stream is closed once.
    unsafe { libc::closedir(stream) };
    outcome.map(|()| names)
}
