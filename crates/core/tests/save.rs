//! Saving from memory of this process and of the fake GPU: what the files contain, and what remains when something
//! fails.
#![allow(clippy::unwrap_used)]

mod device;

use device::{Gpu, Kind, PATIENCE};
use penstock::device::api::{Vendor, LIBRARY_VARIABLE};
use penstock::device::gpu::GpuMemory;
use penstock::format::{Checkpoint, DType};
use penstock::options::{Options, Order};
use penstock::save::{Arrangement, At, RankShare, Save, SavePlan, SaveReport, SaveRequest, Tensor, Wanted};
use penstock::staging::Ring;
use penstock::store::{Location, Stores};
use penstock::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The process's ring of staging memory is this test's alone: a slab that it uses may be registered with the driver of
/// another test, which then looks for what is left of its own.
fn alone() -> fakegpu::Exclusive {
    fakegpu::Library::exclusive().unwrap()
}

fn options() -> Options {
    Options { staging: 4 * MIB, extent: MIB, stall_timeout: Duration::from_secs(30), ..Options::default() }
}

/// Bytes that differ from tensor to tensor.
fn noise(seed: u64, nbytes: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    (0..)
        .take_while(|part| (part << 20) < nbytes as u64)
        .for_each(|part| bytes.extend(device::noise(seed * 1000 + part)));
    bytes.truncate(nbytes);
    bytes
}

/// Tensors of these sizes, in shards of 9 MiB at most.
fn plan(sizes: &[usize]) -> SavePlan {
    let tensors: Vec<Tensor> = (0..)
        .zip(sizes)
        .map(|(i, n)| Tensor { name: format!("w{i}"), dtype: DType::U8, shape: vec![*n as u64] })
        .collect();
    SavePlan::new(&tensors, None, "model.safetensors", Arrangement::Aligned, Order::File, Some(9 * MIB)).unwrap()
}

fn ended(save: &Save) -> penstock::Result<SaveReport> {
    assert!(save.wait(Some(PATIENCE))?, "the save did not end");
    save.report()
}

fn same(folder: &Path, contents: &[Vec<u8>]) {
    let checkpoint = Checkpoint::open(&[folder]).unwrap();
    let files: Vec<Vec<u8>> = checkpoint.files().iter().map(|f| std::fs::read(&f.spelled).unwrap()).collect();
    for (i, content) in contents.iter().enumerate() {
        let tensor = checkpoint.find(&format!("w{i}")).unwrap();
        let found = &files[tensor.file as usize][tensor.begin as usize..tensor.end as usize];
        assert!(found == &content[..], "w{i}");
    }
    assert_eq!(checkpoint.len(), contents.len());
}

const SIZES: [usize; 6] = [6 * MIB as usize, 3, 0, 5 * MIB as usize + 77, 4096, MIB as usize - 1];

#[test]
fn what_is_saved_from_memory_is_what_the_files_hold() {
    let _alone = alone();
    let contents: Vec<Vec<u8>> = (0..).zip(SIZES).map(|(i, n)| noise(i, n)).collect();
    for sync in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let tensors = contents.iter().map(|c| At::Host(c.as_ptr() as u64)).collect();
        let request = SaveRequest {
            snapshot: false,
            ahead: false,
            plan: plan(&SIZES),
            folder: Location::Path(folder.path().into()),
            stores: Stores::default(),
            checkpoint: None,
            tensors,
            keep: Arc::new(()),
            sync,
            options: options(),
        };
        let save = Save::start(request).unwrap();
        let report = ended(&save).unwrap();
        same(folder.path(), &contents);
        assert_eq!(report.nbytes, SIZES.iter().sum::<usize>() as u64);
        assert!(report.peak_staging <= if sync { 4 * MIB } else { 0 }, "{report:?}");
        assert_eq!(save.progress(), (report.file_bytes, report.file_bytes));
    }
}

/// A save of tensors that are late, except the first one.
fn late(folder: &Path, contents: &[Vec<u8>], sync: bool, stall_timeout: Duration) -> Save {
    let mut tensors = vec![At::Late; contents.len()];
    tensors[0] = At::Host(contents[0].as_ptr() as u64);
    let (plan, folder) = (plan(&SIZES), Location::Path(folder.into()));
    let options = Options { stall_timeout, ..options() };
    Save::start(SaveRequest {
        snapshot: false,
        ahead: false,
        plan,
        folder,
        stores: Stores::default(),
        checkpoint: None,
        tensors,
        keep: Arc::new(()),
        sync,
        options,
    })
    .unwrap()
}

/// Waits until the save wants a tensor; `None` if it ends first.
fn wants(save: &Save) -> Option<Wanted> {
    let over = save.wait(Some(PATIENCE)).unwrap();
    assert!(over || save.wanted().is_some(), "the save neither ends nor wants anything");
    save.wanted()
}

#[test]
fn tensors_may_be_made_when_their_turn_comes() {
    let _alone = alone();
    let contents: Vec<Vec<u8>> = (0..).zip(SIZES).map(|(i, n)| noise(i, n)).collect();
    // The storage of a busy machine may take a second for a write.
    let stall = Duration::from_secs(3);
    let saved = |sync| {
        let folder = tempfile::tempdir().unwrap();
        let save = late(folder.path(), &contents, sync, stall);
        let mut made = Vec::new();
        while let Some(wanted) = wants(&save) {
            assert_eq!(save.wanted(), Some(wanted));
            if made.is_empty() {
                // However long that takes, the storage is not what stalls.
                std::thread::sleep(stall + stall / 2);
            }
            let content = &contents[wanted.tensor as usize];
            assert_eq!(wanted.nbytes, content.len());
            // SAFETY: the save's memory for so many bytes, and nobody reads it before they are supplied.
            unsafe { wanted.at.copy_from_nonoverlapping(content.as_ptr(), wanted.nbytes) };
            made.push(wanted.tensor);
            save.supplied();
        }
        ended(&save).unwrap();
        same(folder.path(), &contents);
        made.sort_unstable();
        assert_eq!(made, [1, 3, 4, 5], "each once, and not the one that is empty");
    };
    std::thread::scope(|scope| [true, false].map(|sync| scope.spawn(move || saved(sync))).map(|s| s.join().unwrap()));
}

#[test]
fn a_save_that_waits_for_a_tensor_can_be_given_up() {
    let _alone = alone();
    let contents: Vec<Vec<u8>> = (0..).zip(SIZES).map(|(i, n)| noise(i, n)).collect();
    for sync in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let save = late(folder.path(), &contents, sync, PATIENCE);
        assert!(wants(&save).is_some());
        let begun = Instant::now();
        save.close();
        assert!(begun.elapsed() < PATIENCE / 2, "threads were left behind");
        assert_eq!(ended(&save).unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_snapshot_of_a_rank_that_writes_no_file_ends() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let nothing = SavePlan::new(&[], None, "m", Arrangement::Aligned, Order::File, None).unwrap();
    let share = RankShare { names: Vec::new(), index: None };
    let save = Save::start(SaveRequest {
        snapshot: true,
        ahead: true,
        plan: nothing.of_rank("m".as_ref(), share).unwrap(),
        folder: Location::Path(folder.path().into()),
        stores: Stores::default(),
        checkpoint: None,
        tensors: Vec::new(),
        keep: Arc::new(()),
        sync: true,
        options: options(),
    })
    .unwrap();
    assert!(save.copied(Some(PATIENCE)).unwrap() && save.sealed(Some(PATIENCE)).unwrap());
    assert!(!save.is_done(), "it waits for the other ranks");
    save.approve();
    assert_eq!(ended(&save).unwrap().files, 0);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A save as the checkpoint of a folder. The first tensor is late if the save is to be held until it is supplied.
fn into_folder(folder: &Path, contents: &[Vec<u8>], is_held: bool) -> Save {
    let mut tensors: Vec<At> = contents.iter().map(|content| At::Host(content.as_ptr() as u64)).collect();
    if is_held {
        tensors[0] = At::Late;
    }
    let sizes: Vec<usize> = contents.iter().map(Vec::len).collect();
    Save::start(SaveRequest {
        snapshot: false,
        ahead: false,
        plan: plan(&sizes),
        folder: Location::Path(folder.into()),
        stores: Stores::default(),
        checkpoint: Some("model.safetensors".to_owned()),
        tensors,
        keep: Arc::new(()),
        sync: false,
        options: options(),
    })
    .unwrap()
}

/// Supplies the tensor that a save was held for, and waits for its end.
fn supplied(save: &Save, content: &[u8]) -> penstock::Result<SaveReport> {
    let wanted = wants(save).unwrap();
    // SAFETY: the save's memory for so many bytes, and nobody reads it before they are supplied.
    unsafe { wanted.at.copy_from_nonoverlapping(content.as_ptr(), wanted.nbytes) };
    save.supplied();
    ended(save)
}

fn names(folder: &Path) -> Vec<String> {
    let found = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut found: Vec<String> = found.collect();
    found.sort();
    found
}

#[test]
fn of_two_saves_to_one_folder_the_later_one_fails_and_one_over_a_removed_checkpoint_does_not() {
    let _alone = alone();
    let of = |seed: u64, sizes: &[usize]| (seed..).zip(sizes).map(|(i, n)| noise(i, *n)).collect::<Vec<Vec<u8>>>();
    let (one, two) = ([5 * MIB as usize].as_slice(), [6 * MIB as usize, 5 * MIB as usize].as_slice());
    for (first, second) in [(one, one), (one, two), (two, one), (two, two)] {
        let (first, second) = (of(10, first), of(20, second));
        let folder = tempfile::tempdir().unwrap();
        let late = into_folder(folder.path(), &first, true);
        ended(&into_folder(folder.path(), &second, false)).unwrap();
        let theirs = names(folder.path());
        let e = supplied(&late, &first[0]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Changed, "{e}");
        assert!(e.message().contains("nothing of this save is visible"), "{e}");
        assert_eq!(names(folder.path()), theirs);
        same(folder.path(), &second);
        let over = into_folder(folder.path(), &first, true);
        theirs.iter().for_each(|name| std::fs::remove_file(folder.path().join(name)).unwrap());
        supplied(&over, &first[0]).unwrap();
        same(folder.path(), &first);
    }
}

#[test]
fn nobody_holds_staging_while_a_tensor_is_being_made() {
    // Alone, since the ring is the process's.
    device::alone("nobody_holds_staging_while_a_tensor_is_being_made", || {
        let contents: Vec<Vec<u8>> = (0..).zip(SIZES).map(|(i, n)| noise(i, n)).collect();
        let folder = tempfile::tempdir().unwrap();
        let save = late(folder.path(), &contents, true, PATIENCE);
        assert!(wants(&save).is_some());
        let until = Instant::now() + PATIENCE;
        while Ring::process().staging().in_use > 0 {
            assert!(Instant::now() < until, "{:?}", Ring::process().staging());
            std::thread::sleep(Duration::from_millis(1));
        }
        // Another save of the process goes on meanwhile.
        let other = tempfile::tempdir().unwrap();
        let tensors = contents.iter().map(|c| At::Host(c.as_ptr() as u64)).collect();
        let request = SaveRequest {
            snapshot: false,
            ahead: false,
            plan: plan(&SIZES),
            folder: Location::Path(other.path().into()),
            stores: Stores::default(),
            checkpoint: None,
            tensors,
            keep: Arc::new(()),
            sync: true,
            options: options(),
        };
        ended(&Save::start(request).unwrap()).unwrap();
        same(other.path(), &contents);
        while let Some(wanted) = wants(&save) {
            // SAFETY: the save's memory for so many bytes, and nobody reads it before they are supplied.
            unsafe { wanted.at.copy_from_nonoverlapping(contents[wanted.tensor as usize].as_ptr(), wanted.nbytes) };
            save.supplied();
        }
        ended(&save).unwrap();
        same(folder.path(), &contents);
    });
}

#[test]
fn a_save_waits_for_staging_in_the_background() {
    device::alone("a_save_waits_for_staging_in_the_background", || {
        let contents: Vec<Vec<u8>> = (0..).zip(SIZES).map(|(i, n)| noise(i, n)).collect();
        let start = |folder: &Path, stall_timeout| {
            let tensors = contents.iter().map(|c| At::Host(c.as_ptr() as u64)).collect();
            let (plan, folder) = (plan(&SIZES), Location::Path(folder.into()));
            let options = Options { stall_timeout, ..options() };
            Save::start(SaveRequest {
                snapshot: false,
                ahead: false,
                plan,
                folder,
                stores: Stores::default(),
                checkpoint: None,
                tensors,
                keep: Arc::new(()),
                sync: true,
                options,
            })
        };
        // Another load holds all that these may have.
        let load = Ring::process().join(2 * MIB, 4 * MIB).unwrap();
        let held = (load.try_acquire().unwrap().unwrap(), load.try_acquire().unwrap().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let begun = Instant::now();
        let save = start(folder.path(), PATIENCE).unwrap();
        assert!(!save.wait(Some(Duration::from_millis(100))).unwrap());
        save.close();
        assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
        assert_eq!(ended(&save).unwrap_err().kind(), ErrorKind::Cancelled);

        let save = start(folder.path(), Duration::from_millis(200)).unwrap();
        let error = ended(&save).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("other loads hold all of the staging memory"), "{error}");
        save.close();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

        let save = start(folder.path(), PATIENCE).unwrap();
        assert!(!save.wait(Some(Duration::from_millis(100))).unwrap());
        drop((held, load));
        let report = ended(&save).unwrap();
        assert_eq!((report.threads, report.peak_staging), (2, 4 * MIB));
        same(folder.path(), &contents);
        // The save is still there, and its place in the ring is not: a later one has all of the staging.
        Ring::process().trim();
        assert_eq!(Ring::process().staging().mapped, 0);
        let alone = Ring::process().join(2 * MIB, 6 * MIB).unwrap();
        let three: Vec<_> = (0..3).map(|_| alone.try_acquire().unwrap().unwrap()).collect();
        drop((three, save));
    });
}

/// The fake GPU, where loads and saves look for one, and tensors in its memory.
fn on_gpu() -> (Gpu, Vec<GpuMemory>, Vec<Vec<u8>>) {
    let gpu = Gpu::new(Vendor::Cuda);
    std::env::set_var(LIBRARY_VARIABLE, gpu.fake.path());
    let contents: Vec<Vec<u8>> = (0..).zip(SIZES).map(|(i, n)| noise(100 + i, n)).collect();
    let memory: Vec<GpuMemory> = contents
        .iter()
        .map(|content| {
            let (memory, address) = gpu.memory(content.len().max(1));
            gpu.fake.host_access(address, content.len() as u64, 1);
            // SAFETY: the fake's device memory is host memory, and nothing is under way on it.
            unsafe { (address as *mut u8).copy_from_nonoverlapping(content.as_ptr(), content.len()) };
            memory
        })
        .collect();
    (gpu, memory, contents)
}

fn from_gpu(folder: &Path, memory: &[GpuMemory], sync: bool, options: Options) -> SaveRequest {
    let tensors = memory.iter().map(|m| At::Gpu(0, m.address())).collect();
    let (plan, folder) = (plan(&SIZES), Location::Path(folder.into()));
    SaveRequest {
        snapshot: false,
        ahead: false,
        plan,
        folder,
        stores: Stores::default(),
        checkpoint: None,
        tensors,
        keep: Arc::new(()),
        sync,
        options,
    }
}

#[test]
fn what_is_saved_from_a_gpu_is_what_the_files_hold() {
    let (gpu, memory, contents) = on_gpu();
    for sync in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let save = Save::start(from_gpu(folder.path(), &memory, sync, options())).unwrap();
        let report = ended(&save).unwrap();
        same(folder.path(), &contents);
        assert!(report.peak_staging <= 4 * MIB, "{report:?}");
        save.close();
    }
    drop(memory);
    gpu.check();
}

/// Saves so many tensors of this size from one allocation of the fake GPU. The first byte of each is a multiple of
/// `align`.
/// Gives the copies that this took, the calls that started them, and the bytes.
fn small_ones(vendor: Vendor, count: usize, nbytes: usize, align: usize, sizes: &[usize]) -> (u64, u64, u64) {
    let gpu = Gpu::new(vendor);
    let prefix = if vendor == Vendor::Cuda { "cuda:" } else { "hip:" };
    std::env::set_var(LIBRARY_VARIABLE, format!("{prefix}{}", gpu.fake.path().display()));
    let step = nbytes.next_multiple_of(align);
    let whole = sizes.iter().map(|n| n.next_multiple_of(align)).sum::<usize>() + count * step;
    let (memory, address) = gpu.memory(whole);
    gpu.fake.host_access(address, whole as u64, 1);
    let sizes: Vec<usize> = sizes.iter().copied().chain(std::iter::repeat_n(nbytes, count)).collect();
    let contents: Vec<Vec<u8>> =
        (0..).zip(&sizes).map(|(i, n)| (0..*n).map(|b| (i * 7 + b * 31 + b / 251) as u8).collect()).collect();
    let mut at = address;
    let mut tensors = Vec::new();
    for content in &contents {
        tensors.push(At::Gpu(0, at));
        // SAFETY: the fake's device memory is host memory, and nothing is under way on it.
        unsafe { (at as *mut u8).copy_from_nonoverlapping(content.as_ptr(), content.len()) };
        at += content.len().next_multiple_of(align) as u64;
    }
    let folder = tempfile::tempdir().unwrap();
    let named: Vec<Tensor> = (0..)
        .zip(&sizes)
        .map(|(i, n)| Tensor { name: format!("w{i}"), dtype: DType::U8, shape: vec![*n as u64] })
        .collect();
    let plan = SavePlan::new(&named, None, "model.safetensors", Arrangement::Aligned, Order::File, None).unwrap();
    let folder_path = folder.path().to_path_buf();
    let options = Options { stall_timeout: Duration::from_secs(30), ..Options::default() };
    let keep = Arc::new(());
    let save = Save::start(SaveRequest {
        snapshot: false,
        ahead: false,
        plan,
        folder: Location::Path(folder_path),
        stores: Stores::default(),
        checkpoint: None,
        tensors,
        keep,
        sync: true,
        options,
    })
    .unwrap();
    ended(&save).unwrap();
    drop(save);
    same(folder.path(), &contents);
    let calls = ["cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", "cuMemcpyBatchAsync", "hipMemcpyBatchAsync"];
    let calls = calls.iter().map(|name| gpu.fake.counter(&format!("calls.{name}"))).sum();
    let found = (gpu.fake.counter("copies"), calls, gpu.fake.counter("bytes_d2h"));
    drop(memory);
    gpu.check();
    found
}

#[test]
fn neighbours_on_the_gpu_are_saved_by_few_copies() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        // Without gaps, so that each chunk of 4 MiB is one copy.
        let (copies, _, bytes) = small_ones(vendor, 9000, 1024, 256, &[]);
        assert!(copies <= 4, "{vendor}: {copies} copies of 3 chunks");
        assert_eq!(bytes, 9000 * 1024);
        // As torch's allocator leaves them, with up to 511 bytes between two: 14 MB in pieces of the scratch buffer.
        let (copies, _, bytes) = small_ones(vendor, 9000, 1100, 512, &[]);
        assert!(copies <= 14, "{vendor}: {copies} copies");
        assert!(bytes <= 9000 * 1536, "{vendor}: {bytes} bytes");
    }
}

#[test]
fn small_tensors_far_from_each_other_are_saved_by_few_calls_where_the_driver_takes_many_copies_at_once() {
    let (copies, calls, bytes) = small_ones(Vendor::Cuda, 3000, 1000, 4096, &[]);
    assert_eq!((copies, bytes), (3000, 3_000_000));
    assert!(calls <= 4, "{calls} calls");
    let (copies, calls, _) = small_ones(Vendor::Hip, 3000, 1000, 4096, &[]);
    assert_eq!((copies, calls), (3000, 3000), "HIP's own function for that is slow");
}

#[test]
fn large_and_small_tensors_on_the_gpu_mix() {
    // Large ones in the midst of one chunk and across chunks, at odd places in the file.
    let sizes = [5 * MIB as usize + 3, 33 << 10, 1, 300_001, 0, 77, 3 * MIB as usize, 511];
    for (vendor, align) in [(Vendor::Cuda, 1), (Vendor::Cuda, 256), (Vendor::Hip, 512)] {
        let (copies, _, _) = small_ones(vendor, 500, 333, align, &sizes);
        assert!(copies <= 24, "{vendor}: {copies} copies");
    }
}

#[test]
fn tensors_of_allocations_that_touch_are_copied_one_by_one() {
    let gpu = Gpu::new(Vendor::Cuda);
    std::env::set_var(LIBRARY_VARIABLE, gpu.fake.path());
    gpu.fake.configure("strict", "0");
    let nbytes = 4096u64;
    let host = vec![7u8; 3 * nbytes as usize];
    let start = host.as_ptr() as u64;
    let tensors: Vec<At> = (0..3).map(|i| At::Gpu(0, start + i * nbytes)).collect();
    (0..3).for_each(|i| assert_eq!(gpu.fake.adopt(start + i * nbytes, nbytes, 0), 0));
    let folder = tempfile::tempdir().unwrap();
    let options = Options { stall_timeout: Duration::from_secs(30), ..options() };
    let (plan, path) = (plan(&[nbytes as usize; 3]), folder.path().to_path_buf());
    let request = SaveRequest {
        snapshot: false,
        ahead: false,
        plan,
        folder: Location::Path(path),
        stores: Stores::default(),
        checkpoint: None,
        tensors,
        keep: Arc::new(()),
        sync: true,
        options,
    };
    ended(&Save::start(request).unwrap()).unwrap();
    same(folder.path(), &[vec![7; 4096], vec![7; 4096], vec![7; 4096]]);
    assert_eq!(gpu.fake.counter("copies"), 3);
    (0..3).for_each(|i| assert_eq!(gpu.fake.disown(start + i * nbytes), 0));
    gpu.check();
}

#[test]
fn a_copy_that_fails_ends_the_save_and_leaves_nothing() {
    let (gpu, memory, _) = on_gpu();
    let folder = tempfile::tempdir().unwrap();
    gpu.fake.configure("fail", "cuMemcpyDtoHAsync_v2:3:700");
    let save = Save::start(from_gpu(folder.path(), &memory, true, options())).unwrap();
    let error = ended(&save).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    drop((save, memory));
    gpu.fake.configure("fail", "");
}

#[test]
fn a_copy_that_hangs_ends_the_save_at_the_stall_timeout() {
    // Alone, since a slab and its registration stay for the life of the process.
    device::alone("a_copy_that_hangs_ends_the_save_at_the_stall_timeout", || {
        let (gpu, memory, _) = on_gpu();
        let folder = tempfile::tempdir().unwrap();
        gpu.fake.configure("hang_copy", "4");
        let stall = Options { stall_timeout: Duration::from_millis(300), ..options() };
        let begun = Instant::now();
        let save = Save::start(from_gpu(folder.path(), &memory, true, stall)).unwrap();
        let error = ended(&save).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        save.close();
        assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
        assert_eq!(Checkpoint::open(&[folder.path()]).unwrap_err().kind(), ErrorKind::NotFound);
        gpu.fake.release_hang();
        gpu.fake.drain();
    });
}
