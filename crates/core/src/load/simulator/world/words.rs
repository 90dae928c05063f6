//! Words between ranks, and their delays.

use super::*;

impl World<'_> {
    /// A process has closed its connections. `abruptly`: without having said so before.
    pub(super) fn close(&mut self, rank: u32, abruptly: bool) {
        for to in (0..self.ranks.len() as u32).filter(|to| *to != rank) {
            let at = self.now + self.delay(rank, to);
            if abruptly {
                self.tell(rank, to, Said::Closed);
            }
            self.push(at, Step::Breaks { from: rank, to });
        }
    }

    pub(super) fn delay(&self, from: u32, to: u32) -> Time {
        if self.node_of(from) == self.node_of(to) {
            20_000
        } else {
            self.machines.latency
        }
    }

    /// Says something to another rank. Words come in order.
    pub(super) fn tell(&mut self, from: u32, to: u32, said: Said) {
        let mut at = self.now + self.delay(from, to);
        if self.machines.lost > 0 && (self.late_words == Some(from) || self.rng.one_in(100)) {
            at += self.machines.lost;
        }
        let last = &mut self.ranks[from as usize].last_word[to as usize];
        *last = at.max(*last);
        let at = *last;
        self.push(at, Step::Says { from, to, said });
    }

    pub(super) fn say(&mut self, rank: u32, said: &Said) {
        let now = self.instant();
        let count = self.ranks.len();
        (0..count - 1).for_each(|at| self.ranks[rank as usize].watch.said(now, at));
        if count > FEW {
            let at = self.now + self.machines.latency;
            return self.push(at, Step::SaysToAll { from: rank, said: said.clone() });
        }
        for to in (0..count as u32).filter(|to| *to != rank) {
            self.tell(rank, to, said.clone());
        }
    }

    pub(super) fn instant(&self) -> Instant {
        self.begun + Duration::from_nanos(self.now)
    }

    pub(super) fn hear(&mut self, from: u32, to: u32, said: Said) {
        if self.ranks[to as usize].phase == Phase::Leaves {
            if let (Said::Closed, Some(at)) = (said, self.ranks[to as usize].watch.number_of(from)) {
                self.ranks[to as usize].watch.answered(at);
            }
            return;
        }
        if !matches!(said, Said::Closed) {
            self.on(to, from, Heard::Speech);
        }
        match said {
            Said::Alive => {}
            Said::Introduces(shares) => self.introduced(to, from, shares),
            Said::Far => self.is_far(to, from),
            Said::Complete => self.on(to, from, Heard::Complete),
            Said::Failed(culprit, why) => self.on(to, from, Heard::Failed(Some(culprit), why)),
            Said::Closed => self.on(to, from, Heard::Gone("it has closed its connection".to_owned())),
        }
    }

    pub(super) fn on(&mut self, rank: u32, from: u32, heard: Heard) {
        let now = self.instant();
        let watch = &mut self.ranks[rank as usize].watch;
        let Some(at) = watch.number_of(from) else { return };
        if let Some(error) = watch.on(now, at, heard) {
            self.peers_fail(rank, error);
        }
    }

    /// As `Serving::set_failure`: nothing more is sent or received.
    pub(super) fn peers_fail(&mut self, rank: u32, error: Error) {
        let r = &mut self.ranks[rank as usize];
        if r.failure.is_some() || matches!(r.phase, Phase::Leaves | Phase::Over) {
            return;
        }
        r.failure = Some(error);
    }
}
