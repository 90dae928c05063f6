//! The proxy that a server is reached through, in errors.

use super::fetch::RangeRequest;
use super::net::Net;
use crate::store::remote::http::answer::Verdict;
use crate::store::remote::http::wires::Wires;

impl<W: Wires> Net<W> {
    /// The same verdict, with the name of the proxy in its error.
    pub(super) fn of_proxy(&self, fetch: &RangeRequest, verdict: Verdict) -> Verdict {
        let asked = fetch.reads.front().and_then(|read| read.asked.as_ref());
        let Some(server) = asked.map(|asked| &asked.address.server) else { return verdict };
        match verdict {
            Verdict::OtherEtag(_) => verdict,
            verdict => verdict.map_error(|e| self.common.answered(server, e)),
        }
    }
}
