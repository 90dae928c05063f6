//! A device of one file: an accelerator whose memory is host memory at other addresses. It shows what a new kind of device
//! takes: this file.
#![allow(dead_code)]

use penstock::device::{Batch, Copied, Device, Fence};
use penstock::error::{Error, ErrorKind, Result};
use penstock::wake::Wake;
use std::os::fd::RawFd;

/// A device pointer is a host address with this bit changed, so a host access through it faults.
const BIAS: u64 = 1 << 60;

/// The device pointer of a host address.
pub(crate) fn pointer(address: u64) -> u64 {
    address ^ BIAS
}

/// Copies when it is polled, one batch at a time.
pub(crate) struct ToyDevice {
    queue: Vec<Batch>,
    wake: Wake,
    pid: u32,
}

impl ToyDevice {
    pub(crate) fn new() -> Result<ToyDevice> {
        Ok(ToyDevice { queue: Vec::new(), wake: Wake::new()?, pid: std::process::id() })
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "this device belongs to the parent process"))
    }
}

impl Device for ToyDevice {
    fn wait_for(&mut self, _: Fence) -> Result<()> {
        self.same_process()
    }

    fn copy(&mut self, batch: Batch) -> Result<()> {
        self.same_process()?;
        self.queue.push(batch);
        self.wake.notify();
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> Result<()> {
        self.same_process()?;
        self.wake.clear();
        if self.queue.is_empty() {
            return Ok(());
        }
        let batch = self.queue.remove(0);
        for copy in &batch.copies {
            for row in 0..copy.rows {
                let from = copy.from.wrapping_add((row * copy.from_stride) as usize);
                let to = pointer(copy.to + row * copy.to_stride) as *mut u8;
                // SAFETY: the batch keeps both sides alive, and they are different memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, copy.len as usize) };
            }
        }
        batch.strided.items(|from, to, len| {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, pointer(to) as *mut u8, len as usize) };
        });
        let ticket = batch.ticket;
        drop(batch);
        done.push(Copied { ticket, result: Ok(()), begun: Vec::new() });
        if !self.queue.is_empty() {
            self.wake.notify();
        }
        Ok(())
    }

    fn wake(&self) -> RawFd {
        self.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }
}
