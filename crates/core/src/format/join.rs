//! Joining headers: read several at a time, put into one set of arenas, compared with the index.

use super::checkpoint::{Checkpoint, Entry, Seeded, ShardFile};
use super::header::quoted;
use super::index::Index;
use super::shard::Shard;
use crate::error::{Error, ErrorKind, Result};
use crate::machine;
use crate::store::{Location, Origin, Version, Watch};
use hashbrown::hash_table::Entry as Slot;
use hashbrown::HashTable;
use std::collections::btree_map::Entry as MetadataSlot;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Least number of headers that are read at once. On a cold disk or a network file system the wait for the first bytes
/// of each file is longer than the parse, so there are more threads than cores. Each holds one header in memory.
const IN_FLIGHT: usize = 8;
/// The same of objects in stores: a distant server answers each after two or three round trips.
const ASKED_AT_ONCE: usize = 64;

/// Names listed in one message.
const SHOWN: usize = 12;

/// Reads something of every file: on the caller's thread one after the other, otherwise several at a time. If reads fail,
/// the error is that of the first file (in order) that failed.
pub(super) fn read_all<T: Send>(
    files: &[Origin],
    watch: &Watch,
    read: impl Fn(&Origin) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if watch.is_here() || files.len() == 1 {
        return files.iter().map(read).collect();
    }
    let left = files.len();
    // Learning the number of cores takes twenty system calls.
    let threads = match files.iter().any(|file| file.store().is_some()) {
        true => left.min(ASKED_AT_ONCE),
        false if left > IN_FLIGHT => left.min(machine::cores().max(IN_FLIGHT)),
        false => left,
    };
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let work = || {
        let mut done = Vec::new();
        while !stop.load(Ordering::Relaxed) && !watch.is_given_up() {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = files.get(i) else { break };
            let found = read(file);
            if found.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            done.push((i, found));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        // If no thread can be started (a process limit), the calling thread does all of it.
        let others: Vec<_> =
            (1..threads).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mut done = work();
        for thread in others {
            match thread.join() {
                Ok(part) => done.extend(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    // Files are taken in ascending order, so the first one that fails has always been read.
    done.sort_unstable_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

/// A checkpoint of the files of this index and of their headers.
pub(super) fn indexed(
    at: &Location,
    index: &Index,
    files: Vec<Origin>,
    mut shards: Vec<Shard>,
    hasher: Seeded,
) -> Result<Checkpoint> {
    let order = index.in_natural_order();
    let mut warnings = Vec::new();
    let mut kept = 0;
    for ((shard, file), &number) in shards.iter_mut().zip(&files).zip(&order) {
        let h = &mut shard.header;
        let name = |e: &Entry| &h.names[e.name.0 as usize..(e.name.0 + e.name.1) as usize];
        let mapped: Vec<Option<u32>> =
            h.entries.iter().zip(&h.hashes).map(|(e, &h)| index.file_of(name(e), h)).collect();
        // This holds even if the other file has a tensor of that name: choosing one of the two would be a guess.
        if let Some((e, &Some(other))) = h.entries.iter().zip(&mapped).find(|(_, m)| m.is_some_and(|m| m != number)) {
            return Err(Error::new(
                ErrorKind::Index,
                format!(
                    "tensor {} is in {}, but the index maps it to {}",
                    quoted(name(e)),
                    file.location(),
                    index.files[other as usize]
                ),
            )
            .at(at)
            .of_tensor(name(e))
            .with_values(index.files[other as usize].clone(), file.location().to_string()));
        }
        let unmapped: Vec<&Entry> =
            h.entries.iter().zip(&mapped).filter(|(_, m)| m.is_none()).map(|(e, _)| e).collect();
        if !unmapped.is_empty() {
            let names = listed(unmapped.iter().map(|e| quoted(name(e))), unmapped.len());
            warnings.push(format!("{}: ignored, because the index does not map them: {names}", file.location()));
            let keep = |i: usize| mapped[i].is_some();
            h.hashes = h.hashes.iter().enumerate().filter(|h| keep(h.0)).map(|h| *h.1).collect();
            h.entries = h.entries.iter().enumerate().filter(|e| keep(e.0)).map(|e| *e.1).collect();
        }
        kept += h.entries.len();
    }
    let mapped = index.len();
    let mut checkpoint = merge(files.into_iter().zip(shards), hasher, warnings)?;
    if kept < mapped {
        let lacking = || index.entries().filter(|&(name, ..)| checkpoint.find(name).is_none());
        let first = lacking().next().map_or("", |(name, ..)| name).to_owned();
        let absent: Vec<String> =
            lacking().map(|(name, _, file)| format!("{} (in {})", quoted(name), index.files[file as usize])).collect();
        let n = absent.len();
        return Err(Error::new(
            ErrorKind::Index,
            format!(
                "{n} tensors of the index are not in the files that it maps them to: {}",
                listed(absent.into_iter(), n)
            ),
        )
        .at(at)
        .of_tensor(first));
    }
    if let Some(total) = index.total_size {
        let actual = checkpoint.nbytes();
        if total != actual as f64 {
            checkpoint.warnings.push(format!("{}: total_size is {total}, but the tensors take {actual} bytes", at));
        }
    }
    Ok(checkpoint)
}

/// Joins the headers into one checkpoint. Refuses a name that is in two files.
pub(super) fn merge(
    shards: impl Iterator<Item = (Origin, Shard)>,
    hasher: Seeded,
    warnings: Vec<String>,
) -> Result<Checkpoint> {
    let shards: Vec<(Origin, Shard)> = shards.collect();
    let sum = |of: fn(&Shard) -> usize| shards.iter().map(|s| of(&s.1)).sum::<usize>();
    let count = sum(|s| s.header.entries.len());
    let (name_bytes, dims) = (sum(|s| s.header.names.len()), sum(|s| s.header.shapes.len()));
    if [count, name_bytes, dims].iter().any(|&n| u32::try_from(n).is_err()) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{count} tensors with {name_bytes} bytes of names: over 4 GiB of names or 2^32 tensors in one checkpoint"),
        ));
    }
    let mut checkpoint = Checkpoint {
        files: Vec::with_capacity(shards.len()),
        tensors: Vec::with_capacity(count),
        names: String::with_capacity(name_bytes),
        shapes: Vec::with_capacity(dims),
        by_name: HashTable::with_capacity(count),
        hasher,
        metadata: BTreeMap::new(),
        warnings,
    };
    let mut hashes: Vec<u64> = Vec::with_capacity(count);
    for (number, (origin, shard)) in shards.into_iter().enumerate() {
        let h = shard.header;
        let (names, shapes) = (checkpoint.names.len() as u32, checkpoint.shapes.len() as u32);
        let first = checkpoint.tensors.len() as u32;
        checkpoint.names.push_str(&h.names);
        checkpoint.shapes.extend_from_slice(&h.shapes);
        hashes.extend_from_slice(&h.hashes);
        checkpoint.tensors.extend(h.entries.iter().map(|e| {
            let mut e = *e;
            e.name.0 += names;
            e.shape.0 += shapes;
            e.file = number as u32;
            e
        }));
        for (key, value) in h.metadata.iter().flatten() {
            if let MetadataSlot::Vacant(slot) = checkpoint.metadata.entry(key.clone()) {
                slot.insert(value.clone());
            }
        }
        if origin.store().is_some() && matches!(shard.version, Version::Weak(_)) {
            checkpoint.warnings.push(format!(
                "{}: its server gives no strong ETag, so another content of the same size and date would not be noticed",
                origin.location()
            ));
        }
        checkpoint.files.push(ShardFile {
            location: origin.location().absolute(),
            spelled: origin.location().clone(),
            store: origin.store().cloned(),
            size: shard.size,
            version: shard.version,
            data_start: shard.data_start,
            header_read: shard.header_read,
            metadata: h.metadata,
            tensors: first..checkpoint.tensors.len() as u32,
        });
    }
    let mut by_name = std::mem::take(&mut checkpoint.by_name);
    for (i, &hash) in hashes.iter().enumerate() {
        let name = checkpoint.name(i as u32);
        let same = |&j: &u32| hashes[j as usize] == hash && checkpoint.name(j) == name;
        match by_name.entry(hash, same, |&j| hashes[j as usize]) {
            Slot::Vacant(slot) => {
                slot.insert(i as u32);
            }
            Slot::Occupied(slot) => {
                let file = |i: u32| &checkpoint.files[checkpoint.tensors[i as usize].file as usize];
                let (a, b) = (file(*slot.get()), file(i as u32));
                let same_file =
                    if a.version.is_of_same_file(&b.version) { " (both names lead to one file)" } else { "" };
                return Err(Error::new(
                    ErrorKind::Header,
                    format!(
                        "tensor {} is also in {}{same_file}: the files belong to several checkpoints, or to several \
                         variants of one; give only the files that you want to load",
                        quoted(name),
                        a.spelled
                    ),
                )
                .at(&b.spelled)
                .of_tensor(name));
            }
        }
    }
    checkpoint.by_name = by_name;
    Ok(checkpoint)
}

pub(super) fn listed(names: impl Iterator<Item = String>, count: usize) -> String {
    let mut out = names.take(SHOWN).collect::<Vec<_>>().join(", ");
    if count > SHOWN {
        let _ = write!(out, " and {} more", count - SHOWN);
    }
    out
}
