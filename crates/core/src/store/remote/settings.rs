//! The settings of the stores.

use super::aws::settings::S3Settings;
use super::azure::settings::AzureSettings;
use super::gcp::settings::GcsSettings;
use super::http::address::Address;
use super::http::settings::{Bearer, WebSettings};
use crate::error::Result;

/// How one open asks stores.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StorageSettings {
    /// How all of them are asked.
    pub web: WebSettings,
    /// A token for a web server.
    pub bearer: Option<Bearer>,
    /// How S3 is asked.
    pub s3: S3Settings,
    /// How Google Cloud Storage is asked.
    pub gcs: GcsSettings,
    /// How Azure Blob Storage is asked.
    pub azure: AzureSettings,
}

/// Whether requests can be sent to this endpoint.
///
/// # Errors
/// `Invalid` if it is no address.
pub fn check_endpoint(text: &str) -> Result<()> {
    Address::parse(text).map(drop)
}

impl From<WebSettings> for StorageSettings {
    fn from(web: WebSettings) -> Self {
        StorageSettings { web, ..StorageSettings::default() }
    }
}
