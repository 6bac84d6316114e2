//! Alphas that a file keeps as tensors, one scalar a module, as kohya's trainers and their kin write them.
//!
//! PEFT's config has alphas too. A tensor speaks of its own module and so counts before the config's `lora_alpha`, which
//! is for all; against an `alpha_pattern` that names the module, or under rsLoRA, whose scale such trainers don't know,
//! two meanings stand against each other and neither is picked.

use std::collections::BTreeMap;

use super::config::Scales;
use super::float::Float;
use super::header::TensorInfo;
use super::judge::Use;
use super::keys::Key;
use super::reading::{Reading, listed};
use super::reject::{Code, Loaded, Reject};

/// Alphas of modules, with the tensors that hold them.
pub(super) struct Alphas<'a> {
    of: BTreeMap<&'a str, (&'a TensorInfo, f64)>,
    /// Modules whose alpha is not the config's.
    changed: Vec<&'a str>,
}

impl<'a> Alphas<'a> {
    /// Reads the scalars.
    pub fn read(reading: &Reading<'a>, keys: &[Key<'a>], uses: &[Use]) -> Loaded<Self> {
        let mut of = BTreeMap::new();
        for ((tensor, key), used) in reading.source.tensors.iter().zip(keys).zip(uses) {
            if !matches!(used, Use::Alpha) {
                continue;
            }
            let at = reading.at(tensor);
            if tensor.shape.iter().product::<usize>() != 1 {
                let message = format!("{at} has shape {:?}, expected the one number of an alpha", tensor.shape);
                return Err(Reject::new(Code::TensorShape, message));
            }
            let Some(float) = Float::of(tensor.dtype) else {
                let message = format!("{at} has dtype {}, expected F32, F16, BF16 or F64", tensor.dtype);
                return Err(Reject::new(Code::Dtype, message));
            };
            let alpha = float.values(reading.source.bytes(tensor)?).next().unwrap_or(f64::NAN);
            if !alpha.is_finite() {
                return Err(Reject::new(Code::NotFinite, format!("{at} is {alpha}, expected a finite number")));
            }
            if let Some((first, _)) = of.insert(key.module, (tensor, alpha)) {
                let message = format!("{at} and {} are alphas of one module", reading.at(first));
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
        }
        Ok(Self { of, changed: Vec::new() })
    }

    /// Every alpha is some pair's.
    pub fn check_owners(&self, reading: &Reading<'a>, paired: impl Fn(&str) -> bool) -> Loaded<()> {
        match self.of.iter().find(|(module, _)| !paired(module)) {
            None => Ok(()),
            Some((module, (tensor, _))) => {
                let message = format!("{}: {module} has no lora_A and lora_B beside it", reading.at(tensor));
                Err(Reject::new(Code::Unpaired, message))
            }
        }
    }

    /// The scale of a module: by its tensor where it has one, else `scale`, the config's.
    pub fn scale(
        &mut self,
        reading: &Reading<'a>,
        module: &'a str,
        scales: &Scales<'_>,
        rank: usize,
        scale: f64,
    ) -> Loaded<f64> {
        let Some((tensor, alpha)) = self.of.get(module) else { return Ok(scale) };
        let pattern = scales.alpha_by_pattern(module).map_err(|e| reading.pattern(e))?;
        let of_config = pattern.unwrap_or(reading.config.lora_alpha);
        if *alpha == of_config {
            return Ok(scale);
        }
        let against = match pattern {
            Some(_) => "alpha_pattern, which names the module, says",
            None if reading.config.use_rslora => {
                "lora_alpha, under use_rslora, which this tensor's trainer does not know, is"
            }
            None => {
                self.changed.push(module);
                return Ok(alpha / rank as f64);
            }
        };
        let message = format!("{} is {alpha}, but the config's {against} {of_config}", reading.at(tensor));
        Err(Reject::new(Code::AlphaConflict, message))
    }

    /// Says what was made of the tensors.
    pub fn note(&self, reading: &mut Reading<'a>) {
        let count = self.of.len();
        let message = match self.changed.first().and_then(|module| Some((module, self.of.get(module)?))) {
            _ if count == 0 => return,
            None => format!("{count} modules have alpha tensors of their own, which agree with the config"),
            Some((first, (_, alpha))) => format!(
                "{count} modules have alpha tensors of their own, which count before the config's lora_alpha {}: \
                 {first} has {alpha}; changed are {}",
                reading.config.lora_alpha,
                listed(&self.changed)
            ),
        };
        reading.note("N_ALPHA_TENSORS", message);
    }
}
