//! The engine: a state machine that moves extents from *granted* over the first and the second leg to *ready*.
//!
//! It does no I/O, holds no lock and has no clock: its driver asks [`next`](Engine::next) for actions, carries them
//! out, and reports what finished. So a seeded simulator can replace disks and devices. It shows that every byte
//! arrives exactly once, that no slab is reused early, and that every load ends, whatever completes, fails or stalls in
//! any order.
//!
//! The first leg (a read) brings an extent from the source. If the extent does not land in place, the second leg (a
//! copy) takes it from its slab to the blocks.
//!
//! ```text
//!            slab, blocks granted        first leg ends             second leg ends
//!   waiting ──────────────────────▶ first ─────────────┬─▶ second ───────────────────▶ arrived
//!                                                      └─▶ arrived   (landed in place)
//! ```
//! A want is ready when every piece of it has arrived.

use crate::error::{Error, ErrorKind};
use crate::extent::{Landing, Ticket};
use crate::plan::layout::Layout;
use crate::plan::schedule::Schedule;
use std::collections::VecDeque;
use std::sync::Arc;

#[cfg(test)]
mod simulator;
#[cfg(test)]
mod virtual_time;

/// Where slabs come from: the process-wide ring, or the simulator's.
pub(crate) trait Slabs {
    /// A slab, or a lease on one.
    type Slab;
    /// A free slab, if this load may have one now; an error where memory for it cannot be had.
    fn acquire(&mut self) -> Result<Option<Self::Slab>, Error>;
}

/// What the driver is to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start the first leg of this extent; its ticket is its number.
    First { extent: u32 },
    /// Start the second leg of this extent, out of the slab that it holds.
    Second { extent: u32 },
}

/// Why the engine has nothing to do: what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// First legs in flight.
    Source,
    /// Second legs in flight.
    Device,
    /// A free slab, while this load has nothing in flight itself.
    Slabs,
    /// The consumer, to take what is ready.
    Consumer,
    /// Block memory, to be granted by the caller.
    Allocation,
    /// Nothing: the load has ended.
    Nothing,
}

impl Wait {
    /// As reports and traces call the stage that is waited for.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Wait::Source => Some("source"),
            Wait::Device => Some("device"),
            Wait::Slabs => Some("staging"),
            Wait::Consumer => Some("consumer"),
            Wait::Allocation => Some("allocation"),
            Wait::Nothing => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    First,
    Landed,
    Second,
    Arrived,
    /// Ended without arriving, after a failure.
    Dropped,
}

/// Makes an enum with a list of its variants, so that none can be forgotten.
#[cfg(test)]
macro_rules! listed {
    ($(#[$about:meta])* enum $name:ident { $($variant:ident,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $name { $($variant,)* }

        impl $name {
            const ALL: &[$name] = &[$($name::$variant,)*];
        }
    };
}

#[cfg(test)]
listed! {
    /// Seeded mistakes, for the simulator to catch. None in any build but the tests'. One that no `mutated!` commits is
    /// one that the simulator does not catch.
    enum Mutant {
        ReleaseSlabBeforeSecondLeg,
        SkipSecondLeg,
        ReadyAfterFirstExtent,
        LoseReady,
        StartBeforeGrant,
        AcceptShortRead,
        SwallowFirstLegError,
        SwallowSecondLegError,
        ContinueAfterFailure,
        EndBeforeDrained,
        IgnoreCancel,
        IgnoreWindow,
        WindowOfLargest,
        WindowForWhatIsHandedOut,
        HaltAtLargeTensor,
        NeverShrinkWindow,
        LeakSlabOnFailure,
        AcceptDoubleCompletion,
        IgnoreDepth,
        ReleaseQuarantinedSlab,
        HandOutOfOrder,
        SecondLegTwice,
        StartExtentTwice,
    }
}

/// What bounds the read-ahead of a stream: the window, or the next tensor alone where that is larger.
///
/// The next tensor is the first one in hand-out order that the consumer has not taken. All extents up to its last one may
/// start, or the consumer would wait for ever. Any other extent has to fit into the window together with what is read
/// already. Extents are read whole: what else lies in those of the next tensor comes with it.
struct Window {
    bytes: u64,
    /// For each want one more than the number of the last extent that brings bytes of it; 0 for an empty tensor.
    ends: Vec<u32>,
    taken: Vec<bool>,
    /// Position in `layout.order` of the first want that was not taken.
    next: usize,
}

impl Window {
    fn new(bytes: u64, schedule: &Schedule, wants: usize) -> Window {
        let mut ends = vec![0; wants];
        for (i, e) in (1..).zip(&schedule.extents) {
            for p in &schedule.pieces[e.pieces.start as usize..e.pieces.end as usize] {
                ends[p.want as usize] = i;
            }
        }
        Window { bytes, ends, taken: vec![false; wants], next: 0 }
    }

    /// The first want that was not taken.
    fn next(&self, order: &[u32]) -> Option<u32> {
        order.get(self.next).copied()
    }

    /// Whether extent number `extent` may start while `ahead` bytes are read and not taken, `wanted` being its own.
    fn admits(&self, order: &[u32], ahead: u64, (extent, wanted): (usize, u64)) -> bool {
        ahead.saturating_add(wanted) <= self.bytes
            || self.next(order).is_none_or(|next| extent < self.ends[next as usize] as usize)
    }

    /// The consumer took `want`; false if it had done so before.
    fn take(&mut self, order: &[u32], want: u32) -> bool {
        let first = !std::mem::replace(&mut self.taken[want as usize], true);
        while self.next(order).is_some_and(|next| self.taken[next as usize]) {
            self.next += 1;
        }
        first
    }
}

/// See the module's documentation.
pub(crate) struct Engine<S> {
    schedule: Arc<Schedule>,
    layout: Arc<Layout>,
    stages: Vec<Stage>,
    slabs: Vec<Option<S>>,
    /// Next extent to start. Extents start strictly in order: hand-out follows it closely.
    cursor: usize,
    granted: Vec<bool>,
    /// Extents before this one have all their blocks granted.
    all_granted_before: usize,
    landed: VecDeque<u32>,
    first_in_flight: usize,
    second_in_flight: usize,
    depth: usize,
    /// Pieces still to arrive, per want.
    missing: Vec<u32>,
    touched: Vec<bool>,
    /// Next position in `layout.order` to hand out.
    hand_out: usize,
    /// `None`: nobody takes anything before the end, and nothing is bounded.
    window: Option<Window>,
    /// Wanted bytes started and not yet taken.
    ahead: u64,
    bytes_arrived: u64,
    failure: Option<Error>,
    abandoned: bool,
    starved_of_slabs: bool,
    #[cfg(test)]
    pub(crate) mutant: Option<Mutant>,
}

macro_rules! mutated {
    ($self:ident, $mutant:ident) => {{
        #[cfg(test)]
        {
            $self.mutant == Some(Mutant::$mutant)
        }
        #[cfg(not(test))]
        {
            false
        }
    }};
}

impl<S> Engine<S> {
    /// An engine for one load. `window` bounds wanted bytes started and not yet taken (see [`Window`]); `None` for a load
    /// that hands everything out at its end.
    pub(crate) fn new(schedule: Arc<Schedule>, layout: Arc<Layout>, depth: usize, window: Option<u64>) -> Self {
        let extents = schedule.extents.len();
        let mut missing = vec![0; layout.places.len()];
        for piece in &schedule.pieces {
            missing[piece.want as usize] += 1;
        }
        Self {
            stages: vec![Stage::Waiting; extents],
            slabs: std::iter::repeat_with(|| None).take(extents).collect(),
            cursor: 0,
            granted: vec![false; layout.blocks.len()],
            all_granted_before: 0,
            landed: VecDeque::new(),
            first_in_flight: 0,
            second_in_flight: 0,
            depth: depth.max(1),
            missing,
            touched: vec![false; layout.places.len()],
            hand_out: 0,
            window: window.map(|bytes| Window::new(bytes, &schedule, layout.places.len())),
            ahead: 0,
            bytes_arrived: 0,
            failure: None,
            abandoned: false,
            starved_of_slabs: false,
            #[cfg(test)]
            mutant: None,
            schedule,
            layout,
        }
    }

    /// Block memory is there: extents for this block may start.
    pub(crate) fn grant(&mut self, block: u32) {
        self.granted[block as usize] = true;
    }

    /// The next action, or `None` until something finishes or is granted. Second legs come first: they free slabs.
    pub(crate) fn next(&mut self, ring: &mut impl Slabs<Slab = S>) -> Option<Action> {
        self.starved_of_slabs = false;
        if self.failure.is_some() && !mutated!(self, ContinueAfterFailure) {
            return None;
        }
        if let Some(extent) = self.landed.pop_front() {
            self.stages[extent as usize] = Stage::Second;
            self.second_in_flight += 1;
            self.touch(extent);
            if mutated!(self, SecondLegTwice) && extent % 3 == 0 && self.landed.len() < 2 {
                self.landed.push_back(extent);
            }
            return Some(Action::Second { extent });
        }
        let e = self.schedule.extents.get(self.cursor)?;
        if self.first_in_flight >= self.depth && !mutated!(self, IgnoreDepth) {
            return None;
        }
        if !self.window_admits(self.cursor) || self.missing_grant(self.cursor).is_some() {
            return None;
        }
        let extent = self.cursor as u32;
        if e.landing == Landing::Slab {
            match ring.acquire() {
                Ok(Some(slab)) => self.slabs[self.cursor] = Some(slab),
                Ok(None) => {
                    self.starved_of_slabs = true;
                    return None;
                }
                Err(error) => {
                    self.fail(error);
                    return None;
                }
            }
        }
        self.ahead += e.wanted;
        self.first_in_flight += 1;
        self.stages[self.cursor] = Stage::First;
        if e.landing != Landing::Slab {
            self.touch(extent);
        }
        if !(mutated!(self, StartExtentTwice) && self.cursor % 5 == 4) {
            self.cursor += 1;
        }
        Some(Action::First { extent })
    }

    /// A first leg finished: `Ok(bytes)` that arrived, or why not.
    pub(crate) fn first_done(&mut self, ticket: Ticket, result: Result<u64, Error>) {
        let Some(i) = self.expect(ticket, Stage::First) else { return };
        self.first_in_flight -= 1;
        let e = &self.schedule.extents[i];
        let result = match result {
            Ok(n) if n < e.need && !mutated!(self, AcceptShortRead) => {
                Err(Error::new(ErrorKind::Truncated, format!("the read brought {n} of {} bytes and no error", e.need))
                    .range(e.offset..e.offset + e.need))
            }
            other => other,
        };
        match result {
            Err(error) if !mutated!(self, SwallowFirstLegError) => {
                self.drop_extent(i);
                self.set_failure(error);
            }
            _ if self.failure.is_some() => self.drop_extent(i),
            _ if e.landing == Landing::Slab && !mutated!(self, SkipSecondLeg) => {
                self.stages[i] = Stage::Landed;
                if mutated!(self, ReleaseSlabBeforeSecondLeg) {
                    self.slabs[i] = None;
                }
                self.landed.push_back(i as u32);
            }
            _ => self.arrive(i),
        }
    }

    /// A second leg finished.
    pub(crate) fn second_done(&mut self, ticket: Ticket, result: Result<(), Error>) {
        let Some(i) = self.expect(ticket, Stage::Second) else { return };
        self.second_in_flight -= 1;
        match result {
            Err(error) if !mutated!(self, SwallowSecondLegError) => {
                self.drop_extent(i);
                self.set_failure(error);
            }
            _ if self.failure.is_some() => self.drop_extent(i),
            _ => self.arrive(i),
        }
    }

    /// The consumer took want number `want`.
    pub(crate) fn take(&mut self, want: u32) {
        let Some(window) = &mut self.window else { return };
        let first = window.take(&self.layout.order, want);
        if first && !mutated!(self, NeverShrinkWindow) {
            self.ahead = self.ahead.saturating_sub(self.layout.places[want as usize].nbytes);
        }
    }

    /// The next want in hand-out order, if it is ready. Each want is given out once.
    pub(crate) fn ready(&mut self) -> Option<u32> {
        if self.failure.is_some() {
            return None;
        }
        if mutated!(self, HandOutOfOrder) && self.hand_out + 1 < self.layout.order.len() {
            let later = self.layout.order[self.hand_out + 1];
            if self.missing[later as usize] == 0 && later % 4 == 1 {
                self.layout = Arc::new({
                    let mut l = (*self.layout).clone();
                    l.order.swap(self.hand_out, self.hand_out + 1);
                    l
                });
            }
        }
        let want = *self.layout.order.get(self.hand_out)?;
        if self.missing[want as usize] > 0 {
            return None;
        }
        if mutated!(self, LoseReady) && self.hand_out % 7 == 6 {
            self.hand_out += 1;
            return None;
        }
        self.hand_out += 1;
        Some(want)
    }

    /// Ends the load early: nothing new starts, what is in flight is waited for.
    pub(crate) fn cancel(&mut self) {
        if !mutated!(self, IgnoreCancel) {
            self.fail(Error::new(ErrorKind::Cancelled, "the load was cancelled"));
        }
    }

    /// Ends the load with `error`, unless it has failed before or has everything already.
    pub(crate) fn fail(&mut self, error: Error) {
        if !self.has_arrived() {
            self.set_failure(error);
        }
    }

    /// Ends the load with `error` even if everything has arrived: what arrived is not what it should be.
    pub(crate) fn revoke(&mut self, error: Error) {
        self.set_failure(error);
    }

    fn set_failure(&mut self, error: Error) {
        self.failure.get_or_insert(error);
        for extent in std::mem::take(&mut self.landed) {
            self.drop_extent(extent as usize);
        }
    }

    /// Gives up on what is in flight after a stall: returns the slabs that must never be used or freed again, because a
    /// read or copy that hangs may still touch them. Their tickets, should they come back, are ignored.
    pub(crate) fn abandon(&mut self) -> Vec<S> {
        self.abandoned = true;
        self.first_in_flight = 0;
        self.second_in_flight = 0;
        let mut quarantined = Vec::new();
        for (stage, slab) in self.stages.iter_mut().zip(&mut self.slabs) {
            if matches!(stage, Stage::First | Stage::Second) {
                *stage = Stage::Dropped;
                quarantined.extend(slab.take());
            }
        }
        if mutated!(self, ReleaseQuarantinedSlab) {
            quarantined.clear();
        }
        quarantined
    }

    /// Extents in flight, oldest first: for the text of a stall error.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = u32> + '_ {
        self.stages.iter().enumerate().filter(|(_, s)| matches!(s, Stage::First | Stage::Second)).map(|(i, _)| i as u32)
    }

    /// How the load ended; `None` while it goes on or something is still in flight.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        let drained = self.first_in_flight + self.second_in_flight == 0 || mutated!(self, EndBeforeDrained);
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

    /// What the engine waits for when `next` has nothing.
    pub(crate) fn waits_for(&self) -> Wait {
        if self.outcome().is_some() {
            return Wait::Nothing;
        }
        if self.starved_of_slabs {
            // All slabs hold bytes that wait for the device or are being read: the leg with more of them is the slower.
            return match (self.first_in_flight, self.second_in_flight) {
                (0, 0) => Wait::Slabs,
                (first, second) if second >= first => Wait::Device,
                _ => Wait::Source,
            };
        }
        if self.cursor < self.stages.len() && self.failure.is_none() && self.first_in_flight < self.depth {
            if !self.window_admits(self.cursor) {
                return if self.next_is_ready() { Wait::Consumer } else { self.leg() };
            }
            if self.missing_grant(self.cursor).is_some() {
                return if self.first_in_flight + self.second_in_flight == 0 { Wait::Allocation } else { self.leg() };
            }
        }
        self.leg()
    }

    /// Whether the last call of `next` asked for a slab in vain, and it would be worth asking again.
    pub(crate) fn wants_slab(&self) -> bool {
        self.starved_of_slabs && self.failure.is_none()
    }

    /// The slab that extent number `extent` holds.
    pub(crate) fn slab(&self, extent: u32) -> Option<&S> {
        self.slabs[extent as usize].as_ref()
    }

    /// Wants whose destination may no longer be what it was.
    pub(crate) fn touched(&self) -> &[bool] {
        &self.touched
    }

    /// Wanted bytes that have arrived.
    pub(crate) fn bytes_arrived(&self) -> u64 {
        self.bytes_arrived
    }

    /// First legs in flight.
    pub(crate) fn first_in_flight(&self) -> usize {
        self.first_in_flight
    }

    /// Second legs in flight.
    pub(crate) fn second_in_flight(&self) -> usize {
        self.second_in_flight
    }

    /// Blocks, in hand-out order, that the next extents need and that are not granted, as far as the window reaches.
    pub(crate) fn wanted_blocks(&mut self, out: &mut Vec<u32>) {
        // Asked at every turn of the loop, so what is granted already is not gone through again: with everything granted
        // from the start, as into memory of the CPU, a large load would spend most of its time here.
        while self.all_granted_before < self.stages.len() && self.missing_grant(self.all_granted_before).is_none() {
            self.all_granted_before += 1;
        }
        if self.all_granted_before == self.stages.len() {
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

    fn leg(&self) -> Wait {
        if self.first_in_flight > 0 {
            Wait::Source
        } else if self.second_in_flight > 0 {
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
        self.cursor == self.stages.len()
            && self.first_in_flight + self.second_in_flight == 0
            && self.landed.is_empty()
            && self.failure.is_none()
    }

    fn window_admits(&self, i: usize) -> bool {
        self.admits(i, self.ahead)
    }

    fn admits(&self, i: usize, ahead: u64) -> bool {
        let Some(window) = &self.window else { return true };
        if mutated!(self, IgnoreWindow) {
            return true;
        }
        let wanted = self.schedule.extents[i].wanted;
        if mutated!(self, HaltAtLargeTensor) {
            return ahead == 0 || ahead.saturating_add(wanted) <= window.bytes;
        }
        if mutated!(self, WindowOfLargest) {
            let largest = self.layout.places.iter().map(|p| p.nbytes).max().unwrap_or(0);
            return ahead.saturating_add(wanted) <= window.bytes.max(largest)
                || window.admits(&self.layout.order, ahead, (i, wanted));
        }
        if mutated!(self, WindowForWhatIsHandedOut) {
            let next = self.layout.order.get(self.hand_out);
            return ahead.saturating_add(wanted) <= window.bytes
                || next.is_none_or(|&next| i < window.ends[next as usize] as usize);
        }
        window.admits(&self.layout.order, ahead, (i, wanted))
    }

    fn missing_grant(&self, i: usize) -> Option<u32> {
        if mutated!(self, StartBeforeGrant) {
            return None;
        }
        self.blocks_of(i).find(|&b| !self.granted[b as usize])
    }

    fn pieces_of(&self, i: usize) -> &[crate::extent::Piece] {
        let r = &self.schedule.extents[i].pieces;
        &self.schedule.pieces[r.start as usize..r.end as usize]
    }

    /// Blocks that extent `i` touches; repeats only where pieces alternate between blocks.
    fn blocks_of(&self, i: usize) -> impl Iterator<Item = u32> + '_ {
        let mut last = None;
        self.pieces_of(i).iter().map(|p| p.block).filter(move |&b| last.replace(b) != Some(b))
    }

    fn touch(&mut self, extent: u32) {
        let r = &self.schedule.extents[extent as usize].pieces;
        for p in &self.schedule.pieces[r.start as usize..r.end as usize] {
            self.touched[p.want as usize] = true;
        }
    }

    /// The extent behind `ticket`, if it is in the stage that this completion ends. Anything else is a source or device
    /// that completes twice, or a late echo of a quarantined ticket.
    fn expect(&mut self, ticket: Ticket, stage: Stage) -> Option<usize> {
        let i = ticket.0 as usize;
        match self.stages.get(i) {
            Some(&s) if s == stage => Some(i),
            Some(Stage::Dropped) if self.abandoned => None,
            Some(_) if mutated!(self, AcceptDoubleCompletion) => {
                self.first_in_flight += usize::from(stage == Stage::First);
                self.second_in_flight += usize::from(stage == Stage::Second);
                Some(i)
            }
            _ => {
                let text = format!("ticket {i} completed out of turn; please report this");
                self.set_failure(Error::new(ErrorKind::Internal, text));
                None
            }
        }
    }

    fn arrive(&mut self, i: usize) {
        self.stages[i] = Stage::Arrived;
        self.slabs[i] = None;
        self.bytes_arrived += self.schedule.extents[i].wanted;
        let r = self.schedule.extents[i].pieces.clone();
        for p in &self.schedule.pieces[r.start as usize..r.end as usize] {
            let missing = &mut self.missing[p.want as usize];
            *missing = if mutated!(self, ReadyAfterFirstExtent) { 0 } else { missing.saturating_sub(1) };
        }
    }

    fn drop_extent(&mut self, i: usize) {
        self.stages[i] = Stage::Dropped;
        if mutated!(self, LeakSlabOnFailure) {
            std::mem::forget(self.slabs[i].take());
        }
        self.slabs[i] = None;
    }
}
