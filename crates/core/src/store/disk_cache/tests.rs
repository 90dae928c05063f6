//! Entries of a cache in one process.

use super::*;
use std::os::unix::fs::FileExt;
use std::path::Path;

fn settings(folder: &Path) -> DiskCacheSettings {
    DiskCacheSettings {
        folder: folder.to_owned(),
        size: None,
        free: Some(0),
        shared: false,
        verify: false,
        refetch: true,
    }
}

fn bytes(size: u64) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + at / 4096) as u8).collect()
}

#[test]
fn blocks_that_were_written_are_there_for_the_next_open_and_synced_ones_after_a_boot() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CacheFolder::open(&settings(&folder.path().join("cache"))).unwrap();
    assert!(cache.is_writable() && cache.is_private());
    let key = CacheKey::new("endpoint s3://bucket/model", "s3://bucket/model");
    let size = 2 * BLOCK + 1000;
    assert!(cache.find(&key, "v1", size).unwrap().is_none());
    let entry = cache.find_or_make(&key, "v1", size).unwrap();
    assert_eq!((entry.blocks(), entry.size(), entry.range(2)), (3, size, 2 * BLOCK..size));
    assert_eq!(entry.claim_run(0..3).unwrap(), vec![BlockState::Claimed(entry.number()); 3]);
    let other = cache.find(&key, "v1", size).unwrap().unwrap();
    assert_eq!(other.states(0..3).unwrap(), vec![BlockState::Claimed(entry.number()); 3]);
    assert_eq!(other.claim(1).unwrap(), BlockState::Claimed(entry.number()));
    let whole = bytes(size);
    entry.write(0, &whole[..BLOCK as usize]).unwrap();
    entry.release(1);
    entry.write(2, &whole[2 * BLOCK as usize..]).unwrap();
    let states = [BlockState::There, BlockState::Missing, BlockState::There];
    assert_eq!(other.states(0..3).unwrap(), states);
    assert_eq!(other.there().unwrap(), [0..BLOCK, 2 * BLOCK..size]);
    assert!(!other.is_complete().unwrap());
    let mut read = vec![0; 1000];
    other.read(2 * BLOCK..size, &mut read).unwrap();
    assert_eq!(read, whole[2 * BLOCK as usize..]);
    assert_eq!((other.sync().unwrap(), entry.sync().unwrap()), (2, 0));
    assert_eq!(other.claim(1).unwrap(), BlockState::Claimed(other.number()));
    other.write(1, &whole[BLOCK as usize..2 * BLOCK as usize]).unwrap();
    assert!(entry.is_complete().unwrap());
    assert!((0..3).all(|block| entry.verify(block).unwrap()));
    cache.note(&key, "v1", size).unwrap();
    assert_eq!(cache.known(&key).unwrap(), Some(("v1".to_owned(), size)));
    let [info] = &cache.entries().unwrap()[..] else { panic!("one entry") };
    assert_eq!((info.there, info.open, &info.address[..]), (size, true, "s3://bucket/model"));
    let pruned = cache.prune(&Prune::All, false).unwrap();
    assert_eq!((pruned.open.len(), pruned.gone.len(), pruned.kept.len()), (1, 0, 0));
    let (path, id) = (info.path.clone(), info.id.clone());
    drop((entry, other));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"?", BLOCK + 5).unwrap();
    let bad = vec![BLOCK..2 * BLOCK];
    assert_eq!(cache.verify(&id, 0..9, false).unwrap(), Some((size, bad.clone())));
    assert_eq!(cache.verify(&id, 1..3, true).unwrap(), Some((BLOCK + 1000, bad)));
    assert_eq!(cache.verify(&id, 0..3, true).unwrap(), Some((BLOCK + 1000, vec![])));
    assert_eq!(cache.verify("../x", 0..3, true).unwrap(), None);
    assert_eq!(cache.prune(&Prune::All, true).unwrap().gone.len(), 1);
    assert_eq!(cache.prune(&Prune::All, false).unwrap().gone.len(), 1);
    let room = cache.room().unwrap();
    assert!(room.keep == 0 && room.free <= room.total && room.most.is_none());
    assert_eq!((cache.entries().unwrap().len(), cache.known(&key).unwrap()), (0, None));
    cache.note_list(&key, &["a".to_owned()]).unwrap();
    assert_eq!(cache.list(&key).unwrap().unwrap(), ["a"]);
    assert!(cache.make_room(1 << 20).unwrap());
}
