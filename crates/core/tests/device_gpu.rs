//! What is special about accelerators: fences, registrations, contexts, failures. The tests use the fake driver, which
//! logs misuse. Every check that keeps the log empty has a counterpart that fills it.
#![allow(clippy::unwrap_used)]

mod device;

use device::{
    adopted_slab, alone, collect, dense, noise, shared_slab, whole_slab, Gpu, Held, Kind, TestSlab, NOTHING,
    REGISTRATIONS, SLAB, WAITS_FOR_COPIES, WAITS_FOR_FENCES, WAITS_FOR_SCRATCH,
};
use penstock::device::api::{Api, Stream, Vendor};
use penstock::device::cast::Cast;
use penstock::device::gpu::{release_staging, GpuDevice, GpuMemory, SharedContext};
use penstock::device::strided::{GridAxis, Strided};
use penstock::device::{Batch, Copied, Copy, Device, Fence};
use penstock::extent::Ticket;
use penstock::staging::Ring;
use penstock::{DType, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn cuda() -> Gpu {
    Gpu::new(Vendor::Cuda)
}

fn batch(ticket: u64, slab: &Arc<TestSlab>, copies: Vec<Copy>, memory: &Arc<GpuMemory>) -> Batch {
    let keep = Arc::new((slab.clone(), memory.clone()));
    Batch { ticket: Ticket(ticket), slab: (slab.address(), SLAB), copies, strided: Default::default(), keep }
}

/// Every kind of transfer: large, many small at other distances, wide rows, narrow rows.
fn every_kind(slab: &TestSlab, to: u64) -> Vec<Copy> {
    let from = |offset: usize| slab.address().wrapping_add(offset);
    let mut copies = vec![dense(from(0), to, 100_000)];
    copies.extend(
        (0..50).map(|i| Copy { pad: 156, ..dense(from(100_000 + i * 100), to + 100_096 + i as u64 * 256, 100) }),
    );
    copies.push(Copy { rows: 20, from_stride: 2000, ..dense(from(200_000), to + 200_192, 1000) });
    copies.push(Copy { rows: 20, from_stride: 2000, ..dense(from(300_000), to + 300_032, 10) });
    copies
}

fn run(gpu: &Gpu, n: u64, wait: Option<Fence>) -> (Vec<Copied>, Duration) {
    let (memory, to) = gpu.memory(SLAB);
    let (slab, memory) = (gpu.slab(), Arc::new(memory));
    let mut device = gpu.gpu();
    if let Some(fence) = wait {
        device.wait_for(fence).unwrap();
    }
    for i in 0..n {
        device.copy(batch(i, &slab, every_kind(&slab, to), &memory)).unwrap();
    }
    let start = Instant::now();
    (collect(&mut device, n as usize), start.elapsed())
}

fn misuses_of(gpu: Gpu) -> String {
    release_staging();
    gpu.fake.misuses().join("\n")
}

#[test]
fn an_event_of_the_allocating_stream_is_waited_for() {
    fn load_into_memory_still_in_use(skip_fences: bool) -> String {
        let gpu = cuda();
        gpu.fake.configure("ignore", if skip_fences { WAITS_FOR_FENCES } else { NOTHING });
        let (memory, to) = gpu.memory(SLAB);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let content = noise(1);
        slab.fill(&content);
        // What a caching allocator does: the memory's last user is still queued on the stream that allocates it.
        let stream = gpu.fake.stream_create(0, 1);
        assert_eq!(gpu.fake.launch_write(stream, to, SLAB as u64, 0x55, 30_000), 0);
        let context = gpu.api.context(0).unwrap();
        let current = context.enter().unwrap();
        let event = current.create_event().unwrap();
        // SAFETY: live handles.
        unsafe { current.record(event, Stream(stream)) }.unwrap();
        let mut device = gpu.gpu();
        device.wait_for(Fence(event.0 as u64)).unwrap();
        device.copy(batch(0, &slab, vec![dense(slab.address(), to, SLAB as u64)], &memory)).unwrap();
        collect(&mut device, 1).remove(0).result.unwrap();
        if !skip_fences {
            assert!(gpu.bytes(&memory) == content);
        }
        drop(device);
        gpu.fake.drain();
        // SAFETY: nobody waits for it any more.
        unsafe { current.destroy_event(event) }.unwrap();
        gpu.fake.stream_synchronize(stream, 0);
        gpu.fake.stream_destroy(stream);
        drop((memory, slab, current));
        drop(context);
        misuses_of(gpu)
    }
    assert_eq!(load_into_memory_still_in_use(false), "");
    assert!(load_into_memory_still_in_use(true).contains("unordered-access"));
}

#[test]
fn a_ticket_comes_back_only_after_the_copy() {
    fn rewrite_slabs_and_read_memory(skip_event_wait: bool) -> String {
        let gpu = cuda();
        gpu.fake.configure("ignore", if skip_event_wait { WAITS_FOR_COPIES } else { NOTHING });
        gpu.fake.configure("copy_delay_us", "5000");
        let (memory, to) = gpu.memory(SLAB);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let mut device = gpu.gpu();
        for i in 0..5 {
            gpu.before_write(&slab);
            slab.fill(&noise(i));
            device.copy(batch(i, &slab, vec![dense(slab.address(), to, SLAB as u64)], &memory)).unwrap();
            collect(&mut device, 1).remove(0).result.unwrap();
        }
        gpu.bytes(&memory);
        gpu.fake.drain();
        drop((device, memory, slab));
        misuses_of(gpu)
    }
    assert_eq!(rewrite_slabs_and_read_memory(false), "");
    let log = rewrite_slabs_and_read_memory(true);
    assert!(log.contains("unordered-access: the host writes"), "the slab: {log}");
    assert!(log.contains("unordered-access: the host reads"), "the block: {log}");
}

#[test]
fn copies_are_made_from_registered_memory_only() {
    fn load(skip_registration: bool) -> String {
        let gpu = cuda();
        gpu.fake.configure("ignore", if skip_registration { REGISTRATIONS } else { NOTHING });
        run(&gpu, 3, None);
        misuses_of(gpu)
    }
    assert_eq!(load(false), "");
    assert!(load(true).contains("unregistered-memory"));
}

#[test]
fn scratch_memory_is_refilled_only_after_it_has_travelled() {
    fn load_small_tensors(skip_scratch_wait: bool) -> (String, bool) {
        let gpu = cuda();
        gpu.fake.configure("ignore", if skip_scratch_wait { WAITS_FOR_SCRATCH } else { NOTHING });
        // Long enough that a half is refilled before it has travelled, however busy the machine.
        gpu.fake.configure("copy_delay_us", if skip_scratch_wait { "200000" } else { "2000" });
        let (n, size, step) = (8000u64, 100, 1024);
        let (memory, to) = gpu.memory((n * step) as usize);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let content = noise(7);
        slab.fill(&content);
        let small = |i: u64| Copy {
            pad: (step - size) as u32,
            ..dense(slab.address().wrapping_add((i * size) as usize), to + i * step, size)
        };
        let mut device = gpu.gpu();
        device.copy(batch(0, &slab, (0..n).map(small).collect(), &memory)).unwrap();
        collect(&mut device, 1).remove(0).result.unwrap();
        let got = gpu.bytes(&memory);
        let right = (0..n).all(|i| {
            let (at, from) = ((i * step) as usize, (i * size) as usize);
            got[at..at + size as usize] == content[from..from + size as usize]
        });
        assert!(gpu.fake.counter("copies") <= 10, "{} copies", gpu.fake.counter("copies"));
        drop((device, memory, slab));
        (misuses_of(gpu), right)
    }
    assert_eq!(load_small_tensors(false), (String::new(), true));
    assert!(load_small_tensors(true).0.contains("source-modified"));
}

/// A matrix of `rows` times `columns` elements of two bytes, which fill the slab, into columns and rows.
fn turned(slab: &TestSlab, to: u64, (rows, columns): (u64, u64)) -> Strided {
    let mut strided = Strided::default();
    let axes = [(rows, 2 * columns, 2), (columns, 2, 2 * rows), (2, 1, 1)];
    let axes = axes.into_iter().map(|(count, from, to)| GridAxis { count, from, to });
    strided.push(0, None, slab.address(), to, axes);
    strided
}

#[test]
fn scratch_memory_of_strided_copies_is_refilled_only_after_it_has_travelled() {
    fn transposed(skip_scratch_wait: bool) -> (String, bool) {
        let gpu = cuda();
        gpu.fake.configure("ignore", if skip_scratch_wait { WAITS_FOR_SCRATCH } else { NOTHING });
        // Long enough that a half is refilled before it has travelled, however busy the machine.
        gpu.fake.configure("copy_delay_us", if skip_scratch_wait { "200000" } else { "2000" });
        let (memory, to) = gpu.memory(4 * SLAB);
        let (slabs, memory) = ([0; 4].map(|_| gpu.slab()), Arc::new(memory));
        let (rows, columns) = (512, SLAB as u64 / 1024);
        let mut device = gpu.gpu();
        for (i, slab) in (0..).zip(&slabs) {
            slab.fill(&noise(i));
            let strided = turned(slab, to + i * SLAB as u64, (rows, columns));
            device.copy(Batch { strided, ..batch(i, slab, Vec::new(), &memory) }).unwrap();
        }
        collect(&mut device, 4).into_iter().for_each(|copied| copied.result.unwrap());
        let got = gpu.bytes(&memory);
        let right = (0..4).all(|i| {
            let (content, got) = (noise(i as u64), &got[i * SLAB..(i + 1) * SLAB]);
            (0..SLAB / 2).all(|n| {
                let (row, column) = (n / columns as usize, n % columns as usize);
                got[2 * (column * rows as usize + row)..][..2] == content[2 * n..][..2]
            })
        });
        // No gaps at the destination: the scratch memory is full with one range.
        assert_eq!((gpu.fake.counter("copies"), gpu.fake.counter("calls.cuMemcpy2DAsync_v2")), (4, 0));
        drop((device, memory, slabs));
        (misuses_of(gpu), right)
    }
    assert_eq!(transposed(false), (String::new(), true));
    assert!(transposed(true).0.contains("source-modified"));
}

#[test]
fn strided_copies_that_leave_the_memory_are_noticed() {
    for rows in [512, 700] {
        let gpu = cuda();
        let (memory, to) = gpu.memory(SLAB);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let mut device = gpu.gpu();
        // Rows of a kibibyte, two kibibytes apart: half a mebibyte of them fits.
        let mut strided = Strided::default();
        let axes = [(rows, 1024, 2048), (1024, 1, 1)].map(|(count, from, to)| GridAxis { count, from, to });
        strided.push(0, None, slab.address(), to, axes.into_iter());
        device.copy(Batch { strided, ..batch(0, &slab, Vec::new(), &memory) }).unwrap();
        let result = collect(&mut device, 1).remove(0).result;
        assert_eq!(result.is_ok(), rows == 512, "{result:?}");
        drop((device, slab, memory));
        let log = misuses_of(gpu);
        assert_eq!(log.contains("out-of-bounds"), rows != 512, "{log}");
    }
}

#[test]
fn elements_are_not_converted_on_the_way_to_a_gpu() {
    let gpu = cuda();
    let (memory, to) = gpu.memory(SLAB);
    let (slab, memory) = (gpu.slab(), Arc::new(memory));
    let mut device = gpu.gpu();
    let mut strided = Strided::default();
    let axes = [GridAxis { count: 100, from: 4, to: 2 }];
    strided.push(0, Cast::new(DType::F32, DType::BF16), slab.address(), to, axes.into_iter());
    let refused = device.copy(Batch { strided, ..batch(0, &slab, Vec::new(), &memory) });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Internal);
    drop((device, slab, memory));
    gpu.check();
}

#[test]
fn a_dense_extent_is_one_copy_and_one_event() {
    let gpu = cuda();
    let (memory, to) = gpu.memory(SLAB);
    let (slab, memory) = (gpu.slab(), Arc::new(memory));
    let mut device = gpu.gpu();
    for i in 0..10 {
        let copies =
            (0..100).map(|i| dense(slab.address().wrapping_add(i * 1024), to + i as u64 * 1024, 1024)).collect();
        device.copy(batch(i, &slab, copies, &memory)).unwrap();
    }
    collect(&mut device, 10);
    assert_eq!(gpu.fake.counter("copies"), 10);
    assert_eq!(gpu.fake.counter("calls.cuEventSynchronize"), 10);
    drop((device, slab, memory));
    gpu.check();
}

#[test]
fn a_slab_is_registered_once_for_all_loads_and_the_context_is_made_once_on_that_device_alone() {
    let gpu = cuda();
    gpu.fake.configure("devices", "4");
    gpu.fake.configure("expect_devices", "1");
    for _ in 0..3 {
        let (memory, to) = gpu.memory(SLAB);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let mut device = gpu.gpu();
        (0..4).for_each(|i| device.copy(whole_slab(i, &slab, to, &Arc::default(), memory.clone())).unwrap());
        collect(&mut device, 4).into_iter().for_each(|c| c.result.unwrap());
    }
    assert_eq!(gpu.fake.counter("calls.cuMemHostRegister_v2"), 1);
    assert_eq!(gpu.fake.counter("calls.cuDevicePrimaryCtxRetain"), 1);
    assert_eq!(gpu.fake.counter("contexts_made"), 1);
    gpu.check();
}

#[test]
fn a_neighbours_slab_is_registered_once_for_all_loads_until_a_trim() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        let gpu = Gpu::new(vendor);
        let content = noise(5);
        let (file, owners) = shared_slab(&content);
        let mut address = None;
        for _ in 0..2 {
            let (memory, to) = gpu.memory(SLAB);
            let (slab, memory) = (adopted_slab(file.try_clone().unwrap()), Arc::new(memory));
            assert_eq!(*address.get_or_insert(slab.address()), slab.address());
            let mut device = gpu.gpu();
            (0..2).for_each(|i| device.copy(whole_slab(i, &slab, to, &Arc::default(), memory.clone())).unwrap());
            collect(&mut device, 2).into_iter().for_each(|c| c.result.unwrap());
            assert!(device.fallbacks().is_empty() && slab.holds(&content) && gpu.bytes(&memory) == content);
        }
        assert_eq!(gpu.fake.counter("registered_bytes"), SLAB as u64);
        assert_eq!(gpu.fake.counter("peak_registered_bytes"), SLAB as u64);
        assert_eq!(Ring::process().staging().borrowed, SLAB as u64);
        assert!(release_staging() >= SLAB as u64);
        assert_eq!((gpu.fake.counter("registered_bytes"), Ring::process().staging().borrowed), (0, 0));
        drop((file, owners));
        gpu.check();
    }
}

#[test]
fn a_neighbours_slab_that_is_not_registered_does_not_keep_others_from_being_so() {
    let gpu = cuda();
    gpu.fake.configure("strict", "0");
    let content = noise(5);
    let (file, owners) = shared_slab(&content);
    let (memory, to) = gpu.memory(SLAB);
    let (slab, own, memory) = (adopted_slab(file.try_clone().unwrap()), gpu.slab(), Arc::new(memory));
    own.fill(&content);
    let mut device = gpu.gpu();
    gpu.fake.configure("refuse_register", "801");
    (0..2).for_each(|i| device.copy(whole_slab(i, &slab, to, &Arc::default(), memory.clone())).unwrap());
    collect(&mut device, 2).into_iter().for_each(|c| c.result.unwrap());
    let fallbacks = device.fallbacks();
    let told: Vec<_> = fallbacks.iter().map(|fallback| (fallback.from, fallback.to)).collect();
    assert_eq!(told, [("shared slabs", "sockets")]);
    assert!(fallbacks[0].reason.contains("801"), "{fallbacks:?}");
    assert_eq!(gpu.fake.counter("calls.cuMemHostRegister_v2"), 1, "asked once");
    gpu.fake.configure("refuse_register", "0");
    device.copy(whole_slab(2, &own, to, &Arc::default(), memory.clone())).unwrap();
    collect(&mut device, 1).into_iter().for_each(|c| c.result.unwrap());
    assert_eq!(gpu.fake.counter("registered_bytes"), SLAB as u64, "this process' own");
    assert!(gpu.bytes(&memory) == content);
    drop((device, slab, own, memory, file, owners));
    release_staging();
    gpu.check();
}

#[test]
fn a_refused_registration_falls_back_to_plain_memory_and_is_reported() {
    for code in ["801", "712", "1", "2"] {
        let gpu = cuda();
        gpu.fake.configure("strict", "0");
        gpu.fake.configure("refuse_register", code);
        let (memory, to) = gpu.memory(SLAB);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let content = noise(3);
        slab.fill(&content);
        let mut device = gpu.gpu();
        for i in 0..3 {
            device.copy(batch(i, &slab, every_kind(&slab, to), &memory)).unwrap();
        }
        collect(&mut device, 3).into_iter().for_each(|c| c.result.unwrap());
        let fallbacks = device.fallbacks();
        assert_eq!(fallbacks.len(), 1, "{fallbacks:?}");
        assert!(fallbacks[0].reason.contains(code), "{fallbacks:?}");
        assert_eq!(gpu.fake.counter("calls.cuMemHostRegister_v2"), 1, "asked once, not for every slab");
        assert!(gpu.bytes(&memory)[..100_000] == content[..100_000]);
        drop((device, slab, memory));
        gpu.check();
    }
}

/// Each driver call that a load makes, failing the first time or later: every batch comes back once, with the driver's
/// words, and nothing is left.
#[test]
fn whatever_call_fails_every_ticket_comes_back_with_a_typed_error_and_nothing_is_left() {
    /// The function, which call of it fails, and the first batch that has to come back with the error.
    const CALLS: &[(&str, u64, usize)] = &[
        ("cuInit", 1, 0),
        ("cuDeviceGetCount", 1, 0),
        ("cuDeviceGet", 1, 0),
        ("cuDevicePrimaryCtxRetain", 1, 0),
        ("cuCtxGetCurrent", 1, 0),
        ("cuCtxSetCurrent", 1, 0),
        ("cuStreamCreate", 1, 0),
        ("cuStreamWaitEvent", 1, 0),
        ("cuMemcpyHtoDAsync_v2", 1, 0),
        ("cuMemcpyHtoDAsync_v2", 2, 0),
        ("cuMemcpyHtoDAsync_v2", 8, 2),
        ("cuMemcpy2DAsync_v2", 2, 1),
        ("cuEventCreate", 1, 0),
        ("cuEventRecord", 1, 0),
        ("cuEventRecord", 3, 2),
        ("cuEventSynchronize", 1, 0),
        ("cuEventSynchronize", 4, 3),
    ];
    for (call, nth, first) in CALLS {
        let gpu = cuda();
        gpu.fake.configure("copy_delay_us", "500");
        let context = gpu.context();
        let memory = Arc::new(GpuMemory::new(&context, SLAB as u64).unwrap());
        let raw = gpu.api.context(0).unwrap();
        let current = raw.enter().unwrap();
        let event = current.create_event().unwrap();
        let stream = gpu.fake.stream_create(0, 1);
        // SAFETY: live handles.
        unsafe { current.record(event, Stream(stream)) }.unwrap();
        // If the context has to fail, the device must make it itself.
        let before_the_context = CALLS.iter().position(|c| c == &(*call, *nth, *first)).unwrap() < 4;
        let slab = gpu.slab();
        let (memory, to) = if before_the_context {
            // SAFETY: as above.
            unsafe { current.destroy_event(event) }.unwrap();
            drop(memory);
            (None, 0)
        } else {
            let to = memory.address();
            (Some(memory), to)
        };
        drop(context);
        gpu.fake.configure("fail", &format!("{call}:{nth}:999"));
        let mut device = gpu.gpu();
        if memory.is_some() {
            device.wait_for(Fence(event.0 as u64)).unwrap();
        }
        for i in 0..6 {
            let keep = Arc::new((slab.clone(), memory.clone()));
            let copies = every_kind(&slab, to);
            device
                .copy(Batch {
                    ticket: Ticket(i),
                    slab: (slab.address(), SLAB),
                    copies,
                    strided: Default::default(),
                    keep,
                })
                .unwrap();
        }
        let mut done = collect(&mut device, 6);
        assert_eq!(device.in_flight(), 0);
        done.sort_by_key(|c| c.ticket);
        assert!(done.iter().enumerate().all(|(i, c)| c.ticket.0 == i as u64), "{call}: {done:?}");
        assert_eq!(done.iter().position(|c| c.result.is_err()), Some(*first), "{call} {nth}: {done:?}");
        let errors: Vec<_> = done.iter().filter_map(|c| c.result.as_ref().err()).collect();
        // Tickets that are back, with or without an error, mean that slab and block are no longer touched.
        gpu.before_write(&slab);
        if let Some(memory) = &memory {
            gpu.bytes(memory);
        }
        for e in &errors {
            let text = e.to_string();
            assert!(e.kind() == ErrorKind::Device && text.contains(call) && text.contains("(999)"), "{call}: {text}");
        }
        drop(device);
        gpu.fake.configure("fail", "");
        if memory.is_some() {
            // SAFETY: as above.
            unsafe { current.destroy_event(event) }.unwrap();
        }
        gpu.fake.stream_destroy(stream);
        drop((memory, slab, current));
        drop(raw);
        gpu.check();
    }
}

/// A failed batch may have written to the blocks of the copies that the driver was given. The driver may have refused the
/// last of these copies.
#[test]
fn a_batch_that_fails_names_the_blocks_whose_copies_had_begun() {
    // Too large to be given to the driver with others.
    const LARGE: u64 = 300_000;
    let all = vec![0, 1, 2];
    // The call that fails, the bytes of a copy or of its rows, and the blocks of the first batch that fails.
    let cases: [(&str, u64, Vec<u32>); 10] = [
        ("cuMemcpyHtoDAsync_v2:1:999", LARGE, vec![0]),
        ("cuMemcpyHtoDAsync_v2:2:999", LARGE, vec![0, 1]),
        ("cuMemcpy2DAsync_v2:2:999", 2000, vec![0, 1]),
        ("cuMemcpyBatchAsync:1:999", 100_000, all.clone()),
        ("cuEventCreate:1:999", LARGE, all.clone()),
        ("cuEventRecord:1:999", 100_000, all.clone()),
        ("cuEventSynchronize:1:999", LARGE, all.clone()),
        ("cuEventSynchronize:1:999", 2000, all.clone()),
        ("cuStreamCreate:1:999", LARGE, vec![]),
        ("cuMemcpyHtoDAsync_v2:4:999", LARGE, vec![0]),
    ];
    for (fail, len, expected) in cases {
        let gpu = cuda();
        let (memory, to) = gpu.memory(SLAB);
        let (slab, memory) = (gpu.slab(), Arc::new(memory));
        let to_block = |block: u32| {
            let at = u64::from(block) * LARGE;
            let copy = Copy { block, ..dense(slab.address().wrapping_add(at as usize), to + at, len) };
            match len {
                2000 => Copy { rows: 40, from_stride: 2 * len, to_stride: 2 * len, ..copy },
                _ => copy,
            }
        };
        gpu.fake.configure("fail", &format!("{fail}:1"));
        let mut device = gpu.gpu();
        for ticket in 0..2 {
            device.copy(batch(ticket, &slab, all.iter().map(|&block| to_block(block)).collect(), &memory)).unwrap();
        }
        let mut done = collect(&mut device, 2);
        done.sort_by_key(|copied| copied.ticket);
        let failed: Vec<_> = done.iter().filter(|copied| copied.result.is_err()).collect();
        assert_eq!(failed.first().map(|copied| &copied.begun), Some(&expected), "{fail}, {len} bytes: {done:?}");
        drop((device, slab, memory));
        gpu.fake.configure("fail", "");
        gpu.check();
    }
}

#[test]
fn after_a_lost_context_every_batch_fails_at_once() {
    let gpu = cuda();
    gpu.fake.configure("sticky", "3:700");
    let (memory, to) = gpu.memory(SLAB);
    let (slab, memory) = (gpu.slab(), Arc::new(memory));
    let mut device = gpu.gpu();
    for i in 0..20 {
        device.copy(whole_slab(i, &slab, to, &Arc::default(), memory.clone())).unwrap();
    }
    let done = collect(&mut device, 20);
    let failed: Vec<_> = done.iter().filter_map(|c| c.result.as_ref().err()).collect();
    assert!(failed.len() >= 17, "{} failed", failed.len());
    assert!(
        failed.iter().all(|e| e.kind() == ErrorKind::Device && e.to_string().contains("must be restarted")),
        "{failed:?}"
    );
    let copies = gpu.fake.counter("copies");
    device.copy(whole_slab(20, &slab, to, &Arc::default(), memory.clone())).unwrap();
    assert!(collect(&mut device, 1)[0].result.is_err());
    assert_eq!(gpu.fake.counter("copies"), copies, "nothing more is asked of a lost context");
    drop((device, slab, memory));
    release_staging();
    assert_eq!(gpu.fake.misuses(), Vec::<String>::new());
}

#[test]
fn a_hanging_gpu_costs_a_bounded_time_and_its_slab_is_never_used_again() {
    // Alone, since the slab and with it the context stay for the life of the process.
    alone("a_hanging_gpu_costs_a_bounded_time_and_its_slab_is_never_used_again", hang);
}

fn hang() {
    let gpu = cuda();
    gpu.fake.configure("hang_copy", "2");
    let (memory, to) = gpu.memory(SLAB);
    let (slab, memory) = (gpu.slab(), Arc::new(memory));
    let count = Arc::new(AtomicUsize::new(0));
    let mut device = gpu.gpu();
    (0..3).for_each(|i| device.copy(whole_slab(i, &slab, to, &count, memory.clone())).unwrap());
    collect(&mut device, 1);
    while gpu.fake.counter("copies") < 3 {
        // A batch that was not submitted yet would simply be dropped.
        std::thread::sleep(Duration::from_millis(1));
    }
    let (start, address) = (Instant::now(), slab.address());
    drop((slab, memory));
    // As a load does that has waited for the copies: dropping the device takes less time.
    assert_eq!(device.abandon(), []);
    drop(device);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(count.load(Ordering::SeqCst), 2, "what the GPU may touch is kept");
    let before = Ring::process().staging();
    assert!(before.quarantined > 0);
    let next: Vec<_> = (0..8).map(|_| gpu.slab()).collect();
    assert!(next.iter().all(|s| s.address() != address));
    drop(next);
    // The GPU comes back: everything goes but the slab.
    gpu.fake.release_hang();
    let start = Instant::now();
    while count.load(Ordering::SeqCst) > 0 || gpu.fake.counter("streams") > 0 {
        assert!(start.elapsed() < device::PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    release_staging();
    assert_eq!(Ring::process().staging().quarantined, before.quarantined);
    assert_eq!(gpu.fake.misuses(), Vec::<String>::new());
}

#[test]
fn a_new_device_does_not_wait_for_its_context() {
    let gpu = cuda();
    gpu.fake.configure("devices", "0");
    let mut device = GpuDevice::new(&gpu.api, 0).unwrap();
    let slab = gpu.slab();
    let copies = vec![dense(slab.address(), 0, 1)];
    let keep = Held::new(&Arc::default(), slab.clone());
    device
        .copy(Batch { ticket: Ticket(1), slab: (slab.address(), SLAB), copies, strided: Default::default(), keep })
        .unwrap();
    let e = collect(&mut device, 1).remove(0).result.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
}

#[test]
fn a_device_that_is_not_there_and_memory_that_is_not_there_are_named() {
    let gpu = cuda();
    gpu.fake.configure("memory", "4096");
    let e = SharedContext::retain(&gpu.api, 5).err().unwrap();
    assert!(e.kind() == ErrorKind::Invalid && e.to_string().contains("device 5") && e.to_string().contains('1'), "{e}");
    let context = gpu.context();
    assert_eq!(context.memory().unwrap(), (4096, 4096));
    let e = GpuMemory::new(&context, 5000).err().unwrap();
    assert!(e.kind() == ErrorKind::OutOfMemory && e.to_string().contains("5000"), "{e}");
    let some = GpuMemory::new(&context, 1000).unwrap();
    assert_eq!((some.nbytes(), context.memory().unwrap().0), (1000, 3096));
    drop(some);
    assert_eq!(context.memory().unwrap().0, 4096);
    drop(context);
    gpu.check();
}

#[test]
fn a_child_of_a_process_that_used_the_gpu_is_told_so() {
    let gpu = cuda();
    run(&gpu, 1, None);
    // SAFETY: the child leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: in the child: a hang becomes a signal.
            unsafe { libc::alarm(20) };
            let device = GpuDevice::new(&gpu.api, 0).err();
            let context = SharedContext::retain(&gpu.api, 0).err();
            let told = |e: Option<penstock::Error>| {
                e.is_some_and(|e| e.kind() == ErrorKind::Forked && e.message().contains("spawn"))
            };
            let ok = told(device) && told(context);
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
    gpu.check();
}

#[test]
fn without_a_driver_the_error_says_what_was_tried_and_that_the_cpu_works() {
    let e = Api::load_from("/nowhere/libcuda.so.1", None).unwrap_err();
    let text = e.to_string();
    assert!(e.kind() == ErrorKind::Unsupported && text.contains("/nowhere") && text.contains("CPU"), "{text}");
}

#[test]
fn a_driver_has_one_table_under_all_its_names() {
    let gpu = cuda();
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("libcuda.so.1");
    std::os::unix::fs::symlink(gpu.api.library(), &link).unwrap();
    let other = Api::load_from(&link, Some(Vendor::Cuda)).unwrap();
    assert!(Arc::ptr_eq(&gpu.api, &other) && Arc::ptr_eq(&other, &Api::load_from(&link, Some(Vendor::Cuda)).unwrap()));
    // So the context is retained once
    let (one, two) = (gpu.context(), SharedContext::retain(&other, 0).unwrap());
    assert!(Arc::ptr_eq(&one, &two));
    let hip = Api::load_from(&link, Some(Vendor::Hip)).unwrap();
    assert!(!Arc::ptr_eq(&hip, &other) && hip.driver_number() != other.driver_number());
}

#[test]
fn hip_takes_the_same_path() {
    let gpu = Gpu::new(Vendor::Hip);
    let (done, _) = run(&gpu, 5, None);
    assert!(done.iter().all(|c| c.result.is_ok()));
    gpu.check();
}
