//! The plan of a save: which tensor stands in which file, and where.
//!
//! The format allows no gap between tensors, so their order gives the alignment. [`Arrangement::Aligned`] pads the
//! header with spaces until the data begins at a page. It puts tensors whose size is a multiple of 4096 first, then
//! multiples of 256, of 64 and so on down to one byte. So each tensor begins at a multiple of the number that divides
//! its size, and at least at a multiple of its element's size. [`Arrangement::Compact`] is the order and the padding of
//! safetensors' own writer.

use super::names::{index_of, tagged, SUFFIX};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{layer, quoted, DType};
use crate::options::{Order, PAGE};
use crate::store::SteadyFile;
use serde_json::{json, Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

/// The longest header that readers of the format accept.
const LONGEST_HEADER: usize = 100_000_000;
/// The classes by which tensors are sorted: multiples of the first number come first.
const CLASSES: [u64; 8] = [PAGE, 256, 64, 16, 8, 4, 2, 1];

/// A tensor to be saved, in the terms of the format.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its extent per dimension, in elements.
    pub shape: Vec<u64>,
}

impl Tensor {
    /// Size in bytes.
    ///
    /// # Errors
    /// `Invalid` if it is not a whole number of bytes or does not fit 64 bits.
    pub fn nbytes(&self) -> Result<u64> {
        let elements = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        elements.and_then(|n| self.dtype.nbytes(n)).ok_or_else(|| {
            let (name, dtype, shape) = (quoted(&self.name), self.dtype, &self.shape);
            Error::invalid(format!("tensor {name} ({dtype} x {shape:?}) has no size in whole bytes"))
                .of_tensor(self.name.as_str())
        })
    }
}

/// How tensors stand in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// Large tensors are aligned; see the module.
    Aligned,
    /// As safetensors writes them: wide elements first, then by name.
    Compact,
}

/// One file of a save.
#[derive(Debug, Clone)]
pub struct FilePlan {
    /// Its name.
    pub name: OsString,
    /// Everything before the data: the header's length, the header, and the spaces after it.
    pub head: Vec<u8>,
    /// (number of the tensor, offset in the file, bytes), ascending and without gaps; empty tensors among them.
    pub places: Vec<(u32, u64, u64)>,
    /// Size in bytes.
    pub size: u64,
}

/// The plan of a save.
#[derive(Debug, Clone)]
pub struct SavePlan {
    /// The shards.
    pub files: Vec<FilePlan>,
    /// The text of the index file, if there are several shards.
    pub index: Option<String>,
    /// Its name.
    pub(super) index_name: Option<String>,
    /// Bytes of all tensors.
    pub nbytes: u64,
    /// Further objects that come with the checkpoint, before it is visible: names and contents.
    pub(super) small: Vec<(OsString, Vec<u8>)>,
    /// The files of this machine that have the bytes ([`At::File`](super::At::File)).
    pub(super) sources: Vec<Arc<SteadyFile>>,
    /// True if these are the files of one rank, and other ranks have the others of the checkpoint.
    pub(super) is_share: bool,
}

/// A rank's part of a checkpoint that several ranks save.
#[derive(Debug, Clone)]
pub struct RankShare {
    /// Names of its files. Readers of this library pass over them until an index names them.
    pub names: Vec<String>,
    /// The text of the index, if this rank writes it.
    pub index: Option<String>,
}

impl SavePlan {
    /// The plan for `tensors`: one file called `name`, or several shards of at most `most` bytes of tensors if they do
    /// not fit into one (a single larger tensor has its own shard). The shards of `model.safetensors` are called
    /// `model-00001-of-00002.safetensors` and so on.
    ///
    /// # Errors
    /// `Invalid` for names that occur twice or that the format reserves, for invalid sizes, for a header that is too
    /// long, and, with several files, for a `name` that is not UTF-8: the index is JSON and could not name them.
    pub fn new(
        tensors: &[Tensor],
        metadata: Option<&BTreeMap<String, String>>,
        name: impl AsRef<OsStr>,
        arrangement: Arrangement,
        order: Order,
        most: Option<u64>,
    ) -> Result<SavePlan> {
        Self::bounded(tensors, metadata, name, arrangement, order, most, LONGEST_HEADER as u64)
    }

    /// The same with headers of at most `longest` bytes. With `most`, a longer one becomes several.
    fn bounded(
        tensors: &[Tensor],
        metadata: Option<&BTreeMap<String, String>>,
        name: impl AsRef<OsStr>,
        arrangement: Arrangement,
        order: Order,
        most: Option<u64>,
        longest: u64,
    ) -> Result<SavePlan> {
        let mut names = HashSet::with_capacity(tensors.len());
        for tensor in tensors {
            if tensor.name == "__metadata__" {
                return Err(Error::invalid("a tensor cannot be called `__metadata__`: the format reserves this name"));
            }
            if !names.insert(&tensor.name) {
                return Err(Error::invalid(format!("two tensors are called {}", quoted(&tensor.name))));
            }
        }
        let sizes = tensors.iter().map(Tensor::nbytes).collect::<Result<Vec<u64>>>()?;
        let total = sizes.iter().try_fold(0u64, |sum, n| sum.checked_add(*n));
        let nbytes = total
            .filter(|n| i64::try_from(*n).is_ok())
            .ok_or_else(|| Error::invalid("the tensors together do not fit a file system"))?;
        let layers = match order {
            Order::File | Order::Asked => vec![0; tensors.len()],
            Order::Layer => layers(tensors),
        };
        let mut ordered: Vec<usize> = (0..tensors.len()).collect();
        ordered.sort_by_key(|&t| layers[t]);

        let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
        let mut filled = 0u64;
        // Of the header: what does not depend on where tensors stand, and the numbers that say it.
        let before = metadata.map_or(0, |metadata| json!(metadata).to_string().len() as u64) + PAGE;
        let mut header = before;
        for t in ordered {
            let of_tensor = header_of(&tensors[t]);
            let numbers = |shard: &[usize]| 2 * (shard.len() as u64 + 1) * digits(filled + sizes[t]);
            let shard = shards.last().map_or(&[][..], Vec::as_slice);
            let long = header + of_tensor + numbers(shard) > longest;
            let full = most.is_some_and(|most| filled > 0 && filled + sizes[t] > most || !shard.is_empty() && long);
            if full {
                shards.push(Vec::new());
                (filled, header) = (0, before);
            }
            filled += sizes[t];
            header += of_tensor;
            if let Some(shard) = shards.last_mut() {
                shard.push(t);
            }
        }
        let count = shards.len();
        let mut files = Vec::with_capacity(count);
        let mut map = Map::new();
        let name = name.as_ref();
        for (number, mut shard) in (1..).zip(shards) {
            let name = if count == 1 {
                name.to_owned()
            } else {
                let name = name.to_str().ok_or_else(|| not_utf8(name))?;
                let stem = name.strip_suffix(SUFFIX).unwrap_or(name);
                let name = format!("{stem}-{number:05}-of-{count:05}{SUFFIX}");
                map.extend(shard.iter().map(|&t| (tensors[t].name.clone(), Value::from(name.as_str()))));
                OsString::from(name)
            };
            match arrangement {
                Arrangement::Aligned => shard.sort_by_key(|&t| (layers[t], class(sizes[t]))),
                Arrangement::Compact if order == Order::Layer => {}
                Arrangement::Compact => {
                    let wide = |t: usize| DType::ALL.iter().position(|d| *d == tensors[t].dtype);
                    shard.sort_by(|&a, &b| wide(b).cmp(&wide(a)).then_with(|| tensors[a].name.cmp(&tensors[b].name)));
                }
            }
            files.push(file(name, tensors, &sizes, &shard, metadata, arrangement)?);
        }
        let index = (count > 1).then(|| {
            let index = json!({ "metadata": { "total_size": nbytes }, "weight_map": map });
            let mut text = serde_json::to_string_pretty(&index).unwrap_or_default();
            text.push('\n');
            text
        });
        let index_name = index.as_ref().and(name.to_str()).map(index_of);
        Ok(SavePlan { files, index, index_name, nbytes, small: Vec::new(), sources: Vec::new(), is_share: false })
    }

    /// The same files as the part of a rank, without those that have no tensor. `name` is that of the checkpoint.
    ///
    /// # Errors
    /// `Invalid` for a `name` that is not UTF-8, and for another number of names than there are files.
    pub fn of_rank(mut self, name: &OsStr, share: RankShare) -> Result<SavePlan> {
        let name = name.to_str().ok_or_else(|| not_utf8(name))?;
        self.files.retain(|file| !file.places.is_empty());
        if self.files.len() != share.names.len() {
            let (files, names) = (self.files.len(), share.names.len());
            return Err(Error::invalid(format!("{names} names are given for the {files} files of this rank")));
        }
        for (file, name) in self.files.iter_mut().zip(share.names) {
            file.name = name.into();
        }
        self.index_name = share.index.as_ref().map(|_| index_of(name));
        self.index = share.index;
        self.is_share = true;
        Ok(self)
    }

    /// Gives the shards other names: `model-TAG-00001-of-00002.safetensors`. The index keeps its name, and lists the new ones.
    ///
    /// # Errors
    /// `Index` if the text of the index is invalid.
    pub(super) fn tag_shards(&mut self, tag: &str) -> Result<()> {
        let Some(text) = &mut self.index else { return Ok(()) };
        let none = |why: &str| Error::new(ErrorKind::Index, format!("this is no index: {why}"));
        let mut index: Value = serde_json::from_str(text).map_err(|e| none(&e.to_string()))?;
        let map = index.get_mut("weight_map").and_then(Value::as_object_mut);
        let map = map.ok_or_else(|| none("it has no `weight_map`"))?;
        let mut renamed = HashMap::new();
        for file in &mut self.files {
            let old = file.name.to_string_lossy().into_owned();
            let new = tagged(&old, tag);
            file.name = OsString::from(&new);
            renamed.insert(old, new);
        }
        for name in map.values_mut() {
            if let Some(new) = name.as_str().and_then(|old| renamed.get(old)) {
                *name = Value::from(new.as_str());
            }
        }
        *text = serde_json::to_string_pretty(&index).unwrap_or_default();
        text.push('\n');
        Ok(())
    }

    /// Names of the files, the index file last.
    pub fn names(&self) -> Vec<OsString> {
        self.files.iter().map(|f| f.name.clone()).chain(self.index_name().map(OsString::from)).collect()
    }

    /// The name of the index file, if there are several shards.
    pub(super) fn index_name(&self) -> Option<String> {
        self.index_name.clone()
    }
}

fn not_utf8(name: &OsStr) -> Error {
    let text =
        format!("shards cannot be called {}: the name is not UTF-8, and an index is JSON", Path::new(name).display());
    Error::invalid(text)
}

/// Bytes that a tensor has in a header, without the two numbers that say where it stands.
fn header_of(tensor: &Tensor) -> u64 {
    let Tensor { name, dtype, shape } = tensor;
    let text = format!(",:{{\"dtype\":\"{dtype}\",\"shape\":{},\"data_offsets\":[,]}}", json!(shape));
    (json!(name).to_string().len() + text.len()) as u64
}

/// Digits of a decimal number.
fn digits(number: u64) -> u64 {
    u64::from(number.checked_ilog10().unwrap_or(0)) + 1
}

/// The place of a size among the classes.
fn class(nbytes: u64) -> usize {
    CLASSES.iter().position(|c| nbytes % c == 0).unwrap_or(CLASSES.len())
}

/// For each tensor the place of its layer: a group of layers stands where its first tensor stands, in numeric order.
fn layers(tensors: &[Tensor]) -> Vec<usize> {
    let mut stacks: HashMap<(&str, bool), usize> = HashMap::new();
    let keys: Vec<(usize, u64)> = tensors
        .iter()
        .enumerate()
        .map(|(position, tensor)| {
            let (group, number) = layer(&tensor.name);
            (*stacks.entry((group, number.is_some())).or_insert(position), number.unwrap_or(0))
        })
        .collect();
    let mut all = keys.clone();
    all.sort_unstable();
    all.dedup();
    keys.iter().map(|key| all.binary_search(key).unwrap_or(0)).collect()
}

fn file(
    name: OsString,
    tensors: &[Tensor],
    sizes: &[u64],
    shard: &[usize],
    metadata: Option<&BTreeMap<String, String>>,
    arrangement: Arrangement,
) -> Result<FilePlan> {
    let mut text = String::from("{");
    if let Some(metadata) = metadata {
        let _ = write!(text, "\"__metadata__\":{}", json!(metadata));
    }
    let mut at = 0;
    for &t in shard {
        let comma = if text.len() > 1 { "," } else { "" };
        let Tensor { name, dtype, shape } = &tensors[t];
        let end = at + sizes[t];
        let _ = write!(
            text,
            "{comma}{}:{{\"dtype\":\"{dtype}\",\"shape\":{},\"data_offsets\":[{at},{end}]}}",
            json!(name),
            json!(shape)
        );
        at = end;
    }
    text.push('}');
    let to = match arrangement {
        Arrangement::Aligned => PAGE as usize,
        Arrangement::Compact => 8,
    };
    let len = (8 + text.len()).next_multiple_of(to) - 8;
    if len > LONGEST_HEADER {
        let name = Path::new(&name).display();
        let why = format!(
            "{name}: its header would have {len} bytes, and readers accept {LONGEST_HEADER}: save several files \
             (penstock.save with max_shard_size=), or use shorter names and metadata"
        );
        return Err(Error::invalid(why));
    }
    let mut head = Vec::with_capacity(8 + len);
    head.extend_from_slice(&(len as u64).to_le_bytes());
    head.extend_from_slice(text.as_bytes());
    head.resize(8 + len, b' ');
    let data = head.len() as u64;
    let mut at = data;
    let places = shard.iter().map(|&t| {
        at += sizes[t];
        (t as u32, at - sizes[t], sizes[t])
    });
    let places = places.collect();
    Ok(FilePlan { name, head, places, size: at })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::format::Checkpoint;

    fn tensor(name: &str, dtype: DType, shape: &[u64]) -> Tensor {
        Tensor { name: name.into(), dtype, shape: shape.to_vec() }
    }

    fn some() -> Vec<Tensor> {
        vec![
            tensor("model.layers.10.bias", DType::F32, &[3]),
            tensor("model.layers.2.norm", DType::F32, &[64]),
            tensor("model.layers.2.weight", DType::BF16, &[64, 64]),
            tensor("model.layers.10.weight", DType::BF16, &[64, 64]),
            tensor("scale", DType::F64, &[]),
            tensor("none", DType::F16, &[0, 7]),
            tensor("odd", DType::U8, &[13]),
            tensor("head", DType::F16, &[2048]),
        ]
    }

    fn plan(arrangement: Arrangement, order: Order, most: Option<u64>) -> SavePlan {
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        SavePlan::new(&some(), Some(&metadata), "model.safetensors", arrangement, order, most).unwrap()
    }

    /// The verdict of our own parser on a planned file.
    fn parsed(file: &FilePlan) -> Checkpoint {
        Checkpoint::from_bytes(&file.head, file.size).unwrap()
    }

    #[test]
    fn every_plan_is_a_header_that_says_where_the_bytes_are() {
        for arrangement in [Arrangement::Aligned, Arrangement::Compact] {
            for order in [Order::File, Order::Layer] {
                for most in [None, Some(1), Some(9000)] {
                    let plan = plan(arrangement, order, most);
                    let mut found = Vec::new();
                    for file in &plan.files {
                        let checkpoint = parsed(file);
                        let mut end = file.head.len() as u64;
                        for &(t, offset, nbytes) in &file.places {
                            let wanted = &some()[t as usize];
                            let info = checkpoint.find(&wanted.name).unwrap();
                            assert_eq!((info.begin, info.nbytes(), info.dtype), (offset, nbytes, wanted.dtype));
                            assert_eq!((info.shape, offset), (&wanted.shape[..], end));
                            end += nbytes;
                            found.push(t);
                        }
                        assert_eq!(end, file.size);
                    }
                    found.sort_unstable();
                    assert_eq!(found, (0..8).collect::<Vec<_>>());
                    assert_eq!(plan.index.is_some(), plan.files.len() > 1);
                }
            }
        }
    }

    #[test]
    fn aligned_tensors_begin_at_multiples_of_what_their_sizes_are_multiples_of() {
        let plan = plan(Arrangement::Aligned, Order::File, None);
        for &(_, offset, nbytes) in &plan.files[0].places {
            assert_eq!(offset % CLASSES[class(nbytes)], 0);
        }
        assert_eq!(plan.files[0].head.len() % PAGE as usize, 0);
    }

    #[test]
    fn layers_stay_together_in_numeric_order() {
        let tensors = some();
        let plan = plan(Arrangement::Aligned, Order::Layer, None);
        let names: Vec<&str> = plan.files[0].places.iter().map(|p| tensors[p.0 as usize].name.as_str()).collect();
        let layers = ["model.layers.2.weight", "model.layers.2.norm", "model.layers.10.weight", "model.layers.10.bias"];
        assert_eq!(names[..4], layers);
    }

    #[test]
    fn shards_hold_as_much_as_they_may_in_the_given_order() {
        let plan = plan(Arrangement::Compact, Order::File, Some(8500));
        let names: Vec<&str> = plan.files.iter().map(|f| f.name.to_str().unwrap()).collect();
        assert_eq!(names[0], "model-00001-of-00003.safetensors");
        let in_each: Vec<Vec<u32>> = plan.files.iter().map(|f| f.places.iter().map(|p| p.0).collect()).collect();
        let sorted = |v: &Vec<u32>| {
            let mut v = v.clone();
            v.sort_unstable();
            v
        };
        assert_eq!(in_each.iter().map(sorted).collect::<Vec<_>>(), [vec![0, 1, 2], vec![3, 4, 5, 6], vec![7]]);
        let index: Value = serde_json::from_str(plan.index.as_deref().unwrap()).unwrap();
        assert_eq!(index["weight_map"]["head"], "model-00003-of-00003.safetensors");
        assert_eq!(index["metadata"]["total_size"], plan.nbytes);
    }

    #[test]
    fn shards_end_where_their_header_would_be_too_long() {
        let tensors: Vec<Tensor> =
            (0..3000).map(|i| tensor(&format!("layer.{i}.\"é\""), DType::F32, &[i % 7, 3])).collect();
        for (arrangement, longest) in [Arrangement::Aligned, Arrangement::Compact]
            .into_iter()
            .flat_map(|a| [6_000u64, 10_000, 50_000, 200_000].map(|longest| (a, longest)))
        {
            let most = Some(1 << 40);
            let plan = SavePlan::bounded(&tensors, None, "model", arrangement, Order::File, most, longest).unwrap();
            let lengths: Vec<u64> = plan.files.iter().map(|file| file.head.len() as u64).collect();
            assert!(lengths.iter().all(|length| *length <= longest), "{lengths:?} over {longest}");
            // No shard is ended far too early: a page of padding, and some digits.
            let most_shards = lengths.iter().sum::<u64>() / (longest * 4 / 5 - PAGE) + 1;
            assert!(lengths.len() as u64 <= most_shards, "{} shards of {longest}: {lengths:?}", lengths.len());
            assert_eq!(plan.files.iter().map(|file| file.places.len()).sum::<usize>(), tensors.len());
            assert_eq!(plan.index.is_some(), lengths.len() > 1);
        }
        let one = SavePlan::bounded(&tensors, None, "model", Arrangement::Aligned, Order::File, None, 10_000).unwrap();
        assert_eq!(one.files.len(), 1);
    }

    #[test]
    fn the_files_of_a_rank_have_the_names_that_are_given() {
        let names = || ["a", "b", "c"].map(str::to_owned).to_vec();
        let share = RankShare { names: names(), index: Some("{}".to_owned()) };
        let plan = plan(Arrangement::Aligned, Order::File, Some(8500)).of_rank(OsStr::new("m"), share.clone()).unwrap();
        assert_eq!(plan.names(), ["a", "b", "c", "m.safetensors.index.json"].map(OsString::from));
        let nothing = SavePlan::new(&[], None, "m", Arrangement::Aligned, Order::File, None).unwrap();
        let none = RankShare { names: Vec::new(), index: None };
        assert_eq!(nothing.clone().of_rank(OsStr::new("m"), none).unwrap().names(), Vec::<OsString>::new());
        assert_eq!(nothing.of_rank(OsStr::new("m"), share).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn names_that_the_format_cannot_hold_are_refused() {
        for tensors in [
            vec![tensor("__metadata__", DType::U8, &[1])],
            vec![tensor("a", DType::U8, &[1]), tensor("a", DType::U8, &[2])],
            vec![tensor("a", DType::F4, &[3])],
            vec![tensor("a", DType::F32, &[u64::MAX, 2])],
        ] {
            let refused = SavePlan::new(&tensors, None, "m", Arrangement::Aligned, Order::File, None).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid);
        }
    }
}
