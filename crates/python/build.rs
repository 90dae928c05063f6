//! What `penstock --version` says of a build: the commit and the target.
//!
//! `PENSTOCK_COMMIT` gives the commit; `make wheel` and `make release` set it. Otherwise the file `COMMIT` does, which an
//! sdist has at its root. Otherwise it is unknown. git is not asked here: cargo would have to run this after each commit
//! and each change of any file, and link again.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-env-changed=PENSTOCK_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let file = root.join("COMMIT");
    if file.exists() {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    let said = env::var("PENSTOCK_COMMIT").ok();
    let commit = said.or_else(|| fs::read_to_string(&file).ok()).unwrap_or_default();
    let commit = match commit.trim() {
        "" => "unknown",
        known => known,
    };
    println!("cargo::rustc-env=PENSTOCK_BUILD_COMMIT={commit}");
    println!("cargo::rustc-env=PENSTOCK_BUILD_TARGET={}", env::var("TARGET").unwrap_or_default());
}
