//! What each tensor of a file is for: a part that is applied, the host's to apply, or refused by name.

use super::embed;
use super::file;
use super::float::Float;
use super::header::TensorInfo;
use super::json::excerpt;
use super::keys::{Key, Part};
use super::load::CONFIG;
use super::pattern::names;
use super::reading::{Reading, listed};
use super::reject::{Code, Loaded, Reject};
use super::source::bytes_of;

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
pub(super) enum Use {
    A,
    B,
    Alpha,
    /// A whole embedding or head.
    Table,
    /// Rows of trained tokens.
    TokenRows,
    Bias,
    Magnitude,
    ForHost,
    BaseCopy,
}

impl Reading<'_> {
    /// One adapter a file: keys with two adapters' names would be mixed into one.
    pub(super) fn check_adapter_names(&self, keys: &[Key<'_>]) -> Loaded<()> {
        let mut first: Option<(&TensorInfo, Option<&str>)> = None;
        for (tensor, key) in self.source.tensors.iter().zip(keys) {
            if !matches!(key.part, Part::A | Part::B | Part::EmbeddingA | Part::EmbeddingB | Part::TokenRows) {
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
    pub(super) fn judge_all(&self, keys: &[Key<'_>]) -> Loaded<Vec<Use>> {
        let (mut uses, mut later) = (Vec::with_capacity(keys.len()), None);
        for (tensor, key) in self.source.tensors.iter().zip(keys) {
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
        let unasked = |code: Code, what: &str, field: &str| {
            let message =
                format!("{} {what}, but {CONFIG} does not say {field}, so that PEFT drops it", self.at(tensor));
            Err(Reject::new(code, message))
        };
        match key.part {
            Part::A | Part::B | Part::Alpha if key.module.is_empty() => refuse(Code::UnknownTensor, "names no module"),
            Part::A => Ok(Use::A),
            Part::B => Ok(Use::B),
            Part::Alpha => Ok(Use::Alpha),
            Part::BiasOfB if self.config.lora_bias => Ok(Use::Bias),
            Part::BiasOfB => unasked(Code::LoraBias, "is a bias of lora_B", "lora_bias"),
            Part::EmbeddingA | Part::EmbeddingB | Part::TokenRows if key.module.is_empty() => {
                refuse(Code::UnknownTensor, "names no module")
            }
            Part::EmbeddingA => Ok(Use::A),
            Part::EmbeddingB => Ok(Use::B),
            Part::TokenRows => Ok(Use::TokenRows),
            Part::Magnitude if self.config.use_dora => Ok(Use::Magnitude),
            Part::Magnitude => unasked(Code::Dora, "holds DoRA magnitudes", "use_dora"),
            Part::Tokens => refuse(Code::TrainableTokens, "belongs to token rows but is not them"),
            Part::BaseBias => refuse(Code::BaseBias, "is a bias of the base"),
            Part::BaseWeight => self.judge_copy(tensor, key, Code::BaseLayer),
            Part::Whole => self.judge_whole(tensor, key),
            Part::Foreign(method) => {
                let code = match method {
                    "AdaLoRA" => Code::PeftAdalora,
                    "LyCORIS' DoRA" => Code::Dora,
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

    /// A whole weight or bias: a task's head is the host's, anything else would be lost.
    fn judge_whole(&self, tensor: &TensorInfo, key: &Key<'_>) -> Loaded<Use> {
        let saved = key.adapter.is_some() || self.config.modules_to_save.iter().any(|name| names(name, key.module));
        let head = key.module.split('.').any(|segment| HEADS.contains(&segment))
            && !key.module.split('.').any(|segment| segment.bytes().all(|b| b.is_ascii_digit()));
        if head {
            return Ok(Use::ForHost);
        }
        if tensor.name.ends_with(".weight") && embed::is_table(key.module) {
            return match self.judge_copy(tensor, key, Code::ModulesToSave) {
                Ok(copy) => Ok(copy),
                // Rows that differ are replaced; which ones they are may have to wait for the served table.
                Err(_) => Ok(Use::Table),
            };
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
        let message = format!("{}: {}", self.at(tensor), Code::UnknownTensor.describe());
        Err(Reject::new(Code::UnknownTensor, message))
    }

    /// A copy of the base's weight may be passed over when it is one.
    fn judge_copy(&self, tensor: &TensorInfo, key: &Key<'_>, code: Code) -> Loaded<Use> {
        let name = format!("{}.weight", key.module);
        let Some(of_base) = self.base.and_then(|base| base.weight(&name)) else {
            let message = format!(
                "{} is said to be the base's {name}, but there is no base with that weight to compare it with",
                self.at(tensor)
            );
            return Err(Reject::new(code, message));
        };
        let map = file::map(&of_base.file)?;
        let of_base_bytes = bytes_of(&map, of_base)?;
        let bytes = self.source.bytes(tensor)?;
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
            of_base.file.display(),
            of_base.dtype,
            of_base.shape
        );
        Err(Reject::new(code, message))
    }

    /// Config fields that contradict each other, or what was saved.
    pub(super) fn check_parts(&mut self) -> Loaded<()> {
        let config = self.config;
        if config.use_dora && config.lora_bias {
            let message = format!(
                "{CONFIG} beside {}: use_dora and lora_bias are both set, which PEFT does not allow",
                self.source.name
            );
            return Err(Reject::new(Code::LoraBias, message));
        }
        if config.bias != "none" {
            self.note("N_BIAS_ABSENT", format!("the config says bias {:?}, but no bias was saved", config.bias));
        }
        Ok(())
    }

    /// All tensors that have no place, in one message.
    pub(super) fn all_unknown(&self, keys: &[Key<'_>]) -> Box<Reject> {
        let unknown = |(tensor, key): (&TensorInfo, &Key<'_>)| match self.judge(tensor, key) {
            Err(reject) if reject.code == Code::UnknownTensor => Some(tensor.name.to_string()),
            _ => None,
        };
        let found: Vec<_> = self.source.tensors.iter().zip(keys).filter_map(unknown).collect();
        let found: Vec<_> = found.iter().map(String::as_str).collect();
        let message = format!(
            "{}: {} of {} tensors are no part of a LoRA adapter and can't be ignored: {}",
            self.source.name,
            found.len(),
            self.source.tensors.len(),
            listed(&found)
        );
        Reject::new(Code::UnknownTensor, message)
    }
}
