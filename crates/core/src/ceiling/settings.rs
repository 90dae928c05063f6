//! The settings of a measurement, and its result.

use crate::error::{Error, ErrorKind, Result};
use crate::options::{MIB, PAGE};

/// The quantity that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// O_DIRECT reads into reused buffers.
    Direct,
    /// O_DIRECT reads into memory for all of the bytes.
    Place,
    /// The page cache filled from the disk.
    Populate,
    /// The page cache copied into reused buffers.
    Copy,
    /// The page cache copied into fresh memory.
    Fresh,
    /// Registered host memory copied to a GPU.
    HostToDevice,
    /// Memory of a GPU allocated.
    DeviceAlloc,
}

/// How it is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    /// Threads that pread.
    Threads,
    /// One io_uring: for `Direct`.
    Uring,
    /// Threads that copy out of a mapping of the files: for `Copy` and `Fresh`.
    Mapped,
}

impl Measure {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Direct, Self::Place, Self::Populate, Self::Copy, Self::Fresh, Self::HostToDevice, Self::DeviceAlloc];

    /// Its name in Python and in result files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Place => "place",
            Self::Populate => "populate",
            Self::Copy => "copy",
            Self::Fresh => "fresh",
            Self::HostToDevice => "host_to_device",
            Self::DeviceAlloc => "device_alloc",
        }
    }

    /// The measure of that name.
    ///
    /// # Errors
    /// `Invalid`, with the names that there are.
    pub fn named(name: &str) -> Result<Self> {
        find(&Self::ALL, Self::name, name, "measure")
    }

    /// Whether it needs a GPU and no files.
    pub fn is_of_a_gpu(self) -> bool {
        matches!(self, Self::HostToDevice | Self::DeviceAlloc)
    }

    fn engines(self) -> &'static [Interface] {
        match self {
            Self::Direct => &[Interface::Threads, Interface::Uring],
            Self::Copy | Self::Fresh => &[Interface::Threads, Interface::Mapped],
            _ => &[Interface::Threads],
        }
    }
}

impl Interface {
    /// Its name in Python and in result files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Uring => "uring",
            Self::Mapped => "mapped",
        }
    }

    /// The engine of that name.
    ///
    /// # Errors
    /// `Invalid`, with the names that there are.
    pub fn named(name: &str) -> Result<Self> {
        find(&[Self::Threads, Self::Uring, Self::Mapped], Self::name, name, "engine")
    }
}

fn find<T: Copy>(all: &[T], name_of: impl Fn(T) -> &'static str, name: &str, what: &str) -> Result<T> {
    all.iter().copied().find(|one| name_of(*one) == name).ok_or_else(|| {
        let known: Vec<_> = all.iter().map(|one| name_of(*one)).collect();
        Error::new(ErrorKind::Invalid, format!("there is no {what} {name:?}; there are {}", known.join(", ")))
    })
}

/// The settings of one measurement.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The quantity to measure.
    pub measure: Measure,
    /// How it is measured.
    pub engine: Interface,
    /// Workers; for `HostToDevice` streams.
    pub threads: usize,
    /// Reads in flight of an io_uring; for `HostToDevice` buffers used in turn.
    pub depth: usize,
    /// Bytes of one read, copy or allocation; rounded up to whole pages of 4096 bytes.
    pub block: usize,
    /// The GPU, counted from 0.
    pub device: u32,
    /// Bytes to copy to the GPU or to allocate there; files have a size of their own.
    pub nbytes: u64,
}

impl Settings {
    /// Two threads, eight in flight, blocks of 4 MiB, 1 GiB to the first GPU.
    pub fn new(measure: Measure) -> Self {
        let block = 4 * MIB as usize;
        Self { measure, engine: Interface::Threads, threads: 2, depth: 8, block, device: 0, nbytes: 1 << 30 }
    }
}

/// The result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Bytes moved.
    pub bytes: u64,
    /// Seconds on the clock.
    pub seconds: f64,
}

/// Most threads, and most reads in flight.
const MOST_AT_ONCE: usize = 65_536;

/// Most bytes of one read, copy or allocation.
const LARGEST_BLOCK: usize = 1 << 40;

pub(super) fn checked(settings: &Settings) -> Result<Settings> {
    let engines = settings.measure.engines();
    if !engines.contains(&settings.engine) {
        let known: Vec<_> = engines.iter().map(|engine| engine.name()).collect();
        let (measure, engine) = (settings.measure.name(), settings.engine.name());
        let message = format!("{measure} cannot be measured by {engine}; its engines are {}", known.join(", "));
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    if settings.threads == 0 || settings.depth == 0 || settings.block == 0 {
        return Err(Error::new(ErrorKind::Invalid, "threads, depth and block are at least 1"));
    }
    // So that no product of these numbers overflows.
    if settings.threads > MOST_AT_ONCE || settings.depth > MOST_AT_ONCE || settings.block > LARGEST_BLOCK {
        let text = format!("threads and depth are at most {MOST_AT_ONCE}, and block at most {LARGEST_BLOCK} bytes");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(Settings { block: settings.block.next_multiple_of(PAGE as usize), ..settings.clone() })
}
