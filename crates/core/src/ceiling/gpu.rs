//! Measures on a GPU.

use super::settings::{Measure, Measured, Settings};
use crate::device::api::{Api, Current, Stream};
use crate::device::gpu::{GpuMemory, SharedContext};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Anonymous;
use std::sync::Arc;
use std::time::Instant;

/// [`measure`](super::measure) on a given driver, for the measures of a GPU.
///
/// # Errors
/// `Invalid` for a measure of files or a GPU that is not there, `OutOfMemory`, `Device`.
pub fn measure_on(api: &Arc<Api>, settings: &Settings) -> Result<Measured> {
    let settings = super::settings::checked(settings)?;
    let shared = SharedContext::retain(api, settings.device)?;
    match settings.measure {
        Measure::HostToDevice => host_to_device(api, &shared, &settings),
        Measure::DeviceAlloc => device_alloc(&shared, &settings),
        other => Err(Error::new(ErrorKind::Invalid, format!("{} is measured on files", other.name()))),
    }
}

/// Host memory that is registered with the driver, and streams that copy it. Given back when nothing is in flight any
/// more.
struct PinnedBlocks<'a> {
    api: &'a Current<'a>,
    memory: Anonymous,
    registered: bool,
    streams: Vec<Stream>,
}

impl<'a> PinnedBlocks<'a> {
    fn new(api: &'a Current<'a>, nbytes: usize, streams: usize) -> Result<Self> {
        let mut pinned = Self { api, memory: Anonymous::new(nbytes as u64)?, registered: false, streams: Vec::new() };
        let (at, len) = (pinned.memory.at(), pinned.memory.len());
        // SAFETY: the mapping just made, which nobody else knows; it stays until `drop` has unregistered it.
        unsafe {
            at.write_bytes(1, len);
            api.register(at, len)?;
        }
        pinned.registered = true;
        for _ in 0..streams {
            pinned.streams.push(api.create_stream()?);
        }
        Ok(pinned)
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: live streams of ours.
        self.streams.iter().try_for_each(|stream| unsafe { self.api.synchronize_stream(*stream) })
    }
}

impl Drop for PinnedBlocks<'_> {
    fn drop(&mut self) {
        // A failure means that the context is lost, and everything in it.
        let _ = self.wait();
        for stream in &self.streams {
            // SAFETY: ours, and nothing is queued on it.
            let _ = unsafe { self.api.destroy_stream(*stream) };
        }
        if self.registered {
            // SAFETY: registered by `new`, and every copy out of it has ended.
            let _ = unsafe { self.api.unregister(self.memory.at()) };
        }
    }
}

/// Copies block after block out of `depth` buffers, each to its own place, until `nbytes` are copied.
fn host_to_device(api: &Arc<Api>, shared: &Arc<SharedContext>, settings: &Settings) -> Result<Measured> {
    let (block, depth) = (settings.block, settings.depth);
    let target = GpuMemory::new(shared, (depth * block) as u64)?;
    let context = api.context(i32::try_from(settings.device).unwrap_or(i32::MAX))?;
    let current = context.enter()?;
    let pinned = PinnedBlocks::new(&current, depth * block, settings.threads)?;
    let copies = settings.nbytes.div_ceil(block as u64) as usize;
    let copy = |number: usize| {
        let offset = number % depth * block;
        let (to, from) = (target.address() + offset as u64, pinned.memory.at().wrapping_add(offset));
        // A buffer always uses the same stream: two copies to one place at once would be a race.
        let stream = pinned.streams[number % depth % pinned.streams.len()];
        // SAFETY: `block` bytes of either memory; both outlive the copy, since `pinned` is dropped before `target` and
        // waits for it. The source is not written any more.
        unsafe { current.copy_to_device(to, from, block, stream) }
    };
    // The first copy of each buffer triggers the driver's own preparations.
    (0..depth.min(copies)).try_for_each(copy)?;
    pinned.wait()?;
    let start = Instant::now();
    (0..copies).try_for_each(copy)?;
    pinned.wait()?;
    Ok(Measured { bytes: (copies * block) as u64, seconds: start.elapsed().as_secs_f64() })
}

fn device_alloc(shared: &Arc<SharedContext>, settings: &Settings) -> Result<Measured> {
    let blocks = settings.nbytes.div_ceil(settings.block as u64);
    let mut held = Vec::with_capacity(blocks as usize);
    let start = Instant::now();
    for _ in 0..blocks {
        held.push(GpuMemory::new(shared, settings.block as u64)?);
    }
    Ok(Measured { bytes: blocks * settings.block as u64, seconds: start.elapsed().as_secs_f64() })
}
