//! Malformed headers: each gets the right kind, and a text that names the file and the cause.

mod both_ways;
mod checkpoints;

use checkpoints::{header, quote, shard, write};
use penstock::format::Checkpoint;
use penstock::{Error, ErrorKind};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use ErrorKind::{Header, NotACheckpoint, NotFound, Truncated};

/// Opens what must not open; checks what every error owes.
fn refused(path: &Path) -> Error {
    let start = Instant::now();
    let e = both_ways::open(&[path]).expect_err("must not open");
    assert!(start.elapsed() < Duration::from_secs(30), "in bounded time");
    let text = e.to_string();
    let name = path.file_name().expect("a name").to_string_lossy().into_owned();
    assert!(text.contains(&name), "names the file {name}: {text}");
    assert!(text.len() < 1500, "a message, not a dump: {} bytes", text.len());
    e
}

fn check(case: &str, bytes: &[u8], kind: ErrorKind, cause: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, bytes).expect("written");
    let e = refused(&path);
    assert_eq!(e.kind(), kind, "{case}: {e}");
    assert!(e.to_string().contains(cause), "{case}: {cause:?} is not in: {e}");
    // The same from memory, without a file system.
    let e = Checkpoint::from_bytes(bytes, bytes.len() as u64);
    assert!(e.is_err(), "{case}: accepted from memory");
}

/// A header with one entry "t" of this text, before 4 bytes of data.
fn entry(text: &str) -> Vec<u8> {
    shard(format!("{{\"t\":{text}}}").as_bytes(), 4)
}

#[test]
fn malformed_headers() {
    let t = r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let json: &[(&str, &[u8], &str)] = &[
        ("not JSON", b"hello world", "begins with byte 0x68"),
        ("array", b"[]", "begins with byte 0x5b"),
        ("null", b"null", "begins with byte 0x6e"),
        ("string", b"\"x\"", "begins with byte 0x22"),
        ("byte order mark", b"\xef\xbb\xbf{}", "begins with byte 0xef"),
        ("only spaces", b"        ", "EOF while parsing"),
        ("unclosed", b"{", "EOF while parsing"),
        ("unclosed string", b"{\"t", "EOF while parsing a string"),
        ("zero padding", b"{}\0\0", "trailing characters"),
        ("two values", b"{}{}", "trailing characters"),
        ("comment", b"{/* */}", "key must be a string"),
        ("single quotes", b"{'t':1}", "key must be a string"),
        ("number as key", b"{1:2}", "key must be a string"),
        ("trailing comma", b"{\"__metadata__\":{},}", "trailing comma"),
        ("entry missing", b"{\"t\"}", "expected `:`"),
        ("bad UTF-8 in a name", b"{\"\xff\":1}", "not valid UTF-8"),
        ("bad UTF-8 in padding", b"{} \xc3", "not valid UTF-8"),
        ("lone surrogate in a name", b"{\"\\ud800\":{}}", "hex escape"),
        ("unknown escape", b"{\"\\x\":{}}", "invalid escape"),
        ("control character in a name", b"{\"a\nb\":{}}", "control character"),
        ("metadata is a number", b"{\"__metadata__\":1}", "__metadata__: invalid type: integer"),
        ("metadata is an array", b"{\"__metadata__\":[]}", "__metadata__: invalid type: sequence"),
        ("metadata value is a number", b"{\"__metadata__\":{\"a\":1}}", "__metadata__: invalid type: integer"),
        ("metadata value is null", b"{\"__metadata__\":{\"a\":null}}", "__metadata__: invalid type: null"),
        ("metadata value is nested", b"{\"__metadata__\":{\"a\":{}}}", "__metadata__: invalid type: map"),
        ("duplicate metadata", b"{\"__metadata__\":{},\"__metadata__\":null}", "duplicate key `__metadata__`"),
        ("duplicate key in metadata", b"{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", "__metadata__: duplicate key `a`"),
    ];
    for (case, json, cause) in json {
        check(case, &shard(json, 0), Header, cause);
    }
    for (case, twice) in [("duplicate tensor", "\"t\""), ("duplicate tensor, spelled differently", "\"\\u0074\"")] {
        check(case, &shard(format!("{{\"t\":{t},{twice}:{t}}}").as_bytes(), 4), Header, "duplicate key `t`");
    }

    let entries: &[(&str, &str, &str)] = &[
        ("null entry", "null", "tensor `t`: invalid type: null"),
        ("number entry", "4", "tensor `t`: invalid type: integer"),
        ("array entry", r#"["U8",[4],[0,4]]"#, "tensor `t`: invalid type: sequence"),
        ("empty entry", "{}", "missing field `data_offsets`"),
        ("no dtype", r#"{"shape":[4],"data_offsets":[0,4]}"#, "missing field `dtype`"),
        ("no shape", r#"{"dtype":"U8","data_offsets":[0,4]}"#, "missing field `shape`"),
        ("no offsets", r#"{"dtype":"U8","shape":[4]}"#, "missing field `data_offsets`"),
        ("unknown dtype", r#"{"dtype":"Q8","shape":[4],"data_offsets":[0,4]}"#, "tensor `t`: unknown dtype `Q8`"),
        ("lower-case dtype", r#"{"dtype":"u8","shape":[4],"data_offsets":[0,4]}"#, "unknown dtype `u8`"),
        ("dtype is a number", r#"{"dtype":8,"shape":[4],"data_offsets":[0,4]}"#, "expected a dtype"),
        ("dtype is an object", r#"{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}"#, "expected a dtype"),
        ("dtype is null", r#"{"dtype":null,"shape":[4],"data_offsets":[0,4]}"#, "expected a dtype"),
        ("shape is a number", r#"{"dtype":"U8","shape":4,"data_offsets":[0,4]}"#, "expected a shape"),
        ("shape is null", r#"{"dtype":"U8","shape":null,"data_offsets":[0,4]}"#, "expected a shape"),
        ("negative extent", r#"{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}"#, "integer `-4`"),
        ("negative zero", r#"{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}"#, "floating point `-0"),
        ("fractional extent", r#"{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}"#, "floating point `4"),
        ("extent of 2^64", r#"{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,4]}"#, "floating point"),
        ("extent as text", r#"{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}"#, "string \"4\""),
        ("one offset", r#"{"dtype":"U8","shape":[4],"data_offsets":[0]}"#, "data_offsets: an array of two"),
        ("three offsets", r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4,8]}"#, "trailing characters"),
        ("offsets is an object", r#"{"dtype":"U8","shape":[4],"data_offsets":{}}"#, "data_offsets: an array of two"),
        ("negative offset", r#"{"dtype":"U8","shape":[4],"data_offsets":[-1,3]}"#, "integer `-1`"),
        ("offset of 2^64", r#"{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551616]}"#, "floating point"),
        (
            "begin after end",
            r#"{"dtype":"U8","shape":[4],"data_offsets":[4,0]}"#,
            "`t` begins at 4, after its end at 0",
        ),
        ("shape too big for the span", r#"{"dtype":"U8","shape":[5],"data_offsets":[0,4]}"#, "takes 5 bytes"),
        ("shape too small for the span", r#"{"dtype":"U8","shape":[3],"data_offsets":[0,4]}"#, "takes 3 bytes"),
        ("dtype too wide", r#"{"dtype":"F32","shape":[4],"data_offsets":[0,4]}"#, "F32 x [4] takes 16 bytes"),
        ("scalar of 4 bytes as U8", r#"{"dtype":"U8","shape":[],"data_offsets":[0,4]}"#, "takes 1 bytes"),
        ("half a byte", r#"{"dtype":"F4","shape":[7],"data_offsets":[0,4]}"#, "does not fill whole bytes"),
        ("six-bit elements off a byte", r#"{"dtype":"F6_E3M2","shape":[5],"data_offsets":[0,4]}"#, "whole bytes"),
        ("elements overflow", r#"{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#, "overflows 64"),
        (
            "overflow before a zero",
            r#"{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}"#,
            "overflows",
        ),
        ("bits overflow", r#"{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4]}"#, "overflows 64 bits"),
        ("hole at the start", r#"{"dtype":"U8","shape":[2],"data_offsets":[2,4]}"#, "hole: 2 bytes between the start"),
        (
            "data behind the last tensor",
            r#"{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#,
            "last 2 bytes of the file",
        ),
        ("duplicate dtype", r#"{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}"#, "duplicate key `dtype`"),
        ("duplicate shape", r#"{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}"#, "duplicate key `shape`"),
        (
            "duplicate offsets",
            r#"{"data_offsets":[0,4],"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#,
            "key `data_off",
        ),
        (
            "duplicate unknown field",
            r#"{"x":1,"x":2,"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#,
            "duplicate key `x`",
        ),
        ("number out of range in an unknown field", r#"{"x":1e999,"dtype":"U8"}"#, "number out of range"),
        ("lone surrogate in an unknown field", r#"{"x":"\udc00","dtype":"U8"}"#, "surrogate"),
    ];
    for (case, text, cause) in entries {
        check(case, &entry(text), Header, cause);
    }
    let deep = format!(r#"{{"x":{}{},"dtype":"U8"}}"#, "[".repeat(200), "]".repeat(200));
    check("deep nesting in an unknown field", &entry(&deep), Header, "recursion limit");
    let ranks = format!(r#"{{"dtype":"U8","shape":[4{}],"data_offsets":[0,4]}}"#, ",1".repeat(64));
    check("65 dimensions", &entry(&ranks), Header, "more than 64 dimensions");
    assert_eq!(json.len() + entries.len() + 4, 73);
}

#[test]
fn tensors_that_overlap_or_leave_holes() {
    let two = |a: (u64, u64), b: (u64, u64), data: usize| {
        let entry = |(s, e): (u64, u64)| format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{s},{e}]}}"#, e - s);
        shard(format!(r#"{{"a":{},"b":{}}}"#, entry(a), entry(b)).as_bytes(), data)
    };
    check("overlap", &two((0, 4), (3, 7), 7), Header, "tensor `b` at data offsets 3..7 overlaps tensor `a`");
    check("inside", &two((0, 8), (2, 4), 8), Header, "tensor `b` at data offsets 2..4 overlaps tensor `a`");
    check("the same bytes twice", &two((0, 4), (0, 4), 4), Header, "overlaps tensor `a`");
    check("hole", &two((0, 4), (6, 8), 8), Header, "hole: 2 bytes between tensor `a` and tensor `b`");
    check(
        "hole, written backwards",
        &two((6, 8), (0, 4), 8),
        Header,
        "hole: 2 bytes between tensor `b` and tensor `a`",
    );
    check("empty tensor off its place", &two((0, 4), (2, 2), 4), Header, "overlap");
    check("ends at 2^64", &two((0, 4), (4, u64::MAX), 4), Header, "overflows 64 bits");
    check("far past the end", &two((0, 4), (4, 1 << 60), 4), Truncated, "bytes short of what its header describes");
}

#[test]
fn header_lengths() {
    let with_length = |n: u64, rest: &[u8]| [&n.to_le_bytes(), rest].concat();
    check("over the limit", &with_length(100_000_001, b"{}"), Header, "100000001 is over the format's limit");
    check("2^64 - 1", &with_length(u64::MAX, b"{}"), Header, "over the format's limit");
    check("2^63", &with_length(1 << 63, b"{}"), Header, "over the format's limit");
    check("zero", &with_length(0, b"{}"), Header, "header length 0");
    check("one less", &with_length(1, b"{}"), Header, "EOF while parsing");
    check("longer than the file", &with_length(3, b"{}"), Truncated, "ends 1 bytes before the end of its header");
    check("at the limit, file short", &with_length(100_000_000, b"{}"), Truncated, "unfinished download?");
    check("big-endian", &[&2u64.to_be_bytes()[..], b"{}"].concat(), Header, "over the format's limit");
}

#[test]
fn a_file_cut_at_any_byte_is_truncated_and_says_by_how_much() {
    let (json, data) = header(&[("first", 5), ("empty", 0), ("last", 9)]);
    let whole = shard(json.as_bytes(), data);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cut.safetensors");
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).expect("written");
        let e = refused(&path);
        assert_eq!(e.kind(), if length == 0 { NotACheckpoint } else { Truncated }, "{length}: {e}");
        assert!(e.to_string().contains("unfinished download?"), "{length}: {e}");
        if length >= 8 + json.len() {
            assert!(e.to_string().contains(&format!("{} bytes short", whole.len() - length)), "{length}: {e}");
            assert_eq!(e.byte_range(), Some(length as u64..whole.len() as u64));
        }
    }
    fs::write(&path, &whole).expect("written");
    assert_eq!(both_ways::open(&[&path]).expect("whole").len(), 3);
    fs::write(&path, [&whole[..], b"x"].concat()).expect("written");
    assert_eq!(refused(&path).kind(), Header);
}

#[test]
fn a_header_of_100_mb_is_read_and_one_of_garbage_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("big.safetensors");
    let with_length = |head: &[u8]| {
        let file = File::create(&path).expect("created");
        file.write_all_at(&100_000_000u64.to_le_bytes(), 0).expect("written");
        file.write_all_at(head, 8).expect("written");
        file.set_len(8 + 100_000_000).expect("sparse");
        file
    };
    with_length(b"");
    assert!(refused(&path).to_string().contains("begins with byte 0x00"), "zeros");
    // Garbage behind a plausible start: the parser stops at the first byte that is wrong.
    with_length(b"{\"t\":{\"dtype\":");
    let e = refused(&path);
    assert_eq!(e.kind(), Header);
    assert_eq!(e.byte_range(), Some(22..23), "{e}");
    // The largest header there can be, in order: "{}" and padding.
    let file = with_length(b"{}");
    let spaces = vec![b' '; 1_000_000];
    for i in 0..100 {
        let skip = if i == 0 { 2 } else { 0 };
        file.write_all_at(&spaces[skip..], 8 + i * 1_000_000 + skip as u64).expect("written");
    }
    let c = both_ways::open(&[&path]).expect("padding is allowed");
    assert_eq!((c.len(), c.header_read()), (0, 100_000_008));
}

#[test]
fn a_header_that_repeats_one_name_or_nests_without_end_is_bounded() {
    // One name of 50 MB: the message is cut.
    let name = "n".repeat(50_000_000);
    let e = Checkpoint::from_bytes(&shard(format!("{{{}:1}}", quote(&name)).as_bytes(), 0), 50_000_013);
    assert!(e.expect_err("malformed").to_string().len() < 500);
    let open = format!("{{\"t\":{{\"x\":{}", "[".repeat(5_000_000));
    let bytes = shard(open.as_bytes(), 0);
    assert!(Checkpoint::from_bytes(&bytes, bytes.len() as u64).is_err());
    // 300,000 unknown fields in one entry.
    let fields: String = (0..300_000).map(|i| format!("\"{i}\":0,")).collect();
    let text = format!("{{\"t\":{{{fields}\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}}}");
    let bytes = shard(text.as_bytes(), 0);
    let start = Instant::now();
    assert_eq!(Checkpoint::from_bytes(&bytes, bytes.len() as u64).expect("unknown fields are let be").len(), 1);
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn files_that_are_something_else_are_named() {
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 133466304\n";
    let cases: &[(&[u8], &str)] = &[
        (b"", "the file is empty: an unfinished download?"),
        (lfs, "a Git LFS pointer, not the file it stands for: run `git lfs pull`"),
        (b"<!DOCTYPE html><html><body>Sign in</body>", "a web page"),
        (b"\n  <html>\n<head>403 Forbidden", "a web page"),
        (b"<?xml version=\"1.0\"?><Error>AccessDenied</Error>", "a web page"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "a zip archive, which is how torch.save"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a Python pickle"),
        (b"GGUF\x03\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00", "a GGUF file"),
        (b"\x89HDF\r\n\x1a\n\0\0\0\0", "an HDF5 file"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "a NumPy array"),
        (b"\x1f\x8b\x08\x08\x5a\x5a\x5a\x5a\x00\x03", "a compressed file"),
        (b"{\"weight_map\": {\"a\": \"b\"}}", "JSON text"),
        (&[0; 4096], "all zeros at the start"),
    ];
    for (bytes, cause) in cases {
        check(cause, bytes, NotACheckpoint, cause);
    }
}

#[test]
fn an_unfinished_download_is_named_by_its_file_name_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let (json, data) = header(&[("a", 4)]);
    let whole = shard(json.as_bytes(), data);
    for name in ["x.safetensors.incomplete", "x.safetensors.part", "Unconfirmed 1.crdownload"] {
        let path = folder.path().join(name);
        fs::write(&path, &whole[..whole.len() - 1]).expect("written");
        let e = refused(&path);
        assert_eq!(e.kind(), NotACheckpoint, "{e}");
        assert!(e.to_string().contains("unfinished download") && e.to_string().contains("1 bytes short"), "{e}");
        // Whole after all: the name alone refuses nothing.
        fs::write(&path, &whole).expect("written");
        assert!(both_ways::open(&[&path]).is_ok());
    }
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting() {
    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("fifo.safetensors");
    let c_path = std::ffi::CString::new(fifo.to_str().expect("text")).expect("no NUL");
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) }, 0);
    let e = refused(&fifo);
    assert!(e.kind() == NotACheckpoint && e.to_string().contains("a FIFO"), "{e}");

    let socket = folder.path().join("socket.safetensors");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
    let e = refused(&socket);
    assert!(e.kind() == NotACheckpoint && e.to_string().contains("a socket"), "{e}");

    let e = refused(Path::new("/dev/zero"));
    assert!(e.kind() == NotACheckpoint && e.to_string().contains("a device"), "{e}");

    let inner = folder.path().join("dir.safetensors");
    fs::create_dir(&inner).expect("made");
    let file = folder.path().join("file.safetensors");
    write(&file, &[("a", 1)]);
    let e = both_ways::open(&[&file, &inner]).expect_err("a directory in a list");
    assert!(e.kind() == NotACheckpoint && e.to_string().contains("dir.safetensors: a directory"), "{e}");
}

#[test]
fn files_that_are_not_there_or_may_not_be_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let gone = folder.path().join("gone.safetensors");
    assert_eq!(refused(&gone).kind(), NotFound);
    std::os::unix::fs::symlink(&gone, folder.path().join("link.safetensors")).expect("linked");
    assert_eq!(refused(&folder.path().join("link.safetensors")).kind(), NotFound);
    let file = folder.path().join("file.safetensors");
    write(&file, &[("a", 1)]);
    assert_eq!(refused(&file.join("below.safetensors")).kind(), NotFound, "a file is no folder");
    let looping = folder.path().join("loop.safetensors");
    std::os::unix::fs::symlink(&looping, &looping).expect("linked");
    assert_eq!(refused(&looping).kind(), ErrorKind::Io);
    assert_eq!(refused(&folder.path().join("n".repeat(300))).kind(), ErrorKind::Io);
    let nul = both_ways::open(&["a\0b"]).expect_err("no such name");
    assert_eq!(nul.kind(), ErrorKind::Invalid, "{nul}");

    let mode = std::os::unix::fs::PermissionsExt::from_mode;
    fs::set_permissions(folder.path(), mode(0o755)).expect("mode set");
    fs::set_permissions(&file, mode(0o000)).expect("mode set");
    // Root can read everything. Another user (for this thread's file accesses only) cannot.
    // SAFETY: plain system calls on this thread.
    let before = unsafe { libc::setfsuid(65_534) };
    assert_eq!(refused(&file).kind(), ErrorKind::Permission);
    // SAFETY: as above.
    unsafe { libc::setfsuid(before as libc::uid_t) };
}

#[test]
fn a_descriptor_is_not_left_open_by_success_or_failure() {
    let open =
        || fs::read_dir("/proc/self/fd").expect("proc").filter_map(|e| fs::read_link(e.ok()?.path()).ok()).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let (good, bad) = (folder.path().join("good.safetensors"), folder.path().join("bad.safetensors"));
    write(&good, &[("a", 1)]);
    fs::write(&bad, shard(b"{]", 0)).expect("written");
    assert!(both_ways::open(&[&good]).is_ok() && Checkpoint::open(&[&bad]).is_err());
    let left: Vec<std::path::PathBuf> = open();
    assert!(!left.iter().any(|p| p.starts_with(folder.path())), "{left:?}");
}
