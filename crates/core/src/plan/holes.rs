//! Holes between wanted runs: whether there are enough of them that it matters what a read costs, and where that can be
//! timed.

use super::layout::Layout;
use crate::options::{LEAST_GAP, PAGE};
use crate::store::{Sample, LONG, LONG_BYTES, SHORT};
use std::ops::Range;

/// Fewer holes than this are not worth the time of measuring: it takes 80 reads.
const MANY: u64 = 4096;

/// Where to time reads of file number `file`, of `size` bytes: in places that the load wants and that are not `resident`.
/// `None` if it has few holes that could be read, not skipped, or few such places.
pub(super) fn sample(layout: &Layout, file: u32, resident: &[Range<u64>], size: u64) -> Option<Sample> {
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
        places.filter(|at| at + len <= size && !is_resident(resident, *at)).collect()
    };
    let found = Sample { short: spread(SHORT, PAGE, 0), long: spread(LONG, LONG_BYTES, 1) };
    (found.short.len() >= SHORT / 2 && found.long.len() >= LONG / 2).then_some(found)
}

fn is_resident(resident: &[Range<u64>], at: u64) -> bool {
    resident.get(resident.partition_point(|r| r.end <= at)).is_some_and(|r| r.start <= at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::want::Runs;
    use std::slice::from_ref;

    const SIZE: u64 = 1 << 30;

    fn rows(count: u64, len: u64, stride: u64) -> Layout {
        Layout { runs: vec![Runs { start: 0, len, axes: vec![(count, stride)] }], files: vec![0], ..Layout::default() }
    }

    fn found(layout: &Layout, resident: &[Range<u64>]) -> Option<(usize, usize)> {
        sample(layout, 0, resident, SIZE).map(|found| (found.short.len(), found.long.len()))
    }

    #[test]
    fn reads_are_timed_where_there_are_thousands_of_holes() {
        let all = Some((SHORT, LONG));
        assert_eq!(found(&rows(MANY, 4096, 24 << 10), &[]), all);
        assert_eq!(found(&rows(MANY - 1, 4096, 24 << 10), &[]), None, "few holes");
        assert_eq!(found(&rows(MANY, 4096, 4096 + LEAST_GAP), &[]), None, "holes that are read anyway");
        assert_eq!(found(&rows(MANY, 4096, 4097 + LEAST_GAP), &[]), all);
        assert_eq!(found(&rows(MANY, 4096, 4097 + LONG_BYTES), &[]), None, "holes that are never read");
        assert_eq!(found(&Layout { files: vec![1], ..rows(MANY, 4096, 24 << 10) }, &[]), None, "another file");
    }

    #[test]
    fn what_is_in_memory_is_not_timed_nor_what_is_past_the_end() {
        let layout = rows(5000, 4096, 24 << 10);
        let half = 5000 * (24 << 10) / 2;
        assert_eq!(found(&layout, from_ref(&(0..SIZE))), None);
        assert_eq!(found(&layout, from_ref(&(0..half))), Some((SHORT / 2, LONG / 2)));
        let sample = sample(&layout, 0, from_ref(&(0..half)), SIZE).unwrap();
        assert!(sample.short.iter().chain(&sample.long).all(|at| *at >= half / PAGE * PAGE && at % PAGE == 0));
        let end = 5000 * (24 << 10) / 4;
        assert!(super::sample(&layout, 0, &[], end).is_none(), "too few places are left");
    }
}
