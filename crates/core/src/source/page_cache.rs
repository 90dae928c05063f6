//! What the commands `warm` and `evict` do to one file, on a thread that can be left behind: its file system may hang.

use super::file::{evict, warm_telling, Files, Residency, Warming};
use crate::aside::aside;
use crate::error::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// [`warm`](super::warm), given up where `go_on`, asked every 50 ms, says so (kind `Cancelled`), and where nothing is read
/// for `stall` (kind `Timeout`).
pub fn warm_while(path: &Path, threads: usize, stall: Duration, go_on: impl FnMut() -> bool) -> Result<u64> {
    let state = Arc::new(Warming::default());
    let (file, shared) = (path.to_path_buf(), Arc::clone(&state));
    let found = aside(move || warm_telling(&file, threads, &shared), Some(stall), || state.read(), go_on);
    // Where it was given up, its threads end with the reads that they are in.
    state.stop();
    found.map_err(|e| e.at(path))
}

/// [`evict`], given up where `go_on`, asked every 50 ms, says so (kind `Cancelled`). Writing back what is dirty may take
/// any time, without an answer of the file system in between.
pub fn evict_while(path: &Path, go_on: impl FnMut() -> bool) -> Result<u64> {
    let file = path.to_path_buf();
    aside(move || evict(&file, None), None, || 0, go_on).map_err(|e| e.at(path))
}

/// What of a file is in the page cache, and its size in bytes; given up as [`warm_while`] is.
pub fn residency_while(path: &Path, stall: Duration, go_on: impl FnMut() -> bool) -> Result<(Residency, u64)> {
    let file: PathBuf = path.to_path_buf();
    let work = move || {
        let files = Files::from_paths(&[&file])?;
        Ok((files.resident_ranges(0)?, files.size(0)))
    };
    aside(work, Some(stall), || 0, go_on).map_err(|e| e.at(path))
}
