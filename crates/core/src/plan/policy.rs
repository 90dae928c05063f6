//! Policy: which files are mapped, which routes cold and warm bytes take, and what happens to the page cache.

use super::layout::{BlockKind, Layout, Target};
use super::request::{Memory, Request, Where};
use super::schedule::{FileTraits, Limits, Schedule};
use super::want::Want;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Route;
use crate::format::Checkpoint;
use crate::machine;
use crate::options::{Cache, Io, Options, PAGE};
use crate::source::WORTH_A_TRIAL;
use crate::stats::Report;
use crate::store::{Facts, Files, FsKind};
use std::ops::Range;

/// What is to be read, where to, and why that way.
pub(crate) struct Plan {
    pub(crate) layout: Layout,
    pub(crate) schedule: Schedule,
    pub(crate) report: Report,
    pub(crate) cold: Cold,
    /// For each file: whether its cold bytes are brought into the page cache by huge pages before they are read.
    pub(crate) filled: Vec<bool>,
    /// For each file: whether it is mapped and cold, and only a part of it is wanted. Nothing else of it is brought in.
    pub(crate) in_part: Vec<bool>,
}

/// What happens to bytes that the page cache does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cold {
    /// There are no such bytes: nothing will wait for a disk.
    None,
    /// They stay in the page cache.
    Keep,
    /// They go past the page cache and leave it as it is.
    Bypass,
    /// The pace of the storage decides.
    Try,
}

impl Plan {
    pub(crate) fn new(request: &Request, files: &Files) -> Result<Plan> {
        let Request { checkpoint, wants, device, memory, options, .. } = request;
        let device = *device;
        check(options, device, memory)?;
        let past_the_cache = reads_past_the_cache(options.io);
        let private = options.copy == Some(true)
            || !matches!(memory, Memory::Ours)
            || device != Where::Cpu
            || !matches!(options.io, Io::Auto | Io::Mapped);
        let Survey { spans, wanted, cut, facts, mut traits, sampled, missing, cold, direct, mut report } =
            Survey::new(checkpoint, wants, files, past_the_cache)?;

        let maps = options.cache != Cache::Bypass;
        let mapped: Vec<bool> = facts
            .iter()
            .map(|facts| {
                let Some((facts, resident)) = facts else { return false };
                !private && facts.mappable && (maps || *resident || facts.kind == FsKind::Memory)
            })
            .collect();
        if options.io == Io::Mapped {
            if let Some(f) = spans.iter().zip(&mapped).position(|(span, mapped)| span.is_some() && !mapped) {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "io=\"mapped\" was asked for, but files on this kind of file system are never mapped: if another \
                     machine truncates a mapped file, its reader is killed; use io=\"auto\"",
                )
                .at(files.path(f as u32)));
            }
        }
        let target = match (device, memory) {
            (_, Memory::Into { .. }) => Target::Foreign,
            (Where::Gpu(_), _) => Target::Gpu,
            (Where::Cpu, _) => Target::Cpu { mapped: mapped.clone(), misaligned: options.misaligned },
        };
        let layout = Layout::new(checkpoint, wants, &target, options.order, options.gap)?;

        let copied = if cold == 0 { 0 } else { cold_copies(&layout, &missing) };
        let (keep, reason) = keep_in_cache(options, cold, copied);
        report.cache_reason = reason;
        report.cache = if keep || (cold == 0 && !past_the_cache) { "keep" } else { "bypass" };
        // Between two samples there may be pages that the page cache does not hold. So all pages are populated: a first
        // touch must not have to read the disk.
        (0..mapped.len()).filter(|&f| mapped[f] && sampled[f]).for_each(|f| traits[f].resident.clear());
        let mut in_part = vec![false; traits.len()];
        for f in 0..traits.len() {
            let cold = matches!(&facts[f], Some((facts, false)) if facts.mappable);
            // Slices never fill a whole file, even if the slice is nearly all of its tensor.
            let whole = !cut[f] && spans[f].as_ref().is_some_and(|s| nearly(wanted[f], s.end - s.start));
            traits[f].filled = keep && cold && whole && !mapped[f];
            in_part[f] = mapped[f] && cold && !whole;
        }

        // Existing tensors on the CPU: their pages are in use already, so a copy out of the page cache costs no more than
        // O_DIRECT. New memory: it depends on the storage.
        let fresh = private && !(device == Where::Cpu && matches!(memory, Memory::Into { .. }));
        let tries = keep && fresh && options.cache == Cache::Auto && options.io == Io::Auto && direct >= WORTH_A_TRIAL;

        let limits = Limits {
            extent: options.extent,
            gap: options.gap,
            cold: if past_the_cache || !keep || tries { Route::Direct } else { Route::Buffered },
            warm: if past_the_cache { Route::Direct } else { Route::Buffered },
            scatter: (device == Where::Cpu).then_some(PAGE),
            direct_in_place: machine::direct_reads_survive_forks(),
            window: request.stream.then_some(options.window),
        };
        let schedule = Schedule::new(checkpoint, &layout, &traits, &limits);
        report.tensors = wants.len() as u64;
        report.nbytes = layout.places.iter().map(|p| p.nbytes).sum();
        for e in &schedule.extents {
            // A direct read covers whole sectors. The part past the end of the file never arrives.
            let past_end = (e.offset + e.len).saturating_sub(files.size(e.file));
            report.slack_bytes += e.slack.saturating_sub(past_end);
            report.gap_bytes += e.len.saturating_sub(e.wanted + e.slack);
        }
        let cold = match report.cache {
            "bypass" => Cold::Bypass,
            _ if cold == 0 && !sampled.contains(&true) => Cold::None,
            _ if tries => Cold::Try,
            _ => Cold::Keep,
        };
        let filled = traits.iter().map(|t| t.filled).collect();
        Ok(Plan { layout, schedule, report, cold, filled, in_part })
    }
}

/// Facts about the files. Each list has one entry per file; `None` means that nothing of the file is wanted.
struct Survey {
    /// From the first wanted byte to the last. Residency is asked for this range only.
    spans: Vec<Option<Range<u64>>>,
    /// Wanted bytes in the span. Bytes that are wanted twice count twice.
    wanted: Vec<u64>,
    /// Whether only a part of some tensor is wanted.
    cut: Vec<bool>,
    /// Facts of the file, and whether the page cache holds all of its span.
    facts: Vec<Option<(Facts, bool)>>,
    traits: Vec<FileTraits>,
    /// Whether residency was sampled, not counted.
    sampled: Vec<bool>,
    /// Bytes of the span that the page cache does not hold.
    missing: Vec<u64>,
    /// Wanted bytes that the page cache does not hold, at most.
    cold: u64,
    /// Those of the cold bytes that can be read past the page cache as well as through it.
    direct: u64,
    /// What the survey found and cost.
    report: Report,
}

impl Survey {
    fn new(checkpoint: &Checkpoint, wants: &[Want], files: &Files, past_the_cache: bool) -> Result<Survey> {
        let mut spans: Vec<Option<Range<u64>>> = vec![None; checkpoint.files().len()];
        let mut wanted = vec![0u64; spans.len()];
        let mut cut = vec![false; spans.len()];
        for want in wants {
            let info = checkpoint.tensor(want.tensor);
            // The size of a whole tensor is known. A list of dimensions for each of 371,474 tensors would take long.
            let part = want.region.as_ref().and_then(|_| {
                let elements = want.shape(&info).iter().try_fold(1u64, |n, &d| n.checked_mul(d));
                elements.and_then(|n| info.dtype.nbytes(n))
            });
            let nbytes = part.unwrap_or(info.nbytes());
            cut[info.file as usize] |= nbytes < info.nbytes();
            // The sum may saturate: the layout refuses loads of that size.
            let of_file = &mut wanted[info.file as usize];
            *of_file = of_file.saturating_add(nbytes);
            let span = spans[info.file as usize].get_or_insert(info.begin..info.end);
            *span = span.start.min(info.begin)..span.end.max(info.end);
        }
        let mut traits = vec![FileTraits::default(); spans.len()];
        let mut facts = vec![None; spans.len()];
        let mut sampled = vec![false; spans.len()];
        let mut missing = vec![0u64; spans.len()];
        let (mut cold, mut direct) = (0u64, 0u64);
        let mut report = Report::default();
        for (f, span) in spans.iter().enumerate() {
            let Some(span) = span else { continue };
            let found = files.facts(f as u32)?;
            let residency = files.resident_within(f as u32, span.clone())?;
            report.resident_bytes += residency.bytes();
            report.residency_probes += u64::from(residency.calls + residency.samples);
            sampled[f] = residency.samples > 0;
            missing[f] = (span.end - span.start).saturating_sub(residency.bytes());
            cold = u64::saturating_add(cold, missing[f]);
            traits[f] = FileTraits {
                storage: found.storage as u32,
                // On a network, O_DIRECT gives up the server's read-ahead (published: 0.49 against 2.44 GiB/s). So it is
                // used only if the caller asks for it.
                direct_align: found.direct_align.filter(|_| found.kind == FsKind::Local || past_the_cache),
                resident: residency.ranges,
                ..FileTraits::default()
            };
            if found.mappable && traits[f].direct_align.is_some() {
                direct = direct.saturating_add(missing[f]);
            }
            facts[f] = Some((found, missing[f] == 0));
        }
        // A rank that wants an eighth of every tensor brings only that eighth into the page cache.
        let all = wanted.iter().fold(0, |sum: u64, n| sum.saturating_add(*n));
        let (cold, direct) = (cold.min(all), direct.min(all));
        Ok(Survey { spans, wanted, cut, facts, traits, sampled, missing, cold, direct, report })
    }
}

/// Whether so many bytes are all of a span, except for a few gaps (at most a sixteenth).
fn nearly(wanted: u64, span: u64) -> bool {
    wanted >= span - span / 16
}

fn reads_past_the_cache(io: Io) -> bool {
    matches!(io, Io::Direct | Io::Uring | Io::Aio | Io::Threads)
}

/// An upper bound of the cold bytes that are copied. Of each file these are the bytes that do not stay in its mapping (slices
/// of several runs, misaligned tensors, bytes that are wanted twice), and at most those `missing` in the page cache.
fn cold_copies(layout: &Layout, missing: &[u64]) -> u64 {
    let mut wanted = vec![0u64; missing.len()];
    for (place, &file) in layout.places.iter().zip(&layout.files) {
        if !matches!(layout.blocks[place.block as usize].kind, BlockKind::Mapped { .. }) {
            let of_file = &mut wanted[file as usize];
            *of_file = of_file.saturating_add(place.nbytes);
        }
    }
    wanted.iter().zip(missing).fold(0, |sum, (wanted, missing)| sum.saturating_add(*wanted.min(missing)))
}

/// Whether cold bytes stay in the page cache, and why. `copied` of them are copied, not mapped.
fn keep_in_cache(options: &Options, cold: u64, copied: u64) -> (bool, String) {
    match options.cache {
        Cache::Keep => (true, "asked for".into()),
        // Nothing is cold, so nothing enters the page cache and nothing is evicted.
        _ if cold == 0 && !reads_past_the_cache(options.io) => {
            (options.cache == Cache::Auto, "the page cache holds all of it".into())
        }
        Cache::Bypass => (false, "asked for".into()),
        Cache::Auto if reads_past_the_cache(options.io) => (false, "the io asked for reads past it".into()),
        Cache::Auto if options.io != Io::Auto => (true, "the io asked for goes through it".into()),
        Cache::Auto if options.copy == Some(false) => (true, "mapped files were asked for".into()),
        // Private memory would take as much room, and the kernel could not take it back under memory pressure.
        Cache::Auto if copied == 0 => (true, format!("{cold} cold bytes are mapped, not copied")),
        Cache::Auto => {
            // Half: the destination, the rest of the program and other programs' page cache need room too.
            let room = machine::memory_available() / 2;
            let (keep, not) = if copied <= room { (true, "") } else { (false, "do not ") };
            let mapped = match cold.saturating_sub(copied) {
                0 => String::new(),
                rest => format!("; {rest} more are mapped, not copied"),
            };
            (keep, format!("{copied} cold bytes {not}fit into half of the memory left ({room}){mapped}"))
        }
    }
}

/// Refuses options that contradict each other or the target.
fn check(options: &Options, device: Where, memory: &Memory) -> Result<()> {
    let refuse = |text: &str| Err(Error::new(ErrorKind::Invalid, text));
    let own_cpu = device == Where::Cpu && matches!(memory, Memory::Ours);
    if options.io == Io::Mapped && !own_cpu {
        return refuse(
            "io=\"mapped\" gives the page cache itself as CPU tensors; it cannot fill a GPU or existing tensors",
        );
    }
    if options.io == Io::Mapped && options.copy == Some(true) {
        return refuse("io=\"mapped\" and copy=True contradict each other");
    }
    if options.copy == Some(false) && !matches!(options.io, Io::Auto | Io::Mapped) {
        return refuse("copy=False asks for mapped files, but the io chosen reads into private memory");
    }
    if options.copy == Some(false) && own_cpu && options.cache == Cache::Bypass {
        return refuse(
            "copy=False asks for mapped files, which are in the page cache; cache=\"bypass\" contradicts it",
        );
    }
    match (options.io, options.cache) {
        (Io::Mapped, Cache::Bypass) => {
            return refuse("io=\"mapped\" gives the page cache itself as tensors; cache=\"bypass\" contradicts it");
        }
        (Io::Buffered, Cache::Bypass) => {
            return refuse("io=\"buffered\" reads through the page cache; cache=\"bypass\" contradicts it");
        }
        (Io::UringBuffered, Cache::Bypass) => {
            return refuse("io=\"uring_buffered\" reads through the page cache; cache=\"bypass\" contradicts it");
        }
        (io, Cache::Keep) if reads_past_the_cache(io) => {
            return refuse("the io chosen reads past the page cache; cache=\"keep\" contradicts it");
        }
        _ => {}
    }
    if options.extent < PAGE || options.extent % PAGE != 0 {
        return refuse("extent must be a multiple of 4096 bytes, and at least 4096");
    }
    if options.staging < 2 * options.extent {
        return refuse("staging must hold at least two extents");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
