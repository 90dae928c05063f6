//! The objects of a load, and the news that other threads have for its source.

use super::cached_file::CachedFile;
use super::flow::{CacheBlock, Claimed};
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use std::sync::Arc;
use std::time::Instant;

/// The objects of a load, by the number of their file; `None`: the object is not cached.
pub(super) type CachedFiles = Vec<Option<Arc<CachedFile>>>;

/// News for the source of a load from other threads.
#[derive(Debug)]
pub(super) enum CacheNews {
    /// A block was read from the disk, or could not be.
    Fetched(CacheBlock, bool),
    /// The state of a block that another process brings.
    Seen(CacheBlock, Claimed),
    /// The process of this holder has received something, by its beats, or has claimed or brought other blocks.
    Alive(u32),
}

/// Where other threads put them.
#[derive(Debug)]
pub(super) struct CacheInbox {
    pub(super) news: Mutex<Vec<CacheNews>>,
    /// When the looker began to look last.
    pub(super) looked: Mutex<Option<Instant>>,
    pub(super) wake: Arc<Wake>,
}

impl CacheInbox {
    pub(super) fn new(wake: Arc<Wake>) -> CacheInbox {
        CacheInbox { news: Mutex::default(), looked: Mutex::default(), wake }
    }

    pub(super) fn tell(&self, news: impl IntoIterator<Item = CacheNews>) {
        lock(&self.news).extend(news);
        self.wake.notify();
    }

    /// The same, by a look that began then.
    pub(super) fn tell_of_look(&self, began: Instant, news: Vec<CacheNews>) {
        let mut all = lock(&self.news);
        all.extend(news);
        *lock(&self.looked) = Some(began);
        drop(all);
        self.wake.notify();
    }
}
