//! Events of reads, as the thread of the connections tells them.

use super::range_read::RangeRead;
use crate::error::Result;
use crate::extent::Ticket;
use crate::source::Done;
use crate::store::version::Version;

/// An event of a read.
pub(in crate::store::remote) enum Told {
    Arrived(Ticket),
    Received(Ticket),
    /// It has ended, and nothing holds its memory. `object`: its size and version, if it was seen.
    Done {
        done: Done,
        object: Option<(u64, Version)>,
        /// Nothing but the end of a connection says where the object ends.
        by_close: bool,
    },
}

/// A read ends: nobody learns of it while its memory is held.
pub(in crate::store::remote) fn end(read: RangeRead, result: Result<u64>, told: &mut Vec<Told>) {
    let done = Done { ticket: read.ticket, result, lane: read.lane, written: read.got() };
    let (object, by_close) = (read.object().cloned(), read.by_close);
    drop(read);
    told.push(Told::Done { done, object, by_close });
}
