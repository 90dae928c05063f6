//! A server and clients that speak to it over sockets, well-behaved ones and others.

#![allow(clippy::unwrap_used)]

use penstock::store::{CacheFolder, DiskCacheSettings};
use penstock_serve::served::{Found, Object, Served};
use penstock_serve::{Folder, Name, Place, Server, Settings};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, LazyLock};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// More than the buffers of a socket hold.
const BIG: usize = 16 << 20;

struct Site {
    dir: TempDir,
    server: Server,
}

static CONTENTS: LazyLock<Vec<u8>> = LazyLock::new(|| (0..BIG).map(|i| (i / 7 + i / 1001) as u8).collect());

fn site(settings: Settings) -> Site {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("small"), "hello").unwrap();
    fs::write(dir.path().join("empty"), "").unwrap();
    fs::write(dir.path().join("big"), &*CONTENTS).unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    let folder = Folder::open(dir.path()).unwrap();
    Site { server: Server::start(Arc::new(folder), Settings { port: 0, ..settings }).unwrap(), dir }
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

fn send(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
}

/// The head and the body of the next answer; `has_body` is false for HEAD.
fn answer(stream: &mut TcpStream, has_body: bool) -> io::Result<(String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = field(&head, "Content-Length").map_or(0, |text| text.parse().unwrap());
    let mut body = vec![0; if has_body { length } else { 0 }];
    stream.read_exact(&mut body)?;
    Ok((head, body))
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

fn status(head: &str) -> u16 {
    head[9..12].parse().unwrap()
}

fn get(to: SocketAddr, path: &str, fields: &str) -> (String, Vec<u8>) {
    let mut stream = connect(to);
    send(&mut stream, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n"));
    answer(&mut stream, true).unwrap()
}

/// True if the other end has closed the connection.
fn is_closed(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_))
}

#[test]
fn bodies_are_right_copied_or_not() {
    for sends_files in [true, false] {
        let site = site(Settings { sends_files, ..Settings::default() });
        let (to, all) = (site.server.address(), &*CONTENTS);
        for path in ["/small", "/empty", "/big"] {
            let (head, body) = get(to, path, "");
            let expected = fs::read(site.dir.path().join(&path[1..])).unwrap();
            assert_eq!((status(&head), body == expected), (200, true), "{path}");
        }
        for (first, last) in
            [(0, 0), (1, (64 << 10) + 1), (65535, 131072), (1 << 20, (9 << 20) + 3), (BIG - 1, BIG + 9)]
        {
            let (head, body) = get(to, "/big", &format!("Range: bytes={first}-{last}\r\n"));
            let end = BIG.min(last + 1);
            assert_eq!((status(&head), body == all[first..end]), (206, true), "{first}-{last}");
        }
    }
}

#[test]
fn requests_that_come_at_once_are_answered_in_order() {
    let site = site(Settings::default());
    let mut stream = connect(site.server.address());
    let many: String = (0..100)
        .map(|i| format!("GET /big HTTP/1.1\r\nHost: localhost\r\nRange: bytes={i}-{}\r\n\r\n", i + 70_000))
        .collect();
    let mut sender = stream.try_clone().unwrap();
    let sent = std::thread::spawn(move || sender.write_all(many.as_bytes()));
    let all = &*CONTENTS;
    for i in 0..100 {
        assert!(answer(&mut stream, true).unwrap().1 == all[i..i + 70_001], "{i}");
    }
    sent.join().unwrap().unwrap();
    // One byte at a time
    for byte in b"HEAD /small HTTP/1.1\r\nHost: localhost\r\n\r\n" {
        stream.write_all(&[*byte]).unwrap();
    }
    let (head, _) = answer(&mut stream, false).unwrap();
    assert_eq!((status(&head), field(&head, "Content-Length")), (200, Some("5")));
    send(&mut stream, "GET /small HTTP/1.0\r\n\r\n");
    assert_eq!(answer(&mut stream, true).unwrap().1, b"hello");
    assert!(is_closed(&mut stream));
}

#[test]
fn a_refusal_can_be_read_and_ends_the_connection() {
    let site = site(Settings::default());
    for (text, expected) in [
        ("POST /small HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", 400),
        ("DELETE /small HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        ("GET /small HTTP/1.1\r\n\r\n", 400),
        (&format!("GET /{} HTTP/1.1\r\n", "x".repeat(17_000)), 431),
        ("GET /%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("\x16\x03\x01\x02\r\n\r\n", 400),
    ] {
        let mut stream = connect(site.server.address());
        send(&mut stream, text);
        let _ = stream.write_all(&[b'x'; 100_000]);
        let (head, body) = answer(&mut stream, true).unwrap();
        assert_eq!((status(&head), field(&head, "Connection")), (expected, Some("close")), "{text}");
        assert!(!body.is_empty());
        assert!(is_closed(&mut stream));
    }
}

#[test]
fn folders_are_listed_and_pages_of_the_server_answer() {
    let site = site(Settings::default());
    let to = site.server.address();
    let (head, _) = get(to, "/sub", "");
    assert_eq!((status(&head), field(&head, "Location")), (301, Some("/sub/")));
    assert!(String::from_utf8(get(to, "/", "").1).unwrap().contains("<a href=\"big\">big</a>"));
    let (_, body) = get(to, "/", "Accept: application/json\r\n");
    assert!(String::from_utf8(body).unwrap().contains("\"size\":5"));
    assert_eq!(get(to, "/-/health", "").1, b"{\"status\":\"ok\"}\n");
    let text = String::from_utf8(get(to, "/-/metrics", "").1).unwrap();
    assert!(text.contains("requests_total{status=\"301\"} 1\n") && text.contains("serve_connections "), "{text}");
}

#[test]
fn a_page_of_a_browser_does_not_reach_this_machine_by_another_name() {
    let site = site(Settings::default());
    let mut stream = connect(site.server.address());
    send(&mut stream, "GET /small HTTP/1.1\r\nHost: evil.example\r\n\r\n");
    assert_eq!(status(&answer(&mut stream, true).unwrap().0), 421);
    let secret = Settings { token: Some("s3cr3t".to_owned()), port: 0, ..Settings::default() };
    let with_token = Server::start(Arc::new(Folder::open(site.dir.path()).unwrap()), secret).unwrap();
    let mut stream = connect(with_token.address());
    send(&mut stream, "GET /small HTTP/1.1\r\nHost: node-a\r\nAuthorization: Bearer s3cr3t\r\n\r\n");
    assert_eq!(status(&answer(&mut stream, true).unwrap().0), 200);
}

#[test]
fn a_token_is_wanted_for_all_but_the_health() {
    let site = site(Settings { token: Some("s3cr3t".to_owned()), ..Settings::default() });
    let to = site.server.address();
    for path in ["/small", "/none", "/", "/-/metrics"] {
        let (head, _) = get(to, path, "Authorization: Bearer wrong\r\n");
        assert_eq!((status(&head), field(&head, "WWW-Authenticate")), (401, Some("Bearer")), "{path}");
        assert_eq!(status(&get(to, path, "").0), 401);
        let expected = if path == "/none" { 404 } else { 200 };
        assert_eq!(status(&get(to, path, "Authorization: Bearer s3cr3t\r\n").0), expected);
    }
    assert_eq!(status(&get(to, "/-/health", "").0), 200);
}

#[test]
fn other_machines_are_served_with_a_token_or_by_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let start = |settings| {
        let settings = Settings { host: "0.0.0.0".to_owned(), port: 0, ..settings };
        Server::start(Arc::new(Folder::open(dir.path()).unwrap()), settings)
    };
    let refused = start(Settings::default()).unwrap_err();
    assert_eq!(refused.kind(), penstock::ErrorKind::Invalid);
    assert!(refused.message().contains("--no-token"), "{refused}");
    assert!(start(Settings { allows_strangers: true, ..Settings::default() }).is_ok());
    assert!(start(Settings { token: Some("t".to_owned()), ..Settings::default() }).is_ok());
}

#[test]
fn a_port_that_is_taken_is_an_error_that_says_so() {
    let site = site(Settings::default());
    let port = site.server.address().port();
    let settings = Settings { port, ..Settings::default() };
    let error = Server::start(Arc::new(Folder::open(site.dir.path()).unwrap()), settings).unwrap_err();
    assert!(error.message().contains("another program listens on 127.0.0.1:"), "{error}");
}

/// An answer of which the client has read a part when the file changes.
fn changed_midway(sends_files: bool, change: impl Fn(&TempDir)) -> io::Result<Vec<u8>> {
    let site = site(Settings { sends_files, ..Settings::default() });
    let mut stream = connect(site.server.address());
    send(&mut stream, "GET /big HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let mut some = vec![0; 1 << 20];
    stream.read_exact(&mut some)?;
    sleep(Duration::from_millis(30));
    change(&site.dir);
    stream.read_to_end(&mut some).map(|_| some)
}

#[test]
fn an_answer_whose_file_changes_is_an_error_for_the_client() {
    for sends_files in [true, false] {
        let opened = |dir: &TempDir| File::options().write(true).open(dir.path().join("big")).unwrap();
        assert!(changed_midway(sends_files, |dir| opened(dir).write_all(&[9; 100]).unwrap()).is_err());
        assert!(changed_midway(sends_files, |dir| opened(dir).set_len(9).unwrap()).is_err());
        let replaced = changed_midway(sends_files, |dir| {
            fs::write(dir.path().join("new"), "new").unwrap();
            fs::rename(dir.path().join("new"), dir.path().join("big")).unwrap();
        });
        // The old file stays as it was
        assert!(replaced.unwrap().ends_with(&CONTENTS));
    }
}

#[test]
fn slow_clients_are_closed_and_hold_nobody_up() {
    let short = Duration::from_millis(600);
    let settings =
        Settings { head_time: short, idle_time: short, stall_time: short, threads: 2, ..Settings::default() };
    let site = site(settings);
    let to = site.server.address();
    let begun = Instant::now();
    let mut half: Vec<_> = (0..50).map(|_| connect(to)).collect();
    let mut unread: Vec<_> = (0..20).map(|_| connect(to)).collect();
    let mut idle = connect(to);
    half.iter_mut().for_each(|stream| send(stream, "GET /small HTTP/1.1\r\nHost: "));
    unread.iter_mut().for_each(|stream| send(stream, "GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    send(&mut idle, "GET /small HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(answer(&mut idle, true).is_ok());
    // Others are served meanwhile
    assert_eq!(get(to, "/small", "").1, b"hello");
    assert!(half.iter_mut().all(is_closed) && is_closed(&mut idle));
    for stream in &mut unread {
        let mut all = Vec::new();
        assert!(stream.read_to_end(&mut all).is_err() || all.len() < BIG);
    }
    assert!(begun.elapsed() >= short, "they were closed too early");
    let text = String::from_utf8(get(to, "/-/metrics", "").1).unwrap();
    assert!(text.contains("serve_connections 1\n"), "{text}");
}

/// Three connections that are answered at the same time, once the server has as many places again.
fn three_that_are_served(to: SocketAddr) -> Vec<TcpStream> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let mut held: Vec<_> = (0..3).map(|_| connect(to)).collect();
        // All are asked: each of them says whether it has a place
        let served = held.iter_mut().filter_map(|stream| {
            let _ = stream.write_all(b"GET /small HTTP/1.1\r\nHost: localhost\r\n\r\n");
            answer(stream, true).ok().filter(|(head, _)| status(head) == 200)
        });
        if served.count() == 3 {
            return held;
        }
        assert!(Instant::now() < until, "no three places come back");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_client_that_takes_a_few_bytes_at_a_time_is_closed() {
    let site = site(Settings { stall_time: Duration::from_millis(600), ..Settings::default() });
    let to = site.server.address();
    let mut stream = connect(to);
    send(&mut stream, "GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let begun = Instant::now();
    loop {
        // 20 kB in a second; the server wants 64 KiB in 0.6 s
        let _ = stream.read(&mut [0; 1000]);
        sleep(Duration::from_millis(50));
        let text = String::from_utf8(get(to, "/-/metrics", "").1).unwrap();
        if text.contains("serve_connections 1\n") {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it keeps its place");
    }
}

#[test]
fn connections_beyond_the_limit_are_refused_and_places_come_back() {
    let site = site(Settings { most_connections: 3, ..Settings::default() });
    let to = site.server.address();
    for _ in 0..20 {
        let _held = three_that_are_served(to);
        let mut more = connect(to);
        assert_eq!(status(&answer(&mut more, true).unwrap().0), 503);
        assert!(is_closed(&mut more));
    }
}

#[test]
fn a_folder_is_served_as_a_cache_as_soon_as_it_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let place = Arc::new(Place::open(dir.path(), false).unwrap());
    let server = Server::start(place, Settings { port: 0, ..Settings::default() }).unwrap();
    fs::write(dir.path().join("small"), "hello").unwrap();
    assert_eq!(status(&get(server.address(), "/small", "").0), 200);
    fs::remove_file(dir.path().join("small")).unwrap();
    let settings = DiskCacheSettings {
        folder: dir.path().into(),
        size: None,
        free: None,
        shared: false,
        verify: false,
        refetch: false,
    };
    drop(CacheFolder::open(&settings).unwrap());
    assert_eq!(status(&get(server.address(), "/penstock-disk-cache", "").0), 404);
    assert_eq!(get(server.address(), "/", "Accept: application/json\r\n").1, b"{\"cut\":false,\"entries\":[]}\n");
}

#[test]
fn it_stops_at_once_with_clients_in_the_middle() {
    let mut site = site(Settings::default());
    let mut stream = connect(site.server.address());
    send(&mut stream, "GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.read_exact(&mut [0; 1000]).unwrap();
    let begun = Instant::now();
    site.server.stop(Duration::from_secs(5));
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert!(TcpStream::connect(site.server.address()).is_err());
    let mut rest = Vec::new();
    assert!(stream.read_to_end(&mut rest).is_err() || rest.len() < BIG);
}

/// An object of which only the first bytes have come.
struct Half(File);

impl Object for Half {
    fn size(&self) -> u64 {
        BIG as u64
    }
    fn etag(&self) -> &str {
        "\"half\""
    }
    fn modified(&self) -> Option<i64> {
        None
    }
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
    fn there(&self, range: &Range<u64>) -> u64 {
        range.end.min(range.start.max(1 << 20))
    }
    fn is_unchanged(&self) -> bool {
        true
    }
}

struct Halves(TempDir);

impl Served for Halves {
    fn find(&self, name: &Name) -> io::Result<Found> {
        match name.joined().as_slice() {
            b"half" => Ok(Found::Object(Box::new(Half(File::open(self.0.path().join("half"))?)))),
            b"panics" => panic!("on purpose"),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

#[test]
fn of_an_object_that_is_still_coming_the_bytes_that_are_there_are_served() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("half"), &*CONTENTS).unwrap();
    let server = Server::start(Arc::new(Halves(dir)), Settings { port: 0, ..Settings::default() }).unwrap();
    let to = server.address();
    let (head, body) = get(to, "/half", "Range: bytes=1000-2000000\r\n");
    assert_eq!(field(&head, "Content-Range"), Some(format!("bytes 1000-1048575/{BIG}").as_str()));
    assert!(body == CONTENTS[1000..1 << 20]);
    assert_eq!(status(&get(to, "/half", "Range: bytes=1048576-\r\n").0), 404);
    assert_eq!(status(&get(to, "/half", "").0), 404);
    // A panic costs its connection and no other
    let mut stream = connect(to);
    send(&mut stream, "GET /panics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(is_closed(&mut stream));
    assert_eq!(status(&get(to, "/half", "Range: bytes=0-0\r\n").0), 206);
}
