//! How the ranks of a load find each other: each has a [`Seat`], and all seats make a [`Mesh`].

use super::handshake::Purpose;
use super::key::Pass;
use super::meet::Meeting;
use super::place::{address_of, ListenAt};
use super::pulse::{Prober, Pulse, Reachable};
use crate::error::Result;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// How long a rank's host may not answer, where ranks are not watched.
const SILENCE: Duration = Duration::from_secs(5);

/// A rank's own address, before it knows those of the others.
#[derive(Debug)]
pub struct Seat {
    listener: TcpListener,
    pulse: Pulse,
    /// The questions to the other ranks.
    prober: Option<Prober>,
    silence: Duration,
    pass: Pass,
}

/// The connections of one rank to all others.
#[derive(Debug)]
pub struct Mesh {
    pub(super) rank: u32,
    /// By rank; `None` for this one, and for those that are no members.
    pub(super) links: Vec<Option<Pair>>,
    /// By rank.
    pub(super) hosts: Vec<String>,
    /// Says that this rank is alive, as long as nobody else does.
    _pulse: Pulse,
}

/// The connections to one rank.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) data: TcpStream,
    pub(super) control: TcpStream,
}

impl Mesh {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The hosts of all ranks.
    pub(crate) fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// How many ranks it connects.
    pub(crate) fn members(&self) -> usize {
        1 + self.links.iter().flatten().count()
    }
}

impl Seat {
    /// Listens at two ports of a place: for the other ranks, and for the question whether this one is there.
    ///
    /// # Errors
    /// `Limit`: the ports of the range are taken. `Invalid`: this machine has no such address. Otherwise what the kernel says.
    pub fn new(place: ListenAt, pass: Pass) -> Result<Seat> {
        let listener = place.listen()?;
        let pulse = Pulse::start(place, &pass)?;
        Ok(Seat { listener, pulse, prober: None, silence: SILENCE, pass })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.pass.rank
    }

    /// The address at which it listens.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn address(&self) -> Result<SocketAddr> {
        address_of(&self.listener)
    }

    /// The address at which others ask whether this rank is there.
    pub fn pulse(&self) -> SocketAddr {
        self.pulse.address()
    }

    /// Watches the other ranks from now on: `pulses` are those of all. One that does not answer for `silence` was stopped.
    pub fn watch(&mut self, pulses: &[Reachable], silence: Duration) {
        self.silence = silence;
        self.prober = Some(Prober::new(pulses, &self.pass, silence, None));
    }

    /// Whether these ranks, which this one waits for, are there. To be asked every 50 ms or so; asks nobody unless ranks are
    /// watched.
    ///
    /// # Errors
    /// `Peer`: one of them is gone, or was stopped. One that has failed is gone too.
    pub fn look(&mut self, ranks: &[u32]) -> Result<()> {
        self.prober.as_mut().map_or(Ok(()), |prober| prober.look(ranks))
    }

    /// Connects to all others: `addresses` are those of all ranks (`None`: it is no member, and nothing to this one), and `token`
    /// names this load. Ranks of another load, and those without this one's key, are turned away. `go_on` is asked every 50 ms.
    ///
    /// # Errors
    /// `Peer` if a rank did not come within `patience`, is not there any more, cannot be reached, or has another key: it names
    /// the first. `Cancelled` if `go_on` says no.
    pub fn join(
        self,
        addresses: &[Option<SocketAddr>],
        token: [u8; 16],
        patience: Duration,
        go_on: impl FnMut() -> bool,
    ) -> Result<Mesh> {
        let Seat { listener, pulse, mut prober, silence, pass } = self;
        let me = Pass { token, ..pass };
        let kinds = &[Purpose::Data, Purpose::Control];
        let meeting = Meeting { listener: &listener, me: &me, kinds, addresses, patience, silence };
        let found = meeting.connect(go_on, |awaited| {
            pulse.check()?;
            prober.as_mut().map_or(Ok(false), |prober| prober.are_there(awaited))
        })?;
        let pair = |streams: Vec<TcpStream>| {
            let mut streams = streams.into_iter();
            Some(Pair { data: streams.next()?, control: streams.next()? })
        };
        let links: Vec<Option<Pair>> = found.into_iter().map(pair).collect();
        pulse.speak(links.iter().flatten().map(|link| &link.control))?;
        let host = |address: &Option<SocketAddr>| address.map_or_else(String::new, |address| address.ip().to_string());
        Ok(Mesh { rank: me.rank, links, hosts: addresses.iter().map(host).collect(), _pulse: pulse })
    }
}
