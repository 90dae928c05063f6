//! Any file will do: this reads what it is told to, wherever that is.

#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use super::blocks::{BlockStage, BLOCK};
use super::crew::FRESH_READ;
use super::queues::{Receipt, FRESH_BYTES};
use super::*;
use crate::error::{Error, ErrorKind};
use crate::options::MIB;
use crate::store::Files;
#[cfg(debug_assertions)]
use crate::threads::{trip, untrip};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

const STALL: Duration = Duration::from_secs(20);

/// A test that does something to every handle of the process has it for itself, the others share it.
static HANDLES: RwLock<()> = RwLock::new(());

struct Made {
    _shared: Option<RwLockReadGuard<'static, ()>>,
    file: tempfile::NamedTempFile,
    bytes: Vec<u8>,
    kept: Arc<Kept>,
    ahead: Ahead,
}

fn made(size: u64, most: u64) -> Made {
    let made = unshared(size, most);
    Made { _shared: Some(HANDLES.read().unwrap_or_else(PoisonError::into_inner)), ..made }
}

fn unshared(size: u64, most: u64) -> Made {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..size).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect();
    std::fs::write(file.path(), &bytes).unwrap();
    let kept = Arc::new(Kept::new(Files::from_paths(&[file.path()]).unwrap()));
    let ahead = Ahead::new(kept.clone(), most, 0, STALL);
    Made { _shared: None, file, bytes, kept, ahead }
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

    /// Asks for 10 bytes at `offset`, and gives up when asked whether to go on.
    fn impatient(&self, offset: u64) -> ErrorKind {
        let part = FileRange { offset, len: 10, to: 0 };
        let data = 0..self.bytes.len() as u64;
        let found = self.ahead.fetch(0, std::iter::once(part), 10, data, &mut || false);
        found.map(|_| ()).unwrap_err().kind()
    }

    /// Answers for others, every few milliseconds, while `work` is done.
    fn while_others_are_answered<T>(&self, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    lock(&self.ahead.0.state).answers += 1;
                    self.ahead.0.done.notify_all();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let done = work();
            over.store(true, Ordering::Relaxed);
            done
        })
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
    // Two threads that need the file at once may both open it. From here on it is open.
    drop(made.kept.open(0).unwrap());
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

#[cfg(debug_assertions)]
#[test]
fn a_panic_of_a_thread_reaches_who_waits_for_it() {
    let _alone = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    let made = unshared(2 * MIB, 64 * MIB);
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
    let _alone = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    let made = unshared(2 * MIB, 64 * MIB);
    made.same(&[0..10]);
    stop_reading_ahead(STALL);
    assert_eq!(lock(&made.ahead.0.state).threads, 0);
    made.same(&[MIB..MIB + 10]);
    made.settle();
    assert_ne!(made.ahead.held(), 0);
}

#[test]
fn the_process_keeps_64_descriptors() {
    let _alone = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [7; 100]).unwrap();
    let many: Vec<_> = (0..100).map(|_| Kept::new(Files::from_paths(&[file.path()]).unwrap())).collect();
    let here = file.path().canonicalize().unwrap();
    let open = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        fds.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == here)).count()
    };
    // Another thread closes what may be on a network file system.
    let until = |is_so: &dyn Fn() -> bool| {
        let end = Instant::now() + STALL;
        while !is_so() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let before = open();
    for kept in &many {
        drop(kept.open(0).unwrap());
        until(&|| open() - before <= crate::store::kept::MOST_KEPT);
    }
    assert!(open() - before >= 32);
    drop(many);
    until(&|| open() == before);
}

#[test]
fn the_last_job_that_fails_is_seen_with_the_count() {
    for _ in 0..50 {
        let receipt = Receipt::new(None, 2);
        receipt.end(Ok(()));
        std::thread::scope(|scope| {
            scope.spawn(|| receipt.end(Err(Error::new(ErrorKind::Changed, "on purpose"))));
            while let Ok(progress) = receipt.progress() {
                assert_eq!(progress.left, 1);
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn nothing_is_handed_out_while_a_look_that_is_due_has_no_answer() {
    let made = made(16 * MIB, 64 * MIB);
    made.same(&[0..1000]);
    made.settle();
    made.file.as_file().set_len(16 * MIB + 1).unwrap();
    std::thread::sleep(FRESH_BYTES);
    let hang = lock(&made.ahead.0.looks);
    // Bytes that are there, and bytes that are read. The first of each begins with the look.
    for offset in [1000, 2000, 8 * MIB, 12 * MIB] {
        assert_eq!(made.impatient(offset), ErrorKind::Cancelled, "{offset}");
    }
    drop(hang);
    made.settle();
    assert_eq!(made.impatient(3000), ErrorKind::Changed);
}

#[test]
fn a_look_that_began_before_a_change_was_found_does_not_hide_it() {
    let made = made(2 * MIB, 64 * MIB);
    made.same(&[0..1000]);
    made.settle();
    made.file.as_file().set_len(2 * MIB + 1).unwrap();
    std::thread::sleep(FRESH_BYTES);
    assert_eq!(made.impatient(1000), ErrorKind::Changed);
    made.settle();
    assert!(lock(&made.ahead.0.state).looked[&0].changed);
}

#[test]
fn a_read_that_hangs_ends_although_others_are_answered() {
    let mut made = made(4 * MIB, 64 * MIB);
    made.ahead = Ahead::new(made.kept.clone(), 64 * MIB, 0, Duration::from_millis(200));
    made.same(&[0..1000]);
    made.settle();
    std::thread::sleep(FRESH_BYTES);
    let began = Instant::now();
    let crew = made.ahead.0.clone();
    let hang = lock(&crew.looks);
    made.while_others_are_answered(|| {
        assert_eq!(made.impatient(1000), ErrorKind::Cancelled);
        assert_eq!(made.get(&[1000..2000]).unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(made.get(&[2 * MIB..2 * MIB + 10]).unwrap_err().kind(), ErrorKind::Timeout);
    });
    drop(hang);
    assert!(began.elapsed() < STALL);
}

#[test]
fn a_block_that_failed_and_is_wanted_again_keeps_its_waiters() {
    let mut blocks = Blocks::new(4 * MIB);
    let place = (0, 3);
    assert!(blocks.want(place).unwrap());
    blocks.get(place).unwrap().stage = BlockStage::Failed(Error::new(ErrorKind::Io, "on purpose"));
    assert!(blocks.want(place).unwrap());
    blocks.unwant(place);
    blocks.get(place).unwrap().stage = BlockStage::Here(Arc::new(Buffer::new(BLOCK).unwrap()));
    blocks.clear(None);
    assert!(blocks.has(place), "one still waits");
}

#[test]
fn a_block_that_nobody_reads_or_waits_for_goes() {
    let mut blocks = Blocks::new(4 * MIB);
    assert!(blocks.want((0, 3)).unwrap());
    blocks.unwant((0, 3));
    assert_eq!(blocks.held(), 0);
}

#[test]
fn blocks_of_many_callers_stay_within_the_window() {
    let mut blocks = Blocks::new(8 * BLOCK);
    let found: Vec<_> = (0..20).map(|number| blocks.want((0, number))).collect();
    assert_eq!(found.iter().filter(|one| one.is_some()).count(), 8);
    assert_eq!(blocks.held(), 8 * BLOCK);
    assert!(blocks.want((0, 7)).is_some(), "it is there");
}

#[test]
fn a_caller_that_gave_up_after_the_release_leaves_nothing_open() {
    let made = made(2 * MIB, 64 * MIB);
    made.same(&[0..10]);
    // A read ahead that ends after the release may look at the file then, and the next look would not be due yet.
    made.settle();
    made.ahead.release();
    std::thread::sleep(FRESH_READ);
    let hang = lock(&made.ahead.0.looks);
    assert_eq!(made.impatient(MIB), ErrorKind::Cancelled);
    drop(hang);
    made.settle();
    assert_eq!((made.kept.files().take_open(0).len(), made.ahead.held()), (0, 0));
}

#[test]
fn threads_that_read_ahead_block_signals() {
    let made = made(2 * MIB, 64 * MIB);
    made.same(&[0..10]);
    let blocks = |status: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap();
        u64::from_str_radix(mask, 16).unwrap() & (1 << (libc::SIGINT - 1)) != 0
    };
    let until = Instant::now() + STALL;
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let ours = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        let ours: Vec<_> = ours.filter(|status| status.starts_with("Name:\tpenstock-ahead")).collect();
        // One that has just started is about to.
        if !ours.is_empty() && ours.iter().all(|status| blocks(status)) {
            return;
        }
        assert!(Instant::now() < until, "{ours:?}");
        made.same(&[0..10]);
    }
}
