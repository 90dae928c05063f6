//! Fields of an X.509 certificate (RFC 5280), as far as rules and messages need them. Signatures are checked elsewhere.

use chrono::{DateTime, NaiveDate, Utc};
use std::net::{Ipv4Addr, Ipv6Addr};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Certificate {
    /// 1 or 3.
    pub(super) version: u8,
    pub(super) not_before: DateTime<Utc>,
    pub(super) not_after: DateTime<Utc>,
    /// The common names of its subject, and of who has signed it.
    pub(super) subject: Vec<String>,
    pub(super) issuer: Vec<String>,
    /// Names of hosts and addresses, if it has a list of them (subjectAltName).
    pub(super) names: Option<Vec<String>>,
    /// Whether it is for servers; `None`: it does not say for what.
    pub(super) is_for_servers: Option<bool>,
    pub(super) has_p521: bool,
}

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
const BOOLEAN: u8 = 0x01;

const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1d, 0x11];
const KEY_PURPOSES: &[u8] = &[0x55, 0x1d, 0x25];
const FOR_SERVERS: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01];
const P521: &[u8] = &[0x2b, 0x81, 0x04, 0x00, 0x23];

/// Elements of DER, one after the other.
struct Der<'a>(&'a [u8]);

impl<'a> Iterator for Der<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&short, rest) = rest.split_first()?;
        let (length, rest) = match short {
            0..0x80 => (short as usize, rest),
            _ => {
                let (digits, rest) = rest.split_at_checked((short & 0x7f) as usize).filter(|(d, _)| d.len() <= 4)?;
                (digits.iter().fold(0, |length, digit| length << 8 | *digit as usize), rest)
            }
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, content))
    }
}

impl<'a> Der<'a> {
    fn sequence(&mut self) -> Option<Der<'a>> {
        self.next().filter(|(tag, _)| *tag == SEQUENCE).map(|(_, content)| Der(content))
    }
}

impl Certificate {
    /// `None` if it is no certificate.
    pub(super) fn parse(der: &[u8]) -> Option<Certificate> {
        let mut rest = Der(der).sequence()?.sequence()?;
        let mut version = 1;
        if rest.0.first() == Some(&VERSION) {
            let (_, number) = Der(rest.next()?.1).next()?;
            version = number.last()?.checked_add(1)?;
        }
        let (_serial, _algorithm) = (rest.next()?, rest.next()?);
        let issuer = common_names(rest.sequence()?);
        let mut validity = rest.sequence()?;
        let (not_before, not_after) = (time(validity.next()?)?, time(validity.next()?)?);
        let subject = common_names(rest.sequence()?);
        let mut algorithm = rest.sequence()?.sequence()?;
        let (_kind, curve) = (algorithm.next()?, algorithm.next());
        let mut found = Certificate {
            version,
            not_before,
            not_after,
            subject,
            issuer,
            names: None,
            is_for_servers: None,
            has_p521: curve.is_some_and(|(_, curve)| curve == P521),
        };
        for (tag, content) in rest {
            if tag == EXTENSIONS {
                for (_, extension) in Der(content).sequence()? {
                    found.learn(Der(extension))?;
                }
            }
        }
        Some(found)
    }

    fn learn(&mut self, mut extension: Der<'_>) -> Option<()> {
        let (_, kind) = extension.next()?;
        let mut value = extension.next()?;
        if value.0 == BOOLEAN {
            value = extension.next()?;
        }
        if kind == ALTERNATIVE_NAMES {
            self.names = Some(Der(value.1).sequence()?.filter_map(alternative_name).collect());
        } else if kind == KEY_PURPOSES {
            self.is_for_servers = Some(Der(value.1).sequence()?.any(|(_, purpose)| purpose == FOR_SERVERS));
        }
        Some(())
    }
}

/// The name of a host, or an address.
fn alternative_name((tag, content): (u8, &[u8])) -> Option<String> {
    match (tag, content.len()) {
        (0x82, _) => Some(String::from_utf8_lossy(content).into_owned()),
        (0x87, 4) => Some(Ipv4Addr::from(<[u8; 4]>::try_from(content).ok()?).to_string()),
        (0x87, 16) => Some(Ipv6Addr::from(<[u8; 16]>::try_from(content).ok()?).to_string()),
        _ => None,
    }
}

fn common_names(name: Der<'_>) -> Vec<String> {
    let parts = name.flat_map(|(_, set)| Der(set)).filter_map(|(_, part)| {
        let mut part = Der(part);
        let (_, kind) = part.next()?;
        let (_, text) = part.next()?;
        (kind == COMMON_NAME).then(|| String::from_utf8_lossy(text).into_owned())
    });
    parts.collect()
}

/// UTCTime or GeneralizedTime.
fn time((tag, text): (u8, &[u8])) -> Option<DateTime<Utc>> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let (year, rest) = text.split_at_checked(if tag == 0x17 { 2 } else { 4 })?;
    let year: i32 = year.parse().ok()?;
    let year = match (tag, year) {
        (0x17, 50..) => 1900 + year,
        (0x17, _) => 2000 + year,
        _ => year,
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse::<u32>().ok();
    let date = NaiveDate::from_ymd_opt(year, part(0)?, part(2)?)?;
    Some(date.and_hms_opt(part(4)?, part(6)?, part(8)?)?.and_utc())
}
