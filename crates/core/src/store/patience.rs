//! Work that asks a file system about files, and may hang.

use super::storage::Storage;
use crate::detached::detached;
use crate::error::{ErrorKind, Result};
use std::time::Duration;

/// Does work that asks the file system about `files`, at most `stall` per answer.
pub(crate) fn patiently<T: Send + 'static>(
    files: &Storage,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    stall: Duration,
    go_on: impl FnMut() -> bool,
) -> Result<T> {
    let mut busy = 0;
    // While no answer is waited for, the planning takes its time.
    let progress = || {
        files.asking().map_or_else(
            || {
                busy += 1;
                u64::MAX - busy
            },
            |(answers, _)| answers,
        )
    };
    detached(work, Some(stall), progress, go_on).map_err(|e| match files.asking() {
        Some((_, file)) if e.kind() == ErrorKind::Timeout => e.at(files.path(file)),
        _ => e,
    })
}
