//! Dates of HTTP: RFC 9110, section 5.6.7.

use chrono::{DateTime, NaiveDateTime};
use std::time::{SystemTime, UNIX_EPOCH};

/// The form that is sent, and the two old ones that are still read.
const FORMS: [&str; 3] = ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"];

/// The text of a time in seconds since the epoch; `None` beyond the year 9999.
pub(crate) fn text(seconds: i64) -> Option<String> {
    let time = DateTime::from_timestamp(seconds, 0)?;
    Some(time.format(FORMS[0]).to_string()).filter(|text| text.len() == 29)
}

/// The time of a text.
pub(crate) fn parse(value: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(value).ok()?;
    let time = FORMS.iter().find_map(|form| NaiveDateTime::parse_from_str(text, form).ok())?;
    Some(time.and_utc().timestamp())
}

/// Now.
pub(crate) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_forms_of_the_standard_are_one_time() {
        let expected = text(784111777).unwrap();
        assert_eq!(expected, "Sun, 06 Nov 1994 08:49:37 GMT");
        for form in [expected.as_str(), "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
            assert_eq!(parse(form.as_bytes()), Some(784111777), "{form}");
        }
        assert_eq!((parse(b"soon"), parse(b"\xff"), text(i64::MAX), text(1 << 40)), (None, None, None, None));
    }
}
