//! Mirrors that have failed lately.

use crate::error::Error;
use crate::sync::{lock, Mutex};
use std::time::{Duration, Instant};

/// Mirrors that have failed lately. A read that waits for its answer does not ask them.
#[derive(Debug)]
pub(super) struct Resting(Vec<Mutex<Option<Instant>>>);

impl Resting {
    /// A mirror that has failed rests for so long.
    const TIME: Duration = Duration::from_secs(30);

    pub(super) fn of(mirrors: usize) -> Resting {
        Resting((0..mirrors).map(|_| Mutex::new(None)).collect())
    }

    /// A mirror has failed.
    pub(super) fn begin(&self, mirror: usize) {
        *lock(&self.0[mirror]) = Some(Instant::now());
    }

    pub(super) fn rests(&self, mirror: usize) -> bool {
        lock(&self.0[mirror]).is_some_and(|since| since.elapsed() < Resting::TIME)
    }
}

/// True if a mirror is there, and does not have what was asked for.
pub(super) fn is_not_there(e: &Error) -> bool {
    e.status() == Some(404)
}
