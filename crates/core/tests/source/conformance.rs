//! What every source must do, run against each of them.

use crate::sample::*;
use crate::toy_store::{Server, ToyObjects, ToySource};
use crate::web::web;
use penstock::error::ErrorKind;
use penstock::extent::{Lane, Ticket};
use penstock::options::Io;
use penstock::source::{Destination, Read, RingMode, Router, Source, Threads, Throttle, Throttling, Uring};
use penstock::store::{identity_of, Files, Location, Object, Version};
use penstock::way::Routing;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Make = fn(Arc<Files>) -> Box<dyn Source>;

fn brings_the_bytes_of_random_extents(make: Make, lane: Lane) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let mut random = Random(7);
    let mut memories = HashMap::new();
    let mut reads = Vec::new();
    for ticket in 0..64 {
        let begin = random.below(SIZE);
        let end = match ticket % 4 {
            0 => SIZE,
            1 => (begin + 1 + random.below(100)).min(SIZE),
            _ => begin + 1 + random.below((SIZE - begin).min(1 << 20)),
        };
        let (read, memory) = read(lane, ticket, &sample, begin, end);
        memories.insert(ticket, (read.offset, read.need, memory));
        reads.push(read);
    }
    for done in submit_all(&mut *source, reads) {
        let (offset, need, memory) = memories.remove(&done.ticket.0).expect("a ticket came back twice");
        let got = done.result.unwrap();
        assert!(got >= need, "{got} of {need} bytes");
        let wanted = &sample.bytes[offset as usize..(offset + need) as usize];
        let at = if lane == Lane::MAPPED { offset as usize } else { 0 };
        assert!(memory.bytes()[at..at + need as usize] == *wanted, "wrong bytes at {offset}");
    }
    source.submit(read(lane, 99, &sample, 0, PAGE).0).ok().unwrap();
    wait(&mut *source, 1);
}

fn reads_on_after_short_reads(make: Make, lane: Lane) {
    if lane == Lane::MAPPED {
        return;
    }
    let sample = Sample::new();
    let files = sample.files();
    files.cap_calls(2 * PAGE);
    let mut source = make(files);
    for (ticket, begin) in [(0, 0), (1, SIZE - 70_000)] {
        let (read, memory) = read(lane, ticket, &sample, begin, (begin + 100_000).min(SIZE));
        let (offset, need) = (read.offset as usize, read.need as usize);
        let done = submit_all(&mut *source, vec![read]);
        assert!(*done[0].result.as_ref().unwrap() >= need as u64);
        assert!(memory.bytes()[..need] == sample.bytes[offset..offset + need]);
    }
}

fn an_end_of_file_before_what_is_needed_is_truncated(make: Make, lane: Lane) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let (mut read, mut memory) = read(lane, 5, &sample, SIZE - 5000, SIZE);
    if lane == Lane::MAPPED {
        (read.len, read.need) = (read.len + 1, read.need + 1);
    } else {
        memory = Memory::new(read.len + PAGE);
        (read.len, read.need) = (read.len + PAGE, read.len + 1);
        read.into = Destination::Memory(memory.at);
        read.keep = keep(&memory);
    }
    let range = read.offset..read.offset + read.need;
    let done = submit_all(&mut *source, vec![read]);
    let e = done[0].result.as_ref().unwrap_err();
    assert_eq!((e.kind(), file_of(e), e.byte_range()), (ErrorKind::Truncated, Some(&*sample.path), Some(range)), "{e}");
    let changed = memory.bytes().iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1);
    match (lane, done[0].written) {
        (Lane::MAPPED, written) => assert_eq!(written, 0, "a mapping is not written to"),
        (Lane::DIRECT, written) => assert!(written >= changed, "{written} and not {changed}"),
        (_, written) => assert_eq!(written, changed),
    }
}

fn a_file_that_is_gone_or_other_is_changed(make: Make, lane: Lane) {
    for how in ["gone", "replaced", "rewritten", "shorter"] {
        let sample = Sample::new();
        let files = sample.files();
        let (read, _memory) = read(lane, 0, &sample, 0, PAGE);
        match how {
            "gone" => fs::remove_file(&sample.path).unwrap(),
            "replaced" => {
                fs::write(sample.path.with_extension("new"), sample.bytes).unwrap();
                fs::rename(sample.path.with_extension("new"), &sample.path).unwrap();
            }
            "rewritten" => fs::write(&sample.path, sample.bytes).unwrap(),
            _ => fs::File::options().write(true).open(&sample.path).unwrap().set_len(SIZE - 1).unwrap(),
        }
        let mut source = make(files.clone());
        let done = submit_all(&mut *source, vec![read]);
        // Populating trusts the mapping, for which the file was opened and compared.
        if lane != Lane::MAPPED {
            let e = done[0].result.as_ref().unwrap_err();
            assert_eq!((e.kind(), file_of(e)), (ErrorKind::Changed, Some(&*sample.path)), "{how}: {e}");
        }
        let e = files.verify_file(0).unwrap_err();
        assert_eq!((e.kind(), e.path()), (ErrorKind::Changed, Some(&*sample.path)), "{how}: {e}");
    }
}

fn a_file_that_shrinks_under_a_load_is_an_error(make: Make, lane: Lane) {
    // Before the second read, at an odd byte of it, and at its middle.
    for size in [PAGE, (4 << 20) + 1000, (4 << 20) + 128 * PAGE + 1000] {
        let sample = Sample::new();
        let files = sample.files();
        let mut source = make(files.clone());
        let (first, _first) = read(lane, 0, &sample, 0, PAGE);
        let (second, _second) = read(lane, 1, &sample, 4 << 20, 5 << 20);
        submit_all(&mut *source, vec![first])[0].result.as_ref().unwrap();
        fs::File::options().write(true).open(&sample.path).unwrap().set_len(size).unwrap();
        let done = submit_all(&mut *source, vec![second]);
        let e = done[0].result.as_ref().unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Truncated | ErrorKind::Changed), "{size}: {e:?}");
        assert_eq!(file_of(e), Some(&*sample.path));
        assert_eq!(files.verify_file(0).unwrap_err().kind(), ErrorKind::Changed);
    }
}

fn cancelling_returns_every_ticket_once(make: Make, lane: Lane) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let mut given = Vec::new();
    for ticket in 0..200 {
        let (read, _) = read(lane, ticket, &sample, (ticket % 5) << 20, ((ticket % 5) + 1) << 20);
        if source.submit(read).is_err() {
            break;
        }
        given.push(ticket);
        if ticket == 3 {
            source.flush().unwrap();
        }
    }
    source.cancel();
    let mut back: Vec<u64> = Vec::new();
    for done in wait(&mut *source, given.len()) {
        if let Err(e) = &done.result {
            assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}");
        }
        back.push(done.ticket.0);
    }
    back.sort_unstable();
    assert_eq!(back, given);
    assert_eq!(source.in_flight(), 0);
}

fn waits_without_spinning_and_wakes_when_done(make: Make, lane: Lane) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    assert!(!readable(source.wake(), 0), "readable with nothing submitted");
    source.submit(read(lane, 0, &sample, 0, 1 << 20).0).ok().unwrap();
    source.flush().unwrap();
    assert!(readable(source.wake(), 10_000), "a finished read does not wake");
    wait(&mut *source, 1);
    assert!(!readable(source.wake(), 0), "readable with nothing left");
    let before = cpu_time();
    assert!(!readable(source.wake(), 100));
    assert!(cpu_time() - before < Duration::from_millis(20));
}

fn dropping_it_with_reads_in_flight_leaves_nothing_behind(make: Make, lane: Lane) {
    let sample = Sample::new();
    let before = belongings();
    // Each in a thread of its own, as loads are: a file with dirty pages makes io_uring start kernel threads, which count
    // as ours and stay for five seconds, or until the thread that entered the ring ends.
    let one = move |sample: &Sample, round: u64| {
        let mut source = make(sample.files());
        let mut memories = Vec::new();
        for ticket in 0..16 {
            let (read, memory) = read(lane, ticket, sample, (ticket % 5) << 20, ((ticket % 5) + 1) << 20);
            memories.push(memory);
            if source.submit(read).is_err() {
                break;
            }
        }
        if round % 2 == 0 {
            source.flush().unwrap();
        }
        drop(source);
        for memory in memories {
            assert_eq!(Arc::strong_count(&memory), 1, "a read's memory is still held");
        }
    };
    for round in 0..20 {
        std::thread::scope(|scope| scope.spawn(|| one(&sample, round)).join().unwrap());
    }
    // A thread that was joined may be listed a moment longer, on a busy machine for seconds.
    let until = Instant::now() + Duration::from_secs(20);
    while belongings() != before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(belongings(), before, "threads, descriptors");
    assert_eq!(penstock::source::quarantined(), 0);
}

/// A load that is given up is often dropped by another thread than the one that ran it; what it reads into is free then.
fn another_thread_may_drop_it(make: Make, lane: Lane) {
    let sample = Sample::new();
    for _ in 0..3 {
        let mut source = make(sample.files());
        let mut memories = Vec::new();
        for ticket in 0..6 {
            let (read, memory) = read(lane, ticket, &sample, 0, SIZE);
            memories.push(memory);
            source.submit(read).ok().unwrap();
        }
        source.flush().unwrap();
        std::thread::spawn(move || drop(source)).join().unwrap();
        // The next owner of the memory writes to it, and no other does.
        for memory in &memories {
            assert_eq!(Arc::strong_count(memory), 1, "a read's memory is still held");
            memory.mark();
        }
        std::thread::sleep(Duration::from_millis(30));
        assert!(memories.iter().all(|m| m.is_marked()), "a read wrote to memory that was free");
    }
}

macro_rules! conformance {
    ($name:ident, $lane:expr, $make:expr) => {
        mod $name {
            use super::*;
            conformance!(@each $name, $lane, $make;
                brings_the_bytes_of_random_extents
                reads_on_after_short_reads
                an_end_of_file_before_what_is_needed_is_truncated
                a_file_that_is_gone_or_other_is_changed
                a_file_that_shrinks_under_a_load_is_an_error
                cancelling_returns_every_ticket_once
                waits_without_spinning_and_wakes_when_done
                another_thread_may_drop_it
            );
            #[test]
            fn dropping_it_with_reads_in_flight_leaves_nothing_behind() {
                let name = concat!("conformance::", stringify!($name), "::dropping_it_with_reads_in_flight_leaves_nothing_behind");
                alone(name, || super::dropping_it_with_reads_in_flight_leaves_nothing_behind($make, $lane));
            }
        }
    };
    (@each $name:ident, $lane:expr, $make:expr; $($test:ident)*) => {
        $(#[test] fn $test() { super::$test($make, $lane) })*
    };
}

conformance!(threads_buffered, Lane::BUFFERED, |files| Box::new(Threads::new(files, 4, 8).unwrap()));
conformance!(threads_direct, Lane::DIRECT, |files| Box::new(Threads::new(files, 4, 8).unwrap()));
conformance!(threads_mapped, Lane::MAPPED, |files| Box::new(Threads::new(files, 4, 8).unwrap()));
conformance!(uring, Lane::DIRECT, |files| Box::new(Uring::new(files, 8).unwrap()));
conformance!(uring_cooperative, Lane::DIRECT, |files| {
    Box::new(Uring::with_modes(files, 8, &[RingMode::Cooperative]).unwrap())
});
conformance!(uring_plain, Lane::DIRECT, |files| Box::new(Uring::with_modes(files, 8, &[RingMode::Plain]).unwrap()));
conformance!(uring_buffered, Lane::BUFFERED, |files| Box::new(Uring::buffered(files, 8).unwrap()));
conformance!(router_direct, Lane::DIRECT, |files| router(files, Io::Auto));
conformance!(router_threads, Lane::DIRECT, |files| router(files, Io::Threads));
conformance!(router_buffered, Lane::BUFFERED, |files| router(files, Io::Auto));
conformance!(router_uring_buffered, Lane::BUFFERED, |files| router(files, Io::UringBuffered));
conformance!(router_mapped, Lane::MAPPED, |files| router(files, Io::Auto));
conformance!(throttle, Lane::BUFFERED, |files| {
    let inner = Box::new(Threads::new(files.clone(), 4, 8).unwrap());
    let how = Throttling { rate: Some(1 << 30), latency: Duration::from_millis(1), ..Throttling::default() };
    Box::new(Throttle::new(inner, files, how).unwrap())
});

conformance!(toy, Lane::NETWORK, toy);
conformance!(web, Lane::NETWORK, web);

/// The store of `toy_store`, which serves the file itself, with the inode as validator.
pub(crate) fn toy(files: Arc<Files>) -> Box<dyn Source> {
    let name = files.path(0).to_str().unwrap().to_owned();
    let tag = |path: &str| identity_of(Path::new(path)).ok().map(|found| format!("{found:?}"));
    let known = format!("{:?}", files.identity(0));
    let mut server = Server::by(Box::new(move |path| Some((Arc::new(fs::read(path).ok()?), tag(path)?))), Vec::new());
    server.latency = Duration::from_micros(200);
    let (location, size) = (Location::Path(name.into()), files.size(0));
    let objects = vec![Some(Object { location, size, version: Version::Strong(known) })];
    Box::new(ToySource::new(Arc::new(ToyObjects { server: Arc::new(server), objects }), 8).unwrap())
}

fn router(files: Arc<Files>, io: Io) -> Box<dyn Source> {
    Box::new(Router::new(files, io, &Arc::new(Routing { depth: 8, ..Routing::default() })).unwrap())
}

#[test]
fn a_scattered_read_fills_its_places_and_discards_the_rest() {
    let sample = Sample::new();
    let threads: Make = |files| Box::new(Threads::new(files, 2, 8).unwrap());
    let uring: Make = |files| Box::new(Uring::buffered(files, 8).unwrap());
    // More places than one call takes; and less than a piece of a gap at a time. Each call of io_uring wakes its caller once.
    for (make, cap, count) in
        [(threads, u64::MAX, 3000), (threads, PAGE, 3000), (uring, u64::MAX, 3000), (uring, 12 * PAGE, 300)]
    {
        let files = sample.files();
        files.cap_calls(cap);
        let mut source = make(files);
        let memory = Memory::new(1 << 20);
        let mut random = Random(3);
        // Gaps are longer than the scratch they go to.
        let mut places: Vec<(*mut u8, usize)> = Vec::new();
        let (mut at, mut to) = (777usize, 0usize);
        let mut expected = Vec::new();
        for i in 0..count {
            let len = if i % 100 == 1 { 150_000 } else { random.below(200) as usize };
            if i % 2 == 1 {
                places.push((std::ptr::null_mut(), len));
            } else {
                // SAFETY: 1500 places of less than 200 bytes each.
                places.push((unsafe { memory.at.add(to) }, len));
                expected.extend_from_slice(&sample.bytes[at..at + len]);
                to += len;
            }
            at += len;
        }
        let len = at as u64 - 777;
        let read = Read {
            ticket: Ticket(1),
            file: 0,
            offset: 777,
            len,
            need: len,
            lane: Lane::BUFFERED,
            into: Destination::Scatter(places),
            fresh: true,
            written: 0,
            keep: keep(&memory),
        };
        assert_eq!(*submit_all(&mut *source, vec![read])[0].result.as_ref().unwrap(), len);
        assert!(memory.bytes()[..to] == expected);
    }
}

/// Pages that are there are left to their first touch and counted; pages that may not be there are populated.
#[test]
fn resident_pages_are_left_to_their_first_touch_and_counted() {
    const LEN: u64 = (64 << 20) + 1234;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("sample.safetensors");
    let bytes: Vec<u8> = (0..LEN / 8 + 1).flat_map(u64::to_le_bytes).take(LEN as usize).collect();
    fs::write(&path, &bytes).unwrap();
    // Tensors begin where they like.
    let (offset, len) = (1000, LEN - 1000);
    let makes: [Make; 2] = [|files| Box::new(Threads::new(files, 1, 8).unwrap()), |files| router(files, Io::Auto)];
    for (make, resident) in [(makes[0], false), (makes[1], false), (makes[0], true), (makes[1], true)] {
        let mut source = make(Arc::new(Files::from_paths(&[&path]).unwrap()));
        let memory = Memory::of(&path, LEN);
        // SAFETY: within the mapping.
        let into = Destination::Mapping { at: unsafe { memory.at.add(offset as usize) }, resident };
        let (ticket, keep) = (Ticket(0), keep(&memory));
        let read =
            Read { ticket, file: 0, offset, len, need: len, lane: Lane::MAPPED, into, fresh: false, written: 0, keep };
        assert_eq!(*submit_all(&mut *source, vec![read])[0].result.as_ref().unwrap(), len);
        let unmapped = memory.unmapped();
        let touches = source.take_touches();
        assert_eq!(source.take_touches().left, 0, "counted twice");
        assert_eq!(touches.left, if resident { len } else { 0 });
        // The pages that are left cost faults only; no thread waits for a disk.
        assert!((0.0..5.0).contains(&touches.left_seconds.unwrap()), "{touches:?}");
        assert_eq!(unmapped, if resident { LEN.next_multiple_of(PAGE) } else { 0 });
        assert!(memory.bytes() == bytes, "wrong bytes");
    }
}
