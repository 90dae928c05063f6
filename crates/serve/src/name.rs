//! Names of objects, from paths of requests.

use std::fmt::Write;

/// Parts of a name, at most: deeper folders hold no checkpoints.
const DEEPEST: usize = 64;

/// The name of an object or a folder: parts without `/`, NUL, or a leading dot, and none is empty. So a name leads
/// neither out of the folder nor to hidden files. The name without parts is that of the folder that is served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Name {
    parts: Vec<Vec<u8>>,
    is_folder: bool,
}

/// The reason why a path is no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoName {
    /// It is malformed.
    Malformed,
    /// Nothing has such a name.
    Nothing,
}

impl Name {
    /// The name in the path of a request, without its query.
    pub(crate) fn parse(path: &[u8]) -> Result<Name, NoName> {
        let path = path.strip_prefix(b"/").ok_or(NoName::Malformed)?;
        let mut parts = path.split(|b| *b == b'/').map(decoded).collect::<Result<Vec<_>, _>>()?;
        let is_folder = parts.last().is_some_and(Vec::is_empty);
        if is_folder {
            parts.pop();
        }
        if parts.len() > DEEPEST || parts.iter().any(|part| part.is_empty() || part[0] == b'.') {
            return Err(NoName::Nothing);
        }
        Ok(Name { parts, is_folder })
    }

    /// Its parts.
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(Vec::as_slice)
    }

    /// True if it ends with a `/`.
    pub fn is_folder(&self) -> bool {
        self.is_folder
    }

    /// Its parts with `/` between them.
    pub fn joined(&self) -> Vec<u8> {
        self.parts.join(&b'/')
    }

    /// The path of its folder, as a request would spell it.
    pub(crate) fn folder_path(&self) -> String {
        self.parts().fold("/".to_owned(), |path, part| path + &escaped(part) + "/")
    }
}

/// A part of a path without its escapes.
fn decoded(part: &[u8]) -> Result<Vec<u8>, NoName> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut left = part.iter();
    while let Some(&byte) = left.next() {
        let byte = if byte == b'%' {
            let digit = |b: Option<&u8>| b.and_then(|b| char::from(*b).to_digit(16)).ok_or(NoName::Malformed);
            (digit(left.next())? << 4 | digit(left.next())?) as u8
        } else {
            byte
        };
        if matches!(byte, 0 | b'/') {
            return Err(NoName::Malformed);
        }
        bytes.push(byte);
    }
    Ok(bytes)
}

/// A part of a path with escapes: what stays as it is means nothing in a URL, in HTML or in a header.
pub(crate) fn escaped(part: &[u8]) -> String {
    part.iter().fold(String::new(), |mut text, byte| {
        match byte {
            b'-' | b'_' | b'.' | b'~' => text.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(*byte)),
            byte => drop(write!(text, "%{byte:02X}")),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(path: &str) -> Result<String, NoName> {
        Name::parse(path.as_bytes()).map(|n| String::from_utf8(n.joined()).unwrap())
    }

    #[test]
    fn a_path_is_a_name_below_the_folder() {
        assert_eq!(of("/model-1.safetensors").unwrap(), "model-1.safetensors");
        assert_eq!(of("/a/b%20c").unwrap(), "a/b c");
        assert_eq!(of("/").unwrap(), "");
        assert!(Name::parse(b"/a/").unwrap().is_folder() && Name::parse(b"/").unwrap().is_folder());
        assert!(!Name::parse(b"/a").unwrap().is_folder());
        assert_eq!(Name::parse(b"/a%22/b").unwrap().folder_path(), "/a%22/b/");
    }

    #[test]
    fn no_path_leads_out_or_to_hidden_files() {
        for path in ["/..", "/../x", "/a/../x", "/%2e%2e/x", "/.%2E", "/.git/config", "/a/.x", "//x", "/a//b", "/./a"] {
            assert_eq!(of(path), Err(NoName::Nothing), "{path}");
        }
        for path in ["", "x", "*", "/a%00b", "/a%2fb", "/%2F..%2f", "/%", "/%4", "/%zz", "/a%+1"] {
            assert_eq!(of(path), Err(NoName::Malformed), "{path}");
        }
        assert_eq!(of(&"/a".repeat(65)), Err(NoName::Nothing));
    }

    proptest! {
        #[test]
        fn a_name_is_escaped_and_read_again(part in "[^/\0.][^/\0]{0,20}") {
            prop_assert_eq!(of(&format!("/{}", escaped(part.as_bytes()))), Ok(part));
        }
    }
}
