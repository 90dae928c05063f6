#![no_main]
//! Any dtype, shape and region: runs are the bytes that a walk over all elements finds.

use libfuzzer_sys::fuzz_target;
use penstock::format::{Checkpoint, DType};
use penstock::plan::want::{AxisSlice, Runs, Want};
use std::ops::Range;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let dtype = DType::ALL[usize::from(first) % DType::ALL.len()];
    let slice = |c: &[u8]| AxisSlice {
        start: u64::from(c[1] % 9),
        end: u64::from(c[2] % 9),
        step: 1 + u64::from(c[0] / 7 % 4),
    };
    let axes: Vec<(u64, AxisSlice)> =
        rest.chunks_exact(3).take(5).map(|c| (u64::from(c[0] % 7), slice(c))).collect();
    let shape: Vec<u64> = axes.iter().map(|a| a.0).collect();
    let region: Vec<AxisSlice> = axes.iter().map(|a| a.1).collect();
    let elements: u64 = shape.iter().product();
    let Some(n) = dtype.nbytes(elements) else { return };
    let json = format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{n}]}}}}"#);
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    let begin = file.len() as u64;
    let checkpoint = Checkpoint::from_bytes(&file, begin + n).expect("well formed");
    let runs = Runs::of(&checkpoint, &Want::part(0, region.clone()));
    if axes.iter().any(|(extent, r)| r.start > r.end || r.end > *extent) {
        assert!(runs.is_err(), "a region outside its tensor");
        return;
    }
    let mut wanted: Vec<Range<u64>> = Vec::new();
    for element in 0..elements {
        let mut rest = element;
        let mut inside = true;
        for (extent, r) in axes.iter().rev() {
            let at = rest % extent;
            inside &= (r.start..r.end).contains(&at) && (at - r.start) % r.step == 0;
            rest /= extent;
        }
        if inside {
            let at = begin * 8 + element * dtype.bits();
            match wanted.last_mut() {
                Some(last) if last.end == at => last.end += dtype.bits(),
                _ => wanted.push(at..at + dtype.bits()),
            }
        }
    }
    let on_bytes = wanted.iter().all(|r| r.start % 8 == 0 && r.end % 8 == 0);
    assert_eq!(runs.is_ok(), on_bytes, "{dtype} x {shape:?} [{region:?}]: {runs:?}");
    if let Ok(runs) = runs {
        let got: Vec<Range<u64>> = (0..runs.count())
            .map(|i| runs.offset(i) * 8..(runs.offset(i) + runs.len) * 8)
            .filter(|r| !r.is_empty())
            .collect();
        // With a step the last element of a row may be the neighbour of the first one of the next.
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in got {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        assert_eq!(joined, wanted);
    }
});
