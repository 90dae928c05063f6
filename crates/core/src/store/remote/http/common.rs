//! State of all connections to web servers, and the proxy of each server.

use super::address::Server;
use super::names::Names;
use super::proxy::Proxy;
use super::settings::WebSettings;
use super::tls::Tls;
use super::tunnel::denied;
use crate::error::{Error, Result};
use crate::sync::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// Redirects that one request follows, at most.
pub(in crate::store::remote) const MOST_REDIRECTS: u32 = 5;
/// How often connections are looked at.
pub(in crate::store::remote) const LOOK: Duration = Duration::from_millis(40);

/// State of all connections to web servers.
#[derive(Debug, Default, Clone)]
pub(in crate::store::remote) struct Common {
    pub(in crate::store::remote) settings: WebSettings,
    /// Servers that have redirected.
    pub(in crate::store::remote) redirecting: Arc<Mutex<HashSet<Server>>>,
    pub(in crate::store::remote) names: Arc<Names>,
    pub(in crate::store::remote) tls: Tls,
}

impl Common {
    /// The proxy for a server, if there is one.
    pub(in crate::store::remote) fn proxy(&self, server: &Server) -> Result<Option<&Proxy>> {
        self.settings.proxies.as_ref().map_or(Ok(None), |proxies| proxies.of(server))
    }

    /// Whether nobody on the way to a server can read what it is told.
    pub(in crate::store::remote) fn keeps_secrets(&self, server: &Server) -> bool {
        let by_proxy = || self.proxy(server).ok().flatten().is_none_or(|proxy| proxy.server.keeps_secrets());
        server.keeps_secrets() && (server.tls || by_proxy())
    }

    /// The server as messages name it, with its proxy.
    pub(in crate::store::remote) fn named(&self, server: &Server) -> String {
        match self.proxy(server) {
            Ok(Some(proxy)) => format!("{} through the proxy {}", server.authority(), proxy.name()),
            _ => server.authority(),
        }
    }

    /// The error of an answer, which may be the proxy's: only a tunnel tells them apart.
    pub(in crate::store::remote) fn answered(&self, server: &Server, e: Error) -> Error {
        let Ok(Some(proxy)) = self.proxy(server) else { return e };
        if server.tls {
            return e;
        }
        let named = e.reworded(|why| format!("{why}, through the proxy {}", proxy.name()));
        match named.status() {
            Some(407) => denied(named.message().to_owned(), 407),
            _ => named,
        }
    }
}

/// Whether a server says that it has too much to do.
pub(in crate::store::remote) fn is_busy(e: &Error) -> bool {
    matches!(e.status(), Some(429 | 503)) || e.message().contains("SlowDown")
}
