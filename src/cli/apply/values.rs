//! Numbers of a tensor's bytes, in any type that a safetensors file may have.

use half::{bf16, f16};
use lorapool::DType;
use safetensors::Dtype;

/// How to read one element of a float type.
type Read = fn(&[u8]) -> f64;

/// The element type's reader, `None` for what is no float.
pub fn float(dtype: Dtype) -> Option<Read> {
    Some(match dtype {
        Dtype::F64 => |b| f64::from_le_bytes(word(b)),
        Dtype::F32 => |b| f32::from_le_bytes(word(b)).into(),
        Dtype::F16 => |b| f16::from_le_bytes(word(b)).into(),
        Dtype::BF16 => |b| bf16::from_le_bytes(word(b)).into(),
        // The upper byte of an f16.
        Dtype::F8_E5M2 => |b| f16::from_le_bytes([0, b[0]]).into(),
        Dtype::F8_E4M3 => |b| f8_e4m3(b[0]),
        _ => return None,
    })
}

/// The element type's reader, `None` for what is no integer.
pub fn integer(dtype: Dtype) -> Option<fn(&[u8]) -> i64> {
    Some(match dtype {
        Dtype::I64 => |b| i64::from_le_bytes(word(b)),
        Dtype::I32 => |b| i32::from_le_bytes(word(b)).into(),
        Dtype::I16 => |b| i16::from_le_bytes(word(b)).into(),
        Dtype::I8 => |b| i8::from_le_bytes(word(b)).into(),
        _ => return None,
    })
}

/// The first `N` bytes; an element of the wrong size reads as 0, which no caller gives.
fn word<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.first_chunk().copied().unwrap_or([0; N])
}

/// FP8 E4M3: bias 7, no infinities, NaN where all bits but the sign are set.
fn f8_e4m3(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Appends `value` as `dtype`, rounded once; false for a finite value that `dtype` can't hold.
pub fn push(value: f64, dtype: DType, out: &mut Vec<u8>) -> bool {
    let finite = match dtype {
        DType::F32 => {
            let value = value as f32;
            out.extend_from_slice(&value.to_le_bytes());
            value.is_finite()
        }
        DType::F16 => {
            let value = f16::from_f64(value);
            out.extend_from_slice(&value.to_le_bytes());
            value.is_finite()
        }
        DType::Bf16 => {
            let value = bf16::from_f64(value);
            out.extend_from_slice(&value.to_le_bytes());
            value.is_finite()
        }
    };
    finite || !value.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_type_reads_what_its_format_says() {
        let cases: [(Dtype, &[u8], f64); 9] = [
            (Dtype::F64, &0.1f64.to_le_bytes(), 0.1),
            (Dtype::F32, &(-2.5f32).to_le_bytes(), -2.5),
            (Dtype::F16, &[0x01, 0x00], 2f64.powi(-24)),
            (Dtype::BF16, &[0x80, 0x3f], 1.0),
            (Dtype::F8_E5M2, &[0x3c], 1.0),
            (Dtype::F8_E4M3, &[0x38], 1.0),
            (Dtype::F8_E4M3, &[0x7e], 448.0),
            (Dtype::F8_E4M3, &[0x81], -(2f64.powi(-9))),
            (Dtype::F8_E4M3, &[0x08], 2f64.powi(-6)),
        ];
        for (dtype, bytes, want) in cases {
            assert_eq!(float(dtype).map(|read| read(bytes)), Some(want), "{dtype:?} {bytes:?}");
        }
        assert!(float(Dtype::F8_E4M3).is_some_and(|read| read(&[0xff]).is_nan()));
        assert!(float(Dtype::I32).is_none() && integer(Dtype::F32).is_none());
    }

    #[test]
    fn a_finite_value_beyond_the_type_is_told_apart_from_infinity() {
        let mut out = Vec::new();
        assert!(push(65504.0, DType::F16, &mut out));
        assert!(!push(1e6, DType::F16, &mut out));
        assert!(push(f64::INFINITY, DType::F16, &mut out));
        assert!(push(f64::NAN, DType::Bf16, &mut out));
        assert!(!push(1e39, DType::F32, &mut out));
    }
}
