//! A file that is being written: until it is complete it has no name, or a name that no reader looks for.
//!
//! If the file system can, the file is made without a name (O_TMPFILE), so that a killed process leaves nothing behind.
//! Otherwise it is `.penstock-PID-N.part` in the same directory. Files that are written past the page cache, and files
//! on ext4 or XFS, get their room allocated before the first byte, so that a full disk shows at once. On other file
//! systems [`check_room`] compares. [`Output::publish`] gives the file its name in one step. It replaces the file or
//! the link that had the name before.
//!
//! Some file systems cannot rename, and a file that is mounted at the name (docker `-v FILE`, Kubernetes `subPath`)
//! cannot be replaced. There a file is written under its name if nothing can be lost by that: if the name is free, or the
//! file is empty. See [`in_place`].

use super::in_place::{self, InPlace, RefusedCall};
use crate::error::{Error, Result};
use crate::fallback::Fallback;
use crate::options::PAGE;
use crate::store::{file_system, mount_of};
use std::ffi::CString;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes after which the disk begins to write a file that comes in its order.
const WRITTEN_BACK: u64 = 16 << 20;

static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Output {
    /// The name that it gets.
    pub(super) path: PathBuf,
    size: u64,
    file: File,
    /// The same for O_DIRECT, if the file system has that.
    direct: Option<File>,
    /// Its temporary name, if it has one.
    temporary: Option<PathBuf>,
    /// It is written under its name.
    in_place: Option<InPlace>,
    /// Its bytes are written one after the other: some file systems of other processes take them in no other way, and
    /// others are slow otherwise.
    pub(super) in_order: bool,
    pid: u32,
}

impl Output {
    /// A file of `size` bytes that will be called `path`. With `direct` it can be written past the page cache. If the
    /// file system refuses that, the refusal is returned.
    pub(crate) fn new(path: &Path, size: u64, direct: bool) -> Result<(Output, Option<Fallback>)> {
        check_name(path)?;
        let folder = parent(path);
        let in_order = takes_bytes_in_order(folder);
        let beside = match in_place::is_mount_point(path) {
            true => Err(RefusedCall { call: "rename", cause: io::Error::from_raw_os_error(libc::EBUSY) }),
            false => beside(folder, path),
        };
        let (file, temporary, in_place, mut fallback) = match beside {
            Ok((file, temporary)) => (file, temporary, None, None),
            Err(refused) => {
                let (file, written) = in_place::open(path, &refused)?;
                let reason = format!("{}: {}: {}", path.display(), refused.call, refused.cause);
                (file, None, Some(written), Some(Fallback { from: refused.call, to: "writing under the name", reason }))
            }
        };
        let in_order = in_order || in_place.as_ref().is_some_and(|in_place| in_place.sequential);
        let (path, pid) = (path.to_path_buf(), std::process::id());
        let mut output = Output { path: path.clone(), size, file, direct: None, temporary, in_place, in_order, pid };
        if output.in_place.as_ref().is_some_and(|in_place| in_place.sequential) {
            return Ok((output, fallback));
        }
        // Nothing of a link is kept: it has no mode, and it leads to another file.
        if let Some(before) = fs::symlink_metadata(&path).ok().filter(Metadata::is_file) {
            output.take_mode(&before);
        }
        if direct && output.in_place.is_none() {
            let again = || OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(output.itself());
            // Whole pages are written, and the excess is cut off at the end.
            let cut = output.file.set_len(0).map_err(|e| io::Error::new(e.kind(), format!("ftruncate: {e}")));
            match cut.and_then(|()| again()) {
                Ok(file) => output.direct = Some(file),
                Err(cause) => {
                    let reason = format!("{}: {cause}", path.display());
                    fallback = Some(Fallback { from: "O_DIRECT", to: "page cache", reason });
                }
            }
        }
        if output.direct.is_some() {
            output.allocate(size.next_multiple_of(PAGE))?;
        } else if direct || matches!(kind(&output.file), "ext4" | "xfs") {
            // Through the page cache, ext4 writes a twelfth to a sixth faster into room that is allocated at once, XFS
            // as fast, Btrfs and tmpfs slower (docs/performance-notes.md).
            output.allocate(size)?;
        }
        Ok((output, fallback))
    }

    /// Takes the first bytes of the file out of `head`, where they are written last: until then no reader takes the file
    /// for a checkpoint. That is so where it is written under its name, in any order.
    pub(super) fn hold_back(&mut self, head: &mut [u8]) {
        if let Some(in_place) = &mut self.in_place {
            in_place.hold_back(head);
        }
    }

    /// Whether it is written under its name.
    pub(super) fn is_in_place(&self) -> bool {
        self.in_place.is_some()
    }

    /// The mode of the file that is replaced, as if that file had been overwritten, if its owner and group are those of
    /// the new file. If they differ, its mode is only a limit: bits that a fresh file does not have are dropped, setuid
    /// and setgid always.
    fn take_mode(&self, before: &Metadata) {
        let Ok(fresh) = self.file.metadata() else { return };
        let (old, new) = (before.mode() & 0o7777, fresh.mode() & 0o777);
        let mode = match (before.uid() == fresh.uid(), before.gid() == fresh.gid()) {
            (true, true) => old,
            (true, false) => old & (new | 0o707) & 0o777,
            (false, _) => old & new,
        };
        let _kept_as_new = self.file.set_permissions(Permissions::from_mode(mode));
    }

    fn itself(&self) -> PathBuf {
        match &self.temporary {
            Some(name) => name.clone(),
            None => PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd())),
        }
    }

    fn allocate(&self, size: u64) -> Result<()> {
        let size = i64::try_from(size).map_err(|_| Error::invalid("too large for a file"))?;
        if size == 0 {
            return Ok(());
        }
        loop {
            // SAFETY: a plain system call on a descriptor of ours.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, size) } == 0 {
                return Ok(());
            }
            let cause = io::Error::last_os_error();
            match cause.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
                    return match self.file.set_len(size as u64) {
                        Err(e) if is_full(&e) => Err(self.lacks_room(&e, size as u64)),
                        // It would only have shown at once that there is room. Writing will show it.
                        _ => Ok(()),
                    };
                }
                _ => return Err(self.lacks_room(&cause, size as u64)),
            }
        }
    }

    fn lacks_room(&self, cause: &io::Error, wanted: u64) -> Error {
        match cause.raw_os_error() {
            Some(libc::ENOSPC) => no_room(wanted, free(&self.file)).at(&self.path),
            _ => Error::write(&format!("write {wanted} bytes"), cause).at(&self.path),
        }
    }

    /// The directory that it will be in.
    pub(super) fn folder(&self) -> &Path {
        parent(&self.path)
    }

    /// Descriptors for writing: through the page cache, and past it.
    pub(super) fn descriptors(&self) -> (RawFd, Option<RawFd>) {
        (self.file.as_raw_fd(), self.direct.as_ref().map(AsRawFd::as_raw_fd))
    }

    /// Writes the whole file at once.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, 0).map_err(|e| Error::write("write", &e).at(&self.path))
    }

    /// Writes the next bytes of it, which begin at `at`: blocks come in their order. Those of the first one may change.
    pub(crate) fn write_next(&mut self, bytes: &mut [u8], at: u64) -> Result<()> {
        if at == 0 {
            self.hold_back(bytes);
        }
        let failed = |e: &io::Error| match is_full(e) {
            true => self.lacks_room(e, self.size),
            false => Error::write("write", e).at(&self.path),
        };
        self.file.write_all_at(bytes, at).map_err(|e| failed(&e))?;
        if at > 0 && at % WRITTEN_BACK == 0 {
            // The wait at the end is short if the disk begins now. Where it is refused, the wait is longer.
            let (from, len, how) = (at - WRITTEN_BACK, WRITTEN_BACK, libc::SYNC_FILE_RANGE_WRITE);
            // SAFETY: a plain system call on a descriptor of ours.
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), from as i64, len as i64, how) };
        }
        Ok(())
    }

    /// Every byte is written: gives the file its size, and waits until it is on the disk if that was asked for. Returns
    /// what the file system refused.
    pub(crate) fn seal(&self, sync: bool) -> Result<Option<Fallback>> {
        if self.direct.is_some() {
            self.file.set_len(self.size).map_err(|e| Error::write("set the size (ftruncate)", &e).at(&self.path))?;
        }
        let mut refused = None;
        if sync {
            if let Err(cause) = self.file.sync_all() {
                // Such file systems know no fsync. The bytes are as safe as they make them.
                let unknown = [libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP, libc::EROFS];
                if !cause.raw_os_error().is_some_and(|errno| unknown.contains(&errno)) {
                    return Err(Error::write("write it to the disk (fsync)", &cause).at(&self.path));
                }
                let reason = format!("{}: {cause}", self.path.display());
                refused = Some(Fallback { from: "fsync", to: "none", reason });
            }
        }
        for file in [Some(&self.file), self.direct.as_ref()].into_iter().flatten() {
            self.flush(file)?;
        }
        Ok(refused)
    }

    /// Reports the errors of closing the file: network file systems and those of other processes may say only then that
    /// bytes could not be written.
    fn flush(&self, file: &File) -> Result<()> {
        let again = file.try_clone().map_err(|e| Error::write("duplicate its descriptor", &e).at(&self.path))?;
        // SAFETY: the descriptor is this function's own, and is closed once.
        if unsafe { libc::close(again.into_raw_fd()) } == 0 {
            return Ok(());
        }
        let cause = io::Error::last_os_error();
        match cause.raw_os_error() {
            Some(libc::EINTR) => Ok(()),
            _ if is_full(&cause) => Err(self.lacks_room(&cause, self.size)),
            _ => Err(Error::write("write it (close)", &cause).at(&self.path)),
        }
    }

    /// Gives the file its name. A file that had the name is gone.
    pub(crate) fn publish(&mut self, sync: bool) -> Result<()> {
        if let Some(in_place) = &mut self.in_place {
            in_place.complete(&self.file).map_err(|e| Error::write("write", &e).at(&self.path))?;
            self.seal(sync)?;
            self.in_place = None;
            return Ok(());
        }
        let name = match &self.temporary {
            Some(name) => name.clone(),
            None => {
                let name = unused(parent(&self.path));
                let failed = |cause: &io::Error| Error::write("give the file its name (linkat)", cause).at(&self.path);
                link(&self.itself(), &name).map_err(|e| failed(&e))?;
                self.temporary = Some(name.clone());
                name
            }
        };
        if let Err(cause) = fs::rename(&name, &self.path) {
            // Where nothing has the name, it can be a second name of the file.
            fs::hard_link(&name, &self.path).map_err(|_| in_place::not_renamed(&self.path, &cause))?;
            let _left_behind = fs::remove_file(&name);
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        if let Some(name) = &self.temporary {
            // It was to be removed. If it stays, no reader takes it for a checkpoint.
            let _left_behind = fs::remove_file(name);
        }
        if let (Some(in_place), Ok(nothing)) = (&self.in_place, File::open("/dev/null")) {
            in_place.take_back(std::mem::replace(&mut self.file, nothing), &self.path, self.size);
        }
    }
}

/// Refuses a name that a save must not take: of a directory, a pipe, a socket or a device, and of a link to one. The
/// name of any other link is free: the new file replaces the link, and the target of the link stays. The target may be
/// a blob of the Hub cache, which other revisions share and whose name is the hash of its content.
fn check_name(path: &Path) -> Result<()> {
    let refused = |why: &str| Err(Error::invalid(format!("cannot write to it: {why}")).at(path));
    // What is wrong with a name would show only after all bytes are written.
    match fs::symlink_metadata(path) {
        Err(e) if e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
            return refused("the name is too long for this file system, which takes 255 bytes in most cases");
        }
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => return refused("a file name has no NUL character"),
        _ => {}
    }
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => return refused("it is a directory"),
        Ok(found) if found.file_type().is_fifo() || found.file_type().is_socket() => {
            return refused("it is a pipe or a socket");
        }
        Ok(found) if !found.is_file() => return refused("it is a device"),
        _ => {}
    }
    match fs::read_link(path) {
        // /dev/stdout and similar links, which every process needs.
        Ok(target) if target.starts_with("/proc") => refused("it is a link to a descriptor of this process"),
        _ => Ok(()),
    }
}

/// The directory that contains a path.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// A file in the directory that has no name, or that has one which no reader looks for.
fn beside(folder: &Path, path: &Path) -> Result<(File, Option<PathBuf>), RefusedCall> {
    // Not every file system has them, and without /proc they cannot get a name.
    if let Ok(file) = nameless(folder) {
        return Ok((file, None));
    }
    // It lets nobody rename, and its users may be allowed to make files and not to remove them.
    if mount_of(folder).is_some_and(|mount| mount.source == "mountpoint-s3") {
        return Err(RefusedCall { call: "rename", cause: io::Error::from_raw_os_error(libc::ENOSYS) });
    }
    let (file, first) = named(folder).map_err(|cause| RefusedCall { call: "open", cause })?;
    // A save that finds out at its end that the file system cannot rename is a save in vain.
    let name = unused(folder);
    match fs::rename(&first, &name) {
        Ok(()) => Ok((file, Some(name))),
        // A second name will do, if nothing has it: see `Output::publish`.
        Err(_) if fs::symlink_metadata(path).is_err() && fs::hard_link(&first, &name).is_ok() => {
            let _left_behind = fs::remove_file(&first);
            Ok((file, Some(name)))
        }
        Err(cause) => {
            drop(file);
            let _left_behind = fs::remove_file(&first);
            Err(RefusedCall { call: "rename", cause })
        }
    }
}

/// Whether files in this directory get their bytes one after the other: those of processes (FUSE). Streaming uploads take
/// them in no other order. A virtual machine's share is no such file system, though it looks like one.
fn takes_bytes_in_order(folder: &Path) -> bool {
    kind_of(folder) == "fuse" && mount_of(folder).is_none_or(|mount| mount.kind != "virtiofs")
}

/// The kind of file system that a directory is on; "" if it is unknown.
pub(super) fn kind_of(folder: &Path) -> &'static str {
    let folder = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(folder);
    folder.map_or("", |folder| kind(&folder))
}

fn nameless(folder: &Path) -> io::Result<File> {
    let file = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).mode(0o666).open(folder)?;
    // It must be possible to give it a name later.
    fs::symlink_metadata(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(file)
}

fn unused(folder: &Path) -> PathBuf {
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
    folder.join(format!(".penstock-{}-{number}-{now:x}.part", std::process::id()))
}

fn named(folder: &Path) -> io::Result<(File, PathBuf)> {
    let name = unused(folder);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o666).open(&name)?;
    Ok((file, name))
}

/// Gives the target of `from` a second name.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    let text =
        |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
    let (from, to) = (text(from)?, text(to)?);
    // SAFETY: two strings that end with a zero.
    let rc =
        unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether there is no room for more.
fn is_full(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

fn no_room(wanted: u64, free: Option<u64>) -> Error {
    let free = free.map_or(String::new(), |free| format!(" ({free} are free)"));
    Error::write(&format!("find room for {wanted} bytes{free}"), &io::Error::from_raw_os_error(libc::ENOSPC))
}

/// Compares the bytes that will be written with the free bytes, where that is meaningful: file systems that compress or
/// are remote may have room for more.
pub(super) fn check_room(path: &Path, wanted: u64) -> Result<()> {
    let Ok(folder) = File::open(parent(path)) else { return Ok(()) };
    match free(&folder) {
        Some(free) if free < wanted && plain(&folder) => Err(no_room(wanted, Some(free)).at(path)),
        _ => Ok(()),
    }
}

/// Whether files take as much room on their file system as they have bytes.
fn plain(file: &File) -> bool {
    matches!(kind(file), "ext4" | "xfs" | "tmpfs")
}

/// The kind of file system that a file is on; "" if it is unknown.
fn kind(file: &File) -> &'static str {
    // SAFETY: all zeros are a valid `statfs`.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: one structure is written.
    let rc = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) };
    if rc == 0 {
        file_system(found.f_type as u32).1
    } else {
        ""
    }
}

/// Bytes that this process may still write to the file's file system.
fn free(file: &File) -> Option<u64> {
    // SAFETY: all zeros are a valid `statvfs`.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: one structure is written.
    let rc = unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut found) };
    (rc == 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
}
