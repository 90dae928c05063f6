//! A file with known bytes, memory to read it into, and how to wait.

use penstock::extent::{Lane, Ticket};
use penstock::source::{Destination, Done, Progress, Read, Source};
use penstock::store::Files;
use std::any::Any;
use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub(crate) const PAGE: u64 = 4096;
/// An odd size, so that the tail of the file suits no alignment.
pub(crate) const SIZE: u64 = (6 << 20) + 1234;

/// A file of bytes that nothing else looks like, and those bytes.
pub(crate) struct Sample {
    pub(crate) path: PathBuf,
    pub(crate) bytes: &'static [u8],
    _folder: tempfile::TempDir,
}

impl Sample {
    pub(crate) fn new() -> Sample {
        // Next to the build: that is a disk where /tmp may be a tmpfs.
        Self::within(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    pub(crate) fn within(folder: &Path) -> Sample {
        let folder = tempfile::tempdir_in(folder).unwrap();
        static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
        let bytes = BYTES.get_or_init(|| {
            let mut random = Random(0x9e37_79b9_7f4a_7c15);
            (0..SIZE).map(|_| random.next() as u8).collect()
        });
        let path = folder.path().join("sample.safetensors");
        fs::write(&path, bytes).unwrap();
        Sample { path, bytes, _folder: folder }
    }

    pub(crate) fn files(&self) -> Arc<Files> {
        Arc::new(Files::from_paths(&[&self.path]).unwrap())
    }
}

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Memory that suits O_DIRECT, or the mapping of a file.
pub(crate) struct Memory {
    pub(crate) at: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: plain memory; tests look at it only when its reads are done.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(len: u64) -> Arc<Memory> {
        Self::map(len, -1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }
    pub(crate) fn of(path: &Path, len: u64) -> Arc<Memory> {
        let file = fs::File::open(path).unwrap();
        Self::map(len, file.as_raw_fd(), libc::MAP_PRIVATE)
    }
    pub(crate) fn map(len: u64, fd: RawFd, flags: i32) -> Arc<Memory> {
        let len = len as usize;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, placed by the kernel.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, both, flags, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Arc::new(Memory { at: at.cast(), len })
    }
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes from `at` on are ours.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl Memory {
    /// Writes to every page of it.
    pub(crate) fn mark(&self) {
        for at in (0..self.len).step_by(PAGE as usize) {
            // SAFETY: within the mapping, which is writable and has no other user by now.
            unsafe { self.at.add(at).write_volatile(0xa5) };
        }
    }
    /// Whether everything is as `mark` left it (one byte in 256 is so by itself).
    pub(crate) fn is_marked(&self) -> bool {
        self.bytes().iter().step_by(PAGE as usize).all(|b| *b == 0xa5)
    }
}

impl Memory {
    /// Bytes of it whose pages this process has not mapped: the kernel's page tables say so.
    pub(crate) fn unmapped(&self) -> u64 {
        use std::os::unix::fs::FileExt;
        // SAFETY: a plain system call.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let mut entries = vec![0; self.len.div_ceil(page) * 8];
        let at = self.at as u64 / page as u64 * 8;
        fs::File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entries, at).unwrap();
        // Bit 63 of each little-endian entry: present.
        entries.chunks_exact(8).filter(|e| e[7] & 0x80 == 0).count() as u64 * page as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nobody holds it any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

pub(crate) fn keep(memory: &Arc<Memory>) -> Arc<dyn Any + Send + Sync> {
    memory.clone()
}

/// An extent as the schedule makes them: O_DIRECT ones on whole pages, past the end of the file by less than a page.
pub(crate) fn extent(lane: Lane, begin: u64, end: u64) -> (u64, u64, u64) {
    match lane {
        Lane::DIRECT => {
            let offset = begin / PAGE * PAGE;
            (offset, end.next_multiple_of(PAGE) - offset, end - offset)
        }
        _ => (begin, end - begin, end - begin),
    }
}

/// A read of those bytes into new memory (or of their mapping).
pub(crate) fn read(lane: Lane, ticket: u64, sample: &Sample, begin: u64, end: u64) -> (Read, Arc<Memory>) {
    let (offset, len, need) = extent(lane, begin, end);
    let (memory, into) = match lane {
        Lane::MAPPED => {
            let memory = Memory::of(&sample.path, SIZE);
            // SAFETY: within the mapping.
            let at = unsafe { memory.at.add(offset as usize) };
            (memory, Destination::Mapping { at, resident: false })
        }
        _ => {
            let memory = Memory::new(len.max(1));
            let at = memory.at;
            (memory, Destination::Memory(at))
        }
    };
    let keep = keep(&memory);
    (Read { ticket: Ticket(ticket), file: 0, offset, len, need, lane, into, fresh: true, written: 0, keep }, memory)
}

/// Waits on the wake descriptor until `n` reads are done. Fails if it wakes far more often than there are reads.
pub(crate) fn wait(source: &mut dyn Source, n: usize) -> Vec<Done> {
    let mut done = Vec::new();
    let until = Instant::now() + Duration::from_secs(20);
    let mut woken = 0;
    while done.len() < n {
        source.flush().unwrap();
        poll(source, &mut done);
        if done.len() < n {
            assert!(Instant::now() < until, "{} of {n} reads came back in 20 s", done.len());
            readable(source.wake(), 1000);
            woken += 1;
        }
    }
    assert!(woken <= 20 * n + 20, "woke {woken} times for {n} reads: it spins");
    assert_eq!(done.len(), n, "more tickets came back than were given");
    done
}

/// Appends the reads that are done. All of them had a place to land, so none may arrive first.
pub(crate) fn poll(source: &mut dyn Source, done: &mut Vec<Done>) {
    let mut events = Vec::new();
    source.poll(&mut events).unwrap();
    done.extend(events.into_iter().filter_map(|event| match event {
        Progress::Done(done) => Some(done),
        // A busy machine.
        Progress::Received(_) | Progress::Refused { .. } => None,
        Progress::Arrived(ticket) => panic!("{ticket:?} arrived, and had its place"),
    }));
}

pub(crate) fn readable(fd: RawFd, ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&raw mut p, 1, ms) == 1 }
}

/// The file of an error: of an address on this machine, its path, which is that of the file which the server sends.
pub(crate) fn file_of(e: &penstock::Error) -> Option<&Path> {
    let text = e.path()?.to_str()?;
    Some(Path::new(match text.strip_prefix("http://") {
        Some(rest) => &rest[rest.find('/')?..],
        None => text,
    }))
}

pub(crate) fn submit_all(source: &mut dyn Source, reads: Vec<Read>) -> Vec<Done> {
    let n = reads.len();
    let mut done = Vec::new();
    for mut read in reads {
        while let Err(back) = source.submit(read) {
            read = back;
            assert!(source.in_flight() > 0, "refused a read with nothing in flight");
            done.extend(wait_some(source));
        }
    }
    let left = n - done.len();
    done.extend(wait(source, left));
    assert_eq!(source.in_flight(), 0);
    done
}

pub(crate) fn wait_some(source: &mut dyn Source) -> Vec<Done> {
    let mut done = Vec::new();
    source.flush().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while done.is_empty() {
        assert!(Instant::now() < until, "nothing came back in 20 s");
        readable(source.wake(), 1000);
        poll(source, &mut done);
    }
    done
}

/// CPU time of this thread.
pub(crate) fn cpu_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Threads and descriptors of this process.
pub(crate) fn belongings() -> (usize, usize) {
    (fs::read_dir("/proc/self/task").unwrap().count(), fs::read_dir("/proc/self/fd").unwrap().count())
}

/// Runs one test of this binary alone in a process of its own, because it counts what the process has.
pub(crate) fn alone(name: &str, body: impl FnOnce()) {
    if std::env::var_os("PENSTOCK_TEST_ALONE").is_some_and(|v| v == name) {
        return body();
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env("PENSTOCK_TEST_ALONE", name)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}
