//! A read on its way through an asynchronous interface: what is left of it, and what an answer of the kernel means.

use super::file::Files;
use super::threads::refuses_direct;
use super::{Destination, Outcome, Read, QUARANTINED};
use crate::error::{Error, ErrorKind};
use crate::options::PAGE;
use std::io;
use std::sync::atomic::Ordering;

/// Times that EAGAIN is answered with another try: the kernel was short of something for a moment.
const MOST_TRIES: u32 = 64;

/// An O_DIRECT read and the bytes of it that have arrived.
pub(super) struct Flight {
    pub(super) read: Read,
    at: *mut u8,
    got: u64,
    tries: u32,
}

// SAFETY: like the `Read` it holds: the address is only handed to the kernel while `keep` keeps it valid.
unsafe impl Send for Flight {}

/// What comes next for a flight.
pub(super) enum Next {
    Again(Flight),
    Over(Outcome),
}

/// Leaves reads that hang to themselves for good, with the memory that the kernel may still write to.
pub(super) fn quarantine<T>(hung: Vec<Option<T>>) {
    QUARANTINED.fetch_add(hung.iter().flatten().count(), Ordering::Relaxed);
    std::mem::forget(hung);
}

impl Flight {
    pub(super) fn new(read: Read, files: &Files) -> Result<Flight, Outcome> {
        match read.into {
            Destination::Memory(at) => Ok(Flight { read, at, got: 0, tries: 0 }),
            _ => {
                let e = Error::new(ErrorKind::Internal, "a direct read needs one piece of memory");
                Err(Outcome::Done(read.done(files, Err(e))))
            }
        }
    }

    /// Its outcome where the kernel, which cannot be asked any more, may write to its memory at any later time: that
    /// memory and `held` are never let go of.
    pub(super) fn set_apart<T>(self, held: T, error: Error, files: &Files) -> Outcome {
        quarantine(vec![Some((self.read.keep.clone(), held))]);
        Outcome::Done(self.read.done(files, Err(error)))
    }

    /// Address, bytes and file offset of the next system call.
    pub(super) fn call(&self, files: &Files) -> (*mut u8, u32, u64) {
        let len = (self.read.len - self.got).min(files.most_per_call());
        // SAFETY: `got` is below `len`, so this stays within the read's memory.
        (unsafe { self.at.add(self.got as usize) }, len as u32, self.read.offset + self.got)
    }

    /// What the kernel's answer to [`call`](Self::call) means: bytes, or a negative errno.
    pub(super) fn answer(mut self, answer: i64, files: &Files) -> Next {
        let over = |read: Read, result| Next::Over(Outcome::Done(read.done(files, result)));
        if answer < 0 {
            let cause = io::Error::from_raw_os_error(-answer as i32);
            return match cause.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) if self.tries < MOST_TRIES => {
                    self.tries += 1;
                    Next::Again(self)
                }
                Some(libc::ECANCELED) => Next::Over(Outcome::Done(self.read.cancelled(files))),
                errno if refuses_direct(errno) => Next::Over(Outcome::Refused { read: self.read, cause }),
                _ => over(self.read, Err(Error::io("read", &cause))),
            };
        }
        let before = self.got;
        self.got += answer as u64;
        let ended = answer == 0 || self.read.offset + self.got >= files.size(self.read.file);
        if ended || self.got >= self.read.need {
            let result = self.read.ended(self.got);
            return over(self.read, result);
        }
        // A short read. What stops at an odd byte goes on at the page before: O_DIRECT cannot start in between. Where that
        // brings nothing new (the file shrank), the kernel says at the odd byte itself whether that is the end.
        let whole = self.got / PAGE * PAGE;
        if whole > before {
            self.got = whole;
        }
        Next::Again(self)
    }
}
