//! One shard file's header: JSON is parsed straight into arenas, then checked.
//!
//! The parser writes names, shapes and entries into three growing arrays and allocates nothing else per tensor. Its
//! memory is bounded by a small multiple of the header's length, which is capped before the header is read.
//!
//! The verdict is that of the safetensors crate 0.8, except that this parser is stricter in four points: keys may not
//! repeat (at the top, in an entry, in `__metadata__`), an entry must be an object (the crate also takes an array of
//! its three fields), a dtype must be a string, and a shape has at most [`MAX_RANK`] dimensions. It is looser in no
//! point.

use super::checkpoint::{Entry, Seeded};
use super::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use hashbrown::hash_table::Entry as Slot;
use hashbrown::{HashSet, HashTable};
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::{btree_map, BTreeMap};
use std::fmt;
use std::hash::BuildHasher;

/// Longest header that is read, in bytes; the format's own limit.
pub const MAX_HEADER: u64 = 100_000_000;

/// Most dimensions a tensor may have: torch and numpy both stop at 64.
pub const MAX_RANK: usize = 64;

/// The tensors of one header, sorted by offset. Entries refer to `names` and `shapes`; their offsets count from the start
/// of the file; their `file` is 0.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) names: String,
    pub(super) shapes: Vec<u64>,
    pub(super) entries: Vec<Entry>,
    /// Hash of each entry's name.
    pub(super) hashes: Vec<u64>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
}

/// Parses `json`, the header without its length, of a file `size` bytes long whose data section begins at `data_start`.
pub(super) fn parse(json: &[u8], data_start: u64, size: u64, hasher: &Seeded) -> Result<Header> {
    let text = std::str::from_utf8(json).map_err(|e| {
        let at = 8 + e.valid_up_to() as u64;
        Error::new(ErrorKind::Header, "the header is not valid UTF-8").range(at..at + 1)
    })?;
    // A tensor takes about 100 bytes of header. A guess that is too small only costs a rehash.
    let guess = text.len() / 96;
    let mut state = HeaderParser {
        header: Header {
            names: String::with_capacity(text.len() / 3),
            shapes: Vec::with_capacity(guess * 2),
            entries: Vec::with_capacity(guess),
            hashes: Vec::with_capacity(guess),
            metadata: None,
        },
        by_name: HashTable::with_capacity(guess),
        hasher,
        has_metadata: false,
        inside: None,
    };
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = json.deserialize_map(Top(&mut state)).and_then(|()| json.end());
    if let Err(e) = parsed {
        let at = 8 + offset_of(text, e.line(), e.column());
        let tensor = match &state.inside {
            Some(Inside::Tensor((start, len))) => Some(&state.header.names[*start as usize..(*start + *len) as usize]),
            _ => None,
        };
        let of = match (&state.inside, tensor) {
            (_, Some(name)) => format!("tensor {}: ", quoted(name)),
            (Some(Inside::Metadata), _) => "__metadata__: ".to_owned(),
            _ => String::new(),
        };
        let text = format!("malformed header: {of}{}", without_position(&e));
        let error = Error::new(ErrorKind::Header, text).range(at..at + 1);
        return Err(match tensor {
            Some(name) => error.of_tensor(name),
            None => error,
        });
    }
    let mut header = state.header;
    check(&mut header, data_start, size)?;
    Ok(header)
}

/// Sorts the entries by offset and checks that each has the bytes its dtype and shape need, that together they cover the
/// data section without gap or overlap, and that the section is there. Makes offsets count from the start of the file.
fn check(h: &mut Header, data_start: u64, size: u64) -> Result<()> {
    let sorted = h.entries.is_sorted_by_key(|e| (e.begin, e.end));
    if !sorted {
        // Ties (empty tensors) keep the header's order, so that numbering is the same on every rank.
        let mut order: Vec<u32> = (0..h.entries.len() as u32).collect();
        order.sort_by_key(|&i| (h.entries[i as usize].begin, h.entries[i as usize].end));
        h.entries = order.iter().map(|&i| h.entries[i as usize]).collect();
        h.hashes = order.iter().map(|&i| h.hashes[i as usize]).collect();
    }
    let plain = |e: &Entry| &h.names[e.name.0 as usize..(e.name.0 + e.name.1) as usize];
    let name = |e: &Entry| quoted(plain(e));
    let wrong = |e: &Entry, text: String| Error::new(ErrorKind::Header, text).of_tensor(plain(e));
    let mut at = 0;
    let mut previous: Option<&Entry> = None;
    for e in &h.entries {
        if e.begin > e.end {
            return Err(wrong(e, format!("tensor {} begins at {}, after its end at {}", name(e), e.begin, e.end)));
        }
        if e.begin != at {
            let before = previous.map_or("the start of the data section".to_owned(), |p| format!("tensor {}", name(p)));
            let text = if e.begin < at {
                format!(
                    "tensor {} at data offsets {}..{} overlaps {before}, which ends at {at}",
                    name(e),
                    e.begin,
                    e.end
                )
            } else {
                format!("hole: {} bytes between {before} and tensor {} belong to no tensor", e.begin - at, name(e))
            };
            return Err(wrong(e, text).with_values(at, e.begin));
        }
        let shape = &h.shapes[e.shape.0 as usize..e.shape.0 as usize + usize::from(e.shape.1)];
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let Some(bits) = elements.and_then(|n| n.checked_mul(e.dtype.bits())) else {
            return Err(wrong(e, format!("tensor {}: the size of {} x {shape:?} overflows 64 bits", name(e), e.dtype)));
        };
        if bits % 8 != 0 {
            return Err(wrong(e, format!("tensor {}: {} x {shape:?} does not fill whole bytes", name(e), e.dtype)));
        }
        if bits / 8 != e.end - e.begin {
            let (needs, has) = (bits / 8, e.end - e.begin);
            let text = format!(
                "tensor {}: {} x {shape:?} takes {needs} bytes, but its data offsets {}..{} span {has}",
                name(e),
                e.dtype,
                e.begin,
                e.end
            );
            return Err(wrong(e, text).with_values(needs, has));
        }
        at = e.end;
        previous = Some(e);
    }
    let held = size - data_start;
    if at > held {
        return Err(Error::new(
            ErrorKind::Truncated,
            format!(
                "the file is {size} bytes long, {} bytes short of what its header describes: unfinished download?",
                at - held
            ),
        )
        .range(size..data_start.saturating_add(at))
        .with_values(data_start.saturating_add(at), size));
    }
    if at < held {
        return Err(Error::new(
            ErrorKind::Header,
            format!("the last {} bytes of the file belong to no tensor: the header does not cover it", held - at),
        )
        .range(data_start + at..size)
        .with_values(data_start + at, size));
    }
    for e in &mut h.entries {
        e.begin += data_start;
        e.end += data_start;
    }
    Ok(())
}

/// A tensor's name for a message: quoted, control characters escaped, and cut if it is very long.
pub(crate) fn quoted(name: &str) -> String {
    const SHOWN: usize = 160;
    let mut out = String::from("`");
    out.extend(name.chars().take(SHOWN).flat_map(|c| {
        let plain = (!c.is_control()).then_some(c);
        plain.into_iter().chain(plain.is_none().then(|| c.escape_default()).into_iter().flatten())
    }));
    if name.chars().nth(SHOWN).is_some() {
        out.push_str("...");
    }
    out.push('`');
    out
}

/// The text of serde_json's error, without its "at line 1 column 2": our errors give the byte range.
pub(super) fn without_position(e: &serde_json::Error) -> String {
    let mut text = e.to_string();
    if let Some(at) = text.rfind(" at line ") {
        text.truncate(at);
    }
    text
}

/// Byte offset in `text` of serde_json's one-based line and column (a column counts bytes).
pub(super) fn offset_of(text: &str, line: usize, column: usize) -> u64 {
    let line_start = match line {
        0 | 1 => 0,
        _ => text.bytes().enumerate().filter(|b| b.1 == b'\n').nth(line - 2).map_or(text.len(), |b| b.0 + 1),
    };
    (line_start + column.saturating_sub(1)).min(text.len()) as u64
}

/// Makes a visitor the seed of the value that it reads.
macro_rules! own_seed {
    ($visitor:ty, $value:ty, |$seed:ident, $d:ident| $read:expr) => {
        impl<'de> DeserializeSeed<'de> for $visitor {
            type Value = $value;
            fn deserialize<D: Deserializer<'de>>(self, $d: D) -> Result<$value, D::Error> {
                let $seed = self;
                $read
            }
        }
    };
}
pub(super) use own_seed;

/// A string that is handed to a function without being copied first. An error says what was expected in its place.
pub(super) struct Text<F>(pub(super) &'static str, pub(super) F);

impl<'de, T, F: FnOnce(&str) -> Result<T, String>> DeserializeSeed<'de> for Text<F> {
    type Value = T;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<T, D::Error> {
        d.deserialize_str(self)
    }
}

impl<T, F: FnOnce(&str) -> Result<T, String>> Visitor<'_> for Text<F> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.1)(text).map_err(E::custom)
    }
}

enum Inside {
    Tensor((u32, u32)),
    Metadata,
}

struct HeaderParser<'h> {
    header: Header,
    by_name: HashTable<u32>,
    hasher: &'h Seeded,
    has_metadata: bool,
    /// Where the parser is, for messages.
    inside: Option<Inside>,
}

impl HeaderParser<'_> {
    fn key(&mut self, key: &str) -> Result<Key, String> {
        if key == "__metadata__" {
            if std::mem::replace(&mut self.has_metadata, true) {
                return Err("duplicate key `__metadata__`".to_owned());
            }
            self.inside = Some(Inside::Metadata);
            return Ok(Key::Metadata);
        }
        let Header { names, entries, hashes, .. } = &mut self.header;
        let hash = self.hasher.hash_one(key);
        let number = entries.len() as u32;
        let same = |&i: &u32| {
            let (start, len) = entries[i as usize].name;
            hashes[i as usize] == hash && names[start as usize..(start + len) as usize] == *key
        };
        match self.by_name.entry(hash, same, |&i| hashes[i as usize]) {
            Slot::Occupied(_) => return Err(format!("duplicate key {}", quoted(key))),
            Slot::Vacant(slot) => slot.insert(number),
        };
        // A header has at most MAX_HEADER bytes, so its arenas stay far below u32::MAX.
        let name = (names.len() as u32, key.len() as u32);
        names.push_str(key);
        hashes.push(hash);
        self.inside = Some(Inside::Tensor(name));
        Ok(Key::Tensor(name))
    }
}

enum Key {
    Metadata,
    Tensor((u32, u32)),
}

struct Top<'a, 'h>(&'a mut HeaderParser<'h>);

impl<'de> Visitor<'de> for Top<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with one entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let state = self.0;
        while let Some(key) = map.next_key_seed(Text("the name of a tensor", |key: &str| state.key(key)))? {
            match key {
                Key::Metadata => state.header.metadata = map.next_value_seed(MetadataSeed)?,
                Key::Tensor(name) => {
                    let entry = map.next_value_seed(EntrySeed { name, shapes: &mut state.header.shapes })?;
                    state.header.entries.push(entry);
                }
            }
            state.inside = None;
        }
        Ok(())
    }
}

struct EntrySeed<'a> {
    name: (u32, u32),
    shapes: &'a mut Vec<u64>,
}

own_seed!(EntrySeed<'_>, Entry, |seed, d| d.deserialize_map(seed));

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `dtype`, `shape` and `data_offsets`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        // Unknown fields are ignored, as in the safetensors crate. The set is made when the first one comes.
        let mut others: Option<HashSet<String>> = None;
        fn once<T, E: de::Error>(slot: &mut Option<T>, value: T, key: &str) -> Result<(), E> {
            match slot.replace(value) {
                None => Ok(()),
                Some(_) => Err(E::custom(format_args!("duplicate key `{key}`"))),
            }
        }
        let field = |key: &str| match key {
            "dtype" => Ok(Field::DType),
            "shape" => Ok(Field::Shape),
            "data_offsets" => Ok(Field::Offsets),
            other => Ok(Field::Other(other.to_owned())),
        };
        let named = |name: &str| DType::parse(name).ok_or_else(|| format!("unknown dtype {}", quoted(name)));
        while let Some(field) = map.next_key_seed(Text("a field's name", field))? {
            match field {
                Field::DType => {
                    let seed = Text("a dtype such as \"BF16\"", named);
                    once(&mut dtype, map.next_value_seed(seed)?, "dtype")?;
                }
                Field::Shape => once(&mut shape, map.next_value_seed(ShapeSeed(self.shapes))?, "shape")?,
                Field::Offsets => once(&mut offsets, map.next_value_seed(OffsetsSeed)?, "data_offsets")?,
                Field::Other(key) => {
                    let message = format!("duplicate key {}", quoted(&key));
                    if !others.get_or_insert_default().insert(key) {
                        return Err(de::Error::custom(message));
                    }
                    map.next_value_seed(Ignored)?;
                }
            }
        }
        let (begin, end) = offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?;
        Ok(Entry {
            name: self.name,
            begin,
            end,
            shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
            dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
            file: 0,
        })
    }
}

enum Field {
    DType,
    Shape,
    Offsets,
    Other(String),
}

/// Appends the dimensions to the arena and returns their place in it.
struct ShapeSeed<'a>(&'a mut Vec<u64>);

own_seed!(ShapeSeed<'_>, (u32, u8), |seed, d| d.deserialize_seq(seed));

impl<'de> Visitor<'de> for ShapeSeed<'_> {
    type Value = (u32, u8);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a shape: an array of integers from 0 to 2^64 - 1")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(u32, u8), A::Error> {
        let start = self.0.len();
        while let Some(extent) = seq.next_element::<u64>()? {
            if self.0.len() - start == MAX_RANK {
                return Err(de::Error::custom(format_args!("shape has more than {MAX_RANK} dimensions")));
            }
            self.0.push(extent);
        }
        Ok((start as u32, (self.0.len() - start) as u8))
    }
}

struct OffsetsSeed;

own_seed!(OffsetsSeed, (u64, u64), |seed, d| d.deserialize_tuple(2, seed));

impl<'de> Visitor<'de> for OffsetsSeed {
    type Value = (u64, u64);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("data_offsets: an array of two integers, begin and end")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(u64, u64), A::Error> {
        let begin = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
        let end = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
        Ok((begin, end))
    }
}

/// `__metadata__`: null, or an object of strings.
struct MetadataSeed;

own_seed!(MetadataSeed, Option<BTreeMap<String, String>>, |seed, d| d.deserialize_option(seed));

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = Option<BTreeMap<String, String>>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("null or an object whose values are strings")
    }
    fn visit_none<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            match metadata.entry(key) {
                btree_map::Entry::Occupied(slot) => {
                    return Err(de::Error::custom(format_args!("duplicate key {}", quoted(slot.key()))));
                }
                btree_map::Entry::Vacant(slot) => slot.insert(map.next_value()?),
            };
        }
        Ok(Some(metadata))
    }
}

/// Any value, parsed in full and dropped. serde_json skips over [`serde::de::IgnoredAny`]. This one refuses what the
/// safetensors crate refuses inside unknown fields: lone surrogates, numbers out of range, nesting deeper than 128.
pub(super) struct Ignored;

own_seed!(Ignored, (), |seed, d| d.deserialize_any(seed));

impl<'de> Visitor<'de> for Ignored {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Ignored)?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Ignored)?.is_some() {
            map.next_value_seed(Ignored)?;
        }
        Ok(())
    }
}
