//! The way of every file, decided once: a pure function of what the stores say, the target and the options. The same
//! input gives the same ways.

use super::survey::{Survey, Surveyed};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, TakesSlab};
use crate::options::{is_extent, size_text, Cache, Io, Options};
use crate::store::FsKind;
use crate::way::{Cold, Routing, Through, Way, WORTH_A_TRIAL};

/// Threads: enough to fill a local disk through the page cache even with few cores. They wait, they do not compute: on
/// two cores 4, 8 and 16 threads populated at 0.84, 0.88 and 0.89 of the raw O_DIRECT rate beside them.
const LEAST_THREADS: usize = 12;
/// More threads than this copy no faster from the page cache (memory bandwidth).
const MOST_THREADS: usize = 16;
/// The speed of a network file system depends on how many reads are in flight.
const NETWORK_THREADS: usize = 32;
/// Reads in flight, at least. 16 of 4 MiB saturate what one ring reaches (published: 45 GiB/s for 32 of 1 MiB).
const LEAST_DEPTH: usize = 16;
/// Reads through the page cache by io_uring in flight. With 4 MiB each, 8 gave 2.4 GB/s, 16 gave 1.8 and 32 gave 1.25:
/// each read is a thread of the kernel that reads ahead, and these get in each other's way.
const BUFFERED_DEPTH: usize = 8;

/// Where the bytes of a load end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// New memory of this process, or the mapped files themselves.
    NewMemory,
    /// New memory that other ranks send bytes to: it cannot be a mapping.
    SharedMemory,
    /// Tensors on the CPU that exist.
    Tensors,
    /// A GPU.
    Gpu,
}

/// Facts about the machine, asked only where they matter: each takes about twenty system calls.
pub(crate) struct Machine<'a> {
    /// Bytes of memory that are left to this process.
    pub(crate) memory_available: &'a dyn Fn() -> u64,
    /// Cores that this process may use.
    pub(crate) cores: &'a dyn Fn() -> usize,
}

/// Whether `options` ask for private memory. Then no file is mapped.
pub(crate) fn is_private(options: &Options, into: Goal) -> bool {
    options.copy == Some(true) || into != Goal::NewMemory || !matches!(options.io, Io::Auto | Io::Mapped)
}

/// The ways of all files of `survey`. `ranks_try`: ranks find out whether to exchange what several of them want.
pub(crate) fn route(survey: &Survey, into: Goal, options: &Options, machine: &Machine<'_>, ranks_try: bool) -> Routing {
    let private = is_private(options, into);
    let past = reads_past_the_cache(options.io);
    let found = || survey.files.iter().flatten();
    // Files of stores that a scheme names do not affect the page cache.
    let cacheable = || found().filter(|s| s.facts.kind != FsKind::Remote);
    let sum = |of: &dyn Fn(&Surveyed) -> u64| cacheable().map(of).fold(0, u64::saturating_add);
    let mappable = |s: &Surveyed| s.facts.lanes.mapping.is_some() && s.facts.kind != FsKind::Remote;
    let is_mapped = |s: &Surveyed| {
        !private
            && mappable(s)
            && (options.cache != Cache::Bypass || s.missing() == 0 || s.facts.kind == FsKind::Memory)
    };
    // On a network, O_DIRECT gives up the server's read-ahead (published: 0.49 against 2.44 GiB/s). So it is used only if
    // the caller asks for it. Stores that a scheme names have no such thing.
    let has_direct = |s: &Surveyed| {
        s.facts.lanes.past_cache.is_some()
            && match s.facts.kind {
                FsKind::Local => true,
                FsKind::Memory | FsKind::Network => past,
                FsKind::Remote => false,
            }
    };

    // Files that ask for the page cache to be kept come through it.
    let on_device = |s: &Surveyed| {
        let kept = options.cache == Cache::Keep && s.facts.kind != FsKind::Remote;
        s.facts.lanes.device.filter(|_| into == Goal::Gpu && options.io == Io::Auto && !kept)
    };

    // A rank that wants an eighth of every tensor brings only that eighth into the page cache.
    let wanted = sum(&|s| s.wanted);
    let cold = sum(&Surveyed::missing).min(wanted);
    // An upper bound of the cold bytes that are copied.
    let copied = sum(&|s| s.missing().min(if is_mapped(s) { s.moved } else { s.wanted }));
    let remote = cacheable().next().is_none() && found().next().is_some();
    let (keep, reason) = match remote {
        true => (false, "all bytes come from servers".into()),
        false => keep_in_cache(options, into, cold, copied, machine),
    };
    let sampled = cacheable().any(|s| s.sampled);

    // Existing tensors on the CPU: their pages are in use already, so a copy out of the page cache costs no more than
    // O_DIRECT. New memory: it depends on the storage.
    let fresh = private && into != Goal::Tensors;
    let either_way = |s: &Surveyed| mappable(s) && has_direct(s) && on_device(s).is_none();
    let either_way = sum(&|s| if either_way(s) { s.missing() } else { 0 }).min(wanted);
    let may_try =
        keep && fresh && options.cache == Cache::Auto && options.io == Io::Auto && either_way >= WORTH_A_TRIAL;
    let tries = may_try && !ranks_try;
    let reason = match may_try && ranks_try {
        true => "ranks try something else: whether to exchange what several of them want".to_owned(),
        false => reason,
    };

    let what = match () {
        () if remote || !keep && (cold > 0 || past) => Cold::Bypass,
        () if cold == 0 && !sampled => Cold::None,
        () if tries => Cold::Try,
        () => Cold::Keep,
    };
    let way = |s: &Surveyed| {
        let mapped = is_mapped(s);
        let cold = s.missing() > 0 && mappable(s);
        let lanes = &s.facts.lanes;
        let lane = |past: bool, else_by: Lane| lanes.past_cache.filter(|_| past && has_direct(s)).unwrap_or(else_by);
        let through = match what {
            Cold::None => Through::Ahead,
            // On a local disk with O_DIRECT, such a load sends only resident bytes through the page cache.
            Cold::Bypass if s.facts.kind == FsKind::Local && lanes.past_cache.is_some() => Through::Ahead,
            Cold::Bypass => Through::Nothing,
            Cold::Keep | Cold::Try if cold && s.is_whole() && !mapped => Through::HugePages,
            // Elsewhere the read-ahead may be what makes a server fast.
            Cold::Keep | Cold::Try if s.facts.kind == FsKind::Local => Through::Exact,
            Cold::Keep | Cold::Try => Through::Ahead,
        };
        Way {
            mapping: lanes.mapping.filter(|_| mapped),
            in_part: mapped && cold && !s.is_whole(),
            cold: on_device(s).unwrap_or_else(|| lane(past || !keep || tries, lanes.any)),
            warm: lane(past, lanes.near),
            parts: lanes.any,
            through,
        }
    };
    let ways: Vec<Way> = survey.files.iter().map(|s| s.as_ref().map_or_else(Way::default, way)).collect();

    let network = found().any(|s| s.facts.kind == FsKind::Network);
    let here = what == Cold::None && !network && found().all(|s| is_mapped(s) && s.moved == 0);
    let threads = match options.threads {
        _ if here => 1,
        // More copy workers than cores would only take turns.
        0 if what == Cold::None => (machine.cores)().min(MOST_THREADS),
        0 if network => NETWORK_THREADS,
        0 => (machine.cores)().clamp(LEAST_THREADS, MOST_THREADS),
        n => n as usize,
    };
    // The most that one of these stores declares; one that declares nothing wants `usual`.
    let declared = |staging, usual| {
        let those = survey.files.iter().zip(&ways).filter_map(|(s, way)| Some((s.as_ref()?, way)));
        let those = those.filter(|(_, way)| [way.cold, way.warm, way.parts].iter().any(|lane| lane.staging == staging));
        those.map(|(s, _)| s.facts.parallelism.unwrap_or(usual)).max().unwrap_or(usual)
    };
    let (depth, requests, buffered_depth) = match options.depth {
        // Each worker should find the next read waiting when it has done one.
        0 => {
            let depth = (2 * threads).max(LEAST_DEPTH);
            let depth = depth.max(declared(TakesSlab::AtRequest, depth));
            (depth, declared(TakesSlab::AtArrival, depth).max(1), BUFFERED_DEPTH)
        }
        depth => (depth as usize, depth as usize, depth as usize),
    };
    let (page_timing, stall) = (options.page_timing, options.stall_timeout);
    Routing { ways, cold: what, reason, here, threads, depth, requests, buffered_depth, gap: None, page_timing, stall }
}

/// Whether this io reads past the page cache, whatever the page cache holds.
pub(crate) fn reads_past_the_cache(io: Io) -> bool {
    matches!(io, Io::Direct | Io::Uring | Io::Threads)
}

/// Whether cold bytes stay in the page cache, and why. `copied` of them are copied, not mapped.
fn keep_in_cache(options: &Options, into: Goal, cold: u64, copied: u64, machine: &Machine<'_>) -> (bool, String) {
    match options.cache {
        Cache::Keep => (true, "asked for".into()),
        // Nothing is cold, so nothing enters the page cache and nothing is evicted.
        _ if cold == 0 && !reads_past_the_cache(options.io) => {
            (options.cache == Cache::Auto, "the page cache holds all wanted bytes".into())
        }
        Cache::Bypass => (false, "asked for".into()),
        Cache::Auto if reads_past_the_cache(options.io) => (false, "io= reads past the page cache".into()),
        Cache::Auto if options.io != Io::Auto => (true, "io= reads through the page cache".into()),
        Cache::Auto if options.copy == Some(false) && into != Goal::SharedMemory => {
            (true, "copy=False asks for mapped files".into())
        }
        // Private memory would take as much room, and the kernel could not take it back under memory pressure.
        Cache::Auto if copied == 0 => (true, format!("{} of cold bytes are mapped, not copied", size_text(cold))),
        Cache::Auto => {
            // Half: the destination, the rest of the program and other programs' page cache need room too.
            let room = (machine.memory_available)() / 2;
            let (keep, not) = if copied <= room { (true, "") } else { (false, "do not ") };
            let mapped = match cold.saturating_sub(copied) {
                0 => String::new(),
                rest => format!("; {} more are mapped, not copied", size_text(rest)),
            };
            let (copied, room) = (size_text(copied), size_text(room));
            (keep, format!("{copied} of cold bytes {not}fit into half of the memory left ({room}){mapped}"))
        }
    }
}

/// Refuses options that contradict each other or the target.
pub(crate) fn check(options: &Options, into: Goal) -> Result<()> {
    let own_cpu = into == Goal::NewMemory;
    let (is_mapped, bypass) = (options.io == Io::Mapped, options.cache == Cache::Bypass);
    let asks_to_map = options.copy == Some(false);
    let is_private = !matches!(options.io, Io::Auto | Io::Mapped);
    let refused = [
        (
            is_mapped && into == Goal::SharedMemory,
            "io=\"mapped\" gives the page cache itself as CPU tensors, and other ranks cannot send bytes to it",
        ),
        (
            is_mapped && !own_cpu,
            "io=\"mapped\" gives the page cache itself as CPU tensors; it cannot fill a GPU or existing tensors",
        ),
        (is_mapped && options.copy == Some(true), "io=\"mapped\" and copy=True contradict each other"),
        (
            asks_to_map && into != Goal::SharedMemory && is_private,
            "copy=False asks for mapped files, but the io chosen reads into private memory",
        ),
        (
            asks_to_map && own_cpu && bypass,
            "copy=False asks for mapped files, which are in the page cache; cache=\"bypass\" contradicts it",
        ),
        (is_mapped && bypass, "io=\"mapped\" gives the page cache itself as tensors; cache=\"bypass\" contradicts it"),
        (
            options.io == Io::Buffered && bypass,
            "io=\"buffered\" reads through the page cache; cache=\"bypass\" contradicts it",
        ),
        (
            options.io == Io::UringBuffered && bypass,
            "io=\"uring_buffered\" reads through the page cache; cache=\"bypass\" contradicts it",
        ),
        (
            reads_past_the_cache(options.io) && options.cache == Cache::Keep,
            "the io chosen reads past the page cache; cache=\"keep\" contradicts it",
        ),
        (!is_extent(options.extent), "extent must be a multiple of 4096 bytes, from 4096 to 1 GiB"),
        (options.staging < options.extent.saturating_mul(2), "staging must hold at least two extents"),
    ];
    match refused.iter().find(|(applies, _)| *applies) {
        Some((_, text)) => Err(Error::new(ErrorKind::Invalid, *text)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
