//! Strided memory of a GPU: few calls of the driver for each grid. Pure, except for [`Packed::write`].
//!
//! The driver copies rows that are evenly spaced on both sides. Copy engines move narrow rows slowly, and every call costs
//! some microseconds ([`join`](super::join) says how many). So
//! - a grid whose items are wide goes straight out of the slab, row by row;
//! - any other one is cut into boxes. The processor writes each to scratch memory in the order of its destination: a
//!   transposed matrix becomes wide rows there. Then a box is one range, or rows of one distance, and seldom more.
//!
//! Rows stay narrow only if the destination itself has no longer ones: every second element of something.

use super::api::Rows;
use super::join::{GATHER, NARROW};
use super::strided::{Grid, GridAxis, Strided};
use crate::error::Result;

/// Bytes of a cache line. A box has so many bytes in the direction of the slab's rows where it can: then no line of the slab is
/// read for two boxes.
const LINE: u64 = 64;

/// One part of a grid.
pub(super) enum Crossing<'a> {
    /// Rows out of the slab.
    Straight(Rows),
    /// A box, by way of scratch memory.
    Packed(Packed<'a>),
}

/// A box of a grid: items in axes that are in the order of the destination, the innermost first.
pub(super) struct Packed<'a> {
    from: *const u8,
    to: u64,
    item: u64,
    axes: &'a [GridAxis],
}

impl Packed<'_> {
    /// Its bytes.
    pub(super) fn nbytes(&self) -> u64 {
        self.axes.iter().map(|a| a.count).product::<u64>() * self.item
    }

    /// Writes it to `scratch`, in the order of its destination and without gaps.
    ///
    /// # Safety
    /// The items are valid, and nobody else touches the [`nbytes`](Self::nbytes) bytes from `scratch` on.
    pub(super) unsafe fn write(&self, scratch: *mut u8) {
        let mut dense = self.item;
        let mut axes = vec![GridAxis { count: self.item, from: 1, to: 1 }];
        for axis in self.axes {
            axes.push(GridAxis { to: dense, ..*axis });
            dense *= axis.count;
        }
        let mut copies = Strided::default();
        copies.push(0, None, self.from, scratch as u64, axes.into_iter().rev());
        // SAFETY: the function's; no two items have a place in common.
        unsafe { copies.run() };
    }

    /// The copies that bring it from `scratch` to its place.
    pub(super) fn rows(&self, scratch: u64, mut give: impl FnMut(Rows) -> Result<()>) -> Result<()> {
        let Shape { width, rows, pitch, rest } = shape(self.item, self.axes);
        each_step(rest, |number, _, to| {
            let (to, from) = (self.to + to, scratch + number * width * rows);
            give(Rows { to, to_pitch: pitch, from, from_pitch: width, width, rows })
        })
    }
}

/// The part of a box that one call moves, and the axes that need another call for each step.
struct Shape<'a> {
    width: u64,
    rows: u64,
    /// Bytes from row to row at the destination.
    pitch: u64,
    rest: &'a [GridAxis],
}

fn shape(item: u64, axes: &[GridAxis]) -> Shape<'_> {
    let (mut width, mut rest) = (item, axes);
    while let Some((axis, outer)) = rest.split_first().filter(|(axis, _)| axis.to == width) {
        width *= axis.count;
        rest = outer;
    }
    let (mut rows, pitch) = (1, rest.first().map_or(width, |axis| axis.to));
    while let Some((axis, outer)) = rest.split_first().filter(|(axis, _)| axis.to == rows * pitch) {
        rows *= axis.count;
        rest = outer;
    }
    Shape { width, rows, pitch, rest }
}

/// Calls `give` with the number of each step of all axes, and how far it is from the first one on both sides. The first axis
/// is the innermost.
fn each_step(axes: &[GridAxis], mut give: impl FnMut(u64, u64, u64) -> Result<()>) -> Result<()> {
    (0..axes.iter().map(|a| a.count).product()).try_for_each(|number| {
        let (mut left, mut from, mut to) = (number, 0, 0);
        for axis in axes {
            let step = left % axis.count;
            (from, to, left) = (from + step * axis.from, to + step * axis.to, left / axis.count);
        }
        give(number, from, to)
    })
}

/// How many steps of each axis a box has at most. The axes are in the order of the destination, the innermost first.
fn sizes(item: u64, axes: &[GridAxis], most: u64) -> Vec<u64> {
    let nearest = (0..axes.len()).min_by_key(|&i| axes[i].from);
    let mut room = most / item;
    let steps = |(i, axis): (usize, &GridAxis)| {
        // Room for a cache line of the slab.
        let kept = nearest.filter(|&n| i < n).map_or(1, |n| LINE.div_ceil(axes[n].from).min(axes[n].count));
        let steps = (room / kept).clamp(1, axis.count);
        room /= steps;
        steps
    };
    axes.iter().enumerate().map(steps).collect()
}

/// Gives the parts of a grid, whose elements are not converted. No box has more than `most` (at least [`GATHER`]) bytes.
pub(super) fn plan(
    grid: &Grid,
    axes: &[GridAxis],
    most: u64,
    mut give: impl FnMut(Crossing<'_>) -> Result<()>,
) -> Result<()> {
    let item = grid.item;
    let mut axes = axes.to_vec();
    axes.sort_unstable_by_key(|a| a.to);
    let items: u64 = axes.iter().map(|a| a.count).product();
    let longest = (0..axes.len()).max_by_key(|&i| axes[i].count);
    let rows = longest.map_or(1, |i| axes[i].count);
    let sizes = sizes(item, &axes, most);
    if is_straight(item, items, rows, &axes, &sizes) {
        let row = longest.map(|i| axes.remove(i));
        let (from_pitch, to_pitch) = row.map_or((item, item), |row| (row.from, row.to));
        return each_step(&axes, |_, from, to| {
            let (from, to) = (grid.from as u64 + from, grid.to + to);
            give(Crossing::Straight(Rows { to, to_pitch, from, from_pitch, width: item, rows }))
        });
    }
    let boxes: Vec<GridAxis> = axes
        .iter()
        .zip(&sizes)
        .map(|(a, &size)| GridAxis { count: a.count.div_ceil(size), from: a.from * size, to: a.to * size })
        .collect();
    let mut own = Vec::with_capacity(axes.len());
    each_step(&boxes, |number, from, to| {
        let mut left = number;
        own.clear();
        for ((axis, &size), of_boxes) in axes.iter().zip(&sizes).zip(&boxes) {
            let first = left % of_boxes.count * size;
            left /= of_boxes.count;
            let count = size.min(axis.count - first);
            if count > 1 {
                own.push(GridAxis { count, ..*axis });
            }
        }
        let from = grid.from.wrapping_add(from as usize);
        give(Crossing::Packed(Packed { from, to: grid.to + to, item, axes: &own }))
    })
}

/// Whether a grid goes straight out of the slab, `rows` items with each call.
fn is_straight(item: u64, items: u64, rows: u64, axes: &[GridAxis], sizes: &[u64]) -> bool {
    // A core would need longer to write such rows to scratch memory than a call for them costs. No item is longer than a box:
    // it would be such a row.
    if item >= NARROW && item * rows >= GATHER {
        return true;
    }
    let full: Vec<GridAxis> =
        axes.iter().zip(sizes).filter(|s| *s.1 > 1).map(|(a, &count)| GridAxis { count, ..*a }).collect();
    let shape = shape(item, &full);
    let boxes: u64 = axes.iter().zip(sizes).map(|(a, size)| a.count.div_ceil(*size)).product();
    let calls = boxes * shape.rest.iter().map(|a| a.count).product::<u64>();
    items / rows <= calls && (item >= NARROW || shape.width == item)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::strided::tests::{axes, counts, noise, offsets};
    use super::*;
    use proptest::prelude::*;

    /// Calls of the driver: those that copy a range or rows, and the narrowest of these rows.
    #[derive(Debug, PartialEq, Eq)]
    struct Calls {
        straight: usize,
        packed: usize,
        narrowest: u64,
    }

    /// Carries a plan out on memory of the host, as a driver would.
    fn carry_out(strided: &Strided, most: u64) -> Calls {
        let mut calls = Calls { straight: 0, packed: 0, narrowest: u64::MAX };
        let mut scratch = vec![0u8; most as usize];
        for (grid, axes) in strided.each() {
            plan(grid, axes, most, |crossing| {
                let mut copy = |rows: Rows| {
                    assert!(
                        rows.rows == 1 || (rows.to_pitch >= rows.width && rows.from_pitch >= rows.width),
                        "{rows:?}"
                    );
                    calls.narrowest = calls.narrowest.min(rows.width);
                    for i in 0..rows.rows {
                        let (from, to) = (rows.from + i * rows.from_pitch, rows.to + i * rows.to_pitch);
                        // SAFETY: tests give memory for all of it.
                        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, rows.width as usize) };
                    }
                    Ok(())
                };
                match crossing {
                    Crossing::Straight(rows) => {
                        calls.straight += 1;
                        copy(rows)
                    }
                    Crossing::Packed(packed) => {
                        assert!(packed.nbytes() <= most);
                        // SAFETY: as much scratch memory as a box has at most.
                        unsafe { packed.write(scratch.as_mut_ptr()) };
                        packed.rows(scratch.as_ptr() as u64, |rows| {
                            calls.packed += 1;
                            copy(rows)
                        })
                    }
                }
            })
            .unwrap();
        }
        calls
    }

    /// A matrix in a slab, `rows` times `columns` items, whose rows and columns are so far apart at the destination.
    fn matrix((rows, columns): (u64, u64), item: u64, steps: (u64, u64)) -> Calls {
        let slab = noise(rows * columns * item);
        let axes = [
            GridAxis { count: rows, from: columns * item, to: steps.0 },
            GridAxis { count: columns, from: item, to: steps.1 },
            GridAxis { count: item, from: 1, to: 1 },
        ];
        let end = (rows - 1) * steps.0 + (columns - 1) * steps.1 + item;
        let (mut there, mut expected) = (vec![0xee; end as usize], vec![0xee; end as usize]);
        offsets(&axes).into_iter().for_each(|(from, to)| expected[to] = slab[from]);
        let mut copies = Strided::default();
        copies.push(0, None, slab.as_ptr(), there.as_mut_ptr() as u64, axes.into_iter());
        let calls = carry_out(&copies, 1 << 20);
        assert!(there == expected);
        calls
    }

    #[test]
    fn wide_rows_go_straight() {
        // Half of the columns of a wider matrix.
        assert_eq!(matrix((512, 2048), 2, (8192, 2)), Calls { straight: 1, packed: 0, narrowest: 4096 });
        assert_eq!(matrix((1, 100), 2, (0, 2)), Calls { straight: 1, packed: 0, narrowest: 200 });
        // Blocks that change places: eight calls cost less than a core needs to write 256 KiB.
        assert_eq!(matrix((8, 8), 4096, (4096, 1 << 15)), Calls { straight: 8, packed: 0, narrowest: 4096 });
        assert_eq!(matrix((8, 8), 1024, (1024, 1 << 13)), Calls { straight: 0, packed: 1, narrowest: 1 << 16 });
    }

    #[test]
    fn a_transposed_matrix_is_a_call_for_each_box_of_it() {
        // 4 MiB: into a matrix with longer rows than the slab brings, and into one without gaps.
        assert_eq!(matrix((512, 4096), 2, (2, 4096)), Calls { straight: 0, packed: 4, narrowest: 1024 });
        assert_eq!(matrix((512, 4096), 2, (2, 1024)), Calls { straight: 0, packed: 4, narrowest: 1 << 20 });
        // Rows longer than a box: it has a cache line of the slab, and not one column.
        assert_eq!(matrix((65_536, 32), 2, (2, 131_072)), Calls { straight: 0, packed: 4, narrowest: 32_768 });
    }

    #[test]
    fn rows_stay_narrow_only_if_the_destination_has_no_longer_ones() {
        // Every second element.
        assert_eq!(matrix((512, 100), 2, (400, 4)), Calls { straight: 1, packed: 0, narrowest: 2 });
        // The columns of a matrix with few rows, two apart.
        assert_eq!(matrix((8, 1000), 4, (8, 64)), Calls { straight: 0, packed: 1, narrowest: 4 });
    }

    #[test]
    fn many_narrow_items_in_order_are_one_range() {
        // Heads of 16 bytes that change places with the rows.
        assert_eq!(matrix((64, 32), 16, (16, 1024)), Calls { straight: 0, packed: 1, narrowest: 1 << 15 });
        // A column of a wider matrix.
        let (slab, mut there) = (noise(64 * 1000), vec![0; 16 * 1000]);
        let axes = [GridAxis { count: 1000, from: 64, to: 16 }, GridAxis { count: 16, from: 1, to: 1 }];
        let mut copies = Strided::default();
        copies.push(0, None, slab.as_ptr(), there.as_mut_ptr() as u64, axes.into_iter());
        assert_eq!(carry_out(&copies, 1 << 20), Calls { straight: 0, packed: 1, narrowest: 16_000 });
        assert!(there.chunks(16).zip(slab.chunks(64)).all(|(to, from)| *to == from[..16]));
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_and_nothing_else_is_touched(
            item in prop_oneof![4 => 1u64..20, 1 => prop::sample::select(vec![512, 600, 5000, GATHER, GATHER + 1])],
            counts in counts(),
            order in any::<[u8; 4]>(),
            padding in any::<[[bool; 2]; 4]>(),
            most in GATHER..GATHER + 1000,
        ) {
            let counts: Vec<u64> = counts.into_iter().map(|n| if item > 100 { n.min(8) } else { n }).collect();
            let (mut axes, [from, to]) = axes((item, item), &counts, order, padding);
            axes.push(GridAxis { count: item, from: 1, to: 1 });
            let slab = noise(from);
            let (mut there, mut expected) = (vec![0xee; to as usize], vec![0xee; to as usize]);
            offsets(&axes).into_iter().for_each(|(from, to)| expected[to] = slab[from]);
            let mut copies = Strided::default();
            copies.push(0, None, slab.as_ptr(), there.as_mut_ptr() as u64, axes.into_iter());
            carry_out(&copies, most);
            prop_assert_eq!(there, expected);
        }

        /// Boxes are full, except at the ends, and there is hardly more than one call for each.
        #[test]
        fn a_transposed_grid_takes_few_calls(
            counts in prop::collection::vec(2u64..60, 3),
            order in any::<[u8; 4]>(),
            item in prop::sample::select(vec![1u64, 2, 4]),
        ) {
            let most = GATHER;
            let (mut axes, [from, to]) = axes((item, item), &counts, order, Default::default());
            axes.push(GridAxis { count: item, from: 1, to: 1 });
            let (slab, mut there) = (noise(from), vec![0; to as usize]);
            let mut copies = Strided::default();
            copies.push(0, None, slab.as_ptr(), there.as_mut_ptr() as u64, axes.into_iter());
            let calls = carry_out(&copies, most);
            // No gaps at the destination: at most the last box of each row of boxes is not half full.
            let boxes = (from / (most / 2) + 1) as usize + counts.iter().max().map_or(0, |n| *n as usize);
            prop_assert!(calls.straight + calls.packed <= boxes, "{:?} of {} bytes", calls, from);
        }
    }
}
