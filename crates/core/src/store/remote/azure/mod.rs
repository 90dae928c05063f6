//! Azure Blob Storage: its settings, its account, requests, and where Azure keeps credentials.

mod account;
pub(super) mod blob;
pub(super) mod keys;
pub(super) mod settings;

use self::settings::AzureSettings;
use super::environment::Environment;
use super::http::common::Common;
use super::http::request::Requests;
use super::http::settings::WebSettings;
use std::sync::Arc;

/// How it is asked, with these settings. The environment gives those that are missing.
pub(super) fn requests(
    web: WebSettings,
    azure: AzureSettings,
    environment: Environment,
) -> (Arc<Common>, Arc<dyn Requests>) {
    let common = Arc::new(Common { settings: web, ..Common::default() });
    (common.clone(), Arc::new(blob::AzureBlob::new(azure, environment, common)))
}
