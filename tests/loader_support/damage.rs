//! Damage to an adapter's files, as dice choose it.

use rand::{Rng, RngExt};
use serde_json::{Map, Value, json};

use super::file_bytes;
use super::gguf::Gguf;
use super::mutate::{SHARDS, WEIGHTS};

fn pick<'a, T>(dice: &mut impl Rng, from: &'a [T]) -> &'a T {
    &from[dice.random_range(0..from.len())]
}

/// Replaces, inserts or removes a few bytes, or cuts the end.
pub fn bytes(bytes: &mut Vec<u8>, dice: &mut impl Rng) {
    if bytes.is_empty() {
        return;
    }
    let at = dice.random_range(0..bytes.len());
    match dice.random_range(0..5) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, dice.random()),
        2 => _ = bytes.remove(at),
        3 => bytes[at] = dice.random(),
        _ => bytes[at] ^= 1 << dice.random_range(0..8),
    }
}

/// A number that a header or config should not have.
fn odd_number(dice: &mut impl Rng) -> Value {
    let numbers = [
        json!(0),
        json!(-1),
        json!(1),
        json!(2),
        json!(48),
        json!(1u64 << 31),
        json!(1u64 << 32),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.5),
        json!(1.0),
        json!(1e300),
        json!("8"),
        json!(null),
        json!(true),
        json!([]),
        json!({}),
    ];
    pick(dice, &numbers).clone()
}

/// Changes one field of one tensor's entry, a key, or the header's length.
pub fn header(file: &[u8], dice: &mut impl Rng) -> Vec<u8> {
    let parts = file
        .split_first_chunk::<8>()
        .and_then(|(len, rest)| rest.split_at_checked(u64::from_le_bytes(*len).min(1 << 20) as usize));
    let Some((text, data)) = parts else { return file.to_vec() };
    let Ok(mut header) = serde_json::from_slice::<Map<String, Value>>(text) else { return file.to_vec() };
    let keys: Vec<String> = header.iter().filter(|(_, entry)| entry.is_object()).map(|(key, _)| key.clone()).collect();
    if keys.is_empty() {
        return file.to_vec();
    }
    let (key, other) = (pick(dice, &keys), pick(dice, &keys));
    match dice.random_range(0..11usize) {
        0 => {
            let dtypes = ["F32", "F16", "BF16", "F64", "F8_E4M3", "I64", "BOOL", "F4", "f32", "", "X"];
            header[key]["dtype"] = json!(pick(dice, &dtypes));
        }
        choice @ (1 | 2) => {
            let field = ["shape", "data_offsets"][choice - 1];
            let index = dice.random_range(0..2usize);
            if let Some(number) = header[key].get_mut(field).and_then(|list| list.get_mut(index)) {
                *number = odd_number(dice);
            }
        }
        3 => {
            let shapes =
                [json!([]), json!([0]), json!([1, 1, 1]), json!([1, 1, 1, 1]), json!([48]), json!(null), json!("x")];
            header[key]["shape"] = pick(dice, &shapes).clone();
        }
        4 => {
            if let Some(entry) = header.remove(key) {
                header.insert(other_name(key, dice), entry);
            }
        }
        5 => header[key] = header[other].clone(),
        6 => _ = header.remove(key),
        7 => header[key][*pick(dice, &["dtype", "shape", "data_offsets", "extra"])] = odd_number(dice),
        8 => {
            // The key once more, as JSON objects in memory can't have it.
            let text = String::from_utf8_lossy(text).replacen('{', &format!("{{{key:?}:{},", header[other]), 1);
            return file_bytes(text.as_bytes(), data);
        }
        9 => {
            // Whole modules under other paths.
            let moves = [
                ("layers.0", "layers.9"),
                ("q_proj", "qkv_proj"),
                ("q_proj", "query_key_value"),
                ("q_proj", "q_lin"),
                ("model.layers", "model.language_model.layers"),
                ("base_model.model.", ""),
                ("self_attn.q_proj", "mlp.down_proj"),
                ("lora_A", "lora_C"),
                ("lora_A", "lora_B"),
                ("weight", "default.weight"),
                ("self_attn.q_proj", "mlp.experts"),
            ];
            let (from, to) = pick(dice, &moves);
            return file_bytes(String::from_utf8_lossy(text).replace(from, to).as_bytes(), data);
        }
        _ => {
            let mut bytes = file.to_vec();
            let lens = [0, 1, (text.len() as u64).wrapping_sub(1), text.len() as u64 + 1, 1 << 20, 1 << 40, u64::MAX];
            bytes[..8].copy_from_slice(&pick(dice, &lens).to_le_bytes());
            return bytes;
        }
    }
    file_bytes(&serde_json::to_vec(&header).unwrap(), data)
}

/// A tensor's key as another part, module, or method would have it.
fn other_name(key: &str, dice: &mut impl Rng) -> String {
    let names = [
        key.replace("lora_A", "lora_B"),
        key.replace("weight", "bias"),
        key.replace("base_model.", ""),
        key.replace("q_proj", "qkv_proj"),
        key.replace("q_proj", "query_key_value"),
        key.replace("layers.0", "layers.9"),
        key.replace('.', ""),
        key.replace("lora_A.weight", "lora_magnitude_vector"),
        key.replace(".weight", ".default.weight"),
        key.replace("self_attn.", "self_attn.\u{0}\u{202e}"),
        key.replace("lora_A.weight", "alpha"),
        key.replace("lora_A.weight", "lora_embedding_A"),
        "é".repeat(300),
        String::new(),
        ".".repeat(40),
        key.replace("layers.0", "layers.99999999999999999999"),
        key.replace("mlp", "experts"),
        key.replace("self_attn", "mlp.experts.3"),
    ];
    pick(dice, &names).clone()
}

/// Changes one field of a config.
pub fn config(bytes: &[u8], dice: &mut impl Rng) -> Vec<u8> {
    let Ok(mut config) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return bytes.to_vec() };
    let fields: Vec<String> = config.keys().cloned().collect();
    if fields.is_empty() {
        return bytes.to_vec();
    }
    let field = pick(dice, &fields);
    match dice.random_range(0..7) {
        0 => config[field] = odd_number(dice),
        1 => _ = config.remove(field),
        2 => {
            let pattern = pick(dice, &["(", "(?=", "q_proj|", "(a|a)*$", "^", "\\", "[", "(?<x>", ".*.*.*.*x"]);
            config.insert(
                (*pick(dice, &["rank_pattern", "alpha_pattern"])).into(),
                json!({ *pattern: odd_number(dice) }),
            );
        }
        3 => {
            let targets =
                [json!("("), json!(".*"), json!([1]), json!("all-linear"), json!({"a": 1}), json!(["q_proj", null])];
            config.insert("target_modules".into(), pick(dice, &targets).clone());
        }
        4 => _ = config.insert("unheard_of".into(), odd_number(dice)),
        5 => {
            let name =
                *pick(dice, &["use_dora", "lora_bias", "bias", "modules_to_save", "layers_to_transform", "use_rslora"]);
            _ = config.insert(name.into(), odd_number(dice));
        }
        _ => {
            let text = String::from_utf8_lossy(bytes).replacen('{', &format!("{{{field:?}: {},", odd_number(dice)), 1);
            return text.into_bytes();
        }
    }
    serde_json::to_vec(&config).unwrap()
}

/// Changes one entry of an index.
pub fn index(bytes: &[u8], dice: &mut impl Rng) -> Vec<u8> {
    let Ok(mut index) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
    let keys: Vec<String> = index["weight_map"].as_object().map_or(Vec::new(), |map| map.keys().cloned().collect());
    if keys.is_empty() {
        return bytes.to_vec();
    }
    let key = pick(dice, &keys);
    match dice.random_range(0..6) {
        0 => index["weight_map"] = odd_number(dice),
        1 => index["weight_map"][key] = odd_number(dice),
        2 => {
            let shards =
                [SHARDS[0], SHARDS[1], WEIGHTS, "../x.safetensors", "/dev/null", "x.bin", "", "a\0b.safetensors"];
            index["weight_map"][key] = json!(pick(dice, &shards));
        }
        3 => _ = index["weight_map"].as_object_mut().map(|map| map.remove(key)),
        4 => index["weight_map"][other_name(key, dice)] = json!(pick(dice, &SHARDS)),
        _ => {
            let text =
                String::from_utf8_lossy(bytes).replacen("p\":{", &format!("p\":{{{key:?}:\"x.safetensors\","), 1);
            return text.into_bytes();
        }
    }
    serde_json::to_vec(&index).unwrap()
}

/// Changes one field of a GGUF file.
pub fn gguf(gguf: &mut Gguf, dice: &mut impl Rng) {
    let odd = [0, 1, 2, 3, 7, 31, 33, 48, 1 << 20, 1 << 31, 1 << 33, 1 << 62, u64::MAX];
    let tensor = dice.random_range(0..gguf.tensors.len());
    let meta = dice.random_range(0..gguf.meta.len());
    let name = gguf.tensors[tensor].0.clone();
    match dice.random_range(0..13) {
        0 => gguf.version = *pick(dice, &[0, 1, 2, 3, 4, 3 << 24, u32::MAX]),
        1 => gguf.meta[meta].1 = dice.random_range(0..15),
        2 => bytes(&mut gguf.meta[meta].2, dice),
        3 => {
            let copy = gguf.meta[meta].clone();
            gguf.meta.push(copy);
        }
        4 if gguf.meta.len() > 1 => _ = gguf.meta.remove(meta),
        5 => {
            let list = [&(dice.random_range(0..14u32)).to_le_bytes()[..], &pick(dice, &odd).to_le_bytes(), &[1; 24]];
            gguf.meta.push(("list".into(), 9, list.concat()));
        }
        6 => {
            let dims = &mut gguf.tensors[tensor].1;
            match dice.random_range(0..4) {
                0 => dims.push(*pick(dice, &odd)),
                1 => _ = dims.pop(),
                2 => dims.reverse(),
                _ => {
                    let at = dice.random_range(0..dims.len().max(1));
                    if let Some(dim) = dims.get_mut(at) {
                        *dim = *pick(dice, &odd);
                    }
                }
            }
        }
        7 => gguf.tensors[tensor].2 = dice.random_range(0..42),
        8 => gguf.offsets.push((tensor, *pick(dice, &odd))),
        9 => {
            let names = [
                name.replace("lora_a", "lora_b"),
                name.replace(".weight", ""),
                name.replace("blk.0", "blk.9"),
                name.replace("blk.0", "blk.99999999999999999999"),
                name.replace("attn_q", "ffn_gate_exps"),
                name.replace("attn_q", "attn_norm"),
                name.replace("attn_q", "attn_v"),
                "output.weight.lora_a".to_owned(),
                "token_embd.weight.lora_a".to_owned(),
                "é".repeat(300),
                String::new(),
            ];
            gguf.tensors[tensor].0 = pick(dice, &names).clone();
        }
        10 => {
            let architectures = ["llama", "qwen2", "gpt2", "", "é"];
            *gguf = std::mem::replace(gguf, Gguf::lora("", 0.0))
                .text("general.architecture", pick::<&str>(dice, &architectures));
        }
        11 => {
            let alignment = *pick(dice, &[0u32, 1, 8, 16, 24, 32, 1 << 16, u32::MAX]);
            *gguf = std::mem::replace(gguf, Gguf::lora("", 0.0)).meta("general.alignment", 4, &alignment.to_le_bytes());
        }
        _ => {
            let alpha = *pick(dice, &[0.0, -1.0, f32::NAN, f32::INFINITY, 1e-38, 3e38]);
            *gguf = std::mem::replace(gguf, Gguf::lora("", 0.0)).meta("adapter.lora.alpha", 6, &alpha.to_le_bytes());
        }
    }
}
