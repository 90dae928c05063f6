//! Single reads of objects that several processes want at once, such as a tokenizer: one asks the server, and the others wait for
//! what it brings.
//!
//! A block is claimed, as by a load. The first bytes of a location whose version nobody knows have no blocks yet: they are claimed
//! by a lock of the marker. One that holds either and receives nothing for a second is not waited for any longer.

use super::beats::Beats;
use super::cached_file::CachedFile;
use super::entry::{own_process, process_of, CacheEntry};
use super::flow::PATIENCE;
use super::folder::{CacheFolder, MARKER};
use super::lock::{held, try_lock, unlock_all, LockKind};
use super::open_locks::{asking_byte, MOST_ASKING};
use super::{BlockState, CacheKey};
use crate::error::{Error, ErrorKind, Result};
use crate::store::watch::{is_there, still_wanted};
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// From one look at the work of others to the next.
const EACH: Duration = Duration::from_millis(4);

/// The patience with somebody: it begins anew whenever something has changed.
struct Patience<T> {
    seen: Option<T>,
    since: Instant,
}

impl<T: PartialEq> Patience<T> {
    fn new() -> Patience<T> {
        Patience { seen: None, since: Instant::now() }
    }

    /// Waits a moment; true: nothing has changed for too long.
    ///
    /// # Errors
    /// `Cancelled`: nobody waits for the result.
    fn ends(&mut self, seen: T) -> Result<bool> {
        if self.seen.as_ref() != Some(&seen) {
            (self.seen, self.since) = (Some(seen), Instant::now());
            is_there();
        }
        if !still_wanted() {
            return Err(Error::new(ErrorKind::Cancelled, "nobody waits for it any more"));
        }
        if self.since.elapsed() >= PATIENCE {
            return Ok(true);
        }
        std::thread::sleep(EACH);
        Ok(false)
    }
}

/// The beat counter of another process. 0 for this process: its counter also counts other threads.
fn count_of(beats: Option<&Beats>, process: u32) -> u32 {
    let others = beats.filter(|_| process != own_process());
    others.and_then(|beats| beats.count(process << 16)).unwrap_or_default()
}

/// The first bytes of a location, which this process asks for, or another one.
#[derive(Debug)]
pub(super) struct AskingTurn {
    folder: Arc<CacheFolder>,
    marker: File,
    first: u64,
    is_ours: bool,
    process: u32,
}

impl AskingTurn {
    /// Claims the first bytes of a location, unless another one has.
    ///
    /// # Errors
    /// The marker cannot be locked.
    pub(super) fn begin(folder: &Arc<CacheFolder>, key: &CacheKey) -> Result<AskingTurn> {
        let at = || folder.root.path().join(MARKER);
        let gone = || Error::new(ErrorKind::NotFound, "the marker of the disk cache is gone").at(at());
        let (marker, ..) = folder.root.open(MARKER, true)?.ok_or_else(gone)?;
        let first = asking_byte(&key.name());
        let bytes = first..first + 1 + u64::from(own_process());
        let is_ours = try_lock(&marker, LockKind::Exclusive, bytes).map_err(|e| Error::io("lock", &e).at(at()))?;
        Ok(AskingTurn { folder: folder.clone(), marker, first, is_ours, process: std::process::id() })
    }

    /// True if this process is to ask.
    pub(super) fn is_ours(&self) -> bool {
        self.is_ours
    }

    /// Waits until the other one has what it asks for, or receives nothing for a second.
    ///
    /// # Errors
    /// `Cancelled`: nobody waits for the result.
    pub(super) fn wait(&self) -> Result<()> {
        let mut patience = Patience::new();
        loop {
            // A lock that nobody can see is not waited for.
            let found = held(&self.marker, self.first..self.first + MOST_ASKING).unwrap_or_default();
            let Some(found) = found.filter(|_| !self.is_ours) else { return Ok(()) };
            let process = (found.end - found.start).saturating_sub(1) as u32;
            if patience.ends((process, count_of(self.folder.beats.as_ref(), process)))? {
                return Ok(());
            }
        }
    }
}

impl Drop for AskingTurn {
    fn drop(&mut self) {
        if self.is_ours && self.process == std::process::id() {
            unlock_all(&self.marker);
        }
    }
}

/// Claims of blocks that end with it.
#[derive(Debug)]
pub(super) struct OwnClaims<'e> {
    entry: &'e CacheEntry,
    blocks: BTreeSet<u32>,
}

impl<'e> OwnClaims<'e> {
    /// The states of blocks; those of `run` that are missing are claimed.
    ///
    /// # Errors
    /// The map cannot be read or locked.
    pub(super) fn of(entry: &'e CacheEntry, wanted: &Range<u32>, run: Range<u32>) -> Result<(Self, Vec<BlockState>)> {
        let mut states = entry.states(wanted.clone())?;
        let mut claims = OwnClaims { entry, blocks: BTreeSet::new() };
        if !run.is_empty() {
            let at = (run.start - wanted.start) as usize;
            let before = states[at..at + run.len()].to_vec();
            states[at..at + run.len()].copy_from_slice(&entry.claim_run(run.clone())?);
            let is_new = |(block, before): (u32, &BlockState)| {
                let now = states[(block - wanted.start) as usize];
                (now != *before && now == BlockState::Claimed(entry.number())).then_some(block)
            };
            claims.blocks = run.zip(&before).filter_map(is_new).collect();
        }
        Ok((claims, states))
    }

    /// The blocks, in order.
    pub(super) fn blocks(&self) -> Vec<u32> {
        self.blocks.iter().copied().collect()
    }

    /// This entry claims a block.
    fn add(&mut self, block: u32) {
        self.blocks.insert(block);
    }

    /// The writer has these blocks, and ends their claims.
    pub(super) fn are_written(&mut self, blocks: &[u32]) {
        self.blocks.retain(|block| !blocks.contains(block));
    }
}

impl Drop for OwnClaims<'_> {
    fn drop(&mut self) {
        self.blocks.iter().for_each(|block| self.entry.release(*block));
    }
}

/// Waits until a block is there that another entry brings; false: this process is to ask for it. Then it claims it, if it can. A
/// disk that fails only makes it ask.
///
/// # Errors
/// `Cancelled`: nobody waits for the result.
pub(super) fn comes(file: &CachedFile, block: u32, last: u32, claims: &mut OwnClaims<'_>) -> Result<bool> {
    let entry = &file.entry;
    let mut patience = Patience::new();
    loop {
        let Ok(states) = entry.states(block..last + 1) else { return Ok(false) };
        let state = match states[0] {
            BlockState::Missing => entry.claim(block),
            state => Ok(state),
        };
        let Ok(state) = state else { return Ok(false) };
        let (state, holder) = match state {
            BlockState::Claimed(holder) if holder != entry.number() => {
                // What it brings of the others is progress too.
                let there = states.iter().filter(|state| **state == BlockState::There).count();
                let count = count_of(file.folder.beats.as_ref(), process_of(holder));
                if !patience.ends((holder, count, there))? {
                    continue;
                }
                (entry.take_over(block).unwrap_or(BlockState::Missing), holder)
            }
            state => (state, 0),
        };
        match state {
            BlockState::There => return Ok(true),
            BlockState::Claimed(taker) if taker != entry.number() && taker != holder => {}
            BlockState::Claimed(taker) if taker == entry.number() => {
                claims.add(block);
                return Ok(false);
            }
            // One that is silent has taken it over, or nothing can be claimed.
            BlockState::Claimed(_) | BlockState::Missing => return Ok(false),
        }
    }
}
