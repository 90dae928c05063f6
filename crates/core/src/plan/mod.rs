//! What is to be read, where to, and why that way: from a request to a layout and a schedule.

pub mod layout;
mod policy;
pub mod request;
pub mod schedule;
pub mod want;

pub(crate) use policy::{Cold, Plan};
