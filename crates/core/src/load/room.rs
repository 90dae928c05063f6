//! How much staging memory a load takes where memory is short, as in a pod. The kernel promises any amount, and kills a process
//! that uses what its control group does not have.

use crate::extent::{Extent, Landing};
use crate::fallback::Fallback;
use crate::machine;
use crate::memory::is_resident;
use crate::options::HUGE_PAGE;
use crate::plan::strides::Foreign;

/// A load that can take no more new staging memory than this does not ask how much is left, which takes about 0.1 ms.
const WORTH_ASKING: u64 = 16 << 20;
/// How many pages of the caller's memory are looked at.
const SAMPLES: u64 = 64;

/// The staging memory that a load could use.
pub(super) struct SlabDemand {
    /// The most bytes that it may take.
    pub(super) limit: u64,
    /// The most bytes that its reads can fill.
    pub(super) wanted: u64,
    /// Bytes of the slabs that the process has already.
    pub(super) there: u64,
    /// A load to a GPU: its pool of slabs is half of the limit.
    pub(super) half: bool,
    /// Processes that load together on this machine, perhaps in one control group.
    pub(super) ranks: u64,
}

/// The limit of staging memory of a load, and a note for its report if that is less than it may take. `besides`: bytes of
/// other new memory of the load. `available`: bytes that the process can take.
pub(super) fn limit(
    slabs: &SlabDemand,
    besides: impl FnOnce() -> u64,
    available: impl FnOnce() -> u64,
) -> (u64, Option<Fallback>) {
    let parts = if slabs.half { 2 } else { 1 };
    let most = (slabs.limit / parts).min(slabs.wanted);
    if most.saturating_sub(slabs.there) <= WORTH_ASKING {
        return (slabs.limit, None);
    }
    // A quarter is for the rest of the program, the load's own threads, and reads under way through the page cache.
    let room = (available() / slabs.ranks.max(1)).saturating_sub(besides()) / 4 * 3;
    let fits = slabs.there.saturating_add(room);
    if fits >= most {
        return (slabs.limit, None);
    }
    // Without numbers: loads one after the other say the same.
    let reason = "less memory is left than `staging` and the load's own memory take".to_owned();
    (fits.saturating_mul(parts), Some(Fallback { from: "staging memory", to: "less of it", reason }))
}

/// The most memory that reads into slabs can fill. Memory comes in huge pages, however short a read is.
pub(super) fn wanted(extents: &[Extent]) -> u64 {
    let in_slabs = extents.iter().filter(|e| e.landing == Landing::Slab);
    in_slabs.map(|e| e.len.next_multiple_of(HUGE_PAGE)).sum()
}

/// An estimate of the caller's memory that has no page yet, in bytes: a sample of its pages is looked at.
pub(super) fn without_pages(tensors: &[Foreign]) -> u64 {
    let spanned: u64 = tensors.iter().map(|t| t.nbytes).sum();
    let step = (spanned / SAMPLES).max(machine::page_size());
    let (mut looked_at, mut without) = (0u64, 0u64);
    // Where the next page to look at lies, counted from the start of the tensor at hand.
    let mut next = step / 2;
    for tensor in tensors {
        while next < tensor.nbytes {
            looked_at += 1;
            without += u64::from(!is_resident(tensor.address + next));
            next += step;
        }
        next -= tensor.nbytes;
    }
    // Views of one tensor may lie between each other: each spans more than its own bytes.
    let own: u64 = tensors.iter().map(own_bytes).sum();
    (u128::from(own) * u128::from(without) / u128::from(looked_at.max(1))) as u64
}

/// Bytes of the tensor's elements. The least distance between two of them stands for the size of one.
fn own_bytes(tensor: &Foreign) -> u64 {
    let Some(dims) = &tensor.dims else { return tensor.nbytes };
    let elements: u64 = dims.iter().map(|(count, _)| *count).product();
    let element = dims.iter().filter(|(count, _)| *count > 1).map(|(_, stride)| *stride).min();
    tensor.nbytes.min(element.map_or(tensor.nbytes, |bytes| elements.saturating_mul(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Anonymous;

    const MIB: u64 = 1 << 20;
    /// Staging as by default for a load of 400 MB.
    const DEMAND: SlabDemand = SlabDemand { limit: 256 * MIB, wanted: 400 * MIB, there: 0, half: false, ranks: 1 };

    fn asked(slabs: &SlabDemand, besides: u64, available: u64) -> (u64, bool) {
        let (staging, fallback) = limit(slabs, || besides * MIB, || available * MIB);
        (staging / MIB, fallback.is_some())
    }

    #[test]
    fn staging_memory_is_what_fits_besides_the_load() {
        assert_eq!(asked(&DEMAND, 4000, 8000), (256, false));
        assert_eq!(asked(&DEMAND, 400, 500), (75, true));
        assert_eq!(asked(&SlabDemand { there: 64 * MIB, ..DEMAND }, 400, 500), (139, true));
        // Nothing is left: only slabs that are there, and the two that are always granted.
        assert_eq!(asked(&DEMAND, 400, 300), (0, true));
        // What the reads cannot fill need not fit.
        assert_eq!(asked(&SlabDemand { wanted: 60 * MIB, ..DEMAND }, 400, 500), (256, false));
        // Each rank has its part, and its own memory.
        assert_eq!(asked(&SlabDemand { ranks: 4, ..DEMAND }, 400, 2000), (75, true));
        assert_eq!(asked(&SlabDemand { ranks: 4, ..DEMAND }, 400, 3000), (256, false));
        // A load to a GPU uses half of its limit.
        assert_eq!(asked(&SlabDemand { half: true, ..DEMAND }, 0, 200), (256, false));
        assert_eq!(asked(&SlabDemand { half: true, ..DEMAND }, 0, 100), (150, true));
    }

    #[test]
    fn a_load_that_takes_little_does_not_ask() {
        let never = || -> u64 { panic!("asked") };
        assert_eq!(limit(&SlabDemand { wanted: 16 * MIB, ..DEMAND }, never, never), (256 * MIB, None));
        assert_eq!(limit(&SlabDemand { there: 250 * MIB, ..DEMAND }, never, never), (256 * MIB, None));
    }

    #[test]
    fn pages_that_are_missing_are_estimated() {
        let memory = Anonymous::new(64 * MIB).unwrap();
        let at = memory.at() as u64;
        let tensors: Vec<_> = (0..8).map(|i| Foreign::contiguous(at + i * 8 * MIB, 8 * MIB)).collect();
        assert_eq!(without_pages(&tensors), 64 * MIB);
        // SAFETY: the first half of this test's own memory.
        unsafe { memory.at().write_bytes(1, 32 * MIB as usize) };
        assert_eq!(without_pages(&tensors), 32 * MIB);
        assert_eq!(without_pages(&tensors[..4]), 0);
        assert_eq!(without_pages(&[]), 0);
        // Tensors smaller than the distance of two looks: of 512 KiB half.
        let small: Vec<_> = (0..8192).map(|i| Foreign::contiguous(at + i * 8192, 64)).collect();
        assert!((200 << 10..=320 << 10).contains(&without_pages(&small)), "{}", without_pages(&small));
        // Columns of one matrix of 1024 rows of 32 KiB, without pages: together they are the matrix.
        let column = |i: u64| Foreign {
            dims: Some([(1024, 32 << 10), (1024, 4)].into()),
            ..Foreign::contiguous(at + 32 * MIB + i * 4096, 1023 * (32 << 10) + 4096)
        };
        assert_eq!(without_pages(&(0..8).map(column).collect::<Vec<_>>()), 32 * MIB);
    }
}
