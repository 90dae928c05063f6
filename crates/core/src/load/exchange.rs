//! The exchange of a load with those of other ranks: what it receives from them, and what it sends them.

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, InCommon, Lane, Ticket};
use crate::format::Checkpoint;
use crate::peers::{Mesh, Peers, RowsToSend};
use crate::plan::request::Request;
use crate::plan::schedule::Schedule;
use crate::plan::shares::{DensePart, Shares};
use crate::source::LaneSource;
use crate::staging::Ring;
use std::collections::HashMap;
use std::sync::Arc;

/// The exchange of one rank with the others.
pub(super) struct RankExchange {
    pub(super) rank: u32,
    pub(super) hosts: Vec<String>,
    /// How many ranks exchange something.
    pub(super) members: usize,
    pub(super) shares: Arc<Shares>,
    pub(super) peers: Peers,
    /// By rank: true if the plan counts on slabs that it shares with this one.
    pub(super) near: Vec<bool>,
}

/// Parcels from other ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Received {
    pub(super) parcels: usize,
    /// At least one parcel needs a slab.
    pub(super) in_slabs: bool,
    /// At least one parcel comes in another rank's slab. It needs one of this rank if the two cannot share.
    pub(super) lent: bool,
}

impl Received {
    /// The most slabs that parcels for others may hold, of so many that a load to a GPU registers: received bytes need some. If
    /// all come in slabs of others, a quarter is left for those that cannot.
    pub(super) fn most_sent(&self, slabs: u64) -> Option<usize> {
        let most = match (self.in_slabs, self.lent) {
            (true, _) => slabs / 2,
            (false, true) => slabs - (slabs / 4).max(1),
            (false, false) => return None,
        };
        Some(most.max(1) as usize)
    }

    /// Counts this extent, if it comes from another rank.
    pub(super) fn count(&mut self, e: &Extent) {
        if e.is_received() {
            self.parcels += 1;
            self.in_slabs |= e.takes_slab();
            self.lent |= e.lane.lends_slab;
        }
    }
}

impl RankExchange {
    pub(super) fn new((shares, mesh): (Arc<Shares>, Mesh), request: &Request) -> Result<RankExchange> {
        if request.stream {
            let text = "ranks that load together take everything at once: a stream of one could stop all others";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let (rank, hosts, members) = (mesh.rank(), mesh.hosts().to_vec(), mesh.members());
        if shares.ranks() != hosts.len() {
            let text = format!("shares of {} ranks, and connections of {}", shares.ranks(), hosts.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let (theirs, checkpoint) = (shares.clone(), request.checkpoint.clone());
        let rows = move |parcel: u32, rank: u32| -> (u64, RowsToSend) {
            let (nbytes, rows) = rows(&theirs, &checkpoint, parcel, rank);
            (nbytes, Box::new(rows))
        };
        let options = &request.options;
        let sharing = match options.shared_slabs {
            true => Ring::can_share().map_err(|e| e.to_string()),
            false => Err(String::new()),
        };
        let shares_slabs = |host: &String| sharing.is_ok() && *host == hosts[rank as usize];
        let near = hosts.iter().map(shares_slabs).collect();
        let peers = Peers::start(mesh, Box::new(rows), (options.peer_timeout, options.join_timeout), sharing)?;
        Ok(RankExchange { rank, hosts, members, shares, peers, near })
    }

    /// How many of the ranks are on this one's machine, itself included.
    pub(super) fn on_this_machine(&self) -> u64 {
        let mine = self.hosts.get(self.rank as usize);
        let here = self.hosts.iter().filter(|host| Some(*host) == mine).count();
        here.min(self.members).max(1) as u64
    }

    /// The source of what comes from other ranks.
    pub(super) fn source(&self, schedule: &Schedule) -> (LaneSource, Received) {
        let mut found = Received::default();
        schedule.extents.iter().for_each(|e| found.count(e));
        let mut parcels = vec![None; schedule.extents.len()];
        for (ticket, e) in schedule.extents.iter().enumerate() {
            if let Some(InCommon::Received { parcel, .. }) = e.shared {
                parcels[ticket] = Some(parcel);
            }
        }
        (LaneSource { lanes: vec![Lane::RANK, Lane::NEIGHBOUR], source: self.peers.source(parcels.into()) }, found)
    }

    /// Other ranks may read what this one has read for them out of its slabs.
    pub(super) fn lends(&self, schedule: &Schedule) -> bool {
        let near = |rank: &u32| *rank != self.rank && self.near[*rank as usize];
        let lends = |number: u32| self.shares.audience(&self.shares.parcels()[number as usize]).iter().any(near);
        schedule.extents.iter().any(|e| matches!(e.shared, Some(InCommon::Sent(number)) if lends(number)))
    }

    /// The device, which now gives other ranks what they want too.
    pub(super) fn device(&self, inner: Box<dyn Device>, schedule: &Schedule) -> Result<Box<dyn Device>> {
        let mut sends = HashMap::new();
        for (ticket, e) in (0..).map(Ticket).zip(&schedule.extents) {
            let Some(InCommon::Sent(number)) = e.shared else { continue };
            let parcel = &self.shares.parcels()[number as usize];
            let others = self.shares.audience(parcel).iter().copied().filter(|rank| *rank != self.rank);
            sends.insert(ticket, (number, e.offset, others.collect()));
        }
        self.peers.device(inner, sends)
    }
}

/// The bytes that a rank wants of a parcel: their number, and their rows (file offset, bytes) in the order of travel.
/// The rows are not a list: a list of the rows of narrow columns would be longer than the parcel.
pub(super) fn rows(
    shares: &Arc<Shares>,
    checkpoint: &Checkpoint,
    parcel: u32,
    rank: u32,
) -> (u64, impl Iterator<Item = (u64, u64)>) {
    let parts: Vec<DensePart> = shares.parts(checkpoint, rank, &shares.parcels()[parcel as usize]).collect();
    let shares = shares.clone();
    let nbytes = parts.iter().map(|part| part.dense.end - part.dense.start).sum();
    let mut rows = parts.into_iter().flat_map(move |part| shares.runs(rank, part.want).into_rows(part.dense));
    let mut next = None;
    let joined = std::iter::from_fn(move || {
        let mut row: (u64, u64) = next.take().or_else(|| rows.next())?;
        loop {
            next = rows.next();
            match next {
                Some((at, len)) if row.0 + row.1 == at => row.1 += len,
                _ => return Some(row),
            }
        }
    });
    (nbytes, joined)
}
