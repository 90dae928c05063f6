//! A device that also sends what this rank reads for others.

use super::shared::{Outbound, PeersShared};
use crate::device::{Batch, Copied, Device, Fence};
use crate::error::Result;
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::source::{epoll, watch};
use crate::staging::Share;
use crate::sync::lock;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

pub(super) struct Sending {
    shared: Arc<PeersShared>,
    inner: Box<dyn Device>,
    /// For each parcel that is read here: its number, where in the file its slab begins, and who gets bytes of it.
    sends: HashMap<Ticket, (u32, u64, Vec<u32>)>,
    /// Batches that are being sent and copied at the same time.
    sending: HashMap<Ticket, Both>,
    wake: OwnedFd,
}

/// The progress of a batch that is both sent and copied.
#[derive(Default)]
struct Both {
    sent: Option<Copied>,
    copied: Option<Copied>,
    /// The blocks that its copies write to.
    blocks: Vec<u32>,
}

impl Sending {
    pub(super) fn new(
        shared: Arc<PeersShared>,
        inner: Box<dyn Device>,
        sends: HashMap<Ticket, (u32, u64, Vec<u32>)>,
    ) -> Result<Sending> {
        let wake = epoll()?;
        watch(&wake, inner.wake())?;
        watch(&wake, shared.copies.fd())?;
        Ok(Sending { shared, inner, sends, sending: HashMap::new(), wake })
    }
}

impl Device for Sending {
    fn stage(&mut self, share: &mut Share, nbytes: u64) {
        self.inner.stage(share, nbytes);
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.inner.wait_for(fence)
    }

    fn copy(&mut self, batch: Batch) -> Result<()> {
        let Some((parcel, offset, to)) = self.sends.remove(&batch.ticket) else { return self.inner.copy(batch) };
        let (ticket, at, keep) = (batch.ticket, batch.slab.0, batch.keep.clone());
        let mut both = Both { blocks: batch.blocks().collect(), ..Both::default() };
        if batch.copies.is_empty() && batch.strided.is_empty() {
            both.copied = Some(Copied { ticket, result: Ok(()), begun: Vec::new() });
        } else {
            self.inner.copy(batch)?;
        }
        self.sending.insert(ticket, both);
        lock(&self.shared.state).sends.push(Outbound { ticket, parcel, to, at, offset, keep });
        self.shared.orders.notify();
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Copied>) -> Result<()> {
        self.shared.copies.clear();
        let sent = std::mem::take(&mut lock(&self.shared.state).copied);
        let mut ended: Vec<Ticket> = sent.iter().map(|sent| sent.ticket).collect();
        for sent in sent {
            if let Some(both) = self.sending.get_mut(&sent.ticket) {
                both.sent = Some(sent);
            }
        }
        let mut copied = Vec::new();
        let outcome = self.inner.poll(&mut copied);
        for copied in copied {
            match self.sending.get_mut(&copied.ticket) {
                Some(both) => {
                    ended.push(copied.ticket);
                    both.copied = Some(copied);
                }
                None => done.push(copied),
            }
        }
        for ticket in ended {
            if !self.sending.get(&ticket).is_some_and(|both| both.sent.is_some() && both.copied.is_some()) {
                continue;
            }
            if let Some(Both { sent: Some(sent), copied: Some(copied), blocks, .. }) = self.sending.remove(&ticket) {
                // Where sending has failed, the copies are made.
                let begun = if copied.result.is_ok() && sent.result.is_err() { blocks } else { copied.begun };
                done.push(Copied { ticket, result: copied.result.and(sent.result), begun });
            }
        }
        outcome
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.sending.values().filter(|both| both.copied.is_some()).count()
    }

    fn abandon(&mut self) -> Vec<Ticket> {
        self.sending.clear();
        self.inner.abandon()
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }
}
