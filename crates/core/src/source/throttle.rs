//! A source that is made slower or made to fail, to test the rest. For tests only: no option leads here.

use super::{epoll, watch, Destination, Done, Progress, Read, Source, Touches};
use crate::error::{Error, Result};
use crate::extent::Fence;
use crate::fallback::Fallback;
use crate::memory::Keep;
use crate::store::Objects;
use crate::timer::Timer;
use crate::wake::Wake;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The changes to a source. `Default` changes nothing.
#[derive(Debug, Clone, Default)]
pub struct Throttling {
    /// Most bytes per second of each storage device ([`Facts::storage`](super::Facts::storage)). A read occupies its
    /// device from its submission on, after the reads submitted before it, independently of when its bytes really
    /// arrive. So the machine's own time for a read is hidden behind the rate, as long as the machine keeps up.
    pub rate: Option<u64>,
    /// Other rates, by the number of the storage device.
    pub rates: HashMap<u64, u64>,
    /// Every read takes this much longer.
    pub latency: Duration,
    /// Read number n (from 0, in order of submission) fails with this errno and is not performed.
    pub fail: Option<(u64, i32)>,
    /// Reads from number n on do not come back before [`Release::release`].
    pub hang: Option<u64>,
}

/// Another source, throttled.
pub struct Throttle {
    inner: Box<dyn Source>,
    files: Arc<dyn Objects>,
    how: Throttling,
    submitted: u64,
    /// Until when each storage device is busy with earlier bytes.
    busy: HashMap<u64, Instant>,
    /// When each read in flight may come back.
    due: HashMap<super::Ticket, Instant>,
    held: Vec<(Instant, Done)>,
    hanging: Vec<Done>,
    hung: Vec<super::Ticket>,
    release: Arc<Release>,
    timer: Timer,
    wake: OwnedFd,
}

/// Releases the reads that hang.
#[derive(Debug)]
pub struct Release {
    released: AtomicBool,
    bell: Wake,
}

impl Release {
    /// Every read that hangs comes back now, and no later read hangs.
    pub fn release(&self) {
        self.released.store(true, Ordering::Release);
        self.bell.notify();
    }
}

impl Throttle {
    /// `inner`, which reads `files`, throttled.
    pub fn new(inner: Box<dyn Source>, files: Arc<dyn Objects>, how: Throttling) -> Result<Throttle> {
        let timer = Timer::new()?;
        let release = Arc::new(Release { released: AtomicBool::new(false), bell: Wake::new()? });
        let wake = epoll()?;
        for fd in [inner.wake(), timer.fd(), release.bell.fd()] {
            watch(&wake, fd)?;
        }
        Ok(Throttle {
            inner,
            files,
            how,
            submitted: 0,
            busy: HashMap::new(),
            due: HashMap::new(),
            held: Vec::new(),
            hanging: Vec::new(),
            hung: Vec::new(),
            release,
            timer,
            wake,
        })
    }

    /// Releases, from any thread, the reads that hang.
    pub fn release(&self) -> Arc<Release> {
        self.release.clone()
    }

    /// Wakes at the earliest time at which a held read is due.
    fn arm(&self) {
        let due = self.held.iter().map(|(due, _)| *due).min();
        self.timer.set(due.map(|due| due.saturating_duration_since(Instant::now())));
    }

    /// When the file's storage device is done with a read of `len` bytes that is submitted now.
    fn occupy(&mut self, file: u32, len: u64) -> Instant {
        let now = Instant::now();
        let storage = self.files.facts(file).map_or(0, |f| f.storage);
        let Some(&rate) = self.how.rates.get(&storage).or(self.how.rate.as_ref()) else { return now };
        let busy = self.busy.entry(storage).or_insert(now);
        *busy = (*busy).max(now) + Duration::from_secs_f64(len as f64 / rate.max(1) as f64);
        *busy
    }

    fn hold(&mut self, done: Done) {
        let due = self.due.remove(&done.ticket).unwrap_or_else(Instant::now);
        self.held.push((due + self.how.latency, done));
    }
}

impl Source for Throttle {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let number = self.submitted;
        if let Some((_, errno)) = self.how.fail.filter(|(n, _)| *n == number) {
            self.submitted += 1;
            let e = Error::io("read", &io::Error::from_raw_os_error(errno));
            let e = e.at(self.files.path(read.file)).range(read.offset..read.offset + read.need);
            let done = Done { ticket: read.ticket, result: Err(e), lane: read.lane, written: 0 };
            self.held.push((Instant::now(), done));
            self.arm();
            return Ok(());
        }
        let (ticket, file, len) = (read.ticket, read.file, read.len);
        self.inner.submit(read)?;
        let due = self.occupy(file, len);
        self.due.insert(ticket, due);
        self.submitted += 1;
        if self.how.hang.is_some_and(|n| number >= n) {
            self.hung.push(ticket);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        let mut happened = Vec::new();
        let outcome = self.inner.poll(&mut happened);
        for event in happened {
            let Progress::Done(d) = event else {
                events.push(event);
                continue;
            };
            match self.hung.iter().position(|t| *t == d.ticket) {
                Some(i) => {
                    self.hung.swap_remove(i);
                    self.hanging.push(d);
                }
                None => self.hold(d),
            }
        }
        if self.release.released.load(Ordering::Acquire) {
            self.release.bell.clear();
            self.how.hang = None;
            self.hung.clear();
            for d in std::mem::take(&mut self.hanging) {
                self.hold(d);
            }
        }
        let now = Instant::now();
        let mut i = 0;
        while i < self.held.len() {
            if self.held[i].0 <= now {
                events.push(Progress::Done(self.held.swap_remove(i).1));
            } else {
                i += 1;
            }
        }
        self.arm();
        outcome
    }

    fn land(&mut self, ticket: super::Ticket, into: Destination, keep: Keep) -> Result<()> {
        self.inner.land(ticket, into, keep)
    }

    fn wait_for(&mut self, fence: Fence) -> Result<()> {
        self.inner.wait_for(fence)
    }

    fn cancel(&mut self) {
        self.inner.cancel();
        let now = Instant::now();
        self.held.iter_mut().for_each(|(due, _)| *due = now);
        self.due.clear();
        self.how.latency = Duration::ZERO;
        self.arm();
    }

    fn wake(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len() + self.hanging.len()
    }

    fn take_touches(&mut self) -> Touches {
        self.inner.take_touches()
    }

    fn take_fallbacks(&mut self) -> Vec<Fallback> {
        self.inner.take_fallbacks()
    }
}
