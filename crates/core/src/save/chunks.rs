//! The files of a save, cut into chunks that threads take in turn.

use super::late::{Late, Phase};
use super::plan::SavePlan;
use crate::error::{Error, Result};

/// Files that are written side by side.
const SIDE_BY_SIDE: usize = 4;

/// Where a tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// In memory of this process.
    Host(u64),
    /// In memory of GPU number `.0`, at device pointer `.1`, with all work on it done.
    Gpu(u32, u64),
    /// All of a file of this machine, by its number in the plan.
    File(u32),
    /// Not in memory yet: [`Save::wanted`](super::Save::wanted) asks for it when its turn comes.
    Late,
}

/// A contiguous range of one file.
pub(super) struct Chunk {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) pieces: std::ops::Range<usize>,
}

/// A part of a chunk, and its supply. Pieces are in order and without gaps.
#[derive(Clone, Copy)]
pub(super) struct ChunkPart {
    pub(super) from: Supply,
    pub(super) len: u64,
}

#[derive(Clone, Copy)]
pub(super) enum Supply {
    Host(u64),
    Gpu(u32, u64),
    /// From byte `.1` of file number `.0`.
    File(usize, u64),
    /// From byte `.1` of late tensor number `.0` (counted among late tensors).
    Late(usize, u64),
}

/// Cuts the files into chunks of at most `extent` bytes; a few files at a time take turns. The files of a rank do not: other
/// ranks send its tensors in the order of the files.
pub(super) fn cut(plan: &SavePlan, tensors: &[At], extent: u64) -> Result<(Vec<Chunk>, Vec<ChunkPart>, Vec<Late>)> {
    let mut pieces: Vec<ChunkPart> = Vec::new();
    let mut late: Vec<Late> = Vec::new();
    let mut by_file: Vec<Vec<Chunk>> = Vec::with_capacity(plan.files.len());
    for (number, file) in plan.files.iter().enumerate() {
        let mut chunks: Vec<Chunk> = Vec::new();
        let mut add = |from: Supply, mut at: u64, mut len: u64| {
            let mut skip = 0;
            while len > 0 {
                let room = extent - at % extent;
                let part = len.min(room);
                if at % extent == 0 {
                    let from = pieces.len();
                    chunks.push(Chunk { file: number, offset: at, len: 0, pieces: from..from });
                }
                let from = match from {
                    Supply::Host(address) => Supply::Host(address + skip),
                    Supply::Gpu(ordinal, address) => Supply::Gpu(ordinal, address + skip),
                    Supply::File(number, _) => Supply::File(number, skip),
                    Supply::Late(number, _) => Supply::Late(number, skip),
                };
                pieces.push(ChunkPart { from, len: part });
                if let Some(chunk) = chunks.last_mut() {
                    chunk.len += part;
                    chunk.pieces.end = pieces.len();
                }
                (at, len, skip) = (at + part, len - part, skip + part);
            }
        };
        add(Supply::Host(file.head.as_ptr() as u64), 0, file.head.len() as u64);
        for &(tensor, offset, nbytes) in &file.places {
            let none = || Error::invalid(format!("no address is given for tensor number {tensor}"));
            let from = match *tensors.get(tensor as usize).ok_or_else(none)? {
                At::Host(address) => Supply::Host(address),
                At::Gpu(ordinal, address) => Supply::Gpu(ordinal, address),
                At::File(number) => Supply::File(number as usize, 0),
                At::Late => {
                    late.push(Late { tensor, nbytes, place: (number, offset), left: 0, phase: Phase::Away });
                    Supply::Late(late.len() - 1, 0)
                }
            };
            add(from, offset, nbytes);
        }
        by_file.push(chunks);
    }
    let mut all = Vec::with_capacity(by_file.iter().map(Vec::len).sum());
    let mut files = by_file.into_iter().map(IntoIterator::into_iter);
    let at_once = if plan.is_share { 1 } else { SIDE_BY_SIDE };
    loop {
        let mut side_by_side: Vec<_> = files.by_ref().take(at_once).collect();
        if side_by_side.is_empty() {
            for piece in &pieces {
                if let Supply::Late(number, _) = piece.from {
                    late[number].left += 1;
                }
            }
            return Ok((all, pieces, late));
        }
        while !side_by_side.is_empty() {
            side_by_side.retain_mut(|chunks| chunks.next().map(|chunk| all.push(chunk)).is_some());
        }
    }
}
