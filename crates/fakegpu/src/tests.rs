//! Each misuse is committed and found; a clean program leaves an empty log.

use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::control::*;
use crate::cuda::{cuGetErrorName, cuMemcpy2DAsync_v2, Memcpy2d};
use crate::exports::*;
use crate::hip::{hipGetErrorName, hipMemcpy2DAsync, hipSetDevice};
use crate::state::lock;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const NON_BLOCKING: u32 = 1;
const LEN: usize = 64 << 10;

/// A program under test: a current context on device 0, and a registered slab.
struct Program {
    slab: Vec<u8>,
    _lock: MutexGuard<'static, ()>,
}

fn ok(code: i32) {
    assert_eq!(code, 0);
}

fn configure(key: &str, value: &str) {
    let (key, value) = (CString::new(key).unwrap(), CString::new(value).unwrap());
    // SAFETY: two C strings.
    ok(unsafe { fakegpu_configure(key.as_ptr(), value.as_ptr()) });
}

impl Program {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(settings: &[(&str, &str)]) -> Self {
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        fakegpu_reset();
        for (key, value) in settings {
            configure(key, value);
        }
        ok(cuInit(0));
        let mut context = 0;
        ok(cuDevicePrimaryCtxRetain(&mut context, 0));
        ok(cuCtxSetCurrent(context));
        let slab: Vec<u8> = (0..LEN).map(|i| (i * 7 + i / 256) as u8).collect();
        ok(cuMemHostRegister_v2(slab.as_ptr() as u64, LEN, 0));
        Self { slab, _lock: guard }
    }

    fn slab(&self) -> u64 {
        self.slab.as_ptr() as u64
    }

    /// Ends the program properly and gives what was logged.
    fn end(self) -> String {
        cuMemHostUnregister(self.slab());
        cuDevicePrimaryCtxRelease_v2(0);
        let state = lock();
        assert_eq!(state.leaks(), "");
        state.log.text()
    }
}

fn stream() -> usize {
    let mut s = 0;
    ok(cuStreamCreate(&mut s, NON_BLOCKING));
    s
}

fn event() -> usize {
    let mut e = 0;
    ok(cuEventCreate(&mut e, 2));
    e
}

fn alloc(bytes: usize) -> u64 {
    let mut p = 0;
    ok(cuMemAlloc_v2(&mut p, bytes));
    p
}

fn bytes(at: u64, len: usize) -> Vec<u8> {
    // SAFETY: device memory of the test.
    unsafe { std::slice::from_raw_parts(at as *const u8, len) }.to_vec()
}

/// The log has exactly one line, of this kind.
fn assert_only(log: &str, kind: &str) {
    assert!(log.lines().count() == 1 && log.starts_with(&format!("{kind}: ")), "wanted one {kind}, got:\n{log}");
}

#[test]
fn a_clean_program_leaves_an_empty_log_and_nothing_behind() {
    let p = Program::start();
    let (s, consumer, done, end, memory) = (stream(), stream(), event(), event(), alloc(LEN));
    assert_eq!(bytes(memory, 4), [0xa5; 4]);
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuEventRecord(done, s));
    ok(cuStreamWaitEvent(consumer, done, 0));
    let sum = crate::stream::fnv(&p.slab);
    ok(fakegpu_launch_check(consumer, memory, LEN as u64, sum, 0));
    ok(cuEventRecord(end, consumer));
    ok(cuEventSynchronize(end));
    ok(cuEventQuery(done));
    assert_eq!(bytes(memory, LEN), p.slab);
    assert_eq!(fakegpu_host_access(memory, LEN as u64, 0), 0);
    for s in [s, consumer] {
        ok(cuStreamDestroy_v2(s));
    }
    for e in [done, end] {
        ok(cuEventDestroy_v2(e));
    }
    ok(cuMemFree_v2(memory));
    assert_eq!(p.end(), "");
}

#[test]
fn what_is_not_given_back_is_named() {
    let p = Program::start();
    let (s, e, memory) = (stream(), event(), alloc(4096));
    let leaks = lock().leaks();
    for what in ["device allocation of 4096", "host registration of 65536", "stream 0x", "event 0x", "retained 1 times"]
    {
        assert!(leaks.contains(what), "{what} is not in\n{leaks}");
    }
    ok(cuStreamDestroy_v2(s));
    ok(cuEventDestroy_v2(e));
    ok(cuMemFree_v2(memory));
    assert_eq!(p.end(), "");
}

#[test]
fn copies_are_asynchronous_and_events_tell_when_they_are_done() {
    let p = Program::start_with(&[("hang_copy", "1")]);
    let (s, e, memory) = (stream(), event(), alloc(LEN));
    ok(cuEventQuery(e));
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuEventRecord(e, s));
    assert_eq!(cuEventQuery(e), 600);
    assert_eq!(bytes(memory, 4), [0xa5; 4]);
    fakegpu_release_hang();
    ok(cuEventSynchronize(e));
    assert_eq!(bytes(memory, LEN), p.slab);
    ok(cuMemFree_v2(memory));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    assert_eq!(p.end(), "");
}

#[test]
fn a_copy_out_of_bounds_is_refused_and_logged() {
    let p = Program::start();
    let (s, memory) = (stream(), alloc(4096));
    assert_eq!(cuMemcpyHtoDAsync_v2(memory + 1, p.slab(), 4096, s), 1);
    assert_eq!(cuMemcpyHtoDAsync_v2(memory - 1, p.slab(), 8, s), 1);
    assert_eq!(lock().log.total(), 2);
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    assert!(p.end().lines().all(|l| l.starts_with("out-of-bounds: cuMemcpyHtoDAsync_v2")));
}

#[test]
fn a_slab_rewritten_before_its_copy_ran_is_found() {
    let mut p = Program::start_with(&[("hang_copy", "1")]);
    let (s, memory) = (stream(), alloc(LEN));
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    p.slab[LEN - 1] ^= 1;
    fakegpu_release_hang();
    ok(cuStreamSynchronize(s));
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "source-modified");
}

#[test]
fn a_slab_rewritten_before_the_host_knew_is_found_whatever_the_timing_if_the_write_is_announced() {
    let p = Program::start();
    let (s, memory, e) = (stream(), alloc(LEN), event());
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuEventRecord(e, s));
    fakegpu_drain();
    assert_eq!(fakegpu_host_access(p.slab() + 10, 1, 0), 0);
    assert_eq!(fakegpu_host_access(p.slab() + 10, 1, 1), 1);
    ok(cuEventQuery(e));
    assert_eq!(fakegpu_host_access(p.slab() + 10, 1, 1), 0);
    ok(cuMemFree_v2(memory));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "unordered-access");
}

#[test]
fn a_great_many_small_copies_are_followed_in_time_and_memory() {
    let p = Program::start();
    let (s, memory, e) = (stream(), alloc(100_000 * 16), event());
    let started = Instant::now();
    for i in 0..100_000 {
        ok(cuMemcpyHtoDAsync_v2(memory + i * 16, p.slab() + i % 4096 * 16, 16, s));
        if i % 1000 == 999 {
            ok(cuEventRecord(e, s));
            ok(cuEventSynchronize(e));
        }
    }
    assert!(lock().host_accesses.len() < 10_000);
    // About 10 µs each on the two busy cores where this was measured: a search that grew with the past would take minutes.
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    ok(cuMemFree_v2(memory));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    assert_eq!(p.end(), "");
}

/// The previous owner's write, so many microseconds late, with and without the fence between its stream and ours.
fn late_write(fence: bool, delay: u64) -> (String, bool) {
    let p = Program::start();
    let (s, memory) = (stream(), alloc(LEN));
    let torch = fakegpu_stream_create(0, 1);
    ok(fakegpu_launch_write(torch, memory, LEN as u64, 0xee, delay));
    let e = event();
    if fence {
        ok(cuEventRecord(e, torch));
        ok(cuStreamWaitEvent(s, e, 0));
    }
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuStreamSynchronize(s));
    ok(fakegpu_stream_synchronize(torch, 0));
    let intact = bytes(memory, LEN) == p.slab;
    ok(cuMemFree_v2(memory));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    ok(fakegpu_stream_destroy(torch));
    (p.end(), intact)
}

#[test]
fn a_copy_not_ordered_after_the_previous_owners_write_is_found() {
    assert_eq!(late_write(true, 30_000), (String::new(), true));
    // It is found whatever the timing. Where the copy comes first, its bytes are lost too; on a busy machine it may not.
    let lost = [30_000, 300_000, 3_000_000].into_iter().any(|delay| {
        let (log, intact) = late_write(false, delay);
        assert!(log.starts_with("unordered-access: "), "{log}");
        !intact
    });
    assert!(lost);
}

#[test]
fn a_missing_fence_is_found_even_when_the_timing_is_harmless() {
    let p = Program::start();
    let (s, memory) = (stream(), alloc(LEN));
    let torch = fakegpu_stream_create(0, 1);
    ok(fakegpu_pending_use(torch, memory, LEN as u64, 0));
    fakegpu_drain();
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuStreamSynchronize(s));
    ok(fakegpu_stream_synchronize(torch, 0));
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "unordered-access");
}

#[test]
fn a_consumer_that_does_not_wait_is_found() {
    let p = Program::start_with(&[("hang_copy", "1")]);
    let (s, memory) = (stream(), alloc(LEN));
    let torch = fakegpu_stream_create(0, 1);
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(fakegpu_launch_check(torch, memory, LEN as u64, crate::stream::fnv(&p.slab), 0));
    assert_eq!(fakegpu_host_access(memory, 1, 0), 1);
    // The consumer looks before the copy runs.
    ok(fakegpu_stream_synchronize(torch, 0));
    fakegpu_release_hang();
    ok(cuStreamSynchronize(s));
    assert_eq!(fakegpu_host_access(memory, 1, 0), 0);
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    let log = p.end();
    let mut kinds: Vec<&str> = log.lines().map(|l| l.split(':').next().unwrap()).collect();
    // The stream may find out before the host does.
    kinds.sort_unstable();
    assert_eq!(kinds, ["unordered-access", "unordered-access", "wrong-bytes"], "{log}");
}

#[test]
fn the_default_stream_orders_blocking_streams_and_no_others() {
    for (non_blocking, misuses) in [(0, 0), (1, 1)] {
        let p = Program::start();
        let memory = alloc(LEN);
        let torch = fakegpu_stream_create(0, non_blocking);
        ok(fakegpu_launch_write(torch, memory, LEN as u64, 0xee, 10_000));
        ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, 0));
        ok(fakegpu_stream_synchronize(torch, 0));
        ok(cuStreamSynchronize(0));
        assert!(misuses == 1 || bytes(memory, LEN) == p.slab);
        ok(cuMemFree_v2(memory));
        assert_eq!(p.end().lines().count(), misuses);
    }
}

#[test]
fn a_free_or_unregister_with_a_copy_pending_is_found() {
    let p = Program::start_with(&[("hang_copy", "1")]);
    let (s, memory) = (stream(), alloc(LEN));
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuMemFree_v2(memory));
    ok(cuMemHostUnregister(p.slab()));
    fakegpu_release_hang();
    ok(cuStreamSynchronize(s));
    ok(cuMemHostRegister_v2(p.slab(), LEN, 0));
    ok(cuStreamDestroy_v2(s));
    let log = p.end();
    let kinds: Vec<&str> = log.lines().map(|l| l.split(':').next().unwrap()).collect();
    assert_eq!(kinds, ["free-with-work-pending", "unregister-with-copies-pending"], "{log}");
}

#[test]
fn handles_used_after_their_end_or_ended_twice_are_found() {
    let p = Program::start();
    let (s, e) = (stream(), event());
    assert_eq!(cuStreamWaitEvent(s, e, 0), 0);
    ok(cuStreamDestroy_v2(s));
    ok(cuEventDestroy_v2(e));
    assert_eq!(cuStreamSynchronize(s), 400);
    assert_eq!(cuEventQuery(e), 400);
    assert_eq!(cuEventQuery(12345), 400);
    assert_eq!(cuStreamDestroy_v2(s), 400);
    assert_eq!(cuEventDestroy_v2(e), 400);
    let log = p.end();
    let kinds: Vec<&str> = log.lines().map(|l| l.split(':').next().unwrap()).collect();
    let wanted = ["unrecorded-event", "dead-handle", "dead-handle", "dead-handle", "double-destroy", "double-destroy"];
    assert_eq!(kinds, wanted, "{log}");
}

#[test]
fn contexts_missing_wrong_unexpected_or_released_are_found() {
    let p = Program::start_with(&[("devices", "2"), ("expect_devices", "1")]);
    let s = stream();
    let mut first = 0;
    ok(cuCtxGetCurrent(&mut first));
    std::thread::spawn(|| assert_eq!(cuMemAlloc_v2(&mut 0, 16), 201)).join().unwrap();
    let mut second = 0;
    ok(cuDevicePrimaryCtxRetain(&mut second, 1));
    ok(cuCtxSetCurrent(second));
    assert_eq!(cuStreamSynchronize(s), 400);
    ok(cuCtxSetCurrent(first));
    ok(cuDevicePrimaryCtxRelease_v2(1));
    assert_eq!(cuDevicePrimaryCtxRelease_v2(1), 201);
    assert_eq!(cuCtxSetCurrent(second), 201);
    ok(cuStreamDestroy_v2(s));
    let log = p.end();
    let kinds: Vec<&str> = log.lines().map(|l| l.split(':').next().unwrap()).collect();
    assert_eq!(
        kinds,
        ["no-context", "context-on-another-device", "wrong-context", "over-release", "no-context"],
        "{log}"
    );
}

#[test]
fn the_last_release_of_a_context_in_use_is_found() {
    let p = Program::start();
    let memory = alloc(16);
    ok(cuDevicePrimaryCtxRelease_v2(0));
    ok(cuDevicePrimaryCtxRetain(&mut 0, 0));
    ok(cuMemFree_v2(memory));
    assert_only(&p.end(), "context-destroyed-in-use");
}

#[test]
fn registrations_that_overlap_or_do_not_exist_are_found() {
    let p = Program::start();
    assert_eq!(cuMemHostRegister_v2(p.slab() + 4096, 4096, 0), 712);
    assert_eq!(cuMemHostUnregister(p.slab() + 4096), 713);
    assert_eq!(cuMemFree_v2(p.slab()), 1);
    let log = p.end();
    let kinds: Vec<&str> = log.lines().map(|l| l.split(':').next().unwrap()).collect();
    assert_eq!(kinds, ["double-register", "bad-unregister", "bad-free"], "{log}");
}

#[test]
fn strict_mode_wants_registered_memory_and_the_other_does_not() {
    for (strict, misuses) in [("0", 0), ("1", 1)] {
        let p = Program::start_with(&[("strict", strict)]);
        let (plain, memory, s) = (vec![3u8; 100], alloc(100), stream());
        ok(cuMemcpyHtoDAsync_v2(memory, plain.as_ptr() as u64, 100, s));
        ok(cuStreamSynchronize(s));
        assert_eq!(bytes(memory, 100), plain);
        ok(cuMemFree_v2(memory));
        ok(cuStreamDestroy_v2(s));
        let log = p.end();
        assert_eq!(log.lines().filter(|l| l.starts_with("unregistered-memory: ")).count(), misuses, "{log}");
    }
}

#[test]
fn a_source_unmapped_before_its_copy_ran_is_found() {
    let p = Program::start_with(&[("hang_copy", "1")]);
    let (s, memory) = (stream(), alloc(LEN));
    let region = crate::memory::Region::map(LEN as u64).unwrap();
    ok(cuMemcpyHtoDAsync_v2(memory, region.start(), LEN, s));
    drop(region);
    fakegpu_release_hang();
    ok(cuStreamSynchronize(s));
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "unmapped");
}

#[test]
fn adopted_memory_is_device_memory_that_cannot_be_freed() {
    let p = Program::start();
    let (torch, s) = (vec![0u8; 8192], stream());
    let at = torch.as_ptr() as u64;
    ok(fakegpu_adopt(at, 8192, 0));
    assert_eq!(fakegpu_adopt(at + 1, 10, 0), -1);
    ok(cuMemcpyHtoDAsync_v2(at, p.slab(), 8192, s));
    assert_eq!(cuMemFree_v2(at), 1);
    ok(fakegpu_disown(at));
    assert_eq!(fakegpu_disown(at), -1);
    assert_eq!(torch, p.slab[..8192]);
    ok(cuStreamSynchronize(s));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "bad-free");
}

#[test]
fn rows_are_copied_both_ways_and_checked_row_by_row() {
    let p = Program::start();
    let (s, memory, mut back) = (stream(), alloc(1000), vec![0u8; 400]);
    let mut c = Memcpy2d {
        src_type: 1,
        src_host: p.slab(),
        src_pitch: 100,
        dst_x: 10,
        dst_type: 2,
        dst_device: memory,
        dst_pitch: 50,
        width: 40,
        height: 10,
        ..Memcpy2d::default()
    };
    // SAFETY: a valid description.
    ok(unsafe { cuMemcpy2DAsync_v2(&c, s) });
    ok(copy_back(back.as_mut_ptr() as u64, memory + 10, s, &c));
    ok(cuStreamSynchronize(s));
    for row in 0..10 {
        assert_eq!(back[row * 40..row * 40 + 40], p.slab[row * 100..row * 100 + 40]);
    }
    assert_eq!(bytes(memory, 10), [0xa5; 10]);
    c.height = 21;
    // SAFETY: a valid description, though of too many rows.
    assert_eq!(unsafe { cuMemcpy2DAsync_v2(&c, s) }, 1);
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "out-of-bounds");
}

/// The way back, described for the CUDA interface.
fn copy_back(to: u64, from: u64, s: usize, there: &Memcpy2d) -> i32 {
    let back = Memcpy2d {
        src_type: 2,
        src_device: from,
        src_pitch: there.dst_pitch,
        dst_type: 1,
        dst_host: to,
        dst_pitch: there.width,
        width: there.width,
        height: there.height,
        ..Memcpy2d::default()
    };
    // SAFETY: a valid description.
    unsafe { cuMemcpy2DAsync_v2(&back, s) }
}

#[test]
fn rows_side_by_side_do_not_conflict_and_the_same_rows_do() {
    let p = Program::start();
    let (left, right, memory) = (stream(), stream(), alloc(1000));
    let columns = |x, s| {
        let c = Memcpy2d {
            src_type: 1,
            src_host: p.slab(),
            src_pitch: 50,
            dst_x: x,
            dst_type: 2,
            dst_device: memory,
            dst_pitch: 100,
            width: 50,
            height: 10,
            ..Memcpy2d::default()
        };
        // SAFETY: a valid description.
        ok(unsafe { cuMemcpy2DAsync_v2(&c, s) });
    };
    columns(0, left);
    columns(50, right);
    assert_eq!(lock().log.total(), 0);
    columns(1, right);
    for s in [left, right] {
        ok(cuStreamSynchronize(s));
        ok(cuStreamDestroy_v2(s));
    }
    ok(cuMemFree_v2(memory));
    assert_only(&p.end(), "unordered-access");
}

#[test]
fn memory_runs_out_where_it_is_set_to() {
    let p = Program::start_with(&[("memory", "10000")]);
    let memory = alloc(8000);
    assert_eq!(cuMemAlloc_v2(&mut 0, 2001), 2);
    let (mut free, mut total) = (0, 0);
    ok(cuMemGetInfo_v2(&mut free, &mut total));
    assert_eq!((free, total), (2000, 10000));
    ok(cuMemFree_v2(memory));
    ok(cuMemFree_v2(alloc(10000)));
    assert_eq!(lock().counters.peak_device_bytes, 10000);
    assert_eq!(p.end(), "");
}

#[test]
fn the_nth_call_fails_as_asked_and_the_next_does_not() {
    let p = Program::start_with(&[("fail", "cuEventCreate:2:999,cuStreamCreate:1:304:2")]);
    let e = event();
    assert_eq!(cuEventCreate(&mut 0, 0), 999);
    ok(cuEventDestroy_v2(event()));
    assert_eq!(cuStreamCreate(&mut 0, 0), 304);
    assert_eq!(cuStreamCreate(&mut 0, 0), 304);
    ok(cuStreamDestroy_v2(stream()));
    ok(cuEventDestroy_v2(e));
    assert_eq!(p.end(), "");
}

#[test]
fn calls_of_all_threads_or_of_one_are_ignored_as_asked() {
    let p = Program::start_with(&[("ignore", "cuEventQuery,cuEventSynchronize@a-name-of-18-bytes")]);
    let unknown = 0xdead;
    ok(cuEventQuery(unknown));
    assert_eq!(cuEventSynchronize(unknown), 400);
    let other = std::thread::Builder::new().name("a-name-of-18-bytes".to_owned());
    let waited = other.spawn(move || cuEventSynchronize(unknown)).expect("a thread").join();
    assert_eq!(waited.expect("no panic"), 0);
    configure("ignore", "");
    assert_eq!(cuEventQuery(unknown), 400);
    assert!(p.end().contains("never existed"));
}

#[test]
fn registration_can_be_refused_or_limited() {
    let p = Program::start_with(&[("register_limit", "70000")]);
    let more = vec![0u8; 10_000];
    assert_eq!(cuMemHostRegister_v2(more.as_ptr() as u64, 10_000, 0), 2);
    configure("refuse_register", "801");
    assert_eq!(cuMemHostRegister_v2(more.as_ptr() as u64, 1000, 0), 801);
    assert_eq!(p.end(), "");
}

#[test]
fn a_broken_context_fails_everything_and_lets_go_of_everything() {
    let p = Program::start_with(&[("sticky", "2:700")]);
    let (s, memory, e) = (stream(), alloc(LEN), event());
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuStreamSynchronize(s));
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    fakegpu_drain();
    assert_eq!(cuEventRecord(e, s), 700);
    assert_eq!(cuStreamSynchronize(s), 700);
    assert_eq!(cuMemAlloc_v2(&mut 0, 1), 700);
    assert_eq!(cuMemFree_v2(memory), 700);
    assert_eq!(cuStreamDestroy_v2(s), 700);
    assert_eq!(cuEventDestroy_v2(e), 700);
    assert_eq!(p.end(), "");
}

#[test]
fn a_copy_hangs_until_it_is_released() {
    let p = Program::start_with(&[("hang_copy", "1")]);
    let (s, memory, e) = (stream(), alloc(LEN), event());
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuEventRecord(e, s));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((cuEventQuery(e), fakegpu_is_idle()), (600, 0));
    fakegpu_release_hang();
    ok(cuEventSynchronize(e));
    assert_eq!(bytes(memory, LEN), p.slab);
    ok(cuMemFree_v2(memory));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    assert_eq!(p.end(), "");
}

#[test]
fn the_link_is_as_slow_as_asked_and_shared_by_the_streams() {
    let p = Program::start_with(&[("h2d_bytes_per_s", "2000000")]);
    let (a, b, memory) = (stream(), stream(), alloc(2 * LEN));
    let started = Instant::now();
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, a));
    ok(cuMemcpyHtoDAsync_v2(memory + LEN as u64, p.slab(), LEN, b));
    for s in [a, b] {
        ok(cuStreamSynchronize(s));
        ok(cuStreamDestroy_v2(s));
    }
    // 131,072 bytes at 2 MB/s take 65.5 ms; only the lower bound is certain on a busy machine.
    assert!(started.elapsed() >= Duration::from_millis(65), "{:?}", started.elapsed());
    ok(cuMemFree_v2(memory));
    assert_eq!(p.end(), "");
}

#[test]
fn a_copy_that_is_to_move_nothing_takes_its_time_all_the_same() {
    let p = Program::start_with(&[("h2d_bytes_per_s", "2000000"), ("move_bytes", "0")]);
    let (s, memory) = (stream(), alloc(LEN));
    let before = bytes(memory, LEN);
    let started = Instant::now();
    ok(cuMemcpyHtoDAsync_v2(memory, p.slab(), LEN, s));
    ok(cuStreamSynchronize(s));
    assert!(started.elapsed() >= Duration::from_millis(32), "{:?}", started.elapsed());
    assert_eq!(bytes(memory, LEN), before);
    ok(cuStreamDestroy_v2(s));
    ok(cuMemFree_v2(memory));
    assert_eq!(p.end(), "");
}

#[test]
fn a_batch_is_copied_and_the_default_stream_refused() {
    let p = Program::start();
    let (s, memory) = (stream(), alloc(300));
    let (to, from, sizes) = ([memory, memory + 200], [p.slab() + 5, p.slab() + 1], [100usize, 50]);
    // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, no hints.
    let attributes: [[i32; 6]; 1] = [[1, 0, 0, 0, 0, 0]];
    let mut failed = 0usize;
    let mut batch = |s| {
        // SAFETY: arrays of two and one.
        unsafe {
            cuMemcpyBatchAsync(
                to.as_ptr(),
                from.as_ptr(),
                sizes.as_ptr(),
                2,
                attributes.as_ptr().cast(),
                [0usize].as_ptr(),
                1,
                &mut failed,
                s,
            )
        }
    };
    ok(batch(s));
    assert_eq!(batch(0), 1);
    assert_eq!(failed, usize::MAX);
    ok(cuStreamSynchronize(s));
    assert_eq!(bytes(memory, 100), p.slab[5..105]);
    assert_eq!(bytes(memory + 200, 50), p.slab[1..51]);
    ok(cuMemFree_v2(memory));
    ok(cuStreamDestroy_v2(s));
    assert_only(&p.end(), "bad-argument");
}

#[test]
fn hip_has_a_current_device_instead_of_a_context() {
    let p = Program::start_with(&[("devices", "2"), ("expect_devices", "1")]);
    let (mut s, mut memory, mut back) = (0, 0, vec![0u8; 64]);
    ok(hipStreamCreateWithFlags(&mut s, NON_BLOCKING));
    ok(hipMalloc(&mut memory, 4096));
    ok(hipMemcpyHtoDAsync(memory, p.slab(), 4096, s));
    ok(hipMemcpy2DAsync(back.as_mut_ptr() as u64, 16, memory, 1024, 16, 4, 2, s));
    ok(hipStreamSynchronize(s));
    for row in 0..4 {
        assert_eq!(back[row * 16..row * 16 + 16], p.slab[row * 1024..row * 1024 + 16]);
    }
    ok(hipFree(memory));
    ok(hipStreamDestroy(s));
    assert_eq!(lock().log.total(), 0);
    ok(hipSetDevice(1));
    assert_eq!(lock().log.total(), 0);
    ok(hipMalloc(&mut memory, 1));
    ok(hipFree(memory));
    ok(hipSetDevice(0));
    assert_only(&p.end(), "context-on-another-device");
}

#[test]
fn errors_have_the_vendors_names() {
    let mut name = std::ptr::null();
    // SAFETY: a valid out parameter, and what it gets is a C string.
    unsafe {
        ok(cuGetErrorName(2, &mut name));
        assert_eq!(std::ffi::CStr::from_ptr(name), c"CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(cuGetErrorName(12345, &mut name), 1);
        assert!(name.is_null());
        assert_eq!(std::ffi::CStr::from_ptr(hipGetErrorName(2)), c"hipErrorOutOfMemory");
    }
}

#[test]
fn nothing_works_before_the_start_or_without_a_device() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    fakegpu_reset();
    assert_eq!(cuDeviceGetCount(&mut 0), 3);
    assert_eq!(lock().log.total(), 1);
    // SAFETY: two C strings.
    ok(unsafe { fakegpu_configure(c"devices".as_ptr(), c"0".as_ptr()) });
    assert_eq!(cuInit(0), 100);
    // SAFETY: as above.
    assert_eq!(unsafe { fakegpu_configure(c"devices".as_ptr(), c"many".as_ptr()) }, -1);
    fakegpu_reset();
}

#[test]
fn events_are_waited_for_and_destroyed_in_a_context_only() {
    let program = Program::start();
    let (s, e) = (stream(), event());
    ok(cuEventRecord(e, s));
    std::thread::spawn(move || {
        // cuda.h lists CUDA_ERROR_INVALID_CONTEXT for these two, and not for cuEventQuery.
        assert_eq!((cuEventSynchronize(e), cuEventDestroy_v2(e)), (201, 201));
        assert!([0, 600].contains(&cuEventQuery(e)));
    })
    .join()
    .unwrap();
    ok(cuEventSynchronize(e));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    let log = program.end();
    let kinds: Vec<&str> = log.lines().map(|l| l.split(':').next().unwrap()).collect();
    assert_eq!(kinds, ["no-context", "no-context"], "{log}");
}

#[test]
fn a_call_costs_what_is_asked_by_call_and_by_mib() {
    let program = Program::start();
    let took = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        call();
        start.elapsed()
    };
    let memory = vec![0u8; 4 << 20];
    configure("cost", "cuMemHostRegister_v2:1000:5000,cuMemHostUnregister:30000,cuMemAlloc_v2:0:20000");
    let registering = took(&mut || ok(cuMemHostRegister_v2(memory.as_ptr() as u64, memory.len(), 0)));
    assert!(registering >= Duration::from_millis(21), "{registering:?}");
    let unregistering = took(&mut || ok(cuMemHostUnregister(memory.as_ptr() as u64)));
    assert!(unregistering >= Duration::from_millis(30), "{unregistering:?}");
    let mut pointer = 0;
    let allocating = took(&mut || ok(cuMemAlloc_v2(&mut pointer, 2 << 20)));
    assert!(allocating >= Duration::from_millis(40), "{allocating:?}");
    ok(cuMemFree_v2(pointer));
    configure("cost", "");
    assert_eq!(program.end(), "");
}

#[test]
fn a_copy_costs_its_caller_and_a_wait_costs_its_waking_up() {
    let program = Program::start_with(&[("copy_delay_us", "20000")]);
    let (s, e, memory, to) = (stream(), event(), vec![0u8; 4096], alloc(4096));
    ok(cuMemHostRegister_v2(memory.as_ptr() as u64, 4096, 0));
    configure("cost", "cuMemcpyHtoDAsync_v2:5000,cuEventSynchronize:30000");
    let start = Instant::now();
    ok(cuMemcpyHtoDAsync_v2(to, memory.as_ptr() as u64, 4096, s));
    let submitted = start.elapsed();
    assert!(submitted >= Duration::from_millis(5), "{submitted:?}");
    ok(cuEventRecord(e, s));
    ok(cuEventSynchronize(e));
    // The copy, and the waking up after it: not at once.
    assert!(start.elapsed() >= Duration::from_millis(50), "{:?}", start.elapsed());
    configure("cost", "");
    ok(cuMemHostUnregister(memory.as_ptr() as u64));
    ok(cuEventDestroy_v2(e));
    ok(cuStreamDestroy_v2(s));
    ok(cuMemFree_v2(to));
    assert_eq!(program.end(), "");
}

#[test]
fn a_registration_that_is_not_portable_holds_for_its_own_context() {
    let program = Program::start_with(&[("devices", "2"), ("strict", "1")]);
    let portable = vec![0u8; 8192];
    ok(cuMemHostRegister_v2(portable.as_ptr() as u64, 8192, 1));
    let (mut first, mut second) = (0, 0);
    ok(cuCtxGetCurrent(&mut first));
    ok(cuDevicePrimaryCtxRetain(&mut second, 1));
    ok(cuCtxSetCurrent(second));
    let (s, to) = (stream(), alloc(8192));
    ok(cuMemcpyHtoDAsync_v2(to, portable.as_ptr() as u64, 8192, s));
    assert_eq!(lock().log.text(), "");
    ok(cuMemcpyHtoDAsync_v2(to, program.slab(), 8192, s));
    ok(cuStreamSynchronize(s));
    ok(cuMemFree_v2(to));
    ok(cuStreamDestroy_v2(s));
    ok(cuDevicePrimaryCtxRelease_v2(1));
    ok(cuCtxSetCurrent(first));
    ok(cuMemHostUnregister(portable.as_ptr() as u64));
    assert_only(&program.end(), "unregistered-memory");
}

#[test]
fn a_context_that_ends_with_registrations_made_in_it_is_found() {
    let program = Program::start();
    ok(cuDevicePrimaryCtxRelease_v2(0));
    assert_only(&lock().log.text(), "context-destroyed-in-use");
    let mut context = 0;
    ok(cuDevicePrimaryCtxRetain(&mut context, 0));
    program.end();
}

#[test]
fn hip_registers_twice_without_a_word_and_waits_for_all_streams_before_it_lets_go() {
    let program = Program::start_with(&[("copy_delay_us", "50000")]);
    ok(hipSetDevice(0));
    let memory = vec![0u8; 8192];
    let at = memory.as_ptr() as u64;
    ok(hipHostRegister(at, 8192, 0));
    ok(hipHostRegister(at, 8192, 0));
    let mut to = 0;
    ok(hipMalloc(&mut to, 8192));
    let mut s = 0;
    ok(hipStreamCreateWithFlags(&mut s, NON_BLOCKING));
    ok(hipMemcpyHtoDAsync(to, program.slab(), 8192, s));
    ok(hipHostUnregister(at));
    assert_eq!(fakegpu_is_idle(), 1, "it returned before the copy had ended");
    ok(hipStreamSynchronize(s));
    ok(hipFree(to));
    ok(hipStreamDestroy(s));
    assert_only(&program.end(), "double-register");
}

#[test]
fn an_unsafe_call_breaks_the_capture_of_another_thread_unless_its_thread_is_relaxed() {
    let program = Program::start();
    let s = stream();
    let mut context = 0;
    ok(cuCtxGetCurrent(&mut context));
    let elsewhere = |mode: i32| {
        std::thread::spawn(move || {
            ok(cuCtxSetCurrent(context));
            let mut exchanged = mode;
            ok(cuThreadExchangeStreamCaptureMode(&mut exchanged));
            assert_eq!(exchanged, 0, "every thread begins in global mode");
            let mut pointer = 0;
            let code = cuMemAlloc_v2(&mut pointer, 100);
            if code == 0 {
                ok(cuMemFree_v2(pointer));
            }
            code
        })
        .join()
        .unwrap()
    };
    let (mut graph, mut status) = (0, 0);
    for (capture, thread, refused) in [(0, 2, 0), (0, 1, 0), (1, 0, 0), (2, 0, 0), (0, 0, 900)] {
        ok(cuStreamBeginCapture_v2(s, capture));
        assert_eq!(elsewhere(thread), refused, "captured in mode {capture}, the thread in mode {thread}");
        ok(cuStreamIsCapturing(s, &mut status));
        assert_eq!(status, if refused == 0 { 1 } else { 2 });
        assert_eq!(cuStreamEndCapture(s, &mut graph), if refused == 0 { 0 } else { 901 });
    }
    ok(cuStreamDestroy_v2(s));
    assert_only(&program.end(), "capture-broken");
}

#[test]
fn a_copy_of_the_library_can_lack_functions() {
    let folder = std::env::temp_dir().join(format!("fakegpu-without-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("libfakegpu.so");
    crate::without(&["cuMemcpyBatchAsync"], &path).unwrap();
    assert!(crate::without(&["cuNothing"], &folder.join("none")).is_err());
    let library = crate::Library::open_at(&path).unwrap();
    assert_eq!(library.misuse_count(), 0);
    let there = |name: &std::ffi::CStr| {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a library that is loaded already, and a C string.
        unsafe { !libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()).is_null() }
    };
    assert!(there(c"cuMemcpyHtoDAsync_v2") && !there(c"cuMemcpyBatchAsync"));
    std::fs::remove_dir_all(&folder).unwrap();
}
