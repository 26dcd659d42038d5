//! The format of a stored array of fp32 values.
//!
//! Operations compute on fp32. An array in another format is decoded into fp32 scratch before them,
//! and encoded behind them. A new format is a variant here, with its bytes and its two directions.

use half::bf16;
use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Stream};

use crate::{KernelError, Kernels, check};

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

/// The rounding of an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// Up or down with probabilities by the distance, so that the mean is exact: for values that a
    /// step changes by less than half a unit in the last place. On the host only.
    Stochastic {
        /// Selects the random bits, together with an element's position.
        seed: u64,
        /// The position of the first element.
        first: u64,
    },
}

impl Codec {
    /// Bytes of `elems` values.
    pub const fn bytes(self, elems: usize) -> usize {
        elems * self.dtype().size_bytes()
    }

    /// The dtype in which memory for it is allocated. Remainders have no dtype of their own.
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

    /// Enqueues decoding `stored` to `values`.
    ///
    /// # Errors
    /// See [`KernelError`].
    pub fn decode<D: Device>(
        self,
        kernels: &dyn Kernels<D>,
        stream: &D::Stream,
        stored: AnySlice,
        values: DeviceSlice<f32>,
    ) -> Result<(), KernelError> {
        kernels.cast(stream, stored, values.erase(), 1.0)
    }

    /// Enqueues encoding `values` to `stored`.
    ///
    /// # Errors
    /// See [`KernelError`]; stochastic rounding off the host or to another format than bf16.
    pub fn encode<D: Device>(
        self,
        kernels: &dyn Kernels<D>,
        stream: &D::Stream,
        values: DeviceSlice<f32>,
        stored: AnySlice,
        rounding: Rounding,
    ) -> Result<(), KernelError> {
        let Rounding::Stochastic { seed, first } = rounding else {
            return kernels.cast(stream, values.erase(), stored, 1.0);
        };
        check::cast(DeviceId::HOST, values.erase(), stored)?;
        let stored = stored.typed::<bf16>()?;
        stream.enqueue_host("round moments", move || {
            // SAFETY: `check` found host memory; its maker promised validity and ordered accesses.
            let values = unsafe { values.as_host() };
            // SAFETY: as above, and `check` found it disjoint from the values.
            let stored = unsafe { stored.as_host_mut() };
            round_stochastically(values, stored, seed, first);
            Ok(())
        })?;
        Ok(())
    }
}

/// Rounds up or down with probabilities by the distance, so that the mean is exact. Infinities and
/// NaNs stay so. The random bits follow from `seed` and the element's position, which counts from
/// `first`.
fn round_stochastically(wide: &[f32], narrow: &mut [bf16], seed: u64, first: u64) {
    for (i, (wide, narrow)) in wide.iter().zip(narrow).enumerate() {
        // The finalizer of SplitMix64 (Steele et al., 2014) of the element's position and the seed.
        let mut x = (first + i as u64).wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bits = wide.to_bits();
        *narrow = match wide.is_finite() {
            true => {
                let rounded = (bits.wrapping_add((x >> 48) as u32) >> 16) as u16;
                let up = bf16::from_bits(rounded);
                if up.is_finite() {
                    up
                } else {
                    bf16::from_bits((bits >> 16) as u16)
                }
            }
            false => bf16::from_f32(*wide),
        };
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
