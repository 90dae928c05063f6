//! How many connections there are, and to which servers: as many as what waits is worth, and as the pace allows.

use super::link::{Link, LinkState};
use super::net::{fail, Net, LEAST_ASKED};
use super::node_budget::Permit;
use super::range_read::RangeRead;
use super::told::Told;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::address::Server;
use crate::store::remote::http::request::Get;
use crate::store::remote::http::wires::{WireEnd, Wires};
use crate::sync::lock;
use std::sync::Arc;
use std::time::Instant;

/// Whether it is for an address that does not answer, while another one may.
fn is_late<S: WireEnd>(link: &Link<S>, now: Instant) -> bool {
    link.state == LinkState::Connecting && link.stream.is_late(now)
}

impl<W: Wires> Net<W> {
    /// Makes connections for what waits, as far as there may be more. Whether it made one.
    pub(super) fn connect_more(&mut self, now: Instant, told: &mut Vec<Told>) -> bool {
        if self.waiting.len() == 0 || !self.may_connect(now) {
            return false;
        }
        let mut made = false;
        // What waits: for which object, on which server, how many bytes.
        let mut wanted: Vec<(*const (), Server, u64)> = Vec::new();
        let mut at = 0;
        while let Some(read) = self.waiting.get(at) {
            let (site, bytes) = (Arc::as_ptr(&read.site).cast(), read.missing_bytes());
            at += 1;
            if let Some(known) = wanted.iter_mut().find(|known| known.0 == site) {
                known.2 += bytes;
                continue;
            }
            match read.site.request(self.wires.wake()) {
                // Its credentials come.
                None => {}
                Some(Ok(request)) => wanted.push((site, request.address.server, bytes)),
                Some(Err(e)) => {
                    at -= 1;
                    self.waiting.take(at).into_iter().for_each(|read| fail(read, e.clone(), told));
                }
            }
        }
        while let Some((_, server, _)) = wanted.first() {
            let server = server.clone();
            let (theirs, others): (Vec<_>, _) = wanted.into_iter().partition(|known| known.1 == server);
            let bytes: u64 = match self.redirects(&server) {
                true => theirs.len() as u64 * LEAST_ASKED.min(self.common.settings.request_bytes),
                false => theirs.iter().map(|known| known.2).sum(),
            };
            wanted = others;
            let is_free = |link: &Link<W::Stream>| match link.state {
                LinkState::Connecting => !link.stream.is_late(now),
                state => state == LinkState::Idle,
            };
            let is_coming = |link: &Link<W::Stream>| is_free(link) && link.server == server;
            let mut coming = self.links.iter().filter(|(_, link)| is_coming(link)).count() as u64;
            while coming * LEAST_ASKED.min(self.common.settings.request_bytes) < bytes.max(1)
                && self.make_room(&server, now)
            {
                let Some(permit) = self.permit(now) else {
                    self.leave_idle(&server, now);
                    return made;
                };
                match self.wires.connect(&server) {
                    Ok(Some(stream)) => {
                        made = true;
                        lock(&self.counts).connections += 1;
                        let number = self.links.room();
                        let link = Link::new(stream, permit, server.clone(), now);
                        self.advance(number, link, now, told);
                        coming += 1;
                    }
                    // Its addresses come.
                    Ok(None) => break,
                    Err(e) => {
                        let is_final = matches!(
                            e.kind(),
                            ErrorKind::Unsupported | ErrorKind::Invalid | ErrorKind::Limit | ErrorKind::Internal
                        );
                        self.not_connected(&server, e, is_final, now, told);
                        break;
                    }
                }
            }
        }
        made
    }

    /// The right to one more connection, if the processes of this node have a budget for them. `None`: not now.
    fn permit(&mut self, now: Instant) -> Option<Option<Permit>> {
        match &mut self.node {
            None => Some(None),
            Some(node) => self.parting.take_spare().or_else(|| node.take(now)).map(Some),
        }
    }

    /// No permit is free. A connection to another server on which nothing is asked gives way, and its permit stays here. One
    /// that only waits until a request may be sent does not.
    fn leave_idle(&mut self, server: &Server, now: Instant) {
        if !self.request_rate.may_send(now) || self.parting.len() > 0 {
            return;
        }
        let gives_way = |link: &Link<_>| link.state == LinkState::Idle && link.server != *server;
        if let Some((_, link)) = self.links.take_where(gives_way) {
            self.parting.leave(link, now, true, &mut self.wires);
        }
    }

    /// Whether there may be one more connection, perhaps in the place of another.
    fn may_connect(&self, now: Instant) -> bool {
        let has_room = self.links.len() + self.parting.len() < self.limit() || self.links.count(LinkState::Idle) > 0;
        has_room || self.is_stuck() || self.links.iter().any(|(_, link)| is_late(link, now))
    }

    /// Whether every connection waits for a slab, while something that holds one waits for a connection.
    fn is_stuck(&self) -> bool {
        let all_wait = self.links.count(LinkState::Parked) == self.links.len();
        all_wait && self.waiting.iter().any(RangeRead::holds_slab)
    }

    /// Whether one more connection to this server may be made. If there are as many as there may be, one to another server on
    /// which nothing is asked for gives way, or one that would wait for ever, or that no address answers.
    fn make_room(&mut self, server: &Server, now: Instant) -> bool {
        if self.links.len() < self.limit() {
            // If not, a place will be free as soon as its server closes the connection that has it.
            return self.links.len() + self.parting.len() < self.limit();
        }
        let is_stuck = self.is_stuck();
        let gives_way = |link: &Link<_>| match is_stuck {
            true => link.state == LinkState::Parked,
            false => (link.state == LinkState::Idle && link.server != *server) || is_late(link, now),
        };
        let Some((_, link)) = self.links.take_where(gives_way) else { return false };
        let fetch = self.leave(link, now);
        self.back(fetch);
        if is_stuck {
            // What holds a slab goes first, or the new connection would wait as the old one did.
            self.waiting.advance_holders();
        }
        true
    }

    /// A connection could not be made. `is_final`: nor will another.
    pub(super) fn not_connected(
        &mut self,
        server: &Server,
        e: Error,
        is_final: bool,
        now: Instant,
        told: &mut Vec<Told>,
    ) {
        let is_other = |link: &Link<_>| link.server == *server && link.state != LinkState::Connecting;
        let others = self.links.iter().filter(|(_, link)| is_other(link)).count();
        if others > 0 {
            // It takes so many, and no more. Those to other servers stay.
            let coming = |link: &Link<_>| link.server == *server && link.state == LinkState::Connecting;
            let all = self.links.iter().filter(|(_, link)| !coming(link)).count();
            return self.pace.is_refused(all, now);
        }
        for read in self.waiting.take_due() {
            let is_theirs = |request: Get| request.address.server == *server;
            let request = read.site.request(self.wires.wake());
            if !request.and_then(Result::ok).is_some_and(is_theirs) {
                self.waiting.add(read);
            } else if is_final {
                fail(read, e.clone(), told);
            } else {
                self.tried(read, 0, &e, None, told);
            }
        }
    }

    pub(super) fn redirects(&self, server: &Server) -> bool {
        lock(&self.common.redirecting).contains(server)
    }
}
