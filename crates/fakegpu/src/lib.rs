//! A libcuda and libamdhip64 on host memory that detects misuse. Development only.
//!
//! The cdylib exports the driver functions penstock uses, under the names the real libraries export (`cuMemAlloc_v2`,
//! `hipMalloc`, ...), and a control interface (`fakegpu_*`, see [`Library`]) that tests call from Rust or from Python's
//! `ctypes`. Device memory is anonymous host memory between guard pages, so a device pointer can be read directly;
//! a stream is a thread with a queue, so a copy really runs later than its submission; an event is a marker in that
//! queue.
//!
//! Two detectors work side by side. *What happened*: every copy's source is summed when it is submitted and the bytes
//! that arrived are summed when it has run, so a staging buffer that is rewritten too early is seen. *What could have
//! happened*: streams, events and host synchronisation carry vector clocks, and two accesses to the same bytes, one of
//! them a write, that no chain of those orders are a misuse even if this time they came in a harmless order. A removed
//! fence is therefore found every time, not once in a hundred runs.
//!
//! The host counts as one participant: its threads order themselves by means a driver cannot see, so whatever any of
//! them has waited for counts as known to all. That can hide a race between host threads; it can never invent one.
//!
//! State belongs to the loaded library. Tests in one process share it: take [`Library::exclusive`], which also resets.
//! Every misuse kind is listed in the `Kind` enum of `misuse.rs`, every setting (environment variable or
//! [`Library::configure`] key) in `inject.rs`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod clocks;
mod codes;
mod control;
mod cuda;
mod driver;
mod exports;
mod hip;
mod inject;
mod library;
mod memory;
mod misuse;
mod state;
mod stream;

pub use library::{library_path, Exclusive, Library};

#[cfg(test)]
mod tests;
