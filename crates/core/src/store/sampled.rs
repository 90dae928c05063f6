//! Whether two machines see the same bytes: a few pages of a file as one number.
//!
//! Sizes and headers do not tell two training steps of one model apart, and every machine has its own inodes. Reading every byte
//! would take as long as a load. A step changes nearly every weight, so a few pages tell.

use super::object::{Object, Store};
use super::version::Version;
use crate::error::Result;
use crate::sync::{lock, Mutex};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

/// Pages that are looked at, and bytes of each.
const PAGES: u64 = 64;
const BYTES: u64 = 4096;
/// Files at a time: each waits for its storage.
const AT_ONCE: usize = 16;

/// A number that is the same in every process and on every machine (FNV-1a, 64 bits).
#[derive(Debug, Clone)]
pub(crate) struct Stable(u64);

impl Default for Stable {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Stable {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The number of these bytes.
fn stable(bytes: &[u8]) -> u64 {
    let mut hasher = BuildHasherDefault::<Stable>::default().build_hasher();
    hasher.write(bytes);
    hasher.finish()
}

/// A hash of the versions of all files, by size and version, and whether it is the same on other machines.
pub(crate) fn identity<'a>(files: impl Iterator<Item = (u64, &'a Version)>) -> (u64, bool) {
    let (mut text, mut everywhere) = (String::new(), true);
    for (size, version) in files {
        match version {
            Version::Inode(i) => {
                text.push_str(&format!("{}:{}:{}:{};", i.dev, i.ino, i.size, i.mtime_ns));
                everywhere = false;
            }
            Version::Strong(tag) => text.push_str(&format!("{size}:{tag};")),
            Version::Weak(tag) => text.push_str(&format!("{size}:weak:{tag};")),
        }
    }
    (stable(text.as_bytes()), everywhere)
}

/// A file as it was opened, the store that has it, and where its data begin.
type Opened<'a> = (&'a dyn Store, Object, u64);

/// A number for each file: of what 64 pages of its tensors hold, or of the validator that its store has. Blocks.
///
/// # Errors
/// Errors of the file system.
pub(crate) fn samples<'a>(files: impl Iterator<Item = Opened<'a>>) -> Result<Vec<u64>> {
    let files: Vec<Opened<'a>> = files.collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![Ok(0); files.len()]));
    let work = || loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(file) = files.get(number) else { return };
        let sampled = sample(file);
        lock(&found)[number] = sampled;
    };
    std::thread::scope(|scope| {
        for _ in 1..files.len().min(AT_ONCE) {
            // Without threads this one does it all.
            if Builder::new().name("penstock-sample".to_owned()).spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    found.into_inner().unwrap_or_default().into_iter().collect()
}

fn sample((store, object, data_start): &Opened<'_>) -> Result<u64> {
    if let Version::Strong(tag) | Version::Weak(tag) = &object.version {
        return Ok(stable(tag.as_bytes()));
    }
    let span = object.size - data_start;
    let page = |number| {
        let from = data_start + span.saturating_sub(BYTES) * number / (PAGES - 1);
        from..from + BYTES.min(span)
    };
    Ok(stable(&store.read_parts(object, &(0..PAGES).map(page).collect::<Vec<_>>())?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{identity_of, local, Location};
    use super::*;

    #[test]
    fn files_of_one_size_are_told_apart_by_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let sampled = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let (identity, store) = (identity_of(&path).unwrap(), local());
            let (location, version) = (Location::Path(path), Version::Inode(identity));
            let object = Object { location, size: identity.size, version };
            samples(std::iter::once((&*store, object, 100))).unwrap()[0]
        };
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let mut other = bytes.clone();
        other.iter_mut().skip(100).for_each(|byte| *byte ^= 1);
        let mut header = bytes.clone();
        header[..100].fill(9);
        assert_eq!(sampled("a", &bytes), sampled("b", &bytes));
        assert_ne!(sampled("a", &bytes), sampled("c", &other));
        assert_eq!(sampled("a", &bytes), sampled("d", &header));
        for len in [100, 101, 4195, 4197] {
            sampled("short", &bytes[..len]);
        }
        // A change of the last byte alone is seen, and of the first one.
        for at in [100, bytes.len() - 1] {
            let mut one = bytes.clone();
            one[at] ^= 1;
            assert_ne!(sampled("a", &bytes), sampled("e", &one), "{at}");
        }
    }

    #[test]
    fn a_strong_validator_counts_everywhere_and_an_inode_on_one_machine() {
        let of = |version: &Version| identity(std::iter::once((8, version)));
        assert_eq!(of(&Version::Strong("x".into())), of(&Version::Strong("x".into())));
        assert_ne!(of(&Version::Strong("x".into())).0, of(&Version::Strong("y".into())).0);
        assert!(of(&Version::Strong("x".into())).1 && !of(&Version::of_bytes(8)).1);
        let store = local();
        let sampled = |version| {
            let object = Object { location: Location::Path("/nowhere".into()), size: 8, version };
            samples(std::iter::once((&*store, object, 8)))
        };
        assert_eq!(sampled(Version::Strong("x".into())).unwrap().len(), 1);
        assert!(sampled(Version::of_bytes(8)).is_err());
    }
}
