//! The trace of a load, with times. It is recorded if `Options::trace` names a file, and written there in the JSON
//! that Chrome (`about:tracing`) and Perfetto read.
//!
//! | track | what is in it |
//! |---|---|
//! | `plan` | from the request to the first read that could start |
//! | `engine` | what the engine thread waited for |
//! | `read N` | reads: by thread N of the pool, or, where the kernel does them asynchronously, from submission to completion, each in the first track that is free |
//! | `copy N` | copies out of slabs by copy worker N; `copy 0` is the engine thread |
//! | `device N` | transfers to a GPU, from submission to completion, each in the first track that is free |
//! | `allocate` | memory on a GPU |
//! | `hand-out` | tensors becoming ready |
//! | `consumer` | what the load's owner marks: making tensors of the bytes, and what it did between two of them |
//!
//! Times are microseconds since the load was requested, by CLOCK_MONOTONIC. The format is described in "Trace Event
//! Format" (Google, 2016): complete events (`"ph": "X"`) and the names of tracks (`"ph": "M"`).

use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, Ticket};
use crate::sync::{lock, Mutex};
use serde_json::{json, Value};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The track of a span in the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Track {
    Plan,
    Engine,
    /// A thread of the read pool.
    Reader(u32),
    /// From submission to completion of a read, on any thread.
    Reading,
    /// A copy worker.
    Copier(u32),
    /// From submission to completion of a batch of copies.
    Copying,
    Allocate,
    HandOut,
    /// The owner's own.
    Owner,
}

/// An event with a duration, or at a point in time.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) track: Track,
    pub(crate) name: Cow<'static, str>,
    pub(crate) kind: &'static str,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    /// The extent that was read or copied.
    pub(crate) extent: Option<u64>,
    pub(crate) bytes: u64,
    /// File number and first byte, of a read.
    pub(crate) at: Option<(u32, u64)>,
    /// Tensors, of a hand-out.
    pub(crate) tensors: u64,
}

impl Span {
    pub(crate) fn new(track: Track, name: impl Into<Cow<'static, str>>, begun: Instant, ended: Instant) -> Self {
        let (name, kind) = (name.into(), "");
        Span { track, name, kind, begun, ended, extent: None, bytes: 0, at: None, tensors: 0 }
    }

    /// The span of a read of `bytes` bytes from `at`: file number, first byte.
    pub(crate) fn of_read(self, ticket: Ticket, lane: Lane, at: (u32, u64), bytes: u64) -> Self {
        Span { kind: lane.name, extent: Some(ticket.0), at: Some(at), bytes, ..self }
    }
}

/// The record of one load.
#[derive(Debug)]
pub(crate) struct Timeline {
    begun: Instant,
    spans: Mutex<Vec<Span>>,
    path: PathBuf,
    /// Taken by the call that writes it.
    file: Mutex<Option<File>>,
}

/// Loads traced by this process, for `{n}`.
static TRACED: AtomicU64 = AtomicU64::new(0);

impl Timeline {
    /// A record that will be written to `pattern`, in which `{pid}` and `{n}` stand for the process and the number of
    /// the traced load in it. The file is made now, so that a path that cannot be written to is an error before the
    /// load. A file that is not a trace is an error too: a typing mistake must not destroy it, it may be a checkpoint.
    pub(crate) fn new(pattern: &str) -> Result<Timeline> {
        let number = TRACED.fetch_add(1, Ordering::Relaxed).to_string();
        let path = PathBuf::from(pattern.replace("{pid}", &std::process::id().to_string()).replace("{n}", &number));
        if holds_something_else(&path) {
            let text =
                "the trace would overwrite this file, which is not a trace: remove it first, or name another file";
            return Err(Error::new(ErrorKind::Invalid, text).at(&path));
        }
        let file = File::create(&path).map_err(|e| Error::io("create the trace", &e).at(&path))?;
        Ok(Timeline { begun: Instant::now(), spans: Mutex::default(), path, file: Mutex::new(Some(file)) })
    }

    pub(crate) fn begun(&self) -> Instant {
        self.begun
    }

    pub(crate) fn add(&self, span: Span) {
        lock(&self.spans).push(span);
    }

    /// Writes the record. Only the first call does.
    pub(crate) fn write(&self, name: impl Fn(u32) -> Option<String>, report: &Value) -> Result<()> {
        let Some(file) = lock(&self.file).take() else { return Ok(()) };
        let spans = std::mem::take(&mut *lock(&self.spans));
        let events = self.events(spans, name);
        let document = json!({
            "displayTimeUnit": "ms",
            "otherData": {"version": env!("CARGO_PKG_VERSION"), "report": report},
            "traceEvents": events,
        });
        let mut out = BufWriter::new(file);
        let written = serde_json::to_writer(&mut out, &document).map_err(std::io::Error::from);
        written.and_then(|()| out.flush()).map_err(|e| Error::io("write the trace", &e).at(&self.path))
    }

    fn events(&self, mut spans: Vec<Span>, name: impl Fn(u32) -> Option<String>) -> Vec<Value> {
        spans.sort_by_key(|s| s.begun);
        // The thread that did a read or a copy knows better when it was done than the thread that requested it.
        let of = |done: fn(&Span) -> bool| spans.iter().filter(|s| done(s)).filter_map(|s| s.extent).collect();
        let read: HashSet<u64> = of(|s| matches!(s.track, Track::Reader(_)));
        let copied: HashSet<u64> = of(|s| matches!(s.track, Track::Copier(_)));
        let known = |s: &Span| {
            s.extent.is_some_and(|extent| match s.track {
                Track::Reading => read.contains(&extent),
                Track::Copying => copied.contains(&extent),
                _ => false,
            })
        };
        spans.retain(|s| !known(s));

        let mut tracks: Vec<(u64, String)> = Vec::new();
        let (mut reading, mut copying) = (Slots::default(), Slots::default());
        let pid = std::process::id();
        let mut events = Vec::with_capacity(spans.len() + 16);
        for span in &spans {
            let (order, track) = match span.track {
                Track::Plan => (0, "plan".to_owned()),
                Track::Engine => (1, "engine".to_owned()),
                Track::Reader(n) => (100 + u64::from(n), format!("read {n}")),
                Track::Reading => {
                    let n = reading.take(span);
                    (1000 + n, format!("read {n}"))
                }
                Track::Copier(n) => (2000 + u64::from(n), format!("copy {n}")),
                Track::Copying => {
                    let n = copying.take(span);
                    (3000 + n, format!("device {n}"))
                }
                Track::Allocate => (4000, "allocate".to_owned()),
                Track::HandOut => (5000, "hand-out".to_owned()),
                Track::Owner => (5001, "consumer".to_owned()),
            };
            if !tracks.iter().any(|l| l.0 == order) {
                tracks.push((order, track));
            }
            let mut args = serde_json::Map::new();
            if let Some((file, offset)) = span.at {
                args.insert("file".into(), name(file).into());
                args.insert("offset".into(), offset.into());
            }
            for (key, value) in [("bytes", span.bytes), ("tensors", span.tensors)] {
                if value > 0 {
                    args.insert(key.into(), value.into());
                }
            }
            events.push(json!({
                "ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": order, "args": args,
                "ts": self.micros(span.begun), "dur": micros(span.begun, span.ended),
            }));
        }
        for (order, name) in tracks {
            events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": order, "args": {"name": name}}));
            let args = json!({ "sort_index": order });
            events.push(json!({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": order, "args": args}));
        }
        events
    }

    fn micros(&self, at: Instant) -> f64 {
        micros(self.begun, at)
    }
}

/// The beginning of our traces: serde_json writes the keys of an object in their order.
const FIRST: &[u8] = br#"{"displayTimeUnit":"ms","#;

/// Whether there is a file with bytes that are not a trace of ours. If the file cannot be read, `File::create` reports
/// that.
fn holds_something_else(path: &Path) -> bool {
    let Ok(metadata) = path.metadata() else { return false };
    if !metadata.is_file() || metadata.len() == 0 {
        return false;
    }
    let mut first = [0; FIRST.len()];
    File::open(path).and_then(|mut file| file.read_exact(&mut first)).is_err() || first != FIRST
}

fn micros(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_nanos() as f64 / 1e3
}

/// Tracks for spans that overlap: each span goes to the first track that is free when it begins.
#[derive(Default)]
struct Slots {
    free_at: Vec<Instant>,
}

impl Slots {
    fn take(&mut self, span: &Span) -> u64 {
        let free = self.free_at.iter().position(|&at| at <= span.begun);
        let slot = free.unwrap_or_else(|| {
            self.free_at.push(span.begun);
            self.free_at.len() - 1
        });
        self.free_at[slot] = span.ended;
        slot as u64
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Duration;

    fn span(track: Track, extent: u64, begun: Instant, ms: std::ops::Range<u64>) -> Span {
        let at = |ms| begun + Duration::from_millis(ms);
        Span { extent: Some(extent), ..Span::new(track, "read", at(ms.start), at(ms.end)) }
    }

    #[test]
    fn spans_that_overlap_lie_in_lanes_of_their_own_and_a_read_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace-{n}.json");
        let timeline = Timeline::new(path.to_str().unwrap()).unwrap();
        let t = timeline.begun();
        let spans = vec![
            span(Track::Reading, 0, t, 0..10),
            span(Track::Reading, 1, t, 5..15),
            span(Track::Reading, 2, t, 12..20),
            span(Track::Reading, 3, t, 0..30),
            span(Track::Reader(4), 3, t, 25..30),
        ];
        let found = timeline.events(spans, |_| None);
        let tracks: Vec<(u64, f64)> = found
            .iter()
            .filter(|e| e["ph"] == "X")
            .map(|e| (e["tid"].as_u64().unwrap(), e["dur"].as_f64().unwrap()))
            .collect();
        assert_eq!(tracks, [(1000, 10e3), (1001, 10e3), (1000, 8e3), (104, 5e3)]);
    }
}
