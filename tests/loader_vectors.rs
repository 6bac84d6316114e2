//! Biases of lora_B and DoRA: what becomes of them on every kind of base, against a reading of its files that shares no
//! code with the loader, and what is refused.

mod loader_support;

use std::collections::BTreeMap;
use std::sync::Arc;

use half::{bf16, f16};
use loader_support::{
    Files, Tensor, assert_refused, base, fixture_files, fixtures, notice_codes, pair_at, read_tensors,
};
use lorapool::adapter::{Adapter, BaseModel, BaseWeights, Code, RowVectors, load};
use lorapool::pool::{Pool, PoolSpec, SlotImage};
use lorapool::{DType, Error, Result};
use serde_json::json;

const Q0: &str = "model.layers.0.self_attn.q_proj";

/// An adapter of DoRA with a pair and magnitudes at each of these modules.
fn dora(modules: &[(&str, usize, usize)]) -> Files {
    let mut files = Files::lora(3).with("use_dora", json!(true));
    for (module, inputs, outputs) in modules {
        files = files
            .pair(module, 3, *inputs, *outputs)
            .tensor(&format!("base_model.model.{module}.lora_magnitude_vector"), &[*outputs]);
    }
    files
}

/// A fixture base's tensors.
fn tensors_of(name: &str) -> BTreeMap<String, Tensor> {
    read_tensors(&fixtures().join("_base").join(name).join("model.safetensors"))
}

/// Rows of a linear `[out][in]`, whichever way it is stored.
fn rows_of(tensor: &Tensor, transposed: bool) -> Vec<Vec<f64>> {
    let [rows, cols] = tensor.shape[..] else { panic!("{:?}", tensor.shape) };
    match transposed {
        false => tensor.values.chunks(cols).map(<[f64]>::to_vec).collect(),
        true => (0..cols).map(|c| (0..rows).map(|r| tensor.values[r * cols + c]).collect()).collect(),
    }
}

/// Gains and offsets by the definition.
fn expected(rows: &[Vec<f64>], bias: Option<&[f64]>, files: &Files, module: &str, scale: f64) -> Vec<[f64; 2]> {
    let values = |part: &str| -> Vec<f64> {
        let name = format!("base_model.model.{module}.{part}");
        let (_, _, _, bytes) = files.tensors.iter().find(|(n, ..)| *n == name).unwrap();
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect()
    };
    let (a, b, magnitudes) = (values("lora_A.weight"), values("lora_B.weight"), values("lora_magnitude_vector"));
    let rank = b.len() / rows.len();
    let gain = |(n, row): (usize, &Vec<f64>)| {
        let delta = |k: usize| (0..rank).map(|r| b[n * rank + r] * a[r * row.len() + k]).sum::<f64>();
        let square: f64 = row.iter().enumerate().map(|(k, w)| (w + scale * delta(k)).powi(2)).sum();
        let gain = magnitudes[n] / square.sqrt();
        [gain, bias.map_or(0.0, |bias| (1.0 - gain) * bias[n])]
    };
    rows.iter().enumerate().map(gain).collect()
}

#[track_caller]
fn assert_vectors(vectors: &Option<RowVectors>, expected: &[[f64; 2]]) {
    let RowVectors { gain, offset } = vectors.as_ref().expect("vectors");
    assert_eq!((gain.len(), offset.len()), (expected.len(), expected.len()));
    for (n, [g, o]) in expected.iter().enumerate() {
        assert!((f64::from(gain[n]) - g).abs() <= 1e-7 * g.abs(), "gain {n}: {} {g}", gain[n]);
        assert!((f64::from(offset[n]) - o).abs() <= 1e-7 * (o.abs() + 1e-3), "offset {n}: {} {o}", offset[n]);
    }
}

#[test]
fn gains_are_magnitudes_over_norms_on_every_kind_of_base() {
    let c_attn = "transformer.h.1.attn.c_attn";
    for (name, modules, transposed) in [
        ("llama", vec![(Q0, 48, 48), ("model.layers.1.mlp.down_proj", 80, 48), ("lm_head", 48, 131)], false),
        ("qwen2", vec![(Q0, 48, 48), ("model.layers.0.self_attn.v_proj", 48, 24)], false),
        ("gpt2", vec![(c_attn, 48, 144), ("transformer.h.0.mlp.c_proj", 192, 48)], true),
        ("phi3", vec![("model.layers.0.self_attn.qkv_proj", 48, 96)], false),
        ("llama_tied", vec![("lm_head", 48, 131)], false),
    ] {
        let (files, tensors) = (dora(&modules), tensors_of(name));
        let adapter = files.load(Some(&base(name))).unwrap();
        for (module, ..) in modules {
            let weight = tensors.get(&format!("{module}.weight")).or_else(|| tensors.get("model.embed_tokens.weight"));
            let rows = rows_of(weight.unwrap(), transposed);
            let bias = tensors.get(&format!("{module}.bias")).map(|bias| &bias.values[..]);
            assert_vectors(&pair_at(&adapter, module).vectors, &expected(&rows, bias, &files, module, 2.0));
        }
    }
}

#[test]
fn dora_of_linears_that_the_base_has_fused_or_apart_is_that_of_their_rows() {
    let parts = [("q_proj", 0..48), ("v_proj", 72..96)];
    let modules = parts.clone().map(|(name, rows)| (format!("model.layers.0.self_attn.{name}"), rows));
    let named: Vec<_> = modules.iter().map(|(module, rows)| (module.as_str(), 48, rows.len())).collect();
    let files = dora(&named);
    let adapter = files.load(Some(&base("phi3"))).unwrap();
    assert_eq!(notice_codes(&adapter), ["N_FUSED_JOINED"]);
    let fused = rows_of(&tensors_of("phi3")["model.layers.0.self_attn.qkv_proj.weight"], false);
    // Rows of k, which the adapter does not have, are left alone.
    let mut all = vec![[1.0, 0.0]; 96];
    for (module, rows) in &modules {
        all[rows.clone()].copy_from_slice(&expected(&fused[rows.clone()], None, &files, module, 2.0));
    }
    assert_vectors(&pair_at(&adapter, "model.layers.0.self_attn.qkv_proj").vectors, &all);

    let module = "model.layers.1.mlp.gate_up_proj";
    let files = dora(&[(module, 48, 160)]);
    let adapter = files.load(Some(&base("llama"))).unwrap();
    assert_eq!(notice_codes(&adapter), ["N_FUSED_SPLIT"]);
    let tensors = tensors_of("llama");
    let names = ["gate_proj", "up_proj"].map(|name| format!("model.layers.1.mlp.{name}"));
    let rows: Vec<_> = names.iter().flat_map(|n| rows_of(&tensors[&format!("{n}.weight")], false)).collect();
    let expected = expected(&rows, None, &files, module, 2.0);
    for (name, expected) in names.iter().zip(expected.chunks(80)) {
        assert_vectors(&pair_at(&adapter, name).vectors, expected);
    }
}

/// A base of one linear in one type, with its directory, which must outlive it.
fn small_base(dtype: &'static str, scale: f32) -> (tempfile::TempDir, Vec<Vec<f64>>) {
    let values: Vec<f32> = (0..6 * 40).map(|i| ((i * 37 % 61) as f32 / 61.0 - 0.4) * scale).collect();
    let bytes = values.iter().flat_map(|v| match dtype {
        "BF16" => bf16::from_f32(*v).to_le_bytes().to_vec(),
        "F16" => f16::from_f32(*v).to_le_bytes().to_vec(),
        "F64" => f64::from(*v).to_le_bytes().to_vec(),
        "I8" => vec![*v as u8],
        _ => v.to_le_bytes().to_vec(),
    });
    let files =
        Files { config: json!({}), tensors: vec![(format!("{Q0}.weight"), dtype, vec![6, 40], bytes.collect())] };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), files.bytes()).unwrap();
    let rows = match dtype {
        "I8" => Vec::new(),
        _ => rows_of(&read_tensors(&dir.path().join("model.safetensors"))[&format!("{Q0}.weight")], false),
    };
    (dir, rows)
}

#[test]
fn a_base_of_any_float_type_is_read_exactly_and_others_are_refused() {
    let files = dora(&[(Q0, 40, 6)]);
    for dtype in ["F32", "F16", "BF16", "F64"] {
        let (dir, rows) = small_base(dtype, 1.0);
        let adapter = files.load(Some(&BaseModel::open(dir.path()).unwrap())).unwrap();
        assert_vectors(&pair_at(&adapter, Q0).vectors, &expected(&rows, None, &files, Q0, 2.0));
    }
    let (dir, _) = small_base("I8", 100.0);
    let loaded = files.load(Some(&BaseModel::open(dir.path()).unwrap()));
    assert_refused(loaded, Code::Dora, &[Q0, "--base", "with_weights"]);
}

#[test]
fn a_row_of_norm_0_or_beyond_all_numbers_is_refused_by_module_and_row() {
    for (scale, norm) in [(0.0, "norm 0"), (f32::INFINITY, "norm inf")] {
        let (dir, _) = small_base("F32", scale);
        let mut files = dora(&[(Q0, 40, 6)]);
        // B of zeros: W alone decides.
        files.tensors.iter_mut().filter(|(name, ..)| name.contains("lora_B")).for_each(|(.., bytes)| bytes.fill(0));
        let loaded = files.load(Some(&BaseModel::open(dir.path()).unwrap()));
        assert_refused(loaded, Code::Dora, &[Q0, "row 0", norm, "adapter_model.safetensors"]);
    }
}

/// The weights of a fixture base, as a host would hand them out.
#[derive(Debug)]
struct FromHost(BTreeMap<String, (usize, Vec<f32>)>, Option<&'static str>);

impl BaseWeights for FromHost {
    fn rows(&self, path: &str, first: usize, out: &mut [f32]) -> Result<bool> {
        if let Some(error) = self.1 {
            return Err(Error::Input(error.into()));
        }
        let Some((width, values)) = self.0.get(&format!("{path}.weight")) else { return Ok(false) };
        out.copy_from_slice(&values[first * width..][..out.len()]);
        Ok(true)
    }

    fn bias(&self, path: &str) -> Result<Option<Vec<f32>>> {
        Ok(self.0.get(&format!("{path}.bias")).map(|(_, values)| values.clone()))
    }
}

#[test]
fn a_host_may_give_the_weights_that_files_do_not_have() {
    let files = dora(&[(Q0, 48, 48), ("model.layers.0.self_attn.v_proj", 48, 24)]);
    let of_files = files.load(Some(&base("qwen2"))).unwrap();
    let config = fixtures().join("_base/qwen2/config.json");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    let open = || BaseModel::open(dir.path()).unwrap();
    assert_refused(files.load(Some(&open())), Code::Dora, &[Q0, "--base"]);
    let mut tensors: BTreeMap<_, _> = tensors_of("qwen2")
        .into_iter()
        .map(|(name, t)| (name, (*t.shape.last().unwrap(), t.values.iter().map(|v| *v as f32).collect::<Vec<_>>())))
        .collect();
    let of_host = files.load(Some(&open().with_weights(Arc::new(FromHost(tensors.clone(), None))))).unwrap();
    assert_eq!(of_host.digest, of_files.digest);
    // They count before those of the files, as what the host computes with.
    tensors.get_mut(&format!("{Q0}.weight")).unwrap().1.iter_mut().for_each(|w| *w *= 2.0);
    let other = files.load(Some(&base("qwen2").with_weights(Arc::new(FromHost(tensors.clone(), None))))).unwrap();
    assert_ne!(other.digest, of_files.digest);
    // Only some linears, a bias of another length, an error of the host's.
    tensors.get_mut(&format!("{Q0}.bias")).unwrap().1.pop();
    let loaded = files.load(Some(&open().with_weights(Arc::new(FromHost(tensors.clone(), None)))));
    assert_refused(loaded, Code::BaseFile, &[Q0, "47", "48"]);
    tensors.remove(&format!("{Q0}.weight"));
    let loaded = files.load(Some(&open().with_weights(Arc::new(FromHost(tensors, None)))));
    assert_refused(loaded, Code::Dora, &[Q0]);
    let failing = FromHost(BTreeMap::new(), Some("the card is gone"));
    let loaded = files.load(Some(&open().with_weights(Arc::new(failing))));
    assert_refused(loaded, Code::Dora, &[Q0, "the card is gone"]);
}

/// Fixture 23 with its magnitudes renamed and reshaped.
fn renamed(suffix: &str, shape: impl Fn(usize) -> Vec<usize>) -> Files {
    let mut files = fixture_files("23_dora");
    for (name, _, dims, _) in &mut files.tensors {
        if let Some(module) = name.strip_suffix("lora_magnitude_vector") {
            *name = format!("{module}{suffix}");
            *dims = shape(dims[0]);
        }
    }
    files
}

#[test]
fn magnitudes_count_under_every_spelling_and_shape_they_were_saved_in() {
    let base = base("llama");
    let digest = load(fixtures().join("23_dora"), Some(&base)).unwrap().digest;
    for suffix in [
        "lora_magnitude_vector",
        "lora_magnitude_vector.weight",
        "lora_magnitude_vector.default",
        "lora_magnitude_vector.default.weight",
        "lora_magnitude.weight",
        "magnitude",
    ] {
        for shape in [|n| vec![n], |n| vec![1, n], |n| vec![n, 1]] {
            let files = renamed(suffix, shape);
            let adapter = files.load(Some(&base)).unwrap();
            assert_eq!(adapter.digest, digest, "{suffix}");
            assert_eq!((adapter.tensors_applied(), adapter.pairs.len()), (18, 6));
            // Never a plain LoRA, whatever the config forgets.
            let refused = files.with("use_dora", json!(false)).load(Some(&base));
            assert_refused(refused, Code::Dora, &[suffix, "use_dora", "adapter_model.safetensors"]);
        }
    }
    let loaded = renamed("dora_scale", |n| vec![n, 1]).load(Some(&base));
    assert_refused(loaded, Code::Dora, &["dora_scale", "LyCORIS"]);
    let loaded = renamed("lora_magnitude_vector", |n| vec![n / 2, 2]).load(Some(&base));
    assert_refused(loaded, Code::TensorShape, &["lora_magnitude_vector", "[48]"]);
}

#[test]
fn parts_that_are_missing_twice_there_or_unasked_for_are_named() {
    let base = base("llama");
    let dora = || dora(&[(Q0, 48, 48)]);
    let at = |part: &str| format!("base_model.model.{Q0}.{part}");
    let without = |mut files: Files, part: &str| {
        files.tensors.retain(|(name, ..)| !name.ends_with(part));
        files.load(Some(&base))
    };
    assert_refused(dora().load(None), Code::Dora, &[Q0, "--base"]);
    assert_refused(without(dora(), "lora_magnitude_vector"), Code::Dora, &[Q0, "use_dora", "lora_magnitude_vector"]);
    assert_refused(without(dora(), "lora_A.weight"), Code::Unpaired, &[Q0]);
    let twice = dora().tensor(&at("lora_magnitude_vector.weight"), &[48]);
    assert_refused(twice.load(Some(&base)), Code::TensorDuplicate, &["lora_magnitude_vector.weight"]);
    let stray = dora().tensor("base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector", &[80]);
    assert_refused(stray.load(Some(&base)), Code::Unpaired, &["layers.1.mlp.up_proj"]);
    let mut infinite = dora();
    infinite.tensors[2].3[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes());
    assert_refused(infinite.load(Some(&base)), Code::NotFinite, &["lora_magnitude_vector", "[1]"]);
    // PEFT has no DoRA with a bias of lora_B.
    let both = dora().with("lora_bias", json!(true)).tensor(&at("lora_B.bias"), &[48]);
    assert_refused(both.load(Some(&base)), Code::LoraBias, &["use_dora", "lora_bias"]);

    let biased = || Files::lora(3).pair(Q0, 3, 48, 48).tensor(&at("lora_B.bias"), &[48]);
    let asked = || biased().with("lora_bias", json!(true));
    assert!(asked().load(None).is_ok());
    assert_refused(biased().load(Some(&base)), Code::LoraBias, &["lora_B.bias", "lora_bias"]);
    assert_refused(without(asked(), "lora_B.bias"), Code::LoraBias, &[Q0, "lora_bias", "lora_B.bias"]);
    let wide = Files::lora(3).with("lora_bias", json!(true)).pair(Q0, 3, 48, 48).tensor(&at("lora_B.bias"), &[49]);
    assert_refused(wide.load(Some(&base)), Code::TensorShape, &["lora_B.bias", "[48]"]);
}

/// A pair with a bias of lora_B at `Q0` whose element 0 is `first`.
fn biased(first: f32) -> Files {
    let mut files = Files::lora(3).with("lora_bias", json!(true)).pair(Q0, 3, 48, 48);
    files = files.tensor(&format!("base_model.model.{Q0}.lora_B.bias"), &[48]);
    files.tensors[2].3[..4].copy_from_slice(&first.to_le_bytes());
    files
}

#[test]
fn biases_of_lora_b_are_scaled_and_add_up_when_adapters_merge_and_dora_does_not() {
    let (one, two) = (biased(0.5).load(None).unwrap(), biased(-3.0).load(None).unwrap());
    assert_ne!(one.digest, two.digest);
    let offset = |adapter: &Adapter, n: usize| pair_at(adapter, Q0).vectors.as_ref().unwrap().offset[n];
    assert_eq!((offset(&one, 0), offset(&one, 1)), (1.0, 2.0 * (1.0 / 64.0 - 0.25)));
    let plain = Files::lora(3).pair(Q0, 3, 48, 48).load(None).unwrap();
    let merged = Adapter::merge(&[(&one, 2.0), (&plain, 0.5), (&two, -1.0)]).unwrap();
    assert_eq!(offset(&merged, 0), 2.0 + 6.0);
    assert!(pair_at(&merged, Q0).vectors.as_ref().unwrap().gain.iter().all(|gain| *gain == 1.0));
    assert!(merged.config.lora_bias);
    let dora = load(fixtures().join("23_dora"), Some(&base("llama"))).unwrap();
    assert_refused(Adapter::merge(&[(&dora, 1.0)]), Code::Merge, &["DoRA", "model.layers.0"]);
    let beyond = biased(3e38).load(None);
    assert_refused(beyond, Code::Range, &["lora_B.bias", "row 0"]);
}

#[test]
fn a_pool_without_room_for_vectors_refuses_them_by_the_options_name_and_one_with_room_packs_them() {
    let gpu = lorapool::backend::open("cpu", 0).unwrap();
    let base = base("llama");
    for case in ["16_lora_bias", "23_dora"] {
        let adapter = load(fixtures().join(case), Some(&base)).unwrap();
        let spec = PoolSpec::for_base(&base, 4, 1, DType::Bf16);
        assert!(spec.vectors && PoolSpec::for_adapters([&adapter], 1, DType::Bf16).unwrap().vectors);
        let small = Pool::new(&*gpu, PoolSpec { vectors: false, ..spec.clone() }).unwrap();
        let error = SlotImage::new(&small, &adapter).unwrap_err();
        assert!(error.to_string().contains("PoolSpec::vectors"), "{error}");
        let pool = Pool::new(&*gpu, spec).unwrap();
        let outputs: usize = base.linears().iter().map(|linear| linear.out_features.next_multiple_of(4)).sum();
        assert_eq!(SlotImage::len_in(&pool) - SlotImage::len_in(&small), 8 * outputs);
        let image = SlotImage::new(&pool, &adapter).unwrap();
        for (site, cell) in image.cells(&pool, 0).unwrap().into_iter().enumerate() {
            let covered = adapter.pairs.iter().any(|pair| pair.site == pool.sites()[site].id);
            assert_eq!((cell.rank > 0, cell.vectors), (covered, covered));
        }
    }
}
