//! The settings of the stores.

use super::address::{Address, Server};
use super::given::{CredentialSource, GivesCredentials};
use super::proxy::Proxies;
pub use super::secret::Secret;
use crate::error::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How one open asks stores.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StorageSettings {
    /// How all of them are asked.
    pub web: WebSettings,
    /// A token for a web server.
    pub bearer: Option<Bearer>,
    /// How S3 is asked.
    pub s3: S3Settings,
    /// How Google Cloud Storage is asked.
    pub gcs: GcsSettings,
    /// How Azure Blob Storage is asked.
    pub azure: AzureSettings,
}

/// How Azure Blob Storage is asked. What is left out is looked for where the tools of Azure do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AzureSettings {
    /// `http://` or `https://`, a host, and for emulators the account as path: where the containers are.
    pub endpoint: Option<String>,
    /// Requests carry neither signature nor token.
    pub anonymous: bool,
    /// The storage account.
    pub account_name: Option<String>,
    /// Its key.
    pub account_key: Option<Secret>,
    /// A shared access signature, instead of a key.
    pub sas_token: Option<Secret>,
}

/// How Google Cloud Storage, or a server that speaks its XML API, is asked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GcsSettings {
    /// `http://` or `https://` and a host, instead of Google's.
    pub endpoint: Option<String>,
    /// Requests carry no token.
    pub anonymous: bool,
}

/// How S3, or a server that speaks its protocol, is asked. What is left out is looked for where the tools of AWS do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct S3Settings {
    /// `http://` or `https://` and a host, instead of AWS.
    pub endpoint: Option<String>,
    /// The region of the buckets. A wrong one is corrected if the server says so.
    pub region: Option<String>,
    /// Where a bucket stands in addresses; `None`: virtual for AWS, path for other endpoints.
    pub addressing: Option<Addressing>,
    /// Requests are not signed.
    pub anonymous: bool,
    /// The requester pays.
    pub requester_pays: bool,
    /// The key that requests are signed with, and its secret.
    pub access_key_id: Option<String>,
    /// The secret of that key.
    pub secret_access_key: Option<Secret>,
    /// The token of a key that is valid for a session.
    pub session_token: Option<Secret>,
    /// The profile of AWS's configuration files.
    pub profile: Option<String>,
    /// What gives the credentials of profiles that have more to them than keys.
    pub profiles: Option<ProfileSource>,
}

/// Makes what gives the credentials of the AWS profile with a name.
#[derive(Debug, Clone, Copy)]
pub struct ProfileSource(pub fn(&str) -> Arc<dyn GivesCredentials>);

impl PartialEq for ProfileSource {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

/// Whether requests can be sent to this endpoint.
///
/// # Errors
/// `Invalid` if it is no address.
pub fn check_endpoint(text: &str) -> Result<()> {
    Address::parse(text).map(drop)
}

/// Whether a region can be called so.
///
/// # Errors
/// `Invalid` if none can.
pub fn check_region(text: &str) -> Result<()> {
    let text = text.strip_prefix("fips-").or(text.strip_suffix("-fips")).unwrap_or(text);
    match is_region(text) {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Invalid, "a region has letters, digits and '-' only: such as us-east-1")),
    }
}

pub(super) fn is_region(text: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
    (1..=63).contains(&text.len())
        && text.bytes().all(fits)
        && !text.starts_with(['-', '_'])
        && !text.ends_with(['-', '_'])
}

/// Where a bucket stands in the addresses of its objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addressing {
    /// `https://host/bucket/key`.
    Path,
    /// `https://bucket.host/key`.
    Virtual,
}

impl From<WebSettings> for StorageSettings {
    fn from(web: WebSettings) -> Self {
        StorageSettings { web, ..StorageSettings::default() }
    }
}

/// A token, and the only server that it is sent to: neither other servers of a checkpoint get it, nor those that the server
/// redirects to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bearer {
    pub(super) server: Server,
    token: Secret,
}

impl Bearer {
    /// A token for `server`: `http://` or `https://`, its host, and its port if it is not the usual one.
    ///
    /// # Errors
    /// `Invalid` for an address that has more than that, and for a token that no request can carry.
    pub fn new(server: &str, token: Secret) -> Result<Bearer> {
        let invalid = |text: &str| Error::new(ErrorKind::Invalid, text);
        let address = Address::parse(server)?;
        if address.target != "/" {
            return Err(invalid("a token is for a server: give its address without a path"));
        }
        if token.shown().is_empty() || !token.shown().bytes().all(|b| b.is_ascii_graphic()) {
            return Err(invalid("the token is empty, or has other letters than visible ones of ASCII"));
        }
        Ok(Bearer { server: address.server, token })
    }

    /// The field that carries it.
    pub(super) fn field(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.token.shown())
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
    /// What is asked for credentials, instead of the places where the tools of a provider look.
    pub credentials: Option<CredentialSource>,
    /// The network interfaces that connections of loads are bound to, in turn. None: as the system routes them.
    pub interfaces: Vec<String>,
    /// Most bytes that one load receives in a second, over all its connections.
    pub bandwidth: Option<u64>,
    /// Which servers are reached through which proxy. `None`: none, or what the environment says where
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
        let (pause, stall) = (Duration::from_millis(100), Duration::from_secs(10));
        // Object stores recommend requests of 8 to 16 MiB.
        let (connections, first_connections, threads, request_bytes) = (256, 16, 0, 16 << 20);
        WebSettings {
            connections,
            first_connections,
            threads,
            request_bytes,
            tries: 8,
            patience: None,
            busy: Duration::from_secs(120),
            node: None,
            pause,
            stall,
            authorities: None,
            tls_verify: true,
            credentials: None,
            interfaces: Vec::new(),
            bandwidth: None,
            proxies: None,
        }
    }
}
