//! Peers: the ranks that load one checkpoint together, and the bytes that travel between them.
//!
//! Each pair of ranks has two connections ([`Mesh`]): one for bytes, and one for what a rank has to say at any time, also
//! while the other does not take its bytes. One thread of each rank serves them all ([`Peers`]). It holds no lock of the
//! interpreter, so a rank is alive for its peers as long as its process runs, however busy that is.
//!
//! A rank listens at a [`ListenAt`]. Ranks that have a [`PeerKey`] prove it to each other on each connection before they use it.
//!
//! Ranks of one machine lend each other their slabs ([`loans`]): what one of them has read, the others copy out of its slab.
//!
//! To the engine a peer is a source of what it reads for this rank, and a device to which this rank copies what it reads for
//! others: [`Peers::source`], [`Peers::device`].

mod calls;
mod device;
mod exchange;
mod handshake;
mod key;
pub(crate) mod loans;
mod lookout;
mod meet;
mod mesh;
mod neighbours;
mod place;
mod pulse;
mod shared;
mod slab_link;
mod source;
mod standing;
pub(crate) mod watch;

pub(crate) use exchange::{Peers, RowsToSend};
pub use key::{Pass, PeerKey};
pub use lookout::Lookout;
pub use mesh::{Mesh, Seat};
pub use place::{bound, ListenAt};
pub use pulse::Reachable;
pub(crate) use shared::STEPS;
pub use standing::StandingLinks;
