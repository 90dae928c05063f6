//! How S3 is asked.

use crate::error::{Error, Result};
use crate::store::remote::given::GivesCredentials;
use crate::store::remote::secret::Secret;
use std::sync::Arc;

/// How S3, or a server that speaks its protocol, is asked. What is left out is looked for where the tools of AWS do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct S3Settings {
    /// `http://` or `https://` and a host, instead of AWS.
    pub endpoint: Option<String>,
    /// The region of the buckets. A wrong one is corrected if the server says so.
    pub region: Option<String>,
    /// Where a bucket stands in addresses; `None`: virtual for AWS, path for other endpoints.
    pub addressing: Option<Addressing>,
    /// Requests are not signed.
    pub anonymous: bool,
    /// The requester pays.
    pub requester_pays: bool,
    /// The key that requests are signed with, and its secret.
    pub access_key_id: Option<String>,
    /// The secret of that key.
    pub secret_access_key: Option<Secret>,
    /// The token of a key that is valid for a session.
    pub session_token: Option<Secret>,
    /// The profile of AWS's configuration files.
    pub profile: Option<String>,
    /// Gives the credentials of profiles that have more to them than keys.
    pub profiles: Option<ProfileSource>,
}

/// Makes what gives the credentials of the AWS profile with a name.
#[derive(Debug, Clone, Copy)]
pub struct ProfileSource(pub fn(&str) -> Arc<dyn GivesCredentials>);

impl PartialEq for ProfileSource {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

/// Where a bucket stands in the addresses of its objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addressing {
    /// `https://host/bucket/key`.
    Path,
    /// `https://bucket.host/key`.
    Virtual,
}

/// Whether a region can be called so.
///
/// # Errors
/// `Invalid` if none can.
pub(in crate::store::remote) fn check_region(text: &str) -> Result<()> {
    let text = text.strip_prefix("fips-").or(text.strip_suffix("-fips")).unwrap_or(text);
    match is_region(text) {
        true => Ok(()),
        false => Err(Error::invalid("a region has letters, digits and '-' only: such as us-east-1")),
    }
}

pub(super) fn is_region(text: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
    (1..=63).contains(&text.len())
        && text.bytes().all(fits)
        && !text.starts_with(['-', '_'])
        && !text.ends_with(['-', '_'])
}
