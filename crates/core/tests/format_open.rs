//! What a source stands for: files, lists, directories, indexes.

mod both_ways;
mod checkpoints;

use checkpoints::{header, shard, write, write_index};
use penstock::format::{Checkpoint, DType, FolderRequest};
use penstock::store::{Identity, Stores, Version};
use penstock::{Error, ErrorKind};
use std::fs::{self, File};
use std::os::unix::fs::{symlink, FileExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ErrorKind::{Changed, Header, Index, Invalid, NotACheckpoint, NotFound};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn open(path: impl AsRef<Path>) -> Checkpoint {
    both_ways::open(&[path]).expect("opens")
}

fn names(c: &Checkpoint) -> Vec<&str> {
    c.tensors().map(|t| t.name).collect()
}

fn file_names(c: &Checkpoint) -> Vec<String> {
    c.files().iter().map(|f| f.spelled.as_path().file_name().expect("a name").to_string_lossy().into_owned()).collect()
}

/// The error of opening `path`, which must be of `kind` and say all of `says`.
fn refused(path: impl AsRef<Path>, kind: ErrorKind, says: &[&str]) -> Error {
    let e = both_ways::open(&[path]).expect_err("must not open");
    assert_eq!(e.kind(), kind, "{e}");
    for text in says {
        assert!(e.to_string().contains(text), "{text:?} is not in: {e}");
    }
    e
}

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn every_dtype_is_read_as_it_is_written() {
    let mut at = 0;
    let entries: Vec<String> = DType::ALL
        .iter()
        .map(|d| {
            let end = at + d.nbytes(8).expect("whole bytes");
            let text = format!("\"{d}\":{{\"dtype\":\"{d}\",\"shape\":[2,4],\"data_offsets\":[{at},{end}]}}");
            at = end;
            text
        })
        .collect();
    let d = folder();
    let path = d.path().join("a.safetensors");
    let bytes = shard(format!("{{{}}}", entries.join(",")).as_bytes(), at as usize);
    fs::write(&path, &bytes).expect("written");
    let c = open(&path);
    let theirs = safetensors::SafeTensors::deserialize(&bytes).expect("the oracle takes it");
    assert_eq!(c.len(), 22);
    for t in c.tensors() {
        assert_eq!(t.name, t.dtype.name());
        assert_eq!(&bytes[t.begin as usize..t.end as usize], theirs.tensor(t.name).expect("there").data());
    }
}

#[test]
fn names_are_any_unicode_and_odd_header_sizes_are_fine() {
    let d = folder();
    let path = d.path().join("a.safetensors");
    let odd = ["", "a b", "層.0.重み", "😀", "quote\"back\\slash", "\u{0}\u{7f}", "__metadata", "e\u{301}", "é"];
    let list: Vec<(&str, u64)> = odd.iter().zip(1..).map(|(n, i)| (*n, i)).collect();
    for pad in 0..9 {
        let (json, data) = header(&list);
        fs::write(&path, shard(format!("{json}{}", " ".repeat(pad)).as_bytes(), data)).expect("written");
        let c = open(&path);
        assert_eq!(names(&c), odd);
        for (n, i) in &list {
            assert_eq!(c.find(n).map(|t| t.nbytes()), Some(*i));
        }
        assert!(c.find("e").is_none());
    }
}

#[test]
fn offsets_beyond_4_gib_are_whole() {
    let d = folder();
    let path = d.path().join("sparse.safetensors");
    let n: u64 = 5 << 30;
    let json = format!(
        r#"{{"big":{{"dtype":"F32","shape":[{},2],"data_offsets":[0,{n}]}},"tail":{{"dtype":"U8","shape":[3],"data_offsets":[{n},{}]}}}}"#,
        n / 8,
        n + 3
    );
    let file = File::create(&path).expect("created");
    file.write_all_at(&shard(json.as_bytes(), 0), 0).expect("written");
    let data_start = 8 + json.len() as u64;
    file.set_len(data_start + n + 3).expect("sparse");
    let c = open(&path);
    let tail = c.find("tail").expect("there");
    assert_eq!((tail.begin, tail.end), (data_start + n, data_start + n + 3));
    assert_eq!(c.nbytes(), n + 3);
    assert!(c.header_read() <= 64 * 1024);
}

#[test]
fn tensors_are_numbered_in_file_order_whatever_the_header_says() {
    let d = folder();
    let path = d.path().join("a.safetensors");
    let json = r#"{"late":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"none":{"dtype":"F32","shape":[0],"data_offsets":[2,2]},"early":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"also none":{"dtype":"U8","shape":[1,0],"data_offsets":[2,2]}}"#;
    fs::write(&path, shard(json.as_bytes(), 4)).expect("written");
    // Empty tensors at one offset keep the header's order.
    assert_eq!(names(&open(&path)), ["early", "none", "also none", "late"]);
}

#[test]
fn metadata_is_kept_for_each_file_and_merged_with_the_first_file_winning() {
    let d = folder();
    for (name, metadata) in [("1", r#"{"format":"pt","a":"1"}"#), ("2", "null"), ("3", r#"{"format":"np","b":"3"}"#)] {
        let json = format!(r#"{{"__metadata__":{metadata}}}"#);
        fs::write(d.path().join(name).with_extension("safetensors"), shard(json.as_bytes(), 0)).expect("written");
    }
    write(d.path().join("4.safetensors"), &[("t", 1)]);
    let c = open(d.path());
    let each: Vec<Option<usize>> = c.files().iter().map(|f| f.metadata.as_ref().map(|m| m.len())).collect();
    assert_eq!(each, [Some(2), None, Some(2), None]);
    let merged: Vec<(&str, &str)> = c.metadata().iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(merged, [("a", "1"), ("b", "3"), ("format", "pt")]);
}

#[test]
fn a_directory_without_index_is_all_its_shard_files_in_natural_order() {
    let d = folder();
    for n in [10, 9, 1, 2] {
        write(d.path().join(format!("model-{n}.safetensors")), &[(&format!("t{n}"), n)]);
    }
    fs::write(d.path().join("config.json"), "{}").expect("written");
    fs::write(d.path().join("training.bin"), "x").expect("written");
    let c = open(d.path());
    assert_eq!(names(&c), ["t1", "t2", "t9", "t10"]);
    let shapes: Vec<&[u64]> = c.tensors().map(|t| t.shape).collect();
    assert_eq!(shapes, [[1], [2], [9], [10]]);
    assert_eq!(file_names(&c)[3], "model-10.safetensors");
    let ranges: Vec<_> = c.files().iter().map(|f| f.tensors.clone()).collect();
    assert_eq!(ranges, [0..1, 1..2, 2..3, 3..4]);
    assert!(c.files()[0].spelled.as_path().starts_with(d.path()), "spelled as the caller spelled it");
}

#[test]
fn a_list_of_files_is_sorted_and_may_name_each_once() {
    let d = folder();
    let path = |n: &str| d.path().join(n);
    write(path("b-10.safetensors"), &[("x", 1)]);
    write(path("b-9.safetensors"), &[("y", 1)]);
    let c = both_ways::open(&[path("b-10.safetensors"), path("b-9.safetensors")]).expect("opens");
    assert_eq!(names(&c), ["y", "x"]);
    let twice = both_ways::open(&[path("b-9.safetensors"), path("b-9.safetensors")]).expect_err("twice");
    assert!(twice.kind() == Invalid && twice.to_string().contains("b-9.safetensors: this file is in the list twice"));
    symlink(path("b-9.safetensors"), path("link.safetensors")).expect("linked");
    let linked = both_ways::open(&[path("b-9.safetensors"), path("link.safetensors")]).expect_err("one file");
    assert!(linked.to_string().contains("both names lead to one file"), "{linked}");
    let none: [&Path; 0] = [];
    assert_eq!(both_ways::open(&none).expect_err("nothing").kind(), Invalid);
    write_index(path(INDEX), &[("x", "b-10.safetensors")], "1");
    let e = both_ways::open(&[path("b-9.safetensors"), path(INDEX)]).expect_err("an index in a list");
    assert!(e.kind() == Invalid && e.to_string().contains(INDEX), "{e}");
}

#[test]
fn a_tensor_in_two_files_is_refused_naming_both() {
    let d = folder();
    write(d.path().join("a.safetensors"), &[("w", 1)]);
    write(d.path().join("b.safetensors"), &[("w", 1)]);
    refused(d.path(), Header, &["`w`", "a.safetensors", "b.safetensors"]);
}

#[test]
fn one_shard_of_a_set_opens_alone_and_an_incomplete_set_is_warned_about() {
    let d = folder();
    for n in [1, 3] {
        write(d.path().join(format!("model-0000{n}-of-00003.safetensors")), &[(&format!("t{n}"), 1)]);
    }
    assert_eq!(open(d.path().join("model-00003-of-00003.safetensors")).warnings().len(), 0);
    let c = open(d.path());
    let told = "1 more is missing, and this checkpoint lacks the tensors in it: model-00002-of-00003.safetensors";
    assert!(matches!(c.warnings(), [one] if one.contains(told)), "{:?}", c.warnings());
}

#[test]
fn an_index_is_honoured_and_files_it_does_not_name_are_ignored() {
    let d = folder();
    write(d.path().join("model-1.safetensors"), &[("a", 3), ("b", 2)]);
    write(d.path().join("model-2.safetensors"), &[("c", 5)]);
    write(d.path().join("consolidated.safetensors"), &[("a", 3), ("b", 2), ("c", 5)]);
    fs::write(d.path().join("broken.safetensors"), "not read").expect("written");
    let map = [("c", "model-2.safetensors"), ("a", "model-1.safetensors"), ("b", "./model-1.safetensors")];
    write_index(d.path().join(INDEX), &map, "10");
    for (source, source_is_folder) in [(d.path().to_path_buf(), true), (d.path().join(INDEX), false)] {
        let c = open(source);
        assert_eq!(names(&c), ["a", "b", "c"]);
        assert_eq!(file_names(&c), ["model-1.safetensors", "model-2.safetensors"]);
        // Of an index that was named, nothing was chosen
        let passed = c.warnings().iter().any(|w| w.contains("broken.safetensors, consolidated.safetensors"));
        assert_eq!((c.warnings().len(), passed), if source_is_folder { (1, true) } else { (0, false) });
    }
}

#[test]
fn an_index_may_be_named_without_its_folder() {
    // As in `penstock.open("model.safetensors.index.json")` from within the folder: the folder is "".
    let d = folder();
    write(d.path().join("a.safetensors"), &[("a", 3)]);
    write_index(d.path().join(INDEX), &[("a", "a.safetensors")], "3");
    let here = std::env::current_dir().expect("a folder");
    std::env::set_current_dir(d.path()).expect("entered");
    let c = both_ways::open(&[INDEX]);
    std::env::set_current_dir(here).expect("left");
    assert_eq!(c.expect("opens").files()[0].spelled.as_path(), Path::new("a.safetensors"));
}

#[test]
fn hub_caches_whose_files_are_links_out_of_the_folder_open() {
    let d = folder();
    let (blobs, snapshot) = (d.path().join("blobs"), d.path().join("snapshots/abc"));
    fs::create_dir_all(&blobs).expect("made");
    fs::create_dir_all(snapshot.join("sub")).expect("made");
    write(blobs.join("4d7a"), &[("a", 3)]);
    write_index(blobs.join("99ff"), &[("a", "sub/model-1.safetensors")], "3");
    symlink("../../../blobs/4d7a", snapshot.join("sub/model-1.safetensors")).expect("linked");
    symlink("../../blobs/99ff", snapshot.join(INDEX)).expect("linked");
    let c = open(&snapshot);
    assert_eq!(c.files()[0].spelled.as_path(), snapshot.join("sub/model-1.safetensors"), "links are not resolved");
    assert_eq!(open(blobs.join("4d7a")).len(), 1, "a blob is a file like any other");
}

#[test]
fn names_in_an_index_that_lead_out_of_the_folder_are_refused() {
    let d = folder();
    let inner = d.path().join("inner");
    fs::create_dir(&inner).expect("made");
    write(d.path().join("a.safetensors"), &[("a", 3)]);
    let absolute = d.path().join("a.safetensors").to_string_lossy().into_owned();
    for (file, why) in [
        ("../a.safetensors", "leads out of the index's folder"),
        ("x/../../a.safetensors", "leads out of the index's folder"),
        ("x/..", "leads out of the index's folder"),
        (absolute.as_str(), "is an absolute path"),
        ("/dev/zero", "is an absolute path"),
        ("", "is empty"),
        (".", "names the folder itself"),
        ("a\0b", "contains a NUL"),
    ] {
        write_index(inner.join(INDEX), &[("a", file)], "3");
        refused(&inner, Index, &[INDEX, why]);
    }
}

#[test]
fn malformed_indexes() {
    let d = folder();
    write(d.path().join("a.safetensors"), &[("a", 3)]);
    let cases: &[(&[u8], ErrorKind, &str)] = &[
        (b"", NotACheckpoint, "the index is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", NotACheckpoint, "a Git LFS pointer"),
        (b"{", Index, "EOF while parsing"),
        (b"[]", Index, "expected an object with `weight_map`"),
        (b"{}", Index, "it has no `weight_map`"),
        (b"{\"weight_map\":null}", Index, "expected weight_map: an object"),
        (b"{\"weight_map\":[]}", Index, "expected weight_map: an object"),
        (b"{\"weight_map\":{}}", Index, "maps no tensor"),
        (b"{\"weight_map\":{\"a\":1}}", Index, "expected a string"),
        (b"{\"weight_map\":{\"a\":null}}", Index, "expected a string"),
        (
            b"{\"weight_map\":{\"a\":\"a.safetensors\",\"a\":\"a.safetensors\"}}",
            Index,
            "duplicate key `a` in weight_map",
        ),
        (b"{\"weight_map\":{\"a\":\"a.safetensors\"},\"weight_map\":{}}", Index, "duplicate key `weight_map`"),
        (b"{\"weight_map\":{\"a\":\"a.safetensors\"}} x", Index, "trailing characters"),
        (b"{\"weight_map\":{\"\xff\":\"a.safetensors\"}}", Index, "not valid UTF-8"),
        (b"{\"weight_map\":{\"\\ud800\":\"a.safetensors\"}}", Index, "hex escape"),
        (b"{\"metadata\":7,\"weight_map\":{\"a\":\"a.safetensors\"}}", Index, "expected metadata"),
        (b"<html>404</html>", NotACheckpoint, "a web page"),
        (b"{\"weight_map\":{\"a\":\"A.safetensors\"}}", NotFound, "A.safetensors"),
        (b"{\"weight_map\":{\"b\":\"a.safetensors\"}}", Index, "1 tensor of the index is in no shard file"),
    ];
    for (text, kind, says) in cases {
        fs::write(d.path().join(INDEX), text).expect("written");
        refused(d.path(), *kind, &[INDEX, says]);
    }
}

#[test]
fn every_missing_shard_is_reported_in_one_error() {
    let d = folder();
    write(d.path().join("m-2.safetensors"), &[("b", 1)]);
    // One file is malformed as well. Missing files are reported first, because they must be fetched first.
    fs::write(d.path().join("m-1.safetensors"), "").expect("written");
    symlink("nowhere", d.path().join("m-4.safetensors")).expect("linked");
    let files: Vec<String> = (1..=40).map(|i| format!("m-{i}.safetensors")).collect();
    let map: Vec<(String, &str)> = files.iter().enumerate().map(|(i, f)| (format!("t{i}"), f.as_str())).collect();
    let map: Vec<(&str, &str)> = map.iter().map(|(t, f)| (t.as_str(), *f)).collect();
    write_index(d.path().join(INDEX), &map[..5], "1");
    let says =
        ["3 of the 5 shard files", "1 are links to nothing", "m-3.safetensors, m-4.safetensors, m-5.safetensors"];
    refused(d.path(), NotFound, &[&[INDEX][..], &says].concat());
    write_index(d.path().join(INDEX), &map, "1");
    refused(d.path(), NotFound, &["38 of the 40 shard files", "and 26 more"]);
}

/// File names and lengths of the tensors, by name.
fn places(c: &Checkpoint) -> Vec<(String, String, u64)> {
    let files = file_names(c);
    let mut found: Vec<_> =
        c.tensors().map(|t| (t.name.to_owned(), files[t.file as usize].clone(), t.nbytes())).collect();
    found.sort();
    found
}

#[test]
fn the_index_says_which_of_two_tensors_counts() {
    // Every way in which three shards may have a tensor, and every file that the index may map it to.
    for have in 1..8u8 {
        for says in 0..3 {
            let d = folder();
            for file in 0..3u64 {
                let own = format!("own{file}");
                let both = [(own.as_str(), 1), ("a", 10 + file)];
                let list = if have & (1 << file) == 0 { &both[..1] } else { &both[..] };
                write(d.path().join(format!("{file}.safetensors")), list);
            }
            let file = |n: u64| format!("{n}.safetensors");
            let files: Vec<String> = (0..3).map(file).collect();
            let map = [("own0", &*files[0]), ("own1", &files[1]), ("own2", &files[2]), ("a", &files[says as usize])];
            write_index(d.path().join(INDEX), &map, "null");
            let where_it_is: Vec<u64> = (0..3).filter(|n| have & (1 << n) != 0).collect();
            let expected = match &where_it_is[..] {
                found if found.contains(&says) => says,
                &[one] => one,
                // In two files, and the index names the third one: choosing would be a guess
                _ => {
                    refused(d.path(), Index, &["`a` is in", &format!("maps it to {says}.safetensors")]);
                    continue;
                }
            };
            let c = open(d.path());
            let found = places(&c).into_iter().find(|p| p.0 == "a").expect("there");
            assert_eq!(found, ("a".to_owned(), file(expected), 10 + expected), "{have:b} {says}");
            assert_eq!(c.len(), 4);
            let told: Vec<&String> = c.warnings().iter().filter(|w| w.contains("1 tensor: ")).collect();
            let others = where_it_is.iter().filter(|n| **n != expected).count() + usize::from(expected != says);
            assert_eq!(told.len(), others, "{:?}", c.warnings());
            // The same files as a list: their index still decides, where there is something to decide
            let paths: Vec<PathBuf> = files.iter().map(|f| d.path().join(f)).collect();
            let listed = both_ways::open(&paths).expect("opens");
            assert_eq!(places(&listed), places(&c), "{have:b} {says}");
            assert_eq!(listed.warnings().len(), where_it_is.len() - 1, "{:?}", listed.warnings());
        }
    }
}

#[test]
fn of_listed_files_an_index_decides_only_if_it_is_the_only_one_to_say_so() {
    let d = folder();
    let path = |n: &str| d.path().join(n);
    for (n, file) in [(1, "a.safetensors"), (2, "b.safetensors"), (3, "c.safetensors")] {
        write(path(file), &[("w", n), (file, 1)]);
    }
    let all = [path("a.safetensors"), path("b.safetensors"), path("c.safetensors")];
    let width = |c: &Checkpoint| c.find("w").map(|t| t.nbytes());
    let error = both_ways::open(&all).expect_err("no index");
    assert!(error.kind() == Header && error.to_string().contains("`w` is also in"), "{error}");
    write_index(path(".hidden.safetensors.index.json"), &[("w", "a.safetensors")], "1");
    assert_eq!(both_ways::open(&all).expect_err("a hidden index").kind(), Header);
    write_index(path("x.safetensors.index.json"), &[("w", "b.safetensors")], "1");
    let c = both_ways::open(&all).expect("opens");
    assert_eq!((width(&c), c.len()), (Some(2), 4));
    assert!(c.find("a.safetensors").is_some() && c.find("nothing").is_none());
    // Names that the index does not map stay: somebody has listed their files
    assert_eq!(names(&c), ["a.safetensors", "w", "b.safetensors", "c.safetensors"]);
    assert_eq!(both_ways::open(&all[..1]).map(|c| width(&c)).expect("opens"), Some(1), "one file has no conflict");
    write_index(path("y.safetensors.index.json"), &[("w", "c.safetensors")], "1");
    let error = both_ways::open(&all).expect_err("two indexes");
    assert!(error.kind() == Index && error.to_string().contains("x.safetensors.index.json, y.safetensors.index.json"));
    fs::write(path("y.safetensors.index.json"), "{").expect("written");
    assert_eq!(both_ways::open(&all).map(|c| width(&c)).expect("opens"), Some(2), "that one says nothing");
}

#[test]
fn tensors_of_the_index_that_no_shard_has_are_lacking_with_a_warning() {
    let d = folder();
    write(d.path().join("1.safetensors"), &[("a", 3)]);
    write(d.path().join("2.safetensors"), &[("b", 3)]);
    let map = [("a", "1.safetensors"), ("b", "2.safetensors"), ("c", "1.safetensors"), ("d", "2.safetensors")];
    write_index(d.path().join(INDEX), &map, "6");
    let c = open(d.path());
    assert_eq!(names(&c), ["a", "b"]);
    assert_eq!(c.warnings().len(), 1);
    let says = ["2 tensors of the index are in no shard file", "`c` (1.safetensors)", "`d` (2.safetensors)"];
    assert!(says.iter().all(|text| c.warnings()[0].contains(text)), "{:?}", c.warnings());
}

#[test]
fn an_index_without_any_of_its_files_is_passed_over_if_there_is_something_else() {
    let d = folder();
    let map = [("a", "model-1.safetensors"), ("b", "sub/model-2.safetensors")];
    write_index(d.path().join(INDEX), &map, "6");
    refused(d.path(), NotFound, &["2 of the 2 shard files"]);
    // A file that need not be the whole of it
    write(d.path().join("mtp.safetensors"), &[("m", 3)]);
    refused(d.path(), NotFound, &["2 of the 2 shard files"]);
    fs::remove_file(d.path().join("mtp.safetensors")).expect("removed");
    for (index, whole) in [
        (INDEX, "consolidated.safetensors"),
        ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
        ("weights.safetensors.index.json", "weights.safetensors"),
    ] {
        let d = folder();
        write_index(d.path().join(index), &map, "6");
        write(d.path().join(whole), &[("a", 3)]);
        let c = open(d.path());
        assert_eq!(file_names(&c), [whole]);
        assert!(c.warnings()[0].contains("passed over, because none of its shard files is here"), "{:?}", c.warnings());
    }
    write(d.path().join("adapter_model.safetensors"), &[("a", 3)]);
    assert_eq!(file_names(&open(d.path())), ["adapter_model.safetensors"]);
    fs::remove_file(d.path().join("adapter_model.safetensors")).expect("removed");
    refused(d.path().join(INDEX), NotFound, &["2 of the 2 shard files"]);
    // One of them is there: that is a download that has not ended
    fs::create_dir(d.path().join("sub")).expect("made");
    write(d.path().join("sub/model-2.safetensors"), &[("b", 3)]);
    refused(d.path(), NotFound, &["1 of the 2 shard files", "model-1.safetensors"]);
    // A link to nothing is a cache that has lost its file
    fs::remove_file(d.path().join("sub/model-2.safetensors")).expect("removed");
    symlink("nowhere", d.path().join("model-1.safetensors")).expect("linked");
    refused(d.path(), NotFound, &["2 of the 2 shard files", "1 are links to nothing"]);
}

#[test]
fn what_was_passed_over_is_told() {
    let d = folder();
    for name in ["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors", "._model.safetensors"] {
        write(d.path().join(name), &[("a", 3)]);
    }
    write_index(d.path().join(INDEX), &[("a", "model.safetensors")], "3");
    fs::write(d.path().join("config.json"), "{}").expect("written");
    let c = open(d.path());
    assert_eq!(file_names(&c), ["model.safetensors"]);
    let told = "._model.safetensors, consolidated.safetensors, model.fp16.safetensors, model.safetensors.index.json";
    assert!(c.warnings().len() == 1 && c.warnings()[0].contains(told), "{:?}", c.warnings());
    assert!(open(d.path().join("model.fp16.safetensors")).warnings().is_empty());
}

#[test]
fn a_variant_is_of_a_folder() {
    let d = folder();
    write(d.path().join("model.safetensors"), &[("a", 3)]);
    write(d.path().join("model.fp16.safetensors"), &[("a", 2)]);
    let asked = |variant: &str| FolderRequest { variant: Some(variant.to_owned()), ..FolderRequest::plain() };
    let open = |path: PathBuf, variant: &str| {
        Checkpoint::open_cancellable(&[path], &asked(variant), &Stores::default(), Duration::from_secs(60), || true)
    };
    assert_eq!(file_names(&open(d.path().into(), "fp16").expect("opens")), ["model.fp16.safetensors"]);
    assert_eq!(open(d.path().into(), "fp8").expect_err("not there").kind(), NotFound);
    assert_eq!(open(d.path().join("model.safetensors"), "fp16").expect_err("a file").kind(), Invalid);
    // Only variants
    fs::remove_file(d.path().join("model.safetensors")).expect("removed");
    let only = both_ways::open(&[d.path()]).expect("opens");
    assert!(only.warnings()[0].contains("only the variant \"fp16\""), "{:?}", only.warnings());
    write(d.path().join("model.bf16.safetensors"), &[("a", 2)]);
    refused(d.path(), Index, &["model.fp16.safetensors", "model.bf16.safetensors", "variant=\"bf16\""]);
}

#[test]
fn tensors_that_the_index_does_not_map_are_left_out_with_a_warning() {
    let d = folder();
    write(d.path().join("1.safetensors"), &[("x", 1), ("a", 3), ("y", 2), ("b", 4), ("z", 1)]);
    write(d.path().join("2.safetensors"), &[("c", 4)]);
    write_index(d.path().join(INDEX), &[("a", "1.safetensors"), ("c", "2.safetensors"), ("b", "1.safetensors")], "11");
    let c = open(d.path());
    assert_eq!(names(&c), ["a", "b", "c"]);
    assert_eq!(c.files()[0].tensors, 0..2);
    assert_eq!(c.files()[1].tensors, 2..3);
    let begin = c.files()[0].data_start;
    assert_eq!(c.tensors().take(2).map(|t| (t.begin - begin, t.end - begin)).collect::<Vec<_>>(), [(1, 4), (6, 10)]);
    assert!(c.find("x").is_none());
    assert_eq!(c.warnings().len(), 1);
    assert!(c.warnings()[0].contains("`x`, `y`, `z`") && c.warnings()[0].contains("1.safetensors"));
}

#[test]
fn a_wrong_total_size_is_tolerated_with_a_warning() {
    let d = folder();
    write(d.path().join("1.safetensors"), &[("a", 3)]);
    for (total, warned) in [("3", 0), ("3.0", 0), ("4", 1), ("-1", 1), ("\"3\"", 0), ("null", 0), ("[3]", 0), ("{}", 0)]
    {
        write_index(d.path().join(INDEX), &[("a", "1.safetensors")], total);
        let c = open(d.path());
        assert_eq!(c.warnings().len(), warned, "{total}: {:?}", c.warnings());
        assert!(c.warnings().iter().all(|w| w.contains("total_size") && w.contains(INDEX)));
    }
}

#[test]
fn the_index_of_a_directory_is_the_plain_one_or_the_only_one() {
    let files = |indexes: &[&str]| -> Result<String, Error> {
        let d = folder();
        for (i, index) in indexes.iter().enumerate() {
            let file = format!("{i}.safetensors");
            write(d.path().join(&file), &[("a", 3)]);
            write_index(d.path().join(index), &[("a", &file)], "3");
        }
        let c = both_ways::open(&[d.path()])?;
        let number: usize = file_names(&c)[0].trim_end_matches(".safetensors").parse().expect("a number");
        Ok(indexes[number].to_owned())
    };
    let fp16 = "diffusion_pytorch_model.fp16.safetensors.index.json";
    let plain = "diffusion_pytorch_model.safetensors.index.json";
    let inner = "model.safetensors.index.fp16.json";
    assert_eq!(files(&[fp16]).expect("the only one"), fp16);
    assert_eq!(files(&[inner]).expect("the only one"), inner);
    assert_eq!(files(&[fp16, plain]).expect("without variant"), plain);
    assert_eq!(files(&[fp16, plain, INDEX, inner]).expect("model"), INDEX);
    let other = "other.safetensors.index.json";
    assert_eq!(files(&[other, plain]).expect("diffusers"), plain);
    for ambiguous in [&[fp16, inner][..], &["an.safetensors.index.json", other]] {
        let e = files(ambiguous).expect_err("ambiguous");
        assert_eq!(e.kind(), Index);
        assert!(ambiguous.iter().all(|i| e.to_string().contains(i)), "{e}");
    }
}

#[test]
fn a_directory_without_safetensors_says_what_is_there() {
    let d = folder();
    refused(d.path(), NotFound, &["the directory is empty"]);
    fs::write(d.path().join("config.json"), "{}").expect("written");
    refused(d.path(), NotFound, &["it holds config.json"]);
    fs::write(d.path().join("pytorch_model.bin"), "x").expect("written");
    refused(d.path(), NotFound, &["pytorch_model.bin, a torch.save file"]);
    fs::write(d.path().join("model.safetensors.incomplete"), "x").expect("written");
    refused(d.path(), NotFound, &["model.safetensors.incomplete: a download that has not ended?"]);
}

#[test]
fn a_failure_in_one_of_many_files_is_that_of_the_first_in_order() {
    let d = folder();
    for i in 0..60 {
        write(d.path().join(format!("m-{i}.safetensors")), &[(&format!("t{i}"), 1)]);
    }
    fs::write(d.path().join("m-41.safetensors"), shard(b"{]", 0)).expect("written");
    fs::write(d.path().join("m-17.safetensors"), shard(b"{]", 0)).expect("written");
    for _ in 0..50 {
        refused(d.path(), Header, &["m-17.safetensors"]);
    }
}

#[test]
fn reading_a_small_header_takes_one_read_and_a_large_one_the_rest_exactly() {
    let d = folder();
    let path = d.path().join("a.safetensors");
    write(&path, &[("a", 100_000)]);
    assert_eq!(open(&path).header_read(), 65_536);
    write(&path, &[("a", 10)]);
    assert_eq!(open(&path).header_read(), fs::metadata(&path).expect("there").len());
    let many: Vec<String> = (0..2000).map(|i| format!("tensor{i}")).collect();
    let many: Vec<(&str, u64)> = many.iter().map(|n| (n.as_str(), 1000)).collect();
    write(&path, &many);
    let c = open(&path);
    assert!(c.header_read() > 65_536);
    assert_eq!(c.header_read(), c.files()[0].data_start);
}

#[test]
fn an_identity_sees_rewrites_and_replacement_but_not_chmod_or_links() {
    let d = folder();
    let path = d.path().join("a.safetensors");
    write(&path, &[("a", 10)]);
    let Version::Inode(was) = open(&path).files()[0].version else { panic!("a file has an inode") };
    let now = |path: &PathBuf| Identity::of(File::open(path).expect("there")).expect("stat");
    assert_eq!(was, now(&path));
    was.check(&now(&path)).expect("unchanged");

    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("mode set");
    fs::hard_link(&path, d.path().join("b")).expect("linked");
    was.check(&now(&path)).expect("same bytes");

    let file = File::options().write(true).open(&path).expect("opened");
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_nanos(1_700_000_000_000_000_001)).expect("set");
    let e = was.check(&now(&path)).expect_err("modified");
    assert!(e.kind() == Changed && e.to_string().contains("it was written to"), "{e}");
    file.set_len(3).expect("cut");
    let e = was.check(&now(&path)).expect_err("shorter");
    assert!(e.to_string().contains("it was truncated from"), "{e}");
    fs::remove_file(&path).expect("removed");
    write(&path, &[("a", 10)]);
    let e = was.check(&now(&path)).expect_err("another file");
    assert!(e.to_string().contains("it was replaced by another file"), "{e}");
}
