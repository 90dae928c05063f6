//! Byte ranges of any files, as a checkpoint: a tensor of bytes for each range. No header is read.

use super::checkpoint::{Checkpoint, Entry, Seeded};
use super::dtype::DType;
use super::header::Header;
use super::join::{merge, read_all};
use super::open::{open_detached, origins};
use super::shard::Shard;
use crate::detached::here;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Head, Origin, Stores, Watch};
use std::ffi::OsStr;
use std::hash::BuildHasher;
use std::ops::Range;
use std::time::Duration;

/// Bytes of the first read: a store answers with the size and the version of the object.
const FIRST_READ: u64 = 1;

impl Checkpoint {
    /// Opens files of any content for some of their bytes. Each range is a tensor of U8. Its name is its number, counted
    /// over the files in their order. The caller waits as in [`open_cancellable`](Self::open_cancellable).
    ///
    /// # Errors
    /// `Invalid` if the ranges of a file overlap or do not ascend, `Truncated` if one ends after its file, and those of
    /// opening a file.
    pub fn of_ranges<P: AsRef<OsStr>>(
        files: Vec<(P, Vec<Range<u64>>)>,
        stores: &Stores,
        stall: Duration,
        go_on: impl FnMut() -> bool,
    ) -> Result<Checkpoint> {
        here(move || {
            let (names, ranges): (Vec<P>, Vec<_>) = files.into_iter().unzip();
            let files = origins(&names, stores);
            open_detached(move |watch| joined(files, &ranges, watch), stall, go_on)
        })
    }
}

fn joined(files: Vec<Origin>, ranges: &[Vec<Range<u64>>], watch: &Watch) -> Result<Checkpoint> {
    let hasher = Seeded::default();
    let heads = read_all(&files, watch, |file| {
        file.open(FIRST_READ, watch).map(|open| open.close()).map_err(|e| e.at(file.location()))
    })?;
    let mut first = 0;
    let mut shards = Vec::with_capacity(files.len());
    for ((file, ranges), head) in files.into_iter().zip(ranges).zip(heads) {
        let shard = of_file(first, ranges, head, &hasher).map_err(|e| e.at(file.location()))?;
        first += ranges.len();
        shards.push((file, shard));
    }
    merge(shards.into_iter(), hasher, Vec::new(), None)
}

/// The ranges of one file. Their names count from `first`.
fn of_file(first: usize, ranges: &[Range<u64>], head: Head, hasher: &Seeded) -> Result<Shard> {
    let Head { bytes, size, version } = head;
    let mut header = Header::default();
    let mut at = 0;
    for (number, range) in (first..).zip(ranges) {
        if range.start < at || range.end < range.start {
            let text = format!("the range does not follow the one before it, which ends at {at}: they must ascend");
            return Err(Error::new(ErrorKind::Invalid, text).range(range.clone()));
        }
        if range.end > size {
            let text = format!("the range ends at {}, and the file has {size} bytes", range.end);
            return Err(Error::new(ErrorKind::Truncated, text).range(range.clone()).with_values(range.end, size));
        }
        at = range.end;
        let name = number.to_string();
        header.hashes.push(hasher.hash_one(name.as_str()));
        header.entries.push(Entry {
            name: (header.names.len() as u32, name.len() as u32),
            begin: range.start,
            end: range.end,
            shape: (header.shapes.len() as u32, 1),
            dtype: DType::U8,
            file: 0,
        });
        header.names.push_str(&name);
        header.shapes.push(range.end - range.start);
    }
    Ok(Shard { header, size, version, data_start: 0, header_read: bytes.len() as u64 })
}
