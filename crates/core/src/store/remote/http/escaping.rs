//! Letters that may not stand in an address as they are.

use percent_encoding::{percent_decode_str, utf8_percent_encode, AsciiSet, CONTROLS, NON_ALPHANUMERIC};

/// Letters that a key does not have as they are, in a path.
const IN_KEYS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
/// The same of a whole target: controls, spaces, quotes.
const IN_TARGETS: &AsciiSet =
    &CONTROLS.add(b' ').add(b'"').add(b'<').add(b'>').add(b'\\').add(b'^').add(b'`').add(b'{').add(b'|').add(b'}');

/// The key as a path has it.
pub(in crate::store::remote) fn escaped(key: &str) -> String {
    utf8_percent_encode(key, IN_KEYS).to_string()
}

/// A target with `%XX` for forbidden characters (controls, spaces, quotes, other letters than ASCII's).
pub(super) fn escaped_target(target: &str) -> String {
    utf8_percent_encode(target, IN_TARGETS).to_string()
}

/// The bytes of a text in which `%XX` stands for some.
pub(in crate::store::remote) fn percent_decoded(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}
