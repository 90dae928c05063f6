//! Reads through io_uring: with O_DIRECT, or through the page cache.
//!
//! Reads through the page cache go to worker threads of the kernel (`IOSQE_ASYNC`), which wait for the disk and copy.
//! Without the flag, the submitting thread starts one read after the other and makes all copies itself: 1.0 GB/s, where
//! the workers give 2.4.
//!
//! The only way to learn whether a kernel grants io_uring is to ask it. Its version says nothing: containers refuse
//! io_uring by seccomp, administrators by sysctl, and either may begin in the middle of a load. Refused reads go back
//! to the router, as soon as the kernel can no longer write to their memory.

use super::fill::advise;
use super::flight::{quarantine, AfterRead, Flight, Waste};
use super::perform::refuses_direct;
use super::{readable, Outcome, Progress, Read, Source, GRACE};
use crate::error::{Error, ErrorKind, Result};
use crate::fallback::Fallback;
use crate::store::Files;
use crate::wake::Wake;
use io_uring::squeue::Flags;
use io_uring::types::{CancelBuilder, Fd, Fixed};
use io_uring::{opcode, squeue, IoUring};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// Most files in the ring's own table. A read through the table needs no look-up and no reference count in the kernel,
/// and no descriptor of ours.
const MOST_REGISTERED: usize = 1023;
/// `user_data` of entries that are not reads.
const NO_READ: u64 = u64::MAX;
const GETEVENTS: u32 = 1;
const ALL_MODES: [RingMode; 3] = [RingMode::Deferred, RingMode::Cooperative, RingMode::Plain];

/// Reads by io_uring, with O_DIRECT or through the page cache.
///
/// The first `flush` must come from the thread that continues to use it: newer kernels drive a ring from one thread
/// only, and are much faster for it.
pub struct Uring {
    ring: Option<IoUring>,
    mode: RingMode,
    enabled: bool,
    /// Reads through the page cache; `None` where they go past it.
    buffered: Option<Buffered>,
    files: Arc<Files>,
    /// For each file: whether the ring's table holds it; empty if there is no table.
    registered: Vec<bool>,
    tether: Option<OwnedFd>,
    waiting: VecDeque<Flight>,
    /// Reads that the kernel has, by `user_data`.
    flying: Vec<Option<(Flight, Option<Arc<OwnedFd>>)>>,
    free: Vec<usize>,
    /// Pushed to the submission queue but not yet taken by the kernel.
    pushed: usize,
    /// Cancellations among all that were ever pushed.
    cancels: usize,
    over: Vec<Outcome>,
    fallbacks: Vec<Fallback>,
    /// The ring notifies it for completions. (Polling the ring itself does not show completions that it defers:
    /// measured on 6.18.) We notify it for outcomes that need no kernel.
    wake: Wake,
    cancelled: bool,
    process: u32,
    /// The kernel's flag for work that it has put off is never cleared.
    #[cfg(test)]
    flag_stays: bool,
}

/// State of reads through the page cache.
struct Buffered {
    /// Memory for bytes that are not wanted.
    waste: Arc<Waste>,
    /// For each file: whether only the requested bytes may be brought in; empty: for no file.
    exact: Vec<bool>,
}

/// How the kernel runs a ring, newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingMode {
    /// SINGLE_ISSUER | DEFER_TASKRUN (6.1): completions are processed when we ask for them, on our thread.
    Deferred,
    /// COOP_TASKRUN (5.19): no interrupt of our thread for a completion.
    Cooperative,
    /// As in 5.1.
    Plain,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("mode", &self.mode).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

impl Uring {
    /// A ring for `depth` O_DIRECT reads at a time, or the reason why this kernel does not grant one.
    pub fn new(files: Arc<Files>, depth: usize) -> Result<Uring> {
        Self::with_modes(files, depth, &ALL_MODES)
    }

    /// A ring for `depth` reads at a time through the page cache.
    pub fn buffered(files: Arc<Files>, depth: usize) -> Result<Uring> {
        let mut uring = Self::with_modes(files, depth, &ALL_MODES)?;
        uring.buffered = Some(Buffered { waste: Waste::new(), exact: Vec::new() });
        Ok(uring)
    }

    /// From now on nothing is read ahead in the flagged files: only the requested bytes enter the page cache.
    pub(super) fn read_exactly(&mut self, files: &[bool]) {
        if let Some(buffered) = &mut self.buffered {
            buffered.exact = files.to_vec();
        }
    }

    /// Like [`new`](Self::new), in the first of `modes` that this kernel grants.
    pub fn with_modes(files: Arc<Files>, depth: usize, modes: &[RingMode]) -> Result<Uring> {
        let depth = depth.clamp(1, 4096);
        let wake = Wake::new()?;
        let mut fallbacks = Vec::new();
        let mut refused = None;
        for &mode in modes {
            let (ring, tethered) = match set_up(mode, depth, files.len(), &wake) {
                Ok(found) => found,
                Err(e) => {
                    refused = Some(e);
                    continue;
                }
            };
            let (tether, registered) = match tethered {
                Ok((tether, table)) => (Some(tether), vec![false; table]),
                Err(e) => {
                    let reason = format!("io_uring_register: {e}");
                    fallbacks.push(Fallback { from: "io_uring registered files", to: "descriptors", reason });
                    (None, Vec::new())
                }
            };
            return Ok(Uring {
                ring: Some(ring),
                mode,
                enabled: mode != RingMode::Deferred,
                buffered: None,
                files,
                registered,
                tether,
                waiting: VecDeque::new(),
                flying: (0..depth).map(|_| None).collect(),
                free: (0..depth).rev().collect(),
                pushed: 0,
                cancels: 0,
                over: Vec::new(),
                fallbacks,
                wake,
                cancelled: false,
                process: std::process::id(),
                #[cfg(test)]
                flag_stays: false,
            });
        }
        let cause = refused.unwrap_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS));
        Err(Error::io("set up io_uring", &cause))
    }

    /// How the kernel runs this ring.
    pub fn mode(&self) -> RingMode {
        self.mode
    }

    /// Whether the kernel has refused the ring since; every read then comes back refused.
    pub(super) fn is_lost(&self) -> bool {
        self.ring.is_none()
    }

    fn depth(&self) -> usize {
        self.flying.len()
    }

    fn flying(&self) -> usize {
        self.depth() - self.free.len()
    }

    fn give(&mut self, outcome: Outcome) {
        self.over.push(outcome);
        self.wake.notify();
    }

    /// Moves waiting reads to the kernel.
    fn start(&mut self) {
        if let (false, Some(ring)) = (self.enabled, &self.ring) {
            // From here, the ring belongs to this thread.
            if let Err(e) = ring.submitter().register_enable_rings() {
                self.leave(&e);
            }
            self.enabled = true;
        }
        while let Some(flight) = self.waiting.pop_front() {
            let Some(slot) = self.free.last().copied() else {
                self.waiting.push_front(flight);
                break;
            };
            if self.ring.is_none() {
                let cause = io::Error::from_raw_os_error(libc::ENOSYS);
                self.give(Outcome::Refused { read: flight.read, cause });
                continue;
            }
            let (file, workers) = (flight.read.file, flight.read.fresh);
            let (by, fd) = if self.registered.get(file as usize) == Some(&true) {
                (Ok(file), None)
            } else {
                match self.files.open(file, self.buffered.is_none()) {
                    Ok(fd) => {
                        self.advise(file, &fd);
                        (if self.register(file, &fd) { Ok(file) } else { Err(fd.as_raw_fd()) }, Some(fd))
                    }
                    // Entries of reads in flight become free when the reads finish.
                    Err(e) if e.kind() == ErrorKind::Limit && self.flying() > 0 => {
                        self.waiting.push_front(flight);
                        break;
                    }
                    Err(e) if self.buffered.is_none() && refuses_direct(e.errno()) => {
                        let cause = io::Error::from_raw_os_error(e.errno().unwrap_or(libc::EINVAL));
                        self.give(Outcome::Refused { read: flight.read, cause });
                        continue;
                    }
                    Err(e) => {
                        let done = flight.read.done(&self.files, Err(e));
                        self.give(Outcome::Done(done));
                        continue;
                    }
                }
            };
            // Worker threads of the kernel do these reads, on all cores, instead of this one thread in turn: reads
            // through the page cache, and reads into pages that do not exist yet, which the kernel zeroes first.
            let flags = if workers { Flags::ASYNC } else { Flags::empty() };
            if !self.push(&entry(by, &flight, &self.files).flags(flags).user_data(slot as u64)) {
                self.waiting.push_front(flight);
                break;
            }
            self.free.pop();
            self.flying[slot] = Some((flight, fd));
        }
        self.enter();
    }

    /// Tells the kernel to read nothing ahead in a file where that is not wanted. It is advice.
    fn advise(&self, file: u32, fd: &OwnedFd) {
        if self.buffered.as_ref().is_some_and(|b| b.exact.get(file as usize) == Some(&true)) {
            advise(fd, libc::POSIX_FADV_RANDOM);
        }
    }

    fn push(&mut self, entry: &squeue::Entry) -> bool {
        let Some(ring) = &mut self.ring else { return false };
        // SAFETY: the memory that a read names is kept valid by its flight, which stays in `flying` (and is leaked, not
        // dropped, where the kernel might still use it) until its completion is seen: invariant 5.
        let pushed = unsafe { ring.submission().push(entry) }.is_ok();
        self.pushed += usize::from(pushed);
        pushed
    }

    /// Puts a file into the ring's table; false if there is no table.
    fn register(&mut self, file: u32, fd: &OwnedFd) -> bool {
        let (Some(known), Some(ring)) = (self.registered.get_mut(file as usize), &self.ring) else { return false };
        match ring.submitter().register_files_update(file, &[fd.as_raw_fd()]) {
            Ok(_) => {
                *known = true;
                true
            }
            Err(e) => {
                self.registered.clear();
                let reason = format!("io_uring_register: {e}");
                self.fallbacks.push(Fallback { from: "io_uring registered files", to: "descriptors", reason });
                false
            }
        }
    }

    /// One system call for all pushed entries.
    fn enter(&mut self) {
        while self.pushed > 0 {
            let Some(ring) = &self.ring else { return };
            match ring.submit() {
                Ok(taken) => {
                    self.pushed -= taken.min(self.pushed);
                    if taken == 0 {
                        return;
                    }
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The kernel is short of memory or of room for completions. Continues when reads in flight have
                    // finished.
                    Some(libc::EAGAIN | libc::EBUSY) if self.flying() > self.pushed => return,
                    _ => return self.leave(&e),
                },
            }
        }
    }

    /// Whether the kernel says that it has put off work until the ring is entered.
    ///
    /// It says so too late at times: a worker thread of the kernel puts the work on a list and sets the flag after that
    /// (`io_req_local_work_add`). If this thread has done the work in between, the flag stays, and entering the ring does
    /// not clear it as long as the list is empty (seen on 6.18).
    fn has_deferred(&mut self) -> bool {
        #[cfg(test)]
        if self.flag_stays {
            return true;
        }
        self.ring.as_mut().is_some_and(|ring| ring.submission().taskrun())
    }

    /// Collects completions and clears `wake`.
    fn reap(&mut self) {
        let mut last = false;
        loop {
            let deferred = self.mode != RingMode::Plain && self.enabled && self.has_deferred();
            let Some(ring) = &mut self.ring else { return self.wake.clear() };
            if deferred {
                // SAFETY: no argument is passed. Only lets the kernel run what it has put off.
                let entered = unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, GETEVENTS, None) };
                match entered {
                    Ok(_) => {}
                    Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                    Err(e) => return self.leave(&e),
                }
            }
            let answers: Vec<(u64, i32)> = ring.completion().map(|c| (c.user_data(), c.result())).collect();
            // The ring notifies `wake` when it defers work and again when that work is done. What comes after this
            // point shows in the ring before the ring notifies. So one more look makes sure that nothing waits without
            // a notification. If the look before brought nothing, the flag may be one that stays. Then the last look has
            // come after `wake` was cleared, and it is not cleared again: what came since has notified it.
            if !last {
                self.wake.clear();
            }
            let more = !last && (!ring.completion().is_empty() || self.has_deferred());
            last = answers.is_empty();
            for (slot, answer) in answers {
                let Some((mut flight, _fd)) = self.flying.get_mut(slot as usize).and_then(Option::take) else {
                    continue;
                };
                self.free.push(slot as usize);
                if answer == -libc::ECANCELED && flight.read.fresh && !self.cancelled {
                    // No worker thread could be started (RLIMIT_NPROC, the pids limit of a cgroup). This thread does
                    // the work.
                    flight.read.fresh = false;
                    self.waiting.push_back(flight);
                    continue;
                }
                if answer == -libc::ECANCELED && self.buffered.is_some() && !self.cancelled {
                    // This kernel does not read this file through the page cache without such a thread.
                    let cause = io::Error::from_raw_os_error(libc::ECANCELED);
                    self.over.push(Outcome::Refused { read: flight.read, cause });
                    continue;
                }
                match flight.answer(i64::from(answer), &self.files) {
                    AfterRead::Again(flight) if self.cancelled => {
                        self.over.push(Outcome::Done(flight.read.cancelled(&self.files)));
                    }
                    AfterRead::Again(flight) => self.waiting.push_back(flight),
                    AfterRead::Over(outcome) => self.over.push(outcome),
                }
            }
            if !more {
                return;
            }
        }
    }

    /// Gives up the ring, because the kernel refuses it now, and hands back the unfinished reads.
    fn leave(&mut self, cause: &io::Error) {
        let Some(mut ring) = self.ring.take() else { return };
        let again = || io::Error::from_raw_os_error(cause.raw_os_error().unwrap_or(libc::ENOSYS));
        // A cancellation is not a read. It must not be taken for a read that the kernel still has.
        let unsent = self.pushed.saturating_sub(self.cancels);
        let mut completed: Vec<u64> = Vec::new();
        let until = Instant::now() + GRACE;
        loop {
            completed.extend(ring.completion().map(|c| c.user_data()).filter(|&slot| slot != NO_READ));
            let left = until.saturating_duration_since(Instant::now());
            // A ring that defers shows no completion without being entered. Entries that were pushed but not taken have
            // no completion.
            if self.mode == RingMode::Deferred || completed.len() + unsent >= self.flying() || left.is_zero() {
                break;
            }
            readable(ring.as_raw_fd(), left);
        }
        let safe = self.close(ring) || completed.len() + unsent >= self.flying();
        for slot in 0..self.depth() {
            let Some((mut flight, fd)) = self.flying[slot].take() else { continue };
            self.free.push(slot);
            if safe || completed.contains(&(slot as u64)) {
                // What it answered is not known any more, if it did.
                flight.may_have_written(&self.files);
                self.over.push(Outcome::Refused { read: flight.read, cause: again() });
            } else {
                let error = Error::io("go on reading with io_uring", cause);
                self.over.push(flight.set_apart(fd, error, &self.files));
            }
        }
        for flight in std::mem::take(&mut self.waiting) {
            self.over.push(Outcome::Refused { read: flight.read, cause: again() });
        }
        self.pushed = 0;
        self.wake.notify();
    }

    /// Closes the ring; true when the kernel has released everything that was submitted to it.
    fn close(&mut self, ring: IoUring) -> bool {
        drop(ring);
        match &self.tether {
            // The pipe hangs up when the kernel frees the ring, which it does after the last read.
            Some(tether) => readable(tether.as_raw_fd(), GRACE),
            None => false,
        }
    }
}

/// The submission of a flight's next system call: of the file at this place of the ring's table, or of a descriptor.
fn entry(file: std::result::Result<u32, RawFd>, flight: &Flight, files: &Files) -> squeue::Entry {
    let (address, len, offset) = flight.call(files);
    match (flight.scattered(files), file) {
        (Some((places, n)), Ok(file)) => opcode::Readv::new(Fixed(file), places, n).offset(offset).build(),
        (Some((places, n)), Err(fd)) => opcode::Readv::new(Fd(fd), places, n).offset(offset).build(),
        (None, Ok(file)) => opcode::Read::new(Fixed(file), address, len).offset(offset).build(),
        (None, Err(fd)) => opcode::Read::new(Fd(fd), address, len).offset(offset).build(),
    }
}

/// A ring in this mode, with the [`tether`] and the number of files in its table, or why it has none.
fn set_up(
    mode: RingMode,
    depth: usize,
    files: usize,
    wake: &Wake,
) -> io::Result<(IoUring, io::Result<(OwnedFd, usize)>)> {
    let ring = build(mode, depth as u32)?;
    let table = if files <= MOST_REGISTERED { files } else { 0 };
    // The table counts against RLIMIT_NOFILE.
    let tethered = tether(&ring, table).map(|t| (t, table)).or_else(|_| tether(&ring, 0).map(|t| (t, 0)));
    // Without the pipe, a ring that defers its completions could not be left safely.
    let tethered = if mode == RingMode::Deferred { Ok(tethered?) } else { tethered };
    ring.submitter().register_eventfd(wake.fd())?;
    Ok((ring, tethered))
}

fn build(mode: RingMode, depth: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    match mode {
        RingMode::Deferred => {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_r_disabled()
        }
        RingMode::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag(),
        RingMode::Plain => &mut builder,
    };
    // One more entry, for the cancellation.
    builder.build((depth + 1).next_power_of_two())
}

/// Gives the ring a table with `files` empty places and one place for the writing end of a pipe; returns the reading
/// end. The kernel closes the writing end when it frees the ring. There is no other way to learn that a ring which must
/// not be entered any more has finished its reads.
fn tether(ring: &IoUring, files: usize) -> io::Result<OwnedFd> {
    let mut ends = [0; 2];
    // SAFETY: two descriptors are written to `ends`, and are ours.
    let (reading, writing) = unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
            return Err(io::Error::last_os_error());
        }
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    };
    // -1 is an empty place (5.5).
    let mut table = vec![-1; files];
    table.push(writing.as_raw_fd());
    ring.submitter().register_files(&table)?;
    Ok(reading)
}

impl Source for Uring {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if self.in_flight() >= self.depth() {
            return Err(read);
        }
        let flight = match &self.buffered {
            // `fresh` means that workers do it, as long as there are workers.
            Some(buffered) => Flight::buffered(Read { fresh: true, ..read }, &buffered.waste, &self.files),
            None => Flight::direct(read, &self.files),
        };
        match flight {
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
        self.cancelled = true;
        for flight in std::mem::take(&mut self.waiting) {
            let done = flight.read.cancelled(&self.files);
            self.give(Outcome::Done(done));
        }
        if self.flying() > 0 && self.enabled {
            // Gives up the reads that wait in the kernel's own queues. The device finishes those that it works on.
            // (Before 5.19 the kernel answers EINVAL and finishes all.)
            let all = opcode::AsyncCancel2::new(CancelBuilder::any()).build().user_data(NO_READ);
            self.cancels += usize::from(self.push(&all));
            self.enter();
        }
    }

    fn wake(&self) -> RawFd {
        self.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.flying() + self.over.len()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        std::mem::take(&mut self.fallbacks)
    }
}

impl Uring {
    pub(super) fn drain(&mut self, out: &mut Vec<Outcome>) {
        self.reap();
        if self.pushed > 0 || (self.enabled && !self.waiting.is_empty()) {
            self.start();
        }
        // Outcomes that arrived since have notified `wake` once more. That is one wake-up for nothing, in rare cases.
        out.append(&mut self.over);
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A forked child: the ring and its reads are the parent's.
            std::mem::forget(self.ring.take());
            std::mem::forget(std::mem::take(&mut self.flying));
            return;
        }
        self.waiting.clear();
        self.cancel();
        let until = Instant::now() + GRACE;
        while self.flying() > 0 && self.ring.is_some() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            readable(self.wake.fd(), left);
            self.reap();
            self.waiting.clear();
            self.over.clear();
        }
        let Some(ring) = self.ring.take() else { return };
        if self.flying() == 0 {
            return;
        }
        if !self.close(ring) {
            quarantine(std::mem::take(&mut self.flying));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extent::{Lane, Ticket};
    use crate::source::Destination;

    /// A hang would be one of the load, with a core busy: seen once in some hundred runs of a test of changing files.
    #[test]
    fn a_flag_for_deferred_work_that_stays_set_holds_nothing_up() {
        const READS: u64 = 6;
        const NBYTES: usize = 64 << 10;
        let file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..READS as usize * NBYTES).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &content).unwrap();
        for mode in [RingMode::Deferred, RingMode::Cooperative] {
            let files = Arc::new(Files::from_paths(&[file.path()]).unwrap());
            // A machine without io_uring, or without this mode
            let Ok(mut uring) = Uring::with_modes(files, 2, &[mode]) else { continue };
            uring.buffered = Some(Buffered { waste: Waste::new(), exact: Vec::new() });
            uring.flag_stays = true;
            let mut memory: Vec<Box<[u8; NBYTES]>> = (0..READS).map(|_| Box::new([0; NBYTES])).collect();
            let (mut next, mut done) = (0, Vec::new());
            while done.len() < READS as usize {
                while next < READS {
                    let read = Read {
                        ticket: Ticket(next),
                        file: 0,
                        offset: next * NBYTES as u64,
                        len: NBYTES as u64,
                        need: NBYTES as u64,
                        lane: Lane::BUFFERED,
                        into: Destination::Memory(memory[next as usize].as_mut_ptr()),
                        fresh: true,
                        written: 0,
                        keep: Arc::new(()),
                    };
                    if uring.submit(read).is_err() {
                        break;
                    }
                    next += 1;
                }
                uring.flush().unwrap();
                let before = done.len();
                uring.poll(&mut done).unwrap();
                if done.len() == before {
                    assert!(readable(uring.wake(), std::time::Duration::from_secs(30)), "nobody was woken");
                }
            }
            let well = |event: &Progress| matches!(event, Progress::Done(done) if done.result.is_ok());
            assert!(done.iter().all(well), "{done:?}");
            assert_eq!(memory.iter().flat_map(|part| part.iter().copied()).collect::<Vec<_>>(), content);
        }
    }
}
