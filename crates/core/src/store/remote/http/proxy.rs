//! Proxies: which servers are reached through one, and what is said to it.
//!
//! A server with TLS is reached through a tunnel (`CONNECT`), so the proxy sees nothing but its name. One without TLS is asked
//! for by the proxy itself.

use super::address::{Address, Server};
use super::escaping::percent_decoded;
use super::tunnel::Tunnel;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::environment::Environment;
use crate::store::remote::secret::Secret;
use base64::prelude::{Engine, BASE64_STANDARD};
use std::net::IpAddr;

/// The variables that name proxies. `http_proxy` counts in small letters only: a web server's program gets a field of
/// the request as `HTTP_PROXY`.
pub(in crate::store::remote) const VARIABLES: [&str; 7] =
    ["http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"];
const HTTP: [&str; 3] = ["http_proxy", "all_proxy", "ALL_PROXY"];
const HTTPS: [&str; 4] = ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];

/// The proxies of servers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Proxies {
    http: Option<Named>,
    https: Option<Named>,
    /// Servers that are reached without one.
    direct: Vec<Bypass>,
    /// It was given, so that it holds for this machine too.
    is_given: bool,
}

/// A proxy that somebody names, or the error in it.
type Named = Result<Proxy, String>;

/// A proxy.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::store::remote) struct Proxy {
    pub(in crate::store::remote) server: Server,
    /// Our credentials: the value of `Proxy-Authorization`.
    pub(in crate::store::remote) authorization: Option<Secret>,
}

/// An entry of `NO_PROXY`.
#[derive(Debug, Clone, PartialEq)]
enum Bypass {
    All,
    /// A host, and all below it; perhaps one port of it.
    Host(String, Option<u16>),
    /// The first bits of an address.
    Network(IpAddr, u32),
}

impl Proxies {
    /// All servers through the proxy `text`: `http://host:port`, perhaps with `user:password@` before the host. All servers
    /// without one, if `text` is empty.
    ///
    /// # Errors
    /// `Invalid` for what is no such address, `Unsupported` for another kind of proxy. They do not show it.
    pub fn given(text: &str) -> Result<Proxies> {
        let named = match text.trim() {
            "" => None,
            text => Some(Ok(Proxy::parse(text)?)),
        };
        Ok(Proxies { http: named.clone(), https: named, direct: Vec::new(), is_given: true })
    }

    /// The proxies that the environment names.
    pub(in crate::store) fn of_environment(environment: &Environment) -> Proxies {
        let named = |names: &[&'static str]| {
            let (name, text) = environment.named(names)?;
            Some(Proxy::parse(text.trim()).map_err(|e| format!("the proxy in {name}: {}", e.message())))
        };
        let entries = environment.first(&["no_proxy"]).or(environment.get("NO_PROXY")).unwrap_or_default();
        let direct = entries.split([',', ' ']).filter_map(|entry| Bypass::parse(entry.trim())).collect();
        Proxies { http: named(&HTTP), https: named(&HTTPS), direct, is_given: false }
    }

    /// The proxy for a server, if there is one.
    ///
    /// # Errors
    /// `Unsupported` if the environment names one that cannot be used.
    pub(in crate::store::remote) fn of(&self, server: &Server) -> Result<Option<&Proxy>> {
        let named = if server.tls { &self.https } else { &self.http };
        let Some(named) = named.as_ref().filter(|_| !self.is_direct(server)) else { return Ok(None) };
        named.as_ref().map(Some).map_err(|why| Error::new(ErrorKind::Unsupported, why.clone()))
    }

    /// Host and port of the proxy for an address, and what it wants to know of us.
    pub(in crate::store) fn named(&self, address: &str) -> Result<Option<(String, Option<String>)>> {
        let Some(Proxy { server, authorization }) = self.of(&Address::parse(address)?.server)? else { return Ok(None) };
        Ok(Some((server.with_port(), authorization.as_ref().map(|value| value.shown().to_owned()))))
    }

    fn is_direct(&self, server: &Server) -> bool {
        let ip = server.ip();
        // Services of the machine that this is, which a proxy does not reach.
        let is_near = match ip {
            Some(IpAddr::V4(v4)) => v4.is_link_local(),
            Some(IpAddr::V6(v6)) => v6.segments()[0] & 0xffc0 == 0xfe80 || v6.segments()[..2] == [0xfd00, 0x0ec2],
            None => server.host == "metadata.google.internal",
        };
        if is_near || self.is_given {
            return is_near;
        }
        let is_here = server.host == "localhost" || ip.is_some_and(|ip| ip.is_loopback());
        is_here || self.direct.iter().any(|entry| entry.holds(server))
    }
}

impl Proxy {
    fn parse(text: &str) -> Result<Proxy> {
        let wrong = |kind, why: &str| Error::new(kind, format!("{why}: give http://host:port"));
        let rest = match text.split_once("://") {
            None => text,
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => {
                let scheme: String = scheme.chars().filter(char::is_ascii_alphanumeric).take(10).collect();
                return Err(wrong(ErrorKind::Unsupported, &format!("proxies of kind {scheme}:// are not supported")));
            }
        };
        let (user, host) = match rest.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, rest),
        };
        let parsed = Address::parse(&format!("http://{host}"));
        let address = parsed.map_err(|_| wrong(ErrorKind::Invalid, "this is no address of a proxy"))?;
        if address.target != "/" {
            return Err(wrong(ErrorKind::Invalid, "the address of a proxy has no path"));
        }
        let authorization = user.map(|user| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            let both = [percent_decoded(name), b":".to_vec(), percent_decoded(password)].concat();
            Secret::new(format!("Basic {}", BASE64_STANDARD.encode(both)))
        });
        Ok(Proxy { server: address.server, authorization })
    }

    /// Its name in messages, without the user's.
    pub(in crate::store::remote) fn name(&self) -> String {
        self.server.origin()
    }

    /// How a server is asked through it.
    pub(in crate::store::remote) fn via(&self, server: &Server) -> Via {
        Via { proxy: self.clone(), server: server.clone() }
    }
}

impl Bypass {
    fn parse(entry: &str) -> Option<Bypass> {
        if entry == "*" {
            return Some(Bypass::All);
        }
        if let Some((address, bits)) = entry.split_once('/') {
            return Some(Bypass::Network(address.parse().ok()?, bits.parse().ok()?));
        }
        let bare = |host: &str| host.trim_matches(['[', ']']).trim_start_matches(['*', '.']).to_ascii_lowercase();
        if entry.parse::<IpAddr>().is_ok() || entry.ends_with(']') {
            return Some(Bypass::Host(bare(entry), None));
        }
        let (host, port) = match entry.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (entry, None),
        };
        Some(bare(host)).filter(|host| !host.is_empty()).map(|host| Bypass::Host(host, port))
    }

    fn holds(&self, server: &Server) -> bool {
        match self {
            Bypass::All => true,
            Bypass::Host(host, port) => {
                let above = server.host.strip_suffix(host.as_str());
                let is_it = above.is_some_and(|above| above.is_empty() || above.ends_with('.'));
                is_it && port.is_none_or(|port| port == server.port)
            }
            Bypass::Network(network, bits) => {
                let (differ, size) = match (server.ip(), network) {
                    (Some(IpAddr::V4(ours)), IpAddr::V4(theirs)) => ((ours.to_bits() ^ theirs.to_bits()).into(), 32),
                    (Some(IpAddr::V6(ours)), IpAddr::V6(theirs)) => (ours.to_bits() ^ theirs.to_bits(), 128),
                    _ => return false,
                };
                *bits <= size && differ.checked_shr(size - bits).unwrap_or(0u128) == 0
            }
        }
    }
}

/// A server that is reached through a proxy.
pub(in crate::store::remote) struct Via {
    proxy: Proxy,
    server: Server,
}

impl Via {
    fn field(&self) -> String {
        let value = self.proxy.authorization.as_ref();
        value.map_or_else(String::new, |value| format!("Proxy-Authorization: {}\r\n", value.shown()))
    }

    /// The tunnel to a server with TLS; others have none.
    pub(in crate::store::remote) fn tunnel(&self) -> Option<Tunnel> {
        let server = self.server.with_port();
        let text = format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n{}\r\n", self.field());
        self.server.tls.then(|| Tunnel::new(self.proxy.name(), server, text))
    }

    /// A request as the connection has it: for a server without TLS, with all of its address.
    pub(super) fn worded(&self, request: Vec<u8>) -> Vec<u8> {
        let space = request.iter().position(|b| *b == b' ').map(|at| at + 1);
        let line = request.windows(2).position(|two| two == b"\r\n").map(|at| at + 2);
        match (space, line) {
            (Some(space), Some(line)) if !self.server.tls => {
                let (origin, field) = (self.server.origin(), self.field());
                let parts =
                    [&request[..space], origin.as_bytes(), &request[space..line], field.as_bytes(), &request[line..]];
                parts.concat()
            }
            _ => request,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn server(address: &str) -> Server {
        Address::parse(address).unwrap().server
    }

    /// The name of the proxy for an address.
    fn proxy(environment: &[(&str, &str)], address: &str) -> Option<String> {
        let proxies = Proxies::of_environment(&Environment::of(environment));
        proxies.of(&server(address)).unwrap().map(Proxy::name)
    }

    #[test]
    fn the_variables_are_those_of_curl() {
        for (variables, http, https) in [
            (&[("https_proxy", "http://p:1")][..], None, Some("http://p:1")),
            (&[("https_proxy", "http://p:1"), ("HTTPS_PROXY", "http://q:1")], None, Some("http://p:1")),
            (&[("HTTPS_PROXY", "p:1")], None, Some("http://p:1")),
            (&[("http_proxy", "http://p:1/")], Some("http://p:1"), None),
            (&[("HTTP_PROXY", "http://p:1")], None, None),
            (&[("ALL_PROXY", "http://p:1"), ("http_proxy", "http://q")], Some("http://q"), Some("http://p:1")),
            (&[("ALL_PROXY", "http://p:1"), ("https_proxy", "")], Some("http://p:1"), Some("http://p:1")),
        ] {
            assert_eq!(proxy(variables, "http://h/").as_deref(), http, "{variables:?}");
            assert_eq!(proxy(variables, "https://h/").as_deref(), https, "{variables:?}");
        }
    }

    #[test]
    fn servers_that_are_reached_without() {
        let is_direct = |entries: &str, address: &str| {
            let variables = [("all_proxy", "http://p:1"), ("no_proxy", entries)];
            proxy(&variables, address).is_none()
        };
        for (entries, address, expected) in [
            ("", "https://h/", false),
            ("", "http://localhost:1/", true),
            ("", "http://127.8.0.1/", true),
            ("", "https://[::1]/", true),
            ("", "http://169.254.169.254/", true),
            ("", "http://[fd00:ec2::254]/", true),
            ("", "http://metadata.google.internal/", true),
            ("*", "https://h/", true),
            ("a,h", "https://h/", true),
            ("a, .h ", "https://x.h/", true),
            ("*.h", "https://x.h/", true),
            ("h", "https://xh/", false),
            ("x.h", "https://h/", false),
            ("h:8443", "https://h:8443/", true),
            ("h:8443", "https://h/", false),
            ("10.0.0.0/9", "http://10.127.0.1/", true),
            ("10.0.0.0/9", "http://10.128.0.1/", false),
            ("10.0.0.0/9", "http://h/", false),
            ("10.0.0.1", "http://10.0.0.1:5/", true),
            ("fd00::/8", "http://[fdff::1]/", true),
            ("[fdff::1]", "http://[fdff::1]/", true),
            ("1.0.0.0/99,x/y", "http://1.0.0.0/", false),
        ] {
            assert_eq!(is_direct(entries, address), expected, "{entries} {address}");
        }
        let given = Proxies::given("http://p:1").unwrap();
        assert!(given.of(&server("http://127.0.0.1/")).unwrap().is_some());
        assert!(given.of(&server("http://169.254.169.254/")).unwrap().is_none());
        assert_eq!(Proxies::given("").unwrap().of(&server("http://h/")).unwrap(), None);
    }

    #[test]
    fn a_proxy_is_an_address_perhaps_with_a_password() {
        for (text, name, authorization) in [
            ("http://P:3128", "http://p:3128", None),
            ("p", "http://p", None),
            ("http://u:p%40%zz@[::1]:8080/", "http://[::1]:8080", Some("Basic dTpwQCV6eg==")),
            ("http://Aladdin:open sesame@p:1", "http://p:1", Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")),
            ("u@p:1", "http://p:1", Some("Basic dTo=")),
        ] {
            let proxy = Proxy::parse(text).unwrap();
            assert_eq!(
                (&*proxy.name(), proxy.authorization.as_ref().map(Secret::shown)),
                (name, authorization),
                "{text}"
            );
            assert!(!format!("{proxy:?}").contains("sesame"));
        }
        for (text, kind) in [
            ("socks5://sesame:x@h:1", ErrorKind::Unsupported),
            ("https://sesame@h:1", ErrorKind::Unsupported),
            ("http://h:1/sesame", ErrorKind::Invalid),
            ("http://sesame:x@h:y", ErrorKind::Invalid),
        ] {
            let e = Proxies::given(text).unwrap_err();
            assert_eq!(e.kind(), kind, "{text}");
            assert!(!e.to_string().contains("sesame"), "{e}");
        }
        let wrong = Proxies::of_environment(&Environment::of(&[("ALL_PROXY", "socks5://h:1")]));
        let e = wrong.of(&server("https://h/")).unwrap_err();
        assert!(e.to_string().contains("ALL_PROXY") && e.to_string().contains("socks5"), "{e}");
        assert_eq!(wrong.of(&server("https://127.0.0.1/")).unwrap(), None);
    }

    #[test]
    fn what_a_proxy_is_told() {
        let proxy = Proxy::parse("u:p@h:1").unwrap();
        let request = b"GET /x HTTP/1.1\r\nHost: s\r\n\r\n".to_vec();
        let plain = proxy.via(&server("http://s/"));
        let field = "Proxy-Authorization: Basic dTpw\r\n";
        let expected = format!("GET http://s/x HTTP/1.1\r\n{field}Host: s\r\n\r\n");
        assert_eq!(String::from_utf8(plain.worded(request.clone())).unwrap(), expected);
        assert!(plain.tunnel().is_none());
        let tls = proxy.via(&server("https://s/"));
        assert_eq!(tls.worded(request.clone()), request);
        let expected = format!("CONNECT s:443 HTTP/1.1\r\nHost: s:443\r\n{field}\r\n");
        assert_eq!(tls.tunnel().unwrap().asked(), expected.as_bytes());
    }
}
