//! What every device must do, run against each of them.
#![allow(clippy::unwrap_used)]

use penstock::device::cpu::CpuDevice;
use penstock::device::{Batch, Copied, Copy, Device, Fence};
use penstock::source::Ticket;
use penstock::{Error, ErrorKind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Far longer than anything here takes, so that a hang is a failure and a busy machine is not.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a kind of device needs to be tested.
trait Kind {
    type Memory: Any + Send + Sync;
    fn device(&self) -> Box<dyn Device>;
    /// Destination memory of this size, filled with `fill`, and its address.
    fn memory(&self, nbytes: usize, fill: u8) -> (Self::Memory, u64);
    fn bytes(&self, memory: &Self::Memory) -> Vec<u8>;
    /// Bytes between two copies that the device may overwrite with anything.
    fn junk_gap(&self) -> u64;
}

struct Cpu;

impl Kind for Cpu {
    type Memory = Bytes;

    fn device(&self) -> Box<dyn Device> {
        Box::new(CpuDevice::new(3).unwrap())
    }

    fn memory(&self, nbytes: usize, fill: u8) -> (Bytes, u64) {
        let bytes = Bytes(Box::leak(vec![fill; nbytes].into_boxed_slice()));
        let address = bytes.0.cast::<u8>() as u64;
        (bytes, address)
    }

    fn bytes(&self, memory: &Bytes) -> Vec<u8> {
        // SAFETY: no copy is pending when this is called.
        unsafe { (*memory.0).to_vec() }
    }

    fn junk_gap(&self) -> u64 {
        0
    }
}

/// A boxed slice behind a raw pointer, as devices write to it behind Rust's back.
struct Bytes(*mut [u8]);
// SAFETY: plain memory.
unsafe impl Send for Bytes {}
// SAFETY: plain memory.
unsafe impl Sync for Bytes {}
impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: from `Box::leak`, once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Waits by the wake descriptor, never by spinning, until `n` batches are back.
fn collect(device: &mut dyn Device, n: usize) -> Vec<Copied> {
    let (mut done, start) = (Vec::new(), Instant::now());
    while done.len() < n {
        let mut fd = libc::pollfd { fd: device.wake(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&mut fd, 1, PATIENCE.as_millis() as i32) };
        device.poll(&mut done).unwrap();
        assert!(start.elapsed() < PATIENCE, "{} of {n} tickets came back", done.len());
    }
    done
}

#[derive(Debug, Clone)]
struct Piece {
    from: u64,
    len: u64,
    rows: u64,
    from_gap: u64,
    to_gap: u64,
    skip: u64,
}

fn piece() -> impl Strategy<Value = Piece> {
    let len = prop_oneof![4 => 1u64..20, 2 => Just(8u64), 2 => 100u64..5000, 1 => 30_000u64..200_000];
    let rows = prop_oneof![4 => Just(1u64), 1 => 2u64..40];
    let skip = prop_oneof![3 => 0u64..64, 2 => Just(0u64), 1 => 200u64..3000];
    (0u64..100_000, len, rows, 0u64..100, prop_oneof![Just(0u64), 0u64..300], skip).prop_map(
        |(from, len, rows, from_gap, to_gap, skip)| {
            let rows = if len > 20_000 { rows.min(2) } else { rows };
            Piece { from, len, rows, from_gap, to_gap, skip }
        },
    )
}

const SLAB: usize = 1 << 20;

/// Random batches, several in flight, each slab rewritten as soon as its ticket is back: every byte in its place, nothing
/// else touched, every ticket once.
fn copies_every_byte_to_its_place(kind: &impl Kind) {
    let batches = prop::collection::vec(prop::collection::vec(piece(), 1..60), 1..12);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let device = RefCell::new(kind.device());
    let slabs = [kind_slab(), kind_slab(), kind_slab()];
    runner
        .run(&batches, |batches| {
            let device = &mut **device.borrow_mut();
            let nbytes: u64 = batches.iter().flatten().map(|p| p.skip + p.rows * (p.len + p.to_gap)).sum::<u64>() + 64;
            let (memory, base) = kind.memory(nbytes as usize, 0xEE);
            let memory = Arc::new(memory);
            let mut expected = vec![0xEEu8; nbytes as usize];
            let mut wanted = vec![false; nbytes as usize];
            let mut free: Vec<usize> = (0..slabs.len()).collect();
            let (mut running, mut seen, mut at) = (HashMap::new(), Vec::new(), 0u64);
            for (i, pieces) in batches.iter().enumerate() {
                while free.is_empty() {
                    for copied in collect(device, 1) {
                        copied.result.unwrap();
                        seen.push(copied.ticket.0);
                        free.push(running.remove(&copied.ticket.0).expect("a ticket that is in flight"));
                    }
                }
                let slab = free.pop().unwrap();
                let content = noise(i as u64);
                // SAFETY: no copy out of this slab is pending.
                unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), slabs[slab].address(), SLAB) };
                let mut copies = Vec::new();
                for p in pieces {
                    let from = p.from.min(SLAB as u64 - p.rows * (p.len + p.from_gap));
                    at += p.skip;
                    for row in 0..p.rows {
                        let (a, b) = (from + row * (p.len + p.from_gap), at + row * (p.len + p.to_gap));
                        let (a, b, len) = (a as usize, b as usize, p.len as usize);
                        expected[b..b + len].copy_from_slice(&content[a..a + len]);
                        wanted[b..b + len].fill(true);
                    }
                    copies.push(Copy {
                        // SAFETY: within the slab.
                        from: unsafe { slabs[slab].address().add(from as usize) },
                        to: base + at,
                        len: p.len,
                        rows: p.rows,
                        from_stride: p.len + p.from_gap,
                        to_stride: p.len + p.to_gap,
                        block: 0,
                        pad: 0,
                    });
                    at += p.rows * (p.len + p.to_gap);
                }
                running.insert(i as u64, slab);
                let keep = (memory.clone(), slabs[slab].clone());
                let batch = Batch {
                    ticket: Ticket(i as u64),
                    slab: (slabs[slab].address(), SLAB),
                    copies,
                    keep: Arc::new(keep),
                };
                device.copy(batch).unwrap();
            }
            while !running.is_empty() {
                for copied in collect(device, 1) {
                    copied.result.unwrap();
                    seen.push(copied.ticket.0);
                    running.remove(&copied.ticket.0).expect("a ticket that is in flight");
                }
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..batches.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!(device.in_flight(), 0);
            let got = kind.bytes(&memory);
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                if wanted[i] || !near(&wanted, i, kind.junk_gap()) {
                    prop_assert_eq!(got, expected, "byte {}", i);
                }
            }
            Ok(())
        })
        .unwrap();
}

/// Whether byte `i` lies in a gap between two wanted bytes that is shorter than `gap`.
fn near(wanted: &[bool], i: usize, gap: u64) -> bool {
    let before = wanted[..i].iter().rev().take(gap as usize).position(|w| *w);
    let after = wanted[i..].iter().take(gap as usize).position(|w| *w);
    matches!((before, after), (Some(b), Some(a)) if (a + b) as u64 <= gap)
}

fn noise(seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(SLAB);
    while bytes.len() < SLAB {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes
}

struct TestSlab(Bytes);

impl TestSlab {
    fn address(&self) -> *mut u8 {
        self.0 .0.cast()
    }
}

fn kind_slab() -> Arc<TestSlab> {
    Arc::new(TestSlab(Bytes(Box::leak(vec![0u8; SLAB].into_boxed_slice()))))
}

/// Counts how many of its batches still hold their memory.
struct Held(Arc<AtomicUsize>, #[allow(dead_code)] Box<dyn Any + Send + Sync>);
impl Held {
    fn new(count: &Arc<AtomicUsize>, what: impl Any + Send + Sync) -> Arc<Self> {
        count.fetch_add(1, Ordering::SeqCst);
        Arc::new(Self(count.clone(), Box::new(what)))
    }
}
impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn whole_slab(
    ticket: u64,
    slab: &Arc<TestSlab>,
    to: u64,
    count: &Arc<AtomicUsize>,
    memory: Arc<impl Any + Send + Sync>,
) -> Batch {
    Batch {
        ticket: Ticket(ticket),
        slab: (slab.address(), SLAB),
        copies: vec![Copy {
            from: slab.address(),
            to,
            len: SLAB as u64,
            rows: 1,
            from_stride: 0,
            to_stride: 0,
            block: 0,
            pad: 0,
        }],
        keep: Held::new(count, (slab.clone(), memory)),
    }
}

/// A device dropped with copies pending ends them one way or the other, and lets go of their memory and its threads.
fn drops_with_copies_pending(kind: &impl Kind) {
    let count = Arc::new(AtomicUsize::new(0));
    let slab = kind_slab();
    for round in 0..20 {
        let (memory, base) = kind.memory(SLAB, 0);
        let memory = Arc::new(memory);
        let mut device = kind.device();
        for i in 0..16 {
            device.copy(whole_slab(i, &slab, base, &count, memory.clone())).unwrap();
        }
        if round % 2 == 0 {
            collect(&mut *device, round / 4);
        }
        drop(device);
        assert_eq!(count.load(Ordering::SeqCst), 0, "a dropped device holds no memory");
    }
}

/// A ticket is back only after its memory was let go of: an engine that ends a load on the last ticket leaves nothing.
fn a_ticket_back_means_its_memory_is_released(kind: &impl Kind) {
    let count = Arc::new(AtomicUsize::new(0));
    let slab = kind_slab();
    let (memory, base) = kind.memory(SLAB, 0);
    let memory = Arc::new(memory);
    let mut device = kind.device();
    for i in 0..50 {
        device.copy(whole_slab(i, &slab, base, &count, memory.clone())).unwrap();
        assert_eq!(collect(&mut *device, 1).len(), 1);
        assert_eq!(count.load(Ordering::SeqCst), 0);
    }
}

fn open_files_and_threads() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Runs `test` in a process of its own, since counting threads and descriptors needs one, as does forking.
fn alone(name: &str, test: impl FnOnce()) {
    const MARK: &str = "PENSTOCK_TEST_ALONE";
    if std::env::var(MARK).as_deref() == Ok(name) {
        return test();
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(MARK, name)
        .status()
        .unwrap();
    assert!(status.success(), "{name} failed in its own process");
}

fn leaves_no_thread_or_descriptor(kind: &impl Kind) {
    let work = || {
        let slab = kind_slab();
        let (memory, base) = kind.memory(SLAB, 0);
        let memory = Arc::new(memory);
        let mut device = kind.device();
        for i in 0..8 {
            device.copy(whole_slab(i, &slab, base, &Arc::default(), memory.clone())).unwrap();
        }
        collect(&mut *device, 8);
    };
    work();
    let before = open_files_and_threads();
    (0..20).for_each(|_| work());
    assert_eq!(open_files_and_threads(), before);
}

/// A child of a fork gets a clear error from its parent's device, and dropping it there does not hang.
fn a_forked_child_is_told(kind: &impl Kind) {
    let slab = kind_slab();
    let (memory, base) = kind.memory(SLAB, 0);
    let memory = Arc::new(memory);
    let mut device = kind.device();
    device.copy(whole_slab(0, &slab, base, &Arc::default(), memory.clone())).unwrap();
    collect(&mut *device, 1);
    // SAFETY: the child only calls into the device and leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: in the child: a hang becomes a signal.
            unsafe { libc::alarm(20) };
            let refused = |r: Result<(), Error>| matches!(r, Err(e) if e.kind() == ErrorKind::Forked);
            let mut ok = refused(device.copy(whole_slab(1, &slab, base, &Arc::default(), memory)));
            ok &= refused(device.poll(&mut Vec::new()));
            drop(device);
            // SAFETY: always fine.
            unsafe { libc::_exit(if ok { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: our own child.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0, "the child's wait status");
        }
    }
}

#[test]
fn cpu_copies_every_byte_to_its_place() {
    copies_every_byte_to_its_place(&Cpu);
}

#[test]
fn cpu_drops_with_copies_pending() {
    drops_with_copies_pending(&Cpu);
}

#[test]
fn cpu_has_released_the_memory_of_a_ticket_that_is_back() {
    a_ticket_back_means_its_memory_is_released(&Cpu);
}

#[test]
fn cpu_leaves_no_thread_or_descriptor() {
    alone("cpu_leaves_no_thread_or_descriptor", || leaves_no_thread_or_descriptor(&Cpu));
}

#[test]
fn cpu_tells_a_forked_child() {
    alone("cpu_tells_a_forked_child", || a_forked_child_is_told(&Cpu));
}

#[test]
fn cpu_knows_no_fences() {
    assert_eq!(Cpu.device().wait_for(Fence(1)).unwrap_err().kind(), ErrorKind::Internal);
}
