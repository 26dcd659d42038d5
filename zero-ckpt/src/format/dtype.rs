//! Element types of stored state.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// Element type of a stored state. Reading converts to fp32, which is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StateDtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
}

impl StateDtype {
    /// Bytes of one element.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }

    /// Its name in safetensors headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::BF16 => "BF16",
            Self::F16 => "F16",
        }
    }

    /// Its name as the dtype of parameters in a manifest: `fp32`, `bf16`, `fp16`.
    pub fn param_name(self) -> &'static str {
        match self {
            Self::F32 => "fp32",
            Self::BF16 => "bf16",
            Self::F16 => "fp16",
        }
    }

    /// The type with this name in safetensors headers.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::BF16, Self::F16]
            .into_iter()
            .find(|d| d.name() == name)
    }

    /// Converts little-endian elements to fp32; `bytes.len() == out.len() * self.bytes()`.
    pub(crate) fn widen(self, bytes: &[u8], out: &mut [f32]) {
        let pairs = bytes.as_chunks::<2>().0;
        match self {
            // The crate builds for little-endian machines only.
            Self::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
            Self::BF16 => out
                .iter_mut()
                .zip(pairs)
                .for_each(|(o, b)| *o = bf16::from_le_bytes(*b).to_f32()),
            Self::F16 => out
                .iter_mut()
                .zip(pairs)
                .for_each(|(o, b)| *o = f16::from_le_bytes(*b).to_f32()),
        }
    }

    /// Converts fp32 to little-endian elements, rounding to nearest even;
    /// `out.len() == values.len() * self.bytes()`.
    pub(crate) fn narrow(self, values: &[f32], out: &mut [u8]) {
        let pairs = out.as_chunks_mut::<2>().0.iter_mut().zip(values);
        match self {
            Self::BF16 => pairs.for_each(|(o, v)| *o = bf16::from_f32(*v).to_le_bytes()),
            Self::F16 => pairs.for_each(|(o, v)| *o = f16::from_f32(*v).to_le_bytes()),
            Self::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact() {
        let values = [0.0f32, -0.0, 1.0, -2.5, f32::INFINITY, 1.5e-5];
        for dtype in [StateDtype::F32, StateDtype::BF16, StateDtype::F16] {
            let mut bytes = vec![0; values.len() * dtype.bytes() as usize];
            let mut once = [0.0; 6];
            let mut twice = [0.0; 6];
            dtype.narrow(&values, &mut bytes);
            dtype.widen(&bytes, &mut once);
            dtype.narrow(&once, &mut bytes);
            dtype.widen(&bytes, &mut twice);
            assert_eq!(once.map(f32::to_bits), twice.map(f32::to_bits), "{dtype:?}");
        }
    }

    #[test]
    fn names_round_trip() {
        for dtype in [StateDtype::F32, StateDtype::BF16, StateDtype::F16] {
            assert_eq!(StateDtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(StateDtype::from_name("U8"), None);
    }
}
