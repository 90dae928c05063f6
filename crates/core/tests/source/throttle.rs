//! The throttled source does what it says: other tests lean on it.

use crate::sample::*;
use penstock::error::ErrorKind;
use penstock::extent::{Lane, Ticket};
use penstock::source::{Source, Threads, Throttle, Throttling};
use std::time::{Duration, Instant};

fn throttled(sample: &Sample, how: Throttling) -> Throttle {
    let files = sample.files();
    Throttle::new(Box::new(Threads::new(files.clone(), 4, 64).unwrap()), files, how).unwrap()
}

#[test]
fn bytes_come_no_faster_than_the_rate() {
    let sample = Sample::new();
    let mut source = throttled(&sample, Throttling { rate: Some(20 << 20), ..Throttling::default() });
    let start = Instant::now();
    let reads = (0..4).map(|i| read(Lane::BUFFERED, i, &sample, i << 20, (i + 1) << 20).0).collect();
    submit_all(&mut source, reads);
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
}

#[test]
fn the_chosen_read_fails_and_no_other() {
    let sample = Sample::new();
    let mut source = throttled(&sample, Throttling { fail: Some((2, libc::EIO)), ..Throttling::default() });
    let reads = (0..5).map(|i| read(Lane::BUFFERED, i, &sample, i << 20, (i + 1) << 20).0).collect();
    for done in submit_all(&mut source, reads) {
        match (done.ticket.0, done.result) {
            (2, Err(e)) => {
                assert_eq!((e.kind(), e.errno()), (ErrorKind::Io, Some(libc::EIO)));
                assert_eq!((e.path(), e.byte_range()), (Some(&*sample.path), Some(2 << 20..3 << 20)));
            }
            (_, result) => assert_eq!(result.unwrap(), 1 << 20),
        }
    }
}

#[test]
fn what_hangs_comes_back_when_it_is_released() {
    let sample = Sample::new();
    let mut source = throttled(&sample, Throttling { hang: Some(1), ..Throttling::default() });
    for i in 0..2 {
        source.submit(read(Lane::BUFFERED, i, &sample, 0, PAGE).0).ok().unwrap();
    }
    assert_eq!(wait(&mut source, 1)[0].ticket, Ticket(0));
    assert!(wait_nothing(&mut source, Duration::from_millis(100)), "it came back by itself");
    let release = source.release();
    std::thread::spawn(move || release.release()).join().unwrap();
    assert!(readable(source.wake(), 5000));
    assert_eq!(wait(&mut source, 1)[0].ticket, Ticket(1));
}

/// Whether nothing is done for that long.
fn wait_nothing(source: &mut dyn Source, time: Duration) -> bool {
    let until = Instant::now() + time;
    let mut done = Vec::new();
    while Instant::now() < until {
        readable(source.wake(), 20);
        poll(source, &mut done);
    }
    done.is_empty() && source.in_flight() == 1
}
