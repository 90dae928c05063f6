//! How many requests are sent in a second, after a server has said that these are too many (429, 503, SlowDown).
//!
//! Fewer connections are not enough: where an answer takes milliseconds, one connection asks hundreds of times in a second.
//! So the first refusal bounds the rate to what the server has taken lately. Further refusals lower it, and time without one
//! raises it again. Requests are sent at random distances, so that many processes together send them evenly.

use crate::store::remote::http::jitter::Jitter;
use std::time::{Duration, Instant};

/// Requests that are refused in so long count once: they were sent at the same rate.
const EPOCH: Duration = Duration::from_secs(1);
/// The part of the rate that a further refusal leaves.
const LESS: f64 = 0.8;
/// By what part the rate grows in a second without a refusal, and by how many requests in a second.
const MORE: (f64, f64) = (0.05, 0.2);
/// After so long without a refusal it grows by more: the server was busy for a while.
const RECOVERED: Duration = Duration::from_secs(4);
const MUCH_MORE: f64 = 1.0;
/// The least, in requests per second: after the first refusal, and after further ones.
const LEAST: (f64, f64) = (4.0, 0.5);
/// A rate that is more than this, and was not refused for a while, is no bound any more.
const FREE: f64 = 200.0;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct RequestRate {
    /// Requests per second; `None`: as many as there are connections for.
    rate: Option<f64>,
    /// When the next request may be sent.
    next: Instant,
    /// When what the server takes was counted from, and how much it was: now, and in the second before.
    counted: (Instant, u32),
    before: f64,
    /// When a refusal last counted, and when the rate last grew.
    refused: Instant,
    grown: Instant,
    jitter: Jitter,
}

impl RequestRate {
    pub(super) fn new(jitter: Jitter, now: Instant) -> RequestRate {
        let (rate, next, counted, before, refused, grown) = (None, now, (now, 0), 0.0, now, now);
        RequestRate { rate, next, counted, before, refused, grown, jitter }
    }

    /// Whether there is a bound.
    pub(super) fn is_bound(&self) -> bool {
        self.rate.is_some()
    }

    /// When the next request may be sent, if there is a bound.
    pub(super) fn due(&self) -> Option<Instant> {
        self.rate.map(|_| self.next)
    }

    /// Whether a request may be sent now.
    pub(super) fn may_send(&self, now: Instant) -> bool {
        self.rate.is_none() || now >= self.next
    }

    /// A request was sent.
    pub(super) fn sent(&mut self, now: Instant) {
        if let Some(rate) = self.rate {
            self.next = self.next.max(now) + self.apart(rate);
        }
    }

    /// From one request to the next.
    fn apart(&mut self, rate: f64) -> Duration {
        let usual = Duration::from_secs_f64(1.0 / rate);
        self.jitter.between(usual / 2, usual * 3 / 2)
    }

    /// The server has taken a request.
    pub(super) fn taken(&mut self, now: Instant) {
        self.roll(now);
        self.counted.1 += 1;
        let Some(rate) = self.rate else { return };
        let since = now.saturating_duration_since(self.grown).as_secs_f64().min(1.0);
        let more = if now.duration_since(self.refused) < RECOVERED { MORE.0 } else { MUCH_MORE };
        let rate = rate + since * (rate * more + MORE.1);
        self.grown = now;
        self.rate = (rate < FREE || now.duration_since(self.refused) < RECOVERED).then_some(rate);
    }

    fn roll(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.counted.0);
        if age >= EPOCH {
            self.before = f64::from(self.counted.1) / age.as_secs_f64();
            self.counted = (now, 0);
        }
    }

    /// The rate that the server took lately, in requests per second.
    fn lately(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.counted.0).as_secs_f64();
        // What came within a moment says little about a second.
        let now = f64::from(self.counted.1) / age.max(EPOCH.as_secs_f64() / 2.0);
        now.max(self.before)
    }

    /// The server has refused a request. How long the reads of it wait, after `tries` in a row: a random time, so that they
    /// come back evenly.
    pub(super) fn refused(&mut self, now: Instant, tries: u32, (least, longest): (Duration, Duration)) -> Duration {
        if self.rate.is_none() || now.duration_since(self.refused) >= EPOCH {
            self.roll(now);
            let lately = self.lately(now);
            let rate = match self.rate {
                None => lately.max(LEAST.0),
                Some(rate) => (rate * LESS).min(lately.max(rate / 2.0)).max(LEAST.1),
            };
            (self.rate, self.refused, self.grown) = (Some(rate), now, now);
        }
        if let Some(rate) = self.rate {
            let apart = self.apart(rate);
            self.next = self.next.max(now + apart.min(longest));
        }
        let most = least.saturating_mul(1 << tries.min(10)).min(longest);
        self.jitter.between(least / 2, most)
    }

    /// A random part of a pause that is usual after a failure: half of it at least, and at most half more.
    pub(super) fn spread(&mut self, usual: Duration) -> Duration {
        self.jitter.between(usual / 2, usual * 3 / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BinaryHeap;

    const TICK: Duration = Duration::from_millis(1);
    const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

    /// The limit of a server on the rate of requests.
    #[derive(Debug, Clone, Copy)]
    enum Limits {
        /// It counts within each second.
        BySecond,
        /// It has a bucket that fills with time.
        Bucket,
    }

    /// Requests that `clients` need 40 of, of a server that takes 200 in a second: how many were sent in all, how long it
    /// took, and how many retries there were in each 100 ms.
    fn served(clients: usize, limits: Limits, seed: u64) -> (u64, f64, Vec<u32>) {
        let begun = Instant::now();
        let (mut sent, mut retries) = (0, Vec::new());
        let (mut second, mut in_second, mut bucket) = (0, 0, 200.0);
        let mut rates: Vec<_> =
            (0..clients).map(|n| RequestRate::new(Jitter::seeded(seed + n as u64), begun)).collect();
        // Requests to be sent for the first time; retries by their time.
        let mut fresh = vec![40; clients];
        let mut paused: Vec<BinaryHeap<std::cmp::Reverse<(Instant, u32)>>> = vec![BinaryHeap::new(); clients];
        let mut now = begun;
        while fresh.iter().any(|left| *left > 0) || paused.iter().any(|waiting| !waiting.is_empty()) {
            now += TICK;
            let elapsed = (now - begun).as_secs_f64();
            assert!(elapsed < 60.0, "{clients} {limits:?}");
            bucket = f64::min(200.0, bucket + 0.2);
            if elapsed as u64 > second {
                (second, in_second) = (elapsed as u64, 0);
            }
            for client in 0..clients {
                // They start within two seconds of each other.
                if elapsed < 2.0 * client as f64 / clients as f64 {
                    continue;
                }
                // Sixteen at a time, in 20 ms.
                for _ in 0..if (now - begun).as_millis() % 20 == 0 { 16 } else { 0 } {
                    let due = paused[client].peek().is_some_and(|next| next.0 .0 <= now);
                    if !(due || fresh[client] > 0) || !rates[client].may_send(now) {
                        break;
                    }
                    let tries = match due {
                        true => paused[client].pop().map_or(0, |next| next.0 .1),
                        false => {
                            fresh[client] -= 1;
                            0
                        }
                    };
                    sent += 1;
                    rates[client].sent(now);
                    if tries > 0 {
                        let at = (elapsed * 10.0) as usize;
                        retries.resize(retries.len().max(at + 1), 0);
                        retries[at] += 1;
                    }
                    let taken = match limits {
                        Limits::BySecond => in_second < 200,
                        Limits::Bucket => bucket >= 1.0,
                    };
                    if taken {
                        (in_second, bucket) = (in_second + 1, bucket - 1.0);
                        rates[client].taken(now);
                    } else {
                        let pause = rates[client].refused(now, tries + 1, PAUSES);
                        paused[client].push(std::cmp::Reverse((now + pause, tries + 1)));
                    }
                }
            }
        }
        (sent, (now - begun).as_secs_f64(), retries)
    }

    /// The most retries in a tenth of a second in 9,999 of 10,000 runs, if `mean` a tenth come at random times
    /// (Poisson).
    fn likely_most(mean: f64, tenths: usize) -> u32 {
        let (mut most, mut chance) = (0, (-mean).exp());
        let mut at_most = chance;
        while tenths as f64 * (1.0 - at_most) > 1e-4 {
            most += 1;
            chance *= mean / f64::from(most);
            at_most += chance;
        }
        most
    }

    #[test]
    fn many_that_ask_too_much_together_send_few_requests_in_vain_and_no_waves_of_them() {
        for limits in [Limits::BySecond, Limits::Bucket] {
            for (clients, seed) in [(24, 1), (24, 1000), (60, 7)] {
                let (sent, seconds, retries) = served(clients, limits, seed);
                let needed = clients as u64 * 40;
                println!("{clients} {limits:?}: {sent} for {needed} in {seconds:.1} s; retries {retries:?}");
                // From two seconds after the last start. Of few retries, chance alone brings more than three times the mean
                // together: with a mean of a third, one is three times as many.
                let later = &retries[40.min(retries.len())..];
                let mean = later.iter().sum::<u32>() as f64 / later.len().max(1) as f64;
                let (most, likely) = (later.iter().copied().max().unwrap_or_default(), likely_most(mean, later.len()));
                println!("mean {mean:.2}, {most} at most in a tenth of a second, {likely} by chance");
                assert!(f64::from(most) <= f64::max(3.0 * mean, f64::from(likely)), "{clients} {limits:?}: {later:?}");
                assert!(sent as f64 <= 1.5 * needed as f64, "{clients} {limits:?}: {sent} requests for {needed}");
                assert!(seconds <= 4.0 * needed as f64 / 200.0 + 10.0, "{clients} {limits:?}: {seconds} s");
            }
        }
    }

    #[test]
    fn one_refusal_bounds_the_rate_to_what_is_taken_and_quiet_makes_it_free_again() {
        let begun = Instant::now();
        let mut rate = RequestRate::new(Jitter::seeded(3), begun);
        let at = |millis: u64| begun + Duration::from_millis(millis);
        (0..50).for_each(|n| rate.taken(at(n * 20)));
        assert!(!rate.is_bound() && rate.may_send(at(1000)));
        for _ in 0..10 {
            rate.refused(at(1000), 1, PAUSES);
        }
        let bound = rate.rate.expect("a bound");
        assert!((25.0..60.0).contains(&bound), "{bound}");
        assert!(!rate.may_send(at(1000)));
        let mut now = 1000;
        while rate.is_bound() {
            now += 20;
            rate.taken(at(now));
            assert!(now < 60_000);
        }
    }
}
