//! Which proxy a server is reached through, and what errors say of it.

use super::address::Server;
use super::answer::{Refused, Verdict};
use super::fetch::RangeRequest;
use super::net::{Common, Net};
use super::proxy::Proxy;
use super::tunnel::denied;
use super::wires::Wires;
use crate::error::{Error, Result};

impl Common {
    /// The proxy for a server, if there is one.
    pub(super) fn proxy(&self, server: &Server) -> Result<Option<&Proxy>> {
        self.settings.proxies.as_ref().map_or(Ok(None), |proxies| proxies.of(server))
    }

    /// Whether nobody on the way to a server can read what it is told.
    pub(super) fn keeps_secrets(&self, server: &Server) -> bool {
        let by_proxy = || self.proxy(server).ok().flatten().is_none_or(|proxy| proxy.server.keeps_secrets());
        server.keeps_secrets() && (server.tls || by_proxy())
    }

    /// The server as messages name it, with its proxy.
    pub(super) fn named(&self, server: &Server) -> String {
        match self.proxy(server) {
            Ok(Some(proxy)) => format!("{} through the proxy {}", server.authority(), proxy.name()),
            _ => server.authority(),
        }
    }

    /// The error of an answer, which may be the proxy's: only a tunnel tells them apart.
    pub(super) fn answered(&self, server: &Server, e: Error) -> Error {
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

impl<W: Wires> Net<W> {
    /// The same verdict, with the name of the proxy in its error.
    pub(super) fn of_proxy(&self, fetch: &RangeRequest, verdict: Verdict) -> Verdict {
        let asked = fetch.reads.front().and_then(|read| read.asked.as_ref());
        let Some(server) = asked.map(|asked| &asked.address.server) else { return verdict };
        let named = |e: Error| self.common.answered(server, e);
        match verdict {
            Verdict::Again(e, pause) => Verdict::Again(named(e), pause),
            Verdict::Refused(refusal) => Verdict::Refused(Refused { error: named(refusal.error), ..refusal }),
            Verdict::Failed(e) => Verdict::Failed(named(e)),
            other => other,
        }
    }
}
