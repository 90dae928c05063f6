//! The network interfaces of this machine.

use crate::error::{Error, Result};
use std::ffi::CStr;

/// The names of those that there are.
fn names() -> Vec<String> {
    let mut names = Vec::new();
    // SAFETY: a list that ends with an index of 0, each name a text of C, until it is freed.
    unsafe {
        let first = libc::if_nameindex();
        let mut at = first;
        while !at.is_null() && (*at).if_index != 0 {
            names.push(CStr::from_ptr((*at).if_name).to_string_lossy().into_owned());
            at = at.add(1);
        }
        if !first.is_null() {
            libc::if_freenameindex(first);
        }
    }
    names
}

/// Whether this machine has all of these.
///
/// # Errors
/// `Invalid` if it does not. The error lists those that it has.
pub(in crate::store::remote) fn check_interfaces(wanted: &[String]) -> Result<()> {
    let there = names();
    match wanted.iter().find(|name| !there.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let text = format!("there is no network interface {name:?}; there are: {}", there.join(", "));
            Err(Error::invalid(text))
        }
    }
}
