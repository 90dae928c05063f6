//! A timer among the descriptors that a thread waits for in `poll(2)`: a timerfd.

use crate::error::{Error, Result};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Readable when its time has come, until [`clear`](Self::clear) or [`set`](Self::set).
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    /// One that is not set.
    pub(crate) fn new() -> Result<Timer> {
        // SAFETY: a plain system call.
        let timer = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        if timer < 0 {
            return Err(Error::io("create a timer", &io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Timer(unsafe { OwnedFd::from_raw_fd(timer) }))
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Its time comes after `left`, which counts as a nanosecond at least; `None`: never.
    pub(crate) fn set(&self, left: Option<Duration>) {
        // Zero would never come.
        let left = left.map_or(Duration::ZERO, |left| left.max(Duration::from_nanos(1)));
        // SAFETY: an all-zero itimerspec is valid; timerfd_settime reads one.
        unsafe {
            let mut spec: libc::itimerspec = std::mem::zeroed();
            spec.it_value.tv_sec = left.as_secs() as libc::time_t;
            spec.it_value.tv_nsec = left.subsec_nanos() as libc::c_long;
            libc::timerfd_settime(self.fd(), 0, &raw const spec, std::ptr::null_mut());
        }
    }

    /// Makes the descriptor unreadable until its time comes again.
    pub(crate) fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes. EAGAIN means that its time has not come.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }
}
