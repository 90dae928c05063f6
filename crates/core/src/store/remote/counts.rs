//! What a load exchanges with servers, counted while it runs.

use crate::store::object::Traffic;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of one load.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) requests: Counter,
    pub(super) connections: Counter,
    pub(super) retries: Counter,
    pub(super) busy: Counter,
    pub(super) moved: Counter,
    pub(super) received: Counter,
    pub(super) gaps: Counter,
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counts {
    pub(super) fn traffic(&self) -> Traffic {
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
