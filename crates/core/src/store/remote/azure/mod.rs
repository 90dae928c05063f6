//! Azure Blob Storage: its settings, its account, requests, and where Azure keeps credentials.

mod account;
pub(super) mod blob;
pub(super) mod keys;
pub(super) mod settings;
mod upload;
