//! Whether a rank is there while ranks meet. Before they are connected, a rank that plans is as silent as one that was
//! stopped.
//!
//! A rank that has told the others its address has a [`Pulse`]: a thread that answers each connection. A rank that waits for
//! another one asks it now and then ([`Pulses`]): a process that is gone refuses, and one that was stopped does not answer.
//! When the ranks are connected, the thread says on each connection that this rank is alive, until the exchange does.

use super::watch::peer_error;
use crate::error::{Error, Result};
use crate::sync::{lock, Builder, JoinHandle, Mutex};
use crate::threads::{guarded, step};
use crate::wake::Wake;
use std::io::{ErrorKind as Why, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank says apart from bytes: one byte for what it is, four for the length of a text, the text.
pub(super) const WORD: usize = 5;
/// The word of a rank that is alive: it has no text.
pub(super) const ALIVE: u8 = 0;
/// What a rank answers.
const ANSWER: &[u8; 8] = b"penstock";
/// From one question to the next, at most: in a rank's silence that ends the load there are several. Ranks that meet at once ask
/// nothing.
const EVERY: Duration = Duration::from_millis(250);
/// From one word to the next.
const BEAT: Duration = Duration::from_millis(50);
/// How long a connection may take, at most. Kernels answer, not processes.
const CONNECTED: Duration = Duration::from_millis(100);
/// Ranks whose answers are waited for at the same time.
const ASKED: usize = 64;

/// A rank that answers.
#[derive(Debug)]
pub(super) struct Pulse {
    address: SocketAddr,
    beating: Arc<Beating>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Beating {
    over: Wake,
    /// Connections on which to say that this rank is alive.
    said_on: Mutex<Vec<TcpStream>>,
    /// Why nothing is answered any more.
    failed: Mutex<Option<Error>>,
}

impl Pulse {
    /// Answers at a port of its own.
    pub(super) fn start(at: IpAddr) -> Result<Pulse> {
        let failed = |e: std::io::Error| Error::io(&format!("listen at {at}"), &e);
        let listener = TcpListener::bind((at, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let beating =
            Arc::new(Beating { over: Wake::new()?, said_on: Mutex::new(Vec::new()), failed: Mutex::new(None) });
        let its = beating.clone();
        let thread = Builder::new().name("penstock-pulse".to_owned()).spawn(move || {
            // Without the listener other ranks are refused: to them this one is gone.
            if let Err(e) = guarded("penstock-pulse", || its.run(&listener)) {
                *lock(&its.failed) = Some(e);
            }
        });
        let thread = thread.map_err(|e| Error::io("start a thread", &e))?;
        Ok(Pulse { address, beating, thread: Some(thread) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it answers.
    ///
    /// # Errors
    /// `Internal`: its thread has panicked.
    pub(super) fn check(&self) -> Result<()> {
        lock(&self.beating.failed).clone().map_or(Ok(()), Err)
    }

    /// Says from now on that this rank is alive, on these connections. The exchange, which is to come, says it there too.
    pub(super) fn speak<'a>(&self, connections: impl Iterator<Item = &'a TcpStream>) -> Result<()> {
        let connections = connections.map(TcpStream::try_clone).collect::<std::io::Result<Vec<TcpStream>>>();
        let connections = connections.map_err(|e| Error::io("keep a connection", &e))?;
        connections.iter().for_each(alive);
        *lock(&self.beating.said_on) = connections;
        Ok(())
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.beating.over.notify();
        if let Some(thread) = self.thread.take() {
            let _nobody_was_told = thread.join();
        }
    }
}

impl Beating {
    fn run(&self, listener: &TcpListener) {
        let mut spoken = Instant::now();
        loop {
            step("penstock-pulse");
            let fds = [self.over.fd(), listener.as_raw_fd()];
            let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
            // SAFETY: two entries, as the count says.
            unsafe { libc::poll(polled.as_mut_ptr(), 2, BEAT.as_millis() as i32) };
            if polled[0].revents != 0 {
                return;
            }
            if let Ok((mut stream, _)) = listener.accept() {
                // It always fits into an empty buffer of the kernel. The rank that has asked may be gone by now.
                let _sent = stream.set_nonblocking(true).and_then(|()| stream.write_all(ANSWER));
            } else if polled[1].revents != 0 {
                // No descriptors are left, or the like: it passes
                std::thread::sleep(BEAT);
            }
            if spoken.elapsed() >= BEAT {
                spoken = Instant::now();
                lock(&self.said_on).iter().for_each(alive);
            }
        }
    }
}

/// A few bytes each time: they fit, or others wait there to be read.
fn alive(mut connection: &TcpStream) {
    let mut word = [0; WORD];
    word[0] = ALIVE;
    let _it_may_be_gone = connection.write(&word);
}

/// Asks other ranks whether they are there.
#[derive(Debug)]
pub(super) struct Pulses {
    of: Vec<Inquiry>,
    silence: Duration,
    /// From one question to the next.
    every: Duration,
    /// A rank that refuses is asked no more. Otherwise that is an error.
    forgiving: bool,
    /// Where among the ranks the next look begins: where the time of the last one was spent.
    first: usize,
}

#[derive(Debug)]
struct Inquiry {
    address: SocketAddr,
    /// When it was asked first after its last answer: its silence begins with that question.
    unanswered: Option<Instant>,
    /// When it was looked at last.
    looked: Instant,
    next: Instant,
    /// Where its answer comes, and how much of it came.
    answer: Option<(TcpStream, usize)>,
    /// It has refused, and is asked no more.
    ended: bool,
}

impl Pulses {
    /// `addresses`: of all ranks. `silence`: one that does not answer for so long was stopped.
    pub(super) fn new(addresses: &[SocketAddr], silence: Duration) -> Pulses {
        Pulses::asked(addresses, silence, EVERY.min(silence / 8), false)
    }

    /// The same for ranks that may end when they want to, each of which is asked once in `every` at most, as long as it
    /// answers. `every` may be longer than `silence`.
    pub(super) fn forgiving(addresses: &[SocketAddr], silence: Duration, every: Duration) -> Pulses {
        Pulses::asked(addresses, silence, every.max(EVERY.min(silence / 8)), true)
    }

    fn asked(addresses: &[SocketAddr], silence: Duration, every: Duration, forgiving: bool) -> Pulses {
        let now = Instant::now();
        let asked = |address: &SocketAddr| {
            let (address, next) = (*address, now + every);
            Inquiry { address, unanswered: None, looked: now, next, answer: None, ended: false }
        };
        Pulses { of: addresses.iter().map(asked).collect(), silence, every, forgiving, first: 0 }
    }

    /// Asks those of these ranks whose turn it is, and hears answers.
    ///
    /// # Errors
    /// `Peer`: one of them is gone, or was stopped. A rank that has failed, or has met all others, is gone too: the caller
    /// looks first whether that is so.
    pub(super) fn look(&mut self, ranks: &[u32]) -> Result<()> {
        let now = Instant::now();
        // Ranks that answer make room for the others.
        let mut asking = self.of.iter().filter(|asked| asked.answer.is_some()).count();
        // A host that is lost costs time at each question. A look that took long would find the next one late.
        let (longest, mut spent) = (self.silence / 8, None);
        let connected = CONNECTED.min(longest).max(Duration::from_millis(1));
        let first = if self.first < ranks.len() { self.first } else { 0 };
        // In its silence a rank is asked several times.
        let again = now + self.every.min(self.silence / 8);
        for (at, &rank) in ranks.iter().enumerate().cycle().skip(first).take(ranks.len()) {
            let Some(asked) = self.of.get_mut(rank as usize).filter(|asked| !asked.ended) else { continue };
            let host = asked.address.ip().to_string();
            let failed = |why: String| Err(peer_error(rank, &host, &why).because(why));
            if now.saturating_duration_since(asked.looked) > self.silence / 2 {
                // This process itself was stopped, or has not waited for this rank meanwhile: it has not heard it
                asked.unanswered = asked.unanswered.and(Some(now));
            }
            asked.looked = now;
            let is_next = asked.answer.is_none() && now >= asked.next && asking < ASKED;
            if is_next && now.elapsed() >= longest {
                spent.get_or_insert(at);
            } else if is_next {
                asked.next = now + self.every;
                asking += 1;
                asked.unanswered.get_or_insert(now);
                match TcpStream::connect_timeout(&asked.address, connected) {
                    Ok(stream) if stream.set_nonblocking(true).is_ok() => asked.answer = Some((stream, 0)),
                    Err(e) if e.kind() == Why::ConnectionRefused && self.forgiving => {
                        asked.ended = true;
                        continue;
                    }
                    Err(e) if e.kind() == Why::ConnectionRefused => {
                        return failed("is gone: its process has ended".into())
                    }
                    // It may pass. If not, that is silence.
                    _ => asked.next = again,
                }
            }
            if let Some((stream, have)) = &mut asked.answer {
                let mut rest = [0; ANSWER.len()];
                match stream.read(&mut rest[*have..]) {
                    Ok(more) => {
                        *have += more;
                        if *have == ANSWER.len() {
                            (asked.answer, asked.unanswered) = (None, None);
                        } else if more == 0 {
                            (asked.answer, asked.next) = (None, again);
                        }
                    }
                    Err(e) if matches!(e.kind(), Why::WouldBlock | Why::Interrupted) => {}
                    Err(_) => (asked.answer, asked.next) = (None, again),
                }
            }
            let silent = asked.unanswered.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            if silent >= self.silence {
                return failed(format!(
                    "has said nothing for {:.1} s: its process was stopped, or its host or network is down",
                    silent.as_secs_f64()
                ));
            }
        }
        self.first = spent.unwrap_or(0);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const SILENCE: Duration = Duration::from_millis(600);

    /// Looks until it fails, at most for two silences and a half.
    fn watched(addresses: &[SocketAddr], ranks: &[u32]) -> Option<Error> {
        let mut pulses = Pulses::new(addresses, SILENCE);
        let begun = Instant::now();
        while begun.elapsed() < SILENCE * 5 / 2 {
            if let Err(e) = pulses.look(ranks) {
                return Some(e);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    #[test]
    fn a_rank_that_answers_is_there_and_one_whose_process_has_ended_is_not() {
        let pulses = [Pulse::start(HERE).unwrap(), Pulse::start(HERE).unwrap()];
        let addresses = pulses.each_ref().map(Pulse::address);
        assert!(watched(&addresses, &[0, 1]).is_none());
        let [first, second] = pulses;
        drop(second);
        let error = watched(&addresses, &[0, 1]).unwrap();
        assert_eq!(error.peer().map(|peer| peer.0), Some(1), "{error}");
        assert!(watched(&addresses, &[0]).is_none());
        drop(first);
    }

    #[test]
    fn a_rank_that_does_not_answer_was_stopped() {
        // The kernel connects, as for a process that was stopped
        let stopped = TcpListener::bind((HERE, 0)).unwrap();
        let error = watched(&[stopped.local_addr().unwrap()], &[0]).unwrap();
        assert!(error.to_string().contains("has said nothing"), "{error}");
    }

    #[test]
    fn a_rank_that_answers_is_there_when_it_is_seldom_asked() {
        let rank = Pulse::start(HERE).unwrap();
        let (silence, every) = (SILENCE * 2 / 3, SILENCE);
        let mut pulses = Pulses::forgiving(&[rank.address()], silence, every);
        let begun = Instant::now();
        while begun.elapsed() < every * 2 {
            pulses.look(&[0]).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_rank_that_is_seldom_asked_and_was_stopped_is_told() {
        let stopped = TcpListener::bind((HERE, 0)).unwrap();
        let (silence, every) = (SILENCE / 4, SILENCE / 2);
        let begun = Instant::now();
        let mut pulses = Pulses::forgiving(&[stopped.local_addr().unwrap()], silence, every);
        while pulses.look(&[0]).is_ok() {
            assert!(begun.elapsed() < SILENCE * 10);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(begun.elapsed() >= silence + every);
    }

    #[test]
    fn ranks_whose_hosts_do_not_answer_are_told_however_many_there_are() {
        // Its queue is full: the kernel answers no further connection.
        let full = TcpListener::bind((HERE, 0)).unwrap();
        let address = full.local_addr().unwrap();
        // SAFETY: a plain system call on our own descriptor.
        assert_eq!(unsafe { libc::listen(full.as_raw_fd(), 0) }, 0);
        let connect = || TcpStream::connect_timeout(&address, CONNECTED).ok();
        let queued: Vec<TcpStream> = std::iter::from_fn(connect).take(16).collect();
        assert!(queued.len() < 16, "the queue is never full");
        let there = Pulse::start(HERE).unwrap();
        let mut addresses = vec![address; 24];
        addresses.push(there.address());
        let ranks: Vec<u32> = (0..addresses.len() as u32).collect();
        let mut pulses = Pulses::new(&addresses, SILENCE);
        let begun = Instant::now();
        let error = loop {
            if let Err(e) = pulses.look(&ranks) {
                break e;
            }
            assert!(begun.elapsed() < SILENCE * 10, "they are never told");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(error.peer().is_some_and(|peer| peer.0 < 24), "{error}");
    }

    #[test]
    fn a_rank_says_on_its_connections_that_it_is_alive() {
        let pulse = Pulse::start(HERE).unwrap();
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        pulse.speak([&here].into_iter()).unwrap();
        let mut words = [1; 3 * WORD];
        there.read_exact(&mut words).unwrap();
        assert_eq!(words, [0; 3 * WORD]);
    }
}
