//! Objects of web servers, `http://` and `https://`, and of object stores, `s3://`, `gs://` and `az://`.
//!
//! | folder | what is in it | what it uses |
//! |---|---|---|
//! | `http` | one server: its address, a connection to it, a request, and what an answer says | |
//! | `transfer` | the connections of a load | `http` |
//! | `auth` | credentials, of whatever provider | `http` |
//! | `aws`, `gcp`, `azure` | one provider: its settings, its requests, and where its tools keep credentials | `auth`, `http`, `listing` |
//!
//! A request is one thing (`http::request`: address, signature, how it is renewed), a connection another (`transfer`), so
//! that other kinds of object stores need only requests of their own ([`provider`]). Bodies are received straight into the memory of their
//! read. Every answer is compared with what was asked for and with the version that was opened (`http::answer`).
//!
//! HTTP/1.1, one connection per request in flight, TLS by rustls. No HTTP/2. `object_store` asks for credentials and
//! listings (`http::control`), on threads that may block.

mod auth;
mod aws;
mod azure;
mod environment;
mod gcp;
mod given;
mod http;
mod listing;
mod look;
mod pages;
mod provider;
mod secret;
mod settings;
mod source;
#[cfg(test)]
mod toy;
mod transfer;
mod upload;
mod whole;

pub use self::aws::settings::{Addressing, ProfileSource, S3Settings};
pub use self::azure::settings::AzureSettings;
pub(super) use self::environment::Environment;
pub use self::gcp::settings::GcsSettings;
pub use self::given::{CredentialSource, GivenCredentials, GivesCredentials};
use self::http::answer::{Expected, GAP};
use self::http::common::{Common, LOOK};
use self::http::proxy;
pub use self::http::proxy::Proxies;
use self::http::request::Requests;
pub use self::http::settings::{Bearer, NodeSettings, WebSettings};
use self::http::sockets::Sockets;
pub use self::http::tls::unchecked_hosts;
pub(super) use self::http::tls::{authorities, certificates};
use self::listing::check_wanted;
pub(super) use self::provider::Provider;
pub use self::secret::Secret;
pub use self::settings::{CacheSettings, StorageSetting, StorageSettings, STORAGE_SETTINGS};
use self::source::{Remote, WebSource};
use self::transfer::net::Net;
use self::transfer::range_read::{BodyPlaces, RangeRead, Site};
use self::transfer::told::Told;
use self::whole::{is_whole, unknown_end};
use super::facts::{Facts, FsKind};
use super::location::Location;
use super::look::Look;
use super::mirrors::Mirror;
use super::object::{Head, Object, Objects, Store, Traffic};
use super::upload::Uploads;
use super::version::Version;
use super::watch::{answered, stall};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{FileLanes, Lane, Ticket};
use crate::options::MIB;
use crate::source::{LaneSource, SourceRequest};
use crate::sync::{lock, Mutex};
use std::collections::hash_map::DefaultHasher;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Connections to a mirror.
const MIRROR_CONNECTIONS: usize = 4;
/// Bytes of one request to a mirror: it is asked for little at a time.
const MIRROR_REQUEST: u64 = 2 * MIB;
/// A mirror that brings nothing for so long is left.
const MIRROR_STALL: Duration = Duration::from_secs(3);
/// Objects whose sizes are remembered.
const MOST_SIZES: usize = 100_000;
/// Bytes of one read, and so of one slab. A request asks for many neighbouring ones.
const EXTENT: u64 = MIB;
/// Reads in flight for each connection: those of its request, and as many that wait for the next.
const READS: usize = 32;

/// The store of `http://` and `https://` addresses, or of others whose objects are asked for in HTTP.
#[derive(Debug)]
pub struct Web {
    /// The name of these servers in reports.
    name: &'static str,
    common: Arc<Common>,
    requests: Arc<dyn Requests>,
    /// Bytes of objects, as listings said them.
    sizes: Arc<Mutex<HashMap<Location, u64>>>,
}

impl Web {
    /// The store of web servers, with these settings. Nothing is connected to before something is asked for.
    pub fn new(settings: impl Into<StorageSettings>) -> Web {
        Web::of(&provider::WEB, settings.into(), Environment::default())
    }

    /// The store of a provider, with these settings.
    pub(super) fn of(provider: &Provider, settings: StorageSettings, environment: Environment) -> Web {
        let (common, requests) = (provider.requests)(settings, environment);
        Web { name: provider.schemes[0], common, requests, sizes: Arc::default() }
    }

    /// The store of a mirror, which is asked with the certificates, interfaces and limits of these settings, and with a token
    /// if it wants one. It is near: what fails there is not tried again.
    ///
    /// # Errors
    /// `Invalid`: the token would be readable on the way.
    pub(super) fn of_mirror(settings: &StorageSettings, address: String, token: Option<Secret>) -> Result<Mirror> {
        let web = WebSettings {
            connections: MIRROR_CONNECTIONS.min(settings.web.connections),
            first_connections: MIRROR_CONNECTIONS.min(settings.web.connections),
            threads: 1,
            request_bytes: MIRROR_REQUEST,
            tries: 1,
            patience: None,
            busy: Duration::ZERO,
            stall: MIRROR_STALL,
            credentials: None,
            proxies: None,
            ..settings.web.clone()
        };
        let bearer = token.map(|token| Bearer::new(&address, token)).transpose()?;
        if bearer.as_ref().is_some_and(|bearer| !bearer.server.keeps_secrets()) {
            let text = format!("mirror_token would be readable on the way to {address}: give its https:// address");
            return Err(Error::invalid(text));
        }
        let store = Web::new(StorageSettings { bearer, ..StorageSettings::from(web) });
        Ok((address, Arc::new(store)))
    }

    /// The proxies that this process's environment names.
    pub(super) fn proxies() -> Proxies {
        Proxies::of_environment(&Environment::of_process(&proxy::VARIABLES))
    }

    fn site(&self, at: &Location) -> Arc<Site> {
        let text = match at {
            Location::Url(text) => text.clone(),
            Location::Path(path) => path.to_string_lossy().into_owned(),
        };
        Arc::new(Site::new(at.as_path().to_path_buf(), text, self.requests.clone()))
    }
}

/// The bytes of a range, and size and version of their object.
struct Fetched {
    bytes: Vec<u8>,
    size: u64,
    version: Version,
    /// Nothing but the end of a connection says where the object ends.
    by_close: bool,
}

/// Asks for a range and waits for it.
fn fetch(common: &Arc<Common>, site: Arc<Site>, expected: Expected) -> Result<Fetched> {
    let patient = stall().map(|busy| {
        let settings = WebSettings { busy, ..common.settings.clone() };
        Arc::new(Common { settings, ..Common::clone(common) })
    });
    let common = patient.as_ref().unwrap_or(common);
    let located = |e: Error| e.at(&site.path);
    // Behind the memory, so that the connections go first.
    let mut bytes = vec![0; (expected.range.end - expected.range.start) as usize];
    let sockets = Sockets::new(common.clone(), None).map_err(located)?;
    let mut net = Net::new(sockets, common.clone(), Arc::default());
    net.join_node().map_err(located)?;
    net.longest_wait = Some(LOOK);
    let places = BodyPlaces::one(bytes.as_mut_ptr(), bytes.len());
    net.add(RangeRead::new(Ticket(0), Lane::NETWORK, site.clone(), expected, Some(places)));
    let mut told = Vec::new();
    loop {
        net.turn(&mut told).map_err(located)?;
        check_wanted().map_err(located)?;
        for event in told.drain(..) {
            // A server that says when to ask again has answered.
            answered(matches!(event, Told::Received(_)));
            if let Told::Done { done, object, by_close } = event {
                let got = done.result? as usize;
                bytes.truncate(got);
                let none = || Error::new(ErrorKind::Internal, "an answer without a size; please report this");
                let (size, version) = object.ok_or_else(none).map_err(located)?;
                return Ok(Fetched { bytes, size, version, by_close });
            }
        }
    }
}

impl Store for Web {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        let listed = self.requests.list(at)?;
        let mut sizes = lock(&self.sizes);
        if sizes.len() > MOST_SIZES {
            sizes.clear();
        }
        sizes.extend(listed.iter().filter_map(|found| Some((found.location.clone(), found.size?))));
        Ok(listed.into_iter().map(|found| found.location).collect())
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        let expected = Expected { object: None, range: 0..first.max(1) };
        let site = self.site(at);
        let Fetched { mut bytes, size, version, by_close } = fetch(&self.common, site.clone(), expected)?;
        if by_close && lock(&self.sizes).get(at).map_or(!is_whole(&bytes), |known| *known != size) {
            return Err(unknown_end(bytes.len()).at(&site.path));
        }
        // The server has refused a range that passes the end, and did not say where that is.
        let (got, first) = (bytes.len() as u64, first.min(size));
        if got > 0 && got < first {
            let expected = Expected { object: Some((size, version.clone())), range: got..first };
            bytes.extend(fetch(&self.common, site, expected)?.bytes);
        }
        bytes.truncate(first as usize);
        Ok(Head { bytes, size, version })
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let expected = Expected { object: Some((object.size, object.version.clone())), range };
        fetch(&self.common, self.site(&object.location), expected).map(|fetched| fetched.bytes)
    }

    fn uploads(&self) -> Result<Arc<dyn Uploads>> {
        let none = || {
            let text = format!("{}:// addresses cannot be written to: give a folder, or s3://", self.name);
            Err(Error::new(ErrorKind::Unsupported, text))
        };
        self.requests.clone().uploads().unwrap_or_else(none)
    }

    fn identity(&self, at: &Location) -> Option<String> {
        match at {
            Location::Url(text) => self.requests.identity(text),
            Location::Path(_) => None,
        }
    }

    fn look(&self, at: &Location, times: usize) -> Result<Look> {
        Ok(look::look(&self.common, &self.site(at), times))
    }

    fn objects(&self, objects: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        let remote = |object: Object| {
            let Object { location, size, version } = object;
            Remote { site: self.site(&location), size, version }
        };
        let objects = objects.into_iter().map(|object| object.map(remote)).collect();
        let (name, common, objects) = (self.name, self.common.clone(), Arc::new(objects));
        Ok(Arc::new(WebObjects { name, common, objects, counts: Arc::default() }))
    }
}

/// The objects of a load.
#[derive(Debug)]
struct WebObjects {
    name: &'static str,
    common: Arc<Common>,
    objects: Arc<Vec<Option<Remote>>>,
    counts: Arc<Mutex<Traffic>>,
}

impl WebObjects {
    fn remote(&self, file: u32) -> Result<&Remote> {
        let none = || Error::new(ErrorKind::Internal, "this file is no object of a web server; please report this");
        self.objects.get(file as usize).and_then(Option::as_ref).ok_or_else(none)
    }
}

impl Objects for WebObjects {
    fn path(&self, file: u32) -> &Path {
        self.remote(file).map_or(Path::new(""), |remote| &remote.site.path)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        let site = &self.remote(file)?.site;
        let server = site.request(None).and_then(Result::ok).map(|request| request.address.server);
        let mut hasher = DefaultHasher::new();
        server.hash(&mut hasher);
        Ok(Facts {
            kind: FsKind::Remote,
            fs: self.name,
            storage: hasher.finish(),
            lanes: FileLanes::only(Lane::NETWORK),
            parallelism: Some(self.common.settings.connections * READS),
            extent: Some(EXTENT),
            gap: Some(GAP),
            cut: None,
        })
    }

    fn verify(&self, file: u32) -> Result<()> {
        let Remote { site, size, version } = self.remote(file)?;
        if *size == 0 {
            return Ok(());
        }
        let expected = Expected { object: Some((*size, version.clone())), range: 0..1 };
        fetch(&self.common, site.clone(), expected).map(drop)
    }

    /// Every answer is compared with the ETag. A weak validator may be the same for other bytes, so it is asked for once
    /// more in the end.
    fn pins_reads(&self, file: u32) -> bool {
        self.remote(file).is_ok_and(|remote| matches!(remote.version, Version::Strong(_)))
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(*lock(&self.counts))
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let (common, objects, counts) = (self.common.clone(), self.objects.clone(), self.counts.clone());
        Ok(vec![LaneSource::of_all(WebSource::new(common, objects, counts, &request.routing)?)])
    }
}
