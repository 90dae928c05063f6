//! Objects of S3, and of servers that speak its protocol: `s3://bucket/key`. Requests are signed (Signature Version 4) with a
//! credential that is there already; what has to be asked for is asked for elsewhere (`credentials`).

use super::keys::{Aws, AwsKey};
use super::place::S3Place;
use super::redirect::{is_of_amazon, is_same_service, is_signed, region_of};
use super::settings::{is_region, Addressing, S3Settings};
use super::upload::{S3Uploads, SignsWrites};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::remote::auth::credentials::Credentials;
use crate::store::remote::auth::tokens::form;
use crate::store::remote::environment::Environment;
use crate::store::remote::http::address::{Address, Server};
use crate::store::remote::http::answer::Refused;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::escaping::escaped;
use crate::store::remote::http::request::{Get, Listed, Requests};
use crate::store::remote::listing::{list, parts, s3_query, Ask};
use crate::store::upload::Uploads;
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::HttpRequestBody;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A signature is used again for so long. Servers accept it for 15 minutes.
const SIGNED: Duration = Duration::from_secs(60);
const MOST_SIGNED: usize = 4096;

/// The address of an object, and the place that a redirect named.
type SignedPlace = (String, Option<Address>);

/// Makes requests for the objects of S3.
#[derive(Debug)]
pub(in crate::store::remote) struct S3 {
    credentials: Arc<Credentials<Aws>>,
    /// The regions of buckets that are elsewhere than the settings say.
    regions: Mutex<HashMap<String, String>>,
    /// Requests signed lately: a busy load makes the same one, except for its range, thousands of times.
    signed: Mutex<HashMap<SignedPlace, (Instant, Get)>>,
}

impl S3 {
    pub(in crate::store::remote) fn new(settings: S3Settings, environment: Environment, common: Arc<Common>) -> S3 {
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
            return Err(Error::invalid("it names a bucket, and no object in it"));
        }
        let region = self.region(bucket, with);
        let Address { server, target } = self.place(bucket, &region, with)?;
        let address = Address { server, target: format!("{}/{}", target.trim_end_matches('/'), escaped(key)) };
        let fields = self.fields(&address, bucket, with, false)?;
        Ok(Get { address, fields, generation, is_moved: false })
    }

    /// The request for a page of a listing.
    fn page(&self, ask: &Ask<'_, AwsKey>) -> Result<Get> {
        let named = ask.moved.and_then(|place| place.region.as_deref());
        named.into_iter().for_each(|region| self.learn(ask.bucket, region));
        let address = match ask.moved {
            Some(place) => place.address.clone(),
            None => {
                let Address { server, target } = self.place(ask.bucket, &self.region(ask.bucket, ask.key), ask.key)?;
                let target = target.trim_end_matches('/');
                let path = if target.is_empty() { "/" } else { target };
                Address { server, target: format!("{path}?{}", form(&s3_query(ask))) }
            }
        };
        let is_moved = ask.moved.is_some();
        let fields = self.fields(&address, ask.bucket, ask.key, is_moved)?;
        Ok(Get { address, fields, generation: 0, is_moved })
    }

    /// The fields that sign a request. Where a redirect has led, the place may have another region, its own signature, or
    /// nothing to do with this service: then it gets no credentials.
    fn fields(&self, address: &Address, bucket: &str, key: &AwsKey, is_moved: bool) -> Result<String> {
        let Some(credential) = &key.credential else { return Ok(String::new()) };
        if is_moved && (is_signed(&address.target) || !self.is_of_service(&address.server, bucket, key)?) {
            return Ok(String::new());
        }
        let there = region_of(&address.server.host).filter(|_| is_moved && !lock(&self.regions).contains_key(bucket));
        let region = there.unwrap_or_else(|| self.region(bucket, key));
        signature("GET", address, &[], credential, S3Place::signing(&region), self.settings().requester_pays)
    }

    /// Whether a server that a redirect names is of the service that has the bucket.
    fn is_of_service(&self, server: &Server, bucket: &str, key: &AwsKey) -> Result<bool> {
        let own = self.place(bucket, &self.region(bucket, key), key)?.server;
        let hosts = [Some(&own), key.place.endpoint.as_ref().map(|endpoint| &endpoint.server)];
        let has = |own: &Server| is_same_service(&own.host, &server.host);
        Ok(is_of_amazon(&server.host) || hosts.into_iter().flatten().any(has))
    }

    /// The result of `made`, or a recent one for the same place.
    fn once(&self, of: SignedPlace, generation: u64, made: impl FnOnce() -> Result<Get>) -> Result<Get> {
        let mut signed = lock(&self.signed);
        if let Some((when, get)) = signed.get(&of) {
            if when.elapsed() < SIGNED && get.generation == generation {
                return Ok(get.clone());
            }
        }
        if signed.len() >= MOST_SIGNED {
            signed.clear();
        }
        let get = made()?;
        signed.insert(of, (Instant::now(), get.clone()));
        Ok(get)
    }

    fn learn(&self, bucket: &str, region: &str) {
        if is_region(region) {
            lock(&self.regions).insert(bucket.to_owned(), region.to_owned());
        }
    }
}

impl SignsWrites for S3 {
    fn worded(
        &self,
        at: &str,
        method: &'static str,
        query: &str,
        fields: &[(&'static str, String)],
    ) -> Result<(Address, String, u64)> {
        let none = || Err(Error::new(ErrorKind::Internal, "no credentials came; please report this"));
        let worded = self.credentials.with_key(None, |key, generation| {
            let (bucket, name) = bucket_and_key(at)?;
            // The list of uploads is one of the bucket.
            if name.is_empty() && method != "GET" {
                return Err(Error::invalid("it names a bucket, and no object in it"));
            }
            let region = self.region(bucket, key);
            let Address { server, target } = self.place(bucket, &region, key)?;
            let ask = if query.is_empty() { String::new() } else { format!("?{query}") };
            let target = format!("{}/{}{ask}", target.trim_end_matches('/'), escaped(name));
            let address = Address { server, target };
            let fields = match &key.credential {
                Some(credential) => {
                    let region = S3Place::signing(&region);
                    signature(method, &address, fields, credential, region, self.settings().requester_pays)?
                }
                None => fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect(),
            };
            Ok((address, fields, generation))
        });
        worded.unwrap_or_else(none)
    }

    fn requests(&self) -> &dyn Requests {
        self
    }
}

impl Requests for S3 {
    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        self.credentials.with_key(wake, |key, generation| {
            self.once((at.to_owned(), None), generation, || self.made(at, key, generation))
        })
    }

    fn moved(&self, at: &str, to: &Address, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        self.credentials.with_key(wake, |key, generation| {
            self.once((at.to_owned(), Some(to.clone())), generation, || {
                let fields = self.fields(to, parts(at)?.0, key, true)?;
                Ok(Get { address: to.clone(), fields, generation, is_moved: true })
            })
        })
    }

    fn identity(&self, at: &str) -> Option<String> {
        Some(format!("{} {at}", self.credentials.finder().realm()?))
    }

    fn learn_region(&self, at: &str, region: &str) {
        parts(at).into_iter().for_each(|(bucket, _)| self.learn(bucket, region));
    }

    fn renew(&self, at: &str, generation: u64, refusal: &Refused) -> bool {
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

    fn explained(&self, refusal: Refused) -> Error {
        self.credentials.explained(
            refusal,
            |found| found.key.credential.is_none().then(|| "the request was not signed".to_owned()),
            &[
                ("AccessDenied", "S3 also answers AccessDenied for a missing object if you may not list the bucket"),
                ("InvalidAccessKeyId", "is that key for this server? (endpoint=)"),
                ("SignatureDoesNotMatch", "is the secret access key right?"),
                ("RequestTimeTooSkewed", "is the clock of this machine right?"),
                ("Expired", "they are no longer valid: get new ones"),
            ],
        )
    }

    fn uploads(self: Arc<Self>) -> Option<Result<Arc<dyn Uploads>>> {
        let common = self.credentials.common.clone();
        Some(S3Uploads::new(self, common).map(|uploads| Arc::new(uploads) as Arc<dyn Uploads>))
    }

    fn list(&self, at: &Location) -> Result<Vec<Listed>> {
        bucket_and_key(&at.to_string()).map_err(|e| e.at(at))?;
        list(self, &self.credentials, at, |ask| self.page(ask))
    }
}

/// These fields of a request, and those that sign it.
fn signature(
    method: &str,
    address: &Address,
    fields: &[(&'static str, String)],
    credential: &AwsCredential,
    region: &str,
    payer: bool,
) -> Result<String> {
    let failed = || Error::invalid("no request can be signed for this address");
    let uri = format!("{}{}", address.server.origin(), address.target);
    let request = http::Request::builder().method(method).uri(uri);
    let request = fields.iter().fold(request, |request, (name, value)| request.header(*name, value));
    let mut request = request.body(HttpRequestBody::empty()).map_err(|_| failed())?;
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
/// The errors of [`parts`], `Unsupported` for a service with another protocol than that of buckets.
fn bucket_and_key(at: &str) -> Result<(&str, &str)> {
    let bucket = at.split_once("://").map_or(at, |(_, rest)| rest).split('/').next().unwrap_or_default();
    let refused = |what: &str, instead: &str| Err(Error::new(ErrorKind::Unsupported, format!("{what}: {instead}")));
    if bucket.starts_with("arn:") {
        // arn:partition:service:region:account:accesspoint/name
        let service = bucket.split(':').nth(2).unwrap_or_default();
        let is_global = bucket.split(':').nth(3).is_some_and(str::is_empty);
        let (what, instead) = match service {
            "s3-outposts" => ("S3 on Outposts", "give a bucket of a region"),
            "s3-object-lambda" => ("an S3 Object Lambda access point", "give its bucket"),
            "s3express" => ("S3 Express One Zone", "give a general purpose bucket"),
            _ if !bucket.contains(":accesspoint") => {
                return refused("this is the ARN of a bucket", "give its name, which stands behind the last colon")
            }
            _ if is_global => ("a multi-region access point", "give a bucket of a region"),
            _ => ("an access point", "give the access point's alias (it ends with -s3alias), or its bucket"),
        };
        return refused(&format!("this is an ARN of {what}, which is not supported"), instead);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::remote::secret::Secret;
    use crate::store::remote::settings::StorageSettings;
    use crate::store::remote::{Provider, Web};

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
        let moved = |region: &str| refused(false, Some(region));
        assert!(s3.renew("s3://b/k", first.generation, &moved("r-2")));
        // Requests that were on their way meanwhile, and then one that the server sends back to where it came from.
        assert!(s3.renew("s3://b/k", first.generation, &moved("r-2")));
        let second = s3.request("s3://b/k", None).unwrap().unwrap();
        assert!(second.fields.contains("/r-2/s3/") && second.generation > first.generation);
        assert!(
            !s3.renew("s3://b/k", second.generation, &moved("r-2"))
                && !s3.renew("s3://b/k", second.generation, &moved("r 3"))
        );
        // Keys that were given are not renewed.
        let refusal = refused(true, None);
        assert!(!s3.renew("s3://b/k", second.generation, &refusal));
    }

    fn refused(access: bool, region: Option<&str>) -> Refused {
        let (error, region) = (Error::new(ErrorKind::Io, "no"), region.map(str::to_owned));
        Refused { error, access, region, code: String::new(), message: String::new() }
    }

    #[test]
    fn a_request_is_signed_for_the_place_that_a_redirect_names() {
        let environment =
            [("AWS_REGION", "us-east-1"), ("AWS_SESSION_TOKEN", "t"), ("AWS_ENDPOINT_URL", "https://s3.example.com")];
        let s3 = store(keys(), &environment);
        let first = s3.request("s3://b/k", None).unwrap().unwrap();
        let moved = |to: &str| s3.moved("s3://b/k", &Address::parse(to).unwrap(), None).unwrap().unwrap();
        for (to, region) in [
            ("https://b.s3.eu-west-1.amazonaws.com/k", Some("eu-west-1")),
            ("https://b.s3-us-west-2.amazonaws.com/k", Some("us-west-2")),
            ("https://b.s3.dualstack.eu-west-1.amazonaws.com/k", Some("eu-west-1")),
            ("https://s3.cn-north-1.amazonaws.com.cn/b/k", Some("cn-north-1")),
            ("https://b.s3.amazonaws.com/k", Some("us-east-1")),
            ("https://node-7.example.com:8443/b/k?x=1", Some("us-east-1")),
            ("https://cdn.example.com/k?X-Amz-Signature=1", None),
            ("https://cdn.example.com/k?e=1&Signature=1", None),
        ] {
            let get = moved(to);
            assert!(get.is_moved && get.generation == first.generation, "{to}");
            let scope = get.fields.split("/s3/aws4_request").next().and_then(|text| text.rsplit('/').next());
            assert_eq!(scope.filter(|_| !get.fields.is_empty()), region, "{to}: {}", get.fields);
            assert_eq!(get.fields, moved(to).fields, "it is signed once");
        }
        // The place says which region it is: from then on that one counts.
        let refusal = refused(false, Some("r-9"));
        let there = moved("https://node-7.example.com:8443/b/k");
        assert!(s3.renew("s3://b/k", there.generation, &refusal));
        assert!(moved("https://node-7.example.com:8443/b/k").fields.contains("/r-9/s3/"));
        let anonymous = store(S3Settings { anonymous: true, ..S3Settings::default() }, &[("AWS_REGION", "r")]);
        assert!(anonymous.request("s3://b/k", None).unwrap().is_ok());
        assert_eq!(
            anonymous.moved("s3://b/k", &Address::parse("https://h/k").unwrap(), None).unwrap().unwrap().fields,
            ""
        );
    }

    #[test]
    fn a_redirect_out_of_the_service_gets_no_credentials() {
        let secret = Some(Secret::new("token"));
        for (endpoint, to, is_signed) in [
            ("https://s3.example.com", "https://s3.example.com:8443/k", true),
            ("https://s3.example.com", "https://b.s3.example.com/k", true),
            ("https://s3.example.com", "https://node-7.example.com/k", true),
            ("https://s3.example.com", "https://example.com/k", true),
            ("https://s3.example.com", "https://b.s3.eu-west-1.amazonaws.com/k", true),
            ("https://s3.example.com", "https://s3.cn-north-1.amazonaws.com.cn/b/k", true),
            ("https://s3.example.com", "https://badexample.com/k", false),
            ("https://s3.example.com", "https://s3.example.com.evil.net/k", false),
            ("https://s3.example.com", "https://amazonaws.com.evil.net/k", false),
            ("https://s3.example.com", "https://notamazonaws.com/k", false),
            ("https://s3.example.com", "https://cdn.other.net/k?token=1", false),
            ("https://s3.example.com", "https://node-7.example.com/k?X-Amz-Credential=1", false),
            ("https://s3.shop.co.uk", "https://node.shop.co.uk/k", true),
            ("https://s3.shop.co.uk", "https://evil.co.uk/k", false),
            ("http://10.0.0.1:9000", "http://10.0.0.1:9001/b/k", true),
            ("http://10.0.0.1:9000", "http://20.0.0.1:9000/b/k", false),
            ("http://minio:9000", "http://b.minio:9000/k", true),
            // Nodes of a cluster in a private network
            ("http://minio:9000", "http://other:9000/b/k", true),
            ("http://127.0.0.1:9000", "http://localhost:9001/b/k", true),
            ("http://minio:9000", "http://cdn.example.com/b/k", false),
            ("http://10.0.0.1:9000", "http://169.254.169.254/b/k", false),
            ("", "https://b.s3.eu-west-1.amazonaws.com/k", true),
            ("", "https://cdn.example.com/k?token=1", false),
        ] {
            let given = Some(endpoint.to_owned()).filter(|text| !text.is_empty());
            let s3 = S3Settings { endpoint: given, session_token: secret.clone(), requester_pays: true, ..keys() };
            let s3 = store(s3, &[("AWS_REGION", "r-1")]);
            let first = s3.request("s3://b/k", None).unwrap().unwrap();
            assert!(first.fields.contains("x-amz-security-token: token"), "{}", first.fields);
            let get = s3.moved("s3://b/k", &Address::parse(to).unwrap(), None).unwrap().unwrap();
            assert_eq!(get.fields.contains("authorization: "), is_signed, "{endpoint} to {to}");
            assert!(is_signed || get.fields.is_empty(), "{endpoint} to {to}: {}", get.fields);
        }
    }

    #[test]
    fn no_debug_output_has_a_secret() {
        let environment =
            [("AWS_SECRET_ACCESS_KEY", "sesame"), ("AWS_SESSION_TOKEN", "sesame"), ("AWS_REGION", "here")];
        let s3 = S3Settings { session_token: Some(Secret::new("sesame")), ..keys() };
        let store = store(s3.clone(), &environment);
        let get = store.request("s3://b/k", None).unwrap().unwrap();
        let web = Web::of(
            Provider::of("s3").unwrap(),
            StorageSettings { s3, ..StorageSettings::default() },
            Environment::of(&environment),
        );
        let text = format!("{store:?} {get:?} {web:?}");
        assert!(!text.contains("sesame") && !text.contains("Signature="), "{text}");
    }
}
