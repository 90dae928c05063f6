//! The rate at which somebody brings bytes, while it has something to bring.

use std::time::Duration;

/// After so long, what was measured counts half.
const HALF_LIFE: f64 = 0.5;
/// Time of work from which on a rate is known.
const KNOWN: f64 = 0.2;

/// Bytes, and the time in which they came. Older ones count less.
#[derive(Debug, Default)]
pub(super) struct Meter {
    bytes: f64,
    seconds: f64,
    /// The whole time of work.
    worked: f64,
    at: Duration,
}

impl Meter {
    /// The time has passed until now: it worked, or it had nothing to do.
    pub(super) fn pass(&mut self, now: Duration, works: bool) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        if works {
            let rest = 0.5_f64.powf(passed / HALF_LIFE);
            (self.bytes, self.seconds) = (self.bytes * rest, self.seconds * rest + passed);
            self.worked += passed;
        }
    }

    /// So many bytes came.
    pub(super) fn add(&mut self, bytes: u64) {
        self.bytes += bytes as f64;
    }

    /// True if it worked long enough for a rate.
    pub(super) fn is_known(&self) -> bool {
        self.worked >= KNOWN
    }

    /// Bytes that it brings in so long.
    pub(super) fn bytes_in(&self, time: Duration) -> u64 {
        // The divisor is never less than the time until a rate is known: the first block is no rate.
        (self.bytes / self.seconds.max(KNOWN / 4.0) * time.as_secs_f64()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_time_of_work_and_of_lately() {
        let mut meter = Meter::default();
        let ms = Duration::from_millis;
        for step in 1..=100 {
            meter.pass(ms(10 * step), true);
            meter.add(1000);
        }
        assert!(meter.is_known() && meter.bytes_in(ms(1000)).abs_diff(100_000) < 2_000);
        // It had nothing to do for a minute.
        meter.pass(ms(61_000), false);
        assert!(meter.bytes_in(ms(1000)).abs_diff(100_000) < 2_000);
        for step in 1..=300 {
            meter.pass(ms(61_000 + 10 * step), true);
            meter.add(100);
        }
        assert!(meter.bytes_in(ms(1000)) < 13_000, "{}", meter.bytes_in(ms(1000)));
    }
}
