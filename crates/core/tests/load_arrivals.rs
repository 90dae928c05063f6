//! Whole loads from a source whose bytes come late: it is asked without a slab, and a slab is taken on arrival.
#![allow(clippy::unwrap_used)]

#[path = "checkpoints/mod.rs"]
mod checkpoints;

use penstock::error::{Error, ErrorKind, Result};
use penstock::extent::{Lane, Ticket};
use penstock::format::Checkpoint;
use penstock::load::Load;
use penstock::memory::Keep;
use penstock::options::{Io, Options};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::want::Want;
use penstock::source::{Destination, Done, Progress, Read, Source};
use penstock::store::evict;
use penstock::wake::Wake;
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Of a read, and of a slab.
const EXTENT: u64 = 2 << 20;
const ROWS: u64 = 32 * 1024;
const COLUMNS: u64 = 1024;
/// Rows of so few bytes are copied out of slabs.
const WANTED: u64 = 100;
const SLABS: u64 = 2;

/// A source that answers after `latency`, over another one.
struct Late {
    inner: Box<dyn Source>,
    latency: Option<Duration>,
    /// Requests whose first byte is not there, and when it will be.
    requested: Vec<(Instant, Read)>,
    arrived: HashMap<Ticket, Read>,
    /// Given a place, when `inner` had no room.
    back: Vec<Read>,
    given_up: Vec<Progress>,
    bell: Arc<Wake>,
    /// Most requests at once that had no place.
    most: Arc<AtomicUsize>,
    lands: bool,
    epoll: RawFd,
}

impl Late {
    fn new(inner: Box<dyn Source>, latency: Option<Duration>, lands: bool, most: Arc<AtomicUsize>) -> Late {
        let bell = Arc::new(Wake::new().unwrap());
        // SAFETY: plain system calls; the descriptors live as long as the source.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        for fd in [inner.wake(), bell.fd()] {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: one event is read.
            assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) }, 0);
        }
        let (requested, arrived, back, given_up) = (Vec::new(), HashMap::new(), Vec::new(), Vec::new());
        Late { inner, latency, requested, arrived, back, given_up, bell, most, lands, epoll }
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this source's own.
        unsafe { libc::close(self.epoll) };
    }
}

impl Source for Late {
    fn submit(&mut self, read: Read) -> std::result::Result<(), Read> {
        if !matches!(read.into, Destination::OnArrival) {
            return self.inner.submit(read);
        }
        if let Some(latency) = self.latency {
            let bell = self.bell.clone();
            std::thread::spawn(move || {
                std::thread::sleep(latency);
                bell.notify();
            });
        }
        let never = Duration::from_secs(3600);
        self.requested.push((Instant::now() + self.latency.unwrap_or(never), read));
        self.most.fetch_max(self.requested.len() + self.arrived.len(), Ordering::SeqCst);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.bell.clear();
        events.append(&mut self.given_up);
        self.inner.poll(events)?;
        for read in std::mem::take(&mut self.back) {
            self.back.extend(self.inner.submit(read).err());
        }
        let now = Instant::now();
        while let Some(i) = self.requested.iter().position(|r| r.0 <= now) {
            let (_, read) = self.requested.swap_remove(i);
            events.push(Progress::Arrived(read.ticket));
            self.arrived.insert(read.ticket, read);
        }
        Ok(())
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Keep) -> Result<()> {
        if !self.lands {
            return self.inner.land(ticket, into, keep);
        }
        let read = self.arrived.remove(&ticket).expect("it has arrived, and has no place");
        self.back.extend(self.inner.submit(Read { into, keep, ..read }).err());
        Ok(())
    }

    fn cancel(&mut self) {
        self.inner.cancel();
        let requested = std::mem::take(&mut self.requested).into_iter().map(|r| r.1);
        for read in requested.chain(std::mem::take(&mut self.arrived).into_values()) {
            let result = Err(Error::new(ErrorKind::Cancelled, "given up"));
            self.given_up.push(Progress::Done(Done { ticket: read.ticket, result, lane: Lane::BUFFERED, written: 0 }));
        }
        self.bell.notify();
    }

    fn wake(&self) -> RawFd {
        self.epoll
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.requested.len() + self.arrived.len() + self.back.len() + self.given_up.len()
    }
}

/// The report tells the staging of the whole process: one load at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Bench {
    file: Vec<u8>,
    start: usize,
    checkpoint: Arc<Checkpoint>,
    /// Not on a file system that is memory.
    is_cold: bool,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let nbytes = ROWS * COLUMNS;
        let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{ROWS},{COLUMNS}],"data_offsets":[0,{nbytes}]}}}}"#);
        let mut file = checkpoints::shard(header.as_bytes(), 0);
        let start = file.len();
        file.extend((0..nbytes).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8));
        std::fs::write(&path, &file).unwrap();
        // Short rows in the page cache are read one by one, and hold no slab.
        let is_cold = evict(&path, None).unwrap() == 0;
        let checkpoint = Arc::new(Checkpoint::open(std::slice::from_ref(&path)).unwrap());
        Bench { file, start, checkpoint, is_cold, _folder: folder }
    }

    /// Loads some columns through a late source.
    fn load(&self, latency: Option<Duration>, lands: bool) -> (Load, Arc<AtomicUsize>) {
        let request = Request {
            checkpoint: self.checkpoint.clone(),
            wants: vec![Want::part(0, [0..ROWS, 0..WANTED])],
            layout: None,
            device: Where::Cpu,
            memory: Memory::Ours,
            options: Options {
                io: Io::Buffered,
                extent: EXTENT,
                staging: SLABS * EXTENT,
                depth: 16,
                stall_timeout: Duration::from_secs(if latency.is_some() { 60 } else { 1 }),
                ..Options::default()
            },
            stream: false,
        };
        let most = Arc::new(AtomicUsize::new(0));
        let decorate = |source, _: &_| Ok(Box::new(Late::new(source, latency, lands, most.clone())) as Box<dyn Source>);
        (Load::start_late(request, decorate).unwrap(), most)
    }
}

#[test]
fn requests_on_their_way_hold_no_slab() {
    let _alone = alone();
    let bench = Bench::new();
    if !bench.is_cold {
        return println!("TMPDIR is in memory: nothing goes through slabs");
    }
    let (load, most) = bench.load(Some(Duration::from_millis(50)), true);
    assert!(load.wait(Some(Duration::from_secs(60))).unwrap());
    let requests = most.load(Ordering::SeqCst);
    assert!(requests as u64 >= 4 * SLABS, "{requests} requests were on their way at once");
    let report = load.report();
    assert!(report.peak_staging <= SLABS * EXTENT, "{report:?}");
    assert_eq!(report.routes.of(Lane::BUFFERED).extents, ROWS * COLUMNS / EXTENT, "{report:?}");
    let view = load.view(0).unwrap();
    // SAFETY: the load has ended well, and the view keeps its bytes.
    let got = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
    for (row, got) in got.chunks(WANTED as usize).enumerate() {
        let at = bench.start + row * COLUMNS as usize;
        assert!(got == &bench.file[at..at + WANTED as usize], "row {row}");
    }
}

#[test]
fn requests_that_never_arrive_are_a_stall_that_names_the_file() {
    let _alone = alone();
    let bench = Bench::new();
    if !bench.is_cold {
        return println!("TMPDIR is in memory: nothing goes through slabs");
    }
    let (load, _) = bench.load(None, true);
    let error = load.wait(Some(Duration::from_secs(60))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.path().is_some() && error.byte_range().is_some(), "{error}");
    assert!(error.to_string().contains("nothing moved for 1.0 s with 16 reads and 0 copies in flight"), "{error}");
}

#[test]
fn a_source_that_reports_arrivals_and_takes_no_places_fails_the_load() {
    let _alone = alone();
    let bench = Bench::new();
    if !bench.is_cold {
        return println!("TMPDIR is in memory: nothing goes through slabs");
    }
    let (load, _) = bench.load(Some(Duration::from_millis(1)), false);
    let error = load.wait(Some(Duration::from_secs(60))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    assert!(error.to_string().contains("waits for none"), "{error}");
}
