//! Facts about the files: residency, identity, file systems.

use crate::sample::*;
use penstock::error::ErrorKind;
use penstock::extent::Lane;
use penstock::store::{evict, facts_at, warm, FsKind, Residency};
use std::fs;
use std::path::Path;

#[test]
fn residency_is_all_nothing_or_the_part_that_is_there() {
    let sample = Sample::new();
    let files = sample.files();
    let facts = files.facts(0).unwrap();
    assert_eq!(warm(&sample.path, 2).unwrap(), SIZE);
    assert_eq!(files.resident_ranges(0).unwrap().ranges, [0..SIZE]);
    if facts.kind == FsKind::Memory {
        return;
    }
    assert_eq!(evict(&sample.path, None).unwrap(), 0, "bytes left in the page cache");
    let cold = files.resident_ranges(0).unwrap();
    assert_eq!(cold, Residency { ranges: vec![], calls: cold.calls, samples: cold.samples });

    warm(&sample.path, 1).unwrap();
    let left = evict(&sample.path, Some(4 << 20..SIZE)).unwrap();
    let half = files.resident_ranges(0).unwrap();
    assert_eq!(half.bytes(), left);
    // A large folio across the cut stays whole.
    assert!((4 << 20..5 << 20).contains(&left), "{half:?}");
    assert_eq!(half.ranges[0].start, 0);
    assert!(half.samples > 0 || half.calls < 40, "{half:?}");
}

#[test]
fn a_memory_file_system_is_wholly_resident_and_takes_no_direct_reads() {
    if !Path::new("/dev/shm").is_dir() {
        return;
    }
    let sample = Sample::within(Path::new("/dev/shm"));
    let facts = facts_at(&sample.path).unwrap();
    assert_eq!(
        (facts.kind, facts.lanes.unit, facts.lanes.mapping),
        (FsKind::Memory, None, Some(Lane::MAPPED)),
        "{facts:?}"
    );
    let all = sample.files().resident_ranges(0).unwrap();
    assert_eq!((all.ranges, all.calls, all.samples), (vec![0..SIZE], 0, 0));
}

#[test]
fn files_that_stay_as_they_were_verify_and_others_do_not() {
    let sample = Sample::new();
    let files = sample.files();
    files.verify_file(0).unwrap();
    drop(files.open(0, false).unwrap());
    files.verify_file(0).unwrap();
    fs::OpenOptions::new().append(true).open(&sample.path).unwrap().set_len(SIZE + 1).unwrap();
    let e = files.verify_file(0).unwrap_err();
    assert_eq!((e.kind(), e.path()), (ErrorKind::Changed, Some(&*sample.path)));
    assert!(e.to_string().contains("grew from"), "{e}");
}

#[test]
fn a_descriptor_is_opened_once_for_many_reads() {
    let sample = Sample::new();
    let files = sample.files();
    for _ in 0..10 {
        drop(files.open(0, false).unwrap());
    }
    assert_eq!(files.opens(), 1);
    files.close_idle();
    drop(files.open(0, false).unwrap());
    assert_eq!(files.opens(), 2);
}

#[test]
fn an_empty_file_has_nothing_resident() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty");
    fs::write(&path, b"").unwrap();
    assert_eq!(penstock::store::Files::from_paths(&[path]).unwrap().resident_ranges(0).unwrap(), Residency::default());
}
