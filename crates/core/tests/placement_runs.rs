//! Runs against a model that walks the tensor element by element, and names by pattern.

mod checkpoints;

use penstock::format::{Checkpoint, DType};
use penstock::plan::want::{names_matching, AxisSlice, Runs, Strips, Want};
use penstock::ErrorKind;
use proptest::prelude::*;
use std::ops::Range;

/// A checkpoint of a 3-byte tensor followed by one of this dtype and shape, which is number 1 (or 0, when empty tensors
/// sort before).
fn checkpoint(dtype: DType, shape: &[u64]) -> Option<(Checkpoint, u32)> {
    let n = dtype.nbytes(shape.iter().product())?;
    let json = format!(
        "{{\"first\":{{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}},\
          \"t\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[3,{}]}}}}",
        3 + n
    );
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    let size = bytes.len() as u64 + 3 + n;
    let c = Checkpoint::from_bytes(&bytes, size).expect("well formed");
    let t = c.find("t").expect("is there").index;
    Some((c, t))
}

/// The bits of the file that the region wants, element by element in row-major order, as maximal bit ranges; adjacent
/// elements join.
fn model(begin: u64, bits: u64, shape: &[u64], region: &[AxisSlice]) -> Vec<Range<u64>> {
    let mut wanted: Vec<Range<u64>> = Vec::new();
    let total: u64 = shape.iter().product();
    for element in 0..total {
        let mut rest = element;
        let inside = shape.iter().zip(region).rev().fold(true, |inside, (&extent, r)| {
            let at = rest % extent;
            rest /= extent;
            inside && (r.start..r.end).contains(&at) && (at - r.start) % r.step == 0
        });
        if inside {
            let at = begin * 8 + element * bits;
            match wanted.last_mut() {
                Some(last) if last.end == at => last.end += bits,
                _ => wanted.push(at..at + bits),
            }
        }
    }
    wanted
}

/// Ranges that touch, as one.
fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match found.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => found.push(range),
        }
    }
    found
}

fn case() -> impl Strategy<Value = (DType, Vec<(u64, AxisSlice)>)> {
    let axis = (0u64..6)
        .prop_flat_map(|extent| (Just(extent), 0..=extent, 0..=extent, 1u64..4, any::<bool>()))
        .prop_map(|(extent, a, b, step, full)| match full {
            true => (extent, (0..extent).into()),
            false => (extent, AxisSlice { start: a.min(b), end: a.max(b), step }),
        });
    (proptest::sample::select(DType::ALL), prop::collection::vec(axis, 0..5))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 4000 }))]

    #[test]
    fn runs_are_ranges_that_hold_exactly_the_wanted_elements_and_without_steps_the_fewest((dtype, axes) in case()) {
        let shape: Vec<u64> = axes.iter().map(|a| a.0).collect();
        let region: Vec<AxisSlice> = axes.iter().map(|a| a.1).collect();
        let Some((c, t)) = checkpoint(dtype, &shape) else { return Ok(()) };
        let want = Want::part(t, region.clone());
        let info = c.tensor(t);
        let expected = model(info.begin, dtype.bits(), &shape, &region);
        let on_bytes = expected.iter().all(|r| r.start % 8 == 0 && r.end % 8 == 0);
        let runs = match Runs::of(&c, &want) {
            Ok(runs) => runs,
            Err(e) => {
                prop_assert_eq!(e.kind(), ErrorKind::Slice);
                prop_assert!(!on_bytes, "refused although on whole bytes: {}", e);
                return Ok(());
            }
        };
        prop_assert!(on_bytes, "accepted {:?} although not on whole bytes", runs);
        let got: Vec<Range<u64>> = (0..runs.count())
            .map(|i| runs.offset(i))
            .map(|at| at * 8..(at + runs.len) * 8)
            .filter(|r| !r.is_empty())
            .collect();
        // The last element of a row that is taken by steps and the first of the next may touch, and stay two runs
        if region.iter().all(|r| r.step == 1) {
            prop_assert_eq!(&got, &expected);
        }
        prop_assert_eq!(&joined(got), &expected);
        prop_assert_eq!(runs.nbytes() * 8, want.shape(&info).iter().product::<u64>() * dtype.bits());
        prop_assert!(runs.axes.iter().all(|a| a.0 >= 2));
        prop_assert!(runs.axes.len() <= shape.len());
        if runs.len == 0 {
            prop_assert!(runs.axes.is_empty());
        } else {
            prop_assert_eq!(runs.end() * 8, expected.last().map_or(0, |r| r.end));
        }
    }

    /// Far ends and steps that go past them: the arithmetic is modular nowhere.
    #[test]
    fn slices_of_hostile_shapes_end_in_runs_or_an_error(
        shape in prop::collection::vec(prop_oneof![1u64..4, 1u64 << 20..1 << 40, Just(u64::MAX >> 3)], 0..5),
        ends in prop::collection::vec((any::<u64>(), any::<u64>(), prop_oneof![0u64..4, any::<u64>()]), 5),
        inside in any::<bool>(),
    ) {
        let Some(n) = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|n| *n < 1 << 59) else { return Ok(()) };
        let json = format!("{{\"t\":{{\"dtype\":\"U8\",\"shape\":{shape:?},\"data_offsets\":[0,{n}]}}}}");
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        let c = Checkpoint::from_bytes(&bytes, bytes.len() as u64 + n).expect("well formed");
        let region: Vec<AxisSlice> = shape
            .iter()
            .zip(&ends)
            .map(|(&extent, &(a, b, step))| match inside {
                true => AxisSlice { start: (a % extent).min(b % extent), end: 1 + (a % extent).max(b % extent), step },
                false => AxisSlice { start: a, end: b, step },
            })
            .collect();
        let sound = region.iter().zip(&shape).all(|(r, &n)| r.start <= r.end && r.end <= n && r.step > 0);
        match Runs::of(&c, &Want::part(0, region.clone())) {
            Err(e) => {
                prop_assert_eq!(e.kind(), ErrorKind::Slice);
                prop_assert!(!sound, "{}", e);
            }
            Ok(runs) => {
                prop_assert!(sound);
                let wanted: u128 = region.iter().map(|r| u128::from(r.count())).product();
                prop_assert_eq!(u128::from(runs.count()) * u128::from(runs.len), wanted);
                let info = c.tensor(0);
                prop_assert!(runs.start >= info.begin && runs.end() <= info.end, "{:?} leaves the tensor", runs);
                prop_assert!(runs.strips(u64::MAX).count <= runs.strips(0).count);
            }
        }
    }

    #[test]
    fn strips_are_every_run_once_evenly_and_in_order(
        len in 1u64..9,
        // Few enough to be read along the innermost axis, and too many.
        outer in prop_oneof![9 => 2u64..6, 1 => 20_000u64..30_000],
        inner in prop::collection::vec((2u64..5, 0u64..30), 0..3),
        gap in prop_oneof![Just(0u64), 1u64..40, Just(u64::MAX)],
    ) {
        let (mut axes, mut end) = (Vec::new(), len);
        for (count, apart) in inner.into_iter().chain([(outer, 1)]) {
            let stride = end + 1 + apart;
            axes.push((count, stride));
            end += (count - 1) * stride;
        }
        axes.reverse();
        let runs = Runs { start: 7, len, axes };
        let Strips { count, runs: each, stride, inner } = runs.strips(gap);
        let strips = runs.strips(gap);
        prop_assert_eq!(count * each, runs.count());
        prop_assert!(each == 1 || stride - len <= gap);
        let mut seen = vec![false; runs.count() as usize];
        let mut before = 0;
        for i in 0..count {
            let first = strips.first(i);
            prop_assert!(runs.offset(first) > before, "strip {i} of {strips:?} starts before the last");
            before = runs.offset(first);
            for j in 0..each {
                let number = first + j * inner;
                prop_assert!(!std::mem::replace(&mut seen[number as usize], true), "run {number} twice");
                prop_assert_eq!(runs.offset(number), runs.offset(first) + j * stride);
            }
        }
        // Not by the thousand where the long axis could be taken.
        prop_assert!(runs.axes[0].1 - len > gap || count <= 16 << 10, "{strips:?} of {runs:?}");
    }

    #[test]
    fn a_region_outside_its_tensor_is_refused(
        shape in prop::collection::vec(1u64..5, 1..4), axis in any::<prop::sample::Index>(), a in 0u64..9, b in 0u64..9,
    ) {
        let axis = axis.index(shape.len());
        prop_assume!(a > b || b > shape[axis]);
        let mut region: Vec<Range<u64>> = shape.iter().map(|&d| 0..d).collect();
        region[axis] = a..b;
        let (c, t) = checkpoint(DType::F32, &shape).expect("whole bytes");
        let e = Runs::of(&c, &Want::part(t, region)).expect_err("outside");
        prop_assert_eq!(e.kind(), ErrorKind::Slice);
        prop_assert!(e.to_string().contains("memory.safetensors") && e.to_string().contains("`t`"), "{}", e);
    }
}

fn runs(dtype: DType, shape: &[u64], region: &[Range<u64>]) -> penstock::Result<Runs> {
    let (c, t) = checkpoint(dtype, shape).expect("whole bytes");
    let begin = c.tensor(t).begin;
    Runs::of(&c, &Want::part(t, region.iter().cloned())).map(|mut r| {
        r.start -= begin;
        r
    })
}

#[test]
fn slices_of_the_tensor_parallel_kinds_have_the_runs_one_expects() {
    // Rows of a matrix: one run.
    let rows = runs(DType::BF16, &[8, 6], &[2..4, 0..6]).expect("in bounds");
    assert_eq!(rows, Runs { start: 24, len: 24, axes: vec![] });
    // Columns: one run for each row.
    let columns = runs(DType::BF16, &[8, 6], &[0..8, 3..6]).expect("in bounds");
    assert_eq!(columns, Runs { start: 6, len: 6, axes: vec![(8, 12)] });
    // Experts 1 and 2 of a stacked tensor: one run.
    let experts = runs(DType::BF16, &[4, 8, 6], &[1..3, 0..8, 0..6]).expect("in bounds");
    assert_eq!(experts, Runs { start: 96, len: 192, axes: vec![] });
    // Columns of every expert: experts and rows are one axis.
    let deep = runs(DType::BF16, &[4, 8, 6], &[0..4, 0..8, 0..3]).expect("in bounds");
    assert_eq!(deep, Runs { start: 0, len: 6, axes: vec![(32, 12)] });
    // Rows 2..4 of every expert.
    let inner_rows = runs(DType::BF16, &[4, 8, 6], &[0..4, 2..4, 0..6]).expect("in bounds");
    assert_eq!(inner_rows, Runs { start: 24, len: 24, axes: vec![(4, 96)] });
}

#[test]
fn slices_with_steps_have_the_runs_one_expects() {
    let stepped = |shape: &[u64], region: &[(u64, u64, u64)]| {
        let (c, t) = checkpoint(DType::BF16, shape).expect("whole bytes");
        let begin = c.tensor(t).begin;
        let region = region.iter().map(|&(start, end, step)| AxisSlice { start, end, step });
        Runs::of(&c, &Want::part(t, region)).map(|r| (r.start - begin, r.len, r.axes))
    };
    // Every second row: runs of a row each.
    assert_eq!(stepped(&[8, 6], &[(1, 8, 2), (0, 6, 1)]).expect("in bounds"), (12, 12, vec![(4, 24)]));
    // Every second column of an even number: rows go on where the last one ends.
    assert_eq!(stepped(&[8, 6], &[(0, 8, 1), (1, 6, 2)]).expect("in bounds"), (2, 2, vec![(24, 4)]));
    // Of an odd number they do not.
    assert_eq!(stepped(&[8, 5], &[(0, 8, 1), (1, 5, 2)]).expect("in bounds"), (2, 2, vec![(8, 10), (2, 4)]));
    // A step past the end is one element, and of one element no step.
    assert_eq!(stepped(&[8, 6], &[(3, 8, 9), (0, 6, 1)]).expect("in bounds"), (36, 12, vec![]));
    assert_eq!(stepped(&[8, 1], &[(0, 8, 1), (0, 1, 5)]).expect("in bounds"), (0, 16, vec![]));
    assert_eq!(stepped(&[8, 6], &[(8, 8, 3), (0, 6, 1)]).expect("in bounds"), (0, 0, vec![]));
    let refused = stepped(&[8, 6], &[(0, 8, 0), (0, 6, 1)]).expect_err("goes nowhere");
    assert!(refused.kind() == ErrorKind::Slice && refused.to_string().contains("step is 0"), "{refused}");
    let refused = stepped(&[8, 6], &[(0, 9, 2), (0, 6, 1)]).expect_err("outside");
    assert!(refused.to_string().contains("slice [0:9:2, 0:6] of tensor"), "{refused}");
}

#[test]
fn a_scalar_is_one_run_and_an_empty_tensor_none() {
    assert_eq!(runs(DType::F64, &[], &[]).expect("a scalar"), Runs { start: 0, len: 8, axes: vec![] });
    assert_eq!(runs(DType::F64, &[0, 3], &[0..0, 0..3]).expect("empty").nbytes(), 0);
    assert_eq!(runs(DType::F64, &[2, 3], &[1..1, 0..3]).expect("empty slice").nbytes(), 0);
    let (c, t) = checkpoint(DType::F64, &[2, 3]).expect("whole bytes");
    assert_eq!(Runs::of(&c, &Want::whole(t)).expect("whole").nbytes(), 48);
    assert_eq!(Runs::of(&c, &Want::whole(2)).expect_err("no such tensor").kind(), ErrorKind::UnknownTensor);
}

#[test]
fn four_bit_elements_can_be_sliced_on_whole_bytes_only() {
    assert_eq!(runs(DType::F4, &[3, 4], &[0..3, 2..4]).expect("bytes").axes, [(3, 2)]);
    assert_eq!(runs(DType::F4, &[3, 4], &[0..3, 1..3]).expect_err("half bytes").kind(), ErrorKind::Slice);
    assert_eq!(runs(DType::F4, &[2, 3], &[0..2, 0..2]).expect_err("rows of 1.5 bytes").kind(), ErrorKind::Slice);
    assert_eq!(runs(DType::F6_E2M3, &[3, 4], &[1..2, 0..4]).expect("bytes").len, 3);
}

fn named(names: &[&str]) -> Checkpoint {
    let entries: Vec<String> = names
        .iter()
        .map(|n| format!("{}:{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", serde_json::json!(n)))
        .collect();
    let json = format!("{{{}}}", entries.join(","));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    Checkpoint::from_bytes(&bytes, bytes.len() as u64).expect("well formed")
}

#[test]
fn patterns_match_as_in_fnmatch() {
    let c = named(&["a.0.w", "a.1.w", "a.10.w", "a.1.b", "b[0]", "b0", "ü", "A.1.w", "", "a-]"]);
    let matching = |p: &[&str]| -> Vec<String> {
        let n = names_matching(&c, p).unwrap_or_else(|e| panic!("{p:?}: {e}"));
        n.into_iter().map(|i| c.tensor(i).name.to_owned()).collect()
    };
    assert_eq!(matching(&["a.*"]), ["a.0.w", "a.1.w", "a.10.w", "a.1.b"], "* matches dots, case matters");
    assert_eq!(matching(&["a.?.w"]), ["a.0.w", "a.1.w"]);
    assert_eq!(matching(&["a.[1-9].w"]), ["a.1.w"]);
    assert_eq!(matching(&["a.[!1-9].w"]), ["a.0.w"]);
    assert_eq!(matching(&["b[0]"]), ["b[0]"], "an exact name beats the set it spells");
    assert_eq!(matching(&["b[[]0]"]), ["b[0]"]);
    assert_eq!(matching(&["b[0-9]"]), ["b0"]);
    assert_eq!(matching(&["a-[]]"]), ["a-]"], "] at the start of a set is itself");
    assert_eq!(matching(&["?", "ü"]), ["ü"]);
    assert_eq!(matching(&[""]), [""], "the empty name is a name");
    assert_eq!(matching(&["*"]).len(), c.len());
    assert_eq!(
        matching(&["*.w", "a.1.w", "a.1.*"]),
        ["a.0.w", "a.1.w", "a.10.w", "a.1.b", "A.1.w"],
        "each once, in order"
    );
    assert!(matching(&[]).is_empty());
}

#[test]
fn a_name_that_is_not_there_is_answered_with_the_ones_that_come_close() {
    let c = named(&["model.layers.0.q_proj.weight", "model.layers.0.k_proj.weight", "lm_head.weight", "zz"]);
    let e = names_matching(&c, &["lm_head.weight", "layers.0.q_proj.weight", "nope*"]).expect_err("two unknown");
    let text = e.to_string();
    assert_eq!(e.kind(), ErrorKind::UnknownTensor);
    assert!(text.contains("`layers.0.q_proj.weight` (close: `model.layers.0.q_proj.weight`"), "{text}");
    assert!(text.contains("`nope*`") && !text.contains("zz") && text.contains("memory.safetensors"), "{text}");
}

#[test]
fn a_pattern_of_many_stars_is_answered_at_once() {
    let name = "a".repeat(200);
    let c = named(&[&name]);
    let start = checkpoints::processor_time();
    assert!(names_matching(&c, &["*a".repeat(60) + "b"]).is_err());
    assert!((checkpoints::processor_time() - start).as_secs() < 2, "backtracking is bounded");
}
