//! The link model: what a distant server with many clients does to each connection.

use crate::arguments::Arguments;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a paced connection that may be sent late at once. A timer that comes late costs no rate.
const LATE: Duration = Duration::from_millis(50);

/// What is done to connections.
#[derive(Debug, Clone)]
pub(crate) struct LinkModel {
    /// Bytes per second of each connection.
    pub(crate) rate: Option<f64>,
    /// From a request to the first byte of its answer.
    pub(crate) first_byte: Duration,
    /// Connections that are answered at the same time.
    pub(crate) most: Option<usize>,
    /// Whether further ones are told 503; otherwise they wait.
    pub(crate) refuses: bool,
    /// Share of answers that stop in the middle.
    stalled: f64,
    seed: u64,
}

impl LinkModel {
    pub(crate) const OPTIONS: [&'static str; 6] =
        ["rate-per-connection", "first-byte", "most-connections", "over", "stall-percent", "seed"];

    pub(crate) fn from_arguments(arguments: &Arguments) -> Result<LinkModel, String> {
        let rate = arguments.number("rate-per-connection", 0.0)?;
        let first_byte: f64 = arguments.number("first-byte", 0.0)?;
        let first_byte = Duration::try_from_secs_f64(first_byte / 1e3).map_err(|e| format!("--first-byte: {e}"))?;
        let most = arguments.number("most-connections", 0)?;
        let refuses = match arguments.text("over") {
            None | Some("wait") => false,
            Some("refuse") => true,
            Some(other) => return Err(format!("--over: {other:?} is neither wait nor refuse")),
        };
        Ok(LinkModel {
            rate: (rate > 0.0).then_some(rate),
            first_byte,
            most: (most > 0).then_some(most),
            refuses,
            stalled: arguments.number::<f64>("stall-percent", 0.0)? / 100.0,
            seed: arguments.number("seed", 1)?,
        })
    }

    /// Whether the answer of this number stops in its middle for good. The same seed stalls the same numbers.
    pub(crate) fn stalls(&self, number: u64) -> bool {
        // SplitMix64: neighbouring numbers give independent bits.
        let mut z = self.seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let share = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        share < self.stalled
    }

    /// Bytes to send at once: of a paced connection those of 10 ms.
    pub(crate) fn chunk(&self) -> u64 {
        self.rate.map_or(1 << 20, |rate| (rate / 100.0).clamp(4096.0, 1048576.0) as u64)
    }

    /// The pace of one answer, from now on.
    pub(crate) fn pace(&self) -> Pace {
        Pace { rate: self.rate, due: Instant::now() }
    }
}

/// When the next bytes of a connection may leave.
pub(crate) struct Pace {
    rate: Option<f64>,
    due: Instant,
}

impl Pace {
    /// Waits until so many bytes more have had the time that they take.
    pub(crate) fn pass(&mut self, bytes: u64) {
        let Some(rate) = self.rate else { return };
        let now = Instant::now();
        // A client that did not receive gains nothing afterwards
        self.due = self.due.max(now.checked_sub(LATE).unwrap_or(now)) + Duration::from_secs_f64(bytes as f64 / rate);
        if let Some(early) = self.due.checked_duration_since(now) {
            std::thread::sleep(early);
        }
    }
}

/// Places for connections that are answered at the same time.
#[derive(Default)]
pub(crate) struct Places {
    taken: Mutex<usize>,
    free: Condvar,
}

/// A place, until it is dropped.
pub(crate) struct Place<'a>(&'a Places);

impl Places {
    /// A place among so many; `None` if all are taken and the link model refuses.
    pub(crate) fn take(&self, link: &LinkModel) -> Option<Place<'_>> {
        let mut taken = self.taken();
        while link.most.is_some_and(|most| *taken >= most) {
            if link.refuses {
                return None;
            }
            taken = self.free.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += 1;
        Some(Place(self))
    }

    fn taken(&self) -> MutexGuard<'_, usize> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.taken() -= 1;
        self.0.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(options: &[&str]) -> LinkModel {
        let given = options.iter().map(|one| (*one).to_owned());
        LinkModel::from_arguments(&Arguments::parse(given).unwrap()).unwrap()
    }

    #[test]
    fn the_share_of_stalls_is_that_asked_for_and_the_seed_chooses_them() {
        let (one, other) = (model(&["--stall-percent", "1"]), model(&["--stall-percent", "1", "--seed", "2"]));
        let stalled = |link: &LinkModel| (0..100_000).filter(|&n| link.stalls(n)).collect::<Vec<_>>();
        assert!((900..1100).contains(&stalled(&one).len()), "{}", stalled(&one).len());
        assert_eq!(stalled(&one), stalled(&one.clone()));
        assert_ne!(stalled(&one), stalled(&other));
        assert!(stalled(&model(&[])).is_empty());
    }

    #[test]
    fn a_pace_gives_no_byte_before_its_time() {
        let mut pace = model(&["--rate-per-connection", "1e6"]).pace();
        let begun = Instant::now();
        for _ in 0..10 {
            pace.pass(10_000);
        }
        assert!(begun.elapsed() >= Duration::from_millis(100) - LATE);
    }

    #[test]
    fn places_are_refused_or_waited_for() {
        let places = Places::default();
        let link = model(&["--most-connections", "1", "--over", "refuse"]);
        let first = places.take(&link);
        assert!(first.is_some() && places.take(&link).is_none());
        drop(first);
        assert!(places.take(&link).is_some());
    }
}
