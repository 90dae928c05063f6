//! The loads that a seed makes: their reads, their server, their disk, and the faults.

use super::super::flow::mutated::CacheBlock;
use std::collections::BTreeSet;
use std::ops::Range;

/// Nanoseconds of virtual time.
pub(super) type Time = u64;
pub(super) const MS: Time = 1_000_000;
/// Bytes of a block.
pub(super) const BLOCK: usize = 24;

/// Loads on a slow link have other random numbers than the loads of the same seed, whose faults and delays they take.
const OF_SLOW_LINK: u64 = 0x2d35_8dcc_aa6c_78a5;

/// SplitMix64 (Steele, Lea, Flood 2014), as in `engine/simulator/memory.rs`.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A read of a load.
#[derive(Debug, Clone)]
pub(super) struct ReadSpec {
    pub(super) block: CacheBlock,
    /// Its bytes, within the block.
    pub(super) bytes: Range<usize>,
    pub(super) has_place: bool,
}

/// The writer of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writing {
    /// A block takes about so long.
    Takes(Time),
    /// After so many blocks it never finishes one.
    Sticks(usize),
    /// It has room for nothing.
    Drops,
}

/// A process and its load.
#[derive(Debug, Clone)]
pub(super) struct ProcessSpec {
    pub(super) begins: Time,
    pub(super) reads: Vec<ReadSpec>,
    /// Reads in flight.
    pub(super) depth: usize,
    /// Reads of one block that follow each other are submitted together, whatever the depth.
    pub(super) grouped: bool,
    /// Places for reads that have none.
    pub(super) slabs: usize,
    /// The engine frees a place after about this time.
    pub(super) held: Time,
    pub(super) buffers: usize,
    pub(super) writing: Writing,
    /// The cache is read-only for it.
    pub(super) unshared: bool,
}

/// A fault of one process.
#[derive(Debug, Clone, Copy)]
pub(super) enum Incident {
    Killed,
    /// For so long, or for good.
    Stopped(Option<Time>),
    Cancelled,
}

/// The end of a request to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Comes,
    FailsAtOnce,
    /// After its first byte, whether it has a buffer or not.
    FailsSoon,
    FailsAtItsEnd,
}

/// All that a seed decides.
#[derive(Debug, Clone)]
pub(super) struct Case {
    seed: u64,
    /// Bytes of each file.
    pub(super) files: Vec<usize>,
    /// Blocks that the disk has at the beginning.
    pub(super) there: BTreeSet<CacheBlock>,
    /// Blocks that the server never gives.
    bad: BTreeSet<CacheBlock>,
    /// Requests that fail: one in so many.
    failing: Option<u64>,
    /// Reads from the disk that fail: one in so many.
    unreadable: Option<u64>,
    latency: Time,
    /// The server's time for a block. `alone`: each process has this rate for itself.
    pub(super) rate: Time,
    pub(super) alone: bool,
    disk_read: Time,
    /// Time between looks.
    pub(super) look: Time,
    /// A process for which the cache is read-only sees claims.
    pub(super) claims_are_seen: bool,
    pub(super) processes: Vec<ProcessSpec>,
    /// Faults, and the steps before which they happen.
    pub(super) incidents: Vec<(u64, usize, Incident)>,
    /// The disk is full from this step on.
    pub(super) full_from: u64,
    /// A link that all share carries blocks in so many parts, those of all requests by turns: the more requests, the later each
    /// block is complete.
    pub(super) parts: u64,
}

/// Durations that are drawn.
#[derive(Debug, Clone, Copy)]
pub(super) enum Drawn {
    Latency,
    Fails,
    FirstByteToFailure,
    GivenUp,
    DiskRead,
    Unreadable,
    Write,
    Hold,
    Place,
    Turn,
    Look,
}

impl Case {
    /// The loads of a seed.
    pub(super) fn new(seed: u64) -> Case {
        let mut rng = Rng(seed);
        let calm = rng.one_in(4);
        // Many blocks in flight, and a holder that is lost.
        let crowd = !calm && rng.one_in(8);
        let files: Vec<usize> = (0..if crowd { 1 } else { 1 + rng.below(2) })
            .map(|_| {
                let blocks = if crowd { 45 + rng.below(20) } else { 1 + rng.below(10) };
                blocks as usize * BLOCK - rng.below(BLOCK as u64) as usize
            })
            .collect();
        let blocks = blocks_of(&files);
        let count = if crowd { 2 + rng.below(2) } else { 1 + rng.below(4) };
        let some = |rng: &mut Rng, n: u64| -> BTreeSet<CacheBlock> {
            blocks.iter().copied().filter(|_| rng.one_in(n)).collect()
        };
        let there = if rng.one_in(3) { some(&mut rng, 2) } else { BTreeSet::new() };
        let fails = !calm && rng.one_in(3);
        let (bad, failing) = (fails && rng.one_in(2), fails && rng.one_in(2));
        let processes = (0..count).map(|number| process(&mut rng, &files, calm, crowd, number == 0)).collect();
        let mut incidents = Vec::new();
        if crowd {
            let lost = match rng.below(4) {
                0 => Incident::Killed,
                1 => Incident::Stopped(stop(&mut rng)),
                // About as long as others wait.
                _ => Incident::Stopped(Some(950 * MS + rng.below(400 * MS))),
            };
            incidents.push((1 + rng.below(60), 0, lost));
        }
        for _ in 0..if calm { 0 } else { rng.below(3) } {
            let incident = match rng.below(5) {
                0 | 1 => Incident::Killed,
                2 | 3 => Incident::Stopped(stop(&mut rng)),
                _ => Incident::Cancelled,
            };
            let steps = if rng.one_in(2) { 60 } else { 400 };
            incidents.push((rng.below(steps), rng.below(count) as usize, incident));
        }
        let slow = rng.one_in(8);
        Case {
            seed,
            there,
            bad: if bad { some(&mut rng, 6) } else { BTreeSet::new() },
            failing: failing.then(|| 2 + rng.below(12)),
            unreadable: (!calm && rng.one_in(3)).then(|| 1 + rng.below(6)),
            latency: if slow { rng.below(3000 * MS) } else { MS + rng.below(60 * MS) },
            rate: if slow { rng.below(400 * MS) } else { 10_000 + rng.below(5 * MS) },
            alone: rng.one_in(2),
            disk_read: 10_000 + rng.below(3 * MS),
            look: if slow || crowd { 50 * MS } else { 4 * MS + rng.below(20 * MS) },
            claims_are_seen: rng.one_in(2),
            processes,
            incidents,
            full_from: if !calm && rng.one_in(6) { rng.below(200) } else { u64::MAX },
            files,
            parts: 1,
        }
    }

    /// Processes that start together on one slow link. Each block takes seconds, because others come beside it. `lost`: what
    /// happens to the first process.
    pub(super) fn of_slow_link(seed: u64, lost: Option<Incident>) -> Case {
        let mut rng = Rng(seed ^ OF_SLOW_LINK);
        let files = vec![(24 + rng.below(25)) as usize * BLOCK];
        let processes = (0..2 + rng.below(7)).map(|_| together(&mut rng, &files)).collect();
        let incidents = lost.into_iter().map(|lost| (200 + rng.below(1500), 0, lost)).collect();
        let rate = 50 * MS + rng.below(150 * MS);
        let full_from = u64::MAX;
        let case = Case::new(seed);
        Case {
            there: BTreeSet::new(),
            bad: BTreeSet::new(),
            failing: None,
            unreadable: None,
            latency: MS + rng.below(60 * MS),
            rate,
            alone: false,
            parts: 16,
            look: 50 * MS,
            processes,
            incidents,
            full_from,
            files,
            ..case
        }
    }

    /// One process that has room for all, with this writer.
    pub(super) fn of_one(seed: u64, writing: Writing) -> Case {
        let mut case = Case::new(seed);
        case.processes.truncate(1);
        case.incidents.clear();
        case.full_from = u64::MAX;
        let blocks = blocks_of(&case.files).len();
        let process = &mut case.processes[0];
        // Reads of a block come together, so that it is asked for once.
        process.reads.sort_by_key(|read| read.block);
        (process.grouped, process.unshared, process.writing) = (true, false, writing);
        process.buffers = 2 * (process.reads.len() + blocks);
        case
    }

    /// Blocks of all files.
    pub(super) fn blocks(&self) -> usize {
        blocks_of(&self.files).len()
    }

    /// Random numbers for a duration of this block, the same in whatever order they are drawn.
    pub(super) fn draw(&self, what: Drawn, block: CacheBlock, nth: u64) -> Rng {
        let block = u64::from(block.file) << 20 | u64::from(block.block);
        Rng(self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (what as u64) << 56 ^ block << 28 ^ nth)
    }

    /// The n-th request of all for a block: the time to its first byte, and its end.
    pub(super) fn request(&self, block: CacheBlock, process: usize, nth: u64) -> (Time, Fate) {
        let nth = nth << 4 | process as u64;
        let latency = self.latency / 2 + self.draw(Drawn::Latency, block, nth).below(self.latency);
        let mut rng = self.draw(Drawn::Fails, block, nth);
        let fails = self.bad.contains(&block) || self.failing.is_some_and(|n| rng.one_in(n));
        let fate = match rng.below(3) {
            _ if !fails => Fate::Comes,
            0 => Fate::FailsAtOnce,
            1 => Fate::FailsSoon,
            _ => Fate::FailsAtItsEnd,
        };
        (latency, fate)
    }

    /// The n-th read of a block from the disk: its duration, and its success.
    pub(super) fn disk_read(&self, block: CacheBlock, nth: u64) -> (Time, bool) {
        let time = self.disk_read / 2 + self.draw(Drawn::DiskRead, block, nth).below(self.disk_read);
        (time, !self.unreadable.is_some_and(|n| self.draw(Drawn::Unreadable, block, nth).one_in(n)))
    }

    /// The bytes of a block.
    pub(super) fn bytes(&self, block: CacheBlock) -> Vec<u8> {
        let start = block.block as usize * BLOCK;
        let end = (start + BLOCK).min(self.files[block.file as usize]);
        (start..end).map(|at| byte_of_file(block.file, at as u64)).collect()
    }
}

/// Never the byte of memory that nothing was written to.
fn byte_of_file(file: u32, at: u64) -> u8 {
    ((at.wrapping_add(u64::from(file) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 0xe0) as u8
}

fn stop(rng: &mut Rng) -> Option<Time> {
    match rng.below(3) {
        0 => None,
        1 => Some(rng.below(100 * MS)),
        _ => Some(rng.below(4000 * MS)),
    }
}

fn blocks_of(files: &[usize]) -> Vec<CacheBlock> {
    let blocks =
        |file: u32, bytes: usize| (0..bytes.div_ceil(BLOCK) as u32).map(move |block| CacheBlock { file, block });
    (0..).zip(files).flat_map(|(file, bytes)| blocks(file, *bytes)).collect()
}

/// A process that needs all blocks, begins with others, and has room for what it reads.
fn together(rng: &mut Rng, files: &[usize]) -> ProcessSpec {
    let blocks = blocks_of(files);
    let reads: Vec<ReadSpec> =
        blocks.iter().map(|&block| ReadSpec { block, bytes: 0..BLOCK, has_place: true }).collect();
    ProcessSpec {
        begins: rng.below(300 * MS),
        depth: 4 + rng.below(40) as usize,
        grouped: false,
        slabs: 4,
        held: MS,
        buffers: 2 * (reads.len() + 1),
        writing: Writing::Takes(10_000 + rng.below(5 * MS)),
        unshared: false,
        reads,
    }
}

fn process(rng: &mut Rng, files: &[usize], calm: bool, crowd: bool, first: bool) -> ProcessSpec {
    let blocks = blocks_of(files);
    let (share, parts, placed) = (rng.below(3), 1 + rng.below(3), rng.below(3));
    let from = rng.below(blocks.len() as u64) as usize;
    let mut reads = Vec::new();
    for (number, &block) in blocks.iter().enumerate() {
        if (share == 1 && rng.one_in(2)) || (share == 2 && number < from) {
            continue;
        }
        let end = (files[block.file as usize] - block.block as usize * BLOCK).min(BLOCK);
        for _ in 0..if crowd { 1 } else { 1 + rng.below(parts) } {
            // Reads may lie in each other.
            let start = rng.below(end as u64) as usize;
            let bytes = start..start + 1 + rng.below((end - start) as u64) as usize;
            let has_place = placed == 0 || (placed == 1 && rng.one_in(2));
            reads.push(ReadSpec { block, bytes, has_place });
        }
    }
    let swaps = if rng.one_in(3) { reads.len() / 2 } else { 0 };
    for _ in 0..swaps {
        let (a, b) = (rng.below(reads.len() as u64) as usize, rng.below(reads.len() as u64) as usize);
        reads.swap(a, b);
    }
    if !reads.is_empty() && rng.one_in(4) {
        let at = rng.below(reads.len() as u64) as usize;
        reads.rotate_left(at);
    }
    let writing = match rng.below(if calm { 8 } else { 12 }) {
        0..6 => Writing::Takes(10_000 + rng.below(5 * MS)),
        6 | 7 => Writing::Takes(rng.below(100 * MS)),
        8 => Writing::Takes(rng.below(2000 * MS)),
        9 => Writing::Drops,
        _ => Writing::Sticks(rng.below(4) as usize),
    };
    let few = !calm && !rng.one_in(4);
    ProcessSpec {
        begins: if first || rng.one_in(2) { 0 } else { rng.below(300 * MS) },
        depth: if crowd && (first || rng.one_in(2)) { 40 + rng.below(60) } else { 1 + rng.below(8) } as usize,
        grouped: false,
        slabs: 1 + rng.below(4) as usize,
        held: rng.below(5 * MS),
        buffers: if few && !crowd { 1 + rng.below(7) as usize } else { 2 * (reads.len() + 1) },
        writing,
        unshared: !calm && rng.one_in(10),
        reads,
    }
}
