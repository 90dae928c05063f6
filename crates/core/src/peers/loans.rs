//! Loans of slabs between the ranks of one machine: which rank reads which parcel out of another rank's slab, and when that
//! slab is free.
//!
//! It has no sockets, no memory and no clock, so a simulator of many ranks can use it as it is.
//!
//! The *lender* has read a parcel into a slab that its neighbours map. It offers the parcel to each of them, and sends it
//! through a socket to the other ranks. The *borrower* copies what it wants out of the slab, and returns the parcel. Four rules:
//!
//! - **Held.** A slab is free when every borrower has returned its parcel and every socket has taken it. Until then nobody
//!   writes to it.
//! - **Once.** A parcel comes to a rank once: offered or sent. A borrower returns it once, after its copies have ended.
//! - **Refused.** A borrower that cannot map a slab refuses the parcel. It gets that one, and all later ones, through the
//!   socket.
//! - **Given up.** A lender whose load fails does not wait for its borrowers. A slab that one of them may still read is never
//!   used again: its memory goes when the last of them has let go of it.

use crate::extent::Ticket;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The way of parcels to another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParcelWay {
    /// Not known yet: the two ranks are finding out whether they share slabs.
    Undecided,
    /// The rank reads them out of this rank's slab.
    Slab,
    /// They go through a socket.
    Socket,
}

/// A parcel that this rank has read for others.
#[derive(Debug)]
struct Lent {
    ticket: Ticket,
    /// Ranks that have not returned it, or not received all of it.
    left: usize,
    held_by: Vec<usize>,
}

/// A parcel that was given up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) parcel: u32,
    pub(crate) ticket: Ticket,
    /// A borrower may still read its slab.
    pub(crate) held: bool,
}

/// A message that breaks the rules: the text says which.
pub(crate) type Breach = String;

/// The loans of one rank. Other ranks are known by their numbers from 0. An `O` says where a parcel lies.
#[derive(Debug)]
pub(crate) struct Loans<O> {
    ways: Vec<ParcelWay>,
    lent: BTreeMap<u32, Lent>,
    /// Parcels for ranks whose way is undecided.
    waiting: Vec<(usize, u32)>,
    /// Parcels that this rank's engine waits for.
    awaited: HashSet<u32>,
    /// Parcels that were offered before the engine asked for them, and by which rank.
    offered: HashMap<u32, (usize, O)>,
    /// Parcels that this rank reads out of another one's slab.
    borrowed: HashMap<u32, usize>,
}

impl<O> Loans<O> {
    /// The loans of a rank that has these ways to the others.
    pub(crate) fn new(ways: Vec<ParcelWay>) -> Loans<O> {
        let (lent, waiting, awaited) = (BTreeMap::new(), Vec::new(), HashSet::new());
        Loans { ways, lent, waiting, awaited, offered: HashMap::new(), borrowed: HashMap::new() }
    }

    /// The way to a rank.
    pub(crate) fn way(&self, at: usize) -> ParcelWay {
        self.ways[at]
    }

    /// At least one way is undecided.
    pub(crate) fn is_undecided(&self) -> bool {
        self.ways.contains(&ParcelWay::Undecided)
    }

    /// This rank has read a parcel for these others, at least one. Gives the way to each of them.
    pub(crate) fn lend(&mut self, parcel: u32, ticket: Ticket, to: &[usize]) -> Vec<(usize, ParcelWay)> {
        let mut lent = Lent { ticket, left: to.len(), held_by: Vec::new() };
        let ways: Vec<(usize, ParcelWay)> = to.iter().map(|&at| (at, self.ways[at])).collect();
        for &(at, way) in &ways {
            match way {
                ParcelWay::Slab => lent.held_by.push(at),
                ParcelWay::Undecided => self.waiting.push((at, parcel)),
                ParcelWay::Socket => {}
            }
        }
        self.lent.insert(parcel, lent);
        ways
    }

    /// The way to a rank is known now. Gives the parcels that wait for it.
    pub(crate) fn decide(&mut self, at: usize, way: ParcelWay) -> Vec<u32> {
        self.ways[at] = way;
        let (these, others) = std::mem::take(&mut self.waiting).into_iter().partition(|(rank, _)| *rank == at);
        self.waiting = others;
        let these: Vec<(usize, u32)> = these;
        let parcels: Vec<u32> = these.into_iter().map(|(_, parcel)| parcel).collect();
        if way == ParcelWay::Slab {
            for parcel in &parcels {
                if let Some(lent) = self.lent.get_mut(parcel) {
                    lent.held_by.push(at);
                }
            }
        }
        parcels
    }

    /// A borrower has returned a parcel. Gives its ticket if nobody else needs the slab. `again`: the borrower takes later parcels
    /// out of slabs too.
    pub(crate) fn returned(&mut self, at: usize, parcel: u32, again: bool) -> Result<Option<Ticket>, Breach> {
        self.no_longer_holds(at, parcel, "returns")?;
        if !again {
            self.ways[at] = ParcelWay::Socket;
        }
        Ok(self.leaves(parcel))
    }

    /// A borrower cannot map the slab of a parcel: it has to be sent, and so have all later ones.
    pub(crate) fn refused(&mut self, at: usize, parcel: u32) -> Result<(), Breach> {
        self.no_longer_holds(at, parcel, "refuses")?;
        self.ways[at] = ParcelWay::Socket;
        Ok(())
    }

    fn no_longer_holds(&mut self, at: usize, parcel: u32, does: &str) -> Result<(), Breach> {
        let lent = self.lent.get_mut(&parcel);
        let held = lent.and_then(|lent| Some((lent.held_by.iter().position(|rank| *rank == at)?, lent)));
        let Some((number, lent)) = held else {
            return Err(format!("it {does} parcel {parcel}, which it does not hold"));
        };
        lent.held_by.swap_remove(number);
        Ok(())
    }

    /// A socket has taken a parcel to its end. Gives its ticket if nobody else needs the slab.
    pub(crate) fn sent(&mut self, parcel: u32) -> Option<Ticket> {
        self.leaves(parcel)
    }

    fn leaves(&mut self, parcel: u32) -> Option<Ticket> {
        let lent = self.lent.get_mut(&parcel)?;
        lent.left -= 1;
        if lent.left > 0 {
            return None;
        }
        self.lent.remove(&parcel).map(|lent| lent.ticket)
    }

    /// Nobody waits for borrowers and sockets any more.
    pub(crate) fn give_up(&mut self) -> Vec<GivenUp> {
        self.waiting.clear();
        let lent = std::mem::take(&mut self.lent);
        let given_up =
            |(parcel, lent): (u32, Lent)| GivenUp { parcel, ticket: lent.ticket, held: !lent.held_by.is_empty() };
        lent.into_iter().map(given_up).collect()
    }

    /// The engine waits for a parcel. Gives the offer, if it was offered already.
    pub(crate) fn awaits(&mut self, parcel: u32) -> Option<O> {
        if let Some((at, offer)) = self.offered.remove(&parcel) {
            self.borrowed.insert(parcel, at);
            return Some(offer);
        }
        self.awaited.insert(parcel);
        None
    }

    /// Another rank offers a parcel. Gives the offer back if the engine waits for it: else it is kept until then.
    pub(crate) fn offers(&mut self, at: usize, parcel: u32, offer: O) -> Result<Option<O>, Breach> {
        if self.awaited.remove(&parcel) {
            self.borrowed.insert(parcel, at);
            return Ok(Some(offer));
        }
        if self.borrowed.contains_key(&parcel) || self.offered.insert(parcel, (at, offer)).is_some() {
            return Err(format!("it offers parcel {parcel} twice"));
        }
        Ok(None)
    }

    /// A parcel has come through a socket.
    pub(crate) fn received(&mut self, parcel: u32) {
        self.awaited.remove(&parcel);
    }

    /// The copies of a parcel have ended. Gives the rank that has to hear so.
    pub(crate) fn returns(&mut self, parcel: u32) -> Option<usize> {
        self.borrowed.remove(&parcel)
    }
}

#[cfg(test)]
#[allow(dead_code, unused_parens, clippy::all)]
pub(crate) mod mutated {
    use super::*;

    mutants::seed!(BadLoan, "src/peers/loans.rs", "src/load/simulator/loans.txt");
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARCEL: u32 = 7;
    const TICKET: Ticket = Ticket(3);

    fn loans(ways: &[ParcelWay]) -> Loans<&'static str> {
        Loans::new(ways.to_vec())
    }

    #[test]
    fn a_slab_is_free_when_every_borrower_has_returned_it_and_every_socket_has_taken_it() {
        let mut loans = loans(&[ParcelWay::Slab, ParcelWay::Socket, ParcelWay::Slab]);
        let ways = loans.lend(PARCEL, TICKET, &[0, 1, 2]);
        assert_eq!(ways, [(0, ParcelWay::Slab), (1, ParcelWay::Socket), (2, ParcelWay::Slab)]);
        assert_eq!(loans.returned(2, PARCEL, true), Ok(None));
        assert_eq!(loans.sent(PARCEL), None);
        assert_eq!(loans.returned(0, PARCEL, true), Ok(Some(TICKET)));
    }

    #[test]
    fn a_parcel_waits_until_the_way_to_its_rank_is_known() {
        for (way, held) in [(ParcelWay::Slab, true), (ParcelWay::Socket, false)] {
            let mut loans = loans(&[ParcelWay::Undecided, ParcelWay::Undecided]);
            assert!(loans.is_undecided());
            assert_eq!(loans.lend(PARCEL, TICKET, &[0]), [(0, ParcelWay::Undecided)]);
            assert!(loans.decide(1, way).is_empty(), "it is for another");
            assert_eq!(loans.decide(0, way), [PARCEL]);
            assert!(loans.decide(0, way).is_empty(), "once");
            assert_eq!(loans.returned(0, PARCEL, true).is_ok(), held);
        }
    }

    #[test]
    fn a_refused_parcel_is_sent_and_so_are_all_later_ones() {
        let mut loans = loans(&[ParcelWay::Slab]);
        loans.lend(PARCEL, TICKET, &[0]);
        assert_eq!(loans.refused(0, PARCEL), Ok(()));
        assert!(loans.refused(0, PARCEL).is_err() && loans.returned(0, PARCEL, true).is_err());
        assert_eq!(loans.way(0), ParcelWay::Socket);
        assert_eq!(loans.sent(PARCEL), Some(TICKET));
        assert_eq!(loans.lend(PARCEL + 1, TICKET, &[0]), [(0, ParcelWay::Socket)]);
    }

    #[test]
    fn a_return_of_something_else_is_a_breach() {
        let mut loans = loans(&[ParcelWay::Slab, ParcelWay::Slab]);
        loans.lend(PARCEL, TICKET, &[0]);
        for (at, parcel) in [(1, PARCEL), (0, PARCEL + 1)] {
            assert!(loans.returned(at, parcel, true).unwrap_err().contains("does not hold"));
        }
        assert_eq!(loans.returned(0, PARCEL, true), Ok(Some(TICKET)));
        assert!(loans.returned(0, PARCEL, true).is_err(), "twice");
    }

    #[test]
    fn a_borrower_that_takes_no_more_out_of_slabs_keeps_those_that_it_has() {
        let mut loans = loans(&[ParcelWay::Slab]);
        loans.lend(PARCEL, TICKET, &[0]);
        loans.lend(PARCEL + 1, TICKET, &[0]);
        assert_eq!(loans.returned(0, PARCEL, false), Ok(Some(TICKET)));
        assert_eq!(loans.lend(PARCEL + 2, TICKET, &[0]), [(0, ParcelWay::Socket)]);
        assert_eq!(loans.returned(0, PARCEL + 1, true), Ok(Some(TICKET)));
        assert_eq!(loans.way(0), ParcelWay::Socket);
    }

    #[test]
    fn a_lender_that_gives_up_knows_which_slabs_may_still_be_read() {
        let mut loans = loans(&[ParcelWay::Slab, ParcelWay::Socket, ParcelWay::Undecided]);
        for (parcel, to) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
            loans.lend(parcel, Ticket(parcel.into()), &[to]);
        }
        assert_eq!(loans.returned(0, 3, true), Ok(Some(Ticket(3))));
        let held: Vec<(u64, bool)> = loans.give_up().iter().map(|one| (one.ticket.0, one.held)).collect();
        assert_eq!(held, [(0, true), (1, false), (2, false)]);
        assert!(loans.decide(2, ParcelWay::Slab).is_empty());
    }

    #[test]
    fn an_offer_waits_for_the_engine_and_the_engine_for_an_offer() {
        let mut loans = loans(&[ParcelWay::Slab]);
        assert_eq!(loans.offers(0, PARCEL, "early"), Ok(None));
        assert!(loans.offers(0, PARCEL, "twice").is_err());
        assert_eq!(loans.awaits(PARCEL), Some("twice"));
        assert!(loans.offers(0, PARCEL, "again").is_err());
        assert_eq!((loans.returns(PARCEL), loans.returns(PARCEL)), (Some(0), None));
        assert_eq!(loans.awaits(PARCEL + 1), None);
        assert_eq!(loans.offers(0, PARCEL + 1, "late"), Ok(Some("late")));
        assert_eq!(loans.awaits(PARCEL + 2), None);
        loans.received(PARCEL + 2);
        assert_eq!(loans.returns(PARCEL + 2), None, "it came through a socket");
    }
}
