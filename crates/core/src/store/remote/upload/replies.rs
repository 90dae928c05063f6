//! Common parts of the providers' requests and answers: media types, checksums, times, conditions that do not hold.

use super::courier::{Courier, Reply};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::upload::Sender;
use chrono::{DateTime, Utc};
use std::time::{Duration, SystemTime};

/// The media type of an object.
pub(in crate::store::remote) fn content_type(at: &Location) -> &'static str {
    match at.file_name().to_string_lossy().ends_with(".json") {
        true => "application/json",
        false => "application/octet-stream",
    }
}

/// The error of a condition that does not hold.
pub(in crate::store::remote) fn changed(at: &Location, reply: &Reply) -> Error {
    let text = format!("another program has written this object meanwhile ({})", reply.shown);
    Error::new(ErrorKind::Changed, text).at(at).answered(reply.status, None)
}

/// True if the server says that it has compared this checksum, in a field of its answer.
///
/// # Errors
/// `Io`: it has another one.
pub(in crate::store::remote) fn is_checked(reply: &Reply, field: &str, sum: &str, at: &Location) -> Result<bool> {
    match reply.field(field) {
        None => Ok(false),
        Some(found) if found == sum => Ok(true),
        Some(found) => Err(other_bytes(&found, sum, at)),
    }
}

/// The error of a server that has other bytes.
pub(in crate::store::remote) fn other_bytes(found: &str, sum: &str, at: &Location) -> Error {
    let text = format!("the server has other bytes than were sent (their checksum is {found}, and not {sum})");
    Error::new(ErrorKind::Io, text).at(at)
}

/// The time since a moment that an answer names (RFC 3339, or as in HTTP), by the server's own clock.
pub(in crate::store::remote) fn since(reply: &Reply, moment: &str) -> Option<Duration> {
    let read = |text: &str| DateTime::parse_from_rfc3339(text).or_else(|_| DateTime::parse_from_rfc2822(text)).ok();
    let now = reply
        .field("date")
        .as_deref()
        .and_then(read)
        .map_or_else(|| SystemTime::now().into(), |date| date.with_timezone(&Utc));
    // One that is in the future has no age.
    Some((now - read(moment)?.with_timezone(&Utc)).to_std().unwrap_or_default())
}

impl Sender for Courier {
    fn connections(&self) -> usize {
        Courier::connections(self)
    }

    fn rest(&self) {
        Courier::rest(self);
    }
}
