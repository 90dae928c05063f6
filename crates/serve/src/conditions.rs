//! Conditions of requests: RFC 9110, section 13.

use crate::date;

/// The conditional fields of a request; lists that stand in several fields are joined.
#[derive(Debug, Default, Clone)]
pub(crate) struct Conditions {
    pub(crate) if_match: Option<Vec<u8>>,
    pub(crate) if_none_match: Option<Vec<u8>>,
    pub(crate) if_modified_since: Option<Vec<u8>>,
    pub(crate) if_unmodified_since: Option<Vec<u8>>,
    pub(crate) if_range: Option<Vec<u8>>,
}

/// The conclusion of the conditions.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Conclusion {
    /// The request is answered.
    Goes,
    /// The client has this version: 304.
    IsKnown,
    /// A precondition fails: 412.
    Fails,
}

impl Conditions {
    /// Judges an object with this strong ETag, modified at this time, in the order of section 13.2.2.
    pub(crate) fn judge(&self, etag: &str, modified: Option<i64>) -> Conclusion {
        let since = |value: &Option<Vec<u8>>| Some((date::parse(value.as_deref()?)?, modified?));
        let fails = match &self.if_match {
            Some(list) => !names(list, etag, false),
            None => since(&self.if_unmodified_since).is_some_and(|(date, modified)| modified > date),
        };
        let known = match &self.if_none_match {
            Some(list) => names(list, etag, true),
            None => since(&self.if_modified_since).is_some_and(|(date, modified)| modified <= date),
        };
        match (fails, known) {
            (true, _) => Conclusion::Fails,
            (_, true) => Conclusion::IsKnown,
            _ => Conclusion::Goes,
        }
    }

    /// True if the range of the request is answered with a part. A date does not tell two versions of one second apart,
    /// so it is no strong validator: the whole object is sent then.
    pub(crate) fn allows_part(&self, etag: &str) -> bool {
        self.if_range.as_ref().is_none_or(|value| value == etag.as_bytes())
    }
}

/// True if the list has the ETag. A weak one counts if `weakly`.
fn names(list: &[u8], etag: &str, weakly: bool) -> bool {
    if list.trim_ascii() == b"*" {
        return true;
    }
    let mut left = list;
    loop {
        while let [b' ' | b'\t' | b',', rest @ ..] = left {
            left = rest;
        }
        let (is_weak, rest) = left.strip_prefix(b"W/").map_or((false, left), |rest| (true, rest));
        let Some(quoted) = rest.strip_prefix(b"\"") else { return false };
        let Some(end) = quoted.iter().position(|b| *b == b'"') else { return false };
        if &rest[..end + 2] == etag.as_bytes() && (weakly || !is_weak) {
            return true;
        }
        left = &quoted[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "\"a1\"";

    fn found(name: &str, value: &str) -> Conclusion {
        let mut conditions = Conditions::default();
        let field = match name {
            "match" => &mut conditions.if_match,
            "none" => &mut conditions.if_none_match,
            "since" => &mut conditions.if_modified_since,
            _ => &mut conditions.if_unmodified_since,
        };
        *field = Some(value.as_bytes().to_vec());
        conditions.judge(OURS, Some(784111777))
    }

    #[test]
    fn etags_are_compared_in_lists() {
        for list in ["\"a1\"", "\"x\", \"a1\"", "*", ",\"x,y\" ,\"a1\","] {
            assert_eq!(found("match", list), Conclusion::Goes, "{list}");
            assert_eq!(found("none", list), Conclusion::IsKnown, "{list}");
        }
        for list in ["", "a1", "\"a1", "\"x\"", "\"x,\"a1\"", "x, \"a1\"", "\"a\"1\""] {
            assert_eq!(found("match", list), Conclusion::Fails, "{list}");
            assert_eq!(found("none", list), Conclusion::Goes, "{list}");
        }
        // A weak one names no version for If-Match
        assert_eq!(found("match", "W/\"a1\""), Conclusion::Fails);
        assert_eq!(found("none", "W/\"a1\""), Conclusion::IsKnown);
    }

    #[test]
    fn dates_count_where_no_etag_does() {
        let (before, at) = ("Sun, 06 Nov 1994 08:49:36 GMT", "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!((found("since", before), found("since", at)), (Conclusion::Goes, Conclusion::IsKnown));
        assert_eq!((found("unmodified", before), found("unmodified", at)), (Conclusion::Fails, Conclusion::Goes));
        assert_eq!((found("since", "x"), found("unmodified", "x")), (Conclusion::Goes, Conclusion::Goes));
        let both = |tag: &str| Conditions {
            if_none_match: Some(tag.as_bytes().to_vec()),
            if_modified_since: Some(at.as_bytes().to_vec()),
            ..Conditions::default()
        };
        assert_eq!(both("\"x\"").judge(OURS, Some(784111777)), Conclusion::Goes);
    }

    #[test]
    fn a_part_is_sent_of_the_version_that_the_client_has() {
        let with = |value: &str| Conditions { if_range: Some(value.as_bytes().to_vec()), ..Conditions::default() };
        assert!(Conditions::default().allows_part(OURS) && with(OURS).allows_part(OURS));
        for other in ["\"x\"", "W/\"a1\"", "a1", "*", "Sun, 06 Nov 1994 08:49:37 GMT"] {
            assert!(!with(other).allows_part(OURS), "{other}");
        }
    }
}
