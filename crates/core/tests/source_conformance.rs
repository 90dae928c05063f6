//! What every source must do, run against each of them.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use penstock::error::ErrorKind;
use penstock::options::{Io, Options};
use penstock::schedule::Route;
use penstock::source::{
    Aio, Destination, Done, Files, Read, Router, Source, Threads, Throttle, Throttling, Ticket, Uring,
};
use std::any::Any;
use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// An odd size, so that the tail of the file suits no alignment.
const SIZE: u64 = (6 << 20) + 1234;

/// A file of bytes that nothing else looks like, and those bytes.
struct Sample {
    path: PathBuf,
    bytes: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Sample {
    fn new() -> Sample {
        // Next to the build: that is a disk where /tmp may be a tmpfs.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let bytes: Vec<u8> = (0..SIZE).map(|_| random.next() as u8).collect();
        let path = folder.path().join("sample.safetensors");
        fs::write(&path, &bytes).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        Sample { path, bytes, _folder: folder }
    }

    fn files(&self) -> Arc<Files> {
        Arc::new(Files::from_paths(&[&self.path]).unwrap())
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Memory that suits O_DIRECT, or the mapping of a file.
struct Memory {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory; tests look at it only when its reads are done.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: u64) -> Arc<Memory> {
        Self::map(len, -1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }
    fn of(path: &Path, len: u64) -> Arc<Memory> {
        let file = fs::File::open(path).unwrap();
        Self::map(len, file.as_raw_fd(), libc::MAP_PRIVATE)
    }
    fn map(len: u64, fd: RawFd, flags: i32) -> Arc<Memory> {
        let len = len as usize;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, placed by the kernel.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, both, flags, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Arc::new(Memory { at: at.cast(), len })
    }
    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes from `at` on are ours.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nobody holds it any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

fn keep(memory: &Arc<Memory>) -> Arc<dyn Any + Send + Sync> {
    memory.clone()
}

/// An extent as the schedule makes them: O_DIRECT ones on whole pages, past the end of the file by less than a page.
fn extent(route: Route, begin: u64, end: u64) -> (u64, u64, u64) {
    match route {
        Route::Direct => {
            let offset = begin / PAGE * PAGE;
            (offset, end.next_multiple_of(PAGE) - offset, end - offset)
        }
        _ => (begin, end - begin, end - begin),
    }
}

/// A read of those bytes into new memory (or of their mapping).
fn read(route: Route, ticket: u64, sample: &Sample, begin: u64, end: u64) -> (Read, Arc<Memory>) {
    let (offset, len, need) = extent(route, begin, end);
    let (memory, into) = match route {
        Route::Mapped => {
            let memory = Memory::of(&sample.path, SIZE);
            // SAFETY: within the mapping.
            let at = unsafe { memory.at.add(offset as usize) };
            (memory, Destination::Mapping(at))
        }
        _ => {
            let memory = Memory::new(len.max(1));
            let at = memory.at;
            (memory, Destination::Memory(at))
        }
    };
    let keep = keep(&memory);
    (Read { ticket: Ticket(ticket), file: 0, offset, len, need, route, into, keep }, memory)
}

/// Waits on the wake descriptor until `n` reads are done. Fails where it wakes far more often than there are reads.
fn wait(source: &mut dyn Source, n: usize) -> Vec<Done> {
    let mut done = Vec::new();
    let until = Instant::now() + Duration::from_secs(20);
    let mut woken = 0;
    while done.len() < n {
        source.flush().unwrap();
        source.poll(&mut done).unwrap();
        if done.len() < n {
            assert!(Instant::now() < until, "{} of {n} reads came back in 20 s", done.len());
            readable(source.wake(), 1000);
            woken += 1;
        }
    }
    assert!(woken <= 20 * n + 20, "woke {woken} times for {n} reads: it spins");
    assert_eq!(done.len(), n, "more tickets came back than were given");
    done
}

fn readable(fd: RawFd, ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&raw mut p, 1, ms) == 1 }
}

fn submit_all(source: &mut dyn Source, reads: Vec<Read>) -> Vec<Done> {
    let n = reads.len();
    let mut done = Vec::new();
    for mut read in reads {
        while let Err(back) = source.submit(read) {
            read = back;
            assert!(source.in_flight() > 0, "refused a read with nothing in flight");
            done.extend(wait_some(source));
        }
    }
    let left = n - done.len();
    done.extend(wait(source, left));
    assert_eq!(source.in_flight(), 0);
    done
}

fn wait_some(source: &mut dyn Source) -> Vec<Done> {
    let mut done = Vec::new();
    source.flush().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while done.is_empty() {
        assert!(Instant::now() < until, "nothing came back in 20 s");
        readable(source.wake(), 1000);
        source.poll(&mut done).unwrap();
    }
    done
}

type Make = fn(Arc<Files>) -> Box<dyn Source>;

fn brings_the_bytes_of_random_extents(make: Make, route: Route) {
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
        let (read, memory) = read(route, ticket, &sample, begin, end);
        memories.insert(ticket, (read.offset, read.need, memory));
        reads.push(read);
    }
    for done in submit_all(&mut *source, reads) {
        let (offset, need, memory) = memories.remove(&done.ticket.0).expect("a ticket came back twice");
        let got = done.result.unwrap();
        assert!(got >= need, "{got} of {need} bytes");
        let wanted = &sample.bytes[offset as usize..(offset + need) as usize];
        let at = if route == Route::Mapped { offset as usize } else { 0 };
        assert!(memory.bytes()[at..at + need as usize] == *wanted, "wrong bytes at {offset}");
    }
    source.submit(read(route, 99, &sample, 0, PAGE).0).ok().unwrap();
    wait(&mut *source, 1);
}

fn reads_on_after_short_reads(make: Make, route: Route) {
    if route == Route::Mapped {
        return;
    }
    let sample = Sample::new();
    let files = sample.files();
    files.cap_calls(2 * PAGE);
    let mut source = make(files);
    for (ticket, begin) in [(0, 0), (1, SIZE - 70_000)] {
        let (read, memory) = read(route, ticket, &sample, begin, (begin + 100_000).min(SIZE));
        let (offset, need) = (read.offset as usize, read.need as usize);
        let done = submit_all(&mut *source, vec![read]);
        assert!(*done[0].result.as_ref().unwrap() >= need as u64);
        assert!(memory.bytes()[..need] == sample.bytes[offset..offset + need]);
    }
}

fn an_end_of_file_before_what_is_needed_is_truncated(make: Make, route: Route) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let (mut read, _memory) = read(route, 5, &sample, SIZE - 5000, SIZE);
    if route == Route::Mapped {
        (read.len, read.need) = (read.len + 1, read.need + 1);
    } else {
        let memory = Memory::new(read.len + PAGE);
        (read.len, read.need) = (read.len + PAGE, read.len + 1);
        read.into = Destination::Memory(memory.at);
        read.keep = keep(&memory);
    }
    let range = read.offset..read.offset + read.need;
    let done = submit_all(&mut *source, vec![read]);
    let e = done[0].result.as_ref().unwrap_err();
    assert_eq!((e.kind(), e.path(), e.byte_range()), (ErrorKind::Truncated, Some(&*sample.path), Some(range)), "{e}");
}

fn a_file_that_is_gone_or_other_is_changed(make: Make, route: Route) {
    for how in ["gone", "replaced", "rewritten", "shorter"] {
        let sample = Sample::new();
        let files = sample.files();
        let (read, _memory) = read(route, 0, &sample, 0, PAGE);
        match how {
            "gone" => fs::remove_file(&sample.path).unwrap(),
            "replaced" => {
                fs::write(sample.path.with_extension("new"), &sample.bytes).unwrap();
                fs::rename(sample.path.with_extension("new"), &sample.path).unwrap();
            }
            "rewritten" => fs::write(&sample.path, &sample.bytes).unwrap(),
            _ => fs::File::options().write(true).open(&sample.path).unwrap().set_len(SIZE - 1).unwrap(),
        }
        let mut source = make(files.clone());
        let done = submit_all(&mut *source, vec![read]);
        // Populating trusts the mapping, for which the file was opened and compared.
        if route != Route::Mapped {
            let e = done[0].result.as_ref().unwrap_err();
            assert_eq!((e.kind(), e.path()), (ErrorKind::Changed, Some(&*sample.path)), "{how}: {e}");
        }
        let e = files.verify_file(0).unwrap_err();
        assert_eq!((e.kind(), e.path()), (ErrorKind::Changed, Some(&*sample.path)), "{how}: {e}");
    }
}

fn a_file_that_shrinks_under_a_load_is_an_error(make: Make, route: Route) {
    let sample = Sample::new();
    let files = sample.files();
    let mut source = make(files.clone());
    let (first, _first) = read(route, 0, &sample, 0, PAGE);
    let (second, _second) = read(route, 1, &sample, 4 << 20, 5 << 20);
    submit_all(&mut *source, vec![first])[0].result.as_ref().unwrap();
    fs::File::options().write(true).open(&sample.path).unwrap().set_len(PAGE).unwrap();
    let done = submit_all(&mut *source, vec![second]);
    let e = done[0].result.as_ref().unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Truncated | ErrorKind::Changed), "{e:?}");
    assert_eq!(e.path(), Some(&*sample.path));
    assert_eq!(files.verify_file(0).unwrap_err().kind(), ErrorKind::Changed);
}

fn cancelling_returns_every_ticket_once(make: Make, route: Route) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    let mut given = Vec::new();
    for ticket in 0..200 {
        let (read, _) = read(route, ticket, &sample, (ticket % 5) << 20, ((ticket % 5) + 1) << 20);
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

fn waits_without_spinning_and_wakes_when_done(make: Make, route: Route) {
    let sample = Sample::new();
    let mut source = make(sample.files());
    assert!(!readable(source.wake(), 0), "readable with nothing submitted");
    source.submit(read(route, 0, &sample, 0, 1 << 20).0).ok().unwrap();
    source.flush().unwrap();
    assert!(readable(source.wake(), 10_000), "a finished read does not wake");
    wait(&mut *source, 1);
    assert!(!readable(source.wake(), 0), "readable with nothing left");
    let before = cpu_time();
    assert!(!readable(source.wake(), 100));
    assert!(cpu_time() - before < Duration::from_millis(20));
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Threads and descriptors of this process.
fn belongings() -> (usize, usize) {
    (fs::read_dir("/proc/self/task").unwrap().count(), fs::read_dir("/proc/self/fd").unwrap().count())
}

fn dropping_it_with_reads_in_flight_leaves_nothing_behind(make: Make, route: Route) {
    let sample = Sample::new();
    let before = belongings();
    for round in 0..20 {
        let mut source = make(sample.files());
        let mut memories = Vec::new();
        for ticket in 0..16 {
            let (read, memory) = read(route, ticket, &sample, (ticket % 5) << 20, ((ticket % 5) + 1) << 20);
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
    }
    assert_eq!(belongings(), before, "threads, descriptors");
    assert_eq!(penstock::source::quarantined(), 0);
}

/// Runs one test of this binary alone in a process of its own, because it counts what the process has.
fn alone(name: &str, body: impl FnOnce()) {
    if std::env::var_os("PENSTOCK_TEST_ALONE").is_some_and(|v| v == name) {
        return body();
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env("PENSTOCK_TEST_ALONE", name)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

macro_rules! conformance {
    ($name:ident, $route:expr, $make:expr) => {
        mod $name {
            use super::*;
            conformance!(@each $name, $route, $make;
                brings_the_bytes_of_random_extents
                reads_on_after_short_reads
                an_end_of_file_before_what_is_needed_is_truncated
                a_file_that_is_gone_or_other_is_changed
                a_file_that_shrinks_under_a_load_is_an_error
                cancelling_returns_every_ticket_once
                waits_without_spinning_and_wakes_when_done
            );
            #[test]
            fn dropping_it_with_reads_in_flight_leaves_nothing_behind() {
                let name = concat!(stringify!($name), "::dropping_it_with_reads_in_flight_leaves_nothing_behind");
                alone(name, || super::dropping_it_with_reads_in_flight_leaves_nothing_behind($make, $route));
            }
        }
    };
    (@each $name:ident, $route:expr, $make:expr; $($test:ident)*) => {
        $(#[test] fn $test() { super::$test($make, $route) })*
    };
}

conformance!(threads_buffered, Route::Buffered, |files| Box::new(Threads::new(files, 4, 8).unwrap()));
conformance!(threads_direct, Route::Direct, |files| Box::new(Threads::new(files, 4, 8).unwrap()));
conformance!(threads_mapped, Route::Mapped, |files| Box::new(Threads::new(files, 4, 8).unwrap()));
conformance!(uring, Route::Direct, |files| Box::new(Uring::new(files, 8).unwrap()));
conformance!(aio, Route::Direct, |files| Box::new(Aio::new(files, 8).unwrap()));
conformance!(router_direct, Route::Direct, |files| router(files, Io::Auto));
conformance!(router_aio, Route::Direct, |files| router(files, Io::Aio));
conformance!(router_threads, Route::Direct, |files| router(files, Io::Threads));
conformance!(router_buffered, Route::Buffered, |files| router(files, Io::Auto));
conformance!(router_mapped, Route::Mapped, |files| router(files, Io::Auto));
conformance!(throttle, Route::Buffered, |files| {
    let inner = Box::new(Threads::new(files.clone(), 4, 8).unwrap());
    let how = Throttling { rate: Some(1 << 30), latency: Duration::from_millis(1), ..Throttling::default() };
    Box::new(Throttle::new(inner, files, how).unwrap())
});

fn router(files: Arc<Files>, io: Io) -> Box<dyn Source> {
    Box::new(Router::new(files, &Options { io, depth: 8, ..Options::default() }).unwrap())
}

#[test]
fn a_scattered_read_fills_its_places_and_discards_the_rest() {
    let sample = Sample::new();
    for cap in [u64::MAX, PAGE] {
        let files = sample.files();
        files.cap_calls(cap);
        let mut source = Threads::new(files, 2, 8).unwrap();
        let memory = Memory::new(1 << 20);
        let mut random = Random(3);
        // More places than one call takes, and gaps longer than the scratch they go to.
        let mut places: Vec<(*mut u8, usize)> = Vec::new();
        let (mut at, mut to) = (777usize, 0usize);
        let mut expected = Vec::new();
        for i in 0..3000 {
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
            route: Route::Buffered,
            into: Destination::Scatter(places),
            keep: keep(&memory),
        };
        assert_eq!(*submit_all(&mut source, vec![read])[0].result.as_ref().unwrap(), len);
        assert!(memory.bytes()[..to] == expected);
    }
}
