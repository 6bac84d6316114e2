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

use super::damage;
use super::gguf::Gguf;
use super::{Files, base, fixture_files};

/// What a load may take beyond four times its files: path strings, messages, compiled patterns.
const SLACK: u64 = 1 << 20;

const CONFIG: &str = "adapter_config.json";
pub const WEIGHTS: &str = "adapter_model.safetensors";
const INDEX: &str = "adapter_model.safetensors.index.json";
pub const SHARDS: [&str; 2] = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"];
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
                0..=3 => weights = damage::header(&weights, dice),
                4..=5 => config = damage::config(&config, dice),
                6 => damage::bytes(&mut weights, dice),
                _ => damage::bytes(&mut config, dice),
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
                0 | 1 => index = damage::index(&index, dice),
                2 => shards[shard].1 = damage::header(&shards[shard].1, dice),
                3 => damage::bytes(&mut shards[shard].1, dice),
                4 => damage::bytes(&mut index, dice),
                _ => config = damage::config(&config, dice),
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
            damage::gguf(&mut gguf, dice);
        }
        let mut bytes = gguf.bytes();
        if dice.random_ratio(1, 3) {
            damage::bytes(&mut bytes, dice);
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
