//! The format of a stored array of fp32 values.
//!
//! Operations compute on fp32. An array in another format is decoded where it is read, and encoded
//! where it is written, a few thousand elements at a time.

use std::ops::Range;

use half::bf16;
use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_shard::BlockFormat;

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
    /// Codes of 8 or 4 bits in blocks, stored as bytes.
    Blocks(BlockFormat),
}

impl Codec {
    /// Elements that are stored together: ranges of an array begin at multiples of it.
    pub const fn block_elems(self) -> usize {
        match self {
            Self::Blocks(format) => format.elems(),
            _ => 1,
        }
    }

    /// Bytes of `elems` values.
    pub const fn bytes(self, elems: usize) -> usize {
        match self {
            Self::Blocks(format) => format.bytes(elems),
            _ => elems * self.dtype().size_bytes(),
        }
    }

    /// The dtype in which memory for it is allocated. Remainders are integers of 16 bits, blocks
    /// are bytes.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Remainders => DType::F16,
            Self::Blocks(_) => DType::U8,
        }
    }
}

/// An array in a format.
#[derive(Clone, Copy, Debug)]
pub struct CodedSlice {
    /// The format.
    pub codec: Codec,
    /// The memory, of the format's dtype.
    pub memory: AnySlice,
}

impl CodedSlice {
    /// An array in this format.
    pub const fn new(codec: Codec, memory: AnySlice) -> Self {
        Self { codec, memory }
    }

    /// The elements `range`, whole blocks but for the array's last one.
    ///
    /// # Panics
    /// The range is not within the array.
    pub fn slice(self, range: Range<usize>) -> Self {
        let memory = match self.codec {
            Codec::Blocks(format) => {
                debug_assert!(
                    range.start.is_multiple_of(format.elems()),
                    "a block's start"
                );
                let start = format.bytes(range.start);
                self.memory.slice(start..start + format.bytes(range.len()))
            }
            _ => self.memory.slice(range),
        };
        Self { memory, ..self }
    }

    /// Whether the memory is that of `elems` values.
    pub(crate) fn has_elems(&self, elems: usize) -> bool {
        self.memory.dtype() == self.codec.dtype()
            && self.memory.len_bytes() == self.codec.bytes(elems)
    }
}

impl From<DeviceSlice<f32>> for CodedSlice {
    fn from(values: DeviceSlice<f32>) -> Self {
        Self::new(Codec::Fp32, values.erase())
    }
}

/// The formats of running averages of gradients, which
/// [`UpdateRule::slots`](crate::UpdateRule::slots) chooses from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AverageCodecs {
    /// Of values of both signs, such as a momentum.
    pub signed: Codec,
    /// Of values that are not negative, such as a mean of squares.
    pub positive: Codec,
}

impl AverageCodecs {
    /// Codes of 8 bits, as 8-bit optimizers have them.
    pub const EIGHT_BITS: Self = Self {
        signed: Codec::Blocks(BlockFormat::Dynamic8),
        positive: Codec::Blocks(BlockFormat::PositiveDynamic8),
    };

    /// Codes of 4 bits, as torchao's 4-bit optimizers have them.
    pub const FOUR_BITS: Self = Self {
        signed: Codec::Blocks(BlockFormat::Dynamic4),
        positive: Codec::Blocks(BlockFormat::PositiveLinear4),
    };
}

impl From<Codec> for AverageCodecs {
    fn from(codec: Codec) -> Self {
        Self {
            signed: codec,
            positive: codec,
        }
    }
}

/// The rounding of values that are encoded as bf16. Blocks are rounded to nearest always.
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

impl Rounding {
    /// From the element at `start` on.
    pub(crate) fn starting_at(self, start: usize) -> Self {
        match self {
            Self::Nearest => self,
            Self::Stochastic { seed, first } => Self::Stochastic {
                seed,
                first: first + start as u64,
            },
        }
    }

    /// Of slot `nth` of several, each of which has other random bits.
    pub(crate) fn of_slot(self, nth: usize, slots: usize) -> Self {
        match self {
            Self::Nearest => self,
            Self::Stochastic { seed, first } => Self::Stochastic {
                seed: seed.wrapping_mul(slots as u64).wrapping_add(nth as u64),
                first,
            },
        }
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
