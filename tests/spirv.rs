//! The committed SPIR-V is what its sources compile to, and is valid.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use lorapool::contract::Kernel;
use sha2::{Digest, Sha256};

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels-spirv")
}

fn digest(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the tool is installed; prints that a check is left out when it isn't.
fn installed(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        println!("skipped: {tool} is not installed");
    }
    found
}

/// Needs no tool, so that an edited source without a rebuild fails everywhere.
#[test]
fn the_modules_were_built_from_the_sources_that_are_here() {
    let list = std::fs::read_to_string(kernels().join("SOURCES.sha256")).unwrap();
    let noted: BTreeMap<String, String> = list
        .lines()
        .map(|line| line.split_once("  ").unwrap_or_else(|| panic!("SOURCES.sha256: unexpected line {line:?}")))
        .map(|(digest, name)| (name.to_owned(), digest.to_owned()))
        .collect();
    let here: BTreeMap<String, String> = std::fs::read_dir(kernels())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "comp" || e == "glsl" || e == "spv"))
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), digest(&path)))
        .collect();
    assert_eq!(here, noted, "run kernels-spirv/build and commit what it writes");
    for kernel in Kernel::ALL {
        assert!(here.contains_key(&format!("{}.spv", kernel.name())), "{} has no module", kernel.name());
    }
}

#[test]
fn the_same_compiler_makes_the_same_bytes() {
    if !installed("glslangValidator") {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    for kernel in Kernel::ALL {
        let committed = std::fs::read(kernels().join(format!("{}.spv", kernel.name()))).unwrap();
        let fresh = out.path().join("fresh.spv");
        let run = Command::new("glslangValidator")
            .args(["-V", "--target-env", "vulkan1.2", "-o"])
            .arg(&fresh)
            .arg(format!("{}.comp", kernel.name()))
            .current_dir(kernels())
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
        let fresh = std::fs::read(&fresh).unwrap();
        // Word 2 of a module names the compiler and its version; another one may choose other instructions.
        if fresh[8..12] != committed[8..12] {
            println!("skipped: the modules were made by another version of glslang");
            return;
        }
        assert!(fresh == committed, "{}.spv is older than its source: run kernels-spirv/build", kernel.name());
    }
}

#[test]
fn the_modules_are_valid() {
    if !installed("spirv-val") {
        return;
    }
    for kernel in Kernel::ALL {
        let module = kernels().join(format!("{}.spv", kernel.name()));
        let run = Command::new("spirv-val").args(["--target-env", "vulkan1.2"]).arg(&module).output().unwrap();
        assert!(run.status.success(), "{}: {}", kernel.name(), String::from_utf8_lossy(&run.stderr));
    }
}

/// Software drivers crash on a capability that they lack instead of refusing it.
#[test]
fn the_modules_need_no_capability_beyond_buffer_addresses() {
    const OP_CAPABILITY: u32 = 17;
    const SHADER: u32 = 1;
    const PHYSICAL_STORAGE_BUFFER_ADDRESSES: u32 = 5347;
    for kernel in Kernel::ALL {
        let bytes = std::fs::read(kernels().join(format!("{}.spv", kernel.name()))).unwrap();
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let mut at = 5;
        let mut found = Vec::new();
        while at < words.len() {
            if words[at] & 0xffff == OP_CAPABILITY {
                found.push(words[at + 1]);
            }
            at += (words[at] >> 16).max(1) as usize;
        }
        assert_eq!(found, [SHADER, PHYSICAL_STORAGE_BUFFER_ADDRESSES], "{}", kernel.name());
    }
}
