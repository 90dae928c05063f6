//! The source and the device of a load, and the slabs between them.

use crate::device::{Copied, Device, Fence};
use crate::engine::Slabs;
use crate::error::Result;
use crate::source::{wait_readable, Progress, Read, Source};
use crate::staging::{Share, Staged};
use crate::stats::Report;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Moves bytes from a source to slabs, and by a device from slabs to blocks.
pub(super) struct Transport {
    pub(super) source: Box<dyn Source>,
    /// `None` if everything lands in place.
    pub(super) device: Option<Box<dyn Device>>,
    pub(super) ring: Share,
    /// The read that the engine holds back, because the source had no room for it.
    pub(super) held_back: Option<Read>,
}

impl Transport {
    /// Has all that writes to the caller's memory wait for this fence.
    pub(super) fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.source.wait_for(fence)?;
        self.device.as_mut().map_or(Ok(()), |device| device.wait_for(fence))
    }

    /// Appends what source and device have done.
    pub(super) fn poll(&mut self, events: &mut Vec<Progress>, copied: &mut Vec<Copied>) -> [Result<()>; 2] {
        [self.source.poll(events), self.device.as_mut().map_or(Ok(()), |device| device.poll(copied))]
    }

    /// Sleeps until source, device or `inbox` has something to say, a slab is free if one is wanted, or `timeout` has passed.
    pub(super) fn sleep(&self, inbox: RawFd, wants_slab: bool, timeout: Option<Duration>) {
        // The ring's descriptor is cleared when a slab is requested. So it may stay readable while no slab is wanted (a
        // slab came back after the window closed, or while a failed load drains). It must not wake the thread then.
        let slabs = if wants_slab { self.ring.fd() } else { -1 };
        wait_readable([inbox, self.source.wake(), self.device.as_ref().map_or(-1, |d| d.wake()), slabs], timeout);
    }

    /// Writes into the report what source, device and slabs have done.
    pub(super) fn tell(&mut self, report: &mut Report) {
        report.peak_staging = self.ring.peak();
        report.fallbacks.extend(self.source.take_fallbacks());
        report.fallbacks.extend(self.device.iter().flat_map(|device| device.fallbacks()));
    }
}

impl Slabs for Share {
    type Slab = Arc<Staged>;
    fn acquire(&mut self) -> Result<Option<Arc<Staged>>> {
        // Clear first, then look: a slab that becomes free after the look notifies again.
        self.clear();
        Ok(self.try_acquire()?.map(|lease| Arc::new(Staged::Leased(lease))))
    }
}
