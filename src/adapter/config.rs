//! What `adapter_config.json` says, and the scales that follow from it.

use std::path::Path;

use indexmap::IndexMap;
use serde::Serialize;

use super::fields::Fields;
use super::file;
use super::json::{Json, Limits};
use super::pattern::{PatternError, Patterns};
use super::reject::Loaded;
use super::weights::Notice;

/// A config is a few KB; one that lists every module of a large model by its full path is a few hundred.
const LIMITS: Limits = Limits { bytes: 8 << 20, values: 1 << 18 };

/// PEFT's default for `r` and for `lora_alpha`.
pub(super) const PEFT_DEFAULT: usize = 8;

/// `target_modules`, `exclude_modules`: names, or one regular expression. Only checked against the tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Targets {
    /// Not given.
    #[default]
    None,
    /// Names: a whole module path or the end of one from a dot on.
    Names(Vec<String>),
    /// A Python regular expression that a whole module path must match, or `all-linear`.
    Pattern(String),
}

/// `trainable_token_indices`: ids for the input embedding, or ids by module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TokenIndices {
    /// Of the input embedding.
    List(Vec<u32>),
    /// By module name.
    ByModule(IndexMap<String, Vec<u32>>),
}

/// What `adapter_config.json` says. Field names are PEFT's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeftAdapterConfig {
    /// `LORA`.
    pub peft_type: String,
    /// The PEFT that saved it.
    pub peft_version: Option<String>,
    /// The base that it was trained on.
    pub base_model_name_or_path: Option<String>,
    /// `CAUSAL_LM`, `SEQ_CLS` and so on.
    pub task_type: Option<String>,
    /// Rank of modules that `rank_pattern` does not name; 1 or more.
    pub r: usize,
    /// Alpha of modules that `alpha_pattern` does not name; finite.
    pub lora_alpha: f64,
    /// Scale by alpha/sqrt(r) instead of alpha/r.
    pub use_rslora: bool,
    /// Ranks by module pattern, in the file's order: the first match counts.
    pub rank_pattern: IndexMap<String, usize>,
    /// Alphas by module pattern, in the file's order: the first match counts.
    pub alpha_pattern: IndexMap<String, f64>,
    /// Modules that were adapted. The tensors decide what is applied.
    pub target_modules: Targets,
    /// Modules that were left out.
    pub exclude_modules: Targets,
    /// Parameters, such as 3-D expert weights, that were adapted.
    pub target_parameters: Vec<String>,
    /// Layers that were adapted.
    pub layers_to_transform: Option<Vec<usize>>,
    /// Name of the list of layers.
    pub layers_pattern: Vec<String>,
    /// Modules saved whole, such as a classifier.
    pub modules_to_save: Vec<String>,
    /// Tokens whose embedding rows are replaced.
    pub trainable_token_indices: Option<TokenIndices>,
    /// `none`, `all` or `lora_only`: which biases of the base were trained.
    pub bias: String,
    /// `lora_B` has a bias.
    pub lora_bias: bool,
    /// Weight-decomposed LoRA.
    pub use_dora: bool,
    /// `true`, `false`, `gaussian` and so on.
    pub init_lora_weights: String,
    /// The base's weights are stored `[in][out]`; A and B are not.
    pub fan_in_fan_out: bool,
    /// One pair serves both ends of tied embeddings.
    pub ensure_weight_tying: bool,
}

impl Default for PeftAdapterConfig {
    /// PEFT's defaults.
    fn default() -> Self {
        Self {
            peft_type: "LORA".into(),
            peft_version: None,
            base_model_name_or_path: None,
            task_type: None,
            r: PEFT_DEFAULT,
            lora_alpha: PEFT_DEFAULT as f64,
            use_rslora: false,
            rank_pattern: IndexMap::new(),
            alpha_pattern: IndexMap::new(),
            target_modules: Targets::None,
            exclude_modules: Targets::None,
            target_parameters: Vec::new(),
            layers_to_transform: None,
            layers_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            trainable_token_indices: None,
            bias: "none".into(),
            lora_bias: false,
            use_dora: false,
            init_lora_weights: "true".into(),
            fan_in_fan_out: false,
            ensure_weight_tying: false,
        }
    }
}

impl PeftAdapterConfig {
    /// Scale of a module that no pattern names: alpha/r, or alpha/sqrt(r) under rsLoRA.
    pub fn scaling(&self) -> f64 {
        self.scale(self.r, self.lora_alpha)
    }

    /// Scale of a module with this rank and alpha.
    fn scale(&self, rank: usize, alpha: f64) -> f64 {
        if self.use_rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 }
    }

    /// Rank and scale by module path, with PEFT's pattern rule.
    ///
    /// # Errors
    /// The first key of either pattern that is no regular expression.
    pub fn scales(&self) -> Result<Scales<'_>, PatternError> {
        Ok(Scales {
            config: self,
            ranks: Patterns::compile(&self.rank_pattern)?,
            alphas: Patterns::compile(&self.alpha_pattern)?,
        })
    }

    /// Reads an `adapter_config.json`, with the remarks that it was accepted with.
    ///
    /// # Errors
    /// [`Error::Reject`](crate::Error::Reject) for a file that is no config, and for one that asks for anything but
    /// plain LoRA; parts that only tensors can show are judged by [`load`](super::load).
    pub fn from_file(path: impl AsRef<Path>) -> crate::Result<(Self, Vec<Notice>)> {
        let mut notices = Vec::new();
        let config = Self::read(path.as_ref(), &mut notices)?;
        Ok((config, notices))
    }

    /// Reads a config, refusing what would not be plain LoRA. Parts that only tensors can show (biases, whole
    /// modules) are judged with the tensors.
    pub(super) fn read(path: &Path, notices: &mut Vec<Notice>) -> Loaded<Self> {
        let name = path.display().to_string();
        let (text, bom) = file::read_text(path, LIMITS)?;
        if bom {
            let message = format!("{name}: a UTF-8 byte order mark before the JSON was passed over");
            notices.push(Notice { code: "N_CONFIG_BOM", message });
        }
        let json = Json::parse(&name, &text, LIMITS)?;
        Fields { name: &name, json: &json, notices }.config()
    }
}

/// Rank and scale of each module under a config's patterns.
#[derive(Debug)]
pub struct Scales<'a> {
    config: &'a PeftAdapterConfig,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
}

impl Scales<'_> {
    /// Rank and scale of a module by its path in the base.
    ///
    /// # Errors
    /// A pattern that takes too long to match.
    pub fn of(&self, module: &str) -> Result<(usize, f64), PatternError> {
        let rank = self.ranks.get(module)?.unwrap_or(self.config.r);
        let alpha = self.alphas.get(module)?.unwrap_or(self.config.lora_alpha);
        Ok((rank, self.config.scale(rank, alpha)))
    }
}

impl Scales<'_> {
    /// The alpha that `alpha_pattern` gives a module, if it names it.
    pub(super) fn alpha_by_pattern(&self, module: &str) -> Result<Option<f64>, PatternError> {
        self.alphas.get(module)
    }
}
