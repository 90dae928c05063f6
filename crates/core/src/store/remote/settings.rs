//! The settings of the stores, and their table: all that is said of a setting stands once, here.

use super::aws::settings::{check_region, Addressing, S3Settings};
use super::azure::settings::AzureSettings;
use super::environment::meant;
use super::gcp::settings::GcsSettings;
use super::http::address::Address;
use super::http::interfaces::check_interfaces;
use super::http::proxy::Proxies;
use super::http::settings::{Bearer, NodeSettings, WebSettings};
use super::secret::Secret;
use crate::options::{size, Form};
use crate::store::disk_cache::HubLayout;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
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
    /// The disk cache in front of all of them.
    pub cache: CacheSettings,
}

impl From<WebSettings> for StorageSettings {
    fn from(web: WebSettings) -> Self {
        StorageSettings { web, ..StorageSettings::default() }
    }
}

/// The disk cache. Without a folder there is none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CacheSettings {
    /// Its folder.
    pub folder: Option<PathBuf>,
    /// Its most bytes.
    pub size: Option<u64>,
    /// Bytes of the file system that stay free.
    pub free: Option<u64>,
    /// A group may write to it.
    pub shared: bool,
    /// Bytes that come from it are compared with their checksums.
    pub verify: bool,
    /// Bytes that the disk did not take in time are left to the next load.
    pub forgets: bool,
    /// Nothing is dropped: loads are as slow as the disk.
    pub waits: bool,
    /// No server is asked.
    pub offline: bool,
    /// Addresses of other nodes that serve what their caches have.
    pub mirrors: Vec<String>,
    /// The token that they want.
    pub mirror_token: Option<Secret>,
    /// The place in huggingface_hub's cache of what the cache has whole.
    pub hub: Option<Arc<HubLayout>>,
}

/// One setting, as the table has it.
pub struct StorageSetting {
    /// Name, in the dict `storage=`.
    pub name: &'static str,
    /// Table of the documentation that lists it: "web", "s3" or "azure".
    pub group: &'static str,
    /// Kind of values.
    pub form: Form,
    /// Lines of the description for Python, each behind a space; behind an empty line the row of the documentation. A
    /// setting without a row shares that of the next one.
    pub doc: &'static [&'static str],
    /// Default that is a number.
    pub default: Option<fn(&StorageSettings) -> u64>,
    set: fn(&mut StorageSettings, String) -> Result<(), String>,
}

impl StorageSetting {
    /// Sets it to the value that a text means.
    ///
    /// # Errors
    /// Says what such a text must be.
    pub fn set(&self, settings: &mut StorageSettings, text: String) -> Result<(), String> {
        match text.is_empty() && self.name != "proxy" {
            true => Err("must not be empty".into()),
            false => (self.set)(settings, text),
        }
    }

    /// Sets it to the value of its environment variable.
    ///
    /// # Errors
    /// Says what such a text must be.
    pub fn set_variable(&self, settings: &mut StorageSettings, value: &str) -> Result<(), String> {
        let text = meant(value);
        let checked = match self.name {
            "endpoint" if !text.is_empty() => Address::parse(text).map(drop),
            "region" if !text.is_empty() => check_region(text),
            _ => Ok(()),
        };
        checked.map_err(|e| e.message().to_owned())?;
        self.set(settings, text.to_owned())
    }

    /// Name of the environment variable.
    pub fn variable(&self) -> String {
        format!("PENSTOCK_STORAGE_{}", self.name.to_uppercase())
    }
}

fn number<N: FromStr + PartialOrd + Display>(text: &str, range: RangeInclusive<N>) -> Result<N, String> {
    let number = text.trim().parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("must be a whole number, from {} to {}", range.start(), range.end()))
}

fn flag(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" => Ok(true),
        "0" | "false" | "no" => Ok(false),
        _ => Err("must be true or false".into()),
    }
}

/// Most connections of one load.
const MOST_CONNECTIONS: usize = 1024;

/// Most connections of all processes of a node.
const MOST_OF_NODE: usize = 65_536;

/// The longest patience, in seconds: a week.
const MOST_PATIENCE: f64 = 604_800.0;

/// Bytes that one request may ask for at most.
const REQUEST_BYTES: RangeInclusive<u64> = 64 << 10..=1 << 30;

/// Bytes per second. With less, a load would seem to have stalled.
const LEAST_BANDWIDTH: u64 = 64 << 10;

/// Makes the table. An entry: the descriptions, name and kind of values, perhaps the default, and what sets it.
macro_rules! settings {
    ($($group:ident { $(
        $(#[doc = $doc:literal])*
        $name:ident: $form:expr, $(default: $default:expr,)? |$settings:ident, $text:ident| $set:expr;
    )* })*) => {
        /// All settings, in the order in which errors list them.
        pub static STORAGE_SETTINGS: &[StorageSetting] = &[$($(StorageSetting {
            name: stringify!($name),
            group: stringify!($group),
            form: $form,
            doc: &[$($doc),*],
            default: [$(Some($default as fn(&StorageSettings) -> u64),)? None][0],
            set: |$settings, $text| {
                $set;
                Ok(())
            },
        },)*)*];
    };
}
settings! {
    web {
        /// The most connections of one load (default 256). It begins with 16, and has more while more bring more.
        connections: Form::Count, default: |s| s.web.connections as u64,
            |s, text| s.web.connections = number(&text, 1..=MOST_CONNECTIONS)?;

        /// The most bytes of one request, 65,536 (64 KiB) to 1,073,741,824 (1 GiB); default 16 MiB.
        ///
        /// the most connections of one load (256; it begins with 16); the most bytes of one request (16 MiB; 64 KiB to
        /// 1 GiB)
        request_bytes: Form::Count, default: |s| s.web.request_bytes,
            |s, text| s.web.request_bytes = number(&text, REQUEST_BYTES)
                .map_err(|_| "must be a whole number, from 65536 (64 KiB) to 1073741824 (1 GiB)")?;

        /// A file (PEM) with the certificates to trust, or a folder of such files, instead of the system's: those of
        /// authorities, or that of a server, byte for byte.
        ca: Form::File, |s, text| s.web.authorities = Some(PathBuf::from(text));

        /// False: the certificates of servers are not checked. There is a warning for each host.
        ///
        /// [certificates](#certificates) to trust, a PEM file or a folder; `False`: none is checked, and a
        /// `RuntimeWarning` names each host
        tls_verify: Form::Flag, |s, text| s.web.tls_verify = flag(&text)?;
    }
    s3 {
        /// The server, such as "http://127.0.0.1:9000", instead of AWS, Google or Azure.
        ///
        /// another server, `"https://minio.example.com"`; or `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `endpoint_url`
        /// of the profile's `services` or of the profile (none of these with `AWS_IGNORE_CONFIGURED_ENDPOINT_URLS`)
        endpoint: Form::Text, |s, text| {
            (s.gcs.endpoint, s.azure.endpoint) = (Some(text.clone()), Some(text.clone()));
            s.s3.endpoint = Some(text)
        };

        /// S3: the region of the bucket. A wrong one is corrected if the server names the right one.
        ///
        /// or `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile, `us-east-1`. If the server names another one, that is
        /// taken
        region: Form::Text, |s, text| s.s3.region = Some(text);

        /// S3: where the bucket stands in an address. Default: "virtual" for AWS, "path" for an `endpoint`.
        ///
        /// `"virtual"` (`bucket.host/key`; default for AWS), `"path"` (`host/bucket/key`; default for an `endpoint`);
        /// or `addressing_style` of the profile. IP addresses, and buckets that fit into no host name: by path
        addressing: Form::Choice(&["path", "virtual"]), |s, text| s.s3.addressing = match &*text {
            "path" => Some(Addressing::Path),
            "virtual" => Some(Addressing::Virtual),
            _ => return Err("must be \"path\" or \"virtual\"".into()),
        };

        /// S3, Google Cloud Storage, Azure: True sends requests without a signature or token, for public buckets.
        anonymous: Form::Flag, |s, text| {
            s.s3.anonymous = flag(&text)?;
            (s.gcs.anonymous, s.azure.anonymous) = (s.s3.anonymous, s.s3.anonymous)
        };

        /// S3: True says that the requester pays.
        ///
        /// `True`: requests are not signed (a public bucket); the requester pays
        requester_pays: Form::Flag, |s, text| s.s3.requester_pays = flag(&text)?;

        /// S3: the key to sign with, with its secret. Default: what the tools of AWS would take.
        access_key_id: Form::Text, |s, text| s.s3.access_key_id = Some(text);

        /// S3: the secret of `access_key_id`.
        secret_access_key: Form::Secret, |s, text| s.s3.secret_access_key = Some(Secret::new(text));

        /// S3: the token of a temporary `access_key_id`.
        session_token: Form::Secret, |s, text| s.s3.session_token = Some(Secret::new(text));

        /// S3: a profile of ~/.aws/credentials and ~/.aws/config.
        ///
        /// what to sign with; a profile in `~/.aws/credentials` or `~/.aws/config`
        profile: Form::Text, |s, text| s.s3.profile = Some(text);
    }
    azure {
        /// Azure: the storage account. Default: what the tools of Azure would take.
        ///
        /// or `AZURE_STORAGE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_CONNECTION_STRING`
        account_name: Form::Text, |s, text| s.azure.account_name = Some(text);

        /// Azure: a key of the account, to sign with.
        ///
        /// or `AZURE_STORAGE_KEY`, `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_ACCESS_KEY`, the connection string: for
        /// the environment's account only
        account_key: Form::Secret, |s, text| s.azure.account_key = Some(Secret::new(text));

        /// Azure: a shared access signature, instead of a key.
        ///
        /// a signature that may read and, for folders, list; or `AZURE_STORAGE_SAS_TOKEN`, the connection string
        sas_token: Form::Secret, |s, text| s.azure.sas_token = Some(Secret::new(text));
    }
    web {
        /// A callable that gives the credentials: for S3 `access_key_id`, `secret_access_key` and perhaps
        /// `session_token`, for Google Cloud Storage, Azure and `https://` servers `token`. `expires_at` (seconds since
        /// the epoch, or a datetime with a time zone) says when they become invalid. It is called when they are needed,
        /// again before they expire, and when a server refuses them, on a thread of its own.
        ///
        /// a callable, in code only. It gives a mapping: `access_key_id`, `secret_access_key`, perhaps `session_token`
        /// for `s3://`; `token` for `gs://`, `az://` and web servers (`Authorization: Bearer`, over https, never after
        /// a redirect); `expires_at` (Unix seconds, or a datetime with a time zone). It is called before they expire
        /// and when a server refuses, on a thread of its own. Opens with the same *object* share what it gave: keep a
        /// bound method in a variable. It must not open an address with itself. An exception in it is the `__cause__`
        /// of an `AccessError`; a `PenstockError` is raised as it is. The Hub does not ask it
        credentials: Form::Callable, |_s, _text|
            Err::<(), _>("is a callable, which a text cannot give: set it in code, in storage=")?;

        /// "http://host:port", perhaps with "user:password@" before the host: all servers are reached through it. "" is
        /// for none. Default: what HTTPS_PROXY, http_proxy, ALL_PROXY and NO_PROXY say; never for this machine.
        ///
        /// `http://[user:password@]host:port` for all servers, this machine too; `""` for none. Otherwise the variables
        /// `https_proxy` or `HTTPS_PROXY` for `https://`, only `http_proxy` for `http://`, then `all_proxy` or
        /// `ALL_PROXY`, except for hosts, addresses and networks (`10.0.0.0/8`, `*`) in `no_proxy` or `NO_PROXY` and
        /// for this machine. Metadata services: never. Proxies of kind `https://` and `socks5://` are an error
        proxy: Form::Text, |s, text|
            s.web.proxies = Some(Proxies::given(&text).map_err(|e| e.message().to_owned())?);

        /// The most bytes that one load receives in a second, over all its connections: a number, or a size such as
        /// "500MB"; 65,536 (64 KiB) or more. Default: no limit.
        ///
        /// the most bytes per second of one load: a number, or `"500MB"`; 64 KiB or more. No limit by default
        bandwidth: Form::Size, |s, text| {
            let bytes = Some(size(&text)?).filter(|bytes| *bytes >= LEAST_BANDWIDTH);
            s.web.bandwidth = Some(bytes.ok_or("must be bytes per second, 65536 (64 KiB) or more")?)
        };

        /// Network interfaces, such as ["eth0", "eth1"]: the connections that receive tensors are bound to them in
        /// turn.
        ///
        /// `["eth0", "eth1"]` (or `"eth0,eth1"`): connections are bound to them in turn. Needs Linux 5.7. Not for
        /// listings and credentials
        interfaces: Form::Names, |s, text| {
            let names: Vec<_> = text.split(',').map(|name| name.trim().to_owned()).collect();
            check_interfaces(&names).map_err(|e| e.message().to_owned())?;
            s.web.interfaces = names
        };

        /// Seconds for which a read that fails is asked for again, at least. Default: 8 times, about 9 s; where the
        /// server says that it has too much to do (429, 503, SlowDown), as long as `stall_timeout`, at least.
        ///
        /// for at least so many seconds a failing read is retried. Default: 8 times, about 9 s; [for a busy
        /// server](tuning.md#when-a-server-has-too-much-to-do) at least the `stall_timeout`
        patience: Form::Seconds, |s, text| {
            let seconds = text.trim().parse().ok().filter(|seconds| (0.0..=MOST_PATIENCE).contains(seconds));
            let seconds = seconds.ok_or_else(|| format!("must be seconds, from 0 to {MOST_PATIENCE} (a week)"))?;
            s.web.patience = Some(Duration::from_secs_f64(seconds))
        };

        /// The most connections of all processes of this node together that set it. Each that loads has its share.
        connections_per_node: Form::Count, |s, text| {
            let connections = number(&text, 1..=MOST_OF_NODE)?;
            let folder = s.web.node.take().and_then(|node| node.folder);
            s.web.node = Some(NodeSettings { connections, folder })
        };

        /// The folder with the locks of `connections_per_node`: processes with the same one share a budget. Default: a
        /// folder of this user in /dev/shm, or in /tmp.
        ///
        /// the most connections of all processes of this node that set it, without listings and credentials. No limit
        /// by default. Processes with the same `node_folder` share it (default: one of this user in `/dev/shm`, or in
        /// `/tmp`)
        node_folder: Form::File, |s, text| {
            // Without a budget it means nothing.
            let connections = s.web.node.take().map_or(0, |node| node.connections);
            s.web.node = Some(NodeSettings { connections, folder: Some(PathBuf::from(text)) })
        };
    }
    cache {
        /// A folder on a local disk that keeps what loads receive from servers: the next start, and other processes of this
        /// node, take it from there.
        ///
        /// the folder of the [disk cache](guides.md#a-node-that-fetches-a-model-once); made if it is not there. No cache by
        /// default. On network file systems it is refused, and so is a folder that others may write to
        disk_cache: Form::File, |s, text| s.cache.folder = Some(PathBuf::from(text));

        /// The most bytes of the disk cache: a number, or a size such as "500GB". Default: no limit.
        ///
        /// its most bytes: a number, or `"500GB"`. No limit by default. What was used longest ago goes first, never what
        /// is open
        disk_cache_size: Form::Size, |s, text| s.cache.size = Some(size(&text)?);

        /// Bytes of the file system that the disk cache leaves free. Default: 10% of it, 20 GiB at most.
        ///
        /// bytes of its file system that stay free. Default: 10%, 20 GiB at most
        disk_cache_free: Form::Size, |s, text| s.cache.free = Some(size(&text)?);

        /// True: the group of the folder may write to it, so that several users share it.
        ///
        /// `True`: the folder's group may write, so that several users share it. `.py` files are not taken from it then
        disk_cache_shared: Form::Flag, |s, text| s.cache.shared = flag(&text)?;

        /// True: what comes from the disk cache is compared with its checksums, and bad bytes are fetched again.
        ///
        /// `True`: blocks are compared with their CRC32C, and bad ones are fetched again. Files are not mapped then
        disk_cache_verify: Form::Flag, |s, text| s.cache.verify = flag(&text)?;

        /// Bytes that came faster than the disk took them: "fetch" asks for them again after the load (default), "forget"
        /// leaves them to the next load.
        ///
        /// of bytes that came faster than the disk takes them: `"fetch"` asks for them again after the load (default),
        /// `"forget"` leaves them to the next load
        disk_cache_dropped: Form::Choice(&["fetch", "forget"]), |s, text| s.cache.forgets = match &*text {
            "fetch" => false,
            "forget" => true,
            _ => return Err("must be \"fetch\" or \"forget\"".into()),
        };

        /// Addresses of other nodes that run `penstock serve` on their disk cache, such as ["http://node-a:8080"]: what they
        /// have of an object, in its very version, comes from them.
        ///
        /// `["http://node-a:8080"]` (or with commas): other nodes that run `penstock serve`. What they have of an object, in
        /// that very version, comes from them; the rest, and what fails, from the object's server. All nodes may have one list: a
        /// node leaves itself out
        mirrors: Form::Names, |s, text| {
            let addresses: Vec<_> = text.split(',').map(|one| one.trim().trim_end_matches('/').to_owned()).collect();
            addresses.iter().try_for_each(|one| Address::parse(one).map(drop)).map_err(|e| e.message().to_owned())?;
            s.cache.mirrors = addresses
        };

        /// The bearer token that all `mirrors` want. Over https only, except to this machine.
        ///
        /// the token that all `mirrors` want; over https only, except to this machine
        mirror_token: Form::Secret, |s, text| s.cache.mirror_token = Some(Secret::new(text));

        /// True: no server is asked. What the disk cache has, in the version that it had last, is loaded; all else is an error.
        ///
        /// `True`: no server is asked: everything comes from the disk cache, in the version that it had last
        offline: Form::Flag, |s, text| s.cache.offline = flag(&text)?;
    }
}
