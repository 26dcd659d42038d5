//! Block formats by SIMD: the bits of [`BlockFormat::encode`] and [`BlockFormat::decode`].
//!
//! A code is found by one lookup. The upper bits of a value are the number of a *bucket*: a range
//! so narrow that it has at most one midpoint. The bucket's entry has the code of its first value
//! in the upper 8 bits, and 2^24 less the midpoint's place in the bucket below them. Added to the
//! place of the value, a value at or above the midpoint carries into the code.

use std::sync::LazyLock;

use multiversion::multiversion;
use zero_shard::BlockFormat;

/// Bits of a value's place in its bucket, and buckets, for codes of 8 bits. Of the larger tables a
/// block touches the buckets between its least and its greatest magnitude: 512 bytes for each power
/// of two.
const SHIFT_8: u32 = 16;
const BUCKETS_8: usize = 1 << (32 - SHIFT_8);
/// As for 8 bits.
const SHIFT_4: u32 = 20;
const BUCKETS_4: usize = 1 << (32 - SHIFT_4);
/// Elements of the largest block.
const MOST_ELEMS: usize = 256;

/// A format's tables.
pub(crate) enum Coder {
    Eight(Eight),
    Four(Four),
}

/// The entries of the buckets of codes of 8 bits, and the value of each code.
pub(crate) struct Eight {
    buckets: Box<[u32; BUCKETS_8]>,
    values: Box<[f32; 256]>,
}

/// The entries of the buckets of codes of 4 bits, and the two values of each byte.
pub(crate) struct Four {
    buckets: Box<[u32; BUCKETS_4]>,
    pairs: Box<[[f32; 2]; 256]>,
}

/// Tables of codes of some bits.
pub(crate) trait Codes {
    const BITS: usize;

    /// Decodes as many values as there are, which start at the first code, of one block.
    fn decode(&self, codes: &[u8], scale: f32, values: &mut [f32]);

    /// Writes the codes of a block: that of 0 behind the values, and where the reciprocal is 0.
    fn encode(&self, values: &[f32], reciprocal: f32, codes: &mut [u8]);
}

impl Codes for Eight {
    const BITS: usize = 8;

    #[inline(always)]
    fn decode(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        let table = &*self.values;
        for (value, code) in values.iter_mut().zip(codes) {
            *value = table[usize::from(*code)] * scale;
        }
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], reciprocal: f32, codes: &mut [u8]) {
        write_codes(&self.buckets, values, reciprocal, codes);
    }
}

impl Codes for Four {
    const BITS: usize = 4;

    #[inline(always)]
    fn decode(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        let table: &[u64; 256] = bytemuck::cast_ref(&*self.pairs);
        let (groups, last) = values.as_chunks_mut::<64>();
        let (of_groups, of_last) = codes.as_chunks::<32>();
        for (values, codes) in groups.iter_mut().zip(of_groups) {
            let mut pairs = [0u64; 32];
            for i in 0..32 {
                pairs[i] = table[usize::from(codes[i])];
            }
            let unscaled: [f32; 64] = bytemuck::cast(pairs);
            for i in 0..64 {
                values[i] = unscaled[i] * scale;
            }
        }
        let rest = of_groups
            .get(groups.len())
            .map_or(of_last, |codes| &codes[..]);
        for (values, byte) in last.chunks_mut(2).zip(rest) {
            for (value, unscaled) in values.iter_mut().zip(self.pairs[usize::from(*byte)]) {
                *value = unscaled * scale;
            }
        }
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], reciprocal: f32, codes: &mut [u8]) {
        let mut of_values = [0; MOST_ELEMS];
        let of_values = &mut of_values[..2 * codes.len()];
        write_codes(&self.buckets, values, reciprocal, of_values);
        for (byte, pair) in codes.iter_mut().zip(of_values.as_chunks::<2>().0) {
            let pair = u16::from_le_bytes(*pair);
            *byte = (pair << 4 | pair >> 8) as u8;
        }
    }
}

static CODERS: [LazyLock<Coder>; BlockFormat::ALL.len()] = [
    LazyLock::new(|| Coder::new(BlockFormat::ALL[0])),
    LazyLock::new(|| Coder::new(BlockFormat::ALL[1])),
    LazyLock::new(|| Coder::new(BlockFormat::ALL[2])),
    LazyLock::new(|| Coder::new(BlockFormat::ALL[3])),
    LazyLock::new(|| Coder::new(BlockFormat::ALL[4])),
    LazyLock::new(|| Coder::new(BlockFormat::ALL[5])),
    LazyLock::new(|| Coder::new(BlockFormat::ALL[6])),
];

impl Coder {
    /// Those of a format, made at the first call.
    pub(crate) fn of(format: BlockFormat) -> &'static Self {
        &CODERS[format as usize]
    }

    fn new(format: BlockFormat) -> Self {
        let table = format.table();
        match format.code_bits() {
            8 => Self::Eight(Eight {
                buckets: buckets::<SHIFT_8, BUCKETS_8>(format),
                values: Box::new(std::array::from_fn(|code| table[code])),
            }),
            _ => Self::Four(Four {
                buckets: buckets::<SHIFT_4, BUCKETS_4>(format),
                pairs: Box::new(std::array::from_fn(|byte| {
                    [table[byte >> 4], table[byte & 15]]
                })),
            }),
        }
    }
}

/// A number that ascends with the value.
#[inline(always)]
fn key(value: f32) -> u32 {
    let bits = value.to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)
}

/// The entries of all buckets of a format.
fn buckets<const SHIFT: u32, const BUCKETS: usize>(format: BlockFormat) -> Box<[u32; BUCKETS]> {
    let code = |key: u32| {
        let bits = if key >> 31 == 1 {
            key ^ (1 << 31)
        } else {
            !key
        };
        // Values beyond 1, of which infinities and NaNs have keys too, are not encoded.
        let value = f32::from_bits(bits);
        let beyond = if bits >> 31 == 0 { 2.0 } else { -2.0 };
        u32::from(format.code(if value.abs() <= 2.0 { value } else { beyond }))
    };
    let entry = |bucket: usize| {
        let start = (bucket as u32) << SHIFT;
        let base = code(start);
        let last = (1 << SHIFT) - 1;
        let mut low = 0;
        let mut high = last + 1;
        // The first place of the next code, or the end.
        while low < high {
            let middle = low + (high - low) / 2;
            match code(start + middle.min(last)) == base {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        let beyond = low.min(last + 1);
        debug_assert!(code(start + last) <= base + 1, "one midpoint in a bucket");
        (base << 24) + ((1 << 24) - beyond)
    };
    let entries: Box<[u32]> = (0..BUCKETS).map(entry).collect();
    entries
        .try_into()
        .unwrap_or_else(|_| unreachable!("as many as were made"))
}

/// The code of a value times the block's reciprocal: [`BlockFormat::code`].
#[inline(always)]
fn code<const BUCKETS: usize>(buckets: &[u32; BUCKETS], value: f32) -> u8 {
    let shift = u32::BITS - BUCKETS.ilog2();
    let key = key(value);
    let within = key & ((1 << shift) - 1);
    (buckets[(key >> shift) as usize].wrapping_add(within) >> 24) as u8
}

/// Encodes whole blocks, and a last one that may be shorter.
pub(super) fn encode(format: BlockFormat, values: &[f32], blocks: &mut [u8]) {
    match Coder::of(format) {
        Coder::Eight(codes) => encode_all(format, codes, values, blocks),
        Coder::Four(codes) => encode_all(format, codes, values, blocks),
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn encode_all<C: Codes>(format: BlockFormat, codes: &C, values: &[f32], blocks: &mut [u8]) {
    encode_loop(format, codes, values, blocks);
}

#[inline(always)]
fn encode_loop<C: Codes>(format: BlockFormat, codes: &C, values: &[f32], blocks: &mut [u8]) {
    let blocks = blocks.chunks_exact_mut(format.block_bytes());
    for (values, block) in values.chunks(format.elems()).zip(blocks) {
        let (of_block, reciprocal) = begin(format, values, block);
        codes.encode(values, reciprocal, of_block);
    }
}

/// Writes a block's scale. Returns the place of its codes, and what the values are to be multiplied
/// by for them.
#[inline(always)]
pub(crate) fn begin<'a>(
    format: BlockFormat,
    values: &[f32],
    block: &'a mut [u8],
) -> (&'a mut [u8], f32) {
    let (scale_bytes, codes) = block.split_at_mut(size_of::<f32>());
    let scale = scale(format, values);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    (codes, BlockFormat::reciprocal(scale))
}

/// Writes a code a byte: that of 0 behind the values, and where the reciprocal is 0.
#[inline(always)]
fn write_codes<const BUCKETS: usize>(
    buckets: &[u32; BUCKETS],
    values: &[f32],
    reciprocal: f32,
    codes: &mut [u8],
) {
    if reciprocal == 0.0 || values.len() < codes.len() {
        codes.fill(code(buckets, 0.0));
    }
    if reciprocal != 0.0 {
        for (byte, value) in codes.iter_mut().zip(values) {
            *byte = code(buckets, value * reciprocal);
        }
    }
}

/// [`BlockFormat::scale`], by the order of floats' bits.
#[inline(always)]
fn scale(format: BlockFormat, values: &[f32]) -> f32 {
    let mut magnitude = 0;
    let mut greatest = 0;
    for value in values {
        let bits = value.to_bits() as i32;
        magnitude = magnitude.max(bits & i32::MAX);
        greatest = greatest.max(bits);
    }
    let least_normal = f32::MIN_POSITIVE.to_bits() as i32;
    if magnitude > f32::MAX.to_bits() as i32 {
        return f32::NAN;
    }
    if !format.is_signed() {
        magnitude = greatest;
    }
    if magnitude == 0 {
        return 0.0;
    }
    let scale = f32::from_bits(magnitude.max(least_normal) as u32);
    match format.has_signed_scale() && magnitude > greatest && magnitude >= least_normal {
        true => -scale,
        false => scale,
    }
}

/// Decodes whole blocks, and a last one that may be shorter.
pub(super) fn decode(format: BlockFormat, blocks: &[u8], values: &mut [f32]) {
    match Coder::of(format) {
        Coder::Eight(codes) => decode_all(format, codes, blocks, values),
        Coder::Four(codes) => decode_all(format, codes, blocks, values),
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn decode_all<C: Codes>(format: BlockFormat, codes: &C, blocks: &[u8], values: &mut [f32]) {
    decode_loop(format, codes, blocks, values);
}

#[inline(always)]
fn decode_loop<C: Codes>(format: BlockFormat, codes: &C, blocks: &[u8], values: &mut [f32]) {
    let blocks = blocks.chunks_exact(format.block_bytes());
    for (values, block) in values.chunks_mut(format.elems()).zip(blocks) {
        let (scale, of_block) = split(block);
        codes.decode(of_block, scale, values);
    }
}

/// The scale and the codes of a block.
#[inline(always)]
pub(crate) fn split(block: &[u8]) -> (f32, &[u8]) {
    let (scale, codes) = block.split_at(size_of::<f32>());
    (
        f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]),
        codes,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loops as they are on any CPU, and with AVX2.
    fn encode_by(avx2: bool, format: BlockFormat, values: &[f32], blocks: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(format: BlockFormat, values: &[f32], blocks: &mut [u8]) {
            loops(format, values, blocks);
        }

        #[inline(always)]
        fn loops(format: BlockFormat, values: &[f32], blocks: &mut [u8]) {
            match Coder::of(format) {
                Coder::Eight(codes) => encode_loop(format, codes, values, blocks),
                Coder::Four(codes) => encode_loop(format, codes, values, blocks),
            }
        }

        #[cfg(target_arch = "x86_64")]
        if avx2 && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has both features.
            return unsafe { with_avx2(format, values, blocks) };
        }
        let _ = avx2;
        loops(format, values, blocks);
    }

    /// As [`encode_by`].
    fn decode_by(avx2: bool, format: BlockFormat, blocks: &[u8], values: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn with_avx2(format: BlockFormat, blocks: &[u8], values: &mut [f32]) {
            loops(format, blocks, values);
        }

        #[inline(always)]
        fn loops(format: BlockFormat, blocks: &[u8], values: &mut [f32]) {
            match Coder::of(format) {
                Coder::Eight(codes) => decode_loop(format, codes, blocks, values),
                Coder::Four(codes) => decode_loop(format, codes, blocks, values),
            }
        }

        #[cfg(target_arch = "x86_64")]
        if avx2 && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has both features.
            return unsafe { with_avx2(format, blocks, values) };
        }
        let _ = avx2;
        loops(format, blocks, values);
    }

    #[test]
    #[cfg_attr(
        miri,
        ignore = "making the tables did not end in four minutes under Miri"
    )]
    fn instruction_sets_agree() {
        let mut x = 1u32;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((x >> 8) as f32 / (1 << 23) as f32 - 1.0).powi(5)
        };
        let mut values: Vec<f32> = (0..5000 + 37).map(|_| next()).collect();
        values[700] = f32::NAN;
        values[1500] = f32::NEG_INFINITY;
        values[2048..2400].fill(0.0);
        values[3000..3300].fill(1e-41);
        for format in BlockFormat::ALL {
            let mut expected = vec![0; format.bytes(values.len())];
            encode(format, &values, &mut expected);
            let mut decoded = vec![0.0; values.len()];
            decode(format, &expected, &mut decoded);
            for avx2 in [true, false] {
                let mut blocks = vec![1; expected.len()];
                encode_by(avx2, format, &values, &mut blocks);
                assert_eq!(blocks, expected, "{format:?}");
                let mut ours = vec![1.0; values.len()];
                decode_by(avx2, format, &blocks, &mut ours);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&ours), bits(&decoded), "{format:?}");
            }
        }
    }

    /// Codes ascend with the values, so those around each midpoint show that all are right.
    #[test]
    #[cfg_attr(
        miri,
        ignore = "making the tables did not end in four minutes under Miri"
    )]
    fn codes_around_every_midpoint() {
        for format in BlockFormat::ALL {
            let ours = |value: f32| match Coder::of(format) {
                Coder::Eight(codes) => code(&codes.buckets, value),
                Coder::Four(codes) => code(&codes.buckets, value),
            };
            let midpoints = format.midpoints().iter().filter(|m| m.is_finite());
            let around = midpoints.flat_map(|m| [m.next_down(), *m, m.next_up()]);
            let limits = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 1.000_001, -1.000_001];
            for value in around.chain(limits) {
                assert_eq!(ours(value), format.code(value), "{format:?}: {value:e}");
            }
        }
    }
}
