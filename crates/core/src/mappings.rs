//! The mappings of this process, and whether it may write to them.
//!
//! Tensors that a load fills come from other libraries. Their memory can be read-only, unmapped, or a mapping of a file
//! that has become shorter. A write to such memory kills the process, so it is checked first. `/proc/self/maps` gives
//! the rights of a mapping (proc(5)), and madvise(2) tells whether a page of it is available.

use crate::machine::page_size;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;

/// The reason that bytes cannot be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Some of them are not mapped.
    Unmapped,
    /// Some of them are mapped without the right to write.
    ReadOnly,
    /// They map a file that no longer has these bytes, or that cannot be read.
    Lost,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unmapped => "is in memory that is no longer mapped",
            Self::ReadOnly => "is in memory that this process may not write to",
            Self::Lost => "is in memory that is gone: the file that it maps has become shorter, or cannot be read",
        })
    }
}

/// One line of `/proc/self/maps`.
#[derive(Debug, PartialEq, Eq)]
struct MapsLine {
    at: Range<u64>,
    writable: bool,
    /// Whether there is a file behind it.
    file: bool,
}

/// The address ranges that cannot be written to (by number), and the reasons. No range may be empty.
///
/// If `/proc` cannot be read, nothing is known, and no range is returned.
pub fn unwritable(spans: &[Range<u64>]) -> Vec<(usize, Refusal)> {
    let all: Vec<usize> = (0..spans.len()).collect();
    let found = refused(spans, &all);
    if found.is_empty() {
        return found;
    }
    // The kernel lists mappings page by page of text. Another thread that maps and unmaps meanwhile can hide one. So
    // only a mapping that is missing twice is missing.
    let suspects: Vec<usize> = found.iter().map(|f| f.0).collect();
    refused(spans, &suspects)
}

fn refused(spans: &[Range<u64>], which: &[usize]) -> Vec<(usize, Refusal)> {
    if which.is_empty() {
        return Vec::new();
    }
    let Ok(mappings) = text().map(|t| parse(&t)) else { return Vec::new() };
    let mut found = Vec::new();
    // (mapping, last byte in it, span)
    let mut in_files: Vec<(usize, u64, usize)> = Vec::new();
    for &number in which {
        let span = &spans[number];
        let first = mappings.partition_point(|m| m.at.end <= span.start);
        let mut at = span.start;
        let mut refusal = None;
        for (i, mapping) in mappings.iter().enumerate().skip(first) {
            if at >= span.end {
                break;
            }
            if mapping.at.start > at {
                refusal = Some(Refusal::Unmapped);
                break;
            }
            if !mapping.writable {
                refusal = Some(Refusal::ReadOnly);
                break;
            }
            at = mapping.at.end;
            if mapping.file {
                in_files.push((i, at.min(span.end) - 1, number));
            }
        }
        if refusal.is_none() && at < span.end {
            refusal = Some(Refusal::Unmapped);
        }
        if let Some(refusal) = refusal {
            found.push((number, refusal));
        }
    }
    found.extend(lost(in_files).into_iter().map(|number| (number, Refusal::Lost)));
    found.sort_by_key(|f| f.0);
    found.dedup_by_key(|f| f.0);
    found
}

/// The spans that end in pages which their file no longer has. A file is cut at its end: if the last page of a mapping
/// is there, all pages before it are there.
fn lost(mut in_files: Vec<(usize, u64, usize)>) -> Vec<usize> {
    in_files.sort_unstable();
    let mut found = Vec::new();
    for mapping in in_files.chunk_by(|a, b| a.0 == b.0) {
        for &(_, last, span) in mapping.iter().rev() {
            if is_there(last) {
                break;
            }
            found.push(span);
        }
    }
    found
}

/// Whether the page of this address is available. If the page is not in memory yet, this reads it from its file.
fn is_there(address: u64) -> bool {
    let page = page_size();
    let at = (address - address % page) as *mut libc::c_void;
    // SAFETY: it changes no byte. Where nothing is mapped it is an error, as it is where an access would be SIGBUS.
    let refused = unsafe { libc::madvise(at, page as usize, libc::MADV_POPULATE_READ) } != 0;
    // Any other error is a kernel before 5.14, or memory of a device: nothing is known then.
    !(refused && io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT))
}

fn text() -> io::Result<Vec<u8>> {
    let mut file = File::open("/proc/self/maps")?;
    let mut text = Vec::with_capacity(1 << 16);
    file.read_to_end(&mut text)?;
    Ok(text)
}

/// The mappings in the kernel's list, which are in ascending order.
fn parse(text: &[u8]) -> Vec<MapsLine> {
    text.split(|&b| b == b'\n').filter_map(line).collect()
}

/// One line: `7f1c2a000000-7f1c2a021000 rw-p 00000000 103:02 1234   /path`.
fn line(line: &[u8]) -> Option<MapsLine> {
    let mut words = line.split(|&b| b == b' ').filter(|word| !word.is_empty());
    let mut next = || std::str::from_utf8(words.next()?).ok();
    let (start, end) = next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let rights = next()?;
    let (_offset, _device, inode) = (next()?, next()?, next()?);
    Some(MapsLine { at: start..end, writable: rights.as_bytes().get(1) == Some(&b'w'), file: inode != "0" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn the_kernels_list_is_understood() {
        let text = b"00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/a b (deleted)\n\
            7f00a000-7f00c000 rw-p 00000000 00:00 0 \n\
            7f00c000-7f00d000 rw-s 00001000 00:05 7 /\xff\xfe\n\
            nonsense\n";
        assert_eq!(
            parse(text),
            [
                MapsLine { at: 0x40_0000..0x45_2000, writable: false, file: true },
                MapsLine { at: 0x7f00_a000..0x7f00_c000, writable: true, file: false },
                MapsLine { at: 0x7f00_c000..0x7f00_d000, writable: true, file: true },
            ]
        );
    }

    /// Four pages: of a file, or of nothing.
    fn mapped(file: Option<&File>) -> u64 {
        let (kind, fd) = file.map_or((libc::MAP_ANONYMOUS, -1), |f| (0, f.as_raw_fd()));
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let len = 4 * page_size() as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, libc::MAP_PRIVATE | kind, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        at as u64
    }

    #[test]
    fn memory_that_cannot_be_written_to_is_found_and_why() {
        let page = page_size();
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &vec![1; 4 * page as usize]).unwrap();
        let (plain, cut) = (mapped(None), mapped(Some(&file)));
        file.set_len(page + 1).unwrap();
        let spans = [
            plain..plain + page,
            plain + 1..plain + page + 1,
            plain + 2 * page..plain + 2 * page + 1,
            plain + page + 7..plain + 4 * page,
            cut..cut + 2 * page,
            cut + page..cut + 2 * page + 1,
            cut + 3 * page..cut + 3 * page + 1,
        ];
        assert_eq!(unwritable(&spans), [(5, Refusal::Lost), (6, Refusal::Lost)]);
        let at = |n: u64| (plain + n * page) as *mut libc::c_void;
        // SAFETY: these pages are this test's own.
        unsafe {
            assert_eq!(libc::mprotect(at(1), page as usize, libc::PROT_READ), 0);
            // Not unmapped: another test could get its address.
            assert_eq!(libc::mprotect(at(3), page as usize, libc::PROT_NONE), 0);
        }
        assert_eq!(
            unwritable(&spans),
            [(1, Refusal::ReadOnly), (3, Refusal::ReadOnly), (5, Refusal::Lost), (6, Refusal::Lost)]
        );
        let more = [plain + 2 * page..plain + 4 * page, 0..1, u64::MAX - 1..u64::MAX];
        assert_eq!(unwritable(&more), [(0, Refusal::ReadOnly), (1, Refusal::Unmapped), (2, Refusal::Unmapped)]);
        // SAFETY: as above.
        unsafe {
            assert_eq!(libc::munmap(at(0), 4 * page as usize), 0);
            assert_eq!(libc::munmap(cut as *mut libc::c_void, 4 * page as usize), 0);
        }
    }

    #[test]
    fn what_the_process_holds_can_be_written_to() {
        let heap = vec![0_u8; 1 << 20];
        let at = heap.as_ptr() as u64;
        assert_eq!(unwritable(&[at..at + 1, at..at + (1 << 20)]), []);
        assert_eq!(unwritable(&[]), []);
    }
}
