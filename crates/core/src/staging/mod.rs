//! The ring of slabs: staging memory that lives for the process and that all its loads share.
//!
//! A [`Share`] is one load's place in the ring. [`Share::try_acquire`] never waits: if no slab is available now, it
//! returns `None`, and the share's descriptor becomes readable when it is worth asking again. Dropping a [`Lease`]
//! gives its slab back.
//!
//! - **Bounded.** All slabs of the process together stay under the `staging` limit of the load that asks (invariant 3).
//!   There is one exception: two slabs are always granted, whatever the limit and the quarantine are, or nothing could
//!   move.
//! - **Fair.** If several loads are active, each has an equal part of its limit, at least two slabs. A load that holds
//!   no slab comes before one that holds some. So a load waits only for reads and copies in flight, never for another
//!   load's consumer: no read is submitted before its destination is granted, so no slab is held idle.
//! - **Hot.** The slab that was given back last is given out first: its lines are still in the CPU's cache, where a
//!   copy runs at 7 instead of 5 GB/s.
//! - **Lasting.** After the last load [`IDLE_STAGING`](crate::options::IDLE_STAGING) bytes of plain slabs stay: the next load's first reads go to
//!   them while more are made. The rest goes back to the system. All registered slabs stay.
//!
//! # The pool of registered slabs
//! A GPU copies fast, and beside other work, only from memory that its driver has registered (pinned). Registering
//! costs 0.1 to 0.6 s per GiB, so it is done once: only [`Ring::trim`] unregisters slabs, and nothing does between
//! loads. A registration holds for the whole process, so all GPUs of one driver share the pool.
//!
//! A load to a GPU [pins](Share::pin) its share. The [`Growth`] that it gets says which slabs to register, in the
//! background, until there are [`pool_bytes`](crate::options::pool_bytes) of them or as many as the load can use. As long as more are being
//! registered or enough exist, the share gets registered slabs only: it waits for one that comes back, and makes no
//! other. If the driver refuses to register, it gets plain slabs.
//!
//! # Slabs that processes share
//! A share can ask for [shared slabs](Share::share_slabs): each is a file in memory (memfd_create), whose
//! [descriptor](Slab::memfd) another process can map. Its pages then exist once, however many map them. A load gets slabs of
//! one kind only, shared or private. Both kinds are under the same limits, and idle slabs of the one make room for the other.
//! The size of the file is sealed, so nobody can make it smaller under a mapping, which would kill the process.
//!
//! The neighbour [adopts](Ring::adopt) the descriptor: it maps the file once, and closes the descriptor. Only the owner counts
//! the slab under its limits. The neighbour's mapping lives as long as somebody holds it. Registering costs, so a registered one
//! is kept for later loads, until it is [disowned](Ring::disown) or the ring is [trimmed](Ring::trim).
//!
//! The owner must not write to a slab that a neighbour may still read. If that is not known, the owner
//! [retires](Lease::retire) the slab: the kernel frees the memory when the last mapping is gone.
//!
//! Shared slabs have huge pages like private ones, where the kernel can make them: see [`shared_memory_pages`].
//!
//! # Fork
//! Slabs are marked MADV_DONTFORK. Otherwise a fork would mark their pages copy-on-write. The parent's next write to a
//! page would then move the page while a DMA is in flight, of the driver or of an O_DIRECT read (for this reason
//! open(2), NOTES, asks for MADV_DONTFORK). Also, the child would carry up to 256 MiB that it cannot use. So a child
//! finds no memory there, neither of the parent's slabs nor of its neighbours'. It gets its own ring, and what it inherited of
//! the parent's does nothing when dropped. It inherits the descriptors of shared slabs too, and keeps their memory until it
//! ends or an exec closes them.
//!
//! At exit nothing is freed: the driver may be gone by then, and the kernel frees memory faster.

mod adopted;
mod memory_file;
mod ring;
mod slab;
mod staged;
#[cfg(test)]
mod tests;

pub use memory_file::shared_memory_pages;
pub use ring::{Growth, Lease, Ring, Share, Staging};
pub use slab::Slab;
pub(crate) use staged::{Borrowed, Staged};
