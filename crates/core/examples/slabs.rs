//! Measures the cost of shared slabs beside private ones.
//!
//! ```text
//! cargo run --release -p penstock-core --example slabs -- [--rounds N] [FILE]
//! ```
//!
//! Each round takes 64 fresh slabs of 4 MiB of each kind, private and shared, and does the same with both. A third kind is the
//! shared slabs again, as a neighbour maps them. The table has medians over the rounds, in ms per GiB, and their ratio to
//! private slabs. `FILE`, of 256 MiB or more on a disk, is read past the page cache: wall time, and processor time.

use penstock::staging::{shared_memory_pages, Lease, Ring, Slab};
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLAB: usize = 4 << 20;
const SLABS: usize = 64;
const PAGE: usize = 4096;
const READERS: usize = 4;
const OWNER: [u8; 16] = [1; 16];

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("slabs: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let (mut rounds, mut file) = (9, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--rounds" => rounds = arguments.next().ok_or("--rounds wants a number")?.parse()?,
            path => file = Some(OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?),
        }
    }
    let mut table = Table::default();
    let mut destination = vec![1u8; SLAB * SLABS];
    for round in 0..rounds {
        for shared in [round % 2 == 0, round % 2 == 1] {
            measure(shared, &mut destination, file.as_ref(), &mut table)?;
        }
    }
    table.print();
    println!("{rounds} rounds of {SLABS} slabs; pages of shared ones: {}", shared_memory_pages());
    Ok(())
}

fn measure(shared: bool, destination: &mut [u8], file: Option<&File>, table: &mut Table) -> Outcome<()> {
    let kind = usize::from(shared);
    let (at, slabs) = (Clock::start(), acquire(shared)?);
    slabs.iter().for_each(|slab| touch(slab.address()));
    table.add("map, first touch of each page", kind, at);
    let at = Clock::start();
    drop(slabs);
    table.add("unmap", kind, at);

    let (at, slabs) = (Clock::start(), acquire(shared)?);
    slabs.iter().try_for_each(|slab| populate(slab.address(), libc::MADV_POPULATE_WRITE))?;
    table.add("map, populate", kind, at);
    copies(kind, &slabs.iter().map(|slab| slab.address()).collect::<Vec<_>>(), destination, table);
    if shared {
        let at = Clock::start();
        let adopted = adopt(&slabs)?;
        table.add("map again", 2, at);
        let at = Clock::start();
        adopted.iter().for_each(|slab| look(slab.address()));
        table.add("map, first touch of each page", 2, at);
        copies(2, &adopted.iter().map(|slab| slab.address()).collect::<Vec<_>>(), destination, table);
        let at = Clock::start();
        drop(adopted);
        table.add("unmap", 2, at);
        let (at, adopted) = (Clock::start(), adopt(&slabs)?);
        adopted.iter().try_for_each(|slab| populate(slab.address(), libc::MADV_POPULATE_READ))?;
        table.add("map, populate", 2, at);
        drop(adopted);
        let adopted = adopt(&slabs)?;
        let at = Clock::start();
        copy(&adopted.iter().map(|slab| slab.address()).collect::<Vec<_>>(), destination);
        table.add("first copy out, not populated", 2, at);
    }
    drop(slabs);

    let Some(file) = file else { return Ok(()) };
    let slabs = acquire(shared)?;
    let [wall, cpu] = read(file, &slabs, 0)?;
    table.add_seconds("O_DIRECT, fresh slab", kind, wall);
    table.add_seconds("- processor time", kind, cpu);
    let [wall, cpu] = read(file, &slabs, 0)?;
    table.add_seconds("O_DIRECT, used slab", kind, wall);
    table.add_seconds("- processor time ", kind, cpu);
    let at = Instant::now();
    std::thread::scope(|scope| {
        let each = SLABS / READERS;
        let reader = |(i, slabs)| scope.spawn(move || read(file, slabs, i * each).is_ok());
        let readers: Vec<_> = slabs.chunks(each).enumerate().map(reader).collect();
        readers.into_iter().all(|reader| reader.join().unwrap_or(false)).then_some(()).ok_or("a read failed")
    })?;
    table.add_seconds("O_DIRECT, used slab, 4 at once", kind, at.elapsed().as_secs_f64());
    Ok(())
}

/// Reads the file into the slabs, from the part of slab `first` on. Wall time, and processor time of this thread.
fn read(file: &File, slabs: &[Lease], first: usize) -> std::io::Result<[f64; 2]> {
    let at = Clock::start();
    for (slab, part) in slabs.iter().zip(first..) {
        let offset = (part * SLAB) as libc::off_t;
        // SAFETY: the slab is ours and has so many bytes.
        let n = unsafe { libc::pread(file.as_raw_fd(), slab.address().cast(), SLAB, offset) };
        if n != SLAB as isize {
            return Err(std::io::Error::other("FILE has to have 256 MiB or more"));
        }
    }
    Ok(at.both())
}

/// Fresh slabs, which are not used again.
fn acquire(shared: bool) -> Outcome<Vec<Lease>> {
    let mut share = Ring::process().join(SLAB as u64, (SLAB * SLABS) as u64)?;
    if shared {
        share.share_slabs()?;
    }
    let slabs = (0..SLABS).map(|_| {
        let slab = share.try_acquire()?.ok_or("no room for a slab")?;
        slab.retire();
        Ok(slab)
    });
    slabs.collect()
}

/// The same slabs, as a neighbour has them.
fn adopt(slabs: &[Lease]) -> Outcome<Vec<Arc<Slab>>> {
    let ring = Ring::process();
    let adopt = |lease: &Lease| {
        let ours = ring.slab_at(lease.address()).ok_or("no slab there")?;
        let file = ours.memfd().ok_or("a private slab")?.try_clone_to_owned()?;
        Ok(ring.adopt(file, OWNER, SLAB as u64)?)
    };
    slabs.iter().map(adopt).collect()
}

fn touch(slab: *mut u8) {
    // SAFETY: within a slab of ours.
    (0..SLAB).step_by(PAGE).for_each(|at| unsafe { slab.add(at).write_volatile(1) });
}

fn look(slab: *mut u8) {
    // SAFETY: within a slab that is mapped.
    (0..SLAB).step_by(PAGE).for_each(|at| _ = unsafe { slab.add(at).read_volatile() });
}

fn populate(slab: *mut u8, how: i32) -> Outcome<()> {
    // SAFETY: the range is a slab, whose bytes stay as they are.
    match unsafe { libc::madvise(slab.cast(), SLAB, how) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}

fn copy(slabs: &[*mut u8], destination: &mut [u8]) {
    for (slab, to) in slabs.iter().zip(destination.chunks_exact_mut(SLAB)) {
        // SAFETY: both have so many bytes, and are different memory.
        unsafe { std::ptr::copy_nonoverlapping(*slab, to.as_mut_ptr(), SLAB) };
    }
}

/// Copies out of slabs whose bytes are in no cache, and out of one whose bytes are.
fn copies(kind: usize, slabs: &[*mut u8], destination: &mut [u8], table: &mut Table) {
    copy(slabs, destination);
    let at = Clock::start();
    copy(slabs, destination);
    table.add("copy out of memory", kind, at);
    let hot = vec![slabs[0]; SLABS];
    copy(&hot[..1], destination);
    let at = Clock::start();
    copy(&hot, destination);
    table.add("copy out of the cache", kind, at);
}

/// Wall time and processor time of this thread.
struct Clock(Instant, Duration);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now(), Self::cpu())
    }

    fn cpu() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: it writes to `time` alone.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
    }

    fn both(&self) -> [f64; 2] {
        [self.0.elapsed().as_secs_f64(), (Self::cpu() - self.1).as_secs_f64()]
    }
}

/// By measurement: the seconds of each round, for private, shared and adopted slabs.
#[derive(Default)]
struct Table(Vec<(&'static str, [Vec<f64>; 3])>);

impl Table {
    fn add(&mut self, what: &'static str, kind: usize, at: Clock) {
        // Processor time: nothing here waits, and other programs may run.
        self.add_seconds(what, kind, at.both()[1]);
    }

    fn add_seconds(&mut self, what: &'static str, kind: usize, seconds: f64) {
        let row = self.0.iter().position(|row| row.0 == what).unwrap_or_else(|| {
            self.0.push((what, Default::default()));
            self.0.len() - 1
        });
        self.0[row].1[kind].push(seconds);
    }

    fn print(&mut self) {
        println!("{:32}{:>10}{:>10}{:>8}{:>11}{:>8}", "ms per GiB", "private", "shared", "ratio", "neighbour", "ratio");
        let per_gib = 1e3 * (1 << 30) as f64 / (SLAB * SLABS) as f64;
        for (what, kinds) in &mut self.0 {
            let medians = kinds.each_mut().map(|seconds| {
                seconds.sort_by(f64::total_cmp);
                seconds.get(seconds.len() / 2).map(|median| median * per_gib)
            });
            let [private, shared, neighbour] = medians.map(|m| m.map_or(String::new(), |m| format!("{m:.1}")));
            let ratio =
                |of: Option<f64>| medians[0].zip(of).map_or(String::new(), |(one, of)| format!("{:.2}", of / one));
            println!(
                "{what:32}{private:>10}{shared:>10}{:>8}{neighbour:>11}{:>8}",
                ratio(medians[1]),
                ratio(medians[2])
            );
        }
    }
}
