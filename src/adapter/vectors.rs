//! What a file has of a linear beside A and B that speaks of its outputs one by one: the bias of lora_B, and DoRA's
//! magnitudes. Both become the gains and offsets of a pair.
//!
//! PEFT adds `scale * bias` with the delta. Under DoRA its output is `g * (W x + scale * B A x) + bias of the base`, with
//! `g` the magnitude over the norm of the row of `W + scale * B A`; since y already is `W x + bias of the base`, that is
//! `y + (g - 1) * y + (1 - g) * bias of the base + g * scale * B A x`. Norms are of the base's stored weights, in f64; PEFT
//! takes them in the type that it computes in.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::base::BaseModel;
use super::dora;
use super::float::Float;
use super::header::TensorInfo;
use super::json::excerpt;
use super::judge::Use;
use super::keys::Key;
use super::load::CONFIG;
use super::reading::Reading;
use super::reject::{Code, Loaded, Reject};
use super::weights::{HostPair, RowVectors};

/// Tensors by module.
type Tensors<'a> = BTreeMap<&'a str, &'a TensorInfo>;

/// The vectors of a file.
pub(super) struct Vectors<'a> {
    bias: Tensors<'a>,
    magnitude: Tensors<'a>,
    norms: Progress,
}

/// How far the norms are: a large base takes seconds, and says so.
struct Progress {
    started: Instant,
    /// Seconds after which it is spoken of next.
    patience: Cell<Duration>,
    done: Cell<usize>,
}

/// Work shorter than this is not spoken of, nor is any more often.
const PATIENCE: Duration = Duration::from_secs(2);

impl Progress {
    fn step(&self, all: usize) {
        let (done, elapsed) = (self.done.get() + 1, self.started.elapsed());
        self.done.set(done);
        if elapsed > self.patience.get() {
            self.patience.set(elapsed + PATIENCE);
            tracing::info!("DoRA: norms of {done} of {all} linears of the base, {:.1} s", elapsed.as_secs_f64());
        }
    }
}

impl<'a> Vectors<'a> {
    /// Finds them.
    pub fn read(reading: &Reading<'a>, keys: &[Key<'a>], uses: &[Use]) -> Loaded<Self> {
        let norms = Progress { started: Instant::now(), patience: Cell::new(PATIENCE), done: Cell::new(0) };
        let mut found = Self { bias: Tensors::new(), magnitude: Tensors::new(), norms };
        for ((tensor, key), used) in reading.source.tensors.iter().zip(keys).zip(uses) {
            let of = match used {
                Use::Bias => &mut found.bias,
                Use::Magnitude => &mut found.magnitude,
                _ => continue,
            };
            if let Some(first) = of.insert(key.module, tensor) {
                let message =
                    format!("{} and {:?} are the same part of one module", reading.at(first), excerpt(&tensor.name));
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
        }
        Ok(found)
    }

    /// Every vector is some linear's, and every linear has those that the config speaks of. `pairs`: modules, and whether
    /// they are embeddings.
    pub fn check_owners<T>(&self, reading: &Reading<'_>, pairs: &BTreeMap<(&str, bool), T>) -> Loaded<()> {
        for tensors in [&self.bias, &self.magnitude] {
            if let Some((module, tensor)) = tensors.iter().find(|(module, _)| !pairs.contains_key(&(**module, false))) {
                let message = format!("{}: {module} has no lora_A and lora_B beside it", reading.at(tensor));
                return Err(Reject::new(Code::Unpaired, message));
            }
        }
        let config = reading.config;
        for (asked, field, code, part, tensors) in [
            (config.lora_bias, "lora_bias", Code::LoraBias, "lora_B.bias", &self.bias),
            (config.use_dora, "use_dora", Code::Dora, "lora_magnitude_vector", &self.magnitude),
        ] {
            if let Some((module, _)) = pairs.keys().find(|(_, embedding)| asked && *embedding) {
                let message = format!(
                    "{}: {CONFIG} says {field}, and {module} is an embedding; expected linears alone",
                    reading.source.name
                );
                return Err(Reject::new(code, message));
            }
            if let Some((module, _)) = pairs.keys().find(|(module, _)| asked && !tensors.contains_key(*module)) {
                let message = format!(
                    "{}: {CONFIG} says {field}, but {module} has no {part} beside its lora_A and lora_B",
                    reading.source.name
                );
                return Err(Reject::new(code, message));
            }
        }
        Ok(())
    }

    /// Dimensions of a module's vectors.
    pub fn check_shapes(&self, reading: &Reading<'_>, module: &str, outputs: usize) -> Loaded<()> {
        let wrong = |tensor: &TensorInfo, expected: String| {
            let message = format!("{} has shape {:?}, expected {expected}", reading.at(tensor), tensor.shape);
            Err(Reject::new(Code::TensorShape, message))
        };
        if let Some(tensor) = self.bias.get(module)
            && *tensor.shape != [outputs]
        {
            return wrong(tensor, format!("[{outputs}], one number for each row of lora_B"));
        }
        // PEFT has kept magnitudes in a column and in a row, too.
        if let Some(tensor) = self.magnitude.get(module)
            && ![&[outputs][..], &[1, outputs], &[outputs, 1]].contains(&&*tensor.shape)
        {
            return wrong(tensor, format!("[{outputs}], one number for each row of lora_B"));
        }
        Ok(())
    }

    /// Gains and offsets of a module's pair; `scale` as the config has it, before it is narrowed.
    pub fn of(&self, reading: &Reading<'_>, module: &str, pair: &HostPair, scale: f64) -> Loaded<Option<RowVectors>> {
        let narrow = |tensor: &TensorInfo, name: &str, values: Vec<f64>| -> Loaded<Vec<f32>> {
            let single = |(at, value): (usize, f64)| match value as f32 {
                single if single.is_finite() => Ok(single),
                _ => {
                    let message = format!("{}: {name} of row {at} is {value:e}, beyond f32", reading.at(tensor));
                    Err(Reject::new(Code::Range, message))
                }
            };
            values.into_iter().enumerate().map(single).collect()
        };
        if let Some(tensor) = self.bias.get(module) {
            let offset = values(reading, tensor)?.into_iter().map(|bias| scale * bias).collect();
            let offset = narrow(tensor, "scaled bias", offset)?;
            return Ok(Some(RowVectors { gain: vec![1.0; offset.len()], offset }));
        }
        let Some(tensor) = self.magnitude.get(module) else { return Ok(None) };
        let magnitudes = values(reading, tensor)?;
        let dora::Rows { norms, bias } = dora::rows(&reading.at(tensor), need(reading, tensor)?, pair, scale)?;
        self.norms.step(self.magnitude.len());
        let (mut gain, mut offset) = (Vec::with_capacity(norms.len()), Vec::with_capacity(norms.len()));
        for (row, (magnitude, norm)) in magnitudes.into_iter().zip(norms).enumerate() {
            if norm == 0.0 || !norm.is_finite() {
                let message = format!(
                    "{}: row {row} of {} with the delta in it has norm {norm}, expected a positive one to divide the \
                     magnitude {magnitude} by",
                    reading.at(tensor),
                    pair.site.path
                );
                return Err(Reject::new(Code::Dora, message));
            }
            gain.push(magnitude / norm);
            offset.push(bias.as_ref().map_or(0.0, |bias| (1.0 - magnitude / norm) * bias[row]));
        }
        Ok(Some(RowVectors { gain: narrow(tensor, "gain", gain)?, offset: narrow(tensor, "offset", offset)? }))
    }
}

/// The base whose weights DoRA is relative to.
fn need<'b>(reading: &Reading<'b>, tensor: &TensorInfo) -> Loaded<&'b BaseModel> {
    reading.base.ok_or_else(|| {
        let message = format!(
            "{} holds DoRA magnitudes, which are relative to the base's weights: give the directory of the base and its \
             safetensors (--base)",
            reading.at(tensor)
        );
        Reject::new(Code::Dora, message)
    })
}

/// A vector's finite numbers.
fn values(reading: &Reading<'_>, tensor: &TensorInfo) -> Loaded<Vec<f64>> {
    let Some(float) = Float::of(tensor.dtype) else {
        let message = format!("{} has dtype {}, expected F32, F16, BF16 or F64", reading.at(tensor), tensor.dtype);
        return Err(Reject::new(Code::Dtype, message));
    };
    let bytes = reading.source.bytes(tensor)?;
    let values: Vec<f64> = float.values(bytes).collect();
    match float.first_not_finite(bytes) {
        None => Ok(values),
        Some(at) => {
            let message = format!("{}: element [{at}] is {}, expected a finite number", reading.at(tensor), values[at]);
            Err(Reject::new(Code::NotFinite, message))
        }
    }
}
