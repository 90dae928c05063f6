//! The eventfd as loom sees it: a flag and its waiters.

use crate::error::Result;
use crate::sync::{lock, Condvar, Mutex};
use std::os::fd::RawFd;
use std::sync::PoisonError;

/// A flag that is up from [`notify`](Self::notify) until [`clear`](Self::clear).
#[derive(Debug)]
pub struct Wake {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Wake {
    /// A new one, not notified.
    pub fn new() -> Result<Self> {
        Ok(Self { rung: Mutex::new(false), changed: Condvar::new() })
    }

    /// No descriptor: models wait by [`wait`](Self::wait).
    pub fn fd(&self) -> RawFd {
        -1
    }

    /// Puts the flag up.
    pub fn notify(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_all();
    }

    /// Takes the flag down.
    pub fn clear(&self) {
        *lock(&self.rung) = false;
    }

    /// Whether the flag is up; waits for it without a limit unless `timeout_ms` is 0. There is no time in a model.
    pub fn wait(&self, timeout_ms: i32) -> bool {
        let mut rung = lock(&self.rung);
        while !*rung && timeout_ms != 0 {
            rung = self.changed.wait(rung).unwrap_or_else(PoisonError::into_inner);
        }
        *rung
    }
}
