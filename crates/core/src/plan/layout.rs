//! Layout: the place of every want in the destination blocks. It is pure: the same input gives the same layout on every
//! rank.
//!
//! A want's block depends on one question: can its bytes keep the offset within a page that they have in the file? If
//! the want is a single run whose file offset suits its dtype, it can be mapped, or read in place into memory that
//! mirrors the file. Everything else is copied to dense memory. Two wants never share bytes of a block, because the
//! caller may write to a tensor.

use super::strides::{Foreign, Strides};
use super::want::{Runs, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{layer, quoted, Checkpoint};
use crate::options::{Order, CPU_ALIGN, GPU_ALIGN, LEAST_GAP, PAGE, SHARED_BLOCK};
use hashbrown::HashMap;
use std::cmp::Reverse;

/// The kind of memory that the wants go to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Memory of this machine: the files themselves where they are mapped, else private memory.
    Cpu {
        /// Tensors that a file misaligns keep their place in it, for consumers that read any address. Otherwise they go to
        /// dense blocks.
        misaligned: bool,
    },
    /// Memory of one accelerator, dense blocks.
    Gpu,
    /// Memory of the caller: one block per want, in order of the wants.
    Foreign,
}

/// One destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSpec {
    /// The kind of memory.
    pub kind: BlockKind,
    /// Its size in bytes.
    pub nbytes: u64,
}

/// The kind of memory of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// Bytes `start..start + nbytes` of file `file`, at their offsets in it (`start` is a multiple of the page size). Either
    /// the file's mapping, or private memory in which reads land directly: the layout does not say which.
    Mirror {
        /// The file.
        file: u32,
        /// File offset of the block's first byte.
        start: u64,
    },
    /// Dense memory with tensor starts aligned to 64 B (CPU) or 256 B (GPU).
    Dense,
    /// The caller's tensor, number `want` of the wants.
    Foreign {
        /// The want whose tensor it is.
        want: u32,
    },
}

/// Where a want's bytes go: `Runs::nbytes` dense bytes from `offset` in block number `block`. If the caller's tensor is
/// strided or of another dtype, the offsets of a place count the checkpoint's bytes in dense order: see [`Layout::strides`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Number of the block in [`Layout::blocks`].
    pub block: u32,
    /// Offset in the block, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub nbytes: u64,
}

/// The place of every want.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// The destinations, in the order in which hand-out first touches them.
    pub blocks: Vec<BlockSpec>,
    /// One place per want, in order of the wants.
    pub places: Vec<Place>,
    /// One set of runs per want, in order of the wants.
    pub runs: Vec<Runs>,
    /// The file of each want, in order of the wants.
    pub files: Vec<u32>,
    /// Want numbers in the order of reading and hand-out.
    pub order: Vec<u32>,
    /// How the caller's tensors lie in their blocks, and whether elements are converted, in order of the wants: `None` for
    /// contiguous ones of the checkpoint's dtype. Empty if all are. [`Layout::new`] knows of none: they come with the caller's
    /// memory.
    pub strides: Vec<Option<Strides>>,
}

/// A want of at least this many bytes has its own dense block, so that dropping it gives its memory back. Smaller
/// neighbours share blocks.
const OWN_BLOCK: u64 = SHARED_BLOCK / 4;

/// Bytes between two wants that one mirror block spans at most. A constant, the default of `Options.gap`: what a load reads
/// may depend on its options, where a tensor lies does not.
const GAP: u64 = LEAST_GAP;

/// Most bytes of all blocks, or of all places, of one layout.
const MOST: u64 = i64::MAX as u64;

/// "No block yet" while blocks are numbered.
const NONE: u32 = u32::MAX;

impl Layout {
    /// Lays `wants` out for `target` in the given order.
    ///
    /// [`Order::Layer`] groups tensors by the first number in their dotted name, together with the text before it
    /// (`model.layers.9.`, `model.layers.10.`, in numeric order). Tensors without a number are grouped by the module
    /// that owns them (`model.norm.`). A group of layers, or a module without a number, stands where its first tensor
    /// stands in the files. So embeddings that come before the layers in the file stay before them, and tensors that
    /// come after the first tensor of the layers come after the last layer. Within a group the order is that of the
    /// file. [`Order::Asked`] is the order of the wants; what is near in it and in the file is read together.
    ///
    /// # Errors
    /// The errors of [`Runs::of`]. `Limit` for more than 2^32 - 2 wants, for blocks that together have more bytes than an
    /// address space (a sparse file may be that large, and wanted many times).
    pub fn new(checkpoint: &Checkpoint, wants: &[Want], target: &Target, order: Order) -> Result<Layout> {
        if wants.len() >= NONE as usize {
            return Err(Error::new(ErrorKind::Limit, format!("{} wants: at most 2^32 - 2 fit one load", wants.len())));
        }
        let runs = wants.iter().map(|w| Runs::of(checkpoint, w)).collect::<Result<Vec<_>>>()?;
        let files = wants.iter().map(|w| checkpoint.tensor(w.tensor).file).collect();
        let mut layout = Layout { places: Vec::with_capacity(wants.len()), runs, files, ..Layout::default() };
        let by_file = layout.by_file();
        layout.order = match order {
            Order::File => by_file.clone(),
            Order::Layer => by_layer(checkpoint, wants, &by_file),
            Order::Asked => (0..wants.len() as u32).collect(),
        };
        match target {
            Target::Foreign => {
                for (want, runs) in (0..).zip(&layout.runs) {
                    layout.blocks.push(BlockSpec { kind: BlockKind::Foreign { want }, nbytes: runs.nbytes() });
                    layout.places.push(Place { block: want, offset: 0, nbytes: runs.nbytes() });
                }
            }
            Target::Gpu => layout.place(&Homes::default(), GPU_ALIGN),
            Target::Cpu { misaligned } => {
                let homes = Homes::find(checkpoint, wants, &layout, &by_file, *misaligned);
                layout.place(&homes, CPU_ALIGN);
            }
        }
        layout.check_size()?;
        Ok(layout)
    }

    /// Takes what is particular to the caller's memory: `tensors`, one per want, in memory of the host (`cpu`) or of a GPU.
    ///
    /// # Errors
    /// `Invalid` if there is not one per want. `Mismatch` if one does not have the size or the number of elements of its want.
    /// `Invalid` if the elements of one lie behind it, or may share bytes. `Unsupported` for casts that loads do not make.
    pub(crate) fn fill(
        &mut self,
        checkpoint: &Checkpoint,
        wants: &[Want],
        tensors: &[Foreign],
        cpu: bool,
    ) -> Result<()> {
        if tensors.len() != self.places.len() {
            return Err(Error::new(ErrorKind::Invalid, "there must be one destination per want"));
        }
        for (want, tensor) in tensors.iter().enumerate() {
            let place = self.places[want];
            let info = checkpoint.tensor(wants[want].tensor);
            let named =
                |e: Error| e.reworded(|text| format!("tensor {}: {text}", quoted(info.name))).of_tensor(info.name);
            if let Some(strides) = tensor.strides(&info, place.nbytes, cpu).map_err(named)? {
                self.blocks[place.block as usize].nbytes = strides.span();
                self.strides.resize(self.places.len(), None);
                self.strides[want] = Some(strides);
            }
        }
        self.check_size()
    }

    /// How the destination of a want is strided or converted; `None` if its bytes are contiguous.
    pub(crate) fn strides_of(&self, want: u32) -> Option<&Strides> {
        self.strides.get(want as usize)?.as_ref()
    }

    /// Refuses sizes that no address space holds, so that sums of a layout's bytes cannot overflow.
    pub(super) fn check_size(&self) -> Result<()> {
        let blocks = self.blocks.iter().try_fold(0u64, |n, b| n.checked_add(b.nbytes.checked_next_multiple_of(PAGE)?));
        let places = self.places.iter().try_fold(0u64, |n, p| n.checked_add(p.nbytes));
        match (blocks, places) {
            (Some(0..=MOST), Some(0..=MOST)) => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Limit,
                format!("the {} wants have more than 2^63 bytes together; load them in parts", self.places.len()),
            )),
        }
    }

    /// Want numbers by file and offset. Among wants that start together, the longest run comes first. The wants'
    /// numbers decide only between wants of the same bytes.
    pub(crate) fn by_file(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.runs.len() as u32).collect();
        let key = |&w: &u32| {
            let runs = &self.runs[w as usize];
            (self.files[w as usize], runs.start, Reverse(runs.len), &runs.axes, w)
        };
        // Wants usually come in file order already, and the check is much cheaper than a sort.
        if !order.is_sorted_by_key(key) {
            order.sort_unstable_by(|a, b| key(a).cmp(&key(b)));
        }
        order
    }

    /// How many wants lie in each block.
    pub(crate) fn wants_per_block(&self) -> Vec<u32> {
        let mut wants = vec![0; self.blocks.len()];
        self.places.iter().for_each(|p| wants[p.block as usize] += 1);
        wants
    }

    /// Numbers blocks and places wants, in hand-out order.
    fn place(&mut self, homes: &Homes, align: u64) {
        self.places.resize(self.runs.len(), Place { block: NONE, offset: 0, nbytes: 0 });
        let mut numbers = vec![NONE; homes.blocks.len()];
        let mut shared = NONE;
        for &want in &self.order {
            let nbytes = self.runs[want as usize].nbytes();
            let home = homes.of_want.get(want as usize).map_or(NONE, |h| *h);
            let (block, offset) = if let Some(spec) = homes.blocks.get(home as usize) {
                let number = &mut numbers[home as usize];
                if *number == NONE {
                    *number = self.blocks.len() as u32;
                    self.blocks.push(*spec);
                }
                let first = match spec.kind {
                    BlockKind::Mirror { start, .. } => start,
                    _ => 0,
                };
                (*number, self.runs[want as usize].start - first)
            } else {
                // An empty want needs a place but no bytes: it gets the current end of the shared block.
                let used = self.blocks.get(shared as usize).map(|b| b.nbytes.next_multiple_of(align));
                match used {
                    Some(at) if nbytes < OWN_BLOCK && at + nbytes <= SHARED_BLOCK => {
                        self.blocks[shared as usize].nbytes = at + nbytes;
                        (shared, at)
                    }
                    _ => {
                        let number = self.blocks.len() as u32;
                        self.blocks.push(BlockSpec { kind: BlockKind::Dense, nbytes });
                        if nbytes < OWN_BLOCK {
                            shared = number;
                        }
                        (number, 0)
                    }
                }
            };
            self.places[want as usize] = Place { block, offset, nbytes };
        }
    }
}

/// Mirror blocks that hold wants, not yet numbered, and which want lives in which of them.
#[derive(Default)]
struct Homes {
    blocks: Vec<BlockSpec>,
    /// `NONE`, or beyond the end, for wants that go to dense blocks.
    of_want: Vec<u32>,
}

impl Homes {
    fn find(checkpoint: &Checkpoint, wants: &[Want], layout: &Layout, by_file: &[u32], misaligned: bool) -> Homes {
        let mut homes = Homes { blocks: Vec::new(), of_want: vec![NONE; wants.len()] };
        // The file, and up to where its bytes belong to wants that live in place.
        let mut taken = (NONE, 0);
        for &want in by_file {
            let (file, runs) = (layout.files[want as usize], &layout.runs[want as usize]);
            let aligned = misaligned || runs.start % checkpoint.tensor(wants[want as usize].tensor).dtype.align() == 0;
            let overlaps = taken.0 == file && runs.start < taken.1;
            if runs.len == 0 || !runs.axes.is_empty() || !aligned || overlaps {
                continue;
            }
            let end = runs.end();
            let open = homes.blocks.last_mut().filter(|_| taken.0 == file);
            let (first, past) = (runs.start / PAGE * PAGE, end.next_multiple_of(PAGE));
            match open {
                // Two mirrors never touch the same page, so that reads in place cannot overlap.
                Some(BlockSpec { kind: BlockKind::Mirror { start, .. }, nbytes })
                    if first <= *start + *nbytes || runs.start - taken.1 <= GAP =>
                {
                    *nbytes = past - *start;
                }
                _ => homes
                    .blocks
                    .push(BlockSpec { kind: BlockKind::Mirror { file, start: first }, nbytes: past - first }),
            }
            homes.of_want[want as usize] = homes.blocks.len() as u32 - 1;
            taken = (file, end);
        }
        homes
    }
}

/// Numbers of all tensors of a checkpoint, in the order in which a load of all of them reads: see [`Layout::new`].
pub fn tensors_in_order(checkpoint: &Checkpoint, order: Order) -> Vec<u32> {
    let by_file: Vec<u32> = (0..checkpoint.len() as u32).collect();
    match order {
        Order::File | Order::Asked => by_file,
        Order::Layer => by_layer(checkpoint, &Want::all(checkpoint), &by_file),
    }
}

/// Want numbers grouped by layer, see [`Layout::new`].
fn by_layer(checkpoint: &Checkpoint, wants: &[Want], by_file: &[u32]) -> Vec<u32> {
    let mut stacks: HashMap<(&str, bool), u32> = HashMap::new();
    let mut keyed: Vec<(u32, u64, u32, u32)> = Vec::with_capacity(wants.len());
    for (position, &want) in (0..).zip(by_file) {
        let name = checkpoint.tensor(wants[want as usize].tensor).name;
        let (group, number) = layer(name);
        let stack = *stacks.entry((group, number.is_some())).or_insert(position);
        keyed.push((stack, number.unwrap_or(0), position, want));
    }
    keyed.sort_unstable();
    keyed.into_iter().map(|k| k.3).collect()
}
