//! Objects of web servers, `http://` and `https://`, and of object stores, `s3://`, `gs://` and `az://`.
//!
//! A request is one thing (`request`: address, signature, how it is renewed), a connection another (`link`, `net`), so that
//! other kinds of object stores need only requests of their own. Bodies are received straight into the memory of their read.
//! Every answer is compared with what was asked for and with the version that was opened (`answer`).
//!
//! HTTP/1.1, one connection per request in flight, TLS by rustls. No HTTP/2. What an object store needs besides, its
//! credentials and listings, is asked for by `object_store` (`control`), on threads that may block.

mod account;
mod address;
mod answer;
mod aws;
mod azblob;
mod azure;
mod connecting;
mod connection;
mod control;
mod counts;
mod credentials;
mod environment;
mod fetch;
mod gcs;
mod given;
mod given_tokens;
mod google;
mod held;
mod interfaces;
mod jitter;
mod link;
mod links;
mod listing;
mod look;
mod names;
mod net;
mod node_budget;
mod pace;
mod proxied;
mod proxy;
mod queue;
mod range_read;
mod rate_limit;
mod refusal;
mod request;
mod request_rate;
mod s3;
mod secret;
mod server_error;
mod settings;
mod sockets;
mod source;
mod stragglers;
mod tls;
mod tokens;
mod told;
mod tunnel;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod virtual_time;
mod wires;

use self::answer::Expected;
use self::azblob::AzureBlob;
use self::counts::Counts;
pub(super) use self::environment::Environment;
use self::gcs::Gcs;
pub use self::given::{CredentialSource, GivenCredentials, GivesCredentials};
use self::given_tokens::WithGivenToken;
pub use self::interfaces::check_interfaces;
use self::net::{Common, Net, LOOK};
pub use self::proxy::Proxies;
use self::range_read::{BodyPlaces, RangeRead, Site};
use self::request::{requests_of, Requests};
use self::s3::S3;
pub use self::settings::{
    Addressing, AzureSettings, Bearer, GcsSettings, NodeSettings, ProfileSource, S3Settings, Secret, StorageSettings,
    WebSettings,
};
use self::sockets::Sockets;
use self::source::{Remote, WebSource};
pub(super) use self::tls::authorities;
use self::told::Told;
use super::facts::{Facts, FsKind};
use super::location::Location;
use super::look::Look;
use super::object::{Head, Object, Objects, Store, Traffic};
use super::version::Version;
use super::watch::{answered, still_wanted};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Route, TakesSlab, Ticket};
use crate::options::{Io, MIB};
use crate::source::Source;
use crate::way::Routing;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of one read, and so of one slab. A request asks for many neighbouring ones.
const EXTENT: u64 = MIB;
/// Reads in flight for each connection: those of its request, and as many that wait for the next.
const READS: usize = 32;

/// The store of `http://` and `https://` addresses, or of others whose objects are asked for in HTTP.
#[derive(Debug)]
pub struct Web {
    common: Arc<Common>,
    requests: Arc<dyn Requests>,
}

impl Web {
    /// A store with these settings. Nothing is connected to before something is asked for.
    pub fn new(settings: impl Into<StorageSettings>) -> Web {
        let StorageSettings { web, bearer, .. } = settings.into();
        let common = Arc::new(Common { settings: web, ..Common::default() });
        let requests = match (&bearer, &common.settings.credentials) {
            (None, Some(_)) => Arc::new(WithGivenToken::new(&common)),
            _ => requests_of(bearer),
        };
        Web { common, requests }
    }

    /// The store of `s3://` addresses. What the settings leave out is looked for in the environment.
    pub(super) fn s3(settings: StorageSettings, environment: Environment) -> Web {
        let StorageSettings { mut web, s3, .. } = settings;
        let bundle = environment.first(&["AWS_CA_BUNDLE"]).map(PathBuf::from);
        web.authorities = web.authorities.or(bundle);
        let common = Arc::new(Common { settings: web, ..Common::default() });
        Web { requests: Arc::new(S3::new(s3, environment, common.clone())), common }
    }

    /// The store of `gs://` addresses. What the settings leave out is looked for in the environment.
    pub(super) fn gcs(settings: StorageSettings, environment: Environment) -> Web {
        let StorageSettings { web, gcs, .. } = settings;
        let common = Arc::new(Common { settings: web, ..Common::default() });
        Web { requests: Arc::new(Gcs::new(gcs, environment, common.clone())), common }
    }

    /// The store of `az://` addresses. What the settings leave out is looked for in the environment.
    pub(super) fn azure(settings: StorageSettings, environment: Environment) -> Web {
        let StorageSettings { web, azure, .. } = settings;
        let common = Arc::new(Common { settings: web, ..Common::default() });
        Web { requests: Arc::new(AzureBlob::new(azure, environment, common.clone())), common }
    }

    /// What of this process's environment the store of a scheme looks at.
    pub(super) fn environment(scheme: &str) -> Environment {
        Environment::of_process(match scheme {
            "s3" => &aws::VARIABLES,
            "az" => &azure::VARIABLES,
            _ => &google::VARIABLES,
        })
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

/// Asks for a range and waits for it: its bytes, and size and version of the object.
fn fetch(common: &Arc<Common>, site: Arc<Site>, expected: Expected) -> Result<(Vec<u8>, u64, Version)> {
    let located = |e: Error| e.at(&site.path);
    // Behind the memory, so that the connections go first.
    let mut bytes = vec![0; (expected.range.end - expected.range.start) as usize];
    let sockets = Sockets::new(common.clone(), None).map_err(located)?;
    let mut net = Net::new(sockets, common.clone(), Arc::default());
    net.join_node().map_err(located)?;
    net.longest_wait = Some(LOOK);
    let places = BodyPlaces::one(bytes.as_mut_ptr(), bytes.len());
    net.add(RangeRead::new(Ticket(0), Route::Buffered, site.clone(), expected, Some(places)));
    let mut told = Vec::new();
    loop {
        net.turn(&mut told).map_err(located)?;
        if !still_wanted() {
            return Err(located(Error::new(ErrorKind::Cancelled, "nobody waits for it any more")));
        }
        for event in told.drain(..) {
            // A server that says when to ask again has answered.
            answered(matches!(event, Told::Received(_)));
            if let Told::Done { result, object, .. } = event {
                let got = result? as usize;
                bytes.truncate(got);
                let none = || Error::new(ErrorKind::Internal, "an answer without a size; please report this");
                let (size, version) = object.ok_or_else(none).map_err(located)?;
                return Ok((bytes, size, version));
            }
        }
    }
}

impl Store for Web {
    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        self.requests.list(at)
    }

    fn head(&self, at: &Location, first: u64) -> Result<Head> {
        let expected = Expected { object: None, range: 0..first.max(1) };
        let (mut bytes, size, version) = fetch(&self.common, self.site(at), expected)?;
        bytes.truncate(first as usize);
        Ok(Head { bytes, size, version })
    }

    fn read(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let expected = Expected { object: Some((object.size, object.version.clone())), range };
        fetch(&self.common, self.site(&object.location), expected).map(|(bytes, ..)| bytes)
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
        let (common, objects) = (self.common.clone(), Arc::new(objects));
        Ok(Arc::new(WebObjects { common, objects, counts: Arc::default() }))
    }
}

/// The objects of a load.
#[derive(Debug)]
struct WebObjects {
    common: Arc<Common>,
    objects: Arc<Vec<Option<Remote>>>,
    counts: Arc<Counts>,
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
            fs: site.requests.name(),
            storage: hasher.finish(),
            direct_align: None,
            mappable: false,
            parallelism: Some(self.common.settings.connections * READS),
            staging: TakesSlab::AtArrival,
            extent: Some(EXTENT),
            gap: Some(fetch::GAP),
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
        Some(self.counts.traffic())
    }

    fn source(self: Arc<Self>, _io: Io, routing: &Arc<Routing>) -> Result<Box<dyn Source>> {
        let (common, objects, counts) = (self.common.clone(), self.objects.clone(), self.counts.clone());
        Ok(Box::new(WebSource::new(common, objects, counts, routing)?))
    }
}
