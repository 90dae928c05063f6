//! A web server with range requests, ETags, `If-Match` and connections that are kept, and with a script of what goes wrong.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// What the server does with a request instead of what it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Answers with this status, and closes the connection.
    Status(u16),
    /// Sends all of the object, with status 200.
    Whole,
    /// Says that it sends another range.
    OtherRange,
    /// Says that the object has another size.
    OtherSize,
    /// Says that it sends a byte less than was asked for.
    OtherLength,
    /// Closes the connection after so many bytes of the body.
    Short(usize),
    /// Sends more than it says.
    Long,
    /// Resets the connection after so many bytes of the body.
    Reset(usize),
    /// Resets the connection before it answers.
    ResetAtOnce,
    /// Sends so many bytes of the body, and nothing more.
    Stall(usize),
    /// Says nothing.
    Silence,
    /// Sends so many bytes of the body at a time, with pauses.
    Drip(usize, Duration),
    /// Says that the object has another ETag.
    OtherTag,
    /// Gives no strong ETag: a date.
    Weak(&'static str),
    /// The object is at another place.
    Redirect(u16, String),
    /// Says that it closes the connection, and does.
    Close,
    /// Closes the connection after the answer, and does not say so.
    CloseSilently,
    /// Gives no Content-Length; the end of the connection is the end of the body.
    NoLength,
    /// Says that the body comes in chunks, and sends it without.
    Chunked,
    /// Sends the body in chunks of so many bytes, with fields behind the last one.
    Chunks(usize),
    /// The same, and ends it with a last chunk after so many bytes.
    FewChunks(usize, usize),
    /// Has one more field, or several.
    Field(String),
    /// Refuses a range that passes the end; whether it says where that is.
    Refuses(bool),
    /// Sends all of the object with status 200 and without its length: in chunks of so many bytes.
    WholeChunks(usize),
    /// The same, and resets the connection after so many bytes.
    WholeReset(usize),
    /// Sends all of the object, or its first bytes, with status 200 and without its length, and closes the connection.
    WholeToTheEnd(usize),
    /// No HTTP.
    Nonsense,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The number of the request, over all connections.
    pub(crate) number: u64,
    pub(crate) connection: u64,
    /// Path and query.
    pub(crate) target: String,
    /// First byte, and the byte behind the last one.
    pub(crate) range: Option<(u64, u64)>,
    pub(crate) if_match: Option<String>,
    pub(crate) text: String,
}

type Fetch = Box<dyn Fn(&str) -> Option<(Arc<Vec<u8>>, String)> + Send + Sync>;
type Script = Box<dyn Fn(&Asked) -> Fault + Send + Sync>;

/// Objects by path, with their ETags. They can be replaced while a load runs.
pub(crate) type Contents = Arc<Mutex<BTreeMap<String, (Arc<Vec<u8>>, String)>>>;

struct Shared {
    /// The bytes and the ETag of a path.
    fetch: Fetch,
    script: Script,
    asked: Mutex<Vec<Asked>>,
    /// Bytes of bodies that were sent.
    served: AtomicU64,
    closing: AtomicBool,
    /// Connections that are open.
    open: Mutex<BTreeMap<u64, TcpStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

pub(crate) struct WebServer {
    shared: Arc<Shared>,
    pub(crate) address: SocketAddr,
    listener: Option<JoinHandle<()>>,
}

impl WebServer {
    pub(crate) fn of(contents: &Contents, script: impl Fn(&Asked) -> Fault + Send + Sync + 'static) -> WebServer {
        let contents = contents.clone();
        Self::by(Box::new(move |path| contents.lock().unwrap().get(path).cloned()), Box::new(script))
    }

    pub(crate) fn by(fetch: Fetch, script: Script) -> WebServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            fetch,
            script,
            asked: Mutex::default(),
            served: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            open: Mutex::default(),
            threads: Mutex::default(),
        });
        let theirs = shared.clone();
        let listener = std::thread::spawn(move || {
            for (number, stream) in (0..).zip(listener.incoming()) {
                let Ok(stream) = stream else { continue };
                if theirs.closing.load(Ordering::SeqCst) {
                    return;
                }
                theirs.open.lock().unwrap().insert(number, stream.try_clone().unwrap());
                let shared = theirs.clone();
                let thread = std::thread::spawn(move || {
                    let _gone = shared.serve(number, stream);
                    shared.open.lock().unwrap().remove(&number);
                });
                theirs.threads.lock().unwrap().push(thread);
            }
        });
        WebServer { shared, address, listener: Some(listener) }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.shared.asked.lock().unwrap().clone()
    }

    pub(crate) fn served(&self) -> u64 {
        self.shared.served.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.lock().unwrap().len()
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        let _woken = TcpStream::connect(self.address);
        let _ended = self.listener.take().map(JoinHandle::join);
        for stream in self.shared.open.lock().unwrap().values() {
            let _closed = stream.shutdown(Shutdown::Both);
        }
        let threads = std::mem::take(&mut *self.shared.threads.lock().unwrap());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

impl Shared {
    fn serve(&self, connection: u64, mut stream: TcpStream) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        loop {
            let end = loop {
                if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                    break end + 4;
                }
                let mut more = [0; 4096];
                match stream.read(&mut more)? {
                    0 => return Ok(()),
                    n => bytes.extend(&more[..n]),
                }
            };
            let text = String::from_utf8(bytes.drain(..end).collect()).unwrap();
            let field = |name: &str| {
                let fields = text.lines().filter_map(|line| line.split_once(':'));
                fields.filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.trim().to_owned()).next()
            };
            let range = field("range").map(|value| {
                let (first, last) = value.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                (first.parse().unwrap(), last.parse::<u64>().unwrap() + 1)
            });
            let (target, if_match) = (text.split(' ').nth(1).unwrap().to_owned(), field("if-match"));
            let asked = {
                let mut all = self.asked.lock().unwrap();
                let asked = Asked { number: all.len() as u64, connection, target, range, if_match, text };
                all.push(asked.clone());
                asked
            };
            if !self.answer(&asked, &mut stream)? {
                return Ok(());
            }
        }
    }

    /// Whether the connection is kept.
    fn answer(&self, asked: &Asked, stream: &mut TcpStream) -> std::io::Result<bool> {
        let fault = (self.script)(asked);
        let path = asked.target.split('?').next().unwrap();
        let status = |stream: &mut TcpStream, status: &str| {
            write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nX-Request-Id: id-7\r\n\r\n").map(|()| true)
        };
        match &fault {
            Fault::Status(code) => {
                write!(stream, "HTTP/1.1 {code} Told\r\nContent-Length: 5\r\nConnection: close\r\n\r\nsorry")?;
                return Ok(false);
            }
            Fault::Redirect(code, to) => {
                write!(stream, "HTTP/1.1 {code} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n")?;
                return Ok(true);
            }
            Fault::ResetAtOnce => return reset(stream),
            Fault::Silence => return wait(stream),
            Fault::Nonsense => {
                stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")?;
                return Ok(false);
            }
            _ => {}
        }
        let Some((content, tag)) = (self.fetch)(path) else { return status(stream, "404 Not Found") };
        if asked.if_match.as_ref().is_some_and(|wanted| *wanted != tag) {
            return status(stream, "412 Precondition Failed");
        }
        let size = content.len() as u64;
        let (first, end) = asked.range.map_or((0, size), |(first, end)| (first, end.min(size)));
        if first >= end && fault != Fault::Whole {
            write!(stream, "HTTP/1.1 416 No\r\nContent-Range: bytes */{size}\r\nContent-Length: 0\r\n\r\n")?;
            return Ok(true);
        }
        if let (Fault::Refuses(says), true) = (&fault, asked.range.is_some_and(|(_, end)| end > size)) {
            let range = if *says { format!("Content-Range: bytes */{size}\r\n") } else { String::new() };
            write!(stream, "HTTP/1.1 416 Range Not Satisfiable\r\n{range}Content-Length: 300\r\n\r\n{:300}", "")?;
            return Ok(true);
        }
        let mut body = content[first as usize..end as usize].to_vec();
        let (mut told_first, mut told_size, mut told_length) = (first, size, end - first);
        let mut validator = format!("ETag: {tag}");
        match fault {
            Fault::OtherRange => told_first += 1,
            Fault::OtherSize => told_size += 1,
            Fault::OtherLength => told_length -= 1,
            Fault::OtherTag => validator = "ETag: \"another\"".into(),
            Fault::Weak(date) => validator = format!("ETag: W/{tag}\r\nLast-Modified: {date}"),
            _ => {}
        }
        let mut head = match &fault {
            Fault::Whole | Fault::WholeChunks(_) | Fault::WholeReset(_) | Fault::WholeToTheEnd(_) => {
                body = content.to_vec();
                told_length = size;
                format!("HTTP/1.1 200 OK\r\n{validator}\r\n")
            }
            _ => {
                let last = end - 1;
                format!("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {told_first}-{last}/{told_size}\r\n{validator}\r\n")
            }
        };
        match &fault {
            Fault::NoLength | Fault::WholeReset(_) | Fault::WholeToTheEnd(_) => {}
            Fault::Chunked | Fault::Chunks(_) | Fault::FewChunks(..) | Fault::WholeChunks(_) => {
                head.push_str("Transfer-Encoding: chunked\r\n");
            }
            _ => write!(head, "Content-Length: {told_length}\r\n").unwrap(),
        }
        if let Fault::Field(field) = &fault {
            write!(head, "{field}\r\n").unwrap();
        }
        if matches!(fault, Fault::Close | Fault::NoLength) {
            head.push_str("Connection: close\r\n");
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes())?;
        let mut send = |part: &[u8]| {
            self.served.fetch_add(part.len() as u64, Ordering::SeqCst);
            stream.write_all(part)
        };
        let closes = matches!(
            fault,
            Fault::Short(_) | Fault::Close | Fault::CloseSilently | Fault::NoLength | Fault::WholeToTheEnd(_)
        );
        match fault {
            Fault::Chunks(n) | Fault::WholeChunks(n) | Fault::FewChunks(n, _) => {
                if let Fault::FewChunks(_, most) = fault {
                    body.truncate(most);
                }
                let mut framed = Vec::new();
                for part in body.chunks(n) {
                    write!(framed, "{:x};size={}\r\n", part.len(), part.len())?;
                    framed.extend(part);
                    framed.extend(b"\r\n");
                }
                framed.extend(b"0\r\nX-Checksum: no\r\n\r\n");
                send(&framed)?;
            }
            Fault::WholeToTheEnd(n) => send(&body[..n.min(body.len())])?,
            Fault::Short(n) => send(&body[..n.min(body.len())])?,
            Fault::Reset(n) | Fault::WholeReset(n) => {
                send(&body[..n.min(body.len())])?;
                return reset(stream);
            }
            Fault::Stall(n) => {
                send(&body[..n.min(body.len())])?;
                return wait(stream);
            }
            Fault::Drip(n, pause) => {
                for part in body.chunks(n) {
                    send(part)?;
                    std::thread::sleep(pause);
                }
            }
            Fault::Long => {
                body.extend(b"and more, which nobody has asked for");
                send(&body)?;
            }
            _ => send(&body)?,
        }
        Ok(!closes)
    }
}

/// Until the client goes, or the server ends.
fn wait(stream: &mut TcpStream) -> std::io::Result<bool> {
    while stream.read(&mut [0; 64])? > 0 {}
    Ok(false)
}

/// Closes the connection with a reset.
fn reset(stream: &mut TcpStream) -> std::io::Result<bool> {
    use std::os::fd::AsRawFd;
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: the option is a `linger`.
    unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size)
    };
    Ok(false)
}
