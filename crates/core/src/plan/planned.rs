//! A request as a plan: layout, survey, routing and schedule, one after the other.

use super::holes;
use super::layout::{Layout, Target};
use super::recorded::recorded;
use super::request::{Memory, Request, Where};
use super::routing::{self, Goal, Machine};
use super::schedule::{FileTraits, Limits, RankShares, Schedule};
use super::shares::PARCEL;
use super::survey::{Survey, Surveyed};
use super::want::Want;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, Landing, Piece};
use crate::format::Checkpoint;
use crate::machine;
use crate::options::{Io, Options, Order, HUGE_PAGE, LEAST_EXTENT, PAGE, ROW_GAP};
use crate::rows;
use crate::stats::{Report, Unwanted};
use crate::store::{Facts, FsKind, Storage};
use crate::way::{Cold, Routing, Through, Way};
use std::collections::BTreeMap;
use std::ops::Range;

/// The plan of a load: places, reads, ways.
pub(crate) struct Planned {
    pub(crate) layout: Layout,
    pub(crate) schedule: Schedule,
    pub(crate) routing: Routing,
    /// Bytes of a slab: the longest extent of all files. Where no store declares one, whole huge pages.
    pub(crate) slab: u64,
    /// Whether bytes come from a disk of this machine, or from a file system that may keep them in the page cache.
    pub(crate) uses_disk: bool,
    /// The report, as far as it is known before the load.
    pub(crate) report: Report,
    /// The unwanted bytes that each section of the schedule reads. The report has their sum.
    pub(crate) unwanted: Vec<Unwanted>,
}

impl Planned {
    /// Plans `request`. Asks the file systems about the files.
    ///
    /// With `ranks`, for one rank of several.
    pub(crate) fn new(request: &Request, files: &Storage, ranks: Option<&RankShares<'_>>) -> Result<Planned> {
        let Request { checkpoint, wants, device, memory, options, .. } = request;
        let into = match (memory, device) {
            (Memory::Into { .. }, Where::Cpu) => Goal::Tensors,
            (_, Where::Gpu(_)) => Goal::Gpu,
            (_, Where::Cpu) if ranks.is_some() => Goal::SharedMemory,
            (_, Where::Cpu) => Goal::NewMemory,
        };
        routing::check(options, into)?;
        // Nothing here depends on this machine: each rank has the same layout.
        let target = match (memory, device) {
            (Memory::Into { .. }, _) => Target::Foreign,
            (_, Where::Gpu(_)) => Target::Gpu,
            // Private copies are aligned, whatever the file does.
            (_, Where::Cpu) => Target::Cpu { misaligned: options.misaligned && !routing::is_private(options, into) },
        };
        let mut layout = match &request.layout {
            Some(given) => recorded(given, checkpoint, wants, &target)?,
            None => Layout::new(checkpoint, wants, &target, options.order)?,
        };
        if let Memory::Into { tensors, .. } = memory {
            layout.fill(checkpoint, wants, tensors, *device == Where::Cpu)?;
        }
        let survey = Survey::new(checkpoint, wants, &layout, files)?;
        let machine = Machine { memory_available: &machine::memory_available, cores: &machine::cores };
        // One trial at a time: that of the storage would time waiting for other ranks, and find pages that another has read.
        let ranks_try = ranks.is_some_and(|ranks| ranks.sections.len() > 1);
        let mut routing = routing::route(&survey, into, options, &machine, ranks_try);
        // These gaps are other ranks' bytes: do not read them.
        routing.gap = ranks.map(|_| options.least_gap());
        if options.io == Io::Mapped {
            if let Some(f) = survey.files.iter().zip(&routing.ways).position(|(s, way)| s.is_some() && !way.is_mapped())
            {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "io=\"mapped\" was asked for, but files on this kind of file system are never mapped: if another \
                     machine truncates a mapped file, its reader is killed; use io=\"auto\"",
                )
                .at(files.path(f as u32)));
            }
        }
        let mut report = Report {
            cache: routing.cold.name(),
            cache_reason: routing.reason.clone(),
            residency_probes: survey.probes,
            tensors: wants.len() as u64,
            nbytes: layout.places.iter().map(|p| p.nbytes).sum(),
            ..Report::default()
        };
        let is_cached = |s: &Surveyed| s.facts.kind != FsKind::Remote;
        let uses_disk = routing.cold != Cold::None && survey.files.iter().flatten().any(is_cached);
        let mut slab = None;
        report.gap_limit = options.least_gap();
        // Ranks exchange columns, so their holes decide about nothing. Each of them would read some MB to find out how long a read
        // takes, at the same time as the others.
        let measured = match ranks {
            Some(_) => vec![None; survey.files.len()],
            None => gaps_measured(&survey, &routing, &layout, files, options)?,
        };
        let traits = survey.files.into_iter().zip(&routing.ways).zip(measured).map(|((surveyed, way), measured)| {
            let Some(surveyed) = surveyed else { return FileTraits::default() };
            report.resident_bytes += if surveyed.facts.kind == FsKind::Remote { 0 } else { surveyed.warm() };
            let all_resident = surveyed.missing() == 0;
            // Between two samples there may be pages that the page cache does not hold. So all pages are populated: a first
            // touch must not have to read the disk.
            let resident = if way.is_mapped() && surveyed.sampled { Vec::new() } else { surveyed.resident };
            let storage = surveyed.facts.storage as u32;
            let extent = declared_extent(&surveyed.facts, options);
            slab = slab.max(extent.or(Some(options.extent.next_multiple_of(HUGE_PAGE))));
            let least = options.least_gap();
            let declared = declared_gap(&surveyed.facts, options).filter(|_| ranks.is_none());
            let gap = declared.or(measured.map(|bytes| bytes.min(extent.unwrap_or(options.extent)).max(least)));
            report.gap_limit = report.gap_limit.max(gap.unwrap_or(least));
            // Short rows in the page cache cost least one by one, without the long gaps between them.
            let in_cache = surveyed.facts.kind != FsKind::Network && surveyed.facts.kind != FsKind::Remote;
            let is_warm = in_cache && !surveyed.sampled && all_resident;
            let by_rows = is_warm && way.warm.scatters && way.through != Through::Nothing;
            let rows = by_rows.then(|| options.gap.map_or(ROW_GAP, |gap| gap.min(ROW_GAP)));
            let (unit, cut) = (surveyed.facts.lanes.unit, surveyed.facts.cut);
            FileTraits { storage, unit, resident, way: *way, extent, gap, cut, rows }
        });
        let traits: Vec<FileTraits> = traits.collect();
        let limits = Limits {
            extent: options.extent,
            gap: options.least_gap(),
            scatter: (*device == Where::Cpu).then_some(PAGE),
            direct_in_place: machine::direct_reads_survive_forks(),
            window: request.stream.then_some(options.window),
        };
        Schedule::check(checkpoint, wants, &layout, &traits, &limits)?;
        let schedule = Schedule::of_rank(checkpoint, &layout, &traits, &limits, ranks);
        let of_section = |extents: &Range<usize>| unwanted(&schedule, &schedule.extents[extents.clone()], wants, files);
        let unwanted: Vec<Unwanted> = schedule.sections.iter().map(of_section).collect();
        report.unwanted = unwanted.iter().cloned().fold(Unwanted::default(), Unwanted::and);
        let slab = slab.unwrap_or(options.extent);
        // A parcel with the pages around it, and room to move its neighbours apart.
        let longest =
            schedule.extents.iter().filter(|e| e.shared.is_some() && e.landing == Landing::Slab).map(|e| e.len);
        let slab = slab.max(longest.max().unwrap_or(0).next_multiple_of(HUGE_PAGE));
        let slab = if ranks.is_some() { slab.max(2 * PARCEL) } else { slab };
        Ok(Planned { layout, schedule, routing, slab, uses_disk, report, unwanted })
    }
}

/// The longest read of a file, where its store declares one: stores know what their requests cost.
pub(super) fn declared_extent(facts: &Facts, options: &Options) -> Option<u64> {
    facts.extent.map(|bytes| bytes.max(LEAST_EXTENT).min(options.extent) / PAGE * PAGE)
}

/// The longest hole that is read and not skipped, where the store of a file declares one.
pub(super) fn declared_gap(facts: &Facts, options: &Options) -> Option<u64> {
    let extent = declared_extent(facts, options).unwrap_or(options.extent);
    facts.gap.map(|bytes| bytes.min(extent).max(options.least_gap()))
}

/// Whether this machine's page cache holds everything from the first to the last wanted byte of each file. Asks the file
/// systems.
///
/// # Errors
/// The errors of [`Layout::new`], and those of the file systems.
pub fn is_resident(checkpoint: &Checkpoint, wants: &[Want]) -> Result<bool> {
    let layout = Layout::new(checkpoint, wants, &Target::Gpu, Order::File)?;
    let survey = Survey::new(checkpoint, wants, &layout, &checkpoint.storage()?)?;
    Ok(survey.files.iter().flatten().all(|s| s.facts.kind != FsKind::Remote && s.missing() == 0))
}

/// How many bytes of the files from the first to the last wanted one the page cache does not hold, and how many there are;
/// or why a file cannot be mapped under a lease.
///
/// # Errors
/// As [`is_resident`].
pub fn missing_where_mappable(
    checkpoint: &Checkpoint,
    wants: &[Want],
) -> Result<std::result::Result<(u64, u64), String>> {
    let layout = Layout::new(checkpoint, wants, &Target::Gpu, Order::File)?;
    let survey = Survey::new(checkpoint, wants, &layout, &checkpoint.storage()?)?;
    let mut found = (0, 0);
    for (s, file) in survey.files.iter().zip(checkpoint.files()) {
        let Some(s) = s else { continue };
        if !s.facts.leases_see_all_writers() {
            let why = "a lease on an overlay does not see a program that writes to the layer below";
            return Ok(Err(format!("{}: {why}", file.spelled)));
        }
        if s.facts.lanes.mapping.is_none() || !matches!(s.facts.kind, FsKind::Local | FsKind::Memory) {
            return Ok(Err(format!("{} is on no disk of this machine that Penstock maps", file.spelled)));
        }
        found = (found.0 + s.missing(), found.1 + (s.span.end - s.span.start));
    }
    Ok(Ok(found))
}

/// The unwanted bytes that these extents read.
fn unwanted(schedule: &Schedule, which: &[Extent], wants: &[Want], files: &Storage) -> Unwanted {
    let mut found = Unwanted::default();
    for e in which.iter().filter(|e| !e.is_received()) {
        // A direct read covers whole sectors. The part past the end of the file never arrives.
        let past_end = (e.offset + e.len).saturating_sub(files.size(e.file));
        found.slack += e.slack.saturating_sub(past_end);
        let gap = e.bytes_read().saturating_sub(e.wanted + e.slack);
        found.gap += gap;
        let pieces = schedule.pieces_of(e);
        match e.rows {
            _ if gap == 0 => {}
            None => gaps_of_tensors(pieces, wants, &mut found.of_tensors),
            Some(by) => {
                for p in pieces {
                    let read = rows::bytes_read(p.len, p.rows, p.from_stride, by.gap);
                    if read > p.nbytes() {
                        *found.of_tensors.entry(wants[p.want as usize].tensor).or_default() += read - p.nbytes();
                    }
                }
            }
        }
    }
    found
}

/// For each file, the longest hole that is read, not skipped, where the storage was asked what a read costs: for cold bytes
/// of loads that have many holes. Files on one storage are asked once.
fn gaps_measured(
    survey: &Survey,
    routing: &Routing,
    layout: &Layout,
    files: &Storage,
    options: &Options,
) -> Result<Vec<Option<u64>>> {
    let mut found = vec![None; survey.files.len()];
    if options.gap.is_some() || routing.cold == Cold::None {
        return Ok(found);
    }
    let mut known: BTreeMap<(u64, bool), Option<u64>> = BTreeMap::new();
    for (file, (surveyed, way)) in (0..).zip(survey.files.iter().zip(&routing.ways)) {
        let Some(surveyed) = surveyed.as_ref().filter(|s| s.cut && s.facts.gap.is_none()) else { continue };
        let Way { mapping: None, cold, .. } = way else { continue };
        let key = (surveyed.facts.storage, cold.whole_units);
        if let Some(answer) = known.get(&key) {
            found[file as usize] = *answer;
        } else if let Some(sample) = holes::sample(layout, file, &surveyed.resident, files.size(file)) {
            found[file as usize] = files.hole(file, key.1, &sample)?;
            known.insert(key, found[file as usize]);
        }
    }
    Ok(found)
}

/// Adds what one extent reads between the first and the last wanted byte of each tensor, and from there to the next tensor.
fn gaps_of_tensors(pieces: &[Piece], wants: &[Want], gaps: &mut BTreeMap<u32, u64>) {
    let tensor = |piece: &Piece| wants[piece.want as usize].tensor;
    let end = |piece: &Piece| piece.from + (piece.rows - 1) * piece.from_stride + piece.len;
    let mut sorted: Vec<&Piece> = pieces.iter().collect();
    // The bytes of different tensors do not interleave. Those that several wants have count once.
    sorted.sort_unstable_by_key(|p| (tensor(p), p.from, p.rows, p.len, p.from_stride));
    sorted.dedup_by_key(|p| (tensor(p), p.from, p.rows, p.len, if p.rows > 1 { p.from_stride } else { 0 }));
    sorted.sort_by_key(|p| p.from);
    let mut last: Option<(u32, u64)> = None;
    for of_tensor in sorted.chunk_by(|a, b| tensor(a) == tensor(b)) {
        let (start, past) = (of_tensor[0].from, of_tensor.iter().map(|p| end(p)).max().unwrap_or(0));
        let wanted: u64 = of_tensor.iter().map(|p| p.nbytes()).sum();
        if let Some((before, at)) = last.filter(|(_, at)| *at < start) {
            *gaps.entry(before).or_default() += start - at;
        }
        let within = (past - start).saturating_sub(wanted);
        if within > 0 {
            *gaps.entry(tensor(of_tensor[0])).or_default() += within;
        }
        last = Some((tensor(of_tensor[0]), past));
    }
}

#[cfg(test)]
mod tests;
