//! Facts of a file's file system: the lanes that make sense, and the needs of O_DIRECT.

use super::known_disks;
use super::mounts::mount_of;
use super::stat::{statx, STATX_DIOALIGN};
use crate::error::{Error, Result};
use crate::extent::{FileLanes, Lane};
use crate::options::PAGE;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The kind of storage of a file system. It decides which lanes make sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FsKind {
    /// The page cache is the storage (tmpfs, ramfs, hugetlbfs).
    Memory,
    /// A disk of this machine. An overlay counts as local if the layer that has the file is.
    Local,
    /// A file system on remote storage, of another process (FUSE), or unknown: may stall, and is never mapped.
    Network,
    /// A store that a scheme names, wherever it has its bytes. None of them counts as in the page cache of this machine.
    Remote,
}

/// Facts about the file system of a shard file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The kind of storage.
    pub kind: FsKind,
    /// The name of the file system, such as "ext4"; "unknown" if its magic number is unknown. A store that a scheme names gives
    /// its own name.
    pub fs: &'static str,
    /// Device number of the storage: files with different numbers can be read side by side.
    pub storage: u64,
    /// The ways in which its bytes come.
    pub lanes: FileLanes,
    /// Reads in flight that the store wants; `None`: as many as the machine needs. If a lane takes staging at request, it gets
    /// at least as many as the machine needs.
    pub parallelism: Option<usize>,
    /// The longest read that the store wants, in bytes: 256 KiB or more. `None`: what the options say. The options are the
    /// upper limit. The slabs of a load have the size of the longest read of all its files.
    pub extent: Option<u64>,
    /// Extra bytes between two wanted runs that cost less than another read, up to this many, and up to the longest read.
    /// `None`: what the options say. The options are the lower limit.
    pub gap: Option<u64>,
    /// Reads of any length end at multiples of this many bytes of the file, and pass none: a multiple of a page. `None`: they
    /// end anywhere.
    pub cut: Option<u64>,
}

impl Facts {
    /// Whether a lease makes every program wait that opens the file to write. On an overlay it does not: a program may write
    /// to the file of the layer below.
    pub(crate) fn leases_see_all_writers(&self) -> bool {
        self.fs != "overlay"
    }
}

/// Whether a read through the page cache that fails has written nothing. Linux returns an error only if no byte has been
/// copied (`filemap_read`): otherwise the read is short. These file systems read in ways of their own, wholly or at times, and
/// an error of theirs says nothing of the bytes before it.
pub(crate) fn errors_write_nothing(fs: &str) -> bool {
    // What overlay lies on is not known.
    let others = ["zfs", "cifs", "smb2", "lustre", "gpfs", "ceph", "9p", "beegfs", "panfs", "overlay", "unknown"];
    !others.contains(&fs)
}

pub(super) fn facts_of(fd: &OwnedFd, path: &Path) -> Result<Facts> {
    // SAFETY: an all-zero statfs is a valid value, and fstatfs writes only into it.
    let mut s: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as above; the descriptor is held by the caller.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut s) } != 0 {
        return Err(Error::io("statfs", &io::Error::last_os_error()).at(path));
    }
    // The type's width and sign differ between architectures; magic numbers are 32 bits.
    let (kind, fs) = match file_system(s.f_type as u32) {
        (_, "overlay") => (kind_below(fd, path), "overlay"),
        known => known,
    };
    let stat = statx(Some(fd.as_raw_fd()), Some(STATX_DIOALIGN), path)?;
    let unit = match (kind, stat.direct) {
        (FsKind::Memory, _) => None,
        (_, Some((0, _) | (_, 0))) => None,
        (_, Some((memory, offset))) => Some(u64::from(memory.max(offset))),
        (_, None) => Some(PAGE),
    };
    // hugetlbfs maps only whole huge pages at offsets that are multiples of a huge page. Data in a file never begins at
    // one.
    let mappable = kind != FsKind::Network && fs != "hugetlbfs";
    if kind == FsKind::Local {
        known_disks::remember(stat.identity.dev);
    }
    let lanes = FileLanes {
        past_cache: unit.map(|_| Lane::DIRECT),
        mapping: mappable.then_some(Lane::MAPPED),
        unit,
        ..FileLanes::only(Lane::BUFFERED)
    };
    Ok(Facts { kind, fs, storage: stat.identity.dev, lanes, parallelism: None, extent: None, gap: None, cut: None })
}

/// The storage below a file of an overlay. Lazily pulled images have layers in another process (FUSE), which fetches
/// their bytes over the network.
fn kind_below(fd: &OwnedFd, path: &Path) -> FsKind {
    if has_extents(fd) {
        return FsKind::Local;
    }
    // Some file systems of this machine cannot say where the bytes are. Seen from a container, the paths of the layers
    // lead to nothing.
    // A file may have the device number of its layer. A directory has that of the overlay.
    let layers = path.parent().and_then(mount_of).map(|mount| mount.layers).unwrap_or_default();
    let kinds: Vec<_> = layers.iter().map(|layer| kind_at(layer)).collect();
    let is_local = |kind: &Option<FsKind>| matches!(kind, Some(FsKind::Local | FsKind::Memory));
    match !kinds.is_empty() && kinds.iter().all(is_local) {
        true => FsKind::Local,
        false => FsKind::Network,
    }
}

/// Whether the file system can say where on a disk the first page of the file is. An overlay asks the layer that has the file.
fn has_extents(fd: &OwnedFd) -> bool {
    /// `struct fiemap` without extents (include/uapi/linux/fiemap.h).
    #[repr(C)]
    struct Fiemap {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        count: u32,
        reserved: u32,
    }
    const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
    const { assert!(std::mem::size_of::<Fiemap>() == 0x20) };
    let mut asked = Fiemap { start: 0, length: PAGE, flags: 0, mapped: 0, count: 0, reserved: 0 };
    // SAFETY: the kernel writes to this structure alone: there is room for no extent behind it, and it is told so.
    unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP as _, &raw mut asked) == 0 }
}

/// The kind of storage under a directory; `None` if it cannot be seen.
fn kind_at(path: &Path) -> Option<FsKind> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: all zeros are a valid `statfs`.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a string that ends with a zero, and one structure that is written.
    let rc = unsafe { libc::statfs(path.as_ptr(), &raw mut found) };
    // Another overlay has layers of its own.
    (rc == 0).then(|| file_system(found.f_type as u32)).filter(|(_, fs)| *fs != "overlay").map(|(kind, _)| kind)
}

/// File systems by magic number (include/uapi/linux/magic.h and their own headers). virtiofs answers like FUSE.
pub(crate) fn file_system(magic: u32) -> (FsKind, &'static str) {
    use FsKind::{Local, Memory, Network};
    match magic {
        0x0102_1994 => (Memory, "tmpfs"),
        0x8584_58f6 => (Memory, "ramfs"),
        0x9584_58f6 => (Memory, "hugetlbfs"),
        0xef53 => (Local, "ext4"),
        0x5846_5342 => (Local, "xfs"),
        0x9123_683e => (Local, "btrfs"),
        0x2fc1_2fc1 => (Local, "zfs"),
        0x794c_7630 => (Local, "overlay"),
        0xf2f5_2010 => (Local, "f2fs"),
        0xca45_1a4e => (Local, "bcachefs"),
        0xe0f5_e1e2 => (Local, "erofs"),
        0x7371_7368 => (Local, "squashfs"),
        0x7366_746e | 0x5346_544e => (Local, "ntfs"),
        0x2011_bab0 => (Local, "exfat"),
        0x4d44 => (Local, "vfat"),
        0x9660 => (Local, "iso9660"),
        0x3153_464a => (Local, "jfs"),
        0x6969 => (Network, "nfs"),
        0xff53_4d42 | 0x517b => (Network, "cifs"),
        0xfe53_4d42 => (Network, "smb2"),
        0x0bd0_0bd0 => (Network, "lustre"),
        0x4750_4653 => (Network, "gpfs"),
        0x00c3_6400 => (Network, "ceph"),
        0x6573_5546 => (Network, "fuse"),
        0x0102_1997 => (Network, "9p"),
        0x5346_414f | 0x6b41_4653 => (Network, "afs"),
        0x0116_1970 => (Network, "gfs2"),
        0x7461_636f => (Network, "ocfs2"),
        0x1983_0326 => (Network, "beegfs"),
        0x2003_0528 => (Network, "orangefs"),
        0xaad7_aaea => (Network, "panfs"),
        0x786f_4256 => (Network, "vboxsf"),
        _ => (Network, "unknown"),
    }
}
