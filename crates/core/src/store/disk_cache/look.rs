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

#[derive(Debug, Default)]
struct LookedAt {
    blocks: Vec<CacheBlock>,
    runs: bool,
    closing: bool,
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

    /// From now on these blocks are looked at.
    pub(super) fn look_at(&mut self, blocks: impl Iterator<Item = CacheBlock>) {
        let mut looked = lock(&self.shared.0);
        looked.blocks.clear();
        looked.blocks.extend(blocks);
        if looked.blocks.is_empty() || looked.runs {
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

    /// Ends the thread.
    pub(super) fn stop(&mut self) {
        lock(&self.shared.0).closing = true;
        self.shared.1.notify_all();
        self.thread.take().map(JoinHandle::join);
    }
}

/// Nobody looks any more: the load goes on without others.
fn end(inbox: &CacheInbox, shared: &(Mutex<LookedAt>, Condvar)) {
    let mut looked = lock(&shared.0);
    looked.runs = false;
    let blocks = std::mem::take(&mut looked.blocks);
    drop(looked);
    inbox.tell(blocks.into_iter().map(|block| CacheNews::Seen(block, Claimed::Unshared)));
}

fn look(files: &CachedFiles, inbox: &CacheInbox, (shared, changed): &(Mutex<LookedAt>, Condvar)) {
    let (mut turn, mut quiet, mut told) = (0, 0, HashMap::new());
    let (mut claims, mut all) = (HashMap::new(), None::<Instant>);
    loop {
        let blocks = {
            let mut looked = lock(shared);
            if looked.closing || looked.blocks.is_empty() {
                looked.runs = false;
                return;
            }
            looked.blocks.clone()
        };
        let began = Instant::now();
        let mut news = states(files, &blocks, &mut turn, &mut told);
        if all.is_none_or(|all| began >= all + ALL) {
            all = Some(began);
            news.extend(alive(files, &told, &mut claims));
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
fn states(
    files: &CachedFiles,
    blocks: &[CacheBlock],
    turn: &mut usize,
    told: &mut HashMap<CacheBlock, Claimed>,
) -> Vec<CacheNews> {
    let mut news = Vec::new();
    let mut left = Vec::new();
    for of_file in blocks.chunk_by(|a, b| a.file == b.file) {
        let Some(Some(file)) = files.get(of_file[0].file as usize) else { continue };
        // What cannot be looked at comes from the server.
        let there = file.entry.there().unwrap_or_default();
        for &block in of_file {
            match is_within(&there, file.entry.range(block.block).start) {
                true => news.push(CacheNews::Seen(block, Claimed::There)),
                false => left.push(block),
            }
        }
    }
    let (first, others) = left.split_at(left.len().min(CLAIMS));
    let some = others.iter().cycle().skip(*turn).take(CLAIMS.min(others.len()));
    *turn = if others.is_empty() { 0 } else { (*turn + CLAIMS) % others.len() };
    for &block in first.iter().chain(some) {
        let Some(Some(file)) = files.get(block.file as usize) else { continue };
        let state = match file.entry.state(block.block) {
            Ok(BlockState::There) => Claimed::There,
            Ok(BlockState::Claimed(holder)) => Claimed::Theirs(holder),
            Ok(BlockState::Missing) | Err(_) => Claimed::Missing,
        };
        if told.insert(block, state) != Some(state) || state == Claimed::Missing {
            news.push(CacheNews::Seen(block, state));
        }
    }
    news
}

/// The holders of blocks whose process has claimed others or brought others since the claims were looked at before. A block that
/// somebody brought in place of its holder still has the holder's lock.
fn alive(
    files: &CachedFiles,
    told: &HashMap<CacheBlock, Claimed>,
    claims: &mut HashMap<CacheBlock, u32>,
) -> impl Iterator<Item = CacheNews> {
    let mut now = HashMap::new();
    for (number, file) in (0..).zip(files.iter()) {
        // A map that cannot be read shows no process.
        let claimed = file.iter().flat_map(|file| file.entry.claimed().unwrap_or_default());
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
    let holder = |state: &Claimed| if let Claimed::Theirs(holder) = state { Some(*holder) } else { None };
    let holders: BTreeSet<u32> = told.values().filter_map(holder).collect();
    holders.into_iter().filter(move |holder| processes.contains(&process_of(*holder))).map(CacheNews::Alive)
}

fn is_within(ranges: &[Range<u64>], at: u64) -> bool {
    let next = ranges.partition_point(|range| range.end <= at);
    ranges.get(next).is_some_and(|range| range.start <= at)
}
