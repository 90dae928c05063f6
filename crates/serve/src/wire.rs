//! A socket, with or without TLS. Its calls never wait: `WouldBlock` says that they would.

use rustls::{ServerConfig, ServerConnection};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Wire {
    socket: TcpStream,
    tls: Option<Box<ServerConnection>>,
}

impl Wire {
    pub(crate) fn new(socket: TcpStream, tls: Option<&Arc<ServerConfig>>) -> io::Result<Wire> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let begun = tls.map(|config| ServerConnection::new(config.clone()).map(Box::new)).transpose();
        Ok(Wire { socket, tls: begun.map_err(io::Error::other)? })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// True if it has bytes of TLS to send, whatever the connection does.
    pub(crate) fn wants_to_send(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Receives bytes; 0 at the end.
    pub(crate) fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return (&self.socket).read(into) };
        loop {
            match tls.reader().read(into) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                // An end without a word of TLS ends a connection too: no request is read from half a head
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            // What TLS itself has to say goes first: its peer may wait for it before it sends anything.
            match flush(tls, &self.socket) {
                Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                _ => {}
            }
            tls.read_tls(&mut &self.socket)?;
            let understood = tls.process_new_packets();
            match flush(tls, &self.socket) {
                Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                _ => understood.map_err(io::Error::other)?,
            };
        }
    }

    /// Sends bytes, at least one of them. `more` says that others follow at once.
    pub(crate) fn send(&mut self, bytes: &[u8], more: bool) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            let flags = libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
            // SAFETY: the bytes are borrowed for the call.
            let sent = unsafe { libc::send(self.socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
            return usize::try_from(sent).map_err(|_| io::Error::last_os_error());
        };
        flush(tls, &self.socket)?;
        let taken = tls.writer().write(bytes)?;
        match flush(tls, &self.socket) {
            Err(e) if e.kind() != ErrorKind::WouldBlock => Err(e),
            _ => Ok(taken),
        }
    }

    /// Sends what TLS still has.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.tls.as_mut().map_or(Ok(()), |tls| flush(tls, &self.socket))
    }

    /// Sends bytes of a file from `at` on, at most `count`; 0 at the end of the file. Plain connections only.
    pub(crate) fn send_file(&mut self, file: BorrowedFd, at: u64, count: usize) -> io::Result<usize> {
        let mut at = i64::try_from(at).map_err(|_| ErrorKind::InvalidInput)?;
        // SAFETY: both descriptors are open, and `at` is a number to read and write.
        let sent = unsafe { libc::sendfile64(self.socket.as_raw_fd(), file.as_raw_fd(), &raw mut at, count) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Says that nothing more is sent.
    pub(crate) fn finish(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            let _ = flush(tls, &self.socket);
        }
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Resets the connection: what is on its way is thrown away, and the client gets an error.
    pub(crate) fn reset(self) {
        let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
        let size = std::mem::size_of_val(&at_once) as libc::socklen_t;
        let option = (&raw const at_once).cast();
        // SAFETY: a structure of this size.
        unsafe { libc::setsockopt(self.socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, option, size) };
    }
}

fn flush(tls: &mut ServerConnection, mut socket: &TcpStream) -> io::Result<()> {
    while tls.wants_write() {
        if tls.write_tls(&mut socket)? == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
    }
    Ok(())
}
