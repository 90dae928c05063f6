//! How the bytes of one file are read: the rules for all extents that are cut alike.

use super::limits::{FileTraits, Limits};
use crate::extent::Lane;
use crate::options::{HUGE_PAGE, KIB, MIB, PAGE};
use crate::way::Through;
use std::ops::Range;

/// Resident stretches shorter than this are read with the cold bytes around them: two more reads cost more than they
/// save.
const RESIDENT: u64 = 64 * KIB;
/// Mapping resident pages moves no byte and touches no page. With extents this large, the cost of handing them out (20
/// us each) does not matter.
const RESIDENT_MAPPED: u64 = 1024 * MIB;

/// Rules for all extents of one file that are read alike.
pub(super) struct Rules {
    pub(super) file: u32,
    /// Divisions are at multiples of this in the file, and whole multiples are read where that is allowed.
    pub(super) unit: u64,
    /// Cuts are at multiples of this if an extent is long enough; a multiple of `unit`.
    pub(super) step: u64,
    /// Most bytes of an extent, a multiple of `unit`.
    pub(super) extent: u64,
    pub(super) gap: u64,
    /// Extents pass no multiple of this.
    pub(super) cut: Option<u64>,
    pub(super) direct_in_place: bool,
    pub(super) window: Option<u64>,
    pub(super) cold: Lane,
    pub(super) warm: Lane,
    /// Lane of what those two cannot bring.
    pub(super) parts: Lane,
    /// Sorted, disjoint, on whole units, none of them shorter than [`RESIDENT`].
    pub(super) resident: Vec<Range<u64>>,
    /// The page cache holds all wanted bytes (mapped files only).
    pub(super) all_resident: bool,
    pub(super) scatter: Option<u64>,
    /// Mirror blocks are read in place. Their padding is only one page.
    pub(super) in_place: bool,
    /// Set if rows are read one by one: the longest gap that is read.
    pub(super) rows: Option<u64>,
}

impl Rules {
    pub(super) fn mapped(file: u32, lane: Lane, traits: &FileTraits, limits: &Limits, span: Range<u64>) -> Rules {
        let all_resident = traits.resident.iter().any(|r| r.start <= span.start && r.end >= span.end);
        let extent = traits.extent(limits);
        let extent = if all_resident { extent.max(RESIDENT_MAPPED) } else { extent };
        Rules {
            file,
            unit: PAGE,
            step: if extent >= HUGE_PAGE { HUGE_PAGE } else { PAGE },
            extent: (extent / PAGE * PAGE).max(PAGE),
            gap: traits.gap(limits),
            cut: None,
            direct_in_place: limits.direct_in_place,
            window: limits.window,
            cold: lane,
            warm: lane,
            parts: lane,
            resident: Vec::new(),
            all_resident,
            scatter: None,
            in_place: true,
            rows: None,
        }
    }

    pub(super) fn read(file: u32, traits: &FileTraits, limits: &Limits, size: u64) -> Rules {
        let most = traits.extent(limits);
        let units = match traits.unit {
            Some(align) if align != 0 && PAGE % align == 0 => Some(PAGE),
            Some(align) if align % PAGE == 0 && align != 0 && align <= most => Some(align),
            _ => None,
        };
        // A file without a unit that suits is read in parts of any length.
        let usable = |lane: Lane| if lane.whole_units && units.is_none() { traits.way.parts } else { lane };
        let (cold, warm) = (usable(traits.way.cold), usable(traits.way.warm));
        let unit = units.filter(|_| cold.whole_units || warm.whole_units).unwrap_or(PAGE);
        let mut resident: Vec<Range<u64>> = Vec::new();
        if cold != warm {
            for r in &traits.resident {
                // A partly resident unit counts as cold. The exception is the end of the file.
                let end = if r.end >= size { r.end.next_multiple_of(unit) } else { r.end / unit * unit };
                let start = r.start.next_multiple_of(unit);
                match resident.last_mut() {
                    Some(last) if start <= last.end => last.end = last.end.max(end),
                    _ if start < end => resident.push(start..end),
                    _ => {}
                }
            }
            resident.retain(|r| r.end - r.start >= RESIDENT);
        }
        let extent = (most / unit * unit).max(unit);
        let gap = traits.gap(limits);
        let scatter = limits.scatter.or(cold.lands_on_device().then_some(PAGE));
        let all_resident = false;
        Rules {
            file,
            unit,
            step: if traits.way.through == Through::HugePages && unit == PAGE && extent >= HUGE_PAGE {
                HUGE_PAGE
            } else {
                unit
            },
            extent,
            gap,
            cut: traits.cut,
            direct_in_place: limits.direct_in_place,
            window: limits.window,
            cold,
            warm,
            parts: traits.way.parts,
            resident,
            all_resident,
            scatter,
            in_place: unit == PAGE,
            rows: None,
        }
    }

    /// For short rows that are read one by one. Gaps need no bound: long ones are skipped.
    pub(super) fn rows(file: u32, traits: &FileTraits, limits: &Limits, size: u64, gap: u64) -> Rules {
        let extent = (traits.extent(limits) / PAGE * PAGE).max(PAGE);
        let read = Rules::read(file, traits, limits, size);
        Rules {
            unit: PAGE,
            step: PAGE,
            extent,
            gap: u64::MAX,
            cold: traits.way.warm,
            warm: traits.way.warm,
            resident: Vec::new(),
            scatter: None,
            in_place: false,
            rows: Some(gap),
            ..read
        }
    }

    /// The lane of a read that lands in a slab.
    pub(super) fn by_slab(&self, lane: Lane) -> Lane {
        if lane.lands_on_device() {
            self.parts
        } else {
            lane
        }
    }

    pub(super) fn down(&self, at: u64) -> u64 {
        at / self.unit * self.unit
    }

    pub(super) fn up(&self, at: u64) -> u64 {
        at.next_multiple_of(self.unit)
    }
}
