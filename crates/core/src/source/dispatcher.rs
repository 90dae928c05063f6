//! The source of a load: the sources of its lanes, as one. It alone decides which of them gets a read.
//!
//! Each source serves lanes of one store, or lanes that no store has (what comes from other ranks). A read goes to the
//! source that serves its lane. If a source refuses it, it goes on in the lane that [`Declared::refused`] names, and so does
//! every other read of that lane in that file. The report says why, once for each file and lane. A source that has both lanes
//! may do that itself.
//!
//! Room is kept for each source, so that one that is full does not block the others.

use super::{epoll, watch, Destination, Done, Progress, Read, Source, Touches};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Fence, Lane, Ticket};
use crate::fallback::Fallback;
use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Reads that wait for one source that is full, at most. With more, the next read of any store waits: then it is the whole
/// load that is too fast.
const WAITING: usize = 64;

/// A source of a store, and the lanes that it serves.
pub struct LaneSource {
    /// The lanes. An empty list stands for all lanes of its store.
    pub lanes: Vec<Lane>,
    /// The source.
    pub source: Box<dyn Source>,
}

impl LaneSource {
    /// A source of all lanes of its store.
    pub fn of_all(source: impl Source + 'static) -> LaneSource {
        LaneSource { lanes: Vec::new(), source: Box::new(source) }
    }
}

/// One of the sources.
struct Served {
    /// Its store; `None`: it serves its lanes for the files of every store.
    store: Option<usize>,
    lanes: Vec<Lane>,
    source: Box<dyn Source>,
    /// Reads for which it had no room.
    waiting: VecDeque<Read>,
}

/// Several sources as one.
pub(crate) struct Dispatcher {
    served: Vec<Served>,
    /// The store of each file. A file without an entry is in the first store.
    stores: Vec<usize>,
    /// The source of each read in flight, where there are several.
    of_ticket: HashMap<Ticket, usize>,
    /// Lanes that were refused, by file.
    refused: HashSet<(u32, Lane)>,
    fallbacks: Vec<Fallback>,
    /// Reads that were given up while they waited, or refused for good.
    over: Vec<Progress>,
    cancelled: bool,
    wake: Option<OwnedFd>,
}

impl Dispatcher {
    /// A dispatcher for files in these stores, without a source.
    pub(crate) fn new(stores: Vec<usize>) -> Dispatcher {
        let (of_ticket, refused, fallbacks) = (HashMap::new(), HashSet::new(), Vec::new());
        let (served, over, wake) = (Vec::new(), Vec::new(), None);
        Dispatcher { served, stores, of_ticket, refused, fallbacks, over, cancelled: false, wake }
    }

    /// Adds a source: of the files of one store, or of all files.
    ///
    /// # Errors
    /// The kernel's, if it gives no epoll set.
    pub(crate) fn add(&mut self, store: Option<usize>, LaneSource { lanes, source }: LaneSource) -> Result<()> {
        if let (None, [first]) = (&self.wake, &self.served[..]) {
            let wake = epoll()?;
            watch(&wake, first.source.wake())?;
            self.wake = Some(wake);
        }
        if let Some(wake) = &self.wake {
            watch(wake, source.wake())?;
        }
        self.served.push(Served { store, lanes, source, waiting: VecDeque::new() });
        Ok(())
    }

    /// The source of a read, by its lane and the store of its file. One that names the lane comes before one that has all lanes
    /// of the store.
    fn source_of(&self, read: &Read) -> Option<usize> {
        self.source_in(read.file, read.lane)
    }

    fn source_in(&self, file: u32, lane: Lane) -> Option<usize> {
        let store = self.stores.get(file as usize).copied().unwrap_or(0);
        let has = |one: &Served| one.store.is_none_or(|has| has == store);
        let named = self.served.iter().position(|one| has(one) && one.lanes.contains(&lane));
        named.or_else(|| self.served.iter().position(|one| has(one) && one.lanes.is_empty()))
    }

    /// Makes sure that each of these lanes is served, with the lanes in place of it.
    ///
    /// # Errors
    /// `Internal`, without a path: the number of the file comes with it.
    pub(crate) fn check(&self, lanes: impl Iterator<Item = (u32, Lane)>) -> Result<(), (u32, Error)> {
        let mut last = None;
        for (file, lane) in lanes.filter(|pair| last.replace(*pair) != Some(*pair)) {
            for lane in std::iter::successors(Some(lane), |lane| lane.refused) {
                if self.source_in(file, lane).is_none() {
                    let text = format!("no source of its store serves the lane {} (see Objects::sources)", lane.name);
                    return Err((file, Error::new(ErrorKind::Internal, text)));
                }
            }
        }
        Ok(())
    }

    /// The lane in which a read goes now: that of the read, or the one in place of a refused one.
    fn lane_of(&self, read: &Read) -> Lane {
        let mut lane = read.lane;
        while let Some(next) = lane.refused.filter(|_| self.refused.contains(&(read.file, lane))) {
            lane = next;
        }
        lane
    }

    /// Sends waiting reads, as far as there is room now.
    fn send_waiting(&mut self) {
        for one in &mut self.served {
            while let Some(read) = one.waiting.pop_front() {
                if let Err(read) = one.source.submit(read) {
                    one.waiting.push_front(read);
                    break;
                }
            }
        }
    }

    /// A source has refused a read: it goes on in another lane, or has failed.
    fn replace(&mut self, read: Read, cause: Error) {
        let Some(next) = read.lane.refused.filter(|_| !self.cancelled) else {
            return self.over.push(Progress::Done(match self.cancelled {
                true => read.given_up(),
                false => read.failed(cause),
            }));
        };
        let (file, lane) = (read.file, read.lane);
        let mut moved = vec![read];
        if self.refused.insert((file, lane)) {
            let (from, to) = (lane.name, next.name);
            self.fallbacks.push(Fallback { from, to, reason: cause.to_string() });
            for one in &mut self.served {
                let of_it = |read: &Read| read.file == file && read.lane == lane;
                let (these, others) = std::mem::take(&mut one.waiting).into_iter().partition::<VecDeque<_>, _>(of_it);
                moved.extend(these);
                one.waiting = others;
            }
        }
        for mut read in moved {
            read.lane = self.lane_of(&read);
            // It was taken already, so it waits however many do.
            match self.source_of(&read) {
                Some(number) => {
                    self.of_ticket.insert(read.ticket, number);
                    self.served[number].waiting.push_back(read);
                }
                None => self.over.push(Progress::Done(unserved(read))),
            }
        }
    }
}

/// The outcome of a read in a lane that nobody serves. [`Dispatcher::check`] finds those of a plan before the load.
fn unserved(read: Read) -> Done {
    let text = format!("no source of its store serves the lane {} (see Objects::sources)", read.lane.name);
    read.failed(Error::new(ErrorKind::Internal, text))
}

impl Source for Dispatcher {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let asked = read.lane;
        let read = Read { lane: self.lane_of(&read), ..read };
        // `check` has seen the lanes of a plan: this is for reads without one.
        let Some(number) = self.source_of(&read) else {
            self.over.push(Progress::Done(unserved(read)));
            return Ok(());
        };
        let several = self.served.len() > 1;
        let one = &mut self.served[number];
        if !several && one.waiting.is_empty() {
            // Nobody else is blocked: its caller waits.
            return one.source.submit(read).map_err(|read| Read { lane: asked, ..read });
        }
        if one.waiting.len() >= WAITING {
            return Err(Read { lane: asked, ..read });
        }
        self.of_ticket.insert(read.ticket, number);
        let waits = !one.waiting.is_empty();
        if let Err(read) = if waits { Err(read) } else { one.source.submit(read) } {
            one.waiting.push_back(read);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.served.iter_mut().try_for_each(|one| one.source.flush())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let before = events.len();
        // One that fails does not keep the others from being heard.
        let mut outcome = Ok(());
        for one in &mut self.served {
            outcome = outcome.and(one.source.poll(events));
        }
        if events[before..].iter().any(|event| matches!(event, Progress::Refused { .. })) {
            for event in events.split_off(before) {
                match event {
                    Progress::Refused { read, cause } => self.replace(read, cause),
                    other => events.push(other),
                }
            }
            outcome = outcome.and(self.flush());
        }
        events.append(&mut self.over);
        for event in &events[before..] {
            if let Progress::Done(Done { ticket, .. }) = event {
                self.of_ticket.remove(ticket);
            }
        }
        if self.served.iter().any(|one| !one.waiting.is_empty()) {
            self.send_waiting();
            outcome = outcome.and(self.flush());
        }
        outcome
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        // A ticket that no source knows: the first one says so.
        let number = self.of_ticket.get(&ticket).copied().unwrap_or(0);
        self.served[number].source.land(ticket, into, keep)
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        for one in &mut self.served {
            self.over.extend(one.waiting.drain(..).map(|read| Progress::Done(read.given_up())));
            one.source.cancel();
        }
    }

    fn wake(&self) -> RawFd {
        match (&self.wake, &self.served[..]) {
            (Some(wake), _) => wake.as_raw_fd(),
            (None, [only, ..]) => only.source.wake(),
            (None, []) => -1,
        }
    }

    fn in_flight(&self) -> usize {
        self.over.len() + self.served.iter().map(|one| one.waiting.len() + one.source.in_flight()).sum::<usize>()
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.served.iter_mut().try_for_each(|one| one.source.wait_for(fence))
    }

    fn take_touches(&mut self) -> Touches {
        self.served.iter_mut().fold(Touches::default(), |sum, one| sum.and(one.source.take_touches()))
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        let mut all = std::mem::take(&mut self.fallbacks);
        all.extend(self.served.iter_mut().flat_map(|one| one.source.take_fallbacks()));
        all
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extent::Declared;
    use crate::sync::{lock, Mutex};
    use crate::wake::Wake;

    /// The reads that a source got, and its events to come.
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
    fn over(rooms: &[usize]) -> (Dispatcher, Vec<Arc<Mutex<Given>>>) {
        let mut dispatcher = Dispatcher::new((0..rooms.len()).collect());
        let given = rooms.iter().enumerate().map(|(store, &room)| add(&mut dispatcher, Some(store), &[], room));
        let given = given.collect();
        (dispatcher, given)
    }

    fn add(dispatcher: &mut Dispatcher, store: Option<usize>, lanes: &[Lane], room: usize) -> Arc<Mutex<Given>> {
        let given: Arc<Mutex<Given>> = Arc::default();
        let source = Box::new(Told { room, given: given.clone(), wake: Wake::new().unwrap() });
        dispatcher.add(store, LaneSource { lanes: lanes.to_vec(), source }).unwrap();
        given
    }

    fn read(file: u32, ticket: u64) -> Read {
        let (lane, into, keep) = (Lane::BUFFERED, Destination::OnArrival, Arc::new(()));
        Read { ticket: Ticket(ticket), file, offset: 0, len: 8, need: 8, lane, into, fresh: false, written: 0, keep }
    }

    fn tickets(given: &Mutex<Given>) -> Vec<u64> {
        lock(given).reads.iter().map(|read| read.ticket.0).collect()
    }

    /// The source ends its first read.
    fn ends(given: &Mutex<Given>) {
        let mut given = lock(given);
        let read = given.reads.remove(0);
        given.events.push(Progress::Done(Done { ticket: read.ticket, result: Ok(8), lane: read.lane, written: 8 }));
    }

    fn poll(dispatcher: &mut Dispatcher) -> Vec<u64> {
        let mut events = Vec::new();
        dispatcher.poll(&mut events).unwrap();
        let ticket = |event| match event {
            Progress::Done(done) => done.ticket.0,
            Progress::Arrived(ticket) | Progress::Received(ticket) => ticket.0,
            Progress::Refused { read, .. } => panic!("{read:?}"),
        };
        events.into_iter().map(ticket).collect()
    }

    #[test]
    fn a_store_that_is_full_does_not_block_another() {
        let (mut dispatcher, given) = over(&[2, 100]);
        for ticket in 0..40 {
            dispatcher.submit(read(0, ticket)).unwrap();
            dispatcher.submit(read(1, 100 + ticket)).unwrap();
        }
        assert_eq!((tickets(&given[0]), tickets(&given[1]).len(), dispatcher.in_flight()), (vec![0, 1], 40, 80));
        // What waits is sent in order, as room is made.
        ends(&given[0]);
        assert_eq!(poll(&mut dispatcher), [0]);
        assert_eq!((tickets(&given[0]), dispatcher.in_flight()), (vec![1, 2], 79));
        // A read never overtakes those that wait.
        lock(&given[0]).reads.clear();
        dispatcher.submit(read(0, 40)).unwrap();
        assert_eq!(poll(&mut dispatcher), [0; 0]);
        assert_eq!(tickets(&given[0]), [3, 4]);
    }

    #[test]
    fn so_many_reads_wait_for_a_store_and_no_more() {
        let (mut dispatcher, _given) = over(&[1, 1]);
        let taken = (0..200).take_while(|&ticket| dispatcher.submit(read(0, ticket)).is_ok()).count();
        assert_eq!(taken, 1 + WAITING);
        assert!(dispatcher.submit(read(1, 500)).is_ok(), "the other has room");
    }

    #[test]
    fn a_place_goes_to_the_source_of_its_read_and_a_failure_keeps_nobody_from_being_heard() {
        let (mut dispatcher, given) = over(&[1, 1]);
        dispatcher.submit(read(1, 7)).unwrap();
        lock(&given[1]).events.push(Progress::Arrived(Ticket(7)));
        lock(&given[0]).fails = true;
        let mut events = Vec::new();
        assert_eq!(dispatcher.poll(&mut events).unwrap_err().kind(), ErrorKind::Io);
        assert!(matches!(events[..], [Progress::Arrived(Ticket(7))]), "{events:?}");
        dispatcher.land(Ticket(7), Destination::Memory(std::ptr::null_mut()), Arc::new(())).unwrap();
        assert_eq!((&lock(&given[0]).landed[..], &lock(&given[1]).landed[..]), (&[][..], &[Ticket(7)][..]));
    }

    #[test]
    fn what_waits_is_given_up_with_the_rest() {
        let (mut dispatcher, _given) = over(&[1, 1]);
        (0..5).for_each(|ticket| dispatcher.submit(read(0, ticket)).unwrap());
        dispatcher.cancel();
        let mut back = poll(&mut dispatcher);
        back.sort_unstable();
        assert_eq!((back, dispatcher.in_flight()), (vec![0, 1, 2, 3, 4], 0));
    }

    const COPY: Lane = Lane::new(&Declared { refused: Some(SERVER), ..Declared::named("copy") });
    const SERVER: Lane = Lane::new(&Declared::named("server"));
    const RANKS: Lane = Lane::new(&Declared::named("ranks"));

    /// Two lanes of one store, and one that no store has.
    fn lanes() -> (Dispatcher, [Arc<Mutex<Given>>; 3]) {
        let mut dispatcher = Dispatcher::new(vec![0]);
        let given = [(Some(0), COPY), (Some(0), SERVER), (None, RANKS)];
        let given = given.map(|(store, lane)| add(&mut dispatcher, store, &[lane], 2));
        (dispatcher, given)
    }

    fn by(lane: Lane, ticket: u64) -> Read {
        Read { lane, ..read(0, ticket) }
    }

    /// The source refuses its first read.
    fn refuses(given: &Mutex<Given>) {
        let mut given = lock(given);
        let read = given.reads.remove(0);
        given.events.push(Progress::Refused { read, cause: Error::new(ErrorKind::Io, "the copy is gone") });
    }

    #[test]
    fn a_read_goes_to_the_source_of_its_lane() {
        let (mut dispatcher, given) = lanes();
        for (ticket, lane) in [SERVER, COPY, RANKS, COPY].into_iter().enumerate() {
            dispatcher.submit(by(lane, ticket as u64)).unwrap();
        }
        let found: Vec<_> = given.iter().map(|given| tickets(given)).collect();
        assert_eq!(found, [vec![1, 3], vec![0], vec![2]]);
    }

    #[test]
    fn a_refused_read_goes_on_in_the_next_lane_and_so_do_later_ones() {
        let (mut dispatcher, given) = lanes();
        (0..4).for_each(|ticket| dispatcher.submit(by(COPY, ticket)).unwrap());
        refuses(&given[0]);
        refuses(&given[0]);
        // So do the two that waited for it.
        assert_eq!(poll(&mut dispatcher), [0; 0]);
        assert_eq!((tickets(&given[0]), tickets(&given[1])), (vec![], vec![0, 2]));
        dispatcher.submit(by(COPY, 4)).unwrap();
        for (ended, then) in [(0, vec![2, 3]), (2, vec![3, 1]), (3, vec![1, 4])] {
            ends(&given[1]);
            assert_eq!((poll(&mut dispatcher), tickets(&given[1])), (vec![ended], then));
        }
        let told = dispatcher.take_fallbacks();
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!((told[0].from, told[0].to), ("copy", "server"));
        assert!(told[0].reason.contains("the copy is gone"));
        assert_eq!(dispatcher.in_flight(), 2);
    }

    #[test]
    fn a_read_that_two_lanes_refuse_goes_on_in_the_third() {
        const FIRST: Lane = Lane::new(&Declared { refused: Some(COPY), ..Declared::named("first") });
        let (mut dispatcher, given) = lanes();
        let first = add(&mut dispatcher, Some(0), &[FIRST], 2);
        dispatcher.submit(by(COPY, 0)).unwrap();
        refuses(&given[0]);
        assert_eq!(poll(&mut dispatcher), [0; 0]);
        let taken = (1..).take_while(|&ticket| dispatcher.submit(by(SERVER, ticket)).is_ok()).count() as u64;
        dispatcher.submit(by(FIRST, 1000)).unwrap();
        refuses(&first);
        assert_eq!((poll(&mut dispatcher), tickets(&given[0])), (vec![], vec![]), "it passes over the refused lane");
        let mut all = Vec::new();
        while dispatcher.in_flight() > 0 {
            let there = lock(&given[1]).reads.len();
            (0..there).for_each(|_| ends(&given[1]));
            all.extend(poll(&mut dispatcher));
        }
        assert_eq!(all, (0..=taken).chain([1000]).collect::<Vec<_>>());
    }

    #[test]
    fn refused_reads_find_no_room_and_are_not_lost() {
        let (mut dispatcher, given) = lanes();
        let taken = (0..).take_while(|&ticket| dispatcher.submit(by(SERVER, ticket)).is_ok()).count() as u64;
        dispatcher.submit(by(COPY, 1000)).unwrap();
        refuses(&given[0]);
        assert_eq!((poll(&mut dispatcher), dispatcher.in_flight() as u64), (vec![], taken + 1));
        let mut all = Vec::new();
        while dispatcher.in_flight() > 0 {
            let there = lock(&given[1]).reads.len();
            (0..there).for_each(|_| ends(&given[1]));
            all.extend(poll(&mut dispatcher));
        }
        assert_eq!(all, (0..taken).chain([1000]).collect::<Vec<_>>());
    }

    #[test]
    fn a_refusal_without_another_lane_is_an_error_and_one_after_a_cancel_is_given_up() {
        let (mut dispatcher, given) = lanes();
        let kind = |dispatcher: &mut Dispatcher| {
            let mut events = Vec::new();
            dispatcher.poll(&mut events).unwrap();
            match &events[..] {
                [Progress::Done(Done { result: Err(e), .. })] => e.kind(),
                other => panic!("{other:?}"),
            }
        };
        dispatcher.submit(by(SERVER, 0)).unwrap();
        refuses(&given[1]);
        assert_eq!(kind(&mut dispatcher), ErrorKind::Io);
        dispatcher.submit(by(COPY, 1)).unwrap();
        refuses(&given[0]);
        dispatcher.cancelled = true;
        assert_eq!((kind(&mut dispatcher), dispatcher.in_flight()), (ErrorKind::Cancelled, 0));
    }

    #[test]
    fn a_lane_that_nobody_serves_is_an_error() {
        let (mut dispatcher, _given) = lanes();
        assert!(dispatcher.check([(0, COPY), (0, RANKS)].into_iter()).is_ok());
        let (file, e) = dispatcher.check([(0, COPY), (7, Lane::DIRECT)].into_iter()).unwrap_err();
        assert_eq!((file, e.to_string().contains("direct")), (7, true), "{e}");
        dispatcher.submit(by(Lane::BUFFERED, 5)).unwrap();
        assert_eq!((poll(&mut dispatcher), dispatcher.in_flight()), (vec![5], 0));
    }
}
