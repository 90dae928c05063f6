//! Index files: `weight_map` from tensor names to shard files.

use super::checkpoint::Seeded;
use super::header::{offset_of, own_seed, quoted, without_position, Ignored, Text};
use super::natural::natural;
use super::shard;

use crate::error::{Error, ErrorKind, Result};
use crate::store::{Origin, Watch};
use hashbrown::hash_table::Entry as Slot;
use hashbrown::HashTable;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, Visitor};
use std::ffi::OsStr;
use std::fmt;
use std::hash::BuildHasher;

/// Longest index that is read, in bytes. The largest known checkpoints have indexes of about 40 MB.
pub(super) const MAX_INDEX: u64 = 400_000_000;

/// A parsed index: every tensor's name, and the shard file to which the index maps it.
#[derive(Default)]
pub(super) struct Index {
    /// Names of the shard files, from the index's folder on, in order of first mention.
    pub(super) files: Vec<String>,
    pub(super) total_size: Option<f64>,
    names: String,
    entries: Vec<Mapped>,
    by_name: HashTable<u32>,
}

struct Mapped {
    name: (u32, u32),
    file: u32,
    hash: u64,
}

impl Index {
    /// Reads and checks the index at `origin`. Errors carry where that is.
    pub(super) fn read(origin: &Origin, hasher: &Seeded, watch: &Watch) -> Result<Index> {
        Self::load(origin, hasher, watch).map_err(|e| e.at(origin.location()))
    }

    fn load(origin: &Origin, hasher: &Seeded, watch: &Watch) -> Result<Index> {
        let bytes = origin.content(MAX_INDEX, watch, &Self::check_size)?;
        // From here on, only the parse takes time.
        Self::of(&bytes, hasher, watch)
    }

    /// Refuses an index that is longer than any known one by far.
    fn check_size(size: u64) -> Result<()> {
        if size > MAX_INDEX {
            let text = format!("an index of {size} bytes is over the limit of {MAX_INDEX}");
            return Err(Error::new(ErrorKind::Index, text));
        }
        Ok(())
    }

    /// The index in these bytes, all of a file that should be one.
    fn of(bytes: &[u8], hasher: &Seeded, watch: &Watch) -> Result<Index> {
        if bytes.is_empty() {
            return Err(Error::new(
                ErrorKind::NotACheckpoint,
                "the index is empty: an unfinished download? Fetch it again",
            ));
        }
        if let (false, Some(other)) = (bytes.trim_ascii_start().starts_with(b"{"), shard::recognise(bytes)) {
            return Err(other);
        }
        Self::parse(bytes, hasher, watch)
    }

    /// Parses the text of an index.
    pub(super) fn parse(bytes: &[u8], hasher: &Seeded, watch: &Watch) -> Result<Index> {
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let at = e.valid_up_to() as u64;
            Error::new(ErrorKind::Index, "the index is not valid UTF-8").range(at..at + 1)
        })?;
        let files = FileNumbers { spelled: HashTable::new(), distinct: HashTable::new(), hasher };
        let mut state = IndexParser { index: Index::default(), files, hasher, watch, has_map: false };
        let mut json = serde_json::Deserializer::from_str(text);
        json.deserialize_map(IndexTop(&mut state)).and_then(|()| json.end()).map_err(|e| {
            let at = offset_of(text, e.line(), e.column());
            Error::new(ErrorKind::Index, format!("malformed index: {}", without_position(&e))).range(at..at + 1)
        })?;
        if !state.has_map {
            return Err(Error::new(ErrorKind::Index, "malformed index: it has no `weight_map`"));
        }
        if state.index.entries.is_empty() {
            return Err(Error::new(ErrorKind::Index, "the index maps no tensor: its `weight_map` is empty"));
        }
        Ok(state.index)
    }

    /// Numbers of the files in [`files`](Self::files), in natural order of their names.
    pub(super) fn in_natural_order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.files.len() as u32).collect();
        let spelled = |&i: &u32| OsStr::new(&self.files[i as usize]);
        order.sort_by(|a, b| natural(spelled(a), spelled(b)));
        order
    }

    /// Number of tensors in the index.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn name(&self, i: u32) -> &str {
        let (start, len) = self.entries[i as usize].name;
        &self.names[start as usize..(start + len) as usize]
    }

    /// Number of the file in [`files`](Self::files) that the index maps `name` to.
    pub(super) fn file_of(&self, name: &str, hash: u64) -> Option<u32> {
        self.entry_of(name, hash).map(|(_, file)| file)
    }

    /// Number of the entry of `name`, and of the file in [`files`](Self::files) that it names.
    pub(super) fn entry_of(&self, name: &str, hash: u64) -> Option<(u32, u32)> {
        let i = self.by_name.find(hash, |&i| self.entries[i as usize].hash == hash && self.name(i) == name)?;
        Some((*i, self.entries[*i as usize].file))
    }

    /// All (name, hash of the name, file number), in the index's order.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, u64, u32)> {
        self.entries.iter().enumerate().map(|(i, e)| (self.name(i as u32), e.hash, e.file))
    }
}

/// `file` of a `weight_map` as a name that stays in the index's folder. Only the name is judged: hub caches are full of
/// links that lead out of the folder, and that is correct.
fn inside_folder(file: &str) -> Result<String, &'static str> {
    if file.is_empty() {
        return Err("is empty");
    }
    if file.contains('\0') {
        return Err("contains a NUL character");
    }
    if file.starts_with('/') {
        return Err("is an absolute path");
    }
    let parts: Vec<&str> = file.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if parts.contains(&"..") {
        return Err("leads out of the index's folder with `..`");
    }
    if parts.is_empty() {
        return Err("names the folder itself");
    }
    Ok(parts.join("/"))
}

/// Finds the numbers of files by their names: two look-ups for each entry of the index, however many files it names.
struct FileNumbers<'h> {
    /// The text of the entry, by its hash, and the file that it stands for: `a` and `./a` are one file.
    spelled: HashTable<(Box<str>, u32)>,
    /// Numbers of the files, by the hash of their paths.
    distinct: HashTable<u32>,
    hasher: &'h Seeded,
}

impl FileNumbers<'_> {
    /// The number in `files` of the file that `name` stands for. A new file is added there.
    fn number(&mut self, name: &str, files: &mut Vec<String>) -> Result<u32, &'static str> {
        let hasher = self.hasher;
        let hash = hasher.hash_one(name);
        if let Some((_, number)) = self.spelled.find(hash, |(spelled, _)| compared(**spelled == *name)) {
            return Ok(*number);
        }
        let path = inside_folder(name)?;
        let same = |&i: &u32| compared(files[i as usize] == path);
        let number = match self.distinct.entry(hasher.hash_one(&path), same, |&i| hasher.hash_one(&files[i as usize])) {
            Slot::Occupied(known) => *known.get(),
            Slot::Vacant(slot) => {
                let number = files.len() as u32;
                slot.insert(number);
                files.push(path);
                number
            }
        };
        self.spelled.insert_unique(hash, (name.into(), number), |(spelled, _)| hasher.hash_one(&**spelled));
        Ok(number)
    }
}

#[cfg(test)]
thread_local! {
    /// Comparisons of file names on this thread. Their number must not grow faster than the index.
    static COMPARED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// The outcome of comparing two file names; tests count them.
fn compared(outcome: bool) -> bool {
    #[cfg(test)]
    COMPARED.with(|count| count.set(count.get() + 1));
    outcome
}

struct IndexParser<'h> {
    index: Index,
    files: FileNumbers<'h>,
    hasher: &'h Seeded,
    watch: &'h Watch,
    has_map: bool,
}

impl IndexParser<'_> {
    fn file(&mut self, file: &str) -> Result<u32, String> {
        if self.watch.is_given_up() {
            return Err("the caller no longer waits for it".to_owned());
        }
        let number = self.files.number(file, &mut self.index.files);
        number.map_err(|why| format!("the file name {} in weight_map {why}: refused", quoted(file)))
    }

    fn name(&mut self, name: &str) -> Result<(), String> {
        let Index { names, entries, by_name, .. } = &mut self.index;
        let hash = self.hasher.hash_one(name);
        let number = entries.len() as u32;
        let same = |&i: &u32| {
            let e = &entries[i as usize];
            e.hash == hash && names[e.name.0 as usize..(e.name.0 + e.name.1) as usize] == *name
        };
        match by_name.entry(hash, same, |&i| entries[i as usize].hash) {
            Slot::Occupied(_) => return Err(format!("duplicate key {} in weight_map", quoted(name))),
            Slot::Vacant(slot) => slot.insert(number),
        };
        let place = (names.len() as u32, name.len() as u32);
        names.push_str(name);
        entries.push(Mapped { name: place, file: u32::MAX, hash });
        Ok(())
    }
}

struct IndexTop<'a, 'h>(&'a mut IndexParser<'h>);

impl<'de> Visitor<'de> for IndexTop<'_, '_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `weight_map`")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "weight_map" => {
                    if std::mem::replace(&mut self.0.has_map, true) {
                        return Err(de::Error::custom("duplicate key `weight_map`"));
                    }
                    map.next_value_seed(WeightMap(self.0))?;
                }
                "metadata" => self.0.index.total_size = map.next_value_seed(TotalSize)?,
                _ => map.next_value_seed(Ignored)?,
            }
        }
        Ok(())
    }
}

struct WeightMap<'a, 'h>(&'a mut IndexParser<'h>);

own_seed!(WeightMap<'_, '_>, (), |seed, d| d.deserialize_map(seed));

impl<'de> Visitor<'de> for WeightMap<'_, '_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("weight_map: an object from tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Text("a string", |name: &str| self.0.name(name)))?.is_some() {
            let file = map.next_value_seed(Text("a string", |file: &str| self.0.file(file)))?;
            if let Some(last) = self.0.index.entries.last_mut() {
                last.file = file;
            }
        }
        Ok(())
    }
}

/// `total_size` of the index's `metadata`. It can only lead to a warning, so everything else there is ignored.
struct TotalSize;

own_seed!(TotalSize, Option<f64>, |seed, d| d.deserialize_any(seed));

impl<'de> Visitor<'de> for TotalSize {
    type Value = Option<f64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metadata: null or an object")
    }
    fn visit_unit<E>(self) -> Result<Option<f64>, E> {
        Ok(None)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<f64>, A::Error> {
        let mut total = None;
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "total_size" => total = map.next_value_seed(Number)?,
                _ => map.next_value_seed(Ignored)?,
            }
        }
        Ok(total)
    }
}

/// A number, or `None` for anything else: writers have put floats and strings there.
struct Number;

own_seed!(Number, Option<f64>, |seed, d| d.deserialize_any(seed));

impl<'de> Visitor<'de> for Number {
    type Value = Option<f64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number")
    }
    fn visit_u64<E>(self, v: u64) -> Result<Option<f64>, E> {
        Ok(Some(v as f64))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Option<f64>, E> {
        Ok(Some(v as f64))
    }
    fn visit_f64<E>(self, v: f64) -> Result<Option<f64>, E> {
        Ok(Some(v))
    }
    fn visit_str<E>(self, v: &str) -> Result<Option<f64>, E> {
        Ok(v.trim().parse().ok())
    }
    fn visit_bool<E>(self, _: bool) -> Result<Option<f64>, E> {
        Ok(None)
    }
    fn visit_unit<E>(self) -> Result<Option<f64>, E> {
        Ok(None)
    }
    fn visit_seq<A: de::SeqAccess<'de>>(self, seq: A) -> Result<Option<f64>, A::Error> {
        Ignored.visit_seq(seq).map(|()| None)
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Option<f64>, A::Error> {
        Ignored.visit_map(map).map(|()| None)
    }
}

/// The shard files that an index with this text names: for fuzzing.
#[cfg(any(test, feature = "testing"))]
pub fn index_files(text: &[u8]) -> Result<Vec<String>> {
    Index::parse(text, &Seeded::default(), &Watch::default()).map(|index| index.files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    /// Comparisons of file names that an index of `count` entries costs, each in a file of its own.
    fn comparisons(count: usize, spelling: fn(usize) -> String) -> u64 {
        let mut text = String::from("{\"weight_map\": {");
        for i in 0..count {
            let comma = if i > 0 { "," } else { "" };
            write!(text, "{comma}\"t{i}\": \"{}\"", spelling(i)).unwrap();
        }
        text.push_str("}}");
        let before = COMPARED.get();
        let index = Index::parse(text.as_bytes(), &Seeded::default(), &Watch::default()).unwrap();
        assert_eq!(index.len(), count);
        COMPARED.get() - before
    }

    #[test]
    fn comparisons_of_file_names_do_not_grow_faster_than_the_index() {
        let spellings: [fn(usize) -> String; 4] = [
            |i| format!("{i}.safetensors"),
            |i| format!("{}.safetensors", i / 2),
            |i| format!("{}{}.safetensors", "./".repeat(i % 3), i / 3),
            |_| "one.safetensors".to_owned(),
        ];
        for (number, spelling) in spellings.into_iter().enumerate() {
            for count in [1_000, 10_000, 40_000] {
                let found = comparisons(count, spelling);
                // Each entry is found by its hash at once; a few hashes share their low bits.
                assert!(found <= 3 * count as u64, "spelling {number}: {found} comparisons for {count} entries");
            }
        }
    }
}
