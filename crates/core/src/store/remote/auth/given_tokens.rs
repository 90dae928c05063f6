//! Tokens that the program gives, for web servers.

use super::credentials::{Credentials, Finder, FoundKey};
use super::giver::{Giver, CALLABLE};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::address::{Address, Server};
use crate::store::remote::http::answer::Refused;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::request::{bearer_field, Get, Requests, WebRequests};
use crate::store::remote::http::settings::Bearer;
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use std::collections::HashSet;
use std::sync::Arc;

/// Tokens for web servers.
#[derive(Debug)]
pub(super) struct Tokens;

impl Finder for Tokens {
    type Key = String;
    type Provider = Giver;

    fn find(&self, common: &Arc<Common>, provider: &mut Option<Giver>) -> Result<FoundKey<String>> {
        let none = || Error::new(ErrorKind::Internal, "no callable; please report this");
        let source = common.settings.credentials.clone().ok_or_else(none)?;
        let giver = provider.get_or_insert_with(|| Giver::new(source, CALLABLE));
        let key = giver.token()?;
        Ok(FoundKey { key, origin: giver.origin.clone(), usable: giver.left(), renewable: true })
    }
}

/// Requests that carry a token which the program gives. The servers of the addresses that are opened get it, and no other that
/// one of them redirects to.
#[derive(Debug)]
struct WithGivenToken {
    credentials: Arc<Credentials<Tokens>>,
    common: Arc<Common>,
    servers: Mutex<HashSet<Server>>,
}

impl WithGivenToken {
    fn new(common: &Arc<Common>) -> WithGivenToken {
        let credentials = Arc::new(Credentials::new(Tokens, common.clone()));
        WithGivenToken { credentials, common: common.clone(), servers: Mutex::default() }
    }

    fn made(&self, at: &str, token: &str, generation: u64) -> Result<Get> {
        let address = Address::parse(at)?;
        if !self.common.keeps_secrets(&address.server) {
            return Err(Error::invalid(
                "the address is http://, and a token would be readable on the way: give an https:// one",
            ));
        }
        lock(&self.servers).insert(address.server.clone());
        Ok(Get { address, fields: bearer_field(token), generation, is_moved: false })
    }
}

/// How web servers are asked: with a token that the program gives, with this one, or with none.
pub(in crate::store::remote) fn requests(common: &Arc<Common>, bearer: Option<Bearer>) -> Arc<dyn Requests> {
    match (bearer, &common.settings.credentials) {
        (None, Some(_)) => Arc::new(WithGivenToken::new(common)),
        (bearer, _) => Arc::new(WebRequests(bearer)),
    }
}

impl Requests for WithGivenToken {
    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        self.credentials.with_key(wake, |key, generation| self.made(at, key, generation))
    }

    fn redirected(&self, to: &Address) -> String {
        let session = self.credentials.known().filter(|_| lock(&self.servers).contains(&to.server));
        session.map_or_else(String::new, |session| bearer_field(&session.found.key))
    }

    fn renew(&self, _at: &str, generation: u64, refusal: &Refused) -> bool {
        self.credentials.renewed(generation, refusal)
    }

    fn explained(&self, refusal: Refused) -> Error {
        let e = refusal.error;
        if e.kind() != ErrorKind::Permission {
            return e;
        }
        e.reworded(|why| format!("{why}; the token is from {CALLABLE}"))
    }
}
