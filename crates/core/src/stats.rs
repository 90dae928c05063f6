//! The report of a load: its work and its waits.

use crate::engine::Wait;
use crate::extent::{ByLane, Lane};
use crate::fallback::Fallback;
use crate::store::{CacheFill, CacheProgress, Traffic};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Time spent waiting, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// For the storage.
    pub source: Duration,
    /// For the device to take what was read.
    pub device: Duration,
    /// For staging memory that other loads held.
    pub staging: Duration,
    /// For the consumer of a stream to take what was ready.
    pub consumer: Duration,
    /// For block memory from the caller.
    pub allocation: Duration,
}

impl Waits {
    /// Each cause as reports spell it.
    pub fn by_name(&self) -> [(&'static str, Duration); 5] {
        [
            ("source", self.source),
            ("device", self.device),
            ("staging", self.staging),
            ("consumer", self.consumer),
            ("allocation", self.allocation),
        ]
    }

    fn add(&mut self, wait: Wait, time: Duration) {
        match wait {
            Wait::Source => self.source += time,
            Wait::Device => self.device += time,
            Wait::Slabs => self.staging += time,
            Wait::Consumer => self.consumer += time,
            Wait::Allocation => self.allocation += time,
            Wait::Nothing => {}
        }
    }
}

/// While reads and copies are both in flight, it is not known yet which of them is slower: as long as the staging
/// memory (256 MiB) fills, the source is never idle, however slow the device is. So that time is held back until one of
/// them has nothing to do.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    waits: Waits,
    /// Time with reads and copies in flight that is not charged yet.
    undecided: Duration,
    /// Time since then with nothing left to read and copies in flight.
    drained: Duration,
}

/// After the last read, copies that continue for this share of the time before are a backlog. Shorter ones are not:
/// several workers finish together, and a device needs time to report a copy.
const BACKLOG: u32 = 20;

impl Tally {
    /// `time` was spent waiting, with so many reads and copies in flight.
    pub(crate) fn add(&mut self, wait: Wait, reads: usize, copies: usize, time: Duration) {
        match wait {
            Wait::Source if copies > 0 => {
                self.undecided += time;
                return;
            }
            // The device had taken everything.
            Wait::Source => self.settle(Wait::Source),
            // The staging memory is full of bytes that were read.
            Wait::Device if reads > 0 => self.settle(Wait::Device),
            Wait::Device => {
                self.drained += time;
                if self.drained * BACKLOG >= self.undecided {
                    self.settle(Wait::Device);
                }
            }
            _ => {}
        }
        self.waits.add(wait, time);
    }

    fn settle(&mut self, wait: Wait) {
        self.waits.add(wait, std::mem::take(&mut self.undecided));
        self.drained = Duration::ZERO;
    }

    /// All waits together.
    pub(crate) fn waits(&mut self) -> Waits {
        self.settle(Wait::Source);
        self.waits
    }
}

/// Bytes that are read and that nobody wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unwanted {
    /// Only because O_DIRECT reads whole sectors.
    pub slack: u64,
    /// Between wanted ones, because skipping them would have cost more.
    pub gap: u64,
    /// Gap bytes by the number of the tensor that they are in, or come behind. Tensors without any are left
    /// out.
    pub of_tensors: BTreeMap<u32, u64>,
}

impl Unwanted {
    pub(crate) fn and(mut self, more: Unwanted) -> Unwanted {
        self.slack += more.slack;
        self.gap += more.gap;
        more.of_tensors.into_iter().for_each(|(tensor, bytes)| *self.of_tensors.entry(tensor).or_default() += bytes);
        self
    }
}

/// Bytes that a rank has exchanged with the others.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExchangeReport {
    /// How many ranks, this one included.
    pub ranks: usize,
    /// Bytes that this rank has read and other ranks have got: those that two others want count twice.
    pub sent: u64,
    /// The part of it that ranks of this machine have taken out of this rank's slabs. The rest went through sockets.
    pub lent: u64,
    /// The kind of pages that the lent slabs have (`"4 KiB"`, `"huge"`); `None`: nothing was lent.
    pub shared_pages: Option<&'static str>,
    /// Wanted bytes that others have read, and sent or lent.
    pub received: u64,
    /// The result of the trial: seconds for a megabyte (1e6 bytes) that several ranks want, read by each of these, and
    /// read by one and sent. `None` if they did not try.
    pub tried: Option<[f64; 2]>,
    /// The first of the two again, when they looked last how long it takes; `None` if they did not look again.
    pub later: Option<f64>,
    /// Whether they exchange what several of them want. If they tried, what came before they settled on it does not count.
    pub exchanged: bool,
    /// The reason, if they did not try.
    pub reason: &'static str,
}

/// The report of one load. Times are in seconds of wall clock unless the field says otherwise; GB are 1e9 bytes.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// From the call to the last byte in place.
    pub seconds: f64,
    /// The part of it before the first read was submitted: residency, layout, schedule.
    pub plan_seconds: f64,
    /// From the call until the first want in hand-out order was ready.
    pub first_tensor_seconds: Option<f64>,
    /// CPU seconds of the whole process during the load, other threads of the program included.
    pub cpu_seconds: f64,
    /// CPU seconds of the engine thread alone.
    pub engine_cpu_seconds: f64,
    /// Wanted bytes.
    pub nbytes: u64,
    /// Wants.
    pub tensors: u64,
    /// By lane.
    pub routes: ByLane,
    /// Extents that came by another lane than planned: after a refusal, or as the pace of the storage decided.
    pub rerouted_extents: u64,
    /// Bytes that were read and that nobody wants.
    pub unwanted: Unwanted,
    /// Holes between two wanted runs were read, not skipped, up to this many bytes; of several files the largest.
    pub gap_limit: u64,
    /// Bytes in the page cache when the load began, between the first and the last wanted byte of each file.
    pub resident_bytes: u64,
    /// System calls for finding that out.
    pub residency_probes: u64,
    /// Bytes that were in the page cache and are mapped, gaps included, but have no page table entries yet. The first
    /// touch of each page is a minor fault, as with any mapping.
    pub first_touch_bytes: u64,
    /// Seconds that the first touch of all of these will take one thread: an estimate from at most 128 pages. `None` if
    /// there is no estimate.
    pub first_touch_seconds: Option<f64>,
    /// Pages that the load has touched after the disk had filled them.
    pub touched_pages: u64,
    /// System calls for that.
    pub touch_calls: u64,
    /// Most staging memory that this load held at once, in bytes.
    pub peak_staging: u64,
    /// Routes that were refused, and what replaced them.
    pub fallbacks: Vec<Fallback>,
    /// The waits of the engine, and how long they took.
    pub waits: Waits,
    /// The exchange with other ranks; `None` for a load alone.
    pub exchange: Option<ExchangeReport>,
    /// The exchange with servers; `None` if no file is on one.
    pub network: Option<Traffic>,
    /// The work of the disk cache, which goes on after the load; `None` without one.
    pub disk_cache: Option<Arc<CacheProgress>>,
    /// The stage that limited the load: "source", or "network" if most of its bytes came from servers; "device", "staging",
    /// "consumer", "allocation", or "engine" if the engine hardly waited.
    pub bottleneck: &'static str,
    /// The use of the page cache: "keep", "bypass", or "fill" if cold bytes were read past it and it is filled
    /// after the load.
    pub cache: &'static str,
    /// The reason of that choice.
    pub cache_reason: String,
    /// The fill of the page cache, if `cache` is "fill".
    pub cache_fill: Option<CacheFill>,
}

impl Report {
    /// Names the stage that the engine waited for longest. If the engine was busy longer than that, it names the
    /// engine.
    pub(crate) fn find_bottleneck(&mut self, busy: Duration) {
        let stages = self.waits.by_name().into_iter().chain([("engine", busy)]);
        self.bottleneck = stages.max_by_key(|s| s.1).map_or("engine", |s| s.0);
        let read = self.routes.sum().bytes - self.routes.of(Lane::RANK).bytes;
        if self.bottleneck == "source" && self.network.is_some_and(|traffic| traffic.received > read / 2) {
            self.bottleneck = "network";
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The waits of a load with these waits: who, reads and copies in flight, milliseconds.
    fn waits(of: &[(Wait, usize, usize, u32)]) -> Waits {
        let mut tally = Tally::default();
        of.iter().for_each(|&(wait, reads, copies, ms)| tally.add(wait, reads, copies, ms * MS));
        tally.waits()
    }

    #[test]
    fn a_device_that_never_runs_dry_is_charged_with_the_time_in_which_staging_filled() {
        let found = waits(&[(Wait::Source, 16, 0, 2), (Wait::Source, 16, 3, 90), (Wait::Device, 0, 12, 30)]);
        assert_eq!((found.source, found.device), (2 * MS, 120 * MS));
        // Where staging is full, that is known before the end.
        let full = waits(&[(Wait::Source, 16, 3, 90), (Wait::Device, 4, 60, 5), (Wait::Source, 16, 0, 7)]);
        assert_eq!((full.source, full.device), (7 * MS, 95 * MS));
    }

    #[test]
    fn a_source_that_the_device_waits_for_is_charged_with_all_of_it() {
        let found = waits(&[
            (Wait::Source, 16, 1, 8),
            (Wait::Source, 16, 0, 2),
            (Wait::Source, 16, 1, 8),
            (Wait::Source, 16, 0, 2),
            (Wait::Device, 0, 1, 8),
        ]);
        assert_eq!((found.source, found.device), (20 * MS, 8 * MS));
    }

    #[test]
    fn copies_that_overlap_are_no_backlog_if_the_last_of_them_end_soon_after_the_last_read() {
        let found = waits(&[(Wait::Source, 16, 4, 100), (Wait::Device, 0, 4, 2), (Wait::Device, 0, 1, 1)]);
        assert_eq!((found.source, found.device), (100 * MS, 3 * MS));
    }

    #[test]
    fn other_waits_are_what_they_are() {
        let found = waits(&[
            (Wait::Consumer, 0, 0, 3),
            (Wait::Allocation, 0, 0, 4),
            (Wait::Slabs, 0, 0, 5),
            (Wait::Nothing, 0, 0, 6),
        ]);
        assert_eq!((found.consumer, found.allocation, found.staging), (3 * MS, 4 * MS, 5 * MS));
        assert_eq!((found.source, found.device), (Duration::ZERO, Duration::ZERO));
    }
}
