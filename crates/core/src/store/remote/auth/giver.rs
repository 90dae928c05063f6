//! Asks the program for credentials: when they are needed, and again when they have expired.

use crate::error::{Error, Result};
use crate::store::remote::given::{CredentialSource, GivenCredentials};
use std::time::{Duration, Instant, SystemTime};

/// Credentials are replaced so long before they expire, or in the middle of their time if that is short. It is longer than
/// they may be used without being asked for again (`credentials`).
pub(in crate::store::remote) const MARGIN: Duration = Duration::from_secs(300);
/// The name of a callable in messages.
pub(in crate::store::remote) const CALLABLE: &str = "the callable in storage credentials";

/// A giver and what it gave last.
pub(in crate::store::remote) struct Giver {
    source: CredentialSource,
    pub(in crate::store::remote) origin: String,
    last: Option<Given>,
}

#[derive(Clone)]
struct Given {
    credentials: GivenCredentials,
    /// When there should be others, and when they become invalid.
    times: Option<(Instant, Instant)>,
}

impl Giver {
    pub(in crate::store::remote) fn new(source: CredentialSource, origin: impl Into<String>) -> Giver {
        Giver { source, origin: origin.into(), last: None }
    }

    /// The last credentials, or new ones if it is time for them.
    pub(in crate::store::remote) fn credentials(&mut self) -> Result<GivenCredentials> {
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
                    return Err(Error::permission(format!(
                        "{} gave credentials that have expired already",
                        self.origin
                    )));
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
    pub(in crate::store::remote) fn left(&self) -> Option<Duration> {
        let (_, until) = self.last.as_ref()?.times?;
        Some(until.saturating_duration_since(Instant::now()))
    }

    /// The token in them.
    pub(in crate::store::remote) fn token(&mut self) -> Result<String> {
        let given = self.credentials()?;
        let token = given.token.as_ref().map_or("", |token| token.shown());
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            let origin = &self.origin;
            let text =
                format!("{origin} gave no token, or one with spaces or control characters: this server needs a token");
            return Err(Error::invalid(text));
        }
        Ok(token.to_owned())
    }
}
