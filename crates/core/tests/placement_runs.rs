//! Runs against a model that walks the tensor element by element, and names by pattern.

use penstock::format::{Checkpoint, DType};
use penstock::placement::{names_matching, Runs, Want};
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
fn model(begin: u64, bits: u64, shape: &[u64], region: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut wanted: Vec<Range<u64>> = Vec::new();
    let total: u64 = shape.iter().product();
    for element in 0..total {
        let mut rest = element;
        let inside = shape.iter().zip(region).rev().fold(true, |inside, (&extent, r)| {
            let at = rest % extent;
            rest /= extent;
            inside && r.contains(&at)
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

fn case() -> impl Strategy<Value = (DType, Vec<(u64, u64, u64)>)> {
    let axis = (0u64..6)
        .prop_flat_map(|extent| (Just(extent), 0..=extent, 0..=extent, any::<bool>()))
        .prop_map(|(extent, a, b, full)| if full { (extent, 0, extent) } else { (extent, a.min(b), a.max(b)) });
    (proptest::sample::select(DType::ALL), prop::collection::vec(axis, 0..5))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 4000 }))]

    #[test]
    fn runs_are_the_fewest_ranges_that_hold_exactly_the_wanted_elements((dtype, axes) in case()) {
        let shape: Vec<u64> = axes.iter().map(|a| a.0).collect();
        let region: Box<[Range<u64>]> = axes.iter().map(|a| a.1..a.2).collect();
        let Some((c, t)) = checkpoint(dtype, &shape) else { return Ok(()) };
        let want = Want { tensor: t, region: Some(region.clone()) };
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
        prop_assert_eq!(&got, &expected);
        prop_assert_eq!(runs.nbytes() * 8, want.shape(&info).iter().product::<u64>() * dtype.bits());
        prop_assert!(runs.axes.iter().all(|a| a.0 >= 2));
        prop_assert!(runs.axes.len() <= shape.len());
        if runs.len == 0 {
            prop_assert!(runs.axes.is_empty());
        } else {
            prop_assert_eq!(runs.end() * 8, expected.last().map_or(0, |r| r.end));
        }
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
        let e = Runs::of(&c, &Want { tensor: t, region: Some(region.into()) }).expect_err("outside");
        prop_assert_eq!(e.kind(), ErrorKind::Slice);
        prop_assert!(e.to_string().contains("memory.safetensors") && e.to_string().contains("`t`"), "{}", e);
    }
}

fn runs(dtype: DType, shape: &[u64], region: &[Range<u64>]) -> penstock::Result<Runs> {
    let (c, t) = checkpoint(dtype, shape).expect("whole bytes");
    let begin = c.tensor(t).begin;
    Runs::of(&c, &Want { tensor: t, region: Some(region.into()) }).map(|mut r| {
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
    let start = std::time::Instant::now();
    assert!(names_matching(&c, &["*a".repeat(60) + "b"]).is_err());
    assert!(start.elapsed().as_secs() < 2, "backtracking is bounded");
}
