//! A read in flight through an asynchronous interface: which part of it remains, and what an answer of the kernel
//! means.

use super::perform::refuses_direct;
use super::{no_place, no_rows, Destination, Outcome, Read, QUARANTINED};
use crate::error::{Error, ErrorKind};
use crate::options::PAGE;
use crate::store::Files;
use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// How often EAGAIN is answered with another try: the kernel was short of some resource for a moment.
const MOST_TRIES: u32 = 64;
/// The kernel takes no more places than this in one call (`IOV_MAX`).
const MOST_PLACES: usize = 1024;

/// A read and the bytes of it that have arrived.
pub(super) struct Flight {
    pub(super) read: Read,
    at: *mut u8,
    /// A scattered read: the places that are not full yet, and where the bytes go that are not wanted.
    places: Option<(Vec<libc::iovec>, Arc<Waste>)>,
    /// The read uses O_DIRECT, which can continue only at a page.
    direct: bool,
    got: u64,
    tries: u32,
}

// SAFETY: like the `Read` it holds: the addresses are only handed to the kernel while `keep` keeps them valid.
unsafe impl Send for Flight {}

/// Memory for bytes that are not wanted. Several reads may write to it at once, and nothing reads it.
pub(super) struct Waste(Box<[UnsafeCell<u8>]>);

// SAFETY: only the kernel writes to it, and what it writes is never looked at.
unsafe impl Sync for Waste {}
// SAFETY: plain bytes.
unsafe impl Send for Waste {}

impl Waste {
    /// It stays in the processor's cache. A longer gap takes it several times.
    const LEN: usize = 64 << 10;

    pub(super) fn new() -> Arc<Waste> {
        Arc::new(Waste((0..Self::LEN).map(|_| UnsafeCell::new(0)).collect()))
    }
}

/// The next state of a flight.
pub(super) enum AfterRead {
    Again(Flight),
    Over(Outcome),
}

/// Leaves reads that hang behind for good, with the memory to which the kernel may still write.
pub(super) fn quarantine<T>(hung: Vec<Option<T>>) {
    QUARANTINED.fetch_add(hung.iter().flatten().count(), Ordering::Relaxed);
    std::mem::forget(hung);
}

impl Flight {
    /// A read past the page cache.
    pub(super) fn direct(read: Read, files: &Files) -> Result<Flight, Outcome> {
        match read.into {
            Destination::Memory(at) => Ok(Flight { read, at, places: None, direct: true, got: 0, tries: 0 }),
            _ => {
                let e = Error::new(ErrorKind::Internal, "a direct read needs one piece of memory");
                Err(Outcome::Done(read.done(files, Err(e))))
            }
        }
    }

    /// A read through the page cache.
    pub(super) fn buffered(read: Read, waste: &Arc<Waste>, files: &Files) -> Result<Flight, Outcome> {
        let (at, places) = match &read.into {
            Destination::Memory(at) => (*at, None),
            Destination::Scatter(to) => (std::ptr::null_mut(), Some((aimed(to, waste), waste.clone()))),
            Destination::Mapping { .. } => {
                let e = Error::new(ErrorKind::Internal, "a mapping is populated, not read into");
                return Err(Outcome::Done(read.done(files, Err(e))));
            }
            Destination::Rows { .. } => return Err(Outcome::Done(read.done(files, Err(no_rows())))),
            Destination::OnArrival => return Err(Outcome::Done(read.done(files, Err(no_place())))),
        };
        Ok(Flight { read, at, places, direct: false, got: 0, tries: 0 })
    }

    /// Its outcome if the kernel, which can no longer be asked, may write to its memory at any later time. That memory
    /// and `held` are never released.
    pub(super) fn set_apart<T>(self, held: T, error: Error, files: &Files) -> Outcome {
        quarantine(vec![Some((self.read.keep.clone(), held, self.places))]);
        let read = Read { written: self.read.len, ..self.read };
        Outcome::Done(read.done(files, Err(error)))
    }

    /// Address, bytes and file offset of the next system call, if it uses one piece of memory.
    pub(super) fn call(&self, files: &Files) -> (*mut u8, u32, u64) {
        let (most, offset) = (files.most_per_call(), self.read.offset + self.got);
        match self.places.as_ref().and_then(|(places, _)| places.first()) {
            Some(first) => (first.iov_base.cast(), (first.iov_len as u64).min(most) as u32, offset),
            None => {
                let len = (self.read.len - self.got).min(most);
                // SAFETY: `got` is below `len`, so this stays within the read's memory.
                (unsafe { self.at.add(self.got as usize) }, len as u32, offset)
            }
        }
    }

    /// The places of the next system call and their number, if there are several. They do not move until the call was
    /// answered.
    pub(super) fn scattered(&self, files: &Files) -> Option<(*const libc::iovec, u32)> {
        let (places, _) = self.places.as_ref()?;
        let mut left = files.most_per_call();
        let fit = places.iter().take(MOST_PLACES).take_while(|place| {
            let fits = place.iov_len as u64 <= left;
            left = left.saturating_sub(place.iov_len as u64);
            fits
        });
        match fit.count() {
            0 | 1 => None,
            count => Some((places.as_ptr(), count as u32)),
        }
    }

    /// The call may have written all that it was to bring, and nobody will say so.
    pub(super) fn may_have_written(&mut self, files: &Files) {
        let asked = match (&self.places, self.scattered(files)) {
            (Some((places, _)), Some((_, n))) => places[..n as usize].iter().map(|place| place.iov_len as u64).sum(),
            _ => u64::from(self.call(files).1),
        };
        self.read.written = self.read.written.max(self.got + asked);
    }

    /// Removes the next `got` bytes from the places of a scattered read.
    fn filled(&mut self, got: u64) {
        let Some((places, _)) = &mut self.places else { return };
        let mut left = got as usize;
        let full = places.iter().take_while(|place| {
            let full = place.iov_len <= left;
            left -= if full { place.iov_len } else { 0 };
            full
        });
        let full = full.count();
        places.drain(..full);
        if let Some(first) = places.first_mut() {
            // SAFETY: `left` is below the length of the place.
            first.iov_base = unsafe { first.iov_base.cast::<u8>().add(left) }.cast();
            first.iov_len -= left;
        }
    }

    /// Judges the kernel's answer to [`call`](Self::call): bytes, or a negative errno.
    pub(super) fn answer(mut self, answer: i64, files: &Files) -> AfterRead {
        let over = |read: Read, result| AfterRead::Over(Outcome::Done(read.done(files, result)));
        if answer < 0 {
            let cause = io::Error::from_raw_os_error(-answer as i32);
            return match cause.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) if self.tries < MOST_TRIES => {
                    self.tries += 1;
                    AfterRead::Again(self)
                }
                Some(libc::ECANCELED) => AfterRead::Over(Outcome::Done(self.read.cancelled(files))),
                errno if refuses_direct(errno) => AfterRead::Over(Outcome::Refused { read: self.read, cause }),
                _ => {
                    if self.direct || !files.errors_write_nothing(self.read.file) {
                        self.may_have_written(files);
                    }
                    over(self.read, Err(Error::io("read", &cause)))
                }
            };
        }
        let before = self.got;
        self.got += answer as u64;
        self.read.written = self.read.written.max(self.got);
        self.filled(answer as u64);
        let ended = answer == 0 || self.read.offset + self.got >= files.size(self.read.file);
        if ended || self.got >= self.read.need {
            let result = self.read.ended(self.got);
            return over(self.read, result);
        }
        // A short read. If it stops at an odd byte, it continues at the page before: O_DIRECT cannot start in between.
        // If that brings nothing new (the file shrank), the kernel says at the odd byte itself whether that is the end.
        let whole = self.got / PAGE * PAGE;
        if self.direct && whole > before {
            self.got = whole;
        }
        AfterRead::Again(self)
    }
}

/// The places of a scattered read. Bytes that are not wanted go to the waste memory.
fn aimed(to: &[(*mut u8, usize)], waste: &Waste) -> Vec<libc::iovec> {
    let mut places = Vec::with_capacity(to.len());
    for &(at, mut len) in to {
        if !at.is_null() && len > 0 {
            places.push(libc::iovec { iov_base: at.cast(), iov_len: len });
        } else {
            while len > 0 {
                let step = len.min(Waste::LEN);
                places.push(libc::iovec { iov_base: waste.0.as_ptr().cast_mut().cast(), iov_len: step });
                len -= step;
            }
        }
    }
    places
}
