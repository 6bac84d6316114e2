//! `lorapool convert`

#[path = "../loader_support/mod.rs"]
mod loader_support;

use std::fs;

use crate::{fixture, lorapool};

#[test]
fn a_pickled_adapter_is_written_as_safetensors_and_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new/adapter");
    let ran = lorapool(["convert", &fixture("d_bin_only"), out.to_str().unwrap(), "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{ran:?}");
    let document = ran.json();
    assert_eq!((&document["verdict"], &document["tensors"]), (&"accept".into(), &8.into()), "{document}");
    assert_eq!(
        fs::read(out.join("adapter_config.json")).unwrap(),
        fs::read(format!("{}/adapter_config.json", fixture("d_bin_only"))).unwrap()
    );
    let digest = |path: &str| lorapool(["audit", path, "--json"]).json()["digest"].as_str().unwrap().to_owned();
    assert_eq!(digest(out.to_str().unwrap()), digest(&fixture("05_r1")));
    assert_eq!(fs::read_dir(dir.path().join("new")).unwrap().count(), 1, "nothing else is left");
    let mode = |path: &str| fs::metadata(path).unwrap().permissions();
    let written = out.join("adapter_model.safetensors");
    assert_eq!(mode(written.to_str().unwrap()), mode(&format!("{}/adapter_model.bin", fixture("d_bin_only"))));
    // Not a second time into the same place, nor from what has safetensors.
    let again = lorapool(["convert", &fixture("d_bin_only"), out.to_str().unwrap(), "--json"]);
    again.fails(1, "E_INPUT", &["already there"]);
    let other = dir.path().join("other");
    lorapool(["convert", &fixture("05_r1"), other.to_str().unwrap(), "--json"]).fails(1, "E_INPUT", &["nothing"]);
    assert!(!other.exists());
}

#[test]
fn a_hostile_pickle_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir(&from).unwrap();
    fs::copy(format!("{}/adapter_config.json", fixture("d_bin_only")), from.join("adapter_config.json")).unwrap();
    fs::write(from.join("adapter_model.bin"), b"cos\nsystem\n(S'true'\ntR.").unwrap();
    let out = dir.path().join("out");
    let ran = lorapool(["convert", from.to_str().unwrap(), out.to_str().unwrap(), "--json"]);
    ran.fails(1, "E_PICKLE_ARCHIVE", &["adapter_model.bin"]);
    assert!(!out.exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    lorapool(["convert", &fixture("d_weights_missing"), out.to_str().unwrap(), "--json"]).fails(
        1,
        "E_WEIGHTS_MISSING",
        &[],
    );
}

#[test]
fn a_gguf_adapter_is_written_as_safetensors_against_its_base() {
    use loader_support::{fixture_files, gguf::Gguf};
    let dir = tempfile::tempdir().unwrap();
    let (file, out, base) = (dir.path().join("a.gguf"), dir.path().join("out"), fixture("_base/llama"));
    fs::write(&file, Gguf::converted(&fixture_files("05_r1"), "llama", Some([4, 2])).bytes()).unwrap();
    let (from, to) = (file.to_str().unwrap(), out.to_str().unwrap());
    lorapool(["convert", from, to, "--json"]).fails(1, "E_WEIGHTS_GGUF", &["a.gguf", "base"]);
    assert!(!out.exists());
    let ran = lorapool(["convert", from, to, "--base", &base, "--json"]);
    assert_eq!((ran.code, &ran.json()["verdict"]), (0, &"accept".into()), "{ran:?}");
    let digest = |path: &str| lorapool(["audit", path, "--base", &base, "--json"]).json()["digest"].clone();
    assert_eq!(digest(to), digest(&fixture("05_r1")));
    assert_eq!(digest(from), digest(to));
}
