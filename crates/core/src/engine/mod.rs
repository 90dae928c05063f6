//! The engine: a state machine that moves extents from *granted* over reading and copying to *ready*.
//!
//! It does no I/O, holds no lock and has no clock: the time is an argument. Its driver tells it that it is awake
//! ([`turn`](Engine::turn)) and what happened ([`on`](Engine::on)), asks for actions and carries them out
//! ([`next`](Engine::next)), hands out what is ready ([`ready`](Engine::ready)), and sleeps until something happens or
//! the [`deadline`](Engine::deadline). So a seeded simulator can replace disks, devices and the clock. It shows that
//! every byte arrives exactly once, that no slab is reused early, and that every load ends, whatever completes, fails or
//! stalls in any order.
//!
//! A read brings an extent from the source. If the extent does not land in place, a copy takes it from its slab to the
//! blocks. A store that answers late gets its request first and a slab when the first byte has arrived ([`TakesSlab`]).
//!
//! ```text
//!            slab, blocks granted              read ends                copy ends
//!   waiting ─────────────────────────▶ reading ───────────┬─▶ copying ──────────────────▶ arrived
//!      │                                 ▲                └─▶ arrived   (landed in place)
//!      │ blocks granted                  │ slab
//!      └─────────────────▶ requested ──▶ answered   (slab on arrival)
//!                              first byte
//! ```
//! A want is ready when every piece of it has arrived.

use crate::error::{Error, ErrorKind};
use crate::extent::{Extent, InCommon, Landing, Piece, TakesSlab, Ticket};
use crate::plan::layout::Layout;
use crate::plan::schedule::Schedule;
use deadline::Deadlines;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use window::Window;
use words::Stage;

mod deadline;
#[cfg(test)]
pub(crate) mod mutated;
#[cfg(test)]
mod simulator;
#[cfg(test)]
mod virtual_time;
mod window;
mod words;

pub(crate) use deadline::{nanos, Nanos};
pub(crate) use words::{Action, Bounds, Event, Ready, Slabs, Wait};

/// No gate.
const OPEN: usize = usize::MAX;

/// See the module's documentation.
pub(crate) struct Engine<S> {
    schedule: Arc<Schedule>,
    layout: Arc<Layout>,
    bounds: Bounds,
    stages: Vec<Stage>,
    slabs: Vec<Option<S>>,
    /// Next extent to start. Extents start strictly in order: hand-out follows it closely.
    cursor: usize,
    /// No extent from here on starts, and the load does not end; `OPEN`: there is no gate.
    gate: usize,
    /// Extents ahead that are left out, in order.
    skipped: VecDeque<Range<usize>>,
    granted: Vec<bool>,
    /// Extents before this one have all their blocks granted.
    all_granted_before: usize,
    /// Extents whose read has ended, and whose copy has to start.
    landed: VecDeque<u32>,
    /// Requests that have arrived and have no slab yet, in the order of their arrival.
    arrivals: VecDeque<u32>,
    /// A read for which the source had no room.
    held_back: Option<u32>,
    /// Whether the source may have room: it was polled since it had none.
    room: bool,
    /// A read was given to the driver, which has not said that there is no room.
    offered: bool,
    /// Reads in flight that take slabs at request, and those that take them at arrival.
    reads: usize,
    requests: usize,
    copies_in_flight: usize,
    /// Slabs of parcels that this rank reads for others.
    sent: usize,
    /// Reads in flight of parcels that others send.
    received: usize,
    /// Pieces still to arrive, per want.
    missing: Vec<u32>,
    /// Wants that are not ready, per block.
    unready: Vec<u32>,
    /// Wants whose destination was overwritten, wholly or in part, by reads and copies that have ended without arriving.
    torn: Vec<bool>,
    /// Extents whose read or copy hangs: it may overwrite its places at any time.
    hung: Vec<u32>,
    /// Next position in `layout.order` to hand out.
    hand_out: usize,
    /// `None`: nobody takes anything before the end, and nothing is bounded.
    window: Option<Window>,
    /// Wanted bytes started and not yet taken.
    ahead: u64,
    bytes_arrived: u64,
    deadlines: Deadlines,
    /// The driver woke after the stall timeout. The load fails unless this turn brings something to do.
    overdue: Option<Wait>,
    failure: Option<Error>,
    /// The oldest extent in flight when the load stalled.
    stalled: Option<u32>,
    /// The source was told that the load has failed.
    source_told: bool,
    abandoned: bool,
    quarantined: Vec<S>,
    starved_of_slabs: bool,
}

impl<S> Engine<S> {
    /// An engine for one load, at time 0.
    pub(crate) fn new(schedule: Arc<Schedule>, layout: Arc<Layout>, bounds: Bounds) -> Self {
        let extents = schedule.extents.len();
        let mut missing = vec![0; layout.places.len()];
        for piece in &schedule.pieces {
            missing[piece.want as usize] += 1;
        }
        let bounds = Bounds { depth: bounds.depth.max(1), requests: bounds.requests.max(1), ..bounds };
        Self {
            stages: vec![Stage::Waiting; extents],
            slabs: std::iter::repeat_with(|| None).take(extents).collect(),
            cursor: 0,
            gate: OPEN,
            skipped: VecDeque::new(),
            granted: vec![false; layout.blocks.len()],
            all_granted_before: 0,
            landed: VecDeque::new(),
            arrivals: VecDeque::new(),
            held_back: None,
            room: true,
            offered: false,
            reads: 0,
            requests: 0,
            copies_in_flight: 0,
            sent: 0,
            received: 0,
            missing,
            unready: layout.wants_per_block(),
            torn: vec![false; layout.places.len()],
            hung: Vec::new(),
            hand_out: 0,
            window: bounds.window.map(|bytes| Window::new(bytes, &schedule, layout.places.len())),
            ahead: 0,
            bytes_arrived: 0,
            deadlines: Deadlines::new(bounds.stall),
            overdue: None,
            failure: None,
            stalled: None,
            source_told: false,
            abandoned: false,
            quarantined: Vec::new(),
            starved_of_slabs: false,
            bounds,
            schedule,
            layout,
        }
    }

    /// No extent from this one on starts, and the load does not end, until the gate is moved or opened.
    pub(crate) fn set_gate(&mut self, extent: usize) {
        self.gate = extent;
    }

    /// All extents may start.
    pub(crate) fn open_gate(&mut self) {
        self.gate = OPEN;
    }

    /// Whether everything before the gate has arrived, and nothing is in flight.
    pub(crate) fn is_at_gate(&self) -> bool {
        self.cursor >= self.gate && self.is_quiet() && self.failure.is_none()
    }

    /// Leaves these extents out. None of them has started, they lie behind those that are left out already, and other extents
    /// bring the same bytes.
    pub(crate) fn skip(&mut self, extents: Range<usize>) {
        for i in extents.clone() {
            for piece in self.schedule.pieces_of(&self.schedule.extents[i]) {
                self.missing[piece.want as usize] -= 1;
            }
            self.stages[i] = Stage::Dropped;
        }
        self.skipped.push_back(extents);
        self.pass_skipped();
    }

    fn pass_skipped(&mut self) {
        while let Some(extents) = self.skipped.front().filter(|extents| extents.start == self.cursor) {
            self.cursor = extents.end;
            self.skipped.pop_front();
        }
    }

    /// The extent has arrived. An extent that is left out never arrives.
    pub(crate) fn has_brought(&self, extent: usize) -> bool {
        self.stages[extent] == Stage::Arrived
    }

    /// The error of a load that has failed.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// The driver is awake, and is about to look what happened. The source may have room again, and the ring a slab.
    ///
    /// If the stall timeout has passed, the load fails in the next [`next`](Self::next), unless this turn brings progress:
    /// the driver itself may have been stopped for longer than the timeout.
    pub(crate) fn turn(&mut self, now: Nanos) {
        let wait = self.waits_for();
        let may_stall = wait.may_stall();
        if !may_stall {
            self.deadlines.moved(now);
        }
        self.overdue = None;
        if may_stall && self.failure.is_none() && now >= self.deadlines.stalls_at() {
            self.overdue = Some(wait);
        }
        self.starved_of_slabs = false;
        self.room = true;
    }

    /// Something happened.
    pub(crate) fn on(&mut self, now: Nanos, event: Event) {
        match event {
            Event::Granted(block) => self.granted[block as usize] = true,
            Event::Taken(want) => self.take(want),
            Event::Cancelled => self.fail(now, Error::new(ErrorKind::Cancelled, "the load was cancelled")),
            Event::NoRoom(ticket) => {
                self.held_back = Some(ticket.0 as u32);
                (self.room, self.offered) = (false, false);
            }
            Event::Arrived(ticket) => self.arrived(now, ticket),
            Event::Received(ticket) => {
                // What another rank sends goes on as long as that rank lives. But if something of this rank's own is in flight,
                // that has to move: else two ranks whose storage hangs would wait for each other.
                let theirs = self.is_received(ticket.0 as usize);
                // A server may ask for patience before the first byte.
                let known = self.expect(now, ticket, Stage::is_reading).is_some();
                let own = self.reads_in_flight() + self.copies_in_flight - self.received;
                if known && (!theirs || own == 0) {
                    self.moved(now);
                }
            }
            Event::ReadDone(ticket, result, written) => self.read_done(now, ticket, result, written),
            Event::CopyDone(ticket, result, begun) => self.copy_done(now, ticket, result, &begun),
            Event::Failed(error) => self.fail(now, error),
            Event::Revoked(error) => self.set_failure(now, error),
        }
    }

    /// The read behind this ticket, whose end comes next, has brought its bytes in a slab of its own.
    pub(crate) fn brought(&mut self, ticket: Ticket, slab: S) {
        let i = ticket.0 as usize;
        if self.stages.get(i) == Some(&Stage::Requested) {
            self.slabs[i] = Some(slab);
            self.stages[i] = Stage::Reading;
        }
    }

    /// The next action, or `None` until something happens or the [`deadline`](Self::deadline) passes. Copies come
    /// first: they free slabs.
    pub(crate) fn next(&mut self, now: Nanos, ring: &mut impl Slabs<Slab = S>) -> Option<Action> {
        if std::mem::take(&mut self.offered) {
            self.started(now);
        }
        if self.failure.is_none() {
            if let Some(action) = self.go_on(now, ring) {
                return Some(action);
            }
            if let Some(wait) = self.overdue.take().filter(|_| self.failure.is_none()) {
                self.stall(now, wait);
            }
        }
        self.failure.as_ref()?;
        self.wind_down(now)
    }

    /// The next step of a load that goes well.
    fn go_on(&mut self, now: Nanos, ring: &mut impl Slabs<Slab = S>) -> Option<Action> {
        if let Some(extent) = self.landed.pop_front() {
            self.stages[extent as usize] = Stage::Copying;
            self.copies_in_flight += 1;
            self.started(now);
            return Some(Action::Copy { extent });
        }
        if let Some(action) = self.land(now, ring) {
            return Some(action);
        }
        // The ring may have had no memory for a slab.
        if self.failure.is_some() {
            return None;
        }
        if let Some(extent) = self.held_back {
            if !self.room {
                return None;
            }
            self.held_back = None;
            (self.room, self.offered) = (false, true);
            return Some(Action::Read { extent });
        }
        self.start(now, ring)
    }

    /// Gives the request that arrived first its slab.
    fn land(&mut self, now: Nanos, ring: &mut impl Slabs<Slab = S>) -> Option<Action> {
        if !self.may_send_more() && self.arrivals.front().is_some_and(|&extent| self.is_sent(extent as usize)) {
            // What others send needs no other slab.
            let other = self.arrivals.iter().position(|&extent| !self.is_sent(extent as usize))?;
            self.arrivals.swap(0, other);
        }
        let &extent = self.arrivals.front()?;
        let i = extent as usize;
        if self.slabs[i].is_none() {
            self.slabs[i] = Some(self.slab_from(now, ring)?);
            self.sent += usize::from(self.is_sent(i));
        }
        self.arrivals.pop_front();
        self.stages[i] = Stage::Reading;
        self.started(now);
        Some(Action::Land { extent })
    }

    /// Starts the next extent.
    fn start(&mut self, now: Nanos, ring: &mut impl Slabs<Slab = S>) -> Option<Action> {
        if self.cursor >= self.gate {
            return None;
        }
        let e = self.schedule.extents.get(self.cursor)?;
        let (landing, on_arrival, staging, wanted) = (e.landing, e.lands_on_arrival(), e.staging, e.wanted);
        if !self.has_depth(staging) || !self.window_admits(self.cursor) {
            return None;
        }
        if self.missing_grant(self.cursor).is_some() {
            return None;
        }
        let extent = self.cursor as u32;
        if landing == Landing::Slab && !on_arrival {
            if self.is_sent(self.cursor) && !self.may_send_more() {
                return None;
            }
            // Requests that have arrived were served before: if one still waits, there is no slab in this turn.
            self.slabs[self.cursor] = Some(self.slab_from(now, ring)?);
            self.sent += usize::from(self.is_sent(self.cursor));
        }
        self.ahead += wanted;
        *self.reads_of(staging) += 1;
        self.received += usize::from(self.is_received(self.cursor));
        self.stages[self.cursor] = if on_arrival { Stage::Requested } else { Stage::Reading };
        self.offered = true;
        self.cursor += 1;
        self.pass_skipped();
        Some(Action::Read { extent })
    }

    /// Whether other ranks get bytes of this extent out of its slab.
    fn is_sent(&self, extent: usize) -> bool {
        matches!(self.schedule.extents[extent].shared, Some(InCommon::Sent(_)))
    }

    /// Whether this extent comes from another rank.
    fn is_received(&self, extent: usize) -> bool {
        self.schedule.extents.get(extent).is_some_and(Extent::is_received)
    }

    fn may_send_more(&self) -> bool {
        self.bounds.sent.is_none_or(|most| self.sent < most)
    }

    /// A slab, if there is one. The ring is asked once a turn: its answer costs a system call.
    fn slab_from(&mut self, now: Nanos, ring: &mut impl Slabs<Slab = S>) -> Option<S> {
        if self.starved_of_slabs {
            return None;
        }
        match ring.acquire() {
            Ok(slab) => {
                self.starved_of_slabs = slab.is_none();
                slab
            }
            Err(error) => {
                self.fail(now, error);
                None
            }
        }
    }

    /// The next step of a load that has failed.
    fn wind_down(&mut self, now: Nanos) -> Option<Action> {
        if let Some(extent) = self.held_back.take() {
            *self.reads_of(self.schedule.extents[extent as usize].staging) -= 1;
            self.received -= usize::from(self.is_received(extent as usize));
            self.drop_extent(extent as usize);
            return Some(Action::Withdraw { extent });
        }
        if self.reads_in_flight() + self.copies_in_flight == 0 {
            return None;
        }
        if !self.source_told {
            self.source_told = true;
            return Some(Action::Cancel);
        }
        let over = self.deadlines.drained_by().is_some_and(|end| now >= end);
        over.then(|| {
            self.abandon();
            Action::Abandon
        })
    }

    /// The request's first byte has arrived: it gets a slab in its turn.
    fn arrived(&mut self, now: Nanos, ticket: Ticket) {
        let Some(i) = self.expect(now, ticket, |stage| stage == Stage::Requested) else { return };
        self.moved(now);
        self.stages[i] = Stage::Answered;
        if self.failure.is_none() {
            self.arrivals.push_back(i as u32);
        }
    }

    fn read_done(&mut self, now: Nanos, ticket: Ticket, result: Result<u64, Error>, written: u64) {
        let Some(i) = self.expect(now, ticket, Stage::is_reading) else { return };
        let e = &self.schedule.extents[i];
        let (offset, need, landing, staging) = (e.offset, e.need, e.landing, e.staging);
        *self.reads_of(staging) -= 1;
        self.received -= usize::from(self.is_received(i));
        self.moved(now);
        let has_landed = self.stages[i] == Stage::Reading;
        if self.stages[i] == Stage::Answered {
            self.arrivals.retain(|&extent| extent as usize != i);
        }
        let result = match result {
            Ok(_) if !has_landed => {
                let text = format!("ticket {i} completed before it had a place to land; please report this");
                Err(Error::new(ErrorKind::Internal, text))
            }
            Ok(n) if n < need => {
                Err(Error::new(ErrorKind::Truncated, format!("the read brought {n} of {need} bytes and no error"))
                    .range(offset..offset + need)
                    .with_values(offset + need, offset + n))
            }
            other => other,
        };
        match result {
            Err(error) => {
                self.tear_read(i, written);
                self.drop_extent(i);
                self.set_failure(now, error);
            }
            _ if self.failure.is_some() => {
                self.tear_read(i, written);
                self.drop_extent(i);
            }
            _ if landing == Landing::Slab => {
                self.stages[i] = Stage::Landed;
                self.landed.push_back(i as u32);
            }
            _ => self.arrive(i),
        }
    }

    fn copy_done(&mut self, now: Nanos, ticket: Ticket, result: Result<(), Error>, begun: &[u32]) {
        let Some(i) = self.expect(now, ticket, |stage| stage == Stage::Copying) else { return };
        self.copies_in_flight -= 1;
        self.moved(now);
        match result {
            Err(error) => {
                self.tear(i, |piece| begun.contains(&piece.block));
                self.drop_extent(i);
                self.set_failure(now, error);
            }
            _ if self.failure.is_some() => {
                self.tear(i, |_| true);
                self.drop_extent(i);
            }
            _ => self.arrive(i),
        }
    }

    fn take(&mut self, want: u32) {
        let Some(window) = &mut self.window else { return };
        let first = window.take(&self.layout.order, want);
        if first {
            self.ahead = self.ahead.saturating_sub(self.layout.places[want as usize].nbytes);
        }
    }

    /// The next want in hand-out order, if it is ready. Each want is given out once, and none after a failure.
    pub(crate) fn ready(&mut self) -> Option<Ready> {
        if self.failure.is_some() {
            return None;
        }
        let want = *self.layout.order.get(self.hand_out)?;
        if self.missing[want as usize] > 0 {
            return None;
        }
        let block = self.layout.places[want as usize].block;
        let unready = &mut self.unready[block as usize];
        *unready -= 1;
        let completes = (*unready == 0).then_some(block);
        self.hand_out += 1;
        Some(Ready { want, completes })
    }

    /// Ends the load with `error`, unless it has failed before or has everything already.
    fn fail(&mut self, now: Nanos, error: Error) {
        if !self.has_arrived() {
            self.set_failure(now, error);
        }
    }

    fn set_failure(&mut self, now: Nanos, error: Error) {
        self.failure.get_or_insert(error);
        self.deadlines.failed(now);
        for extent in std::mem::take(&mut self.landed) {
            self.drop_extent(extent as usize);
        }
        // The source gives these up when it is told.
        self.arrivals.clear();
    }

    /// Fails the load because nothing has moved for too long while it waited for `wait`.
    fn stall(&mut self, now: Nanos, wait: Wait) {
        // What this rank owes itself comes first: others may wait for that, and then it waits for them.
        let is_taken = |i: u32| self.is_sent(i as usize) && self.stages[i as usize] == Stage::Copying;
        let own = self.in_flight().find(|&i| !self.is_received(i as usize) && !is_taken(i));
        let taken = self.in_flight().find(|&i| is_taken(i)).filter(|_| own.is_none());
        let oldest = own.or(taken).or_else(|| self.in_flight().next());
        let what = match wait {
            _ if taken.is_some() => "another rank does not take what this one has read for it",
            Wait::Device => "copies to the device hang",
            Wait::Slabs => "no staging memory became free; other loads of this process hold all of it, or a GPU driver registers none",
            _ => "reads hang; is the file system or its server stuck?",
        };
        self.stalled = oldest;
        let error = Error::new(
            ErrorKind::Timeout,
            format!(
                "nothing moved for {:.1} s with {} reads and {} copies in flight: {what} (stall_timeout raises the limit)",
                self.deadlines.stall() as f64 / 1e9,
                self.reads_in_flight(),
                self.copies_in_flight(),
            ),
        );
        self.fail(now, error);
    }

    /// Gives up on what is in flight: a read or copy that hangs may touch its slab at any later time.
    fn abandon(&mut self) {
        self.abandoned = true;
        (self.reads, self.requests, self.copies_in_flight, self.received) = (0, 0, 0, 0);
        let all = 0..self.stages.len() as u32;
        self.hung = all.filter(|&i| self.stages[i as usize].is_in_flight() && self.overwrites(i as usize)).collect();
        for (stage, slab) in self.stages.iter_mut().zip(&mut self.slabs) {
            if stage.is_in_flight() {
                *stage = Stage::Dropped;
                self.quarantined.extend(slab.take());
            }
        }
    }

    /// The slabs that were given up: they must never be used or freed while what hangs may still touch them.
    pub(crate) fn take_quarantined(&mut self) -> Vec<S> {
        std::mem::take(&mut self.quarantined)
    }

    /// The device, which was given up, had begun nothing of these copies, and never will.
    pub(crate) fn never_begun(&mut self, tickets: &[Ticket]) {
        self.hung.retain(|&extent| !tickets.contains(&Ticket(extent.into())));
    }

    /// The extent that a stall error is about: the oldest in flight. `None` if the load has not stalled, or had nothing in
    /// flight.
    pub(crate) fn stalled(&self) -> Option<u32> {
        self.stalled
    }

    /// Extents in flight, oldest first.
    fn in_flight(&self) -> impl Iterator<Item = u32> + '_ {
        self.stages.iter().enumerate().filter(|(_, s)| s.is_in_flight()).map(|(i, _)| i as u32)
    }

    /// How the load ended; `None` while it goes on or something is still in flight.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        let drained = self.reads_in_flight() + self.copies_in_flight == 0;
        match &self.failure {
            Some(error) if drained => Some(Err(error.clone())),
            None if self.has_arrived() => Some(Ok(())),
            _ => None,
        }
    }

    /// Whether the load has failed or was cancelled, drained or not.
    pub(crate) fn failed(&self) -> bool {
        self.failure.is_some()
    }

    /// When the driver has to be awake even if nothing happens: a load that waits for something that may hang fails, and
    /// a load that has failed gives up what hangs.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match self.deadlines.drained_by() {
            Some(end) => Some(end),
            None if self.waits_for().may_stall() => Some(self.deadlines.stalls_at()),
            None => None,
        }
    }

    /// The thing that the engine waits for when `next` has nothing.
    pub(crate) fn waits_for(&self) -> Wait {
        if self.has_ended() {
            return Wait::Nothing;
        }
        if self.starved_of_slabs {
            // All slabs hold bytes that wait for the device or are being read: the step with more of them is the slower.
            // Requests that wait for a slab themselves bring nothing.
            return match (self.reads_in_flight().saturating_sub(self.arrivals.len()), self.copies_in_flight) {
                (0, 0) => Wait::Slabs,
                (reads, copies) if copies >= reads => Wait::Device,
                _ => Wait::Source,
            };
        }
        if self.is_at_gate() {
            // Others decide when it opens.
            return Wait::Nothing;
        }
        let next = self.schedule.extents.get(self.cursor).filter(|_| self.cursor < self.gate);
        if self.failure.is_none() && next.is_some_and(|e| self.has_depth(e.staging)) {
            if !self.window_admits(self.cursor) {
                return if self.next_is_ready() { Wait::Consumer } else { self.what_moves() };
            }
            if self.missing_grant(self.cursor).is_some() {
                return if self.reads_in_flight() + self.copies_in_flight == 0 {
                    Wait::Allocation
                } else {
                    self.what_moves()
                };
            }
        }
        self.what_moves()
    }

    /// Whether the last turn asked for a slab in vain, and it would be worth asking again.
    pub(crate) fn wants_slab(&self) -> bool {
        self.starved_of_slabs && self.failure.is_none()
    }

    /// The slab that extent number `extent` holds.
    pub(crate) fn slab(&self, extent: u32) -> Option<&S> {
        self.slabs[extent as usize].as_ref()
    }

    /// For each want, whether a byte of its destination was overwritten, or may be: what hangs may write at any time.
    pub(crate) fn touched(&self) -> Vec<bool> {
        let mut touched = self.torn.clone();
        let whole = (0..self.stages.len()).filter(|&i| self.overwrites(i));
        for i in whole.chain(self.hung.iter().map(|&i| i as usize)) {
            self.pieces_of(i).iter().for_each(|piece| touched[piece.want as usize] = true);
        }
        touched
    }

    /// Whether the last step of extent `i`, which writes to its places, has ended well or is in flight.
    fn overwrites(&self, i: usize) -> bool {
        match self.stages[i] {
            Stage::Copying | Stage::Arrived => true,
            Stage::Reading => self.schedule.extents[i].landing != Landing::Slab,
            _ => false,
        }
    }

    /// Wanted bytes that have arrived.
    pub(crate) fn bytes_arrived(&self) -> u64 {
        self.bytes_arrived
    }

    /// Reads in flight: sent, and not ended.
    pub(crate) fn reads_in_flight(&self) -> usize {
        self.reads + self.requests
    }

    /// Copies in flight.
    pub(crate) fn copies_in_flight(&self) -> usize {
        self.copies_in_flight
    }

    /// Blocks, in hand-out order, that the next extents need and that are not granted, as far as the window reaches.
    pub(crate) fn wanted_blocks(&mut self, out: &mut Vec<u32>) {
        // Asked at every turn of the loop, so what is granted already is not gone through again: with everything granted
        // from the start, as into memory of the CPU, a large load would spend most of its time here.
        while self.all_granted_before < self.stages.len() && self.missing_grant(self.all_granted_before).is_none() {
            self.all_granted_before += 1;
        }
        if self.all_granted_before == self.stages.len() || self.failure.is_some() {
            return;
        }
        let mut ahead = self.ahead;
        let from = if self.window.is_none() { self.cursor.max(self.all_granted_before) } else { self.cursor };
        for (i, e) in self.schedule.extents.iter().enumerate().skip(from) {
            if i > self.cursor && !self.admits(i, ahead) {
                break;
            }
            ahead = ahead.saturating_add(e.wanted);
            if i < self.all_granted_before {
                continue;
            }
            for block in self.blocks_of(i) {
                if !self.granted[block as usize] && !out.contains(&block) {
                    out.push(block);
                }
            }
            if out.len() >= 64 {
                break;
            }
        }
    }

    fn what_moves(&self) -> Wait {
        if self.reads_in_flight() > 0 {
            Wait::Source
        } else if self.copies_in_flight > 0 {
            Wait::Device
        } else {
            Wait::Consumer
        }
    }

    /// Whether what the consumer of a stream takes next has arrived.
    fn next_is_ready(&self) -> bool {
        let next = self.window.as_ref().and_then(|window| window.next(&self.layout.order));
        next.is_none_or(|want| self.missing[want as usize] == 0)
    }

    /// Whether everything has arrived.
    fn has_arrived(&self) -> bool {
        self.gate == OPEN && self.cursor == self.stages.len() && self.is_quiet() && self.failure.is_none()
    }

    /// Whether nothing is in flight, and nothing that has come waits for its copy.
    fn is_quiet(&self) -> bool {
        self.reads_in_flight() + self.copies_in_flight == 0 && self.landed.is_empty()
    }

    /// Whether the load has ended, one way or the other.
    fn has_ended(&self) -> bool {
        self.has_arrived() || (self.failure.is_some() && self.reads_in_flight() + self.copies_in_flight == 0)
    }

    /// Reads in flight of one kind.
    fn reads_of(&mut self, staging: TakesSlab) -> &mut usize {
        match staging {
            TakesSlab::AtRequest => &mut self.reads,
            TakesSlab::AtArrival => &mut self.requests,
        }
    }

    /// Whether one more read of that kind may be in flight.
    fn has_depth(&self, staging: TakesSlab) -> bool {
        match staging {
            TakesSlab::AtRequest => self.reads < self.bounds.depth,
            TakesSlab::AtArrival => self.requests < self.bounds.requests,
        }
    }

    /// A read or a copy has started. A read that the source has no room for has not: a source that never has room hangs.
    fn started(&mut self, now: Nanos) {
        self.deadlines.moved(now);
        self.overdue = None;
    }

    /// A read or a copy has ended, or a request or bytes have arrived.
    fn moved(&mut self, now: Nanos) {
        self.deadlines.moved(now);
        self.overdue = None;
    }

    fn window_admits(&self, i: usize) -> bool {
        self.admits(i, self.ahead)
    }

    fn admits(&self, i: usize, ahead: u64) -> bool {
        let Some(window) = &self.window else { return true };
        let wanted = self.schedule.extents[i].wanted;
        window.admits(&self.layout.order, ahead, (i, wanted))
    }

    fn missing_grant(&self, i: usize) -> Option<u32> {
        self.blocks_of(i).find(|&b| !self.granted[b as usize])
    }

    fn pieces_of(&self, i: usize) -> &[Piece] {
        self.schedule.pieces_of(&self.schedule.extents[i])
    }

    /// Blocks that extent `i` touches; repeats only where pieces alternate between blocks.
    fn blocks_of(&self, i: usize) -> impl Iterator<Item = u32> + '_ {
        let mut last = None;
        self.pieces_of(i).iter().map(|p| p.block).filter(move |&b| last.replace(b) != Some(b))
    }

    /// A read has ended, and its extent does not arrive. The first `written` bytes of it are at their place, or may be.
    fn tear_read(&mut self, i: usize, written: u64) {
        if self.schedule.extents[i].landing == Landing::Slab {
            return;
        }
        // The first row of a piece is the first in the file.
        self.tear(i, |piece| piece.from < written);
    }

    /// These pieces of an extent that does not arrive have overwritten something.
    fn tear(&mut self, i: usize, which: impl Fn(&Piece) -> bool) {
        for piece in self.schedule.pieces_of(&self.schedule.extents[i]) {
            self.torn[piece.want as usize] |= which(piece);
        }
    }

    /// The extent behind `ticket`, if it is in a stage that this event ends. Anything else is a source or device that
    /// reports twice, or a late echo of a quarantined ticket.
    fn expect(&mut self, now: Nanos, ticket: Ticket, awaited: impl Fn(Stage) -> bool) -> Option<usize> {
        let i = ticket.0 as usize;
        match self.stages.get(i) {
            Some(&s) if awaited(s) => Some(i),
            Some(Stage::Dropped) if self.abandoned => None,
            _ => {
                let text = format!("ticket {i} completed out of turn; please report this");
                self.set_failure(now, Error::new(ErrorKind::Internal, text));
                None
            }
        }
    }

    fn arrive(&mut self, i: usize) {
        self.stages[i] = Stage::Arrived;
        self.let_go(i);
        let extent = &self.schedule.extents[i];
        self.bytes_arrived += match extent.shared {
            // Others may want more of it than this rank.
            Some(_) => self.schedule.pieces_of(extent).iter().map(Piece::nbytes).sum(),
            _ => extent.wanted,
        };
        for p in self.schedule.pieces_of(extent) {
            let missing = &mut self.missing[p.want as usize];
            *missing = missing.saturating_sub(1);
        }
    }

    fn drop_extent(&mut self, i: usize) {
        self.stages[i] = Stage::Dropped;
        self.let_go(i);
    }

    /// Gives back the slab of an extent, if it has one.
    fn let_go(&mut self, i: usize) {
        if self.slabs[i].take().is_some() && self.is_sent(i) {
            self.sent -= 1;
        }
    }
}
