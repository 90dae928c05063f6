//! Whether a rank is there while ranks meet. Before they are connected, a rank that plans is as silent as one that was
//! stopped.
//!
//! A rank that has told the others its address has a [`Pulse`]: a thread that answers each connection. A rank that waits for
//! another one asks it now and then ([`Prober`]): a process that is gone refuses, and one that was stopped does not answer.
//! Who is asked says first which rank it is, by bytes that only those know who have read them in the store: a port may have gone
//! to another program. Ranks with a key then prove to each other that they have it, as in [`handshake`](super::handshake).
//!
//! When the ranks are connected, the thread says on each connection that this rank is alive, until the exchange does.

use super::key::{digest, nonce, Pass, PeerKey, CODE, KEY, NONCE};
use super::place::{address_of, ListenAt};
use super::watch::peer_error;
use crate::error::{Error, Result};
use crate::source::wait_readable;
use crate::sync::{lock, Builder, JoinHandle, Mutex};
use crate::threads::{guarded, step};
use crate::wake::Wake;
use std::io::{ErrorKind as Why, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The length of a word between ranks, in bytes: one for its kind, four for the length of a text. The text follows.
pub(super) const WORD: usize = 5;
/// The word of a rank that is alive: it has no text.
pub(super) const ALIVE: u8 = 0;
/// The length of the first message: a magic number, rank and load, and a random number (zero without a key).
const HELLO: usize = 8 + 16 + NONCE;
const MAGIC: &[u8; 8] = b"penstock";
/// The length of the asking rank's message, if there is a key: its rank, a random number, its proof.
const QUESTION: usize = 4 + NONCE + CODE;
const ASKS: &str = "penstock: a rank that asks whether another one is there";
const IS_HERE: &str = "penstock: a rank that is there";
/// From one question to the next, at most: in a rank's silence that ends the load there are several. Ranks that meet at once ask
/// nothing.
const EVERY: Duration = Duration::from_millis(250);
/// From one word to the next.
const BEAT: Duration = Duration::from_millis(50);
/// How long a connection may take, at most. Kernels answer, not processes.
const CONNECTED: Duration = Duration::from_millis(100);
/// Ranks whose answers are waited for at the same time.
const ASKED: usize = 64;
/// The most ranks that may ask at the same time, and how long each may take for its proof.
const ASKING: usize = 256;
const PROVEN: Duration = Duration::from_secs(5);

/// A rank that answers.
#[derive(Debug)]
pub(super) struct Pulse {
    address: SocketAddr,
    shared: Arc<PulseShared>,
    thread: Option<JoinHandle<()>>,
    /// In a forked child it is the parent's: their eventfd is the same.
    process: u32,
}

#[derive(Debug)]
struct PulseShared {
    over: Wake,
    /// Connections on which to say that this rank is alive.
    said_on: Mutex<Vec<TcpStream>>,
    /// The error that ended the answers.
    failed: Mutex<Option<Error>>,
    pass: Pass,
}

/// Somebody who asks, and has not proved yet that it may.
struct Stranger {
    stream: TcpStream,
    hello: [u8; HELLO],
    question: [u8; QUESTION],
    have: usize,
    since: Instant,
}

impl Pulse {
    /// Answers at a port of a place.
    pub(super) fn start(place: ListenAt, pass: &Pass) -> Result<Pulse> {
        let listener = place.listen()?;
        let address = address_of(&listener)?;
        let said_on = Mutex::new(Vec::new());
        let (over, pass) = (Wake::new()?, pass.clone());
        let shared = Arc::new(PulseShared { over, said_on, failed: Mutex::new(None), pass });
        let its = shared.clone();
        let thread = Builder::new().name("penstock-pulse".to_owned()).spawn(move || {
            // Without the listener other ranks are refused: to them this one is gone.
            if let Err(e) = guarded("penstock-pulse", || its.run(&listener)).and_then(|ran| ran) {
                *lock(&its.failed) = Some(e);
            }
        });
        let thread = thread.map_err(|e| Error::io("start a thread", &e))?;
        Ok(Pulse { address, shared, thread: Some(thread), process: std::process::id() })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it answers.
    ///
    /// # Errors
    /// `Internal`: its thread has panicked.
    pub(super) fn check(&self) -> Result<()> {
        lock(&self.shared.failed).clone().map_or(Ok(()), Err)
    }

    /// Says from now on that this rank is alive, on these connections. The exchange, which is to come, says it there too.
    pub(super) fn speak<'a>(&self, connections: impl Iterator<Item = &'a TcpStream>) -> Result<()> {
        let connections = connections.map(TcpStream::try_clone).collect::<std::io::Result<Vec<TcpStream>>>();
        let connections = connections.map_err(|e| Error::io("keep a connection", &e))?;
        connections.iter().for_each(alive);
        *lock(&self.shared.said_on) = connections;
        Ok(())
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.over.notify();
        if let Some(thread) = self.thread.take() {
            let _nobody_was_told = thread.join();
        }
    }
}

impl PulseShared {
    fn run(&self, listener: &TcpListener) -> Result<()> {
        let mut spoken = Instant::now();
        let mut strangers: Vec<Stranger> = Vec::new();
        loop {
            step("penstock-pulse");
            let fds = [self.over.fd(), listener.as_raw_fd()].into_iter();
            let fds = fds.chain(strangers.iter().map(|stranger| stranger.stream.as_raw_fd()));
            let readable = wait_readable(fds, Some(BEAT));
            if readable[0] {
                return Ok(());
            }
            if let Ok((stream, _)) = listener.accept() {
                strangers.extend(self.greet(stream)?);
            } else if readable[1] {
                // No descriptors are left, or the like: it passes
                std::thread::sleep(BEAT);
            }
            let too_many = strangers.len().saturating_sub(ASKING);
            strangers.drain(..too_many);
            strangers.retain_mut(|stranger| stranger.since.elapsed() < PROVEN && self.asked(stranger));
            if spoken.elapsed() >= BEAT {
                spoken = Instant::now();
                lock(&self.said_on).iter().for_each(alive);
            }
        }
    }

    /// Says which rank this is. Who has asked has to prove what it is, if there is a key.
    fn greet(&self, mut stream: TcpStream) -> Result<Option<Stranger>> {
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(MAGIC);
        hello[8..24].copy_from_slice(&digest(&self.pass.token));
        if self.pass.key.is_some() {
            hello[24..].copy_from_slice(&nonce()?);
        }
        // It always fits into an empty buffer of the kernel. The rank that has asked may be gone by now.
        let sent = stream.set_nonblocking(true).and_then(|()| stream.write_all(&hello));
        let since = Instant::now();
        let goes_on = sent.is_ok() && self.pass.key.is_some();
        Ok(goes_on.then_some(Stranger { stream, hello, question: [0; QUESTION], have: 0, since }))
    }

    /// Hears a question, and answers it if it is one of ours. Whether more of it is to come.
    fn asked(&self, stranger: &mut Stranger) -> bool {
        let Stranger { stream, hello, question, have, .. } = stranger;
        match stream.read(&mut question[*have..]) {
            Ok(0) => return false,
            Ok(more) => *have += more,
            Err(e) => return matches!(e.kind(), Why::WouldBlock | Why::Interrupted),
        }
        if *have < QUESTION {
            return true;
        }
        if let Some(answer) = self.pass.key.as_ref().and_then(|key| answer(key, self.pass.rank, hello, question)) {
            let _it_may_be_gone = stream.write_all(&answer);
        }
        false
    }
}

/// The question of a rank to one that has said `hello`.
fn question(key: &PeerKey, (from, to): (u32, u32), hello: &[u8; HELLO], mine: &[u8; NONCE]) -> [u8; QUESTION] {
    let mut said = [0; QUESTION];
    said[..4].copy_from_slice(&from.to_le_bytes());
    said[4..4 + NONCE].copy_from_slice(mine);
    said[4 + NONCE..].copy_from_slice(&key.code(ASKS, &[hello, &from.to_le_bytes(), &to.to_le_bytes(), mine]));
    said
}

/// The answer to a question, if whoever asks has the key.
fn answer(key: &PeerKey, rank: u32, hello: &[u8; HELLO], question: &[u8; QUESTION]) -> Option<[u8; CODE]> {
    let ((from, rest), to) = (question.split_at(4), rank.to_le_bytes());
    let (theirs, proof) = rest.split_at(NONCE);
    key.is_code(proof, ASKS, &[hello, from, &to, theirs]).then(|| key.code(IS_HERE, &[hello, from, &to, theirs]))
}

/// A few bytes each time: they fit, or others wait there to be read.
fn alive(mut connection: &TcpStream) {
    let mut word = [0; WORD];
    word[0] = ALIVE;
    let _it_may_be_gone = connection.write(&word);
}

/// A rank that can be asked: where, and the random bytes that it has told the others.
pub type Reachable = (SocketAddr, [u8; 16]);

/// Asks other ranks whether they are there.
#[derive(Debug)]
pub(super) struct Prober {
    of: Vec<Probe>,
    silence: Duration,
    /// From one question to the next.
    every: Duration,
    /// A rank that refuses is asked no more. Otherwise that is an error.
    forgiving: bool,
    /// Where among the ranks the next look begins: where the time of the last one was spent.
    first: usize,
    /// The rank that asks.
    rank: u32,
    key: Option<PeerKey>,
}

#[derive(Debug)]
struct Probe {
    address: SocketAddr,
    /// The id in its first message.
    id: [u8; 16],
    /// When it was asked first after its last answer: its silence begins with that question.
    unanswered: Option<Instant>,
    /// When it was looked at last.
    looked: Instant,
    next: Instant,
    /// Where its answer comes.
    answer: Option<ProbeAnswer>,
    /// True if its host accepted the last connection.
    reached: bool,
    /// True if its last answer did not prove its key.
    doubted: bool,
    /// True after its first answer.
    heard: bool,
    /// True after a refusal: it gets no more questions.
    ended: bool,
}

/// The bytes of an answer so far.
#[derive(Debug)]
struct ProbeAnswer {
    stream: TcpStream,
    hello: [u8; HELLO],
    /// The random number that its proof must cover, once it was asked.
    awaited: Option<[u8; NONCE]>,
    proof: [u8; CODE],
    have: usize,
}

/// The result of a look at an answer.
enum ProbeOutcome {
    Nothing,
    Alive,
    /// It was closed, or broken: it is asked again.
    Lost,
    /// Another program answers there.
    Other,
    /// It does not show that it has the key.
    Doubtful,
}

impl ProbeAnswer {
    fn hear(&mut self, key: Option<&PeerKey>, ranks: (u32, u32), id: &[u8; 16]) -> ProbeOutcome {
        loop {
            let into = if self.awaited.is_some() { &mut self.proof[self.have..] } else { &mut self.hello[self.have..] };
            let left = into.len();
            match self.stream.read(into) {
                Ok(0) => return if self.awaited.is_some() { ProbeOutcome::Doubtful } else { ProbeOutcome::Lost },
                Ok(more) if more < left => {
                    self.have += more;
                    continue;
                }
                Ok(_) => {}
                Err(e) if e.kind() == Why::Interrupted => continue,
                Err(e) if e.kind() == Why::WouldBlock => return ProbeOutcome::Nothing,
                Err(_) => return ProbeOutcome::Lost,
            }
            let from = ranks.0.to_le_bytes();
            match (key, &self.awaited) {
                (Some(key), Some(mine)) => {
                    let is_it = key.is_code(&self.proof, IS_HERE, &[&self.hello, &from, &ranks.1.to_le_bytes(), mine]);
                    return if is_it { ProbeOutcome::Alive } else { ProbeOutcome::Doubtful };
                }
                _ if self.hello[..8] != *MAGIC || self.hello[8..24] != *id => return ProbeOutcome::Other,
                (None, _) => return ProbeOutcome::Alive,
                (Some(key), None) => {
                    let Ok(mine) = nonce() else { return ProbeOutcome::Lost };
                    if self.stream.write_all(&question(key, ranks, &self.hello, &mine)).is_err() {
                        return ProbeOutcome::Lost;
                    }
                    (self.awaited, self.have) = (Some(mine), 0);
                }
            }
        }
    }
}

impl Prober {
    /// `of`: all ranks. `silence`: one that does not answer for so long was stopped. `forgiving`: they may end when they want to,
    /// and each is asked once in so long at most, as long as it answers. That may be longer than `silence`.
    pub(super) fn new(of: &[Reachable], pass: &Pass, silence: Duration, forgiving: Option<Duration>) -> Prober {
        let (now, every) = (Instant::now(), forgiving.unwrap_or_default().max(EVERY.min(silence / 8)));
        let asked = |(address, token): &Reachable| {
            let (address, id, next) = (*address, digest(token), now + every);
            let (unanswered, answer, reached, doubted, heard, ended) = (None, None, true, false, false, false);
            Probe { address, id, unanswered, looked: now, next, answer, reached, doubted, heard, ended }
        };
        let (rank, key) = (pass.rank, pass.key.clone());
        let (of, forgiving) = (of.iter().map(asked).collect(), forgiving.is_some());
        Prober { of, silence, every, forgiving, first: 0, rank, key }
    }

    /// Calls [`look`](Self::look), which fails if a rank has been silent for too long. Returns true if each of these ranks has
    /// answered at least once.
    ///
    /// # Errors
    /// The errors of `look`.
    pub(super) fn are_there(&mut self, ranks: &[u32]) -> Result<bool> {
        self.look(ranks)?;
        Ok(ranks.iter().all(|rank| self.of.get(*rank as usize).is_some_and(|asked| asked.heard)))
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
                    Ok(stream) if stream.set_nonblocking(true).is_ok() => {
                        let (hello, awaited, proof, have) = ([0; HELLO], None, [0; CODE], 0);
                        asked.answer = Some(ProbeAnswer { stream, hello, awaited, proof, have });
                        asked.reached = true;
                    }
                    Err(e) if e.kind() == Why::ConnectionRefused && self.forgiving => {
                        asked.ended = true;
                        continue;
                    }
                    Err(e) if e.kind() == Why::ConnectionRefused => {
                        return failed("is gone: its process has ended".into())
                    }
                    // It may pass. If not, that is silence.
                    _ => (asked.next, asked.reached) = (again, false),
                }
            }
            if let Some(answer) = &mut asked.answer {
                match answer.hear(self.key.as_ref(), (self.rank, rank), &asked.id) {
                    ProbeOutcome::Nothing => {}
                    ProbeOutcome::Alive => {
                        (asked.answer, asked.unanswered, asked.doubted) = (None, None, false);
                        asked.heard = true;
                    }
                    ProbeOutcome::Lost => (asked.answer, asked.next) = (None, again),
                    // Its port was given to another program since.
                    ProbeOutcome::Other if self.forgiving => (asked.answer, asked.ended) = (None, true),
                    ProbeOutcome::Other => return failed("is gone: another program answers at its port".into()),
                    ProbeOutcome::Doubtful => (asked.answer, asked.next, asked.doubted) = (None, again, true),
                }
            }
            let silent = asked.unanswered.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            if silent >= self.silence {
                let seconds = silent.as_secs_f64();
                return failed(match asked.reached {
                    true if asked.doubted => format!("has not proved for {seconds:.1} s that it has the key: {KEY} differs"),
                    true => format!(
                        "has said nothing for {seconds:.1} s: its process was stopped, or its host or network is down"
                    ),
                    false => format!(
                        "cannot be reached at {}, tried for {seconds:.1} s: its host or network is down, or a firewall is in \
                         the way (ports= names the ports that ranks listen at)",
                        asked.address
                    ),
                });
            }
        }
        self.first = spent.unwrap_or(0);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const SILENCE: Duration = Duration::from_millis(600);
    const SECRET: Option<&str> = Some("the key of all ranks");

    fn pass(rank: u32, secret: Option<&str>) -> Pass {
        let key = secret.map(|secret| PeerKey::new(secret.as_bytes(), "a test").unwrap());
        Pass { rank, token: [rank as u8; 16], key }
    }

    /// A rank that answers.
    fn pulse(rank: u32, secret: Option<&str>) -> Pulse {
        Pulse::start(ListenAt::anywhere(HERE), &pass(rank, secret)).unwrap()
    }

    /// Ranks 0, 1 and so on at these addresses.
    fn ranks_at(addresses: &[SocketAddr]) -> Vec<Reachable> {
        (0..).zip(addresses).map(|(rank, address)| (*address, [rank; 16])).collect()
    }

    /// Looks until it fails, at most for two silences and a half.
    fn watched(addresses: &[SocketAddr], ranks: &[u32]) -> Option<Error> {
        watched_by(&pass(9, None), addresses, ranks)
    }

    fn watched_by(pass: &Pass, addresses: &[SocketAddr], ranks: &[u32]) -> Option<Error> {
        let mut prober = Prober::new(&ranks_at(addresses), pass, SILENCE, None);
        let begun = Instant::now();
        while begun.elapsed() < SILENCE * 5 / 2 {
            if let Err(e) = prober.look(ranks) {
                return Some(e);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    #[test]
    fn a_rank_that_answers_is_there_and_one_whose_process_has_ended_is_not() {
        let pulses = [pulse(0, None), pulse(1, None)];
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
    fn ranks_with_one_key_answer_each_other_and_others_cannot() {
        let ranks = [pulse(0, SECRET), pulse(1, SECRET)];
        let addresses = ranks.each_ref().map(Pulse::address);
        assert!(watched_by(&pass(2, SECRET), &addresses, &[0, 1]).is_none());
        let error = watched_by(&pass(2, Some("the key of other ranks")), &addresses, &[1]).unwrap();
        assert!(error.to_string().contains("PENSTOCK_PEER_KEY differs"), "{error}");
        assert_eq!(error.peer().map(|peer| peer.0), Some(1), "{error}");
    }

    #[test]
    fn a_question_that_was_heard_is_answered_once_and_an_answer_is_for_who_has_asked() {
        let key = pass(0, SECRET).key.unwrap();
        let hello = |number| [number; HELLO];
        let asked = question(&key, (3, 0), &hello(1), &[5; NONCE]);
        let found = answer(&key, 0, &hello(1), &asked).unwrap();
        assert!(answer(&key, 0, &hello(2), &asked).is_none(), "on another connection");
        assert!(answer(&key, 1, &hello(1), &asked).is_none(), "of another rank");
        let mut changed = asked;
        changed[0] ^= 1;
        assert!(answer(&key, 0, &hello(1), &changed).is_none(), "by another rank");
        let again = question(&key, (3, 0), &hello(1), &[6; NONCE]);
        assert_ne!(answer(&key, 0, &hello(1), &again).unwrap(), found);
        assert_ne!(asked[4 + NONCE..], found, "a question is no answer");
    }

    #[test]
    fn another_program_at_the_port_of_a_rank_is_not_that_rank() {
        let other = pulse(7, None);
        let error = watched(&[other.address()], &[0]).unwrap();
        assert!(error.to_string().contains("another program answers at its port"), "{error}");
    }

    #[test]
    fn strangers_who_stop_in_the_middle_hold_nobody_up() {
        let rank = pulse(0, SECRET);
        let stranger = |n: usize| {
            let mut stream = TcpStream::connect(rank.address()).unwrap();
            stream.write_all(&[1; QUESTION + 9][..n % (QUESTION + 9)]).unwrap();
            stream
        };
        let _strangers: Vec<TcpStream> = (0..ASKING + 20).map(stranger).collect();
        assert!(watched_by(&pass(2, SECRET), &[rank.address()], &[0]).is_none());
    }

    #[test]
    fn ranks_are_there_once_all_of_them_have_answered() {
        let (first, second) = (pulse(0, SECRET), pulse(1, SECRET));
        let stopped = TcpListener::bind((HERE, 0)).unwrap();
        let addresses = [first.address(), second.address(), stopped.local_addr().unwrap()];
        let mut prober = Prober::new(&ranks_at(&addresses), &pass(9, SECRET), SILENCE, None);
        assert!(!prober.are_there(&[0, 1]).unwrap(), "nobody has been asked");
        let begun = Instant::now();
        while !prober.are_there(&[0, 1]).unwrap() {
            assert!(begun.elapsed() < SILENCE * 20);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!prober.are_there(&[0, 1, 2]).unwrap());
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
        let rank = pulse(0, SECRET);
        let (silence, every) = (SILENCE * 2 / 3, SILENCE);
        let mut prober = Prober::new(&ranks_at(&[rank.address()]), &pass(1, SECRET), silence, Some(every));
        let begun = Instant::now();
        while begun.elapsed() < every * 2 {
            prober.look(&[0]).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_rank_that_is_seldom_asked_and_was_stopped_is_told() {
        let stopped = TcpListener::bind((HERE, 0)).unwrap();
        let (silence, every) = (SILENCE / 4, SILENCE / 2);
        let begun = Instant::now();
        let mut prober = Prober::new(&ranks_at(&[stopped.local_addr().unwrap()]), &pass(1, None), silence, Some(every));
        while prober.look(&[0]).is_ok() {
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
        let there = pulse(24, None);
        let mut addresses = vec![address; 24];
        addresses.push(there.address());
        let ranks: Vec<u32> = (0..addresses.len() as u32).collect();
        let mut prober = Prober::new(&ranks_at(&addresses), &pass(25, None), SILENCE, None);
        let begun = Instant::now();
        let error = loop {
            if let Err(e) = prober.look(&ranks) {
                break e;
            }
            assert!(begun.elapsed() < SILENCE * 10, "they are never told");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(error.peer().is_some_and(|peer| peer.0 < 24), "{error}");
    }

    #[test]
    fn a_rank_says_on_its_connections_that_it_is_alive() {
        let pulse = pulse(0, None);
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        pulse.speak([&here].into_iter()).unwrap();
        let mut words = [1; 3 * WORD];
        there.read_exact(&mut words).unwrap();
        assert_eq!(words, [0; 3 * WORD]);
    }
}
