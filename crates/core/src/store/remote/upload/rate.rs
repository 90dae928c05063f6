//! The most bytes sent in a second, by all threads of a save.

use crate::sync::{lock, Mutex};
use std::time::{Duration, Instant};

/// Bytes that may be sent at once after a pause: what goes in so long.
const BURST: f64 = 0.05;
/// Fewer bytes are not sent: calls for a few bytes each would cost more than they bring.
const LEAST: f64 = (16 << 10) as f64;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct SendRate {
    /// Bytes per second; `None`: no limit.
    rate: Option<f64>,
    state: Mutex<(f64, Instant)>,
}

impl SendRate {
    pub(super) fn new(rate: Option<u64>) -> SendRate {
        SendRate { rate: rate.map(|rate| rate.max(1) as f64), state: Mutex::new((0.0, Instant::now())) }
    }

    /// How many of `most` bytes may be sent now; `Err`: none before so long.
    pub(super) fn take(&self, most: usize, now: Instant) -> Result<usize, Duration> {
        let Some(rate) = self.rate else { return Ok(most) };
        let mut state = lock(&self.state);
        let (there, since) = *state;
        let full = (rate * BURST).max(4.0 * LEAST);
        let there = (there + now.saturating_duration_since(since).as_secs_f64() * rate).min(full);
        let wanted = (most as f64).min(LEAST);
        let taken = if there < wanted { 0.0 } else { there.min(most as f64).floor() };
        *state = (there - taken, since.max(now));
        match taken {
            0.0 => Err(Duration::from_secs_f64((wanted - there) / rate)),
            taken => Ok(taken as usize),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_more_goes_than_the_rate_allows() {
        let limit = SendRate::new(Some(1 << 20));
        let begun = Instant::now() + Duration::from_secs(1);
        let (mut now, mut sent) = (begun, 0);
        while now < begun + Duration::from_secs(10) {
            match limit.take(300 << 10, now) {
                Ok(bytes) => sent += bytes,
                Err(wait) => now += wait + Duration::from_micros(1),
            }
        }
        let most = (10 << 20) + (128 << 10);
        assert!((most - (512 << 10)..=most).contains(&sent), "{sent}");
        assert_eq!(SendRate::new(None).take(7, begun), Ok(7));
        let last = SendRate::new(Some(1 << 20));
        assert_eq!(last.take(5, begun), Ok(5), "the last bytes need no more than they are");
    }
}
