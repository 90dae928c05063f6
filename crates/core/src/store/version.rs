//! Telling two versions of a file apart.

use crate::error::{Error, ErrorKind, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::{fmt, io};

/// Tells two versions of a file apart: device, inode, size and modification time, as the kernel reports them.
///
/// Two identities are equal when those four are equal. The time of the last status change is kept for reports, but is
/// not compared: `chmod`, `chown` and hard links (with which hub caches deduplicate) change it and leave every byte
/// unchanged. The price: if a program rewrites a file in place, with the same size, and then restores the modification
/// time, the change is not seen.
#[derive(Debug, Clone, Copy, Default)]
pub struct Identity {
    /// Device number of the file system.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, nanoseconds since the epoch.
    pub mtime_ns: i128,
    /// Last status change, nanoseconds since the epoch.
    pub ctime_ns: i128,
}

/// The version of an object. Its size stands beside it: ranks on several machines compare sizes, as each machine has
/// its own inodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    /// A file of this machine.
    Inode(Identity),
    /// A strong validator: two objects with the same one have the same bytes (an ETag, a version id).
    Strong(String),
    /// A weak validator, which may stay the same although bytes have changed (a date).
    Weak(String),
}

impl Version {
    /// For bytes that are nowhere, `size` of them.
    pub(crate) fn of_bytes(size: u64) -> Version {
        Version::Inode(Identity { size, ..Identity::default() })
    }

    /// Whether both are known to be of one file.
    pub(crate) fn is_of_same_file(&self, other: &Version) -> bool {
        match (self, other) {
            (Version::Inode(a), Version::Inode(b)) => (a.dev, a.ino) == (b.dev, b.ino),
            _ => false,
        }
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        (self.dev, self.ino, self.size, self.mtime_ns) == (other.dev, other.ino, other.size, other.mtime_ns)
    }
}

impl Eq for Identity {}

impl Identity {
    /// The identity of an open file, now.
    pub fn of(file: impl AsFd) -> io::Result<Identity> {
        stat(file).map(|s| Self::from_stat(&s))
    }

    pub(crate) fn from_stat(s: &libc::stat64) -> Identity {
        // Field types differ between architectures, hence the casts.
        #[allow(clippy::unnecessary_cast)]
        Identity {
            dev: s.st_dev as u64,
            ino: s.st_ino as u64,
            size: s.st_size as u64,
            mtime_ns: s.st_mtime as i128 * 1_000_000_000 + s.st_mtime_nsec as i128,
            ctime_ns: s.st_ctime as i128 * 1_000_000_000 + s.st_ctime_nsec as i128,
        }
    }

    /// Compares the file's identity with what it is `now`: an error of kind [`ErrorKind::Changed`] that says what
    /// differs. The caller adds the path.
    pub fn check(&self, now: &Identity) -> Result<()> {
        if self == now {
            return Ok(());
        }
        let what = if (self.dev, self.ino) != (now.dev, now.ino) {
            format!(
                "it was replaced by another file (device {}, inode {} then; device {}, inode {} now)",
                self.dev, self.ino, now.dev, now.ino
            )
        } else if now.size < self.size {
            format!("it was truncated from {} to {} bytes", self.size, now.size)
        } else if now.size > self.size {
            format!("it grew from {} to {} bytes", self.size, now.size)
        } else {
            format!("it was written to ({} ns since the epoch then, {} ns now)", self.mtime_ns, now.mtime_ns)
        };
        Err(Error::new(
            ErrorKind::Changed,
            format!(
                "the file changed after the checkpoint was opened: {what}; open the checkpoint again when no program writes to it"
            ),
        )
        .with_values(self.to_string(), now.to_string()))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity { dev, ino, size, mtime_ns, .. } = self;
        write!(f, "{size} bytes, written {mtime_ns} ns after the epoch, device {dev}, inode {ino}")
    }
}

/// `fstat`, for the type of the file as well as its identity.
pub(crate) fn stat(file: impl AsFd) -> io::Result<libc::stat64> {
    let mut s = MaybeUninit::<libc::stat64>::uninit();
    // SAFETY: the descriptor is borrowed for the call, and `s` has the size the kernel writes.
    if unsafe { libc::fstat64(file.as_fd().as_raw_fd(), s.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fstat returned 0, so it has filled the structure.
    Ok(unsafe { s.assume_init() })
}
