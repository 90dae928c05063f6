//! How servers are asked.

use super::address::{Address, Server};
use super::proxy::Proxies;
use crate::error::{Error, Result};
use crate::store::remote::given::CredentialSource;
use crate::store::remote::secret::Secret;
use std::path::PathBuf;
use std::time::Duration;

/// A token, and the only server that it is sent to: neither other servers of a checkpoint get it, nor those that the server
/// redirects to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bearer {
    pub(in crate::store::remote) server: Server,
    pub(in crate::store::remote) token: Secret,
}

impl Bearer {
    /// A token for `server`: `http://` or `https://`, its host, and its port if it is not the usual one.
    ///
    /// # Errors
    /// `Invalid` for an address that has more than that, and for a token that no request can carry.
    pub fn new(server: &str, token: Secret) -> Result<Bearer> {
        let address = Address::parse(server)?;
        if address.target != "/" {
            return Err(Error::invalid("a token is for a server: give its address without a path"));
        }
        if token.shown().is_empty() || !token.shown().bytes().all(|b| b.is_ascii_graphic()) {
            return Err(Error::invalid("the token is empty, or has characters that are not visible ASCII"));
        }
        Ok(Bearer { server: address.server, token })
    }
}

/// How servers are asked.
#[derive(Debug, Clone, PartialEq)]
pub struct WebSettings {
    /// Most connections of one load.
    pub connections: usize,
    /// Connections that it begins with. There are more as long as more bring more.
    pub first_connections: usize,
    /// Threads that share the connections; 0: as many as the machine has cores for.
    pub threads: usize,
    /// Most bytes of one request: neighbouring reads are asked for together.
    pub request_bytes: u64,
    /// Requests for the same bytes, at most.
    pub tries: u32,
    /// The pause before the second of them. Each further pause is twice as long, up to 3 s.
    pub pause: Duration,
    /// For how long a read is asked for again, at least, however often that is. `None`: as often as `tries` says.
    pub patience: Option<Duration>,
    /// The same where the server says that it has too much to do (429, 503, SlowDown), if that is longer.
    pub busy: Duration,
    /// The budget of connections that all processes of this node share.
    pub node: Option<NodeSettings>,
    /// A connection that brings nothing for so long is closed, and what is missing is asked for again.
    pub stall: Duration,
    /// A file with the certificates (PEM) to trust, or a folder of such files, instead of the system's.
    pub authorities: Option<PathBuf>,
    /// Whether the certificates of servers are checked.
    pub tls_verify: bool,
    /// Gives credentials, instead of the places where the tools of a provider look.
    pub credentials: Option<CredentialSource>,
    /// The network interfaces that connections of loads are bound to, in turn. None: as the system routes them.
    pub interfaces: Vec<String>,
    /// Most bytes that one load receives in a second, over all its connections.
    pub bandwidth: Option<u64>,
    /// The proxy of each server. `None`: none, or the environment's where
    /// [`Stores`](crate::store::Stores) makes the store.
    pub proxies: Option<Proxies>,
}

/// A budget of connections for all processes of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSettings {
    /// Most connections of all of them together.
    pub connections: usize,
    /// The folder with their locks; `None`: one of this user in the memory of this machine.
    pub folder: Option<PathBuf>,
}

impl Default for WebSettings {
    fn default() -> Self {
        WebSettings {
            connections: 256,
            first_connections: 16,
            threads: 0,
            // Object stores recommend requests of 8 to 16 MiB.
            request_bytes: 16 << 20,
            tries: 8,
            patience: None,
            busy: Duration::from_secs(120),
            node: None,
            pause: Duration::from_millis(100),
            stall: Duration::from_secs(10),
            authorities: None,
            tls_verify: true,
            credentials: None,
            interfaces: Vec::new(),
            bandwidth: None,
            proxies: None,
        }
    }
}
