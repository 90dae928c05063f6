//! Ends what loads leave in a process for the next one. Nothing of it is needed: the next load makes everything anew.

use super::leased::Leased;
use crate::device::gpu;
use crate::error::Result;
use crate::store;
use std::time::{Duration, Instant};

/// Threads that read ahead are told for this long, also if nobody waits for them.
const TOLD: Duration = Duration::from_millis(10);

/// Longer waits are cut to this: a clock cannot count to `Duration::MAX`.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Ends fills of the page cache (with `reason`), writes of the disk cache, threads that read ahead, open files, leases that hand out nothing more,
/// knowledge about servers, and idle staging memory with its registrations. Waits for `patience` at most, and up
/// to 2 s more for a driver that registers memory. Tells how many bytes were given back.
///
/// Loads that run go on: the caller checks first that none runs. Threads that were told to end may do so a moment
/// later.
///
/// # Errors
/// A page of a leased mapping cannot become private: the errors of [`Leased::settle`].
pub fn quiesce(reason: &str, patience: Duration) -> Result<u64> {
    let until = Instant::now() + patience.min(LONGEST);
    let left = || until.saturating_duration_since(Instant::now());
    store::stop_fills(reason, left());
    store::stop_cache_work(left());
    // A thread is told within its wait.
    store::stop_reading_ahead(left().max(TOLD));
    store::close_kept();
    store::forget_stores();
    let settled = Leased::settle_all(left());
    let given_back = gpu::release_staging();
    settled.map(|()| given_back)
}
