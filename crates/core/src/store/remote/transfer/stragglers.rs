//! Connections that are slower than the others: what they have not brought yet is asked for on others.
//!
//! A connection that has gone silent is closed. One that is only slow loses the later half of its reads, and is closed
//! when it has brought the rest. Both are done only where others bring bytes: a server that is slow to everybody is not
//! asked for more.

use super::fetch::RangeRequest;
use super::link::{Link, LinkState};
use super::net::Net;
use crate::store::remote::http::address::Server;
use crate::store::remote::http::wires::{WireEnd, Wires};
use crate::sync::lock;
use std::time::{Duration, Instant};

/// A connection is silent if nothing came for so long, and for as many times the usual time to the first byte.
const SILENT: Duration = Duration::from_secs(1);
const FIRST_BYTES: u32 = 4;
/// A new connection is one too many if there is no answer on it for so long, and for as many times the usual time.
const QUEUED: Duration = Duration::from_millis(250);
/// A part is taken away if it comes so much earlier elsewhere.
const GAIN: Duration = Duration::from_millis(150);
/// The rate of a connection is known after so long. Before that it is taken to be the usual one: a server, or this process, may
/// just not have had a processor.
const OBSERVED: Duration = Duration::from_secs(1);
/// Bytes on their way when a connection is closed: they come twice. Once they are a hundredth of all, a move must gain
/// `MUCH`.
const ON_ITS_WAY: u64 = 4 << 20;
const MUCH: Duration = Duration::from_secs(1);
/// And if its connection needs so many times as long as the others on average.
const SLOWER: f64 = 2.0;
/// One of so many requests may be a straggler, beyond the first few.
const ONE_OF: u64 = 20;
const FIRST_FEW: u64 = 8;
/// How often one read changes its connection for this reason.
const MOST_MOVES: u32 = 2;

/// Whether the server has never answered on this connection, and should. Some let connections wait that are too many for
/// them, until others are closed.
fn is_queued<S: WireEnd>(link: &Link<S>) -> bool {
    !link.reused && link.is_unanswered()
}

impl<W: Wires> Net<W> {
    /// Has what stragglers miss asked for elsewhere.
    pub(super) fn mend_stragglers(&mut self, now: Instant) {
        self.leave_silent(now);
        while self.waiting.len() == 0 && self.has_free() && self.split_slowest(now) {}
    }

    /// Whether something could be asked for at once, or on a new connection.
    fn has_free(&self) -> bool {
        self.links.len() < self.limit() || self.links.count(LinkState::Idle) > 0
    }

    /// If there are more connections than there may be, closes new ones that the server does not answer on.
    pub(super) fn leave_queued(&mut self, now: Instant) {
        let patience = QUEUED.max(self.pace.first_byte() * FIRST_BYTES);
        let is_late = |link: &Link<_>| is_queued(link) && now.duration_since(link.asked_at) >= patience;
        while self.links.len() > self.limit() {
            let Some((_, link)) = self.links.take_where(is_late) else { return };
            lock(&self.counts).moved += 1;
            let fetch = self.leave(link, now);
            self.back(fetch);
        }
    }

    fn may_move(&self) -> bool {
        self.stragglers < FIRST_FEW + self.asked / ONE_OF
    }

    /// Closes silent connections while others bring bytes, or while nothing is asked on one that has been answered on.
    fn leave_silent(&mut self, now: Instant) {
        let [silent, queued] = [SILENT, QUEUED].map(|least| least.max(self.pace.first_byte() * FIRST_BYTES));
        let last = self.last;
        let idle = self.links.iter().filter(|(_, link)| link.state == LinkState::Idle && link.reused);
        let answering: Vec<Server> = idle.map(|(_, link)| link.server.clone()).collect();
        loop {
            let may_move = self.may_move();
            let is_silent = |link: &Link<_>| {
                let moves = link.fetch.iter().flat_map(|fetch| &fetch.reads).map(|read| read.moves).max();
                let is_alone = last < link.last + silent / 2;
                let since = now.duration_since(link.last);
                let is_queued = is_queued(link) && answering.contains(&link.server) && since >= queued;
                let is_straggler = link.is_busy() && !link.is_held && may_move && !is_alone && moves < Some(MOST_MOVES);
                is_queued || (is_straggler && since >= silent)
            };
            let Some((_, mut link)) = self.links.take_where(is_silent) else { return };
            self.stragglers += u64::from(!is_queued(&link));
            link.fetch.iter_mut().flat_map(|fetch| &mut fetch.reads).for_each(|read| read.moves += 1);
            lock(&self.counts).moved += 1;
            let fetch = self.leave(link, now);
            self.back(fetch);
        }
    }

    /// Takes a part away from the slowest connection, if it is much slower than the others. Whether it did.
    fn split_slowest(&mut self, now: Instant) -> bool {
        let usual = self.pace.rate();
        if usual <= 0.0 || !self.may_move() {
            return false;
        }
        // Seconds until a connection has brought what it was asked for.
        let due = |link: &Link<_>| -> Option<f64> {
            let fetch = link.fetch.as_ref().filter(|_| link.state == LinkState::Body)?;
            let taken = now.duration_since(link.answered_at?).as_secs_f64();
            let is_known = link.got > 0 && taken >= OBSERVED.as_secs_f64();
            let rate = if is_known { link.got as f64 / taken } else { usual };
            Some(fetch.wanted() as f64 / rate)
        };
        let all: Vec<(usize, f64)> = self.links.iter().filter_map(|(n, link)| Some((n, due(link)?))).collect();
        let Some(&(slowest, longest)) = all.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else { return false };
        let others = (all.len() - 1).max(1) as f64;
        let mean = (all.iter().map(|found| found.1).sum::<f64>() - longest) / others;
        let gain = longest / 2.0 - self.pace.first_byte().as_secs_f64();
        let is_cheap = (self.stragglers + 1) * ON_ITS_WAY <= lock(&self.counts).received / 100;
        let least = if is_cheap { GAIN } else { MUCH };
        if longest < SLOWER * mean || gain < least.as_secs_f64() {
            return false;
        }
        let link = self.links.iter_mut().find(|(number, _)| *number == slowest);
        let fetch = link.and_then(|(_, link)| link.fetch.as_mut());
        let Some(mut part) = fetch.and_then(RangeRequest::split) else { return false };
        part.reads.iter_mut().for_each(|read| read.moves += 1);
        self.stragglers += 1;
        lock(&self.counts).moved += 1;
        self.back(Some(part));
        true
    }
}
