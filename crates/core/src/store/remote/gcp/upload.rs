//! Objects of Google Cloud Storage that are written: resumable uploads of the JSON API.
//! <https://cloud.google.com/storage/docs/performing-resumable-uploads>
//!
//! Parts go one after the other, in multiples of 256 KiB. The last bytes go with the request that makes the object visible, and
//! with the CRC32C of all of it, which the server compares.

use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::remote::auth::tokens::form;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::request::{bearer_field, Requests};
use crate::store::remote::listing::parts;
use crate::store::remote::upload::{changed, content_type, other_bytes, since, Courier, Reply, WriteOrder};
use crate::store::upload::{PartLimits, Precondition, Removal, Sender, Upload, UploadWatch, Uploaded, Uploads};
use crate::sync::{lock, Mutex};
use base64::prelude::{Engine, BASE64_STANDARD};
use serde_json::{json, Value};
use std::sync::Arc;
use std::time::Duration;

/// Every request but the last one has a multiple of so many bytes.
const STEP: u64 = 256 << 10;
/// An object has 5 TiB at most; there is no limit of parts.
const LIMITS: PartLimits = PartLimits { least: STEP, most: 5 << 40, parts: u64::MAX, step: STEP, in_order: true };
/// The server may keep nothing of so many requests in a row.
const MOST_STANDING: u32 = 5;
/// The status of an upload that goes on, and that of one that was given up.
const GOES_ON: u16 = 308;
const GIVEN_UP: u16 = 499;

/// Opens buckets for requests that write.
pub(super) trait OpensBuckets: Requests {
    /// Where requests go, with which token, and the number of these credentials. Waits for them.
    fn opened(&self) -> Result<(Address, Option<String>, u64)>;

    /// The same as plain requests.
    fn requests(&self) -> &dyn Requests;
}

/// Takes objects for buckets of Google Cloud Storage.
#[derive(Debug, Clone)]
pub(super) struct GcsUploads {
    gcs: Arc<dyn OpensBuckets>,
    courier: Arc<Courier>,
}

/// An object that comes in its order.
struct GcsUpload {
    service: GcsUploads,
    at: Location,
    /// Where its bytes go. It carries what allows that.
    session: Address,
    size: u64,
    sent: Mutex<GcsSent>,
}

/// The bytes that have been sent.
#[derive(Default)]
struct GcsSent {
    /// So many the server has.
    there: u64,
    /// The bytes behind them, fewer than a step: they go with the last request.
    rest: Vec<u8>,
    crc: u32,
}

impl GcsUploads {
    pub(super) fn new(gcs: Arc<dyn OpensBuckets>, common: Arc<Common>) -> Result<GcsUploads> {
        Ok(GcsUploads { gcs, courier: Arc::new(Courier::new(common)?) })
    }

    /// Sends a request to the JSON API, with a token.
    fn send(&self, ask: &GcsAsk<'_>, body: &[&[u8]], expected: &[u16], watch: &dyn UploadWatch) -> Result<Reply> {
        let at = ask.at.to_string();
        let word = || {
            let (bucket, key) = parts(&at)?;
            if key.is_empty() {
                return Err(Error::invalid("it names a bucket, and no object in it"));
            }
            let (endpoint, token, generation) = self.gcs.opened()?;
            let (place, in_path) = match ask.kind {
                GcsResource::Object => ("storage/v1", format!("/{}", form(&[("", key)]).trim_start_matches('='))),
                GcsResource::Upload => ("upload/storage/v1", String::new()),
            };
            let mut query = ask.query.to_vec();
            if matches!(ask.kind, GcsResource::Upload) {
                query.push(("name", key.to_owned()));
            }
            let query = if query.is_empty() { String::new() } else { format!("?{}", form(&query)) };
            let Address { server, target } = endpoint;
            let target = format!("{}/{place}/b/{bucket}/o{in_path}{query}", target.trim_end_matches('/'));
            let token = token.as_deref().map_or_else(String::new, bearer_field);
            let fields = format!("{token}{}", ask.fields);
            let (address, generation) = (Address { server, target }, Some(generation));
            Ok(WriteOrder { method: ask.method, address, fields, generation, is_long: false })
        };
        self.courier.send(self.gcs.requests(), &at, &word, body, expected, watch).map_err(|e| e.at(ask.at))
    }

    /// The description of an object; `None` if the object does not exist.
    fn found(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<Value>> {
        let ask = GcsAsk { at, kind: GcsResource::Object, method: "GET", query: &[], fields: String::new() };
        let reply = self.send(&ask, &[], &[404], watch)?;
        (reply.status != 404).then(|| said(&reply, at)).transpose()
    }
}

/// A request for one object.
struct GcsAsk<'a> {
    at: &'a Location,
    kind: GcsResource,
    method: &'static str,
    query: &'a [(&'static str, String)],
    fields: String,
}

/// The resource that a request is for.
enum GcsResource {
    Object,
    Upload,
}

fn condition(condition: &Precondition) -> Vec<(&'static str, String)> {
    match condition {
        Precondition::Always => Vec::new(),
        Precondition::Absent | Precondition::Unused => vec![("ifGenerationMatch", "0".to_owned())],
        Precondition::Version(generation) => vec![("ifGenerationMatch", generation.clone())],
    }
}

fn said(reply: &Reply, at: &Location) -> Result<Value> {
    serde_json::from_slice(&reply.body).map_err(|_| reply.unexpected("no description of the object came").at(at))
}

/// The version that an answer describes.
///
/// # Errors
/// `Io`: the server has other bytes than were sent.
fn uploaded(reply: &Reply, crc: &str, at: &Location) -> Result<Uploaded> {
    let said = said(reply, at)?;
    if let Some(found) = said["crc32c"].as_str().filter(|found| *found != crc) {
        return Err(other_bytes(found, crc, at));
    }
    // No answer says whether the bucket has versions: `keeps_version` asks.
    Ok(Uploaded { version: generation(&said), is_checked: said["crc32c"].is_string(), ..Uploaded::default() })
}

fn generation(said: &Value) -> Option<String> {
    said["generation"].as_str().map(str::to_owned).or_else(|| said["generation"].as_u64().map(|n| n.to_string()))
}

fn sum(crc: u32) -> String {
    BASE64_STANDARD.encode(crc.to_be_bytes())
}

impl Uploads for GcsUploads {
    fn limits(&self) -> PartLimits {
        LIMITS
    }

    fn begin(
        &self,
        at: &Location,
        size: u64,
        _part: u64,
        when: &Precondition,
        watch: &dyn UploadWatch,
    ) -> Result<Box<dyn Upload>> {
        let mut query = condition(when);
        query.push(("uploadType", "resumable".to_owned()));
        let kind = content_type(at);
        let fields = format!(
            "Content-Type: application/json\r\nX-Upload-Content-Type: {kind}\r\nX-Upload-Content-Length: {size}\r\n"
        );
        let ask = GcsAsk { at, kind: GcsResource::Upload, method: "POST", query: &query, fields };
        let about = json!({ "contentType": kind }).to_string();
        let reply = self.send(&ask, &[about.as_bytes()], &[412], watch)?;
        if reply.status == 412 {
            return Err(changed(at, &reply));
        }
        let none = || reply.unexpected("no address of the upload (Location) was given").at(at);
        let session = Address::parse(&reply.field("location").ok_or_else(none)?).map_err(|e| e.at(at))?;
        let (service, at, sent) = (self.clone(), at.clone(), Mutex::default());
        Ok(Box::new(GcsUpload { service, at, session, size, sent }))
    }

    fn put(&self, at: &Location, bytes: &[u8], when: &Precondition, watch: &dyn UploadWatch) -> Result<Uploaded> {
        let crc = sum(crc32c::crc32c(bytes));
        let mut query = condition(when);
        query.push(("uploadType", "media".to_owned()));
        let fields = format!("Content-Type: {}\r\nX-Goog-Hash: crc32c={crc}\r\n", content_type(at));
        let ask = GcsAsk { at, kind: GcsResource::Upload, method: "POST", query: &query, fields };
        let reply = self.send(&ask, &[bytes], &[412], watch)?;
        if reply.status != 412 {
            return uploaded(&reply, &crc, at);
        }
        // It may be there because of an earlier try whose answer was lost.
        if reply.is_repeated {
            if let Some(found) = self.found(at, watch)?.filter(|found| found["crc32c"].as_str() == Some(&crc)) {
                return Ok(Uploaded { version: generation(&found), is_checked: true, ..Uploaded::default() });
            }
        }
        Err(changed(at, &reply))
    }

    fn version(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<String>> {
        Ok(self.found(at, watch)?.map(|found| generation(&found).unwrap_or_default()))
    }

    fn remove(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Removal> {
        let ask = GcsAsk { at, kind: GcsResource::Object, method: "DELETE", query: &[], fields: String::new() };
        self.send(&ask, &[], &[404], watch).map(|_| Removal::Done)
    }

    fn age(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<Duration>> {
        let ask = GcsAsk { at, kind: GcsResource::Object, method: "GET", query: &[], fields: String::new() };
        let reply = self.send(&ask, &[], &[404], watch)?;
        if reply.status == 404 {
            return Ok(None);
        }
        let age = said(&reply, at)?["updated"].as_str().and_then(|moment| since(&reply, moment));
        age.map(Some).ok_or_else(|| reply.unexpected("no time of the object (updated) was given").at(at))
    }

    fn keeps_version(&self, at: &Location, version: &str, watch: &dyn UploadWatch) -> Result<bool> {
        let query = [("generation", version.to_owned())];
        let ask = GcsAsk { at, kind: GcsResource::Object, method: "GET", query: &query, fields: String::new() };
        let reply = self.send(&ask, &[], &[404], watch)?;
        // One that is not the newest says since when.
        Ok(reply.status != 404 && said(&reply, at)?["timeDeleted"].is_string())
    }

    fn sender(&self) -> &dyn Sender {
        &*self.courier
    }
}

impl GcsUpload {
    /// Sends a request to the session.
    fn send(
        &self,
        method: &'static str,
        fields: &str,
        body: &[&[u8]],
        expected: &[u16],
        watch: &dyn UploadWatch,
    ) -> Result<Reply> {
        let word = || {
            let (address, fields) = (self.session.clone(), fields.to_owned());
            Ok(WriteOrder { method, address, fields, generation: None, is_long: true })
        };
        let at = self.at.to_string();
        let GcsUploads { gcs, courier } = &self.service;
        courier.send(gcs.requests(), &at, &word, body, expected, watch).map_err(|e| e.at(&self.at))
    }

    /// Sends these bytes, which begin at `offset`, until the server has all of them.
    fn bring(&self, offset: u64, bytes: &[&[u8]], watch: &dyn UploadWatch) -> Result<()> {
        let end = offset + bytes.iter().map(|part| part.len() as u64).sum::<u64>();
        let (mut there, mut standing) = (offset, 0);
        while there < end {
            let fields = format!("Content-Range: bytes {there}-{}/*\r\n", end - 1);
            let reply = self.send("PUT", &fields, &behind(bytes, there - offset), &[GOES_ON], watch)?;
            let has = if reply.status == GOES_ON { has(&reply) } else { 0 };
            // A server may have kept nothing of it, which is allowed.
            standing = if has > there { 0 } else { standing + 1 };
            if has < there || has > end || standing > MOST_STANDING {
                return Err(reply
                    .unexpected(&format!("bytes {there}..{end} were sent, and it has {has}"))
                    .at(&self.at));
            }
            there = has;
        }
        Ok(())
    }
}

/// Bytes that the server has, as it says.
fn has(reply: &Reply) -> u64 {
    let range = reply.field("range");
    let last = range.as_deref().and_then(|range| range.rsplit_once('-')?.1.parse::<u64>().ok());
    last.map_or(0, |last| last + 1)
}

/// The bytes behind so many.
fn behind<'b>(bytes: &[&'b [u8]], mut skip: u64) -> Vec<&'b [u8]> {
    let mut left = Vec::with_capacity(bytes.len());
    for part in bytes {
        let cut = skip.min(part.len() as u64);
        skip -= cut;
        left.push(&part[cut as usize..]);
    }
    left
}

impl Upload for GcsUpload {
    fn part(&self, _number: u32, offset: u64, bytes: &[&[u8]], watch: &dyn UploadWatch) -> Result<()> {
        let mut sent = lock(&self.sent);
        if sent.there != offset {
            let text = format!("the part at {offset} came, and {} was due; please report this", sent.there);
            return Err(Error::new(ErrorKind::Internal, text).at(&self.at));
        }
        let end = offset + bytes.iter().map(|part| part.len() as u64).sum::<u64>();
        let crc = bytes.iter().fold(sent.crc, |crc, part| crc32c::crc32c_append(crc, part));
        if end < self.size {
            self.bring(offset, bytes, watch)?;
            (sent.there, sent.crc) = (end, crc);
            return Ok(());
        }
        // The object is complete with its last byte, so that one waits.
        let kept = (end - 1) % STEP + 1;
        let now = end - offset - kept.min(end - offset);
        let mut rest = behind(bytes, now).concat();
        if now > 0 {
            let first = upto(bytes, now);
            self.bring(offset, &first, watch)?;
        }
        (sent.there, sent.crc) = (offset + now, crc);
        std::mem::swap(&mut sent.rest, &mut rest);
        Ok(())
    }

    fn finish(&self, watch: &dyn UploadWatch) -> Result<Uploaded> {
        let sent = lock(&self.sent);
        let (crc, size) = (sum(sent.crc), self.size);
        let fields =
            format!("Content-Range: bytes {}-{}/{size}\r\nX-Goog-Hash: crc32c={crc}\r\n", sent.there, size - 1);
        let reply = self.send("PUT", &fields, &[&sent.rest], &[GOES_ON, 404, 410, 412], watch)?;
        if matches!(reply.status, 404 | 410 | 412) && reply.is_repeated {
            // It may be there because of an earlier try whose answer was lost.
            let is_it =
                |found: &Value| found["crc32c"].as_str() == Some(&crc) && found["size"] == json!(size.to_string());
            if let Some(found) = self.service.found(&self.at, watch)?.filter(is_it) {
                return Ok(Uploaded { version: generation(&found), is_checked: true, ..Uploaded::default() });
            }
        }
        match reply.status {
            404 | 410 => Err(reply.unexpected("the upload is gone").at(&self.at)),
            412 => Err(changed(&self.at, &reply)),
            GOES_ON => Err(reply.unexpected("all bytes were sent, and the upload goes on").at(&self.at)),
            _ => uploaded(&reply, &crc, &self.at),
        }
    }

    fn abort(&self, watch: &dyn UploadWatch) -> Result<()> {
        self.send("DELETE", "", &[], &[404, 410, GIVEN_UP], watch).map(drop)
    }
}

/// So many of the first bytes.
fn upto<'b>(bytes: &[&'b [u8]], mut left: u64) -> Vec<&'b [u8]> {
    let mut first = Vec::with_capacity(bytes.len());
    for part in bytes {
        let cut = left.min(part.len() as u64);
        left -= cut;
        first.push(&part[..cut as usize]);
    }
    first
}
