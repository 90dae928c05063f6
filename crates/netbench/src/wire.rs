//! A connection of the bare loop: plain, or TLS by rustls.

use crate::receive::{head, Piece, Setup};
use rustls::client::UnbufferedClientConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::ClientConnection;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

/// Bytes that are received in search of a head.
const HEAD: usize = 4096;
/// Encrypted bytes that are received at once. 64 KiB cost a tenth more processor time; more than 128 KiB gain nothing.
const ENCRYPTED: usize = 256 << 10;

pub(crate) struct Wire {
    socket: TcpStream,
    coding: Coding,
    body: Body,
}

enum Coding {
    Plain,
    /// rustls keeps what it decrypts in buffers of its own.
    Buffered(Box<ClientConnection>, Vec<u8>),
    /// rustls decrypts by its unbuffered interface.
    Unbuffered(Box<Unbuffered>),
}

struct Unbuffered {
    connection: UnbufferedClientConnection,
    received: Vec<u8>,
    used: usize,
    /// What is to be said when the handshake is over.
    request: Option<String>,
    out: Vec<u8>,
}

/// What has arrived of a piece.
struct Body {
    head: Vec<u8>,
    /// Whether the head is complete.
    begun: bool,
    at: *mut u8,
    left: usize,
}

impl Body {
    /// The rest of the place of the piece.
    fn rest(&mut self) -> &mut [u8] {
        // SAFETY: the rest of a piece of the memory, which outlives all connections and has no other user.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.left) }
    }

    fn advance(&mut self, bytes: usize) {
        (self.at, self.left) = (self.at.wrapping_add(bytes), self.left - bytes);
    }

    /// Takes bytes that have been received elsewhere.
    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if !self.begun {
            let had = self.head.len();
            self.head.extend_from_slice(bytes);
            let Some((status, body, length)) = head(&self.head)? else { return Ok(()) };
            if (status, body) != (206, self.left as u64) {
                return Err(io::Error::other(format!("status {status}, {body} bytes instead of {}", self.left)));
            }
            self.begun = true;
            bytes = &bytes[length - had..];
        }
        if bytes.len() > self.left {
            return Err(io::Error::other("a body that is too long"));
        }
        self.rest()[..bytes.len()].copy_from_slice(bytes);
        self.advance(bytes.len());
        Ok(())
    }
}

impl Wire {
    pub(crate) fn new(socket: TcpStream, setup: &Setup, host: &str) -> io::Result<Wire> {
        let name = || host.to_owned().try_into().map_err(io::Error::other);
        let coding = match setup.tls.clone() {
            None => Coding::Plain,
            Some(config) if setup.buffered => {
                let connection = ClientConnection::new(config, name()?).map_err(io::Error::other)?;
                Coding::Buffered(Box::new(connection), vec![0; ENCRYPTED])
            }
            Some(config) => {
                let connection = UnbufferedClientConnection::new(config, name()?).map_err(io::Error::other)?;
                let (received, out) = (vec![0; ENCRYPTED], vec![0; 16 << 10]);
                Coding::Unbuffered(Box::new(Unbuffered { connection, received, used: 0, request: None, out }))
            }
        };
        let body = Body { head: Vec::new(), begun: false, at: std::ptr::null_mut(), left: 0 };
        Ok(Wire { socket, coding, body })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Asks for a piece.
    pub(crate) fn ask(&mut self, piece: &Piece, request: &str) -> io::Result<()> {
        self.body.head.clear();
        (self.body.begun, self.body.at, self.body.left) = (false, piece.at, piece.length);
        match &mut self.coding {
            Coding::Plain => said(&self.socket, request.as_bytes()),
            Coding::Buffered(connection, _) => {
                connection.writer().write_all(request.as_bytes())?;
                flushed(connection, &self.socket)
            }
            Coding::Unbuffered(tls) => {
                tls.request = Some(request.to_owned());
                tls.advance(&self.socket, &mut self.body)
            }
        }
    }

    /// Receives what is there, once. Whether the piece is complete.
    pub(crate) fn receive(&mut self) -> io::Result<bool> {
        let Wire { socket, coding, body } = self;
        match coding {
            Coding::Plain if body.begun => {
                let got = some(socket, body.rest())?;
                body.advance(got);
            }
            Coding::Plain => {
                let mut first = [0; HEAD];
                let got = some(socket, &mut first)?;
                body.take(&first[..got])?;
            }
            Coding::Buffered(connection, received) => {
                let got = some(socket, received)?;
                let mut rest = &received[..got];
                while !rest.is_empty() {
                    connection.read_tls(&mut rest)?;
                    connection.process_new_packets().map_err(io::Error::other)?;
                    decrypted(connection, body)?;
                }
                flushed(connection, socket)?;
            }
            Coding::Unbuffered(tls) => {
                let got = some(socket, &mut tls.received[tls.used..])?;
                tls.used += got;
                tls.advance(socket, body)?;
            }
        }
        Ok(body.begun && body.left == 0)
    }
}

/// Takes what rustls has decrypted.
fn decrypted(connection: &mut ClientConnection, body: &mut Body) -> io::Result<()> {
    loop {
        let mut first = [0; HEAD];
        let got = if body.begun {
            if body.left == 0 {
                return Ok(());
            }
            connection.reader().read(body.rest())
        } else {
            connection.reader().read(&mut first)
        };
        match got {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) if body.begun => body.advance(got),
            Ok(got) => body.take(&first[..got])?,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
        }
    }
}

impl Unbuffered {
    /// Processes what has been received, and says what is to be said.
    fn advance(&mut self, socket: &TcpStream, body: &mut Body) -> io::Result<()> {
        let Unbuffered { connection, received, used, request, out } = self;
        let (mut from, mut written) = (0, 0);
        loop {
            let UnbufferedStatus { discard, state, .. } = connection.process_tls_records(&mut received[from..*used]);
            let mut discard = discard;
            let mut goes_on = true;
            match state.map_err(io::Error::other)? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record.map_err(io::Error::other)?;
                        discard += record.discard;
                        body.take(record.payload)?;
                    }
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    written += match data.encode(&mut out[written..]) {
                        Ok(bytes) => bytes,
                        Err(EncodeError::InsufficientSize(e)) => {
                            out.resize(written + e.required_size, 0);
                            data.encode(&mut out[written..]).map_err(io::Error::other)?
                        }
                        Err(e) => return Err(io::Error::other(e)),
                    };
                }
                ConnectionState::TransmitTlsData(data) => {
                    said(socket, &out[..written])?;
                    written = 0;
                    data.done();
                }
                ConnectionState::WriteTraffic(mut traffic) => match request.take() {
                    Some(text) => {
                        written = match traffic.encrypt(text.as_bytes(), out) {
                            Ok(bytes) => bytes,
                            Err(EncryptError::InsufficientSize(e)) => {
                                out.resize(e.required_size, 0);
                                traffic.encrypt(text.as_bytes(), out).map_err(io::Error::other)?
                            }
                            Err(e) => return Err(io::Error::other(e)),
                        };
                        said(socket, &out[..written])?;
                        written = 0;
                    }
                    None => goes_on = false,
                },
                ConnectionState::BlockedHandshake => goes_on = false,
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
            from += discard;
            if !goes_on {
                break;
            }
        }
        received.copy_within(from..*used, 0);
        *used -= from;
        Ok(())
    }
}

/// Receives once; nothing where nothing is there.
fn some(socket: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
    match (&*socket).read(into) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

fn flushed(connection: &mut ClientConnection, socket: &TcpStream) -> io::Result<()> {
    while connection.wants_write() {
        let mut out = Vec::new();
        connection.write_tls(&mut out)?;
        said(socket, &out)?;
    }
    Ok(())
}

/// Sends all of it. A request has a few hundred bytes, which the socket takes at once.
fn said(socket: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    (&*socket).write_all(bytes)
}
