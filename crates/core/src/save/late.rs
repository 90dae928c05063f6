//! Tensors that are made when their turn comes.

use crate::error::Result;
use crate::memory::Anonymous;
use crate::options::HUGE_PAGE;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A tensor that is in memory while chunks with parts of it are written.
pub(super) struct Late {
    pub(super) tensor: u32,
    pub(super) nbytes: u64,
    /// The file that it is written to, and its first byte there.
    pub(super) place: (usize, u64),
    /// Pieces of it that are not written yet.
    pub(super) left: usize,
    pub(super) phase: Phase,
}

/// How far ahead of the writes late tensors are made: those that are not written yet have at most `room` bytes, or are of one
/// chunk.
pub(super) struct LateWindow {
    /// Bytes of all late tensors up to each one.
    ends: Vec<u64>,
    room: u64,
    /// The first late tensor that is not written.
    first: AtomicUsize,
}

impl LateWindow {
    pub(super) fn new(late: &[Late], room: u64) -> LateWindow {
        let mut ends = Vec::with_capacity(late.len());
        for late in late {
            ends.push(ends.last().unwrap_or(&0) + late.nbytes);
        }
        LateWindow { ends, room, first: AtomicUsize::new(0) }
    }

    /// True if a chunk with these late tensors may have them made. The chunk that is the furthest behind always may: nothing
    /// would become free before it is written.
    pub(super) fn admits(&self, late: &[Late], of_chunk: RangeInclusive<usize>) -> bool {
        let mut first = self.first.load(Ordering::Relaxed);
        while late.get(first).is_some_and(|late| late.left == 0) {
            first += 1;
        }
        self.first.store(first, Ordering::Relaxed);
        let written = first.checked_sub(1).map_or(0, |before| self.ends[before]);
        *of_chunk.start() <= first || self.ends[*of_chunk.end()] - written <= self.room
    }
}

pub(super) enum Phase {
    /// Not wanted yet, or written.
    Away,
    Wanted(Made),
    There(Made),
}

impl Late {
    /// True if nobody has begun to make it, and pieces of it are to be written.
    pub(super) fn is_due(&self) -> bool {
        matches!(self.phase, Phase::Away) && self.left > 0
    }

    /// Bytes of memory that it takes now.
    pub(super) fn held(&self) -> u64 {
        match &self.phase {
            Phase::Away => 0,
            Phase::Wanted(made) | Phase::There(made) => made.nbytes(),
        }
    }
}

pub(super) enum Made {
    Small(Vec<u8>),
    /// Not from the allocator, which keeps freed memory for each thread.
    Large(Anonymous),
    /// At this address of a snapshot, which outlives the crew.
    Placed(u64),
}

impl Made {
    pub(super) fn new(nbytes: u64) -> Result<Made> {
        Ok(if nbytes < HUGE_PAGE {
            Made::Small(vec![0; nbytes as usize])
        } else {
            Made::Large(Anonymous::new(nbytes)?)
        })
    }

    /// Bytes of memory that it takes by itself.
    pub(super) fn nbytes(&self) -> u64 {
        match self {
            Made::Small(bytes) => bytes.len() as u64,
            Made::Large(memory) => memory.len() as u64,
            Made::Placed(_) => 0,
        }
    }

    pub(super) fn at(&mut self) -> *mut u8 {
        match self {
            Made::Small(bytes) => bytes.as_mut_ptr(),
            Made::Large(memory) => memory.at(),
            Made::Placed(address) => *address as *mut u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(left: &[usize]) -> Vec<Late> {
        left.iter().map(|&left| Late { tensor: 0, nbytes: 10, place: (0, 0), left, phase: Phase::Away }).collect()
    }

    #[test]
    fn tensors_that_are_not_written_fit_into_the_room() {
        let tensors = late(&[0, 1, 2, 1, 1, 1]);
        let window = LateWindow::new(&tensors, 30);
        assert!(window.admits(&tensors, 2..=3), "1, 2 and 3 are not written");
        assert!(!window.admits(&tensors, 4..=4));
        assert!(window.admits(&late(&[0, 0, 2, 1, 1, 1]), 4..=4), "1 is written by now");
    }

    #[test]
    fn the_chunk_that_is_the_furthest_behind_always_goes_on() {
        let tensors = late(&[1, 1, 1]);
        let window = LateWindow::new(&tensors, 5);
        assert!(window.admits(&tensors, 0..=1));
        assert!(!window.admits(&tensors, 1..=2), "the first tensor is not written");
        assert!(window.admits(&late(&[0, 1, 1]), 1..=2));
    }
}
