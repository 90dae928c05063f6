//! Streams are threads with queues, events are markers in them.
//!
//! The order is decided when work is submitted (clocks, and the earlier work of other streams for which it has to
//! wait). Time passes when it runs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::clocks::{Access, Clock, Rows};
use crate::memory::is_mapped;
use crate::misuse::Kind;
use crate::state::{changed, lock, wait, State};

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// Its component in the clocks.
    pub(crate) index: usize,
    /// Ordered with the legacy default stream (made without the non-blocking flag).
    pub(crate) blocking: bool,
    /// Made by the program under test: it has to destroy it.
    pub(crate) counted: bool,
    pub(crate) clock: Clock,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    pub(crate) destroyed: bool,
    queue: VecDeque<Operation>,
}

/// A marker: the stream, the position in it, and what was known there.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    pub(crate) stream: usize,
    pub(crate) seq: u64,
    pub(crate) clock: Clock,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) recorded: Option<Mark>,
}

/// What an operation does when its turn comes.
#[derive(Debug)]
pub(crate) enum Work {
    /// Nothing: an event, a wait, or a use of memory that does not change it.
    Nothing,
    /// Copies rows of one shape into rows of another. `sum` is the sum of the source at submission.
    Copy { to: Rows, from: Rows, sum: Option<u64>, number: u64, to_device: Option<usize> },
    /// Sets every byte.
    Fill { start: u64, len: u64, byte: u8 },
    /// Reads and compares with an FNV-1a hash.
    Check { start: u64, len: u64, expected: u64 },
    /// Reads into the test's buffer.
    CopyOut { start: u64, len: u64, out: u64 },
}

#[derive(Debug)]
struct Operation {
    /// (stream, position) pairs that must be done first.
    waits: Vec<(usize, u64)>,
    /// When it was submitted. If it had to wait for other streams: when it may run.
    ready: Instant,
    delay: Duration,
    what: &'static str,
    work: Work,
}

/// What to submit: the work and the memory it touches.
pub(crate) struct Submission {
    pub(crate) what: &'static str,
    pub(crate) work: Work,
    pub(crate) delay: Duration,
    /// The rows, and whether they are written. The address tells device memory from host memory.
    pub(crate) accesses: Vec<(Rows, bool)>,
}

impl Submission {
    pub(crate) fn marker(what: &'static str) -> Self {
        Self { what, work: Work::Nothing, delay: Duration::ZERO, accesses: Vec::new() }
    }
}

impl State {
    /// Makes a stream and its thread. `counted`: the program under test has to destroy it.
    pub(crate) fn new_stream(&mut self, device: usize, blocking: bool, counted: bool) -> usize {
        let handle = self.new_handle();
        let index = self.stream_indices;
        self.stream_indices += 1;
        let stream = Stream {
            device,
            index,
            blocking,
            counted,
            clock: Clock::default(),
            submitted: 0,
            completed: 0,
            destroyed: false,
            queue: VecDeque::new(),
        };
        self.streams.insert(handle, stream);
        let spawned = std::thread::Builder::new().name(format!("fakegpu-{index}")).spawn(move || serve(handle));
        if let Err(cause) = spawned {
            eprintln!("fakegpu: no thread for a stream: {cause}");
            std::process::abort();
        }
        handle
    }

    /// The legacy default stream of `device`.
    pub(crate) fn default_stream(&mut self, device: usize) -> usize {
        if let Some(handle) = self.devices[device].default_stream {
            return handle;
        }
        let handle = self.new_stream(device, false, false);
        self.devices[device].default_stream = Some(handle);
        handle
    }

    /// Puts work on a stream, after the earlier work that it has to follow, and returns its position. `after` adds an
    /// event.
    pub(crate) fn submit(&mut self, handle: usize, after: Option<&Mark>, submission: Submission) -> Mark {
        let mut waits = Vec::new();
        let mut clock = self.host_clock.clone();
        if let Some(mark) = after {
            clock.join(&mark.clock);
            waits.push((mark.stream, mark.seq));
        }
        let (device, blocking, index) = {
            let stream = &self.streams[&handle];
            clock.join(&stream.clock);
            (stream.device, stream.blocking, stream.index)
        };
        // The legacy default stream follows every blocking stream of its device, and they follow it.
        let default = self.devices[device].default_stream;
        for (other, stream) in &self.streams {
            let related = (default == Some(handle) && stream.blocking) || (blocking && default == Some(*other));
            if related && stream.device == device && *other != handle && !stream.destroyed {
                clock.join(&stream.clock);
                waits.push((*other, stream.submitted));
            }
        }
        let tick = clock.tick(index);
        let Submission { what, work, delay, accesses } = submission;
        for (rows, write) in accesses {
            self.access(Access { rows, write, stream: index, tick, what }, &clock);
        }
        let mut seq = 0;
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.clock.clone_from(&clock);
            stream.submitted += 1;
            seq = stream.submitted;
            stream.queue.push_back(Operation { waits, ready: Instant::now(), delay, what, work });
        }
        changed();
        Mark { stream: handle, seq, clock }
    }

    fn access(&mut self, access: Access, clock: &Clock) {
        let (lo, hi) = (access.rows.start, access.rows.end());
        let start = self.allocation_of(lo, hi).map(|a| a.start);
        let map = match start.and_then(|start| self.allocations.get_mut(&start)) {
            Some(allocation) => &mut allocation.accesses,
            None => &mut self.host_accesses,
        };
        let described = access.describe();
        if let Some(earlier) = map.add(access, clock, &self.host_clock) {
            let earlier = earlier.describe();
            self.misuse(Kind::UnorderedAccess, format!("{described} and is not ordered after: {earlier}"));
        }
    }

    pub(crate) fn is_done(&self, stream: usize, seq: u64) -> bool {
        self.streams.get(&stream).is_none_or(|s| s.completed >= seq)
    }

    /// Whether nothing is queued or running anywhere.
    pub(crate) fn is_idle(&self) -> bool {
        self.streams.values().all(|s| s.completed == s.submitted)
    }

    fn is_hanging(&self, number: u64) -> bool {
        self.settings.hang_copy == Some(number) && number > self.released && self.sticky.is_none()
    }
}

/// The body of a stream's thread.
fn serve(handle: usize) {
    let mut state = lock();
    loop {
        let Some(stream) = state.streams.get(&handle) else { return };
        let Some(next) = stream.queue.front() else {
            if stream.destroyed {
                state.streams.remove(&handle);
                changed();
                return;
            }
            state = wait(state);
            continue;
        };
        if !next.waits.iter().all(|(other, seq)| state.is_done(*other, *seq)) {
            state = wait(state);
            if let Some(next) = state.streams.get_mut(&handle).and_then(|s| s.queue.front_mut()) {
                next.ready = Instant::now();
            }
            continue;
        }
        let Some(operation) = state.streams.get_mut(&handle).and_then(|s| s.queue.pop_front()) else { return };
        let mut pause = operation.delay;
        if let Work::Copy { to, number, to_device, .. } = &operation.work {
            pause += state.settings.copy_delay;
            pause += link_time(&mut state, *to_device, to.bytes(), operation.ready);
            while state.is_hanging(*number) {
                state = wait(state);
            }
            if let Some((_, code)) = state.settings.sticky.filter(|(nth, _)| number >= nth) {
                state.sticky.get_or_insert(code);
                changed();
            }
        }
        let broken = state.sticky.is_some();
        let idle = matches!(operation.work, Work::Copy { to_device: Some(_), .. }) && !state.settings.move_bytes;
        drop(state);
        let wrong = if broken {
            None
        } else {
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
            if idle {
                None
            } else {
                run(&operation)
            }
        };
        state = lock();
        if let Some((kind, detail)) = wrong {
            state.misuse(kind, detail);
        }
        if let Some(stream) = state.streams.get_mut(&handle) {
            stream.completed += 1;
        }
        changed();
    }
}

/// How long from now until the link has carried the bytes, after what it carries already. The link takes them as soon
/// as they are `ready`, not when this thread comes to them. So the time that the host needs to wake up and to copy is
/// hidden behind the link's own time, as long as the host keeps up.
fn link_time(state: &mut State, to_device: Option<usize>, bytes: u64, ready: Instant) -> Duration {
    let rate = state.settings.h2d_bytes_per_s;
    let Some(device) = to_device.filter(|_| rate > 0).and_then(|d| state.devices.get_mut(d)) else {
        return Duration::ZERO;
    };
    let free_at = device.link_free_at.map_or(ready, |at| at.max(ready));
    let done_at = free_at + Duration::from_secs_f64(bytes as f64 / rate as f64);
    device.link_free_at = Some(done_at);
    done_at.saturating_duration_since(Instant::now())
}

/// Does the work, with no lock held.
fn run(operation: &Operation) -> Option<(Kind, String)> {
    let what = operation.what;
    let gone = |start: u64, end: u64| {
        (!is_mapped(start, end - start))
            .then(|| (Kind::Unmapped, format!("{what}: {start:#x}..{end:#x} was unmapped before the operation ran")))
    };
    match operation.work {
        Work::Nothing => None,
        Work::Copy { to, from, sum, number, .. } => {
            if let Some(wrong) = gone(from.start, from.end()).or_else(|| gone(to.start, to.end())) {
                return Some(wrong);
            }
            for i in 0..to.rows {
                let (source, target) = (from.start + i * from.pitch, to.start + i * to.pitch);
                // SAFETY: both rows are mapped (asked above), device memory that was freed too early is kept mapped,
                // and the bounds were checked at submission. A host thread that rewrites the source meanwhile is the
                // misuse this copy exists to reveal: it would race with the real hardware too.
                unsafe { std::ptr::copy(source as *const u8, target as *mut u8, to.width as usize) };
            }
            // The bytes that arrived are summed: so a source that is rewritten in the middle of the copy is seen too.
            let changed = sum.is_some_and(|before| sum_of(&to) != before);
            changed.then(|| {
                let Rows { start, .. } = from;
                let detail = format!("{what} (copy {number}): the source {start:#x}..{:#x} changed", from.end());
                (Kind::SourceModified, format!("{detail} between submission and execution"))
            })
        }
        Work::Fill { start, len, byte } => gone(start, start + len).or_else(|| {
            // SAFETY: mapped, and inside an allocation at submission.
            unsafe { std::ptr::write_bytes(start as *mut u8, byte, len as usize) };
            None
        }),
        Work::Check { start, len, expected } => gone(start, start + len).or_else(|| {
            // SAFETY: mapped, and inside an allocation at submission.
            let found = fnv(unsafe { std::slice::from_raw_parts(start as *const u8, len as usize) });
            let end = start + len;
            (found != expected)
                .then(|| (Kind::WrongBytes, format!("{what}: {start:#x}..{end:#x} is {found:#x}, not {expected:#x}")))
        }),
        Work::CopyOut { start, len, out } => gone(start, start + len).or_else(|| {
            // SAFETY: mapped; the test gave a buffer of this length and keeps it until it has synchronised.
            unsafe { std::ptr::copy(start as *const u8, out as *mut u8, len as usize) };
            None
        }),
    }
}

/// FNV-1a, 64 bits.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A sum of the bytes of `rows` in order, several bytes per cycle: every copy to the device is summed twice.
pub(crate) fn sum_of(rows: &Rows) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut total = rows.rows;
    for i in 0..rows.rows {
        let at = (rows.start + i * rows.pitch) as *const u8;
        // SAFETY: the caller asked that the rows are mapped; a concurrent change only makes the sum differ.
        let bytes = unsafe { std::slice::from_raw_parts(at, rows.width as usize) };
        let mut lanes = [ODD, !ODD, 1, 2];
        let blocks = bytes.chunks_exact(32);
        let rest = blocks.remainder();
        for block in blocks {
            for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
                let word = u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]]);
                *lane = (*lane ^ word).wrapping_mul(ODD).rotate_left(29);
            }
        }
        for lane in lanes.into_iter().chain([fnv(rest)]) {
            total = (total ^ lane).wrapping_mul(ODD).rotate_left(31);
        }
    }
    total
}
