//! The server: a thread for each connection, `sendfile`, and counts of what left.

use crate::arguments::Arguments;
use crate::file::{Answer, Asked};
use crate::link::{LinkModel, Places};
use crate::stream::Stream;
use crate::tls;
use rustls::ServerConfig;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

/// The longest head of a request.
const HEAD: usize = 32 << 10;

#[derive(Default)]
struct Counts {
    connections: AtomicU64,
    requests: AtomicU64,
    /// Bytes of bodies. They are counted before they are sent, and what could not be sent is taken back: a client that
    /// has them all never finds less.
    bytes: AtomicU64,
    stalled: AtomicU64,
    refused: AtomicU64,
}

impl Counts {
    fn json(&self) -> String {
        let Counts { connections, requests, bytes, stalled, refused } = self;
        let figures = [
            ("connections", connections),
            ("requests", requests),
            ("bytes", bytes),
            ("stalled", stalled),
            ("refused", refused),
        ];
        let figures = figures.map(|(name, count)| format!("\"{name}\": {}", count.load(Relaxed)));
        format!("{{{}}}", figures.join(", "))
    }
}

struct Server {
    folder: PathBuf,
    tls: Option<Arc<ServerConfig>>,
    link: LinkModel,
    places: Places,
    counts: Counts,
}

pub(crate) fn serve(arguments: &Arguments) -> Result<(), String> {
    arguments.known(&[&["bind", "certificate", "key"][..], &LinkModel::OPTIONS].concat())?;
    let [folder] = arguments.values.as_slice() else { return Err("serve wants one folder".to_owned()) };
    let tls = match (arguments.text("certificate"), arguments.text("key")) {
        (None, None) => None,
        (Some(certificate), Some(key)) => Some(tls::server(Path::new(certificate), Path::new(key))?),
        _ => return Err("--certificate and --key belong together".to_owned()),
    };
    let listener = TcpListener::bind(arguments.text("bind").unwrap_or("127.0.0.1:0")).map_err(|e| e.to_string())?;
    // The standard library asks for a queue of 128, which many connections at once fill: then their SYN is repeated
    // after a second. SAFETY: a plain system call on a descriptor that is open.
    unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 4096) };
    let port = listener.local_addr().map_err(|e| e.to_string())?.port();
    let server = Server {
        folder: PathBuf::from(folder),
        tls,
        link: LinkModel::from_arguments(arguments)?,
        places: Places::default(),
        counts: Counts::default(),
    };
    let server = Arc::new(server);
    // Before the first thread, which inherits it
    let ended = blocked_signals();
    let accepting = server.clone();
    std::thread::spawn(move || accept(&listener, &accepting));
    println!("{{\"port\": {port}}}");
    let mut signal = 0;
    // SAFETY: a set of signals that are blocked, and a place for the one that comes.
    unsafe { libc::sigwait(&raw const ended, &raw mut signal) };
    println!("{}", server.counts.json());
    Ok(())
}

/// Blocks the signals that end a program: one thread waits for them.
fn blocked_signals() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set; the others are given one that is.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        set.assume_init()
    }
}

fn accept(listener: &TcpListener, server: &Arc<Server>) {
    for socket in listener.incoming() {
        let Ok(socket) = socket else { continue };
        let server = server.clone();
        std::thread::spawn(move || {
            // A client that has gone, or stops in the middle of an answer: there is nobody to tell
            let _ = server.talk(socket);
        });
    }
}

impl Server {
    /// Answers the requests of one connection.
    fn talk(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let mut stream = Stream::accepted(socket, self.tls.clone())?;
        let (mut received, mut place, mut counted) = (Vec::new(), None, false);
        loop {
            let Some(asked) = next(&mut stream, &mut received)? else { return Ok(()) };
            // Without a place, so that it can be asked for while others wait
            if asked.path == "/_counts" {
                let text = self.counts.json();
                let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
                stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{text}", text.len()).as_bytes())?;
                continue;
            }
            if !counted {
                counted = true;
                self.counts.connections.fetch_add(1, Relaxed);
            }
            let number = self.counts.requests.fetch_add(1, Relaxed);
            if place.is_none() {
                place = self.places.take(&self.link);
            }
            if place.is_none() {
                self.counts.refused.fetch_add(1, Relaxed);
                return stream.write_all(Answer::status("503 Slow Down\r\nConnection: close").head.as_bytes());
            }
            let answer = Answer::to(&asked, &self.folder);
            if !self.link.first_byte.is_zero() {
                std::thread::sleep(self.link.first_byte);
            }
            stream.write_all(answer.head.as_bytes())?;
            if let Some((file, range)) = answer.body {
                let stalls = self.link.stalls(number);
                let end = if stalls { range.start + (range.end - range.start) / 2 } else { range.end };
                self.send(&mut stream, &file, range.start..end)?;
                if stalls {
                    self.counts.stalled.fetch_add(1, Relaxed);
                    return stream.wait_for_end();
                }
            }
            if asked.closes {
                return Ok(());
            }
        }
    }

    /// Sends a part of a file at the pace of the link.
    fn send(&self, stream: &mut Stream, file: &std::fs::File, part: std::ops::Range<u64>) -> io::Result<()> {
        let (mut at, mut pace) = (part.start, self.link.pace());
        while at < part.end {
            let chunk = self.link.chunk().min(part.end - at);
            pace.pass(chunk);
            self.counts.bytes.fetch_add(chunk, Relaxed);
            let sent = stream.send_file(file, at, chunk);
            self.counts.bytes.fetch_sub(chunk - *sent.as_ref().unwrap_or(&0), Relaxed);
            at += sent?;
        }
        Ok(())
    }
}

/// The next request of a connection; `None` if the client has closed it.
fn next(stream: &mut Stream, received: &mut Vec<u8>) -> io::Result<Option<Asked>> {
    loop {
        let parsed = Asked::parse(received).map_err(io::Error::other)?;
        if let Some((asked, length)) = parsed {
            received.drain(..length);
            return Ok(Some(asked));
        }
        if received.len() >= HEAD {
            return Err(io::Error::other("the head of a request is too long"));
        }
        let had = received.len();
        received.resize(had + 4096, 0);
        let got = stream.read_some(&mut received[had..]);
        received.truncate(had + *got.as_ref().unwrap_or(&0));
        if got? == 0 {
            return Ok(None);
        }
    }
}
