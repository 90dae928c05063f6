//! The settings of the store.

use std::path::PathBuf;
use std::time::Duration;

/// How web servers are asked.
#[derive(Debug, Clone)]
pub struct WebSettings {
    /// Most connections of one load.
    pub connections: usize,
    /// Connections that it begins with. There are more as long as more bring more.
    pub first_connections: usize,
    /// Most bytes of one request: neighbouring reads are asked for together.
    pub request: u64,
    /// Requests for the same bytes, at most.
    pub tries: u32,
    /// The pause before the second of them. Each further pause is twice as long, up to 3 s.
    pub pause: Duration,
    /// A connection that brings nothing for so long is closed, and what is missing is asked for again.
    pub stall: Duration,
    /// A file with the certificates (PEM) of the authorities to trust, instead of the system's.
    pub authorities: Option<PathBuf>,
}

impl Default for WebSettings {
    fn default() -> Self {
        let (pause, stall) = (Duration::from_millis(100), Duration::from_secs(10));
        // Object stores recommend requests of 8 to 16 MiB.
        let (connections, first_connections, request) = (256, 16, 16 << 20);
        WebSettings { connections, first_connections, request, tries: 8, pause, stall, authorities: None }
    }
}
