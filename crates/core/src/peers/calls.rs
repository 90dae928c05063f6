//! The system calls that move bytes: many places at once, and never a signal or a wait.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

/// Spans of one call.
const AT_ONCE: usize = 64;

/// Consecutive bytes, in places one after the other. They are taken from an iterator as they are needed.
pub(super) struct Spans {
    /// The next places, [`AT_ONCE`] at most. None is empty.
    ahead: VecDeque<(*mut u8, usize)>,
    rest: Box<dyn Iterator<Item = (*mut u8, usize)>>,
    /// Bytes of the first place that are done.
    within: usize,
}

// SAFETY: the addresses are used only while their owner keeps the memory (`Read::keep`, `Batch::keep`). Whatever else the
// iterator holds can be sent (`new`).
unsafe impl Send for Spans {}

impl Spans {
    pub(super) fn new(places: impl Iterator<Item = (*mut u8, usize)> + 'static) -> Spans {
        Spans { ahead: VecDeque::new(), rest: Box::new(places), within: 0 }
    }

    fn next(&mut self) -> ([libc::iovec; AT_ONCE], usize) {
        let missing = AT_ONCE - self.ahead.len();
        self.ahead.extend(self.rest.by_ref().filter(|place| place.1 > 0).take(missing));
        let mut found = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; AT_ONCE];
        let mut skip = self.within;
        for (span, &(at, len)) in found.iter_mut().zip(&self.ahead) {
            *span = libc::iovec { iov_base: at.wrapping_add(skip).cast(), iov_len: len - skip };
            skip = 0;
        }
        (found, self.ahead.len())
    }

    fn done(&mut self, mut bytes: usize) {
        while let Some(&(_, len)) = self.ahead.front().filter(|_| bytes > 0) {
            let left = len - self.within;
            if bytes < left {
                self.within += bytes;
                return;
            }
            bytes -= left;
            self.within = 0;
            self.ahead.pop_front();
        }
    }

    /// Sends what it can at once. `Ok(0)`: nothing is left.
    ///
    /// # Safety
    /// All places can be read.
    pub(super) unsafe fn send(&mut self, fd: RawFd) -> io::Result<usize> {
        let (mut found, count) = self.next();
        if count == 0 {
            return Ok(0);
        }
        // SAFETY: all zeros is a valid message header.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (found.as_mut_ptr(), count as _);
        // SAFETY: the header names `count` places, which the caller says can be read.
        let sent = checked(unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })?;
        self.done(sent);
        Ok(sent)
    }

    /// Receives what is there, at most as much as is left. `Ok(0)`: the connection is closed.
    ///
    /// # Safety
    /// All places can be written to.
    pub(super) unsafe fn receive(&mut self, fd: RawFd) -> io::Result<usize> {
        let (mut found, count) = self.next();
        // SAFETY: all zeros is a valid message header.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (found.as_mut_ptr(), count as _);
        // SAFETY: the header names `count` places, which the caller says can be written to.
        let received = checked(unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) })?;
        self.done(received);
        Ok(received)
    }
}

/// The bytes that a call moved.
fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Whether a call should simply be made again later.
pub(super) fn later(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;

    /// Places of these lengths, one after the other from `at` on; and how many of them were asked for.
    fn places(
        at: *mut u8,
        lengths: Vec<usize>,
    ) -> (impl Iterator<Item = (*mut u8, usize)> + 'static, Arc<AtomicUsize>) {
        let (asked, mut offset) = (Arc::new(AtomicUsize::new(0)), 0);
        let count = asked.clone();
        let places = lengths.into_iter().map(move |len| {
            count.fetch_add(1, Ordering::Relaxed);
            offset += len;
            (at.wrapping_add(offset - len), len)
        });
        (places, asked)
    }

    #[test]
    fn bytes_keep_their_order_however_they_are_divided_and_places_are_found_as_they_are_needed() {
        let mut sent: Vec<u8> = (0..40_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        let mut received = vec![0u8; sent.len()];
        // Rows of a few bytes, with empty ones; and few places that begin and end elsewhere.
        let mut rows: Vec<usize> = (0..).map(|i| i % 4).take(sent.len() / 2).collect();
        rows.push(sent.len() - rows.iter().sum::<usize>());
        let (from, asked) = places(sent.as_mut_ptr(), rows.clone());
        let (to, _) = places(received.as_mut_ptr(), vec![0, 1, 9_999, 0, 30_000, 0]);
        let (mut from, mut to) = (Spans::new(from), Spans::new(to));
        let (here, there) = UnixStream::pair().unwrap();
        let (mut left, mut done, mut at) = (received.len(), 0, 0);
        while left > 0 {
            // SAFETY: the places are in two vectors that outlive the spans.
            match unsafe { from.send(here.as_raw_fd()) } {
                Ok(bytes) => done += bytes,
                Err(error) => assert!(later(&error), "{error}"),
            }
            let mut ends = 0;
            at = rows.iter().take_while(|row| (ends + **row <= done).then(|| ends += **row).is_some()).count();
            // An empty place is asked for, and left out.
            assert!(asked.load(Ordering::Relaxed) <= at + 2 * AT_ONCE, "{at}");
            // SAFETY: as above.
            match unsafe { to.receive(there.as_raw_fd()) } {
                Ok(bytes) => left -= bytes,
                Err(error) => assert!(later(&error), "{error}"),
            }
        }
        assert_eq!(at, rows.len());
        // SAFETY: as above.
        assert_eq!(unsafe { from.send(here.as_raw_fd()) }.unwrap(), 0, "nothing is left");
        assert!(received == sent);
    }
}
