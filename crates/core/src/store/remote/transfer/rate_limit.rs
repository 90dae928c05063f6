//! The most bytes received in a second: a bucket that fills with time. While it is empty nothing is received, so TCP's
//! window closes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Fewer bytes are not received: system calls for a few bytes each would cost more than they bring.
const LEAST: f64 = (16 << 10) as f64;
/// The bucket holds what comes in so long.
const BURST: Duration = Duration::from_millis(50);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct RateLimit {
    /// Bytes per second; `None`: as many as come.
    rate: Option<f64>,
    there: f64,
    since: Instant,
    /// Connections that wait for it, the one that waits longest first.
    held: VecDeque<usize>,
}

impl RateLimit {
    pub(super) fn new(bandwidth: Option<u64>, now: Instant) -> RateLimit {
        RateLimit { rate: bandwidth.map(|bytes| bytes.max(1) as f64), there: 0.0, since: now, held: VecDeque::new() }
    }

    fn most(rate: f64) -> f64 {
        (rate * BURST.as_secs_f64()).max(4.0 * LEAST)
    }

    fn fill(&mut self, now: Instant) {
        if let Some(rate) = self.rate {
            let more = now.saturating_duration_since(self.since).as_secs_f64() * rate;
            (self.there, self.since) = ((self.there + more).min(Self::most(rate)), self.since.max(now));
        }
    }

    /// How many bytes may be received now.
    pub(super) fn allowed(&mut self, now: Instant) -> u64 {
        self.fill(now);
        match self.rate {
            None => u64::MAX,
            Some(_) if self.there < LEAST => 0,
            Some(_) => self.there as u64,
        }
    }

    /// So many were received.
    pub(super) fn took(&mut self, bytes: u64) {
        self.there -= if self.rate.is_some() { bytes as f64 } else { 0.0 };
    }

    /// The connection with this number waits until more may be received.
    pub(super) fn hold(&mut self, number: usize) {
        self.held.push_back(number);
    }

    /// How many connections wait.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// The one that has waited longest, if more may be received.
    pub(super) fn next_held(&mut self, now: Instant) -> Option<usize> {
        (self.allowed(now) > 0).then(|| self.held.pop_front()).flatten()
    }

    /// When more may be received, if a connection waits for that.
    pub(super) fn due(&self) -> Option<Instant> {
        let rate = self.rate.filter(|_| !self.held.is_empty())?;
        // Later rather than too early: what is missing then may take no measurable time.
        Some(self.since + Duration::from_secs_f64(((LEAST - self.there) / rate).max(0.0)) + Duration::from_micros(10))
    }

    /// Whether this bounds the load, and not the network.
    pub(super) fn is_limit(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.rate.is_some_and(|rate| self.there < Self::most(rate) / 2.0)
    }
}
