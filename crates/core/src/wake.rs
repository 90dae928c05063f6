//! How other threads wake the thread that sleeps in `poll(2)`: an eventfd.

use crate::error::{Error, Result};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An eventfd: readable from [`notify`](Self::notify) until [`clear`](Self::clear).
///
/// With this pattern no wake-up is lost: the waker first makes its news visible, then notifies; the woken thread first
/// clears, then looks for news.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// A new one: not readable, closed on exec.
    pub fn new() -> Result<Self> {
        // SAFETY: no pointer is passed; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::io("create an eventfd", &io::Error::last_os_error()));
        }
        // SAFETY: the call gave a new descriptor that nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The descriptor to wait on for readability.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Notifies: makes the descriptor readable. The write fails only if the counter is at its maximum, and then the
    /// descriptor is readable.
    pub fn notify(&self) {
        // SAFETY: eight readable bytes, as eventfd(2) asks.
        unsafe { libc::write(self.fd(), (&raw const ONE).cast(), 8) };
    }

    /// Clears: makes the descriptor unreadable until the next notification.
    pub fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes, as eventfd(2) asks. EAGAIN means that it was clear already.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }

    /// Whether it was notified since it was last cleared; waits up to `timeout_ms` (-1: without a limit) for that.
    pub fn wait(&self, timeout_ms: i32) -> bool {
        let mut fd = libc::pollfd { fd: self.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, as the count says.
        unsafe { libc::poll(&mut fd, 1, timeout_ms) == 1 }
    }
}

static ONE: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_readable_from_notify_to_clear() {
        let wake = Wake::new().unwrap();
        assert!(!wake.wait(0));
        wake.clear();
        wake.notify();
        wake.notify();
        assert!(wake.wait(0) && wake.wait(0));
        wake.clear();
        assert!(!wake.wait(0));
    }
}
