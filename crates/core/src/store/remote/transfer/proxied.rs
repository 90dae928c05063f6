//! The proxy that a server is reached through, in errors.

use super::fetch::RangeRequest;
use super::net::Net;
use crate::error::Error;
use crate::store::remote::http::answer::{Refused, Verdict};
use crate::store::remote::http::wires::Wires;

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
