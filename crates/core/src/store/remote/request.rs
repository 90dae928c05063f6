//! What is asked for: the part that differs between kinds of servers. The connections know nothing of it.

use super::address::{Address, Server};
use super::settings::Bearer;
use crate::error::Result;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

/// A request for bytes of one object, without the range.
#[derive(Clone)]
pub(super) struct Get {
    pub(super) address: Address,
    /// Further fields, each ended by CR LF: a signature.
    pub(super) fields: String,
}

/// Makes requests for objects: what a signature, or a token, is for one kind of server. May be called from several threads,
/// and does not block.
pub(super) trait Requests: Send + Sync + Debug {
    /// The request for the object at this address, as it is valid now.
    fn request(&self, at: &str) -> Result<Get>;

    /// The fields of a request for where a redirect has led. Most credentials are not for others.
    fn redirected(&self, to: &Address) -> String {
        let _ = to;
        String::new()
    }

    /// The server has refused a request (401, 403). Whether the next one will differ.
    fn renew(&self) -> bool {
        false
    }
}

/// Requests of no one in particular.
#[derive(Debug)]
pub(super) struct Unsigned;

impl Requests for Unsigned {
    fn request(&self, at: &str) -> Result<Get> {
        Ok(Get { address: Address::parse(at)?, fields: String::new() })
    }
}

/// Requests with a token, if there is one.
pub(super) fn requests_of(bearer: Option<Bearer>) -> Arc<dyn Requests> {
    match bearer {
        None => Arc::new(Unsigned),
        Some(bearer) => Arc::new(WithToken { fields: bearer.field(), server: bearer.server }),
    }
}

/// Requests that carry a token to one server. Other servers do not get it, also where that server redirects to them.
struct WithToken {
    server: Server,
    fields: String,
}

impl Requests for WithToken {
    fn request(&self, at: &str) -> Result<Get> {
        let address = Address::parse(at)?;
        let fields = self.redirected(&address);
        Ok(Get { address, fields })
    }

    fn redirected(&self, to: &Address) -> String {
        if to.server == self.server {
            self.fields.clone()
        } else {
            String::new()
        }
    }
}

impl Debug for WithToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a token for {}", self.server.authority())
    }
}

impl Debug for Get {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Get {
    /// The text of the request for `range`, if the object is still the one with this strong ETag.
    pub(super) fn text(&self, range: &Range<u64>, etag: Option<&str>) -> String {
        let Get { address, fields } = self;
        let (target, host) = (&address.target, address.server.authority());
        let (first, last) = (range.start, range.end - 1);
        let agent = concat!("penstock/", env!("CARGO_PKG_VERSION"));
        let pin = etag.map_or_else(String::new, |etag| format!("If-Match: {etag}\r\n"));
        format!(
            "GET {target} HTTP/1.1\r\nHost: {host}\r\nRange: bytes={first}-{last}\r\n{pin}{fields}\
             Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: {agent}\r\n\r\n"
        )
    }
}
