//! A provider of one folder, for tests: a key from the environment, requests that carry it, listings. It shows what a new
//! provider takes: this folder, and a line in `provider.rs`.
#![allow(clippy::unwrap_used)]

use super::auth::credentials::{Credentials, Finder, FoundKey};
use super::environment::Environment;
use super::http::address::Address;
use super::http::answer::Refused;
use super::http::common::Common;
use super::http::request::{Get, Listed, Requests};
use super::http::settings::WebSettings;
use super::listing::{list, listed, parts};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::wake::Wake;
use std::sync::atomic::Ordering;
use std::sync::Arc;

pub(super) const VARIABLES: [&str; 2] = ["TOY_ENDPOINT", "TOY_KEY"];

/// The key of the environment.
#[derive(Debug)]
struct ToyKeys(Environment);

impl Finder for ToyKeys {
    type Key = String;
    type Provider = ();

    fn find(&self, _common: &Arc<Common>, _provider: &mut Option<()>) -> Result<FoundKey<String>> {
        let none = || Error::new(ErrorKind::Permission, "there is no key: set TOY_KEY");
        let key = self.0.get("TOY_KEY").ok_or_else(none)?.to_owned();
        Ok(FoundKey { key, origin: "TOY_KEY".into(), fades: false, renewable: false })
    }
}

#[derive(Debug)]
struct ToyStore(Arc<Credentials<ToyKeys>>);

impl ToyStore {
    fn get(&self, key: &str, target: &str, generation: u64) -> Result<Get> {
        let endpoint = self.0.finder().0.get("TOY_ENDPOINT").unwrap_or("http://localhost");
        let address = Address::parse(&format!("{endpoint}/{target}"))?;
        Ok(Get { address, fields: format!("X-Toy-Key: {key}\r\n"), generation, is_moved: false })
    }
}

impl Requests for ToyStore {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        let session = self.0.session(wake)?;
        let generation = self.0.generation.load(Ordering::Acquire);
        Some(session.and_then(|session| {
            let (bucket, key) = parts(at)?;
            self.get(&session.found.key, &format!("{bucket}/{key}"), generation)
        }))
    }

    fn list(&self, at: &Location) -> Result<Vec<Listed>> {
        let renewed = |generation, refusal: &Refused| self.0.renewed(generation, refusal);
        let names = |bucket: &str, prefix: &str| {
            let page =
                |ask: &super::listing::Ask<'_, String>| self.get(ask.key, &format!("{bucket}?under={prefix}"), 0);
            listed(&self.0, bucket, prefix, page, renewed)
        };
        list(at, names, |refusal| self.explained(refusal))
    }
}

/// How it is asked, with these settings.
pub(super) fn requests(web: WebSettings, environment: Environment) -> (Arc<Common>, Arc<dyn Requests>) {
    let common = Arc::new(Common { settings: web, ..Common::default() });
    (common.clone(), Arc::new(ToyStore(Arc::new(Credentials::new(ToyKeys(environment), common)))))
}

mod tests {
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
}
