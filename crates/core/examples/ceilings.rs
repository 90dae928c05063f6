//! How fast this machine moves the bytes of some files, with no loader in the way. The benchmark puts loaders beside it.
//!
//! ```text
//! ceilings MEASURE [--engine uring|threads] [--threads N] [--depth N] [--block BYTES] FILE...
//! ```
//!
//! | measure | what is timed |
//! |---|---|
//! | `direct` | O_DIRECT reads into a few reused buffers: one io_uring with `depth` reads in flight, or `threads` preads |
//! | `place` | the same preads into memory as large as the files, its pages in use: O_DIRECT with every byte kept |
//! | `copy` | buffered preads into one reused buffer per thread: the page-cache copy rate when the files are warm |
//! | `fresh` | buffered preads into fresh 2 MiB-aligned memory advised to be huge pages: private copies at their fastest |
//! | `populate` | mapping the files and MADV_POPULATE_READ in blocks: the rate at which the page cache fills when cold |
//!
//! Prints one JSON object with `bytes` and `seconds`. Opening the files is not timed, nor is making the memory of `place`;
//! making that of `fresh` is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use io_uring::{opcode, types, IoUring};

const HUGE_PAGE: usize = 2 << 20;
/// O_DIRECT lengths and addresses are multiples of the logical block, 512 or 4096 bytes: 4096 suits both.
const SECTOR: usize = 4096;

struct Settings {
    measure: String,
    engine: String,
    threads: usize,
    depth: usize,
    block: usize,
    paths: Vec<String>,
}

/// One block of one file.
#[derive(Clone, Copy)]
struct Part {
    file: usize,
    offset: u64,
    len: usize,
}

fn main() -> io::Result<()> {
    let settings = settings().map_err(io::Error::other)?;
    let mut options = OpenOptions::new();
    options.read(true);
    if matches!(settings.measure.as_str(), "direct" | "place") {
        options.custom_flags(libc::O_DIRECT);
    }
    let files = settings.paths.iter().map(|path| options.open(path)).collect::<io::Result<Vec<_>>>()?;
    let mut parts = Vec::new();
    let mut bytes = 0;
    for (file, handle) in files.iter().enumerate() {
        let size = handle.metadata()?.len();
        bytes += size;
        for offset in (0..size).step_by(settings.block) {
            parts.push(Part { file, offset, len: (size - offset).min(settings.block as u64) as usize });
        }
    }
    let memory = match settings.measure.as_str() {
        "place" => Some(Places::new(&files, true)?),
        _ => None,
    };
    let start = Instant::now();
    match settings.measure.as_str() {
        "direct" if settings.engine == "uring" => uring(&files, &parts, &settings)?,
        "direct" | "copy" => reused_buffers(&files, &parts, &settings)?,
        "place" => place(&files, &parts, &settings, memory)?,
        "fresh" => place(&files, &parts, &settings, None)?,
        "populate" => populate(&files, &parts, &settings)?,
        other => return Err(io::Error::other(format!("no such measure: {other}"))),
    }
    let seconds = start.elapsed().as_secs_f64();
    let Settings { measure, engine, threads, depth, block, .. } = settings;
    println!(
        "{{\"measure\":\"{measure}\",\"engine\":\"{engine}\",\"threads\":{threads},\"depth\":{depth},\
         \"block\":{block},\"bytes\":{bytes},\"seconds\":{seconds:.6}}}"
    );
    Ok(())
}

fn settings() -> Result<Settings, String> {
    let mut arguments = std::env::args().skip(1);
    let measure = arguments.next().ok_or("usage: ceilings direct|place|copy|fresh|populate [--engine ...] FILE...")?;
    let mut settings =
        Settings { measure, engine: "threads".into(), threads: 2, depth: 8, block: 4 << 20, paths: Vec::new() };
    while let Some(argument) = arguments.next() {
        let Some(name) = argument.strip_prefix("--") else {
            settings.paths.push(argument);
            continue;
        };
        let value = arguments.next().ok_or(format!("--{name} needs a value"))?;
        let number = || value.parse::<usize>().map_err(|error| format!("--{name} {value}: {error}"));
        match name {
            "engine" => settings.engine = value,
            "threads" => settings.threads = number()?.max(1),
            "depth" => settings.depth = number()?.max(1),
            "block" => settings.block = number()?.max(1).next_multiple_of(SECTOR),
            _ => return Err(format!("no such option: --{name}")),
        }
    }
    if settings.paths.is_empty() {
        return Err("no files given".into());
    }
    Ok(settings)
}

/// Anonymous memory that starts at a huge page.
struct Memory {
    mapping: usize,
    mapped: usize,
    start: usize,
    len: usize,
}

impl Memory {
    fn new(len: usize) -> io::Result<Self> {
        let mapped = len + HUGE_PAGE;
        // SAFETY: a new anonymous mapping; nothing else refers to it.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = (mapping as usize).next_multiple_of(HUGE_PAGE);
        // SAFETY: the range lies in the mapping made above. Advice only: a kernel without huge pages refuses it, and the
        // measure is then that of small pages.
        unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_HUGEPAGE) };
        Ok(Self { mapping: mapping as usize, mapped, start, len })
    }

    /// `len` bytes from `offset`, as an address: threads and the kernel write disjoint parts of it.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.len);
        (self.start + offset) as *mut u8
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made; the readers have ended.
        unsafe { libc::munmap(self.mapping as *mut libc::c_void, self.mapped) };
    }
}

fn ended_early(part: &Part) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("file {} ended before {}", part.file, part.offset))
}

/// Reads `part` whole into `buffer`, whose length may be rounded up to a sector beyond the end of the file.
fn read_part(file: &File, part: &Part, buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < part.len {
        match file.read_at(&mut buffer[done..], part.offset + done as u64)? {
            0 => return Err(ended_early(part)),
            count => done += count,
        }
    }
    Ok(())
}

/// `threads` workers take parts from one queue.
fn in_threads(parts: &[Part], threads: usize, work: impl Fn(usize, &Part) -> io::Result<()> + Sync) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                let (next, work) = (&next, &work);
                scope.spawn(move || {
                    while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                        work(worker, part)?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| io::Error::other("a worker panicked"))?)
    })
}

fn reused_buffers(files: &[File], parts: &[Part], settings: &Settings) -> io::Result<()> {
    let memory = Memory::new(settings.threads * settings.block)?;
    in_threads(parts, settings.threads, |worker, part| {
        let len = part.len.next_multiple_of(SECTOR);
        let at = memory.at(worker * settings.block, len);
        // SAFETY: inside the memory, and each worker has a block of its own.
        let buffer = unsafe { std::slice::from_raw_parts_mut(at, len) };
        read_part(&files[part.file], part, buffer)
    })
}

/// Memory for every byte of some files. Each file starts at a huge page, so that two workers meet in one only when the
/// block is smaller than that.
struct Places {
    memory: Memory,
    starts: Vec<usize>,
}

impl Places {
    fn new(files: &[File], in_use: bool) -> io::Result<Self> {
        let mut starts = Vec::with_capacity(files.len());
        let mut total: usize = 0;
        for file in files {
            starts.push(total);
            total = (total + file.metadata()?.len() as usize).next_multiple_of(HUGE_PAGE);
        }
        let memory = Memory::new(total)?;
        if in_use {
            let at = memory.at(0, total).cast();
            // SAFETY: the whole of the mapping just made, which nobody reads yet.
            unsafe { std::ptr::write_bytes::<u8>(at, 1, total) };
        }
        Ok(Self { memory, starts })
    }
}

fn place(files: &[File], parts: &[Part], settings: &Settings, places: Option<Places>) -> io::Result<()> {
    let direct = places.is_some();
    let Places { memory, starts } = places.map_or_else(|| Places::new(files, false), Ok)?;
    in_threads(parts, settings.threads, |_, part| {
        // A block of a file ends before the next file's huge page, also when it is whole sectors.
        let len = if direct { part.len.next_multiple_of(SECTOR) } else { part.len };
        let at = memory.at(starts[part.file] + part.offset as usize, len);
        // SAFETY: inside the memory, and each part has a range of its own.
        let buffer = unsafe { std::slice::from_raw_parts_mut(at, len) };
        read_part(&files[part.file], part, buffer)
    })
}

fn populate(files: &[File], parts: &[Part], settings: &Settings) -> io::Result<()> {
    let mut maps = Vec::with_capacity(files.len());
    for file in files {
        let len = file.metadata()?.len() as usize;
        // Where a huge page starts, so that the cache can be filled, and mapped, in huge pages.
        let room = std::mem::ManuallyDrop::new(Memory::new(len)?);
        let (at, flags) = (room.at(0, len).cast(), libc::MAP_PRIVATE | libc::MAP_FIXED);
        // SAFETY: over memory just reserved, which is never unmapped or used otherwise: the process ends right after.
        let map = unsafe { libc::mmap(at, len, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping just made. Advice only.
        unsafe { libc::madvise(map, len, libc::MADV_HUGEPAGE) };
        maps.push(map as usize);
    }
    in_threads(parts, settings.threads, |_, part| {
        let at = (maps[part.file] + part.offset as usize) as *mut libc::c_void;
        // SAFETY: inside the mapping of that file; populating changes no byte.
        if unsafe { libc::madvise(at, part.len, libc::MADV_POPULATE_READ) } == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    })
}

fn uring(files: &[File], parts: &[Part], settings: &Settings) -> io::Result<()> {
    let depth = settings.depth.min(parts.len());
    let memory = Memory::new(depth * settings.block)?;
    let mut ring = IoUring::new(depth as u32)?;
    let submit = |ring: &mut IoUring, buffer: usize, index: usize, done: usize| -> io::Result<()> {
        let part = &parts[index];
        let len = part.len.next_multiple_of(SECTOR) - done;
        let at = memory.at(buffer * settings.block + done, len);
        let read = opcode::Read::new(types::Fd(files[part.file].as_raw_fd()), at, len as u32)
            .offset(part.offset + done as u64)
            .build()
            .user_data((index * depth + buffer) as u64);
        // SAFETY: the memory and the files outlive the ring's last completion; a buffer has one read at a time.
        unsafe { ring.submission().push(&read) }.map_err(|_| io::Error::other("the submission queue is full"))
    };
    for index in 0..depth {
        submit(&mut ring, index, index, 0)?;
    }
    let (mut next, mut finished) = (depth, 0);
    let mut done = vec![0; depth];
    let mut arrived = Vec::with_capacity(depth);
    while finished < parts.len() {
        ring.submit_and_wait(1)?;
        arrived.extend(ring.completion().map(|entry| (entry.user_data() as usize, entry.result())));
        for (data, result) in arrived.drain(..) {
            let (index, buffer) = (data / depth, data % depth);
            match result {
                ..0 => return Err(io::Error::from_raw_os_error(-result)),
                0 => return Err(ended_early(&parts[index])),
                _ => done[buffer] += result as usize,
            }
            if done[buffer] < parts[index].len {
                submit(&mut ring, buffer, index, done[buffer])?;
                continue;
            }
            done[buffer] = 0;
            finished += 1;
            if next < parts.len() {
                submit(&mut ring, buffer, next, 0)?;
                next += 1;
            }
        }
    }
    Ok(())
}
