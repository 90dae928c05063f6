//! ListedNames of object stores: what an address means, and what a folder has. Keys are strings: a `/` in them ends a folder, and
//! nothing else in them has a meaning.

use super::auth::credentials::{Credentials, Finder};
use super::http::address::Address;
use super::http::answer::{Answer, Expected, Refused, Verdict};
use super::http::common::{LOOK, MOST_REDIRECTS};
use super::http::control::Control;
use super::http::jitter::Jitter;
use super::http::request::{Get, Listed, Requests};
use super::pages::{NextPage, Page, WITHOUT};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::object::NO_OBJECT;
use crate::store::watch::still_wanted;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a page is asked for that does not come, and the first pause before the next time. Each one is twice as long.
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(100);
/// So many pages in a row may have no new key.
const MOST_EMPTY: u32 = 1000;

/// A page of a listing is asked for.
pub(super) struct Ask<'a, K> {
    pub(super) key: &'a K,
    pub(super) bucket: &'a str,
    pub(super) prefix: &'a str,
    pub(super) page: &'a NextPage,
    /// Where a redirect has led.
    pub(super) moved: Option<&'a RedirectPlace>,
}

/// Where a redirect has led, and the region that it named.
pub(super) struct RedirectPlace {
    pub(super) address: Address,
    pub(super) region: Option<String>,
}

/// The names directly under a prefix, with the bytes of their objects, or why the server does not say them. Names of
/// folders end with a slash.
type ListedNames = Result<Result<Vec<(String, Option<u64>)>, Refused>>;

/// The objects under an address: itself if it is a file, or those that its bucket lists. `page` makes the request for a page.
/// Blocks.
pub(super) fn list<F: Finder>(
    requests: &impl Requests,
    credentials: &Arc<Credentials<F>>,
    at: &Location,
    page: impl Fn(&Ask<'_, F::Key>) -> Result<Get>,
) -> Result<Vec<Listed>> {
    let text = at.to_string();
    let (bucket, key) = parts(&text)?;
    let itself = || vec![Listed { location: at.clone(), size: None }];
    let is_file = |ending: &str| Path::new(key).extension().is_some_and(|found| found == ending);
    if is_file("safetensors") || is_file("json") {
        return Ok(itself());
    }
    let slash = if key.is_empty() || key.ends_with('/') { "" } else { "/" };
    let renewed = |generation, refusal: &Refused| requests.renew(&text, generation, refusal);
    let names = listed(credentials, bucket, &format!("{key}{slash}"), page, renewed)?;
    let names = names.map_err(|refusal| requests.explained(refusal))?;
    if names.is_empty() && slash.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, NO_OBJECT));
    }
    let is_empty = slash == "/" && names.iter().all(|(name, _)| name.ends_with('/'));
    if is_empty {
        // An object whose name has another ending.
        return Ok(itself());
    }
    // One slash ends the folder. If there are more, they are of its name.
    let folder = text.strip_suffix('/').unwrap_or(&text);
    let found = |(name, size)| Listed { location: Location::Url(format!("{folder}/{name}")), size };
    Ok(names.into_iter().map(found).collect())
}

/// The names that begin with `prefix` and have no further slash, except at their end, or why the server does not say them. It is asked with
/// the credentials that there are, and with others once more if `renewed` says that there are some.
fn listed<F: Finder>(
    credentials: &Arc<Credentials<F>>,
    bucket: &str,
    prefix: &str,
    request: impl Fn(&Ask<'_, F::Key>) -> Result<Get>,
    renewed: impl Fn(u64, &Refused) -> bool,
) -> ListedNames {
    let mut again = true;
    loop {
        let none = || Err(Error::new(ErrorKind::Internal, "no session; please report this"));
        let session = credentials.session(None).unwrap_or_else(none)?;
        let generation = credentials.generation.load(Ordering::Acquire);
        let control = Control::new(&credentials.common, PATIENCE);
        let key = &session.found.key;
        let body = |page: &NextPage, moved: Option<&RedirectPlace>| request(&Ask { key, bucket, prefix, page, moved });
        match names(&control, prefix, body)? {
            Err(refusal) if again && renewed(generation, &refusal) => again = false,
            found => return Ok(found),
        }
    }
}

fn names(
    control: &Control,
    prefix: &str,
    request: impl Fn(&NextPage, Option<&RedirectPlace>) -> Result<Get>,
) -> ListedNames {
    let (mut names, mut seen) = (Vec::new(), HashSet::new());
    let mut page = NextPage::None;
    let (mut asked_for, mut without_news) = (HashSet::new(), 0);
    loop {
        check_wanted()?;
        let body = match asked(control, |moved| request(&page, moved))? {
            Ok(body) => body,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Page { keys, folders, next } = Page::of(&body)?;
        let had = seen.len();
        for folder in folders {
            let name = folder.strip_prefix(prefix).and_then(|name| name.strip_suffix('/'));
            let name = name.filter(|name| !name.contains('/') && !["", ".", ".."].contains(name));
            let is_new = seen.insert(folder.clone());
            names.extend(name.filter(|_| is_new).map(|name| (format!("{name}/"), None)));
        }
        for (key, size) in keys {
            // What these name in a folder is not in it.
            let name = key.strip_prefix(prefix).filter(|name| !name.contains('/') && !["", ".", ".."].contains(name));
            if let Some(name) = name {
                names.push((name.to_owned(), size));
            }
            seen.insert(key);
        }
        // Without a token there is progress on every page. With one, pages may be empty, but not for ever.
        without_news = if seen.len() == had { without_news + 1 } else { 0 };
        let is_behind = matches!(next, NextPage::Behind(_)) && page != NextPage::None;
        let is_stuck = !asked_for.insert(next.clone()) || without_news > if is_behind { 0 } else { MOST_EMPTY };
        if next == NextPage::None {
            return Ok(Ok(names));
        }
        if is_stuck {
            let text = "the server says that its listing goes on (IsTruncated), and gives the same page again";
            return Err(Error::new(ErrorKind::Io, format!("{text}: {WITHOUT}")));
        }
        page = next;
    }
}

/// The body of an answer, or why the server refuses it. Requests that may go better later are sent again, and redirects
/// are followed.
fn asked(
    control: &Control,
    request: impl Fn(Option<&RedirectPlace>) -> Result<Get>,
) -> Result<Result<Vec<u8>, Refused>> {
    let (mut tries, mut redirects, mut usual) = (0, 0, PAUSE);
    let mut moved: Option<RedirectPlace> = None;
    let (began, mut jitter) = (Instant::now(), Jitter::random());
    loop {
        let get = request(moved.as_ref())?;
        let mut named = Duration::ZERO;
        let e = match control.get(&get) {
            Ok((200, _, body)) => return Ok(Ok(body)),
            Ok((status, fields, body)) => {
                let answer = Answer::of(status, &fields, &body);
                match answer.judge(&Expected { object: None, range: 0..1 }) {
                    Verdict::Refused(refusal) => return Ok(Err(refusal)),
                    Verdict::Moved { .. } if redirects == MOST_REDIRECTS => {
                        let text = format!("the server redirects more than {MOST_REDIRECTS} times");
                        return Err(Error::new(ErrorKind::Io, text));
                    }
                    Verdict::Moved { to, region } => {
                        redirects += 1;
                        let address = get.address.moved(&to).map_err(|e| e.of_kind(ErrorKind::Io))?;
                        moved = Some(RedirectPlace { address, region });
                        continue;
                    }
                    Verdict::Again(e, longer) => {
                        named = longer.unwrap_or_default();
                        e
                    }
                    Verdict::OtherEtag(e) | Verdict::Failed(e) => return Err(e),
                    Verdict::Body { .. } | Verdict::Whole { .. } | Verdict::Less(_) | Verdict::Rest => {
                        let text = format!("the server answers a listing with status {status}");
                        return Err(Error::new(ErrorKind::Io, text).answered(status, None));
                    }
                }
            }
            Err((e, true)) => return Err(e),
            Err((e, false)) => e,
        };
        tries += 1;
        // Processes that are refused together must not come back together
        let pause = named + jitter.between(usual / 2, usual * 3 / 2);
        let failing = began.elapsed();
        let patience = control.patience_with(&e);
        if failing >= patience && (tries >= TRIES || failing + pause >= 2 * PATIENCE) {
            return Err(e);
        }
        let due = Instant::now() + pause;
        while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            check_wanted()?;
            std::thread::sleep(left.min(LOOK));
        }
        usual = (usual * 2).min(Duration::from_secs(2));
    }
}

/// Goes on while somebody waits for this thread's result.
///
/// # Errors
/// `Cancelled` if nobody does.
pub(super) fn check_wanted() -> Result<()> {
    match still_wanted() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Cancelled, "nobody waits for it any more")),
    }
}

/// The query of a page in the terms of S3, which Google Cloud Storage knows too.
pub(super) fn s3_query<K>(ask: &Ask<'_, K>) -> Vec<(&'static str, String)> {
    let mut pairs = vec![("delimiter", "/".to_owned())];
    if !ask.prefix.is_empty() {
        pairs.push(("prefix", ask.prefix.to_owned()));
    }
    match ask.page {
        NextPage::None => pairs.push(("list-type", "2".to_owned())),
        NextPage::Token(token) => {
            pairs.extend([("continuation-token", token.clone()), ("list-type", "2".to_owned())]);
        }
        NextPage::Behind(name) => pairs.push(("marker", name.clone())),
    }
    pairs
}

/// Bucket and key.
pub(super) fn parts(at: &str) -> Result<(&str, &str)> {
    let rest = at.split_once("://").map_or(at, |(_, rest)| rest);
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || !bucket.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        let text =
            "the name of the bucket or container is empty, or has characters other than a-z, digits, '-', '.' and '_'";
        return Err(Error::invalid(text));
    }
    // Servers, and what signs, take these for steps in a path.
    if key.split('/').any(|part| part == "." || part == "..") {
        return Err(Error::invalid("keys with '.' or '..' between slashes are not supported"));
    }
    Ok((bucket, key))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::http::common::Common;
    use super::*;
    use crate::store::watch::Watch;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::atomic::AtomicUsize;

    /// The names found on a server whose page `n` has the key and the token `page(n)`, and the number of requests.
    fn found(page: impl Fn(usize) -> (String, String) + Send + 'static) -> (ListedNames, usize) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("http://{}/b", listener.local_addr().unwrap());
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let (mut head, mut part) = (Vec::new(), [0; 1024]);
                while !head.ends_with(b"\r\n\r\n") {
                    let got = stream.read(&mut part).unwrap();
                    head.extend_from_slice(&part[..got]);
                }
                let (key, token) = page(counted.fetch_add(1, Ordering::Relaxed));
                let key = if key.is_empty() { key } else { format!("<Contents><Key>{key}</Key></Contents>") };
                let next = match &*token {
                    "" => "<IsTruncated>false</IsTruncated>".to_owned(),
                    _ => {
                        format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>")
                    }
                };
                let body = format!("<ListBucketResult>{key}{next}</ListBucketResult>");
                write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
            }
        });
        let control = Control::new(&Arc::new(Common::default()), PATIENCE);
        let address = Address::parse(&at).unwrap();
        let get = |_: &_, _: Option<&_>| {
            Ok(Get { address: address.clone(), fields: "".into(), generation: 0, is_moved: false })
        };
        (names(&control, "", get), count.load(Ordering::Relaxed))
    }

    #[test]
    fn pages_without_end_are_an_error() {
        let key = |n: usize| format!("k{n}");
        let (turns, count) = found(move |n| (if n < 9 { key(n) } else { String::new() }, format!("t{}", n % 3)));
        let e = turns.unwrap_err();
        assert!(e.to_string().contains("gives the same page again") && count == 4, "{count}: {e}");
        let (empty, count) = found(move |n| (if n < 2 { key(n) } else { String::new() }, format!("t{n}")));
        let e = empty.unwrap_err();
        assert!(e.to_string().contains("gives the same page again") && count == 1003, "{count}: {e}");
        let (long, count) = found(move |n| match n {
            700 | 1400 => (key(n), format!("t{n}")),
            1500 => (key(n), String::new()),
            _ => (String::new(), format!("t{n}")),
        });
        let names = long.unwrap().unwrap_or_else(|refusal| panic!("{}", refusal.error));
        assert_eq!((names.len(), count), (3, 1501));
    }

    #[test]
    fn pages_that_nobody_waits_for_are_not_asked_for() {
        let watch = Arc::new(Watch::default());
        let _asking = watch.ask(Path::new("s3://b/"));
        let of_server = watch.clone();
        let (cut, count) = found(move |n| {
            if n == 4 {
                of_server.give_up();
            }
            (format!("k{n}"), format!("t{n}"))
        });
        assert_eq!((cut.unwrap_err().kind(), count), (ErrorKind::Cancelled, 5));
    }
}
