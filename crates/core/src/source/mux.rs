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

/// Says which source a read goes to, by its file or its ticket.
type Choose = Box<dyn Fn(&Read) -> usize + Send>;

/// Several sources as one. Room is kept per source, so that one that is full does not block the others.
pub(crate) struct Mux {
    sources: Vec<Box<dyn Source>>,
    /// The number of the source that reads it.
    choose: Choose,
    /// For each source, the reads for which it had no room.
    waiting: Vec<VecDeque<Read>>,
    /// The source of each read in flight.
    of_ticket: HashMap<Ticket, usize>,
    /// Reads that were given up while they waited.
    given_up: Vec<Progress>,
    wake: OwnedFd,
}

impl Mux {
    pub(crate) fn new(sources: Vec<Box<dyn Source>>, choose: Choose) -> Result<Mux> {
        let wake = epoll()?;
        sources.iter().try_for_each(|source| watch(&wake, source.wake()))?;
        let waiting = sources.iter().map(|_| VecDeque::new()).collect();
        Ok(Mux { sources, choose, waiting, of_ticket: HashMap::new(), given_up: Vec::new(), wake })
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
        let number = (self.choose)(&read);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};
    use crate::extent::Lane;
    use crate::source::Done;
    use crate::sync::{lock, Mutex};
    use crate::wake::Wake;

    /// What a source was given, and what it is to report.
    #[derive(Default)]
    struct Given {
        reads: Vec<Read>,
        landed: Vec<Ticket>,
        events: Vec<Progress>,
        fails: bool,
    }

    /// A source with room for so many reads, which ends those that it is told to.
    struct Told {
        room: usize,
        given: Arc<Mutex<Given>>,
        wake: Wake,
    }

    impl Source for Told {
        fn submit(&mut self, read: Read) -> Result<(), Read> {
            let mut given = lock(&self.given);
            if given.reads.len() >= self.room {
                return Err(read);
            }
            given.reads.push(read);
            Ok(())
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }

        fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
            let mut given = lock(&self.given);
            events.append(&mut given.events);
            match given.fails {
                true => Err(Error::new(ErrorKind::Io, "it fails")),
                false => Ok(()),
            }
        }

        fn land(&mut self, ticket: Ticket, _into: Destination, _keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
            lock(&self.given).landed.push(ticket);
            Ok(())
        }

        fn cancel(&mut self) {
            let mut given = lock(&self.given);
            let given_up: Vec<Read> = given.reads.drain(..).collect();
            given.events.extend(given_up.into_iter().map(|read| Progress::Done(read.given_up())));
        }

        fn wake(&self) -> RawFd {
            self.wake.fd()
        }

        fn in_flight(&self) -> usize {
            let given = lock(&self.given);
            given.reads.len() + given.events.len()
        }
    }

    /// One source over these, each with its room; file `n` is read by source `n`.
    fn over(rooms: &[usize]) -> (Mux, Vec<Arc<Mutex<Given>>>) {
        let given: Vec<Arc<Mutex<Given>>> = rooms.iter().map(|_| Arc::default()).collect();
        let source = |(&room, given): (&usize, &Arc<Mutex<Given>>)| {
            Box::new(Told { room, given: given.clone(), wake: Wake::new().unwrap() }) as Box<dyn Source>
        };
        let sources = rooms.iter().zip(&given).map(source).collect();
        (Mux::new(sources, Box::new(|read| read.file as usize)).unwrap(), given)
    }

    fn read(file: u32, ticket: u64) -> Read {
        let (route, into, keep) = (Lane::BUFFERED, Destination::OnArrival, Arc::new(()));
        Read { ticket: Ticket(ticket), file, offset: 0, len: 8, need: 8, route, into, fresh: false, written: 0, keep }
    }

    fn tickets(given: &Mutex<Given>) -> Vec<u64> {
        lock(given).reads.iter().map(|read| read.ticket.0).collect()
    }

    /// The source ends its first read.
    fn ends(given: &Mutex<Given>) {
        let mut given = lock(given);
        let read = given.reads.remove(0);
        given.events.push(Progress::Done(Done { ticket: read.ticket, result: Ok(8), route: read.route, written: 8 }));
    }

    fn poll(mux: &mut Mux) -> Vec<u64> {
        let mut events = Vec::new();
        mux.poll(&mut events).unwrap();
        let ticket = |event| match event {
            Progress::Done(done) => done.ticket.0,
            Progress::Arrived(ticket) | Progress::Received(ticket) => ticket.0,
        };
        events.into_iter().map(ticket).collect()
    }

    #[test]
    fn a_store_that_is_full_does_not_block_another() {
        let (mut mux, given) = over(&[2, 100]);
        for ticket in 0..40 {
            mux.submit(read(0, ticket)).unwrap();
            mux.submit(read(1, 100 + ticket)).unwrap();
        }
        assert_eq!((tickets(&given[0]), tickets(&given[1]).len(), mux.in_flight()), (vec![0, 1], 40, 80));
        // What waits is sent in order, as room is made.
        ends(&given[0]);
        assert_eq!(poll(&mut mux), [0]);
        assert_eq!((tickets(&given[0]), mux.in_flight()), (vec![1, 2], 79));
        // A read never overtakes those that wait.
        lock(&given[0]).reads.clear();
        mux.submit(read(0, 40)).unwrap();
        assert_eq!(poll(&mut mux), [0; 0]);
        assert_eq!(tickets(&given[0]), [3, 4]);
    }

    #[test]
    fn so_many_reads_wait_for_a_store_and_no_more() {
        let (mut mux, _given) = over(&[1, 1]);
        let taken = (0..200).take_while(|&ticket| mux.submit(read(0, ticket)).is_ok()).count();
        assert_eq!(taken, 1 + WAITING);
        assert!(mux.submit(read(1, 500)).is_ok(), "the other has room");
    }

    #[test]
    fn a_place_goes_to_the_source_of_its_read_and_a_failure_keeps_nobody_from_being_heard() {
        let (mut mux, given) = over(&[1, 1]);
        mux.submit(read(1, 7)).unwrap();
        lock(&given[1]).events.push(Progress::Arrived(Ticket(7)));
        lock(&given[0]).fails = true;
        let mut events = Vec::new();
        assert_eq!(mux.poll(&mut events).unwrap_err().kind(), ErrorKind::Io);
        assert!(matches!(events[..], [Progress::Arrived(Ticket(7))]), "{events:?}");
        mux.land(Ticket(7), Destination::Memory(std::ptr::null_mut()), Arc::new(())).unwrap();
        assert_eq!((&lock(&given[0]).landed[..], &lock(&given[1]).landed[..]), (&[][..], &[Ticket(7)][..]));
    }

    #[test]
    fn what_waits_is_given_up_with_the_rest() {
        let (mut mux, _given) = over(&[1, 1]);
        (0..5).for_each(|ticket| mux.submit(read(0, ticket)).unwrap());
        mux.cancel();
        let mut back = poll(&mut mux);
        back.sort_unstable();
        assert_eq!((back, mux.in_flight()), (vec![0, 1, 2, 3, 4], 0));
    }
}
