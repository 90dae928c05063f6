//! A server that wants a key, and its provider.

use super::super::settings::StorageSettings;
use super::super::{Provider, Web};
use super::*;
use crate::store::object::{Object, Store};
use crate::store::{schemes, Version};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

const BODY: &[u8] = b"eleven bytes";

/// Answers every request of a connection: listings, ranges of one object, and 403 without the key.
fn answer(stream: TcpStream) {
    let mut from = BufReader::new(stream.try_clone().unwrap());
    let mut to = stream;
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if from.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line.trim().is_empty() {
                break;
            }
            lines.push(line.trim().to_owned());
        }
        let target = lines[0].split(' ').nth(1).unwrap();
        let (status, fields, body) = if !lines.iter().any(|line| line == "X-Toy-Key: sesame") {
            ("403 Forbidden", String::new(), b"<Error><Code>AccessDenied</Code></Error>".to_vec())
        } else if target == "/b?under=f/" {
            let keys = ["f/one.safetensors", "f/two.json"];
            let keys = keys.map(|key| format!("<Contents><Key>{key}</Key><Size>12</Size></Contents>"));
            let body = format!("<ListBucketResult>{}</ListBucketResult>", keys.concat());
            ("200 OK", String::new(), body.into_bytes())
        } else {
            let range = lines.iter().find_map(|line| line.strip_prefix("Range: bytes=")).unwrap();
            let (first, last) = range.split_once('-').unwrap();
            let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
            let part = &BODY[first..(last + 1).min(BODY.len())];
            let range = format!("{first}-{}/{}", first + part.len() - 1, BODY.len());
            ("206 Partial Content", format!("ETag: \"v\"\r\nContent-Range: bytes {range}\r\n"), part.to_vec())
        };
        let head = format!("HTTP/1.1 {status}\r\n{fields}Content-Length: {}\r\n\r\n", body.len());
        if to.write_all(head.as_bytes()).and_then(|()| to.write_all(&body)).is_err() {
            return;
        }
    }
}

fn store(key: &[(&str, &str)]) -> Web {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().flatten().for_each(|s| drop(std::thread::spawn(|| answer(s)))));
    let environment = Environment::of(&[&[("TOY_ENDPOINT", endpoint.as_str())], key].concat());
    Web::of(Provider::of("toy").unwrap(), StorageSettings::default(), environment)
}

#[test]
fn a_provider_of_one_folder_lists_and_reads_with_its_key() {
    assert!(schemes().iter().any(|scheme| scheme == "toy"));
    let web = store(&[("TOY_KEY", "sesame")]);
    let at = |text: &str| Location::Url(text.into());
    let listed = web.list(&at("toy://b/f")).unwrap();
    assert_eq!(listed, [at("toy://b/f/one.safetensors"), at("toy://b/f/two.json")]);
    let head = web.head(&listed[0], 5).unwrap();
    assert_eq!((&head.bytes[..], head.size, &head.version), (&BODY[..5], 12, &Version::Strong("\"v\"".into())));
    let object = Object { location: listed[0].clone(), size: head.size, version: head.version };
    assert_eq!(web.read(&object, 3..12).unwrap(), &BODY[3..]);
}

#[test]
fn without_its_key_or_with_another_one_nothing_is_read() {
    for (keys, says) in [(&[][..], "TOY_KEY"), (&[("TOY_KEY", "other")][..], "AccessDenied")] {
        let e = store(keys).head(&Location::Url("toy://b/k".into()), 5).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Permission, "{e}");
        assert!(e.to_string().contains(says), "{e}");
    }
}
