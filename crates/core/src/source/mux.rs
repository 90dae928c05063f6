//! The sources of a load whose files are in several stores, as one.

use super::{epoll, watch, Destination, Progress, Read, Source, Touches};
use crate::error::Result;
use crate::extent::Ticket;
use crate::fallback::Fallback;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Reads that wait for one source that is full, at most. With more, the next read of any store waits: then it is the whole
/// load that is too fast.
const WAITING: usize = 64;

/// Several sources as one. Room is kept per source, so that one that is full does not block the others.
pub(crate) struct Mux {
    sources: Vec<Box<dyn Source>>,
    /// For each file, the source that reads it.
    of_file: Vec<usize>,
    /// For each source, the reads for which it had no room.
    waiting: Vec<VecDeque<Read>>,
    /// The source of each read in flight.
    of_ticket: HashMap<Ticket, usize>,
    /// Reads that were given up while they waited.
    given_up: Vec<Progress>,
    wake: OwnedFd,
}

impl Mux {
    pub(crate) fn new(sources: Vec<Box<dyn Source>>, of_file: Vec<usize>) -> Result<Mux> {
        let wake = epoll()?;
        sources.iter().try_for_each(|source| watch(&wake, source.wake()))?;
        let waiting = sources.iter().map(|_| VecDeque::new()).collect();
        Ok(Mux { sources, of_file, waiting, of_ticket: HashMap::new(), given_up: Vec::new(), wake })
    }

    /// Sends what waits, as far as there is room now.
    fn send_waiting(&mut self) {
        for (source, waiting) in self.sources.iter_mut().zip(&mut self.waiting) {
            while let Some(read) = waiting.pop_front() {
                if let Err(read) = source.submit(read) {
                    waiting.push_front(read);
                    break;
                }
            }
        }
    }
}

impl Source for Mux {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let number = self.of_file[read.file as usize];
        if self.waiting[number].len() >= WAITING {
            return Err(read);
        }
        self.of_ticket.insert(read.ticket, number);
        if self.waiting[number].is_empty() {
            if let Err(read) = self.sources[number].submit(read) {
                self.waiting[number].push_back(read);
            }
        } else {
            self.waiting[number].push_back(read);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.sources.iter_mut().try_for_each(|source| source.flush())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let before = events.len();
        events.append(&mut self.given_up);
        // One that fails does not keep the others from being heard.
        let mut outcome = Ok(());
        for source in &mut self.sources {
            outcome = outcome.and(source.poll(events));
        }
        for event in &events[before..] {
            if let Progress::Done(done) = event {
                self.of_ticket.remove(&done.ticket);
            }
        }
        if self.waiting.iter().any(|waiting| !waiting.is_empty()) {
            self.send_waiting();
            outcome = outcome.and(self.flush());
        }
        outcome
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        // A ticket that no source knows: the first one says so.
        let number = self.of_ticket.get(&ticket).copied().unwrap_or(0);
        self.sources[number].land(ticket, into, keep)
    }

    fn cancel(&mut self) {
        for read in self.waiting.iter_mut().flat_map(|waiting| waiting.drain(..)) {
            self.given_up.push(Progress::Done(read.given_up()));
        }
        self.sources.iter_mut().for_each(|source| source.cancel());
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        let waiting: usize = self.waiting.iter().map(VecDeque::len).sum();
        waiting + self.given_up.len() + self.sources.iter().map(|source| source.in_flight()).sum::<usize>()
    }

    fn take_touches(&mut self) -> Touches {
        self.sources.iter_mut().fold(Touches::default(), |sum, source| sum.and(source.take_touches()))
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        self.sources.iter_mut().flat_map(|source| source.take_fallbacks()).collect()
    }
}
