//! The control plane of object stores: listings and credentials, by `object_store` over a plain HTTP/1.1 client. A request is
//! a connection of its own, on a thread that may block. Bytes of tensors never come this way.

use super::address::{Address, Server};
use super::answer::lenient;
use super::common::{is_busy, Common};
use super::proxy::Via;
use super::racing;
use super::refusal::refused;
use super::request::Get;
use super::socket::WithoutSignal;
use super::tunnel;
use crate::error::{Error, ErrorKind, Result};
use crate::store::watch::stall;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::ClientOptions;
use rustls::{ClientConnection, StreamOwned};
use std::future::Future;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest answer: a page of a listing has 1000 names of 1 KiB at most, as XML.
const LONGEST: usize = 16 << 20;
const MOST_FIELDS: usize = 128;

/// Runs `future` on this thread, which may block.
pub(in crate::store::remote) fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    Ok(runtime.map_err(|e| Error::io("start a runtime", &e))?.block_on(future))
}

/// Makes the clients of one question, and knows what went wrong last.
#[derive(Debug, Clone)]
pub(in crate::store::remote) struct Control {
    common: Arc<Common>,
    /// How long a server may take to answer a request completely.
    patience: Duration,
    /// It asks a service of this machine, which no proxy reaches.
    is_direct: bool,
}

impl Control {
    pub(in crate::store::remote) fn new(common: &Arc<Common>, patience: Duration) -> Control {
        Control { common: common.clone(), patience, is_direct: false }
    }

    /// How long what fails with this error is asked for again, at least.
    pub(in crate::store::remote) fn patience_with(&self, e: &Error) -> Duration {
        let settings = &self.common.settings;
        let busy = if is_busy(e) { stall().unwrap_or(settings.busy) } else { Duration::ZERO };
        settings.patience.unwrap_or_default().max(busy)
    }

    /// For a service of this machine, which is asked without a proxy.
    pub(in crate::store::remote) fn direct(self) -> Control {
        Control { is_direct: true, ..self }
    }
}

impl HttpConnector for Control {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl HttpService for Control {
    /// Blocks: nothing else runs on this runtime.
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        match self.exchange(&request) {
            Ok((status, fields, body)) => {
                let mut response = http::Response::builder().status(status);
                for (name, value) in &fields {
                    response = response.header(name, value.as_slice());
                }
                response.body(body.into()).map_err(|e| HttpError::new(HttpErrorKind::Decode, e))
            }
            Err(e) => {
                let refused = refused(&e);
                let kind = match e.kind() {
                    _ if refused.is_some() => HttpErrorKind::Decode,
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => HttpErrorKind::Timeout,
                    io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => HttpErrorKind::Decode,
                    _ => HttpErrorKind::Connect,
                };
                Err(HttpError::new(kind, e))
            }
        }
    }
}

/// The server that a request is for: nothing of its path or query, which may hold a token.
fn server_of(request: &HttpRequest) -> String {
    request.uri().authority().map_or_else(|| "a server".to_owned(), |authority| authority.host().to_owned())
}

fn no_answer(server: &str, e: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("{server}: no answer")).caused_by(io::Error::other(e.to_string()))
}

/// Status, fields and body of an answer.
pub(super) type Parts = (u16, Vec<(String, Vec<u8>)>, Vec<u8>);

fn refuse(e: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, e.message().to_owned())
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

trait Wire: Read + Write {}
impl<T: Read + Write> Wire for T {}

impl Control {
    /// Status and body of the answer.
    pub(in crate::store::remote) fn ask(&self, request: &HttpRequest) -> Result<(u16, Vec<u8>)> {
        let none = || Error::new(ErrorKind::Io, format!("{}: no answer", server_of(request)));
        let silent = |e| refused(&e).unwrap_or_else(|| none().caused_by(e));
        self.exchange(request).map(|(status, _, body)| (status, body)).map_err(silent)
    }

    /// The answer to a request for everything at its address. An error comes with whether it will come again.
    pub(in crate::store::remote) fn get(&self, get: &Get) -> std::result::Result<Parts, (Error, bool)> {
        let Address { server, target } = &get.address;
        let host = server.authority();
        let agent = concat!("penstock/", env!("CARGO_PKG_VERSION"));
        let head = format!(
            "GET {target} HTTP/1.1\r\nHost: {host}\r\n{}Accept: */*\r\nUser-Agent: {agent}\r\nConnection: close\r\n\r\n",
            get.fields
        );
        self.exchange_with(server, head.into_bytes(), &[]).map_err(|e| match refused(&e) {
            Some(refused) => (refused, true),
            None => {
                let is_final = matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData);
                (no_answer(&server.host, &e), is_final)
            }
        })
    }

    fn exchange(&self, request: &HttpRequest) -> io::Result<Parts> {
        let Address { server, target } = Address::parse(&request.uri().to_string()).map_err(refuse)?;
        let head = head_of(request, &target, &server.authority());
        let mut body = Vec::new();
        request.body().as_bytes().into_iter().for_each(|bytes| body.extend_from_slice(bytes));
        self.exchange_with(&server, head, &body)
    }

    fn exchange_with(&self, server: &Server, head: Vec<u8>, body: &[u8]) -> io::Result<Parts> {
        let until = Instant::now() + self.patience;
        let common = &self.common;
        let proxy = if self.is_direct { None } else { common.proxy(server).map_err(refuse)? };
        let to = proxy.map_or(server, |proxy| &proxy.server);
        let found = common.names.addresses(to, None).unwrap_or_else(|| Ok(Arc::default()));
        let found = found.map_err(|e| io::Error::other(e.message().to_owned()))?;
        let socket =
            racing::connect(&common.names.health, &found, Instant::now() + left(until)?.min(self.patience / 2));
        let mut socket = socket.map_err(|e| match proxy {
            Some(proxy) => io::Error::new(e.kind(), format!("the proxy {}: {e}", proxy.name())),
            None => e,
        })?;
        socket.set_nodelay(true)?;
        let timed = socket.try_clone()?;
        timed.set_write_timeout(Some(left(until)?))?;
        let via = proxy.map(|proxy| proxy.via(server));
        if let Some(mut tunnel) = via.as_ref().and_then(Via::tunnel) {
            timed.set_read_timeout(Some(left(until)?))?;
            tunnel.open(&mut socket).map_err(|e| match e.kind() {
                io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, tunnel.silent()),
                _ => e,
            })?;
        }
        let mut stream: Box<dyn Wire> = if server.tls {
            let (config, name) = common.tls.for_host(&common.settings, &server.host).map_err(refuse)?;
            let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
            timed.set_read_timeout(Some(left(until)?))?;
            Box::new(StreamOwned::new(connection, WithoutSignal(socket)))
        } else {
            Box::new(socket)
        };
        stream.write_all(&match &via {
            Some(via) => via.worded(head),
            None => head,
        })?;
        stream.write_all(body)?;
        stream.flush()?;
        let mut received = Vec::new();
        let mut part = vec![0; 64 << 10];
        loop {
            if let Some(parts) = parsed(&received, false)? {
                return match proxy.filter(|_| parts.0 == 407) {
                    Some(proxy) => Err(tunnel::closed(proxy.name(), server.authority())),
                    None => Ok(parts),
                };
            }
            timed.set_read_timeout(Some(left(until)?))?;
            match stream.read(&mut part) {
                Ok(0) => return parsed(&received, true)?.ok_or_else(|| invalid("the answer breaks off")),
                Ok(got) => received.extend_from_slice(&part[..got]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            if received.len() > LONGEST {
                return Err(invalid(format!("the answer is longer than {LONGEST} bytes")));
            }
        }
    }
}

/// The time left until then.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer in time"));
    }
    Ok(left)
}

fn head_of(request: &HttpRequest, target: &str, host: &str) -> Vec<u8> {
    let mut head = format!("{} {target} HTTP/1.1\r\nHost: {host}\r\n", request.method()).into_bytes();
    for (name, value) in request.headers() {
        if ["host", "connection", "content-length"].contains(&name.as_str()) {
            continue;
        }
        head.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    let length = request.body().content_length();
    head.extend(format!("Content-Length: {length}\r\nConnection: close\r\n\r\n").into_bytes());
    head
}

/// The answer in these bytes; `None` if there are more to come.
fn parsed(bytes: &[u8], ended: bool) -> io::Result<Option<Parts>> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut answer = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(head) =
        lenient().parse_response(&mut answer, bytes).map_err(|e| invalid(e.to_string()))?
    else {
        return Ok(None);
    };
    let status = answer.code.unwrap_or_default();
    if (100..200).contains(&status) {
        return parsed(&bytes[head..], ended);
    }
    let body = &bytes[head..];
    let of = |name: &str| answer.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name));
    let body = if of("transfer-encoding").is_some_and(|field| field.value.eq_ignore_ascii_case(b"chunked")) {
        unchunked(body)?
    } else if let Some(field) = of("content-length") {
        let length = std::str::from_utf8(field.value).ok().and_then(|text| text.trim().parse::<usize>().ok());
        let length = length.ok_or_else(|| invalid("the answer's Content-Length is not a number"))?;
        body.get(..length).map(<[u8]>::to_vec)
    } else {
        ended.then(|| body.to_vec())
    };
    let fields = answer.headers.iter().map(|field| (field.name.to_owned(), field.value.to_vec())).collect();
    Ok(body.map(|body| (status, fields, body)))
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
                assert!(parsed(&text.as_bytes()[..cut], false).unwrap().is_none(), "{cut} bytes of {text}");
            }
            let (status, _, found) = parsed(text.as_bytes(), false).unwrap().unwrap();
            assert_eq!((status, &*found), (200, body.as_bytes()));
        }
        let open = b"HTTP/1.1 403 No\r\n\r\nuntil the end";
        assert!(parsed(open, false).unwrap().is_none());
        assert_eq!(parsed(open, true).unwrap().unwrap().2, b"until the end");
        for wrong in [
            "SSH-2.0\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        ] {
            assert!(parsed(wrong.as_bytes(), true).is_err(), "{wrong}");
        }
    }
}
