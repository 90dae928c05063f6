//! Texts that nobody is shown.

use std::fmt;

/// A text that no message and no debug output shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// This text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    pub(super) fn shown(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(a secret)")
    }
}
