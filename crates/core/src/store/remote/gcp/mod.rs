//! Google Cloud Storage: its settings, requests with a token, and where Google keeps credentials.

pub(super) mod gcs;
pub(super) mod keys;
pub(super) mod settings;

use self::settings::GcsSettings;
use super::environment::Environment;
use super::http::common::Common;
use super::http::request::Requests;
use super::http::settings::WebSettings;
use std::sync::Arc;

/// How it is asked, with these settings. The environment gives those that are missing.
pub(super) fn requests(
    web: WebSettings,
    gcs: GcsSettings,
    environment: Environment,
) -> (Arc<Common>, Arc<dyn Requests>) {
    let common = Arc::new(Common { settings: web, ..Common::default() });
    (common.clone(), Arc::new(gcs::Gcs::new(gcs, environment, common)))
}
