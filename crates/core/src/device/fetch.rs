//! Copies from an accelerator into slabs, for saving: few large transfers out of many tensors.
//!
//! It works like [`join`](super::join) for loads, and for the same reason: a transfer costs some microseconds, whatever
//! its size. The tensors of a chunk are sorted by their place on the device. Then
//! - neighbours that are contiguous on both sides are one transfer, straight to their place in the slab;
//! - small neighbours at other distances are one transfer into a scratch buffer, together with the few bytes between
//!   them, and the processor scatters them from there. Allocators round sizes up, so there usually are such bytes;
//! - small transfers that remain go to the driver many in one call, if the driver has such a call.
//!
//! Two tensors are neighbours only within one allocation, because a copy must not leave the allocation in which it
//! begins. The driver is asked where an allocation ends. If it cannot tell, each tensor gets its own transfer.

use super::api::{Api, Stream};
use super::gpu::{register_in, Many, SharedContext};
use crate::error::{ErrorKind, Result};
use crate::options::HUGE_PAGE;
use crate::staging::{Lease, Ring, Slab};
use std::ops;
use std::sync::Arc;

/// Largest range that goes through the scratch buffer: a core copies this much in the time that a separate transfer
/// would cost.
const SMALL: u64 = 32 << 10;
/// Most bytes between two neighbours. Torch's allocator rounds sizes up to multiples of 512. So every byte between them
/// lies in a page of one of them, and no unmapped byte is read.
const NEAR: u64 = 511;
/// Size of the scratch buffer, and the longest transfer into it.
const SCRATCH: u64 = HUGE_PAGE;
/// Downloads begin at multiples of this in the scratch buffer.
const ALIGNED: u64 = 256;
/// Longer transfers go to the driver one by one: the link takes longer for them than the call.
const BATCHED: usize = 256 << 10;

/// A range of device memory, and its place in a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// First byte on the device.
    pub(crate) from: u64,
    /// Place in the slab.
    pub(crate) to: usize,
    /// Bytes, at least one.
    pub(crate) len: usize,
}

impl Range {
    fn end(&self) -> u64 {
        self.from + self.len as u64
    }
}

/// One transfer.
#[derive(Debug, PartialEq, Eq)]
enum Download {
    /// To its place.
    Straight(Range),
    /// Into the scratch buffer: device memory from `from`, which contains these of [`Downloads::parts`].
    Scattered { from: u64, len: u64, parts: ops::Range<usize> },
}

#[derive(Debug, Default)]
struct Downloads {
    transfers: Vec<Download>,
    parts: Vec<Range>,
}

/// Plans the copies of `ranges`. `together` says whether a range of device memory lies in one allocation.
fn plan(ranges: &[Range], mut together: impl FnMut(ops::Range<u64>) -> bool) -> Downloads {
    let mut sorted: Vec<Range> = ranges.to_vec();
    sorted.sort_unstable_by_key(|range| (range.from, range.to));
    let mut joined: Vec<Range> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match joined.last_mut() {
            Some(last)
                if last.end() == range.from && last.to + last.len == range.to && together(last.from..range.end()) =>
            {
                last.len += range.len;
            }
            _ => joined.push(range),
        }
    }
    let mut plan = Downloads::default();
    let mut rest = &joined[..];
    while let Some(first) = rest.first() {
        let (mut n, mut end) = (1, first.end());
        if first.len as u64 <= SMALL {
            while let Some(next) = rest.get(n) {
                let longer = end.max(next.end());
                let near = next.len as u64 <= SMALL && next.from <= end + NEAR && longer - first.from <= SCRATCH;
                if !near || !together(first.from..longer) {
                    break;
                }
                (n, end) = (n + 1, longer);
            }
        }
        if n == 1 {
            plan.transfers.push(Download::Straight(*first));
        } else {
            let parts = plan.parts.len()..plan.parts.len() + n;
            plan.parts.extend_from_slice(&rest[..n]);
            plan.transfers.push(Download::Scattered { from: first.from, len: end - first.from, parts });
        }
        rest = &rest[n..];
    }
    plan
}

/// A transfer that is in the scratch buffer.
struct Landed {
    at: *const u8,
    /// The device memory that it is a copy of.
    from: u64,
    parts: ops::Range<usize>,
}

/// Copies from an accelerator into slabs, made by the thread that waits for them.
pub(crate) struct Fetch {
    context: Arc<SharedContext>,
    stream: Stream,
    /// All that was queued on the stream has ended, without an error.
    quiet: bool,
    scratch: Option<Slab>,
    /// Whether the driver takes many copies in one call, as far as known, and all memory so far was registered.
    batches: bool,
    /// The allocation that was asked for last. Every range is memory that the save keeps alive, and so is its
    /// allocation.
    allocation: ops::Range<u64>,
}

impl Fetch {
    /// For accelerator `ordinal` of `api`'s driver.
    ///
    /// # Errors
    /// `Forked` in the child of a process that has used a driver; `Unsupported`, `OutOfMemory`, `Device` from the driver.
    pub(crate) fn new(api: &Arc<Api>, ordinal: u32) -> Result<Self> {
        let context = SharedContext::retain(api, ordinal)?;
        let stream = context.take_stream(&context.enter()?)?;
        Ok(Self { context, stream, quiet: true, scratch: None, batches: true, allocation: 0..0 })
    }

    /// Copies ranges of device memory to their places in the slab. Nothing may be in progress on these ranges.
    ///
    /// # Errors
    /// `Device`, `OutOfMemory`. Then nothing touches the slab any more, as long as the driver still answers.
    pub(crate) fn fetch(&mut self, slab: &Lease, ranges: &[Range]) -> Result<()> {
        assert!(ranges.iter().all(|range| range.to + range.len <= slab.len()));
        let context = self.context.clone();
        let api = context.enter()?;
        // If registration is refused, the driver copies the bytes through its own buffers.
        let slab_at = Ring::process().slab_at(slab.address());
        let pinned = slab_at.is_some_and(|slab| register_in(&self.context, &api, &slab).is_ok());
        // Only between registered memory and the device are copies submitted together: what the driver does with a batch
        // of other memory is documented for few devices.
        self.batches &= pinned;
        let allocation = &mut self.allocation;
        let plan = plan(ranges, |wanted| {
            if !(allocation.contains(&wanted.start) && wanted.end <= allocation.end) {
                *allocation = api.allocation(wanted.start).unwrap_or(0..0);
            }
            allocation.contains(&wanted.start) && wanted.end <= allocation.end
        });
        let mut rest = &plan.transfers[..];
        self.quiet = false;
        while !rest.is_empty() {
            let copied = self.copy_some(&api, slab, rest);
            // SAFETY: our stream.
            let waited = unsafe { api.synchronize_stream(self.stream) };
            let (done, landed) = copied?;
            waited?;
            for Landed { at, from, parts } in landed {
                for part in &plan.parts[parts] {
                    let skip = (part.from - from) as usize;
                    // SAFETY: the transfer that just ended has filled the scratch buffer from `at` on with the device's
                    // memory from `from` on, where the part lies; its place is in the slab, which is this thread's.
                    unsafe { slab.address().add(part.to).copy_from_nonoverlapping(at.add(skip), part.len) };
                }
            }
            rest = &rest[done..];
        }
        self.quiet = true;
        Ok(())
    }

    /// Queues transfers until the scratch buffer is full. Returns their number, and those that go to the scratch
    /// buffer.
    fn copy_some(&mut self, api: &Api, slab: &Lease, transfers: &[Download]) -> Result<(usize, Vec<Landed>)> {
        let (mut many, mut landed, mut used) = (Many::default(), Vec::new(), 0);
        let mut done = 0;
        for transfer in transfers {
            let (to, from, len) = match transfer {
                // SAFETY: in the slab, as `fetch` has asserted of every range.
                Download::Straight(range) => (unsafe { slab.address().add(range.to) }, range.from, range.len),
                Download::Scattered { from, len, parts } => {
                    if used + len > SCRATCH {
                        break;
                    }
                    let scratch = self.scratch(api)?;
                    // SAFETY: `used + len` bytes are in the scratch buffer.
                    let at = unsafe { scratch.add(used as usize) };
                    used = (used + len).next_multiple_of(ALIGNED);
                    landed.push(Landed { at, from: *from, parts: parts.clone() });
                    (at, *from, *len as usize)
                }
            };
            if len <= BATCHED {
                many.add(from, to as u64, len);
            } else {
                // SAFETY: to the slab, which is on lease to this thread, or to scratch memory of its own; out of memory that
                // the save keeps alive. `fetch` waits for the end, whatever happens here.
                unsafe { api.copy_to_host(to, from, len, self.stream) }?;
            }
            done += 1;
        }
        self.submit(api, &many)?;
        Ok((done, landed))
    }

    /// Queues small copies, in one call if the driver has such a call.
    fn submit(&mut self, api: &Api, many: &Many) -> Result<()> {
        let Many { to, from, bytes, .. } = many;
        if self.batches && to.len() > 1 {
            // SAFETY: as for the copies one by one; their places in slab and scratch do not overlap.
            match unsafe { api.copy_batch_to_host(to, from, bytes, self.stream) } {
                Ok(true) => return Ok(()),
                Ok(false) => self.batches = false,
                Err(error) if error.kind() == ErrorKind::Unsupported => self.batches = false,
                Err(error) => return Err(error),
            }
        }
        for ((to, from), bytes) in to.iter().zip(from).zip(bytes) {
            // SAFETY: as above.
            unsafe { api.copy_to_host(*to as *mut u8, *from, *bytes, self.stream) }?;
        }
        Ok(())
    }

    /// The scratch buffer, made when it is first needed.
    fn scratch(&mut self, api: &Api) -> Result<*mut u8> {
        if let Some(slab) = &self.scratch {
            return Ok(slab.address());
        }
        let slab = Slab::new(SCRATCH)?;
        // As for the slabs.
        self.batches &= register_in(&self.context, api, &slab).is_ok();
        Ok(self.scratch.insert(slab).address())
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if let Some(api) = self.context.enter_to_undo() {
            self.context.give_stream(&api, self.stream, self.quiet);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The plan, where the device's memory is one allocation of 1 GiB.
    fn shape(ranges: &[(u64, usize, usize)]) -> String {
        let ranges: Vec<Range> = ranges.iter().map(|&(from, to, len)| Range { from, to, len }).collect();
        let one = |transfer: &Download| match transfer {
            Download::Straight(range) => format!("straight {}", range.len),
            Download::Scattered { len, parts, .. } => format!("scattered {len} to {}", parts.len()),
        };
        plan(&ranges, |wanted| wanted.end <= 1 << 30).transfers.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn neighbours_on_both_sides_are_one_transfer_of_any_size() {
        assert_eq!(shape(&[(0, 100, 512), (512, 612, 1 << 20)]), format!("straight {}", 512 + (1 << 20)));
        // In whatever order they stand in the slab's list.
        assert_eq!(shape(&[(512, 612, 1 << 20), (0, 100, 512)]), format!("straight {}", 512 + (1 << 20)));
    }

    #[test]
    fn small_ones_near_each_other_are_scattered_and_others_are_not() {
        assert_eq!(shape(&[(0, 0, 100), (512, 100, 100)]), "scattered 612 to 2");
        assert_eq!(shape(&[(0, 200, 100), (100, 100, 100), (611, 0, 100)]), "scattered 711 to 3");
        assert_eq!(shape(&[(0, 0, 100), (612, 100, 100)]), "straight 100, straight 100");
        assert_eq!(shape(&[(0, 0, 32 << 10), (32 << 10, 0, (32 << 10) + 1)]), "straight 32768, straight 32769");
        // Twice the same memory, as of tied tensors, and memory within other memory.
        assert_eq!(shape(&[(0, 0, 100), (0, 100, 100), (10, 200, 20)]), "scattered 100 to 3");
    }

    #[test]
    fn no_transfer_leaves_its_allocation_or_outgrows_the_scratch_buffer() {
        let end = 1 << 30;
        assert_eq!(shape(&[(end - 100, 0, 100), (end, 100, 100)]), "straight 100, straight 100");
        assert_eq!(shape(&[(end - 100, 100, 100), (end, 0, 100)]), "straight 100, straight 100");
        let many: Vec<_> = (0..65).map(|i| (i << 15, (64 - i as usize) << 15, 1 << 15)).collect();
        assert_eq!(shape(&many), "scattered 2097152 to 64, straight 32768");
    }

    proptest! {
        #[test]
        fn every_byte_comes_from_its_place(
            lens in prop::collection::vec((1usize..2000, 0u64..700), 1..60),
            order in any::<prop::sample::Index>(),
        ) {
            // Ranges with gaps between them on the device, which stand elsewhere in the slab, without gaps.
            let mut ranges = Vec::new();
            let mut from = 0;
            for (len, gap) in lens {
                ranges.push(Range { from, to: 0, len });
                from += len as u64 + gap;
            }
            let turn = order.index(ranges.len());
            ranges.rotate_left(turn);
            let mut to = 0;
            for range in &mut ranges {
                range.to = to;
                to += range.len;
            }
            let device: Vec<u8> = (0..from + 2000).map(|i| (i * 31 + i / 251) as u8).collect();
            let mut slab = vec![0u8; to];
            let plan = plan(&ranges, |_| true);
            for transfer in &plan.transfers {
                match transfer {
                    Download::Straight(r) => {
                        slab[r.to..r.to + r.len].copy_from_slice(&device[r.from as usize..][..r.len]);
                    }
                    Download::Scattered { from, len, parts } => {
                        prop_assert!(*len <= SCRATCH);
                        let landed = &device[*from as usize..][..*len as usize];
                        for r in &plan.parts[parts.clone()] {
                            slab[r.to..r.to + r.len].copy_from_slice(&landed[(r.from - from) as usize..][..r.len]);
                        }
                    }
                }
            }
            for r in &ranges {
                prop_assert_eq!(&slab[r.to..r.to + r.len], &device[r.from as usize..][..r.len]);
            }
        }
    }
}
