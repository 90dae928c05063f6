//! Providers of objects over HTTP: web servers and object stores. Each stands in [`ALL`] once.

use super::auth::given_tokens;
use super::aws::s3::S3;
use super::azure::blob::AzureBlob;
use super::environment::Environment;
use super::gcp::gcs::Gcs;
use super::http::common::Common;
use super::http::request::Requests;
use super::http::settings::WebSettings;
use super::settings::StorageSettings;
use super::{aws, azure, gcp};
use std::sync::Arc;

/// One kind of servers.
pub(in crate::store) struct Provider {
    /// The schemes of its addresses, in small letters. Reports call its servers by the first.
    pub(in crate::store) schemes: &'static [&'static str],
    /// The variables of the environment that its requests depend on.
    variables: &'static [&'static str],
    /// Its requests, with these settings. The environment gives those that are missing.
    pub(super) requests: fn(StorageSettings, Environment) -> MadeRequests,
}

/// How servers are asked: on which terms, and with which requests.
type MadeRequests = (Arc<Common>, Arc<dyn Requests>);

/// Makes requests, with the state that their connections share.
pub(super) fn with_common(web: WebSettings, requests: impl FnOnce(&Arc<Common>) -> Arc<dyn Requests>) -> MadeRequests {
    let common = Arc::new(Common { settings: web, ..Common::default() });
    let requests = requests(&common);
    (common, requests)
}

/// Web servers, and the providers.
pub(super) static WEB: Provider = Provider {
    schemes: &["http", "https"],
    variables: &[],
    requests: |s, _| with_common(s.web, |common| given_tokens::requests(common, s.bearer)),
};
static ALL: &[&Provider] = &[
    &WEB,
    &Provider {
        schemes: &["s3"],
        variables: &aws::keys::VARIABLES,
        requests: |mut s, e| {
            s.web.authorities = s.web.authorities.or_else(|| aws::keys::authorities(&s.s3, &e));
            with_common(s.web, |common| Arc::new(S3::new(s.s3, e, common.clone())))
        },
    },
    &Provider {
        schemes: &["gs"],
        variables: &gcp::keys::VARIABLES,
        requests: |s, e| with_common(s.web, |common| Arc::new(Gcs::new(s.gcs, e, common.clone()))),
    },
    &Provider {
        schemes: &["az"],
        variables: &azure::keys::VARIABLES,
        requests: |s, e| with_common(s.web, |common| Arc::new(AzureBlob::new(s.azure, e, common.clone()))),
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
