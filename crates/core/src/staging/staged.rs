//! Memory of an extent that lands in a slab: a slab of this process on lease, or a part of a slab that another rank of this
//! machine lends.

use super::{Lease, Slab};
use std::sync::Arc;

/// See the module's documentation.
pub(crate) enum Staged {
    /// A slab of this process.
    Leased(Lease),
    /// A part of another rank's slab.
    Borrowed(Borrowed),
}

impl Staged {
    /// The place of the extent's first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        match self {
            Staged::Leased(lease) => lease.address(),
            Staged::Borrowed(Borrowed { slab, from, .. }) => slab.address().wrapping_add(*from),
        }
    }

    /// Bytes from there on.
    pub(crate) fn len(&self) -> usize {
        match self {
            Staged::Leased(lease) => lease.len(),
            Staged::Borrowed(Borrowed { slab, from, .. }) => slab.len() - from,
        }
    }

    /// The first byte of the slab, and its length.
    pub(crate) fn slab(&self) -> (*mut u8, usize) {
        match self {
            Staged::Leased(lease) => (lease.address(), lease.len()),
            Staged::Borrowed(Borrowed { slab, .. }) => (slab.address(), slab.len()),
        }
    }

    /// Other loads do not wait for the slab: a call that hangs may touch it at any later time.
    pub(crate) fn set_apart(&self) {
        if let Staged::Leased(lease) = self {
            lease.set_apart();
        }
    }
}

/// A call at the end of a loan.
type Returned = Box<dyn FnOnce(&Slab) + Send + Sync>;

/// A part of another rank's slab, until it is returned by its drop. Nobody writes to it before that.
pub(crate) struct Borrowed {
    slab: Arc<Slab>,
    /// The place of the extent's first byte in the slab.
    from: usize,
    returned: Option<Returned>,
}

impl Borrowed {
    /// The part of a slab that begins at byte `from`. `returned` is called when nothing reads it any more.
    pub(crate) fn new(slab: Arc<Slab>, from: usize, returned: impl FnOnce(&Slab) + Send + Sync + 'static) -> Borrowed {
        let from = from.min(slab.len());
        Borrowed { slab, from, returned: Some(Box::new(returned)) }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(returned) = self.returned.take() {
            returned(&self.slab);
        }
    }
}
