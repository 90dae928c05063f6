//! How the files of a load travel. `plan/routing.rs` decides it once, before the load starts; sources obey.

use crate::extent::Lane;
use crate::options::MIB;
use crate::sync::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Loads with fewer cold bytes than this do not try the pace of the storage. They keep. A trial times a third of it each way.
pub const WORTH_A_TRIAL: u64 = 72 * MIB;

/// How the bytes of one file travel, and what that does to the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// Lane of wants that keep their place in the file. They are handed out in its mapping; nothing of them is copied. `None`:
    /// the file is not mapped.
    pub mapping: Option<Lane>,
    /// Populating the mapping brings in nothing except the requested bytes.
    pub in_part: bool,
    /// Lane of bytes that are copied and that the page cache does not hold.
    pub cold: Lane,
    /// Lane of bytes that are copied and that the page cache holds.
    pub warm: Lane,
    /// The lane in place of those two, where they need aligned reads and the alignment of this file cannot be used.
    pub parts: Lane,
    /// How reads through the page cache fill it.
    pub through: Through,
}

impl Default for Way {
    /// Reads through the page cache, with the kernel's own read-ahead.
    fn default() -> Self {
        Way::only(Lane::BUFFERED)
    }
}

impl Way {
    /// The file is mapped.
    pub fn is_mapped(&self) -> bool {
        self.mapping.is_some()
    }

    /// Every read by this lane.
    pub fn only(lane: Lane) -> Way {
        Way { mapping: None, in_part: false, cold: lane, warm: lane, parts: lane, through: Through::Ahead }
    }
}

/// Bytes that reads through the page cache add to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Through {
    /// The kernel's read-ahead.
    Ahead,
    /// Whole huge pages, before they are read.
    HugePages,
    /// The requested bytes and no others.
    Exact,
    /// Nothing that was not there before, if the kernel can do that (`RWF_DONTCACHE`).
    Nothing,
}

/// The treatment of bytes outside the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cold {
    /// There are no such bytes: nothing will wait for a disk.
    None,
    /// They stay in the page cache.
    Keep,
    /// They go past the page cache and leave it as it is.
    Bypass,
    /// The pace of the storage decides.
    Try,
}

impl Cold {
    /// The field `cache` of a report.
    pub fn name(self) -> &'static str {
        match self {
            Cold::Bypass => "bypass",
            Cold::None | Cold::Keep | Cold::Try => "keep",
        }
    }
}

/// The decision on cold bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    /// [`Cold::Keep`] or [`Cold::Bypass`].
    pub(crate) cold: Cold,
    /// The reason, for the report.
    pub(crate) reason: String,
}

/// The last choice of a trial, for the report. `None` until there is one.
pub(crate) type Chosen = Arc<Mutex<Option<Choice>>>;

/// How a load travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// The way of each file of the checkpoint. A file without an entry has the default way.
    pub ways: Vec<Way>,
    /// The treatment of cold bytes.
    pub cold: Cold,
    /// The reason, for the report.
    pub reason: String,
    /// The load only maps resident pages. The caller's own thread does that in 0.1 to 1 ms; other threads would add 0.3 ms
    /// and, on a busy machine, a turn at the scheduler each.
    pub here: bool,
    /// Threads that read through the page cache and populate mappings, at most.
    pub threads: usize,
    /// Reads in flight to stores that take staging at request, at most.
    pub depth: usize,
    /// Requests in flight to stores that take staging at arrival, at most.
    pub requests: usize,
    /// Reads of `depth` that io_uring does through the page cache, at most.
    pub buffered_depth: usize,
    /// Bytes between two reads that one request to a server brings too, at most. None: what such a store finds best.
    pub gap: Option<u64>,
    /// [`Options::page_timing`](crate::options::Options::page_timing).
    pub page_timing: Option<bool>,
    /// How long a load waits at most for something to move. A server that says it is busy is asked for as long, at least.
    pub stall: Duration,
}

impl Routing {
    /// The way of file number `file`.
    pub fn way(&self, file: u32) -> Way {
        self.ways.get(file as usize).copied().unwrap_or_default()
    }
}

impl Default for Routing {
    /// Each read by its own lane, with 12 threads and 64 reads in flight, and nothing stays in the page cache that was to
    /// go past it: for a source without a plan.
    fn default() -> Self {
        let (ways, reason) = (Vec::new(), String::new());
        let (depth, requests, buffered_depth) = (64, 64, 8);
        let (cold, here, threads, gap) = (Cold::Bypass, false, 12, None);
        let (page_timing, stall) = (None, Duration::ZERO);
        Routing { ways, cold, reason, here, threads, depth, requests, buffered_depth, gap, page_timing, stall }
    }
}
