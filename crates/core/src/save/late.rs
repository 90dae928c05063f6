//! Tensors that are made when their turn comes.

use crate::error::Result;
use crate::memory::Anonymous;
use crate::options::HUGE_PAGE;

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

/// True if the late tensors of a chunk may be made: with them those in memory have at most `room` bytes, or the chunk is the first
/// one that is not written. That one always goes on, or nothing would become free.
pub(super) fn may_be_made(late: &[Late], of_chunk: &[usize], held: u64, room: u64, is_first: bool) -> bool {
    let more: u64 =
        of_chunk.iter().map(|number| &late[*number]).filter(|late| late.is_due()).map(|late| late.nbytes).sum();
    is_first || more == 0 || held + more <= room
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
    fn tensors_in_memory_fit_into_the_room() {
        let tensors = late(&[1, 2, 1]);
        assert!(may_be_made(&tensors, &[0, 1], 10, 30, false));
        assert!(!may_be_made(&tensors, &[0, 1], 11, 30, false));
        assert!(may_be_made(&late(&[0, 1, 1]), &[0, 1], 20, 30, false), "0 is written, and is not made again");
        assert!(may_be_made(&late(&[0, 0, 1]), &[0, 1], 99, 30, false), "none is made");
    }

    #[test]
    fn the_first_chunk_that_is_not_written_always_goes_on() {
        assert!(may_be_made(&late(&[1, 1, 1]), &[0, 1, 2], 99, 5, true));
    }
}
