//! Tunnels through a proxy, to servers with TLS; and what proxies answer that refuse.

use super::answer::lenient;
use crate::error::Error;
use std::fmt;
use std::io::{self, Read, Write};

/// The longest answer to `CONNECT`.
const LONGEST: usize = 16 << 10;
const MOST_FIELDS: usize = 64;

/// A tunnel that is being opened.
pub(in crate::store::remote) struct Tunnel {
    proxy: String,
    server: String,
    out: Vec<u8>,
    sent: usize,
    answer: Vec<u8>,
}

impl Tunnel {
    pub(in crate::store::remote) fn new(proxy: String, server: String, request: String) -> Tunnel {
        Tunnel { proxy, server, out: request.into_bytes(), sent: 0, answer: Vec::new() }
    }

    #[cfg(test)]
    pub(in crate::store::remote) fn asked(&self) -> &[u8] {
        &self.out
    }

    pub(in crate::store::remote) fn has_to_send(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Opens it.
    ///
    /// # Errors
    /// The errors of the stream, also `WouldBlock`: then it is called again later. [`ProxyRefusal`].
    pub(in crate::store::remote) fn open(&mut self, stream: &mut (impl Read + Write)) -> io::Result<()> {
        while self.has_to_send() {
            self.sent += stream.write(&self.out[self.sent..])?;
        }
        loop {
            let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
            let mut answer = httparse::Response::new(&mut fields);
            let parsed = lenient().parse_response(&mut answer, &self.answer);
            let parsed = parsed.map_err(|_| self.wrong("the proxy does not answer in HTTP"))?;
            if let (httparse::Status::Complete(length), Some(status)) = (parsed, answer.code) {
                if (200..300).contains(&status) && length == self.answer.len() {
                    return Ok(());
                }
                let reason: String = answer.reason.unwrap_or_default().chars().filter(|c| !c.is_control()).collect();
                let (proxy, server) = (self.proxy.clone(), self.server.clone());
                return Err(io::Error::other(ProxyRefusal { proxy, server, status, reason }));
            }
            let mut part = [0; 1024];
            let got = stream.read(&mut part)?;
            if got == 0 || self.answer.len() > LONGEST {
                return Err(self.wrong(
                    "the proxy closed the connection before its answer was complete, or its answer is too long",
                ));
            }
            self.answer.extend_from_slice(&part[..got]);
        }
    }

    /// The message about a silent proxy.
    pub(in crate::store::remote) fn silent(&self) -> String {
        format!("the proxy {} does not answer in time", self.proxy)
    }

    fn wrong(&self, what: &str) -> io::Error {
        io::Error::new(io::ErrorKind::UnexpectedEof, format!("{what} ({})", self.proxy))
    }
}

/// A proxy answers otherwise than that there is a tunnel, or that it wants a password.
#[derive(Debug)]
pub(super) struct ProxyRefusal {
    proxy: String,
    server: String,
    status: u16,
    reason: String,
}

impl fmt::Display for ProxyRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProxyRefusal { proxy, server, status, reason } = self;
        write!(f, "the proxy {proxy} answers {status} {reason} where it should reach {server}")
    }
}

impl std::error::Error for ProxyRefusal {}

/// A proxy wants a password before it asks a server.
pub(in crate::store::remote) fn closed(proxy: String, server: String) -> io::Error {
    let (status, reason) = (407, "Proxy Authentication Required".to_owned());
    io::Error::other(ProxyRefusal { proxy, server, status, reason })
}

/// The error if a proxy refuses, and will again.
pub(in crate::store::remote) fn refused(e: &io::Error) -> Option<Error> {
    let refusal = e.get_ref()?.downcast_ref::<ProxyRefusal>()?;
    let is_final = (400..500).contains(&refusal.status) && ![408, 425, 429].contains(&refusal.status);
    is_final.then(|| denied(refusal.to_string(), refusal.status))
}

/// The error of a proxy that refuses, with what its reader can do.
pub(in crate::store::remote) fn denied(why: String, status: u16) -> Error {
    let advice = match status {
        407 => "it wants a user's name and a password: storage={\"proxy\": \"http://user:password@host:port\"}",
        _ => "does it allow this server, and is it the right proxy? (storage proxy, HTTPS_PROXY, NO_PROXY)",
    };
    Error::permission(format!("{why}; {advice}")).answered(status, None)
}
