//! The safetensors crate as oracle: same verdict on the same bytes, and the same tensors.

use penstock::format::{Checkpoint, DType};
use proptest::prelude::*;
use safetensors::SafeTensors;
use std::collections::BTreeSet;

fn file(json: &[u8], data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes.resize(bytes.len() + data, 0xA5);
    bytes
}

fn ours(bytes: &[u8]) -> penstock::Result<Checkpoint> {
    Checkpoint::from_bytes(bytes, bytes.len() as u64)
}

/// Both accept and say the same, or both refuse.
fn agree(bytes: &[u8]) {
    match (ours(bytes), SafeTensors::deserialize(bytes)) {
        (Ok(ours), Ok(theirs)) => same_tensors(&ours, &theirs, bytes),
        (Err(_), Err(_)) => {}
        (Ok(_), Err(e)) => panic!("accepted what safetensors refuses ({e}): {:?}", String::from_utf8_lossy(bytes)),
        (Err(e), Ok(_)) => panic!("refused what safetensors accepts ({e}): {:?}", String::from_utf8_lossy(bytes)),
    }
}

fn same_tensors(ours: &Checkpoint, theirs: &SafeTensors<'_>, bytes: &[u8]) {
    assert_eq!(ours.len(), theirs.len());
    let names: BTreeSet<_> = ours.tensors().map(|t| t.name.to_owned()).collect();
    assert_eq!(names, theirs.names().into_iter().map(str::to_owned).collect());
    for (name, view) in theirs.iter() {
        let t = ours.find(name).expect("a name that is listed");
        assert_eq!(t.name, name);
        assert_eq!(t.dtype.name(), view.dtype().to_string());
        assert_eq!(t.dtype.bits(), view.dtype().bitsize() as u64);
        assert_eq!(t.shape, view.shape().iter().map(|&d| d as u64).collect::<Vec<_>>());
        assert_eq!(&bytes[t.begin as usize..t.end as usize], view.data());
        assert!(t.nbytes() == 0 || std::ptr::eq(&bytes[t.begin as usize], &view.data()[0]), "the same place");
    }
    let begins: Vec<_> = ours.tensors().map(|t| (t.begin, t.end)).collect();
    assert!(begins.is_sorted(), "numbered in offset order");
}

fn dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(DType::ALL)
}

/// Names as JSON may spell them: the text between the quotes.
fn spelled_name() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-z]{1,3}(\\.[a-z0-9]{1,4}){0,3}",
        1 => Just(String::new()),
        1 => Just("\\ud83d\\ude00".to_owned()),
        1 => Just("\\u0061\\n\\\"\\\\".to_owned()),
        1 => "\\PC{0,8}".prop_map(|s| s.replace(['\\', '"'], "_")),
    ]
}

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
}

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let one = (spelled_name(), dtype(), prop::collection::vec(0u64..5, 0..4)).prop_map(|(name, dtype, shape)| Tensor {
        name,
        dtype,
        shape,
    });
    prop::collection::vec(one, 0..8).prop_map(|mut all| {
        let mut seen = BTreeSet::new();
        all.retain(|t| {
            let plain: String = serde_json::from_str(&format!("\"{}\"", t.name)).expect("a spelled name");
            seen.insert(plain) && t.dtype.nbytes(t.shape.iter().product()).is_some()
        });
        all
    })
}

/// A well-formed header for `tensors`, written in the order `shuffle` gives, and the size of the data section.
fn write(tensors: &[Tensor], order: &[usize], metadata: &str, pad: usize) -> (String, usize) {
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|t| {
            let end = at + t.dtype.nbytes(t.shape.iter().product()).expect("whole bytes");
            let text = format!(
                "\"{}\":{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{at},{end}]}}",
                t.name, t.dtype, t.shape
            );
            at = end;
            text
        })
        .collect();
    let mut parts: Vec<String> = order.iter().filter_map(|&i| entries.get(i).cloned()).collect();
    if !metadata.is_empty() {
        parts.insert(parts.len() / 2, format!("\"__metadata__\":{metadata}"));
    }
    (format!("{{{}}}{}", parts.join(","), " ".repeat(pad)), at as usize)
}

fn valid() -> impl Strategy<Value = (String, usize)> {
    let metadata =
        proptest::sample::select(vec!["", "null", "{}", "{\"format\":\"pt\"}", "{\"a\":\"b\",\"c\":\"\\u0000\"}"]);
    (tensors(), Just((0..8).collect::<Vec<usize>>()).prop_shuffle(), metadata, 0usize..9)
        .prop_map(|(t, order, metadata, pad)| write(&t, &order, metadata, pad))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 2000 }))]

    #[test]
    fn well_formed_headers_give_the_oracles_tensors((json, data) in valid()) {
        let bytes = file(json.as_bytes(), data);
        let (a, b) = (ours(&bytes).expect("well formed"), SafeTensors::deserialize(&bytes).expect("well formed"));
        same_tensors(&a, &b, &bytes);
        let metadata = SafeTensors::read_metadata(&bytes).expect("well formed").1.metadata().clone();
        prop_assert_eq!(
            a.files()[0].metadata.clone(),
            metadata.map(|m| m.into_iter().collect())
        );
    }

    #[test]
    fn headers_with_a_few_bytes_changed_get_the_oracles_verdict(
        (json, data) in valid(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..4),
        grow in -2i64..3,
    ) {
        let mut json = json.into_bytes();
        // Letters, digits and brackets of the format itself find more than random bytes.
        const LIKELY: &[u8] = b"\"{}[],:0123456789-.eEnul \\\xff\t";
        for (at, byte, how) in edits {
            let byte = if byte < 200 { LIKELY[byte as usize % LIKELY.len()] } else { byte };
            let at = at.index(json.len());
            match how {
                0 => json[at] = byte,
                1 => json.insert(at, byte),
                _ if json.len() > 1 => { json.remove(at); }
                _ => {}
            }
        }
        let bytes = file(&json, (data as i64 + grow).max(0) as usize);
        // The documented stricter point that random edits reach: two keys that have become equal.
        if ours(&bytes).is_err_and(|e| e.message().contains("duplicate key")) {
            return Ok(());
        }
        agree(&bytes);
    }
}
