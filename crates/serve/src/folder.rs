//! The files below a folder.

use crate::name::Name;
use crate::served::{Contents, Entry, Found, Object, Served};
use penstock::store::Identity;
use penstock::{Error, ErrorKind, Result};
use ring::digest::{digest, SHA256};
use std::ffi::{CStr, CString};
use std::fmt::Write;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

/// Entries of a listing, at most.
const MOST_ENTRIES: usize = 10_000;
/// Resolutions of a path that a rename disturbs, at most.
const TRIES: u32 = 16;
/// Opens a file to read it. A FIFO or a device does not hold the thread up.
const READS: i32 = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
/// Opens a file to look at it.
const LOOKS: i32 = libc::O_PATH | libc::O_CLOEXEC;

/// The files below a folder, without hidden ones. Symbolic links are followed as long as they stay below the folder;
/// before Linux 5.6, and where a sandbox refuses `openat2`, none is followed.
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// Opens it. If it is moved later, its files are still served.
    ///
    /// # Errors
    /// The error of opening it; `Invalid` if it is no folder.
    pub fn open(path: &Path) -> Result<Folder> {
        let file = File::open(path).map_err(|e| Error::io("open the folder", &e).at(path))?;
        let found = file.metadata().map_err(|e| Error::io("look at the folder", &e).at(path))?;
        if !found.is_dir() {
            return Err(Error::new(ErrorKind::Invalid, "this is no folder: give the folder of the files").at(path));
        }
        Ok(Folder(file.into()))
    }

    /// Opens what is below the folder.
    fn below(&self, parts: &[&[u8]], flags: i32) -> io::Result<File> {
        let path = CString::new(if parts.is_empty() { b".".to_vec() } else { parts.join(&b'/') })?;
        for _ in 0..TRIES {
            match open_beneath(self.0.as_fd(), &path, flags) {
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                    return self.walk(parts, flags)
                }
                found => return found,
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// The same, part by part: no part may be a symbolic link.
    fn walk(&self, parts: &[&[u8]], flags: i32) -> io::Result<File> {
        let mut at: OwnedFd = open_at(self.0.as_fd(), c".", LOOKS)?.into();
        for (i, part) in parts.iter().enumerate() {
            let flags = if i + 1 < parts.len() { LOOKS | libc::O_DIRECTORY } else { flags };
            let flags = flags | libc::O_NOFOLLOW;
            at = open_at(at.as_fd(), &CString::new(*part)?, flags)?.into();
        }
        Ok(at.into())
    }

    fn contents(&self, parts: &[&[u8]], folder: &File) -> io::Result<Contents> {
        let mut names = Vec::new();
        for entry in fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()))? {
            let name = entry?.file_name().into_vec();
            if !name.starts_with(b".") {
                names.push(name);
            }
            if names.len() > MOST_ENTRIES {
                break;
            }
        }
        names.sort_unstable();
        let mut contents = Contents { is_cut: names.len() > MOST_ENTRIES, ..Contents::default() };
        for name in names.into_iter().take(MOST_ENTRIES) {
            let path: Vec<_> = parts.iter().copied().chain([name.as_slice()]).collect();
            // What a request would not find is not listed
            let Ok(file) = self.below(&path, LOOKS) else { continue };
            let (Ok(found), Ok(identity)) = (file.metadata(), Identity::of(&file)) else { continue };
            if found.is_dir() || found.is_file() {
                let file = found.is_file().then(|| (identity.size, etag(&identity)));
                contents.entries.push(Entry { name, file });
            }
        }
        Ok(contents)
    }
}

impl Served for Folder {
    fn find(&self, name: &Name) -> io::Result<Found> {
        let parts: Vec<_> = name.parts().collect();
        let file = self.below(&parts, READS).map_err(|e| match e.raw_os_error() {
            // A link that leads out, a part that is a file, a name that no file system has, a socket
            Some(libc::EXDEV | libc::ELOOP | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ENXIO) => {
                io::ErrorKind::NotFound.into()
            }
            _ => e,
        })?;
        let found = file.metadata()?;
        if found.is_dir() {
            return Ok(Found::Folder(if name.is_folder() {
                self.contents(&parts, &file)?
            } else {
                Contents::default()
            }));
        }
        if !found.is_file() || name.is_folder() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let identity = Identity::of(&file)?;
        Ok(Found::Object(Box::new(FileObject { etag: etag(&identity), identity, file })))
    }
}

#[derive(Debug)]
struct FileObject {
    file: File,
    identity: Identity,
    etag: String,
}

impl Object for FileObject {
    fn size(&self) -> u64 {
        self.identity.size
    }

    fn etag(&self) -> &str {
        &self.etag
    }

    fn modified(&self) -> Option<i64> {
        i64::try_from(self.identity.mtime_ns.div_euclid(1_000_000_000)).ok()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn is_unchanged(&self) -> bool {
        Identity::of(&self.file).is_ok_and(|now| now == self.identity)
    }
}

/// The strong ETag of a file: a hash, because numbers of inodes are for nobody outside.
fn etag(identity: &Identity) -> String {
    let Identity { dev, ino, size, mtime_ns, .. } = identity;
    let hash = digest(&SHA256, format!("{dev} {ino} {size} {mtime_ns}").as_bytes());
    hash.as_ref()[..16].iter().fold("\"".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }) + "\""
}

fn open_beneath(root: BorrowedFd, path: &CStr, flags: i32) -> io::Result<File> {
    // SAFETY: a structure of plain numbers.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = flags as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS;
    let size = std::mem::size_of::<libc::open_how>();
    // SAFETY: the path ends with NUL, and the size is that of the structure.
    let fd = unsafe { libc::syscall(libc::SYS_openat2, root.as_raw_fd(), path.as_ptr(), &raw const how, size) };
    owned(fd as i32)
}

fn open_at(folder: BorrowedFd, path: &CStr, flags: i32) -> io::Result<File> {
    // SAFETY: the path ends with NUL.
    owned(unsafe { libc::openat(folder.as_raw_fd(), path.as_ptr(), flags) })
}

fn owned(fd: i32) -> io::Result<File> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call gave a new descriptor that nobody else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    fn made() -> (TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("served");
        fs::create_dir_all(root.join("deep")).unwrap();
        fs::write(dir.path().join("secret"), "s").unwrap();
        fs::write(root.join("a"), "aa").unwrap();
        fs::write(root.join(".hidden"), "h").unwrap();
        fs::write(root.join("deep/b"), "b").unwrap();
        symlink("../a", root.join("deep/inside")).unwrap();
        symlink("../../secret", root.join("deep/outside")).unwrap();
        symlink(dir.path().join("secret"), root.join("absolute")).unwrap();
        symlink("..", root.join("up")).unwrap();
        symlink("circle", root.join("circle")).unwrap();
        let fifo = CString::new(root.join("fifo").into_os_string().into_vec()).unwrap();
        // SAFETY: the path ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        let folder = Folder::open(&root).unwrap();
        (dir, folder)
    }

    fn size(folder: &Folder, path: &str) -> Option<u64> {
        match folder.find(&Name::parse(path.as_bytes()).unwrap()) {
            Ok(Found::Object(object)) => Some(object.size()),
            Ok(Found::Folder(_)) => None,
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::NotFound, "{path}");
                None
            }
        }
    }

    #[test]
    fn links_are_followed_as_long_as_they_stay_inside() {
        let (_dir, folder) = made();
        assert_eq!(
            (size(&folder, "/a"), size(&folder, "/deep/inside"), size(&folder, "/deep/b")),
            (Some(2), Some(2), Some(1))
        );
        for path in ["/deep/outside", "/absolute", "/up/secret", "/circle", "/fifo", "/a/", "/a/b", "/none"] {
            assert_eq!(size(&folder, path), None, "{path}");
        }
        assert_eq!(size(&folder, &format!("/{}", "x".repeat(300))), None);
    }

    #[test]
    fn without_openat2_no_link_is_followed() {
        let (_dir, folder) = made();
        let opened = |path: &[&[u8]]| folder.walk(path, READS).map(|file| file.metadata().unwrap().len());
        assert_eq!(opened(&[b"deep", b"b"]).unwrap(), 1);
        for path in [[b"deep".as_slice(), b"inside"], [b"deep", b"outside"], [b"up", b"secret"]] {
            assert!(opened(&path).is_err());
        }
    }

    #[test]
    fn a_listing_has_what_a_request_finds() {
        let (_dir, folder) = made();
        let Ok(Found::Folder(contents)) = folder.find(&Name::parse(b"/").unwrap()) else { panic!("no folder") };
        let names: Vec<_> = contents.entries.iter().map(|entry| entry.name.as_slice()).collect();
        assert_eq!(names, [b"a".as_slice(), b"deep"]);
        assert!(!contents.is_cut && contents.entries[1].file.is_none());
        assert_eq!(contents.entries[0].file.as_ref().unwrap().0, 2);
    }

    #[test]
    fn a_file_that_is_written_to_is_another_version() {
        let (dir, folder) = made();
        let found = || match folder.find(&Name::parse(b"/a").unwrap()) {
            Ok(Found::Object(object)) => object,
            _ => panic!("no object"),
        };
        let (first, again) = (found(), found());
        assert!(first.is_unchanged() && first.etag() == again.etag() && first.etag().len() == 34);
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(dir.path().join("served/a"), "bb").unwrap();
        assert!(!first.is_unchanged() && found().etag() != first.etag());
    }

    #[test]
    fn only_a_folder_is_opened() {
        let (dir, _) = made();
        assert_eq!(Folder::open(&dir.path().join("secret")).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(Folder::open(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
