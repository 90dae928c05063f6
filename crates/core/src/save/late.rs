//! Tensors that are made when their turn comes.

use crate::error::Result;
use crate::memory::Anonymous;
use crate::options::HUGE_PAGE;

/// A tensor that is in memory while chunks with parts of it are written.
pub(super) struct Late {
    pub(super) tensor: u32,
    pub(super) nbytes: u64,
    /// Pieces of it that are not written yet.
    pub(super) left: usize,
    pub(super) phase: Phase,
}

pub(super) enum Phase {
    /// Not wanted yet, or written.
    Away,
    Wanted(Made),
    There(Made),
}

pub(super) enum Made {
    Small(Vec<u8>),
    /// Not from the allocator, which keeps freed memory for each thread.
    Large(Anonymous),
}

impl Made {
    pub(super) fn new(nbytes: u64) -> Result<Made> {
        Ok(if nbytes < HUGE_PAGE {
            Made::Small(vec![0; nbytes as usize])
        } else {
            Made::Large(Anonymous::new(nbytes)?)
        })
    }

    pub(super) fn at(&mut self) -> *mut u8 {
        match self {
            Made::Small(bytes) => bytes.as_mut_ptr(),
            Made::Large(memory) => memory.at(),
        }
    }
}
