//! Blobs of Azure that are written, in blocks: Put Block, Put Block List.
//! <https://learn.microsoft.com/rest/api/storageservices/put-block-list>
//!
//! Blocks that no list names are invisible, and Azure forgets them after a week. The list has a number of ours in the blob's
//! metadata: after a lost answer it tells whether the blob is this one.

use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::remote::auth::tokens::form;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::request::Requests;
use crate::store::remote::upload::{changed, content_type, is_checked, since, Courier, Reply, WriteOrder};
use crate::store::upload::{PartLimits, Precondition, Removal, Sender, Upload, UploadWatch, Uploaded, Uploads};
use crate::sync::{lock, Mutex};
use base64::prelude::{Engine, BASE64_STANDARD};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMITS: PartLimits = PartLimits { least: 1, most: 4000 << 20, parts: 50_000, step: 1, in_order: false };
/// The field with the number of an upload.
const MARK: &str = "x-ms-meta-penstock";
/// The field of a checksum.
const SUM: &str = "x-ms-content-crc64";

/// Opens containers for requests that write.
pub(super) trait OpensContainers: Requests {
    /// A request for the blob at this address: where it goes, its fields, and the number of its credentials. Waits for these.
    fn worded(&self, at: &str, query: &str, fields: &str) -> Result<(Address, String, u64)>;

    /// The same as plain requests.
    fn requests(&self) -> &dyn Requests;
}

/// Takes blobs for containers of Azure.
#[derive(Debug)]
pub(super) struct AzureUploads {
    azure: Arc<dyn OpensContainers>,
    courier: Arc<Courier>,
}

/// A blob in blocks.
struct AzureUpload {
    azure: Arc<dyn OpensContainers>,
    courier: Arc<Courier>,
    at: Location,
    mark: String,
    condition: Precondition,
    /// Blocks that the server has, and whether it has compared each with its checksum.
    there: Mutex<BTreeMap<u32, bool>>,
}

/// A request for one blob.
struct AzureAsk<'a> {
    at: &'a Location,
    method: &'static str,
    query: &'a [(&'static str, String)],
    fields: String,
}

fn send(
    azure: &dyn OpensContainers,
    courier: &Courier,
    ask: &AzureAsk<'_>,
    body: &[&[u8]],
    expected: &[u16],
    watch: &dyn UploadWatch,
) -> Result<Reply> {
    let at = ask.at.to_string();
    let word = || {
        let (address, fields, generation) = azure.worded(&at, &form(ask.query), &ask.fields)?;
        Ok(WriteOrder { method: ask.method, address, fields, generation: Some(generation), is_long: true })
    };
    courier.send(azure.requests(), &at, &word, body, expected, watch).map_err(|e| e.at(ask.at))
}

fn condition(condition: &Precondition) -> String {
    match condition {
        Precondition::Always => String::new(),
        Precondition::Absent | Precondition::Unused => "If-None-Match: *\r\n".to_owned(),
        Precondition::Version(etag) => format!("If-Match: {etag}\r\n"),
    }
}

fn mark() -> String {
    format!("{:016x}", RandomState::new().hash_one(Instant::now()))
}

/// The version of a blob that has this mark.
fn marked(
    azure: &dyn OpensContainers,
    courier: &Courier,
    at: &Location,
    mark: &str,
    watch: &dyn UploadWatch,
) -> Result<Option<Uploaded>> {
    let ask = AzureAsk { at, method: "HEAD", query: &[], fields: String::new() };
    let reply = send(azure, courier, &ask, &[], &[404], watch)?;
    let is_it = reply.status != 404 && reply.field(MARK).is_some_and(|found| found == mark);
    Ok(is_it.then(|| uploaded(&reply, true)))
}

/// The blob that an answer tells of.
fn uploaded(reply: &Reply, is_checked: bool) -> Uploaded {
    let (version, is_versioned) = (reply.field("etag"), is_versioned(reply));
    Uploaded { version, is_checked, is_versioned, ..Uploaded::default() }
}

/// True if the answer names a version, which only accounts with versioning have.
fn is_versioned(reply: &Reply) -> bool {
    reply.field("x-ms-version-id").is_some()
}

/// CRC-64/NVME of bytes, as Azure has it: base64 of its bytes, the lowest first.
fn crc64(bytes: &[&[u8]]) -> String {
    let mut digest = Crc64::default();
    bytes.iter().for_each(|part| digest.update(part));
    BASE64_STANDARD.encode((!digest.0).to_le_bytes())
}

/// CRC-64/NVME, sixteen bytes a step.
struct Crc64(u64);

impl Default for Crc64 {
    fn default() -> Self {
        Crc64(u64::MAX)
    }
}

/// The polynomial, its lowest power first.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
static TABLES: [[u64; 256]; 16] = tables();

const fn tables() -> [[u64; 256]; 16] {
    let mut tables = [[0; 256]; 16];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u64, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 16 {
        byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = (before >> 8) ^ tables[0][(before & 255) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

impl Crc64 {
    fn update(&mut self, bytes: &[u8]) {
        let (steps, rest) = (bytes.chunks_exact(16), bytes.chunks_exact(16).remainder());
        for step in steps {
            let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
            let (low, high) = (number(&step[..8]) ^ self.0, number(&step[8..]));
            let table = |table: usize, number: u64, byte: usize| TABLES[table][(number >> (8 * byte) & 255) as usize];
            self.0 = (0..8).fold(0, |crc, at| crc ^ table(15 - at, low, at) ^ table(7 - at, high, at));
        }
        for byte in rest {
            self.0 = TABLES[0][((self.0 ^ u64::from(*byte)) & 255) as usize] ^ (self.0 >> 8);
        }
    }
}

impl AzureUploads {
    pub(super) fn new(azure: Arc<dyn OpensContainers>, common: Arc<Common>) -> Result<AzureUploads> {
        Ok(AzureUploads { azure, courier: Arc::new(Courier::new(common)?) })
    }

    fn send(&self, ask: &AzureAsk<'_>, body: &[&[u8]], expected: &[u16], watch: &dyn UploadWatch) -> Result<Reply> {
        send(&*self.azure, &self.courier, ask, body, expected, watch)
    }
}

impl Uploads for AzureUploads {
    fn limits(&self) -> PartLimits {
        LIMITS
    }

    fn begin(
        &self,
        at: &Location,
        _size: u64,
        _part: u64,
        when: &Precondition,
        _watch: &dyn UploadWatch,
    ) -> Result<Box<dyn Upload>> {
        let (azure, courier, at, condition) = (self.azure.clone(), self.courier.clone(), at.clone(), when.clone());
        Ok(Box::new(AzureUpload { azure, courier, at, mark: mark(), condition, there: Mutex::default() }))
    }

    fn put(&self, at: &Location, bytes: &[u8], when: &Precondition, watch: &dyn UploadWatch) -> Result<Uploaded> {
        let (mark, crc) = (mark(), crc64(&[bytes]));
        let fields = format!(
            "x-ms-blob-type: BlockBlob\r\nContent-Type: {}\r\nx-ms-content-crc64: {crc}\r\n{MARK}: {mark}\r\n{}",
            content_type(at),
            condition(when)
        );
        let ask = AzureAsk { at, method: "PUT", query: &[], fields };
        let reply = self.send(&ask, &[bytes], &[409, 412], watch)?;
        if !matches!(reply.status, 409 | 412) {
            let is_checked = is_checked(&reply, SUM, &crc, at)?;
            return Ok(uploaded(&reply, is_checked));
        }
        let found = match reply.is_repeated {
            true => marked(&*self.azure, &self.courier, at, &mark, watch)?,
            false => None,
        };
        found.ok_or_else(|| changed(at, &reply))
    }

    fn version(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<String>> {
        let ask = AzureAsk { at, method: "HEAD", query: &[], fields: String::new() };
        let reply = self.send(&ask, &[], &[404], watch)?;
        Ok((reply.status != 404).then(|| reply.field("etag").unwrap_or_default()))
    }

    fn remove(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Removal> {
        let ask = AzureAsk { at, method: "DELETE", query: &[], fields: String::new() };
        let reply = self.send(&ask, &[], &[404, 409], watch)?;
        if reply.status == 409 {
            // A policy of immutability, or a legal hold.
            let text = format!("the server does not let it be removed ({})", reply.shown);
            return Err(Error::new(ErrorKind::Permission, text).at(at).answered(409, None));
        }
        Ok(Removal::Done)
    }

    fn age(&self, at: &Location, watch: &dyn UploadWatch) -> Result<Option<Duration>> {
        let ask = AzureAsk { at, method: "HEAD", query: &[], fields: String::new() };
        let reply = self.send(&ask, &[], &[404], watch)?;
        match reply.field("last-modified").and_then(|moment| since(&reply, &moment)) {
            _ if reply.status == 404 => Ok(None),
            None => Err(reply.unexpected("no time of the blob (Last-Modified) was given").at(at)),
            age => Ok(age),
        }
    }

    fn sender(&self) -> &dyn Sender {
        &*self.courier
    }
}

impl AzureUpload {
    /// The name of a block: all of a blob have names of the same length. Blocks of other uploads have other ones.
    fn block(&self, number: u32) -> String {
        BASE64_STANDARD.encode(format!("{}-{number:05}", self.mark))
    }
}

impl Upload for AzureUpload {
    fn part(&self, number: u32, offset: u64, bytes: &[&[u8]], watch: &dyn UploadWatch) -> Result<()> {
        let crc = crc64(bytes);
        let query = [("comp", "block".to_owned()), ("blockid", self.block(number))];
        let ask =
            AzureAsk { at: &self.at, method: "PUT", query: &query, fields: format!("x-ms-content-crc64: {crc}\r\n") };
        let length: usize = bytes.iter().map(|part| part.len()).sum();
        let ranged = |e: Error| e.range(offset..offset + length as u64);
        let reply = send(&*self.azure, &self.courier, &ask, bytes, &[], watch).map_err(ranged)?;
        let is_checked = is_checked(&reply, SUM, &crc, &self.at).map_err(ranged)?;
        lock(&self.there).insert(number, is_checked);
        Ok(())
    }

    fn finish(&self, watch: &dyn UploadWatch) -> Result<Uploaded> {
        let mut text = "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>".to_owned();
        let mut is_checked = true;
        for (number, is_block_checked) in lock(&self.there).iter() {
            let _ = write!(text, "<Latest>{}</Latest>", self.block(*number));
            is_checked &= is_block_checked;
        }
        text += "</BlockList>";
        let fields = format!(
            "x-ms-blob-content-type: {}\r\n{MARK}: {}\r\n{}",
            content_type(&self.at),
            self.mark,
            condition(&self.condition)
        );
        let ask = AzureAsk { at: &self.at, method: "PUT", query: &[("comp", "blocklist".to_owned())], fields };
        let reply = send(&*self.azure, &self.courier, &ask, &[text.as_bytes()], &[409, 412], watch)?;
        if !matches!(reply.status, 409 | 412) {
            return Ok(uploaded(&reply, is_checked));
        }
        let found = match reply.is_repeated {
            true => marked(&*self.azure, &self.courier, &self.at, &self.mark, watch)?,
            false => None,
        };
        found.ok_or_else(|| changed(&self.at, &reply))
    }

    /// Azure forgets blocks that no list names.
    fn abort(&self, _watch: &dyn UploadWatch) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_its_standard() {
        // The check value of CRC-64/NVME, the lowest byte first
        let sum = |parts: &[&[u8]]| BASE64_STANDARD.decode(crc64(parts)).unwrap_or_default();
        assert_eq!(sum(&[b"123456789"]), 0xae8b_1486_0a79_9888_u64.to_le_bytes());
        let bytes: Vec<u8> = (0..1000).map(|i| (i * i / 7) as u8).collect();
        let mut plain = u64::MAX;
        for byte in &bytes {
            plain = TABLES[0][((plain ^ u64::from(*byte)) & 255) as usize] ^ (plain >> 8);
        }
        for cut in [0, 1, 15, 16, 17, 500, 1000] {
            assert_eq!(sum(&[&bytes[..cut], &bytes[cut..]]), (!plain).to_le_bytes(), "{cut}");
        }
    }
}
