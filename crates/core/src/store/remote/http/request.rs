//! Requests: the part that differs between kinds of servers. The connections know nothing of it.

use super::address::Address;
use super::answer::Refused;
use super::settings::Bearer;
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::upload::Uploads;
use crate::wake::Wake;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

/// A request for bytes of one object, without the range.
#[derive(Clone)]
pub(in crate::store::remote) struct Get {
    pub(in crate::store::remote) address: Address,
    /// Further fields, each ended by CR LF: a signature.
    pub(in crate::store::remote) fields: String,
    /// Requests with other credentials, or to another place, have a higher one.
    pub(in crate::store::remote) generation: u64,
    /// Whether it is for where a redirect has led.
    pub(in crate::store::remote) is_moved: bool,
}

/// Makes requests for objects: what a signature, or a token, is for one kind of server. May be called from several threads.
pub(in crate::store::remote) trait Requests: Send + Sync + Debug {
    /// The request for the object at this address, as it is valid now. If its credentials are not there yet, they are
    /// fetched, and `wake` is notified when they are there. Without a `wake` the call waits for them.
    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>>;

    /// The request for where a redirect has led from the object at this address. `wake` as in [`request`](Self::request).
    fn moved(&self, at: &str, to: &Address, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        let _ = (at, wake);
        Some(Ok(Get { address: to.clone(), fields: self.redirected(to), generation: 0, is_moved: true }))
    }

    /// The server says which region has the object at this address.
    fn learn_region(&self, at: &str, region: &str) {
        let _ = (at, region);
    }

    /// The fields of a request for where a redirect has led. Most credentials are not for others.
    fn redirected(&self, to: &Address) -> String {
        let _ = to;
        String::new()
    }

    /// The server has refused a request of this generation for the object at this address. Whether the next one will differ.
    fn renew(&self, at: &str, generation: u64, refusal: &Refused) -> bool {
        let _ = (at, generation, refusal);
        false
    }

    /// The error of a refusal, with what its reader can do.
    fn explained(&self, refusal: Refused) -> Error {
        let e = refusal.error;
        if e.kind() != ErrorKind::Permission {
            return e;
        }
        e.reworded(|why| format!("{why}: is the address right, and if it is signed, is it still valid?"))
    }

    /// The text that names the object at this address for everybody, whatever credentials and signatures they have. `None`: there
    /// is none. Asks nobody.
    fn identity(&self, at: &str) -> Option<String> {
        let Address { server, target } = Address::parse(at).ok()?;
        Some(format!("{}{}", server.origin(), without_signature(&target)))
    }

    /// The service that takes objects; `None`: none of this kind does.
    fn uploads(self: Arc<Self>) -> Option<Result<Arc<dyn Uploads>>> {
        None
    }

    /// The objects under an address. May block.
    ///
    /// # Errors
    /// `NotFound` where nothing is listed: web servers do not list.
    fn list(&self, at: &Location) -> Result<Vec<Listed>> {
        if at.to_string().ends_with('/') || at.file_name().is_empty() {
            let text =
                "web servers list no files: give the address of the file, of its index (*.safetensors.index.json), or \
                        a list of all files";
            return Err(Error::new(ErrorKind::NotFound, text).at(at));
        }
        Ok(vec![Listed { location: at.clone(), size: None }])
    }
}

/// Something under an address.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::store::remote) struct Listed {
    pub(in crate::store::remote) location: Location,
    /// Its bytes, if the listing says them.
    pub(in crate::store::remote) size: Option<u64>,
}

/// Requests to web servers: with a token for one of them, if there is one. Other servers do not get it, also where that server
/// redirects to them.
#[derive(Debug)]
pub(in crate::store::remote) struct WebRequests(pub(in crate::store::remote) Option<Bearer>);

impl Requests for WebRequests {
    fn request(&self, at: &str, _wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        let get = |address| Get { fields: self.redirected(&address), address, generation: 0, is_moved: false };
        Some(Address::parse(at).map(get))
    }

    fn redirected(&self, to: &Address) -> String {
        let bearer = self.0.as_ref().filter(|bearer| to.server == bearer.server);
        bearer.map_or_else(String::new, |bearer| bearer_field(bearer.token.shown()))
    }
}

/// A target without the parameters that sign it, or say how long that is valid.
fn without_signature(target: &str) -> String {
    const SIGNING: [&str; 18] = [
        "signature",
        "expires",
        "key-pair-id",
        "policy",
        "awsaccesskeyid",
        "googleaccessid",
        "sv",
        "sig",
        "se",
        "sp",
        "st",
        "spr",
        "sr",
        "sip",
        "skoid",
        "sktid",
        "skt",
        "ske",
    ];
    let Some((path, query)) = target.split_once('?') else { return target.to_owned() };
    let is_left = |pair: &&str| {
        let name = pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
        !SIGNING.contains(&&*name) && !name.starts_with("x-amz-") && !name.starts_with("x-goog-")
    };
    let left: Vec<&str> = query.split('&').filter(is_left).collect();
    if left.is_empty() {
        path.to_owned()
    } else {
        format!("{path}?{}", left.join("&"))
    }
}

/// The field that carries a token.
pub(in crate::store::remote) fn bearer_field(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

impl Debug for Get {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Get {
    /// The text of the request for `range`, if the object is still the one with this strong ETag.
    pub(in crate::store::remote) fn text(&self, range: &Range<u64>, etag: Option<&str>) -> String {
        let Get { address, fields, .. } = self;
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
