//! Versions of objects in S3: the locks that keep them from being deleted, and the marks of objects that were removed.
//! <https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-lock-managing.html>

use crate::store::remote::http::xml;
use crate::store::remote::upload::{since, Reply};

/// The lock of a version, as an answer about it tells: to those with the rights `s3:GetObjectRetention` and `s3:GetObjectLegalHold`.
pub(super) fn own_lock(reply: &Reply) -> Option<String> {
    let until = reply.field("x-amz-object-lock-retain-until-date");
    let age = until.as_deref().and_then(|moment| since(reply, moment));
    let is_over = age.is_some_and(|age| !age.is_zero());
    let until = until.filter(|_| age.is_some()).map(|moment| format!(" until {moment}"));
    let mode = reply.field("x-amz-object-lock-mode").filter(|_| !is_over);
    let retention = mode.and_then(|mode| retention(&mode, &until.unwrap_or_default()));
    let hold = reply.field("x-amz-object-lock-legal-hold").filter(|state| state.eq_ignore_ascii_case("on"));
    let locks: Vec<String> = retention.into_iter().chain(hold.map(|_| "a legal hold".to_owned())).collect();
    (!locks.is_empty()).then(|| locks.join(", and "))
}

/// The lock that a bucket gives to each new version, by the text of its `ObjectLockConfiguration`. `Err`: the text is another one.
pub(super) fn default_lock(text: &str) -> Result<Option<String>, ()> {
    let (mut mode, mut period) = (String::new(), String::new());
    let read = xml::read(text, |element| match element.path[1..] {
        ["Rule", "DefaultRetention", "Mode"] => mode = element.text,
        ["Rule", "DefaultRetention", "Days"] => period = spelled(&element.text, "day"),
        ["Rule", "DefaultRetention", "Years"] => period = spelled(&element.text, "year"),
        _ => {}
    });
    match read {
        Ok("ObjectLockConfiguration") => Ok(retention(mode.trim(), &period)),
        _ => Err(()),
    }
}

fn spelled(number: &str, unit: &str) -> String {
    match number.trim().parse::<u32>() {
        Ok(1) => format!(" for 1 {unit}"),
        Ok(number) => format!(" for {number} {unit}s"),
        Err(_) => String::new(),
    }
}

fn retention(mode: &str, period: &str) -> Option<String> {
    match mode {
        "COMPLIANCE" => Some(format!("COMPLIANCE{period}")),
        "GOVERNANCE" => Some(format!("GOVERNANCE{period}, except for those with s3:BypassGovernanceRetention")),
        _ => None,
    }
}

/// True if the newest version of this key is the mark of its removal, by the text of a `ListVersionsResult`.
pub(super) fn is_removed(text: &str, key: &str) -> bool {
    let (mut name, mut is_latest, mut found) = (String::new(), false, false);
    let read = xml::read(text, |element| match element.path[1..] {
        ["DeleteMarker", "Key"] => name = element.text,
        ["DeleteMarker", "IsLatest"] => is_latest = element.text.trim() == "true",
        ["DeleteMarker"] => found |= std::mem::take(&mut is_latest) && std::mem::take(&mut name) == key,
        _ => {}
    });
    read == Ok("ListVersionsResult") && found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_retention_is_told_in_words() {
        let config = |rule: &str| {
            format!("<?xml version=\"1.0\"?><ObjectLockConfiguration xmlns=\"x\"><ObjectLockEnabled>Enabled</ObjectLockEnabled>{rule}</ObjectLockConfiguration>")
        };
        let rule = |mode: &str, period: &str| {
            config(&format!("<Rule><DefaultRetention><Mode>{mode}</Mode>{period}</DefaultRetention></Rule>"))
        };
        let compliance = |text: &str| Ok(Some(format!("COMPLIANCE{text}")));
        assert_eq!(default_lock(&rule("COMPLIANCE", "<Days>30</Days>")), compliance(" for 30 days"));
        assert_eq!(default_lock(&rule("COMPLIANCE", "<Years>1</Years>")), compliance(" for 1 year"));
        let governance = "GOVERNANCE for 1 day, except for those with s3:BypassGovernanceRetention".to_owned();
        assert_eq!(default_lock(&rule("GOVERNANCE", "<Days>1</Days>")), Ok(Some(governance)));
        for none in [config(""), config("<Rule></Rule>"), rule("", ""), rule("other", "<Days>3</Days>")] {
            assert_eq!(default_lock(&none), Ok(None), "{none}");
        }
        for other in ["", "<ListBucketResult></ListBucketResult>", "<ObjectLockConfiguration><Rule>"] {
            assert_eq!(default_lock(other), Err(()), "{other}");
        }
    }

    #[test]
    fn only_a_mark_on_the_newest_version_of_this_key_says_that_it_was_removed() {
        let list = |entries: &str| format!("<ListVersionsResult><Name>b</Name>{entries}</ListVersionsResult>");
        let entry = |kind: &str, key: &str, is_latest: &str| {
            format!("<{kind}><Key>{key}</Key><VersionId>v</VersionId><IsLatest>{is_latest}</IsLatest></{kind}>")
        };
        let other = entry("DeleteMarker", "a/b.c", "true");
        assert!(is_removed(&list(&(entry("DeleteMarker", "a/b", "true") + &other)), "a/b"));
        assert!(is_removed(&list(&(other.clone() + &entry("DeleteMarker", "a/b", "true"))), "a/b"));
        for no in [
            String::new(),
            other.clone(),
            entry("Version", "a/b", "true"),
            entry("Version", "a/b", "true") + &entry("DeleteMarker", "a/b", "false") + &other,
        ] {
            assert!(!is_removed(&list(&no), "a/b"), "{no}");
        }
        assert!(!is_removed("<Error></Error>", "a/b"));
    }
}
