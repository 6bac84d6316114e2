//! The fields of `adapter_config.json`: every one applied, known to change nothing here, or refused by name.

use indexmap::IndexMap;

use super::config::{PEFT_DEFAULT, PeftAdapterConfig, Targets, TokenIndices};
use super::json::{Json, excerpt};
use super::reject::{Code, Loaded, Reject};
use super::weights::Notice;

/// What a field that is set means for us.
enum Meaning {
    /// Read into [`PeftAdapterConfig`].
    Read,
    /// Of training, of bookkeeping, or an option of something that has a field of its own.
    Inert,
    /// Not plain LoRA.
    Refused(Code),
}

/// Every field that some PEFT or its forks have written.
fn meaning(field: &str) -> Option<Meaning> {
    use Meaning::{Inert, Read, Refused};
    Some(match field {
        "peft_type"
        | "peft_version"
        | "base_model_name_or_path"
        | "task_type"
        | "r"
        | "lora_alpha"
        | "use_rslora"
        | "rank_pattern"
        | "alpha_pattern"
        | "target_modules"
        | "exclude_modules"
        | "target_parameters"
        | "layers_to_transform"
        | "layers_pattern"
        | "modules_to_save"
        | "trainable_token_indices"
        | "bias"
        | "lora_bias"
        | "use_dora"
        | "init_lora_weights"
        | "fan_in_fan_out"
        | "ensure_weight_tying" => Read,
        // Training, bookkeeping, and where training ran.
        "auto_mapping"
        | "inference_mode"
        | "revision"
        | "lora_dropout"
        | "runtime_config"
        | "megatron_core"
        | "merge_weights"
        | "transformers_version" => Inert,
        // Set only the start of training; `init_lora_weights` says which start was taken.
        "eva_config" | "corda_config" | "lora_ga_config" | "loftq_config" => Inert,
        // Changes the backward pass only.
        "velora_config" => Inert,
        // The size that `use_qalora` would use.
        "qalora_group_size" => Inert,
        "alora_invocation_tokens" | "alora_invocation_string" => Refused(Code::Alora),
        "layer_replication" => Refused(Code::LayerReplication),
        "use_bdlora" => Refused(Code::Bdlora),
        "kasa_config" => Refused(Code::Kasa),
        "use_qalora" => Refused(Code::Qalora),
        "arrow_config" => Refused(Code::Arrow),
        "monteclora_config" => Refused(Code::Monteclora),
        "megatron_config" => Refused(Code::Megatron),
        _ => return None,
    })
}

/// A `peft_type` that is not LoRA.
fn other_method(peft_type: &str) -> Code {
    match peft_type {
        "ADALORA" => Code::PeftAdalora,
        "VERA" => Code::PeftVera,
        "LOHA" => Code::PeftLoha,
        "LOKR" => Code::PeftLokr,
        "IA3" => Code::PeftIa3,
        "OFT" | "BOFT" => Code::PeftOft,
        "PROMPT_TUNING" | "P_TUNING" | "PREFIX_TUNING" | "MULTITASK_PROMPT_TUNING" | "CPT" | "CARTRIDGE" => {
            Code::PeftPrompt
        }
        "TRAINABLE_TOKENS" => Code::PeftTrainableTokens,
        "ADAMSS" | "ADAPTION_PROMPT" | "BEFT" | "BONE" | "C3A" | "DEFT" | "DELORA" | "FOURIERFT" | "FROD" | "GLORA"
        | "GRALORA" | "HIRA" | "HRA" | "LILY" | "LN_TUNING" | "MISS" | "OSF" | "PEANUT" | "POLY" | "PSOFT"
        | "PVERA" | "RANDLORA" | "ROAD" | "SHADOW" | "SHIRA" | "SUPERTUNING" | "TINYLORA" | "UNILORA" | "VBLORA"
        | "WAVEFT" | "XLORA" => Code::PeftOther,
        _ => Code::PeftTypeUnknown,
    }
}

/// What `init_lora_weights` says about the base.
fn check_init(name: &str, init: &str) -> Loaded<()> {
    let code = match init.to_ascii_lowercase().as_str() {
        "true" | "false" | "gaussian" | "eva" | "orthogonal" | "mica" | "lora_ga" => return Ok(()),
        "olora" => Code::InitOlora,
        "loftq" => Code::InitLoftq,
        init if init.starts_with("pissa") => Code::InitPissa,
        init if init.starts_with("corda") => Code::InitCorda,
        _ => Code::InitUnknown,
    };
    let message = format!(
        "{name}: init_lora_weights is {init:?}: {} Expected true, false, gaussian, eva, orthogonal, mica or lora_ga; \
         PEFT can convert the adapter (save_pretrained with path_initial_model_for_weight_conversion)",
        code.describe()
    );
    Err(Reject::new(code, message))
}

/// Reads the fields of one file.
pub(super) struct Fields<'a> {
    /// Of the file.
    pub name: &'a str,
    pub json: &'a Json,
    pub notices: &'a mut Vec<Notice>,
}

impl<'a> Fields<'a> {
    pub fn config(mut self) -> Loaded<PeftAdapterConfig> {
        let Json::Object(items) = self.json else {
            let message = format!("{}: found {}, expected a JSON object", self.name, self.json);
            return Err(Reject::new(Code::ConfigJson, message));
        };
        let peft_type = match self.text("peft_type")? {
            Some(peft_type) => peft_type,
            None => {
                self.notice(
                    "N_CONFIG_NO_PEFT_TYPE",
                    "has no peft_type; taken as LORA, which its tensors must bear out",
                );
                "LORA".to_owned()
            }
        };
        // A method is named first: its own fields would be called unknown otherwise.
        let upper = peft_type.to_ascii_uppercase();
        if upper != "LORA" {
            let message = format!("{}: peft_type is {:?}, expected \"LORA\"", self.name, excerpt(&peft_type));
            return Err(Reject::new(other_method(&upper), message));
        }
        for (field, value) in items {
            match meaning(field) {
                Some(Meaning::Refused(code)) if value.is_set() => {
                    let message = format!("{}: {field} is {value}, expected null: {}", self.name, code.describe());
                    return Err(Reject::new(code, message));
                }
                None if value.is_set() => {
                    let message = format!(
                        "{}: field {:?} is {value} and not known here; expected it to be absent, null, false or empty",
                        self.name,
                        excerpt(field)
                    );
                    return Err(Reject::new(Code::ConfigUnknownField, message));
                }
                _ => {}
            }
        }
        let init_lora_weights = match self.json.get("init_lora_weights") {
            None | Some(Json::Null) => "true".to_owned(),
            Some(Json::Bool(b)) => b.to_string(),
            Some(Json::String(s)) => s.to_string(),
            Some(other) => return Err(self.mistyped("init_lora_weights", other, "true, false or a name")),
        };
        check_init(self.name, &init_lora_weights)?;
        if init_lora_weights == "lora_ga" {
            self.notice(
                "N_INIT_LORA_GA",
                "was started by LoRA-GA, which shifts the base in training; PEFT applies it to the base as it is, and so is done here",
            );
        }
        let r = match self.set("r") {
            Some(value) => {
                let r = self.rank("r", value)?;
                if matches!(value, Json::Float(_)) {
                    self.notice("N_CONFIG_RANK_FLOAT", &format!("has r {value}; taken as {r}"));
                }
                r
            }
            None => {
                self.notice("N_CONFIG_NO_R", "has no r; PEFT's default, 8, counts");
                PEFT_DEFAULT
            }
        };
        let lora_alpha = match self.set("lora_alpha") {
            Some(value) => self.alpha("lora_alpha", value)?,
            None => {
                self.notice("N_CONFIG_NO_ALPHA", "has no lora_alpha; PEFT's default, 8, counts");
                PEFT_DEFAULT as f64
            }
        };
        if lora_alpha == 0.0 {
            self.notice("N_ALPHA_ZERO", "has lora_alpha 0, so its delta is 0");
        }
        Ok(PeftAdapterConfig {
            peft_type: upper,
            peft_version: self.text("peft_version")?,
            base_model_name_or_path: self.text("base_model_name_or_path")?,
            task_type: self.text("task_type")?,
            r,
            lora_alpha,
            use_rslora: self.flag("use_rslora")?,
            rank_pattern: self.pattern("rank_pattern", |s, key, value| s.rank(key, value))?,
            alpha_pattern: self.pattern("alpha_pattern", |s, key, value| s.alpha(key, value))?,
            target_modules: self.targets("target_modules")?,
            exclude_modules: self.targets("exclude_modules")?,
            target_parameters: self.names("target_parameters")?,
            layers_to_transform: self.layers()?,
            layers_pattern: self.names("layers_pattern")?,
            modules_to_save: self.names("modules_to_save")?,
            trainable_token_indices: self.tokens()?,
            bias: self.bias()?,
            lora_bias: self.flag("lora_bias")?,
            use_dora: self.flag("use_dora")?,
            init_lora_weights,
            fan_in_fan_out: self.flag("fan_in_fan_out")?,
            ensure_weight_tying: self.flag("ensure_weight_tying")?,
        })
    }

    fn notice(&mut self, code: &'static str, message: &str) {
        self.notices.push(Notice { code, message: format!("{} {message}", self.name) });
    }

    fn mistyped(&self, field: &str, found: &Json, expected: &str) -> Box<Reject> {
        Reject::new(Code::ConfigType, format!("{}: {field} is {found}, expected {expected}", self.name))
    }

    /// The value of a field that is there and not null.
    fn set(&self, field: &str) -> Option<&'a Json> {
        self.json.get(field).filter(|value| **value != Json::Null)
    }

    fn text(&self, field: &str) -> Loaded<Option<String>> {
        match self.set(field) {
            None => Ok(None),
            Some(Json::String(s)) => Ok(Some(s.to_string())),
            Some(other) => Err(self.mistyped(field, other, "a string")),
        }
    }

    fn flag(&self, field: &str) -> Loaded<bool> {
        match self.set(field) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.mistyped(field, value, "true or false")),
        }
    }

    fn rank(&self, field: &str, value: &Json) -> Loaded<usize> {
        match value.as_int() {
            Some(rank) if rank >= 1 => Ok(rank as usize),
            _ => {
                let message = format!("{}: {field} is {value}, expected a whole number of 1 or more", self.name);
                Err(Reject::new(Code::ConfigRank, message))
            }
        }
    }

    fn alpha(&self, field: &str, value: &Json) -> Loaded<f64> {
        match value {
            Json::Int(n) => Ok(*n as f64),
            Json::Float(x) if x.is_finite() => Ok(*x),
            other => {
                let message = format!("{}: {field} is {other}, expected a finite number", self.name);
                Err(Reject::new(Code::ConfigAlpha, message))
            }
        }
    }

    /// A list of names, or one name.
    fn names(&self, field: &str) -> Loaded<Vec<String>> {
        match self.set(field) {
            None => Ok(Vec::new()),
            Some(Json::String(s)) => Ok(vec![s.to_string()]),
            Some(Json::Array(items)) => items
                .iter()
                .map(|item| item.as_str().map(str::to_owned))
                .map(|item| item.ok_or_else(|| self.mistyped(field, &Json::Array(items.clone()), "a list of strings")))
                .collect(),
            Some(other) if !other.is_set() => Ok(Vec::new()),
            Some(other) => Err(self.mistyped(field, other, "a list of strings")),
        }
    }

    fn targets(&self, field: &str) -> Loaded<Targets> {
        Ok(match self.set(field) {
            None => Targets::None,
            Some(Json::String(s)) => Targets::Pattern(s.to_string()),
            Some(_) => Targets::Names(self.names(field)?),
        })
    }

    fn pattern<T>(&self, field: &str, read: impl Fn(&Self, &str, &Json) -> Loaded<T>) -> Loaded<IndexMap<String, T>> {
        match self.set(field) {
            Some(Json::Object(items)) => items
                .iter()
                .map(|(key, value)| Ok((key.to_string(), read(self, &format!("{field}[{:?}]", excerpt(key)), value)?)))
                .collect(),
            Some(other) if other.is_set() => Err(self.mistyped(field, other, "an object of numbers by module")),
            _ => Ok(IndexMap::new()),
        }
    }

    fn layers(&self) -> Loaded<Option<Vec<usize>>> {
        let field = "layers_to_transform";
        let index = |value: &Json| value.as_int().and_then(|n| usize::try_from(n).ok());
        match self.set(field) {
            None | Some(Json::Bool(false)) => Ok(None),
            Some(Json::Array(items)) => {
                let layers: Option<Vec<_>> = items.iter().map(index).collect();
                layers
                    .map(Some)
                    .ok_or_else(|| self.mistyped(field, &Json::Array(items.clone()), "a list of layer indices"))
            }
            Some(value) => index(value)
                .map(|n| Some(vec![n]))
                .ok_or_else(|| self.mistyped(field, value, "a layer index or a list")),
        }
    }

    fn tokens(&self) -> Loaded<Option<TokenIndices>> {
        let field = "trainable_token_indices";
        let ids = |value: &Json| match value {
            Json::Array(items) => items.iter().map(|n| n.as_int().and_then(|n| u32::try_from(n).ok())).collect(),
            _ => None,
        };
        let Some(value) = self.set(field).filter(|value| value.is_set()) else { return Ok(None) };
        let tokens = match value {
            Json::Object(items) => items
                .iter()
                .map(|(module, value)| Some((module.to_string(), ids(value)?)))
                .collect::<Option<_>>()
                .map(TokenIndices::ByModule),
            other => ids(other).map(TokenIndices::List),
        };
        tokens.map(Some).ok_or_else(|| self.mistyped(field, value, "token ids, or token ids by module"))
    }

    fn bias(&self) -> Loaded<String> {
        match self.text("bias")? {
            None => Ok("none".to_owned()),
            Some(bias) if matches!(bias.as_str(), "none" | "all" | "lora_only") => Ok(bias),
            Some(bias) => Err(self.mistyped("bias", &Json::String(bias.into()), "\"none\", \"all\" or \"lora_only\"")),
        }
    }
}
