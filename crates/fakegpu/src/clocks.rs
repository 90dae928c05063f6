//! Vector clocks, and the record of which stream touched which bytes when.
//!
//! Every stream owns one component, its *tick* count. An access is identified by (stream, tick). A later access is
//! ordered after it exactly when the later one's clock has reached that tick in that component.

use std::collections::BTreeMap;

/// What a participant knows of every stream: the last tick of each that is ordered before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    /// Learns everything `other` knows.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Increments `stream`'s own component and returns its new value.
    pub(crate) fn tick(&mut self, stream: usize) -> u64 {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] += 1;
        self.0[stream]
    }
}

/// Bytes at regular distances: `rows` times `width` bytes, `pitch` apart. A contiguous range is one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) start: u64,
    pub(crate) width: u64,
    pub(crate) pitch: u64,
    pub(crate) rows: u64,
}

impl Rows {
    pub(crate) fn range(start: u64, len: u64) -> Self {
        Self { start, width: len, pitch: len, rows: 1 }
    }

    /// One past the last byte touched.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.pitch * self.rows.saturating_sub(1) + self.width
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    fn row(&self, i: u64) -> (u64, u64) {
        (self.start + self.pitch * i, self.start + self.pitch * i + self.width)
    }

    fn meets(&self, lo: u64, hi: u64) -> bool {
        if lo >= self.end() || hi <= self.start || lo >= hi {
            return false;
        }
        // The first row that ends after `lo`: if it begins before `hi`, they meet.
        let first = if lo < self.start + self.width { 0 } else { (lo - self.start - self.width) / self.pitch + 1 };
        first < self.rows && self.row(first).0 < hi
    }

    /// Whether the two have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.start >= other.end() || other.start >= self.end() {
            return false;
        }
        let (few, many) = if self.rows <= other.rows { (self, other) } else { (other, self) };
        (0..few.rows).any(|i| {
            let (lo, hi) = few.row(i);
            many.meets(lo, hi)
        })
    }
}

/// One access that was submitted to a stream.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) rows: Rows,
    pub(crate) write: bool,
    pub(crate) stream: usize,
    pub(crate) tick: u64,
    pub(crate) what: &'static str,
}

impl Access {
    pub(crate) fn describe(&self) -> String {
        let verb = if self.write { "writes" } else { "reads" };
        let (Rows { start, rows, width, .. }, end) = (self.rows, self.rows.end());
        let shape = if rows == 1 { String::new() } else { format!(" ({rows} rows of {width} bytes)") };
        format!("{} (stream #{}, operation {}) {verb} {start:#x}..{end:#x}{shape}", self.what, self.stream, self.tick)
    }
}

/// The accesses to one piece of memory after which a later access might still have to be ordered.
#[derive(Debug, Default)]
pub(crate) struct AccessMap {
    by_start: BTreeMap<(u64, u64), Access>,
    added: u64,
    longest: u64,
    swept_at: usize,
}

impl AccessMap {
    /// Adds an access made at `now`. Returns an earlier access that conflicts and is not ordered before it, if there is
    /// one.
    pub(crate) fn add(&mut self, access: Access, now: &Clock, host: &Clock) -> Option<Access> {
        // What the host has waited for is ordered before everything that is submitted from here on. It is dropped now
        // and then, so that a load of hundreds of thousands of tensors does not search all of its past for each piece.
        if self.by_start.len() > 2 * self.swept_at + 256 {
            self.by_start.retain(|_, a| a.tick > host.get(a.stream));
            self.longest = self.by_start.values().map(|a| a.rows.end() - a.rows.start).max().unwrap_or(0);
            self.swept_at = self.by_start.len();
        }
        let conflict = self
            .near(access.rows.start, access.rows.end())
            .find(|a| (a.write || access.write) && a.tick > now.get(a.stream) && a.rows.overlaps(&access.rows));
        let conflict = conflict.cloned();
        self.longest = self.longest.max(access.rows.end() - access.rows.start);
        self.added += 1;
        self.by_start.insert((access.rows.start, self.added), access);
        conflict
    }

    /// An access to `lo..hi` that the host has not waited for.
    pub(crate) fn unknown_to(&self, host: &Clock, lo: u64, hi: u64, writes_only: bool) -> Option<&Access> {
        let rows = Rows::range(lo, hi - lo);
        self.near(lo, hi).find(|a| (a.write || !writes_only) && a.tick > host.get(a.stream) && a.rows.overlaps(&rows))
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_start.len()
    }

    fn near(&self, lo: u64, hi: u64) -> impl Iterator<Item = &Access> {
        self.by_start.range((lo.saturating_sub(self.longest), 0)..(hi, 0)).map(|(_, a)| a)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_meet_exactly_where_their_bytes_do() {
        let columns = |start, width| Rows { start, width, pitch: 10, rows: 5 };
        for (a, b) in (0..12).flat_map(|s| (1..9).map(move |w| (s, w))).flat_map(|a| (0..12).map(move |b| (a, b))) {
            for other in [columns(b, 3), Rows::range(b, 4), Rows { start: b, width: 2, pitch: 7, rows: 3 }] {
                let bytes = |r: &Rows| -> Vec<u64> { (0..r.rows).flat_map(|i| r.row(i).0..r.row(i).1).collect() };
                let left = columns(a.0, a.1);
                let truth = bytes(&left).iter().any(|x| bytes(&other).contains(x));
                assert_eq!(left.overlaps(&other), truth, "{left:?} {other:?}");
                assert_eq!(other.overlaps(&left), truth, "{other:?} {left:?}");
            }
        }
    }

    #[test]
    fn an_access_is_ordered_by_ticks_only() {
        let (mut map, host) = (AccessMap::default(), Clock::default());
        let at = |stream, tick, write| Access { rows: Rows::range(0, 8), write, stream, tick, what: "copy" };
        let mut first = Clock::default();
        first.tick(0);
        assert!(map.add(at(0, 1, true), &first, &host).is_none());
        let mut second = Clock::default();
        second.tick(1);
        assert!(map.add(at(1, 1, false), &second, &host).is_some());
        second.join(&first);
        second.tick(1);
        assert!(map.add(at(1, 2, false), &second, &host).is_none());
        assert!(map.unknown_to(&first, 0, 8, true).is_none());
        assert!(map.unknown_to(&first, 0, 8, false).is_some());
    }
}
