//! A source of the bytes that other ranks read for this one.

use super::shared::{PeersShared, Placed};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::source::{Destination, Progress, Read, Source};
use crate::sync::lock;
use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;

pub(super) struct Receiving {
    shared: Arc<PeersShared>,
    /// The parcel of each ticket.
    parcels: Arc<[Option<u32>]>,
    in_flight: usize,
    told_failure: bool,
}

impl Receiving {
    pub(super) fn new(shared: Arc<PeersShared>, parcels: Arc<[Option<u32>]>) -> Receiving {
        Receiving { shared, parcels, in_flight: 0, told_failure: false }
    }
}

impl Source for Receiving {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let Some(Some(parcel)) = self.parcels.get(read.ticket.0 as usize).copied() else { return Err(read) };
        self.in_flight += 1;
        lock(&self.shared.state).reads.push((parcel, read));
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.shared.orders.notify();
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.shared.reads.clear();
        let mut state = lock(&self.shared.state);
        self.in_flight -= state.events.iter().filter(|event| matches!(event, Progress::Done(_))).count();
        events.append(&mut state.events);
        match &state.failure {
            Some(failure) if !std::mem::replace(&mut self.told_failure, true) => Err(failure.clone()),
            _ => Ok(()),
        }
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        if !matches!(self.parcels.get(ticket.0 as usize), Some(Some(_))) {
            let text = format!("ticket {} was given a place, and no rank sends it; please report this", ticket.0);
            return Err(Error::new(ErrorKind::Internal, text));
        }
        lock(&self.shared.state).landed.push(Placed { ticket, into, keep });
        self.shared.orders.notify();
        Ok(())
    }

    fn cancel(&mut self) {
        lock(&self.shared.state).cancelled = true;
        self.shared.orders.notify();
    }

    fn wake(&self) -> RawFd {
        self.shared.reads.fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        std::mem::take(&mut lock(&self.shared.state).fallbacks)
    }
}
