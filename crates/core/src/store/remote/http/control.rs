//! The control plane of object stores: listings and credentials, by `object_store` over a plain HTTP/1.1 client. A request is
//! a connection of its own, on a thread that may block. Bytes of tensors never come this way.

use super::address::{Address, Server};
use super::common::{is_busy, Common};
use super::line::{refuse, Deadline, Line, Parts};
use super::refusal::refused;
use super::request::Get;
use crate::error::{Error, ErrorKind, Result};
use crate::store::watch::stall;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::ClientOptions;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
        let until = Deadline(Instant::now() + self.patience);
        let mut line = Line::open(&self.common, server, self.is_direct, self.patience / 2, &until)?;
        line.ask(head, &[body], &until)
    }
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
