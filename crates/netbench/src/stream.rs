//! The server's end of a connection, with or without TLS.

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ServerConnection, TcpStream>>, Vec<u8>),
}

impl Stream {
    pub(crate) fn accepted(socket: TcpStream, tls: Option<Arc<ServerConfig>>) -> io::Result<Stream> {
        let Some(config) = tls else { return Ok(Stream::Plain(socket)) };
        let mut connection = ServerConnection::new(config).map_err(io::Error::other)?;
        connection.set_buffer_limit(Some(1 << 20));
        Ok(Stream::Tls(Box::new(StreamOwned::new(connection, socket)), Vec::new()))
    }

    pub(crate) fn read_some(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(into),
            Stream::Tls(stream, _) => stream.read(into),
        }
    }

    pub(crate) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Stream::Plain(socket) => socket.write_all(bytes),
            Stream::Tls(stream, _) => stream.write_all(bytes),
        }
    }

    /// Sends at most so many bytes of a file from `at` on, and waits until the kernel has them. How many it were.
    pub(crate) fn send_file(&mut self, file: &File, at: u64, bytes: u64) -> io::Result<u64> {
        match self {
            Stream::Plain(socket) => {
                let mut from = at as libc::off_t;
                // SAFETY: two descriptors that are open, and a place for the offset.
                let sent =
                    unsafe { libc::sendfile(socket.as_raw_fd(), file.as_raw_fd(), &raw mut from, bytes as usize) };
                match sent {
                    0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                    sent if sent < 0 => match io::Error::last_os_error() {
                        e if e.kind() == io::ErrorKind::Interrupted => Ok(0),
                        e => Err(e),
                    },
                    sent => Ok(sent as u64),
                }
            }
            Stream::Tls(stream, buffer) => {
                let part = bytes.min(256 << 10) as usize;
                buffer.resize(part.max(buffer.len()), 0);
                file.read_exact_at(&mut buffer[..part], at)?;
                stream.write_all(&buffer[..part])?;
                Ok(part as u64)
            }
        }
    }

    /// Waits until the client closes the connection.
    pub(crate) fn wait_for_end(&mut self) -> io::Result<()> {
        let mut discarded = [0; 4096];
        while self.read_some(&mut discarded)? > 0 {}
        Ok(())
    }
}
