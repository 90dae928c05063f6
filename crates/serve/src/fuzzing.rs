//! The pure parts of the server, for `fuzz/`.

use crate::answer::{of_object, ObjectFacts};
use crate::request::{parse, Method, Target, LONGEST_HEAD};

/// Reads `input` as requests to an object of `size` bytes, of which the first `there` are there, and checks each answer.
///
/// # Panics
/// If an answer is wrong.
pub fn check(mut input: &[u8], size: u64, there: u64) {
    let there = there.min(size);
    loop {
        let Some((found, length)) = parse(input, 0) else { return assert!(input.len() < LONGEST_HEAD) };
        assert!(0 < length && length <= input.len());
        let Ok(request) = found else { return };
        input = &input[length..];
        if let Target::Named(name) = &request.target {
            for part in name.parts() {
                assert!(!part.is_empty() && part[0] != b'.' && !part.contains(&0) && !part.contains(&b'/'));
            }
            let path = name.folder_path();
            assert!(path.starts_with('/') && !path.starts_with("//") && !path.contains("/."));
        }
        let object = ObjectFacts { size, etag: "\"v\"", modified: Some(784111777) };
        let answer = of_object(&request, object, |range| range.end.min(there.max(range.start)));
        let body = answer.body.clone();
        assert!(body.start <= body.end && body.end <= there);
        let mut fields = [httparse::EMPTY_HEADER; 16];
        let mut head = httparse::Response::new(&mut fields);
        let status = head.parse(answer.head.as_bytes()).expect("a well-formed head");
        assert_eq!(status, httparse::Status::Complete(answer.head.len()));
        assert_eq!(head.code, Some(answer.status));
        let field = |name: &str| {
            let found = head.headers.iter().find(|field| field.name == name);
            found.map(|field| std::str::from_utf8(field.value).expect("a text"))
        };
        let length = field("Content-Length").map(|text| text.parse::<u64>().expect("a number"));
        if request.method == Method::Head {
            assert!(body.is_empty() && matches!(answer.status, 200 | 304 | 404 | 412));
        } else {
            assert_eq!(length, (answer.status != 304).then_some(body.end - body.start));
        }
        match answer.status {
            200 => assert!(request.method == Method::Head || body == (0..size)),
            206 => {
                assert!(!body.is_empty() && request.range.is_some());
                let expected = format!("bytes {}-{}/{size}", body.start, body.end - 1);
                assert_eq!(field("Content-Range"), Some(expected.as_str()));
            }
            304 | 404 | 412 | 416 => assert!(body.is_empty()),
            other => panic!("{other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::check;
    use proptest::prelude::*;

    const PIECES: [&str; 40] = [
        "GET ",
        "HEAD ",
        "POST ",
        "/",
        "/a",
        "..",
        "%2e",
        "%2f",
        "%00",
        "%",
        "a",
        "?",
        "#",
        "http://",
        " HTTP/1.1\r\n",
        " HTTP/1.0\r\n",
        "Host: a\r\n",
        "\r\n",
        "\r\n\r\n",
        "\n",
        "Range: bytes=",
        "0-",
        "-5",
        "7-9",
        ",",
        "18446744073709551615",
        "99999999999999999999",
        "If-Match: ",
        "If-None-Match: ",
        "If-Range: ",
        "\"v\"",
        "W/\"v\"",
        "*",
        "If-Modified-Since: ",
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Content-Length: 0\r\n",
        "Connection: close\r\n",
        "\0",
        ":",
        " ",
    ];

    proptest! {
        #[test]
        fn answers_fit_their_requests(
            pieces in prop::collection::vec(prop::sample::select(&PIECES), 0..30), size in any::<u64>(), there in any::<u64>(),
        ) {
            check(pieces.concat().as_bytes(), size, there);
        }

        #[test]
        fn answers_fit_well_formed_requests(
            fields in prop::collection::vec((prop::sample::select(&PIECES[20..]), prop::sample::select(&PIECES[20..])), 0..5),
            size in prop_oneof![0..12u64, any::<u64>()], there in any::<u64>(), head in any::<bool>(),
        ) {
            let fields: String = fields.iter().map(|(name, value)| format!("{name}{value}\r\n")).collect();
            let method = if head { "HEAD" } else { "GET" };
            check(format!("{method} /a HTTP/1.1\r\nHost: a\r\n{fields}\r\n").as_bytes(), size, there);
        }
    }
}
