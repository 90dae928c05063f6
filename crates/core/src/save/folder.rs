//! Directories of checkpoints: made if they are missing, cleared of earlier saves, written to the disk.

use super::names::{belongs, index_of};
use super::output::{kind_of, parent};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A checkpoint's directory.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Directories in which new directories were made.
    pub(super) with_new_names: Vec<PathBuf>,
    /// Files of an earlier save with the same name that were there when this save began.
    earlier: Vec<(PathBuf, Stamp)>,
    /// The single file and the index, which readers go by, as they were then; `None`: there was none.
    visible: [(PathBuf, Option<Stamp>); 2],
    /// True if the numbers of files stay the same.
    has_inodes: bool,
}

/// File systems on which this machine may make up other inode numbers for the same files.
const MADE_UP_INODES: [&str; 5] = ["fuse", "cifs", "smb2", "9p", "vboxsf"];

/// Tells a file from another one that gets its name later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    /// Device and inode.
    number: (u64, u64),
    size: u64,
    /// When it was written: seconds, and nanoseconds.
    written: (i64, i64),
}

fn identity(found: &Metadata) -> Stamp {
    let (number, written) = ((found.dev(), found.ino()), (found.mtime(), found.mtime_nsec()));
    Stamp { number, size: found.len(), written }
}

/// The file that has this name now.
fn look(path: &Path) -> Result<Option<Stamp>> {
    match fs::symlink_metadata(path) {
        Ok(found) => Ok(Some(identity(&found))),
        Err(cause) => match (cause.kind(), cause.raw_os_error()) {
            // No file can have a name that is too long, or has a NUL.
            (io::ErrorKind::NotFound | io::ErrorKind::InvalidInput, _)
            | (_, Some(libc::ENOTDIR | libc::ENAMETOOLONG)) => Ok(None),
            _ => {
                let e = Error::write("look whether another program has written this file", &cause).at(path);
                Err(e.reworded(|why| format!("{why}; nothing of this save is visible")))
            }
        },
    }
}

impl Folder {
    /// Makes the directory and its missing parents, and lists what is there.
    pub(super) fn new(path: &Path, name: &str) -> Result<Folder> {
        let mut with_new_names = Vec::new();
        for missing in path.ancestors().filter(|p| !p.as_os_str().is_empty()) {
            match fs::metadata(missing) {
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                    with_new_names.push(parent(missing).to_path_buf());
                }
                Ok(found) if !found.is_dir() && missing == path => {
                    let text = "it is a file: give a directory, or save to one file";
                    return Err(Error::invalid(text).at(path));
                }
                _ => break,
            }
        }
        fs::create_dir_all(path).map_err(|e| Error::write("make the directory", &e).at(path))?;
        let listed = fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let mut earlier = Vec::new();
        for entry in listed.map_err(|e| Error::write("look for files of an earlier save", &e).at(path))? {
            if entry.file_name().to_str().is_some_and(|found| belongs(found, name)) {
                match entry.metadata() {
                    // A save leaves no directory behind, and no link to one.
                    Ok(found) if !entry.path().is_dir() => earlier.push((entry.path(), identity(&found))),
                    _ => {}
                }
            }
        }
        // The index goes first. If one file cannot be removed, shards without an index are better than an index without
        // shards.
        earlier.sort_by_key(|(path, _)| path.extension().is_none_or(|e| e != "json"));
        let [single, index] = [path.join(name), path.join(index_of(name))].map(|path| (look(&path), path));
        let visible = [(single.1, single.0?), (index.1, index.0?)];
        let has_inodes = !MADE_UP_INODES.contains(&kind_of(path));
        Ok(Folder { path: path.to_path_buf(), with_new_names, earlier, visible, has_inodes })
    }

    /// Fails if another program has written the index or the single file since this save began: readers would take its
    /// checkpoint for this one, or the shards of both for one. A file that was removed meanwhile is no conflict: nothing is
    /// lost. Files of this save that are written under their names (`ours`) are left out.
    ///
    /// # Errors
    /// `Changed`; `Write` if that cannot be found out.
    pub(super) fn check_unchanged(&self, ours: &[&Path]) -> Result<()> {
        for (path, before) in self.visible.iter().filter(|(path, _)| !ours.contains(&path.as_path())) {
            let Some(now) = look(path)? else { continue };
            if before.is_none_or(|before| !self.is_same(before, now)) {
                let why = "another program has written this file since this save began";
                let text = format!("{why}; nothing of this save is visible: save again to replace it");
                return Err(Error::new(ErrorKind::Changed, text).at(path));
            }
        }
        Ok(())
    }

    fn is_same(&self, before: Stamp, now: Stamp) -> bool {
        let is_one = !self.has_inodes || before.number == now.number;
        is_one && (before.size, before.written) == (now.size, now.written)
    }

    /// Removes the files of an earlier save, because a reader of the directory would take them for a part of this one.
    /// The files called `names` stay, and so do files that others have put there meanwhile. A link is removed, its
    /// target stays. Returns whether there was anything. Continues after an error and returns the first error.
    pub(super) fn remove_earlier(&self, names: &[OsString]) -> Result<bool> {
        let found = names.iter().filter_map(|name| fs::symlink_metadata(self.path.join(name)).ok());
        let ours: HashSet<_> = found.map(|file| (file.dev(), file.ino())).collect();
        let (mut removed, mut failed) = (false, None);
        for (path, before) in &self.earlier {
            let Ok(now) = fs::symlink_metadata(path) else { continue };
            if ours.contains(&(now.dev(), now.ino())) || !self.is_same(*before, identity(&now)) {
                continue;
            }
            match fs::remove_file(path) {
                Ok(()) => removed = true,
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
                Err(cause) => {
                    let doing = "remove this file of an earlier save (the new save is complete)";
                    failed.get_or_insert(Error::write(doing, &cause).at(path));
                }
            }
        }
        failed.map_or(Ok(removed), Err)
    }
}

/// Waits until the names in a directory are on the disk. Not every file system can do that, and a process that may not
/// read the directory cannot ask for it. Both are reported.
pub(super) fn sync(folder: &Path) -> Result<Option<Fallback>> {
    let Err(cause) = File::open(folder).and_then(|folder| folder.sync_all()) else { return Ok(None) };
    match cause.raw_os_error() {
        Some(
            libc::EINVAL | libc::EROFS | libc::EBADF | libc::EACCES | libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS,
        ) => {
            let reason = format!("{}: {cause}", folder.display());
            Ok(Some(Fallback { from: "fsync of the directory", to: "none", reason }))
        }
        _ => Err(Error::write("write the directory to the disk", &cause).at(folder)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_others_were_made_in_are_known() {
        let inside = tempfile::tempdir().unwrap();
        let (a, b) = (inside.path().join("a"), inside.path().join("a/b"));
        let made = Folder::new(&b, "m").unwrap();
        assert_eq!(made.with_new_names, [a, inside.path().to_path_buf()]);
        assert!(b.is_dir());
        let round = inside.path().join("c/../d");
        Folder::new(&round, "m").unwrap();
        for there in [b, round, PathBuf::from("."), PathBuf::from("..")] {
            assert_eq!(Folder::new(&there, "m").unwrap().with_new_names, Vec::<PathBuf>::new(), "{}", there.display());
        }
        File::create(inside.path().join("file")).unwrap();
        assert_eq!(Folder::new(&inside.path().join("file"), "m").err().unwrap().kind(), ErrorKind::Invalid);
        assert_eq!(Folder::new(&inside.path().join("file/in"), "m").err().unwrap().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn what_others_put_there_meanwhile_stays() {
        let inside = tempfile::tempdir().unwrap();
        let at = |name: &str| inside.path().join(name);
        for name in ["m.safetensors", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"] {
            File::create(at(name)).unwrap();
        }
        std::fs::create_dir(at("m-00001-of-00001.safetensors")).unwrap();
        let folder = Folder::new(inside.path(), "m.safetensors").unwrap();
        std::fs::write(at("new"), "by another save").unwrap();
        std::fs::rename(at("new"), at("m-00001-of-00002.safetensors")).unwrap();
        std::fs::write(at("m-00001-of-00003.safetensors"), "by another save").unwrap();
        assert!(folder.remove_earlier(&["m.safetensors".into()]).unwrap());
        assert!(!folder.remove_earlier(&["m.safetensors".into()]).unwrap());
        let mut left: Vec<_> =
            fs::read_dir(inside.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(
            left,
            [
                "m-00001-of-00001.safetensors",
                "m-00001-of-00002.safetensors",
                "m-00001-of-00003.safetensors",
                "m.safetensors"
            ]
        );
    }

    #[test]
    fn what_another_program_has_written_is_a_conflict_and_what_it_has_removed_is_none() {
        for name in ["m.safetensors", "m.safetensors.index.json"] {
            let inside = tempfile::tempdir().unwrap();
            let at = inside.path().join(name);
            let begun = || Folder::new(inside.path(), "m.safetensors").unwrap();
            let refused = |folder: &Folder| folder.check_unchanged(&[]).unwrap_err();
            let before = begun();
            before.check_unchanged(&[]).unwrap();
            fs::write(&at, "by another program").unwrap();
            assert_eq!(refused(&before).kind(), ErrorKind::Changed);
            assert!(refused(&before).to_string().starts_with(at.to_str().unwrap()), "{}", refused(&before));
            before.check_unchanged(&[at.as_path()]).unwrap();
            let before = begun();
            before.check_unchanged(&[]).unwrap();
            // The same size and time, but another file.
            fs::write(inside.path().join("new"), "by another program").unwrap();
            let time = fs::metadata(&at).unwrap().modified().unwrap();
            File::options().write(true).open(inside.path().join("new")).unwrap().set_modified(time).unwrap();
            fs::rename(inside.path().join("new"), &at).unwrap();
            assert_eq!(refused(&before).kind(), ErrorKind::Changed);
            Folder { has_inodes: false, ..before }.check_unchanged(&[]).unwrap();
            let before = begun();
            fs::write(&at, "in its place").unwrap();
            assert_eq!(refused(&Folder { has_inodes: false, ..before }).kind(), ErrorKind::Changed);
            let before = begun();
            fs::remove_file(&at).unwrap();
            before.check_unchanged(&[]).unwrap();
        }
    }

    #[test]
    fn a_folder_that_cannot_be_looked_at_is_an_error_with_its_cause() {
        let inside = tempfile::tempdir().unwrap();
        let path = inside.path().join("folder");
        let folder = Folder::new(&path, "m.safetensors").unwrap();
        fs::rename(&path, inside.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("folder", &path).unwrap();
        let e = folder.check_unchanged(&[]).unwrap_err();
        assert_eq!((e.kind(), e.errno()), (ErrorKind::Write, Some(libc::ELOOP)), "{e}");
        assert!(e.message().ends_with("nothing of this save is visible"), "{e}");
    }

    #[test]
    fn an_index_goes_first() {
        let inside = tempfile::tempdir().unwrap();
        let shards: Vec<String> = (1..=9).map(|i| format!("m-{i:05}-of-00009.safetensors")).collect();
        for name in shards.iter().map(String::as_str).chain(["m.safetensors.index.json"]) {
            File::create(inside.path().join(name)).unwrap();
        }
        let folder = Folder::new(inside.path(), "m.safetensors").unwrap();
        let first = folder.earlier[0].0.file_name().unwrap();
        assert_eq!((first.to_str(), folder.earlier.len()), (Some("m.safetensors.index.json"), 10));
    }

    #[test]
    fn a_directory_that_cannot_be_brought_to_the_disk_is_told() {
        assert!(sync(Path::new(".")).unwrap().is_none());
        let told = sync(Path::new("/proc/self")).unwrap().unwrap();
        assert!(told.reason.starts_with("/proc/self: "), "{}", told.reason);
        assert_eq!(sync(Path::new("/proc/self/nowhere")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
