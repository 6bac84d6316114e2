//! The committed PTX is what its sources compile to: digests of both are checked in with it.
//!
//! `kernels-cuda/build --check` compiles again and compares; it needs Python, pip and a network. This test needs
//! nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

#[test]
fn ptx_and_sources_have_the_digests_that_the_build_wrote_down() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels-cuda");
    let sums = fs::read_to_string(home.join("ptx/SHA256SUMS")).expect("kernels-cuda/ptx/SHA256SUMS");
    let expected: BTreeMap<String, String> = sums
        .lines()
        .map(|line| line.split_once("  ").expect("digest, two spaces, file"))
        .map(|(digest, file)| (file.to_owned(), digest.to_owned()))
        .collect();
    let mut found = BTreeMap::new();
    for (folder, prefix) in [(home.clone(), ""), (home.join("ptx"), "ptx/")] {
        for entry in fs::read_dir(folder).expect("a folder of kernels-cuda") {
            let path = entry.expect("a file").path();
            let is_kernel = |e: &std::ffi::OsStr| ["cu", "cuh", "ptx"].iter().any(|known| e == *known);
            if !path.extension().is_some_and(is_kernel) {
                continue;
            }
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            let digest = Sha256::digest(fs::read(&path).expect("a readable file"));
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            found.insert(format!("{prefix}{name}"), digest);
        }
    }
    assert!(found.len() > 8, "four kernels, their headers and their PTX, not only {found:?}");
    assert_eq!(found, expected, "the PTX is older than its sources: run kernels-cuda/build");
}
