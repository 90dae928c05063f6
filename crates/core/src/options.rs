//! The options of a load, and the numbers behind their defaults and limits. `table` has all that is said of an
//! option. Python's `penstock.Options` mirrors the struct and adds nothing. `order` and `misaligned` are arguments of
//! each load in Python.

mod table;
mod values;

use std::ops::Range;

pub use table::{row, OptionRow, Options, TABLE};
pub use values::{size, Bind, Cache, Exchanging, FileName, Form, Io, OptionValue, Order, Ports, Scope, Shown};

/// 1 KiB, 1 MiB, 1 GiB in bytes.
pub(crate) const KIB: u64 = 1 << 10;
/// 2^20.
pub const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// 1e9 bytes, the unit of rates.
pub(crate) const GB: f64 = 1e9;

/// Bytes for people: 1.50 GB.
pub(crate) fn size_text(nbytes: u64) -> String {
    let units = [("GB", GB), ("MB", 1e6), ("kB", 1e3)];
    let unit = units.into_iter().find(|(_, scale)| nbytes as f64 >= *scale);
    unit.map_or_else(|| format!("{nbytes} B"), |(unit, scale)| format!("{:.2} {unit}", nbytes as f64 / scale))
}

/// Page size assumed for the alignment of reads and of mirror blocks: O_DIRECT needs 512 or 4096, and both divide it.
pub const PAGE: u64 = 4096;
/// A transparent huge page; also the granule in which private CPU memory is given back.
pub const HUGE_PAGE: u64 = 2 * MIB;
/// Where tensors start in blocks allocated on a GPU (the alignment that cudaMalloc itself promises).
pub const GPU_ALIGN: u64 = 256;
/// Where tensors start in dense blocks allocated on the CPU (a cache line).
pub const CPU_ALIGN: u64 = 64;
/// Small neighbours share an allocated block of at most this size; a larger tensor has its own block.
pub const SHARED_BLOCK: u64 = 32 * MIB;

/// The longest extent. Many systems read 2 GiB at most in one call.
pub const MOST_EXTENT: u64 = 1 << 30;

/// An extent has so many bytes: whole pages.
pub(crate) fn is_extent(nbytes: u64) -> bool {
    (PAGE..=MOST_EXTENT).contains(&nbytes) && nbytes % PAGE == 0
}

/// The shortest extent that a store may declare: shorter reads cost every store more than they bring.
pub const LEAST_EXTENT: u64 = 256 * KIB;

/// Holes up to this many bytes are always read if no other limit is given: reading them costs less than any read.
pub const LEAST_GAP: u64 = 16 * KIB;

/// Gaps between short rows in the page cache are read up to this many bytes, and longer ones are skipped: a system call
/// costs as much as copying 6 to 8 KiB (0.6 us).
pub const ROW_GAP: u64 = 8 * KIB;

/// Plain staging memory that stays for the next load after the last load of the process has ended: 16 slabs of the
/// default size. All memory that is registered with a GPU's driver stays.
pub const IDLE_STAGING: u64 = 64 * MIB;

/// How much registered staging memory loads to GPUs keep, with a `staging` limit of `limit` bytes in slabs of `slab`
/// bytes: half of the limit, and at least two slabs. By default that is 32 slabs of 4 MiB. A link of 55 GB/s drains a
/// slab in 76 us, and a core fills one in 0.5 to 0.8 ms out of the page cache, so about 10 slabs are being filled at a
/// time. 24 keep both sides busy (`engine/virtual_time.rs`), and each further slab costs 0.4 ms to register.
pub const fn pool_bytes(limit: u64, slab: u64) -> u64 {
    if limit / 2 > 2 * slab {
        limit / 2
    } else {
        2 * slab
    }
}

/// Most threads that register staging memory: the driver serialises much of it, and the pool has 32 slabs.
pub const MOST_PINNING_THREADS: u32 = 16;

/// Bytes of blocks that a caller grants together at first: reads into them go on while it allocates more.
const FIRST_GRANT: u64 = 16 * MIB;
/// The same at most. A fence costs 10 us, and an allocation of a GPU's driver 0.1 ms and more.
const MOST_GRANT: u64 = 256 * MIB;

/// The blocks that a caller allocates and grants together, by the sizes of all blocks in their order: groups that double
/// from 16 to 256 MiB, or one block where that is larger.
pub fn grants(sizes: &[u64]) -> Vec<Range<usize>> {
    let (mut groups, mut begin, mut held, mut most) = (Vec::new(), 0, 0, FIRST_GRANT);
    for (block, size) in sizes.iter().enumerate() {
        held += size;
        if held >= most {
            groups.push(begin..block + 1);
            (begin, held, most) = (block + 1, 0, (2 * most).min(MOST_GRANT));
        }
    }
    if begin < sizes.len() {
        groups.push(begin..sizes.len());
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each block is in one group, in order; no group is larger than its bound by more than its last block.
        #[test]
        fn blocks_are_granted_in_groups_that_grow(sizes in prop::collection::vec(0..400 * MIB, 0..200)) {
            let groups = grants(&sizes);
            let blocks: Vec<usize> = groups.iter().flat_map(Clone::clone).collect();
            prop_assert_eq!(blocks, (0..sizes.len()).collect::<Vec<_>>());
            let mut most = FIRST_GRANT;
            for (i, group) in groups.iter().enumerate() {
                prop_assert!(!group.is_empty());
                let held: u64 = sizes[group.clone()].iter().sum();
                prop_assert!(held - sizes[group.end - 1] < most);
                prop_assert!(held >= most || i + 1 == groups.len());
                most = (2 * most).min(MOST_GRANT);
            }
        }
    }
}
