//! Providers of objects over HTTP: web servers and object stores. Each stands in [`ALL`] once.

use super::auth::given_tokens;
use super::environment::Environment;
use super::http::common::Common;
use super::http::request::Requests;
use super::settings::StorageSettings;
use super::{aws, azure, gcp};
use std::sync::Arc;

/// One kind of servers.
pub(in crate::store) struct Provider {
    /// The schemes of its addresses, in small letters.
    pub(in crate::store) schemes: &'static [&'static str],
    /// The variables of the environment that its requests depend on.
    variables: &'static [&'static str],
    /// Its requests, with these settings. The environment gives those that are missing.
    pub(super) requests: fn(StorageSettings, Environment) -> MadeRequests,
}

/// How servers are asked: on which terms, and with which requests.
type MadeRequests = (Arc<Common>, Arc<dyn Requests>);

/// Web servers, and the providers.
pub(super) static WEB: Provider =
    Provider { schemes: &["http", "https"], variables: &[], requests: |s, _| given_tokens::requests(s.web, s.bearer) };
static ALL: &[&Provider] = &[
    &WEB,
    &Provider { schemes: &["s3"], variables: &aws::keys::VARIABLES, requests: |s, e| aws::requests(s.web, s.s3, e) },
    &Provider { schemes: &["gs"], variables: &gcp::keys::VARIABLES, requests: |s, e| gcp::requests(s.web, s.gcs, e) },
    &Provider {
        schemes: &["az"],
        variables: &azure::keys::VARIABLES,
        requests: |s, e| azure::requests(s.web, s.azure, e),
    },
    #[cfg(test)]
    &Provider { schemes: &["toy"], variables: &super::toy::VARIABLES, requests: |s, e| super::toy::requests(s.web, e) },
];

impl Provider {
    /// The provider of a scheme.
    pub(in crate::store) fn of(scheme: &str) -> Option<&'static Provider> {
        let has = |provider: &&Provider| provider.schemes.iter().any(|known| known.eq_ignore_ascii_case(scheme));
        ALL.iter().copied().find(has)
    }

    /// The schemes of all providers.
    pub(in crate::store) fn schemes() -> impl Iterator<Item = &'static str> {
        ALL.iter().flat_map(|provider| provider.schemes.iter().copied())
    }

    /// The part of this process's environment that it looks at.
    pub(in crate::store) fn environment(&self) -> Environment {
        Environment::of_process(self.variables)
    }
}
