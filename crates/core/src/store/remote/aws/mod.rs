//! S3: its settings, where it is, signed requests, and where AWS keeps keys.

mod files;
pub(super) mod keys;
mod place;
mod redirect;
pub(super) mod s3;
mod services;
pub(super) mod settings;
mod upload;
mod versions;
