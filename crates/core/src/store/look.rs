//! Measurements of requests for an object, and the servers' answers: for `penstock doctor`.

use super::version::Version;
use crate::error::Error;
use std::time::Duration;

/// One object, asked for its first byte a few times.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// The servers that were asked, in turn: each one redirects to the next. The last one has the object, or failed.
    pub servers: Vec<Asked>,
    /// The times from a request to the first byte of its answer, of the last server.
    pub round_trips: Vec<Duration>,
    /// Connections to the last server that these took.
    pub connections: u32,
    /// Size of the object in bytes, and its version.
    pub object: Option<(u64, Version)>,
    /// The error, if any.
    pub error: Option<Error>,
}

/// A server, and the time of each step to its answer. `None`: not reached.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// Scheme, host and port.
    pub server: String,
    /// The look-up of its name; `None` also for an IP address.
    pub lookup: Option<Duration>,
    /// Its addresses.
    pub addresses: usize,
    /// The connection.
    pub connect: Option<Duration>,
    /// TLS's handshake.
    pub tls: Option<Duration>,
    /// From the request to the first byte of the answer.
    pub first_byte: Option<Duration>,
    /// The status of the answer.
    pub status: Option<u16>,
}
