//! What every source must do whose bytes come late: its reads are sent without a place, and get one when they arrive.

use crate::conformance::toy;
use crate::sample::*;
use crate::web::web;
use penstock::error::ErrorKind;
use penstock::extent::{Lane, Ticket};
use penstock::source::{Destination, Done, Progress, Read, Source};
use penstock::store::Files;
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Make = fn(Arc<Files>) -> Box<dyn Source>;

/// A read without a place, and the memory that it gets later.
fn without_place(ticket: u64, sample: &Sample, begin: u64, end: u64) -> (Read, Arc<Memory>) {
    let (read, memory) = read(Lane::BUFFERED, ticket, sample, begin, end);
    (Read { into: Destination::OnArrival, keep: Arc::new(()), ..read }, memory)
}

/// Submits reads of 10,000 bytes, as many as there is room for, at most so many.
fn submit(source: &mut dyn Source, sample: &Sample, most: u64) -> HashMap<u64, (u64, Arc<Memory>)> {
    let mut sent = HashMap::new();
    for ticket in 0..most {
        let begin = ticket * 77_777;
        let (read, memory) = without_place(ticket, sample, begin, begin + 10_000);
        if source.submit(read).is_err() {
            break;
        }
        sent.insert(ticket, (begin, memory));
    }
    source.flush().unwrap();
    assert!(!sent.is_empty());
    sent
}

fn land(source: &mut dyn Source, ticket: u64, memory: &Arc<Memory>) -> penstock::Result<()> {
    source.land(Ticket(ticket), Destination::Memory(memory.at), keep(memory))
}

/// What happens next, at the latest in 20 s.
fn next(source: &mut dyn Source) -> Vec<Progress> {
    let until = Instant::now() + Duration::from_secs(20);
    let mut events = Vec::new();
    while events.is_empty() {
        assert!(Instant::now() < until, "nothing happened in 20 s");
        source.flush().unwrap();
        readable(source.wake(), 1000);
        source.poll(&mut events).unwrap();
    }
    events
}

/// Waits for an arrival, and for nothing else.
fn arrival(source: &mut dyn Source) -> u64 {
    match next(source).remove(0) {
        Progress::Arrived(ticket) => ticket.0,
        other => panic!("{other:?}"),
    }
}

fn each_read_arrives_once_and_its_bytes_come_to_the_place_that_it_is_given(make: Make) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let sent = submit(&mut *source, &sample, 16);
    let (mut arrived, mut waiting, mut landed, mut done) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    while done.len() < sent.len() {
        for event in next(&mut *source) {
            match event {
                Progress::Arrived(ticket) => {
                    assert!(!arrived.contains(&ticket.0), "{ticket:?} arrived twice");
                    arrived.push(ticket.0);
                    waiting.push(ticket.0);
                }
                Progress::Received(ticket) => assert!(landed.contains(&ticket.0), "{ticket:?} has no place"),
                Progress::Refused { read, cause } => panic!("{read:?}: {cause}"),
                Progress::Done(Done { ticket, result, .. }) => {
                    assert!(landed.contains(&ticket.0), "{ticket:?} is done and has no place");
                    assert!(result.unwrap() >= 10_000);
                    done.push(ticket.0);
                }
            }
        }
        // The last one that has arrived first: places are given in any order.
        if let Some(ticket) = waiting.pop() {
            land(&mut *source, ticket, &sent[&ticket].1).unwrap();
            landed.push(ticket);
        }
    }
    for (begin, memory) in sent.values() {
        assert!(memory.bytes()[..10_000] == sample.bytes[*begin as usize..][..10_000], "wrong bytes at {begin}");
        assert_eq!(Arc::strong_count(memory), 1, "a read that is done holds its memory");
    }
    assert_eq!(source.in_flight(), 0);
}

fn a_read_without_a_place_waits(make: Make) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let sent = submit(&mut *source, &sample, 1);
    assert_eq!(arrival(&mut *source), 0);
    std::thread::sleep(Duration::from_millis(50));
    let mut events = Vec::new();
    source.poll(&mut events).unwrap();
    assert!(events.is_empty() && source.in_flight() == 1, "{events:?}");
    assert!(!readable(source.wake(), 0), "it wakes, and there is nothing to hear");
    land(&mut *source, 0, &sent[&0].1).unwrap();
    assert!(matches!(&next(&mut *source)[..], [Progress::Done(_)]));
}

fn bytes_go_to_several_places_and_some_to_none(make: Make) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let sent = submit(&mut *source, &sample, 1);
    let (begin, memory) = &sent[&0];
    assert_eq!(arrival(&mut *source), 0);
    // SAFETY: within the memory of 10,000 bytes.
    let behind = unsafe { memory.at.add(4000) };
    let places = vec![(memory.at, 4000), (std::ptr::null_mut(), 1000), (behind, 5000)];
    source.land(Ticket(0), Destination::Scatter(places), keep(memory)).unwrap();
    assert!(matches!(&next(&mut *source)[..], [Progress::Done(_)]));
    let file = &sample.bytes[*begin as usize..][..10_000];
    assert!(memory.bytes()[..4000] == file[..4000] && memory.bytes()[4000..9000] == file[5000..]);
}

fn a_place_for_a_read_that_has_not_arrived_is_refused(make: Make) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let memory = Memory::new(10_000);
    assert_eq!(land(&mut *source, 99, &memory).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(Arc::strong_count(&memory), 1);
}

fn cancelling_gives_up_what_has_arrived_and_what_has_not(make: Make) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let sent = submit(&mut *source, &sample, 6);
    let first = arrival(&mut *source);
    source.cancel();
    // Who has not polled since does not know that it is over.
    land(&mut *source, first, &sent[&first].1).unwrap();
    let mut back = Vec::new();
    while back.len() < sent.len() {
        for event in next(&mut *source) {
            let Progress::Done(done) = event else { panic!("{event:?} after `cancel`") };
            if let Err(e) = done.result {
                assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}");
            }
            back.push(done.ticket.0);
        }
    }
    back.sort_unstable();
    assert_eq!(back, (0..sent.len() as u64).collect::<Vec<_>>());
    assert_eq!(source.in_flight(), 0);
    assert!(sent.values().all(|(_, memory)| Arc::strong_count(memory) == 1));
}

fn dropping_it_releases_what_has_arrived_and_what_has_landed(make: Make) {
    let sample = Sample::new();
    for lands in [false, true] {
        let mut source = make(sample.files());
        let kept: Arc<dyn Any + Send + Sync> = Arc::new(());
        let (read, memory) = without_place(0, &sample, 0, SIZE);
        source.submit(Read { keep: kept.clone(), ..read }).ok().unwrap();
        source.flush().unwrap();
        assert_eq!(arrival(&mut *source), 0);
        if lands {
            land(&mut *source, 0, &memory).unwrap();
        }
        drop(source);
        assert_eq!((Arc::strong_count(&kept), Arc::strong_count(&memory)), (1, 1));
    }
}

macro_rules! arrivals {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;
            arrivals!(@each $make;
                each_read_arrives_once_and_its_bytes_come_to_the_place_that_it_is_given
                a_read_without_a_place_waits
                bytes_go_to_several_places_and_some_to_none
                a_place_for_a_read_that_has_not_arrived_is_refused
                cancelling_gives_up_what_has_arrived_and_what_has_not
                dropping_it_releases_what_has_arrived_and_what_has_landed
            );
        }
    };
    (@each $make:expr; $($test:ident)*) => {
        $(#[test] fn $test() { super::$test($make) })*
    };
}

arrivals!(of_the_toy, toy);
arrivals!(of_a_web_server, web);
