//! The three element types of activations and of stored weights.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// Element type of activations (`x`, `y`) or of stored adapter weights. Arithmetic is f32 in all cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
pub enum DType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16: the upper half of an f32.
    Bf16 = 2,
}

impl DType {
    /// All three, in the order of their kernel codes.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    /// Bytes an element takes.
    pub const fn size(self) -> u64 {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// `f32`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        }
    }

    /// Appends `values`, each rounded once to this type (nearest, ties to even), little-endian.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        out.reserve(values.len() * self.size() as usize);
        match self {
            DType::F32 => values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes())),
            DType::F16 => values.iter().for_each(|v| out.extend_from_slice(&f16::from_f32(*v).to_le_bytes())),
            DType::Bf16 => values.iter().for_each(|v| out.extend_from_slice(&bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// The values that `bytes` (little-endian, a whole number of elements) stand for; exact.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        }
    }

    /// `value` rounded to this type and back.
    pub fn round(self, value: f32) -> f32 {
        match self {
            DType::F32 => value,
            DType::F16 => f16::from_f32(value).to_f32(),
            DType::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }

    /// Distance from `|value|` to the next larger magnitude of this type: one unit in the last place.
    pub fn ulp(self, value: f64) -> f64 {
        let (digits, min_exponent) = match self {
            DType::F32 => (23, -126),
            DType::F16 => (10, -14),
            DType::Bf16 => (7, -126),
        };
        let exponent = if value == 0.0 { min_exponent } else { value.abs().log2().floor() as i32 };
        2f64.powi(exponent.max(min_exponent) - digits)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
