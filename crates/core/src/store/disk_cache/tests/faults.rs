//! Losses of power, full disks, and files with other bytes than they should have.

use super::*;
use crate::store::disk_cache::map::{boot_tag, slots, MapHeader, Slot};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::FileExt;

/// Makes each slot of a map another one.
fn change_slots(map: &Path, change: impl Fn(u32, Slot) -> [u8; 8]) {
    let mut bytes = fs::read(map).unwrap();
    let (_, start) = MapHeader::parse(&bytes).unwrap();
    let old: Vec<_> = slots(&bytes[start as usize..], boot_tag()).collect();
    for (number, slot) in (0..).zip(old) {
        let at = start as usize + 8 * number as usize;
        bytes[at..at + 8].copy_from_slice(&change(number, slot));
    }
    fs::write(map, bytes).unwrap();
}

/// The machine starts again: slots of this boot are those of another one.
fn lose_power(map: &Path) {
    change_slots(map, |_, slot| slot.encode(boot_tag() ^ 0x55));
}

#[test]
fn after_a_loss_of_power_the_synced_blocks_are_there_and_no_others() {
    let (_folder, cache) = cache();
    let size = 6 * BLOCK - 5;
    let entry = cache.find_or_make(&key("model"), "v", size).unwrap();
    for number in [0, 3] {
        entry.write(number, &block(&entry, number)).unwrap();
    }
    assert_eq!(entry.sync().unwrap(), 2);
    entry.write(1, &block(&entry, 1)).unwrap();
    entry.claim(2).unwrap();
    let map = map_of(&entry);
    drop(entry);
    lose_power(&map);
    let entry = cache.find(&key("model"), "v", size).unwrap().unwrap();
    let there: Vec<_> = (0..6).filter(|block| entry.state(*block).unwrap() == BlockState::There).collect();
    assert_eq!((there, check(&entry)), (vec![0, 3], 2));
    assert_eq!(entry.sync().unwrap(), 0, "a write of another boot is not synced");
    fill(&entry);
    assert_eq!((entry.sync().unwrap(), check(&entry)), (4, 6));
}

#[test]
fn a_map_whose_tail_is_zero_or_gone_has_the_blocks_before_it() {
    let (_folder, cache) = cache();
    let entry = cache.find_or_make(&key("model"), "v", 5 * BLOCK).unwrap();
    fill(&entry);
    entry.sync().unwrap();
    let map = map_of(&entry);
    change_slots(&map, |number, slot| if number < 2 { slot.encode(boot_tag()) } else { [0; 8] });
    assert_eq!((entry.there().unwrap().as_slice(), check(&entry)), (std::slice::from_ref(&(0..2 * BLOCK)), 2));
    // One that gets shorter while it is open.
    fs::File::options().write(true).open(&map).unwrap().set_len(4096 + 8).unwrap();
    assert_eq!(entry.there().unwrap(), std::slice::from_ref(&(0..BLOCK)));
    drop(entry);
    // When it is opened, it is not whole, and made anew.
    assert!(cache.find(&key("model"), "v", 5 * BLOCK).unwrap().is_none());
    let entry = cache.find_or_make(&key("model"), "v", 5 * BLOCK).unwrap();
    assert_eq!(check(&entry), 0);
}

#[test]
fn files_that_are_not_whole_are_made_anew_unless_they_are_open() {
    type Harm = fn(&Path, &Path);
    let harms: [(&str, Harm); 7] = [
        ("no data", |data, _| fs::remove_file(data).unwrap()),
        ("no map", |_, map| fs::remove_file(map).unwrap()),
        ("an empty map", |_, map| fs::write(map, b"").unwrap()),
        ("a map of zeros", |_, map| fs::write(map, [0; 4096 + 24]).unwrap()),
        ("data that was cut", |data, _| fs::File::options().write(true).open(data).unwrap().set_len(5).unwrap()),
        ("data that grew", |data, _| fs::File::options().write(true).open(data).unwrap().set_len(1 << 30).unwrap()),
        ("a leftover", |_, map| fs::write(format!("{}.part", map.display()), b"half").unwrap()),
    ];
    for (harm, inflict) in harms {
        let (_folder, cache) = cache();
        let find = || cache.find(&key("model"), "v", 3 * BLOCK).unwrap();
        let entry = cache.find_or_make(&key("model"), "v", 3 * BLOCK).unwrap();
        fill(&entry);
        let (data, map) = (entry.data_path().to_owned(), map_of(&entry));
        inflict(&data, &map);
        if !matches!(harm, "a leftover" | "no map") {
            assert!(find().is_none(), "{harm}");
            let refused = cache.find_or_make(&key("model"), "v", 3 * BLOCK).unwrap_err();
            assert!(refused.to_string().contains("has it open"), "{harm}: {refused}");
        }
        drop(entry);
        assert_eq!(find().is_some(), harm == "a leftover", "{harm}");
        let entry = cache.find_or_make(&key("model"), "v", 3 * BLOCK).unwrap();
        assert_eq!(check(&entry), if harm == "a leftover" { 3 } else { 0 }, "{harm}");
        fill(&entry);
        assert_eq!(check(&entry), 3, "{harm}");
        drop(entry);
        inflict(&data, &map);
        cache.prune(&Prune::OlderThan(std::time::Duration::from_secs(3600)), false).unwrap();
        let left = files(&cache.path().join("objects")).len();
        assert_eq!(left, if harm == "a leftover" { 2 } else { 0 }, "{harm}: leftovers are removed");
    }
}

#[test]
fn a_map_of_another_object_is_not_taken() {
    let (_folder, cache) = cache();
    let right = cache.find_or_make(&key("model"), "v1", 3 * BLOCK).unwrap();
    let other_version = cache.find_or_make(&key("model"), "v2", 3 * BLOCK).unwrap();
    let other_size = cache.find_or_make(&key("model"), "v1", 2 * BLOCK).unwrap();
    let other_key = cache.find_or_make(&key("other"), "v1", 3 * BLOCK).unwrap();
    let paths = (map_of(&right), right.data_path().to_owned());
    drop(right);
    for other in [other_version, other_size, other_key] {
        fill(&other);
        fs::copy(map_of(&other), &paths.0).unwrap();
        fs::copy(other.data_path(), &paths.1).unwrap();
        assert!(cache.find(&key("model"), "v1", 3 * BLOCK).unwrap().is_none());
        let made = cache.find_or_make(&key("model"), "v1", 3 * BLOCK).unwrap();
        assert_eq!(check(&made), 0);
    }
}

/// A file system of so many bytes, mounted until it is dropped; `None`: this process may not mount.
pub(super) struct Mounted(TempDir);

impl Mounted {
    pub(super) fn path(&self) -> PathBuf {
        self.0.path().join("cache")
    }

    pub(super) fn new(kind: &str, options: &str) -> Option<Mounted> {
        let folder = tempfile::tempdir().unwrap();
        let done =
            std::process::Command::new("mount").args(["-t", kind, "-o", options, kind]).arg(folder.path()).output();
        if done.is_ok_and(|done| done.status.success()) {
            return Some(Mounted(folder));
        }
        println!("skipped: cannot mount {kind}");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        std::process::Command::new("umount").arg("-l").arg(self.0.path()).status().unwrap();
    }
}

#[test]
fn a_disk_that_is_full_at_any_byte_leaves_whole_blocks_and_missing_ones() {
    for pages in (200..1400).step_by(171) {
        let Some(disk) = Mounted::new("tmpfs", &format!("size={}", pages * 4096)) else { return };
        let cache = CacheFolder::open(&settings(&disk.path())).unwrap();
        let entry = match cache.find_or_make(&key("model"), "v", 8 * BLOCK) {
            Ok(entry) => entry,
            Err(e) => panic!("{pages} pages: {e}"),
        };
        let mut whole = 0;
        let failed = (0..8).find_map(|number| match entry.write(number, &block(&entry, number)) {
            Ok(()) => {
                whole += 1;
                None
            }
            Err(e) => Some((number, e)),
        });
        let (number, e) = failed.expect("the disk is smaller than the object");
        assert_eq!((e.kind(), e.path()), (ErrorKind::NoSpace, Some(entry.data_path())), "{e}");
        assert_eq!(entry.state(number).unwrap(), BlockState::Missing);
        assert_eq!((check(&entry), entry.sync().unwrap()), (whole, u64::from(whole)));
        // What has no room is not evicted from under the one who writes it.
        assert!(!cache.make_room(8 * BLOCK).unwrap());
        drop(entry);
        assert!(cache.make_room(u64::from(whole.max(1)) * BLOCK / 2).unwrap());
        assert!(cache.entries().unwrap().is_empty());
    }
}

#[test]
fn a_disk_that_has_no_room_for_the_files_is_an_error_and_leaves_none() {
    let Some(disk) = Mounted::new("tmpfs", "size=64k,nr_inodes=12") else { return };
    let cache = CacheFolder::open(&settings(&disk.path())).unwrap();
    // Its map has 64 KiB.
    let refused = cache.find_or_make(&key("model"), "v", 8192 * BLOCK).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    assert_eq!(files(&cache.path().join("objects")), [] as [PathBuf; 0]);
    let entries: Vec<_> = (0..9).map(|n| cache.find_or_make(&key(&n.to_string()), "v", 5)).collect();
    let failed = entries.iter().find_map(|entry| entry.as_ref().err()).expect("twelve files fill the disk");
    assert_eq!(failed.kind(), ErrorKind::NoSpace, "{failed}");
    assert!(files(&cache.path().join("objects")).iter().all(|file| !file.to_string_lossy().ends_with(".part")));
}

#[test]
fn a_real_file_system_that_fills_up_keeps_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    let made = std::process::Command::new("mkfs.ext4").arg("-q").arg(&image).status();
    if !made.is_ok_and(|status| status.success()) {
        return println!("skipped: no mkfs.ext4");
    }
    let place = folder.path().join("disk");
    fs::create_dir(&place).unwrap();
    let mounted = std::process::Command::new("mount").arg("-oloop").args([&image, &place]).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return println!("skipped: cannot mount an image");
    }
    let outcome = std::panic::catch_unwind(|| {
        // An ext4 of its own has `lost+found`, and belongs to root.
        let cache = CacheFolder::open(&settings(&place)).unwrap();
        let size = 64 * BLOCK;
        let entry = cache.find_or_make(&key("model"), "v", size).unwrap();
        let mut memory = vec![0u8; 2 * BLOCK as usize];
        let start = memory.as_ptr().align_offset(4096);
        let mut written = 0;
        for number in 0..64 {
            let offset = start + usize::from(number % 2 == 1);
            let bytes = &mut memory[offset..offset + BLOCK as usize];
            bytes.copy_from_slice(&block(&entry, number));
            match entry.write(number, bytes) {
                Ok(()) => written += 1,
                Err(e) => assert_eq!(e.kind(), ErrorKind::NoSpace, "{e}"),
            }
        }
        assert!((4..30).contains(&written), "{written}");
        assert_eq!((entry.sync().unwrap(), check(&entry)), (written, written as u32));
        drop(entry);
        std::process::Command::new("sync").status().unwrap();
        fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        let entry = cache.find(&key("model"), "v", size).unwrap().unwrap();
        assert_eq!(check(&entry), written as u32);
    });
    std::process::Command::new("umount").arg("-l").arg(&place).status().unwrap();
    outcome.unwrap();
}

/// A header with these texts.
fn header(address: String, version: String, size: u64) -> MapHeader {
    MapHeader { key: [9; 32], size, address, version, made: std::time::UNIX_EPOCH }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_header_is_read_as_it_was_written(address in ".{0,200}", version in ".{0,200}", size in 0..1u64 << 44) {
        let header = header(address, version, size);
        let bytes = header.encode().unwrap();
        prop_assert_eq!(MapHeader::parse(&bytes).unwrap(), (header, bytes.len() as u64));
    }

    #[test]
    fn a_header_with_another_byte_or_less_bytes_is_refused(at in 0usize..120, bit in 0u8..8, cut in 0usize..120) {
        let mut bytes = header("s3://bucket/a".to_owned(), "v".to_owned(), 3 << 20).encode().unwrap();
        let length = 64 + u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]) as usize;
        prop_assert!(MapHeader::parse(&bytes[..cut.min(length - 1)]).is_err());
        bytes[at.min(length - 1)] ^= 1 << bit;
        prop_assert!(MapHeader::parse(&bytes).is_err());
    }

    #[test]
    fn slots_are_what_they_were_and_no_others_in_another_boot(crc: u32, boot in 1u32.., later in 1u32..) {
        for slot in [Slot::Missing, Slot::Claimed(crc), Slot::GivenBack(crc), Slot::Written(crc), Slot::Synced(crc)] {
            prop_assert_eq!(Slot::decode(slot.encode(boot), boot), slot);
        }
        prop_assume!(boot != later);
        let before = Slot::decode(Slot::Written(crc).encode(boot), later);
        // These three numbers are never a boot's.
        let is_tag = |tag: Slot| Slot::Written(0).encode(boot) == tag.encode(boot);
        prop_assume!(!is_tag(Slot::Synced(0)) && !is_tag(Slot::Claimed(0)) && !is_tag(Slot::GivenBack(0)));
        prop_assert_eq!(before, Slot::Missing);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn garbage_in_any_file_is_no_panic_and_no_block_with_other_bytes(
        seed in prop::collection::vec(any::<u8>(), 0..200),
        which in 0usize..5,
        at in 0u64..9000,
    ) {
        let (_folder, cache) = cache();
        let size = BLOCK + 7;
        let entry = cache.find_or_make(&key("model"), "v", size).unwrap();
        fill(&entry);
        entry.sync().unwrap();
        cache.note(&key("model"), "v", size).unwrap();
        cache.note_list(&key("model"), &["a".to_owned()]).unwrap();
        drop(entry);
        let mut found = files(cache.path());
        found.sort();
        let harmed = fs::File::options().write(true).open(&found[which]).unwrap();
        // At its begin, and anywhere.
        if at % 2 == 0 {
            harmed.set_len(0).unwrap();
            harmed.write_all_at(&seed, 0).unwrap();
        } else {
            harmed.write_all_at(&seed, at).unwrap();
        }
        let (known, listed) = (cache.known(&key("model")), cache.list(&key("model")));
        prop_assert!(known.is_ok() && listed.is_ok());
        if let Some(entry) = cache.find(&key("model"), "v", size).unwrap() {
            for number in 0..2 {
                if entry.verify(number).unwrap() && entry.state(number).unwrap() == BlockState::There {
                    let range = entry.range(number);
                    let mut read = vec![0; (range.end - range.start) as usize];
                    entry.read(range, &mut read).unwrap();
                    prop_assert!(read == block(&entry, number));
                }
            }
        }
        cache.entries().unwrap();
        cache.prune(&Prune::ToSize(0), false).unwrap();
        let again = CacheFolder::open(&settings(cache.path()));
        prop_assert_eq!(again.is_ok(), cache.path().join("penstock-disk-cache") != found[which] || seed.is_empty() && at % 2 == 1);
        let entry = cache.find_or_make(&key("model"), "v", size).unwrap();
        prop_assert!(check(&entry) <= 2);
    }
}
