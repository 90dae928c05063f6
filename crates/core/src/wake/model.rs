//! The eventfd as loom sees it: a flag and its waiters.

use crate::error::Result;
use crate::sync::{lock, Condvar, Mutex};
use std::os::fd::RawFd;
use std::sync::PoisonError;

/// A flag that is up from [`notify`](Self::notify) until [`clear`](Self::clear).
#[derive(Debug)]
pub struct Wake {
    notified: Mutex<bool>,
    changed: Condvar,
}

impl Wake {
    /// A new one, not notified.
    pub fn new() -> Result<Self> {
        Ok(Self { notified: Mutex::new(false), changed: Condvar::new() })
    }

    /// No descriptor: models wait by [`wait`](Self::wait).
    pub fn fd(&self) -> RawFd {
        -1
    }

    /// Puts the flag up.
    pub fn notify(&self) {
        *lock(&self.notified) = true;
        self.changed.notify_all();
    }

    /// Takes the flag down.
    pub fn clear(&self) {
        *lock(&self.notified) = false;
    }

    /// Whether the flag is up; waits for it without a limit unless `timeout_ms` is 0. There is no time in a model.
    pub fn wait(&self, timeout_ms: i32) -> bool {
        let mut notified = lock(&self.notified);
        while !*notified && timeout_ms != 0 {
            notified = self.changed.wait(notified).unwrap_or_else(PoisonError::into_inner);
        }
        *notified
    }
}
