//! Any file will do: this reads what it is told to, wherever that is.

#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use super::blocks::BLOCK;
use super::crew::FRESH_READ;
use super::queues::FRESH_BYTES;
use super::*;
use crate::error::ErrorKind;
use crate::options::MIB;
use crate::store::Files;
use crate::threads::{trip, untrip};
use std::os::unix::fs::FileExt;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

const STALL: Duration = Duration::from_secs(20);

/// Tests whose threads must not panic share it.
static PANICS: RwLock<()> = RwLock::new(());

struct Made {
    _no_panics: Option<RwLockReadGuard<'static, ()>>,
    file: tempfile::NamedTempFile,
    bytes: Vec<u8>,
    kept: Arc<Kept>,
    ahead: Ahead,
}

fn made(size: u64, most: u64) -> Made {
    let made = unguarded(size, most);
    Made { _no_panics: Some(PANICS.read().unwrap_or_else(PoisonError::into_inner)), ..made }
}

fn unguarded(size: u64, most: u64) -> Made {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..size).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect();
    std::fs::write(file.path(), &bytes).unwrap();
    let kept = Arc::new(Kept::new(Files::from_paths(&[file.path()]).unwrap()));
    let ahead = Ahead::new(kept.clone(), most, 0, STALL);
    Made { _no_panics: None, file, bytes, kept, ahead }
}

impl Made {
    fn get(&self, parts: &[Range<u64>]) -> Result<Option<Vec<u8>>> {
        let nbytes = parts.iter().map(|part| part.end - part.start).sum();
        let mut to = 0;
        let parts: Vec<FileRange> = parts
            .iter()
            .map(|part| {
                to += part.end - part.start;
                FileRange { offset: part.start, len: part.end - part.start, to: to - (part.end - part.start) }
            })
            .collect();
        let data = 0..self.bytes.len() as u64;
        let found = self.ahead.fetch(0, parts.into_iter(), nbytes, data, &mut || true)?;
        // SAFETY: the memory has so many bytes, and all of them are there.
        Ok(found.map(|memory| unsafe { std::slice::from_raw_parts(memory.at(), nbytes as usize) }.to_vec()))
    }

    fn same(&self, parts: &[Range<u64>]) {
        let expected: Vec<u8> =
            parts.iter().flat_map(|part| &self.bytes[part.start as usize..part.end as usize]).copied().collect();
        assert!(self.get(parts).unwrap().unwrap() == expected, "{parts:?}");
    }

    /// Waits until nothing is read any more.
    fn settle(&self) {
        let until = Instant::now() + STALL;
        loop {
            let state = lock(&self.ahead.0.state);
            if state.threads == state.idle && state.ahead.is_empty() && state.wanted.is_empty() {
                return;
            }
            assert!(Instant::now() < until);
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn every_byte_comes_whatever_is_asked_for_and_in_whatever_order() {
    let size = 5 * MIB + 12_345;
    let made = made(size, 64 * MIB);
    let mut random = 12_345_u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..200 {
        let most = [100, 5000, 300_000, 2_000_000][next(4) as usize];
        let start = next(size);
        made.same(&[start..(start + 1 + next(most)).min(size)]);
    }
    // Columns: many short parts, over blocks.
    let rows: Vec<_> = (0..900).map(|row| row * 5000 + 17..row * 5000 + 17 + 1234).collect();
    made.same(&rows);
    // Long parts, which are read to where they belong, from the middle of blocks to the middle of others.
    made.same(&[1000..1_500_000, 1_600_000..1_600_010, 2_000_001..size]);
    made.same(&[0..size]);
    made.same(&[size - 1..size]);
    made.same(&[]);
}

#[test]
fn what_is_asked_for_in_order_is_read_once_and_is_there_before_it_is_wanted() {
    let made = made(8 * MIB, 64 * MIB);
    let (step, began) = (64 << 10, Instant::now());
    for number in 0..8 * MIB / step {
        made.same(&[number * step..(number + 1) * step]);
        made.settle();
    }
    // One read for each block, and looks at the file. Nothing is left of what was handed out.
    let looks = (began.elapsed().as_millis() / FRESH_BYTES.as_millis()) as u64;
    let state = lock(&made.ahead.0.state);
    assert!(state.answers <= 8 * MIB / BLOCK + looks, "{} with {looks} looks", state.answers);
    assert_eq!(state.window.held(), 0);
    assert_eq!(made.kept.files().opens(), 1);
}

#[test]
fn no_more_is_held_than_the_window() {
    let made = made(32 * MIB, 2 * MIB);
    // A part of each block: none of them is used up.
    for number in 0..128 {
        made.same(&[number * BLOCK..number * BLOCK + 100]);
        assert!(made.ahead.held() <= 2 * MIB + BLOCK, "{}", made.ahead.held());
    }
    // More blocks at once than the window has room for: a load does it.
    let many: Vec<_> = (0..20).map(|number| number * BLOCK + 5..number * BLOCK + 10).collect();
    assert!(made.get(&many).unwrap().is_none());
    made.settle();
    made.ahead.release();
    assert_eq!(made.ahead.held(), 0);
    made.same(&[10..20]);
    made.settle();
    assert_eq!(made.ahead.held(), 0);
}

#[test]
fn a_file_that_changes_is_an_error_within_a_window() {
    let made = made(16 * MIB, 64 * MIB);
    made.same(&[0..1000]);
    made.file.as_file().write_all_at(b"changed", 15 * MIB).unwrap();
    made.file.as_file().set_len(16 * MIB + 1).unwrap();
    std::thread::sleep(FRESH_READ);
    let error = made.get(&[10 * MIB..10 * MIB + 1000]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed);
    assert!(error.path().is_some());
    assert_eq!(made.get(&[0..1000]).unwrap_err().kind(), ErrorKind::Changed);
    assert_eq!(made.ahead.held() % BLOCK, 0);
}

#[test]
fn bytes_that_were_read_a_while_ago_are_handed_out_after_a_look_at_the_file() {
    let made = made(MIB, 64 * MIB);
    made.same(&[0..1000]);
    made.settle();
    let other = tempfile::NamedTempFile::new_in(made.file.path().parent().unwrap()).unwrap();
    std::fs::write(other.path(), &made.bytes).unwrap();
    std::fs::rename(other.path(), made.file.path()).unwrap();
    std::thread::sleep(FRESH_BYTES);
    assert_eq!(made.get(&[1000..2000]).unwrap_err().kind(), ErrorKind::Changed);
}

#[test]
fn a_file_that_is_cut_off_is_an_error() {
    let made = made(4 * MIB, 64 * MIB);
    made.same(&[0..1000]);
    made.settle();
    made.file.as_file().set_len(MIB).unwrap();
    for wanted in [3 * MIB..3 * MIB + 10, MIB..4 * MIB] {
        let error = made.get(&[wanted]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Changed | ErrorKind::Truncated), "{error}");
    }
}

#[test]
fn threads_share_it() {
    let made = made(8 * MIB, 4 * MIB);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let made = &made;
            let _joined = std::thread::Builder::new().spawn_scoped(scope, move || {
                for number in 0..200u64 {
                    let start = (number * 4 + thread) * 10_000;
                    made.same(&[start..start + 10_000]);
                }
            });
        }
    });
}

#[test]
fn a_caller_that_gives_up_is_let_go() {
    let made = made(4 * MIB, 64 * MIB);
    let hang = lock(&made.ahead.0.state);
    let outcome = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let part = FileRange { offset: 0, len: 10, to: 0 };
            made.ahead.fetch(0, std::iter::once(part), 10, 0..4 * MIB, &mut || false).map(|found| found.is_some())
        });
        drop(hang);
        asked.join().unwrap()
    });
    // It was quicker, or it was cancelled.
    assert!(outcome.is_ok() || outcome.is_err_and(|e| e.kind() == ErrorKind::Cancelled));
}

#[test]
fn a_panic_of_a_thread_reaches_who_waits_for_it() {
    let _panics = PANICS.write().unwrap_or_else(PoisonError::into_inner);
    let made = unguarded(2 * MIB, 64 * MIB);
    trip("penstock-ahead");
    let block = made.get(&[0..10]);
    let direct = made.get(&[MIB..2 * MIB]);
    untrip();
    for error in [block.unwrap_err(), direct.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(error.to_string().contains("penstock-ahead"), "{error}");
    }
    made.same(&[0..10]);
}

#[test]
fn threads_end_before_a_fork_and_start_again() {
    let made = made(2 * MIB, 64 * MIB);
    made.same(&[0..10]);
    stop_reading_ahead(STALL);
    assert_eq!(lock(&made.ahead.0.state).threads, 0);
    made.same(&[MIB..MIB + 10]);
    made.settle();
    assert_ne!(made.ahead.held(), 0);
}

#[test]
fn the_process_keeps_64_descriptors() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [7; 100]).unwrap();
    let many: Vec<_> = (0..100).map(|_| Kept::new(Files::from_paths(&[file.path()]).unwrap())).collect();
    let here = file.path().canonicalize().unwrap();
    let open = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        fds.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == here)).count()
    };
    let before = open();
    for kept in &many {
        drop(kept.open(0).unwrap());
        assert!(open() - before <= crate::store::kept::MOST_KEPT);
    }
    assert!(open() - before >= 32);
    drop(many);
    assert_eq!(open(), before);
}
