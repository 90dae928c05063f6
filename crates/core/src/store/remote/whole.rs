//! Whether a body that ended with its connection is the whole object: what its bytes say. Where a connection ends, something
//! may be missing.

use crate::error::{Error, ErrorKind};
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// Whether these bytes end where they say: a JSON document, or a safetensors file.
pub(super) fn is_whole(bytes: &[u8]) -> bool {
    is_document(bytes) || file_size(bytes) == Some(bytes.len() as u64)
}

/// Whether it is a JSON document that cannot go on.
fn is_document(bytes: &[u8]) -> bool {
    let first = bytes.iter().find(|b| !b.is_ascii_whitespace());
    matches!(first, Some(b'{' | b'[')) && serde_json::from_slice::<IgnoredAny>(bytes).is_ok()
}

/// The size of the file that begins with this header.
fn file_size(bytes: &[u8]) -> Option<u64> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = u64::from_le_bytes(*length);
    let header = rest.get(..usize::try_from(length).ok()?)?;
    let entries: Map<String, Value> = serde_json::from_slice(header).ok()?;
    let mut end = 0;
    for (name, entry) in &entries {
        if name != "__metadata__" {
            end = end.max(entry.get("data_offsets")?.get(1)?.as_u64()?);
        }
    }
    (8 + length).checked_add(end)
}

/// The error of a body that may not be whole. A body of 0 bytes may be none: a server refuses the first byte, and gives
/// no size.
pub(super) fn unknown_end(bytes: usize) -> Error {
    if bytes == 0 {
        let text = "the server gave neither bytes nor a size, so the object may be empty or not: use a server \
                    that gives sizes (Content-Range, Content-Length), or copy the file to a disk";
        return Error::new(ErrorKind::Io, text);
    }
    let text = format!(
        "the server gave no length (Content-Length), and closed the connection after {bytes} bytes, so bytes may be \
         missing: use a server that gives lengths, or copy the file to a disk"
    );
    Error::new(ErrorKind::Io, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_is_not_the_whole() {
        let header = br#"{"__metadata__":{"a":"b"},"t\n":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, b"12345"].concat();
        let empty = [&2u64.to_le_bytes()[..], b"{}"].concat();
        for whole in [&file[..], &empty, b" {\"a\": [1, 2]}\n", b"[]"] {
            assert!(is_whole(whole));
            for cut in 0..whole.trim_ascii_end().len() {
                assert!(!is_whole(&whole[..cut]), "{cut}");
            }
        }
        for text in ["", "12", "a,b", "null", "\"a\"", "{} {}"] {
            assert!(!is_whole(text.as_bytes()), "{text}");
        }
        assert!(!is_whole(&[&file[..], b"6"].concat()), "it is longer");
    }
}
