//! Eviction and `prune`.

use super::processes::cached_file;
use super::*;
use crate::store::disk_cache::open_locks::EVICTING;
use std::fs::{File, FileTimes};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

/// An entry of so many blocks that was used so many minutes ago.
fn used(cache: &CacheFolder, name: &str, blocks: u64, minutes: u64) {
    let entry = cache.find_or_make(&key(name), "v", blocks * BLOCK).unwrap();
    fill(&entry);
    entry.sync().unwrap();
    cache.note(&key(name), "v", blocks * BLOCK).unwrap();
    let map = map_of(&entry);
    drop(entry);
    let then = SystemTime::now() - Duration::from_secs(60 * minutes);
    File::options().write(true).open(map).unwrap().set_times(FileTimes::new().set_modified(then)).unwrap();
}

fn names(cache: &CacheFolder) -> Vec<String> {
    let name = |info: EntryInfo| info.address.trim_start_matches("s3://bucket/").to_owned();
    cache.entries().unwrap().into_iter().map(name).collect()
}

fn limited(cache: &CacheFolder, size: Option<u64>, free: Option<u64>) -> Arc<CacheFolder> {
    CacheFolder::open(&DiskCacheSettings { size, free, ..settings(cache.path()) }).unwrap()
}

#[test]
fn the_entries_that_were_used_least_recently_make_room() {
    let (_folder, cache) = cache();
    for (name, minutes) in [("b", 30), ("a", 40), ("d", 10), ("c", 20)] {
        used(&cache, name, 2, minutes);
    }
    assert_eq!(names(&cache), ["a", "b", "c", "d"]);
    // Opening one for a load is a use; a list of all is none.
    drop(cache.find(&key("a"), "v", 2 * BLOCK).unwrap().unwrap());
    assert_eq!(names(&cache), ["b", "c", "d", "a"]);
    let disk: u64 = cache.entries().unwrap().iter().map(|info| info.disk).sum();
    let limited = limited(&cache, Some(disk), Some(0));
    assert!(limited.make_room(1).unwrap());
    assert_eq!(names(&cache), ["c", "d", "a"]);
    assert_eq!(limited.known(&key("c")).unwrap(), Some(("v".to_owned(), 2 * BLOCK)));
    assert!(limited.make_room(2 * BLOCK).unwrap());
    assert_eq!(names(&cache), ["c", "d", "a"], "there is room for one");
    assert!(limited.make_room(5 * BLOCK).unwrap());
    assert_eq!(names(&cache), ["a"]);
    assert!(!limited.make_room(disk + 1).unwrap());
    assert_eq!(names(&cache), ["a"], "nothing is evicted for what cannot fit");
}

#[test]
fn what_is_open_stays() {
    let (_folder, cache) = cache();
    used(&cache, "open", 2, 90);
    used(&cache, "closed", 2, 10);
    let limited = limited(&cache, Some(4 * BLOCK), Some(0));
    let entry = cache.find(&key("open"), "v", 2 * BLOCK).unwrap().unwrap();
    assert!(!limited.make_room(4 * BLOCK).unwrap());
    assert_eq!((names(&cache), check(&entry)), (vec!["open".to_owned()], 2));
    assert!(cache.entries().unwrap()[0].open);
    let pruned = cache.prune(&Prune::All, false).unwrap();
    assert_eq!((pruned.open.len(), pruned.gone, pruned.kept), (1, Vec::new(), Vec::new()));
    drop(entry);
    assert!(!cache.entries().unwrap()[0].open);
    assert!(limited.make_room(4 * BLOCK).unwrap());
    assert_eq!(files(&cache.path().join("objects")), [] as [PathBuf; 0]);
}

#[test]
fn blocks_are_written_when_another_process_that_evicts_has_ended() {
    let (_folder, cache) = cache();
    used(&cache, "old", 4, 90);
    let limited = limited(&cache, Some(5 * BLOCK), Some(0));
    let file = cached_file(&limited, limited.find_or_make(&key("model"), "v", 5 * BLOCK).unwrap());
    let write = |number| file.write(number, &block(&file.entry, number));
    let evicts = cache.hold_byte(EVICTING, false).unwrap().unwrap();
    // It is waited for once.
    let times = [0, 1, 2].map(|number| {
        let began = Instant::now();
        let refused = write(number).unwrap_err();
        assert_eq!((refused.kind(), file.is_writable()), (ErrorKind::Timeout, true), "{refused}");
        began.elapsed()
    });
    assert!(times[0] >= PATIENCE && times[1].min(times[2]) < PATIENCE, "{times:?}");
    drop(evicts);
    (0..5).for_each(|number| write(number).unwrap());
    assert_eq!((check(&file.entry), names(&cache)), (5, vec!["model".to_owned()]));
}

#[test]
fn bytes_of_the_file_system_stay_free() {
    let (_folder, cache) = cache();
    used(&cache, "one", 2, 90);
    let all = limited(&cache, None, Some(u64::MAX));
    assert!(!all.make_room(0).unwrap());
    assert!(names(&cache).is_empty(), "what is evicted is not enough");
    assert!(limited(&cache, None, Some(0)).make_room(BLOCK).unwrap());
}

#[test]
fn prune_removes_what_it_is_told() {
    let (_folder, cache) = cache();
    for (name, blocks, minutes) in [("x/a", 3, 90), ("x/b", 2, 60), ("y/c", 1, 30), ("y/d", 1, 10)] {
        used(&cache, name, blocks, minutes);
    }
    cache.note_list(&key("x"), &["a".to_owned()]).unwrap();
    let infos = cache.entries().unwrap();
    assert!(infos.iter().all(|info| info.there == info.size && info.disk >= info.size && !info.open));
    assert!(infos.iter().all(|info| info.path.metadata().unwrap().blocks() * 512 == info.disk));
    assert!(infos.iter().all(|info| info.path.file_name().unwrap().to_str().unwrap() == format!("{}.data", info.id)));
    assert_eq!(cache.prune(&Prune::OlderThan(Duration::from_secs(75 * 60)), false).unwrap().gone.len(), 1);
    assert_eq!(names(&cache), ["x/b", "y/c", "y/d"]);
    assert_eq!(cache.known(&key("x/a")).unwrap(), None, "its version goes with it");
    assert_eq!(cache.prune(&Prune::Prefix("s3://bucket/y/c".to_owned()), false).unwrap().gone.len(), 1);
    let pruned = cache.prune(&Prune::ToSize(infos[3].disk), false).unwrap();
    assert_eq!((&pruned.gone[..], &pruned.kept[..]), (&infos[1..2], &infos[3..]));
    assert_eq!(names(&cache), ["y/d"]);
    assert!(cache.list(&key("x")).unwrap().is_some() && cache.known(&key("y/d")).unwrap().is_some());
    assert_eq!(cache.prune(&Prune::All, false).unwrap().gone.len(), 1);
    assert_eq!(files(cache.path()).len(), 2, "the marker and the beats");
}

#[test]
fn files_of_others_in_the_cache_are_no_obstacle() {
    let (_folder, cache) = cache();
    used(&cache, "model", 1, 5);
    let objects = cache.path().join("objects");
    std::fs::write(objects.join("note"), b"text").unwrap();
    std::fs::write(objects.join("zz"), b"text").unwrap();
    std::fs::create_dir(objects.join("qq")).unwrap();
    std::fs::write(objects.join("qq/readme.map"), b"text").unwrap();
    std::fs::create_dir(cache.path().join("names/readme")).unwrap();
    assert_eq!(names(&cache), ["model"]);
    assert_eq!(cache.prune(&Prune::All, false).unwrap().gone.len(), 1);
}

#[test]
fn blocks_are_compared_by_the_name_of_their_entry_and_a_dry_prune_removes_nothing() {
    use std::os::unix::fs::FileExt;
    let (_folder, cache) = cache();
    used(&cache, "model", 3, 5);
    let [info] = &cache.entries().unwrap()[..] else { panic!("one entry") };
    std::fs::OpenOptions::new().write(true).open(&info.path).unwrap().write_all_at(b"?", BLOCK + 5).unwrap();
    let bad: Vec<_> = std::iter::once(BLOCK..2 * BLOCK).collect();
    assert_eq!(cache.verify(&info.id, 0..9, false).unwrap(), Some((3 * BLOCK, bad.clone())));
    assert_eq!(cache.verify(&info.id, 1..3, true).unwrap(), Some((2 * BLOCK, bad)));
    assert_eq!(cache.verify(&info.id, 0..3, true).unwrap(), Some((2 * BLOCK, vec![])));
    assert_eq!(cache.verify("../x", 0..3, true).unwrap(), None);
    assert_eq!((cache.prune(&Prune::All, true).unwrap().gone.len(), names(&cache).len()), (1, 1));
    let room = cache.room().unwrap();
    assert!(room.keep == 0 && room.free <= room.total && room.most.is_none());
}

/// Files of this folder that this process has open.
fn open_files(folder: &Path) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let target = |one: std::io::Result<std::fs::DirEntry>| std::fs::read_link(one.ok()?.path()).ok();
    links.filter_map(target).filter(|path| path.starts_with(folder)).count()
}

#[test]
fn hundreds_of_open_entries_have_few_descriptors_and_none_of_them_is_removed() {
    // In memory: eviction waits for the disk.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = CacheFolder::open(&settings(&folder.path().join("cache"))).unwrap();
    let objects = cache.path().join("objects");
    let size = |number: u32| if number == 0 { BLOCK + 9 } else { 9 };
    let made = |number: u32| cache.find_or_make(&key(&format!("model {number}")), "v", size(number)).unwrap();
    let entries: Vec<_> = (0..400).map(made).collect();
    assert_eq!(entries[0].claim(1).unwrap(), BlockState::Claimed(entries[0].number()));
    for entry in &entries {
        entry.write(0, &block(entry, 0)).unwrap();
    }
    // At most 512 for the process; each has a map and data.
    assert!(open_files(&objects) <= 512, "{}", open_files(&objects));
    let again = CacheFolder::open(&settings(cache.path())).unwrap();
    let other = again.find(&key("model 0"), "v", BLOCK + 9).unwrap().unwrap();
    assert_eq!(other.state(1).unwrap(), BlockState::Claimed(entries[0].number()), "its map was not closed");
    drop(other);
    let pruned = again.prune(&Prune::All, false).unwrap();
    assert_eq!((pruned.gone.len(), pruned.open.len()), (0, 400));
    assert_eq!(entries.iter().map(|entry| check(entry)).sum::<u32>(), 400);
    // A file that was closed and is another one now is not taken.
    let replaced = entries.iter().find(|entry| {
        let path = entry.data_path();
        std::fs::copy(path, path.with_extension("copy")).unwrap();
        std::fs::rename(path.with_extension("copy"), path).unwrap();
        entry.read(0..9, &mut [0; 9]).is_err()
    });
    let refused = replaced.expect("some are closed").read(0..9, &mut [0; 9]).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::ESTALE), "{refused}");
    drop(entries);
    assert_eq!(again.prune(&Prune::All, false).unwrap().gone.len(), 400);
}
