//! The connections of a load: which reads one request asks for, how many connections there are, and what is asked for again.

mod connecting;
mod fetch;
mod held;
mod link;
mod links;
pub(super) mod net;
pub(super) mod node_budget;
mod pace;
mod parting;
mod proxied;
mod queue;
pub(super) mod range_read;
mod rate_limit;
mod request_rate;
mod stragglers;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
pub(super) mod told;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod virtual_time;
