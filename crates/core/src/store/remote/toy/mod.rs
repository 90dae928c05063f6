//! A provider of one folder, for tests: a key from the environment, requests that carry it, listings. It shows what a new
//! provider takes: this folder, and a line in `provider.rs`.
#![allow(clippy::unwrap_used)]

use super::auth::credentials::{Credentials, Finder, FoundKey};
use super::environment::Environment;
use super::http::address::Address;
use super::http::common::Common;
use super::http::request::{Get, Listed, Requests};
use super::http::settings::WebSettings;
use super::listing::{list, parts, Ask};
use super::provider::with_common;
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::wake::Wake;
use std::sync::Arc;

pub(super) const VARIABLES: [&str; 2] = ["TOY_ENDPOINT", "TOY_KEY"];

/// The key of the environment.
#[derive(Debug)]
struct ToyKeys(Environment);

impl Finder for ToyKeys {
    type Key = String;
    type Provider = ();

    fn find(&self, _common: &Arc<Common>, _provider: &mut Option<()>) -> Result<FoundKey<String>> {
        let none = || Error::permission("there is no key: set TOY_KEY");
        let key = self.0.get("TOY_KEY").ok_or_else(none)?.to_owned();
        Ok(FoundKey { key, origin: "TOY_KEY".into(), usable: None, renewable: false })
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
    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        self.0.with_key(wake, |toy_key, generation| {
            let (bucket, key) = parts(at)?;
            self.get(toy_key, &format!("{bucket}/{key}"), generation)
        })
    }

    fn list(&self, at: &Location) -> Result<Vec<Listed>> {
        let target = |ask: &Ask<'_, String>| format!("{}?under={}", ask.bucket, ask.prefix);
        list(self, &self.0, at, |ask| self.get(ask.key, &target(ask), 0))
    }
}

/// How it is asked, with these settings.
pub(super) fn requests(web: WebSettings, environment: Environment) -> (Arc<Common>, Arc<dyn Requests>) {
    let store = |common: &Arc<Common>| ToyStore(Arc::new(Credentials::new(ToyKeys(environment), common.clone())));
    with_common(web, |common| Arc::new(store(common)))
}

mod tests;
