//! Ranges of requests: RFC 9110, section 14.

use std::ops::Range;

/// The bytes that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The whole object. A `Range` that is malformed, has another unit, or names several ranges, is ignored: a server may
    /// do so, and a client that sends one must take the whole object.
    Whole,
    /// These bytes, of which there is at least one.
    Part(Range<u64>),
    /// Bytes behind the end.
    Beyond,
}

/// The bytes that the value of a `Range` field asks for, of an object of `size` bytes.
pub(crate) fn wanted(value: Option<&[u8]>, size: u64) -> Wanted {
    value.and_then(parse).map_or(Wanted::Whole, |asked| match asked {
        Asked::Last(0) => Wanted::Beyond,
        // No range describes the bytes of an object that has none
        Asked::Last(_) if size == 0 => Wanted::Whole,
        Asked::Last(count) => Wanted::Part(size.saturating_sub(count)..size),
        Asked::From(first, _) if first >= size => Wanted::Beyond,
        Asked::From(first, last) => Wanted::Part(first..last.map_or(size, |last| size.min(last.saturating_add(1)))),
    })
}

enum Asked {
    From(u64, Option<u64>),
    Last(u64),
}

fn parse(value: &[u8]) -> Option<Asked> {
    let text = std::str::from_utf8(value).ok()?;
    let (unit, range) = text.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    // An element of a list may be empty; `split_once` leaves a second range where no digit may be
    let (first, last) = range.trim_matches([' ', '\t', ',']).split_once('-')?;
    match (first.is_empty(), last.is_empty()) {
        (true, _) => Some(Asked::Last(number(last)?)),
        (false, true) => Some(Asked::From(number(first)?, None)),
        (false, false) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(Asked::From(first, Some(last)))
        }
    }
}

/// A number; one that is too large is the largest, which is behind every end.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: &str, size: u64) -> Wanted {
        wanted(Some(value.as_bytes()), size)
    }

    #[test]
    fn ranges_are_cut_at_the_end() {
        assert_eq!(of("bytes=0-0", 10), Wanted::Part(0..1));
        assert_eq!(of("bytes=3-", 10), Wanted::Part(3..10));
        assert_eq!(of("bytes=3-99", 10), Wanted::Part(3..10));
        assert_eq!(of("Bytes= 3-4 ", 10), Wanted::Part(3..5));
        assert_eq!(of("bytes=-3", 10), Wanted::Part(7..10));
        assert_eq!(of("bytes=-30", 10), Wanted::Part(0..10));
        assert_eq!(of("bytes=,9-9,", 10), Wanted::Part(9..10));
        assert_eq!(wanted(None, 10), Wanted::Whole);
    }

    #[test]
    fn numbers_that_overflow_are_behind_the_end() {
        assert_eq!(of("bytes=0-99999999999999999999999", 10), Wanted::Part(0..10));
        assert_eq!(of("bytes=-99999999999999999999999", 10), Wanted::Part(0..10));
        assert_eq!(of("bytes=99999999999999999999999-", 10), Wanted::Beyond);
        assert_eq!(of("bytes=18446744073709551615-18446744073709551615", u64::MAX), Wanted::Beyond);
        assert_eq!(of("bytes=0-18446744073709551615", u64::MAX), Wanted::Part(0..u64::MAX));
    }

    #[test]
    fn what_is_behind_the_end_is_no_part() {
        for (value, size) in
            [("bytes=10-", 10), ("bytes=10-20", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-0", 0)]
        {
            assert_eq!(of(value, size), Wanted::Beyond, "{value} of {size}");
        }
        assert_eq!(of("bytes=-5", 0), Wanted::Whole);
    }

    #[test]
    fn malformed_ranges_and_several_are_ignored() {
        for value in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=a-b",
            "bytes=4-3",
            "bytes=1-2,4-5",
            "bytes=0 - 1",
            "lines=0-1",
            "bytes=+1-2",
            "bytes=1-2x",
            "bytes=0x1-2",
            "bytes=--1",
            "=0-1",
            "bytes=1-2-3",
        ] {
            assert_eq!(of(value, 10), Wanted::Whole, "{value}");
        }
        assert_eq!(wanted(Some(b"bytes=\xff-"), 10), Wanted::Whole);
    }
}
