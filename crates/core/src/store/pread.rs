//! Reads that come back whole, however short the kernel's answers are.

use std::io;
use std::os::fd::RawFd;

/// The kernel never moves more than this in one read (`MAX_RW_COUNT`): longer reads come back short.
pub(super) const MOST_PER_CALL: u64 = 0x7fff_f000;

/// A call that failed, after others that did not.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Bytes that the calls before it brought.
    pub(crate) got: u64,
    /// Bytes that it was to bring.
    pub(crate) asked: u64,
    pub(crate) cause: io::Error,
}

/// Reads from `offset` into `to`, up to the end of the file. Returns the bytes that arrived. `to` is used up. `flags`
/// are those of preadv2; `cap` is the most bytes of one call.
///
/// # Safety
/// Every place in `to` is writable for its length.
pub(crate) unsafe fn read_fully(
    fd: RawFd,
    offset: u64,
    mut to: &mut [libc::iovec],
    flags: i32,
    cap: u64,
) -> Result<u64, Stopped> {
    /// The kernel takes no more places than this in one call.
    const IOV_MAX: usize = 1024;
    let mut got = 0u64;
    loop {
        while to.first().is_some_and(|v| v.iov_len == 0) {
            to = &mut to[1..];
        }
        if to.is_empty() {
            return Ok(got);
        }
        let (mut count, mut bytes) = (0, 0u64);
        while count < to.len().min(IOV_MAX) && bytes + to[count].iov_len as u64 <= cap {
            bytes += to[count].iov_len as u64;
            count += 1;
        }
        let at = (offset + got) as i64;
        let n = match (count, flags) {
            // SAFETY: the caller vouches for the places.
            (0, 0) => unsafe { libc::pread(fd, to[0].iov_base, cap as usize, at) },
            (0, _) => {
                let first = libc::iovec { iov_base: to[0].iov_base, iov_len: cap as usize };
                // SAFETY: as above.
                unsafe { libc::preadv2(fd, &raw const first, 1, at, flags) }
            }
            // SAFETY: as above.
            (1, 0) => unsafe { libc::pread(fd, to[0].iov_base, to[0].iov_len, at) },
            // SAFETY: as above.
            (_, 0) => unsafe { libc::preadv(fd, to.as_ptr(), count as i32, at) },
            // SAFETY: as above.
            _ => unsafe { libc::preadv2(fd, to.as_ptr(), count as i32, at, flags) },
        };
        match n {
            0 => return Ok(got),
            1.. => {
                got += n as u64;
                let mut left = n as usize;
                for v in to.iter_mut() {
                    let step = left.min(v.iov_len);
                    // SAFETY: stays within, or one past, the place.
                    v.iov_base = unsafe { v.iov_base.cast::<u8>().add(step) }.cast();
                    v.iov_len -= step;
                    left -= step;
                    if left == 0 {
                        break;
                    }
                }
            }
            _ => {
                let cause = io::Error::last_os_error();
                if cause.kind() != io::ErrorKind::Interrupted {
                    return Err(Stopped { got, asked: if count == 0 { cap } else { bytes }, cause });
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_call_that_fails_says_what_came_before_it_and_what_it_was_to_bring() {
        const PAGE: usize = 4096;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 3 * PAGE]).unwrap();
        let mut memory = vec![0u8; PAGE];
        let place = |at: *mut u8, len| libc::iovec { iov_base: at.cast(), iov_len: len };
        // Nobody may write to the zero page.
        let nowhere = std::ptr::without_provenance_mut(64);
        let mut to = [place(memory.as_mut_ptr(), PAGE), place(nowhere, 2 * PAGE)];
        // SAFETY: the first place is ours. The kernel refuses to write to the second one.
        let stopped = unsafe { read_fully(file.as_file().as_raw_fd(), 0, &mut to, 0, u64::MAX) }.unwrap_err();
        assert_eq!(stopped.cause.raw_os_error(), Some(libc::EFAULT));
        assert_eq!((stopped.got, stopped.asked), (PAGE as u64, 2 * PAGE as u64));
        assert!(memory.iter().all(|byte| *byte == 7));
    }
}
