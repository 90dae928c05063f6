//! Owners, modes, links, and folders that cannot be written. Some of it needs root.

use super::faults::Mounted;
use super::processes::{child, played};
use super::*;
use std::ffi::CString;
use std::fs::{self, Permissions};
use std::io::Read;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{chown, symlink, MetadataExt, PermissionsExt};

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn is_root() -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::geteuid() == 0 }
}

/// The kind and the text of a refusal.
fn refusal(settings: &DiskCacheSettings) -> (ErrorKind, String) {
    let e = CacheFolder::open(settings).unwrap_err();
    (e.kind(), e.to_string())
}

#[test]
fn folders_and_files_are_this_users_whatever_the_umask() {
    for umask in [0, 0o777] {
        let folder = tempfile::tempdir().unwrap();
        let done = child("fills", folder.path(), &[&format!("{umask}")]).wait_with_output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let root = folder.path().join("cache");
        assert_eq!(mode(&root), 0o700);
        let found = files(&root);
        assert!(found.len() >= 5);
        for file in found {
            assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700), "{file:?}");
        }
    }
}

#[test]
fn threads_that_open_a_new_folder_at_once_open_one_cache() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let settings = settings(&folder.path().join(round.to_string()));
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..32).map(|_| scope.spawn(|| CacheFolder::open(&settings).map(drop))).collect();
            all.into_iter().for_each(|one| one.join().unwrap().unwrap());
        });
    }
}

#[test]
fn a_shared_cache_is_its_groups() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    let shared = DiskCacheSettings { shared: true, ..settings(&root) };
    let cache = CacheFolder::open(&shared).unwrap();
    assert!(!cache.is_private() && cache.is_writable());
    let entry = cache.find_or_make(&key("model"), "v", BLOCK).unwrap();
    fill(&entry);
    cache.note(&key("model"), "v", BLOCK).unwrap();
    assert_eq!((mode(&root), mode(&root.join("objects")), mode(entry.data_path())), (0o2770, 0o2770, 0o660));
    let refused = refusal(&settings(&root));
    assert!(refused.0 == ErrorKind::Permission && refused.1.contains("is not shared"), "{refused:?}");
    if !is_root() {
        return;
    }
    // Another user of the group, and one who is not in it.
    set_mode(folder.path(), 0o755);
    for file in files(&root).into_iter().chain([root.clone()]) {
        for path in file.ancestors().take_while(|path| path.starts_with(&root)) {
            chown(path, None, Some(4321)).unwrap();
        }
    }
    chown(root.join("lists"), None, Some(4321)).unwrap();
    for folder in [root.clone(), root.join("objects"), root.join("names"), root.join("lists")] {
        set_mode(&folder, 0o2770);
    }
    drop(entry);
    let done = child("shares", folder.path(), &["1234", "4321"]).wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert!(files(&root).iter().all(|file| file.metadata().unwrap().gid() == 4321));
    assert!(files(&root).iter().any(|file| file.metadata().unwrap().uid() == 1234));
    let done = child("is_refused", folder.path(), &["1234", "5432"]).wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    // The first one takes what the second one wrote.
    let cache = CacheFolder::open(&shared).unwrap();
    assert_eq!(check(&cache.find(&key("theirs"), "v", BLOCK).unwrap().unwrap()), 1);
}

/// The names of folders that come into a folder during `work`. True: the folder had another name before.
fn folders_that_come(folder: &Path, work: impl FnOnce()) -> Vec<(String, bool)> {
    let path = CString::new(folder.as_os_str().as_bytes()).unwrap();
    // SAFETY: plain system calls; the descriptor is new and nobody else's.
    let mut watch = unsafe {
        let watch = libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK);
        assert!(libc::inotify_add_watch(watch, path.as_ptr(), libc::IN_CREATE | libc::IN_MOVED_TO) >= 0);
        fs::File::from_raw_fd(watch)
    };
    work();
    let mut bytes = vec![0; 1 << 16];
    let count = watch.read(&mut bytes).unwrap();
    let (mut found, mut rest) = (Vec::new(), &bytes[..count]);
    // An event has four numbers, and then a name (inotify(7)). The last number is the length of the name.
    while let Some((head, names)) = rest.split_at_checked(16) {
        let number = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap());
        let (name, others) = names.split_at(number(12) as usize);
        if number(4) & libc::IN_ISDIR != 0 {
            let name = String::from_utf8(name.iter().copied().take_while(|byte| *byte != 0).collect()).unwrap();
            found.push((name, number(4) & libc::IN_MOVED_TO != 0));
        }
        rest = others;
    }
    found
}

#[test]
fn folders_have_their_owners_before_they_have_their_names() {
    for shared in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let settings = DiskCacheSettings { shared, ..settings(&folder.path().join("cache")) };
        let named = |found: Vec<(String, bool)>, name: &str| found.iter().any(|one| *one == (name.to_owned(), true));
        let bare = |found: &[(String, bool)]| found.iter().all(|(name, moved)| *moved || name.ends_with(".part"));
        let found = folders_that_come(folder.path(), || drop(CacheFolder::open(&settings).unwrap()));
        assert!(bare(&found) && named(found, "cache"));
        fs::remove_dir(folder.path().join("cache/lists")).unwrap();
        let found = folders_that_come(&settings.folder, || drop(CacheFolder::open(&settings).unwrap()));
        assert!(bare(&found) && named(found, "lists"));
        assert_eq!(mode(&settings.folder.join("lists")), if shared { 0o2770 } else { 0o700 });
    }
}

#[test]
fn a_folder_that_others_may_write_or_that_is_another_users_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    drop(CacheFolder::open(&settings(&root)).unwrap());
    for (mode, why) in [(0o702, "others may write"), (0o777, "others may write"), (0o770, "group may write")] {
        set_mode(&root, mode);
        let refused = refusal(&settings(&root));
        assert!(refused.0 == ErrorKind::Permission && refused.1.contains(why), "{refused:?}");
    }
    set_mode(&root, 0o777);
    let shared = DiskCacheSettings { shared: true, ..settings(&root) };
    assert!(refusal(&shared).1.contains("others may write"));
    set_mode(&root, 0o755);
    CacheFolder::open(&settings(&root)).unwrap();
    if is_root() {
        chown(&root, Some(1234), None).unwrap();
        let refused = refusal(&settings(&root));
        assert!(refused.0 == ErrorKind::Permission && refused.1.contains("another user"), "{refused:?}");
    }
}

#[test]
fn a_file_that_others_may_write_or_that_is_another_users_is_refused() {
    let (_folder, cache) = cache();
    let entry = cache.find_or_make(&key("model"), "v", BLOCK).unwrap();
    let paths = [entry.data_path().to_owned(), map_of(&entry)];
    drop(entry);
    for path in &paths {
        set_mode(path, 0o666);
        for refused in [
            cache.find(&key("model"), "v", BLOCK).unwrap_err(),
            cache.find_or_make(&key("model"), "v", BLOCK).unwrap_err(),
        ] {
            assert_eq!((refused.kind(), refused.path()), (ErrorKind::Permission, Some(path.as_path())), "{refused}");
        }
        set_mode(path, 0o600);
        if is_root() {
            chown(path, Some(1234), None).unwrap();
            assert!(cache.find(&key("model"), "v", BLOCK).unwrap_err().to_string().contains("another user"));
            chown(path, Some(0), None).unwrap();
        }
        assert!(cache.find(&key("model"), "v", BLOCK).unwrap().is_some());
    }
    set_mode(&paths[0], 0o666);
    assert!(cache.entries().unwrap().is_empty());
    cache.prune(&Prune::OlderThan(std::time::Duration::MAX), false).unwrap();
    assert_eq!(files(&cache.path().join("objects")), [] as [PathBuf; 0]);
}

#[test]
fn links_are_not_followed() {
    let (folder, cache) = cache();
    let outside = folder.path().join("outside");
    fs::write(&outside, b"mine").unwrap();
    let entry = cache.find_or_make(&key("model"), "v", BLOCK).unwrap();
    fill(&entry);
    cache.note(&key("model"), "v", BLOCK).unwrap();
    cache.note_list(&key("model"), &[]).unwrap();
    let (data, map) = (entry.data_path().to_owned(), map_of(&entry));
    drop(entry);
    let is_link = |e: crate::error::Error| e.kind() == ErrorKind::Permission && e.to_string().contains("symbolic link");
    for path in [&data, &map] {
        fs::rename(path, folder.path().join("kept")).unwrap();
        symlink(folder.path().join("kept"), path).unwrap();
        assert!(is_link(cache.find(&key("model"), "v", BLOCK).unwrap_err()));
        assert!(is_link(cache.find_or_make(&key("model"), "v", BLOCK).unwrap_err()));
        fs::remove_file(path).unwrap();
        fs::rename(folder.path().join("kept"), path).unwrap();
    }
    for below in ["names", "lists"] {
        let [file] = &files(&cache.path().join(below))[..] else { panic!("one file") };
        fs::remove_file(file).unwrap();
        symlink(&outside, file).unwrap();
    }
    assert!(is_link(cache.known(&key("model")).unwrap_err()) && is_link(cache.list(&key("model")).unwrap_err()));
    // A link in place of the temporary file is replaced, not written through.
    let [file] = &files(&cache.path().join("names"))[..] else { panic!("one file") };
    fs::remove_file(file).unwrap();
    symlink(&outside, format!("{}.part", file.display())).unwrap();
    cache.note(&key("model"), "v2", 1).unwrap();
    symlink(&outside, format!("{}.part", map.display())).unwrap();
    cache.prune(&Prune::All, false).unwrap();
    assert_eq!(files(cache.path()).len(), 2, "links are removed as links");
    assert_eq!(fs::read(&outside).unwrap(), b"mine");
    // Folders.
    let (name, target) = (cache.path().join("objects"), folder.path().join("objects"));
    fs::rename(&name, &target).unwrap();
    symlink(&target, &name).unwrap();
    let refused = cache.find(&key("model"), "v", BLOCK).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Permission, "{refused}");
    assert_eq!(refusal(&settings(cache.path())).0, ErrorKind::Permission);
}

#[test]
fn a_folder_that_holds_something_else_or_another_format_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("thesis"), b"years").unwrap();
    let refused = refusal(&settings(folder.path()));
    assert!(refused.0 == ErrorKind::Invalid && refused.1.contains("thesis"), "{refused:?}");
    assert_eq!(files(folder.path()).len(), 1);
    let (_folder, cache) = cache();
    let marker = cache.path().join("penstock-disk-cache");
    fs::write(&marker, "penstock disk cache, format 77\n").unwrap();
    let refused = refusal(&settings(cache.path()));
    assert!(refused.0 == ErrorKind::Unsupported && refused.1.contains("77"), "{refused:?}");
    fs::write(&marker, "another").unwrap();
    assert_eq!(refusal(&settings(cache.path())).0, ErrorKind::Invalid);
    fs::write(&marker, "").unwrap();
    fs::write(cache.path().join("thesis"), b"years").unwrap();
    assert_eq!(refusal(&settings(cache.path())).0, ErrorKind::Invalid);
    fs::remove_file(cache.path().join("thesis")).unwrap();
    CacheFolder::open(&settings(cache.path())).expect("power was lost");
    assert!(fs::read(&marker).unwrap().starts_with(b"penstock disk cache"));
    fs::remove_file(&marker).unwrap();
    symlink("/dev/null", &marker).unwrap();
    assert_eq!(refusal(&settings(cache.path())).0, ErrorKind::Permission);
    assert_eq!(refusal(&settings(Path::new("/proc/sys"))).0, ErrorKind::Unsupported);
    let file = folder.path().join("thesis");
    assert!(CacheFolder::open(&settings(&file)).is_err());
}

#[test]
fn a_cache_that_cannot_be_written_serves_and_changes_nothing() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    set_mode(folder.path(), 0o755);
    let root = folder.path().join("cache");
    let cache = CacheFolder::open(&settings(&root)).unwrap();
    let entry = cache.find_or_make(&key("model"), "v", 3 * BLOCK).unwrap();
    for number in 0..2 {
        entry.write(number, &block(&entry, number)).unwrap();
    }
    entry.sync().unwrap();
    cache.note(&key("model"), "v", 3 * BLOCK).unwrap();
    drop(entry);
    // Root's cache, which this user may read.
    for file in files(&root) {
        set_mode(&file, 0o644);
        file.ancestors().skip(1).take_while(|path| path.starts_with(&root)).for_each(|path| set_mode(path, 0o755));
    }
    set_mode(&root.join("lists"), 0o755);
    let before: Vec<_> =
        files(&root).iter().map(|file| (file.clone(), file.metadata().unwrap().mtime_nsec())).collect();
    let done = child("only_reads", folder.path(), &["1234"]).wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let after: Vec<_> = files(&root).iter().map(|file| (file.clone(), file.metadata().unwrap().mtime_nsec())).collect();
    assert_eq!(before, after);
    set_mode(&root, 0o700);
    let done = child("is_refused", folder.path(), &["1234"]).wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

#[test]
fn a_file_system_that_is_mounted_read_only_is_a_read_only_cache() {
    let Some(disk) = Mounted::new("tmpfs", "size=8m") else { return };
    let cache = CacheFolder::open(&settings(&disk.path())).unwrap();
    fill(&cache.find_or_make(&key("model"), "v", BLOCK).unwrap());
    drop(cache);
    let remounted =
        std::process::Command::new("mount").args(["-o", "remount,ro"]).arg(disk.path().parent().unwrap()).status();
    assert!(remounted.unwrap().success());
    let cache = CacheFolder::open(&settings(&disk.path())).unwrap();
    let entry = cache.find_or_make(&key("model"), "v", BLOCK).unwrap();
    assert!(!cache.is_writable() && !entry.is_writable() && check(&entry) == 1);
    assert!(CacheFolder::open(&settings(&disk.path().join("new"))).is_err());
}

pub(super) fn play(role: &str, folder: &Path, words: &[String]) {
    let root = folder.join("cache");
    match role {
        "fills" => {
            // SAFETY: a plain system call.
            unsafe { libc::umask(words[0].parse().unwrap()) };
            let cache = CacheFolder::open(&settings(&root)).unwrap();
            fill(&cache.find_or_make(&key("model"), "v", BLOCK).unwrap());
            cache.note(&key("model"), "v", BLOCK).unwrap();
            cache.note_list(&key("model"), &[]).unwrap();
        }
        "shares" => {
            become_user(words);
            let cache = CacheFolder::open(&DiskCacheSettings { shared: true, ..settings(&root) }).unwrap();
            let entry = cache.find_or_make(&key("model"), "v", BLOCK).unwrap();
            assert!(cache.is_writable() && entry.is_writable() && check(&entry) == 1);
            fill(&cache.find_or_make(&key("theirs"), "v", BLOCK).unwrap());
            cache.note(&key("model"), "v2", BLOCK).unwrap();
        }
        "is_refused" => {
            become_user(words);
            for shared in [true, false] {
                let refused = CacheFolder::open(&DiskCacheSettings { shared, ..settings(&root) }).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Permission, "{refused}");
            }
        }
        "only_reads" => {
            become_user(words);
            let cache = CacheFolder::open(&settings(&root)).unwrap();
            assert!(!cache.is_writable() && cache.is_private());
            assert_eq!(cache.known(&key("model")).unwrap(), Some(("v".to_owned(), 3 * BLOCK)));
            let entry = cache.find_or_make(&key("model"), "v", 3 * BLOCK).unwrap();
            assert!(!entry.is_writable() && check(&entry) == 2);
            assert_eq!(entry.claim(2).unwrap(), BlockState::Missing);
            assert_eq!(entry.write(2, &block(&entry, 2)).unwrap_err().kind(), ErrorKind::Permission);
            assert_eq!((entry.sync().unwrap(), entry.forget(0).unwrap_err().kind()), (0, ErrorKind::Permission));
            assert_eq!(cache.find_or_make(&key("new"), "v", 5).unwrap_err().kind(), ErrorKind::Permission);
            cache.note(&key("new"), "v", 5).unwrap();
            cache.note_list(&key("new"), &[]).unwrap();
            assert!(!cache.make_room(1).unwrap());
            assert_eq!(cache.entries().unwrap().len(), 1);
            assert_eq!(cache.prune(&Prune::All, false).unwrap_err().kind(), ErrorKind::Permission);
        }
        _ => panic!("no role {role}"),
    }
    played();
}

/// This process belongs to another user from now on, and to no group or to this one.
fn become_user(words: &[String]) {
    let user = words[0].parse().unwrap();
    let group: u32 = words.get(1).map_or(user, |group| group.parse().unwrap());
    // SAFETY: plain system calls.
    unsafe {
        assert_eq!(libc::setgroups(1, &raw const group), 0);
        assert_eq!(libc::setgid(user), 0);
        assert_eq!(libc::setuid(user), 0);
    }
}
