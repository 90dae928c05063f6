//! Few large transfers out of many small copies. Pure, except for [`gather`].
//!
//! Every call into a GPU driver costs some microseconds, and every transfer costs about as much on the copy engine,
//! whatever its size: at 50 GB/s that is the time of 100 to 200 KiB. Tensors that follow each other in the file usually
//! follow each other in their block as well. So
//! - neighbours at equal distance on both sides are one transfer, straight out of the slab (whole extents, usually);
//! - small neighbours at unequal distance (the block aligns tensor starts, the file does not) are gathered into a
//!   scratch buffer in the form that they have in the block, and are one transfer out of it;
//! - narrow rows (a column slice for one rank) are gathered in the same way: copy engines move narrow rows slowly.
//!
//! Gathering does not happen within the slab: others may read it at the same time. Besides, an extent may fill its slab,
//! and padding makes it grow.

use super::cpu::run_copy;
use super::Copy;
use std::ops::Range;

/// Largest copy that is gathered: a core copies this much in the time that a separate transfer would cost.
pub(crate) const GATHER: u64 = 32 << 10;
/// Rows shorter than this are gathered.
pub(super) const NARROW: u64 = 512;

/// One transfer.
#[derive(Debug)]
pub(crate) enum Transfer {
    /// One range out of the slab.
    Straight {
        /// First source byte.
        from: *const u8,
        /// First destination byte.
        to: u64,
        /// Bytes.
        len: u64,
        /// Number of the destination block.
        block: u32,
    },
    /// Rows out of the slab, by a two-dimensional copy.
    Rows(Copy),
    /// One range out of the scratch buffer, into which these [`Transfers::parts`] are gathered first.
    Gathered {
        /// First destination byte.
        to: u64,
        /// Bytes, at most the given `span`.
        len: u64,
        /// The gathered copies.
        parts: Range<usize>,
    },
}

/// The transfers of a batch.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    pub(crate) transfers: Vec<Transfer>,
    /// The parts of gathered transfers: dense at the destination, ascending, without overlap.
    pub(crate) parts: Vec<Copy>,
}

/// Plans `copies`, gathering at most `span` (at least [`GATHER`]) bytes into one transfer.
pub(crate) fn plan(copies: &[Copy], span: u64) -> Transfers {
    let mut plan = Transfers::default();
    let mut joined: Vec<Copy> = Vec::with_capacity(copies.len());
    for copy in copies {
        split(*copy, &mut |item| match joined.last_mut() {
            Some(last) if continues(last, &item) => {
                last.len = item.to + item.len - last.to;
                last.pad = item.pad;
            }
            _ => joined.push(item),
        });
    }
    let mut rest = &joined[..];
    while let Some(first) = rest.first() {
        let mut n = 0;
        if is_gathered(first) {
            n = 1;
            while n < rest.len() && follows(&rest[n - 1], &rest[n]) && end(&rest[n]) - first.to <= span {
                n += 1;
            }
        }
        match n {
            // A single copy goes straight, unless its rows are narrow.
            0 | 1 if first.rows == 1 => {
                let Copy { from, to, len, block, .. } = *first;
                plan.transfers.push(Transfer::Straight { from, to, len, block });
                n = 1;
            }
            0 => {
                plan.transfers.push(Transfer::Rows(*first));
                n = 1;
            }
            _ => {
                let parts = plan.parts.len()..plan.parts.len() + n;
                let len = end(&rest[n - 1]) - first.to;
                plan.parts.extend_from_slice(&rest[..n]);
                plan.transfers.push(Transfer::Gathered { to: first.to, len, parts });
            }
        }
        rest = &rest[n..];
    }
    plan
}

/// Divides a copy: into dense ranges, into narrow rows of at most [`GATHER`] bytes together, or into rows for a
/// two-dimensional copy.
fn split(mut copy: Copy, give: &mut impl FnMut(Copy)) {
    if copy.rows > 1 && copy.from_stride == copy.len && copy.to_stride == copy.len {
        copy.len *= copy.rows;
        copy.rows = 1;
    }
    let most = if copy.len == 0 {
        return;
    } else if copy.rows > 1 && copy.len < NARROW && copy.to_stride == copy.len {
        GATHER / copy.len
    } else {
        copy.rows
    };
    let mut left = copy.rows;
    while left > 0 {
        let rows = left.min(most);
        left -= rows;
        give(Copy { rows, pad: if left == 0 { copy.pad } else { 0 }, ..copy });
        copy.from = copy.from.wrapping_add((rows * copy.from_stride) as usize);
        copy.to += rows * copy.to_stride;
    }
}

/// First byte after a copy that is dense at its destination.
fn end(copy: &Copy) -> u64 {
    copy.to + copy.len * copy.rows
}

/// Whether `next` begins where `copy` ends, or after padding only.
fn follows(copy: &Copy, next: &Copy) -> bool {
    let gap = next.to.checked_sub(end(copy));
    is_gathered(next) && copy.block == next.block && gap.is_some_and(|gap| gap <= u64::from(copy.pad))
}

/// Whether `next` follows `copy` at the same distance in the slab.
fn continues(copy: &Copy, next: &Copy) -> bool {
    let gap = next.to.checked_sub(end(copy));
    copy.rows == 1
        && next.rows == 1
        && copy.block == next.block
        && gap.is_some_and(|gap| gap <= u64::from(copy.pad))
        && (next.from as u64).wrapping_sub(copy.from as u64) == next.to - copy.to
}

fn is_gathered(copy: &Copy) -> bool {
    copy.len * copy.rows <= GATHER && (copy.rows == 1 || (copy.to_stride == copy.len && copy.len < NARROW))
}

/// Copies `parts` to `scratch` in the form that they have from `to` on; the bytes between them become zero.
///
/// # Safety
/// The sources are valid, and `scratch` is for the whole length of the transfer.
pub(crate) unsafe fn gather(parts: &[Copy], to: u64, scratch: *mut u8) {
    let mut at = 0;
    for part in parts {
        let start = part.to - to;
        // SAFETY: as the function's; parts ascend without overlap.
        unsafe {
            scratch.add(at as usize).write_bytes(0, (start - at) as usize);
            run_copy(&Copy { to: scratch as u64 + start, ..*part });
        }
        at = start + part.len * part.rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dense(from: u64, to: u64, len: u64, pad: u32) -> Copy {
        Copy { from: from as *mut u8, to, len, rows: 1, from_stride: len, to_stride: len, block: 1, pad }
    }

    fn shape(copies: &[Copy]) -> String {
        let name = |t: &Transfer| match t {
            Transfer::Straight { len, .. } => format!("straight {len}"),
            Transfer::Rows(c) => format!("rows {}x{}", c.rows, c.len),
            Transfer::Gathered { len, parts, .. } => format!("gathered {len} of {}", parts.len()),
        };
        plan(copies, 1 << 20).transfers.iter().map(name).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn neighbours_at_equal_distance_are_one_straight_transfer_of_any_size() {
        assert_eq!(
            shape(&[dense(1000, 0, 512, 0), dense(1512, 512, 1 << 30, 0)]),
            format!("straight {}", (1 << 30) + 512)
        );
        assert_eq!(shape(&[dense(1000, 0, 500, 12), dense(1512, 512, 100, 156)]), "straight 612");
    }

    #[test]
    fn small_neighbours_are_gathered_over_padding_but_not_over_anything_else() {
        assert_eq!(shape(&[dense(1000, 0, 500, 12), dense(1500, 512, 100, 156)]), "gathered 612 of 2");
        assert_eq!(shape(&[dense(1000, 0, 500, 11), dense(1500, 512, 100, 156)]), "straight 500, straight 100");
        assert_eq!(shape(&[dense(1000, 512, 100, 156), dense(1100, 0, 100, 156)]), "straight 100, straight 100");
        let elsewhere = Copy { block: 2, ..dense(1500, 512, 100, 156) };
        assert_eq!(shape(&[dense(1000, 0, 500, 12), elsewhere]), "straight 500, straight 100");
        assert_eq!(
            shape(&[dense(1000, 0, 500, 0), Copy { block: 2, ..dense(1500, 500, 9, 0) }]),
            "straight 500, straight 9"
        );
    }

    #[test]
    fn a_large_tensor_is_never_gathered() {
        let large = dense(1500, 512, 1 << 20, 0);
        assert_eq!(shape(&[dense(1000, 0, 500, 12), large]), format!("straight 500, straight {}", 1 << 20));
    }

    #[test]
    fn narrow_rows_are_gathered_and_wide_ones_are_not() {
        let rows = |len, n| Copy { rows: n, from_stride: 8192, ..dense(0, 0, len, 0) };
        assert_eq!(shape(&[rows(64, 1000)]), "gathered 64000 of 2");
        assert_eq!(shape(&[rows(4096, 1000)]), "rows 1000x4096");
        assert_eq!(shape(&[Copy { to_stride: 200, ..rows(100, 1000) }]), "rows 1000x100");
    }

    #[test]
    fn a_thousand_small_tensors_are_a_few_transfers() {
        let copies: Vec<_> = (0..1000u64).map(|i| dense(i * 100, i * 256, 100, 156)).collect();
        assert_eq!(plan(&copies, 128 << 10).transfers.len(), 2);
    }

    /// The effect of a plan on memory, compared with its copies one by one.
    #[test]
    fn a_plan_moves_the_same_bytes_as_its_copies_and_touches_padding_only() {
        const SLAB: u64 = 300_000;
        let len = prop_oneof![5 => 0u64..600, 1 => 20_000u64..50_000];
        let rows = prop_oneof![4 => Just(1u64), 1 => 2u64..200];
        let piece =
            (len, rows, 0u64..SLAB, 0u64..50, prop_oneof![Just(0u64), 0u64..30], 0u64..300, 0u32..3, any::<bool>());
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            cases: 100,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        runner
            .run(&prop::collection::vec(piece, 1..40), |pieces| {
                let slab: Vec<u8> = (0..SLAB).map(|i| (i * 7 + i / 251) as u8).collect();
                let (mut at, mut near, mut copies) = (0u64, 0u64, Vec::new());
                for (len, rows, from, from_gap, to_gap, skip, block, follow) in pieces {
                    let rows = if len > 600 { rows.min(3) } else { rows };
                    let from = if follow { near } else { from };
                    let from = from.min(SLAB.saturating_sub(rows * (len + from_gap)));
                    let dense = if rows == 1 { 0 } else { to_gap };
                    copies.push(Copy {
                        from: slab.as_ptr().wrapping_add(from as usize).cast_mut(),
                        to: at,
                        len,
                        rows,
                        from_stride: len + from_gap,
                        to_stride: len + dense,
                        block,
                        pad: if dense == 0 { (skip / 2) as u32 } else { 0 },
                    });
                    let skip = if skip % 3 == 0 { skip } else { skip / 2 };
                    near = (from + len * rows + if follow { skip } else { 0 }).min(SLAB);
                    at += rows * (len + dense) + skip;
                }
                let size = at as usize + 1;
                let mut expected = vec![None; size];
                let mut padding = vec![false; size];
                for c in &copies {
                    for row in 0..c.rows {
                        for i in 0..c.len {
                            let from = (c.from as usize - slab.as_ptr() as usize) + (row * c.from_stride + i) as usize;
                            expected[(c.to + row * c.to_stride + i) as usize] = Some(slab[from]);
                        }
                    }
                    let end = (c.to + c.rows * c.to_stride) as usize;
                    padding[end.min(size)..(end + c.pad as usize).min(size)].fill(true);
                }
                let mut got = vec![None; size];
                let span = GATHER;
                let plan = plan(&copies, span);
                let mut put = |from: *const u8, to: u64, len: u64| {
                    for i in 0..len as usize {
                        // SAFETY: the plan reads the slab or the scratch buffer.
                        got[to as usize + i] = Some(unsafe { from.add(i).read() });
                    }
                };
                for transfer in &plan.transfers {
                    match transfer {
                        Transfer::Straight { from, to, len, .. } => put(*from, *to, *len),
                        Transfer::Rows(c) => {
                            for row in 0..c.rows {
                                let from = c.from.wrapping_add((row * c.from_stride) as usize);
                                put(from, c.to + row * c.to_stride, c.len);
                            }
                        }
                        Transfer::Gathered { to, len, parts } => {
                            prop_assert!(*len <= span);
                            let mut scratch = vec![0xEEu8; *len as usize];
                            // SAFETY: as long as the transfer.
                            unsafe { gather(&plan.parts[parts.clone()], *to, scratch.as_mut_ptr()) };
                            put(scratch.as_ptr(), *to, *len);
                        }
                    }
                }
                for i in 0..size {
                    match expected[i] {
                        Some(byte) => prop_assert_eq!(got[i], Some(byte), "byte {}", i),
                        None => prop_assert!(got[i].is_none() || padding[i], "byte {} is nobody's", i),
                    }
                }
                Ok(())
            })
            .unwrap();
    }
}
