//! Every decision, from surveys that a table gives: no file is opened.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::extent::{Declared, FileLanes};
use crate::store::Facts;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
/// Bytes that are left to the process.
const MEMORY: u64 = 1 << 30;
const CORES: usize = 4;

/// One file of a row: what the survey says of it.
#[derive(Debug, Clone, Copy)]
struct File {
    on: FsKind,
    /// Share of the file that the page cache holds, in quarters.
    resident: u64,
    /// Share of the wanted bytes that must be copied out of the mapping, in quarters.
    moved: u64,
    /// Share of the file that the load wants, in quarters.
    wanted: u64,
    cut: bool,
    sampled: bool,
    direct: bool,
    nbytes: u64,
    parallelism: Option<usize>,
    staging: TakesSlab,
}

/// A server that answers at once.
const PROMPT: Lane = Lane::new(&Declared::named("prompt"));
/// A file system that answers late.
const LATE: Lane = Lane::new(&Declared { staging: TakesSlab::AtArrival, ..Declared::named("late") });

const DISK: File = File {
    on: FsKind::Local,
    resident: 0,
    moved: 0,
    wanted: 4,
    cut: false,
    sampled: false,
    direct: true,
    nbytes: 256 * MIB,
    parallelism: None,
    staging: TakesSlab::AtRequest,
};
const WARM: File = File { resident: 4, ..DISK };
const HALF: File = File { resident: 2, ..DISK };
const HUGE: File = File { nbytes: 4 * MEMORY, ..DISK };
const SMALL: File = File { nbytes: 8 * MIB, ..DISK };
/// Misaligned for a framework that wants aligned tensors, or cut in columns.
const ODD: File = File { moved: 4, ..DISK };
const SLICE: File = File { wanted: 1, cut: true, ..DISK };
/// The kernel answers samples only.
const SAMPLED: File = File { sampled: true, ..WARM };
const NO_DIRECT: File = File { direct: false, ..DISK };
const TMPFS: File = File { on: FsKind::Memory, direct: false, ..WARM };
const NFS: File = File { on: FsKind::Network, ..DISK };
const WARM_NFS: File = File { on: FsKind::Network, ..WARM };
const BUCKET: File = File { on: FsKind::Remote, direct: false, ..DISK };

/// The lane of its reads of any range.
fn any_range(f: &File) -> Lane {
    match (f.on == FsKind::Remote, f.staging) {
        (true, TakesSlab::AtArrival) => Lane::NETWORK,
        (true, TakesSlab::AtRequest) => PROMPT,
        (false, TakesSlab::AtArrival) => LATE,
        (false, TakesSlab::AtRequest) => Lane::BUFFERED,
    }
}

fn survey(files: &[File]) -> Survey {
    let surveyed = |f: &File| {
        // A store that says of its objects that they can be mapped is not believed.
        let (fs, mappable) = ("", f.on != FsKind::Network);
        let wanted = f.nbytes / 4 * f.wanted;
        Surveyed {
            facts: Facts {
                kind: f.on,
                fs,
                storage: 0,
                lanes: FileLanes {
                    past_cache: f.direct.then_some(Lane::DIRECT),
                    mapping: mappable.then_some(Lane::MAPPED),
                    unit: f.direct.then_some(512),
                    ..FileLanes::only(any_range(f))
                },
                parallelism: f.parallelism,
                extent: None,
                gap: None,
                cut: None,
            },
            span: 0..f.nbytes,
            wanted,
            moved: wanted / 4 * f.moved,
            cut: f.cut,
            resident: Some(0..f.nbytes / 4 * f.resident).filter(|r| r.end > 0).into_iter().collect(),
            sampled: f.sampled,
        }
    };
    Survey { files: files.iter().map(|f| Some(surveyed(f))).collect(), probes: 0 }
}

fn decide(files: &[File], into: Goal, options: &Options) -> Routing {
    check(options, into).unwrap();
    let machine = Machine { memory_available: &|| MEMORY, cores: &|| CORES };
    route(&survey(files), into, options, &machine, false)
}

/// The way in a few words.
fn words(routing: &Routing) -> String {
    let way = |w: &Way| {
        let copied = match (w.cold, w.warm) {
            (Lane::DIRECT, Lane::DIRECT) => "direct",
            (Lane::DIRECT, _) => "cold direct",
            _ => "buffered",
        };
        let through = match w.through {
            Through::Ahead => "",
            Through::HugePages => " by huge pages",
            Through::Exact => " exactly",
            Through::Nothing => " leaving nothing",
        };
        let mapped = match (w.is_mapped(), w.in_part) {
            (true, true) => "mapped in part, ",
            (true, false) => "mapped, ",
            _ => "",
        };
        format!("{mapped}{copied}{through}")
    };
    let ways: Vec<_> = routing.ways.iter().map(way).collect();
    let here = if routing.here { ", by the caller" } else { "" };
    format!("{:?}: {}{here}", routing.cold, ways.join("; "))
}

#[test]
fn every_way_is_as_the_table_says() {
    use Goal::{Gpu, NewMemory, Tensors};
    let none = Options::default();
    let copy = Options { copy: Some(true), ..none.clone() };
    let map = Options { copy: Some(false), ..none.clone() };
    let keep = Options { cache: Cache::Keep, ..none.clone() };
    let bypass = Options { cache: Cache::Bypass, ..none.clone() };
    let io = |io| Options { io, ..Options::default() };
    #[rustfmt::skip]
    let rows: &[(&[File], Goal, &Options, &str)] = &[
        // Default options, into new memory: a file of any size is mapped if its store allows it.
        (&[DISK],          NewMemory, &none,   "Keep: mapped, buffered exactly"),
        (&[WARM],          NewMemory, &none,   "None: mapped, buffered, by the caller"),
        (&[HALF],          NewMemory, &none,   "Keep: mapped, buffered exactly"),
        (&[HUGE],          NewMemory, &none,   "Keep: mapped, buffered exactly"),
        (&[SLICE],         NewMemory, &none,   "Keep: mapped in part, buffered exactly"),
        (&[TMPFS],         NewMemory, &none,   "None: mapped, buffered, by the caller"),
        (&[WARM, TMPFS],   NewMemory, &none,   "None: mapped, buffered; mapped, buffered, by the caller"),
        (&[SAMPLED],       NewMemory, &none,   "Keep: mapped, buffered exactly"),
        // What cannot stay in the mapping is copied: kept if there is room.
        (&[ODD],           NewMemory, &none,   "Keep: mapped, buffered exactly"),
        (&[File { moved: 4, ..WARM }], NewMemory, &none, "None: mapped, buffered"),
        (&[File { moved: 4, ..HUGE }], NewMemory, &none, "Bypass: mapped, cold direct"),
        // Network file systems are never mapped, and O_DIRECT is used only if it was asked for.
        (&[NFS],           NewMemory, &none,   "Keep: buffered"),
        (&[WARM_NFS],      NewMemory, &none,   "None: buffered"),
        (&[NFS],           NewMemory, &bypass, "Bypass: buffered leaving nothing"),
        (&[NFS],           NewMemory, &io(Io::Direct), "Bypass: direct leaving nothing"),
        (&[NFS],           Gpu,       &none,   "Keep: buffered"),
        (&[DISK, NFS],     NewMemory, &none,   "Keep: mapped, buffered exactly; buffered"),
        // Stores that a scheme names have no part in what becomes of the page cache.
        (&[BUCKET],        NewMemory, &none,   "Bypass: buffered leaving nothing"),
        (&[BUCKET],        Gpu,       &keep,   "Bypass: buffered leaving nothing"),
        (&[File { direct: true, ..BUCKET }], Gpu, &none, "Bypass: buffered leaving nothing"),
        (&[File { direct: true, ..BUCKET }], Gpu, &io(Io::Direct), "Bypass: buffered leaving nothing"),
        (&[BUCKET, WARM],  NewMemory, &none,   "None: buffered; mapped, buffered"),
        (&[BUCKET, DISK],  NewMemory, &none,   "Keep: buffered; mapped, buffered exactly"),
        // Private copies: the pace of the storage decides, if it is worth it.
        (&[DISK],          NewMemory, &copy,   "Try: cold direct by huge pages"),
        (&[SMALL],         NewMemory, &copy,   "Keep: buffered by huge pages"),
        (&[HALF],          NewMemory, &copy,   "Try: cold direct by huge pages"),
        (&[WARM],          NewMemory, &copy,   "None: buffered"),
        (&[HUGE],          NewMemory, &copy,   "Bypass: cold direct"),
        (&[SLICE],         NewMemory, &copy,   "Keep: buffered exactly"),
        (&[NO_DIRECT],     NewMemory, &copy,   "Keep: buffered by huge pages"),
        (&[TMPFS],         NewMemory, &copy,   "None: buffered"),
        (&[DISK],          Gpu,       &none,   "Try: cold direct by huge pages"),
        (&[WARM],          Gpu,       &none,   "None: buffered"),
        (&[HUGE],          Gpu,       &none,   "Bypass: cold direct"),
        (&[DISK],          Tensors,   &none,   "Keep: buffered by huge pages"),
        // What becomes of the page cache was said.
        (&[HUGE],          NewMemory, &map,    "Keep: mapped, buffered exactly"),
        (&[DISK],          NewMemory, &keep,   "Keep: mapped, buffered exactly"),
        (&[HUGE],          Gpu,       &keep,   "Keep: buffered by huge pages"),
        (&[DISK],          NewMemory, &bypass, "Bypass: cold direct"),
        (&[HALF],          NewMemory, &bypass, "Bypass: cold direct"),
        (&[WARM],          NewMemory, &bypass, "None: mapped, cold direct, by the caller"),
        (&[WARM, DISK],    NewMemory, &bypass, "Bypass: mapped, cold direct; cold direct"),
        (&[TMPFS],         NewMemory, &bypass, "None: mapped, buffered, by the caller"),
        (&[NO_DIRECT],     Gpu,       &bypass, "Bypass: buffered leaving nothing"),
        // The interface was named.
        (&[DISK],          NewMemory, &io(Io::Mapped),        "Keep: mapped, buffered exactly"),
        (&[DISK],          NewMemory, &io(Io::Buffered),      "Keep: buffered by huge pages"),
        (&[DISK],          Gpu,       &io(Io::UringBuffered), "Keep: buffered by huge pages"),
        (&[DISK],          NewMemory, &io(Io::Direct),        "Bypass: direct"),
        (&[WARM],          NewMemory, &io(Io::Uring),         "Bypass: direct"),
        (&[TMPFS],         NewMemory, &io(Io::Threads),       "Bypass: buffered leaving nothing"),
    ];
    let wrong: Vec<_> = rows
        .iter()
        .map(|(files, into, options, expected)| (words(&decide(files, *into, options)), expected, files, into))
        .filter(|(found, expected, ..)| found != *expected)
        .map(|(found, expected, files, into)| format!("{found}\n  and not {expected}\n  {into:?} {files:?}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn threads_and_depth_follow_what_the_threads_wait_for() {
    let of = |files: &[File], options: &Options| {
        let routing = decide(files, Goal::Gpu, options);
        (routing.threads, routing.depth, routing.buffered_depth)
    };
    let none = Options::default();
    assert_eq!(of(&[DISK], &none), (LEAST_THREADS, 24, BUFFERED_DEPTH));
    assert_eq!(of(&[NFS, DISK], &none), (NETWORK_THREADS, 64, BUFFERED_DEPTH));
    // Nothing waits for a disk: as many as there are cores.
    assert_eq!(of(&[WARM], &none), (CORES, LEAST_DEPTH, BUFFERED_DEPTH));
    // A store that says how many reads it wants.
    assert_eq!(of(&[File { parallelism: Some(100), ..BUCKET }], &none), (LEAST_THREADS, 100, BUFFERED_DEPTH));
    // Stores that take staging at arrival have a bound of their own, and the disk beside them keeps its depth.
    let late = File { parallelism: Some(250), staging: TakesSlab::AtArrival, ..BUCKET };
    let requests = |files: &[File], options: &Options| decide(files, Goal::Gpu, options).requests;
    assert_eq!(of(&[late, DISK], &none), of(&[DISK], &none));
    assert_eq!(requests(&[late, DISK], &none), 250);
    assert_eq!(requests(&[File { parallelism: Some(4), ..late }], &none), 4);
    assert_eq!(requests(&[File { parallelism: None, ..late }], &none), 24);
    assert_eq!(requests(&[late], &Options { depth: 3, ..none.clone() }), 3);
    assert_eq!(of(&[File { parallelism: Some(100), ..NFS }], &none), (NETWORK_THREADS, 100, BUFFERED_DEPTH));
    assert_eq!(of(&[WARM], &Options { threads: 9, depth: 3, ..none }), (9, 3, 3));
    assert_eq!(decide(&[WARM], Goal::NewMemory, &Options::default()).threads, 1);
}

#[test]
fn the_machine_is_asked_only_where_its_answer_matters() {
    let asked = std::cell::Cell::new(0);
    let ask = |n| {
        asked.set(asked.get() + 1);
        n
    };
    let machine = Machine { memory_available: &|| ask(MEMORY), cores: &|| ask(8) as usize };
    // Resident pages that are mapped by the caller's own thread.
    route(&survey(&[WARM]), Goal::NewMemory, &Options::default(), &machine, false);
    assert_eq!(asked.get(), 0);
}

fn any_file() -> impl Strategy<Value = File> {
    let on = vec![FsKind::Local, FsKind::Local, FsKind::Memory, FsKind::Network, FsKind::Remote];
    let on = prop::sample::select(on);
    let sizes = prop::sample::select(vec![0, 4096, 8 * MIB, 256 * MIB, 4 * MEMORY]);
    let parallelism = prop::sample::select(vec![None, Some(1), Some(8), Some(250)]);
    (on, 0..5u64, 0..5u64, 0..5u64, any::<[bool; 4]>(), sizes, parallelism).prop_map(
        |(on, resident, moved, wanted, [cut, sampled, direct, late], nbytes, parallelism)| File {
            on,
            resident: if on == FsKind::Memory { 4 } else { resident },
            moved,
            wanted,
            cut,
            sampled,
            direct,
            nbytes,
            parallelism,
            staging: if late { TakesSlab::AtArrival } else { TakesSlab::AtRequest },
        },
    )
}

fn any_options() -> impl Strategy<Value = Options> {
    use prop::sample::select;
    let ios = [Io::Auto, Io::Auto, Io::Mapped, Io::Buffered, Io::UringBuffered, Io::Direct, Io::Uring, Io::Threads];
    let caches = [Cache::Auto, Cache::Keep, Cache::Bypass];
    let given = select(vec![0, 0, 1, 40]);
    (select(ios.to_vec()), select(caches.to_vec()), any::<Option<bool>>(), any::<bool>(), given.clone(), given)
        .prop_map(|(io, cache, copy, misaligned, threads, depth)| Options {
            io,
            cache,
            copy,
            misaligned,
            threads,
            depth,
            ..Options::default()
        })
}

proptest! {
    #[test]
    fn whatever_the_input_the_ways_are_possible_and_the_same_again(
        files in prop::collection::vec(any_file(), 1..5),
        options in any_options(),
        into in prop::sample::select(vec![Goal::NewMemory, Goal::Tensors, Goal::Gpu]),
    ) {
        prop_assume!(check(&options, into).is_ok());
        let routing = decide(&files, into, &options);
        prop_assert_eq!(&routing, &decide(&files, into, &options));
        prop_assert_eq!(routing.ways.len(), files.len());
        for (file, way) in files.iter().zip(&routing.ways) {
            let past = reads_past_the_cache(options.io);
            prop_assert!(!way.is_mapped() || matches!(file.on, FsKind::Local | FsKind::Memory));
            prop_assert!(!way.is_mapped() || !is_private(&options, into));
            prop_assert!(way.is_mapped() || !way.in_part);
            let direct = (way.cold == Lane::DIRECT) | (way.warm == Lane::DIRECT);
            prop_assert!(!direct || file.direct && file.on != FsKind::Remote && (past || file.on == FsKind::Local));
            let parts = any_range(file);
            prop_assert!(way.warm == parts || past, "resident bytes go past the page cache only if that was asked for");
            prop_assert_eq!(way.parts, parts);
            prop_assert!(way.through != Through::HugePages || !file.cut, "a slice fills no file");
            if options.cache == Cache::Bypass && file.on == FsKind::Local && file.resident < 4 && file.nbytes > 0 {
                prop_assert!(!way.is_mapped() && (way.cold == Lane::DIRECT || !file.direct), "{:?}", way);
            }
        }
        // What was said counts; what was not said is never less than the most that a store declares.
        let said = |found: usize, given: u32| given == 0 || found == given as usize;
        prop_assert!(routing.here || said(routing.threads, options.threads));
        prop_assert!(said(routing.depth, options.depth) && said(routing.requests, options.depth));
        prop_assert!(routing.threads > 0 && routing.depth > 0 && routing.requests > 0 && routing.buffered_depth > 0);
        let declared = |staging| files.iter().filter(move |f| f.staging == staging).filter_map(|f| f.parallelism).max();
        prop_assert!(options.depth > 0 || Some(routing.depth) >= declared(TakesSlab::AtRequest));
        prop_assert!(options.depth > 0 || Some(routing.requests) >= declared(TakesSlab::AtArrival));
        let keeps = matches!(routing.cold, Cold::Keep | Cold::Try);
        prop_assert!(options.cache != Cache::Bypass || !keeps || files.iter().any(|f| f.sampled));
        let remote = files.iter().all(|f| f.on == FsKind::Remote);
        prop_assert!(options.cache != Cache::Keep || routing.cold != Cold::Bypass || remote);
        prop_assert!(!routing.here || routing.cold == Cold::None && routing.ways.iter().all(|way| way.is_mapped()));
    }
}

#[test]
fn ranks_that_try_exchange_do_not_try_the_storage_too_and_their_memory_is_no_mapping() {
    let machine = Machine { memory_available: &|| MEMORY, cores: &|| CORES };
    let routed =
        |options: &Options, ranks_try| route(&survey(&[DISK]), Goal::SharedMemory, options, &machine, ranks_try);
    for copy in [None, Some(true), Some(false)] {
        let options = Options { copy, ..Options::default() };
        check(&options, Goal::SharedMemory).unwrap();
        assert_eq!((routed(&options, false).cold, routed(&options, true).cold), (Cold::Try, Cold::Keep), "{copy:?}");
        assert!(routed(&options, true).reason.starts_with("ranks try something else"));
        assert!(!routed(&options, true).ways[0].is_mapped());
        assert_eq!(routed(&options, true).ways[0].cold, Lane::BUFFERED);
    }
    let mapped = Options { io: Io::Mapped, ..Options::default() };
    assert!(check(&mapped, Goal::SharedMemory).unwrap_err().to_string().contains("other ranks"));
}
