//! A read-only HTTP/1.1 server of checkpoints: GET and HEAD, ranges, strong ETags, `sendfile`.
//!
//! The server has two halves, which meet in the traits of [`served`]. One half knows names, sizes, versions and
//! descriptors: [`Folder`] is the files below a folder, [`Cache`] the objects of a disk cache,
//! [`Place`] the one until it is the other. The other half knows HTTP, and nothing of files.
//!
//! - `request` reads the head of a request; `name`, `range`, `conditions` and `date` are parts of it; `answer` decides,
//!   from the request and the facts of the object, what is answered. These are pure functions: `fuzz/` runs them.
//! - `connection` is the state of one connection, over a `wire` (a socket, or TLS on a socket).
//! - `server` has the threads. One accepts connections and closes those that are late. The others share one epoll: each
//!   takes a connection that is ready, works on it until its socket is full or empty, and puts it back. So a client that
//!   is slow costs a descriptor and its buffers, and a read that waits for the disk holds up one thread of 16.
//!
//! ```no_run
//! use penstock_serve::{Folder, Server, Settings};
//! use std::sync::Arc;
//!
//! let folder = Folder::open("/models".as_ref())?;
//! let server = Server::start(Arc::new(folder), Settings::default())?;
//! println!("http://{}", server.address());
//! # Ok::<(), penstock::Error>(())
//! ```
//!
//! # A file that changes
//!
//! An answer is of the version that its ETag names. The file is compared before the answer, after every piece of it, and
//! behind the last one. If it has changed, the connection is reset, and the client gets an error. A small gap is left:
//! `sendfile` gives pages of the page cache to the network, so a program that writes *into* a file can still change bytes
//! that are on their way when the answer ends. Files that are replaced (by a rename) have no such gap. With
//! [`Settings::sends_files`] off, and with TLS, bytes are copied first and compared then: there is no gap.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod answer;
mod cache;
mod conditions;
mod connection;
mod date;
mod folder;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod listing;
mod log;
mod metrics;
mod name;
mod place;
mod poller;
mod range;
mod request;
pub mod served;
mod server;
mod settings;
mod tls;
mod token;
mod wire;

pub use cache::Cache;
pub use folder::Folder;
pub use name::Name;
pub use place::Place;
pub use server::Server;
pub use settings::Settings;
