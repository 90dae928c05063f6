//! Loads of tensors that lie apart: each has a block of its own, and one read may bring several of them.
#![allow(clippy::unwrap_used)]

use penstock::format::Checkpoint;
use penstock::load::{Load, Next};
use penstock::options::Options;
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::want::Want;
use std::sync::Arc;

const TENSORS: usize = 120;

/// Every second tensor is wanted.
fn nbytes(tensor: usize) -> u64 {
    if tensor % 2 == 0 {
        100_000
    } else {
        70_000
    }
}

#[test]
fn reads_go_on_into_blocks_of_a_file_whose_first_block_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (mut entries, mut at) = (Vec::new(), 0);
    for tensor in 0..TENSORS {
        let end = at + nbytes(tensor);
        entries.push(format!(r#""t{tensor:03}":{{"dtype":"U8","shape":[{}],"data_offsets":[{at},{end}]}}"#, end - at));
        at = end;
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    let start = bytes.len() as u64;
    bytes.extend((0..at).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8));
    std::fs::write(&path, &bytes).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
    let wants: Vec<Want> = Want::all(&checkpoint).into_iter().step_by(2).collect();
    // Mapped, and read into memory whose blocks lie as far apart as in the file.
    for (copy, gap) in [(None, 16 << 10), (Some(true), 16 << 10), (Some(true), 128 << 10)] {
        for stream in [false, true] {
            let request = Request {
                checkpoint: checkpoint.clone(),
                wants: wants.clone(),
                device: Where::Cpu,
                memory: Memory::Ours,
                layout: None,
                // Few reads in flight: when the last ones start, the first tensors are complete.
                options: Options { copy, gap: Some(gap), extent: 256 << 10, depth: 2, ..Options::default() },
                stream,
            };
            let load = Load::start(request).unwrap();
            assert!(load.layout().blocks.len() > 1);
            if stream {
                while let Next::Ready(want) = load.next(None).unwrap() {
                    load.take(want).unwrap();
                }
            }
            assert!(load.wait(None).unwrap(), "copy {copy:?}, gap {gap}, stream {stream}");
            for want in 0..wants.len() {
                let view = load.view(want as u32).unwrap();
                let at = (start + (0..2 * want).map(nbytes).sum::<u64>()) as usize;
                // SAFETY: the load has ended well, and the view keeps its bytes.
                let got = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
                assert!(got == &bytes[at..at + got.len()], "want {want}, copy {copy:?}, gap {gap}, stream {stream}");
            }
        }
    }
}
