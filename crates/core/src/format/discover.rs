//! From what the user named to the shard files that it stands for.

use crate::error::{Error, ErrorKind, Result};
use crate::store::{Location, Origin, Watch};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// What a source stands for.
#[derive(Debug, Clone)]
pub(super) enum Found {
    /// Shard files, in natural order.
    Files(Vec<Origin>),
    /// An index, which names the files.
    Index(Origin),
}

/// What `sources` stand for: one thing (shard file, directory, index) or a list of shard files.
pub(super) fn discover(sources: &[Origin], watch: &Watch) -> Result<Found> {
    match sources {
        [] => Err(Error::new(ErrorKind::Invalid, "no file, directory or index was given to open")),
        [one] if is_index(one) => Ok(Found::Index(one.clone())),
        [one] => {
            let Some(names) = one.names(watch)? else { return Ok(Found::Files(vec![one.clone()])) };
            Ok(match choose(one.location(), names)? {
                ToOpen::Index(name) => Found::Index(one.within(&name)),
                ToOpen::Files(names) => Found::Files(names.iter().map(|name| one.within(name)).collect()),
            })
        }
        many => Ok(Found::Files(in_order(many.to_vec())?)),
    }
}

/// A list of shard files, in natural order. Refuses an index and a file that is there twice.
fn in_order(mut files: Vec<Origin>) -> Result<Vec<Origin>> {
    if let Some(index) = files.iter().find(|f| is_index(f)) {
        return Err(Error::new(
            ErrorKind::Invalid,
            "the list has an index among its files: give the index alone (it names its files), or the shard files without it",
        )
        .at(index.location()));
    }
    files.sort_by(|a, b| natural(a.location().as_os_str(), b.location().as_os_str()));
    if let Some(twice) = files.windows(2).find(|w| w[0] == w[1]) {
        return Err(Error::new(ErrorKind::Invalid, "this file is in the list twice").at(twice[0].location()));
    }
    Ok(files)
}

fn is_index(origin: &Origin) -> bool {
    origin.location().ending() == Some("json")
}

/// Indexes are called `model.safetensors.index.json`. The name of a variant stands before that ending
/// (`model.fp16.safetensors.index.json`, diffusers) or inside it (`model.safetensors.index.fp16.json`, transformers).
fn is_index_name(name: &str) -> bool {
    match name.strip_suffix(".json").and_then(|n| n.split_once(".safetensors.index")) {
        Some((_, variant)) => variant.is_empty() || variant.starts_with('.'),
        None => false,
    }
}

fn has_variant(name: &str) -> bool {
    name.strip_suffix(".safetensors.index.json").is_none_or(|stem| stem.contains('.'))
}

/// What is opened of the things in one place.
enum ToOpen {
    /// This index, and the files that it names.
    Index(OsString),
    /// These files, in natural order.
    Files(Vec<OsString>),
}

/// The names that are opened of the names in a folder, or under an address, `place`: those of shard files in natural order,
/// or that of one index, which names the files.
///
/// # Errors
/// `NotFound` if there is no checkpoint; `Index` if there are several.
pub fn to_open(place: &str, names: Vec<OsString>) -> Result<Vec<OsString>> {
    let place = Location::file(OsStr::new(place));
    Ok(match choose(&place, names)? {
        ToOpen::Index(name) => vec![name],
        ToOpen::Files(names) => names,
    })
}

/// Which of the names in the directory `dir`, or under an address, are opened.
fn choose(dir: &Location, mut names: Vec<OsString>) -> Result<ToOpen> {
    names.sort_by(|a, b| natural(a, b));
    let indexes: Vec<&str> = names.iter().filter_map(|n| n.to_str()).filter(|n| is_index_name(n)).collect();
    if !indexes.is_empty() {
        let plain: Vec<&str> = indexes.iter().copied().filter(|n| !has_variant(n)).collect();
        let chosen = match (&plain[..], &indexes[..]) {
            (plain, _) if plain.contains(&"model.safetensors.index.json") => "model.safetensors.index.json",
            ([one], _) | ([], [one]) => one,
            _ => {
                return Err(Error::new(
                    ErrorKind::Index,
                    format!("several indexes in this directory; give one of them: {}", indexes.join(", ")),
                )
                .at(dir));
            }
        };
        return Ok(ToOpen::Index(chosen.into()));
    }
    let files: Vec<OsString> =
        names.iter().filter(|n| Location::file(n).ending() == Some("safetensors")).cloned().collect();
    if files.is_empty() {
        return Err(nothing_in(dir, &names));
    }
    Ok(ToOpen::Files(files))
}

/// The error for a directory without safetensors files: it says what is there instead.
fn nothing_in(dir: &Location, names: &[OsString]) -> Error {
    const SHOWN: usize = 8;
    let lossy: Vec<_> = names.iter().map(|n| n.to_string_lossy()).collect();
    let ends = |ends: &[&str]| lossy.iter().find(|n| ends.iter().any(|e| n.ends_with(e)));
    let text = if names.is_empty() {
        "the directory is empty".to_owned()
    } else if let Some(n) = ends(&[".incomplete", ".part", ".crdownload", ".aria2"]) {
        format!("no safetensors file in this directory, but {n}: a download that has not ended?")
    } else if let Some(n) = lossy.iter().find(|n| is_pickled_weights(n)) {
        format!(
            "no safetensors file in this directory, but {n}, a torch.save file: `penstock convert FOLDER DIRECTORY` writes \
             it as safetensors"
        )
    } else if let Some(n) = ends(&[".gguf"]) {
        format!("no safetensors file in this directory, but {n}, which is for llama.cpp")
    } else {
        let more = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
        format!("no safetensors file in this directory; it holds {}{more}", lossy[..names.len().min(SHOWN)].join(", "))
    };
    Error::new(ErrorKind::NotFound, text).at(dir)
}

/// Whether torch.save may have written weights to a file of this name, and not the state of a training.
fn is_pickled_weights(name: &str) -> bool {
    const STATE: [&str; 8] = [
        "optim",
        "scheduler",
        "lr_scheduler",
        "scaler",
        "rng_state",
        "random_states",
        "training_args",
        "trainer_state",
    ];
    let ends = [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end));
    ends && !name.starts_with('.') && !STATE.iter().any(|state| name.starts_with(state))
}

/// Natural order: runs of digits compare as numbers, so that `model-2` comes before `model-10`. It is a total order:
/// names that differ only in leading zeros still differ.
pub(super) fn natural(a: &OsStr, b: &OsStr) -> Ordering {
    let (full_a, full_b) = (a.as_bytes(), b.as_bytes());
    let (mut a, mut b) = (full_a, full_b);
    loop {
        match (a.first(), b.first()) {
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let ((m, rest_a), (n, rest_b)) = (number(a), number(b));
                match m.len().cmp(&n.len()).then_with(|| m.cmp(n)) {
                    Ordering::Equal => (a, b) = (rest_a, rest_b),
                    unequal => return unequal,
                }
            }
            (Some(x), Some(y)) if x == y => (a, b) = (&a[1..], &b[1..]),
            (x, y) => return x.cmp(&y).then_with(|| full_a.cmp(full_b)),
        }
    }
}

/// The digits at the start without leading zeros, and the rest.
fn number(s: &[u8]) -> (&[u8], &[u8]) {
    let end = s.iter().position(|b| !b.is_ascii_digit()).unwrap_or(s.len());
    let zeros = s[..end].iter().take_while(|&&b| b == b'0').count();
    (&s[zeros..end], &s[end..])
}

/// Sets of shard files whose names say `-00001-of-00003` although not all three are there: one sentence for each set.
pub(super) fn incomplete_sets(files: &[Origin]) -> Vec<String> {
    let mut sets: Vec<(&str, usize, usize)> = Vec::new();
    let mut places: HashMap<(&str, usize), usize> = HashMap::new();
    for name in files.iter().filter_map(|f| f.location().stem()) {
        let Some((head, of)) = name.rsplit_once("-of-") else { continue };
        let (Some((prefix, part)), Ok(of)) = (head.rsplit_once('-'), of.parse::<usize>()) else { continue };
        if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        let place = *places.entry((prefix, of)).or_insert(sets.len());
        match sets.get_mut(place) {
            Some(set) => set.2 += 1,
            None => sets.push((prefix, of, 1)),
        }
    }
    sets.iter()
        .filter(|s| s.2 < s.1)
        .map(|(prefix, of, there)| format!("{there} of the {of} shard files of `{prefix}` are here, by their names"))
        .collect()
}
