//! Lines on standard error: errors, and requests if they are wanted.

use std::fmt::Arguments;
use std::io::{stderr, Write};

/// Writes a line in one piece, so that lines of two threads do not mix.
pub(crate) fn line(text: Arguments<'_>) {
    let _ = stderr().write_all(format!("penstock serve: {text}\n").as_bytes());
}
