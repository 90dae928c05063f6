//! The state of all ranks (alive, complete, failed): a rank's conclusions from what it hears, and its own words.
//!
//! It has no sockets, no thread and no clock: the time is an argument. [`exchange`](super::exchange) tells it what was heard
//! ([`on`](PeerWatch::on)), looks at it regularly ([`look`](PeerWatch::look)), and sleeps [`until`](PeerWatch::until) it has to look again. So a
//! simulator of many ranks can use it as it is.
//!
//! Four rules:
//!
//! - **Silence.** A rank that says nothing for `silence` is dead. Before its first word it has as long as ranks have to come
//!   together (`patience`). Time in which this rank itself was stopped does not count.
//! - **Gone.** A rank whose connection for words is closed is gone, unless both have said that they have everything.
//! - **Broken.** A broken connection for bytes may be the fault of a third rank, whose failure its other end has heard of. So a
//!   moment passes in which the other connection may say why.
//! - **Together.** A load that is complete ends when all ranks have said that they are.

use crate::error::{Error, ErrorKind};
use std::time::{Duration, Instant};

/// A rank says "alive" this many times within the silence after which it counts as dead.
const WORDS: u32 = 8;
/// How long a rank that has failed tries to tell the others, and how long a broken connection for bytes waits for a word.
const FAREWELL: Duration = Duration::from_millis(500);

/// A message about another rank.
#[derive(Debug, Clone)]
pub(crate) enum Heard {
    /// It has said something, whatever it is.
    Speech,
    /// It has sent a whole parcel, or offered one.
    Parcel,
    /// It has everything.
    Complete,
    /// Its load has failed: whose failure it is, as far as it says, and what happened.
    Failed(Option<u32>, String),
    /// Its connection for words is closed, and why.
    Gone(String),
    /// Its connection for bytes is broken, and why.
    Broken(String),
}

/// The state of another rank.
#[derive(Debug)]
struct Known {
    rank: u32,
    host: String,
    last_heard: Instant,
    last_said: Instant,
    /// It has said something: its thread runs.
    speaks: bool,
    /// It has everything.
    complete: bool,
    /// Its connection for words is closed.
    gone: bool,
    /// When its connection for bytes broke, and why. It may be the rank's own failure, or that of a third one: then its other
    /// connection says so.
    broken: Option<(Instant, String)>,
}

/// The state of all other ranks. See the module's documentation.
#[derive(Debug)]
pub(crate) struct PeerWatch {
    rank: u32,
    silence: Duration,
    patience: Duration,
    /// In the order of the ranks.
    others: Vec<Known>,
    said_complete: bool,
    /// How many others have not everything yet.
    incomplete: usize,
    /// When it stops telling the others that its load has failed or is over, and whose failure that is.
    leaves: Option<(Instant, Option<u32>)>,
}

impl PeerWatch {
    /// The watch of `rank` over these others: (rank, host), in the order of the ranks.
    pub(crate) fn new(
        rank: u32,
        others: impl IntoIterator<Item = (u32, String)>,
        (silence, patience): (Duration, Duration),
        now: Instant,
    ) -> PeerWatch {
        let known = |(rank, host)| Known {
            rank,
            host,
            last_heard: now,
            last_said: now,
            speaks: false,
            complete: false,
            gone: false,
            broken: None,
        };
        let others: Vec<Known> = others.into_iter().map(known).collect();
        let incomplete = others.len();
        PeerWatch { rank, silence, patience, others, said_complete: false, incomplete, leaves: None }
    }

    /// The number of a rank among the others.
    pub(crate) fn number_of(&self, rank: u32) -> Option<usize> {
        self.others.binary_search_by_key(&rank, |other| other.rank).ok()
    }

    /// Whether its connection for words is closed.
    pub(crate) fn is_gone(&self, at: usize) -> bool {
        self.others[at].gone
    }

    /// Whether its connection for bytes is broken.
    pub(crate) fn is_broken(&self, at: usize) -> bool {
        self.others[at].broken.is_some()
    }

    /// Something was heard of another rank. Gives why the load cannot go on, if that is the reason.
    pub(crate) fn on(&mut self, now: Instant, at: usize, heard: Heard) -> Option<Error> {
        let parted = self.has_parted(at);
        let own = self.rank;
        let other = &mut self.others[at];
        match heard {
            Heard::Speech => {
                other.last_heard = now;
                other.speaks = true;
            }
            Heard::Parcel => other.last_heard = now,
            Heard::Complete => self.incomplete -= usize::from(!std::mem::replace(&mut other.complete, true)),
            Heard::Failed(culprit, why) => {
                let (rank, host) = (other.rank, other.host.clone());
                let culprit = culprit.unwrap_or(rank);
                if culprit == rank || culprit == own {
                    return Some(peer_error(rank, &host, &format!("has failed: {why}")).because(why));
                }
                let of = self.number_of(culprit).map(|at| self.others[at].host.clone()).unwrap_or_default();
                let text = format!("{why} (rank {rank} says so)");
                return Some(Error::new(ErrorKind::Peer, text).of_peer(culprit, of).because(why));
            }
            Heard::Gone(why) => {
                other.gone = true;
                return (!parted).then(|| lost(other, &format!("is gone: {why}"), now));
            }
            Heard::Broken(why) => {
                other.broken = Some((now, why));
            }
        }
        None
    }

    /// This rank has everything. True: it has to say so to all.
    pub(crate) fn complete(&mut self) -> bool {
        !std::mem::replace(&mut self.said_complete, true)
    }

    /// Whether every rank has everything, as far as this one has heard.
    pub(crate) fn all_complete(&self) -> bool {
        self.said_complete && self.incomplete == 0
    }

    /// Something was said to another rank.
    pub(crate) fn said(&mut self, now: Instant, at: usize) {
        self.others[at].last_said = now;
    }

    /// Whether it is time to say that this rank is alive. `planned`: when this look was to be at the latest. If that is long ago,
    /// the process itself was stopped: it has heard nobody, and that says nothing about them.
    pub(crate) fn wakes(&mut self, now: Instant, planned: Instant) -> bool {
        if now.saturating_duration_since(planned) > self.silence / 2 {
            self.others.iter_mut().for_each(|other| other.last_heard = now);
        }
        self.others.iter().any(|other| now - other.last_said >= self.silence / WORDS)
    }

    /// Looks whether the others are alive. Gives why the load cannot go on, if one is not.
    pub(crate) fn look(&self, now: Instant) -> Option<Error> {
        let silent = |at: &usize| !self.has_parted(*at) && now - self.others[*at].last_heard >= self.limit(*at);
        let silent = (0..self.others.len()).find(silent);
        if let Some(other) = silent.map(|at| &self.others[at]) {
            let seconds = (now - other.last_heard).as_secs_f64();
            let why =
                format!("has said nothing for {seconds:.1} s: its process was stopped, or its host or network is down");
            return Some(lost(other, &why, now));
        }
        let broken = |other: &&Known| other.broken.as_ref().is_some_and(|(since, _)| now - *since >= FAREWELL);
        let broken = self.others.iter().find(broken).filter(|_| !self.said_complete);
        let (_, why) = broken.and_then(|other| other.broken.as_ref())?;
        broken.map(|other| lost(other, &format!("is gone: {why}"), now))
    }

    /// How long nobody has to look, if nothing is heard.
    pub(crate) fn until(&self, now: Instant) -> Duration {
        let mut pause = self.silence / WORDS;
        if self.others.iter().any(|other| other.broken.is_some()) {
            pause = pause.min(FAREWELL / 4);
        }
        let awaited = (0..self.others.len()).filter(|at| !self.has_parted(*at));
        let deadlines = awaited.map(|at| self.others[at].last_heard + self.limit(at));
        deadlines.fold(pause, |pause, end| pause.min(end.saturating_duration_since(now)))
    }

    /// This rank's load is over: it leaves when the others have heard so, or after a moment. `culprit`: the rank whose failure it
    /// is, which may not answer.
    pub(crate) fn leave(&mut self, now: Instant, culprit: Option<u32>) {
        self.leaves = Some((now + FAREWELL, culprit));
    }

    /// A rank that was told has closed its connection.
    pub(crate) fn answered(&mut self, at: usize) {
        self.others[at].gone = true;
    }

    /// Whether it can close its connections, after [`leave`](Self::leave).
    pub(crate) fn has_left(&self, now: Instant) -> bool {
        let Some((until, culprit)) = self.leaves else { return false };
        now >= until || self.others.iter().all(|other| other.gone || Some(other.rank) == culprit)
    }

    /// Whether neither of the two needs the other any more.
    fn has_parted(&self, at: usize) -> bool {
        self.said_complete && self.others[at].complete
    }

    /// How long a rank may say nothing.
    fn limit(&self, at: usize) -> Duration {
        match self.others[at].speaks {
            true => self.silence,
            false => self.patience.max(self.silence),
        }
    }
}

pub(super) fn peer_error(rank: u32, host: &str, why: &str) -> Error {
    Error::new(ErrorKind::Peer, format!("rank {rank} ({host}) {why}")).of_peer(rank, host)
}

/// The error for a rank that is given up, and did not say why.
fn lost(other: &Known, why: &str, now: Instant) -> Error {
    let silence = now.saturating_duration_since(other.last_heard);
    peer_error(other.rank, &other.host, why).because(why).heard_ago(silence)
}

#[cfg(test)]
#[allow(dead_code, unused_parens, clippy::all)]
pub(crate) mod mutated {
    use super::*;

    mutants::seed!(Lapse, "src/peers/watch.rs", "src/load/simulator/lapses.txt");
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn watch(ranks: u32) -> (PeerWatch, Instant) {
        let now = Instant::now();
        let others = (1..ranks).map(|rank| (rank, format!("host-{rank}")));
        (PeerWatch::new(0, others, (5 * SECOND, 60 * SECOND), now), now)
    }

    fn culprit(error: Option<Error>) -> Option<u32> {
        error.and_then(|error| error.peer().map(|peer| peer.0))
    }

    #[test]
    fn a_rank_that_has_spoken_may_be_silent_for_its_timeout_and_one_that_has_not_for_as_long_as_ranks_may_take() {
        let (mut watch, begun) = watch(3);
        assert!(watch.on(begun + SECOND, 0, Heard::Speech).is_none());
        assert!(watch.look(begun + 6 * SECOND - SECOND / 100).is_none());
        assert_eq!(culprit(watch.look(begun + 6 * SECOND)), Some(1));
        assert!(watch.on(begun + 59 * SECOND, 0, Heard::Speech).is_none());
        assert!(watch.look(begun + 60 * SECOND - SECOND / 100).is_none());
        assert_eq!(culprit(watch.look(begun + 60 * SECOND)), Some(2));
    }

    #[test]
    fn it_is_looked_again_when_the_first_silence_is_over() {
        let (mut watch, begun) = watch(2);
        assert_eq!(watch.until(begun), 5 * SECOND / WORDS);
        watch.on(begun, 0, Heard::Speech);
        assert_eq!(watch.until(begun + 5 * SECOND - SECOND / 10), SECOND / 10);
        watch.on(begun, 0, Heard::Broken("reset".to_owned()));
        assert_eq!(watch.until(begun), FAREWELL / 4);
    }

    #[test]
    fn a_process_that_was_stopped_itself_blames_nobody() {
        let (mut watch, begun) = watch(2);
        watch.on(begun, 0, Heard::Speech);
        let resumed = begun + 100 * SECOND;
        assert!(watch.wakes(resumed, begun + SECOND), "it says that it is alive");
        assert!(watch.look(resumed).is_none());
        assert_eq!(culprit(watch.look(resumed + 5 * SECOND)), Some(1));
    }

    #[test]
    fn a_broken_connection_waits_for_the_word_that_says_whose_fault_it_is() {
        let (mut watch, begun) = watch(4);
        assert!(watch.on(begun, 0, Heard::Broken("reset".to_owned())).is_none());
        assert!(watch.look(begun + FAREWELL - SECOND / 100).is_none());
        let told = watch.on(begun + FAREWELL / 2, 0, Heard::Failed(Some(3), "disk".to_owned()));
        let told = told.expect("a failure");
        assert_eq!(told.peer().map(|peer| (peer.0, peer.1)), Some((3, "host-3")));
        assert_eq!((told.why(), told.silence()), (Some("disk"), None));
        let lost = watch.look(begun + FAREWELL).expect("a failure");
        assert_eq!(lost.peer().map(|peer| peer.0), Some(1), "if nobody says why");
        assert_eq!((lost.why(), lost.silence()), (Some("is gone: reset"), Some(FAREWELL)));
    }

    #[test]
    fn ranks_that_have_everything_may_go_and_be_silent() {
        let (mut watch, begun) = watch(2);
        watch.on(begun, 0, Heard::Speech);
        watch.on(begun, 0, Heard::Complete);
        assert!(!watch.all_complete());
        assert!(watch.complete() && !watch.complete(), "it is said once");
        assert!(watch.all_complete());
        assert!(watch.on(begun, 0, Heard::Gone("closed".to_owned())).is_none());
        assert!(watch.look(begun + 50 * SECOND).is_none());
    }

    #[test]
    fn a_rank_leaves_when_all_but_the_culprit_have_heard_or_after_half_a_second() {
        let (mut watch, begun) = watch(3);
        assert!(!watch.has_left(begun + SECOND), "it has not begun to");
        watch.leave(begun, Some(2));
        assert!(!watch.has_left(begun));
        watch.answered(0);
        assert!(watch.has_left(begun));
        let (mut watch, begun) = self::watch(3);
        watch.leave(begun, None);
        assert!(!watch.has_left(begun + FAREWELL - SECOND / 100) && watch.has_left(begun + FAREWELL));
    }
}
