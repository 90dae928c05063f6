//! epoll, of which each registration reports once and is armed again.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Waits for sockets.
#[derive(Debug)]
pub(crate) struct Poller(OwnedFd);

impl Poller {
    pub(crate) fn new() -> io::Result<Poller> {
        // SAFETY: no pointer is passed; the result is checked.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call gave a new descriptor that nobody else owns.
        Ok(Poller(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds a descriptor that reports to every thread, as long as it is readable.
    pub(crate) fn add_for_all(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN)
    }

    /// Adds a socket, which reports once.
    pub(crate) fn add(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN | libc::EPOLLONESHOT)
    }

    /// Has a socket report once more.
    pub(crate) fn arm(&self, fd: RawFd, token: u64, reads: bool, writes: bool) -> io::Result<()> {
        let events = if reads { libc::EPOLLIN } else { 0 } | if writes { libc::EPOLLOUT } else { 0 };
        self.control(libc::EPOLL_CTL_MOD, fd, token, events | libc::EPOLLONESHOT)
    }

    fn control(&self, operation: i32, fd: RawFd, token: u64, events: i32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: one event, borrowed for the call.
        match unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd, &raw mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The token of a descriptor that reports. Waits for one.
    pub(crate) fn wait(&self) -> io::Result<u64> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        loop {
            // SAFETY: room for one event, as the count says.
            match unsafe { libc::epoll_wait(self.0.as_raw_fd(), &raw mut event, 1, -1) } {
                1 => return Ok(event.u64),
                0 => {}
                _ => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(e),
                },
            }
        }
    }
}
