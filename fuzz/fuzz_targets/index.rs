#![no_main]
//! Any bytes as an index: no panic, bounded, and no file name that leads out of the folder.

use libfuzzer_sys::fuzz_target;
use std::path::{Component, Path};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(files) = penstock::format::index_files(bytes) {
        assert!(!files.is_empty());
        for file in files {
            assert!(!file.is_empty());
            assert!(Path::new(&file).components().all(|c| matches!(c, Component::Normal(_))), "{file:?} leads out of the folder");
        }
    }
});
