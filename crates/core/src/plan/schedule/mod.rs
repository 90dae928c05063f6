//! Schedule: the extents to read, in order, cut and coalesced, each with its lane and its pieces.
//!
//! File by file, the runs of all wants are merged in order of their offsets and coalesced into spans. A span is divided
//! where its lane or landing changes, and each part is cut into extents. Every division falls on a page of the file
//! (or on the larger unit of O_DIRECT), and runs that touch the same page are in the same span. So no page is read
//! twice, and the extra bytes of a read in place never belong to another want. There are two exceptions. Of a file that is
//! both mapped and read the mapped bytes are populated separately. Short rows that the page cache holds have extents of
//! their own, which are read row by row: their gaps need no bound, because long ones are skipped.

mod atoms;
mod limits;
mod making;
mod ordered;
mod parcels;
mod pieces;
mod rules;

pub use self::limits::{FileTraits, Limits};
use self::making::Making;
pub use self::making::RankShares;
pub(crate) use self::making::{Alone, Section};
pub use self::ordered::{Schedule, Totals};
use super::layout::{BlockKind, Layout};
use super::want::Want;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{quoted, Checkpoint};

/// Most strips of one want: each is a separate copy, and takes 64 bytes of memory during the load.
const MOST_STRIPS: u64 = 1 << 24;

impl Schedule {
    /// Refuses slices with more strips than a schedule can list (kind `Limit`). So many strips, further apart than the
    /// default `gap`, need a file of at least 256 GiB. Strips that are nearer need dimensions, and steps, that no model has.
    pub fn check(
        checkpoint: &Checkpoint,
        wants: &[Want],
        layout: &Layout,
        files: &[FileTraits],
        limits: &Limits,
    ) -> Result<()> {
        for (want, runs) in wants.iter().zip(&layout.runs).filter(|(_, runs)| !runs.axes.is_empty()) {
            let info = checkpoint.tensor(want.tensor);
            let strips = runs.strips(files[info.file as usize].gap(limits)).count;
            if strips > MOST_STRIPS {
                let text = format!(
                    "a slice of tensor {} has {strips} pieces in its file, and one load takes at most {MOST_STRIPS}: load it in parts, \
                     load a part without gaps and slice that in memory, or raise `gap`, so that neighbours are read together",
                    quoted(info.name)
                );
                let path = &checkpoint.files()[info.file as usize].spelled;
                return Err(Error::new(ErrorKind::Limit, text).at(path).of_tensor(info.name));
            }
        }
        Ok(())
    }

    /// Cuts, coalesces, routes and orders the runs of `layout`. `files` has one entry per file of the checkpoint.
    ///
    /// Extents are cut from the start of each coalesced stretch, at multiples of the page size in the file, as long as
    /// `limits.extent` allows. The last two share the rest evenly, so that no short tail costs a read. An extent that
    /// goes through a slab leaves room there: neighbours of a block can be moved apart to the distance that they have
    /// in the block. The sum of those moves, each less than [`GPU_ALIGN`], plus `len` is at most `limits.extent`. A
    /// single page is the exception.
    pub fn new(checkpoint: &Checkpoint, layout: &Layout, files: &[FileTraits], limits: &Limits) -> Schedule {
        Self::of_rank(checkpoint, layout, files, limits, None)
    }

    /// The same, with `ranks` for one rank of several. What several want are parcels, which are extents of their own, in
    /// slabs. Those that this rank reads stand in the order with the rest. Those that others read come first of their
    /// section, in the lane of ranks.
    pub fn of_rank(
        checkpoint: &Checkpoint,
        layout: &Layout,
        files: &[FileTraits],
        limits: &Limits,
        ranks: Option<&RankShares<'_>>,
    ) -> Schedule {
        let count = layout.runs.len();
        let by_file = layout.by_file();
        let in_file_order = layout.order == by_file;
        let mut plan = Making {
            checkpoint,
            layout,
            files,
            limits,
            by_file,
            in_file_order,
            schedule: Schedule {
                extents_of_want: vec![0; count],
                stretches: stretches(layout, files, limits),
                ..Schedule::default()
            },
            last_extent: vec![u32::MAX; count],
            turn: if in_file_order { Vec::new() } else { turns(layout) },
            atoms: Vec::new(),
            breaks: Vec::new(),
            next: 0,
            carry: Vec::new(),
            scratch: Vec::new(),
            ranks,
            made: 0,
            into_memory: limits.scatter.is_some(),
        };
        let whole = [Section::whole(0)];
        for section in ranks.map_or(&whole[..], |ranks| &ranks.sections) {
            let start = plan.schedule.extents.len();
            plan.section(section);
            plan.schedule.sections.push(start..plan.schedule.extents.len());
        }
        plan.schedule
    }
}

/// See [`Schedule::stretches`].
fn stretches(layout: &Layout, files: &[FileTraits], limits: &Limits) -> Vec<u32> {
    let mut first: Vec<u32> = (0..layout.blocks.len() as u32).collect();
    let mut mirrors: Vec<(u32, u64, u64, u32)> = Vec::new();
    for (number, block) in (0..).zip(&layout.blocks) {
        if let BlockKind::Mirror { file, start } = block.kind {
            mirrors.push((file, start, start + block.nbytes, number));
        }
    }
    mirrors.sort_unstable();
    for pair in mirrors.windows(2) {
        let ((file, _, end, before), (other, start, _, block)) = (pair[0], pair[1]);
        let traits = &files[file as usize];
        if file == other && (traits.way.is_mapped() || start.saturating_sub(end) <= traits.gap(limits)) {
            first[block as usize] = first[before as usize];
        }
    }
    first
}

/// For each want: how many bytes come before it in the order.
fn turns(layout: &Layout) -> Vec<u64> {
    let mut turns = vec![0; layout.order.len()];
    let mut at = 0;
    for &want in &layout.order {
        turns[want as usize] = at;
        at += layout.runs[want as usize].nbytes();
    }
    turns
}
