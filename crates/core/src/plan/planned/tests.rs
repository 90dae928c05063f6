//! Whole plans of real files, whose resident pages are given by the table. `routing/tests.rs` has the decisions alone.
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use super::*;
use crate::extent::Lane;
use crate::format::Checkpoint;
use crate::options::{Cache, Options};
use crate::plan::strides::Foreign;
use crate::plan::want::Want;
use crate::store::{evict, FsKind};
use crate::way::{Cold, Through, WORTH_A_TRIAL};
use std::fs;
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Bytes of a file's only tensor. The huge file is the exception.
const NBYTES: u64 = 6 * MIB;
/// More than the memory of any machine. The file is sparse and takes no room on the disk.
const HUGE: u64 = 1 << 40;
const ROW: u64 = 64 << 10;
const LARGE: u64 = WORTH_A_TRIAL + MIB;

/// A checkpoint of one file with one tensor, and the part of it that the page cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum At {
    Warm,
    Cold,
    /// The first half is resident.
    Half,
    /// Cold and large enough to try the pace of the storage.
    Large,
    /// Cold and larger than memory.
    Huge,
    /// The same, but only 1 MiB of it is wanted.
    PartOfHuge,
    /// Cold, and everything except the last page is wanted.
    NearlyAll,
    /// Cold, and misaligned by the file: copied if the tensor must be aligned.
    Odd,
    /// The same, larger than memory.
    OddHuge,
    /// Cold, and half of every row is wanted: this cannot be mapped.
    Columns,
    Tmpfs,
}

impl At {
    fn is_copied_from_its_mapping(self) -> bool {
        matches!(self, At::Odd | At::OddHuge | At::Columns)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Cpu,
    Gpu,
    Into,
}

/// The routes that carry bytes, what happens to the page cache and why; or why the request is refused.
type Decision = std::result::Result<(&'static [Lane], &'static str, &'static str), &'static str>;
type Row = (At, To, Io, Cache, Option<bool>, Decision);

const MAPPED: &[Lane] = &[Lane::MAPPED];
const BUFFERED: &[Lane] = &[Lane::BUFFERED];
const DIRECT: &[Lane] = &[Lane::DIRECT];
const BOTH: &[Lane] = &[Lane::BUFFERED, Lane::DIRECT];

const FITS: &str = "fit into half of the memory left";
const MAPS: &str = "cold bytes are mapped, not copied";
const THERE: &str = "the page cache holds all wanted bytes";
const ASKED: &str = "asked for";
const PAST: &str = "io= reads past the page cache";
const THROUGH: &str = "io= reads through the page cache";

const ROWS: &[Row] = &[
    // Nothing asked for: mapped if possible, whatever the size; copies are kept if there is room.
    (At::Cold, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", MAPS))),
    (At::Half, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", MAPS))),
    (At::Warm, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", THERE))),
    (At::Huge, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", MAPS))),
    (At::PartOfHuge, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", MAPS))),
    // The file is mapped, but this is copied out of it.
    (At::Odd, To::Cpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::OddHuge, To::Cpu, Io::Auto, Cache::Auto, None, Ok((DIRECT, "bypass", "do not fit into half"))),
    (At::Columns, To::Cpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::Tmpfs, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", THERE))),
    (At::NearlyAll, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", MAPS))),
    (At::NearlyAll, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((BUFFERED, "keep", FITS))),
    (At::PartOfHuge, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((BUFFERED, "keep", FITS))),
    (At::NearlyAll, To::Gpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::Cold, To::Gpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::Half, To::Gpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::Warm, To::Gpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", THERE))),
    (At::Huge, To::Gpu, Io::Auto, Cache::Auto, None, Ok((DIRECT, "bypass", "do not fit into half"))),
    (At::Tmpfs, To::Gpu, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", THERE))),
    (At::Cold, To::Into, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::Warm, To::Into, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", THERE))),
    (At::Tmpfs, To::Into, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", THERE))),
    // Private copies.
    (At::Cold, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((BUFFERED, "keep", FITS))),
    (At::Large, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((DIRECT, "keep", FITS))),
    (At::Large, To::Cpu, Io::Auto, Cache::Keep, Some(true), Ok((BUFFERED, "keep", ASKED))),
    (At::Large, To::Cpu, Io::Buffered, Cache::Auto, Some(true), Ok((BUFFERED, "keep", THROUGH))),
    (At::Large, To::Cpu, Io::Auto, Cache::Auto, None, Ok((MAPPED, "keep", MAPS))),
    (At::Large, To::Gpu, Io::Auto, Cache::Auto, None, Ok((DIRECT, "keep", FITS))),
    (At::Large, To::Into, Io::Auto, Cache::Auto, None, Ok((BUFFERED, "keep", FITS))),
    (At::Warm, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((BUFFERED, "keep", THERE))),
    (At::Huge, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((DIRECT, "bypass", "do not fit into half"))),
    (At::Tmpfs, To::Cpu, Io::Auto, Cache::Auto, Some(true), Ok((BUFFERED, "keep", THERE))),
    // Mapped files, whatever their size.
    (At::Cold, To::Cpu, Io::Auto, Cache::Auto, Some(false), Ok((MAPPED, "keep", "copy=False asks for mapped files"))),
    (At::Huge, To::Cpu, Io::Auto, Cache::Auto, Some(false), Ok((MAPPED, "keep", "copy=False asks for mapped files"))),
    (At::Cold, To::Cpu, Io::Auto, Cache::Bypass, Some(false), Err("which are in the page cache")),
    (At::Cold, To::Cpu, Io::Buffered, Cache::Auto, Some(false), Err("reads into private memory")),
    (At::Cold, To::Cpu, Io::Direct, Cache::Auto, Some(false), Err("reads into private memory")),
    // The page cache must keep it.
    (At::Cold, To::Cpu, Io::Auto, Cache::Keep, None, Ok((MAPPED, "keep", ASKED))),
    (At::Huge, To::Cpu, Io::Auto, Cache::Keep, None, Ok((MAPPED, "keep", ASKED))),
    (At::Cold, To::Cpu, Io::Auto, Cache::Keep, Some(true), Ok((BUFFERED, "keep", ASKED))),
    (At::Huge, To::Gpu, Io::Auto, Cache::Keep, None, Ok((BUFFERED, "keep", ASKED))),
    // The page cache must stay as it was: resident bytes are used all the same.
    (At::Cold, To::Cpu, Io::Auto, Cache::Bypass, None, Ok((DIRECT, "bypass", ASKED))),
    (At::Half, To::Cpu, Io::Auto, Cache::Bypass, None, Ok((BOTH, "bypass", ASKED))),
    (At::Warm, To::Cpu, Io::Auto, Cache::Bypass, None, Ok((MAPPED, "keep", THERE))),
    (At::Warm, To::Cpu, Io::Auto, Cache::Bypass, Some(true), Ok((BUFFERED, "keep", THERE))),
    (At::Cold, To::Gpu, Io::Auto, Cache::Bypass, None, Ok((DIRECT, "bypass", ASKED))),
    (At::Half, To::Gpu, Io::Auto, Cache::Bypass, None, Ok((BOTH, "bypass", ASKED))),
    (At::Half, To::Into, Io::Auto, Cache::Bypass, None, Ok((BOTH, "bypass", ASKED))),
    (At::Warm, To::Gpu, Io::Auto, Cache::Bypass, None, Ok((BUFFERED, "keep", THERE))),
    (At::Tmpfs, To::Cpu, Io::Auto, Cache::Bypass, None, Ok((MAPPED, "keep", THERE))),
    (At::Tmpfs, To::Gpu, Io::Auto, Cache::Bypass, None, Ok((BUFFERED, "keep", THERE))),
    // An io asked for.
    (At::Cold, To::Cpu, Io::Mapped, Cache::Auto, None, Ok((MAPPED, "keep", THROUGH))),
    (At::Huge, To::Cpu, Io::Mapped, Cache::Auto, None, Ok((MAPPED, "keep", THROUGH))),
    (At::Warm, To::Cpu, Io::Mapped, Cache::Keep, Some(false), Ok((MAPPED, "keep", ASKED))),
    (At::Warm, To::Cpu, Io::Mapped, Cache::Auto, Some(true), Err("contradict each other")),
    (At::Warm, To::Cpu, Io::Mapped, Cache::Bypass, None, Err("gives the page cache itself as tensors")),
    (At::Warm, To::Gpu, Io::Mapped, Cache::Auto, None, Err("cannot fill a GPU or existing tensors")),
    (At::Warm, To::Into, Io::Mapped, Cache::Auto, None, Err("cannot fill a GPU or existing tensors")),
    (At::Cold, To::Cpu, Io::Buffered, Cache::Auto, None, Ok((BUFFERED, "keep", THROUGH))),
    (At::Huge, To::Cpu, Io::Buffered, Cache::Auto, None, Ok((BUFFERED, "keep", THROUGH))),
    (At::Warm, To::Cpu, Io::Buffered, Cache::Auto, None, Ok((BUFFERED, "keep", THERE))),
    (At::Cold, To::Gpu, Io::Buffered, Cache::Keep, None, Ok((BUFFERED, "keep", ASKED))),
    (At::Cold, To::Cpu, Io::Buffered, Cache::Bypass, None, Err("reads through the page cache")),
    (At::Cold, To::Cpu, Io::UringBuffered, Cache::Auto, None, Ok((BUFFERED, "keep", THROUGH))),
    (At::Large, To::Gpu, Io::UringBuffered, Cache::Auto, None, Ok((BUFFERED, "keep", THROUGH))),
    (At::Cold, To::Into, Io::UringBuffered, Cache::Keep, None, Ok((BUFFERED, "keep", ASKED))),
    (At::Warm, To::Cpu, Io::UringBuffered, Cache::Bypass, None, Err("reads through the page cache")),
    (At::Cold, To::Cpu, Io::UringBuffered, Cache::Auto, Some(false), Err("reads into private memory")),
    (At::Cold, To::Cpu, Io::Direct, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Half, To::Cpu, Io::Direct, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Warm, To::Cpu, Io::Direct, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Cold, To::Cpu, Io::Direct, Cache::Bypass, Some(true), Ok((DIRECT, "bypass", ASKED))),
    (At::Cold, To::Cpu, Io::Direct, Cache::Keep, None, Err("reads past the page cache")),
    (At::Cold, To::Gpu, Io::Uring, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Warm, To::Gpu, Io::Uring, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Cold, To::Into, Io::Threads, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Cold, To::Cpu, Io::Threads, Cache::Auto, None, Ok((DIRECT, "bypass", PAST))),
    (At::Cold, To::Cpu, Io::Threads, Cache::Keep, None, Err("reads past the page cache")),
];

/// A file of one vector; the huge one is sparse.
fn checkpoint(folder: &Path, at: At) -> Arc<Checkpoint> {
    let huge = matches!(at, At::Large | At::Huge | At::PartOfHuge | At::OddHuge);
    let nbytes = match at {
        At::Large => LARGE,
        _ if huge => HUGE,
        _ => NBYTES,
    };
    let (dtype, shape) = match at {
        At::Odd | At::OddHuge => ("F32", format!("{}", nbytes / 4)),
        At::Columns => ("U8", format!("{},{ROW}", nbytes / ROW)),
        _ => ("U8", format!("{nbytes}")),
    };
    let mut header = format!(r#"{{"t":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,{nbytes}]}}}}"#);
    header.push_str(&" ".repeat((matches!(at, At::Odd | At::OddHuge) && header.len() % 2 == 0) as usize));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let size = bytes.len() as u64 + nbytes;
    let path = folder.join(format!("{at:?}.safetensors"));
    if !huge {
        bytes.resize(size as usize, 7);
    }
    fs::write(&path, bytes).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
    Arc::new(Checkpoint::open(&[path]).unwrap())
}

/// Whether the page cache now holds what it must hold of the file.
fn put(checkpoint: &Checkpoint, at: At) -> bool {
    let path = checkpoint.files()[0].spelled.as_path();
    match at {
        At::Warm | At::Tmpfs => fs::read(path).is_ok(),
        At::Half => {
            let (read, half) = (fs::read(path).is_ok(), NBYTES / 2);
            // A folio that reaches over the start is kept whole; the largest has 2 MiB.
            read && evict(path, Some(half..NBYTES + MIB)).unwrap() <= half + 2 * MIB
        }
        At::Cold | At::Large | At::Huge | At::PartOfHuge | At::NearlyAll | At::Odd | At::OddHuge | At::Columns => {
            evict(path, None).unwrap() == 0
        }
    }
}

fn request(checkpoint: &Arc<Checkpoint>, row: &Row) -> Request {
    let &(at, to, io, cache, copy, _) = row;
    let tensors = vec![Foreign::contiguous(PAGE, checkpoint.tensor(0).nbytes())];
    Request {
        checkpoint: checkpoint.clone(),
        wants: vec![match at {
            At::PartOfHuge => Want::part(0, [MIB..2 * MIB]),
            At::NearlyAll => Want::part(0, [0..NBYTES - PAGE]),
            At::Columns => Want::part(0, [0..NBYTES / ROW, 0..ROW / 2]),
            _ => Want::whole(0),
        }],
        layout: None,
        device: if to == To::Gpu { Where::Gpu(0) } else { Where::Cpu },
        memory: match to {
            To::Cpu => Memory::Ours,
            To::Gpu => Memory::Granted,
            To::Into => Memory::Into { tensors, keep: Arc::new(()), fence: None },
        },
        // Fewer extents of the huge file.
        options: Options { io, cache, copy, extent: 64 * MIB, ..Options::default() },
        stream: false,
    }
}

fn decides_as_the_table_says(folder: &Path, among: impl Fn(At) -> bool) {
    let (mut tried, mut skipped) = (0, 0);
    for row in ROWS.iter().filter(|row| among(row.0)) {
        let checkpoint = checkpoint(folder, row.0);
        tried += 1;
        // A program that reads all files, or memory pressure, may hold on to pages or take them for a moment.
        if !(0..100).any(|_| put(&checkpoint, row.0)) {
            eprintln!("skipped: the page cache does not let go of the file: {row:?}");
            skipped += 1;
            continue;
        }
        let files = checkpoint.storage().unwrap();
        let plan = Planned::new(&request(&checkpoint, row), &files, None);
        match (&row.5, plan) {
            (Err(why), Err(e)) => {
                assert_eq!(e.kind(), ErrorKind::Invalid, "{row:?}: {e}");
                assert!(e.to_string().contains(why), "{row:?}: {e}");
            }
            (Ok((routes, cache, reason)), Ok(plan)) => {
                let totals = plan.schedule.totals();
                let all = [
                    (Lane::MAPPED, totals.lanes.of(Lane::MAPPED)),
                    (Lane::BUFFERED, totals.lanes.of(Lane::BUFFERED)),
                    (Lane::DIRECT, totals.lanes.of(Lane::DIRECT)),
                ];
                let used: Vec<Lane> = all.into_iter().filter(|(_, t)| t.bytes > 0).map(|(r, _)| r).collect();
                assert_eq!(used, *routes, "{row:?}: {totals:?}");
                assert_eq!(plan.report.cache, *cache, "{row:?}");
                assert!(plan.report.cache_reason.contains(reason), "{row:?}: {}", plan.report.cache_reason);
                let cold = match (row.0, *cache) {
                    (_, "bypass") => Cold::Bypass,
                    (At::Warm | At::Tmpfs, _) => Cold::None,
                    // Planned past the page cache, and not reported as kept.
                    (At::Large, _) if *routes == DIRECT => Cold::Try,
                    _ => Cold::Keep,
                };
                assert_eq!(plan.routing.cold, cold, "{row:?}");
                let read_through = *routes == BUFFERED || cold == Cold::Try;
                // Of a slice, no extra bytes are brought in.
                let cut = matches!(row.0, At::PartOfHuge | At::NearlyAll | At::Columns);
                let mapped = *routes == MAPPED || row.0.is_copied_from_its_mapping();
                let (way, filled) = (plan.routing.way(0), cold != Cold::None && read_through && !cut && !mapped);
                assert_eq!(way.through == Through::HugePages, filled, "{row:?}");
                assert_eq!(way.in_part, cut && mapped, "{row:?}");
                let wanted = match row.0 {
                    At::Large => LARGE,
                    At::Huge | At::OddHuge => HUGE,
                    At::Columns => NBYTES / 2,
                    At::PartOfHuge => MIB,
                    At::NearlyAll => NBYTES - PAGE,
                    _ => NBYTES,
                };
                assert_eq!((plan.report.nbytes, plan.report.tensors), (wanted, 1), "{row:?}");
            }
            (_, plan) => panic!("{row:?}: {:?}", plan.map(|p| (p.report, p.schedule.totals()))),
        }
    }
    assert!(2 * skipped < tried, "{skipped} of {tried} rows were skipped");
}

#[test]
fn files_on_a_disk_travel_as_residency_and_options_say() {
    // Next to the build: that is on a disk, where /tmp may be a tmpfs.
    let build = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(build.parent().unwrap()).unwrap();
    let facts = crate::store::facts_at(folder.path()).unwrap();
    if facts.kind != FsKind::Local {
        eprintln!("skipped: no disk but {facts:?}");
        return;
    }
    decides_as_the_table_says(folder.path(), |at| at != At::Tmpfs);
}

#[test]
fn files_in_memory_are_mapped_or_copied_whatever_becomes_of_the_page_cache() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    assert_eq!(crate::store::facts_at(folder.path()).unwrap().kind, FsKind::Memory);
    decides_as_the_table_says(folder.path(), |at| at == At::Tmpfs);
}

#[test]
fn sizes_that_do_not_go_together_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path(), At::Warm);
    let refused = |extent, staging| {
        let mut request = request(&checkpoint, &ROWS[0]);
        (request.options.extent, request.options.staging) = (extent, staging);
        Planned::new(&request, &checkpoint.storage().unwrap(), None).err().map(|e| (e.kind(), e.to_string()))
    };
    for (extent, staging, why) in [
        (0, MIB, "extent must be a multiple of 4096"),
        (PAGE - 1, MIB, "extent must be a multiple of 4096"),
        (PAGE + 512, MIB, "extent must be a multiple of 4096"),
        (MIB, 2 * MIB - 1, "staging must hold at least two extents"),
    ] {
        let (kind, text) = refused(extent, staging).unwrap();
        assert!(kind == ErrorKind::Invalid && text.contains(why), "{extent} {staging}: {text}");
    }
    assert_eq!(refused(PAGE, 2 * PAGE), None);
}

#[test]
fn a_checkpoint_has_one_layout_wherever_it_is_and_whatever_is_resident() {
    let build = std::env::current_exe().unwrap();
    let folders = [tempfile::tempdir_in(build.parent().unwrap()).unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    for (at, misaligned, copy) in [
        (At::Cold, false, None),
        (At::Odd, false, None),
        (At::Odd, true, None),
        (At::Columns, true, None),
        (At::Odd, true, Some(true)),
    ] {
        let (mut first, mut evicted) = (None, 0);
        for folder in &folders {
            let checkpoint = checkpoint(folder.path(), at);
            for (warm, cache) in
                [(false, Cache::Auto), (true, Cache::Auto), (false, Cache::Bypass), (true, Cache::Keep)]
            {
                let there = put(&checkpoint, if warm { At::Warm } else { At::Cold });
                evicted += usize::from(!warm && there);
                let mut request = request(&checkpoint, &(at, To::Cpu, Io::Auto, cache, copy, Err("")));
                request.options.misaligned = misaligned;
                let plan = Planned::new(&request, &checkpoint.storage().unwrap(), None).unwrap();
                assert_eq!(first.get_or_insert_with(|| plan.layout.clone()), &plan.layout, "{at:?} {warm} {cache:?}");
                // What a framework reads at any address stays in the file that is mapped.
                if at == At::Odd && misaligned && copy.is_none() && plan.routing.way(0).is_mapped() {
                    let totals = plan.schedule.totals();
                    assert_eq!(
                        (totals.lanes.of(Lane::BUFFERED).bytes, totals.lanes.of(Lane::DIRECT).bytes),
                        (0, 0),
                        "{warm} {cache:?}"
                    );
                }
            }
        }
        // In memory nothing can be evicted.
        let disk = crate::store::facts_at(folders[0].path()).unwrap().kind == FsKind::Local;
        assert!(evicted > 0 || !disk, "{at:?}: it was never cold");
    }
}
