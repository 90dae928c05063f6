//! Sockets that never block.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};

/// Begins to connect to an address, over `interface` if it is given.
pub(super) fn connect(to: &SocketAddr, interface: Option<&str>) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: a plain system call.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let socket = unsafe { TcpStream::from_raw_fd(fd) };
    // Requests are single small segments. If the kernel refuses, they only leave later.
    let _they_leave_later = socket.set_nodelay(true);
    if let Some(name) = interface {
        bind(&socket, name)?;
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
fn bind(socket: &TcpStream, interface: &str) -> io::Result<()> {
    let (fd, name, size) = (socket.as_raw_fd(), interface.as_ptr().cast(), interface.len() as libc::socklen_t);
    // SAFETY: a text of that length.
    match unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name, size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether it is connected; an error if that has failed.
pub(super) fn is_connected(socket: &TcpStream) -> io::Result<bool> {
    if let Some(e) = socket.take_error()? {
        return Err(e);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(e) => Err(e),
    }
}

/// # Safety
/// As [`WireEnd::receive`](super::wires::WireEnd::receive).
pub(super) unsafe fn receive(socket: &TcpStream, places: &mut [libc::iovec]) -> io::Result<usize> {
    loop {
        // SAFETY: as the caller promises.
        let got = unsafe { libc::readv(socket.as_raw_fd(), places.as_ptr(), places.len() as i32) };
        if got >= 0 {
            return Ok(got as usize);
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Sends without a signal where the connection is gone. Many buffers at once would go out by `writev`, which raises SIGPIPE.
pub(super) struct WithoutSignal<S>(pub(super) S);

impl<S: Read> Read for WithoutSignal<S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl<S: Write> Write for WithoutSignal<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::IoSlice;
    use std::net::TcpListener;

    /// Whether SIGPIPE waits for this thread, which lets it wait from now on.
    fn is_signalled() -> bool {
        // SAFETY: plain system calls on sets of our own.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGPIPE);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            libc::sigpending(&raw mut set);
            libc::sigismember(&raw const set, libc::SIGPIPE) == 1
        }
    }

    #[test]
    fn what_is_sent_to_a_connection_that_is_gone_is_an_error_and_no_signal() {
        assert!(!is_signalled());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drop(listener.accept().unwrap());
        let parts = [IoSlice::new(b"one"), IoSlice::new(b"two")];
        // The first bytes are answered with a reset; the error after that is a broken pipe.
        let errors = std::iter::from_fn(|| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            Some(WithoutSignal(&socket).write_vectored(&parts).err())
        });
        let seen: Vec<_> = errors.flatten().take(2).map(|e| e.kind()).collect();
        assert!(seen.contains(&io::ErrorKind::BrokenPipe), "{seen:?}");
        assert!(!is_signalled());
        // A signal would have been seen.
        assert_eq!((&socket).write_vectored(&parts).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert!(is_signalled());
    }
}
