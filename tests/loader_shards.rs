//! Adapters in several safetensors files: index and shards must agree on every tensor.

mod loader_support;

use std::fs;
use std::path::Path;

use loader_support::{Files, assert_refused, notice_codes};
use lorapool::adapter::{Code, load};
use serde_json::{Value, json};

const INDEX: &str = "adapter_model.safetensors.index.json";
const SHARDS: [&str; 2] = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"];

fn whole() -> Files {
    (0..3).fold(Files::lora(2), |f, layer| f.pair(&format!("model.layers.{layer}.self_attn.q_proj"), 2, 8, 6))
}

/// Writes the adapter in two shards, a pair split between them, with the index that transformers writes.
fn write(dir: &Path) -> Value {
    let whole = whole();
    whole.write(dir);
    fs::remove_file(dir.join("adapter_model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    let (first, second) = whole.tensors.split_at(3);
    for (shard, tensors) in SHARDS.into_iter().zip([first, second]) {
        let part = Files { config: json!({}), tensors: tensors.to_vec() };
        fs::write(dir.join(shard), part.bytes()).unwrap();
        map.extend(tensors.iter().map(|(name, ..)| (name.clone(), json!(shard))));
    }
    let index = json!({"metadata": {"total_size": 576}, "weight_map": map});
    fs::write(dir.join(INDEX), index.to_string()).unwrap();
    index
}

#[test]
fn an_adapter_in_shards_answers_as_the_same_one_in_one_file() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let adapter = load(dir.path(), None).unwrap();
    assert_eq!(adapter.digest, whole().load(None).unwrap().digest);
    assert_eq!((adapter.pairs.len(), adapter.tensors_applied(), adapter.tensors.len()), (3, 6, 6));
    assert!(adapter.notices.is_empty());
    // In a sub-folder too.
    let outer = tempfile::tempdir().unwrap();
    write(&outer.path().join("named"));
    assert_eq!(notice_codes(&load(outer.path(), None).unwrap()), ["N_SUBFOLDER"]);
}

#[test]
fn index_and_shards_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let case = |edit: &dyn Fn(&mut Value, &Path), code: Code, named: &[&str]| {
        let mut index = write(dir.path());
        edit(&mut index, dir.path());
        fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        assert_refused(load(dir.path(), None), code, named);
    };
    let key =
        |layer: usize, side: &str| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.{side}.weight");
    let (first, last) = (key(0, "lora_A"), key(2, "lora_B"));
    case(&|_, dir| fs::remove_file(dir.join(SHARDS[1])).unwrap(), Code::ShardMissing, &[SHARDS[1], INDEX, "3 tensors"]);
    case(&|index, _| index["weight_map"]["none.such"] = json!(SHARDS[0]), Code::ShardTensor, &["none.such", SHARDS[0]]);
    case(
        &|index, _| _ = index["weight_map"].as_object_mut().unwrap().remove(&first),
        Code::ShardTensor,
        &[&first, SHARDS[0]],
    );
    case(&|index, _| index["weight_map"][&last] = json!(SHARDS[0]), Code::ShardTensor, &[&last, SHARDS[0]]);
    let doubled = |_: &mut Value, dir: &Path| {
        let both = Files { config: json!({}), tensors: whole().tensors[2..].to_vec() };
        fs::write(dir.join(SHARDS[1]), both.bytes()).unwrap();
    };
    case(&doubled, Code::FileDuplicate, &[&key(1, "lora_A"), SHARDS[0], SHARDS[1]]);
    for shard in ["../x.safetensors", "a/b.safetensors", "x.bin", "/etc/passwd", ""] {
        case(&|index, _| index["weight_map"][&last] = json!(shard), Code::ShardIndex, &[&last, INDEX]);
    }
    case(&|index, _| index["weight_map"] = json!([1]), Code::ShardIndex, &["weight_map"]);
    case(&|index, _| *index = json!({"weight_map": {}}), Code::NoTensors, &[INDEX]);
    // A damaged shard is named.
    let cut = |_: &mut Value, dir: &Path| {
        let bytes = fs::read(dir.join(SHARDS[1])).unwrap();
        fs::write(dir.join(SHARDS[1]), &bytes[..bytes.len() - 4]).unwrap();
    };
    case(&cut, Code::FileTruncated, &[SHARDS[1]]);
}

#[test]
fn one_file_beside_an_index_of_others_is_ambiguous_and_shards_without_index_are_named() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    fs::write(dir.path().join("adapter_model.safetensors"), whole().bytes()).unwrap();
    assert_refused(load(dir.path(), None), Code::ShardIndex, &["ambiguous", INDEX]);
    // An index that names just that file is none of several.
    let names: Value =
        whole().tensors.iter().map(|(name, ..)| (name.clone(), json!("adapter_model.safetensors"))).collect();
    fs::write(dir.path().join(INDEX), json!({"weight_map": names}).to_string()).unwrap();
    assert!(load(dir.path(), None).is_ok());
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    fs::remove_file(dir.path().join(INDEX)).unwrap();
    assert_refused(load(dir.path(), None), Code::ShardIndex, &[SHARDS[0], INDEX]);
    // An index of pickles is told what every pickle is told.
    fs::write(dir.path().join("adapter_model.bin.index.json"), "{}").unwrap();
    assert_refused(load(dir.path(), None), Code::WeightsPickle, &["adapter_model.bin.index.json"]);
}
