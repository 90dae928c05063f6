//! Slabs that ranks of one node lend each other: how they find each other, and what they say on their links. As
//! `peers/neighbours.rs` has it.

use super::slabs::{Held, SlabName, SlabUse};
use super::*;
use crate::extent::Lane;
use crate::peers::loans::mutated::GivenUp;
use crate::peers::loans::ParcelWay;

/// A message on the link of two neighbours.
#[derive(Debug, Clone, Copy)]
pub(super) enum LinkWord {
    Hello,
    Welcome,
    Offer(u32, SlabName),
    /// The parcel, and whether it takes later ones out of slabs too.
    Returned(u32, bool),
    Refused(u32),
}

impl World<'_> {
    /// The loans of a rank at its beginning. Most ranks of a thousand are on nodes of their own, and say nothing of it.
    pub(super) fn loans(nodes: Nodes, rank: u32) -> Loans<SlabName> {
        let undecided = |other: u32| other != rank && nodes.shares(rank) && nodes.ranks as usize <= FEW;
        let way = |other| if undecided(other) { ParcelWay::Undecided } else { ParcelWay::Socket };
        Loans::new((0..nodes.ranks).map(way).collect())
    }

    /// Another rank has said whether it shares slabs.
    pub(super) fn introduced(&mut self, rank: u32, from: u32, shares: bool) {
        if self.ranks[rank as usize].loans.way(from as usize) != ParcelWay::Undecided {
            return;
        }
        if !shares || self.node_of(rank) != self.node_of(from) {
            return self.decide(rank, from, ParcelWay::Socket);
        }
        if from > rank {
            return; // It connects.
        }
        if self.links.unreachable.is_some_and(|n| self.rng.one_in(n)) {
            self.tell(rank, from, Said::Far);
            return self.decide(rank, from, ParcelWay::Socket);
        }
        self.link(rank, from, LinkWord::Hello);
    }

    /// Another rank has found no way to this one's slabs.
    pub(super) fn is_far(&mut self, rank: u32, from: u32) {
        if self.ranks[rank as usize].loans.way(from as usize) == ParcelWay::Undecided {
            self.decide(rank, from, ParcelWay::Socket);
        }
    }

    /// Says something on a link, in order.
    fn link(&mut self, from: u32, to: u32, word: LinkWord) {
        let at = self.now + self.delay(from, to) + self.rng.below(self.links.delay);
        let last = &mut self.ranks[from as usize].last_linked[to as usize];
        *last = at.max(*last);
        let at = *last;
        self.push(at, Step::Links { from, to, word });
    }

    fn decide(&mut self, rank: u32, at: u32, way: ParcelWay) {
        for parcel in self.ranks[rank as usize].loans.decide(at as usize, way) {
            self.goes(rank, at, parcel, way);
        }
    }

    /// A parcel that this rank has read goes to another one.
    fn goes(&mut self, rank: u32, to: u32, parcel: u32, way: ParcelWay) {
        match way {
            ParcelWay::Slab => self.offer(rank, to, parcel),
            ParcelWay::Socket => {
                self.post(rank, to, parcel);
                self.pump(rank, to);
            }
            ParcelWay::Undecided => {}
        }
    }

    /// Gives a parcel that was read to these ranks, at least one.
    pub(super) fn lend(&mut self, rank: u32, (parcel, extent): (u32, u32), to: &[usize]) {
        for (at, way) in self.ranks[rank as usize].loans.lend(parcel, ticket(extent), to) {
            self.goes(rank, at as u32, parcel, way);
        }
    }

    /// The extent of a parcel that this rank gives others, and its slab.
    fn lent(&mut self, rank: u32, parcel: u32) -> Option<(u32, SlabName)> {
        let r = &self.ranks[rank as usize];
        // It is given up, or free.
        let extent = *r.sending.iter().find(|(_, sending)| sending.parcel == parcel)?.0;
        let slab = r.engine.slab(extent).map(|held| held.slab);
        if slab.is_none() {
            self.fault = Some(format!("rank {rank} gives others parcel {parcel}, whose slab is gone"));
        }
        Some((extent, slab?))
    }

    fn offer(&mut self, from: u32, to: u32, parcel: u32) {
        let Some((_, slab)) = self.lent(from, parcel) else { return };
        let r = &mut self.ranks[from as usize];
        if r.refused_by.contains(&to) {
            self.fault = Some(format!("rank {from} offers a parcel to rank {to}, which refuses them"));
        }
        r.unreturned.insert((parcel, to));
        if matches!(self.ranks[to as usize].life, Life::Runs | Life::Stopped) {
            self.book.borrow_mut().begins(slab, to, SlabUse::Offered);
        }
        self.link(from, to, LinkWord::Offer(parcel, slab));
    }

    /// Queues a parcel for a socket.
    fn post(&mut self, from: u32, to: u32, parcel: u32) {
        if self.ranks[from as usize].is_quiet() {
            return;
        }
        let Some((extent, slab)) = self.lent(from, parcel) else { return };
        let nbytes = self.wanted(parcel, to);
        self.book.borrow_mut().begins(slab, from, SlabUse::Sends(to));
        self.ranks[from as usize].out[to as usize].push_back((extent, parcel, nbytes));
    }

    /// A socket has taken a parcel to its end.
    pub(super) fn sent(&mut self, rank: u32, to: u32, (extent, parcel): (u32, u32)) {
        if self.ranks[rank as usize].is_quiet() {
            return;
        }
        if let Some(slab) = self.ranks[rank as usize].engine.slab(extent).map(|held| held.slab) {
            self.book.borrow_mut().ends(slab, rank, SlabUse::Sends(to));
        }
        let free = self.ranks[rank as usize].loans.sent(parcel);
        self.is_free(rank, free);
    }

    fn is_free(&mut self, rank: u32, free: Option<Ticket>) {
        let Some(Ticket(extent)) = free else { return };
        if let Some(sending) = self.ranks[rank as usize].sending.get_mut(&(extent as u32)) {
            sending.sent = Some(Ok(()));
        }
        self.batch_ends(rank, extent as u32);
    }

    /// A rank hears a neighbour on their link.
    pub(super) fn hear_link(&mut self, rank: u32, from: u32, word: LinkWord) {
        let r = &mut self.ranks[rank as usize];
        if r.is_quiet() || !matches!(r.phase, Phase::Loads | Phase::Waits) {
            return;
        }
        let undecided = r.loans.way(from as usize) == ParcelWay::Undecided;
        let heard = match word {
            LinkWord::Hello if undecided => {
                self.link(rank, from, LinkWord::Welcome);
                self.decide(rank, from, ParcelWay::Slab);
                Ok(())
            }
            LinkWord::Welcome if undecided => {
                self.decide(rank, from, ParcelWay::Slab);
                Ok(())
            }
            LinkWord::Hello | LinkWord::Welcome => Err("it greets twice".to_owned()),
            LinkWord::Offer(parcel, slab) => self.is_offered(rank, from, (parcel, slab)),
            LinkWord::Returned(parcel, again) => {
                r.unreturned.remove(&(parcel, from));
                if !again {
                    r.refused_by.insert(from);
                }
                r.loans.returned(from as usize, parcel, again).map(|free| self.is_free(rank, free))
            }
            LinkWord::Refused(parcel) => {
                r.unreturned.remove(&(parcel, from));
                r.refused_by.insert(from);
                r.loans.refused(from as usize, parcel).map(|()| self.goes(rank, from, parcel, ParcelWay::Socket))
            }
        };
        if let Err(breach) = heard {
            self.peers_fail(rank, Error::new(ErrorKind::Internal, breach));
        }
    }

    fn is_offered(&mut self, rank: u32, from: u32, (parcel, slab): (u32, SlabName)) -> Result<(), String> {
        if self.links.unmapped.is_some_and(|(it, n)| it == rank && self.rng.one_in(n)) {
            self.book.borrow_mut().ends(slab, rank, SlabUse::Offered);
            self.link(rank, from, LinkWord::Refused(parcel));
            return Ok(());
        }
        if let Some(slab) = self.ranks[rank as usize].loans.offers(from as usize, parcel, slab)? {
            self.on(rank, from, Heard::Parcel);
            self.borrow(rank, parcel, slab);
        }
        Ok(())
    }

    /// A parcel that is awaited has come in another rank's slab. The engine hears so a moment later.
    pub(super) fn borrow(&mut self, rank: u32, parcel: u32, slab: SlabName) {
        let Some(Awaiting { extent, .. }) = self.ranks[rank as usize].awaited.remove(&parcel) else {
            self.fault = Some(format!("rank {rank} borrows parcel {parcel}, which it does not await"));
            return;
        };
        let e = &self.case.schedules[rank as usize].extents[extent as usize];
        if e.lane != Lane::NEIGHBOUR || slab.owner != self.case.shares.parcels()[parcel as usize].reader {
            self.fault = Some(format!("rank {rank} borrows parcel {parcel} of rank {}", slab.owner));
        }
        self.comes(rank, parcel);
        let mut book = self.book.borrow_mut();
        book.ends(slab, rank, SlabUse::Offered);
        book.begins(slab, rank, SlabUse::Borrows);
        drop(book);
        let held = Held { slab, loan: Some((rank, parcel)), is_apart: false, book: self.book.clone() };
        self.ranks[rank as usize].brought.insert(extent, held);
        let at = self.now + self.rng.below(MS);
        self.push(at, Step::Brought(rank, extent));
    }

    /// The engine hears of a slab of another rank.
    pub(super) fn brought(&mut self, rank: u32, extent: u32) {
        let len = self.case.schedules[rank as usize].extents[extent as usize].len;
        let r = &mut self.ranks[rank as usize];
        if let Some(held) = r.brought.remove(&extent) {
            r.engine.brought(ticket(extent), held);
        }
        r.engine.on(self.now, Event::ReadDone(ticket(extent), Ok(len), len));
    }

    /// Tells lenders of the slabs that this rank has let go of.
    pub(super) fn returns(&mut self, rank: u32) {
        let returned = self.book.borrow_mut().take_returned(rank);
        for parcel in returned {
            let lender = self.ranks[rank as usize].loans.returns(parcel);
            if let (Some(lender), Phase::Loads | Phase::Waits) = (lender, self.ranks[rank as usize].phase) {
                let again = self.links.unregistered != Some(rank) || self.rng.one_in(2);
                self.link(rank, lender as u32, LinkWord::Returned(parcel, again));
            }
        }
    }

    /// Nothing more is sent. A slab that a borrower may still read is not used again.
    pub(super) fn send_nothing(&mut self, rank: u32, error: &Error) {
        let r = &mut self.ranks[rank as usize];
        r.out.iter_mut().for_each(VecDeque::clear);
        let held_slabs = r.sending.keys().filter_map(|extent| r.engine.slab(*extent));
        held_slabs.for_each(|held| self.book.borrow_mut().sends_nothing(held.slab));
        for GivenUp { parcel, ticket: Ticket(extent), held } in r.loans.give_up() {
            let r = &mut self.ranks[rank as usize];
            let unreturned = r.unreturned.iter().any(|(of, _)| *of == parcel);
            if held != unreturned {
                self.fault =
                    Some(format!("parcel {parcel} of rank {rank} is held: {held}, and unreturned: {unreturned}"));
            }
            if let (true, Some(slab)) = (held, r.engine.slab(extent as u32)) {
                self.book.borrow_mut().retire(slab.slab);
            }
            if let Some(sending) = r.sending.get_mut(&(extent as u32)) {
                sending.sent = Some(Err(error.clone()));
            }
            self.batch_ends(rank, extent as u32);
        }
    }
}
