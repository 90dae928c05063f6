//! Opening one shard file: its type, its header's bytes, and an error that says what the file is if it is no shard
//! file.

use super::checkpoint::Seeded;
use super::header::{self, Header, MAX_HEADER};
use super::watch::{Asking, Watch};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{self, Identity, Version};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Bytes of the first read. Headers of dense models fit in it (a tensor takes about 100 bytes, so it holds about 600
/// tensors). On every storage measured, smaller reads cost the same.
pub(super) const FIRST_READ: u64 = 64 * 1024;

/// Bytes of one read. Of a long header or index each read that returns is progress, even if the server is slow.
pub(super) const MOST_PER_READ: usize = 1 << 20;

/// A shard file's header and facts about the file; the descriptor is closed again.
pub(super) struct Shard {
    pub(super) header: Header,
    pub(super) size: u64,
    pub(super) version: Version,
    pub(super) data_start: u64,
    pub(super) header_read: u64,
}

/// Reads and checks the header of `path`. Errors carry the path.
pub(super) fn open(path: &Path, hasher: &Seeded, watch: &Watch) -> Result<Shard> {
    read(path, hasher, watch).map_err(|e| unfinished(e, path).at(path))
}

fn read(path: &Path, hasher: &Seeded, watch: &Watch) -> Result<Shard> {
    let asking = watch.ask(path);
    // The type is checked before the file is opened, because opening some devices has effects, and once more
    // afterwards, because the name may stand for another file by then.
    let found = fs::metadata(path).map_err(|e| os_error("open", &e))?;
    asking.answered();
    let kind = found.file_type();
    if !kind.is_file() {
        return Err(not_a_file(if kind.is_dir() {
            libc::S_IFDIR
        } else if kind.is_fifo() {
            libc::S_IFIFO
        } else if kind.is_socket() {
            libc::S_IFSOCK
        } else {
            libc::S_IFCHR
        }));
    }
    // O_NONBLOCK: opening a FIFO must not wait for its writer. It has no effect on regular files.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| os_error("open", &e))?;
    asking.answered();
    let stat = store::stat(&file).map_err(|e| Error::io("stat", &e))?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(not_a_file(stat.st_mode & libc::S_IFMT));
    }
    let identity = Identity::from_stat(&stat);
    let size = identity.size;
    if size == 0 {
        return Err(Error::new(ErrorKind::NotACheckpoint, "the file is empty: an unfinished download? Fetch it again"));
    }
    // Without this, a read at the start of a cold file also brings in the read-ahead window (128 KiB and more) behind
    // it. A load that must leave no page cache behind must not do that. Advice only: a failure changes nothing.
    // SAFETY: plain call on an open descriptor.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };

    let mut bytes = Vec::new();
    fill(&file, &mut bytes, size.min(FIRST_READ), (watch, &asking))?;
    let data_start = data_start(&bytes, size)?;
    watch.afford(data_start)?;
    fill(&file, &mut bytes, data_start, (watch, &asking))?;
    drop(file);
    // From here on, only the parse takes time.
    drop(asking);
    let header = header::parse(&bytes[8..data_start as usize], data_start, size, hasher)?;
    Ok(Shard { header, size, version: Version::Inode(identity), data_start, header_read: bytes.len() as u64 })
}

/// The same for bytes in memory: the first bytes of a file `size` bytes long, at least its header.
pub(super) fn parse(bytes: &[u8], size: u64, hasher: &Seeded) -> Result<Shard> {
    let length = header_length(bytes, size)?;
    let data_start = 8 + length;
    let json = bytes.get(8..data_start as usize).ok_or_else(|| {
        Error::new(ErrorKind::Truncated, format!("{} bytes do not hold the header of {length}", bytes.len()))
    })?;
    let header = header::parse(json, data_start, size, hasher)?;
    let version = Version::Inode(Identity { size, ..Identity::default() });
    Ok(Shard { header, size, version, data_start, header_read: data_start })
}

/// Where the data section starts, from the first bytes of a file of `size` bytes. Refuses what is no header by its first
/// bytes.
pub(super) fn data_start(bytes: &[u8], size: u64) -> Result<u64> {
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
        .range(size..8));
    };
    if length > MAX_HEADER {
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
    if size - 8 < length {
        return Err(Error::new(
            ErrorKind::Truncated,
            format!(
                "the file is {size} bytes long and ends {} bytes before the end of its header: unfinished download?",
                length - (size - 8)
            ),
        )
        .range(size..8 + length));
    }
    Ok(length)
}

/// Reads from the end of `bytes` until it holds `until` bytes of the file.
fn fill(file: &File, bytes: &mut Vec<u8>, until: u64, (watch, asking): (&Watch, &Asking<'_>)) -> Result<()> {
    let (mut at, until) = (bytes.len(), until as usize);
    if at >= until {
        return Ok(());
    }
    bytes.resize(until, 0);
    while at < until {
        let step = until.min(at + MOST_PER_READ);
        let into = &mut bytes[at..step];
        match if watch.is_here() { read_at_once(file, into, at as u64) } else { file.read_at(into, at as u64) } {
            Ok(0) => {
                return Err(Error::new(ErrorKind::Truncated, "the file became shorter while its header was read")
                    .range(at as u64..until as u64));
            }
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // If bytes are not in the page cache, the read that waits for them also reports their errors.
            Err(_) if watch.is_here() => return Err(watch.too_much()),
            Err(e) => return Err(Error::io("read the header", &e).range(at as u64..until as u64)),
        }
        asking.answered();
    }
    Ok(())
}

/// Reads what is in the page cache, and does not wait.
pub(super) fn read_at_once(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: `to` is `into`, which is borrowed for the call.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const to, 1, at as i64, libc::RWF_NOWAIT) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// An error of the operating system. For the person who typed the path, ENOTDIR and a broken link are "not found".
pub(super) fn os_error(doing: &str, e: &io::Error) -> Error {
    match e.raw_os_error() {
        Some(libc::ENOTDIR) => Error::new(ErrorKind::NotFound, format!("cannot {doing}: {e}")),
        None => Error::new(ErrorKind::Invalid, format!("cannot {doing}: {e}")),
        Some(_) => Error::io(doing, e),
    }
}

fn not_a_file(mode: libc::mode_t) -> Error {
    let text = match mode {
        libc::S_IFDIR => {
            "a directory where a safetensors file was expected; a directory is opened on its own, not in a list"
        }
        libc::S_IFIFO => "a FIFO: a checkpoint is read at many places at once, so save it to a file first",
        libc::S_IFSOCK => "a socket, not a safetensors file",
        _ => "a device, not a safetensors file",
    };
    Error::new(ErrorKind::NotACheckpoint, text)
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
fn unfinished(e: Error, path: &Path) -> Error {
    let partial = path
        .extension()
        .and_then(|x| x.to_str())
        .is_some_and(|x| ["incomplete", "part", "partial", "crdownload", "download", "aria2", "tmp"].contains(&x));
    match e.kind() {
        ErrorKind::Header | ErrorKind::Truncated if partial => Error::new(
            ErrorKind::NotACheckpoint,
            format!("an unfinished download, by its name and its content ({}): fetch it again", e.message()),
        ),
        _ => e,
    }
}
