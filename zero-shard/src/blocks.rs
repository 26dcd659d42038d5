//! Formats of few bits: values in blocks, each with a scale in fp32 and a code of 8 or 4 bits a
//! value.
//!
//! A value is `table[code] * scale`. **A block is a range of a parameter**, from its first element
//! on, and never of a shard: so what is stored does not depend on the number of ranks. Layouts
//! whose [`shard_align_elems`](crate::LayoutOptions::shard_align_elems) and
//! [`param_align_elems`](crate::LayoutOptions::param_align_elems) are multiples of a block's
//! elements put whole blocks into each shard.
//!
//! ```text
//! block   scale (4 bytes, little-endian) | codes, in order; of two 4-bit codes the first is the upper half of a byte
//! ```
//!
//! The functions here are plain loops: the definition of each format, and the oracle of the
//! kernels.
//!
//! | block | scale | decoded |
//! |---|---|---|
//! | only zeros | 0 | zeros |
//! | with an infinity or NaN | NaN | NaN, all of them |
//! | only zeros and subnormal values | 2^-126, the least normal number | the nearest values of the table |
//! | else | see [`BlockFormat`] | the nearest values of the table; with a tie the greater one ([`Nf4`](BlockFormat::Nf4): the lesser) |
//!
//! Encoding what was decoded gives the same block again, but for one of subnormal values that
//! decodes to zeros: that gives the block of zeros.

use std::sync::LazyLock;

use crate::WireFormat;

/// A format in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum BlockFormat {
    /// Codes of 8 bits, evenly spaced from -1 to 1; blocks of 256. The scale is the greatest
    /// magnitude, so that nothing is clamped.
    Int8,
    /// Codes of 4 bits, evenly spaced from -1 to 1; blocks of 128. The scale is as in `Int8`.
    Int4,
    /// Codes of 8 bits, dense near 0: the signed dynamic map of bitsandbytes and torchao; blocks of
    /// 256. The table has 1 but not -1, so the scale is the value of the greatest magnitude, with
    /// its sign (the positive one of two): that value has no error.
    Dynamic8,
    /// As `Dynamic8`, for values that are not negative: the unsigned dynamic map. Negative values
    /// are encoded as 0, and no others: with a mean of squares that is rounded to 0, the step after
    /// it would be divided by the root of one gradient's small part, and be many times too long.
    PositiveDynamic8,
    /// Codes of 4 bits, dense near 0: torchao's signed map; blocks of 128. The scale is as in
    /// `Dynamic8`.
    Dynamic4,
    /// Codes of 4 bits for values that are not negative: torchao's unsigned map, 1/16 to 1; blocks
    /// of 128. It has no zero, so that nothing is divided by the root of one. Negative values are
    /// encoded as 0.
    PositiveLinear4,
    /// NormalFloat of 4 bits (Dettmers et al., arXiv 2305.14314), with the table of bitsandbytes;
    /// blocks of 64. The scale is the greatest magnitude. With a tie the code is the lesser one, as
    /// in bitsandbytes.
    Nf4,
}

impl BlockFormat {
    /// All formats.
    pub const ALL: [Self; 7] = [
        Self::Int8,
        Self::Int4,
        Self::Dynamic8,
        Self::PositiveDynamic8,
        Self::Dynamic4,
        Self::PositiveLinear4,
        Self::Nf4,
    ];

    /// Elements that every format's blocks divide: the alignment of layouts.
    pub const ALIGN_ELEMS: u64 = 256;

    /// Parameters with fewer elements have no state in blocks.
    pub const LEAST_ELEMS: u64 = 4096;

    /// Whether state of a parameter of `elems` elements is in blocks: not that of small parameters,
    /// such as biases and norms, and not that of parameters that are no whole blocks. torchao's
    /// optimizers have the same rule, but for the part of a parameter on a rank.
    pub const fn holds(elems: u64) -> bool {
        elems >= Self::LEAST_ELEMS && elems.is_multiple_of(Self::ALIGN_ELEMS)
    }

    /// Elements of a block.
    pub const fn elems(self) -> usize {
        match self {
            Self::Int8 | Self::Dynamic8 | Self::PositiveDynamic8 => 256,
            Self::Int4 | Self::Dynamic4 | Self::PositiveLinear4 => 128,
            Self::Nf4 => 64,
        }
    }

    /// Bits of a code: 8 or 4.
    pub const fn code_bits(self) -> usize {
        match self {
            Self::Int8 | Self::Dynamic8 | Self::PositiveDynamic8 => 8,
            Self::Int4 | Self::Dynamic4 | Self::PositiveLinear4 | Self::Nf4 => 4,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        size_of::<f32>() + self.elems() * self.code_bits() / 8
    }

    /// Bytes of `elems` elements from the start of a block on; the last block may have fewer
    /// elements, not fewer bytes.
    pub const fn bytes(self, elems: usize) -> usize {
        elems.div_ceil(self.elems()) * self.block_bytes()
    }

    /// Whether the scale has the sign of the value with the greatest magnitude.
    pub const fn has_signed_scale(self) -> bool {
        matches!(self, Self::Dynamic8 | Self::Dynamic4)
    }

    /// Whether values may be negative.
    pub const fn is_signed(self) -> bool {
        !matches!(self, Self::PositiveDynamic8 | Self::PositiveLinear4)
    }

    /// The value of each code where the scale is 1, in ascending order: 256 or 16 values. Encoding
    /// never writes code 0 of `Int8` and `Int4`.
    pub fn table(self) -> &'static [f32] {
        &TABLES[self as usize].values
    }

    /// `midpoints()[i]` is the least value of code `i + 1` where the scale is 1, so that the code
    /// of a value is the number of midpoints at or below it.
    pub fn midpoints(self) -> &'static [f32] {
        &TABLES[self as usize].midpoints
    }

    /// The greatest error of a value of a finite block, relative to the magnitude of the block's
    /// scale: half of the table's widest gap, and the roundings of fp32. For `Int8` and `Int4` that
    /// is 1 / (2^bits - 2). It does not hold for negative values in a format that is not
    /// [signed](Self::is_signed).
    pub fn error_bound(self) -> f32 {
        TABLES[self as usize].error_bound
    }

    /// As collectives send it.
    pub const fn wire(self) -> WireFormat {
        WireFormat {
            block_elems: self.elems() as u64,
            block_bytes: self.block_bytes() as u64,
        }
    }

    /// Encodes `values`, from the start of a block on. Elements behind the last one are encoded as
    /// zeros.
    ///
    /// # Panics
    /// The length of `blocks` is not [`Self::bytes`].
    pub fn encode(self, values: &[f32], blocks: &mut [u8]) {
        assert_eq!(blocks.len(), self.bytes(values.len()), "bytes of blocks");
        let blocks = blocks.chunks_exact_mut(self.block_bytes());
        for (values, block) in values.chunks(self.elems()).zip(blocks) {
            self.encode_block(values, block);
        }
    }

    fn encode_block(self, values: &[f32], block: &mut [u8]) {
        let (scale_bytes, codes) = block.split_at_mut(size_of::<f32>());
        let scale = self.scale(values);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        let reciprocal = Self::reciprocal(scale);
        let code = |i| match values.get(i) {
            Some(value) if reciprocal != 0.0 => self.code(value * reciprocal),
            _ => self.code(0.0),
        };
        match self.code_bits() {
            8 => (0..).zip(codes).for_each(|(i, byte)| *byte = code(i)),
            _ => (0..)
                .zip(codes)
                .for_each(|(i, byte)| *byte = code(2 * i) << 4 | code(2 * i + 1)),
        }
    }

    /// The scale of a block.
    pub fn scale(self, values: &[f32]) -> f32 {
        if values.iter().any(|value| !value.is_finite()) {
            return f32::NAN;
        }
        let greatest = values.iter().copied().fold(0.0, f32::max);
        let least = values.iter().copied().fold(0.0, f32::min);
        let magnitude = match self.is_signed() {
            true => f32::max(greatest, -least),
            false => greatest,
        };
        if magnitude == 0.0 {
            return 0.0;
        }
        match self.has_signed_scale() && -least > greatest && magnitude >= f32::MIN_POSITIVE {
            true => least,
            // Products with a smaller scale would be rounded by more than the bound.
            false => magnitude.max(f32::MIN_POSITIVE),
        }
    }

    /// The factor of a block's values before [`Self::code`]: 0 for a scale of 0 or NaN, where the
    /// code of each value is that of 0.
    pub fn reciprocal(scale: f32) -> f32 {
        match scale == 0.0 || scale.is_nan() {
            true => 0.0,
            false => scale.recip(),
        }
    }

    /// The code of a value times the [reciprocal](Self::reciprocal) of the scale.
    pub fn code(self, value: f32) -> u8 {
        let midpoints = self.midpoints();
        midpoints.partition_point(|midpoint| *midpoint <= value) as u8
    }

    /// Decodes `values.len()` elements from the start of a block on.
    ///
    /// # Panics
    /// The length of `blocks` is not [`Self::bytes`].
    pub fn decode(self, blocks: &[u8], values: &mut [f32]) {
        assert_eq!(blocks.len(), self.bytes(values.len()), "bytes of blocks");
        let table = self.table();
        let blocks = blocks.chunks_exact(self.block_bytes());
        for (values, block) in values.chunks_mut(self.elems()).zip(blocks) {
            let (scale, codes) = block.split_at(size_of::<f32>());
            let scale = f32::from_le_bytes(scale.try_into().unwrap_or_default());
            for (i, value) in values.iter_mut().enumerate() {
                let code = match self.code_bits() {
                    8 => codes[i],
                    _ if i % 2 == 0 => codes[i / 2] >> 4,
                    _ => codes[i / 2] & 15,
                };
                *value = table[usize::from(code)] * scale;
            }
        }
    }
}

struct Table {
    values: Vec<f32>,
    midpoints: Vec<f32>,
    error_bound: f32,
}

static TABLES: LazyLock<[Table; 7]> = LazyLock::new(|| {
    BlockFormat::ALL.map(|format| {
        let values = match format {
            BlockFormat::Int8 => even(127),
            BlockFormat::Int4 => even(7),
            BlockFormat::Dynamic8 => dynamic(true, 7, 8),
            BlockFormat::PositiveDynamic8 => dynamic(false, 7, 8),
            BlockFormat::Dynamic4 => dynamic(true, 3, 4),
            BlockFormat::PositiveLinear4 => (1..=16).map(|code| code as f32 / 16.0).collect(),
            BlockFormat::Nf4 => NF4.to_vec(),
        };
        let ties_up = format != BlockFormat::Nf4;
        Table::new(values, ties_up)
    })
});

impl Table {
    fn new(values: Vec<f32>, ties_up: bool) -> Self {
        let pairs = || values.windows(2);
        let midpoint = |pair: &[f32]| {
            // The first code of even tables is never written, not even where -1 is rounded down.
            if pair[0] == pair[1] {
                return f32::NEG_INFINITY;
            }
            // Only 0 has the code of 0 where values are not negative.
            if values[0] == 0.0 && pair[0] == 0.0 {
                return f32::from_bits(1);
            }
            let middle = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
            if ties_up { middle } else { middle.next_up() }
        };
        let gap = |pair: &[f32]| f64::from(pair[1]) - f64::from(pair[0]);
        let widest = pairs().map(gap).fold(0.0, f64::max);
        // A table that does not reach -1 or 0 is that far from the values there.
        let below = f64::from(values[0]) + if values[0] < 0.0 { 1.0 } else { 0.0 };
        // In units of EPSILON: the reciprocal is wrong by at most 1/2, and by 2 where it is
        // subnormal; its product with the value, the product with the table's value, midpoint and
        // table by 1/2.
        let error_bound = (widest / 2.0).max(below) + 4.0 * f64::from(f32::EPSILON);
        Self {
            midpoints: pairs().map(midpoint).collect(),
            error_bound: error_bound as f32,
            values,
        }
    }
}

/// -1 to 1 in steps of 1 / most; the first code is never written.
fn even(most: i32) -> Vec<f32> {
    let codes = std::iter::once(-most).chain(-most..=most);
    codes
        .map(|code| (f64::from(code) / f64::from(most)) as f32)
        .collect()
}

/// The dynamic map of 2^bits values in bitsandbytes and torchao: for each power of ten from 0 down,
/// half as many values, evenly spaced from 0.1 to 1. Source: Dettmers, arXiv 1511.04561.
fn dynamic(signed: bool, exponents: i32, bits: u32) -> Vec<f32> {
    let fraction_bits = bits as i32 - 1 - exponents;
    let mut values = vec![0.0, 1.0];
    let mut add = |items: i32, exponent: i32| {
        let power = 10_f64.powi(exponent) as f32;
        let bounds: Vec<f32> = (0..=items).map(|i| linspace(i, items)).collect();
        for pair in bounds.windows(2) {
            let mean = (pair[0] + pair[1]) / 2.0 * power;
            values.push(mean);
            if signed {
                values.push(-mean);
            }
        }
    };
    for exponent in 0..exponents {
        let doubled = if signed { 0 } else { 1 };
        add(
            1 << (exponent + fraction_bits + doubled),
            exponent + 1 - exponents,
        );
    }
    if fraction_bits > 0 {
        add((1 << fraction_bits) - 1, 0);
    }
    values.sort_by(f32::total_cmp);
    values
}

/// Element `i` of `torch.linspace(0.1, 1, items + 1)`.
fn linspace(i: i32, items: i32) -> f32 {
    let step = (1.0 - 0.1_f32) / items as f32;
    if i < (items + 1) / 2 {
        step.mul_add(i as f32, 0.1)
    } else {
        (-step).mul_add((items - i) as f32, 1.0)
    }
}

/// The table of `bnb_4bit` in bitsandbytes 0.50.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
