//! Layout and schedule by property: a plain interpreter executes random schedules on arrays of bytes and counts every byte
//! that arrives anywhere.
#![allow(clippy::unwrap_used)]

use penstock::extent::{Extent, Landing, Lane, Piece};
use penstock::format::{Checkpoint, DType};
use penstock::options::{Order, GPU_ALIGN, HUGE_PAGE, PAGE, SHARED_BLOCK};
use penstock::plan::layout::{BlockKind, Layout, Target};
use penstock::plan::schedule::{FileTraits, Limits, Schedule};
use penstock::plan::want::{AxisSlice, Runs, Want};
use penstock::way::Way;
use proptest::prelude::*;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;

const MIB: u64 = 1 << 20;
/// Longest extent of mapped pages that are all there, where the limit is less.
const RESIDENT_MAPPED: u64 = 1024 * MIB;

/// One tensor to put into a test file.
type Tensor = (String, DType, Vec<u64>);

/// A checkpoint of sparse files: the plan never looks at the data, and the interpreter makes it up.
fn checkpoint(files: &[(Vec<Tensor>, usize)]) -> Checkpoint {
    let dir = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for (number, (tensors, padding)) in files.iter().enumerate() {
        let (mut json, mut at) = (String::from("{"), 0);
        for (name, dtype, shape) in tensors {
            let past = at + dtype.nbytes(shape.iter().product()).unwrap();
            let comma = if json.len() > 1 { "," } else { "" };
            write!(json, r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{past}]}}"#)
                .unwrap();
            at = past;
        }
        json.push('}');
        json.extend(std::iter::repeat_n(' ', *padding));
        let path = dir.path().join(format!("{number}.safetensors"));
        let mut file = File::create(&path).unwrap();
        file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
        file.write_all(json.as_bytes()).unwrap();
        file.set_len(8 + json.len() as u64 + at).unwrap();
        paths.push(path);
    }
    Checkpoint::open(&paths).unwrap()
}

/// What stands at `offset` of file number `file`; nothing is past its end.
fn byte(file: u32, offset: u64, size: u64) -> u8 {
    if offset >= size {
        return 0;
    }
    let x = (offset ^ u64::from(file) << 50).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x >> 32) as u8 | 1
}

/// The bytes of a want, element by element, by a way that shares nothing with the code under test.
fn expected(c: &Checkpoint, want: &Want) -> Vec<(u64, u64)> {
    let t = c.tensor(want.tensor);
    let Some(region) = &want.region else { return vec![(t.begin, t.nbytes())] };
    let mut spots = vec![0u64];
    for (r, &extent) in region.iter().zip(t.shape) {
        spots = spots
            .into_iter()
            .flat_map(|s| (r.start..r.end).step_by(r.step as usize).map(move |i| s * extent + i))
            .collect();
    }
    let bits = t.dtype.bits();
    if bits >= 8 {
        return spots.into_iter().map(|s| (t.begin + s * bits / 8, bits / 8)).collect();
    }
    let mut bytes: Vec<u64> = spots.into_iter().flat_map(|s| [s * bits / 8, ((s + 1) * bits - 1) / 8]).collect();
    bytes.dedup();
    bytes.into_iter().map(|b| (t.begin + b, 1)).collect()
}

/// The limits of one file: what its store declares wins.
fn of_file(files: &[FileTraits], limits: &Limits, file: u32) -> Limits {
    let FileTraits { extent, gap, .. } = &files[file as usize];
    Limits { extent: extent.unwrap_or(limits.extent), gap: gap.unwrap_or(limits.gap), ..*limits }
}

fn unit(files: &[FileTraits], limits: &Limits, e: &Extent) -> u64 {
    match files[e.file as usize].unit {
        Some(a) if a > PAGE && a <= limits.extent && e.lane != Lane::MAPPED => a,
        _ => PAGE,
    }
}

/// How long an extent may be: mapped pages that are all there need only be populated, and are cut more coarsely.
fn most(limits: &Limits, e: &Extent) -> u64 {
    match e.landing {
        Landing::Mapping { resident: true, .. } => limits.extent.max(RESIDENT_MAPPED),
        _ => limits.extent,
    }
}

/// One row after the other: where in the extent, where in the block.
fn rows(p: &Piece) -> impl Iterator<Item = (u64, u64)> + '_ {
    (0..p.rows).map(|r| (p.from + r * p.from_stride, p.to + r * p.to_stride))
}

/// Executes `schedule` and checks everything that must hold for it.
fn check(c: &Checkpoint, wants: &[Want], layout: &Layout, files: &[FileTraits], limits: &Limits, schedule: &Schedule) {
    let sizes: Vec<u64> = c.files().iter().map(|f| f.size).collect();
    let data =
        |file: u32, range: Range<u64>| -> Vec<u8> { range.map(|o| byte(file, o, sizes[file as usize])).collect() };
    // For each file the number of extents that asked for a byte, mapped ones apart; for each block contents and arrivals.
    let mut read: Vec<Vec<u8>> = sizes.iter().map(|&s| vec![0; s as usize + 65536]).collect();
    let mut blocks: Vec<Vec<u8>> = layout.blocks.iter().map(|b| vec![0; b.nbytes as usize]).collect();
    let mut arrivals = blocks.clone();
    let mut brought = vec![0u32; wants.len()];
    // Pages of blocks, by the extent that brings bytes of them, and whether that is O_DIRECT in place.
    let mut pages: Vec<Vec<(u64, bool)>> =
        layout.blocks.iter().map(|b| vec![(u64::MAX, false); b.nbytes.div_ceil(PAGE) as usize]).collect();

    for e in &schedule.extents {
        let limits = &of_file(files, limits, e.file);
        let unit = unit(files, limits, e);
        assert!(e.len > 0 && e.len <= most(limits, e).max(unit), "{e:?}");
        assert!(e.need <= e.len && e.offset + e.need <= sizes[e.file as usize], "{e:?}");
        let bytes = data(e.file, e.offset..e.offset + e.len);
        let pieces = &schedule.pieces[e.pieces.start as usize..e.pieces.end as usize];
        assert!(!pieces.is_empty() && pieces.len() <= 16 * 1024, "{} pieces", pieces.len());
        assert!(pieces.is_sorted_by_key(|p| p.from));

        let mut distinct = vec![false; e.len as usize];
        let mut wanted_by: Vec<u32> = Vec::new();
        for p in pieces {
            wanted_by.push(p.want);
            assert_eq!(p.block, layout.places[p.want as usize].block);
            for (from, _) in rows(p) {
                distinct[from as usize..(from + p.len) as usize].fill(true);
            }
        }
        wanted_by.sort_unstable();
        wanted_by.dedup();
        wanted_by.iter().for_each(|&w| brought[w as usize] += 1);
        let packed: u64 = pieces.iter().map(Piece::nbytes).sum();
        let first = distinct.iter().position(|w| *w).unwrap();
        let last = distinct.iter().rposition(|w| *w).unwrap() + 1;
        assert_eq!(e.wanted as usize, distinct.iter().filter(|w| **w).count(), "{e:?}");
        assert_eq!(e.need as usize, last);
        assert_eq!(e.slack as usize, first + distinct.len() - last);
        assert!((first as u64) < unit && e.len - (last as u64) < unit, "slack of {e:?}");
        for gap in distinct[first..last].chunk_by(|a, b| a == b).filter(|g| !g[0]) {
            let shares_a_unit = (gap.len() as u64) < 2 * unit;
            // By rows, long gaps are skipped. They are read only where the rows of all wants would be more bytes.
            let by_rows = files[e.file as usize].rows.is_some() && (e.rows.is_some() || packed > e.len);
            assert!(gap.len() as u64 <= limits.gap || shares_a_unit || by_rows, "a gap of {} in {e:?}", gap.len());
        }

        if e.rows.is_some() && e.landing == Landing::Slab {
            assert!(packed <= e.len, "{packed} bytes lie behind each other in the slab of {e:?}");
        }
        if e.lane == Lane::BUFFERED {
            assert_eq!(e.slack, 0, "{e:?}");
        } else {
            assert!(e.offset % unit == 0 && e.len % unit == 0, "{e:?}");
        }
        if e.lane == Lane::DIRECT {
            let align = files[e.file as usize].unit.unwrap();
            assert!(e.offset % align == 0 && e.len % align == 0, "{e:?}");
        }
        if e.lane != Lane::MAPPED {
            for count in &mut read[e.file as usize][e.offset as usize..(e.offset + e.len) as usize] {
                *count += 1;
                assert!(*count == 1, "{e:?} reads again what another extent read");
            }
        }

        let direct = e.lane == Lane::DIRECT && matches!(e.landing, Landing::Block { .. });
        // What lands in the blocks of a stretch; bytes between them go nowhere.
        let in_place = |first: u32, bytes: &[u8], put: &mut dyn FnMut(u32, u64, &[u8])| {
            let BlockKind::Mirror { file, .. } = layout.blocks[first as usize].kind else { panic!("{e:?}") };
            assert_eq!(file, e.file);
            for (number, block) in (0..).zip(&layout.blocks) {
                if schedule.stretches[number as usize] == first {
                    let BlockKind::Mirror { start, .. } = block.kind else { panic!("{block:?} in a stretch") };
                    let from = start.max(e.offset);
                    let past = (start + block.nbytes).min(e.offset + bytes.len() as u64);
                    if from < past {
                        put(number, from - start, &bytes[(from - e.offset) as usize..(past - e.offset) as usize]);
                    }
                }
            }
        };
        let mut put = |block: u32, to: u64, bytes: &[u8]| {
            for page in to / PAGE..(to + bytes.len() as u64).div_ceil(PAGE) {
                let of = (e.offset | u64::from(e.file) << 48, direct);
                let before = std::mem::replace(&mut pages[block as usize][page as usize], of);
                let apart = before.0 == u64::MAX || before == of || !(before.1 || direct);
                assert!(apart, "a page is shared with a direct read: {e:?}");
            }
            let (block, to) = (block as usize, to as usize);
            blocks[block][to..to + bytes.len()].copy_from_slice(bytes);
            arrivals[block][to..to + bytes.len()].iter_mut().for_each(|n| *n += 1);
        };
        match e.landing {
            Landing::Mapping { block, resident } => {
                assert_eq!(e.lane, Lane::MAPPED);
                let there = |r: &Range<u64>| r.start <= e.offset + first as u64 && r.end >= e.offset + last as u64;
                assert!(!resident || files[e.file as usize].resident.iter().any(there), "not all resident: {e:?}");
                assert!(files[e.file as usize].way.is_mapped(), "{e:?}");
                let past = (e.offset + e.len).min(sizes[e.file as usize]);
                in_place(block, &bytes[..(past - e.offset) as usize], &mut put);
            }
            Landing::Block { block } => {
                assert!(e.lane != Lane::DIRECT || limits.direct_in_place, "{e:?}");
                in_place(block, &bytes, &mut put);
                for p in pieces {
                    let BlockKind::Mirror { start, .. } = layout.blocks[p.block as usize].kind else { panic!("{p:?}") };
                    assert_eq!(schedule.stretches[p.block as usize], block, "{p:?} of {e:?}");
                    assert!(p.rows == 1 && start + p.to == p.from + e.offset, "{p:?} of {e:?}");
                }
            }
            Landing::Scatter => {
                assert_eq!(e.lane, Lane::BUFFERED);
                let (mut at, mut entries) = (0, 0);
                for p in pieces {
                    for (from, to) in rows(p) {
                        assert!(from >= at, "{p:?} goes back");
                        entries += 1 + u64::from(from > at);
                        at = from + p.len;
                        put(p.block, to, &bytes[from as usize..at as usize]);
                    }
                }
                assert!(entries <= 512 && e.wanted >= limits.scatter.unwrap() * entries, "{entries} entries in {e:?}");
            }
            Landing::Slab => {
                for p in pieces {
                    for (from, to) in rows(p) {
                        put(p.block, to, &bytes[from as usize..(from + p.len) as usize]);
                    }
                }
                let moved: u64 = pieces.windows(2).map(|p| moved(&p[0], &p[1])).sum();
                let apart = pieces.windows(2).all(|p| ends(&p[0]).0 <= p[1].from);
                let one = e.offset / unit == (e.offset + e.len - 1) / unit;
                assert!(one || !apart || e.len + moved <= limits.extent, "no room to realign {e:?}: {moved}");
            }
        }
    }

    for (i, want) in wants.iter().enumerate() {
        let place = layout.places[i];
        let file = c.tensor(want.tensor).file;
        let mut at = place.offset;
        for (offset, len) in expected(c, want) {
            let block = place.block as usize;
            let range = at as usize..(at + len) as usize;
            assert!(blocks[block][range.clone()] == data(file, offset..offset + len)[..], "bytes of want {i} {want:?}");
            let once = &mut arrivals[block][range];
            assert!(once.iter().all(|n| *n == 1), "want {i} {want:?} at {place:?}: not once");
            once.fill(0);
            at += len;
        }
        assert_eq!(at, place.offset + place.nbytes);
        assert_eq!(brought[i], schedule.extents_of_want[i]);
    }
    // What else arrived: slack and gaps where a read lands in place, nothing anywhere else.
    for (spec, extra) in layout.blocks.iter().zip(&arrivals) {
        if !matches!(spec.kind, BlockKind::Mirror { .. }) {
            assert!(extra.iter().all(|n| *n == 0), "unwanted bytes arrived in {spec:?}");
        }
    }
    routes(files, &sizes, schedule);
    let t = schedule.totals();
    let bytes: u64 = schedule.extents.iter().map(Extent::bytes_read).sum();
    assert_eq!(t.lanes.sum().bytes, bytes);
    assert_eq!(t.wanted + t.slack + t.gap, bytes);
    assert_eq!(t.lanes.sum().extents, schedule.extents.len() as u64);
}

/// One past its last byte in the extent and in the block.
fn ends(p: &Piece) -> (u64, u64) {
    rows(p).last().map(|(f, t)| (f + p.len, t + p.len)).unwrap()
}

/// By how much `b` moves away from `a` in the slab.
fn moved(a: &Piece, b: &Piece) -> u64 {
    let (from, to) = ends(a);
    match b.to.checked_sub(to) {
        Some(d) if a.block == b.block && d < GPU_ALIGN => d.saturating_sub(b.from.saturating_sub(from)),
        _ => GPU_ALIGN,
    }
}

/// Resident bytes go the warm way and the others the cold way, up to stretches too short to matter.
fn routes(files: &[FileTraits], sizes: &[u64], schedule: &Schedule) {
    for e in schedule.extents.iter().filter(|e| e.lane != Lane::MAPPED) {
        let traits = &files[e.file as usize];
        if traits.unit.is_none() {
            assert_eq!(e.lane, Lane::BUFFERED);
        }
        if traits.unit != Some(512) || (traits.way.cold, traits.way.warm) != (Lane::DIRECT, Lane::BUFFERED) {
            continue;
        }
        let past = (e.offset + e.len).min(sizes[e.file as usize]);
        let inside = |r: &Range<u64>| past.min(r.end).saturating_sub(e.offset.max(r.start));
        let resident: u64 = traits.resident.iter().map(inside).sum();
        match e.lane {
            Lane::BUFFERED => assert_eq!(resident, past - e.offset, "cold bytes in {e:?}"),
            _ => assert!(traits.resident.iter().all(|r| inside(r) < (64 << 10) + 2 * PAGE), "warm bytes in {e:?}"),
        }
    }
}

fn tensor() -> impl Strategy<Value = (DType, Vec<u64>)> {
    use DType::{BF16, BOOL, C64, F32, F4, F64, F8_E4M3, U16};
    let dtype = prop::sample::select(vec![BF16, BOOL, C64, F32, F64, F8_E4M3, U16, BF16, F32]);
    prop_oneof![
        1 => (dtype.clone(), prop::collection::vec(0..4u64, 0..3)),
        3 => (dtype.clone(), prop::collection::vec(1..24u64, 0..4)),
        2 => (dtype.clone(), prop::collection::vec(1..160u64, 2)),
        1 => (dtype, prop::collection::vec(1..60_000u64, 1)),
        1 => (1..2000u64, 1..9u64).prop_map(|(a, b)| (F4, vec![a, 2 * b])),
    ]
}

fn file() -> impl Strategy<Value = (Vec<(DType, Vec<u64>)>, usize)> {
    (prop::collection::vec(tensor(), 0..14), prop_oneof![Just(0usize), 0..70usize])
}

fn name(file: usize, i: usize) -> String {
    match i % 5 {
        0 => format!("model.layers.{}.w{file}.{i}", (i * 7 + file) % 12),
        1 => format!("model.norm{i}.{file}"),
        2 => format!("vision.{}.{file}.{i}", i % 3),
        3 => format!("embed{i}_{file}"),
        _ => format!("model.layers.{}.b{file}_{i}", (i * 5) % 12),
    }
}

/// A want: tensor, whether whole, and two fractions per dimension in 1/1000.
type Pick = (prop::sample::Index, bool, [(u64, u64); 3]);

#[derive(Debug, Clone)]
struct Case {
    files: Vec<(Vec<Tensor>, usize)>,
    wants: Vec<Pick>,
    traits: Vec<FileTraits>,
    limits: Limits,
    target: u8,
    misaligned: bool,
    order: Order,
}

fn case() -> impl Strategy<Value = Case> {
    let fractions = || (0..1000u64, 0..=1000u64);
    let want = (any::<prop::sample::Index>(), prop::bool::weighted(0.6), [fractions(), fractions(), fractions()]);
    let resident = prop::collection::vec((0..120u64, 1..60u64), 0..4).prop_map(|parts| {
        let (mut at, mut ranges) = (0, Vec::new());
        for (skip, take) in parts {
            ranges.push(at + skip * PAGE..at + (skip + take) * PAGE);
            at += (skip + take + 1) * PAGE;
        }
        ranges
    });
    let align = prop::sample::select(vec![Some(512), Some(512), Some(4096), Some(16384), None]);
    let lane = || prop::sample::select(vec![Lane::DIRECT, Lane::BUFFERED, Lane::DIRECT]);
    let extent = prop::option::weighted(0.3, prop::sample::select(vec![4096u64, 8192, 16384]));
    let gap = prop::option::weighted(0.3, prop::sample::select(vec![0u64, 4096, 65536]));
    let traits = (0..3u32, align, resident, any::<bool>(), lane(), lane(), (extent, gap));
    let limits = (
        prop::sample::select(vec![4096u64, 8192, 20480, 1 << 16, 1 << 18]),
        prop::sample::select(vec![0u64, 1, 100, 4096, 16384]),
        prop::sample::select(vec![None, Some(1), Some(64), Some(4096)]),
        prop::bool::weighted(0.7),
        prop::sample::select(vec![None, Some(1), Some(50_000), Some(1 << 20)]),
    );
    (
        prop::collection::vec(file(), 1..4),
        prop::collection::vec(want, 0..24),
        prop::collection::vec(traits, 3),
        limits,
        (0..3u8, any::<bool>(), prop::sample::select(vec![Order::File, Order::Layer])),
    )
        .prop_map(|(files, wants, traits, limits, (target, misaligned, order))| Case {
            files: files
                .into_iter()
                .enumerate()
                .map(|(f, (tensors, padding))| {
                    let named = tensors.into_iter().enumerate().map(|(i, (d, s))| (name(f, i), d, s));
                    (named.collect(), padding)
                })
                .collect(),
            wants,
            traits: traits
                .into_iter()
                .map(|(storage, unit, resident, mapped, cold, warm, (extent, gap))| {
                    let extent = extent.map(|bytes| bytes.min(limits.0));
                    // Only files for the CPU are mapped.
                    let way =
                        Way { mapping: (mapped && target == 0).then_some(Lane::MAPPED), cold, warm, ..Way::default() };
                    FileTraits { storage, unit, resident, way, extent, gap, ..FileTraits::default() }
                })
                .collect(),
            limits: Limits {
                extent: limits.0,
                gap: limits.1,
                scatter: limits.2,
                direct_in_place: limits.3,
                window: limits.4,
            },
            target,
            misaligned,
            order,
        })
}

impl Case {
    fn wants(&self, c: &Checkpoint) -> Vec<Want> {
        if c.is_empty() {
            return Vec::new();
        }
        if self.wants.len() < 4 {
            return Want::all(c);
        }
        self.wants
            .iter()
            .map(|(tensor, whole, fractions)| {
                let t = c.tensor(tensor.index(c.len()) as u32);
                if *whole {
                    return Want::whole(t.index);
                }
                let mut region: Vec<_> = t
                    .shape
                    .iter()
                    .zip(fractions)
                    .map(|(&n, &(a, b))| {
                        let (a, b) = (n * a / 1000, (n * b).div_ceil(1000));
                        AxisSlice { start: a.min(b), end: b, step: [1, 1, 1, 2, 3, 7][((a + b) % 6) as usize] }
                    })
                    .collect();
                if t.dtype.bits() < 8 {
                    // Two elements to a byte: whole bytes only.
                    region[1] = (region[1].start / 2 * 2..region[1].end.next_multiple_of(2)).into();
                }
                Want::part(t.index, region)
            })
            .collect()
    }

    fn target(&self) -> Target {
        match self.target {
            0 => Target::Cpu { misaligned: self.misaligned },
            1 => Target::Gpu,
            _ => Target::Foreign,
        }
    }
}

fn aligned(c: &Checkpoint, wants: &[Want], target: &Target, layout: &Layout) {
    for (want, place) in wants.iter().zip(&layout.places) {
        let block = layout.blocks[place.block as usize];
        assert!(place.offset + place.nbytes <= block.nbytes, "{place:?} leaves {block:?}");
        let align = match (block.kind, target) {
            (BlockKind::Dense, Target::Gpu) => GPU_ALIGN,
            (BlockKind::Dense, _) => 64,
            (BlockKind::Mirror { .. }, Target::Cpu { misaligned: true }) => 1,
            _ => c.tensor(want.tensor).dtype.align(),
        };
        assert_eq!(place.offset % align, 0, "{want:?} at {place:?} of {block:?}");
    }
    for block in &layout.blocks {
        if let BlockKind::Mirror { start, .. } = block.kind {
            assert!(start % PAGE == 0 && block.nbytes % PAGE == 0);
        }
    }
    // No other want's bytes: places of one block are disjoint.
    let mut places: Vec<_> =
        layout.places.iter().filter(|p| p.nbytes > 0).map(|p| (p.block, p.offset, p.nbytes)).collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|p| p[0].0 != p[1].0 || p[0].1 + p[0].2 <= p[1].1), "places overlap");
    let mut order = layout.order.clone();
    order.sort_unstable();
    assert!(order.iter().copied().eq(0..wants.len() as u32), "the order names every want once");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 128 }, max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_wanted_byte_arrives_once_and_nothing_else_is_read_beyond_slack_and_gaps(case in case()) {
        let c = checkpoint(&case.files);
        let (wants, target) = (case.wants(&c), case.target());
        let layout = Layout::new(&c, &wants, &target, case.order).unwrap();
        aligned(&c, &wants, &target, &layout);
        let schedule = Schedule::new(&c, &layout, &case.traits, &case.limits);
        check(&c, &wants, &layout, &case.traits, &case.limits, &schedule);
        // Pure: the same again gives the same.
        prop_assert_eq!(&layout, &Layout::new(&c, &wants, &target, case.order).unwrap());
        let again = Schedule::new(&c, &layout, &case.traits, &case.limits);
        prop_assert_eq!((&schedule.extents, &schedule.pieces), (&again.extents, &again.pieces));
    }

    /// Else a stream would have to read more than its window before it could hand out the next tensor.
    #[test]
    fn what_comes_before_the_last_byte_of_a_tensor_of_a_stream_fits_into_the_window(
        files in prop::collection::vec(prop::collection::vec(1..30_000u64, 1..24), 1..4),
        storage in prop::collection::vec(0..3u32, 3),
        extent in prop::sample::select(vec![PAGE, 8192, 20480]),
        window in 0..150_000u64,
    ) {
        let files: Vec<(Vec<Tensor>, usize)> = (0..)
            .zip(files)
            .map(|(f, sizes)| {
                let tensors = (0..).zip(sizes).map(|(i, size)| (name(f, i), DType::U8, vec![size]));
                (tensors.collect(), 0)
            })
            .collect();
        let c = checkpoint(&files);
        let wants = Want::all(&c);
        let layout = Layout::new(&c, &wants, &Target::Foreign, Order::File).unwrap();
        let traits: Vec<FileTraits> =
            storage.iter().map(|&storage| FileTraits { storage, ..FileTraits::default() }).collect();
        let limits = Limits { extent, gap: 0, scatter: Some(1), direct_in_place: true, window: Some(window) };
        let schedule = Schedule::new(&c, &layout, &traits, &limits);
        check(&c, &wants, &layout, &traits, &limits, &schedule);
        let pieces = |e: &Extent| schedule.pieces[e.pieces.start as usize..e.pieces.end as usize].to_vec();
        let mut taken = vec![false; wants.len()];
        for &next in &layout.order {
            let last = schedule.extents.iter().rposition(|e| pieces(e).iter().any(|p| p.want == next)).unwrap();
            let read = schedule.extents[..=last].iter().flat_map(pieces).filter(|p| !taken[p.want as usize]);
            let (read, alone) = (read.map(|p| p.nbytes()).sum::<u64>(), layout.places[next as usize].nbytes);
            prop_assert!(read <= window.max(alone) + 2 * extent, "{} for {}: {:?}", read, next, limits);
            taken[next as usize] = true;
        }
    }

    /// A cut within one would have it mapped in 512 small pages.
    #[test]
    fn mapped_files_are_cut_between_huge_pages(
        sizes in prop::collection::vec((0..12 * MIB, prop::bool::weighted(0.8)), 1..16),
        padding in 0..5000usize,
        extent in prop::sample::select(vec![PAGE, MIB, 2 * MIB, 3 * MIB, 4 * MIB + PAGE, 20 * MIB, 100 * MIB]),
        gap in prop::sample::select(vec![0, PAGE, 3 * MIB]),
        resident in any::<bool>(),
    ) {
        let tensors = (0..).zip(&sizes).map(|(i, &(n, _))| (name(0, i), DType::U8, vec![n])).collect();
        let c = checkpoint(&[(tensors, padding)]);
        let wants: Vec<Want> = (0..).zip(&sizes).filter(|(_, s)| s.1).map(|(i, _)| Want::whole(i)).collect();
        let limits = Limits { extent, gap, scatter: None, direct_in_place: true, window: None };
        let size = c.files()[0].size;
        let there = if resident { 0..size } else { PAGE..size };
        // If some bytes are cold, the first page is one of them, and it is wanted unless the header fills it.
        let way = Way { mapping: Some(Lane::MAPPED), ..Way::default() };
        let traits = [FileTraits { resident: vec![there.clone()], way, ..FileTraits::default() }];
        let layout = Layout::new(&c, &wants, &Target::Cpu { misaligned: false }, Order::File).unwrap();
        let schedule = Schedule::new(&c, &layout, &traits, &limits);
        // Each with its first and last wanted byte.
        let mut extents: Vec<(Range<u64>, &Extent)> = Vec::new();
        for e in &schedule.extents {
            let first = schedule.pieces[e.pieces.start as usize].from;
            extents.push((e.offset + first..e.offset + e.need, e));
        }
        extents.sort_by_key(|e| e.0.start);
        let span = extents.first().map_or(0, |e| e.0.start)..extents.last().map_or(0, |e| e.0.end);
        let resident = there.start <= span.start && there.end >= span.end;
        for (_, e) in &extents {
            let first = extents.iter().map(|e| e.1.landing).next().unwrap();
            prop_assert_eq!(e.landing, first, "a file is one stretch");
            let is_resident = matches!(e.landing, Landing::Mapping { resident: true, .. });
            prop_assert_eq!(is_resident, resident);
            prop_assert!(e.len <= most(&limits, e), "{:?}", e);
        }
        let step = if resident || extent >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        for pair in extents.windows(2) {
            let ((a, before), (b, after)) = (&pair[0], &pair[1]);
            let past = before.offset + before.len;
            if b.start - a.end <= gap || after.offset < past {
                prop_assert!(past.next_multiple_of(step) <= after.offset, "cut within a huge page: {before:?} {after:?}");
            }
        }
        let wanted: u64 = wants.iter().map(|w| c.tensor(w.tensor).nbytes()).sum();
        prop_assert_eq!(schedule.totals().wanted, wanted);
    }

    /// In a slab they lie one behind the other, also those that several wants take.
    #[test]
    fn short_rows_need_no_more_room_in_a_slab_than_their_extent(
        rows in 2..200u64,
        width in 8..300u64,
        cuts in prop::collection::vec((0..1000u64, 1..=1000u64, 1..4u64), 1..8),
        padding in 0..5000usize,
        extent in prop::sample::select(vec![PAGE, 20480]),
        gap in prop::sample::select(vec![0u64, 100, 8192]),
        foreign in any::<bool>(),
    ) {
        let c = checkpoint(&[(vec![("w".into(), DType::U8, vec![rows, width])], padding)]);
        let wants = cuts.iter().map(|&(a, b, step)| {
            let start = (a.min(b) * width / 1000).min(width - 2);
            let end = (a.max(b) * width / 1000).clamp(start + 1, width - 1);
            Want::part(0, [AxisSlice { start: 0, end: rows, step: 1 }, AxisSlice { start, end, step }])
        });
        let wants: Vec<Want> = wants.collect();
        let limits = Limits { extent, gap: 0, scatter: None, direct_in_place: true, window: None };
        let target = if foreign { Target::Foreign } else { Target::Gpu };
        let layout = Layout::new(&c, &wants, &target, Order::File).unwrap();
        let traits = [FileTraits { rows: Some(gap), ..FileTraits::default() }];
        let schedule = Schedule::new(&c, &layout, &traits, &limits);
        check(&c, &wants, &layout, &traits, &limits, &schedule);
        let bytes = schedule.extents.iter().map(Extent::bytes_read).sum::<u64>();
        prop_assert!(bytes <= rows * width);
        if let [want] = &wants[..] {
            prop_assert!(schedule.extents.iter().all(|e| e.rows.is_some()), "{want:?} by rows");
        }
    }

    /// Runs two by two, too many of them to be read so: strips along the outer dimension, one between the other.
    #[test]
    fn slices_of_many_small_runs_are_read_along_their_longest_dimension(
        rows in 9_000..12_000u64,
        inner in prop::collection::vec((2..4u64, 0..2u64, 1..3u64), 1..3),
        padding in 0..5000usize,
        extent in prop::sample::select(vec![PAGE, 20480, 1 << 16, 1 << 18]),
        gap in prop::sample::select(vec![4u64, 100, 16384]),
        scatter in prop::sample::select(vec![None, Some(1), Some(4096)]),
        target in 0..3u8,
        whole in any::<bool>(),
    ) {
        let shape: Vec<u64> = [rows].into_iter().chain(inner.iter().map(|i| i.0 + 2)).collect();
        let bytes: u64 = shape.iter().product();
        let c = checkpoint(&[(vec![("a".into(), DType::U8, vec![9]), ("w".into(), DType::U8, shape)], padding)]);
        let (a, w) = (c.find("a").unwrap().index, c.find("w").unwrap().index);
        let region = [AxisSlice { start: 1, end: rows - 1, step: 1 }]
            .into_iter()
            .chain(inner.iter().map(|&(n, start, step)| AxisSlice { start, end: n + 2, step: step + 1 }));
        let mut wants = vec![Want::part(w, region), Want::whole(a)];
        if whole {
            wants.push(Want::whole(w));
        }
        let targets = [Target::Cpu { misaligned: false }, Target::Gpu, Target::Foreign];
        let target = &targets[usize::from(target)];
        let limits = Limits { extent, gap, scatter, direct_in_place: true, window: None };
        let there = bytes / 3..bytes / 2;
        let way = Way { cold: Lane::DIRECT, ..Way::default() };
        let traits = [FileTraits { unit: Some(512), resident: vec![there], way, ..FileTraits::default() }];
        let layout = Layout::new(&c, &wants, target, Order::File).unwrap();
        aligned(&c, &wants, target, &layout);
        let schedule = Schedule::new(&c, &layout, &traits, &limits);
        check(&c, &wants, &layout, &traits, &limits, &schedule);
        // Each strip has at most three pieces in a read; wants that are whole have pieces of their own.
        let strips = layout.runs[0].strips(gap).count;
        let runs = layout.runs[0].count();
        if runs > 4 * (16 << 10) && strips < 16 << 10 {
            let most = (3 * strips + 4) * schedule.extents.len() as u64;
            prop_assert!((schedule.pieces.len() as u64) <= most, "{} pieces of {strips} strips", schedule.pieces.len());
        }
    }

    #[test]
    fn the_order_in_which_wants_are_listed_changes_no_place(case in case(), seed in any::<u64>()) {
        let c = checkpoint(&case.files);
        let mut wants = case.wants(&c);
        // Two wants of the same bytes differ only in their number.
        let mut seen = std::collections::HashSet::new();
        wants.retain(|w| {
            let runs = Runs::of(&c, w).unwrap();
            seen.insert((c.tensor(w.tensor).file, runs.start, runs.len, runs.axes))
        });
        let mut shuffled: Vec<usize> = (0..wants.len()).collect();
        shuffled.sort_by_key(|i| (*i as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let target = if case.target == 2 { Target::Gpu } else { case.target() };
        let one = Layout::new(&c, &wants, &target, case.order).unwrap();
        let moved: Vec<Want> = shuffled.iter().map(|&i| wants[i].clone()).collect();
        let two = Layout::new(&c, &moved, &target, case.order).unwrap();
        prop_assert_eq!(&one.blocks, &two.blocks);
        for (i, &was) in shuffled.iter().enumerate() {
            // Empty tensors that start together cannot be told apart.
            if one.places[was].nbytes > 0 {
                prop_assert_eq!(one.places[was], two.places[i]);
            }
        }
    }
}

#[test]
fn shared_blocks_are_bounded() {
    let tensors = (0..40).map(|i| (format!("t{i}"), DType::U8, vec![(i % 9) << 20])).collect();
    let c = checkpoint(&[(tensors, 0)]);
    let layout = Layout::new(&c, &Want::all(&c), &Target::Gpu, Order::File).unwrap();
    assert!(layout.blocks.iter().all(|b| b.nbytes <= SHARED_BLOCK));
    assert!(layout.blocks.len() <= 12, "{}", layout.blocks.len());
}
