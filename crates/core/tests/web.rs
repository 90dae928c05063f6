//! Opening and loading over HTTP, from a server that does what its script says.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

mod web_server;

use penstock::error::{ErrorKind, Result};
use penstock::extent::{Lane, Ticket};
use penstock::options::{Io, Options};
use penstock::source::{Destination, Progress, Read, Source};
use penstock::store::{
    Bearer, Location, Object, Objects, Proxies, Secret, StorageSettings, Store, Stores, Version, Web, WebSettings,
};
use penstock::{Checkpoint, Load, Memory, Request, Want, Where};
use std::collections::{BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use web_server::{Asked, Contents, Fault, WebServer};

const SIZE: usize = 3_000_017;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect()
}

/// One object at `/o.safetensors`, on a server with this script.
fn serving(script: impl Fn(&Asked) -> Fault + Send + Sync + 'static) -> WebServer {
    let contents = Contents::default();
    let object = (Arc::new(bytes(SIZE)), "\"one\"".to_owned());
    contents.lock().unwrap().insert("/o.safetensors".into(), object);
    WebServer::of(&contents, script)
}

/// A store that does not wait long before it asks again.
fn store() -> Web {
    store_for(&Fault::None)
}

/// The same. Only where the server stalls on purpose is it in a hurry: a busy machine stalls too.
fn store_for(fault: &Fault) -> Web {
    let stalls = matches!(fault, Fault::Stall(_) | Fault::Silence);
    let (pause, stall) = (Duration::from_millis(1), Duration::from_millis(if stalls { 500 } else { 30_000 }));
    let (connections, first_connections, request_bytes, tries) = (4, 4, 200_000, 4);
    Web::new(WebSettings {
        connections,
        first_connections,
        request_bytes,
        tries,
        pause,
        // As often as `tries` says, also where the server is busy.
        busy: Duration::ZERO,
        stall,
        ..WebSettings::default()
    })
}

fn at(server: &WebServer, path: &str) -> Location {
    Location::Url(server.url(path))
}

fn object(store: &Web, at: &Location) -> Object {
    let head = store.head(at, 8).unwrap();
    Object { location: at.clone(), size: head.size, version: head.version }
}

/// Reads an object through a source, in parts; each part gets its place when it arrives.
fn read(store: &Web, object: Object, part: usize) -> Result<Vec<u8>> {
    let size = object.size as usize;
    let objects = store.objects(vec![Some(object)]).unwrap();
    read_all(objects, size, part)
}

fn read_all(objects: Arc<dyn Objects>, size: usize, part: usize) -> Result<Vec<u8>> {
    let mut source = objects.source(Io::Auto, &Arc::default()).unwrap();
    let mut memory = vec![0u8; size];
    let base = memory.as_mut_ptr();
    let parts = size.div_ceil(part);
    for number in 0..parts {
        let (offset, len) = ((number * part) as u64, part.min(size - number * part) as u64);
        let (ticket, lane, into) = (Ticket(number as u64), Lane::NETWORK, Destination::OnArrival);
        let keep = Arc::new(());
        let read = Read { ticket, file: 0, offset, len, need: len, lane, into, fresh: false, written: 0, keep };
        source.submit(read).ok().unwrap();
    }
    source.flush().unwrap();
    let (mut done, mut outcome) = (0, Ok(()));
    let until = Instant::now() + Duration::from_secs(60);
    while done < parts {
        assert!(Instant::now() < until, "{done} of {parts} reads came back in a minute");
        wait(&*source);
        let mut events = Vec::new();
        source.poll(&mut events).unwrap();
        for event in events {
            match event {
                Progress::Arrived(ticket) => {
                    // SAFETY: the part is within the memory, which lives until the source is gone.
                    let place = unsafe { base.add(ticket.0 as usize * part) };
                    source.land(ticket, Destination::Memory(place), Arc::new(())).unwrap();
                }
                Progress::Received(_) => {}
                Progress::Refused { .. } => unreachable!("no lane is refused here"),
                Progress::Done(read) => {
                    done += 1;
                    outcome = outcome.and(read.result.map(drop));
                }
            }
        }
    }
    drop(source);
    outcome.map(|()| memory)
}

fn wait(source: &dyn Source) {
    let mut fd = libc::pollfd { fd: source.wake(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&raw mut fd, 1, 1000) };
}

/// Two seconds at least, and not the two minutes of a load that is not told how long to wait.
#[test]
fn an_open_of_a_server_that_stays_busy_ends_after_its_own_stall_timeout() {
    let server = serving(|_| Fault::Status(503));
    let settings = WebSettings { pause: Duration::from_millis(1), tries: 2, ..WebSettings::default() };
    let (stores, url) = (Stores::with(settings.into()), server.url("/o.safetensors"));
    let begun = Instant::now();
    let stall = Duration::from_secs(2);
    let asked = penstock::format::FolderRequest::plain();
    let e = Checkpoint::open_cancellable(&[url], &asked, &stores, stall, || true).unwrap_err();
    assert_eq!((e.kind(), e.status()), (ErrorKind::Io, Some(503)), "{e}");
    assert!((stall..Duration::from_secs(60)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
}

/// Every third request goes wrong, the next one for the same bytes does not: the bytes are right in the end.
#[test]
fn what_goes_wrong_once_is_asked_for_again() {
    for fault in [
        Fault::Status(503),
        Fault::Status(429),
        Fault::Status(500),
        Fault::Short(0),
        Fault::Short(100_000),
        Fault::Reset(0),
        Fault::Reset(70_000),
        Fault::ResetAtOnce,
        Fault::Stall(0),
        Fault::Stall(123_456),
        Fault::Silence,
        Fault::Long,
        Fault::Close,
        Fault::CloseSilently,
        Fault::NoLength,
        Fault::Drip(50_000, Duration::from_millis(2)),
        Fault::Chunks(70_001),
        Fault::FewChunks(9_000, 100_000),
    ] {
        let (told, failed) = (fault.clone(), Mutex::new(BTreeSet::new()));
        let server = serving(move |asked| {
            let first = asked.number % 3 == 2 && failed.lock().unwrap().insert(asked.range.map(|(_, end)| end));
            if first {
                told.clone()
            } else {
                Fault::None
            }
        });
        let store = store_for(&fault);
        let object = object(&store, &at(&server, "/o.safetensors"));
        let found = read(&store, object, 200_000).unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        assert!(found == bytes(SIZE), "{fault:?}: wrong bytes");
        // Blocking requests go the same way.
        let object = self::object(&store, &at(&server, "/o.safetensors"));
        for _ in 0..3 {
            assert!(store.read(&object, 5..SIZE as u64).unwrap() == bytes(SIZE)[5..], "{fault:?}");
        }
    }
}

#[test]
fn what_goes_wrong_always_is_an_error_that_says_what() {
    for (fault, kind, says) in [
        (Fault::Status(503), ErrorKind::Io, "503"),
        (Fault::Status(403), ErrorKind::Permission, "403"),
        (Fault::Status(401), ErrorKind::Permission, "401"),
        (Fault::Status(404), ErrorKind::Changed, "404"),
        (Fault::Status(412), ErrorKind::Changed, "412"),
        (Fault::Status(418), ErrorKind::Io, "418"),
        (Fault::Whole, ErrorKind::Io, "range requests"),
        (Fault::OtherRange, ErrorKind::Io, "were asked for"),
        (Fault::OtherSize, ErrorKind::Changed, "3000017 bytes"),
        (Fault::OtherLength, ErrorKind::Io, "the server says that it sends"),
        (Fault::OtherTag, ErrorKind::Changed, "ETag"),
        (Fault::Weak("Wed, 25 Nov 2026 10:00:00 GMT"), ErrorKind::Changed, "ETag"),
        (Fault::Chunked, ErrorKind::Io, "chunked"),
        (Fault::Short(10), ErrorKind::Io, "within the body"),
        (Fault::Reset(10), ErrorKind::Io, "lost"),
        (Fault::Stall(10), ErrorKind::Timeout, "nothing for 0.5 s"),
        (Fault::Silence, ErrorKind::Timeout, "nothing for 0.5 s"),
        (Fault::Nonsense, ErrorKind::Io, "HTTP/1.1"),
    ] {
        let told = fault.clone();
        let server = serving(move |asked| if asked.number == 0 { Fault::None } else { told.clone() });
        let (store, address) = (store_for(&fault), at(&server, "/o.safetensors?signature=secret"));
        let object = object(&store, &address);
        for e in [read(&store, object.clone(), 1_000_000).unwrap_err(), store.read(&object, 0..1000).unwrap_err()] {
            assert_eq!(e.kind(), kind, "{fault:?}: {e}");
            assert!(e.to_string().contains(says), "{fault:?}: {e}");
            let named = server.url("/o.safetensors");
            assert_eq!(e.path().and_then(|path| path.to_str()), Some(&*named), "{fault:?}");
            let answered = matches!(fault, Fault::Status(_)).then(|| e.status()).flatten();
            assert!(!matches!(fault, Fault::Status(code) if answered != Some(code)), "{fault:?}: {answered:?}");
            assert!(e.byte_range().is_some() && !format!("{e:?}").contains("secret"), "{fault:?}: {e:?}");
        }
        // So many times, and no more.
        let parts = SIZE.div_ceil(1_000_000) + 1;
        assert!(server.asked().len() <= 1 + 4 * parts, "{fault:?}: {} requests", server.asked().len());
    }
}

/// The bytes go where they belong, and connections are kept, however large the chunks are.
#[test]
fn bodies_in_chunks_are_decoded() {
    for size in [7, 4_096, 65_536, 199_999, 10_000_000] {
        let server = serving(move |_| Fault::Chunks(size));
        let store = store();
        let object = object(&store, &at(&server, "/o.safetensors"));
        assert_eq!(object.size, SIZE as u64);
        let objects = store.objects(vec![Some(object.clone())]).unwrap();
        assert!(read_all(objects.clone(), SIZE, 50_000).unwrap() == bytes(SIZE), "{size}");
        let traffic = objects.traffic().unwrap();
        assert_eq!((traffic.retries, traffic.received), (0, SIZE as u64), "{size}: {traffic:?}");
        // Connections for which the last chunk comes late are closed: they are an exception.
        assert!(traffic.connections <= traffic.requests, "{size}: {traffic:?}");
        assert!(store.read(&object, 5..77_777).unwrap() == bytes(SIZE)[5..77_777], "{size}");
    }
    // It gives up after some tries, and says why.
    let server = serving(|asked| if asked.number == 0 { Fault::None } else { Fault::FewChunks(10, 30) });
    let store = store();
    let object = object(&store, &at(&server, "/o.safetensors"));
    let e = store.read(&object, 0..1000).unwrap_err();
    assert!(e.to_string().contains("ended the body too early"), "{e}");
}

#[test]
fn what_was_said_of_an_objects_encoding_says_nothing_of_its_bytes() {
    for fields in [
        "Content-Encoding: aws-chunked",
        "Content-Encoding: ",
        "Content-Encoding: binary",
        "Content-Encoding: utf-8",
        "Content-Encoding: UTF-8\r\nContent-Encoding: aws-chunked",
        "Content-Encoding: gzip",
        "Content-Encoding: aws-chunked,gzip",
    ] {
        let server = serving(move |_| Fault::Field(fields.into()));
        let store = store();
        let object = object(&store, &at(&server, "/o.safetensors"));
        assert!(read(&store, object, 200_000).unwrap() == bytes(SIZE), "{fields}");
    }
    for fields in ["Transfer-Encoding: gzip", "Transfer-Encoding: gzip, chunked"] {
        let server = serving(move |_| Fault::Field(fields.into()));
        let e = store().head(&at(&server, "/o.safetensors"), 8).unwrap_err();
        assert!(e.to_string().contains("the body is encoded (gzip"), "{fields}: {e}");
    }
}

/// A store with one object that has these bytes.
fn holding(content: &[u8], script: impl Fn(&Asked) -> Fault + Send + Sync + 'static) -> WebServer {
    let contents = Contents::default();
    contents.lock().unwrap().insert("/o".into(), (Arc::new(content.to_vec()), "\"one\"".to_owned()));
    WebServer::of(&contents, script)
}

#[test]
fn less_is_asked_for_where_a_range_that_passes_the_end_is_refused() {
    for says in [false, true] {
        for size in [0, 1, 2, 999, 1000, 1001] {
            let server = holding(&bytes(size), move |_| Fault::Refuses(says));
            let head = store().head(&at(&server, "/o"), 1000).unwrap();
            assert_eq!((head.size, head.bytes), (size as u64, bytes(size.min(1000))), "{size} bytes, {says}");
            let most = if says { 2 } else { 3 };
            assert!(server.asked().len() <= most, "{size} bytes, {says}: {:?}", server.asked());
        }
    }
}

#[test]
fn what_comes_whole_and_without_a_length_ends_where_it_is_known_to_end() {
    let shard = shard(&[("a".into(), 1000), ("b".into(), 77)]);
    let json = br#"{"weight_map": {"a": "b", "c": [1, 2, {"d": null}]}}"#;
    for content in [&shard[..], json, b"plain text"] {
        for fault in
            [Fault::WholeChunks(100), Fault::WholeToTheEnd(usize::MAX), Fault::WholeToTheEnd(content.len() / 2)]
        {
            let told = fault.clone();
            let server = holding(content, move |_| told.clone());
            let is_known = content.starts_with(b"{") || content.len() > 1000;
            let is_whole = !matches!(fault, Fault::WholeToTheEnd(n) if n < content.len());
            match store().head(&at(&server, "/o"), 10_000) {
                Ok(head) => {
                    assert!(is_whole && (is_known || fault == Fault::WholeChunks(100)), "{fault:?}: {content:?}");
                    assert_eq!((head.size, &*head.bytes), (content.len() as u64, content), "{fault:?}");
                }
                Err(e) => {
                    assert!(fault != Fault::WholeChunks(100) && !(is_whole && is_known), "{fault:?}: {e}");
                    assert!(e.to_string().contains("so bytes may be missing"), "{fault:?}: {e}");
                }
            }
            // It is longer than what was asked for.
            if content.len() > 20 && is_whole {
                let e = store().head(&at(&server, "/o"), 20).unwrap_err();
                assert!(e.to_string().contains("range requests"), "{fault:?}: {e}");
            }
        }
    }
    // What breaks off is asked for from the first byte on.
    let failed = Mutex::new(0);
    let server = holding(&bytes(5_000), move |_| {
        *failed.lock().unwrap() += 1;
        if *failed.lock().unwrap() < 3 {
            Fault::WholeReset(2_000)
        } else {
            Fault::WholeChunks(1_500)
        }
    });
    assert!(store().head(&at(&server, "/o"), 10_000).unwrap().bytes == bytes(5_000));
}

#[test]
fn only_the_missing_tail_is_asked_for_again() {
    let server = serving(|asked| if asked.number == 1 { Fault::Short(1_500_000) } else { Fault::None });
    let store = store();
    let object = object(&store, &at(&server, "/o.safetensors"));
    assert!(read(&store, object, SIZE).unwrap() == bytes(SIZE));
    let ranges: Vec<_> = server.asked()[1..].iter().map(|asked| asked.range.unwrap()).collect();
    assert_eq!(ranges, [(0, SIZE as u64), (1_500_000, SIZE as u64)]);
    assert_eq!(server.served(), 8 + SIZE as u64);
    assert!(server.asked()[1..].iter().all(|asked| asked.if_match.as_deref() == Some("\"one\"")));
}

#[test]
fn connections_are_kept_and_are_as_many_as_allowed() {
    let server = serving(|_| Fault::None);
    let store = store();
    let object = object(&store, &at(&server, "/o.safetensors"));
    assert!(read(&store, object, 50_000).unwrap() == bytes(SIZE));
    let asked = server.asked();
    assert_eq!(asked.len(), 1 + SIZE.div_ceil(200_000), "four neighbours are one request");
    let connections: BTreeSet<u64> = asked[1..].iter().map(|asked| asked.connection).collect();
    assert!(connections.len() <= 4, "{connections:?}");
    // The load is over, and so are its connections. The server hears of it a moment later.
    let until = Instant::now() + Duration::from_secs(20);
    while server.open() > 0 {
        assert!(Instant::now() < until, "{} connections are open", server.open());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What the server was asked for after the head, and how many bytes it sent for that.
fn asked_for(server: &WebServer, reads: &[(u64, u64)]) -> (BTreeSet<(u64, u64)>, u64) {
    let (connections, request_bytes) = (2, 16 << 20);
    let store = Web::new(WebSettings { connections, request_bytes, ..WebSettings::default() });
    let object = object(&store, &at(server, "/o.safetensors"));
    let (before, served) = (server.asked().len(), server.served());
    let mut source = store.objects(vec![Some(object)]).unwrap().source(Io::Auto, &Arc::default()).unwrap();
    let mut memory = vec![0u8; SIZE];
    for (number, (offset, len)) in (0..).zip(reads) {
        // SAFETY: within the memory, which lives until the source is gone.
        let into = Destination::Memory(unsafe { memory.as_mut_ptr().add(*offset as usize) });
        let (ticket, lane, keep) = (Ticket(number), Lane::NETWORK, Arc::new(()));
        let (offset, len) = (*offset, *len);
        let read = Read { ticket, file: 0, offset, len, need: len, lane, into, fresh: false, written: 0, keep };
        source.submit(read).ok().unwrap();
    }
    source.flush().unwrap();
    let mut events = Vec::new();
    let until = Instant::now() + Duration::from_secs(60);
    while events.iter().filter(|event| matches!(event, Progress::Done(_))).count() < reads.len() {
        assert!(Instant::now() < until, "{events:?}");
        wait(&*source);
        source.poll(&mut events).unwrap();
    }
    drop(source);
    for &(offset, len) in reads {
        let range = offset as usize..(offset + len) as usize;
        assert!(memory[range.clone()] == bytes(SIZE)[range], "{offset}+{len}");
    }
    let ranges = server.asked()[before..].iter().map(|asked| asked.range.unwrap()).collect();
    (ranges, server.served() - served)
}

#[test]
fn neighbours_are_asked_for_together() {
    let server = serving(|_| Fault::None);
    let one = |range: (u64, u64)| BTreeSet::from([range]);
    let mib = 1 << 20;
    // Side by side, and with a gap that costs less than a request.
    assert_eq!(asked_for(&server, &[(0, 1000), (1000, 500), (1500, 7)]), (one((0, 1507)), 1507));
    assert_eq!(asked_for(&server, &[(10, 90), (100 + mib, 50)]), (one((10, 150 + mib)), 140 + mib));
    // Too far apart, or not in the order of the file.
    let (ranges, served) = asked_for(&server, &[(10, 90), (101 + mib, 50)]);
    assert_eq!((ranges.len(), served), (2, 140));
    let (ranges, served) = asked_for(&server, &[(5000, 90), (10, 50)]);
    assert_eq!((ranges.len(), served), (2, 140));
}

/// The stall timeout is far away: only what the others bring shows that a connection is silent.
#[test]
fn what_a_silent_connection_misses_is_asked_for_on_another() {
    for fault in [Fault::Silence, Fault::Stall(70_000)] {
        let told = fault.clone();
        // The others take a while, so that there is something to compare with.
        let drip = Fault::Drip(4_000, Duration::from_millis(20));
        let server = serving(move |asked| match asked.number {
            0 => Fault::None,
            2 => told.clone(),
            _ => drip.clone(),
        });
        let (stall, request_bytes) = (Duration::from_secs(300), 400_000);
        let (connections, first_connections) = (4, 4);
        let store =
            Web::new(WebSettings { connections, first_connections, request_bytes, stall, ..WebSettings::default() });
        let object = object(&store, &at(&server, "/o.safetensors"));
        let objects = store.objects(vec![Some(object)]).unwrap();
        assert!(read_all(objects.clone(), SIZE, 200_000).unwrap() == bytes(SIZE), "{fault:?}");
        let traffic = objects.traffic().unwrap();
        assert!(traffic.moved >= 1 && traffic.retries == 0, "{fault:?}: {traffic:?}");
        assert!(traffic.connections >= 5 && traffic.received >= SIZE as u64, "{fault:?}: {traffic:?}");
    }
}

#[test]
fn several_threads_share_the_connections() {
    let server = serving(|asked| match asked.number % 5 {
        2 => Fault::Status(503),
        3 => Fault::Short(70_000),
        _ => Fault::None,
    });
    let (connections, first_connections, threads, request_bytes) = (32, 32, 4, 200_000);
    let (pause, tries) = (Duration::from_millis(1), 40);
    let settings =
        WebSettings { connections, first_connections, threads, request_bytes, pause, tries, ..WebSettings::default() };
    let store = Web::new(settings);
    let object = object(&store, &at(&server, "/o.safetensors"));
    let objects = store.objects(vec![Some(object)]).unwrap();
    for _ in 0..3 {
        assert!(read_all(objects.clone(), SIZE, 50_000).unwrap() == bytes(SIZE));
    }
    let traffic = objects.traffic().unwrap();
    assert!(traffic.requests >= 3 * 15 && traffic.retries > 0, "{traffic:?}");
    let net = || threads_named("penstock-net");
    let source = objects.source(Io::Auto, &Arc::default()).unwrap();
    // A thread has its name when it runs.
    let until = Instant::now() + Duration::from_secs(20);
    while net() < 4 {
        assert!(Instant::now() < until, "{} threads", net());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(source);
}

/// As many reads as connections wait for the one place that there is.
#[test]
fn one_place_is_enough_for_all_connections() {
    for fault in [Fault::None, Fault::Short(60_000), Fault::Status(503)] {
        let told = fault.clone();
        let server = serving(move |asked| if asked.number % 3 == 1 { told.clone() } else { Fault::None });
        let (pause, tries) = (Duration::from_millis(1), 40);
        let store =
            Web::new(WebSettings { connections: 4, request_bytes: 200_000, pause, tries, ..WebSettings::default() });
        let object = object(&store, &at(&server, "/o.safetensors"));
        let mut source = store.objects(vec![Some(object)]).unwrap().source(Io::Auto, &Arc::default()).unwrap();
        let part = 100_000;
        let parts = SIZE / part;
        for number in 0..parts as u64 {
            let (ticket, lane, into) = (Ticket(number), Lane::NETWORK, Destination::OnArrival);
            let (offset, len, keep) = (number * part as u64, part as u64, Arc::new(()));
            let read = Read { ticket, file: 0, offset, len, need: len, lane, into, fresh: false, written: 0, keep };
            source.submit(read).ok().unwrap();
        }
        source.flush().unwrap();
        let (mut place, mut free, mut arrived, mut done) = (vec![0u8; part], true, VecDeque::new(), 0);
        let until = Instant::now() + Duration::from_secs(60);
        while done < parts {
            assert!(Instant::now() < until, "{fault:?}: {done} of {parts}");
            wait(&*source);
            let mut events = Vec::new();
            source.poll(&mut events).unwrap();
            for event in events {
                match event {
                    Progress::Arrived(ticket) => arrived.push_back(ticket),
                    Progress::Received(_) => {}
                    Progress::Refused { .. } => unreachable!("no lane is refused here"),
                    Progress::Done(read) => {
                        assert_eq!(read.result.unwrap(), part as u64, "{fault:?}");
                        let from = read.ticket.0 as usize * part;
                        assert!(place == bytes(SIZE)[from..from + part], "{fault:?}: {:?}", read.ticket);
                        (free, done) = (true, done + 1);
                    }
                }
            }
            if let Some(ticket) = arrived.front().copied().filter(|_| free) {
                arrived.pop_front();
                free = false;
                source.land(ticket, Destination::Memory(place.as_mut_ptr()), Arc::new(())).unwrap();
            }
        }
    }
}

#[test]
fn redirects_are_followed_once_for_a_load_and_a_loop_is_an_error() {
    let elsewhere = serving(|asked| {
        // The signature that the redirect gave first expires.
        if asked.target.contains("sig=0") && asked.number > 3 {
            Fault::Status(403)
        } else {
            Fault::None
        }
    });
    let to = elsewhere.url("/o.safetensors?sig=");
    let server = serving(move |asked| match &*asked.target {
        "/moved" => Fault::Redirect(302, format!("{to}{}", u64::from(asked.number > 1))),
        "/here" => Fault::Redirect(307, "moved".into()),
        target => Fault::Redirect(301, target.into()),
    });
    let store = store();
    let object = object(&store, &at(&server, "/here"));
    assert_eq!(object.location, at(&server, "/here"), "the address stays the one that was given");
    assert!(read(&store, object, 200_000).unwrap() == bytes(SIZE));
    // Two redirects for the head and two for all reads, which one of these finds out; two more if its signature has expired.
    assert!(server.asked().len() <= 2 + 2 + 2, "{} requests", server.asked().len());
    let e = store.head(&at(&server, "/loop?secret"), 8).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Io);
    assert!(e.to_string().contains("redirects more than 5 times") && !e.to_string().contains("secret"), "{e}");
}

/// Of each request: its target, and whether it had the token.
fn had_token(server: &WebServer) -> Vec<(String, bool)> {
    let has = |asked: &Asked| asked.text.contains("\r\nAuthorization: Bearer sesame\r\n");
    server.asked().iter().map(|asked| (asked.target.clone(), has(asked))).collect()
}

#[test]
fn a_token_goes_to_its_server_and_never_to_where_that_redirects() {
    let elsewhere = serving(|_| Fault::None);
    let to = elsewhere.url("/o.safetensors?sig=1");
    let server = serving(move |asked| match &*asked.target {
        "/away" => Fault::Redirect(302, to.clone()),
        "/within" => Fault::Redirect(307, "o.safetensors".into()),
        _ => Fault::None,
    });
    let settings = || {
        let bearer = Bearer::new(&server.url(""), Secret::new("sesame")).unwrap();
        StorageSettings { bearer: Some(bearer), ..StorageSettings::default() }
    };
    assert!(!format!("{:?}", settings()).contains("sesame"));
    let store = Web::new(settings());
    assert!(!format!("{store:?}").contains("sesame"));
    for path in ["/o.safetensors", "/within", "/away"] {
        let object = object(&store, &at(&server, path));
        assert!(read(&store, object, 1_000_000).unwrap() == bytes(SIZE));
    }
    store.head(&at(&elsewhere, "/o.safetensors"), 8).unwrap();
    assert!(had_token(&server).iter().all(|(_, has)| *has), "{:?}", had_token(&server));
    let there = had_token(&elsewhere);
    assert!(there.len() > 2 && there.iter().all(|(_, has)| !has), "{there:?}");
    // Through an open, and then its loads.
    let (server, _) = model(|_| Fault::None);
    let bearer = Bearer::new(&server.url("/"), Secret::new("sesame")).unwrap();
    let web = WebSettings { connections: 1, ..WebSettings::default() };
    let stores = Stores::with(StorageSettings { bearer: Some(bearer), web, ..StorageSettings::default() });
    let index = [server.url("/m/model.safetensors.index.json")];
    let checkpoint = Checkpoint::open_cancellable(
        &index,
        &penstock::format::FolderRequest::plain(),
        &stores,
        Duration::from_secs(60),
        || true,
    )
    .unwrap();
    let opened = server.asked().len();
    let checkpoint = Arc::new(checkpoint);
    let load = Load::start(request(&checkpoint, Want::all(&checkpoint), false)).unwrap();
    load.wait(None).unwrap();
    assert!(had_token(&server).iter().all(|(_, has)| *has));
    let connections: BTreeSet<u64> = server.asked()[opened..].iter().map(|asked| asked.connection).collect();
    assert_eq!(connections.len(), 1, "the load has the settings of the open");
    for (address, token) in
        [("http://h/x", "t"), ("ftp://h", "t"), ("h", "t"), ("http://h", ""), ("http://h", "a\r\nb")]
    {
        let e = Bearer::new(address, Secret::new(token)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid, "{address}");
    }
}

#[test]
fn a_look_says_what_asking_takes_and_what_goes_wrong() {
    let strong = || Some((SIZE as u64, Version::Strong("\"one\"".into())));
    // Of each: connections, requests that were answered, status, object, what the error says.
    for (fault, connections, answers, status, object, says) in [
        (Fault::None, 1, 4, Some(206), strong(), ""),
        (Fault::Close, 4, 4, Some(206), strong(), ""),
        (Fault::CloseSilently, 2, 2, Some(206), strong(), ""),
        (Fault::NoLength, 4, 4, Some(206), strong(), ""),
        (Fault::Weak("Mon"), 1, 4, Some(206), Some((SIZE as u64, Version::Weak("W/\"one\" Mon".into()))), ""),
        (Fault::Whole, 0, 1, Some(200), None, "does not support range requests"),
        (Fault::OtherRange, 0, 1, Some(206), None, "were asked for"),
        (Fault::Status(403), 0, 1, Some(403), None, "refuses access"),
        (Fault::Status(503), 0, 1, Some(503), None, "busy or broken"),
        (Fault::Short(0), 0, 1, Some(206), None, "is lost"),
        (Fault::ResetAtOnce, 0, 0, None, None, "is lost"),
        (Fault::Silence, 0, 0, None, None, "is lost"),
        (Fault::Nonsense, 0, 1, None, None, "does not answer in HTTP"),
    ] {
        let told = fault.clone();
        let server = serving(move |_| told.clone());
        let look = store_for(&fault).look(&at(&server, "/o.safetensors?secret"), 4).unwrap();
        let error = look.error.as_ref().map(ToString::to_string).unwrap_or_default();
        assert!(error.contains(says) && error.is_empty() == says.is_empty(), "{fault:?}: {look:?}");
        assert!(!format!("{look:?}").contains("secret"), "{fault:?}: {look:?}");
        let [asked] = &look.servers[..] else { panic!("{fault:?}: {look:?}") };
        assert_eq!(asked.server, server.url(""), "{fault:?}");
        assert!(asked.connect.is_some() && asked.lookup.is_none() && asked.tls.is_none(), "{fault:?}: {look:?}");
        assert_eq!((asked.status, &look.object), (status, &object), "{fault:?}: {look:?}");
        assert_eq!((look.connections, look.round_trips.len()), (connections, answers), "{fault:?}: {look:?}");
    }
}

#[test]
fn a_look_follows_redirects_and_says_how_far_it_came() {
    let elsewhere = serving(|_| Fault::None);
    let to = elsewhere.url("/o.safetensors?sig=1");
    let server = serving(move |asked| match &*asked.target {
        "/away" => Fault::Redirect(302, to.clone()),
        target => Fault::Redirect(301, target.into()),
    });
    let look = store().look(&at(&server, "/away"), 2).unwrap();
    let asked: Vec<_> = look.servers.iter().map(|asked| (asked.server.clone(), asked.status)).collect();
    assert_eq!(asked, [(server.url(""), Some(302)), (elsewhere.url(""), Some(206))]);
    assert!(look.error.is_none() && !format!("{look:?}").contains("sig="), "{look:?}");
    assert_eq!((elsewhere.asked().len(), server.asked().len()), (2, 1), "the last server alone is asked again");
    let look = store().look(&at(&server, "/loop"), 2).unwrap();
    assert!(look.error.unwrap().to_string().contains("redirects more than 5 times"));
    assert_eq!(look.servers.len(), 6);
    let gone = { serving(|_| Fault::None).address };
    let look = store().look(&Location::Url(format!("http://{gone}/x")), 2).unwrap();
    assert!(look.servers[0].connect.is_none() && look.servers[0].addresses == 1, "{look:?}");
    let look = store().look(&Location::Url("http://no-such-host.invalid/x".into()), 2).unwrap();
    assert!(look.servers[0].addresses == 0 && look.error.unwrap().to_string().contains("no-such-host.invalid"));
    let stores = Stores::default();
    assert!(stores.look("/o.safetensors", 1).unwrap().is_none() && stores.look("x://h/o", 1).unwrap().is_none());
}

#[test]
fn a_server_that_is_not_there_is_an_error_soon() {
    let address = { serving(|_| Fault::None).address };
    let store = store();
    let e = store.head(&Location::Url(format!("http://{address}/x?secret")), 8).unwrap_err();
    assert_eq!(
        (e.kind(), e.path().unwrap().to_str().unwrap()),
        (ErrorKind::Io, &*format!("http://{address}/x")),
        "{e}"
    );
    let e = store.head(&Location::Url("http://me:secret@h/x".into()), 8).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
    assert!(!format!("{e:?}").contains("secret"), "{e}");
    let e = store.head(&Location::Url("http://no-such-host.invalid/x".into()), 8).unwrap_err();
    assert!(e.to_string().contains("no-such-host.invalid"), "{e}");
}

#[test]
fn what_is_given_up_ends_at_once_and_frees_its_memory() {
    for fault in [Fault::Silence, Fault::Stall(1000), Fault::Status(503)] {
        let told = fault.clone();
        let server = serving(move |asked| if asked.number == 0 { Fault::None } else { told.clone() });
        // It would wait for a minute.
        let (pause, stall) = (Duration::from_secs(60), Duration::from_secs(60));
        let store = Web::new(WebSettings { pause, stall, ..WebSettings::default() });
        let object = object(&store, &at(&server, "/o.safetensors"));
        for cancels in [true, false] {
            let mut source =
                store.objects(vec![Some(object.clone())]).unwrap().source(Io::Auto, &Arc::default()).unwrap();
            let memory = Arc::new(Mutex::new(vec![0u8; SIZE]));
            let place = memory.lock().unwrap().as_mut_ptr();
            for number in 0..6 {
                let (ticket, lane, into) = (Ticket(number), Lane::NETWORK, Destination::Memory(place));
                let (keep, len) = (memory.clone(), 10_000);
                let offset = number * len;
                let read = Read { ticket, file: 0, offset, len, need: len, lane, into, fresh: false, written: 0, keep };
                source.submit(read).ok().unwrap();
            }
            let asked = server.asked().len();
            source.flush().unwrap();
            let until = Instant::now() + Duration::from_secs(20);
            while server.asked().len() == asked {
                assert!(Instant::now() < until);
                std::thread::sleep(Duration::from_millis(1));
            }
            let before = Instant::now();
            if cancels {
                source.cancel();
                let mut events = Vec::new();
                while events.len() < 6 {
                    wait(&*source);
                    source.poll(&mut events).unwrap();
                }
                for event in events {
                    let Progress::Done(done) = event else { panic!("{event:?}") };
                    assert_eq!(done.result.unwrap_err().kind(), ErrorKind::Cancelled);
                }
                assert_eq!(Arc::strong_count(&memory), 1, "{fault:?}");
            }
            drop(source);
            assert_eq!(Arc::strong_count(&memory), 1, "{fault:?}");
            assert!(before.elapsed() < Duration::from_secs(30), "{fault:?}: it waited for the server");
        }
    }
}

/// Threads of this process that have this name.
fn threads_named(wanted: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == wanted).count()
}

/// The server never answers: asking on would take more than a minute.
#[test]
fn an_open_that_is_given_up_leaves_no_thread_that_asks_on() {
    let server = serving(|_| Fault::Silence);
    let until = Instant::now() + Duration::from_secs(40);
    let stall = Duration::from_secs(300);
    let go_on = || server.asked().is_empty();
    let opened = Checkpoint::open_cancellable(
        &[server.url("/o.safetensors")],
        &penstock::format::FolderRequest::plain(),
        &Stores::default(),
        stall,
        go_on,
    );
    assert_eq!(opened.err().unwrap().kind(), ErrorKind::Cancelled);
    let asking = || threads_named("penstock-ask");
    while asking() > 0 {
        assert!(Instant::now() < until, "{} threads ask on", asking());
        std::thread::sleep(Duration::from_millis(10));
    }
}

// --- Whole loads ---

/// A shard file of these U8 tensors, whose bytes follow from their place.
fn shard(tensors: &[(String, usize)]) -> Vec<u8> {
    let (mut json, mut at) = (String::from("{"), 0);
    for (name, size) in tensors {
        let (comma, past) = (if at > 0 { "," } else { "" }, at + size);
        write!(json, r#"{comma}"{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{at},{past}]}}"#).unwrap();
        at = past;
    }
    json.push('}');
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.as_bytes());
    file.extend(bytes(at));
    file
}

/// A checkpoint of three shards and an index, on a server.
fn model(script: impl Fn(&Asked) -> Fault + Send + Sync + 'static) -> (WebServer, Contents) {
    let contents = Contents::default();
    let mut index = String::from(r#"{"weight_map":{"#);
    for number in 0..3 {
        let tensors: Vec<_> = (0..5).map(|i| (format!("t.{number}.{i}"), 100_000 * (i + 1) + number)).collect();
        let name = format!("model-{number}.safetensors");
        for (i, (tensor, _)) in tensors.iter().enumerate() {
            write!(index, r#"{}"{tensor}":"{name}""#, if number + i > 0 { "," } else { "" }).unwrap();
        }
        contents.lock().unwrap().insert(format!("/m/{name}"), (Arc::new(shard(&tensors)), format!("\"{number}\"")));
    }
    index.push_str("}}");
    let name = "/m/model.safetensors.index.json".to_owned();
    contents.lock().unwrap().insert(name, (Arc::new(index.into_bytes()), "\"index\"".into()));
    (WebServer::of(&contents, script), contents)
}

fn request(checkpoint: &Arc<Checkpoint>, wants: Vec<Want>, stream: bool) -> Request {
    Request {
        checkpoint: checkpoint.clone(),
        wants,
        device: Where::Cpu,
        memory: Memory::Ours,
        layout: None,
        options: Options { stall_timeout: Duration::from_secs(60), ..Options::default() },
        stream,
    }
}

/// Compares what was loaded with what the server has.
fn check(load: &Load, checkpoint: &Checkpoint, contents: &Contents) {
    for (number, want) in (0..).zip(load.wants()) {
        let info = checkpoint.tensor(want.tensor);
        let path = checkpoint.files()[info.file as usize].spelled.to_string();
        let path = &path[path.find("/m/").unwrap()..];
        let file = contents.lock().unwrap()[path].0.clone();
        let view = load.view(number).unwrap();
        // SAFETY: complete bytes of CPU memory, which the view keeps.
        let found = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
        assert!(*found == file[info.begin as usize..info.end as usize], "tensor {}", want.tensor);
    }
}

#[test]
fn a_checkpoint_is_opened_and_loaded_by_its_index_and_by_its_files() {
    let (server, contents) = model(|_| Fault::None);
    let sources = [
        vec![server.url("/m/model.safetensors.index.json?token=secret")],
        (0..3).map(|number| server.url(&format!("/m/model-{number}.safetensors"))).collect(),
    ];
    for sources in sources {
        let before = server.served();
        let checkpoint = Arc::new(Checkpoint::open(&sources).unwrap());
        assert_eq!(checkpoint.len(), 15);
        let opened = server.served();
        for stream in [false, true] {
            let begun = server.served();
            let load = Load::start(request(&checkpoint, Want::all(&checkpoint), stream)).unwrap();
            load.wait(None).unwrap();
            check(&load, &checkpoint, &contents);
            let data: u64 = Want::all(&checkpoint)
                .iter()
                .map(|want| {
                    let info = checkpoint.tensor(want.tensor);
                    info.end - info.begin
                })
                .sum();
            let served = server.served() - begun;
            assert!(served >= data && served <= data + data / 100, "{served} bytes were sent for {data}");
        }
        assert!(opened - before <= 4 * (64 << 10), "{} bytes were sent to open it", opened - before);
        assert!(checkpoint.files().iter().all(|file| !file.spelled.to_string().contains("secret")));
    }
    // A query goes with the address: it may be what allows access.
    assert!(server.asked().iter().any(|asked| asked.target == "/m/model-1.safetensors?token=secret"));
}

#[test]
fn a_shard_that_is_missing_or_another_one_ends_it_with_an_error() {
    let (server, contents) = model(|_| Fault::None);
    let index = server.url("/m/model.safetensors.index.json");
    let checkpoint = Arc::new(Checkpoint::open(&[&index]).unwrap());
    contents.lock().unwrap().get_mut("/m/model-1.safetensors").unwrap().1 = "\"another\"".into();
    let load = Load::start(request(&checkpoint, Want::all(&checkpoint), false));
    let e = load.and_then(|load| load.wait(None)).unwrap_err();
    let shard = server.url("/m/model-1.safetensors");
    assert_eq!((e.kind(), e.path().and_then(|path| path.to_str())), (ErrorKind::Changed, Some(&*shard)), "{e}");
    contents.lock().unwrap().remove("/m/model-1.safetensors");
    let e = Checkpoint::open(&[&index]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
    assert!(e.to_string().contains("model-1.safetensors"), "{e}");
    let e = Checkpoint::open(&[server.url("/m/")]).unwrap_err();
    assert!(e.to_string().contains("web servers list no files"), "{e}");
}

/// It takes connections, and answers none.
#[test]
fn a_proxy_that_says_nothing_is_named() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = format!("http://{}", silent.local_addr().unwrap());
    let (stall, pause, tries) = (Duration::from_millis(300), Duration::from_millis(1), 2);
    let proxies = Some(Proxies::given(&proxy.replace("//", "//me:sesame@")).unwrap());
    let web = Web::new(WebSettings { stall, pause, tries, proxies, ..WebSettings::default() });
    // Without authorities there is no TLS.
    let has_tls = Stores::default().authorities().is_ok();
    for url in ["http://models.invalid/o", "https://models.invalid/o"].into_iter().take(if has_tls { 2 } else { 1 }) {
        let e = web.head(&Location::Url(url.into()), 8).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(e.to_string().contains(&format!("models.invalid through the proxy {proxy}")), "{e}");
        assert!(!e.to_string().contains("sesame"), "{e}");
    }
}

/// The time that it takes is at least what the limit says. Nothing is asked for twice because of it.
#[test]
fn a_limit_on_the_rate_holds_for_all_connections_and_threads() {
    let server = serving(|_| Fault::None);
    let location = at(&server, "/o.safetensors");
    for (threads, bandwidth) in [(1, 3_000_000), (2, 4_000_000)] {
        let (connections, first_connections, request_bytes) = (16, 16, 100_000);
        let stall = Duration::from_secs(30);
        let settings = WebSettings { connections, first_connections, request_bytes, threads, ..WebSettings::default() };
        let store = Web::new(WebSettings { bandwidth: Some(bandwidth), stall, ..settings });
        let object = object(&Web::new(WebSettings::default()), &location);
        let objects = store.objects(vec![Some(object)]).unwrap();
        let begun = Instant::now();
        assert!(read_all(objects.clone(), SIZE, 50_000).unwrap() == bytes(SIZE));
        // A bucket may hold 64 KiB, or what comes in 50 ms, for each thread.
        let at_once = (bandwidth / 20).max(threads as u64 * (64 << 10));
        let least = (SIZE as u64 - at_once) as f64 / bandwidth as f64;
        assert!(begun.elapsed().as_secs_f64() >= least, "{:?}, and {least} s at least", begun.elapsed());
        let traffic = objects.traffic().unwrap();
        assert!(traffic.received >= SIZE as u64 && traffic.retries == 0, "{traffic:?}");
    }
}
