//! An adapter's directory to an [`Adapter`]: every tensor is applied, handed to the host, or named in an error.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use mmap_io::MemoryMappedFile;
use safetensors::Dtype;

use super::base::BaseModel;
use super::config::{PeftAdapterConfig, Targets};
use super::file;
use super::header::{Header, TensorInfo};
use super::json::excerpt;
use super::keys::{Key, Part};
use super::pattern::{Pattern, names};
use super::reject::{Code, Loaded, Reject};
use super::resolve::{Wanted, resolve};
use super::site::{LoraModule, SiteId};
use super::weights::{Adapter, Fate, HostMatrix, HostPair, HostTensor, Notice, TensorFate};
use crate::contract::MAX_RANK;
use crate::dtype::DType;
use crate::error::Result;

/// Loads the adapter in `dir` into host memory, checked against `base` where one is given.
///
/// Nothing is kept of an adapter that is refused, and no device is touched. Memory stays within a few times the size
/// of the files.
///
/// # Errors
/// [`Error::Reject`](crate::Error::Reject), with the [`Code`] of the fault and a message that names file, tensor or
/// field, what was found and what was expected.
pub fn load(dir: impl AsRef<Path>, base: Option<&BaseModel>) -> Result<Adapter> {
    Ok(Loader::default().load(dir.as_ref(), base)?)
}

/// What is known so far: a refused adapter's audit shows it.
#[derive(Debug, Default)]
pub(super) struct Loader {
    pub notices: Vec<Notice>,
    pub config: Option<PeftAdapterConfig>,
    /// Tensors in the file.
    pub total: usize,
}

impl Loader {
    pub fn load(&mut self, dir: &Path, base: Option<&BaseModel>) -> Loaded<Adapter> {
        let dir = self.locate(dir)?;
        let config = PeftAdapterConfig::read(&dir.join(CONFIG), &mut self.notices)?;
        self.config = Some(config.clone());
        let path = dir.join(WEIGHTS);
        if !path.exists() {
            return Err(weights_missing(&dir));
        }
        let header = Header::read(&path)?;
        self.total = header.tensors.len();
        if header.tensors.is_empty() {
            let message = format!("{}: holds no tensor; the adapter would answer like the base", path.display());
            return Err(Reject::new(Code::NoTensors, message));
        }
        let map = file::map(&path)?;
        let file = path.display().to_string();
        let mut adapter =
            Reading { file: &file, map: &map, config: &config, base, notices: &mut self.notices }.adapter(&header)?;
        adapter.notices = std::mem::take(&mut self.notices);
        Ok(adapter)
    }

    /// The directory that holds the files: `dir`, or its only sub-folder that does (PEFT saves adapters that have a
    /// name of their own in a folder of that name).
    fn locate(&mut self, dir: &Path) -> Loaded<PathBuf> {
        let meta = std::fs::metadata(dir).map_err(|e| file::unreadable(dir, &e))?;
        if !meta.is_dir() {
            let message = format!("{}: found a file, expected the adapter's directory", dir.display());
            return Err(Reject::new(Code::NotADirectory, message));
        }
        if dir.join(CONFIG).exists() {
            return Ok(dir.to_owned());
        }
        let entries = std::fs::read_dir(dir).map_err(|e| file::unreadable(dir, &e))?;
        let mut inner: Vec<_> =
            entries.filter_map(|e| Some(e.ok()?.path())).filter(|path| path.join(CONFIG).is_file()).collect();
        inner.sort();
        match &inner[..] {
            [] => {
                let message = format!("{}: found no {CONFIG}", dir.display());
                Err(Reject::new(Code::ConfigMissing, message))
            }
            [only] => {
                let message = format!("{}: the adapter is in its sub-folder {}", dir.display(), only.display());
                self.notices.push(Notice { code: "N_SUBFOLDER", message });
                Ok(only.clone())
            }
            several => {
                let found: Vec<_> = several.iter().take(8).map(|p| p.display().to_string()).collect();
                let message = format!(
                    "{}: holds {} adapters, expected one; name one of {}",
                    dir.display(),
                    several.len(),
                    found.join(", ")
                );
                Err(Reject::new(Code::SeveralAdapters, message))
            }
        }
    }
}

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

fn weights_missing(dir: &Path) -> Box<Reject> {
    for pickle in ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin"] {
        let path = dir.join(pickle);
        if path.exists() {
            let message = format!(
                "{}: the weights are a pickle, which can run code when it is read; convert it to {WEIGHTS} \
                 (PEFT: save_pretrained with safe_serialization=True)",
                path.display()
            );
            return Reject::new(Code::WeightsPickle, message);
        }
    }
    Reject::new(Code::WeightsMissing, format!("{}: found no {WEIGHTS}", dir.display()))
}

/// Modules whose whole weights the host applies: the heads of tasks.
const HEADS: &[&str] = &[
    "classifier",
    "score",
    "pre_classifier",
    "qa_outputs",
    "classification_head",
    "v_head",
    "value_head",
    "reward_head",
    "regression_head",
];

/// What a tensor is for.
enum Use {
    A,
    B,
    ForHost,
    BaseCopy,
}

/// One file being read.
struct Reading<'a> {
    file: &'a str,
    map: &'a MemoryMappedFile,
    config: &'a PeftAdapterConfig,
    base: Option<&'a BaseModel>,
    notices: &'a mut Vec<Notice>,
}

impl Reading<'_> {
    fn adapter(mut self, header: &Header) -> Loaded<Adapter> {
        let keys: Vec<_> = header.tensors.iter().map(|t| Key::parse(&t.name)).collect();
        self.check_adapter_names(header, &keys)?;
        let uses = match self.judge_all(header, &keys) {
            Err(reject) if reject.code == Code::UnknownTensor => return Err(self.all_unknown(header, &keys)),
            other => other?,
        };
        self.check_parts()?;
        // Pairs by module.
        let mut sides: BTreeMap<&str, [Option<&TensorInfo>; 2]> = BTreeMap::new();
        for ((tensor, key), used) in header.tensors.iter().zip(&keys).zip(&uses) {
            let side = match used {
                Use::A => 0,
                Use::B => 1,
                _ => continue,
            };
            if let Some(first) = sides.entry(key.module).or_default()[side].replace(tensor) {
                let message =
                    format!("{} and {:?} are the same part of one module", self.at(first), excerpt(&tensor.name));
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
        }
        let mut pairs = Vec::with_capacity(sides.len());
        for (module, [a, b]) in &sides {
            match (a, b) {
                (Some(a), Some(b)) => pairs.push((*module, *a, *b)),
                (Some(one), None) | (None, Some(one)) => {
                    let other = if a.is_some() { "lora_B" } else { "lora_A" };
                    let message = format!("{}: {module} has no {other} beside it", self.at(one));
                    return Err(Reject::new(Code::Unpaired, message));
                }
                (None, None) => {}
            }
        }
        if pairs.is_empty() {
            let message = format!(
                "{}: none of its {} tensors is a LoRA pair; the adapter would answer like the base",
                self.file,
                header.tensors.len()
            );
            return Err(Reject::new(Code::NoTensors, message));
        }
        // Shapes before places: a damaged tensor is named as such whatever the base.
        let scales = self.config.scales().map_err(|e| self.pattern(e))?;
        let scale = self.narrow_scale("modules that no pattern names", self.config.scaling())?;
        let mut rated = Vec::with_capacity(pairs.len());
        for (module, a, b) in pairs {
            let (rank, scale) = scales.of(module).map_err(|e| self.pattern(e))?;
            self.check_pair(module, a, b, rank)?;
            rated.push((module, a, b, self.narrow_scale(module, scale)?));
        }
        let wanted: Vec<_> =
            rated.iter().map(|(_, a, ..)| Wanted { name: &a.name, key: Key::parse(&a.name) }).collect();
        let paths = resolve(self.file, &wanted, self.base, self.notices)?;
        let sites = self.sites(rated.iter().map(|(module, ..)| paths[module].as_str()));
        self.check_targets(rated.iter().map(|(module, ..)| *module));
        let mut host = Vec::with_capacity(rated.len());
        for ((_, a, b, scale), site) in rated.into_iter().zip(sites) {
            self.check_base(&site, a, b)?;
            let (a, b) = (self.matrix(a)?, self.matrix(b)?);
            host.push(HostPair { site, a, b, scale });
        }
        let mut unapplied = Vec::new();
        let mut tensors = Vec::with_capacity(header.tensors.len());
        let mut copies = Vec::new();
        for ((tensor, key), used) in header.tensors.iter().zip(&keys).zip(&uses) {
            let fate = match used {
                Use::A | Use::B => Fate::Applied,
                Use::BaseCopy => {
                    copies.push(&*tensor.name);
                    Fate::BaseCopy
                }
                Use::ForHost => {
                    let leaf = tensor.name.rsplit('.').next().unwrap_or_default();
                    let (dtype, bytes) = self.elements(tensor)?;
                    let name = format!("{}.{leaf}", key.module);
                    unapplied.push(HostTensor { name, dtype, shape: tensor.shape.to_vec(), bytes });
                    Fate::ForHost
                }
            };
            let site = paths.get(key.module).map_or(key.module, String::as_str).into();
            let (name, dtype) = (tensor.name.to_string(), tensor.dtype.to_string());
            tensors.push(TensorFate { name, dtype, shape: tensor.shape.to_vec(), fate, site });
        }
        let wide: Vec<_> = header.tensors.iter().filter(|t| t.dtype == Dtype::F64).map(|t| &*t.name).collect();
        if !wide.is_empty() {
            self.note("N_F64", format!("F64, rounded to F32: {}", listed(&wide)));
        }
        self.check_widths(&host);
        if !unapplied.is_empty() {
            let found: Vec<_> = unapplied.iter().map(|t| t.name.as_str()).collect();
            self.note("N_HEAD", format!("not applied here, for the host to apply: {}", listed(&found)));
        }
        if !copies.is_empty() {
            self.note("N_BASE_COPY", format!("equal to the base's own and passed over: {}", listed(&copies)));
        }
        let mut adapter = Adapter::new(self.config.clone(), scale, host, unapplied);
        adapter.tensors = tensors;
        Ok(adapter)
    }

    fn note(&mut self, code: &'static str, message: String) {
        self.notices.push(Notice { code, message: format!("{}: {message}", self.file) });
    }

    fn at(&self, tensor: &TensorInfo) -> String {
        format!("{}: tensor {:?}", self.file, excerpt(&tensor.name))
    }

    fn pattern(&self, error: super::PatternError) -> Box<Reject> {
        Reject::new(Code::ConfigPattern, format!("{} beside {}: {error}", CONFIG, self.file))
    }

    /// One adapter a file: keys with two adapters' names would be mixed into one.
    fn check_adapter_names(&self, header: &Header, keys: &[Key<'_>]) -> Loaded<()> {
        let mut first: Option<(&TensorInfo, Option<&str>)> = None;
        for (tensor, key) in header.tensors.iter().zip(keys) {
            if !matches!(key.part, Part::A | Part::B) {
                continue;
            }
            match first {
                None => first = Some((tensor, key.adapter)),
                Some((before, name)) if name != key.adapter => {
                    let said = |name: Option<&str>| name.map_or("no name".to_owned(), |n| format!("{:?}", excerpt(n)));
                    let message = format!(
                        "{} is of adapter {}, {:?} of {}; expected one adapter",
                        self.at(tensor),
                        said(key.adapter),
                        excerpt(&before.name),
                        said(name)
                    );
                    return Err(Reject::new(Code::SeveralAdapters, message));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// What each tensor is for. Kinds that are refused come before copies that differ: they say more.
    fn judge_all(&self, header: &Header, keys: &[Key<'_>]) -> Loaded<Vec<Use>> {
        let (mut uses, mut later) = (Vec::with_capacity(keys.len()), None);
        for (tensor, key) in header.tensors.iter().zip(keys) {
            match self.judge(tensor, key) {
                Ok(used) => uses.push(used),
                Err(reject) if reject.code == Code::BaseLayer => later = later.or(Some(reject)),
                Err(reject) => return Err(reject),
            }
        }
        later.map_or(Ok(uses), Err)
    }

    /// What a tensor is for, by its key and the config.
    fn judge(&self, tensor: &TensorInfo, key: &Key<'_>) -> Loaded<Use> {
        let refuse = |code: Code, what: &str| {
            Err(Reject::new(code, format!("{} {what}: {} Not supported", self.at(tensor), code.describe())))
        };
        match key.part {
            Part::A | Part::B if key.module.is_empty() => refuse(Code::UnknownTensor, "names no module"),
            Part::A | Part::B => match self.parameter(key.module) {
                Some(code) => refuse(code, &format!("is for {}", key.module)),
                None if key.part == Part::A => Ok(Use::A),
                None => Ok(Use::B),
            },
            Part::BiasOfB => refuse(Code::LoraBias, "is a bias of lora_B"),
            Part::EmbeddingA | Part::EmbeddingB => refuse(Code::EmbeddingLora, "is for an embedding"),
            Part::Magnitude => refuse(Code::Dora, "holds magnitudes"),
            Part::Tokens => refuse(Code::TrainableTokens, "holds token rows"),
            Part::BaseBias => refuse(Code::BaseBias, "is a bias of the base"),
            Part::BaseWeight => self.judge_copy(tensor, key, Code::BaseLayer),
            Part::Whole => self.judge_whole(tensor, key),
            Part::Foreign(method) => {
                let code = match method {
                    "AdaLoRA" => Code::PeftAdalora,
                    "KaSA" => Code::Kasa,
                    "IA3" => Code::PeftIa3,
                    "LoHa" => Code::PeftLoha,
                    "LoKr" => Code::PeftLokr,
                    "VeRA" => Code::PeftVera,
                    "OFT" => Code::PeftOft,
                    "prompt tuning" => Code::PeftPrompt,
                    _ => Code::UnknownTensor,
                };
                let message = format!("{} is a part of {method}, expected lora_A and lora_B", self.at(tensor));
                Err(Reject::new(code, message))
            }
            Part::Original | Part::Unknown => refuse(Code::UnknownTensor, "has no place"),
        }
    }

    /// Modules that are no linears: expert weights and other parameters.
    fn parameter(&self, module: &str) -> Option<Code> {
        if module.split('.').any(|segment| segment == "experts") {
            return Some(Code::ExpertLora);
        }
        let module = module.strip_suffix(".base_layer").unwrap_or(module);
        let of = |parameter: &String| parameter.rsplit_once('.').is_some_and(|(owner, _)| names(owner, module));
        self.config.target_parameters.iter().any(of).then_some(Code::RouterLora)
    }

    /// A whole weight or bias: a task's head is the host's, anything else would be lost.
    fn judge_whole(&self, tensor: &TensorInfo, key: &Key<'_>) -> Loaded<Use> {
        let saved = key.adapter.is_some() || self.config.modules_to_save.iter().any(|name| names(name, key.module));
        let head = key.module.split('.').any(|segment| HEADS.contains(&segment))
            && !key.module.split('.').any(|segment| segment.bytes().all(|b| b.is_ascii_digit()));
        if head {
            return Ok(Use::ForHost);
        }
        if saved {
            let message = format!(
                "{} replaces {} of the base whole: {} Not supported",
                self.at(tensor),
                key.module,
                Code::ModulesToSave.describe()
            );
            return Err(Reject::new(Code::ModulesToSave, message));
        }
        if tensor.name.ends_with(".bias") && self.config.bias != "none" {
            let message =
                format!("{} is a bias of the base: {} Not supported", self.at(tensor), Code::BaseBias.describe());
            return Err(Reject::new(Code::BaseBias, message));
        }
        // PEFT adds these two when it finds the vocabulary resized, or is asked to.
        let leaf = key.module.rsplit('.').next().unwrap_or(key.module);
        if matches!(leaf, "embed_tokens" | "lm_head" | "wte" | "embed_in" | "embed_out" | "word_embeddings" | "shared")
        {
            return self.judge_copy(tensor, key, Code::ModulesToSave);
        }
        let message = format!("{}: {}", self.at(tensor), Code::UnknownTensor.describe());
        Err(Reject::new(Code::UnknownTensor, message))
    }

    /// A copy of the base's weight may be passed over when it is one.
    fn judge_copy(&self, tensor: &TensorInfo, key: &Key<'_>, code: Code) -> Loaded<Use> {
        let name = format!("{}.weight", key.module);
        let Some((path, of_base)) = self.base.and_then(|base| base.weight(&name)) else {
            let message = format!(
                "{} is said to be the base's {name}, but there is no base with that weight to compare it with",
                self.at(tensor)
            );
            return Err(Reject::new(code, message));
        };
        let map = file::map(path)?;
        let of_base_bytes = bytes_of(&map, path, of_base)?;
        let bytes = bytes_of(self.map, Path::new(self.file), tensor)?;
        let equal = tensor.shape == of_base.shape
            && match (Float::of(tensor.dtype), Float::of(of_base.dtype)) {
                (Some(a), Some(b)) if a == b => bytes == of_base_bytes,
                (Some(a), Some(b)) => a.values(bytes).eq(b.values(of_base_bytes)),
                _ => false,
            };
        if equal {
            return Ok(Use::BaseCopy);
        }
        let message = format!(
            "{} ({} {:?}) differs from {name} of {} ({} {:?}), so it replaces a weight of the base: not supported",
            self.at(tensor),
            tensor.dtype,
            tensor.shape,
            path.display(),
            of_base.dtype,
            of_base.shape
        );
        Err(Reject::new(code, message))
    }

    /// Config fields that promise tensors of a kind that is refused.
    fn check_parts(&mut self) -> Loaded<()> {
        let config = self.config;
        let refuse = |code: Code, field: &str| {
            let message = format!("{CONFIG} beside {}: {field} is set: {} Not supported", self.file, code.describe());
            Err(Reject::new(code, message))
        };
        if config.use_dora {
            return refuse(Code::Dora, "use_dora");
        }
        if config.lora_bias {
            return refuse(Code::LoraBias, "lora_bias");
        }
        if config.trainable_token_indices.is_some() {
            return refuse(Code::TrainableTokens, "trainable_token_indices");
        }
        if config.bias != "none" {
            self.note("N_BIAS_ABSENT", format!("the config says bias {:?}, but no bias was saved", config.bias));
        }
        Ok(())
    }

    /// All tensors that have no place, in one message.
    fn all_unknown(&self, header: &Header, keys: &[Key<'_>]) -> Box<Reject> {
        let unknown = |(tensor, key): (&TensorInfo, &Key<'_>)| match self.judge(tensor, key) {
            Err(reject) if reject.code == Code::UnknownTensor => Some(tensor.name.to_string()),
            _ => None,
        };
        let found: Vec<_> = header.tensors.iter().zip(keys).filter_map(unknown).collect();
        let found: Vec<_> = found.iter().map(String::as_str).collect();
        let message = format!(
            "{}: {} of {} tensors are no part of a LoRA adapter and can't be ignored: {}",
            self.file,
            found.len(),
            header.tensors.len(),
            listed(&found)
        );
        Reject::new(Code::UnknownTensor, message)
    }

    /// Dimensions of a pair, and its rank against the config's.
    fn check_pair(&self, module: &str, a: &TensorInfo, b: &TensorInfo, rank: usize) -> Loaded<()> {
        for (tensor, part, expected) in [(a, "lora_A", "[rank, in]"), (b, "lora_B", "[out, rank]")] {
            let shape = &tensor.shape;
            let (code, why) = match shape.len() {
                _ if shape.contains(&0) => (Code::TensorEmpty, Code::TensorEmpty.describe()),
                2 => continue,
                3.. => (Code::ConvLora, Code::ConvLora.describe()),
                _ => (Code::TensorShape, "Was it gathered before it was saved (DeepSpeed, FSDP)?"),
            };
            let message = format!("{} has shape {shape:?}, expected {expected} for {part}. {why}", self.at(tensor));
            return Err(Reject::new(code, message));
        }
        let ([a_rows, a_cols], [b_rows, b_cols]) = (&*a.shape, &*b.shape) else { return Ok(()) };
        let swapped = a_cols == b_rows && (a_rows != b_cols || (*a_cols == rank && *a_rows != rank));
        if swapped {
            let message = format!(
                "{} has shape {:?} and lora_B {:?}, expected [{rank}, in] and [out, {rank}]: the two are exchanged or transposed",
                self.at(a),
                a.shape,
                b.shape
            );
            return Err(Reject::new(Code::Swapped, message));
        }
        if a_rows != b_cols {
            let message = format!(
                "{} has shape {:?}, so rank {a_rows}, but lora_B has {:?}, so rank {b_cols}; expected one rank",
                self.at(a),
                a.shape,
                b.shape
            );
            return Err(Reject::new(Code::TensorShape, message));
        }
        if *a_rows != rank {
            let message = format!(
                "{} has rank {a_rows}, but the config (r or rank_pattern) gives {module} rank {rank}",
                self.at(a)
            );
            return Err(Reject::new(Code::RankMismatch, message));
        }
        if rank > MAX_RANK as usize {
            let message = format!("{} has rank {rank}, expected at most {MAX_RANK}", self.at(a));
            return Err(Reject::new(Code::RankLimit, message));
        }
        Ok(())
    }

    /// The scale as kernels take it.
    fn narrow_scale(&self, module: &str, scale: f64) -> Loaded<f32> {
        let narrow = scale as f32;
        if !narrow.is_finite() {
            let message = format!(
                "{CONFIG} beside {}: lora_alpha or alpha_pattern scales {module} by {scale:e}, beyond the range of f32",
                self.file
            );
            return Err(Reject::new(Code::ConfigAlpha, message));
        }
        Ok(narrow)
    }

    /// The sites at these paths, named as in the base.
    fn sites<'p>(&self, paths: impl Iterator<Item = &'p str>) -> Vec<SiteId> {
        match self.base {
            Some(base) => {
                paths.map(|p| base.linear(p).map_or_else(|| SiteId::from_path(p), |l| l.site.clone())).collect()
            }
            None => SiteId::of_paths(paths),
        }
    }

    /// Widths against the base's.
    fn check_base(&self, site: &SiteId, a: &TensorInfo, b: &TensorInfo) -> Loaded<()> {
        let Some((base, linear)) = self.base.and_then(|base| Some((base, base.linear(&site.path)?))) else {
            return Ok(());
        };
        let (inputs, outputs) = (a.shape[1], b.shape[0]);
        if inputs != linear.in_features {
            let message = format!(
                "{} has {inputs} columns, expected {}: the inputs of {} in {}",
                self.at(a),
                linear.in_features,
                site.path,
                base.source()
            );
            return Err(Reject::new(Code::BaseShape, message));
        }
        if outputs != linear.out_features {
            let head = matches!(site.path.rsplit('.').next(), Some("lm_head" | "embed_out" | "decoder"));
            let code = if head { Code::Vocabulary } else { Code::BaseShape };
            let message = format!(
                "{} has {outputs} rows, expected {}: the outputs of {} in {}",
                self.at(b),
                linear.out_features,
                site.path,
                base.source()
            );
            return Err(Reject::new(code, message));
        }
        Ok(())
    }

    fn matrix(&self, tensor: &TensorInfo) -> Loaded<HostMatrix> {
        let (dtype, bytes) = self.elements(tensor)?;
        Ok(HostMatrix { dtype, rows: tensor.shape[0], cols: tensor.shape[1], bytes })
    }

    /// A tensor's elements, copied out of the file; F64 is narrowed to F32.
    fn elements(&self, tensor: &TensorInfo) -> Loaded<(DType, Vec<u8>)> {
        let Some(float) = Float::of(tensor.dtype) else {
            let message = format!("{} has dtype {}, expected F32, F16, BF16 or F64", self.at(tensor), tensor.dtype);
            return Err(Reject::new(Code::Dtype, message));
        };
        let bytes = bytes_of(self.map, Path::new(self.file), tensor)?;
        let fault = |at: usize, code: Code, found: String| {
            let index = match *tensor.shape {
                [_, cols] => format!("[{}, {}]", at / cols, at % cols),
                _ => format!("[{at}]"),
            };
            Reject::new(code, format!("{}: element {index} is {found}", self.at(tensor)))
        };
        if let Some(at) = float.first_not_finite(bytes) {
            let value = float.values(bytes).nth(at).unwrap_or(f64::NAN);
            return Err(fault(at, Code::NotFinite, format!("{value}, expected a finite number")));
        }
        Ok(match float {
            Float::F32 => (DType::F32, bytes.to_vec()),
            Float::F16 => (DType::F16, bytes.to_vec()),
            Float::Bf16 => (DType::Bf16, bytes.to_vec()),
            Float::F64 => {
                let mut narrow = Vec::with_capacity(bytes.len() / 2);
                for (at, value) in float.values(bytes).enumerate() {
                    let single = value as f32;
                    if single.is_infinite() {
                        return Err(fault(at, Code::Range, format!("{value:e}, beyond the range of f32")));
                    }
                    narrow.extend_from_slice(&single.to_le_bytes());
                }
                (DType::F32, narrow)
            }
        })
    }

    /// Without a base, a module whose widths change from layer to layer is all that can be seen of tensors from
    /// another model. Some models are built so.
    fn check_widths(&mut self, pairs: &[HostPair]) {
        if self.base.is_some() {
            return;
        }
        let mut first: BTreeMap<&LoraModule, &HostPair> = BTreeMap::new();
        let mut odd = None;
        for pair in pairs {
            let before = *first.entry(&pair.site.module).or_insert(pair);
            if (before.in_features(), before.out_features()) != (pair.in_features(), pair.out_features()) {
                odd = odd.or(Some((before, pair)));
            }
        }
        if let Some((before, pair)) = odd {
            let message = format!(
                "widths change between layers: {} has {} inputs and {} outputs, {} has {} and {}; give the base to check them",
                before.site.path,
                before.in_features(),
                before.out_features(),
                pair.site.path,
                pair.in_features(),
                pair.out_features()
            );
            self.note("N_WIDTHS_VARY", message);
        }
    }

    /// `target_modules`, `layers_to_transform`: what they say and the tensors don't, and the reverse.
    fn check_targets<'m>(&mut self, modules: impl Iterator<Item = &'m str>) {
        let modules: Vec<_> = modules.collect();
        let outside = match &self.config.target_modules {
            Targets::None => Vec::new(),
            Targets::Pattern(all) if all.eq_ignore_ascii_case("all-linear") => Vec::new(),
            Targets::Pattern(expression) => match Pattern::full(expression) {
                Ok(pattern) => modules.iter().filter(|module| pattern.matches(module) == Ok(false)).copied().collect(),
                Err(error) => {
                    self.note("N_TARGETS_PATTERN", format!("target_modules is not checked: {error}"));
                    Vec::new()
                }
            },
            Targets::Names(entries) => {
                let idle: Vec<_> = entries
                    .iter()
                    .filter(|entry| !modules.iter().any(|module| names(entry, module)))
                    .map(String::as_str)
                    .collect();
                if !idle.is_empty() {
                    self.note("N_TARGETS_IDLE", format!("target_modules without tensors: {}", listed(&idle)));
                }
                modules.iter().filter(|module| !entries.iter().any(|entry| names(entry, module))).copied().collect()
            }
        };
        if !outside.is_empty() {
            self.note(
                "N_TARGETS_OUTSIDE",
                format!("applied although target_modules does not name them: {}", listed(&outside)),
            );
        }
        if let Some(layers) = &self.config.layers_to_transform {
            let outside = modules.iter().filter(|module| !layers.contains(&SiteId::from_path(module).layer));
            let outside: Vec<_> = outside.copied().collect();
            if !outside.is_empty() {
                let message =
                    format!("applied although layers_to_transform does not name their layer: {}", listed(&outside));
                self.note("N_LAYERS_OUTSIDE", message);
            }
        }
    }
}

/// A tensor's bytes in its file's map.
fn bytes_of<'m>(map: &'m MemoryMappedFile, path: &Path, tensor: &TensorInfo) -> Loaded<&'m [u8]> {
    map.as_slice_bytes(tensor.start, tensor.end - tensor.start).map_err(|e| file::unreadable(path, &e))
}

/// The first few names, and how many there are.
fn listed(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| excerpt(name)).collect();
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => shown.join(", "),
        Some(more) => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Float types of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Float {
    F32,
    F16,
    Bf16,
    F64,
}

impl Float {
    fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Float::F32),
            Dtype::F16 => Some(Float::F16),
            Dtype::BF16 => Some(Float::Bf16),
            Dtype::F64 => Some(Float::F64),
            _ => None,
        }
    }

    /// The elements, exactly.
    fn values(self, bytes: &[u8]) -> Box<dyn Iterator<Item = f64> + '_> {
        match self {
            Float::F32 => Box::new(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64)),
            Float::F16 => Box::new(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64())),
            Float::Bf16 => Box::new(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64())),
            Float::F64 => Box::new(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b))),
        }
    }

    /// Index of the first NaN or infinity: an exponent of all ones.
    fn first_not_finite(self, bytes: &[u8]) -> Option<usize> {
        let half = |mask: u16| bytes.as_chunks().0.iter().position(|b| u16::from_le_bytes(*b) & mask == mask);
        match self {
            Float::F16 => half(0x7c00),
            Float::Bf16 => half(0x7f80),
            Float::F32 => bytes.as_chunks().0.iter().position(|b| !f32::from_le_bytes(*b).is_finite()),
            Float::F64 => bytes.as_chunks().0.iter().position(|b| !f64::from_le_bytes(*b).is_finite()),
        }
    }
}
