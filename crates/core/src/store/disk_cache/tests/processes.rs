//! Processes that use one cache at once. A child is this test program, which plays a role.

use super::*;
use crate::store::disk_cache::cached_file::CachedFile;
use crate::store::disk_cache::folder::{MARKER, OBJECTS};
use crate::store::disk_cache::inbox::{CacheNews, CachedFiles};
use crate::store::disk_cache::key::{lock_byte, object_id};
use crate::store::disk_cache::lock::held;
use crate::store::disk_cache::look::alive;
use crate::store::disk_cache::map::{MapHeader, FORMAT};
use crate::store::disk_cache::on_demand::while_locked;
use crate::store::disk_cache::open_locks::{while_listed, OpenLocks};
use crate::store::location::Location;
use crate::store::object::Object;
use crate::store::version::Version;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "PENSTOCK_TEST_CACHE_ROLE";
const BLOCKS: u64 = 24;
const SIZE: u64 = BLOCKS * BLOCK - 77;

/// A process that plays a role: its output is empty until it says something.
pub(super) fn child(role: &str, folder: &Path, words: &[&str]) -> Child {
    let role = [&[role, folder.to_str().unwrap()], words].concat().join("\n");
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::disk_cache::tests::processes::a_child_plays_its_role", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The role was played to its end.
pub(super) fn played() {
    std::process::exit(0);
}

#[test]
fn a_child_plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<String> = role.split('\n').map(str::to_owned).collect();
    let folder = PathBuf::from(&words[1]);
    let open = || CacheFolder::open(&settings(&folder)).unwrap();
    let wait = || std::io::stdin().read_exact(&mut [0]).unwrap();
    match &words[0][..] {
        // Claims what is missing, writes it, until all is there.
        "brings" => {
            let cache = open();
            let entry = cache.find_or_make(&key("model"), "v", SIZE).unwrap();
            let (mut at, mut written) = (words[2].parse::<u32>().unwrap(), 0);
            while !entry.is_complete().unwrap() {
                let run = at % entry.blocks()..(at % entry.blocks() + 5).min(entry.blocks());
                for (number, state) in run.clone().zip(entry.claim_run(run).unwrap()) {
                    if state == BlockState::Claimed(entry.number()) {
                        entry.write(number, &block(&entry, number)).unwrap();
                        written += 1;
                    }
                }
                if at % 3 == 0 {
                    entry.sync().unwrap();
                }
                at += 5;
            }
            println!("\nwritten {written}");
        }
        // Claims some blocks, says its number, and waits.
        "claims" => {
            let cache = open();
            let entry = cache.find_or_make(&key("model"), "v", SIZE).unwrap();
            entry.claim_run(3..9).unwrap();
            println!("\nnumber {}", entry.number());
            wait();
            entry.write(4, &block(&entry, 4)).unwrap();
        }
        // The same, with a forked child that outlives it.
        "forks" => {
            let cache = open();
            let entry = cache.find_or_make(&key("model"), "v", SIZE).unwrap();
            entry.claim_run(3..9).unwrap();
            // SAFETY: the child makes plain system calls, and ends.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                assert_eq!(entry.claim(1).unwrap_err().kind(), ErrorKind::Forked);
                assert_eq!(entry.write(3, &block(&entry, 3)).unwrap_err().kind(), ErrorKind::Forked);
                assert_eq!(entry.state(3).unwrap_err().kind(), ErrorKind::Forked);
                refuses_all(&entry);
                entry.release(3);
                entry.release_all();
                if words[2] == "leaves" {
                    leave_to_parent();
                    refuses_all(&entry);
                }
                std::fs::write(folder.with_extension("refused"), "").unwrap();
                drop(entry);
                wait_forever();
            }
            println!("\nforked {forked}");
            wait();
        }
        // Forks while another thread would hold the locks of the lists of open files.
        "forks_while_locked" => {
            let cache = open();
            let entry = cache.find_or_make(&key("model"), "v", SIZE).unwrap();
            entry.claim_run(3..9).unwrap();
            let forks = || {
                // SAFETY: the child opens the cache by itself, and ends.
                let forked = unsafe { libc::fork() };
                if forked == 0 {
                    uses_its_own(&folder, &entry);
                }
                forked
            };
            let forked = while_locked(|| while_listed(forks));
            let mut status = 0;
            // SAFETY: one number is written.
            assert_eq!(unsafe { libc::waitpid(forked, &raw mut status, 0) }, forked);
            assert!(libc::WIFEXITED(status), "the child hangs: signal {}", libc::WTERMSIG(status));
            assert_eq!((libc::WEXITSTATUS(status), entry.state(1).unwrap()), (17, BlockState::There));
            println!("\nforked 1");
        }
        // Writes a block while no descriptor is free, and another one when there are some.
        "lacks_descriptors" => {
            let cache = open();
            let file = Arc::new(cached_file(&cache, cache.find_or_make(&key("model"), "v", SIZE).unwrap()));
            // The files of the last ones stay open, and so those of the first one are closed.
            let limit = |most: u64| {
                let limit = libc::rlimit { rlim_cur: most, rlim_max: 4096 };
                // SAFETY: one structure is read.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
            };
            limit(64);
            let others: Vec<_> =
                (0..6).map(|other| cache.find_or_make(&key(&other.to_string()), "v", 9).unwrap()).collect();
            let written = |block_number| file.write(block_number, &block(&file.entry, block_number));
            limit(3);
            let refused = written(2).unwrap_err();
            limit(64);
            assert_eq!((refused.kind(), refused.errno()), (ErrorKind::Limit, Some(libc::EMFILE)), "{refused}");
            assert!(file.is_writable(), "other blocks can be written");
            written(3).unwrap();
            assert_eq!((file.entry.state(2).unwrap(), check(&file.entry)), (BlockState::Missing, 1));
            drop(others);
            println!("\nalive 1");
        }
        "forks_and_keeps" => {
            let cache = open();
            let entry = cache.find_or_make(&key("model"), "v", SIZE).unwrap();
            entry.claim_run(3..9).unwrap();
            // SAFETY: as above.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                wait_forever();
            }
            println!("\nforked {forked}");
            wait();
            drop(entry);
            println!("\ndropped 1");
            wait();
        }
        // Makes, fills, checks and drops entries.
        "uses" => {
            let cache = open();
            let end = Instant::now() + Duration::from_millis(words[2].parse().unwrap());
            let mut rounds = 0;
            while Instant::now() < end {
                let name = format!("model {}", rounds % 3);
                let entry = cache.find_or_make(&key(&name), "v", 2 * BLOCK).unwrap();
                for number in 0..2 {
                    if entry.claim(number).unwrap() == BlockState::Claimed(entry.number()) {
                        entry.write(number, &block(&entry, number)).unwrap();
                    }
                }
                check(&entry);
                cache.note(&key(&name), "v", 2 * BLOCK).unwrap();
                rounds += 1;
            }
            println!("\nrounds {rounds}");
        }
        // Removes them meanwhile.
        "prunes" => {
            let cache = open();
            let end = Instant::now() + Duration::from_millis(words[2].parse().unwrap());
            let mut removed = 0;
            // On a disk that others use, the rounds of users take long, and it finds each entry open.
            // SAFETY: a plain system call.
            unsafe { libc::alarm(60) };
            while Instant::now() < end || removed == 0 {
                removed += cache.prune(&Prune::All, false).unwrap().gone.len() as u64;
                cache.entries().unwrap();
                cache.make_room(BLOCK).unwrap();
            }
            println!("\nremoved {removed}");
        }
        "is_limited" => {
            let limit = |most: u64| {
                let limit = libc::rlimit { rlim_cur: most, rlim_max: libc::RLIM_INFINITY };
                // SAFETY: one structure is read.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            };
            let cache = open();
            let before = cache.find_or_make(&key("before"), "v", 3 * BLOCK).unwrap();
            limit(BLOCK + BLOCK / 2);
            let refused = cache.find_or_make(&key("model"), "v", 2 * BLOCK).unwrap_err();
            assert_eq!((refused.kind(), refused.errno()), (ErrorKind::NoSpace, Some(libc::EFBIG)), "{refused}");
            cache.find_or_make(&key("small"), "v", BLOCK).unwrap();
            before.write(0, &block(&before, 0)).unwrap();
            assert_eq!(before.write(1, &block(&before, 1)).unwrap_err().kind(), ErrorKind::NoSpace);
            assert_eq!((before.state(1).unwrap(), check(&before)), (BlockState::Missing, 1));
            println!("\nalive 1");
        }
        role => access::play(role, &folder, &words[2..]),
    }
    played();
}

/// A forked child opens the cache by itself, and ends.
fn uses_its_own(folder: &Path, parents: &CacheEntry) -> ! {
    // SAFETY: a plain system call.
    unsafe { libc::alarm(20) };
    leave_to_parent();
    let own = CacheFolder::open(&settings(folder)).unwrap();
    let again = own.find(&key("model"), "v", SIZE).unwrap().unwrap();
    assert_eq!(again.claim(1).unwrap(), BlockState::Claimed(again.number()));
    // The parent's claims are another's here.
    assert_eq!(again.claim(3).unwrap(), BlockState::Claimed(parents.number()));
    again.write(1, &block(&again, 1)).unwrap();
    drop(again);
    // SAFETY: a plain system call.
    unsafe { libc::_exit(17) }
}

/// A forked child cannot use its parent's entry, and changes nothing of it.
fn refuses_all(entry: &CacheEntry) {
    let forked = |e: Error| assert_eq!(e.kind(), ErrorKind::Forked, "{e}");
    forked(entry.is_complete().unwrap_err());
    forked(entry.there().unwrap_err());
    forked(entry.checksums().unwrap_err());
    forked(entry.claimed().unwrap_err());
    forked(entry.read(0..9, &mut [0; 9]).unwrap_err());
    forked(entry.file().unwrap_err());
    let time = || (map_of(entry).metadata().unwrap().modified(), Path::new("/dev/null").metadata().unwrap().modified());
    let before = time();
    entry.touch();
    assert_eq!(format!("{:?}", time()), format!("{before:?}"));
}

/// Until it is killed. It ends by itself where the test has failed before it could do so.
fn wait_forever() -> ! {
    // SAFETY: a plain system call.
    unsafe { libc::alarm(60) };
    loop {
        // SAFETY: a plain system call.
        unsafe { libc::pause() };
    }
}

/// The number that a child says behind this word.
fn said(child: &mut Child, word: &str) -> u32 {
    let output = child.stdout.take().unwrap();
    let mut lines = BufReader::new(output);
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        if let Some(number) = line.strip_prefix(word) {
            let number = number.trim().parse().unwrap();
            child.stdout = Some(lines.into_inner());
            return number;
        }
        line.clear();
    }
    panic!("it did not say {word:?}");
}

fn signal(process: u32, signal: i32) {
    // SAFETY: a process of this test.
    assert_eq!(unsafe { libc::kill(process as i32, signal) }, 0);
}

/// Ends the wait of a child.
fn goes_on(child: &mut Child) {
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
}

fn kill(mut child: Child) {
    signal(child.id(), libc::SIGKILL);
    child.wait().unwrap();
}

/// Waits until it holds.
fn until(holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(30), "it does not come to hold");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn processes_that_need_one_object_write_each_block_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    let children: Vec<_> = (0..4).map(|n| child("brings", &root, &[&format!("{}", n * 7)])).collect();
    let written: Vec<u32> = children
        .into_iter()
        .map(|mut child| {
            let written = said(&mut child, "written ");
            assert!(child.wait().unwrap().success());
            written
        })
        .collect();
    assert_eq!(written.iter().sum::<u32>(), BLOCKS as u32, "{written:?}");
    let cache = CacheFolder::open(&settings(&root)).unwrap();
    assert_eq!(check(&cache.find(&key("model"), "v", SIZE).unwrap().unwrap()), BLOCKS as u32);
}

#[test]
fn a_process_that_is_killed_at_any_moment_leaves_whole_blocks_and_no_claim() {
    let folder = tempfile::tempdir().unwrap();
    let mut kept = 0;
    for round in 0..20u64 {
        let root = folder.path().join(format!("cache {}", round / 5));
        let child = child("brings", &root, &[&format!("{}", round * 3)]);
        std::thread::sleep(Duration::from_micros(2_000 + round * 3_700 % 60_000));
        kill(child);
        let Ok(cache) = CacheFolder::open(&settings(&root)) else { panic!("round {round}") };
        let entry = cache.find_or_make(&key("model"), "v", SIZE).unwrap();
        kept += check(&entry);
        let missing = |state: &BlockState| matches!(state, BlockState::There | BlockState::Missing);
        assert!(entry.states(0..BLOCKS as u32).unwrap().iter().all(missing), "a claim is left");
    }
    println!("{kept} blocks were there after 20 kills");
}

#[test]
fn a_killed_holder_has_no_claims_and_a_stopped_one_keeps_them() {
    let (_folder, cache) = cache();
    let mut holder = child("claims", cache.path(), &[]);
    let number = said(&mut holder, "number ");
    let entry = cache.find(&key("model"), "v", SIZE).unwrap().unwrap();
    signal(holder.id(), libc::SIGSTOP);
    assert_eq!(entry.state(4).unwrap(), BlockState::Claimed(number));
    assert_eq!(entry.claim(4).unwrap(), BlockState::Claimed(number));
    // Whoever needs it writes it.
    for block_number in 3..6 {
        entry.write(block_number, &block(&entry, block_number)).unwrap();
    }
    assert_eq!((entry.sync().unwrap(), entry.state(6).unwrap()), (3, BlockState::Claimed(number)));
    assert_eq!(cache.prune(&Prune::All, false).unwrap().open.len(), 1);
    signal(holder.id(), libc::SIGCONT);
    goes_on(&mut holder);
    assert!(holder.wait().unwrap().success());
    assert_eq!((entry.state(6).unwrap(), check(&entry), entry.sync().unwrap()), (BlockState::Missing, 3, 0));
    let holder = child("claims", cache.path(), &[]);
    until(|| matches!(entry.state(8).unwrap(), BlockState::Claimed(_)));
    kill(holder);
    assert_eq!(entry.claim(8).unwrap(), BlockState::Claimed(entry.number()));
}

#[test]
fn a_block_of_a_stopped_holder_is_taken_over_by_one_process_which_can_give_it_back() {
    let (_folder, cache) = cache();
    let mut holder = child("claims", cache.path(), &[]);
    let number = said(&mut holder, "number ");
    signal(holder.id(), libc::SIGSTOP);
    let open = || cache.find(&key("model"), "v", SIZE).unwrap().unwrap();
    let (one, other) = (open(), open());
    let by = |entry: &CacheEntry| BlockState::Claimed(entry.number());
    for block_number in 3..6 {
        assert_eq!(one.take_over(block_number).unwrap(), by(&one));
        assert_eq!((other.state(block_number).unwrap(), one.state(block_number).unwrap()), (by(&one), by(&one)));
        assert_eq!(other.take_over(block_number).unwrap(), by(&one), "one of them has it");
    }
    one.release(3);
    one.write(4, &block(&one, 4)).unwrap();
    assert_eq!(other.state(3).unwrap(), BlockState::Claimed(number), "it is the stopped one's again");
    assert_eq!((other.take_over(3).unwrap(), other.take_over(4).unwrap()), (by(&other), BlockState::There));
    drop(one);
    assert_eq!(other.state(5).unwrap(), BlockState::Claimed(number));
    // What was taken over stays so when its first holder is gone.
    let third = open();
    kill(holder);
    assert_eq!((third.state(3).unwrap(), third.state(5).unwrap()), (by(&other), BlockState::Missing));
    assert_eq!((third.claim(3).unwrap(), third.take_over(5).unwrap()), (by(&other), by(&third)));
    other.release(3);
    assert_eq!((third.claim(3).unwrap(), check(&third)), (by(&third), 1));
}

#[test]
fn a_block_that_is_given_back_does_not_show_that_its_stopped_holder_works() {
    let (_folder, cache) = cache();
    let mut holder = child("claims", cache.path(), &[]);
    let number = said(&mut holder, "number ");
    signal(holder.id(), libc::SIGSTOP);
    let open = || cache.find(&key("model"), "v", SIZE).unwrap().unwrap();
    let taker = open();
    let files: CachedFiles = vec![Some(Arc::new(cached_file(&cache, open())))];
    let (mut claims, holders) = (HashMap::new(), BTreeSet::from([number]));
    taker.take_over(3).unwrap();
    taker.take_over(5).unwrap();
    alive(&files, &holders, &mut claims);
    taker.release(3);
    drop(taker);
    assert_eq!(files[0].as_ref().unwrap().entry.state(3).unwrap(), BlockState::Claimed(number));
    let news = alive(&files, &holders, &mut claims);
    assert!(news.is_empty(), "it is stopped: {news:?}");
    // When it goes on, it is seen.
    signal(holder.id(), libc::SIGCONT);
    goes_on(&mut holder);
    assert!(holder.wait().unwrap().success());
    let news = alive(&files, &holders, &mut claims);
    assert!(matches!(news[..], [CacheNews::Alive(seen)] if seen == number), "{news:?}");
}

/// An object of a load that has this entry.
pub(super) fn cached_file(cache: &Arc<CacheFolder>, entry: Arc<CacheEntry>) -> CachedFile {
    let location = Location::Url("s3://bucket/model".to_owned());
    let object = Object { location, size: entry.size(), version: Version::Strong("v".to_owned()) };
    CachedFile::new(cache.clone(), entry, object, None)
}

#[test]
fn a_process_that_forks_while_it_opens_a_file_has_a_child_that_can_use_the_cache() {
    let (_folder, cache) = cache();
    let mut parent = child("forks_while_locked", cache.path(), &[]);
    said(&mut parent, "forked ");
    assert!(parent.wait().unwrap().success());
}

#[test]
fn a_process_that_receives_something_is_seen_by_others() {
    let (_folder, cache) = cache();
    let again = CacheFolder::open(&settings(cache.path())).unwrap();
    let (one, other) = (cache.beats.as_ref().unwrap(), again.beats.as_ref().unwrap());
    let (mine, another) = (7 << 16 | 1, 8 << 16 | 1);
    let before = (other.count(mine), other.count(another));
    one.beat(mine);
    let after = other.count(mine);
    one.beat(mine);
    assert!(after != before.0 && other.count(mine) != after, "each beat is another count");
    assert_eq!(other.count(mine), other.count(mine + 1), "all entries of a process have one");
    assert_eq!(other.count(another), before.1);
}

#[test]
fn a_forked_child_keeps_the_locks_of_a_killed_parent_unless_it_leaves_them() {
    for (role, word, stays) in [("forks", "leaves", false), ("forks", "drops", false), ("forks_and_keeps", "", true)] {
        let (_folder, cache) = cache();
        let mut parent = child(role, cache.path(), &[word]);
        let forked = said(&mut parent, "forked ");
        if role == "forks" {
            until(|| cache.path().with_extension("refused").exists());
        }
        let entry = cache.find(&key("model"), "v", SIZE).unwrap().unwrap();
        assert!(matches!(entry.state(4).unwrap(), BlockState::Claimed(_)), "{role} {word}: the parent holds it");
        if !stays {
            // Until the forked child has closed it.
            let descriptors = format!("/proc/{forked}/fd");
            until(|| !links(&descriptors).iter().any(|link| link.ends_with(".map")));
            assert!(
                matches!(entry.state(4).unwrap(), BlockState::Claimed(_)),
                "{role} {word}: the parent holds it still"
            );
        }
        kill(parent);
        assert_eq!(matches!(entry.state(4).unwrap(), BlockState::Claimed(_)), stays, "{role} {word}");
        signal(forked, libc::SIGKILL);
        until(|| entry.state(4).unwrap() == BlockState::Missing);
    }
}

/// The targets of the links in a folder.
fn links(folder: &str) -> Vec<String> {
    let target = |one: std::io::Result<std::fs::DirEntry>| std::fs::read_link(one.ok()?.path()).ok();
    std::fs::read_dir(folder).unwrap().filter_map(target).map(|path| path.to_string_lossy().into_owned()).collect()
}

#[test]
fn a_parent_that_drops_an_entry_ends_its_claims_beside_a_forked_child() {
    let (_folder, cache) = cache();
    let mut parent = child("forks_and_keeps", cache.path(), &[]);
    let forked = said(&mut parent, "forked ");
    let entry = cache.find(&key("model"), "v", SIZE).unwrap().unwrap();
    goes_on(&mut parent);
    said(&mut parent, "dropped ");
    assert_eq!(entry.state(4).unwrap(), BlockState::Missing);
    drop(entry);
    assert_eq!(cache.prune(&Prune::All, false).unwrap().gone.len(), 1, "it is open no more");
    kill(parent);
    signal(forked, libc::SIGKILL);
}

#[test]
fn eviction_beside_processes_that_use_the_cache_removes_nothing_that_is_open() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    let time = "1500";
    let mut users: Vec<_> = (0..3).map(|_| child("uses", &root, &[time])).collect();
    let mut pruner = child("prunes", &root, &[time]);
    let rounds: Vec<u32> = users.iter_mut().map(|user| said(user, "rounds ")).collect();
    let removed = said(&mut pruner, "removed ");
    assert!(users.iter_mut().chain([&mut pruner]).all(|one| one.wait().unwrap().success()));
    assert!(removed > 0 && rounds.iter().all(|rounds| *rounds > 0), "{rounds:?} {removed}");
    println!("{rounds:?} rounds, {removed} removed");
}

#[test]
fn processes_that_start_at_once_make_one_cache() {
    for _round in 0..5 {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("cache");
        let children: Vec<_> = (0..8).map(|_| child("uses", &root, &["1"])).collect();
        for child in children {
            let done = child.wait_with_output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        }
        CacheFolder::open(&settings(&root)).unwrap().entries().unwrap();
    }
}

#[test]
fn an_entry_is_made_beside_one_who_looks_for_it() {
    let (_folder, cache) = cache();
    // As another process does that looks for it at this moment, until the entry is being made.
    let marker = || std::fs::File::open(cache.path().join(MARKER)).unwrap();
    let id = object_id(&key("model").hash, "v", SIZE);
    let looks = OpenLocks::new(marker()).hold(&id).unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (marker, byte) = (marker(), lock_byte(&id));
            until(|| held(&marker, byte..byte + 1).unwrap().is_some());
            std::thread::sleep(Duration::from_millis(20));
            drop(looks);
        });
        cache.find_or_make(&key("model"), "v", SIZE).unwrap();
    });
}

#[test]
fn a_process_that_is_slow_to_make_the_cache_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let maker = fs::File::open(folder.path()).unwrap();
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::flock(maker.as_raw_fd(), libc::LOCK_EX) }, 0);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| CacheFolder::open(&settings(folder.path())).map(|cache| cache.is_writable()));
        std::thread::sleep(PATIENCE * 3 / 2);
        drop(maker);
        assert!(waits.join().unwrap().unwrap());
    });
}

#[test]
fn what_another_process_has_made_is_taken_while_that_process_still_has_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("cache");
    fs::create_dir(&root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).unwrap();
    // The folder itself
    let maker = fs::File::open(&root).unwrap();
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::flock(maker.as_raw_fd(), libc::LOCK_EX) }, 0);
    let cache = std::thread::scope(|scope| {
        let waits = scope.spawn(|| CacheFolder::open(&settings(&root)).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let part = root.join(format!("{MARKER}.part"));
        fs::write(&part, format!("penstock disk cache, format {FORMAT}\n")).unwrap();
        fs::set_permissions(&part, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(&part, root.join(MARKER)).unwrap();
        waits.join().unwrap()
    });
    // An entry
    let id = object_id(&key("model").hash, "v", SIZE);
    let _making = cache.hold(&id).unwrap().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| cache.find_or_make(&key("model"), "v", SIZE).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let (address, version, made) = ("s3://bucket/model".to_owned(), "v".to_owned(), std::time::SystemTime::now());
        let header = MapHeader { key: key("model").hash, size: SIZE, address, version, made };
        CacheEntry::make(&cache.below(OBJECTS, &id, true).unwrap().unwrap(), &id, &header).unwrap();
        assert_eq!(waits.join().unwrap().size(), SIZE);
    });
}

#[test]
fn a_block_for_which_no_descriptor_is_free_is_dropped_and_later_ones_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut limited = child("lacks_descriptors", &folder.path().join("cache"), &[]);
    said(&mut limited, "alive ");
    assert!(limited.wait().unwrap().success());
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_signal() {
    let folder = tempfile::tempdir().unwrap();
    let mut limited = child("is_limited", &folder.path().join("cache"), &[]);
    said(&mut limited, "alive ");
    assert!(limited.wait().unwrap().success());
}
