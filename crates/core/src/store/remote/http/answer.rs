//! The head of an answer: what it says, and whether that is what was asked for.

use super::address::MovedTo;
use super::chunks;
use super::server_error::{shortened, ServerError};
use crate::error::{Error, ErrorKind, Result};
use crate::store::version::Version;
use std::ops::Range;
use std::time::Duration;

/// Bytes between two reads that one body brings and nobody wants: they cost less than another request. A server sends
/// 85 MB/s on one connection, after 10 to 50 ms.
pub(in crate::store::remote) const GAP: u64 = 1 << 20;
/// The longest head of an answer, in bytes.
pub(super) const LONGEST_HEAD: usize = 64 << 10;
const MOST_FIELDS: usize = 128;
/// The longest body of an error that is received.
const LONGEST_ERROR: usize = 8 << 10;
/// The longest pause that a server can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The head of an answer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(in crate::store::remote) struct Answer {
    pub(in crate::store::remote) status: u16,
    reason: String,
    length: Option<u64>,
    /// First byte, last byte; `None` of `bytes */total`.
    range: Option<(u64, u64)>,
    total: Option<u64>,
    etag: Option<String>,
    modified: Option<String>,
    location: Option<String>,
    /// The content encoding that it names, if that is one that changes bytes.
    encoding: Option<String>,
    /// The transfer coding that it names.
    coding: Option<TransferCoding>,
    request_id: Option<String>,
    /// The Hugging Face Hub's word in place of a reason, such as `GatedRepo`.
    error_code: Option<String>,
    pause: Option<Duration>,
    /// The region of the bucket, if the server says it.
    region: Option<String>,
    /// The body of an error.
    said: Option<ServerError>,
    /// Whether the connection can be used again.
    pub(in crate::store::remote) keeps: bool,
}

/// The coding of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TransferCoding {
    /// They come in chunks.
    Chunked,
    /// Something that nobody has asked for.
    Other(String),
}

/// Content encodings that change the bytes of a body. Other names come from the object's owner (`aws-chunked`,
/// `binary`, `utf-8`), and say nothing of its bytes.
const COMPRESSED: [&str; 12] = [
    "gzip",
    "x-gzip",
    "deflate",
    "compress",
    "x-compress",
    "br",
    "zstd",
    "dcb",
    "dcz",
    "exi",
    "pack200-gzip",
    "aes128gcm",
];

/// The object that a request expects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::store::remote) struct Expected {
    /// Size and version, if the object has been seen before.
    pub(in crate::store::remote) object: Option<(u64, Version)>,
    /// The bytes that are asked for. They may pass the end of an object that has not been seen.
    pub(in crate::store::remote) range: Range<u64>,
}

/// The verdict on an answer.
#[derive(Debug)]
pub(in crate::store::remote) enum Verdict {
    /// The bytes from this one on follow, so many of them, of an object of this size and version. They may begin before those
    /// that were asked for, and end before them or behind them.
    Body { from: u64, length: u64, size: u64, version: Version },
    /// The whole object follows, of this version. It ends where its body ends.
    Whole { version: Version },
    /// The object ends before the range does: its bytes up to this one may be asked for.
    Less(u64),
    /// The body has ended before the range did: the rest may be asked for.
    Rest,
    /// The object is elsewhere, perhaps in a region that is named.
    Moved { to: MovedTo, region: Option<String> },
    /// It may work later.
    Again(Error, Option<Duration>),
    /// The server does not let us, or has no such object: it may be the address that has expired.
    Refused(Refused),
    /// The server does not have the version that was asked for. After a redirect the server may compare `If-Match` with an
    /// ETag of its own: such a request is sent again without it.
    OtherEtag(Error),
    /// It will not work.
    Failed(Error),
}

impl Verdict {
    /// The same, with another error where it has one.
    pub(in crate::store::remote) fn map_error(self, map: impl FnOnce(Error) -> Error) -> Verdict {
        match self {
            Verdict::Again(e, pause) => Verdict::Again(map(e), pause),
            Verdict::Refused(refused) => Verdict::Refused(Refused { error: map(refused.error), ..refused }),
            Verdict::OtherEtag(e) => Verdict::OtherEtag(map(e)),
            Verdict::Failed(e) => Verdict::Failed(map(e)),
            verdict => verdict,
        }
    }
}

/// A server's refusal of an object.
#[derive(Debug)]
pub(in crate::store::remote) struct Refused {
    pub(in crate::store::remote) error: Error,
    /// Whether other credentials could help.
    pub(in crate::store::remote) access: bool,
    /// The region of the bucket, if the server says it.
    pub(in crate::store::remote) region: Option<String>,
    /// The server's code for the reason; empty if it says none.
    pub(in crate::store::remote) code: String,
    /// The server's further message.
    pub(in crate::store::remote) message: String,
}

impl Refused {
    /// The first of these hints whose code the server says.
    pub(in crate::store::remote) fn hint<'a>(&self, hints: &[(&str, &'a str)]) -> Option<&'a str> {
        hints.iter().find(|(code, _)| self.code.contains(code)).map(|(_, hint)| *hint)
    }
}

impl Answer {
    /// An answer that came another way, with these fields.
    pub(in crate::store::remote) fn of(status: u16, fields: &[(String, Vec<u8>)], body: &[u8]) -> Answer {
        let mut found = Answer { status, said: ServerError::of(body), ..Answer::default() };
        for (name, value) in fields {
            // Its length and its ranges are known to be right.
            let _ = found.field(name, value);
        }
        found
    }

    /// Takes what the body of an error says. Returns whether more of the body is to come that would say it.
    pub(in crate::store::remote) fn learn(&mut self, body: &[u8], ended: bool) -> bool {
        let says_why = self.status >= 400 || (self.location.is_none() && (300..400).contains(&self.status));
        if !says_why || self.length == Some(0) {
            return false;
        }
        let all = match self.length {
            Some(length) => body.len() as u64 >= length,
            None => body.ends_with(b"\r\n0\r\n\r\n"),
        };
        if !all && !ended && body.len() < LONGEST_ERROR {
            return true;
        }
        self.said = match self.coding {
            Some(TransferCoding::Chunked) => ServerError::of(&chunks::begun(body)),
            _ => ServerError::of(body),
        };
        false
    }

    /// The answer that begins with these bytes, and the length of its head; `None` if there are more to come.
    pub(in crate::store::remote) fn parse(bytes: &[u8]) -> Result<Option<(Answer, usize)>, Error> {
        let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
        let mut parsed = httparse::Response::new(&mut fields);
        let length = match lenient().parse_response(&mut parsed, bytes) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => return Ok(None),
            Ok(httparse::Status::Partial) => {
                return Err(io(format!("the head of the answer is longer than {LONGEST_HEAD} bytes")))
            }
            Err(e) => return Err(io(format!("the server does not answer in HTTP/1.1: {e}"))),
        };
        let mut found = Answer {
            status: parsed.code.unwrap_or_default(),
            reason: shortened(parsed.reason.unwrap_or_default()),
            keeps: parsed.version == Some(1),
            ..Answer::default()
        };
        for field in parsed.headers.iter() {
            found.field(field.name, field.value)?;
        }
        if found.coding.is_some() {
            // The chunks say how long it is.
            found.length = None;
        }
        Ok(Some((found, length)))
    }

    /// Takes a field of the head.
    fn field(&mut self, name: &str, value: &[u8]) -> Result<()> {
        // A field may go on in the next line.
        let value = String::from_utf8_lossy(value).replace(['\r', '\n'], " ").trim().to_owned();
        let has = |word: &str| value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word));
        match name.to_ascii_lowercase().as_str() {
            "content-length" => {
                // What two programs have added may stand in one line.
                for part in value.split(',') {
                    let length = part.trim().parse().map_err(|_| io("its Content-Length is not a number".into()))?;
                    if self.length.is_some_and(|other| other != length) {
                        return Err(io("the answer has two different Content-Length fields".into()));
                    }
                    self.length = Some(length);
                }
            }
            "content-range" => (self.range, self.total) = content_range(&value),
            "etag" => self.etag = Some(value),
            "last-modified" => self.modified = Some(value),
            "location" => self.location = Some(value),
            "content-encoding" if COMPRESSED.iter().any(|coding| has(coding)) => {
                self.encoding = Some(shortened(&value));
            }
            "transfer-encoding" => {
                let is_coding = |part: &&str| !part.is_empty() && !part.eq_ignore_ascii_case("identity");
                let codings: Vec<&str> = value.split(',').map(str::trim).filter(is_coding).collect();
                self.coding = match (codings.as_slice(), self.coding.take()) {
                    ([], before) => before,
                    ([one], None) if one.eq_ignore_ascii_case("chunked") => Some(TransferCoding::Chunked),
                    _ => Some(TransferCoding::Other(shortened(&value))),
                };
            }
            "retry-after" => {
                self.pause = value.parse().ok().map(|s| Duration::from_secs(s).min(LONGEST_PAUSE));
            }
            "x-amz-request-id" | "x-request-id" | "x-ms-request-id" | "x-guploader-uploadid" => {
                self.request_id = Some(shortened(&value));
            }
            "x-error-code" => self.error_code = Some(shortened(&value)),
            "x-amz-bucket-region" => self.region = Some(shortened(&value)),
            "connection" => self.keeps = !has("close") && (self.keeps || has("keep-alive")),
            _ => {}
        }
        Ok(())
    }

    /// The object's version: a strong ETag; without one a weak one, a date, or nothing but its size.
    fn version(&self) -> Version {
        match (&self.etag, &self.modified) {
            (Some(etag), _) if etag.starts_with('"') => Version::Strong(etag.clone()),
            (etag, date) => {
                let of = |text: &Option<String>| text.clone().unwrap_or_default();
                Version::Weak(format!("{} {}", of(etag), of(date)).trim().to_owned())
            }
        }
    }

    /// The status, what the server says of it, and the number of the request that its owner can look up.
    pub(in crate::store::remote) fn shown(&self) -> String {
        let said = self.said.as_ref().map_or_else(String::new, |said| format!(", {}", said.shown()));
        // Azure's reason is its message.
        let is_said =
            self.said.as_ref().is_some_and(|said| said.message.starts_with(self.reason.trim_end_matches('.')));
        let reason = if is_said { "" } else { &*self.reason };
        let mut text = format!("{} {reason}", self.status).trim_end().to_owned() + &said;
        text.extend(self.error_code.iter().map(|code| format!(", {code}")));
        text.extend(self.request_id.iter().map(|id| format!(", request {id}")));
        text
    }

    /// The same error, with what else could help.
    fn refused(&self, error: Error, access: bool) -> Verdict {
        let region = self.region.clone().or_else(|| self.said.as_ref().and_then(|said| said.region.clone()));
        let ServerError { code, message, .. } = self.said.clone().unwrap_or_default();
        let code = if code.is_empty() { self.error_code.clone().unwrap_or_default() } else { code };
        let message = if message.is_empty() { self.reason.clone() } else { message };
        Verdict::Refused(Refused { error, access, region, code, message })
    }

    /// The verdict on it. Errors have its status and the name of the request.
    pub(in crate::store::remote) fn judge(&self, expected: &Expected) -> Verdict {
        self.verdict(expected).map_error(|e| self.named_in(e))
    }

    fn verdict(&self, expected: &Expected) -> Verdict {
        let named = self.shown();
        let seen = expected.object.is_some();
        match self.status {
            // An empty object has no range that could be asked for.
            200 if !seen && self.length == Some(0) => self.whole_of(0),
            200 | 206 if self.refused_coding().is_some() => {
                Verdict::Failed(io(self.refused_coding().unwrap_or_default()))
            }
            206 => self.part(expected),
            // Some servers send small objects whole, whatever is asked for.
            200 if !seen && self.is_all_of(&expected.range) => self.whole_of(self.length.unwrap_or_default()),
            // How long it is, is seen in the end.
            200 if !seen && self.length.is_none() && expected.range.start == 0 => {
                Verdict::Whole { version: self.version() }
            }
            // All of an object that has been seen was asked for.
            200 if self.is_same(expected) => self.whole_of(expected.range.end),
            // Some servers refuse a range that passes the end. Not every one says where that is. But only an empty object
            // lacks its first byte.
            416 if !seen && self.size_said() == Some(0) => self.whole_of(0),
            416 if !seen && expected.range.start == 0 => match self.size_said() {
                Some(size) if size < expected.range.end => Verdict::Less(size),
                None if expected.range.end > 1 => Verdict::Less(1),
                None => self.whole_of(0),
                Some(_) => Verdict::Failed(io(format!("the server answered {named}"))),
            },
            200 => Verdict::Failed(no_ranges()),
            301 | 302 | 303 | 307 | 308 => match self.moved_to() {
                Some(to) => Verdict::Moved { to, region: self.region.clone() },
                None => self.refused(io(format!("the server redirects ({named}) and does not say where")), false),
            },
            400 | 401 | 403 | 409 if self.is_of_access() => {
                let text = format!("the server refuses access ({named})");
                self.refused(Error::permission(text), true)
            }
            404 | 410 if seen => {
                self.refused(changed(format!("the server has no such object any more ({named})")), false)
            }
            404 | 410 => {
                let text = format!("the server has no such object ({named})");
                self.refused(Error::new(ErrorKind::NotFound, text), false)
            }
            400 | 409 => self.refused(io(format!("the server answered {named}")), false),
            412 if seen => Verdict::OtherEtag(changed(format!("the server has another version of it ({named})"))),
            416 if seen => Verdict::Failed(changed(format!("the server has another version of it ({named})"))),
            408 | 425 | 429 | 500 | 502 | 503 | 504 => {
                Verdict::Again(io(format!("the server is busy or broken ({named})")), self.pause)
            }
            _ => Verdict::Failed(io(format!("the server answered {named}"))),
        }
    }

    /// Whether other credentials could help.
    fn is_of_access(&self) -> bool {
        matches!(self.status, 401 | 403) || self.said.as_ref().is_some_and(ServerError::is_of_access)
    }

    /// The size of the object, as the server says it where it refuses a range.
    fn size_said(&self) -> Option<u64> {
        self.total.or_else(|| self.said.as_ref().and_then(|said| said.size))
    }

    /// Whether the server does not say how many bytes there are: it has refused the first one, or gives `bytes 0-9/*`.
    pub(in crate::store::remote) fn is_without_size(&self) -> bool {
        self.size_said().is_none() && (self.status == 416 || (self.status == 206 && self.range.is_some()))
    }

    /// All bytes of an object that has so many follow.
    fn whole_of(&self, size: u64) -> Verdict {
        Verdict::Body { from: 0, length: size, size, version: self.version() }
    }

    /// Where the object is instead. A permanent redirect may name the region of a bucket: then that is enough.
    fn moved_to(&self) -> Option<MovedTo> {
        if let Some(to) = &self.location {
            return Some(MovedTo::Address(to.clone()));
        }
        let said = self.said.as_ref()?;
        let has_region = self.region.is_some() || said.region.is_some();
        let host = said.endpoint.clone().filter(|_| self.status == 307 || !has_region)?;
        Some(MovedTo::Host(host))
    }

    /// The error of a body that was encoded on its way. If its length is known, it is that of the range or of the
    /// object: then the object was encoded before it was stored.
    fn refused_coding(&self) -> Option<String> {
        let named = match (&self.coding, &self.encoding) {
            (Some(TransferCoding::Other(coding)), _) => coding,
            (_, Some(encoding)) if self.length.is_none() || self.status == 200 => encoding,
            _ => return None,
        };
        Some(format!("the body is encoded ({named}), which was not asked for"))
    }

    /// Whether it is all of an object that has been seen, and that was asked for whole.
    fn is_same(&self, expected: &Expected) -> bool {
        expected.object.as_ref().is_some_and(|(size, version)| {
            expected.range == (0..*size) && self.length == Some(*size) && self.version() == *version
        })
    }

    /// Whether a body that is the whole object has nothing but bytes of `range`.
    fn is_all_of(&self, range: &Range<u64>) -> bool {
        range.start == 0 && self.length.is_some_and(|length| length <= range.end)
    }

    /// A part of the object.
    fn part(&self, expected: &Expected) -> Verdict {
        let failed = |text: String| Verdict::Failed(io(text));
        let Range { start, end } = expected.range;
        let Some((first, last)) = self.range else {
            return failed("the answer does not say which part of the object it is (Content-Range)".into());
        };
        let Some(stop) = last.checked_add(1).filter(|stop| *stop > first) else {
            return failed(format!("bytes {start}..{end} were asked for, and the server sends {first}..={last}"));
        };
        let size = match (self.total, &expected.object) {
            (Some(size), _) => size,
            (None, Some((known, _))) => *known,
            // A server sends less than was asked for where the object ends.
            (None, None) if stop < end => stop,
            (None, None) => {
                let text = format!(
                    "the server does not say how large the object is (Content-Range: bytes {first}-{last}/*); use a server \
                     that does, or copy the file to a disk"
                );
                return failed(text);
            }
        };
        let version = self.version();
        let mut end = end;
        match &expected.object {
            Some((known, _)) if size != *known => {
                let text = format!("it had {known} bytes, and now has {size}");
                return Verdict::Failed(changed(text).with_values(*known, size));
            }
            Some((_, known)) if version != *known => {
                return Verdict::Failed(changed("it has another ETag or date".into()));
            }
            Some(_) => {}
            None => end = end.min(size),
        }
        // A server may send fewer bytes than it was asked for, or whole pages: then there are some that nobody wants.
        let besides = start.saturating_sub(first) + stop.saturating_sub(end);
        if first > start || stop <= start || end <= start || stop > size || besides > GAP {
            let text = format!("bytes {start}..{end} were asked for, and the server sends {first}..={last}");
            return failed(text);
        }
        let length = stop - first;
        if self.length.is_some_and(|told| told != length) {
            let told = self.length.unwrap_or_default();
            return failed(format!("the part has {length} bytes, and the server says that it sends {told}"));
        }
        Verdict::Body { from: first, length, size, version }
    }

    /// Whether the end of the body is known without the end of the connection.
    pub(in crate::store::remote) fn has_length(&self) -> bool {
        self.length.is_some()
    }

    /// Whether the body comes in chunks.
    pub(in crate::store::remote) fn is_chunked(&self) -> bool {
        self.coding == Some(TransferCoding::Chunked)
    }

    /// Takes what the server says of itself in an error that has been found later.
    pub(in crate::store::remote) fn named_in(&self, e: Error) -> Error {
        e.answered(self.status, self.request_id.clone())
    }
}

/// The error of a server that sends all where a part was asked for.
pub(in crate::store::remote) fn no_ranges() -> Error {
    io("the server sent the whole object where a part was asked for: it does not support range requests; copy the file to a \
        disk, or to a server that does (nginx, Apache, any object store)"
        .into())
}

fn io(text: String) -> Error {
    Error::new(ErrorKind::Io, text)
}

fn changed(what: String) -> Error {
    let text = format!("the object changed after the checkpoint was opened: {what}; open the checkpoint again");
    Error::new(ErrorKind::Changed, text)
}

/// `bytes first-last/total`, `bytes */total` or `bytes first-last/*`. Some servers write `bytes=` as in a request.
fn content_range(value: &str) -> (Option<(u64, u64)>, Option<u64>) {
    let unit = value.split_at_checked("bytes".len()).filter(|(unit, _)| unit.eq_ignore_ascii_case("bytes"));
    let said = unit.map(|(_, rest)| rest.trim_start_matches(|c: char| c.is_whitespace() || c == '='));
    let Some((range, total)) = said.and_then(|said| said.split_once('/')) else {
        return (None, None);
    };
    let number = |text: &str| text.trim().parse().ok();
    let range = range.split_once('-').and_then(|(first, last)| Some((number(first)?, number(last)?)));
    (range, number(total))
}

/// How heads of answers are parsed: as other clients do, also where the standard says that servers must not write so. A field
/// goes on in the next line, a space stands before a colon, a line is no field.
pub(super) fn lenient() -> httparse::ParserConfig {
    let mut config = httparse::ParserConfig::default();
    config
        .allow_obsolete_multiline_headers_in_responses(true)
        .allow_spaces_after_header_name_in_responses(true)
        .ignore_invalid_headers_in_responses(true);
    config
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    fn answer(text: &str) -> Answer {
        let text = text.replace('\n', "\r\n") + "\r\n\r\n";
        for cut in 0..text.len() {
            assert_eq!(Answer::parse(&text.as_bytes()[..cut]).unwrap(), None, "{cut} bytes");
        }
        let (found, length) = Answer::parse(text.as_bytes()).unwrap().unwrap();
        assert_eq!(length, text.len());
        found
    }

    fn told(text: &str, object: Option<(u64, Version)>) -> String {
        match answer(text).judge(&Expected { object, range: 10..20 }) {
            Verdict::Rest => "rest".into(),
            Verdict::Body { length, size, version, .. } => format!("{length} of {size} {version:?}"),
            Verdict::Whole { version } => format!("whole {version:?}"),
            Verdict::Less(end) => format!("less {end}"),
            Verdict::Moved { to: MovedTo::Address(to), region } => format!("moved {to}{}", region.unwrap_or_default()),
            Verdict::Moved { to: MovedTo::Host(to), region } => format!("host {to} {}", region.unwrap_or_default()),
            Verdict::Again(e, pause) => format!("again {:?} {pause:?}", e.kind()),
            Verdict::OtherEtag(e) => format!("other etag {:?}", e.kind()),
            Verdict::Refused(Refused { error, access, region, .. }) => {
                format!(
                    "refused {:?}{}{}",
                    error.kind(),
                    if access { " access" } else { "" },
                    region.unwrap_or_default()
                )
            }
            Verdict::Failed(e) => format!("failed {:?}", e.kind()),
        }
    }

    #[test]
    fn a_part_that_ends_before_it_begins_is_refused() {
        for (range, length) in [("10-4/5", 5), ("10-0/1", 0)] {
            let text = format!("HTTP/1.1 206 Partial Content\nContent-Length: {length}\nContent-Range: bytes {range}");
            assert_eq!(told(&text, None), "failed Io", "{range}");
        }
    }

    #[test]
    fn what_follows_from_an_answer() {
        let known = || Some((100, Version::Strong("\"a\"".into())));
        let part = "HTTP/1.1 206 Partial Content\nContent-Length: 10\nContent-Range: bytes 10-19/100\nETag: \"a\"";
        for (text, object, expected) in [
            (part, known(), "10 of 100 Strong(\"\\\"a\\\"\")"),
            (part, None, "10 of 100 Strong(\"\\\"a\\\"\")"),
            (&part.replace("\"a\"", "\"b\""), known(), "failed Changed"),
            (&part.replace("\nETag: \"a\"", ""), known(), "failed Changed"),
            (&part.replace("\"a\"", "W/\"a\""), None, "10 of 100 Weak(\"W/\\\"a\\\"\")"),
            (&part.replace("/100", "/101"), known(), "failed Changed"),
            (&part.replace("/100", "/*"), known(), "10 of 100 Strong(\"\\\"a\\\"\")"),
            (&part.replace("/100", "/*"), None, "failed Io"),
            (
                &part.replace("10-19/100", "10-14/*").replace("Length: 10", "Length: 5"),
                None,
                "5 of 15 Strong(\"\\\"a\\\"\")",
            ),
            (&part.replace("10-19", "9-18"), known(), "10 of 100 Strong(\"\\\"a\\\"\")"),
            (&part.replace("10-19", "15-24"), known(), "failed Io"),
            (&part.replace("10-19", "0-9"), known(), "failed Io"),
            (&part.replace("10-19", "20-29"), known(), "failed Io"),
            (&part.replace("10-19/100", "10-19/15"), None, "failed Io"),
            (&part.replace("10-19", "10-18446744073709551615"), known(), "failed Io"),
            (
                &part.replace("10-19/100", "10-14/15").replace("Length: 10", "Length: 5"),
                None,
                "5 of 15 Strong(\"\\\"a\\\"\")",
            ),
            (&part.replace("Length: 10", "Length: 11"), known(), "failed Io"),
            (
                &part.replace("Content-Length: 10", "Transfer-Encoding: chunked"),
                known(),
                "10 of 100 Strong(\"\\\"a\\\"\")",
            ),
            (&part.replace("Content-Length: 10", "Transfer-Encoding: gzip, chunked"), known(), "failed Io"),
            ("HTTP/1.1 200 OK\nContent-Length: 100", known(), "failed Io"),
            ("HTTP/1.1 200 OK\nContent-Length: 5", None, "failed Io"),
            ("HTTP/1.1 200 OK\nContent-Length: 0\nETag: \"e\"", None, "0 of 0 Strong(\"\\\"e\\\"\")"),
            ("HTTP/1.1 416 No\nContent-Range: bytes */0", None, "0 of 0 Weak(\"\")"),
            ("HTTP/1.1 416 No", None, "failed Io"),
            ("HTTP/1.1 416 No\nContent-Range: bytes */5", known(), "failed Changed"),
            ("HTTP/1.1 302 Found\nLocation: /x", known(), "moved /x"),
            ("HTTP/1.1 307 Found\nLocation: /x\nx-amz-bucket-region:  r", known(), "moved /xr"),
            ("HTTP/1.1 302 Found\nX: /x", known(), "refused Io"),
            ("HTTP/1.1 301 Moved\nx-amz-bucket-region: there", known(), "refused Iothere"),
            ("HTTP/1.1 400 Bad Request", known(), "refused Io"),
            ("HTTP/1.1 403 Forbidden", known(), "refused Permission access"),
            ("HTTP/1.1 404 Not Found", None, "refused NotFound"),
            ("HTTP/1.1 404 Not Found", known(), "refused Changed"),
            ("HTTP/1.1 412 Precondition Failed", known(), "other etag Changed"),
            ("HTTP/1.1 503 Slow Down\nRetry-After: 2", known(), "again Io Some(2s)"),
            ("HTTP/1.1 503 Slow Down\nRetry-After: 1000", None, "again Io Some(10s)"),
            ("HTTP/1.1 501 No", None, "failed Io"),
        ] {
            assert_eq!(told(text, object), expected, "{text}");
        }
    }

    #[test]
    fn a_part_may_have_other_bytes_besides_and_lack_some() {
        let of = |range: &str, length: u64, object: Option<u64>| {
            let text = format!("HTTP/1.1 206 Part\nContent-Length: {length}\nContent-Range: {range}\nETag: \"a\"");
            let object = object.map(|size| (size, Version::Strong("\"a\"".into())));
            match answer(&text).judge(&Expected { object, range: 10..20 }) {
                Verdict::Body { from, length, size, .. } => format!("{from}+{length} of {size}"),
                other => format!("{other:?}"),
            }
        };
        for known in [Some(3 << 20), None] {
            for range in ["bytes 8-11/3145728", "Bytes 8-11/3145728", "bytes=8-11/3145728", "bytes   8 - 11 / 3145728 "]
            {
                assert_eq!(of(range, 4, known), "8+4 of 3145728", "{range}");
            }
            assert_eq!(of("bytes 10-10/3145728", 1, known), "10+1 of 3145728");
            assert_eq!(of("bytes 0-99/3145728", 100, known), "0+100 of 3145728");
            assert!(
                of("bytes 10-2097152/3145728", 2097143, known).contains("were asked for"),
                "it is the whole object"
            );
        }
        for range in ["8-11/100", "items 8-11/100", "bytes8-11", "byte", "\u{e4}\u{e4}\u{e4} 8-11/100"] {
            assert!(of(range, 4, None).contains("does not say which part"), "{range}");
        }
        assert!(of("bytes 10-19/*", 10, None).contains("how large"));
    }

    #[test]
    fn a_head_is_read_as_other_clients_read_it() {
        let part = "HTTP/1.1 206 Part\nContent-Length: 10\nContent-Range: bytes 10-19/100\nETag: \"a\"";
        let same = told(part, None);
        for text in [
            part.replace("bytes 10", "bytes\n  10"),
            part.replace("Length:", "Length :"),
            part.replace("Length: 10", "Length: 10, 10"),
            part.replace("\nETag", "\nno field\nETag"),
            format!("{part}\nTransfer-Encoding: identity"),
        ] {
            assert_eq!(told(&text, None), same, "{text}");
        }
        let chunked = part.replace("Content-Length: 10", "Transfer-Encoding: identity, chunked");
        assert!(answer(&chunked).is_chunked());
        let text = part.replace("Length: 10", "Length: 10, 11") + "\r\n\r\n";
        assert!(Answer::parse(text.replace('\n', "\r\n").as_bytes()).is_err(), "two lengths");
    }

    #[test]
    fn a_range_that_passes_the_end_is_asked_for_again() {
        let of = |text: &str, end: u64| match answer(text).judge(&Expected { object: None, range: 0..end }) {
            Verdict::Less(end) => format!("less {end}"),
            Verdict::Body { length, size, .. } => format!("{length} of {size}"),
            other => format!("{other:?}"),
        };
        let (bare, sized) = ("HTTP/1.1 416 No\nContent-Length: 300", "HTTP/1.1 416 No\nContent-Range: bytes */7");
        assert_eq!((of(bare, 20), of(sized, 20)), ("less 1".into(), "less 7".into()));
        // An empty object alone lacks its first byte.
        assert_eq!(
            (of(bare, 1), of("HTTP/1.1 416 No\nContent-Range: bytes */0", 20)),
            ("0 of 0".into(), "0 of 0".into())
        );
        assert!(of(sized, 7).contains("416"), "it contradicts itself");
        // Amazon says the size elsewhere.
        for (more, verdict) in [
            ("", "less 1"),
            ("<ActualObjectSize>0</ActualObjectSize>", "0 of 0"),
            ("<ActualObjectSize>7</ActualObjectSize>", "less 7"),
        ] {
            let said = Answer::of(416, &[], format!("<Error><Code>InvalidRange</Code>{more}</Error>").as_bytes());
            let found = match said.judge(&Expected { object: None, range: 0..20 }) {
                Verdict::Less(end) => format!("less {end}"),
                Verdict::Body { length, size, .. } => format!("{length} of {size}"),
                other => format!("{other:?}"),
            };
            assert_eq!(found, verdict, "{more}");
        }
    }

    #[test]
    fn a_redirect_may_name_nothing_but_the_host_that_has_the_bucket() {
        let body = |more: &str| {
            format!("<Error><Code>Moved</Code><Bucket>b</Bucket>{more}<Endpoint>b.there</Endpoint></Error>")
        };
        let region = ("x-amz-bucket-region".to_owned(), b"far".to_vec());
        for (status, fields, more, expected) in [
            (307, vec![], "", "host b.there "),
            (307, vec![region.clone()], "", "host b.there far"),
            (301, vec![], "", "host b.there "),
            // The region says it all, and signatures need it anyway.
            (301, vec![region], "", "region far"),
            (301, vec![], "<Region>far</Region>", "region far"),
        ] {
            let answer = Answer::of(status, &fields, body(more).as_bytes());
            let found = match answer.judge(&Expected { object: None, range: 0..20 }) {
                Verdict::Moved { to: MovedTo::Host(to), region } => format!("host {to} {}", region.unwrap_or_default()),
                Verdict::Refused(refused) => format!("region {}", refused.region.unwrap_or_default()),
                other => format!("{other:?}"),
            };
            assert_eq!(found, expected, "{status} {more}");
        }
    }

    #[test]
    fn what_whoever_stored_an_object_said_of_its_encoding_says_nothing_of_its_bytes() {
        let known = || Some((100, Version::Strong("\"a\"".into())));
        let told = |head: &str, object| told(&format!("{head}\nETag: \"a\""), object);
        let part = "HTTP/1.1 206 Partial Content\nContent-Range: bytes 10-19/100";
        let (sized, chunked) = (format!("{part}\nContent-Length: 10"), format!("{part}\nTransfer-Encoding: chunked"));
        for name in ["aws-chunked", "", "binary", "utf-8", "identity", "none", "AWS-Chunked, UTF-8", "application/json"]
        {
            for head in [&sized, &chunked, part] {
                let text = format!("{head}\nContent-Encoding: {name}");
                assert!(told(&text, known()).starts_with("10 of 100"), "{text}");
                assert!(told(&text, None).starts_with("10 of 100"), "{text}");
            }
        }
        for name in COMPRESSED.map(str::to_owned).into_iter().chain(["aws-chunked,GZIP".into()]) {
            let text = format!("\nContent-Encoding: {name}");
            assert!(told(&format!("{sized}{text}"), known()).starts_with("10 of 100"), "{text}");
            // Nothing shows that these are the object's own bytes.
            assert_eq!(told(&format!("{chunked}{text}"), known()), "failed Io", "{text}");
            assert_eq!(told(&format!("{part}{text}"), None), "failed Io", "{text}");
            assert_eq!(told(&format!("HTTP/1.1 200 OK{text}"), None), "failed Io", "{text}");
        }
        let two = format!("{sized}\nContent-Encoding: aws-chunked\nContent-Encoding: utf-8");
        assert!(told(&two, known()).starts_with("10 of 100"));
        assert_eq!(
            told(&sized.replace("Length: 10", "Length: 7").replace("\n", "\nContent-Encoding: gzip\n"), known()),
            "failed Io"
        );
    }

    #[test]
    fn a_whole_object_may_come_without_its_length() {
        let of = |text: &str, object, range| format!("{:?}", answer(text).judge(&Expected { object, range }));
        for head in
            ["HTTP/1.1 200 OK", "HTTP/1.0 200 OK\nTransfer-Encoding: chunked", "HTTP/1.1 200 OK\nContent-Encoding: x"]
        {
            assert!(of(head, None, 0..20).starts_with("Whole"), "{head}");
            assert!(of(head, None, 1..20).contains("range requests"), "{head}");
            assert!(of(head, Some((20, Version::Weak(String::new()))), 0..20).contains("range requests"), "{head}");
        }
        assert!(of("HTTP/1.1 200 OK\nTransfer-Encoding: br, chunked", None, 0..20).contains("encoded (br, chunked)"));
    }

    #[test]
    fn a_small_object_may_come_whole() {
        let told = |text: &str, object: Option<(u64, Version)>, range: Range<u64>| {
            let verdict = answer(text).judge(&Expected { object, range });
            matches!(verdict, Verdict::Body { length: 20, size: 20, .. })
        };
        let whole = "HTTP/1.1 200 OK\nContent-Length: 20\nETag: \"a\"";
        assert!(told(whole, None, 0..20) && told(whole, None, 0..100));
        assert!(!told(whole, None, 0..19), "it is longer");
        assert!(!told(whole, None, 1..20), "it begins before");
        let known = |tag: &str| Some((20, Version::Strong(tag.into())));
        assert!(told(whole, known("\"a\""), 0..20), "all of it was asked for");
        assert!(!told(whole, known("\"b\""), 0..20) && !told(whole, known("\"a\""), 0..19));
        assert!(!told("HTTP/1.1 200 OK\nContent-Length: 20\nContent-Encoding: gzip", None, 0..100));
        assert!(!told("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", None, 0..100));
    }

    #[test]
    fn an_error_says_what_the_server_says() {
        let text = "HTTP/1.1 403 Forbidden\nX-Error-Code: GatedRepo\nX-Request-Id: r-1";
        let Verdict::Refused(refused) = answer(text).judge(&Expected { object: None, range: 0..1 }) else { panic!() };
        let e = refused.error;
        assert!(e.to_string().contains("(403 Forbidden, GatedRepo, request r-1)"), "{e}");
        assert_eq!(refused.code, "GatedRepo");
    }

    #[test]
    fn what_the_body_of_an_error_says() {
        let body =
            "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code><Message>Not &lt;you&gt; &amp;\n it</Message>\
                    <StringToSign>secret</StringToSign><Region>there</Region></Error>";
        let length = format!("HTTP/1.1 403 Forbidden\nContent-Length: {}", body.len());
        for head in [length.as_str(), "HTTP/1.1 403 Forbidden\nTransfer-Encoding: chunked"] {
            let mut found = answer(head);
            let body = if head == length { body.to_owned() } else { format!("d9\r\n{body}\r\n0\r\n\r\n") };
            for cut in 0..body.len() {
                assert!(found.learn(&body.as_bytes()[..cut], false), "{cut} bytes of {head}");
            }
            assert!(!found.learn(body.as_bytes(), false), "{head}");
            let Verdict::Refused(refusal) = found.judge(&Expected { object: None, range: 0..1 }) else { panic!() };
            let text = refusal.error.to_string();
            assert!(text.contains("(403 Forbidden, AccessDenied: Not <you> & it)"), "{text}");
            assert_eq!((refusal.access, refusal.region.as_deref()), (true, Some("there")));
            assert_eq!(refusal.hint(&[("Forbidden", "no code"), ("AccessDenied", "the code")]), Some("the code"));
        }
        // No more than a little is waited for, and nothing where nothing is to be learned.
        let mut found = answer("HTTP/1.1 500 Oh");
        assert!(found.learn(&[b'x'; 100], false) && !found.learn(&[b'x'; LONGEST_ERROR], false));
        assert!(!found.learn(b"", true) && !answer("HTTP/1.1 206 Part").learn(b"", false));
        assert!(!answer("HTTP/1.1 404 No\nContent-Length: 0").learn(b"", false));
        let expired = Answer::of(400, &[], b"<Error><Code>ExpiredToken</Code></Error>");
        let verdict = expired.judge(&Expected { object: None, range: 0..1 });
        assert!(matches!(verdict, Verdict::Refused(Refused { access: true, .. })), "{verdict:?}");
    }

    #[test]
    fn which_connections_are_kept() {
        for (text, keeps) in [
            ("HTTP/1.1 200 OK\nConnection: close", false),
            ("HTTP/1.1 200 OK\nConnection: x, Close", false),
            ("HTTP/1.1 200 OK", true),
            ("HTTP/1.0 200 OK", false),
            ("HTTP/1.0 200 OK\nConnection: keep-alive", true),
        ] {
            assert_eq!(answer(text).keeps, keeps, "{text}");
        }
        for text in ["SSH-2.0-x\r\n\r\n", "HTTP/2 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"] {
            assert_eq!(Answer::parse(text.as_bytes()).unwrap_err().kind(), ErrorKind::Io, "{text}");
        }
        assert!(Answer::parse(&[b"HTTP/1.1 200 OK\r\nX: ", &[b'a'; LONGEST_HEAD][..]].concat()).is_err());
    }
}
