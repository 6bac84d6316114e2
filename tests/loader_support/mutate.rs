//! Damaged adapters, made field by field, and what must hold of every one of them: no panic, no memory beyond a few times
//! the files, an error that names file and tensor or field, and finite outputs where the adapter is accepted.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lorapool::adapter::{Adapter, BaseModel, Code, HostPair, load};
use lorapool::backend::{self, GpuBackend};
use lorapool::manager::{LoraAdapterInput, LoraWeights, SlotRef};
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{PoolSpec, SiteKind};
use lorapool::{DType, Error};
use rand::{Rng, RngExt};
use serde_json::{Map, Value, json};

use super::gguf::Gguf;
use super::{Files, base, file_bytes, fixture_files};

/// What a load may take beyond four times its files: path strings, messages, compiled patterns.
const SLACK: u64 = 1 << 20;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const INDEX: &str = "adapter_model.safetensors.index.json";
const SHARDS: [&str; 2] = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"];
const GGUF: &str = "adapter.gguf";

/// How a load ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Accepted,
    Refused(Code),
}

/// A place to write adapters to, and what is needed to load and run them.
pub struct Bed {
    dir: tempfile::TempDir,
    gpu: Arc<dyn GpuBackend>,
    seeds: Vec<Seed>,
    /// A config with patterns for the first seed's tensors.
    patterns: Value,
    gguf: Gguf,
}

/// An adapter that is damaged, and a base that it is loaded against.
struct Seed {
    files: Files,
    base: BaseModel,
}

/// Adapters of every kind: plain ones, biases, magnitudes, embeddings, token rows, a head, fused linears (against a base
/// that has them apart), experts. The first is taken as often as all the others together.
const SEEDS: [(&str, &str); 10] = [
    ("05_r1", "llama"),
    ("13_fused_qkv_phi3", "llama"),
    ("15_bert_seqcls", "bert"),
    ("16_lora_bias", "llama"),
    ("19_embedding_lora_nobase", "llama"),
    ("21_trainable_tokens", "llama"),
    ("22_trainable_tokens_tied", "llama_tied"),
    ("23_dora", "llama"),
    ("26d_embed_lora_tied", "llama_tied"),
    ("41_moe_v4_per_expert_keys", "mixtral"),
];

impl Bed {
    pub fn new() -> Self {
        // In memory where the system has such a place: writing the files is most of the time on a disk.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let seed = |(case, model): (&str, &str)| Seed { files: fixture_files(case), base: base(model) };
        let seeds: Vec<_> = SEEDS.into_iter().map(seed).collect();
        let plain = &seeds[0].files;
        let mut patterns = plain.config.clone();
        patterns["rank_pattern"] = json!({"k_proj|(?<!x)o_proj": 4, r"^model\.layers\.1\..*": 1});
        patterns["alpha_pattern"] = json!({"layers.0.self_attn.q_proj": 3, "v_proj": 0.5});
        let gguf = Gguf::converted(plain, "llama", Some([4, 2]));
        let gpu = backend::open("cpu", 0).unwrap();
        Self { dir, gpu, seeds, patterns, gguf }
    }

    /// One adapter with damage that `dice` chooses.
    ///
    /// # Panics
    /// Where what must hold does not.
    pub fn try_one(&mut self, dice: &mut impl Rng) -> Outcome {
        let at = if dice.random_bool(0.5) { 0 } else { dice.random_range(0..self.seeds.len()) };
        let (seed, written) = match dice.random_range(0..8) {
            0 | 1 => (&self.seeds[0], self.write_gguf(dice)),
            2 => (&self.seeds[at], self.write_shards(at, dice)),
            _ => (&self.seeds[at], self.write_single(at, dice)),
        };
        let base = dice.random_bool(0.6).then_some(&seed.base);
        // A GGUF file by its own name, or found in the directory.
        let by_name = written.files[0].0 == GGUF && dice.random_bool(0.5);
        let path = if by_name { self.dir.path().join(GGUF) } else { self.dir.path().to_owned() };
        let outcome = self.load(&path, base, &written);
        for (name, _) in &written.files {
            let _ = fs::remove_file(self.dir.path().join(name));
        }
        outcome
    }

    fn load(&self, path: &Path, base: Option<&BaseModel>, written: &Written) -> Outcome {
        let mut loaded = None;
        let used = allocation_counter::measure(|| loaded = Some(load(path, base))).bytes_max;
        let size = written.files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        assert!(used <= 4 * size + SLACK, "{used} bytes for files of {size}");
        match loaded.unwrap() {
            Ok(adapter) => {
                assert!(adapter.tensors_applied() > 0);
                self.run(&adapter);
                Outcome::Accepted
            }
            Err(Error::Reject(reject)) => {
                let message = &reject.message;
                let named = written.files.iter().any(|(name, _)| message.contains(name.as_str()))
                    || (message.contains(self.dir.path().to_str().unwrap()) && of_directory(reject.code));
                assert!(named, "no file: {reject}");
                assert!(message.len() < 4096, "{reject}");
                let names_what = match reject.code {
                    code if of_tensor(code) => ["tensor", "modules"].iter().any(|word| message.contains(word)),
                    code if of_field(code) => written.fields.iter().any(|field| message.contains(field.as_str())),
                    _ => true,
                };
                assert!(names_what, "neither tensor nor field: {reject}");
                Outcome::Refused(reject.code)
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// A row of ones through every linear and a token through every embedding, on the CPU.
    fn run(&self, adapter: &Adapter) {
        // Tables that no one has compared with the base's yet are none to be served.
        if !adapter.raw_tokens.is_empty() {
            return;
        }
        let spec = PoolSpec::for_adapters([adapter], 1, DType::F32).unwrap();
        if spec.sites.is_empty() {
            return;
        }
        let loaded = LoraWeights::load(&self.gpu, spec, &[LoraAdapterInput { name: "it", adapter }]);
        let weights = match loaded {
            // A bias or gain beyond what two halves of a number can hold, and the like, is named as such.
            Err(Error::Overflow { .. }) => return,
            other => other.unwrap(),
        };
        let (gpu, pool) = (&*self.gpu, weights.storage());
        let plan = weights.plan([(SlotRef::Slot(0), 1.0)]).unwrap();
        let applier = Applier::new(gpu, pool, DType::F32, plan.capacity()).unwrap();
        for (site, spec) in pool.sites().iter().enumerate() {
            let Some(pair) = adapter.pairs.iter().find(|pair| pair.site == spec.id) else { continue };
            let y = Matrix::new(gpu.alloc(4 * u64::from(spec.out_features), "y").unwrap(), spec.out_features);
            let output = Output { site, y: &y };
            match spec.kind {
                SiteKind::Linear => {
                    let ones = 1f32.to_le_bytes().repeat(spec.in_features as usize);
                    let x = Matrix::new(gpu.alloc(ones.len() as u64, "x").unwrap(), spec.in_features);
                    gpu.submit(&mut |encoder| {
                        encoder.write(x.region(), &ones)?;
                        applier.write_batch(encoder, &plan, plan.capacity())?;
                        applier.encode(encoder, pool, Op::Bgmv, plan.capacity(), &x, &[output])
                    })
                    .unwrap()
                }
                SiteKind::Embedding => {
                    let ids = gpu.alloc(4, "ids").unwrap();
                    gpu.submit(&mut |encoder| {
                        applier.write_batch(encoder, &plan, plan.capacity())?;
                        applier.encode_embedding(encoder, pool, Op::Bgmv, plan.capacity(), &ids, output)
                    })
                    .unwrap()
                }
                _ => continue,
            };
            let largest = largest(pair);
            let out = DType::F32.decode(&gpu.read(y.region()).unwrap());
            // Weights that are finite and huge may well leave the range of f32 when they are multiplied.
            assert!(largest > 1e37 || out.iter().all(|y| y.is_finite()), "{}: {out:?}", spec.id.path);
            assert!(largest > 1e37 || out.iter().all(|y| f64::from(y.abs()) <= largest * 1.001 + 1e-30));
        }
    }

    fn write_single(&self, at: usize, dice: &mut impl Rng) -> Written {
        let mut config = self.config(at, dice);
        let mut weights = self.seeds[at].files.bytes();
        for _ in 0..dice.random_range(1..=2) {
            match dice.random_range(0..8) {
                0..=3 => weights = damage_header(&weights, dice),
                4..=5 => config = damage_config(&config, dice),
                6 => damage_bytes(&mut weights, dice),
                _ => damage_bytes(&mut config, dice),
            }
        }
        self.write(vec![(WEIGHTS, weights), (CONFIG, config)])
    }

    fn write_shards(&self, seed: usize, dice: &mut impl Rng) -> Written {
        let mut config = self.config(seed, dice);
        let whole = &self.seeds[seed].files;
        let (first, second) = whole.tensors.split_at(dice.random_range(0..=whole.tensors.len()));
        let mut map = Map::new();
        let mut shards = Vec::new();
        for (name, tensors) in SHARDS.into_iter().zip([first, second]) {
            map.extend(tensors.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
            shards.push((name, Files { config: json!({}), tensors: tensors.to_vec() }.bytes()));
        }
        let mut index = json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string().into_bytes();
        for _ in 0..dice.random_range(1..=2) {
            let shard = dice.random_range(0..2);
            match dice.random_range(0..6) {
                0 | 1 => index = damage_index(&index, dice),
                2 => shards[shard].1 = damage_header(&shards[shard].1, dice),
                3 => damage_bytes(&mut shards[shard].1, dice),
                4 => damage_bytes(&mut index, dice),
                _ => config = damage_config(&config, dice),
            }
        }
        shards.push((INDEX, index));
        shards.push((CONFIG, config));
        if dice.random_ratio(1, 20) {
            shards.push((WEIGHTS, whole.bytes()));
        }
        if dice.random_ratio(1, 20) {
            shards.remove(dice.random_range(0..2usize));
        }
        self.write(shards)
    }

    fn write_gguf(&self, dice: &mut impl Rng) -> Written {
        let mut gguf = self.gguf.clone();
        for _ in 0..dice.random_range(0..=2) {
            damage_gguf(&mut gguf, dice);
        }
        let mut bytes = gguf.bytes();
        if dice.random_ratio(1, 3) {
            damage_bytes(&mut bytes, dice);
        }
        self.write(vec![(GGUF, bytes)])
    }

    fn config(&self, seed: usize, dice: &mut impl Rng) -> Vec<u8> {
        let patterns = seed == 0 && dice.random_ratio(1, 4);
        let config = if patterns { &self.patterns } else { &self.seeds[seed].files.config };
        serde_json::to_vec(config).unwrap()
    }

    fn write(&self, files: Vec<(&str, Vec<u8>)>) -> Written {
        let path = |name: &str| -> PathBuf { self.dir.path().join(name) };
        files.iter().for_each(|(name, bytes)| fs::write(path(name), bytes).unwrap());
        let config = files.iter().find(|(name, _)| *name == CONFIG).map_or(&[][..], |(_, bytes)| bytes);
        let mut fields: Vec<String> =
            ["r", "lora_alpha", "adapter.lora.alpha", "rank_pattern", "alpha_pattern", "key \""]
                .map(str::to_owned)
                .into();
        if let Ok(Value::Object(map)) = serde_json::from_slice(config) {
            fields.extend(map.keys().filter(|key| !key.is_empty()).map(|key| key.chars().take(60).collect()));
        }
        Written { files: files.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect(), fields }
    }
}

/// What was written, and the fields that an error may name.
struct Written {
    files: Vec<(String, Vec<u8>)>,
    fields: Vec<String>,
}

/// The largest magnitude that an output of a row of ones, or what leads to it, can have.
fn largest(pair: &HostPair) -> f64 {
    let (a, b) = (pair.a.values(), pair.b.values());
    let sums: Vec<f64> = a.chunks(pair.in_features()).map(|row| row.iter().map(|v| f64::from(v.abs())).sum()).collect();
    let outputs = b.chunks(pair.rank());
    let outputs = outputs.map(|row| row.iter().zip(&sums).map(|(b, sum)| f64::from(b.abs()) * sum).sum::<f64>());
    let before = outputs.chain(sums.iter().copied()).fold(0.0, f64::max);
    let most = |values: &[f32]| values.iter().map(|v| f64::from(v.abs())).fold(0.0, f64::max);
    let (gain, offset) = pair.vectors.as_ref().map_or((1.0, 0.0), |v| (most(&v.gain), most(&v.offset)));
    before.max(before * f64::from(pair.scale.abs()) * gain.max(1.0) + offset)
}

/// Faults of which the directory is the place.
fn of_directory(code: Code) -> bool {
    matches!(code, Code::ConfigMissing | Code::WeightsMissing | Code::SeveralAdapters | Code::ShardIndex)
}

/// Faults of which some tensor is the place.
fn of_tensor(code: Code) -> bool {
    matches!(
        code,
        Code::UnknownTensor
            | Code::TensorDuplicate
            | Code::Unpaired
            | Code::TensorEmpty
            | Code::TensorShape
            | Code::Swapped
            | Code::RankMismatch
            | Code::RankLimit
            | Code::Dtype
            | Code::NotFinite
            | Code::Range
            | Code::Prefix
            | Code::NotInBase
            | Code::BaseShape
            | Code::Vocabulary
            | Code::FusedMismatch
            | Code::ExpertLora
            | Code::FileOffsets
            | Code::ShardTensor
    )
}

/// Faults of which some field of a config is the place.
fn of_field(code: Code) -> bool {
    matches!(
        code,
        Code::ConfigType | Code::ConfigRank | Code::ConfigAlpha | Code::ConfigDuplicate | Code::ConfigUnknownField
    )
}

fn pick<'a, T>(dice: &mut impl Rng, from: &'a [T]) -> &'a T {
    &from[dice.random_range(0..from.len())]
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
    pick(dice, &numbers).clone()
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
fn damage_config(bytes: &[u8], dice: &mut impl Rng) -> Vec<u8> {
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
fn damage_index(bytes: &[u8], dice: &mut impl Rng) -> Vec<u8> {
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
fn damage_gguf(gguf: &mut Gguf, dice: &mut impl Rng) {
    let odd = [0, 1, 2, 3, 7, 31, 33, 48, 1 << 20, 1 << 31, 1 << 33, 1 << 62, u64::MAX];
    let tensor = dice.random_range(0..gguf.tensors.len());
    let meta = dice.random_range(0..gguf.meta.len());
    let name = gguf.tensors[tensor].0.clone();
    match dice.random_range(0..13) {
        0 => gguf.version = *pick(dice, &[0, 1, 2, 3, 4, 3 << 24, u32::MAX]),
        1 => gguf.meta[meta].1 = dice.random_range(0..15),
        2 => damage_bytes(&mut gguf.meta[meta].2, dice),
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
