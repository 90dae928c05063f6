//! S3: its settings, where it is, signed requests, and where AWS keeps keys.

mod files;
pub(super) mod keys;
mod place;
mod redirect;
pub(super) mod s3;
mod services;
pub(super) mod settings;

use self::settings::S3Settings;
use super::environment::Environment;
use super::http::common::Common;
use super::http::request::Requests;
use super::http::settings::WebSettings;
use std::sync::Arc;

/// How it is asked, with these settings. The environment gives those that are missing.
pub(super) fn requests(
    mut web: WebSettings,
    s3: S3Settings,
    environment: Environment,
) -> (Arc<Common>, Arc<dyn Requests>) {
    web.authorities = web.authorities.or_else(|| keys::authorities(&s3, &environment));
    let common = Arc::new(Common { settings: web, ..Common::default() });
    (common.clone(), Arc::new(s3::S3::new(s3, environment, common)))
}
