//! A file system in the hands of another process: slow, deep, and in the end hung. The server is thirty lines of the FUSE
//! protocol (include/uapi/linux/fuse.h) in this process, mounted where only this process sees it.

use crate::sample::*;
use penstock::extent::Lane;
use penstock::options::{Cache, Io, Options};
use penstock::source::{quarantined, Router, Source};
use penstock::store::{Files, FsKind};
use penstock::way::Routing;
use penstock::{Checkpoint, Load, Memory as To, Request, Want, Where};
use std::ffi::CString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Default)]
struct Server {
    hang: AtomicBool,
    waiting: AtomicUsize,
    most_waiting: AtomicUsize,
}

const LATENCY: Duration = Duration::from_millis(20);

/// Mounts a file system with one file, "sample", under `folder`; `None` where that is not allowed.
fn mount(folder: &Path, bytes: &'static [u8]) -> Option<(PathBuf, Arc<Server>, fs::File)> {
    let device = fs::File::options().read(true).write(true).open("/dev/fuse").ok()?;
    let target = CString::new(folder.as_os_str().as_bytes()).unwrap();
    let data = CString::new(format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd())).unwrap();
    // SAFETY: plain system calls on strings that outlive them, in a mount namespace of this process alone.
    unsafe {
        if libc::unshare(libc::CLONE_NEWNS) != 0 {
            return None;
        }
        let private = libc::MS_PRIVATE | libc::MS_REC;
        libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null());
        if libc::mount(c"penstock".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), 0, data.as_ptr().cast()) != 0 {
            return None;
        }
    }
    let server = Arc::new(Server::default());
    let (device, serving) = (Arc::new(device), server.clone());
    let for_abort = device.try_clone().unwrap();
    std::thread::spawn(move || serving.serve(&device, bytes));
    Some((folder.join("sample"), server, for_abort))
}

impl Server {
    fn serve(self: Arc<Self>, device: &Arc<fs::File>, bytes: &'static [u8]) {
        let mut request = vec![0u8; 1 << 20];
        while let Ok(n) = (&**device).read(&mut request) {
            let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
            let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
            let (opcode, unique, node) = (word(4), long(8), long(16));
            assert!(n >= 40);
            let attributes = |node: u64| {
                let (size, mode) = if node == 1 { (0, 0o040_755) } else { (bytes.len() as u64, 0o100_644) };
                let mut a = vec![];
                for v in [node, size, size.div_ceil(512), 0, 0, 0] {
                    a.extend(v.to_ne_bytes());
                }
                for v in [0u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
                    a.extend(v.to_ne_bytes());
                }
                a
            };
            match opcode {
                // LOOKUP, GETATTR
                1 => reply(
                    device,
                    unique,
                    0,
                    &[&[2u64, 0, 60, 60, 0].map(u64::to_ne_bytes).concat()[..], &attributes(2)].concat(),
                ),
                3 => reply(
                    device,
                    unique,
                    0,
                    &[&[60u64, 0].map(u64::to_ne_bytes).concat()[..], &attributes(node)].concat(),
                ),
                // OPEN, STATFS, RELEASE, FLUSH
                14 => reply(device, unique, 0, &[0; 16]),
                17 => reply(device, unique, 0, &[0; 80]),
                18 | 25 => reply(device, unique, 0, &[]),
                // INIT: version 7.31, read-ahead of 128 KiB, asynchronous reads, many in the background
                26 => {
                    let mut init = [7u32, 31, 128 << 10, 1].map(u32::to_ne_bytes).concat();
                    init.extend([64u16, 48].map(u16::to_ne_bytes).concat());
                    init.extend([128u32 << 10, 1].map(u32::to_ne_bytes).concat());
                    init.resize(64, 0);
                    reply(device, unique, 0, &init);
                }
                // READ
                15 => {
                    let (offset, len) = (long(48) as usize, word(56) as usize);
                    let (device, server) = (device.clone(), self.clone());
                    let now = self.waiting.fetch_add(1, Ordering::SeqCst) + 1;
                    self.most_waiting.fetch_max(now, Ordering::SeqCst);
                    if self.hang.load(Ordering::SeqCst) {
                        continue;
                    }
                    std::thread::spawn(move || {
                        std::thread::sleep(LATENCY);
                        server.waiting.fetch_sub(1, Ordering::SeqCst);
                        let offset = offset.min(bytes.len());
                        reply(&device, unique, 0, &bytes[offset..(offset + len).min(bytes.len())]);
                    });
                }
                // FORGET, BATCH_FORGET want no answer.
                2 | 42 => {}
                _ => reply(device, unique, -libc::ENOSYS, &[]),
            }
        }
    }
}

fn reply(device: &fs::File, unique: u64, error: i32, body: &[u8]) {
    let len = 16 + if error == 0 { body.len() } else { 0 };
    let mut message = (len as u32).to_ne_bytes().to_vec();
    message.extend(error.to_ne_bytes());
    message.extend(unique.to_ne_bytes());
    message.extend(body);
    message.truncate(len);
    let mut device = device;
    // Refused where the request was given up meanwhile.
    let _given_up = device.write(&message);
}

/// Makes the kernel give up every request, as unmounting by force does.
fn abort(folder: &Path) {
    let target = CString::new(folder.as_os_str().as_bytes()).unwrap();
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::umount2(target.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) }, 0);
}

#[test]
fn a_slow_file_system_is_read_deep_and_a_hung_one_is_left_behind() {
    alone("fuse::a_slow_file_system_is_read_deep_and_a_hung_one_is_left_behind", || {
        let sample = Sample::new();
        let folder = tempfile::tempdir().unwrap();
        let Some((path, server, _device)) = mount(folder.path(), sample.bytes) else {
            eprintln!("skipped: this kernel or sandbox mounts no FUSE file system");
            return;
        };
        let files = Arc::new(Files::from_paths(&[&path]).unwrap());
        let facts = files.facts(0).unwrap();
        assert_eq!((facts.kind, facts.fs, facts.lanes.mapping), (FsKind::Network, "fuse", None));

        for lane in [Lane::DIRECT, Lane::BUFFERED] {
            let mut source =
                Router::new(files.clone(), Io::Auto, &Arc::new(Routing { threads: 32, ..Routing::default() })).unwrap();
            let mut memories = Vec::new();
            let reads = (0..48).map(|i| {
                let (read, memory) = read(lane, i, &sample, i << 17, (i + 1) << 17);
                memories.push(memory);
                read
            });
            for done in submit_all(&mut source, reads.collect()) {
                let at = (done.ticket.0 as usize) << 17;
                done.result.unwrap();
                assert!(memories[done.ticket.0 as usize].bytes() == &sample.bytes[at..at + (1 << 17)]);
            }
            // Neither can hang the engine's thread: both go by threads.
            assert_eq!(source.direct_by(), "threads");
            assert!(source.threads_started() > 16, "{} threads", source.threads_started());
        }
        assert!(server.most_waiting.load(Ordering::SeqCst) >= 16, "reads at once");

        server.hang.store(true, Ordering::SeqCst);
        penstock::store::evict(&path, None).unwrap();
        let mut source =
            Router::new(files, Io::Auto, &Arc::new(Routing { threads: 32, ..Routing::default() })).unwrap();
        let (read, memory) = read(Lane::DIRECT, 0, &sample, 0, 1 << 20);
        source.submit(read).ok().unwrap();
        source.flush().unwrap();
        assert!(!readable(source.wake(), 200), "it does not hang");
        let start = Instant::now();
        drop(source);
        assert!(start.elapsed() < Duration::from_secs(4), "dropping waits for what hangs");
        assert_eq!((quarantined(), Arc::strong_count(&memory)), (1, 2), "left behind, with its memory");
        abort(folder.path());
        let until = Instant::now() + Duration::from_secs(20);
        while quarantined() > 0 || Arc::strong_count(&memory) > 1 {
            assert!(Instant::now() < until, "the read has ended but its memory is still held");
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

/// A shard file of three tensors. Two of them begin at odd places.
fn shard() -> &'static [u8] {
    let header = br#"{"a":{"dtype":"U8","shape":[100003],"data_offsets":[0,100003]},
        "b":{"dtype":"F32","shape":[50,1000],"data_offsets":[100003,300003]},
        "c":{"dtype":"F16","shape":[],"data_offsets":[300003,300005]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend((0..300_005u32).map(|i| (i ^ i >> 8) as u8));
    bytes.leak()
}

#[test]
fn a_copy_on_a_network_file_system_has_the_layout_of_one_on_a_disk() {
    alone("fuse::a_copy_on_a_network_file_system_has_the_layout_of_one_on_a_disk", || {
        let (bytes, disk, folder) = (shard(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")), tempfile::tempdir());
        let (disk, folder) = (disk.unwrap(), folder.unwrap());
        let Some((far, ..)) = mount(folder.path(), bytes) else {
            eprintln!("skipped: this kernel or sandbox mounts no FUSE file system");
            return;
        };
        let near = disk.path().join("sample");
        fs::write(&near, bytes).unwrap();
        let [near, far] = [&near, &far].map(|path| Arc::new(Checkpoint::open(&[path]).unwrap()));
        for (cache, misaligned) in
            [Cache::Auto, Cache::Keep, Cache::Bypass].into_iter().flat_map(|c| [(c, false), (c, true)])
        {
            let loaded = |checkpoint: &Arc<Checkpoint>| {
                let columns = Want::part(1, [0..50, 100..900]);
                let request = Request {
                    checkpoint: checkpoint.clone(),
                    wants: vec![Want::whole(0), Want::whole(1), Want::whole(2), columns],
                    device: Where::Cpu,
                    memory: To::Ours,
                    layout: None,
                    options: Options { cache, misaligned, ..Options::default() },
                    stream: false,
                };
                let load = Load::start(request).unwrap();
                load.wait(None).unwrap();
                let view = load.view(0).unwrap();
                // SAFETY: complete bytes of CPU memory, which the view keeps.
                let a = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
                assert!(*a == bytes[bytes.len() - 300_005..][..100_003], "wrong bytes");
                load
            };
            let (near, far) = (loaded(&near), loaded(&far));
            assert_eq!(near.layout(), far.layout(), "{cache:?}, misaligned {misaligned}");
            assert_eq!(far.report().routes.of(Lane::MAPPED).bytes, 0, "what is on a network is not mapped");
        }
    });
}
