//! One read on its way: what is still to come, where it goes, and what has been tried.

use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Lane, Ticket};
use crate::source::Destination;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::answer::{Expected, Refused};
use crate::store::remote::http::request::{Get, Requests};
use crate::store::version::Version;
use crate::sync::{lock, Mutex};
use crate::wake::Wake;
use std::any::Any;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// Most places that one system call fills.
pub(super) const MOST_PLACES: usize = 64;

/// One object: where it is, and how it is asked for.
#[derive(Debug)]
pub(in crate::store::remote) struct Site {
    /// For messages.
    pub(in crate::store::remote) path: PathBuf,
    at: String,
    pub(in crate::store::remote) requests: Arc<dyn Requests>,
    /// Where the server has redirected to. Later reads go there at once.
    moved: Mutex<Option<Address>>,
    /// Whether requests no longer name the ETag.
    unpinned: AtomicBool,
}

impl Site {
    pub(in crate::store::remote) fn new(path: PathBuf, at: String, requests: Arc<dyn Requests>) -> Site {
        Site { path, at, requests, moved: Mutex::new(None), unpinned: AtomicBool::new(false) }
    }

    /// The request for the object. A place that a redirect names has its signature in its own address, or is of the kind
    /// that gets ours.
    /// `None`, and `wake`: as [`Requests::request`].
    pub(in crate::store::remote) fn request(&self, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        let moved = lock(&self.moved).clone();
        match moved {
            Some(address) => self.requests.moved(&self.at, &address, wake),
            None => self.requests.request(&self.at, wake),
        }
    }

    /// Has later requests not name the ETag.
    pub(super) fn unpin(&self) {
        self.unpinned.store(true, Ordering::Relaxed);
    }

    /// The server has redirected to there, perhaps to another region.
    pub(in crate::store::remote) fn moved(&self, to: Address, region: Option<&str>) {
        region.into_iter().for_each(|region| self.requests.learn_region(&self.at, region));
        *lock(&self.moved) = Some(to);
    }

    /// The request `asked` was refused. Whether the next one is another: for where the object was first, for where another
    /// read has been redirected to since, or with another signature.
    pub(in crate::store::remote) fn renew(&self, asked: &Get, refusal: &Refused) -> bool {
        if !asked.is_moved {
            return self.requests.renew(&self.at, asked.generation, refusal);
        }
        // Another credential, or another region, may be right for this place.
        if asked.generation > 0 && self.requests.renew(&self.at, asked.generation, refusal) {
            return true;
        }
        // A read that was refused before this one may have had the place forgotten, or been redirected again.
        lock(&self.moved).take_if(|address| *address == asked.address);
        true
    }
}

/// Consecutive bytes of a body go to these places in turn; a null address discards.
#[derive(Debug, Default)]
pub(in crate::store::remote) struct BodyPlaces {
    list: Vec<(*mut u8, usize)>,
    /// The place that is filled now, and how much of it has been.
    place: usize,
    filled: usize,
}

impl BodyPlaces {
    pub(in crate::store::remote) fn one(at: *mut u8, len: usize) -> BodyPlaces {
        BodyPlaces { list: vec![(at, len)], ..BodyPlaces::default() }
    }

    /// Where a read of `len` bytes lands; `None` if that is not known yet.
    ///
    /// # Errors
    /// `Internal` for a mapping: there is nothing to map.
    pub(in crate::store::remote) fn of(into: Destination, len: u64) -> Result<Option<BodyPlaces>> {
        match into {
            Destination::Memory(at) => Ok(Some(BodyPlaces::one(at, len as usize))),
            Destination::Scatter(list) => Ok(Some(BodyPlaces { list, ..BodyPlaces::default() })),
            Destination::OnArrival => Ok(None),
            Destination::Mapping { .. } | Destination::Rows { .. } => Err(Error::new(
                ErrorKind::Internal,
                "files of a web server cannot be mapped or read row by row; please report this",
            )),
        }
    }

    /// Appends the next places, for `left` bytes at most; what is discarded goes to `discard`. Whether those are all.
    pub(in crate::store::remote) fn next(&self, left: u64, discard: &mut [u8], out: &mut Vec<libc::iovec>) -> bool {
        let (mut left, mut filled) = (left as usize, self.filled);
        for (at, len) in &self.list[self.place..] {
            if left == 0 || out.len() >= MOST_PLACES {
                break;
            }
            let all = (len - filled).min(left);
            let (base, iov_len) = match at.is_null() {
                true => (discard.as_mut_ptr(), all.min(discard.len())),
                // SAFETY: within the place.
                false => (unsafe { at.add(filled) }, all),
            };
            out.push(libc::iovec { iov_base: base.cast(), iov_len });
            left -= iov_len;
            filled = 0;
            if iov_len < all {
                break;
            }
        }
        left == 0
    }

    /// Nothing is there.
    fn restart(&mut self) {
        (self.place, self.filled) = (0, 0);
    }

    /// `bytes` more are there.
    fn advance(&mut self, mut bytes: usize) {
        while let Some((_, len)) = self.list.get(self.place) {
            let all = len - self.filled;
            if bytes < all {
                self.filled += bytes;
                return;
            }
            bytes -= all;
            (self.place, self.filled) = (self.place + 1, 0);
        }
    }
}

/// A read.
pub(in crate::store::remote) struct RangeRead {
    pub(in crate::store::remote) ticket: Ticket,
    pub(in crate::store::remote) lane: Lane,
    pub(in crate::store::remote) site: Arc<Site>,
    /// Size and version of the object, and the range of the whole read.
    expected: Expected,
    /// `None`: its place comes when the first byte is there.
    pub(in crate::store::remote) places: Option<BodyPlaces>,
    pub(in crate::store::remote) keep: Arc<dyn Any + Send + Sync>,
    /// Bytes that are there.
    got: u64,
    /// Requests that failed since the last one that brought much.
    pub(in crate::store::remote) tries: u32,
    /// When the first of them failed.
    pub(in crate::store::remote) failing: Option<Instant>,
    /// Whether the server has answered the last of them: it is there, and asks for patience.
    pub(super) put_off: bool,
    /// How often it was taken from a connection that was slower than others.
    pub(super) moves: u32,
    /// Whether a server has answered.
    pub(in crate::store::remote) answered: bool,
    /// Where it was last asked for.
    pub(in crate::store::remote) asked: Option<Get>,
    pub(in crate::store::remote) redirects: u32,
    /// Refusals in a row. After each one it was asked for in another way.
    pub(in crate::store::remote) renewed: u32,
    /// Whether its arrival was reported.
    pub(in crate::store::remote) arrived: bool,
    /// The object comes whole, and its size is not known yet.
    is_open: bool,
    /// Nothing but the end of the connection said where the object ends.
    pub(in crate::store::remote) by_close: bool,
}

// SAFETY: the addresses are only written to while the read is held, and `keep` keeps them valid (invariant 5).
unsafe impl Send for RangeRead {}

impl RangeRead {
    pub(in crate::store::remote) fn new(
        ticket: Ticket,
        lane: Lane,
        site: Arc<Site>,
        expected: Expected,
        places: Option<BodyPlaces>,
    ) -> RangeRead {
        RangeRead {
            ticket,
            lane,
            site,
            expected,
            places,
            keep: Arc::new(()),
            got: 0,
            tries: 0,
            failing: None,
            put_off: false,
            moves: 0,
            answered: false,
            asked: None,
            redirects: 0,
            renewed: 0,
            arrived: false,
            is_open: false,
            by_close: false,
        }
    }

    /// The bytes that are missing: what the next request asks for.
    pub(in crate::store::remote) fn missing(&self) -> Range<u64> {
        let Range { start, end } = self.expected.range;
        start + self.got..end
    }

    pub(super) fn missing_bytes(&self) -> u64 {
        let missing = self.missing();
        missing.end - missing.start
    }

    /// Whether it has a place, and waits for none.
    pub(super) fn has_place(&self) -> bool {
        self.places.is_some()
    }

    /// Whether it has a place that was given when it arrived: others wait for such places.
    pub(super) fn holds_slab(&self) -> bool {
        self.arrived && self.has_place()
    }

    /// The strong ETag that the next request names, if the object has been seen and has one.
    pub(in crate::store::remote) fn etag(&self) -> Option<&str> {
        match &self.expected.object {
            Some((_, Version::Strong(etag))) if !self.site.unpinned.load(Ordering::Relaxed) => Some(etag),
            _ => None,
        }
    }

    /// Size and version of the object, if it has been seen.
    pub(in crate::store::remote) fn object(&self) -> Option<&(u64, Version)> {
        self.expected.object.as_ref()
    }

    /// The object has this size and version.
    pub(in crate::store::remote) fn seen(&mut self, size: u64, version: Version) {
        if self.expected.object.is_none() {
            self.expected.range.end = self.expected.range.end.min(size);
            self.expected.object = Some((size, version));
        }
    }

    /// The whole object comes, and ends where its body ends. If it breaks off, it is asked for from the first byte on.
    pub(in crate::store::remote) fn opened(&mut self) {
        self.is_open = true;
    }

    /// The body of an object that came whole has ended.
    pub(in crate::store::remote) fn closed(&mut self, version: Version, by_close: bool) {
        (self.is_open, self.by_close) = (false, by_close);
        self.seen(self.got, version);
    }

    /// Whether what breaks off now is asked for from the first byte on.
    pub(super) fn begins_again(&self) -> bool {
        self.is_open
    }

    /// Before it is asked for: what broke off and cannot go on is forgotten.
    pub(in crate::store::remote) fn begin(&mut self) {
        if std::mem::take(&mut self.is_open) {
            self.got = 0;
            self.places.iter_mut().for_each(BodyPlaces::restart);
        }
    }

    /// The object, which has not been seen, ends here at the latest.
    pub(in crate::store::remote) fn less(&mut self, end: u64) {
        self.expected.range.end = self.expected.range.end.min(end);
    }

    pub(in crate::store::remote) fn got(&self) -> u64 {
        self.got
    }

    /// Bytes were received into the next places.
    pub(in crate::store::remote) fn received(&mut self, bytes: usize) {
        self.got += bytes as u64;
        self.places.iter_mut().for_each(|places| places.advance(bytes));
    }

    /// The error, with the address and the byte range of this read.
    pub(in crate::store::remote) fn located(&self, error: Error) -> Error {
        error.at(&self.site.path).range(self.expected.range.clone())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::remote::http::request::WebRequests;

    #[test]
    fn reads_that_were_refused_together_are_asked_for_again_together() {
        let (first, there, next) = ("http://h/a", "http://p/a?1", "http://p/a?2");
        let address = |text: &str| Address::parse(text).unwrap();
        let site = Site::new(PathBuf::new(), first.into(), Arc::new(WebRequests(None)));
        let refusal = || {
            let (error, code, message) = (Error::permission("no"), String::new(), String::new());
            Refused { error, access: true, region: None, code, message }
        };
        let asked = |site: &Site| site.request(None).unwrap().unwrap();
        let renew = |asked: &Get| site.renew(asked, &refusal());
        assert!(!renew(&asked(&site)), "nothing would be different");
        site.moved(address(there), None);
        let refused = asked(&site);
        assert!(renew(&refused));
        assert!(renew(&refused), "the other read has not been redirected yet");
        assert!(asked(&site).address == address(first));
        site.moved(address(next), None);
        assert!(renew(&refused) && asked(&site).address == address(next), "it has been redirected");
    }
}
