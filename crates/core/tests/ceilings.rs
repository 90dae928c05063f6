//! Ceilings move every byte once, by every means, and say no to what makes no sense. Rates are the benchmark's business.
#![allow(clippy::unwrap_used)]

mod device;

use device::Gpu;
use penstock::ceiling::{measure, measure_on, Interface, Measure, Settings};
use penstock::device::api::Vendor;
use penstock::staging::Ring;
use penstock::ErrorKind;
use std::path::PathBuf;

/// Three files whose sizes are no multiple of anything, the last one empty.
fn files() -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths = [3_000_001, 70_000, 0].map(|size: usize| {
        let path = folder.path().join(size.to_string());
        std::fs::write(&path, vec![7; size]).unwrap();
        path
    });
    (folder, paths.to_vec())
}

#[test]
fn every_measure_of_files_moves_every_byte() {
    let (_folder, paths) = files();
    for measured in Measure::ALL.into_iter().filter(|measured| !measured.is_of_a_gpu()) {
        for engine in [Interface::Threads, Interface::Uring, Interface::Mapped] {
            let settings = Settings { engine, block: 10_000, threads: 3, depth: 5, ..Settings::new(measured) };
            match measure(&settings, &paths) {
                Ok(found) => {
                    assert_eq!(found.bytes, 3_070_001, "{measured:?} by {engine:?}");
                    assert!(found.seconds > 0.0);
                }
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    assert!(error.message().contains("its engines are threads"), "{error}");
                }
                // A sandbox without io_uring, a file system without O_DIRECT
                Err(error) => assert!(measured == Measure::Direct || measured == Measure::Place, "{error}"),
            }
        }
    }
}

#[test]
fn what_cannot_be_measured_is_an_error_that_says_what_can() {
    let (_folder, paths) = files();
    let kind = |settings: &Settings, paths: &[PathBuf]| measure(settings, paths).unwrap_err().kind();
    let missing = [PathBuf::from("/nowhere/at/all")];
    assert_eq!(kind(&Settings::new(Measure::Copy), &missing), ErrorKind::NotFound);
    assert_eq!(kind(&Settings::new(Measure::Copy), &[]), ErrorKind::Invalid);
    assert_eq!(kind(&Settings { threads: 0, ..Settings::new(Measure::Copy) }, &paths), ErrorKind::Invalid);
    let unknown = Measure::named("speed").unwrap_err();
    assert!(Measure::ALL.iter().all(|known| unknown.message().contains(known.name())), "{unknown}");
    assert!(Interface::named("steam").unwrap_err().message().contains("threads, uring, mapped"));
}

#[test]
fn measures_of_a_gpu_copy_and_allocate_what_they_say_and_leave_nothing() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        let gpu = Gpu::new(vendor);
        let before = gpu.fake.counter("bytes_h2d");
        let settings =
            Settings { block: 1 << 20, depth: 3, threads: 2, nbytes: 7 << 20, ..Settings::new(Measure::HostToDevice) };
        let found = measure_on(&gpu.api, &settings).unwrap();
        assert_eq!(found.bytes, 7 << 20);
        // Every buffer once before the clock starts
        assert_eq!(gpu.fake.counter("bytes_h2d") - before, (3 + 7) << 20);

        let found = measure_on(&gpu.api, &Settings { measure: Measure::DeviceAlloc, ..settings.clone() }).unwrap();
        assert_eq!(found.bytes, 7 << 20);

        let nowhere = measure_on(&gpu.api, &Settings { device: 99, ..settings.clone() }).unwrap_err();
        assert_eq!(nowhere.kind(), ErrorKind::Invalid);
        let of_files = measure_on(&gpu.api, &Settings::new(Measure::Direct)).unwrap_err();
        assert_eq!(of_files.kind(), ErrorKind::Invalid);

        Ring::process().trim();
        assert_eq!((gpu.fake.misuses(), gpu.fake.leaks()), (vec![], vec![]));
    }
}

#[test]
fn a_copy_that_fails_half_way_is_an_error_and_leaves_nothing() {
    let gpu = Gpu::new(Vendor::Cuda);
    gpu.fake.configure("fail", "cuMemcpyHtoDAsync_v2:5:719");
    let settings = Settings { block: 1 << 20, depth: 3, nbytes: 7 << 20, ..Settings::new(Measure::HostToDevice) };
    assert_eq!(measure_on(&gpu.api, &settings).unwrap_err().kind(), ErrorKind::Device);
    assert_eq!((gpu.fake.misuses(), gpu.fake.leaks()), (vec![], vec![]));
}

#[test]
fn the_clock_runs_until_the_last_copy_has_arrived() {
    let gpu = Gpu::new(Vendor::Cuda);
    gpu.fake.configure("h2d_bytes_per_s", "100000000");
    let settings = Settings { block: 1 << 20, nbytes: 20 << 20, ..Settings::new(Measure::HostToDevice) };
    let found = measure_on(&gpu.api, &settings).unwrap();
    assert!(found.seconds > 0.95 * found.bytes as f64 / 1e8, "{found:?}");
}
