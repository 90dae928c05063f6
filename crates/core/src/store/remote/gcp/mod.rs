//! Google Cloud Storage: its settings, requests with a token, and where Google keeps credentials.

pub(super) mod gcs;
pub(super) mod keys;
pub(super) mod settings;
mod upload;
