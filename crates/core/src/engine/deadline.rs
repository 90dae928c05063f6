//! When a load ends although something in it hangs. The clock is an argument: nothing here asks for the time.
//!
//! Two rules:
//!
//! - **Stall.** If nothing has moved for the stall timeout, and the load itself had to wait for source, device or slabs,
//!   it fails. A read, a copy or an arrival moves when it starts and when it ends, and a read moves whenever its source
//!   says that bytes have come. Time in which the load waits for its consumer or for the caller's memory does not count.
//! - **Drain.** A load that has failed or was cancelled waits for what is in flight: [`DRAIN`], or the stall timeout if
//!   that is shorter. After that it gives up what still hangs.

use std::time::Duration;

/// Nanoseconds since the load began to run.
pub(crate) type Nanos = u64;

/// `time` in nanoseconds. What does not fit is 584 years, and never passes.
pub(crate) fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A load that has failed waits this long for what is in flight.
pub(super) const DRAIN: Nanos = 2_000_000_000;

/// When something last moved, and when a failed load has to end.
#[derive(Debug)]
pub(super) struct Deadlines {
    stall: Nanos,
    moved: Nanos,
    drained_by: Option<Nanos>,
}

impl Deadlines {
    pub(super) fn new(stall: Nanos) -> Deadlines {
        Deadlines { stall, moved: 0, drained_by: None }
    }

    /// The stall timeout.
    pub(super) fn stall(&self) -> Nanos {
        self.stall
    }

    /// Something moved, or there was nothing to wait for.
    pub(super) fn moved(&mut self, now: Nanos) {
        self.moved = self.moved.max(now);
    }

    /// The load has failed. Only the first failure counts.
    pub(super) fn failed(&mut self, now: Nanos) {
        self.drained_by.get_or_insert(now.saturating_add(DRAIN.min(self.stall)));
    }

    /// When a failed load gives up; `None` if it has not failed.
    pub(super) fn drained_by(&self) -> Option<Nanos> {
        self.drained_by
    }

    /// When the load fails if nothing moves until then.
    pub(super) fn stalls_at(&self) -> Nanos {
        self.moved.saturating_add(self.stall)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn a_load_stalls_after_its_timeout_without_movement() {
        let mut deadlines = Deadlines::new(10 * SECOND);
        assert_eq!((deadlines.stalls_at(), deadlines.drained_by()), (10 * SECOND, None));
        deadlines.moved(3 * SECOND);
        assert_eq!(deadlines.stalls_at(), 13 * SECOND);
        deadlines.moved(SECOND);
        assert_eq!(deadlines.stalls_at(), 13 * SECOND, "time does not go back");
    }

    #[test]
    fn a_failed_load_drains_for_two_seconds_or_less_and_a_second_failure_changes_nothing() {
        for (stall, drain) in [(10 * SECOND, 2 * SECOND), (SECOND / 2, SECOND / 2)] {
            let mut deadlines = Deadlines::new(stall);
            deadlines.failed(SECOND);
            deadlines.failed(2 * SECOND);
            assert_eq!(deadlines.drained_by(), Some(SECOND + drain));
        }
    }

    #[test]
    fn a_timeout_that_is_longer_than_any_clock_never_passes() {
        let mut deadlines = Deadlines::new(nanos(Duration::MAX));
        deadlines.moved(5 * SECOND);
        assert_eq!(deadlines.stalls_at(), Nanos::MAX);
        deadlines.failed(SECOND);
        assert_eq!(deadlines.drained_by(), Some(3 * SECOND));
    }
}
