//! Opens on the thread that every wait may be left on, and as for files on a disk that this process has loaded from: the
//! checkpoint, or the error, must be the same.

use penstock::format::{Checkpoint, FolderRequest, TensorInfo};
use penstock::store::{Files, Stores};
use penstock::Error;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

fn parts(t: TensorInfo<'_>) -> (u32, &str, &'static str, &[u64], u32, u64, u64) {
    (t.index, t.name, t.dtype.name(), t.shape, t.file, t.begin, t.end)
}

pub(crate) fn open<P: AsRef<Path>>(sources: &[P]) -> Result<Checkpoint, Error> {
    // Temporary files are all on one disk. If they are not on a disk (tmpfs, overlay), both ways open alike. Once per
    // process: a test may open as a user who may write nowhere.
    static DISK_KNOWN: Once = Once::new();
    DISK_KNOWN.call_once(|| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        Files::from_paths(&[file.path()]).and_then(|files| files.facts(0)).expect("told");
    });
    let paths: Vec<PathBuf> = sources.iter().map(|p| p.as_ref().to_path_buf()).collect();
    let here = Checkpoint::open_cancellable(
        &paths,
        &FolderRequest::plain(),
        &Stores::default(),
        Duration::from_secs(120),
        || true,
    );
    let there = Checkpoint::open(&paths);
    match (&here, &there) {
        (Ok(a), Ok(b)) => {
            assert!(a.tensors().map(parts).eq(b.tensors().map(parts)));
            assert_eq!(format!("{:?}", a.files()), format!("{:?}", b.files()));
            assert_eq!((a.metadata(), a.warnings()), (b.metadata(), b.warnings()));
        }
        (Err(a), Err(b)) => {
            assert_eq!((a.kind(), a.to_string()), (b.kind(), b.to_string()));
            assert_eq!((a.path(), a.byte_range(), a.errno()), (b.path(), b.byte_range(), b.errno()));
        }
        _ => panic!("{:?} here, {:?} there", here.as_ref().err(), there.as_ref().err()),
    }
    here
}
