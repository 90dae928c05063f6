//! Names of the cache's files: hashes, which tell nothing of the address.

use super::map::hex;
use ring::digest::{Context, SHA256};

/// The location of an object, or of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheKey {
    /// The hash of the realm and the address.
    pub(super) hash: [u8; 32],
    /// The address as people see it, without queries and credentials.
    pub(super) shown: String,
}

impl CacheKey {
    /// The key of an address in a realm, such as an endpoint. Only its hash is kept. `shown` is written into files and
    /// errors, without control characters.
    pub(crate) fn new(realm_and_address: &str, shown: &str) -> CacheKey {
        let shown = shown.chars().filter(|letter| !letter.is_control()).collect();
        CacheKey { hash: sha256(&[realm_and_address.as_bytes()]), shown }
    }

    /// The address as people see it.
    #[cfg(test)]
    pub(crate) fn shown(&self) -> &str {
        &self.shown
    }

    /// The name of the entry of a version of it.
    pub(crate) fn object_id(&self, version: &str, size: u64) -> String {
        object_id(&self.hash, version, size)
    }

    /// The name of its file in `names` and `lists`.
    pub(super) fn name(&self) -> String {
        hex(&self.hash)
    }
}

/// The SHA-256 of parts, one behind the other.
fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    parts.iter().for_each(|part| context.update(part));
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

/// The name of an object's files: 32 letters of the SHA-256 of key, version and size.
pub(super) fn object_id(key: &[u8; 32], version: &str, size: u64) -> String {
    hex(&sha256(&[key, &size.to_le_bytes(), version.as_bytes()])[..16])
}

/// True if this may be the name of an object's files.
pub(super) fn is_object_id(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|letter| matches!(letter, b'0'..=b'9' | b'a'..=b'f'))
}

/// A number of 62 bits that follows from the hexadecimal name.
pub(super) fn lock_byte(name: &str) -> u64 {
    u64::from_str_radix(name.get(..16).unwrap_or_default(), 16).unwrap_or_default() >> 2
}
