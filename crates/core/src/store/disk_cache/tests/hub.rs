//! Whole objects in huggingface_hub's cache: their names, their modes, and what the cache counts of them.

use super::super::hub::{is_left_over, HubPlace};
use super::processes::cached_file;
use super::*;
use crate::store::disk_cache::map::hex;
use ring::digest::{digest, SHA256};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::time::{Duration, SystemTime};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OLD: &str = "ffffffffffffffffffffffffffffffffffffffff";
const ADDRESS: &str = "http://hub/org/name/resolve/main/unet/model.safetensors";

fn sha256(entry: &CacheEntry) -> String {
    let all: Vec<u8> = (0..entry.blocks()).flat_map(|number| block(entry, number)).collect();
    hex(digest(&SHA256, &all).as_ref())
}

/// A cache with a whole object, and the folder of a Hub's cache.
fn whole() -> (TempDir, Arc<CacheFolder>, Arc<CacheEntry>, PathBuf) {
    let (folder, cache) = cache();
    let entry = cache.find_or_make(&key("model"), "v1", 2 * BLOCK + 1000).unwrap();
    fill(&entry);
    let hub = folder.path().join("hub");
    (folder, cache, entry, hub)
}

fn layout(hub: &Path, digest: &str) -> HubLayout {
    let file = HubFile { path: "unet/model.safetensors".to_owned(), digest: digest.to_owned() };
    HubLayout {
        cache: hub.to_owned(),
        repository: "org/name".to_owned(),
        commit: COMMIT.to_owned(),
        revision: Some("main".to_owned()),
        asked: SystemTime::now(),
        files: BTreeMap::from([(ADDRESS.to_owned(), file)]),
        symlinks: true,
    }
}

fn place(hub: &Path, digest: &str) -> HubPlace {
    Arc::new(layout(hub, digest)).place(ADDRESS).unwrap()
}

fn lay(place: &HubPlace, entry: &CacheEntry) -> crate::error::Result<()> {
    place.lay(entry, true, &|| Ok(()))
}

/// The files below the repository's folder.
fn named(hub: &Path) -> Vec<String> {
    let root = hub.join("models--org--name");
    let mut found: Vec<String> = match root.is_dir() {
        true => files(&root).iter().map(|path| path.strip_prefix(&root).unwrap().display().to_string()).collect(),
        false => Vec::new(),
    };
    found.sort();
    found
}

fn pointer(hub: &Path, commit: &str) -> PathBuf {
    hub.join("models--org--name/snapshots").join(commit).join("unet/model.safetensors")
}

#[test]
fn a_whole_object_gets_the_names_that_huggingface_hub_gives_and_is_on_the_disk_once() {
    let (_folder, cache, entry, hub) = whole();
    let digest = sha256(&entry);
    lay(&place(&hub, &digest), &entry).unwrap();
    let blob = format!("blobs/{digest}");
    assert_eq!(named(&hub), [blob.clone(), "refs/main".into(), format!("snapshots/{COMMIT}/unet/model.safetensors")]);
    let root = hub.join("models--org--name");
    assert_eq!(fs::read_link(pointer(&hub, COMMIT)).unwrap(), Path::new("../../..").join(&blob));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let (own, theirs) = (fs::metadata(entry.data_path()).unwrap(), fs::metadata(pointer(&hub, COMMIT)).unwrap());
    assert_eq!((own.dev(), own.ino()), (theirs.dev(), theirs.ino()));
    // The cache takes its file as before.
    assert_eq!(own.mode() & 0o022, 0);
    assert_eq!(check(&cache.find(&key("model"), "v1", entry.size()).unwrap().unwrap()), 3);
    // All is on the disk: a loss of power leaves no name without bytes.
    assert_eq!(entry.sync().unwrap(), 0);
    assert!(hub.join(format!(".locks/models--org--name/{digest}.lock")).exists());
    lay(&place(&hub, &digest), &entry).unwrap();
    assert_eq!(named(&hub).len(), 3);
}

#[test]
fn an_object_with_another_digest_gets_no_name_and_is_forgotten() {
    let (_folder, _cache, entry, hub) = whole();
    let refused = lay(&place(&hub, &"0".repeat(64)), &entry).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Mismatch);
    assert!(refused.to_string().contains(&sha256(&entry)), "{refused}");
    assert_eq!(named(&hub), Vec::<String>::new());
    assert!(entry.there().unwrap().is_empty());
    assert_eq!(entry.claim(0).unwrap(), BlockState::Claimed(entry.number()), "it is received again");
}

#[test]
fn git_names_small_files() {
    let (_folder, cache, _, hub) = whole();
    let entry = cache.find_or_make(&key("config.json"), "v1", 13).unwrap();
    entry.write(0, b"test content\n").unwrap();
    // echo 'test content' | git hash-object --stdin
    lay(&place(&hub, "d670460b4b4aece5915caf5c68d12f560a9fe3e4"), &entry).unwrap();
    assert_eq!(fs::read(pointer(&hub, COMMIT)).unwrap(), b"test content\n");
}

#[test]
fn without_symbolic_links_the_file_itself_is_in_the_snapshot() {
    let (_folder, _cache, entry, hub) = whole();
    let digest = sha256(&entry);
    let place = Arc::new(HubLayout { symlinks: false, ..layout(&hub, &digest) }).place(ADDRESS).unwrap();
    lay(&place, &entry).unwrap();
    assert_eq!(named(&hub), ["refs/main".to_owned(), format!("snapshots/{COMMIT}/unet/model.safetensors")]);
    assert!(!fs::symlink_metadata(pointer(&hub, COMMIT)).unwrap().is_symlink());
}

#[test]
fn a_blob_that_is_there_is_named_and_a_link_to_nothing_is_mended() {
    let (_folder, _cache, entry, hub) = whole();
    let digest = sha256(&entry);
    let at = pointer(&hub, COMMIT);
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    symlink("../../../blobs/gone", &at).unwrap();
    lay(&place(&hub, &digest), &entry).unwrap();
    assert_eq!(fs::metadata(&at).unwrap().ino(), fs::metadata(entry.data_path()).unwrap().ino());
    // What huggingface_hub has fetched is not read again: it has its name.
    fs::remove_file(&at).unwrap();
    let blob = hub.join("models--org--name/blobs").join(&digest);
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, "theirs").unwrap();
    lay(&place(&hub, &digest), &entry).unwrap();
    assert_eq!(fs::read(&at).unwrap(), b"theirs");
}

#[test]
fn a_reference_stays_with_an_older_snapshot_that_has_more_and_with_a_newer_one() {
    let (_folder, _cache, entry, hub) = whole();
    let digest = sha256(&entry);
    let mut with_more = layout(&hub, &digest);
    let config = HubFile { path: "config.json".to_owned(), digest: "2".repeat(40) };
    with_more.files.insert("http://hub/config.json".to_owned(), config);
    let refs = hub.join("models--org--name/refs/main");
    let old = hub.join("models--org--name/snapshots").join(OLD);
    fs::create_dir_all(&old).unwrap();
    fs::create_dir_all(refs.parent().unwrap()).unwrap();
    for name in ["config.json", "of the old commit alone"] {
        fs::write(old.join(name), "").unwrap();
    }
    fs::write(&refs, OLD).unwrap();
    let later = SystemTime::now() + Duration::from_secs(1);
    let place = |layout: &HubLayout, asked| Arc::new(HubLayout { asked, ..layout.clone() }).place(ADDRESS).unwrap();
    lay(&place(&with_more, later), &entry).unwrap();
    assert_eq!(fs::read_to_string(&refs).unwrap(), OLD, "config.json is missing in the new one");
    fs::write(hub.join("models--org--name/snapshots").join(COMMIT).join("config.json"), "").unwrap();
    lay(&place(&with_more, SystemTime::UNIX_EPOCH), &entry).unwrap();
    assert_eq!(fs::read_to_string(&refs).unwrap(), OLD, "it was written after the Hub was asked");
    lay(&place(&with_more, later), &entry).unwrap();
    assert_eq!(fs::read_to_string(&refs).unwrap(), COMMIT);
}

#[test]
fn names_that_lead_out_of_the_folder_and_other_digests_have_no_place() {
    for (path, digest) in [("../x", "0".repeat(64)), ("/x", "0".repeat(64)), ("x", "../../etc".to_owned())] {
        let mut layout = layout(Path::new("/hub"), &digest);
        layout.files.insert(ADDRESS.to_owned(), HubFile { path: path.to_owned(), digest });
        assert!(Arc::new(layout).place(ADDRESS).is_none(), "{path}");
    }
}

#[test]
fn a_cache_that_others_may_write_gives_no_file_away_and_takes_no_folder_of_others() {
    let (_folder, _cache, entry, hub) = whole();
    let digest = sha256(&entry);
    let refused = place(&hub, &digest).lay(&entry, false, &|| Ok(())).unwrap_err();
    assert!(refused.to_string().contains("several users share the disk cache"), "{refused}");
    assert_eq!(named(&hub), Vec::<String>::new());
    fs::set_permissions(hub.join("models--org--name"), fs::Permissions::from_mode(0o777)).unwrap();
    let refused = lay(&place(&hub, &digest), &entry).unwrap_err();
    assert!(refused.to_string().contains("others may write to it (mode 0777)"), "{refused}");
}

#[test]
fn a_file_that_huggingface_hub_brings_meanwhile_leaves_no_other_name() {
    let (_folder, _cache, entry, hub) = whole();
    let digest = sha256(&entry);
    let at = pointer(&hub, COMMIT);
    let theirs = || {
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::write(&at, "theirs").unwrap();
        Ok(())
    };
    place(&hub, &digest).lay(&entry, true, &theirs).unwrap();
    assert_eq!(fs::read(&at).unwrap(), b"theirs");
    assert_eq!(named(&hub), ["refs/main".to_owned(), format!("snapshots/{COMMIT}/unet/model.safetensors")]);
}

#[test]
fn work_that_is_told_to_stop_leaves_no_name() {
    let (_folder, _cache, entry, hub) = whole();
    let stop = || Err(Error::new(ErrorKind::Cancelled, "it was told to stop"));
    let stopped = place(&hub, &sha256(&entry)).lay(&entry, true, &stop).unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Cancelled);
    assert_eq!(named(&hub), Vec::<String>::new());
    assert!(entry.is_complete().unwrap());
}

#[test]
fn names_of_processes_that_were_killed_are_left_over_only_when_nobody_writes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.penstock-1.incomplete");
    let file = fs::File::create(&path).unwrap();
    assert!(is_left_over(&path, Duration::ZERO) && !is_left_over(&path, Duration::from_secs(60)));
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(&file), libc::LOCK_EX) }, 0);
    assert!(!is_left_over(&path, Duration::ZERO));
}

#[test]
fn the_cache_counts_no_bytes_that_the_hub_keeps_and_removes_nothing_of_it() {
    let (_folder, cache, entry, hub) = whole();
    let digest = sha256(&entry);
    let before = cache.entries().unwrap().remove(0);
    assert!(before.disk >= 2 * BLOCK && !before.linked);
    lay(&place(&hub, &digest), &entry).unwrap();
    drop(entry);
    let linked = cache.entries().unwrap().remove(0);
    assert_eq!((linked.disk, linked.linked, linked.there), (0, true, before.there));
    // Nothing is freed by its removal: it stays, and does not count.
    assert!(cache.prune(&Prune::ToSize(0), false).unwrap().gone.is_empty());
    assert_eq!(cache.prune(&Prune::All, false).unwrap().gone.len(), 1);
    assert_eq!(fs::metadata(pointer(&hub, COMMIT)).unwrap().len(), linked.size);
    // When huggingface_hub removes its name first, the cache has it alone.
    let (_folder, cache, entry, hub) = whole();
    lay(&place(&hub, &digest), &entry).unwrap();
    fs::remove_dir_all(&hub).unwrap();
    let alone = cache.entries().unwrap().remove(0);
    assert!(alone.disk >= 2 * BLOCK && !alone.linked);
}

/// A whole object in both caches, with another byte in its second block.
fn damaged() -> (TempDir, Arc<CacheFolder>, Arc<CacheEntry>, HubPlace, PathBuf) {
    let (folder, cache, entry, hub) = whole();
    let place = place(&hub, &sha256(&entry));
    lay(&place, &entry).unwrap();
    let file = fs::File::options().write(true).open(entry.data_path()).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"?", BLOCK + 5).unwrap();
    assert_eq!(entry.verify_run(0..3, true).unwrap().1, std::slice::from_ref(&(BLOCK..2 * BLOCK)));
    (folder, cache, entry, place, pointer(&hub, COMMIT))
}

#[test]
fn a_bad_block_of_a_file_that_the_hub_has_too_is_written_into_a_new_file() {
    let (_folder, cache, entry, place, at) = damaged();
    let (reader, before) = (fs::File::open(&at).unwrap(), fs::read(&at).unwrap());
    let refused = entry.write(1, &block(&entry, 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let old = fs::metadata(&at).unwrap().ino();
    let load = cached_file(&cache, entry.clone());
    load.write(1, &block(&entry, 1)).unwrap();
    // Programs that read the Hub's file have seen nothing.
    let mut now = vec![0; before.len()];
    std::os::unix::fs::FileExt::read_exact_at(&reader, &mut now, 0).unwrap();
    assert!(now == before && fs::metadata(&at).unwrap().ino() == old);
    let renewed = load.written();
    assert_eq!((renewed.is_complete().unwrap(), check(&renewed)), (true, 3));
    assert_ne!(fs::metadata(renewed.data_path()).unwrap().ino(), old);
    // The others were synced with the copy.
    assert_eq!(renewed.sync().unwrap(), 1);
    assert_eq!(check(&cache.find(&key("model"), "v1", entry.size()).unwrap().unwrap()), 3);
    assert_eq!(files(&cache.path().join("objects")).len(), 2, "no part is left");
    // Then the Hub's name leads to it.
    place.in_place_of(&entry).lay(&renewed, true, &|| Ok(())).unwrap();
    assert_eq!(fs::metadata(&at).unwrap().ino(), fs::metadata(renewed.data_path()).unwrap().ino());
    assert!(fs::read(&at).unwrap() != before && sha256(&renewed) == sha256(&entry));
}

#[test]
fn a_file_that_others_have_open_is_not_replaced() {
    let (_folder, cache, entry, _place, at) = damaged();
    let before = fs::read(&at).unwrap();
    let other = CacheFolder::open(&settings(cache.path())).unwrap();
    let reader = other.find(&key("model"), "v1", entry.size()).unwrap().unwrap();
    let load = cached_file(&cache, entry.clone());
    let refused = load.write(1, &block(&entry, 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Timeout, "{refused}");
    assert_eq!((fs::read(&at).unwrap() == before, check(&reader)), (true, 2));
    assert_eq!(files(&cache.path().join("objects")).len(), 2, "no part is left");
    // The next load does it.
    drop((reader, load));
    let load = cached_file(&cache, entry.clone());
    load.write(1, &block(&entry, 1)).unwrap();
    assert_eq!(check(&load.written()), 3);
}

#[test]
fn a_file_that_others_only_look_at_is_replaced() {
    let (_folder, cache, entry, _place, _at) = damaged();
    let other = CacheFolder::open(&settings(cache.path())).unwrap();
    let is_over = AtomicBool::new(false);
    let look = || other.find(&key("model"), "v1", entry.size()).unwrap().unwrap();
    let first = look();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut looks = Some(first);
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                drop(looks.take());
                std::thread::sleep(Duration::from_millis(5));
                looks = Some(look());
            }
        });
        let load = cached_file(&cache, entry.clone());
        let written = load.write(1, &block(&entry, 1));
        is_over.store(true, Ordering::Relaxed);
        written.unwrap();
        assert_eq!(check(&load.written()), 3);
    });
}

#[test]
fn what_a_killed_process_leaves_of_a_new_file_is_removed() {
    let (_folder, cache, entry, _place, _at) = damaged();
    let parts = [entry.data_path(), &map_of(&entry)].map(|path| PathBuf::from(format!("{}.part", path.display())));
    parts.iter().for_each(|part| fs::write(part, b"half").unwrap());
    cache.prune(&Prune::OlderThan(Duration::from_secs(3600)), false).unwrap();
    assert!(parts.iter().all(|part| !part.exists()) && check(&entry) == 2);
}
