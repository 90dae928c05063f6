//! The ranks of this machine that share slabs with this one: how they find each other, and what they lend.
//!
//! Each rank says on its connection for words on which machine it runs, and where it waits for neighbours ([`Introduction`]). Of
//! two ranks of one machine the one with the higher number connects. Parcels for a neighbour wait until both ranks know that
//! their link works. Ranks of other machines, and ranks that cannot share slabs, use their sockets. Ranks that listen at
//! different addresses do so too: their plans count each other among ranks of other machines.

use super::key::nonce;
use super::loans::{Breach, GivenUp, Loans, ParcelWay};
use super::shared::Outbound;
use super::slab_link::{SlabLink, SlabListener, SlabMessage};
use crate::extent::Ticket;
use crate::fallback::Fallback;
use crate::staging::{Ring, Slab};
use std::collections::HashMap;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

/// Most processes that have connected and have said nothing. A rank says its name at once, so the oldest go first.
const STRANGERS: usize = 64;

/// Bytes that name a process, a place or a secret.
type Name = [u8; 16];

/// A part of another rank's slab: the slab, and the byte of the file with which it begins.
#[derive(Clone)]
pub(super) struct Offered {
    pub(super) slab: Arc<Slab>,
    pub(super) begins: u64,
}

/// The word of a rank about itself, to all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Introduction {
    /// Its machine, the name of its process, and where it waits. The secret shows that a rank of this load has connected.
    Shares { machine: Name, owner: Name, place: Name, secret: Name },
    /// It shares no slabs. The text says why; it is empty where no report has to say so.
    Refuses(String),
}

impl Introduction {
    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Introduction::Shares { machine, owner, place, secret } => {
                [&[1][..], machine, owner, place, secret].concat()
            }
            Introduction::Refuses(why) => [&[0], why.as_bytes()].concat(),
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Introduction> {
        let (&shares, rest) = bytes.split_first()?;
        if shares == 0 {
            return Some(Introduction::Refuses(String::from_utf8_lossy(rest).into_owned()));
        }
        let name = |number: usize| Some(*rest.get(16 * number..16 * (number + 1))?.first_chunk()?);
        (rest.len() == 64).then_some(())?;
        Some(Introduction::Shares { machine: name(0)?, owner: name(1)?, place: name(2)?, secret: name(3)? })
    }
}

/// News for the thread of the connections.
pub(super) enum News {
    /// A parcel has come in another rank's slab.
    Comes { from: usize, parcel: u32, offered: Offered },
    /// A parcel has to be sent to a rank through its socket.
    Send { to: usize, parcel: u32 },
    /// A rank has taken a parcel out of this rank's slab.
    Taken { by: usize, parcel: u32 },
    /// Nobody needs the slab of this extent any more.
    Free(Ticket),
    /// A rank has to hear that no link to it is possible, and why.
    Far { to: usize, why: String },
    /// A link is broken.
    Broken { from: usize, why: String },
    /// A rank breaks the rules.
    Breach { from: usize, breach: Breach },
}

/// See the module's documentation. Other ranks are known by their numbers.
pub(super) struct Neighbours {
    rank: u32,
    ranks: Vec<u32>,
    introduction: Introduction,
    listener: Option<SlabListener>,
    /// Processes that have connected, and have not said which rank they are.
    strangers: Vec<SlabLink>,
    links: Vec<Option<SlabLink>>,
    /// The processes of the other ranks.
    owners: Vec<Option<Name>>,
    loans: Loans<Offered>,
    /// Parcels that another rank may still read out of their slab, or for which a rank waits.
    lent: HashMap<u32, Outbound>,
    /// Each reason once.
    fallbacks: Vec<Fallback>,
    /// How many of them have been reported.
    taken: usize,
    /// Slabs of others that are kept no longer. They go with this: a driver may be slow to unpin them.
    disowned: Vec<Arc<Slab>>,
}

impl Neighbours {
    /// `near`: for each other rank, true if the plan counts it as a neighbour. `sharing`: an error says why this rank shares no
    /// slabs; its text is empty if the options say so.
    pub(super) fn new(rank: u32, ranks: Vec<u32>, near: &[bool], sharing: Result<(), String>) -> Neighbours {
        let begin = || -> Result<(Introduction, SlabListener), String> {
            sharing?;
            let (place, secret) = nonce().and_then(|place| Ok((place, nonce()?))).map_err(|e| e.to_string())?;
            let machine = machine().ok_or("this system does not say which machine it is (boot_id)")?;
            let owner = Ring::process().name(|| nonce().ok()).ok_or("the system gives no random bytes")?;
            let listener = SlabListener::new(&place).map_err(|e| e.to_string())?;
            Ok((Introduction::Shares { machine, owner, place, secret }, listener))
        };
        let (introduction, listener, way, why) = match begin() {
            Ok((shares, listener)) => (shares, Some(listener), ParcelWay::Undecided, None),
            Err(why) => (Introduction::Refuses(why.clone()), None, ParcelWay::Socket, Some(why)),
        };
        let count = ranks.len();
        let loans = Loans::new(near.iter().map(|near| if *near { way } else { ParcelWay::Socket }).collect());
        let mut neighbours = Neighbours {
            rank,
            ranks,
            introduction,
            listener: listener.filter(|_| loans.is_undecided()),
            strangers: Vec::new(),
            links: (0..count).map(|_| None).collect(),
            owners: vec![None; count],
            loans,
            lent: HashMap::new(),
            fallbacks: Vec::new(),
            taken: 0,
            disowned: Ring::process().disown_dead(),
        };
        why.iter().for_each(|why| neighbours.fall_back(why.clone()));
        neighbours
    }

    /// The word of this rank about itself.
    pub(super) fn introduction(&self) -> &Introduction {
        &self.introduction
    }

    /// Refusals since the last call. Each reason comes once.
    pub(super) fn take_fallbacks(&mut self) -> Vec<Fallback> {
        let taken = std::mem::replace(&mut self.taken, self.fallbacks.len());
        self.fallbacks[taken..].to_vec()
    }

    fn fall_back(&mut self, reason: String) {
        if !reason.is_empty() && !self.fallbacks.iter().any(|known| known.reason == reason) {
            self.fallbacks.push(Fallback { from: "shared slabs", to: "sockets", reason });
        }
    }

    /// Another rank has introduced itself.
    pub(super) fn introduced(&mut self, at: usize, theirs: Introduction, news: &mut Vec<News>) {
        if self.loans.way(at) != ParcelWay::Undecided {
            return;
        }
        let Introduction::Shares { machine, owner: mine, .. } = self.introduction else { return };
        let (owner, place, secret) = match theirs {
            Introduction::Shares { machine: other, owner, place, secret } if machine == other => (owner, place, secret),
            Introduction::Refuses(why) if !why.is_empty() => {
                return self.is_far(at, format!("rank {} shares no slabs: {why}", self.ranks[at]), news);
            }
            // On another machine, or by its options.
            _ => return self.is_far(at, String::new(), news),
        };
        if self.ranks[at] > self.rank {
            return; // It connects.
        }
        self.owners[at] = Some(owner);
        let hello = SlabMessage::Hello { rank: self.rank, owner: mine, secret };
        let greeted = SlabLink::connect(&place).map_err(|e| e.to_string()).and_then(|mut link| {
            link.say(&hello).map_err(|e| e.to_string())?;
            Ok(link)
        });
        match greeted {
            Ok(link) => self.links[at] = Some(link),
            Err(why) => self.has_no_link(at, why, news),
        }
    }

    /// No link to this rank is possible. The rank has to hear so.
    fn has_no_link(&mut self, at: usize, why: String, news: &mut Vec<News>) {
        news.push(News::Far { to: at, why: why.clone() });
        self.is_far(at, why, news);
    }

    /// Parcels for this rank go through its socket.
    pub(super) fn is_far(&mut self, at: usize, why: String, news: &mut Vec<News>) {
        if self.loans.way(at) == ParcelWay::Undecided {
            self.fall_back(why);
            self.links[at] = None;
            self.decide(at, ParcelWay::Socket, news);
        }
    }

    fn decide(&mut self, at: usize, way: ParcelWay, news: &mut Vec<News>) {
        if let (ParcelWay::Slab, Some(link)) = (way, &mut self.links[at]) {
            if let Some(owner) = self.owners[at] {
                Ring::process().note_owner(owner, link.process());
            }
            if let Err(e) = link.say(&SlabMessage::Keeps(Ring::process().registered_inodes())) {
                return self.has_no_link(at, e.to_string(), news);
            }
        }
        for parcel in self.loans.decide(at, way) {
            match way {
                ParcelWay::Slab => self.offer(at, parcel, news),
                _ => news.push(News::Send { to: at, parcel }),
            }
        }
        if !self.loans.is_undecided() {
            (self.listener, self.strangers) = (None, Vec::new());
        }
    }

    fn offer(&mut self, at: usize, parcel: u32, news: &mut Vec<News>) {
        let (Some(link), Some(lent)) = (&mut self.links[at], self.lent.get(&parcel)) else { return };
        let Some(slab) = Ring::process().slab_at(lent.at).filter(|slab| slab.memfd().is_some()) else {
            // The system had no more shared memory, or no descriptor for it.
            self.fall_back("a slab of this rank could not be made of shared memory".to_owned());
            let _held_until_now = self.loans.refused(at, parcel);
            return news.push(News::Send { to: at, parcel });
        };
        if let Err(e) = link.offer(parcel, lent.offset, slab) {
            self.breaks(at, e.to_string(), news);
        }
    }

    /// A parcel was read for these ranks. Some of them may have to wait. Gives those to which it has to be sent.
    pub(super) fn lend(&mut self, send: Outbound, to: &[usize], news: &mut Vec<News>) {
        let (parcel, ticket) = (send.parcel, send.ticket);
        self.lent.insert(parcel, send);
        for (at, way) in self.loans.lend(parcel, ticket, to) {
            match way {
                ParcelWay::Slab => self.offer(at, parcel, news),
                ParcelWay::Socket => news.push(News::Send { to: at, parcel }),
                ParcelWay::Undecided => {}
            }
        }
    }

    /// A parcel that was read for others, while somebody needs it.
    pub(super) fn lent(&self, parcel: u32) -> Option<&Outbound> {
        self.lent.get(&parcel)
    }

    /// A socket has taken a parcel to its end.
    pub(super) fn sent(&mut self, parcel: u32, news: &mut Vec<News>) {
        let free = self.loans.sent(parcel);
        self.is_free(parcel, free, news);
    }

    fn is_free(&mut self, parcel: u32, free: Option<Ticket>, news: &mut Vec<News>) {
        if let Some(ticket) = free {
            self.lent.remove(&parcel);
            news.push(News::Free(ticket));
        }
    }

    /// The engine waits for a parcel. Gives its place, if it has come already.
    pub(super) fn awaits(&mut self, parcel: u32) -> Option<Offered> {
        self.loans.awaits(parcel)
    }

    /// A parcel has come through a socket.
    pub(super) fn received(&mut self, parcel: u32) {
        self.loans.received(parcel);
    }

    /// The copies of a parcel have ended. `again`: slabs of that rank are welcome.
    pub(super) fn returns(&mut self, parcel: u32, again: bool, news: &mut Vec<News>) {
        let Some(at) = self.loans.returns(parcel) else { return };
        let Some(link) = &mut self.links[at] else { return };
        if let Err(e) = link.say(&SlabMessage::Returned { parcel, again }) {
            self.breaks(at, e.to_string(), news);
        }
    }

    fn breaks(&mut self, at: usize, why: String, news: &mut Vec<News>) {
        self.links[at] = None;
        match self.loans.way(at) {
            // The link was not complete: both ranks can still use their sockets.
            ParcelWay::Undecided => self.has_no_link(at, why, news),
            _ => news.push(News::Broken { from: at, why }),
        }
    }

    /// The load has failed. Slabs that a borrower may still read are not used again.
    pub(super) fn give_up(&mut self) -> Vec<Ticket> {
        let given_up = self.loans.give_up();
        let tickets = given_up.iter().map(|one| one.ticket).collect();
        for GivenUp { parcel, .. } in given_up.into_iter().filter(|one| one.held) {
            self.lent.get(&parcel).into_iter().for_each(|lent| Ring::process().retire(lent.at));
        }
        self.lent.clear();
        tickets
    }

    /// The descriptors to wait for, and for what.
    pub(super) fn polled(&self) -> impl Iterator<Item = (RawFd, i16)> + '_ {
        let listener = self.listener.iter().map(SlabListener::fd);
        let quiet = listener.chain(self.strangers.iter().map(SlabLink::fd)).map(|fd| (fd, libc::POLLIN));
        quiet.chain(
            self.links
                .iter()
                .flatten()
                .map(|link| (link.fd(), libc::POLLIN | if link.wants_room() { libc::POLLOUT } else { 0 })),
        )
    }

    /// True if a message has to be tried again after a pause: `poll` does not say when there is room for it.
    pub(super) fn waits(&self) -> bool {
        self.links.iter().flatten().any(SlabLink::waits)
    }

    /// The load has failed: neighbours' slabs are kept no longer.
    pub(super) fn keep_nothing(&mut self) {
        let owners = self.owners.iter().flatten();
        self.disowned.extend(owners.flat_map(|owner| Ring::process().disown(*owner, &|_| false)));
    }

    /// Takes what neighbours say, and says what has waited for room.
    pub(super) fn serve(&mut self, news: &mut Vec<News>) {
        self.take_strangers(news);
        for at in 0..self.links.len() {
            while let Some(link) = &mut self.links[at] {
                let heard = link.speak().and_then(|()| link.hear());
                match heard {
                    Ok(None) => break,
                    Ok(Some((message, fd))) => self.hears(at, message, fd, news),
                    Err(e) => self.breaks(at, e.to_string(), news),
                }
            }
        }
    }

    /// Takes connections.
    fn take_strangers(&mut self, news: &mut Vec<News>) {
        for _ in 0..STRANGERS {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok(Some(link)) => self.meet(link, news),
                Ok(None) => break,
                // They may have the descriptors that are missing.
                Err(_) if !self.strangers.is_empty() => self.strangers.clear(),
                Err(e) => return self.takes_nobody(&e.to_string(), news),
            }
        }
        std::mem::take(&mut self.strangers).into_iter().for_each(|link| self.meet(link, news));
        if !self.loans.is_undecided() {
            self.strangers.clear();
        }
    }

    /// Hears the first word of a process that has connected. One that is no rank of this load is turned away.
    fn meet(&mut self, mut link: SlabLink, news: &mut Vec<News>) {
        match link.hear() {
            Ok(None) => {
                self.strangers.push(link);
                let surplus = self.strangers.len().saturating_sub(STRANGERS);
                self.strangers.drain(..surplus);
            }
            Ok(Some((SlabMessage::Hello { rank, owner, secret }, _))) => {
                let at = self.ranks.iter().position(|known| *known == rank);
                let mine = match &self.introduction {
                    Introduction::Shares { secret, .. } => Some(*secret),
                    Introduction::Refuses(_) => None,
                };
                let Some(at) = at.filter(|_| mine == Some(secret) && rank > self.rank) else { return };
                if self.loans.way(at) == ParcelWay::Undecided && link.say(&SlabMessage::Welcome).is_ok() {
                    (self.links[at], self.owners[at]) = (Some(link), Some(owner));
                    self.decide(at, ParcelWay::Slab, news);
                }
            }
            Ok(Some(_)) | Err(_) => {}
        }
    }

    /// No connection can be accepted any more.
    fn takes_nobody(&mut self, why: &str, news: &mut Vec<News>) {
        self.listener = None;
        for at in 0..self.ranks.len() {
            if self.ranks[at] > self.rank && self.loans.way(at) == ParcelWay::Undecided {
                self.has_no_link(at, why.to_owned(), news);
            }
        }
    }

    fn hears(&mut self, at: usize, message: SlabMessage, fd: Option<OwnedFd>, news: &mut Vec<News>) {
        let outcome = match message {
            SlabMessage::Welcome if self.loans.way(at) == ParcelWay::Undecided => {
                self.decide(at, ParcelWay::Slab, news);
                Ok(())
            }
            SlabMessage::Keeps(inodes) => {
                if let Some(owner) = self.owners[at] {
                    self.disowned.extend(Ring::process().disown(owner, &|(_, inode)| inodes.contains(&inode)));
                }
                Ok(())
            }
            SlabMessage::Offer { parcel, slab, begins, len } => {
                self.is_offered(at, (parcel, slab, begins, len), fd, news)
            }
            SlabMessage::Returned { parcel, again } => self.loans.returned(at, parcel, again).map(|free| {
                news.push(News::Taken { by: at, parcel });
                self.is_free(parcel, free, news);
            }),
            SlabMessage::Refused { parcel, why } => self.loans.refused(at, parcel).map(|()| {
                self.fall_back(format!("rank {} refuses them: {why}", self.ranks[at]));
                news.push(News::Send { to: at, parcel });
            }),
            SlabMessage::Hello { .. } | SlabMessage::Welcome => Err("it greets twice".to_owned()),
        };
        if let Err(breach) = outcome {
            news.push(News::Breach { from: at, breach });
        }
    }

    fn is_offered(
        &mut self,
        at: usize,
        (parcel, number, begins, len): (u32, u32, u64, u64),
        fd: Option<OwnedFd>,
        news: &mut Vec<News>,
    ) -> Result<(), Breach> {
        let (Some(link), Some(owner)) = (&mut self.links[at], self.owners[at]) else { return Ok(()) };
        let slab = link.borrow(number, fd, |fd| Ring::process().adopt(fd, owner, len));
        match slab {
            Ok(slab) => {
                if let Some(offered) = self.loans.offers(at, parcel, Offered { slab, begins })? {
                    news.push(News::Comes { from: at, parcel, offered });
                }
            }
            Err(refusal) => {
                let why = refusal.to_string();
                let said = link.say(&SlabMessage::Refused { parcel, why: why.clone() });
                self.fall_back(why);
                if let Err(e) = said {
                    self.breaks(at, e.to_string(), news);
                }
            }
        }
        Ok(())
    }
}

/// The machine that this process runs on: the same for two processes only where one kernel runs them.
fn machine() -> Option<Name> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: Vec<u8> = text.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    bytes.try_into().ok()
}
