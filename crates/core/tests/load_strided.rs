//! Loads into strided memory: slices with steps, permuted dimensions, padding between elements. What has to be where is
//! worked out element by element, without runs, pieces or boxes.
#![allow(clippy::unwrap_used)]

use penstock::format::Checkpoint;
use penstock::load::Load;
use penstock::memory::Keep;
use penstock::options::{Io, Options};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::strides::Foreign;
use penstock::plan::want::{AxisSlice, Want};
use penstock::stats::Report;
use penstock::{ErrorKind, Result};
use proptest::prelude::*;
use std::fs;
use std::sync::Arc;

/// A byte that no file has.
const UNTOUCHED: u8 = 0xee;
const DTYPES: [(&str, u64); 4] = [("U8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)];

#[derive(Debug, Clone)]
struct Tensor {
    dtype: (&'static str, u64),
    shape: Vec<u64>,
}

/// A want, and how its destination lies: each dimension's place in the order of strides, and the bytes that its step is
/// longer than what lies within it.
#[derive(Debug, Clone)]
struct Wanted {
    tensor: usize,
    region: Vec<AxisSlice>,
    order: Vec<usize>,
    padding: Vec<u64>,
}

struct Sample {
    checkpoint: Arc<Checkpoint>,
    bytes: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Sample {
    /// A file of these tensors with `before` spaces before its data.
    fn new(tensors: &[Tensor], before: usize) -> Sample {
        let (mut entries, mut at) = (Vec::new(), 0);
        for (i, t) in tensors.iter().enumerate() {
            let past = at + t.dtype.1 * t.shape.iter().product::<u64>();
            let (dtype, shape) = (t.dtype.0, &t.shape);
            entries.push(format!(r#""{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{past}]}}"#));
            at = past;
        }
        let json = format!("{{{}}}{}", entries.join(","), " ".repeat(before));
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend((0..at).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8 % UNTOUCHED));
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, &bytes).unwrap();
        Sample { checkpoint: Arc::new(Checkpoint::open(&[path]).unwrap()), bytes, _folder: folder }
    }

    fn load(&self, wants: Vec<Want>, tensors: Vec<Foreign>, keep: Keep, options: Options) -> Result<Report> {
        let load = Load::start(Request {
            checkpoint: self.checkpoint.clone(),
            wants,
            layout: None,
            device: Where::Cpu,
            memory: Memory::Into { tensors, keep, fence: None },
            options,
            stream: false,
        })?;
        load.wait(None)?;
        Ok(load.report())
    }
}

/// Strides of a destination, and its bytes from the first to the end of the last element.
fn strides(item: u64, wanted: &Wanted) -> (Vec<u64>, u64) {
    let mut strides = vec![0; wanted.region.len()];
    let mut within = item;
    for (&dimension, padding) in wanted.order.iter().zip(&wanted.padding) {
        strides[dimension] = within + padding;
        within += (wanted.region[dimension].count().max(1) - 1) * strides[dimension];
    }
    (strides, within)
}

/// Calls `give` with the indices of all elements.
fn each(counts: &[u64], give: &mut impl FnMut(&[u64])) {
    let mut index = vec![0; counts.len()];
    if counts.contains(&0) {
        return;
    }
    loop {
        give(&index);
        let Some(i) = (0..counts.len()).rev().find(|&i| index[i] + 1 < counts[i]) else { return };
        index[i] += 1;
        index[i + 1..].fill(0);
    }
}

fn check(tensors: &[Tensor], before: usize, wanted: &[Wanted], options: Options) -> Report {
    let sample = Sample::new(tensors, before);
    let (mut wants, mut found, mut expected, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for w in wanted {
        let (tensor, info) = (&tensors[w.tensor], sample.checkpoint.find(&w.tensor.to_string()).unwrap());
        let item = tensor.dtype.1;
        let (strides, span) = strides(item, w);
        let counts: Vec<u64> = w.region.iter().map(AxisSlice::count).collect();
        let mut memory = vec![UNTOUCHED; span as usize + 2 * GUARD];
        each(&counts, &mut |index| {
            let (mut from, mut step) = (info.begin, item);
            for ((slice, &extent), i) in w.region.iter().zip(&tensor.shape).zip(index).rev() {
                from += (slice.start + i * slice.step) * step;
                step *= extent;
            }
            let to = index.iter().zip(&strides).map(|(i, s)| i * s).sum::<u64>() as usize + GUARD;
            memory[to..to + item as usize].copy_from_slice(&sample.bytes[from as usize..(from + item) as usize]);
        });
        let there = vec![UNTOUCHED; memory.len()].leak();
        let address = there.as_mut_ptr() as u64 + GUARD as u64;
        places.push(Foreign { address, nbytes: span, strides: Some(strides.into()) });
        wants.push(Want { tensor: info.index, region: Some(w.region.clone().into()) });
        found.push((there.as_mut_ptr(), there.len()));
        expected.push(memory);
    }
    let report = sample.load(wants, places, Arc::new(()), options).unwrap();
    for (want, ((at, len), expected)) in found.into_iter().zip(expected).enumerate() {
        // SAFETY: leaked above, and the load has ended.
        let there = unsafe { Vec::from_raw_parts(at, len, len) };
        let wrong = there.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{want} of {wanted:?}");
    }
    report
}

/// Bytes on both sides of a destination that must stay as they are.
const GUARD: usize = 64;

/// Small dimensions, and one in the tens of thousands now and then.
fn tensor() -> impl Strategy<Value = Tensor> {
    let small = prop::collection::vec(prop_oneof![1u64..4, 1u64..12], 0..=5);
    (0..DTYPES.len(), small, 0usize..5, prop_oneof![2 => Just(1u64), 1 => 1u64..70, 1 => 1u64..2000]).prop_map(
        |(dtype, mut shape, at, factor)| {
            let rank = shape.len().max(1);
            if let Some(n) = shape.get_mut(at % rank) {
                *n *= factor;
            }
            while shape.iter().product::<u64>() > 60_000 {
                let most = (0..shape.len()).max_by_key(|&i| shape[i]).unwrap_or(0);
                shape[most] /= 2;
            }
            Tensor { dtype: DTYPES[dtype], shape }
        },
    )
}

fn wanted(tensors: Vec<Tensor>) -> impl Strategy<Value = (Vec<Tensor>, Vec<Wanted>)> {
    let one = {
        let tensors = tensors.clone();
        (0..tensors.len()).prop_flat_map(move |number| {
            let shape = tensors[number].shape.clone();
            let rank = shape.len();
            let region: Vec<_> = shape
                .into_iter()
                .map(|n| {
                    let part = (0..n, 0..=n, 1u64..4).prop_map(|(a, b, step)| {
                        let (start, end) = if a < b { (a, b) } else { (b, a) };
                        AxisSlice { start, end, step }
                    });
                    prop_oneof![2 => Just(AxisSlice::from(0..n)), 1 => part]
                })
                .collect();
            let order = Just((0..rank).collect::<Vec<_>>()).prop_shuffle();
            let order = prop_oneof![2 => order, 1 => Just((0..rank).rev().collect())];
            let padding = prop::collection::vec(prop_oneof![3 => Just(0u64), 1 => 0u64..20, 1 => Just(4096u64)], rank);
            (region, order, padding).prop_map(move |(region, order, mut padding)| {
                // Not hundreds of megabytes for one small tensor.
                if region.iter().map(AxisSlice::count).product::<u64>() > 500 {
                    padding.iter_mut().for_each(|p| *p = (*p).min(20));
                }
                Wanted { tensor: number, region, order, padding }
            })
        })
    };
    prop::collection::vec(one, 1..5).prop_map(move |wanted| (tensors.clone(), wanted))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_reaches_its_place_and_nothing_else_is_touched(
        (tensors, wanted) in prop::collection::vec(tensor(), 1..4).prop_flat_map(wanted),
        before in 0usize..40,
        pages in prop_oneof![Just(1u64), 1u64..6, Just(256)],
        gap in prop_oneof![Just(0u64), Just(64), Just(16 << 10)],
        io in prop_oneof![Just(Io::Auto), Just(Io::Buffered), Just(Io::Direct)],
    ) {
        check(&tensors, before, &wanted, Options { extent: pages * 4096, gap, io, ..Options::default() });
    }
}

/// A matrix of `rows` x `columns` in pieces, each transposed or not, beside each other in memory.
fn matrix(
    rows: u64,
    columns: u64,
    dtype: (&'static str, u64),
    parts: &[[std::ops::Range<u64>; 2]],
    turned: bool,
) -> Report {
    let order = if turned { vec![0, 1] } else { vec![1, 0] };
    let wanted: Vec<Wanted> = parts
        .iter()
        .map(|part| Wanted {
            tensor: 0,
            region: part.iter().cloned().map(AxisSlice::from).collect(),
            order: order.clone(),
            // The other half of a wider destination.
            padding: vec![0, dtype.1 * (part[usize::from(!turned)].end - part[usize::from(!turned)].start)],
        })
        .collect();
    check(&[Tensor { dtype, shape: vec![rows, columns] }], 3, &wanted, Options::default())
}

#[test]
fn parts_of_one_tensor_are_read_once() {
    const ROWS: u64 = 128;
    const COLUMNS: u64 = 4096;
    let halves = [[0..ROWS, 0..COLUMNS / 2], [0..ROWS, COLUMNS / 2..COLUMNS]];
    let pieces: Vec<_> = (0..32).map(|i| [i * ROWS / 32..(i + 1) * ROWS / 32, 0..COLUMNS]).collect();
    for (dtype, nbytes) in DTYPES.map(|d| (d, ROWS * COLUMNS * d.1)) {
        for parts in [&halves[..], &pieces] {
            for turned in [false, true] {
                let report = matrix(ROWS, COLUMNS, dtype, parts, turned);
                let read: u64 = report.routes.iter().map(|r| r.bytes).sum();
                assert_eq!((read, report.gap_bytes, report.slack_bytes), (nbytes, 0, 0), "{dtype:?} {turned}");
            }
        }
    }
}

#[test]
fn long_rows_are_scattered_by_the_read_itself_and_short_ones_take_a_slab() {
    // Rows of 8192 bytes into the half of a wider matrix: more of them than one preadv takes.
    let part = |columns: u64| [[0..700, 0..columns]];
    let long = matrix(700, 8192, DTYPES[0], &part(8192), false);
    assert_eq!(long.peak_staging, 0);
    let short = matrix(700, 2048, DTYPES[0], &part(2048), false);
    assert!(short.peak_staging > 0);
    let turned = matrix(700, 8192, DTYPES[0], &part(8192), true);
    assert!(turned.peak_staging > 0);
}

#[test]
fn memory_that_does_not_fit_is_refused_before_a_byte_moves() {
    let sample = Sample::new(&[Tensor { dtype: DTYPES[2], shape: vec![6, 5] }], 0);
    let memory = vec![UNTOUCHED; 4096];
    let address = memory.as_ptr() as u64;
    let refused = |nbytes, strides: Option<Vec<u64>>| {
        let into = vec![Foreign { address, nbytes, strides: strides.map(Into::into) }];
        let error = sample.load(vec![Want::whole(0)], into, Arc::new(memory.clone()), Options::default()).unwrap_err();
        (error.kind(), error.to_string())
    };
    for (nbytes, strides, kind, why) in [
        (119, None, ErrorKind::Mismatch, "119 bytes"),
        (121, None, ErrorKind::Mismatch, "121 bytes"),
        (120, Some(vec![20]), ErrorKind::Mismatch, "1 dimensions"),
        (119, Some(vec![20, 4]), ErrorKind::Invalid, "behind"),
        (119, Some(vec![4, 24]), ErrorKind::Invalid, "behind"),
        (4096, Some(vec![u64::MAX / 4, 4]), ErrorKind::Invalid, "behind"),
        (4096, Some(vec![20, u64::MAX]), ErrorKind::Invalid, "behind"),
        (4096, Some(vec![0, 4]), ErrorKind::Invalid, "share memory"),
        (4096, Some(vec![20, 3]), ErrorKind::Invalid, "share memory"),
        (4096, Some(vec![16, 4]), ErrorKind::Invalid, "share memory"),
        (u64::MAX, Some(vec![40, 4]), ErrorKind::Invalid, "behind"),
        (u64::MAX, Some(vec![u64::MAX, 4]), ErrorKind::Invalid, "behind"),
    ] {
        let (found, text) = refused(nbytes, strides.clone());
        assert_eq!(found, kind, "{nbytes} {strides:?}: {text}");
        assert!(text.contains(why) && text.contains("model.safetensors"), "{text}");
    }
    let none = sample.load(vec![Want::whole(0)], Vec::new(), Arc::new(()), Options::default()).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Invalid);
    assert!(memory.iter().all(|&b| b == UNTOUCHED));
}
