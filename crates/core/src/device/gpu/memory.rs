//! Memory of an accelerator that Penstock allocates itself.

use super::context::{refuse_a_forked_child, SharedContext};
use crate::error::Result;
use std::sync::Arc;

/// Accelerator memory of our own, for use without a framework.
pub struct GpuMemory {
    context: Arc<SharedContext>,
    address: u64,
    nbytes: u64,
}

impl GpuMemory {
    /// `nbytes` bytes (at least one) of fresh memory, at an address that is a multiple of 256.
    ///
    /// # Errors
    /// `OutOfMemory`, `Device`, `Forked`.
    pub fn new(context: &Arc<SharedContext>, nbytes: u64) -> Result<Self> {
        refuse_a_forked_child()?;
        let address = context.enter()?.alloc(nbytes.max(1) as usize)?;
        Ok(Self { context: context.clone(), address, nbytes })
    }

    /// The device pointer.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if let Some(current) = self.context.enter_to_undo() {
            // SAFETY: from `alloc`, freed once. Batches keep their blocks until their copies have completed, and a
            // consumer that handed work on it to a stream waits before it lets go (invariant 4).
            let _ = unsafe { current.free(self.address) };
        }
    }
}
