//! What a load did and what it waited for.

use crate::engine::Wait;
use crate::schedule::Route;
use crate::source::Fallback;
use std::time::Duration;

/// Bytes and I/Os of one route.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RouteTotals {
    /// Bytes that arrived, slack and gaps included.
    pub bytes: u64,
    /// Extents: I/Os asked for.
    pub extents: u64,
}

/// Time spent waiting, by what was waited for.
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
    pub(crate) fn add(&mut self, wait: Wait, time: Duration) {
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

/// The account of one load. Times are in seconds of wall clock unless they say otherwise; GB are 1e9 bytes.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// From the call to the last byte in place.
    pub seconds: f64,
    /// Of these, until the first read was submitted: residency, layout, schedule.
    pub plan_seconds: f64,
    /// From the call until the first want in hand-out order was ready.
    pub first_tensor_seconds: Option<f64>,
    /// CPU seconds of the whole process meanwhile, other threads of the program included.
    pub cpu_seconds: f64,
    /// CPU seconds of the engine thread alone.
    pub engine_cpu_seconds: f64,
    /// Wanted bytes.
    pub nbytes: u64,
    /// Wants.
    pub tensors: u64,
    /// By route, in the order mapped, buffered, direct.
    pub routes: [RouteTotals; 3],
    /// Bytes read only because O_DIRECT reads whole sectors.
    pub slack_bytes: u64,
    /// Unwanted bytes between wanted ones, read because skipping them would have cost more.
    pub gap_bytes: u64,
    /// Bytes in the page cache at the start, between the first and the last wanted byte of each file.
    pub resident_bytes: u64,
    /// System calls it took to find that out.
    pub residency_probes: u64,
    /// Bytes in the page cache that are mapped but have no page table entries yet, because making them would have taken
    /// longer than the rest of the load: the first touch of each page is a minor fault, as with any mapping.
    pub first_touch_bytes: u64,
    /// Most staging memory in use by this process during the load, in bytes.
    pub peak_staging: u64,
    /// Routes that were refused, and what took their place.
    pub fallbacks: Vec<Fallback>,
    /// What the engine waited for, and how long.
    pub waits: Waits,
    /// The stage that bounded the load: "source", "device", "staging", "consumer", "allocation", or "engine" where it
    /// hardly waited at all.
    pub bottleneck: &'static str,
    /// What becomes of the page cache: "keep" or "bypass".
    pub cache: &'static str,
    /// Why that was chosen.
    pub cache_reason: String,
}

impl Report {
    pub(crate) fn count(&mut self, route: Route, bytes: u64) {
        let totals = &mut self.routes[route as usize];
        totals.bytes += bytes;
        totals.extents += 1;
    }

    /// Names the stage that the engine waited for longest; the engine itself where it was busy longer than that.
    pub(crate) fn find_bottleneck(&mut self, busy: Duration) {
        let w = &self.waits;
        let stages = [
            ("source", w.source),
            ("device", w.device),
            ("staging", w.staging),
            ("consumer", w.consumer),
            ("allocation", w.allocation),
            ("engine", busy),
        ];
        self.bottleneck = stages.into_iter().max_by_key(|s| s.1).map_or("engine", |s| s.0);
    }
}
