//! One load: it is started from a request, granted memory, waited for, handed out, ended.
//!
//! The engine thread owns source, device and state machine, and sleeps in one `poll`. Callers talk to it through an
//! inbox and a condition variable. It runs no foreign code and waits for no caller.

pub(crate) mod addresses;
mod blocks;
mod drive;
mod exchange;
mod exchange_trial;
mod files;
mod handle;
mod journal;
mod leased;
mod quiesce;
mod reader;
mod room;
mod shared;
#[cfg(test)]
mod simulator;
mod start;
mod transport;

pub use exchange_trial::TRIED;
pub use handle::{Load, Next};
pub use leased::{Handing, Leased};
pub use quiesce::quiesce;
pub use reader::Reader;
