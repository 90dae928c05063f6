//! Directories of checkpoints: made where they are not there, cleared of earlier saves, brought to the disk.

use super::plan::{INDEX_SUFFIX, SUFFIX};
use crate::error::{Error, Result};
use crate::source::Fallback;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Makes a directory and those that it is in, as far as they are missing. Returns those that have got a new name.
pub(super) fn make(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut with_new_names = Vec::new();
    let mut folder_or_above = folder;
    while !folder_or_above.exists() {
        folder_or_above = match folder_or_above.parent() {
            Some(above) if !above.as_os_str().is_empty() => above,
            _ => Path::new("."),
        };
        with_new_names.push(folder_or_above.to_path_buf());
    }
    fs::create_dir_all(folder).map_err(|e| Error::write("make the directory", &e).at(folder))?;
    Ok(with_new_names)
}

/// Removes what an earlier save of the same name has left: a reader of the directory would take it for a part.
pub(super) fn remove_earlier(folder: &Path, name: &str, kept: &[String]) -> Result<()> {
    let listed = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let failed = |cause: &io::Error| Error::write("look for files of an earlier save", cause).at(folder);
    for entry in listed.map_err(|e| failed(&e))? {
        let found = entry.file_name();
        if !found.to_str().is_some_and(|found| belongs(found, name) && !kept.iter().any(|k| k == found)) {
            continue;
        }
        let path = entry.path();
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                return Err(Error::write("remove this file of an earlier save, the new one is whole", &cause).at(path));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a file is one that a save called `name` may have written.
fn belongs(found: &str, name: &str) -> bool {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let Some(rest) = found.strip_prefix(name.strip_suffix(SUFFIX).unwrap_or(name)) else { return false };
    let rest = rest.strip_suffix(INDEX_SUFFIX).unwrap_or(rest);
    match rest.strip_suffix(SUFFIX) {
        Some("") => true,
        Some(number) => {
            number.strip_prefix('-').and_then(|n| n.split_once("-of-")).is_some_and(|(n, of)| digits(n) && digits(of))
        }
        None => false,
    }
}

/// Waits until the names in a directory are on the disk. Not every file system has such a thing, and who may not read a
/// directory cannot ask: that is told.
pub(super) fn sync(folder: &Path) -> Result<Option<Fallback>> {
    let Err(cause) = File::open(folder).and_then(|folder| folder.sync_all()) else { return Ok(None) };
    match cause.raw_os_error() {
        Some(libc::EINVAL | libc::EROFS | libc::EBADF | libc::EACCES) => {
            let reason = format!("{}: {cause}", folder.display());
            Ok(Some(Fallback { from: "fsync of the directory", to: "none", reason }))
        }
        _ => Err(Error::write("bring the directory to the disk", &cause).at(folder)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_the_same_name_belong_to_an_earlier_save() {
        for name in ["model.safetensors", "model"] {
            for theirs in [
                "model.safetensors",
                "model.safetensors.index.json",
                "model-00001-of-00002.safetensors",
                "model-00001-of-00002.safetensors.index.json",
            ] {
                assert!(belongs(theirs, name), "{theirs}");
            }
            for other in [
                "model",
                "model.json",
                "model.index.json",
                "model-1-of-2.safetensors",
                "model-00001-of-000002.safetensors",
                "model-00001-00002.safetensors",
                "model-x0001-of-00002.safetensors",
                "model_adapter.safetensors",
                "xmodel.safetensors",
                "model.safetensors.bak",
            ] {
                assert!(!belongs(other, name), "{other}");
            }
        }
    }

    #[test]
    fn made_directories_are_named_in_those_above() {
        let inside = tempfile::tempdir().unwrap();
        let (a, b) = (inside.path().join("a"), inside.path().join("a/b"));
        assert_eq!(make(&b).unwrap(), [a.clone(), inside.path().to_path_buf()]);
        assert!(b.is_dir());
        assert_eq!(make(&b).unwrap(), Vec::<PathBuf>::new());
        assert_eq!(make(Path::new(".")).unwrap(), Vec::<PathBuf>::new());
    }
}
