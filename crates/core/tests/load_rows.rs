//! Short rows out of the page cache: reads by rows in whole loads, and files that are cut short meanwhile.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod checkpoints;

use penstock::extent::Lane;
use penstock::options::Options;
use penstock::plan::want::{AxisSlice, Want};
use penstock::{Checkpoint, ErrorKind, Load, Memory, Request, Where};
use std::sync::Arc;

const ROWS: u64 = 200;
/// Bytes from row to row, and of the part of each that is wanted: with long gaps and with short ones.
const SHAPES: [(u64, u64); 2] = [(32768, 7000), (3000, 700)];

fn byte(i: u64) -> u8 {
    (i / 7 + i / 301) as u8
}

fn model(folder: &std::path::Path, stride: u64) -> Arc<Checkpoint> {
    let nbytes = ROWS * stride;
    let json = format!(r#"{{"w":{{"dtype":"U8","shape":[{ROWS},{stride}],"data_offsets":[0,{nbytes}]}}}}"#);
    let mut bytes = checkpoints::shard(json.as_bytes(), 0);
    bytes.extend((0..nbytes).map(byte));
    let path = folder.join(format!("{stride}.safetensors"));
    std::fs::write(&path, bytes).unwrap();
    Arc::new(Checkpoint::open(&[path]).unwrap())
}

fn request(checkpoint: &Arc<Checkpoint>, wide: u64) -> Request {
    Request {
        checkpoint: checkpoint.clone(),
        wants: vec![Want::part(0, [AxisSlice::from(0..ROWS), AxisSlice::from(11..11 + wide)])],
        layout: None,
        device: Where::Cpu,
        memory: Memory::Ours,
        options: Options::default(),
        stream: false,
    }
}

#[test]
fn rows_are_read_in_stretches_and_long_gaps_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    for (stride, wide) in SHAPES {
        let checkpoint = model(folder.path(), stride);
        let load = Load::start(request(&checkpoint, wide)).unwrap();
        load.wait(None).unwrap();
        let report = load.report();
        let [mapped, buffered, direct] =
            [Lane::MAPPED, Lane::BUFFERED, Lane::DIRECT].map(|lane| report.routes.of(lane));
        assert_eq!((mapped.extents, direct.extents), (0, 0));
        let gaps = if stride - wide <= 8192 { (ROWS - 1) * (stride - wide) } else { 0 };
        assert_eq!((buffered.bytes, report.unwanted.gap), (ROWS * wide + gaps, gaps), "{stride}");
        assert!(buffered.extents <= 3, "{}", buffered.extents);
        let view = load.view(0).unwrap();
        // SAFETY: the view keeps its bytes, and nobody writes to them.
        let bytes = unsafe { std::slice::from_raw_parts(view.address() as *const u8, (ROWS * wide) as usize) };
        let expected = (0..ROWS).flat_map(|row| (0..wide).map(move |i| byte(row * stride + 11 + i)));
        assert!(bytes.iter().copied().eq(expected));
    }
}

#[test]
fn a_file_that_is_cut_short_before_its_rows_are_read_is_an_error_and_no_signal() {
    let folder = tempfile::tempdir().unwrap();
    for (stride, wide) in SHAPES {
        let checkpoint = model(folder.path(), stride);
        let path = folder.path().join(format!("{stride}.safetensors"));
        let load = Load::start_through(request(&checkpoint, wide), |source, _| {
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(stride * ROWS / 2).unwrap();
            Ok(source)
        });
        let error = load.unwrap().wait(None).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Truncated | ErrorKind::Changed), "{error}");
        assert!(error.to_string().contains(&format!("{stride}.safetensors")), "{error}");
        if error.kind() == ErrorKind::Truncated {
            assert!(error.to_string().contains("the file ends at byte"), "{error}");
        }
    }
}
