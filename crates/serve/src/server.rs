//! The threads of a server.

use crate::answer;
use crate::connection::{Connection, Shared, Step};
use crate::log;
use crate::metrics::{add, Metrics};
use crate::poller::Poller;
use crate::request::Refusal;
use crate::served::Served;
use crate::settings::Settings;
use crate::tls;
use crate::token::Token;
use crate::wire::Wire;
use penstock::machine::block_signals;
use penstock::wake::Wake;
use penstock::{Error, ErrorKind, Result};
use rustls::ServerConfig;
use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Connections that are late are looked for this often.
const TICK: Duration = Duration::from_millis(250);
/// The pause after a connection could not be accepted: no descriptor is left, or no memory.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections that wait to be accepted, at most. All nodes of a fleet may start at once.
const BACKLOG: i32 = 4096;
/// Descriptors that are left to the rest of the process.
const SPARE: u64 = 64;
/// The token of the wake-up that ends the threads.
const STOP: u64 = u64::MAX;
const STACK: usize = 256 << 10;

/// A server that runs until it is stopped or dropped.
pub struct Server {
    state: Arc<State>,
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

struct State {
    shared: Shared,
    tls: Option<Arc<ServerConfig>>,
    poller: Poller,
    stop: Wake,
    /// A place for each connection. Its lock is held while a thread works on the connection.
    places: Vec<Mutex<Option<Box<Connection>>>>,
    /// Places that are free.
    free: Mutex<Vec<usize>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// `Invalid` for settings that do not go together, the error of the address that it should listen on, or of its
    /// certificate; `Limit` if no thread can be started.
    pub fn start(served: Arc<dyn Served>, settings: Settings) -> Result<Server> {
        let tls = settings.tls.as_ref().map(|(certificate, key)| tls::config(certificate, key)).transpose()?;
        let token = settings.token.as_deref().map(Token::new).transpose()?;
        let (listener, address) = listen(&settings)?;
        let is_local = address.ip().to_canonical().is_loopback();
        if !is_local && token.is_none() && !settings.allows_strangers {
            let text = format!(
                "{address} can be reached by other machines, and no token is set: everyone there could read all files. \
                 Give a token (--token-file, PENSTOCK_SERVE_TOKEN), or say --no-token"
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let most = settings.most_connections.min(connections_of_descriptors(1 + served.descriptors()));
        if most == 0 || settings.threads == 0 {
            let text =
                "no connection can be served: raise the limit of connections, of threads, or of open files (ulimit -n)";
            return Err(Error::new(ErrorKind::Limit, text));
        }
        let failed = |e: io::Error| Error::io("wait for connections", &e);
        let threads = settings.threads;
        let state = Arc::new(State {
            shared: Shared {
                only_this_machine: is_local && token.is_none(),
                metrics: Metrics::default(),
                served,
                settings,
                token,
            },
            tls,
            poller: Poller::new().map_err(failed)?,
            stop: Wake::new()?,
            places: (0..most).map(|_| Mutex::new(None)).collect(),
            free: Mutex::new((0..most).rev().collect()),
        });
        state.poller.add_for_all(state.stop.fd(), STOP).map_err(failed)?;
        // Dropping it ends the threads that have been started
        let mut server = Server { state, address, threads: Vec::new() };
        server.spawn("penstock-accept", move |state| state.accept(&listener))?;
        for _ in 0..threads {
            server.spawn("penstock-serve", State::work)?;
        }
        Ok(server)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce(&State) + Send + 'static) -> Result<()> {
        let state = self.state.clone();
        let body = move || {
            block_signals();
            work(&state);
        };
        let started = Builder::new().name(name.to_owned()).stack_size(STACK).spawn(body);
        let failed = |e| Error::new(ErrorKind::Limit, format!("cannot start a thread that answers requests: {e}"));
        self.threads.push(started.map_err(failed)?);
        Ok(())
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// True if clients speak TLS.
    pub fn is_secure(&self) -> bool {
        self.state.tls.is_some()
    }

    /// Stops it. Waits at most `patience` for its threads: one that reads from a disk that hangs is left behind.
    pub fn stop(&mut self, patience: Duration) {
        self.state.stop.notify();
        let begun = Instant::now();
        while begun.elapsed() < patience && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.threads.clear();
        for place in &self.state.places {
            if let Ok(mut place) = place.try_lock() {
                place.take();
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.stop(Duration::from_millis(500));
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl State {
    /// Accepts connections, and ends those that are late.
    fn accept(&self, listener: &TcpListener) {
        let (mut swept, mut pauses, mut told) = (Instant::now(), false, false);
        loop {
            let listens = if pauses { -1 } else { listener.as_raw_fd() };
            let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut entries = [entry(self.stop.fd()), entry(listens)];
            let wait = if pauses { PAUSE } else { TICK };
            // SAFETY: two entries, as the count says. A negative descriptor is passed over.
            unsafe { libc::poll(entries.as_mut_ptr(), 2, wait.as_millis() as i32) };
            if entries[0].revents != 0 {
                return;
            }
            pauses = false;
            loop {
                match listener.accept() {
                    Ok((socket, peer)) => {
                        told = false;
                        self.admit(socket, peer);
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    // The client has gone already
                    Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                    Err(e) => {
                        if !told {
                            log::line(format_args!("cannot accept connections: {e}"));
                        }
                        (pauses, told) = (true, true);
                        break;
                    }
                }
                if swept.elapsed() >= TICK {
                    break;
                }
            }
            if swept.elapsed() >= TICK {
                swept = Instant::now();
                self.sweep(swept);
            }
        }
    }

    fn admit(&self, socket: TcpStream, peer: SocketAddr) {
        let metrics = &self.shared.metrics;
        let Some(at) = lock(&self.free).pop() else {
            add(&metrics.refused, 1);
            if self.tls.is_none() {
                let text = answer::refused(Refusal(503, "too many connections: try again"), false);
                let _ = socket.set_nonblocking(true).and_then(|()| (&socket).write(text.as_bytes()));
            }
            return;
        };
        add(&metrics.accepted, 1);
        add(&metrics.connections, 1);
        let mut place = lock(&self.places[at]);
        let made = Wire::new(socket, self.tls.as_ref()).and_then(|wire| {
            let fd = wire.fd();
            *place = Some(Box::new(Connection::new(wire, peer, &self.shared.settings)));
            self.poller.add(fd, at as u64)
        });
        if made.is_err() {
            self.vacate(at, &mut place);
        }
    }

    /// Drops the connection of a place.
    fn vacate(&self, at: usize, place: &mut MutexGuard<'_, Option<Box<Connection>>>) -> Option<Box<Connection>> {
        let left = place.take();
        self.shared.metrics.connections.fetch_sub(1, Ordering::Relaxed);
        lock(&self.free).push(at);
        left
    }

    fn sweep(&self, now: Instant) {
        for (at, place) in self.places.iter().enumerate() {
            // A thread that works on a connection sets its deadline anew
            let Ok(mut place) = place.try_lock() else { continue };
            if place.as_ref().is_some_and(|connection| connection.deadline <= now) {
                add(&self.shared.metrics.late, 1);
                self.vacate(at, &mut place);
            }
        }
    }

    /// Works on connections that are ready.
    fn work(&self) {
        loop {
            match self.poller.wait() {
                Ok(STOP) => return,
                Ok(at) => self.turn(at as usize),
                Err(e) => return log::line(format_args!("a thread ends: {e}")),
            }
        }
    }

    fn turn(&self, at: usize) {
        let mut place = lock(&self.places[at]);
        let Some(connection) = place.as_mut() else { return };
        let step = catch_unwind(AssertUnwindSafe(|| connection.turn(&self.shared)));
        let step = step.unwrap_or_else(|_| {
            log::line(format_args!("a connection is reset: penstock panicked; please report this"));
            Step::Reset
        });
        match step {
            Step::Wait { reads, writes } => {
                let fd = connection.wire().fd();
                if self.poller.arm(fd, at as u64, reads, writes).is_err() {
                    self.vacate(at, &mut place);
                }
            }
            Step::Close => drop(self.vacate(at, &mut place)),
            Step::Reset => self.vacate(at, &mut place).map_or((), |connection| connection.reset()),
        }
    }
}

/// Listens on the address of the settings.
fn listen(settings: &Settings) -> Result<(TcpListener, SocketAddr)> {
    let (host, port) = (settings.host.as_str(), settings.port);
    let host = if host == "localhost" { "127.0.0.1" } else { host };
    let Ok(ip) = host.parse::<IpAddr>() else {
        let text = format!("{host:?} is no address of this machine: give a number such as 127.0.0.1, 0.0.0.0 or ::");
        return Err(Error::new(ErrorKind::Invalid, text));
    };
    let address = SocketAddr::new(ip, port);
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::AddrInUse => {
            let text = format!("another program listens on {address}: choose another --port; 0 takes a free one");
            Error::new(ErrorKind::Io, text)
        }
        _ => Error::io(&format!("listen on {address}"), &e),
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    // SAFETY: a plain system call. It lengthens the queue; if it fails, the queue stays as short as it was.
    unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Connections that the limit of open files has room for, if each has so many. The limit is raised as far as it goes.
fn connections_of_descriptors(each: u64) -> usize {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a structure of this kind, borrowed for the calls.
    unsafe {
        libc::getrlimit64(libc::RLIMIT_NOFILE, &raw mut limit);
        let raised = libc::rlimit64 { rlim_cur: limit.rlim_max, ..limit };
        if libc::setrlimit64(libc::RLIMIT_NOFILE, &raw const raised) == 0 {
            limit = raised;
        }
    }
    usize::try_from(limit.rlim_cur.saturating_sub(SPARE) / each).unwrap_or(usize::MAX)
}
