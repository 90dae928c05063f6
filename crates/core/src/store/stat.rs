//! The kernel's data of a file: its identity, and the needs of O_DIRECT.

use super::version::Identity;
use crate::error::{Error, Result};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The result of `statx`.
pub(super) struct Stat {
    pub(super) identity: Identity,
    /// Alignment of memory and of offsets, in bytes; 0: O_DIRECT is not supported. `None` if the kernel does not say.
    pub(super) direct: Option<(u32, u32)>,
}

/// `STATX_DIOALIGN` (6.1), and where its two fields are in the 256-byte record (include/uapi/linux/stat.h).
pub(super) const STATX_DIOALIGN: u32 = 0x2000;
const DIO_FIELDS: usize = 0x98;

pub(super) fn statx(fd: Option<RawFd>, mask: Option<u32>, path: &Path) -> Result<Stat> {
    let failed = |e: io::Error| Error::io("stat", &e).at(path);
    let name = match fd {
        Some(_) => CString::default(),
        None => {
            CString::new(path.as_os_str().as_bytes()).map_err(|_| failed(io::Error::from_raw_os_error(libc::EINVAL)))?
        }
    };
    let flags = if fd.is_some() { libc::AT_EMPTY_PATH } else { 0 };
    let mut record = [0u64; 32];
    const { assert!(std::mem::size_of::<libc::statx>() == 256) };
    let mask = libc::STATX_BASIC_STATS | mask.unwrap_or(0);
    loop {
        // SAFETY: the record is the kernel's fixed 256 bytes, aligned to 8, and `name` outlives the call.
        let rc = unsafe {
            libc::statx(fd.unwrap_or(libc::AT_FDCWD), name.as_ptr(), flags, mask, record.as_mut_ptr().cast())
        };
        if rc == 0 {
            break;
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(failed(e));
        }
    }
    // SAFETY: plain data of the same size, filled by the kernel (zero where it had nothing to say).
    let s: libc::statx = unsafe { std::mem::transmute_copy(&record) };
    let ns = |t: libc::statx_timestamp| i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec);
    let dev = libc::makedev(s.stx_dev_major, s.stx_dev_minor);
    let identity =
        Identity { dev, ino: s.stx_ino, size: s.stx_size, mtime_ns: ns(s.stx_mtime), ctime_ns: ns(s.stx_ctime) };
    let fields = record[DIO_FIELDS / 8].to_ne_bytes();
    let field = |i: usize| u32::from_ne_bytes([fields[i], fields[i + 1], fields[i + 2], fields[i + 3]]);
    let direct = (s.stx_mask & STATX_DIOALIGN != 0).then(|| (field(0), field(4)));
    Ok(Stat { identity, direct })
}

/// The identity of an open file. `path` is for errors.
pub(super) fn identity_of_open(file: &File, path: &Path) -> Result<Identity> {
    Ok(statx(Some(file.as_raw_fd()), None, path)?.identity)
}

/// The identity of the file at `path`, now.
pub fn identity_of(path: &Path) -> Result<Identity> {
    Ok(statx(None, None, path)?.identity)
}
