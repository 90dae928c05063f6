//! O_DIRECT through Linux AIO (io_submit), by raw system calls: containers that refuse io_uring still grant it.
//!
//! It is asynchronous only with O_DIRECT, and it is used only for that.

use super::flight::{quarantine, AfterRead, Flight};
use super::threads::refuses_direct;
use super::{readable, Outcome, Progress, Read, Source, GRACE};
use crate::error::{Error, ErrorKind, Result};
use crate::store::Files;
use crate::wake::Wake;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// `struct iocb` and `struct io_event` of include/uapi/linux/aio_abi.h, for little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct IoEvent {
    data: u64,
    obj: u64,
    res: i64,
    res2: i64,
}

const _: () = assert!(std::mem::size_of::<Iocb>() == 64 && cfg!(target_endian = "little"));

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// Reads by Linux AIO with O_DIRECT.
pub struct Aio {
    /// 0 when it has been given up.
    context: libc::c_ulong,
    files: Arc<Files>,
    waiting: VecDeque<Flight>,
    flying: Vec<Option<(Flight, Arc<OwnedFd>)>>,
    free: Vec<usize>,
    over: Vec<Outcome>,
    /// The kernel adds one for each completion, we add one for each outcome that needs no kernel.
    wake: Wake,
    /// Completions not counted by `wake` yet.
    uncounted: i64,
    process: u32,
    /// No read is sent again.
    cancelled: bool,
}

impl std::fmt::Debug for Aio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aio").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// The context of the last load, if that load ended without an error, with its depth and process. One is kept, because
/// io_destroy takes 35 ms (measured: it waits for an RCU grace period).
static IDLE: Mutex<Option<(libc::c_ulong, usize, u32)>> = Mutex::new(None);

/// A context for `depth` reads.
fn context(depth: usize) -> Result<libc::c_ulong> {
    // `try_lock`, because in a forked child a thread that the child does not have may hold the lock forever.
    if let Ok(mut idle) = IDLE.try_lock() {
        if let Some((context, _, _)) = idle.take_if(|c| c.1 >= depth && c.2 == std::process::id()) {
            return Ok(context);
        }
    }
    let mut context: libc::c_ulong = 0;
    // SAFETY: writes one context id.
    match unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) } {
        0 => Ok(context),
        _ => Err(Error::io("set up Linux AIO", &io::Error::last_os_error())),
    }
}

impl Aio {
    /// A queue of `depth` reads, or the reason why this kernel does not grant one.
    pub fn new(files: Arc<Files>, depth: usize) -> Result<Aio> {
        let depth = depth.clamp(1, 4096);
        let wake = Wake::new()?;
        let context = context(depth)?;
        Ok(Aio {
            context,
            files,
            waiting: VecDeque::new(),
            flying: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            over: Vec::new(),
            wake,
            uncounted: 0,
            cancelled: false,
            process: std::process::id(),
        })
    }

    /// Whether the kernel has refused it since; every read then comes back refused.
    pub(super) fn is_lost(&self) -> bool {
        self.context == 0
    }

    fn depth(&self) -> usize {
        self.flying.len()
    }

    fn flying(&self) -> usize {
        self.depth() - self.free.len()
    }

    fn give(&mut self, outcome: Outcome) {
        self.over.push(outcome);
        self.uncounted += 1;
        self.wake.notify();
    }

    fn start(&mut self) {
        let mut calls: Vec<Iocb> = Vec::new();
        while let Some(flight) = self.waiting.pop_front() {
            let Some(slot) = self.free.last().copied() else {
                self.waiting.push_front(flight);
                break;
            };
            if self.is_lost() {
                let cause = io::Error::from_raw_os_error(libc::ENOSYS);
                self.give(Outcome::Refused { read: flight.read, cause });
                continue;
            }
            let fd = match self.files.open(flight.read.file, true) {
                Ok(fd) => fd,
                // Entries of reads in flight become free when the reads finish.
                Err(e) if e.kind() == ErrorKind::Limit && self.flying() > 0 => {
                    self.waiting.push_front(flight);
                    break;
                }
                Err(e) if refuses_direct(e.errno()) => {
                    let cause = io::Error::from_raw_os_error(e.errno().unwrap_or(libc::EINVAL));
                    self.give(Outcome::Refused { read: flight.read, cause });
                    continue;
                }
                Err(e) => {
                    let done = flight.read.done(&self.files, Err(e));
                    self.give(Outcome::Done(done));
                    continue;
                }
            };
            let (address, len, offset) = flight.call(&self.files);
            calls.push(Iocb {
                data: slot as u64,
                opcode: IOCB_CMD_PREAD,
                fd: fd.as_raw_fd() as u32,
                buf: address as u64,
                nbytes: u64::from(len),
                offset: offset as i64,
                flags: IOCB_FLAG_RESFD,
                resfd: self.wake.fd() as u32,
                ..Iocb::default()
            });
            self.free.pop();
            self.flying[slot] = Some((flight, fd));
        }
        self.hand_over(&mut calls);
    }

    /// One system call for many reads. It is repeated if the kernel takes only the first few.
    fn hand_over(&mut self, calls: &mut [Iocb]) {
        let mut taken = 0;
        while taken < calls.len() {
            let list: Vec<*mut Iocb> = calls[taken..].iter_mut().map(|c| c as *mut Iocb).collect();
            // SAFETY: the kernel copies the calls before this returns. The memory that they name is kept valid by the
            // flights, which stay in `flying` (and are leaked, not dropped, where the kernel might still use it) until
            // their completion is seen: invariant 5.
            let n = unsafe { libc::syscall(libc::SYS_io_submit, self.context, list.len(), list.as_ptr()) };
            if n > 0 {
                taken += n as usize;
                self.uncounted += n;
                continue;
            }
            let e = io::Error::last_os_error();
            let slot = calls[taken].data as usize;
            match e.raw_os_error() {
                Some(libc::EINTR) => continue,
                // Continues when reads in flight have finished.
                Some(libc::EAGAIN) if self.flying() > calls.len() - taken => {
                    for call in calls[taken..].iter().rev() {
                        if let Some((flight, _)) = self.take(call.data as usize) {
                            self.waiting.push_front(flight);
                        }
                    }
                    return;
                }
                // The kernel refuses the first of them.
                Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EBADF) => {
                    if let Some((flight, _)) = self.take(slot) {
                        self.give(Outcome::Refused { read: flight.read, cause: e });
                    }
                    taken += 1;
                }
                _ => {
                    for call in &calls[taken..] {
                        if let Some((flight, _)) = self.take(call.data as usize) {
                            self.waiting.push_back(flight);
                        }
                    }
                    return self.leave(&e);
                }
            }
        }
    }

    fn take(&mut self, slot: usize) -> Option<(Flight, Arc<OwnedFd>)> {
        let flight = self.flying.get_mut(slot).and_then(Option::take)?;
        self.free.push(slot);
        Some(flight)
    }

    /// Resets `wake` and adds its count.
    fn count(&mut self) {
        let mut n = 0u64;
        // SAFETY: eight bytes are read into `n`.
        if unsafe { libc::read(self.wake.fd(), (&raw mut n).cast(), 8) } == 8 {
            self.uncounted -= n as i64;
        }
    }

    fn reap(&mut self) {
        if self.flying() == 0 || self.is_lost() {
            return;
        }
        let mut events = [IoEvent::default(); 64];
        loop {
            let mut none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            let at = events.as_mut_ptr();
            // SAFETY: at most 64 events are written to the 64 of `events`.
            let n = unsafe { libc::syscall(libc::SYS_io_getevents, self.context, 0, events.len(), at, &raw mut none) };
            if n < 0 {
                let e = io::Error::last_os_error();
                if e.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return self.leave(&e);
            }
            for event in &events[..n as usize] {
                let Some((flight, _fd)) = self.take(event.data as usize) else { continue };
                match flight.answer(event.res, &self.files) {
                    AfterRead::Again(flight) if self.cancelled => {
                        self.over.push(Outcome::Done(flight.read.cancelled(&self.files)));
                    }
                    AfterRead::Again(flight) => self.waiting.push_back(flight),
                    AfterRead::Over(outcome) => self.over.push(outcome),
                }
            }
            if (n as usize) < events.len() {
                return;
            }
        }
    }

    /// Waits until the kernel has finished everything that was submitted. `wake` counts the completions, even if we may
    /// no longer collect them.
    fn settle(&mut self) -> bool {
        let until = Instant::now() + GRACE;
        while self.uncounted > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !readable(self.wake.fd(), left) {
                return false;
            }
            self.count();
        }
        true
    }

    /// Gives it up, because the kernel refuses it now, and hands back the unfinished reads.
    fn leave(&mut self, cause: &io::Error) {
        let again = || io::Error::from_raw_os_error(cause.raw_os_error().unwrap_or(libc::ENOSYS));
        let settled = self.settle();
        for slot in 0..self.depth() {
            let Some((flight, fd)) = self.take(slot) else { continue };
            if settled {
                self.over.push(Outcome::Refused { read: flight.read, cause: again() });
            } else {
                let error = Error::io("go on reading with Linux AIO", cause);
                self.over.push(flight.set_apart(fd, error, &self.files));
            }
        }
        for flight in std::mem::take(&mut self.waiting) {
            self.over.push(Outcome::Refused { read: flight.read, cause: again() });
        }
        if settled {
            self.destroy();
        }
        self.context = 0;
        self.uncounted += 1;
        self.wake.notify();
    }

    fn destroy(&mut self) {
        if self.context != 0 {
            // SAFETY: nothing is in flight, so this does not block. (It would, without end, on a read that hangs.)
            unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
            self.context = 0;
        }
    }

    pub(super) fn drain(&mut self, out: &mut Vec<Outcome>) {
        // Before the completions are collected: a completion that arrives in between makes it readable again.
        self.count();
        self.reap();
        if !self.waiting.is_empty() {
            self.start();
        }
        out.append(&mut self.over);
    }
}

impl Source for Aio {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if self.in_flight() >= self.depth() {
            return Err(read);
        }
        match Flight::direct(read, &self.files) {
            Ok(flight) => self.waiting.push_back(flight),
            Err(outcome) => self.give(outcome),
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.start();
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let mut out = Vec::new();
        self.drain(&mut out);
        events.extend(out.into_iter().map(|o| Progress::Done(o.into_done(&self.files))));
        Ok(())
    }

    fn cancel(&mut self) {
        // No file system can cancel a submitted read (io_cancel answers EINVAL). The read finishes.
        self.cancelled = true;
        for flight in std::mem::take(&mut self.waiting) {
            let done = flight.read.cancelled(&self.files);
            self.give(Outcome::Done(done));
        }
    }

    fn wake(&self) -> RawFd {
        self.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.flying() + self.over.len()
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A forked child: a context is not inherited, and its reads are the parent's.
            std::mem::forget(std::mem::take(&mut self.flying));
            return;
        }
        if self.settle() {
            self.waiting.clear();
            self.reap();
            if self.flying() == 0 && !self.is_lost() {
                if let Ok(mut idle) = IDLE.try_lock() {
                    let kept = idle.replace((self.context, self.depth(), self.process));
                    self.context = kept.filter(|c| c.2 == self.process).map_or(0, |c| c.0);
                }
            }
            return self.destroy();
        }
        quarantine(std::mem::take(&mut self.flying));
    }
}
