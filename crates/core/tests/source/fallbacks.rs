//! Each fallback forced for real, at the start of a load and in the middle, in a process of its own: by seccomp filters,
//! resource limits and another user.

use crate::sample::*;
use penstock::error::ErrorKind;
use penstock::extent::{Lane, Ticket};
use penstock::fallback::Fallback;
use penstock::options::Io;
use penstock::source::{quarantined, Destination, Read, Router, Source, Threads};
use penstock::store::Files;
use penstock::way::Routing;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a seccomp filter refuses: a system call, perhaps only where an argument has a bit set or is a value.
struct Refuse {
    call: libc::c_long,
    errno: i32,
    only: Option<(u32, Arg)>,
}

#[derive(Clone, Copy)]
enum Arg {
    HasBit(i32),
    Is(i32),
}

fn refuse(call: libc::c_long, errno: i32) -> Refuse {
    Refuse { call, errno, only: None }
}

/// From here on the kernel refuses these to every thread of this process. There is no way back.
fn install(refused: &[Refuse]) {
    let stmt = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let jump = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let mut program = Vec::new();
    for r in refused {
        // struct seccomp_data: the call's number at 0, its arguments (8 bytes each) from 16 on.
        program.push(stmt(load, 0));
        let test = match r.only {
            None => vec![],
            Some((arg, Arg::HasBit(bit))) => {
                vec![stmt(load, 16 + 8 * arg), jump(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bit as u32, 0, 1)]
            }
            Some((arg, Arg::Is(value))) => {
                vec![stmt(load, 16 + 8 * arg), jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value as u32, 0, 1)]
            }
        };
        let skip = test.len() as u8 + 1;
        program.push(jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, r.call as u32, 0, skip));
        program.extend(test);
        program.push(stmt(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | r.errno as u32));
    }
    program.push(stmt(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let all_threads = libc::SECCOMP_FILTER_FLAG_TSYNC;
        let rc = libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, all_threads, &raw const program);
        assert_eq!(rc, 0, "seccomp: {}", std::io::Error::last_os_error());
    }
}

/// Loads the sample by 24 direct reads, calling `middle` when the first eight are under way, and checks every byte.
fn load(sample: &Sample, io: Io, middle: impl FnOnce()) -> (Vec<Fallback>, &'static str, Vec<Lane>) {
    load_by(sample, Lane::DIRECT, io, middle)
}

fn load_by(sample: &Sample, lane: Lane, io: Io, middle: impl FnOnce()) -> (Vec<Fallback>, &'static str, Vec<Lane>) {
    let routing = Routing { buffered_depth: 64, ..Routing::default() };
    let mut source = Router::new(sample.files(), io, &Arc::new(routing)).unwrap();
    let step = SIZE.div_ceil(24).next_multiple_of(PAGE);
    let mut memories = Vec::new();
    let mut middle = Some(middle);
    for i in 0..24 {
        let (read, memory) = read(lane, i, sample, (i * step).min(SIZE - 1), ((i + 1) * step).min(SIZE));
        memories.push((read.offset as usize, read.need as usize, memory));
        source.submit(read).ok().unwrap();
        if i == 7 {
            source.flush().unwrap();
            middle.take().unwrap()();
        }
    }
    let mut routes = Vec::new();
    let mut seen = [false; 24];
    for done in wait(&mut source, 24) {
        done.result.unwrap();
        assert!(!std::mem::replace(&mut seen[done.ticket.0 as usize], true), "a ticket came back twice");
        routes.push(done.lane);
    }
    for (offset, need, memory) in memories {
        let at = if lane == Lane::MAPPED { offset } else { 0 };
        assert!(memory.bytes()[at..at + need] == sample.bytes[offset..offset + need], "wrong bytes at {offset}");
    }
    assert_eq!((source.in_flight(), quarantined()), (0, 0));
    (source.take_fallbacks(), source.direct_by(), routes)
}

fn from_to(fallbacks: &[Fallback]) -> Vec<(&str, &str)> {
    fallbacks.iter().map(|f| (f.from, f.to)).collect()
}

/// A test that runs alone in a process of its own.
macro_rules! alone {
    ($(#[$attribute:meta])* fn $name:ident() $body:block) => {
        $(#[$attribute])*
        #[test]
        fn $name() {
            alone(concat!("fallbacks::", stringify!($name)), || $body);
        }
    };
}

alone!(
    fn io_uring_refused_from_the_start_goes_to_threads() {
        let sample = Sample::new();
        install(&[refuse(libc::SYS_io_uring_setup, libc::EPERM)]);
        let (fallbacks, by, _) = load(&sample, Io::Auto, || {});
        assert_eq!((from_to(&fallbacks), by), (vec![("io_uring", "threads")], "threads"));
        assert!(fallbacks[0].reason.contains("not permitted"), "{fallbacks:?}");
    }
);

alone!(
    fn io_uring_refused_in_the_middle_goes_to_threads() {
        let sample = Sample::new();
        let (fallbacks, by, _) = load(&sample, Io::Uring, || install(&[refuse(libc::SYS_io_uring_enter, libc::EPERM)]));
        assert_eq!((from_to(&fallbacks), by), (vec![("io_uring", "threads")], "threads"));
    }
);

alone!(
    fn io_uring_set_up_but_not_to_be_entered_goes_to_threads() {
        let sample = Sample::new();
        install(&[refuse(libc::SYS_io_uring_enter, libc::EPERM)]);
        let (fallbacks, by, _) = load(&sample, Io::Auto, || {});
        assert_eq!((from_to(&fallbacks), by), (vec![("io_uring", "threads")], "threads"));
    }
);

alone!(
    fn io_uring_without_registration_is_left_for_threads() {
        let sample = Sample::new();
        install(&[refuse(libc::SYS_io_uring_register, libc::EPERM)]);
        let (fallbacks, by, _) = load(&sample, Io::Auto, || {});
        assert_eq!((from_to(&fallbacks), by), (vec![("io_uring", "threads")], "threads"));
    }
);

alone!(
    fn a_ring_that_cannot_be_enabled_is_left_for_threads() {
        let sample = Sample::new();
        let enable_rings = (1, Arg::Is(12));
        install(&[Refuse { call: libc::SYS_io_uring_register, errno: libc::EINVAL, only: Some(enable_rings) }]);
        let (fallbacks, by, _) = load(&sample, Io::Auto, || {});
        assert_eq!((from_to(&fallbacks), by), (vec![("io_uring", "threads")], "threads"));
    }
);

alone!(
    fn buffered_io_uring_refused_from_the_start_goes_to_threads() {
        let sample = Sample::new();
        install(&[refuse(libc::SYS_io_uring_setup, libc::EPERM)]);
        let (fallbacks, _, routes) = load_by(&sample, Lane::BUFFERED, Io::UringBuffered, || {});
        assert_eq!(from_to(&fallbacks), [("io_uring", "threads")]);
        assert!(routes.iter().all(|r| *r == Lane::BUFFERED));
    }
);

alone!(
    fn buffered_io_uring_refused_in_the_middle_goes_to_threads() {
        let sample = Sample::new();
        let refused = || install(&[refuse(libc::SYS_io_uring_enter, libc::EPERM)]);
        let (fallbacks, _, routes) = load_by(&sample, Lane::BUFFERED, Io::UringBuffered, refused);
        assert_eq!(from_to(&fallbacks), [("io_uring", "threads")]);
        assert!(routes.iter().all(|r| *r == Lane::BUFFERED));
    }
);

/// O_DIRECT in the third argument of openat.
fn no_direct() -> Refuse {
    Refuse { call: libc::SYS_openat, errno: libc::EINVAL, only: Some((2, Arg::HasBit(libc::O_DIRECT))) }
}

alone!(
    fn o_direct_refused_from_the_start_goes_through_the_page_cache() {
        let sample = Sample::new();
        install(&[no_direct()]);
        for io in [Io::Uring, Io::Threads] {
            let before = penstock::store::evict(&sample.path, None).unwrap();
            let (fallbacks, _, routes) = load(&sample, io, || {});
            assert_eq!(from_to(&fallbacks)[0], ("O_DIRECT", "buffered"), "{io:?}");
            if fallbacks.len() == 1 {
                // RWF_DONTCACHE was granted: what was read has left the page cache, and nothing was read ahead. A page that
                // the kernel has its hands on just then may stay.
                let left = sample.files().resident_ranges(0).unwrap().bytes();
                assert!(
                    left <= before + 32 * PAGE,
                    "{left} bytes are in the page cache, {before} were before ({io:?})"
                );
            }
            assert_eq!(fallbacks.iter().filter(|f| f.from == "O_DIRECT").count(), 1, "told more than once");
            assert!(fallbacks[0].reason.contains("sample.safetensors"), "{fallbacks:?}");
            assert!(routes.iter().all(|r| *r == Lane::BUFFERED));
        }
    }
);

/// Two files: the first is read with O_DIRECT, then that is refused, then the second is read.
fn loses_direct_between_two_files(io: Io) {
    let samples = [Sample::new(), Sample::new()];
    let files = Arc::new(Files::from_paths(&[&samples[0].path, &samples[1].path]).unwrap());
    let mut source = Router::new(files, io, &Arc::default()).unwrap();
    for file in 0..2u32 {
        let mut memories = Vec::new();
        for i in 0..4 {
            let (mut read, memory) = read(Lane::DIRECT, i, &samples[0], i << 20, (i + 1) << 20);
            read.file = file;
            memories.push(memory);
            source.submit(read).ok().unwrap();
        }
        for done in wait(&mut source, 4) {
            assert_eq!(done.result.unwrap(), 1 << 20);
            assert_eq!(done.lane, if file == 0 { Lane::DIRECT } else { Lane::BUFFERED });
            let (at, memory) = ((done.ticket.0 as usize) << 20, &memories[done.ticket.0 as usize]);
            assert!(memory.bytes()[..] == samples[0].bytes[at..at + (1 << 20)]);
        }
        if file == 0 {
            install(&[no_direct()]);
        }
    }
    assert_eq!(from_to(&source.take_fallbacks())[0], ("O_DIRECT", "buffered"));
}

alone!(
    fn o_direct_refused_in_the_middle_by_io_uring() {
        loses_direct_between_two_files(Io::Uring);
    }
);

alone!(
    fn o_direct_refused_in_the_middle_by_threads() {
        loses_direct_between_two_files(Io::Threads);
    }
);

alone!(
    fn populating_refused_reads_instead() {
        let sample = Sample::new();
        let populate = (2, Arg::Is(libc::MADV_POPULATE_READ));
        install(&[Refuse { call: libc::SYS_madvise, errno: libc::EINVAL, only: Some(populate) }]);
        let (fallbacks, _, _) = load_by(&sample, Lane::MAPPED, Io::Auto, || {});
        assert_eq!(from_to(&fallbacks), [("MADV_POPULATE_READ", "pread")]);
    }
);

fn limit(what: libc::__rlimit_resource_t, to: u64) {
    let limit = libc::rlimit { rlim_cur: to, rlim_max: to };
    // SAFETY: reads one rlimit.
    assert_eq!(unsafe { libc::setrlimit(what, &raw const limit) }, 0);
}

fn become_nobody() {
    // SAFETY: plain system calls; this process is the test's own.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setgid(65534), 0);
        assert_eq!(libc::setuid(65534), 0);
    }
}

fn is_root() -> bool {
    // SAFETY: a plain system call.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        eprintln!("skipped: needs to be root to become another user");
    }
    root
}

/// A sample in a place that everybody may read.
fn public_sample() -> Sample {
    let sample = Sample::within(&std::env::temp_dir());
    let folder = sample.path.parent().unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&sample.path, fs::Permissions::from_mode(0o644)).unwrap();
    sample
}

alone!(
    fn no_locked_memory_at_all_still_loads() {
        let sample = public_sample();
        limit(libc::RLIMIT_MEMLOCK, 0);
        if is_root() {
            become_nobody();
        }
        for io in [Io::Uring, Io::Threads] {
            load(&sample, io, || {});
        }
        std::mem::forget(sample);
    }
);

alone!(
    fn somebody_elses_file_is_read_and_its_residency_is_not_made_up() {
        if !is_root() {
            return;
        }
        let sample = public_sample();
        let files = sample.files();
        // A page that the kernel or a process holds at the moment stays. As root its count is exact.
        let gone = (0..100).any(|_| {
            penstock::store::evict(&sample.path, None).unwrap();
            files.resident_ranges(0).unwrap().bytes() == 0
        });
        assert!(gone || files.facts(0).unwrap().kind == penstock::store::FsKind::Memory);
        become_nobody();
        let files = sample.files();
        let memory = files.facts(0).unwrap().kind == penstock::store::FsKind::Memory;
        let cold = files.resident_ranges(0).unwrap();
        if !memory {
            assert!(cold.samples > 0 && cold.samples <= 1024, "{cold:?}");
            assert_eq!(cold.bytes(), 0, "mincore's lie: {cold:?}");
        }
        load(&sample, Io::Auto, || {});
        penstock::store::warm(&sample.path, 2).unwrap();
        assert_eq!(files.resident_ranges(0).unwrap().ranges, [0..SIZE]);
        std::mem::forget(sample);
    }
);

alone!(
    fn a_thousand_shards_load_with_forty_descriptors() {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let paths: Vec<_> = (0..1200).map(|i| folder.path().join(format!("{i}.safetensors"))).collect();
        for (i, path) in paths.iter().enumerate() {
            fs::write(path, [i as u8; 600]).unwrap();
        }
        limit(libc::RLIMIT_NOFILE, 40);
        for (io, lane) in [(Io::Auto, Lane::BUFFERED), (Io::Uring, Lane::DIRECT), (Io::Threads, Lane::DIRECT)] {
            let files = Arc::new(Files::from_paths(&paths).unwrap());
            let routing = Routing { threads: 32, ..Routing::default() };
            let mut source = Router::new(files, io, &Arc::new(routing)).unwrap();
            let mut memories = Vec::new();
            let mut reads = Vec::new();
            for file in 0..1200u32 {
                let memory = Memory::new(PAGE);
                let into = Destination::Memory(memory.at);
                let (ticket, keep) = (Ticket(u64::from(file)), keep(&memory));
                memories.push(memory);
                let len = if lane == Lane::DIRECT { PAGE } else { 600 };
                reads.push(Read {
                    ticket,
                    file,
                    offset: 0,
                    len,
                    need: 600,
                    lane,
                    into,
                    fresh: false,
                    written: 0,
                    keep,
                });
            }
            for done in submit_all(&mut source, reads) {
                done.result.unwrap();
                assert_eq!(memories[done.ticket.0 as usize].bytes()[..600], [done.ticket.0 as u8; 600]);
            }
        }
    }
);

alone!(
    fn no_descriptor_at_all_is_an_error_that_names_the_limit() {
        let sample = Sample::new();
        let mut source = Threads::new(sample.files(), 2, 8).unwrap();
        let (read, _memory) = read(Lane::BUFFERED, 0, &sample, 0, PAGE);
        // One is taken, and less than that poll itself does not accept.
        limit(libc::RLIMIT_NOFILE, 1);
        let done = submit_all(&mut source, vec![read]);
        let e = done[0].result.as_ref().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Limit, "{e}");
        assert!(e.to_string().contains("RLIMIT_NOFILE") && e.path().is_some(), "{e}");
    }
);

/// Memory on which the first touch hangs, in the kernel too, until it is let go.
fn hanging_memory(len: u64) -> Option<(Arc<Memory>, fs::File)> {
    use std::os::fd::FromRawFd;
    const UFFDIO_API: u64 = 0xc018_aa3f;
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    const MISSING: u64 = 1;
    // SAFETY: a plain system call; the descriptor is new.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
    if fd < 0 {
        eprintln!("skipped: no userfaultfd");
        return None;
    }
    let memory = Memory::new(len);
    let mut api = [0xaau64, 0, 0];
    let mut register = [memory.at as u64, len, MISSING, 0];
    // SAFETY: the structures of include/uapi/linux/userfaultfd.h; the memory is a fresh mapping.
    unsafe {
        assert_eq!(libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()), 0);
        assert_eq!(libc::ioctl(fd, UFFDIO_REGISTER, register.as_mut_ptr()), 0);
        Some((memory, fs::File::from_raw_fd(fd)))
    }
}

alone!(
    fn a_read_that_hangs_in_the_kernel_is_left_behind_with_its_memory() {
        let sample = Sample::new();
        let Some((memory, let_go)) = hanging_memory(1 << 20) else { return };
        let mut source = Threads::new(sample.files(), 2, 8).unwrap();
        let (mut hangs, _) = read(Lane::BUFFERED, 0, &sample, 0, 1 << 20);
        hangs.into = Destination::Memory(memory.at);
        hangs.keep = keep(&memory);
        let (other, _other) = read(Lane::BUFFERED, 1, &sample, 0, 1 << 20);
        source.submit(hangs).ok().unwrap();
        source.submit(other).ok().unwrap();
        assert_eq!(wait(&mut source, 1)[0].ticket, Ticket(1));
        assert!(!readable(source.wake(), 100));
        let start = Instant::now();
        drop(source);
        assert!(start.elapsed() < Duration::from_secs(5), "dropping waits for what hangs");
        assert_eq!((quarantined(), Arc::strong_count(&memory)), (1, 2), "left behind, with its memory");
        drop(let_go);
        let until = Instant::now() + Duration::from_secs(20);
        while quarantined() > 0 || Arc::strong_count(&memory) > 1 {
            assert!(Instant::now() < until, "the read has finished but its memory is still held");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
);
