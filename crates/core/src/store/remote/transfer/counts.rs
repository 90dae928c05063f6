//! The traffic of a load with servers, counted while it runs.

use crate::store::object::Traffic;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of one load.
#[derive(Debug, Default)]
pub(in crate::store::remote) struct Counts {
    pub(in crate::store::remote) requests: Counter,
    pub(in crate::store::remote) connections: Counter,
    pub(super) retries: Counter,
    pub(in crate::store::remote) busy: Counter,
    pub(in crate::store::remote) moved: Counter,
    pub(in crate::store::remote) received: Counter,
    pub(super) gaps: Counter,
}

#[derive(Debug, Default)]
pub(in crate::store::remote) struct Counter(AtomicU64);

impl Counter {
    pub(in crate::store::remote) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(in crate::store::remote) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counts {
    pub(in crate::store::remote) fn traffic(&self) -> Traffic {
        let Counts { requests, connections, retries, busy, moved, received, gaps } = self;
        Traffic {
            requests: requests.get(),
            connections: connections.get(),
            retries: retries.get(),
            busy: busy.get(),
            moved: moved.get(),
            received: received.get(),
            gaps: gaps.get(),
        }
    }
}
