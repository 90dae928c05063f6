//! Facts about each file for the routing: its wanted bytes, and the answers of its store.

use super::layout::{BlockKind, Layout};
use super::want::Want;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::store::{Facts, Storage};
use std::ops::Range;

/// Facts about the files of a load, and nothing of their contents.
#[derive(Debug, Clone, Default)]
pub(crate) struct Survey {
    /// One entry per file of the checkpoint; `None` if nothing of the file is wanted.
    pub(crate) files: Vec<Option<Surveyed>>,
    /// System calls that residency took.
    pub(crate) probes: u64,
}

/// Facts about one file: its wanted bytes, its file system, its part of the page cache.
#[derive(Debug, Clone)]
pub(crate) struct Surveyed {
    /// Facts of its file system.
    pub(crate) facts: Facts,
    /// From the first wanted byte to the last. Residency is asked for this range only.
    pub(crate) span: Range<u64>,
    /// Wanted bytes in the span. Bytes that are wanted twice count twice.
    pub(crate) wanted: u64,
    /// Wanted bytes that do not keep their place in the file: they are copied even if the file is mapped.
    pub(crate) moved: u64,
    /// Only a part of some tensor is wanted.
    pub(crate) cut: bool,
    /// Sorted, disjoint byte ranges of the span whose pages are resident.
    pub(crate) resident: Vec<Range<u64>>,
    /// Residency was sampled, not counted.
    pub(crate) sampled: bool,
}

impl Surveyed {
    /// Bytes of the span that the page cache holds.
    pub(crate) fn warm(&self) -> u64 {
        self.resident.iter().map(|r| r.end - r.start).sum()
    }

    /// Bytes of the span that the page cache does not hold.
    pub(crate) fn missing(&self) -> u64 {
        (self.span.end - self.span.start).saturating_sub(self.warm())
    }

    /// Whether all of the span is wanted, except for a few gaps (at most a sixteenth). Slices never count as whole, even if
    /// the slice is nearly all of its tensor.
    pub(crate) fn is_whole(&self) -> bool {
        let span = self.span.end - self.span.start;
        !self.cut && self.wanted >= span - span / 16
    }
}

impl Survey {
    /// Asks the file systems about the files that `wants` need.
    pub(crate) fn new(checkpoint: &Checkpoint, wants: &[Want], layout: &Layout, files: &Storage) -> Result<Survey> {
        let mut asked: Vec<Option<OfFile>> = vec![None; checkpoint.files().len()];
        for (want, place) in wants.iter().zip(&layout.places) {
            let info = checkpoint.tensor(want.tensor);
            let of_file =
                asked[info.file as usize].get_or_insert(OfFile { span: info.begin..info.end, ..OfFile::default() });
            of_file.span = of_file.span.start.min(info.begin)..of_file.span.end.max(info.end);
            of_file.cut |= place.nbytes < info.nbytes();
            // Cannot overflow: `Layout::new` has added them up.
            of_file.wanted += place.nbytes;
            if !matches!(layout.blocks[place.block as usize].kind, BlockKind::Mirror { .. }) {
                of_file.moved += place.nbytes;
            }
        }
        let mut survey = Survey { files: Vec::with_capacity(asked.len()), probes: 0 };
        for (file, asked) in (0..).zip(asked) {
            let Some(OfFile { span, wanted, moved, cut }) = asked else {
                survey.files.push(None);
                continue;
            };
            let facts = files.facts(file)?;
            if !facts.lanes.are_possible() {
                let text = "the store gives this file a lane for memory in which that lane does not land";
                return Err(Error::new(ErrorKind::Internal, text).at(files.path(file)));
            }
            let found = files.resident_within(file, span.clone())?;
            survey.probes += u64::from(found.calls + found.samples);
            let (resident, sampled) = (found.ranges, found.samples > 0);
            survey.files.push(Some(Surveyed { facts, span, wanted, moved, cut, resident, sampled }));
        }
        Ok(survey)
    }
}

#[derive(Debug, Clone, Default)]
struct OfFile {
    span: Range<u64>,
    wanted: u64,
    moved: u64,
    cut: bool,
}
