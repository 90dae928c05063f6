//! The disk cache: objects of servers that were received once are kept in a folder of a local disk.

pub(crate) mod flow;
#[cfg(test)]
mod simulator;
