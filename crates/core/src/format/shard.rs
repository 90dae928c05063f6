//! Opening one shard file: its type, its header's bytes, and an error that says what the file is if it is no shard
//! file.

use super::checkpoint::Seeded;
use super::header::{self, Header, MAX_HEADER};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Head, Location, Origin, Version, Watch};

/// Bytes of the first read. Headers of dense models fit in it (a tensor takes about 100 bytes, so it holds about 600
/// tensors). On every storage measured, smaller reads cost the same.
const FIRST_READ: u64 = 64 * 1024;

/// A shard file's header and facts about the file; the descriptor is closed again.
pub(super) struct Shard {
    pub(super) header: Header,
    pub(super) size: u64,
    pub(super) version: Version,
    pub(super) data_start: u64,
    pub(super) header_read: u64,
}

/// Reads and checks the header of the file at `origin`. Errors carry where that is.
pub(super) fn open(origin: &Origin, hasher: &Seeded, watch: &Watch) -> Result<Shard> {
    read(origin, hasher, watch).map_err(|e| unfinished(e, origin.location()).at(origin.location()))
}

fn read(origin: &Origin, hasher: &Seeded, watch: &Watch) -> Result<Shard> {
    let mut open = origin.open(FIRST_READ, watch)?;
    let data_start = data_start(&open.head.bytes, open.head.size)?;
    watch.afford(data_start)?;
    open.read_until(data_start)?;
    // From here on, only the parse takes time.
    let Head { bytes, size, version } = open.close();
    let header = header::parse(&bytes[8..data_start as usize], data_start, size, hasher)?;
    Ok(Shard { header, size, version, data_start, header_read: bytes.len() as u64 })
}

/// The same for bytes in memory: the first bytes of a file `size` bytes long, at least its header.
pub(super) fn parse(bytes: &[u8], size: u64, hasher: &Seeded) -> Result<Shard> {
    let length = header_length(bytes, size)?;
    let data_start = 8 + length;
    let json = bytes.get(8..data_start as usize).ok_or_else(|| {
        Error::new(ErrorKind::Truncated, format!("{} bytes do not hold the header of {length}", bytes.len()))
    })?;
    let header = header::parse(json, data_start, size, hasher)?;
    Ok(Shard { header, size, version: Version::of_bytes(size), data_start, header_read: data_start })
}

/// Where the data section starts, from the first bytes of a file of `size` bytes. Refuses what is no header by its first
/// bytes.
fn data_start(bytes: &[u8], size: u64) -> Result<u64> {
    let data_start = 8 + header_length(bytes, size)?;
    let seen = &bytes[8..bytes.len().min(data_start as usize)];
    if let Some(&first) = seen.iter().find(|b| !b.is_ascii_whitespace()) {
        // It is not JSON at all. Say so before reading 100 MB of it.
        if first != b'{' {
            return Err(Error::new(
                ErrorKind::Header,
                format!("malformed header: it begins with byte {first:#04x}, not with `{{`"),
            )
            .range(8..data_start));
        }
    }
    Ok(data_start)
}

/// The header length in the first eight bytes of a file, checked against the limit and the file's size.
fn header_length(bytes: &[u8], size: u64) -> Result<u64> {
    let Some(length) = bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(Error::new(
            ErrorKind::Truncated,
            format!("the file is {size} bytes long, too short for a header: unfinished download?"),
        )
        .range(size..8)
        .with_values(8u64, size));
    };
    if length > MAX_HEADER {
        // Their writer did what the format forbids. The file is whole.
        if size.saturating_sub(8) >= length && begins_as_json(&bytes[8..]) {
            let text = format!(
                "its header has {length} bytes, and the format allows {MAX_HEADER}: no reader of the format takes the \
                 file. Save its tensors in several files (penstock.save does so: max_shard_size=), or with shorter names \
                 and metadata"
            );
            return Err(Error::new(ErrorKind::Header, text).range(0..8).with_values(MAX_HEADER, length));
        }
        return Err(recognise(bytes).unwrap_or_else(|| {
            Error::new(
                ErrorKind::Header,
                format!(
                    "header length {length} is over the format's limit of {MAX_HEADER} bytes: this is not a safetensors \
                     file, or its start is damaged"
                ),
            )
            .range(0..8)
        }));
    }
    if length == 0 {
        return Err(recognise(bytes).unwrap_or_else(|| {
            Error::new(
                ErrorKind::Header,
                "header length 0: a safetensors file has at least `{}`. Files that a download reserved space for and \
                 never wrote look like this",
            )
            .range(0..8)
        }));
    }
    if size.saturating_sub(8) < length {
        return Err(Error::new(
            ErrorKind::Truncated,
            format!(
                "the file is {size} bytes long and ends {} bytes before the end of its header: unfinished download?",
                length - size.saturating_sub(8)
            ),
        )
        .range(size..8 + length)
        .with_values(8 + length, size));
    }
    Ok(length)
}

fn begins_as_json(bytes: &[u8]) -> bool {
    bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

/// Names the kinds of file that occur where a safetensors file was expected. Call it only if the first eight bytes are
/// no valid header length: read as a length, `{` is 123 and the start of a pickle 640.
pub(super) fn recognise(start: &[u8]) -> Option<Error> {
    let text = |s: &[u8]| {
        let blank = start.iter().take_while(|b| b.is_ascii_whitespace()).count();
        start.len() >= blank + s.len() && start[blank..blank + s.len()].eq_ignore_ascii_case(s)
    };
    let is = if start.starts_with(b"version https://git-lfs") || start.starts_with(b"version https://hawser") {
        "a Git LFS pointer, not the file it stands for: run `git lfs pull` in the repository, or download the file itself"
    } else if text(b"<!doctype") || text(b"<html") || text(b"<?xml") || text(b"<head") {
        "a web page (HTML or XML), not a safetensors file: the download got an error or login page; fetch it again with \
         the right address and credentials"
    } else if start.starts_with(b"PK\x03\x04") {
        "a zip archive, which is how torch.save writes .bin and .pt files: `penstock convert FILE DIRECTORY` writes it as safetensors"
    } else if start.len() > 1 && start[0] == 0x80 && (2..=5).contains(&start[1]) {
        "a Python pickle, which is how old torch.save wrote .bin and .pt files: `penstock convert FILE DIRECTORY` writes it as safetensors"
    } else if start.starts_with(b"GGUF") || start.starts_with(b"GGML") || start.starts_with(b"lmgg") {
        "a GGUF file (llama.cpp), not safetensors"
    } else if start.starts_with(b"\x89HDF\r\n\x1a\n") {
        "an HDF5 file (Keras), not safetensors"
    } else if start.starts_with(b"\x93NUMPY") {
        "a NumPy array file, not safetensors"
    } else if start.starts_with(b"\x1f\x8b") || start.starts_with(b"\x28\xb5\x2f\xfd") {
        "a compressed file (gzip or zstd): unpack it first"
    } else if text(b"{") {
        "JSON text, not a safetensors file: if it is an index of shard files, its name must end in .json"
    } else if start.len() >= 64 && start.iter().all(|&b| b == 0) {
        "all zeros at the start: space reserved by a download that has not been written. Fetch it again"
    } else {
        return None;
    };
    Some(Error::new(ErrorKind::NotACheckpoint, format!("not a checkpoint: {is}")))
}

/// A malformed file whose name says that its download is unfinished gets that error and no other.
fn unfinished(e: Error, at: &Location) -> Error {
    let partial = at
        .ending()
        .is_some_and(|x| ["incomplete", "part", "partial", "crdownload", "download", "aria2", "tmp"].contains(&x));
    match e.kind() {
        ErrorKind::Header | ErrorKind::Truncated if partial => e
            .of_kind(ErrorKind::NotACheckpoint)
            .reworded(|why| format!("an unfinished download, by its name and its content ({why}): fetch it again")),
        _ => e,
    }
}
