//! What tests of devices share.
#![allow(dead_code, clippy::unwrap_used)]

use fakegpu::Exclusive;
use penstock::device::api::{Api, Vendor};
use penstock::device::cpu::CpuDevice;
use penstock::device::gpu::{release_staging, GpuDevice, GpuMemory, SharedContext};
use penstock::device::{Batch, Copied, Copy, Device};
use penstock::extent::Ticket;
use penstock::staging::Ring;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Far longer than anything here takes, so that a hang is a failure and a busy machine is not.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of a slab that tests use.
pub(crate) const SLAB: usize = 1 << 20;

/// Calls that the fake driver ignores (`ignore`): without them something is not waited for, or not registered.
pub(crate) const NOTHING: &str = "";
pub(crate) const WAITS_FOR_FENCES: &str = "cuStreamWaitEvent";
pub(crate) const WAITS_FOR_COPIES: &str = "cuEventSynchronize@penstock-gpuwait";
pub(crate) const WAITS_FOR_SCRATCH: &str = "cuEventSynchronize@penstock-gpu";
pub(crate) const REGISTRATIONS: &str = "cuMemHostRegister_v2,cuMemHostUnregister";

/// What a kind of device needs to be tested.
pub(crate) trait Kind {
    type Memory: Any + Send + Sync;
    fn device(&self) -> Box<dyn Device>;
    /// Destination memory of this size and its address; what it contains is unknown.
    fn memory(&self, nbytes: usize) -> (Self::Memory, u64);
    /// What is in it now, given that no copy is pending.
    fn bytes(&self, memory: &Self::Memory) -> Vec<u8>;
    fn slab(&self) -> Arc<TestSlab>;
    /// Called before the host writes to a slab.
    fn before_write(&self, slab: &TestSlab);
    /// Called at the end, when nothing of the device's is left.
    fn check(&self);
}

pub(crate) struct Cpu;

impl Kind for Cpu {
    type Memory = Bytes;

    fn device(&self) -> Box<dyn Device> {
        Box::new(CpuDevice::new(3).unwrap())
    }

    fn memory(&self, nbytes: usize) -> (Bytes, u64) {
        let bytes = Bytes::new(nbytes);
        let address = bytes.address() as u64;
        (bytes, address)
    }

    fn bytes(&self, memory: &Bytes) -> Vec<u8> {
        // SAFETY: no copy is pending when this is called.
        unsafe { (*memory.0).to_vec() }
    }

    fn slab(&self) -> Arc<TestSlab> {
        let bytes = Bytes::new(SLAB);
        Arc::new(TestSlab { address: bytes.address(), keep: Box::new(bytes) })
    }

    fn before_write(&self, _: &TestSlab) {}

    fn check(&self) {}
}

/// A GPU of the fake driver, which is this test's alone.
pub(crate) struct Gpu {
    pub(crate) fake: Exclusive,
    pub(crate) api: Arc<Api>,
}

impl Gpu {
    pub(crate) fn new(vendor: Vendor) -> Self {
        let fake = fakegpu::Library::exclusive().unwrap();
        // What an earlier test left, if it failed, belongs to a driver that no longer knows it.
        release_staging();
        fake.reset();
        fake.configure("strict", "1");
        let api = Api::load_from(fake.path(), Some(vendor)).unwrap();
        Self { fake, api }
    }

    pub(crate) fn gpu(&self) -> GpuDevice {
        GpuDevice::new(&self.api, 0).unwrap()
    }

    pub(crate) fn context(&self) -> Arc<SharedContext> {
        SharedContext::retain(&self.api, 0).unwrap()
    }
}

impl Kind for Gpu {
    type Memory = GpuMemory;

    fn device(&self) -> Box<dyn Device> {
        Box::new(self.gpu())
    }

    fn memory(&self, nbytes: usize) -> (GpuMemory, u64) {
        let memory = GpuMemory::new(&self.context(), nbytes as u64).unwrap();
        let address = memory.address();
        (memory, address)
    }

    fn bytes(&self, memory: &GpuMemory) -> Vec<u8> {
        self.fake.host_access(memory.address(), memory.nbytes(), 0);
        // SAFETY: the fake's device memory is host memory.
        unsafe { std::slice::from_raw_parts(memory.address() as *const u8, memory.nbytes() as usize).to_vec() }
    }

    fn slab(&self) -> Arc<TestSlab> {
        let share = Ring::process().join(SLAB as u64, 64 << 20).unwrap();
        let lease = share.try_acquire().unwrap().unwrap();
        Arc::new(TestSlab { address: lease.address(), keep: Box::new((lease, share)) })
    }

    fn before_write(&self, slab: &TestSlab) {
        self.fake.host_access(slab.address as u64, SLAB as u64, 1);
    }

    fn check(&self) {
        release_staging();
        assert_eq!((self.fake.misuses(), self.fake.leaks()), (vec![], vec![]));
    }
}

pub(crate) struct TestSlab {
    address: *mut u8,
    keep: Box<dyn Any + Send + Sync>,
}

/// A shared slab with these bytes, as a neighbour has it: its descriptor. It lives as long as its lease.
pub(crate) fn shared_slab(content: &[u8]) -> (OwnedFd, Box<dyn Any>) {
    let mut share = Ring::process().join(SLAB as u64, 64 << 20).unwrap();
    share.share_slabs().unwrap();
    let lease = share.try_acquire().unwrap().unwrap();
    let slab = Ring::process().slab_at(lease.address()).unwrap();
    let address = lease.address();
    let ours = TestSlab { address, keep: Box::new((lease, share)) };
    ours.fill(content);
    (slab.memfd().unwrap().try_clone_to_owned().unwrap(), Box::new(ours))
}

/// A neighbour's slab, mapped here.
pub(crate) fn adopted_slab(slab: OwnedFd) -> Arc<TestSlab> {
    let slab = Ring::process().adopt(slab, [1; 16], SLAB as u64).unwrap();
    Arc::new(TestSlab { address: slab.address(), keep: Box::new(slab) })
}

// SAFETY: plain memory.
unsafe impl Send for TestSlab {}
// SAFETY: plain memory.
unsafe impl Sync for TestSlab {}

impl TestSlab {
    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Whether the slab still begins with these bytes, after its copies.
    pub(crate) fn holds(&self, content: &[u8]) -> bool {
        assert!(content.len() <= SLAB);
        // SAFETY: nothing writes to the slab now.
        unsafe { std::slice::from_raw_parts(self.address, content.len()) == content }
    }

    /// Writes to the slab as a read from a file would.
    pub(crate) fn fill(&self, content: &[u8]) {
        assert!(content.len() <= SLAB);
        // SAFETY: no copy out of this slab is pending, or this is what the test is about.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.address, content.len()) };
    }
}

/// A boxed slice behind a raw pointer, as devices write to it behind Rust's back.
pub(crate) struct Bytes(*mut [u8]);
// SAFETY: plain memory.
unsafe impl Send for Bytes {}
// SAFETY: plain memory.
unsafe impl Sync for Bytes {}
impl Bytes {
    fn new(nbytes: usize) -> Self {
        Self(Box::leak(vec![0xEE; nbytes].into_boxed_slice()))
    }

    fn address(&self) -> *mut u8 {
        self.0.cast()
    }
}
impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: from `Box::leak`, once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Waits by the wake descriptor, never by spinning, until `n` batches are back.
pub(crate) fn collect(device: &mut dyn Device, n: usize) -> Vec<Copied> {
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

pub(crate) fn noise(seed: u64) -> Vec<u8> {
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

/// Counts how many of its batches still hold their memory.
pub(crate) struct Held(Arc<AtomicUsize>, #[allow(dead_code)] Box<dyn Any + Send + Sync>);
impl Held {
    pub(crate) fn new(count: &Arc<AtomicUsize>, what: impl Any + Send + Sync) -> Arc<Self> {
        count.fetch_add(1, Ordering::SeqCst);
        Arc::new(Self(count.clone(), Box::new(what)))
    }
}
impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One dense copy.
pub(crate) fn dense(from: *mut u8, to: u64, len: u64) -> Copy {
    Copy { from, to, len, rows: 1, from_stride: len, to_stride: len, block: 0, pad: 0 }
}

/// A batch that copies a whole slab.
pub(crate) fn whole_slab(
    ticket: u64,
    slab: &Arc<TestSlab>,
    to: u64,
    count: &Arc<AtomicUsize>,
    memory: Arc<impl Any + Send + Sync>,
) -> Batch {
    Batch {
        ticket: Ticket(ticket),
        slab: (slab.address(), SLAB),
        copies: vec![dense(slab.address(), to, SLAB as u64)],
        strided: Default::default(),
        keep: Held::new(count, (slab.clone(), memory)),
    }
}

pub(crate) fn open_files_and_threads() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Runs `test` in a process of its own, since counting threads and descriptors needs one, as does forking.
pub(crate) fn alone(name: &str, test: impl FnOnce()) {
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
