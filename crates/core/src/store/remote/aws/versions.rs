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

/// True if the newest version of this key is the mark of its removal, by the text of a `ListVersionsResult`. `Err`: the text is another
/// one.
pub(super) fn is_removed(text: &str, key: &str) -> Result<bool, ()> {
    let (mut name, mut is_latest, mut found) = (String::new(), false, false);
    let read = xml::read(text, |element| match element.path[1..] {
        ["DeleteMarker", "Key"] => name = element.text,
        ["DeleteMarker", "IsLatest"] => is_latest = element.text.trim() == "true",
        ["DeleteMarker"] => found |= std::mem::take(&mut is_latest) && std::mem::take(&mut name) == key,
        _ => {}
    });
    (read == Ok("ListVersionsResult")).then_some(found).ok_or(())
}

/// True if a version of one of these keys is kept, by the text of a `ListVersionsResult`, or if that list goes on. `Err`: the text is
/// another one.
pub(super) fn has_versions(text: &str, keys: &[&str]) -> Result<bool, ()> {
    let mut found = false;
    let read = xml::read(text, |element| match element.path[1..] {
        ["Version" | "DeleteMarker", "Key"] => found |= keys.contains(&element.text.as_str()),
        ["IsTruncated"] => found |= element.text.trim().eq_ignore_ascii_case("true"),
        _ => {}
    });
    (read == Ok("ListVersionsResult")).then_some(found).ok_or(())
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
        let is_removed = |text: &str| super::is_removed(text, "a/b");
        assert_eq!(is_removed(&list(&(entry("DeleteMarker", "a/b", "true") + &other))), Ok(true));
        assert_eq!(is_removed(&list(&(other.clone() + &entry("DeleteMarker", "a/b", "true")))), Ok(true));
        for no in [
            String::new(),
            other.clone(),
            entry("Version", "a/b", "true"),
            entry("Version", "a/b", "true") + &entry("DeleteMarker", "a/b", "false") + &other,
        ] {
            assert_eq!(is_removed(&list(&no)), Ok(false), "{no}");
        }
        assert_eq!(is_removed("<Error></Error>"), Err(()));
    }

    #[test]
    fn a_version_of_a_key_is_found_whatever_its_kind() {
        let list = |entries: &str| format!("<ListVersionsResult><Name>b</Name>{entries}</ListVersionsResult>");
        let entry = |kind: &str, key: &str| format!("<{kind}><Key>{key}</Key><IsLatest>false</IsLatest></{kind}>");
        let has = |text: &str| has_versions(text, &["a/b", "a/d"]);
        for kind in ["Version", "DeleteMarker"] {
            assert_eq!(has(&list(&(entry(kind, "a/b.c") + &entry(kind, "a/d")))), Ok(true), "{kind}");
            assert_eq!(has(&list(&entry(kind, "a/b.c"))), Ok(false), "{kind}");
        }
        assert_eq!(has(&list("<IsTruncated>false</IsTruncated>")), Ok(false));
        assert_eq!(has(&list("<IsTruncated>true</IsTruncated>")), Ok(true), "nobody has seen the rest");
        assert_eq!(has("<Error></Error>"), Err(()));
    }
}
