//! Events of reads, as the thread of the connections tells them.

use super::range_read::RangeRead;
use crate::error::Result;
use crate::extent::{Lane, Ticket};
use crate::store::version::Version;

/// An event of a read.
pub(in crate::store::remote) enum Told {
    Arrived(Ticket),
    Received(Ticket),
    /// It has ended, and nothing holds its memory. `object`: its size and version, if it was seen.
    Done {
        ticket: Ticket,
        lane: Lane,
        result: Result<u64>,
        object: Option<(u64, Version)>,
        /// Bytes that were received into its place, from the first on.
        written: u64,
        /// Nothing but the end of a connection says where the object ends.
        by_close: bool,
    },
}

/// A read ends: nobody learns of it while its memory is held.
pub(in crate::store::remote) fn end(read: RangeRead, result: Result<u64>, told: &mut Vec<Told>) {
    let (ticket, lane, object, written) = (read.ticket, read.lane, read.object().cloned(), read.got());
    let by_close = read.by_close;
    drop(read);
    told.push(Told::Done { ticket, lane, result, object, written, by_close });
}
