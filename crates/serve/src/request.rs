//! Heads of requests: RFC 9112.

use crate::conditions::Conditions;
use crate::name::{Name, NoName};
use std::net::IpAddr;

/// The longest head, in bytes. Penstock's own requests have 300.
pub(crate) const LONGEST_HEAD: usize = 16 << 10;
/// Fields of a head, at most.
const MOST_FIELDS: usize = 64;

/// The methods that are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Head,
}

/// The target of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// `/-/health`.
    Health,
    /// `/-/metrics`.
    Metrics,
    /// An object or a folder.
    Named(Name),
}

/// A request that is well-formed.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) method: Method,
    pub(crate) target: Target,
    /// The token of `Authorization: Bearer`.
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) conditions: Conditions,
    /// The value of the only `Range` field.
    pub(crate) range: Option<Vec<u8>>,
    /// True if the client takes JSON.
    pub(crate) takes_json: bool,
    /// True if the client names this server by a number, or as `localhost`: a page in a browser that reaches this machine
    /// by a name of its own does neither.
    pub(crate) names_this_machine: bool,
    /// True if the connection can be used again.
    pub(crate) keeps: bool,
}

/// The reason of a refusal: its status, and a text for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal(pub(crate) u16, pub(crate) &'static str);

/// Reads the first request of `input`: a request or a refusal, and the length of its head; `None` if more bytes are needed.
/// After a refusal nothing else can be read. Bytes before `seen` are known to end no head.
pub(crate) fn parse(input: &[u8], seen: usize) -> Option<(Result<Request, Refusal>, usize)> {
    // An old client may end a request with a line that nobody asked for
    let start = input.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
    let from = start.max(seen.saturating_sub(3));
    let end = input.get(from..).and_then(|rest| rest.windows(4).position(|w| w == b"\r\n\r\n")).map(|at| from + at + 4);
    match end {
        Some(end) if end <= LONGEST_HEAD => Some((request(&input[start..end]), end)),
        None if input.len() < LONGEST_HEAD => None,
        _ => Some((Err(Refusal(431, "the head of the request is too long")), input.len())),
    }
}

fn request(head: &[u8]) -> Result<Request, Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(head) {
        // A head that ends before its empty line has lines without CR: two readers would see two requests in it
        Ok(httparse::Status::Complete(length)) if length == head.len() => {}
        Err(httparse::Error::TooManyHeaders) => return Err(Refusal(431, "the request has too many fields")),
        Err(httparse::Error::Version) => return Err(Refusal(505, "this server speaks HTTP/1.1")),
        _ => return Err(Refusal(400, "the request is malformed")),
    }
    let (Some(method), Some(path), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(Refusal(400, "the request is malformed"));
    };
    let fields = Fields(parsed.headers);
    let length = fields.only("content-length")?.is_none_or(|value| value == b"0");
    if !length || fields.all("transfer-encoding").next().is_some() {
        return Err(Refusal(400, "a request has no body here"));
    }
    let host = fields.only("host")?;
    if version == 1 && host.is_none() || host.is_some_and(|host| !is_host(host)) {
        return Err(Refusal(400, "the field Host is missing or malformed"));
    }
    let method = match method {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        _ => return Err(Refusal(405, "this server is read-only: GET and HEAD are answered")),
    };
    let (host, target) = target(path.as_bytes(), host)?;
    let has = |name, word: &[u8]| {
        fields
            .all(name)
            .any(|value| value.split(|b| *b == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(word)))
    };
    let mut ranges = fields.all("range");
    let accepts =
        |value: &[u8]| value.split(|b| matches!(b, b',' | b';')).any(|kind| kind.trim_ascii() == b"application/json");
    let takes_json = fields.all("accept").any(accepts);
    Ok(Request {
        method,
        target,
        token: fields.only("authorization")?.and_then(bearer),
        conditions: Conditions {
            if_match: fields.joined("if-match"),
            if_none_match: fields.joined("if-none-match"),
            if_modified_since: fields.only("if-modified-since")?.map(<[u8]>::to_vec),
            if_unmodified_since: fields.only("if-unmodified-since")?.map(<[u8]>::to_vec),
            if_range: fields.only("if-range")?.map(<[u8]>::to_vec),
        },
        // Only GET has ranges; several fields are several ranges
        range: ranges.next().filter(|_| method == Method::Get && ranges.next().is_none()).map(<[u8]>::to_vec),
        takes_json,
        names_this_machine: host.is_none_or(is_this_machine),
        keeps: if version == 1 { !has("connection", b"close") } else { has("connection", b"keep-alive") },
    })
}

/// The host and the target of a request; the host of an absolute one replaces the field.
fn target<'a>(path: &'a [u8], host: Option<&'a [u8]>) -> Result<(Option<&'a [u8]>, Target), Refusal> {
    const MALFORMED: Refusal = Refusal(400, "the path is malformed");
    let end = path.iter().position(|b| *b == b'?').unwrap_or(path.len());
    let (mut path, mut host) = (&path[..end], host);
    for scheme in [b"http://".as_slice(), b"https://"] {
        if path.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)) {
            let rest = &path[scheme.len()..];
            let slash = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
            host = Some(&rest[..slash]).filter(|host| is_host(host));
            path = if slash < rest.len() { &rest[slash..] } else { b"/" };
            host.ok_or(MALFORMED)?;
        }
    }
    let target = match path {
        b"/-/health" => Target::Health,
        b"/-/metrics" => Target::Metrics,
        _ if path.contains(&b'#') => return Err(MALFORMED),
        _ => Target::Named(Name::parse(path).map_err(|why| match why {
            NoName::Malformed => MALFORMED,
            NoName::Nothing => Refusal(404, "nothing has this name"),
        })?),
    };
    Ok((host, target))
}

/// True if a text has only characters of a host and a port, and at least one.
fn is_host(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|b| b.is_ascii_alphanumeric() || b"-._~:[]%".contains(b))
}

fn is_this_machine(host: &[u8]) -> bool {
    let text = String::from_utf8_lossy(host).to_ascii_lowercase();
    let name = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => text.rsplit_once(':').map_or(text.as_str(), |(name, _)| name),
    };
    name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok()
}

fn bearer(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii().to_vec())
}

struct Fields<'a>(&'a [httparse::Header<'a>]);

impl<'a> Fields<'a> {
    fn all(&self, name: &'static str) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().filter(move |field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
    }

    /// The value of a field that may stand once.
    fn only(&self, name: &'static str) -> Result<Option<&'a [u8]>, Refusal> {
        let mut found = self.all(name);
        match (found.next(), found.next()) {
            (value, None) => Ok(value.map(<[u8]>::trim_ascii)),
            _ => Err(Refusal(400, "a field that may stand once stands twice")),
        }
    }

    fn joined(&self, name: &'static str) -> Option<Vec<u8>> {
        let values: Vec<_> = self.all(name).collect();
        (!values.is_empty()).then(|| values.join(b", ".as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(text: &str) -> Result<Request, Refusal> {
        let (found, length) = parse(text.as_bytes(), 0).expect("a whole head");
        assert!(length <= text.len());
        found
    }

    fn with(fields: &str) -> Result<Request, Refusal> {
        of(&format!("GET /a HTTP/1.1\r\nHost: x\r\n{fields}\r\n"))
    }

    fn status(text: &str) -> u16 {
        of(text).map_or_else(|refusal| refusal.0, |_| 200)
    }

    #[test]
    fn a_request_of_penstock_is_read() {
        let fields = "Range: bytes=0-1\r\nIf-Match: \"a\"\r\nauthorization: bearer s3cr3t\r\nAccept: */*\r\n";
        let request = with(fields).unwrap();
        assert_eq!((request.method, request.keeps), (Method::Get, true));
        assert_eq!(request.range.unwrap(), b"bytes=0-1");
        assert_eq!(request.token.unwrap(), b"s3cr3t");
        assert_eq!(request.conditions.if_match.unwrap(), b"\"a\"");
    }

    #[test]
    fn heads_that_are_no_requests_are_refused() {
        for (text, expected) in [
            ("\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", 200),
            ("GET / HTTP/1.0\r\n\r\n", 200),
            ("GET / HTTP/1.1\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
            ("GET / HTTP/1.1\nHost: a\n\nGET / HTTP/1.1\r\n\r\n", 400),
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
            ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 200),
            ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", 400),
            ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("POST / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            ("get / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            ("CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            ("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            ("GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("GET /.. HTTP/1.1\r\nHost: a\r\n\r\n", 404),
            ("GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("GET http:// HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("GET ftp://a/b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("nonsense\r\n\r\n", 400),
        ] {
            assert_eq!(status(text), expected, "{text:?}");
        }
    }

    #[test]
    fn long_heads_are_refused_and_short_ones_awaited() {
        let field = |length: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "y".repeat(length));
        assert!(parse(field(100).as_bytes(), 0).is_none());
        assert!(parse(b"", 0).is_none());
        assert_eq!(status(&field(LONGEST_HEAD)), 431);
        assert_eq!(status(&(field(LONGEST_HEAD) + "\r\n\r\n")), 431);
        let many = "X: y\r\n".repeat(MOST_FIELDS + 1);
        assert_eq!(with(&many).unwrap_err().0, 431);
    }

    #[test]
    fn an_absolute_target_names_its_own_host() {
        let whole = |target: &str| of(&format!("GET {target} HTTP/1.1\r\nHost: evil.example\r\n\r\n")).unwrap();
        let request = whole("http://127.0.0.1:8080/a?b=c");
        assert_eq!(request.target, Target::Named(Name::parse(b"/a").unwrap()));
        assert!(request.names_this_machine && !whole("/a").names_this_machine);
        assert_eq!(whole("HTTPS://localhost").target, Target::Named(Name::parse(b"/").unwrap()));
        assert_eq!(whole("/-/health").target, Target::Health);
        assert_eq!(whole("/-/metrics?x").target, Target::Metrics);
    }

    #[test]
    fn this_machine_has_numbers_and_one_name() {
        for host in
            ["127.0.0.1", "127.0.0.1:80", "[::1]:80", "localhost", "LOCALHOST:1", "a.localhost", "10.0.0.1:8080"]
        {
            assert!(is_this_machine(host.as_bytes()), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "notlocalhost"] {
            assert!(!is_this_machine(host.as_bytes()), "{host}");
        }
    }

    #[test]
    fn connections_and_ranges() {
        assert!(!with("Connection: x, Close\r\n").unwrap().keeps);
        assert!(!of("GET / HTTP/1.0\r\n\r\n").unwrap().keeps);
        assert!(of("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").unwrap().keeps);
        assert_eq!(with("Range: bytes=0-1\r\nRange: bytes=3-4\r\n").unwrap().range, None);
        let head = of("HEAD / HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1\r\n\r\n").unwrap();
        assert_eq!((head.method, head.range), (Method::Head, None));
        assert_eq!(with("Authorization: Basic YTpi\r\n").unwrap().token, None);
        assert_eq!(with("Authorization: Bearer a\r\nAuthorization: Bearer b\r\n").unwrap_err().0, 400);
    }

    proptest! {
        #[test]
        fn a_head_is_found_however_it_is_cut(cut in 0usize..60) {
            let text = b"GET /a HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-1\r\n\r\nGET /b HTTP/1.1\r\n";
            prop_assert!(parse(&text[..cut.min(53)], 0).is_none());
            let Some((Ok(_), length)) = parse(text, cut.min(53)) else { panic!("no head") };
            prop_assert_eq!(length, 54);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut head = bytes;
            head.extend(b"\r\n\r\n");
            let _ = parse(&head, 0);
        }
    }
}
