//! Loads into strided memory of the fake GPU: every byte, and how often the driver is called.
#![allow(clippy::unwrap_used)]

mod device;

use device::{noise, Gpu, Kind, PATIENCE};
use penstock::device::api::{Vendor, LIBRARY_VARIABLE};
use penstock::device::gpu::GpuMemory;
use penstock::format::Checkpoint;
use penstock::load::Load;
use penstock::options::Options;
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::strides::Foreign;
use penstock::plan::want::{AxisSlice, Want};
use penstock::stats::Report;
use penstock::{DType, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A checkpoint of one matrix of two bytes an element, and the bytes of that.
struct Matrix {
    checkpoint: Arc<Checkpoint>,
    shape: (u64, u64),
    bytes: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Matrix {
    /// The data begin at an odd offset: extents begin and end within elements.
    fn new(rows: u64, columns: u64) -> Matrix {
        let len = 2 * rows * columns;
        let json = format!(r#"{{"a":{{"dtype":"BF16","shape":[{rows},{columns}],"data_offsets":[0,{len}]}}}}"#);
        let json = format!("{json:w$}", w = json.len() | 1);
        let bytes: Vec<u8> = (0..).flat_map(noise).take(len as usize).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &bytes].concat()).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(&[path]).unwrap());
        Matrix { checkpoint, shape: (rows, columns), bytes, _folder: folder }
    }

    fn element(&self, row: u64, column: u64) -> &[u8] {
        let at = 2 * (row * self.shape.1 + column) as usize;
        &self.bytes[at..at + 2]
    }

    fn request(&self, want: Want, into: Foreign, keep: Arc<GpuMemory>) -> Request {
        Request {
            checkpoint: self.checkpoint.clone(),
            wants: vec![want],
            layout: None,
            device: Where::Gpu(0),
            memory: Memory::Into { tensors: vec![into], keep, fence: None },
            options: Options {
                staging: 32 * MIB,
                extent: MIB,
                stall_timeout: Duration::from_secs(60),
                ..Options::default()
            },
            stream: false,
        }
    }
}

fn cuda() -> Gpu {
    let gpu = Gpu::new(Vendor::Cuda);
    std::env::set_var(LIBRARY_VARIABLE, gpu.fake.path());
    gpu
}

/// Calls of the driver that copied, and those of them that copied rows.
struct Calls {
    copies: u64,
    rows: u64,
    report: Report,
}

impl Calls {
    fn extents(&self) -> u64 {
        self.report.routes.sum().extents
    }
}

/// Loads a part of the matrix into memory of these dimensions, and looks at every byte of it.
fn load(matrix: &Matrix, region: [AxisSlice; 2], dims: &[(u64, u64)]) -> Calls {
    let gpu = cuda();
    let span = dims.iter().map(|(count, stride)| (count - 1) * stride).sum::<u64>() + 2;
    let (memory, address) = gpu.memory(span as usize);
    let mut expected = gpu.bytes(&memory);
    let mut number = 0;
    for row in (region[0].start..region[0].end).step_by(region[0].step as usize) {
        for column in (region[1].start..region[1].end).step_by(region[1].step as usize) {
            let (mut left, mut to) = (number, 0);
            for (count, stride) in dims.iter().rev() {
                to += left % count * stride;
                left /= count;
            }
            expected[to as usize..to as usize + 2].copy_from_slice(matrix.element(row, column));
            number += 1;
        }
    }
    assert_eq!(number, dims.iter().map(|d| d.0).product::<u64>());
    let memory = Arc::new(memory);
    let into = Foreign { dims: Some(dims.into()), ..Foreign::contiguous(address, span) };
    let load = Load::start(matrix.request(Want::part(0, region), into, memory.clone())).unwrap();
    assert!(load.wait(Some(PATIENCE)).unwrap());
    let (copies, rows) = (gpu.fake.counter("copies"), gpu.fake.counter("calls.cuMemcpy2DAsync_v2"));
    let report = load.report();
    drop(load);
    let wrong = gpu.bytes(&memory).iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "{dims:?}");
    drop(memory);
    gpu.check();
    Calls { copies, rows, report }
}

fn whole(matrix: &Matrix) -> [AxisSlice; 2] {
    [AxisSlice::from(0..matrix.shape.0), AxisSlice::from(0..matrix.shape.1)]
}

#[test]
fn columns_of_a_wider_matrix_are_one_copy_of_rows_for_each_extent() {
    let matrix = Matrix::new(4096, 512);
    let calls = load(&matrix, whole(&matrix), &[(4096, 3 * 1024), (512, 2)]);
    assert!(calls.extents() >= 4);
    assert!(calls.rows <= calls.extents(), "{} copies of rows", calls.rows);
    // The first and the last row of an extent are cut off.
    assert!(calls.copies <= 3 * calls.extents(), "{} copies", calls.copies);
}

#[test]
fn a_transposed_matrix_is_a_few_copies_for_each_extent() {
    let matrix = Matrix::new(2048, 1024);
    for columns_apart in [2 * 2048, 2 * 2048 + 64] {
        let calls = load(&matrix, whole(&matrix), &[(2048, 2), (1024, columns_apart)]);
        assert!(calls.extents() >= 4);
        // The whole rows of an extent, and what is cut off at either end: a part of a row, and of an element.
        assert!(calls.copies <= 6 * calls.extents(), "{} copies, {} of rows", calls.copies, calls.rows);
    }
}

#[test]
fn dimensions_that_are_divided_and_permuted_are_a_few_copies_for_each_extent() {
    // Rows are 16 heads of 64, which become the outermost dimension.
    let matrix = Matrix::new(2048, 1024);
    let calls = load(&matrix, whole(&matrix), &[(2048, 128), (16, 2048 * 128), (64, 2)]);
    assert!(calls.copies <= 12 * calls.extents(), "{} copies", calls.copies);
}

#[test]
fn slices_with_steps_reach_their_places() {
    let matrix = Matrix::new(300, 700);
    let region = [AxisSlice { start: 3, end: 290, step: 2 }, AxisSlice { start: 1, end: 600, step: 3 }];
    let (rows, columns) = (region[0].count(), region[1].count());
    load(&matrix, region, &[(rows, 2), (columns, 2 * rows)]);
    load(&matrix, region, &[(rows, 4 * columns), (columns, 4)]);
    load(&matrix, region, &[(rows * columns, 6)]);
}

#[test]
fn casts_on_a_gpu_are_refused_before_a_byte_moves() {
    let matrix = Matrix::new(8, 8);
    let gpu = cuda();
    let (memory, address) = gpu.memory(256);
    let before = gpu.bytes(&memory);
    let memory = Arc::new(memory);
    let into = Foreign { cast: Some(DType::F32), ..Foreign::contiguous(address, 256) };
    let error = Load::start(matrix.request(Want::whole(0), into, memory.clone())).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("`a`") && error.to_string().contains("GPU"), "{error}");
    assert!(gpu.bytes(&memory) == before);
    drop(memory);
    gpu.check();
}
