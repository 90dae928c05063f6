//! The table against fakegpu, through both interfaces.

use super::*;
use fakegpu::{Exclusive, Library as Fake};

fn fake() -> Exclusive {
    Fake::exclusive().unwrap()
}

fn api(fake: &Exclusive, vendor: Vendor) -> Arc<Api> {
    let api = Api::load_from(fake.path(), Some(vendor)).unwrap();
    api.init().unwrap();
    api
}

fn assert_clean(fake: &Exclusive) {
    assert_eq!((fake.misuses(), fake.leaks()), (vec![], vec![]));
}

#[test]
fn a_missing_library_is_an_error_that_says_what_was_tried() {
    let e = Api::load_from("/nowhere/libcuda.so.1", None).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("/nowhere/libcuda.so.1") && e.message().contains(LIBRARY_VARIABLE), "{e}");
}

#[test]
fn a_library_that_is_no_driver_is_an_error_that_names_the_missing_function() {
    let e = Api::load_from("libm.so.6", None).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(["libm.so.6", "cuInit", "hipInit"].iter().all(|s| e.message().contains(s)), "{e}");
}

#[test]
fn a_library_is_loaded_once_and_nothing_of_it_is_called() {
    let fake = fake();
    let first = Api::load_from(fake.path(), None).unwrap();
    assert_eq!(first.vendor(), Vendor::Cuda);
    let others: Vec<_> = (0..4)
        .map(|_| {
            let path = fake.path().to_owned();
            std::thread::spawn(move || Api::load_from(path, None).unwrap())
        })
        .collect();
    assert!(others.into_iter().all(|other| Arc::ptr_eq(&first, &other.join().unwrap())));
    assert!(!Arc::ptr_eq(&first, &Api::load_from(fake.path(), Some(Vendor::Hip)).unwrap()));
    assert_eq!((fake.counter("calls.cuInit"), fake.counter("calls.cuDeviceGetCount")), (0, 0));
}

#[test]
fn an_absent_function_is_none() {
    let fake = fake();
    let library = Library::open(fake.path().as_os_str(), 0).unwrap();
    assert!(library.symbol("cuInit").is_some() && library.symbol("cuNoSuchFunction").is_none());
}

#[test]
fn devices_are_described() {
    let fake = fake();
    fake.configure("devices", "3");
    fake.configure("integrated", "1");
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        let api = api(&fake, vendor);
        assert_eq!((api.device_count().unwrap(), api.driver_version().unwrap()), (3, 12_080));
        assert_eq!(api.pci_bus_id(2).unwrap(), "0000:03:00.0");
        assert_eq!(api.device_name(0).unwrap(), "fakegpu on host memory");
        let ask = |attribute| api.attribute(1, attribute).unwrap();
        assert_eq!((ask(Attribute::Integrated), ask(Attribute::CopyEngines)), (1, 2));
        assert_eq!(api.device(3).unwrap_err().kind(), ErrorKind::Device);
    }
    assert_clean(&fake);
}

#[test]
fn only_the_primary_context_of_the_device_asked_for_is_made_and_it_is_released() {
    let fake = fake();
    fake.configure("devices", "3");
    fake.configure("expect_devices", "2");
    let api = api(&fake, Vendor::Cuda);
    assert_eq!(fake.counter("contexts_retained"), 0);
    let context = api.context(1).unwrap();
    let current = context.enter().unwrap();
    // SAFETY: freed once, nothing is queued.
    unsafe { current.free(current.alloc(100).unwrap()).unwrap() };
    assert_eq!((fake.counter("contexts_made"), fake.counter("contexts_retained")), (1, 1));
    drop(current);
    drop(context);
    assert_eq!(fake.counter("contexts_retained"), 0);
    assert_clean(&fake);
}

#[test]
fn what_was_current_before_is_so_again() {
    let fake = fake();
    fake.configure("devices", "2");
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        let api = api(&fake, vendor);
        let (outer, inner) = (api.context(0).unwrap(), api.context(1).unwrap());
        let current = || match &api.own {
            Own::Cuda(cuda) => {
                let mut handle = 0;
                // SAFETY: a valid out parameter.
                assert_eq!(unsafe { (cuda.context_get)(&mut handle) }, 0);
                handle
            }
            Own::Hip(hip) => {
                let mut device = 0;
                // SAFETY: a valid out parameter.
                assert_eq!(unsafe { (hip.device_get)(&mut device) }, 0);
                device as usize
            }
        };
        let nothing = current();
        let a = outer.enter().unwrap();
        let in_outer = current();
        {
            let _b = inner.enter().unwrap();
            assert_ne!(current(), in_outer);
            let _again = inner.enter().unwrap();
        }
        assert_eq!(current(), in_outer);
        drop(a);
        assert_eq!(current(), nothing);
    }
    assert_clean(&fake);
}

#[test]
fn a_thread_without_the_guard_has_no_context() {
    let fake = fake();
    let api = api(&fake, Vendor::Cuda);
    let context = api.context(0).unwrap();
    let _current = context.enter().unwrap();
    let e = std::thread::scope(|scope| scope.spawn(|| api.alloc(1).unwrap_err()).join().unwrap());
    assert!(e.message().contains("CUDA_ERROR_INVALID_CONTEXT (201)"), "{e}");
    assert_eq!(fake.misuse_count(), 1);
}

#[test]
fn an_error_carries_the_drivers_name_number_and_text() {
    let fake = fake();
    fake.configure("memory", "1000");
    for (vendor, name) in [
        (Vendor::Cuda, "cuMemAlloc_v2 gave CUDA_ERROR_OUT_OF_MEMORY"),
        (Vendor::Hip, "hipMalloc gave hipErrorOutOfMemory"),
    ] {
        let api = api(&fake, vendor);
        let context = api.context(0).unwrap();
        let current = context.enter().unwrap();
        assert_eq!(current.memory().unwrap(), (1000, 1000));
        let e = current.alloc(1001).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::OutOfMemory);
        assert_eq!(e.message(), format!("cannot allocate 1001 bytes of device memory: {name} (2), out of memory"));
        fake.configure("fail", "cuEventCreate:1:4711,hipEventCreateWithFlags:1:999,cuStreamCreate:1:700");
        let e = current.create_event().unwrap_err();
        assert!(e.kind() == ErrorKind::Device && (e.message().contains("4711") || vendor == Vendor::Hip), "{e}");
    }
    let context = api(&fake, Vendor::Cuda).context(0).unwrap();
    assert!(context.enter().unwrap().create_stream().unwrap_err().message().contains("must be restarted"));
    drop(context);
    fake.configure("devices", "0");
    assert_eq!(Api::load_from(fake.path(), None).unwrap().init().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_clean(&fake);
}

#[test]
fn bytes_travel_both_ways_as_ranges_rows_and_batches() {
    let fake = fake();
    fake.configure("strict", "1");
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        let api = api(&fake, vendor);
        let context = api.context(0).unwrap();
        let d = context.enter().unwrap();
        let mut slab: Vec<u8> = (0..8192u32).map(|i| (i * 31 + i / 251) as u8).collect();
        let (head, tail) = slab.split_at_mut(4096);
        let (at, back) = (head.as_ptr() as u64, tail.as_mut_ptr());
        let memory = d.alloc(10_000).unwrap();
        // SAFETY: ranges inside the slab and the allocation, which outlive the synchronisations; handles are live.
        unsafe {
            d.register(head.as_mut_ptr(), 8192).unwrap();
            let (s, e) = (d.create_stream().unwrap(), d.create_event().unwrap());
            let wide = Rows { to: memory, to_pitch: 70, from: at, from_pitch: 128, width: 60, rows: 9 };
            d.copy_rows_to_device(wide, s).unwrap();
            for row in 0..9 {
                d.copy_to_host(back.add(row * 60), memory + row as u64 * 70, 60, s).unwrap();
            }
            // Pitches beyond what a strided copy takes, and of one row, which needs none.
            d.copy_rows_to_device(Rows { to: memory + 5000, to_pitch: 1 << 40, rows: 1, ..wide }, s).unwrap();
            d.copy_to_device(memory + 6000, head.as_ptr().add(100), 300, s).unwrap();
            d.copy_to_host(back.add(1000), memory + 6000, 300, s).unwrap();
            let (to, from) = ([memory + 7000, memory + 8000], [at + 1, at + 9]);
            let batched = d.copy_batch_to_device(&to, &from, &[50, 60], s).unwrap();
            assert_eq!(batched, vendor == Vendor::Cuda);
            assert!(!d.copy_batch_to_device(&to, &from, &[50, 60], Stream(0)).unwrap());
            if !batched {
                d.copy_to_device(to[0], from[0] as *const u8, 50, s).unwrap();
                d.copy_to_device(to[1], from[1] as *const u8, 60, s).unwrap();
            }
            let (to, from) = ([back as u64 + 2000, back as u64 + 3000], [memory + 6000, memory + 6100]);
            let fetched = d.copy_batch_to_host(&to, &from, &[70, 80], s).unwrap();
            assert_eq!(fetched, vendor == Vendor::Cuda);
            assert!(!d.copy_batch_to_host(&to, &from, &[70, 80], Stream(0)).unwrap());
            assert!(d.copy_batch_to_host(&to, &from, &[70], s).is_err());
            assert_eq!(d.allocation(memory + 9_999), Some(memory..memory + 10_000));
            assert_eq!((d.allocation(memory + 10_000), d.allocation(at)), (None, None));
            d.record(e, s).unwrap();
            d.synchronize_event(e).unwrap();
            let device = |offset: u64, len| std::slice::from_raw_parts((memory + offset) as *const u8, len);
            for row in 0..9 {
                assert_eq!(device(row * 70, 60), &head[row as usize * 128..][..60]);
                assert_eq!(&tail[row as usize * 60..][..60], &head[row as usize * 128..][..60]);
            }
            assert_eq!(device(60, 10), [0xa5; 10]);
            assert_eq!(device(5000, 60), &head[..60]);
            assert_eq!(&tail[1000..1300], &head[100..400]);
            assert_eq!((device(7000, 50), device(8000, 60)), (&head[1..51], &head[9..69]));
            if fetched {
                assert_eq!((&tail[2000..2070], &tail[3000..3080]), (&head[100..170], &head[200..280]));
            }
            d.unregister(head.as_mut_ptr()).unwrap();
            d.destroy_event(e).unwrap();
            d.destroy_stream(s).unwrap();
            d.free(memory).unwrap();
        }
    }
    assert_clean(&fake);
}

#[test]
fn an_event_orders_another_stream_behind_the_copy() {
    let fake = fake();
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        fake.configure("hang_copy", "1");
        let api = api(&fake, vendor);
        let context = api.context(0).unwrap();
        let d = context.enter().unwrap();
        let slab = vec![7u8; 4096];
        let memory = d.alloc(4096).unwrap();
        let consumer = fake.stream_create(0, 1);
        // SAFETY: as above.
        unsafe {
            let (s, e) = (d.create_stream().unwrap(), d.create_event().unwrap());
            d.copy_to_device(memory, slab.as_ptr(), 4096, s).unwrap();
            d.record(e, s).unwrap();
            d.stream_wait(Stream(consumer), e).unwrap();
            assert_eq!(fake.launch_check(consumer, memory, 4096, Fake::fnv(&slab), 0), 0);
            fake.release_hang();
            d.synchronize_stream(Stream(consumer)).unwrap();
            d.synchronize_event(e).unwrap();
            d.destroy_event(e).unwrap();
            d.destroy_stream(s).unwrap();
            d.free(memory).unwrap();
        }
        fake.stream_destroy(consumer);
    }
    assert_clean(&fake);
}
