//! The files of the disk cache: on their own, beside other processes, and after faults.

use super::asking::AskingTurn;
use super::lock::{retried, PATIENCE};
use super::*;
use crate::error::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

mod access;
#[cfg(feature = "remote")]
mod again;
mod faults;
mod hub;
mod processes;
mod room;

fn settings(folder: &Path) -> DiskCacheSettings {
    let folder = folder.to_owned();
    DiskCacheSettings { folder, size: None, free: Some(0), shared: false, verify: false, refetch: true }
}

/// A cache in a folder that is removed afterwards.
fn cache() -> (TempDir, Arc<CacheFolder>) {
    let folder = tempfile::tempdir().unwrap();
    let cache = CacheFolder::open(&settings(&folder.path().join("cache"))).unwrap();
    (folder, cache)
}

fn key(name: &str) -> CacheKey {
    CacheKey::new(&format!("endpoint s3://bucket/{name}"), &format!("s3://bucket/{name}"))
}

/// The bytes of a block. They tell their place.
fn block(entry: &CacheEntry, block: u32) -> Vec<u8> {
    let range = entry.range(block);
    let words = range.start / 8..range.end.div_ceil(8);
    let mut bytes: Vec<u8> = words.flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    bytes.truncate((range.end - range.start) as usize);
    bytes
}

fn fill(entry: &CacheEntry) {
    for number in 0..entry.blocks() {
        entry.write(number, &block(entry, number)).unwrap();
    }
}

/// The bytes of each block that is there are right; how many are there.
fn check(entry: &CacheEntry) -> u32 {
    let mut there = 0;
    for number in 0..entry.blocks() {
        if entry.state(number).unwrap() == BlockState::There {
            let range = entry.range(number);
            let mut read = vec![0; (range.end - range.start) as usize];
            entry.read(range, &mut read).unwrap();
            assert!(read == block(entry, number), "block {number} has other bytes");
            assert!(entry.verify(number).unwrap(), "block {number} has another CRC");
            there += 1;
        }
    }
    there
}

/// The map of an entry.
fn map_of(entry: &CacheEntry) -> PathBuf {
    entry.data_path().with_extension("map")
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for one in std::fs::read_dir(folder).unwrap().map(|one| one.unwrap().path()) {
        match one.is_dir() {
            true => found.extend(files(&one)),
            false => found.push(one),
        }
    }
    found
}

#[test]
fn blocks_that_were_written_are_there_for_every_open() {
    let (_folder, cache) = cache();
    assert!(cache.is_writable() && cache.is_private());
    let key = key("model");
    let size = 2 * BLOCK + 1000;
    assert!(cache.find(&key, "v1", size).unwrap().is_none());
    let entry = cache.find_or_make(&key, "v1", size).unwrap();
    assert_eq!((entry.blocks(), entry.size(), entry.range(2)), (3, size, 2 * BLOCK..size));
    let other = cache.find(&key, "v1", size).unwrap().unwrap();
    entry.write(0, &block(&entry, 0)).unwrap();
    entry.write(2, &block(&entry, 2)).unwrap();
    let states = [BlockState::There, BlockState::Missing, BlockState::There];
    assert_eq!(other.states(0..3).unwrap(), states);
    assert_eq!(other.there().unwrap(), [0..BLOCK, 2 * BLOCK..size]);
    assert!(!other.is_complete().unwrap());
    assert_eq!((other.sync().unwrap(), entry.sync().unwrap()), (2, 0));
    other.write(1, &block(&other, 1)).unwrap();
    assert!(entry.is_complete().unwrap());
    assert_eq!(check(&entry), 3);
    assert_eq!(
        (entry.blocks_of(5..BLOCK), entry.blocks_of(BLOCK..size + 9), entry.blocks_of(7..7)),
        (0..1, 1..3, 0..0)
    );
    assert!(cache.find(&key, "v2", size).unwrap().is_none() && cache.find(&key, "v1", size + 1).unwrap().is_none());
}

#[test]
fn an_empty_object_is_complete_and_an_object_that_no_disk_holds_is_refused() {
    let (_folder, cache) = cache();
    let entry = cache.find_or_make(&key("empty"), "v", 0).unwrap();
    assert!(entry.is_complete().unwrap() && entry.there().unwrap().is_empty());
    assert_eq!(entry.sync().unwrap(), 0);
    let refused = cache.find_or_make(&key("huge"), "v", u64::MAX).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let long = "v".repeat(1 << 17);
    assert_eq!(cache.find_or_make(&key("long"), &long, 5).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(files(&cache.path().join("objects")).len(), 2, "what was refused left no file");
}

#[test]
fn a_claim_is_seen_by_others_until_it_is_released_written_or_dropped() {
    let (_folder, cache) = cache();
    let one = cache.find_or_make(&key("model"), "v", 10 * BLOCK).unwrap();
    let other = cache.find(&key("model"), "v", 10 * BLOCK).unwrap().unwrap();
    let (ours, theirs) = (BlockState::Claimed(one.number()), BlockState::Claimed(other.number()));
    assert_ne!(ours, theirs);
    assert_eq!(one.claim_run(2..5).unwrap(), [ours; 3]);
    assert_eq!(one.claim_run(2..5).unwrap(), [ours; 3], "what is claimed here stays so");
    assert_eq!(other.states(1..6).unwrap(), [BlockState::Missing, ours, ours, ours, BlockState::Missing]);
    assert_eq!(other.claimed().unwrap(), [(2, one.number()), (3, one.number()), (4, one.number())]);
    // A block that somebody brings in place of its holder keeps the holder's lock. A holder's own has none.
    other.write(4, &block(&one, 4)).unwrap();
    one.write(3, &block(&one, 3)).unwrap();
    assert!(other.is_locked(4) && !other.is_locked(3));
    other.forget(4).unwrap();
    one.release(4);
    one.release(9);
    assert_eq!(other.claim_run(0..7).unwrap(), [theirs, theirs, ours, BlockState::There, theirs, theirs, theirs]);
    assert_eq!(one.state(4).unwrap(), theirs);
    drop(one);
    assert_eq!(other.state(2).unwrap(), BlockState::Missing);
    assert_eq!(other.claim(2).unwrap(), theirs);
    other.release_all();
    assert_eq!(other.states(0..10).unwrap().iter().filter(|state| **state == BlockState::Missing).count(), 9);
}

#[test]
fn a_block_is_written_without_a_claim_and_once_only() {
    let (_folder, cache) = cache();
    let one = cache.find_or_make(&key("model"), "v", 2 * BLOCK).unwrap();
    let other = cache.find(&key("model"), "v", 2 * BLOCK).unwrap().unwrap();
    one.claim_run(0..2).unwrap();
    other.write(0, &block(&other, 0)).unwrap();
    assert_eq!(one.state(0).unwrap(), BlockState::There);
    assert_eq!(other.sync().unwrap(), 1);
    // The late write of the holder changes nothing: the block stays synced.
    one.write(0, &vec![7; BLOCK as usize]).unwrap();
    assert_eq!((one.sync().unwrap(), check(&one)), (0, 1));
    let short = one.write(1, &[1, 2, 3]).unwrap_err();
    assert!(short.kind() == ErrorKind::Internal && one.state(1).unwrap() == BlockState::Missing, "{short}");
    assert!(one.write(2, &[]).is_err() && one.claim(2).is_err() && one.state(2).is_err());
}

#[test]
fn a_flipped_byte_is_found_and_its_block_can_be_written_anew() {
    let (_folder, cache) = cache();
    let entry = cache.find_or_make(&key("model"), "v", BLOCK + 10).unwrap();
    fill(&entry);
    entry.sync().unwrap();
    let mut bytes = std::fs::read(entry.data_path()).unwrap();
    bytes[BLOCK as usize + 3] ^= 4;
    std::fs::write(entry.data_path(), &bytes).unwrap();
    assert!(entry.verify(0).unwrap() && !entry.verify(1).unwrap());
    assert!(!entry.verify_bytes(1, &bytes[BLOCK as usize..]).unwrap());
    assert!(entry.verify_bytes(1, &block(&entry, 1)).unwrap());
    entry.forget(1).unwrap();
    assert!(entry.verify(1).unwrap() && entry.state(1).unwrap() == BlockState::Missing);
    entry.write(1, &block(&entry, 1)).unwrap();
    assert_eq!(check(&entry), 2);
}

#[test]
fn bytes_that_are_not_aligned_are_written_through_the_page_cache_and_aligned_ones_past_it() {
    let (_folder, cache) = cache();
    let entry = cache.find_or_make(&key("model"), "v", 3 * BLOCK).unwrap();
    let pages = (BLOCK as usize + 4096) / 4096;
    let mut memory = vec![0u8; (pages + 1) * 4096];
    let start = memory.as_ptr().align_offset(4096);
    for (number, offset) in [(0, start), (1, start + 1), (2, start + 512)] {
        let bytes = &mut memory[offset..offset + BLOCK as usize];
        bytes.copy_from_slice(&block(&entry, number));
        entry.write(number, bytes).unwrap();
    }
    assert_eq!((check(&entry), entry.sync().unwrap()), (3, 3));
}

#[test]
fn versions_and_listings_are_kept_and_replaced() {
    let (_folder, cache) = cache();
    let (one, other) = (key("one"), key("other"));
    assert_eq!((cache.known(&one).unwrap(), cache.list(&one).unwrap()), (None, None));
    cache.note(&one, "v1", 7).unwrap();
    cache.note(&other, "v1", 8).unwrap();
    cache.note(&one, "\"v2\"", 9).unwrap();
    assert_eq!(cache.known(&one).unwrap(), Some(("\"v2\"".to_owned(), 9)));
    assert_eq!(cache.known(&other).unwrap(), Some(("v1".to_owned(), 8)));
    let names = ["a".to_owned(), "b/c".to_owned()];
    cache.note_list(&one, &names).unwrap();
    assert_eq!(cache.list(&one).unwrap().unwrap(), names);
    cache.note_list(&one, &[]).unwrap();
    assert_eq!((cache.list(&one).unwrap(), cache.list(&other).unwrap()), (Some(Vec::new()), None));
    assert!(files(cache.path()).iter().all(|file| !file.to_string_lossy().contains(".part")));
}

#[test]
fn no_name_of_a_file_tells_what_it_holds() {
    let (_folder, cache) = cache();
    let key = CacheKey::new("https://host/model?token=secret", "https://host/\u{1b}model");
    assert_eq!(key.shown(), "https://host/model");
    cache.find_or_make(&key, "v", 9).unwrap();
    cache.note(&key, "v", 9).unwrap();
    cache.note_list(&key, &[]).unwrap();
    let found = files(cache.path());
    assert_eq!(found.len(), 6);
    for file in found {
        assert!(!file.to_string_lossy().contains("host"), "{file:?}");
        let bytes = std::fs::read(&file).unwrap();
        assert!(!bytes.windows(6).any(|part| part == b"secret" || part == b"token="), "{file:?}");
    }
}

#[test]
fn a_block_that_is_made_missing_beside_a_sync_stays_so() {
    // In memory: a sync is as short as its marks.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = CacheFolder::open(&settings(&folder.path().join("cache"))).unwrap();
    let one = cache.find_or_make(&key("model"), "v", 64 * BLOCK).unwrap();
    let other = cache.find(&key("model"), "v", 64 * BLOCK).unwrap().unwrap();
    fill(&one);
    let bytes = block(&one, 63);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                other.sync().unwrap();
            }
        });
        let came_back = (0..4000).find(|_| {
            one.forget(63).unwrap();
            let state = (0..20).map(|_| one.state(63).unwrap()).find(|state| *state != BlockState::Missing);
            one.write(63, &bytes).unwrap();
            state.is_some()
        });
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(came_back, None, "the sync has marked a block that was missing");
    });
}

#[test]
fn a_process_that_was_stopped_itself_looks_again_before_it_gives_up() {
    let mut attempts = 0;
    let attempt = || {
        attempts += 1;
        if attempts == 1 {
            std::thread::sleep(PATIENCE);
        }
        Ok::<_, Error>((attempts == 3).then_some(()))
    };
    assert_eq!(retried(attempt).unwrap(), Some(()));
}

#[test]
fn the_right_to_mark_blocks_does_not_end_with_the_last_claim() {
    let (_folder, cache) = cache();
    let one = cache.find_or_make(&key("model"), "v", 2 * BLOCK).unwrap();
    let other = cache.find(&key("model"), "v", 2 * BLOCK).unwrap().unwrap();
    one.claim(0).unwrap();
    let marking = one.marking().unwrap();
    one.write(0, &block(&one, 0)).unwrap();
    assert_eq!(other.marking().map(drop).unwrap_err().kind(), ErrorKind::Timeout);
    drop(marking);
    other.marking().unwrap();
}

#[test]
fn one_of_those_that_want_a_location_asks_and_the_others_wait_until_it_has_ended_or_is_silent() {
    let (_folder, cache) = cache();
    let begin = |name: &str| AskingTurn::begin(&cache, &key(name)).unwrap();
    let (one, other, elsewhere) = (begin("a"), begin("a"), begin("b"));
    assert_eq!((one.is_ours(), other.is_ours(), elsewhere.is_ours()), (true, false, true));
    let (is_over, began) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            other.wait().unwrap();
            // A test that the machine puts aside for so long is silent.
            let is_silent = began.elapsed() >= Duration::from_secs(1);
            assert!(is_over.load(Ordering::SeqCst) || is_silent, "the first one still asks");
        });
        std::thread::sleep(Duration::from_millis(50));
        is_over.store(true, Ordering::SeqCst);
        drop(one);
        waits.join().unwrap();
    });
    let silent = begin("a");
    let began = Instant::now();
    begin("a").wait().unwrap();
    assert!(silent.is_ours() && began.elapsed() >= Duration::from_secs(1));
}
