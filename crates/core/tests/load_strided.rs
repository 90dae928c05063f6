//! Loads into memory that is strided or of another dtype: slices with steps, dimensions that are permuted, divided or joined,
//! padding between elements, casts. What has to be where is worked out element by element, without runs, pieces or boxes.
#![allow(clippy::unwrap_used)]

use penstock::format::Checkpoint;
use penstock::load::Load;
use penstock::memory::Keep;
use penstock::options::{Io, Options};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::strides::Foreign;
use penstock::plan::want::{AxisSlice, Want};
use penstock::stats::Report;
use penstock::{DType, ErrorKind, Result};
use proptest::prelude::*;
use std::fs;
use std::sync::Arc;

/// A byte that no file has.
const UNTOUCHED: u8 = 0xee;
const DTYPES: [(&str, u64); 4] = [("U8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)];
/// Those that are cast, the largest first: no element of a file that begins with these is misaligned.
const FLOATS: [(&str, u64); 4] = [("F64", 8), ("F32", 4), ("BF16", 2), ("F16", 2)];

#[derive(Debug, Clone)]
struct Tensor {
    dtype: (&'static str, u64),
    shape: Vec<u64>,
}

/// A want, and how its destination lies: the counts of its dimensions, these in the order of their strides, the shortest
/// first, and the bytes that each step is longer than what lies within it. And the destination's dtype, if it is another one.
#[derive(Debug, Clone)]
struct Wanted {
    tensor: usize,
    region: Vec<AxisSlice>,
    counts: Vec<u64>,
    order: Vec<usize>,
    padding: Vec<u64>,
    cast: Option<(&'static str, u64)>,
}

impl Wanted {
    /// A part of a tensor, in dimensions of its own.
    fn new(tensor: usize, region: Vec<AxisSlice>, order: Vec<usize>, padding: Vec<u64>) -> Wanted {
        let counts = region.iter().map(AxisSlice::count).collect();
        Wanted { tensor, region, counts, order, padding, cast: None }
    }
}

struct Sample {
    checkpoint: Arc<Checkpoint>,
    bytes: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Sample {
    /// A file of these tensors with `before` spaces before its data. `numbers`: every element is a finite number, and the data
    /// begin at a multiple of 8.
    fn new(tensors: &[Tensor], before: usize, numbers: bool) -> Sample {
        let (mut entries, mut at) = (Vec::new(), 0);
        for (i, t) in tensors.iter().enumerate() {
            let past = at + t.dtype.1 * t.shape.iter().product::<u64>();
            let (dtype, shape) = (t.dtype.0, &t.shape);
            entries.push(format!(r#""{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{past}]}}"#));
            at = past;
        }
        let json = format!("{{{}}}{}", entries.join(","), " ".repeat(before));
        let json = if numbers { format!("{json:w$}", w = json.len().next_multiple_of(8)) } else { json };
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        // Without the highest bit of the exponent a float is less than 2.
        let kept = if numbers { 0xbf } else { 0xff };
        bytes.extend((0..at).map(|i| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8 % UNTOUCHED) & kept));
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

/// Dimensions of a destination, and its bytes from the first to the end of the last element.
fn dims(item: u64, wanted: &Wanted) -> (Vec<(u64, u64)>, u64) {
    let mut dims: Vec<(u64, u64)> = wanted.counts.iter().map(|&count| (count, 0)).collect();
    let mut within = item;
    for (&dimension, padding) in wanted.order.iter().zip(&wanted.padding) {
        dims[dimension].1 = within + padding;
        within += (dims[dimension].0.max(1) - 1) * dims[dimension].1;
    }
    (dims, within)
}

/// Where element number `number` of a destination lies, in row-major order.
fn place(dims: &[(u64, u64)], mut number: u64) -> u64 {
    let mut at = 0;
    for (count, stride) in dims.iter().rev() {
        at += number % count * stride;
        number /= count;
    }
    at
}

/// A finite number.
fn decoded(dtype: &str, bytes: &[u8]) -> f64 {
    match dtype {
        "F64" => f64::from_le_bytes(bytes.try_into().unwrap()),
        "F32" => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        "BF16" => f32::from_le_bytes([0, 0, bytes[0], bytes[1]]).into(),
        _ => {
            let bits = u16::from_le_bytes(bytes.try_into().unwrap());
            let (exponent, significand) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
            let size = match exponent {
                0 => significand * 2f64.powi(-24),
                _ => (1024.0 + significand) * 2f64.powi(exponent - 25),
            };
            if bits >> 15 == 0 {
                size
            } else {
                -size
            }
        }
    }
}

/// The element of a dtype that is nearest to a number less than 2, by way of F32.
fn encoded(dtype: &str, number: f64) -> Vec<u8> {
    let single = number as f32;
    let round = |fraction: i32, least: i32| {
        let exponent = (f64::from(single.abs()).log2().floor()).max(f64::from(least)) as i32;
        let unit = 2f64.powi(exponent - fraction);
        (f64::from(single) / unit).round_ties_even() * unit
    };
    match dtype {
        "F64" => f64::from(single).to_le_bytes().into(),
        "F32" => single.to_le_bytes().into(),
        "BF16" => (round(7, -126) as f32).to_le_bytes()[2..].into(),
        _ => {
            let rounded = round(10, -14);
            let exponent = rounded.abs().log2().floor() as i32;
            let bits = match exponent {
                -14.. => ((exponent + 15) << 10) as u16 + (rounded.abs() * 2f64.powi(10 - exponent)) as u16 - 1024,
                _ => (rounded.abs() * 2f64.powi(24)) as u16,
            };
            (bits | u16::from(rounded.is_sign_negative()) << 15).to_le_bytes().into()
        }
    }
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
    let sample = Sample::new(tensors, before, wanted.iter().any(|w| w.cast.is_some()));
    let (mut wants, mut found, mut expected, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for w in wanted {
        let (tensor, info) = (&tensors[w.tensor], sample.checkpoint.find(&w.tensor.to_string()).unwrap());
        let (item, to_dtype) = (tensor.dtype.1, w.cast.unwrap_or(tensor.dtype));
        let (dims, span) = dims(to_dtype.1, w);
        let counts: Vec<u64> = w.region.iter().map(AxisSlice::count).collect();
        let mut memory = vec![UNTOUCHED; span as usize + 2 * GUARD];
        let mut number = 0;
        each(&counts, &mut |index| {
            let (mut from, mut step) = (info.begin, item);
            for ((slice, &extent), i) in w.region.iter().zip(&tensor.shape).zip(index).rev() {
                from += (slice.start + i * slice.step) * step;
                step *= extent;
            }
            let element = &sample.bytes[from as usize..(from + item) as usize];
            let element = match w.cast {
                Some((dtype, _)) => encoded(dtype, decoded(tensor.dtype.0, element)),
                None => element.to_vec(),
            };
            let to = place(&dims, number) as usize + GUARD;
            number += 1;
            memory[to..to + element.len()].copy_from_slice(&element);
        });
        let there = vec![UNTOUCHED; memory.len()].leak();
        let address = there.as_mut_ptr() as u64 + GUARD as u64;
        let cast = w.cast.map(|cast| DType::parse(cast.0).unwrap());
        places.push(Foreign { address, nbytes: span, dims: Some(dims.into()), cast });
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

/// Other dimensions of as many elements: some are divided into two, some are one with that before.
fn reshaped(counts: &[u64], how: &[u8]) -> Vec<u64> {
    let mut found: Vec<u64> = Vec::new();
    for (&count, how) in counts.iter().zip(how) {
        match (how % 4, found.last_mut()) {
            (0, Some(before)) => *before *= count,
            (1, _) => {
                let divisor = (2..=count / 2).find(|d| count % d == 0).unwrap_or(1);
                found.extend([divisor, count / divisor]);
            }
            _ => found.push(count),
        }
    }
    found
}

fn wanted(tensors: Vec<Tensor>, cast: bool) -> impl Strategy<Value = (Vec<Tensor>, Vec<Wanted>)> {
    let one = {
        let tensors = tensors.clone();
        (0..tensors.len()).prop_flat_map(move |number| {
            let shape = tensors[number].shape.clone();
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
            let dtype = tensors[number].dtype;
            let shaped = (region, any::<[u8; 5]>()).prop_map(|(region, how)| {
                let counts: Vec<u64> = region.iter().map(AxisSlice::count).collect();
                (region, reshaped(&counts, &how))
            });
            shaped.prop_flat_map(move |(region, counts)| {
                let rank = counts.len();
                let order = Just((0..rank).collect::<Vec<_>>()).prop_shuffle();
                let order = prop_oneof![2 => order, 1 => Just((0..rank).rev().collect())];
                let padding = prop_oneof![3 => Just(0u64), 1 => 0u64..20, 1 => Just(4096u64)];
                let padding = prop::collection::vec(padding, rank);
                let casts: Vec<_> = if cast { FLOATS.into_iter().filter(|to| *to != dtype).collect() } else { vec![] };
                // `casts.len()` stands for no cast.
                (order, padding, 0..=casts.len()).prop_map(move |(order, mut padding, cast)| {
                    // Not hundreds of megabytes for one small tensor.
                    if counts.iter().product::<u64>() > 500 {
                        padding.iter_mut().for_each(|p| *p = (*p).min(20));
                    }
                    let (region, counts, cast) = (region.clone(), counts.clone(), casts.get(cast).copied());
                    Wanted { tensor: number, region, counts, order, padding, cast }
                })
            })
        })
    };
    prop::collection::vec(one, 1..5).prop_map(move |wanted| (tensors.clone(), wanted))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_reaches_its_place_and_nothing_else_is_touched(
        (tensors, wanted) in prop::collection::vec(tensor(), 1..4).prop_flat_map(|tensors| wanted(tensors, false)),
        before in 0usize..40,
        pages in prop_oneof![Just(1u64), 1u64..6, Just(256)],
        gap in prop_oneof![Just(0u64), Just(64), Just(16 << 10)],
        io in prop_oneof![Just(Io::Auto), Just(Io::Buffered), Just(Io::Direct)],
    ) {
        check(&tensors, before, &wanted, Options { extent: pages * 4096, gap: Some(gap), io, ..Options::default() });
    }

    #[test]
    fn every_element_is_converted_at_its_place_and_nothing_else_is_touched(
        (tensors, wanted) in prop::collection::vec(tensor(), 1..4).prop_flat_map(|mut tensors| {
            let of = |dtype| DTYPES.iter().position(|d| *d == dtype).unwrap_or(0);
            tensors.iter_mut().for_each(|t| t.dtype = FLOATS[of(t.dtype)]);
            tensors.sort_by_key(|t| std::cmp::Reverse(t.dtype.1));
            wanted(tensors, true)
        }),
        pages in prop_oneof![Just(1u64), 1u64..6, Just(256)],
        gap in prop_oneof![Just(0u64), Just(64), Just(16 << 10)],
        io in prop_oneof![Just(Io::Auto), Just(Io::Buffered), Just(Io::Direct)],
    ) {
        check(&tensors, 0, &wanted, Options { extent: pages * 4096, gap: Some(gap), io, ..Options::default() });
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
        .map(|part| {
            let region = part.iter().cloned().map(AxisSlice::from).collect();
            // The other half of a wider destination.
            let padding = vec![0, dtype.1 * (part[usize::from(!turned)].end - part[usize::from(!turned)].start)];
            Wanted::new(0, region, order.clone(), padding)
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
                let read = report.routes.sum().bytes;
                assert_eq!((read, report.unwanted.gap, report.unwanted.slack), (nbytes, 0, 0), "{dtype:?} {turned}");
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
    let sample = Sample::new(&[Tensor { dtype: DTYPES[2], shape: vec![6, 5] }], 0, false);
    let memory = vec![UNTOUCHED; 4096];
    let address = memory.as_ptr() as u64;
    let refused = |nbytes, dims: Option<Vec<(u64, u64)>>| {
        let into = vec![Foreign { dims: dims.map(Into::into), ..Foreign::contiguous(address, nbytes) }];
        let error = sample.load(vec![Want::whole(0)], into, Arc::new(memory.clone()), Options::default()).unwrap_err();
        (error.kind(), error.to_string())
    };
    let matrix = |rows, columns| Some(vec![(6, rows), (5, columns)]);
    let (fits, overlaps, behind) = (ErrorKind::Mismatch, ErrorKind::Invalid, ErrorKind::Invalid);
    for (nbytes, dims, kind, why) in [
        (119, None, fits, "119 bytes"),
        (121, None, fits, "121 bytes"),
        (120, Some(vec![(6, 20)]), fits, "6 elements for 30"),
        (120, Some(vec![(31, 4)]), fits, "31 elements for 30"),
        (120, Some(vec![(6, 20), (0, 4)]), fits, "0 elements for 30"),
        (120, Some(vec![(1 << 40, 4), (1 << 40, 4)]), fits, "more elements"),
        (119, matrix(20, 4), behind, "behind"),
        (119, matrix(4, 24), behind, "behind"),
        (119, Some(vec![(30, 4)]), behind, "behind"),
        (4096, matrix(u64::MAX / 4, 4), behind, "behind"),
        (4096, matrix(20, u64::MAX), behind, "behind"),
        (4096, matrix(0, 4), overlaps, "share memory"),
        (4096, matrix(20, 3), overlaps, "share memory"),
        (4096, matrix(16, 4), overlaps, "share memory"),
        (4096, Some(vec![(2, 56), (3, 20), (5, 4)]), overlaps, "share memory"),
        (u64::MAX, matrix(40, 4), behind, "behind"),
        (u64::MAX, matrix(u64::MAX, 4), behind, "behind"),
    ] {
        let (found, text) = refused(nbytes, dims.clone());
        assert_eq!(found, kind, "{nbytes} {dims:?}: {text}");
        assert!(text.contains(why) && text.contains("model.safetensors"), "{text}");
    }
    let none = sample.load(vec![Want::whole(0)], Vec::new(), Arc::new(()), Options::default()).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Invalid);
    assert!(memory.iter().all(|&b| b == UNTOUCHED));
}

#[test]
fn casts_that_loads_do_not_make_are_refused_and_name_the_tensor() {
    let dtypes = [DTYPES[2], DTYPES[0], DTYPES[3]];
    let tensors = dtypes.map(|dtype| Tensor { dtype, shape: vec![6, 5] });
    let memory = vec![UNTOUCHED; 4096];
    let refused = |sample: &Sample, tensor: u32, nbytes, to| {
        let into = Foreign { cast: DType::parse(to), ..Foreign::contiguous(memory.as_ptr() as u64, nbytes) };
        let keep = Arc::new(memory.clone());
        let error = sample.load(vec![Want::whole(tensor)], vec![into], keep, Options::default()).unwrap_err();
        (error.kind(), error.to_string())
    };
    let sample = Sample::new(&tensors, 0, true);
    for (tensor, nbytes, to, kind, why) in [
        (1, 120, "F32", ErrorKind::Unsupported, "U8 is not cast to F32"),
        (2, 120, "F32", ErrorKind::Unsupported, "I64 is not cast to F32"),
        (0, 240, "I64", ErrorKind::Unsupported, "F32 is not cast to I64"),
        (0, 120, "BF16", ErrorKind::Mismatch, "120 bytes for 30 elements of 2 bytes"),
    ] {
        let (found, text) = refused(&sample, tensor, nbytes, to);
        assert_eq!(found, kind, "{text}");
        assert!(text.contains(why) && text.contains(&format!("`{tensor}`")), "{text}");
    }
    let at = sample.checkpoint.find("0").unwrap().begin;
    for before in 1..8 {
        let sample = Sample::new(&tensors, before, false);
        if sample.checkpoint.find("0").unwrap().begin % 4 != 0 {
            let (kind, text) = refused(&sample, 0, 60, "BF16");
            assert!(kind == ErrorKind::Unsupported && text.contains("misaligned") && text.contains("`0`"), "{text}");
        }
    }
    assert!(at % 8 == 0 && memory.iter().all(|&b| b == UNTOUCHED));
}

#[test]
fn contiguous_memory_of_another_dtype_needs_no_dimensions_and_goes_by_way_of_a_slab() {
    // Several extents, and rows long enough to be scattered if they were not converted.
    let sample = Sample::new(&[Tensor { dtype: FLOATS[1], shape: vec![700, 4096] }], 0, true);
    let info = sample.checkpoint.tensor(0);
    let mut there = vec![0xeeu8; 700 * 4096 * 2];
    let into =
        Foreign { cast: Some(DType::BF16), ..Foreign::contiguous(there.as_mut_ptr() as u64, there.len() as u64) };
    let options = Options { extent: 1 << 20, ..Options::default() };
    let report = sample.load(vec![Want::whole(0)], vec![into], Arc::new(()), options).unwrap();
    let elements = sample.bytes[info.begin as usize..info.end as usize].chunks(4);
    for (from, to) in elements.zip(there.chunks(2)) {
        assert_eq!(to, encoded("BF16", decoded("F32", from)), "{from:?}");
    }
    assert!(report.peak_staging > 0);
    assert_eq!(report.nbytes, 700 * 4096 * 4, "bytes of the checkpoint");
    // The same dtype is no cast.
    let mut there = vec![0u8; info.nbytes() as usize];
    let into = Foreign { cast: Some(DType::F32), ..Foreign::contiguous(there.as_mut_ptr() as u64, there.len() as u64) };
    let report = sample.load(vec![Want::whole(0)], vec![into], Arc::new(()), Options::default()).unwrap();
    assert!(there == sample.bytes[info.begin as usize..] && report.peak_staging == 0);
}
