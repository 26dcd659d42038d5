//! The format of a stored array of fp32 values.
//!
//! Operations compute on fp32. An array in another format is decoded into fp32 scratch before them,
//! and encoded behind them. A new format is a variant here, with its bytes, and its two
//! directions in `transcode.rs`.

use half::bf16;
use zero_alloc::device::DType;

/// The format of a stored array of fp32 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// The values themselves.
    Fp32,
    /// bf16.
    Bf16,
    /// The low 16 bits of values whose high bits are a bf16 array beside it ([`split`]). Kernels
    /// read and write both; there is nothing to decode.
    Remainders,
}

impl Codec {
    /// Bytes of `elems` values.
    pub const fn bytes(self, elems: usize) -> usize {
        elems * self.dtype().size_bytes()
    }

    /// The dtype in which memory for it is allocated. Remainders are integers of 16 bits.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Remainders => DType::F16,
        }
    }

    /// Whether operations need the values decoded.
    pub const fn is_decoded(self) -> bool {
        matches!(self, Self::Bf16)
    }
}

// bits(w) = (bits(bf16) << 16) + remainder, with a signed remainder. So the bf16 value is `w` rounded
// to nearest, ties away from zero (ties to even could not be inverted), and no bit is lost.

/// The bf16 value and the remainder of `w`. A NaN becomes the canonical NaN.
#[inline(always)]
pub fn split(w: f32) -> (bf16, i16) {
    let bits = if w.is_nan() { 0x7fc0_0000 } else { w.to_bits() };
    (
        bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16),
        bits as u16 as i16,
    )
}

/// The value with this bf16 value and remainder: the inverse of [`split`].
#[inline(always)]
pub fn join(param: bf16, remainder: i16) -> f32 {
    f32::from_bits((u32::from(param.to_bits()) << 16).wrapping_add(i32::from(remainder) as u32))
}
