//! One adapter's tensors being read into an [`Adapter`].

use std::borrow::Cow;
use std::collections::BTreeMap;

use safetensors::Dtype;

use super::alpha::Alphas;
use super::base::BaseModel;
use super::config::PeftAdapterConfig;
use super::experts::{Sides, is_parameter, is_routed};
use super::float::Float;
use super::fused;
use super::header::TensorInfo;
use super::json::excerpt;
use super::judge::Use;
use super::keys::{Key, Part};
use super::load::CONFIG;
use super::pattern::names;
use super::reject::{Code, Loaded, Reject};
use super::resolve::{Home, Wanted, resolve};
use super::site::SiteId;
use super::source::Source;
use super::vectors::Vectors;
use super::weights::{Adapter, Fate, HostMatrix, HostPair, HostTensor, Notice, TensorFate};
use crate::contract::MAX_RANK;
use crate::dtype::DType;

/// One adapter being read.
pub(super) struct Reading<'a> {
    pub source: &'a Source,
    pub config: &'a PeftAdapterConfig,
    pub base: Option<&'a BaseModel>,
    pub notices: &'a mut Vec<Notice>,
}

impl Reading<'_> {
    pub(super) fn adapter(mut self) -> Loaded<Adapter> {
        let tensors = &self.source.tensors;
        let keys: Vec<_> = tensors.iter().map(|t| Key::parse(&t.name)).collect();
        self.check_adapter_names(&keys)?;
        let uses = match self.judge_all(&keys) {
            Err(reject) if reject.code == Code::UnknownTensor => return Err(self.all_unknown(&keys)),
            other => other?,
        };
        self.check_parts()?;
        let mut alphas = Alphas::read(&self, &keys, &uses)?;
        let vectors = Vectors::read(&self, &keys, &uses)?;
        // Pairs by module.
        // By module, and whether it is an embedding.
        let mut sides: BTreeMap<(&str, bool), [Option<&TensorInfo>; 2]> = BTreeMap::new();
        for ((tensor, key), used) in tensors.iter().zip(&keys).zip(&uses) {
            let side = match used {
                Use::A => 0,
                Use::B => 1,
                _ => continue,
            };
            let embedding = matches!(key.part, Part::EmbeddingA | Part::EmbeddingB);
            if let Some(first) = sides.entry((key.module, embedding)).or_default()[side].replace(tensor) {
                let message =
                    format!("{} and {:?} are the same part of one module", self.at(first), excerpt(&tensor.name));
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
        }
        let mut pairs = Vec::with_capacity(sides.len());
        for ((module, embedding), [a, b]) in &sides {
            if *embedding && let (Some(tensor), true) = (a.or(*b), sides.contains_key(&(*module, false))) {
                let message = format!("{}: {module} has lora_A and lora_B of a linear, too", self.at(tensor));
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
            match (a, b) {
                (Some(a), Some(b)) => pairs.push((*module, *embedding, *a, *b)),
                (Some(one), None) | (None, Some(one)) => {
                    let other = if a.is_some() { "lora_B" } else { "lora_A" };
                    let message = format!("{}: {module} has no {other} beside it", self.at(one));
                    return Err(Reject::new(Code::Unpaired, message));
                }
                (None, None) => {}
            }
        }
        let tables = self.tables(tensors, &keys, &uses)?;
        if pairs.is_empty() && tables.is_empty() {
            let message = format!(
                "{}: none of its {} tensors is a LoRA pair; the adapter would answer like the base",
                self.source.name,
                tensors.len()
            );
            return Err(Reject::new(Code::NoTensors, message));
        }
        alphas.check_owners(&self, |module| {
            sides.contains_key(&(module, false)) || sides.contains_key(&(module, true))
        })?;
        vectors.check_owners(&self, &sides)?;
        let (routed, pairs): (Vec<_>, Vec<_>) =
            pairs.into_iter().partition(|(module, embedding, ..)| !embedding && is_routed(module));
        self.check_plain_experts(routed.first().map(|(_, _, a, _)| *a))?;
        // Shapes before places: a damaged tensor is named as such whatever the base.
        // Where the file itself rates every module, patterns only tell others what it said.
        let unrated = PeftAdapterConfig::default();
        let of_config = if self.source.rated.is_some() { &unrated } else { self.config };
        let scales = of_config.scales().map_err(|e| self.pattern(e))?;
        let scale = self.narrow_scale("modules that no pattern names", self.config.scaling())?;
        let mut rated = Vec::with_capacity(pairs.len());
        for (module, embedding, a, b) in pairs {
            let (rank, scale) = match self.source.rated.as_ref().and_then(|rated| rated.get(module)) {
                Some(rated) => *rated,
                None => scales.of(&self.pattern_name(module)).map_err(|e| self.pattern(e))?,
            };
            self.check_pair(module, a, b, rank)?;
            let scale = alphas.scale(&self, module, &scales, rank, scale)?;
            vectors.check_shapes(&self, module, b.shape[0])?;
            self.narrow_scale(module, scale)?;
            rated.push((module, embedding, a, b, scale));
        }
        let sides = routed.iter().map(|(module, _, a, b)| Sides { module, a, b }).collect();
        let (experts, expert_paths) = self.experts(sides, &scales, |reading, module, rank, scale| {
            alphas.scale(reading, module, &scales, rank, scale)
        })?;
        alphas.note(&mut self);
        let home = |embedding: bool| if embedding { Home::Embedding } else { Home::Linear };
        let of_pairs = rated.iter().map(|(_, embedding, a, ..)| (*a, home(*embedding)));
        let of_tables = tables.values().filter_map(|parts| Some((parts.any()?, Home::Table)));
        let source = self.source;
        let wanted = of_pairs.chain(of_tables);
        let wanted: Vec<_> = wanted
            .map(|(tensor, home)| Wanted { name: source.written(tensor), key: Key::parse(&tensor.name), home })
            .collect();
        let mut paths = resolve(&self.source.name, &wanted, self.base, self.notices)?;
        let sites = self.sites(rated.iter().map(|(module, ..)| paths[module].as_str()));
        let by_parameter = |module: &str| *self.pattern_name(module) != *module || is_parameter(module);
        let modules = rated.iter().map(|(module, ..)| *module).chain(routed.iter().map(|(module, ..)| *module));
        let modules: Vec<_> = modules.filter(|module| !by_parameter(module)).collect();
        self.check_targets(modules.into_iter());
        paths.extend(expert_paths);
        let mut host = Vec::with_capacity(rated.len());
        for ((module, embedding, a, b, scale), site) in rated.into_iter().zip(sites) {
            self.check_base(&site, embedding, a, b)?;
            let (a, b) = (self.matrix(a)?, self.matrix(b)?);
            let mut pair = HostPair { embedding, ..HostPair::new(site, a, b, scale as f32) };
            pair.vectors = vectors.of(&self, module, &pair, scale)?;
            host.push(pair);
        }
        let host = self.refit(host)?;
        let raw_tokens = self.raw_tokens(&tables, &paths, &host)?;
        let mut unapplied = Vec::new();
        let mut fates = Vec::with_capacity(tensors.len());
        let mut copies = Vec::new();
        for ((tensor, key), used) in tensors.iter().zip(&keys).zip(&uses) {
            let fate = match used {
                Use::A | Use::B | Use::Alpha | Use::Bias | Use::Magnitude | Use::Table | Use::TokenRows => {
                    Fate::Applied
                }
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
            let site = self.home(paths.get(key.module).map_or(key.module, String::as_str));
            let (name, dtype) = (self.source.written(tensor).to_owned(), tensor.dtype.to_string());
            fates.push(TensorFate { name, dtype, shape: tensor.shape.to_vec(), fate, site });
        }
        let wide: Vec<_> = tensors.iter().filter(|t| t.dtype == Dtype::F64).map(|t| &*t.name).collect();
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
        let mut adapter =
            Adapter::new(self.config.clone(), scale, host, unapplied).with_raw_tokens(raw_tokens).with_experts(experts);
        adapter.tensors = fates;
        self.compare(adapter)
    }

    pub(super) fn note(&mut self, code: &'static str, message: String) {
        self.notices.push(Notice { code, message: format!("{}: {message}", self.source.name) });
    }

    pub(super) fn at(&self, tensor: &TensorInfo) -> String {
        format!("{}: tensor {:?}", tensor.file.display(), excerpt(self.source.written(tensor)))
    }

    pub(super) fn pattern(&self, error: super::PatternError) -> Box<Reject> {
        Reject::new(Code::ConfigPattern, format!("{} beside {}: {error}", CONFIG, self.source.name))
    }

    /// What patterns match for a module: its path, or its parameter's where `target_parameters` names that.
    fn pattern_name<'m>(&self, module: &'m str) -> Cow<'m, str> {
        let parameter = format!("{module}.weight");
        match self.config.target_parameters.iter().any(|entry| names(entry, &parameter)) {
            true => parameter.into(),
            false => module.into(),
        }
    }

    /// Dimensions of a pair, and its rank against the config's.
    pub(super) fn check_pair(&self, module: &str, a: &TensorInfo, b: &TensorInfo, rank: usize) -> Loaded<()> {
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
    pub(super) fn narrow_scale(&self, module: &str, scale: f64) -> Loaded<f32> {
        let narrow = scale as f32;
        if !narrow.is_finite() {
            let message = format!(
                "{CONFIG} beside {}: lora_alpha or alpha_pattern scales {module} by {scale:e}, beyond the range of f32",
                self.source.name
            );
            return Err(Reject::new(Code::ConfigAlpha, message));
        }
        Ok(narrow)
    }

    /// The sites at these paths, named as in the base.
    fn sites<'p>(&self, paths: impl Iterator<Item = &'p str>) -> Vec<SiteId> {
        match self.base {
            Some(base) => {
                let known = |p: &str| base.linear(p).map(|l| &l.site).or_else(|| base.embedding(p).map(|e| &e.site));
                paths.map(|p| known(p).cloned().unwrap_or_else(|| SiteId::from_path(p))).collect()
            }
            None => SiteId::of_paths(paths),
        }
    }

    /// Widths against the base's.
    fn check_base(&self, site: &SiteId, embedding: bool, a: &TensorInfo, b: &TensorInfo) -> Loaded<()> {
        let Some(base) = self.base else { return Ok(()) };
        if embedding {
            return self.check_embedding(base, site, a, b);
        }
        let widths = match base.linear(&site.path) {
            Some(linear) => Some((linear.in_features, linear.out_features)),
            None => fused::place(base, &site.path)?.map(|place| place.widths()),
        };
        let Some((in_features, out_features)) = widths else { return Ok(()) };
        let (inputs, outputs) = (a.shape[1], b.shape[0]);
        if inputs != in_features {
            let message = format!(
                "{} has {inputs} columns, expected {}: the inputs of {} in {}",
                self.at(a),
                in_features,
                site.path,
                base.source()
            );
            return Err(Reject::new(Code::BaseShape, message));
        }
        if outputs != out_features {
            let head = matches!(site.path.rsplit('.').next(), Some("lm_head" | "embed_out" | "decoder"));
            let code = if head { Code::Vocabulary } else { Code::BaseShape };
            let message = format!(
                "{} has {outputs} rows, expected {}: the outputs of {} in {}",
                self.at(b),
                out_features,
                site.path,
                base.source()
            );
            return Err(Reject::new(code, message));
        }
        Ok(())
    }

    /// An embedding's widths against the base's.
    fn check_embedding(&self, base: &BaseModel, site: &SiteId, a: &TensorInfo, b: &TensorInfo) -> Loaded<()> {
        let Some(embedding) = base.embedding(&site.path) else { return Ok(()) };
        let (tokens, width) = (a.shape[1], b.shape[0]);
        if tokens != embedding.vocabulary {
            let message = format!(
                "{} has {tokens} columns, expected {}: the rows of {} in {}",
                self.at(a),
                embedding.vocabulary,
                site.path,
                base.source()
            );
            return Err(Reject::new(Code::Vocabulary, message));
        }
        if width != embedding.width {
            let message = format!(
                "{} has {width} rows, expected {}: the width of {} in {}",
                self.at(b),
                embedding.width,
                site.path,
                base.source()
            );
            return Err(Reject::new(Code::BaseShape, message));
        }
        Ok(())
    }

    pub(super) fn matrix(&self, tensor: &TensorInfo) -> Loaded<HostMatrix> {
        let (dtype, bytes) = self.elements(tensor)?;
        Ok(HostMatrix { dtype, rows: tensor.shape[0], cols: tensor.shape[1], bytes })
    }

    /// A tensor's elements, copied out of the file; F64 is narrowed to F32.
    fn elements(&self, tensor: &TensorInfo) -> Loaded<(DType, Vec<u8>)> {
        let Some(float) = Float::of(tensor.dtype) else {
            let message = format!("{} has dtype {}, expected F32, F16, BF16 or F64", self.at(tensor), tensor.dtype);
            return Err(Reject::new(Code::Dtype, message));
        };
        let bytes = self.source.bytes(tensor)?;
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
}

/// The first few names, and how many there are.
pub(super) fn listed(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| excerpt(name)).collect();
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => shown.join(", "),
        Some(more) => format!("{} and {more} more", shown.join(", ")),
    }
}
