//! How Google Cloud Storage is asked.

/// How Google Cloud Storage, or a server that speaks its XML API, is asked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GcsSettings {
    /// `http://` or `https://` and a host, instead of Google's.
    pub endpoint: Option<String>,
    /// Requests carry no token.
    pub anonymous: bool,
}
