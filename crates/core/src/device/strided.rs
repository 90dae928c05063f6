//! Copies between a slab and strided memory: slices with steps, columns, transposed tensors.
//!
//! One copy is a grid: items of some bytes in a few evenly strided axes. A million elements are one grid. The elements of a
//! grid may be converted on their way ([`Cast`]).

use super::cast::{Cast, Item, OfItem, Plain};

/// The copies of one batch into strided memory.
#[derive(Debug, Clone, Default)]
pub struct Strided {
    grids: Vec<Grid>,
    axes: Vec<GridAxis>,
}

/// One axis of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridAxis {
    /// Steps, at least 1.
    pub count: u64,
    /// Bytes from step to step in the slab.
    pub from: u64,
    /// Bytes from step to step at the destination.
    pub to: u64,
}

/// One copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    /// The first byte in the slab, and its address at the destination.
    pub(super) from: *const u8,
    pub(super) to: u64,
    /// Bytes that are contiguous on both sides; elements if they are converted.
    pub(super) item: u64,
    /// The conversion of the elements.
    cast: Option<Cast>,
    /// Number of the destination block.
    pub(super) block: u32,
    /// Its axes end here in the list of all; they begin where those of the grid before end.
    axes: usize,
}

impl Grid {
    /// Bytes of an item in the slab.
    fn bytes(&self) -> u64 {
        self.item * self.cast.map_or(1, Cast::from_bytes)
    }
}

/// Bytes of a tile while it is transposed: half of the first cache of any processor.
const TILE: usize = 16 << 10;

impl Strided {
    /// Adds a grid of single bytes, or of elements that are converted. The axes may come in any order; those that are
    /// contiguous on both sides become the item, and neighbours that continue each other become one axis, if they come from
    /// the outermost to the innermost. `block` is the number of the destination block.
    pub fn push(
        &mut self,
        block: u32,
        cast: Option<Cast>,
        from: *const u8,
        to: u64,
        axes: impl Iterator<Item = GridAxis>,
    ) {
        let (unit, unit_there) = cast.map_or((1, 1), |cast| (cast.from_bytes(), cast.to_bytes()));
        let first = self.axes.len();
        for axis in axes.filter(|a| a.count > 1) {
            match self.axes[first..].last_mut() {
                Some(outer) if outer.from == axis.count * axis.from && outer.to == axis.count * axis.to => {
                    *outer = GridAxis { count: outer.count * axis.count, ..axis };
                }
                _ => self.axes.push(axis),
            }
        }
        let mut item = 1;
        let follows = |a: &GridAxis, item: u64| a.from == item * unit && a.to == item * unit_there;
        while self.axes.len() > first && self.axes.last().is_some_and(|a| follows(a, item)) {
            item *= self.axes.pop().map_or(1, |a| a.count);
        }
        self.grids.push(Grid { from, to, item, cast, block, axes: self.axes.len() });
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.grids.is_empty()
    }

    /// How many grids there are.
    pub fn len(&self) -> usize {
        self.grids.len()
    }

    /// Whether elements are converted.
    pub fn converts(&self) -> bool {
        self.grids.iter().any(|grid| grid.cast.is_some())
    }

    /// How many bytes of the slab there are to copy, and in how many items.
    pub fn bytes_and_items(&self) -> (u64, u64) {
        self.each().fold((0, 0), |(bytes, items), (grid, axes)| {
            let n = axes.iter().map(|a| a.count).product::<u64>();
            (bytes + n * grid.bytes(), items + n)
        })
    }

    /// Calls `give` with every item: where it is in the slab, its address at the destination, and its bytes in the slab.
    pub fn items(&self, mut give: impl FnMut(*const u8, u64, u64)) {
        for (grid, axes) in self.each() {
            walk(axes, grid.from, grid.to, &mut |from, to| give(from, to, grid.bytes()));
        }
    }

    /// The destination block of each grid.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.grids.iter().map(|grid| grid.block)
    }

    pub(super) fn each(&self) -> impl Iterator<Item = (&Grid, &[GridAxis])> {
        let mut first = 0;
        self.grids.iter().map(move |g| (g, &self.axes[std::mem::replace(&mut first, g.axes)..g.axes]))
    }

    /// Copies all of it.
    ///
    /// # Safety
    /// Both sides are valid for every item. The items of the destination do not overlap, and nobody else touches them.
    pub(super) unsafe fn run(&self) {
        let mut axes = Vec::new();
        for (grid, own) in self.each() {
            axes.clear();
            axes.extend_from_slice(own);
            // The innermost axis is the shortest step at the destination: writes cost more than reads.
            axes.sort_unstable_by_key(|a| std::cmp::Reverse(a.to));
            // SAFETY: as the function's: the axes are the grid's, in another order.
            unsafe {
                let copies = Ordered { grid, axes: &mut axes };
                match (grid.cast, grid.item) {
                    (Some(cast), _) => cast.with(copies),
                    (None, 1) => copy::<Plain<[u8; 1]>>(copies),
                    (None, 2) => copy::<Plain<[u8; 2]>>(copies),
                    (None, 4) => copy::<Plain<[u8; 4]>>(copies),
                    (None, 8) => copy::<Plain<[u8; 8]>>(copies),
                    (None, 16) => copy::<Plain<[u8; 16]>>(copies),
                    _ => rows::<Plain<u8>>(copies),
                }
            }
        }
    }
}

/// A grid whose axes are in the order of their steps at the destination.
struct Ordered<'a> {
    grid: &'a Grid,
    axes: &'a mut Vec<GridAxis>,
}

impl OfItem for Ordered<'_> {
    /// # Safety
    /// As for [`Strided::run`].
    unsafe fn run<I: Item>(self) {
        // SAFETY: as the function's.
        unsafe {
            match self.grid.item {
                1 => copy::<I>(self),
                _ => rows::<I>(self),
            }
        }
    }
}

/// Calls `give` with the first byte of every item on both sides, the last axis innermost.
fn walk(axes: &[GridAxis], from: *const u8, to: u64, give: &mut impl FnMut(*const u8, u64)) {
    let Some((axis, inner)) = axes.split_first() else { return give(from, to) };
    for i in 0..axis.count {
        walk(inner, from.wrapping_add((i * axis.from) as usize), to + i * axis.to, give);
    }
}

/// Copies a grid whose items are rows.
///
/// # Safety
/// As for [`Strided::run`].
unsafe fn rows<I: Item>(Ordered { grid, axes }: Ordered<'_>) {
    walk(axes, grid.from, grid.to, &mut |from, to| {
        // SAFETY: as the function's: an item is so many elements, or bytes, which are contiguous on both sides.
        unsafe { I::row(from, to as *mut u8, grid.item as usize) }
    });
}

/// Copies single items, along rows or in tiles.
///
/// # Safety
/// As for [`Strided::run`].
unsafe fn copy<I: Item>(Ordered { grid, axes }: Ordered<'_>) {
    let (from, to) = (grid.from, grid.to);
    let Some(row) = axes.pop() else {
        // SAFETY: as the function's.
        return unsafe { I::one(from, to as *mut u8) };
    };
    let nearest = (0..axes.len()).min_by_key(|&i| axes[i].from).filter(|&i| axes[i].from < row.from);
    match nearest.map(|i| axes.remove(i)) {
        Some(column) => walk(axes, from, to, &mut |from, to| {
            // SAFETY: as the function's: every matrix is a part of the grid.
            unsafe { transpose::<I>(from, to as *mut u8, row, column) }
        }),
        None => walk(axes, from, to, &mut |from, to| {
            // SAFETY: as the function's: every row is a part of the grid.
            unsafe { copy_row::<I>(from, to as *mut u8, row) }
        }),
    }
}

/// Copies one row of items.
///
/// # Safety
/// Both sides are valid for all items of the row.
#[inline(always)]
unsafe fn copy_row<I: Item>(from: *const u8, to: *mut u8, row: GridAxis) {
    for i in 0..row.count {
        // SAFETY: as the function's.
        unsafe { I::one(from.add((i * row.from) as usize), to.add((i * row.to) as usize)) }
    }
}

/// Copies a matrix: `row` is the shortest step at the destination, `column` the shortest in the slab. Tile by tile: each is
/// gathered along the slab's rows, so that every cache line of the slab is read once, and is written along the
/// destination's rows. Between them it lies in a small array, because rows that are a power of two apart would share a few
/// lines of the cache. Elements are converted while they are gathered, where most of them are contiguous.
///
/// # Safety
/// Both sides are valid for all items of the matrix.
unsafe fn transpose<I: Item>(from: *const u8, to: *mut u8, row: GridAxis, column: GridAxis) {
    #[repr(align(64))]
    struct Tile([std::mem::MaybeUninit<u8>; TILE]);
    let mut tile = Tile([std::mem::MaybeUninit::uninit(); TILE]);
    let tile = tile.0.as_mut_ptr().cast::<I::There>();
    let size = size_of::<I::There>();
    // The largest square of a power of two.
    let side = const { 1 << ((TILE / size_of::<I::There>()).ilog2() / 2) };
    let in_slab = |n| GridAxis { count: n, from: column.from, to: size as u64 };
    let in_tile = |n| GridAxis { count: n, from: (side * size) as u64, to: row.to };
    for j in (0..column.count).step_by(side) {
        let columns = (column.count - j).min(side as u64);
        for i in (0..row.count).step_by(side) {
            let rows = (row.count - i).min(side as u64);
            // SAFETY: `rows` times `columns` items of the matrix, and as many of the tile, which has `side` times `side`.
            unsafe {
                let from = from.add((i * row.from + j * column.from) as usize);
                for y in 0..rows {
                    let line = tile.add(y as usize * side).cast::<u8>();
                    let from = from.add((y * row.from) as usize);
                    if column.from == I::FROM as u64 {
                        I::row(from, line, columns as usize);
                    } else {
                        copy_row::<I>(from, line, in_slab(columns));
                    }
                }
                let to = to.add((i * row.to + j * column.to) as usize);
                for x in 0..columns {
                    let (from, to) = (tile.add(x as usize).cast::<u8>(), to.add((x * column.to) as usize));
                    if row.to == size as u64 && rows == side as u64 {
                        // The compiler knows the count and both steps.
                        copy_row::<Plain<I::There>>(from, to, GridAxis { to: size as u64, ..in_tile(side as u64) });
                    } else {
                        copy_row::<Plain<I::There>>(from, to, in_tile(rows));
                    }
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    use super::super::cast::tests::{converted, FLOATS};
    use super::*;
    use proptest::prelude::*;

    /// Up to four axes of items, which lie in one order in the slab and in another one at the destination. `padding` of each:
    /// whether its step is longer than need be, here and there.
    pub(crate) fn axes(
        (item, item_there): (u64, u64),
        counts: &[u64],
        order: [u8; 4],
        padding: [[bool; 2]; 4],
    ) -> (Vec<GridAxis>, [u64; 2]) {
        let mut axes = vec![GridAxis { count: 1, from: 0, to: 0 }; counts.len()];
        let (mut from, mut to) = (item, item_there);
        for (i, &count) in counts.iter().enumerate().rev() {
            (axes[i].count, axes[i].from) = (count, from + u64::from(padding[i][0]) * 3);
            from += (count - 1) * axes[i].from;
        }
        let mut left: Vec<usize> = (0..counts.len()).collect();
        while !left.is_empty() {
            let i = left.remove(order[left.len() - 1] as usize % left.len());
            axes[i].to = to + u64::from(padding[i][1]) * 5;
            to += (axes[i].count - 1) * axes[i].to;
        }
        (axes, [from, to])
    }

    /// The offsets of all steps of the axes: in the slab, and at the destination.
    pub(crate) fn offsets(axes: &[GridAxis]) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        walk(axes, std::ptr::null(), 0, &mut |from, to| found.push((from as usize, to as usize)));
        found
    }

    pub(crate) fn noise(len: u64) -> Vec<u8> {
        (0..len).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
    }

    /// Counts of a few axes, or of a matrix that takes several tiles.
    pub(crate) fn counts() -> impl Strategy<Value = Vec<u64>> {
        prop_oneof![prop::collection::vec(1u64..5, 0..=4), prop::collection::vec(prop_oneof![1u64..8, 60u64..140], 2),]
    }

    proptest! {
        #[test]
        fn every_item_is_copied_and_nothing_else_is_touched(
            item in prop::sample::select(vec![1u64, 2, 3, 4, 8, 12, 16]),
            counts in counts(),
            order in any::<[u8; 4]>(),
            padding in any::<[[bool; 2]; 4]>(),
        ) {
            let (mut axes, [from, to]) = axes((item, item), &counts, order, padding);
            axes.push(GridAxis { count: item, from: 1, to: 1 });
            let source = noise(from);
            // One byte further: no address has to suit the items.
            let (mut there, mut expected) = (vec![0xee; to as usize + 2], vec![0xee; to as usize + 2]);
            for (from, to) in offsets(&axes) {
                expected[to + 1] = source[from];
            }
            let mut copies = Strided::default();
            let first = there.as_mut_ptr() as u64 + 1;
            copies.push(0, None, source.as_ptr(), first, axes.iter().copied());
            prop_assert_eq!(copies.bytes_and_items().0, counts.iter().product::<u64>() * item);
            // SAFETY: both vectors are as long as the axes say, and nobody else has them.
            unsafe { copies.run() };
            prop_assert_eq!(there, expected);
        }

        #[test]
        fn every_element_is_converted_to_its_place_and_nothing_else_is_touched(
            types in prop::sample::subsequence(FLOATS.to_vec(), 2),
            turned in any::<bool>(),
            counts in counts(),
            order in any::<[u8; 4]>(),
            padding in any::<[[bool; 2]; 4]>(),
        ) {
            let cast = if turned { Cast::new(types[1], types[0]) } else { Cast::new(types[0], types[1]) }.unwrap();
            let (unit, unit_there) = (cast.from_bytes() as usize, cast.to_bytes() as usize);
            let (axes, [from, to]) = axes((unit as u64, unit_there as u64), &counts, order, padding);
            let source = noise(from);
            let (mut there, mut expected) = (vec![0xee; to as usize + 2], vec![0xee; to as usize + 2]);
            for (from, to) in offsets(&axes) {
                expected[to + 1..][..unit_there].copy_from_slice(&converted(cast, &source[from..from + unit]));
            }
            let mut copies = Strided::default();
            let first = there.as_mut_ptr() as u64 + 1;
            copies.push(0, Some(cast), source.as_ptr(), first, axes.iter().copied());
            prop_assert!(copies.converts());
            prop_assert_eq!(copies.bytes_and_items().0, counts.iter().product::<u64>() * unit as u64);
            // SAFETY: as above.
            unsafe { copies.run() };
            prop_assert_eq!(there, expected);
        }
    }
}
