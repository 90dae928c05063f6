//! Measures on files.

use super::settings::{Interface, Measure, Measured, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Anonymous, Mapping};
use crate::options::{HUGE_PAGE, PAGE};
use io_uring::{opcode, types, IoUring};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// O_DIRECT lengths and addresses are multiples of the logical block, 512 or 4096 bytes: 4096 suits both.
const SECTOR: usize = PAGE as usize;

/// The files, opened, and cut into blocks.
struct OpenFiles<'a> {
    paths: &'a [PathBuf],
    files: Vec<File>,
    sizes: Vec<u64>,
    parts: Vec<FileBlock>,
}

/// One block of one file.
#[derive(Clone, Copy)]
struct FileBlock {
    file: usize,
    offset: u64,
    len: usize,
}

impl<'a> OpenFiles<'a> {
    fn open(paths: &'a [PathBuf], direct: bool, block: usize) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(if direct { libc::O_DIRECT } else { 0 });
        let (mut files, mut sizes, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for (number, path) in paths.iter().enumerate() {
            let opened = options.open(path).and_then(|file| file.metadata().map(|about| (file, about.len())));
            let (file, size) = opened.map_err(|cause| Error::io("open", &cause).at(path))?;
            for offset in (0..size).step_by(block) {
                parts.push(FileBlock { file: number, offset, len: (size - offset).min(block as u64) as usize });
            }
            files.push(file);
            sizes.push(size);
        }
        Ok(Self { paths, files, sizes, parts })
    }

    fn failed(&self, part: &FileBlock, error: Error) -> Error {
        error.at(&self.paths[part.file]).range(part.offset..part.offset + part.len as u64)
    }

    fn ended_early(&self, part: &FileBlock) -> Error {
        self.failed(part, Error::new(ErrorKind::Truncated, "the file ended early"))
    }

    /// Reads `part` whole into `buffer`, whose length may be rounded up to a sector beyond the end of the file.
    fn read(&self, part: &FileBlock, buffer: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < part.len {
            match self.files[part.file].read_at(&mut buffer[done..], part.offset + done as u64) {
                Ok(0) => return Err(self.ended_early(part)),
                Ok(count) => done += count,
                Err(cause) => return Err(self.failed(part, Error::io("read", &cause))),
            }
        }
        Ok(())
    }
}

pub(super) fn measure(settings: &Settings, paths: &[PathBuf]) -> Result<Measured> {
    let direct = matches!(settings.measure, Measure::Direct | Measure::Place);
    let source = OpenFiles::open(paths, direct, settings.block)?;
    let in_use = (settings.measure == Measure::Place).then(|| Places::new(&source, true)).transpose()?;
    let start = Instant::now();
    match (settings.measure, settings.engine, &in_use) {
        (_, _, Some(places)) => place(&source, places, settings)?,
        (Measure::Direct, Interface::Uring, _) => uring(&source, settings)?,
        (Measure::Direct | Measure::Copy, Interface::Threads, _) => reused_buffers(&source, settings)?,
        (Measure::Copy | Measure::Fresh, Interface::Mapped, _) => copied_from_mappings(&source, settings)?,
        (Measure::Fresh, ..) => place(&source, &Places::new(&source, false)?, settings)?,
        _ => populate(&source, settings)?,
    }
    Ok(Measured { bytes: source.sizes.iter().sum(), seconds: start.elapsed().as_secs_f64() })
}

/// `threads` workers take parts from one queue.
fn in_threads(
    parts: &[FileBlock],
    threads: usize,
    work: impl Fn(usize, &FileBlock) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        let mut refused = None;
        for worker in 0..threads {
            let (next, work) = (&next, &work);
            let body = move || {
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(worker, part)?;
                }
                Ok(())
            };
            match std::thread::Builder::new().spawn_scoped(scope, body) {
                Ok(thread) => workers.push(thread),
                Err(cause) => {
                    // With fewer threads the measurement would be a different one.
                    next.store(parts.len(), Ordering::Relaxed);
                    let text = format!("cannot start thread {} of {threads}: {cause}", worker + 1);
                    refused = Some(Error::new(ErrorKind::Limit, text));
                    break;
                }
            }
        }
        let panicked = |_| Error::new(ErrorKind::Internal, "a worker panicked");
        let done = workers.into_iter().try_for_each(|worker| worker.join().map_err(panicked)?);
        refused.map_or(done, Err)
    })
}

/// `len` bytes from `offset`, as an address: threads and the kernel write disjoint parts of one memory.
fn within(memory: &Anonymous, offset: usize, len: usize) -> *mut u8 {
    assert!(offset + len <= memory.len());
    memory.at().wrapping_add(offset)
}

fn reused_buffers(source: &OpenFiles<'_>, settings: &Settings) -> Result<()> {
    let memory = Anonymous::new((settings.threads * settings.block) as u64)?;
    in_threads(&source.parts, settings.threads, |worker, part| {
        let len = part.len.next_multiple_of(SECTOR);
        let to = within(&memory, worker * settings.block, len);
        // SAFETY: inside the memory, and each worker has a block of its own.
        source.read(part, unsafe { std::slice::from_raw_parts_mut(to, len) })
    })
}

/// Memory for every byte of the files. Each file starts at a huge page, so that two workers share a huge page only if
/// the block is smaller than that.
struct Places {
    memory: Anonymous,
    starts: Vec<usize>,
}

impl Places {
    fn new(source: &OpenFiles<'_>, in_use: bool) -> Result<Self> {
        let mut starts = Vec::with_capacity(source.sizes.len());
        let mut total: usize = 0;
        for size in &source.sizes {
            starts.push(total);
            total = (total + *size as usize).next_multiple_of(HUGE_PAGE as usize);
        }
        let memory = Anonymous::new(total as u64)?;
        if in_use {
            // SAFETY: the mapping just made, which nobody else knows.
            unsafe { memory.at().write_bytes(1, total) };
        }
        Ok(Self { memory, starts })
    }

    fn offset(&self, part: &FileBlock) -> usize {
        self.starts[part.file] + part.offset as usize
    }
}

fn place(source: &OpenFiles<'_>, places: &Places, settings: &Settings) -> Result<()> {
    let direct = settings.measure == Measure::Place;
    in_threads(&source.parts, settings.threads, |_, part| {
        // A block of a file ends before the next file's huge page, even when it is rounded up to whole sectors.
        let len = if direct { part.len.next_multiple_of(SECTOR) } else { part.len };
        let to = within(&places.memory, places.offset(part), len);
        // SAFETY: inside the memory, and each part has a range of its own.
        source.read(part, unsafe { std::slice::from_raw_parts_mut(to, len) })
    })
}

fn mapped(source: &OpenFiles<'_>) -> Result<Vec<Mapping>> {
    let files = source.files.iter().zip(&source.sizes).zip(source.paths);
    files.map(|((file, size), path)| Mapping::new(file, *size).map_err(|error| error.at(path))).collect()
}

/// The pages of `part`, brought into the page cache and into the mapping's page table.
fn populate_part(source: &OpenFiles<'_>, maps: &[Mapping], part: &FileBlock) -> Result<*const u8> {
    let at = maps[part.file].at().wrapping_add(part.offset as usize);
    // SAFETY: inside the mapping of that file; populating changes no byte.
    if unsafe { libc::madvise(at.cast(), part.len, libc::MADV_POPULATE_READ) } == 0 {
        return Ok(at);
    }
    Err(source.failed(part, Error::io("populate", &io::Error::last_os_error())))
}

fn populate(source: &OpenFiles<'_>, settings: &Settings) -> Result<()> {
    let maps = mapped(source)?;
    in_threads(&source.parts, settings.threads, |_, part| populate_part(source, &maps, part).map(drop))
}

fn copied_from_mappings(source: &OpenFiles<'_>, settings: &Settings) -> Result<()> {
    let maps = mapped(source)?;
    let fresh = (settings.measure == Measure::Fresh).then(|| Places::new(source, false)).transpose()?;
    let reused = Anonymous::new((settings.threads * settings.block) as u64)?;
    in_threads(&source.parts, settings.threads, |worker, part| {
        let from = populate_part(source, &maps, part)?;
        let to = match &fresh {
            Some(places) => within(&places.memory, places.offset(part), part.len),
            None => within(&reused, worker * settings.block, part.len),
        };
        // SAFETY: the part was populated just now, so it lies within the file, and its mapping outlives the workers. Each
        // worker has a block of its own, each part a range of its own.
        unsafe { std::ptr::copy_nonoverlapping(from, to, part.len) };
        Ok(())
    })
}

fn uring(source: &OpenFiles<'_>, settings: &Settings) -> Result<()> {
    let parts = &source.parts;
    let depth = settings.depth.min(parts.len());
    if depth == 0 {
        return Ok(());
    }
    let refused = |cause: io::Error| Error::io("set up or wait for io_uring", &cause);
    let memory = Anonymous::new((depth * settings.block) as u64)?;
    let mut ring = IoUring::new(depth as u32).map_err(refused)?;
    let submit = |ring: &mut IoUring, buffer: usize, index: usize, done: usize| -> Result<()> {
        let part = &parts[index];
        let len = part.len.next_multiple_of(SECTOR) - done;
        let to = within(&memory, buffer * settings.block + done, len);
        let read = opcode::Read::new(types::Fd(source.files[part.file].as_raw_fd()), to, len as u32)
            .offset(part.offset + done as u64)
            .build()
            .user_data((index * depth + buffer) as u64);
        // SAFETY: a buffer has one read at a time. The memory and the files outlive the ring; where an error ends this
        // early, pages that a read in flight still writes to are the kernel's until it has ended.
        unsafe { ring.submission().push(&read) }
            .map_err(|_| Error::new(ErrorKind::Internal, "the submission queue is full"))
    };
    for index in 0..depth {
        submit(&mut ring, index, index, 0)?;
    }
    let (mut next, mut finished) = (depth, 0);
    let mut done = vec![0; depth];
    let mut arrived = Vec::with_capacity(depth);
    while finished < parts.len() {
        ring.submit_and_wait(1).map_err(refused)?;
        arrived.extend(ring.completion().map(|entry| (entry.user_data() as usize, entry.result())));
        for (data, result) in arrived.drain(..) {
            let (index, buffer) = (data / depth, data % depth);
            match result {
                ..0 => {
                    let cause = io::Error::from_raw_os_error(-result);
                    return Err(source.failed(&parts[index], Error::io("read", &cause)));
                }
                0 => return Err(source.ended_early(&parts[index])),
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
