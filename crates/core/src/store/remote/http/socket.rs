//! A socket that never blocks.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A socket that never blocks.
pub(super) struct Socket(OwnedFd);

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Socket {
    /// The same, for calls that block.
    pub(super) fn into_blocking(self) -> io::Result<TcpStream> {
        let stream = TcpStream::from(self.0);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// A socket that lets one connection wait, and takes none.
    #[cfg(test)]
    pub(super) fn deaf(at: &SocketAddr) -> io::Result<OwnedFd> {
        let listener = std::net::TcpListener::bind(at)?;
        // SAFETY: a plain system call.
        unsafe { libc::listen(listener.as_raw_fd(), 0) };
        Ok(listener.into())
    }

    /// Begins to connect to an address.
    pub(super) fn connect(to: &SocketAddr, interface: Option<&str>) -> io::Result<Socket> {
        let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // SAFETY: a plain system call.
        let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let socket = Socket(unsafe { OwnedFd::from_raw_fd(fd) });
        let one = 1i32;
        let size = size_of::<i32>() as libc::socklen_t;
        // Requests are single small segments. If the kernel refuses, they only leave later.
        // SAFETY: the option is four bytes.
        unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, (&raw const one).cast(), size) };
        if let Some(name) = interface {
            socket.bind(name)?;
        }
        let outcome = match to {
            SocketAddr::V4(v4) => {
                let name = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: an address of its size.
                unsafe { libc::connect(fd, (&raw const name).cast(), size_of_val(&name) as libc::socklen_t) }
            }
            SocketAddr::V6(v6) => {
                let name = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: an address of its size.
                unsafe { libc::connect(fd, (&raw const name).cast(), size_of_val(&name) as libc::socklen_t) }
            }
        };
        match outcome {
            0 => Ok(socket),
            _ => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
                e => Err(e),
            },
        }
    }

    /// Binds the socket to an interface. Linux lets every process do so since 5.7. A socket that is bound to an address only
    /// may still send over another interface.
    fn bind(&self, interface: &str) -> io::Result<()> {
        let (fd, name, size) = (self.0.as_raw_fd(), interface.as_ptr().cast(), interface.len() as libc::socklen_t);
        // SAFETY: a text of that length.
        match unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name, size) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether it is connected; an error if that has failed.
    pub(super) fn is_connected(&self) -> io::Result<bool> {
        let fd = self.0.as_raw_fd();
        let (mut code, mut size) = (0i32, size_of::<i32>() as libc::socklen_t);
        // SAFETY: the option is four bytes.
        if unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut code).cast(), &raw mut size) } < 0
        {
            return Err(io::Error::last_os_error());
        }
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        let (mut peer, mut size) = ([0u8; 128], 128 as libc::socklen_t);
        // SAFETY: the kernel writes at most `size` bytes.
        if unsafe { libc::getpeername(fd, peer.as_mut_ptr().cast(), &raw mut size) } == 0 {
            return Ok(true);
        }
        match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(false),
            e => Err(e),
        }
    }

    /// # Safety
    /// As [`WireEnd::receive`](super::wires::WireEnd::receive).
    pub(super) unsafe fn receive(&mut self, places: &mut [libc::iovec]) -> io::Result<usize> {
        loop {
            // SAFETY: as the caller promises.
            let got = unsafe { libc::readv(self.0.as_raw_fd(), places.as_ptr(), places.len() as i32) };
            if got >= 0 {
                return Ok(got as usize);
            }
            let e = io::Error::last_os_error();
            if e.kind() != io::ErrorKind::Interrupted {
                return Err(e);
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let place = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: the place is `into`.
        unsafe { self.receive(&mut [place]) }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: readable bytes, as the count says. A connection that is gone gives an error and no signal.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        if sent < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(sent as usize)
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
