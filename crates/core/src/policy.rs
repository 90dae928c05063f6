//! Policy: which files are mapped, which routes cold and warm bytes take, and what becomes of the page cache.

use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::layout::{Layout, Target};
use crate::load::{Memory, Where};
use crate::machine;
use crate::options::{Cache, Io, Options, PAGE};
use crate::placement::Want;
use crate::schedule::{FileTraits, Limits, Route, Schedule};
use crate::source::{Files, FsKind};
use crate::stats::Report;
use std::ops::Range;

/// What is to be read, where to, and why that way.
pub(crate) struct Plan {
    pub(crate) layout: Layout,
    pub(crate) schedule: Schedule,
    pub(crate) report: Report,
    /// Whether every wanted byte is in the page cache, so that nothing will wait for a disk.
    pub(crate) all_resident: bool,
}

impl Plan {
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        wants: &[Want],
        device: Where,
        memory: &Memory,
        options: &Options,
        files: &Files,
    ) -> Result<Plan> {
        check(options, device, memory)?;
        let mut report = Report::default();
        // What is wanted of each file, from the first wanted byte to the last: nothing else is asked about.
        let mut spans: Vec<Option<Range<u64>>> = vec![None; checkpoint.files().len()];
        let mut wanted = 0;
        for want in wants {
            let info = checkpoint.tensor(want.tensor);
            let elements = want.shape(&info).iter().try_fold(1u64, |n, &d| n.checked_mul(d));
            wanted += elements.and_then(|n| info.dtype.nbytes(n)).unwrap_or(info.nbytes());
            let span = spans[info.file as usize].get_or_insert(info.begin..info.end);
            *span = span.start.min(info.begin)..span.end.max(info.end);
        }
        let past_the_cache = reads_past_the_cache(options.io);
        let mut traits = vec![FileTraits::default(); spans.len()];
        let mut facts = Vec::with_capacity(spans.len());
        let mut resident_whole = Vec::with_capacity(spans.len());
        let mut cold = 0;
        for (f, span) in spans.iter().enumerate() {
            let Some(span) = span else {
                facts.push(None);
                resident_whole.push(true);
                continue;
            };
            let fact = files.facts(f as u32)?;
            let residency = files.resident_within(f as u32, span.clone())?;
            report.resident_bytes += residency.bytes();
            report.residency_probes += u64::from(residency.calls + residency.samples);
            let missing = (span.end - span.start).saturating_sub(residency.bytes());
            resident_whole.push(missing == 0);
            cold += missing;
            traits[f].storage = fact.storage as u32;
            // Elsewhere O_DIRECT gives up the server's read-ahead (0.49 against 2.44 GiB/s were published), so it is for
            // whoever asks for it.
            traits[f].direct_align = fact.direct_align.filter(|_| fact.kind == FsKind::Local || past_the_cache);
            traits[f].resident = residency.ranges;
            facts.push(Some(fact));
        }
        // A rank that wants an eighth of every tensor leaves no more than that in the cache.
        let cold = cold.min(wanted);

        let (keep, reason) = keep_in_cache(options, cold);
        report.cache_reason = reason;
        let private = options.copy == Some(true)
            || !matches!(memory, Memory::Ours)
            || device != Where::Cpu
            || !matches!(options.io, Io::Auto | Io::Mapped);
        let mapped: Vec<bool> = facts
            .iter()
            .zip(&resident_whole)
            .map(|(fact, &resident)| {
                let Some(fact) = fact else { return false };
                !private && fact.mappable && (keep || resident || fact.kind == FsKind::Memory)
            })
            .collect();
        if let (true, Some(f)) =
            (options.io == Io::Mapped, spans.iter().zip(&mapped).position(|(s, &m)| s.is_some() && !m))
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "io=\"mapped\" was asked for, but a file on this kind of file system is never mapped (a mapping of a \
                 file that another machine truncates kills its reader); use io=\"auto\"",
            )
            .at(files.path(f as u32)));
        }
        report.cache = if cold == 0 || keep { "keep" } else { "bypass" };

        let target = match (device, memory) {
            (_, Memory::Into { .. }) => Target::Foreign,
            (Where::Gpu(_), _) => Target::Gpu,
            (Where::Cpu, _) => Target::Cpu { mapped },
        };
        let limits = Limits {
            extent: options.extent,
            gap: options.gap,
            cold: if past_the_cache || !(keep || options.io == Io::Buffered) { Route::Direct } else { Route::Buffered },
            warm: if past_the_cache { Route::Direct } else { Route::Buffered },
            scatter: (device == Where::Cpu).then_some(PAGE),
        };
        let layout = Layout::new(checkpoint, wants, &target, options.order, options.gap)?;
        let schedule = Schedule::new(checkpoint, &layout, &traits, &limits);
        Ok(Plan { layout, schedule, report, all_resident: cold == 0 })
    }
}

fn reads_past_the_cache(io: Io) -> bool {
    matches!(io, Io::Direct | Io::Uring | Io::Aio | Io::Threads)
}

/// Whether cold bytes are to stay in the page cache, and why.
fn keep_in_cache(options: &Options, cold: u64) -> (bool, String) {
    match options.cache {
        Cache::Keep => (true, "asked for".into()),
        Cache::Bypass => (false, "asked for".into()),
        Cache::Auto if cold == 0 => (true, "all of it is there already".into()),
        Cache::Auto if reads_past_the_cache(options.io) => (false, "the io asked for reads past it".into()),
        Cache::Auto if options.io != Io::Auto => (true, "the io asked for goes through it".into()),
        Cache::Auto if options.copy == Some(false) => (true, "mapped files were asked for".into()),
        Cache::Auto => {
            // Half: the destination, the rest of the program and the cache of others need room too.
            let room = machine::memory_available() / 2;
            if cold <= room {
                (true, format!("{cold} cold bytes fit into half of the memory left ({room})"))
            } else {
                (false, format!("{cold} cold bytes do not fit into half of the memory left ({room})"))
            }
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
