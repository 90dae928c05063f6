//! The world as the connections need it: sockets that never block, their events, and the time. `sockets` is the real
//! one; tests have one in virtual time.

use super::address::Server;
use super::jitter::Jitter;
use crate::error::Result;
use crate::wake::Wake;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connection to a server.
pub(in crate::store::remote) trait WireEnd {
    /// Whether requests can be sent: it is connected, and TLS has shaken hands.
    fn is_ready(&mut self) -> io::Result<bool>;

    /// Queues a request.
    fn say(&mut self, text: String);

    /// Sends what is queued, as far as it goes.
    fn send(&mut self) -> io::Result<()>;

    /// Whether something waits to be sent, or for the connection.
    fn has_to_send(&self) -> bool;

    /// Whether bytes were received that `receive` has not given yet: no event tells of them.
    fn holds_bytes(&self) -> bool;

    /// Whether it connects for so long that another address of its server should be tried, and there is one.
    fn is_late(&self, now: Instant) -> bool {
        let _ = now;
        false
    }

    /// Whether another address of its server may answer, after this one did not.
    fn has_other(&self) -> bool {
        false
    }

    /// Says that no more will be asked on it. Bytes that come later are of no interest.
    fn leave(&mut self) {}

    /// Has the other end hear at once that the connection is gone, whatever it still sends. It is of no use then.
    fn abort(&mut self) {}

    /// Discards bytes of a connection that was left, without waiting, and says how many: 0 if the other end has left too.
    fn discard(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let _ = into;
        Ok(0)
    }

    /// Receives into these places in turn, at most what is there. 0 bytes are the end of the connection; an error of kind
    /// `WouldBlock` says that nothing is there.
    ///
    /// # Safety
    /// Each place is `iov_len` bytes of memory that may be written to.
    unsafe fn receive(&mut self, places: &mut [libc::iovec]) -> io::Result<usize>;
}

/// Events that a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store::remote) enum Watched {
    /// Nothing. A connection that was closed would be reported again and again.
    Nothing,
    /// Bytes that come.
    Bytes,
    /// The same, and room for bytes to send.
    Both,
}

/// Where connections come from, and what happens on them.
pub(in crate::store::remote) trait Wires {
    type Stream: WireEnd;

    fn now(&self) -> Instant;

    /// Random times.
    fn jitter(&self) -> Jitter {
        Jitter::random()
    }

    /// Notified when something has come that was asked for; none where such things are waited for.
    fn wake(&self) -> Option<&Arc<Wake>>;

    /// Begins to connect to that server; `None` if its addresses are not known yet.
    fn connect(&mut self, server: &Server) -> Result<Option<Self::Stream>>;

    /// Has the connection with this number watched for `wanted` instead of `before`.
    fn watch(&mut self, stream: &Self::Stream, number: usize, before: Watched, wanted: Watched) -> Result<()>;

    /// Waits until something happens, at most for `most`. Appends the numbers of connections on which something did. Whether
    /// that is all: more may be known and not told yet.
    fn wait(&mut self, most: Option<Duration>, numbers: &mut Vec<usize>) -> Result<bool>;
}
