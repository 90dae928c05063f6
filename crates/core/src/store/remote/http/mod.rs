//! One server, in HTTP/1.1: its address, a connection to it, a request, and what an answer says.
//!
//! Providers and their credentials are unknown here.

pub(super) mod address;
pub(super) mod answer;
mod certificate;
pub(super) mod chunks;
pub(super) mod common;
pub(super) mod connection;
pub(super) mod control;
pub(super) mod escaping;
pub(super) mod interfaces;
pub(super) mod jitter;
pub(super) mod line;
pub(super) mod names;
pub(super) mod proxy;
pub(super) mod racing;
pub(super) mod refusal;
pub(super) mod request;
pub(super) mod server_error;
pub(super) mod settings;
mod socket;
pub(super) mod sockets;
pub(super) mod tls;
mod trust;
pub(super) mod tunnel;
pub(super) mod wires;
pub(super) mod xml;
