//! The memory of a load's blocks (one arena, mapped files, memory of the caller or of a GPU), and what fills it.

use super::addresses::Addresses;
use super::shared::internal;
use crate::device::api::Api;
use crate::device::gpu::{GpuMemory, SharedContext};
use crate::device::{Batch, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, Landing, Ticket};
use crate::machine;
use crate::memory::{Arena, Block, Keep, Mapping};
use crate::options::PAGE;
use crate::plan::layout::{BlockKind, BlockSpec, Layout};
use crate::plan::request::{Memory, Request, Where};
use crate::plan::schedule::Schedule;
use crate::source::{Destination, Read};
use crate::staging::Staged;
use crate::store::Storage;
use crate::way::Routing;
use std::sync::Arc;

/// From this much private memory on, the load asks first whether the process can have it: the kernel promises any
/// amount and kills a process that uses it. Reading the limits of control groups takes twenty system calls, which a
/// smaller load would notice.
const WORTH_ASKING: u64 = 1 << 30;

/// The memory of all blocks that have it from the start, and the fence of the caller's memory.
pub(super) fn allocate(
    layout: &Layout,
    ours: Vec<Block>,
    memory: Memory,
    at: Where,
) -> Result<(Vec<Option<Block>>, Option<Fence>)> {
    let (blocks, fence) = match (memory, at) {
        (Memory::Into { tensors, keep, fence }, _) => {
            let theirs = layout.blocks.iter().map(|block| match block.kind {
                BlockKind::Foreign { want } => Ok(Block::held(tensors[want as usize].address, keep.clone())),
                _ => Err(Error::new(ErrorKind::Internal, "a block of our own among foreign memory")),
            });
            (theirs.collect::<Result<Vec<_>>>()?, fence)
        }
        (Memory::Ours, Where::Cpu) => (ours, None),
        (Memory::Granted, Where::Cpu) => {
            return Err(Error::new(ErrorKind::Invalid, "blocks are granted for GPU targets only"));
        }
        // Granted as the engine wants them, by the caller or by the engine thread itself.
        (Memory::Ours | Memory::Granted, Where::Gpu(_)) => return Ok((vec![None; layout.blocks.len()], None)),
    };
    Ok((blocks.into_iter().map(Some).collect(), fence))
}

/// Refuses loads that can never fit. A stream is not checked: only its window is in memory at once.
pub(super) fn check_room(layout: &Layout, stretches: &[u32], routing: &Routing) -> Result<()> {
    let wanted: u64 = layout.blocks.iter().filter(|b| is_private(b, routing)).map(|b| b.nbytes).sum();
    if wanted < WORTH_ASKING {
        return Ok(());
    }
    // Gaps between the blocks of a stretch take memory too.
    let (wanted, _) = arena(layout, stretches, routing);
    let most = machine::memory_most();
    if wanted <= most {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::OutOfMemory,
        format!(
            "the load needs {wanted} bytes of private memory, but this process can have no more than {most} of memory and swap; \
             map files of a local disk instead of copying them, load fewer tensors at once, or stream them"
        ),
    ))
}

/// The block is private memory of this process. Mapped files and the caller's tensors are not.
fn is_private(block: &BlockSpec, routing: &Routing) -> bool {
    match block.kind {
        BlockKind::Mirror { file, .. } => !routing.way(file).is_mapped(),
        BlockKind::Dense => true,
        BlockKind::Foreign { .. } => false,
    }
}

/// The arena's length, and the start of each private block in it. A block starts at a page. The blocks of a stretch have
/// the same distances as in the file.
pub(super) fn arena(layout: &Layout, stretches: &[u32], routing: &Routing) -> (u64, Vec<Option<u64>>) {
    let from = |block: &BlockSpec| match block.kind {
        BlockKind::Mirror { start, .. } => start,
        _ => 0,
    };
    let private = |number: u32| is_private(&layout.blocks[number as usize], routing);
    let mut lengths = vec![0u64; layout.blocks.len()];
    for (block, &first) in layout.blocks.iter().zip(stretches).filter(|(_, first)| private(**first)) {
        let before = from(block) - from(&layout.blocks[first as usize]);
        let length = &mut lengths[first as usize];
        *length = (*length).max(before + block.nbytes.next_multiple_of(PAGE));
    }
    let mut len = 0u64;
    let mut starts: Vec<Option<u64>> = lengths
        .into_iter()
        .zip(0..)
        .map(|(length, number)| {
            let start = private(number).then_some(len);
            len = len.saturating_add(length);
            start
        })
        .collect();
    for (number, &first) in (0..).zip(stretches).filter(|(number, first)| number != *first && private(*number)) {
        let before = from(&layout.blocks[number as usize]) - from(&layout.blocks[first as usize]);
        starts[number as usize] = starts[first as usize].map(|start| start + before);
    }
    (len, starts)
}

/// Blocks in memory of this process: mapped files, and one arena for the rest; or why the kernel gives no such memory.
pub(super) fn our_blocks(
    layout: &Layout,
    stretches: &[u32],
    files: &Storage,
    routing: &Routing,
) -> Result<Result<Vec<Block>>> {
    let (arena_len, starts) = arena(layout, stretches, routing);
    let arena = match arena_len {
        0 => None,
        len => {
            let places = layout.places.iter().filter_map(|p| Some((starts[p.block as usize]? + p.offset, p.nbytes)));
            match Arena::new(len, places, routing.page_timing) {
                Ok(arena) => Some(Arc::new(arena)),
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
    };
    // Several blocks may lie in one file, and it is mapped once.
    let mut mappings: Vec<Option<Arc<Mapping>>> = vec![None; files.len()];
    for block in &layout.blocks {
        let BlockKind::Mirror { file, .. } = block.kind else { continue };
        if routing.way(file).is_mapped() && mappings[file as usize].is_none() {
            match map(files, file, routing)? {
                Ok(mapping) => mappings[file as usize] = Some(Arc::new(mapping)),
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
    }
    let block = |(block, start): (&BlockSpec, Option<u64>)| match (block.kind, start, &arena) {
        (_, Some(start), Some(arena)) => Ok(Block::arena(arena, start)),
        // Only empty tensors: any non-null aligned address will do.
        (_, Some(_), None) => Ok(Block::held(PAGE, Arc::new(()))),
        (BlockKind::Mirror { file, start }, None, _) => {
            let none = || Error::new(ErrorKind::Internal, "a block of a file that is not mapped");
            Ok(Block::mapping(mappings[file as usize].as_ref().ok_or_else(none)?, start))
        }
        (_, None, _) => Err(Error::new(ErrorKind::Internal, "a foreign block without foreign memory")),
    };
    layout.blocks.iter().zip(starts).map(block).collect::<Result<Vec<_>>>().map(Ok)
}

fn map(files: &Storage, file: u32, routing: &Routing) -> Result<Result<Mapping>> {
    let mapping = files.map(file)?;
    if let (Ok(mapping), true) = (&mapping, routing.way(file).in_part) {
        mapping.read_no_further(true);
    }
    Ok(mapping)
}

/// The blocks of a load, and the reads and copies that fill them.
pub(super) struct BlockMemory {
    pub(super) schedule: Arc<Schedule>,
    pub(super) layout: Arc<Layout>,
    /// The memory of each block, from its grant until all of its bytes are there.
    pub(super) blocks: Vec<Option<Block>>,
}

impl BlockMemory {
    /// The extent of this ticket.
    pub(super) fn extent(&self, ticket: Ticket) -> Option<&Extent> {
        self.schedule.extents.get(ticket.0 as usize)
    }

    fn addresses(&self, extent: u32) -> Addresses<'_, impl Fn(u32) -> Option<u64> + '_> {
        let base = |block: u32| self.blocks[block as usize].as_ref().map(Block::address);
        Addresses::new(&self.schedule, &self.layout, extent, base)
    }

    fn block(&self, block: u32) -> Result<&Block> {
        self.blocks[block as usize].as_ref().ok_or_else(|| internal("a block was used before it was granted"))
    }

    /// Where the read of an extent lands. `slab` is the one that it holds, if it holds one.
    pub(super) fn destination(&self, extent: u32, slab: Option<&Arc<Staged>>) -> Result<Destination> {
        if slab.is_some_and(|slab| self.schedule.extents[extent as usize].len > slab.len() as u64) {
            return Err(internal("an extent that is longer than its slab"));
        }
        self.addresses(extent).destination(slab.map(|slab| slab.address()))
    }

    /// The read of an extent.
    pub(super) fn read(&self, extent: u32, slab: Option<&Arc<Staged>>) -> Result<Read> {
        let e = &self.schedule.extents[extent as usize];
        let into = self.destination(extent, slab)?;
        let keep: Keep = match (e.landing, slab) {
            (Landing::Slab, Some(slab)) => slab.clone(),
            // It has no memory yet.
            (Landing::Slab, None) => Arc::new(()),
            _ => {
                self.prepare(extent)?;
                self.keep_blocks(extent, None)?
            }
        };
        let &Extent { file, offset, len, need, lane, .. } = e;
        let (ticket, fresh) = (ticket(extent), matches!(e.landing, Landing::Block { .. }));
        Ok(Read { ticket, file, offset, len, need, lane, into, fresh, written: 0, keep })
    }

    /// The copies of an extent out of its slab.
    pub(super) fn batch(&self, extent: u32, slab: &Arc<Staged>) -> Result<Batch> {
        let copies = self.addresses(extent).copies(slab.address())?;
        let strided = self.addresses(extent).strided(slab.address())?;
        self.prepare(extent)?;
        let keep = self.keep_blocks(extent, Some(slab.clone()))?;
        Ok(Batch { ticket: ticket(extent), slab: slab.slab(), copies, strided, keep })
    }

    /// The last step of this extent is about to write to its blocks.
    fn prepare(&self, extent: u32) -> Result<()> {
        let addresses = self.addresses(extent);
        let mut written = addresses.written();
        written.try_for_each(|(block, offset, nbytes)| self.block(block).map(|block| block.prepare(offset, nbytes)))
    }

    /// Keeps the memory of all blocks that the extent fills, and the slab.
    fn keep_blocks(&self, extent: u32, slab: Option<Arc<Staged>>) -> Result<Keep> {
        let addresses = self.addresses(extent);
        let mut keeps = addresses.blocks().map(|b| Ok(self.block(b)?.keep())).collect::<Result<Vec<Keep>>>()?;
        keeps.extend(slab.map(|slab| slab as Keep));
        Ok(match keeps.len() {
            1 => keeps.remove(0),
            _ => Arc::new(keeps),
        })
    }
}

/// The ticket of an extent is its number.
pub(super) fn ticket(extent: u32) -> Ticket {
    Ticket(u64::from(extent))
}

/// GPU blocks that the engine thread allocates itself. It retains the context when the first block is wanted: creating
/// a context takes 0.1 s and more, and the first reads go on meanwhile.
pub(super) struct GpuBlocks {
    api: Arc<Api>,
    ordinal: u32,
    context: Option<Arc<SharedContext>>,
}

impl GpuBlocks {
    /// `None` if this load has no such blocks.
    pub(super) fn wanted(request: &Request) -> Result<Option<Self>> {
        Ok(match (request.device, &request.memory) {
            (Where::Gpu(ordinal), Memory::Ours) => Some(Self { api: Api::load()?, ordinal, context: None }),
            _ => None,
        })
    }

    pub(super) fn allocate(&mut self, nbytes: u64) -> Result<Block> {
        let context = match &mut self.context {
            Some(context) => context,
            none => none.insert(SharedContext::retain(&self.api, self.ordinal)?),
        };
        let memory = GpuMemory::new(context, nbytes)?;
        Ok(Block::held(memory.address(), Arc::new(memory)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::extent::Lane;
    use crate::way::Way;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_blocks_of_a_stretch_lie_as_in_the_file_and_no_two_blocks_overlap(
            blocks in prop::collection::vec((0..5u8, 1..40_000u64, 0..5u64), 1..20),
            mapped in any::<[bool; 2]>(),
            gap in 0..5u64,
        ) {
            // Mirrors of two files, dense and foreign blocks; the numbers say nothing of the order in the file.
            let (mut layout, mut stretches, mut ends) = (Layout::default(), Vec::new(), [(0u64, None); 2]);
            for (number, &(kind, nbytes, hole)) in (0u32..).zip(&blocks) {
                let (kind, nbytes) = match kind {
                    0 => (BlockKind::Dense, nbytes),
                    1 => (BlockKind::Foreign { want: number }, nbytes),
                    n => {
                        let (file, nbytes) = (u32::from(n % 2), nbytes.next_multiple_of(PAGE));
                        let (end, before) = &mut ends[file as usize];
                        let start = *end + hole * PAGE;
                        let together = before.is_some() && (mapped[file as usize] || hole <= gap);
                        let first = before.filter(|_| together).unwrap_or(number);
                        (*end, *before) = (start + nbytes, Some(first));
                        stretches.push(first);
                        layout.blocks.push(BlockSpec { kind: BlockKind::Mirror { file, start }, nbytes });
                        continue;
                    }
                };
                stretches.push(number);
                layout.blocks.push(BlockSpec { kind, nbytes });
            }
            let count = layout.blocks.len() as u32;
            layout.blocks.reverse();
            stretches.reverse();
            stretches.iter_mut().for_each(|first| *first = count - 1 - *first);
            let mapping = |mapped: bool| mapped.then_some(Lane::MAPPED);
            let ways = mapped.map(|mapped| Way { mapping: mapping(mapped), ..Way::default() }).to_vec();
            let routing = Routing { ways, ..Routing::default() };
            let (len, starts) = arena(&layout, &stretches, &routing);
            let mut taken = Vec::new();
            for (number, block) in (0..).zip(&layout.blocks) {
                prop_assert_eq!(starts[number].is_some(), is_private(block, &routing));
                let Some(start) = starts[number] else { continue };
                prop_assert_eq!(start % PAGE, 0);
                taken.push((start, start + block.nbytes));
                let first = stretches[number] as usize;
                if let (BlockKind::Mirror { start: at, .. }, BlockKind::Mirror { start: from, .. }) =
                    (block.kind, layout.blocks[first].kind)
                {
                    prop_assert_eq!(Some(start - (at - from)), starts[first]);
                }
            }
            taken.sort_unstable();
            prop_assert!(taken.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{:?}", taken);
            prop_assert!(taken.last().is_none_or(|last| last.1 <= len));
        }
    }
}
