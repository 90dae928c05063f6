//! Heads of answers, and the decision between them.

use crate::conditions::Conclusion;
use crate::date;
use crate::range::{wanted, Wanted};
use crate::request::{Method, Refusal, Request};
use std::fmt::Write;
use std::ops::Range;

/// The statuses of this server, with their reasons.
pub(crate) const STATUSES: [(u16, &str); 16] = [
    (200, "OK"),
    (206, "Partial Content"),
    (301, "Moved Permanently"),
    (304, "Not Modified"),
    (400, "Bad Request"),
    (401, "Unauthorized"),
    (403, "Forbidden"),
    (404, "Not Found"),
    (405, "Method Not Allowed"),
    (412, "Precondition Failed"),
    (416, "Range Not Satisfiable"),
    (421, "Misdirected Request"),
    (431, "Request Header Fields Too Large"),
    (500, "Internal Server Error"),
    (503, "Service Unavailable"),
    (505, "HTTP Version Not Supported"),
];

/// The facts of an object that its answers depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ObjectFacts<'a> {
    pub(crate) size: u64,
    pub(crate) etag: &'a str,
    pub(crate) modified: Option<i64>,
}

/// The head of an answer, and the bytes of the object that follow it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Range<u64>,
}

/// The answer to a request for an object. `there` is the end of the bytes of a range that are there.
pub(crate) fn of_object(request: &Request, object: ObjectFacts, there: impl Fn(&Range<u64>) -> u64) -> Answer {
    let ObjectFacts { size, etag, modified } = object;
    let mut fields = format!("ETag: {etag}\r\n");
    if let Some(date) = modified.and_then(date::text) {
        let _ = write!(fields, "Last-Modified: {date}\r\n");
    }
    let answer = |status, fields: String, body: Range<u64>| {
        let length = (status != 304).then_some(body.end - body.start);
        let head = head(status, request.keeps, length, &fields);
        let sent = if request.method == Method::Head { 0..0 } else { body };
        Answer { status, head, body: sent }
    };
    match request.conditions.judge(etag, modified) {
        Conclusion::IsKnown => return answer(304, fields, 0..0),
        Conclusion::Fails => return answer(412, fields, 0..0),
        Conclusion::Goes => {}
    }
    fields.push_str("Accept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\n");
    let range = request.range.as_deref().filter(|_| request.conditions.allows_part(etag));
    match wanted(range, size) {
        Wanted::Part(part) => {
            // A part of a range is an answer too: RFC 9110, section 15.3.7
            let part = part.start..there(&part);
            if part.is_empty() {
                return not_there(request);
            }
            let _ = write!(fields, "Content-Range: bytes {}-{}/{size}\r\n", part.start, part.end - 1);
            answer(206, fields, part)
        }
        Wanted::Whole if there(&(0..size)) < size => not_there(request),
        Wanted::Whole => answer(200, fields, 0..size),
        Wanted::Beyond => answer(416, format!("ETag: {etag}\r\nContent-Range: bytes */{size}\r\n"), 0..0),
    }
}

fn not_there(request: &Request) -> Answer {
    let (head, status) = (head(404, request.keeps, Some(0), ""), 404);
    Answer { status, head, body: 0..0 }
}

/// The head and the body of an answer that is made here.
pub(crate) fn made(status: u16, keeps: bool, fields: &str, body: &str) -> String {
    let guarded = format!(
        "{fields}Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
         Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\n"
    );
    head(status, keeps, Some(body.len() as u64), &guarded) + body
}

/// The head and the body of a refusal.
pub(crate) fn refused(refusal: Refusal, keeps: bool) -> String {
    let Refusal(status, text) = refusal;
    let more = match status {
        401 => "WWW-Authenticate: Bearer\r\n",
        405 => "Allow: GET, HEAD\r\n",
        _ => "",
    };
    made(status, keeps, &format!("{more}Content-Type: text/plain; charset=utf-8\r\n"), &format!("{text}\n"))
}

fn head(status: u16, keeps: bool, length: Option<u64>, fields: &str) -> String {
    let reason = STATUSES.iter().find(|(known, _)| *known == status).map_or("", |(_, reason)| reason);
    let mut head = format!("HTTP/1.1 {status} {reason}\r\nServer: penstock\r\n");
    if let Some(date) = date::text(date::now()) {
        let _ = write!(head, "Date: {date}\r\n");
    }
    if let Some(length) = length {
        let _ = write!(head, "Content-Length: {length}\r\n");
    }
    // Clients of HTTP/1.0 must be told too that a connection stays
    let _ = write!(head, "Connection: {}\r\n{fields}\r\n", if keeps { "keep-alive" } else { "close" });
    head
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::parse;

    const OBJECT: ObjectFacts = ObjectFacts { size: 100, etag: "\"v\"", modified: Some(784111777) };

    fn asked(method: &str, fields: &str) -> Request {
        let text = format!("{method} /a HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        let Some((Ok(request), _)) = parse(text.as_bytes(), 0) else { panic!("{text}") };
        request
    }

    fn found(method: &str, fields: &str) -> Answer {
        of_object(&asked(method, fields), OBJECT, |range| range.end)
    }

    #[test]
    fn whole_objects_and_parts() {
        let whole = found("GET", "");
        assert_eq!((whole.status, whole.body), (200, 0..100));
        for field in [
            "Content-Length: 100\r\n",
            "ETag: \"v\"\r\n",
            "Accept-Ranges: bytes\r\n",
            "\r\nDate: ",
            "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n",
            "Connection: keep-alive\r\n",
        ] {
            assert!(whole.head.contains(field), "{field}: {}", whole.head);
        }
        let part = found("GET", "Range: bytes=90-200\r\n");
        assert_eq!((part.status, part.body), (206, 90..100));
        assert!(
            part.head.contains("Content-Range: bytes 90-99/100\r\n") && part.head.contains("Content-Length: 10\r\n")
        );
        let head = found("HEAD", "Range: bytes=90-\r\n");
        assert_eq!((head.status, head.body), (200, 0..0));
        assert!(head.head.contains("Content-Length: 100\r\n"));
        let beyond = found("GET", "Range: bytes=100-\r\n");
        assert_eq!((beyond.status, beyond.body), (416, 0..0));
        assert!(
            beyond.head.contains("Content-Range: bytes */100\r\n") && beyond.head.contains("Content-Length: 0\r\n")
        );
    }

    #[test]
    fn conditions_come_before_ranges() {
        assert_eq!(found("GET", "If-Match: \"x\"\r\nRange: bytes=200-\r\n").status, 412);
        assert_eq!(found("GET", "If-None-Match: \"v\"\r\nRange: bytes=0-1\r\n").status, 304);
        assert!(!found("GET", "If-None-Match: \"v\"\r\n").head.contains("Content-Length"));
        assert_eq!(found("GET", "If-Range: \"v\"\r\nRange: bytes=0-1\r\n").status, 206);
        assert_eq!(found("GET", "If-Range: \"x\"\r\nRange: bytes=200-\r\n").status, 200);
    }

    #[test]
    fn bytes_that_are_not_there_are_not_sent() {
        let there = |range: &Range<u64>| if range.start < 50 { range.end.min(50) } else { range.start };
        let found = |fields: &str| of_object(&asked("GET", fields), OBJECT, there);
        assert_eq!(found("").status, 404);
        let part = found("Range: bytes=40-\r\n");
        assert_eq!((part.status, part.body), (206, 40..50));
        assert!(part.head.contains("Content-Range: bytes 40-49/100\r\n"));
        assert_eq!(found("Range: bytes=50-\r\n").status, 404);
    }

    #[test]
    fn refusals_say_why() {
        assert!(refused(Refusal(401, "x"), true).contains("WWW-Authenticate: Bearer\r\n"));
        assert!(refused(Refusal(405, "x"), false).contains("Allow: GET, HEAD\r\n"));
        assert!(refused(Refusal(404, "x"), false).ends_with("\r\n\r\nx\n"));
    }
}
