//! The journal of a load: its report, its waits, and its trace if it is traced.

use crate::engine::Wait;
use crate::extent::{Extent, Ticket};
use crate::machine::time_of;
use crate::source::Done;
use crate::stats::{Report, Tally};
use crate::timeline::{Span, Timeline, Track};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Writes a load down while it runs.
pub(super) struct Journal {
    pub(super) report: Report,
    pub(super) began: Began,
    pub(super) tally: Tally,
    record: Option<Record>,
}

/// The record of a load, as the engine thread writes it.
struct Record {
    timeline: Arc<Timeline>,
    /// When the read of each extent was started, then when its copies were.
    started: Vec<Instant>,
}

impl Journal {
    pub(super) fn new(report: Report, began: Began, timeline: Option<Arc<Timeline>>, extents: usize) -> Self {
        let now = Instant::now();
        let record = timeline.map(|timeline| Record { timeline, started: vec![now; extents] });
        let journal = Self { report, began, tally: Tally::default(), record };
        journal.note(|record| Span::new(Track::Plan, "plan", record.timeline.begun(), now));
        journal
    }

    /// Writes a span, if the load is traced.
    fn note(&self, span: impl FnOnce(&Record) -> Span) {
        if let Some(record) = &self.record {
            record.timeline.add(span(record));
        }
    }

    /// The read of an extent starts, or its copies do.
    pub(super) fn starts(&mut self, extent: u32) {
        if let Some(record) = &mut self.record {
            record.started[extent as usize] = Instant::now();
        }
    }

    /// The read of an extent has ended.
    pub(super) fn has_read(&mut self, done: &Done, e: &Extent) {
        let &Done { ticket, lane, .. } = done;
        if let Ok(bytes) = &done.result {
            let skipped = e.rows.map_or(0, |rows| rows.skipped);
            let bytes = if e.is_received() { e.wanted } else { bytes.saturating_sub(skipped) };
            if e.is_received() {
                self.report.exchange.get_or_insert_default().received += bytes;
            }
            self.report.routes.count(lane, bytes);
            self.report.rerouted_extents += u64::from(e.lane != lane);
        }
        self.note(|record| {
            let span = record.span(Track::Reading, "read", ticket).of_read(ticket, lane, (e.file, e.offset), e.len);
            Span { at: span.at.filter(|_| !e.is_received()), ..span }
        });
    }

    /// The copies of an extent have ended.
    pub(super) fn has_copied(&self, ticket: Ticket, e: &Extent) {
        let span = |record: &Record| record.span(Track::Copying, "transfer", ticket);
        self.note(|record| Span { kind: "device", bytes: e.need, ..span(record) });
    }

    /// A block of so many bytes has been allocated.
    pub(super) fn has_allocated(&self, begun: Instant, bytes: u64) {
        self.note(|_| Span { bytes, ..Span::new(Track::Allocate, "allocate", begun, Instant::now()) });
    }

    /// So many wants are ready for hand-out.
    pub(super) fn hands_out(&self, tensors: u64, begun: Instant) {
        if tensors > 0 {
            self.note(|_| Span { tensors, ..Span::new(Track::HandOut, "ready", begun, Instant::now()) });
        }
    }

    /// The engine has waited since then, with so many reads and copies in flight.
    pub(super) fn has_waited(&mut self, wait: Wait, since: Instant, reads: usize, copies: usize) {
        let now = Instant::now();
        self.tally.add(wait, reads, copies, now - since);
        if let Some(name) = wait.name() {
            let span = || Span::new(Track::Engine, format!("wait: {name}"), since, now);
            self.note(|_| Span { kind: "wait", ..span() });
        }
    }
}

impl Record {
    fn span(&self, track: Track, name: &'static str, Ticket(extent): Ticket) -> Span {
        let begun = self.started[extent as usize];
        Span { extent: Some(extent), ..Span::new(track, name, begun, Instant::now()) }
    }
}

/// When a load began, by the wall clock and in CPU time of this process.
#[derive(Clone, Copy)]
pub(super) struct Began {
    wall: Instant,
    cpu: Duration,
}

impl Began {
    pub(super) fn now() -> Self {
        Self { wall: Instant::now(), cpu: time_of(libc::CLOCK_PROCESS_CPUTIME_ID) }
    }

    /// Since then, by the wall clock.
    pub(super) fn seconds(&self) -> f64 {
        self.wall.elapsed().as_secs_f64()
    }

    /// CPU time of the whole process since then.
    pub(super) fn cpu_seconds(&self) -> f64 {
        time_of(libc::CLOCK_PROCESS_CPUTIME_ID).saturating_sub(self.cpu).as_secs_f64()
    }
}
