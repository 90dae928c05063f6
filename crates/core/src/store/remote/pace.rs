//! How many connections there are: more while more bring more, fewer when a server asks for less.

use std::time::{Duration, Instant};

/// The rate is judged once in so long, at least: bytes come in bursts.
const PERIOD: Duration = Duration::from_millis(250);
/// The same in times to the first byte: what a new connection brings is seen that late.
const FIRST_BYTES: u32 = 4;
/// More connections have to bring so much more.
const GAIN: f64 = 1.1;
/// How long a number of connections is kept that was not worth more.
const HOLD: Duration = Duration::from_secs(4);
/// If the thread waits less than this share of the time, it is the limit, and not the network.
const LEAST_WAITING: f64 = 0.1;
/// Fewest connections, whatever a server asks for.
const LEAST: usize = 2;
/// How much one measurement moves an average.
const WEIGHT: f64 = 0.2;

/// What the connections bring, and how many there may be.
#[derive(Debug)]
pub(super) struct ConnectionPace {
    limit: usize,
    most: usize,
    /// When this period began, the bytes that came in it, and the time that the thread waited.
    since: Instant,
    bytes: u64,
    waited: Duration,
    /// The part of that time in which every connection was busy.
    full: Duration,
    /// The number of connections before it last grew, and their rate in bytes per second.
    before: Option<(usize, f64)>,
    /// Until when it does not grow.
    hold: Option<Instant>,
    /// When a server last asked for less.
    slowed: Option<Instant>,
    /// Averages: the time to the first byte, and the rate of one connection in bytes per second.
    first_byte: Duration,
    rate: f64,
}

impl ConnectionPace {
    /// Begins with `first` connections, and never has more than `most`.
    pub(super) fn new(first: usize, most: usize, now: Instant) -> ConnectionPace {
        let most = most.max(1);
        let limit = first.clamp(1, most);
        let (bytes, waited, full, before, hold, slowed) = (0, Duration::ZERO, Duration::ZERO, None, None, None);
        let (first_byte, rate) = (Duration::ZERO, 0.0);
        ConnectionPace { limit, most, since: now, bytes, waited, full, before, hold, slowed, first_byte, rate }
    }

    /// Most connections now.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    pub(super) fn first_byte(&self) -> Duration {
        self.first_byte
    }

    /// Bytes per second of one connection; 0 as long as that is not known.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// A request brought `bytes`: the first after `first_byte`, the others in `rest`.
    pub(super) fn served(&mut self, first_byte: Duration, bytes: u64, rest: Duration) {
        self.first_byte = match self.first_byte {
            Duration::ZERO => first_byte,
            known => known.mul_f64(1.0 - WEIGHT) + first_byte.mul_f64(WEIGHT),
        };
        if !rest.is_zero() {
            let rate = bytes as f64 / rest.as_secs_f64();
            self.rate = if self.rate == 0.0 { rate } else { self.rate * (1.0 - WEIGHT) + rate * WEIGHT };
        }
    }

    /// The thread has waited so long, and so many bytes came. `is_full`: all connections were busy. If they were not always,
    /// or waited for places, the rate says nothing about their number.
    pub(super) fn turned(&mut self, waited: Duration, bytes: u64, is_full: bool) {
        self.waited += waited;
        self.bytes += bytes;
        self.full += if is_full { waited } else { Duration::ZERO };
    }

    /// A server asks for less.
    pub(super) fn slow_down(&mut self, now: Instant) {
        // Requests that were sent together are refused together: that is said once.
        if self.slowed.is_none_or(|then| now.duration_since(then) >= HOLD / 2) {
            self.limit = (self.limit / 2).clamp(LEAST.min(self.most), self.most);
            self.slowed = Some(now);
        }
        self.hold = Some(now + HOLD);
        self.begin(now);
        self.before = None;
    }

    /// A server takes no more than `connections`.
    pub(super) fn is_refused(&mut self, connections: usize, now: Instant) {
        self.limit = self.limit.min(connections.max(1));
        self.hold = Some(now + HOLD);
        self.begin(now);
        self.before = None;
    }

    /// Judges a period that is over.
    pub(super) fn judge(&mut self, now: Instant) {
        let period = now.duration_since(self.since);
        if period < PERIOD.max(self.first_byte * FIRST_BYTES) {
            return;
        }
        let rate = self.bytes as f64 / period.as_secs_f64();
        let is_full = self.full >= self.waited / 2;
        let is_network = is_full && self.waited.as_secs_f64() >= LEAST_WAITING * period.as_secs_f64();
        if is_network && self.bytes > 0 {
            match self.before {
                // It was not worth it.
                Some((fewer, then)) if rate < then * GAIN => {
                    (self.limit, self.before, self.hold) = (fewer, None, Some(now + HOLD));
                }
                _ if self.hold.is_some_and(|until| until > now) => {}
                _ if self.limit < self.most => {
                    self.before = Some((self.limit, rate));
                    self.limit = (self.limit * 2).min(self.most);
                    self.hold = None;
                }
                _ => self.before = None,
            }
        }
        self.begin(now);
    }

    fn begin(&mut self, now: Instant) {
        (self.since, self.bytes, self.waited, self.full) = (now, 0, Duration::ZERO, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of connections after so many periods in which they bring `rate(connections)` bytes a second.
    fn after(
        pace: &mut ConnectionPace,
        now: &mut Instant,
        periods: u32,
        rate: impl Fn(usize) -> f64,
        waits: f64,
    ) -> usize {
        for _ in 0..periods {
            *now += PERIOD;
            pace.turned(PERIOD.mul_f64(waits), (rate(pace.limit()) * PERIOD.as_secs_f64()) as u64, true);
            pace.judge(*now);
        }
        pace.limit()
    }

    #[test]
    fn connections_grow_while_the_rate_does() {
        let mut now = Instant::now();
        let link = |most: f64| move |connections: usize| (connections as f64 * 8e6).min(most);
        let mut pace = ConnectionPace::new(16, 256, now);
        assert_eq!(after(&mut pace, &mut now, 4, link(1e12), 0.9), 256);
        // 100 of them fill this link: 64 do not, 128 do.
        let mut pace = ConnectionPace::new(16, 256, now);
        assert_eq!(after(&mut pace, &mut now, 8, link(800e6), 0.9), 128);
        // After a while it looks again, and stays.
        assert_eq!(after(&mut pace, &mut now, 40, link(800e6), 0.9), 128);
        // The thread is the limit.
        let mut pace = ConnectionPace::new(16, 256, now);
        assert_eq!(after(&mut pace, &mut now, 8, link(1e12), 0.05), 16);
        // There is not enough to ask for.
        for _ in 0..8 {
            now += PERIOD;
            pace.turned(PERIOD, 1 << 30, false);
            pace.judge(now);
            assert_eq!(pace.limit(), 16);
        }
    }

    #[test]
    fn a_server_that_asks_for_less_gets_less() {
        let mut now = Instant::now();
        let mut pace = ConnectionPace::new(64, 256, now);
        for _ in 0..64 {
            pace.slow_down(now);
        }
        assert_eq!(pace.limit(), 32, "64 refusals at once are one");
        assert_eq!(after(&mut pace, &mut now, 15, |n| n as f64 * 8e6, 0.9), 32, "it does not grow for a while");
        assert!(after(&mut pace, &mut now, 10, |n| n as f64 * 8e6, 0.9) > 32);
        now += HOLD;
        for _ in 0..20 {
            now += HOLD;
            pace.slow_down(now);
        }
        assert_eq!(pace.limit(), LEAST);
        pace.is_refused(1, now);
        assert_eq!(pace.limit(), 1);
    }
}
