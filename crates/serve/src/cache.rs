//! The objects of a disk cache, for other nodes: each by the name of its entry, and its board.
//!
//! The name of an entry is a hash of the object's address, version and size. Nothing is listed. So a client gets an object only
//! if it knows these, which it hears from the object's own server.

use crate::name::Name;
use crate::served::{Contents, Found, Object, Served};
use penstock::store::mirrors::{board_etag, mirrored_etag, BOARD, MIRRORED};
use penstock::store::{CacheFolder, DiskCacheSettings, GivenObject};
use penstock::Result;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};
use std::path::Path;
use std::sync::Arc;

/// The objects of a disk cache.
#[derive(Debug)]
pub struct Cache(Arc<CacheFolder>);

impl Cache {
    /// Descriptors of an object that is being sent: its data and its map.
    pub(crate) const DESCRIPTORS: u64 = 2;

    /// Opens the cache in this folder. `shared`: its group may write to it.
    ///
    /// # Errors
    /// The errors of [`CacheFolder::open`].
    pub fn open(folder: &Path, shared: bool) -> Result<Cache> {
        let (folder, verify, refetch) = (folder.to_path_buf(), false, false);
        let settings = DiskCacheSettings { folder, size: None, free: None, shared, verify, refetch };
        CacheFolder::open(&settings).map(Cache)
    }
}

impl Served for Cache {
    fn descriptors(&self) -> u64 {
        Cache::DESCRIPTORS
    }

    fn find(&self, name: &Name) -> io::Result<Found> {
        let parts: Vec<&[u8]> = name.parts().collect();
        let file = match &parts[..] {
            [] => return Ok(Found::Folder(Contents::default())),
            [folder, file] if *folder == MIRRORED.as_bytes() && !name.is_folder() => std::str::from_utf8(file).ok(),
            _ => None,
        };
        let file = file.ok_or(io::ErrorKind::NotFound)?;
        let (id, is_board) = file.strip_suffix(BOARD).map_or((file, false), |id| (id, true));
        let found = self.0.given(id).map_err(io::Error::other)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Found::Object(match is_board {
            true => Box::new(Board::of(id, &found.board())?),
            false => Box::new(Cached { etag: mirrored_etag(id), object: found }),
        }))
    }
}

/// An object of the cache.
struct Cached {
    object: GivenObject,
    etag: String,
}

impl Object for Cached {
    fn size(&self) -> u64 {
        self.object.size()
    }

    fn etag(&self) -> &str {
        &self.etag
    }

    fn modified(&self) -> Option<i64> {
        None
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.object.file().as_fd()
    }

    fn there(&self, range: &Range<u64>) -> u64 {
        self.object.there(range)
    }

    /// A block that is there stays as it is.
    fn is_unchanged(&self) -> bool {
        true
    }
}

/// A board, in a file of its own.
struct Board {
    file: File,
    size: u64,
    etag: String,
}

impl Board {
    fn of(id: &str, bits: &[u8]) -> io::Result<Board> {
        // SAFETY: the name is a C string, and the result is checked.
        let fd = unsafe { libc::memfd_create(c"penstock-board".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let mut file = unsafe { File::from_raw_fd(fd) };
        file.write_all(bits)?;
        Ok(Board { file, size: bits.len() as u64, etag: board_etag(id) })
    }
}

impl Object for Board {
    fn size(&self) -> u64 {
        self.size
    }

    fn etag(&self) -> &str {
        &self.etag
    }

    fn modified(&self) -> Option<i64> {
        None
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn is_unchanged(&self) -> bool {
        true
    }
}
