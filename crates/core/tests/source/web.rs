//! A source of a web server that serves files of this machine: for the suites that take any source.

use crate::web_server::{Fault, WebServer};
use penstock::error::Result;
use penstock::extent::Ticket;
use penstock::options::Io;
use penstock::source::{Destination, Progress, Read, Source};
use penstock::store::{identity_of, Files, Location, Object, Store, Version, Web, WebSettings};
use penstock::way::Routing;
use std::any::Any;
use std::fs;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;

/// The server ends with the source.
struct Served {
    source: Box<dyn Source>,
    _server: WebServer,
}

pub(crate) fn web(files: Arc<Files>) -> Box<dyn Source> {
    let tag = |path: &str| identity_of(Path::new(path)).ok().map(|found| format!("\"{found:?}\""));
    let read = move |path: &str| Some((Arc::new(fs::read(path).ok()?), tag(path)?));
    let server = WebServer::by(Box::new(read), Box::new(|_| Fault::None));
    let version = Version::Strong(format!("\"{:?}\"", files.identity(0)));
    let location = Location::Url(server.url(files.path(0).to_str().unwrap()));
    let object = Object { location, size: files.size(0), version };
    // Threads that share the connections; in tests/web.rs it is one.
    let settings = WebSettings { connections: 24, threads: 3, request_bytes: 64 << 10, ..WebSettings::default() };
    let objects = Web::new(settings).objects(vec![Some(object)]).unwrap();
    let routing = Arc::new(Routing { depth: 8, requests: 8, ..Routing::default() });
    Box::new(Served { source: objects.source(Io::Auto, &routing).unwrap(), _server: server })
}

impl Source for Served {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        self.source.submit(read)
    }
    fn flush(&mut self) -> Result<()> {
        self.source.flush()
    }
    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.source.poll(events)
    }
    fn land(&mut self, ticket: Ticket, into: Destination, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
        self.source.land(ticket, into, keep)
    }
    fn cancel(&mut self) {
        self.source.cancel();
    }
    fn wake(&self) -> RawFd {
        self.source.wake()
    }
    fn in_flight(&self) -> usize {
        self.source.in_flight()
    }
}
