//! Credentials of any provider: who fetches them, when they are fetched again, and those that the program gives.

pub(super) mod credentials;
pub(super) mod given_tokens;
pub(super) mod giver;
pub(super) mod tokens;
