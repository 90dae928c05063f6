//! What is asked for, and the part of a file that answers it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

/// What of a request matters here.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) head_only: bool,
    range: Option<String>,
    if_match: Option<String>,
    pub(crate) closes: bool,
}

impl Asked {
    /// The request that these bytes begin with, and its length; `None` if it is not complete.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Asked, usize)>, String> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut request = httparse::Request::new(&mut headers);
        let length = match request.parse(bytes).map_err(|e| e.to_string())? {
            httparse::Status::Partial => return Ok(None),
            httparse::Status::Complete(length) => length,
        };
        let target = request.path.unwrap_or_default();
        // Amazon's client gives the whole address (RFC 9112, 3.2.2)
        let target =
            target.split_once("://").map_or(target, |(_, rest)| rest.split_once('/').map_or("", |(_, path)| path));
        let mut asked = Asked {
            path: target.split('?').next().unwrap_or_default().to_owned(),
            head_only: request.method == Some("HEAD"),
            ..Asked::default()
        };
        for header in request.headers.iter() {
            let value = || String::from_utf8_lossy(header.value).trim().to_owned();
            match header.name.to_ascii_lowercase().as_str() {
                "range" => asked.range = Some(value()),
                "if-match" => asked.if_match = Some(value()),
                "connection" => asked.closes = value().eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
        Ok(Some((asked, length)))
    }
}

/// The head of an answer and the part of the file that follows it.
pub(crate) struct Answer {
    pub(crate) head: String,
    pub(crate) body: Option<(File, Range<u64>)>,
}

impl Answer {
    /// Of a status without a body.
    pub(crate) fn status(status: &str) -> Answer {
        Answer { head: format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"), body: None }
    }

    pub(crate) fn to(asked: &Asked, folder: &Path) -> Answer {
        let path = Path::new(asked.path.trim_start_matches('/'));
        // Nothing outside of the folder
        if !path.components().all(|one| matches!(one, Component::Normal(_))) {
            return Answer::status("404 Not Found");
        }
        let Ok(file) = File::open(folder.join(path)) else { return Answer::status("404 Not Found") };
        let Ok(about) = file.metadata() else { return Answer::status("500 Internal Server Error") };
        if !about.is_file() {
            return Answer::status("404 Not Found");
        }
        let (size, modified) = (about.len(), about.mtime() as u128 * 1_000_000_000 + about.mtime_nsec() as u128);
        let tag = format!("\"{:x}-{modified:x}-{size:x}\"", about.ino());
        if asked.if_match.as_ref().is_some_and(|given| *given != tag && given != "*") {
            return Answer::status("412 Precondition Failed");
        }
        let (status, range) = match asked.range.as_deref().map(|text| range(text, size)) {
            None => ("200 OK", 0..size),
            Some(Some(range)) => ("206 Partial Content", range),
            Some(None) => {
                let head = "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n";
                return Answer { head: format!("{head}Content-Range: bytes */{size}\r\n\r\n"), body: None };
            }
        };
        let mut head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nAccept-Ranges: bytes\r\nETag: {tag}\r\nLast-Modified: {}\r\n",
            range.end - range.start,
            date(about.mtime()),
        );
        if asked.range.is_some() {
            head += &format!("Content-Range: bytes {}-{}/{size}\r\n", range.start, range.end - 1);
        }
        Answer { head: head + "\r\n", body: (!asked.head_only).then_some((file, range)) }
    }
}

/// `bytes=1-2`, `bytes=1-` or `bytes=-2` of so many bytes. `None`: it cannot be satisfied, or is several.
fn range(text: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) => first..last.saturating_add(1).min(size),
        (Ok(first), Err(_)) if last.is_empty() => first..size,
        (Err(_), Ok(count)) if first.is_empty() => size.saturating_sub(count)..size,
        _ => return None,
    };
    (range.start < range.end).then_some(range)
}

/// Seconds since 1970 as HTTP writes dates (RFC 9110, 5.6.7).
fn date(seconds: i64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [(&str, i64); 12] = [
        ("Jan", 31),
        ("Feb", 28),
        ("Mar", 31),
        ("Apr", 30),
        ("May", 31),
        ("Jun", 30),
        ("Jul", 31),
        ("Aug", 31),
        ("Sep", 30),
        ("Oct", 31),
        ("Nov", 30),
        ("Dec", 31),
    ];
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let leap = |year: i64| i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
    let (mut year, mut left) = (1970, days.max(0));
    while left >= 365 + leap(year) {
        left -= 365 + leap(year);
        year += 1;
    }
    let mut month = 0;
    while left >= MONTHS[month].1 + if month == 1 { leap(year) } else { 0 } {
        left -= MONTHS[month].1 + if month == 1 { leap(year) } else { 0 };
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (weekday, month) = (DAYS[days.rem_euclid(7) as usize], MONTHS[month].0);
    format!("{weekday}, {:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT", left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_the_file_or_none() {
        assert_eq!(range("bytes=2-4", 10), Some(2..5));
        assert_eq!(range("bytes=2-", 10), Some(2..10));
        assert_eq!(range("bytes=-3", 10), Some(7..10));
        assert_eq!(range("bytes=2-99", 10), Some(2..10));
        for wrong in ["bytes=10-11", "bytes=4-2", "bytes=-", "bytes=1-2,4-5", "lines=1-2", "bytes=-0"] {
            assert_eq!(range(wrong, 10), None, "{wrong}");
        }
    }

    #[test]
    fn a_request_names_a_path_or_a_whole_address() {
        for target in ["/a/b?x=1", "http://127.0.0.1:80/a/b"] {
            let text = format!("GET {target} HTTP/1.1\r\nRange: bytes=0-7\r\nConnection: close\r\n\r\nGET");
            let (asked, length) = Asked::parse(text.as_bytes()).unwrap().unwrap();
            assert_eq!((asked.path.trim_start_matches('/'), length), ("a/b", text.len() - 3));
            assert_eq!((asked.range.as_deref(), asked.closes, asked.head_only), (Some("bytes=0-7"), true, false));
        }
        assert!(Asked::parse(b"GET / HTTP/1.1\r\n").unwrap().is_none());
    }

    #[test]
    fn dates_are_as_http_writes_them() {
        assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(date(1_709_210_096), "Thu, 29 Feb 2024 12:34:56 GMT");
    }

    #[test]
    fn no_path_leads_out_of_the_folder() {
        let asked = |path: &str| Asked { path: path.to_owned(), ..Asked::default() };
        for path in ["/../secret", "/a/../../b", "/", "//"] {
            assert!(Answer::to(&asked(path), Path::new("/tmp")).head.starts_with("HTTP/1.1 404"), "{path}");
        }
    }
}
