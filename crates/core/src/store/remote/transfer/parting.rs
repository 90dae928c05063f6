//! Connections of a node's budget that are left: the place of each is free when its server has closed it too. Until then it
//! has them all. The thread of the connections hears of that as of everything else, and never waits for it.

use super::fetch::RangeRequest;
use super::link::{Link, LinkState};
use super::node_budget::Permit;
use crate::store::remote::http::wires::{Watched, WireEnd, Wires};
use std::io;
use std::time::{Duration, Instant};

/// How long a server may take to notice that a connection is closed. Some never do.
const LONGEST: Duration = Duration::from_secs(1);
/// Bytes that a server may send before it notices. More come from one that does not look.
const MOST: usize = 1 << 20;
/// The numbers of these connections begin here, behind those of the others.
const FIRST: usize = 1 << 30;

/// See the module's documentation.
pub(super) struct Parting<S> {
    slots: Vec<Option<Departing<S>>>,
    /// Places that are free again, for a connection that is to be made here.
    spare: Vec<Permit>,
}

/// A connection that was left.
struct Departing<S> {
    /// None if it is closed, and only its server has not heard of it.
    stream: Option<S>,
    /// Its place in the budget.
    permit: Permit,
    until: Instant,
    discarded: usize,
    /// Whether its place is for another connection of this process.
    stays: bool,
}

impl<S> Default for Parting<S> {
    fn default() -> Self {
        Parting { slots: Vec::new(), spare: Vec::new() }
    }
}

impl<S: WireEnd> Parting<S> {
    /// Leaves a connection, and gives back what was asked on it. One that connects, and one without a place in the budget, goes
    /// at once. `stays`: its place is for another connection of this process.
    pub(super) fn leave(
        &mut self,
        mut link: Link<S>,
        now: Instant,
        stays: bool,
        wires: &mut impl Wires<Stream = S>,
    ) -> Option<RangeRequest> {
        let fetch = link.fetch.take();
        let Some(permit) = link.permit.take().filter(|_| link.state != LinkState::Connecting) else { return fetch };
        let number = self.room();
        let mut left = Departing { stream: None, permit, until: now + LONGEST, discarded: 0, stays };
        if fetch.is_some() {
            // What it still sends is not waited for.
            link.stream.abort();
        } else {
            link.stream.leave();
            let unwatched = wires.watch(&link.stream, FIRST + number, link.watched, Watched::Nothing);
            let watched =
                unwatched.and_then(|()| wires.watch(&link.stream, FIRST + number, Watched::Nothing, Watched::Bytes));
            left.stream = Some(link.stream).filter(|_| watched.is_ok());
        }
        self.slots[number] = Some(left);
        fetch
    }

    fn room(&mut self) -> usize {
        self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }

    /// Something has happened on the connection with this number: whether its place is free now. `None`: it is none of these.
    pub(super) fn advance(&mut self, number: usize, into: &mut [u8]) -> Option<bool> {
        let number = number.checked_sub(FIRST)?;
        let Some(Some(left)) = self.slots.get_mut(number) else { return Some(false) };
        while let Some(stream) = &mut left.stream {
            match stream.discard(into) {
                Ok(got) if got > 0 => left.discarded += got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Some(false),
                _ => {
                    self.free(number);
                    return Some(true);
                }
            }
            if left.discarded > MOST {
                stream.abort();
                left.stream = None;
            }
        }
        Some(false)
    }

    /// Gives up the places whose servers have had their time. Whether there were some.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let before = self.len();
        for number in 0..self.slots.len() {
            if self.slots[number].as_ref().is_some_and(|left| left.until <= now) {
                self.free(number);
            }
        }
        self.len() < before
    }

    fn free(&mut self, number: usize) {
        let Some(Departing { stream, permit, stays, .. }) = self.slots[number].take() else { return };
        drop(stream);
        if stays {
            self.spare.push(permit);
        }
    }

    /// A place for a connection that is to be made here.
    pub(super) fn take_spare(&mut self) -> Option<Permit> {
        self.spare.pop()
    }

    /// Nothing is to be connected here: the places are for others.
    pub(super) fn drop_spare(&mut self) {
        self.spare.clear();
    }

    /// How many places they have.
    pub(super) fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether the ends of some are waited for.
    pub(super) fn awaits_ends(&self) -> bool {
        self.slots.iter().flatten().any(|left| left.stream.is_some())
    }

    /// When the next one has had its time.
    pub(super) fn due(&self) -> Option<Instant> {
        self.slots.iter().flatten().map(|left| left.until).min()
    }
}
