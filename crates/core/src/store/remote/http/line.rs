//! A connection for a thread that may block: requests are sent on it, and answers received, one after the other.

use super::address::Server;
use super::answer::lenient;
use super::common::Common;
use super::proxy::Via;
use super::racing;
use super::socket::WithoutSignal;
use super::tunnel;
use rustls::{ClientConnection, StreamOwned};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest answer: a page of a listing has 1000 names of 1 KiB at most, as XML.
const LONGEST: usize = 16 << 20;
const MOST_FIELDS: usize = 128;
/// Bytes that are handed to the socket at once.
const STEP: usize = 256 << 10;
/// A call on the socket returns after so long at the latest: then the pace is asked again.
const TICK: Duration = Duration::from_millis(200);

/// How long a thread waits for a server, and how much it sends.
pub(in crate::store::remote) trait LinePace {
    /// The time that is left.
    ///
    /// # Errors
    /// `TimedOut` if there is none, `Interrupted` never: that is tried again.
    fn left(&self) -> io::Result<Duration>;

    /// So many of `most` bytes may be sent now, at least one. May wait.
    ///
    /// # Errors
    /// As for [`left`](Self::left).
    fn may_send(&self, most: usize) -> io::Result<usize> {
        Ok(most)
    }

    /// So many bytes went one way or the other.
    fn moved(&self, bytes: usize) {
        let _ = bytes;
    }
}

/// One moment until which everything must be done.
pub(in crate::store::remote) struct Deadline(pub(in crate::store::remote) Instant);

impl LinePace for Deadline {
    fn left(&self) -> io::Result<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        Ok(left)
    }
}

/// The error of a server that is silent.
pub(in crate::store::remote) fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server does not answer in time")
}

/// Status, fields and body of an answer.
pub(in crate::store::remote) type Parts = (u16, Vec<(String, Vec<u8>)>, Vec<u8>);

trait Wire: Read + Write + Send {
    /// Reads what the server has sent, and sends nothing: the connection takes no more.
    fn read_only(&mut self, into: &mut [u8]) -> io::Result<usize>;
}

impl Wire for WithoutSignal<TcpStream> {
    fn read_only(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read(into)
    }
}

impl<S: Read + Write + Send> Wire for StreamOwned<ClientConnection, S> {
    /// Its own `read` first sends the rest of what was to be sent, and fails with that.
    fn read_only(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.conn.reader().read(into) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                got => return got,
            }
            if self.conn.read_tls(&mut self.sock)? == 0 {
                return Ok(0);
            }
            self.conn.process_new_packets().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        }
    }
}

/// See the module's documentation.
pub(in crate::store::remote) struct Line {
    stream: Box<dyn Wire>,
    server: Server,
    via: Option<Via>,
    /// The proxy on the way, by name.
    proxy: Option<String>,
    /// False after an answer that ends with its connection, or that was not received completely.
    keeps: bool,
}

impl Line {
    /// Connects to a server: through its proxy, unless `is_direct`.
    ///
    /// # Errors
    /// The errors of connecting, of the proxy and of TLS.
    pub(in crate::store::remote) fn open(
        common: &Common,
        server: &Server,
        is_direct: bool,
        patience: Duration,
        pace: &dyn LinePace,
    ) -> io::Result<Line> {
        let proxy = if is_direct { None } else { common.proxy(server).map_err(refuse)? };
        let to = proxy.map_or(server, |proxy| &proxy.server);
        let found = common.names.addresses(to, None).unwrap_or_else(|| Ok(Arc::default()));
        let found = found.map_err(|e| io::Error::other(e.message().to_owned()))?;
        let until = Instant::now() + pace.left()?.min(patience);
        let mut socket = racing::connect(&common.names.health, &found, until).map_err(|e| match proxy {
            Some(proxy) => io::Error::new(e.kind(), format!("the proxy {}: {e}", proxy.name())),
            None => e,
        })?;
        socket.set_nodelay(true)?;
        socket.set_write_timeout(Some(TICK))?;
        let via = proxy.map(|proxy| proxy.via(server));
        if let Some(mut tunnel) = via.as_ref().and_then(Via::tunnel) {
            while let Err(e) = tunnel.open(&mut wait_for(&mut socket)?) {
                match e.kind() {
                    io::ErrorKind::WouldBlock => {
                        pace.left().map_err(|_| io::Error::new(io::ErrorKind::TimedOut, tunnel.silent()))?
                    }
                    _ => return Err(e),
                };
            }
        }
        socket.set_read_timeout(Some(TICK))?;
        let stream: Box<dyn Wire> = if server.tls {
            let (config, name) = common.tls.for_host(&common.settings, &server.host).map_err(refuse)?;
            let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
            Box::new(StreamOwned::new(connection, WithoutSignal(socket)))
        } else {
            Box::new(WithoutSignal(socket))
        };
        let proxy = proxy.map(|proxy| proxy.name());
        Ok(Line { stream, server: server.clone(), via, proxy, keeps: true })
    }

    /// The server at its other end.
    pub(in crate::store::remote) fn server(&self) -> &Server {
        &self.server
    }

    /// True if another request can be sent on it.
    pub(in crate::store::remote) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Sends a request: its head, and then its body. A server may answer before it has all of it, and close the connection.
    /// Then the answer counts.
    ///
    /// # Errors
    /// The errors of the connection and of `pace`; `InvalidData` for what is no answer.
    pub(in crate::store::remote) fn ask(
        &mut self,
        head: Vec<u8>,
        body: &[&[u8]],
        pace: &dyn LinePace,
    ) -> io::Result<Parts> {
        self.keeps = false;
        let is_head = head.starts_with(b"HEAD ");
        let head = match &self.via {
            Some(via) => via.worded(head),
            None => head,
        };
        let sent = self.say(&head, body, pace);
        match (self.hear(pace, is_head, sent.is_err()), sent) {
            (Ok(parts), _) => Ok(parts),
            (Err(_), Err(e)) | (Err(e), Ok(())) => Err(e),
        }
    }

    fn say(&mut self, head: &[u8], body: &[&[u8]], pace: &dyn LinePace) -> io::Result<()> {
        // Short parts go together: each call on the socket costs.
        let mut short: Vec<u8> =
            Vec::with_capacity(STEP.min(head.len() + body.iter().map(|part| part.len()).sum::<usize>()));
        short.extend_from_slice(head);
        for part in body {
            if short.len() + part.len() <= STEP {
                short.extend_from_slice(part);
                continue;
            }
            self.write(&short, pace)?;
            short.clear();
            if part.len() <= STEP / 4 {
                short.extend_from_slice(part);
            } else {
                self.write(part, pace)?;
            }
        }
        self.write(&short, pace)?;
        self.until(pace, |stream| stream.flush())
    }

    fn write(&mut self, mut bytes: &[u8], pace: &dyn LinePace) -> io::Result<()> {
        while !bytes.is_empty() {
            let most = pace.may_send(bytes.len().min(STEP))?;
            let sent = self.until(pace, |stream| stream.write(&bytes[..most]))?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            pace.moved(sent);
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// The result of a call on the stream that may take several ticks.
    fn until<T>(&mut self, pace: &dyn LinePace, mut call: impl FnMut(&mut dyn Wire) -> io::Result<T>) -> io::Result<T> {
        loop {
            match call(&mut *self.stream) {
                Err(e) if is_tick(&e) => drop(pace.left()?),
                done => return done,
            }
        }
    }

    /// The answer. With `is_over` only one that is there already counts: the connection is gone.
    fn hear(&mut self, pace: &dyn LinePace, is_head: bool, is_over: bool) -> io::Result<Parts> {
        let mut received = Vec::new();
        let mut part = vec![0; 64 << 10];
        loop {
            if let Some((parts, keeps)) = parsed(&received, is_head, false)? {
                self.keeps = keeps && !is_over;
                return match self.proxy.as_ref().filter(|_| parts.0 == 407) {
                    Some(proxy) => Err(tunnel::closed(proxy.clone(), self.server.authority())),
                    None => Ok(parts),
                };
            }
            let read = if is_over { self.stream.read_only(&mut part) } else { self.stream.read(&mut part) };
            let got = match read {
                Err(e) if is_tick(&e) && !is_over => {
                    pace.left()?;
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                got => got?,
            };
            if got == 0 {
                let whole = parsed(&received, is_head, true)?.map(|(parts, _)| parts);
                return whole.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the answer breaks off"));
            }
            pace.moved(got);
            received.extend_from_slice(&part[..got]);
            if received.len() > LONGEST {
                return Err(invalid(format!("the answer is longer than {LONGEST} bytes")));
            }
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("server", &self.server).finish_non_exhaustive()
    }
}

/// A socket that waits for a tick.
fn wait_for(socket: &mut TcpStream) -> io::Result<&mut TcpStream> {
    socket.set_read_timeout(Some(TICK))?;
    Ok(socket)
}

/// True if a call has only taken long.
fn is_tick(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// The error of something that cannot be asked for.
pub(super) fn refuse(e: crate::error::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, e.message().to_owned())
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// The answer in these bytes, and whether another one can come behind it; `None` if there are more to come.
fn parsed(bytes: &[u8], is_head: bool, ended: bool) -> io::Result<Option<(Parts, bool)>> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut answer = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(head) =
        lenient().parse_response(&mut answer, bytes).map_err(|e| invalid(e.to_string()))?
    else {
        return Ok(None);
    };
    let status = answer.code.unwrap_or_default();
    if (100..200).contains(&status) {
        return parsed(&bytes[head..], is_head, ended);
    }
    let body = &bytes[head..];
    let of = |name: &str| answer.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name));
    let says = |name: &str, word: &str| of(name).is_some_and(|field| field.value.eq_ignore_ascii_case(word.as_bytes()));
    let (body, is_bounded) = if is_head || matches!(status, 204 | 304) {
        (Some(Vec::new()), body.is_empty())
    } else if says("transfer-encoding", "chunked") {
        // What ends the chunks may come later.
        (unchunked(body)?, false)
    } else if let Some(field) = of("content-length") {
        let length = std::str::from_utf8(field.value).ok().and_then(|text| text.trim().parse::<usize>().ok());
        let length = length.ok_or_else(|| invalid("the answer's Content-Length is not a number"))?;
        (body.get(..length).map(<[u8]>::to_vec), body.len() == length)
    } else {
        (ended.then(|| body.to_vec()), false)
    };
    let keeps = is_bounded && answer.version == Some(1) && !says("connection", "close");
    let fields = answer.headers.iter().map(|field| (field.name.to_owned(), field.value.to_vec())).collect();
    Ok(body.map(|body| ((status, fields, body), keeps)))
}

/// The bytes in the chunks; `None` if there are more to come.
fn unchunked(mut rest: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    loop {
        let (at, size) = match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete((at, size))) => (at, usize::try_from(size).unwrap_or(usize::MAX)),
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err(invalid("a chunk of the answer has no size")),
        };
        if size == 0 {
            return Ok(Some(body));
        }
        let Some(chunk) = at.checked_add(size).and_then(|end| rest.get(at..end)) else { return Ok(None) };
        body.extend_from_slice(chunk);
        let Some(next) = rest.get(at + size + 2..) else { return Ok(None) };
        rest = next;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_complete_when_its_length_says_so() {
        for (text, body) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", "body"),
            ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody", "body"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nbod\r\n1;x\r\ny\r\n0\r\n\r\n", "body"),
        ] {
            // The last chunk is known by its size.
            let enough = text.len() - if text.contains("chunked") { 2 } else { 0 };
            for cut in 0..enough {
                assert!(parsed(&text.as_bytes()[..cut], false, false).unwrap().is_none(), "{cut} bytes of {text}");
            }
            let ((status, _, found), _) = parsed(text.as_bytes(), false, false).unwrap().unwrap();
            assert_eq!((status, &*found), (200, body.as_bytes()));
        }
        let open = b"HTTP/1.1 403 No\r\n\r\nuntil the end";
        assert!(parsed(open, false, false).unwrap().is_none());
        assert_eq!(parsed(open, false, true).unwrap().unwrap().0 .2, b"until the end");
        for wrong in [
            "SSH-2.0\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        ] {
            assert!(parsed(wrong.as_bytes(), false, true).is_err(), "{wrong}");
        }
    }
}
