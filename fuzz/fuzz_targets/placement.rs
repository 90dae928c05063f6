#![no_main]
//! Any dtype, shape and region: runs are the bytes that a walk over all elements finds.

use libfuzzer_sys::fuzz_target;
use penstock::format::{Checkpoint, DType};
use penstock::placement::{Runs, Want};
use std::ops::Range;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let dtype = DType::ALL[usize::from(first) % DType::ALL.len()];
    let axes: Vec<(u64, Range<u64>)> =
        rest.chunks_exact(3).take(5).map(|c| (u64::from(c[0] % 7), u64::from(c[1] % 9)..u64::from(c[2] % 9))).collect();
    let shape: Vec<u64> = axes.iter().map(|a| a.0).collect();
    let region: Box<[Range<u64>]> = axes.iter().map(|a| a.1.clone()).collect();
    let elements: u64 = shape.iter().product();
    let Some(n) = dtype.nbytes(elements) else { return };
    let json = format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{n}]}}}}"#);
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    let begin = file.len() as u64;
    let checkpoint = Checkpoint::from_bytes(&file, begin + n).expect("well formed");
    let runs = Runs::of(&checkpoint, &Want { tensor: 0, region: Some(region.clone()) });
    if axes.iter().any(|(extent, r)| r.start > r.end || r.end > *extent) {
        assert!(runs.is_err(), "a region outside its tensor");
        return;
    }
    let mut wanted: Vec<Range<u64>> = Vec::new();
    for element in 0..elements {
        let mut rest = element;
        let mut inside = true;
        for (extent, r) in axes.iter().rev() {
            inside &= r.contains(&(rest % extent));
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
        assert_eq!(got, wanted);
    }
});
