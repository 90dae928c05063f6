#![no_main]
//! Any tensors, wants, target, residency and limits: the schedule brings every wanted byte to its place exactly once, and
//! reads nothing outside its files.

use libfuzzer_sys::fuzz_target;
use penstock::format::Checkpoint;
use penstock::plan::layout::{BlockKind, Layout, Target};
use penstock::options::Order;
use penstock::plan::want::{AxisSlice, Want};
use penstock::way::{Through, Way};
use penstock::extent::Lane;
use penstock::plan::schedule::{FileTraits, Limits, Schedule};

/// Numbers from the input; zeros when it has run out.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn below(&mut self, n: u64) -> u64 {
        let mut value = 0;
        for _ in 0..2 {
            let (byte, rest) = self.0.split_first().map_or((0, &[][..]), |(b, r)| (*b, r));
            self.0 = rest;
            value = value << 8 | u64::from(byte);
        }
        value % n.max(1)
    }
}

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 | 1
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    // A file of a few two-dimensional U8 or F32 tensors.
    let mut json = String::from("{");
    let mut shapes = Vec::new();
    let mut at = 0;
    for t in 0..1 + input.below(9) {
        let (rows, columns) = (input.below(40), input.below(3000));
        let (dtype, item) = if input.below(2) == 0 { ("U8", 1) } else { ("F32", 4) };
        let n = rows * columns * item;
        if t > 0 {
            json.push(',');
        }
        json += &format!(r#""t{t}":{{"dtype":"{dtype}","shape":[{rows},{columns}],"data_offsets":[{at},{}]}}"#, at + n);
        at += n;
        shapes.push((rows, columns));
    }
    json.push('}');
    json += &" ".repeat(input.below(64) as usize);
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    let size = file.len() as u64 + at;
    let Ok(checkpoint) = Checkpoint::from_bytes(&file, size) else { return };

    let mut wants = Vec::new();
    for _ in 0..input.below(12) {
        let t = input.below(checkpoint.len() as u64) as u32;
        let shape = checkpoint.tensor(t).shape.to_vec();
        let region = (input.below(2) == 0).then(|| {
            shape
                .iter()
                .map(|&n| {
                    let start = input.below(n + 1);
                    let end = start + input.below(n - start + 1);
                    AxisSlice { start, end, step: 1 + input.below(3) }
                })
                .collect()
        });
        wants.push(Want { tensor: t, region });
    }
    let target = match input.below(4) {
        0 => Target::Cpu { misaligned: true },
        1 => Target::Cpu { misaligned: false },
        2 => Target::Gpu,
        _ => Target::Foreign,
    };
    let order = if input.below(2) == 0 { Order::File } else { Order::Layer };
    let gap = input.below(20_000);
    let layout = Layout::new(&checkpoint, &wants, &target, order).expect("regions are within their tensors");
    let mut resident = Vec::new();
    let mut from = 0;
    while from < size && resident.len() < 4 {
        let start = from + input.below(100_000);
        let end = (start + input.below(100_000)).min(size);
        if start < end {
            resident.push(start..end);
        }
        from = end.max(start) + 1;
    }
    let lane = |n| if n == 0 { Lane::BUFFERED } else { Lane::DIRECT };
    let limits = Limits {
        extent: 4096 * (1 + input.below(16)),
        gap,
        scatter: (!matches!(target, Target::Gpu) && input.below(2) == 0).then_some(input.below(5000)),
        direct_in_place: input.below(4) > 0,
        window: (input.below(4) == 0).then_some(input.below(1 << 20)),
    };
    let way = Way {
        mapping: (matches!(target, Target::Cpu { .. }) && input.below(2) == 0).then_some(Lane::MAPPED),
        in_part: false,
        cold: lane(input.below(2)),
        warm: lane(input.below(2)),
        parts: Lane::BUFFERED,
        through: if input.below(4) == 0 { Through::HugePages } else { Through::Ahead },
    };
    let unit = [None, Some(512), Some(4096)][input.below(3) as usize];
    let extent = (input.below(4) == 0).then(|| (4096u64 << input.below(5)).min(limits.extent));
    let gap = (input.below(4) == 0).then(|| input.below(70_000));
    let files = [FileTraits { unit, resident, way, extent, gap, ..FileTraits::default() }];
    let schedule = Schedule::new(&checkpoint, &layout, &files, &limits);

    let mut blocks: Vec<Vec<u8>> = layout.blocks.iter().map(|b| vec![0; b.nbytes as usize]).collect();
    for e in &schedule.extents {
        assert!(e.len > 0 && e.need <= e.len && e.offset + e.need <= size, "{e:?} of {size}");
        for p in &schedule.pieces[e.pieces.start as usize..e.pieces.end as usize] {
            for row in 0..p.rows {
                let (from, to) = (p.from + row * p.from_stride, p.to + row * p.to_stride);
                assert!(from + p.len <= e.need, "{p:?} outside {e:?}");
                for i in 0..p.len {
                    let place = &mut blocks[p.block as usize][(to + i) as usize];
                    assert_eq!(*place, 0, "{p:?} writes a byte again");
                    *place = byte(e.offset + from + i);
                }
            }
        }
    }
    for (want, (place, runs)) in layout.places.iter().zip(&layout.runs).enumerate() {
        if let BlockKind::Mirror { start, .. } = layout.blocks[place.block as usize].kind {
            assert_eq!((start + place.offset, runs.count()), (runs.start, 1));
        }
        for run in 0..runs.count() {
            for i in 0..runs.len {
                let got = blocks[place.block as usize][(place.offset + run * runs.len + i) as usize];
                assert_eq!(got, byte(runs.offset(run) + i), "want {want}, run {run}, byte {i}");
            }
        }
    }
});
