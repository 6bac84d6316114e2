//! Thousands of damaged adapters: no panic, no allocation beyond a few times the files' size, and an error that names
//! the file. The damage is structured: one field of a header, a config or a key at a time, then several.

mod loader_support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use loader_support::{base, file_bytes, fixtures};
use lorapool::adapter::{BaseModel, Code, load};
use lorapool::{Error, Result};
use peak_alloc::PeakAlloc;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::{Map, Value, json};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Inputs in the time of a debug build; fewer only on a machine that can't do them in [`PATIENCE`].
const INPUTS: usize = 30_000;
const PATIENCE: Duration = Duration::from_secs(120);

/// What a load may take beyond four times its files: path strings, messages, compiled patterns.
const SLACK: usize = 1 << 20;

/// One test, so that nothing else allocates while it measures.
#[test]
fn damaged_adapters_neither_panic_nor_allocate_nor_hide_their_name() {
    let plain = fixtures().join("05_r1");
    let config = fs::read(plain.join("adapter_config.json")).unwrap();
    let weights = fs::read(plain.join("adapter_model.safetensors")).unwrap();
    let pattern_config = fs::read(fixtures().join("07_rank_pattern/adapter_config.json")).unwrap();
    let base = base("llama");
    // In memory where the system has such a place: writing twice as many files is most of the time on a disk.
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let start = Instant::now();
    let (mut accepted, mut codes, mut done) = (0, std::collections::BTreeMap::<Code, usize>::new(), 0);
    for seed in 0..INPUTS {
        let mut dice = Xoshiro256PlusPlus::seed_from_u64(seed as u64);
        let mut config = if dice.random_ratio(1, 4) { pattern_config.clone() } else { config.clone() };
        let mut weights = weights.clone();
        for _ in 0..dice.random_range(1..=2) {
            match dice.random_range(0..8) {
                0..=3 => weights = damage_header(&weights, &mut dice),
                4..=5 => config = damage_config(&config, &mut dice),
                6 => damage_bytes(&mut weights, &mut dice),
                _ => damage_bytes(&mut config, &mut dice),
            }
        }
        fs::write(dir.path().join("adapter_config.json"), &config).unwrap();
        fs::write(dir.path().join("adapter_model.safetensors"), &weights).unwrap();
        let base = dice.random_bool(0.5).then_some(&base);
        match measured(dir.path(), base, config.len() + weights.len()) {
            Ok(()) => accepted += 1,
            Err(Error::Reject(reject)) => {
                let names_file = reject.message.contains("adapter_config.json")
                    || reject.message.contains("adapter_model.safetensors");
                assert!(names_file, "seed {seed}: {reject}");
                assert!(reject.message.len() < 4096, "seed {seed}: {reject}");
                *codes.entry(reject.code).or_default() += 1;
            }
            Err(other) => panic!("seed {seed}: {other}"),
        }
        done += 1;
        if start.elapsed() > PATIENCE {
            break;
        }
    }
    eprintln!("{done} inputs in {:?}: {accepted} accepted, refused: {codes:?}", start.elapsed());
    assert!(codes.len() >= 15, "the damage reaches few checks: {codes:?}");
    assert!(accepted > done / 50, "the damage never leaves an adapter intact: {accepted}");

    amplifiers(dir.path(), &config);
}

/// Files that are small for what they could make a careless reader build.
fn amplifiers(dir: &Path, config: &[u8]) {
    let write = |config: &[u8], weights: &[u8]| {
        fs::write(dir.join("adapter_config.json"), config).unwrap();
        fs::write(dir.join("adapter_model.safetensors"), weights).unwrap();
        config.len() + weights.len()
    };
    let many = |entry: &dyn Fn(usize) -> String| {
        let entries: Vec<_> = (0..100_000).map(entry).collect();
        file_bytes(format!("{{{}}}", entries.join(",")).as_bytes(), &[])
    };
    for (what, weights) in [
        ("empty tensors", many(&|i| format!(r#""{i:05}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))),
        ("an endless shape", file_bytes(format!(r#"{{"a":{{"shape":[{}0]}}}}"#, "0,".repeat(1 << 20)).as_bytes(), &[])),
        ("endless nesting", file_bytes("[".repeat(1 << 20).as_bytes(), &[])),
        ("nested metadata", file_bytes(format!(r#"{{"__metadata__":{}"#, "{\"a\":".repeat(1 << 18)).as_bytes(), &[])),
        ("a huge header length", [&99_999_999u64.to_le_bytes()[..], b"{}"].concat()),
    ] {
        let size = write(config, &weights);
        assert!(matches!(measured(dir, None, size), Err(Error::Reject(_))), "{what}");
    }
    let weights = fs::read(fixtures().join("05_r1/adapter_model.safetensors")).unwrap();
    for (what, config) in [
        ("a list of zeros", format!("[{}0]", "0,".repeat(1 << 20))),
        ("a list of lists", format!("[{}[]]", "[],".repeat(1 << 20))),
        ("endless nesting", "[".repeat(1 << 20)),
        ("a long string", format!("{{\"peft_type\": \"{}\"}}", "x".repeat(1 << 20))),
    ] {
        let size = write(config.as_bytes(), &weights);
        assert!(matches!(measured(dir, None, size), Err(Error::Reject(_))), "{what}");
    }
}

/// Loads, and asserts that the heap grew by no more than the files justify.
fn measured(dir: &Path, base: Option<&BaseModel>, size: usize) -> Result<()> {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let loaded = load(dir, base).map(drop);
    let grown = HEAP.peak_usage().saturating_sub(before);
    // A list of small numbers takes sixteen bytes a value while it is read; only the config has such lists, and few values.
    assert!(grown <= 4 * size + SLACK + (8 << 20) * usize::from(size > 1 << 20), "{grown} bytes for files of {size}");
    loaded
}

/// Replaces, inserts or removes a few bytes, or cuts the end.
fn damage_bytes(bytes: &mut Vec<u8>, dice: &mut impl Rng) {
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
    numbers[dice.random_range(0..numbers.len())].clone()
}

/// Changes one field of one tensor's entry, a key, or the header's length.
fn damage_header(file: &[u8], dice: &mut impl Rng) -> Vec<u8> {
    let parts = file
        .split_first_chunk::<8>()
        .and_then(|(len, rest)| rest.split_at_checked(u64::from_le_bytes(*len).min(1 << 20) as usize));
    let Some((text, data)) = parts else { return file.to_vec() };
    let Ok(mut header) = serde_json::from_slice::<Map<String, Value>>(text) else { return file.to_vec() };
    let keys: Vec<String> = header.iter().filter(|(_, entry)| entry.is_object()).map(|(key, _)| key.clone()).collect();
    if keys.is_empty() {
        return file.to_vec();
    }
    let key = &keys[dice.random_range(0..keys.len())];
    let other = &keys[dice.random_range(0..keys.len())];
    match dice.random_range(0..10usize) {
        0 => {
            let dtypes = ["F32", "F16", "BF16", "F64", "F8_E4M3", "I64", "BOOL", "F4", "f32", "", "X"];
            header[key]["dtype"] = json!(dtypes[dice.random_range(0..dtypes.len())]);
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
            header[key]["shape"] = shapes[dice.random_range(0..shapes.len())].clone();
        }
        4 => {
            // The same tensor under another name.
            let names = [
                key.replace("lora_A", "lora_B"),
                key.replace("weight", "bias"),
                key.replace("base_model.", ""),
                key.replace("q_proj", "qkv_proj"),
                key.replace("layers.0", "layers.9"),
                key.replace('.', ""),
                key.replace("lora_A.weight", "lora_magnitude_vector"),
                key.replace(".weight", ".default.weight"),
                key.replace("self_attn.", "self_attn.\u{0}\u{202e}"),
                "é".repeat(300),
                String::new(),
                ".".repeat(40),
                key.replace("layers.0", "layers.99999999999999999999"),
                key.replace("mlp", "experts"),
            ];
            if let Some(entry) = header.remove(key) {
                header.insert(names[dice.random_range(0..names.len())].clone(), entry);
            }
        }
        5 => header[key] = header[other].clone(),
        6 => _ = header.remove(key),
        7 => {
            let fields = ["dtype", "shape", "data_offsets", "extra"];
            header[key][fields[dice.random_range(0..fields.len())]] = odd_number(dice);
        }
        8 => {
            // The key once more, as JSON objects in memory can't have it.
            let text = String::from_utf8_lossy(text).replacen('{', &format!("{{{key:?}:{},", header[other]), 1);
            return file_bytes(text.as_bytes(), data);
        }
        _ => {
            let mut bytes = file.to_vec();
            let lens = [0, 1, text.len() as u64 - 1, text.len() as u64 + 1, 1 << 20, 1 << 40, u64::MAX];
            bytes[..8].copy_from_slice(&lens[dice.random_range(0..lens.len())].to_le_bytes());
            return bytes;
        }
    }
    file_bytes(&serde_json::to_vec(&header).unwrap(), data)
}

/// Changes one field of a config.
fn damage_config(bytes: &[u8], dice: &mut impl Rng) -> Vec<u8> {
    let Ok(mut config) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return bytes.to_vec() };
    let fields: Vec<String> = config.keys().cloned().collect();
    if fields.is_empty() {
        return bytes.to_vec();
    }
    let field = &fields[dice.random_range(0..fields.len())];
    match dice.random_range(0..6) {
        0 => config[field] = odd_number(dice),
        1 => _ = config.remove(field),
        2 => {
            let pattern =
                ["(", "(?=", "q_proj|", "(a|a)*$", "^", "\\", "[", "(?<x>", ".*.*.*.*x"][dice.random_range(0..9)];
            let map = ["rank_pattern", "alpha_pattern"][dice.random_range(0..2)];
            config.insert(map.into(), json!({ pattern: odd_number(dice) }));
        }
        3 => {
            let targets =
                [json!("("), json!(".*"), json!([1]), json!("all-linear"), json!({"a": 1}), json!(["q_proj", null])];
            config.insert("target_modules".into(), targets[dice.random_range(0..targets.len())].clone());
        }
        4 => _ = config.insert("unheard_of".into(), odd_number(dice)),
        _ => {
            let text = String::from_utf8_lossy(bytes).replacen('{', &format!("{{{field:?}: {},", odd_number(dice)), 1);
            return text.into_bytes();
        }
    }
    serde_json::to_vec(&config).unwrap()
}
