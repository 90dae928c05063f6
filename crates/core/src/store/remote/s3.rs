//! Objects of S3, and of servers that speak its protocol: `s3://bucket/key`. Requests are signed (Signature Version 4) with a
//! credential that is there already; what has to be asked for is asked for elsewhere (`credentials`).

use super::address::{Address, Server};
use super::answer::Refused;
use super::aws::{retries, Aws, AwsKey};
use super::aws_place::S3Place;
use super::control::Control;
use super::credentials::Credentials;
use super::environment::Environment;
use super::listing::{escaped, list, listed, parts};
use super::net::Common;
use super::request::{Get, Requests};
use super::settings::{is_region, Addressing, S3Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsAuthorizer, AwsCredential};
use object_store::client::HttpRequestBody;
use object_store::{ClientOptions, StaticCredentialProvider};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A signature is used again for so long. Servers accept it for 15 minutes.
const SIGNED: Duration = Duration::from_secs(60);
const MOST_SIGNED: usize = 4096;

/// Makes requests for the objects of S3.
#[derive(Debug)]
pub(super) struct S3 {
    credentials: Arc<Credentials<Aws>>,
    /// The regions of buckets that are elsewhere than the settings say.
    regions: Mutex<HashMap<String, String>>,
    /// What was signed lately: a busy load makes the same request, except for its range, thousands of times.
    signed: Mutex<HashMap<String, (Instant, Get)>>,
}

impl S3 {
    pub(super) fn new(settings: S3Settings, environment: Environment, common: Arc<Common>) -> S3 {
        let credentials = Arc::new(Credentials::new(Aws { settings, environment }, common));
        S3 { credentials, regions: Mutex::default(), signed: Mutex::default() }
    }

    fn settings(&self) -> &S3Settings {
        &self.credentials.finder().settings
    }

    fn region(&self, bucket: &str, key: &AwsKey) -> String {
        lock(&self.regions).get(bucket).unwrap_or(&key.place.region).clone()
    }

    /// Where the bucket is: the server, and what stands before the keys.
    fn place(&self, bucket: &str, region: &str, key: &AwsKey) -> Result<Address> {
        let S3Place { endpoint, addressing, .. } = &key.place;
        let Address { server, target } = match endpoint {
            Some(endpoint) => endpoint.clone(),
            None => Address::parse(&format!("https://{}", key.place.host(region)))?,
        };
        let target = target.trim_end_matches('/');
        let is_wanted = match addressing {
            None => endpoint.is_none(),
            Some(Addressing::Virtual) => true,
            Some(Addressing::Path) => false,
        };
        // As for the tools of AWS: no name stands before an address, and some buckets' names fit into none.
        if is_wanted && server.ip().is_none() && fits_into_hosts(bucket, server.tls) {
            let host = format!("{bucket}.{}", server.host);
            return Ok(Address { server: Server { host, ..server }, target: target.to_owned() });
        }
        Ok(Address { server, target: format!("{target}/{bucket}") })
    }

    fn made(&self, at: &str, with: &AwsKey, generation: u64) -> Result<Get> {
        let (bucket, key) = bucket_and_key(at)?;
        if key.is_empty() {
            return Err(invalid("it names a bucket, and no object in it"));
        }
        let region = self.region(bucket, with);
        let Address { server, target } = self.place(bucket, &region, with)?;
        let address = Address { server, target: format!("{}/{}", target.trim_end_matches('/'), escaped(key)) };
        let fields = match &with.credential {
            None => String::new(),
            Some(credential) => {
                signature(&address, credential, S3Place::signing(&region), self.settings().requester_pays)?
            }
        };
        Ok(Get { address, fields, generation, is_moved: false })
    }

    fn lister(&self, bucket: &str, region: &str, place: &Address, key: &AwsKey, control: Control) -> Result<AmazonS3> {
        let scheme = if place.server.tls { "https" } else { "http" };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(bucket)
            .with_region(S3Place::signing(region))
            // It is taken as it is.
            .with_virtual_hosted_style_request(true)
            .with_endpoint(format!("{scheme}://{}{}", place.server.authority(), place.target.trim_end_matches('/')))
            .with_client_options(ClientOptions::new().with_allow_http(true))
            .with_retry(retries(5))
            .with_request_payer(self.settings().requester_pays)
            .with_http_connector(control)
            .with_skip_signature(key.credential.is_none());
        if let Some(credential) = &key.credential {
            let AwsCredential { key_id, secret_key, token } = &**credential;
            let copy = AwsCredential { key_id: key_id.clone(), secret_key: secret_key.clone(), token: token.clone() };
            builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(copy)));
        }
        builder.build().map_err(|e| invalid(&e.to_string()))
    }

    fn renewed(&self, at: &str, generation: u64, refusal: &Refused) -> bool {
        let Ok((bucket, _)) = bucket_and_key(at) else { return false };
        if let Some(region) = refusal.region.as_deref().filter(|region| is_region(region)) {
            let mut regions = lock(&self.regions);
            let Some(session) = self.credentials.known() else { return true };
            if regions.get(bucket).unwrap_or(&session.found.key.place.region) != region {
                regions.insert(bucket.to_owned(), region.to_owned());
                self.credentials.generation.fetch_add(1, Ordering::AcqRel);
                return true;
            }
        }
        self.credentials.renewed(generation, refusal)
    }
}

impl Requests for S3 {
    fn name(&self) -> &'static str {
        "s3"
    }

    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        let session = match self.credentials.session(wake)? {
            Ok(session) => session,
            Err(e) => return Some(Err(e)),
        };
        let generation = self.credentials.generation.load(Ordering::Acquire);
        let mut signed = lock(&self.signed);
        if let Some((when, get)) = signed.get(at) {
            if when.elapsed() < SIGNED && get.generation == generation {
                return Some(Ok(get.clone()));
            }
        }
        if signed.len() >= MOST_SIGNED {
            signed.clear();
        }
        let made = self.made(at, &session.found.key, generation);
        if let Ok(get) = &made {
            signed.insert(at.to_owned(), (Instant::now(), get.clone()));
        }
        Some(made)
    }

    fn renew(&self, at: &str, asked: &Get, refusal: &Refused) -> bool {
        self.renewed(at, asked.generation, refusal)
    }

    fn explained(&self, e: Error) -> Error {
        if e.kind() != ErrorKind::Permission {
            return e;
        }
        let with = match self.credentials.latest() {
            Some(session) if session.found.key.credential.is_none() => "the request was not signed".to_owned(),
            Some(session) => format!("the credentials are from {}", session.found.origin),
            None => "there are no credentials yet".to_owned(),
        };
        e.reworded(|why| {
            let hints = [
                (
                    "AccessDenied",
                    "S3 says so of an object that is not there, too, to those who may not list its bucket",
                ),
                ("InvalidAccessKeyId", "is that key for this server? (endpoint=)"),
                ("SignatureDoesNotMatch", "is the secret access key right?"),
                ("RequestTimeTooSkewed", "is the clock of this machine right?"),
                ("Expired", "they are no longer valid: get new ones"),
            ];
            let hint = hints.iter().find(|(code, _)| why.contains(code));
            format!("{why}; {with}{}", hint.map_or_else(String::new, |(_, hint)| format!("; {hint}")))
        })
    }

    fn list(&self, at: &Location) -> Result<Vec<Location>> {
        bucket_and_key(&at.to_string()).map_err(|e| e.at(at))?;
        let names = |bucket: &str, prefix: &str| {
            let store = |key: &AwsKey, control| {
                let region = self.region(bucket, key);
                self.lister(bucket, &region, &self.place(bucket, &region, key)?, key, control)
            };
            let text = at.to_string();
            listed(&self.credentials, prefix, store, |generation, refusal| self.renewed(&text, generation, refusal))
        };
        list(at, names, |e| self.explained(e))
    }
}

/// The fields that sign a request for this address.
fn signature(address: &Address, credential: &AwsCredential, region: &str, payer: bool) -> Result<String> {
    let failed = || Error::new(ErrorKind::Invalid, "no request can be signed for this address");
    let Server { tls, .. } = address.server;
    let scheme = if tls { "https" } else { "http" };
    let uri = format!("{scheme}://{}{}", address.server.authority(), address.target);
    let request = http::Request::builder().uri(uri).body(HttpRequestBody::empty());
    let mut request = request.map_err(|_| failed())?;
    let authorizer = AwsAuthorizer::new(credential, "s3", region).with_sign_payload(false).with_request_payer(payer);
    authorizer.try_authorize(&mut request, None).map_err(|_| failed())?;
    let mut fields = String::new();
    for (name, value) in request.headers() {
        let _ = write!(fields, "{name}: {}\r\n", value.to_str().map_err(|_| failed())?);
    }
    Ok(fields)
}

/// Bucket and key.
///
/// # Errors
/// Those of [`parts`], `Unsupported` for what speaks another protocol than buckets do.
fn bucket_and_key(at: &str) -> Result<(&str, &str)> {
    let bucket = at.split_once("://").map_or(at, |(_, rest)| rest).split('/').next().unwrap_or_default();
    let refused = |what: &str, instead: &str| Err(Error::new(ErrorKind::Unsupported, format!("{what}: {instead}")));
    if bucket.starts_with("arn:") {
        // arn:partition:service:region:account:accesspoint/name
        let service = bucket.split(':').nth(2).unwrap_or_default();
        let is_global = bucket.split(':').nth(3).is_some_and(str::is_empty);
        return match service {
            "s3-outposts" => {
                refused("this is an ARN of S3 on Outposts, which is not supported", "give a bucket of a region")
            }
            "s3-object-lambda" => {
                refused("this is an ARN of an S3 Object Lambda access point, which is not supported", "give its bucket")
            }
            "s3express" => refused(
                "this is an ARN of S3 Express One Zone, which is not supported",
                "give a general purpose bucket",
            ),
            _ if !bucket.contains(":accesspoint") => {
                refused("this is the ARN of a bucket", "give its name, which stands behind the last colon")
            }
            _ if is_global => refused(
                "this is an ARN of a multi-region access point, which is not supported",
                "give a bucket of a region",
            ),
            _ => refused(
                "this is an ARN of an access point, which is not supported",
                "give the access point's alias (it ends with -s3alias), or its bucket",
            ),
        };
    }
    for (end, what, instead) in [
        ("--x-s3", "a directory bucket of S3 Express One Zone", "give a general purpose bucket"),
        ("--xa-s3", "an access point of S3 Express One Zone", "give a general purpose bucket"),
        ("--op-s3", "an access point of S3 on Outposts", "give a bucket of a region"),
        ("--ol-s3", "an S3 Object Lambda access point", "give its bucket"),
        (".mrap", "a multi-region access point", "give a bucket of a region"),
    ] {
        if bucket.ends_with(end) {
            return refused(&format!("this is {what} (its name ends with {end}), which is not supported"), instead);
        }
    }
    parts(at)
}

/// Whether the name of a bucket may be one of a host. The certificate for `*.s3...` does not cover a name with dots.
fn fits_into_hosts(bucket: &str, tls: bool) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || (b == b'.' && !tls);
    let label = |label: &str| !label.is_empty() && !label.starts_with(['-']) && !label.ends_with('-');
    (1..=63).contains(&bucket.len())
        && bucket.bytes().all(fits)
        && bucket.split('.').all(label)
        && !bucket.starts_with("xn--")
}

fn invalid(text: &str) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::settings::{Secret, StorageSettings};
    use super::super::Web;
    use super::*;

    fn store(s3: S3Settings, environment: &[(&str, &str)]) -> S3 {
        let common = Common::default();
        S3::new(s3, Environment::of(environment), Arc::new(common))
    }

    fn keys() -> S3Settings {
        let (id, secret) = (Some("AKID".to_owned()), Some(Secret::new("sesame")));
        S3Settings { access_key_id: id, secret_access_key: secret, ..S3Settings::default() }
    }

    #[test]
    fn where_a_bucket_is() {
        let of = |addressing, endpoint: Option<&str>, region: &str, at: &str| {
            let s3 =
                S3Settings { addressing, endpoint: endpoint.map(str::to_owned), region: Some(region.into()), ..keys() };
            let Get { address, .. } = store(s3, &[]).request(at, None).unwrap().unwrap();
            format!("{} {}", address.server.authority(), address.target)
        };
        let (path, host) = (Some(Addressing::Path), Some(Addressing::Virtual));
        for (addressing, endpoint, region, at, expected) in [
            (None, None, "eu-west-1", "s3://b/k", "b.s3.eu-west-1.amazonaws.com /k"),
            (path, None, "eu-west-1", "s3://b/k", "s3.eu-west-1.amazonaws.com /b/k"),
            (None, None, "cn-north-1", "s3://b/a/k", "b.s3.cn-north-1.amazonaws.com.cn /a/k"),
            (None, None, "eu-west-1", "s3://b.c/k", "s3.eu-west-1.amazonaws.com /b.c/k"),
            (None, Some("http://h:9000"), "r", "s3://b/k x", "h:9000 /b/k%20x"),
            (None, Some("http://h:9000/s3/"), "r", "s3://b/k", "h:9000 /s3/b/k"),
            (host, Some("https://h"), "r", "s3://b/k", "b.h /k"),
        ] {
            assert_eq!(of(addressing, endpoint, region, at), expected, "{at}");
        }
    }

    #[test]
    fn a_request_is_signed_once_until_something_changes() {
        let s3 = store(S3Settings { requester_pays: true, ..keys() }, &[("AWS_REGION", "r-1")]);
        let first = s3.request("s3://b/k", None).unwrap().unwrap();
        for field in
            ["authorization: AWS4-HMAC-SHA256 Credential=AKID/", "x-amz-date: ", "x-amz-content-sha256: UNSIGNED"]
        {
            assert!(first.fields.contains(field), "{}", first.fields);
        }
        assert!(
            first.fields.contains("x-amz-request-payer: requester") && first.fields.contains("/r-1/s3/aws4_request")
        );
        assert_eq!(s3.request("s3://b/k", None).unwrap().unwrap().fields, first.fields);
        let error = || Error::new(ErrorKind::Io, "elsewhere");
        let moved = |region: &str| Refused { error: error(), access: false, region: Some(region.into()) };
        assert!(s3.renew("s3://b/k", &first, &moved("r-2")));
        // Requests that were on their way meanwhile, and then one that the server sends back to where it came from.
        assert!(s3.renew("s3://b/k", &first, &moved("r-2")));
        let second = s3.request("s3://b/k", None).unwrap().unwrap();
        assert!(second.fields.contains("/r-2/s3/") && second.generation > first.generation);
        assert!(!s3.renew("s3://b/k", &second, &moved("r-2")) && !s3.renew("s3://b/k", &second, &moved("r 3")));
        // Keys that were given are not renewed.
        let refusal = Refused { error: error(), access: true, region: None };
        assert!(!s3.renew("s3://b/k", &second, &refusal));
    }

    #[test]
    fn no_debug_output_has_a_secret() {
        let environment =
            [("AWS_SECRET_ACCESS_KEY", "sesame"), ("AWS_SESSION_TOKEN", "sesame"), ("AWS_REGION", "here")];
        let s3 = S3Settings { session_token: Some(Secret::new("sesame")), ..keys() };
        let store = store(s3.clone(), &environment);
        let get = store.request("s3://b/k", None).unwrap().unwrap();
        let web = Web::s3(StorageSettings { s3, ..StorageSettings::default() }, Environment::of(&environment));
        let text = format!("{store:?} {get:?} {web:?}");
        assert!(!text.contains("sesame") && !text.contains("Signature="), "{text}");
    }
}
