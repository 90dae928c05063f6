//! Letters that may not stand in an address as they are.

use std::fmt::Write as _;

/// The key as a path has it.
pub(in crate::store::remote) fn escaped(key: &str) -> String {
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
