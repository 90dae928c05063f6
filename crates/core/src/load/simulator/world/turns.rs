//! The turns of a rank: it looks at the others, drives its engine, and ends.

use super::*;

impl World<'_> {
    /// A rank does all that it can.
    pub(super) fn turn(&mut self, rank: u32) {
        if self.ranks[rank as usize].phase == Phase::Over {
            return;
        }
        let (now, instant) = (self.now, self.instant());
        // The thread of the connections.
        let planned = self.begun + Duration::from_nanos(self.ranks[rank as usize].planned);
        if matches!(self.ranks[rank as usize].phase, Phase::Loads | Phase::Waits) {
            let due = self.ranks[rank as usize].planned <= now || self.ranks.len() <= FEW;
            if due {
                if self.ranks[rank as usize].watch.wakes(instant, planned) {
                    self.say(rank, &Said::Alive);
                }
                if let Some(error) = self.ranks[rank as usize].watch.look(instant) {
                    self.peers_fail(rank, error);
                }
            }
            let r = &mut self.ranks[rank as usize];
            if now - r.reported >= REPORTED && r.failure.is_none() {
                r.reported = now;
                if let Some(awaiting) = r.awaited.values().next() {
                    r.engine.on(now, Event::Received(ticket(awaiting.extent)));
                }
            }
        }
        // The engine thread.
        self.ranks[rank as usize].engine.turn(now);
        if let (Some(failure), false) = (self.ranks[rank as usize].failure.clone(), self.ranks[rank as usize].told) {
            self.ranks[rank as usize].told = true;
            self.send_nothing(rank, &failure);
            self.ranks[rank as usize].engine.on(now, Event::Failed(failure));
        }
        loop {
            let r = &mut self.ranks[rank as usize];
            let Some(action) = r.engine.next(now, &mut r.ring) else { break };
            self.carry_out(rank, action);
        }
        let r = &mut self.ranks[rank as usize];
        while r.engine.ready().is_some() {}
        self.slabs_are_few(rank);
        self.returns(rank);
        self.goes_on(rank);
        self.plan_wake(rank);
    }

    /// No more parcels hold slabs than may be sent at a time.
    pub(super) fn slabs_are_few(&mut self, rank: u32) {
        let r = &mut self.ranks[rank as usize];
        r.held.retain(|&extent| r.engine.slab(extent).is_some());
        if r.sent_most.is_some_and(|most| r.held.len() > most) {
            self.fault = Some(format!("rank {rank} holds {} slabs of parcels that it sends", r.held.len()));
        }
    }

    /// Takes a rank through the phases after its engine's end.
    pub(super) fn goes_on(&mut self, rank: u32) {
        let (now, instant) = (self.now, self.instant());
        let r = &mut self.ranks[rank as usize];
        if r.phase == Phase::Loads {
            match r.engine.outcome() {
                Some(Ok(())) => {
                    r.phase = Phase::Waits;
                    if r.watch.complete() {
                        self.say(rank, &Said::Complete);
                    }
                }
                Some(Err(error)) => self.fail(rank, error),
                None => {}
            }
        }
        let r = &mut self.ranks[rank as usize];
        if r.phase == Phase::Waits {
            if let Some(error) = r.failure.clone() {
                self.fail(rank, error);
            } else if r.watch.all_complete() {
                r.outcome = Some((now, Ok(())));
                r.phase = Phase::Leaves;
                r.watch.leave(instant, None);
                self.say(rank, &Said::Closed);
            }
        }
        let r = &mut self.ranks[rank as usize];
        if r.phase == Phase::Leaves && r.watch.has_left(instant) {
            r.phase = Phase::Over;
            self.changed = true;
            if let Some((at, _)) = &mut r.outcome {
                *at = now;
            }
            self.close(rank, false);
        }
    }

    /// As `Peers::fail`, and the end of its thread.
    pub(super) fn fail(&mut self, rank: u32, error: Error) {
        let culprit = error.peer().map_or(rank, |peer| peer.0);
        let text = if error.peer().is_some() { error.message().to_owned() } else { error.to_string() };
        let instant = self.instant();
        let r = &mut self.ranks[rank as usize];
        r.outcome = Some((self.now, Err(error)));
        r.phase = Phase::Leaves;
        r.watch.leave(instant, Some(culprit));
        self.say(rank, &Said::Failed(culprit, text));
        self.say(rank, &Said::Closed);
    }

    pub(super) fn plan_wake(&mut self, rank: u32) {
        let instant = self.instant();
        let many = self.ranks.len() > FEW;
        let r = &mut self.ranks[rank as usize];
        if r.phase == Phase::Over
            || (many && r.planned > self.now && r.wakes_at != Time::MAX && r.phase != Phase::Leaves)
        {
            return;
        }
        let pause = match r.phase {
            Phase::Leaves => 2 * MS,
            // At least one, as `poll` waits.
            _ => (r.watch.until(instant).as_nanos() as Time).clamp(MS, REPORTED),
        };
        let mut at = self.now + pause;
        r.planned = at;
        if let (Phase::Loads, Some(deadline)) = (r.phase, r.engine.deadline()) {
            at = at.min(deadline.max(self.now + 1));
        }
        if at < r.wakes_at {
            r.wakes_at = at;
            self.push(at, Step::Wakes(rank));
        }
    }
}
