//! Pages of listings, as object stores write them: the names on a page, and how the next one is asked for.

use super::http::escaping::percent_decoded;
use super::http::server_error::{shortened, ServerError};
use super::http::xml::{self, Element, NoXml};
use crate::error::{Error, ErrorKind, Result};

/// A page of a listing.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    /// The keys on it, and the bytes of their objects where the page says them.
    pub(super) keys: Vec<(String, Option<u64>)>,
    /// The beginnings of keys that have a further slash, up to that slash.
    pub(super) folders: Vec<String>,
    pub(super) next: NextPage,
}

/// How the next page is asked for.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
pub(super) enum NextPage {
    /// There is none.
    #[default]
    None,
    /// With this token.
    Token(String),
    /// Behind this name: the way of asking that came before tokens, which every server knows.
    Behind(String),
}

impl Page {
    /// The page in this answer.
    ///
    /// # Errors
    /// `Io` for something else, with its text. An error of an object store has the kind that its code says.
    pub(super) fn of(body: &[u8]) -> Result<Page> {
        let text = String::from_utf8_lossy(body);
        let mut read = PageReading::default();
        match xml::read(&text, |element| read.take(&element)) {
            Ok(root) if root.starts_with("ListBucket") => read.s3(),
            Ok("EnumerationResults") => Ok(read.azure()),
            Ok("Error") => Err(told(body)),
            Err(NoXml::BreaksOff) if text.contains("<ListBucket") || text.contains("<EnumerationResults") => {
                Err(io("the listing breaks off: the server closed the connection too early".into()))
            }
            _ => Err(no_listing(&text)),
        }
    }
}

/// The page as far as it is read.
#[derive(Debug, Default)]
struct PageReading {
    keys: Vec<(String, Option<u64>)>,
    folders: Vec<String>,
    entry: (Option<String>, Option<u64>),
    truncated: Option<bool>,
    token: Option<String>,
    marker: Option<String>,
    is_encoded: bool,
}

impl PageReading {
    fn take(&mut self, element: &Element<'_>) {
        let text = || Some(element.text.clone()).filter(|text| !text.is_empty());
        match &element.path[1..] {
            ["Contents", "Key"] => self.entry.0 = Some(element.text.clone()),
            ["Contents", "Size"] | ["Blobs", "Blob", "Properties", "Content-Length"] => {
                self.entry.1 = element.text.trim().parse().ok();
            }
            ["Contents"] | ["Blobs", "Blob"] => {
                if let (Some(key), size) = std::mem::take(&mut self.entry) {
                    self.keys.push((key, size));
                }
            }
            ["CommonPrefixes", "Prefix"] | ["Blobs", "BlobPrefix", "Name"] => self.folders.push(element.text.clone()),
            ["Blobs", "Blob", "Name"] => {
                // Of a name that XML cannot hold.
                let is_encoded = element.attributes.to_ascii_lowercase().contains("encoded=\"true\"");
                let name = if is_encoded { decoded(&element.text, false) } else { element.text.clone() };
                self.entry.0 = Some(name);
            }
            ["IsTruncated"] => {
                self.truncated = match element.text.trim().to_ascii_lowercase().as_str() {
                    "true" | "1" => Some(true),
                    "false" | "0" => Some(false),
                    _ => None,
                }
            }
            ["NextContinuationToken"] => self.token = text(),
            ["NextMarker"] => self.marker = text(),
            ["EncodingType"] => self.is_encoded = element.text.trim().eq_ignore_ascii_case("url"),
            _ => {}
        }
    }

    fn azure(self) -> Page {
        Page { keys: self.keys, folders: self.folders, next: self.marker.map_or(NextPage::None, NextPage::Token) }
    }

    fn s3(mut self) -> Result<Page> {
        if self.is_encoded {
            self.keys.iter_mut().for_each(|(key, _)| *key = decoded(key, true));
            self.folders.iter_mut().for_each(|folder| *folder = decoded(folder, true));
            self.marker = self.marker.as_deref().map(|marker| decoded(marker, true));
        }
        let PageReading { keys, folders, truncated, token, marker, .. } = self;
        let next = match (truncated, token) {
            (Some(false), _) => NextPage::None,
            (_, Some(token)) => NextPage::Token(token),
            (None, None) => NextPage::None,
            (Some(true), None) => {
                let names = || keys.iter().map(|(key, _)| key);
                let in_order = names().is_sorted() && folders.is_sorted();
                let last = || names().chain(&folders).max().filter(|_| in_order).cloned();
                NextPage::Behind(marker.or_else(last).ok_or_else(|| {
                    let text =
                        "the server says that its listing goes on (IsTruncated), and not where (NextContinuationToken)";
                    io(format!("{text}: {WITHOUT}"))
                })?)
            }
        };
        Ok(Page { keys, folders, next })
    }
}

/// Advice to a caller without a listing.
pub(super) const WITHOUT: &str =
    "give the address of the index (*.safetensors.index.json), or a list of all files, which need no listing";

/// The error of a server that is asked for a listing and answers with an error.
fn told(body: &[u8]) -> Error {
    let said = ServerError::of(body).unwrap_or_default();
    let kind = match &*said.code {
        "NoSuchBucket" | "NoSuchKey" | "ContainerNotFound" => ErrorKind::NotFound,
        "AccessDenied" | "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "AllAccessDisabled" => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("the server answers a listing with an error: {}", said.shown()))
}

fn no_listing(text: &str) -> Error {
    let text = text.trim();
    let said = ServerError::of(text.as_bytes()).map(|said| said.shown()).unwrap_or_default();
    let lower = text.get(..1024.min(text.len())).unwrap_or(text).to_ascii_lowercase();
    let is_page = ["<html", "<!doctype html", "<head", "<body"].iter().any(|tag| lower.contains(tag));
    let what = match text {
        "" => return io(format!("the server answers a listing with nothing: is the endpoint right? Or {WITHOUT}")),
        _ if is_page => "a web page",
        _ => "something else",
    };
    let said = if said.is_empty() { shortened(text) } else { said };
    io(format!("the server answers a listing with {what} ({said}): is the endpoint right?"))
}

fn io(text: String) -> Error {
    Error::new(ErrorKind::Io, text)
}

/// The text in which `%XX` stands for some letters; where `plus_is_space`, also `+` for a space.
fn decoded(text: &str, plus_is_space: bool) -> String {
    let plain = if plus_is_space { text.replace('+', " ") } else { text.to_owned() };
    String::from_utf8_lossy(&percent_decoded(&plain)).into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn s3(inner: &str) -> Result<Page> {
        Page::of(format!("<?xml version='1.0'?><ListBucketResult xmlns='x'>{inner}</ListBucketResult>").as_bytes())
    }

    fn next(inner: &str) -> String {
        let keys = "<Contents><Key>m/b</Key><Size>7</Size><Owner><Key>no</Key></Owner></Contents>\
                    <CommonPrefixes><Prefix>m/c/</Prefix></CommonPrefixes>";
        match s3(&format!("{keys}{inner}")) {
            Ok(page) => {
                assert_eq!(page.keys, [("m/b".to_owned(), Some(7))]);
                format!("{:?}", page.next)
            }
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn how_the_next_page_is_asked_for() {
        let (more, token) = ("<IsTruncated>true</IsTruncated>", "<NextContinuationToken>t</NextContinuationToken>");
        let (end, marker) = ("<IsTruncated> False</IsTruncated>", "<NextMarker>m/b&amp;</NextMarker>");
        for (inner, expected) in [
            (String::new(), "None"),
            (end.into(), "None"),
            (format!("{end}{token}"), "None"),
            (token.into(), "Token(\"t\")"),
            (format!("{more}{token}"), "Token(\"t\")"),
            (format!("{more}{token}{marker}"), "Token(\"t\")"),
            (more.into(), "Behind(\"m/c/\")"),
            (format!("{more}<NextContinuationToken/>"), "Behind(\"m/c/\")"),
            (format!("{more}{marker}"), "Behind(\"m/b&\")"),
            (format!("{more}<NextMarker>m/b%26+c</NextMarker><EncodingType>url</EncodingType>"), "Behind(\"m/b& c\")"),
        ] {
            assert_eq!(next(&inner), expected, "{inner}");
        }
        // Nothing says what comes next: names that are not in order, or none.
        let two = "<Contents><Key>b</Key></Contents><Contents><Key>a</Key></Contents>";
        for inner in [two, ""] {
            let e = s3(&format!("{inner}{more}")).unwrap_err();
            assert!(e.to_string().contains("not where"), "{e}");
        }
    }

    #[test]
    fn keys_are_strings() {
        for (written, key) in [("a//b", "a//b"), ("./..", "./.."), ("a&#x9;&#x1;b", "a\t\u{1}b"), ("", "")] {
            let key = key.to_owned();
            let page = s3(&format!("<Contents><Key>{written}</Key></Contents>")).unwrap();
            assert_eq!(page.keys, [(key.clone(), None)]);
            let blob = format!(
                "<EnumerationResults><Blobs><BlobPrefix><Name>..</Name></BlobPrefix><Blob><Name>{written}</Name><Properties>\
                 <Content-Length>5</Content-Length></Properties></Blob></Blobs><NextMarker/></EnumerationResults>"
            );
            let (keys, folders) = (vec![(key, Some(5))], vec!["..".to_owned()]);
            assert_eq!(Page::of(blob.as_bytes()).unwrap(), Page { keys, folders, next: NextPage::None });
        }
        let encoded = "<EnumerationResults><Blobs><Blob><Name Encoded=\"true\">a%EF%BF%BE+</Name></Blob></Blobs>\
                       <NextMarker>n</NextMarker></EnumerationResults>";
        let page = Page::of(encoded.as_bytes()).unwrap();
        assert_eq!((page.keys[0].0.as_str(), page.next), ("a\u{fffe}+", NextPage::Token("n".into())));
    }

    #[test]
    fn what_is_no_listing_is_told() {
        for (body, kind, says) in [
            ("<html><head><title>Log &amp; in</title></head>", ErrorKind::Io, "a web page (Log & in)"),
            ("<html><head><title>Index of /</title></head>", ErrorKind::Io, "a web page (Index of /)"),
            ("<!DOCTYPE html>\n<p>Sorry <b>no</b></p>", ErrorKind::Io, "a web page (Sorry no)"),
            ("<Error><Code>InternalError</Code><Message>Oh</Message></Error>", ErrorKind::Io, "InternalError: Oh"),
            ("<Error><Code>AccessDenied</Code></Error>", ErrorKind::Permission, "error: AccessDenied"),
            ("<Error><Code>NoSuchBucket</Code></Error>", ErrorKind::NotFound, "NoSuchBucket"),
            ("no such thing", ErrorKind::Io, "something else (no such thing)"),
            ("{\"error\": \"no\"}", ErrorKind::Io, "something else ({\"error\": \"no\"})"),
            ("<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>", ErrorKind::Io, "something else"),
            (" \n", ErrorKind::Io, "with nothing"),
            ("<ListBucketResult><Contents><Key>a</Key></Contents>", ErrorKind::Io, "breaks off"),
        ] {
            let e = Page::of(body.as_bytes()).unwrap_err();
            assert_eq!(e.kind(), kind, "{body}");
            assert!(e.to_string().contains(says), "{body}: {e}");
        }
    }
}
