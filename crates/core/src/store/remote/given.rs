//! Credentials that the program gives: what gives them, and what it gives.

use super::secret::Secret;
use crate::error::Result;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// Something that gives credentials. It is asked on threads that may block, by one at a time, and no lock is held that a load
/// needs.
pub trait GivesCredentials: Send + Sync {
    /// Credentials that are valid now.
    ///
    /// # Errors
    /// The reason that there are none. The text is shown, so it has no secret.
    fn give(&self) -> Result<GivenCredentials>;

    /// The number of this giver. Stores whose settings have givers with the same number share what these gave.
    fn number(&self) -> usize;
}

/// Given credentials. S3 needs a key and its secret, other servers a token.
#[derive(Debug, Clone, Default)]
pub struct GivenCredentials {
    /// The key that requests are signed with.
    pub access_key_id: Option<String>,
    /// The secret of that key.
    pub secret_access_key: Option<Secret>,
    /// The token of a key that is valid for a session.
    pub session_token: Option<Secret>,
    /// The token that requests carry.
    pub token: Option<Secret>,
    /// When all this becomes invalid.
    pub expires: Option<SystemTime>,
}

/// A giver, as a setting.
#[derive(Clone)]
pub struct CredentialSource(pub Arc<dyn GivesCredentials>);

impl PartialEq for CredentialSource {
    fn eq(&self, other: &Self) -> bool {
        self.0.number() == other.0.number()
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(a source of credentials)")
    }
}
