//! Leases on the files that a load has mapped: another program that writes waits for a copy of what is alive, and not for
//! the consumer; and no lease, thread or descriptor is left.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod checkpoints;

use penstock::load::Leased;
use penstock::memory::View;
use penstock::options::Options;
use penstock::{Checkpoint, ErrorKind, Load, Memory, Request, Want, Where};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Tells a hang from work. The kernel itself ends a lease after 45 s.
const SOON: Duration = Duration::from_secs(30);
const A: u64 = 3_000_000;
const B: u64 = 5_000_001;

struct Loaded {
    folder: tempfile::TempDir,
    paths: Vec<PathBuf>,
    load: Load,
}

/// A load of two files with tensors `a` (want 0 and 2) and `b` (1 and 3).
fn loaded() -> Loaded {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["1.safetensors", "2.safetensors"].iter().map(|name| folder.path().join(name)).collect();
    for (number, path) in paths.iter().enumerate() {
        let names = [format!("a{number}"), format!("b{number}")];
        checkpoints::write(path, &[(&names[0], A), (&names[1], B)]);
    }
    let load = load_of(&Arc::new(Checkpoint::open(&paths).unwrap()));
    Loaded { folder, paths, load }
}

/// Maps all tensors of a checkpoint.
fn load_of(checkpoint: &Arc<Checkpoint>) -> Load {
    let load = Load::start(Request {
        wants: Want::all(checkpoint),
        checkpoint: checkpoint.clone(),
        layout: None,
        device: Where::Cpu,
        memory: Memory::Ours,
        options: Options { copy: Some(false), ..Options::default() },
        stream: false,
    })
    .unwrap();
    load.wait(Some(SOON)).unwrap();
    load
}

/// More bytes than there are.
const ANY: u64 = u64::MAX;
/// Longer than a settling takes.
const LONG: Duration = Duration::from_secs(50);

/// The leases; `None` where the file system has none.
fn leased(load: &Load) -> Option<Leased> {
    match load.lease(ANY).unwrap() {
        Ok(leased) => Some(leased),
        Err(refused) => {
            assert!(refused.contains("file system"), "{refused}");
            println!("no leases here: {refused}");
            None
        }
    }
}

fn view(load: &Load, leased: &Leased, want: u32) -> View {
    let _handing = leased.enter(want).unwrap().unwrap();
    load.view(want).unwrap()
}

/// Leases on a file, as the kernel lists them: to ask by an open for writing would end them.
fn leases_on(path: &Path) -> usize {
    let inode = format!(":{}", fs::metadata(path).unwrap().ino());
    let all = fs::read_to_string("/proc/locks").unwrap();
    let on = |line: &str| line.contains(" LEASE ") && line.split_whitespace().any(|field| field.ends_with(&inode));
    all.lines().filter(|line| on(line)).count()
}

fn bytes(view: &View) -> Vec<u8> {
    // SAFETY: a complete view of CPU memory, which is alive.
    unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) }.to_vec()
}

/// Whether somebody may write to the file now.
fn is_free(path: &Path) -> bool {
    match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(_) => true,
        Err(e) if e.raw_os_error() == Some(libc::EWOULDBLOCK) => false,
        Err(e) => panic!("{e}"),
    }
}

fn until(what: &str, mut there: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !there() {
        assert!(begun.elapsed() < SOON, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Empties a file, which waits for its lease.
fn emptying(path: &Path) -> JoinHandle<Duration> {
    let path = path.to_owned();
    let write = move || {
        let begun = Instant::now();
        OpenOptions::new().write(true).truncate(true).open(path).unwrap();
        begun.elapsed()
    };
    Builder::new().spawn(write).unwrap()
}

/// Descriptors of this process for files in a folder.
fn descriptors(folder: &Path) -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(folder))).count()
}

#[test]
fn a_file_that_is_emptied_stays_in_the_views_that_are_alive() {
    let Loaded { folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let (gone, alive, other) = (view(&load, &leased, 0), view(&load, &leased, 1), view(&load, &leased, 2));
    drop(gone);
    assert_eq!(leased.alive(), 2);
    let expected = [bytes(&alive), bytes(&other)];
    let took = emptying(&paths[0]).join().unwrap();
    assert!(took < SOON, "{took:?}: the kernel has ended the lease");
    assert_eq!(fs::metadata(&paths[0]).unwrap().len(), 0);
    // Without memory of their own this would be SIGBUS.
    assert_eq!([bytes(&alive), bytes(&other)], expected);
    assert_eq!(leased.asked(), Some(0));
    until("it has not ended", || leased.is_over());
    assert!(leased.enter(3).unwrap().is_none(), "more is handed out");
    assert_eq!(descriptors(folder.path()), 0);
    assert!(is_free(&paths[1]), "the lease on the other file is not given back");
    drop((alive, other));
    assert_eq!(leased.alive(), 0);
}

#[test]
fn what_a_consumer_has_written_into_a_view_stays_there() {
    let Loaded { folder: _folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let view = view(&load, &leased, 1);
    // SAFETY: a private mapping that nobody else uses.
    unsafe { std::ptr::write_bytes(view.address() as *mut u8, 0xa7, 10_000) };
    let expected = bytes(&view);
    emptying(&paths[0]).join().unwrap();
    assert_eq!(bytes(&view), expected);
    assert_eq!(expected[..10_000], [0xa7; 10_000]);
}

#[test]
fn a_view_that_is_being_handed_out_is_waited_for() {
    let Loaded { folder: _folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let handing = leased.enter(0).unwrap().unwrap();
    let writer = emptying(&paths[0]);
    until("nobody asks", || leased.asked().is_some());
    std::thread::sleep(Duration::from_millis(600)); // two looks
    assert!(!writer.is_finished());
    let view = load.view(0).unwrap();
    assert_eq!(view.nbytes(), A);
    drop(handing);
    writer.join().unwrap();
    bytes(&view);
}

#[test]
fn leases_last_until_the_last_view_is_gone() {
    let Loaded { folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let (one, other) = (view(&load, &leased, 0), view(&load, &leased, 3));
    leased.end();
    assert!(leased.enter(1).unwrap().is_none());
    drop(one);
    assert!(!leased.is_over());
    drop(other);
    until("the leases are still there", || leased.is_over());
    assert!(is_free(&paths[0]) && is_free(&paths[1]));
    assert_eq!(descriptors(folder.path()), 0);
}

#[test]
fn leases_that_nobody_asks_about_last_while_a_view_is_alive() {
    let Loaded { folder: _folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let view = view(&load, &leased, 0);
    leased.end();
    std::thread::sleep(Duration::from_millis(600)); // two looks
    assert!(!leased.is_over());
    assert_eq!(leases_on(&paths[0]), 1);
    drop(leased);
    drop(load);
    let expected = bytes(&view);
    emptying(&paths[0]).join().unwrap();
    assert_eq!(bytes(&view), expected, "the lease ends with its view, not with its owner");
}

#[test]
fn what_is_settled_is_private_and_its_leases_are_given_back() {
    let Loaded { folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let view = view(&load, &leased, 1);
    let expected = bytes(&view);
    assert!(leased.settle(LONG).unwrap() && leased.settle(LONG).unwrap());
    assert!(leased.is_over() && leased.asked().is_none());
    assert_eq!(descriptors(folder.path()), 0);
    assert!(is_free(&paths[0]) && is_free(&paths[1]));
    fs::write(&paths[0], b"").unwrap();
    assert_eq!(bytes(&view), expected);
}

#[test]
fn an_owner_that_goes_gives_them_back() {
    let Loaded { folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    assert_eq!([leases_on(&paths[0]), leases_on(&paths[1])], [1, 1]);
    drop(leased);
    until("the leases are still there", || leases_on(&paths[0]) + leases_on(&paths[1]) == 0);
    until("its descriptors are still there", || descriptors(folder.path()) == 0);
    assert!(is_free(&paths[0]) && is_free(&paths[1]));
}

#[test]
fn a_file_that_is_open_for_writing_has_no_lease_and_that_is_said() {
    let Loaded { folder, paths, load } = loaded();
    let writer = OpenOptions::new().append(true).open(&paths[1]).unwrap();
    let refused = load.lease(ANY).unwrap().err().unwrap();
    if leased(&loaded().load).is_none() {
        return;
    }
    let name = paths[1].display().to_string();
    assert!(refused.contains(&name) && refused.contains("open for writing"), "{refused}");
    drop(writer);
    until("its descriptors are still there", || descriptors(folder.path()) == 0);
    assert!(is_free(&paths[0]), "the lease on the first file was kept");
}

#[test]
fn a_file_that_has_changed_before_is_an_error() {
    let Loaded { folder: _folder, paths, load } = loaded();
    let now = fs::read(&paths[0]).unwrap();
    fs::write(&paths[0], &now[..now.len() - 1]).unwrap();
    let error = load.lease(ANY).err().unwrap();
    assert_eq!((error.kind(), error.path()), (ErrorKind::Changed, Some(&*paths[0])));
}

#[test]
fn leases_are_taken_before_anything_is_handed_out() {
    let Loaded { folder: _folder, paths: _paths, load } = loaded();
    let _view = load.view(0).unwrap();
    assert_eq!(load.lease(ANY).err().unwrap().kind(), ErrorKind::Invalid);
}

#[test]
fn a_load_is_leased_once() {
    let Loaded { folder: _folder, paths: _paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    assert_eq!(load.lease(ANY).err().unwrap().kind(), ErrorKind::Invalid);
    let _view = view(&load, &leased, 0);
    assert_eq!(leased.alive(), 1);
}

#[test]
fn while_too_much_is_alive_nothing_more_is_handed_out() {
    let Loaded { folder: _folder, paths, load } = loaded();
    let Some(_) = leased(&loaded().load) else { return };
    let leased = load.lease(A + B).unwrap().unwrap();
    drop(view(&load, &leased, 2));
    let views = [0, 1].map(|want| view(&load, &leased, want));
    assert!(!leased.is_full());
    assert!(leased.enter(3).unwrap().is_none() && leased.is_full());
    assert!(leased.asked().is_none() && !leased.is_over());
    assert!(leased.settle(LONG).unwrap());
    let expected = [bytes(&views[0]), bytes(&views[1])];
    fs::write(&paths[0], b"").unwrap();
    assert_eq!([bytes(&views[0]), bytes(&views[1])], expected);
}

/// Opens without asking to write: such an open breaks no lease.
fn truncate_past_the_lease(path: &Path) {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a string that ends with a zero, and a descriptor that was just opened.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_TRUNC);
        assert!(fd >= 0);
        libc::close(fd);
    }
}

#[test]
fn what_cannot_become_private_is_an_error_and_no_signal() {
    let Loaded { folder: _folder, paths, load } = loaded();
    let Some(leased) = leased(&load) else { return };
    let _view = view(&load, &leased, 1);
    truncate_past_the_lease(&paths[0]);
    assert_eq!(fs::metadata(&paths[0]).unwrap().len(), 0);
    let error = leased.settle(LONG).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::Changed, Some(&*paths[0])));
    until("its lease is still there", || leases_on(&paths[0]) == 0);
}

#[test]
fn of_what_a_consumer_writes_while_it_becomes_private_nothing_is_lost_unsaid() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("1.safetensors");
    let length = 64 << 20;
    checkpoints::write(&path, &[("a", length)]);
    let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
    for _ in 0..4 {
        let load = load_of(&checkpoint);
        let Some(leased) = leased(&load) else { return };
        let view = view(&load, &leased, 0);
        let (address, stop) = (view.address(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
        let stopped = stop.clone();
        // Each byte is written once, all along the tensor and round by round.
        let consumer = Builder::new().spawn(move || {
            let mut written = Vec::new();
            for at in 0..4096u64 {
                for part in 0..length / 4096 {
                    if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                        return written;
                    }
                    let to = (address + part * 4096 + at) as *mut u8;
                    // SAFETY: a byte of a view that is alive until this thread was joined.
                    unsafe { to.write_volatile(!to.read_volatile()) };
                    written.push(to as u64 - address);
                }
            }
            written
        });
        let before = vec_of(&path, length);
        std::thread::sleep(Duration::from_millis(20));
        let settled = leased.settle(LONG);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let written = consumer.unwrap().join().unwrap();
        let now = bytes(&view);
        let lost = written.iter().filter(|&&at| now[at as usize] == before[at as usize]).count();
        match settled {
            Ok(true) => assert_eq!(lost, 0, "of {}", written.len()),
            Ok(false) => panic!("it goes on"),
            Err(e) => assert_eq!((e.kind(), e.path()), (ErrorKind::Invalid, Some(&*path))),
        }
    }
}

/// The bytes of the only tensor.
fn vec_of(path: &Path, length: u64) -> Vec<u8> {
    let file = fs::read(path).unwrap();
    file[file.len() - length as usize..].to_vec()
}
