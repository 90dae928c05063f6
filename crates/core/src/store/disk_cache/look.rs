//! Looks at the blocks that other processes bring, every few milliseconds, on a thread that lives as long as there are some.

use super::entry::process_of;
use super::flow::{CacheBlock, Claimed};
use super::inbox::{CacheInbox, CacheNews, CachedFiles};
use super::BlockState;
use crate::machine::block_signals;
use crate::sync::{lock, Builder, Condvar, JoinHandle, Mutex};
use crate::threads::guarded;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// From one look to the next.
const EACH: Duration = Duration::from_millis(4);
/// Blocks whose claims are looked at each time: the first ones, and as many others by turns.
const CLAIMS: usize = 16;
/// Looks after which the source is woken, also without news.
const QUIET: u32 = 16;
/// From one look at the claims in all files to the next: a process that has others than before is alive.
const ALL: Duration = Duration::from_millis(200);
/// A look that does not end for so long hangs.
const STOPPING: Duration = Duration::from_secs(1);
/// From one look at the beats of holders to the next.
const BEATS: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct LookedAt {
    /// Each with its holder, as the load knows it.
    blocks: Vec<(CacheBlock, u32)>,
    /// The holders that are to be seen when they go on.
    holders: BTreeSet<u32>,
    runs: bool,
    closing: bool,
}

impl LookedAt {
    fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.holders.is_empty()
    }
}

/// The blocks to look at, and their thread.
#[derive(Debug)]
pub(super) struct Looker {
    files: Arc<CachedFiles>,
    inbox: Arc<CacheInbox>,
    shared: Arc<(Mutex<LookedAt>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Looker {
    pub(super) fn new(files: Arc<CachedFiles>, inbox: Arc<CacheInbox>) -> Looker {
        Looker { files, inbox, shared: Arc::default(), thread: None }
    }

    /// From now on these blocks and holders are looked at.
    pub(super) fn look_at(&mut self, blocks: impl Iterator<Item = (CacheBlock, u32)>, holders: BTreeSet<u32>) {
        let mut looked = lock(&self.shared.0);
        looked.blocks.clear();
        looked.blocks.extend(blocks);
        looked.holders = holders;
        if looked.is_empty() || looked.runs {
            return;
        }
        looked.runs = true;
        drop(looked);
        self.thread.take().map(JoinHandle::join);
        let (files, inbox, shared) = (self.files.clone(), self.inbox.clone(), self.shared.clone());
        let thread = Builder::new().name("penstock-cache-look".into()).stack_size(128 << 10);
        let spawned = thread.spawn(move || {
            block_signals();
            if guarded("penstock-cache-look", || look(&files, &inbox, &shared)).is_err() {
                end(&inbox, &shared);
            }
        });
        match spawned {
            Ok(thread) => self.thread = Some(thread),
            Err(_) => end(&self.inbox, &self.shared),
        }
    }

    /// Ends the thread. One that hangs in the disk's file system is left behind.
    pub(super) fn stop(&mut self) {
        let (shared, changed) = &*self.shared;
        let until = Instant::now() + STOPPING;
        let mut looked = lock(shared);
        looked.closing = true;
        changed.notify_all();
        while looked.runs && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            looked = changed.wait_timeout(looked, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let hangs = looked.runs;
        drop(looked);
        self.thread.take().filter(|_| !hangs).map(JoinHandle::join);
    }
}

/// Nobody looks any more: the load goes on without others.
fn end(inbox: &CacheInbox, shared: &(Mutex<LookedAt>, Condvar)) {
    let mut looked = lock(&shared.0);
    looked.runs = false;
    shared.1.notify_all();
    let blocks = std::mem::take(&mut looked.blocks);
    drop(looked);
    inbox.tell(blocks.into_iter().map(|(block, _)| CacheNews::Seen(block, Claimed::Unshared)));
}

fn look(files: &CachedFiles, inbox: &CacheInbox, (shared, changed): &(Mutex<LookedAt>, Condvar)) {
    let (mut turn, mut quiet) = (0, 0);
    let (mut claims, mut all) = (HashMap::new(), None::<Instant>);
    let (mut beats, mut heard) = (HashMap::new(), None::<Instant>);
    loop {
        let (blocks, holders) = {
            let mut looked = lock(shared);
            if looked.closing || looked.is_empty() {
                looked.runs = false;
                changed.notify_all();
                return;
            }
            (looked.blocks.clone(), looked.holders.clone())
        };
        let began = Instant::now();
        let mut news = states(files, &blocks, &mut turn);
        if all.is_none_or(|all| began >= all + ALL) {
            all = Some(began);
            news.extend(alive(files, &holders, &mut claims));
        }
        if heard.is_none_or(|heard| began >= heard + BEATS) {
            heard = Some(began);
            news.extend(beating(files, &holders, &mut beats));
        }
        quiet = if news.is_empty() { quiet + 1 } else { 0 };
        if !news.is_empty() || quiet % QUIET == 0 {
            inbox.tell_of_look(began, news);
        }
        let looked = lock(shared);
        drop(changed.wait_timeout(looked, EACH).unwrap_or_else(PoisonError::into_inner));
    }
}

/// The news of these blocks: they are there now, or their claim is another one or gone.
fn states(files: &CachedFiles, blocks: &[(CacheBlock, u32)], turn: &mut usize) -> Vec<CacheNews> {
    let mut news = Vec::new();
    let mut left = Vec::new();
    for of_file in blocks.chunk_by(|(a, _), (b, _)| a.file == b.file) {
        let Some(Some(file)) = files.get(of_file[0].0.file as usize) else { continue };
        // What cannot be looked at comes from the server.
        let there = file.entry.there().unwrap_or_default();
        for &(block, holder) in of_file {
            match is_within(&there, file.entry.range(block.block).start) {
                true => news.push(CacheNews::Seen(block, Claimed::There)),
                false => left.push((block, holder)),
            }
        }
    }
    let (first, others) = left.split_at(left.len().min(CLAIMS));
    let some = others.iter().cycle().skip(*turn).take(CLAIMS.min(others.len()));
    *turn = if others.is_empty() { 0 } else { (*turn + CLAIMS) % others.len() };
    for &(block, holder) in first.iter().chain(some) {
        let Some(Some(file)) = files.get(block.file as usize) else { continue };
        let state = match file.entry.state(block.block) {
            Ok(BlockState::There) => Claimed::There,
            Ok(BlockState::Claimed(holder)) => Claimed::Theirs(holder),
            Ok(BlockState::Missing) | Err(_) => Claimed::Missing,
        };
        if state != Claimed::Theirs(holder) {
            news.push(CacheNews::Seen(block, state));
        }
    }
    news
}

/// The holders of blocks whose process has claimed others or brought others since the claims were looked at before. A block that
/// somebody brought in place of its holder still has the holder's lock.
pub(super) fn alive(
    files: &CachedFiles,
    holders: &BTreeSet<u32>,
    claims: &mut HashMap<CacheBlock, u32>,
) -> Vec<CacheNews> {
    let mut now = HashMap::new();
    for (number, file) in (0..).zip(files.iter()) {
        // A map that cannot be read shows no process.
        let claimed = file.iter().flat_map(|file| file.entry.claimed().unwrap_or_default());
        // This load's own claims say nothing of another load of this process.
        let own = file.as_ref().map(|file| file.entry.number());
        let claimed = claimed.filter(|(_, holder)| Some(*holder) != own);
        now.extend(claimed.map(|(block, holder)| (CacheBlock { file: number, block }, holder)));
    }
    let before = std::mem::replace(claims, now);
    let mut processes: BTreeSet<u32> = BTreeSet::new();
    let is_new = |(block, holder): &(&CacheBlock, &u32)| before.get(block) != Some(holder);
    processes.extend(claims.iter().filter(is_new).map(|(_, holder)| process_of(*holder)));
    for (block, holder) in before.iter().filter(|(block, holder)| claims.get(block) != Some(holder)) {
        let Some(Some(file)) = files.get(block.file as usize) else { continue };
        if !processes.contains(&process_of(*holder)) && !file.entry.is_locked(block.block) {
            processes.insert(process_of(*holder));
        }
    }
    let is_alive = |holder: &&u32| processes.contains(&process_of(**holder));
    holders.iter().filter(is_alive).copied().map(CacheNews::Alive).collect()
}

/// The holders whose processes have received something since their beats were looked at before.
fn beating(files: &CachedFiles, holders: &BTreeSet<u32>, before: &mut HashMap<u32, u32>) -> Vec<CacheNews> {
    let Some(file) = files.iter().flatten().next() else { return Vec::new() };
    let Some(beats) = &file.folder.beats else { return Vec::new() };
    let own = process_of(file.entry.number());
    // Of another load of this process the beats say nothing: they may be this load's.
    let others = holders.iter().filter(|holder| process_of(**holder) != own);
    let counts = others.filter_map(|holder| Some((*holder, beats.count(*holder)?)));
    let has_beaten = |(holder, count): &(u32, u32)| before.insert(*holder, *count).is_some_and(|last| last != *count);
    counts.filter(has_beaten).map(|(holder, _)| CacheNews::Alive(holder)).collect()
}

fn is_within(ranges: &[Range<u64>], at: u64) -> bool {
    let next = ranges.partition_point(|range| range.end <= at);
    ranges.get(next).is_some_and(|range| range.start <= at)
}
