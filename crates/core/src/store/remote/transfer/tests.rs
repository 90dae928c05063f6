//! Decisions of the connections, one at a time: on wires on which nothing comes, in a time that tests set.

use super::fetch::RangeRequest;
use super::link::{Link, LinkState};
use super::net::{Net, MUCH};
use super::node_budget::NodeBudget;
use super::range_read::{RangeRead, Site};
use super::told::Told;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, Ticket};
use crate::store::remote::http::address::{Address, Server};
use crate::store::remote::http::answer::{Answer, Expected};
use crate::store::remote::http::common::Common;
use crate::store::remote::http::jitter::Jitter;
use crate::store::remote::http::request::WebRequests;
use crate::store::remote::http::settings::WebSettings;
use crate::store::remote::http::wires::{Watched, WireEnd, Wires};
use crate::wake::Wake;
use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connection on which nothing comes. Its server closes it when it is told to, after it was left.
#[derive(Default)]
struct QuietStream {
    closed: Rc<Cell<bool>>,
    aborted: Rc<Cell<bool>>,
}

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

    fn abort(&mut self) {
        self.aborted.set(true);
    }

    fn discard(&mut self, _: &mut [u8]) -> io::Result<usize> {
        if self.closed.get() {
            Ok(0)
        } else {
            Err(io::ErrorKind::WouldBlock.into())
        }
    }

    unsafe fn receive(&mut self, _: &mut [libc::iovec]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}

/// Wires on which nothing happens, except on the connection that was watched last.
struct QuietWires(Rc<Cell<Instant>>, Cell<Option<usize>>);

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
        Ok(Some(QuietStream::default()))
    }

    fn watch(&mut self, _: &QuietStream, number: usize, _: Watched, wanted: Watched) -> Result<()> {
        self.1.set(Some(number).filter(|_| wanted == Watched::Bytes));
        Ok(())
    }

    /// Takes as long as it may.
    fn wait(&mut self, most: Option<Duration>, numbers: &mut Vec<usize>) -> Result<bool> {
        numbers.extend(self.1.get());
        self.0.set(self.0.get() + most.unwrap_or_default());
        Ok(true)
    }
}

fn quiet(now: &Rc<Cell<Instant>>) -> Net<QuietWires> {
    Net::new(QuietWires(now.clone(), Cell::new(None)), Arc::new(Common::default()), Arc::default())
}

fn server(host: &str) -> Server {
    Address::parse(&format!("http://{host}/o")).unwrap().server
}

fn read(host: &str) -> RangeRead {
    let at = format!("http://{host}/o");
    let site = Arc::new(Site::new(at.clone().into(), at, Arc::new(WebRequests(None))));
    RangeRead::new(Ticket(1), Lane::NETWORK, site, Expected { object: None, range: 0..1 << 30 }, None)
}

/// A connection to this server on which nothing is asked, within this budget if there is one.
fn idle(net: &mut Net<QuietWires>, host: &str, now: Instant) {
    let link = made(net, host, now, &QuietStream::default());
    let number = net.links.room();
    net.links.put(number, link);
}

fn made(net: &mut Net<QuietWires>, host: &str, now: Instant, stream: &QuietStream) -> Link<QuietStream> {
    let permit = net.node.as_mut().map(|node| node.take(now).unwrap());
    let stream = QuietStream { closed: stream.closed.clone(), aborted: stream.aborted.clone() };
    let mut link = Link::new(stream, permit, server(host), now);
    link.state = LinkState::Idle;
    link
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
    assert!(!net.connect_more(now.get(), &mut Vec::new()), "its server has not closed it yet");
    assert!(net.patience(now.get()).is_some() && other.take(now.get()).is_none());
    now.set(now.get() + Duration::from_secs(2));
    net.parting.expire(now.get());
    assert!(other.take(now.get()).is_none(), "the permit was kept");
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
    assert!(
        matches!(told[..], [Told::Done { done: crate::source::Done { result: Err(_), .. }, .. }]),
        "it is still asked for"
    );
}

#[test]
fn a_place_in_the_budget_is_free_when_the_server_has_closed_its_connection_and_nothing_waits_for_that() {
    let (now, folder) = (Rc::new(Cell::new(Instant::now())), folder("parting"));
    let begun = now.get();
    let is_free = |other: &mut NodeBudget, at| other.take(at).is_some();
    // The server closes it, or never does.
    for closes in [true, false] {
        let (mut net, stream) = (quiet(&now), QuietStream::default());
        let mut other = NodeBudget::join(&folder, 1, Jitter::seeded(2)).unwrap();
        net.node = Some(NodeBudget::join(&folder, 1, Jitter::seeded(3)).unwrap());
        now.set(begun);
        let link = made(&mut net, "10.0.0.1", begun, &stream);
        net.leave(link, begun);
        assert_eq!((now.get(), net.parting.len()), (begun, 1), "nobody has waited");
        assert!(!is_free(&mut other, begun) && !stream.aborted.get());
        net.longest_wait = Some(Duration::from_millis(50));
        net.turn(&mut Vec::new()).unwrap();
        assert_eq!((now.get() - begun, net.parting.len()), (Duration::from_millis(50), 1), "a turn like any other");
        stream.closed.set(closes);
        (net.longest_wait, net.wires.1) = (None, Cell::new(net.wires.1.get().filter(|_| closes)));
        net.turn(&mut Vec::new()).unwrap();
        net.turn(&mut Vec::new()).unwrap();
        assert_eq!(net.parting.len(), 0, "closes: {closes}");
        assert!(is_free(&mut other, now.get()));
        drop((net, other));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn others_are_looked_at_again_when_a_place_is_free_and_only_then() {
    let (now, folder) = (Rc::new(Cell::new(Instant::now())), folder("again"));
    let (begun, stream, mut net) = (now.get(), QuietStream::default(), quiet(&now));
    net.node = Some(NodeBudget::join(&folder, 1, Jitter::seeded(3)).unwrap());
    let link = made(&mut net, "10.0.0.1", begun, &stream);
    net.leave(link, begun);
    let node = net.node.as_mut().unwrap();
    assert!(node.take(begun).is_none() && node.due().is_some(), "all places are taken, so it looks again later");
    assert!(!net.parting.expire(begun + Duration::from_millis(999)) && net.parting.len() == 1);
    assert_eq!(net.parting.advance(3, &mut []), None);
    now.set(begun + Duration::from_secs(1));
    net.longest_wait = Some(Duration::from_millis(1));
    net.turn(&mut Vec::new()).unwrap();
    assert_eq!(net.node.as_ref().map(NodeBudget::due), Some(None), "it is looked at once");
    drop(net);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_connection_that_still_brings_something_is_ended_at_once_and_its_place_is_kept_for_a_moment() {
    let (now, folder) = (Rc::new(Cell::new(Instant::now())), folder("abort"));
    let (begun, stream, mut net) = (now.get(), QuietStream::default(), quiet(&now));
    net.node = Some(NodeBudget::join(&folder, 1, Jitter::seeded(3)).unwrap());
    let mut link = made(&mut net, "10.0.0.1", begun, &stream);
    net.add(read("10.0.0.1"));
    link.fetch = RangeRequest::take(&mut net.waiting, 0, 1 << 20, 0);
    link.state = LinkState::Body;
    assert_eq!(net.leave(link, begun).map(|fetch| fetch.reads.len()), Some(1), "what was asked is asked again");
    assert!(stream.aborted.get());
    assert_eq!((net.parting.len(), net.parting.awaits_ends()), (1, false));
    net.parting.expire(begun + Duration::from_secs(1));
    assert_eq!(net.parting.len(), 0);
    drop(net);
    std::fs::remove_dir_all(folder).unwrap();
}

/// Asks for a read that fails in this way each time, until it is given up: how often it was asked for, for how long, and the
/// pauses.
fn given_up(settings: WebSettings, answer: &Answer) -> (u32, Duration, Vec<Duration>) {
    let now = Rc::new(Cell::new(Instant::now()));
    let (begun, mut told, mut pauses) = (now.get(), Vec::new(), Vec::new());
    let mut net = quiet(&now);
    net.common = Arc::new(Common { settings, ..Common::default() });
    let mut first = read("10.0.0.1");
    first.answered = true;
    net.add(first);
    for tries in 1.. {
        let fetch = RangeRequest::take(&mut net.waiting, 0, 1 << 20, 0).unwrap();
        let verdict = answer.judge(&fetch.expected());
        net.judged(fetch, verdict, now.get(), &mut told);
        let Some(due) = net.waiting.next_due() else { return (tries, now.get() - begun, pauses) };
        pauses.push(due - now.get());
        now.set(due);
        net.waiting.resume(due);
    }
    unreachable!()
}

#[test]
fn a_busy_server_is_asked_for_as_long_as_the_load_is_patient_and_another_failure_eight_times() {
    let seconds = Duration::from_secs;
    let slow_down = b"<Error><Code>SlowDown</Code></Error>";
    for (status, body) in [(503, &b""[..]), (503, slow_down), (429, b"")] {
        let answer = Answer::of(status, &[], body);
        for (busy, patience, least) in [(3, None, 3), (3, Some(9), 9), (120, None, 120), (120, Some(9), 120)] {
            let patience = patience.map(seconds);
            let settings = WebSettings { busy: seconds(busy), patience, ..WebSettings::default() };
            let (tries, took, pauses) = given_up(settings, &answer);
            // Eight times in any case: with a short patience that takes as long.
            assert!(tries >= 8 && took >= seconds(least), "{status} {busy} {patience:?}: {tries} in {took:?}");
            assert!(took <= seconds(least.max(25) + 5), "{status} {busy} {patience:?}: {tries} in {took:?}");
            assert!(pauses.iter().all(|pause| (seconds(1) / 4..=seconds(5)).contains(pause)), "{pauses:?}");
        }
    }
    let broken = Answer::of(500, &[], b"");
    let (tries, took, _) = given_up(WebSettings::default(), &broken);
    assert!(tries == 8 && took < seconds(25), "{tries} in {took:?}");
    let patient = WebSettings { patience: Some(seconds(60)), ..WebSettings::default() };
    let (tries, took, _) = given_up(patient, &broken);
    assert!(tries > 8 && (seconds(60)..seconds(66)).contains(&took), "{tries} in {took:?}");
}

#[test]
fn pauses_are_random() {
    // The jitter of these wires begins with the same seed each time: what differs are the pauses of one read.
    for status in [503, 500] {
        let (.., pauses) = given_up(WebSettings::default(), &Answer::of(status, &[], b""));
        let distinct: std::collections::HashSet<_> = pauses.iter().collect();
        assert_eq!(distinct.len(), pauses.len(), "{status}: {pauses:?}");
    }
}
