//! Disks of this machine that this process has been told of, and whether a path leads to one of them: what is there can be
//! looked at without a thread that stands by for the file system to hang.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Block devices whose file system is local; 0 is a free place. No lock: a forked child could find it taken.
static DISKS: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// Keeps the number of a block device. Others (major number 0: overlay, btrfs, network mounts) are given to the next mount
/// when theirs has gone.
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

/// Whether `path` leads to something on a disk that was remembered, by what the kernel has in memory: nothing is waited for,
/// neither a disk nor a server. `false` where it cannot say so: for a name that was not looked up lately, before Linux
/// 5.12, in a sandbox that refuses to answer.
///
/// It holds for this moment. Whoever then opens the path walks it once more, and may wait if meanwhile something else was
/// mounted there, or a network mount on the way no longer trusts the names it has in memory: that is accepted.
pub(crate) fn leads_to_known_disk(path: &Path) -> bool {
    // Before the first load nothing is known, so nothing need be asked.
    DISKS[0].load(Ordering::Relaxed) != 0 && device_at_once(path).is_some_and(is_known)
}

/// The number of the device that `path` leads to, unless it takes a wait to learn it.
fn device_at_once(path: &Path) -> Option<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // struct open_how: flags, mode, resolve. O_PATH: the file system of the file is told nothing of it.
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
    // Nothing but the device is asked for, and that as it is cached: a network file system has nothing to ask its server.
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
