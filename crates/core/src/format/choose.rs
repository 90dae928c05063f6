//! The names of a folder that are opened: a pure function of its names.
//!
//! `docs/compatibility.md` states the order, and the tests below are its table of cases.

use super::natural::natural;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Location;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

/// Tensors of transformers and mlx.
const MODEL: &str = "model";
/// Tensors of diffusers, which takes an index before a single file.
const DIFFUSERS: &str = "diffusion_pytorch_model";
/// Tensors of peft.
const PEFT: &str = "adapter_model";
/// Tensors in the layout of the model's own program, often beside those of transformers.
const CONSOLIDATED: &str = "consolidated";
/// How many names of missing shards are found at most.
const MOST_MISSING: usize = 10_000;
/// The file that a save makes before it gives its shards their names, and removes when their index is there. A save that is killed
/// in between leaves it: shards without an index may then be of two saves.
pub(crate) const UNFINISHED: &str = ".penstock-unfinished";
/// Names whose dotted parts are variants, never modules of a model.
const WRITERS: [&str; 5] = [DIFFUSERS, PEFT, CONSOLIDATED, "pytorch_model", "pytorch_lora_weights"];

/// The files, or the index, that are opened in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ToOpen {
    /// This index, and the files that it names.
    Index(OsString),
    /// These files, in natural order.
    Files(Vec<OsString>),
}

/// A caller's request for the files of a folder.
#[derive(Debug, Clone, Default)]
pub struct FolderRequest {
    /// The variant whose files are meant, such as `fp16`. `None`: the files without one.
    pub variant: Option<String>,
    /// Whether an index without any of its files may be passed over. Not in a cache that holds a part of a repository.
    pub leftover: bool,
    /// The names in the folder, if the caller knows them: a web server does not list any.
    pub names: Option<Vec<OsString>>,
}

impl FolderRequest {
    /// The files without a variant, as an open of a folder means them.
    pub fn plain() -> FolderRequest {
        FolderRequest { variant: None, leftover: true, names: None }
    }
}

/// The names to open, and their variant if nobody asked for one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChosenNames {
    pub(super) open: ToOpen,
    pub(super) only_variant: Option<String>,
}

/// Whether this is the name of an index. The name of a variant stands before its ending
/// (`model.fp16.safetensors.index.json`, diffusers) or inside it (`model.safetensors.index.fp16.json`, transformers).
pub(super) fn is_index_name(name: &str) -> bool {
    index_parts(name).is_some()
}

/// Whether a folder's choice is made among names like this one: of shard files and indexes, hidden ones too.
pub(super) fn is_candidate(name: &str) -> bool {
    name.ends_with(".safetensors") || is_index_name(name)
}

/// Whether no folder means this file: macOS writes `._name` beside every file that it copies. Two dots begin an odd name of a
/// key in a bucket, and no hidden one.
pub(super) fn is_hidden(name: &str) -> bool {
    name.starts_with('.') && !name.starts_with("..")
}

/// Whether these are a whole checkpoint by their names, beside an index that is called `index` and has lost its files: one
/// file, or one set of shards.
pub(super) fn are_whole_beside(names: &[&str], index: &str) -> bool {
    let stems: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(".safetensors")).collect();
    let of_index = |set: &str| index_parts(index).is_some_and(|(stem, _)| stem == set);
    match stems[..] {
        [] => false,
        [one] if without_number(one) == one => [MODEL, DIFFUSERS, PEFT, CONSOLIDATED].contains(&one) || of_index(one),
        [first, ..] => {
            let count = first.rsplit_once("-of-").and_then(|(_, of)| of.parse().ok());
            let of_set = |stem: &&str| without_number(stem) != *stem && of_index(without_number(stem));
            count == Some(names.len()) && stems.len() == names.len() && stems.iter().all(of_set)
        }
    }
}

/// The two parts of an index's name: the stem, and the variant. `model.safetensors.index.fp16.json` gives `model` and
/// `fp16`; without a variant the second part is empty.
fn index_parts(name: &str) -> Option<(&str, &str)> {
    let (stem, rest) = name.strip_suffix(".json")?.split_once(".safetensors.index")?;
    match rest {
        "" => Some((stem, "")),
        _ => Some((stem, rest.strip_prefix('.')?)),
    }
}

/// A stem without `-00001-of-00003` at its end.
fn without_number(stem: &str) -> &str {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let head = stem.rsplit_once("-of-").filter(|(_, of)| digits(of)).map(|(head, _)| head);
    match head.and_then(|head| head.rsplit_once('-')) {
        Some((set, part)) if digits(part) => set,
        _ => stem,
    }
}

/// True if this can be the tag of shards that get names of their own: `s` and eight digits of hexadecimal numbers.
pub(crate) fn is_tag(text: &str) -> bool {
    text.len() == 9 && text.strip_prefix('s').is_some_and(|hex| hex.bytes().all(|b| b"0123456789abcdef".contains(&b)))
}

/// True if only an index brings this file: it is a shard of a save whose index comes last, such as
/// `model-s01234abc-00001-of-00002.safetensors`.
fn needs_index(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else { return false };
    let (set, five) = (without_number(stem), |text: &str| text.len() == 5);
    let number = stem[set.len()..].strip_prefix('-').and_then(|number| number.split_once("-of-"));
    number.is_some_and(|(part, of)| five(part) && five(of))
        && set.rsplit_once('-').is_some_and(|(head, tag)| !head.is_empty() && is_tag(tag))
}

/// The files that sets of shards lack by their names, without an index that would say so: `model-00001-of-00002.safetensors`
/// alone lacks the second one. Numbers begin at 1, or at 0 if that is there.
pub(super) fn missing_shards(names: &[Cow<'_, str>]) -> Vec<String> {
    let mut sets: BTreeMap<(&str, &str, &str), BTreeSet<u64>> = BTreeMap::new();
    for name in names {
        let Some((head, rest)) = name.strip_suffix(".safetensors").and_then(|stem| stem.split_once("-of-")) else {
            continue;
        };
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (of, ending) = rest.split_at(digits);
        let ends = ending.is_empty() || ending.starts_with('.');
        if let Some((set, part)) = head.rsplit_once('-').filter(|_| ends) {
            if part.len() == of.len() && part.bytes().all(|b| b.is_ascii_digit()) {
                sets.entry((set, of, ending)).or_default().extend(part.parse::<u64>());
            }
        }
    }
    let mut missing = Vec::new();
    for ((set, of, ending), there) in sets {
        let count: u64 = of.parse().unwrap_or(0);
        let first = u64::from(!there.contains(&0));
        let lacking = (first..first.saturating_add(count)).filter(|part| !there.contains(part));
        for part in lacking.take(MOST_MISSING - missing.len()) {
            missing.push(format!("{set}-{part:0width$}-of-{of}{ending}.safetensors", width = of.len()));
        }
    }
    missing
}

/// Whether variants are called so wherever they occur: number formats, and averages of training.
fn is_variant_word(label: &str) -> bool {
    let label = label.to_ascii_lowercase();
    let format =
        |prefix: &str| label.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let formats = ["fp", "bf", "f", "int", "uint", "nf", "float", "bfloat", "mxfp", "nvfp"];
    formats.into_iter().any(format)
        || matches!(label.as_str(), "ema" | "non_ema" | "no_ema" | "ema_only" | "non-ema" | "half" | "4bit" | "8bit")
}

/// One name of a folder, taken apart.
struct Candidate<'n> {
    name: &'n OsString,
    is_index: bool,
    /// Without ending, number and variant: `model`.
    base: String,
    variant: Option<String>,
    /// Whether its variant stands inside the ending, as transformers and diffusers write it now.
    inner: bool,
    /// Whether it is one of several files, by its name.
    numbered: bool,
}

/// The names that are no variant's, as far as a look at one name tells.
struct DottedNames<'n> {
    stems: Vec<&'n str>,
    /// Whether names are those of modules (`model.layers.0`), each with a file of its own.
    modules: bool,
}

/// The name without its ending, whether it is an index, and the variant inside the ending.
fn parts(name: &str) -> Option<(&str, bool, &str)> {
    match name.strip_suffix(".safetensors") {
        Some(stem) => Some((stem, false, "")),
        None => index_parts(name).map(|(stem, inner)| (stem, true, inner)),
    }
}

impl<'n> DottedNames<'n> {
    fn of(names: &[&'n str]) -> DottedNames<'n> {
        let all = names.iter().filter_map(|name| parts(name));
        let stems: Vec<&str> = all.filter(|p| p.2.is_empty()).map(|p| without_number(p.0)).collect();
        let of_module = |stem: &&str| {
            let parts: Vec<&str> = stem.split('.').collect();
            parts.len() > 2 && parts[1..].iter().any(|part| part.bytes().all(|b| b.is_ascii_digit()))
        };
        DottedNames { modules: stems.iter().any(of_module), stems }
    }

    /// Whether `label` in `head.label.safetensors` is a variant.
    fn is_variant(&self, head: &str, label: &str) -> bool {
        let number = label.bytes().all(|b| b.is_ascii_digit());
        let known = || WRITERS.contains(&head) || (head == MODEL && !self.modules) || self.stems.contains(&head);
        !head.is_empty() && !number && (is_variant_word(label) || known())
    }
}

/// The candidate that a name is; `None` if it is neither a shard file nor an index.
fn candidate<'n>(
    name: &'n OsString,
    text: &str,
    known: &DottedNames<'_>,
    asked: Option<&str>,
) -> Option<Candidate<'n>> {
    let (stem, is_index, inner) = parts(text)?;
    let set = without_number(stem);
    let mut found = Candidate {
        name,
        is_index,
        base: set.to_owned(),
        variant: None,
        inner: !inner.is_empty(),
        numbered: set.len() < stem.len(),
    };
    let asked = asked.filter(|asked| set.strip_suffix(asked).is_some_and(|head| head.ends_with('.') && head.len() > 1));
    let split = match asked {
        Some(asked) => Some((&set[..set.len() - asked.len() - 1], asked)),
        None => set.rsplit_once('.').filter(|(head, label)| known.is_variant(without_number(head), label)),
    };
    if found.inner {
        found.variant = Some(inner.to_owned());
    } else if let Some((head, label)) = split {
        let base = without_number(head);
        found.numbered |= base.len() < head.len();
        (found.base, found.variant) = (base.to_owned(), Some(label.to_owned()));
    }
    Some(found)
}

/// The choice from the names in the directory `place`, or under that address. It passes over `abandoned`: indexes
/// none of whose files is there.
///
/// # Errors
/// `NotFound` if there is no checkpoint. `Index` if there are several.
pub(super) fn choose(
    place: &Location,
    names: &[OsString],
    asked: &FolderRequest,
    abandoned: &[OsString],
) -> Result<ChosenNames> {
    let mut ordered: Vec<(&OsString, Cow<'_, str>)> = names.iter().map(|n| (n, n.to_string_lossy())).collect();
    ordered.retain(|(name, text)| !is_hidden(text) && !abandoned.contains(name));
    let hidden = names.len() > ordered.len();
    ordered.sort_by(|a, b| natural(a.0, b.0));
    let (unnamed, ordered): (Vec<_>, Vec<_>) = ordered.into_iter().partition(|(_, text)| needs_index(text));
    let known = DottedNames::of(&ordered.iter().map(|n| &*n.1).collect::<Vec<_>>());
    let variant = asked.variant.as_deref();
    let found: Vec<Candidate<'_>> =
        ordered.iter().filter_map(|(name, text)| candidate(name, text, &known, variant)).collect();
    let is_unfinished = names.iter().any(|name| name == UNFINISHED);
    let is_shard = |name: &&OsString| found.iter().any(|c| c.numbered && c.name == *name);
    let whole = |open| match &open {
        ToOpen::Files(files) if is_unfinished && files.iter().any(|name| is_shard(&name)) => {
            let shards: Vec<_> = files.iter().filter(is_shard).collect();
            Err(unfinished(place, &shards[0].to_string_lossy(), shards.len()))
        }
        _ => Ok(open),
    };
    let chosen = |open| Ok(ChosenNames { open: whole(open)?, only_variant: None });
    let having = |variant: Option<&str>| found.iter().filter(|c| c.variant.as_deref() == variant).collect::<Vec<_>>();
    if let Some(open) = pick_all(place, &having(variant))? {
        return chosen(open);
    }
    if let (true, Some((_, first))) = (found.is_empty(), unnamed.first()) {
        return Err(no_index(place, first, unnamed.len()));
    }
    if let Some(variant) = variant {
        return Err(no_variant(place, variant, &found));
    }
    let mut sets: Vec<(&str, &str)> =
        found.iter().map(|c| (c.base.as_str(), c.variant.as_deref().unwrap_or_default())).collect();
    sets.sort_unstable();
    sets.dedup();
    match sets[..] {
        [] => Err(nothing_in(place, &ordered.iter().map(|n| &*n.1).collect::<Vec<_>>(), hidden)),
        [(_, variant)] => match pick_all(place, &having(Some(variant)))? {
            Some(open) => Ok(ChosenNames { open: whole(open)?, only_variant: Some(variant.to_owned()) }),
            None => Err(no_variant(place, variant, &found)),
        },
        _ => {
            let listed: Vec<_> = found.iter().map(|c| c.name.to_string_lossy()).collect();
            let mut labels: Vec<_> = sets.iter().map(|set| format!("variant={:?}", set.1)).collect();
            labels.sort_unstable();
            labels.dedup();
            let text = format!(
                "this directory holds only variants, and several of them; give {}, or one of the files: {}",
                labels.join(" or "),
                listed.join(", ")
            );
            Err(Error::new(ErrorKind::Index, text).at(place))
        }
    }
}

/// The choice from candidates of one variant: `consolidated*` only if there is nothing else.
fn pick_all(place: &Location, found: &[&Candidate<'_>]) -> Result<Option<ToOpen>> {
    let (consolidated, usual): (Vec<_>, Vec<_>) = found.iter().copied().partition(|c| c.base.starts_with(CONSOLIDATED));
    match pick(place, &usual)? {
        None => pick(place, &consolidated),
        found => Ok(found),
    }
}

fn pick(place: &Location, found: &[&Candidate<'_>]) -> Result<Option<ToOpen>> {
    let is_whole = |c: &Candidate<'_>, base| !c.is_index && !c.numbered && c.base == base;
    let whole = |base| found.iter().find(|c| is_whole(c, base)).map(|c| ToOpen::Files(vec![c.name.clone()]));
    let index = |base| {
        let all = found.iter().filter(|c| c.is_index && c.base == base);
        all.max_by_key(|c| c.inner).map(|c| ToOpen::Index(c.name.clone()))
    };
    let named = whole(MODEL)
        .or_else(|| index(MODEL))
        .or_else(|| index(DIFFUSERS))
        .or_else(|| whole(DIFFUSERS))
        .or_else(|| whole(PEFT))
        .or_else(|| whole(CONSOLIDATED));
    if named.is_some() {
        return Ok(named);
    }
    let mut bases: Vec<&str> = found.iter().filter(|c| c.is_index).map(|c| c.base.as_str()).collect();
    bases.dedup();
    match bases[..] {
        [] => {}
        [one] => return Ok(index(one)),
        _ => {
            let listed: Vec<_> = found.iter().filter(|c| c.is_index).map(|c| c.name.to_string_lossy()).collect();
            let text = format!("several indexes in this directory; give one of them: {}", listed.join(", "));
            return Err(Error::new(ErrorKind::Index, text).at(place));
        }
    }
    let files: Vec<OsString> = found.iter().map(|c| c.name.clone()).collect();
    Ok((!files.is_empty()).then_some(ToOpen::Files(files)))
}

/// The error for a variant that is not there: it says what is.
fn no_variant(place: &Location, variant: &str, found: &[Candidate<'_>]) -> Error {
    let mut there: Vec<String> = found.iter().filter_map(|c| c.variant.as_ref().map(|v| format!("{v:?}"))).collect();
    there.sort_unstable();
    there.dedup();
    let what = match (there.is_empty(), found.is_empty()) {
        (false, _) => format!("the variants here are {}", there.join(", ")),
        (true, false) => format!("there are only files without a variant, such as {}", found[0].name.to_string_lossy()),
        (true, true) => "there is no safetensors file here".to_owned(),
    };
    let text = format!("variant={variant:?}: no file of this variant in the directory; {what}");
    Error::new(ErrorKind::NotFound, text).at(place)
}

/// The error for a directory with shards of a save that was killed before its index was there.
fn unfinished(place: &Location, first: &str, count: usize) -> Error {
    let text = format!(
        "no index names {first}{}: a save to this directory has not ended, or was ended before its index was there. The shards may be \
         of two saves. Save again; to read them all the same, give the files",
        and_more(count)
    );
    Error::new(ErrorKind::NotFound, text).at(place)
}

fn and_more(count: usize) -> String {
    if count > 1 {
        format!(" and {} more", count - 1)
    } else {
        String::new()
    }
}

/// The error for a directory whose safetensors files are all shards that only an index brings.
fn no_index(place: &Location, first: &str, count: usize) -> Error {
    let more = and_more(count);
    let text = format!(
        "no index names {first}{more}: the save that writes them has not ended, or was given up before its index was there. \
         Such shards may be a part of a checkpoint; to read them all the same, give the files"
    );
    Error::new(ErrorKind::NotFound, text).at(place)
}

/// The error for a directory without safetensors files: it says what is there instead.
fn nothing_in(place: &Location, names: &[&str], hidden: bool) -> Error {
    const SHOWN: usize = 8;
    let ends = |ends: &[&str]| names.iter().find(|n| ends.iter().any(|e| n.ends_with(e)));
    let text = if names.is_empty() && hidden {
        "there are only hidden files in this directory, and they are never read".to_owned()
    } else if names.is_empty() {
        "the directory is empty".to_owned()
    } else if let Some(n) = ends(&[".incomplete", ".part", ".crdownload", ".aria2"]) {
        format!("no safetensors file in this directory, but {n}: a download that has not ended?")
    } else if let Some(n) = names.iter().find(|n| is_pickled_weights(n)) {
        format!(
            "no safetensors file in this directory, but {n}, a torch.save file: `penstock convert FOLDER DIRECTORY` writes \
             it as safetensors"
        )
    } else if let Some(n) = ends(&[".gguf"]) {
        format!("no safetensors file in this directory, but {n}, which is for llama.cpp")
    } else {
        let more = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
        format!("no safetensors file in this directory; it holds {}{more}", names[..names.len().min(SHOWN)].join(", "))
    };
    Error::new(ErrorKind::NotFound, text).at(place)
}

/// Whether torch.save may have written weights to a file of this name, and not the state of a training.
fn is_pickled_weights(name: &str) -> bool {
    const STATE: [&str; 9] = [
        "optim",
        "optimizer",
        "scheduler",
        "lr_scheduler",
        "scaler",
        "rng_state",
        "random_state",
        "training_arg",
        "trainer_state",
    ];
    let small = name.to_ascii_lowercase();
    // The word, or several of it: optimus-7b.bin holds no optimizer.
    let is_state = |word: &&str| {
        let rest = small.strip_prefix(word).map(|rest| rest.strip_prefix('s').unwrap_or(rest));
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic()))
    };
    let ends = [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end));
    ends && !name.starts_with('.') && !STATE.iter().any(is_state)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The choice from these names: the index, or the files, with a space between two.
    fn opened(names: &str, variant: Option<&str>) -> Result<(String, Option<String>)> {
        let names: Vec<OsString> = names.split_whitespace().map(OsString::from).collect();
        let asked = FolderRequest { variant: variant.map(str::to_owned), ..FolderRequest::plain() };
        let ChosenNames { open, only_variant } = choose(&Location::file("folder".as_ref()), &names, &asked, &[])?;
        let names = match open {
            ToOpen::Index(name) => vec![name],
            ToOpen::Files(names) => names,
        };
        Ok((names.iter().map(|n| n.to_string_lossy()).collect::<Vec<_>>().join(" "), only_variant))
    }

    #[test]
    fn the_state_of_a_training_is_told_by_whole_words() {
        for (name, expected) in [
            ("pytorch_model.bin", true),
            ("optimus-7b.bin", true),
            ("optimized.pt", true),
            ("scalerank.ckpt", true),
            ("optim.bin", false),
            ("optim_states.pt", false),
            ("Optimizer.pt", false),
            ("optimizer_1.bin", false),
            ("optimizers.bin", false),
            ("lr_scheduler.pt", false),
            ("rng_state_0.pth", false),
            ("random_states_0.pt", false),
            ("training_args.bin", false),
            (".optimus.bin", false),
            ("optimus.json", false),
        ] {
            assert_eq!(is_pickled_weights(name), expected, "{name}");
        }
    }

    const SHARDS: &str = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors";
    const INDEX: &str = "model.safetensors.index.json";

    #[test]
    fn the_table_of_cases() {
        let shards = SHARDS;
        let cases: &[(&str, &str)] = &[
            // transformers: the single file, then its index
            ("model.safetensors", "model.safetensors"),
            (&format!("{INDEX} {shards} model.safetensors"), "model.safetensors"),
            (&format!("{INDEX} {shards}"), INDEX),
            (shards, shards),
            // A variant beside it, of whatever kind and name
            ("model.fp16.safetensors.index.json model.safetensors", "model.safetensors"),
            ("model.safetensors.index.fp16.json model.safetensors", "model.safetensors"),
            ("model.fp16.safetensors model.safetensors", "model.safetensors"),
            ("model.v2.safetensors model.safetensors", "model.safetensors"),
            (&format!("model.fp16.safetensors {INDEX}"), INDEX),
            (&format!("model.fp16-00001-of-00002.safetensors model.fp16-00002-of-00002.safetensors {shards}"), shards),
            (&format!("model-00001-of-00002.fp16.safetensors model-00002-of-00002.fp16.safetensors {shards}"), shards),
            ("unet.fp16.safetensors unet.safetensors vae.safetensors", "unet.safetensors vae.safetensors"),
            ("foo.mine.safetensors foo.safetensors", "foo.safetensors"),
            ("model.fp16.safetensors.index.json foo.safetensors", "foo.safetensors"),
            // Files that the program of the model itself reads
            (&format!("consolidated.safetensors {INDEX}"), INDEX),
            ("consolidated.safetensors model.safetensors", "model.safetensors"),
            (&format!("consolidated.00.safetensors consolidated.01.safetensors {shards}"), shards),
            ("consolidated.safetensors.index.json consolidated-1-of-1.safetensors foo.safetensors", "foo.safetensors"),
            ("consolidated.safetensors", "consolidated.safetensors"),
            (
                "consolidated.00.safetensors consolidated.01.safetensors",
                "consolidated.00.safetensors consolidated.01.safetensors",
            ),
            (
                "consolidated.safetensors.index.json consolidated-1-of-1.safetensors",
                "consolidated.safetensors.index.json",
            ),
            ("consolidated.safetensors model.fp16.safetensors", "consolidated.safetensors"),
            // diffusers: an index before the single file
            (
                "diffusion_pytorch_model.safetensors diffusion_pytorch_model.safetensors.index.json",
                "diffusion_pytorch_model.safetensors.index.json",
            ),
            (
                "diffusion_pytorch_model.safetensors diffusion_pytorch_model.fp16.safetensors.index.json",
                "diffusion_pytorch_model.safetensors",
            ),
            (
                "diffusion_pytorch_model.non_ema.safetensors diffusion_pytorch_model.safetensors",
                "diffusion_pytorch_model.safetensors",
            ),
            ("diffusion_pytorch_model.safetensors other.safetensors", "diffusion_pytorch_model.safetensors"),
            // peft
            ("adapter_model.safetensors other.safetensors", "adapter_model.safetensors"),
            ("adapter_model.safetensors foo.safetensors.index.json", "adapter_model.safetensors"),
            ("adapter_model.safetensors model.safetensors", "model.safetensors"),
            // One index, of any name
            ("foo.safetensors.index.json foo-1-of-1.safetensors bar.safetensors", "foo.safetensors.index.json"),
            // All files
            (
                "b.safetensors a-10.safetensors a-9.safetensors config.json",
                "a-9.safetensors a-10.safetensors b.safetensors",
            ),
            // Hidden files and sidecars
            ("._model.safetensors model.safetensors", "model.safetensors"),
            ("._model.safetensors.index.json .hidden.safetensors .safetensors a.safetensors", "a.safetensors"),
            (".model.safetensors foo.safetensors", "foo.safetensors"),
            // Dots that are no variant: versions, numbers, modules with a file of their own
            (
                "sd_xl_base_1.0.safetensors sd_xl_refiner_1.0.safetensors",
                "sd_xl_base_1.0.safetensors sd_xl_refiner_1.0.safetensors",
            ),
            (
                "Llama-3.1-8B-00001-of-00002.safetensors Llama-3.1-8B-00002-of-00002.safetensors",
                "Llama-3.1-8B-00001-of-00002.safetensors Llama-3.1-8B-00002-of-00002.safetensors",
            ),
            ("model.1.safetensors model.2.safetensors", "model.1.safetensors model.2.safetensors"),
            (
                "model.embed_tokens.safetensors model.layers.0.safetensors lm_head.safetensors",
                "lm_head.safetensors model.embed_tokens.safetensors model.layers.0.safetensors",
            ),
            ("Qwen2.5-7B.safetensors.index.json x.safetensors", "Qwen2.5-7B.safetensors.index.json"),
        ];
        for (names, expected) in cases {
            let found = opened(names, None).unwrap_or_else(|e| panic!("{names}: {e}"));
            assert_eq!(found, ((*expected).to_owned(), None), "{names}");
            // The order in which a folder lists its names says nothing
            let reversed: Vec<&str> = names.split_whitespace().rev().collect();
            assert_eq!(opened(&reversed.join(" "), None).unwrap().0, *expected, "{names}, reversed");
        }
    }

    #[test]
    fn the_only_variant_is_opened_and_of_several_none() {
        for (names, expected) in [
            ("model.fp16.safetensors", "model.fp16.safetensors"),
            (
                "model.fp16.safetensors.index.json model.fp16-00001-of-00001.safetensors",
                "model.fp16.safetensors.index.json",
            ),
            (
                "model.safetensors.index.fp16.json model.fp16-00001-of-00001.safetensors",
                "model.safetensors.index.fp16.json",
            ),
            ("diffusion_pytorch_model.fp16.safetensors config.json", "diffusion_pytorch_model.fp16.safetensors"),
            ("model.v2.safetensors", "model.v2.safetensors"),
        ] {
            let (found, variant) = opened(names, None).unwrap();
            assert_eq!(found, expected);
            assert!(variant.is_some_and(|v| expected.contains(&v)), "{names}");
        }
        for names in [
            "model.fp16.safetensors model.bf16.safetensors",
            "diffusion_pytorch_model.fp16.safetensors.index.json model.safetensors.index.fp16.json",
            "a.fp16.safetensors b.fp16.safetensors",
            "model.ema.safetensors model.non_ema.safetensors.index.json",
        ] {
            let error = opened(names, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Index);
            assert!(names.split(' ').all(|n| error.to_string().contains(n)), "{error}");
            assert!(error.to_string().contains("variant="), "{error}");
        }
        assert!(opened("a.safetensors.index.json b.safetensors.index.json", None).is_err());
    }

    #[test]
    fn a_variant_that_was_asked_for_is_opened_or_refused() {
        let all = format!(
            "{INDEX} {SHARDS} model.safetensors model.fp16.safetensors model.bf16.safetensors.index.json \
             model.bf16-00001-of-00001.safetensors diffusion_pytorch_model.safetensors.index.int8.json \
             diffusion_pytorch_model.int8.safetensors flux1.dev.safetensors consolidated.x.safetensors"
        );
        for (variant, expected) in [
            ("fp16", "model.fp16.safetensors"),
            ("bf16", "model.bf16.safetensors.index.json"),
            ("int8", "diffusion_pytorch_model.safetensors.index.int8.json"),
            ("dev", "flux1.dev.safetensors"),
            ("x", "consolidated.x.safetensors"),
        ] {
            assert_eq!(opened(&all, Some(variant)).unwrap(), (expected.to_owned(), None));
        }
        let error = opened(&all, Some("fp8")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(["fp16", "bf16", "int8"].iter().all(|v| error.to_string().contains(v)), "{error}");
        assert!(opened("model.safetensors", Some("fp16")).unwrap_err().to_string().contains("without a variant"));
        assert!(opened(".model.fp16.safetensors", Some("fp16")).is_err());
    }

    #[test]
    fn what_is_whole_by_its_names() {
        let whole = |names: &str, index| are_whole_beside(&names.split(' ').collect::<Vec<_>>(), index);
        for (names, index) in [
            ("model.safetensors", INDEX),
            ("consolidated.safetensors", INDEX),
            ("foo.safetensors", "foo.safetensors.index.json"),
            (SHARDS, INDEX),
            ("foo-1-of-1.safetensors", "foo.safetensors.index.json"),
        ] {
            assert!(whole(names, index), "{names}");
        }
        for (names, index) in [
            ("mtp.safetensors", INDEX),
            ("model-00001-of-00002.safetensors", INDEX),
            (SHARDS, "foo.safetensors.index.json"),
            ("model-00001-of-00002.safetensors mtp.safetensors", INDEX),
        ] {
            assert!(!whole(names, index), "{names}");
        }
    }

    #[test]
    fn shards_that_a_set_lacks_by_its_names() {
        let lacks = |names: &str| missing_shards(&names.split(' ').map(Cow::from).collect::<Vec<_>>());
        for whole in [
            SHARDS,
            "model.safetensors",
            "m-00000-of-00002.safetensors m-00001-of-00002.safetensors",
            "a-of-b.safetensors",
            "x-1-of-00002.safetensors",
            "one-of-2.safetensors",
            "w-00001-of-00001.fp16.safetensors",
            "m-00001-of-00000.safetensors",
        ] {
            assert!(lacks(whole).is_empty(), "{whole}: {:?}", lacks(whole));
        }
        assert_eq!(
            lacks("m-00002-of-00003.safetensors"),
            ["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"]
        );
        assert_eq!(lacks("m-00000-of-00002.safetensors"), ["m-00001-of-00002.safetensors"]);
        assert_eq!(lacks("m-1-of-2.fp16.safetensors"), ["m-2-of-2.fp16.safetensors"]);
        let two = "m-01-of-02.safetensors m-01-of-03.safetensors m-02-of-03.safetensors";
        assert_eq!(lacks(two), ["m-02-of-02.safetensors", "m-03-of-03.safetensors"]);
        assert_eq!(lacks("m-000000000000001-of-999999999999999.safetensors").len(), MOST_MISSING);
        assert!(lacks("m-1-of-99999999999999999999999999.safetensors").is_empty());
    }

    #[test]
    fn shards_with_a_tag_are_opened_by_their_index_only() {
        let (one, two) = ("model-s01234abc-00001-of-00002.safetensors", "model-s01234abc-00002-of-00002.safetensors");
        for names in [one.to_owned(), format!("{one} {two} config.json"), format!("._x.safetensors {two}")] {
            for variant in [None, Some("fp16")] {
                let e = opened(&names, variant).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::NotFound);
                assert!(e.message().starts_with("no index names model-s01234abc-0000"), "{e}");
            }
        }
        for (names, expected) in [
            (format!("{one} model.safetensors.index.json"), "model.safetensors.index.json"),
            (format!("{one} model.safetensors"), "model.safetensors"),
            (format!("{one} other.safetensors"), "other.safetensors"),
            (
                format!("{one} model-00001-of-00002.safetensors model-00002-of-00002.safetensors"),
                "model-00001-of-00002.safetensors model-00002-of-00002.safetensors",
            ),
            // These are no whole names of such shards.
            ("model-s01234abc.safetensors".to_owned(), "model-s01234abc.safetensors"),
            ("model-s01234abc-1-of-2.safetensors".to_owned(), "model-s01234abc-1-of-2.safetensors"),
            ("model-s01234abx-00001-of-00001.safetensors".to_owned(), "model-s01234abx-00001-of-00001.safetensors"),
            ("s01234abc-00001-of-00001.safetensors".to_owned(), "s01234abc-00001-of-00001.safetensors"),
        ] {
            assert_eq!(opened(&names, None).unwrap().0, expected, "{names}");
        }
    }

    #[test]
    fn shards_that_a_save_has_left_in_the_middle_are_opened_by_their_index_only() {
        for names in [SHARDS.to_owned(), format!("{SHARDS} config.json"), "a-00001-of-00001.safetensors".to_owned()] {
            assert!(opened(&names, None).is_ok(), "{names}");
            let e = opened(&format!("{names} {UNFINISHED}"), None).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NotFound);
            assert!(e.message().starts_with("no index names ") && e.message().contains("of two saves"), "{e}");
        }
        let variant = "model.fp16-00001-of-00002.safetensors model.fp16-00002-of-00002.safetensors";
        for asked in [None, Some("fp16")] {
            assert!(opened(variant, asked).is_ok());
            assert!(opened(&format!("{variant} {UNFINISHED}"), asked).unwrap_err().message().contains("and 1 more"));
        }
        for (names, expected) in
            [(format!("{SHARDS} {INDEX}"), INDEX), (format!("{SHARDS} model.safetensors"), "model.safetensors")]
        {
            assert_eq!(opened(&format!("{names} {UNFINISHED}"), None).unwrap().0, expected);
        }
    }

    #[test]
    fn an_abandoned_index_is_passed_over() {
        let names: Vec<OsString> = [INDEX, "weights.safetensors"].iter().map(OsString::from).collect();
        let place = Location::file("folder".as_ref());
        let found = choose(&place, &names, &FolderRequest::plain(), &[INDEX.into()]).unwrap();
        assert_eq!(found.open, ToOpen::Files(vec!["weights.safetensors".into()]));
        assert!(choose(&place, &names[..1], &FolderRequest::plain(), &[INDEX.into()]).is_err());
    }
}
