//! Joining headers: read several at a time, put into one set of arenas, compared with the index.

use super::authority::Authority;
use super::checkpoint::{Checkpoint, Entry, Seeded, ShardFile};
use super::header::quoted;
use super::index::Index;
use super::shard::Shard;
use crate::error::{Error, ErrorKind, Result};
use crate::machine;
use crate::store::{descriptor_limit, Location, Origin, Version, Watch};
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
/// Descriptors that one of these questions may take: a connection, what it waits with, and files of a cache.
const DESCRIPTORS_EACH: u64 = 8;

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
    let threads = match files.iter().any(|file| file.store().is_distant()) {
        true => left.min(ASKED_AT_ONCE).min((descriptor_limit() / DESCRIPTORS_EACH).max(1) as usize),
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

/// A checkpoint of the files of this index and of their headers. The index is the authority: of a tensor in several files it
/// says which one counts.
pub(super) fn indexed(
    at: &Location,
    index: &Index,
    files: Vec<Origin>,
    mut shards: Vec<Shard>,
    hasher: Seeded,
    mut warnings: Vec<String>,
) -> Result<Checkpoint> {
    let order = index.in_natural_order();
    let mapped = |shard: &Shard| -> Vec<Option<(u32, u32)>> {
        let h = &shard.header;
        h.entries.iter().zip(&h.hashes).map(|(e, &hash)| index.entry_of(name_in(shard, e), hash)).collect()
    };
    // For each entry of the index: whether its tensor is where the index says.
    let mut there = vec![false; index.len()];
    let mut astray = false;
    for (shard, &number) in shards.iter().zip(&order) {
        for (entry, file) in mapped(shard).into_iter().flatten() {
            there[entry as usize] |= file == number;
            astray |= file != number;
        }
    }
    let mut kept = 0;
    // For each entry whose tensor is elsewhere: the file that it is taken from.
    let mut elsewhere: Vec<Option<u32>> = if astray { vec![None; index.len()] } else { Vec::new() };
    for ((shard, file), &number) in shards.iter_mut().zip(&files).zip(&order) {
        let mapped = mapped(shard);
        let at_file = file.location();
        let (mut unmapped, mut superseded, mut moved) = (Vec::new(), Vec::new(), Vec::new());
        let mut keep = vec![true; mapped.len()];
        for (i, (e, m)) in shard.header.entries.iter().zip(&mapped).enumerate() {
            let name = name_in(shard, e);
            match m {
                None => unmapped.push(quoted(name)),
                Some((_, m)) if *m == number => continue,
                Some((entry, m)) if there[*entry as usize] => {
                    superseded.push(format!("{} ({})", quoted(name), index.files[*m as usize]));
                }
                Some((entry, m)) => match elsewhere[*entry as usize].replace(number) {
                    None => {
                        moved.push(format!("{} ({})", quoted(name), index.files[*m as usize]));
                        continue;
                    }
                    // The index names a third file: choosing one of the two would be a guess.
                    Some(other) => {
                        let (other, says) = (&index.files[other as usize], &index.files[*m as usize]);
                        let text = format!(
                            "tensor {} is in {at_file} and in {other}, but the index maps it to {says}",
                            quoted(name)
                        );
                        return Err(Error::new(ErrorKind::Index, text)
                            .at(at)
                            .of_tensor(name)
                            .with_values(says.clone(), at_file.to_string()));
                    }
                },
            }
            keep[i] = false;
        }
        for (names, what) in [
            (unmapped, "ignored, because the index does not map them"),
            (superseded, "passed over, because the index maps them to other files, which have them"),
            (moved, "taken from here, because the files to which the index maps them lack them"),
        ] {
            if let n @ 1.. = names.len() {
                warnings.push(format!("{at_file}: {n} tensor{}: {what}: {}", plural(n), listed(names.into_iter(), n)));
            }
        }
        let h = &mut shard.header;
        if keep.contains(&false) {
            let mut of = keep.iter();
            h.hashes.retain(|_| of.next().copied().unwrap_or(true));
            let mut of = keep.iter();
            h.entries.retain(|_| of.next().copied().unwrap_or(true));
        }
        kept += h.entries.len();
    }
    let mapped = index.len();
    let mut checkpoint = merge(files.into_iter().zip(shards), hasher, warnings, None)?;
    if kept < mapped {
        let lacking = || index.entries().filter(|&(name, ..)| checkpoint.find(name).is_none());
        let absent: Vec<String> =
            lacking().map(|(name, _, file)| format!("{} ({})", quoted(name), index.files[file as usize])).collect();
        let n = absent.len();
        let text =
            format!("{n} tensor{} of the index {} in no shard file", plural(n), if n == 1 { "is" } else { "are" });
        if kept == 0 {
            let first = lacking().next().map_or("", |(name, ..)| name).to_owned();
            let text = format!("{text}: {}. Nothing is left of this checkpoint", listed(absent.into_iter(), n));
            return Err(Error::new(ErrorKind::Index, text).at(at).of_tensor(first));
        }
        let text = format!("{at}: {text}, so this checkpoint lacks them: {}", listed(absent.into_iter(), n));
        checkpoint.warnings.push(text);
    }
    if let Some(total) = index.total_size {
        let actual = checkpoint.nbytes();
        if total != actual as f64 {
            checkpoint.warnings.push(format!("{}: total_size is {total}, but the tensors take {actual} bytes", at));
        }
    }
    Ok(checkpoint)
}

fn name_in<'s>(shard: &'s Shard, e: &Entry) -> &'s str {
    &shard.header.names[e.name.0 as usize..(e.name.0 + e.name.1) as usize]
}

fn plural(n: usize) -> &'static str {
    if n == 1 {
        ""
    } else {
        "s"
    }
}

/// Joins the headers into one checkpoint. Refuses a name that is in two files, unless an index beside them (`authority`) says
/// which one counts.
pub(super) fn merge(
    shards: impl Iterator<Item = (Origin, Shard)>,
    hasher: Seeded,
    warnings: Vec<String>,
    mut authority: Option<Authority<'_>>,
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
        if matches!(shard.version, Version::Weak(_)) {
            checkpoint.warnings.push(format!(
                "{}: its server gives no strong ETag, so another content of the same size and date would not be noticed",
                origin.location()
            ));
        }
        checkpoint.files.push(ShardFile {
            location: origin.location().absolute(),
            spelled: origin.location().clone(),
            store: origin.store().clone(),
            size: shard.size,
            version: shard.version,
            data_start: shard.data_start,
            header_read: shard.header_read,
            metadata: h.metadata,
            tensors: first..checkpoint.tensors.len() as u32,
        });
    }
    let mut by_name = std::mem::take(&mut checkpoint.by_name);
    let mut decided: Vec<Decided> = Vec::new();
    for (i, &hash) in hashes.iter().enumerate() {
        let i = i as u32;
        let name = checkpoint.name(i);
        let same = |&j: &u32| hashes[j as usize] == hash && checkpoint.name(j) == name;
        match by_name.entry(hash, same, |&j| hashes[j as usize]) {
            Slot::Vacant(slot) => {
                slot.insert(i);
            }
            Slot::Occupied(mut slot) => {
                let held = *slot.get();
                let (a, b) = (checkpoint.file_of(held), checkpoint.file_of(i));
                let answer = match &mut authority {
                    Some(authority) if !checkpoint.same_file(a, b) => authority.file_of(name, hash)?,
                    _ => None,
                };
                let indexes = || authority.as_ref().map(Authority::read_from).unwrap_or_default();
                let Some(answer) = answer else { return Err(twice(&checkpoint, name, (a, b), &indexes())) };
                let left = if answer.file == b { std::mem::replace(slot.get_mut(), i) } else { i };
                decided.push(Decided { left, kept: answer.file, index: answer.index });
            }
        }
    }
    if decided.is_empty() {
        checkpoint.by_name = by_name;
        return Ok(checkpoint);
    }
    for one in &decided {
        let name = checkpoint.name(one.left);
        let hash = hashes[one.left as usize];
        let found = by_name.find(hash, |&j| hashes[j as usize] == hash && checkpoint.name(j) == name).copied();
        let kept = found.map_or(one.kept, |j| checkpoint.file_of(j));
        if kept != one.kept {
            let (files, index) = ((kept, checkpoint.file_of(one.left)), one.index.location().file_name());
            return Err(twice(&checkpoint, name, files, &[index.to_string_lossy().into_owned()]));
        }
    }
    checkpoint.leave_out(&decided, &hashes);
    Ok(checkpoint)
}

/// A tensor that is left out, because an index says that another file's counts.
struct Decided {
    /// Number of the tensor.
    left: u32,
    /// The file that counts.
    kept: u32,
    index: Origin,
}

/// The error for a name that is in two files, about which none of these indexes says anything, or several say different things.
fn twice(checkpoint: &Checkpoint, name: &str, (a, b): (u32, u32), indexes: &[String]) -> Error {
    let same_file = if checkpoint.same_file(a, b) { " (both names lead to one file)" } else { "" };
    let (a, b) = (&checkpoint.files[a as usize], &checkpoint.files[b as usize]);
    let what = "the files belong to several checkpoints, or to several variants of one";
    let (kind, what) = match indexes {
        [] => (ErrorKind::Header, format!("{what}; give only the files that you want to load")),
        _ => (
            ErrorKind::Index,
            format!("{what}, and no index says which counts; give the index that you mean: {}", indexes.join(", ")),
        ),
    };
    let text = format!("tensor {} is also in {}{same_file}: {what}", quoted(name), a.spelled);
    Error::new(kind, text).at(&b.spelled).of_tensor(name)
}

impl Checkpoint {
    fn file_of(&self, tensor: u32) -> u32 {
        self.tensors[tensor as usize].file
    }

    fn same_file(&self, a: u32, b: u32) -> bool {
        self.files[a as usize].version.is_of_same_file(&self.files[b as usize].version)
    }

    /// Leaves out what an index has decided against, and says so. `hashes`: of the names, by tensor.
    fn leave_out(&mut self, decided: &[Decided], hashes: &[u64]) {
        for (number, file) in (0..).zip(&self.files) {
            let here: Vec<&Decided> = decided.iter().filter(|d| file.tensors.contains(&d.left)).collect();
            let Some(first) = here.first() else { continue };
            let kept = |d: &Decided| self.files[d.kept as usize].spelled.file_name().to_string_lossy().into_owned();
            debug_assert!(here.iter().all(|d| d.kept != number));
            let names = here.iter().map(|d| format!("{} ({})", quoted(self.name(d.left)), kept(d)));
            let n = here.len();
            let text = format!(
                "{}: {n} tensor{}: passed over, because {} maps them to other files, which have them: {}",
                file.spelled,
                plural(n),
                first.index.location(),
                listed(names, n)
            );
            self.warnings.push(text);
        }
        let mut keep = vec![true; self.tensors.len()];
        decided.iter().for_each(|d| keep[d.left as usize] = false);
        let mut next = 0;
        for file in &mut self.files {
            let start = next;
            next += file.tensors.clone().filter(|&i| keep[i as usize]).count() as u32;
            file.tensors = start..next;
        }
        let hashes: Vec<u64> = hashes.iter().zip(&keep).filter(|h| *h.1).map(|h| *h.0).collect();
        let mut of = keep.iter();
        self.tensors.retain(|_| of.next().copied().unwrap_or(true));
        self.by_name = HashTable::with_capacity(hashes.len());
        for (i, &hash) in (0..).zip(&hashes) {
            self.by_name.insert_unique(hash, i, |&j| hashes[j as usize]);
        }
    }
}

pub(super) fn listed(names: impl Iterator<Item = String>, count: usize) -> String {
    let mut out = names.take(SHOWN).collect::<Vec<_>>().join(", ");
    if count > SHOWN {
        let _ = write!(out, " and {} more", count - SHOWN);
    }
    out
}
