//! Settings of a server, with their defaults.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The address to listen on: a number, or `localhost`.
    pub host: String,
    /// The port; 0 takes one that is free.
    pub port: u16,
    /// The token that clients must show.
    pub token: Option<String>,
    /// True if a server that other machines reach may have no token.
    pub allows_strangers: bool,
    /// Certificate chain and key, as PEM files.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// True if each request is a line on standard error.
    pub access_log: bool,
    /// True if bodies of plain connections go from the page cache to the network without a copy.
    pub sends_files: bool,
    /// Connections at a time, at most.
    pub most_connections: usize,
    /// Threads that answer. A read that waits for a disk holds up one of them, so there are more than cores.
    pub threads: usize,
    /// The longest time from the first byte of a head to its last.
    pub head_time: Duration,
    /// The longest time between an answer and the next request.
    pub idle_time: Duration,
    /// The longest time in which a client takes less than 64 KiB of an answer, or than its rest.
    pub stall_time: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8080,
            token: None,
            allows_strangers: false,
            tls: None,
            access_log: false,
            sends_files: true,
            most_connections: 1024,
            threads: 16,
            head_time: Duration::from_secs(10),
            idle_time: Duration::from_secs(60),
            stall_time: Duration::from_secs(60),
        }
    }
}
