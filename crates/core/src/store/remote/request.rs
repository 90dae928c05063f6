//! What is asked for: the part that differs between kinds of servers. The connections know nothing of it.

use super::address::Address;
use crate::error::Result;
use std::fmt::Debug;
use std::ops::Range;

/// A request for bytes of one object, without the range.
#[derive(Debug, Clone)]
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
