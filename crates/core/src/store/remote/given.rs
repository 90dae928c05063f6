//! Credentials that the program gives: something that is asked when they are needed, and again when they are not valid any
//! more.

use super::secret::Secret;
use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Credentials are replaced so long before they expire, or in the middle of their time if that is short.
pub(super) const MARGIN: Duration = Duration::from_secs(300);
/// What a callable is called in messages.
pub(super) const CALLABLE: &str = "the callable in storage credentials";

/// Something that gives credentials. It is asked on threads that may block, by one at a time, and no lock is held that a load
/// needs.
pub trait GivesCredentials: Send + Sync {
    /// Those that are valid now.
    ///
    /// # Errors
    /// Why there are none. The text is shown, so it has no secret.
    fn give(&self) -> Result<GivenCredentials>;

    /// The number of this giver. Stores whose settings have givers with the same number share what these gave.
    fn number(&self) -> usize;
}

/// What was given. S3 needs a key and its secret, other servers a token.
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

/// A giver and what it gave last.
pub(super) struct Giver {
    source: CredentialSource,
    pub(super) origin: String,
    last: Option<Given>,
}

#[derive(Clone)]
struct Given {
    credentials: GivenCredentials,
    /// When there should be others, and when they become invalid.
    times: Option<(Instant, Instant)>,
}

impl Giver {
    pub(super) fn new(source: CredentialSource, origin: impl Into<String>) -> Giver {
        Giver { source, origin: origin.into(), last: None }
    }

    /// Those that it gave last, or others if it is time for them.
    pub(super) fn credentials(&mut self) -> Result<GivenCredentials> {
        if let Some(Given { credentials, times: Some((replaced, _)) }) = &self.last {
            if Instant::now() < *replaced {
                return Ok(credentials.clone());
            }
        }
        let credentials = self.source.0.give()?;
        let times = match credentials.expires {
            None => None,
            Some(when) => {
                let left = when.duration_since(SystemTime::now()).unwrap_or_default();
                if left.is_zero() {
                    return Err(denied(format!("{} gave credentials that have expired already", self.origin)));
                }
                let now = Instant::now();
                let left = left.min(Duration::from_secs(1 << 30));
                Some((now + left - MARGIN.min(left / 2), now + left))
            }
        };
        self.last = Some(Given { credentials: credentials.clone(), times });
        Ok(credentials)
    }

    /// How long the last ones are still valid; `None`: nobody knows.
    pub(super) fn left(&self) -> Option<Duration> {
        let (_, until) = self.last.as_ref()?.times?;
        Some(until.saturating_duration_since(Instant::now()))
    }

    /// The token in them.
    pub(super) fn token(&mut self) -> Result<String> {
        let given = self.credentials()?;
        let token = given.token.as_ref().map_or("", |token| token.shown());
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            let origin = &self.origin;
            let text =
                format!("{origin} gave no token, or one with spaces or controls in it: this server needs a token");
            return Err(invalid(text));
        }
        Ok(token.to_owned())
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

fn denied(text: String) -> Error {
    Error::new(ErrorKind::Permission, text)
}
