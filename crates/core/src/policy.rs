//! Policy: which files are mapped, which routes cold and warm bytes take, and what becomes of the page cache.

use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::layout::{BlockKind, Layout, Target};
use crate::load::{Memory, Request, Where};
use crate::machine;
use crate::options::{Cache, Io, Options, PAGE};
use crate::placement::Want;
use crate::schedule::{FileTraits, Limits, Route, Schedule};
use crate::source::{Facts, Files, FsKind, WORTH_A_TRIAL};
use crate::stats::Report;
use std::ops::Range;

/// What is to be read, where to, and why that way.
pub(crate) struct Plan {
    pub(crate) layout: Layout,
    pub(crate) schedule: Schedule,
    pub(crate) report: Report,
    pub(crate) cold: Cold,
    /// For each file, whether its cold bytes are brought into the page cache by huge pages before they are read.
    pub(crate) filled: Vec<bool>,
    /// For each file, whether it is mapped, and cold, and wanted in part: no more of it is to be brought in.
    pub(crate) in_part: Vec<bool>,
}

/// What is to be done with bytes that the page cache does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cold {
    /// There are none: nothing will wait for a disk.
    None,
    /// They are to stay in it.
    Keep,
    /// They are to leave it as it is.
    Bypass,
    /// The pace of the storage is to decide.
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
                    "io=\"mapped\" was asked for, but a file on this kind of file system is never mapped (a mapping of \
                     a file that another machine truncates kills its reader); use io=\"auto\"",
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
        // Between two samples there may be pages that the cache does not hold: all of them are populated then, and none is
        // left to a first touch that would have to read the disk.
        (0..mapped.len()).filter(|&f| mapped[f] && sampled[f]).for_each(|f| traits[f].resident.clear());
        let mut in_part = vec![false; traits.len()];
        for f in 0..traits.len() {
            let cold = matches!(&facts[f], Some((facts, false)) if facts.mappable);
            // Who asks for a slice asks for no more, however nearly it is the whole.
            let whole = !cut[f] && spans[f].as_ref().is_some_and(|s| nearly(wanted[f], s.end - s.start));
            traits[f].filled = keep && cold && whole && !mapped[f];
            in_part[f] = mapped[f] && cold && !whole;
        }

        // Into tensors whose pages are in use a copy out of the page
        // cache costs no more than what O_DIRECT needs besides. Else it depends.
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
            // A direct read is asked for whole sectors; what lies past the end of its file never arrives.
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

/// What the files are like where something is wanted of them. One entry per file, `None` where nothing is.
struct Survey {
    /// From the first wanted byte to the last: nothing else is asked about.
    spans: Vec<Option<Range<u64>>>,
    /// Wanted bytes in it; what is wanted twice counts twice.
    wanted: Vec<u64>,
    /// Whether of some tensor a part is wanted.
    cut: Vec<bool>,
    /// And whether the page cache holds all that is wanted.
    facts: Vec<Option<(Facts, bool)>>,
    traits: Vec<FileTraits>,
    /// Whether what the page cache holds was sampled, not counted.
    sampled: Vec<bool>,
    /// For each file, bytes of its span that the page cache does not hold.
    missing: Vec<u64>,
    /// Wanted bytes that the page cache does not hold, at most.
    cold: u64,
    /// Of these, those that can be read past it as well as through it.
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
            // A whole tensor's size is known: no list of its dimensions for each of 371,474.
            let part = want.region.as_ref().and_then(|_| {
                let elements = want.shape(&info).iter().try_fold(1u64, |n, &d| n.checked_mul(d));
                elements.and_then(|n| info.dtype.nbytes(n))
            });
            let nbytes = part.unwrap_or(info.nbytes());
            cut[info.file as usize] |= nbytes < info.nbytes();
            // More than there can be is refused by the layout.
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
                // Elsewhere O_DIRECT gives up the server's read-ahead (0.49 against 2.44 GiB/s were published), so it is
                // for whoever asks for it.
                direct_align: found.direct_align.filter(|_| found.kind == FsKind::Local || past_the_cache),
                resident: residency.ranges,
                filled: false,
            };
            if found.mappable && traits[f].direct_align.is_some() {
                direct = direct.saturating_add(missing[f]);
            }
            facts[f] = Some((found, missing[f] == 0));
        }
        // A rank that wants an eighth of every tensor leaves no more than that in the cache.
        let all = wanted.iter().fold(0, |sum: u64, n| sum.saturating_add(*n));
        let (cold, direct) = (cold.min(all), direct.min(all));
        Ok(Survey { spans, wanted, cut, facts, traits, sampled, missing, cold, direct, report })
    }
}

/// Whether so many bytes are all of a span but for a few gaps.
fn nearly(wanted: u64, span: u64) -> bool {
    wanted >= span - span / 16
}

fn reads_past_the_cache(io: Io) -> bool {
    matches!(io, Io::Direct | Io::Uring | Io::Aio | Io::Threads)
}

/// Cold bytes that are copied, at most: of each file as many as are wanted elsewhere than in its mapping (slices that are no single
/// run, what is misaligned, what is wanted twice), and no more than are `missing` in the page cache.
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

/// Whether cold bytes, of which so many are `copied`, are to stay in the page cache, and why.
fn keep_in_cache(options: &Options, cold: u64, copied: u64) -> (bool, String) {
    match options.cache {
        Cache::Keep => (true, "asked for".into()),
        // Nothing is kept for its sake, and nothing thrown out.
        _ if cold == 0 && !reads_past_the_cache(options.io) => {
            (options.cache == Cache::Auto, "all of it is there already".into())
        }
        Cache::Bypass => (false, "asked for".into()),
        Cache::Auto if reads_past_the_cache(options.io) => (false, "the io asked for reads past it".into()),
        Cache::Auto if options.io != Io::Auto => (true, "the io asked for goes through it".into()),
        Cache::Auto if options.copy == Some(false) => (true, "mapped files were asked for".into()),
        // Private memory would take as much room, and not give it back under pressure.
        Cache::Auto if copied == 0 => (true, format!("{cold} cold bytes are mapped, not copied")),
        Cache::Auto => {
            // Half: the destination, the rest of the program and the cache of others need room too.
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
        return refuse("extent must be a multiple of 4096 bytes and at least that");
    }
    if options.staging < 2 * options.extent {
        return refuse("staging must hold at least two extents");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
