//! One connection: a socket that never blocks, with or without TLS. Bytes are received where they belong.

use super::proxy::Via;
use super::racing::Attempt;
use super::socket::{self, WithoutSignal};
use super::tunnel::Tunnel;
use super::wires::WireEnd;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// Encrypted bytes that are received at once: four records and a bit.
const ENCRYPTED: usize = 68 << 10;

/// A connection.
pub(in crate::store::remote) struct Connection {
    socket: TcpStream,
    is_connected: bool,
    via: Option<Via>,
    /// The tunnel that the proxy opens first.
    tunnel: Option<Tunnel>,
    tls: Option<Box<Encrypted>>,
    /// Bytes to send, and how many of them were sent.
    out: Vec<u8>,
    sent: usize,
    /// The server's address that it tries.
    attempt: Option<Attempt>,
}

/// TLS over the socket, by rustls with its own buffers.
struct Encrypted {
    connection: ClientConnection,
    /// Bytes from the socket that rustls has not taken yet.
    received: Vec<u8>,
    from: usize,
    until: usize,
    /// Whether rustls may have decrypted bytes that were not taken.
    unread: bool,
}

impl Connection {
    /// Begins to connect over `interface`, or as the system routes it, to the server or to the proxy for it. Bytes to
    /// send wait until the connection is there.
    pub(in crate::store::remote) fn connect(
        to: &SocketAddr,
        interface: Option<&str>,
        via: Option<Via>,
        tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    ) -> io::Result<Connection> {
        let socket = socket::connect(to, interface)?;
        let tls = match tls {
            None => None,
            Some((config, name)) => {
                let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
                Some(Box::new(Encrypted { connection, received: vec![0; ENCRYPTED], from: 0, until: 0, unread: false }))
            }
        };
        let tunnel = via.as_ref().and_then(Via::tunnel);
        Ok(Connection { socket, is_connected: false, via, tunnel, tls, out: Vec::new(), sent: 0, attempt: None })
    }

    /// One of several addresses of a server.
    pub(super) fn attempting(self, attempt: Attempt) -> Connection {
        Connection { attempt: Some(attempt), ..self }
    }

    pub(in crate::store::remote) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl WireEnd for Connection {
    fn leave(&mut self) {
        let _it_may_be_gone = self.socket.shutdown(Shutdown::Write);
    }

    fn abort(&mut self) {
        let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
        let size = size_of::<libc::linger>() as libc::socklen_t;
        // Without it the other end hears of it as soon as it sends something.
        // SAFETY: the option has the size that is given.
        unsafe { libc::setsockopt(self.fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const at_once).cast(), size) };
    }

    fn discard(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // What is encrypted is discarded as it is.
        self.socket.read(into)
    }

    fn is_ready(&mut self) -> io::Result<bool> {
        let Connection { socket, is_connected, tunnel, tls, attempt, .. } = self;
        if !*is_connected {
            *is_connected = socket::is_connected(socket).inspect_err(|e| {
                attempt.iter().for_each(|attempt| attempt.health.failed(&attempt.to, e));
            })?;
            if !*is_connected {
                return Ok(false);
            }
            attempt.take().iter().for_each(|attempt| attempt.health.answered(&attempt.to));
        }
        if let Some(asked) = tunnel {
            match asked.open(socket) {
                Ok(()) => *tunnel = None,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        match tls {
            None => Ok(true),
            Some(tls) => tls.shake(socket),
        }
    }

    fn say(&mut self, text: String) {
        let text = text.into_bytes();
        self.out = match &self.via {
            Some(via) => via.worded(text),
            None => text,
        };
        self.sent = 0;
    }

    fn send(&mut self) -> io::Result<()> {
        let Connection { socket, tls, out, sent, .. } = self;
        if let Some(tls) = tls {
            if *sent < out.len() {
                tls.connection.writer().write_all(&out[*sent..])?;
                *sent = out.len();
            }
            return tls.send(socket);
        }
        while *sent < out.len() {
            match socket.write(&out[*sent..]) {
                Ok(n) => *sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn has_to_send(&self) -> bool {
        match &self.tunnel {
            _ if !self.is_connected => true,
            Some(tunnel) => tunnel.has_to_send(),
            None => self.sent < self.out.len() || self.tls.as_ref().is_some_and(|tls| tls.connection.wants_write()),
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.is_late(now))
    }

    fn has_other(&self) -> bool {
        self.attempt.as_ref().is_some_and(Attempt::has_other)
    }

    fn holds_bytes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.from < tls.until || tls.unread)
    }

    unsafe fn receive(&mut self, places: &mut [libc::iovec]) -> io::Result<usize> {
        match &mut self.tls {
            // SAFETY: as the caller promises.
            None => unsafe { socket::receive(&self.socket, places) },
            // SAFETY: as the caller promises.
            Some(tls) => unsafe { tls.receive(&mut self.socket, places) },
        }
    }
}

impl Encrypted {
    /// Sends what TLS has to say, as far as it goes.
    fn send(&mut self, socket: &mut TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            if let Err(e) = self.connection.write_tls(&mut WithoutSignal(&mut *socket)) {
                return if e.kind() == io::ErrorKind::WouldBlock { Ok(()) } else { Err(e) };
            }
        }
        Ok(())
    }

    /// Shakes hands, as far as it goes. Whether that is done.
    fn shake(&mut self, socket: &mut TcpStream) -> io::Result<bool> {
        loop {
            self.send(socket)?;
            if !self.connection.is_handshaking() {
                return Ok(true);
            }
            match self.fill(socket) {
                Ok(true) => {}
                Ok(false) => {
                    let text = "the server closed the connection during the TLS handshake";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// Gives rustls more of what has come; false at the end of the connection.
    fn fill(&mut self, socket: &mut TcpStream) -> io::Result<bool> {
        if self.from == self.until {
            // SAFETY: `received` is ours.
            let got = unsafe {
                let place = libc::iovec { iov_base: self.received.as_mut_ptr().cast(), iov_len: self.received.len() };
                socket::receive(socket, &mut [place])?
            };
            if got == 0 {
                return Ok(false);
            }
            (self.from, self.until) = (0, got);
        }
        let mut rest = &self.received[self.from..self.until];
        let taken = self.connection.read_tls(&mut rest)?;
        if taken == 0 {
            return Ok(false);
        }
        self.from += taken;
        let processed = self.connection.process_new_packets();
        // The handshake answers, and so does an alert.
        while self.connection.wants_write() && self.connection.write_tls(&mut WithoutSignal(&mut *socket)).is_ok() {}
        processed.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(true)
    }

    /// # Safety
    /// As [`WireEnd::receive`].
    unsafe fn receive(&mut self, socket: &mut TcpStream, places: &mut [libc::iovec]) -> io::Result<usize> {
        loop {
            let mut got = 0;
            for place in places.iter() {
                if place.iov_len == 0 {
                    continue;
                }
                // SAFETY: as the caller promises; nobody else looks at the memory of a read in flight.
                let into = unsafe { std::slice::from_raw_parts_mut(place.iov_base.cast::<u8>(), place.iov_len) };
                match self.connection.reader().read(into) {
                    Ok(n) => {
                        got += n;
                        self.unread = n == into.len();
                        if !self.unread {
                            break;
                        }
                    }
                    Err(_) if got > 0 => break,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        self.unread = false;
                        break;
                    }
                    Err(e) => return Err(e),
                }
            }
            if got > 0 {
                return Ok(got);
            }
            if !self.fill(socket)? {
                return Ok(0);
            }
        }
    }
}
