//! The float types of files: exact values, and whether they are finite.

use half::{bf16, f16};
use safetensors::Dtype;

/// Float types of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    F32,
    F16,
    Bf16,
    F64,
}

impl Float {
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Float::F32),
            Dtype::F16 => Some(Float::F16),
            Dtype::BF16 => Some(Float::Bf16),
            Dtype::F64 => Some(Float::F64),
            _ => None,
        }
    }

    /// The elements, exactly.
    pub fn values(self, bytes: &[u8]) -> Box<dyn Iterator<Item = f64> + '_> {
        match self {
            Float::F32 => Box::new(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64)),
            Float::F16 => Box::new(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64())),
            Float::Bf16 => Box::new(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64())),
            Float::F64 => Box::new(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b))),
        }
    }

    /// Index of the first NaN or infinity: an exponent of all ones.
    pub fn first_not_finite(self, bytes: &[u8]) -> Option<usize> {
        let half = |mask: u16| bytes.as_chunks().0.iter().position(|b| u16::from_le_bytes(*b) & mask == mask);
        match self {
            Float::F16 => half(0x7c00),
            Float::Bf16 => half(0x7f80),
            Float::F32 => bytes.as_chunks().0.iter().position(|b| !f32::from_le_bytes(*b).is_finite()),
            Float::F64 => bytes.as_chunks().0.iter().position(|b| !f64::from_le_bytes(*b).is_finite()),
        }
    }
}
