//! What the loader's tests share: the fixtures, a reader of safetensors of its own, and a writer of adapters, hostile
//! ones included.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub mod gguf;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use lorapool::adapter::{Adapter, BaseModel, Code, HostPair, Reject};
use lorapool::{Error, Result};
use serde_json::{Map, Value, json};

/// `tests/fixtures`, from the crate's own folder or from `tests/fuzz`.
pub fn fixtures() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    [here.join("tests/fixtures"), here.join("../fixtures")].into_iter().find(|dir| dir.is_dir()).unwrap()
}

/// A JSON file.
pub fn json_file(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A fixture base.
pub fn base(name: &str) -> BaseModel {
    BaseModel::open(fixtures().join("_base").join(name)).unwrap()
}

/// The refusal that a load must end in.
pub fn refusal(loaded: Result<Adapter>) -> Reject {
    match loaded {
        Err(Error::Reject(reject)) => *reject,
        other => panic!("expected a refusal, found {other:?}"),
    }
}

/// Asserts a refusal's code, and that its message names what it must.
pub fn assert_refused(loaded: Result<Adapter>, code: Code, named: &[&str]) {
    let reject = refusal(loaded);
    assert_eq!(reject.code, code, "{reject}");
    for name in named {
        assert!(reject.message.contains(name), "{name:?} is not named: {reject}");
    }
}

/// A tensor read by the tests themselves.
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// Reads a well-formed safetensors file, without the loader or the safetensors crate.
pub fn read_tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let number = |v: &Value| v.as_u64().unwrap() as usize;
    let tensor = |info: &Value| {
        let range = number(&info["data_offsets"][0])..number(&info["data_offsets"][1]);
        let data = &bytes[8 + header_len..][range];
        let values = match info["dtype"].as_str().unwrap() {
            "F64" => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            "F32" => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
            "F16" => data.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).into()).collect(),
            "BF16" => data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).into()).collect(),
            "I64" => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            other => panic!("dtype {other}"),
        };
        Tensor { shape: info["shape"].as_array().unwrap().iter().map(number).collect(), values }
    };
    header.iter().filter(|(name, _)| *name != "__metadata__").map(|(name, info)| (name.clone(), tensor(info))).collect()
}

/// `scale * B * A * x` for each row of `x`, in f64.
pub fn delta(pair: &HostPair, scale: f64, x: &[f64]) -> Vec<f64> {
    let (a, b) = (pair.a.values(), pair.b.values());
    let (rank, inputs) = (pair.rank(), pair.in_features());
    let mut out = Vec::new();
    for x in x.chunks(inputs) {
        let z: Vec<f64> = a.chunks(inputs).map(|a| a.iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum()).collect();
        for b in b.chunks(rank) {
            let sum: f64 = b.iter().zip(&z).map(|(b, z)| f64::from(*b) * z).sum();
            out.push(scale * sum);
        }
    }
    out
}

/// The pair at a path.
#[track_caller]
pub fn pair_at<'a>(adapter: &'a Adapter, path: &str) -> &'a HostPair {
    let found = adapter.pairs.iter().find(|pair| &*pair.site.path == path);
    found.unwrap_or_else(|| {
        panic!("no {path} among {:?}", adapter.pairs.iter().map(|p| &p.site.path).collect::<Vec<_>>())
    })
}

/// A well-formed adapter of a fixture, to be written again with changes.
pub fn fixture_files(case: &str) -> Files {
    let bytes = fs::read(fixtures().join(case).join("adapter_model.safetensors")).unwrap();
    let config = json_file(&fixtures().join(case).join("adapter_config.json"));
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let number = |v: &Value| v.as_u64().unwrap() as usize;
    let tensor = |(name, info): (&String, &Value)| {
        let range = number(&info["data_offsets"][0])..number(&info["data_offsets"][1]);
        let dtypes = ["F32", "F16", "BF16", "F64"];
        let dtype = dtypes.into_iter().find(|dtype| info["dtype"] == **dtype).unwrap();
        let shape = info["shape"].as_array().unwrap().iter().map(number).collect();
        (name.clone(), dtype, shape, bytes[8 + header_len..][range].to_vec())
    };
    Files { config, tensors: header.iter().filter(|(name, _)| *name != "__metadata__").map(tensor).collect() }
}

/// An adapter or base to be written, well-formed until told otherwise.
#[derive(Clone, Debug)]
pub struct Files {
    pub config: Value,
    pub tensors: Vec<(String, &'static str, Vec<usize>, Vec<u8>)>,
}

impl Files {
    /// An adapter of rank `r` and alpha `2r` without tensors.
    pub fn lora(r: usize) -> Self {
        Self { config: json!({"peft_type": "LORA", "r": r, "lora_alpha": 2 * r}), tensors: Vec::new() }
    }

    /// Sets a config field.
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.config[field] = value;
        self
    }

    /// Adds an F32 tensor of small known values.
    pub fn tensor(mut self, name: &str, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        let values = (0..count).flat_map(|i| (i as f32 / 64.0 - 0.25).to_le_bytes()).collect();
        self.tensors.push((name.to_owned(), "F32", shape.to_vec(), values));
        self
    }

    /// Adds a pair with PEFT's key for `module`.
    pub fn pair(self, module: &str, rank: usize, inputs: usize, outputs: usize) -> Self {
        self.raw_pair(&format!("base_model.model.{module}"), rank, inputs, outputs)
    }

    /// Adds a pair under any prefix.
    pub fn raw_pair(self, module: &str, rank: usize, inputs: usize, outputs: usize) -> Self {
        self.tensor(&format!("{module}.lora_A.weight"), &[rank, inputs])
            .tensor(&format!("{module}.lora_B.weight"), &[outputs, rank])
    }

    /// The bytes of the safetensors file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut header = Map::new();
        let mut data = Vec::new();
        for (name, dtype, shape, bytes) in &self.tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            data.extend_from_slice(bytes);
        }
        file_bytes(&serde_json::to_vec(&header).unwrap(), &data)
    }

    /// Writes an adapter's two files.
    pub fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("adapter_config.json"), serde_json::to_vec_pretty(&self.config).unwrap()).unwrap();
        fs::write(dir.join("adapter_model.safetensors"), self.bytes()).unwrap();
    }

    /// Loads it from a directory of its own.
    pub fn load(&self, base: Option<&BaseModel>) -> Result<Adapter> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        lorapool::adapter::load(dir.path(), base)
    }

    /// The base of these weights, `config` being its config.json.
    pub fn base(&self) -> Result<BaseModel> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), serde_json::to_vec(&self.config).unwrap()).unwrap();
        if !self.tensors.is_empty() {
            fs::write(dir.path().join("model.safetensors"), self.bytes()).unwrap();
        }
        BaseModel::open(dir.path())
    }
}

/// A safetensors file of any header and data.
pub fn file_bytes(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Codes of an adapter's notices.
pub fn notice_codes(adapter: &Adapter) -> Vec<&'static str> {
    adapter.notices.iter().map(|notice| notice.code).collect()
}
