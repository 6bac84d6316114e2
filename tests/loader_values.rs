//! Loaded pairs against PEFT's own numbers, and against a reading of the files that shares no code with the loader.

mod loader_support;

use std::collections::BTreeMap;

use loader_support::{base, delta, fixtures, json_file, read_tensors};
use lorapool::DType;
use lorapool::adapter::{Adapter, Fate, RowVectors, load};
use serde_json::Value;

/// Fixtures that load, with their bases.
fn accepted() -> Vec<(String, Adapter)> {
    let table = json_file(&fixtures().join("verdicts.json"));
    let table = table.as_object().unwrap();
    let accepted = table.iter().filter(|(_, expected)| expected["verdict"] == "accept");
    accepted
        .map(|(case, expected)| {
            let base = base(expected["base"].as_str().unwrap());
            (case.clone(), load(fixtures().join(case), Some(&base)).unwrap())
        })
        .collect()
}

#[test]
fn every_accepted_fixture_gives_pefts_outputs() {
    let mut compared = 0;
    for (case, adapter) in accepted() {
        let path = fixtures().join(&case).join("expected.safetensors");
        if !path.exists() {
            continue;
        }
        let expected = read_tensors(&path);
        for pair in &adapter.pairs {
            let get = |part: &str| &expected[&format!("{}|{part}", pair.site.path)];
            // Kernels take the scale in f32; PEFT has it in f64.
            let (_, scale) = adapter.config.scales().unwrap().of(&pair.site.path).unwrap();
            assert_eq!(pair.scale, scale as f32);
            // Of a router PEFT's output is the change of its parameter.
            if let Some(change) = expected.get(&format!("{}.weight|delta_w", pair.site.path)) {
                let (inputs, outputs) = (pair.in_features(), pair.out_features());
                let ones: Vec<f64> = (0..inputs * inputs).map(|i| f64::from(u8::from(i % (inputs + 1) == 0))).collect();
                for (i, d) in delta(pair, scale, &ones).iter().enumerate() {
                    let want = change.values[i % outputs * inputs + i / outputs];
                    assert!((d - want).abs() < 1e-9, "{case} {}: {d} {want}", pair.site.path);
                    compared += 1;
                }
                continue;
            }
            // An embedding's input is a one where the token is.
            let inputs = match pair.embedding {
                false => get("x").values.clone(),
                true => {
                    let ids = get("ids").values.iter().map(|id| *id as usize);
                    ids.flat_map(|id| (0..pair.in_features()).map(move |i| f64::from(u8::from(i == id)))).collect()
                }
            };
            let found = delta(pair, scale, &inputs);
            let outputs = (0..pair.out_features()).cycle();
            for (((d, base), y), n) in found.iter().zip(&get("y_base").values).zip(&get("y").values).zip(outputs) {
                // Gains and offsets are f32.
                let (change, slack) = match &pair.vectors {
                    None => (*d, 1e-9),
                    Some(RowVectors { gain, offset }) => {
                        let [gain, offset] = [gain[n], offset[n]].map(f64::from);
                        ((gain - 1.0) * base + offset + gain * d, 1e-7 * (1.0 + base.abs() + d.abs()))
                    }
                };
                assert!((base + change - y).abs() < slack, "{case} {}: {} {y}", pair.site.path, base + change);
                compared += 1;
            }
        }
        // PEFT changed no other module. Rows of tokens that it replaced are the conformance suite's to compare.
        let replaced = |path: &str| {
            let sites = adapter.tokens.iter().map(|tokens| &tokens.site);
            sites.chain(adapter.raw_tokens.iter().map(|raw| &raw.site)).any(|site| *site.path == *path)
        };
        for (name, y) in &expected {
            if let Some(path) = name.strip_suffix("|y")
                && !path.ends_with(".token_adapter")
                && !replaced(path)
                && !adapter.pairs.iter().any(|pair| &*pair.site.path == path)
                && !adapter.unapplied.iter().any(|tensor| tensor.name.starts_with(path))
            {
                assert_eq!(y.values, expected[&format!("{path}|y_base")].values, "{case} {path} is not applied");
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}

#[test]
fn ranks_scales_and_widths_are_pefts() {
    let mut compared = 0;
    for (case, adapter) in accepted() {
        let meta = json_file(&fixtures().join(&case).join("meta.json"));
        let Some(modules) = meta["modules"].as_object() else { continue };
        let linears: BTreeMap<&str, &Value> = modules
            .iter()
            .filter(|(_, m)| {
                // A router is a parameter of two dimensions, and a linear all the same.
                let router = m["shape"].as_array().is_some_and(|shape| shape.len() == 2);
                router || matches!(m["kind"].as_str(), Some("Linear" | "Conv1D" | "Embedding"))
            })
            .map(|(path, m)| (m["saved_as"].as_str().unwrap_or(path), m))
            .collect();
        let found: Vec<&str> = adapter.pairs.iter().map(|pair| &*pair.site.path).collect();
        let mut sorted = found.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, linears.keys().copied().collect::<Vec<_>>(), "{case}");
        for pair in &adapter.pairs {
            let meta = linears[&*pair.site.path];
            assert_eq!(pair.rank() as u64, meta["r"].as_u64().unwrap(), "{case} {}", pair.site.path);
            assert_eq!(pair.scale, meta["scaling"].as_f64().unwrap() as f32, "{case} {}", pair.site.path);
            assert_eq!(pair.embedding, meta["kind"] == "Embedding");
            let [inputs, outputs] = match (&meta["shape"], pair.embedding) {
                (Value::Array(shape), _) => [&shape[1], &shape[0]].map(|n| n.as_u64().unwrap()),
                (_, true) => [131, meta["out"][0].as_u64().unwrap()],
                (_, false) => [&meta["in"], &meta["out"][0]].map(|n| n.as_u64().unwrap()),
            };
            assert_eq!(pair.in_features() as u64, inputs, "{case} {}", pair.site.path);
            assert_eq!(pair.out_features() as u64, outputs, "{case} {}", pair.site.path);
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn weights_are_the_files_to_the_bit() {
    for (case, adapter) in accepted() {
        let dir = fixtures().join(&case);
        let dir = if case == "43_named_subfolder" { dir.join("style_v2") } else { dir };
        let tensors = read_tensors(&dir.join("adapter_model.safetensors"));
        for fate in &adapter.tensors {
            let tensor = &tensors[&fate.name];
            assert_eq!(fate.shape, tensor.shape);
            // Of biases and magnitudes, what they become shows in the outputs.
            let part = [".lora_A", ".lora_B.", ".lora_embedding_"].iter().any(|part| fate.name.contains(part));
            let part = part && !fate.name.ends_with(".bias");
            let pair = adapter.pairs.iter().find(|pair| pair.site.path == fate.site);
            let Some(pair) = pair.filter(|_| part && fate.fate == Fate::Applied) else {
                continue;
            };
            let of_a = [".lora_A", ".lora_embedding_A"].iter().any(|part| fate.name.contains(part));
            let matrix = if of_a { &pair.a } else { &pair.b };
            let exact: Vec<f32> = tensor.values.iter().map(|v| *v as f32).collect();
            assert_eq!(matrix.values(), exact, "{case} {}", fate.name);
        }
        assert_eq!(adapter.tensors.len(), tensors.len());
    }
}

#[test]
fn the_same_content_has_the_same_digest_under_any_spelling() {
    let digest = |case: &str| load(fixtures().join(case), Some(&base("llama"))).unwrap().digest;
    let plain = digest("05_r1");
    for case in ["d_default_infix", "d_no_prefix", "d_double_prefix", "d_language_model_prefix", "d_config_bom"] {
        assert_eq!(digest(case), plain, "{case}");
    }
    for case in ["04_rslora_r6", "d_config_alpha_float", "d_config_alpha_zero", "d_mixed_dtype"] {
        assert_ne!(digest(case), plain, "{case}");
    }
}

#[test]
fn a_host_matrix_converts_with_one_rounding_and_names_what_overflows() {
    let adapter = load(fixtures().join("03_plain_bf16"), None).unwrap();
    for pair in &adapter.pairs {
        for matrix in [&pair.a, &pair.b] {
            for dtype in DType::ALL {
                let converted = dtype.decode(&matrix.to(dtype).unwrap());
                let expected: Vec<f32> = matrix.values().iter().map(|v| dtype.round(*v)).collect();
                assert_eq!(converted, expected);
            }
        }
    }
    let mut matrix = adapter.pairs[0].a.clone();
    let at = matrix.cols + 3;
    matrix.bytes[2 * at..2 * at + 2].copy_from_slice(&half::bf16::from_f32(70_000.0).to_le_bytes());
    assert_eq!(matrix.to(DType::F16), Err((at, half::bf16::from_f32(70_000.0).to_f32())));
    assert!(matrix.to(DType::F32).is_ok());
}
