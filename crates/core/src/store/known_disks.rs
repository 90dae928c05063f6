//! Disks of this machine that this process has loaded from, and whether a path leads to one of them. Files there can be
//! opened without a second thread in case the file system hangs.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Block devices whose file system is local; 0 is a free place. No lock: a forked child could find it taken.
static DISKS: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// Keeps the number of a block device. Other numbers (major number 0: overlay, btrfs, network mounts) are not kept:
/// when such a mount has gone, the next one can get its number.
pub(super) fn remember(dev: u64) {
    if libc::major(dev) == 0 {
        return;
    }
    for disk in &DISKS {
        let was = disk.compare_exchange(0, dev, Ordering::Relaxed, Ordering::Relaxed);
        if was.is_ok() || was == Err(dev) {
            return;
        }
    }
}

/// Whether this device was remembered.
pub(super) fn is_known(dev: u64) -> bool {
    dev != 0 && DISKS.iter().any(|disk| disk.load(Ordering::Relaxed) == dev)
}

/// Whether `path` leads to a file or folder on a known disk. The kernel answers from its memory, without waiting for a
/// disk or a server. `false` if it cannot say so: for a name that was not looked up lately, before Linux 5.12, in a
/// sandbox that refuses to answer.
///
/// The answer holds for this moment. Opening the path afterwards walks it once more. That may wait if something else
/// was mounted there meanwhile, or if a network mount on the way no longer trusts the names it has in memory. This is
/// accepted.
pub(crate) fn leads_to_known_disk(path: &Path) -> bool {
    // Before the first load nothing is known, so there is nothing to ask.
    DISKS[0].load(Ordering::Relaxed) != 0 && device_at_once(path).is_some_and(is_known)
}

/// The number of the device that `path` leads to, unless learning it needs a wait.
fn device_at_once(path: &Path) -> Option<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // struct open_how: flags, mode, resolve. O_PATH: the file system of the file does not notice.
    let how = [(libc::O_PATH | libc::O_CLOEXEC) as u64, 0, libc::RESOLVE_CACHED];
    // SAFETY: `path` is a C string and `how` the structure of that size; both outlive the call.
    let fd = unsafe {
        libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, path.as_ptr(), how.as_ptr(), std::mem::size_of_val(&how))
    };
    if fd < 0 {
        return None;
    }
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // SAFETY: plain numbers; zero is a value of each.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // Only the device is asked for, from the cache: a network file system has nothing to ask its server.
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: an empty C string, and one `statx` to be written to.
    let rc = unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, 0, &raw mut found) };
    (rc == 0).then(|| libc::makedev(found.stx_dev_major, found.stx_dev_minor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{symlink, MetadataExt};

    #[test]
    fn a_device_is_known_once_it_was_remembered() {
        // Block devices that no test machine has.
        let (some, other) = (libc::makedev(4000, 1), libc::makedev(4000, 2));
        assert!(!is_known(some) && !is_known(0));
        remember(some);
        remember(some);
        remember(libc::makedev(0, 77));
        assert!(is_known(some) && !is_known(other) && !is_known(libc::makedev(0, 77)) && !is_known(0));
    }

    #[test]
    fn what_is_in_memory_is_answered_at_once_and_links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link, loose) = (folder.path().join("file"), folder.path().join("link"), folder.path().join("loose"));
        fs::write(&file, "x").unwrap();
        symlink(&file, &link).unwrap();
        symlink(folder.path().join("nothing"), &loose).unwrap();
        fs::metadata(&link).unwrap();
        let device = fs::metadata(&file).unwrap().dev();
        if device_at_once(Path::new("/")).is_none() {
            return; // a kernel or a sandbox that does not answer: then none of it is
        }
        for path in [folder.path(), &file, &link] {
            assert_eq!(device_at_once(path), Some(device), "{}", path.display());
        }
        assert_eq!(device_at_once(Path::new("/proc")), Some(fs::metadata("/proc").unwrap().dev()));
        for nothing in [&loose, &folder.path().join("nothing"), Path::new(""), Path::new("a\0b")] {
            assert_eq!(device_at_once(nothing), None, "{}", nothing.display());
        }
    }
}
