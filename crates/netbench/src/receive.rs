//! The bare loop: epoll, `recv` into memory that is there, and nothing else. What it costs, no client can go below.

use crate::arguments::Arguments;
use crate::memory::Memory;
use crate::tls;
use crate::wire::Wire;
use rustls::ClientConfig;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Instant;

/// A file on the server, and where it goes.
struct Target {
    host: String,
    port: u16,
    path: String,
    size: u64,
    offset: usize,
}

/// A part of a file: one request.
pub(crate) struct Piece {
    request: String,
    pub(crate) at: *mut u8,
    pub(crate) length: usize,
}

// SAFETY: the memory belongs to no thread, and each piece to one connection.
unsafe impl Sync for Piece {}

pub(crate) struct Setup {
    connections: usize,
    threads: usize,
    pub(crate) tls: Option<Arc<ClientConfig>>,
    /// Whether rustls uses buffers of its own.
    pub(crate) buffered: bool,
}

pub(crate) fn receive(arguments: &Arguments) -> Result<(), String> {
    arguments.known(&["connections", "request", "memory", "authority", "tls", "threads"])?;
    let authority = arguments.text("authority").map(|file| tls::client(Path::new(file))).transpose()?;
    let mut targets = Vec::new();
    let mut total = 0;
    for url in &arguments.values {
        let mut target = target(url, authority.is_some())?;
        target.size = size(&target, authority.as_ref()).map_err(|e| format!("{url}: {e}"))?;
        target.offset = total;
        // Each file begins a page
        total += (target.size as usize).next_multiple_of(4096);
        targets.push(target);
    }
    let Some(first) = targets.first() else { return Err("receive wants addresses".to_owned()) };
    if targets.iter().any(|one| (&one.host, one.port) != (&first.host, first.port)) {
        return Err("all addresses have to be of one server".to_owned());
    }
    let setup = Setup {
        connections: arguments.number("connections", 16)?,
        threads: arguments.number("threads", 1)?,
        tls: authority,
        buffered: match arguments.text("tls") {
            None | Some("unbuffered") => false,
            Some("buffered") => true,
            Some(other) => return Err(format!("--tls: {other:?} is neither buffered nor unbuffered")),
        },
    };
    let memory = Memory::new(total, arguments.text("memory").unwrap_or("huge"))?;
    let step: u64 = arguments.number("request", 16 << 20)?;
    let mut pieces = Vec::new();
    for target in &targets {
        for from in (0..target.size).step_by(step as usize) {
            let until = (from + step).min(target.size);
            let request = target.request("GET", &format!("Range: bytes={from}-{}\r\n", until - 1));
            let at = memory.at(target.offset + from as usize);
            pieces.push(Piece { request, at, length: (until - from) as usize });
        }
    }
    let bytes: u64 = targets.iter().map(|target| target.size).sum();
    let (next, before, begun) = (AtomicUsize::new(0), processor_time(), Instant::now());
    let run = |number| {
        let mine = (number..setup.connections).step_by(setup.threads).count();
        fetch(first, &setup, mine, &pieces, &next).map_err(|e| e.to_string())
    };
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..setup.threads).map(|number| scope.spawn(move || run(number))).collect();
        let own = run(0);
        let panicked = |_| Err("a thread panicked".to_owned());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).fold(own, Result::and)
    })?;
    let (seconds, after) = (begun.elapsed().as_secs_f64(), processor_time());
    let (user, system) = (after.0 - before.0, after.1 - before.1);
    println!(
        "{{\"seconds\": {seconds}, \"cpu_s\": {}, \"user_s\": {user}, \"system_s\": {system}, \"bytes\": {bytes}, \
         \"requests\": {}, \"connections\": {}}}",
        user + system,
        pieces.len(),
        setup.connections.min(pieces.len()),
    );
    Ok(())
}

impl Target {
    fn request(&self, method: &str, more: &str) -> String {
        format!("{method} {} HTTP/1.1\r\nHost: {}:{}\r\n{more}\r\n", self.path, self.host, self.port)
    }
}

fn target(url: &str, encrypted: bool) -> Result<Target, String> {
    let (scheme, otherwise) = if encrypted { ("https://", 443) } else { ("http://", 80) };
    let none = || format!("{url}: not an address like {scheme}host:port/file (with --authority https, else http)");
    let (server, path) = url.strip_prefix(scheme).and_then(|rest| rest.split_once('/')).ok_or_else(none)?;
    let (host, port) = match server.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().map_err(|_| none())?),
        None => (server, otherwise),
    };
    Ok(Target { host: host.to_owned(), port, path: format!("/{path}"), size: 0, offset: 0 })
}

/// Asks for the size of a file, before anything is measured.
fn size(target: &Target, tls: Option<&Arc<ClientConfig>>) -> io::Result<u64> {
    let mut socket = TcpStream::connect((target.host.as_str(), target.port))?;
    let request = target.request("HEAD", "Connection: close\r\n");
    let mut said = Vec::new();
    if let Some(config) = tls {
        let name = target.host.clone().try_into().map_err(io::Error::other)?;
        let connection = rustls::ClientConnection::new(config.clone(), name).map_err(io::Error::other)?;
        let mut stream = rustls::StreamOwned::new(connection, socket);
        stream.write_all(request.as_bytes())?;
        match stream.read_to_end(&mut said) {
            Err(e) if e.kind() != io::ErrorKind::UnexpectedEof => return Err(e),
            _ => {}
        }
    } else {
        socket.write_all(request.as_bytes())?;
        socket.read_to_end(&mut said)?;
    }
    match head(&said)? {
        Some((200, length, _)) => Ok(length),
        found => Err(io::Error::other(format!("the server does not tell its size: {found:?}"))),
    }
}

/// Status, `Content-Length` and the length of the head that these bytes begin with, if it is complete.
pub(crate) fn head(bytes: &[u8]) -> io::Result<Option<(u16, u64, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut answer = httparse::Response::new(&mut headers);
    let length = match answer.parse(bytes).map_err(io::Error::other)? {
        httparse::Status::Partial => return Ok(None),
        httparse::Status::Complete(length) => length,
    };
    let given = answer.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let given = given.and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok());
    let body = given.ok_or_else(|| io::Error::other("an answer without Content-Length"))?;
    Ok(Some((answer.code.unwrap_or(0), body, length)))
}

/// Fetches pieces until none is left, on so many connections.
fn fetch(to: &Target, setup: &Setup, connections: usize, pieces: &[Piece], next: &AtomicUsize) -> io::Result<()> {
    // SAFETY: a plain system call; the descriptor is new and nobody else's.
    let epoll = unsafe { OwnedFd::from_raw_fd(checked(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
    let mut wires = Vec::new();
    let take = || pieces.get(next.fetch_add(1, Relaxed));
    for _ in 0..connections {
        let Some(piece) = take() else { break };
        let socket = TcpStream::connect((to.host.as_str(), to.port))?;
        socket.set_nodelay(true)?;
        let fd = socket.as_raw_fd();
        socket.set_nonblocking(true)?;
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: wires.len() as u64 };
        // SAFETY: descriptors that are open, and an event.
        checked(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) })?;
        let mut wire = Wire::new(socket, setup, &to.host)?;
        wire.ask(piece, &piece.request)?;
        wires.push(wire);
    }
    let mut left = wires.len();
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
    while left > 0 {
        // SAFETY: as many events as there is room for.
        let count = unsafe { libc::epoll_wait(epoll.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, -1) };
        if count < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
            continue;
        }
        for event in &events[..checked(count)? as usize] {
            let wire = &mut wires[event.u64 as usize];
            if wire.receive()? {
                match take() {
                    Some(piece) => wire.ask(piece, &piece.request)?,
                    None => {
                        let fd = wire.fd();
                        // SAFETY: descriptors that are open; no event is needed to take one away.
                        checked(unsafe {
                            libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut())
                        })?;
                        left -= 1;
                    }
                }
            }
        }
    }
    Ok(())
}

fn checked(outcome: i32) -> io::Result<i32> {
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(outcome)
    }
}

/// Seconds in user and in system mode that this process has had.
fn processor_time() -> (f64, f64) {
    let mut usage = std::mem::MaybeUninit::zeroed();
    // SAFETY: a place for the answer, which is initialised.
    let usage: libc::rusage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    (seconds(usage.ru_utime), seconds(usage.ru_stime))
}
