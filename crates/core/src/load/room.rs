//! How much staging memory a load takes where memory is short, as in a pod. The kernel promises any amount, and kills a process
//! that uses what its control group does not have.

use crate::fallback::Fallback;
use crate::machine;
use crate::memory::is_resident;
use crate::plan::strides::Foreign;
use crate::staging::Ring;

/// A load that can take no more new staging memory than this does not ask how much is left, which takes about 0.1 ms.
const WORTH_ASKING: u64 = 16 << 20;
/// How many pages of the caller's memory are looked at.
const SAMPLES: u64 = 64;

/// The staging memory that a load may take of `limit` bytes, and what its report says if that is less. `wanted`: bytes that
/// come by way of slabs. `besides`: bytes of new memory that the load takes otherwise. `ranks`: how many processes load
/// together, perhaps in one control group.
pub(super) fn staging(
    limit: u64,
    wanted: u64,
    besides: impl FnOnce() -> u64,
    ranks: u64,
    available: impl FnOnce() -> u64,
) -> (u64, Option<Fallback>) {
    let there = Ring::process().staging().mapped;
    let most = limit.min(wanted);
    if most.saturating_sub(there) <= WORTH_ASKING {
        return (limit, None);
    }
    let (available, besides) = (available(), besides());
    // A quarter is for the rest of the program, the load's own threads, and reads under way through the page cache.
    let room = available.saturating_sub(besides) / ranks.max(1) / 4 * 3;
    let fits = there.saturating_add(room);
    if fits >= most {
        return (limit, None);
    }
    let reason = format!(
        "the process can take {available} bytes of memory, and the load takes {besides} besides: of `staging` ({limit} bytes) it \
         uses {fits}"
    );
    (fits, Some(Fallback { from: "staging memory", to: "less of it", reason }))
}

/// Bytes of the caller's memory that have no page yet, as some of them tell.
pub(super) fn without_pages(tensors: &[Foreign]) -> u64 {
    let total: u64 = tensors.iter().map(|t| t.nbytes).sum();
    let step = (total / SAMPLES).max(machine::page_size());
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
    // As a share in whole numbers: total x without does not fit 64 bits for some memories.
    (u128::from(total) * u128::from(without) / u128::from(looked_at.max(1))) as u64
}

/// What this process can still take.
pub(super) fn available() -> u64 {
    machine::memory_available()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Anonymous;

    const MIB: u64 = 1 << 20;

    fn asked(limit: u64, wanted: u64, besides: u64, ranks: u64, available: u64) -> (u64, Option<String>) {
        let (staging, fallback) = staging(limit * MIB, wanted * MIB, || besides * MIB, ranks, || available * MIB);
        (staging / MIB, fallback.map(|f| f.reason))
    }

    #[test]
    fn staging_memory_is_what_fits_besides_the_load() {
        // Slabs of other tests in this process count as there.
        let there = Ring::process().staging().mapped / MIB;
        assert_eq!(asked(256, 4000, 4000, 1, 8000), (256, None));
        let (less, reason) = asked(256, 400, 400, 1, 500);
        assert!((75..=75 + there + 64).contains(&less), "{less}");
        assert!(reason.unwrap().contains(&format!("takes {} besides", 400 * MIB)));
        let (shared, _) = asked(256, 400, 400, 4, 500);
        assert!(shared < less, "{shared}");
        // Nothing is left: only slabs that are there, and the two that are always granted.
        assert!(asked(256, 400, 400, 1, 300).0 <= there + 64);
    }

    #[test]
    fn a_load_that_takes_little_does_not_ask() {
        let never = || -> u64 { panic!("asked") };
        assert_eq!(staging(256 * MIB, 16 * MIB, never, 1, never), (256 * MIB, None));
    }

    #[test]
    fn pages_that_are_missing_are_estimated() {
        let memory = Anonymous::new(64 * MIB).unwrap();
        let tensors: Vec<_> = (0..8).map(|i| Foreign::contiguous(memory.at() as u64 + i * 8 * MIB, 8 * MIB)).collect();
        assert_eq!(without_pages(&tensors), 64 * MIB);
        // SAFETY: the first half of this test's own memory.
        unsafe { memory.at().write_bytes(1, 32 * MIB as usize) };
        assert_eq!(without_pages(&tensors), 32 * MIB);
        assert_eq!(without_pages(&tensors[..4]), 0);
        assert_eq!(without_pages(&[]), 0);
        // Tensors smaller than the distance of two looks.
        let small: Vec<_> = (0..8192).map(|i| Foreign::contiguous(memory.at() as u64 + i * 8192, 5)).collect();
        assert!((15_000..25_000).contains(&without_pages(&small)), "{}", without_pages(&small));
    }
}
