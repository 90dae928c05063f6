//! Known plans: exact numbers of reads, exact numbers of bytes.
#![allow(clippy::unwrap_used)]

mod checkpoints;

use penstock::extent::{Landing, Lane};
use penstock::format::Checkpoint;
use penstock::options::{Order, GPU_ALIGN, PAGE};
use penstock::plan::layout::{BlockKind, Layout, Target};
use penstock::plan::schedule::{FileTraits, Limits, Schedule};
use penstock::plan::want::{AxisSlice, Runs, Want};
use penstock::way::{Through, Way};
use std::fmt::Write as _;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const LIMITS: Limits =
    Limits { extent: 4 * MIB, gap: 16 << 10, scatter: Some(4096), direct_in_place: true, window: None };

const BUFFERED: Way = Way {
    mapping: None,
    in_part: false,
    cold: Lane::BUFFERED,
    warm: Lane::BUFFERED,
    parts: Lane::BUFFERED,
    through: Through::Ahead,
};
/// Cold bytes past the page cache, resident ones through it.
const DIRECT: Way = Way { cold: Lane::DIRECT, ..BUFFERED };
const MAPPED: Way = Way { mapping: Some(Lane::MAPPED), ..BUFFERED };

/// A checkpoint of one file whose data section starts at `data_start`.
fn checkpoint<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a str, Vec<u64>)>, data_start: usize) -> Checkpoint {
    let (mut json, mut at) = (String::from("{"), 0);
    for (name, dtype, shape) in tensors {
        let size = match dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        let past = at + size * shape.iter().product::<u64>();
        let comma = if json.len() > 1 { "," } else { "" };
        write!(json, r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{past}]}}"#)
            .unwrap();
        at = past;
    }
    json.push('}');
    let data_start = data_start.max(json.len() + 8);
    json.extend(std::iter::repeat_n(' ', data_start - 8 - json.len()));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    Checkpoint::from_bytes(&bytes, bytes.len() as u64 + at).unwrap()
}

/// The tensors of GPT-2 in the order in which its file has them.
fn gpt2() -> Checkpoint {
    let mut names = Vec::new();
    for i in 0..12 {
        for (name, shape) in [
            ("attn.bias", vec![1, 1, 1024, 1024]),
            ("attn.c_attn.bias", vec![2304]),
            ("attn.c_attn.weight", vec![768, 2304]),
            ("attn.c_proj.bias", vec![768]),
            ("attn.c_proj.weight", vec![768, 768]),
            ("ln_1.bias", vec![768]),
            ("ln_1.weight", vec![768]),
            ("ln_2.bias", vec![768]),
            ("ln_2.weight", vec![768]),
            ("mlp.c_fc.bias", vec![3072]),
            ("mlp.c_fc.weight", vec![768, 3072]),
            ("mlp.c_proj.bias", vec![768]),
            ("mlp.c_proj.weight", vec![3072, 768]),
        ] {
            names.push((format!("h.{i}.{name}"), shape));
        }
    }
    for (name, shape) in [
        ("ln_f.bias", vec![768]),
        ("ln_f.weight", vec![768]),
        ("wpe.weight", vec![1024, 768]),
        ("wte.weight", vec![50257, 768]),
    ] {
        names.push((name.to_string(), shape));
    }
    names.sort();
    checkpoint(names.iter().map(|(n, s)| (n.as_str(), "F32", s.clone())), 20_000)
}

fn cold(storage: u32) -> FileTraits {
    FileTraits { storage, unit: Some(512), way: DIRECT, ..FileTraits::default() }
}

fn by(way: Way) -> FileTraits {
    FileTraits { way, ..cold(0) }
}

#[test]
fn gpt2_lands_in_place_in_131_reads() {
    let c = gpt2();
    assert_eq!(c.nbytes(), 548_090_880);
    let wants = Want::all(&c);
    let target = Target::Cpu { misaligned: false };
    let layout = Layout::new(&c, &wants, &target, Order::File).unwrap();
    assert_eq!(layout.blocks.len(), 1);
    let s = Schedule::new(&c, &layout, &[cold(0)], &LIMITS);
    let (begin, past) = (20_000u64, 20_000 + c.nbytes());
    let (first, last) = (begin / PAGE * PAGE, past.next_multiple_of(PAGE));
    let t = s.totals();
    assert_eq!((t.lanes.of(Lane::DIRECT).extents, t.lanes.of(Lane::DIRECT).bytes), (131, last - first));
    assert_eq!((t.wanted, t.slack, t.gap), (c.nbytes(), begin - first + last - past, 0));
    assert!(s.extents.iter().all(|e| e.landing == Landing::Block { block: 0 }));
    // No short tail: the last two share the rest.
    assert!(s.extents.iter().all(|e| e.len > MIB), "{:?}", s.extents.iter().map(|e| e.len).min());

    // Through the page cache: the exact bytes in as many reads.
    let s = Schedule::new(&c, &layout, &[by(BUFFERED)], &LIMITS);
    let t = s.totals();
    assert_eq!(
        (t.lanes.of(Lane::BUFFERED).extents, t.lanes.of(Lane::BUFFERED).bytes, t.slack, t.gap),
        (131, c.nbytes(), 0, 0)
    );

    // By huge pages: cut between them, in about as many reads.
    let filled = by(Way { through: Through::HugePages, ..BUFFERED });
    let s = Schedule::new(&c, &layout, &[filled], &LIMITS);
    let t = s.totals();
    assert_eq!(
        (t.lanes.of(Lane::BUFFERED).extents, t.lanes.of(Lane::BUFFERED).bytes, t.slack, t.gap),
        (131, c.nbytes(), 0, 0)
    );
    assert!(s.extents[1..].iter().all(|e| e.offset % (2 * MIB) == 0));

    // Mapped: populated, nothing copied.
    let s = Schedule::new(&c, &layout, &[by(MAPPED)], &LIMITS);
    assert_eq!((s.totals().lanes.of(Lane::MAPPED).extents, s.totals().lanes.of(Lane::DIRECT).extents), (131, 0));
    assert_eq!(layout.blocks[0].kind, BlockKind::Mirror { file: 0, start: 20_000 / PAGE * PAGE });
}

#[test]
fn gpt2_onto_a_gpu_costs_two_percent_more_reads_and_no_more_bytes() {
    let c = gpt2();
    let layout = Layout::new(&c, &Want::all(&c), &Target::Gpu, Order::File).unwrap();
    assert!(layout.places.iter().all(|p| p.offset % GPU_ALIGN == 0));
    let s = Schedule::new(&c, &layout, &[cold(0)], &Limits { scatter: None, ..LIMITS });
    let t = s.totals();
    assert_eq!(t.wanted, c.nbytes());
    assert!(t.slack < 2 * PAGE && t.gap == 0);
    assert!((131..=133).contains(&t.lanes.of(Lane::DIRECT).extents), "{}", t.lanes.of(Lane::DIRECT).extents);
    assert!(s.extents.iter().all(|e| e.landing == Landing::Slab));
}

#[test]
fn what_is_resident_goes_its_own_way() {
    let c = checkpoint([("a", "U8", vec![64 * MIB])], 4096);
    let layout = Layout::new(&c, &Want::all(&c), &Target::Cpu { misaligned: false }, Order::File).unwrap();
    let half = FileTraits { resident: std::iter::once(0..32 * MIB).collect(), ..cold(0) };
    let t = Schedule::new(&c, &layout, &[half], &LIMITS).totals();
    assert_eq!((t.lanes.of(Lane::BUFFERED).bytes, t.lanes.of(Lane::DIRECT).bytes), (32 * MIB - 4096, 32 * MIB + 4096));
    assert_eq!((t.lanes.of(Lane::BUFFERED).extents, t.lanes.of(Lane::DIRECT).extents), (8, 9));
    // An island of a page is not worth two more reads.
    let island = FileTraits { resident: std::iter::once(8 * MIB..8 * MIB + 4096).collect(), ..cold(0) };
    let t = Schedule::new(&c, &layout, &[island], &LIMITS).totals();
    assert_eq!((t.lanes.of(Lane::BUFFERED).extents, t.lanes.of(Lane::DIRECT).extents), (0, 16));
}

#[test]
fn tensor_parallel_ranks_read_exactly_their_bytes() {
    let c = checkpoint(
        [
            ("row", "BF16", vec![64, 1024]),
            ("column", "BF16", vec![256, 32 << 10]),
            ("narrow", "F32", vec![512, 64]),
            ("experts", "BF16", vec![8, 64, 16]),
            ("norm", "BF16", vec![40]),
        ],
        0,
    );
    for ranks in [2u64, 4, 8] {
        for split in 0..2usize {
            let mut taken = vec![0u8; c.files()[0].size as usize];
            let mut wanted = 0;
            for rank in 0..ranks {
                let wants: Vec<Want> = c
                    .tensors()
                    .map(|t| {
                        let axis = split.min(t.shape.len() - 1);
                        let region = t.shape.iter().enumerate().map(|(i, &n)| {
                            if i == axis {
                                n * rank / ranks..n * (rank + 1) / ranks
                            } else {
                                0..n
                            }
                        });
                        Want::part(t.index, region)
                    })
                    .collect();
                for w in &wants {
                    let runs = Runs::of(&c, w).unwrap();
                    for i in 0..runs.count() {
                        let at = runs.offset(i) as usize;
                        taken[at..at + runs.len as usize].iter_mut().for_each(|n| *n += 1);
                    }
                }
                let layout = Layout::new(&c, &wants, &Target::Gpu, Order::File).unwrap();
                let s = Schedule::new(&c, &layout, &[by(BUFFERED)], &Limits { gap: 0, scatter: None, ..LIMITS });
                let t = s.totals();
                wanted += t.wanted;
                // With no gap allowed only runs within a page of each other are read together: the narrow matrix's rows.
                if split == 1 {
                    let rows = s.extents.iter().filter(|e| e.len == e.wanted && e.wanted == (64 << 10) / ranks).count();
                    assert!(rows >= 255, "{rows} reads of a row each for rank {rank} of {ranks}");
                }
            }
            assert_eq!(wanted, c.nbytes());
            let data = c.files()[0].data_start as usize;
            assert!(taken[data..].iter().all(|n| *n == 1));
        }
    }
}

#[test]
fn a_column_slice_with_small_gaps_is_one_piece_per_extent() {
    let c = checkpoint([("w", "BF16", vec![16 << 10, 2048])], 4096);
    let want = Want::part(0, [0..16 << 10, 0..1024]);
    let layout = Layout::new(&c, &[want], &Target::Gpu, Order::File).unwrap();
    let s = Schedule::new(&c, &layout, &[cold(0)], &Limits { scatter: None, ..LIMITS });
    assert_eq!((s.extents.len(), s.pieces.len()), (16, 16));
    let t = s.totals();
    assert_eq!((t.wanted, t.wanted + t.gap + t.slack), (32 * MIB, 64 * MIB));
}

/// Ten thousand million elements, in 38 GiB: what lists runs one by one never comes back.
#[test]
fn steps_in_a_huge_matrix_are_planned_extent_by_extent() {
    const N: u64 = 100_000;
    let c = checkpoint([("w", "F32", vec![N, N]), ("k", "U8", vec![N, N, 4])], 4096);
    let every = |n| AxisSlice { start: 0, end: n, step: 1 };
    let of = |start, end, step| AxisSlice { start, end, step };
    let cases = [
        // Rows go on where the last one ends: one strip, and a piece for each read.
        (0, vec![every(N), of(0, N, 2)], 4 * N * N - 4, 1),
        // They do not: a strip for each row, ten in a read.
        (0, vec![every(N), of(1, N - 1, 2)], 4 * N * N - 12, 24),
        // Two elements of each of ten thousand million fours, of every second one: two strips in all.
        (1, vec![every(N), of(0, N, 2), of(0, 4, 3)], 4 * N * N - 4, 6),
    ];
    for target in [Target::Cpu { misaligned: false }, Target::Gpu, Target::Foreign] {
        for (tensor, region, span, most) in &cases {
            let want = Want::part(*tensor, region.iter().copied());
            let begun = checkpoints::processor_time();
            let layout = Layout::new(&c, &[want], &target, Order::File).unwrap();
            let s = Schedule::new(&c, &layout, &[by(BUFFERED)], &LIMITS);
            let taken = checkpoints::processor_time() - begun;
            assert!(taken.as_secs() < 20, "{region:?}: {taken:?}");
            let t = s.totals();
            assert_eq!(t.wanted, layout.runs[0].nbytes());
            // Gaps at the ends of reads, which fall on pages, are left out.
            assert!(
                span - t.lanes.of(Lane::BUFFERED).bytes < 8 * t.lanes.of(Lane::BUFFERED).extents,
                "{region:?}: {t:?}"
            );
            let reads = span.div_ceil(LIMITS.extent);
            assert!(t.lanes.of(Lane::BUFFERED).extents <= reads + reads / 8, "{region:?}: {t:?}");
            assert!(
                s.pieces.len() as u64 <= most * t.lanes.of(Lane::BUFFERED).extents,
                "{region:?}: {} pieces",
                s.pieces.len()
            );
        }
    }
}

#[test]
fn a_slice_of_more_pieces_than_memory_holds_is_refused_by_name() {
    // Every third element of nine short dimensions, in rows further apart than the gap that is read: 2^8 pieces each.
    let mut shape = vec![70_000];
    shape.extend([3; 9]);
    let c = checkpoint([("knots", "U8", shape.clone())], 4096);
    let region = |rows| {
        let steps = shape[1..].iter().map(|&end| AxisSlice { start: 0, end, step: 2 });
        [AxisSlice { start: 0, end: rows, step: 1 }].into_iter().chain(steps)
    };
    let begun = checkpoints::processor_time();
    let check = |rows, gap| {
        let wants = [Want::part(0, region(rows))];
        let layout = Layout::new(&c, &wants, &Target::Gpu, Order::File).unwrap();
        Schedule::check(&c, &wants, &layout, &[FileTraits::default()], &Limits { gap, ..LIMITS })
    };
    let refused = check(70_000, LIMITS.gap).unwrap_err();
    assert!((checkpoints::processor_time() - begun).as_secs() < 1);
    assert_eq!(refused.kind(), penstock::ErrorKind::Limit);
    let text = refused.to_string();
    assert!(text.contains("`knots`") && text.contains("17920000 pieces") && text.contains("`gap`"), "{text}");
    // Fewer of them, or a gap that spans a row, will do.
    assert!(check(60_000, LIMITS.gap).is_ok());
    assert!(check(70_000, 20_000).is_ok());
}

#[test]
fn two_drives_work_at_the_same_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for f in 0..2 {
        let json = format!(r#"{{"t{f}":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, 40 * MIB);
        let path = dir.path().join(format!("{f}.safetensors"));
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        std::fs::write(&path, &bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + 40 * MIB).unwrap();
        paths.push(path);
    }
    let c = Checkpoint::open(&paths).unwrap();
    let layout = Layout::new(&c, &Want::all(&c), &Target::Gpu, Order::File).unwrap();
    let files = |s: Schedule| s.extents.iter().map(|e| e.file).collect::<Vec<_>>();
    let together = files(Schedule::new(&c, &layout, &[cold(0), cold(1)], &LIMITS));
    assert!(together.chunks_exact(2).all(|p| p[0] != p[1]), "{together:?}");
    let apart = files(Schedule::new(&c, &layout, &[cold(0), cold(0)], &LIMITS));
    assert!(apart.is_sorted());
}

#[test]
fn layers_come_in_numeric_order_and_whole() {
    let names = [
        "embed.weight",
        "layers.0.a",
        "layers.1.a",
        "layers.10.a",
        "layers.10.b",
        "layers.2.a",
        "head.bias",
        "layers.2.b",
        "head.weight",
        "0.w",
    ];
    let c = checkpoint(names.iter().map(|n| (*n, "U8", vec![3])), 0);
    let layout = Layout::new(&c, &Want::all(&c), &Target::Gpu, Order::Layer).unwrap();
    let order: Vec<_> = layout.order.iter().map(|&w| c.tensor(w).name).collect();
    assert_eq!(
        order,
        [
            "embed.weight",
            "layers.0.a",
            "layers.1.a",
            "layers.2.a",
            "layers.2.b",
            "layers.10.a",
            "layers.10.b",
            "head.bias",
            "head.weight",
            "0.w"
        ]
    );
}

/// 24 layers of 128 experts, 6 KiB a matrix, with 512 KiB of attention each: 9,312 tensors, 69 MB. `data_start` decides how
/// they are aligned.
fn moe(data_start: usize) -> Checkpoint {
    let mut names = Vec::new();
    for layer in 0..24 {
        for expert in 0..128 {
            for part in ["down", "gate", "up"] {
                names.push((format!("layers.{layer}.experts.{expert}.{part}"), vec![48u64, 64]));
            }
        }
        for part in ["k", "o", "q", "v"] {
            names.push((format!("layers.{layer}.attn.{part}"), vec![256, 256]));
        }
    }
    checkpoint(names.iter().map(|(n, s)| (n.as_str(), "BF16", s.clone())), data_start)
}

/// What a plan may cost at most: I/Os, bytes read only because reads are of whole pages, unwanted bytes between wanted ones,
/// blocks of memory, and copies.
#[derive(Debug)]
struct Cost {
    reads: u64,
    slack: u64,
    gaps: u64,
    blocks: usize,
    pieces: usize,
}

#[test]
fn what_plans_of_many_small_tensors_cost_at_most() {
    let aligned = moe(1 << 20);
    // One byte off: what could land in place or be mapped at a multiple of its element's size cannot.
    let odd = moe((1 << 20) + 1);
    let all = |c: &Checkpoint| Want::all(c);
    let mine = |c: &Checkpoint| -> Vec<Want> {
        let expert = |t: &penstock::TensorInfo<'_>| t.name.split(".experts.").nth(1)?.split('.').next()?.parse().ok();
        c.tensors().filter(|t| expert(t).is_none_or(|e: u32| e % 8 == 3)).map(|t| Want::whole(t.index)).collect()
    };
    let columns = |c: &Checkpoint| -> Vec<Want> {
        c.tensors().map(|t| Want::part(t.index, [0..t.shape[0], 0..t.shape[1] / 2])).collect()
    };
    let cpu = || Target::Cpu { misaligned: false };
    let torch = || Target::Cpu { misaligned: true };
    let (direct, buffered, mapped) = ((DIRECT, LIMITS), (BUFFERED, LIMITS), (MAPPED, LIMITS));
    let gpu = (DIRECT, Limits { scatter: None, ..LIMITS });
    let most = |reads, slack, gaps, blocks, pieces| Cost { reads, slack, gaps, blocks, pieces };
    // The measured value is the bound. Reads and pieces have some room, because the places where a plan is cut may
    // change a little.
    let cases = [
        // 17, 0, 0, 1, 9320
        ("mapped", &aligned, all(&aligned), cpu(), mapped, most(18, 0, 0, 1, 9340), "4 MiB a read, one mapping"),
        // 17, 0, 0, 1, 9320
        ("past the cache", &aligned, all(&aligned), cpu(), direct, most(18, 0, 0, 1, 9340), "read in place"),
        // 17, 0, 0, 1, 9320
        ("through the cache", &aligned, all(&aligned), cpu(), buffered, most(18, 0, 0, 1, 9340), "read in place"),
        // 17, 4096, 0, 3, 9328
        (
            "odd, past the cache",
            &odd,
            all(&odd),
            cpu(),
            direct,
            most(18, 8192, 0, 3, 9350),
            "by way of slabs, 32 MiB a block",
        ),
        // 19, 0, 0, 3, 9330
        (
            "odd, through the cache",
            &odd,
            all(&odd),
            cpu(),
            buffered,
            most(20, 0, 0, 3, 9350),
            "scattered, 512 places a read",
        ),
        // 19, 0, 0, 3, 9330
        ("odd, mapped", &odd, all(&odd), cpu(), mapped, most(20, 0, 0, 3, 9350), "nothing can be mapped, so as before"),
        // 17, 4096, 0, 1, 9328
        ("odd, mapped, torch", &odd, all(&odd), torch(), mapped, most(18, 4096, 0, 1, 9350), "it takes any address"),
        // 17, 0, 0, 3, 9321
        ("onto a GPU", &aligned, all(&aligned), Target::Gpu, gpu, most(18, 0, 0, 3, 9340), "32 MiB a block"),
        // 18, 0, 0, 9312, 9322
        (
            "into tensors",
            &aligned,
            all(&aligned),
            Target::Foreign,
            direct,
            most(20, 0, 0, 9312, 9350),
            "blocks are the caller's",
        ),
        // 408, 786432, 0, 408, 1248: 18 KiB out of every 144
        (
            "a rank's",
            &aligned,
            mine(&aligned),
            cpu(),
            direct,
            most(408, 786_432, 0, 408, 1250),
            "a read for each expert",
        ),
        // 408, 786432, 0, 1, 1248
        (
            "a rank's, GPU",
            &aligned,
            mine(&aligned),
            Target::Gpu,
            gpu,
            most(408, 786_432, 0, 1, 1250),
            "a read for each expert",
        ),
        // 17, 2048, 34600960, 2, 9320: 64 bytes out of every 128
        (
            "half of each row",
            &aligned,
            columns(&aligned),
            Target::Gpu,
            gpu,
            most(18, 4096, 34_610_000, 2, 9340),
            "as the whole",
        ),
    ];
    let mut broken = Vec::new();
    for (what, c, wants, target, (way, limits), most, why) in cases {
        let layout = Layout::new(c, &wants, &target, Order::File).unwrap();
        let s = Schedule::new(c, &layout, &[by(way)], &limits);
        let t = s.totals();
        let cost = Cost {
            reads: t.lanes.sum().extents,
            slack: t.slack,
            gaps: t.gap,
            blocks: layout.blocks.len(),
            pieces: s.pieces.len(),
        };
        let text = format!("{what}: {cost:?}, at most {most:?}: {why}");
        println!("{text}");
        if cost.reads > most.reads
            || cost.slack > most.slack
            || cost.gaps > most.gaps
            || cost.blocks > most.blocks
            || cost.pieces > most.pieces
        {
            broken.push(text);
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// `cargo test --release --test plan_counts -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn time_for_371474_tensors() {
    let names: Vec<String> =
        (0..371_474).map(|i| format!("model.layers.{}.mlp.experts.{}.w", i % 61, i / 61)).collect();
    let c = checkpoint(names.iter().map(|n| (n.as_str(), "BF16", vec![8, 8])), 0);
    let wants = Want::all(&c);
    for order in [Order::File, Order::Layer] {
        for target in [Target::Gpu, Target::Cpu { misaligned: false }, Target::Cpu { misaligned: true }] {
            let start = Instant::now();
            let layout = Layout::new(&c, &wants, &target, order).unwrap();
            let laid = start.elapsed();
            let s = Schedule::new(&c, &layout, &[cold(0)], &LIMITS);
            println!(
                "{order:?} {target:?}: layout {laid:?}, with schedule {:?}; {} extents",
                start.elapsed(),
                s.extents.len()
            );
        }
    }
}

#[test]
fn more_bytes_than_there_are_addresses_are_refused_before_anything_is_summed_up() {
    // As a sparse file may be: nine times as much is more than 2^63 bytes, 17 times more than 2^64.
    let huge = checkpoint([("huge", "U8", vec![1 << 60])], 4096);
    for target in [Target::Cpu { misaligned: false }, Target::Cpu { misaligned: true }, Target::Gpu, Target::Foreign] {
        for times in [9, 15, 16, 17, 33] {
            let wants = vec![Want::whole(0); times];
            let refused = Layout::new(&huge, &wants, &target, Order::File).unwrap_err();
            assert_eq!(refused.kind(), penstock::ErrorKind::Limit, "{target:?} {times}");
        }
        assert!(Layout::new(&huge, &[Want::whole(0)], &target, Order::File).is_ok());
    }
}
