//! Objects of S3 that are written, in parts (multipart upload): `CreateMultipartUpload`, `UploadPart`,
//! `CompleteMultipartUpload`. <https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateMultipartUpload.html>
//!
//! Each part is sent with its CRC32C, which the server compares, and says in its answer. Servers that do not know checksums
//! ignore it: then [`Uploaded::is_checked`] is false.

use super::redirect::is_of_amazon;
use super::versions::{default_lock, has_versions, is_removed, own_lock};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::remote::auth::tokens::form;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::request::Requests;
use crate::store::remote::http::xml;
use crate::store::remote::listing::parts;
use crate::store::remote::upload::{changed, content_type, is_checked, other_bytes, since, Courier, Reply, WriteOrder};
use crate::store::upload::{
    ConditionTrial, ObjectState, PartLimits, Precondition, Removal, Sender, UnfinishedUpload, Upload, UploadWatch,
    Uploaded, Uploads,
};
use crate::sync::{lock, Mutex};
use base64::prelude::{Engine, BASE64_STANDARD};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMITS: PartLimits = PartLimits { least: 5 << 20, most: 5 << 30, parts: 10_000, step: 1, in_order: false };
/// The statuses of a condition that does not hold: another object, one that is being written, none.
const UNMET: &[u16] = &[404, 409, 412];
/// Codes of errors that go away.
const PASSING: [&str; 3] = ["InternalError", "SlowDown", "ServiceUnavailable"];
/// How often such a request is sent again, and the pause before.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);
/// How long a save waits for a list of versions: a few requests to a service that is busy.
const LISTING: Duration = Duration::from_secs(10);
/// The statuses of a service that has no list of versions.
const NO_LIST: &[u16] = &[404, 405, 501];
/// The field of a part's checksum.
const SUM: &str = "x-amz-checksum-crc32c";

/// Signs requests that write.
pub(super) trait SignsWrites: Requests {
    /// A request for the object at this address: where it goes, its fields with their signature, and the number of its
    /// credentials. Waits for these.
    fn worded(
        &self,
        at: &str,
        method: &'static str,
        query: &str,
        fields: &[(&'static str, String)],
    ) -> Result<(Address, String, u64)>;

    /// The same as plain requests.
    fn requests(&self) -> &dyn Requests;
}

/// Takes objects for buckets of S3.
#[derive(Debug)]
pub(super) struct S3Uploads {
    s3: Arc<dyn SignsWrites>,
    courier: Arc<Courier>,
}

/// An object in parts.
struct S3Upload {
    s3: Arc<dyn SignsWrites>,
    courier: Arc<Courier>,
    at: Location,
    id: String,
    size: u64,
    condition: Precondition,
    /// ETag and CRC32C of each part that the server has, and whether the server has compared it.
    parts: Mutex<BTreeMap<u32, S3Part>>,
}

struct S3Part {
    etag: String,
    crc: u32,
    is_checked: bool,
}

impl S3Uploads {
    pub(super) fn new(s3: Arc<dyn SignsWrites>, common: Arc<Common>) -> Result<S3Uploads> {
        Ok(S3Uploads { s3, courier: Arc::new(Courier::new(common)?) })
    }

    fn send(&self, ask: &S3Ask<'_>, body: &[&[u8]], expected: &[u16], watch: &dyn UploadWatch) -> Result<Reply> {
        send(&*self.s3, &self.courier, ask, body, expected, watch)
    }
}

/// A request for one object.
struct S3Ask<'a> {
    at: &'a Location,
    method: &'static str,
    query: &'a [(&'static str, String)],
    fields: &'a [(&'static str, String)],
    /// True if the server may work for long before it answers.
    is_long: bool,
}

fn send(
    s3: &dyn SignsWrites,
    courier: &Courier,
    ask: &S3Ask<'_>,
    body: &[&[u8]],
    expected: &[u16],
    watch: &dyn UploadWatch,
) -> Result<Reply> {
    let at = ask.at.to_string();
    let word = || {
        let (address, fields, generation) = s3.worded(&at, ask.method, &form(ask.query), ask.fields)?;
        Ok(WriteOrder { method: ask.method, address, fields, generation: Some(generation), is_long: ask.is_long })
    };
    courier.send(s3.requests(), &at, &word, body, expected, watch).map_err(|e| e.at(ask.at))
}

/// The fields of a condition.
fn condition(condition: &Precondition) -> Vec<(&'static str, String)> {
    match condition {
        Precondition::Always => Vec::new(),
        Precondition::Absent | Precondition::Unused => vec![("if-none-match", "*".to_owned())],
        Precondition::Version(etag) => vec![("if-match", etag.clone())],
    }
}

fn sum(crc: u32) -> String {
    BASE64_STANDARD.encode(crc.to_be_bytes())
}

fn crc_of(bytes: &[&[u8]]) -> u32 {
    bytes.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part))
}

impl Uploads for S3Uploads {
    fn limits(&self) -> PartLimits {
        LIMITS
    }

    fn begin(
        &self,
        at: &Location,
        size: u64,
        _part: u64,
        condition: &Precondition,
        watch: &dyn UploadWatch,
    ) -> Result<Box<dyn Upload>> {
        let fields = [("x-amz-checksum-algorithm", "CRC32C".to_owned()), ("content-type", content_type(at).to_owned())];
        let ask = S3Ask { at, method: "POST", query: &[("uploads", String::new())], fields: &fields, is_long: false };
        let reply = self.send(&ask, &[], &[], watch)?;
        let found = texts(&reply, "InitiateMultipartUploadResult", at)?;
        let id = found.get("UploadId").filter(|id| !id.is_empty()).cloned();
        let id = id.ok_or_else(|| reply.unexpected("no number of the upload (UploadId) was given").at(at))?;
        let (s3, courier, at, condition) = (self.s3.clone(), self.courier.clone(), at.clone(), condition.clone());
        Ok(Box::new(S3Upload { s3, courier, at, id, size, condition, parts: Mutex::default() }))
    }

    fn put(&self, at: &Location, bytes: &[u8], when: &Precondition, watch: &dyn UploadWatch) -> Result<Uploaded> {
        let mut reply = self.send_whole(at, bytes, when, watch)?;
        if let Some(there) = self.whole(at, bytes, &reply, watch)? {
            return Ok(there);
        }
        if counts_removed(&*self.s3, &self.courier, at, when, &reply, watch)? {
            reply = self.send_whole(at, bytes, &Precondition::Always, watch)?;
            if let Some(there) = self.whole(at, bytes, &reply, watch)? {
                return Ok(Uploaded { is_unguarded: true, ..there });
            }
        }
        if reply.status == 404 && (*when == Precondition::Always || reply.shown.contains("NoSuchBucket")) {
            return Err(
                Error::new(ErrorKind::NotFound, format!("the server has no such bucket ({})", reply.shown)).at(at)
            );
        }
        Err(changed(at, &reply))
    }

    fn version(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<String>> {
        Ok(self.state(at, watch)?.map(|state| state.version))
    }

    fn state(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<ObjectState>> {
        let ask = S3Ask { at, method: "HEAD", query: &[], fields: &[], is_long: false };
        let reply = self.send(&ask, &[], &[404], watch)?;
        let state = || ObjectState { version: reply.field("etag").unwrap_or_default(), lock: own_lock(&reply) };
        Ok((reply.status != 404).then(state))
    }

    fn lock(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<String>> {
        let own = self.state(at, watch).map(|state| state.and_then(|state| state.lock));
        if let Ok(Some(lock)) = own {
            return Ok(Some(lock));
        }
        // Some servers apply the retention of a bucket when something is to be deleted, and say it of no object.
        let bucket = bucket_of(at)?;
        let query = [("object-lock", String::new())];
        let ask = S3Ask { at: &bucket, method: "GET", query: &query, fields: &[], is_long: false };
        let reply = self.send(&ask, &[], &[404], watch)?;
        let other = |()| reply.unexpected("no configuration of object lock came").at(&bucket);
        match reply.status {
            404 => Ok(None),
            _ => default_lock(&String::from_utf8_lossy(&reply.body)).map_err(other),
        }
    }

    fn remove(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Removal> {
        let ask = S3Ask { at, method: "DELETE", query: &[], fields: &[], is_long: false };
        let reply = self.send(&ask, &[], &[404], watch)?;
        // Where versioning is suspended, the mark itself is the version `null`, which replaces the bytes of one with that name:
        // <https://docs.aws.amazon.com/AmazonS3/latest/userguide/DeletingObjectsfromVersioningSuspendedBuckets.html>
        let is_marked = reply.field("x-amz-delete-marker").as_deref() == Some("true") && names_version(&reply);
        Ok(if is_marked { Removal::Hidden } else { Removal::Done })
    }

    fn age(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<Duration>> {
        let ask = S3Ask { at, method: "HEAD", query: &[], fields: &[], is_long: false };
        let reply = self.send(&ask, &[], &[404], watch)?;
        match reply.field("last-modified").and_then(|moment| since(&reply, &moment)) {
            _ if reply.status == 404 => Ok(None),
            None => Err(reply.unexpected("no time of the object (Last-Modified) was given").at(at)),
            age => Ok(age),
        }
    }

    fn unfinished(&self, folder: &Location, watch: &dyn UploadWatch) -> Result<Option<Vec<UnfinishedUpload>>> {
        let text = folder.to_string();
        let (_, key) = parts(&text)?;
        let root = text.strip_suffix(key).unwrap_or(&text).trim_end_matches('/').to_owned();
        let prefix = if key.is_empty() || key.ends_with('/') { key.to_owned() } else { format!("{key}/") };
        let bucket = bucket_of(folder)?;
        let (mut found, mut behind) = (Vec::new(), None);
        loop {
            let page = self.unfinished_page(&bucket, &prefix, behind.as_ref(), watch)?;
            for (key, name, age) in page.uploads {
                found.push(UnfinishedUpload { at: Location::Url(format!("{root}/{key}")), name, age });
            }
            match page.next {
                None => return Ok(Some(found)),
                next if next == behind => {
                    let text = "the server says that its list of uploads goes on, and gives the same page again";
                    return Err(Error::new(ErrorKind::Io, text).at(folder));
                }
                next => behind = next,
            }
        }
    }

    fn forget(&self, at: &Location, name: &str, watch: &dyn UploadWatch) -> Result<()> {
        let query = [("uploadId", name.to_owned())];
        let ask = S3Ask { at, method: "DELETE", query: &query, fields: &[], is_long: false };
        self.send(&ask, &[], &[404], watch).map(drop)
    }

    fn remembers(&self, names: &[Location], watch: &dyn UploadWatch) -> Result<bool> {
        let Some(first) = names.first() else { return Ok(false) };
        if is_amazon(&*self.s3, first)? {
            return Ok(false);
        }
        let texts: Vec<String> = names.iter().map(Location::to_string).collect();
        let keys = texts.iter().map(|text| parts(text).map(|(_, key)| key)).collect::<Result<Vec<&str>>>()?;
        versions(&*self.s3, &self.courier, first, shared_start(&keys), &|text| has_versions(text, &keys), watch)
    }

    fn heeds_conditions(&self, probe: &Location, in_parts: bool, watch: &dyn UploadWatch) -> ConditionTrial {
        match is_amazon(&*self.s3, probe) {
            Ok(false) => {}
            known => return ConditionTrial::of(known),
        }
        let other = Precondition::Version("\"penstock\"".to_owned());
        let (written, incomplete) = match in_parts {
            true => self.put_in_parts(probe, &other, watch),
            false => (self.put(probe, &[], &other, watch).map(drop), None),
        };
        let heeds = match written {
            Err(e) if e.kind() == ErrorKind::Changed => Ok(true),
            Err(e) => Err(e),
            Ok(()) => Ok(false),
        };
        ConditionTrial { heeds, incomplete }
    }

    fn sender(&self) -> &dyn Sender {
        &*self.courier
    }
}

/// A page of the uploads that have not ended.
#[derive(Default)]
struct UnfinishedPage {
    /// The key of each, its name and its age.
    uploads: Vec<(String, String, Duration)>,
    /// Key and name that the next page begins behind.
    next: Option<(String, String)>,
}

impl S3Uploads {
    /// A page of `ListMultipartUploads`.
    fn unfinished_page(
        &self,
        bucket: &Location,
        prefix: &str,
        behind: Option<&(String, String)>,
        watch: &dyn UploadWatch,
    ) -> Result<UnfinishedPage> {
        let mut query = vec![("prefix", prefix.to_owned()), ("uploads", String::new())];
        if let Some((key, name)) = behind {
            query.extend([("key-marker", key.clone()), ("upload-id-marker", name.clone())]);
        }
        query.sort_unstable();
        let ask = S3Ask { at: bucket, method: "GET", query: &query, fields: &[], is_long: false };
        let reply = self.send(&ask, &[], &[], watch)?;
        let body = String::from_utf8_lossy(&reply.body);
        let (mut page, mut next) = (UnfinishedPage::default(), [None, None]);
        let (mut key, mut name, mut age) = (String::new(), String::new(), None);
        let (mut is_truncated, mut is_undated) = (false, false);
        let read = xml::read(&body, |element| match element.path[1..] {
            ["Upload", "Key"] => key = element.text,
            ["Upload", "UploadId"] => name = element.text,
            ["Upload", "Initiated"] => age = since(&reply, element.text.trim()),
            ["Upload"] => match age.take() {
                Some(age) => page.uploads.push((std::mem::take(&mut key), std::mem::take(&mut name), age)),
                None => is_undated = true,
            },
            ["NextKeyMarker"] => next[0] = Some(element.text),
            ["NextUploadIdMarker"] => next[1] = Some(element.text),
            ["IsTruncated"] => is_truncated = element.text.trim().eq_ignore_ascii_case("true"),
            _ => {}
        });
        if read != Ok("ListMultipartUploadsResult") || is_undated {
            return Err(reply.unexpected("no list of uploads came").at(bucket));
        }
        if is_truncated {
            let [key, name] = next;
            page.next = Some((key.unwrap_or_default(), name.unwrap_or_default()));
        }
        Ok(page)
    }

    /// The answer to the request that writes a small object.
    fn send_whole(&self, at: &Location, bytes: &[u8], when: &Precondition, watch: &dyn UploadWatch) -> Result<Reply> {
        let mut fields = condition(when);
        fields.extend([(SUM, sum(crc32c::crc32c(bytes))), ("content-type", content_type(at).to_owned())]);
        let ask = S3Ask { at, method: "PUT", query: &[], fields: &fields, is_long: false };
        self.send(&ask, &[bytes], UNMET, watch)
    }

    /// The small object, if the answer says that it is written.
    fn whole(&self, at: &Location, bytes: &[u8], reply: &Reply, watch: &dyn UploadWatch) -> Result<Option<Uploaded>> {
        let crc = sum(crc32c::crc32c(bytes));
        if !UNMET.contains(&reply.status) {
            return Ok(Some(uploaded(reply, reply.field("etag"), is_checked(reply, SUM, &crc, at)?)));
        }
        // It may be there because of an earlier try whose answer was lost.
        match reply.is_repeated {
            true => is_there(&*self.s3, &self.courier, at, bytes.len() as u64, &crc, watch),
            false => Ok(None),
        }
    }

    /// Writes an object of one byte by an upload in parts, which is aborted if that fails. The second error is that of the abort.
    fn put_in_parts(&self, at: &Location, when: &Precondition, watch: &dyn UploadWatch) -> (Result<()>, Option<Error>) {
        let upload = match self.begin(at, 1, LIMITS.least, when, watch) {
            Ok(upload) => upload,
            Err(e) => return (Err(e), None),
        };
        let written = upload.part(0, 0, &[b"\0"], watch).and_then(|()| upload.finish(watch)).map(drop);
        let incomplete = written.is_err().then(|| upload.abort(watch).err()).flatten();
        (written, incomplete)
    }
}

fn is_there(
    s3: &dyn SignsWrites,
    courier: &Courier,
    at: &Location,
    size: u64,
    crc: &str,
    watch: &dyn UploadWatch,
) -> Result<Option<Uploaded>> {
    let fields = [("x-amz-checksum-mode", "ENABLED".to_owned())];
    let ask = S3Ask { at, method: "HEAD", query: &[], fields: &fields, is_long: false };
    let reply = send(s3, courier, &ask, &[], &[404], watch)?;
    let is_it = reply.status != 404
        && reply.field(SUM).is_some_and(|found| found == crc)
        && reply.field("content-length").is_some_and(|found| found == size.to_string());
    Ok(is_it.then(|| uploaded(&reply, reply.field("etag"), true)))
}

/// The object that an answer tells of.
fn uploaded(reply: &Reply, version: Option<String>, is_checked: bool) -> Uploaded {
    Uploaded { version, is_checked, is_versioned: names_version(reply), ..Uploaded::default() }
}

/// True if an answer names a version that the bucket keeps. Without versioning it names none, and where that is suspended, `null`.
fn names_version(reply: &Reply) -> bool {
    reply.field("x-amz-version-id").is_some_and(|version| version != "null")
}

fn is_amazon(s3: &dyn SignsWrites, at: &Location) -> Result<bool> {
    let (address, ..) = s3.worded(&at.to_string(), "PUT", "", &[])?;
    Ok(is_of_amazon(&address.server.host))
}

/// The bucket of an object.
fn bucket_of(at: &Location) -> Result<Location> {
    let text = at.to_string();
    let (bucket, _) = parts(&text)?;
    Ok(Location::Url(format!("{}://{bucket}/", at.scheme().unwrap_or_default())))
}

/// A wait for a list of versions, which nobody needs for longer than so.
struct Listing<'w> {
    watch: &'w dyn UploadWatch,
    began: Instant,
    /// The reason of the last try.
    why: Mutex<Option<String>>,
}

impl UploadWatch for Listing<'_> {
    fn check(&self) -> Result<()> {
        self.watch.check()?;
        if self.began.elapsed() < LISTING {
            return Ok(());
        }
        let why = lock(&self.why).as_ref().map_or(String::new(), |why| format!(": {why}"));
        Err(Error::new(ErrorKind::Timeout, format!("no answer in {} seconds{why}", LISTING.as_secs())))
    }

    fn moved(&self) {
        self.watch.moved();
    }

    fn again(&self, why: &Error) {
        *lock(&self.why) = Some(why.message().to_owned());
        self.watch.again(why);
    }
}

/// The answer of `read` to the versions of the keys with this prefix. A service that lists none has none.
fn versions(
    s3: &dyn SignsWrites,
    courier: &Courier,
    at: &Location,
    prefix: &str,
    read: &dyn Fn(&str) -> Result<bool, ()>,
    watch: &dyn UploadWatch,
) -> Result<bool> {
    let bucket = bucket_of(at)?;
    let query = [("prefix", prefix.to_owned()), ("versions", String::new())];
    let ask = S3Ask { at: &bucket, method: "GET", query: &query, fields: &[], is_long: false };
    let watch = Listing { watch, began: Instant::now(), why: Mutex::default() };
    match send(s3, courier, &ask, &[], &[], &watch) {
        Err(e) if e.status().is_some_and(|status| NO_LIST.contains(&status)) => Ok(false),
        Err(e) => Err(e),
        Ok(reply) => read(&String::from_utf8_lossy(&reply.body))
            .map_err(|()| reply.unexpected("no list of versions came").at(&bucket)),
    }
}

/// The start that all keys have in common.
fn shared_start<'k>(keys: &[&'k str]) -> &'k str {
    let Some((&first, rest)) = keys.split_first() else { return "" };
    rest.iter().fold(first, |start, key| {
        let differs = start.char_indices().zip(key.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at);
        &start[..differs.unwrap_or(start.len().min(key.len()))]
    })
}

/// True if the server refuses the condition that there is no such object because of one that was removed, and whose old versions it keeps.
/// S3 does not: <https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html>. versitygw 1.8 does.
///
/// # Errors
/// `Changed`: that is so, and the name must be unused; or the list of versions is refused. `Cancelled`, `Timeout`: it was not waited
/// for. All have the status of the refused request, which has done nothing.
fn counts_removed(
    s3: &dyn SignsWrites,
    courier: &Courier,
    at: &Location,
    when: &Precondition,
    reply: &Reply,
    watch: &dyn UploadWatch,
) -> Result<bool> {
    let is_of_absence = matches!(when, Precondition::Absent | Precondition::Unused);
    if !is_of_absence || reply.status != 412 {
        return Ok(false);
    }
    let refused = |kind: ErrorKind, why: &str| {
        let text = format!("the service refuses the condition that there is no such object ({}); {why}", reply.shown);
        Error::new(kind, text).at(at).answered(reply.status, None)
    };
    let text = at.to_string();
    let (_, key) = parts(&text)?;
    let removed = || versions(s3, courier, at, key, &|text| is_removed(text, key), watch);
    match is_amazon(s3, at).and_then(|is_amazon| if is_amazon { Ok(false) } else { removed() }) {
        Ok(true) if *when == Precondition::Unused => {
            let why = "one was there and was removed, and the service counts it because it keeps its versions";
            Err(refused(ErrorKind::Changed, why))
        }
        Err(e) => {
            let kind = match e.kind() {
                ErrorKind::Cancelled | ErrorKind::Timeout => e.kind(),
                _ => ErrorKind::Changed,
            };
            let unasked = "whether it was removed could not be asked (s3:ListBucketVersions)";
            Err(refused(kind, &format!("{unasked}: {}", e.message())))
        }
        known => known,
    }
}

/// The texts of the elements directly in the root, which must have this name.
fn texts(reply: &Reply, root: &str, at: &Location) -> Result<BTreeMap<String, String>> {
    let body = String::from_utf8_lossy(&reply.body);
    let mut found = BTreeMap::new();
    let read = xml::read(&body, |element| {
        if let [_, name] = element.path[..] {
            found.insert(name.to_owned(), element.text);
        }
    });
    match read {
        Ok(name) if name == root => Ok(found),
        // An answer of 200 can be an error that came up while the server worked.
        _ => Err(reply.unexpected(&format!("no {root} came")).at(at)),
    }
}

impl S3Upload {
    fn send(&self, ask: &S3Ask<'_>, body: &[&[u8]], expected: &[u16], watch: &dyn UploadWatch) -> Result<Reply> {
        send(&*self.s3, &self.courier, ask, body, expected, watch)
    }

    fn id(&self) -> (&'static str, String) {
        ("uploadId", self.id.clone())
    }

    /// The list of its parts, as the last request names them, and the checksum of their checksums.
    fn listed(&self) -> (String, String, bool) {
        let parts = lock(&self.parts);
        let (mut text, mut sums, mut is_checked) = ("<CompleteMultipartUpload>".to_owned(), Vec::new(), true);
        for (number, S3Part { etag, crc, is_checked: is_part_checked }) in parts.iter() {
            let etag = etag.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;");
            let _ = write!(text, "<Part><PartNumber>{}</PartNumber><ETag>{etag}</ETag>", number + 1);
            if *is_part_checked {
                let _ = write!(text, "<ChecksumCRC32C>{}</ChecksumCRC32C>", sum(*crc));
            }
            text += "</Part>";
            sums.extend(crc.to_be_bytes());
            is_checked &= is_part_checked;
        }
        text += "</CompleteMultipartUpload>";
        (text, format!("{}-{}", sum(crc32c::crc32c(&sums)), parts.len()), is_checked)
    }

    /// The answer to the request that makes the parts an object.
    fn complete(&self, when: &Precondition, watch: &dyn UploadWatch) -> Result<Reply> {
        let (text, ..) = self.listed();
        let mut fields = condition(when);
        fields.push(("content-type", "application/xml".to_owned()));
        let query = [self.id()];
        let ask = S3Ask { at: &self.at, method: "POST", query: &query, fields: &fields, is_long: true };
        let mut reply = self.send(&ask, &[text.as_bytes()], UNMET, watch)?;
        // An answer of 200 can be an error that came up while the server worked, and goes away.
        for _ in 0..TRIES {
            let body = String::from_utf8_lossy(&reply.body);
            if reply.status != 200 || !PASSING.iter().any(|code| body.contains(&format!("<Code>{code}</Code>"))) {
                break;
            }
            watch.check()?;
            std::thread::sleep(PAUSE);
            let again = self.send(&ask, &[text.as_bytes()], UNMET, watch)?;
            reply = again;
            reply.is_repeated = true;
        }
        Ok(reply)
    }

    /// The object, if the answer says that it is there.
    fn completed(&self, reply: &Reply, watch: &dyn UploadWatch) -> Result<Option<Uploaded>> {
        let (_, whole, is_checked) = self.listed();
        if UNMET.contains(&reply.status) {
            // The server may have done so at an earlier try whose answer was lost: then it knows the upload no more.
            return match reply.is_repeated {
                true => is_there(&*self.s3, &self.courier, &self.at, self.size, &whole, watch),
                false => Ok(None),
            };
        }
        let found = texts(reply, "CompleteMultipartUploadResult", &self.at)?;
        // Without a `-` it is that of the whole object.
        if let Some(sum) = found.get("ChecksumCRC32C").filter(|sum| sum.contains('-') && **sum != whole) {
            return Err(other_bytes(sum, &whole, &self.at));
        }
        Ok(Some(uploaded(reply, found.get("ETag").cloned(), is_checked)))
    }
}

impl Upload for S3Upload {
    fn name(&self) -> Option<&str> {
        Some(&self.id)
    }

    fn part(&self, number: u32, offset: u64, bytes: &[&[u8]], watch: &dyn UploadWatch) -> Result<()> {
        let crc = crc_of(bytes);
        let said = sum(crc);
        let query = [("partNumber", (number + 1).to_string()), self.id()];
        let fields = [(SUM, said.clone())];
        let ask = S3Ask { at: &self.at, method: "PUT", query: &query, fields: &fields, is_long: false };
        let length: usize = bytes.iter().map(|part| part.len()).sum();
        let ranged = |e: Error| e.range(offset..offset + length as u64);
        let reply = self.send(&ask, bytes, &[], watch).map_err(ranged)?;
        let is_checked = is_checked(&reply, SUM, &said, &self.at).map_err(ranged)?;
        let none = || ranged(reply.unexpected("the server gives a part no ETag").at(&self.at));
        let etag = reply.field("etag").ok_or_else(none)?;
        lock(&self.parts).insert(number, S3Part { etag, crc, is_checked });
        Ok(())
    }

    fn finish(&self, watch: &dyn UploadWatch) -> Result<Uploaded> {
        let mut reply = self.complete(&self.condition, watch)?;
        if let Some(there) = self.completed(&reply, watch)? {
            return Ok(there);
        }
        if counts_removed(&*self.s3, &self.courier, &self.at, &self.condition, &reply, watch)? {
            reply = self.complete(&Precondition::Always, watch)?;
            if let Some(there) = self.completed(&reply, watch)? {
                return Ok(Uploaded { is_unguarded: true, ..there });
            }
        }
        Err(match reply.status {
            409 | 412 => changed(&self.at, &reply),
            _ if self.condition != Precondition::Always && !reply.shown.contains("NoSuchUpload") => {
                changed(&self.at, &reply)
            }
            _ => reply.unexpected("the upload is gone").at(&self.at),
        })
    }

    fn abort(&self, watch: &dyn UploadWatch) -> Result<()> {
        let query = [self.id()];
        let ask = S3Ask { at: &self.at, method: "DELETE", query: &query, fields: &[], is_long: false };
        self.send(&ask, &[], &[404], watch).map(drop)
    }
}
