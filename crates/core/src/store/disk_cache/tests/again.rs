//! Blocks that are asked of the server outside of a load.

use super::processes::cached_file;
use super::*;
use crate::error::Result;
use crate::store::disk_cache::crew::CacheCrew;
use crate::store::location::Location;
use crate::store::object::{Head, Object, Objects, Store};
use crate::store::watch::answered;
use std::ops::Range;
use std::sync::atomic::AtomicU32;

/// A server that sends something once while it is asked. It looks at the beats of the one that asks.
#[derive(Debug)]
struct Sends {
    entry: Arc<CacheEntry>,
    looks: Arc<CacheFolder>,
    /// How often others have seen that something came.
    seen: AtomicU32,
}

impl Store for Sends {
    fn list(&self, _: &Location) -> Result<Vec<Location>> {
        Err(Error::new(ErrorKind::Internal, "not asked for"))
    }

    fn head(&self, _: &Location, _: u64) -> Result<Head> {
        Err(Error::new(ErrorKind::Internal, "not asked for"))
    }

    fn read(&self, _: &Object, range: Range<u64>) -> Result<Vec<u8>> {
        let count = || self.looks.beats.as_ref().unwrap().count(self.entry.number());
        let before = count();
        answered(true);
        self.seen.fetch_add(u32::from(count() != before), Ordering::Relaxed);
        let blocks = self.entry.blocks_of(range);
        Ok(blocks.flat_map(|number| block(&self.entry, number)).collect())
    }

    fn objects(&self, _: Vec<Option<Object>>) -> Result<Arc<dyn Objects>> {
        Err(Error::new(ErrorKind::Internal, "not asked for"))
    }
}

#[test]
fn others_see_that_bytes_come_that_are_asked_for_after_a_load() {
    let (_folder, cache) = cache();
    let entry = cache.find_or_make(&key("model"), "v", 9 * BLOCK).unwrap();
    let file = Arc::new(cached_file(&cache, entry.clone()));
    let looks = CacheFolder::open(&settings(cache.path())).unwrap();
    let server = Arc::new(Sends { entry: entry.clone(), looks, seen: AtomicU32::new(0) });
    let progress = CacheProgress::new(None);
    CacheCrew::process().again(file, server.clone(), (0..9).collect(), &progress);
    assert!(progress.wait(Duration::from_secs(60)), "{:?}", progress.status());
    assert_eq!((check(&entry), progress.status().again), (9, 9 * BLOCK));
    // It asks for eight blocks at once.
    assert_eq!(server.seen.load(Ordering::Relaxed), 2);
}
