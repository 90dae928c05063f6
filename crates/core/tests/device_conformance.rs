//! What every device must do, run against each of them.
#![allow(clippy::unwrap_used)]

mod device;
mod toy_device;

use device::{alone, collect, noise, open_files_and_threads, whole_slab, Cpu, Gpu, Kind, TestSlab, PATIENCE, SLAB};
use penstock::device::api::Vendor;
use penstock::device::strided::{GridAxis, Strided};
use penstock::device::{Batch, Copied, Copy, Device, Fence};
use penstock::extent::Ticket;
use penstock::{Error, ErrorKind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use toy_device::{pointer, ToyDevice};

#[derive(Debug, Clone)]
struct Piece {
    from: u64,
    len: u64,
    rows: u64,
    from_gap: u64,
    to_gap: u64,
    skip: u64,
    follow: bool,
}

fn piece() -> impl Strategy<Value = Piece> {
    let len = prop_oneof![4 => 1u64..20, 2 => Just(8u64), 2 => 100u64..5000, 1 => 30_000u64..200_000];
    let rows = prop_oneof![4 => Just(1u64), 1 => 2u64..40];
    let skip = prop_oneof![3 => 0u64..64, 2 => Just(0u64), 1 => 200u64..3000];
    (0u64..100_000, len, rows, 0u64..100, prop_oneof![Just(0u64), 0u64..300], skip, any::<bool>()).prop_map(
        |(from, len, rows, from_gap, to_gap, skip, follow)| {
            let (from_gap, to_gap) = if rows == 1 { (0, 0) } else { (from_gap, to_gap) };
            let rows = if len > 20_000 { rows.min(2) } else { rows };
            Piece { from, len, rows, from_gap, to_gap, skip, follow }
        },
    )
}

/// Random batches, several in flight, each slab rewritten as soon as its ticket is back: every byte in its place, nothing
/// else touched but padding, no byte of a slab changed, every ticket once.
fn copies_every_byte_to_its_place<K: Kind>(kind: &K) {
    let batches = prop::collection::vec(prop::collection::vec(piece(), 1..60), 1..12);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let slabs = [kind.slab(), kind.slab(), kind.slab()];
    let device = RefCell::new(kind.device());
    runner
        .run(&batches, |batches| {
            let device = &mut **device.borrow_mut();
            let nbytes: u64 = batches.iter().flatten().map(|p| p.skip + p.rows * (p.len + p.to_gap)).sum::<u64>() + 1;
            let (memory, base) = kind.memory(nbytes as usize);
            let mut expected = kind.bytes(&memory);
            let memory = Arc::new(memory);
            let mut padding = vec![false; nbytes as usize];
            let mut free: Vec<usize> = (0..slabs.len()).collect();
            let (mut running, mut seen, mut at) = (HashMap::<u64, (usize, Vec<u8>)>::new(), Vec::new(), 0u64);
            let mut back = |copied: Copied, running: &mut HashMap<u64, (usize, Vec<u8>)>| {
                copied.result.unwrap();
                seen.push(copied.ticket.0);
                let (slab, content) = running.remove(&copied.ticket.0).expect("a ticket that is in flight");
                assert!(slabs[slab].holds(&content), "a device only reads slabs");
                slab
            };
            for (i, pieces) in batches.iter().enumerate() {
                while free.is_empty() {
                    free.extend(collect(device, 1).into_iter().map(|copied| back(copied, &mut running)));
                }
                let slab = free.pop().unwrap();
                let content = noise(i as u64);
                kind.before_write(&slabs[slab]);
                slabs[slab].fill(&content);
                let (mut copies, mut behind) = (Vec::<Copy>::new(), 0);
                for p in pieces {
                    let from = if p.follow { behind } else { p.from };
                    let from = from.min(SLAB as u64 - p.rows * (p.len + p.from_gap));
                    let pad = if p.skip < 256 { p.skip } else { 0 };
                    match copies.last_mut() {
                        Some(last) if last.to + last.rows * last.to_stride == base + at => {
                            last.pad = pad as u32;
                            padding[at as usize..(at + pad) as usize].fill(true);
                        }
                        _ => {}
                    }
                    at += p.skip;
                    for row in 0..p.rows {
                        let (a, b) = (from + row * (p.len + p.from_gap), at + row * (p.len + p.to_gap));
                        let (a, b, len) = (a as usize, b as usize, p.len as usize);
                        expected[b..b + len].copy_from_slice(&content[a..a + len]);
                    }
                    copies.push(Copy {
                        // SAFETY: within the slab.
                        from: unsafe { slabs[slab].address().add(from as usize) },
                        to: base + at,
                        len: p.len,
                        rows: p.rows,
                        from_stride: p.len + p.from_gap,
                        to_stride: p.len + p.to_gap,
                        block: u32::from(p.skip % 16 == 15),
                        pad: 0,
                    });
                    at += p.rows * (p.len + p.to_gap);
                    behind = from + p.rows * (p.len + p.from_gap);
                }
                running.insert(i as u64, (slab, content));
                let keep = Arc::new((memory.clone(), slabs[slab].clone()));
                let slab = (slabs[slab].address(), SLAB);
                let strided = Default::default();
                device.copy(Batch { ticket: Ticket(i as u64), slab, copies, strided, keep }).unwrap();
            }
            while !running.is_empty() {
                for copied in collect(device, 1) {
                    back(copied, &mut running);
                }
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..batches.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!(device.in_flight(), 0);
            let got = kind.bytes(&memory);
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                if !padding[i] {
                    prop_assert_eq!(got, expected, "byte {}", i);
                }
            }
            Ok(())
        })
        .unwrap();
    drop((device, slabs));
    kind.check();
}

/// A grid of items: bytes of each, the counts of its axes in the order of the slab, the axes in the order of the destination,
/// and which steps are longer than need be, in the slab and there.
#[derive(Debug, Clone)]
struct Lattice {
    item: u64,
    counts: Vec<u64>,
    order: Vec<usize>,
    padding: Vec<[bool; 2]>,
}

fn lattice() -> impl Strategy<Value = Lattice> {
    let counts = prop_oneof![
        2 => prop::collection::vec(1u64..6, 0..=4),
        2 => prop::collection::vec(1u64..200, 2),
        1 => prop::collection::vec(1u64..12, 3),
    ];
    let item = prop_oneof![4 => prop::sample::select(vec![1u64, 2, 4, 8, 12]), 1 => 500u64..1500];
    (item, counts).prop_flat_map(|(item, counts)| {
        // As much as a slab holds, with the padding.
        let counts: Vec<u64> = counts.into_iter().map(|n| if item > 100 { n.min(4) } else { n }).collect();
        let order = Just((0..counts.len()).collect::<Vec<_>>()).prop_shuffle();
        let padding = prop::collection::vec(any::<[bool; 2]>(), counts.len());
        (Just(counts), order, padding).prop_map(move |(counts, order, padding)| Lattice {
            item,
            counts,
            order,
            padding,
        })
    })
}

impl Lattice {
    /// Its axes, outermost first in the slab, that of the bytes last; its bytes in the slab and at the destination.
    fn axes(&self) -> (Vec<GridAxis>, u64, u64) {
        let mut axes: Vec<GridAxis> = self.counts.iter().map(|&count| GridAxis { count, from: 0, to: 0 }).collect();
        let (mut from, mut to) = (self.item, self.item);
        for i in (0..axes.len()).rev() {
            axes[i].from = from + 3 * u64::from(self.padding[i][0]);
            from += (axes[i].count - 1) * axes[i].from;
        }
        for &i in &self.order {
            axes[i].to = to + 5 * u64::from(self.padding[i][1]);
            to += (axes[i].count - 1) * axes[i].to;
        }
        axes.push(GridAxis { count: self.item, from: 1, to: 1 });
        (axes, from, to)
    }
}

/// Calls `give` with how far each step of the axes is from the first one, in the slab and at the destination.
fn each(axes: &[GridAxis], from: u64, to: u64, give: &mut impl FnMut(u64, u64)) {
    let Some((axis, inner)) = axes.split_first() else { return give(from, to) };
    (0..axis.count).for_each(|i| each(inner, from + i * axis.from, to + i * axis.to, give));
}

/// Random grids into strided memory, several batches in flight: every byte in its place, nothing else touched, and no byte
/// of a slab changed.
fn copies_into_strided_memory<K: Kind>(kind: &K) {
    let batches = prop::collection::vec(prop::collection::vec(lattice(), 1..5), 1..6);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let slabs: Vec<_> = (0..6).map(|_| kind.slab()).collect();
    let device = RefCell::new(kind.device());
    runner
        .run(&batches, |batches| {
            let device = &mut **device.borrow_mut();
            let nbytes: u64 = batches.iter().flatten().map(|l| l.axes().2 + 7).sum();
            let (memory, base) = kind.memory(nbytes as usize);
            let mut expected = kind.bytes(&memory);
            let memory = Arc::new(memory);
            let mut at = 0;
            for ((i, lattices), slab) in (0..).zip(&batches).zip(&slabs) {
                let content = noise(i);
                kind.before_write(slab);
                slab.fill(&content);
                let mut strided = Strided::default();
                for lattice in lattices {
                    let (axes, in_slab, there) = lattice.axes();
                    let start = i * 1000 % (SLAB as u64 - in_slab);
                    each(&axes, start, at, &mut |from, to| expected[to as usize] = content[from as usize]);
                    strided.push(0, None, slab.address().wrapping_add(start as usize), base + at, axes.into_iter());
                    at += there + 7;
                }
                let keep = Arc::new((memory.clone(), slab.clone()));
                let (slab, copies) = ((slab.address(), SLAB), Vec::new());
                device.copy(Batch { ticket: Ticket(i), slab, copies, strided, keep }).unwrap();
            }
            collect(device, batches.len()).into_iter().for_each(|copied| copied.result.unwrap());
            let wrong = kind.bytes(&memory).iter().zip(&expected).position(|(a, b)| a != b);
            prop_assert_eq!(wrong, None);
            prop_assert!((0..batches.len() as u64).all(|i| slabs[i as usize].holds(&noise(i))));
            Ok(())
        })
        .unwrap();
    drop((device, slabs));
    kind.check();
}

/// A device dropped with copies pending ends them one way or the other, and lets go of their memory and its threads.
fn drops_with_copies_pending<K: Kind>(kind: &K) {
    let count = Arc::new(AtomicUsize::new(0));
    let slab = kind.slab();
    for round in 0..20 {
        let (memory, base) = kind.memory(16 * SLAB);
        let memory = Arc::new(memory);
        let mut device = kind.device();
        for i in 0..16 {
            let to = base + i * SLAB as u64;
            device.copy(whole_slab(i, &slab, to, &count, memory.clone())).unwrap();
        }
        if round % 2 == 0 {
            collect(&mut *device, round / 4);
        }
        drop(device);
        assert_eq!(count.load(Ordering::SeqCst), 0, "a dropped device holds no memory");
    }
    drop(slab);
    kind.check();
}

/// A ticket is back only after its memory was let go of: an engine that ends a load on the last ticket leaves nothing.
fn a_ticket_back_means_its_memory_is_released<K: Kind>(kind: &K) {
    let count = Arc::new(AtomicUsize::new(0));
    let slab = kind.slab();
    let (memory, base) = kind.memory(SLAB);
    let memory = Arc::new(memory);
    let mut device = kind.device();
    for i in 0..50 {
        device.copy(whole_slab(i, &slab, base, &count, memory.clone())).unwrap();
        assert_eq!(collect(&mut *device, 1).len(), 1);
        assert_eq!(count.load(Ordering::SeqCst), 0);
    }
    drop((device, memory, slab));
    kind.check();
}

fn leaves_no_thread_or_descriptor<K: Kind>(kind: &K) {
    let work = || {
        let slab = kind.slab();
        let (memory, base) = kind.memory(8 * SLAB);
        let memory = Arc::new(memory);
        let mut device = kind.device();
        for i in 0..8 {
            let to = base + i * SLAB as u64;
            device.copy(whole_slab(i, &slab, to, &Arc::default(), memory.clone())).unwrap();
        }
        collect(&mut *device, 8);
    };
    work();
    let before = open_files_and_threads();
    (0..20).for_each(|_| work());
    // The fake driver's own threads end a moment after what they stand for, also those counted before.
    let (files, threads) = before;
    let leaks = || open_files_and_threads().0 > files || open_files_and_threads().1 > threads;
    let start = Instant::now();
    while leaks() && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!leaks(), "{:?} after {before:?}", open_files_and_threads());
    kind.check();
}

/// A child of a fork gets a clear error from its parent's device, and dropping it there does not hang.
fn a_forked_child_is_told<K: Kind>(kind: &K) {
    let slab = kind.slab();
    let (memory, base) = kind.memory(SLAB);
    let memory = Arc::new(memory);
    let mut device = kind.device();
    device.copy(whole_slab(0, &slab, base, &Arc::default(), memory.clone())).unwrap();
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
            collect(&mut *device, 1);
            drop((device, memory, slab));
            kind.check();
        }
    }
}

/// The batches that `abandon` names write nothing, and all others come back.
fn what_has_not_begun_when_it_is_abandoned_never_begins<K: Kind>(kind: &K) {
    const BATCHES: u64 = 40;
    let (slab, count) = (kind.slab(), Arc::default());
    slab.fill(&noise(1));
    let memories: Vec<_> = (0..BATCHES).map(|_| kind.memory(SLAB)).collect();
    let before: Vec<Vec<u8>> = memories.iter().map(|memory| kind.bytes(&memory.0)).collect();
    let memories: Vec<_> = memories.into_iter().map(|(memory, to)| (Arc::new(memory), to)).collect();
    let mut device = kind.device();
    for (ticket, (memory, to)) in (0..).zip(&memories) {
        device.copy(whole_slab(ticket, &slab, *to, &count, memory.clone())).unwrap();
    }
    let never = device.abandon();
    assert_eq!(device.in_flight() + never.len(), BATCHES as usize);
    let mut back = collect(&mut *device, BATCHES as usize - never.len());
    assert!(back.iter().all(|copied| copied.result.is_ok() && !never.contains(&copied.ticket)));
    back.dedup_by_key(|copied| copied.ticket);
    assert_eq!(back.len() + never.len(), BATCHES as usize);
    drop(device);
    for (ticket, ((memory, _), before)) in (0..).zip(memories.iter().zip(&before)) {
        assert_eq!(kind.bytes(memory) == *before, never.contains(&Ticket(ticket)), "batch {ticket}, never {never:?}");
    }
    drop((slab, memories));
    kind.check();
}

macro_rules! suite {
    ($kind:expr, $bytes:ident, $strided:ident, $drop:ident, $release:ident, $leak:ident, $fork:ident, $never:ident) => {
        #[test]
        fn $bytes() {
            copies_every_byte_to_its_place(&$kind);
        }

        #[test]
        fn $strided() {
            copies_into_strided_memory(&$kind);
        }

        #[test]
        fn $drop() {
            drops_with_copies_pending(&$kind);
        }

        #[test]
        fn $release() {
            a_ticket_back_means_its_memory_is_released(&$kind);
        }

        #[test]
        fn $leak() {
            alone(stringify!($leak), || leaves_no_thread_or_descriptor(&$kind));
        }

        #[test]
        fn $fork() {
            alone(stringify!($fork), || a_forked_child_is_told(&$kind));
        }

        #[test]
        fn $never() {
            what_has_not_begun_when_it_is_abandoned_never_begins(&$kind);
        }
    };
}

suite!(
    Cpu,
    cpu_copies_every_byte_to_its_place,
    cpu_copies_into_strided_memory,
    cpu_drops_with_copies_pending,
    cpu_has_released_the_memory_of_a_ticket_that_is_back,
    cpu_leaves_no_thread_or_descriptor,
    cpu_tells_a_forked_child,
    cpu_never_begins_what_is_abandoned
);

suite!(
    Gpu::new(Vendor::Cuda),
    cuda_copies_every_byte_to_its_place,
    cuda_copies_into_strided_memory,
    cuda_drops_with_copies_pending,
    cuda_has_released_the_memory_of_a_ticket_that_is_back,
    cuda_leaves_no_thread_or_descriptor,
    cuda_tells_a_forked_child,
    cuda_never_begins_what_is_abandoned
);

suite!(
    Gpu::new(Vendor::Hip),
    hip_copies_every_byte_to_its_place,
    hip_copies_into_strided_memory,
    hip_drops_with_copies_pending,
    hip_has_released_the_memory_of_a_ticket_that_is_back,
    hip_leaves_no_thread_or_descriptor,
    hip_tells_a_forked_child,
    hip_never_begins_what_is_abandoned
);

suite!(
    Toy,
    toy_copies_every_byte_to_its_place,
    toy_copies_into_strided_memory,
    toy_drops_with_copies_pending,
    toy_has_released_the_memory_of_a_ticket_that_is_back,
    toy_leaves_no_thread_or_descriptor,
    toy_tells_a_forked_child,
    toy_never_begins_what_is_abandoned
);

/// The device of `toy_device`, with memory of the host.
struct Toy;

impl Kind for Toy {
    type Memory = <Cpu as Kind>::Memory;

    fn device(&self) -> Box<dyn Device> {
        Box::new(ToyDevice::new().unwrap())
    }

    fn memory(&self, nbytes: usize) -> (Self::Memory, u64) {
        let (memory, address) = Cpu.memory(nbytes);
        (memory, pointer(address))
    }

    fn bytes(&self, memory: &Self::Memory) -> Vec<u8> {
        Cpu.bytes(memory)
    }

    fn slab(&self) -> Arc<TestSlab> {
        Cpu.slab()
    }

    fn before_write(&self, _: &TestSlab) {}

    fn check(&self) {}
}

#[test]
fn cpu_knows_no_fences() {
    assert_eq!(Cpu.device().wait_for(Fence(1)).unwrap_err().kind(), ErrorKind::Internal);
}
