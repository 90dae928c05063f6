//! Holes between wanted runs: whether there are enough of them that it matters what a read costs, and where that can be
//! timed.

use super::layout::Layout;
use super::survey::Surveyed;
use crate::options::{LEAST_GAP, PAGE};
use crate::store::{Sample, LONG, LONG_BYTES, SHORT};
use std::ops::Range;

/// Fewer holes than this are not worth the time of measuring (5 to 30 ms on a disk).
const MANY: u64 = 4096;

/// Where to time reads of file number `file`, of `size` bytes: in places that the load wants and the page cache does not
/// have. `None` if it has few holes that could be read, not skipped.
pub(super) fn sample(layout: &Layout, file: u32, surveyed: &Surveyed, size: u64) -> Option<Sample> {
    let with_holes = |&(want, of): &(usize, &u32)| {
        let hole = layout.runs[want].axes.last().map_or(0, |(_, stride)| stride - layout.runs[want].len);
        *of == file && (LEAST_GAP + 1..=LONG_BYTES).contains(&hole)
    };
    let runs: Vec<_> = layout.files.iter().enumerate().filter(with_holes).map(|(want, _)| &layout.runs[want]).collect();
    let holes: u64 = runs.iter().map(|r| r.count()).sum();
    if holes < MANY {
        return None;
    }
    let offset = |mut number: u64| {
        for of_want in &runs {
            if number < of_want.count() {
                return of_want.offset(number) / PAGE * PAGE;
            }
            number -= of_want.count();
        }
        0
    };
    // The long ones lie between the short ones.
    let spread = |count: usize, len: u64, shift: u64| -> Vec<u64> {
        let places = (0..count as u64).map(|i| offset((holes * (2 * i + shift) / (2 * count as u64)).min(holes - 1)));
        places.filter(|at| at + len <= size && !is_resident(&surveyed.resident, *at)).collect()
    };
    let found = Sample { short: spread(SHORT, PAGE, 0), long: spread(LONG, LONG_BYTES, 1) };
    (found.short.len() >= SHORT / 2 && found.long.len() >= LONG / 2).then_some(found)
}

fn is_resident(resident: &[Range<u64>], at: u64) -> bool {
    resident.get(resident.partition_point(|r| r.end <= at)).is_some_and(|r| r.start <= at)
}
