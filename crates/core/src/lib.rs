//! Loads safetensors checkpoints into CPU and GPU memory.
//!
//! # The idea
//!
//! Penstock separates moving bytes from making tensors. A checkpoint is a set of byte ranges in files. A load is a plan
//! that says which ranges go to which addresses. An engine keeps every device on the way busy until the plan is done.
//! Tensors are views that are made on the bytes afterwards. So there is one plan over all shard files instead of one
//! loop per file. A process that wants a third of every tensor reads a third of the bytes. The same engine fills new
//! CPU memory, a GPU, and tensors that exist already.
//!
//! A load goes through five stages, one module each:
//!
//! | stage | module | what it makes |
//! |---|---|---|
//! | open | [`mod@format`] | a [`Checkpoint`], validated as a whole before a byte is moved |
//! | want | [`plan::want`] | [`Want`]s (whole tensors or hyper-rectangles of them) as runs of bytes |
//! | lay out | [`plan::layout`] | a place in a block for every want; pure, so that every rank of a job gets the same |
//! | schedule | [`plan::schedule`] | the extents to read, in order, each with its lane and its pieces |
//! | drive | [`load`] | a [`Load`]: a thread that sleeps while [`source`]s read and [`device`]s copy |
//!
//! The lane of each extent (mapped, through the page cache, past it, from a server, from another rank) depends on the store, on
//! what is resident and on the [`Options`]. If the kernel refuses a lane, another replaces it during the load, and the
//! [`Report`] says so.
//!
//! Another kind of storage is a [`Store`](store::Store), registered for a scheme ([`store::register`]). It may wrap another one,
//! or that of files of this machine ([`store::local`]);
//! `docs/architecture.md` says how to add one.
//!
//! This crate knows neither Python nor any tensor library. It hands out addresses and keeps the memory behind them
//! alive. It runs on Linux only.
//!
//! # Example
//!
//! ```
//! use penstock::{Checkpoint, Load, Memory, Options, Request, Want, Where};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A shard file: eight bytes of header length, the header, then the bytes of the tensors.
//! let folder = tempfile::tempdir()?;
//! let header = r#"{"ramp":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
//! let mut file = (header.len() as u64).to_le_bytes().to_vec();
//! file.extend_from_slice(header.as_bytes());
//! file.extend((0..6u8).flat_map(|n| f32::from(n).to_le_bytes()));
//! std::fs::write(folder.path().join("model.safetensors"), file)?;
//!
//! // Opening reads and checks headers, nothing else.
//! let checkpoint = Arc::new(Checkpoint::open(&[folder.path()])?);
//! let ramp = checkpoint.find("ramp").ok_or("no such tensor")?;
//! assert_eq!((ramp.dtype.name(), ramp.shape), ("F32", &[2, 3][..]));
//!
//! // The second row alone: twelve of the twenty-four bytes.
//! let row = Want::part(ramp.index, [1..2, 0..3]);
//! let load = Load::start(Request {
//!     checkpoint: checkpoint.clone(),
//!     wants: vec![row],
//!     layout: None,
//!     device: Where::Cpu,
//!     memory: Memory::Ours,
//!     options: Options::default(),
//!     stream: false,
//! })?;
//! load.wait(None)?;
//!
//! // A view keeps its memory alive; the load and the checkpoint may go.
//! let view = load.view(0)?;
//! let report = load.report();
//! drop((load, checkpoint));
//! assert_eq!((view.nbytes(), report.nbytes), (12, 12));
//! // SAFETY: the view is 12 complete bytes of CPU memory, aligned for F32, and lives on.
//! let row = unsafe { std::slice::from_raw_parts(view.address() as *const f32, 3) };
//! assert_eq!(row, [3.0, 4.0, 5.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # What can be relied on
//!
//! Nothing is handed out before it is complete, and this crate never overwrites what it has handed out. Every wait
//! ends: with success, with an [`Error`] that names file, byte range and cause, or with cancellation. A load that is
//! dropped leaves no thread, descriptor or mapping behind. What hangs in the kernel for good is left behind together
//! with its memory, and counted ([`source::quarantined`]). `docs/architecture.md` lists these invariants with the test
//! that holds each.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod ceiling;
mod detached;
pub mod device;
mod engine;
pub mod error;
pub mod extent;
pub mod fallback;
pub mod format;
pub mod huge_pages;
pub mod load;
pub mod machine;
pub mod mappings;
pub mod memory;
pub mod options;
pub mod peers;
pub mod plan;
pub mod pull;
pub mod rows;
pub mod save;
pub mod source;
pub mod staging;
pub mod stats;
pub mod store;
mod sync;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod threads;
#[cfg(not(debug_assertions))]
mod threads;
mod timeline;
mod timer;
#[cfg_attr(loom, path = "wake/model.rs")]
pub mod wake;
pub mod way;

pub use error::{Error, ErrorKind, Result};
pub use format::{Checkpoint, DType, TensorInfo};
pub use load::{Load, Next};
pub use options::{Cache, Io, Options, Order};
pub use plan::request::{Memory, Request, Where};
pub use plan::want::Want;
pub use stats::Report;

/// The Cargo features that this crate was built with.
pub const FEATURES: &[&str] = &[
    #[cfg(feature = "remote")]
    "remote",
    #[cfg(feature = "testing")]
    "testing",
];
