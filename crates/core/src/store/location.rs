//! Where an object is.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where an object is: a file of this machine, or an object of the store that a scheme names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Location {
    /// A file or folder, by its path.
    Path(PathBuf),
    /// `scheme://...`, where a store is registered for the scheme.
    Url(String),
}

impl Location {
    /// The address that `path` names, and the result of `known` for its scheme; `None` for a path: no scheme, or none
    /// that `known` finds.
    pub(crate) fn address<T>(path: &Path, known: impl FnOnce(&str) -> Option<T>) -> Option<(Location, T)> {
        let text = path.to_str()?;
        let found = known(scheme(text)?)?;
        Some((Location::Url(text.to_owned()), found))
    }

    /// The scheme of an address.
    pub fn scheme(&self) -> Option<&str> {
        match self {
            Location::Path(_) => None,
            Location::Url(text) => scheme(text),
        }
    }

    /// As errors and messages show it: of a web address without its query, which may be a signature, and without a user's
    /// name and password.
    pub fn as_path(&self) -> &Path {
        match self {
            Location::Path(path) => path,
            Location::Url(text) => Path::new(shown(text)),
        }
    }

    /// A file that has this path, as it is spelled.
    pub(crate) fn file(path: &OsStr) -> Location {
        Location::Path(path.into())
    }

    /// The location of this name in this folder.
    pub(crate) fn within(&self, name: &OsStr) -> Location {
        match self {
            Location::Path(path) => Location::Path(path.join(name)),
            Location::Url(text) => {
                let (place, query) = without_query(text);
                // Keys are strings: what else ends with a slash is another folder.
                let folder = place.strip_suffix('/').unwrap_or(place);
                Location::Url(format!("{folder}/{}{query}", name.to_string_lossy()))
            }
        }
    }

    /// The same, wherever the program's current directory will be.
    pub(crate) fn absolute(&self) -> Location {
        match self {
            // Without a current directory (it was removed), a relative path leads nowhere, now or later.
            Location::Path(path) => Location::Path(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            Location::Url(_) => self.clone(),
        }
    }

    /// As it is spelled, except for what messages do not show.
    pub fn as_os_str(&self) -> &OsStr {
        self.as_path().as_os_str()
    }

    /// The last part of it.
    pub(crate) fn file_name(&self) -> &OsStr {
        self.as_path().file_name().unwrap_or(self.as_os_str())
    }

    /// The extension of its name; `None` if it has none, or no UTF-8.
    pub(crate) fn ending(&self) -> Option<&str> {
        self.as_path().extension()?.to_str()
    }

    /// The object of that name beside this one: what an index names. A query goes with it: it may be what allows access.
    pub fn sibling(&self, name: &str) -> Location {
        match self {
            Location::Path(path) => Location::Path(path.with_file_name(name)),
            Location::Url(text) => {
                let (place, query) = without_query(text);
                Location::Url(match place.rfind('/') {
                    Some(slash) => format!("{}{name}{query}", &place[..=slash]),
                    None => name.to_owned(),
                })
            }
        }
    }
}

impl AsRef<Path> for Location {
    fn as_ref(&self) -> &Path {
        self.as_path()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_path().display().fmt(f)
    }
}

/// The scheme of `scheme://...` (RFC 3986, 3.1: a letter, then letters, digits, `+`, `-` and `.`).
fn scheme(text: &str) -> Option<&str> {
    text.split_once("://").map(|(scheme, _)| scheme).filter(|scheme| is_scheme(scheme))
}

pub(super) fn is_scheme(text: &str) -> bool {
    let mut letters = text.bytes();
    let first = letters.next().is_some_and(|b| b.is_ascii_alphabetic());
    first && letters.all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// Whether queries and users' names have a meaning in addresses of this scheme. Names of other stores may have any letter.
fn is_web(scheme: &str) -> bool {
    scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")
}

/// An address, and what follows its path: the query, or the fragment.
fn without_query(text: &str) -> (&str, &str) {
    if !scheme(text).is_some_and(is_web) {
        return (text, "");
    }
    text.split_at(text.find(['?', '#']).unwrap_or(text.len()))
}

/// The part of an address that messages show.
fn shown(text: &str) -> &str {
    let (place, _) = without_query(text);
    match scheme(text) {
        Some(scheme) if is_web(scheme) => {
            let start = scheme.len() + "://".len();
            let host = place[start..].split('/').next().unwrap_or_default();
            // A name or a password stands there: nothing of the rest is shown.
            if host.contains('@') {
                &place[..start]
            } else {
                place
            }
        }
        _ => place,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_schemes_that_are_known_make_addresses() {
        let of = |text: &str| Location::address(Path::new(text), |scheme| (scheme == "toy").then_some(7));
        let (found, 7) = of("toy://a/b").unwrap() else { panic!() };
        assert_eq!((found.scheme(), found.to_string().as_str()), (Some("toy"), "toy://a/b"));
        for path in ["s3://a/b", "toy:/a", "a/toy://b", "://x", "1toy://x", "toy"] {
            assert_eq!(of(path), None, "{path}");
        }
        let index = Location::Url("toy://a/model.index.json".into());
        assert_eq!(index.sibling("x-1.st"), Location::Url("toy://a/x-1.st".into()));
        for (folder, file) in [("toy://a/b", "toy://a/b/x"), ("toy://a/b/", "toy://a/b/x"), ("toy://a//", "toy://a//x")]
        {
            assert_eq!(Location::Url(folder.into()).within(OsStr::new("x")), Location::Url(file.into()));
        }
    }

    #[test]
    fn a_query_stays_with_a_web_address_and_is_not_shown() {
        let index = Location::Url("https://h/a/model.safetensors.index.json?X-Sig=secret/x.y#z".into());
        assert_eq!(index.to_string(), "https://h/a/model.safetensors.index.json");
        assert_eq!((index.ending(), index.file_name().to_str()), (Some("json"), Some("model.safetensors.index.json")));
        assert_eq!(index.sibling("b.st"), Location::Url("https://h/a/b.st?X-Sig=secret/x.y#z".into()));
        assert_eq!(Location::Url("http://me:secret@h/a".into()).to_string(), "http://");
        assert_eq!(Location::Url("HTTP://h/a?secret".into()).to_string(), "HTTP://h/a");
        assert_eq!(Location::Url("s3://b/what?.st".into()).to_string(), "s3://b/what?.st");
    }
}
