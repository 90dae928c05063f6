//! Addresses of the web: what a request needs of them.

use super::escaping::escaped_target;
use crate::error::{Error, Result};
use std::net::IpAddr;

/// A server: connections to it can be used again for any object that it has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::store::remote) struct Server {
    pub(in crate::store::remote) tls: bool,
    /// A name, or an IP address without brackets.
    pub(in crate::store::remote) host: String,
    pub(in crate::store::remote) port: u16,
}

/// A server, and what is asked of it. It is never shown: the target may hold a signature.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(in crate::store::remote) struct Address {
    pub(in crate::store::remote) server: Server,
    /// Path and query, as the request has them.
    pub(in crate::store::remote) target: String,
}

impl Server {
    fn scheme(&self) -> &'static str {
        if self.tls {
            "https"
        } else {
            "http"
        }
    }

    /// As the `Host` field of a request has it.
    pub(in crate::store::remote) fn authority(&self) -> String {
        let text = self.with_port();
        let usual = if self.tls { ":443" } else { ":80" };
        text.strip_suffix(usual).map(str::to_owned).unwrap_or(text)
    }

    /// Host and port.
    pub(in crate::store::remote) fn with_port(&self) -> String {
        let Server { host, port, .. } = self;
        if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    }

    /// Scheme, host and port.
    pub(in crate::store::remote) fn origin(&self) -> String {
        format!("{}://{}", self.scheme(), self.authority())
    }

    /// Whether what is sent there stays secret: by TLS, or because it is this machine.
    pub(in crate::store::remote) fn keeps_secrets(&self) -> bool {
        self.tls || self.host == "localhost" || self.ip().is_some_and(|ip| ip.is_loopback())
    }

    pub(in crate::store::remote) fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

fn default_port(tls: bool) -> u16 {
    if tls {
        443
    } else {
        80
    }
}

fn invalid(why: &str) -> Error {
    Error::invalid(format!("this is not a valid address: {why}"))
}

impl Address {
    /// The address in `text`: `http://` or `https://`, a host, perhaps a port, a path and a query.
    ///
    /// # Errors
    /// `Invalid`, also for an address with a user's name: credentials do not belong there.
    pub(in crate::store::remote) fn parse(text: &str) -> Result<Address> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("it has no scheme"))?;
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(invalid("it does not begin with http:// or https://")),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, target) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(invalid("it has a user's name or password before the host, which is not supported"));
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(v6) => v6.split_once(']').ok_or_else(|| invalid("a bracket is not closed"))?,
            None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
        };
        let port = match port.strip_prefix(':') {
            Some("") => default_port(tls),
            Some(digits) => {
                digits.parse().ok().filter(|port| *port > 0).ok_or_else(|| invalid("its port is not valid"))?
            }
            None if port.is_empty() => default_port(tls),
            None => return Err(invalid("there is extra text between the host and the path")),
        };
        let is_ip = host.parse::<IpAddr>().is_ok();
        let named = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        if host.is_empty() || !(is_ip || named) {
            return Err(invalid("its host is empty, or has characters other than a-z, digits, '-', '.' and '_'"));
        }
        let slash = if target.starts_with('/') { "" } else { "/" };
        let server = Server { tls, host: host.to_ascii_lowercase(), port };
        // What signs requests takes no other hosts: 1.2.3.999 is none, nor is xn-- with what stands for no name.
        if url::Url::parse(&server.origin()).is_err() {
            return Err(invalid("its host is neither a name nor an address"));
        }
        Ok(Address { server, target: escaped_target(&format!("{slash}{target}")) })
    }

    /// Where a server says that it is now.
    ///
    /// # Errors
    /// As [`redirected`](Self::redirected).
    pub(in crate::store::remote) fn moved(&self, to: &MovedTo) -> Result<Address> {
        let host = match to {
            MovedTo::Address(to) => return self.redirected(to),
            MovedTo::Host(host) => host,
        };
        let server = self.redirected(&format!("//{host}/"))?.server;
        // The host may have the bucket in its name, where the path had it.
        let path = self.target.split('?').next().unwrap_or_default();
        let bucket = path.strip_prefix('/').and_then(|path| path.split_once('/')).map(|(bucket, _)| bucket);
        let is_in_host = |bucket: &&str| {
            server.host != self.server.host
                && server.host.strip_prefix(*bucket).is_some_and(|rest| rest.starts_with('.') && !bucket.is_empty())
        };
        let below = bucket.filter(is_in_host).and_then(|bucket| self.target.get(bucket.len() + 2..));
        let target = below.map_or_else(|| self.target.clone(), |rest| format!("/{rest}"));
        Ok(Address { server, target })
    }

    /// Where a redirect from here leads.
    ///
    /// # Errors
    /// `Invalid`, also if it leads from https to http.
    pub(in crate::store::remote) fn redirected(&self, to: &str) -> Result<Address> {
        let found = if to.contains("://") && !to.starts_with('/') {
            Address::parse(to)?
        } else if let Some(rest) = to.strip_prefix("//") {
            Address::parse(&format!("{}://{rest}", self.server.scheme()))?
        } else {
            let path = self.target.split('?').next().unwrap_or_default();
            let target = match to.as_bytes().first() {
                Some(b'/') => to.to_owned(),
                Some(b'?') => format!("{path}{to}"),
                _ => format!("{}{to}", &path[..=path.rfind('/').unwrap_or(0)]),
            };
            let target = target.split('#').next().unwrap_or_default();
            Address { server: self.server.clone(), target: escaped_target(target) }
        };
        if self.server.tls && !found.server.tls {
            return Err(invalid("it redirects from https to http"));
        }
        Ok(found)
    }
}

/// Where a server says that an object is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store::remote) enum MovedTo {
    /// At this address, which may be relative (`Location`).
    Address(String),
    /// At this host, under the same path (`<Endpoint>` of S3).
    Host(String),
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/...", self.server.origin())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn an_address_is_a_server_and_a_target() {
        for (text, authority, target) in [
            ("http://h", "h", "/"),
            ("http://H:80/a b?x=ä#f", "h", "/a%20b?x=%C3%A4"),
            ("https://h:8443/a/b%20c?x=1/2", "h:8443", "/a/b%20c?x=1/2"),
            ("https://[::1]:443/x", "[::1]", "/x"),
            ("http://[::1]:8080?q", "[::1]:8080", "/?q"),
        ] {
            let found = Address::parse(text).unwrap();
            assert_eq!((&*found.server.authority(), &*found.target), (authority, target), "{text}");
        }
        for text in
            ["http://", "http://a:b@h/x", "http://h:0/", "http://h:x/", "ftp://h/", "http://hä/", "http://[::1/x", "h"]
        {
            let e = Address::parse(text).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{text}: {e}");
        }
    }

    #[test]
    fn a_redirect_is_relative_to_where_it_stands() {
        let here = Address::parse("https://h/a/b?sig").unwrap();
        for (to, host, target) in [
            ("https://o:1/x?y=http://z", "o", "/x?y=http://z"),
            ("//o/x", "o", "/x"),
            ("/x?to=a://b", "h", "/x?to=a://b"),
            ("x y", "h", "/a/x%20y"),
            ("?other", "h", "/a/b?other"),
        ] {
            let found = here.redirected(to).unwrap();
            assert_eq!((&*found.server.host, &*found.target), (host, target), "{to}");
        }
        assert_eq!(here.redirected("http://h/x").unwrap_err().kind(), ErrorKind::Invalid);
        for (own, to, host, target) in [
            ("https://b.s3.amazonaws.com/k?x", "b.s3-x.amazonaws.com", "b.s3-x.amazonaws.com", "/k?x"),
            ("https://s3.amazonaws.com/b/k", "b.s3-x.amazonaws.com", "b.s3-x.amazonaws.com", "/k"),
            ("https://s3.amazonaws.com/b/k", "s3-x.amazonaws.com", "s3-x.amazonaws.com", "/b/k"),
            ("https://s3.amazonaws.com/my.b/k?x", "my.b.s3-x.amazonaws.com", "my.b.s3-x.amazonaws.com", "/k?x"),
            ("https://s3.amazonaws.com/b", "b.s3-x.amazonaws.com", "b.s3-x.amazonaws.com", "/b"),
            ("http://127.0.0.1:1/b/k", "127.0.0.1:2", "127.0.0.1", "/b/k"),
        ] {
            let found = Address::parse(own).unwrap().moved(&MovedTo::Host(to.into())).unwrap();
            assert_eq!((&*found.server.host, &*found.target), (host, target), "{own} {to}");
        }
        for to in ["", "a b", "x@y"] {
            assert!(here.moved(&MovedTo::Host(to.into())).is_err(), "{to}");
        }
        assert!(!format!("{here:?}").contains("sig"));
    }
}
