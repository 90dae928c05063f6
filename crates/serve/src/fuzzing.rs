//! The pure parts of the server, for `fuzz/`.

use crate::answer::{of_object, ObjectFacts};
use crate::request::{parse, Method, Parsed, Target, LONGEST_HEAD};

/// Reads `input` as requests to an object of `size` bytes, of which the first `there` are there, and checks each answer.
///
/// # Panics
/// If an answer is wrong.
pub fn check(mut input: &[u8], size: u64, there: u64) {
    let there = there.min(size);
    loop {
        let (found, length) = match parse(input, 0) {
            Parsed::Partial => return assert!(input.len() < LONGEST_HEAD),
            Parsed::Head(found, length) => (found, length),
        };
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
