//! Connections that wait until more may be received.

use super::net::Net;
use super::told::Told;
use crate::store::remote::http::wires::Wires;
use std::time::Instant;

impl<W: Wires> Net<W> {
    /// Lets connections that were held go on, as far as there is something for them.
    pub(super) fn release(&mut self, now: Instant, told: &mut Vec<Told>) {
        // Each once: one that is held again stands behind the others.
        for _ in 0..self.rate_limit.held() {
            let Some(number) = self.rate_limit.next_held(now) else { return };
            // Another one may have its number by now.
            if let Some(mut link) = self.links.take_if(number, |link| link.is_held) {
                (link.is_held, link.last) = (false, now);
                self.advance(number, link, now, told);
            }
        }
    }
}
