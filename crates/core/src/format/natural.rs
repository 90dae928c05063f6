//! Natural order of names.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Natural order: runs of digits compare as numbers, so that `model-2` comes before `model-10`. It is a total order:
/// names that differ only in leading zeros still differ.
pub(super) fn natural(a: &OsStr, b: &OsStr) -> Ordering {
    let (full_a, full_b) = (a.as_bytes(), b.as_bytes());
    let (mut a, mut b) = (full_a, full_b);
    loop {
        match (a.first(), b.first()) {
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let ((m, rest_a), (n, rest_b)) = (number(a), number(b));
                match m.len().cmp(&n.len()).then_with(|| m.cmp(n)) {
                    Ordering::Equal => (a, b) = (rest_a, rest_b),
                    unequal => return unequal,
                }
            }
            (Some(x), Some(y)) if x == y => (a, b) = (&a[1..], &b[1..]),
            (x, y) => return x.cmp(&y).then_with(|| full_a.cmp(full_b)),
        }
    }
}

/// The digits at the start without leading zeros, and the rest.
fn number(s: &[u8]) -> (&[u8], &[u8]) {
    let end = s.iter().position(|b| !b.is_ascii_digit()).unwrap_or(s.len());
    let zeros = s[..end].iter().take_while(|&&b| b == b'0').count();
    (&s[zeros..end], &s[end..])
}
