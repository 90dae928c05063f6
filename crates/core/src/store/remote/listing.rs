//! Names of object stores: what an address means, and what a folder has.

use super::answer::{Expected, Refused, Verdict};
use super::control::{block_on, Control};
use super::credentials::{Credentials, Finder};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

/// How long a page of a listing may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is under an address: itself if it is a file, or what `listed` finds of a bucket behind a prefix.
pub(super) fn list(
    at: &Location,
    listed: impl FnOnce(&str, &str) -> Result<Result<Vec<String>, Refused>>,
    explained: impl FnOnce(Error) -> Error,
) -> Result<Vec<Location>> {
    let text = at.to_string();
    let (bucket, key) = parts(&text)?;
    let is_file = |ending: &str| Path::new(key).extension().is_some_and(|found| found == ending);
    if is_file("safetensors") || is_file("json") {
        return Ok(vec![at.clone()]);
    }
    let slash = if key.is_empty() || key.ends_with('/') { "" } else { "/" };
    let names = listed(bucket, &format!("{key}{slash}"))?.map_err(|refusal| explained(refusal.error))?;
    if names.is_empty() && slash.is_empty() {
        return Err(Error::new(
            ErrorKind::NotFound,
            "the bucket or container has no object whose key begins with this",
        ));
    }
    if names.is_empty() {
        // An object whose name has another ending.
        return Ok(vec![at.clone()]);
    }
    let folder = text.trim_end_matches('/');
    Ok(names.iter().map(|name| Location::Url(format!("{folder}/{name}"))).collect())
}

/// The names that begin with `prefix` and have no further slash, or why the server does not say them. `store` is asked with
/// the credentials that there are, and with others once more if `renewed` says that there are some. Blocks.
pub(super) fn listed<F: Finder, S: PaginatedListStore>(
    credentials: &Arc<Credentials<F>>,
    prefix: &str,
    store: impl Fn(&F::Key, Control) -> Result<S>,
    renewed: impl Fn(u64, &Refused) -> bool,
) -> Result<Result<Vec<String>, Refused>> {
    let mut again = true;
    loop {
        let none = || Err(Error::new(ErrorKind::Internal, "no session; please report this"));
        let session = credentials.session(None).unwrap_or_else(none)?;
        let generation = credentials.generation.load(Ordering::Acquire);
        let control = Control::new(&credentials.common, PATIENCE);
        match names(&store(&session.found.key, control.clone())?, &control, prefix)? {
            Err(refusal) if again && renewed(generation, &refusal) => again = false,
            found => return Ok(found),
        }
    }
}

/// The names, or why the server does not say them.
fn names(store: &impl PaginatedListStore, control: &Control, prefix: &str) -> Result<Result<Vec<String>, Refused>> {
    let e = match block_on(all_names(store, prefix))? {
        Ok(names) => return Ok(Ok(names)),
        Err(e) => e,
    };
    let unclear =
        |text: String| Error::new(ErrorKind::Io, "the listing is not understood").caused_by(io::Error::other(text));
    match control.last() {
        None => Err(unclear(e.to_string())),
        Some(Err(e)) => Err(e),
        Some(Ok(answer)) => match answer.judge(&Expected { object: None, range: 0..1 }) {
            Verdict::Refused(refusal) => Ok(Err(refusal)),
            Verdict::Again(e, _) | Verdict::OtherEtag(e) | Verdict::Failed(e) => Err(e),
            Verdict::Moved(_) | Verdict::Body { .. } => Err(unclear(e.to_string())),
        },
    }
}

async fn all_names(store: &impl PaginatedListStore, prefix: &str) -> object_store::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut page_token = None;
    loop {
        let options = PaginatedListOptions { delimiter: Some("/".into()), page_token, ..Default::default() };
        let page = store.list_paginated(Some(prefix), options).await?;
        let direct = page.result.objects.iter().filter_map(|object| object.location.as_ref().strip_prefix(prefix));
        names.extend(direct.filter(|name| !name.is_empty() && !name.contains('/')).map(str::to_owned));
        page_token = page.page_token;
        if page_token.is_none() {
            return Ok(names);
        }
    }
}

/// Bucket and key.
pub(super) fn parts(at: &str) -> Result<(&str, &str)> {
    let rest = at.split_once("://").map_or(at, |(_, rest)| rest);
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || !bucket.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        let text =
            "the name of the bucket or container is empty, or has other letters than a-z, digits, '-', '.' and '_'";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // Servers, and what signs, take these for steps in a path.
    if key.split('/').any(|part| part == "." || part == "..") {
        return Err(Error::new(ErrorKind::Invalid, "keys with '.' or '..' between slashes are not supported"));
    }
    Ok((bucket, key))
}

/// The key as a path has it.
pub(super) fn escaped(key: &str) -> String {
    let mut text = String::with_capacity(key.len());
    for b in key.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => text.push(b as char),
            _ => {
                let _ = write!(text, "%{b:02X}");
            }
        }
    }
    text
}
