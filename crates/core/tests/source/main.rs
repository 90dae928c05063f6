//! Sources: the conformance suite, and what only some of them must do.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

mod arrivals;
mod conformance;
mod fallbacks;
mod files;
mod fuse;
mod sample;
mod store;
mod throttle;
#[path = "../toy_store/mod.rs"]
mod toy_store;
mod web;
#[path = "../web_server/mod.rs"]
mod web_server;
