//! How many connections there are: more while more bring more, fewer when a server asks for less.
//!
//! The constants are from servers of one virtual machine, behind netem. `make bench-web` against real object stores can
//! change or remove this controller: a fixed number would do if it is as fast there. `storage={"connections": N}` is the
//! most; `connections` of 16 or less switch growth off.

use std::time::{Duration, Instant};

/// The rate is judged once in so long, at least: bytes come in bursts.
const PERIOD: Duration = Duration::from_millis(160);
/// The same in times to the first byte: what a new connection brings is seen that late.
const FIRST_BYTES: u32 = 4;
/// Twice as many connections have to bring so much more, and other numbers in proportion.
const GAIN: f64 = 0.1;
/// How long a number of connections is kept, after more were too many for the first time.
const HOLD: Duration = Duration::from_secs(4);
/// After a server has asked for less, the number grows by one of so many.
const STEP: usize = 8;
/// Up to so many times, what came of it doubles the time for which a number is kept, to 32 s.
const MOST_DOUBLED: u32 = 3;
/// If the thread waits less than this share of the time, it is the limit, and not the network.
const LEAST_WAITING: f64 = 0.1;
/// Fewest connections, whatever a server asks for.
const LEAST: usize = 2;
/// How much one measurement moves an average.
const WEIGHT: f64 = 0.2;

/// The rate of the connections, and how many there may be.
#[derive(Debug)]
pub(super) struct ConnectionPace {
    limit: usize,
    most: usize,
    /// When this period began, and whether its first half is over: what new connections bring is not seen before that.
    since: Instant,
    settled: bool,
    /// When its second half began, the bytes that came since, and the time that the thread waited.
    measured: Instant,
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
    /// How often one has.
    refusals: u32,
    /// How often more were not worth it.
    in_vain: u32,
    /// Averages: the time to the first byte, and the rate of one connection in bytes per second.
    first_byte: Duration,
    rate: f64,
}

impl ConnectionPace {
    /// Begins with `first` connections, and never has more than `most`.
    pub(super) fn new(first: usize, most: usize, now: Instant) -> ConnectionPace {
        let most = most.max(1);
        ConnectionPace {
            limit: first.clamp(1, most),
            most,
            since: now,
            settled: false,
            measured: now,
            bytes: 0,
            waited: Duration::ZERO,
            full: Duration::ZERO,
            before: None,
            hold: None,
            slowed: None,
            refusals: 0,
            in_vain: 0,
            first_byte: Duration::ZERO,
            rate: 0.0,
        }
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

    /// The first byte of an answer came after so long.
    pub(super) fn answered(&mut self, first_byte: Duration) {
        self.first_byte = match self.first_byte {
            Duration::ZERO => first_byte,
            known => known.mul_f64(1.0 - WEIGHT) + first_byte.mul_f64(WEIGHT),
        };
    }

    /// A request brought `bytes`, in so long after the first.
    pub(super) fn served(&mut self, bytes: u64, rest: Duration) {
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
            // If there were just made more, those are too many.
            let fewer = self.before.map_or(self.limit / 2, |(before, _)| before);
            self.limit = fewer.clamp(LEAST.min(self.most), self.most);
            self.slowed = Some(now);
            self.refusals += 1;
        }
        self.hold = Some(now + held(self.refusals));
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
        let whole = PERIOD.max(self.first_byte * FIRST_BYTES);
        if !self.settled && period >= whole / 2 {
            self.settled = true;
            (self.bytes, self.waited, self.full, self.measured) = (0, Duration::ZERO, Duration::ZERO, now);
        }
        let measured = now.duration_since(self.measured);
        if period < whole || measured < whole / 4 {
            return;
        }
        let rate = self.bytes as f64 / measured.as_secs_f64();
        let is_full = self.full >= self.waited / 2;
        let is_network = is_full && self.waited.as_secs_f64() >= LEAST_WAITING * measured.as_secs_f64();
        if is_network && self.bytes > 0 {
            match self.before {
                // It was not worth it.
                Some((fewer, then)) if rate < then * (1.0 + GAIN * (self.limit - fewer) as f64 / fewer as f64) => {
                    self.in_vain += 1;
                    (self.limit, self.before, self.hold) = (fewer, None, Some(now + held(self.in_vain)));
                }
                _ if self.hold.is_some_and(|until| until > now) => {}
                _ if self.limit < self.most => {
                    self.before = Some((self.limit, rate));
                    // Beyond a number at which a server has asked for less, in small steps.
                    let more = if self.refusals == 0 { self.limit } else { self.limit.div_ceil(STEP) };
                    self.limit = (self.limit + more).min(self.most);
                    self.hold = None;
                }
                _ => self.before = None,
            }
        }
        self.begin(now);
    }

    fn begin(&mut self, now: Instant) {
        (self.since, self.settled) = (now, false);
    }
}

/// How long a number of connections is kept, after more were too many so often.
fn held(times: u32) -> Duration {
    HOLD * (1 << times.saturating_sub(1).min(MOST_DOUBLED))
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
        let half = PERIOD / 2;
        for _ in 0..periods {
            // What comes in its first half is not counted.
            for brings in [0.0, 1.0] {
                *now += half;
                let bytes = rate(pace.limit()) * brings * half.as_secs_f64();
                pace.turned(half.mul_f64(waits), bytes as u64, true);
                pace.judge(*now);
            }
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
            now += PERIOD / 2;
            pace.turned(PERIOD / 2, 1 << 30, false);
            pace.judge(now);
            assert_eq!(pace.limit(), 16);
        }
    }

    #[test]
    fn a_server_that_asks_for_less_gets_less() {
        let mut now = Instant::now();
        let held = (HOLD.as_millis() / PERIOD.as_millis()) as u32;
        let mut pace = ConnectionPace::new(64, 256, now);
        for _ in 0..64 {
            pace.slow_down(now);
        }
        assert_eq!(pace.limit(), 32, "64 refusals at once are one");
        assert_eq!(after(&mut pace, &mut now, held - 1, |n| n as f64 * 8e6, 0.9), 32, "it does not grow for a while");
        assert!(after(&mut pace, &mut now, 4, |n| n as f64 * 8e6, 0.9) > 32);
        let grown = pace.limit();
        assert!(grown < 64, "in small steps: {grown}");
        pace.slow_down(now);
        let before = pace.limit();
        assert!(before > grown / 2, "back by one step: {before} after {grown}");
        assert_eq!(after(&mut pace, &mut now, 2 * held - 1, |n| n as f64 * 8e6, 0.9), before, "and kept for longer");
        for _ in 0..20 {
            now += HOLD;
            pace.slow_down(now);
        }
        assert_eq!(pace.limit(), LEAST);
        pace.is_refused(1, now);
        assert_eq!(pace.limit(), 1);
    }
}
