//! What the connections decide, one decision at a time: on wires on which nothing comes, in a time that tests set.

use super::address::{Address, Server};
use super::answer::Expected;
use super::jitter::Jitter;
use super::link::{Link, LinkState};
use super::net::{Common, Net, MUCH};
use super::node_budget::NodeBudget;
use super::range_read::{RangeRead, Site};
use super::request::Unsigned;
use super::told::Told;
use super::wires::{Watched, WireEnd, Wires};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Route, Ticket};
use crate::wake::Wake;
use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct QuietStream;

impl WireEnd for QuietStream {
    fn is_ready(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn say(&mut self, _: String) {}

    fn send(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn has_to_send(&self) -> bool {
        false
    }

    fn holds_bytes(&self) -> bool {
        false
    }

    unsafe fn receive(&mut self, _: &mut [libc::iovec]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}

struct QuietWires(Rc<Cell<Instant>>);

impl Wires for QuietWires {
    type Stream = QuietStream;

    fn now(&self) -> Instant {
        self.0.get()
    }

    fn jitter(&self) -> Jitter {
        Jitter::seeded(1)
    }

    fn wake(&self) -> Option<&Arc<Wake>> {
        None
    }

    fn connect(&mut self, _: &Server) -> Result<Option<QuietStream>> {
        Ok(Some(QuietStream))
    }

    fn watch(&mut self, _: &QuietStream, _: usize, _: Watched, _: Watched) -> Result<()> {
        Ok(())
    }

    fn wait(&mut self, _: Option<Duration>, _: &mut Vec<usize>) -> Result<bool> {
        Ok(true)
    }
}

fn quiet(now: &Rc<Cell<Instant>>) -> Net<QuietWires> {
    Net::new(QuietWires(now.clone()), Arc::new(Common::default()), Arc::default())
}

fn server(host: &str) -> Server {
    Address::parse(&format!("http://{host}/o")).unwrap().server
}

fn read(host: &str) -> RangeRead {
    let at = format!("http://{host}/o");
    let site = Arc::new(Site::new(at.clone().into(), at, Arc::new(Unsigned)));
    RangeRead::new(Ticket(1), Route::Buffered, site, Expected { object: None, range: 0..1 << 30 }, None)
}

/// A connection to this server on which nothing is asked, within this budget if there is one.
fn idle(net: &mut Net<QuietWires>, host: &str, now: Instant) {
    let permit = net.node.as_mut().map(|node| node.take(now).unwrap());
    let mut link = Link::new(QuietStream, permit, server(host), now);
    link.state = LinkState::Idle;
    let number = net.links.room();
    net.links.put(number, link);
}

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("penstock-net-{name}-{}", std::process::id()))
}

#[test]
fn a_time_that_has_passed_is_not_waited_for() {
    let (now, folder) = (Rc::new(Cell::new(Instant::now())), folder("past"));
    let (begun, later) = (now.get(), now.get() + Duration::from_secs(1));
    // No connection of the node is free, and then nothing is tried for a while.
    let mut net = quiet(&now);
    let mut other = NodeBudget::join(&folder, 1, Jitter::seeded(2)).unwrap();
    let all = other.take(begun).unwrap();
    net.node = Some(NodeBudget::join(&folder, 1, Jitter::seeded(3)).unwrap());
    assert!(net.node.as_mut().unwrap().take(begun).is_none());
    net.add(read("10.0.0.1"));
    assert!(net.patience(begun).unwrap() > Duration::ZERO);
    assert_eq!(net.patience(later), None);
    drop((net, all, other));
    // Requests may be sent again, and there is no connection to the server of what waits.
    let mut net = quiet(&now);
    idle(&mut net, "10.0.0.2", begun);
    net.add(read("10.0.0.1"));
    net.request_rate.refused(begun, 1, (Duration::from_millis(5), Duration::from_millis(50)));
    assert!(net.patience(begun).unwrap() > Duration::ZERO);
    assert_eq!(net.patience(later), None);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_idle_connection_to_another_server_gives_its_permit_to_one_that_is_refused() {
    let (now, folder) = (Rc::new(Cell::new(Instant::now())), folder("idle"));
    let mut net = quiet(&now);
    let mut other = NodeBudget::join(&folder, 2, Jitter::seeded(2)).unwrap();
    let permit = other.take(now.get()).unwrap();
    net.node = Some(NodeBudget::join(&folder, 2, Jitter::seeded(3)).unwrap());
    idle(&mut net, "10.0.0.2", now.get());
    net.add(read("10.0.0.1"));
    assert!(net.connect_more(now.get(), &mut Vec::new()));
    let servers: Vec<_> = net.links.iter().map(|(_, link)| link.server.host.clone()).collect();
    assert_eq!(servers, ["10.0.0.1"]);
    assert!(other.take(now.get()).is_none(), "the permit was kept");
    drop((net, permit, other));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_body_that_begins_again_each_time_is_not_asked_for_without_end() {
    let now = Rc::new(Cell::new(Instant::now()));
    let mut net = quiet(&now);
    net.add(read("10.0.0.1"));
    let (e, mut told) = (Error::new(ErrorKind::Io, "the connection is lost"), Vec::new());
    for _ in 0..100 {
        let Some(mut read) = net.waiting.take(0) else { break };
        read.begin();
        read.opened();
        net.tried(read, MUCH, &e, None, &mut told);
        now.set(now.get() + Duration::from_secs(3600));
        net.waiting.resume(now.get());
    }
    assert!(matches!(told[..], [Told::Done { result: Err(_), .. }]), "it is still asked for");
}
