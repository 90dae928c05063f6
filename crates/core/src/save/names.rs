//! Names of the files of a checkpoint.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

pub(super) const SUFFIX: &str = ".safetensors";
pub(super) const INDEX_SUFFIX: &str = ".index.json";

/// The index of shards called `model-00001-of-00002.safetensors` and so on is `model.safetensors.index.json`.
pub(super) fn index_of(name: &str) -> String {
    format!("{}{SUFFIX}{INDEX_SUFFIX}", name.strip_suffix(SUFFIX).unwrap_or(name))
}

fn is_of_five_digits(text: &str) -> bool {
    text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())
}

/// True if a save called `name` may have written a file called `found`.
pub(super) fn belongs(found: &str, name: &str) -> bool {
    let digits = is_of_five_digits;
    let Some(rest) = found.strip_prefix(name.strip_suffix(SUFFIX).unwrap_or(name)) else { return false };
    let index = rest.strip_suffix(INDEX_SUFFIX);
    match index.unwrap_or(rest).strip_suffix(SUFFIX) {
        Some("") => index.is_some() || found == name,
        Some(number) => {
            let number = number.strip_prefix('-').unwrap_or_default();
            // In a bucket shards may have a tag: see `tag_shards`.
            let untagged = number.split_once('-').filter(|(tag, _)| is_tag(tag)).map_or(number, |(_, rest)| rest);
            untagged.split_once("-of-").is_some_and(|(n, of)| digits(n) && digits(of))
        }
        None => false,
    }
}

/// The name of a shard with a tag, in place of the one that it has.
pub(super) fn tagged(name: &str, tag: &str) -> String {
    let (name, ending) = name.strip_suffix(SUFFIX).map_or((name, ""), |stem| (stem, SUFFIX));
    let numbered = name.len().checked_sub("-00001-of-00002".len()).and_then(|at| name.split_at_checked(at));
    let numbered = numbered.filter(|(_, number)| {
        let number = number.strip_prefix('-').and_then(|number| number.split_once("-of-"));
        number.is_some_and(|(one, of)| is_of_five_digits(one) && is_of_five_digits(of))
    });
    let (stem, number) = numbered.unwrap_or((name, ""));
    let bare = stem.rsplit_once('-').filter(|(_, old)| is_tag(old)).map_or(stem, |(bare, _)| bare);
    format!("{bare}-{tag}{number}{ending}")
}

/// A tag for the names of shards.
pub(super) fn new_tag() -> String {
    // Keys of the process' hash tables are random.
    format!("s{:08x}", RandomState::new().hash_one(Instant::now()) as u32)
}

/// True if this can be the tag of shards in a bucket: as many letters as [`new_tag`] makes, which no number of
/// shards has.
pub(super) fn is_tag(text: &str) -> bool {
    crate::format::is_tag(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_the_same_name_belong_to_an_earlier_save() {
        let theirs = [
            "model.safetensors",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00001-of-00002.safetensors.index.json",
            "model-s01234abc-00001-of-00002.safetensors",
        ];
        for found in theirs {
            assert!(belongs(found, "model.safetensors"), "{found}");
        }
        for found in &theirs[1..] {
            assert!(belongs(found, "model"), "{found}");
        }
        assert!(!belongs("model.safetensors", "model"));
        for other in [
            "model",
            "model.json",
            "model.index.json",
            "model-1-of-2.safetensors",
            "model-00001-of-000002.safetensors",
            "model-00001-00002.safetensors",
            "model-x0001-of-00002.safetensors",
            "model-s01234abx-00001-of-00002.safetensors",
            "model-s01234abc.safetensors",
            "model_adapter.safetensors",
            "xmodel.safetensors",
            "model.safetensors.bak",
        ] {
            assert!(!belongs(other, "model.safetensors"), "{other}");
        }
    }

    #[test]
    fn a_tag_stands_before_the_number_and_takes_the_place_of_another_one() {
        let tag = "s01234abc";
        for (name, expected) in [
            ("model-00001-of-00002.safetensors", "model-s01234abc-00001-of-00002.safetensors"),
            ("model-s89abcdef-00001-of-00002.safetensors", "model-s01234abc-00001-of-00002.safetensors"),
            ("part.safetensors", "part-s01234abc.safetensors"),
            ("part-s89abcdef.safetensors", "part-s01234abc.safetensors"),
            ("-00001-of-00002.safetensors", "-s01234abc-00001-of-00002.safetensors"),
            ("m-1-of-2.safetensors", "m-1-of-2-s01234abc.safetensors"),
            ("mod\u{e9}le-abcd-of-00002", "mod\u{e9}le-abcd-of-00002-s01234abc"),
        ] {
            assert_eq!(tagged(name, tag), expected);
        }
        assert!(belongs(&tagged("m-00001-of-00002.safetensors", tag), "m.safetensors"));
    }
}
