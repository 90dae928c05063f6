//! Requests that write: they are sent on connections of their own, by threads that may block, until the server has answered.
//!
//! A provider words them (`aws::upload`). A [`Courier`] sends them, tries again what may go better later, renews
//! credentials, and keeps to the limits of the node.

mod courier;
mod rate;
mod replies;

pub(super) use self::courier::{Courier, Reply, WriteOrder};
pub(super) use self::replies::{changed, content_type, is_checked, other_bytes, since};
