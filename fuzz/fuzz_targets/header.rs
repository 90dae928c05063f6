#![no_main]
//! Any bytes as a shard file: no panic, bounded, and the safetensors crate's verdict.

use libfuzzer_sys::fuzz_target;
use penstock::format::Checkpoint;
use safetensors::SafeTensors;

/// Where `format/header.rs` says that it is stricter.
const STRICTER: &[&str] = &[
    "duplicate key",
    "more than 64 dimensions",
    "invalid type: sequence, expected an object with `dtype`",
    "expected a dtype",
];

fn agree(file: &[u8]) {
    match (Checkpoint::from_bytes(file, file.len() as u64), SafeTensors::deserialize(file)) {
        (Ok(ours), Ok(theirs)) => {
            assert_eq!(ours.len(), theirs.len());
            for (name, view) in theirs.iter() {
                let t = ours.find(name).expect("a tensor that the oracle has");
                assert_eq!(t.dtype.name(), view.dtype().to_string());
                assert!(t.shape.iter().copied().eq(view.shape().iter().map(|&d| d as u64)));
                assert_eq!(&file[t.begin as usize..t.end as usize], view.data());
            }
        }
        (Err(_), Err(_)) => {}
        (Ok(_), Err(e)) => panic!("accepted what safetensors refuses: {e}"),
        (Err(e), Ok(_)) => assert!(STRICTER.iter().any(|s| e.message().contains(s)), "stricter than documented: {e}"),
    }
}

fuzz_target!(|bytes: &[u8]| {
    agree(bytes);
    if let Some((data, json)) = bytes.split_first_chunk::<2>() {
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(json);
        file.resize(file.len() + usize::from(u16::from_le_bytes(*data)), 0xA5);
        agree(&file);
    }
});
