//! Whether two machines see the same bytes: a few pages of a file as one number.
//!
//! Sizes and headers do not tell two training steps of one model apart, and every machine has its own inodes. Reading every byte
//! would take as long as a load. A step changes nearly every weight, so a few pages tell.

use super::location::Location;
use super::version::{Identity, Version};
use crate::error::{Error, Result};
use crate::sync::{lock, Mutex};
use std::fs::File;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::os::unix::fs::FileExt;
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

/// A file as it was opened.
pub(crate) type Opened<'a> = (&'a Location, u64, u64, &'a Version);

/// A hash of the versions of all files, and whether it is the same on other machines.
pub(crate) fn identity<'a>(files: impl Iterator<Item = Opened<'a>>) -> (u64, bool) {
    let (mut text, mut everywhere) = (String::new(), true);
    for (_, size, _, version) in files {
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

/// A number for each file: of what 64 pages of its tensors hold, or of the validator that its store has. Blocks.
///
/// # Errors
/// What the file system says.
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

fn sample(&(at, size, data_start, version): &Opened<'_>) -> Result<u64> {
    let opened = match version {
        Version::Strong(tag) | Version::Weak(tag) => return Ok(stable(tag.as_bytes())),
        Version::Inode(identity) => identity,
    };
    let path = at.as_path();
    let failed = |doing: &str, e: std::io::Error| Error::io(doing, &e).at(path);
    let file = File::open(path).map_err(|e| failed("open", e))?;
    // What is there by now is not what this rank has opened. Bytes that are nowhere have no inode.
    if opened.ino != 0 {
        let now = Identity::of(&file).map_err(|e| failed("ask for the size of", e))?;
        opened.check(&now).map_err(|e| e.at(path))?;
    }
    let (span, mut pages) = (size - data_start, Vec::with_capacity((PAGES * BYTES) as usize));
    for page in 0..PAGES {
        let from = data_start + span.saturating_sub(BYTES) * page / (PAGES - 1);
        let start = pages.len();
        pages.resize(start + BYTES.min(span) as usize, 0);
        file.read_exact_at(&mut pages[start..], from).map_err(|e| failed("read", e))?;
    }
    Ok(stable(&pages))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_size_are_told_apart_by_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let sampled = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let at = Location::Path(path.clone());
            samples([(&at, bytes.len() as u64, 100, &Version::of_bytes(bytes.len() as u64))].into_iter()).unwrap()[0]
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
        let at = Location::Path("/nowhere".into());
        let of = |version: &Version| identity([(&at, 8, 8, version)].into_iter());
        assert_eq!(of(&Version::Strong("x".into())), of(&Version::Strong("x".into())));
        assert_ne!(of(&Version::Strong("x".into())).0, of(&Version::Strong("y".into())).0);
        assert!(of(&Version::Strong("x".into())).1 && !of(&Version::of_bytes(8)).1);
        assert_eq!(samples([(&at, 8, 8, &Version::Strong("x".into()))].into_iter()).unwrap().len(), 1);
        assert!(samples([(&at, 8, 8, &Version::of_bytes(8))].into_iter()).is_err());
    }
}
