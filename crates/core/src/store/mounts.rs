//! The mounts of this process, from the kernel's list.

use super::stat::identity_of;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The kernel's name for it, such as `ext4`, `virtiofs` or `fuse.s3fs`.
    pub(crate) kind: String,
    /// The device, or the name that a process gave.
    pub(crate) source: String,
    /// The directories that an overlay is made of.
    pub(crate) layers: Vec<PathBuf>,
}

/// The file system that `path` is on; `None` if the list does not have it.
pub(crate) fn mount_of(path: &Path) -> Option<Mount> {
    mount_on(identity_of(path).ok()?.dev)
}

/// The file system with this device number.
pub(crate) fn mount_on(device: u64) -> Option<Mount> {
    let list = fs::read("/proc/self/mountinfo").ok()?;
    find(&list, libc::major(device), libc::minor(device))
}

/// One line of the list: `ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS [FIELD...] - KIND SOURCE OPTIONS` (proc_pid_mountinfo(5)).
fn find(list: &[u8], major: u32, minor: u32) -> Option<Mount> {
    let device = format!("{major}:{minor}");
    list.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        if fields.nth(2)? != device.as_bytes() {
            return None;
        }
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        let text = |field: &[u8]| String::from_utf8_lossy(&unescaped(field)).into_owned();
        let (kind, source) = (text(fields.next()?), text(fields.next()?));
        Some(Mount { kind, source, layers: layers(fields.next().unwrap_or_default()) })
    })
}

/// The layers of an overlay among its options: `lowerdir=A:B,upperdir=C`. Newer kernels name each lower one by itself,
/// as `lowerdir+=A` and `datadir+=B`.
fn layers(options: &[u8]) -> Vec<PathBuf> {
    let path = |bytes: &[u8]| PathBuf::from(OsString::from_vec(unescaped(bytes)));
    let mut found = Vec::new();
    for option in options.split(|byte| *byte == b',') {
        if let Some(several) = option.strip_prefix(b"lowerdir=") {
            found.extend(several.split(|byte| *byte == b':').filter(|one| !one.is_empty()).map(path));
        }
        for one in [&b"upperdir="[..], b"lowerdir+=", b"datadir+="] {
            found.extend(option.strip_prefix(one).map(path));
        }
    }
    found
}

/// Spaces and some other bytes stand as three octal digits behind a backslash.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|d| byte == b'\\' && d.iter().all(|d| (b'0'..b'8').contains(d)));
        match octal {
            Some(digits) => {
                bytes.push(digits.iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
65 22 0:39 / /m rw - overlay overlay rw,lowerdir=/a:/b\\040c::/d,upperdir=/u,workdir=/w
66 22 0:40 / /n ro master:2 propagate_from:3 - fuse.s3fs my\\040bucket rw
67 22 0:41 / /o rw - overlay none rw,lowerdir+=/e,datadir+=/f
";

    #[test]
    fn a_mount_is_found_by_its_device() {
        let found = find(LIST, 0, 40).unwrap();
        assert_eq!((found.kind.as_str(), found.source.as_str(), found.layers), ("fuse.s3fs", "my bucket", vec![]));
        assert_eq!(find(LIST, 254, 0).unwrap().kind, "ext4");
        assert_eq!(find(LIST, 25, 4), None);
        assert_eq!(find(b"", 0, 1), None);
    }

    #[test]
    fn an_overlay_has_layers() {
        let paths = |all: &[&str]| all.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(find(LIST, 0, 39).unwrap().layers, paths(&["/a", "/b c", "/d", "/u"]));
        assert_eq!(find(LIST, 0, 41).unwrap().layers, paths(&["/e", "/f"]));
    }

    #[test]
    fn this_process_has_a_root() {
        assert!(mount_of(Path::new("/proc")).is_some_and(|mount| mount.kind == "proc"));
    }
}
